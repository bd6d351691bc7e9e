"""The clock of topics with LogAppendTime: times that never go back, not even across restarts and clock steps.

A stamp is at least the wall clock, what its partition asks for (see `stamps`), and above the *floor*: what an earlier
process had reserved ahead of time. Neither a stamp nor a resolved position passes the reservation, and a reservation is
durable before anything beyond the old one is given, so everything that an earlier process stamped or promised lies at
or below the floor. Sans-IO: the wall clock and the durable write are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from walstream.errors import PartitionOffline

Run: TypeAlias = Callable[[Callable[[], None], Callable[[None, Exception | None], None]], None]
Refused: TypeAlias = Callable[[PartitionOffline], None]

AHEAD_MS = 3_000
"""How far a reservation reaches. A restart within this time stamps up to this much ahead of the wall clock."""

AHEAD_MS_MIN = 500
"""How far it reaches where stamps are ahead of the wall clock already, as after a quick restart. Each such restart
begins above the last one's reservation, so this is what a node that fails again and again gets ahead by each time."""

RENEW_MS = 1_500
"""Less than this left: the next tick reserves again, so that an append hardly ever has to."""


class AppendClock:
    """Gives append times below a durable reservation."""

    def __init__(self, floor_ms: int, reserve: Callable[[int], None]) -> None:
        self._first_ms = floor_ms + 1
        self._reserved_ms = floor_ms
        self._reserve = reserve
        self._is_refused = False
        self._is_reserving = False
        """Whether a reservation is being written beside the loop."""
        self.high_ms = floor_ms
        """The latest time that was given, by this process or an earlier one."""

    def stamp(self, now_ms: int, least_ms: int) -> int:
        """Return the time for a batch appended now to a partition that takes no time before `least_ms`.

        Raises PartitionOffline where the disk refuses a reservation that is needed.
        """
        stamp_ms = max(now_ms, least_ms, self._first_ms)
        if stamp_ms > self._reserved_ms:
            self._extend(now_ms, stamp_ms)
        if stamp_ms > self.high_ms:
            self.high_ms = stamp_ms
        return stamp_ms

    def resolve(self, now_ms: int, wanted_ms: int) -> int:
        """Return the time to be promised as resolved: the wanted one, or what is reserved where the disk refuses more
        or is writing a reservation.

        Asked very often, so a refusal is left to the next tick to fix.
        """
        if wanted_ms > self._reserved_ms and not self._is_refused and not self._is_reserving:
            try:
                self._extend(now_ms, wanted_ms)
            except PartitionOffline:
                self._is_refused = True
        resolved_ms = min(wanted_ms, self._reserved_ms)
        self.high_ms = max(self.high_ms, resolved_ms)
        return resolved_ms

    def cover(self, now_ms: int, time_ms: int) -> None:
        """Have every later process stamp above a time. Raises PartitionOffline where the disk refuses."""
        if time_ms > self._reserved_ms:
            self._extend(now_ms, time_ms)

    def tick(self, now_ms: int, run: Run | None = None, refused: Refused | None = None) -> None:
        """Reserve ahead of need, by `run` beside the loop; an append that needs more meanwhile waits for the disk.

        `refused` is called where the disk refuses; without it PartitionOffline is raised.
        """
        self._is_refused = False
        if self._is_reserving or now_ms + RENEW_MS <= self._reserved_ms:
            return
        reserved_ms = now_ms + AHEAD_MS
        self._is_reserving = True

        def reserved(_: None, error: Exception | None) -> None:
            self._is_reserving = False
            if error is None:
                self._reserved_ms = max(self._reserved_ms, reserved_ms)
            elif refused is None or not isinstance(error, OSError):
                raise error if not isinstance(error, OSError) else _refusal(error)
            else:
                refused(_refusal(error))

        (run or _at_once)(partial(self._reserve, reserved_ms), reserved)

    def _extend(self, now_ms: int, needed_ms: int) -> None:
        reserved_ms = max(now_ms + AHEAD_MS, needed_ms + AHEAD_MS_MIN)
        try:
            self._reserve(reserved_ms)  # Durable before it counts; an error leaves the old reservation in force.
        except OSError as error:
            raise _refusal(error) from error
        self._reserved_ms = reserved_ms


def _at_once(job: Callable[[], None], done: Callable[[None, Exception | None], None]) -> None:
    try:
        job()
    except OSError as error:
        done(None, error)
    else:
        done(None, None)


def _refusal(error: OSError) -> PartitionOffline:
    return PartitionOffline(
        f"Append times cannot be reserved on the disk: {error.strerror}.",
        "Free some space, or fix the disk; topics with LogAppendTime then take writes again by themselves.",
    )
