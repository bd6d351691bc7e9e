"""`walstream capture run` and `status` with a real PostgreSQL and a real node: signals, exit codes, what is printed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postgres.servers import Database
from walstream.capture import topics
from walstream.capture.reading import LogReader
from walstream.cli import main
from walstream.config import ENVIRONMENT_PREFIX
from walstream.node.process import NodeProcess

DEADLINE_S = 60.0
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class World:
    """A database, a node, and the configuration that brings them together."""

    def __init__(self, database: Database, node: NodeProcess, folder: Path) -> None:
        self.database = database
        self.node = node
        self.folder = folder
        self.prefix = database.name
        self.processes: list[subprocess.Popen[bytes]] = []
        self.settings = {
            "source.postgres.port": str(database.server.port),
            "source.postgres.database": database.name,
            "source.postgres.slot_name": database.name,
            "capture.prefix": self.prefix,
            "capture.bootstrap": node.address,
        }

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        return inherited | {
            f"{ENVIRONMENT_PREFIX}{name.replace('.', '__')}".upper(): value for name, value in self.settings.items()
        } | {"PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip

    def start(self, *arguments: str, terminal: int | None = None) -> subprocess.Popen[bytes]:
        """Start `capture run`; what it prints is in `printed`, or goes to the terminal."""
        output = (self.folder / "capture.log").open("ab") if terminal is None else terminal
        process = subprocess.Popen(
            [sys.executable, "-m", "walstream.cli.main", "capture", "run", *arguments],
            env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        self.processes.append(process)
        if terminal is None:
            output.close()  # type: ignore[union-attr]
        return process

    @property
    def printed(self) -> str:
        return (self.folder / "capture.log").read_text(encoding="utf-8")

    def said(self, message: str) -> list[dict[str, Any]]:
        """Return the log lines with this message."""
        lines = [json.loads(line) for line in self.printed.splitlines() if line.startswith("{")]
        return [line for line in lines if line["message"] == message]

    def values(self) -> list[dict[str, Any]]:
        """Return the rows that are in the log, by the rule."""
        with LogReader(self.node.address, self.prefix) as log:
            return [json.loads(row.value or b"") for row in log.rows(list(log.points()))]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            assert not ended, (what, ended, self.printed)
            assert time.monotonic() < deadline, (what, self.printed)
            time.sleep(0.05)


@pytest.fixture
def world(database: Database, node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(database, node, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in world.environment.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            monkeypatch.setenv(name, value)
    database.execute("create table orders (id int primary key, item text); insert into orders values (1, 'tea')")
    assert main.invoke(["capture", "check", "--fix"]) == 0
    try:
        yield world
    finally:
        for process in world.processes:
            process.kill()
            process.wait()


def status(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main.invoke(["capture", "status", "-o", "json"]) == code
    return dict(json.loads(capsys.readouterr().out))


def test_from_nothing_to_rows_and_a_graceful_end(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(capsys)["state"] == "never run"
    capture = world.start()
    world.wait(lambda: world.said("snapshot over"), "the snapshot is over")
    world.database.execute("insert into orders values (2, 'milk'); update orders set item = 'oat milk' where id = 2")
    world.wait(lambda: len(world.values()) == 3, "all rows are there")
    world.wait(lambda: (status(capsys)["rows_total"] or 0) >= 2, "the ladder says so")
    found = status(capsys)
    assert found["state"] == "running"
    assert [rung["rung"] for rung in found["rungs"]] == ["server end", "sent", "received", "durable", "confirmed"]
    for rung in found["rungs"]:
        assert set(rung) == {"rung", "lsn", "lsn_bytes", "behind_bytes", "behind_ms"}
        assert rung["behind_bytes"] >= 0

    # What was committed before the signal is captured before the end.
    world.database.execute("insert into orders select g, 'bread' from generate_series(3, 1000) g")
    world.wait(lambda: len(world.values()) == 1001, "the last rows are there")
    capture.send_signal(signal.SIGTERM)
    assert capture.wait(DEADLINE_S) == 0, world.printed
    assert world.said("stopping")
    assert "Traceback" not in world.printed
    found = status(capsys)
    assert found["state"] == "stopped"
    assert [row["op"] for row in world.values()[:3]] == ["r", "c", "u"]
    (confirmed,) = world.database.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [world.prefix]
    )
    assert found["rungs"][-1]["lsn"] == confirmed[0]

    # A second run goes on where the first one ended.
    world.processes.clear()
    capture = world.start()
    world.database.execute("delete from orders where id = 1")
    world.wait(lambda: len(world.values()) == 1002, "the delete is there")
    capture.send_signal(signal.SIGINT)
    assert capture.wait(DEADLINE_S) == 0, world.printed


def test_a_terminal_that_closes_drains(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGHUP comes twice, and nothing more can be drawn on the terminal."""
    ours, theirs = pty.openpty()
    capture = world.start(terminal=theirs)
    os.close(theirs)
    shown = b""
    while b"snapshot over" not in shown:
        shown += os.read(ours, 65536)
    world.database.execute("insert into orders select g, 'bread' from generate_series(2, 500) g")
    world.wait(lambda: len(world.values()) == 500, "all rows are there")
    os.close(ours)
    for _ in range(2):
        capture.send_signal(signal.SIGHUP)
        time.sleep(0.1)
    assert capture.wait(DEADLINE_S) == 0
    found = status(capsys)
    assert found["state"] == "stopped"
    (confirmed,) = world.database.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [world.prefix]
    )
    assert found["rungs"][-1]["lsn"] == confirmed[0]


