"""The in-sync replicas as their leader sees them: who is behind, what is proposed, how far everybody has come.

Owns the arithmetic of the high watermark and of lagging, and the one proposal that may be open. The high watermark is
the smallest durable end over the *maximal* ISR: the members of the record, and whoever is in a proposal that may have
been granted without the leader knowing. So whichever of the two the cluster believes in, each of its members holds
what is committed.

A proposal's fate may be unknown (the service did not answer). It stays counted until the record's version has moved:
only then can it no longer be granted. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from walstream.cluster.metadata import (
    IsrProposal,
    Member,
    NodeId,
    Outcome,
    PartitionKey,
    PartitionState,
    Refusal,
)
from walstream.replication.context import NEVER


class Lag:
    """How far a follower has come, and when it was last at the leader's log end."""

    __slots__ = ("_mark_ms", "_mark_offset", "caught_up_ms", "end")

    def __init__(self, now_ms: int) -> None:
        self.end: int | None = None
        """Its durable end, once it has acknowledged the leader's epoch in its present life."""
        self.caught_up_ms = now_ms
        self._mark_offset = NEVER
        self._mark_ms = now_ms

    def forget(self) -> None:
        """The replica may hold less than it did: count nothing until it has been accepted again."""
        self.end = None
        self._mark_offset = NEVER

    def moved(self, end: int, log_end: int, now_ms: int) -> None:
        """The follower's durable end is `end`, while the leader's log ends at `log_end`.

        Under a steady load a follower is never at the very end. It counts as caught up at the time when the log ended
        where the follower is now: a mark remembers one such end, and is moved on when the follower passes it.
        """
        self.end = end
        if end >= log_end:
            self.caught_up_ms = now_ms
        elif end >= self._mark_offset:
            self.caught_up_ms = max(self.caught_up_ms, self._mark_ms)
        elif self._mark_offset != NEVER:
            return
        self._mark_offset, self._mark_ms = log_end, now_ms

    def outgrown(self, old_end: int, log_end: int, now_ms: int) -> None:
        """The leader's log has grown: a follower that was at its end was caught up until now."""
        if self.end is not None and self.end >= old_end:
            self.caught_up_ms = now_ms
            self._mark_offset, self._mark_ms = log_end, now_ms

    def behind_from_ms(self, log_end: int, lag_ms_max: int) -> int:
        """Return from when on the follower is too long behind; never, while it holds everything there is."""
        if self.end is not None and self.end >= log_end:
            return NEVER
        return self.caught_up_ms + lag_ms_max + 1

    def has_too_many_behind(self, log_end: int, records_max: int) -> bool:
        """Tell whether more records are missing than a member of the ISR may miss; 0 is no limit."""
        return records_max > 0 and self.end is not None and log_end - self.end > records_max


class Isr:
    """The record as last read, and the proposal that may change it."""

    __slots__ = (
        "_uncertain",
        "can_commit",
        "is_asking",
        "maximal",
        "me",
        "members",
        "others",
        "pending",
        "retry_at_ms",
        "state",
    )

    def __init__(self, state: PartitionState, me: Member) -> None:
        self.me = me
        self.state = state
        self.pending: IsrProposal | None = None
        """What was proposed and may be granted."""
        self.is_asking = False
        """The answer is still to come."""
        self.retry_at_ms = NEVER
        """When to propose again after an answer that was none."""
        self._uncertain: frozenset[NodeId] = frozenset()
        self.members = self.maximal = frozenset[NodeId]()
        """Whoever is in the ISR; and whoever is, or may be."""
        self.others: tuple[NodeId, ...] = ()
        """The maximal ISR without this node."""
        self.can_commit = False
        self._settle()

    def _settle(self) -> None:
        pending = frozenset(member.node for member in self.pending.isr) if self.pending else frozenset[NodeId]()
        self.members = self.state.isr_nodes
        self.maximal = self.members | pending | self._uncertain
        self.others = tuple(sorted(self.maximal - {self.me.node}))
        self.can_commit = self.state.can_commit

    def adopt(self, state: PartitionState) -> bool:
        """Take a newer record of the same epoch; tell whether it was newer."""
        if state.version <= self.state.version:
            return False
        self.state = state
        self.pending, self.is_asking, self.retry_at_ms = None, False, NEVER
        self._uncertain = frozenset()
        self._settle()
        return True

    @property
    def is_uncertain(self) -> bool:
        """Whether the fate of a proposal is unknown."""
        return bool(self._uncertain)

    @property
    def may_propose(self) -> bool:
        """Whether nothing is open and nothing has to wait."""
        return self.pending is None and self.retry_at_ms == NEVER

    def propose(self, partition: PartitionKey, members: Iterable[Member], unfit: Iterable[NodeId]) -> IsrProposal:
        """Make a proposal and count its members from now on."""
        assert self.pending is None
        self.pending = IsrProposal(
            partition,
            self.me.node,
            self.state.epoch,
            self.state.version,
            tuple(sorted(members)),
            tuple(sorted(unfit)),
        )
        self.is_asking = True
        self._settle()
        return self.pending

    def answered(self, outcome: Outcome, retry_at_ms: int) -> bool:
        """Take the answer to a proposal; tell whether the record has changed."""
        if outcome.state is not None and outcome.state.epoch == self.state.epoch and self.adopt(outcome.state):
            return True
        if self.pending is None or not self.is_asking:
            return False  # The record has moved since, so the proposal is settled.
        self.is_asking = False
        self.retry_at_ms = retry_at_ms
        if outcome.refusal is Refusal.INELIGIBLE:
            # This attempt is void; one before it, whose answer was lost, may still be on its way.
            self.pending = None
            self._settle()
        else:
            self._uncertain |= frozenset(member.node for member in self.pending.isr)
        return False

    def again(self) -> IsrProposal | None:
        """The time to try again has come: return the proposal whose fate is unknown, if there is one."""
        self.retry_at_ms = NEVER
        self.is_asking = self.pending is not None
        return self.pending

    def has_outrun(self, log_end: int, lags: Mapping[NodeId, Lag], records_max: int) -> bool:
        """Tell whether the log has grown too many records past a member, and something can be done about it now."""
        return self.may_propose and any(
            lags[node].has_too_many_behind(log_end, records_max) for node in self.members if node in lags
        )

    def high_watermark(self, own_end: int, lags: Mapping[NodeId, Lag]) -> int:
        """Return the smallest durable end over the maximal ISR; -1 while too few are in sync or one is unknown."""
        if not self.can_commit:
            return -1
        smallest = own_end
        for node in self.others:
            lag = lags.get(node)
            if lag is None or lag.end is None:
                return -1
            if lag.end < smallest:
                smallest = lag.end
        return smallest
