"""The demonstration: a stock Kafka client, a node killed in the middle, and proof that nothing acknowledged is lost.

A node starts in a temporary folder. An idempotent confluent-kafka producer writes numbered records over three
partitions; half way the node is killed with SIGKILL, with requests in flight, and started again on the same data. The
producer never learns more than any client would: it retries. Then a consumer reads everything, and each partition
must hold exactly its numbers, each once, in order; so every acknowledged record is there, and none twice.

The last line printed is the verdict, with the numbers. The exit code is 0 when it holds and 1 when it does not.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from walstream.errors import WalstreamError
from walstream.node.process import NodeProcess

RECORDS = 100_000
PARTITIONS = 3
TOPIC = "demo"
KILL_AT = RECORDS // 2
CHUNK = 500
DEADLINE_S = 120.0

# librdkafka would print a line for each connection that the kill breaks.
_QUIET = logging.getLogger("walstream.demo.librdkafka")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


class DemoFailed(WalstreamError):
    """The promise did not hold, or could not be tested to the end."""


Step = Callable[[int], None]


class Screen:
    """What the user sees: progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False)

    @contextmanager
    def progress(self, label: str) -> Iterator[Step]:
        """Show how far something has come; the yielded function takes the number done so far."""
        if not self.console.is_terminal:
            started = time.monotonic()
            yield lambda _done: None
            self.say(f"  {label}: {RECORDS:,} records in {time.monotonic() - started:.1f} s")
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(label, total=RECORDS)
            yield lambda done: bar.update(task, completed=done)


def run_demo() -> int:
    """Run the demonstration and return its exit code."""
    screen = Screen(Console(file=sys.stdout, soft_wrap=True))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="walstream-demo-") as folder:
        node = NodeProcess(Path(folder) / "data")
        try:
            node.start()
            screen.say(f"A node listens on {node.address}; its data lives in a temporary folder.")
            acknowledged_before, down_ms = _write(node, screen)
            _check(node, screen)
            node.stop()
        except (WalstreamError, KafkaException) as error:
            screen.say(f"FAILED: {error}")
            return 1
        finally:
            node.kill()
    screen.say(
        f"OK: {RECORDS:,} records acknowledged ({acknowledged_before:,} of them before the SIGKILL, node down for "
        f"{down_ms:,.0f} ms), {RECORDS:,} read back: none missing, none twice, all in order "
        f"({time.monotonic() - started:.1f} s)."
    )
    return 0


def _write(node: NodeProcess, screen: Screen) -> tuple[int, float]:
    """Produce every record, killing the node half way; return how many were acknowledged by then, and its absence."""
    admin = AdminClient({"bootstrap.servers": node.address}, logger=_QUIET)
    for future in admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
        future.result(timeout=30)

    acknowledged = 0

    def on_delivery(error: KafkaError | None, _message: Message) -> None:
        nonlocal acknowledged
        if error is not None:
            raise KafkaException(error)
        acknowledged += 1

    producer = Producer(
        {
            "bootstrap.servers": node.address,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            # Small batches, so that there is always something in flight when the node dies.
            "batch.num.messages": CHUNK,
            "queue.buffering.max.messages": RECORDS,
            "reconnect.backoff.max.ms": 500,
        },
        logger=_QUIET,
    )
    killed_at = down_ms = 0.0
    acknowledged_before = 0
    deadline = time.monotonic() + DEADLINE_S
    with screen.progress("produced with acks=all, idempotent") as step:
        number = 0
        while acknowledged < RECORDS:
            # Never more than a few thousand records ahead, so that the kill comes in the middle of the stream.
            if number < RECORDS and number - acknowledged < 20 * CHUNK:
                for _ in range(CHUNK):
                    producer.produce(
                        TOPIC, str(number).encode(), partition=number % PARTITIONS, on_delivery=on_delivery
                    )
                    number += 1
                producer.poll(0)
            else:
                producer.poll(0.01)
            step(acknowledged)
            if not killed_at and acknowledged >= KILL_AT:
                node.kill()
                killed_at, acknowledged_before = time.monotonic(), acknowledged
                screen.say(
                    f"  SIGKILL with {acknowledged:,} records acknowledged and {number - acknowledged:,} in flight …"
                )
                node.start()
                down_ms = (time.monotonic() - killed_at) * 1000
                screen.say(f"  … and back on the same data after {down_ms:,.0f} ms; the producer goes on")
            if time.monotonic() > deadline:
                raise DemoFailed(f"After {DEADLINE_S:g} s only {acknowledged:,} of {RECORDS:,} were acknowledged.")
        producer.flush()
    return acknowledged_before, down_ms


def _check(node: NodeProcess, screen: Screen) -> None:
    """Read every partition from its beginning to its end and compare it with what was sent."""
    consumer = Consumer(
        {
            "bootstrap.servers": node.address,
            "group.id": "demo",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        },
        logger=_QUIET,
    )
    consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in range(PARTITIONS)])
    expected = list(range(PARTITIONS))
    ended: set[int] = set()
    deadline = time.monotonic() + DEADLINE_S
    with screen.progress("read back") as step:
        while len(ended) < PARTITIONS:
            for message in consumer.consume(CHUNK, timeout=0.05):
                error, partition = message.error(), message.partition()
                assert partition is not None, "a message has a partition"
                if error is not None:
                    if error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    ended.add(partition)
                    continue
                number = int(message.value() or b"-1")
                if number != expected[partition]:
                    raise DemoFailed(
                        f"Partition {partition}, offset {message.offset()}: expected record {expected[partition]:,}, "
                        f"found {number:,}."
                    )
                expected[partition] += PARTITIONS
            step(sum(number // PARTITIONS for number in expected))
            if time.monotonic() > deadline:
                raise DemoFailed(f"Reading did not finish within {DEADLINE_S:g} s.")
    consumer.close()
    for partition, number in enumerate(expected):
        if number < RECORDS:
            raise DemoFailed(f"Partition {partition} ends before record {number:,}: acknowledged records are missing.")
