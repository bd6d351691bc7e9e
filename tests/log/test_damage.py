"""Rot, lost files and failed syncs: what is damaged hides nothing else, and what the journal holds is not let go of."""

from __future__ import annotations

import errno
import os

import pytest

from log.rig import FaultyDisk, Rig, batch, values
from walstream.errors import CorruptLog, DiskFull, PartitionOffline, SyncFailed, WalstreamError
from walstream.log import scrub
from walstream.log.batch import HEADER_BYTES, stamp, walk
from walstream.log.records import iter_records

COUNT = 10


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path)


def fill(rig, partition, count=COUNT, size=100, **fields):
    for number in range(count):
        rig.append(partition, f"{number:0{size}d}", **fields)
    rig.driver.flush()


def batch_bytes(partition):
    return partition.segments[0].path.stat().st_size // COUNT


def flip(path, position, mask):
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def readable(partition):
    """Return every record that can be read, asking for each offset by itself; fails where another one is served."""
    found = []
    for offset in range(partition.log_start, partition.high_watermark):
        try:
            data = partition.read_blocking(offset, 1)
        except CorruptLog:
            continue
        (record,) = iter_records(data)
        assert record.offset == offset
        found.append(int(record.value))
    return found


@pytest.mark.parametrize("first", [1, 4, COUNT - 1])
def test_a_read_ends_before_what_is_known_to_be_damaged(tmp_path, first):
    """Also where the bytes look sound: no checksum covers the leader epoch."""
    rig = Rig(tmp_path)
    partition = rig.topic()
    fill(rig, partition)
    partition.note_damage(first, first + 1, CorruptLog("wrong epoch"))
    for read in (partition.read_blocking, partition.read_cached):
        data = read(0, 1 << 20)
        assert [header.base_offset for _, header in walk(data)] == list(range(first))
        with pytest.raises(CorruptLog):
            read(first, 1 << 20)
    assert readable(partition) == [number for number in range(COUNT) if number != first]


HEADER_FLIPS = [(position, mask) for position in range(HEADER_BYTES) for mask in (0x01, 0x08, 0x40, 0x80)]
QUICK = {"journal_prepared_bytes": 16_384}


@pytest.mark.parametrize("victim", [0, 4, COUNT - 2])
def test_a_flipped_bit_in_a_header_hides_only_its_batch_from_recovery(tmp_path, victim):
    for position, mask in HEADER_FLIPS[victim % 4 :: 3]:
        rig = Rig(tmp_path / f"{position}-{mask}", **QUICK)
        partition = rig.topic()
        fill(rig, partition)
        rig.settle()
        if (position, mask, victim) == (15, 0x01, 0):
            continue  # The first batch of a new log has epoch 0 then, and nothing is known that contradicts it.
        flip(partition.segments[0].path, victim * batch_bytes(partition) + position, mask)
        reopened = rig.again(**QUICK).store.partition("t", 0)
        others = [number for number in range(COUNT) if number != victim]
        assert reopened.log_end == COUNT, (position, mask)
        assert readable(reopened) == others, (position, mask)
        assert reopened.damaged == [(victim, victim + 1)], (position, mask)


@pytest.mark.parametrize("victim", [0, 4, COUNT - 1])
def test_a_flipped_bit_in_a_header_hides_only_its_batch_from_readers(rig, victim):
    partition = rig.topic()
    fill(rig, partition)
    path = partition.segments[0].path
    for position, mask in HEADER_FLIPS:
        partition.damaged.clear()
        flip(path, victim * batch_bytes(partition) + position, mask)
        served = readable(partition)
        others = [number for number in range(COUNT) if number != victim]
        # The leader epoch (12 to 16) is the one field that a reader has no use for.
        assert served in ([others, list(range(COUNT))] if 12 <= position < 16 else [others]), (position, mask)
        flip(path, victim * batch_bytes(partition) + position, mask)


