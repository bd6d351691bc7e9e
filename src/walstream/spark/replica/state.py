"""How far a replica has come: the position of the whole and of each table, kept in the replica itself.

Owns the two control tables; refuses to know rows. Whatever changes tables writes here in the same transaction, so the
replica's own answer is right after any crash, whatever the checkpoint of the stream says.

    position    all tables that are not stopped hold exactly what committed before `end_lsn`
    tables      per table: what it has applied, from which snapshot, the version that it follows, why it is stopped
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg

from walstream.config import ReplicaConfig
from walstream.errors import TableConflict
from walstream.positions import ZERO, Lsn
from walstream.postgres import address
from walstream.postgres.session import connect, named
from walstream.spark.batches import CutRow
from walstream.spark.replica.sql import TableName, Version, control_tables, quoted
from walstream.spark.types import table_name

Connection = psycopg.Connection[Any]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Position(NamedTuple):
    """Where the replica as a whole stands."""

    point: int
    source_epoch: int
    end_lsn: Lsn
    commit_time_us: int


class TableState(NamedTuple):
    """Where one table stands."""

    name: TableName
    source_epoch: int
    end_lsn: Lsn
    """What it has applied: it may hold as much without having needed a write since. Zero: nothing was written yet."""
    point: int
    snapshot: str
    """Id of the snapshot that its rows come from; empty: from the changes alone."""
    version: Version
    """The source's version that its columns follow."""
    stopped: str = ""
    """Why it does not follow any more."""

    @property
    def is_written(self) -> bool:
        """Whether it holds anything: one that stops before its first write has a reason, and nothing else."""
        return self.end_lsn > ZERO


NOTHING: Final = Version(0, 0, (), ())
"""What a table follows that was never written."""


def as_cut(at: Position | None, tables: Iterable[TableState]) -> CutRow | None:
    """Return what a replica is at, as if it were a recorded cut: its tables and its position are one."""
    if at is None:
        return None
    everyone = {table_name(*one.name): one for one in tables}
    known = {name: one for name, one in everyone.items() if one.source_epoch == at.source_epoch}
    return CutRow(
        point=at.point,
        source_epoch=at.source_epoch,
        end_lsn=at.end_lsn,
        commit_time_us=at.commit_time_us,
        versions={name: one.point for name, one in known.items() if not one.stopped},
        snapshots={name: one.snapshot for name, one in known.items() if one.is_written},
        # One that stops before its first write of an epoch still has what it had of the one before.
        stopped={name: one.stopped for name, one in everyone.items() if one.stopped},
    )


def replica_cut(config: ReplicaConfig, prefix: str) -> CutRow | None:
    """Ask a replica what it is at; None: nothing was written to it yet. Raises UnreachableError, RefusedError."""
    state = ReplicaState(config.control_schema, prefix)
    with connect(address.dsn(config), application_name="walstream status", read_only=True) as connection:
        known = connection.execute("SELECT to_regclass(%s)", [f"{quoted(config.control_schema)}.position"]).fetchone()
        if known is None or known[0] is None:
            return None
        return as_cut(state.position(connection), state.tables(connection).values())


class ReplicaState:
    """Reads and writes the control tables of one prefix."""

    def __init__(self, schema: str, prefix: str) -> None:
        self._schema = schema
        self._own = quoted(schema)
        self._prefix = prefix

    def prepare(self, connection: Connection) -> None:
        """Make the tables where they are missing."""
        with named("making the tables of the replica's position"), connection.transaction():
            # Two that begin at once would both find nothing and both create it.
            connection.execute("SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext(%s))", [self._schema])
            for statement in control_tables(self._schema):
                connection.execute(statement.encode())

    def position(self, connection: Connection, *, lock: bool = False) -> Position | None:
        """Return where the replica stands; None: nothing was written yet. `lock` keeps others from moving it."""
        query = f"SELECT point, source_epoch, end_lsn::text, commit_time FROM {self._own}.position WHERE prefix = %s"
        with named("reading the replica's position"):
            row = connection.execute(f"{query}{' FOR UPDATE' if lock else ''}".encode(), [self._prefix]).fetchone()
        return None if row is None else Position(row[0], row[1], Lsn.parse(row[2]), _us(row[3]))

    def expect(self, connection: Connection, expected: Position | None) -> None:
        """Make sure that nobody else has moved the replica, and that nobody can. Raises TableConflict."""
        found = self.position(connection, lock=True)
        if found != expected:
            raise TableConflict(
                f"The replica is at {found.end_lsn if found else 'its beginning'}, where this pipeline has not put it.",
                "Another pipeline writes to the same replica: stop one of them.",
            )

    def move(self, connection: Connection, to: Position) -> None:
        """Write where the replica stands."""
        with named("writing the replica's position"):
            connection.execute(
                f"""INSERT INTO {self._own}.position AS p VALUES (%s, %s, %s, %s, %s, clock_timestamp())
                    ON CONFLICT (prefix) DO UPDATE SET point = excluded.point, source_epoch = excluded.source_epoch,
                    end_lsn = excluded.end_lsn, commit_time = excluded.commit_time, applied_at = excluded.applied_at
                """.encode(),
                [self._prefix, to.point, to.source_epoch, str(to.end_lsn), _moment(to.commit_time_us)],
            )

    def tables(self, connection: Connection) -> dict[TableName, TableState]:
        """Return where every table stands."""
        query = f"""
            SELECT table_schema, table_name, source_epoch, end_lsn::text, point, snapshot, version::text, stopped
            FROM {self._own}.tables WHERE prefix = %s ORDER BY 1, 2
        """
        found = {}
        with named("reading the positions of the replica's tables"):
            for schema, table, epoch, lsn, point, snapshot, version, stopped in connection.execute(
                query.encode(), [self._prefix]
            ):
                name = TableName(schema, table)
                found[name] = TableState(
                    name, epoch, Lsn.parse(lsn), point, snapshot, Version.from_json(version), stopped
                )
        return found

    def put(self, connection: Connection, state: TableState) -> None:
        """Write where a table stands."""
        with named("writing the position of a table"):
            connection.execute(
                f"""INSERT INTO {self._own}.tables VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
                    ON CONFLICT (prefix, table_schema, table_name) DO UPDATE SET source_epoch = excluded.source_epoch,
                    end_lsn = excluded.end_lsn, point = excluded.point, snapshot = excluded.snapshot,
                    version = excluded.version, stopped = excluded.stopped
                """.encode(),
                [
                    self._prefix,
                    *state.name,
                    state.source_epoch,
                    str(state.end_lsn),
                    state.point,
                    state.snapshot,
                    state.version.to_json(),
                    state.stopped,
                ],
            )


def _us(moment: datetime | None) -> int:
    return 0 if moment is None else (moment - _EPOCH) // _MICROSECOND


def _moment(us: int) -> datetime | None:
    return _EPOCH + us * _MICROSECOND if us else None
