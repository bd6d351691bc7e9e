"""The request handlers and the group coordinator of one life of a simulated node: the real ones, on a simulated loop.

Stands for `node.server` and for the part of `node.replicas` that gives the offsets topic its coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from walstream.config import Config
from walstream.errors import NotCoordinator, OffsetNotAvailable
from walstream.node.acl import ANONYMOUS, Authorizer
from walstream.node.context import Context
from walstream.node.groups.service import GroupService
from walstream.node.offsets_log import OFFSETS_TOPIC
from walstream.ops.metrics import Metrics
from walstream.sim.event_loop import SimLoop

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog
    from walstream.node.driver import Replica
    from walstream.sim.node import SimNode

CONFIG = Config()
READ_ERROR_PROBABILITY = 0.2
"""How often a job that reads the log for a handler or the coordinator fails while there are faults."""


class SimApi:
    """What serves clients in one life of a node; the `Node` of `node.context`, as far as its handlers ask."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.loop = SimLoop(node.clock, node.driver, node.run, self._read_fails)
        self.config = CONFIG
        self.store = node.store
        self.catalogue = node.store.catalogue
        self.placement = self
        self.security = SimpleNamespace(authorizer=Authorizer((), enforced=False))
        self.metrics = Metrics(())
        self.executor = None
        self.now_ms = node.store.now_ms
        self.context = Context(cast("Any", self), cast("Any", SimpleNamespace(principal=ANONYMOUS, peer="")), 7, "sim")
        with self.loop.running():
            self.groups = GroupService(cast("Any", self))
            self.groups.check_in_sync = self.check_in_sync
            self.groups.resign(NotCoordinator("Another node keeps the groups."))

    def handle(self, handling: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start to handle a request."""
        return self.loop.create_task(handling)

    def role_changed(self, replica: Replica) -> None:
        """Begin or end to coordinate, as `node.replicas` does."""
        if replica.partition.topic == OFFSETS_TOPIC:
            if replica.partition.is_leader:
                self.groups.lead()
            else:
                self.groups.resign(NotCoordinator("Another node keeps the groups."))

    def stop(self) -> None:
        """Stop taking requests, as a process does that ends cleanly."""
        with self.loop.running(), suppress(StopIteration):
            self.groups.stop().send(None)

    def check_in_sync(self, partition: PartitionLog) -> None:
        """Raise NotEnoughReplicas where a commit would wait for replicas that are not in sync."""
        self._node.cluster.check_in_sync(self._node.copies[partition.key].replica)

    def check_settled(self, partition: PartitionLog) -> None:
        """Raise OffsetNotAvailable until a new leader has the high watermark of the one before."""
        if not self._node.copies[partition.key].replica.is_settled:
            raise OffsetNotAvailable(f"The new leader of {partition.name} does not have its high watermark yet.")

    def _read_fails(self) -> bool:
        return not self._node.cluster.are_faults_over and self._node.clock.chance(READ_ERROR_PROBABILITY)