@pytest.mark.parametrize("position", [0, 3, 7, 12, 13, 15])
def test_the_last_batch_is_not_cut_because_it_says_that_it_belongs_elsewhere(rig, position):
    """A torn write does not match its CRC: this one was whole, so somebody may have been told of it."""
    partition = rig.topic()
    fill(rig, partition)
    rig.settle()
    path = partition.segments[0].path
    flip(path, (COUNT - 1) * batch_bytes(partition) + position, 0x40)
    data = path.read_bytes()
    reopened = rig.again().store.partition("t", 0)
    assert reopened.damaged == [(COUNT - 1, COUNT)]
    assert reopened.log_end == COUNT
    assert path.read_bytes() == data


@pytest.mark.parametrize("position", [0, 2, 5, 7])
def test_in_a_compacted_log_a_batch_that_lies_about_its_offset_is_found_out(tmp_path, position):
    rig = Rig(tmp_path)
    partition = rig.topic(cleanup_policy="compact")
    for number in range(COUNT):
        rig.write(partition, f"{number:0100d}", keys=[f"{number}"])
    rig.settle()
    flip(partition.segments[0].path, 4 * batch_bytes(partition) + position, 0x10)
    assert readable(partition) == [number for number in range(COUNT) if number != 4]
    reopened = rig.again().store.partition("t", 0)
    assert reopened.log_end == COUNT
    assert readable(reopened) == [number for number in range(COUNT) if number != 4]
    assert reopened.damaged == [(4, 5)]


@pytest.mark.parametrize("mask", [0x20, 0x80])
def test_the_last_batch_of_a_compacted_segment_cannot_claim_offsets_of_later_ones(rig, mask):
    """No batch after it in its file contradicts it, and a reader that believed it would skip to where it claims."""
    partition = rig.topic(cleanup_policy="compact", segment_bytes="1024", min_cleanable_dirty_ratio="0")
    for number in range(200):
        if number == 60:
            rig.settle()
            rig.store.save_checkpoint(lambda error: None)
            rig.store.compact()
        rig.write(partition, f"{number}", keys=[f"{number}"])
    segment = partition.segments[1]
    position, header = list(segment.headers())[-1]
    victim = header.base_offset
    assert partition.gaps_below > victim
    flip(segment.path, position + 7, mask)
    segment.release()
    assert readable(partition) == [number for number in range(200) if number != victim]
    assert partition.damaged == [(victim, victim + 1)]
    assert values(partition, victim + 1) == [str(number) for number in range(victim + 1, 200)]


def test_a_batch_inside_a_record_is_not_taken_for_one(rig):
    """Somebody keeps batches as values. When the batch around one is damaged, the inner one is not the next."""
    partition = rig.topic()
    fill(rig, partition, 3)
    inner = batch("nobody's")
    inner[7] = 4  # As if it stood at offset 4.
    rig.write(partition, "x" * 50 + bytes(inner).decode("latin-1") + "y" * 50)
    rig.write(partition, "after")
    rig.settle()
    path = partition.segments[0].path
    at = path.read_bytes().index(b"x" * 50)
    flip(path, at, 0x01)
    reopened = rig.again().store.partition("t", 0)
    assert reopened.damaged == [(3, 4)]
    assert values(reopened, 4) == ["after"]


def test_rot_below_the_logs_start_hides_nothing_above_it(tmp_path):
    for position, mask in HEADER_FLIPS[::7]:
        rig = Rig(tmp_path / f"{position}-{mask}", **QUICK)
        partition = rig.topic()
        fill(rig, partition)
        rig.settle()
        rig.store.delete_records(partition, 5, lambda error: None)
        flip(partition.segments[0].path, 3 * batch_bytes(partition) + position, mask)
        assert readable(partition) == list(range(5, COUNT))
        reopened = rig.again().store.partition("t", 0)
        assert (reopened.log_start, reopened.log_end) == (5, COUNT)
        assert readable(reopened) == list(range(5, COUNT)), (position, mask)
        assert reopened.damaged == []


