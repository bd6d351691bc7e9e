"""Three nodes in one event loop: what clients of a cluster are told, and what is left behind when they go."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import struct
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kio.schema.create_topics.v7 import request as create_topics
from kio.schema.describe_cluster.v0 import request as describe_cluster
from kio.schema.find_coordinator.v3 import request as find_coordinator
from kio.schema.heartbeat.v4 import request as heartbeat
from kio.schema.init_producer_id.v4 import request as init_producer_id
from kio.schema.list_offsets.v7 import request as list_offsets
from kio.schema.metadata.v12 import request as metadata
from kio.schema.offset_commit.v8 import request as offset_commit

from node.running import Client, Connect, batch_of, running_node
from walstream.cluster.local import NewTopic, Topic
from walstream.cluster.static import Told, encode_told
from walstream.config.replication import ClusterNode
from walstream.errors import ConnectionLost, CoordinatorLoading, CoordinatorUnavailable, NotCoordinator
from walstream.log.checkpoint import key_text
from walstream.node import replicas as replicas_module
from walstream.node.catalogue_changes import change_catalogue
from walstream.node.driver import DOING, Replica
from walstream.node.lines import FileRange, PlainLine
from walstream.node.offsets import Committed
from walstream.node.offsets_log import OFFSETS_TOPIC
from walstream.node.peer_links import PeerLink
from walstream.node.peers import Peers
from walstream.node.server import Node
from walstream.ops.health import health
from walstream.ops.metrics import Exporter
from walstream.processes import free_port
from walstream.replication.effects import Append, Effect, Report, SetHighWatermark
from walstream.replication.events import Event, MetadataChanged, Received
from walstream.replication.messages import Catalogue, Data, Watermark
from walstream.replication.wire.frames import VERSION
from walstream.replication.wire.version_1_push import PushPlan

NONE, NOT_LEADER, TIMED_OUT, NOT_COORDINATOR, NOT_ENOUGH, NOT_CONTROLLER = 0, 6, 7, 16, 19, 41
FAST = {
    "replication__reconnect_delay_ms": 100,
    "replication__isr_lag_ms_max": 500,
    "node__drain_timeout_ms": 500,
}


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(what)


@asynccontextmanager
async def running_cluster(folder: Path, **settings: Any) -> AsyncIterator[list[Node]]:
    kafka, peers = [free_port() for _ in range(3)], [free_port() for _ in range(3)]
    nodes = [
        {"id": number, "kafka": f"127.0.0.1:{kafka[number - 1]}", "replication": f"127.0.0.1:{peers[number - 1]}"}
        for number in (1, 2, 3)
    ]
    async with AsyncExitStack() as stack:
        running = []
        for number in (1, 2, 3):
            own = {
                "node__node_id": number,
                "node__listen": f"127.0.0.1:{kafka[number - 1]}",
                "replication__nodes": json.dumps(nodes),
                "replication__listen": f"127.0.0.1:{peers[number - 1]}",
            }
            node = running_node(folder / str(number), **{**FAST, **own, **settings})
            running.append(await stack.enter_async_context(node))
        yield running


async def create(client: Client, nodes: list[Node], name: str = "t", factor: int = 3, **config: str) -> None:
    entries = tuple(
        create_topics.CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in config.items()
    )
    topic = create_topics.CreatableTopic(
        name=name, num_partitions=1, replication_factor=factor, assignments=(), configs=entries
    )

    async def created() -> int:
        answer = await client.ask(create_topics.CreateTopicsRequest(topics=(topic,), validate_only=False))
        return int(answer.topics[0].error_code)

    for _ in range(200):
        if await created() in (NONE, 36):
            break
        await asyncio.sleep(0.02)
    await until(lambda: in_sync(nodes[0], name) == list(range(1, factor + 1)), "all replicas are in sync")


def in_sync(node: Node, topic: str) -> list[int]:
    known = node.catalogue.topics.get(topic)
    return [] if known is None else sorted(node.placement.find(known, 0).in_sync)


def produce_v9(batch: bytes, *, acks: int, timeout_ms: int = 5_000, topic: bytes = b"t") -> bytes:
    """A produce request of a version whose answers have tags."""
    size = len(batch) + 1
    records = bytearray()
    while size >= 128:
        records.append(size % 128 | 128)
        size >>= 7
    records.append(size)
    body = b"\x00" + struct.pack(">hi", acks, timeout_ms) + b"\x02" + bytes((len(topic) + 1,)) + topic
    body += b"\x02" + struct.pack(">i", 0) + bytes(records) + batch + b"\x00\x00\x00"
    header = struct.pack(">hhih", 0, 9, 7, 4) + b"test\x00"
    return struct.pack(">i", len(header) + len(body)) + header + body


async def produce(
    client: Client, *values: bytes, acks: int, timeout_ms: int = 5_000, topic: bytes = b"t"
) -> tuple[int, int | None]:
    """Produce, and return the error code and the durability that the answer tells."""
    await client.send(produce_v9(batch_of(*values), acks=acks, timeout_ms=timeout_ms, topic=topic))
    answer = await client.receive()
    at = CODE_AT + 2 + 8 + 8 + 8 + 1
    at += 1 if answer[at] == 0 else answer[at]
    tags = answer[at]
    return code_of(answer), answer[at + 4] if tags else None


CODE_AT = 4 + 1 + 1 + 2 + 1 + 4
"""Behind correlation, tags, topics, the name, partitions, index."""


def code_of(answer: bytes) -> int:
    """The error code in the answer to a produce request for one partition."""
    (code,) = struct.unpack_from(">h", answer, CODE_AT)
    return int(code)


async def test_the_answer_tells_the_durability(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert await produce(client, b"a", acks=1) == (NONE, 1)
        assert await produce(client, b"b", acks=-1) == (NONE, 2)
        partitions = [node.store.partition("t", 0) for node in nodes]
        assert min(partition.durable_end for partition in partitions) == 2, "on every disk before it is acknowledged"
        await create(client, nodes, "u", walstream_unsafe_ack_before_fsync="true")
        assert await produce(client, b"c", acks=1, topic=b"u") == (NONE, 0), "nobody claims a disk that was not asked"
        assert await produce(client, b"d", acks=-1, topic=b"u") == (NONE, 0)
        nodes[2].replicas.links.stop()  # type: ignore[union-attr]
        assert await produce(client, b"e", acks=-1, timeout_ms=50) == (TIMED_OUT, None), "an error met nothing"


def stored(node: Node, topic: str = "t") -> bytes:
    """Every batch of a node's copy, read back and checked."""
    log = node.store.partition(topic, 0)
    found, offset = bytearray(), 0
    while offset < log.durable_end:
        chunk = log.read_replica_blocking(offset, 1 << 20)
        found += b"".join(chunk.buffers)
        offset = chunk.next_offset
    return bytes(found)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
