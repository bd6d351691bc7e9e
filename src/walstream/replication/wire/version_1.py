"""Protocol version 1, byte for byte: a leader dials, says who it is, and pushes record batches; nobody answers them.

Everything is big-endian; a String is a u16 length and UTF-8.

    leader → follower   HANDSHAKE      version u16 = 1 | node id u64 | mode u8 (0 async, 1 sync)
    follower → leader   HANDSHAKE_ACK  status u8 (0 OK, 1 ERROR) | last position u64 | error String
    leader → follower   WA frame       magic u16 = 0x5741 | version u16 = 1 | length u32 of metadata and data
                                       topic String | partition i32 | base offset i64 | record count u32
                                       | timestamp ms i64 | CRC-32 (IEEE) of data u32          (30 bytes and the topic)
                                       data: one Kafka record batch v2
    leader → follower   HEARTBEAT      magic u16 = 0x4842 | timestamp ms i64
    follower → leader   HEARTBEAT_ACK  timestamp ms i64, as it came

Versions after this one begin with the same eleven bytes, and are answered by the same acknowledgement. After the
handshake a follower has no words for an error in version 1: it closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final
from zlib import crc32

from walstream.errors import BadChecksum, BadMagic, FrameTooLarge, LinkVersionUnknown, MalformedFrame
from walstream.log.batch import Buffer
from walstream.replication.wire.fields import decode_utf8, string
from walstream.replication.wire.inbox import Inbox

VERSION: Final = 1
STATUS_OK: Final = 0
STATUS_ERROR: Final = 1
MODE_ASYNC: Final = 0
MODE_SYNC: Final = 1
FRAME_MAGIC: Final = 0x5741
"""`WA`."""
HEARTBEAT_MAGIC: Final = 0x4842
"""`HB`."""

HANDSHAKE_BYTES: Final = 11
METADATA_BYTES: Final = 30
"""The fixed part of a frame's metadata; the topic's bytes come on top."""

_HANDSHAKE: Final = Struct(">HQB")
_ACK: Final = Struct(">BQH")
_FRAME: Final = Struct(">HHI")
_TOPIC: Final = Struct(">H")
_PLACE: Final = Struct(">iqIqI")
_HEARTBEAT: Final = Struct(">Hq")
_ECHO: Final = Struct(">q")
_MAGIC: Final = Struct(">H")
assert _HANDSHAKE.size == HANDSHAKE_BYTES
assert _TOPIC.size + _PLACE.size == METADATA_BYTES

HEARTBEAT_BYTES: Final = _HEARTBEAT.size
ECHO_BYTES: Final = _ECHO.size


@dataclass(frozen=True, slots=True)
class Handshake:
    """The first words of a link, in every version."""

    version: int
    node_id: int
    mode: int = MODE_ASYNC

    def encode(self) -> bytes:
        """Return the eleven bytes."""
        return _HANDSHAKE.pack(self.version, self.node_id, self.mode)


@dataclass(frozen=True, slots=True)
class HandshakeAck:
    """The answer to them: whether the follower speaks that version, and if not, why."""

    status: int = STATUS_OK
    last_position: int = 0
    error: str = ""

    def encode(self) -> bytes:
        """Return the bytes."""
        return _ACK.pack(self.status, self.last_position, 0)[:-2] + string(self.error)


@dataclass(frozen=True, slots=True)
class PushedBatch:
    """A WA frame: one batch and what the leader says of it. `data` is a view that stays valid."""

    topic: str
    partition: int
    base_offset: int
    record_count: int
    timestamp_ms: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An HB frame, or its echo."""

    timestamp_ms: int


def take_handshake(inbox: Inbox) -> Handshake | None:
    """Take the eleven bytes, once they are there. Raises MalformedFrame."""
    if len(inbox) < HANDSHAKE_BYTES:
        return None
    version, node_id, mode = _HANDSHAKE.unpack(inbox.take(HANDSHAKE_BYTES))
    if mode not in (MODE_ASYNC, MODE_SYNC):
        raise MalformedFrame(f"Replication mode {mode} is neither 0 (async) nor 1 (sync).")
    return Handshake(version, node_id, mode)


