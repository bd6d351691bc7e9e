import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.rig import FaultyDisk, Rig, batch, outcome, values
from walstream.errors import (
    BatchTooLarge,
    CorruptBatch,
    CorruptLog,
    DiskFull,
    InvalidRecord,
    OffsetOutOfRange,
    OutOfOrderSequence,
    SyncFailed,
)
from walstream.log.group_commit import GATHERED_MAX
from walstream.log.records import Record, build_batch


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_a_batch_is_visible_only_once_it_is_durable(rig):
    partition = rig.topic()
    appended = rig.append(partition, "a", "b")
    heard = outcome(partition, appended.last_offset)
    assert (appended.base_offset, appended.last_offset) == (0, 1)
    assert (partition.log_end, partition.high_watermark) == (2, 0)
    assert heard == []
    assert values(partition) == []
    rig.driver.flush()
    assert partition.high_watermark == 2
    assert heard == [None]
    assert values(partition) == ["a", "b"]


def test_many_appends_share_one_sync(rig):
    partition = rig.topic()
    rig.write(partition, "first")
    rig.disk.syncs.clear()
    for number in range(50):
        rig.append(partition, str(number))
    rig.driver.flush()
    assert len(rig.disk.syncs) == 1
    assert values(partition, 1) == [str(number) for number in range(50)]


def test_a_flush_over_many_partitions_syncs_only_the_journal(rig):
    rig.topic("wide", partitions=20)
    partitions = [rig.store.partition("wide", index) for index in range(20)]
    for partition in partitions:
        rig.append(partition, "x")
    rig.driver.flush()
    assert [path.suffix for path in rig.disk.syncs] == [".journal"]
    assert all(values(partition) == ["x"] for partition in partitions)


def test_settling_syncs_the_segments_and_drops_the_journal(rig):
    rig.topic("wide", partitions=20)
    partitions = [rig.store.partition("wide", index) for index in range(20)]
    for partition in partitions:
        rig.append(partition, "x")
    rig.driver.flush()
    assert all(partition.segments[-1].synced_size == 0 for partition in partitions)
    rig.settle()
    assert all(partition.segments[-1].synced_size == partition.segments[-1].size for partition in partitions)
    assert rig.disk.list(rig.folder / "journal") == ["spare"]


def test_reading_honours_the_limit_but_returns_at_least_one_batch(rig):
    partition = rig.topic()
    for number in range(10):
        rig.write(partition, f"{number}" * 1000)
    one = partition.read_blocking(3, 1)
    assert len(one) > 1000
    assert len(partition.read_blocking(3, len(one) * 2 + 10)) == len(one) * 2
    assert bytes(partition.read_cached(3, 1)) == bytes(one)


def test_reading_outside_the_log_is_refused(rig):
    partition = rig.topic()
    rig.write(partition, "a")
    assert len(partition.read_blocking(1, 100)) == 0
    for offset in (-1, 2):
        with pytest.raises(OffsetOutOfRange):
            partition.read_blocking(offset, 100)


def test_a_batch_larger_than_one_read_is_found_behind_others(rig):
    partition = rig.topic(max_message_bytes=str(1 << 24))
    for number in range(5):
        rig.write(partition, str(number))
    rig.write(partition, "x" * 3_000_000)
    rig.write(partition, "after")
    assert values(partition, 5, bytes_max=100)[0] == "x" * 3_000_000
    assert values(partition)[-1] == "after"


def test_segments_roll_and_every_offset_is_found(rig):
    partition = rig.topic(segment_bytes="2048")
    for number in range(100):
        rig.write(partition, f"value {number}" * 10)
    assert len(partition.segments) > 5
    for offset in range(100):
        assert values(partition, offset, bytes_max=1)[0].startswith(f"value {offset}")


def test_old_segments_roll_by_time(rig):
    partition = rig.topic(segment_ms="1000")
    rig.write(partition, "a")
    rig.now_ms += 1001
    rig.write(partition, "b")
    assert [segment.base_offset for segment in partition.segments] == [0, 1]


def bases(partition):
    return [segment.base_offset for segment in partition.segments]


@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "kill"])
def test_a_segment_keeps_its_age_over_a_restart(rig, clean):
    start_ms = rig.now_ms
    rig.write(rig.topic(segment_ms="1000"), "a")
    rig = rig.again(clean=clean)
    partition = rig.store.partition("t", 0)

    def write(time_ms):
        partition.append(memoryview(batch("x", now_ms=start_ms + time_ms)), now_ms=rig.now_ms)
        rig.driver.flush()
        return bases(partition)

    assert write(1000) == [0]
    assert write(1001) == [0, 2]
    assert write(2001) == [0, 2]
    assert write(2002) == [0, 2, 4]


