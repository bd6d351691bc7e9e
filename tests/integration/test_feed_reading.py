"""The feed's reading side against a real node: one order, nothing missing, nothing twice, whatever happens."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from feed.memory import until
from integration.clients import admin_of, configure_topic, create_topic
from integration.support import MakeNode, rounds, seeded
from integration.written_log import (
    Writers,
    delete_records,
    entries_of,
    everything,
    lsns_of,
    make_topic,
    places_of,
    produce,
    read_count,
    read_for,
    reading,
)
from walstream.errors import LogUnfit, LsnNotAvailable, UnknownTopic, UnreachableError, UsageError
from walstream.feed.reading.calls import RESOLVED, Found
from walstream.feed.reading.frames import Filter, Frame, FrameSource
from walstream.feed.reading.log_client import LogClient
from walstream.feed.reading.reading import Reading
from walstream.feed.reading.tail import Tail
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn, TopicPartition

MIB = 1024 * 1024
QUIET_S = 1.5


def assert_ascending(lsns: list[int]) -> None:
    assert all(before < after for before, after in pairwise(lsns))


class Follower:
    """A subscriber that reads at its own pace and remembers what it got."""

    def __init__(self, start: int, source: FrameSource, pause_s: float) -> None:
        self.start = start
        self.frames: list[Frame] = []
        self._source = source
        self._pause_s = pause_s
        self._last = 1 << 128
        self._task = asyncio.create_task(self._run())
        self.was_live = False

    async def _run(self) -> None:
        while self._source.position <= self._last:
            frame = await self._source.next(0.5)
            self.was_live = self.was_live or self._source.is_live
            if frame is not None:
                self.frames.append(frame)
                await asyncio.sleep(self._pause_s)

    async def finish(self, last: int) -> list[int]:
        """Read up to an LSN, quickly now."""
        self._pause_s = 0
        self._last = last
        await asyncio.wait_for(self._task, 60)
        await self._source.close()
        return lsns_of(self.frames)


async def test_the_tail_outlives_what_nobody_foresaw(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in it must not end as silence: subscribers would wait for ever, and be told that all is well."""
    node = make_node()
    make_topic(node.address, "orders", 1)
    produce(node.address, "orders", [b"before"] * 10)
    async with reading(node.address) as log:
        follower = Follower(0, await log.subscribe(0), 0)
        step, bugs = Tail.step, iter(range(3))

        async def spoilt(tail: Tail) -> Frame | None:
            if next(bugs, None) is not None:
                raise KeyError("what nobody foresaw")
            return await step(tail)

        monkeypatch.setattr(Tail, "step", spoilt)
        failures = set()
        for _ in range(600):
            failures.add(log.failure)
            if len(failures) > 1 and not log.failure:
                break
            await asyncio.sleep(0.05)
        assert "The feed failed: KeyError." in failures
        produce(node.address, "orders", [b"after"] * 10)
        (last,) = lsns_of(await read_count(await log.subscribe(0), 20))[-1:]
        assert len(await follower.finish(last)) == 20


