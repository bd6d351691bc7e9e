"""Recovery: from what a folder holds to a log that can be trusted.

After a clean stop nothing is read. Otherwise every batch from the checkpoint on is checked:

- bytes that do not check at the end of the last segment are a torn write nobody was told about: they are cut;
- the journal may hold the batch that should stand there: it is written again;
- bytes that do not check with sound batches *after* them are damage to what may have been acknowledged: they are kept
  aside and reported, never served, and never cut, because a cut would take the sound batches with it.

What was read from the checkpoint on is also written again and synced: after an fsync that failed, the kernel keeps the
pages and calls them clean, so reading them back proves nothing about the disk.

Owns the scan. Blocks; called before the partition serves, or while it is offline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from walstream.errors import CorruptLog
from walstream.log.batch import HEADER_BYTES, BatchHeader, parse_header, verified_prefix, walk
from walstream.log.checkpoint import PartitionCheckpoint
from walstream.log.disk import Disk
from walstream.log.epochs import EpochMap
from walstream.log.index import Index
from walstream.log.journal import Redo
from walstream.log.producers import ProducerStates
from walstream.log.salvage import next_batch
from walstream.log.segment import SCAN_BYTES, OpenFiles, Segment

_SEGMENT_NAME = re.compile(r"\d{20}\.log")

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
    tombstones_due_ms: int | None = None
    bytes_checked: int = 0
    bytes_cut: int = 0
    batches_redone: int = 0
    damaged: list[tuple[int, int]] = field(default_factory=list)
    """Offset ranges [from, to) that fail their checksums."""

    @classmethod
    def empty(cls, disk: Disk, folder: Path, saved: PartitionCheckpoint | None, open_files: OpenFiles) -> Recovered:
        """Stand in for a partition whose files cannot be used: nothing to read, at the offsets it had."""
        known = saved or FRESH
        segment = Segment(disk, folder, known.offset, open_files)
        segment.index = Index()
        epochs = EpochMap.from_list(known.epochs)
        return cls(
            [segment], known.offset, known.offset, epochs, ProducerStates(), known.cleaned_until, known.gaps_below
        )


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
    now_ms: int,
) -> Recovered:
    """Open the segments of one partition and bring them to a state that can be trusted."""
    known = saved or FRESH
    segments = _open_segments(disk, folder, known, open_files)
    found = Recovered(
        segments=segments,
        log_start=max(known.log_start, segments[0].base_offset),
        log_end=known.offset,
        epochs=EpochMap.from_list(known.epochs),
        producers=ProducerStates.restore(known.producers, producers_max),
        cleaned_until=known.cleaned_until,
        gaps_below=known.gaps_below,
        tombstones_due_ms=known.tombstones_due_ms,
    )
    if clean and segments[-1].base_offset == known.segment and segments[-1].size == known.position:
        segments[-1].synced_offset = known.offset
    else:
        _scan(_Scan(disk, folder, found, redo, open_files, segment_bytes, now_ms), known)
    found.epochs.truncate(found.log_end)
    found.epochs.trim(found.log_start)
    for segment in segments[:-1]:
        segment.sealed = True
    return found


def _open_segments(disk: Disk, folder: Path, known: PartitionCheckpoint, open_files: OpenFiles) -> list[Segment]:
    """Return the segments in order, the last one to be written to; those below the log's start are removed."""
    finish_swaps(disk, folder)
    names = disk.list(folder)
    bases = [int(name.removesuffix(".log")) for name in names if _SEGMENT_NAME.fullmatch(name)]
    while len(bases) > 1 and bases[1] <= known.log_start:
        disk.remove(folder / f"{bases[0]:020d}.log")
        disk.remove(folder / f"{bases[0]:020d}.index")
        del bases[0]
    if known.position and known.segment not in bases:
        raise CorruptLog(
            f"{folder.parent.name}-{folder.name}: the segment at offset {known.segment} is gone.",
            "Restore the folder from a copy; to go on without these records, delete the topic and create it again.",
        )
    segments = [
        Segment(disk, folder, base, open_files, size=disk.open(folder / f"{base:020d}.log").size()) for base in bases
    ]
    if not bases or known.segment > bases[-1]:
        segments.append(Segment(disk, folder, known.segment, open_files))  # Begun, but never written to.
    return segments


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
                if _SEGMENT_NAME.fullmatch(other) and base < int(other.removesuffix(".log")) < end:
                    disk.remove(folder / other)
            disk.rename(folder / name, folder / f"{base:020d}.log")
            disk.remove(folder / f"{base:020d}.index")
            disk.sync_directory(folder)


@dataclass(slots=True)
class _Scan:
    """What the steps of a scan share."""

    disk: Disk
    folder: Path
    found: Recovered
    redo: Redo
    open_files: OpenFiles
    segment_bytes: int
    now_ms: int


def _scan(scan: _Scan, known: PartitionCheckpoint) -> None:
    """Check everything from the checkpoint on, then append what only the journal has."""
    segments = scan.found.segments
    first = next((i for i, segment in enumerate(segments) if segment.base_offset == known.segment), 0)
    if segments[first].base_offset != known.segment or segments[first].size < known.position:
        # The files do not fit the checkpoint (or there is none): nothing is known, so everything is read.
        first, position = 0, 0
        scan.found.log_end = segments[0].base_offset
    else:
        position = known.position
    for number in range(first, len(segments)):
        segment = segments[number]
        if segment.base_offset != scan.found.log_end and number > first:
            _note_damage(scan, segment.base_offset)
        _scan_segment(scan, segment, position, is_last=number == len(segments) - 1)
        position = 0
    _append_redone(scan)


