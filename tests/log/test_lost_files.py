"""Files that are gone, or shorter than they were: reported, and no acknowledged offset is given to another record."""

import errno
import os
from contextlib import suppress
from random import Random

import pytest

from log.power import PowerRig, contents
from log.rig import Rig, batch, outcome, values
from walstream.cluster.local import NewTopic
from walstream.errors import CorruptLog, PartitionOffline
from walstream.log.batch import parse_header, stamp
from walstream.log.records import iter_records
from walstream.log.settings import TopicSettings
from walstream.sim.disk import SimDisk

SEGMENTS = TopicSettings(segment_bytes=1024)
CLEAN_OR_KILLED = pytest.mark.parametrize("clean", [True, False], ids=["clean", "killed"])


def filled(tmp_path, count=60, **config):
    """Return a store with a log of several segments, all of them synced, as the checkpoint says."""
    rig = Rig(tmp_path, defaults=SEGMENTS)
    partition = rig.topic(**config)
    for number in range(count):
        rig.write(partition, f"v{number}" * 10)
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    return rig, partition


def stop(rig, *, clean):
    if clean:
        rig.store.close()
        rig.store.mark_clean()


def opened(rig):
    rig = Rig(rig.folder, defaults=SEGMENTS)
    return rig, rig.store.partition("t", 0)


def everything_but(partition, start, end):
    """Read all of a log around damage, which must be refused at each of its offsets."""
    for offset in range(start, end):
        with pytest.raises(CorruptLog):
            partition.read_blocking(offset, 1)
    found, offset = [], partition.log_start if partition.log_start < start else end
    while offset < partition.high_watermark:
        data = partition.read_blocking(offset, 1)
        found += [record.value.decode() for record in iter_records(data)]
        offset = parse_header(data).next_offset
        offset = end if offset == start else offset
    return found


@CLEAN_OR_KILLED
@pytest.mark.parametrize("which", [0, 2, -2])
def test_segments_whose_files_are_gone_are_damage(tmp_path, clean, which):
    rig, partition = filled(tmp_path)
    stop(rig, clean=clean)
    segments = partition.segments
    number = which % len(segments)
    start, end = segments[number].base_offset, segments[number + 1].base_offset
    segments[number].path.unlink()
    rig, reopened = opened(rig)
    assert (reopened.log_start, reopened.log_end, reopened.damaged) == (0, 60, [(start, end)])
    assert rig.store.damage_reports == 1
    assert everything_but(reopened, start, end) == [f"v{n}" * 10 for n in range(60) if not start <= n < end]
    rig.write(reopened, "next")
    rig, again = opened(rig)  # Also a start that finds an empty file in its place.
    assert (again.log_start, again.log_end, again.damaged) == (0, 61, [(start, end)])


@CLEAN_OR_KILLED
def test_all_segments_but_the_last_may_be_gone(tmp_path, clean):
    rig, partition = filled(tmp_path)
    stop(rig, clean=clean)
    for segment in partition.segments[:-1]:
        segment.path.unlink()
    last = partition.segments[-1].base_offset
    _, reopened = opened(rig)
    assert (reopened.log_start, reopened.log_end) == (0, 60)
    assert everything_but(reopened, 0, last) == [f"v{n}" * 10 for n in range(last, 60)]


@CLEAN_OR_KILLED
def test_a_first_segment_that_is_gone_is_missed_by_a_checkpoint_that_lists_none(tmp_path, clean):
    """As they were written before segments were listed."""
    rig, partition = filled(tmp_path)
    stop(rig, clean=clean)
    path = tmp_path / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b'"segments":[[', b'"before":[['))
    partition.segments[0].path.unlink()
    _, reopened = opened(rig)
    assert reopened.log_start == 0
    assert reopened.damaged == [(0, partition.segments[1].base_offset)]


@CLEAN_OR_KILLED
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_a_sealed_segment_that_ends_early_is_damage(tmp_path, clean, kept):
    rig, partition = filled(tmp_path)
    stop(rig, clean=clean)
    segment, following = partition.segments[1:3]
    os.truncate(segment.path, int(segment.size * kept))
    rig, reopened = opened(rig)
    ((start, end),) = reopened.damaged
    assert end == following.base_offset
    assert segment.base_offset <= start < end
    assert rig.store.damage_reports == 1
    assert everything_but(reopened, start, end) == [f"v{n}" * 10 for n in range(60) if not start <= n < end]


