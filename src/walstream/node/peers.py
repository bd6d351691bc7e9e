"""The other nodes of the cluster, over TCP: who is dialled, who is let in, and which links there are.

A node dials every other node when it leads something or is the controller, and keeps dialling; it takes links from
leaders at `replication.listen`. Between two nodes there is at most one link in each direction: a new one takes the
place of the old. Links are TLS with certificates on both sides, each that of the very node, or prove a shared secret,
or (on loopback, or where the operator wrote `allow_insecure`) neither.

Knows links and connections; what the messages mean is decided in `replicas.py`, what the bytes are in
`replication/wire`.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from walstream import logs
from walstream.config import ClusterNode, ReplicationConfig, SecurityConfig
from walstream.errors import ConfigError, ConnectionLost, UnreachableError
from walstream.log.disk import OUT_OF_FILES
from walstream.node.addresses import split_address
from walstream.node.lines import PlainLine, TlsLine
from walstream.node.peer_links import PeerLink
from walstream.node.security import Certificate, check_listener, names_host
from walstream.node.supervision import supervise
from walstream.ops.http import bound_port
from walstream.replication.wire import version_1
from walstream.replication.wire.authentication import NONCE_BYTES, Authentication
from walstream.replication.wire.data import PayloadCompression
from walstream.replication.wire.follower_link import FollowerLink
from walstream.replication.wire.frames import VERSION
from walstream.replication.wire.leader_link import LeaderLink
from walstream.replication.wire.link import Closed, LinkSettings, Peer
from walstream.replication.wire.redial import redial

if TYPE_CHECKING:
    from walstream.cluster.metadata import NodeId
    from walstream.node.driver import Replica
    from walstream.node.peer_links import Host as LinkHost
    from walstream.replication.effects import SendData
    from walstream.replication.messages import PartitionMessage

log = logs.get(__name__)

INCOMING_MAX = 64
"""Connections of leaders, and of strangers that have not shaken hands yet."""
FIRST_DELAY_MS = 100
BACKLOG = 64
ACCEPT_RETRY_S = 1.0
"""Until the next attempt when no more files can be opened, as in asyncio's own servers."""


class Host(Protocol):
    """What the peers need of the node; beside it, what their links need (`peer_links.Host`)."""

    @property
    def cluster_id(self) -> str:
        """Return the cluster that this node belongs to; empty: none yet."""


