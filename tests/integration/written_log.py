"""What the tests of the feed's reading side share: a log that is written to, and sources that are read to their end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from integration.clients import TIMEOUT_S, admin_of, create_topic, read_messages
from walstream.capture.kafka import LogAddress
from walstream.config import FeedConfig
from walstream.feed.reading.frames import Frame, FrameSource
from walstream.feed.reading.reading import Reading
from walstream.feed.wal_pb2 import WalBatch, WalEntry

Place = tuple[str, int, int]
"""Topic, partition, offset."""


def make_topic(address: str, topic: str, partitions: int = 1, **settings: object) -> None:
    """Create a topic with append time."""
    create_topic(address, topic, partitions, **{"message_timestamp_type": "LogAppendTime", **settings})


def produce(address: str, topic: str, values: Iterable[bytes], partition: int = 0, **settings: Any) -> None:
    """Write values, and return when they are durable."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 1, **settings})
    failures: list[KafkaError] = []
    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=lambda e, _: failures.append(e) if e else None)
        producer.poll(0)
    assert producer.flush(TIMEOUT_S) == 0
    assert not failures


def delete_records(address: str, topic: str, offset: int, partition: int = 0) -> None:
    """Remove everything below an offset; -1: everything."""
    admin = admin_of(address)
    (future,) = admin.delete_records([KafkaPartition(topic, partition, offset)]).values()
    future.result(TIMEOUT_S)


@asynccontextmanager
async def reading(address: str, **settings: Any) -> AsyncIterator[Reading]:
    """A reading side, closed at the end."""
    opened = await Reading.open(LogAddress(address), FeedConfig(**settings))
    try:
        yield opened
    finally:
        await opened.close()


def entries_of(frames: Iterable[Frame]) -> list[WalEntry]:
    """Let protobuf read what frames hold."""
    return [entry for frame in frames for entry in WalBatch.FromString(b"".join(frame.encoded)).entries]


def places_of(frames: Iterable[Frame]) -> list[Place]:
    return [(entry.topic, entry.partition, entry.offset) for entry in entries_of(frames)]


def lsns_of(frames: Iterable[Frame]) -> list[int]:
    return [lsn for frame in frames for lsn in frame.lsns]


async def read_for(source: FrameSource, quiet_s: float) -> list[Frame]:
    """Read until nothing has come for a while."""
    frames = []
    while (frame := await source.next(quiet_s)) is not None:
        frames.append(frame)
    return frames


async def read_count(source: FrameSource, count: int, timeout_s: float = 30.0) -> list[Frame]:
    """Read so many entries."""
    frames: list[Frame] = []
    deadline = time.monotonic() + timeout_s
    while sum(map(len, frames)) < count:
        assert time.monotonic() < deadline, f"{sum(map(len, frames))} of {count} entries came within {timeout_s:g} s"
        frame = await source.next(1)
        if frame is not None:
            frames.append(frame)
    return frames


def everything(address: str, topics: dict[str, int]) -> set[Place]:
    """What a consumer finds in the log."""
    return {
        (topic, partition, message.offset())
        for topic, count in topics.items()
        for partition in range(count)
        for message in read_messages(address, topic, partition)
    }


@dataclass
class Writers:
    """Threads that write to topics at random until they are stopped; a node that is gone is waited for."""

    address: str
    topics: dict[str, int]
    seed: int
    threads: list[threading.Thread] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)

    def start(self, count: int = 2) -> Writers:
        for number in range(count):
            thread = threading.Thread(target=self._write, args=(number,), daemon=True)
            self.threads.append(thread)
            thread.start()
        return self

    async def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()
        assert not self.failures

    def _write(self, number: int) -> None:
        dice = random.Random(self.seed + number)
        producer = Producer(
            {
                "bootstrap.servers": self.address,
                "linger.ms": dice.choice([0, 1, 5]),
                "compression.type": dice.choice(["none", "lz4", "zstd"]),
                "acks": "all",
                "reconnect.backoff.max.ms": 500,
                "message.timeout.ms": 60_000,
                "log_level": 0,
            }
        )
        while not self.stopping.is_set():
            topic = dice.choice(list(self.topics))
            for _ in range(dice.choice([1, 1, 3, 40])):
                producer.produce(
                    topic,
                    dice.randbytes(dice.choice([10, 200, 2000])),
                    b"%d" % dice.randrange(1000),
                    partition=dice.randrange(self.topics[topic]),
                    headers=[("tenant", b"t%d" % dice.randrange(3))] if dice.random() < 0.5 else None,
                    on_delivery=lambda error, _: self.failures.append(str(error)) if error else None,
                )
            producer.poll(0)
            time.sleep(dice.choice([0.001, 0.005, 0.02]))
        if producer.flush(60):
            self.failures.append("not everything was delivered")
