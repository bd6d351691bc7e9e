"""What the node does by itself: retention by size and time, compaction of compacted topics."""

from __future__ import annotations

import asyncio
import time

import aiokafka
import kafka
import pytest
from confluent_kafka import KafkaException

from walstream.log.batch import walk
from walstream.log.records import Record, build_batch
from walstream.node.process import NodeProcess

from .bare import Bare, one_record
from .clients import Confluent, Item, configure_topic, create_topic, read_messages, watermarks
from .support import MakeNode, wait_for

INVALID_RECORD = 87


@pytest.fixture
def busy_node(make_node: MakeNode) -> NodeProcess:
    """A node that looks for work all the time and makes small segments."""
    return make_node(log__retention_check_interval_ms=50, log__checkpoint_interval_ms=200)


def fill(node: NodeProcess, topic: str, batches: int, *, timestamp_ms: int | None = None) -> None:
    """Write batches of one record of 1,000 bytes each."""
    for number in range(batches):
        item = Item(str(number).encode().ljust(1000, b"."), f"key {number}".encode(), timestamp_ms=timestamp_ms)
        Confluent().write(node.address, topic, [item])


def test_retention_by_size(busy_node: NodeProcess, topic: str) -> None:
    create_topic(busy_node.address, topic, segment_bytes=4096, retention_bytes=10_000)
    fill(busy_node, topic, 30)
    wait_for(lambda: watermarks(busy_node.address, topic)[0] >= 10, "old segments go")
    low, high = watermarks(busy_node.address, topic)
    assert high == 30
    assert low <= 25, "what retention.bytes allows is kept"
    assert [message.offset() for message in read_messages(busy_node.address, topic, offset=low)] == list(range(low, 30))


def test_retention_by_time(busy_node: NodeProcess, topic: str) -> None:
    create_topic(busy_node.address, topic, segment_bytes=4096)
    long_ago_ms = int(time.time() * 1000) - 30 * 24 * 3600 * 1000
    configure_topic(busy_node.address, topic, retention_ms=-1)
    fill(busy_node, topic, 12, timestamp_ms=long_ago_ms)
    fill(busy_node, topic, 12)
    assert watermarks(busy_node.address, topic)[0] == 0
    configure_topic(busy_node.address, topic, retention_ms=24 * 3600 * 1000)
    wait_for(lambda: watermarks(busy_node.address, topic)[0] >= 8, "all full segments of last month go")
    low, high = watermarks(busy_node.address, topic)
    assert low <= 12
    assert high == 24
    assert len(read_messages(busy_node.address, topic, offset=low)) == 24 - low


def test_retention_of_everything_keeps_the_offsets(busy_node: NodeProcess, topic: str) -> None:
    create_topic(busy_node.address, topic, segment_bytes=4096)
    long_ago_ms = int(time.time() * 1000) - 3600 * 1000
    fill(busy_node, topic, 5, timestamp_ms=long_ago_ms)
    configure_topic(busy_node.address, topic, retention_ms=1000, segment_ms=100)
    wait_for(lambda: watermarks(busy_node.address, topic) == (5, 5), "all goes, the active segment too once it is old")
    busy_node.restart()
    assert watermarks(busy_node.address, topic) == (5, 5)
    with Bare(busy_node.address) as connection:
        assert connection.produce(topic, one_record(b"next")).base_offset == 5


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_a_segment_rolls_by_its_age_after_a_restart(make_node: MakeNode, topic: str, ends: str) -> None:
    node = make_node()
    create_topic(node.address, topic, segment_ms=60_000)
    first_ms = int(time.time() * 1000) - 600_000

    def write(after_ms: int) -> list[str]:
        item = Item(b"x", timestamp_ms=first_ms + after_ms)
        Confluent().write(node.address, topic, [item])
        return sorted(path.name for path in node.data.glob(f"topics/{topic}*/0/*.log"))

    assert len(write(0)) == 1
    getattr(node, ends)()
    node.start()
    assert len(write(60_000)) == 1
    assert len(write(60_001)) == 2
    assert [message.offset() for message in read_messages(node.address, topic)] == [0, 1, 2]


