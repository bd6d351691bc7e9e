"""Folders of topics: each belongs to one topic id, whatever is deleted, created again or left from earlier versions."""

import errno
import json
from random import Random
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from log.power import FOLDER, PowerRig, after_every_crash
from log.rig import FaultyDisk, LateDriver, Rig, values
from walstream.cluster.local import Topic
from walstream.errors import CorruptLog, DirectoryUnusable, PartitionOffline
from walstream.log.folders import partition_name, rename_old_folders, topic_folder
from walstream.sim.disk import SimDisk


def filled(rig, count=40, **config):
    partition = rig.topic(segment_bytes="1024", **config)
    for number in range(count):
        rig.write(partition, f"old-{number}" + "." * 50, keys=[str(number % 5)])
    rig.settle()
    return partition


def as_earlier_versions_had_it(rig, *, with_identity=True):
    """Give the folders of a stopped node the names and files of format 1."""
    for topic in rig.catalogue.topics.values():
        old = rig.folder / "topics" / topic.name
        rig.disk.rename(rig.folder / "topics" / topic_folder(topic), old)
        if with_identity:
            rig.disk.write(old / "topic.id", str(topic.id).encode(), durable=True)
    meta = rig.folder / "meta.json"
    rig.disk.write(meta, json.dumps({**json.loads(rig.disk.read(meta)), "format": 1}).encode(), durable=True)


@pytest.mark.parametrize("job", ["delete_records", "retention", "compaction", "index"])
def test_jobs_of_a_deleted_topic_leave_the_one_created_again_alone(tmp_path, job):
    policy = "compact" if job == "compaction" else "delete"
    steps = 0
    while True:
        rig = Rig(tmp_path / str(steps), driver=LateDriver())
        old = filled(rig, cleanup_policy=policy, retention_bytes="1024", min_cleanable_dirty_ratio="0.01")
        rig.driver.is_late = True  # The housekeeping thread is busy.
        if job == "delete_records":
            rig.store.delete_records(old, old.high_watermark, lambda _: None)
        elif job == "retention":
            rig.store.enforce_retention()
        elif job == "compaction":
            rig.store.compact()
        else:
            rig.append(old, "." * 1000)
            old.roll()
        is_over = not all(rig.driver.run_next() for _ in range(steps))
        with capture_logs() as logs:
            rig.store.delete_topics(["t"])
            rig.driver.flush()
            new = rig.topic(segment_bytes="1024")
            for number in range(20):
                rig.write(new, f"new-{number}" + "." * 50)
            files = rig.disk.list(new.folder)
            while rig.driver.run_next():
                pass
        expected = [f"new-{number}" + "." * 50 for number in range(20)]
        assert set(files) <= set(rig.disk.list(new.folder)), f"files went with the jobs, after {steps} of them"
        assert values(new) == expected
        assert [entry for entry in logs if entry["log_level"] != "info"] == []
        rig.driver.is_late = False
        again = rig.again(clean=True)
        assert values(again.store.partition("t", 0)) == expected
        assert len(again.disk.list(again.folder / "topics")) == 1
        if is_over:
            assert steps > 0
            return
        steps += 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_truncation_that_comes_behind_the_deletion_creates_no_folder(tmp_path, is_reset):
    rig = Rig(tmp_path, replicated=True)
    partition = rig.topic()
    partition.become_leader(1, lambda _: None)
    rig.write(partition, "a")
    partition.become_follower(2, lambda _: None)
    heard = []
    waiting = []
    rig.store.leave_alone = lambda _, then: waiting.append(then)  # A round of compaction is on the partition.
    (partition.reset if is_reset else partition.truncate)(0, heard.append)
    with capture_logs() as logs:
        rig.store.delete_topics(["t"])
        rig.driver.flush()
        waiting.pop()()
        rig.driver.flush()
    assert [str(error) for error in heard] == ["The topic t was deleted."]
    assert rig.disk.list(tmp_path / "topics") == []
    assert logs == []
    assert rig.store.write_failures == 0


def test_a_topic_in_whose_place_a_catalogue_has_another_of_its_name_is_removed(tmp_path):
    """A node that was away finds both in one change: deleted, and created again with fewer partitions."""
    rig = Rig(tmp_path, replicated=True)
    rig.topic(partitions=3)
    gone = list(rig.store.partitions.values())
    for partition in gone:
        partition.become_leader(1, lambda error: None)
        rig.write(partition, "old")
    topic = Topic("t", uuid4(), 2, since=rig.catalogue.version + 2)
    rig.store.take_over(rig.catalogue.version + 2, [topic])
    rig.driver.flush()
    assert [partition.key for partition in rig.store.partitions.values()] == [(topic.id, 0), (topic.id, 1)]
    for partition in gone:
        with pytest.raises(PartitionOffline, match="was deleted"):
            rig.append(partition, "late")
    assert list((tmp_path / "topics").iterdir()) == []


