"""The commit points of a log, for planning: from any of them on, up to any other.

Owns the reading of `<prefix>.commits` and a window of the points it has seen; refuses to know rows. Which points are
valid is decided by capture/chain.py. Invariant: points come in order and without a gap, or there is an error. A point
that is asked for by its offset and is not there any more, or is another one than the caller has seen, is a DataLoss.

Points are kept without their vectors, which are as large as the number of partitions: planning needs the spans alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

from walstream.capture.chain import Chain
from walstream.capture.commit_points import Point, decode
from walstream.capture.reading import TAIL
from walstream.capture.topics import Topics
from walstream.errors import DataLoss
from walstream.positions import Lsn, TopicPartition
from walstream.spark.fetching import Address, Fetcher
from walstream.spark.offsets import BEGINNING, PointOffset
from walstream.spark.options import FROM_THE_BEGINNING, Earliest, Latest, Place
from walstream.spark.versions import Versions, check_there, read_versions

KEPT_MAX: Final = 20_000
"""Points in the window. Beyond it they are read again when they are asked for."""


class PointLog:
    """Reads the points of one capture. Used by one thread."""

    def __init__(self, address: Address, prefix: str) -> None:
        self._address = address
        self.topics = Topics(address, prefix)
        self._partition = TopicPartition(self.topics.names.commits, 0)
        self._fetcher = Fetcher(address)
        self._window: deque[Point] = deque()
        self._base = BEGINNING
        """The point before the window."""
        self._chain: Chain | None = None
        self._position = 0
        self._is_there = False

    def end(self) -> int:
        """Return where the topic ends now. Raises UsageError when no capture has written there."""
        return self._bound(self.topics.ends)

    def start(self) -> int:
        """Return the first offset that the topic still has."""
        return self._bound(self.topics.starts)

    def after(self, offset: int, stop: int | None = None) -> Iterator[Point]:
        """Yield the points whose offsets are greater and lie before `stop` (now: the end). Raises DataLoss."""
        stop = self.end() if stop is None else stop
        self._seek(offset)
        for point in list(self._window):
            if point.offset >= stop:
                return
            if point.offset > offset:
                yield point
        yield from self._more(stop)

    def before(self, offset: int) -> PointOffset:
        """Return the last point up to an offset, which need not be its own. Raises DataLoss."""
        self._seek(offset)
        found = self._base
        for point in self._window:
            if point.offset > offset:
                break
            found = PointOffset.of(point)
        return found

    def last(self, end: int | None = None) -> Point | None:
        """Return the last valid point, reading no more than the end of the topic; None in a new log."""
        end = self.end() if end is None else end
        if self._chain is not None and self._position >= end:
            return self._chain.last
        chain = self._tail(self.start(), end)
        return chain.last

    def forget(self, offset: int) -> None:
        """Drop the points of the window up to this one: they will not be asked for again."""
        while self._window and self._window[0].offset <= offset:
            self._base = PointOffset.of(self._window.popleft())

    def resolve(self, place: Place, log_starts: Callable[[], Mapping[TopicPartition, int]]) -> PointOffset:
        """Return the point at which a place in the source's words lies: everything before it is done. Raises DataLoss.

        LSNs are those of the newest source epoch. A place between two points is the earlier one.
        """
        if isinstance(place, Latest):
            last = self.last()
            return BEGINNING if last is None else PointOffset.of(last)
        start = self.start()
        if isinstance(place, Earliest):
            return self._earliest(start, log_starts())
        found, is_past, oldest = BEGINNING, _is_past(place), None
        for point in self._all(start):
            oldest = oldest or point
            if not is_past(point):
                found = PointOffset.of(point)
            elif not isinstance(place, Lsn):
                # Times of commits do not grow with them: what follows the first one that is past is past too.
                break
        if found is BEGINNING and start > 0 and oldest is not None:
            raise DataLoss(
                f"{place} lies before the oldest commit point that is left, which ends at {oldest.end_lsn}.",
                "Retention has removed what came before: take starting=earliest, or a new snapshot.",
            )
        return found

    def versions(self) -> Versions:
        """Return the versions of all tables, read through the same connection."""
        return read_versions(self._address, self.topics.names.prefix, self.topics, self._fetcher)

    def close(self) -> None:
        """End the connection."""
        self._fetcher.close()

    def _earliest(self, start: int, log_starts: Mapping[TopicPartition, int]) -> PointOffset:
        """Return the first point after which no row is gone."""
        if start == 0 and not any(log_starts.values()):
            return BEGINNING
        found = BEGINNING
        for point in self._all(start):
            if point.is_baseline or any(span.start < log_starts.get(span.partition, 0) for span in point.spans):
                found = PointOffset.of(point)
        return found

    def _all(self, start: int) -> Iterator[Point]:
        chain, end = Chain(start), self.end()
        yield from self._feed(chain, start, end)

    def _seek(self, offset: int) -> None:
        """Have a chain that goes on after the last point up to an offset."""
        if self._chain is not None and self._base.point <= offset < self._position:
            return
        start = self.start()
        if offset == FROM_THE_BEGINNING and start == 0:
            chain = Chain(0)
        elif offset < start:
            raise self._gone(offset, start)
        else:
            chain = self._tail(start, offset + 1)
            if chain.last is None and start > 0:
                raise self._gone(offset, start)
        self._window.clear()
        # Before the end of the topic, that is: what comes later is still to be read.
        self._chain, self._position = chain, min(offset + 1, self.end())
        self._base = BEGINNING if chain.last is None else PointOffset.of(chain.last)

    def _tail(self, start: int, stop: int) -> Chain:
        """Return the chain up to `stop`, having read as little of the end of [start, stop) as tells its last point."""
        window = TAIL
        while True:
            first = max(start, stop - window)
            chain = Chain(first)
            for _ in self._feed(chain, first, stop):
                pass
            if first == start or chain.last is not None:
                return chain
            window *= 8

    def _more(self, stop: int) -> Iterator[Point]:
        assert self._chain is not None
        for point in self._feed(self._chain, self._position, stop):
            if len(self._window) == KEPT_MAX:
                self._base = PointOffset.of(self._window.popleft())
            self._window.append(point)
            yield point

    def _feed(self, chain: Chain, start: int, stop: int) -> Iterator[Point]:
        """Feed a chain, and yield what is valid; whoever stops in the middle can go on there with the same chain."""
        for messages in self._fetcher.read(self._partition, start, stop):
            for message in messages:
                offset = message.offset()
                assert offset is not None
                point = chain.feed(offset, decode(message.value(), offset))
                if chain is self._chain:
                    self._position = offset + 1
                if point is not None:
                    yield replace(point, next={}, topic_ids={})

    def _bound(self, ask: Callable[[list[TopicPartition]], dict[TopicPartition, int]]) -> int:
        if not self._is_there:
            check_there(self._address, self.topics)
            self._is_there = True
        return ask([self._partition])[self._partition]

    def _gone(self, offset: int, start: int) -> DataLoss:
        where = "the beginning" if offset == FROM_THE_BEGINNING else f"offset {offset:,}"
        return DataLoss(
            f"{self._partition.topic} begins at offset {start:,}: the commit points from {where} on were removed.",
            "Begin again with starting=earliest and a new checkpoint, or take a new snapshot.",
        )


def _is_past(place: Lsn | datetime | Earliest | Latest) -> Callable[[Point], bool]:
    """Return what tells whether a point ends after a place."""
    if isinstance(place, Lsn):
        return lambda point: point.end_lsn > place
    assert isinstance(place, datetime)
    limit_us = round(place.timestamp() * 1_000_000)
    return lambda point: point.last_commit_time_us > limit_us
