"""DATA and REPAIR_DATA: whole record batches behind a fixed head.

    DATA         header | topic id 16 | partition i32 | epoch i32 | session u32 | high watermark i64 | log start i64
                 | offset i64 | next offset i64 | position u64 | batches bytes u32 | CRC-32C u32 || batches
    REPAIR_DATA  header | topic id 16 | partition i32 | epoch i32 | session u32 | request u32 | start i64
                 | next offset i64 | batches bytes u32 | CRC-32C u32 || batches

`position` is the sum of the batches' bytes in all DATA of the link, this one included: credit is counted by it, so a
frame that never comes cannot leak any. The two lower bits of the flags say how the payload is compressed: 0 not, 1 an
lz4 block, 2 a zstd frame; `batches bytes` is the length without compression, and what credit is taken for. The third
bit of DATA says that compaction may have left gaps between these batches; it is set on links with the feature GAPS.

Encoding copies no batch: the result is the head and the batches' own buffers. `data_head` makes the head alone, for a
payload that the kernel sends from a file.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

import cramjam
from crc32c import crc32c

from walstream.errors import BadChecksum, FrameTooLarge, MalformedFrame
from walstream.log.batch import Buffer
from walstream.replication.messages import Data, RepairData
from walstream.replication.wire.credit import GrantedCredit
from walstream.replication.wire.frames import CRC, CRC_BYTES, HEADER_BYTES, KEY_BYTES, MAGIC, Keys, check
from walstream.replication.wire.inbox import Inbox

DATA: Final = 23
REPAIR_DATA: Final = 30

_DATA: Final = Struct(f">HBBI{KEY_BYTES}siIqqqqQI")
_DATA_SIZE: Final = _DATA.size
_DATA_FIELDS: Final = Struct(f">{KEY_BYTES}siIqqqqQII")
_REPAIR: Final = Struct(f">HBBI{KEY_BYTES}siIIqqI")
_REPAIR_FIELDS: Final = Struct(f">{KEY_BYTES}siIIqqI")

DATA_HEAD_BYTES: Final = _DATA.size + CRC_BYTES
REPAIR_HEAD_BYTES: Final = _REPAIR.size + CRC_BYTES
_DATA_REST: Final = DATA_HEAD_BYTES - HEADER_BYTES
_REPAIR_REST: Final = REPAIR_HEAD_BYTES - HEADER_BYTES

COMPRESS_BYTES_MIN: Final = 1024
"""Less than this gains nothing worth the time."""

_ZSTD_LEVEL: Final = 1


class PayloadCompression(IntEnum):
    """How the batches of a frame are compressed on their way, numbered as in the flags."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


NONE: Final = PayloadCompression.NONE
_GAPS_BIT: Final = 4


def data_head(
    message: Data, key: bytes, position: int, batches_bytes: int, payload_bytes: int, flags: int = 0
) -> bytes:
    """Return what goes before the payload of a DATA frame."""
    flags |= _GAPS_BIT if message.may_have_gaps else 0
    head = _DATA.pack(
        MAGIC,
        DATA,
        flags,
        _DATA_REST + payload_bytes,
        key,
        message.epoch,
        message.session,
        message.high_watermark,
        message.log_start,
        message.offset,
        message.next_offset,
        position,
        batches_bytes,
    )
    return head + CRC.pack(crc32c(head))


def encode_data(
    message: Data, key: bytes, position: int, batches_bytes: int, compression: PayloadCompression = NONE
) -> list[Buffer]:
    """Return a DATA frame as its head and its batches; `batches_bytes` is their length, which the caller knows."""
    if compression is NONE or batches_bytes < COMPRESS_BYTES_MIN:
        return [data_head(message, key, position, batches_bytes, batches_bytes), *message.batches]
    payload = compress(message.batches, batches_bytes, compression)
    if payload is None:
        return [data_head(message, key, position, batches_bytes, batches_bytes), *message.batches]
    return [data_head(message, key, position, batches_bytes, len(payload), compression), payload]


def encode_repair(message: RepairData, key: bytes, compression: PayloadCompression = NONE) -> list[Buffer]:
    """Return a REPAIR_DATA frame as its head and its batches."""
    batches_bytes = sum(map(len, message.batches))
    payload = None
    if compression is not NONE and batches_bytes >= COMPRESS_BYTES_MIN:
        payload = compress(message.batches, batches_bytes, compression)
    flags, payload_bytes = (compression, len(payload)) if payload is not None else (NONE, batches_bytes)
    head = _REPAIR.pack(
        MAGIC,
        REPAIR_DATA,
        flags,
        _REPAIR_REST + payload_bytes,
        key,
        message.epoch,
        message.session,
        message.request,
        message.start,
        message.next_offset,
        batches_bytes,
    )
    return [head + CRC.pack(crc32c(head)), *((payload,) if payload is not None else message.batches)]


