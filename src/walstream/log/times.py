"""Finding records by their time. Blocks: segments are read from the disk."""

from __future__ import annotations

from collections.abc import Sequence

from walstream.log.records import iter_records
from walstream.log.segment import Segment


def offset_for_time(segments: Sequence[Segment], timestamp_ms: int, start: int, end: int) -> tuple[int, int] | None:
    """Return (offset, timestamp) of the first record in [start, end) at or after a time."""
    for segment in segments:
        if segment.base_offset >= end:
            break
        if segment.index.max_timestamp < timestamp_ms:
            continue
        for position, header in segment.headers(segment.index.position_for_time(timestamp_ms), segment.durable_size):
            if header.base_offset >= end:
                return None
            if header.max_timestamp < timestamp_ms or header.last_offset < start:
                continue
            data = segment.file.pread(header.length, position)
            for record in iter_records(data):
                if record.timestamp_ms >= timestamp_ms and record.offset >= start:
                    return (record.offset, record.timestamp_ms) if record.offset < end else None
    return None


def max_timestamp(segments: Sequence[Segment], start: int, end: int) -> tuple[int, int] | None:
    """Return (offset, timestamp) of the record in [start, end) with the largest timestamp."""
    largest = max((segment.index.max_timestamp for segment in segments), default=-1)
    if largest < 0:
        return None
    found = offset_for_time(segments, largest, start, end)
    if found is not None:
        return found
    # The index speaks of a record that is trimmed, truncated, compacted or not visible yet: look at the rest.
    largest = max(
        (
            header.max_timestamp
            for segment in segments
            for _, header in segment.headers(0, segment.durable_size)
            if start <= header.base_offset < end and header.record_count
        ),
        default=-1,
    )
    return offset_for_time(segments, largest, start, end) if largest >= 0 else None
