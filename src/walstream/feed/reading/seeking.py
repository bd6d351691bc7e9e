"""From an LSN to offsets, and whether everything from there on is still there.

Owns finding where to begin in each partition, and `oldest`: the LSN from which on nothing was removed. Refuses to know
what is read from there.

The first record with the LSN's time is found by the log itself, and what is below the LSN is passed over when it is
read. Two orders matter. The end of a partition is asked for before the time: a record that is appended in between has
that time or a later one, and is read. Its start is asked for after: what was removed before that, the start tells; what
is removed later, the reading notices.

Removed records are all below the first one that is left, or, when none is left, below what the log promises about the
next. Often more is known: the entry before the start was read here, or noted by an earlier feed, so everything behind
it is there. Otherwise an idle topic whose last record has expired would send every subscriber away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from walstream.errors import OffsetOutOfRange
from walstream.feed.reading.calls import EARLIEST, LATEST
from walstream.feed.reading.chunks import Place
from walstream.feed.reading.entries import INDEX_BITS, Lane, decode
from walstream.feed.reading.log_client import WAIT_S, LogClient
from walstream.feed.reading.resolved import Promises
from walstream.feed.reading.strays import Strays
from walstream.positions import STAMP_SHIFT, TopicPartition

AT_ONCE: Final = 8
_TIME_SHIFT: Final = 64 + STAMP_SHIFT


class LastRead(NamedTuple):
    """An entry that was read: nothing in its partition up to this offset has a larger LSN."""

    offset: int
    lsn: int


class Removed(Exception):
    """Entries at or above an LSN were removed; the argument is the LSN from which on all are there."""

    def __init__(self, oldest: int) -> None:
        super().__init__(oldest)
        self.oldest = oldest


class Seeking:
    """Where things are in the log."""

    def __init__(self, client: LogClient, promises: Promises) -> None:
        self._client = client
        self._promises = promises
        self.strays = Strays(client, promises)
        # Lanes that have left the feed take what is known of them along.
        self._firsts: WeakKeyDictionary[Lane, tuple[int, int]] = WeakKeyDictionary()
        """(log start, LSN of the first record from there on, or one that it will be above)"""
        self.last_read: WeakKeyDictionary[Lane, LastRead] = WeakKeyDictionary()
        self.head = 0
        """The largest LSN that was read."""

    def note(self, lane: Lane, offset: int, lsn: int) -> None:
        """Remember the last entry that was read of a partition."""
        known = self.last_read.get(lane)
        if known is None or offset > known.offset:
            self.last_read[lane] = LastRead(offset, lsn)
            self.head = max(self.head, lsn)

    async def seek(
        self, lanes: Mapping[TopicPartition, Lane], lsn: int, *, is_new: bool = False
    ) -> dict[TopicPartition, Place]:
        """Return where to begin, so that nothing from the LSN on is missed. Raises Removed, and what the log says.

        Raises LogUnfit when something may have come below the LSN since a reader has stood there, unless it is new.
        """
        while True:
            try:
                return await self._seek(lanes, lsn, is_new=is_new)
            except OffsetOutOfRange:
                # More was removed meanwhile.
                continue

    async def _seek(
        self, lanes: Mapping[TopicPartition, Lane], lsn: int, *, is_new: bool
    ) -> dict[TopicPartition, Place]:
        time_ms = lsn >> _TIME_SHIFT
        ends = await self._client.offsets_of_all(dict.fromkeys(lanes, LATEST), WAIT_S)
        found = await self._client.offsets_of_all(dict.fromkeys(lanes, time_ms), WAIT_S)
        starts, oldest = await self._starts(lanes)
        if lsn < oldest:
            raise Removed(oldest)
        places = {}
        for one, lane in lanes.items():
            by_time = found[one].offset if found[one].offset >= 0 else ends[one].offset
            offset = max(min([by_time, *_clamped(lane, time_ms)]), starts[one])
            places[one] = Place(lane, offset, 0)
        if not is_new:
            at_once = asyncio.Semaphore(AT_ONCE)

            async def check(one: TopicPartition, place: Place) -> None:
                async with at_once:
                    await self.strays.check_before(one, place.lane, place.offset, starts[one], lsn)

            await asyncio.gather(*(check(one, place) for one, place in places.items()))
        return places

    async def oldest(self, lanes: Mapping[TopicPartition, Lane]) -> int:
        """Return the LSN from which on everything of these partitions is there; 0: nothing was removed."""
        _, oldest = await self._starts(lanes)
        return oldest

    async def count_since(self, lanes: Mapping[TopicPartition, Lane], lsn: int) -> int:
        """Return how many offsets there are from the time of an LSN on, in partitions whose leaders answer."""
        starts = await self._client.offsets(dict.fromkeys(lanes, EARLIEST))
        found = await self._client.offsets(dict.fromkeys(lanes, lsn >> _TIME_SHIFT))
        ends = await self._client.offsets(dict.fromkeys(lanes, LATEST))
        count = 0
        for one, lane in lanes.items():
            answers = [where[one].offset for where in (starts, found, ends) if one in where and not where[one].code]
            if len(answers) == 3:
                start, by_time, end = answers
                first = min([by_time if by_time >= 0 else end, *_clamped(lane, lsn >> _TIME_SHIFT)])
                count += max(0, end - max(first, start))
        return count

    async def last(self, lanes: Mapping[TopicPartition, Lane]) -> dict[TopicPartition, Place]:
        """Return where each partition ends, having noted the last entry before. Raises what the log says."""
        starts = await self._ask_starts(lanes)
        ends = await self._client.offsets_of_all(dict.fromkeys(lanes, LATEST), WAIT_S)
        at_once = asyncio.Semaphore(AT_ONCE)

        async def find(one: TopicPartition) -> None:
            async with at_once:
                await self._note_last(one, lanes[one], starts[one], ends[one].offset)

        await asyncio.gather(*map(find, lanes))
        return {one: Place(lane, ends[one].offset, self._stamp_ms(lane)) for one, lane in lanes.items()}

    def _stamp_ms(self, lane: Lane) -> int:
        known = self.last_read.get(lane)
        return known.lsn >> _TIME_SHIFT if known is not None else 0

    async def _note_last(self, partition: TopicPartition, lane: Lane, start: int, end: int) -> None:
        """Find the last entry. Compaction and transactions leave offsets without any: then further back."""
        back = 1
        while end > start:
            offset = max(end - back, start)
            entry = await self._last_entry(partition, lane, offset, end)
            if entry is not None:
                self.note(lane, *entry)
            if entry is not None or offset == start:
                return
            back *= 16

    async def _starts(self, lanes: Mapping[TopicPartition, Lane]) -> tuple[dict[TopicPartition, int], int]:
        """Return where each partition starts, and from which LSN on nothing is missing."""
        while True:
            starts = await self._ask_starts(lanes)
            try:
                firsts = [
                    await self._first(one, lanes[one], start)
                    for one, start in starts.items()
                    if start > _first_start(lanes[one])
                ]
            except OffsetOutOfRange:
                # More was removed meanwhile.
                continue
            return starts, max([0, *firsts])

    async def _ask_starts(self, lanes: Mapping[TopicPartition, Lane]) -> dict[TopicPartition, int]:
        answers = await self._client.offsets_of_all(dict.fromkeys(lanes, EARLIEST), WAIT_S)
        return {one: answer.offset for one, answer in answers.items()}

    async def _first(self, partition: TopicPartition, lane: Lane, start: int) -> int:
        """Return an LSN that everything below the start of a partition is below, as small as is known."""
        known = self.last_read.get(lane)
        kept = self._firsts.get(lane)
        if kept is None or kept[0] != start:
            first = await self._first_entry(partition, lane, start)
            # What is promised once is enough: it does not move away from who comes back with it.
            kept = self._firsts[lane] = (start, await self._promised(partition) if first is None else first)
        return min(kept[1], known.lsn + 1) if known is not None and known.offset + 1 >= start else kept[1]

    async def _promised(self, partition: TopicPartition) -> int:
        """Return what the next record of an empty partition will be above."""
        await self._promises.ask([partition])
        promise = self._promises.of(partition)
        # Nobody answers: then all that was ever read here is what is known.
        return promise.bound if promise is not None else max([0, *(one.lsn + 1 for one in self.last_read.values())])

    async def _first_entry(self, partition: TopicPartition, lane: Lane, offset: int) -> int | None:
        """Return the LSN of the first entry from an offset on; None: there is none yet."""
        while True:
            chunk_lsns, following, end = await self._read(partition, lane, offset)
            if chunk_lsns:
                return chunk_lsns[0]
            if following >= end:
                return None
            offset = following

    async def _last_entry(self, partition: TopicPartition, lane: Lane, offset: int, end: int) -> tuple[int, int] | None:
        """Return (offset, LSN) of the last entry from an offset to the end; None: there is none."""
        last: tuple[int, int] | None = None
        while offset < end:
            lsns, following, _ = await self._read(partition, lane, offset)
            if lsns:
                last = (following - 1, lsns[-1])
            if following <= offset:
                break
            offset = following
        return last

    async def _read(self, partition: TopicPartition, lane: Lane, offset: int) -> tuple[list[int], int, int]:
        """Return the LSNs of the first batch from an offset on, the offset behind it, and the partition's end."""
        fetched = await self._client.fetch_one(partition, offset, 1, WAIT_S)
        chunk = decode(lane, fetched.records, offset, bytes_max=1)
        if chunk.strays:
            # Their stamp is that of the record before them, which was not read.
            stamp_ms = await self.strays.note_last(partition, lane, chunk.strays[0][1])
            chunk = decode(lane, fetched.records, offset, stamp_ms, bytes_max=1)
        return chunk.lsns, chunk.next_offset, fetched.high_watermark


def _clamped(lane: Lane, time_ms: int) -> list[int]:
    """Return the offsets from which on stamps are later than append times: rolls that joined the feed after then."""
    return [roll << INDEX_BITS for roll, region in lane.regions.items() if region.since_ms >= time_ms]


def _first_start(lane: Lane) -> int:
    """Return the offset below which a partition has never had anything in the feed."""
    return lane.regions[min(lane.regions)].start if lane.regions else 0
