import random
from itertools import pairwise

import msgspec
import pytest

from log.power import PowerRig, after_every_crash
from log.rig import Rig
from walstream.errors import CorruptBatch, PartitionOffline
from walstream.log import times, truncation
from walstream.log.batch import parse_header, walk
from walstream.log.records import iter_records


def table(partition):
    """Replay the topic as a reader would: the last value of every key, and how many records were read."""
    rows, count, offset = {}, 0, partition.log_start
    while offset < partition.high_watermark:
        data = partition.read_blocking(offset, 4096)
        if not len(data):
            break
        for start, header in walk(data):
            for record in iter_records(data[start : start + header.length]):
                assert record.offset >= offset
                count += 1
                if record.value is None:
                    rows.pop(record.key, None)
                else:
                    rows[record.key] = record.value
            offset = header.next_offset
    return rows, count


def compacted(rig):
    return rig.topic(
        cleanup_policy="compact",
        segment_bytes="2048",
        min_cleanable_dirty_ratio="0",
        delete_retention_ms="1000",
    )


def fill(rig, partition, count, seed=0, keys=10):
    chance = random.Random(seed)
    for number in range(count):
        key = f"k{chance.randrange(keys)}"
        value = "" if chance.random() < 0.2 else f"{number}" * 5
        rig.write(partition, value, keys=[key])


def settle(rig):
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.store.compact()


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def test_compaction_keeps_the_table_and_drops_the_rest(rig):
    partition = compacted(rig)
    fill(rig, partition, 500)
    before, count = table(partition)
    size = partition.size_bytes
    settle(rig)
    after, remaining = table(partition)
    assert after == before
    assert remaining < count / 5
    assert partition.size_bytes < size / 4
    assert partition.log_start == 0
    assert partition.high_watermark == 500
    assert len(partition.segments) <= 3
    assert {path.suffix for path in partition.folder.iterdir()} == {".log", ".index", ".producers"}
    for offset in range(0, 500, 7):  # Every offset can still be asked for.
        assert len(partition.read_blocking(offset, 1)) > 0


def test_tombstones_go_in_time(rig):
    partition = compacted(rig)
    fill(rig, partition, 300)
    before, _ = table(partition)
    settle(rig)
    _, with_tombstones = table(partition)
    rig.now_ms += 5000
    settle(rig)
    after, without = table(partition)
    assert after == before
    assert without <= with_tombstones


def test_tombstones_that_are_gone_ask_for_no_round(rig):
    """Otherwise every tick of retention would write a log again in which nothing has changed."""
    partition = compacted(rig)
    fill(rig, partition, 300)
    settle(rig)
    assert partition.tombstones_due_ms is not None
    rig.now_ms += 5000
    settle(rig)
    segments = partition.segments
    assert segments[0].path.name.endswith(".log")
    rig.now_ms += 5000
    settle(rig)
    assert partition.segments == segments


def test_rounds_go_on_over_restarts(rig):
    partition = compacted(rig)
    for seed in range(4):
        fill(rig, partition, 200, seed, keys=30)
        expected, _ = table(partition)
        settle(rig)
        assert table(partition)[0] == expected
        rig = rig.again(clean=seed % 2 == 0)
        partition = rig.store.partition("t", 0)
        assert table(partition)[0] == expected
        assert not partition.damaged
        assert partition.log_end == (seed + 1) * 200


@pytest.mark.parametrize("steps", range(6))
def test_a_crash_between_any_two_steps_is_finished_or_undone(rig, steps):
    partition = compacted(rig)
    fill(rig, partition, 300)
    expected, _ = table(partition)
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    cleaner = rig.store._rounds._cleaner
    work = cleaner.plan(partition, rig.store._saver.saved.partition(partition.key).segment, rig.now_ms)

    def save():
        partition.gaps_below = work.reached
        rig.store.save_checkpoint(lambda error: None)

    def remove_only():
        for group, _ in work.made:
            for segment in group:
                segment.remove()

    for step in (
        lambda: cleaner.execute(work),
        save,
        lambda: cleaner.decide(work),
        lambda: cleaner.install(work),
        remove_only,
        lambda: cleaner.finish(work),
    )[: steps + 1]:
        step()
    again = rig.again()
    reopened = again.store.partition("t", 0)
    assert table(reopened)[0] == expected
    assert not reopened.damaged
    assert reopened.log_end == 300
    assert {path.suffix for path in partition.folder.iterdir()} <= {".log", ".index", ".producers"}