def test_a_segment_keeps_its_age_over_a_full_disk(rig):
    partition = rig.topic(segment_ms="60000")
    rig.write(partition, "a")
    rig.disk.faults["write", ".log"] = rig.disk.faults["write", ".journal"] = errno.ENOSPC
    rig.append(partition, "refused")
    rig.driver.flush()
    assert isinstance(partition.write_error, DiskFull)
    rig.disk.faults.clear()
    rig.now_ms += 1000
    rig.store.tick()
    rig.driver.flush()
    assert partition.write_error is None
    rig.now_ms += 59_001
    rig.write(partition, "b")
    assert bases(partition) == [0, 1]


def test_the_age_of_a_segment_counts_from_timestamps_whatever_the_clock_is_set_to(rig):
    partition = rig.topic(segment_ms="1000")
    start_ms = rig.now_ms
    rig.write(partition, "a")
    rig.step_clock(1_000_000)
    for number in range(3):
        partition.append(memoryview(batch(f"{number}", now_ms=start_ms + 1000)), now_ms=rig.now_ms)
    rig.driver.flush()
    assert bases(partition) == [0], "a step of the clock is no time that passes"
    rig.step_clock(-2_000_000)
    partition.append(memoryview(batch("later", now_ms=start_ms + 1001)), now_ms=rig.now_ms)
    assert bases(partition) == [0, 4], "time passes also when the clock is set back"


def test_batches_without_timestamps_roll_by_the_monotonic_clock(rig):
    partition = rig.topic(segment_ms="1000")

    def write():
        partition.append(memoryview(batch("x", now_ms=-1)), now_ms=rig.now_ms)
        rig.driver.flush()

    write()
    rig.step_clock(1_000_000)
    write()
    assert bases(partition) == [0]
    rig.now_ms += 1001
    write()
    assert bases(partition) == [0, 2]
    rig = rig.again(clean=True)
    partition = rig.store.partition("t", 0)
    rig.now_ms += 1000
    write()
    assert bases(partition) == [0, 2], "from the start of the node"
    rig.now_ms += 1
    write()
    assert bases(partition) == [0, 2, 4]


def test_a_segment_with_a_damaged_first_batch_rolls_by_the_monotonic_clock(rig):
    partition = rig.topic(segment_ms="1000")
    rig.write(partition, "a")
    rig.write(partition, "b")
    rig.store.close()
    rig.store.mark_clean()
    with partition.segments[0].path.open("r+b") as file:
        file.write(bytes(20))
    rig = Rig(rig.folder)
    partition = rig.store.partition("t", 0)
    rig.now_ms += 5000
    rig.write(partition, "c")
    assert bases(partition) == [0, 2]


def test_records_are_found_by_time(rig):
    partition = rig.topic(segment_bytes="4096")
    start = rig.now_ms
    for number in range(200):
        rig.now_ms = start + number * 10
        rig.write(partition, "x" * 100)
    assert partition.offset_for_time(start) == (0, start)
    assert partition.offset_for_time(start + 995) == (100, start + 1000)
    assert partition.offset_for_time(start + 1990) == (199, start + 1990)
    assert partition.offset_for_time(start + 1991) is None
    assert partition.max_timestamp() == (199, start + 1990)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_equal_times_are_found_at_the_first_record_that_has_them(tmp_path_factory, data):
    """Batches with the same largest time, in one segment and over several, before and after a restart and a cut."""
    rig = Rig(tmp_path_factory.mktemp("log"))
    partition = rig.topic(segment_bytes="60000")
    few = st.integers(rig.now_ms, rig.now_ms + 3)
    times = []
    for batch_times in data.draw(st.lists(st.lists(few, min_size=1, max_size=3), min_size=1, max_size=40)):
        size = data.draw(st.sampled_from([10, 4_000, 16_300]))
        records = [Record(number, time, None, bytes(size)) for number, time in enumerate(batch_times)]
        partition.append(memoryview(build_batch(records)), now_ms=rig.now_ms)
        times += batch_times
    rig.driver.flush()
    start = data.draw(st.integers(0, len(times) - 1))
    rig.store.delete_records(partition, start, lambda error: None)
    rig.driver.flush()
    assert partition.log_start == start
    again = rig.again(clean=data.draw(st.booleans())).store.partition("t", 0)
    for log in (partition, again):
        left = list(enumerate(times))[start:]
        for asked in range(rig.now_ms - 1, rig.now_ms + 5):
            assert log.offset_for_time(asked) == next((found for found in left if found[1] >= asked), None)
        assert log.max_timestamp() == max(left, key=lambda found: (found[1], -found[0]))


