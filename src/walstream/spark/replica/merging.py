"""From a stage into its table: the part of a batch's transaction that is one table's.

Owns the order of the statements; the statements are sql.py's, the transaction is tables.py's. Runs in a savepoint: what
it raises leaves the table as it was.
"""

from __future__ import annotations

from typing import Any

import psycopg

from walstream import logs
from walstream.errors import TableUnfit
from walstream.spark.replica import sql
from walstream.spark.replica.sql import Version
from walstream.spark.replica.stages import settle
from walstream.spark.replica.staging import Part
from walstream.spark.replica.target import Target, find_target

Connection = psycopg.Connection[Any]

log = logs.get(__name__)


def apply(connection: Connection, part: Part, known: Version | None, *, is_muted: bool) -> None:
    """Bring the table to the source's version and merge its stage. Raises TableUnfit, psycopg.Error."""
    shape, stage, unsent = part.shape, part.staged.stage, part.staged.unsent
    settle(connection, part.staged)
    target = _evolved(connection, part, known)
    if target.trigger_count and not is_muted:
        raise TableUnfit(
            f"{part.name} has triggers or foreign keys at the replica, and this role cannot keep them from running.",
            "GRANT SET ON PARAMETER session_replication_role TO the role, or let it be a superuser.",
        )
    statements = []
    if part.is_emptied:
        statements.append(sql.empty(shape))
    if part.is_emptied or not shape.key:
        statements.append(sql.insert(stage, shape, target.writable))
    elif target.can_merge(shape.key):
        statements.append(sql.merge(stage, shape, unsent, target.writable))
    else:
        statements += sql.replace(stage, shape, target.writable)
    if unsent:
        if not part.is_emptied:
            _execute(connection, sql.fill(stage, shape, unsent, moved_only=target.can_merge(shape.key)))
        _refuse_orphans(connection, part)
    for statement in statements:
        _execute(connection, statement)


def _evolved(connection: Connection, part: Part, known: Version | None) -> Target:
    """Make the table, or bring it to the source's version; return it as it is then."""
    target = find_target(connection, part.name)
    if target is None:
        statements = sql.create_table(part.shape)
    else:
        types = {column.name: column.type for column in part.shape.columns}
        statements = sql.evolution(part.name, target.types, known, part.version, types)
    for statement in statements:
        _execute(connection, statement)
        log.info("replica's schema changed", table=str(part.name), statement=statement)
    if statements:
        target = find_target(connection, part.name)
    assert target is not None, "it was just made"
    return target


def _refuse_orphans(connection: Connection, part: Part) -> None:
    """See that every row has all of its columns."""
    row = connection.execute(sql.orphans(part.staged.stage, part.shape).encode()).fetchone()
    assert row is not None, "the query has one row"
    if row[0]:
        raise TableUnfit(
            f"{row[0]:,} rows of {part.name}, {row[1]} among them, were updated at the source and are not in the "
            "replica, so their columns that PostgreSQL did not send again are nowhere.",
            "Somebody has deleted them there: take a new snapshot of the table.",
        )


def _execute(connection: Connection, statement: str) -> None:
    connection.execute(statement.encode())
