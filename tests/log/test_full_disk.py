"""A node on a full disk frees itself by every means it offers, and resumes writes by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from disks import MIB, fill_up, free_bytes, small_disk
from log.power import PowerRig
from log.rig import FaultyDisk, Rig, values
from walstream.errors import DirectoryUnusable, DiskFull, StorageError
from walstream.log.disk import OsDisk
from walstream.log.journal import Journal, PartitionKey, Redo
from walstream.log.partition_log import PartitionLog
from walstream.log.settings import TopicSettings
from walstream.log.store import RESERVE_CHECKPOINTS
from walstream.sim.disk import SimDisk

SEGMENT = TopicSettings(segment_bytes=MIB)
HOUR_MS = 3_600_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def rig_on(folder: Path) -> Rig:
    return Rig(folder / "data", OsDisk(reserve=folder / "data" / "reserve"), SEGMENT)


def fill(rig: Rig, *partitions: PartitionLog) -> None:
    """Write to partitions until all of them have met the full disk."""
    for _ in range(1_000):
        writable = [partition for partition in partitions if partition.write_error is None]
        if not writable:
            break
        for partition in writable:
            rig.append(partition, "x" * 50_000)
        rig.driver.flush()
    assert all(isinstance(partition.write_error, DiskFull) for partition in partitions)


def wait(rig: Rig, seconds: int = 40) -> None:
    """Let the store do what is due."""
    for _ in range(seconds):
        rig.now_ms += 1_000
        rig.store.tick()
        rig.driver.flush()


def assert_writes(rig: Rig, partition: PartitionLog) -> None:
    assert partition.write_error is None
    rig.write(partition, "after")
    assert values(partition, partition.high_watermark - 1) == ["after"]
    assert not rig.store.disk.is_reserve_spent


def test_expired_segments_are_removed_from_a_full_disk(disk: Path) -> None:
    rig = rig_on(disk)
    old, new = rig.topic("old", retention_ms=str(HOUR_MS)), rig.topic("new")
    fill(rig, old)
    fill_up(disk)
    fill(rig, new)
    rig.now_ms += HOUR_MS
    wait(rig)
    assert old.log_start > 0
    assert len(list(old.folder.glob("*.log"))) <= 1
    assert_writes(rig, new)


def test_a_lower_retention_takes_effect_at_once_on_a_full_disk(disk: Path) -> None:
    rig = rig_on(disk)
    partition = rig.topic()
    fill(rig, partition)
    fill_up(disk)
    rig.store.configure_topic("t", {"retention.bytes": str(2 * MIB)})
    wait(rig, 3)
    assert len(list(partition.folder.glob("*.log"))) <= 4
    assert_writes(rig, partition)


def test_a_topic_is_deleted_from_a_full_disk(disk: Path) -> None:
    rig = rig_on(disk)
    partition = rig.topic()
    fill(rig, rig.topic("gone"), partition)
    for segment in rig.store.partition("gone", 0).segments:
        segment.read(segment.base_offset, MIB, cached=False, dense=True)  # As consumers do.
    fill_up(disk)
    rig.store.delete_topics(["gone"])
    wait(rig, 3)
    assert_writes(rig, partition)


@pytest.mark.parametrize("has_reserve", [True, False])
def test_a_node_starts_on_a_full_disk_and_frees_it(disk: Path, has_reserve: bool) -> None:
    """Also from a data directory without a reserve, as earlier versions left them: the journal's spare makes room."""
    rig = rig_on(disk)
    fill(rig, rig.topic())
    if not has_reserve:
        (disk / "data" / "reserve").unlink()
    fill_up(disk)
    assert free_bytes(disk) == 0
    for _ in range(2):
        rig = rig_on(disk)  # As a killed process leaves it.
    partition = rig.store.partition("t", 0)
    assert partition.failure is None
    rig.store.configure_topic("t", {"retention.bytes": str(2 * MIB)})
    wait(rig, 3)
    assert_writes(rig, partition)
    rig.store.close()
    rig.store.mark_clean()


def test_what_the_reserve_holds_is_for_what_frees_space(disk: Path) -> None:
    """A partition that has not met the full disk yet must not use up the space that a checkpoint needs."""
    rig = rig_on(disk)
    partition, other = rig.topic(retention_ms=str(HOUR_MS)), rig.topic("other")
    rig.write(other, "before")
    ballast = disk / "six"
    ballast.write_bytes(bytes(6 * MIB))
    fill(rig, partition)
    fill_up(disk)
    rig.store.save_checkpoint(lambda error: None)
    assert rig.store.disk.is_reserve_spent
    left = free_bytes(disk)
    assert left > MIB // 2
    for _ in range(30):
        rig.append(rig.store.partition("other", 0), "x" * 50_000)
        rig.driver.flush()
        if other.write_error is not None:
            break
    assert isinstance(other.write_error, DiskFull)
    assert free_bytes(disk) >= left
    ballast.unlink()
    wait(rig, 3)
    assert_writes(rig, other)


