"""From the row messages of one relation version to its records.

Owns which records a row makes: one `c`, `u` or `d` for each route, d(old key) and c(new key) when an update moves a row
to another key. Rows that have every column go through the generated functions of codegen.py; this module reads the
others column by column: nulls, columns that PostgreSQL did not send, old tuples, deletes. Both write the same bytes,
which a test proves. Sans-IO.

- `before` is what PostgreSQL sent of the old row: the columns of its replica identity, all when that is FULL, or null.
- A column that an update left alone and PostgreSQL did not send (TOAST) is taken from the old row when that was sent;
  otherwise it is absent from `after` and named in `source.unchanged`.
- A row whose key moves for one route is d and c for all of them, so that positions are the same in all topics. Each of
  the two tells the other's key in a header: what the `c` has not, its reader finds under the old key.
- A row makes all of its records or, when it raises, none. ValueError, KeyError, IndexError and struct.error mean that
  the bytes are no row of this relation; whoever calls gives them a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from struct import Struct
from typing import Final

from walstream.capture.codegen import (
    FIRST_PART,
    NamedType,
    Part,
    Table,
    Target,
    copy_function,
    message_function,
    moving_columns,
    object_function,
    walking_function,
)
from walstream.capture.columns import converter
from walstream.capture.escaping import quoted_name
from walstream.capture.outbox import Outbox
from walstream.capture.provenance import DELETE_OP, INSERT_OP, NEW_KEY, OLD_KEY, Context, Header, Origin, Output
from walstream.capture.shapes import NULL, ODD, SENT, UNSENT, Learned, RowFunction, Shape, fields_shape, values_shape
from walstream.capture.snapshot_copy import fields
from walstream.capture.streams import Streams
from walstream.postgres.messages import UNCHANGED, Unchanged, Value
from walstream.postgres.relations import RelationInfo
from walstream.postgres.types import TypeInfo

_TEXT: Final = ord("t")
_NULL: Final = ord("n")
_UNCHANGED: Final = ord("u")
_NEW: Final = ord("N")
_KEY: Final = ord("K")
_OLD: Final = ord("O")

_length_at = Struct(">I").unpack_from


class TableRenderer:
    """Renders the rows of one version of a relation: `insert`, `update`, `delete` and `copy` are functions to call."""

    def __init__(self, info: RelationInfo, types: Sequence[TypeInfo], streams: Streams, database: str) -> None:
        """Take a version and the types of its columns. Raises ConfigError when a rule of the streams cannot be."""
        self.info = info
        self.types = tuple(types)
        self.origin = Origin(database, info.schema, info.table, info.version, streams.tenant_of(info))
        columns = tuple(NamedType(column.name, known) for column, known in zip(info.columns, types, strict=True))
        identity = tuple(index for index, column in enumerate(info.columns) if column.is_key)
        self._table = Table(columns, identity, streams.tenant_column(info))
        self._all = tuple(range(len(columns)))
        self._count = len(columns).to_bytes(2)
        self._names = [quoted_name(column.name) for column in columns]
        self._converters = [converter(known) for known in types]
        self._objects: dict[tuple[int, ...], Callable[[Sequence[Value]], bytes]] = {}
        # All of them at once, so that a rule that cannot be is told before the first row.
        streams.meet([(info.schema, info.table)])
        self._targets = {name: streams.targets(info, name) for name in ("insert", "update", "delete", "snapshot")}
        self._outboxes = {
            name: [
                Outbox(rule, info, types, partial(streams.outbox_topic, rule, info), streams.table_topics.keys())
                for rule in streams.outbox_rules(info, name)
            ]
            for name in ("insert", "snapshot")
        }
        self.truncate_targets = streams.targets(info, "truncate")
        """Where it is told that the table was emptied."""

    @cached_property
    def insert(self) -> RowFunction:
        """Render an insert."""
        return self._generated("insert", self._insert, b"N")

    @cached_property
    def update(self) -> RowFunction:
        """Render an update."""
        return self._generated("update", self._update, b"ON" if self.info.replica_identity == "f" else b"N")

    @cached_property
    def delete(self) -> RowFunction:
        """Render a delete."""
        return self._generated("delete", self._delete, b"O" if self.info.replica_identity == "f" else b"K")

    @cached_property
    def copy(self) -> RowFunction:
        """Render a row of COPY's text format."""
        targets = self._targets["snapshot"]
        if self._outboxes["snapshot"] or not targets:
            return self._copy if self._outboxes["snapshot"] else _skip
        learned = Learned(
            self._copy,
            partial(fields_shape, self.types),
            lambda shape: copy_function(self._table, shape, targets),
        )
        return copy_function(self._table, bytes(len(self._all)), targets, learned)

    def _generated(self, operation: str, plainly: RowFunction, letters: bytes) -> RowFunction:
        """Return the function for an operation whose messages usually have these parts."""
        targets = self._targets[operation]
        if self._outboxes.get(operation) or (operation == "delete" and any(target.tombstones for target in targets)):
            return plainly
        if not targets:
            return _skip
        size = len(self._all)

        def build(shape: Shape, otherwise: RowFunction | None = None) -> RowFunction:
            parts = [Part(letters[at : at + 1], shape[size * at : size * (at + 1)]) for at in range(len(letters))]
            return message_function(self._table, parts, targets, otherwise)

        otherwise = walking_function(self._table, targets, plainly) if letters == b"N" else plainly
        learned = Learned(otherwise, partial(self._shape, letters, targets), build)
        first = bytes(size) if letters != b"K" else bytes(0 if i in self._table.identity else NULL for i in self._all)
        return build(first * len(letters) if letters != b"K" else first, learned)

    def _shape(self, letters: bytes, targets: Sequence[Target], data: bytes) -> Shape | None:
        """Return the shape of a message that has these parts, unless it takes more than a function does."""
        shapes: list[Shape] = []
        position = FIRST_PART
        for letter in letters:
            if data[position] != letter:
                return None
            values, position, _ = self._tuple(data, position + 1)
            shapes.append(values_shape(self.types, values))
        keys = moving_columns(self._table, targets)
        if len(letters) == 1:
            return None if any(shapes[0][index] == UNSENT for index in keys) else shapes[0]
        # What the new row has not may be in the old one, and a key that has moved makes two records.
        old, new = shapes
        is_usual = UNSENT not in new and all(old[index] == new[index] in (SENT, ODD) for index in keys)
        return old + new if is_usual else None

    def _insert(self, data: bytes, context: Context, seq: int) -> int:
        if data[FIRST_PART] != _NEW:
            raise ValueError("an insert has no new row")
        new, is_whole = self._last_tuple(data, FIRST_PART + 1)
        for record in self._row_records("insert", None, new, is_whole, context, seq):
            context.emit(record)
        return seq + 1

    def _update(self, data: bytes, context: Context, seq: int) -> int:
        letter, position, old = data[FIRST_PART], FIRST_PART, None
        if letter in (_KEY, _OLD):
            old, position, _ = self._tuple(data, FIRST_PART + 1)
        if data[position] != _NEW:
            raise ValueError("an update has no new row")
        new, is_whole = self._last_tuple(data, position + 1)
        if old is None:
            records = self._row_records("update", None, new, is_whole, context, seq)
        else:
            if not is_whole:
                is_whole = self._complete(new, old, letter)
            before = self._before(old, letter)
            if self._has_moved(old, new):
                records = self._moved_records(before, old, new, is_whole, context, seq)
                seq += 1
            else:
                records = self._row_records("update", before, new, is_whole, context, seq)
        for record in records:
            context.emit(record)
        return seq + 1

    def _delete(self, data: bytes, context: Context, seq: int) -> int:
        letter = data[FIRST_PART]
        if letter not in (_KEY, _OLD):
            raise ValueError("a delete has no old row")
        old, _ = self._last_tuple(data, FIRST_PART + 1)
        for record in self._deleted_records("delete", self._before(old, letter), old, context, seq):
            context.emit(record)
        return seq + 1

    def _copy(self, line: bytes, context: Context, seq: int) -> int:
        values: list[Value] = [*fields(line)] if self._all else []
        if len(values) != len(self._all):
            raise ValueError(f"a row of COPY has {len(values)} columns, its table {len(self._all)}")
        for record in self._row_records("snapshot", None, values, True, context, seq):
            context.emit(record)
        return seq + 1

    def _row_records(
        self,
        operation: str,
        before: bytes | None,
        new: list[Value],
        is_whole: bool,
        context: Context,
        seq: int,
        moved_from: list[Value] | None = None,
    ) -> list[Output]:
        """Return the records of a row that is there now."""
        number = b"%d" % seq
        headers = self._headers(context, new, number)
        records: list[Output] = []
        if targets := self._targets[operation]:
            if is_whole:
                after, end = self._object(self._all)(new), context.end
            else:
                after, end = self._partial(new, context)
            value = b"".join((b'{"before":', before or b"null", b',"after":', after, context.source, number, end))
            for target in targets:
                link = self._link(OLD_KEY, target, moved_from) if moved_from else ()
                records.append((target.topic, value, self._key(target, new), [*headers, *link]))
        for outbox in self._outboxes.get(operation, ()):
            records.append(outbox.message(new, context, headers))
        return records

    def _deleted_records(
        self,
        operation: str,
        before: bytes,
        old: list[Value],
        context: Context,
        seq: int,
        moved_to: list[Value] | None = None,
    ) -> list[Output]:
        """Return the records of a row that is there no more."""
        number = b"%d" % seq
        headers = self._headers(context, old, number)
        value = b"".join((b'{"before":', before, b',"after":null', context.source, number, context.end))
        records: list[Output] = []
        for target in self._targets[operation]:
            key = self._key(target, old)
            link = self._link(NEW_KEY, target, moved_to) if moved_to else ()
            records.append((target.topic, value, key, [*headers, *link]))
            if target.tombstones and key is not None:
                records.append((target.topic, None, key, [*headers, *link, *context.rule_headers]))
        return records

    def _moved_records(
        self, before: bytes, old: list[Value], new: list[Value], is_whole: bool, context: Context, seq: int
    ) -> list[Output]:
        """Return the records of a row that is there no more under its old key, and of the same under its new one."""
        created_context = context.with_op(INSERT_OP)
        return [
            *self._deleted_records("update", before, old, context.with_op(DELETE_OP), seq, new),
            *self._row_records("update", None, new, is_whole, created_context, seq + 1, old),
        ]

    def _link(self, name: str, target: Target, values: list[Value]) -> tuple[Header, ...]:
        """Return the header that tells the other key of a row that has moved."""
        key = self._key(target, values)
        return ((name, key),) if key is not None else ()

    def _tuple(self, data: bytes, position: int) -> tuple[list[Value], int, bool]:
        """Read the columns at a position; return them, where they end, and whether all of them were sent."""
        if data[position : position + 2] != self._count:
            count = int.from_bytes(data[position : position + 2])
            raise ValueError(f"a row has {count} columns, its relation {len(self._all)}")
        position += 2
        values: list[Value] = []
        add = values.append
        is_whole = True
        for _ in self._all:
            kind = data[position]
            if kind == _TEXT:
                start = position + 5
                position = start + _length_at(data, position + 1)[0]
                add(data[start:position])
            elif kind == _NULL:
                add(None)
                position += 1
            elif kind == _UNCHANGED:
                add(UNCHANGED)
                position += 1
                is_whole = False
            else:
                raise ValueError(f"a column is of kind {chr(kind)!r}")
        if position > len(data):
            raise ValueError("a column runs over the end of its row")
        return values, position, is_whole

    def _last_tuple(self, data: bytes, position: int) -> tuple[list[Value], bool]:
        values, end, is_whole = self._tuple(data, position)
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes follow a row")
        return values, is_whole

    def _complete(self, new: list[Value], old: list[Value], letter: int) -> bool:
        """Fill in the columns that only the old row has; return whether that was all of them."""
        for index in self._table.identity if letter == _KEY else self._all:
            if new[index] is UNCHANGED:
                new[index] = old[index]
        return UNCHANGED not in new

    def _has_moved(self, old: list[Value], new: list[Value]) -> bool:
        return any(old[index] != new[index] for index in moving_columns(self._table, self._targets["update"]))

    def _before(self, old: list[Value], letter: int) -> bytes:
        # With a key, the other columns come as nulls, which would read as values.
        return self._object(self._table.identity)(old) if letter == _KEY else self._sent(old)

    def _partial(self, new: list[Value], context: Context) -> tuple[bytes, bytes]:
        """Return the object of a row that was not sent whole, and the record's end, which names what is not in it."""
        unchanged = [name for name, value in zip(self._names, new, strict=True) if value is UNCHANGED]
        return self._sent(new), context.end_without(unchanged)

    def _sent(self, values: list[Value]) -> bytes:
        """Write an object of the columns that were sent."""
        if UNCHANGED not in values:
            return self._object(self._all)(values)
        pieces = [
            b"%b:%b" % (name, b"null" if value is None else convert(value))
            for name, value, convert in zip(self._names, values, self._converters, strict=True)
            if not isinstance(value, Unchanged)
        ]
        return b"{" + b",".join(pieces) + b"}"

    def _key(self, target: Target, values: list[Value]) -> bytes | None:
        if not target.key:
            return None
        for index in target.key:
            if values[index] is UNCHANGED:
                raise ValueError("a column of the key was not sent")
        return self._object(target.key)(values)

    def _object(self, chosen: tuple[int, ...]) -> Callable[[Sequence[Value]], bytes]:
        """Return the generated function that writes an object of these columns."""
        found = self._objects.get(chosen)
        if found is None:
            found = self._objects[chosen] = object_function(self._table, chosen)
        return found

    def _headers(self, context: Context, values: list[Value], number: bytes) -> list[Header]:
        if self._table.tenant is None or not isinstance(tenant := values[self._table.tenant], bytes):
            return [*context.headers, ("seq", number)]
        return [("tenant", tenant), *context.headers, ("seq", number)]


def _skip(_data: bytes, _context: Context, seq: int) -> int:
    """Count a change that no stream wants."""
    return seq + 1
