"""The replication sub-protocol inside copy-both: what frames the decoder's output, and the answers to it.

Owns the three frames that walstream needs, timeline histories and PostgreSQL's clock; refuses to know what a frame
carries (pgoutput.py) and how it travels (stream.py). Clocks are microseconds since 1970 outside of here. Sans-IO.

    w  XLogData    start LSN (8)  server's WAL end (8)  server's clock (8)  the message
    k  keepalive   server's WAL end (8)  server's clock (8)  1 = answer at once
    r  status      written LSN (8)  flushed LSN (8)  applied LSN (8)  our clock (8)  1 = answer at once
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from walstream.errors import DecodeError, UsageError
from walstream.positions import Lsn

XLOG_DATA: Final = b"w"
KEEPALIVE: Final = b"k"
STATUS_UPDATE: Final = b"r"

XLOG_DATA_KIND: Final = XLOG_DATA[0]
KEEPALIVE_KIND: Final = KEEPALIVE[0]

XLOG_DATA_HEADER_BYTES: Final = 25
"""The message of an XLogData frame begins here: pass it to the decoder as the position, without a copy."""

KEEPALIVE_BYTES: Final = 18

POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01 00:00 UTC, where PostgreSQL's clock begins, in microseconds since 1970."""

_XLOG_DATA = struct.Struct(">cQQq")
_KEEPALIVE = struct.Struct(">cQqB")
_STATUS_UPDATE = struct.Struct(">cQQQqB")
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1


class XlogData(NamedTuple):
    """The header of an XLogData frame."""

    start: Lsn
    wal_end: Lsn
    server_time_us: int


class Keepalive(NamedTuple):
    """The server's sign of life: how far its WAL reaches, and whether it waits for an answer."""

    wal_end: Lsn
    server_time_us: int
    reply_requested: bool


def unix_us(postgres_us: int) -> int:
    """Turn PostgreSQL's microseconds since 2000 into microseconds since 1970."""
    return postgres_us + POSTGRES_EPOCH_US


def postgres_us(unix_us: int) -> int:
    """Turn microseconds since 1970 into PostgreSQL's microseconds since 2000."""
    return unix_us - POSTGRES_EPOCH_US


def parse_xlog_data(data: bytes) -> XlogData:
    """Read the header of an XLogData frame. Raises DecodeError."""
    if len(data) < XLOG_DATA_HEADER_BYTES or data[0] != XLOG_DATA_KIND:
        raise DecodeError(f"A frame of {len(data)} bytes is no XLogData.", data=bytes(data))
    _, start, wal_end, clock = _XLOG_DATA.unpack_from(data)
    return XlogData(Lsn(start), Lsn(wal_end), unix_us(clock))


def parse_keepalive(data: bytes) -> Keepalive:
    """Read a keepalive frame. Raises DecodeError."""
    if len(data) != KEEPALIVE_BYTES or data[0] != KEEPALIVE_KIND:
        raise DecodeError(f"A frame of {len(data)} bytes is no keepalive.", data=bytes(data))
    _, wal_end, clock, reply = _KEEPALIVE.unpack(data)
    return Keepalive(Lsn(wal_end), unix_us(clock), reply != 0)


def status_update(written: int, flushed: int, applied: int, now_us: int, reply: bool = False) -> bytes:
    """Make the frame that tells the server how far we are; only `flushed` lets it forget."""
    assert flushed <= written, "durable beyond what was received"
    clock = min(max(postgres_us(now_us), _INT64_MIN), _INT64_MAX)
    return _STATUS_UPDATE.pack(STATUS_UPDATE, written, flushed, applied, clock, reply)


class TimelineSwitch(NamedTuple):
    """Where a timeline ended because a standby was promoted."""

    timeline: int
    switch_lsn: Lsn
    reason: str


def parse_timeline_history(content: bytes) -> list[TimelineSwitch]:
    """Read a timeline history file: the ancestors of a timeline, oldest first. Raises DecodeError.

    A line is `timeline <tab> switch LSN <tab> reason`; empty lines and those that begin with # say nothing.
    """
    found = []
    for line in content.decode("utf-8", "replace").splitlines():
        words = line.split(maxsplit=2)
        if not words or words[0].startswith("#"):
            continue
        try:
            found.append(TimelineSwitch(int(words[0]), Lsn.parse(words[1]), words[2] if len(words) > 2 else ""))
        except (ValueError, IndexError, UsageError):
            raise DecodeError(f"{line!r} is no line of a timeline history.", data=content) from None
    return found
