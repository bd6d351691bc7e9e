"""Retention: how far the start of a log may move up. Arithmetic over segments; the last one always stays.

A segment is as old as its latest record. A latest record without a timestamp, or with one further ahead of the clock
than the topic accepts, would keep its segment and all after it for good: then the segment is as old as its file's last
modification.

Also the *hold*, by which a reader of the log keeps what it still needs: from a time on, segments are neither dropped
nor compacted, whatever else the topic says. It keeps so many bytes and no more, so that a hold whose owner is gone
fills no disk. A segment is held as a whole, if one of its records is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from walstream import logs
from walstream.errors import CorruptLog
from walstream.log.segment import Segment
from walstream.log.settings import NO_HOLD, UNLIMITED, TopicSettings

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog

log = logs.get(__name__)


class Kept(NamedTuple):
    """A partition with what retention decides by."""

    partition: PartitionLog
    segments: list[Segment]
    last_size: int
    settings: TopicSettings


class Expired(NamedTuple):
    """What retention found in a partition."""

    segments: int
    """The number of segments, from the first one on, that nothing keeps."""
    is_last: bool
    """Whether the last segment has expired by its age."""


def find_expired(looked_at: list[Kept], now_ms: int) -> list[Expired]:
    """Return what has expired of each partition. Blocks: it loads indexes."""
    return [_expired(kept, now_ms) for kept in looked_at]


def _expired(kept: Kept, now_ms: int) -> Expired:
    partition, segments, _, settings = kept
    try:
        load_times(segments, settings)
        start = retained_from(segments, settings, now_ms)
        is_last = settings.deleted and settings.retention_ms != UNLIMITED and is_expired(segments[-1], settings, now_ms)
    except (OSError, CorruptLog) as error:  # An index had to be made again from a segment that cannot be read.
        if not partition.is_discarded:
            log.warning("retention skipped", partition=partition.name, error=str(error))
        return Expired(0, is_last=False)
    return Expired(sum(segment.base_offset < start for segment in segments), is_last)


def retained_from(segments: Sequence[Segment], settings: TopicSettings, now_ms: int) -> int:
    """Return the first offset that the topic's settings, or its hold, keep."""
    kept = 0
    if settings.deleted and settings.retention_ms != UNLIMITED:
        kept = _kept_by_age(segments, settings, now_ms)
    if settings.deleted and settings.retention_bytes != UNLIMITED:
        kept = max(kept, _kept_by_size(segments, settings.retention_bytes))
    return segments[held_from(segments, settings, kept)].base_offset


def load_times(segments: Sequence[Segment], settings: TopicSettings) -> None:
    """Load the indexes that compaction asks for the times of what a hold keeps. Blocks."""
    if settings.compacted:
        held_from(segments, settings, len(segments) - 1)


def held_from(segments: Sequence[Segment], settings: TopicSettings, end: int) -> int:
    """Return the first of the segments before number `end` that the hold keeps; `end` if it keeps none of them.

    Those before `end` are what would be removed without it: all that it keeps counts against its limit.
    """
    if settings.hold_from_ms == NO_HOLD:
        return end
    times = (segment.index.max_timestamp for segment in segments[:end])
    first = next((number for number, time_ms in enumerate(times) if time_ms >= settings.hold_from_ms), end)
    room = settings.hold_bytes_max
    while end > first and segments[end - 1].size <= room:
        end -= 1
        room -= segments[end].size
    return end


def holds_more(settings: TopicSettings, before: TopicSettings) -> bool:
    """Tell whether something is held now that was not before."""
    if settings.hold_from_ms == NO_HOLD:
        return False
    return (
        before.hold_from_ms == NO_HOLD
        or settings.hold_from_ms < before.hold_from_ms
        or settings.hold_bytes_max > before.hold_bytes_max
    )


def _kept_by_age(segments: Sequence[Segment], settings: TopicSettings, now_ms: int) -> int:
    """Return the first segment that `retention.ms` keeps."""
    kept = 0
    for number, segment in enumerate(segments[:-1]):
        if segment.size == 0:
            continue  # Compaction left nothing in it, or it stands for a file that is missing: it goes with the next.
        if not is_expired(segment, settings, now_ms):
            break
        kept = number + 1
    return kept


def _kept_by_size(segments: Sequence[Segment], bytes_kept_min: int) -> int:
    """Return the first segment to keep so that at least `bytes_kept_min` stay: a segment goes only as a whole."""
    excess = sum(segment.size for segment in segments) - bytes_kept_min
    kept = 0
    while kept + 1 < len(segments) and segments[kept].size <= excess:
        excess -= segments[kept].size
        kept += 1
    return kept


def is_expired(segment: Segment, settings: TopicSettings, now_ms: int) -> bool:
    """Tell whether a segment has batches and all of them are older than `retention.ms`."""
    if segment.size == 0:
        return False
    latest_ms = segment.index.max_timestamp
    if latest_ms < 0 or latest_ms - now_ms > settings.timestamp_after_max_ms:
        try:
            latest_ms = segment.modified_ms
        except FileNotFoundError:
            return False  # Its first batch is not flushed yet.
    return latest_ms < now_ms - settings.retention_ms
