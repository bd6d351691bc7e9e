"""Commit points into the log, behind the rows they speak of.

Owns the commits topic: which record comes next, and whether those that landed are valid. Refuses to know rows: it is
told which groups are complete. Invariants: a point is produced only when every row of its group and of all groups
before is durable; `on_durable` is called only for a point that is durable and proved valid.

One point is in flight at a time, and groups that complete meanwhile share the next one: points come as fast as the log
answers and no faster, whatever the rate of transactions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from confluent_kafka import KafkaError, Message

from walstream.capture.commit_points import (
    CommitRecord,
    OpenRecord,
    PointRecord,
    TableSnapshot,
    encode,
)
from walstream.capture.groups import Group, Groups
from walstream.capture.kafka import LogAddress
from walstream.capture.ledger import Gap, Ledger, Written
from walstream.capture.producers import POINTS, Delivered, Failure, PolledProducer
from walstream.capture.reading import CommitsReader
from walstream.capture.topics import Topics
from walstream.errors import GenerationOver, WalstreamError
from walstream.positions import Lsn, TopicPartition

WRITE_S_MAX = 30.0


class PointWriter:
    """Writes what is not rows. May be called by any thread."""

    def __init__(
        self,
        address: LogAddress,
        topics: Topics,
        failure: Failure,
        *,
        on_durable: Callable[[PointRecord, Lsn], None],
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        """Connect. `on_durable` and `on_tick` are called by the thread that hears the answers."""
        self._address = address
        self._topic = topics.names.commits
        self._failure = failure
        self._on_durable = on_durable
        self._lock = threading.RLock()
        self._groups = Groups()
        self._ledger: Ledger | None = None
        self._point_since_s: float | None = None
        self._newest: Group | None = None
        self._arrived = threading.Event()
        self.polled = PolledProducer(address, POINTS, "points", failure, on_tick)

    @property
    def since_s(self) -> float | None:
        """Since when the oldest group waits for its rows or its point; None when none does."""
        with self._lock:
            return self._point_since_s or self._groups.oldest_since_s

    @property
    def next(self) -> dict[TopicPartition, int]:
        """The vector of the last point."""
        return dict(self._books.next)

    def begin(self, ledger: Ledger) -> None:
        """Begin with the books of a generation; nothing is written before."""
        with self._lock:
            self._ledger = ledger

    def know_topic(self, topic: str, topic_id: str) -> None:
        """Note the id of a topic that rows go to."""
        with self._lock:
            self._books.topic_ids[topic] = topic_id

    def add(self, group: Group) -> None:
        """Take a group, before its last rows are sent."""
        self._newest = group
        self._arrived.clear()
        with self._lock:
            self._groups.add(group)
        if group.waiting == 0:
            self._arrived.set()
            self._advance()

    def delivered(self, group: Group, partition: TopicPartition, error: KafkaError | None, message: Message) -> None:
        """Hear that the last row of a partition is durable."""
        offset = self.polled.offset(partition.topic, error, message)
        if offset is None:
            return
        with self._lock:
            is_complete = group.delivered(partition, offset)
        if is_complete:
            if group is self._newest:
                self._arrived.set()
            self._advance()

    def rows_arrived(self, timeout_s: float) -> bool:
        """Wait for the rows of the last group, not for its point; return whether they are durable."""
        return self._arrived.wait(timeout_s)

    def write_now(self, topic: str, key: bytes | None, value: bytes, timeout_s: float = WRITE_S_MAX) -> int:
        """Write one record of an internal topic, wait until it is durable and return its offset."""
        offsets: list[int] = []

        def landed(error: KafkaError | None, message: Message) -> None:
            offset = self.polled.offset(topic, error, message)
            if offset is not None:
                offsets.append(offset)
                self._failure.changed()

        with self._address.translated(topic):
            self.polled.produce(topic, value, key, 0, landed)
        late = partial(self.polled.silent, f"{topic} takes no record")
        self._failure.wait(lambda: bool(offsets), timeout_s, late)
        return offsets[0]

    def write_later(self, topic: str, key: bytes, value: bytes) -> None:
        """Write one record of an internal topic that nobody waits for."""
        with self._address.translated(topic):
            self.polled.produce(topic, value, key, 0)

    def begin_snapshot(self, snapshot: TableSnapshot) -> None:
        """Say that a table's rows begin."""
        with self._lock:
            self._produce(self._books.begin_snapshot(snapshot), self._began)

    def finish_snapshot(
        self, snapshot: TableSnapshot, start: dict[TopicPartition, int], written: Written, done: Callable[[], None]
    ) -> None:
        """Say that a table's rows are complete and durable; `done` is called when that is durable too."""

        def landed(error: KafkaError | None, message: Message) -> None:
            if self._landed(error, message):
                done()

        with self._lock:
            self._produce(self._books.finish_snapshot(snapshot, start, written), landed)

    def identify(self, name: tuple[str, str], identity: str) -> None:
        """Keep a later identity of a table whose rows it proves."""
        with self._lock:
            self._books.identify(name, identity)

    def disprove(self, name: tuple[str, str]) -> None:
        """Forget the snapshot of a table whose rows are not whole any more."""
        with self._lock:
            self._books.disprove(name)

    def close(self) -> None:
        """Stop."""
        self.polled.close()

    @property
    def _books(self) -> Ledger:
        assert self._ledger is not None, "begin comes first"
        return self._ledger

    def _advance(self) -> None:
        """Produce the next point, when there is one to produce and none is on its way."""
        with self._lock:
            if self._ledger is None or self._failure.error is not None or self._point_since_s is not None:
                return
            written = self._groups.take()
            if written is None:
                return
            record = self._ledger.point(written)
            self._point_since_s = time.monotonic()
            self._produce(record, partial(self._point_landed, record, written.end_lsn))

    def _produce(self, record: CommitRecord, landed: Delivered) -> None:
        self.polled.produce(self._topic, encode(record), None, 0, landed)

    def _point_landed(self, record: PointRecord, lsn: Lsn, error: KafkaError | None, message: Message) -> None:
        if not self._landed(error, message):
            return
        try:
            self._on_durable(record, lsn)
        except WalstreamError as failure:
            self._failure.set(failure)
            return
        with self._lock:
            self._point_since_s = None
        self._failure.changed()
        self._advance()

    def _began(self, error: KafkaError | None, message: Message) -> None:
        self._landed(error, message)

    def _landed(self, error: KafkaError | None, message: Message) -> bool:
        """Note where a record landed; return whether it is durable and valid."""
        offset = self.polled.offset(self._topic, error, message)
        if offset is None or self._failure.error is not None:
            return False
        try:
            with self._lock:
                self._books.landed(offset, self._inspect)
        except WalstreamError as failure:
            self._failure.set(failure)
            return False
        return True

    def _inspect(self, gap: Gap) -> None:
        """Look at somebody else's records among ours: a zombie's are void, an `open` makes ours so."""
        with CommitsReader(self._address, self._topic) as reader:
            for offset, record in reader.read(gap.first, gap.stop):
                if isinstance(record, OpenRecord):
                    raise GenerationOver(
                        f"Another capture ({record.origin.instance}) has opened generation {offset}; ours, "
                        f"{self._books.gen}, is over.",
                        "Only one capture may write to a prefix: stop one of them.",
                    )
