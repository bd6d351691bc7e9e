"""What a running snapshot says of itself: how far it has come, how fast it goes, how long the rest takes.

Owns the arithmetic and the words, which are pure, and the way into the log; a terminal's bar is drawn by the command
line (cli/capture_screen.py). Progress is counted in blocks, which are known beforehand, never in rows, which PostgreSQL
only estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from walstream import logs
from walstream.capture.snapshot_plan import Progress

LOG_INTERVAL_S: Final = 10.0

log = logs.get(__name__)


class Estimate(NamedTuple):
    """What the pace so far says of the rest."""

    rows_per_s: float
    seconds_left: float | None
    """None while nothing can be said."""


def estimate(progress: Progress, row_count: int, elapsed_s: float) -> Estimate:
    """Say how fast it goes and how long the rest takes at that pace."""
    rate = row_count / elapsed_s if elapsed_s > 0 else 0.0
    if progress.blocks_read >= progress.block_count:
        return Estimate(rate, 0.0)
    if not progress.blocks_read or elapsed_s <= 0:
        return Estimate(rate, None)
    return Estimate(rate, elapsed_s * (progress.block_count - progress.blocks_read) / progress.blocks_read)


def in_words(progress: Progress, row_count: int, found: Estimate) -> str:
    """Say what stands beside a bar."""
    tables = f"{progress.tables_complete:,} of {progress.table_count:,} table{'s' * (progress.table_count != 1)}"
    left = "" if found.seconds_left is None else f", {duration_in_words(found.seconds_left)} left"
    return f"{tables}, {row_count:,} row{'s' * (row_count != 1)}, {found.rows_per_s:,.0f} rows/s{left}"


def duration_in_words(seconds: float) -> str:
    """Say how long something takes, as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display(Protocol):
    """Shows one snapshot from its begin to its end."""

    def show(self, progress: Progress, row_count: int) -> None:
        """Say how far it has come; may be called as often as one likes."""

    def close(self) -> None:
        """The snapshot is over or was given up."""


class LogDisplay:
    """For logs: a line now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval_s: float = LOG_INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._started_s = self._said_s = clock()

    def show(self, progress: Progress, row_count: int) -> None:
        """Log a line if the last one is long enough ago."""
        now_s = self._clock()
        if now_s - self._said_s < self._interval_s:
            return
        self._said_s = now_s
        found = estimate(progress, row_count, now_s - self._started_s)
        log.info(
            "snapshot progress",
            tables=f"{progress.tables_complete}/{progress.table_count}",
            rows=row_count,
            rows_per_s=round(found.rows_per_s),
            seconds_left=None if found.seconds_left is None else round(found.seconds_left),
        )

    def close(self) -> None:
        """Nothing is left to say: the snapshot itself logs its end."""
