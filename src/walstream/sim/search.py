"""Many seeds: over several processes, in order, to be broken off and gone on with.

Seeds are dealt out in chunks, and results come back in the order of the seeds, so that "everything below N is done" is
true at any moment and a search that was broken off goes on from there. A seed that fails is kept as a small file.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from walstream.sim.runner import BOTH, CLUSTER, STORAGE, Verdict, run_seed

CHUNK = 20
"""Seeds handed to a process at a time: some seconds of work."""


def search(first: int, end: int, steps: int, processes: int = 1, world: str = BOTH) -> Iterator[Verdict]:
    """Run the seeds from `first` up to `end` and give their verdicts in that order."""
    if processes <= 1:
        for seed in range(first, end):
            yield run_seed(seed, steps, world=world)
        return
    chunks = ((start, min(start + CHUNK, end)) for start in range(first, end, CHUNK))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        under_way: list[Future[list[Verdict]]] = []
        try:
            for start, stop in islice(chunks, processes * 2):
                under_way.append(pool.submit(run_chunk, start, stop, steps, world))
            while under_way:
                done = under_way.pop(0).result()
                for start, stop in islice(chunks, 1):
                    under_way.append(pool.submit(run_chunk, start, stop, steps, world))
                yield from done
        finally:
            for future in under_way:
                future.cancel()


def run_chunk(first: int, end: int, steps: int, world: str = BOTH) -> list[Verdict]:
    """Run some seeds in a process of their own."""
    return [run_seed(seed, steps, world=world) for seed in range(first, end)]


def keep(verdict: Verdict, folder: Path) -> Path:
    """Write down a seed that failed, for the tests to run again. A file that is there already is left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{STORAGE}-" if verdict.world == STORAGE else ""
    path = folder / f"{prefix}{verdict.seed}-{verdict.steps}.txt"
    if not path.exists():
        path.write_text(f"{verdict.text}\n", encoding="utf-8")
    return path


def kept(folder: Path) -> list[tuple[str, int, int, str]]:
    """Return (world, seed, steps, what it found) of all seeds that were kept."""
    found = []
    for path in sorted(folder.glob("*-*.txt")):
        *world, seed, steps = path.stem.split("-")
        found.append((world[0] if world else CLUSTER, int(seed), int(steps), path.read_text(encoding="utf-8").strip()))
    return found
