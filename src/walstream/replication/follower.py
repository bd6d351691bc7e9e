"""A follower of a partition: proves what it holds, cuts off what its leader never had, appends, and tells its progress.

    PREPARING ──epoch durable──▶ IDLE ──OPEN──▶ SETTLING ──log flushed, STATE said──▶ TOLD ──ACCEPT──▶ STREAMING
                                  ▲               ▲                                    │ DIVERGING, RESET, REWIND
                                  │               └───── durably cut ◀─── CUTTING ◀────┘
                                  └── link down         BROKEN ◀── a gap, an overlap, a failed append: RESYNC is said

Owns one epoch of following. Nothing is acknowledged to the leader before the epoch is persisted; nothing is appended
before ACCEPT, and then only what continues the log; nothing is called durable but what the own disk has synced.

The high watermark is the smaller of the leader's and the own durable end, and is taken from an accepted stream alone:
before, the bytes below it may be other ones than the leader's. Sans-IO.
"""

from __future__ import annotations

from enum import StrEnum

from walstream.cluster.metadata import NodeId
from walstream.replication.context import NEVER, Context
from walstream.replication.effects import (
    Append,
    ComputeDigest,
    Follow,
    Healed,
    Quarantine,
    ResetLog,
    ReturnCredit,
    TrimLog,
    Truncate,
)
from walstream.replication.events import DigestComputed, RangeRead
from walstream.replication.messages import (
    Accept,
    Batches,
    Data,
    DigestAnswer,
    DigestRequest,
    Diverging,
    FromFollower,
    FromLeader,
    Open,
    Progress,
    Refused,
    RepairData,
    RepairRequest,
    Reset,
    Resync,
    Rewind,
    State,
    Watermark,
    Why,
)
from walstream.replication.reconcile import breaks_promise, cut_at
from walstream.replication.repair import Repairs, Source


class Stage(StrEnum):
    """Where a follower is with its leader."""

    PREPARING = "preparing"
    IDLE = "idle"
    SETTLING = "settling"
    TOLD = "told"
    CUTTING = "cutting"
    STREAMING = "streaming"
    BROKEN = "broken"


