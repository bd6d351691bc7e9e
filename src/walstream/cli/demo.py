"""`walstream demo`: the proof in one command."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from walstream.cli.options import command
from walstream.stopping import interrupt, stop_signals


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
        signal.signal(number, interrupt)  # Ends what the demonstration has started: it has sessions of its own.
    raise typer.Exit(run_demo(seconds))
