"""The log of one partition: appended at one end, read anywhere below the high watermark, trimmed at the other end.

Owns the offsets (`log_start` ≤ `high_watermark` ≤ `log_end`), the list of segments, the epoch map and the state of
idempotent producers, and decides what may be appended. Refuses to know sockets, requests and threads: every method is
called on the event-loop thread, except those that say they block.

The invariant: nothing is visible, and nobody is told of it, before it is durable. `append` moves `log_end` at once, so
that appends can queue; `flushed` moves `high_watermark` when the flush that covers them has returned. After a failed
write the partition is offline: it takes no more writes, and what was not acknowledged is found out again by recovery.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Protocol

from walstream.errors import (
    BatchTooLarge,
    CorruptLog,
    OffsetOutOfRange,
    PartitionOffline,
    WalstreamError,
)
from walstream.log import batch as batches
from walstream.log.batch import BatchHeader
from walstream.log.checkpoint import PartitionCheckpoint
from walstream.log.compaction import check_keys
from walstream.log.disk import Disk
from walstream.log.group_commit import Write
from walstream.log.index import Index
from walstream.log.journal import PartitionKey
from walstream.log.records import iter_records
from walstream.log.recovery import Recovered
from walstream.log.segment import OpenFiles, Segment
from walstream.log.settings import TopicSettings

RELATIVE_OFFSET_MAX = 2**31 - 1
"""Offsets a segment may span; Kafka clients and tools count them in 32 bits."""

TOPIC_FILE = "topic.id"
"""Beside a topic's partitions: a folder whose id is not the catalogue's belongs to a topic that was deleted."""

Callback = Callable[[WalstreamError | None], None]


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a batch stands, now or (for a duplicate) since the first time it came."""

    base_offset: int
    last_offset: int
    append_time_ms: int
    """-1 unless the topic stamps append time."""
    log_start: int


class Shared(Protocol):
    """What the partitions of a node share."""

    disk: Disk
    open_files: OpenFiles

    def submit(self, write: Write) -> None:
        """Queue a write for group commit."""

    def append_stamp(self, last_ms: int) -> int:
        """Return the time for a batch of a topic with append time."""

    def now_ms(self) -> int:
        """Return the wall clock."""

    def sealed(self, segment: Segment) -> None:
        """Hear that a segment takes no more batches."""

    def reported(self, partition: PartitionLog, error: WalstreamError) -> None:
        """Hear of damage or failure, to log and count it."""