def take_ack(inbox: Inbox) -> HandshakeAck | None:
    """Take the acknowledgement, once it is there. Raises MalformedFrame."""
    if len(inbox) < _ACK.size:
        return None
    status, last_position, length = _ACK.unpack_from(inbox.view, inbox.start)
    if status not in (STATUS_OK, STATUS_ERROR):
        raise MalformedFrame(f"Status {status} is neither 0 (OK) nor 1 (ERROR).", "This is no replication listener.")
    if len(inbox) < _ACK.size + length:
        inbox.need(_ACK.size + length)
        return None
    return HandshakeAck(status, last_position, decode_utf8(inbox.take(_ACK.size + length)[_ACK.size :], "error text"))


def encode_batch(
    topic: str, partition: int, base_offset: int, record_count: int, timestamp_ms: int, data: Buffer
) -> list[Buffer]:
    """Return a WA frame as what goes before the batch, and the batch itself."""
    name = topic.encode()
    length = METADATA_BYTES + len(name) + len(data)
    place = _PLACE.pack(partition, base_offset, record_count, timestamp_ms, crc32(data))
    return [_FRAME.pack(FRAME_MAGIC, VERSION, length) + _TOPIC.pack(len(name)) + name + place, data]


def encode_heartbeat(timestamp_ms: int) -> bytes:
    """Return an HB frame."""
    return _HEARTBEAT.pack(HEARTBEAT_MAGIC, timestamp_ms)


def encode_echo(timestamp_ms: int) -> bytes:
    """Return the answer to an HB frame."""
    return _ECHO.pack(timestamp_ms)


def take_pushed(inbox: Inbox, frame_bytes_max: int) -> PushedBatch | Heartbeat | None:
    """Take what a leader sent next, once it is whole. Raises LinkError, and then nothing more can be taken."""
    held = len(inbox)
    if held < _MAGIC.size:
        return None
    (magic,) = _MAGIC.unpack_from(inbox.view, inbox.start)
    if magic == HEARTBEAT_MAGIC:
        return Heartbeat(_HEARTBEAT.unpack(inbox.take(HEARTBEAT_BYTES))[1]) if held >= HEARTBEAT_BYTES else None
    if magic != FRAME_MAGIC:
        raise BadMagic(f"A frame begins with {magic:#06x}, which is neither 0x5741 (WA) nor 0x4842 (HB).")
    if held < _FRAME.size:
        return None
    _, version, length = _FRAME.unpack_from(inbox.view, inbox.start)
    if version != VERSION:
        raise LinkVersionUnknown(f"A frame of version {version} came on a link of version {VERSION}.")
    if length > frame_bytes_max:
        raise FrameTooLarge(f"A frame announces {length} bytes; up to {frame_bytes_max} are taken.")
    if length < METADATA_BYTES:
        raise MalformedFrame(f"A frame announces {length} bytes; its metadata alone take {METADATA_BYTES}.")
    if held < _FRAME.size + length:
        inbox.need(_FRAME.size + length)
        return None
    return _parse_batch(inbox.take(_FRAME.size + length)[_FRAME.size :])


def take_echo(inbox: Inbox) -> Heartbeat | None:
    """Take what a follower sent next: it has nothing to say but echoes."""
    return Heartbeat(*_ECHO.unpack(inbox.take(ECHO_BYTES))) if len(inbox) >= ECHO_BYTES else None


def _parse_batch(frame: memoryview) -> PushedBatch:
    (name_length,) = _TOPIC.unpack_from(frame)
    data_position = METADATA_BYTES + name_length
    if data_position > len(frame):
        raise MalformedFrame(f"A topic of {name_length} bytes does not fit into a frame of {len(frame)}.")
    topic = decode_utf8(frame[_TOPIC.size : _TOPIC.size + name_length], "topic")
    partition, base_offset, count, timestamp_ms, checksum = _PLACE.unpack_from(frame, _TOPIC.size + name_length)
    data = frame[data_position:]
    if crc32(data) != checksum:
        raise BadChecksum(f"The data of {topic}-{partition} at offset {base_offset} fail their CRC-32.")
    return PushedBatch(topic, partition, base_offset, count, timestamp_ms, data)
