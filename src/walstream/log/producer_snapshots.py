"""What was known of idempotent producers where a segment begins, in a file beside it.

A log that is cut back must forget the producers' batches it has lost, and remember those that stand before them again.
So each roll leaves a snapshot, and a cut reads the one of its own segment and goes on from the headers. A snapshot is
a hint like an index: written without fsync, checked by a checksum, and where it is missing an older one serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from crc32c import crc32c

from walstream.errors import CorruptLog
from walstream.log.disk import Disk, read_hint
from walstream.log.producers import ProducerStates, Row
from walstream.log.segment import Segment

SUFFIX = ".producers"
_CRC_BYTES = 4


def path_of(folder: Path, base_offset: int) -> Path:
    """Return where the snapshot of the segment at `base_offset` is kept."""
    return folder / f"{base_offset:020d}{SUFFIX}"


def encode(rows: Sequence[Row]) -> bytes:
    """Return the content of a snapshot's file."""
    body = msgspec.json.encode(rows)
    return crc32c(body).to_bytes(_CRC_BYTES, "big") + body


def load(disk: Disk, folder: Path, base_offset: int, producers_max: int, monotonic_ms: int) -> ProducerStates | None:
    """Read a snapshot back; None if there is none, or none that can be trusted."""
    data = read_hint(disk, path_of(folder, base_offset))
    if data is None or crc32c(data[_CRC_BYTES:]) != int.from_bytes(data[:_CRC_BYTES], "big"):
        return None
    try:
        return ProducerStates.restore(msgspec.json.decode(data[_CRC_BYTES:]), producers_max, now_ms=monotonic_ms)
    except (msgspec.DecodeError, CorruptLog, TypeError):
        return None


def nearest(
    disk: Disk, folder: Path, bases: Sequence[int], base_offset: int, producers_max: int, monotonic_ms: int
) -> tuple[int, ProducerStates]:
    """Return the newest segment not after `base_offset` whose beginning is known, and what is known there.

    Where nothing is known, it is the first segment and no producers: theirs is the oldest past that there is.
    """
    for base in sorted((base for base in bases if base <= base_offset), reverse=True):
        producers = load(disk, folder, base, producers_max, monotonic_ms)
        if producers is not None:
            return base, producers
    return min(bases, default=base_offset), ProducerStates(producers_max)


def rebuild(
    disk: Disk, folder: Path, segments: Sequence[Segment], producers_max: int, monotonic_ms: int
) -> ProducerStates:
    """Return what these segments, from the log's start to its end, say about producers. Blocks."""
    bases = [segment.base_offset for segment in segments]
    base, producers = nearest(disk, folder, bases, bases[-1], producers_max, monotonic_ms)
    for segment in segments:
        if segment.base_offset >= base and segment.size:
            for _, header in segment.headers():
                producers.apply(header, monotonic_ms)
    return producers
