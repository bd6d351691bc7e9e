"""The node as a process: how it starts, what it refuses to start with, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import walstream
from node.running import running_node
from waiting import wait_until
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


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[[int], tuple[int | None, str]]]:
    """Start a node that may open so many files; its exit code, or None once it is ready, and what it has said."""
    started: list[subprocess.Popen[bytes]] = []

    def start(limit: int, *options: str) -> tuple[int | None, str]:
        output = tmp_path / f"{limit}.log"
        command = [
            sys.executable,
            "-m",
            "walstream.cli.main",
            "node",
            "start",
            "--data",
            str(tmp_path / "data"),
            *options,
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(walstream.__file__).parent.parent)}
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command],
                env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        started.append(process)
        wait_until(
            lambda: process.poll() is not None or "node ready" in output.read_text(), f"a start with {limit} files"
        )
        return process.poll(), output.read_text()

    yield start
    for process in started:
        process.kill()
        process.wait(PATIENCE_S)


def test_a_start_without_file_descriptors_says_so_and_harms_nothing(
    tmp_path: Path, limited: Callable[..., tuple[int | None, str]]
) -> None:
    node = NodeProcess(tmp_path / "data")
    node.start()
    producer = Producer({"bootstrap.servers": node.address})
    for number in range(3):
        producer.produce(f"t{number}", b"kept")
    assert producer.flush(PATIENCE_S) == 0
    assert node.stop() == 0
    failed = 0
    for limit in range(7, 25):
        code, said = limited(limit, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
        assert "Traceback" not in said, said
        if code is None:
            break
        failed += 1
        assert code == 4
        assert "Too many open files" in said, said
        assert "ulimit -Hn" in said, said
        assert '"clean": true' not in said, said
        assert '"level": "error"' not in said, said
    assert 6 <= failed < 18
    assert "few files can be opened" in said, "a warning that names the limit"


def test_a_node_holds_more_partitions_than_it_may_open_files(
    limited: Callable[..., tuple[int | None, str]],
) -> None:
    code, said = limited(100, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    assert code is None, said
    address = json.loads(said.splitlines()[-1])["listen"]
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("wide", 300, 1)])["wide"].result(PATIENCE_S)
    producer = Producer({"bootstrap.servers": address})
    failures: list[object] = []
    for turn in range(2):
        for index in range(300):
            producer.produce(
                "wide",
                f"{turn}",
                partition=index,
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )
        assert producer.flush(PATIENCE_S) == 0
    assert failures == []
    consumer = Consumer({"bootstrap.servers": address, "group.id": "g", "enable.auto.commit": False})
    consumer.assign([TopicPartition("wide", index, 0) for index in range(300)])
    found = [message.value() for message in consumer.consume(600, PATIENCE_S)]
    consumer.close()
    assert sorted(found) == [b"0"] * 300 + [b"1"] * 300


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
