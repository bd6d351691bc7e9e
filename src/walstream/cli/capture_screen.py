"""What `walstream capture run` shows: one line that moves on a terminal, a log line now and then elsewhere.

Owns the arithmetic of rows per second and the screen's last line; refuses to know where the numbers come from. On a
terminal the log goes through here, so that its lines appear above the moving one and never in the middle of it; while a
snapshot runs, its bar takes the place of the line. Nothing is drawn more often than the numbers come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rich.text import Text

from walstream import logs
from walstream.capture.ladder import LadderRecord
from walstream.capture.snapshot_plan import Progress
from walstream.capture.snapshot_progress import Display, LogDisplay, estimate, in_words
from walstream.cli.live import LiveStream
from walstream.cli.output import bytes_in_words, plural
from walstream.config import LogFormat
from walstream.positions import Lsn

LOG_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.2
BAR_WIDTH = 24
SENT_AGAIN = "what was not confirmed is sent again"

log = logs.get(__name__)


class Rate:
    """Rows per second between two looks."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def of(self, rows_total: int, at_ms: int) -> float:
        """Return the rate since the last look; a new generation may begin with a smaller total."""
        before, self._last = self._last, (rows_total, at_ms)
        if before is None or at_ms <= before[1] or rows_total < before[0]:
            return 0.0
        return (rows_total - before[0]) * 1000 / (at_ms - before[1])


def look_in_words(record: LadderRecord, rows_per_s: float) -> str:
    """Say how fast it goes and how far behind it is."""
    if record.lag_ms:
        behind = f"{bytes_in_words(record.lag_bytes)} and {record.lag_ms / 1000:,.1f} s behind"
    elif record.received > record.durable:
        behind = f"{bytes_in_words(record.lag_bytes)} behind"
    else:
        behind = "up to date"
    total = plural(record.rows_total, "row")
    return f"{rows_per_s:>9,.0f} rows/s   {total} captured   durable to {Lsn(record.durable)}   {behind}"


class LogScreen:
    """For logs: a line every ten seconds, and only when something has changed."""

    stream: TextIO | None = None
    """Where the log is to go: nowhere special."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = Rate()
        self._said_s = clock()
        self._durable = -1

    def look(self, record: LadderRecord) -> None:
        """Log a line if the last one is long enough ago and the log has moved since."""
        now_s = self._clock()
        if self._durable < 0:
            self._rate.of(record.rows_total, record.at_ms)
            self._durable = 0
        if now_s - self._said_s < LOG_INTERVAL_S or record.durable == self._durable:
            return
        self._said_s, self._durable = now_s, record.durable
        log.info(
            "capture progress",
            rows_total=record.rows_total,
            rows_per_s=round(self._rate.of(record.rows_total, record.at_ms)),
            durable_lsn=str(Lsn(record.durable)),
            lag_bytes=record.lag_bytes,
            lag_ms=record.lag_ms,
        )

    def snapshot(self) -> Display:
        """Return what shows one snapshot."""
        return LogDisplay()

    def abandon(self) -> None:
        """Say that the process ends now."""
        log.warning("stopped at once", hint=SENT_AGAIN)

    def __enter__(self) -> LogScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveScreen(LiveStream):
    """For a terminal: the log, with one moving line below it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._rate = Rate()
        self._snapshots = 0

    def look(self, record: LadderRecord) -> None:
        """Draw the line anew."""
        rate = self._rate.of(record.rows_total, record.at_ms)
        with self._lock:
            if not self._snapshots:
                self._draw(look_in_words(record, rate))

    def snapshot(self) -> Display:
        """Return what shows one snapshot, in the place of the line."""
        with self._lock:
            self._snapshots += 1
        return _Bar(self)

    def draw_snapshot(self, text: str) -> None:
        """Draw a snapshot's bar."""
        self._draw(text)

    def snapshot_is_over(self) -> None:
        """Give the place back."""
        with self._lock:
            self._snapshots -= 1
            self._draw("")

    def abandon(self) -> None:
        """Say that the process ends now."""
        self.leave(f"Stopped at once: {SENT_AGAIN}.")

    def _draw(self, text: str) -> None:
        self.draw(Text(text, no_wrap=True, overflow="ellipsis"))


class _Bar:
    """One snapshot on a terminal."""

    def __init__(self, screen: LiveScreen) -> None:
        self._screen = screen
        self._started_s = time.monotonic()
        self._shown_s = float("-inf")
        self._is_over = False

    def show(self, progress: Progress, row_count: int) -> None:
        """Draw the bar, at most five times a second."""
        now_s = time.monotonic()
        if now_s - self._shown_s < BAR_INTERVAL_S:
            return
        self._shown_s = now_s
        words = in_words(progress, row_count, estimate(progress, row_count, now_s - self._started_s))
        self._screen.draw_snapshot(f"snapshot {bar(progress)} {words}")

    def close(self) -> None:
        """Take the bar away."""
        if not self._is_over:
            self._is_over = True
            self._screen.snapshot_is_over()


def bar(progress: Progress) -> str:
    """Draw how much of the blocks is read."""
    share = progress.blocks_read / progress.block_count if progress.block_count else 1.0
    filled = round(share * BAR_WIDTH)
    return f"{'━' * filled}{'╌' * (BAR_WIDTH - filled)} {share:>4.0%}"


Screen = LogScreen | LiveScreen


def make(stream: TextIO, style: LogFormat) -> Screen:
    """Return the screen that suits the stream and the style of the log."""
    return LiveScreen(stream) if stream.isatty() and style != "json" else LogScreen()