class PartitionLog:
    """One partition on this node."""

    def __init__(
        self,
        topic: str,
        key: PartitionKey,
        folder: Path,
        shared: Shared,
        settings: TopicSettings,
        epoch: int,
        recovered: Recovered,
    ) -> None:
        self.topic = topic
        self.key = key
        self.index = key[1]
        self.folder = folder
        self.settings = settings
        self.leader_epoch = epoch
        self.write_error: PartitionOffline | None = None
        self.damaged: list[tuple[int, int]] = []
        self._shared = shared
        self._waiters: list[tuple[int, int, Callback]] = []
        self._waiter_count = 0
        self._listeners: dict[int, Callable[[], None]] = {}
        self._listener_count = 0
        self.adopt(recovered)

    def __repr__(self) -> str:
        return f"PartitionLog({self.name}, [{self.log_start}, {self.high_watermark}, {self.log_end}))"

    @property
    def name(self) -> str:
        """How people name it."""
        return f"{self.topic}-{self.index}"

    @property
    def size_bytes(self) -> int:
        """What the segments take on disk."""
        return sum(segment.size for segment in self.segments)

    def adopt(self, recovered: Recovered) -> None:
        """Begin, or begin again, from what recovery found. The partition takes writes from here on."""
        self.segments = recovered.segments
        self.log_start = recovered.log_start
        self.log_end = self.high_watermark = recovered.log_end
        self.epochs = recovered.epochs
        self.producers = recovered.producers
        self.cleaned_until = recovered.cleaned_until
        self.gaps_below = recovered.gaps_below
        self.tombstones_due_ms = recovered.tombstones_due_ms
        self.damaged = list(recovered.damaged)
        self.epochs.assign(self.leader_epoch, self.log_end)
        self.write_error = None
        self._last_stamp_ms = self.segments[-1].index.max_timestamp if self.settings.append_time else -1

    # ── appending ────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, batch: memoryview, *, now_ms: int) -> Appended:
        """Check a batch, give it its offsets in place and queue it for group commit.

        The buffer belongs to the log until the batch is visible. A duplicate of an idempotent producer is not
        written again: it is answered with where the original stands, which may not be durable yet, so the caller
        waits for `last_offset` either way. Raises a RequestError for the batch, PartitionOffline for the log.
        """
        if self.write_error is not None:
            raise self.write_error
        self._check_size(len(batch))
        header = batches.validate(batch)
        if self.settings.compacted:
            check_keys(batch, header)
        if header.producer_id >= 0:
            duplicate = self.producers.check(header, now_ms)
            if duplicate is not None:
                stamp_ms = duplicate.timestamp_ms if self.settings.append_time else -1
                return Appended(duplicate.base_offset, duplicate.last_offset, stamp_ms, self.log_start)
        append_time_ms = -1
        if self.settings.append_time:
            append_time_ms = self._last_stamp_ms = self._shared.append_stamp(self._last_stamp_ms)
            batches.stamp_append_time(batch, append_time_ms)
        batches.stamp(batch, self.log_end, self.leader_epoch)
        self._enqueue(batches.parse_header(batch), batch, now_ms)
        return Appended(self.log_end - header.record_count, self.log_end - 1, append_time_ms, self.log_start)

    def _enqueue(self, header: BatchHeader, batch: memoryview, now_ms: int) -> None:
        segment = self._segment_for(header, now_ms)
        position = segment.note(header)
        self.log_end = header.next_offset
        self.producers.apply(header, now_ms)
        sync = not self.settings.ack_before_fsync
        self._shared.submit(Write(self, segment, position, batch, header.next_offset, sync))

    def _check_size(self, length: int) -> None:
        limit = self.settings.batch_bytes_max
        if length > limit:
            raise BatchTooLarge(
                f"A batch of {length} bytes is more than {self.topic} takes ({limit}).",
                "Send smaller batches, or raise the topic's max.message.bytes.",
            )

    def _segment_for(self, header: BatchHeader, now_ms: int) -> Segment:
        """Return the segment the batch goes to, beginning a new one when the last is full or old."""
        segment = self.segments[-1]
        if segment.size == 0:
            segment.created_ms = now_ms
            return segment
        is_full = segment.size + header.length > self.settings.segment_bytes
        is_old = now_ms - segment.created_ms > self.settings.segment_ms and segment.created_ms > 0
        if is_full or is_old or header.last_offset - segment.base_offset > RELATIVE_OFFSET_MAX:
            segment = self.roll(now_ms)
        return segment

    def roll(self, now_ms: int) -> Segment:
        """Seal the last segment and begin a new one at the end of the log."""
        sealed = self.segments[-1]
        assert sealed.size > 0, "an empty segment is never rolled"
        sealed.sealed = True
        segment = Segment(self._shared.disk, self.folder, self.log_end, self._shared.open_files)
        segment.index = Index()
        segment.created_ms = now_ms
        self.segments = [*self.segments, segment]
        self._shared.sealed(sealed)
        return segment

    def prepare(self) -> None:
        """Make the folder, with the topic's id beside it, before the first write. Called on the flush thread."""
        disk, identity = self._shared.disk, self.folder.parent / TOPIC_FILE
        disk.make_directory(self.folder)
        if disk.read(identity) is None:
            disk.write(identity, str(self.key[0]).encode(), durable=True)

    # ── what group commit reports ────────────────────────────────────────────────────────────────────────────────

    def flushed(self, write: Write) -> None:
        """A batch is durable: it becomes visible."""
        segment = write.segment
        segment.visible_size = write.position + len(write.buffer)
        if write.is_synced:
            segment.synced_size, segment.synced_offset = segment.visible_size, write.end_offset
        self.high_watermark = write.end_offset
        while self._waiters and self._waiters[0][0] < self.high_watermark:
            heappop(self._waiters)[2](None)
        self._notify()

    def settled(self, segment: Segment, size: int, end_offset: int) -> None:
        """A segment's own file has caught up with the journal."""
        if size > segment.synced_size:
            segment.synced_size, segment.synced_offset = size, end_offset

    def failed(self, error: PartitionOffline) -> None:
        """A write failed, and with it everything queued behind it."""
        self._shared.reported(self, error)
        self.stop(error)

    def stop(self, error: PartitionOffline) -> None:
        """Take no more writes, and tell everybody who waits for one."""
        self.write_error = error
        waiters, self._waiters = sorted(self._waiters, key=lambda waiter: waiter[:2]), []
        for _, _, callback in waiters:
            callback(error)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────

    def when_visible(self, offset: int, callback: Callback) -> None:
        """Call back once `offset` is below the high watermark, or its write has failed; at once if it already is."""
        if offset < self.high_watermark:
            callback(None)
        elif self.write_error is not None:
            callback(self.write_error)
        else:
            self._waiter_count += 1
            heappush(self._waiters, (offset, self._waiter_count, callback))

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever there is more, or less, to read; return how to stop it."""
        self._listener_count += 1
        number = self._listener_count
        self._listeners[number] = callback
        return lambda: self._listeners.pop(number, None) and None

    def _notify(self) -> None:
        if self._listeners:
            for callback in tuple(self._listeners.values()):
                callback()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read_cached(self, offset: int, bytes_max: int) -> memoryview | None:
        """Return verified whole batches from `offset` on, at least one if there is any; None: the disk is needed.

        The first batch may begin before `offset`. Raises OffsetOutOfRange, or CorruptLog where the bytes are damaged.
        """
        return self._read(offset, bytes_max, cached=True)

    def read_blocking(self, offset: int, bytes_max: int) -> memoryview:
        """Read like `read_cached`, from the disk where needed. Blocks; may be called on another thread."""
        result = self._read(offset, bytes_max, cached=False)
        assert result is not None
        return result

    def _read(self, offset: int, bytes_max: int, *, cached: bool) -> memoryview | None:
        self.check_offset(offset)
        segments = self.segments  # Retention replaces the list, so a reader on another thread keeps a whole one.
        number = max(bisect_right(segments, offset, key=_base_offset) - 1, 0)
        try:
            while offset < self.high_watermark and number < len(segments):
                segment = segments[number]
                dense = segment.base_offset >= self.gaps_below
                data = segment.read(offset, bytes_max, cached=cached, dense=dense)
                if data is None or len(data):
                    return data
                number += 1  # Compaction left nothing at or after the offset in this segment.
        except CorruptLog as error:
            self._note_damage(offset, error)
            raise
        except FileNotFoundError:
            self.check_offset(offset)  # Retention has been here since.
            raise
        return memoryview(b"")

    def check_offset(self, offset: int) -> None:
        """Raise OffsetOutOfRange unless a reader may stand at `offset`."""
        if not self.log_start <= offset <= self.high_watermark:
            raise OffsetOutOfRange(
                f"{self.name} has offsets {self.log_start} to {self.high_watermark}; {offset} is outside."
            )

    def _note_damage(self, offset: int, error: CorruptLog) -> None:
        if not any(start <= offset < end for start, end in self.damaged):
            self.damaged.append((offset, offset + 1))
            self._shared.reported(self, error)

    def offset_for_time(self, timestamp_ms: int) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first visible record at or after a time. Blocks."""
        for segment in list(self.segments):
            if segment.index.max_timestamp < timestamp_ms:
                continue
            for position, header in segment.headers(
                segment.index.position_for_time(timestamp_ms), segment.visible_size
            ):
                if header.max_timestamp < timestamp_ms or header.last_offset < self.log_start:
                    continue
                data = segment.file.pread(header.length, position)
                for record in iter_records(data):
                    if record.timestamp_ms >= timestamp_ms and record.offset >= self.log_start:
                        return record.offset, record.timestamp_ms
        return None

    def max_timestamp(self) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the record with the largest timestamp. Blocks."""
        largest = max((segment.index.max_timestamp for segment in self.segments), default=-1)
        return self.offset_for_time(largest) if largest >= 0 else None

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """Return the largest epoch not above `epoch` and where it ends, for clients that check for truncation."""
        return self.epochs.end_offset_for(epoch, self.high_watermark)

    # ── trimming ─────────────────────────────────────────────────────────────────────────────────────────────────

    def advance_start(self, offset: int) -> list[Segment]:
        """Move the start of the log up, and return the segments that lie wholly below it.

        The caller makes the new start durable before it removes their files.
        """
        if offset > self.high_watermark:
            raise OffsetOutOfRange(f"{self.name} ends at {self.high_watermark}; it cannot start at {offset}.")
        if offset <= self.log_start:
            return []
        self.log_start = offset
        self.epochs.trim(offset)
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
        self.segments = sorted([*kept, *new], key=_base_offset)

    # ── what the checkpoint keeps ────────────────────────────────────────────────────────────────────────────────

    def checkpoint(self) -> PartitionCheckpoint:
        """Return the state just below the last synced position."""
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
            tombstones_due_ms=self.tombstones_due_ms,
        )

    def _last_synced(self) -> Segment:
        """Return the newest segment before which everything is synced."""
        for segment in self.segments:
            if segment.synced_size < segment.size:
                return segment
        return self.segments[-1]


def _base_offset(segment: Segment) -> int:
    return segment.base_offset
