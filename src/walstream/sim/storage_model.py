"""What the logs of a simulated storage world must hold, kept from outside, and the checks against it.

One account per partition of a topic id: every batch that was appended, in the order of offsets, as the log of the
present leader has it. What a node serves is read through the log's own read path and compared batch by batch; a batch
with another checksum was rewritten by compaction, and then its records are compared.

The promises have names; a `Violation` says which one was broken.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from uuid import UUID

from walstream.errors import CorruptLog
from walstream.log.batch import BatchHeader, walk
from walstream.log.partition_log import PartitionLog
from walstream.log.records import Record as LogRecord
from walstream.log.records import build_batch, iter_records
from walstream.sim.checkers import Violation

READ_BYTES = 1 << 16

Record = tuple[bytes | None, bytes | None]
"""Key and value."""

NOTHING_FOREIGN = 1 << 62

IN_FLIGHT_MAX = 5
"""Batches that an idempotent producer may have in flight; a log remembers as many of each producer."""


@dataclass(slots=True)
class Sent:
    """A batch as the leader appended it."""

    base: int
    next: int
    epoch: int
    crc: int
    records: tuple[Record, ...]
    timestamp_ms: int
    ahead_ms: int
    """How far the wall clock had gone ahead when it was appended: see `StorageWorld.ahead_ms`."""
    aged_ms: int
    """The same for its timestamp, which is older after a step of the clock that append time could not follow."""
    producer: int
    sequence: int


@dataclass(slots=True)
class Held:
    """What one node has shown of its copy, and so must keep."""

    start_seen: int = 0
    """In this life of the process."""
    start_durable: int = 0
    """What DeleteRecords has acknowledged, or a clean stop has kept."""
    high_watermark: int = 0
    """In this life."""
    durable: int = 0
    """Everything below was fsynced, and survives a loss of power."""
    foreign_from: int = NOTHING_FOREIGN
    """From there on it may hold what the present leader does not, until it is truncated."""
    is_in_sync: bool = False
    is_streaming: bool = False
    harmed: list[tuple[int, int]] = field(default_factory=list)
    """Offsets whose files the world has taken away."""


@dataclass(slots=True)
class Client:
    """An idempotent producer of one partition."""

    id: int
    epoch: int = 0
    sequence: int = 0
    batches: list[Sent] = field(default_factory=list)
    """As they were appended."""
    seen_ms: int = 0
    """The world's time of the last batch."""
    is_silent: bool = False
    """Whether it sends nothing new, so that others replace what it has written."""

    def truncated(self, end: int) -> None:
        """Send again what the log has lost: the next batch has the sequence of the first one that is gone.

        A batch that IN_FLIGHT_MAX others have followed was acknowledged to the producer, which never sends it again.
        """
        for number, sent in enumerate(self.batches):
            if sent.next > end:
                self.sequence = sent.sequence
                del self.batches[0 if len(self.batches) - number >= IN_FLIGHT_MAX else number :]
                return