@CLEAN_OR_KILLED
def test_segments_below_the_start_of_the_log_are_not_missed(tmp_path, clean):
    rig, partition = filled(tmp_path)
    rig.store.delete_records(partition, 25, lambda error: None)
    stop(rig, clean=clean)
    rig, reopened = opened(rig)
    assert (reopened.log_start, reopened.damaged, rig.store.damage_reports) == (25, [], 0)
    first = reopened.segments[0].path
    stop(rig, clean=clean)
    first.unlink()
    rig, reopened = opened(rig)
    assert (reopened.log_start, reopened.damaged) == (25, [(25, partition.segments[1].base_offset)])


@CLEAN_OR_KILLED
def test_retention_removes_what_stands_for_a_lost_segment(tmp_path, clean):
    rig, partition = filled(tmp_path, retention_ms="60000")
    stop(rig, clean=clean)
    partition.segments[1].path.unlink()
    rig, reopened = opened(rig)
    assert len(reopened.damaged) == 1
    rig.now_ms += 120_000
    rig.store.enforce_retention()
    rig.driver.flush()
    assert (reopened.log_start, reopened.damaged) == (60, [])


def test_what_compaction_removed_is_not_missed(tmp_path):
    """Nor by a start after a kill, whose checkpoint lists the segments as they were before."""
    rig = Rig(tmp_path)
    partition = rig.topic(cleanup_policy="compact", segment_bytes="1024", min_cleanable_dirty_ratio="0")
    for number in range(200):
        rig.write(partition, f"{number}" * 5, keys=[f"k{number % 5}"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    before = len(partition.segments)
    rig.store.compact()
    rig.driver.flush()
    expected = values(partition)
    assert len(partition.segments) < before
    for clean in (False, True, True):
        rig = rig.again(clean=clean)
        partition = rig.store.partition("t", 0)
        assert (partition.damaged, rig.store.damage_reports, values(partition)) == ([], 0, expected)


def test_a_segment_of_a_compacted_log_is_missed_after_a_clean_stop(tmp_path):
    """Offsets may be missing there; a file may not."""
    rig = Rig(tmp_path)
    partition = rig.topic(cleanup_policy="compact", segment_bytes="1024", min_cleanable_dirty_ratio="0")
    for number in range(400):
        rig.write(partition, f"{number}" * 5, keys=[f"k{number % 100}"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.store.compact()
    rig.driver.flush()
    stop(rig, clean=True)
    lost, following = partition.segments[1:3]
    assert lost.base_offset < partition.gaps_below
    assert lost.size
    lost.path.unlink()
    for _ in range(2):
        rig = Rig(tmp_path)
        reopened = rig.store.partition("t", 0)
        assert reopened.damaged == [(lost.base_offset, following.base_offset)]
        with pytest.raises(CorruptLog):
            reopened.read_blocking(lost.base_offset, 1)
        stop(rig, clean=True)


def test_compaction_stops_below_a_lost_segment(tmp_path):
    """It would take what is missing for a gap, and a peer's batches would not fit in any more."""
    rig = Rig(tmp_path)
    partition = rig.topic(cleanup_policy="compact", segment_bytes="1024", min_cleanable_dirty_ratio="0")
    for number in range(200):
        rig.write(partition, f"{number}" * 5, keys=[f"k{number % 5}"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    lost, following = partition.segments[4:6]
    lost.path.unlink()
    rig = Rig(tmp_path)
    partition = rig.store.partition("t", 0)
    kept = [segment.base_offset for segment in partition.segments[4:]]
    rig.store.compact()
    rig.driver.flush()
    assert partition.cleaned_until == lost.base_offset
    assert [segment.base_offset for segment in partition.segments[-len(kept) :]] == kept
    assert partition.damaged == [(lost.base_offset, following.base_offset)]


# ── the end of a log ─────────────────────────────────────────────────────────────────────────────────────────────────


@CLEAN_OR_KILLED
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.93, 0.999])
def test_no_acknowledged_offset_is_given_to_another_record(tmp_path, clean, kept):
    """The last file is shorter than the checkpoint knows."""
    rig = Rig(tmp_path)
    partition = rig.topic()
    for number in range(10):
        rig.write(partition, f"v{number}" * 10, producer_id=7, producer_epoch=0, base_sequence=number)
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    stop(rig, clean=clean)
    path = partition.segments[-1].path
    os.truncate(path, int(path.stat().st_size * kept))
    left = path.read_bytes()
    rig = Rig(tmp_path)
    reopened = rig.store.partition("t", 0)
    ((start, end),) = reopened.damaged
    assert (reopened.log_end, end) == (10, 10)
    assert start <= 10 * kept
    assert reopened.is_unclean
    assert rig.store.damage_reports == 1
    assert path.read_bytes() == left, "kept aside"
    retry = rig.append(reopened, "v9" * 10, producer_id=7, producer_epoch=0, base_sequence=9)
    assert retry.base_offset == 9, "it was acknowledged"
    assert rig.write(reopened, "next", producer_id=7, producer_epoch=0, base_sequence=10).base_offset == 10
    assert everything_but(reopened, start, end) == [f"v{n}" * 10 for n in range(start)] + ["next"]
    for clean_again in (False, True, True):
        rig = rig.again(clean=clean_again)
        reopened = rig.store.partition("t", 0)
        assert (reopened.log_end, reopened.damaged) == (11, [(start, end)])
        assert values(reopened, 10) == ["next"]


@CLEAN_OR_KILLED
def test_a_lost_end_is_remembered_although_nothing_was_written_since(tmp_path, clean):
    rig, partition = filled(tmp_path, count=5)
    stop(rig, clean=clean)
    os.truncate(partition.segments[-1].path, 0)
    for clean_again in (False, True, True):
        rig = Rig(tmp_path)
        assert (rig.store.partition("t", 0).log_end, rig.store.partition("t", 0).damaged) == (5, [(0, 5)])
        stop(rig, clean=clean_again)


def test_a_last_batch_that_has_rotted_is_kept_aside_if_it_was_acknowledged(tmp_path):
    rig = Rig(tmp_path, defaults=SEGMENTS)
    partition = rig.topic()
    for number in range(5):
        rig.write(partition, f"v{number}" * 10)
    rig.store.save_checkpoint(lambda error: None)
    rig.settle()
    path = partition.segments[-1].path
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    rig, reopened = opened(rig)
    assert (reopened.log_end, reopened.damaged) == (5, [(4, 5)])
    assert path.read_bytes() == data
    assert rig.write(reopened, "next").base_offset == 5
    assert everything_but(reopened, 4, 5) == [f"v{n}" * 10 for n in range(4)] + ["next"]


def test_records_that_only_a_lost_journal_had_are_damage(tmp_path):
    rig = Rig(tmp_path)
    partition = rig.topic()
    for number in range(5):
        rig.write(partition, f"v{number}" * 10)
    rig.store.save_checkpoint(lambda error: None)
    assert partition.segments[0].synced_size == 0, "only the journal has it"
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    os.truncate(partition.segments[0].path, 0)
    reopened = Rig(tmp_path).store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged, reopened.is_unclean) == (5, [(0, 5)], True)


@pytest.mark.parametrize("start", [0, 6, 8])
def test_what_the_journal_has_behind_lost_records_is_kept(tmp_path, start):
    """The segment lost what was synced; later records, in the journal alone, were acknowledged, too."""
    rig = Rig(tmp_path)
    partition = rig.topic()
    for number in range(6):
        rig.write(partition, f"v{number}" * 10)
    rig.settle()
    checkpoint = (tmp_path / "checkpoint.json").read_bytes()
    for number in range(6, 10):
        rig.write(partition, f"v{number}" * 10)
    if start:
        rig.store.delete_records(partition, start, lambda error: None)
    else:
        (tmp_path / "checkpoint.json").write_bytes(checkpoint)  # It does not know how far the log went.
    os.truncate(partition.segments[0].path, partition.segments[0].size // 10 * 3)
    for _ in range(2):
        reopened = Rig(tmp_path).store.partition("t", 0)
        assert (reopened.log_start, reopened.log_end) == (start, 10)
        assert reopened.is_unclean
        assert reopened.damaged == ([] if start else [(3, 6)])
        assert values(reopened, max(start, 6)) == [f"v{n}" * 10 for n in range(max(start, 6), 10)]


def test_a_topic_that_acknowledges_before_fsync_loses_only_what_was_not_synced(tmp_path):
    """It promises nothing after a power cut; but what a checkpoint knew to be synced must be there."""
    rig = Rig(tmp_path)
    partition = rig.topic(walstream_unsafe_ack_before_fsync="true")
    for number in range(5):
        rig.write(partition, f"v{number}" * 10)
    rig.settle()
    synced = partition.segments[0].size
    for number in range(5, 10):
        rig.write(partition, f"v{number}" * 10)
    rig.store.save_checkpoint(lambda error: None)
    os.truncate(partition.segments[0].path, synced)
    rig = Rig(tmp_path)
    reopened = rig.store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged, rig.store.damage_reports) == (5, [], 0)
    os.truncate(partition.segments[0].path, synced // 2)
    reopened = Rig(tmp_path).store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged) == (5, [(2, 5)])


@pytest.mark.parametrize("is_safe_last", [False, True])
def test_a_change_of_the_setting_keeps_what_was_acknowledged_after_fsync(is_safe_last):
    """One flush may hold writes of both settings; what one of them promises does not depend on the order."""
    unsafe = {"walstream.unsafe.ack.before.fsync": "true"}
    for seed in range(10):
        rig = PowerRig(SimDisk(Random(seed)), replicated=False)
        partition = rig.topic()
        rig.write(partition, "first")
        rig.settle()
        for text in ("unsafe", "safe") if is_safe_last else ("safe", "unsafe"):
            rig.store.configure_topic("t", unsafe if text == "unsafe" else {})
            acknowledged = outcome(partition, rig.append(partition, text).last_offset)
        rig.driver.flush()
        assert acknowledged == [None]
        rig.disk.crash()
        assert "safe" in values(rig.again().store.partition("t", 0)), seed


# ── a log that other nodes have ──────────────────────────────────────────────────────────────────────────────────────


def follower(segment_bytes=1 << 20, **config):
    rig = PowerRig(SimDisk(Random(1)), defaults=TopicSettings(segment_bytes=segment_bytes))
    partition = rig.topic(**config)
    rig.follow(partition, 1)
    return rig, partition


def lose_end(rig, partition, size):
    rig.disk.open(partition.segments[-1].path).truncate(size)


@CLEAN_OR_KILLED
def test_a_replica_reports_the_end_it_lost_and_waits_for_it_to_be_copied_again(clean):
    rig, partition = follower()
    for number in range(10):
        rig.receive(partition, 1, f"v{number}" * 10)
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    stop(rig, clean=clean)
    lose_end(rig, partition, partition.segments[-1].size // 2)
    rig = rig.again()
    reopened = rig.store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged, reopened.is_unclean) == (5, [], True)
    assert rig.store.damage_reports == 1
    rig.follow(reopened, 2)
    rig.receive(reopened, 2, "again")
    rig.driver.flush()
    assert len(contents(reopened)) == 6


def test_the_only_replica_of_a_cluster_gives_no_acknowledged_offset_to_another_record():
    rig = PowerRig(SimDisk(Random(1)))
    rig.store.create_topics([NewTopic("t", 1, {}, (1,))])
    partition = rig.store.partition("t", 0)
    partition.become_leader(1, lambda error: None)
    for number in range(3):
        rig.write(partition, f"{number}" * 10)
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    lose_end(rig, partition, 0)
    reopened = rig.again().store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged, reopened.is_unclean) == (3, [(0, 3)], True)


def test_a_first_segment_that_is_gone_is_put_back_from_another_replica():
    """Its log starts in the middle of a batch; the batch comes back as a whole."""
    rig, source = follower(400)
    other, copy = follower(400)
    for log, store in ((source, rig), (copy, other)):
        for number in range(12):
            data = batch(*(f"{number:040d}" for _ in range(3)), now_ms=rig.now_ms)
            stamp(data, log.log_end, 1)
            log.append_replicated([memoryview(data)], offset=log.log_end)
        store.settle()
        log.advance_high_watermark(log.log_end)
        store.store.delete_records(log, 4, lambda error: None)
    other.disk.remove(copy.segments[0].path)
    other = other.again()
    copy = other.store.partition("t", 0)
    ((start, end),) = copy.damaged
    assert (start, copy.log_start) == (4, 4)
    other.follow(copy, 1)
    while copy.damaged:
        heard = []
        copy.repair(copy.damaged[0][0], source.read_for_repair(*copy.damaged[0], 10_000).buffers, heard.append)
        other.driver.flush()
        assert heard == [None]
    expected = bytes(b"".join(source.read_replica_blocking(4, 1 << 20).buffers))
    assert bytes(b"".join(copy.read_replica_blocking(4, 1 << 20).buffers)) == expected
    again = other.again().store.partition("t", 0)
    assert again.damaged == []
    assert bytes(b"".join(again.read_replica_blocking(4, 1 << 20).buffers)) == expected
    assert end == again.segments[1].base_offset


def test_the_journal_restores_batches_of_a_compacted_log_behind_gaps():
    """What a leader's compaction left is sent with gaps; none of it was in the segments when the power went."""
    rig, partition = follower(cleanup_policy="compact")
    for number in range(4):
        data = batch(f"{number}", keys=[f"k{number}"], now_ms=rig.now_ms)
        stamp(data, number * 5, 1)
        partition.append_replicated([memoryview(data)], offset=partition.log_end)
        rig.driver.flush()
    assert partition.segments[0].synced_size == 0, "only the journal has it"
    rig.disk.open(partition.segments[0].path).truncate(0)
    rig = rig.again()
    reopened = rig.store.partition("t", 0)
    assert (reopened.log_end, reopened.damaged, reopened.is_unclean) == (16, [], False)
    assert rig.store.damage_reports == 0


def with_gaps(policy):
    """Return a follower whose leader has sent a log with gaps; only the journal has it durably."""
    rig, partition = follower(cleanup_policy=policy)
    for number in range(1, 5):
        data = batch(f"{number}", keys=[f"k{number}"], now_ms=rig.now_ms)
        stamp(data, number * 5, 1)
        for _ in range(2):
            with suppress(PartitionOffline):  # It notes first that gaps may follow.
                partition.append_replicated([memoryview(data)], offset=partition.log_end, may_have_gaps=True)
                break
        rig.driver.flush()
    assert partition.log_end == 21
    assert partition.segments[0].synced_size == 0
    return rig, partition


@pytest.mark.parametrize("policy", ["compact", "delete"])
@pytest.mark.parametrize("torn", [1, 2, 4], ids=lambda count: f"{count} of 4")
def test_the_journal_restores_the_torn_beginning_of_a_log_with_gaps(policy, torn):
    """The power went before the segment was synced: sectors of its first batches are missing, the last ones are there.

    Also where the topic is not compacted any more.
    """
    rig, partition = with_gaps(policy)
    end = list(partition.segments[0].headers())[torn - 1]
    rig.disk.open(partition.segments[0].path).pwritev([bytes(end[0] + end[1].length)], 0)
    rig = rig.again()
    reopened = rig.store.partition("t", 0)
    assert [base for base, _, _ in contents_of(reopened)] == [5, 10, 15, 20]
    assert (reopened.log_end, reopened.damaged, reopened.is_unclean) == (21, [], False)


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_the_journal_restores_a_log_with_gaps_of_which_nothing_was_written(policy):
    rig, partition = with_gaps(policy)
    rig.disk.open(partition.segments[0].path).truncate(0)
    rig = rig.again()
    reopened = rig.store.partition("t", 0)
    assert [base for base, _, _ in contents_of(reopened)] == [5, 10, 15, 20]
    assert (reopened.log_end, reopened.damaged, reopened.is_unclean) == (21, [], False)


def contents_of(partition):
    """Return what `contents` does, of a log with gaps."""
    offset, found = partition.log_start, []
    while offset < partition.durable_end:
        chunk = partition.read_replica_blocking(offset, 1)
        assert chunk.size, offset
        header = parse_header(chunk.buffers[0])
        found.append((header.base_offset, header.leader_epoch, header.crc))
        offset = chunk.next_offset
    return found


def test_a_gap_in_front_of_damage_ends_in_an_error():
    """A reader that is sent nothing there would ask for the same offset for ever."""
    _, partition = with_gaps("compact")
    partition.advance_high_watermark(21)
    partition.note_damage(15, 20, CorruptLog("a segment is missing"))
    for offset in range(11, 20):
        with pytest.raises(CorruptLog) as refused:
            partition.read_blocking(offset, 1)
        assert refused.value.offsets == (15, 20)
        with pytest.raises(CorruptLog):
            partition.read_replica_blocking(offset, 1)
    assert parse_header(partition.read_blocking(6, 1)).base_offset == 10
    assert parse_header(partition.read_blocking(20, 1)).base_offset == 20


def test_a_log_that_could_not_be_opened_is_not_compared_with_sizes_from_before_compaction(tmp_path):
    """The checkpoint lists the segments as they were before a round, which may be finished by the start that fails."""
    rig = Rig(tmp_path, defaults=SEGMENTS)
    partition = rig.topic(cleanup_policy="compact", min_cleanable_dirty_ratio="0.0")
    for number in range(60):
        rig.write(partition, "v" * 40, keys=[f"k{number % 3}"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    rig.store.compact()
    assert partition.gaps_below > 0
    rig.disk.faults["pread", ".log"] = errno.EIO
    rig = rig.again(defaults=SEGMENTS)
    assert rig.store.partition("t", 0).failure is not None
    rig.disk.faults.clear()
    rig = rig.again(clean=True, defaults=SEGMENTS)
    reopened = rig.store.partition("t", 0)
    assert (reopened.failure, reopened.damaged, reopened.log_end) == (None, [], 60)


def test_a_partition_that_returns_from_a_full_disk_keeps_files_below_a_start_that_is_not_durable():
    """DeleteRecords was answered with an error; after a power cut the log begins where it did, and nothing is lost."""
    for seed in range(8):
        rig = PowerRig(SimDisk(Random(seed)), replicated=False, defaults=TopicSettings(segment_bytes=300))
        partition = rig.topic()
        for number in range(20):
            rig.write(partition, f"v{number:02d}" * 10)
        rig.settle()
        rig.store.save_checkpoint(lambda error: None)
        heard = []
        rig.disk.is_full, rig.disk.has_reserve = True, False
        rig.write(partition, "refused" * 10)
        rig.store.delete_records(partition, 12, heard.append)
        assert isinstance(heard[0], Exception)
        rig.disk.is_full = False
        rig.store.tick()
        rig.driver.flush()
        assert (partition.write_error, partition.log_start) == (None, 12)
        rig.disk.crash()
        reopened = rig.again().store.partition("t", 0)
        assert (reopened.damaged, reopened.is_unclean, reopened.log_end) == ([], False, 20)


def test_the_lost_end_of_a_compacted_log_is_no_gap_before_what_the_journal_has():
    """One sync failed, so the journal is kept; then the file, known to the checkpoint as synced, loses its end."""
    rig = PowerRig(SimDisk(Random(1)), replicated=False)
    partition = rig.topic(cleanup_policy="compact")
    for number in range(3):
        rig.write(partition, f"{number}", keys=[f"k{number}"])
    rig.settle()
    rig.write(partition, "3", keys=["k3"])
    rig.store.save_checkpoint(lambda error: None)
    rig.disk.open(partition.segments[0].path).truncate(0)
    rig = rig.again()
    reopened = rig.store.partition("t", 0)
    assert (reopened.damaged, reopened.log_end, reopened.is_unclean) == ([(0, 3)], 4, True)
    assert rig.store.damage_reports
