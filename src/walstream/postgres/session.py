"""Talking with PostgreSQL: ordinary sessions, replication sessions, and the copy-both stream of a slot.

Owns the connections and nothing of what travels over them. libpq does the work (TLS, SCRAM, several hosts), through
psycopg; its replication mode through `psycopg.pq`, because psycopg itself refuses copy-both. Every failure leaves here
as an error of our tree (failures.py).

Every session has the same settings, pinned at its start, so that a value has one text whoever reads it: streamed, read
in a snapshot, or compared in a test. `search_path` is among them: how a regclass is written depends on it. It leaves
nothing but pg_catalog, so statements name schemas. `client_min_messages` is there for one warning that must not be
missed (stream.py).

A session, and a stream, belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from walstream.errors import ConnectionLost, SourceNotReady, UsageError, WalstreamError
from walstream.positions import ZERO, Lsn
from walstream.postgres.failures import connection_failure, failure, result_failure
from walstream.postgres.protocol import TimelineSwitch, parse_timeline_history
from walstream.postgres.stream import CopyBoth

APPLICATION_NAME: Final = "walstream"
CONNECT_TIMEOUT_S: Final = 10
KEEPALIVES_IDLE_S: Final = 20
KEEPALIVES_INTERVAL_S: Final = 10
KEEPALIVES_COUNT: Final = 4
WAIT_S: Final = 1.0
CANCEL_TIMEOUT_S: Final = 2.0
LOCK_TIMEOUT_S: Final = 5.0
"""How long a statement that capture waits for may wait for the lock of another session."""
SERVER_VERSION_MIN: Final = 140000

PINNED_SETTINGS: Final[Mapping[str, str]] = {
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "quote_all_identifiers": "off",
    "search_path": "pg_catalog",
    "client_min_messages": "warning",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}

SnapshotAction = Literal["export", "use", "nothing"]
"""What CREATE_REPLICATION_SLOT does with the snapshot of its consistent point."""

_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_PROTOCOL_VERSIONS: Final = ((160000, 4), (150000, 3), (140000, 2))


class SystemIdentity(NamedTuple):
    """Which server this is: the cluster's identifier, its timeline, and how far its WAL is flushed."""

    system_identifier: str
    timeline: int
    flushed: Lsn
    database: str


class CreatedSlot(NamedTuple):
    """A new slot: everything that commits after `consistent_point` is streamed, the snapshot shows what did before."""

    name: str
    consistent_point: Lsn
    snapshot_name: str | None


def connect(
    dsn: str, *, application_name: str = APPLICATION_NAME, read_only: bool = False, lock_timeout_s: float = 0
) -> psycopg.Connection[Any]:
    """Open an ordinary session in autocommit mode, with the pinned settings. Raises UnreachableError, RefusedError.

    With `lock_timeout_s` a statement that waits longer for a lock fails with LockTimeout; 0: it waits.
    """
    settings = {"lock_timeout": f"{round(lock_timeout_s * 1000)}"}
    if read_only:
        settings["default_transaction_read_only"] = "on"
    connection = _connect(dsn, application_name, settings)
    if connection.info.server_version < SERVER_VERSION_MIN:
        version = connection.info.server_version // 10000
        connection.close()
        raise SourceNotReady(f"The server is PostgreSQL {version}; 14 is the oldest that streams logically.")
    return connection


@contextlib.contextmanager
def named(doing: str) -> Iterator[None]:
    """Turn the errors of psycopg inside of the block into those of our tree; `doing` completes "while …"."""
    try:
        yield
    except psycopg.Error as error:
        raise failure(error, doing) from error


def cancel(connection: psycopg.Connection[Any], timeout_s: float = CANCEL_TIMEOUT_S) -> None:
    """Ask the server to stop what it does for a session, from any thread; a session that is over is no error."""
    with contextlib.suppress(psycopg.Error):
        connection.cancel_safe(timeout=timeout_s)


