"""What must not happen on the event loop: file operations that may wait for the disk, and long callbacks.

With the cluster's metadata in etcd, a loop that stands still loses the node's lease.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.create_partitions.v1 import request as partitions_v1
from kio.schema.delete_records.v1 import request as records_v1
from kio.schema.delete_topics.v6 import request as delete_v6
from kio.schema.incremental_alter_configs.v1 import request as incremental_v1
from kio.schema.init_producer_id.v4.request import InitProducerIdRequest
from kio.schema.list_offsets.v7 import request as offsets_v7
from kio.schema.metadata.v12 import request as metadata_v12
from kio.schema.offset_commit.v7 import request as commit_v7

from node.running import Client, Connect, batch_of, running_node
from node.test_admin import create, created
from node.test_produce_fetch import fetch, put
from node.test_replicas import create as create_replicated
from node.test_replicas import produce, running_cluster, until
from walstream.node.server import Node

SECOND = timedelta(seconds=1)
PLAIN = {"allow_auto_topic_creation": False, "include_topic_authorized_operations": False}
OPERATIONS = [
    "fsync", "fdatasync", "open", "pread", "pwrite", "pwritev", "write", "ftruncate", "posix_fallocate",
    "replace", "rename", "stat", "unlink", "rmdir", "mkdir", "listdir", "scandir",
]  # fmt: skip


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note the file operations that walstream calls on this thread."""
    loop_thread, calls = threading.get_ident(), []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            # The schemas are a part of the program, and read once.
            if threading.get_ident() == loop_thread and not str(args[:1]).endswith("schemas.json'),)"):
                frames = [frame for frame in traceback.extract_stack() if "/walstream/" in frame.filename]
                if frames:
                    where = " < ".join(f"{Path(one.filename).name}:{one.name}" for one in reversed(frames[-6:]))
                    calls.append(f"{name}({args[0] if args else ''}) {where}")
            return call(*args, **options)

        return noted

    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, noting(name, getattr(os, name)))
        patch.setattr(io, "open", noting("io.open", io.open))
        yield calls


async def checkpointed(node: Node) -> None:
    """Wait until a checkpoint is saved, and the housekeeping before it is done."""
    done = asyncio.get_running_loop().create_future()
    node.store.save_checkpoint(lambda error: done.set_result(error))
    assert await done is None


async def altered(client: Client, topic: str, **config: str) -> list[int]:
    changes = tuple(
        incremental_v1.AlterableConfig(name=name.replace("_", "."), config_operation=0, value=value)
        for name, value in config.items()
    )
    resource = incremental_v1.AlterConfigsResource(resource_type=2, resource_name=topic, configs=changes)
    request = incremental_v1.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
    return [int(one.error_code) for one in (await client.ask(request)).responses]


async def deleted(client: Client, *names: str) -> list[int]:
    topics = tuple(delete_v6.DeleteTopicState(name=name, topic_id=None) for name in names)
    answer = await client.ask(delete_v6.DeleteTopicsRequest(topics=topics, timeout=SECOND))
    return [int(one.error_code) for one in answer.responses]


async def grown(client: Client, name: str, count: int) -> list[int]:
    topic = partitions_v1.CreatePartitionsTopic(name=name, count=count, assignments=None)
    request = partitions_v1.CreatePartitionsRequest(topics=(topic,), timeout=SECOND, validate_only=False)
    return [int(one.error_code) for one in (await client.ask(request)).results]


async def work(node: Node, client: Client) -> None:
    """Use everything that reaches the disk."""
    asked = [
        created("t", segment_bytes="1024", retention_bytes="4096"),
        created("stamped", message_timestamp_type="LogAppendTime", segment_bytes="1024"),
        created("compacted", cleanup_policy="compact", segment_bytes="1024", min_cleanable_dirty_ratio="0.01"),
    ]
    assert set((await create(client, *asked)).values()) <= {0, 36}
    producer = (await client.ask(InitProducerIdRequest(transactional_id=None, transaction_timeout=SECOND))).producer_id
    for number in range(40):
        batch = batch_of(bytes(200), producer_id=producer, producer_epoch=0, base_sequence=number)
        assert (await put(client, {0: batch}))[0][0] == 0
        for topic in ("stamped", "compacted"):
            assert (await put(client, {0: batch_of(bytes(200))}, topic=topic))[0][0] == 0
        if number % 10 == 0:
            node.store._retention_due_ms = node.store._checkpoint_due_ms = 0
            node.store.tick()
    assert await altered(client, "t", retention_ms="1000") == [0]
    assert await grown(client, "t", node.catalogue.topic("t").partitions + 1) == [0]
    for _ in range(3):
        node.store._retention_due_ms = node.store._checkpoint_due_ms = 0
        node.store.tick()
        await checkpointed(node)
    partition = node.store.partition("t", 0)
    assert partition.log_start > 0, "retention has removed something"
    offsets = {0: node.store.partition("stamped", 0).log_start}
    assert (await client.ask(fetch(offsets, topic="stamped"))).responses[0].partitions[0].records
    where = offsets_v7.ListOffsetsPartition(partition_index=0, timestamp=1_700_000_000_000)
    times = offsets_v7.ListOffsetsTopic(name="stamped", partitions=(where,))
    await client.ask(offsets_v7.ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=(times,)))
    missing = metadata_v12.MetadataRequestTopic(topic_id=None, name="automatic")
    await client.ask(metadata_v12.MetadataRequest(topics=(missing,), include_topic_authorized_operations=False))
    commit = commit_v7.OffsetCommitRequestPartition(partition_index=0, committed_offset=3, committed_metadata="")
    topic = commit_v7.OffsetCommitRequestTopic(name="t", partitions=(commit,))
    answer = await client.ask(commit_v7.OffsetCommitRequest(group_id="g", member_id="", topics=(topic,)))
    assert answer.topics[0].partitions[0].error_code == 0
    before = records_v1.DeleteRecordsPartition(partition_index=0, offset=5)
    trimmed = records_v1.DeleteRecordsTopic(name="stamped", partitions=(before,))
    await client.ask(records_v1.DeleteRecordsRequest(topics=(trimmed,), timeout=SECOND))
    assert await altered(client, "automatic", message_timestamp_type="LogAppendTime") == [0]
    assert (await put(client, {0: batch_of(b"x")}, topic="automatic"))[0][0] == 0
    assert await deleted(client, "automatic") == [0]
    await checkpointed(node)


