"""A topic that cannot be in the feed any more: whoever read it is told, and nobody else is disturbed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from confluent_kafka import KafkaException

from walstream.feed.reading import topics

from .clients import configure_topic, create_topic
from .feed_processes import create_feed_topic, write
from .support import MakeNode
from .test_feed_retention import read_on, running, subscribe


async def read_into(call: Any, responses: list[str]) -> None:
    """Read until the stream ends."""
    while True:
        responses.append(str(await call.read()))


async def test_a_topic_that_loses_its_append_time(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records without an append time have no LSNs: to leave them out in silence would be the one thing never done."""
    monkeypatch.setattr(topics, "REFRESH_S", 0.2)
    monkeypatch.setattr(topics, "RECHECK_S", 0.0)
    node = make_node()
    for topic in ("orders", "users"):
        create_feed_topic(node, topic)
        write(node, topic, [b"1"])
    async with running(node, tmp_path, heartbeat_ms=100) as (feed, keys, channel):
        everything = subscribe(channel, keys, "everything", start_lsn="oldest")
        orders = subscribe(channel, keys, "orders", start_lsn="oldest", topics=["orders"])
        users = subscribe(channel, keys, "users", start_lsn="oldest", topics=["users"])
        tenants = subscribe(channel, keys, "ann", "acme", start_lsn="oldest")
        for call in (everything, orders, users, tenants):
            await call.read()
        await feed.retention.look()
        with pytest.raises(KafkaException, match="orders is held by a feed"):
            await asyncio.to_thread(configure_topic, node.address, "orders", message_timestamp_type="CreateTime")
        # Somebody decides to go on without the feed: to end its hold is an act of its own.
        await asyncio.to_thread(configure_topic, node.address, "orders", walstream_hold_from_ms=-1)
        await asyncio.to_thread(configure_topic, node.address, "orders", message_timestamp_type="CreateTime")
        for call in (everything, orders):
            with pytest.raises(grpc.aio.AioRpcError, match="orders has no append time any more") as caught:
                await asyncio.wait_for(read_on(call), 60)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        responses: list[str] = []
        with pytest.raises(grpc.aio.AioRpcError, match="A topic has no append time any more") as caught:
            await asyncio.wait_for(read_into(tenants, responses), 60)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        told = f"{responses} {caught.value.details()} {caught.value.trailing_metadata()}"
        assert "orders" not in told, "which topics there are is not for tenants to know"
        await asyncio.to_thread(write, node, "users", [b"2"])
        async with asyncio.timeout(60):
            while not (entries := (await users.read()).batch.entries):
                pass
        assert [entry.value for entry in entries] == [b"2"]
        again = subscribe(channel, keys, "again", start_lsn="oldest")
        assert {entry.topic for entry in (await again.read()).batch.entries} == {"users"}
        for call in (users, again):
            call.cancel()


async def test_who_names_a_topic_that_cannot_be_in_the_feed(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An admin is told, at once or when the topic is made; a tenant could try out names, and waits in vain."""
    monkeypatch.setattr(topics, "REFRESH_S", 0.2)
    node = make_node()
    create_topic(node.address, "orders")
    async with running(node, tmp_path, heartbeat_ms=100) as (_, keys, channel):

        async def told(call: Any, topic: str) -> None:
            with pytest.raises(grpc.aio.AioRpcError, match=f"{topic} has no append time, so") as caught:
                await asyncio.wait_for(read_on(call), 30)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

        await told(subscribe(channel, keys, "root", topics=["users", "orders"]), "orders")
        tenants = subscribe(channel, keys, "ann", "acme", topics=["orders"])
        early = subscribe(channel, keys, "early", topics=["users"])
        for call in (tenants, early):
            assert (await call.read()).WhichOneof("payload") == "heartbeat"
        await asyncio.to_thread(create_topic, node.address, "users")
        await told(early, "users")
        for _ in range(5):
            assert (await tenants.read()).WhichOneof("payload") == "heartbeat"
        await asyncio.to_thread(configure_topic, node.address, "orders", message_timestamp_type="LogAppendTime")
        await asyncio.to_thread(write, node, "orders", [b"1"])
        again = subscribe(channel, keys, "root", topics=["orders"], start_lsn="oldest")
        assert [entry.value for entry in (await again.read()).batch.entries] == [b"1"], "it is looked at again"
        for call in (tenants, again):
            call.cancel()