def test_a_reserve_that_could_not_grow_with_the_checkpoint_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    wanted = RESERVE_CHECKPOINTS * 5 * MIB
    answers, asked = [OSError(errno.EIO, "Input/output error"), False, True], list[int]()

    def keep(size: int) -> bool:
        asked.append(size)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(rig.disk, "keep_reserve", keep)
    rig.store._saver.saved_bytes = 5 * MIB
    for _ in range(5):
        rig.store.tick()
    assert asked == [wanted] * 3, "until it is made"


def test_a_few_mib_are_enough_on_a_small_disk_and_the_error_names_how_many(disk: Path) -> None:
    rig = rig_on(disk)
    partition = rig.topic()
    ballast = disk / "six"
    ballast.write_bytes(bytes(6 * MIB))
    fill(rig, partition)
    assert "1.5 MiB are free" in str(partition.write_error)
    wait(rig, 3)
    assert partition.write_error is not None
    ballast.unlink()
    wait(rig, 3)
    assert_writes(rig, partition)


def test_the_error_names_how_much_must_be_free_also_once_the_reserve_is_spent(disk: Path) -> None:
    """The partition meets the full disk first; the checkpoint or catalogue that spends the reserve comes later."""
    rig = rig_on(disk)
    partition = rig.topic()
    ballast = disk / "six"
    ballast.write_bytes(bytes(6 * MIB))
    fill(rig, partition)
    assert "1.5 MiB are free" in str(partition.write_error)
    fill_up(disk)
    rig.store.save_checkpoint(lambda error: None)
    assert rig.store.disk.is_reserve_spent
    assert "2.5 MiB are free" in str(partition.write_error)
    assert rig.store.resume_bytes == 5 * MIB // 2
    with pytest.raises(DiskFull, match=r"2\.5 MiB are free"):
        rig.append(partition, "refused")
    for free_mib in (1.7, 2.3, 2.7):
        assert partition.write_error is not None
        os.truncate(ballast, ballast.stat().st_size - int(free_mib * MIB) + free_bytes(disk))
        wait(rig, 3)
    assert_writes(rig, partition)
    assert rig.store.resume_bytes == 3 * MIB // 2


def test_a_clean_stop_on_a_full_disk_is_clean(disk: Path) -> None:
    rig = rig_on(disk)
    fill(rig, rig.topic())
    fill_up(disk)
    rig.store.save_checkpoint(lambda error: None)
    found = values(rig.store.partition("t", 0))
    again = rig.again(clean=True)
    assert values(again.store.partition("t", 0)) == found


def test_segments_whose_checkpoint_failed_are_removed_with_a_later_one() -> None:
    rig = PowerRig(SimDisk(Random(1)), replicated=False)
    partition = rig.topic(retention_ms="1000")
    for number in range(20):
        rig.write(partition, f"{number:0100d}")
    rig.settle()
    rig.now_ms += HOUR_MS
    rig.disk.is_full, rig.disk.has_reserve = True, False
    rig.store.tick()
    rig.driver.flush()
    assert partition.log_start == 20
    assert sum(path.endswith(".log") for path, _ in rig.disk.files()) > 5
    rig.disk.is_full = False
    wait(rig)
    assert sum(path.endswith(".log") for path, _ in rig.disk.files()) <= 1


class Sticky(FaultyDisk):
    """A disk that refuses to remove some files."""

    refused = ""

    def remove(self, path: Path) -> None:
        if self.refused and path.name.endswith(self.refused):
            raise OSError(errno.EIO, "Input/output error")
        super().remove(path)


@pytest.mark.parametrize("refused", [".log", ".index"])
def test_segments_that_could_not_be_removed_are_tried_again(tmp_path: Path, refused: str) -> None:
    disk = Sticky()
    rig = Rig(tmp_path, disk, TopicSettings(segment_bytes=400))
    partition = rig.topic(retention_ms="1000")
    for number in range(20):
        rig.write(partition, f"{number:0100d}")
    rig.settle()
    rig.now_ms += HOUR_MS
    disk.refused = refused
    rig.store.tick()
    rig.driver.flush()
    assert len(list(partition.folder.glob("*" + refused))) > 5
    disk.refused = ""
    wait(rig)
    assert len(list(partition.folder.glob("*" + refused))) <= 1