async def test_nothing_waits_for_the_disk_on_the_event_loop(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # The second time on sealed segments, whose indexes are not loaded.
        async with running_node(tmp_path, log__auto_create_topics=True) as node:
            client = await connect(node)
            with watched(monkeypatch) as calls:
                await work(node, client)
            assert calls == []


async def test_changes_of_topics_wait_for_one_another_and_for_the_disk(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path) as node:
        clients = [await connect(node) for _ in range(4)]
        assert await create(clients[0], created("t"), created("gone")) == {"t": 0, "gone": 0}
        may_write, write = threading.Event(), node.store.disk.write

        def late(path: Path, data: bytes, *, durable: bool) -> None:
            assert path.name != "topics.json" or may_write.wait(10)
            write(path, data, durable=durable)

        monkeypatch.setattr(node.store.disk, "write", late)
        version = node.catalogue.version
        tasks = [
            asyncio.create_task(altered(clients[0], "t", retention_ms="5000")),
            asyncio.create_task(altered(clients[1], "t", segment_bytes="2000")),
            asyncio.create_task(deleted(clients[2], "gone")),
        ]
        for _ in range(3):
            described = await clients[3].ask(metadata_v12.MetadataRequest(topics=None, **PLAIN))
            assert {topic.name for topic in described.topics} == {"t", "gone"}
        assert not any(task.done() for task in tasks), "nothing is answered before it is durable"
        assert node.catalogue.version == version
        may_write.set()
        assert [await task for task in tasks] == [[0], [0], [0]]
        assert node.catalogue.topic("t").config == {"retention.ms": "5000", "segment.bytes": "2000"}
        assert list(node.catalogue.topics) == ["t"]
    async with running_node(tmp_path) as node:
        assert node.catalogue.topic("t").config == {"retention.ms": "5000", "segment.bytes": "2000"}
        assert list(node.catalogue.topics) == ["t"]


async def test_a_node_that_stops_finishes_a_change_that_has_begun(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        begun, may_write, write = asyncio.Event(), threading.Event(), node.store.disk.write
        loop = asyncio.get_running_loop()

        def late(path: Path, data: bytes, *, durable: bool) -> None:
            if path.name == "topics.json":
                loop.call_soon_threadsafe(begun.set)
                assert may_write.wait(10)
            write(path, data, durable=durable)

        monkeypatch.setattr(node.store.disk, "write", late)
        creating = asyncio.create_task(create(client, created("t")))
        await begun.wait()
        stopping = asyncio.create_task(node.stop())
        await asyncio.sleep(0)
        may_write.set()
        assert await creating == {"t": 0}
        assert await stopping
        monkeypatch.undo()
    async with running_node(tmp_path) as node:
        assert list(node.catalogue.topics) == ["t"]


async def test_replicas_wait_for_no_disk_on_the_event_loop(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create_replicated(client, nodes, "first")
        with watched(monkeypatch) as calls:
            await create_replicated(client, nodes, segment_bytes="1024", message_timestamp_type="LogAppendTime")
            for _ in range(20):
                assert (await produce(client, bytes(200), acks=-1))[0] == 0
            for node in nodes:
                node.store._retention_due_ms = node.store._checkpoint_due_ms = 0
                node.store.tick()
                await checkpointed(node)
            assert await altered(client, "t", min_insync_replicas="2") == [0]
            replicas = nodes[0].replicas
            assert replicas is not None
            key = nodes[0].store.partition("t", 0).key
            epoch = replicas.replicas[key].partition.leader_epoch
            replicas.metadata.lead_again(key, epoch)
            await until(lambda: replicas.replicas[key].partition.leader_epoch > epoch, "it leads in a new epoch")
            await until(lambda: replicas.replicas[key].partition.is_leader, "it leads")
            await until(lambda: replicas.replicas[key].is_settled, "its followers have come back")
            assert (await produce(client, b"x", acks=-1))[0] == 0
            assert await deleted(client, "t") == [0]
            await until(lambda: not any("t" in node.catalogue.topics for node in nodes), "every node knows")
            for node in nodes:
                await checkpointed(node)
        assert calls == []
