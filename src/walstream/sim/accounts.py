"""The checkers' own account of a run: of each copy of a partition, and of what was promised about it.

Plain data, and what happens to it when somebody was elected who promises nothing. Kept by `checkers`, which look at the
replicas from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from walstream.cluster.metadata import NodeId, PartitionState
from walstream.log.partition_log import PartitionLog
from walstream.sim.mirror import Item, Mirror, first_difference

NO_LIFE = -2
"""Of a copy that was not opened since its disk was new. A record may name -1: whichever life."""


@dataclass(slots=True)
class Copy:
    """The account of one copy, over all lives of its node."""

    mirror: Mirror = field(default_factory=Mirror)
    durable_end: int = 0
    """What it last called durable."""
    high_watermark: int = 0
    checked_end: int = 0
    """Below this offset the mirror was compared with what is committed."""
    life: int = NO_LIFE
    truncations: int = 0
    is_offline: bool = False
    is_held: bool = False
    """It is being cut."""
    uncut: Mirror | None = None
    """While it is: what it held durably before, and holds again if the power goes before the cut was announced."""
    leading_epoch: int | None = None
    is_unproven: bool = False
    """Its medium was harmed: it may hold less than it promised, until it has been brought in line again."""
    is_rotten: bool = False
    """Bits were flipped: what is read back may be other than what it holds, until that is noticed."""


@dataclass(slots=True)
class History:
    """The account of one partition."""

    name: str
    committed: Mirror = field(default_factory=Mirror)
    copies: dict[NodeId, Copy] = field(default_factory=dict)
    leaders: dict[int, tuple[NodeId, int]] = field(default_factory=dict)
    """Epoch → which life of which node led in it."""
    record: PartitionState | None = None
    """The newest the metadata service has agreed on; None where there is no such service."""
    min_isr: int = 1
    trimmed_to: int = 0
    """Everything below was deleted on request; nothing above may be missing."""
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Producer id → the sequence its next batch must have (every batch is committed once, in order), and where its last
    one ends: who copied the log when that was deleted knows nothing of it."""
    unclean_epoch: int = -1
    """The newest epoch that was begun without a promise: what leaders of older ones still say counts for nothing."""
    given_up_epoch: int = -1
    """The newest of those whose leader has begun: what it did not hold is committed no more."""
    lost: set[Item] = field(default_factory=set)
    """What was committed, held by enough then, and is so no more."""

    @property
    def has_given_up(self) -> bool:
        """Whether losing records was ever allowed."""
        return self.unclean_epoch >= 0

    def give_up(self, copy: Copy, start: int, watermark: int) -> None:
        """Losing records was allowed, and somebody leads since: what it holds is what is committed from here on.

        That may be more than before, if one led in between who lacked it: its high watermark, with which it begins, is
        from an earlier time, and what was committed then is back, though nobody else may hold it now. What never was
        committed is not: that it may not expose before enough hold it.
        """
        self.given_up_epoch = self.unclean_epoch
        committed = self.committed
        end = committed.end
        missing = first_difference(committed.between(start, end), copy.mirror)
        if missing is not None:
            self.lost.update(committed.between(missing[0].base, end))
            committed.cut(missing[0].base)
        committed.goes_on_at = 0
        if committed.end < start:
            # One led in between who lacked what this one knows to be deleted.
            whole = copy.mirror.between(start, copy.mirror.end)
            committed.goes_on_at = whole[0].base if whole else copy.mirror.end
        kept_end = committed.end
        for item in copy.mirror.between(kept_end, watermark):
            if item.base != committed.end or item not in self.lost:
                break
            committed.add(item)
        if missing is None and committed.end == end:
            return
        self.sequences = {
            item.producer: (item.sequence + item.next - item.base, item.next)
            for item in committed.items
            if item.producer >= 0
        }
        for other in self.copies.values():
            other.high_watermark = min(other.high_watermark, kept_end)
            other.checked_end = min(other.checked_end, kept_end)

    def is_outdated(self, log: PartitionLog) -> bool:
        """Tell whether what a log calls visible was promised before losing it was allowed."""
        return log.high_watermark_epoch < self.unclean_epoch
