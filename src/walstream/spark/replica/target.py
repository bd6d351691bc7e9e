"""What a table of the replica is like, and what may be done to it: questions to the replica's catalogue.

Owns the queries; refuses to know batches and the log. A table that is there already may have been made by somebody with
more in mind than a copy: unique values, identities, generated columns, foreign keys, triggers. What follows from those
for a merge is told here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import psycopg

from walstream.postgres.session import named
from walstream.spark.replica.sql import MERGE_VERSION_MIN, TEXT, TableName

Connection = psycopg.Connection[Any]


class TargetColumn(NamedTuple):
    """A column of a table of the replica."""

    name: str
    type: str
    is_generated: bool
    is_identity: bool
    """GENERATED ALWAYS AS IDENTITY: it takes a value when a row is inserted, and no other one later."""


class Target(NamedTuple):
    """A table of the replica, as it is now."""

    columns: tuple[TargetColumn, ...]
    unique_keys: tuple[tuple[str, ...], ...]
    """The columns of every index that is unique or of an exclusion; those of an expression are not named."""
    trigger_count: int
    """Triggers that run unless they are muted; a foreign key is some of them."""
    server_version: int

    @property
    def types(self) -> dict[str, str]:
        """The columns with their types."""
        return {column.name: column.type for column in self.columns}

    @property
    def writable(self) -> list[str]:
        """The columns that take a value; the others make their own of these."""
        return [column.name for column in self.columns if not column.is_generated]

    def can_merge(self, key: Iterable[str]) -> bool:
        """Whether rows can be updated where they are: no order of updates then meets anything but the key."""
        wanted = set(key)
        return (
            self.server_version >= MERGE_VERSION_MIN
            and all(set(columns) == wanted for columns in self.unique_keys)
            and not any(column.is_identity and column.name not in wanted for column in self.columns)
        )


class ResolvedType(NamedTuple):
    """A type of the source at the replica: its name there, and what separates the elements of an array of it."""

    name: str
    delimiter: str
    is_known: bool


def find_target(connection: Connection, table: TableName) -> Target | None:
    """Describe a table; None when it is not there."""
    with named(f"looking at the table {table}"):
        row = connection.execute(_TABLE, [table.schema, table.table]).fetchone()
        if row is None:
            return None
        columns = connection.execute(_COLUMNS, [row[0]]).fetchall()
        keys = connection.execute(_UNIQUE, [row[0]]).fetchall()
    return Target(
        tuple(TargetColumn(*column) for column in columns),
        tuple(tuple(columns) for (columns,) in keys),
        row[1],
        connection.info.server_version,
    )


def resolve_types(connection: Connection, names: Iterable[str]) -> dict[str, ResolvedType]:
    """Find types by what the source calls them; one that is not there becomes text, which holds all values."""
    found: dict[str, ResolvedType] = {}
    for name in set(names):
        try:
            with connection.transaction():
                row = connection.execute(_TYPE, [name]).fetchone()
        except psycopg.errors.Error:
            row = None  # A word that this server cannot even read as a type.
        if row is None or row[0] is None:
            found[name] = ResolvedType(TEXT, ",", False)
        else:
            # Its own name for it, except that only the source's has the modifier.
            found[name] = ResolvedType(name if "(" in name else row[0], row[1], True)
    return found


def can_mute(connection: Connection) -> bool:
    """Whether this role may keep triggers and foreign keys from running."""
    try:
        with connection.transaction():
            connection.execute(MUTE)
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


MUTE: Final = "SET LOCAL session_replication_role = replica"
"""Within a transaction: what is written was checked at the source, and triggers ran there."""

_TABLE: Final = """
    SELECT c.oid, (SELECT count(*) FROM pg_catalog.pg_trigger g WHERE g.tgrelid = c.oid AND g.tgenabled = 'O')
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')
"""

_COLUMNS: Final = """
    SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attgenerated <> '', a.attidentity = 'a'
    FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_UNIQUE: Final = """
    SELECT array(SELECT a.attname::text FROM pg_catalog.unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) AS k(number)
                 LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number)
    FROM pg_catalog.pg_index i WHERE i.indrelid = %s AND (i.indisunique OR i.indisexclusion)
"""

# An array is written with the delimiter of its elements, which its own entry repeats.
_TYPE: Final = """
    SELECT pg_catalog.format_type(t.oid, NULL), t.typdelim::text
    FROM pg_catalog.pg_type t WHERE t.oid = pg_catalog.to_regtype(%s)
"""
