"""The commands and the program of docs/feed.md, run as they stand there, and whether what it names exists."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.support import wait_for
from walstream.config import fields
from walstream.node.process import NodeProcess
from walstream.processes import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "feed.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.timeout(180)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


class Shell:
    """Runs commands of the page in a folder of its own, at ports that are free."""

    def __init__(self, folder: Path, node: NodeProcess) -> None:
        self._folder = folder
        self._port = str(free_port())
        names = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
        self._environment = names | {
            "WALSTREAM_BOOTSTRAP": node.address,
            "WALSTREAM_CAPTURE__BOOTSTRAP": node.address,
            "WALSTREAM_FEED__PORT": self._port,
            "WALSTREAM_FEED": f"127.0.0.1:{self._port}",
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def here(self, text: str) -> str:
        return text.replace("127.0.0.1:9193", f"127.0.0.1:{self._port}")

    def run(self, command: str) -> str:
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._environment[name] = value
            return ""
        if command.endswith("&"):
            line = ["bash", "-c", f"exec {command.removesuffix('&')}"]
            with (self._folder / "feed.log").open("wb") as output:
                self.started.append(
                    subprocess.Popen(line, cwd=self._folder, env=self._environment, stdout=output, stderr=output)
                )
            wait_for(lambda: b"feed ready" in (self._folder / "feed.log").read_bytes(), "the feed is ready", 60)
            return ""
        return self.call(["bash", "-o", "pipefail", "-c", self.here(command)])

    def call(self, line: list[str]) -> str:
        done = subprocess.run(
            line, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with NodeProcess(tmp_path / "node") as node:
        shell = Shell(tmp_path, node)
        try:
            yield shell
        finally:
            for one in shell.started:
                one.send_signal(signal.SIGTERM)
                one.wait(30)


@pytest.mark.processes
def test_the_commands_and_the_program_work(shell: Shell) -> None:
    said = {}
    for block in blocks("console")[:2]:
        for command in re.findall(r"^\$ (.*)$", block, flags=re.MULTILINE):
            said[command] = shell.run(command)
    assert "tea" in said["walstream feed subscribe --from oldest --no-follow"]
    assert "head" in said["walstream feed lsn"]
    assert "tea" in shell.call([sys.executable, "-c", shell.here(blocks("python")[0])])


@pytest.mark.processes
def test_grpcurl_reads_it(shell: Shell) -> None:
    found = shutil.which("grpcurl") or shutil.which("grpcurl", path=str(Path.home() / "go" / "bin"))
    if found is None:
        pytest.skip("grpcurl is not installed")
    for command in re.findall(r"^\$ (.*)$", blocks("console")[0], flags=re.MULTILINE):
        shell.run(command)
    (asked,) = re.findall(r"^\$ grpcurl (.*)$", PAGE, flags=re.MULTILINE)
    assert "head_lsn" in shell.run(f"{found} {asked}")


def test_every_setting_it_names_exists() -> None:
    known = {name.split(".")[-1] for name, _ in fields() if name.startswith("feed.")}
    named = re.findall(r"`(?:feed\.)?([a-z]+(?:_[a-z]+)*_(?:ms|max|minutes|listen))`", PAGE)
    assert len(named) > 6
    assert not [name for name in named if name not in known]


def test_metrics_of_the_page_and_of_the_alerts_exist() -> None:
    source = (ROOT / "src/walstream/ops/feed.py").read_text(encoding="utf-8")
    alerts = (ROOT / "deploy/feed-alerts.yml").read_text(encoding="utf-8")
    named = re.findall(r"\b(?:kdb_wal|walstream_feed)_[a-z_]*[a-z]\b", PAGE + alerts)
    assert len(named) >= 6
    assert not [name for name in named if f'"{name.removesuffix("_total")}"' not in source]
