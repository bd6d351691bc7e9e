"""The log as one replica of several: roles, what followers are sent and take, digests, repairs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from random import Random
from threading import Event, Thread

import pytest

from log.power import PowerRig, after_every_crash, contents
from log.rig import LateDriver, Rig, batch, outcome, values
from walstream.errors import (
    CorruptBatch,
    CorruptLog,
    DiskFull,
    FencedLeaderEpoch,
    NotLeader,
    OffsetOutOfRange,
    RequestTimedOut,
)
from walstream.log.batch import assemble, parse_header, stamp, walk
from walstream.log.driver import InlineDriver
from walstream.log.records import Record, build_batch
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore
from walstream.log.waiting import Waiters
from walstream.sim.disk import SimDisk


@pytest.fixture
def rig() -> PowerRig:
    return PowerRig(SimDisk(Random(1)))


class Deaf:
    """Replicates, and lets nothing that happens disturb it."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


def lead(partition, epoch):
    heard = []
    partition.become_leader(epoch, heard.append)
    assert heard == [None]


def copy(rig, source, epoch=9, segment_bytes=400):
    """Make a follower with the same batches, over other segments."""
    other = PowerRig(SimDisk(Random(2)), defaults=TopicSettings(segment_bytes=segment_bytes))
    follower = other.topic()
    other.follow(follower, epoch)
    while follower.log_end < source.log_end:
        chunk = source.read_replica_blocking(follower.log_end, 300)
        follower.append_replicated(chunk.buffers, offset=follower.log_end)
    other.driver.flush()
    return other, follower


def filled(rig, count=12):
    partition = rig.topic()
    lead(partition, 1)
    for number in range(count):
        rig.append(partition, *(f"{number:040d}" for _ in range(1 + number % 3)))
    rig.driver.flush()
    partition.advance_high_watermark(partition.log_end)
    return partition


# ── roles and ends ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_log_takes_appends_only_as_a_leader(rig: PowerRig) -> None:
    partition = rig.topic()
    for prepare in (lambda: None, lambda: rig.follow(partition, 3), partition.stop_role):
        prepare()
        with pytest.raises(NotLeader):
            rig.append(partition, "x")
    lead(partition, 4)
    rig.write(partition, "x")
    assert partition.epochs.to_list() == [[4, 0]]
    assert rig.again().store.partition("t", 0).leader_epoch == 4


def test_a_role_that_was_replaced_is_never_taken(rig: PowerRig) -> None:
    partition = rig.topic()
    lead(partition, 1)
    rig.append(partition, "queued")
    heard = []
    partition.become_leader(2, heard.append)  # Waits for what is queued.
    rig.follow(partition, 3)
    rig.driver.flush()
    assert isinstance(heard[0], NotLeader)
    assert not partition.is_leader
    assert partition.epochs.to_list() == [[1, 0]]


def test_a_role_is_not_taken_by_a_log_that_was_reopened_meanwhile(tmp_path) -> None:
    """It has no role then: the core that asked for this one begins again from what recovery has found."""
    driver = LateDriver()
    rig = Rig(tmp_path, driver=driver, replicated=True)
    partition = rig.topic()
    lead(partition, 1)
    rig.write(partition, "x")
    partition.stop_role()
    driver.is_late = True
    rig.store.save_checkpoint(lambda error: None)
    heard: list[Exception | None] = []
    partition.become_leader(2, heard.append)  # Waits for the checkpoint after that one.
    rig.disk.faults["sync", ".log"] = errno.ENOSPC
    rig.settle()
    assert isinstance(partition.write_error, DiskFull)
    rig.disk.faults.clear()
    rig.store.tick()
    reopened = partition.truncations
    while driver.run_next():
        driver.flush()
    assert (partition.write_error, partition.truncations) == (None, reopened + 1)
    assert [type(error) for error in heard] == [NotLeader]
    with pytest.raises(NotLeader):
        rig.append(partition, "y")