def test_compaction_keeps_the_last_of_each_key(busy_node: NodeProcess, topic: str) -> None:
    create_topic(
        busy_node.address,
        topic,
        cleanup_policy="compact",
        segment_bytes=4096,
        min_cleanable_dirty_ratio=0.01,
        delete_retention_ms=0,
    )
    keys, times = 20, 10
    for turn in range(times):
        items = [Item(f"{turn}".encode().ljust(100), f"key {key}".encode()) for key in range(keys)]
        Confluent().write(busy_node.address, topic, items, "lz4" if turn % 2 else "none")
    Confluent().write(busy_node.address, topic, [Item(None, b"key 0")])
    # Something after it, so that the tombstone's segment is sealed.
    for number in range(12):
        Confluent().write(busy_node.address, topic, [Item(bytes(1000), f"filler {number}".encode())])
    end = keys * times + 1 + 12

    def compacted() -> bool:
        found = read_messages(busy_node.address, topic)
        old = [message for message in found if not message.key().startswith(b"filler")]
        return len(old) == keys - 1

    wait_for(compacted, "one record for each key remains, and none for the deleted one", timeout_s=30)
    messages = read_messages(busy_node.address, topic)
    last = {message.key(): message for message in messages}
    assert len(last) == len(messages), "each key once"
    for key in range(1, keys):
        message = last[f"key {key}".encode()]
        assert message.value() == f"{times - 1}".encode().ljust(100)
        assert message.offset() == (times - 1) * keys + key, "offsets stay what they were"
    assert watermarks(busy_node.address, topic)[1] == end
    assert [message.offset() for message in messages] == sorted(message.offset() for message in messages)

    busy_node.kill()
    busy_node.start()
    assert {message.key(): message.value() for message in read_messages(busy_node.address, topic)} == {
        key: message.value() for key, message in last.items()
    }


def read_in_steps(client: str, address: str, topic: str, bytes_max: int) -> list[bytes | None]:
    """Read a topic to its end with a client that asks for so many bytes at a time; return the values."""
    if client == "librdkafka":
        settings = {"fetch.message.max.bytes": bytes_max}
        return [message.value() for message in read_messages(address, topic, **settings)]
    if client == "kafka-python":
        consumer = kafka.KafkaConsumer(bootstrap_servers=address, group_id=None, max_partition_fetch_bytes=bytes_max)
        try:
            at = kafka.TopicPartition(topic, 0)
            consumer.assign([at])
            consumer.seek_to_beginning(at)
            end, values = consumer.end_offsets([at])[at], []
            deadline = time.monotonic() + 30
            while consumer.position(at) < end:
                assert time.monotonic() < deadline, f"stays at {consumer.position(at)}"
                values += [record.value for record in consumer.poll(1000).get(at, ())]
            return values
        finally:
            consumer.close()

    async def run() -> list[bytes | None]:
        at = aiokafka.TopicPartition(topic, 0)
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=address, max_partition_fetch_bytes=bytes_max)
        await consumer.start()
        try:
            consumer.assign([at])
            await consumer.seek_to_beginning(at)
            end, values = (await consumer.end_offsets([at]))[at], []
            while await consumer.position(at) < end:
                values += [record.value for record in (await consumer.getmany(at, timeout_ms=500)).get(at, ())]
            return values
        finally:
            await consumer.stop()

    return asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("client", ["librdkafka", "kafka-python", "aiokafka"])
def test_clients_read_past_the_last_batches_of_producers_that_compaction_emptied(
    busy_node: NodeProcess, topic: str, client: str
) -> None:
    address, producers = busy_node.address, 40
    create_topic(address, topic, cleanup_policy="compact", segment_bytes=4096, min_cleanable_dirty_ratio=0.01)
    with Bare(address) as connection:
        for number in range(producers):
            record = Record(0, int(time.time() * 1000), b"k", bytes(200))
            sequence = {"producer_id": 1_000 + number, "producer_epoch": 0, "base_sequence": 0}
            assert connection.produce(topic, bytes(build_batch([record], **sequence))).error == 0
        for number in range(12):
            connection.produce(topic, one_record(bytes(1000), b"k" if number == 0 else f"filler {number}".encode()))

        def emptied() -> int:
            offset, count = 0, 0
            while records := connection.fetch(topic, offset).records:
                for _, header in walk(records):
                    count += header.record_count == 0
                    offset = header.next_offset
            return count

        wait_for(lambda: emptied() == producers, "the last batch of each producer is empty", timeout_s=30)
    for bytes_max in (1 << 20, 1_000, 1):
        assert read_in_steps(client, address, topic, bytes_max) == [bytes(1000)] * 12, bytes_max


def test_a_compacted_topic_takes_no_record_without_key(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic, cleanup_policy="compact")
    with Bare(node.address) as connection:
        assert connection.produce(topic, one_record(b"value")).error == INVALID_RECORD
        assert connection.produce(topic, one_record(b"value", b"key")).error == 0
    with pytest.raises(KafkaException):
        Confluent().write(node.address, topic, [Item(b"value")])
