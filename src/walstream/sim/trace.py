"""What happened, one dense line per event: the time, where, what. Two runs are the same when their traces are.

Lines are made only when somebody keeps them: most runs keep none, and a run that failed is made again with a trace.
"""

from __future__ import annotations

from collections.abc import Callable

from walstream.sim.clock import Clock


class Trace:
    """Takes note of events, if anybody wants to know."""

    __slots__ = ("_clock", "_write", "is_on")

    def __init__(self, clock: Clock, write: Callable[[str], None] | None = None) -> None:
        self._clock = clock
        self._write = write
        self.is_on = write is not None

    def __call__(self, where: str, what: str) -> None:
        """Note an event. Callers that build a long text ask `is_on` first."""
        if self._write is not None:
            now_us = self._clock.now_us
            self._write(f"{self._clock.steps:6d} {now_us // 1_000_000:3d}.{now_us % 1_000_000:06d} {where:5s} {what}")
