"""What a cluster agrees on about each partition: who leads it, in which epoch, and who holds everything committed.

Owns the record of one partition (`PartitionState`), the arithmetic that makes a new record from an old one (a changed
ISR, an election's outcome), and the interface of the service that keeps it. A static cluster keeps it in a file beside
the leader's log, a simulated one in memory, a real one in etcd: all of them grant by `granted`, so the rules are here
once. Knows nothing of offsets. Sans-IO.

Every change compares the `version` that it was made from, and the leader's epoch: an isolated leader's proposal finds
either changed and is refused.

Invariants of a record: the leader is in the ISR; the ISR is not empty; ISR and ELR are disjoint parts of the replicas;
the ELR is empty when the ISR has `min_isr` members; epochs and versions rise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, TypeAlias
from uuid import UUID

NodeId: TypeAlias = int
PartitionKey: TypeAlias = tuple[UUID, int]
"""A partition by its topic's id, not its name: a topic that was deleted and made again is another one."""

NO_LEADER: Final = -1
NO_EPOCH: Final = -1


class Member(NamedTuple):
    """A replica as it was when it joined the ISR: a node, and which of its lives.

    The incarnation is a durable counter that a node raises at each start. A proposal to add a replica names the life
    in which its offset was measured, so that a node that has been away since is not added on what it once held.
    """

    node: NodeId
    incarnation: int


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What is agreed on about one partition."""

    replicas: tuple[NodeId, ...]
    """The nodes that keep a copy, the preferred leader first."""
    leader: NodeId = NO_LEADER
    epoch: int = NO_EPOCH
    """Raised by each election, and by each start of a leader: an epoch belongs to one life of one node."""
    isr: tuple[Member, ...] = ()
    """In-sync replicas: each holds everything that is committed, durably."""
    elr: tuple[NodeId, ...] = ()
    """Eligible leader replicas: they left an ISR that was, or became, too small to commit, so they miss nothing."""
    min_isr: int = 1
    """As many in-sync replicas are needed to commit. Changed only by `with_min_isr`, because the ELR depends on it."""
    version: int = 0
    """Raised by each change of this record."""
    last_leader: NodeId = NO_LEADER
    """Who led last; the first choice when nobody eligible is left and an unclean election is allowed."""
    unclean_epoch: int = NO_EPOCH
    """The newest epoch whose leader was not known to hold everything committed. A follower may cut off what it took
    for committed in an older epoch; otherwise that would be a broken promise."""

    @property
    def isr_nodes(self) -> frozenset[NodeId]:
        """The in-sync replicas, whichever life they are in."""
        return frozenset(member.node for member in self.isr)

    @property
    def can_commit(self) -> bool:
        """Whether enough replicas are in sync for the high watermark to move."""
        return len(self.isr) >= self.min_isr


@dataclass(frozen=True, slots=True)
class IsrProposal:
    """A leader asks for another ISR."""

    partition: PartitionKey
    leader: NodeId
    epoch: int
    """The proposer's: refused when another leader has been elected since."""
    version: int
    """The version of the record the proposal was made from."""
    isr: tuple[Member, ...]
    unfit: tuple[NodeId, ...] = ()
    """Replicas that leave because their copy is damaged, or lost durable bytes: they must not become eligible."""


class Refusal(StrEnum):
    """Why a proposal was not granted."""

    STALE_VERSION = "stale version"
    """The record has changed since. Definite: the proposal is void."""
    STALE_EPOCH = "stale epoch"
    """Another leader has been elected. Definite."""
    INELIGIBLE = "ineligible"
    """A proposed member is unknown, or in another life by now. Definite."""
    UNKNOWN = "unknown"
    """The service did not answer. The proposal may have been granted, or may yet be: it must be counted either way."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a proposal: granted (`refusal` is None) or not; and the record as it is now, where known."""

    refusal: Refusal | None
    state: PartitionState | None


