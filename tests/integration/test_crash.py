"""SIGKILL at random moments under load: every acknowledged record is there, in order, exactly once.

An idempotent producer writes numbered records to several partitions and never stops; the node is killed and started
again beneath it. Numbers rise in each partition by construction, so the whole promise is one comparison: what is read
back is exactly 0, 1, 2, … up to at least the last acknowledged number.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import KafkaError, Producer

from walstream.node.process import NodeProcess

from .clients import create_topic, read_messages
from .support import MakeNode, rounds, seeded, wait_for

PARTITIONS = 3


class Writer:
    """A thread that writes numbered records until it is told to stop, and knows what was acknowledged."""

    def __init__(self, address: str, topic: str, generator: random.Random) -> None:
        self.topic = topic
        self.sent = [0] * PARTITIONS
        self.acknowledged: list[list[int]] = [[] for _ in range(PARTITIONS)]
        self.failures: list[str] = []
        self.count = 0
        self._generator = generator
        self._ended = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": address,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 2,
                "batch.num.messages": 50,
                "compression.type": generator.choice(["none", "lz4", "zstd"]),
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 100,
                "retry.backoff.ms": 10,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            if len(self._producer) > 2000:
                self._producer.poll(0.01)
                continue
            partition = self._generator.randrange(PARTITIONS)
            for _ in range(self._generator.randrange(1, 60)):
                number = self.sent[partition]
                self._producer.produce(
                    self.topic,
                    str(number).encode().rjust(self._generator.randrange(1, 300)),
                    partition=partition,
                    on_delivery=self._delivered,
                )
                self.sent[partition] += 1
            self._producer.poll(0)
        left = self._producer.flush(60)
        if left:
            self.failures.append(f"{left} records were never acknowledged")

    def _delivered(self, error: KafkaError | None, message: object) -> None:
        if error is not None:
            self.failures.append(str(error))
            return
        self.acknowledged[message.partition()].append(int(message.value()))
        self.count += 1

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()


def check(node: NodeProcess, writer: Writer) -> None:
    """Compare what is in the log with what was acknowledged."""
    assert not writer.failures
    for partition in range(PARTITIONS):
        found = [int(message.value()) for message in read_messages(node.address, writer.topic, partition)]
        assert found == list(range(len(found))), f"partition {partition}: a gap, a repetition or a wrong order"
        acknowledged = writer.acknowledged[partition]
        assert acknowledged == list(range(writer.sent[partition])), "every record sent was acknowledged, in order"
        assert len(found) == len(acknowledged), f"partition {partition}: acknowledged records are missing"


@pytest.mark.timeout(1200)
def test_nothing_acknowledged_is_lost_under_sigkill(make_node: MakeNode) -> None:
    _, generator = seeded()
    # Small segments and checkpoints that come often: each kill may hit any of them.
    node = make_node(log__segment_bytes=100_000, log__checkpoint_interval_ms=100, log__journal_bytes_max=1024 * 1024)
    create_topic(node.address, "crash", partitions=PARTITIONS)
    writer = Writer(node.address, "crash", generator)
    with writer.writing():
        for number in range(rounds(full=50, part=4)):
            before = writer.count
            wait_for(lambda before=before: writer.count > before, "records are acknowledged again", timeout_s=60)
            moment_s = generator.uniform(0, 0.4)
            print(f"round {number}: SIGKILL {moment_s * 1000:.0f} ms after the first acknowledgement")
            time.sleep(moment_s)  # The moment of the kill is what the round is about.
            node.kill()
            node.start()
    check(node, writer)
    node.kill()
    node.start()
    check(node, writer)


@pytest.mark.timeout(1200)
def test_a_kill_while_the_node_starts_loses_nothing(make_node: MakeNode) -> None:
    """Recovery itself is interrupted: it must be possible to begin it again."""
    _, generator = seeded()
    node = make_node(log__segment_bytes=50_000, log__checkpoint_interval_ms=100)
    create_topic(node.address, "crash", partitions=PARTITIONS)
    writer = Writer(node.address, "crash", generator)
    with writer.writing():
        wait_for(lambda: writer.count > 3000, "there is something to recover")
        node.kill()
        for _ in range(rounds(full=30, part=3)):
            node.spawn()
            time.sleep(generator.uniform(0.1, 0.8))
            node.kill()
        node.start()
    check(node, writer)


@pytest.mark.parametrize("acks", [1, "all"])
def test_what_was_acknowledged_before_the_kill_is_there_at_once(make_node: MakeNode, acks: object) -> None:
    """Without idempotence and retries: what the client was told is durable, whatever acks it asked for."""
    node = make_node()
    for number in range(rounds(full=10, part=2)):
        topic = f"round-{number}"
        create_topic(node.address, topic)
        acknowledged: list[int] = []
        producer = Producer(
            {"bootstrap.servers": node.address, "acks": acks, "retries": 0, "linger.ms": 1, "log_level": 0}
        )

        def delivered(error: KafkaError | None, message: object, into: list[int] = acknowledged) -> None:
            if error is None:
                into.append(int(message.value()))

        for value in range(5000):
            producer.produce(topic, str(value).encode(), partition=0, on_delivery=delivered)
            producer.poll(0)
            if len(acknowledged) > 1000:
                break
        node.kill()
        producer.purge()
        producer.flush(10)
        node.start()
        found = [int(message.value()) for message in read_messages(node.address, topic)]
        assert set(acknowledged) <= set(found)
        assert found == list(range(len(found)))