def test_status_for_people(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    capture = world.start()
    world.wait(lambda: status(capsys)["state"] == "running", "it runs")
    assert main.invoke(["capture", "status"]) == 0
    out = capsys.readouterr().out
    assert "state           running" in out
    assert re.search(r"^durable +[0-9A-F]+/[0-9A-F]+ +[\d,]+ ", out, flags=re.MULTILINE)
    capture.send_signal(signal.SIGTERM)
    capture.wait(DEADLINE_S)
    assert main.invoke(["capture", "status", "--set", "source.postgres.port=1"]) == 3
    said = capsys.readouterr()
    assert "durable" in said.out  # what the log knows is told all the same
    assert "PostgreSQL at 127.0.0.1:1 cannot be reached" in said.err


def test_two_captures_at_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.start()
    world.wait(lambda: world.said("generation opened"), "the first one runs")
    assert main.invoke(["capture", "run"]) == 1  # a supervisor tries again; one of them has the slot
    assert world.prefix in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "code", "complaint"),
    [
        ("source.postgres.port=1", 3, "PostgreSQL at 127.0.0.1:1 cannot be reached"),
        ("capture.bootstrap=127.0.0.1:1", 3, "The log at 127.0.0.1:1 cannot be reached"),
        ("source.postgres.publication_name=nope", 5, "There is no publication nope"),
        ("source.postgres.user=stranger", 5, 'role "stranger" does not exist'),
        ("capture.memory_bytes_max=1", 2, "capture.memory_bytes_max = '1'"),
    ],
)
def test_exit_codes(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    code: int,
    complaint: str,
) -> None:
    monkeypatch.setattr(topics, "TIMEOUT_S", 2.0)  # How long an address without a log is tried.
    assert main.invoke(["capture", "run", "--set", setting]) == code
    assert complaint in capsys.readouterr().err


