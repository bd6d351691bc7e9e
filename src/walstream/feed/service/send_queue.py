"""What waits to be sent to one subscriber, in order: entries, heartbeats, and an error at the end.

A pure state machine: time enters as an argument, nothing waits here. It owns the bounds of the queue, which entries
become one batch, credits, and since when the subscriber stands in the way.

- At most so many entries and bytes wait. What does not fit is refused, and whoever offered it keeps it; only an entry
  that is larger than the whole queue waits in it, alone.
- What waits is merged into one batch up to the limits of a batch. Entries from the live end of the log are merged when
  they came within the coalescing time: they only ever wait together while something else is being sent, because an
  idle subscriber's queue is emptied at once.
- With credits, no more entries are handed out than may be ahead of the last acknowledgement. Those at or below it, read
  once more, are not ahead of it: they take no credit, and no memory.
- The subscriber is too slow when for the whole timeout nothing could be put into the full queue, or nothing be taken
  out for want of credit. Whoever takes something, however little, starts the clock again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from walstream.errors import WalstreamError
from walstream.feed.service.batching import Limits, Slice


class Bounds(NamedTuple):
    """What one subscriber may have waiting."""

    entries_max: int
    bytes_max: int
    coalesce_s: float
    timeout_s: float
    """How long nothing may move."""
    credit: int = 0
    """How many entries may be ahead of the last acknowledgement; 0: any number."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries to be sent together."""

    slices: list[Slice]
    count: int
    size_bytes: int


class Message(NamedTuple):
    """Something else to be sent, encoded."""

    data: bytes
    kind: Literal["heartbeat", "watermark"]
    resolved: int = 0
    """Up to where it says that everything was sent."""


class _Waiting(NamedTuple):
    slice: Slice
    since: float | None
    """When it came from the live end; None: from further back, where nobody waits for single entries."""


class SendQueue:
    """The queue of one subscriber."""

    def __init__(self, bounds: Bounds, limits: Limits) -> None:
        self._bounds = bounds
        self._limits = limits
        self._waiting: deque[_Waiting | Message | WalstreamError] = deque()
        self._unacked: deque[Sequence[int]] = deque()
        self._unacked_entries = 0
        self._acked = 0
        self._full_since: float | None = None
        self._starved_since: float | None = None
        self.entries = 0
        """How many wait."""
        self.size_bytes = 0

    def offer(self, part: Slice, now: float, *, is_live: bool) -> bool:
        """Put entries at the end; say whether there was room."""
        bounds = self._bounds
        is_full = self.entries + part.count > bounds.entries_max or self.size_bytes + len(part.body) > bounds.bytes_max
        if is_full and self.entries:
            if self._full_since is None:
                self._full_since = now
            return False
        self._full_since = None
        self._waiting.append(_Waiting(part, now if is_live else None))
        self.entries += part.count
        self.size_bytes += len(part.body)
        return True

    def tell(self, message: Message) -> None:
        """Put a message at the end; it takes the place of one of its kind that nothing has followed yet."""
        if self._waiting:
            last = self._waiting[-1]
            if isinstance(last, Message) and last.kind == message.kind:
                self._waiting.pop()
        self._waiting.append(message)

    def end(self, error: WalstreamError) -> None:
        """Put the end of the stream behind everything that waits."""
        self._waiting.append(error)

    def take(self, now: float) -> Batch | Message | WalstreamError | None:
        """Return what is to be sent next; None when nothing waits, or the credit is used up."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        if not isinstance(first, _Waiting):
            return self._waiting.popleft()  # type: ignore[return-value]
        room = min(self._limits.entries_max, self.credit)
        if room <= 0:
            if self._starved_since is None:
                self._starved_since = now
            return None
        self._starved_since = None
        return self._take_batch(first, room)

    def _take_batch(self, first: _Waiting, room: int) -> Batch:
        taken: list[Slice] = []
        size = count = 0
        while self._waiting and count < room:
            following = self._waiting[0]
            if not isinstance(following, _Waiting) or not self._belongs(following, first):
                break
            part = following.slice
            if taken and (size + len(part.body) > self._limits.bytes_max or count + part.count > room):
                break
            self._waiting.popleft()
            if part.count > room:
                part, rest = part.split(room)
                self._waiting.appendleft(_Waiting(rest, following.since))
            taken.append(part)
            count += part.count
            size += len(part.body)
        self.entries -= count
        self.size_bytes -= size
        if self._bounds.credit:
            self._unacked.extend(part.lsns for part in taken)
            self._unacked_entries += count
            self._release()
        return Batch(taken, count, size)

    def _belongs(self, following: _Waiting, first: _Waiting) -> bool:
        if following.since is None or first.since is None:
            return following.since is first.since
        return following is first or following.since - first.since <= self._bounds.coalesce_s

    @property
    def credit(self) -> int:
        """How many entries may still be taken."""
        credit = self._bounds.credit
        return max(0, credit - self._unacked_entries) if credit else self._limits.entries_max

    def acknowledge(self, lsn: int) -> None:
        """Hear that everything up to here is processed."""
        self._acked = max(self._acked, lsn)
        self._release()

    def _release(self) -> None:
        while self._unacked and self._unacked[0][0] <= self._acked:
            lsns = self._unacked.popleft()
            done = bisect_right(lsns, self._acked)
            self._unacked_entries -= done
            if done < len(lsns):
                self._unacked.appendleft(lsns[done:])

    def clear(self) -> None:
        """Drop everything that waits."""
        self._waiting.clear()
        self.entries = self.size_bytes = 0
        self._full_since = self._starved_since = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def deadline(self) -> float | None:
        """Return when the subscriber is too slow unless something moves; None: nothing stands still."""
        since = [moment for moment in (self._full_since, self._starved_since) if moment is not None]
        return min(since) + self._bounds.timeout_s if since else None

    def moved(self) -> None:
        """Hear that something was taken by the subscriber: a full queue has room again."""
        self._full_since = None
