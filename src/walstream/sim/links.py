"""A simulated node's connections: the real links and their shell over simulated lines.

Dials every other node, because any may have to be pushed to, takes those that dial, and is the `Links` of the node's
replicas and the `Host` of `node.peer_links.PeerLink`: so what encodes, waits for credit and decodes here is what does
so in a real node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from walstream.errors import CreditExceeded, PeerFailed
from walstream.log.disk import Buffer
from walstream.node.lines import FileRange
from walstream.node.peer_links import PeerLink
from walstream.replication.effects import SendData
from walstream.replication.events import LinkDown, LinkUp, Received
from walstream.replication.messages import LinkMessage, Message, PartitionMessage
from walstream.replication.wire.follower_link import FollowerLink
from walstream.replication.wire.leader_link import LeaderLink
from walstream.replication.wire.link import Closed, LinkSettings, Peer
from walstream.replication.wire.version_1 import PushedBatch
from walstream.sim.checkers import Violation
from walstream.sim.clock import MS, Timer
from walstream.sim.network import Endpoint

if TYPE_CHECKING:
    from walstream.node.driver import Replica
    from walstream.sim.node import SimNode

T = TypeVar("T")

RECONNECT_US = (50 * MS, 700 * MS)


class SimLine:
    """A simulated connection, as a link uses it. What is written at once is one frame of the network's."""

    can_send_files = False
    unsent_bytes = 0

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.peer = f"n{endpoint.remote}"

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers."""
        self.endpoint.send(b"".join(buffers))

    def send_file(self, part: FileRange) -> None:
        """Refuse: there are no real files here."""
        raise AssertionError(f"{part} was not asked for")

    def close(self) -> None:
        """Close."""
        self.endpoint.close()


class SimLinks:
    """The links of one life of a node."""

    def __init__(self, node: SimNode, cluster_id: str) -> None:
        self._node = node
        self._clock = node.clock
        self._network = node.cluster.network
        self._settings = LinkSettings(
            node.id, cluster_id, node.life, handshake_timeout_ms=2_000, heartbeat_interval_ms=1_500,
            heartbeat_timeout_ms=5_000, credit_bytes=node.cluster.scenario.window_bytes, frame_bytes_max=64_000,
        )  # fmt: skip
        self._links: list[PeerLink] = []
        self._up: dict[tuple[int, bool], PeerLink] = {}
        """(peer, whether this node dialled) → its link."""
        self._timers: dict[PeerLink, Timer] = {}
        self._is_over = False

    # ── connecting ───────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Listen, and dial everybody."""
        self._network.listen(self._node.id, lambda endpoint: self._node.run(partial(self._accept, endpoint)))
        for peer in self._node.cluster.nodes:
            if peer.id != self._node.id:
                self._dial(peer.id)

    def stop(self) -> None:
        """The process ends: nobody listens any more, and the other sides find out by themselves."""
        self._is_over = True
        self._network.silence(self._node.id)
        for link in self._links:
            _endpoint(link).vanish()
        for timer in self._timers.values():
            timer.cancel()

    def _dial(self, peer: int) -> None:
        if not self._is_over:
            self._network.connect(self._node.id, peer, lambda end: self._node.run(partial(self._dialled, peer, end)))

    def _dialled(self, peer: int, endpoint: Endpoint | None) -> None:
        if self._is_over:
            if endpoint is not None:
                endpoint.vanish()
        elif endpoint is None:
            self._dial_later(peer)
        else:
            link = LeaderLink(self._settings, peer, self._nonce(), self.clock_ms())
            self._take(endpoint, link, is_outgoing=True).do(link.start())

    def _dial_later(self, peer: int) -> None:
        delay_us = self._clock.between(*RECONNECT_US)
        self._clock.after(delay_us, lambda: self._node.run(partial(self._dial, peer)))

    def _accept(self, endpoint: Endpoint) -> None:
        self._take(endpoint, FollowerLink(self._settings, self._nonce(), self.clock_ms()), is_outgoing=False)

    def _take(self, endpoint: Endpoint, machine: LeaderLink | FollowerLink, *, is_outgoing: bool) -> PeerLink:
        link = PeerLink(self, machine, is_outgoing=is_outgoing)
        self._links.append(link)
        run = self._node.run
        endpoint.received = lambda data: run(lambda: link.do(machine.feed(data, self.clock_ms())))
        endpoint.heard_closed = lambda: run(partial(link.lost, "the peer has closed it"))
        link.begin(SimLine(endpoint))
        return link

    def _nonce(self) -> bytes:
        return self._clock.between(0, 2**62).to_bytes(32, "big")

    # ── what a link needs of its host ────────────────────────────────────────────────────────────────────────────

    def clock_ms(self) -> int:
        """Return the time that links go by."""
        return self._clock.now_us // MS

    def mark_link(self, link: PeerLink) -> None:
        """See to it that the link is served in this turn, once."""
        self._node.marks.mark_link(link)

    def wake_link_at(self, link: PeerLink, deadline_ms: int) -> None:
        """See to it that the link's `tick` is called at that time."""
        timer = self._timers.get(link)
        if timer is not None:
            timer.cancel()
        link.wake_ms = deadline_ms

        def tick() -> None:
            link.wake_ms = 1 << 62
            link.tick()

        self._timers[link] = self._clock.after(deadline_ms * MS - self._clock.now_us, partial(self._node.run, tick))

    def run_blocking(self, job: Callable[[], T], done: Callable[[T | None, Exception | None], None]) -> None:
        """Run what waits for the disk beside the loop."""
        self._node.run_blocking(job, done)

    def link_opened(self, link: PeerLink, peer: Peer) -> None:
        """A link is up: it takes the place of an older one, and the replicas hear of it."""
        key = (peer.node_id, link.is_outgoing)
        old = self._up.get(key)
        if old is not None:
            old.fail(PeerFailed("Another link has taken its place."))
        self._up[key] = link
        for copy in list(self._node.copies.values()):
            copy.replica.feed(LinkUp(peer.node_id, peer.incarnation, link.is_outgoing))

    def introduce(self, replica: Replica) -> None:
        """Tell a replica that is new of the links that are up."""
        for (peer, is_outgoing), link in self._up.items():
            assert link.peer is not None
            replica.feed(LinkUp(peer, link.peer.incarnation, is_outgoing))

    def link_closed(self, link: PeerLink, closed: Closed) -> None:
        """A link has ended."""
        remote = _endpoint(link).remote
        if isinstance(closed.error, CreditExceeded):
            raise Violation("credit", f"node {self._node.id}, from {remote}: {closed.error}")
        trace = self._node.cluster.trace
        if trace.is_on:
            side = "to" if link.is_outgoing else "from"
            trace(f"n{self._node.id}", f"link {side} n{remote} closed: {closed.error.message}")
        timer = self._timers.pop(link, None)
        if timer is not None:
            timer.cancel()
        self._links.remove(link)
        if self._up.get((remote, link.is_outgoing)) is link:
            del self._up[remote, link.is_outgoing]
            for copy in list(self._node.copies.values()):
                copy.replica.feed(LinkDown(remote, link.is_outgoing))
        if link.is_outgoing:
            self._dial_later(remote)

    def link_delivered(self, link: PeerLink, messages: list[Message | PushedBatch]) -> None:
        """Hand what came to the replicas."""
        assert link.peer is not None
        trace, peer = self._node.cluster.trace, link.peer.node_id
        for message in messages:
            if trace.is_on:
                trace(f"n{self._node.id}", f"from n{peer} {_line(message)}")
            if isinstance(message, LinkMessage | PushedBatch):
                continue
            copy = self._node.copies.get(message.partition)
            if copy is not None:
                copy.replica.feed(Received(peer, message, link.is_outgoing))
            else:
                link.refuse_unknown(message)

    # ── what replicas ask for ────────────────────────────────────────────────────────────────────────────────────

    def send(self, peer: int, message: PartitionMessage, *, is_outgoing: bool) -> None:
        """Put a message on a link, if there is one."""
        link = self._up.get((peer, is_outgoing))
        if link is not None:
            link.send(message)

    def send_data(self, replica: Replica, request: SendData) -> None:
        """Send a DATA frame when the link has credit for one."""
        link = self._up.get((request.peer, True))
        if link is not None:
            link.send_data(replica, request)

    def stop_data(self, replica: Replica) -> None:
        """Forget what waits to be sent for a replica."""
        for link in self._up.values():
            link.stop_data(replica)

    def return_credit(self, peer: int, bytes_count: int) -> None:
        """Let a leader send this much more."""
        link = self._up.get((peer, False))
        if link is not None:
            link.released(bytes_count)


def _endpoint(link: PeerLink) -> Endpoint:
    assert isinstance(link.line, SimLine)
    return link.line.endpoint


def _line(message: object) -> str:
    """Say a message in one short line, without the partition's id and the bytes of its batches."""
    fields = []
    for name in getattr(message, "__slots__", ()):
        value = getattr(message, name)
        if name == "partition":
            fields.append(f"p{value[1]}")
        elif name == "batches":
            fields.append(f"{sum(map(len, value))} bytes")
        elif isinstance(value, bytes):
            fields.append(f"{name}={value.hex()[:8]}")
        else:
            fields.append(f"{name}={value}")
    return f"{type(message).__name__} {' '.join(fields)}"
