"""Whose certificates open a link between two nodes, in one event loop."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from node.certificates import Authority, Pair
from node.running import running_node
from walstream.node.peer_links import PeerLink
from walstream.node.peers import Peers
from walstream.node.server import Node
from walstream.processes import free_port
from walstream.replication.messages import Catalogue

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")

LEADER, FOLLOWER = "127.0.0.1", "127.0.0.2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> dict[str, Pair]:
    """The certificate of each of the two hosts."""
    return {host: authority.peer(host, f"IP:{host}") for host in (LEADER, FOLLOWER)}


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(what)


@asynccontextmanager
async def running_pair(folder: Path, authority: Authority, shown: dict[str, Pair]) -> AsyncIterator[list[Node]]:
    """Run a leader and its follower on hosts of their own, each with the certificate that it shows, if any."""
    ports = {LEADER: free_port(), FOLLOWER: free_port()}
    nodes = [
        {"id": number, "kafka": f"{host}:9092", "replication": f"{host}:{ports[host]}"}
        for number, host in enumerate(ports, 1)
    ]
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running_node(
                    folder / host,
                    node__node_id=number,
                    node__drain_timeout_ms=500,
                    replication__nodes=json.dumps(nodes),
                    replication__listen=f"{host}:{port}",
                    replication__reconnect_delay_ms=50,
                    **(tls_settings(authority, shown[host]) if shown else {"replication__allow_insecure": True}),
                )
            )
            for number, (host, port) in enumerate(ports.items(), 1)
        ]


def tls_settings(authority: Authority, pair: Pair) -> dict[str, object]:
    return {
        "replication__tls_certificate": pair.certificate,
        "replication__tls_key": pair.key,
        "replication__tls_ca": authority.certificate,
    }


def links(node: Node) -> Peers:
    assert node.replicas is not None
    return node.replicas.links


async def refused(leader: Node, follower: Node, reason: str) -> None:
    """Wait until an attempt has failed for this reason, and check that none succeeded."""
    await until(
        lambda: reason in links(leader).failures.get(2, "") or links(leader).outgoing or links(follower).incoming,
        f"a refusal that says: {reason}",
    )
    assert (links(leader).outgoing, links(follower).incoming) == ({}, {}), f"the link is up; expected: {reason}"


async def test_each_shows_the_certificate_of_its_own_host(
    tmp_path: Path, authority: Authority, own: dict[str, Pair]
) -> None:
    async with running_pair(tmp_path, authority, own) as (leader, follower):
        await until(lambda: links(leader).outgoing and links(follower).incoming, "the link is up")


@pytest.mark.parametrize("names", [f"IP:{LEADER}", f"DNS:{FOLLOWER}", "DNS:localhost", f"IP:{LEADER},IP:127.0.0.3"])
async def test_a_follower_with_the_certificate_of_another_host_is_refused(
    tmp_path: Path, authority: Authority, own: dict[str, Pair], names: str
) -> None:
    """The same authority signed it, but whoever has another node's key could be sent every record."""
    shown = own | {FOLLOWER: authority.peer("other", names)}
    async with running_pair(tmp_path, authority, shown) as (leader, follower):
        await refused(leader, follower, "certificate verify failed")


@pytest.mark.parametrize("names", [f"IP:{FOLLOWER}", f"DNS:{LEADER}", "DNS:localhost", f"IP:{FOLLOWER},IP:127.0.0.3"])
async def test_a_leader_with_the_certificate_of_another_host_is_refused(
    tmp_path: Path, authority: Authority, own: dict[str, Pair], names: str
) -> None:
    """Also with that of the follower's own host: what counts is the node that the leader says it is."""
    shown = own | {LEADER: authority.peer("other", names)}
    async with running_pair(tmp_path, authority, shown) as (leader, follower):
        await refused(leader, follower, "not that of node 1")


@pytest.mark.parametrize(
    ("host", "reason"), [(LEADER, "the peer has closed the connection"), (FOLLOWER, "certificate verify failed")]
)
async def test_a_certificate_of_another_authority_is_refused(
    tmp_path: Path, authority: Authority, own: dict[str, Pair], host: str, reason: str
) -> None:
    stranger = Authority(tmp_path / "stranger", "Another authority")
    shown = own | {host: stranger.peer(host, f"IP:{host}")}
    async with running_pair(tmp_path, authority, shown) as (leader, follower):
        await refused(leader, follower, reason)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_messages_that_cannot_be_handled_end_their_link(
    tmp_path: Path, authority: Authority, own: dict[str, Pair], monkeypatch: pytest.MonkeyPatch, is_tls: bool
) -> None:
    """What came with them is lost, so the link that goes on would be one with a gap."""
    async with running_pair(tmp_path, authority, own if is_tls else {}) as (leader, follower):
        await until(lambda: links(leader).outgoing and links(follower).incoming, "the link is up")
        assert follower.replicas is not None
        accepted, delivered = links(follower).incoming[1], follower.replicas.link_delivered

        def failing(link: PeerLink, messages: list[Any]) -> None:
            if link is accepted:
                raise RuntimeError("a bug")
            delivered(link, messages)

        monkeypatch.setattr(follower.replicas, "link_delivered", failing)
        links(leader).outgoing[2].send(Catalogue(0, b"{}"))
        await until(lambda: links(follower).incoming.get(1) not in (None, accepted), "another link is in its place")
        assert accepted.is_closed
        assert accepted not in links(follower)._all


def highest_descriptor() -> int:
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir())


async def test_a_listener_without_files_rests_and_then_accepts(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that cannot be accepted keeps the socket readable: the loop would call for it without end."""
    port, calls = free_port(), 0
    accept = Peers._accept

    def counted(peers: Peers) -> None:
        nonlocal calls
        calls += 1
        accept(peers)

    monkeypatch.setattr(Peers, "_accept", counted)
    monkeypatch.setattr("walstream.node.peers.ACCEPT_RETRY_S", 0.2)
    nodes = [
        {"id": 1, "kafka": f"{FOLLOWER}:9092", "replication": f"{FOLLOWER}:{free_port()}"},
        {"id": 2, "kafka": f"{LEADER}:9092", "replication": f"{LEADER}:{port}"},
    ]
    async with running_node(
        tmp_path, node__node_id=2, replication__nodes=json.dumps(nodes), replication__listen=f"{LEADER}:{port}",
        replication__allow_insecure=True,
    ) as node:  # fmt: skip
        assert node.replicas is not None
        with socket.socket() as stranger, ExitStack() as files:
            stranger.setblocking(False)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 8, limits[1]))
            try:
                with suppress(OSError):
                    while True:
                        files.callback(os.close, os.dup(stranger.fileno()))
                with suppress(BlockingIOError):
                    stranger.connect((LEADER, port))
                await until(lambda: calls, "the loop notices the connection")
                await asyncio.sleep(0.1)
                assert calls == 1
                files.close()
                await until(lambda: node.replicas and node.replicas.links._all, "the connection is accepted")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
