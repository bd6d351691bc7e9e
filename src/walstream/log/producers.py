"""Idempotent producers of one partition: a batch that comes twice is written once.

Owns, per producer id, its epoch and its last five batches (Kafka clients have at most five in flight), learnt from the
headers of the batches in the log and from nothing else; so any replica that reads the same log knows the same. The
rules are Kafka's:

    a batch equal in epoch and sequence range to one of the last five → a duplicate: answer the original's offsets
    the sequence after the last one                                   → accept
    any other sequence                                                → OutOfOrderSequence
    an epoch below the known one                                      → InvalidProducerEpoch
    an epoch above it                                                 → accept sequence 0 only
    an unknown producer                                               → accept any sequence (its past may be trimmed)

Because an unknown producer may start anywhere, forgetting a live one could let its retry in as a new batch. So room for
a new producer is made only by forgetting the one silent for longest, and only if that is longer than any client goes on
retrying (`RETRY_MS_MAX`). If there is none, the new producer is refused, retryably: it has written nothing yet, so no
harm comes to it but delay. Time is an argument, of the node's monotonic clock: a wall clock that is set forward must
not age a live producer, and a batch's own timestamps are its producer's to invent. A monotonic time means nothing to
another process, so restored producers count as seen at the restore and are only ever forgotten later.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any, Final, NamedTuple

from walstream.errors import CorruptLog, InvalidProducerEpoch, OutOfOrderSequence, TooManyProducers
from walstream.log.batch import SEQUENCE_MASK, BatchHeader

BATCHES_KEPT: Final = 5
PRODUCERS_MAX: Final = 10_000
"""About 1 KB each."""
RETRY_MS_MAX: Final = 15 * 60 * 1000
"""Three times librdkafka's default `message.timeout.ms`, the longest among the clients."""


class Duplicate(NamedTuple):
    """Where the batch was written when it first came."""

    base_offset: int
    last_offset: int
    timestamp_ms: int
    """Its max timestamp: the append time, on a topic that uses it."""


class _Batch(NamedTuple):
    base_sequence: int
    last_offset_delta: int
    base_offset: int
    timestamp_ms: int


Row = tuple[int, int, int, tuple[_Batch, ...]]
"""A producer in a snapshot."""


class _Producer:
    __slots__ = ("row", "seen_ms")

    def __init__(self, row: Row, seen_ms: int) -> None:
        self.row = row
        """Made when a batch is applied, so that a snapshot makes no objects, which the collector would look at."""
        self.seen_ms = seen_ms

    @property
    def epoch(self) -> int:
        return self.row[1]

    @property
    def batches(self) -> tuple[_Batch, ...]:
        return self.row[3]


