"""A real node on a disk that is full: what it answers, what it still does, and how it comes back."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from kio.schema.delete_topics.v6 import request as delete_v6
from kio.schema.incremental_alter_configs.v1 import request as alter_v1
from kio.schema.init_producer_id.v4.request import InitProducerIdRequest

from disks import MIB, small_disk
from node.running import Client, Connect, batch_of, running_node
from node.test_produce_fetch import produce
from walstream.cluster.local import NewTopic
from walstream.node.server import Node
from walstream.ops.health import health

STORAGE_ERROR = 56
SECOND = timedelta(seconds=1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


async def write(client: Client, size: int, topic: str = "t") -> int:
    response = await client.ask(produce({0: batch_of(bytes(size))}, topic=topic))
    return int(response.responses[0].partition_responses[0].error_code)


async def fill(client: Client, *topics: str) -> None:
    """Write to topics until the disk is full."""
    for topic in topics:
        codes = {await write(client, 500_000, topic) for _ in range(60)}
        assert codes <= {0, STORAGE_ERROR}
        assert STORAGE_ERROR in codes


async def alter(client: Client, topic: str, name: str, value: str) -> int:
    config = alter_v1.AlterableConfig(name=name, config_operation=0, value=value)
    resource = alter_v1.AlterConfigsResource(resource_type=2, resource_name=topic, configs=(config,))
    request = alter_v1.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
    return int((await client.ask(request)).responses[0].error_code)


async def delete(client: Client, *topics: str) -> list[int]:
    wanted = tuple(delete_v6.DeleteTopicState(name=name, topic_id=None) for name in topics)
    response = await client.ask(delete_v6.DeleteTopicsRequest(topics=wanted, timeout=SECOND))
    return [int(row.error_code) for row in response.responses]


async def writable(node: Node, topic: str) -> None:
    """Wait until a partition takes writes."""
    for _ in range(2_000):
        if node.store.partition(topic, 0).write_error is None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(str(node.store.partition(topic, 0).write_error))


def create(node: Node, *topics: str) -> None:
    config = {"segment.bytes": str(MIB), "retention.ms": "-1"}
    node.store.create_topics([NewTopic(name, 1, config) for name in topics])


async def test_lower_retention_and_deleted_topics_free_a_full_disk(disk: Path, connect: Connect) -> None:
    async with running_node(disk) as node:
        create(node, "t", "u", "gone")
        client = await connect(node)
        assert [await write(client, 500_000, "gone") for _ in range(8)] == [0] * 8
        await fill(client, "t", "u")
        assert health(node)[1]["disk"]["full"]
        assert health(node)[1]["status"] == "degraded"

        assert await alter(client, "t", "retention.bytes", "1000000") == 0
        await writable(node, "t")
        assert await write(client, 10) == 0

        await fill(client, "t")
        assert await delete(client, "gone") == [0]
        await writable(node, "t")
        assert await write(client, 10) == 0
        assert not node.store.is_full


async def test_what_a_full_disk_refuses_is_a_storage_error_and_no_closed_connection(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path) as node:
        create(node, "t", "u")
        client = await connect(node)

        def refuse(path: Path, data: bytes, *, durable: bool) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(node.store.disk, "write", refuse)
            assert await delete(client, "t", "none", "u") == [STORAGE_ERROR, 3, STORAGE_ERROR]
            assert await alter(client, "t", "retention.bytes", "1000000") == STORAGE_ERROR
            answered = await client.ask(InitProducerIdRequest(transactional_id=None, transaction_timeout=SECOND))
            assert answered.error_code == STORAGE_ERROR
        assert await delete(client, "t", "u") == [0, 0]
