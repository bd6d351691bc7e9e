"""Cutting a log back: durably, and never by half.

A cut concerns several files (segments that go, one that gets shorter, the journal, the checkpoint), and a crash may
come between any two. So it is announced first, in a file of its own in the partition's folder:

1. what stays is synced, so that neither the journal nor a later scan is needed for it;
2. the announcement is written and synced. Before this a crash leaves the old log, from here on the new one: recovery
   carries out what is announced, and offers the partition nothing from the journal;
3. the journal forgets the partition, the files are removed and cut;
4. the checkpoint is saved, which from now on trusts nothing beyond the cut;
5. the announcement is removed, durably. Only now may other bytes take the same offsets.

Steps 1 to 3 run between two flushes, behind every write that was queued before. A reset is a cut that leaves nothing.
"""

from __future__ import annotations

import errno
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from walstream.errors import CorruptLog, DiskFull, OutOfFiles, PartitionOffline, WalstreamError
from walstream.log import producer_snapshots
from walstream.log.batch import HEADER_BYTES, parse_header
from walstream.log.checkpoint import PartitionCheckpoint
from walstream.log.disk import OUT_OF_FILES, Disk
from walstream.log.finding import pieces, place_around_damage
from walstream.log.index import Index
from walstream.log.producers import ProducerStates
from walstream.log.segment import Segment
from walstream.log.surroundings import Done, Shared

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog

ANNOUNCEMENT = "cut.json"
_OF_A_SEGMENT = re.compile(r"(\d{20})\.(log|index|producers)")
COMPACTION_SUFFIXES = (".swap", ".clean", ".new")


class Cut(msgspec.Struct, frozen=True):
    """What is announced."""

    segment: int
    """Base offset of the segment that is cut, or that the log begins anew with."""
    position: int
    end: int
    """The log end after it."""
    is_reset: bool = False


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def announced(disk: Disk, folder: Path) -> Cut | None:
    """Return the cut that was under way when an earlier process ended, if one was."""
    data = disk.read(folder / ANNOUNCEMENT)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Cut)
    except msgspec.DecodeError as error:
        raise CorruptLog(
            f"{folder / ANNOUNCEMENT} cannot be read: {error}.", "Restore the folder from a copy."
        ) from error


def announce(disk: Disk, folder: Path, cut: Cut) -> None:
    """Decide on a cut: from here on it counts as done."""
    disk.write(folder / ANNOUNCEMENT, msgspec.json.encode(cut), durable=True)


def carry_out(disk: Disk, folder: Path, cut: Cut) -> None:
    """Remove and cut the files; doing it again changes nothing.

    A reset also removes what compaction left, where recovery could not finish or undo a round: a `.swap` would take the
    place of the new log at the next start. Other truncations follow a recovery that could.
    """
    for name in reversed(disk.list(folder)):
        if cut.is_reset and name.endswith(COMPACTION_SUFFIXES):
            disk.remove(folder / name)
        match = _OF_A_SEGMENT.fullmatch(name)
        if match is None:
            continue
        base, kind = int(match[1]), match[2]
        if base > cut.segment or cut.is_reset or (base == cut.segment and kind == "index"):
            disk.remove(folder / name)
        elif base == cut.segment and kind == "log":
            file = disk.open(folder / name)
            if file.size() > cut.position:
                file.truncate(cut.position)
            file.sync()
    disk.sync_directory(folder)


def conclude(disk: Disk, folder: Path) -> None:
    """Remove the announcement, durably, once a checkpoint knows of the cut."""
    disk.remove(folder / ANNOUNCEMENT)
    disk.sync_directory(folder)


