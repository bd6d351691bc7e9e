"""Recovery: from what a folder holds to a log that can be trusted.

After a clean stop that left nothing in the journal nothing is read. Otherwise what was announced is finished (a
compaction's swap, a cut), the segments are opened, and every batch from the checkpoint on is checked (`scanning`).

Segments before the checkpoint are not read, but held against what it says of them: a file that is missing, or ends
early, is damage. An empty segment takes the place of a missing one, so that reads fail there and a peer can repair it.
A log that ends below its durable end has lost acknowledged records. Where no peer has them, the log continues at the
durable end, and the lost offsets are damage: no acknowledged offset is ever given to another record.

Owns which files make up the log. Blocks; called before the partition serves, or while it is offline.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from walstream.errors import CorruptLog, StorageError
from walstream.log import truncation
from walstream.log.batch import OFFSET_MAX
from walstream.log.checkpoint import PartitionCheckpoint
from walstream.log.disk import Disk
from walstream.log.epochs import EpochMap
from walstream.log.finding import pieces, place_around_damage
from walstream.log.folders import make_folder, partition_name
from walstream.log.index import Index
from walstream.log.journal import Redo
from walstream.log.producers import ProducerStates
from walstream.log.replica_reads import chunk_of
from walstream.log.salvage import sound_at
from walstream.log.scanning import Scan
from walstream.log.segment import OpenFiles, Segment
from walstream.log.truncation import Cut

EPOCH_MAX = 2**31 - 1
READ_BYTES = 1024 * 1024
_SEGMENT_NAME = re.compile(r"\d{20}\.log")
_OF_A_SEGMENT = re.compile(r"\d{20}\.(log|index|producers)")

FRESH = PartitionCheckpoint(log_start=0, segment=0, position=0, offset=0)


@dataclass(slots=True)
class Recovered:
    """A partition as its files have it."""

    segments: list[Segment]
    log_start: int
    log_end: int
    epochs: EpochMap
    producers: ProducerStates
    cleaned_until: int = 0
    gaps_below: int = 0
    takes_gaps: bool = False
    tombstones_due_ms: int | None = None
    leader_epoch: int = -1
    led_epoch: int = -1
    high_watermark: int = 0
    high_watermark_epoch: int = -1
    is_unclean: bool = False
    """Whether less was found than was known to be durable, now or at an earlier start."""
    newest_ms: int = -1
    """In a topic with append time: the latest timestamp of the last segment that holds anything."""
    bytes_checked: int = 0
    bytes_cut: int = 0
    batches_redone: int = 0
    damaged: list[tuple[int, int]] = field(default_factory=list)
    """Offset ranges [from, to) that fail their checksums, or that are missing."""
    lost: tuple[int, int] | None = None
    """Offsets [from, to) that were durable and are gone, in a log that a peer can send them for."""
    cut: Cut | None = None
    """A cut that was announced and has been carried out: to be concluded once a checkpoint is saved."""
    failure: StorageError | None = None
    """Why the files cannot be used, if they cannot."""
    saved: PartitionCheckpoint | None = None
    """Then: what the checkpoint says of them, and must go on saying."""

    @classmethod
    def failed(
        cls,
        disk: Disk,
        folder: Path,
        saved: PartitionCheckpoint | None,
        open_files: OpenFiles,
        failure: StorageError,
    ) -> Recovered:
        """Stand in for a partition whose files cannot be used: nothing to read, at the offsets it had.

        The log start and the newest epochs may lie above `offset`: only the journal has the batches from there on.
        """
        known = saved or FRESH
        end = max(known.offset, known.log_start)
        segment = Segment(disk, folder, end, open_files)
        segment.index = Index()
        epochs = EpochMap.from_list(known.epochs)
        epochs.truncate(end)
        return cls(
            [segment], end, end, epochs, ProducerStates(),
            leader_epoch=known.leader_epoch, led_epoch=known.led_epoch, is_unclean=True, failure=failure, saved=known,
        )  # fmt: skip


def recover(
    disk: Disk,
    folder: Path,
    saved: PartitionCheckpoint | None,
    *,
    clean: bool,
    redo: Redo,
    open_files: OpenFiles,
    segment_bytes: int,
    producers_max: int,
    monotonic_ms: int,
    epoch_max: int = EPOCH_MAX,
    is_compacted: bool = False,
    is_only_copy: bool = False,
    acks_before_fsync: bool = False,
) -> Recovered:
    """Open the segments of one partition and bring them to a state that can be trusted.

    `is_only_copy`: no other node has this log. `acks_before_fsync`: what the topic acknowledges is durable only once
    its segment is synced.
    """
    known = saved or FRESH
    # After a kill, compaction may have replaced segments that the checkpoint lists, below its `gaps_below`.
    is_exact = clean and not any(name.endswith(".swap") for name in disk.list(folder))
    finish_swaps(disk, folder)
    cut = truncation.announced(disk, folder)
    if cut is not None:
        # Everything below the cut was synced before it was announced, so the journal has nothing to add.
        truncation.carry_out(disk, folder, cut)
        known = truncation.lowered(disk, folder, cut, known, _bases(disk, folder), producers_max, monotonic_ms)
        redo, clean = {}, False
    known = _from_the_batch_that_holds_the_start(known, _bases(disk, folder))
    missing = _missing(known, _bases(disk, folder), is_exact=is_exact) if saved is not None else []
    segments = _open_segments(disk, folder, known, missing, open_files)
    durable_end = known.offset if acks_before_fsync else max(known.durable_end, known.high_watermark)
    durable_end = max(durable_end, _end_of_redo(redo))
    found = Recovered(
        segments=segments,
        log_start=max(known.log_start, segments[0].base_offset),
        log_end=known.offset,
        epochs=EpochMap.from_list(known.epochs),
        producers=ProducerStates.restore(known.producers, producers_max, now_ms=monotonic_ms),
        cleaned_until=known.cleaned_until,
        gaps_below=known.gaps_below,
        takes_gaps=known.takes_gaps,
        tombstones_due_ms=known.tombstones_due_ms,
        leader_epoch=known.leader_epoch,
        led_epoch=known.led_epoch,
        high_watermark=known.high_watermark,
        high_watermark_epoch=known.high_watermark_epoch,
        cut=cut,
    )
    # A clean stop leaves nothing in the journal for a log, unless a sync of its files had failed: then it has the rest.
    is_whole = segments[-1].base_offset == known.segment and segments[-1].size == known.position
    if clean and is_whole and not redo:
        segments[-1].synced_offset = known.offset
    else:
        scan = Scan(
            disk, folder, found, redo, open_files, segment_bytes, epoch_max, is_compacted, is_only_copy, monotonic_ms,
            durable_end,
        )  # fmt: skip
        scan.run(known)
    if found.log_end < found.log_start:
        _begin_at_the_start(disk, folder, found, open_files)
    _note_missing(found, known, missing, is_exact=is_exact)
    found.is_unclean |= known.is_unclean or found.log_end < max(durable_end, known.durable_end, known.high_watermark)
    if found.log_end < durable_end and is_only_copy:
        if found.log_end < known.offset:
            found.producers = ProducerStates.restore(known.producers, producers_max, now_ms=monotonic_ms)
        _continue_at(disk, folder, found, durable_end, open_files)
    elif found.log_end < durable_end:
        found.lost = (found.log_end, durable_end)
    found.cleaned_until = min(found.cleaned_until, found.log_end)
    found.gaps_below = min(found.gaps_below, found.log_end)
    found.epochs.truncate(found.log_end)
    found.epochs.trim(found.log_start)
    _look_again(found, known.damaged)
    for segment in segments[:-1]:
        segment.sealed = True
    segments[-1].prepare_appends()
    return found


def _look_again(found: Recovered, damaged: Sequence[tuple[int, int]]) -> None:
    """Remember what was known to be damaged, where no scan came by, unless it has become sound since."""
    for start, end in damaged:
        start, end = max(start, found.log_start), min(end, found.log_end)
        is_known = any(first <= start and end <= stop for first, stop in found.damaged)
        if start < end and not is_known and not _is_sound(found, start, end):
            found.damaged = sorted([*found.damaged, (start, end)])


def _is_sound(found: Recovered, start: int, end: int) -> bool:
    """Tell whether a range can be read: every batch with its checksum, in its place and of its epoch. Blocks."""
    offset = start
    while offset < end:
        number = max(bisect_right(found.segments, offset, key=lambda segment: segment.base_offset) - 1, 0)
        segment = found.segments[number]
        until = found.segments[number + 1].base_offset if number + 1 < len(found.segments) else OFFSET_MAX
        dense = segment.base_offset >= found.gaps_below
        try:
            data = segment.read(offset, READ_BYTES, cached=False, dense=dense, end=found.log_end, until=until)
            following = chunk_of(data or memoryview(b""), offset, found.epochs, found.log_start).next_offset
        except (CorruptLog, OSError):
            return False
        if following == offset:
            return not dense and segment.size > 0
        offset = following
    return True


def _begin_at_the_start(disk: Disk, folder: Path, found: Recovered, open_files: OpenFiles) -> None:
    """Let a log begin anew of which nothing is left from its start on."""
    for segment in found.segments:
        segment.remove()
    if disk.list(folder):
        disk.sync_directory(folder)
    found.segments[:] = [Segment(disk, folder, found.log_start, open_files)]
    found.segments[0].index = Index()
    found.log_end = found.log_start


def _from_the_batch_that_holds_the_start(known: PartitionCheckpoint, bases: list[int]) -> PartitionCheckpoint:
    """Look before the log's start, if the checkpoint knows an empty log whose first batch may begin there.

    The start may lie inside a batch. A log that was reset to it takes the batch as a whole, in a segment named after
    where that begins.
    """
    if known.position or known.offset != known.log_start or known.segment in bases:
        return known
    before = [base for base in bases if base < known.segment]
    if not before:
        return known
    return msgspec.structs.replace(known, segment=before[-1], offset=before[-1])


def _bases(disk: Disk, folder: Path) -> list[int]:
    return [int(name.removesuffix(".log")) for name in disk.list(folder) if _SEGMENT_NAME.fullmatch(name)]


def _missing(known: PartitionCheckpoint, bases: Sequence[int], *, is_exact: bool) -> list[int]:
    """Return where segments began that the checkpoint knows, whose records the log should have, and that are gone."""
    listed = [*_listed(known, is_exact=is_exact), known.segment]
    missing = [base for base, end in pairwise(listed) if base not in bases and end > known.log_start]
    first = min([*bases, *missing, known.segment])
    if first > known.log_start:
        missing.insert(0, known.log_start)  # Compaction keeps the first segment, whatever it removes from it.
    return missing


def _listed(known: PartitionCheckpoint, *, is_exact: bool) -> dict[int, int]:
    """Return the sizes of the segments that must be there, by base offset."""
    return {
        base: size for base, size in known.segments if base < known.segment and (is_exact or base >= known.gaps_below)
    }


def _note_missing(found: Recovered, known: PartitionCheckpoint, missing: Sequence[int], *, is_exact: bool) -> None:
    """Note as damage what segments before the checkpoint lack: all, where a file is gone, or their end."""
    sizes = _listed(known, is_exact=is_exact)
    for segment, following in pairwise(found.segments):
        start, end = segment.base_offset, following.base_offset
        if start in missing and segment.size == 0:
            lacking = start
        elif segment.size < sizes.get(start, 0):
            dense = start >= known.gaps_below
            place = place_around_damage(partial(pieces, segment.file, segment.size), start, end - 1, dense=dense)
            if place.length:
                continue  # A repair has replaced bytes that were kept aside.
            lacking = place.expected
        else:
            continue
        lacking = max(lacking, found.log_start)
        if lacking < end and not any(first <= lacking and end <= stop for first, stop in found.damaged):
            found.damaged = sorted([*found.damaged, (lacking, end)])


def _continue_at(disk: Disk, folder: Path, found: Recovered, end: int, open_files: OpenFiles) -> None:
    """Continue a log, whose end is lost for good, in a new segment at its durable end."""
    found.damaged = sorted([*found.damaged, (found.log_end, end)])
    make_folder(disk, folder)
    segment = Segment(disk, folder, end, open_files)
    segment.index = Index()
    found.segments.append(segment)
    for unnamed in found.segments[-2:]:
        unnamed.file_to_write()  # Also an empty one before it: the next start looks for both.
    disk.sync_directory(folder)
    found.log_end = end


def _end_of_redo(redo: Redo) -> int:
    """Return the offset after the last batch that the journal has: all before it was durable."""
    if not redo:
        return 0
    last = max(redo)
    file, position, length = redo[last]
    header = sound_at(file.pread(length, position), 0)
    return header.next_offset if header is not None else last


def _open_segments(
    disk: Disk, folder: Path, known: PartitionCheckpoint, missing: Sequence[int], open_files: OpenFiles
) -> list[Segment]:
    """Return the segments in order, the last one to be written to; those below the log's start are removed.

    But not the one the checkpoint ends in, though all of it may lie below the start: the scan begins there. An empty
    file takes the place of each one that is missing.
    """
    bases = _bases(disk, folder)
    if known.position and known.segment not in bases:
        raise CorruptLog(
            f"{partition_name(folder)}: the segment at offset {known.segment} is gone.",
            "Restore the folder from a copy; to go on without these records, delete the topic and create it again.",
        )
    if missing:
        make_folder(disk, folder)
        for base in missing:
            disk.open(folder / f"{base:020d}.log", create=True)
        disk.sync_directory(folder)
        bases = _bases(disk, folder)
    while len(bases) > 1 and bases[1] <= known.log_start and bases[0] < known.segment:
        for suffix in (".log", ".index", ".producers"):
            disk.remove(folder / f"{bases[0]:020d}{suffix}")
        del bases[0]
    segments = [
        Segment(disk, folder, base, open_files, size=disk.open(folder / f"{base:020d}.log").size()) for base in bases
    ]
    for segment in segments:
        segment.has_file = True
    if known.segment not in bases:
        # Begun, but never written to, or not in a way that outlived a crash: perhaps the journal has what belongs here.
        segments.append(Segment(disk, folder, known.segment, open_files))
        segments.sort(key=lambda segment: segment.base_offset)
    return segments


def has_swaps(disk: Disk, folder: Path) -> bool:
    """Tell whether a partition of any topic has a round of compaction to be put in place.

    Then a start must not compare sizes with a checkpoint from before, nor may the next one, should this one be broken
    off after that.
    """
    return any(
        name.endswith(".swap")
        for topic in disk.list(folder)
        if "@" in topic
        for partition in disk.list(folder / topic)
        if partition.isdecimal()
        for name in disk.list(folder / topic / partition)
    )


def finish_swaps(disk: Disk, folder: Path) -> None:
    """Complete or undo what compaction was doing.

    `<base>-<end>.swap` is whole and synced: it takes the place of the segments from `base` up to `end`. Any other
    temporary file was still being written.
    """
    for name in disk.list(folder):
        if name.endswith((".clean", ".new")):
            disk.remove(folder / name)
        elif name.endswith(".swap"):
            base, end = (int(part) for part in name.removesuffix(".swap").split("-"))
            for other in disk.list(folder):
                if _OF_A_SEGMENT.fullmatch(other) and base < int(other.partition(".")[0]) < end:
                    disk.remove(folder / other)
            disk.remove(folder / f"{base:020d}.index")
            # Durably: after a power cut, the new name without these removals would leave old segments beside it.
            disk.sync_directory(folder)
            disk.rename(folder / name, folder / f"{base:020d}.log")
            disk.sync_directory(folder)
