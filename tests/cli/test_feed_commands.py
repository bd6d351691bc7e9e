"""The feed's commands against a real feed on a real node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import walstream
from integration.feed_processes import create_feed_topic, write
from integration.support import wait_for
from walstream.cli import main
from walstream.feed.process import FeedProcess
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

Run = Callable[..., str]


@pytest.fixture(scope="module")
def feed(node: NodeProcess) -> Iterator[FeedProcess]:
    """A feed with forty entries of two tenants in two topics."""
    for topic in ("shop.orders", "shop.users"):
        create_feed_topic(node, topic)
        for tenant in ("acme", "evil"):
            write(node, topic, [f"{tenant} {number}".encode() for number in range(10)], tenant=tenant, key=b"k")
    with tempfile.TemporaryDirectory() as folder:
        process = FeedProcess(Path(folder), node.address, settings={"feed.heartbeat_ms": "200"})
        try:
            yield process.start()
        finally:
            process.kill()


@pytest.fixture
def run(feed: FeedProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command against the feed and return its stdout; `code` is the exit code it must have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WALSTREAM_FEED", feed.address)
    monkeypatch.setenv("WALSTREAM_TOKEN", feed.token("root", "admin"))

    def invoke(*arguments: str, code: int = 0, stderr: str = "") -> str:
        got = main.invoke(["feed", *arguments])
        said = capsys.readouterr()
        assert got == code, said.err
        assert stderr in said.err
        return said.out

    return invoke


def entries(run: Run, *arguments: str) -> list[dict[str, Any]]:
    out = run("subscribe", "--from", "oldest", "--no-follow", "-o", "json", *arguments)
    return [json.loads(line) for line in out.splitlines()]


class TestSubscribe:
    def test_everything_that_is_there(self, run: Run) -> None:
        found = entries(run)
        assert len(found) == 40
        assert [one["lsn"] for one in found] == sorted(one["lsn"] for one in found)
        assert found[0] | {"lsn": "", "committed_at_ms": 0} == {
            "lsn": "", "op": "put", "tenant": "acme", "topic": "shop.orders", "partition": 0, "offset": 0,
            "committed_at_ms": 0, "commit_lsn": 0, "seq": 0, "txid": 0, "key_prefix": "walstream:acme:shop.orders:",
            "key": "k", "value": "acme 0", "headers": [],
        }  # fmt: skip

    def test_filters(self, run: Run) -> None:
        assert len(entries(run, "--tenant", "acme")) == 20
        assert len(entries(run, "--topic", "shop.u*")) == 20
        assert len(entries(run, "--tenant", "evil", "-t", "shop.users")) == 10
        assert len(entries(run, "--key-prefix", "walstream:acme:shop.orders:")) == 10
        assert entries(run, "--tenant", "nobody") == []
        assert len(entries(run, "-n", "3")) == 3

    def test_a_line_for_people(self, run: Run) -> None:
        [line] = run("subscribe", "--from", "oldest", "-n", "1").splitlines()
        lsn, rest = line.split("  ", 1)
        assert GlobalLsn.parse(lsn)
        assert rest == "put  acme/shop.orders  k  acme 0"

    def test_places_to_begin(self, run: Run) -> None:
        found = entries(run)
        begin = found[25]["lsn"]
        assert len(entries(run, "--from", begin)) == 15
        assert len(entries(run, "--from", "1h")) == 40
        assert entries(run, "--from", "head") == []
        run("subscribe", "--from", "-10", code=2, stderr="no place in the feed")
        run("subscribe", "--from", "nonsense", code=2, stderr="no place in a log")
        run("subscribe", "--framing", "x", code=2, stderr="There are records and transactions")

    def test_what_is_printed_can_be_acknowledged(self, run: Run) -> None:
        found = entries(run, "--subscriber-id", "printer", "--ack", "-n", "7")
        again = entries(run, "--from", "acked", "--subscriber-id", "printer")
        assert again[0] == found[-1], "the last one acknowledged comes again"
        assert len(again) == 34

    def test_who_gets_nothing_acknowledges_how_far_it_is(self, run: Run) -> None:
        of_none = ("-t", "none.such", "--subscriber-id", "quiet", "--ack")
        assert entries(run, *of_none) == []
        assert entries(run, "--from", "acked", "--subscriber-id", "quiet") == [], "all of it is behind"

    def test_it_follows_until_ctrl_c(self, feed: FeedProcess, node: NodeProcess, tmp_path: Path) -> None:
        create_feed_topic(node, "followed")
        out = tmp_path / "out"
        with out.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "walstream.cli.main", "feed", "subscribe", "-t", "followed", "-o", "json"],
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(walstream.__file__).parents[1]),
                    "WALSTREAM_FEED": feed.address,
                    "WALSTREAM_TOKEN": feed.token("root", "admin"),
                },
                stdout=output,
                stderr=subprocess.PIPE,
            )
        try:
            count = 0

            def has_come() -> bool:
                nonlocal count
                count += 1
                write(node, "followed", [b"%d" % count])
                return len(out.read_text().splitlines()) >= 3

            wait_for(has_come, "entries are printed as they come", 30, 0.2)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert (process.wait(20), process.stderr.read()) == (0, b"")
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        values = [int(json.loads(line)["value"]) for line in out.read_text().splitlines()]
        assert values == list(range(values[0], values[0] + len(values)))


class TestPositions:
    def test_where_the_log_ends(self, run: Run) -> None:
        found = json.loads(run("lsn", "-o", "json"))
        assert found["head_lsn"] == entries(run)[-1]["lsn"]
        assert found["head_time_ms"] > 1_700_000_000_000
        assert found["oldest_lsn"] == ""
        assert "head" in run("lsn")

    def test_an_acknowledgement(self, run: Run) -> None:
        lsns = [one["lsn"] for one in entries(run)]
        done = json.loads(run("ack", lsns[5], "--subscriber-id", "acker", "-o", "json"))
        assert done["acked_lsn"] == lsns[5]
        run("ack", lsns[3], "--subscriber-id", "acker", stderr=f"Acknowledged up to {lsns[5]}")
        run("ack", str(GlobalLsn.at_time(1 << 42)), code=1, stderr="was not sent")
        run("ack", "nonsense", code=2, stderr="is not an LSN")


class TestRefusals:
    def test_exit_codes(self, run: Run, feed: FeedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WALSTREAM_TOKEN", "x.y.z")
        run("lsn", code=5, stderr="no JSON Web Token")
        run("subscribe", code=5, stderr="no JSON Web Token")
        monkeypatch.setenv("WALSTREAM_TOKEN", feed.token("ann", "replication", "acme"))
        run("subscribe", "--from", "oldest", "--tenant", "evil", code=5, stderr="does not allow this tenant")
        run("lsn", "--feed", "127.0.0.1:1", code=3, stderr="No feed answers")
        monkeypatch.delenv("WALSTREAM_TOKEN")
        run("lsn", code=2, stderr="There is no token")
        run("lsn", "--token-file", "missing", code=2, stderr="cannot be read")

    def test_a_tenant_sees_its_own(self, run: Run, feed: FeedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WALSTREAM_TOKEN", feed.token("ann", "replication", "acme"))
        assert {one["tenant"] for one in entries(run)} == {"acme"}

    def test_serving_needs_keys(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.invoke(["feed", "serve", "--port", "0"]) == 2
        assert "feed.auth.jwks" in capsys.readouterr().err
