"""Finding a place among the commit points of a capture: of an LSN, of the end, and of the first whole one.

Owns the search; refuses to know rows. Nothing is indexed: a point anywhere is known from the records before it, at most
some thousands, because full vectors come again and again (`Fold` at a place). So what holds for all points from one on
is found by halving the topic. Invariant: everything from a place on is there, as far as the log tells when it is asked.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Final

from walstream.capture.chain import Chain
from walstream.capture.commit_points import Point, TableSnapshot, partitions
from walstream.capture.reading import TAIL
from walstream.feed.reading.calls import EARLIEST, LATEST
from walstream.feed.reading.entries import Lane
from walstream.feed.reading.log_client import LogClient
from walstream.feed.transactions.points import UNREACHABLE_S, Commits, Fold, Placed
from walstream.positions import GlobalLsn, TopicPartition

GONE: Final = 1 << 63
"""Where a partition begins that is not there any more."""


class Search:
    """One search, in the topic as it is now."""

    def __init__(
        self, client: LogClient, commits: Commits, lane: Lane, start: int, end: int, window: int = TAIL
    ) -> None:
        """Take the offsets between which the topic has records, and in how many of them a full vector is likely."""
        self._client = client
        self._commits = commits
        self._lane = lane
        self._start = start
        self._end = end
        self._window = window
        self._known: dict[int, Placed | None] = {}

    @classmethod
    async def begin(cls, client: LogClient, commits: Commits, lane: Lane) -> Search:
        """Ask where the topic begins and ends."""
        partition = commits.partition
        start = await client.offsets_of_all({partition: EARLIEST}, UNREACHABLE_S)
        end = await client.offsets_of_all({partition: LATEST}, UNREACHABLE_S)
        return cls(client, commits, lane, start[partition].offset, end[partition].offset)

    async def seek(self, lsn: int) -> Fold:
        """Return a fold such that every point that ends at this LSN or later is still to come."""
        if lsn <= self._lane.lsn(1, 0):
            return await self._fold_at(self._start)
        time_ms = GlobalLsn(lsn).time_ms
        offset = await self._offset_of(time_ms)
        if any(region.since_ms >= time_ms for region in self._lane.regions.values()):
            # What was there before the topic was followed has one and the same time: only the count of rows tells.
            found = await self._first(lambda point: self._lane.lsn(point.rows_total, 0) >= lsn, offset)
            offset = offset if found is None else found.point.offset
        return await self._fold_at(offset)

    async def last(self) -> Placed | None:
        """Return the last valid point."""
        return await self._before(self._end)

    async def last_broken(self) -> Placed | None:
        """Return the last point of which rows may have been removed, or of which nobody can tell; None: there is none.

        A table whose snapshot was taken again since is not looked at: reading will say so.
        """
        last = await self.last()
        if last is None:
            return None
        broken: list[Placed | None] = []
        if self._start > 0:
            async for placed in self._points(Fold(Chain(self._start), self._start), self._end):
                broken.append(placed)
                break
        starts = await self._starts(last.point)
        for partition, start in starts.items():
            reached = min(start, last.point.next.get(partition, 0))
            if reached > 0:
                broken.append(await self._first(_has_reached(partition, reached), self._end))
        for snapshot in last.point.snapshots.values():
            if any(starts.get(partition, 0) for partition in partitions(snapshot.next)):
                found = await self._first(_has(snapshot), self._end)
                if found is not None and is_broken(found.point, starts):
                    broken.append(found)
        return max((one for one in broken if one is not None), key=lambda one: one.point.offset, default=None)

    async def _starts(self, point: Point) -> dict[TopicPartition, int]:
        """Return where the partitions begin that rows were written to; those from 0 on are left out."""
        gone = topics_gone(self._client, point, {one.topic for one in point.ends})
        there = {one for one in point.ends if one.topic not in gone}
        found = await self._client.offsets_of_all(dict.fromkeys(there, EARLIEST), UNREACHABLE_S)
        starts = {one: answer.offset for one, answer in found.items() if answer.offset > 0}
        return starts | dict.fromkeys(point.ends.keys() - there, GONE)

    async def _offset_of(self, time_ms: int) -> int:
        """Return the offset of the first record that was appended then or later; the end when there is none."""
        partition = self._commits.partition
        found = (await self._client.offsets_of_all({partition: time_ms}, UNREACHABLE_S))[partition]
        return self._end if found.offset < 0 else found.offset

    async def _first(self, holds: Callable[[Point], bool], stop: int) -> Placed | None:
        """Return the first point before an offset for which something holds that holds for all later ones, too."""
        low, high = self._start, stop
        while high - low > self._window:
            middle = (low + high) // 2
            before = await self._before(middle)
            if before is not None and holds(before.point):
                high = middle
            else:
                low = middle
        async for placed in self._points(await self._fold_at(low), high):
            if holds(placed.point):
                return placed
        return None

    async def _before(self, offset: int) -> Placed | None:
        """Return the last point before an offset."""
        if offset not in self._known:
            self._known[offset] = (await self._folded(offset))[1]
        return self._known[offset]

    async def _fold_at(self, offset: int) -> Fold:
        return (await self._folded(offset))[0]

    async def _folded(self, stop: int) -> tuple[Fold, Placed | None]:
        """Fold as little of what is before an offset as tells the last point there."""
        window = self._window
        while True:
            first = max(self._start, stop - window)
            fold, last = Fold(Chain(first), first), None
            async for placed in self._points(fold, stop):
                last = placed
            if first == self._start or last is not None:
                fold.position = max(first, stop)
                return fold, last
            window *= 8

    async def _points(self, fold: Fold, stop: int) -> AsyncIterator[Placed]:
        while fold.position < stop:
            records = await self._commits.read(fold.position, stop)
            if not records:
                return
            for told in records:
                placed = fold.feed(told)
                if placed is not None:
                    yield placed


def topics_gone(client: LogClient, point: Point, topics: Iterable[str]) -> set[str]:
    """Return those of the topics that were deleted since rows were written to them, also if they were made again."""
    gone = set()
    for topic in topics:
        known, written = client.topics.get(topic), point.topic_ids.get(topic)
        # Points have ids as librdkafka writes them.
        if known is None or (written is not None and b64encode(known.id.bytes).decode().rstrip("=") != written):
            gone.add(topic)
    return gone


def is_broken(point: Point, starts: Mapping[TopicPartition, int]) -> bool:
    """Tell whether rows of a point may have been removed, given where partitions begin."""
    return any(span.start < starts.get(span.partition, 0) for span in point.spans)


def _has_reached(partition: TopicPartition, offset: int) -> Callable[[Point], bool]:
    return lambda point: point.next.get(partition, 0) >= offset


def _has(snapshot: TableSnapshot) -> Callable[[Point], bool]:
    name = (snapshot.schema, snapshot.table)

    def has(point: Point) -> bool:
        known = point.snapshots.get(name)
        return known is not None and known.id == snapshot.id

    return has
