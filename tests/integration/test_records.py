"""Limits and clocks of records: the largest message, offsets by time, timestamps set by the node."""

from __future__ import annotations

import time

import kafka
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

from walstream.node.process import NodeProcess

from .bare import CORRUPT_MESSAGE, MESSAGE_TOO_LARGE, Bare, one_record
from .clients import (
    EACH_CLIENT,
    TIMEOUT_S,
    Client,
    Item,
    admin_of,
    configure_topic,
    create_topic,
    read_messages,
    readers,
    watermarks,
)

TIMESTAMP_LOG_APPEND = 2


def produce_one(address: str, topic: str, value: bytes) -> KafkaError | None:
    """Send one record whatever its size and return the error, if any."""
    outcome: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": address, "message.max.bytes": 200_000_000, "batch.size": 1})
    producer.produce(topic, value, partition=0, on_delivery=lambda error, _: outcome.append(error))
    assert producer.flush(TIMEOUT_S) == 0
    return outcome[0]


def test_the_largest_message_passes_and_one_byte_more_is_refused(node: NodeProcess, topic: str) -> None:
    bytes_max = 50_000
    create_topic(node.address, topic, max_message_bytes=bytes_max)
    overhead = len(one_record(bytes(bytes_max))) - bytes_max
    largest = bytes(bytes_max - overhead)
    assert len(one_record(largest)) == bytes_max
    with Bare(node.address) as connection:
        assert connection.produce(topic, one_record(largest)).error == 0
        assert connection.produce(topic, one_record(largest + b"!")).error == MESSAGE_TOO_LARGE
    assert produce_one(node.address, topic, largest) is None
    refused = produce_one(node.address, topic, bytes(bytes_max + 100))
    assert refused is not None
    assert refused.code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert [len(message.value()) for message in read_messages(node.address, topic)] == [len(largest)] * 2