class ReplicationSession:
    """A walsender session: commands first, then at most one stream. A context manager."""

    def __init__(self, dsn: str, *, application_name: str = APPLICATION_NAME) -> None:
        """Connect. Raises UnreachableError, RefusedError."""
        self._connection = _connect(dsn, application_name, {}, replication="database")
        self._pgconn = self._connection.pgconn
        self._pgconn.nonblocking = 1
        self.server_version = self._pgconn.server_version
        if self.server_version < SERVER_VERSION_MIN:
            self.close()
            raise SourceNotReady(
                f"The server is PostgreSQL {self.server_version // 10000}; 14 is the oldest that streams logically."
            )

    @property
    def protocol_version(self) -> int:
        """The newest version of pgoutput's protocol that the server speaks."""
        return next(number for minimum, number in _PROTOCOL_VERSIONS if self.server_version >= minimum)

    def identify_system(self) -> SystemIdentity:
        """Ask the server who it is."""
        ((identifier, timeline, flushed, database),) = self._rows("IDENTIFY_SYSTEM", "asking who it is")
        return SystemIdentity(_text(identifier), int(_text(timeline)), Lsn.parse(_text(flushed)), _text(database))

    def timeline_history(self, timeline: int) -> list[TimelineSwitch]:
        """Return where the ancestors of a timeline ended; the first timeline has none."""
        if timeline == 1:
            return []
        ((_, content),) = self._rows(f"TIMELINE_HISTORY {timeline:d}", "asking for the history of its timeline")
        return parse_timeline_history(content or b"")

    def create_slot(
        self,
        name: str,
        *,
        temporary: bool = False,
        failover: bool | None = None,
        snapshot: SnapshotAction = "export",
        plugin: str = "pgoutput",
        timeout_s: float | None = None,
        tend: Callable[[], None] | None = None,
    ) -> CreatedSlot:
        """Create a logical slot; an exported snapshot lives until the next command of this session or its end.

        PostgreSQL waits for all transactions that are running to end; `tend` is called every second meanwhile, and what
        it raises ends the wait and the session. `failover` is by default on where it is possible:
        PostgreSQL 17 and later, for a slot that is not temporary. Raises SlotExists, SourceNotReady.
        """
        options = [f"SNAPSHOT '{snapshot}'"]
        if failover or (failover is None and self.server_version >= 170000 and not temporary):
            options.append("FAILOVER true")
        if self.server_version < 150000:
            options = [{"export": "EXPORT_SNAPSHOT", "use": "USE_SNAPSHOT", "nothing": "NOEXPORT_SNAPSHOT"}[snapshot]]
        else:
            options = [f"({', '.join(options)})"]
        words = ("CREATE_REPLICATION_SLOT", _slot(name), *(["TEMPORARY"] if temporary else []), "LOGICAL", plugin)
        rows = self._rows(" ".join((*words, *options)), f"creating the slot {name}", timeout_s, tend)
        ((_, point, snapshot_name, _),) = rows
        return CreatedSlot(name, Lsn.parse(_text(point)), _text(snapshot_name) if snapshot_name else None)

    def drop_slot(self, name: str, *, wait: bool = False) -> None:
        """Drop a slot; one in use is an error unless we wait until it is free. Raises SlotMissing, SlotBusy."""
        self._rows(f"DROP_REPLICATION_SLOT {_slot(name)}{' WAIT' if wait else ''}", f"dropping the slot {name}")

    def start(
        self,
        slot: str,
        publications: Sequence[str],
        start_lsn: int = ZERO,
        *,
        streaming: bool = True,
        messages: bool = True,
        protocol_version: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> CopyBoth:
        """Begin the slot's stream; from `start_lsn` or where the slot is confirmed, whichever is later.

        Raises SlotMissing, SlotBusy, SlotLost. A missing publication is found out only when the first change is
        decoded, and then raised from the stream as PublicationMissing.
        """
        chosen = {
            "proto_version": str(protocol_version or self.protocol_version),
            "publication_names": ",".join(_identifier(name) for name in publications),
            **({"streaming": "on"} if streaming else {}),
            **({"messages": "true"} if messages else {}),
            **(options or {}),
        }
        listed = ", ".join(f"{_identifier(name)} {_literal(value)}" for name, value in chosen.items())
        self._begin_copy(
            f"START_REPLICATION SLOT {_slot(slot)} LOGICAL {Lsn(start_lsn)} ({listed})", f"starting the slot {slot}"
        )
        return CopyBoth(self._pgconn, f"streaming from the slot {slot}")

    def close(self) -> None:
        """End the session; a stream of it ends too."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rows(
        self, command: str, doing: str, timeout_s: float | None = None, tend: Callable[[], None] | None = None
    ) -> list[tuple[bytes | None, ...]]:
        """Send a command in the simple protocol, the only one that a walsender has, and return the rows it gives."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with named(doing):
            self._pgconn.send_query(command.encode())
            result = self._result(doing, deadline, tend)
            while self._result(doing, deadline) is not None:
                pass
        if result is None or result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise _refused(result, doing)
        return [
            tuple(result.get_value(row, column) for column in range(result.nfields)) for row in range(result.ntuples)
        ]

    def _begin_copy(self, command: str, doing: str) -> None:
        with named(doing):
            self._pgconn.send_query(command.encode())
            result = self._result(doing, None)
            if result is not None and result.status == pq.ExecStatus.COPY_BOTH:
                return
            while self._result(doing, None) is not None:
                pass
        raise _refused(result, doing)

    def _result(
        self, doing: str, deadline: float | None, tend: Callable[[], None] | None = None
    ) -> pq.abc.PGresult | None:
        """Wait for the next result of the command that was sent; None when there are no more."""
        poll = select.poll()
        poll.register(self._pgconn.socket, select.POLLIN)
        while self._pgconn.flush() or self._pgconn.is_busy():
            if tend is not None:
                try:
                    tend()
                except BaseException:
                    self._cancel()
                    raise
            left_s = WAIT_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                self._cancel()
                raise SourceNotReady(f"PostgreSQL was not ready in time while {doing}.", "Are long transactions open?")
            if poll.poll(min(left_s, WAIT_S) * 1000):
                self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _cancel(self) -> None:
        """Ask the server to stop what it does; a walsender that waits would not notice that we are gone."""
        with contextlib.suppress(psycopg.OperationalError):
            self._pgconn.get_cancel().cancel()
        self.close()


def _connect(
    dsn: str, application_name: str, settings: Mapping[str, str], **parameters: str
) -> psycopg.Connection[tuple[Any, ...]]:
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise UsageError(f"The connection string cannot be read: {str(error).strip()}.") from None
    options = " ".join(f"-c {name}={value}" for name, value in {**PINNED_SETTINGS, **settings}.items())
    merged: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "application_name": application_name,
        # A server that vanished without a word is found out in a minute, not in the two hours of the kernel's default.
        "keepalives_idle": KEEPALIVES_IDLE_S,
        "keepalives_interval": KEEPALIVES_INTERVAL_S,
        "keepalives_count": KEEPALIVES_COUNT,
        **given,
        "client_encoding": "UTF8",
        "options": f"{given.get('options') or ''} {options}".strip(),
        **parameters,
    }
    try:
        return psycopg.connect(make_conninfo(**merged), autocommit=True)
    except psycopg.OperationalError as error:
        where = f"{given.get('host') or 'the local socket'}:{given.get('port') or 5432}"
        raise connection_failure(error, where) from error


def _refused(result: pq.abc.PGresult | None, doing: str) -> WalstreamError:
    if result is None:
        return ConnectionLost(f"PostgreSQL gave no answer while {doing}.")
    return result_failure(result, doing)


def _text(value: bytes | None) -> str:
    return (value or b"").decode()


def _slot(name: str) -> str:
    if not _SLOT_NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a slot.", "Lower-case letters, digits and _; at most 63.")
    return f'"{name}"'


def _identifier(name: str) -> str:
    return '"' + _no_nul(name).replace('"', '""') + '"'


def _literal(value: str) -> str:
    # The replication grammar knows doubled quotes and no backslashes.
    return "'" + _no_nul(value).replace("'", "''") + "'"


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise UsageError(f"{text!r} has a NUL in it.")
    return text
