"""Peers that speak protocol version 1, on the log: what is pushed to such a follower, what is taken from such a leader.

`Pushing` reads what is committed and pushes it, batch by batch; nothing waits for the follower, and one that lags too
far is skipped ahead with a warning (`replication/wire/version_1_push.py`). `Copies` takes what a configured leader
pushes into this node's copies of the topics it leads (`version_1_copies.py`): nobody leads them here, so clients are
not served from them; they are there for the operator who makes this node their leader.

Memory is bounded although version 1 knows no credit: a leader that pushes faster than the disk takes loses its link.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from walstream import logs
from walstream.errors import FencedLeaderEpoch, LinkRefused, PartitionUnknown, WalstreamError
from walstream.log.batch import BatchHeader, stamp, walk
from walstream.node.lines import UNSENT_BYTES_MAX
from walstream.replication.wire.link import Write
from walstream.replication.wire.version_1_copies import place
from walstream.replication.wire.version_1_push import PushPlan

if TYPE_CHECKING:
    from walstream.cluster.metadata import NodeId
    from walstream.log.partition_log import PartitionLog
    from walstream.node.peer_links import PeerLink
    from walstream.replication.wire.leader_link import LeaderLink
    from walstream.replication.wire.version_1 import PushedBatch

log = logs.get(__name__)

COPIED_BYTES_MAX = 64 * 1024 * 1024
"""Of all that was pushed and is not on the disk yet."""
READ_BYTES = 256 * 1024
IDLE_S = 0.02
"""How often a follower that has everything is looked after."""


class Host(Protocol):
    """What is needed of the node."""

    def led_for(self, follower: NodeId) -> Iterable[PartitionLog]:
        """Return the partitions that this node leads and that node holds."""

    def copy_of(self, topic: str, index: int, leader: NodeId) -> PartitionLog | None:
        """Return this node's copy of a partition that the configuration gives to that leader."""

    def now_ms(self) -> int:
        """Return the time that goes into the log."""


class Pushing:
    """Pushes to every follower of version 1 that has a link."""

    def __init__(self, host: Host, records_max: int) -> None:
        self._host = host
        self._records_max = records_max
        self._plans: dict[NodeId, PushPlan] = {}
        self._tasks: dict[PeerLink, asyncio.Task[None]] = {}

    def begin(self, link: PeerLink, follower: NodeId) -> None:
        """Hear that a link to such a follower is up."""
        plan = self._plans.get(follower)
        if plan is None:
            plan = self._plans[follower] = PushPlan(self._records_max)
            for partition in self._host.led_for(follower):
                plan.begin(partition.key, partition.high_watermark)
        self._tasks[link] = asyncio.get_running_loop().create_task(self._push(link, follower, plan))

    def end(self, link: PeerLink) -> None:
        """Hear that a link is gone."""
        task = self._tasks.pop(link, None)
        if task is not None:
            task.cancel()

    def forget_topics(self, deleted: Container[UUID]) -> None:
        """Drop the positions in topics that were deleted."""
        for plan in self._plans.values():
            plan.forget(deleted)

    async def _push(self, link: PeerLink, follower: NodeId, plan: PushPlan) -> None:
        try:
            while not link.is_closed:
                moved = False
                for partition in tuple(self._host.led_for(follower)):
                    if link.line is not None and link.line.unsent_bytes < UNSENT_BYTES_MAX:
                        moved |= await self._push_some(link, follower, plan, partition)
                if not moved:
                    await asyncio.sleep(IDLE_S)
        except (WalstreamError, OSError) as error:
            log.warning("a follower of version 1 could not be pushed to", follower=follower, error=str(error))
            link.fail(error if isinstance(error, WalstreamError) else LinkRefused("The leader cannot read its log."))
        except Exception:
            log.exception("a follower of version 1 could not be pushed to", follower=follower)
            link.fail(LinkRefused("The leader has failed."))  # The next link begins where this one ended.

    async def _push_some(self, link: PeerLink, follower: NodeId, plan: PushPlan, partition: PartitionLog) -> bool:
        """Push some batches of a partition; say whether there were any."""
        visible_end = partition.high_watermark
        push = plan.next(partition.key, partition.log_start, visible_end)
        if push.skipped:
            log.warning(
                "a follower of version 1 lags too far and goes on at the end",
                follower=follower,
                partition=partition.name,
                skipped_records=push.skipped,
            )
        if push.offset is None:
            return False
        chunk = await asyncio.to_thread(partition.read_replica_blocking, push.offset, READ_BYTES)
        machine: LeaderLink = link.link  # type: ignore[assignment]
        for buffer in chunk.buffers:
            view = memoryview(buffer)
            for position, header in walk(view):
                if header.next_offset > visible_end:
                    return True
                batch = view[position : position + header.length]
                frame = machine.push(
                    partition.topic,
                    partition.index,
                    header.base_offset,
                    header.record_count,
                    self._host.now_ms(),
                    batch,
                )
                link.do([Write(frame)])
                plan.pushed(partition.key, header.next_offset)
        return True


