"""The leader of a partition: opens a session with every follower, commits what all in-sync replicas hold.

Owns the high watermark, the sessions and the ISR of one epoch. Begins only when its epoch is durable (`RoleTaken`),
and ends with the role: an epoch is led once. Data is not here: appends move the log's end, and each session sends from
where its follower stands.

Invariants: the high watermark is the smallest durable end over the maximal ISR, or stays where it was; it never goes
back; it does not move while the ISR is smaller than `min_isr`. No follower is proposed for the ISR before its durable
end, in its present life, has reached the high watermark and the start of this epoch, and its recent past has been
compared. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from walstream.cluster.metadata import Member, NodeId, PartitionState, Refusal
from walstream.replication.context import NEVER, RECOMPUTE, Context
from walstream.replication.effects import (
    Failing,
    FailWaiters,
    Propose,
    RefreshMetadata,
    SetFollowersDurable,
)
from walstream.replication.events import (
    DataSent,
    DigestComputed,
    ProposalAnswered,
    RangeRead,
    SendFailed,
)
from walstream.replication.isr import Isr, Lag
from walstream.replication.messages import (
    DigestAnswer,
    FromFollower,
    Progress,
    Refused,
    RepairData,
    RepairRequest,
    ReplicaFlag,
    Resync,
    State,
    Why,
)
from walstream.replication.repair import Repairs, Source
from walstream.replication.sessions import Session
from walstream.replication.settings import Mode


class Leader:
    """One epoch of leadership."""

    def __init__(self, ctx: Context, state: PartitionState, now_ms: int) -> None:
        self._ctx = ctx
        self.epoch = state.epoch
        self.epoch_start = ctx.log.log_end
        self.high_watermark = ctx.facts.high_watermark
        self.is_ready = False
        self.isr = Isr(state, ctx.me)
        self.sessions: dict[NodeId, Session] = {}
        self._lags: dict[NodeId, Lag] = {}
        self._repairs = Repairs(ctx, state.epoch, is_outgoing=True)
        self._is_settled = False
        self._log_end = ctx.log.log_end
        self._log_start = ctx.log.log_start
        self._followers_durable = -1
        self._set_replicas(now_ms)

    @property
    def leader(self) -> NodeId:
        """Who leads: this node."""
        return self._ctx.me.node

    @property
    def unclean_epoch(self) -> int:
        """The newest epoch that was begun without a promise."""
        return self.isr.state.unclean_epoch

    @property
    def is_settled(self) -> bool:
        """Whether the high watermark has passed the epoch's start, so that it is at least what any reader ever saw."""
        return self._is_settled

    @property
    def can_commit(self) -> bool:
        """Whether enough replicas are in sync for acks=all."""
        return self.isr.can_commit

    @property
    def deadline_ms(self) -> int:
        """When the leader next needs the clock."""
        if not self.is_ready:
            return NEVER
        log_end, lag_ms_max = self._ctx.log.log_end, self._ctx.settings.isr_lag_ms_max
        nearest = min(self.isr.retry_at_ms, self._repairs.deadline_ms)
        for session in self.sessions.values():
            nearest = min(nearest, session.deadline_ms)
            if session.node in self.isr.members and self.isr.may_propose:
                nearest = min(nearest, session.lag.behind_from_ms(log_end, lag_ms_max))
        return nearest

    # ── beginning and ending ─────────────────────────────────────────────────────────────────────────────────────

    def ready(self, now_ms: int) -> None:
        """The epoch is durable: appends are taken, and followers may be told."""
        ctx = self._ctx
        self.is_ready = True
        self.epoch_start = self._log_end = ctx.log.log_end
        # A log that was being emptied when this node was elected may begin above what was known before.
        self.high_watermark = max(ctx.facts.high_watermark, ctx.log.log_start)
        self._is_settled = self.high_watermark >= self.epoch_start
        ctx.raise_high_watermark(self.high_watermark, self.epoch, is_settled=self._is_settled)
        ctx.report("leader began", epoch=self.epoch, start=self.epoch_start, high_watermark=self.high_watermark)
        self._commit(now_ms)
        for session in self.sessions.values():
            self._reach(session, now_ms)
        self.go_on(now_ms)

    def _reach(self, session: Session, now_ms: int) -> None:
        incarnation = self._ctx.outgoing.get(session.node)
        if incarnation is not None and self.is_ready:
            session.link_up(incarnation, now_ms)

    def stop(self) -> None:
        """End the role: who waits is told, followers are told."""
        ctx = self._ctx
        for session in self.sessions.values():
            if session.is_streaming:
                end = Refused(ctx.key, self.epoch, session.number, Why.NOT_LEADER, self.epoch)
                ctx.send(session.node, end, is_outgoing=True)
        ctx.out.append(FailWaiters(Failing.NOT_LEADER))

    def update(self, state: PartitionState, now_ms: int) -> None:
        """The record of this epoch changed."""
        before = self.isr.state
        if self.isr.adopt(state):
            self._isr_changed(before, now_ms)

    def _set_replicas(self, now_ms: int) -> None:
        wanted = [node for node in sorted(self.isr.state.replicas) if node != self._ctx.me.node]
        for node in [node for node in self.sessions if node not in wanted]:
            del self.sessions[node]
        for node in wanted:
            if node not in self.sessions:
                self.sessions[node] = Session(node, self._ctx, self, now_ms)
                self._reach(self.sessions[node], now_ms)
        self._lags = {node: session.lag for node, session in self.sessions.items()}

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────

    def link_up(self, peer: NodeId, now_ms: int) -> None:
        """A follower can be reached."""
        if peer in self.sessions:
            self._reach(self.sessions[peer], now_ms)
            self.go_on(now_ms)

    def link_down(self, peer: NodeId, now_ms: int) -> None:
        """A follower cannot be reached."""
        if peer in self.sessions:
            self.sessions[peer].link_down()
            self.go_on(now_ms)

    def appended(self, now_ms: int) -> None:
        """The own log has grown: send it on."""
        log_end = self._ctx.log.log_end
        if not self.is_ready or log_end == self._log_end:
            return
        old_end, self._log_end = self._log_end, log_end
        ctx = self._ctx
        ctx.wake_by(now_ms + ctx.settings.isr_lag_ms_max + 1)
        for session in self.sessions.values():
            session.lag.outgrown(old_end, log_end, now_ms)
            session.pump()
        records_max = ctx.settings.isr_lag_records_max
        if records_max and self.isr.has_outrun(log_end, self._lags, records_max):
            self.go_on(now_ms)  # No timer would tell of it.
            ctx.wake_by(RECOMPUTE)

    def durable(self, now_ms: int) -> None:
        """The own disk has more."""
        if self.is_ready:
            self.appended(now_ms)
            self._commit(now_ms)

    def sent(self, event: DataSent, now_ms: int) -> None:
        """A DATA frame is under way."""
        if event.peer in self.sessions:
            self.sessions[event.peer].on_sent(event, now_ms)

    def send_failed(self, event: SendFailed, now_ms: int) -> str:
        """The own log could not be read for a follower. Return why this node should not lead any longer, if so."""
        if event.peer not in self.sessions:
            return ""
        self.sessions[event.peer].on_send_failed(event.session, now_ms)
        is_damaged = any(start <= event.offset < end for start, end in self._ctx.facts.damaged)
        if is_damaged and self._is_held_by_nobody_else(event.offset):
            return f"offset {event.offset} is damaged and nobody else has it"
        return ""

    def _is_held_by_nobody_else(self, offset: int) -> bool:
        """Tell whether a leader could be elected that lacks the offset, and nobody in reach could repair it.

        Then it is not committed, and another leader can go on where this one cannot.
        """
        ends = {node: lag.end for node, lag in self._lags.items()}
        if any(end is not None and end > offset for end in ends.values()):
            return False
        if any(ends.get(node) is None for node in self.isr.others):
            return False  # It may have it, or leaves the ISR soon.
        able = [node for node in (*self.isr.others, *self.isr.state.elr) if node in self.sessions]
        return any(self.sessions[node].is_reachable and ends[node] is not None for node in able)

    def received(self, peer: NodeId, message: FromFollower, now_ms: int) -> None:
        """A follower speaks. Its epoch is this leader's; another session's words are late."""
        session = self.sessions.get(peer)
        if session is None or message.session != session.number or not self.is_ready:
            return
        match message:
            case Progress():
                if session.on_progress(message, now_ms):
                    self._moved(session, now_ms)
            case State():
                if session.on_state(message, now_ms):
                    self._accepted(session, message, now_ms)
                self.go_on(now_ms)
            case Resync():
                self._ctx.report("a follower asks to begin anew", follower=peer, offset=message.offset)
                session.on_resync(now_ms)
            case DigestAnswer():
                session.comparison.on_answer(message, now_ms)
                self.go_on(now_ms)
            case Refused():
                self._refused(session, message, now_ms)
            case RepairRequest():
                session.on_repair_request(message.start)
                self._repairs.serve(peer, message)
                self.go_on(now_ms)
            case RepairData():
                self._repairs.on_data(message)

    def _moved(self, session: Session, now_ms: int) -> None:
        """A follower has come further, or its copy has become sound or damaged."""
        self._commit(now_ms)
        if session.node not in self.isr.maximal or session.is_unfit:
            self.go_on(now_ms)
            self._ctx.wake_by(RECOMPUTE)

    def _accepted(self, session: Session, message: State, now_ms: int) -> None:
        """A follower's log is proven a prefix; is it long enough for what the cluster believes of it?"""
        ctx, state = self._ctx, self.isr.state
        held = message.log_end
        believed = session.node in state.isr_nodes or session.node in state.elr
        member = Member(session.node, session.incarnation)
        lost = bool(message.flags & ReplicaFlag.UNCLEAN) and member not in state.isr
        if believed and (lost or held < self.high_watermark):
            session.must_leave = True
            ctx.report(
                "a replica lost what it had acknowledged", is_warning=True, follower=session.node, end=held,
                high_watermark=self.high_watermark,
            )  # fmt: skip
        ctx.report("follower accepted", follower=session.node, session=session.number, offset=held)
        self._commit(now_ms)

    def _refused(self, session: Session, message: Refused, now_ms: int) -> None:
        ctx = self._ctx
        if session.refused(message.why, now_ms):
            ctx.report(
                "a follower refuses", follower=session.node, why=message.why.name, known_epoch=message.known_epoch
            )
        if message.why is Why.QUARANTINED:
            session.must_leave = True
            self.go_on(now_ms)
        elif message.why is Why.SAME_EPOCH:
            ctx.out.append(RefreshMetadata(message.known_epoch))

    # ── committing ───────────────────────────────────────────────────────────────────────────────────────────────

    def _commit(self, now_ms: int) -> None:
        """Move the high watermark as far as the maximal ISR allows."""
        if not self.is_ready:
            return
        ctx = self._ctx
        reached = self.isr.high_watermark(ctx.sound_end(self.high_watermark, self.isr.others), self._lags)
        if reached > self.high_watermark:
            self.high_watermark = reached
            self._is_settled = self._is_settled or reached >= self.epoch_start
            ctx.raise_high_watermark(reached, self.epoch, is_settled=self._is_settled)
            self._tell_watermark(now_ms)
        elif ctx.log.log_start > self._log_start:
            self._tell_watermark(now_ms)
        if ctx.settings.mode is Mode.SYNC:
            self._count_followers()

    def _tell_watermark(self, now_ms: int) -> None:
        self._log_start = self._ctx.log.log_start
        for session in self.sessions.values():
            session.watermark_moved(now_ms)

    def replica_durable(self, followers: int) -> int:
        """Return up to where that many followers, besides this node, are durable; 0 when there are not as many."""
        if followers <= 0:
            return self._ctx.log.durable_end
        ends = [session.lag.end for session in self.sessions.values() if session.lag.end is not None]
        return nlargest(followers, ends)[-1] if len(ends) >= followers else 0

    def _count_followers(self) -> None:
        reached = self.replica_durable(min(self._ctx.settings.sync_followers, len(self.sessions)))
        if reached > self._followers_durable:
            self._followers_durable = reached
            self._ctx.out.append(SetFollowersDurable(reached))

    # ── the in-sync replicas ─────────────────────────────────────────────────────────────────────────────────────

    def go_on(self, now_ms: int) -> None:
        """Do what the state of the followers asks for: another ISR, a copy cut back, a repair."""
        if not self.is_ready:
            return
        for session in self.sessions.values():
            self._settle(session, now_ms)
        if self.isr.may_propose:
            self._propose(now_ms)
        self._repairs.go_on(self._sources(), now_ms)

    def _settle(self, session: Session, now_ms: int) -> None:
        """Mend an unfit copy that is in nobody's list any more, unless it has what is damaged in the own one."""
        if session.node in self.isr.maximal or session.node in self.isr.state.elr:
            return
        session.must_leave = False
        rewind_to, damaged = session.rewind_to, self._ctx.facts.damaged
        if rewind_to is not None and session.is_streaming and all(end <= rewind_to for _, end in damaged):
            self._ctx.report("follower's copy is cut back", is_warning=True, follower=session.node, offset=rewind_to)
            session.rewind(rewind_to, now_ms)

    def _propose(self, now_ms: int) -> None:
        """Propose the ISR that should be, if it is not the one that is."""
        state, sessions = self.isr.state, self.sessions.values()
        old = {member.node: member for member in state.isr}
        staying = [one for one in sessions if one.node in old and not self._leaves(one, now_ms)]
        joining = [one for one in sessions if one.node not in old and self._joins(one)]
        unfit = [one.node for one in sessions if one.is_unfit and (one.node in old or one.node in state.elr)]
        nodes = {self._ctx.me.node, *(one.node for one in staying), *(one.node for one in joining)}
        if nodes == state.isr_nodes and not set(unfit) & set(state.elr):
            return
        members = [self._ctx.me]
        for one in staying:
            members.append(Member(one.node, one.incarnation) if one.is_streaming else old[one.node])
        for one in joining:
            one.lag.caught_up_ms = now_ms  # It is at the high watermark; it has the usual time to come to the end.
            members.append(Member(one.node, one.incarnation))
        proposal = self.isr.propose(self._ctx.key, members, unfit)
        self._ctx.report("isr proposed", before=_names(state.isr_nodes), after=_names(nodes), unfit=_names(unfit))
        self._ctx.out.append(Propose(self._ctx.token, proposal))

    def _leaves(self, session: Session, now_ms: int) -> bool:
        log_end, settings = self._ctx.log.log_end, self._ctx.settings
        return (
            session.is_unfit
            or now_ms >= session.lag.behind_from_ms(log_end, settings.isr_lag_ms_max)
            or session.lag.has_too_many_behind(log_end, settings.isr_lag_records_max)
        )

    def _joins(self, session: Session) -> bool:
        end, settings = session.lag.end, self._ctx.settings
        return (
            session.is_streaming
            and session.has_spoken
            and not session.is_unfit
            and session.comparison.is_proven
            and end is not None
            and end >= max(self.high_watermark, self.epoch_start)
            and not session.lag.has_too_many_behind(self._ctx.log.log_end, settings.isr_lag_records_max)
        )

    def proposal_answered(self, event: ProposalAnswered, now_ms: int) -> None:
        """The metadata service has granted, refused, or not answered."""
        before = self.isr.state
        outcome, was_told = event.outcome, self.isr.is_uncertain
        if self.isr.answered(outcome, now_ms + self._ctx.settings.retry_ms):
            self._isr_changed(before, now_ms)
        elif outcome.refusal is not None and not (outcome.refusal is Refusal.UNKNOWN and was_told):
            self._ctx.report("isr not changed", why=outcome.refusal.value)
        if outcome.state is not None and outcome.state.epoch > self.epoch:
            self._ctx.out.append(RefreshMetadata(outcome.state.epoch))
        elif outcome.refusal in (Refusal.STALE_VERSION, Refusal.STALE_EPOCH) and self.isr.state is before:
            self._ctx.out.append(RefreshMetadata(self.epoch))

    def _isr_changed(self, before: PartitionState, now_ms: int) -> None:
        state = self.isr.state
        if state.isr_nodes != before.isr_nodes or state.elr != before.elr:
            names = [_names(nodes) for nodes in (before.isr_nodes, state.isr_nodes, state.elr)]
            self._ctx.report("isr changed", before=names[0], after=names[1], eligible=names[2])
        if len(state.isr) == 1 < len(before.isr):
            self._ctx.report("no follower is in sync", is_warning=True, min_isr=state.min_isr)
        self._set_replicas(now_ms)
        for node in sorted(before.isr_nodes - state.isr_nodes):
            if node in self.sessions:
                self.sessions[node].fell_behind(now_ms)
        self._commit(now_ms)
        if before.can_commit and not state.can_commit:
            self._ctx.out.append(FailWaiters(Failing.NOT_ENOUGH_REPLICAS))
        self.go_on(now_ms)

    # ── digests and repairs ──────────────────────────────────────────────────────────────────────────────────────

    def digest_computed(self, event: DigestComputed, now_ms: int) -> None:
        """A range of the own log has been read for a comparison."""
        for session in self.sessions.values():
            session.comparison.on_computed(event.request, event.digest, now_ms)
        self.go_on(now_ms)

    def range_read(self, event: RangeRead) -> None:
        """A range has been read for a follower's repair."""
        self._repairs.on_read(event)

    def repair_done(self, now_ms: int, *, has_helped: bool) -> None:
        """A range of the own log was written anew, or refused."""
        self._repairs.done(has_helped=has_helped)
        self._commit(now_ms)
        self.go_on(now_ms)

    def _sources(self) -> list[Source]:
        if not self._ctx.facts.damaged:
            return []
        return [
            Source(one.node, one.number, one.lag.end)
            for one in self.sessions.values()
            if one.is_streaming and one.lag.end is not None and not one.is_unfit
        ]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now_ms: int) -> None:
        """Do what is due."""
        if not self.is_ready:
            return
        for session in self.sessions.values():
            session.tick(now_ms)
        if now_ms >= self.isr.retry_at_ms:
            proposal = self.isr.again()
            if proposal is not None:
                self._ctx.out.append(Propose(self._ctx.token, proposal))
        if self._ctx.log.log_start > self._log_start:
            self._tell_watermark(now_ms)
        self.go_on(now_ms)


def _names(nodes: Iterable[NodeId]) -> str:
    return ",".join(str(node) for node in sorted(nodes))
