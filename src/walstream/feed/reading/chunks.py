"""Chunks from the log: fetched, decoded, and kept for a while for whoever reads the same.

Owns the cache and the fetching from disk; refuses to know the order of partitions. Subscribers that catch up near each
other decode once: a chunk is kept by its lane and first offset, and one that is being read is waited for, not read
twice. The cache is bounded by bytes, the reading by how many fetches run at once, a fetch by its bytes; as in Kafka,
the first batch comes whole, however large it is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

from walstream.errors import WalstreamError
from walstream.feed.reading.calls import Fetched, Wanted
from walstream.feed.reading.entries import Chunk, Lane, decode_steps
from walstream.feed.reading.log_client import LogClient
from walstream.feed.reading.log_errors import error_of
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.positions import TopicPartition

CACHE_BYTES_MAX: Final = 32 * 1024 * 1024
FETCH_BYTES: Final = 512 * 1024
"""What is asked of one partition at a time, when a reader has few."""
FETCH_BYTES_MIN: Final = 16 * 1024
READER_BYTES: Final = 8 * 1024 * 1024
"""What all partitions of a reader together may have buffered, in batches of ordinary size, when it is alone."""
READER_BYTES_MIN: Final = 1024 * 1024
READERS_BYTES: Final = 64 * 1024 * 1024
"""What all readers together may have buffered. Decoded it is half as much again, so a hundred subscribers that catch up
at a hundred places take 150 MB, beside window and cache."""
FETCHES_MAX: Final = 8
LINES: Final = 4
AHEAD_MAX: Final = 4
"""Reading ahead saves a reader from waiting for the log; of many readers there is always one that need not wait."""

Key: TypeAlias = tuple[Lane, int]


class Place(NamedTuple):
    """Where to go on in a partition."""

    lane: Lane
    offset: int
    stamp_ms: int
    """That of the entry before."""


class Loaded(NamedTuple):
    """What was found at a place."""

    chunk: Chunk | None
    high_watermark: int = -1
    """Where the partition ends; -1: not known, the chunk was there already."""
    log_start: int = -1
    error: WalstreamError | None = None


def fetch_bytes(partitions: int, readers: int = 1) -> int:
    """Return how much to ask of each partition, so that a reader of many, or one of many, stays within its bounds."""
    reader_bytes = max(READER_BYTES_MIN, min(READER_BYTES, READERS_BYTES // max(readers, 1)))
    return max(FETCH_BYTES_MIN, min(FETCH_BYTES, reader_bytes // max(partitions, 1)))


async def decode_fetched(place: Place, fetched: Fetched, metrics: ReadingMetrics) -> Chunk:
    """Decode what was fetched, letting others have their turn. Raises CorruptBatch."""
    steps = decode_steps(place.lane, fetched.records, place.offset, place.stamp_ms, fetched.aborted)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            chunk: Chunk = end.value
            metrics.entries_total += len(chunk)
            metrics.bytes_total += len(fetched.records)
            return chunk
        await asyncio.sleep(0)


class Chunks:
    """What was read last, and the reading."""

    def __init__(self, client: LogClient, metrics: ReadingMetrics, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._client = client
        self._metrics = metrics
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Key, Chunk] = OrderedDict()
        self._loading: dict[Key, asyncio.Future[Loaded]] = {}
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._ahead: set[asyncio.Task[None]] = set()
        self._line = 0
        self.readers = 0
        """How many read from disk now."""

    async def load(self, places: Sequence[Place], bytes_each: int) -> dict[TopicPartition, Loaded]:
        """Return what is at these places, each of another partition. Raises UnreachableError.

        A place without records yields an empty chunk, and so does one for which the answer had no room left.
        """
        found: dict[TopicPartition, Loaded] = {}
        waiting: dict[TopicPartition, asyncio.Future[Loaded]] = {}
        own: dict[TopicPartition, Place] = {}
        for place in places:
            partition = TopicPartition(place.lane.topic, place.lane.partition)
            key = (place.lane, place.offset)
            if (chunk := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                found[partition] = Loaded(chunk)
            elif (loading := self._loading.get(key)) is not None:
                waiting[partition] = loading
            else:
                own[partition] = place
        self._metrics.cache_hits_total += len(found) + len(waiting)
        self._metrics.cache_misses_total += len(own)
        if own:
            found |= await self._load(own, bytes_each)
        for partition, loading in waiting.items():
            found[partition] = await asyncio.shield(loading)
        return found

    def load_ahead(self, places: Sequence[Place], bytes_each: int) -> None:
        """Begin to read what will be asked for next, into the cache, if nobody else is waiting to read."""
        if len(self._loading) < AHEAD_MAX and places:
            task = asyncio.create_task(self._load_ahead(places, bytes_each))
            self._ahead.add(task)
            task.add_done_callback(self._ahead.discard)

    async def close(self) -> None:
        """Read no more."""
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)

    async def _load_ahead(self, places: Sequence[Place], bytes_each: int) -> None:
        # What goes wrong is told to whoever reads there.
        with suppress(WalstreamError):
            await self.load(places, bytes_each)

    async def _load(self, own: dict[TopicPartition, Place], bytes_each: int) -> dict[TopicPartition, Loaded]:
        futures: dict[TopicPartition, asyncio.Future[Loaded]] = {}
        for partition, place in own.items():
            futures[partition] = asyncio.get_running_loop().create_future()
            self._loading[place.lane, place.offset] = futures[partition]
        try:
            nodes = self._client.by_leader(own)
            fetches = [self._fetch(node, part, futures, bytes_each) for node, part in nodes.items()]
            # All of them come to an end before one that failed is told: what the others read is kept, and used when the
            # reader tries again; and nothing goes on behind the back of whoever asked for it.
            failures = await asyncio.gather(*fetches, return_exceptions=True)
            for failure in failures:
                if failure is not None:
                    raise failure
            for partition, future in futures.items():
                if not future.done():
                    future.set_result(Loaded(None, error=_leaderless(self._client, partition)))
            return {partition: future.result() for partition, future in futures.items()}
        finally:
            for partition, place in own.items():
                del self._loading[place.lane, place.offset]
                if not futures[partition].done():
                    # Whoever waited for this reader to read tries again itself.
                    futures[partition].set_result(Loaded(None))

    async def _fetch(
        self,
        node: int,
        places: dict[TopicPartition, Place],
        futures: dict[TopicPartition, asyncio.Future[Loaded]],
        bytes_each: int,
    ) -> None:
        wanted = {one: Wanted(place.offset, bytes_each) for one, place in places.items()}
        async with self._fetches:
            self._line = (self._line + 1) % LINES
            answers = await self._client.fetch(node, wanted, bytes_max=READER_BYTES, line=f"disk-{self._line}")
            for partition, fetched in answers.fetched.items():
                futures[partition].set_result(await self._loaded(places[partition], fetched))

    async def _loaded(self, place: Place, fetched: Fetched) -> Loaded:
        if fetched.code:
            return Loaded(None, fetched.high_watermark, fetched.log_start, error_of(fetched.code, str(place.lane)))
        try:
            chunk = await decode_fetched(place, fetched, self._metrics)
        except WalstreamError as error:
            return Loaded(None, fetched.high_watermark, fetched.log_start, error)
        if chunk.next_offset > place.offset:
            self._keep((place.lane, place.offset), chunk)
        return Loaded(chunk, fetched.high_watermark, fetched.log_start)

    def _keep(self, key: Key, chunk: Chunk) -> None:
        if (before := self._kept.pop(key, None)) is not None:
            self._metrics.cache_bytes -= before.size_bytes
        self._kept[key] = chunk
        self._metrics.cache_bytes += chunk.size_bytes
        while self._metrics.cache_bytes > self._bytes_max and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._metrics.cache_bytes -= dropped.size_bytes


def _leaderless(client: LogClient, partition: TopicPartition) -> WalstreamError | None:
    try:
        client.leader(partition)
    except WalstreamError as error:
        return error
    return None
