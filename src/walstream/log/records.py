"""The records inside a batch: read and written one by one.

Owns the record format (zigzag varints, deltas against the batch header). Used where a record must be seen: compaction,
internal topics, the CLI, tests; never on the produce or fetch path of an ordinary topic. Sans-IO.

    length  attributes (1 byte, unused)  timestamp delta  offset delta  key length  key  value length  value
    header count  (key length  key  value length  value)…        every number a varint, length -1 for null

Wrong bytes raise CorruptBatch and nothing else, after work proportional to their number at most; a batch that claims
two thousand million records ends where its bytes do. `iter_records` keeps one record at a time: `read_records` of a
hostile batch may make a list of `bytes_max` / 7 of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from walstream.errors import CorruptBatch
from walstream.log.batch import (
    APPEND_TIME_BIT,
    HEADER_BYTES,
    MAGIC,
    NO_PRODUCER,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    Compression,
    assemble,
    parse_header,
)
from walstream.log.compression import DECOMPRESSED_BYTES_MAX, compress, decompress

Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]

RawRecord: TypeAlias = tuple[int, int, int, int, int, bytes | None, bytes | None, int]
"""(start, end, position of the offset delta, timestamp delta, offset delta, key, value, position of the headers)"""

_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_UINT64_MASK: Final = (1 << 64) - 1
_VARINT_SHIFT_MAX: Final = 63


class Record(NamedTuple):
    """One record as its reader sees it."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


