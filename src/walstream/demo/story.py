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
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from walstream.demo.parts import Parts
from walstream.demo.verdict import Verdict, judge
from walstream.demo.workload import TABLES, Workload
from walstream.errors import UnhealthyError, WalstreamError
from walstream.positions import Lsn
from walstream.spark.batches import CutRow
from walstream.spark.cuts import Cuts

KILL_AT: Final = 0.35
COLUMN_AT: Final = 0.6
LOOK_S: Final = 0.5
WAIT_S_MAX: Final = 240.0


class Screen:
    """What the user sees: progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line, with the seconds since the beginning."""
        self._console.print(f"[dim]{time.monotonic() - self._started_s:5.1f} s[/]  {text}", highlight=False)

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[float, str], None]]:
        """Show how far something has come; the yielded function takes the share done and a few words."""
        if not self._console.is_terminal:
            yield lambda _share, _words: None
            return
        columns = (TextColumn("         {task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as bar:
            task = bar.add_task(label, total=1.0, words="")
            yield lambda share, words: bar.update(task, completed=share, words=words)


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
    with screen.progress("first tables") as step:
        cut = _wait_for_cut(parts, lambda cut: set(TABLES) <= set(cut.versions), step)
    screen.say(f"The snapshot is in the tables: all {len(TABLES)} at {cut.end_lsn}, while the bank goes on working.")
    _work(parts, workload, screen, work_s)
    end = workload.stop()
    screen.say(f"The bank rests after {workload.committed:,} transactions, {workload.rolled_back:,} more rolled back.")
    with screen.progress("the rest") as step:
        _wait_for_cut(parts, lambda cut: cut.end_lsn > end, step)
    screen.say("Everything is in the tables. [bold]walstream pipeline audit[/] compares them with the source.")
    audited = parts.audit()
    verdict = judge(str(parts.warehouse))
    return _conclude(audited, verdict, console)


def _work(parts: Parts, workload: Workload, screen: Screen, work_s: float) -> None:
    """Let the bank work; kill capture and node once, add a column once."""
    cuts = Cuts(str(parts.warehouse))
    is_killed = is_added = False
    started_s = time.monotonic()
    with screen.progress("the bank works") as step:
        while (share := (time.monotonic() - started_s) / work_s) < 1:
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
            words = f"{workload.committed:,} transactions"
            if cut is not None:
                words += f", tables {max(0.0, time.time() - cut.commit_time_us / 1e6):.1f} s old"
            step(share, words)
            time.sleep(LOOK_S)


def _wait_for_cut(parts: Parts, is_enough: Callable[[CutRow], bool], step: Callable[[float, str], None]) -> CutRow:
    """Wait for a cut that is enough. Raises UnhealthyError."""
    cuts, started_s = Cuts(str(parts.warehouse)), time.monotonic()
    while (elapsed_s := time.monotonic() - started_s) < WAIT_S_MAX:
        parts.check()
        cut = cuts.last()
        if cut is not None and cut.stopped:
            raise UnhealthyError(f"A table has stopped: {dict(cut.stopped)}.")
        if cut is not None and is_enough(cut):
            return cut
        step(elapsed_s / WAIT_S_MAX, f"at {cut.end_lsn if cut else Lsn(0)}")
        time.sleep(LOOK_S)
    raise UnhealthyError(f"The tables have not come so far within {WAIT_S_MAX:g} s.")


def _conclude(audited: dict[str, Any], verdict: Verdict, console: Console) -> int:
    differences, tables = audited["differences"], audited["tables_compared"]
    holds = audited["state"] == "same" and tables == len(TABLES) and not verdict.torn and verdict.cuts > 0
    console.print(
        f"{'OK' if holds else 'FAILED'}: {audited['rows_compared']:,} rows in {tables} tables compared, "
        f"{differences:,} differences, {verdict.torn:,} transactions torn at {verdict.cuts:,} cuts, "
        f"commit-to-table freshness p50 {verdict.freshness(0.5):.1f} s, p99 {verdict.freshness(0.99):.1f} s.",
        highlight=False,
    )
    return 0 if holds else 1
