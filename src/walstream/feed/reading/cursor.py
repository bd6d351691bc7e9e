"""A reader at a position: partitions read, merged, and handed out as frames.

Owns one merge and where it goes on in each of its partitions. `Reader` is what all readers have in common: partitions
that join and leave while it reads, and frames out of the merge. `Cursor` reads from disk, through the chunk cache, as
far as it is asked and no further; `tail.Tail` follows the end.

The order of steps keeps the merge right: partitions that have joined are in the merge before its limit is raised past
what they may hold (`topics`), and a promise counts for a partition only when everything before it was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from walstream.errors import (
    LogLost,
    LsnNotAvailable,
    OffsetNotAvailable,
    OffsetOutOfRange,
    UnknownTopic,
    WalstreamError,
)
from walstream.feed.reading.calls import LATEST
from walstream.feed.reading.chunks import Chunks, Loaded, Place, fetch_bytes
from walstream.feed.reading.entries import Chunk, Lane
from walstream.feed.reading.frames import Frame
from walstream.feed.reading.log_client import WAIT_S, LogClient
from walstream.feed.reading.log_errors import passes
from walstream.feed.reading.merge import Late, Merge, Strand, frame_of
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.region_topic import REGIONS
from walstream.feed.reading.resolved import Promises
from walstream.feed.reading.seeking import Removed, Seeking
from walstream.feed.reading.topics import Topics
from walstream.positions import GlobalLsn, TopicPartition

PAUSE_S_MIN: Final = 0.002
PAUSE_S_MAX: Final = 0.05
RETRY_S_MAX: Final = 1.0
LOST_S: Final = 20.0
"""A partition that ends before what was read of it has lost records, if it does for so long."""


@dataclass(frozen=True, slots=True)
class LogView:
    """What all readers of a feed share."""

    client: LogClient
    topics: Topics
    promises: Promises
    chunks: Chunks
    seeking: Seeking
    metrics: ReadingMetrics
    cluster: bytes
    head: Callable[[], int]


class Passed(NamedTuple):
    """A stray that was passed over."""

    offset: int
    start: int
    """The LSN from which on its partition was asked for."""


class Pause:
    """Waits a little longer each time nothing has changed."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._next_s = PAUSE_S_MIN

    def reset(self) -> None:
        """Something has changed."""
        self._next_s = PAUSE_S_MIN

    def take(self) -> float:
        """Return how long to wait now."""
        now_s, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        return now_s


