"""A pipeline in a process of its own, as a supervisor runs it: started, stopped, killed with its JVM.

It leads a process group of its own, so that a kill takes the driver, its JVM and Spark's Python workers at one stroke,
as the end of a container does. What it prints is kept.
"""

from __future__ import annotations

import contextlib
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

TIMEOUT_S = 300.0

SPARK = {
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    # These processes live for a minute or two: Java's second compiler would take more from them than it gives.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


class PipelineProcess:
    """One pipeline. `start` may be called again after it has ended."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        tables: dict[str, dict[str, Any]] | None = None,
        spark: dict[str, str] | None = None,
    ) -> None:
        """Take settings by `section.key`, those of single tables, and more of Spark's own."""
        number = sum(1 for _ in folder.glob("pipeline-*.toml"))
        self.file = folder / f"pipeline-{number}.toml"
        given = {"pipeline.master": "local[2]", **settings}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
        known = {**SPARK, "spark.local.dir": str(folder / "local"), **(spark or {})}
        lines += ["[pipeline.settings]\n", *(f'"{name}" = "{value}"\n' for name, value in known.items())]
        for name, rule in (tables or {}).items():
            lines.append(f'[pipeline.tables."{name}"]\n')
            lines += [f"{key} = {json.dumps(value)}\n" for key, value in rule.items()]
        self.file.write_text("".join(lines))
        self.log = folder / f"pipeline-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> PipelineProcess:
        assert not self.is_running, "it runs already"
        self._process = self._spawn("run", *flags)
        return self

    def once(self, timeout_s: float = TIMEOUT_S) -> int:
        """Run it to the end of the log and return its exit code."""
        self.start("--once")
        return self.wait(timeout_s)

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command of the pipeline with the same configuration."""
        return subprocess.run(
            [*self._command(), *arguments, "--config", str(self.file)],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "walstream.cli.main", "pipeline"]

    def _environment(self) -> dict[str, str]:
        root = str(Path(walstream.__file__).parent.parent)
        # Which Python executors run is the pipeline's to say; a session of these tests may have said so already.
        inherited = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
        return {**inherited, "PYTHONPATH": root, "PYTHONFAULTHANDLER": "1"}

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [*self._command(), *arguments, "--config", str(self.file)],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        assert self.is_running, self.log_tail()

    def kill(self) -> None:
        """SIGKILL to the driver, its JVM and its workers, all at once."""
        assert self._process is not None
        # The group is the one that this process was started as the leader of.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def hang_up(self) -> None:
        """SIGHUP to the driver and its JVM, as a terminal that closes sends it, and again, as its shell does."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGHUP)
        self._process.send_signal(signal.SIGHUP)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return the exit code of a pipeline that is about to end."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            self.kill()
            raise AssertionError(f"the pipeline does not end:\n{self.log_tail()}") from None

    def stop(self) -> int:
        if self.is_running:
            self.signal(signal.SIGTERM)
        return self.wait()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    @contextmanager
    def shown(self) -> Iterator[PipelineProcess]:
        """Show what it printed when the block fails; no process is left behind."""
        try:
            yield self
        except BaseException:
            print(f"--- the end of {self.log.name}\n{self.log_tail()}")
            raise
        finally:
            if self._process is not None:
                self.kill()
