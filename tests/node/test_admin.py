"""The APIs that describe and change topics, offsets and settings, on a real node."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.alter_configs.v1 import request as alter_v1
from kio.schema.create_partitions.v1 import request as partitions_v1
from kio.schema.create_topics.v7 import request as create_v7
from kio.schema.delete_records.v1 import request as records_v1
from kio.schema.delete_topics.v6 import request as delete_v6
from kio.schema.describe_cluster.v1.request import DescribeClusterRequest
from kio.schema.describe_configs.v4 import request as configs_v4
from kio.schema.describe_log_dirs.v4 import request as dirs_v4
from kio.schema.incremental_alter_configs.v1 import request as incremental_v1
from kio.schema.init_producer_id.v4.request import InitProducerIdRequest
from kio.schema.list_offsets.v7 import request as offsets_v7
from kio.schema.metadata.v0 import request as metadata_v0
from kio.schema.metadata.v12 import request as metadata_v12
from kio.schema.offset_for_leader_epoch.v4 import request as epoch_v4

from node.running import Client, Connect, batch_of, running_node
from walstream.cluster.local import NewTopic
from walstream.errors import PartitionOffline
from walstream.node.offsets import Committed
from walstream.node.server import Node

SECOND = timedelta(seconds=1)
T0 = 1_700_000_000_000


def created(name: str, partitions: int = 1, factor: int = 1, assignments: Any = (), **config: str) -> Any:
    return create_v7.CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=factor,
        assignments=assignments,
        configs=tuple(
            create_v7.CreatableTopicConfig(name=key.replace("_", "."), value=text) for key, text in config.items()
        ),
    )


async def create(client: Client, *topics: Any, validate_only: bool = False) -> dict[str, int]:
    request = create_v7.CreateTopicsRequest(topics=topics, timeout=SECOND, validate_only=validate_only)
    return {topic.name: int(topic.error_code) for topic in (await client.ask(request)).topics}


def topic_of(node: Node, name: str = "t", partitions: int = 1, config: dict[str, str] | None = None) -> None:
    node.store.create_topics([NewTopic(name, partitions, config or {})])


async def append(node: Node, *batches: bytes, topic: str = "t") -> None:
    partition = node.store.partition(topic, 0)
    for batch in batches:
        partition.append(memoryview(bytearray(batch)), now_ms=node.now_ms())
    done = asyncio.get_running_loop().create_future()
    partition.when_visible(partition.log_end - 1, done.set_result)
    await done


async def test_create_topics(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, log__default_partitions=3) as node:
        client = await connect(node)
        placed = create_v7.CreatableReplicaAssignment(partition_index=0, broker_ids=(1,))
        asked = [
            created("fine", 2, retention_ms="1000"),
            created("default", -1, -1),
            created("spread", factor=3),
            created("placed", -1, -1, (placed,)),
            created("none", 0),
            created("odd", cleanup_policy="burn"),
            created("strange", no_such="x"),
            created("bad name"),
            created("__own"),
            created("twice"),
            created("twice"),
        ]
        refused = {
            "spread": 38,
            "placed": 38,
            "none": 37,
            "odd": 40,
            "strange": 40,
            "bad name": 17,
            "__own": 17,
            "twice": 42,
        }
        expected = {"fine": 0, "default": 0, **refused}
        assert await create(client, *asked, validate_only=True) == expected
        assert not node.catalogue.topics
        assert await create(client, *asked) == expected
        assert {name: topic.partitions for name, topic in node.catalogue.topics.items()} == {"fine": 2, "default": 3}
        assert await create(client, created("fine")) == {"fine": 36}


async def test_partitions_are_bounded(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__partitions_max=5) as node:
        client = await connect(node)
        assert await create(client, created("a", 3), created("b", 3), created("c", 2)) == {"a": 0, "b": 37, "c": 0}
        request = partitions_v1.CreatePartitionsRequest(
            topics=(partitions_v1.CreatePartitionsTopic(name="a", count=4, assignments=None),),
            timeout=SECOND,
            validate_only=False,
        )
        assert (await client.ask(request)).results[0].error_code == 37


async def test_create_partitions(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        client = await connect(node)
        for name, count, validate_only, code, after in (
            ("t", 3, True, 0, 1),
            ("t", 3, False, 0, 3),
            ("t", 2, False, 37, 3),
            ("none", 2, False, 3, 3),
        ):
            topic = partitions_v1.CreatePartitionsTopic(name=name, count=count, assignments=None)
            request = partitions_v1.CreatePartitionsRequest(
                topics=(topic,), timeout=SECOND, validate_only=validate_only
            )
            assert (await client.ask(request)).results[0].error_code == code
            assert node.catalogue.topics["t"].partitions == after
        assert node.store.partition("t", 2).log_end == 0


async def test_delete_topics_by_name_and_by_id(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        for name in ("a", "b", "c"):
            topic_of(node, name)
        client = await connect(node)
        by_id = node.catalogue.topics["b"].id
        wanted = [("a", None), (None, by_id), ("none", None), (None, type(by_id)(int=5)), ("a", None)]
        request = delete_v6.DeleteTopicsRequest(
            topics=tuple(delete_v6.DeleteTopicState(name=name, topic_id=number) for name, number in wanted),
            timeout=SECOND,
        )
        rows = [(row.name, int(row.error_code)) for row in (await client.ask(request)).responses]
        assert rows == [("a", 0), ("b", 0), ("none", 3), (None, 100), ("a", 42)]
        assert set(node.catalogue.topics) == {"c"}


@pytest.mark.parametrize("error", [PartitionOffline("The disk is gone."), RuntimeError("a bug")], ids=repr)
async def test_a_topic_is_deleted_although_its_offsets_stay(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An error, or a closed connection, would have the client believe that the topic is still there."""
    async with running_node(tmp_path) as node:
        topic_of(node, "a")
        client = await connect(node)
        committed = Committed(5, -1, "", node.now_ms(), topic_since=node.catalogue.topics["a"].since)
        await node.groups.commit("g", {("a", 0): committed})
        request = delete_v6.DeleteTopicsRequest(
            topics=(delete_v6.DeleteTopicState(name="a", topic_id=None),), timeout=SECOND
        )

        async def failing() -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(node.groups, "forget_deleted_topics", failing)
            assert [int(row.error_code) for row in (await client.ask(request)).responses] == [0]
        assert node.groups.committed("g") == {}
        await node.groups.upkeep()
        assert "g" not in node.groups.table, "tried again by the upkeep"


