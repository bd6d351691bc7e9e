"""Ports that stay ours, and servers that exit while a test waits for something else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import wait_until
from walstream import processes
from walstream.node.process import NodeProcess
from walstream.processes import HOST, free_port


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path / "data")
    yield node
    node.kill()


def is_free(port: int) -> bool:
    """Ask as `free_port` of another process does."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((HOST, port))
        return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server listen at a port that is held")
class TestPorts:
    def test_a_port_is_held_before_and_after_its_server_listens(self) -> None:
        port = free_port()
        assert not is_free(port)
        for _ in range(2):
            with socket.create_server((HOST, port)) as server, socket.create_connection((HOST, port), 5):
                server.accept()[0].close()
                assert not is_free(port)
            assert not is_free(port)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port), 5)

    def test_two_servers_do_not_share_a_port(self) -> None:
        port = free_port()
        with socket.create_server((HOST, port)), pytest.raises(OSError, match="in use"):
            socket.create_server((HOST, port))

    def test_the_oldest_port_is_given_back_when_too_many_are_held(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held: deque[int] = deque()
        monkeypatch.setattr(processes, "_held", held)
        monkeypatch.setattr(processes, "HELD_MAX", 2)
        ports = [free_port() for _ in range(3)]
        assert [is_free(port) for port in ports] == [True, False, False]
        for descriptor in held:
            os.close(descriptor)


class TestExits:
    def test_a_wait_fails_at_once_when_a_server_exits_by_itself(self, node: NodeProcess) -> None:
        node.settings["node.data"] = os.devnull
        node.port, node.http_port = free_port(), free_port()
        node.spawn()
        began = time.monotonic()
        with pytest.raises(AssertionError, match=r"(?s)the node answers: never.*exited with code 5.*dev/null"):
            wait_until(node.answers, "the node answers", 60)
        assert time.monotonic() - began < 30

    def test_a_wait_for_the_exit_itself_succeeds(self, node: NodeProcess) -> None:
        node.start()
        os.kill(node.pid, signal.SIGKILL)
        assert wait_until(lambda: node.exit_code, "the node exits") == -signal.SIGKILL
        assert node.exited_by_itself

    @pytest.mark.parametrize("end", [NodeProcess.stop, NodeProcess.kill])
    def test_a_server_that_was_ended_fails_no_wait(self, node: NodeProcess, end: object) -> None:
        node.start()
        end(node)  # type: ignore[operator]
        with pytest.raises(AssertionError, match="not within"):
            wait_until(lambda: False, "what never comes", 0.2)
        node.start()
        assert not node.exited_by_itself
