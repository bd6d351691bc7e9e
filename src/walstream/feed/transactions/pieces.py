"""Pieces of partitions, for a reader that goes through them point by point.

Owns fetching them and what is left of a chunk when a point ends: the next point goes on in it, so that many small
points cost one fetch. Refuses to know points. Invariant: a piece begins where it was asked to and goes on at least one
offset, or there is an error; records that were removed are passed over, and that is said.

On a log whose clock goes back, the LSN of a row may depend on where its reader began; the order of transactions and
their LSNs do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from walstream.errors import DataLoss, OffsetOutOfRange, WalstreamError
from walstream.feed.reading.chunks import READER_BYTES, Chunks, Loaded, Place, fetch_bytes
from walstream.feed.reading.entries import INDEX_BITS, INDEX_MASK, Chunk, Lane
from walstream.feed.reading.log_client import LogClient, Patience
from walstream.positions import TopicPartition

SILENCE_S_MAX: Final = 30.0
"""How long records are waited for that must be there: a new leader may show them a moment later."""


class Range(NamedTuple):
    """What is wanted of a partition: offsets from `start` on, before `stop`."""

    lane: Lane
    start: int
    stop: int


class Piece(NamedTuple):
    """Consecutive entries of a partition, as columns."""

    lsns: list[int]
    offsets: list[int]
    encoded: list[bytes]
    tenants: list[bytes]
    following: int
    """The offset behind them."""
    is_removed: bool = False
    """Whether what was there is not there any more."""


class _Held(NamedTuple):
    """A chunk, and the offset of each of its entries."""

    chunk: Chunk
    offsets: list[int]


class Pieces:
    """What one reader has fetched and not used up."""

    def __init__(self, client: LogClient, chunks: Chunks, bytes_max: int = READER_BYTES) -> None:
        self._client = client
        self._chunks = chunks
        self._bytes_max = bytes_max
        self._held: OrderedDict[Lane, _Held] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """What is held now."""
        return sum(held.chunk.size_bytes for held in self._held.values())

    async def read(self, wanted: Mapping[TopicPartition, Range]) -> dict[TopicPartition, Piece]:
        """Return the next piece of each partition. Raises DataLoss, UnreachableError."""
        found: dict[TopicPartition, Piece] = {}
        patience = Patience(self._client, SILENCE_S_MAX)
        while True:
            for partition, asked in wanted.items():
                if partition not in found and (piece := self._cut(asked)) is not None:
                    found[partition] = piece
            missing = {partition: asked for partition, asked in wanted.items() if partition not in found}
            if not missing:
                return found
            places = [Place(asked.lane, asked.start, self._stamp_ms(asked)) for asked in missing.values()]
            try:
                loaded = await self._chunks.load(places, fetch_bytes(len(self._held) + len(missing)))
                for partition, asked in missing.items():
                    piece = self._take(partition, asked, loaded.get(partition, Loaded(None)))
                    if piece is not None:
                        found[partition] = piece
            except _CutOff as error:
                try:
                    await patience.after(error)
                except _CutOff:
                    raise DataLoss(error.message, error.hint) from None
            except WalstreamError as error:
                await patience.after(error)

    def _take(self, partition: TopicPartition, asked: Range, loaded: Loaded) -> Piece | None:
        """Hold what was loaded; return a piece when there is none to be had from it. Raises what went wrong."""
        if isinstance(loaded.error, OffsetOutOfRange) and loaded.log_start > asked.start:
            return Piece([], [], [], [], min(loaded.log_start, asked.stop), is_removed=True)
        if loaded.error is not None:
            raise loaded.error
        chunk = loaded.chunk
        if chunk is None:
            return None
        if chunk.next_offset == asked.start:
            if 0 <= loaded.high_watermark <= asked.start:
                raise _CutOff(
                    f"{partition} ends at offset {loaded.high_watermark:,}; a commit point says {asked.stop:,}.",
                    "The log has lost rows that it had: restore it, or begin anew with a snapshot.",
                )
            return None
        self._held[asked.lane] = _Held(chunk, _offsets(chunk))
        self._held.move_to_end(asked.lane)
        while len(self._held) > 1 and self.size_bytes > self._bytes_max:
            self._held.popitem(last=False)
        return self._cut(asked)

    def _cut(self, asked: Range) -> Piece | None:
        """Return what is held of a range, as far as it follows its start; what is used up is let go of."""
        held = self._held.get(asked.lane)
        if held is None or not held.chunk.first_offset <= asked.start < held.chunk.next_offset:
            return None
        chunk, offsets = held
        first = bisect_left(offsets, asked.start)
        is_whole = asked.stop >= chunk.next_offset
        last = len(offsets) if is_whole else bisect_left(offsets, asked.stop, lo=first)
        if is_whole:
            del self._held[asked.lane]
        following = chunk.next_offset if is_whole else asked.stop
        columns = (chunk.lsns[first:last], offsets[first:last], chunk.encoded[first:last], chunk.tenants[first:last])
        return Piece(*columns, following)

    def _stamp_ms(self, asked: Range) -> int:
        held = self._held.get(asked.lane)
        return held.chunk.stamp_ms if held is not None and held.chunk.next_offset == asked.start else 0


def _offsets(chunk: Chunk) -> list[int]:
    """Return the offset of each entry: the index of its LSN, and the roll that follows from where the chunk begins."""
    roll = chunk.first_offset >> INDEX_BITS << INDEX_BITS
    offsets = [roll | lsn & INDEX_MASK for lsn in chunk.lsns]
    if chunk.next_offset - 1 >> INDEX_BITS << INDEX_BITS != roll:
        # Indexes have begun anew in the middle of it.
        offsets = [at if at >= chunk.first_offset else at + (1 << INDEX_BITS) for at in offsets]
    return offsets


class _CutOff(DataLoss):
    """The log ends before what its commit points say, or does not show all of itself yet."""

    retryable = True