class MetadataService(Protocol):
    """Where the records are kept. Answers come by callback, on the caller's loop, at once or later.

    Reads are linearizable: what `read` gives was agreed on at some moment after the call.

    A node is told nothing before its present life is registered, and nothing afterwards that is older than that: a
    record may still name an earlier life as leader, in an epoch that a disk which was replaced since knows nothing of.
    So a watch begins where the registration was carried out. A replica that has lost bytes counts as whole again only
    once it was told: then the record does not count on what its earlier lives held, whatever becomes of this one.
    """

    def read(self, partition: PartitionKey, done: Callable[[PartitionState | None], None]) -> None:
        """Give the record, or None when it cannot be had now."""

    def watch(self, partition: PartitionKey, changed: Callable[[PartitionState], None]) -> Callable[[], None]:
        """Tell of the record now and whenever it changes, in order; return how to stop."""

    def propose(self, proposal: IsrProposal, done: Callable[[Outcome], None]) -> None:
        """Grant or refuse another ISR; durable before `done`."""

    def resign(self, partition: PartitionKey, leader: NodeId, epoch: int) -> None:
        """The leader cannot serve: elect another or, where there is none, the same in a new epoch. Said until heard."""

    def register(self, node: NodeId, incarnation: int, *, is_unclean: Collection[PartitionKey]) -> None:
        """A node has started. Where it lost durable bytes it leaves ISR and ELR before it can be elected."""


# ── the arithmetic ──────────────────────────────────────────────────────────────────────────────────────────────────


def eligible(state: PartitionState, isr: Iterable[NodeId], unfit: Iterable[NodeId] = ()) -> tuple[NodeId, ...]:
    """Return the ELR that goes with a new ISR: old ELR and ISR, less new ISR and unfit; none if it can commit."""
    members = set(isr)
    if len(members) >= state.min_isr:
        return ()
    return tuple(sorted((set(state.elr) | state.isr_nodes) - members - set(unfit)))


def with_isr(state: PartitionState, isr: Iterable[Member], unfit: Iterable[NodeId] = ()) -> PartitionState:
    """Return the record with another ISR and the ELR that follows from it."""
    members = tuple(sorted(isr))
    elr = eligible(state, (member.node for member in members), unfit)
    return replace(state, isr=members, elr=elr, version=state.version + 1)


def with_min_isr(state: PartitionState, min_isr: int) -> PartitionState:
    """Return the record with another `min_isr`.

    With fewer replicas needed the leader may go on alone, past what the eligible ones hold: they are eligible no more.
    """
    elr = () if len(state.isr) >= min_isr else state.elr
    return replace(state, min_isr=min_isr, elr=elr, version=state.version + 1)


def without(state: PartitionState, node: NodeId) -> PartitionState:
    """Return the record after a replica lost durable bytes: in neither ISR nor ELR; the same record if it was in none.

    When it was the last of the ISR the partition has an empty ISR and no leader, and whoever is eligible is elected.
    """
    if node not in state.isr_nodes and node not in state.elr:
        return state
    isr = tuple(member for member in state.isr if member.node != node)
    changed = with_isr(state, isr, (node,))
    return replace(changed, leader=NO_LEADER, last_leader=node) if state.leader == node else changed


def granted(
    state: PartitionState, proposal: IsrProposal, lives: Callable[[NodeId], int | None] = lambda _: None
) -> Outcome:
    """Judge a proposal against the record: what every service does inside its compare-and-swap.

    `lives` tells a node's present incarnation, or None where the service does not know (a static cluster).
    """
    if proposal.epoch != state.epoch or proposal.leader != state.leader:
        return Outcome(Refusal.STALE_EPOCH, state)
    if proposal.version != state.version:
        return Outcome(Refusal.STALE_VERSION, state)
    nodes = [member.node for member in proposal.isr]
    if len(set(nodes)) != len(nodes) or not set(nodes) <= set(state.replicas) or proposal.leader not in nodes:
        return Outcome(Refusal.INELIGIBLE, state)
    for member in proposal.isr:
        known = lives(member.node)
        if member not in state.isr and known is not None and known != member.incarnation:
            return Outcome(Refusal.INELIGIBLE, state)
    return Outcome(None, with_isr(state, proposal.isr, proposal.unfit))
