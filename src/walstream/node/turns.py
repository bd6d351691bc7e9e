"""The turns of the event loop in which partitions and links get their due, and the one timer for all of them.

Whatever happens to a partition or a link only marks it; at the end of the loop's turn each marked one is called once.
So a thousand appends make one message, and the cost of replication does not grow with the number of requests. Who
needs the clock says when; waking is never late and may be early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from walstream import logs
from walstream.replication.context import NEVER

log = logs.get(__name__)

ROUNDS_MAX = 4
"""How often in one turn those are called again who were marked by others in it; then clients have their turn."""


class Sleeper(Protocol):
    """Who needs the clock."""

    wake_ms: int
    """When it will be woken; `NEVER` if that is not known. Kept by `Turns`."""

    def tick(self) -> None:
        """Hear that time has passed."""


class Partition(Protocol):
    """A partition's core, as it is called here."""

    def look(self) -> None:
        """See what has happened since the last turn."""

    def looked(self) -> None:
        """Hear that the links have sent what came of it, as far as they could."""


class Link(Protocol):
    """A link, as it is called here."""

    def serve(self) -> None:
        """Send what waits."""

    def served(self) -> None:
        """Hear that every link has sent what waited: tell what was sent here."""


class Turns:
    """Who is to be called, in this turn or at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._partitions: list[Partition] = []
        self._links: dict[Link, None] = {}
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
        """Call nobody any more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    def mark(self, partition: Partition) -> None:
        """Call a partition in this turn. It marks itself once."""
        self._partitions.append(partition)
        if not self._is_due:
            self._schedule()

    def mark_link(self, link: Link) -> None:
        """Call a link in this turn."""
        self._links[link] = None
        if not self._is_due:
            self._schedule()

    def _schedule(self) -> None:
        self._is_due = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        looked: list[Partition] = []
        for _ in range(ROUNDS_MAX):
            partitions, self._partitions = self._partitions, []
            looked += partitions
            for partition in partitions:
                _guarded(partition.look)
            links, self._links = self._links, {}
            for link in links:
                _guarded(link.serve)
            for link in links:
                _guarded(link.served)
            if not self._partitions and not self._links:
                break
        for partition in looked:
            partition.looked()
        self._is_due = False
        if (self._partitions or self._links) and not self._is_stopped:
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
