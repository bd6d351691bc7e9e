"""Topics through each admin client: made, grown, configured, deleted; and a thousand of them."""

from __future__ import annotations

import asyncio
import subprocess

import aiokafka.admin
import kafka.admin
import kafka.errors
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import ConfigResource, NewPartitions, NewTopic, ResourceType

from walstream.node.process import NodeProcess

from .clients import (
    TIMEOUT_S,
    Confluent,
    Item,
    admin_of,
    configure_topic,
    create_topic,
    needs_kcat,
    read_messages,
    watermarks,
)
from .support import MakeNode, wait_for


def settings_of(address: str, topic: str) -> dict[str, str | None]:
    admin = admin_of(address)
    (future,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    entries = future.result(TIMEOUT_S)
    return {name: entry.value for name, entry in entries.items()}


def partitions_of(address: str, topic: str) -> int:
    found = admin_of(address).list_topics(timeout=TIMEOUT_S).topics.get(topic)
    return 0 if found is None else len(found.partitions)


def error_of(raised: pytest.ExceptionInfo[KafkaException]) -> int:
    return int(raised.value.args[0].code())


def test_confluent_admin(node: NodeProcess, topic: str) -> None:
    admin = admin_of(node.address)
    created = admin.create_topics([NewTopic(topic, 2, 1, config={"retention.ms": "3600000"})])[topic]
    created.result(TIMEOUT_S)
    assert partitions_of(node.address, topic) == 2
    assert settings_of(node.address, topic)["retention.ms"] == "3600000"

    with pytest.raises(KafkaException) as raised:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(TIMEOUT_S)
    assert error_of(raised) == KafkaError.TOPIC_ALREADY_EXISTS

    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(TIMEOUT_S)
    assert partitions_of(node.address, topic) == 5
    with pytest.raises(KafkaException) as raised:
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(TIMEOUT_S)
    assert error_of(raised) == KafkaError.INVALID_PARTITIONS

    configure_topic(node.address, topic, retention_bytes=123_456)
    found = settings_of(node.address, topic)
    assert (found["retention.bytes"], found["retention.ms"]) == ("123456", "3600000")

    cluster = admin.describe_cluster().result(TIMEOUT_S)
    assert [f"{each.host}:{each.port}" for each in cluster.nodes] == [node.address]
    assert cluster.cluster_id

    admin.delete_topics([topic])[topic].result(TIMEOUT_S)
    wait_for(lambda: partitions_of(node.address, topic) == 0, "the topic is gone")
    with pytest.raises(KafkaException) as raised:
        admin.delete_topics([topic])[topic].result(TIMEOUT_S)
    assert error_of(raised) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_kafka_python_admin(node: NodeProcess, topic: str) -> None:
    admin = kafka.admin.KafkaAdminClient(bootstrap_servers=node.address)
    try:
        admin.create_topics([kafka.admin.NewTopic(topic, 2, 1, topic_configs={"retention.ms": "7200000"})])
        assert topic in admin.list_topics()
        assert settings_of(node.address, topic)["retention.ms"] == "7200000"
        with pytest.raises(kafka.errors.TopicAlreadyExistsError):
            admin.create_topics([kafka.admin.NewTopic(topic, 2, 1)])
        admin.create_partitions({topic: kafka.admin.NewPartitions(4)})
        assert partitions_of(node.address, topic) == 4
        resource = kafka.admin.ConfigResource(
            kafka.admin.ConfigResourceType.TOPIC, topic, configs={"max.message.bytes": "77777"}
        )
        admin.alter_configs([resource])
        assert settings_of(node.address, topic)["max.message.bytes"] == "77777"
        admin.delete_topics([topic])
        wait_for(lambda: topic not in admin.list_topics(), "the topic is gone")
    finally:
        admin.close()


def test_aiokafka_admin(node: NodeProcess, topic: str) -> None:
    async def run() -> None:
        admin = aiokafka.admin.AIOKafkaAdminClient(bootstrap_servers=node.address)
        await admin.start()
        try:
            await admin.create_topics(
                [aiokafka.admin.NewTopic(topic, 2, 1, topic_configs={"segment.bytes": "1048576"})]
            )
            assert topic in await admin.list_topics()
            (described,) = await admin.describe_topics([topic])
            assert len(described["partitions"]) == 2
            await admin.create_partitions({topic: aiokafka.admin.NewPartitions(3)})
            (described,) = await admin.describe_topics([topic])
            assert len(described["partitions"]) == 3
            resource = aiokafka.admin.config_resource.ConfigResource(
                aiokafka.admin.config_resource.ConfigResourceType.TOPIC, topic
            )
            (answer,) = await admin.describe_configs([resource])
            entries = {entry[0]: entry[1] for entry in answer.resources[0][4]}
            assert entries["segment.bytes"] == "1048576"
            await admin.delete_topics([topic])
            for _ in range(100):
                if topic not in await admin.list_topics():
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the topic is still there")
        finally:
            await admin.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@needs_kcat
def test_kcat_lists_topics(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic, partitions=3)
    done = subprocess.run(["kcat", "-b", node.address, "-L", "-t", topic], capture_output=True, check=True, timeout=30)
    assert f'topic "{topic}" with 3 partitions' in done.stdout.decode()


@pytest.mark.parametrize("name", ["", ".", "..", "with space", "slash/slash", "ž", "x" * 250])
def test_illegal_names_are_refused(node: NodeProcess, name: str) -> None:
    admin = admin_of(node.address)
    with pytest.raises((KafkaException, ValueError)):
        admin.create_topics([NewTopic(name, 1, 1)])[name].result(TIMEOUT_S)


def test_what_cannot_be_is_refused(node: NodeProcess, topic: str) -> None:
    admin = admin_of(node.address)
    cases = [
        (NewTopic(topic, 1, 3), KafkaError.INVALID_REPLICATION_FACTOR),
        (NewTopic(topic, 1, 1, config={"no.such.setting": "1"}), KafkaError.INVALID_CONFIG),
        (NewTopic(topic, 1, 1, config={"retention.ms": "soon"}), KafkaError.INVALID_CONFIG),
        (NewTopic(topic, 50_000, 1), KafkaError.INVALID_PARTITIONS),
    ]
    for wanted, code in cases:
        with pytest.raises(KafkaException) as raised:
            admin.create_topics([wanted])[topic].result(TIMEOUT_S)
        assert error_of(raised) == code
    assert partitions_of(node.address, topic) == 0


def test_validate_only_makes_nothing(node: NodeProcess, topic: str) -> None:
    admin = admin_of(node.address)
    admin.create_topics([NewTopic(topic, 1, 1)], validate_only=True)[topic].result(TIMEOUT_S)
    assert partitions_of(node.address, topic) == 0


def test_a_topic_made_again_is_empty(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    Confluent().write(node.address, topic, [Item(b"old")] * 10)
    admin = admin_of(node.address)
    admin.delete_topics([topic])[topic].result(TIMEOUT_S)
    create_topic(node.address, topic)
    assert watermarks(node.address, topic) == (0, 0)
    Confluent().write(node.address, topic, [Item(b"new")])
    assert [message.value() for message in read_messages(node.address, topic)] == [b"new"]


def test_delete_records(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    Confluent().write(node.address, topic, [Item(str(number).encode()) for number in range(100)])
    admin = admin_of(node.address)
    (future,) = admin.delete_records([TopicPartition(topic, 0, 40)]).values()
    assert future.result(TIMEOUT_S).low_watermark == 40
    assert watermarks(node.address, topic) == (40, 100)
    assert [message.offset() for message in read_messages(node.address, topic, offset=40)] == list(range(40, 100))
    with pytest.raises(KafkaException):
        read_messages(node.address, topic, offset=0)

    python = kafka.admin.KafkaAdminClient(bootstrap_servers=node.address)
    try:
        python.delete_records({kafka.TopicPartition(topic, 0): 60})
    finally:
        python.close()
    assert watermarks(node.address, topic) == (60, 100)

    (future,) = admin.delete_records([TopicPartition(topic, 0, 1000)]).values()
    with pytest.raises(KafkaException) as raised:
        future.result(TIMEOUT_S)
    assert error_of(raised) == KafkaError.OFFSET_OUT_OF_RANGE

    (future,) = admin.delete_records([TopicPartition(topic, 0, -1)]).values()  # -1: everything
    future.result(TIMEOUT_S)
    assert watermarks(node.address, topic) == (100, 100)


def test_a_thousand_topics(make_node: MakeNode) -> None:
    node = make_node()
    names = [f"many-{number:04}" for number in range(1000)]
    admin = admin_of(node.address)
    for start in range(0, 1000, 100):
        futures = admin.create_topics([NewTopic(name, 1, 1) for name in names[start : start + 100]])
        for future in futures.values():
            future.result(TIMEOUT_S)
    listed = admin.list_topics(timeout=TIMEOUT_S).topics
    assert set(names) <= set(listed)

    failures: list[KafkaError] = []
    producer = Producer({"bootstrap.servers": node.address, "acks": "all", "enable.idempotence": True})
    for name in names:
        producer.produce(
            name, name.encode(), partition=0, on_delivery=lambda error, _: error is not None and failures.append(error)
        )
    assert producer.flush(60) == 0
    assert not failures

    node.restart()
    for name in names[::97]:
        assert [message.value() for message in read_messages(node.address, name)] == [name.encode()]
    assert set(names) <= set(admin_of(node.address).list_topics(timeout=TIMEOUT_S).topics)
