"""Putting sound batches from a peer in the place of damaged ones.

A replica's bytes are its leader's, batch for batch, so what was damaged had the length that the sound batch has: it is
written over the damage in the file, between the sound batches before and after it, and synced. A crash on the way
leaves damage, as before. Where the end of a sealed segment is missing, with others after it, the batches are put there.

What does not fit is refused: then the log must be cut back or copied anew, which is not for this module to decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from walstream.errors import CorruptBatch, CorruptLog, PartitionOffline, WalstreamError
from walstream.log.batch import HEADER_BYTES, BatchHeader, Buffer, parse_header
from walstream.log.finding import pieces, place_around_damage
from walstream.log.received import check_received
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
    end: int
    """The offset at which sound batches go on."""
    begins_below: bool = False
    """The damage begins below the log's start, where nobody has anything to repair it with: what comes is put before
    the sound batches, and what lies before that is never read."""


def find_gap(segments: Sequence[Segment], start: int, log_end: int, log_start: int) -> Gap:
    """Find the damage that begins at offset `start`; raises CorruptLog if none begins there. Blocks."""
    number = max(bisect_right(segments, start, key=lambda segment: segment.base_offset) - 1, 0)
    segment = segments[number]
    is_last = number + 1 == len(segments)
    end = log_end if is_last else segments[number + 1].base_offset
    if segment.size == 0:
        place = None
    else:
        source = partial(pieces, segment.file, segment.durable_size)
        place = place_around_damage(source, segment.base_offset, start, dense=True)
        if place.damage is None and place.length:
            # Whole as far as its checksum goes, and yet known to be damaged: its epoch is wrong, or it was put there by
            # a repair whose sync failed. Batch by batch, because what follows it may be damaged in another way.
            header = parse_header(segment.file.pread(HEADER_BYTES, place.position))
            if header.base_offset != start:
                raise CorruptLog(f"Offset {start} is in the middle of a batch.")
            return Gap(segment, place.position, place.length, header.next_offset)
    position = place.position if place is not None else 0
    if place is None or place.damage is None:
        if is_last:
            raise CorruptLog(f"The log ends before offset {start}; nothing there is damaged.")
        return Gap(segment, position, None, end)
    begins_below = place.damage[0] < start == log_start
    if place.damage[0] != start and not begins_below:
        error = CorruptLog(f"The damage around offset {start} begins at {place.damage[0]}.")
        error.offsets = (place.damage[0], min(place.damage[1], end))
        raise error
    if place.following is None:
        length = segment.durable_size - position if is_last else None
        return Gap(segment, position, length, end, begins_below and is_last)
    following = place_around_damage(
        partial(pieces, segment.file, segment.durable_size), segment.base_offset, place.following, dense=True
    )
    return Gap(segment, position, following.position - position, place.following, begins_below)


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
        parsed = check_received(self._received, start, start, 0, self._partition.leader_epoch, dense=True)
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
            gap = find_gap(partition.segments, self._start, partition.durable_end, partition.log_start)
            # What reaches beyond the damage is there already, or is for the next repair.
            headers = [header for header in headers if header.next_offset <= gap.end]
            size = sum(header.length for header in headers)
            if not headers or not _fits(gap, size, headers[-1].next_offset):
                raise CorruptLog(f"The batches for offset {self._start} of {partition.name} do not fit between others.")
            file = gap.segment.file_to_write()
            if gap.length is None:
                file.truncate(gap.position)
            position = gap.position
            if gap.begins_below and gap.length is not None:
                position += gap.length - size
            file.pwritev([memoryview(b"".join(self._received))[:size]], position)
            file.sync()
        except OSError as error:
            self._shared.post(partial(self._done, PartitionOffline(f"The repair failed: {error.strerror}.")))
        except WalstreamError as error:
            self._shared.post(partial(self._refused, error))
        else:
            self._shared.post(partial(self._written, gap, headers))

    def _refused(self, error: WalstreamError) -> None:
        """There may be more damage than was known."""
        if isinstance(error, CorruptLog) and error.offsets is not None:
            self._partition.note_damage(*error.offsets, error)
        self._done(error)

    def _written(self, gap: Gap, headers: list[BatchHeader]) -> None:
        """On the event-loop thread."""
        partition = self._partition
        if partition.truncations != self._cuts:
            self._done(CorruptLog(f"{partition.name} was cut since."))
            return
        if gap.length is None:
            gap.segment.extend(gap.position, headers)
        partition.repaired(headers)
        self._done(None)


def _fits(gap: Gap, size: int, next_offset: int) -> bool:
    """Tell whether batches that end at `next_offset` can stand there: what reaches the end must fill the whole gap."""
    if gap.length is None:
        return True
    if gap.begins_below:
        return next_offset == gap.end and size <= gap.length
    return size == gap.length if next_offset == gap.end else size <= gap.length


def without(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return what is left of offset ranges when [start, end) is taken out of them."""
    left = [(a, min(b, start)) for a, b in ranges if a < start] + [(max(a, end), b) for a, b in ranges if b > end]
    return sorted((a, b) for a, b in left if a < b)
