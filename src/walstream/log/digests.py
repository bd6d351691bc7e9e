"""Digests over ranges of a log, to prove that two replicas hold the same without sending it.

A digest is over base offset, epoch, length and CRC of each batch, in order; the CRC stands for the records. So it does
not depend on how the batches are spread over segments. Compaction runs on each replica by itself: below the point it
may have reached, replicas that agree need not hold the same batches, and a digest says nothing.

A range takes the batches that begin in it. Whoever asks does not know where batches begin; and so each batch is in
exactly one of the ranges that lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from walstream.errors import CorruptLog
from walstream.log.batch import OFFSET_MAX
from walstream.log.segment import Segment

DIGEST_BYTES = 16
_FIELDS = Struct(">qiiI")


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
    state = blake2b(digest_size=DIGEST_BYTES)
    expected = start
    try:
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
                    return Digest(end, b"")  # No header comes after it in its segment that would have told.
                if header.base_offset != expected and not header.base_offset < start == expected:
                    return Digest(end, b"")  # A gap.
                if header.base_offset >= start:
                    state.update(_FIELDS.pack(header.base_offset, header.leader_epoch, header.length, header.crc))
                expected = header.next_offset
                if expected >= end:
                    break
    except (CorruptLog, FileNotFoundError):
        return Digest(end, b"")
    return Digest(start, state.digest()) if expected >= end else Digest(end, b"")
