"""A connection that reads pieces of tables at a consistent point, without ever blocking its caller.

Owns one session and its transaction, which sees the point's snapshot and holds ACCESS SHARE on one table at a time;
refuses to know what is read next and what becomes of the lines. Several of these are pumped by one thread: each is a
backend of its own at the server, and libpq gathers what arrives.

Statements go as one simple query, and their results are taken as they come:

    IDLE ── read(…) ──▶ PREPARING: begin, import the snapshot, lock and check ──▶ COPYING ──▶ ENDING ──▶ IDLE

The check. Some statements (a rewriting ALTER TABLE, TRUNCATE, CLUSTER) put a table's rows into a new file, in which a
transaction with an older snapshot finds nothing or something else, silently. Under the lock the table stays as it is;
so if its file is still the one that the snapshot's catalogue knows, its rows are the snapshot's. If not, TableChanged;
so too when the lock is not granted in time: whoever holds it alone may be about to change the table.
COPY finds columns by their names of now, whatever the snapshot: so each column must still have its name of then, or two
that swapped theirs would be read as each other.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

import psycopg
from psycopg import pq

from walstream.errors import ConnectionLost, TableChanged, WalstreamError
from walstream.postgres.failures import LOCK_NOT_AVAILABLE, result_failure
from walstream.postgres.session import named
from walstream.postgres.snapshot import patient_session

LINES_MAX: Final = 1_000
BYTES_MAX: Final = 1024 * 1024

# Row security must fail loudly, not hide rows. A plan is used once, so compiling it never pays.
_SETTINGS: Final = """
    SET row_security = off;
    SET jit = off;
    SET max_parallel_workers_per_gather = 0;
    SET standard_conforming_strings = on
"""

_CHANGED_STATES: Final = frozenset({"42P01", "42703", "3F000", "42883", "42804", "42809", "42704", LOCK_NOT_AVAILABLE})
"""Undefined table, column, schema, function, type, or one of another kind: what was there at the point is not now.

