"""What kind of storage run a seed is: how many nodes and topics, and how often each step is taken.

Drawn from the seed before anything happens. A run leaves some steps out and takes others more often, so that all
combinations occur and none of them drowns in the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from walstream.sim.clock import Clock

CAPACITY = 1_600_000
FREE_BYTES = 400_000
"""Of a small disk: what is free for logs at first, when its reserve is set aside and others have taken the rest."""
WEIGHTS = {
    "produce": 40, "retry": 8, "tick": 8, "replicate": 10, "commit": 8, "pause copying": 1.5, "delete records": 3,
    "configure": 2, "recreate topic": 1.5, "grow topic": 1, "checkpoint": 1, "compact": 4, "restart": 2, "kill": 1.5,
    "lose power": 2, "fuse": 1.5, "fail": 5, "jump": 1.5, "slow jobs": 2, "promote": 3, "wipe": 1, "harm": 1,
    "wait": 3, "brief full disk": 2, "free": 0,
}  # fmt: skip
"""How often each step is taken, compared with the others. A seed changes them for its run."""


@dataclass(slots=True)
class StorageScenario:
    """The frame of one run."""

    is_alone: bool = False
    """One node, which is its own authority; otherwise a leader and a replica."""
    is_catalogue_blocking: bool = False
    """Whether a change of the catalogue is made at once, as a follower does, or beside the loop."""
    has_fixed_sizes: bool = False
    """Whether all batches are equally long, so that old records end where new ones do."""
    history: int = 0
    """So many steps without a fault, and a clean restart, before the run begins."""
    open_files_max: int = 16
    compaction_keys_max: int = 1_000
    capacity: int | None = None
    topics: int = 2
    keys: int = 4
    weights: dict[str, float] = field(default_factory=lambda: dict(WEIGHTS))

    def __str__(self) -> str:
        kind = "alone" if self.is_alone else "leader and replica"
        return (
            f"storage, {kind}, topics={self.topics} history={self.history} files={self.open_files_max}"
            f"{' small disk' if self.capacity else ''}"
        )


def draw_storage(clock: Clock) -> StorageScenario:
    """Draw what kind of run a seed is."""
    chance, between = clock.chance, clock.between
    scenario = StorageScenario(
        is_alone=chance(0.3),
        is_catalogue_blocking=chance(0.4),
        has_fixed_sizes=chance(0.6),
        history=between(20, 120) if chance(0.3) else 0,
        open_files_max=between(3, 16),
        compaction_keys_max=between(2, 4) if chance(0.1) else 1_000,
        capacity=CAPACITY if chance(0.12) else None,
        topics=between(1, 3),
        keys=between(2, 6),
    )
    weights = scenario.weights
    for name in WEIGHTS:
        if name not in ("produce", "tick") and chance(0.45):
            weights[name] *= (0, 0, 0.3, 3, 4)[between(0, 4)]
    if chance(0.35):
        # What a start puts right is put right by starts in the other runs: here it must be without.
        for name in ("restart", "kill", "lose power", "fuse", "wipe", "harm"):
            weights[name] = 0
    if scenario.is_alone:
        for name in ("replicate", "commit", "pause copying", "promote", "wipe"):
            weights[name] = 0
    if scenario.capacity:
        weights["free"] = 3
        weights["harm"] = 0
        if chance(0.6):
            weights["fail"] = weights["brief full disk"] = 0
    return scenario
