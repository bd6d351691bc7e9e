"""`walstream demo`: the proof in one command."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Annotated

import typer

from walstream.cli.options import command
from walstream.stopping import stop_signals


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "demo")(demo)


def demo(
    seconds: Annotated[float, typer.Option("--seconds", min=5, help="How long the workload runs.")] = 45,
) -> None:
    """Run the whole of walstream on this machine, kill it in the middle, and compare.

    Starts a PostgreSQL with three tables, a node, capture and pipeline in a temporary folder; a workload with
    rollbacks, large values and a new column runs while capture and node are killed; then source and tables are
    compared row by row, and every cut for torn transactions. Takes about two minutes, needs Java and the extras.
    """
    from walstream.demo.story import run_demo

    for number in stop_signals():
        signal.signal(number, _interrupt)
    raise typer.Exit(run_demo(seconds))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does, with what the demonstration has started: those processes have sessions of their own."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The kernel and the shell send one each; it must not end the end.
    raise KeyboardInterrupt