A lock that is not granted in time is among them: ACCESS EXCLUSIVE is held to change the table.
"""

_SQLSTATE: Final = pq.DiagnosticField.SQLSTATE


def _check(part: str, part_id: int) -> str:
    """Return the query that locks a relation and says whether its file and the names of its columns are the snapshot's.

    pg_identify_object answers from the catalogue of now, everything else from that of the snapshot.

    Naming the relation locks it before anything is looked up, and unlike LOCK TABLE needs no more than the right to
    read some column of it.
    """
    literal = part.replace("'", "''")
    return (
        "SELECT c.relfilenode = pg_catalog.pg_relation_filenode(c.oid) AND NOT EXISTS ("
        " SELECT FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " AND (pg_catalog.pg_identify_object('pg_catalog.pg_class'::pg_catalog.regclass, c.oid, a.attnum)).identity"
        " IS DISTINCT FROM pg_catalog.format('%I.%I.%I', n.nspname, c.relname, a.attname))"
        " FROM pg_catalog.pg_class c"
        f" WHERE c.oid = {part_id:d} AND c.oid = '{literal}'::pg_catalog.regclass"
        f" AND NOT EXISTS (SELECT FROM ONLY {part} LIMIT 0)"
    )


class State(Enum):
    """What the server does for us."""

    IDLE = "idle"
    PREPARING = "preparing"
    COPYING = "copying"
    ENDING = "ending"


class Exported(Protocol):
    """A snapshot that somebody keeps: what a session elsewhere needs to see it."""

    @property
    def dsn(self) -> str:
        """Of the server."""

    @property
    def snapshot_name(self) -> str:
        """What the server calls it."""


class CopyReader:
    """One connection at a consistent point. `read` starts a COPY, `lines` gives what has arrived of it."""

    def __init__(self, point: Exported, *, lock_timeout_s: float = 0) -> None:
        """Connect; blocks for that long. `lock_timeout_s` as for `connect`. Raises UnreachableError, RefusedError."""
        self._point = point
        self._connection = patient_session(point.dsn, lock_timeout_s=lock_timeout_s)
        with named("preparing a session"):
            self._connection.execute(_SETTINGS)
        self._pgconn = self._connection.pgconn
        self._pgconn.nonblocking = 1
        self.state = State.IDLE
        self._doing = ""
        self._table: object = None
        self._checked: set[int] = set()
        self._failure: WalstreamError | None = None
        self._changed = False

    @property
    def is_idle(self) -> bool:
        """Whether it waits to be told what to read."""
        return self.state is State.IDLE

    def fileno(self) -> int:
        """The socket, to be waited on beside others."""
        return self._pgconn.socket

    def read(self, statement: str, *, table: str, part: str, part_id: int) -> None:
        """Start a COPY … TO STDOUT that reads a part of a table; both are named as SQL names them.

        The transaction goes on while the table is the same; another table ends it, and with it the lock.
        """
        assert self.is_idle, "one COPY at a time"
        before = []
        if self._table != table:
            if self._pgconn.transaction_status != pq.TransactionStatus.IDLE:
                before.append("COMMIT")
            before.append("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            before.append(f"SET TRANSACTION SNAPSHOT '{self._point.snapshot_name}'")
            self._table = table
            self._checked.clear()
        if part_id not in self._checked:
            before.append(_check(part, part_id))
            self._checked.add(part_id)
        self._doing = f"reading {table}"
        self._failure = None
        self._changed = False
        try:
            self._pgconn.send_query("; ".join((*before, statement)).encode())
            self._pgconn.flush()
        except psycopg.OperationalError as error:
            raise self._lost(error) from error
        self.state = State.PREPARING

    def lines(self, lines_max: int = LINES_MAX, bytes_max: int = BYTES_MAX) -> list[bytes]:
        """Return rows that have arrived, none when there are none yet; never waits. At the end `is_idle` is true.

        Raises TableChanged, ConnectionLost and what else the server says; lines given before that are part of a whole
        that will never be, and so are worth nothing.
        """
        found: list[bytes] = []
        size = 0
        looked_at = -1
        try:
            while len(found) < lines_max and size < bytes_max and self.state is not State.IDLE:
                if self.state is State.COPYING:
                    size += self._take(found, lines_max - len(found), bytes_max - size)
                    if self.state is not State.COPYING or len(found) >= lines_max or size >= bytes_max:
                        continue
                elif not self._pgconn.is_busy():
                    self._result()
                    continue
                # What libpq had is used up. It reads 16 KB at a time, so look again as long as that brings something.
                if looked_at == len(found):
                    break
                looked_at = len(found)
                self._pgconn.consume_input()
        except psycopg.OperationalError as error:
            raise self._lost(error) from error
        if self._changed:
            found.clear()
        if self.state is State.IDLE:
            self._raise_failure()
        return found

    def close(self) -> None:
        """End the session, and whatever the server does for it."""
        self._connection.close()

    def _take(self, found: list[bytes], lines_max: int, bytes_max: int) -> int:
        """Move lines out of libpq's buffer; return their size. The only loop that runs once per row."""
        take, append = self._pgconn.get_copy_data, found.append
        size = count = 0
        while count < lines_max and size < bytes_max:
            length, line = take(1)
            if length <= 0:
                if length == -1:
                    self.state = State.ENDING
                break
            append(bytes(line))
            size += length
            count += 1
        return size

    def _result(self) -> None:
        result = self._pgconn.get_result()
        if result is None:
            self.state = State.IDLE
            return
        match result.status:
            case pq.ExecStatus.COPY_OUT:
                self.state = State.COPYING
            case pq.ExecStatus.COMMAND_OK:
                pass
            case pq.ExecStatus.TUPLES_OK:
                self._changed = result.ntuples != 1 or result.get_value(0, 0) != b"t"
            case _:
                self._fail(result)

    def _fail(self, result: pq.abc.PGresult) -> None:
        state = (result.error_field(_SQLSTATE) or b"").decode()
        self._table = None
        if state in _CHANGED_STATES:
            self._changed = True
        self._failure = result_failure(result, self._doing)

    def _raise_failure(self) -> None:
        if self._changed:
            self._table = None
            why = (
                self._failure.message
                if self._failure
                else "Its rows were moved into a new file, or its columns have other names."
            )
            raise TableChanged(f"A table changed after the snapshot was taken, while {self._doing}. {why}")
        if self._failure is not None:
            raise self._failure

    def _lost(self, error: psycopg.OperationalError) -> ConnectionLost:
        text = " ".join(str(error).split())
        return ConnectionLost(f"The connection to PostgreSQL ended while {self._doing}: {text}.")
