"""Envelopes of one table as Arrow batches of typed columns, many at a time.

Owns the way from bytes to columns; refuses to know where envelopes come from and which of them belong (admitting.py).
A chunk is one parse of Arrow's JSON reader under an explicit schema and a few kernels: nothing is done per row in
Python beyond joining the values. What Arrow does not take (floats that are not numbers, values that no type holds) goes
through values.py, one by one and for that chunk alone; it knows what to say of a value that cannot be.

The image that columns are taken from is `after`, and `before` for a delete: the key, or whatever the replica identity
sends. Columns that PostgreSQL did not send are null and named in `_unchanged`; a truncate has nulls only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from walstream.errors import ValueUnrepresentable
from walstream.positions import Lsn
from walstream.spark.layouts import Layout, Source, layouts
from walstream.spark.rowwise import RawRows
from walstream.spark.types import META, TableVersion

SOURCE: Final[Mapping[str, pa.DataType]] = {
    "txId": pa.int64(),
    "source_epoch": pa.int32(),
    "commit_lsn": pa.int64(),
    "seq": pa.int64(),
    "gen": pa.int64(),
    "ts_ms": pa.int64(),
    "schema_version": pa.int32(),
    "unchanged": pa.list_(pa.field("element", pa.string())),
}
TABLE: Final[Mapping[str, pa.DataType]] = {"schema": pa.string(), "table": pa.string()}
"""What of `source` says whose row it is."""
COUNTED: Final = ("gen", "commit_lsn")
"""What of `source` the rule asks, beside the snapshot."""

VALUE_SHOWN: Final = 60
_DELETE: Final = b'"op":"d"'
_VERSION: Final = b'"schema_version":'
_SNAPSHOT: Final = b'"snapshot":'
_QUOTE: Final = ord('"')
_META_NAMES: Final = frozenset(META.names)
_MILLISECOND_US: Final = 1_000


class _TableSource(msgspec.Struct):
    schema: str
    table: str


class _OfTable(msgspec.Struct):
    source: _TableSource


_of_table: Final = msgspec.json.Decoder(_OfTable).decode


class NotEnvelopes(Exception):
    """Not every value of a chunk is an envelope of one line; who catches it looks at each of them."""


class Parsed(NamedTuple):
    """A chunk as Arrow has parsed it."""

    source: dict[str, Any]
    """The columns of the `source` block; `snapshot` among them."""
    rows: Any
    """The rest, a record batch."""
    has_deletes: bool

    def filtered(self, mask: Any) -> Parsed:
        """Return the rows that the mask chooses."""
        rows = self.rows.filter(mask)
        return Parsed(_fields(rows.column("source")), rows, self.has_deletes)


class Decoder:
    """Decodes the changes of one table into batches of one schema. Built from plain values, anywhere."""

    def __init__(self, schema: pa.Schema, wanted: TableVersion, versions: Sequence[TableVersion]) -> None:
        """Take the schema of the batches (columns of `wanted`, then META), and what rows may be written under."""
        self.schema = schema
        self._table, self._key = wanted.name, wanted.key
        self._name = (wanted.schema, wanted.table)
        fields = [field for field in schema if field.name not in _META_NAMES]
        self._layouts = layouts(versions, wanted, fields)
        first = next(iter(self._layouts.values()))
        self._only = first if all(layout is first for layout in self._layouts.values()) else None
        self._odd: set[str] = set()
        """Columns that have held values which Arrow does not take: they do not go through it again."""

    def groups(self, values: Sequence[bytes]) -> Iterator[tuple[Layout, list[int] | None]]:
        """Yield layouts with the numbers of their values; None: all of them. Raises NotEnvelopes."""
        if self._only is not None:
            yield self._only, None
            return
        found: dict[int, list[int]] = {}
        for number, value in enumerate(values):
            found.setdefault(_version_of(value), []).append(number)
        for version, numbers in found.items():
            layout = self._layouts.get(version)
            if layout is None:
                raise NotEnvelopes
            yield layout, numbers

    def of_table(self, parsed: Parsed) -> Any:
        """Return a mask of the rows of this table: another one's may lie in the same topic."""
        masks = [pc.equal(parsed.source[field], name) for field, name in zip(TABLE, self._name, strict=True)]
        return pc.fill_null(pc.and_(*masks), False)

    def is_of_table(self, value: bytes) -> bool:
        """Tell the same of one value."""
        try:
            source = _of_table(value).source
        except msgspec.DecodeError:
            return False
        return (source.schema, source.table) == self._name

    def decode(self, values: Sequence[bytes]) -> list[pa.RecordBatch]:
        """Decode envelopes that all belong; those of each version, and of a snapshot, come together.

        Raises ValueUnrepresentable, and NotEnvelopes for what capture did not write.
        """
        batches = []
        for layout, numbers in self.groups(values):
            chosen = list(values) if numbers is None else [values[number] for number in numbers]
            for of_snapshot in (False, True):
                if found := [value for value in chosen if is_of_snapshot(value) == of_snapshot]:
                    batches.append(self._decode(layout, found, of_snapshot))
        return batches

    def _decode(self, layout: Layout, values: Sequence[bytes], of_snapshot: bool) -> pa.RecordBatch:
        try:
            return self.finish(layout, self.parse(layout, values, of_snapshot=of_snapshot), values)
        except pa.ArrowInvalid:
            return self.finish_plainly(layout, values)

    def parse(
        self,
        layout: Layout | None,
        values: Sequence[bytes],
        *,
        of_snapshot: bool,
        names: Sequence[str] = (*SOURCE, *TABLE),
    ) -> Parsed:
        """Parse envelopes; without a layout nothing but their source. Raises pyarrow.ArrowInvalid, NotEnvelopes."""
        try:
            data = b"\n".join(values)
        except TypeError:
            raise NotEnvelopes from None
        if data.count(b"\n") != len(values) - 1:
            raise NotEnvelopes
        has_deletes = layout is not None and _DELETE in data
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=self._parse_schema(layout, tuple(names), of_snapshot, has_deletes),
                unexpected_field_behavior="ignore",
            ),
        )
        if table.num_rows != len(values):
            raise NotEnvelopes
        batches = table.to_batches()
        rows = batches[0] if len(batches) == 1 else table.combine_chunks().to_batches()[0]
        source = rows.column("source")
        return Parsed(_fields(source), rows, has_deletes)

    def finish(
        self,
        layout: Layout,
        parsed: Parsed,
        values: Sequence[bytes],
        old_key: Callable[[int], bytes | None] | None = None,
    ) -> pa.RecordBatch:
        """Make the batch of parsed rows, which are those of `values`. Raises ArrowInvalid, ValueUnrepresentable."""
        rows = parsed.rows
        operations = rows.column("op")
        after = _fields(rows.column("after"))
        if parsed.has_deletes:
            is_delete = pc.equal(operations, "d")
            before = _fields(rows.column("before"))
            images = {name: pc.if_else(is_delete, before[name], column) for name, column in after.items()}
        else:
            images = after
        loose = self._loose(layout, values)
        columns = []
        for field, source in zip(layout.fields, layout.sources, strict=True):
            if source is None:
                columns.append(pa.nulls(rows.num_rows, field.type))
            elif source.json_name in loose:
                columns.append(loose[source.json_name])
            else:
                assert source.reading is not None
                image = images[source.json_name]
                columns.append(source.reading.finish(image) if source.reading.finish else image)
        return self._batch([*columns, *self._meta(layout, parsed, operations, old_key)])

    def finish_plainly(
        self, layout: Layout, values: Sequence[bytes], old_key: Callable[[int], bytes | None] | None = None
    ) -> pa.RecordBatch:
        """Make the batch of values one by one. Raises ValueUnrepresentable, NotEnvelopes."""
        sources = [source for source in layout.sources if source is not None]
        try:
            envelopes, raws = RawRows([source.json_name for source in sources]).read(values)
        except ValueError:
            raise NotEnvelopes from None
        found = {
            source.json_name: self._convert(source, raw, values) for source, raw in zip(sources, raws, strict=True)
        }
        columns = [
            pa.nulls(len(values), field.type) if source is None else found[source.json_name]
            for field, source in zip(layout.fields, layout.sources, strict=True)
        ]
        blocks = [envelope.source for envelope in envelopes]
        source_columns = {
            name: pa.array([getattr(block, name) for block in blocks], kind) for name, kind in SOURCE.items()
        }
        snapshots = [block.snapshot if isinstance(block.snapshot, str) else None for block in blocks]
        source_columns["snapshot"] = pa.array(snapshots, pa.string())
        operations = pa.array([envelope.op for envelope in envelopes], pa.string())
        parsed = Parsed(source_columns, None, False)
        return self._batch([*columns, *self._meta(layout, parsed, operations, old_key)])

    def _batch(self, columns: list[Any]) -> pa.RecordBatch:
        """Put columns into the order of the schema: the table's own are in it already, META follows or is left out."""
        own = len(self.schema) - sum(field.name in _META_NAMES for field in self.schema)
        meta = dict(zip(META.names, columns[own:], strict=True))
        arranged = [*columns[:own], *(meta[field.name] for field in self.schema if field.name in _META_NAMES)]
        return pa.RecordBatch.from_arrays(arranged, schema=self.schema)

    def _loose(self, layout: Layout, values: Sequence[bytes]) -> dict[str, Any]:
        """Return the columns that Arrow was not asked for."""
        sources = [source for source in layout.sources if source is not None and self._is_loose(source)]
        if not sources:
            return {}
        _, raws = RawRows([source.json_name for source in sources]).read(values)
        return {source.json_name: self._convert(source, raw, values) for source, raw in zip(sources, raws, strict=True)}

    def _is_loose(self, source: Source) -> bool:
        return source.reading is None or source.json_name in self._odd

    def _convert(self, source: Source, raws: Sequence[bytes | None], values: Sequence[bytes]) -> Any:
        convert = source.convert
        found: list[Any] = []
        try:
            for raw in raws:
                found.append(None if raw is None else convert(raw))
        except ValueError as error:
            raise self._unrepresentable(source, values[len(found)], str(error)) from None
        if source.may_be_odd and any(raw is not None and b'"' in raw for raw in raws):
            self._odd.add(source.json_name)
        return pa.array(found, source.target.type)

    def _unrepresentable(self, source: Source, value: bytes, shown: str) -> ValueUnrepresentable:
        """Return the error for a value that its column's type cannot hold."""
        (envelope,), key = RawRows(self._key).read([value])
        block, name = envelope.source, source.target.name
        shown = shown if len(shown) <= VALUE_SHOWN else shown[:VALUE_SHOWN] + "…"
        row = ", ".join(
            f"{column} {raw.decode(errors='replace')[:VALUE_SHOWN] if raw else 'null'}"
            for column, (raw,) in zip(self._key, key, strict=True)
        )
        return ValueUnrepresentable(
            f"{self._table}: the column {name} holds {shown} at LSN {Lsn(block.commit_lsn)}, seq {block.seq}, in the "
            f"row with {row or 'no key'}; its type, {source.target.type}, cannot.",
            f"Read the column as a string: strings={name}.",
        )

    def _meta(
        self, layout: Layout, parsed: Parsed, operations: Any, old_key: Callable[[int], bytes | None] | None
    ) -> list[Any]:
        source = parsed.source
        unchanged = source["unchanged"]
        if layout.renamed and pc.sum(pc.list_value_length(unchanged)).as_py():
            names = [[layout.renamed.get(name, name) for name in row] for row in unchanged.to_pylist()]
            unchanged = pa.array(names, unchanged.type)
        snapshot = source["snapshot"]
        count = len(operations)
        return [
            operations,
            source["source_epoch"],
            source["commit_lsn"],
            source["seq"],
            pc.cast(pc.multiply(source["ts_ms"], _MILLISECOND_US), pa.timestamp("us", "UTC")),
            source["txId"],
            snapshot if pa.types.is_string(snapshot.type) else pa.nulls(count, pa.string()),
            unchanged,
            source["schema_version"],
            _old_keys(operations, unchanged, old_key),
        ]

    def _parse_schema(
        self, layout: Layout | None, names: tuple[str, ...], of_snapshot: bool, has_deletes: bool
    ) -> pa.Schema:
        block = [pa.field(name, kind) for name, kind in {**SOURCE, **TABLE}.items() if name in names]
        block.append(pa.field("snapshot", pa.string() if of_snapshot else pa.bool_()))
        fields = [pa.field("source", pa.struct(block))]
        if layout is not None:
            fields.append(pa.field("op", pa.string()))
            image = pa.struct(
                [
                    pa.field(source.json_name, source.reading.parse)
                    for source in layout.sources
                    if source is not None and source.reading is not None and not self._is_loose(source)
                ]
            )
            fields += [pa.field("before", image)] if has_deletes else []
            fields.append(pa.field("after", image))
        return pa.schema(fields)


