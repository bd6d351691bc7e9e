"""What a leader pushes to a follower of version 1, which never says how far it is.

It begins where the log ends when the follower is first seen (with a partition that comes later: at its beginning), and
goes on from there, over broken connections too, for as long as the leader lives. It is sent only what is committed:
version 1 cannot take anything back. A follower that lags by more than `records_max` records is not waited for: it goes
on at the end, and the gap is reported. It never counts in the ISR, and nothing waits for it. No batch is kept for it:
they are read from the log when it is its turn.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from uuid import UUID

from walstream.cluster.metadata import PartitionKey


@dataclass(frozen=True, slots=True)
class Push:
    """What to do for a partition now."""

    offset: int | None
    """Read one batch here, below the high watermark, and push it; None: everything committed has been."""
    skipped: int = 0
    """So many records before it never will be pushed: a warning. Each gap is told once."""


class PushPlan:
    """Where one follower of version 1 is in each partition, as far as the leader can know: what was sent."""

    __slots__ = ("_positions", "_records_max")

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._positions: dict[PartitionKey, int] = {}

    def begin(self, partition: PartitionKey, high_watermark: int) -> None:
        """Note a partition that is there when the follower is first seen: it is pushed what is committed after that."""
        self._positions.setdefault(partition, high_watermark)

    def forget(self, topics: Container[UUID]) -> None:
        """Drop the positions in topics that were deleted."""
        self._positions = {key: offset for key, offset in self._positions.items() if key[0] not in topics}

    def next(self, partition: PartitionKey, log_start: int, high_watermark: int) -> Push:
        """Say what to push next, and what was given up."""
        position = self._positions.setdefault(partition, log_start)
        target = max(position, log_start)
        if high_watermark - target > self._records_max:
            target = high_watermark
        self._positions[partition] = target
        # A new leader's high watermark may be behind the old one's for a moment: then there is nothing to push.
        return Push(target if target < high_watermark else None, target - position)

    def pushed(self, partition: PartitionKey, next_offset: int) -> None:
        """Note that everything below `next_offset` is on its way."""
        self._positions[partition] = next_offset
