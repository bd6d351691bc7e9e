"""Distribution of the tests over workers: everything that needs a JVM in one worker, every other module whole.

A test belongs to the group `jvm` or to its module, and a group runs in one worker: session and module fixtures start
once for it, and a small machine never holds several Spark sessions. Groups that start processes run first, so that the
last ones are short. What a test needs is read from its fixtures; a test that starts a JVM or servers without them has
the marker `jvm` or `processes`. A test that needs neither is marked `fast`. The seconds of every group are printed at
the end of a run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

JVM = "jvm"
JVM_FIXTURES = {"spark", "kafka"}
SHARED_FIXTURES = {"node", "spark_node", "postgres18", "postgres16", "postgres15", "each_database"}
"""Fixtures with a server that several tests use."""
OWN_FIXTURES = {"make_node", "make_postgres", "make_feed"}
"""Fixtures that start servers for one test."""

GROUPS_SHOWN = 60
_CPU = Path("/proc/stat")
_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


class Scheduling(LoadScopeScheduling):
    """Sends all tests with a JVM to one worker, and the tests of every other module to one."""

    def schedule(self) -> None:
        if not _jvm_tests:
            # Only workers know a test's fixtures; all of them have collected by now.
            _jvm_tests.update(_list(self.config.stash[_FOLDER].name).read_text(encoding="utf-8").split("\0"))
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


_jvm_tests: set[str] = set()


def group_of(nodeid: str) -> str:
    return JVM if nodeid in _jvm_tests else nodeid.partition("::")[0]


def _list(folder: str) -> Path:
    return Path(folder) / "jvm_tests"


def pytest_configure_node(node: Any) -> None:
    """In the controller, for each worker: tell it where the list of tests with a JVM belongs."""
    stash = node.config.stash
    if _FOLDER not in stash:
        stash[_FOLDER] = tempfile.TemporaryDirectory(prefix="walstream-test-")
        node.config.add_cleanup(stash[_FOLDER].cleanup)
    node.workerinput["groups"] = stash[_FOLDER].name


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` reads the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        starts_processes = bool(OWN_FIXTURES & fixtures) or item.get_closest_marker("processes") is not None
        if JVM_FIXTURES & fixtures or item.get_closest_marker(JVM) is not None:
            _jvm_tests.add(item.nodeid)
        elif not starts_processes and not SHARED_FIXTURES & fixtures:
            item.add_marker(pytest.mark.fast)
        seconds[group_of(item.nodeid)] += 5 if starts_processes else 0.5 if SHARED_FIXTURES & fixtures else 0.02
    items.sort(key=lambda item: (group_of(item.nodeid) != JVM, -seconds[group_of(item.nodeid)]))
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        _list(config.workerinput["groups"]).write_text("\0".join(_jvm_tests), encoding="utf-8")  # type: ignore[attr-defined]


def _cpu_ticks() -> tuple[int, int]:
    """Return the ticks in which the cores were idle or waited for the disk, and all ticks."""
    if not _CPU.exists():
        return 0, 0
    ticks = [int(field) for field in _CPU.read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


_started = time.monotonic(), *_cpu_ticks()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seconds of every group in its worker, fixtures included, and how much of the CPU was used."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    workers: dict[str, float] = defaultdict(float)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            worker = getattr(report, "worker_id", "")
            seconds[worker, group_of(report.nodeid)] += report.duration
            workers[worker] += report.duration
    if not any(workers):
        return  # one process
    terminalreporter.section("seconds per group")
    ranked = sorted(seconds.items(), key=lambda entry: -entry[1])
    for (worker, group), spent in ranked[:GROUPS_SHOWN]:
        terminalreporter.write_line(f"{spent:8.1f}  {worker}  {group}")
    rest = ranked[GROUPS_SHOWN:]
    terminalreporter.write_line(f"{sum(spent for _, spent in rest):8.1f}  in {len(rest)} more groups")
    for worker, spent in sorted(workers.items()):
        terminalreporter.write_line(f"{spent:8.1f}  {worker}  in all")
    began, idle, ticks = _started
    idle_now, ticks_now = _cpu_ticks()
    idle_share = (idle_now - idle) / max(1, ticks_now - ticks)
    terminalreporter.write_line(f"{time.monotonic() - began:8.1f}  by the clock, the cores idle for {idle_share:.0%}")
