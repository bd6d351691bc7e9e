"""Feeds for integration tests: real processes on a real node, records to stream, and what a subscriber saw.

`make_feed` starts feeds of a test's own; a failing test shows the end of their logs, and none may have printed a
traceback, or exited by itself, by the time it is stopped.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from waiting import described, log_title
from walstream.node.process import NodeProcess

if TYPE_CHECKING:
    from integration.replicating import Cluster
    from walstream.feed.process import FeedProcess

MakeFeed = Callable[..., "FeedProcess"]

_running: list[FeedProcess] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for feed in _running:
            report.sections.append((log_title(feed), feed.log_tail()))
    return report


@pytest.fixture
def make_feed() -> Iterator[MakeFeed]:
    """A function that starts a feed of the test's own: `make_feed(node, heartbeat_ms=100)`, settings of [feed]."""
    from walstream.feed.process import FeedProcess

    folder = Path(tempfile.mkdtemp(prefix="walstream-feed-"))
    feeds: list[FeedProcess] = []

    def make(
        node: NodeProcess | Cluster, *, start: bool = True, share: FeedProcess | None = None, **settings: object
    ) -> Any:
        """With `share` it believes the tokens of another one."""
        number = len(feeds)
        chosen = {f"feed.{name.replace('__', '.')}": _text(value) for name, value in settings.items()}
        feed = FeedProcess(folder / f"feed-{number}", node.address, settings=chosen)
        if share is not None:
            feed.keys = share.keys
        feeds.append(feed)
        _running.append(feed)
        return feed.start() if start else feed

    try:
        yield make
    finally:
        exited = described([feed for feed in feeds if feed.exited_by_itself])
        for feed in feeds:
            feed.kill()
            _running.remove(feed)
        printed = [feed.log_text() for feed in feeds]
        shutil.rmtree(folder, ignore_errors=True)
        assert not exited, exited
        for text in printed:
            assert "Traceback (most recent call last)" not in text, text[-20_000:]
            assert '"stream failed"' not in text, text[-20_000:]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def create_feed_topic(node: NodeProcess, topic: str, partitions: int = 1, **settings: str) -> None:
    """Create a topic that can be in the feed."""
    config = {"message.timestamp.type": "LogAppendTime", **{k.replace("_", "."): v for k, v in settings.items()}}
    admin = AdminClient({"bootstrap.servers": node.address})
    admin.create_topics([NewTopic(topic, partitions, config=config)])[topic].result(30)


def write(
    node: NodeProcess,
    topic: str,
    values: Sequence[bytes],
    *,
    partition: int = 0,
    tenant: str | None = None,
    key: bytes | None = None,
    **headers: bytes,
) -> None:
    """Write records and wait until they are durable."""
    producer = Producer({"bootstrap.servers": node.address, "linger.ms": 5, "log_level": 0})
    named = [("tenant", tenant.encode())] if tenant is not None else []
    named += list(headers.items())
    for value in values:
        while True:
            try:
                producer.produce(topic, value, key, partition=partition, headers=named or None)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0


class Writing:
    """A thread that writes numbered records to the partitions of a topic until it is told to stop."""

    def __init__(
        self, node: NodeProcess | Cluster, topic: str, partitions: int, generator: random.Random, pause_s: float
    ) -> None:
        self.topic, self.partitions = topic, partitions
        self.sent = [0] * partitions
        self.failures: list[str] = []
        self._generator, self._pause_s = generator, pause_s
        self._ended = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": node.address, "enable.idempotence": True, "linger.ms": 2, "log_level": 0,
                "reconnect.backoff.ms": 10, "reconnect.backoff.max.ms": 100, "retry.backoff.ms": 10,
            }
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            partition = self._generator.randrange(self.partitions)
            for _ in range(self._generator.randrange(1, 40)):
                number = self.sent[partition]
                padding = b"." * self._generator.randrange(0, 300)
                self._producer.produce(
                    self.topic, b"%d %b" % (number, padding), partition=partition, on_delivery=self._delivered
                )
                self.sent[partition] += 1
            self._producer.poll(0)
            while len(self._producer) > 2000:
                self._producer.poll(0.01)
            time.sleep(self._pause_s)
        if self._producer.flush(60):
            self.failures.append("records were never acknowledged")

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None:
            self.failures.append(str(error))

    @property
    def count(self) -> int:
        return sum(self.sent)

    @contextmanager
    def running(self) -> Iterator[Writing]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()
        assert not self.failures


def check_complete(seen: Sequence[tuple[str, int, int]], sent: Sequence[int]) -> None:
    """Compare (lsn, partition, number) of what came with what was sent: all of it, once, in the order of LSNs."""
    lsns = [lsn for lsn, _, _ in seen]
    assert all(before < after for before, after in pairwise(lsns)), "LSNs rise strictly"
    for partition, count in enumerate(sent):
        numbers = [number for _, where, number in seen if where == partition]
        assert numbers == list(range(count)), f"partition {partition}: a gap, a repetition or a wrong order"


def metric(feed: FeedProcess, name: str) -> dict[str, float]:
    """Return the samples of a metric by their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{feed.http_port}/metrics", timeout=10) as page:
        text = page.read().decode()
    found = re.findall(rf"^{name}(?:_total)?(?:\{{(.*?)\}})? ([0-9.e+-]+)$", text, flags=re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def health(feed: FeedProcess) -> dict[str, Any]:
    """Return what the feed says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{feed.http_port}/health", timeout=10) as page:
        document: dict[str, Any] = json.load(page)
        return document