class ProducerStates:
    """What a partition knows of its idempotent producers."""

    __slots__ = ("_producers", "producers_max")

    def __init__(self, producers_max: int = PRODUCERS_MAX) -> None:
        assert producers_max > 0, producers_max
        self.producers_max = producers_max
        # In the order in which they were last seen, which a dict keeps if a producer is taken out and put in again.
        self._producers: dict[int, _Producer] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._producers

    def check(self, header: BatchHeader, now_ms: int) -> Duplicate | None:
        """Decide on a batch that is about to be appended: a duplicate, None to go on, or an error. Changes nothing.

        Raises OutOfOrderSequence, InvalidProducerEpoch, TooManyProducers.
        """
        if header.producer_id < 0:
            return None
        producer = self._producers.get(header.producer_id)
        if producer is None:
            self._check_room(header.producer_id, now_ms)
            return None
        if header.producer_epoch < producer.epoch:
            raise InvalidProducerEpoch(
                f"Producer {header.producer_id} is at epoch {producer.epoch}; the batch is of {header.producer_epoch}."
            )
        base_sequence = header.base_sequence
        if header.producer_epoch > producer.epoch:
            if base_sequence != 0:
                raise OutOfOrderSequence(
                    f"Producer {header.producer_id} begins epoch {header.producer_epoch} "
                    f"with sequence {base_sequence}, not 0."
                )
            return None
        for batch in producer.batches:
            if batch.base_sequence == base_sequence and batch.last_offset_delta == header.last_offset_delta:
                return Duplicate(batch.base_offset, batch.base_offset + batch.last_offset_delta, batch.timestamp_ms)
        last = producer.batches[-1]
        expected = (last.base_sequence + last.last_offset_delta + 1) & SEQUENCE_MASK
        if base_sequence != expected:
            raise OutOfOrderSequence(
                f"Producer {header.producer_id} sent sequence {base_sequence} where {expected} comes next."
            )
        return None

    def _check_room(self, producer_id: int, now_ms: int) -> None:
        if len(self._producers) < self.producers_max:
            return
        oldest = next(iter(self._producers.values()))
        if now_ms - oldest.seen_ms < RETRY_MS_MAX:
            raise TooManyProducers(
                f"Producer {producer_id} is one more than the {self.producers_max} that may write to a partition "
                f"within {RETRY_MS_MAX // 60_000} minutes.",
                "Share producers between tasks, or raise the limit of producers per partition.",
            )

    def apply(self, header: BatchHeader, now_ms: int) -> None:
        """Learn from a batch that is in the log, its base offset stamped. What the log holds is not questioned.

        Applying a batch again changes nothing, so recovery may overlap what a snapshot already holds.
        """
        producer_id = header.producer_id
        if producer_id < 0:
            return
        batch = _Batch(header.base_sequence, header.last_offset_delta, header.base_offset, header.max_timestamp)
        producer = self._producers.pop(producer_id, None)
        if producer is None:
            if len(self._producers) >= self.producers_max:
                del self._producers[next(iter(self._producers))]
            producer = _Producer((producer_id, header.producer_epoch, 0, (batch,)), now_ms)
        elif batch.base_offset > producer.batches[-1].base_offset:
            is_same = header.producer_epoch == producer.epoch
            before = producer.batches[1 - BATCHES_KEPT :] if is_same else ()
            producer.row = (producer_id, header.producer_epoch, 0, (*before, batch))
        producer.seen_ms = max(producer.seen_ms, now_ms)
        self._producers[producer_id] = producer

    def expire(self, before_ms: int) -> int:
        """Forget the producers last seen before then; return how many. Safe from `RETRY_MS_MAX` ago on."""
        silent = takewhile(lambda item: item[1].seen_ms < before_ms, self._producers.items())
        expired = [producer_id for producer_id, _ in silent]
        for producer_id in expired:
            del self._producers[producer_id]
        return len(expired)

    def last_offsets(self, below: int) -> dict[int, int]:
        """Return where each producer's last batch below an offset begins; -1 where all that are remembered are above.

        From it a replica that copies the log learns of the producer.
        """
        return {
            producer_id: max((batch.base_offset for batch in producer.batches if batch.base_offset < below), default=-1)
            for producer_id, producer in self._producers.items()
        }

    def snapshot(self, below: int | None = None) -> list[Row]:
        """Return what the log says below an offset, or all of it, the producer silent for longest first.

        Batches at or above `below` may never reach the disk: a snapshot that had them would take their retry for a
        duplicate, and lose it. Each row is
        [producer id, epoch, 0, [[base sequence, last offset delta, base offset, timestamp ms], …]];
        earlier versions wrote the wall-clock time of the last batch in place of the 0. The rows never change, so
        another thread may encode them.
        """
        rows: list[Row] = []
        for producer in self._producers.values():
            row = producer.row
            if below is not None and row[3][-1].base_offset >= below:
                row = (*row[:3], tuple(batch for batch in row[3] if batch.base_offset < below))
            if row[3]:
                rows.append(row)
        return rows

    @classmethod
    def restore(cls, snapshot: Iterable[Any], producers_max: int = PRODUCERS_MAX, *, now_ms: int) -> ProducerStates:
        """Build the states from a snapshot, all of them seen now. Raises CorruptLog if it cannot be one.

        A limit that has become smaller forgets the producers silent for longest.
        """
        states = cls(producers_max)
        try:
            for producer_id, epoch, written_ms, batches in snapshot:
                restored = tuple(_Batch(*batch) for batch in batches)
                numbers = (producer_id, epoch, written_ms, *(number for batch in restored for number in batch))
                if not restored or len(restored) > BATCHES_KEPT or any(type(number) is not int for number in numbers):
                    raise CorruptLog(f"The stored state of producer {producer_id!r} is not possible.")
                states._producers[producer_id] = _Producer((producer_id, epoch, 0, restored), now_ms)
        except (TypeError, ValueError) as error:
            raise CorruptLog("The stored producer states are not what a snapshot holds.") from error
        while len(states._producers) > producers_max:
            del states._producers[next(iter(states._producers))]
        return states