@pytest.mark.parametrize("number", range(rounds(5, 1)))
async def test_everybody_sees_one_order_while_the_node_is_killed(make_node: MakeNode, number: int) -> None:
    seed, dice = seeded()
    node = make_node()
    topics = {"orders": 3, "users": 1, "events": 2}
    for topic, partitions in topics.items():
        make_topic(node.address, topic, partitions)
    writers = Writers(node.address, topics, seed).start()
    async with reading(node.address, window_bytes_max=MIB) as log:
        first = Follower(0, await log.subscribe(0), 0)
        followers = [first]
        for step in range(12):
            await asyncio.sleep(0.4)
            seen = lsns_of(first.frames)
            near = [dice.choice(seen) + dice.choice([-1, 0, 1]) for _ in range(6) if seen]
            start = dice.choice([0, log.head(), *near])
            followers.append(Follower(start, await log.subscribe(start), dice.choice([0, 0, 0.05, 0.3])))
            if step in (4, 8):
                node.kill()
                await asyncio.sleep(0.5)
                node.start()
        late = {"late": 2}
        make_topic(node.address, "late", 2)
        writers.topics |= late
        await until(lambda: any(topic == "late" for topic, _, _ in places_of(first.frames[-100:])), 30)
        await writers.stop()
        wanted = await asyncio.to_thread(everything, node.address, topics | late)
        reference = await log.subscribe(0)
        frames = await read_count(reference, len(wanted))
        lsns, places = lsns_of(frames), places_of(frames)
        assert len(places) == len(wanted)
        assert set(places) == wanted
        assert any(topic == "late" for topic, _, _ in places)
        assert_ascending(lsns)
        for follower in followers:
            assert await follower.finish(lsns[-1]) == [lsn for lsn in lsns if lsn >= follower.start]
        assert places_of(first.frames) == places
        assert any(follower.was_live for follower in followers)
        assert log.head() == lsns[-1]
        await reference.close()


async def test_who_falls_behind_the_window_reads_from_disk_until_it_is_back(make_node: MakeNode) -> None:
    node = make_node()
    make_topic(node.address, "orders", 2)
    async with reading(node.address, window_bytes_max=MIB) as log:
        slow, quick = await log.subscribe(0), await log.subscribe(0)
        produce(node.address, "orders", [b"first"])
        frames = await read_count(slow, 1)
        assert slow.is_live
        for partition in (0, 1):
            produce(node.address, "orders", [b"%01000d" % number for number in range(3_000)], partition=partition)
        reference = await read_count(quick, 6_001)
        assert log.metrics.window_bytes < 2 * MIB
        frame = await slow.next(10)
        assert not slow.is_live
        frames += [frame] if frame is not None else []
        frames += await read_count(slow, 6_001 - sum(map(len, frames)))
        assert lsns_of(frames) == lsns_of(reference)
        assert_ascending(lsns_of(frames))
        produce(node.address, "orders", [b"last"])
        assert lsns_of(await read_count(slow, 1)) == lsns_of(await read_count(quick, 1))
        assert slow.is_live


async def test_two_feeds_give_the_same_lsns(make_node: MakeNode) -> None:
    node = make_node()
    for name in ("a", "b", "c"):
        make_topic(node.address, name, 2)
        produce(node.address, name, [b"%d" % n for n in range(50)], partition=1)
    async with asyncio.timeout(60):
        first, second = await asyncio.gather(*(Reading.open(*_opening(node)) for _ in range(2)))
        try:
            make_topic(node.address, "d", 2)
            produce(node.address, "d", [b"x"] * 10)
            produce(node.address, "a", [b"y"] * 10)
            sources = [await log.subscribe(0) for log in (first, second)]
            one, other = await asyncio.gather(*(read_count(source, 170) for source in sources))
            assert list(zip(lsns_of(one), places_of(one), strict=True)) == list(
                zip(lsns_of(other), places_of(other), strict=True)
            )
            assert_ascending(lsns_of(one))
        finally:
            await first.close()
            await second.close()
    async with reading(node.address) as third:
        again = await read_count(await third.subscribe(0), 170)
        assert encoded_of(again) == encoded_of(one)


def encoded_of(frames: list[Frame]) -> list[bytes]:
    return [entry for frame in frames for entry in frame.encoded]


async def read_into(frames: list[Frame], source: FrameSource) -> None:
    while (frame := await source.next(QUIET_S)) is not None:
        frames.append(frame)


def _opening(node: NodeProcess) -> tuple[object, object]:
    from walstream.capture.kafka import LogAddress
    from walstream.config import FeedConfig

    return LogAddress(node.address), FeedConfig()