def lowered(
    disk: Disk,
    folder: Path,
    cut: Cut,
    saved: PartitionCheckpoint,
    bases: Sequence[int],
    producers_max: int,
    monotonic_ms: int,
) -> PartitionCheckpoint:
    """Return what a checkpoint from before the cut still says: nothing beyond it, and producers from a snapshot."""
    if cut.is_reset:
        return PartitionCheckpoint(
            log_start=cut.end, segment=cut.end, position=0, offset=cut.end, leader_epoch=saved.leader_epoch,
            led_epoch=saved.led_epoch, takes_gaps=saved.takes_gaps, durable_end=cut.end, high_watermark=cut.end,
            high_watermark_epoch=saved.high_watermark_epoch, is_unclean=saved.is_unclean,
        )  # fmt: skip
    kept = msgspec.structs.replace(
        saved,
        durable_end=min(saved.durable_end, cut.end),
        high_watermark=min(saved.high_watermark, cut.end),
        cleaned_until=min(saved.cleaned_until, cut.end),
        gaps_below=min(saved.gaps_below, cut.end),
    )
    if (saved.segment, saved.position) <= (cut.segment, cut.position):
        return kept
    base, producers = producer_snapshots.nearest(disk, folder, bases, cut.segment, producers_max, monotonic_ms)
    return msgspec.structs.replace(kept, segment=base, position=0, offset=base, producers=producers.snapshot())


def plan(segments: Sequence[Segment], to: int, gaps_below: int) -> Cut:
    """Find where to cut so that nothing at or after offset `to` stays, and everything before it does. Blocks.

    `gaps_below`: below that offset compaction may have left gaps.
    """
    number = max(bisect_right(segments, to, key=lambda segment: segment.base_offset) - 1, 0)
    segment = segments[number]
    if segment.size == 0:
        return Cut(segment.base_offset, 0, segment.base_offset)
    position, offset = segment.index.row_for_offset(to - 1)
    end = segment.base_offset if offset is None else offset
    dense = segment.base_offset >= gaps_below
    for at, header in segment.headers(position):
        if dense and header.base_offset != end:
            return _plan_around_damage(segment, to)
        if header.next_offset > to:
            break
        position, end = at + header.length, header.next_offset
    else:
        position = segment.size if dense else position
    return Cut(segment.base_offset, position, end)


def _plan_around_damage(segment: Segment, to: int) -> Cut:
    """Find the place in a segment of which a header has rotted: no other one is believed before it was checked."""
    source = partial(pieces, segment.file, segment.size)
    place = place_around_damage(source, segment.base_offset, to, dense=True)
    if place.length:
        header = parse_header(segment.file.pread(HEADER_BYTES, place.position))
        return Cut(segment.base_offset, place.position, header.base_offset)
    return Cut(segment.base_offset, place.position, place.damage[0] if place.damage is not None else to)


# ── a log that is in use ─────────────────────────────────────────────────────────────────────────────────────────────


