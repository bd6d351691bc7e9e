"""Virtual time: one queue of events, one source of chance.

Owns the order in which things happen. Two events at the same microsecond happen in the order in which they were
scheduled, and every decision is drawn from the one `random.Random(seed)`, so a seed is a run. Nothing in the
simulator reads a real clock, and nothing may depend on the order of a set or on an object's address.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random

EPOCH_MS = 1_700_000_000_000
"""The wall clock when a run begins, so that timestamps look like timestamps."""

MS = 1_000
"""Microseconds in a millisecond; the clock counts microseconds."""

SECOND = 1_000_000


class Timer:
    """An event that has not happened yet."""

    __slots__ = ("callback", "due_us")

    def __init__(self, due_us: int, callback: Callable[[], None]) -> None:
        self.due_us = due_us
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """See to it that it never happens."""
        self.callback = None


class Clock:
    """What time it is, and what happens next."""

    __slots__ = ("_count", "_draw", "_queue", "now_us", "random", "seed", "steps")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self._draw = self.random.random
        self.now_us = 0
        self.steps = 0
        """How many events have happened."""
        self._queue: list[tuple[int, int, Timer]] = []
        self._count = 0

    @property
    def now_ms(self) -> int:
        """The wall clock, which in a simulation never jumps."""
        return EPOCH_MS + self.now_us // 1_000

    def after(self, delay_us: int, callback: Callable[[], None]) -> Timer:
        """Schedule an event."""
        due_us = self.now_us + delay_us if delay_us > 0 else self.now_us
        timer = Timer(due_us, callback)
        self._count = count = self._count + 1
        heappush(self._queue, (due_us, count, timer))
        return timer

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        queue = self._queue
        while queue:
            due_us, _, timer = heappop(queue)
            callback = timer.callback
            if callback is None:
                continue
            timer.callback = None
            self.now_us = due_us
            self.steps += 1
            callback()
            return True
        return False

    def forget_cancelled(self) -> None:
        """Drop the events that will never happen, so that a long run does not carry them along."""
        self._queue = [entry for entry in self._queue if entry[2].callback is not None]
        heapify(self._queue)

    def chance(self, probability: float) -> bool:
        """Decide something that happens with a probability."""
        return self._draw() < probability

    def between(self, low: int, high: int) -> int:
        """Draw a whole number from low to high, both included. Faster than `randint`, which is asked very often."""
        return low + int(self._draw() * (high - low + 1))
