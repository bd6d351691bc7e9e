"""The leader's side of the stream to one follower: opened, reconciled, fed, watched.

    DOWN ──link up──▶ OPENING ──STATE, accepted──▶ STREAMING
                        ▲  │ STATE, diverging: told where, and waited for the next STATE
                        │  └──refused──▶ WAITING ──after retry_ms──┐
                        └──────────── RESYNC, silence, ────────────┘

Owns what is said to the follower and when it is said again; asks the leader what its epoch, high watermark and log
are. Keeps no data: what is to be sent is a position, and the driver reads the log from there.

Invariant: `lag.end` is counted only for the follower's present life and the leader's epoch. It outlives a session
that breaks, because a follower cuts off nothing that it acknowledged to the same leader; a new life, which may have
lost bytes, is counted from its first ACCEPT on. Sans-IO.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from walstream.cluster.metadata import NodeId
from walstream.replication.context import NEVER, Context
from walstream.replication.digests import Comparison
from walstream.replication.effects import SendData
from walstream.replication.events import DataSent
from walstream.replication.isr import Lag
from walstream.replication.messages import (
    Accept,
    Diverging,
    Open,
    Progress,
    ReplicaFlag,
    Reset,
    Rewind,
    State,
    Watermark,
    Why,
)
from walstream.replication.reconcile import Accepted, Diverges, judge

REPAIRS_MAX = 10
"""So often a follower is sent the same range for a repair in place; then it is told to cut it off and copy it anew."""


class Standing(StrEnum):
    """Where a session is."""

    DOWN = "down"
    OPENING = "opening"
    WAITING = "waiting"
    STREAMING = "streaming"


class Leading(Protocol):
    """What a session asks the leader."""

    epoch: int
    epoch_start: int
    high_watermark: int

    @property
    def unclean_epoch(self) -> int:
        """The newest epoch that was begun without a promise."""


class Session:
    """One follower."""

    __slots__ = (
        "_ctx",
        "_is_sending",
        "_leading",
        "_refusal",
        "_repairs_asked",
        "_resynced_at",
        "_retry_at_ms",
        "_said_at_ms",
        "_told_start",
        "_watermark_at_ms",
        "comparison",
        "flags",
        "has_spoken",
        "incarnation",
        "known_watermark",
        "lag",
        "must_leave",
        "next_offset",
        "node",
        "number",
        "standing",
        "told_watermark",
    )

    def __init__(self, node: NodeId, ctx: Context, leading: Leading, now_ms: int) -> None:
        self.node = node
        self._ctx = ctx
        self._leading = leading
        self.standing = Standing.DOWN
        self.number = 0
        self.incarnation = -1
        self.lag = Lag(now_ms)
        self.flags = ReplicaFlag.NONE
        self.must_leave = False
        """It holds less than a member of the ISR must. Until it is in neither ISR nor ELR."""
        self.has_spoken = True
        """Whether it was heard since it fell behind: where it once was says nothing about whether it still lives."""
        self.next_offset = 0
        """Where the next DATA begins."""
        self.told_watermark = 0
        self.known_watermark = 0
        """The high watermark that the follower has confirmed."""
        self._told_start = 0
        self._is_sending = False
        self._refusal: Why | None = None
        self._resynced_at = -1
        self._repairs_asked: tuple[int, int] = (0, 0)
        """Of which offset a repair was asked for last, and how many times."""
        self._retry_at_ms = NEVER
        self._said_at_ms = now_ms
        self._watermark_at_ms = NEVER
        self.comparison = Comparison(ctx, node)

    @property
    def is_streaming(self) -> bool:
        """Whether the follower's log is proven a prefix, and data flows."""
        return self.standing is Standing.STREAMING

    @property
    def is_reachable(self) -> bool:
        """Whether there is a link."""
        return self.standing is not Standing.DOWN

    @property
    def is_unfit(self) -> bool:
        """Whether the follower's copy may be neither in the ISR nor eligible."""
        # Asked with every progress; flags are combined slowly, and there are hardly ever any.
        is_damaged = self.flags is not ReplicaFlag.NONE and bool(self.flags & ReplicaFlag.DAMAGED)
        return self.must_leave or is_damaged or self.comparison.differs

    @property
    def rewind_to(self) -> int | None:
        """From where on the follower has to copy anew: its copy differs, or its damage cannot be repaired."""
        start, count = self._repairs_asked
        return start if count > REPAIRS_MAX else self.comparison.rewind_to

    def on_repair_request(self, start: int) -> None:
        """Count how often the follower asks for the same."""
        last, count = self._repairs_asked
        self._repairs_asked = (start, count + 1 if start == last else 1)

    @property
    def deadline_ms(self) -> int:
        """When this session next needs the clock."""
        return min(self._retry_at_ms, self._watermark_at_ms, self.comparison.deadline_ms)

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────

    def link_up(self, incarnation: int, now_ms: int) -> None:
        """The follower can be reached. In a new life it counts for nothing until it has been accepted."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.lag.forget()
            self.flags = ReplicaFlag.NONE
            self.comparison.forget()
        self.open(now_ms)

    def link_down(self) -> None:
        """The follower cannot be reached, and nothing that was under way arrives."""
        self._close(Standing.DOWN, NEVER)

    def open(self, now_ms: int) -> None:
        """Begin the next session."""
        self._close(Standing.OPENING, now_ms + self._ctx.settings.retry_ms)
        self.number += 1
        log, leading = self._ctx.log, self._leading
        self._send(
            Open(
                self._ctx.key,
                leading.epoch,
                self.number,
                log.log_start,
                log.log_end,
                leading.high_watermark,
                leading.epoch_start,
                leading.unclean_epoch,
            )
        )

    def on_resync(self, now_ms: int) -> None:
        """The follower can make nothing of what it was sent: begin anew, but not again and again without a pause."""
        end = -1 if self.lag.end is None else self.lag.end
        has_moved, self._resynced_at = end != self._resynced_at, end
        if has_moved:
            self.open(now_ms)
        else:
            self._close(Standing.WAITING, now_ms + self._ctx.settings.retry_ms)

    def refused(self, why: Why, now_ms: int) -> bool:
        """The follower does not want the session now; try again in a while. Tell whether that is news."""
        is_news, self._refusal = why is not self._refusal, why
        self._close(Standing.WAITING, now_ms + self._ctx.settings.retry_ms)
        return is_news

    def _close(self, standing: Standing, retry_at_ms: int) -> None:
        self.standing = standing
        self._is_sending = False
        self._retry_at_ms = retry_at_ms
        self._ctx.wake_by(retry_at_ms)
        self._watermark_at_ms = NEVER
        self.comparison.stop()

    def _send(self, message: Open | Accept | Diverging | Reset | Rewind | Watermark) -> None:
        self._ctx.send(self.node, message, is_outgoing=True)

    def on_state(self, message: State, now_ms: int) -> bool:
        """Compare the follower's log with the own one; tell whether it is accepted."""
        if self.standing is not Standing.OPENING:
            return False
        self.has_spoken = True
        self.flags = message.flags
        ctx, epoch, number = self._ctx, self._leading.epoch, self.number
        verdict = judge(ctx.log, message)
        if not isinstance(verdict, Accepted):
            if self.lag.end is not None:
                self.lag.forget()  # It held a prefix of this log once, and does not any more.
            self._retry_at_ms = now_ms + ctx.settings.retry_ms
            if isinstance(verdict, Diverges):
                self._send(Diverging(ctx.key, epoch, number, verdict.end_epoch, verdict.end_offset))
            else:
                self._send(Reset(ctx.key, epoch, number, verdict.log_start))
            return False
        self.standing = Standing.STREAMING
        self._refusal = None
        self.next_offset = verdict.offset
        self.lag.moved(verdict.offset, ctx.log.log_end, now_ms)
        self.known_watermark = self.told_watermark = message.high_watermark
        self._send(Accept(ctx.key, epoch, number, verdict.offset))
        self._watermark_at_ms = now_ms + ctx.settings.watermark_delay_ms
        self._retry_at_ms = now_ms + ctx.settings.retry_ms
        self.comparison.begin(max(message.log_start, ctx.log.log_start), verdict.offset, epoch, number, now_ms)
        self.pump()
        return True

    # ── streaming ────────────────────────────────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Ask for the next DATA, if there is something to send and none is being sent."""
        if self._is_sending or self.standing is not Standing.STREAMING or self.next_offset >= self._ctx.log.log_end:
            return
        self._is_sending = True
        ctx = self._ctx
        ctx.out.append(
            SendData(
                ctx.token,
                self.node,
                self._leading.epoch,
                self.number,
                self.next_offset,
                ctx.settings.data_bytes_max,
            )
        )

    def on_sent(self, event: DataSent, now_ms: int) -> None:
        """A DATA frame is under way: go on where it ended."""
        if event.session != self.number or not self._is_sending:
            return
        assert event.offset == self.next_offset < event.next_offset, "data sent that nobody asked for"
        self._is_sending = False
        self.next_offset = event.next_offset
        self.told_watermark = max(self.told_watermark, event.high_watermark)
        if self.told_watermark >= self._leading.high_watermark and self._told_start >= self._ctx.log.log_start:
            self._watermark_at_ms = NEVER
        if self._retry_at_ms == NEVER:
            self._retry_at_ms = now_ms + self._ctx.settings.retry_ms
            self._ctx.wake_by(self._retry_at_ms)
        self.pump()

    def on_send_failed(self, session: int, now_ms: int) -> None:
        """The log could not be read there. Trimmed: begin anew. Damaged: after a while, when it may be repaired."""
        if session != self.number or not self._is_sending:
            return
        if self.next_offset < self._ctx.log.log_start:
            self.open(now_ms)
        else:
            self._close(Standing.WAITING, now_ms + self._ctx.settings.retry_ms)

    def watermark_moved(self, now_ms: int) -> None:
        """High watermark or log start moved: say so alone if no DATA does in time."""
        if self.standing is Standing.STREAMING and self._watermark_at_ms == NEVER:
            self._watermark_at_ms = now_ms + self._ctx.settings.watermark_delay_ms
            self._ctx.wake_by(self._watermark_at_ms)

    def on_progress(self, message: Progress, now_ms: int) -> bool:
        """The follower's own disk has more; tell whether that, or what it says about its copy, is news."""
        if self.standing is not Standing.STREAMING:
            return False
        has_spoken, self.has_spoken = self.has_spoken, True
        if message.durable_end > self.next_offset:
            # It claims what was never sent in this session: something is badly mixed up. Prove it again from the start.
            self._ctx.report(
                "a follower claims what was not sent", is_warning=True, follower=self.node, offset=message.durable_end
            )
            self.lag.forget()
            self.open(now_ms)
            return True
        end = self.lag.end
        is_news = end is None or message.durable_end > end or message.flags != self.flags or not has_spoken
        self.flags = message.flags
        self.known_watermark = max(self.known_watermark, message.high_watermark)
        if end is None or message.durable_end >= end:
            self.lag.moved(message.durable_end, self._ctx.log.log_end, now_ms)
        # What is not answered yet is still being appended, or was lost: then it is asked for again.
        self._retry_at_ms = now_ms + self._ctx.settings.retry_ms
        self._ctx.wake_by(self._retry_at_ms)
        return is_news

    @property
    def _is_answered(self) -> bool:
        """Whether the follower has confirmed all that it was told."""
        return (
            self.lag.end is not None
            and self.lag.end >= self.next_offset
            and self.known_watermark >= min(self._leading.high_watermark, self.lag.end)
        )

    def fell_behind(self, now_ms: int) -> None:
        """It is out of the ISR: it counts again when it has answered, not on what it said before."""
        self.has_spoken = False
        if self.standing is Standing.STREAMING:
            self._say_watermark(now_ms)

    def rewind(self, offset: int, now_ms: int) -> None:
        """Have the follower cut its copy back; it says STATE again."""
        self.lag.forget()
        self.comparison.forget()
        self._repairs_asked = (0, 0)
        self.standing = Standing.OPENING
        self._is_sending = False
        self._watermark_at_ms = NEVER
        self._retry_at_ms = now_ms + self._ctx.settings.retry_ms
        self._send(Rewind(self._ctx.key, self._leading.epoch, self.number, offset))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now_ms: int) -> None:
        """Say what is due, or say it again."""
        if self.comparison.deadline_ms <= now_ms and self.standing is Standing.STREAMING:
            self.comparison.tick(self.lag.end or 0, now_ms)
        if now_ms >= self._watermark_at_ms:
            self._say_watermark(now_ms)
        if now_ms < self._retry_at_ms:
            return
        if self.standing is Standing.STREAMING:
            if self._is_answered:
                self._retry_at_ms = NEVER
            else:
                self._say_watermark(now_ms)
        elif self.standing is not Standing.DOWN:
            self.open(now_ms)

    def _say_watermark(self, now_ms: int) -> None:
        ctx, leading = self._ctx, self._leading
        self._watermark_at_ms = NEVER
        self.told_watermark = leading.high_watermark
        self._told_start = ctx.log.log_start
        # The retry is for an answer that is lost, not for a follower that is slow: it is the only timer that is reset
        # by speaking.
        self._retry_at_ms = now_ms + ctx.settings.retry_ms
        self._send(
            Watermark(ctx.key, leading.epoch, self.number, leading.high_watermark, ctx.log.log_start, self.next_offset)
        )
