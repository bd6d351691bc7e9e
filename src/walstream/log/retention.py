"""Retention: how far the start of a log may move up. Arithmetic over segments; the last one always stays."""

from __future__ import annotations

from collections.abc import Sequence

from walstream.log.segment import Segment
from walstream.log.settings import UNLIMITED, TopicSettings


def retained_from(segments: Sequence[Segment], settings: TopicSettings, now_ms: int) -> int:
    """Return the first offset that the topic's settings keep."""
    kept = 0
    if settings.deleted and settings.retention_ms != UNLIMITED:
        kept = _kept_by_age(segments, now_ms - settings.retention_ms)
    if settings.deleted and settings.retention_bytes != UNLIMITED:
        kept = max(kept, _kept_by_size(segments, settings.retention_bytes))
    return segments[kept].base_offset


def _kept_by_age(segments: Sequence[Segment], expired_ms: int) -> int:
    """Return the first segment to keep: a segment is as old as its newest record."""
    kept = 0
    while kept + 1 < len(segments) and is_expired(segments[kept], expired_ms):
        kept += 1
    return kept


def _kept_by_size(segments: Sequence[Segment], bytes_kept_min: int) -> int:
    """Return the first segment to keep so that at least `bytes_kept_min` stay: a segment goes only as a whole."""
    excess = sum(segment.size for segment in segments) - bytes_kept_min
    kept = 0
    while kept + 1 < len(segments) and segments[kept].size <= excess:
        excess -= segments[kept].size
        kept += 1
    return kept


def is_expired(segment: Segment, expired_ms: int) -> bool:
    """Tell whether everything in a segment is older than a time. Records without a time never expire."""
    return segment.size > 0 and 0 <= segment.index.max_timestamp < expired_ms
