"""The clock of topics with LogAppendTime: times that never go back, not even across restarts and clock steps.

A stamp is at least the wall clock, what its partition asks for (see `stamps`), and above the *floor*: what an earlier
process had reserved ahead of time. The invariant: `promise < reservation` and `stamp <= reservation`, where only a
durable reservation counts; so everything that an earlier process stamped or promised lies at or below the floor.

Nothing here waits for the disk: `run` writes a reservation beside the event loop. Where the wall clock has outrun the
reservation meanwhile, stamps are the reservation itself. Sans-IO: the wall clock and the durable write are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from walstream.errors import PartitionOffline

Run: TypeAlias = Callable[[Callable[[], None], Callable[[None, Exception | None], None]], None]
Covered: TypeAlias = Callable[[PartitionOffline | None], None]

AHEAD_MS = 3_000
"""How far a reservation reaches. A restart within this time stamps up to this much ahead of the wall clock."""

AHEAD_MS_MIN = 500
"""How far it reaches where stamps are ahead of the wall clock already, as after a quick restart. Each such restart
begins above the last one's reservation, so this is what a node that fails again and again gets ahead by each time."""

RENEW_MS = 1_500
"""Less than this left: the next tick reserves again, so that an append hardly ever has to."""


def run_at_once(job: Callable[[], None], done: Callable[[None, Exception | None], None]) -> None:
    """Run a job now."""
    try:
        job()
    except OSError as error:
        done(None, error)
    else:
        done(None, None)


class AppendClock:
    """Gives append times below a durable reservation."""

    def __init__(self, floor_ms: int, reserve: Callable[[int], None], run: Run = run_at_once) -> None:
        self.run = run
        """Runs `reserve`, which blocks, and calls back on the event loop."""
        self._first_ms = floor_ms + 1
        self._reserved_ms = floor_ms
        self._reserve = reserve
        self._refusal: PartitionOffline | None = None
        """Why the last reservation failed; None if it did not, or is to be tried again."""
        self._is_reserving = False
        self._waiting: list[tuple[int, Covered]] = []
        """Callbacks of `cover` with their times."""
        self.high_ms = floor_ms
        """The latest time that was given, by this process or an earlier one."""

    def stamp(self, now_ms: int, least_ms: int) -> int:
        """Return the time for a batch appended now to a partition that takes no time before `least_ms`.

        Raises PartitionOffline where the disk refuses a reservation that is needed, or has not written it yet.
        """
        least_ms = max(least_ms, self._first_ms)
        stamp_ms = max(now_ms, least_ms)
        if stamp_ms > self._reserved_ms:
            self._extend(now_ms, stamp_ms)
        if stamp_ms > self._reserved_ms:
            if self._refusal is not None:
                raise self._refusal
            if least_ms > self._reserved_ms:
                raise PartitionOffline("Append times are being reserved on the disk.", "Send the batch again.")
            stamp_ms = self._reserved_ms
        self.high_ms = max(self.high_ms, stamp_ms)
        return stamp_ms

    def resolve(self, now_ms: int, wanted_ms: int) -> int:
        """Return the time to be promised as resolved: the wanted one, or the last one below the reservation.

        Asked very often, so a refusal is left to the next tick to fix.
        """
        if wanted_ms >= self._reserved_ms and self._refusal is None:
            self._extend(now_ms, wanted_ms)
        resolved_ms = min(wanted_ms, self._reserved_ms - 1)
        self.high_ms = max(self.high_ms, resolved_ms)
        return resolved_ms

    def cover(self, now_ms: int, time_ms: int, done: Covered) -> None:
        """Have every later process stamp above a time; `done` once that is durable, or with the disk's refusal.

        Stamps up to that time, and the first of all, are then given at once.
        """
        time_ms = max(time_ms, self._first_ms)
        if time_ms <= self._reserved_ms:
            done(None)
        else:
            self._waiting.append((time_ms, done))
            self._extend(now_ms, time_ms)

    def tick(self, now_ms: int) -> PartitionOffline | None:
        """Reserve ahead of need; return why the last reservation failed, if it did."""
        refusal, self._refusal = self._refusal, None
        if max(now_ms + RENEW_MS, self._first_ms) > self._reserved_ms:
            self._extend(now_ms, max(now_ms, self._first_ms))
        return self._refusal or refusal

    def _extend(self, now_ms: int, needed_ms: int) -> None:
        """Reserve up to `needed_ms` and some more, unless a reservation is being written."""
        if not self._is_reserving:
            self._is_reserving = True
            reserved_ms = max(now_ms + AHEAD_MS, needed_ms + AHEAD_MS_MIN)
            self.run(partial(self._reserve, reserved_ms), partial(self._extended, now_ms, reserved_ms))

    def _extended(self, now_ms: int, reserved_ms: int, _: None, error: Exception | None) -> None:
        self._is_reserving = False
        self._refusal = None if error is None else _refusal(error)
        if error is None:
            self._reserved_ms = max(self._reserved_ms, reserved_ms)
        waiting, self._waiting = self._waiting, []
        for time_ms, done in waiting:
            if error is None:
                self.cover(now_ms, time_ms, done)
            else:
                done(self._refusal)


def _refusal(error: Exception) -> PartitionOffline:
    reason = error.strerror if isinstance(error, OSError) else repr(error)
    return PartitionOffline(
        f"Append times cannot be reserved on the disk: {reason}.",
        "Free some space, or fix the disk; topics with LogAppendTime then take writes again by themselves.",
    )
