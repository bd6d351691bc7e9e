"""Clients: producers that retry, readers that remember.

A producer sends one batch at a time to whom it takes for the leader, with acks 0, 1 or all. An idempotent one sends
the same batch again until it is acknowledged, and its batches must then stand in the log once each and in order. A
reader follows one partition; it believes no leader older than one it has heard of, and remembers how far it has seen.
Requests and answers take time and get lost like everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from walstream.cluster.metadata import PartitionKey
from walstream.errors import (
    CorruptLog,
    NotLeader,
    OffsetNotAvailable,
    OffsetOutOfRange,
    OutOfOrderSequence,
    WalstreamError,
)
from walstream.log.batch import check_crc, parse_header, walk
from walstream.log.records import Record, build_batch
from walstream.sim.checkers import ACKS_ALL, Violation
from walstream.sim.clock import MS, SECOND, Timer
from walstream.sim.mirror import item_of

if TYPE_CHECKING:
    from walstream.sim.cluster import Cluster
    from walstream.sim.node import SimNode

ANSWER_TIMEOUT_US = (500 * MS, 3 * SECOND)
RETRY_US = (5 * MS, 300 * MS)
POLL_US = (10 * MS, 150 * MS)
OPERATE_US = (300 * MS, 4 * SECOND)
READ_BYTES_MAX = 2_000
PRODUCER_ID_FIRST = 1_000
PRODUCER_ID_STEP = 100
"""More than there are producers."""


class Producer:
    """Writes to one partition."""

    def __init__(self, cluster: Cluster, number: int, key: PartitionKey, acks: int, *, is_idempotent: bool) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._number = number
        self._key = key
        self._acks = acks
        self._is_idempotent = is_idempotent
        self._producer_id = PRODUCER_ID_FIRST + number
        self._sequence = 0
        self._sent = 0
        self._batch: bytearray | None = None
        self._attempt = 0
        self._timer: Timer | None = None
        self.acknowledged = 0
        self.is_over = False

    def start(self) -> None:
        """Begin to produce."""
        self._clock.after(self._clock.between(*self._cluster.scenario.produce_every_us), self._next)

    def forget(self, key: PartitionKey) -> None:
        """The partition is gone: produce nothing more to it."""
        if key == self._key:
            self.is_over = True
            self._is_idempotent = False

    def _next(self) -> None:
        """Make the next batch and send it."""
        if self.is_over:
            return
        clock = self._clock
        count = clock.between(1, 3)
        filler = b"x" * clock.between(0, 80)
        self._sent += 1
        records = [
            Record(i, clock.now_ms, None, b"%d.%d.%d" % (self._number, self._sent, i) + filler) for i in range(count)
        ]
        if self._is_idempotent:
            self._batch = build_batch(
                records, producer_id=self._producer_id, producer_epoch=0, base_sequence=self._sequence
            )
            self._sequence += count
        else:
            self._batch = build_batch(records)
        self._send()

    def _send(self) -> None:
        if self.is_over and not self._is_idempotent:
            return
        assert self._batch is not None
        self._attempt += 1
        attempt = self._attempt
        clock = self._clock
        node = self._cluster.leader_for_client(self._key)
        if node is not None:
            batch = bytearray(self._batch)  # The log stamps it in place.
            clock.after(self._cluster.client_delay_us(), partial(self._arrive, node, batch, attempt))
        self._timer = clock.after(clock.between(*ANSWER_TIMEOUT_US), partial(self._answered, attempt, None))

    def _arrive(self, node: SimNode, batch: bytearray, attempt: int) -> None:
        def answer(error: WalstreamError | None) -> None:
            if isinstance(error, OutOfOrderSequence) and not self._cluster.leads_newest(node, self._key):
                error = NotLeader("It was replaced, and knows nothing of what its successor was sent.")
            if not self._clock.chance(self._cluster.answer_loss):
                self._clock.after(self._cluster.client_delay_us(), partial(self._answered, attempt, error or True))

        node.produce(self._key, batch, self._acks, answer)

    def _answered(self, attempt: int, answer: WalstreamError | bool | None) -> None:
        """Take an answer: True, an error, or None for a timeout."""
        if attempt != self._attempt:
            return
        self._attempt += 1
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(answer, OutOfOrderSequence):
            if self._cluster.checkers.unclean_epoch(self._key) < 0:
                raise Violation("producer state", f"producer {self._number} was told: {answer}")
            self._begin_anew()
            return
        if answer is True:
            self.acknowledged += 1
        elif self._is_idempotent:
            self._clock.after(self._clock.between(*RETRY_US), self._send)
            return
        elif answer is not None:
            self._clock.after(self._clock.between(*RETRY_US), self._next)
            return
        self._batch = None
        self._clock.after(self._clock.between(*self._cluster.scenario.produce_every_us), self._next)

    def _begin_anew(self) -> None:
        """What was acknowledged is lost, as was allowed: go on as another producer, like a client that is told so."""
        self._producer_id += PRODUCER_ID_STEP
        self._sequence = 0
        self._clock.after(self._clock.between(*RETRY_US), self._next)


class Reader:
    """Reads one partition from its beginning, and now and then something older again."""

    def __init__(self, cluster: Cluster, number: int, key: PartitionKey) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._number = number
        self._key = key
        self._position = 0
        self._epoch = -1
        self._high_watermark = 0
        self.is_over = False
        self.batches = 0

    def start(self) -> None:
        """Begin to read."""
        self._clock.after(self._clock.between(*POLL_US), self._poll)

    def _poll(self) -> None:
        clock = self._clock
        clock.after(clock.between(*POLL_US), self._poll)
        node = self._cluster.leader_for_client(self._key)
        if node is not None and not self.is_over:
            clock.after(self._cluster.client_delay_us(), partial(self._read, node))

    def _read(self, node: SimNode) -> None:
        """Read at the node's own moment; what is handed out is judged there and then."""
        position = self._position
        if position and self._clock.chance(0.1):
            position = self._clock.between(0, position - 1)

        def done(epoch: int, high_watermark: int | None, data: memoryview | WalstreamError) -> None:
            self._judge(node, position, epoch, high_watermark, data)

        node.read(self._key, position, READ_BYTES_MAX, done)

    def _judge(
        self, node: SimNode, position: int, epoch: int, high_watermark: int | None, data: memoryview | WalstreamError
    ) -> None:
        """Look at an answer; one without a high watermark comes from a leader who does not know it yet."""
        name = f"reader {self._number} at node {node.id}"
        unclean_epoch = self._cluster.checkers.unclean_epoch(self._key)
        if epoch < max(self._epoch, unclean_epoch) or isinstance(data, OffsetNotAvailable):
            return
        if self._epoch < unclean_epoch:
            # What it has seen may be gone, as was allowed: it looks again where the log ends.
            if high_watermark is not None:
                self._epoch, self._high_watermark = epoch, 0
                self._position = min(self._position, high_watermark)
            return
        self._epoch = epoch
        if high_watermark is not None:
            if high_watermark < self._high_watermark:
                raise Violation(
                    "hw goes back", f"{name} saw the high watermark at {self._high_watermark}, then at {high_watermark}"
                )
            self._high_watermark = high_watermark
        if isinstance(data, OffsetOutOfRange) and position >= node.log_start(self._key):
            raise Violation("reads", f"{name} stands at {position}, below what it has seen, and is told: {data}")
        if isinstance(data, OffsetOutOfRange):
            self._position = max(self._position, node.log_start(self._key))
        if isinstance(data, CorruptLog | WalstreamError) or not len(data):
            return
        items = []
        for start, header in walk(data):
            if not check_crc(data, start, header.length):
                raise Violation("corrupt batch served", f"{name} was given a batch at {header.base_offset} that fails")
            items.append(item_of(header))
        self.batches += len(items)
        node.was_read(self._key, items)
        if position == self._position:
            self._position = items[-1].next


