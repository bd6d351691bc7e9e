"""Starting, stopping and refusing to start."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.request
from pathlib import Path

import pytest
from confluent_kafka import Producer

import walstream
from walstream.node.process import NodeProcess
from walstream.processes import HOST, free_port

from .bare import Bare, fetch_request
from .clients import Confluent, Item, create_topic, read_messages, watermarks
from .support import MakeNode, wait_for

EXIT_REFUSED = 5


def ended_with(node: NodeProcess) -> int:
    """Start a node that should refuse to run, and return its exit code."""
    node.spawn()
    return node.wait(20)


def test_a_clean_stop_and_a_restart_keep_everything(make_node: MakeNode) -> None:
    node = make_node()
    create_topic(node.address, "kept", partitions=2, retention_ms=12345678)
    items = [Item(str(number).encode(), b"key") for number in range(1000)]
    for _ in range(3):
        Confluent().write(node.address, "kept", items, "zstd")
        started = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - started < 10
        node.start()
    assert [message.value() for message in read_messages(node.address, "kept")] == [item.value for item in items] * 3
    assert watermarks(node.address, "kept", 1) == (0, 0)


def test_a_single_node_does_not_listen_for_leaders(make_node: MakeNode) -> None:
    port = free_port()
    make_node(replication__listen=f"{HOST}:{port}")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), 5)


def test_sigterm_drains_what_is_in_flight(make_node: MakeNode) -> None:
    """A waiting fetch does not hold the node up, and everything acknowledged meanwhile is there afterwards."""
    node = make_node()
    create_topic(node.address, "drained")
    delivered: list[bytes] = []
    producer = Producer({"bootstrap.servers": node.address, "linger.ms": 0, "log_level": 0, "message.timeout.ms": 3000})
    with Bare(node.address) as waiting:
        waiting.send(fetch_request("drained", 0, wait_ms=60_000))
        for number in range(2000):
            producer.produce(
                "drained",
                str(number).encode(),
                partition=0,
                on_delivery=lambda error, message: delivered.append(message.value()) if error is None else None,
            )
            producer.poll(0)
            if number == 1000:
                os.kill(node.pid, signal.SIGTERM)
        assert node.wait(15) == 0
    producer.flush(10)
    node.start()
    found = [message.value() for message in read_messages(node.address, "drained")]
    assert set(delivered) <= set(found)
    assert found == [str(number).encode() for number in range(len(found))]


def in_terminal(command: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process in the foreground of a terminal of its own; return it and the other end of the terminal."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    try:
        process = subprocess.Popen(
            command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
        )
    finally:
        os.close(theirs)
    return process, ours


def read_until(ours: int, text: bytes) -> bytes:
    """Read a terminal until it has shown a text."""
    shown = b""
    while text not in shown:
        shown += os.read(ours, 65536)
    return shown


def command_of(data: Path) -> tuple[list[str], dict[str, str]]:
    options = ["--listen", f"{HOST}:0", "--http-listen", "", "--data", str(data)]
    environment = {**os.environ, "PYTHONPATH": str(Path(walstream.__file__).parent.parent)}
    return [sys.executable, "-m", "walstream.cli.main", "node", "start", *options], environment


def is_clean(data: Path) -> bool:
    return bool(json.loads((data / "checkpoint.json").read_text())["clean"])


def test_a_terminal_that_closes_drains(tmp_path: Path) -> None:
    """The kernel sends SIGHUP and every write to the terminal fails; the shell sends another SIGHUP."""
    process, ours = in_terminal(*command_of(tmp_path))
    try:
        read_until(ours, b"node ready")
        assert not is_clean(tmp_path)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        process.wait(20)
    finally:
        process.kill()
        process.wait()
    assert is_clean(tmp_path)


def test_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    command, environment = command_of(tmp_path / "data")
    output = tmp_path / "nohup.log"
    with output.open("wb") as file:
        process = subprocess.Popen(["nohup", *command], env=environment, stdout=file, stderr=file, stdin=file)
    try:
        wait_for(lambda: b"node ready" in output.read_bytes(), "the node is ready")
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert is_clean(tmp_path / "data")


def test_a_second_node_on_the_same_folder_is_refused(make_node: MakeNode) -> None:
    first = make_node()
    second = make_node(first.data, start=False)
    assert ended_with(second) == EXIT_REFUSED
    assert str(first.data) in second.log_text()
    assert first.answers(), "the first node goes on"
    first.kill()
    third = make_node(first.data)  # The lock dies with its holder.
    assert third.answers()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write in read-only folders")
def test_a_folder_without_permission_is_refused(make_node: MakeNode, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o500)
    node = make_node(data, start=False)
    assert ended_with(node) == EXIT_REFUSED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_read_only_file_system_is_refused(make_node: MakeNode, tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        node = make_node(tmp_path, start=False)
        assert ended_with(node) == EXIT_REFUSED
        assert "read-only" in node.log_text().lower()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_data_folder_that_is_a_file_is_refused(make_node: MakeNode, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("not a folder")
    node = make_node(file, start=False)
    assert ended_with(node) == EXIT_REFUSED


def test_a_taken_port_is_said_so(make_node: MakeNode) -> None:
    first = make_node()
    second = make_node(start=False, node__listen=first.address)
    assert ended_with(second) != 0
    assert str(first.port) in second.log_text()


def test_health_and_metrics(make_node: MakeNode) -> None:
    node = make_node()
    create_topic(node.address, "measured")
    Confluent().write(node.address, "measured", [Item(b"v")] * 10)
    with urllib.request.urlopen(f"http://{node.http_address}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    assert "walstream_" in metrics
    assert all(
        line.startswith(("walstream_", "#", "process_", "python_")) for line in metrics.splitlines() if line.strip()
    )

    def healthy() -> bool:
        with urllib.request.urlopen(f"http://{node.http_address}/health", timeout=10) as answer:
            return answer.status == 200

    wait_for(healthy, "the node says that it is well")


def test_a_restart_after_sigkill_takes_a_new_epoch(make_node: MakeNode) -> None:
    node = make_node()
    create_topic(node.address, "epochs")
    epochs = []
    for _ in range(3):
        Confluent().write(node.address, "epochs", [Item(b"v")])
        with Bare(node.address) as connection:
            records = connection.fetch("epochs", len(epochs)).records
        epochs.append(int.from_bytes(records[12:16], "big"))
        node.kill()
        node.start()
    assert epochs == sorted(set(epochs)), "each start has its own, rising epoch"
