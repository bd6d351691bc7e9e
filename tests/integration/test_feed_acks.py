"""Acknowledgements in the log of a real node: durable before they are answered, the same for every feed, never back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from walstream.capture.kafka import LogAddress
from walstream.errors import LogUnfit, UnreachableError
from walstream.feed.service.ack_log import TOPIC, AckLog
from walstream.feed.service.watermarks import Subscriber, Watermarks
from walstream.node.process import NodeProcess

from .clients import create_topic, read_messages
from .support import MakeNode

ANN = Subscriber("replication", "acme", "ann")


@asynccontextmanager
async def feed(
    node: NodeProcess, write_timeout_s: float = 10.0
) -> AsyncIterator[tuple[AckLog, Watermarks, list[Subscriber]]]:
    marks, changed = Watermarks(60_000), []
    acks = AckLog(LogAddress(node.address), marks, changed.append, write_timeout_s=write_timeout_s)
    await acks.open()
    try:
        yield acks, marks, changed
    finally:
        await acks.close()


async def test_an_acknowledgement_is_in_the_log_when_it_is_answered(make_node: MakeNode) -> None:
    node = make_node()
    async with feed(node) as (acks, marks, changed):
        assert await acks.acknowledge(ANN, 100) == 100
        assert [message.key() for message in read_messages(node.address, TOPIC)] == [ANN.key("ack")]
        node.kill()
        node.start()
        assert await acks.acknowledge(ANN, 200) == 200
        assert await acks.acknowledge(ANN, 150) == 200, "never back"
        assert changed.count(ANN) == 2
        assert len(read_messages(node.address, TOPIC)) == 2, "what is known needs no record"
    async with feed(node) as (_, marks, _changed):
        assert marks.acked(ANN) == 200


async def test_feeds_see_each_others_acknowledgements(make_node: MakeNode) -> None:
    node = make_node()
    async with feed(node) as (one, _, _), feed(node) as (_, marks, changed):
        await one.acknowledge(ANN, 7)
        for _ in range(1000):
            if marks.acked(ANN):
                break
            await asyncio.sleep(0.01)
        assert marks.acked(ANN) == 7
        assert changed == [ANN]


async def test_two_feeds_at_once_leave_the_larger_one_last(make_node: MakeNode) -> None:
    node = make_node()
    async with feed(node) as (one, _, _), feed(node) as (two, _, _):
        for number in range(1, 20):
            answers = await asyncio.gather(one.acknowledge(ANN, 10 * number), two.acknowledge(ANN, 10 * number + 5))
            assert max(answers) == answers[1] == 10 * number + 5
            marks = Watermarks(60_000)
            for message in read_messages(node.address, TOPIC):
                marks.fold(message.key(), message.value())
            assert not marks.is_stale(ANN), "compaction keeps the last record, so it must be the largest"


async def test_a_forgotten_subscriber_is_forgotten_everywhere(make_node: MakeNode) -> None:
    node = make_node()
    async with feed(node) as (acks, marks, _):
        await acks.acknowledge(ANN, 7)
        await acks.tell(ANN, 9)
        await acks.forget(ANN)
        assert len(marks) == 0
    async with feed(node) as (_, marks, _):
        assert len(marks) == 0


async def test_a_topic_with_several_partitions_is_refused(make_node: MakeNode) -> None:
    node = make_node()
    create_topic(node.address, TOPIC, partitions=2)
    with pytest.raises(LogUnfit, match="2 partitions"):
        async with feed(node):
            pass


async def test_a_log_that_is_away_is_told(make_node: MakeNode) -> None:
    node = make_node()
    async with feed(node, write_timeout_s=1.0) as (acks, marks, _):
        node.kill()
        with pytest.raises(UnreachableError):
            await acks.acknowledge(ANN, 7)
        assert marks.acked(ANN) == 0
