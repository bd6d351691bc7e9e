"""`walstream sim`: the simulators of clusters and of storage on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from walstream.cli.options import command
from walstream.cli.output import Output, console
from walstream.errors import UsageError

if TYPE_CHECKING:
    from walstream.sim.runner import Verdict

STEPS = 1_500
STORAGE_STEPS = 180
WORLDS = {"cluster": "cluster", "storage": "storage", "both": "cluster and storage"}


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "sim")(sim)


def sim(
    output: Output,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Run this seed and print every event.")] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="FIRST:END", help="Run these seeds and print only what fails.")
    ] = "",
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Events before the faults stop (1500; of storage alone 180).")
    ] = None,
    world: Annotated[
        str, typer.Option("--world", metavar="WORLD", help="What to run: cluster, storage or both.")
    ] = "both",
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many run at once.")] = 1,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Write down there which seeds failed.")
    ] = None,
) -> None:
    """Run a cluster, and then a storage world, in simulation, and check every promise.

    Clock, network, disks and metadata are simulated and fail in every way; replication, log and wire are the real
    ones. The storage world compacts, expires, truncates and restarts logs. A seed decides everything: the same seed is
    the same run, byte for byte.
    """
    if (seed is None) == (not seeds):
        raise UsageError("Either --seed or --seeds says what to run.", "For example --seed 7, or --seeds 0:300.")
    if world not in WORLDS:
        raise UsageError(f"There is no world {world!r}.", "Write --world cluster, storage or both.")
    if steps is None:
        steps = STORAGE_STEPS if world == "storage" else STEPS
    if seed is not None:
        from walstream.sim.runner import run_seed

        verdict = run_seed(seed, steps, print if output.is_for_people else None, WORLDS[world])
        if verdict.traceback:
            output.note(verdict.traceback)
        output.done(str(verdict), as_row(verdict))
        if not verdict.is_good:
            output.note(how_to_repeat(verdict, keep))
        raise typer.Exit(0 if verdict.is_good else 1)
    raise typer.Exit(_run_many(output, *_range(seeds), steps, processes, keep, world))


def _range(seeds: str) -> tuple[int, int]:
    first, _, end = seeds.partition(":")
    if not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise UsageError(f"--seeds {seeds} is not a range.", "Write FIRST:END, where END is not run: 0:300.")
    return int(first), int(end)


def _run_many(output: Output, first: int, end: int, steps: int, processes: int, keep: Path | None, world: str) -> int:
    from walstream.sim.search import search

    stderr = console(sys.stderr)
    bar = Progress(
        TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=stderr,
        disable=not stderr.is_terminal,
    )  # fmt: skip
    failed: list[Verdict] = []
    next_seed, happened = first, 0
    with bar:
        task = bar.add_task("", total=end - first)
        try:
            for verdict in search(first, end, steps, processes, WORLDS[world]):
                next_seed, happened = verdict.seed + 1, happened + verdict.happened
                bar.advance(task)
                if not verdict.is_good:
                    failed.append(verdict)
                    stderr.print(f"{verdict}\n{how_to_repeat(verdict, keep)}", soft_wrap=True, markup=False)
        except KeyboardInterrupt:
            output.note(f"Stopped. To go on: walstream sim --seeds {next_seed}:{end} --steps {steps} --world {world}")
    result = {
        "first_seed": first, "end_seed": next_seed, "steps": steps, "events": happened,
        "failed_seeds": [verdict.seed for verdict in failed],
    }  # fmt: skip
    count = next_seed - first
    output.done(f"{count} seeds, {happened} events: {len(failed) or 'none'} failed.", result)
    return 1 if failed or next_seed < end else 0


def how_to_repeat(verdict: Verdict, keep: Path | None) -> str:
    """Say what to type to see a run that failed again, and write it down where that is wanted."""
    from walstream.sim import search

    kept = f" Kept in {search.keep(verdict, keep)}." if keep is not None else ""
    return f"  again: walstream sim {flags(verdict)}{kept}"


def flags(verdict: Verdict) -> str:
    """Return what to type after `walstream sim` to see a run again."""
    is_storage = verdict.world == "storage"
    steps = f" --steps {verdict.steps}" if verdict.steps != (STORAGE_STEPS if is_storage else STEPS) else ""
    return f"--seed {verdict.seed}{steps}{' --world storage' if is_storage else ''}"


def as_row(verdict: Verdict) -> dict[str, object]:
    """Return a verdict as plain data."""
    return {
        "seed": verdict.seed, "steps": verdict.steps, "events": verdict.happened, "virtual_s": verdict.virtual_s,
        "world": verdict.world, "invariant": verdict.invariant, "text": verdict.text,
    }  # fmt: skip
