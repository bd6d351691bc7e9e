"""Which ranges of a follower's log are compared with the leader's, and when: equality proved, not assumed.

Epochs prove that two logs are equal as long as nobody's disk or code is wrong; digests find out when one is. After
ACCEPT the most recent range is compared first, and a follower does not join the ISR before; older ranges follow one
by one, and new ones as they fill up, with a pause between two so that a large log is proved at little cost.

A difference may be the leader's own fault: a bit that has rotted in a header. So it first reads its own range, every
byte checked; only a leader that is sure of itself calls the follower's copy unfit. Otherwise it would have the only
good copy of a record cut off. Older ranges are then compared without a pause until one is equal: that
is where the follower's copy is cut, once it is in no ISR. If none is, it starts over. Ranges that were compacted, or
are damaged, on either side cannot be compared and are passed over: `valid_from` says from where on it can be. Sans-IO.
"""

from __future__ import annotations

from walstream.cluster.metadata import NodeId
from walstream.replication.context import NEVER, Context
from walstream.replication.effects import ComputeDigest
from walstream.replication.events import Digest
from walstream.replication.messages import DigestAnswer, DigestRequest


class Comparison:
    """The proof for one follower. One range is compared at a time."""

    __slots__ = (
        "_asked",
        "_ctx",
        "_differs_from",
        "_epoch",
        "_is_computing",
        "_is_doubting",
        "_own",
        "_request",
        "_session",
        "_start_min",
        "_theirs",
        "deadline_ms",
        "differs",
        "is_proven",
        "node",
        "proven",
        "rewind_to",
    )

    def __init__(self, ctx: Context, node: NodeId) -> None:
        self._ctx = ctx
        self.node = node
        self.proven: tuple[int, int] | None = None
        """The range found equal in the follower's present life."""
        self.is_proven = False
        """Whether the recent range was found equal, or cannot be compared, in this session."""
        self.differs = False
        self.rewind_to: int | None = None
        """After a difference: from where on the follower has to copy anew."""
        self.deadline_ms = NEVER
        self._request = 0
        self._is_computing = False
        self._start_min = 0
        self._epoch = self._session = 0
        self._differs_from = 0
        self._clear()

    def _clear(self) -> None:
        self._asked: tuple[int, int] | None = None
        self._is_doubting = False
        """The digests differ, and the leader is reading its own copy again."""
        self._own: Digest | None = None
        self._theirs: Digest | None = None

    def forget(self) -> None:
        """The follower's copy is another one now: nothing is proven of it."""
        self.proven = None
        self.differs = False
        self.rewind_to = None
        self.stop()

    def stop(self) -> None:
        """The session has ended; what was found out stays."""
        self.deadline_ms = NEVER
        self.is_proven = False
        self._clear()

    def begin(self, start: int, end: int, epoch: int, session: int, now_ms: int) -> None:
        """A session begins with a follower that holds [start, end) of this log, as its epochs say."""
        self._start_min, self._epoch, self._session = start, epoch, session
        end = min(end, self._ctx.log.durable_end)
        if self.proven is not None and (self.proven[1] > end or self.proven[0] > end):
            self.proven = None
        records = self._ctx.settings.digest_records
        if records == 0 or start >= end:
            self.is_proven = not self.differs
            self.deadline_ms = NEVER if records == 0 else now_ms + self._ctx.settings.digest_pause_ms
            return
        if self.differs:
            self._ask_older(now_ms)
        elif self.proven is not None and self.proven[1] == end:
            self.is_proven = True
            self.deadline_ms = now_ms + self._ctx.settings.digest_pause_ms
        else:
            self._ask(max(start, end - records), end, now_ms)

    def _ask(self, start: int, end: int, now_ms: int) -> None:
        """Compare a range: ask the follower, and compute the own digest meanwhile."""
        self._request = (self._request + 1) & 0xFFFF  # Half of the 32 bits that a request's number has on the wire.
        self._clear()
        self._asked = (start, end)
        self.deadline_ms = now_ms + self._ctx.settings.retry_ms
        ctx = self._ctx
        if not self._is_computing:
            self._compute()
        ctx.send(
            self.node,
            DigestRequest(ctx.key, self._epoch, self._session, self._request_id, start, end),
            is_outgoing=True,
        )

    def _compute(self, *, is_verified: bool = False) -> None:
        assert self._asked is not None
        self._is_computing = True
        ctx = self._ctx
        ctx.out.append(ComputeDigest(ctx.token, self._request_id, *self._asked, is_verified))

    @property
    def _request_id(self) -> int:
        """A number that no other follower's comparison uses: completions carry it alone."""
        return self._request << 16 | self.node & 0xFFFF

    def tick(self, follower_end: int, now_ms: int) -> None:
        """Go on: repeat what was not answered, or take the next range."""
        if now_ms < self.deadline_ms:
            return
        if self._asked is not None:
            if self._is_computing:  # The own disk is slow: asking others again does not help.
                self.deadline_ms = now_ms + self._ctx.settings.retry_ms
            else:
                self._ask(*self._asked, now_ms)
            return
        if self.differs:
            self._ask_older(now_ms)
            return
        end = min(follower_end, self._ctx.log.durable_end)
        records = self._ctx.settings.digest_records
        low, high = self.proven or (end, end)
        self._start_min = max(self._start_min, self._ctx.log.log_start)
        if end - high >= records or (self.proven is None and end > self._start_min):
            until = end if self.proven is None else high + records
            self._ask(max(self._start_min, until - records), until, now_ms)
        elif low > self._start_min:
            self._ask(max(self._start_min, low - records), low, now_ms)
        else:
            self.deadline_ms = now_ms + 10 * self._ctx.settings.digest_pause_ms

    def on_computed(self, request: int, digest: Digest, now_ms: int) -> None:
        """The own digest is there."""
        if request & 0xFFFF != self.node & 0xFFFF:
            return
        self._is_computing = False
        if self._asked is None:
            return
        if request != self._request_id:
            self._compute()  # It was for a range that nobody asks for any more.
        else:
            self._own = digest
            self._compare(now_ms)

    def on_answer(self, message: DigestAnswer, now_ms: int) -> None:
        """The follower's digest is there."""
        if self._asked is not None and message.request == self._request_id:
            self._theirs = Digest(message.valid_from, message.value)
            self._compare(now_ms)

    def _compare(self, now_ms: int) -> None:
        if self._asked is None or self._own is None or self._theirs is None:
            return
        (start, end), own, theirs = self._asked, self._own, self._theirs
        valid_from = max(own.valid_from, theirs.valid_from)
        if start < valid_from < end:
            self._start_min = max(self._start_min, valid_from)
            self._ask(valid_from, end, now_ms)
            return
        if own.value != theirs.value and valid_from < end and not self._is_doubting:
            self._is_doubting = True
            self._own = None
            self._compute(is_verified=True)
            return
        self._clear()
        if valid_from >= end:
            self._passed(end, end, now_ms)
            self._start_min = max(self._start_min, end)
        elif own.value == theirs.value:
            self._passed(start, end, now_ms)
        else:
            self._failed(start, end, now_ms)

    def _passed(self, start: int, end: int, now_ms: int) -> None:
        """The range is equal, or (empty) cannot be compared at all."""
        if self.differs:
            # What cannot be compared is not trusted either, once a copy has been found wrong.
            self.rewind_to = end if start < end else self._ctx.log.log_start
            self.deadline_ms = NEVER
            return
        low, high = self.proven or (start, end)
        self.proven = (min(low, start), max(high, end))
        self.is_proven = True
        self.deadline_ms = now_ms + self._ctx.settings.digest_pause_ms

    def _failed(self, start: int, end: int, now_ms: int) -> None:
        if not self.differs:
            self._ctx.report(
                "a follower's copy differs", is_warning=True, follower=self.node, start=start, end=end
            )  # fmt: skip
        self.differs, self.is_proven = True, False
        self._differs_from = start
        self.proven = None
        self._ask_older(now_ms)

    def _ask_older(self, now_ms: int) -> None:
        """Look for an equal range before the one that differs."""
        end = self._differs_from
        self._start_min = max(self._start_min, self._ctx.log.log_start)
        if end <= self._start_min:
            self.rewind_to = self._ctx.log.log_start
            self.deadline_ms = NEVER
        else:
            self._ask(max(self._start_min, end - self._ctx.settings.digest_records), end, now_ms)
