"""`walstream pipeline audit`: whether the tables hold what the source holds.

What needs Spark is imported only when it is used.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walstream import logs
from walstream.cli.options import Sources, command
from walstream.cli.output import Column, Output, plural
from walstream.errors import UnhealthyError

if TYPE_CHECKING:
    from walstream.spark.audit.report import Report, TableReport

_TABLES = (
    Column("table", "table"),
    Column("state", "state", "state"),
    Column("source_rows", "rows at the source", "number"),
    Column("destination_rows", "at the destination", "number"),
    Column("missing_rows", "missing", "number"),
    Column("extra_rows", "extra", "number"),
    Column("changed_rows", "changed", "number"),
    Column("note", "note"),
)
_KEYS = (
    Column("table", "table"),
    Column("kind", "difference"),
    Column("shown_key", "key"),
    Column("columns", "columns"),
)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "audit")(audit)


def audit(
    sources: Sources,
    output: Output,
    table: Annotated[
        list[str] | None, typer.Option("--table", "-t", help="Compare this table alone, as schema.table; repeatable.")
    ] = None,
    keys: Annotated[int, typer.Option(min=0, help="How many differing keys of each kind are named per table.")] = 20,
    timeout_ms: Annotated[
        int, typer.Option(min=1, help="How long to wait for a consistent moment, and for the log to reach it.")
    ] = 60_000,
) -> None:
    """Compare the source with the tables at one LSN: counts and hashes first, then the keys that differ.

    The source may be written to meanwhile. Exits with 4 when anything differs or could not be compared, with 3 when the
    source or the log does not answer.
    """
    from walstream.spark import session
    from walstream.spark.audit.comparing import audit as compare

    config = sources.load().config
    logs.set_up(config.node.log_level, config.node.log_format)

    def tell(report: TableReport) -> None:
        if output.is_for_people and sys.stderr.isatty():
            output.note(f"{report.table}: {report.state}")

    spark = session.start(config.pipeline, config.capture.prefix)
    try:
        report = compare(config, spark, tables=table or (), keys_max=keys, timeout_s=timeout_ms / 1000, on_table=tell)
    finally:
        session.stop(spark)
    if output.is_for_people:
        _show(output, report)
    else:
        output.item(report.as_dict(), ())
    _judge(report)


def _show(output: Output, report: Report) -> None:
    tables = [table.as_dict() for table in report.tables]
    output.rows("tables", tables, _TABLES, "No table is published.")
    keys: list[dict[str, Any]] = [
        {"table": table["table"], **one, "shown_key": json.dumps(one["key"], ensure_ascii=False, default=str)}
        for table in tables
        for one in table["keys"]
    ]
    if keys:
        print()
        output.rows("keys", keys, _KEYS, "")
    output.note(
        f"{plural(report.rows_compared, 'row')} in {plural(report.tables_compared, 'table')} compared at {report.lsn} "
        f"in {report.seconds:.1f} s: {plural(report.differences, 'difference')}."
    )


def _judge(report: Report) -> None:
    if report.is_same:
        return
    if not report.tables:
        raise UnhealthyError(
            "No table was compared: none is both published and kept by the pipeline.",
            "Look at the publication and at enabled in [pipeline.tables].",
        )
    states: dict[str, int] = {}
    for table in report.tables:
        states[table.state] = states.get(table.state, 0) + 1
    said = ", ".join(f"{count} {state}" for state, count in states.items() if state != "same")
    raise UnhealthyError(
        f"Of {plural(len(report.tables), 'table')}, not all hold what the source holds at {report.lsn}: {said}.",
        "A new snapshot of a table replaces it: remove it from the publication and add it again.",
    )
