"""The other side of an audit: the tables of a warehouse, or of a replica, all at one cut.

Owns finding a table's rows there; refuses to know what they are compared with. A destination is *pinned* when it is
opened: from then on it shows one moment, whatever the pipeline goes on writing. A cut of a warehouse is files that
stay; a replica is read at an exported snapshot, in which its own position stands too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, Protocol

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from walstream.capture.snapshot_plan import TableName as PlannedName
from walstream.config import Config
from walstream.errors import UsageError
from walstream.postgres import address
from walstream.postgres.session import named
from walstream.postgres.snapshot import parts_of, patient_session
from walstream.postgres.types import Types
from walstream.spark.audit.table_rows import Described, Moment, Table, read, reading_of
from walstream.spark.batches import CutRow
from walstream.spark.columns import identity
from walstream.spark.cut_tables import read_version
from walstream.spark.cuts import Cuts
from walstream.spark.options import parse_table
from walstream.spark.replica.sql import TableName, Version
from walstream.spark.replica.stages import strings_of
from walstream.spark.replica.state import ReplicaState, as_cut
from walstream.spark.types import ColumnType, TableVersion, table_name
from walstream.spark.warehouse import table_path

_NOTHING: Final = "Run `walstream pipeline run` first."


class Held(NamedTuple):
    """A table's rows at the destination."""

    frame: DataFrame
    names: Mapping[str, str]
    """The destination's names of the source's columns, by the source's names; one that it does not have is missing."""


class Destination(Protocol):
    """A destination at one moment."""

    cut: CutRow

    def strings(self, version: TableVersion, given: Collection[str]) -> Collection[str]:
        """Return the columns that are compared as strings; `given` are those of the configuration."""

    def rows(self, name: str, source: Described) -> Held:
        """Return the rows of a table that the cut lists; those of `source` are what they are compared with."""

    def close(self) -> None:
        """Let the moment go."""


class Warehouse:
    """The last cut of a warehouse."""

    def __init__(self, spark: SparkSession, path: str, prefix: str) -> None:
        """Raises UsageError when there is no cut yet, ForeignLog when they are those of another capture."""
        found = Cuts(path, prefix).last()
        if found is None:
            raise UsageError(f"{path} holds no cut yet.", _NOTHING)
        self.cut = found
        self._spark = spark
        self._path = path

    def strings(self, version: TableVersion, given: Collection[str]) -> Collection[str]:
        """Return the columns that are strings in the warehouse."""
        return [column.name for column in version.columns if "*" in given or column.name in given]

    def rows(self, name: str, source: Described) -> Held:
        """Return the rows of a table, with the columns that tell where each comes from."""
        frame = read_version(self._spark, table_path(self._path, name), self.cut.versions[name])
        return Held(frame, _names(frame.schema, source.version))

    def close(self) -> None:
        """Nothing is held."""


def _names(schema: t.StructType, source: TableVersion) -> dict[str, str]:
    """Follow columns by what the table knows of their identity, otherwise by their names."""
    by_identity = {known: field.name for field in schema if (known := identity(field)) is not None}
    unknown = {field.name for field in schema if identity(field) is None}
    others = {field.name for field in schema if (known := identity(field)) and not _is_of(known, source)}
    found = {}
    for column in source.columns:
        name = by_identity.get(f"{source.relation_id}.{column.attnum}")
        if name is None and column.name in unknown | others:
            name = column.name
        if name is not None:
            found[column.name] = name
    return found


def _is_of(known: str, source: TableVersion) -> bool:
    """Whether an identity is that of a column of this relation; another one's says nothing about names."""
    return known.split(".")[0] == str(source.relation_id)


class Replica:
    """A replica at one moment of its own."""

    def __init__(self, spark: SparkSession, dsn: str, control_schema: str, prefix: str) -> None:
        """Hold the moment. Raises UsageError when nothing was written there."""
        self._spark = spark
        self._connection: psycopg.Connection[Any] = patient_session(dsn)
        try:
            with named("exporting a snapshot of the replica"):
                self._connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                row = self._connection.execute("SELECT pg_export_snapshot()").fetchone()
                is_there = self._connection.execute(
                    "SELECT FROM pg_catalog.pg_tables WHERE schemaname = %s AND tablename = 'position'",
                    [control_schema],
                ).fetchone()
            assert row is not None, "the query has one row"
            state = ReplicaState(control_schema, prefix)
            self._tables = state.tables(self._connection) if is_there is not None else {}
            found = as_cut(state.position(self._connection) if is_there is not None else None, self._tables.values())
            if found is None:
                raise UsageError("The replica holds nothing of this source yet.", _NOTHING)
        except BaseException:
            self._connection.close()
            raise
        self._moment = Moment(dsn, row[0])
        self.cut = found

    def strings(self, version: TableVersion, given: Collection[str]) -> Collection[str]:
        """Return the columns that are compared as PostgreSQL's text of them."""
        del given
        return strings_of(version)

    def rows(self, name: str, source: Described) -> Held:
        """Return the rows of a table as the source would write them."""
        schema, table = parse_table(name)
        known = self._tables[TableName(schema, table)].version
        columns = _target_columns(self._connection, schema, table)
        names = {
            column.name: found
            for column in source.version.columns
            if (found := _followed(column, source.version, known)) in columns
        }
        described = _only(source, names)
        with named(f"looking for {name} at the replica"):
            row = self._connection.execute(_RELATION, [schema, table]).fetchone()
        assert row is not None, "its columns were just found"
        parts, _ = parts_of(self._connection, [row[0]])
        read_columns = [names[column.name] for column in described.version.columns]
        reading = reading_of(PlannedName(schema, table), read_columns, None, parts.get(row[0], ()))
        frame = read(self._spark, self._moment, Table(described, reading), strings_of(described.version))
        return Held(frame, {name: name for name in names})

    def close(self) -> None:
        """Let the moment go."""
        self._connection.close()


def _target_columns(connection: psycopg.Connection[Any], schema: str, table: str) -> set[str]:
    with named(f"looking at {table_name(schema, table)} at the replica"):
        return {name for (name,) in connection.execute(_COLUMNS, [schema, table])}


def _followed(column: ColumnType, source: TableVersion, known: Version) -> str:
    """Return what the replica calls a column: its name when the replica last heard of it."""
    if known.relation_id == source.relation_id and column.attnum is not None:
        for one in known.columns:
            if one.attnum == column.attnum:
                return one.name
    return column.name


def _only(source: Described, names: Collection[str]) -> Described:
    """Return a table without the columns that are not among these."""
    kept = tuple(column for column in source.info.columns if column.name in names)
    info = source.info._replace(columns=kept)
    return source._replace(info=info, version=TableVersion.from_json(info.to_json(Types(source.type_facts))))


def open_destination(spark: SparkSession, config: Config) -> Destination:
    """Pin the destination of a configuration. Raises UsageError when nothing is there."""
    given = config.pipeline
    if given.destination == "postgres":
        return Replica(spark, address.dsn(given.replica), given.replica.control_schema, config.capture.prefix)
    return Warehouse(spark, given.warehouse, config.capture.prefix)


_RELATION: Final = """
    SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')
"""
_COLUMNS: Final = """
    SELECT a.attname::text FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
"""
