"""Produce: record batches from a frame to the log, without a copy and without a task.

The request is read by hand, so that each batch stays a view of the received frame; the log patches it there and writes
it from there. Appending happens at once, in the order of arrival; the response waits until every batch is durable, has
failed, or the request's own timeout has passed. A timeout takes nothing back: the batch may still become durable, as
its client knows, and the frame stays counted until the log has let go of it.

In a cluster acks=1 waits for this node's disk (in mode `sync` for followers' disks too), acks=all until the batch is
below the high watermark, which is to say on the disks of all in-sync replicas. Who waits no longer, because its time is
over or its connection gone, is taken off the list.

From version 9 on each partition's answer says in a tagged field which durability it met (`DURABILITY_TAG`); clients
that do not know the tag skip it.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from walstream import logs
from walstream.error_codes import codes
from walstream.errors import (
    CorruptBatch,
    InvalidAcks,
    InvalidRecord,
    RequestTimedOut,
    TransactionsUnsupported,
    WalstreamError,
)
from walstream.log.batch import HEADER_BYTES
from walstream.log.waiting import NOBODY
from walstream.node.context import Context
from walstream.node.framing import held_bytes
from walstream.node.wire import Buffer, Header, Source, write_uvarint

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog
    from walstream.node.slots import Slot

log = logs.get(__name__)

FLEXIBLE_FROM = 9
PRODUCE = 0

ALL = -1

DURABILITY_TAG = 10_000
"""Tagged field of a partition's answer, one byte: `BUFFERED`, `FSYNCED` or `REPLICATED`. Far above Kafka's own tags."""
BUFFERED = 0
"""The operating system has the bytes; a power cut loses them. Only topics that ask for it are answered like this."""
FSYNCED = 1
"""The disk of this node has the bytes."""
REPLICATED = 2
"""The disks of all replicas that are in sync have the bytes."""

REPLICATION_WAIT_MS_MAX = 60_000
"""The longest that a request waits for other nodes, whatever it asks for: who waits holds memory."""

_ATTRIBUTES_AT = 22
_TRANSACTIONAL = 0x10
_CONTROL = 0x20

_ROW = struct.Struct(">ihqq")
_ROW_WITH_START = struct.Struct(">ihqqq")


class Row:
    """One partition of the request, and what became of it."""

    __slots__ = (
        "append_time_ms",
        "base_offset",
        "batch",
        "code",
        "durability",
        "index",
        "is_open",
        "log_start",
        "message",
        "waiter",
    )

    def __init__(self, index: int, batch: memoryview | None) -> None:
        self.index = index
        self.batch = batch
        self.code = 0
        self.message: str | None = None
        self.base_offset = self.append_time_ms = self.log_start = -1
        self.durability = FSYNCED
        self.is_open = False
        self.waiter = NOBODY

    def fail(self, error: WalstreamError) -> None:
        """Answer this partition with an error."""
        self.code, self.message = codes(error).kafka, str(error)
        self.base_offset = self.append_time_ms = -1


Topics = list[tuple[str, list[Row]]]


class Request:
    """A produce request under way: counts its batches home and then answers."""

    __slots__ = (
        "_context",
        "_frame_bytes",
        "_header",
        "_open",
        "_slot",
        "_started",
        "_writing",
        "acks",
        "timeout_ms",
        "topics",
        "transactional_id",
    )

    def __init__(self, context: Context, frame: bytearray, header: Header, slot: Slot) -> None:
        self._context = context
        self._header = header
        self._slot = slot
        self._frame_bytes = held_bytes(frame)
        self._open = self._writing = 1  # The request itself, until everything has been appended.
        self._started = time.perf_counter()
        source = Source(memoryview(frame), header.position)
        self.transactional_id, self.acks, self.timeout_ms, self.topics = read_request(source, header.version)

    def append(self) -> None:
        """Append every batch, then wait for the disk."""
        now_ms = self._context.node.now_ms()
        for topic, rows in self.topics:
            refusal = self._refusal(topic)
            for row in rows:
                if refusal is None:
                    self._append(topic, row, now_ms)
                else:
                    row.fail(refusal)
        self._written()
        self._close()
        if self._open and self.acks != 0:
            deadline = asyncio.get_running_loop().time() + max(self.timeout_ms, 0) / 1000
            self._slot.fill_by(deadline, self._expire)

    def _refusal(self, topic: str) -> WalstreamError | None:
        """Return what forbids writing to the topic, if anything does."""
        if self.acks not in (ALL, 0, 1):
            return InvalidAcks(f"acks={self.acks} is not possible.", "Use 0, 1 or all.")
        if self.transactional_id is not None:
            return TransactionsUnsupported("Transactions are not offered.", "Produce without a transactional id.")
        try:
            self._context.authorize("write", "topic", topic)
        except WalstreamError as error:
            return error
        return None

    def _append(self, topic: str, row: Row, now_ms: int) -> None:
        node = self._context.node
        batch = row.batch
        row.batch = None
        try:
            _check(batch)
            assert batch is not None
            partition = node.store.partition(topic, row.index)
            if self.acks == ALL and partition.settings.min_isr > 1:
                node.placement.check_in_sync(partition)
            appended = partition.append(batch, now_ms=now_ms)
        except WalstreamError as error:
            row.fail(error)
            return
        except Exception as error:
            log.exception("append failed", topic=topic, partition=row.index)
            row.fail(WalstreamError(f"The append failed: {type(error).__name__}."))
            return
        row.base_offset, row.append_time_ms, row.log_start = (
            appended.base_offset,
            appended.append_time_ms,
            appended.log_start,
        )
        if partition.settings.ack_before_fsync:
            row.durability = BUFFERED
        row.is_open = True
        metrics = node.metrics
        metrics.appended_batches += 1
        metrics.appended_bytes += len(batch)
        metrics.appended_records += appended.last_offset - appended.base_offset + 1
        self._open += 1
        self._writing += 1
        if partition.replicated and (self.acks == ALL or (self.acks == 1 and node.placement.is_sync)):
            self._wait_for_replicas(partition, row, appended.last_offset)
        else:
            partition.when_durable(appended.last_offset, partial(self._stored, row))

    def _wait_for_replicas(self, partition: PartitionLog, row: Row, offset: int) -> None:
        """Wait for what the producer asks for, and apart from it for the disk, which then lets go of the frame."""
        self.timeout_ms = min(self.timeout_ms, REPLICATION_WAIT_MS_MAX)
        partition.when_durable(offset, self._written)
        landed = partial(self._landed, row)
        if self.acks == ALL:
            if row.durability == FSYNCED:
                row.durability = REPLICATED
            row.waiter = partition.when_visible(offset, landed)
        else:
            row.waiter = self._context.node.placement.when_acknowledged(partition, offset, landed)

    def _stored(self, row: Row, error: WalstreamError | None) -> None:
        self._written()
        self._landed(row, error)

    def _written(self, _: WalstreamError | None = None) -> None:
        """One batch less that the log holds."""
        self._writing -= 1
        if self._writing == 0:
            self._context.node.budget.give(self._frame_bytes)

    def _landed(self, row: Row, error: WalstreamError | None) -> None:
        row.is_open = False
        if error is not None:
            row.fail(error)
        self._close()

    def _close(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._answer()

    def _expire(self) -> None:
        for _, rows in self.topics:
            for row in rows:
                if row.is_open:
                    row.waiter.cancel()
                    row.fail(RequestTimedOut(f"The batch was not durable within {self.timeout_ms} ms."))
        self._answer()

    def _answer(self) -> None:
        if self._slot.is_filled:
            return
        metrics = self._context.node.metrics
        metrics.requests[PRODUCE].observe(time.perf_counter() - self._started)
        failed = [row.code for _, rows in self.topics for row in rows if row.code]
        if failed:
            metrics.count_errors(failed)
        if self.acks != 0:
            self._slot.fill([write_response(self._header, self.topics)])
            return
        if failed:
            # A client that asked for no answer learns of an error only by losing its connection.
            self._context.connection.closes_after_reply = True
        self._slot.fill([])


def produce(context: Context, frame: bytearray, header: Header, slot: Slot) -> None:
    """Append the batches of a request; the slot is filled when they are durable."""
    Request(context, frame, header, slot).append()


def read_request(source: Source, version: int) -> tuple[str | None, int, int, Topics]:
    """Read (transactional id, acks, timeout, topics); the batches are views of the source's buffer."""
    is_flexible = version >= FLEXIBLE_FROM
    if is_flexible:
        source.skip_tags()
    length = source.string_length(is_flexible)
    transactional_id = source.string(length) if length >= 0 else None
    acks, timeout_ms = source.int16(), source.int32()
    topics: Topics = []
    for _ in range(source.array_length(is_flexible, 3)):
        name = source.string(source.string_length(is_flexible))
        rows = [_read_row(source, is_flexible) for _ in range(source.array_length(is_flexible, 5))]
        topics.append((name, rows))
        if is_flexible:
            source.skip_tags()
    return transactional_id, acks, timeout_ms, topics


