"""What a client asks of a partition's leader: whether this node is that, and which times are over there.

A resolved position (see `log/stamps.py`) is told in two ways, by ListOffsets and along with a Fetch. Whoever may know
where a partition ends may know it. It is answered from memory and within one turn of the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from walstream.errors import FencedLeaderEpoch, NotLeader, UnknownLeaderEpoch, WalstreamError
from walstream.log.partition_log import PartitionLog
from walstream.node.acl import Question
from walstream.node.context import Context

UNKNOWN = (-1, -1)
"""A position that is not known."""


def led_partition(context: Context, question: Question, topic: str, index: int, epoch: int = -1) -> PartitionLog:
    """Return a partition that this node leads, if the client may do that with it. Raises what is in the way."""
    context.authorize(question, "topic", topic)
    partition = context.node.store.partition(topic, index)
    check_leader(partition, epoch)
    return partition


def check_leader(partition: PartitionLog, epoch: int = -1) -> None:
    """Raise unless this node leads the partition and the client's idea of its epoch (-1: none) is the present one.

    Raises PartitionOffline where the files could not be opened: the log seems empty then, and a reader that is told so
    skips its records.
    """
    if not partition.is_leader:
        raise NotLeader(f"This node does not lead {partition.name}.", "Ask again who does.")
    partition.check_opened()
    if epoch in (-1, partition.leader_epoch):
        return
    kind = FencedLeaderEpoch if epoch < partition.leader_epoch else UnknownLeaderEpoch
    raise kind(f"{partition.name} has leader epoch {partition.leader_epoch}, not {epoch}.")


def resolved_positions(
    context: Context, partitions: Iterable[tuple[str, int]], brought: Sequence[PartitionLog] = ()
) -> list[tuple[int, int]]:
    """Return the resolved position of each partition, UNKNOWN where ListOffsets would tell none.

    `brought` are those whose records come along. If one of them has the latest, the others' positions settle these, and
    its own does nothing for them. Of two with the same time either may be the later one.
    """
    newest_ms = max((partition.newest_ms for partition in brought), default=-1)
    newest = [partition for partition in brought if partition.newest_ms == newest_ms]
    alone = newest[0] if len(newest) == 1 else None
    return [_resolved_position(context, topic, index, alone) for topic, index in partitions]


def _resolved_position(context: Context, topic: str, index: int, newest: PartitionLog | None) -> tuple[int, int]:
    try:
        partition = led_partition(context, "describe", topic, index)
        context.node.placement.check_settled(partition)
        return partition.resolve(is_newest=partition is newest) or UNKNOWN
    except WalstreamError:
        return UNKNOWN