async def test_metadata_creates_only_what_it_may(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)

        async def describe(name: str, allow: bool) -> int:
            topic = metadata_v12.MetadataRequestTopic(topic_id=None, name=name)
            request = metadata_v12.MetadataRequest(
                topics=(topic,), allow_auto_topic_creation=allow, include_topic_authorized_operations=False
            )
            return int((await client.ask(request)).topics[0].error_code)

        assert await describe("new", False) == 3
        assert await describe("new", True) == 0
        assert await describe("not/legal", True) == 17
        assert await describe("__consumer_offsets", True) == 17
        assert set(node.catalogue.topics) == {"new"}


async def test_metadata_of_all_topics_and_by_id(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, node__advertised="log.example:19092") as node:
        topic_of(node, "a", 2)
        topic_of(node, "b")
        client = await connect(node)
        oldest = await client.ask(metadata_v0.MetadataRequest(topics=()))
        assert {topic.name for topic in oldest.topics} == {"a", "b"}
        newest = await client.ask(metadata_v12.MetadataRequest(topics=None, include_topic_authorized_operations=True))
        assert [(broker.node_id, broker.host, broker.port) for broker in newest.brokers] == [(1, "log.example", 19092)]
        assert (newest.cluster_id, newest.controller_id) == (node.catalogue.cluster_id, 1)
        assert {topic.name: len(topic.partitions) for topic in newest.topics} == {"a": 2, "b": 1}
        assert newest.topics[0].partitions[0].leader_epoch == node.store.epoch
        none = await client.ask(metadata_v12.MetadataRequest(topics=(), include_topic_authorized_operations=False))
        assert none.topics == ()
        ids = [node.catalogue.topics["b"].id, type(node.catalogue.topics["b"].id)(int=9)]
        asked = tuple(metadata_v12.MetadataRequestTopic(topic_id=number, name=None) for number in ids)
        found = (
            await client.ask(metadata_v12.MetadataRequest(topics=asked, include_topic_authorized_operations=False))
        ).topics
        assert [(topic.name, int(topic.error_code)) for topic in found] == [("b", 0), (None, 100)]


