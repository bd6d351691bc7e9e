"""The cleaner: rounds of key compaction over the sealed segments of one partition.

`compaction` decides what stays of a batch; this module decides when a round is due, reads the segments, writes their
successors and puts them in place. A round never rewrites

- the last segment, or a segment that a checkpoint on disk still points into: recovery never starts in the middle of a
  file that has been rewritten;
- a segment that ends above the high watermark: a record that may yet be truncated must not replace a committed one;
- any segment from the first one on that is held (see `retention`), or that is damaged: a missing end, or file, would
  pass as a gap, and a peer's batches would not fit in any more. A round that meets damage notes it, and is undone.

The steps of a round, so that a crash between any two of them is finished or undone:

1. `execute` writes the successors as `<base>-<end>.clean` and syncs them; recovery removes such files;
2. the caller saves a checkpoint with `gaps_below` raised: from here on a missing offset below it is not damage;
3. `decide` renames them to `.swap`; from here on recovery would put them in place (`recovery.finish_swaps`);
4. `install` lets readers see them; 5. `finish` removes what they replace and gives them their names.

Up to `install` a round that fails is undone, after it the round is finished. `undo` and `finish` may fail, too: each
continues where the last attempt stopped. Until one of them has succeeded, the caller starts no other round on the
partition, does not truncate it, and removes none of its installed segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from walstream.errors import CorruptLog
from walstream.log import scrub
from walstream.log.batch import BatchHeader, Buffer, parse_header
from walstream.log.compaction import CleanStats, OffsetMap, clean
from walstream.log.disk import Disk
from walstream.log.index import Index
from walstream.log.partition_log import PartitionLog
from walstream.log.retention import held_from
from walstream.log.segment import OpenFiles, Segment
from walstream.log.settings import NO_HOLD

WRITE_BYTES = 1024 * 1024

CLEAN = ".clean"
SWAP = ".swap"


@dataclass(slots=True)
class Round:
    """One round: what it works on and, once done, what it made."""

    partition: PartitionLog
    segments: list[Segment]
    ends: dict[int, int]
    """Where the offsets of each segment end, by base offset."""
    dense_from: int
    """In segments from there on a missing offset is damage."""
    cleaned_until: int
    log_end: int
    now_ms: int
    last_batches: dict[int, int]
    """By producer the base offset of its last committed batch: its header stays, or its retry would look new."""
    made: list[tuple[list[Segment], Segment]] = field(default_factory=list)
    """(the segments replaced, their successor), from the start of the log upwards."""
    reached: int = 0
    is_given_up: bool = False
    """Set from outside: the node stops, or the topic is deleted."""
    is_installed: bool = False
    """Whether readers see the successors: such a round is finished, any other one is undone."""
    stats: CleanStats = field(default_factory=CleanStats)

    def keeps_header(self, header: BatchHeader) -> bool:
        """Tell whether a batch without records is the last one of a producer that is still remembered."""
        last = self.last_batches.get(header.producer_id)
        return last is not None and header.base_offset >= last


class _Successor:
    """A segment that is being written in the place of others. Its own file is opened by the first reader."""

    def __init__(self, disk: Disk, segment: Segment) -> None:
        self._segment = segment
        self._segment.index = Index()
        self._segment.path = segment.path.with_name(f"{segment.base_offset:020d}{CLEAN}")
        self._file = disk.open(segment.path, create=True)
        self._file.truncate(0)
        segment.has_file = True
        self._chunk: list[Buffer] = []
        self._chunk_bytes = self._position = 0
        self.replaced: list[Segment] = []

    @property
    def size(self) -> int:
        """What has been put into it."""
        return self._segment.size

    def add(self, batch: Buffer) -> None:
        """Append a batch."""
        self._segment.note(parse_header(batch))
        self._chunk.append(batch)
        self._chunk_bytes += len(batch)
        if self._chunk_bytes >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        self._position += self._file.pwritev(self._chunk, self._position)
        self._chunk, self._chunk_bytes = [], 0

    def seal(self, work: Round) -> tuple[list[Segment], Segment]:
        """Sync it under a name that tells what it replaces, and return both."""
        self._write()
        self._file.sync()
        segment, first = self._segment, self.replaced[0]
        segment.durable_size = segment.synced_size = segment.size
        segment.created_ms, segment.sealed, segment.is_named = first.created_ms, True, True
        end = work.ends[self.replaced[-1].base_offset]
        segment.rename(segment.path.with_name(f"{segment.base_offset:020d}-{end:020d}{CLEAN}"))
        return self.replaced, segment


class Cleaner:
    """Compacts the partitions of a node, one round at a time."""

    def __init__(self, disk: Disk, open_files: OpenFiles, keys_max: int) -> None:
        self._disk = disk
        self._open_files = open_files
        self._keys_max = keys_max

    def plan(self, partition: PartitionLog, saved_segment: int, now_ms: int) -> Round | None:
        """Return the round that is due for a partition, if one is. `saved_segment` is where its checkpoint stands."""
        settings = partition.settings
        if not settings.compacted:
            return None
        segments = [
            segment
            for segment, following in pairwise(partition.segments)
            if segment.base_offset < saved_segment
            and segment.synced_size == segment.size
            and following.base_offset <= partition.high_watermark
            and not any(start < following.base_offset for start, _ in partition.damaged)
        ]
        if settings.hold_from_ms != NO_HOLD and not all(segment.is_index_loaded for segment in segments):
            return None  # Until retention has loaded them, beside the loop.
        del segments[held_from(segments, settings, len(segments)) :]
        total = sum(segment.size for segment in segments)
        dirty = sum(
            segment.size
            for segment, following in zip(segments, partition.segments[1:], strict=False)
            if following.base_offset > partition.cleaned_until
        )
        due_ms = partition.tombstones_due_ms
        tombstones_due = due_ms is not None and due_ms <= now_ms
        if not total or ((dirty == 0 or dirty / total < settings.min_dirty_ratio) and not tombstones_due):
            return None
        ends = {segment.base_offset: following.base_offset for segment, following in pairwise(partition.segments)}
        log_end = partition.high_watermark
        last_batches = partition.producers.last_offsets(log_end)
        dense_from = max(partition.gaps_below, partition.log_start)
        return Round(partition, segments, ends, dense_from, partition.cleaned_until, log_end, now_ms, last_batches)

    def execute(self, work: Round) -> None:
        """Write the successors of the segments. Blocks; runs beside the loop.

        Raises CorruptLog at a damaged batch, OSError if the disk refuses: then the round is to be undone.
        """
        try:
            self._write_successors(work)
        except CorruptLog:
            self._note_damage(work)
            raise

    def _note_damage(self, work: Round) -> None:
        """Read the segments, because reads find out where damage is and note it: the next round ends before it."""
        left = sum(segment.size for segment in work.segments)
        place: scrub.Place | None = scrub.Place(work.partition.key, work.partition.log_start)
        while place is not None and left > 0 and not work.is_given_up:
            place, size = scrub.check([work.partition], place, scrub.READ_BYTES)
            left -= size

    def _write_successors(self, work: Round) -> None:
        offsets = OffsetMap(work.cleaned_until, self._keys_max)
        for batch in _batches(work, work.segments, work.cleaned_until):
            if not offsets.add(batch):
                break
        work.reached = offsets.end
        self._rewrite([segment for segment in work.segments if segment.base_offset < offsets.end], offsets, work)

    def undo(self, work: Round) -> None:
        """Remove the successors, also one that is not complete. Blocks; may be repeated after a failure."""
        folder = work.partition.folder
        for name in self._disk.list(folder):
            if name.endswith(CLEAN):
                self._disk.remove(folder / name)
        swaps = [successor.path for _, successor in work.made if successor.path.suffix == SWAP]
        for path in swaps:
            self._disk.remove(path)
        if swaps and self._disk.list(folder):
            self._disk.sync_directory(folder)

    def decide(self, work: Round) -> None:
        """Make the successors the ones that count. Blocks; runs beside the loop."""
        for _, successor in work.made:
            successor.rename(successor.path.with_suffix(SWAP))
        self._disk.sync_directory(work.partition.folder)

    def _rewrite(self, segments: list[Segment], offsets: OffsetMap, work: Round) -> None:
        """Write what remains of the segments, several into one successor where they fit."""
        partition, successor = work.partition, None
        for segment in segments:
            if successor is not None and successor.size + segment.size > partition.settings.segment_bytes:
                work.made.append(successor.seal(work))
                successor = None
            if successor is None:
                made = Segment(self._disk, partition.folder, segment.base_offset, self._open_files)
                successor = _Successor(self._disk, made)
            successor.replaced.append(segment)
            for batch in clean(
                _batches(work, [segment], 0),
                offsets,
                now_ms=work.now_ms,
                delete_retention_ms=partition.settings.delete_retention_ms,
                log_end=work.log_end,
                keeps_header=work.keeps_header,
                stats=work.stats,
            ):
                successor.add(batch)
        if successor is not None:
            work.made.append(successor.seal(work))

    def install(self, work: Round) -> None:
        """Let readers see the successors. On the event-loop thread."""
        partition = work.partition
        for group, successor in work.made:
            partition.replace(group, [successor])
        work.is_installed = True
        partition.cleaned_until = max(partition.cleaned_until, work.reached)
        partition.tombstones_due_ms = work.stats.next_horizon_ms

    def finish(self, work: Round) -> None:
        """Remove what the successors replace and give them their names. Blocks; may be repeated after a failure."""
        folder = work.partition.folder
        if not self._disk.list(folder):
            return  # The topic was deleted.
        left = [(group, successor) for group, successor in work.made if successor.path.suffix == SWAP]
        for group, _ in left:
            for segment in group:
                segment.remove(keeps_snapshot=segment is group[0])
        # Durably: after a power cut, a new name without these removals would leave old segments beside the new one.
        self._disk.sync_directory(folder)
        for _, successor in left:
            successor.rename(successor.path.with_name(f"{successor.base_offset:020d}.log"))
        self._disk.sync_directory(folder)
        with suppress(OSError):  # Without an index file the index is rebuilt from the segment.
            for _, successor in work.made:
                successor.save_index()


def _batches(work: Round, segments: list[Segment], from_offset: int) -> Iterator[Buffer]:
    """Yield every batch that ends at or after an offset; none any more once the round is given up.

    Raises CorruptLog for a batch whose offsets do not continue the log: the CRC does not cover them, and the later
    records of its keys would go.
    """
    for segment in segments:
        end, expected = work.ends[segment.base_offset], segment.base_offset
        dense = segment.base_offset >= work.dense_from
        for position, header in segment.headers(strict=True):
            if work.is_given_up:
                return
            if header.next_offset > end or (dense and header.base_offset != expected):
                raise CorruptLog(f"{segment!r}: expected offset {expected}, found {header.base_offset}.")
            expected = header.next_offset
            if header.last_offset >= from_offset:
                yield segment.file.pread(header.length, position)
        if dense and expected != end:
            raise CorruptLog(f"{segment!r} ends at offset {expected}, and the next segment begins at {end}.")