def test_durable_is_not_visible(rig: PowerRig) -> None:
    partition = rig.topic()
    lead(partition, 1)
    rig.append(partition, "a", "b")
    durable: list = []
    partition.when_durable(1, durable.append)
    visible = outcome(partition, 1)
    assert (partition.high_watermark, partition.durable_end, partition.log_end) == (0, 0, 2)
    rig.driver.flush()
    assert (durable, visible) == ([None], [])
    assert (partition.high_watermark, partition.durable_end, partition.log_end) == (0, 2, 2)
    assert values(partition) == []
    with pytest.raises(OffsetOutOfRange):
        partition.read_blocking(1, 100)
    partition.advance_high_watermark(7)  # No further than what is durable here.
    assert partition.high_watermark == 2
    assert visible == [None]
    assert values(partition) == ["a", "b"]


def test_readers_see_nothing_above_the_high_watermark(rig: PowerRig) -> None:
    partition = rig.topic()
    lead(partition, 1)
    for number in range(6):
        rig.write(partition, f"{number}")
    for end in range(7):
        partition.advance_high_watermark(end)
        assert values(partition) == [f"{number}" for number in range(end)]
    assert partition.max_timestamp() == (0, rig.now_ms)


def test_the_latest_visible_record_is_found_behind_batches_that_have_none(rig: PowerRig) -> None:
    """Compaction empties a batch and leaves its append time; and what is not committed counts for nobody."""
    partition = rig.topic(cleanup_policy="compact")
    rig.follow(partition, 1)
    now_ms = rig.now_ms
    for number, (time_ms, keeps_its_record) in enumerate([(2, True), (2, True), (4, False), (1, True), (9, True)]):
        data = build_batch([Record(number, 0, b"k", b"v")], base_offset=number, append_time_ms=now_ms + time_ms)
        if not keeps_its_record:
            data = assemble(parse_header(data)._replace(record_count=0), b"")
        stamp(data, number, 1)
        partition.append_replicated([memoryview(data)], offset=number)
    rig.driver.flush()
    assert partition.max_timestamp() is None
    partition.advance_high_watermark(4)
    assert partition.max_timestamp() == (0, now_ms + 2)
    partition.advance_high_watermark(5)
    assert partition.max_timestamp() == (4, now_ms + 9)


def test_the_high_watermark_is_kept_as_a_hint(rig: PowerRig) -> None:
    partition = filled(rig)
    partition.high_watermark = 5
    rig.store.save_checkpoint(lambda error: None)
    again = rig.again().store.partition("t", 0)
    assert (again.high_watermark, again.high_watermark_epoch) == (5, 1)
    assert not again.is_unclean


def test_waiters_can_give_up_and_are_not_too_many() -> None:
    waiters = Waiters(most=100)
    heard: list = []
    handles = [waiters.add(number, lambda error, number=number: heard.append((number, error))) for number in range(100)]
    waiters.add(0, lambda error: heard.append(type(error)))
    assert heard == [RequestTimedOut]
    for handle in handles[:90]:
        handle.cancel()
        handle.cancel()
    assert len(waiters) == 10
    waiters.wake(95)
    assert heard[1:] == [(number, None) for number in range(90, 95)]
    waiters.fail(NotLeader("over"), 97)
    assert [number for number, _ in heard[6:]] == [97, 98, 99]
    waiters.wake(1000)
    assert len(waiters) == 0
    assert len(heard) == 11


# ── what a leader sends and a follower takes ─────────────────────────────────────────────────────────────────────────


def test_a_follower_is_sent_what_is_not_durable_yet(rig: PowerRig) -> None:
    partition = rig.topic()
    lead(partition, 1)
    rig.write(partition, "durable")
    for number in range(4):
        rig.append(partition, f"{number}")
    chunk = partition.read_replica(1, 10_000)
    assert (len(list(walk(b"".join(chunk.buffers)))), chunk.next_offset) == (4, 5)
    assert chunk.size == sum(map(len, chunk.buffers))
    assert partition.read_replica(1, 1).next_offset == 2
    assert partition.read_replica(3, 10_000).next_offset == 5
    assert partition.read_replica(5, 10_000) == ((), 0, 5)
    assert partition.read_replica(0, 10_000).next_offset == 1
    rig.driver.flush()
    assert partition.read_replica(0, 10_000).next_offset == 5
    with pytest.raises(OffsetOutOfRange):
        partition.read_replica(6, 10)


