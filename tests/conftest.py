"""Fixtures that every integration test shares: real nodes in real processes.

`node` is one node for a whole test module, for tests that only need a server; `make_node` starts as many of one's own
as a test wants, with settings, for tests that kill or break them. A failing test shows the end of the log of every
node that was running, and no node may have printed a traceback, or exited by itself, by the time it is stopped.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import structlog

from waiting import described, log_title
from walstream.node.process import NodeProcess
from walstream.processes import share_ports

# PostgreSQL servers and databases: postgres18, postgres16, database, each_database, make_postgres, …; feeds: make_feed;
# which worker runs what, and how long it took
pytest_plugins = ("postgres.servers", "integration.feed_processes", "worker_groups")

MakeNode = Callable[..., NodeProcess]

_running: list[NodeProcess] = []
_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    runners = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share_ports(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")), runners)
    # kafka-python reads its schemas, at import and later, through functions that Python 3.11 deprecates.
    config.addinivalue_line("filterwarnings", "ignore:(open|read)_text is deprecated:DeprecationWarning")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for node in _running:
            report.sections.append((log_title(node), node.log_tail()))
    return report


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that ran in a test has sent logging elsewhere, where the next test would not see it."""
    yield
    structlog.reset_defaults()


class Nodes:
    """Starts nodes in folders of their own and ends them all."""

    def __init__(self) -> None:
        # Not pytest's tmp_path: a data folder of many gigabytes must not be kept for three runs.
        self.folder = Path(tempfile.mkdtemp(prefix="walstream-test-"))
        self.nodes: list[NodeProcess] = []

    def make(self, data: Path | None = None, *, start: bool = True, **settings: object) -> NodeProcess:
        """Start a node with settings as `section__key=value`; `start=False` only prepares it."""
        number = len(self.nodes)
        node = NodeProcess(
            data or self.folder / f"data-{number}",
            settings={name.replace("__", "."): _text(value) for name, value in settings.items()},
            log=self.folder / f"node-{number}.log",
        )
        self.nodes.append(node)
        _running.append(node)
        return node.start() if start else node

    def end(self) -> None:
        exited = described([node for node in self.nodes if node.exited_by_itself])
        for node in self.nodes:
            node.kill()
            _running.remove(node)
        printed = [node.log_text() for node in self.nodes]
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not exited, exited
        for text in printed:
            assert "Traceback (most recent call last)" not in text, text[-20_000:]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """One node with the default configuration for all tests of a module."""
    nodes = Nodes()
    try:
        yield nodes.make()
    finally:
        nodes.end()


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """A function that starts a node of the test's own: `make_node(log__segment_bytes=4096)`."""
    nodes = Nodes()
    try:
        yield nodes.make
    finally:
        nodes.end()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    words = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"{words[:60]}-{next(_numbers)}"
