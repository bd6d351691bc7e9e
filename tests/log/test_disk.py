"""The disk adapter at its system calls: what the log promises is on the disk, not in the kernel's memory.

The other tests of power cuts run over a simulated disk, and would pass if the adapter never called fsync.
"""

import errno
import os

import pytest

from log.platter import Platter
from log.rig import Rig, batch, values
from log.test_cleaner import table
from walstream.cluster.local import NewTopic
from walstream.errors import DirectoryUnusable, OutOfFiles
from walstream.log.batch import stamp
from walstream.log.disk import DirectoryLock, OsDisk
from walstream.log.settings import TopicSettings

OPTIONS = {"journal_bytes_max": 4096, "journal_prepared_bytes": 2048}
SMALL = TopicSettings(segment_bytes=600)


def test_hints_take_no_space_from_what_a_full_disk_needs(tmp_path):
    disk, hint = OsDisk(reserve=tmp_path / "reserve"), tmp_path / "hint"
    assert disk.keep_reserve(1 << 20)
    disk.write(hint, b"first", durable=False)
    disk.spend_reserve()
    with pytest.raises(OSError, match="No space left"):
        disk.write(hint, b"second", durable=False)
    disk.write(tmp_path / "checkpoint", b"needed", durable=True)
    assert disk.list(tmp_path) == ["checkpoint", "hint"]
    assert disk.read(hint) == b"first"
    assert disk.keep_reserve(1 << 20)
    disk.write(hint, b"third", durable=False)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def platter(root, monkeypatch):
    root.mkdir()
    platter = Platter(root, monkeypatch)
    yield platter
    platter.close()


@pytest.fixture(params=[True, False], ids=["all names", "synced names"])
def cuts(request, platter, tmp_path):
    """Return a function that cuts the power and returns the folder that is left."""
    numbers = iter(range(100_000))
    return lambda: platter.cut(tmp_path / f"cut{next(numbers)}", keeps_names=request.param)


def opened(folder, **options):
    return Rig(folder, OsDisk(), SMALL, **OPTIONS, **options)


def settle(rig):
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.driver.flush()


def assert_holds(folder, name, expected, **options):
    """Open what a power cut left: all that was promised is there, in its place, and undamaged."""
    partition = opened(folder, **options).store.partition(name, 0)
    assert (partition.failure, partition.damaged, partition.is_unclean) == (None, [], False)
    assert values(partition) == expected
    return partition


def test_a_record_is_durable_when_it_is_acknowledged(root, cuts):
    rig = opened(root)
    partition = rig.topic()
    for number in range(12):
        rig.write(partition, f"{number}" * 10)
        assert rig.store.commit.counters.journaled == number + 1
        assert_holds(cuts(), "t", values(partition))


def test_a_record_that_no_journal_has_is_durable_when_it_is_acknowledged(root, cuts):
    rig = opened(root)
    partition = rig.topic()
    for number in range(5):
        rig.write(partition, f"{number}" * 20_000)
        assert rig.store.commit.counters.journaled == 0
        assert_holds(cuts(), "t", values(partition))


def test_a_log_is_durable_without_the_journal_once_that_is_given_back(root, cuts):
    """Segments, the folders of the topic and of the partition, and the checkpoint that says how far they go."""
    rig = opened(root)
    partition = rig.topic()
    for number in range(20):
        rig.write(partition, f"{number}" * 20)
        if number % 6 == 5:
            settle(rig)
            assert_holds(cuts(), "t", values(partition))


def test_a_start_takes_its_epoch_durably(root, cuts):
    rig = opened(root)
    assert opened(cuts()).store.epoch > rig.store.epoch
    rig = rig.again(**OPTIONS)
    assert opened(cuts()).store.epoch > rig.store.epoch


def test_a_catalogue_is_durable_when_it_has_changed(root, cuts):
    rig = opened(root)
    rig.store.create_topics([NewTopic("a", 1, {}), NewTopic("b", 1, {})])
    assert opened(cuts()).catalogue.topics == rig.catalogue.topics
    rig.store.grow_topic("a", 3)
    assert opened(cuts()).catalogue.topics == rig.catalogue.topics
    rig.store.delete_topics(["b"])
    assert opened(cuts()).catalogue.topics == rig.catalogue.topics
    first = rig.catalogue.next_producer_id()
    assert opened(cuts()).catalogue.next_producer_id() > first


def test_deleted_records_do_not_come_back(root, cuts):
    rig = opened(root)
    partition = rig.topic()
    for number in range(20):
        rig.write(partition, f"{number}" * 20)
    settle(rig)
    for start in (3, 11, 20):
        done = []
        rig.store.delete_records(partition, start, done.append)
        assert done == [None]
        assert assert_holds(cuts(), "t", values(partition)).log_start == start


