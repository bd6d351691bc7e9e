"""`walstream capture`: PostgreSQL's changes into the log, what that needs, and how far it has come.

What talks to PostgreSQL is imported only when it is used, so that the other commands start without libpq.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walstream import logs
from walstream.cli.interrupt import ForcedExit, Interrupt
from walstream.cli.options import Confirm, Sources, command, confirm_name
from walstream.cli.output import Column, Output, plural
from walstream.config import Config
from walstream.errors import UnhealthyError, UnreachableError, UsageError

if TYPE_CHECKING:
    from walstream.capture.check import Finding, Inspection

app = typer.Typer(help="Capture PostgreSQL's changes into the log.", no_args_is_help=True)

_FINDINGS = (
    Column("state", "state", "state"),
    Column("subject", "what"),
    Column("message", "found"),
)


_STATUS = (
    Column("state", "state", "state"),
    Column("prefix", "prefix"),
    Column("slot", "slot"),
    Column("rows_total", "rows", "number"),
    Column("bytes_total", "size", "bytes"),
    Column("at_ms", "last heard of", "time"),
)
_RUNGS = (
    Column("rung", "rung"),
    Column("lsn", "LSN"),
    Column("behind_bytes", "bytes behind", "number"),
    Column("seconds", "seconds behind"),
    Column("meaning", "meaning"),
)


@command(app, "run")
def run(
    sources: Sources,
    retry: Annotated[
        bool, typer.Option("--retry", help="Start again by itself, with growing pauses, after what a restart mends.")
    ] = False,
    new_epoch: Annotated[
        bool, typer.Option("--new-epoch", help="Begin anew, with new snapshots, when log and source no longer fit.")
    ] = False,
    confirm: Confirm = None,
) -> None:
    """Capture until SIGTERM or Ctrl-C; the first makes durable what was received, the second stops at once.

    Exits with 1 or 3 when starting it again may help, with 5 when an operator is needed.
    """
    from walstream.capture import runner
    from walstream.cli import capture_screen

    config = sources.load().config
    if new_epoch:
        if retry:
            raise UsageError("--new-epoch and --retry contradict each other.", "Begin anew once, without --retry.")
        prefix = config.capture.prefix
        confirm_name(prefix, confirm, f"All tables of {prefix} are read again, and readers see a new source epoch.")
    screen = capture_screen.make(sys.stderr, config.node.log_format)
    logs.set_up(config.node.log_level, config.node.log_format, screen.stream)
    log = logs.get(__name__)
    # However it ends, what was not confirmed is sent again: so a second signal may be taken at its word.
    with ForcedExit(1, screen.abandon), Interrupt() as interrupt:
        try:
            with screen:
                runner.run(
                    config,
                    _announced(interrupt),
                    retry=retry,
                    new_epoch=new_epoch,
                    on_look=screen.look,
                    display=screen.snapshot,
                )
        except KeyboardInterrupt:
            log.warning("stopped at once", hint=capture_screen.SENT_AGAIN)
            raise typer.Exit(1) from None


def _announced(interrupt: Interrupt) -> Callable[[], bool]:
    """Return whether to stop, and say so the first time that it is asked for."""
    said = False

    def is_requested() -> bool:
        nonlocal said
        if interrupt.requested and not said:
            said = True
            logs.get(__name__).info("stopping", hint="what was received is made durable; a second signal stops at once")
        return interrupt.requested

    return is_requested


@command(app, "check")
def check(
    sources: Sources,
    output: Output,
    fix: Annotated[
        bool, typer.Option("--fix", help="Create the publication and the slot when nothing speaks against it.")
    ] = False,
) -> None:
    """Tell what PostgreSQL still lacks to be captured, and the SQL that mends it.

    Changes nothing without --fix. Exits with 4 when there are problems, with 3 when the server does not answer.
    """
    from walstream.capture.facts import run_statements
    from walstream.postgres import address, session

    config = sources.load().config
    created: list[Finding] = []
    with session.connect(address.dsn(config.source.postgres)) as connection:
        found = _inspect(connection, config)
        if fix:
            created = [finding for finding in found.findings if finding.creates]
            for finding in created:
                run_statements(connection, finding.statements)
            found = _inspect(connection, config)
    if output.is_for_people:
        _tell(output, found, created)
    else:
        output.item(_as_json(config, found, created), ())
    if found.problems:
        count, verb = plural(len(found.problems), "problem"), "keeps" if len(found.problems) == 1 else "keep"
        hint = "`walstream capture check --fix` creates what is missing." if _is_fixable(found) else ""
        where = address.shown(config.source.postgres)
        raise UnhealthyError(f"{count} {verb} {where} from being captured.", hint)


def _inspect(connection: Any, config: Config) -> Inspection:
    from walstream.capture.check import inspect
    from walstream.capture.facts import gather
    from walstream.capture.streams import Streams

    postgres, streams = config.source.postgres, Streams(config.capture.prefix, config.streams)
    facts = gather(connection, postgres)
    return inspect(facts, postgres, config.capture, lambda table: streams.takes(table.schema, table.name))


def _is_fixable(found: Inspection) -> bool:
    return any(finding.creates for finding in found.problems)


def _tell(output: Output, found: Inspection, created: list[Finding]) -> None:
    for finding in created:
        output.note(f"Created, with: {' '.join(finding.statements)}")
    rows = [{"state": one.state, "subject": one.subject, "message": one.message} for one in found.findings]
    output.rows("findings", rows, _FINDINGS, "")
    for finding in found.findings:
        if finding.state == "ok" or not (finding.statements or finding.after):
            continue
        # As SQL with comments, to be copied as it is.
        print(f"\n-- {finding.subject} ({finding.state}): {finding.message}")
        for statement in finding.statements:
            print(statement)
        if finding.after:
            print(f"-- {finding.after}")


def _as_json(config: Config, found: Inspection, created: list[Finding]) -> dict[str, Any]:
    postgres, facts = config.source.postgres, found.facts
    return {
        "state": "problem" if found.problems else "ok",
        "host": postgres.host,
        "port": postgres.port,
        "database": postgres.database,
        "server_version": facts.version,
        "slot": postgres.slot_name,
        "publication": postgres.publication_name,
        "created": [finding.subject for finding in created],
        "findings": [
            {
                "subject": finding.subject,
                "state": finding.state,
                "message": finding.message,
                "sql": list(finding.statements),
                "after": finding.after,
            }
            for finding in found.findings
        ],
    }


@command(app, "status")
def status(sources: Sources, output: Output) -> None:
    """Tell how far each stage has come: PostgreSQL, what it has sent, what was received, what is durable in the log.

    Exits with 3 when PostgreSQL or the log does not answer, with 4 when the slot is lost.
    """
    from walstream.capture.kafka import LogAddress
    from walstream.capture.ladder import read_ladder
    from walstream.cli import capture_status

    config = sources.load().config
    record = read_ladder(LogAddress.of(config.capture), config.capture.prefix)
    unreachable: UnreachableError | None = None
    server = None
    try:
        server = capture_status.ask(config.source.postgres)
    except UnreachableError as error:
        unreachable = error
    found = capture_status.put_together(config, record, server, time.time_ns() // 1_000_000)
    if output.is_for_people:
        output.item(found, _STATUS)
        if found["rungs"]:
            print()
            output.rows("rungs", [capture_status.for_people(rung) for rung in found["rungs"]], _RUNGS, "")
    else:
        output.item(found, ())
    if unreachable is not None:
        raise unreachable
    if found["state"] == "lost":
        raise UnhealthyError(
            f"The slot {config.source.postgres.slot_name} is lost.", "`walstream capture check` tells what to do."
        )