def _read_row(source: Source, is_flexible: bool) -> Row:
    index = source.int32()
    length = source.bytes_length(is_flexible)
    batch = None
    if length >= 0:
        position = source.advance(length)
        view = source.buffer[position : position + length]
        assert isinstance(view, memoryview)
        batch = view
    if is_flexible:
        source.skip_tags()
    return Row(index, batch)


def _check(batch: memoryview | None) -> None:
    """Refuse what a plain producer never sends; everything else about the batch is checked by the log."""
    if batch is None or len(batch) < HEADER_BYTES:
        raise CorruptBatch("The request holds no record batch.")
    attributes = batch[_ATTRIBUTES_AT]
    if attributes & _TRANSACTIONAL:
        raise TransactionsUnsupported("Transactions are not offered.", "Produce without a transactional id.")
    if attributes & _CONTROL:
        raise InvalidRecord("A client may not write control records.")


def write_response(header: Header, topics: Sequence[tuple[str, list[Row]]]) -> Buffer:
    """Write the whole response frame."""
    version = header.version
    is_flexible = version >= FLEXIBLE_FROM
    out = bytearray(9 if is_flexible else 8)
    _write_length(out, len(topics), is_flexible)
    for name, rows in topics:
        encoded = name.encode()
        if is_flexible:
            write_uvarint(out, len(encoded) + 1)
        else:
            out += struct.pack(">h", len(encoded))
        out += encoded
        _write_length(out, len(rows), is_flexible)
        for row in rows:
            _write_row(out, row, version)
        if is_flexible:
            out.append(0)
    out += bytes(5 if is_flexible else 4)  # The throttle time, and no tags.
    struct.pack_into(">ii", out, 0, len(out) - 4, header.correlation_id)
    return out


def _write_row(out: bytearray, row: Row, version: int) -> None:
    if version >= 5:
        out += _ROW_WITH_START.pack(row.index, row.code, row.base_offset, row.append_time_ms, row.log_start)
    else:
        out += _ROW.pack(row.index, row.code, row.base_offset, row.append_time_ms)
    if version < 8:
        return
    message = None if row.message is None else row.message[:300].encode()
    if version < FLEXIBLE_FROM:
        out += struct.pack(">ih", 0, -1 if message is None else len(message))
        out += message or b""
        return
    out.append(1)  # No errors of single records.
    write_uvarint(out, 0 if message is None else len(message) + 1)
    out += message or b""
    _write_tags(out, row)


def _write_tags(out: bytearray, row: Row) -> None:
    if row.code:
        out.append(0)
        return
    out.append(1)
    write_uvarint(out, DURABILITY_TAG)
    out += bytes((1, row.durability))


def _write_length(out: bytearray, length: int, is_flexible: bool) -> None:
    if is_flexible:
        write_uvarint(out, length + 1)
    else:
        out += struct.pack(">i", length)
