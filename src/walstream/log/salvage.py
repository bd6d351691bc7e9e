"""Finding the way again after damaged bytes: where does the next sound batch begin?

Pure. A batch counts as found only if its header is possible, its offsets are not below what is expected, and its CRC
matches, so a chance hit is one in four billion per candidate.
"""

from __future__ import annotations

from walstream.errors import CorruptBatch
from walstream.log.batch import HEADER_BYTES, MAGIC, MAGIC_POSITION, BatchHeader, check_crc, parse_header

_MAGIC_BYTE = bytes([MAGIC])
BATCH_BYTES_MAX = 2**30


def next_batch(data: bytes | bytearray, start: int, offset_min: int) -> tuple[int, BatchHeader] | None:
    """Return the first sound batch at or after `start` whose offsets are not below `offset_min`, if there is one."""
    magic_at = data.find(_MAGIC_BYTE, start + MAGIC_POSITION)
    while magic_at >= 0 and magic_at - MAGIC_POSITION + HEADER_BYTES <= len(data):
        position = magic_at - MAGIC_POSITION
        try:
            header = parse_header(data, position)
        except CorruptBatch:
            pass
        else:
            if (
                header.base_offset >= offset_min
                and header.length <= min(len(data) - position, BATCH_BYTES_MAX)
                and check_crc(data, position, header.length)
            ):
                return position, header
        magic_at = data.find(_MAGIC_BYTE, magic_at + 1)
    return None