class Account:
    """One partition of one topic id."""

    def __init__(self, name: str, topic_id: UUID, index: int) -> None:
        self.topic, self.topic_id, self.index = name, topic_id, index
        self.name = f"{name}-{index}"
        self.batches: list[Sent] = []
        self.bases: list[int] = []
        self.high_watermark = 0
        """Promised to consumers: nothing below is ever lost."""
        self.start = 0
        """The highest log start that any node has shown."""
        self.was_compacted = False
        self.delete_retention_ms = 1 << 62
        """The shortest there was."""
        self.retention_ms = 1 << 62
        self.has_size_limit = False
        self.ahead_ms = 0
        self.deleted_to = 0
        """The highest offset that was given to DeleteRecords."""
        self.dropped: set[bytes] = set()
        """Values that were truncated."""
        self.leader = 0
        self.epoch = 0
        self.held = [Held(is_in_sync=True), Held(is_in_sync=True)]
        self.clients: list[Client] = []
        self._latest: dict[bytes, tuple[int, bytes | None, int]] = {}
        """Of each key the last committed record: its offset, its value, and `ahead_ms` when it was appended."""
        self._latest_to = 0
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}
        """Rewritten batches that were compared: by base offset and CRC the offsets of their records."""

    @property
    def end(self) -> int:
        """Where the leader's log ends."""
        return self.batches[-1].next if self.batches else 0

    def appended(self, header: BatchHeader, records: list[Record], ahead_ms: int, wall_ms: int) -> Sent:
        """Take in a batch that the leader has appended."""
        aged_ms = ahead_ms - max(wall_ms - header.max_timestamp, 0)
        sent = Sent(
            header.base_offset, header.next_offset, header.leader_epoch, header.crc, tuple(records),
            header.max_timestamp, ahead_ms, aged_ms, header.producer_id, header.base_sequence,
        )  # fmt: skip
        self.batches.append(sent)
        self.bases.append(sent.base)
        return sent

    def truncate(self, end: int, why: str) -> None:
        """The leader's log ends at `end`: what was above is gone, and was not promised to anybody."""
        if end < self.high_watermark:
            raise Violation(
                "acknowledged records",
                f"{self.name} ends at {end} {why}, and consumers were promised records up to {self.high_watermark}",
            )
        while self.batches and self.batches[-1].next > end:
            sent = self.batches.pop()
            self.bases.pop()
            self.dropped.update(value for _, value in sent.records if value)
        for client in self.clients:
            client.truncated(end)
        for held in self.held:
            held.durable = min(held.durable, end)

    def at(self, base: int) -> Sent | None:
        """Return the batch that begins at an offset."""
        number = bisect_left(self.bases, base)
        return self.batches[number] if number < len(self.bases) and self.bases[number] == base else None

    def commit(self, offset: int) -> None:
        """Raise the promise to consumers, and with it what the last record of each key is."""
        if offset <= self.high_watermark:
            return
        self.high_watermark = offset
        number = bisect_left(self.bases, self._latest_to)
        while number < len(self.batches) and self.batches[number].next <= offset:
            sent = self.batches[number]
            for at, (key, value) in enumerate(sent.records, sent.base):
                if key is not None:
                    self._latest[key] = (at, value, sent.ahead_ms)
            self._latest_to = sent.next
            number += 1

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check_bounds(self, node: int, log: PartitionLog) -> None:
        """Compare what a log shows of itself with what it has shown before, in this life of its node."""
        held = self.held[node]
        if log.failure is not None or log.is_held:
            return
        where = f"{self.name} on node {node}"
        if log.log_start < held.start_seen:
            raise Violation("log start", f"{where} begins at {log.log_start}, and began at {held.start_seen} before")
        if log.log_start > max(held.start_seen, self.deleted_to, self.start) and not self._may_expire(
            held.start_seen, log.log_start
        ):
            raise Violation("retention", f"{where} begins at {log.log_start}; nothing has allowed to remove that much")
        held.start_seen = log.log_start
        self.start = max(self.start, log.log_start)
        if not log.log_start <= log.high_watermark <= log.durable_end <= log.log_end:
            raise Violation("offsets in order", f"{where}: {log!r}")
        if log.high_watermark < min(held.high_watermark, held.foreign_from):
            raise Violation(
                "high watermark", f"{where}: it is {log.high_watermark}, and was {held.high_watermark} before"
            )
        held.high_watermark = log.high_watermark
        held.durable = max(held.durable, min(log.durable_end, held.foreign_from))

    def _may_expire(self, start: int, end: int) -> bool:
        if self.has_size_limit:
            return True
        number = bisect_left(self.bases, start)
        return all(
            self.ahead_ms - sent.aged_ms >= self.retention_ms or (self.was_compacted and self._is_replaced(sent))
            for sent in self.batches[number:]
            if sent.next <= end
        )

    def _is_replaced(self, sent: Sent) -> bool:
        """Tell whether compaction may have removed all records of a batch: then retention does not see its time."""
        latest = (self._latest.get(key or b"", (-1, None, 0))[0] for key, _ in sent.records)
        return all(offset > at for at, offset in enumerate(latest, sent.base))

    def check_start(self, node: int, log: PartitionLog) -> None:
        """Compare a log that a start has found with what its node must have kept."""
        held, where = self.held[node], f"{self.name} on node {node}"
        if log.failure is not None:
            return
        if log.log_start < held.start_durable:
            raise Violation(
                "log start", f"{where} begins at {log.log_start}; up to {held.start_durable} it was deleted"
            )
        if log.log_end < held.durable and not held.harmed:
            raise Violation("durability", f"{where} ends at {log.log_end}; up to {held.durable} it was durable")
        held.start_seen, held.high_watermark = log.log_start, log.high_watermark

    def check_content(self, node: int, log: PartitionLog) -> None:
        """Read a copy back, as consumers and followers do, and compare it."""
        held = self.held[node]
        if log.failure is not None or log.is_held:
            return
        if not log.replicated:
            self.commit(min(log.high_watermark, self.end))
        end = min(log.durable_end, held.foreign_from)
        present = self._read(node, log, log.log_start, end)
        visible = min(log.high_watermark, self.high_watermark, end)
        if self.was_compacted:
            self._check_keys(node, log, present, end)
        else:
            self._check_holes(node, log, present, end)
        if visible > log.log_start and log.high_watermark <= end:
            self._read_visible(node, log, visible)

    def _read(self, node: int, log: PartitionLog, start: int, end: int) -> list[int]:
        """Return the offsets of the records that a follower would be sent, all compared."""
        present: list[int] = []
        offset = start
        while offset < end:
            try:
                chunk = log.read_replica_blocking(offset, READ_BYTES)
            except CorruptLog as error:
                offset = self._behind_damage(node, log, offset, error)
                continue
            except OSError as error:
                raise Violation(
                    "committed segments stay readable",
                    f"{self.name} on node {node} cannot be read at {offset}: {error!r}",
                ) from error
            if chunk.next_offset == offset:
                break
            for buffer in chunk.buffers:
                for at, header in walk(buffer):
                    if header.base_offset < end:
                        view = memoryview(buffer)[at : at + header.length]
                        present += self._compare(node, header, view)
            offset = chunk.next_offset
        return present

    def _read_visible(self, node: int, log: PartitionLog, visible: int) -> None:
        """Read what consumers see: it ends at the high watermark, and is what followers are sent."""
        offset = log.log_start
        while offset < visible:
            try:
                data = log.read_blocking(offset, READ_BYTES)
            except CorruptLog as error:
                offset = self._behind_damage(node, log, offset, error)
                continue
            if not len(data):
                break
            for _, header in walk(data):
                if header.next_offset > log.high_watermark:
                    raise Violation("visibility", f"{self.name} on node {node} serves {header.base_offset}, {log!r}")
                offset = header.next_offset

    def _behind_damage(self, node: int, log: PartitionLog, offset: int, error: CorruptLog) -> int:
        start, stop = error.offsets or (offset, offset + 1)
        if not any(start < b and a < stop for a, b in self.held[node].harmed):
            raise Violation(
                "committed segments stay readable",
                f"{self.name} on node {node} cannot be read at {offset}: {error}",
            )
        return max(offset + 1, min(stop, log.log_end))

    def _compare(self, node: int, header: BatchHeader, batch: memoryview) -> tuple[int, ...]:
        """Compare a batch with what was appended there, and return the offsets of its records."""
        sent = self.at(header.base_offset)
        if sent is not None and (header.crc, header.leader_epoch) == (sent.crc, sent.epoch):
            return tuple(range(sent.base, sent.next))
        key = (header.base_offset, header.crc)
        known = self._known.get(key)
        if known is not None and sent is not None and header.leader_epoch == sent.epoch:
            return known
        found = []
        for record in iter_records(batch):
            place = None if sent is None else record.offset - sent.base
            if (
                sent is None
                or place is None
                or not 0 <= place < len(sent.records)
                or sent.records[place] != (record.key, record.value)
            ):
                self._fail_foreign(node, record.offset, record.value, sent)
            found.append(record.offset)
        if sent is None or header.leader_epoch != sent.epoch or header.next_offset != sent.next:
            self._fail_foreign(node, header.base_offset, None, sent)
        if not self.was_compacted:
            raise Violation("acknowledged records", f"{self.name} on node {node}: the batch at {key[0]} was changed")
        self._known[key] = result = tuple(found)
        return result

    def _fail_foreign(self, node: int, offset: int, value: bytes | None, sent: Sent | None) -> None:
        where = f"{self.name} on node {node} serves {value!r} at {offset}"
        if value is not None and not value.startswith(f"{self.topic_id.hex[-6:]}/{self.index}/".encode()):
            raise Violation("topic isolation", f"{where}, which belongs to another topic")
        if value in self.dropped:
            raise Violation("truncated records come back", f"{where}, which was truncated")
        if sent is not None and sent.base < self.high_watermark:
            raise Violation("offset reuse", f"{where}, where {sent.records} was acknowledged")
        raise Violation("truncated records come back", f"{where}, where the leader has {sent}")

    def _check_holes(self, node: int, log: PartitionLog, present: list[int], end: int) -> None:
        expected = log.log_start
        for offset in present:
            if offset > expected and not self._is_harmed(node, expected, offset):
                break
            expected = max(expected, offset + 1)
        else:
            if expected >= end or self._is_harmed(node, expected, end):
                return
        raise Violation(
            "acknowledged records" if expected < self.high_watermark else "durability",
            f"{self.name} on node {node} has no record {expected}: {log!r}",
        )

    def _is_harmed(self, node: int, start: int, end: int) -> bool:
        return any(a <= start and end <= b for a, b in self.held[node].harmed)

    def _check_keys(self, node: int, log: PartitionLog, present: list[int], end: int) -> None:
        """The last committed record of each key is there; a tombstone may go in time, and what it deletes before it."""
        offsets = set(present)
        oldest: dict[bytes, int] | None = None
        for key, (offset, value, ahead_ms) in self._latest.items():
            if not log.log_start <= offset < end or offset in offsets:
                continue
            if any(a <= offset < b for a, b in self.held[node].harmed):
                continue
            if value is not None:
                raise Violation(
                    "last value of a key",
                    f"{self.name} on node {node}: the last value of {key!r} was at {offset} and is gone, {log!r}",
                )
            if self.ahead_ms - ahead_ms < self.delete_retention_ms:
                raise Violation("last value of a key", f"{self.name} on node {node}: tombstone {offset} went too early")
            if log.replicated:
                continue  # A follower that lags for longer than tombstones are kept misses some, as in Kafka.
            if oldest is None:
                oldest = self._oldest(present)
            if oldest.get(key, offset) < offset and not self.held[node].harmed:
                raise Violation(
                    "last value of a key",
                    f"{self.name} on node {node}: {key!r} was deleted at {offset}; its value at {oldest[key]} is back",
                )

    def _oldest(self, present: list[int]) -> dict[bytes, int]:
        oldest: dict[bytes, int] = {}
        number = 0
        for offset in present:
            while number + 1 < len(self.batches) and self.batches[number].next <= offset:
                number += 1
            sent = self.batches[number]
            key, value = sent.records[offset - sent.base]
            if key is not None and value is not None:
                oldest.setdefault(key, offset)
        return oldest

    def check_age(self, log: PartitionLog, header: BatchHeader) -> None:
        """A batch goes to no segment whose first batch is older than `segment.ms`."""
        first = self.at(log.segments[-1].base_offset)
        if first is None or first.base == header.base_offset:
            return
        if self.was_compacted and self._is_replaced(first):
            return  # A follower may have been sent a header without records and so without a time.
        age_ms = header.max_timestamp - first.timestamp_ms
        if age_ms > log.settings.segment_ms:
            raise Violation(
                "segment age",
                f"{self.name}: {header.base_offset} went to the segment at {first.base}, which is {age_ms} ms old",
            )


def encode(records: list[Record], now_ms: int, client: Client | None, again: Sent | None = None) -> bytearray:
    """Build a batch; `again`: as its producer has sent it before."""
    producer: dict[str, int] = {}
    if client is not None:
        sequence = client.sequence if again is None else again.sequence
        producer = {"producer_id": client.id, "producer_epoch": client.epoch, "base_sequence": sequence}
    timestamp_ms = now_ms if again is None else again.timestamp_ms
    made = [LogRecord(number, timestamp_ms, key, value) for number, (key, value) in enumerate(records)]
    return build_batch(made, **producer)  # type: ignore[arg-type]