async def test_what_goes_between_nodes_may_be_compressed(tmp_path: Path, connect: Connect, compression: str) -> None:
    async with running_cluster(tmp_path, replication__compression=compression) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert nodes[0].replicas is not None
        links = nodes[0].replicas.links
        before = links.sent_bytes()
        assert (await produce(client, b"walstream " * 50_000, acks=-1))[0] == NONE
        sent = [links.sent_bytes()[peer, True] - before[peer, True] for peer in (2, 3)]
        assert min(sent) > 500_000 if compression == "none" else max(sent) < 100_000
        assert len(stored(nodes[0])) > 500_000
        assert stored(nodes[0]) == stored(nodes[1]) == stored(nodes[2])


async def test_sealed_segments_are_sent_as_files(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[FileRange] = []
    send_file = PlainLine.send_file

    def noted(line: PlainLine, part: FileRange) -> None:
        parts.append(part)
        send_file(line, part)

    monkeypatch.setattr(PlainLine, "send_file", noted)
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes, segment_bytes="200000")
        assert nodes[0].replicas is not None
        nodes[0].replicas.links.outgoing[3].fail(ConnectionLost("The cable is pulled."))
        for _ in range(20):
            await client.send(produce_v9(batch_of(os.urandom(90_000)), acks=1))
        for _ in range(20):
            await client.receive()
        logs = [node.store.partition("t", 0) for node in nodes]
        await until(lambda: min(log.durable_end for log in logs) == 20, "the follower has caught up")
        assert sum(part.length for part in parts) > 64 * 1024, "what is sealed need not pass through the process"
        assert stored(nodes[0]) == stored(nodes[1]) == stored(nodes[2])


