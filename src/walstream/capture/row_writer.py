"""Rows into librdkafka, each to its partition: the hot path of the sink.

Owns the choice of the partition (crc32 of the key modulo the topic's partitions), the counts per partition and what
happens when librdkafka is full; refuses to know groups and points. Invariant: rows of a partition are produced in the
order in which they were written, and the last one before `end` is the one that reports its delivery.

Which row is a partition's last is known only when the next one comes or the group ends. So the newest row of each
partition is held back: a report per row would cost as much as the row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias
from zlib import crc32

from confluent_kafka import KafkaException

from walstream import logs
from walstream.capture.kafka import LogAddress
from walstream.capture.producers import QUEUE_MESSAGES_MAX, ROWS, Delivered, Failure, PolledProducer
from walstream.capture.provenance import Output
from walstream.capture.topics import Topics
from walstream.errors import BatchTooLarge, UnreachableError, WalstreamError
from walstream.positions import TopicPartition

ROOM_S: Final = 0.005

BUSY_ROWS: Final = 2_000

HURRIES_MAX: Final = 20
HURRY_AGAIN_S: Final = 0.005
"""On a busy machine librdkafka's thread may sleep through a hurry; so long each, rows that hurry are waited for."""

log = logs.get(__name__)

_Held: TypeAlias = tuple[Any, ...]
"""The arguments of `produce`: topic, value, key, partition, report, nothing, timestamp, headers."""
_REPORT: Final = 4


class Slot:
    """One partition in one lane: how many rows since the last `end`, and the newest of them."""

    __slots__ = ("count", "held", "index", "partition")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.index = partition.partition
        self.count = 0
        self.held: _Held | None = None


class Lane:
    """Rows of one kind on their way: the stream's, or those of one table's snapshot."""

    __slots__ = ("bytes", "on_first", "routes", "touched")

    def __init__(self, on_first: Callable[[TopicPartition], Delivered] | None = None) -> None:
        """Take what makes the report of each partition's first row, for lanes that want to know where they begin."""
        self.routes: dict[str, list[Slot]] = {}
        self.touched: list[Slot] = []
        self.bytes = 0
        """Of the values, without keys and headers."""
        self.on_first = on_first

    @property
    def rows(self) -> dict[TopicPartition, int]:
        """Rows of each partition since the last `end`."""
        return {slot.partition: slot.count for slot in self.touched}


class RowWriter:
    """Hands rows over to a producer. Used by one thread."""

    def __init__(
        self,
        address: LogAddress,
        topics: Topics,
        failure: Failure,
        *,
        tend: Callable[[], None],
        on_topic: Callable[[str, str], None],
        stall_s_max: float,
    ) -> None:
        """Connect. `tend` is called while there is no room; `on_topic(name, id)` once for each topic."""
        self._address = address
        self._topics = topics
        self._failure = failure
        self._tend = tend
        self._on_topic = on_topic
        self._stall_s_max = stall_s_max
        self.polled = PolledProducer(address, ROWS, "rows", failure)

    @property
    def is_busy(self) -> bool:
        """Whether so many rows are on their way that they make whole requests."""
        return len(self.polled) > BUSY_ROWS

    @property
    def is_full(self) -> bool:
        """Whether rows that need not come now had better wait."""
        return len(self.polled) > QUEUE_MESSAGES_MAX // 2

    def write(self, lane: Lane, outputs: Iterable[Output], timestamp_ms: int) -> None:
        """Hand rows over, waiting while there is no room. Raises the failure."""
        produce, routes, size = self.polled.produce, lane.routes, 0
        for topic, value, key, headers in outputs:
            slots = routes.get(topic) or self._route(lane, topic)
            slot = slots[0] if key is None or len(slots) == 1 else slots[crc32(key) % len(slots)]
            held = slot.held
            slot.held = (topic, value, key, slot.index, None, None, timestamp_ms, headers)
            slot.count += 1
            if value is not None:
                size += len(value)
            if held is None:
                self._touch(lane, slot)
                continue
            try:
                produce(*held)
            except BufferError:
                self._produce(held)
            except KafkaException as error:
                raise self._refused(held, error) from None
        lane.bytes += size

    def end(self, lane: Lane, report: Callable[[TopicPartition], Delivered]) -> None:
        """Send what is held back, each with a report of its delivery, and begin to count anew."""
        touched, lane.touched, lane.bytes = lane.touched, [], 0
        for slot in touched:
            held, slot.held, slot.count = slot.held, None, 0
            assert held is not None, "a touched partition holds a row back"
            self._produce((*held[:_REPORT], report(slot.partition), *held[_REPORT + 1 :]))

    def hurry(self, arrived: Callable[[float], bool]) -> None:
        """Send what waits for company and wait a moment until `arrived(timeout_s)` says that it is durable."""
        for _ in range(HURRIES_MAX):
            self.polled.hurry()
            if arrived(HURRY_AGAIN_S):
                return

    def close(self) -> None:
        """Stop."""
        self.polled.close()

    def _touch(self, lane: Lane, slot: Slot) -> None:
        lane.touched.append(slot)
        if lane.on_first is not None:
            held = slot.held
            assert held is not None
            slot.held = (*held[:_REPORT], lane.on_first(slot.partition), *held[_REPORT + 1 :])

    def _route(self, lane: Lane, topic: str) -> list[Slot]:
        """Return the partitions of a topic in a lane; the topic is created when it is missing."""
        since_s = time.monotonic()
        while True:
            try:
                facts = self._topics.data(topic)
                break
            except UnreachableError as error:
                # A log that is away for a while is waited for, here as elsewhere.
                log.warning("topic not reachable", topic=topic, error=error.message)
                self._wait_a_moment(since_s)
        self._on_topic(topic, facts.id)
        slots = [Slot(TopicPartition(topic, index)) for index in range(facts.partitions)]
        lane.routes[topic] = slots
        return slots

    def _produce(self, row: _Held) -> None:
        while True:
            try:
                self.polled.produce(*row)
                return
            except BufferError:
                self._wait_for_room()
            except KafkaException as error:
                raise self._refused(row, error) from None

    def _wait_for_room(self) -> None:
        """Wait until a quarter of the queue is gone."""
        enough, since_s = len(self.polled) * 3 // 4, time.monotonic()
        while len(self.polled) > enough:
            self._wait_a_moment(since_s)

    def _wait_a_moment(self, since_s: float) -> None:
        """Wait, tending what must not wait; too long is too long. Raises the failure."""
        self._failure.check()
        if time.monotonic() - since_s > self._stall_s_max:
            self._failure.set(self.polled.silent(f"there has been no room for {self._stall_s_max:g} seconds"))
            self._failure.check()
        time.sleep(ROOM_S)
        self._tend()

    def _refused(self, row: _Held, error: KafkaException) -> WalstreamError:
        topic, value, key = row[:3]
        told = self._address.error(error.args[0], f"{topic} does not take a row")
        if isinstance(told, BatchTooLarge):
            told = BatchTooLarge(
                f"A row of {topic}, key {key!r}, is a record of {len(value):,} bytes: larger than any topic may take."
            )
        self._failure.set(told)
        return self._failure.error or told