class Cutting:
    """One cut of an open log, step by step."""

    def __init__(self, partition: PartitionLog, shared: Shared, to: int, done: Done, *, is_reset: bool) -> None:
        self._partition = partition
        self._shared = shared
        self._to = to
        self._is_reset = is_reset
        self._done = done
        self._segments: list[Segment] = []

    def begin(self) -> None:
        """Hold the log, wait for compaction to let go of it, and cut behind all that is queued."""
        self._partition.hold(self._to, is_reset=self._is_reset)
        self._shared.leave_alone(self._partition, partial(self._shared.run_between, self._cut))

    def _cut(self) -> None:
        """On the flush thread."""
        try:
            if self._partition.is_discarded and self._partition.write_error is not None:
                raise self._partition.write_error  # Nothing may create the folder of a deleted topic again.
            result = self._carry_out()
        except OSError as error:
            self._shared.post(partial(self._failed, as_offline(self._partition.name, error)))
        except WalstreamError as error:
            self._shared.post(partial(self._failed, error))
        else:
            self._shared.post(partial(self._carried_out, *result))

    def _carry_out(self) -> tuple[Cut, Segment, ProducerStates]:
        partition, shared = self._partition, self._shared
        disk, folder = shared.disk, partition.folder
        partition.prepare()
        if self._is_reset:
            cut = Cut(self._to, 0, self._to, is_reset=True)
            kept: list[Segment] = []
        else:
            if partition.write_error is not None:
                raise partition.write_error
            segments = partition.segments
            cut = plan(segments, self._to, partition.gaps_below)
            if cut.end < partition.log_start:
                cut = Cut(partition.log_start, 0, partition.log_start, is_reset=True)  # Nothing is left of it.
            kept = [] if cut.is_reset else [segment for segment in segments if segment.base_offset <= cut.segment]
            for segment in kept:
                if segment.synced_size < segment.size:
                    segment.sync(segment.file_to_write())
        announce(disk, folder, cut)
        shared.forget(partition.key)
        carry_out(disk, folder, cut)
        last = Segment(disk, folder, cut.segment, shared.open_files, size=cut.position)
        last.has_file = bool(kept)
        last.index = Index()
        last.synced_offset = cut.end
        if kept:
            last.created_ms = kept[-1].created_ms
            last.share_syncs(kept[-1])
            if kept[-1].size:
                last.index = kept[-1].index.copy()
                last.index.truncate(cut.position)
            last.index.covered = cut.position
        last.prepare_appends()
        producers = ProducerStates(shared.producers_max)
        if kept:
            whole = [*kept[:-1], last]
            producers = producer_snapshots.rebuild(disk, folder, whole, shared.producers_max, shared.monotonic_ms())
        return cut, last, producers

    def _carried_out(self, cut: Cut, last: Segment, producers: ProducerStates) -> None:
        """On the event-loop thread: the log is the new one."""
        if self._partition.is_discarded:
            self._partition.release(self._done, self._partition.write_error)
            return
        self._partition.cut_back(cut.end, last, producers, is_reset=cut.is_reset)
        self._shared.save_checkpoint(self._saved)

    def _saved(self, error: Exception | None) -> None:
        if error is not None:
            self._failed(as_offline(self._partition.name, error))
            return
        finish(self._shared, self._partition, self._done)

    def _failed(self, error: WalstreamError) -> None:
        failure = error if isinstance(error, PartitionOffline) else PartitionOffline(error.message, error.hint)
        partition = self._partition
        if partition.write_error is None or partition.is_beginning_anew:
            partition.is_beginning_anew = False
            partition.failed(failure)
        partition.release(self._done, error)


def forget_epochs(shared: Shared, partition: PartitionLog, done: Done) -> None:
    """Forget the epochs that begin at the log's end, durably.

    An epoch that a crash brought back would make damage of what an older leader wrote there.
    """

    def saved(error: Exception | None) -> None:
        failure = None if error is None else as_offline(partition.name, error)
        if failure is not None and partition.write_error is None:
            partition.failed(failure)
        done(failure)

    if partition.epochs.truncate(partition.log_end):
        shared.save_checkpoint(saved)
    else:
        done(None)


def finish(shared: Shared, partition: PartitionLog, done: Done) -> None:
    """Remove the announcement, now that the checkpoint is saved, and let the log take appends again."""

    def finished(_: None, error: Exception | None) -> None:
        failure = None if error is None else as_offline(partition.name, error)
        if failure is not None:
            partition.failed(failure)
        partition.release(done, failure)

    job: Callable[[], None] = partial(conclude, shared.disk, partition.folder)
    shared.run(job, finished)


def as_offline(name: str, error: Exception) -> PartitionOffline:
    """Return why a partition takes no writes after an error on the way to a truncated log."""
    if isinstance(error, PartitionOffline):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"No space is left on the disk to cut {name}.", "Free some; it is then done by itself.")
    if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
        return OutOfFiles(
            f"No more files can be opened to truncate {name}: {error.strerror}.",
            "Raise the limit of open files (ulimit -n, LimitNOFILE= of systemd); it is then done by itself.",
        )
    return PartitionOffline(f"{name} cannot be cut: {error}.", "Mend the cause and restart the node.")
