"""A capture in a process of its own, as a supervisor runs it: started, stopped, killed, frozen, asked why it ended.

The database's session comes from `capturing`, and so does what reads the log. What a capture prints is kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import walstream
from postgres.servers import Database
from waiting import wait_until
from walstream.node.process import NodeProcess
from walstream.postgres.embedded import EmbeddedPostgres

TIMEOUT_S = 60.0


def settings_of(
    server: EmbeddedPostgres, node: NodeProcess, database: str = "postgres", **more: object
) -> dict[str, Any]:
    """What a capture needs; more as `section__key=value`."""
    return {
        "source.postgres.host": "127.0.0.1",
        "source.postgres.port": server.port,
        "source.postgres.database": database,
        "capture.bootstrap": node.address,
        "capture.prefix": "w",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


@contextmanager
def on(server: EmbeddedPostgres) -> Iterator[Database]:
    """The database that a server of the test's own comes with."""
    database = Database(server, "postgres")
    try:
        yield database
    finally:
        database.connection.close()


class CaptureProcess:
    """One capture. `start` may be called again after it has ended; with `retry` it stays alive by itself."""

    def __init__(self, folder: Path, settings: dict[str, Any], *flags: str) -> None:
        number = sum(1 for _ in folder.glob("capture-*.toml"))
        self.file = folder / f"capture-{number}.toml"
        self.file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        self.log = folder / f"capture-{number}.log"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> CaptureProcess:
        assert not self.is_running, "it runs already"
        root = str(Path(walstream.__file__).parent.parent)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "walstream.cli.main",
                    "capture",
                    "run",
                    "--config",
                    str(self.file),
                    *self._flags,
                ],
                env={**os.environ, "PYTHONPATH": root, "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        assert self.is_running, self.log_tail()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return the exit code of a capture that is about to end."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            self._process.wait()
            raise AssertionError(f"the capture does not end:\n{self.log_tail()}") from None

    def stop(self) -> int:
        if self.is_running:
            self.signal(signal.SIGTERM)
        return self.wait()

    def generations(self) -> int:
        """How many generations it has opened."""
        return self.log_text().count('"generation opened"')

    def wait_for_generation(self, count: int = 1) -> None:
        def is_open() -> bool:
            self.check()
            return self.generations() >= count

        wait_until(is_open, f"generation number {count}")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show what it printed when the block fails."""
        try:
            yield
        except BaseException:
            print(f"--- the end of {self.log.name}\n{self.log_tail()}")
            raise

    @contextmanager
    def running(self) -> Iterator[CaptureProcess]:
        """Run it; leaving the block stops it, and it must end well."""
        self.start()
        try:
            with self.shown():
                yield self
            assert self.stop() == 0, self.log_tail()
        finally:
            if self.is_running:
                self.kill()