async def test_list_offsets(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        await append(node, batch_of(b"a", b"b", b"c"), batch_of(b"d"))
        client = await connect(node)

        async def offset(timestamp: int, partition: int = 0, epoch: int = -1) -> tuple[int, int, int]:
            one = offsets_v7.ListOffsetsPartition(
                partition_index=partition, timestamp=timestamp, current_leader_epoch=epoch
            )
            topic = offsets_v7.ListOffsetsTopic(name="t", partitions=(one,))
            row = (
                await client.ask(offsets_v7.ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=(topic,)))
            ).topics[0]
            return int(row.partitions[0].error_code), row.partitions[0].offset, row.partitions[0].timestamp

        assert await offset(-1) == (0, 4, -1)
        assert await offset(-2) == (0, 0, -1)
        assert await offset(-3) == (0, 2, T0 + 2)
        assert await offset(T0 + 1) == (0, 1, T0 + 1)
        assert await offset(0) == (0, 0, T0)
        assert await offset(T0 + 3) == (0, -1, -1)
        assert await offset(-77) == (42, -1, -1)
        assert await offset(-1, partition=4) == (3, -1, -1)
        assert await offset(-1, epoch=99) == (75, -1, -1)


async def test_offset_for_leader_epoch(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        await append(node, batch_of(b"a", b"b"))
    async with running_node(tmp_path) as node:
        await append(node, batch_of(b"c"))
        client = await connect(node)

        async def end(epoch: int) -> tuple[int, int, int]:
            one = epoch_v4.OffsetForLeaderPartition(partition=0, leader_epoch=epoch)
            topic = epoch_v4.OffsetForLeaderTopic(topic="t", partitions=(one,))
            row = (await client.ask(epoch_v4.OffsetForLeaderEpochRequest(topics=(topic,)))).topics[0].partitions[0]
            return int(row.error_code), row.leader_epoch, row.end_offset

        assert [await end(epoch) for epoch in (1, 2, 3)] == [(0, 1, 2), (0, 2, 3), (0, -1, -1)]


async def test_delete_records(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        topic_of(node, "compacted", config={"cleanup.policy": "compact"})
        await append(node, batch_of(b"a", b"b", b"c", b"d"))
        client = await connect(node)

        async def delete(before: int, topic: str = "t") -> tuple[int, int]:
            one = records_v1.DeleteRecordsPartition(partition_index=0, offset=before)
            named = records_v1.DeleteRecordsTopic(name=topic, partitions=(one,))
            row = (
                (await client.ask(records_v1.DeleteRecordsRequest(topics=(named,), timeout=SECOND)))
                .topics[0]
                .partitions[0]
            )
            return int(row.error_code), row.low_watermark

        assert await delete(2) == (0, 2)
        assert await delete(9) == (1, -1)
        assert await delete(1) == (0, 2)
        assert await delete(-1) == (0, 4)
        assert await delete(0, "compacted") == (44, -1)
    async with running_node(tmp_path) as node:
        assert node.store.partition("t", 0).log_start == 4


async def test_describe_configs(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, log__retention_ms=5000) as node:
        topic_of(node, config={"segment.bytes": "4096"})
        client = await connect(node)

        async def describe(kind: int, name: str, keys: tuple[str, ...] | None = None) -> Any:
            resource = configs_v4.DescribeConfigsResource(
                resource_type=kind, resource_name=name, configuration_keys=keys
            )
            request = configs_v4.DescribeConfigsRequest(
                resources=(resource,), include_synonyms=True, include_documentation=True
            )
            return (await client.ask(request)).results[0]

        entries = {entry.name: entry for entry in (await describe(2, "t")).configs}
        assert (entries["segment.bytes"].value, entries["segment.bytes"].config_source) == ("4096", 1)
        assert (entries["retention.ms"].value, entries["retention.ms"].config_source) == ("5000", 4)
        assert (entries["cleanup.policy"].value, entries["cleanup.policy"].config_source) == ("delete", 5)
        assert [(s.value, s.source) for s in entries["segment.bytes"].synonyms] == [("4096", 1), ("134217728", 5)]
        assert all(entry.documentation for entry in entries.values())
        assert [entry.name for entry in (await describe(2, "t", ("retention.ms",))).configs] == ["retention.ms"]
        node_entries = {entry.name: entry for entry in (await describe(4, "1")).configs}
        assert (node_entries["log.retention_ms"].value, node_entries["log.retention_ms"].read_only) == ("5000", True)
        assert node_entries["security.users"].is_sensitive
        assert node_entries["security.users"].value is None
        assert [(await describe(*asked)).error_code for asked in ((2, "none"), (4, "7"), (8, "1"))] == [3, 42, 42]


async def test_alter_configs(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, config={"segment.bytes": "4096"})
        client = await connect(node)

        async def alter(*changes: tuple[str, int, str | None], kind: int = 2, validate_only: bool = False) -> int:
            configs = tuple(
                incremental_v1.AlterableConfig(name=name, config_operation=operation, value=text)
                for name, operation, text in changes
            )
            resource = incremental_v1.AlterConfigsResource(resource_type=kind, resource_name="t", configs=configs)
            request = incremental_v1.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=validate_only)
            return int((await client.ask(request)).responses[0].error_code)

        assert await alter(("retention.ms", 0, "77"), validate_only=True) == 0
        assert node.store.partition("t", 0).settings.retention_ms != 77
        assert await alter(("retention.ms", 0, "77"), ("segment.bytes", 1, None), ("cleanup.policy", 2, "compact")) == 0
        assert node.catalogue.topics["t"].config == {"retention.ms": "77", "cleanup.policy": "delete,compact"}
        assert node.store.partition("t", 0).settings.retention_ms == 77
        assert await alter(("cleanup.policy", 3, "delete")) == 0
        assert node.catalogue.topics["t"].config["cleanup.policy"] == "compact"
        assert await alter(("retention.ms", 0, "soon")) == 40
        assert await alter(("no.such", 0, "1")) == 40
        assert await alter(("retention.ms", 2, "1")) == 42
        assert await alter(("retention.ms", 0, "1"), ("retention.ms", 0, "2")) == 42
        assert await alter(("log.retention_ms", 0, "1"), kind=4) == 42
        whole = alter_v1.AlterConfigsResource(
            resource_type=2, resource_name="t", configs=(alter_v1.AlterableConfig(name="segment.bytes", value="8192"),)
        )
        response = await client.ask(alter_v1.AlterConfigsRequest(resources=(whole,), validate_only=False))
        assert response.responses[0].error_code == 0
        assert node.catalogue.topics["t"].config == {"segment.bytes": "8192"}


TYPE, HOLD = "message.timestamp.type", "walstream.hold.from.ms"
SET, DELETE = 0, 1


async def test_settings_of_a_newer_version_are_kept_until_they_are_reset(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
    path = tmp_path / "data/topics.json"
    newer = {"of.the.next.version": "1", "cleanup.policy": "tier", "retention.ms": "5000"}
    catalogue = json.loads(path.read_bytes())
    catalogue["topics"][0]["config"] = newer
    path.write_text(json.dumps(catalogue))
    async with running_node(tmp_path) as node:
        client = await connect(node)

        async def alter(name: str, operation: int, text: str | None) -> int:
            change = incremental_v1.AlterableConfig(name=name, config_operation=operation, value=text)
            resource = incremental_v1.AlterConfigsResource(resource_type=2, resource_name="t", configs=(change,))
            request = incremental_v1.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
            return int((await client.ask(request)).responses[0].error_code)

        async def policy() -> Any:
            resource = configs_v4.DescribeConfigsResource(
                resource_type=2, resource_name="t", configuration_keys=("cleanup.policy",)
            )
            request = configs_v4.DescribeConfigsRequest(
                resources=(resource,), include_synonyms=False, include_documentation=False
            )
            (entry,) = (await client.ask(request)).results[0].configs
            return entry.value, entry.config_source

        assert node.store.partition("t", 0).settings.retention_ms == 5000
        assert await policy() == ("delete", 5), "the one in force"
        assert await alter("retention.ms", 0, "6000") == 0
        assert node.catalogue.topics["t"].config == newer | {"retention.ms": "6000"}
        assert await alter("of.the.next.version", 0, "2") == 40
        assert await alter("cleanup.policy", 0, "tier2") == 40
        assert await alter("of.the.next.version", 1, None) == 0
        assert await alter("of.the.next.version", 1, None) == 40, "there is none any more"
        assert await alter("cleanup.policy", 0, "compact") == 0
        assert node.catalogue.topics["t"].config == {"retention.ms": "6000", "cleanup.policy": "compact"}
        assert node.store.partition("t", 0).settings.compacted


async def test_a_held_topic_keeps_its_append_time(tmp_path: Path, connect: Connect) -> None:
    """Neither in one request nor by leaving settings out; whoever ends the hold first has decided to."""
    held = {TYPE: "LogAppendTime", HOLD: "17", "walstream.hold.bytes.max": "18"}
    async with running_node(tmp_path) as node:
        topic_of(node, config=held)
        client = await connect(node)

        async def change(*changes: tuple[str, int, str | None], validate_only: bool = False) -> Any:
            configs = tuple(
                incremental_v1.AlterableConfig(name=name, config_operation=operation, value=text)
                for name, operation, text in changes
            )
            resource = incremental_v1.AlterConfigsResource(resource_type=2, resource_name="t", configs=configs)
            request = incremental_v1.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=validate_only)
            return (await client.ask(request)).responses[0]

        async def replace(**settings: str | None) -> Any:
            configs = tuple(
                alter_v1.AlterableConfig(name=name.replace("_", "."), value=text) for name, text in settings.items()
            )
            whole = alter_v1.AlterConfigsResource(resource_type=2, resource_name="t", configs=configs)
            request = alter_v1.AlterConfigsRequest(resources=(whole,), validate_only=False)
            return (await client.ask(request)).responses[0]

        for refused in (
            await change((TYPE, SET, "CreateTime")),
            await change((TYPE, DELETE, None)),
            await change((TYPE, SET, "CreateTime"), validate_only=True),
            await change((HOLD, DELETE, None), (TYPE, SET, "CreateTime")),
            await change((HOLD, SET, "-1"), (TYPE, DELETE, None)),
            await replace(),
            await replace(segment_bytes="8192"),
            await replace(message_timestamp_type="CreateTime"),
            await replace(message_timestamp_type="CreateTime", walstream_hold_from_ms="-1"),
            await replace(walstream_hold_from_ms=None),
        ):
            assert refused.error_code == 44
            assert "t is held by a feed (walstream.hold.from.ms=17)" in refused.error_message
            assert "walstream topic alter t --set walstream.hold.from.ms=-1" in refused.error_message
            assert node.catalogue.topics["t"].config == held
        # The hold is not of those settings that a replacement resets: it belongs to somebody else.
        assert (await replace(message_timestamp_type="LogAppendTime", segment_bytes="8192")).error_code == 0
        assert node.catalogue.topics["t"].config == held | {"segment.bytes": "8192"}
        assert (await change((TYPE, SET, "CreateTime"))).error_code == 44
        assert (await change((HOLD, SET, "23"), ("retention.ms", SET, "77"))).error_code == 0
        assert (await change((HOLD, SET, "-1"))).error_code == 0
        assert (await change((TYPE, SET, "CreateTime"))).error_code == 0
        assert not node.store.partition("t", 0).settings.append_time
        # A hold that comes after the change keeps nobody from changing it back.
        assert (await change((HOLD, SET, "29"))).error_code == 0
        assert (await change((TYPE, SET, "LogAppendTime"))).error_code == 0
        assert (await change((TYPE, SET, "CreateTime"))).error_code == 44
        assert (await replace(message_timestamp_type="LogAppendTime", walstream_hold_from_ms=None)).error_code == 0
        assert HOLD not in node.catalogue.topics["t"].config
        assert (await replace()).error_code == 0


async def test_producer_ids_are_never_given_twice(tmp_path: Path, connect: Connect) -> None:
    seen = set()
    for _ in range(2):
        async with running_node(tmp_path) as node:
            client = await connect(node)
            for _ in range(3):
                response = await client.ask(InitProducerIdRequest(transactional_id=None, transaction_timeout=SECOND))
                assert (response.error_code, response.producer_epoch) == (0, 0)
                seen.add(response.producer_id)
    assert len(seen) == 6


async def test_transactions_are_refused_cleanly(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        response = await client.ask(InitProducerIdRequest(transactional_id="tx", transaction_timeout=SECOND))
        assert (response.error_code, response.producer_id) == (35, -1)
        assert not node.apis.keys() & {24, 25, 26, 27, 28}


async def test_the_cluster_and_its_folder(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node)
        await append(node, batch_of(b"x"))
        client = await connect(node)
        cluster = await client.ask(DescribeClusterRequest(include_cluster_authorized_operations=True))
        assert (cluster.cluster_id, cluster.controller_id, len(cluster.brokers)) == (node.catalogue.cluster_id, 1, 1)
        folder = (await client.ask(dirs_v4.DescribeLogDirsRequest(topics=None))).results[0]
        assert folder.log_dir == str((tmp_path / "data").resolve())
        assert folder.topics[0].partitions[0].partition_size == len(batch_of(b"x"))
        assert folder.total_bytes >= folder.usable_bytes > 0


async def test_a_bug_in_a_handler_is_answered_and_the_connection_lives(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)

        def fail() -> int:
            raise RuntimeError("a bug")

        monkeypatch.setattr(node.catalogue, "next_producer_id", fail)
        response = await client.ask(InitProducerIdRequest(transactional_id=None, transaction_timeout=SECOND))
        assert response.error_code == -1
        assert node.metrics.failures == 1
        await client.ask(DescribeClusterRequest(include_cluster_authorized_operations=False))


async def test_producer_ids_are_reserved_beside_the_loop(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path) as node:
        threads: list[threading.Thread] = []
        write = node.store.disk.write

        def noted(path: Path, data: bytes, *, durable: bool) -> None:
            if path.name == "reserved.json":
                threads.append(threading.current_thread())
            write(path, data, durable=durable)

        monkeypatch.setattr(node.store.disk, "write", noted)
        clients = [await connect(node) for _ in range(3)]
        request = InitProducerIdRequest(transactional_id=None, transaction_timeout=SECOND)
        ids = [(await client.ask(request)).producer_id for client in clients for _ in range(400)]
        assert len(set(ids)) == 1_200
        assert len(threads) == 2
        assert threading.main_thread() not in threads


async def test_an_answer_does_not_outgrow_its_question(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        topic_of(node, partitions=50)
        client = await connect(node)
        topic = metadata_v12.MetadataRequestTopic(topic_id=None, name="t")
        request = metadata_v12.MetadataRequest(topics=(topic,) * 5000, include_topic_authorized_operations=False)
        assert len((await client.ask(request)).topics) == 1
        resource = configs_v4.DescribeConfigsResource(resource_type=4, resource_name="", configuration_keys=None)
        assert len((await client.ask(configs_v4.DescribeConfigsRequest(resources=(resource,) * 5000))).results) == 1


async def test_a_node_at_every_address_tells_a_client_the_one_it_has_reached(tmp_path: Path, connect: Connect) -> None:
    everywhere = {"node__listen": "0.0.0.0:0", "security__allow_insecure": True}
    async with running_node(tmp_path, **everywhere) as node:
        client = await connect(node)
        cluster = await client.ask(DescribeClusterRequest(include_cluster_authorized_operations=False))
        assert (cluster.brokers[0].host, cluster.brokers[0].port) == ("127.0.0.1", node.port)
