"""A real node and a peer that knows protocol version 1 alone, played by bare sockets."""

from __future__ import annotations

import json
import socket
import struct
import zlib
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from walstream.log.batch import stamp, walk
from walstream.node.process import NodeProcess
from walstream.processes import HOST, free_port

from .bare import one_record
from .replicating import FAST, write
from .support import MakeNode, segments_of, wait_for

PEER = 9
OPEN: list[socket.socket] = []
"""Connections that the fixture closes."""
TIMEOUT_S = 30.0


class Peer:
    """A node that was never taught version 2."""

    def __init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.listener.settimeout(TIMEOUT_S)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def accept(self) -> socket.socket:
        """Refuse version 2, as such a node does, and take the version 1 that follows."""
        while True:
            connection, _ = self.listener.accept()
            OPEN.append(connection)
            connection.settimeout(TIMEOUT_S)
            version, node_id, mode = struct.unpack(">HQB", receive(connection, 11))
            assert (node_id, mode) == (1, 0)
            if version == 1:
                connection.sendall(struct.pack(">BQH", 0, 0, 0))
                return connection
            text = b"unsupported protocol version"
            connection.sendall(struct.pack(">BQH", 1, 0, len(text)) + text)
            connection.close()


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, f"the connection ended after {len(data)} of {count} bytes"
        data += more
    return data


def is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    for connection in (peer.listener, *OPEN):
        connection.close()
    OPEN.clear()


@pytest.fixture
def node(make_node: MakeNode, peer: Peer) -> NodeProcess:
    listen, kafka = free_port(), free_port()
    nodes = [
        {"id": 1, "kafka": f"{HOST}:{kafka}", "replication": f"{HOST}:{listen}"},
        {"id": PEER, "kafka": f"{HOST}:1", "replication": f"{HOST}:{peer.port}"},
    ]
    node = make_node(
        start=False,
        **{
            **FAST,
            "node__node_id": 1,
            "replication__nodes": json.dumps(nodes),
            "replication__leaders": json.dumps([{"topics": "theirs", "node": PEER}]),
            "replication__listen": f"{HOST}:{listen}",
            "replication__min_isr": 1,
            "replication__version_1_fallback": True,
            "replication__max_queue_size": 50,
        },
    )
    node.port, node.http_port = kafka, free_port()
    node.listen = listen  # type: ignore[attr-defined]
    node.spawn()
    wait_for(node.answers, "the node answers", 60)
    return node


