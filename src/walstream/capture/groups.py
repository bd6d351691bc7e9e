"""Groups of rows on their way into the log, and what is known of them.

Owns the order in which groups become commit points: the order in which they were written, however their rows are
acknowledged. Refuses to know producers and threads; its caller holds a lock. Invariant: a group is taken once, when
each of its partitions has delivered its last row and every group before it has been taken.

Only the last row of each partition reports its delivery. That is enough: an idempotent producer without gaps delivers a
partition's rows in order, so the last one is there only if all before it are.
"""

from __future__ import annotations

from collections import deque

from walstream.capture.ledger import Written
from walstream.positions import TopicPartition


class Group:
    """Rows that will be in one commit point together."""

    __slots__ = ("since_s", "waiting", "written")

    def __init__(self, written: Written, since_s: float) -> None:
        """Take what is written, with its rows per partition; nothing of it is delivered yet."""
        self.written = written
        self.waiting = len(written.rows)
        """Partitions that have not delivered their last row."""
        self.since_s = since_s

    def delivered(self, partition: TopicPartition, offset: int) -> bool:
        """Note the last row of a partition; return whether the group is complete."""
        assert partition not in self.written.last, "each partition has one last row"
        self.written.last[partition] = offset
        self.waiting -= 1
        return self.waiting == 0


class Groups:
    """The groups in flight, in the order of their transactions."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> None:
        """Take one more, after all others."""
        self._groups.append(group)

    def take(self) -> Written | None:
        """Return the complete groups at the head as one, or None."""
        taken: Written | None = None
        while self._groups and self._groups[0].waiting == 0:
            written = self._groups.popleft().written
            if taken is None:
                taken = written
            else:
                taken.add(written)
        return taken

    @property
    def oldest_since_s(self) -> float | None:
        """When the oldest one was written."""
        try:
            return self._groups[0].since_s
        except IndexError:
            return None
