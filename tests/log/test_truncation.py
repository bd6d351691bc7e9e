"""Cutting a log back, and what a power cut leaves of it: the old log or the new one, at every moment."""

from __future__ import annotations

import errno
from random import Random

import pytest

from log.power import PowerRig, after_every_crash, contents
from log.rig import FaultyDisk, Rig, batch, outcome
from walstream.errors import DiskFull, NotLeader, PartitionOffline
from walstream.log.batch import stamp, walk
from walstream.log.settings import TopicSettings
from walstream.log.truncation import ANNOUNCEMENT, announce, plan
from walstream.sim.disk import SimDisk

PRODUCER = {"producer_id": 7, "producer_epoch": 0}


@pytest.fixture
def rig() -> PowerRig:
    return PowerRig(SimDisk(Random(1)))


def filled(rig: PowerRig, count: int = 12, *, flushed: int = 100, epoch_every: int = 4):
    """Make a follower's log over several segments, in several epochs; the last batches not flushed."""
    partition = rig.topic()
    rig.follow(partition, 9)
    for number in range(count):
        rig.receive(partition, 1 + number // epoch_every, f"{number:060d}", base_sequence=number, **PRODUCER)
        if number < flushed and number % 3 == 2:
            rig.driver.flush()
    if count <= flushed:
        rig.driver.flush()
    return partition


def cut(rig, partition, to):
    heard = []
    partition.truncate(to, heard.append)
    rig.driver.flush()
    assert heard == [None]


@pytest.mark.parametrize("to", range(13))
def test_everything_from_the_offset_on_is_gone(rig: PowerRig, to: int) -> None:
    partition = filled(rig)
    before = contents(partition)
    epochs = [pair for pair in partition.epochs.to_list() if pair[1] < to]
    cut(rig, partition, to)
    for log in (partition, rig.again().store.partition("t", 0)):
        assert (log.log_end, log.durable_end) == (to, to)
        assert contents(log) == before[:to]
        assert log.epochs.to_list() == epochs
    assert ANNOUNCEMENT not in rig.disk.list(partition.folder)


def test_what_a_start_has_truncated_does_not_come_back_from_a_journal_that_is_kept(tmp_path) -> None:
    """The power went between the announcement and the FORGET, and then another partition could not be opened."""
    rig = Rig(tmp_path, replicated=True)
    partition, other = rig.topic(), rig.topic("other")
    for log in (partition, other):
        log.become_leader(1, lambda error: None)
        for value in ("a", "b"):
            rig.write(log, value)
    announce(rig.disk, partition.folder, plan(partition.segments, 1, partition.gaps_below))
    rig.disk.faults["write", "/other@"] = errno.EIO
    rig = rig.again(replicated=True)
    assert rig.store.partition("other", 0).failure is not None
    assert rig.store.partition("t", 0).log_end == 1
    rig.disk.faults.clear()
    rig = rig.again(replicated=True)
    assert rig.store.partition("other", 0).log_end == 2
    assert rig.store.partition("t", 0).log_end == 1


@pytest.mark.parametrize("position", [2, 4, 10, 24])
@pytest.mark.parametrize("to", [4, 8])
def test_rot_in_a_header_before_it_takes_nothing_else_along(position: int, to: int) -> None:
    rig = PowerRig(SimDisk(Random(1)), defaults=TopicSettings(segment_bytes=10_000))
    partition = filled(rig)
    rig.settle()
    second = list(partition.segments[0].headers(0))[1][0]
    for content in (inode.data for path, inode in rig.disk.files() if path.endswith(".log")):
        content[second + position] ^= 0x10
    cut(rig, partition, to)
    assert (partition.log_end, partition.durable_end) == (to, to)
    kept = b"".join(partition.read_replica_blocking(2, 10_000).buffers)
    assert [header.base_offset for _, header in walk(kept)] == list(range(2, to))


@pytest.mark.parametrize("to", range(13))
@pytest.mark.parametrize("loses_snapshots", [False, True])
def test_producers_are_what_they_were_there(rig: PowerRig, to: int, loses_snapshots: bool) -> None:
    partition = filled(rig)
    if loses_snapshots:
        for name in rig.disk.list(partition.folder):
            if name.endswith(".producers"):
                rig.disk.remove(partition.folder / name)
    cut(rig, partition, to)
    expected = PowerRig(SimDisk(Random(2)))
    assert batches_of(partition) == batches_of(filled(expected, to))
    assert batches_of(rig.again().store.partition("t", 0)) == batches_of(partition)


def batches_of(partition):
    return [row[:2] + row[3:] for row in partition.producers.snapshot()]


def test_a_batch_that_holds_the_offset_goes_as_a_whole(rig: PowerRig) -> None:
    partition = rig.topic()
    rig.follow(partition, 1)
    rig.receive(partition, 1, "a", "b")
    rig.receive(partition, 1, "c", "d", "e")
    rig.driver.flush()
    cut(rig, partition, 3)
    assert partition.log_end == partition.durable_end == 2


def test_what_is_queued_is_cut_too_and_its_flush_changes_nothing(rig: PowerRig) -> None:
    partition = filled(rig, 12, flushed=6)
    durable = partition.durable_end
    assert durable < partition.log_end
    heard, said = [], outcome(partition, 11)
    survivor: list = []
    partition.when_durable(6, survivor.append)
    partition.truncate(8, heard.append)
    assert partition.log_end == 8
    assert isinstance(said[0], NotLeader)
    with pytest.raises(PartitionOffline):
        rig.receive(partition, 3, "too early")
    rig.driver.flush()
    assert heard == survivor == [None]
    assert partition.durable_end == partition.log_end == 8
    assert len(partition.read_replica(8, 1000).buffers) == 0
    rig.receive(partition, 5, "other bytes")
    rig.driver.flush()
    assert contents(partition)[8][1] == 5
    assert contents(rig.again().store.partition("t", 0)) == contents(partition)


def test_the_high_watermark_goes_with_it(rig: PowerRig) -> None:
    partition = filled(rig)
    partition.advance_high_watermark(10)
    cut(rig, partition, 6)
    assert partition.high_watermark == 6
    assert rig.again().store.partition("t", 0).high_watermark == 6


def test_an_epoch_that_begins_at_the_end_is_forgotten(rig: PowerRig) -> None:
    partition = filled(rig, 4)
    heard = []
    partition.become_leader(10, heard.append)
    assert partition.epochs.to_list()[-1] == [10, 4]
    rig.follow(partition, 11)
    partition.truncate(4, heard.append)
    assert heard == [None, None]
    assert partition.epochs.to_list() == [[1, 0]]
    rig.receive(partition, 5, "of a leader that came before")
    rig.driver.flush()
    again = rig.again().store.partition("t", 0)
    assert again.epochs.to_list() == [[1, 0], [5, 4]]
    assert again.damaged == []


def test_two_cuts_at_once_come_one_after_the_other(rig: PowerRig) -> None:
    partition = filled(rig)
    before = contents(partition)
    heard = []
    partition.truncate(9, lambda error: heard.append(9))
    partition.truncate(11, lambda error: heard.append(11))
    partition.truncate(5, lambda error: heard.append(5))
    partition.become_leader(12, lambda error: heard.append(error))
    for _ in range(4):
        rig.driver.flush()
    assert heard == [9, 11, 5, None]
    assert contents(partition) == before[:5]
    assert partition.epochs.to_list()[-1] == [12, 5]
    assert partition.is_leader


@pytest.mark.parametrize("to", [0, 3, 20])
def test_a_reset_leaves_nothing(rig: PowerRig, to: int) -> None:
    partition = filled(rig)
    heard = []
    partition.reset(to, heard.append)
    rig.driver.flush()
    assert heard == [None]
    for log in (partition, rig.again().store.partition("t", 0)):
        assert (log.log_start, log.high_watermark, log.durable_end, log.log_end) == (to, to, to, to)
        assert log.epochs.to_list() == []
        assert log.producers.snapshot() == []
        assert log.leader_epoch == 9
    rig = rig.again()
    partition = rig.store.partition("t", 0)
    rig.receive(partition, 9, "anew")
    rig.driver.flush()
    assert [base for base, _, _ in contents(rig.again().store.partition("t", 0))] == [to]


def test_a_partition_that_cannot_be_opened_can_be_begun_anew(rig: PowerRig) -> None:
    partition = filled(rig)
    rig = rig.again(clean=True)
    for name in rig.disk.list(partition.folder):
        if name.endswith(".log"):
            rig.disk.remove(partition.folder / name)
    rig = rig.again(clean=True)
    partition = rig.store.partition("t", 0)
    assert partition.failure is not None
    assert partition.is_unclean
    heard = []
    partition.reset(5, heard.append)
    rig.driver.flush()
    assert heard == [None]
    rig.receive(partition, 9, "anew")
    rig.driver.flush()
    rig = rig.again()
    assert [base for base, _, _ in contents(rig.store.partition("t", 0))] == [5]
    assert rig.store.partition("t", 0).is_unclean  # Until whoever replicates it says that it has caught up.


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize("to", [0, 2, 5, 7, 11])
def test_a_power_cut_leaves_the_old_log_or_the_new_one(to: int, journaled: bool) -> None:
    states: set[int] = set()

    def prepare(disk):
        rig = PowerRig(disk)
        partition = filled(rig)
        if not journaled:
            rig.settle()
        rig.store.save_checkpoint(lambda error: None)
        prepare.before, prepare.partition = contents(partition), partition
        return lambda: cut(rig, partition, to)

    for disk, is_over in after_every_crash(prepare, range(3)):
        partition = PowerRig(disk).store.partition("t", 0)
        assert not partition.damaged
        assert partition.log_end in ((to,) if is_over else (to, 12))
        assert contents(partition) == prepare.before[: partition.log_end]
        states.add(partition.log_end)
    assert states == {to, 12}


@pytest.mark.parametrize("to", [0, 20])
def test_a_power_cut_leaves_the_old_log_or_an_empty_one(to: int) -> None:
    states = set()

    def prepare(disk):
        rig = PowerRig(disk)
        partition = filled(rig)
        heard = []

        def reset():
            partition.reset(to, heard.append)
            rig.driver.flush()

        return reset

    for disk, is_over in after_every_crash(prepare, range(3)):
        partition = PowerRig(disk).store.partition("t", 0)
        assert not partition.damaged
        found = (partition.log_start, partition.log_end)
        assert found in (((to, to),) if is_over else ((to, to), (0, 12)))
        states.add(found)
    assert states == {(to, to), (0, 12)}


def test_what_is_written_after_a_cut_survives_every_power_cut() -> None:
    """Other bytes at the same offsets, in a later epoch: neither journal nor checkpoint may bring back the old ones."""

    def prepare(disk):
        rig = PowerRig(disk)
        partition = filled(rig)
        rig.store.save_checkpoint(lambda error: None)
        before = contents(partition)
        prepare.durable = []

        def work():
            cut(rig, partition, 5)
            prepare.durable = before[:5]
            for number in range(6):
                rig.receive(partition, 9, f"other {number}")
                rig.driver.flush()
                prepare.durable = contents(partition)
                if number == 3:
                    rig.settle()

        return work

    for disk, _ in after_every_crash(prepare, range(4)):
        first = PowerRig(disk)
        for rig in (first, first.again()):
            partition = rig.store.partition("t", 0)
            assert not partition.damaged
            assert contents(partition)[: len(prepare.durable)] == prepare.durable


def test_a_cut_that_meets_a_full_disk_is_finished_when_there_is_space() -> None:
    rig = PowerRig(SimDisk(Random(3)))
    partition = filled(rig)
    before = contents(partition)
    heard = []
    partition.truncate(5, heard.append)
    rig.disk.is_full, rig.disk.has_reserve = True, False
    rig.driver.flush()
    assert isinstance(heard[0], DiskFull)
    assert isinstance(partition.write_error, DiskFull)
    rig.disk.is_full = False
    rig.store.tick()
    rig.driver.flush()
    assert partition.write_error is None
    assert contents(partition) == before[: partition.log_end]


def test_a_cut_gives_up_compaction_of_the_same_log(tmp_path) -> None:
    rig = Rig(tmp_path, replicated=True)  # type: ignore[arg-type]
    partition = rig.topic(cleanup_policy="compact", segment_bytes="1024")
    partition.become_follower(1, lambda error: None)
    for number in range(60):
        data = batch(f"{number:050d}", keys=[str(number % 3)])
        stamp(data, partition.log_end, 1)
        partition.append_replicated([memoryview(data)], offset=number)
        rig.driver.flush()
    partition.advance_high_watermark(partition.log_end)
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rounds = rig.store._rounds
    saved = rig.store._saver.saved.partition(partition.key)
    work = rounds._cleaner.plan(partition, saved.segment, rig.now_ms)
    rounds._cleaner.execute(work)
    rounds._work = work  # As if its successors had just been written on the other thread.
    heard = []
    partition.truncate(30, heard.append)
    rig.driver.flush()
    assert heard == []
    rounds._written(work, None, None)
    rig.driver.flush()
    assert heard == [None]
    assert partition.log_end == 30
    assert [name for name in rig.disk.list(partition.folder) if name.endswith((".clean", ".swap"))] == []
    assert len(contents(partition)) == 30


def test_a_broken_journal_forgets_all_the_same(tmp_path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk, replicated=True)  # type: ignore[arg-type]
    rig.topic("wide", partitions=6)
    partitions = [rig.store.partition("wide", index) for index in range(6)]
    for partition in partitions:
        partition.become_follower(1, lambda error: None)
        for number in range(3):
            data = batch(f"old {number}")
            stamp(data, number, 1)
            partition.append_replicated([memoryview(data)], offset=number)
    rig.driver.flush()  # One record each in the journal.
    disk.faults["sync", ".journal"] = errno.EIO
    other = rig.topic("other")
    other.become_follower(1, lambda error: None)
    data = batch("x")
    stamp(data, 0, 1)
    other.append_replicated([memoryview(data)], offset=0)
    rig.driver.flush()
    assert other.write_error is not None
    disk.faults.clear()
    heard: list[Exception | None] = []
    partitions[0].truncate(1, heard.append)
    rig.driver.flush()
    assert heard == [None]
    again = rig.again(replicated=True)
    assert again.store.partition("wide", 0).log_end == 1
    assert again.store.partition("wide", 1).log_end == 3


@pytest.mark.parametrize("seed", range(8))
def test_a_sync_that_fails_for_who_had_the_file_before_a_cut_counts_after_it(seed: int) -> None:
    """Settling that was under way when the log was cut syncs the same file, and is told of what was written since."""
    rig = PowerRig(SimDisk(Random(seed)), defaults=TopicSettings())
    commit, partition = rig.store.commit, filled(rig, 4)
    commit.ask_settling()
    assert commit.begin_settling()
    cut(rig, partition, 2)
    rig.receive(partition, 9, "since then")
    rig.driver.flush()  # By the journal.
    durable = contents(partition)
    assert len(durable) == 3
    rig.disk.failing_syncs = 1
    commit.complete_settling(commit.settle())
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.disk.crash()
    assert contents(rig.again().store.partition("t", 0)) == durable


def test_the_last_segment_keeps_its_age_over_a_truncation(tmp_path) -> None:
    rig = Rig(tmp_path, replicated=True)  # type: ignore[arg-type]
    partition = rig.topic(segment_ms="1000")
    start_ms = rig.now_ms

    def receive(time_ms: int) -> list[int]:
        data = batch("x", now_ms=start_ms + time_ms)
        stamp(data, partition.log_end, 1)
        partition.append_replicated([memoryview(data)], offset=partition.log_end)
        rig.driver.flush()
        return [segment.base_offset for segment in partition.segments]

    partition.become_follower(1, lambda error: None)
    for time_ms in (0, 400, 800, 1200):
        receive(time_ms)
    cut(rig, partition, 2)  # What is left lay in a sealed segment.
    assert receive(1000) == [0]
    assert receive(1001) == [0, 3]

    cut(rig, partition, 3)
    assert receive(5000) == [0, 3], "an empty segment has no age"

    heard: list[Exception | None] = []
    partition.reset(100, heard.append)
    rig.driver.flush()
    assert heard == [None]
    assert receive(9000) == [100]
    assert receive(10_000) == [100]
    assert receive(10_001) == [100, 102]
