"""The node as a process: how it starts, what it refuses to start with, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from node.running import running_node
from walstream import config
from walstream.errors import ConfigError, DirectoryLocked, UsageError
from walstream.node.addresses import split_address
from walstream.node.process import NodeProcess
from walstream.node.server import Node

PATIENCE_S = 20.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path / "data")
    yield node.start()
    node.kill()


def lines(node: NodeProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.log_text().splitlines()]


def test_it_says_when_it_is_ready_and_sigterm_ends_it_cleanly(process: NodeProcess) -> None:
    ready = lines(process)[-1]
    assert (ready["message"], ready["listen"], ready["http_port"]) == ("node ready", process.address, process.http_port)
    with socket.create_connection(split_address(process.address), timeout=5):
        started = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - started < 5
    assert (lines(process)[-1]["message"], lines(process)[-1]["clean"]) == ("node stopped", True)


def test_a_second_signal_stops_at_once(process: NodeProcess) -> None:
    """The first signal waits for a client that does not read what it is owed; the second does not."""
    producer = Producer({"bootstrap.servers": process.address})
    for _ in range(20):
        producer.produce("t", bytes(900_000))
    assert producer.flush(PATIENCE_S) == 0
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(split_address(process.address))
        stuck.sendall(FETCH_ALL)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.5)
        assert process.running
        os.kill(process.pid, signal.SIGTERM)
        assert process.stop(PATIENCE_S) == 1
    assert lines(process)[-1]["clean"] is False


# Fetch version 4: everything of partition 0 of topic t, up to a gigabyte.
_FETCH_BODY = struct.pack(">hhih", 1, 4, 1, -1) + struct.pack(">iiiib", -1, 0, 1, 1 << 30, 0)
_FETCH_BODY += struct.pack(">ih1si", 1, 1, b"t", 1) + struct.pack(">iqi", 0, 0, 1 << 30)
FETCH_ALL = struct.pack(">i", len(_FETCH_BODY)) + _FETCH_BODY


async def test_one_node_per_folder(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        with pytest.raises(DirectoryLocked):
            Node(node.config)
    async with running_node(tmp_path):
        pass


async def test_a_failed_start_lets_go_of_the_folder(tmp_path: Path) -> None:
    async with running_node(tmp_path):
        pass
    other = {"node.data": str(tmp_path / "data"), "node.node_id": 7}
    for _ in range(2):
        with pytest.raises(ConfigError, match="belongs to node 1"):
            Node(config.load(overrides=other).config)


async def test_strangers_are_not_let_in_by_accident(tmp_path: Path) -> None:
    everywhere = {"node.data": str(tmp_path / "data"), "node.listen": "0.0.0.0:0"}
    with pytest.raises(ConfigError, match="strangers"):
        Node(config.load(overrides=everywhere).config)
    assert not (tmp_path / "data").exists()


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    async with running_node(tmp_path / "one") as node:
        with pytest.raises(ConfigError, match="in use"):
            async with running_node(tmp_path / "two", node__listen=f"127.0.0.1:{node.port}"):
                pass


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:9092", ("127.0.0.1", 9092)), ("[::1]:1", ("::1", 1)), (":0", ("", 0)), ("a.b:65535", ("a.b", 65535))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["nowhere", "a:b", "a:70000", ""])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(UsageError):
        split_address(address)
