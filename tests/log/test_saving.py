"""Checkpoints are collected in slices of the event loop's time, and changes of the catalogue made one at a time."""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from log.rig import LateDriver, Rig, batch, values
from walstream.cluster.local import Change, NewTopic, Topic
from walstream.errors import DirectoryUnusable, TopicExists
from walstream.log.checkpoint import Checkpoint, PartitionCheckpoint, encode
from walstream.log.disk import OsDisk
from walstream.log.driver import InlineDriver
from walstream.log.partition_log import PartitionLog
from walstream.log.producers import ProducerStates
from walstream.log.saving import SLICE_ENTRIES
from walstream.log.settings import TopicSettings


class Loop(InlineDriver):
    """Runs what is posted when told, as an event loop does later."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: deque[Callable[[], None]] = deque()

    def post(self, callback: Callable[[], None]) -> None:
        self.posted.append(callback)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the partitions whose state was collected have."""
    counted: list[int] = []
    checkpoint = PartitionLog.checkpoint

    def counting(self: PartitionLog) -> PartitionCheckpoint:
        state = checkpoint(self)
        counted.append(1 + len(state.producers))
        return state

    monkeypatch.setattr(PartitionLog, "checkpoint", counting)
    return counted


def producers(count: int) -> ProducerStates:
    rows = [(number, 0, 0, [(0, 0, -1, 0)] * 5) for number in range(count)]
    return ProducerStates.restore(rows, now_ms=0)


def test_no_callback_collects_more_than_a_slice(tmp_path: Path, entries: list[int]) -> None:
    loop = Loop()
    rig = Rig(tmp_path, driver=loop)
    rig.topic(partitions=1_000)
    for partition in rig.store.partitions.values():
        partition.producers = producers(100)
    heard: list[Exception | None] = []
    entries.clear()
    rig.store.save_checkpoint(heard.append)
    slices = [sum(entries)]
    while loop.posted:
        assert heard == [], "not before all of it is durable"
        entries.clear()
        loop.posted.popleft()()
        slices.append(sum(entries))
    assert heard == [None]
    assert max(slices) <= SLICE_ENTRIES + 1 + 100
    assert sum(slices) == 1_000 * (1 + 100)
    saved = json.loads((tmp_path / "checkpoint.json").read_text())
    assert len(saved["partitions"]) == 1_000
    assert all(len(state["producers"]) == 100 for state in saved["partitions"].values())


def test_a_checkpoint_that_has_begun_serves_nobody_who_comes_later(tmp_path: Path) -> None:
    loop = Loop()
    rig = Rig(tmp_path, driver=loop)
    partition = rig.topic(partitions=30)
    for one in rig.store.partitions.values():
        one.producers = producers(SLICE_ENTRIES)
    heard: list[str] = []
    rig.store.save_checkpoint(lambda error: heard.append(f"first {error}"))
    partition.gaps_below = 7
    rig.store.save_checkpoint(lambda error: heard.append(f"second {error}"))
    rig.store.delete_topics([])
    while not heard:
        loop.posted.popleft()()
    assert heard == ["first None"]
    assert rig.store._saver.saved.partition(partition.key).gaps_below == 0
    while loop.posted:
        loop.posted.popleft()()
    assert heard == ["first None", "second None"]
    assert rig.store._saver.saved.partition(partition.key).gaps_below == 7


def test_partitions_that_come_and_go_meanwhile(tmp_path: Path) -> None:
    loop = Loop()
    rig = Rig(tmp_path, driver=loop)
    rig.topic("gone", partitions=2)
    kept = rig.topic("kept")
    for one in rig.store.partitions.values():
        one.producers = producers(SLICE_ENTRIES)
    heard: list[Exception | None] = []
    rig.store.save_checkpoint(heard.append)
    rig.store.delete_topics(["gone"])
    new = rig.topic("new")
    while not heard:
        loop.posted.popleft()()
    assert heard == [None]
    saved = rig.store._saver.saved
    assert saved.partition(kept.key) is not None
    assert saved.partition(new.key) is None
    again = Rig(tmp_path)
    assert sorted(again.store.partitions) == [("kept", 0), ("new", 0)]


@pytest.mark.parametrize("partitions", [9, 10])
def test_indexes_are_saved_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int) -> None:
    """And a checkpoint after them, also where the last slice has none: without it recovery does not read on there."""
    monkeypatch.setattr("walstream.log.store.INDEX_BYTES_PER_SLICE", 3_000)
    loop = Loop()
    rig = Rig(tmp_path, driver=loop)
    rig.topic(partitions=partitions)
    for partition in rig.store.partitions.values():
        partition.append(memoryview(batch("x", now_ms=rig.now_ms)), now_ms=rig.now_ms)
    loop.flush()
    rig.now_ms += 30_000
    rig.store.tick()
    callbacks = 0
    while loop.posted:
        loop.posted.popleft()()
        callbacks += 1
    assert callbacks >= 3
    assert len(list(tmp_path.glob("topics/*/*/*.index"))) == partitions
    assert len(rig.store._saver.saved.partitions) == partitions