class Follower:
    """One epoch of following."""

    def __init__(self, ctx: Context, leader: NodeId, epoch: int, unclean_epoch: int) -> None:
        self._ctx = ctx
        self.leader = leader
        self.epoch = epoch
        self.unclean_epoch = unclean_epoch
        self.stage = Stage.PREPARING
        self.session = 0
        self._is_cutting = False
        self._is_computing = False
        """A digest for the leader."""
        self._expected = 0
        """Where the next DATA begins."""
        self._accepted_at = 0
        self._reported = -1
        self._leader_watermark = 0
        self._leader_start = 0
        self._epoch_start = 0
        self._retry_at_ms = NEVER
        self._repairs = Repairs(ctx, epoch, is_outgoing=False)
        self._take_role()

    def _take_role(self) -> None:
        self._ctx.out.append(Follow(self._ctx.token, max(self.epoch, self._ctx.facts.epoch)))

    @property
    def is_ready(self) -> bool:
        """Whether the epoch is durable."""
        return self.stage is not Stage.PREPARING

    @property
    def is_streaming(self) -> bool:
        """Whether the leader has accepted this log and data flows."""
        return self.stage is Stage.STREAMING

    @property
    def deadline_ms(self) -> int:
        """When the follower next needs the clock: for repairs, and to persist its epoch; the leader drives the rest."""
        return self._repairs.deadline_ms if self.stage is Stage.STREAMING else self._retry_at_ms

    def failed(self, now_ms: int) -> None:
        """The epoch could not be made durable: try again in a while."""
        if not self.is_ready:
            self._retry_at_ms = now_ms + self._ctx.settings.retry_ms

    def ready(self) -> None:
        """The epoch is durable."""
        self.stage = Stage.SETTLING if self.session else Stage.IDLE
        self._ctx.report("following", leader=self.leader, epoch=self.epoch)
        self._answer()

    def stop(self) -> None:
        """End the role; what is being appended is the log's, and what is being cut too."""

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self, message: Open) -> None:
        """The leader begins a session; an older one than the present is a late message."""
        if message.session <= self.session:
            return
        self.session = message.session
        self.unclean_epoch = max(self.unclean_epoch, message.unclean_epoch)
        self._epoch_start = message.epoch_start
        self._leader_start = message.log_start
        self._repairs.stop()
        if self.stage is not Stage.PREPARING:
            self.stage = Stage.CUTTING if self._is_cutting else Stage.SETTLING
            self._answer()

    def _answer(self) -> None:
        """Say what is held, as soon as everything that was appended is durable."""
        log = self._ctx.log
        if self.stage is not Stage.SETTLING or log.durable_end != log.log_end:
            return
        self.stage = Stage.TOLD
        facts = self._ctx.facts
        self._send(
            State(
                self._ctx.key,
                self.epoch,
                self.session,
                log.log_start,
                log.durable_end,
                log.epochs.last_epoch,
                facts.high_watermark,
                facts.flags,
            )
        )

    def _send(self, message: FromFollower) -> None:
        self._ctx.send(self.leader, message, is_outgoing=False)

    def link_down(self) -> None:
        """The leader is out of reach: its session is over. It opens the next one when it can."""
        self._repairs.stop()
        if self.stage not in (Stage.PREPARING, Stage.CUTTING):
            self.stage = Stage.IDLE

    def received(self, message: FromLeader, now_ms: int) -> None:
        """The leader speaks, in this epoch. Another session's words are late, or the OPEN before them was lost."""
        if isinstance(message, Data):
            self._on_data(message, now_ms)
        elif message.session == self.session:
            self._on_control(message, now_ms)

    def _on_control(self, message: FromLeader, now_ms: int) -> None:
        is_told = self.stage is Stage.TOLD
        match message:
            case Watermark():
                self._on_watermark(message, now_ms)
            case Accept() if is_told:
                self._on_accept(message, now_ms)
            case Diverging() if is_told:
                self._cut(cut_at(self._ctx.log, message.end_epoch, message.end_offset))
            case Reset() if is_told:
                self._cut(message.log_start, starts_over=True)
            case Rewind() if is_told or self.is_streaming:
                offset = min(message.offset, self._ctx.log.log_end)
                self._cut(offset, is_ordered=True, starts_over=offset <= self._ctx.log.log_start)
            case DigestRequest() if self.is_streaming:
                self._on_digest_request(message)
            case RepairRequest() if self.is_streaming:
                self._repairs.serve(self.leader, message)
            case RepairData() if self.is_streaming:
                self._repairs.on_data(message)
            case Refused() if self.is_ready:
                self.stage = Stage.CUTTING if self._is_cutting else Stage.IDLE

    def _on_accept(self, message: Accept, now_ms: int) -> None:
        if message.offset != self._ctx.log.log_end:
            self._break("accepted at another offset")
            return
        self.stage = Stage.STREAMING
        self._expected = self._accepted_at = self._reported = message.offset
        self._ctx.report("accepted by the leader", leader=self.leader, epoch=self.epoch, offset=message.offset)
        self.go_on(now_ms)

    def _break(self, why: str) -> None:
        """Something is missing, or too much: the leader shall begin anew, nothing is guessed."""
        self.stage = Stage.BROKEN
        self._ctx.report("stream broken", leader=self.leader, why=why, offset=self._expected)
        self._say_resync()

    def _say_resync(self) -> None:
        self._send(Resync(self._ctx.key, self.epoch, self.session, self._ctx.log.log_end))

    # ── cutting ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _cut(self, offset: int, *, starts_over: bool = False, is_ordered: bool = False) -> None:
        """Cut the log back to `offset`, or begin it anew there.

        `is_ordered`: the leader has found this copy wrong and has taken it out of the ISR, so no promise rests on it.
        """
        ctx, facts = self._ctx, self._ctx.facts
        if not is_ordered and breaks_promise(
            offset, facts.high_watermark, facts.high_watermark_epoch, self.unclean_epoch
        ):
            self._quarantine(offset)
            return
        ctx.next_truncation()
        self._repairs.stop()
        self.stage = Stage.CUTTING
        self._is_cutting = True
        self._is_computing = False
        if starts_over or offset < ctx.log.log_start:
            start = offset if starts_over else self._leader_start
            ctx.report("log begun anew", start=start, end=ctx.log.log_end, epoch=self.epoch)
            facts.high_watermark = min(facts.high_watermark, start)
            ctx.out.append(ResetLog(ctx.token, start))
        else:
            ctx.report("log cut back", offset=offset, end=ctx.log.log_end, epoch=self.epoch)
            facts.high_watermark = min(facts.high_watermark, offset)
            ctx.out.append(Truncate(ctx.token, offset))

    def _quarantine(self, offset: int) -> None:
        ctx, facts = self._ctx, self._ctx.facts
        facts.quarantine = (
            f"The leader of epoch {self.epoch} has nothing after {offset} of what was committed up to "
            f"{facts.high_watermark} in epoch {facts.high_watermark_epoch}."
        )
        self.stage = Stage.IDLE
        ctx.out.append(Quarantine(facts.quarantine))
        self._send(Refused(ctx.key, self.epoch, self.session, Why.QUARANTINED, self.epoch))

    def truncated(self) -> None:
        """The log is cut, durably: say what is left."""
        facts, log = self._ctx.facts, self._ctx.log
        self._is_cutting = False
        facts.high_watermark = max(min(facts.high_watermark, log.log_end), log.log_start)
        self._ctx.set_damaged(facts.damaged)
        if self.stage is Stage.CUTTING:
            self.stage = Stage.SETTLING if self.leader in self._ctx.incoming else Stage.IDLE
            self._answer()

    # ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_data(self, message: Data, now_ms: int) -> None:
        size = _size(message.batches)
        ctx = self._ctx
        if message.session != self.session or self.stage is not Stage.STREAMING:
            ctx.out.append(ReturnCredit(self.leader, size))
            return
        if message.offset == self._expected < message.next_offset:
            self._expected = message.next_offset
            ctx.out.append(
                Append(
                    ctx.token,
                    self.leader,
                    message.offset,
                    message.next_offset,
                    message.batches,
                    size,
                    message.may_have_gaps,
                )
            )
            self._heard(message.high_watermark, message.log_start, now_ms)
            return
        ctx.out.append(ReturnCredit(self.leader, size))
        if self._accepted_at <= message.offset < message.next_offset <= self._expected:
            return  # The same frame once more: the leader sends no offset twice in a session.
        self._break("a gap" if message.offset > self._expected else "an overlap")

    def append_failed(self, reason: str) -> None:
        """The log refused what came."""
        if self.stage is Stage.STREAMING:
            self._break(reason)

    def durable(self, now_ms: int) -> None:
        """The own disk has more: say so, or say at last what is held."""
        if self.stage is Stage.STREAMING:
            if self._ctx.log.durable_end > self._reported:
                self._follow_watermark(now_ms)
                self._say_progress()
        elif self.stage is Stage.SETTLING:
            self._answer()

    def _say_progress(self) -> None:
        ctx = self._ctx
        self._reported = ctx.log.durable_end
        self._send(
            Progress(ctx.key, self.epoch, self.session, self._reported, ctx.facts.high_watermark, ctx.facts.flags)
        )

    def _on_watermark(self, message: Watermark, now_ms: int) -> None:
        if self.stage in (Stage.TOLD, Stage.BROKEN):
            self._say_resync()  # The ACCEPT before it, or the RESYNC after it, was lost.
        elif self.stage is Stage.STREAMING:
            if message.next_offset > self._expected:
                self._break("a lost frame")
                return
            self._heard(message.high_watermark, message.log_start, now_ms)
            self._say_progress()

    def _heard(self, high_watermark: int, log_start: int, now_ms: int) -> None:
        self._leader_watermark = max(self._leader_watermark, high_watermark)
        self._leader_start = max(self._leader_start, log_start)
        self._follow_watermark(now_ms)

    def _follow_watermark(self, now_ms: int) -> None:
        """Take over high watermark and log start, as far as the own durable log reaches."""
        ctx, facts, log = self._ctx, self._ctx.facts, self._ctx.log
        reached = min(self._leader_watermark, log.durable_end)
        is_settled = self._leader_watermark >= self._epoch_start
        if reached > facts.high_watermark or (
            reached == facts.high_watermark and facts.high_watermark_epoch < self.epoch
        ):
            ctx.raise_high_watermark(reached, self.epoch, is_settled=is_settled)
        start = min(self._leader_start, facts.high_watermark)
        if start > log.log_start:
            ctx.out.append(TrimLog(start))
            ctx.set_damaged(tuple((max(low, start), high) for low, high in facts.damaged))
        # Not before the service knows of it: who leads here may have been replaced, and the next life would look sound.
        if facts.is_unclean and ctx.has_record and is_settled and log.durable_end >= self._leader_watermark:
            facts.is_unclean = False
            ctx.out.append(Healed())
            ctx.report("replica holds everything committed again", epoch=self.epoch, offset=log.durable_end)
        if facts.damaged:
            self.go_on(now_ms)

    # ── digests and repairs ──────────────────────────────────────────────────────────────────────────────────────

    def _on_digest_request(self, message: DigestRequest) -> None:
        ctx = self._ctx
        if message.end > ctx.log.durable_end or self._is_computing:
            return  # The leader asks again.
        self._is_computing = True
        request = message.session << 40 | message.request
        ctx.out.append(ComputeDigest(ctx.token, request, message.start, message.end))

    def digest_computed(self, event: DigestComputed) -> None:
        """A range of the own log has been read for the leader."""
        self._is_computing = False
        session, request = event.request >> 40, event.request & ((1 << 40) - 1)
        valid_from, value = event.digest
        self._send(DigestAnswer(self._ctx.key, self.epoch, session, request, valid_from, value))

    def range_read(self, event: RangeRead) -> None:
        """A range has been read for the leader's repair."""
        self._repairs.on_read(event)

    def repair_done(self, now_ms: int, *, has_helped: bool) -> None:
        """A range of the own log was written anew, or refused."""
        self._repairs.done(has_helped=has_helped)
        self.go_on(now_ms)

    def damage_changed(self, now_ms: int) -> None:
        """Tell the leader whether the copy is sound, and mend it."""
        if self.stage is Stage.STREAMING:
            self._say_progress()
            self.go_on(now_ms)

    def go_on(self, now_ms: int) -> None:
        """Ask the leader for what is damaged here."""
        if self.stage is Stage.STREAMING:
            self._repairs.go_on([Source(self.leader, self.session, NEVER)], now_ms)

    def tick(self, now_ms: int) -> None:
        """Do what is due."""
        if now_ms >= self._retry_at_ms:
            self._retry_at_ms = NEVER
            self._take_role()
        self.go_on(now_ms)


def _size(batches: Batches) -> int:
    return sum(map(len, batches))
