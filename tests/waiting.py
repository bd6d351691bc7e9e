"""Waits for a condition with a timeout, and fails at once when a server of the test has exited by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from walstream.processes import ServerProcess, unexpected_exits

T = TypeVar("T")

TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S, pause_s: float = 0.05) -> T:
    """Return what the condition returns once that is true.

    The servers are checked before the condition: a condition that waits for an exit is still seen to become true.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        exited = unexpected_exits()
        if found := condition():
            return found
        assert not exited, f"{what}: never, because {described(exited)}"
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(pause_s)


def described(exited: list[ServerProcess]) -> str:
    """Return what to show of servers that have exited by themselves."""
    return "\n".join(
        f"the {server.name} at {server.address} exited with code {server.exit_code}:\n{server.log_tail()}"
        for server in exited
    )


def log_title(server: ServerProcess) -> str:
    """Return what to call the log of a server in the report of a failed test."""
    state = "" if server.exit_code is None else f", exit code {server.exit_code}"
    return f"log of the {server.name} at {server.address}{state}"