def test_the_file_is_what_encoding_all_at_once_gives() -> None:
    states = {f"id/{index}": PartitionCheckpoint(index, 0, 0, index, producers=[(1, 2, 0, ())]) for index in range(3)}
    for partitions in (states, {}):
        checkpoint = Checkpoint(epoch=5, clean=True, partitions=partitions)
        assert encode(checkpoint) == msgspec.json.encode(checkpoint)


# ── changes of the catalogue ─────────────────────────────────────────────────────────────────────────────────────────


class FullDisk(OsDisk):
    is_full = False

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        if self.is_full and path.name == "topics.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, data, durable=durable)


def test_each_change_is_planned_from_the_one_before(tmp_path: Path) -> None:
    disk, driver = FullDisk(), LateDriver()
    rig = Rig(tmp_path, disk, driver=driver)
    store, catalogue = rig.store, rig.catalogue
    heard: list[str] = []

    def noting(name: str) -> Callable[[Change | None, Exception | None], None]:
        return lambda change, error: heard.append(f"{name}: {type(error).__name__ if error else change and 'done'}")

    driver.is_late = True
    for name, partitions in (("a", 1), ("b", 1), ("a", 2)):
        store.changes.submit(partial(catalogue.create, [NewTopic(name, partitions, {})]), noting(f"{name}{partitions}"))
    store.changes.submit(lambda: None, noting("nothing"))
    store.changes.submit(partial(catalogue.grow, "a", 3), noting("grow"))
    assert heard == []
    assert catalogue.topics == {}
    assert store.partitions == {}
    driver.run_next()
    assert heard == ["a1: done"]
    assert list(store.partitions) == [("a", 0)]
    disk.is_full = True
    driver.run_next()
    assert heard[1:] == [f"b1: {DirectoryUnusable.__name__}", f"a2: {TopicExists.__name__}", "nothing: None"]
    assert list(catalogue.topics) == ["a"], "what is not durable does not show"
    disk.is_full = False
    driver.run_next()
    assert heard[4:] == ["grow: done"]
    assert len(store.partitions) == 3
    assert not driver.run_next()
    again = Rig(tmp_path)
    assert again.catalogue.topics == catalogue.topics
    assert again.catalogue.version == catalogue.version == 2


def test_a_failure_of_one_change_does_not_hold_up_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    store, catalogue = rig.store, rig.catalogue
    heard: list[str] = []
    settings = catalogue.settings

    def failing(topic: Topic) -> TopicSettings:
        if topic.name == "a":
            raise RuntimeError("a bug")
        return settings(topic)

    def note(change: Change | None, error: Exception | None) -> None:
        heard.append(repr(error))
        raise RuntimeError("another bug")

    monkeypatch.setattr(catalogue, "settings", failing)
    for name in "abc":
        store.changes.submit(partial(catalogue.create, [NewTopic(name, 1, {})]), note)
    assert heard == ["RuntimeError('a bug')", "None", "None"]
    assert list(catalogue.topics) == ["b", "c"]


class ReplacingDisk(OsDisk):
    """Fails to make `topics.json` durable: first behind the renaming, then before it."""

    fails = False
    is_replaced = False

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        is_failing = self.fails and path.name == "topics.json"
        if not is_failing or not self.is_replaced:
            super().write(path, data, durable=durable)
        if is_failing:
            self.is_replaced = True
            raise OSError(errno.EIO, "I/O error")


@pytest.mark.parametrize("cure", ["tick", "change", "stop"])
def test_the_file_of_a_change_that_was_refused_is_restored_when_the_disk_takes_it(tmp_path: Path, cure: str) -> None:
    disk = ReplacingDisk()
    rig = Rig(tmp_path, disk)
    store, catalogue = rig.store, rig.catalogue
    store.create_topics([NewTopic("t", 1, {})])
    refused: list[Exception | None] = []
    disk.fails = True
    store.changes.submit(partial(catalogue.delete, ["t"]), lambda _, error: refused.append(error))
    assert isinstance(refused[0], DirectoryUnusable)
    store.tick()
    assert not catalogue.is_file_current
    assert not json.loads((tmp_path / "topics.json").read_bytes())["topics"]
    rig.write(store.partition("t", 0), "a")
    disk.fails = False
    if cure == "tick":
        store.tick()
    elif cure == "change":
        store.changes.submit(partial(catalogue.create, [NewTopic("u", 1, {})]), lambda _, error: refused.append(error))
        assert refused[1:] == [None]
    store.close()
    if cure == "stop":
        store.mark_clean()
    assert catalogue.is_file_current
    assert values(Rig(tmp_path).store.partition("t", 0)) == ["a"]


def test_a_change_waits_for_the_file_to_be_restored(tmp_path: Path) -> None:
    """Written after it, the older catalogue would be there at the next start."""
    driver = LateDriver()
    rig = Rig(tmp_path, driver=driver)
    rig.catalogue.is_file_current = False
    driver.is_late = True
    rig.store.changes.restore_file()
    rig.store.changes.submit(partial(rig.catalogue.create, [NewTopic("t", 1, {})]), lambda _, __: None)
    while driver.run_next():
        pass
    assert list(Rig(tmp_path).catalogue.topics) == ["t"]
