"""Finding the way again after damaged bytes: where does the next sound batch begin?

Pure. A batch counts as found only if its header is possible, its CRC matches and the caller takes it, so a chance hit
is one in four billion per candidate. A record's value may hold the bytes of a batch on purpose; such a batch is not
followed by another that continues it, so one that is, or that ends the data, is preferred.
"""

from __future__ import annotations

from collections.abc import Callable

from walstream.errors import CorruptBatch
from walstream.log.batch import HEADER_BYTES, MAGIC, MAGIC_POSITION, BatchHeader, check_crc, parse_header

_MAGIC_BYTE = bytes([MAGIC])
BATCH_BYTES_MAX = 2**30

Takes = Callable[[BatchHeader], bool]


def sound_at(data: bytes | bytearray | memoryview, position: int) -> BatchHeader | None:
    """Return the header of the batch at a position, if it is all there and its CRC matches."""
    try:
        header = parse_header(data, position)
    except CorruptBatch:
        return None
    if header.length > min(len(data) - position, BATCH_BYTES_MAX) or not check_crc(data, position, header.length):
        return None
    return header


def next_batch(data: bytes | bytearray, start: int, takes: Takes) -> tuple[int, BatchHeader] | None:
    """Return the first sound batch at or after `start` that the caller takes, if there is one."""
    first: tuple[int, BatchHeader] | None = None
    magic_at = data.find(_MAGIC_BYTE, start + MAGIC_POSITION)
    while magic_at >= 0 and magic_at - MAGIC_POSITION + HEADER_BYTES <= len(data):
        position = magic_at - MAGIC_POSITION
        header = sound_at(data, position)
        if header is not None and takes(header):
            if _is_borne_out(data, position, header):
                return position, header
            first = first or (position, header)
        magic_at = data.find(_MAGIC_BYTE, magic_at + 1)
    return first


def has_not_come(data: bytes, expected: int) -> bool:
    """Tell whether bytes that do not check, up to a sound batch, were left out of a write, rather than spoilt since.

    A power cut takes some pages of a write and leaves others. Those that a file grew by and that never came are zeros:
    where a batch must begin, no rot leaves a header of zeros. `data` begins where `expected` does. A length that has
    rotted leads anywhere, perhaps to zeros inside a record; then the batch checks without it.
    """
    if check_crc(data, 0, len(data)):
        return False
    position = 0
    while position + HEADER_BYTES <= len(data):
        if not any(data[position : position + HEADER_BYTES]):
            return True
        try:
            header = parse_header(data, position)
        except CorruptBatch:
            return False
        if header.base_offset != expected:
            return False
        position += header.length
        expected = header.next_offset
    return False


def _is_borne_out(data: bytes | bytearray, position: int, header: BatchHeader) -> bool:
    """Tell whether what comes after a batch speaks for it: nothing, or another that continues it."""
    following = position + header.length
    if following == len(data):
        return True
    after = sound_at(data, following)
    return after is not None and after.base_offset >= header.next_offset