async def test_what_is_older_than_a_topics_place_in_the_feed_comes_when_it_joins(make_node: MakeNode) -> None:
    """A topic that gets append time late was written to long before: nobody has seen it, so it is new to everybody."""
    node = make_node()
    make_topic(node.address, "orders")
    create_topic(node.address, "old")
    produce(node.address, "old", [b"%d" % n for n in range(30)])
    async with reading(node.address) as log:
        source = await log.subscribe(0)
        produce(node.address, "orders", [b"x"] * 5)
        before = await read_count(source, 5)
        assert log.topics() == ["orders"]
        configure_topic(node.address, "old", message_timestamp_type="LogAppendTime")
        produce(node.address, "old", [b"new"] * 5)
        after = await read_count(source, 35)
        assert_ascending(lsns_of([*before, *after]))
        assert sorted(places_of(after)) == [("old", 0, offset) for offset in range(35)]
        late = await log.subscribe(lsns_of(before)[-1] + 1)
        assert lsns_of(await read_count(late, 35)) == lsns_of(after)


async def test_partitions_that_are_added_join(make_node: MakeNode) -> None:
    from confluent_kafka.cimpl import NewPartitions

    node = make_node()
    make_topic(node.address, "orders")
    async with reading(node.address) as log:
        source = await log.subscribe(0)
        produce(node.address, "orders", [b"x"] * 5)
        frames = await read_count(source, 5)
        admin = admin_of(node.address)
        admin.create_partitions([NewPartitions("orders", 3)])["orders"].result(30)
        for partition in range(3):
            produce(node.address, "orders", [b"y"] * 5, partition=partition)
        frames += await read_count(source, 15)
        assert_ascending(lsns_of(frames))
        assert len(set(places_of(frames))) == 20


async def test_a_topic_that_is_deleted_holds_up_nobody_and_made_anew_is_another(make_node: MakeNode) -> None:
    node = make_node()
    for topic in ("orders", "users"):
        make_topic(node.address, topic)
        produce(node.address, topic, [b"x"] * 5)
    async with reading(node.address) as log:
        live, late = await log.subscribe(0), await log.subscribe(0)
        frames = await read_count(live, 10)
        admin = admin_of(node.address)
        admin.delete_topics(["orders"])["orders"].result(30)
        produce(node.address, "users", [b"y"] * 5)
        frames += await read_count(live, 5)
        assert len(set(places_of(await read_for(late, QUIET_S)))) >= 10
        make_topic(node.address, "orders")
        produce(node.address, "orders", [b"z"] * 5)
        again = await read_count(live, 5)
        assert places_of(again) == [("orders", 0, offset) for offset in range(5)]
        assert [entry.value for entry in entries_of(again)] == [b"z"] * 5
        assert_ascending(lsns_of([*frames, *again]))
        regions = {GlobalLsn(lsn).region for lsn in lsns_of([*frames, *again])}
        assert len(regions) == 3


async def test_removed_records_are_never_passed_over(make_node: MakeNode) -> None:
    node = make_node(log__segment_bytes=65_536)
    make_topic(node.address, "orders")
    make_topic(node.address, "users")
    produce(node.address, "orders", [b"%0500d" % n for n in range(20_000)], **{"batch.num.messages": 50})
    produce(node.address, "users", [b"x"] * 10)
    async with reading(node.address) as log:
        assert await log.oldest() == 0
        reference = await read_count(await log.subscribe(0), 20_010)
    by_place = dict(zip(places_of(reference), lsns_of(reference), strict=True))
    # Another one, which has nothing of this in its cache.
    async with reading(node.address, window_bytes_max=MIB) as log:
        cursor, users = await log.subscribe(0), await log.subscribe(0, ("users",))
        read = await read_count(cursor, 1)
        delete_records(node.address, "orders", 15_000)
        oldest = by_place["orders", 0, 15_000]
        with pytest.raises(LsnNotAvailable) as told:
            await read_into(read, cursor)
        assert_ascending(lsns_of(read))
        assert lsns_of(read) == lsns_of(reference)[: len(lsns_of(read))], "until then everything came"
        assert str(told.value) == (
            f"lsn_not_available: start_lsn={GlobalLsn(cursor.position)} older than oldest_lsn={GlobalLsn(oldest)}; "
            f"perform a base snapshot and restart from head_lsn={GlobalLsn(log.head())}"
        )
        assert await log.oldest() == oldest
        readers = log._chunks.readers
        for start in (0, oldest - 1):
            with pytest.raises(LsnNotAvailable, match=f"start_lsn={GlobalLsn(start)} older"):
                await log.subscribe(start)
        assert log._chunks.readers == readers, "who is refused does not count among those that read"
        rest = await read_for(await log.subscribe(oldest), QUIET_S)
        assert lsns_of(rest) == [lsn for lsn in lsns_of(reference) if lsn >= oldest]
        assert await log.oldest(("users",)) == 0
        assert len(places_of(await read_count(users, 10))) == 10, "whoever does not read it loses nothing"


