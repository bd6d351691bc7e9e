"""Does a batch continue the log? The question recovery asks of every batch it reads.

A batch's CRC leaves out its base offset, its length and its leader epoch, so a flipped bit there is invisible to it.
They are held against what came before and against what is known besides: offsets go on without a gap (only compaction
leaves any, and only below the point it has reached) and end where the next segment begins; epochs are those of the
epoch map, or newer ones that the node had heard of.

Where there is a choice (a gap that may be, an epoch that may be new) a batch can lie and be believed. Then the next
sound batch contradicts it, and fits what came before it: two against one, and it is the liar that is damaged, not all
the batches after it. Pure.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from walstream.log.batch import CHECKED_POSITION, HEADER_BYTES, MAGIC, PREFIX_BYTES, BatchHeader, Buffer
from walstream.log.epochs import NO_EPOCH, EpochMap

_FIELDS = Struct(">qiibI2xi")
_LENGTH_MIN = HEADER_BYTES - PREFIX_BYTES


class Run(NamedTuple):
    """How far a buffer continues the log."""

    size: int
    """In bytes, of whole batches."""
    last_start: int
    """Where the last of them begins."""
    is_bad: bool
    """Whether a batch that does not fit ended it; otherwise the buffer ends there, or inside a batch."""


class Rule(NamedTuple):
    """What batches must fit."""

    gaps_below: int
    end: int
    """Where the next segment begins; nothing in this one reaches beyond."""
    epochs: EpochMap
    epoch_max: int
    """The newest epoch that this log may hold."""

    def takes_offset(self, base: int, last: int, expected: int) -> bool:
        """Tell whether a batch may stand where `expected` comes next."""
        return (base == expected or expected < base <= self.gaps_below) and last < self.end

    def takes_epoch(self, epoch: int, base: int, newest: int) -> bool:
        """Tell whether a batch of this epoch may stand at `base`, `newest` being the newest one seen so far."""
        known = newest if newest > self.epochs.last_epoch else self.epochs.epoch_at(base)
        if known == NO_EPOCH:
            return 0 <= epoch <= self.epoch_max
        return epoch == known or newest < epoch <= self.epoch_max

    def takes_after_damage(self, header: BatchHeader, expected: int) -> bool:
        """Tell whether a batch may be the first one after damage that begins at `expected`."""
        return (
            expected <= header.base_offset
            and header.last_offset < self.end
            and self.takes_epoch(header.leader_epoch, header.base_offset, self.epochs.last_epoch)
        )


def continuing_run(buffer: Buffer, expected: int, rule: Rule) -> Run:
    """Measure how far the batches of a buffer continue a log that ends at `expected`."""
    view, size = memoryview(buffer), len(buffer)
    position = last_start = 0
    newest = rule.epochs.last_epoch
    before = (expected, newest)  # As it was before the last batch, should that one prove a liar.
    while size - position >= HEADER_BYTES:
        base, length, epoch, magic, crc, delta = _FIELDS.unpack_from(view, position)
        if length < _LENGTH_MIN or magic != MAGIC or delta < 0:
            return Run(position, last_start, True)
        following = position + PREFIX_BYTES + length
        if following > size:
            return Run(position, last_start, False)
        is_sound = crc32c(view[position + CHECKED_POSITION : following]) == crc
        fits = rule.takes_offset(base, base + delta, expected) and rule.takes_epoch(epoch, base, newest)
        if not (is_sound and fits):
            could_fit = rule.takes_offset(base, base + delta, before[0]) and rule.takes_epoch(epoch, base, before[1])
            if position and is_sound and could_fit:
                return Run(last_start, last_start, True)
            return Run(position, last_start, True)
        before = (expected, newest)
        expected, newest = base + delta + 1, max(newest, epoch)
        last_start, position = position, following
    return Run(position, last_start, False)
