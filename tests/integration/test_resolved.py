"""Resolved positions through a real node: no record is stamped at or before what was said to be over. And holds."""

from __future__ import annotations

import json
import threading
import time

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec

from walstream.log.batch import walk
from walstream.log.stamps import TAKEOVER_MS
from walstream.node.api.offsets import RESOLVED_TIMESTAMP
from walstream.node.process import NodeProcess

from .bare import Bare, Listed, named, one_record
from .clients import TIMEOUT_S, admin_of, configure_topic, create_topic, watermarks
from .replicating import running
from .support import MakeNode, wait_for

APPEND_TIME = {"message_timestamp_type": "LogAppendTime"}
NOT_LEADER, OFFSET_NOT_AVAILABLE, UNKNOWN_TOPIC = 6, 78, 3
PARTITIONS = 4


def resolved(connection: Bare, topic: str, *partitions: int) -> list[Listed]:
    return connection.list_offsets(topic, RESOLVED_TIMESTAMP, *(partitions or (0,)))


def stamps(connection: Bare, topic: str, partition: int = 0) -> list[tuple[int, int]]:
    """The last offset and the append time of every batch."""
    found: list[tuple[int, int]] = []
    offset = 0
    while data := connection.fetch(topic, offset, partition=partition).records:
        for _, header in walk(data):
            assert header.uses_append_time
            found.append((header.last_offset, header.max_timestamp))
            offset = header.next_offset
    return found


def check(promises: list[Listed], found: list[tuple[int, int]]) -> None:
    for promise in promises:
        assert promise.error == 0
        for last_offset, stamp_ms in found:
            assert last_offset < promise.offset or stamp_ms > promise.timestamp


def test_what_is_answered(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic, **APPEND_TIME)
    with Bare(node.address) as connection:
        before_ms = int(time.time() * 1000)
        (empty,) = resolved(connection, topic)
        assert (empty.error, empty.offset) == (0, 0)
        assert before_ms <= empty.timestamp <= int(time.time() * 1000) + 100
        connection.produce(topic, one_record(b"a"))
        (after,) = resolved(connection, topic)
        assert after.offset == 1
        ((_, stamp_ms),) = stamps(connection, topic)
        assert empty.timestamp < stamp_ms <= after.timestamp
        assert resolved(connection, topic, 7)[0].error == UNKNOWN_TOPIC
        create_topic(node.address, f"{topic}-created")
        connection.produce(f"{topic}-created", one_record(b"a"))
        (without,) = resolved(connection, f"{topic}-created")
        assert (without.error, without.offset, without.timestamp) == (0, -1, -1)


def test_librdkafka_can_ask_for_it(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic, 2, **APPEND_TIME)
    create_topic(node.address, f"{topic}-created")
    with Bare(node.address) as connection:
        connection.produce(topic, one_record(b"a"), partition=1)
    admin = admin_of(node.address)
    asked = [TopicPartition(topic, 0), TopicPartition(topic, 1), TopicPartition(f"{topic}-created", 0)]
    futures = admin.list_offsets({one: OffsetSpec.for_timestamp(RESOLVED_TIMESTAMP) for one in asked})
    answers = {(one.topic, one.partition): future.result(TIMEOUT_S) for one, future in futures.items()}
    assert [answers[one.topic, one.partition].offset for one in asked] == [0, 1, -1]
    now_ms = int(time.time() * 1000)
    for one in asked[:2]:
        assert abs(answers[one.topic, one.partition].timestamp - now_ms) < 10_000
    assert answers[f"{topic}-created", 0].timestamp == -1


def test_no_record_is_stamped_before_what_was_resolved_over_kills(make_node: MakeNode) -> None:
    node = make_node()
    create_topic(node.address, "t", PARTITIONS, **APPEND_TIME)
    promises: dict[int, list[Listed]] = {index: [] for index in range(PARTITIONS)}

    def ask(until: threading.Event) -> None:
        with Bare(node.address) as connection:
            while not until.is_set():
                for listed in resolved(connection, "t", *range(PARTITIONS)):
                    promises[listed.partition].append(listed)

    for _ in range(3):
        until = threading.Event()
        asking = threading.Thread(target=ask, args=(until,))
        asking.start()
        with Bare(node.address) as connection:
            for number in range(150):
                connection.produce("t", one_record(b"x"), partition=number % (PARTITIONS - 1))  # The last one is idle.
        until.set()
        asking.join()
        with Bare(node.address) as connection:
            before_ms = int(time.time() * 1000)
            for listed in resolved(connection, "t", *range(PARTITIONS)):
                assert listed.timestamp >= before_ms - 1
                promises[listed.partition].append(listed)
        node.kill()
        node.start()
    with Bare(node.address) as connection:
        for index in range(PARTITIONS):
            connection.produce("t", one_record(b"last"), partition=index)
            found = stamps(connection, "t", index)
            assert [time_ms for _, time_ms in found] == sorted(time_ms for _, time_ms in found)
            check(promises[index], found)
            assert len(promises[index]) > 10
            ends = [listed.timestamp for listed in promises[index]]
            assert len(set(ends)) > 5


