"""Promises that ride on polls: live entries wait for no question, wherever the log tells them, and are right anyway."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from integration.replicating import running
from integration.support import MakeNode, seeded
from integration.test_security import USERS, login
from integration.written_log import (
    Writers,
    everything,
    lsns_of,
    make_topic,
    places_of,
    produce,
    read_count,
    reading,
)
from node.running import running_node
from walstream.capture.kafka import LogAddress
from walstream.feed.reading import tail
from walstream.feed.reading.calls import Found
from walstream.feed.reading.frames import FrameSource
from walstream.feed.reading.log_client import LogClient
from walstream.feed.reading.region_topic import REGIONS
from walstream.node.process import NodeProcess
from walstream.positions import TopicPartition

LIST_OFFSETS, FETCH = 2, 1
LIVE = 60
FEW = 10
"""Questions that have other causes: seeking, and what an idle partition of another leader is asked."""


def asked(node: NodeProcess, api: str = "ListOffsets") -> int:
    """How often a node was asked."""
    with urllib.request.urlopen(f"http://127.0.0.1:{node.http_port}/metrics", timeout=10) as page:
        text = page.read().decode()
    found = re.search(rf'^walstream_request_duration_seconds_count{{api="{api}"}} (\S+)$', text, re.MULTILINE)
    return int(float(found[1])) if found else 0


async def write_live(
    source: FrameSource, address: str, topic: str, partitions: Iterable[int] = (0,), count: int = LIVE
) -> list[int]:
    """Write records one by one, each when the one before has come through the feed; return their LSNs."""
    lsns: list[int] = []
    for number in range(count):
        for partition in partitions:
            await asyncio.to_thread(produce, address, topic, [b"%d" % number], partition)
            lsns += lsns_of(await read_count(source, 1))
    assert all(before < after for before, after in pairwise(lsns))
    return lsns


async def test_live_entries_wait_for_no_question(make_node: MakeNode) -> None:
    node = make_node()
    make_topic(node.address, "orders", 2)
    make_topic(node.address, "idle", 3)
    async with reading(node.address) as log:
        source = await log.subscribe(0)
        await write_live(source, node.address, "orders")
        before, polls = asked(node), asked(node, "Fetch")
        lsns = await write_live(source, node.address, "orders", (0, 1))
        assert asked(node) - before <= FEW
        assert asked(node, "Fetch") - polls >= 2 * LIVE
        await asyncio.sleep(2.5)
        assert asked(node) - before <= FEW, "polls that bring no records tell how far everything is known, too"
        assert log.resolved() > lsns[-1]
        await source.close()


async def test_many_partitions_are_asked_when_an_entry_waits(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "RIDES_MAX", 4)
    node = make_node()
    make_topic(node.address, "orders", 5)
    async with reading(node.address) as log:
        source = await log.subscribe(0)
        before = asked(node)
        await write_live(source, node.address, "orders")
        assert asked(node) - before >= LIVE // 2
        await source.close()


async def test_busy_partitions_hold_up_each_other_for_no_longer_than_they_must(make_node: MakeNode) -> None:
    seed, _ = seeded()
    node = make_node()
    topics = {"orders": 4, "users": 2}
    for topic, partitions in topics.items():
        make_topic(node.address, topic, partitions)
    async with reading(node.address) as log:
        source = await log.subscribe(0)
        before, polls = asked(node), asked(node, "Fetch")
        writers = Writers(node.address, topics, seed).start(3)
        frames = await read_count(source, 3_000)
        questions, polls = asked(node) - before, asked(node, "Fetch") - polls
        await writers.stop()
        wanted = await asyncio.to_thread(everything, node.address, topics)
        frames += await read_count(source, len(wanted) - sum(map(len, frames)))
        lsns = lsns_of(frames)
        assert all(earlier < later for earlier, later in pairwise(lsns))
        assert set(places_of(frames)) == wanted
        assert questions < polls, "most entries are settled by the poll that brought them, or by the next"
        await source.close()


async def test_a_node_of_an_older_version_is_asked(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        node.apis = node.apis | {FETCH: replace(node.apis[FETCH], max_version=11)}
        address = f"127.0.0.1:{node.port}"
        await asyncio.to_thread(make_topic, address, "orders", 2)
        async with reading(address) as log:
            source = await log.subscribe(0)
            before = node.metrics.requests[LIST_OFFSETS].count
            await write_live(source, address, "orders")
            assert node.metrics.requests[LIST_OFFSETS].count - before >= LIVE // 2
            await source.close()


async def test_only_leaders_that_have_not_told_are_asked(make_node: MakeNode) -> None:
    with running(make_node, leaders={"there": 2}) as cluster:
        for topic in ("here", "there"):
            await asyncio.to_thread(cluster.create, topic, 2, message_timestamp_type="LogAppendTime")
        async with reading(cluster.address) as log:
            client = log._view.client
            leader = client.leader(TopicPartition("here", 0))
            assert leader == client.leader(REGIONS) != client.leader(TopicPartition("there", 0)) == 2
            source = await log.subscribe(0)
            # A new leader stamps ahead of its clock: what comes first waits for the others to get there.
            for topic in ("here", "there"):
                await write_live(source, cluster.address, topic, count=5)
            before = {number: asked(cluster[number]) for number in (leader, 2)}
            await write_live(source, cluster.address, "here")
            questions = {number: asked(cluster[number]) - count for number, count in before.items()}
            assert questions[leader] <= FEW
            assert questions[2] >= LIVE // 2, "it tells nothing while it has nothing to show"
            await write_live(source, cluster.address, "there", (0, 1))
            await source.close()


async def test_only_who_may_know_a_partition_is_told_of_it(make_node: MakeNode) -> None:
    rules = [
        {"principal": "alice", "kind": "topic", "name": "*", "operations": ["read", "write", "admin"]},
        {"principal": "bob", "kind": "topic", "name": "bobs", "operations": ["read"]},
    ]
    node = make_node(security__users=json.dumps(USERS), security__acls=json.dumps(rules))
    topics = [TopicPartition("bobs", 0), TopicPartition("alices", 0)]

    async def connect(user: str) -> LogClient:
        security = {name: str(value) for name, value in login(node, None, user).items() if name != "bootstrap.servers"}
        return await LogClient.connect(LogAddress(node.address, security))

    alice, bob = await connect("alice"), await connect("bob")
    try:
        for topic, _ in topics:
            await alice.create_topic(topic, 1, {"message.timestamp.type": "LogAppendTime"})
        (number,) = (await alice.refresh())["bobs"].leaders.values()
        everything = (await alice.fetch(number, {}, bytes_max=1, promises_of=tuple(topics))).promised
        assert all(found.offset == 0 and found.timestamp_ms > 0 for found in everything.values())
        told = (await bob.fetch(number, {}, bytes_max=1, promises_of=tuple(topics))).promised
        assert told[topics[0]].timestamp_ms > 0
        assert told[topics[1]] == Found(0, -1, -1)
    finally:
        await alice.close()
        await bob.close()
