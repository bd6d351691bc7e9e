"""Digests over ranges of a log, to prove that two replicas hold the same without sending it.

A digest is over base offset, epoch, length and CRC of each batch, in order; the CRC stands for the records. So it does
not depend on how the batches are spread over segments. Compaction runs on each replica by itself: below the point it
may have reached, replicas that agree need not hold the same batches, and a digest says nothing.

A range takes the batches that begin in it. Whoever asks does not know where batches begin; and so each batch is in
exactly one of the ranges that lie side by side.

A leader reads every batch once more for each follower, so there is a quick way, which makes no object per header and
gives up at the first that does not fit, and a careful one for whatever that is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import Final, NamedTuple

from walstream.errors import CorruptLog
from walstream.log.batch import HEADER_BYTES, MAGIC, OFFSET_MAX, PREFIX_BYTES
from walstream.log.finding import SCAN_BYTES
from walstream.log.segment import Segment

DIGEST_BYTES: Final = 16
_FIELDS: Final = Struct(">qiiI")
_HEADER: Final = Struct(">qiibI2xi")
"""Base offset, length after the prefix, leader epoch, magic, CRC, last offset delta."""


class Digest(NamedTuple):
    """What a range of the log comes to."""

    valid_from: int
    """Above the range's start where the log was compacted, trimmed or is damaged: then `value` is void."""
    value: bytes


def digest(segments: Sequence[Segment], start: int, end: int, valid_from: int) -> Digest:
    """Return the digest of the batches that begin in [start, end), if it is whole from `valid_from` on. Blocks.

    Everything below `end` is durable, and so is the batch that holds it.
    """
    if valid_from > start:
        return Digest(valid_from, b"")
    try:
        value = _quick(segments, start, end)
        value = _careful(segments, start, end) if value is None else value
    except (CorruptLog, FileNotFoundError):
        value = None
    return Digest(end, b"") if value is None else Digest(start, value)


def _quick(segments: Sequence[Segment], start: int, end: int) -> bytes | None:
    """Return the digest if one segment holds the range and every header fits, also that of the batch after it.

    It is looked at because a length or a last offset that has rotted shows only in what follows it. Where nothing does,
    the last batch has to end where the range and the segment do.
    """
    number = bisect_right(segments, start, key=lambda segment: segment.base_offset) - 1
    if number < 0:
        return None
    segment = segments[number]
    file, limit = segment.file, segment.durable_size
    position, known = segment.index.row_for_offset(start)
    expected = segment.base_offset if known is None else known
    fields: list[bytes] = []
    chunk, at = b"", 0
    while position < limit:
        if len(chunk) - at < HEADER_BYTES:
            chunk, at = file.pread(min(SCAN_BYTES, limit - position), position), 0
            if len(chunk) < HEADER_BYTES:
                return None
        base_offset, length, epoch, magic, crc, last_offset_delta = _HEADER.unpack_from(chunk, at)
        length += PREFIX_BYTES
        if base_offset != expected or magic != MAGIC or length < HEADER_BYTES or last_offset_delta < 0:
            return None
        if base_offset >= end:
            break
        if base_offset >= start:
            fields.append(_FIELDS.pack(base_offset, epoch, length, crc))
        expected += last_offset_delta + 1
        position += length
        at += length
    else:
        if (position, expected) != (limit, end):
            return None
    return blake2b(b"".join(fields), digest_size=DIGEST_BYTES).digest()


def _careful(segments: Sequence[Segment], start: int, end: int) -> bytes | None:
    """Return the digest of a range in any number of segments; None if it is not whole. Raises CorruptLog."""
    state = blake2b(digest_size=DIGEST_BYTES)
    expected = start
    for segment, until in zip(segments, [*(later.base_offset for later in segments[1:]), OFFSET_MAX], strict=True):
        if expected >= end:
            break
        if until <= expected or segment.durable_size == 0:
            continue
        position = segment.index.position_for_offset(expected)
        for _, header in segment.headers(position, segment.durable_size, strict=True):
            if header.last_offset < expected:
                continue
            if header.next_offset > until:
                return None  # No header comes after it in its segment that would have told.
            if header.base_offset != expected and not header.base_offset < start == expected:
                return None  # A gap.
            if header.base_offset >= start:
                state.update(_FIELDS.pack(header.base_offset, header.leader_epoch, header.length, header.crc))
            expected = header.next_offset
            if expected >= end:
                break
    return state.digest() if expected >= end else None
