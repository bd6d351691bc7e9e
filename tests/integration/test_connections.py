"""Many clients at once, and how long each waits: connections, fetch sessions, long polls, reading while writing."""

from __future__ import annotations

import asyncio
import contextlib
import select
import threading
import time
from contextlib import ExitStack

import aiokafka
import kafka
import pytest
from confluent_kafka import Producer

from walstream.node.process import NodeProcess

from .bare import Bare, api_versions_request, fetch_request, one_record, produce_request
from .clients import Confluent, Item, create_topic, read_messages, watermarks
from .support import MakeNode, memory_mb, wait_for


def test_two_hundred_connections_at_once(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic, partitions=8)
    with ExitStack() as stack:
        connections = [stack.enter_context(Bare(node.address)) for _ in range(200)]
        for turn in range(3):
            for number, connection in enumerate(connections):
                connection.send(_produce(topic, f"{turn}-{number}".encode(), number % 8))
            for connection in connections:
                connection.receive()
    written = sum(watermarks(node.address, topic, partition)[1] for partition in range(8))
    assert written == 600
    values = {message.value() for partition in range(8) for message in read_messages(node.address, topic, partition)}
    assert values == {f"{turn}-{number}".encode() for turn in range(3) for number in range(200)}


def _produce(topic: str, value: bytes, partition: int) -> bytes:
    return produce_request(topic, one_record(value), partition=partition)


def test_connections_above_the_limit_are_closed_and_the_others_live(make_node: MakeNode) -> None:
    node = make_node(limits__connections_max=20)
    with ExitStack() as stack:
        inside = [stack.enter_context(Bare(node.address)) for _ in range(20)]
        for connection in inside:
            connection.ask(api_versions_request())
        with Bare(node.address) as outside:
            assert outside.ended()
        for connection in inside:
            connection.ask(api_versions_request())
    # Their places are free again.
    wait_for(node.answers, "a new client is served")


