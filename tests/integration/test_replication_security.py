"""Who may replicate: the secret, certificates, the cluster's id; and what strangers can do at the replication port."""

from __future__ import annotations

import random
import socket
import struct
from pathlib import Path

import pytest

from node.certificates import Authority, Pair
from walstream.processes import HOST

from .replicating import Cluster, running, write
from .support import MakeNode, memory_mb, seeded, topic_folders, wait_for

pytestmark = pytest.mark.timeout(300)


def test_a_shared_secret(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_SECRET", "correct horse")
    monkeypatch.setenv("OTHER_SECRET", "battery staple")
    with running(make_node, replication__secret_env="CLUSTER_SECRET") as cluster:
        cluster.create("t", min_insync_replicas=2)
        write(cluster.address, "t", 0, 200)
        cluster.compare("t")
        cluster[3].stop()
        cluster[3].settings["replication.secret_env"] = "OTHER_SECRET"
        cluster[3].start()
        wait_for(lambda: "does not know the cluster's secret" in cluster[3].log_text(), "the node refuses the leader")
        write(cluster.address, "t", 200, 200)
        cluster.wait_in_sync("t", 2)
        cluster.compare("t", nodes=[1, 2])
        assert len(cluster.batches(3, "t")) < len(cluster.batches(1, "t"))
        assert not any("correct horse" in node.log_text() for node in cluster.nodes.values())
        cluster[3].stop()
        cluster[3].settings["replication.secret_env"] = "CLUSTER_SECRET"
        cluster[3].start()
        cluster.wait_in_sync("t", 3)
        cluster.compare("t")


def certified(authority: Authority, pair: Pair) -> dict[str, str]:
    """Settings of nodes that show this certificate, and take those of the authority."""
    return {
        "replication__tls_certificate": pair.certificate,
        "replication__tls_key": pair.key,
        "replication__tls_ca": authority.certificate,
    }


def test_certificates_on_both_sides(make_node: MakeNode, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "a"), Authority(tmp_path / "b", "Another authority")
    pair = authority.peer("node")
    with running(make_node, **certified(authority, pair)) as cluster:
        cluster.create("t", min_insync_replicas=2, segment_bytes=50_000)
        write(cluster.address, "t", 0, 2000)
        cluster.compare("t")
        cluster[3].stop()
        other = stranger.peer("node")
        cluster[3].settings |= {"replication.tls_certificate": other.certificate, "replication.tls_key": other.key}
        cluster[3].start()
        write(cluster.address, "t", 2000, 2000)
        cluster.wait_in_sync("t", 2)
        cluster.compare("t", nodes=[1, 2])
        cluster[3].stop()
        cluster[3].settings |= {"replication.tls_certificate": pair.certificate, "replication.tls_key": pair.key}
        cluster[3].start()
        cluster.wait_in_sync("t", 3)
        cluster.compare("t")


def test_a_certificate_is_good_for_its_own_node(make_node: MakeNode, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.peer("node"), authority.client("other", "/CN=node", "DNS:elsewhere.example")
    with running(make_node, **certified(authority, pair)) as cluster:
        cluster.create("t", min_insync_replicas=2)
        write(cluster.address, "t", 0, 100)
        cluster.compare("t")
        cluster[1].stop()
        cluster[1].settings |= {"replication.tls_certificate": other.certificate, "replication.tls_key": other.key}
        cluster[1].start()
        refused = "is not that of node 1"
        wait_for(lambda: all(refused in cluster[number].log_text() for number in (2, 3)), "it is refused")
        cluster[1].stop()
        cluster[1].settings |= {"replication.tls_certificate": pair.certificate, "replication.tls_key": pair.key}
        cluster[1].start()
        cluster.wait_in_sync("t", 3)
        cluster.compare("t")


def _is_written(cluster: Cluster, topic: str) -> bool:
    """Write as a client that knows a stranger, too: if it asks that one for topics, it is told of none of these."""
    try:
        write(cluster.address, topic, 100, 100)
    except AssertionError as error:
        if "UNKNOWN_TOPIC" not in str(error):
            raise
        return False
    return True


def test_a_node_of_another_cluster_stays_out(make_node: MakeNode) -> None:
    with running(make_node) as cluster, running(make_node) as other:
        cluster.create("t")
        write(cluster.address, "t", 0, 100)
        other.create("u")
        cluster[3].stop()
        other[3].stop()
        cluster[3].data.rename(cluster[3].data.with_name("kept"))
        other[3].data.rename(cluster[3].data)
        cluster[3].start()
        wait_for(lambda: "belongs to cluster" in cluster[3].log_text(), "the node refuses the leader")
        wait_for(lambda: _is_written(cluster, "t"), "the cluster goes on without it", 60)
        cluster.wait_in_sync("t", 2)
        assert not topic_folders(cluster[3].data, "t")


def test_the_disk_of_another_node_is_refused(make_node: MakeNode) -> None:
    with running(make_node) as cluster:
        cluster[2].stop()
        cluster[3].stop()
        cluster[3].data.rename(cluster[3].data.with_name("kept"))
        cluster[2].data.rename(cluster[3].data)
        cluster[3].spawn()
        assert cluster[3].wait(30) == 2
        assert "belongs to node 2" in cluster[3].log_text()


def attacks(generator: random.Random) -> list[bytes]:
    handshake = struct.pack(">HQB", 2, 1, 0)
    return [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">HQB", 1, 1, 0),
        struct.pack(">HQB", 77, 1, 0),
        struct.pack(">HQB", 2, 1, 9),
        handshake,
        handshake + struct.pack(">H", 65_535),
        handshake + struct.pack(">H", 4_000) + bytes(4_000),
        handshake + struct.pack(">H", 60) + generator.randbytes(60),
        *(generator.randbytes(generator.randrange(1, 5_000)) for _ in range(40)),
        *(handshake + generator.randbytes(generator.randrange(1, 5_000)) for _ in range(40)),
    ]


def test_garbage_at_the_replication_port(make_node: MakeNode) -> None:
    _, generator = seeded()
    with running(make_node, replication__handshake_timeout_ms=1_000) as cluster:
        cluster.create("t", min_insync_replicas=2)
        write(cluster.address, "t", 0, 100)
        before = memory_mb(cluster[2].pid, "VmRSS")
        for attack in attacks(generator):
            with socket.create_connection((HOST, cluster.listening[2]), 10) as stranger:
                stranger.sendall(attack)
                assert ended(stranger), f"the node keeps a connection that said {attack[:40]!r}"
        crowd = [socket.create_connection((HOST, cluster.listening[2]), 10) for _ in range(200)]
        for stranger in crowd:
            assert ended(stranger), "the node keeps connections that say nothing"
            stranger.close()
        assert memory_mb(cluster[2].pid, "VmRSS") - before < 30
        write(cluster.address, "t", 100, 100)
        cluster.wait_in_sync("t", 3)
        cluster.compare("t")


def ended(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_a_node_that_strangers_reach_wants_a_secret(make_node: MakeNode) -> None:
    cluster = Cluster(make_node, replication__listen="0.0.0.0:0")
    try:
        cluster[1].spawn()
        assert cluster[1].wait(30) == 2
        assert "would let strangers write to the log" in cluster[1].log_text()
    finally:
        cluster.end()
