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
    """Return (offset, timestamp) of the first record in [start, end) with the largest timestamp."""
    largest = max((segment.index.max_timestamp for segment in segments), default=-1)
    if largest < 0:
        return None
    found = offset_for_time(segments, largest, start, end)
    if found is not None:
        return found
    # That record was trimmed, truncated or compacted away, or is not visible yet. An index and a header only say how
    # late a record can be, so batches are read from the latest on, until no other can have a later one.
    best = (-1, 0)  # Timestamp and negative offset: of equal timestamps the first record counts.
    for segment in sorted(segments, key=lambda segment: segment.index.max_timestamp, reverse=True):
        if segment.index.max_timestamp < best[0]:
            break
        batches = (
            (header.max_timestamp, -header.base_offset, position, header.length)
            for position, header in segment.headers(0, segment.durable_size)
            if header.base_offset < end and header.last_offset >= start
        )
        for latest_ms, negative_offset, position, length in sorted(batches, reverse=True):
            if (latest_ms, negative_offset) < best:
                break
            records = iter_records(segment.file.pread(length, position))
            best = max([best, *((one.timestamp_ms, -one.offset) for one in records if start <= one.offset < end)])
    return None if best[0] < 0 else (-best[1], best[0])