def test_a_cut_is_whole_after_a_power_cut_at_any_system_call(root, cuts, platter):
    """A follower truncates its log: the announcement, the files, the journal and the checkpoint, one by one."""
    rig = opened(root, replicated=True)
    partition = rig.topic()
    partition.become_follower(1, lambda error: None)

    def receive(epoch, value):
        data = batch(value, now_ms=rig.now_ms)
        stamp(data, partition.log_end, epoch)
        partition.append_replicated([memoryview(data)], offset=partition.log_end)
        rig.driver.flush()

    for number in range(12):
        receive(1, f"{number}" * 20)
    settle(rig)
    left, heard = [], []
    platter.on_call = lambda: left.append(cuts())
    partition.truncate(5, heard.append)
    rig.driver.flush()
    assert heard == [None]
    assert len(left) > 5
    logs = [opened(folder, replicated=True).store.partition("t", 0) for folder in left]
    assert [(log.failure, log.damaged) for log in logs] == [(None, [])] * len(logs)
    ends = [log.log_end for log in logs]
    assert set(ends) == {12, 5}
    assert ends == sorted(ends, reverse=True)
    platter.on_call = lambda: None
    partition.become_follower(2, lambda error: None)
    assert opened(cuts(), replicated=True).store.partition("t", 0).leader_epoch == 2
    receive(2, "next")
    reopened = opened(cuts(), replicated=True).store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged, reopened.epochs.to_list()) == (6, [], [[1, 0], [2, 5]])


def test_compaction_loses_nothing_at_any_system_call(root, cuts, platter):
    rig = opened(root)
    partition = rig.topic(cleanup_policy="compact", min_cleanable_dirty_ratio="0")
    for number in range(60):
        rig.write(partition, f"{number}" * 5, keys=[f"k{number % 7}"])
    settle(rig)
    expected, count = table(partition)
    left = []
    platter.on_call = lambda: left.append(cuts())
    rig.store.compact()
    rig.driver.flush()
    assert table(partition)[1] < count
    assert len(left) > 4
    settle(rig)
    for folder in [*left, cuts()]:
        reopened = opened(folder).store.partition("t", 0)
        assert (reopened.failure, reopened.damaged, table(reopened)[0]) == (None, [], expected)


def test_a_log_holds_what_it_promised_after_a_power_cut_at_any_system_call(root, cuts, platter):
    """Appends, rolls, settling, checkpoints, a journal that is used again, a clean stop and a start."""
    acknowledged, left = [], []
    platter.on_call = lambda: left.append((cuts(), len(acknowledged)))
    rig = opened(root)
    partition = rig.topic()
    for number in range(40):
        rig.write(partition, f"{number}" * 20)
        acknowledged.append(f"{number}" * 20)
        if number % 9 == 8:
            settle(rig)
        if number == 25:
            rig = rig.again(clean=True, **OPTIONS)
            partition = rig.store.partition("t", 0)
    for folder, count in left:
        again = opened(folder)
        if count:
            reopened = again.store.partition("t", 0)
            assert (reopened.failure, reopened.damaged) == (None, [])
            assert values(reopened)[:count] == acknowledged[:count]


class OnceFailing(OsDisk):
    """Fails the next sync of a folder."""

    def __init__(self, name):
        super().__init__()
        self.name, self.is_due = name, False

    def sync_directory(self, path):
        if self.is_due and path.name == self.name:
            self.is_due = False
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        super().sync_directory(path)


def test_a_folder_whose_name_could_not_be_synced_is_durable_before_its_records_are(root, cuts):
    rig = Rig(root, OnceFailing("topics"), SMALL, **OPTIONS)
    partition = rig.topic()
    rig.disk.is_due = True
    rig.write(partition, "refused")
    assert isinstance(partition.write_error, OutOfFiles)
    rig.store.tick()
    rig.driver.flush()
    rig.write(partition, "acknowledged" * 10_000)
    settle(rig)
    assert_holds(cuts(), "t", values(partition))


def test_a_folder_of_a_killed_process_is_durable_before_its_records_are(root, cuts):
    partition = opened(root).topic()
    partition.folder.mkdir(parents=True)
    rig = opened(root)
    partition = rig.store.partition("t", 0)
    rig.write(partition, "acknowledged" * 10_000)
    assert_holds(cuts(), "t", values(partition))


def test_the_data_directory_is_durable(tmp_path, monkeypatch):
    parent, left = tmp_path / "parent", tmp_path / "left"
    parent.mkdir()
    platter = Platter(parent, monkeypatch)
    OsDisk().sync_directory(parent)
    lock = DirectoryLock(parent / "walstream" / "data")
    rig = opened(parent / "walstream" / "data")
    rig.write(rig.topic(), "acknowledged")
    platter.cut(left, keeps_names=False)
    platter.close()
    lock.release()
    assert_holds(left / "walstream" / "data", "t", ["acknowledged"])


def test_topics_that_could_not_be_deleted_are_there_after_the_next_start(root):
    """The new catalogue may have got its name before the error: a start that finds it removes the topic's records."""
    rig = Rig(root, OnceFailing(root.name))
    partition = rig.topic()
    rig.disk.is_due = True
    with pytest.raises(DirectoryUnusable):
        rig.store.delete_topics(["t"])
    rig.write(partition, "acknowledged")
    assert values(rig.again().store.partition("t", 0)) == ["acknowledged"]
