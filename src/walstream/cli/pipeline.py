"""`walstream pipeline`: the log into tables by Spark, how far they are, and their maintenance.

What needs Spark is imported only when it is used, so that the other commands start without it, and whoever has not
installed the extra is told so in one line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walstream import logs
from walstream.cli import pipeline_audit
from walstream.cli.interrupt import ForcedExit, Interrupt
from walstream.cli.options import Sources, command
from walstream.cli.output import Column, Output, plural
from walstream.errors import UnhealthyError, UnreachableError

if TYPE_CHECKING:
    from walstream.spark.batches import CutRow
    from walstream.spark.progress import View
    from walstream.spark.rung import PipelineRecord

app = typer.Typer(help="Turn the log into tables with Spark.", no_args_is_help=True)

pipeline_audit.add_to(app)

SILENT_MS = 10_000
"""A pipeline that runs says so every second; after this long it is not running, or the log stands still."""

_STATUS = (
    Column("state", "state", "state"),
    Column("destination", "destination"),
    Column("lsn", "last cut"),
    Column("commit_time_ms", "last commit", "time"),
    Column("written_at_ms", "written", "time"),
    Column("lag_rows", "rows behind", "number"),
    Column("rows_total", "rows since its start", "number"),
    Column("freshness_ms", "freshness in ms", "number"),
)
_TABLES = (
    Column("table", "table"),
    Column("state", "state", "state"),
    Column("version", "version", "number"),
    Column("reason", "why"),
)


@command(app, "run")
def run(
    sources: Sources,
    once: Annotated[
        bool, typer.Option("--once", help="End when everything that is in the log now is in the tables.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Start again by itself, with growing pauses, after what a restart mends.")
    ] = False,
) -> None:
    """Write the log into tables until SIGTERM or Ctrl-C; the first finishes the batch under way, the second does not.

    Either way nothing is lost or doubled. Exits with 1 or 3 when starting it again may help, with 4 when a table has
    stopped and needs somebody.
    """
    from walstream.cli import pipeline_screen
    from walstream.spark import runner, session
    from walstream.spark.progress import Progress

    config = sources.load().config
    screen = pipeline_screen.make(sys.stderr, config.node.log_format)
    logs.set_up(config.node.log_level, config.node.log_format, screen.stream)
    progress = Progress()
    with screen:
        # Spark takes SIGINT for itself when it starts; from then on both signals are ours.
        spark = session.start(config.pipeline, config.capture.prefix)
        try:
            with ForcedExit(1, screen.abandon), Interrupt() as interrupt:
                stop = _announced(interrupt, session.quieten)
                runner.run(config, spark, stop, once=once, retry=retry, progress=progress, on_look=screen.look)
        except KeyboardInterrupt:
            logs.get(__name__).warning("stopped at once", hint=pipeline_screen.COMES_AGAIN)
            raise typer.Exit(1) from None
        finally:
            session.stop(spark)
    _complain_of_stopped(progress.look())


def _announced(interrupt: Interrupt, quieten: Callable[[], None]) -> Callable[[], bool]:
    """Return whether to stop, and say so the first time that it is asked for."""
    said = False

    def is_requested() -> bool:
        nonlocal said
        if interrupt.requested and not said:
            said = True
            logs.get(__name__).info("stopping", hint="the batch under way is finished; a second signal stops at once")
            quieten()
        return interrupt.requested

    return is_requested


def _complain_of_stopped(view: View) -> None:
    stopped = [table for table in view.tables if table.state == "stopped"]
    if stopped:
        listed = "".join(f"\n  {table.name}: {table.reason}" for table in stopped)
        raise UnhealthyError(
            f"{plural(len(stopped), 'table')} could not follow.{listed}",
            "After the remedy a restart reads them again from where they stopped.",
        )


@command(app, "status")
def status(sources: Sources, output: Output) -> None:
    """Tell how far the tables are: the last cut, the version of each table in it, and which have stopped.

    Exits with 3 when the log does not answer, with 4 when a table has stopped.
    """
    from walstream.postgres import address
    from walstream.spark.rung import read_rung
    from walstream.spark.runner import last_cut, log_address

    config = sources.load().config
    cut = last_cut(config)
    unreachable: UnreachableError | None = None
    record = None
    try:
        record = read_rung(log_address(config), config.capture.prefix)
    except UnreachableError as error:
        unreachable = error
    is_delta = config.pipeline.destination == "delta"
    where = config.pipeline.warehouse if is_delta else address.shown(config.pipeline.replica)
    found = _put_together(where, cut, record, time.time_ns() // 1_000_000)
    if output.is_for_people:
        output.item(found, _STATUS)
        print()
        output.rows("tables", found["tables"], _TABLES, "No table is there yet.")
    else:
        output.item(found, ())
    if unreachable is not None:
        raise unreachable
    if cut is not None and cut.stopped:
        raise UnhealthyError(f"{plural(len(cut.stopped), 'table')} could not follow.", "The table above says why.")


def _put_together(destination: str, cut: CutRow | None, record: PipelineRecord | None, now_ms: int) -> dict[str, Any]:
    age_ms = None if record is None else max(0, now_ms - record.at_ms)
    tables = []
    if cut is not None:
        for name in sorted({*cut.versions, *cut.stopped}):
            state = "stopped" if name in cut.stopped else "current"
            tables.append(
                {"table": name, "state": state, "version": cut.versions.get(name), "reason": cut.stopped.get(name, "")}
            )
    return {
        "state": "never run" if cut is None else "running" if age_ms is not None and age_ms < SILENT_MS else "stopped",
        "destination": destination,
        "lsn": str(cut.end_lsn) if cut else None,
        "lsn_bytes": int(cut.end_lsn) if cut else None,
        "source_epoch": cut.source_epoch if cut else None,
        "point": cut.point if cut else None,
        "batch_id": cut.batch_id if cut else None,
        "commit_time_ms": cut.commit_time_us // 1000 if cut and cut.commit_time_us else None,
        "written_at_ms": cut.written_at_us // 1000 if cut and cut.written_at_us else None,
        "instance": record.instance if record else None,
        "age_ms": age_ms,
        "lag_rows": record.lag_rows if record else None,
        "rows_total": record.rows_total if record else None,
        "freshness_ms": record.freshness_ms if record else None,
        "tables": tables,
    }


@command(app, "maintain")
def maintain(sources: Sources, output: Output) -> None:
    """Do now what a running pipeline does on its schedule: remove old cuts, compact the tables, vacuum them.

    A pipeline may run meanwhile. What cuts list stays readable.
    """
    from walstream.spark import runner, session

    config = sources.load().config
    logs.set_up(config.node.log_level, config.node.log_format)
    spark = session.start(config.pipeline, config.capture.prefix)
    try:
        report = runner.maintain(config, spark)
    finally:
        session.stop(spark)
    output.done(
        f"{plural(report.tables, 'table')} done in {report.seconds:,.1f} s: {plural(report.files_compacted, 'file')}"
        f" compacted, {plural(report.files_removed, 'file')} and {plural(report.cuts_removed, 'cut')} removed.",
        {
            "tables": report.tables,
            "cuts_removed": report.cuts_removed,
            "files_compacted": report.files_compacted,
            "files_removed": report.files_removed,
            "seconds": report.seconds,
            "failures": report.failures,
        },
    )
    if report.failures:
        raise UnhealthyError(f"{plural(report.failures, 'table')} could not be maintained.", "The log says why.")
