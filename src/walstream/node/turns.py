"""The turns of the event loop at whose ends whoever was marked gets its due, and the one timer for all of them.

Something that happens on the loop is followed by a turn's end before the loop waits again; what a thread has finished,
a flush above all, is followed by it at once (`post`), so that nobody who waited for it waits for other clients'
requests, too. Who needs the clock says when; waking is never late and may be early.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from walstream import logs
from walstream.node.marks import Connection, Link, Marks, Partition, Writes
from walstream.replication.context import NEVER

log = logs.get(__name__)


class Sleeper(Protocol):
    """Who needs the clock."""

    wake_ms: int
    """When it will be woken; `NEVER` if that is not known. Kept by `Turns`."""

    def tick(self) -> None:
        """Hear that time has passed."""


class Turns:
    """Who is to be called, in this turn or at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._marks = Marks(_guarded)
        self._is_due = False
        self._is_stopped = False
        self._heap: list[tuple[int, int, Sleeper]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER

    def clock_ms(self) -> int:
        """Return the loop's time in milliseconds: monotonic."""
        return int(self._loop.time() * 1000)

    def stop(self) -> None:
        """Wake nobody any more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    def mark_connection(self, connection: Connection) -> None:
        """Have a connection send what is ready, at the end of this turn."""
        self._marks.mark_connection(connection)
        if not self._is_due:
            self._schedule()

    def mark(self, partition: Partition) -> None:
        """Have a partition look, at the end of this turn. It marks itself once."""
        self._marks.mark(partition)
        if not self._is_due:
            self._schedule()

    def mark_link(self, link: Link) -> None:
        """Have a link send what waits, at the end of this turn."""
        self._marks.mark_link(link)
        if not self._is_due:
            self._schedule()

    def mark_writes(self, writes: Writes) -> None:
        """Have the disk begin with what has gathered, at the end of this turn."""
        self._marks.mark_writes(writes)
        if not self._is_due:
            self._schedule()

    def post(self, callback: Callable[[], None]) -> None:
        """Call back on the loop, as a turn of its own. May be called on any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._within_turn, callback)

    def _within_turn(self, callback: Callable[[], None]) -> None:
        was_due, self._is_due = self._is_due, True
        try:
            callback()
        finally:
            self._marks.run()
            self._is_due = was_due
            if self._marks and not was_due:
                self._schedule()

    def _schedule(self) -> None:
        self._is_due = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._marks.run()
        self._is_due = False
        if self._marks and not self._is_stopped:
            self._schedule()

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def wake_at(self, sleeper: Sleeper, deadline_ms: int) -> None:
        """Wake somebody at that time, who asked for no earlier one."""
        sleeper.wake_ms = deadline_ms
        self._count += 1
        heappush(self._heap, (deadline_ms, self._count, sleeper))
        if deadline_ms < self._timer_ms:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_ms = None, NEVER
        if self._heap and not self._is_stopped:
            self._timer_ms = self._heap[0][0]
            # One millisecond more: the clock is cut to whole ones, and an early timer would find nothing due.
            self._timer = self._loop.call_at((self._timer_ms + 1) / 1000, self._wake)

    def _wake(self) -> None:
        now_ms = self.clock_ms()
        while self._heap and self._heap[0][0] <= now_ms:
            deadline_ms, _, sleeper = heappop(self._heap)
            if sleeper.wake_ms != deadline_ms:
                continue  # It has asked for an earlier time since, and been woken then.
            sleeper.wake_ms = NEVER
            _guarded(sleeper.tick)
        self._arm()


def _guarded(call: Callable[[], None]) -> None:
    """Call one of many: whatever fails there, the others have their turn."""
    try:
        call()
    except Exception:
        log.exception("replication failed")
