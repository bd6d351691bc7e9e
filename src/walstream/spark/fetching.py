"""Records from the log by offsets: one consumer of a process, assigned one range at a time, no group.

Owns the consumer and how many records are asked for at once; refuses to know what they say. Invariant: `read` yields
the records of [start, stop) in order and ends; when one of the range is not there any more it raises DataLoss, and when
the log is silent UnreachableError. It never ends early without saying so, except at the end of the partition, which
whoever counts notices.

Executors are processes that serve many tasks: their consumer is kept (`shared`), for connecting costs more than the
rows of a small task.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition

from walstream.capture.kafka import OF_GROUPS, TIMEOUT_S, LogAddress
from walstream.errors import DataLoss, DeliveryFailed, OffsetOutOfRange, UnreachableError, WalstreamError
from walstream.positions import TopicPartition

CHUNK_ROWS: Final = 20_000
CHUNK_BYTES: Final = 8 * 1024 * 1024
"""How much is decoded at once: enough for vectors to pay, little enough for two tasks beside a small Spark."""
WAIT_S: Final = 0.2
SILENCE_S_MAX: Final = 30.0

_QUEUE: Final[Mapping[str, Any]] = {
    # What is fetched beyond the end of a task's range is thrown away, so librdkafka runs ahead by little.
    "queued.min.messages": CHUNK_ROWS,
    "queued.max.messages.kbytes": 16 * 1024,
    "fetch.message.max.bytes": 2 * 1024 * 1024,
    # By default it would then rest for a second, while the executor waits for the next chunk.
    "fetch.queue.backoff.ms": 2,
    "fetch.wait.max.ms": 10,
    "fetch.error.backoff.ms": 20,
    # The log has a checksum of its own for what it stores; this one is for the wire.
    "check.crcs": True,
}

_HARMLESS: Final = OF_GROUPS | {KafkaError._PARTITION_EOF}

_STALE: Final = frozenset(
    {KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.NOT_LEADER_FOR_PARTITION}
)
"""What is answered to a consumer that knew the log before it was started again, and that insists on what it knew."""


class Address(LogAddress):
    """Where the log is, in words of the data source."""

    def error(self, error: KafkaError, what: str = "") -> WalstreamError:
        """Return an error of librdkafka as one of ours."""
        told = super().error(error, what)
        # What has no name of its own is of no use to who only reads: the log cannot be read now.
        if isinstance(told, UnreachableError | DeliveryFailed):
            return UnreachableError(told.message, "Check the option bootstrap, and whether the log runs.")
        return told

    def _settings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return super()._settings({"client.id": "walstream-spark", **more})


class Fetcher:
    """One consumer. Used by one thread."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._known: Consumer | None = None
        self._row_bytes = 2_000.0
        """How large rows are, by what was seen last; a guess that is too high costs little."""
        self._turn = 0
        self._met: set[str] = set()

    def read(
        self, partition: TopicPartition, start: int, stop: int, first: int | None = None
    ) -> Iterator[list[Message]]:
        """Yield the records of [start, stop), many at a time, at most `first` at first.

        Raises DataLoss, UnreachableError.
        """
        if start >= stop:
            return
        position, most = start, first or CHUNK_ROWS
        with self._assigned(partition, start):
            deadline = time.monotonic() + SILENCE_S_MAX
            while position < stop:
                wanted = max(1, min(most, int(CHUNK_BYTES / self._row_bytes), stop - position))
                with self._address.translated(str(partition)):
                    told = self._consumer.consume(wanted, timeout=WAIT_S)
                messages = [message for message in told if message.error() is None]
                while messages and _offset(messages[-1]) >= stop:
                    messages.pop()
                if messages:
                    position, most = _offset(messages[-1]) + 1, CHUNK_ROWS
                    self._learn(messages)
                events = [message for message in told if message.error() is not None]
                is_end = self._check(events, partition, position) and told[-1] is events[-1]
                if messages:
                    yield messages
                    deadline = time.monotonic() + SILENCE_S_MAX
                if is_end:
                    return
                _check_silence(partition, deadline)

    def read_compacted(self, partition: TopicPartition, start: int, stop: int) -> Iterator[Message]:
        """Yield what is left of [start, stop), whose offsets have gaps: one by one, until the partition ends."""
        position = start
        if stop <= start:
            return
        with self._assigned(partition, start):
            deadline = time.monotonic() + SILENCE_S_MAX
            while position < stop:
                with self._address.translated(str(partition)):
                    message = self._consumer.poll(WAIT_S)
                if message is not None and message.error() is None:
                    position = _offset(message) + 1
                    yield message
                    deadline = time.monotonic() + SILENCE_S_MAX
                elif message is not None and self._check([message], partition, position):
                    return
                _check_silence(partition, deadline)

    def close(self) -> None:
        """End the connection."""
        if self._known is not None:
            self._known.close()
            self._known = None

    @contextmanager
    def _assigned(self, partition: TopicPartition, start: int) -> Iterator[None]:
        """Have the consumer read from there, until the block ends."""
        self._turn += 1
        turn = self._turn
        self._assign(partition, start)
        try:
            yield
        finally:
            # Somebody who has read enough may be followed by the next reader before this one is collected.
            if turn == self._turn and self._known is not None:
                self._known.unassign()

    def _assign(self, partition: TopicPartition, start: int) -> None:
        with self._address.translated(str(partition)):
            if partition.topic not in self._met:
                # Assigned a topic that it has not met, librdkafka looks for its leader when it next has a second.
                self._consumer.list_topics(partition.topic, timeout=TIMEOUT_S)
                self._met.add(partition.topic)
            self._consumer.assign([KafkaPartition(*partition, start)])

    @property
    def _consumer(self) -> Consumer:
        if self._known is None:
            self._known = self._address.consumer(_QUEUE)
            self._met.clear()
        return self._known

    def _learn(self, messages: list[Message]) -> None:
        """Remember how large rows are, by the last few of them."""
        sizes = [len(message) for message in messages[-16:]]
        self._row_bytes = max(100.0, sum(sizes) / len(sizes), self._row_bytes / 2)

    def _check(self, events: list[Message], partition: TopicPartition, position: int) -> bool:
        """Raise what librdkafka says is wrong; return whether the last it says is that the partition ends here."""
        code = None
        for event in events:
            error = event.error()
            assert error is not None
            code = error.code()
            if code in _STALE:
                self.close()
                self._assign(partition, position)
                return False
            if code not in _HARMLESS:
                told = self._address.error(error, str(partition))
                raise gone(partition, position) if isinstance(told, OffsetOutOfRange) else told
        return code == KafkaError._PARTITION_EOF


def _check_silence(partition: TopicPartition, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise UnreachableError(f"{partition} has answered nothing for {SILENCE_S_MAX:g} seconds.")


def gone(partition: TopicPartition, position: int) -> DataLoss:
    """Return the error for a position that the log does not have any more."""
    return DataLoss(
        f"{partition} does not have offset {position:,} any more: retention has removed it, or the topic is "
        "another one.",
        "Begin again with starting=earliest and a new checkpoint, or take a new snapshot.",
    )


_shared: dict[int, tuple[Address, Fetcher]] = {}


def shared(address: Address) -> Fetcher:
    """Return this process's fetcher; one for another address takes its place."""
    known = _shared.get(os.getpid())
    if known is None or known[0] != address:
        if known is not None:
            known[1].close()
        # A fork has its parent's entry beside its own, and must not touch it.
        known = _shared[os.getpid()] = (address, Fetcher(address))
    return known[1]


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, "a record has an offset"
    return offset
