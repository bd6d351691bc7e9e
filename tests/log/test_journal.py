"""The journal's files are used again and again; what an earlier life of a file holds must never count."""

import errno
import os
from contextlib import suppress
from random import Random
from threading import Event, Thread
from uuid import UUID

import pytest

from log.power import PowerRig
from log.rig import FaultyDisk, Rig, batch, values
from walstream.errors import DiskFull, PartitionOffline
from walstream.log.batch import parse_header, stamp
from walstream.log.disk import OsDisk
from walstream.log.journal import Journal
from walstream.log.settings import TopicSettings
from walstream.sim.disk import SimDisk

ONE_SEGMENT = TopicSettings(segment_bytes=1 << 20)
IS_LONG = os.environ.get("WALSTREAM_TEST_ROUNDS") == "full"


def journal_files(rig):
    return [name for name in rig.disk.list(rig.folder / "journal") if name.endswith(".journal")]


def contents(partition):
    """Return (epoch, CRC) of every durable batch."""
    found, offset = [], partition.log_start
    while offset < partition.durable_end:
        header = parse_header(partition.read_replica_blocking(offset, 1).buffers[0])
        assert header.base_offset == offset
        found.append((header.leader_epoch, header.crc))
        offset = header.next_offset
    return found


@pytest.mark.parametrize("clean", [True, False])
def test_no_two_starts_write_journal_files_of_the_same_number(tmp_path, clean):
    rig = Rig(tmp_path)
    rig.topic()
    numbers = set()
    for _ in range(4):
        rig.write(rig.store.partition("t", 0), "a")
        assert rig.store._journal.number not in numbers
        numbers.add(rig.store._journal.number)
        rig = rig.again(clean=clean)


def test_a_forget_of_an_earlier_start_voids_nothing_of_this_one():
    """A partition that came back from a full disk leaves a FORGET in the file, behind which this start's records end.

    They have the same size as those before, so the stale record is exactly where a scan looks for the next one.
    """
    disk = SimDisk(Random(1))
    rig = PowerRig(disk, replicated=False, defaults=ONE_SEGMENT)
    partition = rig.topic()
    for number in range(3):
        rig.write(partition, f"a{number}")
    disk.is_full = True
    rig.write(partition, "refused" * 1000)
    assert isinstance(partition.write_error, DiskFull)
    disk.is_full = False
    rig.store.tick()
    rig.driver.flush()
    rig.write(partition, "b0")
    rig = rig.again(clean=True)
    for number in range(3):
        rig.write(rig.store.partition("t", 0), f"c{number}")
    acknowledged = values(rig.store.partition("t", 0))
    assert acknowledged == ["a0", "a1", "a2", "b0", "c0", "c1", "c2"]
    disk.crash()
    assert values(rig.again().store.partition("t", 0)) == acknowledged


def test_a_batch_that_was_truncated_after_a_clean_stop_never_comes_back():
    """The journal records of the first start lie behind those of the second one, on a boundary of both."""
    rig = PowerRig(SimDisk(Random(3)), defaults=ONE_SEGMENT)
    partition = rig.topic()
    rig.follow(partition, 1)
    for number in range(6):
        rig.receive(partition, 1, f"A{number}" + "." * 20)
        rig.driver.flush()
    size = len(batch("A0" + "." * 20))
    rig = rig.again(clean=True)
    partition = rig.store.partition("t", 0)
    rig.follow(partition, 2)
    heard = []
    partition.truncate(3, heard.append)
    rig.driver.flush()
    assert heard == [None]
    head = rig.store._journal.size  # A FORGET has no payload: this is the size of what precedes each one.
    wanted = 4 * (head + size) - 2 * head
    value = next(value for value in ("B3" + "." * count for count in range(2000)) if len(batch(value)) == wanted)
    rig.receive(partition, 2, value)
    rig.driver.flush()
    expected = contents(partition)
    assert [epoch for epoch, _ in expected] == [1, 1, 1, 2]
    assert contents(rig.again().store.partition("t", 0)) == expected


def test_a_follower_keeps_what_it_was_sent_through_cuts_kills_power_cuts_and_clean_stops():
    for seed in range(2000 if IS_LONG else 40):
        run_follower(seed)


