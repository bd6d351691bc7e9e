"""Partitions that are offline, because their files could not be opened, or a write or a truncation failed."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from log.power import PowerRig, contents
from log.rig import FaultyDisk, Rig, values
from log.test_cleaner import compacted, fill, settle, table
from walstream.errors import OutOfFiles, PartitionOffline, StorageError
from walstream.log.settings import TopicSettings
from walstream.log.truncation import ANNOUNCEMENT
from walstream.sim.disk import SimDisk


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_clean_stop_trusts_no_segment_list_from_before_a_failed_open(tmp_path: Path, is_offline: bool) -> None:
    """Compaction has replaced the segments that the last checkpoint lists, and that checkpoint is all that is known."""
    rig = Rig(tmp_path)
    partition = compacted(rig)
    fill(rig, partition, 500)
    settle(rig)
    expected, _ = table(partition)
    rig.disk.faults = {("sync", ".log"): errno.EIO} if is_offline else {}
    rig = rig.again()
    assert (rig.store.partition("t", 0).failure is not None) == is_offline
    rig.disk.faults = {}
    rig.store.close()
    assert rig.store.mark_clean() != is_offline
    partition = rig.again().store.partition("t", 0)
    assert (partition.failure, partition.damaged) == (None, [])
    assert table(partition)[0] == expected


class Forgetful(SimDisk):
    """A disk that has no descriptor left to sync the folder from which an announcement was removed."""

    is_armed = has_removed = False

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.has_removed = self.has_removed or path.name == ANNOUNCEMENT

    def sync_directory(self, path: Path) -> None:
        if self.is_armed and self.has_removed:
            self.is_armed = False
            raise OSError(errno.EMFILE, "Too many open files")
        super().sync_directory(path)


@pytest.mark.parametrize("then", ["clean stop", "kill", "reopening"])
@pytest.mark.parametrize("is_reset", [False, True])
def test_an_announcement_whose_removal_failed_truncates_nothing_later(then: str, is_reset: bool) -> None:
    for seed in range(20):
        disk = Forgetful(Random(seed))
        rig = PowerRig(disk, defaults=TopicSettings())  # One segment: no later one has its name synced.
        partition = rig.topic()
        rig.follow(partition, 1)
        for number in range(10):
            rig.receive(partition, 1, f"old {number}")
            rig.driver.flush()
        rig.settle()
        disk.is_armed = True
        errors: list[Exception | None] = []
        (partition.reset if is_reset else partition.truncate)(5, errors.append)
        rig.driver.flush()
        assert errors != [None]
        if then == "reopening":
            rig.now_ms += 1000
            rig.store.tick()
            rig.driver.flush()
        else:
            rig = rig.again(clean=then == "clean stop")
        partition = rig.store.partition("t", 0)
        rig.follow(partition, 2)
        for number in range(6):
            rig.receive(partition, 2, f"new {number}")
            rig.driver.flush()
        disk.crash()
        partition = rig.again().store.partition("t", 0)
        assert (partition.durable_end, partition.damaged, partition.is_unclean) == (11, [], False), seed


def test_records_of_a_partition_that_could_not_be_opened_are_not_deleted(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.topic()
    rig.write(partition, "a")
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.write(partition, "b")
    rig.disk.faults = {("sync", ".log"): errno.EIO}
    rig = rig.again()
    partition = rig.store.partition("t", 0)
    errors: list[Exception | None] = []
    with pytest.raises(PartitionOffline):
        rig.store.delete_records(partition, partition.high_watermark, errors.append)
    assert errors == []
    rig.disk.faults = {}
    assert values(rig.again().store.partition("t", 0)) == ["a", "b"]


@pytest.mark.parametrize("replicated", [False, True])
def test_a_node_starts_where_an_unopened_log_begins_above_its_synced_end(tmp_path: Path, replicated: bool) -> None:
    """The log start and an epoch lie where only the journal has batches."""
    rig = Rig(tmp_path, replicated=replicated)
    partition = rig.topic()

    def lead(epoch: int) -> None:
        if replicated:
            partition.become_leader(epoch, lambda error: None)

    lead(1)
    for _ in range(5):
        rig.write(partition, "x")
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    lead(2)
    for _ in range(2):
        rig.write(partition, "y")
    partition.advance_high_watermark(7)
    rig.store.delete_records(partition, 6, lambda error: None)
    rig.disk.faults = {("sync", f"/{partition.folder.parent.name}/0/"): errno.EIO}
    for _ in range(2):
        rig = rig.again(replicated=replicated)
        partition = rig.store.partition("t", 0)
        assert partition.failure is not None
        assert (partition.log_start, partition.high_watermark, partition.log_end) == (6, 6, 6)
    rig.disk.faults = {}
    partition = rig.again(replicated=replicated).store.partition("t", 0)
    assert (partition.log_start, partition.log_end, partition.damaged) == (6, 7, [])


class Stopping(FaultyDisk):
    """A disk that ends the process before compaction puts a successor in its place."""

    is_ending = False

    def rename(self, source: Path, target: Path) -> None:
        if self.is_ending and source.suffix == ".swap":
            raise KeyboardInterrupt
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self.check("sync", path)
        super().sync_directory(path)


@pytest.mark.parametrize("clean", [False, True])
def test_a_reset_leaves_no_compacted_segment_behind(tmp_path: Path, clean: bool) -> None:
    """The `.swap` that a start could not put in place would take the place of the new log at the next one."""
    disk = Stopping()
    rig = Rig(tmp_path, disk, replicated=True)
    partition = compacted(rig)
    partition.become_leader(1, lambda error: None)
    fill(rig, partition, 200)
    partition.advance_high_watermark(partition.log_end)
    disk.is_ending = True
    with pytest.raises(KeyboardInterrupt):
        settle(rig)
    assert [name for name in disk.list(partition.folder) if name.endswith(".swap")]
    disk.is_ending = False
    disk.faults = {("sync", str(partition.folder)): errno.EIO}
    rig = rig.again(replicated=True)
    partition = rig.store.partition("t", 0)
    assert partition.failure is not None
    disk.faults = {}
    (partition.folder / "00000000000000000000-00000000000000000009.clean").write_bytes(b"begun")
    errors: list[Exception | None] = []
    partition.reset(0, errors.append)
    rig.driver.flush()
    assert errors == [None]
    assert disk.list(partition.folder) == []
    partition.become_leader(2, lambda error: None)
    fill(rig, partition, 200, seed=1)
    partition.advance_high_watermark(partition.log_end)
    expected, _ = table(partition)
    partition = rig.again(clean=clean, replicated=True).store.partition("t", 0)
    partition.advance_high_watermark(partition.durable_end)
    assert (partition.failure, partition.damaged, partition.epochs.to_list()) == (None, [], [[2, 0]])
    assert table(partition)[0] == expected


class Unannounced(FaultyDisk):
    """A disk that writes no announcement of a truncation while it is broken."""

    is_broken = False

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        if self.is_broken and path.name == ANNOUNCEMENT:
            raise OSError(errno.EIO, "Input/output error")
        super().write(path, data, durable=durable)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("to", [15, 20, 30])
def test_an_offline_log_is_not_truncated_and_keeps_its_epochs(tmp_path: Path, to: int, clean: bool) -> None:
    """Its end was lowered by a truncation that failed: what lies above is still in the files."""
    rig = Rig(tmp_path, Unannounced(), replicated=True)
    partition = rig.topic()
    for epoch in (1, 2, 3):
        partition.become_leader(epoch, lambda error: None)
        for _ in range(10):
            rig.write(partition, f"{epoch}")
    partition.become_follower(4, lambda error: None)
    epochs = partition.epochs.to_list()
    errors: list[Exception | None] = []
    rig.disk.is_broken = True
    for offset in (15, to):  # The second one waits for the first.
        partition.truncate(offset, errors.append)
    rig.driver.flush()
    rig.disk.is_broken = False
    partition.truncate(to, errors.append)
    partition.become_leader(5, errors.append)
    rig.driver.flush()
    assert [type(error) for error in errors] == [PartitionOffline] * 4
    assert not partition.is_leader
    partition = rig.again(clean=clean, replicated=True).store.partition("t", 0)
    assert (partition.log_end, partition.epochs.to_list()) == (30, epochs)
    assert len(contents(partition)) == 30


def test_a_log_that_could_not_be_opened_does_not_lead(tmp_path: Path) -> None:
    """Followers would truncate their logs to its seeming end."""
    rig = Rig(tmp_path, replicated=True)
    partition = rig.topic()
    partition.become_leader(1, lambda error: None)
    rig.write(partition, "a")
    rig.disk.faults = {("sync", ".log"): errno.EIO}
    partition = rig.again(replicated=True).store.partition("t", 0)
    errors: list[Exception | None] = []
    partition.become_leader(2, errors.append)
    assert [type(error) for error in errors] == [PartitionOffline]
    assert not partition.is_leader


class Uncheckpointed(FaultyDisk):
    """A disk that writes no checkpoint while it is broken."""

    is_broken = False

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        if self.is_broken and path.name == "checkpoint.json":
            raise OSError(errno.EMFILE, "Too many open files")
        super().write(path, data, durable=durable)


@pytest.mark.parametrize("is_saved", [False, True])
def test_reopening_removes_no_segment_above_the_durable_log_start(tmp_path: Path, is_saved: bool) -> None:
    """The checkpoint of a DeleteRecords failed: after a kill the log starts where it did before."""
    rig = Rig(tmp_path, Uncheckpointed())
    partition = rig.topic(segment_bytes="1024")
    for number in range(40):
        rig.write(partition, f"{number}" * 20)
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.disk.is_broken = True
    rig.disk.faults = {("write", ".log"): errno.EMFILE}
    rig.append(partition, "refused")
    rig.driver.flush()
    errors: list[Exception | None] = []
    rig.store.delete_records(partition, 20, errors.append)
    assert [type(error) for error in errors] == [StorageError]
    rig.disk.faults = {}
    rig.store.tick()
    rig.driver.flush()
    assert isinstance(partition.write_error, OutOfFiles), "it waits until the log start is durable"
    assert rig.disk.list(partition.folder)[0].startswith(f"{0:020d}")
    rig.disk.is_broken = False
    if is_saved:
        rig.store.tick()
        rig.driver.flush()
        assert (partition.write_error, partition.log_start, len(values(partition))) == (None, 20, 20)
        assert rig.disk.list(partition.folder)[0].startswith(f"{20:020d}"), "the segments that were kept are removed"
    partition = rig.again().store.partition("t", 0)
    start = 20 if is_saved else 0
    assert (partition.log_start, partition.damaged, len(values(partition))) == (start, [], 40 - start)
