"""The tail before leaders that the test plays: answers that come in an order in which a node rarely sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from walstream.errors import LogUnfit
from walstream.feed.reading.calls import FetchAnswer, Fetched, Found
from walstream.feed.reading.chunks import Place
from walstream.feed.reading.cursor import LogView
from walstream.feed.reading.entries import Lane, Region
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.resolved import Promise, Promises
from walstream.feed.reading.tail import Tail
from walstream.log.batch import stamp, stamp_append_time
from walstream.log.records import Record, build_batch
from walstream.positions import GlobalLsn, TopicPartition

A = TopicPartition("a", 0)
LANE = Lane("eu", "a", 0, {0: Region(1, 0)})


class Leaders:
    """Nodes, of which one leads everything. A poll is answered when the test says so."""

    def __init__(self) -> None:
        self.leader = 1
        self.polls: dict[int, asyncio.Future[FetchAnswer]] = {}

    def by_leader(self, wanted: Mapping[TopicPartition, Any]) -> dict[int, dict[TopicPartition, Any]]:
        return {self.leader: dict(wanted)}

    async def fetch(self, node: int, *_: object, **__: object) -> FetchAnswer:
        self.polls[node] = asyncio.get_running_loop().create_future()
        return await self.polls[node]

    async def offsets(self, wanted: Iterable[TopicPartition], **_: object) -> dict[TopicPartition, Found]:
        return {one: Found(0, -1, -1) for one in wanted}

    async def refresh_quietly(self) -> None: ...

    def answer(self, node: int, promise: Found, *stamps_ms: int) -> None:
        """Answer a poll with records from offset 0 on, appended at these times, and a promise of what follows."""
        records = bytearray()
        for offset, stamp_ms in enumerate(stamps_ms):
            batch = build_batch([Record(0, 0, b"k", b"v")])
            stamp_append_time(memoryview(batch), stamp_ms)
            stamp(memoryview(batch), offset, 0)
            records += batch
        fetched = Fetched(0, len(stamps_ms), 0, (), bytes(records))
        self.polls.pop(node).set_result(FetchAnswer(0, 0, {A: fetched}, {A: promise}))


class Log:
    """A tail at the end of a log with one partition."""

    def __init__(self) -> None:
        self.leaders = Leaders()
        self.promises = Promises(self.leaders, 100)  # type: ignore[arg-type]
        topics: Any = SimpleNamespace(
            version=1, bound=1 << 127, chosen=lambda _: {A: LANE}, settle_now=lambda: True, note_end=lambda *_: None
        )

        async def seek(lanes: Iterable[TopicPartition], *_: object, **__: object) -> dict[TopicPartition, Place]:
            return dict.fromkeys(lanes, Place(LANE, 0, 0))

        strays = SimpleNamespace(note_clean=lambda *_: None)
        seeking: Any = SimpleNamespace(strays=strays, seek=seek, note=lambda *_: None)
        chunks: Any = None
        client: Any = self.leaders
        view = LogView(client, topics, self.promises, chunks, seeking, ReadingMetrics(), b"eu", lambda: 0)
        self.tail = Tail(view, 0)

    async def polled(self, node: int) -> None:
        """Go on until a poll is on its way to a node."""
        while node not in self.leaders.polls:
            assert await self.tail.step() is None

    async def read(self, end: int) -> list[int]:
        """Go on until everything below an LSN is read; return the LSNs."""
        found: list[int] = []
        async with asyncio.timeout(10):
            while self.tail.position < end:
                frame = await self.tail.step()
                found += frame.lsns if frame is not None else []
        return found


@pytest.fixture
async def log() -> Any:
    log = Log()
    yield log
    await log.tail.close()
    await log.promises.close()


async def test_records_that_two_leaders_send_are_read_once(log: Log) -> None:
    """The old leader still answers the poll that it has, after the new one was asked for the same."""
    await log.polled(1)
    log.leaders.leader = 2
    await log.polled(2)
    for node in (1, 2):
        log.leaders.answer(node, Found(0, 2, 1_500), 1_000, 1_001)
    assert await log.read(GlobalLsn.at_time(1_500)) == [LANE.lsn(0, 1_000), LANE.lsn(1, 1_001)]


async def test_a_late_entry_does_not_break_what_is_promised_behind_it(log: Log) -> None:
    """Only who stands below the promise that was made before may lack the entry."""
    await log.polled(1)
    log.leaders.answer(1, Found(0, 0, 1_000))
    await log.read(GlobalLsn.at_time(1_000))
    await log.polled(1)
    log.leaders.answer(1, Found(0, 1, 5_000), 900)
    with pytest.raises(LogUnfit, match="a-0 has a record"):
        await log.read(GlobalLsn.at_time(5_000))
    assert log.promises.of(A) == Promise(1, 5_000)
    log.promises.check(GlobalLsn.at_time(1_002), {A})
    with pytest.raises(LogUnfit, match="a-0 has a record"):
        log.promises.check(GlobalLsn.at_time(950), {A})