def test_pipelined_requests_are_answered_in_order(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    with Bare(node.address) as connection:
        for number in range(100):
            connection.send(_produce(topic, str(number).encode(), 0))
        for _ in range(100):
            connection.receive()
    assert [int(message.value()) for message in read_messages(node.address, topic)] == list(range(100))


def test_a_long_poll_ends_when_a_record_arrives(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    waits_ms = []
    with Bare(node.address, 30) as reader, Bare(node.address) as writer:
        for offset in range(20):
            reader.send(fetch_request(topic, offset, wait_ms=10_000))
            started = time.perf_counter()
            writer.produce(topic, one_record(b"v"))
            reader.receive()
            waits_ms.append((time.perf_counter() - started) * 1000)
    waits_ms.sort()
    # From the write to the answer of the waiting reader: one fsync and two hops. A generous bound for busy machines.
    assert waits_ms[len(waits_ms) // 2] < 100, waits_ms


def test_a_long_poll_without_records_ends_at_its_time(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    with Bare(node.address) as reader:
        started = time.perf_counter()
        assert reader.fetch(topic, 0, wait_ms=300).records == b""
        assert 0.25 < time.perf_counter() - started < 5


def test_a_long_poll_of_many_partitions_wakes_for_any(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic, partitions=20)
    consumer = kafka.KafkaConsumer(bootstrap_servers=node.address, fetch_max_wait_ms=5000)
    try:
        partitions = [kafka.TopicPartition(topic, number) for number in range(20)]
        consumer.assign(partitions)
        consumer.seek_to_beginning()
        consumer.poll(100)
        for number in (7, 19, 0):
            with Bare(node.address) as writer:
                writer.produce(topic, one_record(b"v"), partition=number)
            started = time.perf_counter()
            found = wait_for(lambda: consumer.poll(5000), "the record comes")
            assert [partition.partition for partition in found] == [number]
            assert time.perf_counter() - started < 3, "it does not wait for the end of the poll"
    finally:
        consumer.close()


@pytest.mark.parametrize("client", ["aiokafka", "kafka-python"])
def test_fetch_sessions_deliver_everything_once(node: NodeProcess, topic: str, client: str) -> None:
    """Both clients use incremental fetch sessions: partitions are added, paused, dropped and resumed in one."""
    partitions = 10
    create_topic(node.address, topic, partitions=partitions)
    expected = set()

    def write(turn: int) -> None:
        with Bare(node.address) as writer:
            for partition in range(partitions):
                value = f"{turn}-{partition}".encode()
                writer.produce(topic, one_record(value), partition=partition)
                expected.add(value)

    found: list[bytes] = []
    if client == "kafka-python":
        consumer = kafka.KafkaConsumer(bootstrap_servers=node.address, fetch_max_wait_ms=50)
        everything = [kafka.TopicPartition(topic, number) for number in range(partitions)]

        def read() -> bool:
            for records in consumer.poll(200).values():
                found.extend(record.value for record in records)
            return len(found) >= len(expected)

        try:
            consumer.assign(everything)
            consumer.seek_to_beginning()
            for turn in range(6):
                write(turn)
                if turn == 2:
                    consumer.pause(*everything[:5])
                    read()
                    consumer.resume(*everything[:5])
                if turn == 4:
                    position = {each: consumer.position(each) for each in everything}
                    consumer.assign(everything[5:])
                    read()
                    consumer.assign(everything)
                    for each in everything[:5]:
                        consumer.seek(each, position[each])
                wait_for(read, f"turn {turn} is read")
        finally:
            consumer.close()
    else:

        async def run() -> None:
            reader = aiokafka.AIOKafkaConsumer(bootstrap_servers=node.address, fetch_max_wait_ms=50)
            await reader.start()
            try:
                everything = [aiokafka.TopicPartition(topic, number) for number in range(partitions)]
                reader.assign(everything)
                await reader.seek_to_beginning()
                for turn in range(6):
                    await asyncio.to_thread(write, turn)
                    while len(found) < len(expected):
                        for records in (await reader.getmany(timeout_ms=200)).values():
                            found.extend(record.value for record in records)
            finally:
                await reader.stop()

        asyncio.run(asyncio.wait_for(run(), 30))
    assert sorted(found) == sorted(expected)


def test_reading_while_writing(node: NodeProcess, topic: str) -> None:
    create_topic(node.address, topic)
    count = 20_000

    def write() -> None:
        producer = Producer({"bootstrap.servers": node.address, "linger.ms": 1, "batch.num.messages": 50})
        for number in range(count):
            producer.produce(topic, str(number).encode(), partition=0)
            if number % 100 == 0:
                producer.poll(0)
        producer.flush(30)

    writer = threading.Thread(target=write)
    writer.start()
    found: list[int] = []

    async def read() -> None:
        reader = aiokafka.AIOKafkaConsumer(bootstrap_servers=node.address)
        await reader.start()
        try:
            partition = aiokafka.TopicPartition(topic, 0)
            reader.assign([partition])
            await reader.seek_to_beginning()
            while len(found) < count:
                for records in (await reader.getmany(timeout_ms=500)).values():
                    found.extend(int(record.value) for record in records)
        finally:
            await reader.stop()

    try:
        asyncio.run(asyncio.wait_for(read(), 60))
    finally:
        writer.join()
    assert found == list(range(count))


def test_a_client_that_never_reads_its_answers_is_cut_off(make_node: MakeNode) -> None:
    """It asks for far more than the socket's buffers hold and takes nothing: the node must not keep it in memory."""
    node = make_node(limits__response_write_timeout_ms=500)
    create_topic(node.address, "big")
    Confluent().write(node.address, "big", [Item(bytes(500_000)) for _ in range(20)])
    with Bare(node.address) as stuck:
        wanted = fetch_request("big", 0, bytes_max=10_000_000)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                stuck.send(wanted)
        # Not by reading: that would be what the node waits for.
        hung_up = select.poll()
        hung_up.register(stuck.socket, select.POLLRDHUP)
        assert hung_up.poll(20_000), "the node closes the connection"
        assert node.answers()
        peak_mb = memory_mb(node.pid)
        assert peak_mb < 200, f"{peak_mb} MB"
