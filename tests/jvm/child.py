"""A process that a test starts beside itself, such as a JVM: what it prints is kept, and it never outlives the test.

It leads a process group of its own, so that what it starts ends with it: `end` asks first and kills then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from waiting import wait_until

START_S_MAX = 60.0
END_S_MAX = 5.0

QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Options of a JVM that does not live long enough for its best code to pay."""


class Child:
    """One process, from its start to its end."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start it."""
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until a condition holds, and not for a process that has ended."""

        def holds() -> Any:
            assert self._process.poll() is None, f"it ended before there was {what}:\n{self.tail()}"
            return condition()

        try:
            wait_until(holds, what, timeout_s=START_S_MAX)
        except AssertionError:
            print(f"--- the end of {self.log.name}\n{self.tail()}")
            raise

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.said().splitlines()[-lines:])

    def end(self) -> None:
        """End it and what it has started."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The group is the one that this process was started as the leader of.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