async def test_metadata_is_the_same_everywhere(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        await create(await connect(nodes[0]), nodes)
        await until(lambda: all(in_sync(node, "t") == [1, 2, 3] for node in nodes), "every node knows who is in sync")
        request = metadata.MetadataRequest(
            topics=(metadata.MetadataRequestTopic(name="t", topic_id=None),),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
        describe = describe_cluster.DescribeClusterRequest(include_cluster_authorized_operations=False)
        told = []
        for node in nodes:
            client = await connect(node)
            answer = await client.ask(request)
            cluster = await client.ask(describe)
            partition = answer.topics[0].partitions[0]
            assert partition.leader_id == 1
            told.append(
                (answer.cluster_id, answer.controller_id, {one.node_id: one.port for one in answer.brokers},
                 partition.leader_epoch, sorted(partition.isr_nodes), cluster.controller_id, len(cluster.brokers))
            )  # fmt: skip
        assert told[0] == told[1] == told[2]
        assert told[0][2] == {number + 1: node.port for number, node in enumerate(nodes)}


async def test_who_is_asked_for_what_it_does_not_do(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        leader, follower = await connect(nodes[0]), await connect(nodes[1])
        await create(leader, nodes)
        assert (await produce(follower, b"x", acks=1))[0] == NOT_LEADER
        topic = create_topics.CreatableTopic(
            name="v", num_partitions=1, replication_factor=1, assignments=(), configs=()
        )
        answer = await follower.ask(create_topics.CreateTopicsRequest(topics=(topic,)))
        assert answer.topics[0].error_code == NOT_CONTROLLER
        found = await follower.ask(find_coordinator.FindCoordinatorRequest(key="g", key_type=0))
        assert (found.node_id, found.port) == (1, nodes[0].port)
        beat = heartbeat.HeartbeatRequest(group_id="g", generation_id=1, member_id="m", group_instance_id=None)
        assert (await follower.ask(beat)).error_code == NOT_COORDINATOR
        place = list_offsets.ListOffsetsPartition(partition_index=0, current_leader_epoch=-1, timestamp=-1)
        request = list_offsets.ListOffsetsRequest(
            replica_id=-1, isolation_level=0,
            topics=(list_offsets.ListOffsetsTopic(name="t", partitions=(place,)),),
        )  # fmt: skip
        assert (await follower.ask(request)).topics[0].partitions[0].error_code == NOT_LEADER
        assert (await leader.ask(request)).topics[0].partitions[0].error_code == NONE


async def test_producer_ids_are_given_once(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        request = init_producer_id.InitProducerIdRequest(
            transactional_id=None, transaction_timeout=timedelta(seconds=1), producer_id=-1, producer_epoch=-1
        )
        clients = [await connect(node) for node in nodes]
        ids = [(await client.ask(request)).producer_id for client in clients for _ in range(50)]
        assert len(set(ids)) == 150


async def test_nobody_waits_after_a_timeout_or_a_lost_connection(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path, replication__isr_lag_ms_max=60_000) as nodes:
        client, other = await connect(nodes[0]), await connect(nodes[0])
        await create(client, nodes)
        partition = nodes[0].store.partition("t", 0)
        for node in nodes[1:]:
            assert node.replicas is not None
            node.replicas.links.stop()
        assert (await produce(client, b"a", acks=-1, timeout_ms=50))[0] == TIMED_OUT
        assert len(partition._visible_waiters) == 0
        await other.send(produce_v9(batch_of(b"b"), acks=-1, timeout_ms=60_000))
        await until(lambda: len(partition._visible_waiters) == 1, "a request waits")
        other.close()
        await until(lambda: len(partition._visible_waiters) == 0, "nobody waits for a connection that is gone")
        await until(lambda: nodes[0].budget.used_bytes == 0, "the frame is let go as soon as this disk has it")
        assert partition.durable_end == 2
        assert partition.high_watermark == 0


@pytest.mark.parametrize(("mode", "acks"), [("async", -1), ("sync", 1)])
async def test_nobody_waits_for_followers_of_a_node_that_leads_no_more(
    tmp_path: Path, connect: Connect, mode: str, acks: int
) -> None:
    settings = {"replication__isr_lag_ms_max": 60_000, "replication__mode": mode, "replication__sync_followers": 2}
    async with running_cluster(tmp_path, **settings) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        for node in nodes[1:]:
            assert node.replicas is not None
            node.replicas.links.stop()
        replicas = nodes[0].replicas
        assert replicas is not None
        (replica,) = [one for one in replicas.replicas.values() if one.partition.topic == "t"]
        waiters = replica.partition._visible_waiters if acks == -1 else replica.followers_durable
        assert (await produce(client, b"a", acks=acks, timeout_ms=50))[0] == TIMED_OUT
        assert len(waiters) == 0, "nobody waits after a timeout"
        await client.send(produce_v9(batch_of(b"b"), acks=acks, timeout_ms=60_000))
        await until(lambda: len(waiters) == 1, "a request waits")
        state = replicas.state(replica.key)
        assert state is not None
        replica.feed(MetadataChanged(replace(state, leader=2, epoch=state.epoch + 1, version=state.version + 1)))
        assert code_of(await client.receive()) == NOT_LEADER
        assert len(waiters) == 0
        assert (await produce(client, b"c", acks=acks))[0] == NOT_LEADER


async def test_topics_that_a_full_disk_did_not_keep_are_told_again(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        disk, refused = nodes[1].store.disk, 0
        write = disk.write

        def write_if_there_is_space(path: Path, data: bytes, *, durable: bool) -> None:
            nonlocal refused
            if path.name == "topics.json" and refused < 2:
                refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, data, durable=durable)

        monkeypatch.setattr(disk, "write", write_if_there_is_space)
        await create(client, nodes, "u")
        assert refused == 2
        assert (await produce(client, b"x", acks=-1, topic=b"u"))[0] == NONE


async def test_a_read_may_bring_any_number_of_catalogues(tmp_path: Path, connect: Connect) -> None:
    """As from a leader of many partitions whose in-sync replicas changed while this node stood still."""
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert nodes[0].replicas is not None
        assert nodes[1].replicas is not None
        link = nodes[0].replicas.links.outgoing[2]
        accepted = nodes[1].replicas.links.incoming[1]
        for _ in range(2 * sys.getrecursionlimit()):
            link.send(Catalogue(nodes[0].catalogue.version, encode_told(Told(None, {}))))
        assert (await produce(client, b"a", acks=-1))[0] == NONE
        await create(client, nodes, "u")
        assert (await produce(client, b"b", acks=-1, topic=b"u"))[0] == NONE
        assert in_sync(nodes[0], "t") == in_sync(nodes[0], "u") == [1, 2, 3]
        assert nodes[1].replicas.links.incoming[1] is accepted, "the link is still the same"
        assert not nodes[1].replicas._behind_catalogue


async def test_settings_of_a_newer_controller_are_kept_and_ignored(
    tmp_path: Path, connect: Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert nodes[0].replicas is not None
        assert nodes[1].replicas is not None
        # The controller of the next version has a topic that the others follow.
        version = nodes[0].catalogue.version + 1
        config = {"setting.of.the.next.version": "1", "cleanup.policy": "tier", "min.insync.replicas": "3"}
        topics = [*nodes[0].catalogue.topics.values(), Topic("new", uuid4(), 1, config, [1, 2, 3], version)]
        for link in nodes[0].replicas.links.outgoing.values():
            link.send(Catalogue(version, encode_told(Told(topics, {}))))
        await until(lambda: all("new" in node.catalogue.topics for node in nodes[1:]), "the catalogue is in force")
        partition = nodes[1].store.partition("new", 0)
        assert (partition.settings.min_isr, partition.settings.compacted, partition.settings.deleted) == (
            3,
            False,
            True,
        )
        ignored = [line for line in capfd.readouterr().out.splitlines() if "topic settings ignored" in line]
        assert len(ignored) == 2, "one warning of each node"
        assert all("setting.of.the.next.version=1" in line and "cleanup.policy=tier" in line for line in ignored)
        assert (await produce(client, b"a", acks=-1))[0] == NONE
        assert in_sync(nodes[0], "t") == [1, 2, 3]
        await change_catalogue(nodes[1].store, lambda: nodes[1].catalogue.note_joined(9))
    async with running_node(tmp_path / "2", node__node_id=2) as node:
        assert node.catalogue.topics["new"].config == config


async def test_a_catalogue_that_cannot_be_handled_ends_its_link(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages behind it would wait for it for ever."""
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert nodes[1].replicas is not None
        topics_changed, failures = nodes[1].replicas._topics_changed, 0

        def failing() -> None:
            nonlocal failures
            failures += 1
            if failures == 1:
                raise RuntimeError("a bug")
            topics_changed()

        monkeypatch.setattr(nodes[1].replicas, "_topics_changed", failing)
        await create(client, nodes, "u")
        assert failures > 1
        assert (await produce(client, b"a", acks=-1, topic=b"u"))[0] == NONE
        assert not nodes[1].replicas._behind_catalogue


async def test_partitions_whose_epochs_a_full_disk_did_not_keep_are_led_later(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "RETRY_MS", 20)
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        disk, refused = nodes[0].store.disk, 0
        write = disk.write

        def write_if_there_is_space(path: Path, data: bytes, *, durable: bool) -> None:
            nonlocal refused
            if path.name == "replication.json" and refused < 2:
                refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, data, durable=durable)

        monkeypatch.setattr(disk, "write", write_if_there_is_space)
        await create(client, nodes)
        assert refused == 2
        assert (await produce(client, b"x", acks=-1))[0] == NONE


async def test_the_isr_is_checked_before_the_append(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes, min_insync_replicas="3")
        assert nodes[2].replicas is not None
        nodes[2].replicas.links.stop()
        assert (await produce(client, b"a", acks=1))[0] == NONE
        await until(lambda: in_sync(nodes[0], "t") == [1, 2], "the lost one is not in sync any more")
        assert (await produce(client, b"b", acks=-1))[0] == NOT_ENOUGH
        assert nodes[0].store.partition("t", 0).log_end == 1, "nothing was appended"


async def test_a_replica_that_fails_takes_no_other_with_it(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its core believes in effects that were lost: it answers at once, and does not lead on."""
    advance = DOING[SetHighWatermark]

    def failing(replica: Replica, effect: SetHighWatermark) -> None:
        if replica.partition.topic == "t" and replica.node_id == 1 and effect.offset == 2:
            raise RuntimeError("a bug")
        advance(replica, effect)

    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        await create(client, nodes, "u")
        assert (await produce(client, b"a", acks=-1))[0] == NONE
        monkeypatch.setitem(DOING, SetHighWatermark, failing)
        assert (await produce(client, b"b", acks=-1))[0] == NOT_LEADER
        assert (await produce(client, b"c", acks=-1))[0] == NOT_LEADER
        for number in range(5):
            assert (await produce(client, b"d", acks=-1, topic=b"u"))[0] == NONE, number
        _, document = health(nodes[0])
        assert [one["partition"] for one in document["replication"]["quarantined"]] == ["t-0"]
        assert document["replication"]["leaderless"] == ["t-0"]
        assert nodes[0].placement.find(nodes[0].catalogue.topics["t"], 0).leader == -1
        monkeypatch.undo()
        assert nodes[0].store.partition("t", 0).high_watermark == 1, "an answer that was not given is not visible"


@pytest.mark.parametrize("failing_in", ["core", "append", "queue"])
async def test_a_replica_that_fails_gives_the_credit_of_its_data_back(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, failing_in: str
) -> None:
    """Kept, it would be missing to the other partitions of the link."""
    append = DOING[Append]

    def failing_append(replica: Replica, effect: Append) -> None:
        if replica.node_id != 2 or replica.partition.topic != "bad":
            append(replica, effect)
            return
        if failing_in == "queue":
            # Another frame that is taken while this one is appended, and waits to be handled.
            message = Data(replica.key, replica.manager.known_epoch, 1, 0, 0, 0, 1, effect.batches)
            replica.feed(Received(effect.peer, message, is_outgoing=False))
        raise ValueError("a bug")

    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        await create(client, nodes, "bad")
        assert nodes[1].replicas is not None
        links = nodes[1].replicas.links
        replica = nodes[1].replicas.replicas[nodes[1].store.partition("bad", 0).key]
        handle = replica.manager.handle

        def failing_handle(event: Event, now_ms: int) -> list[Effect]:
            if isinstance(event, Received) and isinstance(event.message, Data):
                raise ValueError("a bug")
            return handle(event, now_ms)

        returned, return_credit = 0, links.return_credit

        def counting(peer: int, bytes_count: int) -> None:
            nonlocal returned
            returned += bytes_count
            return_credit(peer, bytes_count)

        monkeypatch.setattr(links, "return_credit", counting)
        monkeypatch.setitem(DOING, Append, failing_append)
        if failing_in == "core":
            monkeypatch.setattr(replica.manager, "handle", failing_handle)
        batch = batch_of(b"x" * 10_000)
        await client.send(produce_v9(batch, acks=1, topic=b"bad"))
        assert code_of(await client.receive()) == NONE
        await until(lambda: replica.is_closed, "the replica has failed")
        await until(lambda: returned, "its credit is returned")
        assert returned == len(batch) * (2 if failing_in == "queue" else 1)
        machine: Any = links.incoming[1].link
        assert machine.credit.held_bytes == 0
        assert (await produce(client, b"a", acks=-1))[0] == NONE
        assert in_sync(nodes[0], "t") == [1, 2, 3]


async def test_a_replica_that_fails_while_its_epoch_is_saved_is_not_shown_as_leader(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(replica: Replica, effect: SetHighWatermark) -> None:
        if replica.partition.topic == "t" and replica.node_id == 1 and effect.offset == 1:
            assert nodes[0].replicas is not None
            nodes[0].replicas.metadata.lead_again(replica.key, replica.partition.leader_epoch)
            raise RuntimeError("a bug")
        advance(replica, effect)

    advance = DOING[SetHighWatermark]
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert nodes[0].replicas is not None
        metadata, key = nodes[0].replicas.metadata, nodes[0].store.partition("t", 0).key
        state = metadata.state(key)
        assert state is not None
        monkeypatch.setitem(DOING, SetHighWatermark, failing)
        assert (await produce(client, b"a", acks=-1))[0] == NOT_LEADER
        await until(lambda: metadata.state(key).epoch > state.epoch, "the epoch is saved")  # type: ignore[union-attr]
        assert nodes[0].placement.find(nodes[0].catalogue.topics["t"], 0).leader == -1
        assert health(nodes[0])[1]["replication"]["leaderless"] == ["t-0"]


async def test_a_node_whose_replica_of_the_offsets_has_failed_keeps_no_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that are not told would heartbeat on, and commit in vain, until the node is restarted."""

    def failing(replica: Replica, effect: SetHighWatermark) -> None:
        if replica.partition.topic == OFFSETS_TOPIC and replica.partition.is_leader:
            raise RuntimeError("a bug")
        advance(replica, effect)

    advance = DOING[SetHighWatermark]
    async with running_cluster(tmp_path) as nodes:
        groups = nodes[0].groups
        await until(lambda: in_sync(nodes[0], OFFSETS_TOPIC) == [1, 2, 3], "all replicas are in sync")
        nodes[0].store.create_topics([NewTopic("t", 1, {}, (1, 2, 3))])
        await until(lambda: groups._refusal is None, "the offsets are read")
        await groups.commit("g", {("t", 0): Committed(1, -1, "", nodes[0].now_ms())})
        monkeypatch.setitem(DOING, SetHighWatermark, failing)
        with pytest.raises(NotCoordinator):
            await groups.commit("g", {("t", 0): Committed(2, -1, "", nodes[0].now_ms())})
        with pytest.raises(NotCoordinator):
            groups.check()


async def test_nothing_is_kept_of_topics_that_were_deleted(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes, "kept")
        for _ in range(3):
            await create(client, nodes)
            key = nodes[0].store.partition("t", 0).key
            assert (await produce(client, b"a", acks=-1))[0] == NONE
            await until(
                lambda key=key: all(node.replicas.telling.in_sync(key) for node in nodes[1:]),  # type: ignore[misc]
                "the leader has reported who is in sync",
            )
            assert nodes[0].replicas is not None
            nodes[0].replicas._raised_ms[key] = 0
            for node in nodes:
                assert node.replicas is not None
                node.replicas._pushing._plans.setdefault(7, PushPlan(1)).begin(key, 0)
            nodes[0].store.delete_topics(["t"])
            await until(lambda: not any("t" in node.catalogue.topics for node in nodes), "every node knows")
        # Deleted while its epoch is being saved.
        nodes[0].store.create_topics([NewTopic("u", 1, {}, (1, 2, 3))])
        await asyncio.sleep(0)
        nodes[0].store.delete_topics(["u"])
        await until(lambda: not any("u" in node.catalogue.topics for node in nodes), "every node knows")
        # Reported by a leader that has not heard of the deletion, or of one that this node will hear of.
        for node in nodes[1:]:
            assert node.replicas is not None
            link, version = node.replicas.links.incoming[1], node.catalogue.version
            for number, expected in ((version, False), (version + 1, True)):
                name = key_text((uuid4(), 0))
                message = Catalogue(number, encode_told(Told(None, {name: (1, [1, 2])})))
                node.replicas.telling.heard(link, message, lambda: None)
                assert (name in node.replicas.telling._in_sync) == expected
        await create(client, nodes, "last")
        await until(lambda: all("last" in node.catalogue.topics for node in nodes), "every node knows")
        await asyncio.sleep(0)
        current = {key_text((topic.id, 0)) for topic in nodes[0].catalogue.topics.values()}
        for node in nodes:
            replicas = node.replicas
            assert replicas is not None
            metadata = replicas.metadata
            kept = [
                *replicas.replicas,
                *replicas._raised_ms,
                *metadata._states,
                *metadata._watchers,
                *metadata._unsaved,
            ]
            kept += [key for plan in replicas._pushing._plans.values() for key in plan._positions]
            assert {key_text(key) for key in kept} <= current
            assert set(replicas.telling._in_sync) | set(replicas.telling._leading) <= current
            await until(
                lambda node=node: saved(node) <= current,  # type: ignore[misc]
                "the file has lost them with the last change",
            )


def saved(node: Node) -> set[str]:
    """The partitions whose records a node has on its disk."""
    return set(json.loads((Path(node.config.node.data) / "replication.json").read_bytes())["partitions"])


async def test_the_end_of_a_link_that_was_replaced_leaves_the_newer_one(tmp_path: Path, connect: Connect) -> None:
    """Two dials at once leave one link, on which both sides go on although the other one is closed after it is up."""
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert nodes[0].replicas is not None
        assert nodes[1].replicas is not None
        peers, others = nodes[0].replicas.links, nodes[1].replicas.links
        first, accepted = peers.outgoing[2], others.incoming[1]
        dialled = asyncio.create_task(peers._run(nodes[0].replicas.config.nodes[1], VERSION))
        await until(lambda: first not in peers._all and accepted not in others._all, "the older link is closed")
        await asyncio.wait_for(dialled, 10)  # The node dials again, in the place of the link that it has lost.
        await until(lambda: peers.outgoing.get(2) in peers._all, "the leader has a link")
        await until(lambda: others.incoming.get(1) in others._all, "the follower has a link")
        assert (await produce(client, b"a", acks=-1))[0] == NONE
        await until(lambda: in_sync(nodes[0], "t") == [1, 2, 3], "all replicas are in sync")


async def test_what_waits_behind_a_catalogue_ends_with_its_link(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that is told of the end of a link hears nothing more of it: credit is that of the next one."""
    received: list[object] = []
    feed = Replica.feed

    def noting(replica: Replica, event: object) -> None:
        received.append(getattr(event, "message", None))
        feed(replica, event)  # type: ignore[arg-type]

    async with running_cluster(tmp_path) as nodes:
        await create(await connect(nodes[0]), nodes)
        node, replicas = nodes[1], nodes[1].replicas
        assert replicas is not None
        changes: list[Callable[[None, None], None]] = []
        monkeypatch.setattr(Replica, "feed", noting)
        for closes in (False, True):
            link = replicas.links.incoming[1]
            watermark = Watermark(node.store.partition("t", 0).key, 1, 1, 0, 0, 0)
            told = Catalogue(node.catalogue.version + 1, encode_told(Told(list(node.catalogue.topics.values()))))
            with monkeypatch.context() as patched:
                patched.setattr(node.store.changes, "submit", lambda plan, done: changes.append(done))
                replicas.link_delivered(link, [told, watermark])
            if closes:
                link.fail(ConnectionLost("planted"))
            assert not any(message is watermark for message in received)
            changes.pop()(None, None)  # The catalogue is durable.
            assert any(message is watermark for message in received) == (not closes)


async def test_a_follower_is_dialled_whatever_has_failed(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected, failures = Peers._connect, Counter[int]()

    async def failing(peers: Peers, node: ClusterNode, link: PeerLink) -> None:
        failures[node.id] += 1
        if failures[node.id] <= 2:
            raise RuntimeError("a bug")
        await connected(peers, node, link)

    monkeypatch.setattr(Peers, "_connect", failing)
    async with running_cluster(tmp_path) as nodes:
        await create(await connect(nodes[0]), nodes)


async def test_a_commit_is_refused_before_it_is_written_while_too_few_are_in_sync(
    tmp_path: Path, connect: Connect
) -> None:
    """Written first, every retry of every consumer would stay in the log until the followers are back."""
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        await until(lambda: in_sync(nodes[0], OFFSETS_TOPIC) == [1, 2, 3], "the offsets are on all nodes")
        groups = nodes[0].groups
        committed = Committed(5, -1, "", nodes[0].now_ms())
        await until(lambda: not isinstance(groups._refusal, CoordinatorLoading), "the offsets are read")
        await groups.commit("g", {("t", 0): committed})
        for node in nodes[1:]:
            assert node.replicas is not None
            node.replicas.links.stop()
        with pytest.raises(CoordinatorUnavailable):
            await groups.commit("g", {("t", 0): replace(committed, offset=6)})
        await until(lambda: in_sync(nodes[0], OFFSETS_TOPIC) == [1], "the others are not in sync any more")
        partition = nodes[0].store.partition(OFFSETS_TOPIC, 0)
        end = partition.log_end
        with pytest.raises(CoordinatorUnavailable):
            await groups.commit("g", {("t", 0): replace(committed, offset=7)})
        with pytest.raises(CoordinatorUnavailable):
            await groups.delete_group("g")
        assert partition.log_end == end
        assert groups.committed("g") == {("t", 0): committed}


async def test_a_commit_for_a_topic_that_was_created_again_outlives_a_catalogue_that_is_late(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer of the new topic commits where its catalogue is still being written, behind one without the topic."""
    leaders = json.dumps([{"topics": "__*", "node": 2}])
    async with running_cluster(tmp_path, replication__leaders=leaders) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        catalogue, coordinator = nodes[0].catalogue, nodes[1]
        await until(lambda: coordinator.groups._refusal is None, "the offsets are read")
        old = coordinator.catalogue.topics["t"]
        disk, may_write = coordinator.store.disk, threading.Event()
        write = disk.write

        def write_late(path: Path, data: bytes, *, durable: bool) -> None:
            assert path.name != "topics.json" or may_write.wait(10)
            write(path, data, durable=durable)

        monkeypatch.setattr(disk, "write", write_late)
        try:
            await change_catalogue(nodes[0].store, lambda: catalogue.delete(["t"]))
            await change_catalogue(nodes[0].store, lambda: catalogue.create([NewTopic("t", 1, {}, (1, 2, 3))]))
            assert coordinator.replicas is not None
            telling = coordinator.replicas.telling
            await until(lambda: telling.newest_report == catalogue.version, "the catalogue has arrived")
            await until(lambda: nodes[0].store.partition("t", 0).is_leader, "the new topic is led")
            assert (await produce(client, b"a", acks=1))[0] == NONE
            partition = offset_commit.OffsetCommitRequestPartition(
                partition_index=0, committed_offset=1, committed_metadata=""
            )
            request = offset_commit.OffsetCommitRequest(
                group_id="g", generation_id_or_member_epoch=-1, member_id="",
                topics=(offset_commit.OffsetCommitRequestTopic(name="t", partitions=(partition,)),),
            )  # fmt: skip
            answer = await (await connect(coordinator)).ask(request)
            assert answer.topics[0].partitions[0].error_code == NONE
            assert coordinator.catalogue.topics["t"] == old, "it is not in force yet"
            assert coordinator.groups.committed("g")["t", 0].offset == 1
        finally:
            may_write.set()
        await until(lambda: coordinator.catalogue.version == catalogue.version, "the catalogue is in force")
        assert coordinator.groups.committed("g")["t", 0].offset == 1
        await coordinator.groups.upkeep()
        assert coordinator.groups.table.of("g")
        await change_catalogue(nodes[0].store, lambda: catalogue.delete(["t"]))
        await until(lambda: coordinator.catalogue.version == catalogue.version, "the catalogue is in force")
        assert not coordinator.groups.committed("g")


async def test_changes_of_the_isr_are_counted_by_who_came_and_who_went(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        await create(await connect(nodes[0]), nodes)
        replicas = nodes[0].replicas
        assert replicas is not None
        replica = next(iter(replicas.replicas.values()))
        counts = []
        for before, after in (("1", "1,2"), ("10,200", "10"), ("2", "10"), ("1", "1")):
            replicas.isr_changes.clear()
            replicas.reported(replica, Report("isr changed", (("before", before), ("after", after), ("eligible", ""))))
            counts.append((replicas.isr_changes["expand"], replicas.isr_changes["shrink"]))
        assert counts == [(1, 0), (0, 1), (1, 1), (0, 0)], "the last one changed who is eligible, and nothing else"


async def test_what_is_measured(tmp_path: Path, connect: Connect) -> None:
    async with running_cluster(tmp_path) as nodes:
        client = await connect(nodes[0])
        await create(client, nodes)
        assert nodes[2].replicas is not None
        nodes[2].replicas.links.stop()
        for number in range(10):
            assert (await produce(client, b"x" * 100, b"y" * 100, acks=1))[0] == NONE, number
        await until(lambda: in_sync(nodes[0], "t") == [1, 2], "the lost one is not in sync any more")
        _, document = health(nodes[0])
        assert document["status"] == "degraded"
        told = document["replication"]
        assert "t-0" in told["under_replicated"]
        (lost,) = [one for one in told["followers"] if one["node_id"] == 3]
        assert lost["lag_records"] == 20
        assert 2_000 < lost["lag_bytes"] < 20_000
        assert lost["lag_seconds_max"] > 0.4
        text = Exporter(nodes[0]).render().decode()
        for sample in (
            'walstream_replication_lag_records{follower="3",partition="0",topic="t"} 20.0',
            'walstream_replication_lag_records{follower="2",partition="0",topic="t"} 0.0',
            'walstream_replication_lag_bytes{follower="2",partition="0",topic="t"} 0.0',
            'walstream_replication_lag_seconds{follower="2",partition="0",topic="t"} 0.0',
            'walstream_replication_in_sync{follower="3",partition="0",topic="t"} 0.0',
            'walstream_replication_link_up{direction="outgoing",peer="2"} 1.0',
            'walstream_replication_link_up{direction="outgoing",peer="3"} 0.0',
            'walstream_replication_isr_changes_total{change="shrink"}',
            'walstream_replication_sent_bytes_total{direction="outgoing",peer="2"}',
            'walstream_replication_credit_bytes{peer="2"}',
            "walstream_replication_partitions_under_replicated",
        ):
            assert sample in text
        for name, least in (("lag_bytes", 2_000), ("lag_seconds", 0.4)):
            (sample,) = re.findall(rf'walstream_replication_{name}{{follower="3",partition="0",topic="t"}} (\S+)', text)
            assert least < float(sample) < 20_000, name
        assert 'walstream_replication_held_bytes{peer="1"}' in Exporter(nodes[1]).render().decode()
