"""Resolved positions along with a fetch: the bytes, what is told of which partition, and what is refused."""

from __future__ import annotations

import asyncio
import struct
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from kio.schema.fetch.v12 import request as fetch_v12
from kio.schema.list_offsets.v5 import request as list_offsets_v5

from node.running import Client, Connect, batch_of, running_node
from node.test_produce_fetch import put
from walstream.cluster.local import NewTopic
from walstream.errors import MalformedRequest
from walstream.node.api.fetch_wire import RESOLVED_TAG, RESOLVING_MAX, FetchRequest, read_request, write_response
from walstream.node.api.offsets import RESOLVED_TIMESTAMP
from walstream.node.catalogue_changes import change_catalogue
from walstream.node.primitives import Source, write_uvarint
from walstream.node.server import Node

HEAD = struct.pack(">iiiibii", -1, 0, 1, 1 << 20, 0, 0, -1)
NOTHING = b"\x01\x01\x01"
"""No topics to read, none to forget, no rack."""

TAG = b"\x90\x4e"
"""10,000 as a varint."""

NAMED = b"\x03" + b"\x02t\x03" + struct.pack(">ii", 1, 0) + b"\x03no\x02" + struct.pack(">i", 7)
"""Two topics: partitions 1 and 0 of the first, 7 of the second."""


def tagged(field: bytes) -> bytes:
    size = bytearray()
    write_uvarint(size, len(field))
    return b"\x01" + TAG + size + field


def parsed(tags: bytes) -> FetchRequest:
    return read_request(Source(HEAD + NOTHING + tags), 12)


def test_the_bytes_of_a_request() -> None:
    assert RESOLVED_TAG == 10_000
    assert parsed(tagged(NAMED)).resolving == [("t", 1), ("t", 0), ("no", 7)]
    assert parsed(tagged(b"\x01")).resolving == []
    assert parsed(b"\x00").resolving is None
    others = b"\x03\x00\x02id" + TAG + bytes([len(NAMED)]) + NAMED + b"\x91\x4e\x01z"
    assert parsed(others).resolving == [("t", 1), ("t", 0), ("no", 7)], "tags that nobody knows are passed over"


def test_the_bytes_of_a_response() -> None:
    head = bytes(4) + struct.pack(">hi", 0, 5) + b"\x01"
    (plain,) = write_response(12, (), session_id=5)
    assert bytes(plain) == head + b"\x00"
    (told,) = write_response(12, (), session_id=5, resolved=[(8, 1_700_000_000_000), (-1, -1)])
    field = b"\x03" + struct.pack(">qqqq", 8, 1_700_000_000_000, -1, -1)
    assert bytes(told) == head + b"\x01" + TAG + bytes([len(field)]) + field


@pytest.mark.parametrize(
    "tags",
    [
        b"",
        b"\x01",
        tagged(NAMED)[:-1],
        tagged(NAMED[:-1]),
        tagged(NAMED + b"\x00"),
        tagged(b"\x02\x02t\x00"),
        tagged(b"\x02\x02\xff\x01"),
        tagged(b"\xff\xff\xff\xff\x0f"),
    ],
    ids=["missing", "cut", "short", "inner short", "left over", "null array", "not UTF-8", "announced only"],
)
def test_tags_that_make_no_sense_are_malformed(tags: bytes) -> None:
    with pytest.raises(MalformedRequest):
        parsed(tags)


def test_no_more_than_the_bound() -> None:
    def named(count: int) -> bytes:
        length = bytearray()
        write_uvarint(length, count + 1)
        return b"\x02\x02t" + length + b"".join(struct.pack(">i", index) for index in range(count))

    assert len(parsed(tagged(named(RESOLVING_MAX))).resolving or ()) == RESOLVING_MAX
    with pytest.raises(MalformedRequest, match="more than 1000 partitions"):
        parsed(tagged(named(RESOLVING_MAX + 1)))


# On a node


async def topics_of(node: Node) -> None:
    stamped = {"message.timestamp.type": "LogAppendTime"}
    topics = [NewTopic("t", 2, stamped), NewTopic("created", 1, {})]
    await change_catalogue(node.store, partial(node.catalogue.create, topics))


def fetch_frame(topics: bytes, named: bytes, *, wait_ms: int = 0) -> bytes:
    head = struct.pack(">iiiibii", -1, wait_ms, 1, 1 << 20, 0, 0, -1)
    body = struct.pack(">hhih", 1, 12, 9, 4) + b"test\x00" + head + topics + b"\x01\x01" + tagged(named)
    return struct.pack(">i", len(body)) + body


