"""Regions: the number that stands for a partition in its LSNs, given once and for ever, and kept in the log itself.

Owns what the records of the topic `_walstream.regions` mean; `region_topic` reads and writes them. The topic has one
partition, and nothing is ever removed. A record names a topic's id, a partition and a *roll*, which counts how often
its index of 32 bits has begun anew. The region of such a triple is the offset of the first record that names it, plus
one. So regions are durable, never used twice, and the same for every feed of the log, whoever wrote first: two that
race both write, and both read back the winner.

A region also says from when on its partition is in the feed: the append time of the record that named it. No entry of
the region has an earlier stamp, whenever its record was appended (`entries`). Only the records of the topic's first
batch say "from the beginning": no feed had handed out anything before. That batch is always written, if only with
a record that names nothing.

Why that makes new partitions safe. A node promises resolved positions (offset, time): every record from the offset on
is appended after the time. Let a reader have read this topic up to such an offset, with the time T, and know all
partitions that are named before it. Any partition it does not know is named by a record from that offset on, if ever.
That record is appended after T, so no entry of that partition has a stamp up to T. Hence whatever the reader hands out
with stamps up to T, a partition that comes later cannot have anything that belonged before it: not in another process,
not with a leader whose clock is behind, not if its topic was written to long before a feed knew of it. And nothing of
it is passed over: to all readers its records are new when it joins. The same holds for a new roll.

With Apache Kafka the promises are those that `resolved` makes of its clocks, and this is as safe as they are. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from walstream.feed.reading.entries import INDEX_BITS, Region
from walstream.positions import PART_MAX

AHEAD: Final = 1 << 24
"""The next roll is named when so many offsets are left: its region is there long before its first record."""

ROLLS_MAX: Final = 1 << (63 - INDEX_BITS)


class Named(NamedTuple):
    """What a region stands for."""

    topic_id: str
    topic: str
    partition: int
    roll: int
    start: int = 0
    """Where the partition begins now."""
    end: int = 0
    """Where it ends now."""


class _Record(msgspec.Struct, frozen=True):
    topic_id: str
    topic: str
    partition: int
    roll: int = 0
    start: int = 0
    end: int = 0


_decoder = msgspec.json.Decoder(_Record)
_NOTHING: Final = _Record("", "", -1)


def write(named: Sequence[Named], *, is_first_batch: bool) -> list[bytes]:
    """Return the records that name these, to be written as one batch."""
    records = [_Record(*one) for one in named]
    return [msgspec.json.encode(record) for record in ([_NOTHING, *records] if is_first_batch else records)]


class RegionTable:
    """What the records of the topic come to, read from the first to the last."""

    def __init__(self) -> None:
        self.next_offset = 0
        self.named: dict[int, Named] = {}
        """By region."""
        self._regions: dict[tuple[str, int], dict[int, Region]] = {}

    def apply(self, offset: int, value: bytes | None, append_ms: int, *, is_first_batch: bool) -> Named | None:
        """Take in the next record; return what it names, if that is news."""
        assert offset >= self.next_offset, (offset, self.next_offset)
        self.next_offset = offset + 1
        try:
            record = _decoder.decode(value or b"")
        except msgspec.DecodeError:
            return None
        start, end = max(record.start, 0), max(record.end, 0)
        named = Named(record.topic_id, record.topic, record.partition, record.roll, start, end)
        # A roll is named once, and after the ones below it: its region must be the larger.
        if not 0 <= named.roll < ROLLS_MAX or named.partition < 0 or self.has(named):
            return None
        if offset >= PART_MAX:
            return None
        since_ms, start = (0, 0) if is_first_batch else (append_ms, named.start)
        region = Region(offset + 1, since_ms, start, named.end)
        self.of(named.topic_id, named.partition)[named.roll] = region
        self.named[offset + 1] = named
        return named

    def has(self, named: Named) -> bool:
        """Tell whether a roll has a region, or cannot have one any more because a later one has."""
        rolls = self.of(named.topic_id, named.partition)
        return bool(rolls) and named.roll <= max(rolls)

    def of(self, topic_id: str, partition: int) -> dict[int, Region]:
        """Return the regions of a partition by roll; the same dict each time, which grows as rolls are named."""
        return self._regions.setdefault((topic_id, partition), {})

    def missing(self, topic_id: str, partition: int, log_start: int, log_end: int) -> list[int]:
        """Return the rolls that have to be named, so that every record of the partition has a region, and the next."""
        rolls = self.of(topic_id, partition)
        first = max(log_start >> INDEX_BITS, max(rolls) + 1 if rolls else 0)
        return list(range(first, (log_end + AHEAD >> INDEX_BITS) + 1))