def test_what_has_just_become_durable_is_sent_from_memory_until_it_is_let_go_of(rig: PowerRig) -> None:
    partition = rig.topic()
    lead(partition, 1)
    partition.listener = Deaf()
    for number in range(6):
        rig.append(partition, f"{number}")
        if number % 2:
            rig.driver.flush()
    rig.append(partition, "in flight")
    whole = partition.read_replica(0, 10_000)
    partition.segments[0].file.pwritev([b"rot"], 0)  # Whoever reads it is told.
    assert partition.read_replica(0, 10_000) is whole, "for the next follower"
    assert whole.next_offset == 7
    assert partition.read_replica(3, 10_000).next_offset == 7
    assert partition.read_replica(7, 10_000) == ((), 0, 7)
    partition.let_go()
    with pytest.raises(CorruptLog):
        partition.read_replica_blocking(0, 10_000)
    assert partition.read_replica(6, 10_000).next_offset == 7, "not durable yet"


def test_followers_that_keep_up_are_sent_the_same_buffers(rig: PowerRig) -> None:
    partition = rig.topic()
    lead(partition, 1)
    for number in range(4):
        rig.append(partition, f"{number}")
    chunk = partition.read_replica(0, 10_000)
    assert len(chunk.buffers) == 1, "small batches are copied together"
    assert partition.read_replica(0, 10_000) is chunk
    assert partition.read_replica(0, chunk.size - 1).next_offset == 3, "less room, fewer batches"
    assert partition.read_replica(1, 10_000).size < chunk.size
    rig.append(partition, "x" * 30_000)
    longer = partition.read_replica(0, 100_000)
    assert (len(longer.buffers), longer.next_offset) == (5, 5), "large ones are sent from where they lie"
    rig.driver.flush()
    assert b"".join(longer.buffers).startswith(b"".join(partition.read_replica(0, 100_000).buffers))


def test_a_copy_is_the_same_over_other_segments(rig: PowerRig) -> None:
    source = filled(rig)
    other, follower = copy(rig, source, segment_bytes=1000)
    assert contents(follower) == contents(source)
    assert len(follower.segments) != len(source.segments)
    assert follower.epochs.to_list() == source.epochs.to_list()
    end = source.log_end
    for start, stop in ((0, end), (3, end), (0, 7), (5, 9)):
        assert follower.digest(start, stop) == source.digest(start, stop)
        assert follower.digest(start, stop).valid_from == start
    assert source.digest(0, 7) != source.digest(0, 9)
    assert contents(other.again().store.partition("t", 0)) == contents(source)


def test_what_does_not_continue_the_log_is_refused_as_a_whole(rig: PowerRig) -> None:
    partition = rig.topic()
    rig.follow(partition, 5)
    rig.receive(partition, 3, "a")

    def sent(base, epoch, damage=None):
        data = batch("x")
        stamp(data, base, epoch)
        if damage is not None:
            data[damage] ^= 1
        return memoryview(data)

    for refused, data in (
        (CorruptBatch, [sent(1, 3), sent(3, 3)]),
        (CorruptBatch, [sent(1, 3), sent(2, 3, damage=65)]),
        (CorruptBatch, [sent(1, 3)[:-1]]),
        (FencedLeaderEpoch, [sent(1, 2)]),
        (FencedLeaderEpoch, [sent(1, 6)]),
    ):
        with pytest.raises(refused):
            partition.append_replicated(data, offset=1)
    with pytest.raises(CorruptBatch):
        partition.append_replicated([sent(2, 3)], offset=2)
    assert partition.log_end == 1
    partition.append_replicated([sent(1, 3), sent(2, 5)], offset=1)
    assert partition.log_end == 3
    assert partition.epochs.to_list() == [[3, 0], [5, 2]]


