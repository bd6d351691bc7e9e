"""One seed, one run, one verdict; and many of them.

A run that fails says what was broken and how to see it again. Nothing here is random: the seed and the number of steps
are all there is to know about a run.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from walstream.sim.checkers import Violation
from walstream.sim.clock import Clock
from walstream.sim.cluster import Cluster
from walstream.sim.scenario import draw

STEPS = 1_500


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a run."""

    seed: int
    steps: int
    happened: int
    """Events, the recovery at the end included."""
    virtual_s: float
    invariant: str
    """Which one was broken; empty if none was."""
    text: str = ""
    traceback: str = ""
    """Where the code under test raised what it should not have."""

    @property
    def is_good(self) -> bool:
        """Whether all promises were kept."""
        return not self.invariant

    def __str__(self) -> str:
        if self.is_good:
            return f"seed {self.seed}: {self.happened} events, {self.virtual_s:.1f} s, all promises kept"
        return f"seed {self.seed}: after {self.happened} events and {self.virtual_s:.1f} s: {self.text}"


def run_seed(
    seed: int,
    steps: int = STEPS,
    write: Callable[[str], None] | None = None,
    make: Callable[..., Cluster] = Cluster,
) -> Verdict:
    """Run one seed; `write` receives the trace, `make` builds the cluster (with a bug planted, if need be)."""
    clock = Clock(seed)
    invariant = text = where = ""
    with quiet():
        cluster = make(clock, draw(clock), write)
        try:
            cluster.run(steps)
        except Violation as violation:
            invariant, text = violation.invariant, str(violation)
        except Exception as error:
            invariant = f"exception {type(error).__name__}"
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{invariant}: {error} ({Path(last.filename).name}:{last.lineno})"
            where = traceback.format_exc()
        if invariant:
            cluster.trace("world", f"VIOLATION {text}")
    return Verdict(seed, steps, clock.steps, clock.now_us / 1_000_000, invariant, text, where)


def run_seeds(seeds: Iterable[int], steps: int = STEPS) -> Iterator[Verdict]:
    """Run seeds one after the other."""
    for seed in seeds:
        yield run_seed(seed, steps)


class quiet:
    """Keep the code under test from logging while it is simulated: the trace says what happened."""

    def __enter__(self) -> None:
        self._config = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

    def __exit__(self, *_: object) -> None:
        structlog.configure(**self._config)