def test_a_slot_that_is_gone_needs_an_operator(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    capture = world.start()
    world.wait(lambda: world.said("snapshot over"), "it runs")
    capture.send_signal(signal.SIGTERM)
    capture.wait(DEADLINE_S)
    world.database.execute("select pg_drop_replication_slot(%s)", [world.prefix])
    assert status(capsys)["state"] == "no slot"
    assert main.invoke(["capture", "run"]) == 5
    said = capsys.readouterr().err
    assert f"The slot {world.prefix} is gone" in said
    assert "walstream capture run --new-epoch" in said
    # Beginning anew is dangerous, so it wants to hear the name.
    assert main.invoke(["capture", "run", "--new-epoch", "--confirm", "another"]) == 2
    assert main.invoke(["capture", "run", "--new-epoch", "--retry"]) == 2
    capsys.readouterr()
    world.processes.clear()
    capture = world.start("--new-epoch", "--confirm", world.prefix)
    world.wait(lambda: len(world.said("snapshot over")) == 2, "a new snapshot is taken")
    world.wait(lambda: status(capsys)["source_epoch"] == 2, "the ladder says so")
    capture.send_signal(signal.SIGTERM)
    assert capture.wait(DEADLINE_S) == 0, world.printed


def test_retry_outlives_a_node_that_is_killed(
    database: Database, make_node: Callable[..., NodeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()
    world = World(database, node, tmp_path)
    monkeypatch.chdir(tmp_path)
    database.execute("create table orders (id int primary key); create publication walstream for all tables")
    capture = world.start("--retry")
    try:
        world.wait(lambda: world.said("snapshot over"), "it runs")
        node.kill()
        database.execute("insert into orders select generate_series(1, 1000)")
        time.sleep(1)
        node.start()
        world.wait(lambda: len(world.values()) == 1000, "all rows are there")
        # PostgreSQL ends the connection; so the generation ends, and the next one goes on.
        database.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", [world.prefix]
        )
        world.wait(lambda: world.said("generation failed"), "the generation failed")
        database.execute("insert into orders values (1001)")
        world.wait(lambda: len(world.values()) == 1001, "the next one goes on")
        capture.send_signal(signal.SIGTERM)
        assert capture.wait(DEADLINE_S) == 0, world.printed
    finally:
        capture.kill()
        capture.wait()


def test_second_signal_stops_though_the_log_stands_still(
    database: Database, make_node: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    node = make_node()
    world = World(database, node, tmp_path)
    database.execute("create table orders (id int primary key); create publication walstream for all tables")
    capture = world.start()
    world.wait(lambda: world.said("snapshot over"), "it runs")
    os.kill(node.pid, signal.SIGSTOP)
    try:
        database.execute("insert into orders select generate_series(1, 1000)")
        time.sleep(1)
        capture.send_signal(signal.SIGINT)
        time.sleep(1)
        assert capture.poll() is None, world.printed  # it waits for the log
        capture.send_signal(signal.SIGINT)
        assert capture.wait(20) == 1, world.printed
        assert world.said("stopped at once")
    finally:
        capture.kill()
        capture.wait()
        os.kill(node.pid, signal.SIGCONT)


def test_a_line_on_a_terminal(world: World) -> None:
    ours, theirs = pty.openpty()
    capture = world.start(terminal=theirs)
    os.close(theirs)
    shown = ""
    is_told_to_stop = False
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            shown += os.read(ours, 65_536).decode()
        except OSError:
            break  # the other end is closed
        if "rows/s" in shown and "captured" in shown and not is_told_to_stop:
            is_told_to_stop = True
            capture.send_signal(signal.SIGINT)
    os.close(ours)
    assert capture.wait(DEADLINE_S) == 0, shown
    plain = ESCAPE.sub("", shown)
    assert re.search(r"\d rows/s   \d+ rows? captured   durable to [0-9A-F]+/[0-9A-F]+   ", plain)
    assert "stopping" in plain
    # The log's lines stand alone, and the cursor is visible again at the end.
    assert re.search(r"^\r?\d\d:\d\d:\d\d\.\d+ \[info *\] generation opened", plain, flags=re.MULTILINE)
    assert shown.rstrip("\r\n").rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
