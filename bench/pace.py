"""A steady pace, and the clock by which everybody is late: from when a thing was due, not from when it began.

A machine that stands still for 10 ms makes ten records late at a thousand a second. A loop that times its own calls
counts one, and hides the other nine; so whatever is compared here is timed from when it was due, the limit as well.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

RATE_PER_S = 1_000

lateness_ms: list[float] = []
"""How late each scheduled action began: what the machine, not the server, adds to a client's day."""


class Moment(NamedTuple):
    """When something was to begin, and when it did."""

    due: float
    begun: float


class Samples:
    """How long things took, from when they were due and from when they began."""

    def __init__(self) -> None:
        self.due_ms: list[float] = []
        self.begun_ms: list[float] = []

    def end(self, moment: Moment) -> None:
        now = time.perf_counter()
        self.due_ms.append((now - moment.due) * 1000)
        self.begun_ms.append((now - moment.begun) * 1000)

    def clear(self) -> None:
        self.due_ms.clear()
        self.begun_ms.clear()


def on_schedule(seconds: float, action: Callable[[Moment], None], rate_per_s: int = RATE_PER_S) -> None:
    """Call the action at a fixed rate, or at once when it is late already."""
    start = time.perf_counter()
    for number in range(int(seconds * rate_per_s)):
        due = start + number / rate_per_s
        wait = due - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        begun = time.perf_counter()
        lateness_ms.append((begun - due) * 1000)
        action(Moment(due, begun))


class PacedSync:
    """The limit of whoever makes records durable: append them to a file and sync it, what is due by then at once."""

    def __init__(self, folder: Path, batch: bytes) -> None:
        self.samples = Samples()
        self.path = folder / "paced.log"
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.batch = batch

    def run(self, seconds: float) -> None:
        start = time.perf_counter()
        waiting = deque(start + number / RATE_PER_S for number in range(int(seconds * RATE_PER_S)))
        while waiting:
            time.sleep(max(0.0, waiting[0] - time.perf_counter()))
            begun = time.perf_counter()
            moments = []
            while waiting and waiting[0] <= begun:
                moments.append(Moment(waiting.popleft(), begun))
            os.writev(self.descriptor, [self.batch] * len(moments))
            os.fdatasync(self.descriptor)
            for moment in moments:
                self.samples.end(moment)

    def close(self) -> None:
        os.close(self.descriptor)
        self.path.unlink()