def test_a_small_map_compacts_in_rounds(tmp_path):
    rig = Rig(tmp_path, compaction_keys_max=5)
    partition = compacted(rig)
    fill(rig, partition, 300, keys=40)
    expected, _ = table(partition)
    reached = []
    for _ in range(60):
        settle(rig)
        reached.append(partition.cleaned_until)
    assert reached == sorted(reached)
    assert reached[-1] > 250
    assert table(partition)[0] == expected


def test_a_power_cut_in_a_round_below_a_segment_that_only_the_journal_covers_loses_nothing():
    """It lies in the middle: segments before it are compacted, those after it were synced by themselves."""

    def prepare(disk):
        rig = PowerRig(disk, replicated=False)
        partition = rig.topic(cleanup_policy="compact", min_cleanable_dirty_ratio="0")

        def write(number):
            rig.write(partition, f"{number:060d}", keys=[f"k{number % 3}"])

        for number in range(12):
            write(number)
        rig.settle()
        for number in range(12, 30):
            write(number)
        is_synced = [segment.synced_size == segment.size for segment in partition.segments]
        middle = is_synced.index(False)
        assert is_synced[-1]
        assert 0 < partition.segments[middle].base_offset < partition.segments[-1].base_offset
        prepare.expected, prepare.end = table(partition)[0], partition.log_end

        def compact():
            rig.store.save_checkpoint(lambda error: None)
            rig.store.compact()
            prepare.cleaned = partition.cleaned_until
            settle(rig)
            assert partition.cleaned_until > prepare.cleaned

        return compact

    prepare.cleaned = 0
    for disk, _ in after_every_crash(prepare, range(2)):
        partition = PowerRig(disk, replicated=False).store.partition("t", 0)
        assert partition.damaged == []
        assert (table(partition)[0], partition.log_end) == (prepare.expected, prepare.end)
    assert prepare.cleaned > 0


def test_damage_stops_a_round_and_changes_nothing(rig):
    partition = compacted(rig)
    fill(rig, partition, 300)
    path = partition.segments[1].path
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    names = sorted(entry.name for entry in partition.folder.iterdir())
    settle(rig)
    assert partition.cleaned_until == 0
    assert sorted(entry.name for entry in partition.folder.iterdir()) == names


def follow_and_truncate(rig, partition, to):
    """Let another node lead, whose log has only what is below an offset."""
    errors = []
    partition.become_follower(partition.leader_epoch + 1, errors.append)
    partition.truncate(to, errors.append)
    rig.driver.flush()
    assert errors == [None, None]


def test_records_above_the_high_watermark_do_not_replace_committed_ones(tmp_path):
    rig = Rig(tmp_path, replicated=True)
    partition = compacted(rig)
    partition.become_leader(1, lambda error: None)
    fill(rig, partition, 100, keys=5)
    partition.advance_high_watermark(40)
    committed, count = table(partition)
    settle(rig)
    assert partition.cleaned_until > 0, "segments below the high watermark are compacted"
    assert partition.cleaned_until <= 40
    assert table(partition)[0] == committed
    assert table(partition)[1] < count
    follow_and_truncate(rig, partition, 40)
    for log in (partition, rig.again(replicated=True).store.partition("t", 0)):
        assert log.log_end == 40
        log.high_watermark = 40
        assert table(log)[0] == committed


def compacted_below(rig, end, records=100):
    """Return a leader's log that is compacted, with gaps, up to about its high watermark."""
    partition = compacted(rig)
    partition.become_leader(1, lambda error: None)
    fill(rig, partition, records, keys=2)
    partition.advance_high_watermark(end)
    settle(rig)
    return partition


def test_no_gap_is_expected_above_the_end_of_a_truncated_log(tmp_path):
    rig = Rig(tmp_path, replicated=True)
    partition = compacted_below(rig, 100)
    assert partition.gaps_below > 50
    partition.high_watermark = 10  # An unclean election: less than was committed is left.
    follow_and_truncate(rig, partition, 10)
    assert partition.gaps_below <= partition.log_end <= 10
    assert partition.cleaned_until <= partition.log_end
    again = rig.again(replicated=True).store.partition("t", 0)
    assert again.gaps_below <= again.log_end <= 10
    assert again.cleaned_until <= again.log_end


