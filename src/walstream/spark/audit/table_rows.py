"""The rows of PostgreSQL tables at one moment, read by Spark's executors in parallel.

Owns reading a table at an exported snapshot into a typed DataFrame; refuses to know what it is compared with. A task
reads ranges of blocks by COPY, as capture's snapshots do, renders each row as capture writes it into the log and
decodes that as the data source does: a value of a table and the same value of the log cannot come out different,
because it is one way that both of them go.

The snapshot lives as long as whoever has exported it keeps it; each call of an action reads the table again.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from walstream.capture.envelope import Renderer, Stamp
from walstream.capture.snapshot_plan import Part as PlannedPart
from walstream.capture.snapshot_plan import Range, Reading, TableName, copy_statement, quoted_table, ranges
from walstream.capture.streams import Streams
from walstream.postgres.catalogue import relation_facts, type_facts
from walstream.postgres.copy_out import CopyReader
from walstream.postgres.messages import Relation
from walstream.postgres.relations import RelationFacts, RelationInfo, Relations
from walstream.postgres.snapshot import Connection, Part
from walstream.postgres.types import TypeFacts, Types
from walstream.spark.decoding import Decoder
from walstream.spark.types import TableVersion

CHUNK_ROWS: Final = 5_000
CHUNK_BYTES: Final = 4 * 1024 * 1024
"""How much is decoded at once."""
TASKS_PER_CORE: Final = 4
WAIT_S: Final = 60.0
SNAPSHOT_ID: Final = "audit"


class Moment(NamedTuple):
    """An exported snapshot, as an executor imports it."""

    dsn: str
    snapshot_name: str


class Described(NamedTuple):
    """A table as it is at a moment, and what its columns are to Spark."""

    info: RelationInfo
    type_facts: tuple[TypeFacts, ...]
    version: TableVersion


class Table(NamedTuple):
    """Everything that reading a table takes."""

    described: Described
    reading: Reading


def describe(connection: Connection, relation: Relation, facts: RelationFacts | None = None) -> Described:
    """Describe a table by what pgoutput says of it, asking the catalogue for its types and numbers."""
    types = Types()
    known = type_facts(connection, unknown) if (unknown := types.unknown(c.type_oid for c in relation.columns)) else []
    types.learn(known)
    facts = facts or relation_facts(connection, [relation.id]).get(relation.id)
    info = Relations().update(relation, facts)
    return Described(info, tuple(known), TableVersion.from_json(info.to_json(types)))


def reading_of(name: TableName, columns: Iterable[str], row_filter: str | None, parts: Iterable[Part]) -> Reading:
    """Return how a table is read that has these parts."""
    planned = (
        PlannedPart(part.relation_id, TableName(part.schema, part.table), part.block_count, part.is_heap)
        for part in parts
    )
    return Reading(name, tuple(columns), row_filter, tuple(planned))


def read(spark: SparkSession, moment: Moment, table: Table, strings: Collection[str] = ()) -> DataFrame:
    """Return the table's rows at the moment; `strings` names columns that are to be strings."""
    struct = table.described.version.struct(strings)
    cores = spark.sparkContext.defaultParallelism
    spans = ranges(table.reading, cores)
    if not spans:
        return spark.createDataFrame([], struct)
    count = min(len(spans), cores * TASKS_PER_CORE)
    groups = [spans[number::count] for number in range(count)]
    task = _Task(moment, table, to_arrow_schema(struct, timezone="UTC"), groups)
    return spark.range(0, count, 1, count).mapInArrow(task, struct)


class _Task:
    """Reads the ranges of the groups whose numbers it is given. Goes to executors as it is."""

    def __init__(self, moment: Moment, table: Table, schema: pa.Schema, groups: Sequence[Sequence[Range]]) -> None:
        self._moment = moment
        self._table = table
        self._schema = schema
        self._groups = groups

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spans = [span for batch in batches for number in batch.column(0).to_pylist() for span in self._groups[number]]
        if not spans:
            return
        described = self._table.described
        decoder = Decoder(self._schema, described.version, [described.version])
        render = _renderer(described)
        reader = CopyReader(self._moment)
        try:
            for lines in _chunks(reader, self._table.reading, spans):
                yield from decoder.decode(render(lines))
        finally:
            reader.close()


def _renderer(described: Described) -> Callable[[Sequence[bytes]], list[bytes]]:
    """Return the function from lines of COPY to envelopes."""
    types = Types(described.type_facts)
    renderer = Renderer(
        database="",
        source_epoch=0,
        generation=0,
        streams=Streams("audit"),
        types=types,
        describe=lambda _: described.info,
    )
    stamp = Stamp(commit_lsn=0, xid=0, commit_time_us=0, now_ms=0, snapshot=SNAPSHOT_ID)
    copied = renderer.copy(described.info, stamp)

    def render(lines: Sequence[bytes]) -> list[bytes]:
        values: list[Any] = [record[1] for record in copied(lines)]
        return values

    return render


def _chunks(reader: CopyReader, reading: Reading, spans: Iterable[Range]) -> Iterator[list[bytes]]:
    """Yield the lines of ranges, many at a time, waiting for the server where it has to be waited for."""
    found: list[bytes] = []
    size = 0
    for span in spans:
        reader.read(
            copy_statement(reading, span),
            table=quoted_table(span.table),
            part=quoted_table(span.part.name),
            part_id=span.part.oid,
        )
        while not reader.is_idle:
            lines = reader.lines(CHUNK_ROWS, CHUNK_BYTES)
            if not lines and not reader.is_idle:
                select.select([reader.fileno()], [], [], WAIT_S)
            found += lines
            size += sum(map(len, lines))
            if len(found) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield found
                found, size = [], 0
    if found:
        yield found