class Reader:
    """A merge over the partitions that a subscriber, or the window, reads."""

    def __init__(self, view: LogView, start: int, patterns: tuple[str, ...] = (), *, is_new: bool = False) -> None:
        """Begin at an LSN. One that is new has never stood there: what came below it meanwhile is not its concern."""
        self._view = view
        self._patterns = patterns
        self._is_new = is_new
        self._known_until: dict[TopicPartition, int] = {}
        """Of one that is new: strays before these offsets were there when it began."""
        self._passed: dict[TopicPartition, Passed] = {}
        """Strays that the merge has passed over since it was last looked whether they are lacking."""
        self._version = -1
        self._retry = Pause(RETRY_S_MAX)
        self._beyond_since_s: dict[TopicPartition, float] = {}
        self.trouble = ""
        """What is waited for: why nothing is read at the moment; empty: all is well."""
        self.merge = Merge(start)
        self.merge.limit = 0
        self.places: dict[TopicPartition, Place] = {}
        self.ends: dict[TopicPartition, int] = {}
        """Where each partition ended when it was last looked at."""

    @property
    def position(self) -> int:
        """Everything below has been handed out."""
        return self.merge.position

    def entries_behind(self) -> int:
        """Return about how many entries are still to be handed out."""
        unread = (max(end - self.places[one].offset, 0) for one, end in self.ends.items() if one in self.places)
        return sum(unread) + self.merge.buffered

    async def step(self) -> Frame | None:
        """Hand out what is settled; without that, do one thing that may help, and return None.

        Raises LsnNotAvailable when something was removed before it was read, and CorruptBatch, LogUnfit and LogLost;
        what passes is waited for.
        """
        try:
            if not await self.join():
                return None
            runs = self.merge.take()
            if runs:
                return frame_of(runs, self._view.cluster, self.merge.position - 1)
            await self._feed()
            await self._check_passed()
            self._retry.reset()
            self.trouble = ""
        except Removed as error:
            raise await self._not_available(error.oldest) from None
        except WalstreamError as error:
            if not passes(error):
                raise
            self.trouble = error.message
            await asyncio.sleep(self._retry.take())
            await self._view.client.refresh_quietly()
            if isinstance(error, UnknownTopic):
                await self._view.topics.refresh_quietly()
        return None

    async def join(self) -> bool:
        """Take in partitions that have joined the feed, let go of those that left; tell whether that is all settled."""
        topics = self._view.topics
        if self._version != topics.version:
            version, chosen = topics.version, topics.chosen(self._patterns)
            for one in [one for one, place in self.places.items() if chosen.get(one) is not place.lane]:
                self.leave(one)
            new = {one: lane for one, lane in chosen.items() if one not in self.places}
            for one in new:
                self.merge.add(one)
            self.places |= await self._find(new)
            self._version = version
        if self._version == topics.version:
            self.merge.limit = topics.bound
            return True
        return False

    def leave(self, partition: TopicPartition) -> None:
        """Let go of a partition."""
        self.merge.remove(partition)
        self.places.pop(partition, None)
        self.ends.pop(partition, None)

    async def close(self) -> None:
        """Read no more."""

    async def _find(self, lanes: dict[TopicPartition, Lane]) -> dict[TopicPartition, Place]:
        is_new, self._is_new = self._is_new, False
        if not lanes:
            return {}
        if is_new:
            ends = await self._view.client.offsets_of_all(dict.fromkeys(lanes, LATEST), WAIT_S)
            self._known_until = {one: end.offset for one, end in ends.items()}
        return await self._view.seeking.seek(lanes, self.merge.position, is_new=is_new)

    async def _feed(self) -> None:
        raise NotImplementedError

    def _take_in(self, partition: TopicPartition, place: Place, loaded: Loaded) -> bool:
        """Add what was read at a place to the merge; return whether that was anything. Raises what went wrong."""
        if self.places.get(partition) != place:
            return False
        if loaded.error is not None:
            raise self._told(partition, place, loaded)
        chunk = loaded.chunk
        self._beyond_since_s.pop(partition, None)
        if loaded.high_watermark >= 0:
            self.ends[partition] = loaded.high_watermark
            self._view.topics.note_end(partition, loaded.high_watermark)
        if chunk is None or chunk.next_offset == place.offset:
            return False
        if chunk.strays:
            self._note_passed(partition, chunk)
        else:
            self._view.seeking.strays.note_clean(place.lane, place.offset, chunk.next_offset)
        try:
            self.merge.push(partition, chunk)
        except Late as late:
            raise self._view.promises.note_broken(partition, late.lsn).error() from None
        if chunk.lsns:
            self._view.seeking.note(place.lane, chunk.next_offset - 1, chunk.lsns[-1])
        self.places[partition] = Place(place.lane, chunk.next_offset, chunk.stamp_ms)
        return True

    def _note_passed(self, partition: TopicPartition, chunk: Chunk) -> None:
        """Take note of the last stray of a chunk that the merge will pass over."""
        least, known_until = self.merge.strands[partition].least, self._known_until.get(partition, 0)
        for place, offset in chunk.strays:
            if chunk.lsns[place] < least and offset >= known_until:
                self._passed[partition] = Passed(offset, least)

    async def _check_passed(self) -> None:
        """Look whether strays that were passed over are lacking. Raises LogUnfit."""
        while self._passed:
            partition, (offset, start) = self._passed.popitem()
            if (place := self.places.get(partition)) is not None:
                await self._view.seeking.strays.check(partition, place.lane, offset, start, self.merge.position)

    def _told(self, partition: TopicPartition, place: Place, loaded: Loaded) -> Exception:
        """Return what an error means to the reader."""
        assert loaded.error is not None
        if not isinstance(loaded.error, OffsetOutOfRange):
            return loaded.error
        if place.offset < loaded.log_start:
            return Removed(0)
        # A new leader may not know yet how far it may let others read.
        now_s = asyncio.get_running_loop().time()
        if now_s < self._beyond_since_s.setdefault(partition, now_s) + LOST_S:
            return OffsetNotAvailable(f"{partition} ends at {loaded.high_watermark} for now, before {place.offset}.")
        fact = f"ends at offset {loaded.high_watermark}, and has been read up to {place.offset}."
        hint = (
            "Records that were streamed are not in the log any more: was it restored, or a leader elected that did not "
            "have them?"
        )
        return LogLost(f"{partition} {fact}", hint).without_names(f"A partition {fact}", hint)

    async def _not_available(self, oldest: int) -> LsnNotAvailable:
        if not oldest:
            oldest = await self._view.seeking.oldest({one: place.lane for one, place in self.places.items()})
        start, head = GlobalLsn(self.merge.position), GlobalLsn(self._view.head())
        return LsnNotAvailable.of(start, GlobalLsn(oldest), head)

    def _raise_bounds(self, strands: Iterable[Strand]) -> None:
        """Apply what is promised about partitions that are read up to where the promise begins."""
        for strand in strands:
            partition = strand.name
            assert isinstance(partition, TopicPartition)
            promise, place = self._view.promises.of(partition), self.places.get(partition)
            if promise is not None and place is not None and promise.offset <= place.offset:
                self.merge.raise_bound(partition, promise.bound)


