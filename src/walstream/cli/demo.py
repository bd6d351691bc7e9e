"""`walstream demo`: the proof in one command."""

from __future__ import annotations

import typer

from walstream.cli.options import command


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "demo")(demo)


def demo() -> None:
    """Prove that nothing acknowledged is lost.

    Starts a node in a temporary folder, produces and consumes 100,000 records through a stock Kafka client, kills the
    node in the middle, restarts it and compares.
    """
    from walstream.demo import run_demo

    raise typer.Exit(run_demo())