class Copies:
    """Takes what leaders of version 1 push."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._held_bytes = 0
        self._waiting: dict[PartitionLog, deque[tuple[PeerLink, PushedBatch]]] = {}
        """What came for a copy while it is emptied."""

    def take(self, link: PeerLink, leader: NodeId, pushed: PushedBatch) -> None:
        """Append a batch to its copy; whatever is wrong with it ends the link, and nothing of it is applied."""
        if link.is_closed:
            return  # Something before it was wrong.
        partition = self._host.copy_of(pushed.topic, pushed.partition, leader)
        if partition is None:
            link.fail(PartitionUnknown(f"Node {leader} leads no {pushed.topic}-{pushed.partition} that is held here."))
            return
        if self._held_bytes + len(pushed.data) > COPIED_BYTES_MAX:
            link.fail(LinkRefused(f"More than {COPIED_BYTES_MAX} pushed bytes wait for the disk."))
            return
        self._held_bytes += len(pushed.data)
        if partition in self._waiting:
            self._waiting[partition].append((link, pushed))
        else:
            self._place(partition, link, pushed)

    def _place(self, partition: PartitionLog, link: PeerLink, pushed: PushedBatch) -> None:
        try:
            placement = place(pushed, partition.log_end)
            header = self._with_epoch(partition, pushed, placement.header)
            goes_back = header.leader_epoch < partition.epochs.last_epoch
            if placement.begins_anew or goes_back:
                self._empty(partition, link, pushed)
            else:
                self._append(partition, pushed, header)
        except WalstreamError as error:
            self._held_bytes -= len(pushed.data)
            link.fail(error)

    @staticmethod
    def _with_epoch(partition: PartitionLog, pushed: PushedBatch, header: BatchHeader) -> BatchHeader:
        """Give a batch of a leader that knows no epochs the copy's own; the CRC does not cover it."""
        if header.leader_epoch < 0:
            header = header._replace(leader_epoch=max(partition.epochs.last_epoch, 0))
            stamp(pushed.data, header.base_offset, header.leader_epoch)
        return header

    def _empty(self, partition: PartitionLog, link: PeerLink, pushed: PushedBatch) -> None:
        if partition.log_end > partition.log_start:
            log.warning(
                "a copy begins anew: what was pushed does not continue it",
                partition=partition.name,
                log_end=partition.log_end,
                offset=pushed.base_offset,
            )
        self._waiting[partition] = deque([(link, pushed)])
        partition.reset(pushed.base_offset, partial(self._emptied, partition))

    def _emptied(self, partition: PartitionLog, error: Exception | None) -> None:
        waiting = self._waiting.pop(partition)
        while waiting:
            link, pushed = waiting.popleft()
            if error is not None:
                self._held_bytes -= len(pushed.data)
                link.fail(LinkRefused(f"{partition.name} cannot be emptied: {error}"))
            elif partition in self._waiting:  # Emptied once more, by the one before.
                self._waiting[partition].append((link, pushed))
            else:
                self._place(partition, link, pushed)

    def _append(self, partition: PartitionLog, pushed: PushedBatch, header: BatchHeader) -> None:
        if header.leader_epoch > partition.leader_epoch:
            partition.become_follower(header.leader_epoch, partial(_epoch_saved, partition))
        if partition.is_leader:
            raise FencedLeaderEpoch(f"This node leads {partition.name} itself.")
        partition.append_replicated([pushed.data], offset=header.base_offset)
        partition.when_durable(header.last_offset, partial(self._written, partition, len(pushed.data)))

    def _written(self, partition: PartitionLog, size: int, error: WalstreamError | None) -> None:
        self._held_bytes -= size
        if error is None:
            partition.advance_high_watermark(partition.durable_end)


def _epoch_saved(partition: PartitionLog, error: Exception | None) -> None:
    if error is not None:
        log.warning("a copy's epoch was not saved", partition=partition.name, error=str(error))