class Operator:
    """Deletes the beginning of logs, creates and deletes a topic."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self.is_over = False

    def start(self) -> None:
        """Begin, if the scenario has anything to do."""
        if self._cluster.scenario.has_trims:
            self._later(self._trim)
        if self._cluster.scenario.has_topic_changes:
            self._later(self._change_topics)

    def _later(self, act: Callable[[], None]) -> None:
        def happen() -> None:
            if not self.is_over:
                act()
                self._later(act)

        self._clock.after(self._clock.between(*OPERATE_US), happen)

    def _trim(self) -> None:
        topics = self._cluster.client_topics
        key = self._clock.random.choice([(topic.id, index) for topic in topics for index in range(topic.partitions)])
        node = self._cluster.leader_for_client(key)
        if node is not None:
            node.run(partial(node.trim, key))

    def repeat(self) -> None:
        """Have deleted, now and again, what was deleted: whoever asks for it asks until it is done."""
        for key in self._cluster.placement:
            node = self._cluster.leader_for_client(key)
            if node is not None:
                node.run(partial(node.trim_again, key))
        self._clock.after(OPERATE_US[0], self.repeat)

    def _change_topics(self) -> None:
        self._cluster.change_topics()


def producers_of(cluster: Cluster, keys: list[PartitionKey]) -> list[Producer]:
    """Draw the producers of a run."""
    random = cluster.clock.random
    found = []
    for number in range(cluster.scenario.producers):
        is_idempotent = random.random() < 0.5
        acks = ACKS_ALL if is_idempotent else random.choice((ACKS_ALL, ACKS_ALL, 1, 0))
        found.append(Producer(cluster, number, random.choice(keys), acks, is_idempotent=is_idempotent))
    return found


def readers_of(cluster: Cluster, keys: list[PartitionKey]) -> list[Reader]:
    """Draw the readers of a run."""
    return [Reader(cluster, number, cluster.clock.random.choice(keys)) for number in range(cluster.scenario.readers)]


def crc_of(batch: bytearray) -> int:
    """Return the CRC a batch carries."""
    return parse_header(batch).crc
