"""Who waits for an offset of one partition: to become durable, or to become visible.

Owns the order in which they are woken (by offset, then by arrival) and their number, which is bounded. A waiter is
called back exactly once, unless it was cancelled: with None when the offset has been reached, with the error when it
will not be. Refuses to know time: whoever waits no longer cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from walstream.errors import RequestTimedOut, WalstreamError

Callback = Callable[[WalstreamError | None], None]

WAITERS_MAX = 65_536
"""For one partition and one kind of waiting. About 250 bytes each, beside what they hold themselves."""

_SWEEP_MIN = 64
"""Fewer cancelled waiters than this are left where they are until their offset comes."""


class Waiter:
    """One who waits; also the handle to give up waiting."""

    __slots__ = ("_waiters", "callback")

    def __init__(self, callback: Callback | None, waiters: Waiters | None) -> None:
        self.callback = callback
        self._waiters = waiters

    def cancel(self) -> None:
        """Wait no longer: the callback will not be called. Does nothing to one that has been."""
        if self.callback is not None:
            self.callback = None
            assert self._waiters is not None
            self._waiters.was_cancelled()


NOBODY = Waiter(None, None)
"""The handle of one whose callback has been called already."""


class Waiters:
    """Those who wait for one kind of end to move past their offset."""

    __slots__ = ("_cancelled", "_count", "_heap", "most")

    def __init__(self, most: int = WAITERS_MAX) -> None:
        self.most = most
        self._heap: list[tuple[int, int, Waiter]] = []
        self._count = 0
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def add(self, offset: int, callback: Callback) -> Waiter:
        """Wait for an offset. One too many is told at once, as if its time were over."""
        if len(self._heap) - self._cancelled >= self.most:
            callback(
                RequestTimedOut(
                    f"{self.most} requests wait for this partition already; this one is not waited for.",
                    "What it wrote may still become durable. Send fewer requests at a time.",
                )
            )
            return NOBODY
        waiter = Waiter(callback, self)
        self._count += 1
        heappush(self._heap, (offset, self._count, waiter))
        return waiter

    def wake(self, end: int) -> None:
        """Tell those whose offset is below `end` that it has been reached."""
        heap = self._heap
        while heap and heap[0][0] < end:
            self._tell(heappop(heap)[2], None)
            heap = self._heap  # A callback may have cancelled others, and so have replaced it.

    def fail(self, error: WalstreamError, first: int = 0) -> None:
        """Tell those who wait for `first` or more that it will not be."""
        failed = sorted(entry for entry in self._heap if entry[0] >= first)
        self._heap = [entry for entry in self._heap if entry[0] < first]
        heapify(self._heap)
        for _, _, waiter in failed:
            self._tell(waiter, error)

    def _tell(self, waiter: Waiter, error: WalstreamError | None) -> None:
        callback, waiter.callback = waiter.callback, None
        if callback is None:
            self._cancelled -= 1
        else:
            callback(error)

    def was_cancelled(self) -> None:
        """Count one who gave up, and sweep when they are many."""
        self._cancelled += 1
        if self._cancelled > _SWEEP_MIN and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapify(self._heap)
            self._cancelled = 0
