"""What a subscriber is sent: WalResponses as bytes.

Owns how they are put together; refuses to know when they are sent. A batch is assembled around entries that are
encoded already, so no message object is made for it; what is rare is written by protobuf itself. Sans-IO.
"""

from __future__ import annotations

from walstream.feed import wal_pb2
from walstream.feed.reading.wire import lsn_text, varint
from walstream.feed.service.resume import TOKEN_BYTES
from walstream.positions import GlobalLsn

# A tag is the number of its field, shifted by three, and the kind of what follows: 2 for bytes, 0 for a number. The
# text of an LSN always has 38 bytes.
_RESPONSE_BATCH = b"\x0a"
_FIRST_LSN = b"\x12\x26"
_LAST_LSN = b"\x1a\x26"
_COMPRESSION = b"\x20"
_COMPRESSED = b"\x2a"
_RESUME_TOKEN = b"\x32" + bytes((TOKEN_BYTES,))


def batch_response(
    body: bytes, first: int, last: int, token: bytes, compression: int = 0, compressed: bytes = b""
) -> bytes:
    """Return a batch: of the entries in `body`, or of the compressed ones if there are any."""
    parts = [body]
    if compressed:
        parts = [_COMPRESSION, bytes((compression,)), _COMPRESSED, varint(len(compressed)), compressed]
    parts += (_FIRST_LSN, lsn_text(first), _LAST_LSN, lsn_text(last), _RESUME_TOKEN, token)
    size = sum(map(len, parts))
    return b"".join((_RESPONSE_BATCH, varint(size), *parts))


def heartbeat_response(head: int, resolved: int, held_back_by: str) -> bytes:
    """Return a heartbeat; without a resolved LSN when that is 0."""
    beat = wal_pb2.Heartbeat(current_lsn=str(GlobalLsn(head)), resolved_lsn=shown(resolved), held_back_by=held_back_by)
    return wal_pb2.WalResponse(heartbeat=beat).SerializeToString()


def watermark_response(watermark: int) -> bytes:
    """Return what says that the watermark has moved."""
    moved = wal_pb2.HeartbeatWatermark(watermark_lsn=shown(watermark))
    return wal_pb2.WalResponse(watermark=moved).SerializeToString()


def error_response(text: str) -> bytes:
    """Return the last response of a stream."""
    return wal_pb2.WalResponse(error=text).SerializeToString()


def shown(lsn: int) -> str:
    """Return an LSN as text; nothing for 0, which stands for none."""
    return str(GlobalLsn(lsn)) if lsn else ""


def skip_entry(body: bytes, at: int) -> int:
    """Return where the entry that begins here ends: behind its tag, its length and so many bytes."""
    at += 1
    size = shift = 0
    while True:
        byte = body[at]
        at += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return at + size
        shift += 7
