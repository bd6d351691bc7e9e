"""Putting sound batches from a peer in the place of damaged ones.

A replica's bytes are its leader's, batch for batch, so what was damaged had the length that the sound batch has: it is
written over the damage in the file, between the sound batches before and after it, and synced. A crash on the way
leaves damage, as before. Where the end of a sealed segment is missing, with others after it, the batches are put there.

In a compacted log there may be gaps between batches, and the peer may have compacted its copy at another time. So there
the batches count as all that belongs in the place of the damage only if they fill it to the byte.

What does not fit is refused: then the log must be truncated or copied again, which is not for this module to decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from walstream.errors import CorruptBatch, CorruptLog, PartitionOffline, WalstreamError
from walstream.log.batch import HEADER_BYTES, BatchHeader, Buffer, parse_header
from walstream.log.finding import Place, pieces, place_around_damage
from walstream.log.received import check_received, first_offset
from walstream.log.segment import Segment
from walstream.log.surroundings import Done, Shared

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog


class Gap(NamedTuple):
    """Where damaged bytes lie."""

    segment: Segment
    position: int
    length: int | None
    """None: the segment ends there, and so may take any length."""
    start: int
    """The offset that belongs at `position`. Below the log's start nobody may have anything to repair it with: then
    what comes is put before the sound batches, and what lies before that is never read."""
    end: int
    """The offset at which sound batches go on."""
    dense: bool
    """Whether every offset from `start` to `end` belongs to a batch."""


def find_gap(segments: Sequence[Segment], start: int, log_end: int, log_start: int, gaps_below: int) -> Gap:
    """Find the damage that begins at offset `start`, or holds it if the log starts there. Blocks.

    Raises CorruptLog if there is none.
    """
    number = max(bisect_right(segments, start, key=lambda segment: segment.base_offset) - 1, 0)
    segment = segments[number]
    is_last = number + 1 == len(segments)
    end = log_end if is_last else segments[number + 1].base_offset
    dense = segment.base_offset >= gaps_below
    if segment.size:
        source = partial(pieces, segment.file, segment.durable_size)
        place = place_around_damage(source, segment.base_offset, start, dense=dense, end=end)
    else:
        place = Place(0, 0, segment.base_offset)
    if place.length:
        # Whole as far as its checksum goes, and yet known to be damaged: its epoch is wrong, or it was put there by
        # a repair whose sync failed. Batch by batch, because what follows it may be damaged in another way.
        header = parse_header(segment.file.pread(HEADER_BYTES, place.position))
        if header.base_offset < start != log_start or (dense and header.base_offset > start):
            raise CorruptLog(f"Offset {start} is in the middle of a batch.")
        return Gap(segment, place.position, place.length, min(header.base_offset, start), header.next_offset, dense)
    if place.damage is None and is_last:
        raise CorruptLog(f"The log ends before offset {start}; nothing there is damaged.")
    if place.expected != start != log_start:
        error = CorruptLog(f"The damage around offset {start} begins at {place.expected}.")
        error.offsets = (place.expected, end if place.following is None else place.following)
        raise error
    if place.following is None:
        length = segment.durable_size - place.position if is_last else None
        if length is None and not dense:
            length = segment.durable_size - place.position
        return Gap(segment, place.position, length, place.expected, end, dense)
    following = place_around_damage(source, segment.base_offset, place.following, dense=dense, end=end)
    length = following.position - place.position
    return Gap(segment, place.position, length, place.expected, place.following, dense)


class Repairing:
    """One repair of an open log, step by step."""

    def __init__(
        self, partition: PartitionLog, shared: Shared, start: int, received: Sequence[Buffer], done: Done
    ) -> None:
        self._partition = partition
        self._shared = shared
        self._start = start
        self._received = received
        self._done = done
        self._cuts = partition.truncations

    def begin(self) -> None:
        """Check the batches, and write them between two flushes."""
        partition = self._partition
        try:
            if partition.is_held or partition.failure is not None:
                raise PartitionOffline(f"{partition.name} cannot be repaired now.")
            headers = self._checked()
            if not any(start <= self._start < end for start, end in partition.damaged):
                raise CorruptLog(f"Offset {self._start} of {partition.name} is not damaged.")
        except WalstreamError as error:
            self._done(error)
        else:
            self._shared.run_between(partial(self._write, headers))

    def _checked(self) -> list[BatchHeader]:
        epochs, start = self._partition.epochs, self._start
        first = first_offset(self._received, start) if start == self._partition.log_start else start
        dense = start >= self._partition.gaps_below
        parsed = check_received(self._received, start, start, 0, self._partition.leader_epoch, dense=dense, first=first)
        headers = [header for _, batch_headers in parsed for header in batch_headers]
        if not headers:
            raise CorruptBatch(f"No batch came for offset {start}.")
        low, high = epochs.epoch_at(start), epochs.epoch_at(headers[-1].next_offset)
        for header in headers:
            if not low <= header.leader_epoch <= max(high, low):
                raise CorruptBatch(f"A batch of epoch {header.leader_epoch} cannot stand at {header.base_offset}.")
            low = header.leader_epoch
        return headers

    def _write(self, headers: list[BatchHeader]) -> None:
        """On the flush thread."""
        partition = self._partition
        try:
            if partition.truncations != self._cuts:
                raise CorruptLog(f"{partition.name} was cut since.")
            gap = find_gap(
                partition.segments, self._start, partition.durable_end, partition.log_start, partition.gaps_below
            )
            # What reaches beyond the damage is there already, or is for the next repair.
            headers = [header for header in headers if header.next_offset <= gap.end]
            size = sum(header.length for header in headers)
            position = _position_in(gap, headers, size) if headers else None
            if position is None:
                raise CorruptLog(f"The batches for offset {self._start} of {partition.name} do not fit between others.")
            file = gap.segment.file_to_write()
            with gap.segment.mending():
                if gap.length is None:
                    file.truncate(position)
                file.pwritev([memoryview(b"".join(self._received))[:size]], position)
                gap.segment.sync(file)
        except OSError as error:
            self._shared.post(partial(self._done, PartitionOffline(f"The repair failed: {error.strerror}.")))
        except WalstreamError as error:
            self._shared.post(partial(self._refused, error))
        else:
            self._shared.post(partial(self._written, gap, position, headers))

    def _refused(self, error: WalstreamError) -> None:
        """There may be more damage than was known."""
        is_current = self._partition.truncations == self._cuts
        if is_current and isinstance(error, CorruptLog) and error.offsets is not None:
            self._partition.note_damage(*error.offsets, error)
        self._done(error)

    def _written(self, gap: Gap, position: int, headers: list[BatchHeader]) -> None:
        """On the event-loop thread."""
        partition = self._partition
        if partition.truncations != self._cuts:
            self._done(CorruptLog(f"{partition.name} was cut since."))
            return
        if gap.length is None:
            gap.segment.extend(position, headers)
        else:
            gap.segment.restore(position, headers)
        if gap.segment.is_index_loaded:  # A job that is queued may save an older one.
            save = partial(self._shared.disk.write, gap.segment.index_path, gap.segment.index.encode(), durable=False)
            self._shared.run(save, lambda _, __: None)  # A file that is missing is made again.
        start, end = headers[0].base_offset, headers[-1].next_offset
        if not gap.dense:
            start = min(start, gap.start)
            end = gap.end if sum(header.length for header in headers) == gap.length else end
        partition.repaired(headers, start, end)
        self._done(None)


def _position_in(gap: Gap, headers: Sequence[BatchHeader], size: int) -> int | None:
    """Return where batches can stand; None if they cannot: what reaches the end must fill the gap, or end with it."""
    if not gap.dense:
        return gap.position if gap.length is not None and size <= gap.length else None
    is_whole = headers[-1].next_offset == gap.end
    if headers[0].base_offset == gap.start:
        fits = gap.length is None or (size == gap.length if is_whole else size <= gap.length)
        return gap.position if fits else None
    if gap.length is None:
        # Apart from the batch before, by a byte at least: what follows it closely must go on where it ends.
        return max(gap.segment.durable_size - size, gap.position + 1)
    return gap.position + gap.length - size if is_whole and size < gap.length else None


def without(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return what is left of offset ranges when [start, end) is taken out of them."""
    left = [(a, min(b, start)) for a, b in ranges if a < start] + [(max(a, end), b) for a, b in ranges if b > end]
    return sorted((a, b) for a, b in left if a < b)
