"""One table's part of a batch for a replica: what is read of it, folded, and staged.

Owns the reading and the checks before anything is changed; refuses to know transactions. A table with a key is folded:
one row per key. One without a key can only be added to, because nobody could say which row an update means.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from walstream.errors import RowsMissing, SchemaIncompatible, TableConflict, TableUnfit
from walstream.positions import Lsn
from walstream.postgres.session import connect, named
from walstream.spark.columns import col
from walstream.spark.destination import Reader, Work, belonging
from walstream.spark.fold import fold, is_after
from walstream.spark.kept_tables import KeptTable
from walstream.spark.options import parse_table
from walstream.spark.replica import sql
from walstream.spark.replica.sql import Shape, SourceColumn, TableName, Version
from walstream.spark.replica.stages import APPLICATION_NAME, Staged, stage_rows, strings_of, texts_of
from walstream.spark.replica.state import TableState
from walstream.spark.replica.target import resolve_types
from walstream.spark.replica.values import ColumnText
from walstream.spark.types import TableVersion

STAGE: Final = "stage_"


class Part(NamedTuple):
    """A table's part of a batch, staged."""

    work: Work
    version: Version
    shape: Shape
    staged: Staged
    is_emptied: bool
    """Whether no row from before the batch is left: a truncate, or a snapshot that replaces the table."""
    rows_in: int

    @property
    def name(self) -> TableName:
        """Of the table."""
        return self.shape.name


class Staging:
    """Stages tables. One for a pipeline; each table by one thread at a time."""

    def __init__(self, dsn: str, control_schema: str, prefix: str, reader: Reader) -> None:
        self._dsn = dsn
        self._schema = sql.quoted(control_schema)
        self._reader = reader
        self.stages = f"{STAGE}{uuid.uuid5(uuid.NAMESPACE_OID, prefix).hex[:12]}_"
        """What the names of all stages of this prefix begin with."""
        self._carries: dict[TableName, frozenset[str]] = {}

    def part(self, work: Work, table: KeptTable, known: TableState | None) -> Part:
        """Read, fold and stage. Raises TableUnfit, SchemaIncompatible, RowsMissing and what reading raises."""
        _check(work, table, known)
        version = followed(table.version)
        table = table._replace(strings=strings_of(table.version))
        with connect(self._dsn, application_name=APPLICATION_NAME) as connection:
            types = resolve_types(connection, (column.type for column in version.columns))
            columns = tuple(sql.Column(column.name, types[column.type].name) for column in version.columns)
            shape = Shape(name_of(table.name), columns, table.version.key)
            stage = f"{self._schema}.{sql.quoted(self.stages + uuid.uuid4().hex)}"
            with named(f"making a stage for {shape.name}"):
                connection.execute(sql.create_stage(stage, shape).encode())
        counted = Observation()
        changes = self._reader.changes(work, table).frame.observe(counted, f.count(f.lit(1)).alias("rows"))
        changes = changes.filter(belonging(work).sql)
        if (held := _held(work, known)) is not None:
            changes = changes.filter(f.col("_commit_lsn") >= int(held))
        texts = texts_of(table.version.columns, types)
        staged, is_emptied, rows_in = (self._folded if shape.key else self._added)(changes, shape, texts, stage)
        if work.rows is not None and counted.get["rows"] != work.rows:
            raise RowsMissing(f"{shape.name} has {counted.get['rows']:,} rows where commit points say {work.rows:,}.")
        return Part(work, version, shape, staged, is_emptied or work.one.snapshot is not None, rows_in)

    def _folded(
        self, changes: DataFrame, shape: Shape, texts: Mapping[int, ColumnText], stage: str
    ) -> tuple[Staged, bool, int]:
        names = [column.name for column in shape.columns]
        folded = fold(changes, shape.key, names, carries=self._carries.get(shape.name, ()))
        try:
            staged = stage_rows(folded.rows, self._dsn, stage, shape, texts)
        finally:
            folded.release()
        self._carries[shape.name] = folded.carries
        return staged, folded.has_truncate, folded.rows_in

    def _added(
        self, changes: DataFrame, shape: Shape, texts: Mapping[int, ColumnText], stage: str
    ) -> tuple[Staged, bool, int]:
        """Stage all rows of a table without a key, to which nothing else may have happened."""
        facts = changes.agg(
            f.count(f.lit(1)).alias("rows"),
            f.max(f.when(f.col("_op") == "t", f.struct("_commit_lsn", "_seq"))).alias("truncated_at"),
            f.count(f.when(f.col("_op").isin("u", "d"), 1)).alias("others"),
        ).collect()[0]
        if facts["others"]:
            raise TableUnfit(
                f"{shape.name} has no key, and {facts['others']:,} of its changes are updates or deletes: of which "
                "row, nobody can say.",
                "Give it a primary key at the source, and then a new snapshot.",
            )
        rows = changes.filter(f.col("_op").isin("c", "r"))
        if facts["truncated_at"] is not None:
            rows = rows.filter(is_after(tuple(facts["truncated_at"])))
        rows = rows.select(*(col(column.name) for column in shape.columns), f.lit(sql.UPSERT).alias("_op"))
        staged = stage_rows(rows, self._dsn, stage, shape, texts, is_folded=False)
        return staged, facts["truncated_at"] is not None, facts["rows"]


def followed(version: TableVersion) -> Version:
    """Return what a replica follows of a version."""
    columns = tuple(SourceColumn(column.name, column.type_name, column.attnum) for column in version.columns)
    return Version(version.version, version.relation_id, version.key, columns)


def name_of(table: str) -> TableName:
    """Return a table that is named as options name it."""
    return TableName(*parse_table(table))


def _held(work: Work, known: TableState | None) -> Lsn | None:
    """Return up to where the table may hold changes already; None: it holds none, and Spark compiles no number."""
    if known is None or known.source_epoch != work.step.source_epoch or work.one.snapshot is not None:
        return None
    return known.end_lsn if work.one.after is None or known.end_lsn > work.step.begin_lsn else None


def _check(work: Work, table: KeptTable, known: TableState | None) -> None:
    """See that the batch can be applied at all."""
    if table.mode == "history" or (table.mode == "append" and table.version.key):
        raise TableUnfit(
            f"A replica holds the current rows of a table; {table.name} is to be kept in mode {table.mode}.",
            'Set pipeline.mode, or the mode of the table, to "mirror".',
        )
    if known is None or work.one.snapshot is not None:
        return
    if known.source_epoch == work.step.source_epoch and known.end_lsn > work.step.end_lsn:
        raise TableConflict(
            f"{table.name} holds {known.end_lsn}, which this pipeline has not written.",
            "Another pipeline writes to the same replica: stop one of them.",
        )
    if known.version.key != table.version.key:
        raise SchemaIncompatible(
            f"The key of {table.name} was ({', '.join(known.version.key)}) and is ({', '.join(table.version.key)}).",
            "Take a new snapshot of the table, which replaces it.",
        )
