"""Looks out for tables without a snapshot and prepares the next one, in a thread of its own.

Owns everything about a snapshot that may take long without anything to read: asking what is published, waiting for a
consistent point (PostgreSQL waits for all running transactions), measuring tables, connecting. Refuses to know rows and
the log. What it has prepared it hands over whole, one at a time, and prepares the next only after that one is over.

A table needs a snapshot when none was finished for it, or when the rows of the one that was finished are not proved any
more: the table was missing from the publication at a look, or its `identity` (postgres/identity.py) is another one and
neither the catalogue nor its rows show that nothing was missed.

Questions about a table wait while another session holds ACCESS EXCLUSIVE on it. No wait is longer than LOCK_TIMEOUT_S:
then the look is repeated later, and the stream continues meanwhile. `close` cancels what the thread waits for and
returns after CLOSE_S_MAX in any case: a generation that does not end keeps the slot, and PostgreSQL its WAL.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import msgspec

from walstream import logs
from walstream.errors import LockTimeout, NotAuthorized, QueryFailed, WalstreamError
from walstream.postgres.copy_out import CopyReader
from walstream.postgres.identity import (
    Comparison,
    Identity,
    compare,
    compare_unparsed,
    recorded_identity,
    unproved,
)
from walstream.postgres.session import LOCK_TIMEOUT_S, CreatedSlot, cancel
from walstream.postgres.snapshot import (
    Connection,
    ConsistentPoint,
    Membership,
    TableAtPoint,
    cancel_slot,
    has_row_of_before,
    locked_tables,
    memberships,
    patient_session,
    temporary_slot_name,
    was_attached_empty,
)

MISSED: Final = ""
"""Stands for the identity of a table that a look has not found in the publication; it equals none."""

LOOK_INTERVAL_S: Final = 5.0
"""How soon a table that was added to the publication is noticed, unless a row of it comes first."""

CLOSE_S_MAX: Final = 15.0
"""How long closing waits for the thread, whatever it does."""

TableKey: TypeAlias = tuple[str, str]
"""Schema and table."""

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
        finished: dict[TableKey, str],
        *,
        workers: int,
        look_interval_s: float = LOOK_INTERVAL_S,
        may_read: bool = True,
        on_proved: Callable[[TableKey, str], None] = lambda *_: None,
        on_disproved: Callable[[TableKey], None] = lambda _: None,
    ) -> None:
        """Take the identities of the tables whose snapshot is finished; the mapping is read again at every look.

        Without `may_read` no snapshot is prepared: a table that needs one is reported. The thread calls `on_proved`
        with a later identity of a finished table, and `on_disproved` for one that must be read again and may not.
        """
        self._dsn = dsn
        self._publication = publication
        self._finished = finished
        self._workers = workers
        self._look_interval_s = look_interval_s
        self._may_read = may_read
        self._on_proved = on_proved
        self._on_disproved = on_disproved
        self._proved: dict[TableKey, tuple[str, Identity]] = {}
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
        members = memberships(connection, self._publication)
        for gone in self._finished.keys() - {member[:2] for member in members}:
            # Even if it looks the same when it comes back: what was written meanwhile is not in the stream.
            if self._finished[gone] != MISSED:
                self._finished[gone] = MISSED
                log.warning("table not published any more, its rows in the log stay as they are", table=".".join(gone))
        return [member for member in members if self._needs_snapshot(connection, member)]

    def _needs_snapshot(self, connection: Connection, member: Membership) -> bool:
        key, now = (member.schema, member.table), member.identity
        recorded = self._finished.get(key)
        if recorded is None:
            if not self._may_read:
                self._finished[key] = now.text
            return self._may_read
        # Each look proves what came since the one before, so that is what the next compares with.
        known = self._proved.get(key)
        before = known[1] if known is not None and known[0] == recorded else recorded_identity(recorded)
        found = compare(before, now) if before is not None else compare_unparsed(recorded, now)
        reason = found.reason
        if before is not None and (found.added or found.rewritten):
            failed = _disproved(connection, before, now, found)
            if failed is None:
                return False
            reason = unproved(now, failed) if failed else ""
        if not reason:
            if before is None or msgspec.structs.replace(before, horizon=now.horizon) != now:
                recorded = self._finished[key] = now.text
                self._on_proved(key, recorded)
            self._proved[key] = recorded, now
            return False
        table = ".".join(key)
        if self._may_read:
            log.warning("table changed outside of the stream, will be read again", table=table, reason=reason)
            return True
        log.error(
            "table changed outside of the stream, its rows in the log are not whole",
            table=table,
            reason=reason,
            hint='Set capture.snapshot = "initial" and start capture again: it reads each table that has no snapshot.',
        )
        self._finished[key] = now.text
        self._on_disproved(key)
        return False

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
                    log.warning("partition is a foreign or unlogged table, left out", partition=partition)
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


def _disproved(connection: Connection, before: Identity, now: Identity, found: Comparison) -> frozenset[int] | None:
    """Return the parts whose rows do not show that nothing was missed; None: a lock hides some, so look again later."""
    failed = set()
    for part in sorted(found.added | found.rewritten):
        try:
            if part in found.rewritten:
                is_proved = has_row_of_before(connection, part, before.horizon)
            else:
                is_proved = was_attached_empty(connection, part, is_born=now.parts[part].is_born)
        except (QueryFailed, NotAuthorized) as error:
            log.warning("rows not looked at", part=part, error=error.message)
            is_proved = False
        if is_proved is None:
            return None
        if not is_proved:
            failed.add(part)
    return frozenset(failed)
