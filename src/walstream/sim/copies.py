"""One copy of a partition in one life of its node, as the checkers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from walstream.cluster.metadata import PartitionState
from walstream.node.driver import Replica

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog


class Copy:
    """One copy of a partition in one life, as the checkers see it."""

    __slots__ = ("key", "life", "log", "node", "record", "replica", "tried_us")

    def __init__(self, node: int, life: int, replica: Replica) -> None:
        self.node = node
        self.life = life
        self.replica = replica
        self.key = replica.key
        self.record: PartitionState | None = None
        self.tried_us = 0
        """When a static leader last tried to lead."""
        self.log: PartitionLog = replica.partition

    @property
    def leading_epoch(self) -> int | None:
        """The epoch in which it leads, that is, takes appends and serves."""
        return self.log.leader_epoch if self.log.is_leader else None