def take_data(inbox: Inbox, flags: int, length: int, keys: Keys, credit: GrantedCredit) -> Data:
    """Take a DATA frame, and count it against the credit. Raises LinkError."""
    if length < _DATA_REST:
        raise MalformedFrame(f"A DATA frame announces {length} bytes; its head takes {_DATA_REST}.")
    view, start = inbox.view, inbox.start
    key, epoch, session, high_watermark, log_start, offset, next_offset, position, size, crc = _DATA_FIELDS.unpack_from(
        view, start + HEADER_BYTES
    )
    if crc32c(view[start : start + _DATA_SIZE]) != crc:
        raise BadChecksum("The head of a DATA frame fails its CRC-32C.")
    if epoch < 0 or high_watermark < 0 or log_start < 0 or not 0 <= offset <= next_offset:
        raise MalformedFrame(
            f"DATA of epoch {epoch} from {offset} to {next_offset}, high watermark {high_watermark}, log start "
            f"{log_start}, cannot be."
        )
    partition = keys.decode(key)
    may_have_gaps = bool(flags & _GAPS_BIT)
    flags &= ~_GAPS_BIT
    credit.arrived(position, size)
    payload = inbox.take(HEADER_BYTES + length, DATA_HEAD_BYTES)
    batches: tuple[Buffer, ...] = (payload,)
    if flags or size == 0 or length != _DATA_REST + size:
        batches = _batches(payload, flags, size)
    return Data(partition, epoch, session, high_watermark, log_start, offset, next_offset, batches, may_have_gaps)


def take_repair(inbox: Inbox, flags: int, length: int, keys: Keys, bytes_max: int) -> RepairData:
    """Take a REPAIR_DATA frame. Raises LinkError."""
    if length < _REPAIR_REST:
        raise MalformedFrame(f"A REPAIR_DATA frame announces {length} bytes; its head takes {_REPAIR_REST}.")
    view, begin = inbox.view, inbox.start
    check(view, begin, begin + _REPAIR.size)
    key, epoch, session, request, start, next_offset, size = _REPAIR_FIELDS.unpack_from(view, begin + HEADER_BYTES)
    if epoch < 0 or not 0 <= start <= next_offset:
        raise MalformedFrame(f"REPAIR_DATA of epoch {epoch} from {start} to {next_offset} cannot be.")
    payload = inbox.take(HEADER_BYTES + length, REPAIR_HEAD_BYTES)
    if size > bytes_max:
        raise FrameTooLarge(f"A frame says that its batches are {size} bytes; up to {bytes_max} are taken.")
    batches = _batches(payload, flags, size)
    return RepairData(keys.decode(key), epoch, session, request, start, next_offset, batches)


def compress(batches: tuple[Buffer, ...], batches_bytes: int, compression: PayloadCompression) -> bytes | None:
    """Return the batches compressed, or None when that does not make them smaller."""
    data = batches[0] if len(batches) == 1 else b"".join(batches)
    if compression is PayloadCompression.LZ4:
        payload = bytes(cramjam.lz4.compress_block(data, store_size=False))
    else:
        payload = bytes(cramjam.zstd.compress(data, _ZSTD_LEVEL))
    return payload if len(payload) < batches_bytes else None


def _batches(payload: memoryview, flags: int, size: int) -> tuple[Buffer, ...]:
    """Return the batches of a payload, expanded to exactly `size` bytes. Raises MalformedFrame."""
    if not flags:
        if len(payload) != size:
            raise MalformedFrame(f"A frame says that its batches are {size} bytes, and carries {len(payload)}.")
        return (payload,) if size else ()
    output = bytearray(size)
    try:
        if flags == PayloadCompression.LZ4:
            expanded = cramjam.lz4.decompress_block_into(payload, output)
        elif flags == PayloadCompression.ZSTD:
            expanded = cramjam.zstd.decompress_into(payload, output)
        else:
            raise MalformedFrame(f"A frame has flags {flags:#04x}, which it cannot have.")
    except cramjam.DecompressionError as error:
        raise MalformedFrame(f"The payload of a frame cannot be expanded: {error}.") from error
    if expanded != size:
        raise MalformedFrame(f"A frame says that its batches are {size} bytes, and expands to {expanded}.")
    return (memoryview(output),) if size else ()
