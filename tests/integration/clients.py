"""The stock clients behind one small interface, so that each test can be asked of all of them.

A client writes records, reads a partition from its start to its end, and makes topics. Nothing of walstream is used
here: what a test sees is what a user of that client sees.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiokafka
import aiokafka.admin
import kafka
import kafka.admin
import kafka.codec
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

TIMEOUT_S = 30.0
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")


@dataclass(frozen=True)
class Item:
    """A record as a client gives and gets it."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int | None = None


class Client(Protocol):
    """What the tests ask of a client."""

    name: str

    def writes(self, compression: str) -> bool: ...
    def write(self, address: str, topic: str, items: Sequence[Item], compression: str = "none") -> None: ...
    def read(self, address: str, topic: str) -> list[Item]: ...


class Confluent:
    name = "confluent"

    def writes(self, compression: str) -> bool:
        return True

    def write(self, address: str, topic: str, items: Sequence[Item], compression: str = "none") -> None:
        producer = Producer({"bootstrap.servers": address, "compression.type": compression, "linger.ms": 50})
        failures: list[KafkaError] = []

        def delivered(error: KafkaError | None, _message: Any) -> None:
            if error is not None:
                failures.append(error)

        for item in items:
            producer.produce(
                topic,
                item.value,
                item.key,
                partition=0,
                headers=list(item.headers) or None,
                timestamp=item.timestamp_ms or 0,
                on_delivery=delivered,
            )
        assert producer.flush(TIMEOUT_S) == 0, "records were not delivered in time"
        if failures:
            raise KafkaException(failures[0])

    def read(self, address: str, topic: str) -> list[Item]:
        return [
            Item(
                message.value(),
                message.key(),
                tuple((name, value) for name, value in message.headers() or ()),
                message.timestamp()[1],
            )
            for message in read_messages(address, topic)
        ]


