"""What both roles of a partition's core share: who they are, what is durably known, the links, the effects gathered.

Owns the facts that outlive a role (`Facts`) and the token of the present one. A role never talks to the world: it adds
to `out`, and the manager returns what has been gathered. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from walstream.cluster.metadata import Member, NodeId, PartitionKey
from walstream.replication.effects import Effect, Report, Send, SetDamaged, SetHighWatermark
from walstream.replication.events import LogView, Range, Token
from walstream.replication.messages import PartitionMessage, ReplicaFlag
from walstream.replication.settings import CoreSettings

NEVER = 1 << 62
"""A deadline that does not come."""
RECOMPUTE = -1
"""Given to `wake_by`: many timers may have been set."""
NO_ROLE = Token(0, 0)


@dataclass(slots=True)
class Facts:
    """What this replica knows of itself, whatever its role is."""

    epoch: int = -1
    """The newest epoch that is persisted here."""
    high_watermark: int = 0
    high_watermark_epoch: int = -1
    """In which epoch that high watermark was learnt: a later unclean election may take it back."""
    is_unclean: bool = False
    damaged: tuple[Range, ...] = ()
    quarantine: str = ""
    """Why the copy must not be touched; empty when it may be."""

    @property
    def flags(self) -> ReplicaFlag:
        """What a follower tells its leader about its copy."""
        unclean = ReplicaFlag.UNCLEAN if self.is_unclean else ReplicaFlag.NONE
        return unclean | ReplicaFlag.DAMAGED if self.damaged else unclean


@dataclass(slots=True)
class Context:
    """One partition on one node."""

    key: PartitionKey
    me: Member
    log: LogView
    settings: CoreSettings
    facts: Facts = field(default_factory=Facts)
    outgoing: dict[NodeId, int] = field(default_factory=dict)
    """Peers that this node can push to, and which life they are in."""
    incoming: dict[NodeId, int] = field(default_factory=dict)
    """Peers that can push to this node."""
    has_record: bool = False
    """Whether the service has told the record, and so knows that this life has begun and what it has lost."""
    out: list[Effect] = field(default_factory=list)
    token: Token = NO_ROLE
    wake_ms: int = NEVER
    """The earliest timer that was set since the role's deadline was last computed as a whole."""

    def take(self) -> list[Effect]:
        """Return the effects gathered, and begin anew."""
        effects, self.out = self.out, []
        return effects

    def wake_by(self, at_ms: int) -> None:
        """Note that a timer was set."""
        if at_ms < self.wake_ms:
            self.wake_ms = at_ms

    def next_generation(self) -> None:
        """Another role: completions of the last one are void."""
        self.token = Token(self.token.generation + 1, self.token.truncations)

    def next_truncation(self) -> None:
        """The log is about to be cut: completions from before are void."""
        self.token = Token(self.token.generation, self.token.truncations + 1)

    def send(self, peer: NodeId, message: PartitionMessage, *, is_outgoing: bool) -> None:
        """Put a message on a link, if there is one."""
        if peer in (self.outgoing if is_outgoing else self.incoming):
            self.out.append(Send(peer, message, is_outgoing))

    def report(self, phrase: str, *, is_warning: bool = False, **fields: int | str) -> None:
        """Tell of a change that is worth a line."""
        self.out.append(Report(phrase, tuple(fields.items()), is_warning))

    def raise_high_watermark(self, offset: int, epoch: int, *, is_settled: bool) -> None:
        """Tell the log of a high watermark; also again, in a new epoch or when it settles."""
        assert offset >= self.facts.high_watermark, "the high watermark goes back"
        self.facts.high_watermark, self.facts.high_watermark_epoch = offset, epoch
        self.out.append(SetHighWatermark(offset, epoch, is_settled))

    def sound_end(self, high_watermark: int, others: Collection[NodeId]) -> int:
        """Return how far the own durable log counts: up to damage in what is not committed yet.

        What is damaged here is held by fewer than are in sync, until it has been fetched from one of the `others`.
        """
        for start, end in self.facts.damaged:
            if end > high_watermark and others:
                return min(max(start, high_watermark), self.log.durable_end)
        return self.log.durable_end

    def set_damaged(self, damaged: tuple[Range, ...]) -> None:
        """Note what is damaged of the log as it is now, and tell when that has changed."""
        start, end = self.log.log_start, self.log.log_end
        merged: list[Range] = []
        for low, high in sorted((max(low, start), min(high, end)) for low, high in damaged):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            elif low < high:
                merged.append((low, high))
        kept = tuple(merged)
        if kept != self.facts.damaged:
            self.facts.damaged = kept
            self.out.append(SetDamaged(kept))
