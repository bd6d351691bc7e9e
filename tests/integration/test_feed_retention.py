"""What the log keeps for subscribers: below what is there a start is refused, and who holds back too much is ended."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from walstream import config as configuration
from walstream.errors import LsnNotAvailable
from walstream.feed import Client, wal_pb2
from walstream.feed.auth.tokens import LocalKeys, Wish
from walstream.feed.service import retention
from walstream.feed.service.server import Feed
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

from .feed_processes import MakeFeed, create_feed_topic, write
from .support import MakeNode, wait_for

HOUR_MS = 3_600_000


def delete_before(node: NodeProcess, topic: str, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": node.address})
    for future in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        future.result(30)


def settings_of(node: NodeProcess, topic: str) -> dict[str, str]:
    admin = AdminClient({"bootstrap.servers": node.address})
    [future] = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    return {name: entry.value for name, entry in future.result(30).items()}


def test_a_start_below_what_is_there(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    create_feed_topic(node, "orders")
    create_feed_topic(node, "untouched")
    for number in range(10):
        write(node, "orders", [b"%d" % number])
        write(node, "untouched", [b"x"])
    feed = make_feed(node)
    with feed.client() as client:
        assert client.lsn().oldest == 0
        entries = list(itertools.islice(client.subscribe("oldest"), 20))
        orders = [entry for entry in entries if entry.topic == "orders"]
        client.ack(orders[2].lsn, "slow")
        delete_before(node, "orders", 6)
        oldest = wait_for(lambda: client.lsn().oldest, "the feed sees it", 20, 0.2)
        assert oldest <= orders[6].lsn
        assert oldest > orders[5].lsn
        words = (
            f"lsn_not_available: start_lsn={orders[3].lsn} older than oldest_lsn={oldest}; "
            f"perform a base snapshot and restart from head_lsn={entries[-1].lsn}"
        )
        with pytest.raises(LsnNotAvailable) as caught:
            next(iter(client.subscribe(orders[3].lsn)))
        assert caught.value.message.startswith(words)
        assert (caught.value.oldest, caught.value.head) == (oldest, entries[-1].lsn)
        with pytest.raises(LsnNotAvailable):
            next(iter(client.subscribe(subscriber_id="slow")))
        rest = [entry for entry in entries if entry.lsn >= oldest]
        assert list(itertools.islice(client.subscribe("oldest"), len(rest))) == rest
        assert list(itertools.islice(client.subscribe(orders[6].lsn), 1)) == [orders[6]]


@asynccontextmanager
async def running(
    node: NodeProcess, folder: Path, **settings: object
) -> AsyncIterator[tuple[Feed, LocalKeys, grpc.aio.Channel]]:
    """A feed in this process, whose retention can be made to look at once, and a channel to it."""
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    keys = LocalKeys(folder / "key.pem")
    keys.mint(Wish("root", "admin"), configuration.FeedAuthConfig(), time.time())
    given = {"feed.port": "0", "feed.auth.jwks": str(keys.jwks), "capture.bootstrap": node.address}
    given |= {f"feed.{name}": str(value) for name, value in settings.items()}
    feed = Feed(configuration.load(None, {}, given).config)
    try:
        await feed.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{feed.port}") as channel:
            yield feed, keys, channel
    finally:
        await feed.stop()


def metadata(keys: LocalKeys, subject: str, tenant: str = "") -> tuple[tuple[str, str], ...]:
    wish = Wish(subject, "replication", tenant) if tenant else Wish(subject, "admin")
    token, _ = keys.mint(wish, configuration.FeedAuthConfig(), time.time())
    return (("authorization", f"Bearer {token}"),)


def subscribe(channel: grpc.aio.Channel, keys: LocalKeys, subject: str, tenant: str = "", **request: Any) -> Any:
    call = channel.unary_stream(
        "/kdb.wal.v1.WalStream/Subscribe",
        request_serializer=wal_pb2.SubscribeRequest.SerializeToString,
        response_deserializer=wal_pb2.WalResponse.FromString,
    )
    return call(wal_pb2.SubscribeRequest(**request), metadata=metadata(keys, subject, tenant))


async def test_the_log_is_told_from_when_on_to_keep(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1", b"2", b"3"])
    async with running(node, tmp_path, retention_bytes_max=5_000_000) as (feed, keys, channel):
        await feed.retention.look()
        told = settings_of(node, "orders")
        now = time.time() * 1000
        assert abs(int(told["walstream.hold.from.ms"]) - (now - HOUR_MS)) < 60_000
        assert told["walstream.hold.bytes.max"] == "5000000"
        call = subscribe(channel, keys, "slow", start_lsn="oldest", credit_entries=1)
        first = (await call.read()).batch.entries[0]
        stamp = GlobalLsn.parse(first.lsn).time_ms
        # Time passes: what the slow one has not acknowledged is kept beyond the hour.
        later = stamp + 5 * HOUR_MS
        slowest = feed.marks.watermark(later)
        assert slowest == GlobalLsn.parse(first.lsn)
        assert retention.safe_point_ms(later, 60, slowest) == stamp - retention.MARGIN_MS
        assert retention.safe_point_ms(later, 60, None) == later - HOUR_MS
        call.cancel()


async def test_who_holds_back_too_much_is_ended_by_name(
    make_node: MakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"x" * 1000] * 4000)
    async with running(node, tmp_path, retention_bytes_max=1024 * 1024) as (feed, keys, channel):
        slow = subscribe(channel, keys, "sluggard", start_lsn="oldest", credit_entries=10)
        await slow.read()
        quick = subscribe(channel, keys, "quick", start_lsn="head", accept_watermarks=True)
        await asyncio.sleep(0.5)
        before = feed.marks.watermark(int(time.time() * 1000))
        await feed.retention.look()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_on(slow), 20)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "subscriber_lapsed: sluggard is" in (caught.value.details() or "")
        assert feed.retention.lapsed == 1
        after = feed.marks.watermark(int(time.time() * 1000))
        assert before is not None
        assert after is not None
        assert after > before, "it counts no more"
        assert len(feed.service.streams) == 1, "the other one goes on"
        quick.cancel()
    said = capsys.readouterr().out
    assert "subscriber lost its place" in said
    assert "sluggard" in said


async def test_a_quiet_tenant_keeps_its_place(make_node: MakeNode, tmp_path: Path) -> None:
    """Much happens to others; whoever has acknowledged its own few entries holds nothing back and loses nothing."""
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"mine"], tenant="acme")
    async with running(node, tmp_path, retention_bytes_max=1024 * 1024, heartbeat_ms=100) as (feed, keys, channel):
        quiet = subscribe(channel, keys, "quiet", start_lsn="oldest", tenant_filter="acme")
        # On a slow machine a heartbeat comes first.
        while not (mine := (await quiet.read()).batch.last_lsn):
            pass
        ack = channel.unary_unary(
            "/kdb.wal.v1.WalStream/Ack",
            request_serializer=wal_pb2.AckRequest.SerializeToString,
            response_deserializer=wal_pb2.AckResponse.FromString,
        )
        await ack(wal_pb2.AckRequest(ack_lsn=mine), metadata=metadata(keys, "quiet"))
        # In pieces below the limit: while a slow machine has the feed itself behind by more, who waits for it is, too.
        for _ in range(8):
            await asyncio.to_thread(write, node, "orders", [b"x" * 1000] * 500, tenant="other")
            async with asyncio.timeout(30):
                while (await quiet.read()).heartbeat.resolved_lsn < str(GlobalLsn(feed.reading.head())):
                    pass
        await feed.retention.look()
        assert feed.retention.lapsed == 0
        assert feed.service.streams
        quiet.cancel()
    # What it has acknowledged is removed; it comes back with nothing but its name.
    await asyncio.to_thread(delete_before, node, "orders", 3000)
    await asyncio.to_thread(write, node, "orders", [b"mine again"], tenant="acme")
    async with running(node, tmp_path, heartbeat_ms=100) as (_, _, channel):
        again = subscribe(channel, keys, "quiet", tenant_filter="acme")
        async with asyncio.timeout(30):
            while not (entries := (await again.read()).batch.entries):
                pass
        assert [entry.value for entry in entries] == [b"mine again"]
        again.cancel()


async def test_what_was_there_before_the_feed_started_is_not_counted_against_all(
    make_node: MakeNode, tmp_path: Path
) -> None:
    """A log that is larger than anybody may hold back: whoever is at its end holds back what is behind it, no more."""
    node = make_node()
    create_feed_topic(node, "orders", 2)
    write(node, "orders", [b"x" * 1000] * 4000)
    write(node, "orders", [b"x" * 1000] * 10, partition=1)
    async with running(node, tmp_path, retention_bytes_max=1024 * 1024) as (feed, keys, channel):
        last = feed.reading.head()
        near = subscribe(channel, keys, "near", start_lsn=str(GlobalLsn(last - 5)), credit_entries=1)
        end = subscribe(channel, keys, "at-the-end", start_lsn=str(GlobalLsn(last + 1)), credit_entries=1)
        far = subscribe(channel, keys, "far", start_lsn="oldest", credit_entries=1)
        await near.read()
        await far.read()
        await asyncio.to_thread(write, node, "orders", [b"y" * 1000] * 10)
        await end.read()
        assert 10 <= await feed.reading.entries_behind(last + 1) <= 11
        assert 10 <= await feed.reading.entries_behind(last - 5) <= 30
        assert await feed.reading.entries_behind(1) == 4020
        await feed.retention.look()
        left = {str(stream.demand.subscriber) for stream in feed.service.streams.values()}
        assert left == {"near", "at-the-end"}
        assert feed.retention.lapsed == 1
        for call in (near, end, far):
            call.cancel()


async def read_on(call: Any) -> None:
    """Read until the stream ends with an error."""
    while True:
        await call.read()


async def test_a_log_that_knows_no_holds_is_told_of_once(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retention, "HOLD_FROM", "walstream.hold.nobody.knows")
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1"])
    async with running(node, tmp_path) as (feed, _, _):
        for _ in range(3):
            await feed.retention.look()
    said = capsys.readouterr().out
    assert said.count("the log cannot keep entries for slow subscribers") == 1
    assert "retention.ms" in said
    assert str(2 * HOUR_MS) in said


async def test_who_is_here_is_told_to_other_feeds(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1", b"2"])
    async with running(node, tmp_path / "one") as (one, keys, channel), running(node, tmp_path / "two") as (two, _, _):
        call = subscribe(channel, keys, "never-acks", start_lsn="oldest", credit_entries=1)
        first = (await call.read()).batch.entries[0]
        await one.retention.look()
        for _ in range(500):
            if two.marks.watermark(int(time.time() * 1000)) is not None:
                break
            await asyncio.sleep(0.02)
        assert two.marks.watermark(int(time.time() * 1000)) == GlobalLsn.parse(first.lsn)
        call.cancel()


def test_two_feeds_of_one_log(make_node: MakeNode, make_feed: MakeFeed) -> None:
    """They send the same, and an acknowledgement at one gives credit at the other."""
    node = make_node()
    create_feed_topic(node, "orders", 2)
    for number in range(40):
        write(node, "orders", [b"%d" % number], partition=number % 2)
    one = make_feed(node)
    two = make_feed(node, share=one)
    token = one.token("ann", "admin")
    with Client(one.address, token=token) as first, Client(two.address, token=token) as second:
        entries = list(itertools.islice(first.subscribe("oldest"), 40))
        assert list(itertools.islice(second.subscribe("oldest"), 40)) == entries
        with second.subscribe("oldest", credit=10, reconnect=False) as stream:
            received = iter(stream)
            for number in range(40):
                if number and number % 10 == 0:
                    first.ack(entries[number - 1].lsn)
                assert next(received) == entries[number]
        first.ack(entries[30].lsn)
        assert wait_for(lambda: second.lsn().watermark == entries[30].lsn, "the other one knows", 10)
        assert next(iter(second.subscribe())) == entries[30]


def test_a_feed_that_is_stopped_tells_where_to_resume(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1", b"2", b"3"])
    feed = make_feed(node)
    metadata = (("authorization", f"Bearer {feed.token('ann', 'admin')}"),)
    with grpc.insecure_channel(feed.address) as channel:
        call = channel.unary_stream(
            "/kdb.wal.v1.WalStream/Subscribe",
            wal_pb2.SubscribeRequest.SerializeToString,
            wal_pb2.WalResponse.FromString,
        )
        stream = call(wal_pb2.SubscribeRequest(start_lsn="oldest"), metadata=metadata)
        batch = next(stream).batch
        assert feed.stop() == 0
        assert next(stream).error == "feed_stopping: the feed is being stopped"
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    resume = dict(error.trailing_metadata())["walstream-resume-lsn"]
    assert GlobalLsn.parse(resume) == GlobalLsn.parse(batch.last_lsn).next()
    feed.start()
    write(node, "orders", [b"4"])
    with feed.client() as client:
        assert next(iter(client.subscribe(resume))).value == b"4"


def test_a_feed_without_a_log_says_so(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    feed = make_feed(node, start=False)
    node.kill()
    feed.port = feed.http_port = 1
    feed.spawn()
    assert feed.wait(90) == 3, feed.log_tail()
    last = feed.log_text().splitlines()
    assert any("cannot be reached" in line or "No node" in line or "not answer" in line for line in last), last
    assert not [line for line in last if line.startswith("{") and json.loads(line)["level"] == "error"]
