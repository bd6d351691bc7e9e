"""What a leader sends: batches from a follower's position on, up to the end of the log, durable here or not.

Below the durable end they come from the segments, checked like those for consumers. Above it they come from the
buffers that wait for group commit, so that the leader's fsync and its followers' overlap where somebody waits for both,
and what has just become durable does, too; these were checked when they were appended and nothing has touched them
since. All followers that keep up lack the same of them, so what was gathered for one is kept for the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple

from walstream.errors import CorruptLog
from walstream.log.batch import PREFIX_BYTES, Buffer, parse_header
from walstream.log.disk import File
from walstream.log.epochs import EpochMap
from walstream.log.group_commit import Write
from walstream.log.segment import Segment

SENT_AS_FILE_BYTES_MIN = 64 * 1024
"""Less than this is read and sent like anything else."""

JOINED_BYTES_MAX = 4 * 1024
"""Buffers are copied together if they are no larger than this on average: to hand each over takes longer than that."""

_END_OFFSET: Final = attrgetter("end_offset")

_PLACE: Final = Struct(">qii")
"""What a batch begins with: base offset, length of what follows the length, leader epoch."""


class Chunk(NamedTuple):
    """Whole batches in a row, of which the first ends after the offset that was asked for."""

    buffers: tuple[Buffer, ...]
    size: int
    """In bytes, over all buffers."""
    next_offset: int
    """The offset after the last batch; the offset that was asked for, if there is none."""


class SealedRange(NamedTuple):
    """Batches in a file that no longer changes, to be sent without being read here: the receiver checks them."""

    file: File
    position: int
    length: int
    next_offset: int


def chunk_of(data: memoryview, offset: int, epochs: EpochMap, log_start: int) -> Chunk:
    """Make a chunk of whole, verified batches that were read from a segment.

    Raises CorruptLog for one that says another leader epoch than the map: no checksum covers it, and a follower that
    is sent it can only refuse it, again and again. Whatever lags, and the scrub, read every batch of a log through
    this loop, so it makes no object per batch.
    """
    size = len(data)
    if not size:
        return Chunk((), 0, offset)
    unpack = _PLACE.unpack_from
    position = last = 0
    epoch, epoch_end = epochs.span_at(unpack(data)[0])
    while position < size:
        base_offset, length, said = unpack(data, position)
        if base_offset >= epoch_end:
            epoch, epoch_end = epochs.span_at(base_offset)
        last = position
        position += PREFIX_BYTES + length
        if said != epoch and base_offset >= log_start:
            error = CorruptLog(
                f"The batch at offset {base_offset} says that it was written in leader epoch {said}; "
                f"it was in epoch {epoch}."
            )
            error.offsets = (base_offset, parse_header(data, last).next_offset)
            raise error
    return Chunk((data,), size, parse_header(data, last).next_offset)


def sealed_range(segments: Sequence[Segment], offset: int, bytes_max: int) -> SealedRange | None:
    """Return where the batches from `offset` on lie in a sealed, durable segment, about `bytes_max` long. Blocks."""
    number = bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1
    if number < 0 or number + 1 >= len(segments):
        return None
    segment = segments[number]
    if not segment.sealed or segment.durable_size < segment.size or segment.size == 0:
        return None
    near, _ = segment.index.row_for_offset(offset)
    position = next((at for at, header in segment.headers(near) if header.base_offset >= offset), None)
    if position is None:
        return None
    end, next_offset = segment.size, segments[number + 1].base_offset
    if end - position > bytes_max:
        end, next_offset = segment.index.boundary_before(position + bytes_max)
    if end - position < SENT_AS_FILE_BYTES_MIN:
        return None
    return SealedRange(segment.file, position, end - position, next_offset)


class InFlight:
    """The writes of one partition that group commit has not reported back yet, oldest first.

    And those before them that it has just reported, until the followers have had their turn: most of them lack just
    these, and would have them read and checked again.
    """

    __slots__ = ("_gathered", "_kept", "_writes", "add")

    def __init__(self) -> None:
        self._gathered: tuple[int, Write, Chunk] | None = None
        """The chunk that was asked for last: from which offset, and which write was the newest then."""
        self._kept: list[Write] = []
        self._writes: deque[Write] = deque()
        self.add: Callable[[Write], None] = self._writes.append
        """Note a write that was queued. Called for every append, so it is the deque's own."""

    def __len__(self) -> int:
        return len(self._writes)

    def remove(self, writes: list[Write], *, is_kept: bool) -> None:
        """Take the oldest writes out: they are durable. If `is_kept` they are at hand until `let_go`."""
        mine = self._writes
        assert mine[0] is writes[0], "group commit reports in order"
        for _ in writes:
            last = mine.popleft()
        assert last is writes[-1], "group commit reports in order"
        if is_kept:
            self._kept += writes
        else:
            self._gathered = None

    def let_go(self) -> None:
        """Let go of what is durable."""
        if self._kept:
            self._kept = []
            self._gathered = None

    def clear(self) -> None:
        """Let go of everything: it failed, or was cut off."""
        self._writes.clear()
        self._kept = []
        self._gathered = None

    def chunk(self, offset: int, bytes_max: int) -> Chunk | None:
        """Return the batches from `offset` on, at least one; None if they are not here any more, or not yet."""
        kept, writes = self._kept, self._writes
        newest = writes[-1] if writes else kept[-1] if kept else None
        if newest is None or (kept or writes)[0].base_offset > offset or newest.end_offset <= offset:
            return None
        if self._gathered is not None:
            start, until, chunk = self._gathered
            if start == offset and until is newest and chunk.size <= bytes_max:
                return chunk
        chunk = _gather(self._after(offset), bytes_max)
        self._gathered = (offset, newest, chunk)
        return chunk

    def _after(self, offset: int) -> list[Write]:
        """Return the writes that end after `offset`."""
        writes = [*self._kept, *self._writes]
        return writes[bisect_right(writes, offset, key=_END_OFFSET) :]


def _gather(writes: Sequence[Write], bytes_max: int) -> Chunk:
    buffers = [write.buffer for write in writes]
    size = sum(map(len, buffers))
    while size > bytes_max and len(buffers) > 1:
        size -= len(buffers.pop())
    next_offset = writes[len(buffers) - 1].end_offset
    if len(buffers) > 1 and size <= JOINED_BYTES_MAX * len(buffers):
        buffers = [b"".join(buffers)]
    return Chunk(tuple(buffers), size, next_offset)