def test_a_log_may_start_in_the_middle_of_its_first_batch(rig: PowerRig) -> None:
    def prepare(disk):
        rig = PowerRig(disk)
        partition = rig.topic()
        rig.follow(partition, 1)
        prepare.durable = 2

        def work():
            heard = []
            partition.reset(2, heard.append)
            rig.driver.flush()
            data = batch("a", "b", "c")
            stamp(data, 0, 1)
            assert partition.append_replicated([memoryview(data)], offset=2) == 3
            rig.driver.flush()
            prepare.durable = 3
            rig.receive(partition, 1, "d")
            rig.driver.flush()
            prepare.durable = 4

        return work

    for disk, is_over in after_every_crash(prepare, range(3)):
        for again in (PowerRig(disk), PowerRig(disk)):
            partition = again.store.partition("t", 0)
            if partition.log_start == 0:
                assert prepare.durable == 2
                continue
            assert partition.log_start == 2
            assert partition.log_end >= prepare.durable
            partition.advance_high_watermark(9)
            assert values(partition) == ["c", "d"][: partition.log_end - 2]
        assert not is_over or partition.log_end == 4


# ── repair ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def rot(rig, partition, segment, position, mask=0x10):
    path = str(partition.segments[segment].path).lstrip("/")
    inode = dict(rig.disk.files())[path]
    inode.data[position] ^= mask
    inode.durable[position] ^= mask


@pytest.mark.parametrize("position", [2, 10, 13, 16, 18, 24, 60, 80])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_damaged_is_put_back_from_another_replica(rig: PowerRig, position: int, restarts: bool) -> None:
    source = filled(rig)
    other, follower = copy(rig, source)
    other.settle()
    rot(other, follower, 1, position)
    if restarts:
        other = other.again()
        follower = other.store.partition("t", 0)
        follower.become_follower(9, lambda error: None)
    for offset in range(follower.log_start, follower.durable_end):
        with contextlib.suppress(CorruptLog):
            follower.read_replica_blocking(offset, 1)
    assert follower.damaged
    for _ in range(10):
        if not follower.damaged:
            break
        start, end = follower.damaged[0]
        chunk = source.read_for_repair(start, end, 10_000)
        heard = []
        follower.repair(start, chunk.buffers, heard.append)
        other.driver.flush()
        assert heard == [None]
    assert follower.damaged == []
    assert contents(follower) == contents(source)
    assert follower.digest(0, source.log_end) == source.digest(0, source.log_end)
    assert contents(other.again().store.partition("t", 0)) == contents(source)


@pytest.mark.parametrize("segment", [0, -1])
def test_damage_is_put_back_although_a_batch_behind_it_says_that_it_belongs_elsewhere(segment: int) -> None:
    """No checksum covers the offset, so the batch looks sound; what is fetched would never fit before it."""
    rig = PowerRig(SimDisk(Random(1)), defaults=TopicSettings(segment_bytes=2_000))
    source = filled(rig, 30)
    other, follower = copy(rig, source, segment_bytes=2_000)
    follower.advance_high_watermark(source.log_end)
    other.settle()
    batches = [position for position, _ in follower.segments[segment].headers(0)]
    rot(other, follower, segment, batches[-3] + 80)  # A record,
    rot(other, follower, segment, batches[-2] + 1)  # the offset, which is beyond the end of the log then,
    rot(other, follower, segment, batches[-1] + 80)  # and a record again.
    for offset in range(follower.log_start, follower.durable_end):
        with contextlib.suppress(CorruptLog):
            follower.read_replica_blocking(offset, 1)
    (damage,) = follower.damaged
    heard = []
    follower.repair(damage[0], source.read_for_repair(*damage, 10_000).buffers, heard.append)
    other.driver.flush()
    assert heard == [None]
    assert follower.damaged == []
    assert contents(follower) == contents(source)
    assert contents(other.again().store.partition("t", 0)) == contents(source)