def test_the_latest_record_is_found_when_the_one_before_it_in_its_batch_is_deleted(rig):
    partition = rig.topic()
    late, early = rig.now_ms + 5, rig.now_ms
    records = [Record(number, time, None, b"") for number, time in enumerate([late, early, early + 1, early + 1])]
    partition.append(memoryview(build_batch(records)), now_ms=rig.now_ms)
    rig.driver.flush()
    assert partition.max_timestamp() == (0, late)
    rig.store.delete_records(partition, 1, lambda error: None)
    rig.driver.flush()
    assert partition.max_timestamp() == (2, early + 1)


def test_append_time_never_goes_back(rig):
    partition = rig.topic(message_timestamp_type="LogAppendTime")
    first = rig.write(partition, "a")
    rig.now_ms -= 60_000
    second = rig.write(partition, "b")
    assert second.append_time_ms == first.append_time_ms == rig.now_ms + 60_000
    again = rig.again()
    third = again.write(again.store.partition("t", 0), "c")
    assert third.append_time_ms >= second.append_time_ms
    assert values(again.store.partition("t", 0)) == ["a", "b", "c"]


def test_append_time_starts_above_what_a_killed_process_could_have_stamped(rig):
    partition = rig.topic(message_timestamp_type="LogAppendTime")
    stamped = rig.write(partition, "a").append_time_ms
    again = rig.again()
    again.now_ms -= 10_000_000
    floor = again.catalogue.append_time_floor_ms
    assert floor >= stamped
    assert again.write(again.store.partition("t", 0), "b").append_time_ms >= floor


def test_what_cannot_be_appended_changes_nothing(rig):
    partition = rig.topic(max_message_bytes="2048")
    broken = batch("a")
    broken[-1] ^= 1
    with pytest.raises(CorruptBatch):
        partition.append(memoryview(broken), now_ms=rig.now_ms)
    with pytest.raises(BatchTooLarge):
        rig.append(partition, "x" * 3000)
    assert partition.log_end == 0


def test_a_compacted_topic_refuses_records_without_a_key(rig):
    partition = rig.topic(cleanup_policy="compact")
    with pytest.raises(InvalidRecord):
        rig.append(partition, "a")
    rig.append(partition, "a", keys=["k"])


def test_a_duplicate_that_is_not_durable_waits_like_the_original(rig):
    partition = rig.topic()
    first = rig.append(partition, "a", producer_id=7, producer_epoch=0, base_sequence=0)
    again = rig.append(partition, "a", producer_id=7, producer_epoch=0, base_sequence=0)
    assert again == first
    heard = outcome(partition, again.last_offset)
    assert heard == []
    rig.driver.flush()
    assert heard == [None]
    assert values(partition) == ["a"]
    with pytest.raises(OutOfOrderSequence):
        rig.append(partition, "c", producer_id=7, producer_epoch=0, base_sequence=5)


