"""Looks out for tables without a snapshot and prepares the next one, in a thread of its own.

Owns everything about a snapshot that may take long without anything to read: asking what is published, waiting for a
consistent point (PostgreSQL waits for all running transactions), measuring tables, connecting. Refuses to know rows and
the log. What it has prepared it hands over whole, one at a time, and prepares the next only after that one is over.

A table needs a snapshot when none was finished for it, or when what was finished was of another `identity`.

Questions about a table wait while another session holds ACCESS EXCLUSIVE on it. No wait is longer than LOCK_TIMEOUT_S:
then the look is repeated later, and the stream continues meanwhile. `close` cancels what the thread waits for and
returns after CLOSE_S_MAX in any case: a generation that does not end keeps the slot, and PostgreSQL its WAL.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from walstream import logs
from walstream.errors import LockTimeout, WalstreamError
from walstream.postgres.copy_out import CopyReader
from walstream.postgres.session import LOCK_TIMEOUT_S, CreatedSlot, cancel
from walstream.postgres.snapshot import (
    Connection,
    ConsistentPoint,
    Membership,
    TableAtPoint,
    cancel_slot,
    locked_tables,
    memberships,
    patient_session,
    temporary_slot_name,
)

LOOK_INTERVAL_S: Final = 5.0
"""How soon a table that was added to the publication is noticed, unless a row of it comes first."""

CLOSE_S_MAX: Final = 15.0
"""How long closing waits for the thread, whatever it does."""

log = logs.get(__name__)


class Prepared(NamedTuple):
    """A snapshot ready to be read: the point, its tables, and connections to read them with."""

    point: ConsistentPoint
    tables: list[TableAtPoint]
    readers: list[CopyReader]

    def close(self) -> None:
        """Let everything go."""
        for reader in self.readers:
            reader.close()
        self.point.close()


class Watch:
    """The thread. `take` what it has prepared, say when that is `over`."""

    def __init__(
        self,
        dsn: str,
        publication: str,
        finished: Mapping[tuple[str, str], str],
        *,
        workers: int,
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Take the identities of the tables whose snapshot is finished; the mapping is read again at every look."""
        self._dsn = dsn
        self._publication = publication
        self._finished = finished
        self._workers = workers
        self._look_interval_s = look_interval_s
        self._held: ConsistentPoint | None = None
        self._slot_name: str | None = None
        self._connection: Connection | None = None
        self._point: ConsistentPoint | None = None
        """What is asked at this moment, so that it can be cancelled."""
        self._lock = threading.Lock()
        self._ready: Prepared | None = None
        self._is_out = False
        self._failure: WalstreamError | None = None
        self._is_closed = False
        self._wake = threading.Event()
        self._looked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="walstream-snapshot", daemon=True)

    def hold(self, slot: CreatedSlot) -> None:
        """Keep the moment at which a new slot begins, for the first snapshot. Before `start`."""
        self._held = ConsistentPoint.of_slot(self._dsn, slot, lock_timeout_s=LOCK_TIMEOUT_S)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def look_now(self) -> None:
        """Do not wait for the next look: something new was seen."""
        self._wake.set()

    def take(self) -> Prepared | None:
        """Return the snapshot that is ready, if one is. Raises what has failed in the thread."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            prepared, self._ready = self._ready, None
            return prepared

    def over(self) -> None:
        """The snapshot that was taken is over, with all of its tables finished or not."""
        with self._lock:
            self._is_out = False
            self._looked.clear()
        self._wake.set()

    @property
    def has_found_nothing(self) -> bool:
        """Whether the thread has looked, and everything published then was finished."""
        with self._lock:
            return self._looked.is_set() and not self._is_out

    def close(self) -> None:
        """End the thread, also where it waits for a consistent point or for a lock."""
        self._is_closed = True
        self._wake.set()
        deadline = time.monotonic() + CLOSE_S_MAX
        while self._thread.is_alive():
            if time.monotonic() > deadline:
                log.warning("snapshot thread left behind", waited_s=CLOSE_S_MAX)
                return
            self._cancel()
            self._thread.join(0.2)
        for left in (self._ready, self._held):
            if left is not None:
                left.close()

    def _cancel(self) -> None:
        """Cancel what the thread waits for."""
        with contextlib.suppress(WalstreamError):
            if (name := self._slot_name) is not None:
                cancel_slot(self._dsn, name)
        if (point := self._point) is not None:
            point.cancel()
        if (connection := self._connection) is not None:
            cancel(connection)

    def _run(self) -> None:
        try:
            with patient_session(self._dsn, lock_timeout_s=LOCK_TIMEOUT_S) as connection:
                self._connection = connection
                while not self._is_closed:
                    self._wake.clear()
                    if not self._is_out:
                        try:
                            self._look(connection)
                        except LockTimeout as error:
                            tables = ", ".join(locked_tables(connection))
                            log.warning("snapshot waits for a lock", locked=tables, reason=error.message)
                    self._wake.wait(self._look_interval_s)
        except WalstreamError as error:
            with self._lock:
                self._failure = None if self._is_closed else error
        except Exception as error:
            with self._lock:
                self._failure = WalstreamError(f"The preparation of a snapshot failed: {error!r}.")
            raise

    def _look(self, connection: Connection) -> None:
        lacking = self._lacking(connection)
        prepared = self._prepare(lacking) if lacking or self._held is not None else None
        with self._lock:
            self._ready = prepared
            self._is_out = prepared is not None
            self._looked.set()

    def _lacking(self, connection: Connection) -> list[Membership]:
        return [
            member
            for member in memberships(connection, self._publication)
            if self._finished.get((member.schema, member.table)) != member.identity
        ]

    def _prepare(self, lacking: list[Membership]) -> Prepared | None:
        point, self._held = self._held, None
        if point is None:
            log.info("waiting for a consistent point", tables=len(lacking))
            self._slot_name = temporary_slot_name()
            try:
                point = ConsistentPoint.now(self._dsn, self._slot_name, lock_timeout_s=LOCK_TIMEOUT_S)
            finally:
                self._slot_name = None
        prepared = Prepared(point, [], [])
        self._point = point
        try:
            prepared.tables.extend(point.tables(self._publication, {member[:2] for member in lacking}))
            for table in prepared.tables:
                for partition in table.foreign_parts:
                    log.warning("partition is a foreign table, left out", partition=partition)
            if any(table.parts for table in prepared.tables):
                prepared.readers.extend(CopyReader(point, lock_timeout_s=LOCK_TIMEOUT_S) for _ in range(self._workers))
        except BaseException:
            prepared.close()
            raise
        finally:
            self._point = None
        if not prepared.tables:
            prepared.close()
            return None
        return prepared
