"""pgoutput, protocol versions 1 to 4: the messages of PostgreSQL's logical decoding.

Owns their byte formats; refuses to know where they come from and what becomes of them. Everything but rows is decoded
into the tuples of messages.py. Rows (I, U, D) stay bytes on the fast path, which is generated per relation from what
`Relation` says; `decode_row` is the plain reading of them, for slow paths and as the reference of the fast one.

    B begin   C commit   O origin   R relation   Y type   I insert   U update   D delete   T truncate   M message
    S stream start   E stream stop   c stream commit   A stream abort                                    (version 2)
    b begin prepare   P prepare   K commit prepared   r rollback prepared   p stream prepare             (version 3)

Between stream start and stream stop, the messages R Y I U D T M carry the transaction id (4 bytes) after their kind,
that of the subtransaction which made the change. Stream abort has the abort's LSN and time in version 4 under
`streaming 'parallel'` alone.

Whatever the bytes, the only exception is DecodeError, which carries them. Sans-IO.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from walstream.errors import DecodeError
from walstream.positions import Lsn
from walstream.postgres.messages import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    Row,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Unchanged,
    Value,
)
from walstream.postgres.protocol import POSTGRES_EPOCH_US, unix_us

__all__ = [
    "ROW_KINDS",
    "STREAMED_KINDS",
    "UNCHANGED",
    "Begin",
    "BeginPrepare",
    "Commit",
    "CommitPrepared",
    "LogicalMessage",
    "Message",
    "Origin",
    "Prepare",
    "Relation",
    "RelationColumn",
    "RollbackPrepared",
    "Row",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Truncate",
    "Type",
    "Unchanged",
    "Value",
    "decode",
    "decode_row",
    "row_relation",
    "row_xid",
]

ROW_KINDS: Final = b"IUD"
STREAMED_KINDS: Final = b"RYIUDTM"
"""The kinds that carry a transaction id inside of a stream."""

KEY_FLAG: Final = 1
TRUNCATE_CASCADE: Final = 1
TRUNCATE_RESTART_IDENTITY: Final = 2
MESSAGE_TRANSACTIONAL: Final = 1

_QUOTE_BYTES_MAX: Final = 64


def decode(data: bytes, position: int = 0, *, in_stream: bool = False) -> Message:
    """Decode the message that begins at `position` and ends with `data`; rows are refused. Raises DecodeError."""
    if position >= len(data):
        raise DecodeError("A message without bytes.", data=bytes(data))
    size = len(data) - position - 1
    if data[position] == _BEGIN_KIND and size == _BEGIN.size:
        # These two come with every transaction; what is too short or too long is told below.
        commit_lsn, clock, xid = _BEGIN.unpack_from(data, position + 1)
        return Begin(Lsn(commit_lsn), clock + POSTGRES_EPOCH_US, xid)
    if data[position] == _COMMIT_KIND and size == _COMMIT.size:
        commit_lsn, end_lsn, clock = _COMMIT.unpack_from(data, position + 1)
        return Commit(Lsn(commit_lsn), Lsn(end_lsn), clock + POSTGRES_EPOCH_US)
    reader = _DECODERS.get(data[position])
    if reader is None:
        what = "rows are for decode_row" if data[position] in ROW_KINDS else "no kind that pgoutput has"
        raise DecodeError(f"Kind {data[position : position + 1]!r}: {what}.", data=bytes(data))
    try:
        scan = _Scan(data, position + 1)
        stream_xid = scan.uint32() if in_stream and data[position] in STREAMED_KINDS else None
        message = reader(scan, stream_xid)
    except (struct.error, ValueError, IndexError) as error:
        raise _unreadable(data, position, str(error)) from None
    if scan.position != len(data):
        raise _unreadable(data, position, f"{len(data) - scan.position} bytes are left over")
    return message


def row_relation(data: bytes, position: int = 0, *, in_stream: bool = False) -> int:
    """Return the relation id of a row message without decoding it. Raises DecodeError."""
    start = position + (5 if in_stream else 1)
    if len(data) < start + 4 or data[position] not in ROW_KINDS:
        raise _unreadable(data, position, "it is no row")
    return int.from_bytes(data[start : start + 4])


def row_xid(data: bytes, position: int = 0) -> int:
    """Return the (sub)transaction id of a row message inside of a stream. Raises DecodeError."""
    if len(data) < position + 9 or data[position] not in ROW_KINDS:
        raise _unreadable(data, position, "it is no row of a stream")
    return int.from_bytes(data[position + 1 : position + 5])


def decode_row(data: bytes, position: int = 0, *, in_stream: bool = False) -> Row:
    """Decode an insert, update or delete column by column. Raises DecodeError."""
    try:
        scan = _Scan(data, position)
        kind = scan.letter("IUD")
        xid = scan.uint32() if in_stream else None
        relation_id = scan.uint32()
        old_kind: str | None = None
        old = new = None
        part = scan.letter({"I": "N", "U": "KON", "D": "KO"}[kind])
        if part != "N":
            old_kind, old = part, scan.columns()
        if kind != "D":
            if old_kind is not None:
                scan.letter("N")
            new = scan.columns()
    except (struct.error, ValueError, IndexError) as error:
        raise _unreadable(data, position, str(error)) from None
    if scan.position != len(data):
        raise _unreadable(data, position, f"{len(data) - scan.position} bytes are left over")
    return Row(kind, xid, relation_id, old_kind, old, new)


def _unreadable(data: bytes, position: int, why: str) -> DecodeError:
    shown = bytes(data[position : position + _QUOTE_BYTES_MAX])
    more = "…" if len(data) - position > _QUOTE_BYTES_MAX else ""
    return DecodeError(
        f"A pgoutput message cannot be decoded: {why}. It begins with {shown!r}{more}.", data=bytes(data)
    )


class _Scan:
    """A cursor over one message. Running over the end raises struct.error, IndexError or ValueError."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position

    def uint8(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def uint16(self) -> int:
        self.position += 2
        return int(_UINT16.unpack_from(self.data, self.position - 2)[0])

    def uint32(self) -> int:
        self.position += 4
        return int(_UINT32.unpack_from(self.data, self.position - 4)[0])

    def int32(self) -> int:
        self.position += 4
        return int(_INT32.unpack_from(self.data, self.position - 4)[0])

    def lsn(self) -> Lsn:
        self.position += 8
        return Lsn(_UINT64.unpack_from(self.data, self.position - 8)[0])

    def time_us(self) -> int:
        self.position += 8
        return unix_us(_INT64.unpack_from(self.data, self.position - 8)[0])

    def letter(self, allowed: str) -> str:
        found = chr(self.uint8())
        if found not in allowed:
            raise ValueError(f"{found!r} stands where one of {allowed} should")
        return found

    def text(self) -> str:
        end = self.data.find(0, self.position)
        if end < 0:
            raise ValueError("a text has no end")
        found = self.data[self.position : end].decode()
        self.position = end + 1
        return found

    def take(self, size: int) -> bytes:
        end = self.position + size
        if size < 0 or end > len(self.data):
            raise ValueError(f"it says {size} bytes where {len(self.data) - self.position} are left")
        found = bytes(self.data[self.position : end])
        self.position = end
        return found

    def columns(self) -> tuple[Value, ...]:
        return tuple(self._column() for _ in range(self.uint16()))

    def _column(self) -> Value:
        kind = self.letter("tnu")
        if kind == "t":
            return self.take(self.int32())
        return None if kind == "n" else UNCHANGED


_UINT16 = struct.Struct(">H")
_UINT32 = struct.Struct(">I")
_INT32 = struct.Struct(">i")
_UINT64 = struct.Struct(">Q")
_INT64 = struct.Struct(">q")
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">xQQq")
_BEGIN_KIND: Final = ord("B")
_COMMIT_KIND: Final = ord("C")


