"""What kind of run a seed is: how many nodes, what they keep, what goes wrong and how often.

Drawn from the seed before anything happens. Also the limits of what is fair: media are harmed on one node of a run
only, and only where another copy must exist; beyond that no design could keep its promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from walstream.sim.clock import MS, SECOND, Clock

CLIENTS_SALT = 1_094_134
"""Chosen so that the runs of the seeds in `tests/seeds` stayed as they were when these clients were added."""

FAULTS = (
    "crash", "kill", "restart", "fuse", "cut", "isolate", "break", "weather", "slow disk", "hanging disk",
    "failing sync", "full disk", "rot", "wipe", "no metadata", "pause", "handover",
)  # fmt: skip


@dataclass(slots=True)
class Scenario:
    """The frame of one run."""

    nodes: int = 3
    replicas: int = 3
    partitions: int = 1
    min_isr: int = 2
    is_static: bool = False
    segment_bytes: int = 1_000
    producers: int = 2
    readers: int = 1
    produce_every_us: tuple[int, int] = (2 * MS, 80 * MS)
    fault_every_us: tuple[int, int] = (100 * MS, 2 * SECOND)
    faults: tuple[str, ...] = ()
    victim: int = 0
    """The one node whose medium may be harmed; 0 for none."""
    is_lossy: bool = False
    """Whether single frames may be lost, repeated and overtaken, which TCP does not do."""
    sync_followers: int = 0
    """So many followers must be durable before acks=1 is answered; 0: mode async."""
    window_bytes: int = 2_000
    isr_lag_ms: int = 2_000
    isr_lag_records: int = 0
    """A follower that lacks more records leaves the ISR; 0: only time counts."""
    scrub_bytes_per_s: int = 0
    """How fast logs are read again in the background; 0: never, then rot is found by readers, senders and digests."""
    is_unclean_allowed: bool = False
    """Whether somebody who may lack committed records is elected when nobody else can be."""
    has_trims: bool = False
    """Whether the beginning of logs is deleted now and then."""
    has_topic_changes: bool = False
    has_groups: bool = False
    """Whether consumer groups commit their offsets."""
    has_lookups: bool = False
    """Whether clients look up offsets by time."""

    def __str__(self) -> str:
        mode = "static" if self.is_static else "elected"
        faults = ", ".join(self.faults) or "none"
        clients = f"{', groups' if self.has_groups else ''}{', time look-ups' if self.has_lookups else ''}"
        return (
            f"{self.nodes} nodes, {self.replicas} replicas, {self.partitions} partitions, min_isr {self.min_isr}, "
            f"{mode}{', unclean too' if self.is_unclean_allowed else ''}, segments of {self.segment_bytes}, "
            f"{self.producers} producers{clients}, faults: {faults}"
        )


def draw(clock: Clock) -> Scenario:
    """Draw the frame of a run."""
    random = clock.random
    nodes = random.choices((1, 2, 3, 5), (3, 7, 80, 10))[0]
    replicas = min(nodes, 3)
    is_static = random.random() < 0.25
    min_isr = random.choices((1, 2, 3), (25, 70, 5))[0]
    scenario = Scenario(
        nodes=nodes,
        replicas=replicas,
        partitions=random.choices((1, 2, 3), (60, 30, 10))[0],
        min_isr=min(min_isr, replicas),
        is_static=is_static,
        segment_bytes=random.choice((300, 700, 2_000, 20_000)),
        producers=random.randint(1, 3),
        readers=random.randint(1, 2),
        is_lossy=random.random() < 0.3,
        window_bytes=random.choice((300, 2_000, 50_000)),
        isr_lag_ms=random.choice((200, 600, 2_000)),
        has_trims=random.random() < 0.25,
        has_topic_changes=random.random() < 0.15,
        sync_followers=random.randint(1, replicas - 1) if replicas > 1 and random.random() < 0.15 else 0,
    )
    kept = [fault for fault in FAULTS if random.random() < 0.4]
    if scenario.min_isr < 2 or replicas < 3:
        kept = [fault for fault in kept if fault not in ("rot", "wipe")]
    if is_static:
        kept = [fault for fault in kept if fault not in ("no metadata", "handover")]
    scenario.faults = tuple(kept)
    scenario.victim = random.randint(1, nodes)
    if random.random() < 0.3:
        scenario.fault_every_us = (20 * MS, 500 * MS)
    if random.random() < 0.3:
        scenario.produce_every_us = (200, 5 * MS)
    scenario.isr_lag_records = random.choice((0, 0, 0, 3, 40))
    scenario.scrub_bytes_per_s = random.choice((0, 20_000))
    if not is_static and random.random() < 0.15:
        scenario.is_unclean_allowed = True
        # Who is elected may be the only one that holds what it holds: rot could not be repaired.
        scenario.faults = tuple(fault for fault in kept if fault != "rot")
    _draw_clients(scenario, Random(CLIENTS_SALT ^ clock.seed))
    return scenario


def _draw_clients(scenario: Scenario, random: Random) -> None:
    """Draw which clients there are besides producers and readers; apart, so that seeds without them stay the same."""
    scenario.has_groups = random.random() < 0.2
    scenario.has_lookups = random.random() < 0.15
    if scenario.has_groups and random.random() < 0.3:
        scenario.has_topic_changes = True
    if scenario.has_groups and scenario.isr_lag_records:
        scenario.isr_lag_records = 40  # A commit of more records than this would always be refused.
    if scenario.has_lookups:
        scenario.has_trims = True
