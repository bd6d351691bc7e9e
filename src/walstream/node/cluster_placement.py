"""Where partitions are in a cluster, as handlers of requests ask it. The face that `replicas.py` shows to clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from walstream.cluster.metadata import NO_LEADER
from walstream.errors import (
    InvalidReplication,
    NotController,
    NotEnoughReplicas,
    OffsetNotAvailable,
)
from walstream.log.settings import usable
from walstream.node.addresses import split_address
from walstream.node.offsets_log import OFFSETS_TOPIC
from walstream.node.placement import ANY_FACTOR, NOBODY, Broker, Placed

if TYPE_CHECKING:
    from walstream.cluster.local import Topic
    from walstream.config import ReplicationConfig
    from walstream.log.partition_log import PartitionLog
    from walstream.log.settings import TopicSettings
    from walstream.log.waiting import Callback, Waiter
    from walstream.node.replicas import Replicas

MIN_ISR_SETTING = "min.insync.replicas"


def leader_of(config: ReplicationConfig, topic: Topic) -> int:
    """Return who leads a topic: the configured node, or the first that holds it where that one does not."""
    leader = config.leader_of(topic.name)
    return leader if leader in topic.replicas or not topic.replicas else topic.replicas[0]


def min_isr_of(topic: Topic, settings: TopicSettings) -> int:
    """Return how many in-sync replicas a topic asks for; as a default never more than it has."""
    if MIN_ISR_SETTING in usable(topic.config):
        return settings.min_isr
    return min(settings.min_isr, max(len(topic.replicas), 1))


class ClusterPlacement:
    """A `Placement` for a node that has peers."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._config = replicas.config
        self._catalogue = replicas.store.catalogue
        self.brokers = [Broker(node.id, *split_address(node.kafka)) for node in self._config.nodes]
        self.controller_id = self._config.controller
        self.is_sync = self._config.mode == "sync"

    @property
    def coordinator_id(self) -> int:
        """Return the node that keeps the consumer groups."""
        topic = self._catalogue.topics.get(OFFSETS_TOPIC)
        return self._config.leader_of(OFFSETS_TOPIC) if topic is None else leader_of(self._config, topic)

    def find(self, topic: Topic, index: int) -> Placed:
        """Return where a partition is: as this node knows if it leads it, otherwise as its leader has told."""
        key = (topic.id, index)
        replicas = tuple(topic.replicas)
        state = self._replicas.state(key)
        leader = leader_of(self._config, topic)
        if state is not None and leader == self._catalogue.node_id:
            is_led = state.leader != NO_LEADER
            return Placed(
                leader if is_led else NOBODY, state.epoch, replicas, tuple(sorted(state.isr_nodes)), state.elr
            )
        epoch, in_sync = self._replicas.telling.in_sync(key) or (-1, [leader])
        return Placed(leader, epoch, replicas, tuple(in_sync))

    def replicas_for(self, topic: str, factor: int) -> tuple[int, ...]:
        """Return the nodes for a new topic."""
        config, nodes = self._config, len(self._config.nodes)
        if factor == ANY_FACTOR:
            factor = min(config.replication_factor, nodes)
        if not 1 <= factor <= nodes:
            raise InvalidReplication(f"There are {nodes} nodes, so the replication factor cannot be {factor}.")
        replicas = config.replicas_of(topic, factor)
        if replicas[0] != self._catalogue.node_id and replicas[0] not in self._catalogue.joined:
            raise InvalidReplication(
                f"Node {replicas[0]}, which is to lead {topic}, has not joined the cluster yet.", "Start it first."
            )
        return replicas

    def check_controller(self) -> None:
        """Refuse to change topics anywhere but on the controller."""
        if self.controller_id != self._catalogue.node_id:
            raise NotController(f"Node {self.controller_id} changes topics, not this one.")

    def check_in_sync(self, partition: PartitionLog) -> None:
        """Refuse what too few replicas would keep."""
        state = self._replicas.state(partition.key)
        if partition.is_leader and state is not None and not state.can_commit:
            raise NotEnoughReplicas(
                f"{partition.name} asks for {state.min_isr} in-sync replicas and has {len(state.isr)}.",
                "Wait for the others to come back, or lower the topic's min.insync.replicas.",
            )

    def check_settled(self, partition: PartitionLog) -> None:
        """Refuse to say where a log ends before its new leader knows."""
        replica = self._replicas.replicas.get(partition.key)
        if replica is None or not replica.is_settled:
            raise OffsetNotAvailable(f"The new leader of {partition.name} does not know yet how far its followers are.")

    def when_acknowledged(self, partition: PartitionLog, offset: int, callback: Callback) -> Waiter:
        """In mode `sync`, wait for followers' disks, and then for this node's."""
        replica = self._replicas.replicas[partition.key]
        return replica.when_followers_durable(
            offset, lambda error: callback(error) if error else _then(partition.when_durable(offset, callback))
        )


def _then(_: Waiter) -> None:
    """Wait on: this node's own disk is as good as done."""
