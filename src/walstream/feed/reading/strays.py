"""Strays: records without append time that came while their topic was in the feed, and who may have gone past them.

A topic that is switched away from append time and back leaves no trace but the records that came meanwhile: each batch
says itself who gave it its time. Such a record is given the stamp of the one before it (`entries`), so it sorts below
where readers stood when it came. Whoever reads from before it gets it in order. Whoever stood further on would pass it
over, and is told instead.

Owns the finding of a *stretch* of strays, from the record with append time before them to the one behind, and who may
lack it: a reader that begins above its first LSN and below the record behind it. As far as that record nobody can have
come without having had the strays, or having been told. Without such a record yet, everybody up to where the log has
got counts. What is asked of the log are headers of batches, a handful for each place where a reader begins, and none
where somebody has read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from walstream.errors import OffsetOutOfRange
from walstream.feed.reading.calls import EARLIEST
from walstream.feed.reading.entries import Lane
from walstream.feed.reading.log_client import WAIT_S, LogClient
from walstream.feed.reading.resolved import Promises
from walstream.log.batch import BatchHeader, walk
from walstream.positions import TopicPartition

FETCH_BYTES: Final = 512 * 1024


class Stretch(NamedTuple):
    """Strays that follow each other."""

    offset: int
    """Of the first one."""
    stamp_ms: int
    """Of the record before it, and so of all of them; 0: there is none."""
    following: int | None
    """The LSN of the record with append time behind them; None: there is none yet."""


class Strays:
    """Looks for strays in the partitions of a feed."""

    def __init__(self, client: LogClient, promises: Promises) -> None:
        self._client = client
        self._promises = promises
        self._clean: WeakKeyDictionary[Lane, tuple[int, int]] = WeakKeyDictionary()
        """Offsets between which there are none, the furthest that are known."""

    def note_clean(self, lane: Lane, start: int, end: int) -> None:
        """Remember that there are none from an offset to another."""
        low, high = self._clean.get(lane, (start, end))
        if start <= high and low <= end:
            self._clean[lane] = (min(low, start), max(high, end))
        elif start > high:
            self._clean[lane] = (start, end)

    async def check_before(
        self, partition: TopicPartition, lane: Lane, offset: int, log_start: int, start: int
    ) -> None:
        """Look whether a reader from an LSN on, which begins at this offset, may lack what is before. Raises LogUnfit.

        Raises OffsetOutOfRange, too, when that was removed meanwhile.
        """
        low, high = self._clean.get(lane, (0, 0))
        least, back = max(lane.joined, log_start), 1
        while offset > least and not low < offset <= high:
            begin = max(offset - back, least)
            headers = [one for one in await self._headers(partition, begin, 1) if one.base_offset < offset]
            if headers and not headers[-1].is_control:
                if is_stray(lane, headers[-1]):
                    await self.check(partition, lane, headers[-1].last_offset, start)
                else:
                    self.note_clean(lane, begin, offset)
                return
            if begin == least:
                return
            # Compaction and transactions leave offsets without records.
            back *= 16

    async def check(self, partition: TopicPartition, lane: Lane, offset: int, start: int, position: int = 0) -> None:
        """Raise LogUnfit when a reader from an LSN on may lack the stray at an offset.

        `position` is how far readers have come by now.
        """
        stretch = await self.stretch(partition, lane, offset)
        if stretch is None:
            return
        first = lane.lsn(stretch.offset, stretch.stamp_ms)
        if first >= start or (stretch.following is not None and stretch.following <= start):
            return
        bound = None if stretch.following is None else stretch.following - 1
        broken = self._promises.note_broken(partition, first, bound, max(start, position))
        if broken.concerns(start):
            raise broken.error()

    async def note_last(self, partition: TopicPartition, lane: Lane, offset: int) -> int:
        """Take note of a stray that is the last record there is; return its stamp."""
        stretch = await self.stretch(partition, lane, offset)
        if stretch is None:
            return 0
        if stretch.following is None:
            # Whoever comes back from before may have stood anywhere up to now.
            await self._promises.ask([partition])
            self._promises.note_broken(partition, lane.lsn(stretch.offset, stretch.stamp_ms))
        return stretch.stamp_ms

    async def stretch(self, partition: TopicPartition, lane: Lane, offset: int) -> Stretch | None:
        """Return the strays around an offset; None when they are not there any more."""
        while True:
            try:
                return await self._find(partition, lane, offset)
            except OffsetOutOfRange:
                # The log begins later by now.
                continue

    async def _find(self, partition: TopicPartition, lane: Lane, offset: int) -> Stretch | None:
        log_start = (await self._client.offsets_of_all({partition: EARLIEST}, WAIT_S))[partition].offset
        if offset < log_start:
            return None
        # The last record from before the partition was in the feed gives them its stamp, too, if it has one.
        position = await self._stamped_before(partition, offset, max(log_start, lane.joined - 1))
        first, stamp_ms = None, 0
        while headers := await self._headers(partition, position, FETCH_BYTES):
            for header in headers:
                if is_stray(lane, header):
                    first = max(header.base_offset, log_start) if first is None else first
                elif header.uses_append_time and not header.is_control:
                    if header.base_offset > offset:
                        return _stretch(first, stamp_ms, lane.lsn(header.base_offset, header.max_timestamp))
                    first, stamp_ms = None, max(stamp_ms, header.max_timestamp)
            position = headers[-1].next_offset
        return _stretch(first, stamp_ms, None)

    async def _stamped_before(self, partition: TopicPartition, offset: int, least: int) -> int:
        """Return where a batch with append time is before an offset, not too far; `least` when none was found."""
        back = 1
        while True:
            begin = max(offset - back, least)
            headers = await self._headers(partition, begin, 1)
            if begin == least or (headers and headers[0].uses_append_time and headers[0].next_offset <= offset):
                return begin
            back *= 4

    async def _headers(self, partition: TopicPartition, offset: int, bytes_max: int) -> Sequence[BatchHeader]:
        """Return the headers of some batches from an offset on, of at least one if there is one."""
        fetched = await self._client.fetch_one(partition, offset, bytes_max, WAIT_S)
        return [header for _, header in walk(fetched.records) if header.next_offset > offset]


def is_stray(lane: Lane, header: BatchHeader) -> bool:
    """Tell whether a batch came without append time into a partition that was in the feed."""
    return not header.uses_append_time and not header.is_control and header.last_offset >= lane.joined


def _stretch(first: int | None, stamp_ms: int, following: int | None) -> Stretch | None:
    return Stretch(first, stamp_ms, following) if first is not None else None
