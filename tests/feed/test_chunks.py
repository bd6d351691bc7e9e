"""What was read last is kept and counted, also when a leader fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from walstream.errors import UnreachableError
from walstream.feed.reading import chunks as module
from walstream.feed.reading.calls import FetchAnswer, Fetched
from walstream.feed.reading.chunks import Chunks, Place
from walstream.feed.reading.entries import Chunk, Lane, Region
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.positions import TopicPartition

LANES = [Lane("c", "t", number, {0: Region(number + 1, 0)}) for number in (0, 1)]


class TwoLeaders:
    """A client of a log where each partition has a leader of its own, and the first may be away."""

    def __init__(self) -> None:
        self.is_away = False
        self.fetches = 0

    def by_leader(self, wanted: dict[TopicPartition, Any]) -> dict[int, dict[TopicPartition, Any]]:
        return {one.partition: {one: place} for one, place in wanted.items()}

    async def fetch(self, node: int, wanted: dict[TopicPartition, Any], **_: Any) -> FetchAnswer:
        if node == 0 and self.is_away:
            raise UnreachableError("away")
        self.fetches += 1
        await asyncio.sleep(0.01)
        return FetchAnswer(0, 0, {one: Fetched(0, 10, 0, (), b"") for one in wanted}, {})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TwoLeaders:
    async def decode(place: Place, fetched: Fetched, metrics: ReadingMetrics) -> Chunk:
        return Chunk("t", place.offset, place.offset + 1, 0, [1], [b"x" * 1000], [b""])

    monkeypatch.setattr(module, "decode_fetched", decode)
    return TwoLeaders()


def counted(chunks: Chunks) -> int:
    return sum(chunk.size_bytes for chunk in chunks._kept.values())


async def test_what_the_other_leader_told_is_used_when_the_reader_tries_again(client: TwoLeaders) -> None:
    metrics = ReadingMetrics()
    chunks = Chunks(client, metrics)  # type: ignore[arg-type]
    for offset in range(20):
        places = [Place(lane, offset, 0) for lane in LANES]
        client.is_away = True
        with pytest.raises(UnreachableError):
            await chunks.load(places, 1000)
        client.is_away = False
        found = await chunks.load(places, 1000)
        assert all(one.chunk is not None for one in found.values())
    assert client.fetches == 40, "each place was read once"
    assert metrics.cache_bytes == counted(chunks) > 0


async def test_a_chunk_that_is_read_again_is_counted_once(client: TwoLeaders) -> None:
    metrics = ReadingMetrics()
    chunks = Chunks(client, metrics)  # type: ignore[arg-type]
    place = Place(LANES[1], 0, 0)
    for _ in range(3):
        await chunks._loaded(place, Fetched(0, 10, 0, (), b""))
    assert metrics.cache_bytes == counted(chunks) > 0