async def test_an_empty_partition_sends_nobody_away_who_has_read_it(make_node: MakeNode) -> None:
    node = make_node()
    make_topic(node.address, "orders")
    make_topic(node.address, "users")
    produce(node.address, "orders", [b"x"] * 10)
    async with reading(node.address) as log:
        last = lsns_of(await read_count(await log.subscribe(0), 10))[-1]
        delete_records(node.address, "orders", -1)
        assert await log.oldest() == last + 1
        resumed = await log.subscribe(last + 1)
        produce(node.address, "users", [b"y"])
        produce(node.address, "orders", [b"z"])
        assert places_of(await read_count(resumed, 2)) == [("users", 0, 0), ("orders", 0, 10)]
        with pytest.raises(LsnNotAvailable):
            await log.subscribe(last)


async def test_what_was_read_before_a_restart_is_not_missed_after_it(make_node: MakeNode) -> None:
    """An idle topic whose records have all expired is the common case: who had read them must be able to go on."""
    node = make_node()
    for topic in ("orders", "users"):
        make_topic(node.address, topic)
        produce(node.address, topic, [b"x"] * 10)
    async with reading(node.address) as log:
        last = lsns_of(await read_count(await log.subscribe(0), 20))[-1]
    delete_records(node.address, "orders", -1)
    async with reading(node.address) as log:
        assert 0 < await log.oldest() <= last + 1
        source = await log.subscribe(last + 1)
        produce(node.address, "orders", [b"y"])
        assert places_of(await read_count(source, 1)) == [("orders", 0, 10)]
    produce(node.address, "users", [b"unseen"])
    delete_records(node.address, "users", -1)
    async with reading(node.address) as log:
        with pytest.raises(LsnNotAvailable):
            await log.subscribe(last + 1)
        oldest = await log.oldest()
        assert oldest > log.head(), "nobody read the last record, so nobody can say where it stood"
        source = await log.subscribe(oldest)
        produce(node.address, "users", [b"z"])
        assert places_of(await read_count(source, 1)) == [("users", 0, 11)]


async def test_own_topics_are_read_by_their_exact_name_alone(make_node: MakeNode) -> None:
    node = make_node()
    for name in ("orders", "_own", "shop.commits"):
        make_topic(node.address, name)
        produce(node.address, name, [b"x"] * 3)
    for name in ("shop.schema", "shop.status"):
        create_topic(node.address, name, cleanup_policy="compact")
    async with reading(node.address) as log:
        assert log.topics() == ["orders"]
        for patterns in ((), ("*",), ("_*", "orders"), ("shop.*", "orders")):
            frames = await read_for(await log.subscribe(0, patterns), QUIET_S)
            assert {topic for topic, _, _ in places_of(frames)} == {"orders"}
        source = await log.subscribe(0, ("_own", "shop.commits"))
        assert len(set(places_of(await read_count(source, 6)))) == 6
        produce(node.address, "_own", [b"y"])
        produce(node.address, "orders", [b"y"])
        assert places_of(await read_count(source, 1)) == [("_own", 0, 3)]
        assert source.is_live
        await source.close()
        with pytest.raises(LogUnfit, match=r"shop\.schema has no append time"):
            await log.subscribe(0, ("shop.schema",))
        for number in range(3):
            with pytest.raises(UnknownTopic):
                await log.subscribe(0, (f"_nothing-{number}", "_own"))
        assert log._topics._asked == {"_own", "shop.commits", "shop.schema"}, "names are not remembered for nothing"
        for name in ("_walstream.acks", "_walstream.regions", "_walstream.ends", "__consumer_offsets"):
            with pytest.raises(UsageError, match=r"is never in the feed"):
                await log.subscribe(0, ("orders", name))
        assert log.topics() == ["orders"]


