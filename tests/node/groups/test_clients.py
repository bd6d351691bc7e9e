"""Groups as real clients see them: confluent-kafka (librdkafka), aiokafka and kafka-python against a running node."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import count
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import pytest
from aiokafka.abc import ConsumerRebalanceListener
from confluent_kafka import ConsumerGroupState, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.coordinator.assignors.range import RangePartitionAssignor

from walstream.node.process import NodeProcess

PARTITIONS = 6
PATIENCE_S = 30.0

MakeNode = Callable[..., NodeProcess]

_numbers = count(1)


@pytest.fixture
def topic(node: NodeProcess) -> str:
    """A new topic of six partitions with twenty records in each."""
    name = f"topic-{next(_numbers)}"
    admin = AdminClient({"bootstrap.servers": node.address})
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(PATIENCE_S)
    producer = confluent_kafka.Producer({"bootstrap.servers": node.address})
    for number in range(20 * PARTITIONS):
        producer.produce(name, str(number), partition=number % PARTITIONS)
    assert producer.flush(PATIENCE_S) == 0
    return name


@pytest.fixture
def group() -> str:
    return f"group-{next(_numbers)}"


class Member:
    """A consumer in a thread of its own, as clients are meant to be used."""

    consumer: Any

    def __init__(self) -> None:
        self.read: list[str] = []
        self.owned: set[int] = set()
        self.rebalances = 0
        self._is_closing = False
        self._must_commit = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing:
            self.poll()
            if self._must_commit.is_set():
                self.store()
                self._must_commit.clear()
        self.consumer.close()

    def poll(self) -> None:
        raise NotImplementedError

    def store(self) -> None:
        self.consumer.commit()

    def commit(self) -> None:
        """Commit what was read, in the thread that reads: clients wait for ever if another one does it."""
        self._must_commit.set()
        wait_until(lambda: not self._must_commit.is_set())

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()


class Confluent(Member):
    """A consumer of librdkafka."""

    def __init__(self, node: NodeProcess, topic: str, group: str, **options: Any) -> None:
        settings = {
            "bootstrap.servers": node.address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 3_000,
            "heartbeat.interval.ms": 300,
            "enable.auto.commit": False,
        }
        self.consumer = confluent_kafka.Consumer(settings | options)
        self.consumer.subscribe([topic], on_assign=self._assigned)
        super().__init__()

    def _assigned(self, *_: Any) -> None:
        self.rebalances += 1

    def store(self) -> None:
        self.consumer.commit(asynchronous=False)

    def poll(self) -> None:
        message = self.consumer.poll(0.05)
        if message is not None and message.error() is None:
            self.read.append(message.value().decode())
        self.owned = {assigned.partition for assigned in self.consumer.assignment()}


class KafkaPython(Member):
    """A consumer of kafka-python. Not to be polled in turn with others: it leaves a join that outlasts its poll."""

    def __init__(self, node: NodeProcess, topic: str, group: str, **options: Any) -> None:
        settings: dict[str, Any] = {
            "bootstrap_servers": node.address,
            "group_id": group,
            "auto_offset_reset": "earliest",
            "session_timeout_ms": 3_000,
            "heartbeat_interval_ms": 300,
            "enable_auto_commit": False,
        }
        self.consumer = kafka.KafkaConsumer(topic, **(settings | options))
        super().__init__()

    def poll(self) -> None:
        for messages in self.consumer.poll(timeout_ms=100).values():
            self.read += [message.value.decode() for message in messages]
        self.owned = {assigned.partition for assigned in self.consumer.assignment()}


def wait_until(reached: Callable[[], bool], seen: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.02)


def wait_until_shared(members: list[Member]) -> None:
    wait_until(lambda: is_shared(members), lambda: [member.owned for member in members])


def is_shared(members: list[Member]) -> bool:
    """Whether every member has its fair part and every partition exactly one reader."""
    parts = [member.owned for member in members]
    return (
        sum(map(len, parts)) == PARTITIONS
        and set.union(*parts) == set(range(PARTITIONS))
        and all(len(part) == PARTITIONS // len(members) for part in parts)
    )


@pytest.mark.parametrize("kind", [Confluent, KafkaPython])
def test_members_come_and_go(kind: Any, node: NodeProcess, topic: str, group: str) -> None:
    with ExitStack() as stack:
        members: list[Member] = []
        for _ in range(3):
            members.append(stack.enter_context(closing(kind(node, topic, group))))
            wait_until_shared(members)
        wait_until(lambda: {line for member in members for line in member.read} == {str(n) for n in range(120)})
        members.pop().close()
        wait_until_shared(members)
        members.pop().close()
        wait_until_shared(members)


def test_members_that_keep_their_partitions_while_others_come(node: NodeProcess, topic: str, group: str) -> None:
    options = {"partition.assignment.strategy": "cooperative-sticky"}
    with ExitStack() as stack:
        members: list[Member] = []
        for _ in range(3):
            members.append(stack.enter_context(closing(Confluent(node, topic, group, **options))))
            wait_until_shared(members)


def test_members_of_different_clients_share_a_group(node: NodeProcess, topic: str, group: str) -> None:
    options = {"partition_assignment_strategy": [RangePartitionAssignor]}
    with (
        closing(Confluent(node, topic, group, **{"partition.assignment.strategy": "range"})) as one,
        closing(KafkaPython(node, topic, group, **options)) as two,
    ):
        wait_until_shared([one, two])


async def test_aiokafka_members_come_and_go(node: NodeProcess, topic: str, group: str) -> None:
    class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
        async def on_partitions_revoked(self, revoked: Any) -> None:
            pass

        async def on_partitions_assigned(self, assigned: Any) -> None:
            pass

    members: list[Any] = []

    async def wait_for_all() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                parts = [{assigned.partition for assigned in member.assignment()} for member in members]
                if sorted(index for part in parts for index in part) == list(range(PARTITIONS)) and all(parts):
                    return
                await asyncio.sleep(0.05)

    for _ in range(3):
        member = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=node.address,
            group_id=group,
            auto_offset_reset="earliest",
            session_timeout_ms=3_000,
            heartbeat_interval_ms=300,
            enable_auto_commit=False,
        )
        member.subscribe([topic], listener=Listener())
        await member.start()
        members.append(member)
        await wait_for_all()
    while len(members) > 1:
        await members.pop().stop()
        await wait_for_all()
    read: set[bytes] = set()
    async with asyncio.timeout(PATIENCE_S):
        while len(read) < 20 * PARTITIONS:
            for messages in (await members[0].getmany(timeout_ms=200)).values():
                read |= {message.value for message in messages}
    await members[0].commit()
    await members.pop().stop()
    assert _committed(node, topic, group) == dict.fromkeys(range(PARTITIONS), 20)


def test_a_member_that_is_killed_is_replaced(node: NodeProcess, topic: str, group: str) -> None:
    script = (
        "import confluent_kafka, sys\n"
        f"c = confluent_kafka.Consumer({{'bootstrap.servers': '{node.address}', 'group.id': '{group}',"
        " 'session.timeout.ms': 1000, 'heartbeat.interval.ms': 300})\n"
        f"c.subscribe(['{topic}'])\n"
        "while True: c.poll(0.1)\n"
    )
    with closing(Confluent(node, topic, group)) as survivor:
        victim = subprocess.Popen([sys.executable, "-c", script])
        try:
            wait_until(lambda: len(survivor.owned) == PARTITIONS // 2)
        finally:
            victim.kill()
            victim.wait()
        wait_until(lambda: len(survivor.owned) == PARTITIONS)


def test_a_static_member_restarts_and_the_others_do_not_notice(node: NodeProcess, topic: str, group: str) -> None:
    options: dict[str, Any] = {"session.timeout.ms": 20_000}
    with closing(Confluent(node, topic, group, **options, **{"group.instance.id": "a"})) as stays:
        restarts = Confluent(node, topic, group, **options, **{"group.instance.id": "b"})
        wait_until_shared([stays, restarts])
        before, rebalances = restarts.owned, stays.rebalances
        restarts.close()
        with closing(Confluent(node, topic, group, **options, **{"group.instance.id": "b"})) as again:
            wait_until(lambda: again.owned == before)
            assert stays.rebalances == rebalances


def test_committed_offsets_survive_a_crash_and_a_stop(make_node: MakeNode) -> None:
    with make_node() as node:
        producer = confluent_kafka.Producer({"bootstrap.servers": node.address})
        read: list[str] = []
        for round_number, end in enumerate((node.kill, node.stop, None)):
            for number in range(round_number * 100, round_number * 100 + 100):
                producer.produce("t", str(number))
            assert producer.flush(PATIENCE_S) == 0
            with closing(Confluent(node, "t", "g")) as reader:
                wait_until(lambda reader=reader: len(reader.read) == 100)  # type: ignore[misc]
                reader.commit()
                read += reader.read
                if end is not None:
                    end()
                    node.start()
        assert read == [str(number) for number in range(300)], "each record once: every commit was kept"


def test_members_find_each_other_again_after_a_restart_of_the_node(make_node: MakeNode) -> None:
    with make_node() as node:
        admin = AdminClient({"bootstrap.servers": node.address})
        admin.create_topics([NewTopic("t", PARTITIONS, 1)])["t"].result(PATIENCE_S)
        with closing(Confluent(node, "t", "g")) as one, closing(Confluent(node, "t", "g")) as two:
            wait_until_shared([one, two])
            rebalances = one.rebalances
            node.kill()
            node.start()
            wait_until(lambda: one.rebalances > rebalances)
            wait_until_shared([one, two])


def test_what_administrators_see_and_do(node: NodeProcess, topic: str, group: str) -> None:
    admin = AdminClient({"bootstrap.servers": node.address})
    with closing(Confluent(node, topic, group, **{"client.id": "reader"})) as member:
        wait_until(lambda: len(member.read) == 120)
        member.commit()
        described = admin.describe_consumer_groups([group])[group].result(PATIENCE_S)
        assert described.state is ConsumerGroupState.STABLE
        assert described.partition_assignor == "range"
        (described_member,) = described.members
        assert (described_member.client_id, described_member.host) == ("reader", "127.0.0.1")
        assert len(described_member.assignment.topic_partitions) == PARTITIONS
        assert _listed(admin, group) == [ConsumerGroupState.STABLE]
        with pytest.raises(confluent_kafka.KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups([group])[group].result(PATIENCE_S)
    assert _listed(admin, group) == [ConsumerGroupState.EMPTY]
    assert _committed(node, topic, group) == dict.fromkeys(range(PARTITIONS), 20)
    move = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 2, 7)])
    admin.alter_consumer_group_offsets([move])[group].result(PATIENCE_S)
    assert _committed(node, topic, group)[2] == 7
    kafka_admin = kafka.KafkaAdminClient(bootstrap_servers=node.address)
    try:
        assert group in {row[0] if isinstance(row, tuple) else row["group_id"] for row in _rows(kafka_admin)}
    finally:
        kafka_admin.close()
    admin.delete_consumer_groups([group])[group].result(PATIENCE_S)
    assert _listed(admin, group) == []
    assert set(_committed(node, topic, group).values()) <= {confluent_kafka.OFFSET_INVALID}
    with pytest.raises(confluent_kafka.KafkaException, match="GROUP_ID_NOT_FOUND"):
        admin.delete_consumer_groups([group])[group].result(PATIENCE_S)


def _rows(admin: Any) -> list[Any]:
    found = admin.list_groups() if hasattr(admin, "list_groups") else admin.list_consumer_groups()
    return list(found)


def test_offsets_go_with_their_topic(node: NodeProcess, topic: str, group: str) -> None:
    admin = AdminClient({"bootstrap.servers": node.address})
    move = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 7)])
    admin.alter_consumer_group_offsets([move])[group].result(PATIENCE_S)
    assert _committed(node, topic, group)[0] == 7
    admin.delete_topics([topic])[topic].result(PATIENCE_S)
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(PATIENCE_S)
    assert set(_committed(node, topic, group).values()) <= {confluent_kafka.OFFSET_INVALID}


def test_a_transactional_producer_is_told_that_there_are_no_transactions(node: NodeProcess) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": node.address, "transactional.id": "x"})
    with pytest.raises(confluent_kafka.KafkaException, match="does not offer transactions"):
        producer.init_transactions(PATIENCE_S)


def _committed(node: NodeProcess, topic: str, group: str) -> dict[int, int]:
    admin = AdminClient({"bootstrap.servers": node.address})
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, index) for index in range(PARTITIONS)])
    found = admin.list_consumer_group_offsets([asked])[group].result(PATIENCE_S)
    return {partition.partition: partition.offset for partition in found.topic_partitions}


def _listed(admin: AdminClient, group: str) -> list[ConsumerGroupState]:
    listed = admin.list_consumer_groups().result(PATIENCE_S).valid
    return [found.state for found in listed if found.group_id == group]
