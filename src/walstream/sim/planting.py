"""Planting a bug: replacing a few methods of the real code while a run lasts.

A checker that nothing can make fail proves nothing. Every bug is a mistake that somebody has made, or could make;
`found_by` names the invariants that may give it away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from walstream.sim.clock import MS, Clock
from walstream.sim.cluster import Cluster
from walstream.sim.scenario import Scenario

Patch = tuple[Any, str, Any]
"""A class or module, the name in it, and what takes its place."""


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake."""

    name: str
    text: str
    found_by: tuple[str, ...]
    patches: Callable[[], list[Patch]]
    faults: tuple[str, ...] = ("crash", "isolate", "pause")
    """Under these faults it shows soon; in the usual runs too, but later."""
    produce_every_us: tuple[int, int] = (500, 20 * MS)
    sync_followers: int = 0
    scrub_bytes_per_s: int = 0
    has_trims: bool = False
    is_unclean_allowed: bool = False
    has_topic_changes: bool | None = None
    """None: as the seed draws it."""
    has_groups: bool = False
    has_lookups: bool = False

    def make(self, clock: Clock, scenario: Scenario, write: Callable[[str], None] | None) -> Cluster:
        """Make a cluster in which it shows soon: for `run_seed`."""
        fitting = replace(
            scenario, nodes=3, replicas=3, partitions=1, min_isr=1 if self.is_unclean_allowed else 2, is_static=False,
            faults=self.faults, fault_every_us=(50 * MS, 800 * MS), victim=2,
            produce_every_us=self.produce_every_us, window_bytes=2_000, segment_bytes=700, isr_lag_records=0,
            has_trims=self.has_trims, sync_followers=self.sync_followers,
            scrub_bytes_per_s=self.scrub_bytes_per_s, is_unclean_allowed=self.is_unclean_allowed,
            has_topic_changes=scenario.has_topic_changes if self.has_topic_changes is None else self.has_topic_changes,
            has_groups=self.has_groups, has_lookups=self.has_lookups,
        )  # fmt: skip
        return Cluster(clock, fitting, write)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Have the bug in the code for a while."""
    with patched(bug.patches()):
        yield


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """Replace some names for a while."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def owner_of(kind: type, name: str) -> type:
    """Return the class that a method is written in."""
    return next(owner for owner in kind.__mro__ if name in owner.__dict__)