async def test_a_record_larger_than_a_fetch_and_every_compression(make_node: MakeNode) -> None:
    node = make_node()
    make_topic(node.address, "orders", max_message_bytes=16 * MIB)
    wanted = []
    for compression in ("none", "gzip", "snappy", "lz4", "zstd"):
        values = [b"a", random.Random(1).randbytes(3 * MIB), b"b" * 5 * MIB, b"c"]
        settings = {"compression.type": compression, "message.max.bytes": 16 * MIB}
        produce(node.address, "orders", values, **settings)
        wanted += values
    async with reading(node.address) as log:
        frames = await read_count(await log.subscribe(0), len(wanted))
        assert [entry.value for entry in entries_of(frames)] == wanted


async def test_filters_see_what_they_are_for(make_node: MakeNode) -> None:
    node = make_node()
    make_topic(node.address, "orders")
    make_topic(node.address, "users")
    produce(node.address, "orders", [b"x"] * 3)
    produce(node.address, "users", [b"y"] * 2)
    async with reading(node.address, cluster="eu") as log:
        frames = await read_count(await log.subscribe(0), 5)
        chosen = Filter(topics=("ord*",))
        assert sum(len(frame) if (at := chosen.select(frame)) is None else len(at) for frame in frames) == 3
        assert all(match.startswith(b"eu::") for frame in frames for match in frame.matches)
        only = await read_for(await log.subscribe(0, ("users",)), QUIET_S)
        assert sum(map(len, only)) >= 2


async def test_a_log_without_resolved_positions_is_waited_for(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Apache Kafka answers: no time is that late, so there is none."""
    ask = LogClient.offsets

    async def offsets(
        self: LogClient, wanted: dict[TopicPartition, int], line: str = "offsets", *, with_unreadable: bool = False
    ) -> dict[TopicPartition, Found]:
        if RESOLVED in wanted.values():
            return dict.fromkeys(wanted, Found(0, -1, -1))
        return await ask(self, wanted, line, with_unreadable=with_unreadable)

    monkeypatch.setattr(LogClient, "offsets", offsets)
    monkeypatch.setattr("walstream.feed.reading.resolved.OPENING_S", 0.2)
    seed, _ = seeded()
    node = make_node()
    topics = {"orders": 2, "users": 1}
    for topic, partitions in topics.items():
        make_topic(node.address, topic, partitions)
    async with reading(node.address) as log:
        writers = Writers(node.address, topics, seed).start()
        source = await log.subscribe(0)
        frames = await read_count(source, 500)
        await writers.stop()
        wanted = await asyncio.to_thread(everything, node.address, topics)
        frames += await read_count(source, len(wanted) - sum(map(len, frames)))
        assert sorted(places_of(frames)) == sorted(wanted)
        lsns = lsns_of(frames)
        assert all(before < after for before, after in pairwise(lsns))
        assert log.head() == lsns[-1] <= log.resolved()
        again = await read_count(await log.subscribe(lsns[100] + 1), len(lsns) - 101)
        assert lsns_of(again) == lsns[101:]
        await source.close()


async def test_nobody_there() -> None:
    from walstream.capture.kafka import LogAddress
    from walstream.config import FeedConfig

    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1 cannot be reached"):
        await Reading.open(LogAddress("127.0.0.1:1"), FeedConfig())