def test_no_gap_is_expected_above_a_truncation_that_recovery_finishes(tmp_path):
    rig = Rig(tmp_path, replicated=True)
    partition = compacted_below(rig, 100)
    assert partition.gaps_below > 50
    truncation.announce(rig.disk, partition.folder, truncation.plan(partition.segments, 10, partition.gaps_below))
    again = rig.again(replicated=True).store.partition("t", 0)
    assert again.gaps_below <= again.log_end <= 10
    assert again.cleaned_until <= again.log_end


def producer(number, sequence=0):
    return {"producer_id": number, "producer_epoch": 0, "base_sequence": sequence}


def headers(partition):
    return [header for segment in partition.segments for _, header in segment.headers()]


def last_of(partition, number):
    return [header for header in headers(partition) if header.producer_id == number][-1]


def copied(rig, partition):
    """Copy a leader's log to a new replica, and let that lead."""
    copy = compacted(rig)
    copy.become_follower(1, lambda error: None)
    while copy.log_end < partition.durable_end:
        chunk = partition.read_replica_blocking(copy.log_end, 4096)
        copy.append_replicated(chunk.buffers, offset=copy.log_end)
        rig.driver.flush()
    copy.become_leader(2, lambda error: None)
    rig.driver.flush()
    return copy


def test_a_replica_of_a_compacted_log_knows_each_producers_last_batch(tmp_path):
    rig = Rig(tmp_path / "leader", replicated=True)
    partition = compacted(rig)
    partition.become_leader(1, lambda error: None)
    for sequence in range(3):
        for number in range(5):
            rig.write(partition, f"{number}-{sequence}", keys=["k"], **producer(number, sequence))
    fill(rig, partition, 100, keys=1)
    rig.write(partition, "newest", keys=["k"])
    fill(rig, partition, 50)
    partition.advance_high_watermark(partition.log_end)
    expected = table(partition)[0]
    settle(rig)
    kept = [header for header in headers(partition) if header.producer_id >= 0]
    assert [header.record_count for header in kept] == [0] * 5, "of each producer the last header is left"
    assert table(partition)[0] == expected
    copy_rig = Rig(tmp_path / "copy", replicated=True)
    for log_rig, log in ((rig, partition), (copy_rig, copied(copy_rig, partition))):
        end = log.log_end
        for number in range(5):
            appended = log_rig.append(log, f"{number}-2", keys=["k"], **producer(number, 2))
            assert appended.base_offset == 10 + number, "a retry is answered with where the batch was"
        assert log.log_end == end
    again = rig.again(replicated=True).store.partition("t", 0)
    assert all(number in again.producers for number in range(5))


def test_an_empty_batch_goes_when_its_producer_has_a_later_one(rig):
    partition = compacted(rig)
    rig.write(partition, "first", keys=["k"], **producer(7))
    fill(rig, partition, 100, keys=1)
    rig.write(partition, "last", keys=["k"])
    fill(rig, partition, 50)
    settle(rig)
    assert last_of(partition, 7).base_offset == 0
    rig.write(partition, "second", keys=["other"], **producer(7, 1))
    fill(rig, partition, 100)
    expected = table(partition)[0]
    settle(rig)
    assert [header.base_offset for header in headers(partition) if header.producer_id == 7] == [152]
    for log in (partition, rig.again().store.partition("t", 0)):
        assert table(log)[0] == expected
        assert log.damaged == []


def test_the_last_committed_batch_of_a_producer_stays_although_it_has_later_ones(tmp_path):
    rig = Rig(tmp_path, replicated=True)
    partition = compacted(rig)
    partition.become_leader(1, lambda error: None)
    rig.write(partition, "committed", keys=["k0"], **producer(7))
    fill(rig, partition, 100, keys=1)
    end = partition.log_end
    for sequence in range(1, 8):
        rig.write(partition, "uncommitted", keys=["k"], **producer(7, sequence))
    fill(rig, partition, 100)
    partition.advance_high_watermark(end)
    settle(rig)
    assert partition.cleaned_until > 0
    follow_and_truncate(rig, partition, end)
    again = rig.again(replicated=True).store.partition("t", 0)
    for log in (partition, again):
        assert last_of(log, 7).base_offset == 0


