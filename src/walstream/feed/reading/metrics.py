"""What the reading side counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReadingMetrics:
    """What has been read, and what is kept; counters since the start unless said otherwise."""

    entries_total: int = 0
    """Entries decoded from the log, for the window and for catching up."""
    bytes_total: int = 0
    """Bytes of record batches fetched."""
    cache_hits_total: int = 0
    cache_misses_total: int = 0
    window_bytes: int = 0
    """Now: what the live window holds."""
    window_entries: int = 0
    """Now: how many entries the live window holds."""
    cache_bytes: int = 0
    """Now: what the chunk cache holds."""
    index_bytes: int = 0
    """Now: what is kept to tell how far an LSN is behind."""
    partitions: int = 0
    """Now: partitions in the feed."""
