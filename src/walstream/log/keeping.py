"""What a partition's log keeps, and how it lets go of it: from its start, from its end, and in between.

Owns the list of segments, the epoch map, the producers and what of all this a checkpoint says. Segments are only ever
replaced in a new list, so that a reader on another thread keeps a whole one. Called on the event-loop thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from walstream.errors import NotLeader, OffsetOutOfRange, PartitionOffline
from walstream.log.batch import BatchHeader
from walstream.log.checkpoint import PartitionCheckpoint
from walstream.log.epochs import EpochMap
from walstream.log.journal import PartitionKey
from walstream.log.producers import ProducerStates
from walstream.log.reading import ReadableLog, base_offset
from walstream.log.recovery import Recovered
from walstream.log.repair import without
from walstream.log.segment import Segment
from walstream.log.settings import TopicSettings
from walstream.log.stamps import Stamps
from walstream.log.surroundings import Done, Shared
from walstream.log.truncation import Cut


class KeptLog(ReadableLog):
    """One partition, as those see it who look after its files."""

    producers: ProducerStates
    cleaned_until: int
    """Compaction has seen everything below."""
    takes_gaps: bool
    """Whether a leader may have sent gaps above `gaps_below` that no checkpoint knows of, although the topic is not
    compacted any more."""
    replicated: bool
    """Whether the node is one of several: then others decide on roles and on the high watermark."""
    is_leader: bool
    leader_epoch: int
    """The newest epoch that this node leads in, or has heard of."""
    led_epoch: int
    """In a cluster: the newest epoch in which this node led and stamped append times; -1 if it never did."""
    is_unclean: bool
    """Whether something that was durable is lost: found by recovery, or said by the node. Kept in the checkpoint until
    whoever replicates the log sets it back."""
    cut: Cut | None
    """A cut that recovery has finished and that is still announced."""

    def __init__(self, topic: str, key: PartitionKey, folder: Path, shared: Shared, settings: TopicSettings) -> None:
        super().__init__(topic, key[1], shared)
        self.key = key
        self.folder = folder
        self.settings = settings
        self.is_held = False
        """Whether the log is being truncated, reset or reopened, and takes nothing meanwhile."""
        self.is_reopening = False
        """Whether recovery works on the files after a full disk."""
        self.is_beginning_anew = False
        """Whether a reset is under way: whatever is wrong with the files, they are about to go."""
        self.is_discarded = False
        """Whether the topic was deleted. The folder is in the trash, or will be behind all queued writes."""
        self._are_gaps_noted = False
        """Whether a saved checkpoint says `takes_gaps`."""
        self._stamps = Stamps(shared.append_clock)
        self._after_release: list[Callable[[], None]] = []

    def adopt(self, recovered: Recovered) -> None:
        """Begin, or begin again, from what recovery found. The partition takes writes from here on."""
        self._use(recovered.segments)
        self.segments[-1].created_ms = self._shared.monotonic_ms()
        self.log_start = recovered.log_start
        self.log_end = self.durable_end = recovered.log_end
        self.high_watermark = self.log_end
        self.high_watermark_epoch = recovered.high_watermark_epoch
        if self.replicated:
            self.high_watermark = max(min(recovered.high_watermark, self.log_end), self.log_start)
        self.is_unclean = recovered.is_unclean
        self.cut = recovered.cut
        self.failure = recovered.failure
        self._saved = recovered.saved
        self.epochs = recovered.epochs
        self.producers = recovered.producers
        self.cleaned_until = recovered.cleaned_until
        self.gaps_below = recovered.gaps_below
        self.takes_gaps = recovered.takes_gaps
        self.tombstones_due_ms = recovered.tombstones_due_ms
        self._mend(lambda _: list(recovered.damaged))
        if not self.replicated:
            self.epochs.assign(self.leader_epoch, self.log_end)
        failure = recovered.failure
        self.write_error = None if failure is None else PartitionOffline(failure.message, failure.hint)
        self._in_flight.clear()
        self._stamps.begin(self.log_end)
        if self.settings.append_time:
            self._stamps.found(recovered.newest_ms, self._shared.now_ms())

    def _use(self, segments: list[Segment]) -> None:
        """Continue with other segments, and close those that have lost their place."""
        kept = {id(segment) for segment in segments}
        gone = [segment for segment in self.segments if id(segment) not in kept]
        self.segments = segments
        for segment in gone:
            segment.close()

    def configure(self, settings: TopicSettings) -> None:
        """Have other settings from now on."""
        if settings.append_time and not self.settings.append_time:
            self._stamps.begin(self.log_end)  # What is queued has its producers' times.
        if self.replicated and self.settings.compacted:
            self.takes_gaps = True
        self.settings = settings

    # ── cutting, in the steps of `truncation` ────────────────────────────────────────────────────────────────────

    def hold(self, to: int, *, is_reset: bool) -> None:
        """Take nothing more until `release`, and let nobody see or wait for what is to be cut off."""
        assert not self.is_leader, "a leader never cuts its log"
        assert not self.is_held, "one cut at a time"
        self.is_held = True
        self.is_beginning_anew = is_reset
        self.truncations += 1
        self._in_flight.clear()
        first = self.log_start if is_reset else to
        self.log_end = first
        self.durable_end = min(self.durable_end, first)
        self.high_watermark = min(self.high_watermark, first)
        gone = NotLeader(f"{self.name} was cut back to offset {to}: what was written after it is not there any more.")
        self._durable_waiters.fail(gone, first)
        self._visible_waiters.fail(gone, first)
        self._notify()

    def cut_back(self, end: int, last: Segment, producers: ProducerStates, *, is_reset: bool) -> None:
        """Become what the files are now: everything below `end`, and `last` the segment to be written to."""
        kept = [] if is_reset else [segment for segment in self.segments if segment.base_offset < last.base_offset]
        for segment in kept:
            segment.durable_size = segment.synced_size = segment.size
        self._use([*kept, last])
        self.producers = producers
        self.log_end = self.durable_end = end
        self.high_watermark = min(self.high_watermark, end)
        # What is appended from here on has no gaps, and compaction has not read it.
        self.cleaned_until = min(self.cleaned_until, end)
        self.gaps_below = min(self.gaps_below, end)
        self.epochs.truncate(end)
        self._mend(lambda damaged: [(a, min(b, end)) for a, b in damaged if a < end and not is_reset])
        if is_reset:
            self.log_start = self.high_watermark = end
            self.epochs = EpochMap()
            self.cleaned_until = self.gaps_below = 0
            self.tombstones_due_ms = None
            self.failure = self._saved = self.write_error = None
            self.is_beginning_anew = False
        self._durable_waiters.wake(end)
        self._notify()

    def release(self, done: Done, error: Exception | None) -> None:
        """Take appends again, after a cut, and tell whoever asked for it; then those who came after."""
        self.is_held = False
        done(error)
        waiting, self._after_release = self._after_release, []
        for then in waiting:
            self.after_release(then)

    def after_release(self, then: Callable[[], None]) -> None:
        """Call back when the log is not being cut, in the order of the calls; at once if it is not now."""
        if self.is_held:
            self._after_release.append(then)
        else:
            then()

    def repaired(self, headers: Sequence[BatchHeader], start: int, end: int) -> None:
        """The damaged batches of [start, end) stand in their place again: know of them what their headers say."""
        now_ms = self._shared.monotonic_ms()
        for header in headers:
            self.epochs.found_at(header.leader_epoch, header.base_offset)
            self.producers.apply(header, now_ms)
            if header.uses_append_time:
                self._stamps.seen(header.max_timestamp)
        self._mend(lambda damaged: [(a, b) for a, b in without(damaged, start, end) if b > self.log_start])
        self._notify()

    # ── trimming ─────────────────────────────────────────────────────────────────────────────────────────────────

    def advance_start(self, offset: int) -> list[Segment]:
        """Move the start of the log up, and return the segments that lie wholly below it.

        The caller makes the new start durable before it removes their files.
        """
        self.check_opened()
        if offset > self.high_watermark:
            raise OffsetOutOfRange(f"{self.name} ends at {self.high_watermark}; it cannot start at {offset}.")
        offset = max(offset, self.log_start)
        is_needless = len(self.segments) < 2 or self.segments[1].base_offset > offset
        if offset == self.log_start and is_needless:
            return []  # Otherwise compaction has put a segment in the place of dropped ones.
        self.log_start = offset
        self.epochs.trim(offset)
        self._mend(lambda damaged: [(start, end) for start, end in damaged if end > offset])
        keep = 0
        while keep + 1 < len(self.segments) and self.segments[keep + 1].base_offset <= offset:
            keep += 1
        dropped = self.segments[:keep]
        self.replace(dropped, [])
        self._notify()
        return dropped

    def replace(self, old: Sequence[Segment], new: Sequence[Segment]) -> None:
        """Put segments in the place of others, as retention and compaction do."""
        gone = {id(segment) for segment in old}
        kept = [segment for segment in self.segments if id(segment) not in gone]
        self.segments = sorted([*kept, *new], key=base_offset)

    def distrust_files(self) -> None:
        """Take nothing for synced any more: recovery, which opened the files anew, has failed, perhaps at a sync.

        The kernel tells of that once. Settling would be told that all is well, and drop the journal.
        """
        for segment in self.segments:
            segment.distrust()

    # ── what the checkpoint keeps ────────────────────────────────────────────────────────────────────────────────

    def checkpoint(self) -> PartitionCheckpoint:
        """Return the state just below the last synced position."""
        if self._saved is not None:
            # Nothing is known of the files but what was known before: saying that they are empty would lose them. And a
            # round of compaction may have been finished before the failure: then the segments below are others.
            saved = self._saved
            return msgspec.structs.replace(
                saved, leader_epoch=self.leader_epoch, led_epoch=self.led_epoch, is_unclean=self.is_unclean,
                segments=[(base, size) for base, size in saved.segments if base >= saved.gaps_below],
            )  # fmt: skip
        segment = self._last_synced()
        offset = segment.synced_offset
        return PartitionCheckpoint(
            log_start=self.log_start,
            segment=segment.base_offset,
            position=segment.synced_size,
            offset=offset,
            epochs=[(epoch, start) for epoch, start in self.epochs.to_list()],
            producers=self.producers.snapshot(below=offset),
            cleaned_until=self.cleaned_until,
            gaps_below=self.gaps_below,
            takes_gaps=self.takes_gaps or (self.replicated and self.settings.compacted),
            tombstones_due_ms=self.tombstones_due_ms,
            leader_epoch=self.leader_epoch,
            led_epoch=self.led_epoch,
            durable_end=self.durable_end,
            high_watermark=self.high_watermark,
            high_watermark_epoch=self.high_watermark_epoch,
            is_unclean=self.is_unclean,
            damaged=list(self.damaged),
            segments=[(one.base_offset, one.size) for one in self.segments if one.base_offset < segment.base_offset],
        )

    def _last_synced(self) -> Segment:
        """Return the newest segment before which everything is synced."""
        for segment in self.segments:
            if segment.synced_size < segment.size:
                return segment
        return self.segments[-1]
