"""What a log holds, kept beside it by the checkers: for each batch its offsets, its leader's epoch and its CRC.

A mirror learns of batches by reading them from the log once, when they appear, so it knows what the log promised even
when the log has lost it. Two logs agree on a range when their mirrors do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from walstream.log.batch import BatchHeader, check_crc, walk
from walstream.log.finding import pieces, place_around_damage
from walstream.log.partition_log import PartitionLog

READ_BYTES = 1 << 20


class Item(NamedTuple):
    """A batch, as far as comparing goes."""

    base: int
    next: int
    epoch: int
    crc: int
    producer: int = -1
    sequence: int = -1

    def __str__(self) -> str:
        return f"[{self.base},{self.next}) of epoch {self.epoch} crc {self.crc:08x}"


def item_of(header: BatchHeader) -> Item:
    """Make an item of a batch's header."""
    return Item(
        header.base_offset, header.next_offset, header.leader_epoch, header.crc, header.producer_id,
        header.base_sequence,
    )  # fmt: skip


class Mirror:
    """The batches of one log, in order; without gaps, unless it goes on behind what was deleted."""

    __slots__ = ("bases", "goes_on_at", "items", "start")

    def __init__(self, start: int = 0) -> None:
        self.start = start
        """Where it begins when it is empty."""
        self.goes_on_at = 0
        """Where the next batch belongs, if not behind the last one."""
        self.items: list[Item] = []
        self.bases: list[int] = []

    @property
    def end(self) -> int:
        """Where the next batch belongs."""
        items = self.items
        return max(items[-1].next if items else self.start, self.goes_on_at)

    def add(self, item: Item) -> None:
        """Append a batch."""
        self.items.append(item)
        self.bases.append(item.base)

    def cut(self, end: int) -> None:
        """Forget the batches that do not end at or before `end`."""
        while self.items and self.items[-1].next > end:
            self.items.pop()
            self.bases.pop()
        if not self.items:
            self.start = min(self.start, end)

    def reset(self, start: int) -> None:
        """Forget everything and begin at `start`."""
        self.start = start
        self.items.clear()
        self.bases.clear()

    def at(self, base: int) -> Item | None:
        """Return the batch that begins at an offset."""
        index = bisect_left(self.bases, base)
        if index < len(self.bases) and self.bases[index] == base:
            return self.items[index]
        return None

    def between(self, start: int, end: int) -> list[Item]:
        """Return the batches whose base offset lies in [start, end)."""
        return self.items[bisect_left(self.bases, start) : bisect_left(self.bases, end)]

    def copy(self, end: int) -> Mirror:
        """Return a mirror of the batches that end at or before `end`."""
        twin = Mirror(self.start)
        for item in self.items:
            if item.next > end:
                break
            twin.add(item)
        return twin


def first_difference(ours: Iterable[Item], theirs: Mirror) -> tuple[Item, Item | None] | None:
    """Return the first of our batches that the other mirror does not hold, and what it holds there."""
    for item in ours:
        other = theirs.at(item.base)
        if other != item:
            return item, other
    return None


# ── reading them from logs ──────────────────────────────────────────────────────────────────────────────────────────


def read_items(log: PartitionLog, offset: int) -> list[Item]:
    """Read what a log holds from an offset on, durable or not."""
    items: list[Item] = []
    while offset < log.log_end:
        is_durable = offset < log.durable_end
        chunk = log.read_replica_blocking(offset, READ_BYTES) if is_durable else log.read_replica(offset, READ_BYTES)
        if chunk is None or not chunk.size:
            break
        for buffer in chunk.buffers:
            items += [item_of(header) for _, header in walk(buffer) if header.next_offset > offset]
        offset = chunk.next_offset
    return items


def mirror_of(log: PartitionLog) -> Mirror:
    """Read all batches of a log that was just opened or cut, so that everything is in its files."""
    mirror = Mirror(log.log_end)
    for segment in log.segments:
        for _, header in segment.headers() if segment.size else ():
            mirror.add(item_of(header))
    return mirror


def fill_damage(found: Mirror, log: PartitionLog, old: Mirror) -> None:
    """Put in, where a log is damaged, what it held before: its offsets are still taken, and a header may be rotten."""
    items = [*found.items, *(item for item in old.items if item.next <= log.log_end)]
    known = {item.base: item for item in items if item.next > log.log_start}
    found.reset(log.log_end)
    for base in sorted(known):
        if not found.items or base == found.end:
            found.add(known[base])


def rot_of(log: PartitionLog) -> str:
    """Return what is wrong with the bytes of a log; nothing if all of it is sound.

    Reads the files and asks nobody: a log that is asked notices its damage, and it is to be seen whether it had.
    """
    if log.damaged:
        return f"damaged {log.damaged}"
    expected = log.log_start
    for segment in log.segments:
        if not segment.size:
            continue
        data = segment.file.pread(segment.durable_size, 0)
        # What lies before the log's start is nobody's, and whatever has become of it must not lead astray here.
        source = partial(pieces, segment.file, segment.durable_size)
        begin = place_around_damage(source, segment.base_offset, max(expected, segment.base_offset), dense=True)
        for position, header in segment.headers(begin.position):
            if header.next_offset <= expected or header.base_offset > expected:
                continue
            is_sound = check_crc(data, position, header.length)
            epoch = log.epochs.epoch_at(max(header.base_offset, log.log_start))
            if not is_sound or header.leader_epoch != epoch:
                return f"unnoticed rot at {header.base_offset}"
            expected = header.next_offset
    return "" if expected == log.durable_end else f"unnoticed rot at {expected}"
