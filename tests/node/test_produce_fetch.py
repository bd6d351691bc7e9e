"""Produce and Fetch on a real node: what is refused and how, what is waited for, who gets what first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.fetch.v11 import request as fetch_v11
from kio.schema.fetch.v16 import request as fetch_v16
from kio.schema.produce.v8 import request as produce_v8

from node.running import Client, Connect, batch_of, running_node
from walstream.cluster.local import NewTopic
from walstream.log.batch import walk
from walstream.log.records import Record, build_batch
from walstream.node.server import Node


def produce(
    batches: dict[int, bytes],
    *,
    topic: str = "t",
    acks: int = 1,
    timeout_ms: int = 5000,
    transactional_id: str | None = None,
) -> Any:
    rows = tuple(produce_v8.PartitionProduceData(index=index, records=batch) for index, batch in batches.items())
    return produce_v8.ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout=timedelta(milliseconds=timeout_ms),
        topic_data=(produce_v8.TopicProduceData(name=topic, partition_data=rows),),
    )


def fetch(
    offsets: dict[int, int],
    *,
    topic: str = "t",
    wait_ms: int = 0,
    bytes_min: int = 1,
    bytes_max: int = 1 << 30,
    partition_bytes_max: int = 1 << 20,
    epoch: int = -1,
    session: tuple[int, int] = (0, -1),
    forgotten: Iterable[int] = (),
) -> Any:
    partitions = tuple(
        fetch_v11.FetchPartition(
            partition=index, fetch_offset=offset, partition_max_bytes=partition_bytes_max, current_leader_epoch=epoch
        )
        for index, offset in offsets.items()
    )
    gone = (fetch_v11.ForgottenTopic(topic=topic, partitions=tuple(forgotten)),) if forgotten else ()
    return fetch_v11.FetchRequest(
        replica_id=-1,
        max_wait=timedelta(milliseconds=wait_ms),
        min_bytes=bytes_min,
        max_bytes=bytes_max,
        session_id=session[0],
        session_epoch=session[1],
        topics=(fetch_v11.FetchTopic(topic=topic, partitions=partitions),) if partitions else (),
        forgotten_topics_data=gone,
    )


def topic_of(node: Node, partitions: int = 1, **config: str) -> None:
    node.store.create_topics(
        [NewTopic("t", partitions, {name.replace("_", "."): text for name, text in config.items()})]
    )


async def put(client: Client, batches: dict[int, bytes], **options: Any) -> list[tuple[int, int]]:
    """Produce and return (code, base offset) per partition."""
    response = await client.ask(produce(batches, **options))
    return [(int(row.error_code), row.base_offset) for row in response.responses[0].partition_responses]


def got(response: Any) -> dict[int, list[int]]:
    """Return the offsets of the batches received, per partition that was answered."""
    return {
        one.partition_index: [header.base_offset for _, header in walk(bytes(one.records or b""))]
        for topic in response.responses
        for one in topic.partitions
    }


def codes_of(response: Any) -> dict[int, int]:
    return {one.partition_index: int(one.error_code) for topic in response.responses for one in topic.partitions}


async def test_what_is_produced_is_fetched_byte_for_byte(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        batch = batch_of(b"one", b"two")
        assert await put(client, {0: batch}) == [(0, 0)]
        partition = (await client.ask(fetch({0: 0}))).responses[0].partitions[0]
        assert (partition.high_watermark, partition.last_stable_offset, partition.log_start_offset) == (2, 2, 0)
        # The offset, the epoch and the length are the leader's; from the magic on it is what the producer sent.
        assert bytes(partition.records)[16:] == batch[16:]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda batch: batch[:-1] + b"X", 2),
        (lambda batch: batch[:40], 2),
        (lambda batch: batch + batch, 87),
        (lambda batch: b"", 2),
        (lambda batch: bytes(batch[:16]) + b"\x01" + bytes(batch[17:]), 43),
        (lambda batch: bytes(batch[:22]) + b"\x10" + bytes(batch[23:]), 35),
        (lambda batch: bytes(batch[:22]) + b"\x20" + bytes(batch[23:]), 87),
        (lambda batch: bytes(batch_of(bytes(2_000_000))), 10),
    ],
    ids=["crc", "short", "two", "empty", "old format", "transactional", "control", "large"],
)
async def test_a_bad_batch_is_refused_and_the_others_are_not(
    tmp_path: Path, connect: Connect, change: Any, code: int
) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, 2)
        client = await connect(node)
        rows = await put(client, {0: change(batch_of(b"bad")), 1: batch_of(b"good")})
        assert rows[0][0] in {code, 2}, (
            rows
        )  # Whatever is wrong with a batch beside it, a CRC may be found wrong first.
        assert rows[1] == (0, 0)
        assert node.store.partition("t", 0).log_end == 0
        assert node.budget.used_bytes == 0


async def test_requests_that_cannot_be_granted_as_a_whole(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        assert await put(client, {0: batch_of(b"x")}, acks=2) == [(21, -1)]
        assert await put(client, {0: batch_of(b"x")}, transactional_id="tx") == [(35, -1)]
        assert await put(client, {0: batch_of(b"x")}, topic="none") == [(3, -1)]
        node.store.create_topics([NewTopic("two", 1, {"min.insync.replicas": "2"})])
        assert await put(client, {0: batch_of(b"x")}, topic="two", acks=-1) == [(19, -1)]
        assert await put(client, {0: batch_of(b"x")}, topic="two", acks=1) == [(0, 0)]


async def test_a_timestamp_far_ahead_is_refused_with_its_reason(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, 2)
        client = await connect(node)
        ahead_ms = node.now_ms() + 3_700_000
        late = bytes(build_batch([Record(0, ahead_ms, None, b"late")]))
        response = await client.ask(produce({0: late, 1: batch_of(b"x")}))
        refused, accepted = response.responses[0].partition_responses
        assert (int(refused.error_code), refused.base_offset) == (32, -1)
        assert f"{ahead_ms}" in refused.error_message
        assert "message.timestamp.after.max.ms" in refused.error_message
        assert refused.record_errors == ()
        assert (int(accepted.error_code), accepted.base_offset) == (0, 0)
        assert node.store.partition("t", 0).log_end == 0


async def test_a_duplicate_is_answered_with_the_original(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        batch = batch_of(b"one", b"two", producer_id=5, producer_epoch=0, base_sequence=0)
        assert [await put(client, {0: batch}) for _ in range(2)] == [[(0, 0)], [(0, 0)]]
        gap = batch_of(b"five", producer_id=5, producer_epoch=0, base_sequence=4)
        assert await put(client, {0: gap}) == [(45, -1)]
        assert node.store.partition("t", 0).log_end == 2


async def test_a_produce_request_times_out_when_the_disk_does_not_answer(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        held: list[Any] = []
        node.store.commit.submit, submit = held.append, node.store.commit.submit  # type: ignore[method-assign]
        assert await put(client, {0: batch_of(b"x")}, timeout_ms=100) == [(7, -1)]
        assert node.budget.used_bytes > 0, "the log still holds the batch"
        node.store.commit.submit = submit  # type: ignore[method-assign]
        for write in held:
            submit(write)
        assert await put(client, {0: batch_of(b"y")}) == [(0, 1)]
        assert node.budget.used_bytes == 0


async def test_a_fetch_waits_for_records_and_no_longer_than_it_says(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, 2)
        reader, writer = await connect(node), await connect(node)
        started = time.monotonic()
        assert got(await reader.ask(fetch({0: 0, 1: 0}, wait_ms=200))) == {0: [], 1: []}
        assert 0.15 < time.monotonic() - started < 2
        waiting = asyncio.create_task(reader.ask(fetch({0: 0, 1: 0}, wait_ms=5000)))
        await asyncio.sleep(0.05)
        await put(writer, {1: batch_of(b"x")})
        assert got(await waiting) == {0: [], 1: [0]}


async def test_a_fetch_waits_for_its_minimum(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        reader, writer = await connect(node), await connect(node)
        waiting = asyncio.create_task(reader.ask(fetch({0: 0}, wait_ms=5000, bytes_min=3000)))
        for _ in range(4):
            await asyncio.sleep(0.03)
            assert not waiting.done()
            await put(writer, {0: batch_of(bytes(800))})
        assert len(got(await waiting)[0]) == 4


async def test_at_least_one_batch_and_then_the_limits(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, 2)
        client = await connect(node)
        for _ in range(5):
            await put(client, {0: batch_of(bytes(1000)), 1: batch_of(bytes(1000))})
        assert got(await client.ask(fetch({0: 0}, partition_bytes_max=1))) == {0: [0]}
        assert len(got(await client.ask(fetch({0: 0}, partition_bytes_max=2500)))[0]) == 2
        both = got(await client.ask(fetch({0: 0, 1: 0}, bytes_max=1)))
        assert sorted(map(len, both.values())) == [0, 1]


@pytest.mark.parametrize("in_session", [False, True])
async def test_no_partition_starves(tmp_path: Path, connect: Connect, in_session: bool) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, 3)
        client = await connect(node)
        for _ in range(4):
            await put(client, {index: batch_of(bytes(1000)) for index in range(3)})
        served = []
        session_id = 0
        for turn in range(6):
            session = (session_id, turn) if in_session else (0, -1)
            wanted = {} if in_session and turn else {0: 0, 1: 0, 2: 0}
            response = await client.ask(fetch(wanted, bytes_max=1, session=session))
            session_id = response.session_id
            served += [index for index, offsets in got(response).items() if offsets]
        assert sorted(served) == [0, 0, 1, 1, 2, 2]


async def test_a_step_of_the_clock_makes_no_fetch_session_old_or_young(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path, limits__fetch_sessions_max=1) as node:
        topic_of(node)
        client = await connect(node)
        assert (await client.ask(fetch({0: 0}, session=(0, 0)))).session_id > 0
        now_ms = node.now_ms()
        monkeypatch.setattr(node, "now_ms", lambda: now_ms + 3_600_000)
        assert (await client.ask(fetch({0: 0}, session=(0, 0)))).session_id == 0, "the first one is in use"
        monkeypatch.setattr(node, "now_ms", lambda: now_ms - 3_600_000)
        later_ms = node.store.monotonic_ms() + 3_600_000
        monkeypatch.setattr(node.store, "monotonic_ms", lambda: later_ms)
        assert (await client.ask(fetch({0: 0}, session=(0, 0)))).session_id > 0, "the first one was idle for an hour"


async def test_an_incremental_session_tells_only_what_is_new(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, 3)
        client = await connect(node)
        first = await client.ask(fetch({0: 0, 1: 0}, session=(0, 0)))
        assert got(first) == {0: [], 1: []}
        session_id = first.session_id
        assert session_id > 0
        assert got(await client.ask(fetch({}, session=(session_id, 1)))) == {}
        await put(client, {1: batch_of(b"x")})
        assert got(await client.ask(fetch({}, session=(session_id, 2)))) == {1: [0]}
        assert got(await client.ask(fetch({1: 1, 2: 0}, session=(session_id, 3), forgotten=[0]))) == {2: []}
        await put(client, {0: batch_of(b"x")})
        assert got(await client.ask(fetch({}, session=(session_id, 4)))) == {}
        assert (await client.ask(fetch({}, session=(session_id, 4)))).error_code == 71
        assert (await client.ask(fetch({}, session=(session_id + 1, 5)))).error_code == 70


async def test_errors_of_single_partitions(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        await put(client, {0: batch_of(b"x")})
        epoch = node.store.partition("t", 0).leader_epoch
        assert codes_of(await client.ask(fetch({0: 2, 5: 0}))) == {0: 1, 5: 3}
        assert codes_of(await client.ask(fetch({0: 0}, epoch=epoch))) == {0: 0}
        assert codes_of(await client.ask(fetch({0: 0}, epoch=epoch - 1))) == {0: 74}
        assert codes_of(await client.ask(fetch({0: 0}, epoch=epoch + 1))) == {0: 75}
        started = time.monotonic()
        await client.ask(fetch({5: 0}, wait_ms=5000))
        assert time.monotonic() - started < 2, "an error is not worth waiting for more"


async def test_topics_by_id(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        await put(client, {0: batch_of(b"x")})

        async def fetch_id(topic_id: Any) -> Any:
            partition = fetch_v16.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1000)
            request = fetch_v16.FetchRequest(
                max_wait=timedelta(0),
                min_bytes=1,
                topics=(fetch_v16.FetchTopic(topic_id=topic_id, partitions=(partition,)),),
                forgotten_topics_data=(),
            )
            return await client.ask(request)

        topic = node.catalogue.topics["t"]
        response = await fetch_id(topic.id)
        assert response.responses[0].topic_id == topic.id
        assert got(response) == {0: [0]}
        assert codes_of(await fetch_id(type(topic.id)(int=7))) == {0: 100}


async def test_a_cold_partition_is_read_on_a_thread(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        await put(client, {0: batch_of(b"x")})
        partition = node.store.partition("t", 0)
        monkeypatch.setattr(partition, "read_cached", lambda offset, bytes_max: None)
        assert got(await client.ask(fetch({0: 0}))) == {0: [0]}
        assert node.metrics.cold_reads == 1