def test_compaction_does_not_drop_what_follows_damage(rig):
    partition = rig.topic(cleanup_policy="compact", segment_bytes="2048")
    for number in range(60):
        rig.write(partition, f"{number:0100d}", keys=[f"{number % 50}"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    path = partition.segments[0].path
    size = len(bytes(partition.read_blocking(0, 1)))
    flip(path, 2 * size + 8, 0x80)  # The length of an early batch: no batch can begin there any more.
    before = [path.read_bytes() for path in sorted(partition.folder.glob("*.log"))]
    rig.store.compact()
    assert [path.read_bytes() for path in sorted(partition.folder.glob("*.log"))] == before


def compactable(rig, name="t", count=60):
    """Return a partition of which all segments but the last can be compacted, and the last value of every key."""
    partition = rig.topic(name, cleanup_policy="compact", segment_bytes="1024", min_cleanable_dirty_ratio="0")
    for number in range(count):
        rig.write(partition, f"{number}", keys=[f"{number % 3}"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    return partition


@pytest.mark.parametrize("mask", [0x20, 0x80])
def test_compaction_believes_no_offset_beyond_its_segment(rig, mask):
    """A flipped bit made the first segment's last record the newest of its key, and every later one of them went."""
    partition = compactable(rig)
    segment = partition.segments[0]
    position, header = list(segment.headers())[-1]
    flip(segment.path, position + 7, mask)
    segment.release()
    rig.store.compact()
    assert partition.damaged == [(header.base_offset, header.base_offset + 1)]
    assert partition.gaps_below == 0
    assert values(partition, 57) == ["57", "58", "59"]


def test_compaction_takes_no_missing_end_of_a_segment_for_a_gap(rig):
    partition = compactable(rig)
    segment = partition.segments[0]
    position, header = list(segment.headers())[-1]
    os.truncate(segment.path, position)
    segment.release()
    rig.store.compact()
    assert partition.damaged == [(header.base_offset, header.base_offset + 1)]
    assert partition.gaps_below == 0


def test_damage_that_compaction_meets_stops_it_there_and_nowhere_else(rig):
    """Nothing but compaction may ever read it: it is noted, and the next rounds work below it, and on other logs."""
    damaged, other = compactable(rig, "damaged"), compactable(rig, "other")
    segment = damaged.segments[2]
    flip(segment.path, HEADER_BYTES, 0x01)
    segment.release()
    for _ in range(3):
        rig.store.compact()
    assert damaged.damaged == [(segment.base_offset, segment.base_offset + 1)]
    assert 0 < damaged.gaps_below <= segment.base_offset
    assert other.gaps_below > 0


def test_the_search_for_damage_ends_when_the_round_is_given_up(rig, monkeypatch):
    """Otherwise a node that stops would read a whole partition first."""
    partition = rig.topic(cleanup_policy="compact", segment_bytes="1048576", min_cleanable_dirty_ratio="0")
    for number in range(6):
        rig.write(partition, f"{number}" * 600_000, keys=["k"])
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    flip(partition.segments[-2].path, HEADER_BYTES, 0x01)
    places = []

    def check(partitions, place, bytes_max):
        places.append(place)
        rig.store._rounds.stop()
        return real(partitions, place, bytes_max)

    real = scrub.check
    monkeypatch.setattr(scrub, "check", check)
    rig.store.compact()
    assert len(places) == 1


@pytest.mark.parametrize("hold", ["-1", "0"])
def test_a_log_that_cannot_be_read_keeps_no_other_from_compaction(rig, hold):
    unreadable, other = compactable(rig, "unreadable"), compactable(rig, "other")
    config = rig.catalogue.topic("unreadable").config
    rig.store.configure_topic("unreadable", {**config, "walstream.hold.from.ms": hold})
    lose_indexes(rig, unreadable)
    for _ in range(2):
        rig.store.compact()
    assert other.gaps_below > 0


def lose_indexes(rig, partition):
    """Let nothing of a partition be read, neither its segments nor their indexes."""
    for segment in partition.segments:
        segment.release()
    for call in ("read", "pread"):
        rig.disk.faults[call, str(partition.folder)] = errno.EIO


def test_a_log_that_cannot_be_read_keeps_no_other_from_retention(rig):
    logs = [rig.topic(name, segment_bytes="1024", retention_ms="1000") for name in ("unreadable", "other")]
    for partition in logs:
        fill(rig, partition, 30)
    lose_indexes(rig, logs[0])
    rig.now_ms += 60_000
    rig.store.tick()
    assert [partition.log_start for partition in logs] == [0, 30]
    rig.disk.faults.clear()
    rig.now_ms += 60_000
    rig.store.tick()
    assert [partition.log_start for partition in logs] == [30, 30]


@pytest.mark.parametrize("clean", [True, False])
def test_an_index_that_cannot_be_read_is_made_again(tmp_path, clean):
    rig = Rig(tmp_path)
    partition = rig.topic(segment_bytes="1024", message_timestamp_type="LogAppendTime")
    fill(rig, partition, 30)
    if clean:
        rig.store.close()
        rig.store.mark_clean()
    rig.disk.faults["read", ".index"] = errno.EIO
    reopened = Rig(tmp_path, rig.disk).store.partition("t", 0)
    assert (reopened.failure, reopened.damaged) == (None, [])
    assert len(values(reopened)) == 30


def test_an_older_snapshot_of_producers_serves_where_one_cannot_be_read(tmp_path):
    rig = Rig(tmp_path, replicated=True)
    partition = rig.topic(segment_bytes="1024")
    partition.become_follower(1, lambda error: None)
    for number in range(30):
        data = batch("x" * 100, producer_id=7, producer_epoch=0, base_sequence=number)
        stamp(data, number, 1)
        partition.append_replicated([memoryview(data)], offset=number)
        rig.driver.flush()
    number = partition.segments[-1].base_offset
    rig.disk.faults["read", f"{number:020d}.producers"] = errno.EIO
    heard = []
    partition.truncate(29, heard.append)
    rig.driver.flush()
    assert heard == [None]
    assert partition.producers.last_offsets(29) == {7: 28}


def test_records_are_found_by_time_beyond_damage(rig):
    partition = rig.topic()
    start = rig.now_ms
    for number in range(COUNT):
        rig.now_ms = start + number * 10
        rig.write(partition, f"{number:0100d}")
    rig = rig.again(clean=True)
    path = partition.segments[0].path
    flip(path, 2 * batch_bytes(partition) + 9, 0x01)
    path.with_suffix(".index").unlink()
    rig = rig.again(clean=True)
    partition = rig.store.partition("t", 0)
    assert partition.offset_for_time(start + 55) == (6, start + 60)
    assert partition.max_timestamp() == (9, start + 90)


# ── files that a power cut took, and the journal ─────────────────────────────────────────────────────────────────────


def journaled(rig, count=40):
    """Fill a log over several segments, with everything in the journal and no segment synced."""
    partition = rig.topic(segment_bytes="1024")
    for number in range(count):
        rig.write(partition, f"{number:0100d}")
    assert len(partition.segments) > 4
    assert all(segment.synced_size == 0 for segment in partition.segments)
    return partition


@pytest.mark.parametrize("number", [0, 1, 2, -1])
@pytest.mark.parametrize("kept", [None, 0, 0.5, 0.99])
def test_the_journal_puts_any_segment_back(rig, number, kept):
    partition = journaled(rig)
    path = partition.segments[number].path
    data = path.read_bytes()
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(data[: int(len(data) * kept)])
    reopened = rig.again().store.partition("t", 0)
    assert reopened.damaged == []
    assert [int(value) for value in values(reopened)] == list(range(40))


def test_the_journal_puts_back_segments_that_are_gone_in_a_row(rig):
    partition = journaled(rig)
    for segment in partition.segments[1:4]:
        segment.path.unlink()
    reopened = rig.again().store.partition("t", 0)
    assert reopened.damaged == []
    assert [int(value) for value in values(reopened)] == list(range(40))


def test_a_segment_that_nothing_holds_is_reported_once_and_those_around_it_are_read(rig):
    partition = rig.topic(segment_bytes="1024")
    fill(rig, partition, 40)
    rig.settle()
    first, end = partition.segments[2].base_offset, partition.segments[3].base_offset
    partition.segments[2].path.unlink()
    reopened = rig.again().store.partition("t", 0)
    assert reopened.log_end == 40
    assert reopened.damaged == [(first, end)]
    assert [int(value) for value in values(reopened, end)] == list(range(end, 40))


@pytest.mark.parametrize("content", [b"", bytes(300), b"\x02" * 100], ids=["empty", "zeros", "garbage"])
@pytest.mark.parametrize("base", [10, 12, 500])
def test_a_file_that_a_torn_flush_began_is_removed(rig, content, base):
    partition = rig.topic()
    fill(rig, partition)
    path = partition.folder / f"{base:020d}.log"
    path.write_bytes(content)
    again = rig.again()
    reopened = again.store.partition("t", 0)
    assert reopened.damaged == []
    assert reopened.log_end == COUNT
    assert again.write(reopened, "10").base_offset == COUNT
    assert readable(again.again().store.partition("t", 0)) == list(range(COUNT + 1))


# ── syncs that fail ──────────────────────────────────────────────────────────────────────────────────────────────────


def lose(partition):
    """Make of a file what a disk may make of pages whose sync failed."""
    for segment in partition.segments:
        segment.path.write_bytes(b"")


def test_later_rounds_do_not_drop_a_journal_file_that_was_kept(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition, other = rig.topic("t"), rig.topic("other")
    rig.write(partition, "acknowledged")
    disk.faults["sync", "/t@"] = errno.EIO
    rig.settle()
    disk.faults.clear()
    for number in range(5):
        rig.write(other, f"{number}")
        rig.settle()
    lose(partition)
    again = rig.again()
    assert values(again.store.partition("t", 0)) == ["acknowledged"]
    assert values(again.store.partition("other", 0)) == ["0", "1", "2", "3", "4"]
    assert len(rig.disk.list(rig.folder / "journal")) == 2  # Everything is in its place again.


def test_a_clean_stop_does_not_hide_what_only_the_journal_has(tmp_path):
    """The file may end just where the checkpoint says: pages whose sync failed need not be in it."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = rig.topic("t")
    rig.write(partition, "synced")
    rig.settle()
    rig.write(partition, "acknowledged")  # In the journal.
    disk.faults["sync", "/t@"] = errno.EIO
    rig.settle()
    disk.faults.clear()
    rig.store.close()
    rig.store.mark_clean()
    lose_tail(partition)
    assert values(rig.again().store.partition("t", 0)) == ["synced", "acknowledged"]


def test_a_sync_that_failed_outside_the_journal_is_not_forgotten_by_it(tmp_path):
    """The kernel reports a failed sync once: a later one of the same file returns as if all were well."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition, other = rig.topic("t"), rig.topic("other")
    rig.write(partition, "acknowledged")  # In the journal.
    disk.faults["sync", "/t@"] = errno.EIO
    rig.append(partition, "x" * 100_000)  # Too large for it.
    rig.driver.flush()
    disk.faults.clear()
    with pytest.raises(SyncFailed):
        rig.append(partition, "more")
    rig.write(other, "fine")
    rig.settle()
    lose(partition)
    assert values(rig.again().store.partition("t", 0)) == ["acknowledged"]


def full(rig, disk, partition):
    """Let a partition with a record in the journal meet a full disk; there is space again at once."""
    rig.write(partition, "acknowledged")
    disk.faults["write", "/t@"] = errno.ENOSPC
    rig.write(partition, "x")
    disk.faults.clear()
    assert isinstance(partition.write_error, DiskFull)


def come_back(rig):
    rig.store.tick()
    rig.driver.flush()


def fail_to_come_back(rig, disk, partition):
    """Let a sync fail on the way back from a full disk, and what was not synced be lost after settling."""
    full(rig, disk, partition)
    disk.faults["sync", "/t@"] = errno.EIO
    come_back(rig)
    assert partition.write_error is not None
    disk.faults.clear()
    rig.settle()
    lose(partition)


def test_a_sync_that_failed_on_the_way_back_from_a_full_disk_is_not_forgotten_by_the_journal(tmp_path):
    """Recovery opens the files anew: without that, settling would be told that all is well, and drop the journal."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = rig.topic("t")
    fail_to_come_back(rig, disk, partition)
    assert values(rig.again().store.partition("t", 0)) == ["acknowledged"]


def test_a_way_back_from_a_full_disk_that_failed_is_tried_again(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = rig.topic("t")
    fail_to_come_back(rig, disk, partition)
    come_back(rig)
    rig.write(partition, "more")
    rig.settle()
    assert values(partition) == ["acknowledged", "more"]
    assert values(rig.again().store.partition("t", 0)) == ["acknowledged", "more"]


def test_nobody_comes_back_from_a_full_disk_while_the_same_files_are_being_synced(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    commit, partition = rig.store.commit, rig.topic("t")
    full(rig, disk, partition)
    commit.ask_settling()
    assert commit.begin_settling()
    come_back(rig)
    assert partition.write_error is not None
    commit.complete_settling(commit.settle())
    come_back(rig)
    assert partition.write_error is None


def test_who_came_back_from_a_full_disk_has_nothing_synced_by_way_of_old_files(tmp_path):
    """An error told to one who does not use the file any more would not be told to who does."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = rig.topic("t")
    full(rig, disk, partition)
    come_back(rig)
    disk.syncs.clear()
    rig.settle()
    assert disk.syncs == []
    assert values(partition) == ["acknowledged"]


def test_segments_go_on_being_synced_when_there_was_no_space_for_the_next_journal_file(tmp_path):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition, other, cut = rig.topic("t"), rig.topic("other"), rig.topic("cut")
    rig.write(partition, "acknowledged")
    rig.write(cut, "0")
    disk.faults["sync", "/t@"] = errno.EIO
    rig.settle()  # This journal file is kept, and so are later ones that forget something it holds.
    disk.faults.clear()
    rig.store.forget(cut.key)  # As truncating it does.
    rig.write(other, "a")
    disk.faults["write", "spare"] = errno.ENOSPC
    rig.settle()
    disk.faults.clear()
    rig.write(other, "b")
    rig.settle()
    segment = other.segments[-1]
    assert segment.synced_size == segment.size
    lose(partition)
    again = rig.again()
    assert values(again.store.partition("t", 0)) == ["acknowledged"]
    assert values(again.store.partition("other", 0)) == ["a", "b"]


class Unreadable(FaultyDisk):
    """A disk on which some files cannot be opened."""

    refused = ""

    def open(self, path, *, create=False):
        if self.refused and self.refused in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return super().open(path, create=create)


def test_a_partition_that_cannot_be_opened_loses_nothing_by_it(tmp_path):
    disk = Unreadable()
    rig = Rig(tmp_path, disk)
    partition, other = rig.topic("t", segment_bytes="1024"), rig.topic("other")
    fill(rig, partition, 40)
    rig.settle()
    fill(rig, partition, 3)  # In the journal alone.
    rig.write(other, "a")
    disk.refused = "/t@"
    for number in range(3):
        rig = rig.again(clean=number == 1)
        failed = rig.store.partition("t", 0)
        for attempt in (lambda: rig.append(failed, "x"), lambda: failed.read_blocking(0, 1000)):  # noqa: B023
            with pytest.raises(WalstreamError, match="Input/output"):
                attempt()
        rig.write(rig.store.partition("other", 0), f"{number}")
        rig.store.save_checkpoint(lambda error: None)
        rig.now_ms += 3_600_000
        rig.store.tick()
        rig.driver.flush()
    lose_tail(partition)
    disk.refused = ""
    again = rig.again()
    assert [int(value) for value in values(again.store.partition("t", 0))] == [*range(40), 0, 1, 2]
    assert values(again.store.partition("other", 0)) == ["a", "0", "1", "2"]


def test_a_partition_that_could_not_be_opened_stays_unclean_until_it_is_healed(tmp_path):
    """What is there when it opens again may be an older copy, and the checkpoint is from before its last records."""
    disk = Unreadable()
    rig = Rig(tmp_path, disk, replicated=True)
    partition = rig.topic()
    partition.become_leader(1, lambda error: None)
    rig.write(partition, "a")
    assert not partition.is_unclean
    disk.refused = "/t@"
    rig = rig.again(replicated=True)
    assert rig.store.partition("t", 0).is_unclean
    disk.refused = ""
    for clean in (False, True, False):
        rig = rig.again(clean=clean, replicated=True)
        partition = rig.store.partition("t", 0)
        assert partition.failure is None
        assert partition.is_unclean
    partition.is_unclean = False
    rig = rig.again(clean=True, replicated=True)
    assert not rig.store.partition("t", 0).is_unclean


def lose_tail(partition):
    """Lose what was never synced: the end of the last segment."""
    segment = partition.segments[-1]
    data = segment.path.read_bytes()
    segment.path.write_bytes(data[: segment.synced_size])


def test_a_vanished_segment_stays_vanished_only_until_it_is_put_back(rig):
    partition = rig.topic()
    fill(rig, partition)
    rig = rig.again(clean=True)
    path = partition.segments[0].path
    path.rename(path.with_suffix(".away"))
    for _ in range(2):
        rig = rig.again(clean=True)
        with pytest.raises(WalstreamError, match="is gone"):
            rig.append(rig.store.partition("t", 0), "x")
    path.with_suffix(".away").rename(path)
    assert readable(rig.again().store.partition("t", 0)) == list(range(COUNT))


class Told:
    """Who replicates the log hears here whether it takes writes."""

    def __init__(self):
        self.heard = []

    def went_offline(self, error):
        self.heard.append(type(error))

    def awaited(self): ...

    became_durable = came_back = found_damage = awaited


def received(rig, disk, fault):
    """Return a follower's log with a batch on its way to a disk that will refuse it, and who hears of that."""
    partition = rig.topic("t")
    partition.become_follower(3, lambda _: None)
    rig.driver.flush()
    data = batch("x")
    stamp(data, 0, 3)
    partition.listener = told = Told()
    partition.append_replicated([memoryview(data)], offset=0)
    disk.faults[fault] = errno.EIO
    return partition, told


def test_a_write_that_fails_before_the_log_begins_anew_goes_with_the_rest(tmp_path):
    """Who was told that the log takes no writes would never hear that it does again."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk, replicated=True)
    partition, told = received(rig, disk, ("write", ".log"))
    heard = []
    partition.reset(7, heard.append)
    rig.driver.flush()
    assert (heard, told.heard) == ([None], [])
    assert rig.store.write_failures == 1, "it is counted all the same"
    disk.faults.clear()
    data = batch("y")
    stamp(data, 7, 3)
    partition.append_replicated([memoryview(data)], offset=7)
    rig.driver.flush()
    assert partition.durable_end == 8


def test_a_log_that_could_not_begin_anew_takes_no_writes(tmp_path, monkeypatch):
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk, replicated=True)
    partition, told = received(rig, disk, ("write", ".log"))
    write = disk.write

    def refuse(path, data, *, durable):
        if path.name == "cut.json":
            raise OSError(errno.EIO, "Input/output error")
        write(path, data, durable=durable)

    monkeypatch.setattr(disk, "write", refuse)
    heard = []
    partition.reset(7, heard.append)
    rig.driver.flush()
    assert [type(error) for error in heard] == [PartitionOffline]
    assert told.heard == [PartitionOffline]
    assert partition.write_error is not None
