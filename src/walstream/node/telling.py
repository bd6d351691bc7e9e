"""What the nodes of a static cluster tell each other beside data: topics, and who is in sync.

The controller sends its catalogue to every node, after the handshake and at each change; they make it durable before
they acknowledge it, and have the topics that it says. Every leader tells epoch and in-sync replicas of what it leads,
so that each node can answer clients who ask. Both travel as CATALOGUE.

Who may change what: only the configured controller's topics are taken, never an older version than the own, and a node
that belongs to no cluster joins the controller's with the first catalogue it gets. A node that has once acknowledged a
catalogue is noted by the controller, because only such a node can be given partitions to lead: one that then finds
partitions older than its own folder knows that its disk was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from walstream import logs
from walstream.cluster.static import Told, decode_told, encode_told
from walstream.errors import LinkRefused, WalstreamError
from walstream.log.checkpoint import key_text
from walstream.replication.messages import Catalogue, CatalogueAck

if TYPE_CHECKING:
    from walstream.cluster.local import Change, Topic
    from walstream.cluster.metadata import NodeId, PartitionKey, PartitionState
    from walstream.config import ReplicationConfig
    from walstream.log.store import LogStore
    from walstream.node.peer_links import PeerLink

log = logs.get(__name__)


class Telling:
    """What this node tells, and what it was told."""

    def __init__(self, config: ReplicationConfig, store: LogStore, joined: Callable[[], None]) -> None:
        """`joined` is called when this node has become part of a cluster, or another node has."""
        self._config = config
        self._store = store
        self._catalogue = store.catalogue
        self._joined = joined
        self._in_sync: dict[str, tuple[int, list[int]]] = {}
        self.newest_report = 0
        """The newest version of the catalogue that another node had when it reported; perhaps not in force here yet."""
        self._leading: dict[str, tuple[int, list[int]]] = {}
        self._told: dict[PeerLink, tuple[int, dict[str, tuple[int, list[int]]]]] = {}
        """Per link, the version and the records that were sent."""

    @property
    def is_controller(self) -> bool:
        """Whether this node changes topics."""
        return self._config.controller == self._catalogue.node_id

    # ── telling ──────────────────────────────────────────────────────────────────────────────────────────────────

    def leads(self, states: Iterable[tuple[PartitionKey, PartitionState]]) -> None:
        """Note what this node leads now, all of it."""
        self._leading = {
            key_text(key): (state.epoch, sorted(state.isr_nodes))
            for key, state in states
            if state.leader == self._catalogue.node_id
        }

    def tell(self, links: Iterable[PeerLink]) -> None:
        """Tell the followers what is news to them."""
        for link in links:
            version, records = self._told.get(link, (-1, {}))
            topics = None
            if self.is_controller and version != self._catalogue.version:
                version, topics = self._catalogue.version, list(self._catalogue.topics.values())
            news = {name: record for name, record in self._leading.items() if records.get(name) != record}
            if topics is not None or news:
                link.send(Catalogue(self._catalogue.version, encode_told(Told(topics, news))))
                self._told[link] = (version, self._leading)

    def forget(self, link: PeerLink) -> None:
        """A link is down."""
        self._told.pop(link, None)

    def acknowledged(self, link: PeerLink) -> None:
        """A node has the catalogue."""
        assert link.peer is not None
        peer = link.peer.node_id
        if not self.is_controller or peer in self._catalogue.joined:
            return

        def noted(change: Change | None, error: Exception | None) -> None:
            if error is not None:
                log.error("node join not saved", peer=peer, error=str(error))
                link.fail(LinkRefused(f"topics.json was not saved with node {peer} as a member: {error}."))
            elif change is not None:
                log.info("a node has joined", peer=peer)
                self._joined()

        self._store.changes.submit(partial(self._catalogue.note_joined, peer), noted)

    # ── being told ───────────────────────────────────────────────────────────────────────────────────────────────

    def noticed(self, messages: Iterable[object]) -> None:
        """Note the versions of catalogues that have arrived and wait to be taken."""
        versions = (message.version for message in messages if isinstance(message, Catalogue))
        self.newest_report = max(self.newest_report, *versions, 0)

    def heard(self, link: PeerLink, message: Catalogue, done: Callable[[], None]) -> None:
        """Take what a leader says, and acknowledge it once it is durable; a wrong one is refused. `done` either way."""
        assert link.peer is not None
        peer, cluster_id = link.peer.node_id, link.peer.cluster_id
        self.noticed((message,))

        def take(told: Told, change: Change | None, error: Exception | None) -> None:
            if error is not None:
                log.error("a catalogue was refused", peer=peer, error=str(error))
                # The controller tells it again to a link that is new.
                is_known = isinstance(error, WalstreamError)
                refusal = error if is_known else LinkRefused(f"The controller's catalogue was not saved: {error}.")
                link.fail(refusal)  # type: ignore[arg-type]
            else:
                if change is not None and change.meta is not None:
                    log.info("joined the cluster", cluster_id=cluster_id, controller=peer, topics=len(change.topics))
                    self._joined()
                self._reported(message.version, told.leading)
                if not link.is_closed:
                    link.send(CatalogueAck(message.version))
            done()

        def taken(told: Told, change: Change | None, error: Exception | None) -> None:
            try:
                take(told, change, error)
            except Exception as failure:
                # `done` may not have been called, and the messages behind the catalogue would wait for it for ever.
                log.exception("catalogue not handled", peer=peer)
                link.fail(LinkRefused(f"The catalogue was not handled: {failure!r}."))

        try:
            told = decode_told(message.body)
        except WalstreamError as error:
            taken(Told(), None, error)
            return
        if told.topics is None:
            taken(told, None, None)
        else:
            plan = partial(self._plan, peer, cluster_id, message.version, told.topics)
            self._store.changes.submit(plan, partial(taken, told))

    def _plan(self, peer: NodeId, cluster_id: str, version: int, topics: list[Topic]) -> Change | None:
        """Plan to take over the controller's catalogue, and to join its cluster if this node belongs to none."""
        catalogue = self._catalogue
        if peer != self._config.controller:
            raise LinkRefused(
                f"Node {peer} sends topics, and node {self._config.controller} is the controller here.",
                "Give all nodes the same replication.controller_id.",
            )
        if version < catalogue.version:
            raise LinkRefused(
                f"The controller's catalogue has version {version}; this node has had {catalogue.version} from it.",
                "The controller has lost what it knew: give it back its data folder.",
            )
        change = catalogue.take_over(version, topics) if version > catalogue.version else None
        if catalogue.cluster_id:
            return change
        joining = catalogue.join(cluster_id, version)
        return joining if change is None else replace(change, meta=joining.meta)

    def _reported(self, version: int, leading: dict[str, tuple[int, list[int]]]) -> None:
        """Keep what a leader reports that has this version of the catalogue."""
        if version > self._catalogue.version:
            self._in_sync |= leading  # Perhaps about topics that this node does not have yet.
        else:
            self._in_sync |= self._of_topics(leading)

    def forget_deleted_topics(self) -> None:
        """Drop what leaders have reported about topics that were deleted."""
        if self.newest_report <= self._catalogue.version:
            self._in_sync = self._of_topics(self._in_sync)

    def _of_topics(self, leading: dict[str, tuple[int, list[int]]]) -> dict[str, tuple[int, list[int]]]:
        topics = self._catalogue.by_id
        return {name: record for name, record in leading.items() if UUID(name[:36]) in topics}

    def in_sync(self, key: PartitionKey) -> tuple[int, list[int]] | None:
        """Return epoch and in-sync replicas as the partition's leader last told them."""
        return self._in_sync.get(key_text(key))
