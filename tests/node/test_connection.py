"""Connections: order, pipelining, and what happens to those who are slow, silent, greedy or talk nonsense."""

from __future__ import annotations

import asyncio
import struct
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.api_versions.v0.request import ApiVersionsRequest
from kio.schema.fetch.v11 import request as fetch_v11
from kio.schema.metadata.v1.request import MetadataRequest, MetadataRequestTopic
from kio.schema.produce.v8 import request as produce_v8

from node.running import Connect, batch_of, running_node
from walstream.node.server import Node

API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)


def produce(*partitions: tuple[int, bytes], topic: str = "t", acks: int = 1, timeout_ms: int = 5000) -> Any:
    return produce_v8.ProduceRequest(
        transactional_id=None,
        acks=acks,
        timeout=timedelta(milliseconds=timeout_ms),
        topic_data=(
            produce_v8.TopicProduceData(
                name=topic,
                partition_data=tuple(
                    produce_v8.PartitionProduceData(index=index, records=batch) for index, batch in partitions
                ),
            ),
        ),
    )


def fetch(offset: int = 0, *, wait_ms: int = 5000, bytes_max: int = 1 << 20, topic: str = "t") -> Any:
    return fetch_v11.FetchRequest(
        replica_id=-1,
        max_wait=timedelta(milliseconds=wait_ms),
        min_bytes=1,
        max_bytes=1 << 30,
        topics=(
            fetch_v11.FetchTopic(
                topic=topic,
                partitions=(fetch_v11.FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=bytes_max),),
            ),
        ),
        forgotten_topics_data=(),
    )


def metadata(*names: str) -> Any:
    return MetadataRequest(topics=tuple(MetadataRequestTopic(name=name) for name in names))