class Peers:
    """All links of this node. `driver.Links`."""

    def __init__(
        self, host: LinkHost, config: ReplicationConfig, node_id: NodeId, incarnation: int, cluster_id: str
    ) -> None:
        self.outgoing: dict[NodeId, PeerLink] = {}
        """Links that are up, to followers."""
        self.incoming: dict[NodeId, PeerLink] = {}
        """Links that are up, from leaders."""
        self.failures: dict[NodeId, str] = {}
        """Why the last attempt to have a link with a follower failed."""
        self.port = 0
        self._sent_bytes: Counter[tuple[NodeId, bool]] = Counter()
        self._host = host
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._all: set[PeerLink] = set()
        self._dialling: dict[NodeId, asyncio.Task[None]] = {}
        self._ended: dict[PeerLink, asyncio.Future[Closed]] = {}
        self._server: asyncio.Server | None = None
        self._listener: socket.socket | None = None
        host_name, _ = split_address(config.listen)
        _check_listener(host_name, config)
        self._server_tls, self._client_tls = _tls(config)
        self._settings = _link_settings(config, node_id, incarnation, cluster_id, is_tls=self._server_tls is not None)

    def join(self, cluster_id: str) -> None:
        """Belong to a cluster: new links say so."""
        self._settings = replace(self._settings, cluster_id=cluster_id)

    # ── listening ────────────────────────────────────────────────────────────────────────────────────────────────

    async def listen(self) -> None:
        """Take links from leaders."""
        host, port = split_address(self._config.listen)
        try:
            if self._server_tls is not None:
                self._server = await self._loop.create_server(
                    lambda: TlsLine(self._accept_tls),
                    host or None,
                    port,
                    backlog=BACKLOG,
                    ssl=self._server_tls,
                    ssl_handshake_timeout=self._config.handshake_timeout_ms / 1000,
                )
                self.port = bound_port(self._server)
                return
            self._listener = socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(
                f"The node cannot listen for leaders at {self._config.listen}: {reason}.", "Change replication.listen."
            ) from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._watch_listener()

    def _watch_listener(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                # The connection remains in the queue, and the loop would do nothing but come here.
                log.warning("links not accepted", error=error.strerror, retry_s=ACCEPT_RETRY_S)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(ACCEPT_RETRY_S, self._watch_listener)
            return
        link = self._make_incoming()
        if link is None:
            connected.close()
            return
        try:
            link.begin(PlainLine(connected, link, self._loop))
        except OSError:
            self._all.discard(link)
            connected.close()

    def _accept_tls(self, line: TlsLine) -> PeerLink | None:
        link = self._make_incoming(partial(_certifies, line.certificate, self._config.nodes))
        if link is not None:
            link.begin(line)
        return link

    def _make_incoming(self, certifies: Callable[[NodeId], bool] | None = None) -> PeerLink | None:
        if sum(not link.is_outgoing for link in self._all) >= INCOMING_MAX:
            log.warning("a link was refused: there are too many", links=len(self._all))
            return None
        now_ms = self._host.clock_ms()
        machine = FollowerLink(self._settings, secrets.token_bytes(NONCE_BYTES), now_ms, certifies)
        link = PeerLink(self._host, machine, is_outgoing=False)
        self._all.add(link)
        return link

    # ── dialling ─────────────────────────────────────────────────────────────────────────────────────────────────

    def dial(self, nodes: Iterable[ClusterNode]) -> None:
        """Keep links with these nodes from now on, to push to them."""
        for node in nodes:
            if node.id not in self._dialling:
                self._dialling[node.id] = supervise(f"dial node {node.id}", partial(self._keep, node))

    async def _keep(self, node: ClusterNode) -> None:
        version, delay_ms = VERSION, FIRST_DELAY_MS
        while True:
            began_ms = self._host.clock_ms()
            closed: Closed | None = None
            try:
                closed = await self._run(node, version)
                reason = str(closed.error)
            except (OSError, TimeoutError, UnreachableError) as error:
                reason = str(error) or type(error).__name__
            if self.failures.get(node.id) != reason:
                log.info("no link with a follower", follower=node.id, address=node.replication, reason=reason)
            self.failures[node.id] = reason
            if self._host.clock_ms() - began_ms > 2 * self._config.reconnect_delay_ms:
                delay_ms = FIRST_DELAY_MS  # It had been well for a while.
            again = redial(closed, random.random(), delay_ms, takes_version_1=self._settings.takes_version_1)
            version = again.version
            delay_ms = min(delay_ms * 2, self._config.reconnect_delay_ms)
            await asyncio.sleep(again.delay_ms / 1000)

    async def _run(self, node: ClusterNode, version: int) -> Closed:
        """Connect, and return how the link ended."""
        now_ms = self._host.clock_ms()
        machine = LeaderLink(self._settings, node.id, secrets.token_bytes(NONCE_BYTES), now_ms, version)
        link = PeerLink(self._host, machine, is_outgoing=True)
        ended: asyncio.Future[Closed] = self._loop.create_future()
        async with asyncio.timeout(self._config.handshake_timeout_ms / 1000):
            await self._connect(node, link)
        self._all.add(link)
        self._ended[link] = ended
        try:
            link.do(machine.start())
            return await ended
        finally:
            self._ended.pop(link, None)

    async def _connect(self, node: ClusterNode, link: PeerLink) -> None:
        host, port = split_address(node.replication)
        if self._client_tls is not None:
            _, line = await self._loop.create_connection(
                lambda: TlsLine(lambda _: link), host, port, ssl=self._client_tls, server_hostname=host
            )
            link.begin(line)
            return
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            await self._loop.sock_connect(connecting, address)
            link.begin(PlainLine(connecting, link, self._loop))
        except BaseException:
            connecting.close()
            raise

    # ── what becomes of links ────────────────────────────────────────────────────────────────────────────────────

    def opened(self, link: PeerLink, peer: Peer) -> PeerLink | None:
        """Keep a link that is up; return the one whose place it takes, to be told as down first."""
        links = self.outgoing if link.is_outgoing else self.incoming
        before = links.get(peer.node_id)
        links[peer.node_id] = link
        if link.is_outgoing:
            self.failures.pop(peer.node_id, None)
        log.info(
            "link up", peer=peer.node_id, address=link.address, outgoing=link.is_outgoing, version=peer.version,
            incarnation=peer.incarnation,
        )  # fmt: skip
        return before

    def closed(self, link: PeerLink, closed: Closed) -> bool:
        """Let go of a link; say whether it was one that others counted on."""
        self._all.discard(link)
        ended = self._ended.get(link)
        if ended is not None and not ended.done():
            ended.set_result(closed)
        links = self.outgoing if link.is_outgoing else self.incoming
        peer = link.peer
        was_known = peer is not None and links.get(peer.node_id) is link
        if peer is not None:
            self._sent_bytes[peer.node_id, link.is_outgoing] += link.sent_bytes
            if was_known:
                del links[peer.node_id]
        if peer is not None or not link.is_outgoing:
            log.info(
                "link down", peer=peer.node_id if peer else None, address=link.address, outgoing=link.is_outgoing,
                reason=str(closed.error),
            )  # fmt: skip
        return was_known

    def sent_bytes(self) -> Counter[tuple[NodeId, bool]]:
        """Return the bytes sent since the start, by peer and by whether this node dialled."""
        total = Counter(self._sent_bytes)
        for links in (self.outgoing, self.incoming):
            for node_id, link in links.items():
                total[node_id, link.is_outgoing] += link.sent_bytes
        return total

    def stop(self) -> None:
        """End all links, and tell the peers why."""
        for task in self._dialling.values():
            task.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._server is not None:
            self._server.close()
        for link in tuple(self._all):
            link.fail(ConnectionLost("The node stops."))

    # ── for the replicas ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, peer: NodeId, message: PartitionMessage, *, is_outgoing: bool) -> None:
        """Put a message on a link, if there is one."""
        link = (self.outgoing if is_outgoing else self.incoming).get(peer)
        if link is not None:
            link.send(message)

    def send_data(self, replica: Replica, request: SendData) -> None:
        """Send a DATA frame when the link has room and credit for one."""
        link = self.outgoing.get(request.peer)
        if link is not None:
            link.send_data(replica, request)

    def stop_data(self, replica: Replica) -> None:
        """Forget what waits to be sent for a replica."""
        for link in self.outgoing.values():
            link.stop_data(replica)

    def return_credit(self, peer: NodeId, bytes_count: int) -> None:
        """Let a leader send this much more."""
        link = self.incoming.get(peer)
        if link is not None:
            link.released(bytes_count)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _check_listener(host: str, config: ReplicationConfig) -> None:
    """Refuse to listen where strangers are, unless they are asked who they are."""
    if config.secret_env or config.tls_certificate or config.allow_insecure:
        return
    try:
        check_listener(host, SecurityConfig())
    except ConfigError:
        raise ConfigError(
            f"Listening for leaders at {host or 'every address'} would let strangers write to the log: [replication] "
            "lacks secret_env, or tls_certificate, tls_key and tls_ca.",
            "Set them, or listen at 127.0.0.1; allow_insecure = true in [replication] lets everybody in.",
        ) from None


def _link_settings(
    config: ReplicationConfig, node_id: NodeId, incarnation: int, cluster_id: str, *, is_tls: bool
) -> LinkSettings:
    secret = os.environ.get(config.secret_env, "").encode() if config.secret_env else b""
    if config.secret_env and not secret:
        raise ConfigError(
            f"replication.secret_env names {config.secret_env}, and there is no such environment variable.",
            "Give it the secret that all nodes of the cluster share.",
        )
    # Certificates prove more than a secret does, so with both the secret is one more thing to know.
    kind = Authentication.SECRET if secret else Authentication.TLS if is_tls else Authentication.NONE
    return LinkSettings(
        node_id=node_id,
        cluster_id=cluster_id,
        incarnation=incarnation,
        mode=version_1.MODE_SYNC if config.mode == "sync" else version_1.MODE_ASYNC,
        authentication=kind,
        secret=secret,
        compression=PayloadCompression[config.compression.upper()],
        handshake_timeout_ms=config.handshake_timeout_ms,
        heartbeat_interval_ms=config.heartbeat_interval_ms,
        heartbeat_timeout_ms=config.heartbeat_timeout_ms,
        credit_bytes=config.credit_bytes,
        takes_version_1=config.version_1_fallback,
    )


def _tls(config: ReplicationConfig) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return what links are encrypted with, as the side that listens and as the one that dials."""
    if not config.tls_certificate:
        return None, None
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(config.tls_certificate, config.tls_key, password=_refuse_password)
            context.load_verify_locations(cafile=config.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"The files of replication.tls_certificate, tls_key and tls_ca are of no use: {error}.",
                "All are PEM files, and the key belongs to the first certificate of the chain.",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    return contexts[0], contexts[1]


def _certifies(certificate: Certificate, nodes: Iterable[ClusterNode], node_id: NodeId) -> bool:
    """Tell whether a certificate is that of a node: as when it is dialled, by the host of its address."""
    hosts = [split_address(node.replication)[0] for node in nodes if node.id == node_id]
    return any(names_host(certificate, host) for host in hosts)


def _refuse_password() -> str:
    # OpenSSL would otherwise ask at the terminal, where a service hangs for ever.
    raise ConfigError("replication.tls_key is encrypted.", "Give the node a key without a passphrase.")