def is_of_snapshot(value: bytes) -> bool:
    """Whether an envelope is a row of a snapshot; raises NotEnvelopes for what is no envelope.

    The last `"snapshot":` in it is that of `source`: a string cannot hold one, for its quotes are escaped.
    """
    at = value.rfind(_SNAPSHOT)
    if at < 0:
        raise NotEnvelopes
    return value[at + len(_SNAPSHOT)] == _QUOTE


def _version_of(value: bytes) -> int:
    at = value.rfind(_VERSION) + len(_VERSION)
    digits = value[at : value.find(b",", at)]
    if at < len(_VERSION) or not digits.isdigit():
        raise NotEnvelopes
    return int(digits)


def _fields(struct: Any) -> dict[str, Any]:
    return dict(zip((field.name for field in struct.type), struct.flatten(), strict=True))


def _old_keys(operations: Any, unchanged: Any, old_key: Callable[[int], bytes | None] | None) -> Any:
    """Return the old keys of rows that have moved and lack columns: an insert of its own lacks none."""
    count = len(operations)
    if old_key is None or not pc.sum(lengths := pc.list_value_length(unchanged)).as_py():
        return pa.nulls(count, pa.string())
    has_moved = pc.and_(pc.equal(operations, "c"), pc.greater(lengths, 0)).to_pylist()
    keys = [old_key(number) if moved else None for number, moved in enumerate(has_moved)]
    return pa.array([None if key is None else key.decode() for key in keys], pa.string())
