"""One seed, one run, one verdict; and many of them.

A seed is two runs, of a cluster and of a storage world, each with its own chance. A run that fails says what was broken
and how to see it again. Nothing here is random: the world, the seed and the number of steps are all there is to know.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from walstream.sim.checkers import Violation
from walstream.sim.clock import Clock
from walstream.sim.cluster import Cluster
from walstream.sim.scenario import draw
from walstream.sim.storage import SALT, StorageWorld
from walstream.sim.storage import STEPS as STORAGE_STEPS

STEPS = 1_500

CLUSTER = "cluster"
STORAGE = "storage"
BOTH = "cluster and storage"


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
    world: str = CLUSTER
    traceback: str = ""
    """Where the code under test raised what it should not have."""

    @property
    def is_good(self) -> bool:
        """Whether all promises were kept."""
        return not self.invariant

    def __str__(self) -> str:
        if self.is_good:
            return f"seed {self.seed}, {self.world}: {self.happened} events, {self.virtual_s:.1f} s, all promises kept"
        return f"seed {self.seed}, {self.world}: after {self.happened} events and {self.virtual_s:.1f} s: {self.text}"


def run_seed(seed: int, steps: int = STEPS, write: Callable[[str], None] | None = None, world: str = BOTH) -> Verdict:
    """Run both worlds of a seed, or one of them; `write` receives the trace.

    `steps` are those of the cluster, where it is run; its storage world then takes as many of its own in proportion.
    """
    if world == STORAGE:
        return run_storage(seed, steps, write)
    verdict = run_cluster(seed, steps, write)
    if world == CLUSTER or not verdict.is_good:
        return verdict
    storage = run_storage(seed, max(steps * STORAGE_STEPS // STEPS, 1), write)
    if not storage.is_good:
        return storage
    happened, virtual_s = verdict.happened + storage.happened, verdict.virtual_s + storage.virtual_s
    return replace(verdict, happened=happened, virtual_s=virtual_s, world=BOTH)


def run_cluster(
    seed: int,
    steps: int = STEPS,
    write: Callable[[str], None] | None = None,
    make: Callable[..., Cluster] = Cluster,
) -> Verdict:
    """Run a seed's cluster; `make` builds it (with a bug planted, if need be)."""
    clock = Clock(seed)
    with quiet():
        cluster = make(clock, draw(clock), write)
        invariant, text, where = _outcome(lambda: cluster.run(steps))
        if invariant:
            cluster.trace("world", f"VIOLATION {text}")
    return Verdict(seed, steps, clock.steps, clock.now_us / 1_000_000, invariant, text, CLUSTER, where)


def run_storage(
    seed: int,
    steps: int = STORAGE_STEPS,
    write: Callable[[str], None] | None = None,
    make: Callable[..., StorageWorld] = StorageWorld,
) -> Verdict:
    """Run a seed's storage world; `make` builds it."""
    clock = Clock(seed + SALT)
    with quiet():
        world = make(clock, None, write)
        invariant, text, where = _outcome(lambda: world.run(steps))
        if invariant:
            world.trace("world", f"VIOLATION {text}")
    return Verdict(seed, steps, clock.steps, clock.now_us / 1_000_000, invariant, text, STORAGE, where)


def _outcome(run: Callable[[], None]) -> tuple[str, str, str]:
    """Run, and return which promise was broken, with the text, and where the code raised; all empty if none was."""
    try:
        run()
    except Violation as violation:
        return violation.invariant, str(violation), ""
    except Exception as error:
        invariant = f"exception {type(error).__name__}"
        last = traceback.extract_tb(error.__traceback__)[-1]
        return invariant, f"{invariant}: {error} ({Path(last.filename).name}:{last.lineno})", traceback.format_exc()
    return "", "", ""


class quiet:
    """Keep the code under test from logging while it is simulated: the trace says what happened."""

    def __enter__(self) -> None:
        self._config = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

    def __exit__(self, *_: object) -> None:
        structlog.configure(**self._config)