async def until_gone(node: Node, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while node.connections:
        assert time.monotonic() < deadline, "a connection is still there"
        await asyncio.sleep(0.01)


async def test_responses_come_in_the_order_of_the_requests(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        await client.ask(metadata("t"))
        requests = [
            produce((0, batch_of(b"one"))),
            produce((0, batch_of(b"two")), (9, batch_of(b"nowhere"))),
            ApiVersionsRequest(),
            produce((0, b"rubbish")),
            metadata("t"),
            produce((0, batch_of(b"three"))),
        ]
        await client.send(b"".join(client.frame(request) for request in requests))
        frames = [await client.receive() for _ in requests]
        assert [struct.unpack_from(">i", frame)[0] for frame in frames] == [2, 3, 4, 5, 6, 7]
        rows = [
            [
                (one.index, int(one.error_code), one.base_offset)
                for one in client.read(frames[n], 0, 8).responses[0].partition_responses
            ]
            for n in (0, 1, 3, 5)
        ]
        assert rows == [[(0, 0, 0)], [(0, 0, 1), (9, 3, -1)], [(0, 2, -1)], [(0, 0, 2)]]
        client.close()


async def test_a_request_may_arrive_byte_by_byte(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        for position in range(len(API_VERSIONS)):
            await client.send(API_VERSIONS[position : position + 1])
            await asyncio.sleep(0.001)
        assert len(await client.receive()) > 50
        client.close()


async def test_produce_without_acks_has_no_response_and_an_error_closes(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        await client.ask(metadata("t"))
        await client.send(client.frame(produce((0, batch_of(b"one")), acks=0)))
        assert len((await client.ask(fetch())).responses[0].partitions[0].records) > 0
        await client.send(client.frame(produce((7, batch_of(b"one")), acks=0)))
        assert await client.is_closed()


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", -5),
        struct.pack(">i", 0),
        struct.pack(">ihhih", 10, 18, 0, 1, 30_000),
        struct.pack(">ihhih", 10, 3333, 0, 1, -1),
        struct.pack(">ihhih", 10, 3, 99, 1, -1),
        struct.pack(">ihhih", 10, 0, 99, 1, -1),
        struct.pack(">ihhih", 10, 0, 3, 1, -1),
        struct.pack(">ihhihi", 14, 3, 1, 1, -1, 2**31 - 1),
    ],
    ids=[
        "huge",
        "negative",
        "empty",
        "long client id",
        "unknown api",
        "unknown version",
        "produce version",
        "short",
        "array",
    ],
)
async def test_nonsense_closes_the_connection_and_nothing_else(tmp_path: Path, connect: Connect, frame: bytes) -> None:
    async with running_node(tmp_path) as node:
        other, client = await connect(node), await connect(node)
        await client.send(frame)
        assert await client.is_closed()
        await other.ask(ApiVersionsRequest())
        client.close()
        other.close()
        await until_gone(node)
        assert node.budget.used_bytes == 0


async def test_an_unknown_version_of_api_versions_is_answered_in_version_0(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        await client.send(struct.pack(">ihhih", 10, 18, 77, 5, -1))
        response = client.read(await client.receive(), 18, 0)
        assert response.error_code == 35
        assert len(response.api_keys) == len(node.apis)
        await client.ask(ApiVersionsRequest())
        client.close()


async def test_a_frame_that_does_not_arrive_in_time_closes(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__request_read_timeout_ms=200) as node:
        client, idle = await connect(node), await connect(node)
        await client.send(struct.pack(">i", 1_000_000) + bytes(1000))
        assert await client.is_closed()
        await idle.ask(ApiVersionsRequest())
        idle.close()


async def test_idle_connections_close_and_waiting_ones_do_not(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__idle_timeout_ms=300) as node:
        idle, waiting = await connect(node), await connect(node)
        await waiting.ask(metadata("t"))
        await waiting.send(waiting.frame(fetch(wait_ms=1200)))
        assert await idle.is_closed()
        await waiting.receive()
        waiting.close()


async def test_connections_beyond_the_limit_are_closed(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__connections_max=2) as node:
        kept = [await connect(node) for _ in range(2)]
        for client in kept:
            await client.ask(ApiVersionsRequest())
        refused = await connect(node)
        assert await refused.is_closed()
        kept[0].close()
        await asyncio.sleep(0.05)
        another = await connect(node)
        await another.ask(ApiVersionsRequest())
        assert node.metrics.connections_refused == 1
        for client in (kept[1], another):
            client.close()


async def test_a_reader_that_does_not_read_is_disconnected_and_its_memory_freed(
    tmp_path: Path, connect: Connect
) -> None:
    async with running_node(tmp_path, limits__response_write_timeout_ms=300) as node:
        writer, stuck = await connect(node), await connect(node)
        await writer.ask(metadata("t"))
        for _ in range(20):
            await writer.ask(produce((0, batch_of(bytes(500_000)))))
        stuck.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(4):
            await stuck.send(stuck.frame(fetch(bytes_max=8_000_000)))
        deadline = time.monotonic() + 5
        while len(node.connections) > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await writer.ask(ApiVersionsRequest())
        assert node.unsent.used_bytes == 0
        writer.close()
        stuck.close()


async def test_reading_stops_while_the_node_holds_as_much_as_it_may(tmp_path: Path, connect: Connect) -> None:
    mib = 1024 * 1024
    limits = {"limits__inflight_bytes_max": 4 * mib, "limits__request_bytes_max": 2 * mib}
    async with running_node(tmp_path, **limits, limits__request_read_timeout_ms=1000) as node:
        greedy = [await connect(node) for _ in range(6)]
        half = struct.pack(">i", 2 * mib) + bytes(mib)
        sends = [asyncio.create_task(client.send(half)) for client in greedy]
        await asyncio.sleep(0.3)
        assert node.budget.used_bytes <= 4 * mib
        assert node.budget.waiting > 0
        polite = await connect(node)
        for _ in range(3):
            await polite.send(API_VERSIONS)
            await polite.receive()
        for client in (*greedy, polite):
            client.close()
        await asyncio.gather(*sends, return_exceptions=True)
        await until_gone(node)
        assert node.budget.used_bytes == 0


async def test_requests_behind_a_long_poll_wait_and_are_answered(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client, other = await connect(node), await connect(node)
        await client.ask(metadata("t"))
        await client.send(client.frame(fetch()) + client.frame(produce((0, batch_of(b"behind")))))
        await asyncio.sleep(0.1)
        assert node.store.partition("t", 0).log_end == 0
        await other.ask(produce((0, batch_of(b"wakes it"))))
        first = client.read(await client.receive(), 1, 11)
        second = client.read(await client.receive(), 0, 8)
        assert len(first.responses[0].partitions[0].records) > 0
        assert second.responses[0].partition_responses[0].base_offset == 1
        client.close()
        other.close()


async def test_a_lost_connection_takes_its_long_poll_along(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        await client.ask(metadata("t"))
        await client.send(client.frame(fetch(wait_ms=60_000)))
        await asyncio.sleep(0.1)
        client.writer.transport.abort()
        await until_gone(node)
        assert node.budget.used_bytes == 0
        assert not node.store.partition("t", 0)._readers


async def test_a_node_that_stops_answers_what_is_in_flight(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        producer, poller = await connect(node), await connect(node)
        await producer.ask(metadata("t"))
        await producer.ask(metadata("u"))
        await poller.send(poller.frame(fetch(wait_ms=60_000, topic="u")))
        await asyncio.sleep(0.05)
        await producer.send(b"".join(producer.frame(produce((0, batch_of(b"x")))) for _ in range(20)))
        await asyncio.sleep(0.05)
        started = time.monotonic()
    assert time.monotonic() - started < 3
    for number in range(20):
        row = producer.read(await producer.receive(), 0, 8).responses[0].partition_responses[0]
        assert (row.error_code, row.base_offset) == (0, number)
    assert await producer.is_closed()
    assert await poller.is_closed()
    producer.close()
    poller.close()
    async with running_node(tmp_path) as node:
        assert node.store.partition("t", 0).high_watermark == 20
