"""A node in a process of its own, to be started, killed and started again: for the demo, the tests, the benchmarks.

It owns one child process and two ports; it knows a node only as its user does: a command, an environment, a Kafka
port. Ports are taken from below the range the kernel hands out to outgoing connections: there, while the node is
down, a client that keeps trying its port could be given that very port and end up connected to itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import walstream
from walstream.config import ENVIRONMENT_PREFIX
from walstream.errors import UnhealthyError, UnreachableError

HOST = "127.0.0.1"
PORTS = range(12_000, 32_000)
ATTEMPTS = 5
POLL_INTERVAL_S = 0.02
LOG_TAIL_LINES = 40

_API_VERSIONS_REQUEST = struct.pack(">ihhih", 10, 18, 0, 1, -1)


def free_port() -> int:
    """Find a port that nobody listens on now; somebody else may still take it before it is used."""
    for _ in range(1000):
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise UnreachableError(f"No free port between {PORTS.start} and {PORTS.stop} was found.")


class NodeProcess:
    """One node as a child process. A context manager: leaving it stops the node."""

    def __init__(self, data: Path, *, settings: Mapping[str, str] | None = None, log: Path | None = None) -> None:
        """Take the data folder, settings by `section.key`, and the file that gets what the node prints."""
        self.data = data
        self.log = log or data.with_name(f"{data.name}.log")
        self.settings = dict(settings or {})
        self.port = 0
        self.http_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where Kafka clients connect."""
        return f"{HOST}:{self.port}"

    @property
    def http_address(self) -> str:
        """Where health and metrics are served."""
        return f"{HOST}:{self.http_port}"

    @property
    def pid(self) -> int:
        """The process id of the running node."""
        assert self._process is not None, "the node was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 30.0) -> NodeProcess:
        """Start the node and wait until it answers; a restart keeps the ports."""
        assert not self.running, "the node runs already"
        if self.port:
            self._start(timeout_s)
            return self
        for attempt in range(ATTEMPTS):
            self.port, self.http_port = free_port(), free_port()
            try:
                self._start(timeout_s)
                return self
            except UnhealthyError:
                taken = "in use" in self.log_tail(5).lower()
                if not taken or attempt == ATTEMPTS - 1:
                    self.port = self.http_port = 0
                    raise
        raise AssertionError("unreachable")

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process and do not wait for it to be ready."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        settings = {
            "node.listen": self.address,
            "node.http_listen": self.http_address,
            "node.data": str(self.data),
            "node.log_format": "json",
            **self.settings,
        }
        for name, value in settings.items():
            environment[f"{ENVIRONMENT_PREFIX}{name.replace('.', '__')}".upper()] = value
        package_root = str(Path(walstream.__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, environment.get("PYTHONPATH"))))
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "walstream.cli.main", "node", "start"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self._process

    def _start(self, timeout_s: float) -> None:
        process = self.spawn()
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if process.poll() is not None:
                raise UnhealthyError(
                    f"The node ended with exit code {process.returncode} before it was ready.", self.log_tail()
                )
            if time.monotonic() > deadline:
                self.kill()
                raise UnhealthyError(f"The node was not ready within {timeout_s:g} seconds.", self.log_tail())
            time.sleep(POLL_INTERVAL_S)

    def answers(self) -> bool:
        """Whether the Kafka port answers a request; with TLS, which this cannot speak, whether it accepts."""
        try:
            with socket.create_connection((HOST, self.port), 2) as connection:
                if self.settings.get("security.tls_certificate"):
                    return True
                connection.sendall(_API_VERSIONS_REQUEST)
                return len(connection.recv(8)) > 0
        except OSError:
            return False

    def kill(self) -> None:
        """End the node with SIGKILL, as a power cut or the kernel would, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask the node to drain and end, and return its exit code."""
        assert self._process is not None, "the node was never started"
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit code of a node that is about to end; one that does not end in time is killed."""
        assert self._process is not None, "the node was never started"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise UnhealthyError(f"The node did not end within {timeout_s:g} seconds.", self.log_tail()) from None

    def restart(self) -> None:
        """Start again on the same ports and data, stopping first what still runs."""
        if self.running:
            self.stop()
        self.start()

    def log_text(self) -> str:
        """Everything the node has printed since its first start."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines the node printed."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def __enter__(self) -> NodeProcess:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.stop()