def test_where_stamps_are_ahead_of_the_clock_an_idle_partition_holds_up_no_busy_one(make_node: MakeNode) -> None:
    node = make_node()
    create_topic(node.address, "t", 2, **APPEND_TIME)
    node.stop()
    file = node.data / "reserved.json"
    reserved = json.loads(file.read_text()) if file.exists() else {}
    ahead_ms = int(time.time() * 1000) + 600_000  # An earlier process had another idea of the time.
    file.write_text(json.dumps({**reserved, "append_time_ms": ahead_ms}))
    node.start()
    with Bare(node.address) as connection:
        for _ in range(3):
            connection.produce("t", one_record(b"b"))
            stamp_ms = stamps(connection, "t")[-1][1]
            assert stamp_ms > ahead_ms
            assert all(listed.timestamp >= stamp_ms for listed in resolved(connection, "t", 0, 1))


def test_in_a_cluster(make_node: MakeNode) -> None:
    with running(make_node, leaders={"t": 2}) as cluster:
        cluster.create("t", **APPEND_TIME)
        promises: list[Listed] = []

        def ask(number: int) -> Listed:
            with Bare(cluster[number].address) as connection:
                (listed,) = resolved(connection, "t")
                return listed

        def settled(number: int) -> bool:
            with Bare(cluster[number].address) as connection:
                return connection.produce("t", one_record(b"x"), acks=-1).error == 0 and ask(number).error == 0

        assert ask(1).error == NOT_LEADER
        for turn in range(2):
            wait_for(lambda: settled(2), "the leader leads")
            promises += [ask(2) for _ in range(20)]
            assert abs(promises[-1].timestamp - time.time() * 1000) < 2 * TAKEOVER_MS
            if turn == 0:
                cluster[2].kill()
                cluster[2].start()
                assert ask(2).error in (named(0), named(OFFSET_NOT_AVAILABLE), named(NOT_LEADER))
        promises.append(ask(2))
        with Bare(cluster[2].address) as connection:
            found = stamps(connection, "t")
        cluster.wait_in_sync("t", 3)
        for number in (1, 2, 3):  # Another leader, chosen by the operator.
            cluster[number].stop()
            cluster[number].settings["replication.leaders"] = json.dumps([{"topics": "t", "node": 3}])
        moved_ms = int(time.time() * 1000)
        for number in (1, 2, 3):
            cluster[number].spawn()
        for number in (1, 2, 3):
            wait_for(cluster[number].answers, "the node answers", 60)
        wait_for(lambda: settled(3), "the new leader leads")
        with Bare(cluster[3].address) as connection:
            after = stamps(connection, "t")
        assert after[: len(found)] == found
        assert all(stamp_ms >= moved_ms + TAKEOVER_MS for _, stamp_ms in after[len(found) :])
        check(promises, after)


# ── holds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fill(connection: Bare, topic: str, count: int, key: bytes | None = None) -> None:
    for number in range(count):
        assert connection.produce(topic, one_record(str(number).encode().ljust(1000, b"."), key)).error == 0


@pytest.fixture
def busy_node(make_node: MakeNode) -> NodeProcess:
    """A node that looks for work all the time."""
    return make_node(log__retention_check_interval_ms=50, log__checkpoint_interval_ms=200)


def test_a_hold_gates_retention(busy_node: NodeProcess, topic: str) -> None:
    address = busy_node.address
    create_topic(address, topic, segment_bytes=4096, retention_bytes=8192, **APPEND_TIME)
    with Bare(address) as connection:
        (resolved_at_start,) = resolved(connection, topic)
        configure_topic(address, topic, walstream_hold_from_ms=resolved_at_start.timestamp)
        fill(connection, topic, 40)
        time.sleep(0.5)
        assert watermarks(address, topic) == (0, 40)
        busy_node.kill()
        busy_node.start()
    with Bare(address) as connection:
        time.sleep(0.5)
        assert watermarks(address, topic) == (0, 40)
        held_from_ms = stamps(connection, topic)[20][1]
    configure_topic(address, topic, walstream_hold_from_ms=held_from_ms)
    wait_for(lambda: watermarks(address, topic)[0] >= 15, "what lies before the hold goes")
    time.sleep(0.3)
    assert watermarks(address, topic)[0] <= 20
    configure_topic(address, topic, walstream_hold_bytes_max=4096)
    wait_for(lambda: watermarks(address, topic)[0] > 20, "a hold keeps so much and no more")
    configure_topic(address, topic, walstream_hold_from_ms=-1)
    wait_for(lambda: watermarks(address, topic)[0] >= 28, "without a hold the topic's own settings decide")


def test_a_hold_gates_compaction(busy_node: NodeProcess, topic: str) -> None:
    address = busy_node.address
    create_topic(
        address, topic, cleanup_policy="compact", segment_bytes=4096, min_cleanable_dirty_ratio=0.01, **APPEND_TIME
    )
    configure_topic(address, topic, walstream_hold_from_ms=0)
    with Bare(address) as connection:
        fill(connection, topic, 40, b"key")
        time.sleep(1)
        found = stamps(connection, topic)
        assert len(found) == 40
        configure_topic(address, topic, walstream_hold_from_ms=found[24][1])
        wait_for(lambda: stamps(connection, topic)[0] != found[0], "older records are compacted")
        assert stamps(connection, topic)[-16:] == found[24:]
        configure_topic(address, topic, walstream_hold_from_ms=-1)
        wait_for(lambda: len(stamps(connection, topic)) < 10, "without a hold all but the end is compacted")