def test_a_checkpoint_that_fails_refuses_delete_records_as_a_storage_error() -> None:
    rig = PowerRig(SimDisk(Random(1)), replicated=False)
    partition = rig.topic()
    rig.write(partition, "a")
    rig.disk.is_full, rig.disk.has_reserve = True, False
    heard: list[Exception | None] = []
    rig.store.delete_records(partition, 1, heard.append)
    assert isinstance(heard[0], StorageError)


def test_a_catalogue_that_cannot_be_written_is_a_storage_error() -> None:
    rig = PowerRig(SimDisk(Random(1)), replicated=False)
    rig.topic()
    rig.disk.is_full, rig.disk.has_reserve = True, False
    for change in (
        lambda: rig.topic("other"),
        lambda: rig.store.configure_topic("t", {"retention.ms": "1"}),
        lambda: rig.store.delete_topics(["t"]),
        lambda: rig.store.grow_topic("t", 2),
        rig.catalogue.next_producer_id,
    ):
        with pytest.raises(DirectoryUnusable, match="No space left"):
            change()
    assert list(rig.catalogue.topics) == ["t"]
    assert rig.store.partition("t", 0).settings.retention_ms > 1


def lost_from_the_page_cache(rig: Rig, partition: PartitionLog) -> None:
    """Empty a segment's file, as a power cut does that leaves its batches in the journal alone."""
    segment = partition.segments[-1]
    os.truncate(segment.path, segment.synced_size)


def test_what_the_journal_alone_has_is_recovered_on_a_full_disk(disk: Path) -> None:
    rig = rig_on(disk)
    partition = rig.topic()
    rig.write(partition, "synced")
    rig.settle()
    for number in range(40):
        rig.write(partition, f"{number:010000d}")
    found = values(partition)
    lost_from_the_page_cache(rig, partition)
    fill_up(disk)
    again = rig_on(disk).store.partition("t", 0)
    assert values(again) == found


def test_a_start_that_cannot_recover_for_lack_of_space_says_so_and_loses_nothing() -> None:
    rig = PowerRig(SimDisk(Random(1)))
    partition = rig.topic()
    rig.follow(partition, 1)
    rig.receive(partition, 1, "a" * 100)
    rig.driver.flush()
    assert partition.durable_end == 1
    for path, inode in rig.disk.files():
        if path.endswith(".log"):  # The journal has what did not reach the platter here.
            inode.data.clear()
            inode.durable.clear()
    rig.disk.is_full = True
    with pytest.raises(DirectoryUnusable, match="cannot be recovered"):
        rig.again()
    rig.disk.is_full = False
    again = rig.again().store.partition("t", 0)
    assert (again.log_end, again.is_unclean) == (1, False)


def test_partitions_that_resume_after_a_broken_journal_take_no_journal_file_each(tmp_path: Path) -> None:
    """Each file is written with 4 MiB of zeros: on a small disk, which was full just now, they would fill it again."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    rig.topic(partitions=20)
    partitions = [rig.store.partition("t", index) for index in range(20)]
    disk.faults["write", ".journal"] = errno.ENOSPC
    for partition in partitions:
        rig.append(partition, "refused")
    rig.driver.flush()
    assert all(isinstance(partition.write_error, DiskFull) for partition in partitions)
    disk.faults.clear()
    wait(rig, 1)
    for partition in partitions:
        rig.append(partition, "after")
    rig.driver.flush()
    journaled = rig.store.commit.counters.journaled
    assert journaled == 1, "the journal is used again"
    assert len(list((tmp_path / "journal").iterdir())) <= 3
    again = rig.again()
    for index in range(20):
        assert values(again.store.partition("t", index))[-1] == "after"


@pytest.mark.parametrize("is_rotated", [False, True])
def test_partitions_that_resume_together_read_the_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rotated: bool
) -> None:
    """It can hold 64 MiB, and the flush thread, which reads it, makes no write durable meanwhile. A rotation frees the
    files that were read: the reading does not outlive it."""
    rig = Rig(tmp_path)
    rig.topic(partitions=20)
    partitions = [rig.store.partition("t", index) for index in range(20)]
    for partition in partitions:
        rig.append(partition, "kept")
    rig.driver.flush()
    assert rig.store.commit.counters.journaled == 1
    readings: list[int] = []
    read = Journal.read

    def counted(journal: Journal) -> dict[PartitionKey, Redo]:
        readings.append(journal.number)
        if is_rotated and len(readings) == 1:
            rig.store.commit.ask_settling()
        return read(journal)

    monkeypatch.setattr(Journal, "read", counted)
    for partition in partitions:
        partition.stop(DiskFull("full"))
        if not is_rotated:
            lost_from_the_page_cache(rig, partition)
    wait(rig, 1)
    assert [partition.write_error for partition in partitions] == [None] * 20
    assert [values(partition) for partition in partitions] == [["kept"]] * 20
    assert len(readings) == len(set(readings)) == 1 + is_rotated
