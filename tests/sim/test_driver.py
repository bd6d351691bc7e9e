"""The real log on the simulated disk and driver: what it called durable survives every crash."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from log.rig import batch, values
from walstream.cluster.local import Catalogue, NewTopic
from walstream.errors import WalstreamError
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore
from walstream.sim.clock import SECOND, Clock
from walstream.sim.disk import PowerLost, SimDisk
from walstream.sim.driver import Pace, SimDriver

FOLDER = Path("/data")


class OneNode:
    """A store on its own, started and crashed at will."""

    def __init__(self, seed: int) -> None:
        self.clock = Clock(seed)
        self.disk = SimDisk(self.clock.random)
        self.pace = Pace()
        self.start()

    def start(self) -> None:
        self.driver = SimDriver(self.clock, self.disk, self.pace, self.run)
        catalogue = Catalogue(self.disk, FOLDER, node_id=1, defaults=TopicSettings(segment_bytes=400))
        self.store = LogStore(
            self.disk, FOLDER, catalogue, self.driver, lambda: self.clock.now_ms, lambda: self.clock.now_ms,
            journal_bytes_max=2048, journal_prepared_bytes=1024, new_id=lambda: UUID(int=self.clock.between(0, 2**60)),
        )  # fmt: skip

    def run(self, callback: Callable[[], None]) -> None:
        callback()
        self.driver.pump()

    def append(self, value: str, heard: Callable[[], None]) -> None:
        def visible(error: WalstreamError | None) -> None:
            if error is None:
                heard()

        partition = self.store.partition("t", 0)
        appended = partition.append(memoryview(batch(value)), now_ms=self.clock.now_ms)
        partition.when_visible(appended.last_offset, visible)
        self.driver.pump()

    def crash(self) -> None:
        self.driver.crash()
        self.disk.crash()


@pytest.mark.parametrize("seed", range(40))
def test_what_was_called_durable_survives(seed: int) -> None:
    node = OneNode(seed)
    node.store.create_topics([NewTopic("t", 1, {})])
    sent: list[str] = []
    durable: list[str] = []
    for number in range(120):
        if node.clock.chance(0.08):
            while node.clock.chance(0.7) and node.clock.step():
                pass
            node.crash()
            while True:
                node.disk.fuse = node.clock.between(0, 60) if node.clock.chance(0.5) else None
                try:
                    node.start()
                    node.disk.fuse = None
                    break
                except PowerLost:
                    node.crash()
            found = values(node.store.partition("t", 0))
            assert found[: len(durable)] == durable, "a record that was called durable is gone"
            assert found == sent[: len(found)], "what is there is a prefix of what was sent"
            sent, durable = list(found), list(found)
        value = f"{number}:" + "x" * node.clock.between(0, 60)
        sent.append(value)
        node.append(value, partial(durable.append, value))
        for _ in range(node.clock.between(0, 6)):
            node.clock.step()


def test_a_clean_stop_loses_nothing_and_reads_nothing_again() -> None:
    node = OneNode(3)
    node.store.create_topics([NewTopic("t", 1, {})])
    for number in range(30):
        node.append(str(number), lambda: None)
    node.store.close()
    node.store.mark_clean()
    node.disk.crash()
    node.start()
    assert values(node.store.partition("t", 0)) == [str(number) for number in range(30)]


def test_a_hanging_disk_holds_everything_up_until_it_comes_back() -> None:
    node = OneNode(4)
    node.store.create_topics([NewTopic("t", 1, {})])
    heard: list[str] = []
    node.pace.is_hanging = True
    node.append("a", lambda: heard.append("a"))
    node.clock.after(5 * SECOND, lambda: None)
    while node.clock.step():
        pass
    assert not heard
    node.pace.is_hanging = False
    node.driver.resume()
    while node.clock.step():
        pass
    assert heard == ["a"]


class PausedNode(OneNode):
    """A store whose process can stand still: what happens meanwhile waits."""

    def __init__(self, seed: int) -> None:
        self.waiting: list[Callable[[], None]] | None = None
        super().__init__(seed)

    def run(self, callback: Callable[[], None]) -> None:
        if self.waiting is None:
            super().run(callback)
        else:
            self.waiting.append(callback)


@pytest.mark.parametrize("seed", range(20))
def test_one_flush_ends_before_the_next_one_begins_also_in_a_process_that_stood_still(seed: int) -> None:
    node = PausedNode(seed)
    node.store.create_topics([NewTopic("t", 1, {})])
    node.append("a", lambda: None)
    node.waiting = []
    while node.clock.step():
        pass
    assert node.waiting
    node.waiting = None
    node.append("b", lambda: None)
    node.crash()
    node.start()
    partition = node.store.partition("t", 0)
    assert not partition.damaged
    assert values(partition) in ([], ["a"])


def test_a_dead_driver_tells_nothing() -> None:
    node = OneNode(5)
    node.store.create_topics([NewTopic("t", 1, {})])
    heard: list[str] = []
    node.append("a", lambda: heard.append("a"))
    node.driver.run(lambda: 1, lambda result, error: heard.append("job"))
    node.crash()
    node.driver.run(lambda: 1, lambda result, error: heard.append("job"))
    node.driver.post(lambda: heard.append("post"))
    while node.clock.step():
        pass
    assert not heard
