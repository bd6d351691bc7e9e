"""The clock of topics with LogAppendTime: stamps that never go back, not even across restarts and clock steps.

A stamp is at least the wall clock, the partition's last stamp and the *floor*. The floor is what an earlier process
had reserved ahead of time, so every stamp it could have given lies at or below it. A reservation is durable before
any stamp beyond the old one is given. Sans-IO: the wall clock and the durable write are arguments.
"""

from __future__ import annotations

from collections.abc import Callable

AHEAD_MS = 3_000
"""How far a reservation reaches. A restart within this time stamps up to this much ahead of the wall clock."""

RENEW_MS = 1_500
"""Less than this left: the next tick reserves again, so that an append hardly ever has to."""


class AppendClock:
    """Gives append-time stamps below a durable reservation."""

    def __init__(self, floor_ms: int, reserve: Callable[[int], None]) -> None:
        self._floor_ms = floor_ms
        self._reserved_ms = floor_ms
        self._reserve = reserve

    def stamp(self, now_ms: int, last_ms: int) -> int:
        """Return the time for a batch appended now to a partition whose last stamp is `last_ms`."""
        stamp_ms = max(now_ms, last_ms, self._floor_ms)
        if stamp_ms > self._reserved_ms:
            self._extend(stamp_ms)
        return stamp_ms

    def tick(self, now_ms: int) -> None:
        """Reserve ahead of need."""
        if now_ms + RENEW_MS > self._reserved_ms:
            self._extend(now_ms)

    def _extend(self, from_ms: int) -> None:
        reserved_ms = from_ms + AHEAD_MS
        self._reserve(reserved_ms)  # Durable before it counts; an error leaves the old reservation in force.
        self._reserved_ms = reserved_ms