def create(node: NodeProcess, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": node.address, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1, 2)])[topic].result(TIMEOUT_S)


def pushed(connection: socket.socket) -> tuple[int, int, bytes]:
    """Receive what is next; answer heartbeats; return base offset, record count and data of a WA frame."""
    while True:
        magic = receive(connection, 2)
        if magic == b"HB":
            connection.sendall(receive(connection, 8))
            continue
        assert magic == b"WA"
        version, length = struct.unpack(">HI", receive(connection, 6))
        assert version == 1
        body = receive(connection, length)
        (name,) = struct.unpack_from(">H", body)
        assert body[2 : 2 + name] == b"ours"
        partition, base_offset, count, _, checksum = struct.unpack_from(">iqIqI", body, 2 + name)
        data = body[30 + name :]
        assert partition == 0
        assert zlib.crc32(data) == checksum
        return base_offset, count, data


def test_a_follower_of_version_1_is_pushed_what_is_committed(node: NodeProcess, peer: Peer) -> None:
    create(node, "ours")
    connection = peer.accept()
    got: list[bytes] = []
    write(node.address, "ours", 0, 5, acks=1, **{"enable.idempotence": False})
    while sum(header.record_count for data in got for _, header in walk(data)) < 5:
        base_offset, count, data = pushed(connection)
        ((_, header),) = walk(data)
        assert (header.base_offset, header.record_count) == (base_offset, count)
        got.append(data)
    assert b"".join(got) == b"".join(file.read_bytes() for file in segments_of(node.data, "ours"))
    known = AdminClient({"bootstrap.servers": node.address, "log_level": 0}).list_topics("ours", TIMEOUT_S)
    assert known.topics["ours"].partitions[0].isrs == [1], "it never says what it has on its disk"
    # The link breaks, and what is written meanwhile comes when it is made again.
    connection.close()
    write(node.address, "ours", 5, 1, acks=1, **{"enable.idempotence": False})
    base_offset, _, _ = pushed(peer.accept())
    assert base_offset == 5


def test_a_follower_of_version_1_that_lags_is_skipped_ahead(node: NodeProcess, peer: Peer) -> None:
    create(node, "ours")
    peer.accept().close()
    write(node.address, "ours", 0, 60, acks=1, **{"enable.idempotence": False})
    connection = peer.accept()
    wait_for(lambda: "goes on at the end" in node.log_text(), "the gap is told", TIMEOUT_S)
    write(node.address, "ours", 60, 1, acks=1, **{"enable.idempotence": False})
    assert pushed(connection)[0] == 60


# ── the other way around ────────────────────────────────────────────────────────────────────────────────────────────


def dial(node: NodeProcess, version: int = 1) -> socket.socket:
    connection = socket.create_connection((HOST, node.listen), TIMEOUT_S)  # type: ignore[attr-defined]
    OPEN.append(connection)
    connection.sendall(struct.pack(">HQB", version, PEER, 0))
    return connection


def dialled(node: NodeProcess) -> socket.socket:
    connection = dial(node)
    assert receive(connection, 11) == bytes(11)
    return connection


def frame(offset: int, value: bytes, *, topic: bytes = b"theirs", spoil: int = 0) -> bytes:
    batch = bytearray(one_record(value))
    stamp(batch, offset, -1)
    checksum = zlib.crc32(batch) ^ spoil
    body = struct.pack(f">H{len(topic)}siqIqI", len(topic), topic, 0, offset, 1, 0, checksum) + batch
    return struct.pack(">HHI", 0x5741, 1, len(body)) + body


def copied(node: NodeProcess) -> list[int]:
    """The offsets in the copy."""
    data = b"".join(file.read_bytes() for file in segments_of(node.data, "theirs"))
    return [header.base_offset for _, header in walk(data)]


def begun(node: NodeProcess) -> socket.socket:
    """Make the topic, and push its first batch as soon as the node has its copy."""
    dialled(node)  # Topics are given only to nodes that have been seen.
    create(node, "theirs")

    def taken() -> socket.socket | None:
        connection = dialled(node)
        connection.sendall(frame(0, b"a") + b"HB" + (123).to_bytes(8, "big"))
        try:
            assert receive(connection, 8) == (123).to_bytes(8, "big")
        except (AssertionError, ConnectionResetError):
            return None
        return connection

    return wait_for(taken, "the copy is there", TIMEOUT_S)


def test_pushes_of_version_1_go_into_a_copy(node: NodeProcess) -> None:
    connection = begun(node)
    connection.sendall(frame(1, b"b"))
    wait_for(lambda: copied(node) == [0, 1], "the copy holds both", TIMEOUT_S)
    # After a gap the copy begins anew: what came before it proves nothing about what follows.
    connection.sendall(frame(7, b"c") + frame(8, b"d"))
    wait_for(lambda: copied(node) == [7, 8], "the copy begins after the gap", TIMEOUT_S)
    assert "a copy begins anew" in node.log_text()


def test_a_wrong_push_ends_the_link_and_nothing_behind_it_is_applied(node: NodeProcess) -> None:
    connection = begun(node)
    connection.sendall(frame(1, b"b", spoil=1) + frame(1, b"c"))
    assert is_over(connection)
    wait_for(lambda: copied(node) == [0], "the copy holds the first", TIMEOUT_S)
    connection = dialled(node)
    connection.sendall(frame(0, b"x", topic=b"nobodys"))
    assert is_over(connection)
    assert copied(node) == [0]


def test_a_version_that_nobody_knows_is_refused_with_a_reason(node: NodeProcess) -> None:
    connection = dial(node, version=3)
    status, position, length = struct.unpack(">BQH", receive(connection, 11))
    assert (status, position) == (1, 0)
    assert b"version 3" in receive(connection, length)
    assert is_over(connection)
