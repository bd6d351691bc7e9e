"""The append times of one partition: which may come next, which wait to become visible, which are over for good.

A *resolved position* is an offset and a time: every record at or after the offset, now and for ever, has a later append
time. So whoever has read up to the offset has read everything up to the time, and partitions can be merged by time.

Owns the partition's last stamp, what was promised as resolved, and the stamps of the batches above the high watermark.
The invariants: stamps never go back, and none is at or below a promise. With batches above the high watermark the time
before the first of them is resolved; without any, the present is, and that is a promise that later stamps keep.
Whether the log's end is known here, and who leads, is the business of `partition_log`. Sans-IO.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from walstream.errors import PartitionOffline
from walstream.log.append_clock import AppendClock, Covered

TAKEOVER_MS: Final = 3_000
"""How far above its clock and its log's last stamp a new leader begins. Its predecessor may have promised resolved
positions up to its own clock, and nobody but the two clocks says how far that was: until the cluster's metadata keep
such floors, nodes must agree on the time by less than this."""

PENDING_MAX: Final = 4_096
"""Stamps above the high watermark that are known apart, one for each millisecond. A leader whose followers are gone may
take writes with acks=1 for days; beyond this many, later batches count with the last one."""

STRANGE_MS: Final = 10 * 60 * 1000
"""A time in the log so far ahead of the clock is no stamp but a producer's, from before the topic had append time: it
must not carry the node's clock away. What this node stamped itself lies below its floor anyway."""


class Stamps:
    """The append times of one partition."""

    __slots__ = ("_clock", "_known_from", "_last_ms", "_least_ms", "_pending", "_promised_ms", "_visible_ms")

    def __init__(self, clock: AppendClock) -> None:
        self._clock = clock
        self._last_ms = -1
        """The latest that is, or was, in the log."""
        self._visible_ms = -1
        """The latest that this node gave and that is below the high watermark."""
        self._promised_ms = -1
        self._least_ms = 0
        """No later stamp is below."""
        self._pending: deque[tuple[int, int]] = deque()
        """(end offset, stamp) of what is above the high watermark; batches in a row with one stamp count as one."""
        self._known_from = 0
        """Of batches below it that are above the high watermark, the stamps are not known."""

    def begin(self, log_end: int) -> None:
        """Stamp from `log_end` on: after recovery, as a new leader, or because the topic has append time from now."""
        self._pending.clear()
        self._known_from = log_end

    def found(self, last_ms: int, now_ms: int) -> None:
        """Recovery found this to be the latest time in the log."""
        if 0 <= last_ms <= now_ms + STRANGE_MS:
            self.seen(last_ms)
            self._clock.cover(now_ms, self._least_ms, lambda _: None)  # Or else by the first stamp.

    def seen(self, stamp_ms: int) -> None:
        """A batch that another leader stamped is in the log."""
        if stamp_ms > self._last_ms:
            self._last_ms = stamp_ms
            self._least_ms = max(self._least_ms, stamp_ms)

    def take_over(self, now_ms: int, done: Covered, *, is_kept: bool) -> None:
        """Begin above everything that the leader before could have stamped or promised; `done` then.

        `is_kept`: also after a restart of this node, unless the disk refuses that.
        """
        least_ms = max(self._least_ms, max(self._last_ms, now_ms) + TAKEOVER_MS)

        def covered(error: PartitionOffline | None) -> None:
            if error is None:
                self._least_ms = max(self._least_ms, least_ms)
            done(error)

        if is_kept:
            self._clock.cover(now_ms, least_ms, covered)
        else:
            covered(None)

    def stamp(self, now_ms: int, end: int) -> int:
        """Return the time for a batch that is appended now and ends below offset `end`."""
        stamp_ms = self._clock.stamp(now_ms, self._least_ms)
        self._last_ms = self._least_ms = stamp_ms
        pending = self._pending
        if not pending or (stamp_ms != pending[-1][1] and len(pending) < PENDING_MAX):
            pending.append((end, stamp_ms))
        else:
            pending[-1] = (end, pending[-1][1])
        return stamp_ms

    def became_visible(self, high_watermark: int) -> None:
        """Forget what waits no longer."""
        pending = self._pending
        while pending and pending[0][0] <= high_watermark:
            self._visible_ms = pending.popleft()[1]

    @property
    def visible_ms(self) -> int:
        """The latest time that this node gave to a visible batch; -1: none."""
        return self._visible_ms

    def resolve(self, now_ms: int, high_watermark: int, *, is_alone: bool, is_newest: bool = False) -> int | None:
        """Return the time that is over for all records from the high watermark on; None while that is not known.

        On a node that is alone all partitions go by one clock, so the present is the latest time given to any of them:
        after a restart or a step of the clock, an idle partition holds up no busy one. In a cluster it is the wall
        clock, or a stamp that every possible successor has in its log: above that it may begin, see `TAKEOVER_MS`.

        `is_newest`: who asks knows of no later record elsewhere. Then nobody waits for more than holds anyway, and
        more is promised only if the clock is ahead of the stamps. A promise with every record of a busy partition
        would otherwise push its stamps a millisecond on each time, and with a thousand a second away from the clock.
        """
        self.became_visible(high_watermark)
        if high_watermark < self._known_from:
            return None
        present_ms = max(now_ms, self._visible_ms, self._promised_ms)
        if is_alone:
            present_ms = max(present_ms, self._clock.high_ms)
        if self._pending:
            return min(self._pending[0][1] - 1, present_ms)
        if is_newest and self._visible_ms >= now_ms:
            return max(self._visible_ms - 1, self._promised_ms)
        self._promised_ms = resolved_ms = self._clock.resolve(now_ms, present_ms)
        self._least_ms = max(self._least_ms, resolved_ms + 1)
        return resolved_ms
