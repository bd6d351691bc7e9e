"""The commands of docs/replication.md, run as they stand there: three nodes, a topic, a status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.support import wait_for
from walstream.config import fields
from walstream.processes import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "replication.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.timeout(180)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


class Shell:
    """One shell for all commands of the page, in a folder of its own, with ports that are free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = {port: str(free_port()) for port in sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", PAGE)))}
        names = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
        self._environment = names | {
            "WALSTREAM_BOOTSTRAP": f"127.0.0.1:{self._ports['9092']}",
            "WALSTREAM_HTTP": f"127.0.0.1:{self._ports['9644']}",
            "CLUSTER_SECRET": "for the test",
        }
        self.nodes: list[subprocess.Popen[bytes]] = []

    def here(self, text: str) -> str:
        return re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{self._ports[found[1]]}", text)

    def start(self, command: str) -> None:
        line = ["bash", "-c", f"exec {self.here(command).removesuffix('&')}"]
        with (self.folder / f"node-{len(self.nodes)}.log").open("wb") as output:
            started = subprocess.Popen(line, cwd=self.folder, env=self._environment, stdout=output, stderr=output)
        self.nodes.append(started)

    def run(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self.here(command)], cwd=self.folder, env=self._environment,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def end(self) -> None:
        for node in self.nodes:
            node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            node.wait(30)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        shell.end()


@pytest.mark.processes
def test_the_commands_work(shell: Shell) -> None:
    page = shell.here(blocks("toml")[0])
    assert page.count("[replication]\n") == 1
    quick = page.replace("[replication]\n", "[replication]\nisr_lag_ms_max = 2000\n")
    (shell.folder / "cluster.toml").write_text(quick)
    starting, using = (commands(block) for block in blocks("console"))
    for command in starting:
        if command.startswith("walstream"):
            shell.start(command)
    assert len(shell.nodes) == 3
    wait_for(lambda: shell.run("walstream status")[0] == 0, "the cluster is well", 60, 0.5)
    said = {}
    for command in using:
        code, said[command] = shell.run(command)
        if command.startswith("walstream topic create"):
            wait_for(lambda: shell.run("walstream status")[0] == 0, "all replicas are in sync", 30, 0.5)
        assert code == 0, f"{command}: {said[command]}"
    assert "ann" in said["walstream tail orders"]
    status = said["walstream status"]
    assert "controller" in status
    assert re.search(r"\b2\b.*up", status)
    shell.nodes[2].kill()
    shell.nodes[2].wait()
    # As long as nobody knows better, acks=all waits for the lost one: for replication.isr_lag_ms_max.
    assert shell.run("echo x | walstream produce orders --timeout-ms 40000")[0] == 0
    wait_for(lambda: shell.run("walstream status")[0] == 4, "the status tells of the lost replica", 30, 0.5)
    _, told = shell.run("walstream status")
    assert "not in sync" in told
    assert re.search(r"\b3\b.*down", told), told


def test_every_setting_it_names_exists() -> None:
    known = {name for name, _ in fields()} | {name.split(".")[-1] for name, _ in fields()}
    named = re.findall(
        r"`(?:replication\.)?([a-z][a-z_0-9]+_(?:ms|ms_max|max|bytes|env|followers|size|fallback|id))`", PAGE
    )
    assert len(named) > 8
    assert not [name for name in named if name not in known]


def test_every_metric_it_names_exists() -> None:
    source = (Path(__file__).parents[2] / "src/walstream/ops/metrics.py").read_text(encoding="utf-8")
    for name in re.findall(r"`walstream_replication_([a-z_]+)`", PAGE):
        assert name.removesuffix("_total").split("partitions_")[-1] in source, name
