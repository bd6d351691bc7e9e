"""Servers of walstream as child processes, started, killed and started again: for the demo, the tests, the benchmarks.

A `ServerProcess` is one child process and two ports: where it serves and where it reports its health. It is used as
its user uses it: a command, an environment, a port that answers. Ports are taken from below the range the kernel gives
to outgoing connections: inside that range a client that retries the port of a stopped server could be given that very
port and connect to itself.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self

import walstream
from walstream.config import ENVIRONMENT_PREFIX
from walstream.errors import UnhealthyError, UnreachableError
from walstream.stopping import uninterrupted

HOST: Final = "127.0.0.1"
PORTS: Final = range(12_000, 32_000)
ATTEMPTS: Final = 5
POLL_INTERVAL_S: Final = 0.02
LOG_TAIL_LINES: Final = 40


HELD_MAX: Final = 256
"""Ports that are held for this process at the same time: more than the servers of any test."""

_ports = itertools.cycle(random.sample(PORTS, len(PORTS)))
_held: collections.deque[int] = collections.deque()
_spawned: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def share_ports(number: int, count: int) -> None:
    """Let `free_port` find only this process's share of the ports, if `count` processes look for some side by side."""
    global _ports
    mine = PORTS[number::count]
    _ports = itertools.cycle(random.sample(mine, len(mine)))


def free_port() -> int:
    """Find an unused port and, on Linux, hold it: no other process finds it, and a restarted server gets it again.

    The port is returned again only after all others: on other systems that is what keeps it for a restarted server.
    """
    for port in itertools.islice(_ports, 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            if sys.platform == "linux":
                _hold(probe)
            return port
    raise UnreachableError(f"No free port between {PORTS.start} and {PORTS.stop} was found.")


def _hold(bound: socket.socket) -> None:
    """Keep a bound socket open: a server that binds with SO_REUSEADDR, as all do, may listen beside it.

    Linux allows that as long as the held socket does not listen. A bind without SO_REUSEADDR, as in `free_port`, fails.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(bound.detach())
    if len(_held) > HELD_MAX:
        os.close(_held.popleft())


def unexpected_exits() -> list[ServerProcess]:
    """Return the servers of this process whose process has exited without `stop`, `kill` or `wait`."""
    return [server for server in tuple(_spawned) if server.exited_by_itself]


class ServerProcess:
    """One server as a child process. A context manager: leaving it stops the server."""

    name: ClassVar[str]
    command: ClassVar[tuple[str, ...]]
    taken: ClassVar[str]
    """What the end of its log says when somebody else has the port."""

    def __init__(self, log: Path, settings: Mapping[str, str] | None = None) -> None:
        """Take the file that gets what the server prints, and settings by `section.key`."""
        self.log = log
        self.settings = dict(settings or {})
        self.port = 0
        self.http_port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._may_exit = False

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"{HOST}:{self.port}"

    @property
    def http_address(self) -> str:
        """Where health and metrics are served."""
        return f"{HOST}:{self.http_port}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return self._started().pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last process; None while it runs, and before the first start."""
        return None if self._process is None else self._process.poll()

    @property
    def exited_by_itself(self) -> bool:
        """Whether the process has exited without `stop`, `kill` or `wait` having been called."""
        return self.exit_code is not None and not self._may_exit

    def own_settings(self) -> dict[str, str]:
        """Return what the server is told besides the settings that were given."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether the server is ready."""
        raise NotImplementedError

    def start(self, timeout_s: float = 30.0) -> Self:
        """Start the server and wait until it answers; a restart keeps the ports."""
        assert not self.running, f"the {self.name} runs already"
        if self.port:
            self._start(timeout_s)
            return self
        for attempt in range(ATTEMPTS):
            self.port, self.http_port = free_port(), free_port()
            try:
                self._start(timeout_s)
                break
            except UnhealthyError:
                if self.taken not in self.log_tail(5).lower() or attempt == ATTEMPTS - 1:
                    self.port = self.http_port = 0
                    raise
        return self

    def spawn(self) -> None:
        """Start the process and do not wait for it to be ready."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        for name, value in {"node.log_format": "json", **self.own_settings(), **self.settings}.items():
            environment[f"{ENVIRONMENT_PREFIX}{name.replace('.', '__')}".upper()] = value
        package_root = str(Path(walstream.__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, environment.get("PYTHONPATH"))))
        with self.log.open("ab") as output, uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "walstream.cli.main", *self.command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._may_exit = False
        _spawned.add(self)

    def _start(self, timeout_s: float) -> None:
        self.spawn()
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if self.exit_code is not None:
                self._may_exit = True
                raise UnhealthyError(
                    f"The {self.name} ended with exit code {self.exit_code} before it was ready.", self.log_tail()
                )
            if time.monotonic() > deadline:
                self.kill()
                raise UnhealthyError(f"The {self.name} was not ready within {timeout_s:g} seconds.", self.log_tail())
            time.sleep(POLL_INTERVAL_S)

    def kill(self) -> None:
        """End the server with SIGKILL, as a power cut or the kernel would, and wait until it is gone."""
        self._may_exit = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask the server to drain and end, and return its exit code."""
        process = self._started()
        self._may_exit = True
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit code of a server that is about to end; one that does not end in time is killed."""
        self._may_exit = True
        try:
            return self._started().wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise UnhealthyError(
                f"The {self.name} did not end within {timeout_s:g} seconds.", self.log_tail()
            ) from None

    def restart(self) -> None:
        """Start again on the same ports, stopping first what still runs."""
        if self.running:
            self.stop()
        self.start()

    def log_text(self) -> str:
        """Everything the server has printed since its first start."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines the server printed."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"the {self.name} was never started"
        return self._process

    def __enter__(self) -> Self:
        return self if self.running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.stop()
