"""PostgreSQL's half of pgoutput, in bytes: one function per message, and a model of the sender that uses them.

The messages are written from PostgreSQL's documentation, not with our decoder, so that both must be right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

TEXT_OID = 25
POSTGRES_EPOCH_US = 946_684_800_000_000


def begin(xid: int, commit_lsn: int, time_us: int = POSTGRES_EPOCH_US) -> bytes:
    return b"B" + struct.pack(">QqI", commit_lsn, time_us - POSTGRES_EPOCH_US, xid)


def commit(commit_lsn: int, end_lsn: int, time_us: int = POSTGRES_EPOCH_US) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, commit_lsn, end_lsn, time_us - POSTGRES_EPOCH_US)


def origin(name: str, lsn: int = 0) -> bytes:
    return b"O" + struct.pack(">Q", lsn) + text(name)


def relation(
    relation_id: int, table: str, columns: Iterable[str] = ("id",), *, schema: str = "public", xid: int = 0
) -> bytes:
    names = list(columns)
    described = [
        struct.pack(">B", number == 0) + text(name) + struct.pack(">Ii", TEXT_OID, -1)
        for number, name in enumerate(names)
    ]
    body = struct.pack(">I", relation_id) + text(schema) + text(table) + b"d" + struct.pack(">H", len(names))
    return b"R" + _xid(xid) + body + b"".join(described)


def type_(oid: int, name: str, *, schema: str = "public", xid: int = 0) -> bytes:
    return b"Y" + _xid(xid) + struct.pack(">I", oid) + text(schema) + text(name)


def insert(relation_id: int, *values: str | None, xid: int = 0) -> bytes:
    return b"I" + _xid(xid) + struct.pack(">I", relation_id) + b"N" + columns(values)


def update(relation_id: int, *values: str | None, old_key: tuple[str | None, ...] = (), xid: int = 0) -> bytes:
    old = b"K" + columns(old_key) if old_key else b""
    return b"U" + _xid(xid) + struct.pack(">I", relation_id) + old + b"N" + columns(values)


def delete(relation_id: int, *values: str | None, xid: int = 0) -> bytes:
    return b"D" + _xid(xid) + struct.pack(">I", relation_id) + b"K" + columns(values)


def truncate(*relation_ids: int, xid: int = 0) -> bytes:
    return b"T" + _xid(xid) + struct.pack(f">IB{len(relation_ids)}I", len(relation_ids), 0, *relation_ids)


def message(lsn: int, prefix: str, content: bytes, *, transactional: bool, xid: int = 0) -> bytes:
    return (
        b"M"
        + _xid(xid)
        + struct.pack(">BQ", transactional, lsn)
        + text(prefix)
        + struct.pack(">I", len(content))
        + content
    )


def stream_start(xid: int, *, first: bool) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


def stream_stop() -> bytes:
    return b"E"


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, time_us: int = POSTGRES_EPOCH_US) -> bytes:
    return b"c" + struct.pack(">IBQQq", xid, 0, commit_lsn, end_lsn, time_us - POSTGRES_EPOCH_US)


def stream_abort(xid: int, subxid: int) -> bytes:
    return b"A" + struct.pack(">II", xid, subxid)


def begin_prepare(xid: int, lsn: int) -> bytes:
    return b"b" + struct.pack(">QQqI", lsn, lsn + 8, 0, xid) + text("gid")


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def columns(values: Iterable[str | None]) -> bytes:
    written = [
        b"n" if value is None else b"t" + struct.pack(">I", len(value.encode())) + value.encode() for value in values
    ]
    return struct.pack(">H", len(written)) + b"".join(written)


def _xid(xid: int) -> bytes:
    return struct.pack(">I", xid) if xid else b""


RELATION_ID = 1000


class RunningTransaction:
    """A transaction with savepoints: what it did, what of that was sent, and what it took back."""

    def __init__(self, xid: int) -> None:
        self.xid = xid
        self.stack = [xid]
        self.children: dict[int, list[int]] = {xid: []}
        self.pending: list[tuple[int, int, str]] = []
        self.done: list[tuple[int, int, str]] = []
        self.streamed: set[int] = set()
        self.aborted: set[int] = set()

    @property
    def survivors(self) -> list[tuple[int, str]]:
        """Schema version and value of each row that is left."""
        return [(version, value) for subxid, version, value in self.done if subxid not in self.aborted]

    def family(self, subxid: int) -> list[int]:
        """The subtransaction and all below it, children first, as PostgreSQL aborts them."""
        return [below for child in self.children[subxid] for below in self.family(child)] + [subxid]


class Sender:
    """The walsender with pgoutput and `streaming on`: what it writes, and what it believes that we know.

    `schema_sent` and `streamed_in` are the fields of PostgreSQL's RelationSyncEntry; they follow maybe_send_schema,
    cleanup_rel_sync_cache and the invalidation of the entry when the table's schema was renamed.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.committed: list[tuple[int, list[tuple[int, str]]]] = []
        self.version = 1
        self.cached_version = 0
        self.schema_sent = False
        self.streamed_in: set[int] = set()
        self.lsn = 1000
        self._xid = 10
        self._value = 0

    def next_xid(self) -> int:
        self._xid += 1
        return self._xid

    def next_lsn(self) -> int:
        self.lsn += 16
        return self.lsn

    def run(self) -> RunningTransaction:
        return RunningTransaction(self.next_xid())

    def row(self, transaction: RunningTransaction) -> None:
        self._value += 1
        change = (transaction.stack[-1], self.version, f"value-{self._value}")
        transaction.pending.append(change)
        transaction.done.append(change)

    def savepoint(self, transaction: RunningTransaction) -> None:
        subxid = self.next_xid()
        transaction.children[transaction.stack[-1]].append(subxid)
        transaction.children[subxid] = []
        transaction.stack.append(subxid)

    def release(self, transaction: RunningTransaction) -> None:
        if len(transaction.stack) > 1:
            transaction.stack.pop()

    def roll_back(self, transaction: RunningTransaction) -> None:
        if len(transaction.stack) > 1:
            self._abort(transaction, transaction.stack.pop())

    def stream(self, transaction: RunningTransaction) -> None:
        """Send a piece: everything the transaction has done and not taken back since the last one."""
        if not transaction.pending:
            return
        self.sent.append(stream_start(transaction.xid, first=not transaction.streamed))
        for subxid, version, value in transaction.pending:
            self._describe(version, transaction.xid, subxid)
            self.sent.append(insert(RELATION_ID, value, xid=subxid))
            transaction.streamed.add(subxid)
        transaction.streamed.add(transaction.xid)
        transaction.pending = []
        self.sent.append(stream_stop())

    def commit(self, transaction: RunningTransaction) -> None:
        if transaction.streamed:
            self.stream(transaction)
            lsn = self.next_lsn()
            self.sent.append(stream_commit(transaction.xid, lsn, lsn + 8))
            if transaction.xid in self.streamed_in:
                self.schema_sent = True
                self.streamed_in.discard(transaction.xid)
        else:
            lsn = self.next_lsn()
            self.sent.append(begin(transaction.xid, lsn))
            for _, version, value in transaction.pending:
                self._describe(version, 0, 0)
                self.sent.append(insert(RELATION_ID, value))
            self.sent.append(commit(lsn, lsn + 8))
        if transaction.survivors:
            self.committed.append((transaction.xid, transaction.survivors))

    def abort(self, transaction: RunningTransaction) -> None:
        self._abort(transaction, transaction.xid)

    def emit(self) -> None:
        lsn = self.next_lsn()
        self.sent.append(message(lsn, "prefix", b"content", transactional=False))
        self.committed.append((0, [(0, "content")]))

    def _abort(self, transaction: RunningTransaction, subxid: int) -> None:
        for member in transaction.family(subxid):
            transaction.aborted.add(member)
            if member in transaction.streamed:
                self.sent.append(stream_abort(transaction.xid, member))
                self.streamed_in.discard(transaction.xid)
        transaction.pending = [change for change in transaction.pending if change[0] not in transaction.aborted]

    def _describe(self, version: int, xid: int, subxid: int) -> None:
        if version != self.cached_version:
            self.cached_version, self.schema_sent, self.streamed_in = version, False, set()
        if xid and xid not in self.streamed_in:
            self.streamed_in.add(xid)
        elif not xid and not self.schema_sent:
            self.schema_sent = True
        else:
            return
        self.sent.append(relation(RELATION_ID, "t", schema=f"version-{version}", xid=subxid))