@pytest.mark.parametrize("victim", [1, 4, 9], ids=["sealed", "between rows", "last segment"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_repaired_batch_counts_for_retention_and_is_found_by_its_time(victim: int, is_saved: bool) -> None:
    """The index was made while its header could not be read: its time was missing for good."""
    size = 30_000  # Each batch has a row of the index.
    rig = PowerRig(SimDisk(Random(1)), defaults=TopicSettings(segment_bytes=5 * size))
    source = rig.topic()
    lead(source, 1)
    latest = rig.now_ms + 1_000_000
    for number in range(11):
        batch_ms = latest if number == victim else rig.now_ms + number
        data = build_batch([Record(0, batch_ms, None, f"{number}".encode() * size)])
        source.append(memoryview(data), now_ms=latest)
        rig.driver.flush()
    source.advance_high_watermark(11)
    other, follower = copy(rig, source, segment_bytes=5 * size)
    follower.advance_high_watermark(11)
    other.settle()
    number = next(i for i, one in reversed(list(enumerate(follower.segments))) if one.base_offset <= victim)
    position = next(at for at, header in follower.segments[number].headers() if header.base_offset == victim)
    rot(other, follower, number, position + 16)
    with contextlib.suppress(FileNotFoundError):
        other.disk.remove(follower.segments[number].index_path)
    other = other.again()
    follower = other.store.partition("t", 0)
    follower.become_follower(9, lambda error: None)
    follower.advance_high_watermark(11)
    with pytest.raises(CorruptLog):
        follower.read_replica_blocking(victim, 1)
    segment = follower.segments[number]
    assert segment.index.max_timestamp < latest
    if is_saved:
        segment.save_index()
    heard = []
    follower.repair(victim, source.read_for_repair(victim, victim + 1, 10).buffers, heard.append)
    other.driver.flush()
    assert (heard, follower.damaged) == ([None], [])
    for _ in range(2):
        assert segment.index.max_timestamp == latest
        assert follower.offset_for_time(latest) == follower.max_timestamp() == (victim, latest)
        segment.release()
    other.store.save_checkpoint(lambda error: None)
    again = other.again().store.partition("t", 0)
    again.advance_high_watermark(11)
    assert again.offset_for_time(latest) == (victim, latest)


def test_a_leader_stamps_above_a_batch_that_was_repaired(rig: PowerRig) -> None:
    """What stands at its offset had the latest append time, which recovery could not read."""
    source = rig.topic(message_timestamp_type="LogAppendTime")
    lead(source, 1)
    rig.write(source, "x")
    rig.now_ms += 60_000
    latest = rig.write(source, "x").append_time_ms
    other = PowerRig(SimDisk(Random(2)))
    follower = other.topic(message_timestamp_type="LogAppendTime")
    other.follow(follower, 1)
    follower.append_replicated(source.read_replica_blocking(0, 10_000).buffers, offset=0)
    other.settle()
    rot(other, follower, 0, list(follower.segments[0].headers())[1][0] + 16)
    other.store.save_checkpoint(lambda error: None)
    other.disk.remove(follower.segments[0].index_path)
    other = other.again()
    follower = other.store.partition("t", 0)
    other.follow(follower, 1)
    with pytest.raises(CorruptLog):
        follower.read_replica_blocking(1, 1)
    heard = []
    follower.repair(1, source.read_for_repair(1, 2, 10_000).buffers, heard.append)
    other.driver.flush()
    assert (heard, follower.damaged) == ([None], [])
    lead(follower, 2)
    assert other.append(follower, "later").append_time_ms > latest


def test_a_repair_whose_sync_failed_is_made_again() -> None:
    rig = PowerRig(SimDisk(Random(1)), defaults=TopicSettings(segment_bytes=2_000))
    source = filled(rig)
    other, follower = copy(rig, source, segment_bytes=2_000)
    other.settle()
    for position in [position for position, _ in follower.segments[0].headers(0)][1:3]:
        rot(other, follower, 0, position + 2)
    for offset in range(follower.log_start, follower.durable_end):
        with contextlib.suppress(CorruptLog):
            follower.read_replica_blocking(offset, 1)
    (damage,) = follower.damaged
    chunk = source.read_for_repair(*damage, 10_000)
    assert len(list(walk(b"".join(chunk.buffers)))) == 2
    other.disk.failing_syncs = 1
    heard = []
    follower.repair(damage[0], chunk.buffers, heard.append)
    other.driver.flush()
    assert heard[0] is not None
    assert follower.damaged == [damage], "what a failed sync left on the disk is unknown, whatever can be read"
    for _ in range(10):
        if follower.damaged:
            start, end = follower.damaged[0]
            follower.repair(start, source.read_for_repair(start, end, 10_000).buffers, heard.append)
            other.driver.flush()
    assert follower.damaged == []
    assert heard[1:] == [None] * (len(heard) - 1)
    other.disk.crash()
    assert contents(other.again().store.partition("t", 0)) == contents(source)


def test_damage_that_begins_below_the_start_of_the_log_is_put_back_from_there_on() -> None:
    """Nobody has what was deleted, and nobody needs it."""
    rig = PowerRig(SimDisk(Random(1)), defaults=TopicSettings(segment_bytes=2_000))
    source = filled(rig)
    other, follower = copy(rig, source, segment_bytes=2_000)
    other.settle()
    batches = list(follower.segments[0].headers(0))
    for position, _ in batches[1:5]:
        rot(other, follower, 0, position + 70)
    follower.advance_high_watermark(source.log_end)
    start, middle, end = (batches[number][1].base_offset for number in (2, 3, 5))
    for offset in range(follower.log_start, follower.durable_end):
        with contextlib.suppress(CorruptLog):
            follower.read_replica_blocking(offset, 1)
    for store, log in ((rig.store, source), (other.store, follower)):
        store.delete_records(log, start, lambda error: None)
    assert follower.damaged[0][0] < start
    heard = []
    follower.repair(start, source.read_for_repair(start, middle, 1).buffers, heard.append)
    other.driver.flush()
    assert heard.pop() is not None, "where it belongs is not known, unless it reaches to what is sound"
    follower.repair(start, source.read_for_repair(start, end, 10_000).buffers, heard.append)
    other.driver.flush()
    assert heard == [None]
    kept = b"".join(source.read_replica_blocking(start, 10_000).buffers)
    again = other.again().store.partition("t", 0)
    assert again.log_start == start
    assert again.damaged == []
    assert b"".join(again.read_replica_blocking(start, 10_000).buffers) == kept


@pytest.mark.parametrize("harm", ["rot", "rot of a sealed segment", "a sealed segment ends early"])
@pytest.mark.parametrize("count", [1, 4])
def test_damage_around_the_start_of_the_log_is_put_back(count: int, harm: str) -> None:
    """The log starts in the middle of a batch that is damaged, alone or with those before it."""
    rig = PowerRig(SimDisk(Random(1)), defaults=TopicSettings(segment_bytes=2_000))
    source = filled(rig)
    for number in range(20):
        rig.append(source, *[f"{number:040d}"] * 3)
    rig.driver.flush()
    source.advance_high_watermark(source.log_end)
    other, follower = copy(rig, source, segment_bytes=2_000)
    follower.advance_high_watermark(source.log_end)
    segment = -1 if harm == "rot" else 0
    batches = list(follower.segments[segment].headers(0))
    start = batches[-1][1].last_offset
    assert batches[-1][1].base_offset < start
    for store, log in ((rig.store, source), (other.store, follower)):
        store.delete_records(log, start, lambda error: None)
    other.settle()
    if harm == "a sealed segment ends early":
        inode = dict(other.disk.files())[str(follower.segments[segment].path).lstrip("/")]
        for data in (inode.data, inode.durable):
            del data[batches[-count][0] :]
    else:
        for position, _ in batches[-count:]:
            rot(other, follower, segment, position + 70)
    if harm != "rot":
        other = other.again()
        follower = other.store.partition("t", 0)
        follower.become_follower(9, lambda error: None)
    with pytest.raises(CorruptLog):
        follower.read_replica_blocking(start, 1)
    assert len(follower.damaged) == 1
    end = follower.damaged[0][1]
    heard = []
    follower.repair(start, source.read_for_repair(start, end, 10_000).buffers, heard.append)
    other.driver.flush()
    assert heard == [None]
    assert follower.damaged == []
    kept = b"".join(source.read_replica_blocking(start, 10_000).buffers)
    again = other.again().store.partition("t", 0)
    for log in (follower, again):
        assert log.damaged == []
        assert b"".join(log.read_replica_blocking(start, 10_000).buffers) == kept


@pytest.mark.parametrize("clean", [False, True])
def test_damage_that_was_found_is_not_forgotten_by_a_restart(rig: PowerRig, clean: bool) -> None:
    partition = filled(rig)
    rig.settle()
    base = partition.segments[1].base_offset
    rot(rig, partition, 1, 70)
    with pytest.raises(CorruptLog):
        partition.read_replica_blocking(base, 1)
    (damage,) = partition.damaged
    rig.store.save_checkpoint(lambda error: None)
    for _ in range(2):
        rig = rig.again(clean=clean)
        partition = rig.store.partition("t", 0)
        assert partition.damaged == [damage], "nobody has read it since"
    rot(rig, partition, 1, 70)
    partition = rig.again(clean=clean).store.partition("t", 0)
    assert partition.damaged == [], "its file was put right meanwhile"


def mend(rig, source, partition):
    start, end = partition.damaged[0] if partition.damaged else (4, 5)
    if not partition.damaged:
        partition.note_damage(start, end, CorruptLog("found by another reader"))
    heard = []
    partition.repair(start, source.read_for_repair(start, end, 10_000).buffers, heard.append)
    rig.driver.flush()
    assert heard == [None]


def cut_and_append(rig, source, partition):
    heard = []
    partition.truncate(2, heard.append)
    rig.driver.flush()
    assert heard == [None]
    while partition.log_end < source.log_end:
        chunk = source.read_replica_blocking(partition.log_end, 300)
        partition.append_replicated(chunk.buffers, offset=partition.log_end)
    rig.driver.flush()
    partition.advance_high_watermark(partition.log_end)


def trim(rig, source, partition):
    rig.store.delete_records(partition, 8, lambda error: None)
    rig.driver.flush()


CHANGES = pytest.mark.parametrize("change", [mend, cut_and_append, trim])


def rotten(rig):
    """Return a leader's log of single records, and a copy in which offset 4 is damaged and not known to be."""
    source = rig.topic()
    lead(source, 1)
    for number in range(12):
        rig.append(source, f"{number:040d}")
    rig.driver.flush()
    source.advance_high_watermark(12)
    other, follower = copy(rig, source, segment_bytes=1 << 20)
    follower.advance_high_watermark(12)
    other.settle()
    rot(other, follower, 0, [at for at, _ in follower.segments[0].headers()][4] + 80)
    return source, other, follower


@CHANGES
def test_a_read_that_met_damage_does_not_note_what_was_put_right_meanwhile(
    rig: PowerRig, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    """A reader on another thread has read the bytes, and notes them after the event loop has replaced them."""
    source, other, follower = rotten(rig)

    def meanwhile(segment):
        monkeypatch.undo()
        change(other, source, follower)
        return False

    monkeypatch.setattr(follower, "_was_replaced", meanwhile)
    with pytest.raises(CorruptLog):
        follower.read_blocking(4, 1)
    assert follower.damaged == []
    assert values(follower) == values(source, follower.log_start)


class Changing(list[tuple[int, int]]):
    """A list of damaged ranges; something changes when the last use is made of it to make another list."""

    meanwhile: Callable[[], None] | None = None
    uses = 3

    def __iter__(self) -> Iterator[tuple[int, int]]:
        found = list(super().__iter__())
        self.uses -= self.meanwhile is not None
        if self.meanwhile is not None and not self.uses:
            thread = Thread(target=self.meanwhile, daemon=True)
            self.meanwhile = None
            thread.start()
            thread.join(0.2)
        return iter(found)


@CHANGES
def test_damage_that_is_noted_brings_no_older_damage_back(rig: PowerRig, change: Callable[..., None]) -> None:
    """Two threads change the list: neither may write one that it made from what was there before."""
    source, other, follower = rotten(rig)
    follower.note_damage(4, 5, CorruptLog("found"))
    follower.damaged = known = Changing(follower.damaged)
    done = Event()

    def changed():
        change(other, source, follower)
        done.set()

    known.meanwhile = changed
    follower.note_damage(10, 11, CorruptLog("found"))
    assert done.wait(10)
    assert follower.damaged in ([], [(10, 11)])


def test_a_lost_segment_is_put_back_from_another_replica(rig: PowerRig) -> None:
    source = filled(rig)
    other, follower = copy(rig, source)
    other.settle()
    other.disk.remove(follower.segments[2].path)
    other = other.again()
    follower = other.store.partition("t", 0)
    follower.become_follower(9, lambda error: None)
    assert len(follower.damaged) == 1
    while follower.damaged:
        start, end = follower.damaged[0]
        heard = []
        follower.repair(start, source.read_for_repair(start, end, 1).buffers, heard.append)
        other.driver.flush()
        assert heard == [None]
    assert contents(follower) == contents(source)
    again = other.again().store.partition("t", 0)
    assert again.damaged == []
    assert contents(again) == contents(source)


def test_a_repair_that_is_wrong_changes_nothing(rig: PowerRig) -> None:
    source = filled(rig)
    other, follower = copy(rig, source)
    other.settle()
    rot(other, follower, 0, 80)
    with pytest.raises(CorruptLog):
        follower.read_replica_blocking(0, 1)
    (damage,) = follower.damaged
    before = [bytes(inode.data) for _, inode in other.disk.files()]
    longer = batch("y" * 500)
    stamp(longer, damage[0], 1)
    later = batch("z" * 40)
    stamp(later, damage[0], 8)
    sound = source.read_for_repair(*damage, 1000).buffers
    for start, received in ((damage[0], [longer]), (damage[0], [later]), (damage[0] + 1, sound), (damage[0], [])):
        heard = []
        follower.repair(start, received, heard.append)
        other.driver.flush()
        assert heard[0] is not None
    assert [bytes(inode.data) for _, inode in other.disk.files()] == before
    assert follower.damaged == [damage]


def test_the_scrub_finds_rot_that_nobody_reads(rig: PowerRig) -> None:
    partition = filled(rig)
    rig.settle()
    store = LogStore(
        rig.disk, rig.folder, rig.catalogue, InlineDriver(), lambda: rig.now_ms, lambda: rig.now_ms,
        replicated=True, scrub_bytes_per_s=300, journal_prepared_bytes=2048,
    )  # fmt: skip
    partition = store.partition("t", 0)
    for _ in range(20):
        store.tick()
    assert partition.damaged == []
    assert store.scrub.bytes_checked > partition.size_bytes
    rot(rig, partition, 2, 80)
    for _ in range(20):
        store.tick()
    (damage,) = partition.damaged
    assert damage[0] == partition.segments[2].base_offset
    assert store.damage_reports == 1


def test_the_scrub_rests_between_two_rounds_and_takes_small_partitions_together(rig: PowerRig) -> None:
    partition = filled(rig)
    others = [rig.topic(f"small-{number}") for number in range(5)]
    for other in others:
        lead(other, 1)
        rig.append(other, "a")
    rig.driver.flush()
    rig.settle()
    store = LogStore(
        rig.disk, rig.folder, rig.catalogue, InlineDriver(), lambda: rig.now_ms, lambda: rig.now_ms,
        replicated=True, scrub_bytes_per_s=100_000, scrub_interval_s=10, journal_prepared_bytes=2048,
    )  # fmt: skip
    whole = partition.size_bytes + sum(other.size_bytes for other in others)
    store.tick()
    assert store.scrub.bytes_checked == whole, "all of them in the first second"
    for _ in range(9):
        store.tick()
    assert store.scrub.bytes_checked == whole
    store.tick()
    assert store.scrub.bytes_checked == 2 * whole


def test_a_follower_keeps_what_its_leader_keeps(rig: PowerRig) -> None:
    partition = rig.topic(retention_ms="1")
    rig.follow(partition, 1)
    for number in range(10):
        rig.receive(partition, 1, f"{number:060d}")
    rig.driver.flush()
    partition.advance_high_watermark(10)
    rig.now_ms += 60_000
    rig.store.enforce_retention()
    assert partition.log_start == 0
    lead(partition, 2)
    rig.store.enforce_retention()
    assert partition.log_start == 10