def test_an_empty_batch_has_no_time_that_is_looked_for(rig):
    partition = rig.topic(
        cleanup_policy="compact",
        segment_bytes="2048",
        min_cleanable_dirty_ratio="0",
        message_timestamp_type="LogAppendTime",
    )
    rig.write(partition, "kept", keys=["kept"])
    rig.now_ms += 1000
    rig.write(partition, "emptied", keys=["k"], **producer(7))
    latest = rig.now_ms
    fill(rig, partition, 100, keys=1)
    rig.write(partition, "last", keys=["k"])
    fill(rig, partition, 50)
    settle(rig)
    assert last_of(partition, 7).record_count == 0
    assert partition.max_timestamp() is not None
    assert partition.offset_for_time(latest) is not None
    assert times.max_timestamp(partition.segments, 0, 2) == (0, latest - 1000)


def contents(partition):
    """Return (base offset, epoch, CRC) of every durable batch."""
    offset, found = partition.log_start, []
    while offset < partition.durable_end:
        chunk = partition.read_replica_blocking(offset, 1)
        header = parse_header(chunk.buffers[0])
        found.append((header.base_offset, header.leader_epoch, header.crc))
        offset = chunk.next_offset
    return found


NOT_COMPACTED = {"cleanup.policy": "delete", "segment.bytes": "2048"}


def test_gaps_of_a_topic_that_is_no_longer_compacted_are_copied_and_survive_a_crash(tmp_path):
    rig = Rig(tmp_path / "leader", replicated=True)
    partition = compacted_below(rig, 100)
    rig.store.configure_topic("t", NOT_COMPACTED)
    other = Rig(tmp_path / "copy", replicated=True)
    copy = other.topic(cleanup_policy="delete", segment_bytes="2048")
    copy.become_follower(1, lambda error: None)
    refusals = 0
    while copy.log_end < partition.durable_end:
        chunk = partition.read_replica_blocking(copy.log_end, 500)
        offset, may_have_gaps = copy.log_end, copy.log_end < partition.gaps_below
        try:
            copy.append_replicated(chunk.buffers, offset=offset, may_have_gaps=may_have_gaps)
        except PartitionOffline:
            refusals += 1  # The leader sends it again when the follower asks for it.
        other.driver.flush()
    assert refusals == 1
    expected = contents(partition)
    for log in (copy, other.again(replicated=True).store.partition("t", 0)):
        assert contents(log) == expected
        assert log.gaps_below == copy.gaps_below <= partition.gaps_below, "no more than there is is taken for a gap"
        assert log.damaged == []


def test_a_gap_that_the_leader_does_not_announce_is_refused(tmp_path):
    rig = Rig(tmp_path / "leader", replicated=True)
    partition = compacted_below(rig, 100)
    other = Rig(tmp_path / "copy", replicated=True)
    copy = other.topic(cleanup_policy="delete")
    copy.become_follower(1, lambda error: None)
    chunk = partition.read_replica_blocking(0, 500)
    with pytest.raises(CorruptBatch):
        copy.append_replicated(chunk.buffers, offset=0)


def test_gaps_that_were_copied_before_the_topic_stopped_being_compacted_survive_a_crash(tmp_path):
    rig = Rig(tmp_path / "leader", replicated=True)
    partition = compacted_below(rig, 100)
    other = Rig(tmp_path / "copy", replicated=True)
    copy = compacted(other)
    copy.become_follower(1, lambda error: None)
    while copy.log_end < partition.durable_end:
        chunk = partition.read_replica_blocking(copy.log_end, 500)
        copy.append_replicated(chunk.buffers, offset=copy.log_end)
        other.driver.flush()
    other.store.configure_topic("t", NOT_COMPACTED)
    again = other.again(replicated=True).store.partition("t", 0)
    assert contents(again) == contents(partition)
    assert again.damaged == []


def test_a_scan_of_all_segments_takes_the_emptied_end_of_one_for_a_gap(rig):
    partition = compacted(rig)
    for number in range(30):
        rig.write(partition, "once", keys=[f"once {number}"])
    fill(rig, partition, 200, keys=1)
    settle(rig)
    expected = table(partition)[0]
    gaps = [
        segment
        for segment, following in pairwise(partition.segments)
        if [header for _, header in segment.headers()][-1].next_offset < following.base_offset
    ]
    assert gaps
    saved = rig.store._saver.saved
    key = next(iter(saved.partitions))
    unknown = msgspec.structs.replace(saved.partitions[key], segment=0, position=0, offset=0)
    rig.store._saver.write(msgspec.structs.replace(saved, partitions={key: unknown}))
    again = rig.again().store.partition("t", 0)
    assert again.damaged == []
    assert table(again)[0] == expected