def test_the_default_limit_is_kafkas(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    assert produce_one(node.address, topic, bytes(1_048_000)) is None
    refused = produce_one(node.address, topic, bytes(1_100_000))
    assert refused is not None
    assert refused.code() == KafkaError.MSG_SIZE_TOO_LARGE


def test_messages_of_many_megabytes(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic, max_message_bytes=30_000_000)
    value = b"many megabytes, " * 1_250_000
    assert produce_one(node.address, topic, value) is None
    # A reader that asks for less than one batch still gets it whole: otherwise it could never go on.
    for reader in readers():
        assert [item.value for item in reader.read(node.address, topic)] == [value], reader.name


def test_a_batch_with_a_wrong_checksum_is_refused(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    batch = bytearray(one_record(b"x" * 100))
    batch[-3] ^= 0x40
    with Bare(node.address) as connection:
        assert connection.produce(topic, bytes(batch)).error == CORRUPT_MESSAGE
        assert connection.produce(topic, one_record(b"good")).base_offset == 0
    assert [message.value() for message in read_messages(node.address, topic)] == [b"good"]


@pytest.mark.parametrize("client", [each for each in EACH_CLIENT if each.id != "kcat"])
def test_offsets_by_time(node: NodeProcess, topic: str, client: Client) -> None:
    create_topic(node.address, topic)
    start_ms = int(time.time() * 1000) - 3_600_000
    # One write for each record, so that each is a batch; then one batch of many.
    for number in range(5):
        client.write(node.address, topic, [Item(b"v", timestamp_ms=start_ms + number * 1000)])
    client.write(node.address, topic, [Item(b"v", timestamp_ms=start_ms + number * 1000) for number in range(5, 50)])

    wanted = {0: start_ms - 5, 3: start_ms + 2500, 4: start_ms + 4000, 30: start_ms + 29_001}
    consumer = Consumer({"bootstrap.servers": node.address, "group.id": "times"})
    for offset, timestamp in wanted.items():
        found = consumer.offsets_for_times([TopicPartition(topic, 0, timestamp)], timeout=TIMEOUT_S)
        assert found[0].offset == offset
    after = consumer.offsets_for_times([TopicPartition(topic, 0, start_ms + 10**9)], timeout=TIMEOUT_S)
    assert after[0].offset in (-1, 50)  # librdkafka says "the end" as -1
    consumer.close()

    reader = kafka.KafkaConsumer(bootstrap_servers=node.address)
    partition = kafka.TopicPartition(topic, 0)
    for offset, timestamp in wanted.items():
        assert reader.offsets_for_times({partition: timestamp})[partition].offset == offset
    assert reader.offsets_for_times({partition: start_ms + 10**9})[partition] is None
    assert reader.beginning_offsets([partition])[partition] == 0
    assert reader.end_offsets([partition])[partition] == 50
    reader.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_microseconds_for_milliseconds_are_refused(node: NodeProcess, topic: str, compression: str) -> None:
    create_topic(node.address, topic)
    producer = Producer(
        {"bootstrap.servers": node.address, "compression.type": compression, "enable.idempotence": True, "linger.ms": 0}
    )
    now_ms = int(time.time() * 1000)

    def sent(*timestamps: int) -> list[int]:
        """Send the records as one batch and return their errors."""
        codes: list[int] = []
        for timestamp in timestamps:
            producer.produce(
                topic, b"v" * 100, partition=0, timestamp=timestamp,
                on_delivery=lambda error, _: codes.append(error.code() if error else 0),
            )  # fmt: skip
        assert producer.flush(TIMEOUT_S) == 0
        return codes

    assert sent(now_ms) == [0]
    assert set(sent(now_ms * 1000)) == {KafkaError.INVALID_TIMESTAMP}
    assert sent(1) == [0], "as old as it likes"
    configure_topic(node.address, topic, message_timestamp_before_max_ms="60000")
    assert set(sent(now_ms - 120_000)) == {KafkaError.INVALID_TIMESTAMP}
    configure_topic(node.address, topic, message_timestamp_after_max_ms=str(2**63 - 1))
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = admin_of(node.address)
    settings = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
    assert settings["message.timestamp.before.max.ms"].value == "60000"
    assert settings["message.timestamp.after.max.ms"].value == "9223372036854775807"
    assert sent(now_ms * 1000) == [0]
    assert [message.timestamp()[1] for message in read_messages(node.address, topic)] == [now_ms, 1, now_ms * 1000]
    configure_topic(node.address, topic, message_timestamp_type="LogAppendTime")
    assert sent(now_ms * 1000) == [0]


@pytest.mark.parametrize("client", EACH_CLIENT)
def test_log_append_time(node: NodeProcess, topic: str, client: Client) -> None:
    create_topic(node.address, topic, message_timestamp_type="LogAppendTime")
    before_ms = int(time.time() * 1000)
    long_ago = None if client.name == "kcat" else 1_000_000_000_000
    client.write(node.address, topic, [Item(b"v", timestamp_ms=long_ago) for _ in range(5)], "gzip")
    client.write(node.address, topic, [Item(b"w", timestamp_ms=long_ago)])
    after_ms = int(time.time() * 1000)
    messages = read_messages(node.address, topic)
    kinds, times = zip(*(message.timestamp() for message in messages), strict=True)
    assert set(kinds) == {TIMESTAMP_LOG_APPEND}
    assert all(before_ms <= moment <= after_ms + 1 for moment in times)
    assert list(times) == sorted(times)
    for reader in readers():
        assert [item.timestamp_ms for item in reader.read(node.address, topic)] == list(times), reader.name


def test_an_offset_out_of_range_is_said_so(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    assert produce_one(node.address, topic, b"only") is None
    with Bare(node.address) as connection:
        assert connection.fetch(topic, 1).error == 0
        assert connection.fetch(topic, 2).error == 1
        assert connection.fetch(topic, -7).error == 1
    with pytest.raises(KafkaException) as raised:
        read_messages(node.address, topic, offset=1000)
    assert raised.value.args[0].code() == KafkaError._AUTO_OFFSET_RESET
    assert watermarks(node.address, topic) == (0, 1)


def test_acks_zero_gets_no_answer_and_is_kept(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    producer = Producer({"bootstrap.servers": node.address, "acks": 0})
    for number in range(100):
        producer.produce(topic, str(number).encode(), partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    deadline = time.monotonic() + TIMEOUT_S
    while watermarks(node.address, topic)[1] < 100:
        assert time.monotonic() < deadline
    assert len(read_messages(node.address, topic)) == 100
