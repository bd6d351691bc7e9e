"""The source of a capture: which server, whether its slot is there, and the engine that reads it.

Owns the steps from a configuration to a source that holds its slot; refuses to know the log. A missing slot is made
only when the log knows nothing of an older one: a slot made again cannot give what the lost one stood for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import psycopg

from walstream import logs
from walstream.capture.polling import PollingSource
from walstream.capture.resuming import SourceState
from walstream.capture.source import Source
from walstream.capture.streaming import StreamingSource
from walstream.config import Config, PostgresConfig
from walstream.errors import ConnectionLost, PublicationMissing, RefusedError, SlotMissing
from walstream.positions import ZERO, Lsn
from walstream.postgres import catalogue
from walstream.postgres.session import LOCK_TIMEOUT_S, CreatedSlot, ReplicationSession, connect, named

T = TypeVar("T")

log = logs.get(__name__)


class ResumableSource(Source, Protocol):
    """A source that can be told what it need not hand out."""

    def skip_before(self, lsn: Lsn) -> None:
        """Leave out transactions that committed before `lsn`; to be said before the first batch."""
        ...


class SlotMaker:
    """The session in which a slot was just made: while it is open, others can see what was there at that moment."""

    def __init__(self, session: ReplicationSession, slot: CreatedSlot) -> None:
        self._session = session
        self.slot = slot

    def close(self) -> None:
        """Let go of that moment."""
        self._session.close()


class Questions:
    """An ordinary session for questions, far between: one that was lost meanwhile is made again."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None

    def ask(self, question: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Return the answer. Raises ConnectionLost, UnreachableError."""
        if self._connection is not None:
            try:
                return question(self._connection)
            except ConnectionLost:
                self.close()
        self._connection = connect(self._dsn, lock_timeout_s=LOCK_TIMEOUT_S)
        return question(self._connection)

    def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Opened(NamedTuple):
    """A source that holds its slot."""

    source: ResumableSource
    state: SourceState


def ensure_slot(
    dsn: str, config: PostgresConfig, *, may_create: bool, tend: Callable[[], None] | None = None
) -> SlotMaker | None:
    """Make sure that publication and slot are there; return the maker of a slot that was not.

    `tend` is called while PostgreSQL waits for running transactions. Raises PublicationMissing, SlotMissing.
    """
    with connect(dsn, lock_timeout_s=LOCK_TIMEOUT_S) as connection:
        if not catalogue.has_publication(connection, config.publication_name):
            raise PublicationMissing(
                f"There is no publication {config.publication_name} in {config.database}.",
                "`walstream capture check --fix` makes one.",
            )
        if catalogue.slot_facts(connection, config.slot_name) is not None:
            return None
    if not may_create:
        raise SlotMissing(
            f"The slot {config.slot_name} is gone, and with it what has committed since the log's last commit point.",
            "To begin anew, with a new slot and a new snapshot: walstream capture run --new-epoch",
        )
    session = ReplicationSession(dsn)
    try:
        created = session.create_slot(config.slot_name, tend=tend)
    except BaseException:
        session.close()
        raise
    log.info("slot created", slot=created.name, consistent_point=str(created.consistent_point))
    return SlotMaker(session, created)


def open_source(dsn: str, config: Config, spill_folder: Path) -> Opened:
    """Take hold of the slot and begin to read it. Raises SlotBusy, SlotLost, SlotMissing."""
    settings = config.source.postgres
    publications = [settings.publication_name]
    memory_bytes_max = config.capture.memory_bytes_max
    source: ResumableSource
    if settings.engine == "polling":
        identity = _identity_of(dsn)
        source = PollingSource.open(
            dsn,
            settings.slot_name,
            publications,
            memory_bytes_max=memory_bytes_max,
            spill_folder=spill_folder,
            poll_interval_s=settings.poll_interval_ms / 1000,
        )
    else:
        session = ReplicationSession(dsn)
        try:
            identity = _identity(session)
            stream = session.start(settings.slot_name, publications)
            source = StreamingSource(session, stream, memory_bytes_max=memory_bytes_max, spill_folder=spill_folder)
        except BaseException:
            session.close()
            raise
    try:
        with connect(dsn, lock_timeout_s=LOCK_TIMEOUT_S) as connection:
            slot = catalogue.slot_facts(connection, settings.slot_name)
            server = catalogue.server_facts(connection)
    except BaseException:
        source.close()
        raise
    if slot is None:
        source.close()
        raise SlotMissing(f"The slot {settings.slot_name} was dropped just now.")
    state = identity._replace(
        slot=settings.slot_name,
        confirmed_flush=slot.confirmed_flush or ZERO,
        flushed=None if server.in_recovery else server.wal_end,
    )
    return Opened(source, state)


def _identity(session: ReplicationSession) -> SourceState:
    system = session.identify_system()
    history = session.timeline_history(system.timeline)
    return SourceState(system.system_identifier, system.timeline, history, "", ZERO)


def _identity_of(dsn: str) -> SourceState:
    """Ask who the server is; where replication connections are refused, without the history of its timeline."""
    try:
        with ReplicationSession(dsn) as session:
            return _identity(session)
    except RefusedError:
        with connect(dsn) as connection:
            return SourceState(catalogue.system_identifier(connection), _timeline(connection), None, "", ZERO)


def _timeline(connection: psycopg.Connection[Any]) -> int:
    """Return the timeline; on a primary it begins the name of every file of WAL."""
    with named("asking for its timeline"):
        row = connection.execute(_TIMELINE).fetchone()
    assert row is not None, "the query has one row"
    return int(row[0])


# A standby has no WAL of its own to name; it receives that of a timeline, or has the last one that it restarted from.
_TIMELINE: Final = """
    select case when pg_is_in_recovery()
        then coalesce((select received_tli from pg_stat_wal_receiver limit 1),
                      (select timeline_id from pg_control_checkpoint()))
        else ('x' || substr(pg_walfile_name(pg_current_wal_flush_lsn()), 1, 8))::bit(32)::int end
"""