def read_records(batch: Buffer, *, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> list[Record]:
    """Return every record of one whole batch. Raises CorruptBatch; the CRC is the caller's to check."""
    return list(iter_records(batch, bytes_max=bytes_max))


def iter_records(batch: Buffer, *, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> Iterator[Record]:
    """Yield the records of one whole batch. Raises CorruptBatch, perhaps after some records."""
    header = parse_header(batch)
    payload = read_payload(batch, header, bytes_max=bytes_max)
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    append_time_ms = header.max_timestamp if header.uses_append_time else None
    for _, end, _, timestamp_delta, offset_delta, key, value, headers_at in scan_records(payload, header):
        timestamp_ms = base_timestamp + timestamp_delta if append_time_ms is None else append_time_ms
        if payload[headers_at] == 0 and headers_at + 1 == end:
            yield Record(base_offset + offset_delta, timestamp_ms, key, value)
        else:
            headers = _read_headers(payload, headers_at, end)
            yield Record(base_offset + offset_delta, timestamp_ms, key, value, headers)


def read_payload(batch: Buffer, header: BatchHeader, *, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> bytes:
    """Return the bytes of the batch's records, decompressed. Raises CorruptBatch."""
    if header.length != len(batch):
        raise CorruptBatch(f"The batch says {header.length} bytes, {len(batch)} are there.")
    code = header.attributes & 7
    if code > Compression.ZSTD:
        raise CorruptBatch(f"The batch names compression {code}, which is not one of the known five.")
    return decompress(memoryview(batch)[HEADER_BYTES:], Compression(code), bytes_max)


def scan_records(payload: bytes, header: BatchHeader) -> Iterator[RawRecord]:
    """Yield where each record lies in the payload, its deltas, key and value; headers are left to whoever wants them.

    Offsets are checked to rise within the batch, timestamps to fit 64 bits. Raises CorruptBatch.
    """
    size, position, offset_delta_min = len(payload), 0, 0
    offset_delta_max, base_timestamp = header.last_offset_delta, header.base_timestamp
    timestamp_delta_min, timestamp_delta_max = _INT64_MIN - base_timestamp, _INT64_MAX - base_timestamp
    try:
        for _ in range(header.record_count):
            start = position
            # One-byte numbers, which most are, are read in line: a call for each would double the cost of a record.
            if (number := payload[position]) < 0x80:
                length, position = (number >> 1) ^ -(number & 1), position + 1
            else:
                length, position = read_varint(payload, position)
            end = position + length
            if length < 0 or end > size:
                raise CorruptBatch(f"A record at byte {start} of {size} says {length} bytes.")
            position += 1
            if (number := payload[position]) < 0x80:
                timestamp_delta, position = (number >> 1) ^ -(number & 1), position + 1
            else:
                timestamp_delta, position = read_varint(payload, position)
            body = position
            if (number := payload[position]) < 0x80:
                offset_delta, position = (number >> 1) ^ -(number & 1), position + 1
            else:
                offset_delta, position = read_varint(payload, position)
            key, position = _read_bytes(payload, position)
            value, position = _read_bytes(payload, position)
            if position >= end:
                raise CorruptBatch(f"The record at byte {start} runs over its own end.")
            if not offset_delta_min <= offset_delta <= offset_delta_max:
                raise CorruptBatch(f"Offset delta {offset_delta} is not in {offset_delta_min}..{offset_delta_max}.")
            if not timestamp_delta_min <= timestamp_delta <= timestamp_delta_max:
                raise CorruptBatch(f"Timestamp {base_timestamp} + {timestamp_delta} does not fit 64 bits.")
            offset_delta_min = offset_delta + 1
            yield start, end, body, timestamp_delta, offset_delta, key, value, position
            position = end
    except IndexError:
        raise CorruptBatch(f"The batch says {header.record_count} records, which its bytes do not hold.") from None
    if position != size:
        raise CorruptBatch(f"{size - position} bytes follow the last of {header.record_count} records.")


def read_varint(payload: bytes, position: int) -> tuple[int, int]:
    """Read a zigzag number of up to 64 bits; return it and the position after it. Raises IndexError at the end."""
    byte = payload[position]
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        if shift > _VARINT_SHIFT_MAX:
            raise CorruptBatch(f"The number at byte {position} has no end.")
        position += 1
        byte = payload[position]
        value |= (byte & 0x7F) << shift
        shift += 7
    value &= _UINT64_MASK
    return (value >> 1) ^ -(value & 1), position + 1


def _read_bytes(payload: bytes, position: int) -> tuple[bytes | None, int]:
    """Read a byte string with its length before it; -1 is null. A string cut short shows in the position returned."""
    if (number := payload[position]) < 0x80:
        length, position = (number >> 1) ^ -(number & 1), position + 1
    else:
        length, position = read_varint(payload, position)
    if length < 0:
        if length != -1:
            raise CorruptBatch(f"A key or value says {length} bytes.")
        return None, position
    return payload[position : position + length], position + length


def _read_headers(payload: bytes, position: int, end: int) -> Headers:
    """Read the headers that fill a record up to its end. A key that is not UTF-8 is shown with replacements."""
    headers = []
    try:
        count, position = read_varint(payload, position)
        if not 0 <= count <= end - position:
            raise CorruptBatch(f"A record says {count} headers in {end - position} bytes.")
        for _ in range(count):
            key, position = _read_bytes(payload, position)
            if key is None or position >= end:
                raise CorruptBatch("A record header has no key, or runs over the end of its record.")
            value, position = _read_bytes(payload, position)
            headers.append((key.decode("utf-8", "replace"), value))
    except IndexError:
        raise CorruptBatch("The headers of a record run over the end of the batch.") from None
    if position != end:
        raise CorruptBatch(f"The headers of a record end at byte {position}, the record at {end}.")
    return tuple(headers)


def write_varint(value: int) -> bytes:
    """Encode a number of 64 bits as a zigzag varint."""
    number = (value << 1) ^ (value >> 63)
    if number < 0x80:
        return _ONE_BYTE[number]
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(0x80))
_NULL: Final = write_varint(-1)


def _write_record(record: Record, offset_delta: int, timestamp_delta: int) -> bytes:
    """Encode one record, its length first."""
    _, _, key, value, headers = record
    parts = [b"\x00", write_varint(timestamp_delta), write_varint(offset_delta)]
    parts += (_NULL,) if key is None else (write_varint(len(key)), key)
    parts += (_NULL,) if value is None else (write_varint(len(value)), value)
    parts.append(write_varint(len(headers)))
    for name, content in headers:
        encoded = name.encode()
        parts += (write_varint(len(encoded)), encoded)
        parts += (_NULL,) if content is None else (write_varint(len(content)), content)
    body = b"".join(parts)
    return write_varint(len(body)) + body


def write_shifted(payload: bytes, start: int, body: int, end: int, timestamp_delta: int) -> bytes:
    """Encode a scanned record again with another timestamp delta and everything else as it was. Raises CorruptBatch."""
    if not _INT64_MIN <= timestamp_delta <= _INT64_MAX:
        raise CorruptBatch(f"Timestamp delta {timestamp_delta} does not fit 64 bits.")
    _, attributes_at = read_varint(payload, start)
    encoded = payload[attributes_at : attributes_at + 1] + write_varint(timestamp_delta)
    return write_varint(len(encoded) + end - body) + encoded + payload[body:end]


def build_batch(
    records: Sequence[Record],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    compression: Compression = Compression.NONE,
    append_time_ms: int | None = None,
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
) -> bytearray:
    """Build one batch of records whose offsets rise from `base_offset` on; gaps are allowed, as compaction leaves them.

    With `append_time_ms` that is the timestamp of them all. The buffer is writable, so that a leader can stamp it.
    """
    assert records, "a batch holds at least one record"
    base_timestamp = records[0].timestamp_ms
    parts, next_offset, max_timestamp = [], base_offset, NO_TIMESTAMP
    for record in records:
        assert record.offset >= next_offset, (record.offset, next_offset)
        next_offset = record.offset + 1
        max_timestamp = max(max_timestamp, record.timestamp_ms)
        parts.append(_write_record(record, record.offset - base_offset, record.timestamp_ms - base_timestamp))
    header = BatchHeader(
        base_offset=base_offset,
        length=0,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=compression if append_time_ms is None else compression | APPEND_TIME_BIT,
        last_offset_delta=next_offset - 1 - base_offset,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp if append_time_ms is None else append_time_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(records),
    )
    return assemble(header, compress(b"".join(parts), compression))