def _begin(scan: _Scan, _: int | None) -> Begin:
    return Begin(scan.lsn(), scan.time_us(), scan.uint32())


def _commit(scan: _Scan, _: int | None) -> Commit:
    scan.uint8()
    return Commit(scan.lsn(), scan.lsn(), scan.time_us())


def _origin(scan: _Scan, _: int | None) -> Origin:
    return Origin(scan.lsn(), scan.text())


def _relation(scan: _Scan, xid: int | None) -> Relation:
    oid, schema, table = scan.uint32(), scan.text(), scan.text()
    identity = scan.letter("dnfi")
    columns = tuple(_relation_column(scan) for _ in range(scan.uint16()))
    # An empty schema is how pgoutput writes pg_catalog.
    return Relation(xid, oid, schema or "pg_catalog", table, identity, columns)


def _relation_column(scan: _Scan) -> RelationColumn:
    is_key = scan.uint8() & KEY_FLAG != 0
    return RelationColumn(scan.text(), scan.uint32(), scan.int32(), is_key)


def _type(scan: _Scan, xid: int | None) -> Type:
    return Type(xid, scan.uint32(), scan.text() or "pg_catalog", scan.text())


def _truncate(scan: _Scan, xid: int | None) -> Truncate:
    count, options = scan.uint32(), scan.uint8()
    ids = scan.take(4 * count)
    relation_ids = struct.unpack(f">{count}I", ids)
    return Truncate(xid, relation_ids, options & TRUNCATE_CASCADE != 0, options & TRUNCATE_RESTART_IDENTITY != 0)