def test_a_folder_that_cannot_be_moved_aside_is_removed_by_the_next_start(tmp_path):
    class Disk(FaultyDisk):
        def sync_directory(self, path):
            self.check("names", path)
            super().sync_directory(path)

        def rename(self, source, target):
            self.check("names", source)
            super().rename(source, target)

    rig = Rig(tmp_path, Disk())
    rig.write(rig.topic(), "old")
    rig.disk.faults["names", "topics"] = errno.EMFILE
    rig.store.delete_topics(["t"])
    rig.driver.flush()  # Fails silently for the flush thread, which has other partitions' writes to do.
    rig.disk.faults.clear()
    assert len(rig.disk.list(tmp_path / "topics")) == 1
    rig.write(rig.topic(), "new")
    again = rig.again()
    assert values(again.store.partition("t", 0)) == ["new"]
    assert len(again.disk.list(tmp_path / "topics")) == 1


@pytest.mark.parametrize("with_identity", [True, False])
@pytest.mark.parametrize("clean", [True, False])
def test_folders_of_format_1_are_renamed_at_a_start(tmp_path, with_identity, clean):
    rig = Rig(tmp_path)
    partition = filled(rig)
    expected = values(partition)
    if clean:
        rig.store.close()
        rig.store.mark_clean()
    as_earlier_versions_had_it(rig, with_identity=with_identity)
    for _ in range(2):
        rig = rig.again()
        assert values(rig.store.partition("t", 0)) == expected
        assert rig.disk.list(tmp_path / "topics") == [topic_folder(rig.catalogue.topic("t"))]
        assert json.loads(rig.disk.read(tmp_path / "meta.json"))["format"] == 2, "earlier versions refuse the folder"


def test_folders_of_format_1_that_belong_to_deleted_topics_are_removed(tmp_path):
    rig = Rig(tmp_path)
    rig.write(rig.topic("t"), "t")
    rig.write(rig.topic("gone"), "gone")
    rig.store.close()
    rig.store.mark_clean()
    as_earlier_versions_had_it(rig)
    rig.disk.write(tmp_path / "topics" / "t" / "topic.id", str(uuid4()).encode(), durable=True)
    catalogue = json.loads(rig.disk.read(tmp_path / "topics.json"))
    catalogue["topics"] = [topic for topic in catalogue["topics"] if topic["name"] == "t"]
    rig.disk.write(tmp_path / "topics.json", json.dumps(catalogue).encode(), durable=True)
    rig.disk.remove(tmp_path / "checkpoint.json")  # It has records of the topic that has the name now.
    again = rig.again()
    assert again.disk.list(tmp_path / "topics") == []
    assert again.disk.list(tmp_path / "trash") == []
    assert values(again.store.partition("t", 0)) == []


def test_a_power_cut_at_any_step_of_the_renaming_loses_nothing():
    def prepared(disk):
        rig = PowerRig(disk, replicated=False)
        for name in ("s", "t"):
            partition = rig.topic(name, partitions=2)
            rig.write(partition, f"in {name}")
        rig.settle()
        rig.store.close()
        rig.store.mark_clean()
        as_earlier_versions_had_it(rig)
        return rig.again

    for disk, _ in after_every_crash(prepared, range(10)):
        rig = PowerRig(disk, replicated=False)
        for name in ("s", "t"):
            partition = rig.store.partition(name, 0)
            assert partition.failure is None
            assert values(partition) == [f"in {name}"]
        folders = {topic_folder(topic) for topic in rig.catalogue.topics.values()}
        assert set(disk.list(FOLDER / "topics")) == folders


def test_two_folders_of_one_topic_stop_the_start():
    disk = SimDisk(Random(1))
    topic = Topic("t", uuid4(), 1)
    for name in ("t", topic_folder(topic)):
        disk.make_directory(FOLDER / name / "0")
    with pytest.raises(DirectoryUnusable, match="both belong to the topic t"):
        rename_old_folders(disk, FOLDER, {"t": topic})
    assert len(disk.list(FOLDER)) == 2


def test_the_longest_name_fits_and_errors_name_the_partition(tmp_path):
    rig = Rig(tmp_path)
    long = rig.topic("n" * 249)
    rig.write(long, "x")
    assert values(rig.again().store.partition("n" * 249, 0)) == ["x"]
    assert partition_name(rig.topic("a.b-c").folder) == "a.b-c-0"
    assert partition_name(tmp_path / "topics" / "earlier" / "3") == "earlier-3"


def test_a_start_without_the_catalogue_removes_no_records(tmp_path):
    rig = Rig(tmp_path)
    filled(rig)
    expected = values(rig.store.partition("t", 0))
    rig.store.close()
    rig.store.mark_clean()
    (tmp_path / "topics.json").rename(tmp_path / "kept")
    with pytest.raises(CorruptLog):
        Rig(tmp_path)
    (tmp_path / "kept").rename(tmp_path / "topics.json")
    assert values(Rig(tmp_path).store.partition("t", 0)) == expected


def test_a_folder_that_cannot_be_removed_keeps_no_node_from_starting(tmp_path):
    class Disk(FaultyDisk):
        def remove(self, path):
            self.check("remove", path)
            super().remove(path)

    rig = Rig(tmp_path, Disk())
    filled(rig)
    left = tmp_path / "trash" / "left"
    left.mkdir()
    rig.disk.faults["remove", "trash"] = errno.EIO
    rig = rig.again()
    assert values(rig.store.partition("t", 0))
    rig.disk.faults.clear()
    rig.again()
    assert not left.exists()
