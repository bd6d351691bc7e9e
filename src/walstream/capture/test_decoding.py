"""The text of PostgreSQL's `test_decoding` plugin, turned into the messages that pgoutput would have sent.

Owns that text format; everything behind it reads pgoutput alone. The text names columns and types but not relation
ids, keys or replica identities: those come from today's catalogue. When a row's columns are not those of the catalogue
(the table was altered since), the row is right, and so is what it says of its types.

    BEGIN 741
    table public.users: INSERT: id[integer]:1 name[text]:'it''s' active[boolean]:true
    table public.users: UPDATE: old-key: id[integer]:1 new-tuple: id[integer]:2 name[text]:unchanged-toast-datum …
    table public.users, public."Odd": TRUNCATE: restart_seqs
    message: transactional: 1 prefix: greeting, sz: 5 content:hello
    COMMIT 741 (at 2025-11-15 20:11:31.734241+00)

A row is matched by one regular expression, made from the columns of the row before it in the same table; only when
that fails is it taken apart column by column. Tables that are not published are left out before that.

Differences to pgoutput that remain: a commit's LSN is told by its end alone, so `commit_lsn` is the byte before it (in
the same record, so the order is the same); rows of partitions carry the partition's name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import psycopg

from walstream.capture.published import Table, find_table, published_tables, type_oid
from walstream.errors import DecodeError
from walstream.postgres.protocol import POSTGRES_EPOCH_US

_NAME: Final = rb'(?:"(?:[^"]|"")+"|[a-z0-9_]+)'
_TYPE: Final = rb'((?:"(?:[^"]|"")+"|[^"\]\[]|\[\])+)'
_VALUE: Final = rb"('[^']*(?:''[^']*)*'|B'[01]*'|[^ ']+)"

_ROW = re.compile(rb"table (%b\.%b): (?:(I)NSERT|(U)PDATE|(D)ELETE):" % (_NAME, _NAME))
_TRUNCATE = re.compile(rb"table ((?:%b\.%b(?:, )?)+): TRUNCATE: (.*)" % (_NAME, _NAME))
_NAME_PART = re.compile(_NAME)
_TABLE = re.compile(rb"%b\.%b" % (_NAME, _NAME))
_COLUMN = re.compile(rb" (%b)\[%b\]:%b" % (_NAME, _TYPE, _VALUE), re.DOTALL)
_COMMIT = re.compile(rb"COMMIT \d+ \(at (.+)\)")
_MESSAGE = re.compile(rb"message: transactional: ([01]) prefix: (.*), sz: (\d+) content:", re.DOTALL)

_OLD: Final = b" old-key:"
_NEW: Final = b" new-tuple:"
_NOTHING: Final = b" (no-tuple-data)"
_QUOTE: Final = ord("'")
_SIZES: Final = [b"t" + size.to_bytes(4) for size in range(256)]
_WORDS: Final = {
    b"null": b"n",
    b"unchanged-toast-datum": b"u",
    b"true": b"t\0\0\0\1t",
    b"false": b"t\0\0\0\1f",
}
_NO_VALUES: Final[Sequence[bytes]] = ()
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_BEGIN = struct.Struct(">cQqI")
_COMMIT_MESSAGE = struct.Struct(">cBQQq")

Values = dict[bytes, bytes]


class Shape(NamedTuple):
    """A table as its last whole row showed it."""

    table: Table
    columns: tuple[tuple[bytes, bytes], ...]
    """Name and type of each column, as the text has them."""
    sent: tuple[int, ...]
    """Which of them pgoutput would send: all but the generated ones."""
    sends_all: bool
    size: bytes
    """How many it would send, as it writes it."""
    pattern: re.Pattern[bytes]
    """Matches a whole row, its values being the groups."""


class TextDecoding:
    """Reads the plugin's text, one look after the other, for the tables of some publications."""

    query = "SELECT lsn, textsend(data) FROM pg_logical_slot_peek_changes(%s, NULL, %s, VARIADIC %s::text[])"
    # Not skip-empty-xacts: a transaction's messages would then come before its BEGIN, or without one.
    options: Final = ["include-xids", "1", "include-timestamp", "1"]

    def __init__(self, connection: psycopg.Connection[Any], publications: Sequence[str]) -> None:
        """Take a session for questions about tables and types. Raises SourceNotReady, PublicationMissing."""
        self._connection = connection
        self._publications = publications
        self._kinds: dict[bytes, bytes] = {}
        self._shapes: dict[bytes, Shape] = {}
        self._types: dict[bytes, int] = {}
        self.begin()

    def begin(self) -> None:
        """Find out which tables are published now."""
        self._kinds = published_tables(self._connection, self._publications)

    def messages(self, rows: list[tuple[Any, ...]]) -> list[bytes]:
        """Turn lines into messages of pgoutput. Raises DecodeError."""
        said: list[bytes] = []
        for lsn, text in rows:
            if text.startswith(b"table "):
                self._row(text, said)
            else:
                said.append(self._other(int.from_bytes(lsn), text))
        return said

    def _row(self, text: bytes, said: list[bytes]) -> None:
        found = _ROW.match(text)
        if found is None:
            self._truncate(text, said)
            return
        name, kind = found[1], found[2] or found[3] or found[4]
        if kind not in self._kinds.get(name, b""):
            return
        at = found.end()
        old: Values | None = None
        if kind == b"U" and text.startswith(_OLD, at):
            old, at = self._columns(text, at + len(_OLD))
            at += len(_NEW)
        if text.startswith(_NOTHING, at):
            return  # A table without replica identity: pgoutput sends nothing either.
        if kind == b"D":
            old, at = self._columns(text, at)
            shape, values = self._known_shape(name, old, said), _NO_VALUES
        else:
            shape, values = self._matched(name, text, at, said)
        message = [kind, shape.table.id.to_bytes(4)]
        if old is not None:
            message.append(b"O" if shape.table.replica_identity == "f" else b"K")
            # The plugin leaves out nulls, and columns that are not of the key.
            _write_columns([old.get(column, b"null") for column, _ in shape.columns], shape, message)
        if kind != b"D":
            message.append(b"N")
            _write_columns(values, shape, message)
        said.append(b"".join(message))

    def _columns(self, text: bytes, at: int) -> tuple[Values, int]:
        """Take columns apart, one by one, from a place on; return them and the place after the last."""
        values: Values = {}
        while found := _COLUMN.match(text, at):
            values[found[1]] = found[3]
            at = found.end()
        return values, at

    def _matched(self, name: bytes, text: bytes, at: int, said: list[bytes]) -> tuple[Shape, Sequence[bytes]]:
        """Return the values of a whole row and the shape of its table, which is told when it is new."""
        shape = self._shapes.get(name)
        found = shape.pattern.fullmatch(text, at) if shape is not None else None
        if shape is not None and found is not None:
            return shape, found.groups()
        columns: list[tuple[bytes, bytes]] = []
        values: list[bytes] = []
        while column := _COLUMN.match(text, at):
            columns.append((column[1], column[2]))
            values.append(column[3])
            at = column.end()
        if at != len(text):
            raise _unreadable(text)
        return self._learn(find_table(self._connection, name), name, tuple(columns), said), values

    def _known_shape(self, name: bytes, old: Values, said: list[bytes]) -> Shape:
        """Return the shape of a table of which only an old row was sent; the catalogue knows the other columns."""
        shape = self._shapes.get(name)
        if shape is None or not old.keys() <= {column for column, _ in shape.columns}:
            table = find_table(self._connection, name)
            columns = tuple((column.quoted, column.type_name) for column in table.columns)
            # A table that is gone, or has lost a column since, has at least what the row shows.
            columns += tuple((column, b"text") for column in old if column not in dict(columns))
            shape = self._learn(table, name, columns, said)
        return shape

    def _learn(self, table: Table, name: bytes, columns: tuple[tuple[bytes, bytes], ...], said: list[bytes]) -> Shape:
        known = {column.quoted: column for column in table.columns}
        sent = tuple(
            number for number, (column, _) in enumerate(columns) if column not in known or not known[column].generated
        )
        described = []
        for number in sent:
            column, type_name = columns[number]
            if type_name not in self._types:
                self._types[type_name] = type_oid(self._connection, type_name)
            oid, today = self._types[type_name], known.get(column)
            modifier = today.type_modifier if today and today.type_name == type_name else -1
            is_key = table.replica_identity == "f" or (today is not None and today.is_key)
            described.append(bytes((is_key,)) + _unquoted(column) + b"\0" + struct.pack(">Ii", oid, modifier))
        schema, relation = (_unquoted(part) for part in _NAME_PART.findall(name))
        head = b"R" + table.id.to_bytes(4) + schema + b"\0" + relation + b"\0" + table.replica_identity.encode()
        pattern = b"".join(rb" %b\[%b\]:%b" % (re.escape(c), re.escape(t), _VALUE) for c, t in columns)
        size = len(described).to_bytes(2)
        shape = Shape(table, columns, sent, len(sent) == len(columns), size, re.compile(pattern, re.DOTALL))
        self._shapes[name] = shape
        said.append(b"".join((head, size, *described)))
        return shape

    def _truncate(self, text: bytes, said: list[bytes]) -> None:
        found = _TRUNCATE.fullmatch(text)
        if found is None:
            raise _unreadable(text)
        ids = []
        for name in _TABLE.findall(found[1]):
            if b"T" in self._kinds.get(name, b""):
                ids.append(self._known_shape(name, {}, said).table.id)
        options = (b"cascade" in found[2]) | (b"restart_seqs" in found[2]) << 1
        if ids:
            said.append(b"T" + struct.pack(f">IB{len(ids)}I", len(ids), options, *ids))

    def _other(self, lsn: int, text: bytes) -> bytes:
        if text.startswith(b"BEGIN "):
            return _BEGIN.pack(b"B", 0, 0, int(text[6:]))
        if found := _COMMIT.fullmatch(text):
            return _COMMIT_MESSAGE.pack(b"C", 0, lsn - 1, lsn, _time_us(found[1]) - POSTGRES_EPOCH_US)
        if found := _MESSAGE.match(text):
            size = int(found[3])
            head = b"M" + struct.pack(">BQ", found[1] == b"1", lsn)
            return b"".join((head, found[2], b"\0", size.to_bytes(4), text[len(text) - size :]))
        raise _unreadable(text)


def _write_columns(values: Sequence[bytes], shape: Shape, message: list[bytes]) -> None:
    """Write values as pgoutput does."""
    message.append(shape.size)
    for raw in values if shape.sends_all else [values[number] for number in shape.sent]:
        if raw[0] == _QUOTE:
            raw = raw[1:-1]
            if b"''" in raw:
                raw = raw.replace(b"''", b"'")
        elif raw in _WORDS:
            message.append(_WORDS[raw])
            continue
        elif raw.startswith(b"B'"):
            raw = raw[2:-1]
        size = len(raw)
        message.append(_SIZES[size] if size < len(_SIZES) else b"t" + size.to_bytes(4))
        message.append(raw)


def _unquoted(name: bytes) -> bytes:
    return name[1:-1].replace(b'""', b'"') if name.startswith(b'"') else name


def _time_us(text: bytes) -> int:
    moment = datetime.fromisoformat(text.decode().replace("+00", "+00:00")).astimezone(UTC)
    return int((moment - _EPOCH).total_seconds()) * 1_000_000 + moment.microsecond


def _unreadable(text: bytes) -> DecodeError:
    return DecodeError(f"A line of test_decoding cannot be understood: {text[:64]!r}…", data=text)