def _logical_message(scan: _Scan, xid: int | None) -> LogicalMessage:
    transactional = scan.uint8() & MESSAGE_TRANSACTIONAL != 0
    return LogicalMessage(xid, transactional, scan.lsn(), scan.text(), scan.take(scan.int32()))


def _stream_start(scan: _Scan, _: int | None) -> StreamStart:
    return StreamStart(scan.uint32(), scan.uint8() == 1)


def _stream_stop(_scan: _Scan, _: int | None) -> StreamStop:
    return StreamStop()


def _stream_commit(scan: _Scan, _: int | None) -> StreamCommit:
    xid = scan.uint32()
    scan.uint8()
    return StreamCommit(xid, scan.lsn(), scan.lsn(), scan.time_us())


def _stream_abort(scan: _Scan, _: int | None) -> StreamAbort:
    xid, subxid = scan.uint32(), scan.uint32()
    if scan.position == len(scan.data):
        return StreamAbort(xid, subxid, None, None)
    return StreamAbort(xid, subxid, scan.lsn(), scan.time_us())


def _begin_prepare(scan: _Scan, _: int | None) -> BeginPrepare:
    return BeginPrepare(scan.lsn(), scan.lsn(), scan.time_us(), scan.uint32(), scan.text())


def _prepare(scan: _Scan, _: int | None) -> Prepare:
    scan.uint8()
    return Prepare(scan.lsn(), scan.lsn(), scan.time_us(), scan.uint32(), scan.text())


def _commit_prepared(scan: _Scan, _: int | None) -> CommitPrepared:
    scan.uint8()
    return CommitPrepared(scan.lsn(), scan.lsn(), scan.time_us(), scan.uint32(), scan.text())


def _rollback_prepared(scan: _Scan, _: int | None) -> RollbackPrepared:
    scan.uint8()
    ends = scan.lsn(), scan.lsn()
    times = scan.time_us(), scan.time_us()
    return RollbackPrepared(*ends, *times, scan.uint32(), scan.text())


def _stream_prepare(scan: _Scan, _: int | None) -> StreamPrepare:
    scan.uint8()
    return StreamPrepare(scan.lsn(), scan.lsn(), scan.time_us(), scan.uint32(), scan.text())


_DECODERS: Final[dict[int, Callable[[_Scan, int | None], Message]]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("O"): _origin,
    ord("R"): _relation,
    ord("Y"): _type,
    ord("T"): _truncate,
    ord("M"): _logical_message,
    ord("S"): _stream_start,
    ord("E"): _stream_stop,
    ord("c"): _stream_commit,
    ord("A"): _stream_abort,
    ord("b"): _begin_prepare,
    ord("P"): _prepare,
    ord("K"): _commit_prepared,
    ord("r"): _rollback_prepared,
    ord("p"): _stream_prepare,
}