class Cursor(Reader):
    """Reads from disk. Has no need of the end: it asks for promises only to get past it."""

    def __init__(self, view: LogView, start: int, patterns: tuple[str, ...] = (), *, is_new: bool = False) -> None:
        super().__init__(view, start, patterns, is_new=is_new)
        self._pause = Pause(PAUSE_S_MAX)
        self._is_open = True
        view.chunks.readers += 1

    async def close(self) -> None:
        """Read no more."""
        self._view.chunks.readers -= self._is_open
        self._is_open = False

    async def _feed(self) -> None:
        blocked = self.merge.blocked()
        self._raise_bounds(blocked)
        blocked = self.merge.blocked()
        places = [self.places[one] for one in map(_partition, blocked) if self._has_more(one)]
        if places:
            has_moved = await self._load(places)
        else:
            await self._view.promises.ask([*map(_partition, blocked), REGIONS])
            await self._view.topics.settle()
            if await self.join():
                self._raise_bounds(blocked)
                self.merge.take(0)
            has_moved = self.merge.head() <= self.merge.position
        if has_moved:
            self._pause.reset()
        else:
            wait_s = min(self._view.promises.wait_s(self.merge.head()), PAUSE_S_MAX)
            await asyncio.sleep(max(self._pause.take(), wait_s))

    def _has_more(self, partition: TopicPartition) -> bool:
        promise, offset = self._view.promises.of(partition), self.places[partition].offset
        if promise is not None and promise.offset > offset:
            return True
        return offset < self.ends.get(partition, 1 << 63) if promise is None else False

    async def _load(self, places: list[Place]) -> bool:
        """Read on at these places; return whether anything was there."""
        bytes_each = fetch_bytes(len(self.places), self._view.chunks.readers)
        found = await self._view.chunks.load(places, bytes_each)
        moved, following = False, []
        for place in places:
            partition = TopicPartition(place.lane.topic, place.lane.partition)
            if self._take_in(partition, place, found[partition]):
                moved = True
                if self._has_more(partition):
                    following.append(self.places[partition])
        self._view.chunks.load_ahead(following, bytes_each)
        return moved


def _partition(strand: Strand) -> TopicPartition:
    assert isinstance(strand.name, TopicPartition)
    return strand.name
