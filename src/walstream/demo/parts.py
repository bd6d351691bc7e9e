"""The parts of the demonstration: PostgreSQL, a node, a capture, a pipeline, in one temporary folder.

Owns their processes and the one walstream.toml that they share; refuses to know why anybody starts or kills them.
Capture and pipeline are the commands that a user types. Leaving the context ends everything that still runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import walstream
from walstream.errors import UnhealthyError
from walstream.node.process import NodeProcess
from walstream.postgres.embedded import EmbeddedPostgres
from walstream.stopping import uninterrupted

STOP_S_MAX = 60.0
LOG_TAIL_CHARACTERS = 2_000


SPARK = {
    # For two minutes Java's second compiler costs more than what it makes faster. Not for a pipeline that is to stay.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}
"""Settings of Spark for a short life."""


class Command:
    """A walstream command as a process of its own; `start` may be called again after it has ended."""

    def __init__(self, name: str, *arguments: str, folder: Path) -> None:
        self.name = name
        self._arguments = arguments
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; what it prints goes to a file."""
        root = str(Path(walstream.__file__).parent.parent)
        with self._log.open("ab") as output, uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "walstream.cli.main", *self._arguments],
                env={**os.environ, "PYTHONPATH": root},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise UnhealthyError, with the end of what it printed, when it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            tail = self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
            raise UnhealthyError(f"The {self.name} ended with exit code {self._process.returncode}:\n{tail}")

    def kill(self) -> None:
        """SIGKILL it and all that it has started."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM it and wait."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        if how is signal.SIGKILL:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Parts:
    """Everything that runs. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Take the folder in which everything lies."""
        self.config = folder / "walstream.toml"
        self.warehouse = folder / "warehouse"
        self.postgres = EmbeddedPostgres(folder / "postgres")
        self.node = NodeProcess(folder / "log")
        self.capture = Command("capture", "capture", "run", *self._flags, "--retry", folder=folder)
        self.pipeline = Command("pipeline", "pipeline", "run", *self._flags, "--retry", folder=folder)
        self._stack = ExitStack()

    @property
    def _flags(self) -> tuple[str, str]:
        return "--config", str(self.config)

    def start_log(self) -> None:
        """Start PostgreSQL and the node, and write the configuration that names both."""
        self._stack.callback(lambda: self.postgres.running and self.postgres.stop("immediate"))
        self.postgres.start()
        self._stack.callback(self.node.kill)
        self.node.start()
        settings = {
            "source.postgres.port": self.postgres.port,
            "capture.bootstrap": self.node.address,
            "pipeline.warehouse": str(self.warehouse),
            "pipeline.master": "local[2]",
        }
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
        lines += ["[pipeline.settings]\n", *(f'"{name}" = {json.dumps(value)}\n' for name, value in SPARK.items())]
        self.config.write_text("".join(lines), encoding="utf-8")

    def start_stream(self) -> None:
        """Start capture and pipeline."""
        for command in (self.capture, self.pipeline):
            self._stack.callback(command.kill)
            command.start()

    def kill_and_restart(self) -> None:
        """SIGKILL capture and node at once, and start both again on what they left."""
        self.capture.kill()
        self.node.kill()
        self.node.start()
        self.capture.start()

    def check(self) -> None:
        """Raise UnhealthyError when a part has ended by itself."""
        self.capture.check()
        self.pipeline.check()

    def audit(self) -> dict[str, Any]:
        """Compare source and tables with `walstream pipeline audit`; return what it says."""
        root = str(Path(walstream.__file__).parent.parent)
        done = subprocess.run(
            [sys.executable, "-m", "walstream.cli.main", "pipeline", "audit", *self._flags, "--output", "json"],
            env={**os.environ, "PYTHONPATH": root},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            tail = (done.stdout + done.stderr)[-LOG_TAIL_CHARACTERS:]
            raise UnhealthyError(f"The audit ended with exit code {done.returncode}:\n{tail}") from None
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
