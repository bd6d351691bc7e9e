"""The order of events in the demonstration, and what the user sees of them.

The last line printed is the verdict, with the numbers. The exit code is 0 when all of it holds and 1 when it does not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import psycopg
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from walstream.demo.parts import Parts
from walstream.demo.verdict import Verdict, judge
from walstream.demo.workload import TABLES, Workload
from walstream.errors import UnhealthyError, WalstreamError
from walstream.spark.batches import CutRow
from walstream.spark.cuts import Cuts

KILL_AT: Final = 0.35
COLUMN_AT: Final = 0.6
LOOK_S: Final = 0.5
WAIT_S_MAX: Final = 480.0


class Show(Protocol):
    """Shows a few words, and which share of something is done, if that is known."""

    def __call__(self, words: str, share: float | None = None, /) -> None:
        """Show it now."""


class Screen:
    """What the user sees: progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line, with the seconds since the beginning."""
        self._console.print(f"[dim]{time.monotonic() - self._started_s:5.1f} s[/]  {text}", highlight=False)

    @contextmanager
    def progress(self, label: str) -> Iterator[Show]:
        """Show that something goes on, and with a share how far it has come, until the block ends."""
        if not self._console.is_terminal:
            yield lambda _words, _share=None: None
            return
        columns = (TextColumn("         {task.description}"), BarColumn(30), TextColumn("{task.fields[words]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as bar:
            task = bar.add_task(label, total=None, words="")

            def show(words: str, share: float | None = None) -> None:
                bar.update(task, total=None if share is None else 1.0, completed=share or 0.0, words=words)

            yield show


def run_demo(work_s: float) -> int:
    """Run the demonstration, whose workload takes so long, and return its exit code."""
    console = Console(file=sys.stdout, soft_wrap=True)
    screen = Screen(console)
    try:
        with tempfile.TemporaryDirectory(prefix="walstream-demo-", ignore_cleanup_errors=True) as name:
            folder = Path(name).resolve()
            folder.chmod(0o755)
            with Parts(folder) as parts:
                return _tell(parts, screen, console, work_s)
    except (WalstreamError, psycopg.Error) as error:
        console.print(f"FAILED: {error}", highlight=False, markup=False)
        return 1


def _tell(parts: Parts, screen: Screen, console: Console, work_s: float) -> int:
    parts.start_log()
    workload = Workload(parts.postgres.dsn)
    workload.prepare()
    screen.say(f"PostgreSQL {parts.postgres.version} with {len(TABLES)} related tables, and a node for the log, run.")
    parts.start_stream()
    screen.say("[bold]walstream capture run[/] and [bold]walstream pipeline run[/] start; Spark takes a moment.")
    workload.start()
    with screen.progress("until the first tables") as show:
        cut = _wait_for_cut(parts, lambda cut: set(TABLES) <= set(cut.versions), workload, show)
    screen.say(f"The snapshot is in the tables: all {len(TABLES)} at {cut.end_lsn}, while the bank goes on working.")
    _work(parts, workload, screen, work_s)
    end = workload.stop()
    screen.say(f"The bank rests after {workload.committed:,} transactions, {workload.rolled_back:,} more rolled back.")
    with screen.progress("until the last tables") as show:
        _wait_for_cut(parts, lambda cut: cut.end_lsn > end, workload, show)
    screen.say("Everything is in the tables. [bold]walstream pipeline audit[/] compares them with the source.")
    with screen.progress("the audit"):
        audited = parts.audit()
        verdict = judge(str(parts.warehouse))
    screen.say(
        f"Compared. Freshness is that of {len(verdict.freshness_s):,} transfers since the first tables; those before "
        "waited for Spark to start."
    )
    return conclude(audited, verdict, console)


def _work(parts: Parts, workload: Workload, screen: Screen, work_s: float) -> None:
    """Let the bank work, at least until capture and node were killed once and a column was added once."""
    cuts = Cuts(str(parts.warehouse))
    is_killed = is_added = False
    started_s = time.monotonic()
    with screen.progress("the bank works") as show:
        while (share := (time.monotonic() - started_s) / work_s) < 1 or not is_added:
            if not is_killed and share >= KILL_AT:
                is_killed = True
                parts.kill_and_restart()
                screen.say(f"SIGKILL for capture and node after {workload.committed:,} transactions; both are back.")
            if not is_added and share >= COLUMN_AT:
                is_added = True
                workload.add_column()
                screen.say("A column was added to transfers in the middle of the stream.")
            parts.check()
            cut = cuts.last()
            age_s = time.time() - cut.commit_time_us / 1e6 if cut is not None else 0.0
            show(f"{workload.committed:,} transactions, tables {max(0.0, age_s):4.1f} s old", min(share, 1.0))
            time.sleep(LOOK_S)


def _wait_for_cut(parts: Parts, is_enough: Callable[[CutRow], bool], workload: Workload, show: Show) -> CutRow:
    """Wait for a cut that is enough. Raises UnhealthyError."""
    cuts, started_s = Cuts(str(parts.warehouse)), time.monotonic()
    while time.monotonic() - started_s < WAIT_S_MAX:
        parts.check()
        cut = cuts.last()
        if cut is not None and cut.stopped:
            raise UnhealthyError(f"A table has stopped: {dict(cut.stopped)}.")
        if cut is not None and is_enough(cut):
            return cut
        show(f"{workload.committed:,} transactions")
        time.sleep(LOOK_S)
    raise UnhealthyError(f"The tables have not come so far within {WAIT_S_MAX:g} s.")


def conclude(audited: dict[str, Any], verdict: Verdict, console: Console) -> int:
    """Print the verdict and return the exit code: 0 when the audit and every cut hold, and something was looked at."""
    differences, tables = audited["differences"], audited["tables_compared"]
    is_same = audited["state"] == "same" and tables == len(TABLES)
    holds = is_same and not verdict.torn and verdict.cuts > 0 and bool(verdict.freshness_s)
    console.print(
        f"{'OK' if holds else 'FAILED'}: {audited['rows_compared']:,} rows in {tables} tables compared, "
        f"{differences:,} differences, {verdict.torn:,} transactions torn at {verdict.cuts:,} cuts, "
        f"commit-to-table freshness p50 {verdict.freshness(0.5):.1f} s, p99 {verdict.freshness(0.99):.1f} s.",
        highlight=False,
    )
    return 0 if holds else 1
