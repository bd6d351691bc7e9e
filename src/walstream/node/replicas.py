"""A node with peers: its partitions' cores, its links, and the turns of the loop in which they meet.

Owns which partitions have a core here (those that this node holds a copy of) and when each of them and each link is
called. In one turn of the event loop everything that has happened to a partition is told to its core once, and
everything that is to be sent over a link leaves together: that is what keeps the cost of replication off the single
request.

What is decided elsewhere: the rules in `replication/`, effects in `driver.py`, connections in `peers.py`, topics in
`telling.py`, what clients are told in `cluster_placement.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from walstream import logs
from walstream.cluster.local import Change, NewTopic, Topic
from walstream.cluster.metadata import Member, NodeId, PartitionKey, PartitionState
from walstream.cluster.static import Opening, StaticCluster
from walstream.config import Config, ReplicationConfig
from walstream.errors import ConnectionLost, NotCoordinator
from walstream.log.partition_log import PartitionLog
from walstream.log.store import LogStore
from walstream.node.cluster_placement import ClusterPlacement, leader_of, min_isr_of
from walstream.node.driver import Replica
from walstream.node.groups.service import GroupService
from walstream.node.offsets_log import OFFSETS_TOPIC, TOPIC_CONFIG
from walstream.node.peer_links import PeerLink
from walstream.node.peers import Peers
from walstream.node.placement import ANY_FACTOR
from walstream.node.telling import Telling
from walstream.node.turns import Turns
from walstream.node.version_1 import Copies, Pushing
from walstream.replication.events import LinkDown, LinkUp, MetadataChanged, Received
from walstream.replication.leader import Leader
from walstream.replication.manager import Manager
from walstream.replication.messages import Catalogue, CatalogueAck, Message
from walstream.replication.settings import CoreSettings, Mode
from walstream.replication.wire.link import Closed, Peer
from walstream.replication.wire.version_1 import PushedBatch

if TYPE_CHECKING:
    from walstream.replication.effects import Report

log = logs.get(__name__)

T = TypeVar("T")
Done = Callable[[T | None, Exception | None], None]

RETRY_MS = 5_000
"""How long a leader that resigned, because its log failed, waits before it tries to lead again."""
TELL_DELAY_S = 0.02
"""How long news for other nodes gather."""
RAISE_MS_MIN = 10_000
"""Between two epochs that a leader takes because a follower knows a newer one than it: two nodes that are both told
to lead must not race."""


class Replicas:
    """The replicas of a node that is one of several."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        store: LogStore,
        groups: GroupService,
        executor: Executor,
        turns: Turns,
    ) -> None:
        self.config = config.replication
        self.store = store
        self.node_id = store.catalogue.node_id
        self.replicas: dict[PartitionKey, Replica] = {}
        self.isr_changes: Counter[str] = Counter()
        """How often the ISR of a partition that this node leads has grown, and how often it has shrunk."""
        self._groups = groups
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._settings = _core_settings(self.config)
        self._raised_ms: dict[PartitionKey, int] = {}
        self._resigned_ms: dict[PartitionKey, int] = {}
        self._opening: set[PartitionKey] = set()
        self._topic_ids: set[UUID] = set()
        self._behind_catalogue: dict[PeerLink, list[Message | PushedBatch]] = {}
        """What came over a link behind a catalogue that is being made durable."""
        self._telling: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self.clock_ms = turns.clock_ms
        self.mark = turns.mark
        self.mark_link = turns.mark_link
        self.wake_at = self.wake_link_at = turns.wake_at
        self.post = turns.post
        self._saver = ThreadPoolExecutor(1, "walstream-metadata")
        self.metadata = StaticCluster(store.disk, folder, self.node_id, store.now_ms(), self._run_saving)
        self.telling = Telling(self.config, store, self._node_joined)
        self.links = Peers(self, self.config, self.node_id, self.metadata.incarnation, store.catalogue.cluster_id)
        self.placement = ClusterPlacement(self)
        groups.check_in_sync = self.placement.check_in_sync
        groups.reported_version = lambda: self.telling.newest_report
        self._pushing = Pushing(self, self.config.max_queue_size)
        self._copies = Copies(self)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Take epochs for what this node leads, begin all cores, listen and dial."""
        self.store.catalogue.changed = self._catalogue_changed
        self._groups.resign(NotCoordinator("Another node keeps the groups."))
        self._assign_replicas()
        self._topics_changed()
        self._make_internal_topics()
        await self.links.listen()
        self._dial()

    def stop(self) -> None:
        """End all links and let no core do anything more."""
        self._is_stopped = True
        self.links.stop()
        for replica in self.replicas.values():
            replica.close()
        if self._telling is not None:
            self._telling.cancel()
        self._saver.shutdown(wait=False)

    def _assign_replicas(self) -> None:
        """Give replicas to topics of a node that was alone until now: its own copy is the first."""
        if not self.telling.is_controller:
            return
        catalogue = self.store.catalogue
        for topic in [topic for topic in catalogue.topics.values() if not topic.replicas]:
            wanted = self.config.replicas_of(topic.name, self.config.replication_factor)
            catalogue.apply(catalogue.place(topic.name, wanted if wanted[0] == self.node_id else (self.node_id,)))

    def _dial(self) -> None:
        """Keep links with everybody as soon as this node has something to say."""
        leads = any(leader_of(self.config, topic) == self.node_id for topic in self.store.catalogue.topics.values())
        if self.store.catalogue.cluster_id and (leads or self.telling.is_controller):
            self.links.dial(node for node in self.config.nodes if node.id != self.node_id)

    def tick(self) -> None:
        """Do what is due about once a second."""
        self.metadata.tick()
        now_ms = self.clock_ms()
        for key, resigned_ms in list(self._resigned_ms.items()):
            replica = self.replicas.get(key)
            if replica is None or replica.is_closed or replica.partition.is_leader:
                del self._resigned_ms[key]
            elif now_ms - resigned_ms >= RETRY_MS and replica.partition.write_error is None:
                self._resigned_ms[key] = now_ms
                self.metadata.lead_again(key, replica.partition.leader_epoch)

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _catalogue_changed(self) -> None:
        self._loop.call_soon(self._topics_changed)  # When the log has the partitions, too.

    def _topics_changed(self) -> None:
        """Have a core for each partition that this node holds, and none for others."""
        if self._is_stopped:
            return
        held = {
            partition.key: partition
            for partition in self.store.partitions.values()
            if self.node_id in self._topic_of(partition).replicas
        }
        gone = [key for key in self.replicas if key not in held]
        for key in gone:
            self.replicas.pop(key).close()
        self.metadata.forget(gone)
        self._forget_deleted()
        self._tell()  # Before anything is said about the new partitions.
        new = [one for key, one in held.items() if key not in self.replicas and key not in self._opening]
        self._opening |= {partition.key for partition in new}
        self.metadata.open(map(self._found, new), partial(self._opened, new))
        for key, partition in held.items():
            self.metadata.set_min_isr(key, min_isr_of(self._topic_of(partition), partition.settings))
        self._dial()
        self.tell_soon()

    def _forget_deleted(self) -> None:
        """Drop what is kept by topic, beside the replicas, for topics that were deleted."""
        current = set(self.store.catalogue.by_id)
        deleted, self._topic_ids = self._topic_ids - current, current
        self.telling.forget_deleted_topics()
        if deleted:
            self._raised_ms = {key: ms for key, ms in self._raised_ms.items() if key[0] not in deleted}
            self._pushing.forget_topics(deleted)

    def _topic_of(self, partition: PartitionLog) -> Topic:
        return self.store.catalogue.topics[partition.topic]

    def _opened(self, new: list[PartitionLog], error: Exception | None) -> None:
        """Begin with partitions whose epochs are durable, as far as they are still there."""
        self._opening -= {partition.key for partition in new}
        if error is not None:
            log.error("new epochs were not saved", partitions=len(new), error=str(error))
            self.metadata.forget(partition.key for partition in new)
            self._loop.call_later(RETRY_MS / 1000, self._topics_changed)
            return
        for partition in new:
            if self.store.partitions.get((partition.topic, partition.index)) is partition and not self._is_stopped:
                self._begin(partition)
            else:
                self.metadata.forget([partition.key])  # Deleted meanwhile.

    def _found(self, partition: PartitionLog) -> Opening:
        topic = self._topic_of(partition)
        # A new disk holds nothing of a partition that was there before it, whatever its empty log looks like.
        if self.store.catalogue.is_older_than_disk(topic, partition.index) and partition.leader_epoch < 0:
            partition.is_unclean = True
        return Opening(
            partition.key,
            tuple(topic.replicas),
            leader_of(self.config, topic),
            min_isr_of(topic, partition.settings),
            partition.leader_epoch,
            partition.is_unclean,
        )

    def _begin(self, partition: PartitionLog) -> None:
        me = Member(self.node_id, self.metadata.incarnation)
        replica = Replica(self, partition, Manager(partition.key, me, partition, self._settings))
        self.replicas[partition.key] = replica
        for links, is_outgoing in ((self.links.outgoing, True), (self.links.incoming, False)):
            for peer, link in links.items():
                if link.peer is not None and link.peer.version > 1:
                    replica.feed(LinkUp(peer, link.peer.incarnation, is_outgoing))
        replica.start(None)
        self.metadata.watch(partition.key, partial(self._state_changed, replica))

    def _state_changed(self, replica: Replica, state: PartitionState) -> None:
        replica.feed(MetadataChanged(state))
        self.tell_soon()

    def _make_internal_topics(self) -> None:
        """Let the controller make the topic of the groups' offsets, once its leader is there."""
        catalogue = self.store.catalogue

        def plan() -> Change | None:
            leader = self.config.leader_of(OFFSETS_TOPIC)
            if OFFSETS_TOPIC in catalogue.topics or (leader != self.node_id and leader not in catalogue.joined):
                return None
            replicas = self.placement.replicas_for(OFFSETS_TOPIC, ANY_FACTOR)
            return catalogue.create([NewTopic(OFFSETS_TOPIC, 1, TOPIC_CONFIG, replicas)])

        def made(_: Change | None, error: Exception | None) -> None:
            if error is not None:
                log.error("offsets topic not created", error=str(error))
                if not self._is_stopped:
                    self._loop.call_later(RETRY_MS / 1000, self._make_internal_topics)

        if self.telling.is_controller:
            self.store.changes.submit(plan, made)

    def _node_joined(self) -> None:
        self.links.join(self.store.catalogue.cluster_id)
        self._make_internal_topics()

    def state(self, key: PartitionKey) -> PartitionState | None:
        """Return the record of a partition: the one its leader goes by, which knows what is granted and durable."""
        replica = self.replicas.get(key)
        role = replica.manager.role if replica is not None else None
        return role.isr.state if isinstance(role, Leader) else self.metadata.state(key)

    def tell_soon(self) -> None:
        """Tell the other nodes what has changed, when more of it has gathered."""
        if self._telling is None and not self._is_stopped:
            self._telling = self._loop.call_later(TELL_DELAY_S, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self.telling.leads((key, state) for key in self.replicas if (state := self.state(key)) is not None)
        self.telling.tell(link for link in self.links.outgoing.values() if link.peer and link.peer.version > 1)

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def link_opened(self, link: PeerLink, peer: Peer) -> None:
        """Hear that a link is up, and tell every core."""
        before = self.links.opened(link, peer)
        if before is not None:
            self._tell_down(peer.node_id, link.is_outgoing)
            before.fail(ConnectionLost("A newer link takes the place of this one."))
        if peer.version == 1:
            self.telling.acknowledged(link)  # It cannot be told, so that it is there has to do.
            if link.is_outgoing:
                self._pushing.begin(link, peer.node_id)
            return
        if link.is_outgoing:
            self._tell()  # First the topics, then what is said about their partitions.
        for replica in tuple(self.replicas.values()):
            replica.feed(LinkUp(peer.node_id, peer.incarnation, link.is_outgoing))

    def link_closed(self, link: PeerLink, closed: Closed) -> None:
        """Hear that a link has ended."""
        self.telling.forget(link)
        self._behind_catalogue.pop(link, None)
        self._pushing.end(link)
        if self.links.closed(link, closed) and link.peer is not None and link.peer.version > 1:
            self._tell_down(link.peer.node_id, link.is_outgoing)

    def _tell_down(self, peer: NodeId, is_outgoing: bool) -> None:
        for replica in tuple(self.replicas.values()):
            replica.feed(LinkDown(peer, is_outgoing))

    def link_delivered(self, link: PeerLink, messages: list[Message | PushedBatch]) -> None:
        """Dispatch messages of a link up to a catalogue that is not durable yet; those behind it wait."""
        assert link.peer is not None
        peer, is_outgoing, replicas = link.peer.node_id, link.is_outgoing, self.replicas
        if link in self._behind_catalogue:
            self._behind_catalogue[link] += messages
            self.telling.noticed(messages)
            return
        for number, message in enumerate(messages, start=1):
            match message:
                case Catalogue():
                    self._behind_catalogue[link] = messages[number:]
                    # A read may bring hundreds of catalogues that need no write: they are taken in this loop.
                    if not self._take_catalogue(link, message):
                        self.telling.noticed(messages[number:])
                        return
                    if self._behind_catalogue.pop(link, None) is None:
                        return  # The link was closed.
                case CatalogueAck():
                    self.telling.acknowledged(link)
                case PushedBatch():
                    self._copies.take(link, peer, message)
                case _:
                    replica = replicas.get(message.partition)  # type: ignore[union-attr]
                    if replica is not None and not replica.is_closed:
                        replica.feed(Received(peer, message, is_outgoing))  # type: ignore[arg-type]
                    else:
                        link.refuse_unknown(message)  # type: ignore[arg-type]

    def _take_catalogue(self, link: PeerLink, message: Catalogue) -> bool:
        """Return whether a catalogue was taken at once; otherwise the messages behind it are dispatched later."""
        version = self.store.catalogue.version
        is_taken = is_deferred = False

        def taken() -> None:
            nonlocal is_taken
            is_taken = True
            if self.store.catalogue.version != version:
                self._topics_changed()  # The messages behind it may be about new partitions.
            if is_deferred and (waiting := self._behind_catalogue.pop(link, None)):
                self.link_delivered(link, waiting)

        self.telling.heard(link, message, taken)
        is_deferred = not is_taken
        return is_taken

    # ── what peers of version 1 need ─────────────────────────────────────────────────────────────────────────────

    def led_for(self, follower: NodeId) -> Iterator[PartitionLog]:
        """Return the partitions that this node leads and that node holds."""
        for replica in self.replicas.values():
            if replica.partition.is_leader and follower in self._topic_of(replica.partition).replicas:
                yield replica.partition

    def copy_of(self, topic: str, index: int, leader: NodeId) -> PartitionLog | None:
        """Return this node's copy of a partition that the configuration gives to that leader."""
        partition = self.store.partitions.get((topic, index))
        if partition is None or partition.key not in self.replicas or partition.is_leader:
            return None
        return partition if leader_of(self.config, self._topic_of(partition)) == leader else None

    def now_ms(self) -> int:
        """Return the time that goes into the log."""
        return self.store.now_ms()

    # ── what a core needs ────────────────────────────────────────────────────────────────────────────────────────

    def run_blocking(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run what waits for the disk on a thread, then call back on the loop."""
        self._run(self._executor, job, done)

    def _run_saving(self, job: Callable[[], None], done: Callable[[Exception | None], None]) -> None:
        self._run(self._saver, job, lambda _, error: done(error))

    def _run(
        self, executor: Executor, job: Callable[[], T], done: Callable[[T | None, Exception | None], None]
    ) -> None:
        def work() -> None:
            try:
                result = job()
            except Exception as error:
                self.post(lambda error=error: done(None, error))  # type: ignore[misc]
            else:
                self.post(lambda: done(result, None))

        if not self._is_stopped:
            executor.submit(work)

    def refresh(self, replica: Replica, epoch: int) -> None:
        """Read a record again, because somebody knows a newer epoch; a configured leader takes one above it."""
        state = self.metadata.state(replica.key)
        now_ms = self.clock_ms()
        is_mine = state is not None and state.leader == self.node_id and state.epoch <= epoch
        if is_mine and now_ms - self._raised_ms.get(replica.key, -RAISE_MS_MIN) >= RAISE_MS_MIN:
            self._raised_ms[replica.key] = now_ms
            log.warning("a follower knows a newer epoch", partition=replica.partition.name, epoch=epoch)
            self.metadata.lead_again(replica.key, epoch)
        elif is_mine:
            self._resigned_ms.setdefault(replica.key, now_ms)
        elif state is not None:
            replica.feed(MetadataChanged(state))

    def came_back(self, replica: Replica) -> None:
        """Hear that a log takes writes again: its leader begins anew."""
        self.metadata.lead_again(replica.key, replica.partition.leader_epoch)

    def role_changed(self, replica: Replica) -> None:
        """Hear that the replica leads, or does not lead any more."""
        partition = replica.partition
        state = self.metadata.state(replica.key)
        if state is not None and state.last_leader == self.node_id and not partition.is_leader:
            self._resigned_ms.setdefault(replica.key, self.clock_ms())
        if partition.topic == OFFSETS_TOPIC:
            if partition.is_leader:
                self._groups.lead()
            else:
                self._groups.resign(NotCoordinator("Another node keeps the groups."))

    def replica_failed(self, replica: Replica, error: Exception) -> None:  # noqa: ARG002 - the protocol's signature
        """Resign for a replica that has failed."""
        self.metadata.retire(replica.key)
        self.role_changed(replica)
        self.tell_soon()

    def reported(self, replica: Replica, report: Report) -> None:  # noqa: ARG002 - the protocol's signature
        """Count what the core reports."""
        if report.phrase == "isr changed":
            fields = dict(report.fields)
            before, after = (set(str(fields[name]).split(",")) for name in ("before", "after"))
            self.isr_changes["expand"] += bool(after - before)
            self.isr_changes["shrink"] += bool(before - after)
            self.tell_soon()


def _core_settings(config: ReplicationConfig) -> CoreSettings:
    return CoreSettings(
        isr_lag_ms_max=config.isr_lag_ms_max,
        isr_lag_records_max=config.isr_lag_records_max,
        mode=Mode(config.mode),
        sync_followers=config.sync_followers,
    )