def read_messages(address: str, topic: str, partition: int = 0, offset: int = 0, **settings: Any) -> list[Any]:
    """Read a partition to its end with the confluent consumer and return its own messages."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            **settings,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, offset)])
        found: list[Any] = []
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            # `consume` waits for as many as it is asked for, or for its timeout; so a short one.
            messages = consumer.consume(1000, timeout=0.05)
            if messages:
                deadline = time.monotonic() + TIMEOUT_S
            assert time.monotonic() < deadline, f"nothing came from {topic} within {TIMEOUT_S:g} s"
            for message in messages:
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    return found
                else:
                    raise KafkaException(error)
    finally:
        consumer.close()


class Aiokafka:
    name = "aiokafka"

    def writes(self, compression: str) -> bool:
        return True

    def write(self, address: str, topic: str, items: Sequence[Item], compression: str = "none") -> None:
        async def run() -> None:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=address, compression_type=None if compression == "none" else compression, linger_ms=20
            )
            await producer.start()
            try:
                waiting = [
                    await producer.send(
                        topic,
                        item.value,
                        item.key,
                        partition=0,
                        headers=list(item.headers),
                        timestamp_ms=item.timestamp_ms,
                    )
                    for item in items
                ]
                await asyncio.gather(*waiting)
            finally:
                await producer.stop()

        asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))

    def read(self, address: str, topic: str) -> list[Item]:
        async def run() -> list[Item]:
            partition = aiokafka.TopicPartition(topic, 0)
            consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=address, enable_auto_commit=False)
            await consumer.start()
            try:
                consumer.assign([partition])
                await consumer.seek_to_beginning(partition)
                end = (await consumer.end_offsets([partition]))[partition]
                found = []
                while await consumer.position(partition) < end:
                    for record in (await consumer.getmany(partition, timeout_ms=1000)).get(partition, ()):
                        found.append(Item(record.value, record.key, tuple(record.headers), record.timestamp))
                return found
            finally:
                await consumer.stop()

        return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


class KafkaPython:
    name = "kafka-python"

    def writes(self, compression: str) -> bool:
        return compression == "none" or bool(getattr(kafka.codec, f"has_{compression}")())

    def write(self, address: str, topic: str, items: Sequence[Item], compression: str = "none") -> None:
        producer = kafka.KafkaProducer(
            bootstrap_servers=address,
            compression_type=None if compression == "none" else compression,
            linger_ms=20,
        )
        try:
            waiting = [
                producer.send(
                    topic,
                    value=item.value,
                    key=item.key,
                    headers=list(item.headers),
                    partition=0,
                    timestamp_ms=item.timestamp_ms,
                )
                for item in items
            ]
            producer.flush(TIMEOUT_S)
            for future in waiting:
                future.get(TIMEOUT_S)
        finally:
            producer.close()

    def read(self, address: str, topic: str) -> list[Item]:
        consumer = kafka.KafkaConsumer(bootstrap_servers=address, enable_auto_commit=False, group_id=None)
        try:
            partition = kafka.TopicPartition(topic, 0)
            consumer.assign([partition])
            consumer.seek_to_beginning(partition)
            end = consumer.end_offsets([partition])[partition]
            found = []
            while consumer.position(partition) < end:
                for record in consumer.poll(1000).get(partition, ()):
                    found.append(Item(record.value, record.key, tuple(record.headers), record.timestamp))
            return found
        finally:
            consumer.close()


class Kcat:
    """kcat takes records as lines on its standard input; it cannot write null values next to others, or timestamps."""

    name = "kcat"

    def writes(self, compression: str) -> bool:
        return True

    def write(self, address: str, topic: str, items: Sequence[Item], compression: str = "none") -> None:
        for item in items:
            command = ["-P", "-t", topic, "-p", "0", "-z", compression, "-D", "\x1f"]
            for name, value in item.headers:
                command += ["-H", f"{name}={value.decode()}"]
            if item.key is not None:
                command += ["-k", item.key.decode()]
            if item.value is None:
                # An empty message is sent as null under -Z; kcat sends nothing at all without a delimiter.
                command += ["-Z"]
            self._run(address, command, item.value if item.value is not None else b"\x1f")

    def read(self, address: str, topic: str) -> list[Item]:
        output = self._run(address, ["-C", "-t", topic, "-p", "0", "-o", "beginning", "-e", "-q", "-J"], b"")
        found = []
        for line in output.splitlines():
            record = json.loads(line)
            names = record.get("headers", [])
            found.append(
                Item(
                    _bytes(record["payload"]),
                    _bytes(record["key"]),
                    tuple((names[at], names[at + 1].encode()) for at in range(0, len(names), 2)),
                    record["ts"],
                )
            )
        return found

    @staticmethod
    def _run(address: str, command: list[str], given: bytes) -> bytes:
        done = subprocess.run(
            ["kcat", "-b", address, *command], input=given, capture_output=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


CLIENTS: tuple[Client, ...] = (Confluent(), Aiokafka(), KafkaPython(), Kcat())

needs_kcat = pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (apt-get install kcat)")

EACH_CLIENT = [
    pytest.param(client, id=client.name, marks=[needs_kcat] if client.name == "kcat" else []) for client in CLIENTS
]


def readers() -> list[Client]:
    """The clients that are installed here."""
    return [client for client in CLIENTS if client.name != "kcat" or shutil.which("kcat")]


def admin_of(address: str) -> AdminClient:
    """An admin client; keep it in a variable until its answers are there, its end is theirs."""
    return AdminClient({"bootstrap.servers": address})


def create_topic(address: str, topic: str, partitions: int = 1, **config: object) -> None:
    """Create a topic; settings are given with underscores for dots: `cleanup_policy="compact"`."""
    settings = {name.replace("_", "."): str(value) for name, value in config.items()}
    admin = admin_of(address)
    admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])[topic].result(TIMEOUT_S)


def configure_topic(address: str, topic: str, **config: object) -> None:
    """Change settings of a topic and leave the others."""
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry

    entries = [
        ConfigEntry(name.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = admin_of(address)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(TIMEOUT_S)


def watermarks(address: str, topic: str, partition: int = 0) -> tuple[int, int]:
    """The start and the end of a partition."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "watermarks"})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT_S)
        return int(low), int(high)
    finally:
        consumer.close()
