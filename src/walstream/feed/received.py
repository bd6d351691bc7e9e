"""What a subscriber receives, in types: entries, batches, heartbeats.

Owns the reading of responses and the proof that they are whole: every checksum is computed again and every LSN is above
the one before. Refuses to know where responses come from. Sans-IO.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

import crc32c

from walstream.errors import EntryDamaged, OperationUnknown, UsageError
from walstream.feed import wal_pb2
from walstream.feed.service.batching import decompress
from walstream.feed.service.resume import position_of
from walstream.positions import GlobalLsn, Lsn


class Op(StrEnum):
    """What happened."""

    PUT = "put"
    DELETE = "delete"
    BATCH = "batch"
    """A transaction, or a part of one; `Entry.transaction` has what it holds."""
    TRUNCATE = "truncate"


_OPS: Final = {
    wal_pb2.OP_PUT: Op.PUT,
    wal_pb2.OP_DELETE: Op.DELETE,
    wal_pb2.OP_BATCH: Op.BATCH,
    wal_pb2.OP_TRUNCATE: Op.TRUNCATE,
}


class Entry(NamedTuple):
    """One change."""

    lsn: GlobalLsn
    op: Op
    tenant: str
    """Empty: belongs to no tenant."""
    topic: str
    key: bytes
    value: bytes | None
    """None: deleted, and nothing is known of what there was."""
    committed_at_ms: int
    partition: int
    offset: int
    commit_lsn: Lsn
    """PostgreSQL's, of the transaction; 0 for what was not captured."""
    seq: int
    txid: int
    key_prefix: str
    headers: tuple[tuple[str, bytes], ...]

    @property
    def transaction(self) -> Transaction:
        """What an entry with the operation BATCH holds."""
        assert self.op is Op.BATCH, self.op
        return _transaction(self.value or b"")


class Transaction(NamedTuple):
    """The changes of a transaction in commit order, or a part of them."""

    entries: tuple[Entry, ...]
    commit_lsn: Lsn
    txid: int
    commit_time_ms: int
    part: int
    """From 0, when it is too large for one entry."""
    is_last: bool
    """Whether it is whole with this part."""
    snapshot: str
    """The id of a table's snapshot, whose rows these are; empty for a transaction."""


class Batch(NamedTuple):
    """Entries that came together."""

    entries: tuple[Entry, ...]
    resume: GlobalLsn
    """Where to resume behind them."""
    resume_token: bytes


class Heartbeat(NamedTuple):
    """Nothing new, and how far that is."""

    head: GlobalLsn
    resolved: GlobalLsn
    """Everything up to here has been sent; 0: that is not known."""
    held_back_by: str


class Watermark(NamedTuple):
    """Everything up to here is acknowledged by all active subscribers."""

    lsn: GlobalLsn


class Positions(NamedTuple):
    """Where the log begins and ends; an LSN of 0 stands for none."""

    head: GlobalLsn
    oldest: GlobalLsn
    resolved: GlobalLsn
    watermark: GlobalLsn


class Receiver:
    """Reads responses, and holds each against the ones before."""

    def __init__(self, start: int = 0) -> None:
        self.resume = start
        """Everything below has come."""

    def read(self, data: bytes) -> Batch | Heartbeat | Watermark | None:
        """Return what a response says; None when it says nothing that is known here.

        Raises EntryDamaged, OperationUnknown; then it has taken in nothing of the response.
        """
        response = wal_pb2.WalResponse.FromString(data)
        match response.WhichOneof("payload"):
            case "batch":
                return self._batch(response.batch)
            case "heartbeat":
                beat = response.heartbeat
                found = Heartbeat(parse(beat.current_lsn), parse(beat.resolved_lsn), beat.held_back_by)
                self.resume = max(self.resume, found.resolved + 1 if found.resolved else 0)
                return found
            case "watermark":
                return Watermark(parse(response.watermark.watermark_lsn))
        return None

    def _batch(self, batch: wal_pb2.WalBatch) -> Batch:
        if batch.compression:
            batch_inside = wal_pb2.WalBatch.FromString(decompress(batch.compression, batch.compressed))
            messages = batch_inside.entries
        else:
            messages = batch.entries
        floor, entries = self.resume - 1, []
        for message in messages:
            entry = read_entry(message)
            if entry.lsn <= floor:
                raise EntryDamaged(
                    f"The entry at {entry.lsn} came when everything up to {GlobalLsn(max(floor, 0))} had come.",
                    "Resume behind the last entry that was processed.",
                )
            floor = entry.lsn
            entries.append(entry)
        resume = position_of(batch.resume_token) if batch.resume_token else floor + 1
        self.resume = max(resume, floor + 1)
        return Batch(tuple(entries), GlobalLsn(self.resume), batch.resume_token)


def read_entry(message: wal_pb2.WalEntry) -> Entry:
    """Return an entry whose checksum is right. Raises EntryDamaged, OperationUnknown."""
    key, value, op = message.key, message.value, _OPS.get(message.op_type)
    if op is None:
        raise OperationUnknown(
            f"The entry at {message.lsn} has the operation {message.op_type}, which this client does not know.",
            f"The feed is newer: update walstream here, and resume at {message.lsn}.",
        )
    if crc32c.crc32c(value, crc32c.crc32c(key)).to_bytes(4, "big") != message.checksum:
        raise EntryDamaged(
            f"The checksum of the entry at {message.lsn} is wrong.", "Resume behind the last entry that was processed."
        )
    return Entry(
        parse(message.lsn),
        op,
        message.tenant_id,
        message.topic,
        key,
        None if not value and op in (Op.DELETE, Op.TRUNCATE) else value,
        message.committed_at_ms,
        message.partition,
        message.offset,
        Lsn(message.commit_lsn),
        message.seq,
        message.txid,
        message.key_prefix,
        tuple((header.name, header.value) for header in message.headers) if message.headers else (),
    )


def _transaction(value: bytes) -> Transaction:
    message = wal_pb2.BatchWrite.FromString(value)
    return Transaction(
        tuple(map(read_entry, message.entries)),
        Lsn(message.commit_lsn),
        message.txid,
        message.commit_time_ms,
        message.part,
        message.is_last,
        message.snapshot,
    )


def parse(text: str) -> GlobalLsn:
    """Return the LSN that a text is; 0 for none. Raises EntryDamaged."""
    if not text:
        return GlobalLsn(0)
    try:
        return GlobalLsn(int(text[:16], 16) << 64 | int(text[17:27]) << 32 | int(text[28:38]))
    except ValueError:
        raise EntryDamaged(f"{text[:60]!r} is not an LSN of the feed.") from None


def positions(message: wal_pb2.GetLSNResponse) -> Positions:
    """Return the answer of GetLSN."""
    return Positions(
        parse(message.head_lsn), parse(message.oldest_lsn), parse(message.resolved_lsn), parse(message.watermark_lsn)
    )


def position(start: GlobalLsn | str | bytes) -> int:
    """Return the LSN that a subscriber names as its start: itself, its text, or a resume token. Raises UsageError."""
    if isinstance(start, bytes):
        return position_of(start)
    if isinstance(start, str):
        return int(GlobalLsn.parse(start))
    if not isinstance(start, int):
        raise UsageError(f"{start!r} is no place to start from.", 'An LSN, a resume token, "oldest" or "head" is.')
    return int(start)
