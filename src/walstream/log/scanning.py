"""The scan of recovery: every batch from the checkpoint on is checked, mended or kept aside.

Owns what happens to each byte that is read:

- batches that continue the log (`continuity`) are taken in, and written again: after an fsync that failed, the kernel
  keeps the pages and calls them clean, so reading them back proves nothing about the disk;
- where a batch is missing or does not check, and the journal has it, the journal's is put there: in the middle of a
  segment, at its end when others follow it, and at the end of the log; there, in the only copy of a log, also behind
  batches that are gone;
- bytes that do not check with sound batches after them are damage to what may have been acknowledged: kept aside and
  reported, never served, and never cut, because a cut would take the sound batches with it;
- bytes that do not check at the very end are a torn write nobody was told about: they are cut, and so are the files
  that such a write began; below the durable end, where no other copy has them, they are kept aside, too;
- and so is all from where such a write has a hole: pages that never came, in what was not known to be durable. One
  flush ends before the next one begins, so nobody was told of anything behind it either (or only where a topic
  acknowledges before fsync, which promises nothing after a power cut). Kept as damage it would be damage that no
  replica could repair.

Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from walstream.log.batch import OFFSET_MAX, BatchHeader, parse_header, walk
from walstream.log.checkpoint import PartitionCheckpoint
from walstream.log.continuity import Rule, continuing_run
from walstream.log.disk import Disk, read_hint
from walstream.log.finding import SCAN_BYTES
from walstream.log.folders import make_folder
from walstream.log.index import Index
from walstream.log.journal import Redo
from walstream.log.salvage import has_not_come, next_batch, sound_at
from walstream.log.segment import OpenFiles, Segment

if TYPE_CHECKING:
    from walstream.log.recovery import Recovered


@dataclass(slots=True)
class Scan:
    """One scan of one partition."""

    disk: Disk
    folder: Path
    found: Recovered
    """What is found so far; its log end is where the next batch belongs."""
    redo: Redo
    open_files: OpenFiles
    segment_bytes: int
    epoch_max: int
    is_compacted: bool
    is_only_copy: bool
    monotonic_ms: int
    durable_end: int
    """Everything below was known to be durable, or visible: nothing of it is a write that was torn."""
    checked_end: int = 0
    """Everything below was synced in the files when the checkpoint was saved: what is missing there is no gap."""

    def run(self, known: PartitionCheckpoint) -> None:
        """Check everything from the checkpoint on, then append what only the journal has."""
        self.checked_end = known.offset
        segments = self.found.segments
        first = next((i for i, segment in enumerate(segments) if segment.base_offset == known.segment), 0)
        position = known.position
        if segments[first].base_offset != known.segment or segments[first].size < known.position:
            # The files do not fit the checkpoint (or there is none): nothing is known, so everything is read.
            first, position = 0, 0
            self.found.log_end = segments[0].base_offset
        number = first
        while number < len(segments):
            segment = segments[number]
            if self.found.log_end < segment.base_offset <= self.found.gaps_below and number > first:
                self.found.log_end = segment.base_offset  # Compaction emptied the end of the segment before.
            if segment.base_offset != self.found.log_end and number > first:
                if not any(map(self._holds_anything, segments[number:])):
                    self._remove(segments[number:])
                    break
                self._note_damage(segment.base_offset)
            end = segments[number + 1].base_offset if number + 1 < len(segments) else OFFSET_MAX
            self._scan_segment(segment, position, end)
            position = 0
            number += 1
        self._append_redone()
        self._make_names_durable(segments[first:])

    def _make_names_durable(self, segments: list[Segment]) -> None:
        """See that files which are there now will be after a power cut.

        A node that was killed may have made them, and not have come to sync their folder: after the next power cut the
        checkpoint would speak of a segment that is gone.
        """
        named = [segment for segment in segments if segment.has_file]
        if named:
            self.disk.sync_directory(self.folder)
        for segment in named:
            segment.is_named = True

    def _holds_anything(self, segment: Segment) -> bool:
        """Tell whether a file has a sound batch in it."""
        if segment.size == 0:
            return False
        data = segment.file_to_write().pread(segment.size, 0)
        return next_batch(data, 0, lambda header: header.base_offset >= segment.base_offset) is not None

    def _remove(self, segments: list[Segment]) -> None:
        """Remove files that were begun by a flush nobody was told of, and that hold nothing."""
        for segment in reversed(segments):
            self.found.bytes_cut += segment.size
            segment.remove()
            self.found.segments.remove(segment)
        self.disk.sync_directory(self.folder)

    # ── one segment ──────────────────────────────────────────────────────────────────────────────────────────────

    def _scan_segment(self, segment: Segment, position: int, end: int) -> None:
        """Check one segment from a position on; `end` is the offset at which the next one begins."""
        if segment.size == 0 and not (end != OFFSET_MAX and self._next_redo(end) is not None):
            segment.index, segment.synced_offset = Index(), self.found.log_end
            return
        segment.index = self._index_up_to(segment, position)
        file = segment.file_to_write()
        wanted = SCAN_BYTES
        while position < segment.size or self._refill(segment, position, end):
            chunk = file.pread(min(wanted, segment.size - position), position)
            run = continuing_run(chunk, self.found.log_end, self._rule(end))
            is_rest = position + len(chunk) >= segment.size
            # The last batch of a chunk is judged together with the one after it.
            size = run.size if run.is_bad or is_rest else run.last_start
            if size:
                self._take_in(segment, chunk[:size], position)
                file.pwritev([chunk[:size]], position)
                position += size
                wanted = SCAN_BYTES
            elif not run.is_bad and not is_rest:
                wanted = 2 * len(chunk)
            else:
                position = self._mend(segment, position, end)
        segment.size = segment.durable_size = segment.synced_size = position
        segment.synced_offset = self.found.log_end
        file.sync()

    @property
    def _may_have_gaps(self) -> bool:
        """Whether there may be gaps above `gaps_below`, too."""
        return self.is_compacted or self.found.takes_gaps

    def _takes_gap_at(self, offset: int) -> bool:
        """Tell whether the journal's next batch may stand behind a gap that begins at `offset`."""
        return self._may_have_gaps and offset >= self.checked_end

    def _rule(self, end: int) -> Rule:
        gaps_below = OFFSET_MAX if self._may_have_gaps else self.found.gaps_below
        return Rule(gaps_below, end, self.found.epochs, self.epoch_max)

    def _take_in(self, segment: Segment, chunk: bytes, position: int) -> None:
        """Bring the state of the log forward over sound batches."""
        found = self.found
        for start, header in walk(chunk):
            segment.index.note(
                header.base_offset, header.last_offset, position + start, header.length, header.max_timestamp
            )
            if header.leader_epoch > found.epochs.last_epoch:
                found.epochs.assign(header.leader_epoch, header.base_offset)
            found.producers.apply(header, self.monotonic_ms)
            if header.base_offset != found.log_end:
                found.gaps_below = max(found.gaps_below, header.base_offset)
            found.log_end = header.next_offset
        found.bytes_checked += len(chunk)

    def _refill(self, segment: Segment, position: int, end: int) -> bool:
        """Put the journal's batch where a segment with others after it ends too early: its tail was not synced."""
        base = self._next_redo(end)
        if end == OFFSET_MAX or base is None:
            return False
        batch = self._redone(base)
        segment.file_to_write().pwritev([batch], position)
        segment.size = position + len(batch)
        return True

    def _mend(self, segment: Segment, position: int, end: int) -> int:
        """Deal with bytes that do not check at `position`; return where the scan goes on."""
        found, file, rule = self.found, segment.file_to_write(), self._rule(end)
        if self._has_redo(found.log_end, end):
            return self._put_back(segment, found.log_end, position)
        rest = file.pread(segment.size - position, position)
        if (base := self._redo_behind_gap(rest, end)) is not None:
            return self._put_back(segment, base, position)
        liar = sound_at(rest, 0)  # Its content is whole, but it says that it belongs elsewhere.
        start = liar.length if liar is not None else 1
        following = next_batch(rest, start, lambda header: rule.takes_after_damage(header, found.log_end))
        if following is not None and not self._is_torn(rest[: following[0]], end):
            start, header = following
            self._note_damage(header.base_offset)
            segment.index.covered = position + start
            return position + start
        if liar is not None:
            self._note_damage(min(found.log_end + liar.last_offset_delta + 1, end))
            segment.index.covered = position + liar.length
            return position + liar.length
        if end == OFFSET_MAX and self.is_only_copy and found.log_end < self.durable_end:
            segment.index.covered = segment.size
            return segment.size
        if end == OFFSET_MAX:
            found.bytes_cut += segment.size - position
            file.truncate(position)
        segment.size = position
        return position

    def _put_back(self, segment: Segment, base: int, position: int) -> int:
        """Write the journal's batch over bytes that do not check; the scan goes on there."""
        batch = self._redone(base)
        segment.file_to_write().pwritev([batch], position)
        segment.size = max(segment.size, position + len(batch))
        return position

    def _redo_behind_gap(self, rest: bytes, end: int) -> int | None:
        """Return where the journal's batch begins that belongs to the beginning of bytes that do not check.

        In a log with gaps that may be behind the log's end. Only if the journal's batches fill the place up to the next
        sound batch to the byte: otherwise another one, which the journal does not have, is damaged here.
        """
        base = self._next_redo(end)
        if base is None:
            return None
        following = next_batch(rest, 1, lambda header: header.base_offset > self.found.log_end)
        if following is None:
            return None
        size, before = following[0], following[1].base_offset
        lengths = [length for offset, (_, _, length) in self.redo.items() if self.found.log_end < offset < before]
        return base if base < before and sum(lengths) == size else None

    def _is_torn(self, damaged: bytes, end: int) -> bool:
        """Tell whether bytes that do not check, with a sound batch after them, are the hole in a write that was torn.

        Not if the next segment was begun, or the journal has what comes later: both wait for all before to be durable.
        """
        expected = self.found.log_end
        if end != OFFSET_MAX or expected < self.durable_end or any(offset > expected for offset in self.redo):
            return False
        return has_not_come(damaged, expected)

    def _note_damage(self, up_to: int) -> None:
        found = self.found
        if up_to > max(found.log_end, found.log_start):
            found.damaged.append((found.log_end, up_to))
        found.log_end = max(found.log_end, up_to)

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────────────

    def _has_redo(self, base: int, end: int) -> bool:
        """Tell whether the journal has the batch at an offset, and it fits below `end`."""
        entry = self.redo.get(base)
        if entry is None:
            return False
        file, position, length = entry
        header = sound_at(file.pread(length, position), 0)
        return header is not None and header.next_offset <= end

    def _next_redo(self, end: int, *, after_loss: bool = False) -> int | None:
        """Return where the journal's batch begins that comes next in the log, below `end`.

        That is the end of the log, or a later offset: in a log with gaps, or where what came before is lost.
        """
        base = self.found.log_end
        if base not in self.redo and (self._takes_gap_at(base) or after_loss):
            base = min((offset for offset in self.redo if offset > base), default=base)
        return base if self._has_redo(base, end) else None

    def _redone(self, base: int) -> bytes:
        """Take the journal's batch at an offset."""
        file, position, length = self.redo.pop(base)
        self.found.batches_redone += 1
        return file.pread(length, position)

    def _append_redone(self) -> None:
        """Append, at the end of the log, the batches that only the journal has."""
        found = self.found
        changed: dict[int, Segment] = {}
        while (base := self._next_redo(OFFSET_MAX, after_loss=self.is_only_copy)) is not None:
            if not changed:
                make_folder(self.disk, self.folder)
            batch = self._redone(base)
            header: BatchHeader = parse_header(batch)
            segment = found.segments[-1]
            is_after_loss = base > max(found.log_end, found.gaps_below) and not self._takes_gap_at(found.log_end)
            if is_after_loss:
                segment.file_to_write()  # Even if it is empty: the next start looks for it.
                found.is_unclean = True
                self._note_damage(base)
            if is_after_loss or (segment.size and segment.size + header.length > self.segment_bytes):
                segment = Segment(self.disk, self.folder, header.base_offset, self.open_files)
                segment.index = Index()
                found.segments.append(segment)
            position = segment.size
            segment.file_to_write().pwritev([batch], position)
            segment.size = position + header.length
            self._take_in(segment, batch, position)
            changed[id(segment)] = segment
        for segment in changed.values():
            segment.file_to_write().sync()
            segment.durable_size = segment.synced_size = segment.size
            segment.synced_offset = found.log_end

    def _index_up_to(self, segment: Segment, position: int) -> Index:
        """Return the index of everything before `position`, from its file as far as that goes."""
        index = Index.decode(read_hint(self.disk, segment.index_path)) or Index()
        index.truncate(position)
        for start, header in _headers(segment, index.covered, position):
            index.note(header.base_offset, header.last_offset, start, header.length, header.max_timestamp)
        index.covered = position
        return index


def _headers(segment: Segment, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
    return segment.headers(position, limit) if position < limit else iter(())
