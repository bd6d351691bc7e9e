# ruff: noqa: ARG001, ARG005  What replaces a method has its signature.
"""The mistakes that are planted to prove the checkers: each breaks one rule of replication, and must be found.

Those here are about what is cut and counted, what is durable and visible, and who is elected. `bugs_for_clients` has
those about what clients are told and about coming back, `bugs_for_groups` those about offsets and times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from walstream.cluster.local import Catalogue
from walstream.cluster.metadata import NO_LEADER, Member, PartitionState, with_isr
from walstream.cluster.static import StaticCluster
from walstream.log import batch
from walstream.log.group_commit import GroupCommit
from walstream.log.journal import Journal
from walstream.log.partition_log import PartitionLog
from walstream.log.producers import ProducerStates
from walstream.replication import manager, sessions
from walstream.replication.follower import Follower
from walstream.replication.isr import Isr
from walstream.replication.leader import Leader
from walstream.replication.manager import Manager
from walstream.replication.messages import Progress
from walstream.replication.reconcile import Accepted, judge
from walstream.replication.sessions import Session
from walstream.replication.wire.credit import SpentCredit
from walstream.sim.bugs_for_clients import BUGS_FOR_CLIENTS
from walstream.sim.bugs_for_groups import BUGS_FOR_GROUPS
from walstream.sim.clock import MS
from walstream.sim.metadata import SimMetadata
from walstream.sim.planting import Bug, Patch, owner_of

# ── what is cut, and what is counted ────────────────────────────────────────────────────────────────────────────────


def _truncating_to_the_hw() -> list[Patch]:
    original = Follower.ready

    def ready(self: Follower) -> None:
        facts, log = self._ctx.facts, self._ctx.log
        if facts.high_watermark < log.log_end:
            self._cut(facts.high_watermark)
        else:
            original(self)

    return [(Follower, "ready", ready)]


def _counting_sent() -> list[Patch]:
    original = Session.on_sent

    def on_sent(self: Session, event: Any, now_ms: int) -> None:
        original(self, event, now_ms)
        if event.session == self.number:
            self.lag.moved(event.next_offset, self._ctx.log.log_end, now_ms)

    return [(Session, "on_sent", on_sent)]


def _counting_received() -> list[Patch]:
    original = Follower._send

    def send(self: Follower, message: Any) -> None:
        if isinstance(message, Progress):
            message = replace(message, durable_end=self._ctx.log.log_end)
        original(self, message)

    return [(Follower, "_send", send)]


def _counting_before_the_epoch_is_acknowledged() -> list[Patch]:
    original = Leader.ready

    def ready(self: Leader, now_ms: int) -> None:
        for session in self.sessions.values():
            if session.node in self.isr.state.isr_nodes:
                session.lag.moved(self._ctx.log.log_end, self._ctx.log.log_end, now_ms)
        original(self, now_ms)
        self._commit(now_ms)

    return [(Leader, "ready", ready)]


def _trusting_a_rebooted_replica() -> list[Patch]:
    original = Session.link_up

    def link_up(self: Session, incarnation: int, now_ms: int) -> None:
        was_here = self.incarnation >= 0
        original(self, incarnation, now_ms)
        if was_here:
            self.lag.moved(self._ctx.log.log_end, self._ctx.log.log_end, now_ms)

    def joins(self: Leader, session: Session) -> bool:
        return session.lag.end is not None and session.lag.end >= max(self.high_watermark, self.epoch_start)

    return [(Session, "link_up", link_up), (Leader, "_joins", joins)]


def _skipping_the_divergence_check() -> list[Patch]:
    def accept(log: Any, state: Any) -> Any:
        return Accepted(state.log_end) if log.log_start <= state.log_end <= log.log_end else judge(log, state)

    return [(sessions, "judge", accept)]


# ── durability and visibility ───────────────────────────────────────────────────────────────────────────────────────


def _acking_before_fsync() -> list[Patch]:
    def sync_segment(self: GroupCommit, group: list[Any], flush: Any) -> None:
        flush.syncs += 1
        self._behind.pop(id(group[0].segment), None)
        for write in group:
            write.is_synced = True

    def write(self: Journal, buffers: list[Any]) -> None:
        if self._file is None:
            self._file = self._begin()
        self.size += self._file.pwritev(buffers, self.size)

    return [(GroupCommit, "_sync_segment", sync_segment), (Journal, "_write", write)]


def _serving_above_the_hw() -> list[Patch]:
    def check_offset(self: PartitionLog, offset: int) -> None:
        assert offset >= 0

    def read(self: PartitionLog, offset: int, bytes_max: int, *, cached: bool) -> memoryview | None:
        if not self.log_start <= offset <= self.durable_end:
            return memoryview(b"")
        return self._read_below(self.durable_end, offset, bytes_max, cached=cached)

    owner = owner_of(PartitionLog, "check_offset")
    return [(owner, "check_offset", check_offset), (owner_of(PartitionLog, "_read"), "_read", read)]


def _serving_what_fails_its_crc() -> list[Patch]:
    def whole_batches(buffer: Any, *, dense: bool = False, end: int = batch.OFFSET_MAX) -> tuple[int, bool]:
        good = 0
        for start, header in batch.walk(buffer):
            if header.next_offset > end:
                break
            good = start + header.length
        return good, False

    return [(batch, "verified_prefix", whole_batches)]


def _settled_too_early() -> list[Patch]:
    original = Leader.ready

    def ready(self: Leader, now_ms: int) -> None:
        self.epoch_start = 0
        original(self, now_ms)
        self._is_settled = True
        self._ctx.raise_high_watermark(self.high_watermark, self.epoch, is_settled=True)

    return [(Leader, "ready", ready)]


def _forgetting_producers() -> list[Patch]:
    original = ProducerStates.apply

    def append_replicated(self: PartitionLog, received: Any, **options: Any) -> int:
        ProducerStates.apply = lambda *_: None  # type: ignore[method-assign]
        try:
            return append(self, received, **options)
        finally:
            ProducerStates.apply = original  # type: ignore[method-assign]

    append = PartitionLog.append_replicated
    return [(PartitionLog, "append_replicated", append_replicated)]


# ── the in-sync replicas and elections ──────────────────────────────────────────────────────────────────────────────


def _minimal_isr() -> list[Patch]:
    original = Isr._settle

    def settle(self: Isr) -> None:
        original(self)
        pending = frozenset(member.node for member in self.pending.isr) if self.pending else self.state.isr_nodes
        self.maximal = self.state.isr_nodes & pending
        self.others = tuple(sorted(self.maximal - {self.me.node}))

    return [(Isr, "_settle", settle)]


def _shrinking_before_it_is_committed() -> list[Patch]:
    original = Isr.propose

    def propose(self: Isr, partition: Any, members: Any, unfit: Any) -> Any:
        proposal = original(self, partition, members, unfit)
        self.state = replace(with_isr(self.state, proposal.isr), version=self.state.version)
        self._settle()
        return proposal

    return [(Isr, "propose", propose)]


def _committing_below_min_isr() -> list[Patch]:
    return [(PartitionState, "can_commit", property(lambda self: True))]


def _electing_outside_the_isr() -> list[Patch]:
    original = SimMetadata._elect

    def elect(self: SimMetadata, key: Any, but: int = NO_LEADER) -> None:
        state = self.records[key]
        alive = [node for node in state.replicas if self.is_alive(node)]
        if alive and not any(node in state.isr_nodes for node in alive):
            self.records[key] = with_isr(state, (Member(alive[0], self.lives[alive[0]]),))
        original(self, key, but)

    return [(SimMetadata, "_elect", elect)]


def _electing_a_new_disk() -> list[Patch]:
    return [(Catalogue, "is_older_than_disk", lambda self, topic, index: False)]


def _keeping_a_zombie_leader() -> list[Patch]:
    fenced, apply = Manager._fenced, Manager._apply

    def stay_when_fenced(self: Manager, epoch: int) -> None:
        if not isinstance(self.role, Leader):
            fenced(self, epoch)

    def stay_when_replaced(self: Manager, state: PartitionState, now_ms: int) -> None:
        if not isinstance(self.role, Leader):
            apply(self, state, now_ms)

    return [(Manager, "_fenced", stay_when_fenced), (Manager, "_apply", stay_when_replaced)]


def _keeping_the_epoch_over_a_restart() -> list[Patch]:
    register, opened = SimMetadata.register, StaticCluster._opened

    def register_only(self: SimMetadata, node: int, incarnation: int, unclean: Any) -> None:
        elect, self._elect = self._elect, lambda key, but=NO_LEADER: None  # type: ignore[method-assign]
        try:
            register(self, node, incarnation, unclean)
        finally:
            self._elect = elect  # type: ignore[method-assign]

    def same_epoch(self: StaticCluster, found: Any) -> PartitionState:
        state = opened(self, found)
        return replace(state, epoch=state.epoch - 1) if state.leader == self._node_id and state.epoch > 0 else state

    return [
        (manager, "unable_to_lead", lambda *_, **__: ""),
        (SimMetadata, "register", register_only),
        (StaticCluster, "_opened", same_epoch),
    ]


def _forgetting_the_epoch_map() -> list[Patch]:
    def become_leader(self: PartitionLog, epoch: int, done: Callable[[Exception | None], None]) -> None:
        self.stop_role()
        self.leader_epoch = max(self.leader_epoch, epoch)
        self.is_leader = True
        done(None)

    return [(PartitionLog, "become_leader", become_leader)]


def _sending_without_credit() -> list[Patch]:
    def take(self: SpentCredit, size: int) -> int:
        self.sent_bytes += size
        return self.sent_bytes

    return [(SpentCredit, "available_bytes", property(lambda self: 1 << 30)), (SpentCredit, "take", take)]


BUGS = (
    Bug(
        "truncating to the hw", "A follower cuts its log to the high watermark it knows, which is late.",
        ("leader completeness", "in sync", "log matching"),
        _truncating_to_the_hw, ("crash", "handover", "kill"),
    ),
    Bug(
        "counting sent", "The leader counts what it has sent as if the follower had it.",
        ("in sync", "committed on too few", "leader completeness"),
        _counting_sent, ("slow disk",),
    ),
    Bug(
        "counting received", "A follower reports what it has received before its own fsync.",
        ("in sync", "committed on too few", "leader completeness"),
        _counting_received, ("slow disk",),
    ),
    Bug(
        "counting before the epoch is acknowledged", "A new leader believes that everybody in sync has all it has.",
        ("in sync", "committed on too few", "leader completeness"),
        _counting_before_the_epoch_is_acknowledged, ("handover", "slow disk", "kill"),
    ),
    Bug(
        "trusting a rebooted replica",
        "A replica that comes back counts at once, for what it would hold if it had never been away.",
        ("in sync", "committed on too few", "leader completeness"),
        _trusting_a_rebooted_replica, ("kill", "isolate", "wipe"),
    ),
    Bug(
        "skipping the divergence check", "A follower whose log ends below the leader's is taken for a prefix of it.",
        ("log matching", "in sync", "convergence", "leader completeness"),
        _skipping_the_divergence_check, ("isolate", "handover", "crash"),
    ),
    Bug(
        "acking before fsync", "What was written is called durable without a sync.",
        ("own durability",),
        _acking_before_fsync, ("crash",),
    ),
    Bug(
        "serving above the hw", "Readers see what is durable on the leader alone.",
        ("reads",),
        _serving_above_the_hw, ("slow disk",),
    ),
    Bug(
        "serving what fails its crc", "A read does not check the batches it returns.",
        ("corrupt batch served", "reads"),
        _serving_what_fails_its_crc, ("rot", "rot", "rot", "handover"), (5 * MS, 60 * MS),
    ),
    Bug(
        "settled too early", "A new leader tells readers a high watermark that is behind its predecessor's.",
        ("hw goes back", "reads"),
        _settled_too_early, ("handover", "isolate"),
    ),
    Bug(
        "forgetting producers", "A follower does not keep the state of idempotent producers.",
        ("exactly once", "producer state"),
        _forgetting_producers, ("handover", "isolate", "crash"),
    ),
    Bug(
        "minimal isr", "The high watermark counts only who is in the ISR before and after a pending change.",
        ("in sync", "committed on too few", "leader completeness"),
        _minimal_isr, ("isolate", "slow disk", "no metadata"),
    ),
    Bug(
        "shrinking before it is committed", "A leader goes by the smaller ISR as soon as it has proposed it.",
        ("in sync", "committed on too few", "leader completeness"),
        _shrinking_before_it_is_committed, ("isolate", "slow disk", "no metadata"),
    ),
    Bug(
        "committing below min_isr", "The high watermark moves although too few replicas are in sync.",
        ("committed on too few",),
        _committing_below_min_isr, ("isolate", "crash"),
    ),
    Bug(
        "electing outside the isr", "When nobody in sync is alive, anybody is elected.",
        ("leader completeness", "log matching", "in sync"),
        _electing_outside_the_isr, ("isolate", "crash", "slow disk"),
    ),
    Bug(
        "electing a new disk", "A replica whose disk was replaced counts as in sync.",
        ("leader completeness", "in sync", "log matching"),
        _electing_a_new_disk, ("wipe", "handover", "kill"),
    ),
    Bug(
        "keeping a zombie leader", "A leader that was replaced goes on.",
        ("convergence", "one leader per epoch", "log matching"),
        _keeping_a_zombie_leader, ("handover", "isolate"), (5 * MS, 60 * MS),
    ),
    Bug(
        "keeping the epoch over a restart", "A leader that comes back leads on in the epoch of its former life.",
        ("one leader per epoch",),
        _keeping_the_epoch_over_a_restart, ("kill", "restart"),
    ),
    Bug(
        "forgetting the epoch map", "A new leader does not note where its epoch begins.",
        ("log matching", "in sync", "convergence", "leader completeness"),
        _forgetting_the_epoch_map, ("handover", "crash", "isolate"),
    ),
    Bug(
        "sending without credit", "The leader sends more than the follower has granted.",
        ("credit",),
        _sending_without_credit, ("slow disk",),
    ),
    *BUGS_FOR_CLIENTS,
    *BUGS_FOR_GROUPS,
)  # fmt: skip