def _scan_segment(scan: _Scan, segment: Segment, position: int, *, is_last: bool) -> None:
    if segment.size == 0:
        segment.index, segment.synced_offset = Index(), scan.found.log_end
        return
    segment.index = _index_up_to(scan.disk, segment, position)
    end, file = segment.size, segment.file_to_write()
    wanted = SCAN_BYTES
    while position < end:
        chunk = file.pread(min(wanted, end - position), position)
        good, is_bad = _fitting_prefix(scan, chunk)
        if good:
            _take_in(scan, segment, chunk[:good], position)
            file.pwritev([chunk[:good]], position)
            position += good
            wanted = SCAN_BYTES
        elif not is_bad and len(chunk) >= HEADER_BYTES and parse_header(chunk).length <= end - position:
            wanted = parse_header(chunk).length
        else:
            position = _mend(scan, segment, position, is_last=is_last)
            end = segment.size
    segment.size = segment.visible_size = segment.synced_size = position
    segment.synced_offset = scan.found.log_end
    file.sync()
    segment.is_named = True


def _fitting_prefix(scan: _Scan, chunk: bytes) -> tuple[int, bool]:
    """Count the bytes of sound batches that continue the log, as `verified_prefix` does.

    The CRC leaves out the base offset. Only compaction leaves gaps, and only below the point it has reached.
    """
    expected = scan.found.log_end
    dense = expected >= scan.found.gaps_below
    good, is_bad = verified_prefix(chunk, dense=dense)
    if good:
        base_offset = parse_header(chunk).base_offset
        if base_offset < expected or (dense and base_offset != expected):
            return 0, True
    return good, is_bad


def _take_in(scan: _Scan, segment: Segment, chunk: bytes, position: int) -> None:
    """Bring the state of the log forward over sound batches."""
    found = scan.found
    for start, header in walk(chunk):
        segment.index.note(
            header.base_offset, header.last_offset, position + start, header.length, header.max_timestamp
        )
        if header.leader_epoch != found.epochs.epoch_at(header.base_offset):
            found.epochs.assign(header.leader_epoch, header.base_offset)
        found.producers.apply(header, scan.now_ms)
        found.log_end = header.next_offset
    found.bytes_checked += len(chunk)


def _mend(scan: _Scan, segment: Segment, position: int, *, is_last: bool) -> int:
    """Deal with bytes that do not check at `position`; return where the scan goes on."""
    found, file = scan.found, segment.file_to_write()
    batch = _redone(scan, found.log_end)
    if batch is not None:
        file.pwritev([batch], position)
        segment.size = max(segment.size, position + len(batch))
        found.batches_redone += 1
        return position
    rest = file.pread(segment.size - position, position)
    following = next_batch(rest, 1, found.log_end)
    if following is not None:
        start, header = following
        _note_damage(scan, header.base_offset)
        segment.index.covered = position + start
        return position + start
    if is_last:
        found.bytes_cut += segment.size - position
        file.truncate(position)
    segment.size = position
    return position


def _note_damage(scan: _Scan, up_to: int) -> None:
    scan.found.damaged.append((scan.found.log_end, up_to))
    scan.found.log_end = up_to


def _redone(scan: _Scan, offset: int) -> bytes | None:
    """Return the journal's batch for an offset."""
    entry = scan.redo.pop(offset, None)
    if entry is None:
        return None
    file, position, length = entry
    return file.pread(length, position)


def _append_redone(scan: _Scan) -> None:
    """Append, at the end of the log, the batches that only the journal has."""
    found = scan.found
    changed: dict[int, Segment] = {}
    if scan.redo:
        scan.disk.make_directory(scan.folder)
    while (batch := _redone(scan, found.log_end)) is not None:
        header: BatchHeader = parse_header(batch)
        segment = found.segments[-1]
        if segment.size and segment.size + header.length > scan.segment_bytes:
            segment = Segment(scan.disk, scan.folder, header.base_offset, scan.open_files)
            segment.index = Index()
            found.segments.append(segment)
        position = segment.size
        segment.file_to_write().pwritev([batch], position)
        segment.size = position + header.length
        _take_in(scan, segment, batch, position)
        found.batches_redone += 1
        changed[id(segment)] = segment
    for segment in changed.values():
        segment.file_to_write().sync()
        segment.visible_size = segment.synced_size = segment.size
        segment.synced_offset = found.log_end
    if changed:
        scan.disk.sync_directory(scan.folder)


def _index_up_to(disk: Disk, segment: Segment, position: int) -> Index:
    """Return the index of everything before `position`, from its file as far as that goes."""
    index = Index.decode(disk.read(segment.index_path)) or Index()
    index.truncate(position)
    for start, header in _headers(segment, index.covered, position):
        index.note(header.base_offset, header.last_offset, start, header.length, header.max_timestamp)
    index.covered = position
    return index


def _headers(segment: Segment, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
    return segment.headers(position, limit) if position < limit else iter(())