ONE_AND_ZERO = b"\x02\x02t\x03" + struct.pack(">ii", 1, 0)
READ_ZERO = b"\x02\x02t\x02" + struct.pack(">iiqiqi", 0, -1, 0, -1, -1, 1 << 20) + b"\x00\x00"


def positions_in(frame: bytes) -> list[tuple[int, int]]:
    """Read the tag at the end of an answer."""
    at = frame.rindex(b"\x01" + TAG) + 1 + len(TAG)
    size, count = frame[at], frame[at + 1] - 1
    assert at + 1 + size == len(frame)
    return [struct.unpack_from(">qq", frame, at + 2 + 16 * number) for number in range(count)]


async def listed(client: Client, *indexes: int) -> list[tuple[int, int]]:
    """Ask ListOffsets for the same."""
    rows = tuple(
        list_offsets_v5.ListOffsetsPartition(partition_index=index, timestamp=RESOLVED_TIMESTAMP) for index in indexes
    )
    topic = list_offsets_v5.ListOffsetsTopic(name="t", partitions=rows)
    answer = await client.ask(list_offsets_v5.ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=(topic,)))
    return [(row.offset, row.timestamp) for row in answer.topics[0].partitions]


async def test_what_list_offsets_would_tell_comes_with_the_records(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        await topics_of(node)
        client = await connect(node)
        await put(client, {0: batch_of(b"one", b"two")})
        before = await listed(client, 1, 0)
        await client.send(fetch_frame(READ_ZERO, ONE_AND_ZERO))
        frame = await client.receive()
        after = await listed(client, 1, 0)
        assert b"two" in frame
        told = positions_in(frame)
        assert [offset for offset, _ in told] == [0, 2]
        for (_, earlier_ms), (_, told_ms), (_, later_ms) in zip(before, told, after, strict=True):
            assert earlier_ms <= told_ms <= later_ms


async def test_also_when_there_was_nothing_to_read(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        await topics_of(node)
        client, writer = await connect(node), await connect(node)
        began_ms = int(time.time() * 1000)
        await client.send(fetch_frame(READ_ZERO, ONE_AND_ZERO, wait_ms=200))
        (_, time_ms), _ = positions_in(await client.receive())
        assert time_ms >= began_ms + 150, "it is what is over when the answer is made, not when it was asked for"
        await client.send(fetch_frame(READ_ZERO, ONE_AND_ZERO, wait_ms=5_000))
        await asyncio.sleep(0.05)
        await put(writer, {0: batch_of(b"x")})
        frame = await client.receive()
        assert [offset for offset, _ in positions_in(frame)] == [0, 1]


async def test_what_is_not_known_is_said_to_be(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        await topics_of(node)
        client = await connect(node)
        named = b"\x04\x02t\x03" + struct.pack(">ii", 9, 1) + b"\x03no\x02" + struct.pack(">i", 0)
        named += b"\x08created\x02" + struct.pack(">i", 0)
        await client.send(fetch_frame(b"\x01", named))
        missing, known, unknown, without = positions_in(await client.receive())
        assert known[0] == 0
        assert known[1] > 0
        assert {missing, unknown, without} == {(-1, -1)}
        node.store.partition("t", 1).is_leader = False
        await client.send(fetch_frame(b"\x01", named))
        assert set(positions_in(await client.receive())) == {(-1, -1)}


async def test_who_does_not_ask_is_not_told(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        await topics_of(node)
        client = await connect(node)
        await put(client, {0: batch_of(b"x")})
        partition = fetch_v12.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1000)
        topic = fetch_v12.FetchTopic(topic="t", partitions=(partition,))
        request = fetch_v12.FetchRequest(
            replica_id=-1,
            max_wait=timedelta(0),
            min_bytes=1,
            topics=(topic,),
            forgotten_topics_data=(),
        )
        await client.send(client.frame(request))
        frame = await client.receive()
        assert TAG not in frame
        assert bytes(client.read(frame, 1, 12).responses[0].partitions[0].records)


async def test_a_malformed_tag_ends_the_connection(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        await topics_of(node)
        client = await connect(node)
        await client.send(fetch_frame(b"\x01", ONE_AND_ZERO + b"\x00"))
        assert await client.is_closed()
        other = await connect(node)
        assert len(await listed(other, 0)) == 1
