"""Kill and resume: whoever is killed, and whenever, a subscriber sees everything once, in the order of LSNs.

Numbered records are written to several partitions all the time. The subscriber is a stock grpcio client in a process of
its own, which begins again behind what it has acknowledged.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from base64 import b64decode
from pathlib import Path

import pytest

from walstream.feed import wal_pb2
from walstream.feed.process import FeedProcess
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

from . import subscriber
from .feed_processes import MakeFeed, Writing, check_complete, create_feed_topic
from .support import MakeNode, rounds, seeded, wait_for

PARTITIONS = 3


class Subscriber:
    """The subscriber's process, and what it has on disk."""

    def __init__(self, feed: FeedProcess, folder: Path, **request: object) -> None:
        """Take further fields of its request; its subject is the folder's name."""
        folder.mkdir(exist_ok=True)
        self._feed, self._folder, self._request = feed, folder, request
        self._token = feed.token(folder.name, "admin")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        root = Path(subscriber.__file__).parents[2]
        with (self._folder / "log").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, subscriber.__file__, self._feed.address, self._token, str(self._folder)),
                    json.dumps(self._request),
                ],
                env={"PYTHONPATH": str(root / "src")},
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def check(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()

    @property
    def acked(self) -> str:
        file = self._folder / "acked"
        return file.read_text() if file.exists() else ""

    @property
    def heartbeat(self) -> str:
        """Up to where the last heartbeat said that everything was sent."""
        file = self._folder / "heartbeat"
        return file.read_text() if file.exists() else ""

    def entries(self) -> list[wal_pb2.WalEntry]:
        """What it has processed; of what it is writing now, the last may be a part."""
        lines = (self._folder / "entries").read_text().splitlines()
        return [wal_pb2.WalEntry.FromString(b64decode(line.split()[1])) for line in lines]

    def catch_up(self, count: int, timeout_s: float = 60) -> None:
        """Start it until it has processed so many entries and acknowledged the last."""
        self.start()

        def is_there() -> bool:
            self.check()
            lsns = [line.split(b" ", 1)[0] for line in (self._folder / "entries").read_bytes().splitlines()]
            return len(lsns) >= count and self.acked.encode() == lsns[-1]

        wait_for(is_there, f"{count} entries are processed", timeout_s, 0.1)


@pytest.mark.timeout(1200)
def test_a_subscriber_killed_at_random_moments(make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path) -> None:
    _, generator = seeded()
    node = make_node()
    create_feed_topic(node, "numbers", PARTITIONS)
    feed = make_feed(node)
    writing = Writing(node, "numbers", PARTITIONS, generator, 0.02)
    with Subscriber(feed, tmp_path / "subscriber") as reader:
        with writing.running():
            for number in range(rounds(full=50, part=5)):
                before = reader.acked
                reader.start()
                wait_for(lambda before=before: reader.check() or reader.acked > before, "entries are acknowledged", 60)
                moment_s = generator.uniform(0, 0.4)
                print(f"round {number}: SIGKILL {moment_s * 1000:.0f} ms after the first acknowledgement")
                time.sleep(moment_s)  # The moment of the kill is what the round is about.
                reader.kill()
        reader.catch_up(writing.count)
    seen = [(entry.lsn, entry.partition, int(entry.value.split()[0])) for entry in reader.entries()]
    check_complete(seen, writing.sent)
    with feed.client("subscriber") as client:
        assert str(client.ack(GlobalLsn.parse(reader.acked)).acked) == reader.acked


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["feed", "node"])
def test_a_server_killed_under_a_stream(make_node: MakeNode, make_feed: MakeFeed, victim: str) -> None:
    """The client is not told: it resumes by itself, with nothing lost and nothing twice."""
    _, generator = seeded()
    node = make_node()
    create_feed_topic(node, "numbers", PARTITIONS)
    feed = make_feed(node)
    killed: FeedProcess | NodeProcess = feed if victim == "feed" else node
    writing, seen, failed = Writing(node, "numbers", PARTITIONS, generator, 0.02), [], []

    def follow() -> None:
        try:
            with feed.client() as client, client.subscribe("oldest") as stream:
                for entry in stream:
                    seen.append((str(entry.lsn), entry.partition, int((entry.value or b"").split()[0])))
        except Exception as error:
            failed.append(error)

    threading.Thread(target=follow, daemon=True).start()
    with writing.running():
        for number in range(rounds(full=20, part=3)):
            before = len(seen)
            wait_for(lambda before=before: failed or len(seen) > before, "entries come", 60)
            moment_s = generator.uniform(0, 0.4)
            print(f"round {number}: SIGKILL {moment_s * 1000:.0f} ms after an entry")
            time.sleep(moment_s)
            killed.kill()
            killed.start()
    wait_for(lambda: failed or len(seen) >= writing.count, "everything has come", 60)
    assert not failed
    check_complete(seen, writing.sent)


def test_a_closed_terminal_stops_the_feed_as_sigterm_does(node: NodeProcess, make_feed: MakeFeed) -> None:
    feed = make_feed(node)
    for _ in range(2):  # The kernel and the shell send one each.
        os.kill(feed.pid, signal.SIGHUP)
    assert feed.wait(30) == 0
    assert '"feed stopped"' in feed.log_text()


def test_what_one_acknowledged_outlives_the_feed_and_the_node(make_node: MakeNode, make_feed: MakeFeed) -> None:
    _, generator = seeded()
    node = make_node()
    create_feed_topic(node, "numbers", PARTITIONS)
    feed = make_feed(node)
    with Writing(node, "numbers", PARTITIONS, generator, 0.001).running():
        time.sleep(0.5)
    with feed.client() as client:
        entries = list(itertools.islice(client.subscribe("oldest"), 200))
        client.ack(entries[120].lsn)
    feed.kill()
    node.kill()
    node.start()
    feed.start()
    with feed.client() as client:
        again = list(itertools.islice(client.subscribe(), 80))
        assert again == entries[120:], "the last one acknowledged comes again, and everything behind it"
