"""Where partitions are: which nodes there are, who leads what, who is in sync, as handlers of requests ask it.

`Alone` answers for a single node, where every answer is this node; `node/replicas.py` for one that has peers. Handlers
ask nobody else, so that none of them knows whether there is a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from walstream.errors import InvalidReplication, NotEnoughReplicas

if TYPE_CHECKING:
    from walstream.cluster.local import Topic
    from walstream.log.partition_log import PartitionLog
    from walstream.log.store import LogStore
    from walstream.log.waiting import Callback, Waiter

NOBODY = -1
ANY_FACTOR = -1


class Broker(NamedTuple):
    """A node as clients are told of it. No host: the one that the client has reached already."""

    id: int
    host: str
    port: int


class Placed(NamedTuple):
    """Where one partition is."""

    leader: int
    """`NOBODY` while nobody leads it."""
    epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    eligible: tuple[int, ...] = ()
    """Replicas that are not in sync and yet hold everything that was ever acknowledged to all."""


class Placement(Protocol):
    """What handlers ask."""

    @property
    def brokers(self) -> list[Broker]:
        """Return all nodes."""
        ...

    @property
    def controller_id(self) -> int:
        """Return the node that changes topics."""
        ...

    @property
    def coordinator_id(self) -> int:
        """Return the node that keeps the consumer groups: the leader of their offsets."""
        ...

    @property
    def is_sync(self) -> bool:
        """Say whether acks=1 waits for followers, too."""
        ...

    def find(self, topic: Topic, index: int) -> Placed:
        """Return where a partition is."""
        ...

    def replicas_for(self, topic: str, factor: int) -> tuple[int, ...]:
        """Return the nodes for a new topic; raises InvalidReplication."""
        ...

    def check_controller(self) -> None:
        """Raise NotController unless this node changes topics."""
        ...

    def check_in_sync(self, partition: PartitionLog) -> None:
        """Raise NotEnoughReplicas unless as many replicas are in sync as the partition's topic asks for."""
        ...

    def check_settled(self, partition: PartitionLog) -> None:
        """Raise OffsetNotAvailable while a new leader does not know how far its predecessor had come."""
        ...

    def when_acknowledged(self, partition: PartitionLog, offset: int, callback: Callback) -> Waiter:
        """In mode `sync`: call back once the offset is as durable as acks=1 asks for."""
        ...


class Alone:
    """A node without peers."""

    is_sync = False

    def __init__(self, store: LogStore, address: Callable[[], tuple[str, int]]) -> None:
        self._store = store
        self._node_id = store.catalogue.node_id
        self._address = address

    @property
    def brokers(self) -> list[Broker]:
        """Return this node."""
        return [Broker(self._node_id, *self._address())]

    @property
    def controller_id(self) -> int:
        """Return this node."""
        return self._node_id

    @property
    def coordinator_id(self) -> int:
        """Return this node."""
        return self._node_id

    def find(self, topic: Topic, index: int) -> Placed:
        """Return this node, which is all there is."""
        nodes = (self._node_id,)
        return Placed(self._node_id, self._store.partition(topic.name, index).leader_epoch, nodes, nodes)

    def replicas_for(self, topic: str, factor: int) -> tuple[int, ...]:  # noqa: ARG002 - the protocol's signature
        """Return no nodes: a node that is alone names none."""
        if factor not in (ANY_FACTOR, 1):
            raise InvalidReplication(f"There is one node, so the replication factor is 1, not {factor}.")
        return ()

    def check_controller(self) -> None:
        """Allow it."""

    def check_in_sync(self, partition: PartitionLog) -> None:
        """Refuse what one node cannot promise."""
        if partition.settings.min_isr > 1:
            raise NotEnoughReplicas(
                f"{partition.topic} asks for {partition.settings.min_isr} in-sync replicas; there is one node.",
                "Lower the topic's min.insync.replicas.",
            )

    def check_settled(self, partition: PartitionLog) -> None:
        """Allow it: there was nobody before."""

    def when_acknowledged(self, partition: PartitionLog, offset: int, callback: Callback) -> Waiter:
        """Wait for this node's disk."""
        return partition.when_durable(offset, callback)