def test_a_failed_sync_takes_the_partition_offline_and_acknowledges_nothing(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition, other = rig.topic("t"), rig.topic("u")
    rig.write(partition, "kept")
    disk.faults["sync", "/t@"] = errno.EIO
    failed = outcome(partition, rig.append(partition, "lost" * 10_000).last_offset)
    rig.driver.flush()
    behind = outcome(partition, 5)
    assert isinstance(failed[0], SyncFailed)
    assert isinstance(behind[0], SyncFailed)
    disk.faults.clear()
    with pytest.raises(SyncFailed):
        rig.append(partition, "more")
    rig.now_ms += 3_600_000
    rig.store.tick()
    with pytest.raises(SyncFailed):  # A failed fsync is never tried again as if it could succeed.
        rig.append(partition, "more")
    assert values(partition) == ["kept"]
    rig.write(other, "fine")
    assert values(other) == ["fine"]


def test_a_segment_that_cannot_be_synced_later_keeps_its_journal(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = rig.topic("t")
    rig.write(partition, "acknowledged")
    number = rig.store._journal.number
    disk.faults["sync", "/t@"] = errno.EIO
    rig.settle()
    with pytest.raises(SyncFailed):
        rig.append(partition, "more")
    assert rig.disk.list(rig.folder / "journal") == [f"{number}.journal", "spare"]
    disk.faults.clear()
    partition.segments[0].path.write_bytes(b"")  # What a disk may make of pages whose sync failed.
    assert values(rig.again().store.partition("t", 0)) == ["acknowledged"]


def test_a_sync_that_failed_while_settling_fails_flushes_of_the_same_file(tmp_path):
    """The kernel tells of it once: without that, a flush beside it would be told that all is well."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    commit, partition = rig.store.commit, rig.topic("t")
    rig.write(partition, "acknowledged")  # In the journal.
    commit.ask_settling()
    assert commit.begin_settling()
    disk.faults["sync", "/t@"] = errno.EIO
    settled = commit.settle()
    disk.faults.clear()
    heard = outcome(partition, rig.append(partition, "x" * 100_000).last_offset)  # Too large for the journal.
    rig.driver.flush()
    assert isinstance(heard[0], SyncFailed)
    assert partition.segments[0].synced_size == 0, "recovery would not look into the journal for it"
    commit.complete_settling(settled)
    assert values(partition) == ["acknowledged"]


def test_writes_that_gather_are_queued_together_and_before_what_comes_between(rig):
    commit, partition, asked, between = rig.store.commit, rig.topic("t"), [], []
    commit.on_gathering = lambda: asked.append(partition.log_end)
    for number in range(3):
        rig.append(partition, f"{number}")
    assert asked == [1], "once, with the first"
    assert commit.is_idle
    commit.run_between(lambda: between.append(partition.durable_end))
    rig.append(partition, "3")
    rig.driver.flush()
    assert (partition.durable_end, between) == (3, [3]), "after what was queued before it, and before the rest"
    commit.release()
    rig.driver.flush()
    assert partition.durable_end == 4
    for number in range(GATHERED_MAX):
        rig.append(partition, f"{number}")
    rig.driver.flush()
    assert partition.durable_end == 4 + GATHERED_MAX, "so many do not wait for the end of the turn"


def test_a_flush_that_ends_after_settling_has_stopped_its_partition_is_not_heard(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    commit, partition = rig.store.commit, rig.topic("t")
    rig.write(partition, "acknowledged")
    commit.ask_settling()
    assert commit.begin_settling()
    heard = outcome(partition, rig.append(partition, "small").last_offset)
    commit.take(wait=False)  # What asking for settling has queued.
    writes = commit.take(wait=False)
    assert isinstance(writes, list)
    flush = commit.execute(writes)  # By the journal, which is sound.
    disk.faults["sync", "/t@"] = errno.EIO
    commit.complete_settling(commit.settle())
    commit.complete(flush)
    assert isinstance(heard[0], SyncFailed)
    assert values(partition) == ["acknowledged"]
    disk.faults.clear()
    partition.segments[0].path.write_bytes(b"")
    assert values(rig.again().store.partition("t", 0)) == ["acknowledged", "small"]


def test_the_journal_is_used_again_and_its_earlier_life_is_not_believed(rig):
    partition = rig.topic()
    for number in range(30):
        rig.write(partition, f"{number}")
        if number % 3 == 2:
            rig.settle()
    assert len(rig.disk.list(rig.folder / "journal")) <= 2
    assert [path.suffix for path in rig.disk.syncs].count(".journal") == 30
    again = rig.again().store.partition("t", 0)
    assert values(again) == [str(number) for number in range(30)]


def test_writes_resume_after_a_full_disk(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = rig.topic()
    rig.write(partition, "kept", producer_id=1, producer_epoch=0, base_sequence=0)
    disk.faults["write", ".log"] = errno.ENOSPC
    failed = outcome(
        partition, rig.append(partition, "x", producer_id=1, producer_epoch=0, base_sequence=1).last_offset
    )
    rig.append(partition, "queued behind", producer_id=1, producer_epoch=0, base_sequence=2)
    rig.driver.flush()
    assert isinstance(failed[0], DiskFull)
    with pytest.raises(DiskFull):
        rig.append(partition, "no")
    assert values(partition) == ["kept"]
    disk.faults.clear()
    rig.store.tick()
    rig.driver.flush()
    rig.write(partition, "x", producer_id=1, producer_epoch=0, base_sequence=1)
    assert values(partition) == ["kept", "x"]


def test_a_failed_journal_fails_its_flush_and_is_not_used_again(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    rig.topic("a", partitions=10)
    rig.topic("b", partitions=10)
    disk.faults["sync", ".journal"] = errno.EIO
    heard = [outcome(p, rig.append(p, "x").last_offset) for (name, _), p in rig.store.partitions.items() if name == "a"]
    rig.driver.flush()
    assert all(isinstance(said[0], SyncFailed) for said in heard)
    others = [p for (name, _), p in rig.store.partitions.items() if name == "b"]
    for partition in others:
        rig.append(partition, "y")
    rig.driver.flush()
    assert all(values(partition) == ["y"] for partition in others)


def test_a_damaged_batch_is_never_served_and_those_around_it_are(rig):
    partition = rig.topic()
    for number in range(10):
        rig.write(partition, str(number) * 100)
    path = partition.segments[0].path
    data = bytearray(path.read_bytes())
    data[len(data) // 10 * 4 + 100] ^= 0xFF
    path.write_bytes(data)
    assert len(partition.read_blocking(0, 1 << 20)) == len(data) // 10 * 4
    with pytest.raises(CorruptLog, match="from offset 5 on"):
        partition.read_blocking(4, 1 << 20)
    assert values(partition, 5) == [str(n) * 100 for n in range(5, 10)]
    assert partition.damaged == [(4, 5)]
    assert rig.store.damage_reports == 1


def test_deleting_records_moves_the_start_durably(rig):
    partition = rig.topic(segment_bytes="2048")
    for number in range(100):
        rig.write(partition, f"{number:0100d}")
    heard = []
    rig.store.delete_records(partition, 60, heard.append)
    assert heard == [None]
    assert partition.log_start == 60
    assert partition.segments[0].base_offset <= 60 < partition.segments[1].base_offset
    again = rig.again().store.partition("t", 0)
    assert again.log_start == 60
    assert [int(value) for value in values(again)] == list(range(60, 100))
    with pytest.raises(OffsetOutOfRange):
        again.read_blocking(59, 10)


def test_retention_by_size_and_age(rig):
    by_size = rig.topic("size", segment_bytes="2048", retention_bytes="8192")
    by_age = rig.topic("age", segment_bytes="2048", retention_ms="1000")
    kept = rig.topic("kept", segment_bytes="2048", retention_ms="-1")
    for number in range(200):
        for partition in (by_size, by_age, kept):
            rig.append(partition, f"{number:0100d}")
        rig.driver.flush()
        rig.now_ms += 10
    rig.store.enforce_retention()
    assert 8192 <= by_size.size_bytes < 8192 + 2048
    assert 80 <= by_age.log_start <= 100
    assert kept.log_start == 0
    rig.now_ms += 10_000
    rig.store.enforce_retention()
    assert by_age.log_start == by_age.log_end == 200
    assert rig.write(by_age, "next").base_offset == 200
    assert values(by_age) == ["next"]


def test_a_deleted_topic_leaves_nothing_for_its_successor(rig):
    rig.write(rig.topic(), "old")
    rig.append(rig.store.partition("t", 0), "still queued")
    rig.store.delete_topics(["t"])
    rig.driver.flush()
    successor = rig.topic()
    rig.write(successor, "new")
    assert values(successor) == ["new"]
    assert rig.disk.list(rig.folder / "trash") == []
    assert values(rig.again().store.partition("t", 0)) == ["new"]


def test_a_topic_made_again_at_once_holds_nothing_of_the_one_that_is_still_being_deleted(rig):
    first = rig.topic()
    rig.write(first, "old")
    rig.append(first, "queued")
    rig.store.delete_topics(["t"])
    second = rig.topic()
    assert (second.log_end, values(second)) == (0, [])
    assert rig.write(second, "new").base_offset == 0
    assert values(second) == ["new"]
    assert values(rig.again().store.partition("t", 0)) == ["new"]


def test_a_topic_deleted_during_a_flush_keeps_no_other_from_hearing_of_it(rig):
    gone, other = rig.topic("gone"), rig.topic("other")
    for partition in (gone, other):
        rig.append(partition, "a")
    heard = outcome(other, 0)
    taken = rig.store.commit.take(wait=False)
    flush = rig.store.commit.execute(taken)
    rig.store.delete_topics(["gone"])
    rig.store.commit.complete(flush)
    assert heard == [None]
    rig.write(other, "b")
    assert values(other) == ["a", "b"]
