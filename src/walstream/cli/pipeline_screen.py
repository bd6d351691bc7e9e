"""What `walstream pipeline run` shows: a table of the tables that moves on a terminal, log lines elsewhere.

Owns the words and the drawing; refuses to know where the numbers come from: it is given a look once a second. Without a
terminal a line is logged every ten seconds in which something has moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TextIO

from rich.table import Table
from rich.text import Text

from walstream import logs
from walstream.cli.live import LiveStream
from walstream.cli.output import cell, plural
from walstream.config import LogFormat

if TYPE_CHECKING:
    from walstream.spark.progress import TableView, View

LOG_INTERVAL_S: Final = 10.0
TABLES_MAX: Final = 30
"""Tables that are drawn; of more, those that move or have stopped."""
COMES_AGAIN: Final = "the batch under way comes again"

_STYLES: Final = {"current": "green", "writing": "cyan", "waiting": "yellow", "stopped": "red"}

log = logs.get(__name__)


def duration_in_words(ms: int | None) -> str:
    """Say how long something took: `340 ms`, `2.1 s`, `3 min`."""
    if ms is None:
        return "-"
    if ms < 1_000:
        return f"{ms} ms"
    return f"{ms / 1_000:,.1f} s" if ms < 120_000 else f"{ms / 60_000:,.0f} min"


def head_in_words(view: View) -> str:
    """Say how far the whole is."""
    if not view.batches:
        return "waiting for the first batch"
    behind = "" if view.lag_rows is None else "up to date" if not view.lag_rows else f"{view.lag_rows:,} rows behind"
    parts = (
        f"{view.rows_per_s:,.0f} rows/s",
        f"{plural(view.rows_total, 'row')} in {plural(view.batches, 'batch').replace('batchs', 'batches')}",
        f"tables at {view.end_lsn}",
        f"last batch {duration_in_words(view.batch_ms)}",
        f"freshness {duration_in_words(view.freshness_ms)}" if view.freshness_ms is not None else "",
        behind,
        view.maintenance,
    )
    return "   ".join(part for part in parts if part)


def chosen(tables: tuple[TableView, ...]) -> tuple[TableView, ...]:
    """Return the tables that are worth their line, in order."""
    if len(tables) <= TABLES_MAX:
        return tables
    ranked = sorted(tables, key=lambda table: (table.state != "stopped", -table.rows_per_s, table.name))
    kept = {table.name for table in ranked[:TABLES_MAX]}
    return tuple(table for table in tables if table.name in kept)


def drawn(view: View) -> Table:
    """Draw a look."""
    grid = Table.grid(padding=(0, 0))
    grid.add_row(Text(head_in_words(view), no_wrap=True, overflow="ellipsis"))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title, is_number in (
        ("table", False), ("mode", False), ("state", False), ("rows/s", True), ("rows", True), ("batch", True),
        ("freshness", True), ("version", True),
    ):  # fmt: skip
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    shown = chosen(view.tables)
    for one in shown:
        table.add_row(
            cell(one.name),
            cell(one.mode),
            Text(one.state, style=_STYLES.get(one.state, "")),
            f"{one.rows_per_s:,.0f}",
            f"{one.rows_total:,}",
            duration_in_words(one.batch_ms) if one.batch_ms else "-",
            duration_in_words(one.freshness_ms),
            cell(one.version, "number"),
        )
    if shown:
        grid.add_row(table)
    if len(shown) < len(view.tables):
        grid.add_row(Text(f"… and {plural(len(view.tables) - len(shown), 'table')} more", style="dim"))
    return grid


class LogScreen:
    """For logs: a line every ten seconds, and only when something has changed."""

    stream: TextIO | None = None
    """Where the log is to go: nowhere special."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = clock()
        self._batches = 0

    def look(self, view: View) -> None:
        """Log a line if the last one is long enough ago."""
        now_s = self._clock()
        if now_s - self._said_s < LOG_INTERVAL_S or view.batches == self._batches:
            return
        self._said_s, self._batches = now_s, view.batches
        states = [table.state for table in view.tables]
        log.info(
            "pipeline progress",
            lsn=str(view.end_lsn),
            rows_total=view.rows_total,
            rows_per_s=round(view.rows_per_s),
            batch_ms=view.batch_ms,
            freshness_ms=view.freshness_ms,
            lag_rows=view.lag_rows,
            tables=len(states),
            tables_waiting=states.count("waiting"),
            tables_stopped=states.count("stopped"),
        )

    def abandon(self) -> None:
        """Say that the process ends now."""
        log.warning("stopped at once", hint=COMES_AGAIN)

    def __enter__(self) -> LogScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveScreen(LiveStream):
    """For a terminal: the log, with the table below it."""

    def look(self, view: View) -> None:
        """Draw the table anew."""
        self.draw(drawn(view))

    def abandon(self) -> None:
        """Say that the process ends now."""
        self.leave(f"Stopped at once: {COMES_AGAIN}.")


Screen = LogScreen | LiveScreen


def make(stream: TextIO, style: LogFormat) -> Screen:
    """Return the screen that suits the stream and the style of the log."""
    return LiveScreen(stream) if stream.isatty() and style != "json" else LogScreen()