def run_follower(seed):
    """Truncate, append, flush, settle, stop, kill and cut the power at random; compare with a model of the log."""
    rng, disk, epoch, partitions = Random(seed), SimDisk(Random(seed)), 1, range(2)
    rig = PowerRig(disk, defaults=ONE_SEGMENT)
    rig.topic("t", len(partitions))
    model = {index: [] for index in partitions}
    durable = dict.fromkeys(partitions, 0)
    has_one_size = rng.random() < 0.7
    for index in partitions:
        rig.follow(rig.store.partition("t", index), epoch)
    for step in range(120):
        index = rng.randrange(len(partitions))
        partition, action = rig.store.partition("t", index), rng.choice("aaaaafftcks")
        if action == "a":
            data = batch(f"{step:05d}" + "." * (20 if has_one_size else rng.randrange(40)))
            stamp(data, partition.log_end, epoch)
            partition.append_replicated([memoryview(data)], offset=partition.log_end)
            model[index].append((epoch, parse_header(data).crc))
            continue
        if action != "k":
            rig.driver.flush()
            durable = {index: len(model[index]) for index in partitions}
        if action == "s":
            rig.settle()
        elif action == "t":
            epoch += 1
            for other in partitions:
                rig.follow(rig.store.partition("t", other), epoch)
            to = rng.randrange(max(0, len(model[index]) - 6), len(model[index]) + 1)
            heard = []
            partition.truncate(to, heard.append)
            rig.driver.flush()
            assert heard == [None], (seed, step)
            del model[index][to:]
            durable = {index: len(model[index]) for index in partitions}
        elif action in "ck":
            if action == "k" and rng.random() < 0.5:
                disk.crash()
            rig = rig.again(clean=action == "c")
            for other in partitions:
                partition = rig.store.partition("t", other)
                found = contents(partition)
                assert len(found) >= durable[other], (seed, step)
                assert found == model[other][: len(found)], (seed, step)
                model[other], durable[other] = model[other][: len(found)], len(found)
                rig.follow(partition, epoch)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_checkpoint_that_is_lost_or_older_brings_no_number_and_no_epoch_back(tmp_path, clean, is_lost):
    """After a clean stop only the spare file tells how far the numbers had come."""
    rig = Rig(tmp_path)
    older = (tmp_path / "checkpoint.json").read_bytes()
    rig.topic()
    for _ in range(3):
        rig.write(rig.store.partition("t", 0), "a")
        rig = rig.again(clean=True)
    rig.write(rig.store.partition("t", 0), "a")
    epoch, number = rig.store.epoch, rig.store._journal.number
    if clean:
        rig.store.close()
        rig.store.mark_clean()
    (tmp_path / "checkpoint.json").unlink() if is_lost else (tmp_path / "checkpoint.json").write_bytes(older)
    rig = rig.again()
    assert rig.store.epoch > epoch
    assert rig.store._journal.number > number
    assert values(rig.store.partition("t", 0)) == ["a"] * 4


def test_a_data_directory_with_small_journal_numbers_opens(tmp_path):
    """As files were numbered before: from 1 on, in every start."""
    disk = OsDisk()
    rig = Rig(tmp_path)
    partition = rig.topic()
    rig.store._journal._number = 1
    rig.store._journal._file = None
    rig.store._journal.size = 0
    rig.write(partition, "a")
    assert "0000000001.journal" in journal_files(rig)
    partition.segments[0].path.write_bytes(b"")
    rig = Rig(tmp_path, disk)
    assert values(rig.store.partition("t", 0)) == ["a"]
    assert journal_files(rig) == [f"{rig.store._journal.number}.journal"]


def test_what_a_start_forgets_for_some_partitions_leaves_the_journal_usable(tmp_path):
    """One partition cannot be opened, so the journal stays, and voids what it holds for the others in a new file."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    lost, kept = rig.topic("lost"), rig.topic("kept")
    rig.append(lost, "a")
    rig.append(kept, "a")
    rig.driver.flush()
    disk.faults["sync", "/lost@"] = errno.EIO
    rig = rig.again()
    with pytest.raises(PartitionOffline):
        rig.append(rig.store.partition("lost", 0), "x")
    kept = rig.store.partition("kept", 0)
    rig.write(kept, "b")
    assert [path.suffix for path in disk.syncs] == [".journal"]
    kept.segments[0].path.write_bytes(kept.segments[0].path.read_bytes()[: kept.segments[0].size // 2])
    assert values(rig.again().store.partition("kept", 0)) == ["a", "b"]
    disk.faults.clear()
    rig = rig.again()
    assert values(rig.store.partition("kept", 0)) == ["a", "b"]
    assert values(rig.store.partition("lost", 0)) == ["a"]


class SlowDisk(OsDisk):
    """A disk on which zeros for a spare file take until somebody says so."""

    def __init__(self):
        self.is_preparing, self.go_on, self.is_slow = Event(), Event(), False

    def open(self, path, *, create=False):
        if self.is_slow and path.name == "spare.new":
            self.is_slow = False
            file = super().open(path, create=create)
            self.is_preparing.set()
            assert self.go_on.wait(30)
            return file
        return super().open(path, create=create)


def prepare(journal):
    with suppress(OSError):
        journal.prepare()


def test_a_spare_file_that_is_being_prepared_is_not_written_to(tmp_path):
    """The settling thread prepares one while a flush needs one: its zeros would overwrite the flush's records."""
    disk = SlowDisk()
    journal = Journal(disk, tmp_path, saved_epoch=0)
    journal.recover()
    key, data = (UUID(int=1), 0), bytes(batch("acknowledged"))
    disk.is_slow = True
    settling = Thread(target=prepare, args=(journal,))
    settling.start()
    assert disk.is_preparing.wait(30)
    flush = Thread(target=journal.append, args=([(key, data)],))
    flush.start()
    flush.join(0.3)  # It has to wait; if it does not, it ends long before.
    disk.go_on.set()
    settling.join(30)
    flush.join(30)
    assert not journal.is_broken
    assert list(Journal(disk, tmp_path, saved_epoch=0).read()) == [key]


def test_a_file_whose_sync_has_failed_never_becomes_the_spare_file(tmp_path):
    disk = FaultyDisk()
    journal = Journal(disk, tmp_path, saved_epoch=0)
    journal.recover()
    key, data = (UUID(int=1), 0), bytes(batch("not acknowledged"))
    disk.faults["sync", ".journal"] = errno.EIO
    with pytest.raises(OSError, match="EIO"):
        journal.append([(key, data)])
    disk.faults.clear()
    number = journal.rotate()  # Settling has begun: its segments are synced.
    journal.forget([key])
    journal.drop(number)
    assert f"{number}.journal" in disk.list(tmp_path)
