"""Append times and resolved positions: what was promised once holds over clock steps, restarts, crashes and leaders."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from log.power import PowerRig
from log.rig import FaultyDisk, Rig
from walstream.errors import PartitionOffline, WalstreamError
from walstream.log.append_clock import AHEAD_MS, AHEAD_MS_MIN, RENEW_MS, AppendClock
from walstream.log.batch import walk
from walstream.log.partition_log import PartitionLog
from walstream.log.settings import TopicSettings
from walstream.log.stamps import PENDING_MAX, STRANGE_MS, TAKEOVER_MS, Stamps
from walstream.sim.disk import SimDisk

APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}
NOW = 1_700_000_000_000


def clock_from(floor_ms: int) -> tuple[AppendClock, list[int]]:
    reserved: list[int] = []
    return AppendClock(floor_ms, reserved.append), reserved


def lead(partition: PartitionLog, epoch: int) -> None:
    heard: list[Exception | None] = []
    partition.become_leader(epoch, heard.append)
    assert heard == [None]


# ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stamp_is_reserved_before_it_is_given() -> None:
    clock, reserved = clock_from(0)
    assert clock.stamp(1_000, 0) == 1_000
    assert reserved == [1_000 + AHEAD_MS]
    assert clock.stamp(1_000 + AHEAD_MS, 0) == 1_000 + AHEAD_MS
    assert len(reserved) == 1
    assert clock.stamp(1_001 + AHEAD_MS, 0) == 1_001 + AHEAD_MS
    assert reserved == [1_000 + AHEAD_MS, 1_001 + 2 * AHEAD_MS]


def test_a_restart_begins_above_what_could_have_been_promised() -> None:
    clock, reserved = clock_from(0)
    promised = clock.resolve(1_000, 1_000 + AHEAD_MS)
    again, _ = clock_from(reserved[-1])
    assert promised <= reserved[-1]
    assert again.stamp(900, 0) == reserved[-1] + 1


def test_restarts_without_a_pause_do_not_run_away() -> None:
    floor = NOW + AHEAD_MS
    for restart in range(100):
        now_ms = NOW + restart * AHEAD_MS_MIN
        clock, reserved = clock_from(floor)
        clock.tick(now_ms)
        clock.stamp(now_ms, 0)
        floor = reserved[-1]
        assert floor <= now_ms + AHEAD_MS + AHEAD_MS_MIN + 100


def test_a_tick_keeps_appends_from_reserving() -> None:
    clock, reserved = clock_from(0)
    for now_ms in range(10_000, 60_000, 1_000):
        clock.tick(now_ms)
        reserved.clear()
        for later in range(now_ms, now_ms + RENEW_MS, 10):
            clock.stamp(later, 0)
            assert clock.resolve(later, later) == later
        assert reserved == []


class Thread:
    """Runs reservations when told."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], None], Callable[[None, Exception | None], None]]] = []

    def run(self, job: Callable[[], None], done: Callable[[None, Exception | None], None]) -> None:
        self.jobs.append((job, done))

    def finish(self, error: OSError | None = None) -> None:
        job, done = self.jobs.pop(0)
        if error is None:
            job()
        done(None, error)


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_nothing_waits_for_a_reservation_and_nothing_passes_the_durable_one() -> None:
    clock, reserved = clock_from(0)
    clock.stamp(1_000, 0)
    end = 1_000 + AHEAD_MS
    thread = Thread()
    clock.run = thread.run
    clock.tick(3_000)
    clock.tick(3_500)
    assert len(thread.jobs) == 1, "one at a time"
    assert clock.stamp(3_900, 0) == 3_900
    assert clock.resolve(9_000, 9_000) == end - 1
    assert clock.stamp(9_000, end) == end, "above what was promised"
    assert reserved == [end]
    job, done = thread.jobs.pop()
    job()
    assert clock.stamp(9_000, 0) == end, "written by the thread, and not yet known here"
    done(None, None)
    assert reserved == [end, 3_000 + AHEAD_MS]
    assert clock.resolve(5_500, 5_500) == 5_500
    # Where a partition takes only later times its batch has to be sent again.
    with pytest.raises(PartitionOffline, match="being reserved"):
        clock.stamp(9_000, 20_000)
    thread.finish()
    assert clock.stamp(9_000, 20_000) == 20_000
    assert reserved[-1] == 20_000 + AHEAD_MS_MIN


def test_a_quick_restart_reserves_before_its_first_stamp() -> None:
    for begin in (lambda clock: clock.tick(NOW), lambda clock: clock.cover(NOW, NOW, lambda error: None)):
        clock, reserved = clock_from(NOW + AHEAD_MS)  # The clock is below the floor.
        begin(clock)
        assert len(reserved) == 1
        assert clock.stamp(NOW, 0) == NOW + AHEAD_MS + 1
        assert len(reserved) == 1


def test_a_refused_reservation_is_tried_again() -> None:
    clock, reserved = clock_from(0)
    clock.stamp(1_000, 0)
    thread = Thread()
    clock.run = thread.run
    assert clock.tick(9_000) is None
    thread.finish(FULL)
    with pytest.raises(PartitionOffline, match="No space left"):
        clock.stamp(9_000, 0)
    assert len(thread.jobs) == 1, "by the append that needs it"
    thread.finish(FULL)
    assert clock.resolve(9_000, 9_000) == reserved[-1] - 1
    assert thread.jobs == [], "not by each question for a resolved position"
    assert "No space left" in str(clock.tick(9_000))
    thread.finish()
    assert clock.stamp(9_000, 0) == 9_000
    assert clock.tick(9_000) is None


def test_a_time_is_covered_once_a_reservation_above_it_is_durable() -> None:
    clock, reserved = clock_from(0)
    thread = Thread()
    clock.run = thread.run
    heard: list[PartitionOffline | None] = []
    clock.tick(1_000)
    clock.cover(1_000, 2_000, heard.append)
    clock.cover(1_000, 50_000, heard.append)
    assert heard == []
    thread.finish()
    assert heard == [None], "the first reservation is below the second time"
    thread.finish()
    assert heard == [None, None]
    assert reserved[-1] >= 50_000
    clock.cover(1_000, 90_000, heard.append)
    thread.finish(FULL)
    assert "No space left" in str(heard[-1])


def test_where_the_disk_refuses_nothing_passes_the_reservation() -> None:
    calls: list[int] = []
    is_refusing = False

    def reserve(until_ms: int) -> None:
        calls.append(until_ms)
        if is_refusing:
            raise OSError(errno.ENOSPC, "No space left on device")

    clock = AppendClock(0, reserve)
    clock.stamp(1_000, 0)
    is_refusing = True
    with pytest.raises(PartitionOffline, match="No space left"):
        clock.stamp(9_000, 0)
    for _ in range(3):
        assert clock.resolve(9_000, 9_000) == 1_000 + AHEAD_MS - 1
    assert len(calls) == 2  # Asked thousands of times a second, it does not try the disk each time.
    assert clock.tick(9_000) is not None
    is_refusing = False
    clock.tick(9_000)
    assert clock.resolve(9_000, 9_000) == 9_000
    assert clock.stamp(9_000, 9_001) == 9_001


# ── one partition ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_present_is_resolved_and_later_stamps_keep_to_it() -> None:
    clock, _ = clock_from(0)
    stamps = Stamps(clock)
    assert stamps.resolve(NOW, 0, is_alone=True) == NOW
    assert stamps.stamp(NOW, 1) == NOW + 1
    assert stamps.stamp(NOW - 5_000, 2) == NOW + 1
    stamps.became_visible(2)
    assert stamps.resolve(NOW - 5_000, 2, is_alone=True) == NOW + 1
    assert stamps.resolve(NOW - 5_000, 2, is_alone=True) == NOW + 1  # Asking does not move it.


def test_what_is_pending_holds_it_back() -> None:
    clock, _ = clock_from(0)
    stamps = Stamps(clock)
    assert [stamps.stamp(NOW + number // 2, number + 1) for number in range(6)] == [NOW + n // 2 for n in range(6)]
    for high_watermark, resolved in ((0, NOW - 1), (1, NOW - 1), (2, NOW), (3, NOW), (4, NOW + 1), (5, NOW + 1)):
        assert stamps.resolve(NOW + 50, high_watermark, is_alone=True) == resolved
    assert stamps.resolve(NOW + 50, 6, is_alone=True) == NOW + 50


def test_pending_stamps_are_bounded_and_then_resolved_late() -> None:
    clock, _ = clock_from(0)
    stamps = Stamps(clock)
    for number in range(PENDING_MAX + 1_000):
        stamps.stamp(NOW + number, number + 1)
    assert len(stamps._pending) == PENDING_MAX
    last_known = NOW + PENDING_MAX - 1
    for high_watermark in (PENDING_MAX, PENDING_MAX + 999):
        assert stamps.resolve(NOW + 10_000, high_watermark, is_alone=True) == last_known - 1
    assert stamps.resolve(NOW + 10_000, PENDING_MAX + 1_000, is_alone=True) == NOW + 10_000


def test_alone_an_idle_partition_holds_up_no_busy_one() -> None:
    clock, _ = clock_from(NOW + 2_000)  # A restart: stamps are ahead of the wall clock for a while.
    busy, idle = Stamps(clock), Stamps(clock)
    stamp = busy.stamp(NOW, 1)
    assert stamp == NOW + 2_001
    assert idle.resolve(NOW, 0, is_alone=True) == stamp
    assert idle.stamp(NOW, 1) > stamp


def test_in_a_cluster_nothing_is_promised_ahead_of_the_wall_clock_but_what_is_in_the_log() -> None:
    clock, _ = clock_from(NOW + 2_000)
    stamps = Stamps(clock)
    stamps.take_over(NOW, lambda error: None, is_kept=True)
    assert stamps.resolve(NOW, 0, is_alone=False) == NOW
    stamp = stamps.stamp(NOW, 1)
    assert stamp == NOW + TAKEOVER_MS
    assert stamps.resolve(NOW + 1, 0, is_alone=False) == NOW + 1  # A successor may lack the batch.
    assert stamps.resolve(stamp + 50, 0, is_alone=False) == stamp - 1
    assert stamps.resolve(NOW, 1, is_alone=False) == stamp


@pytest.mark.parametrize("is_alone", [True, False])
def test_records_that_are_the_newest_are_promised_nothing_that_carries_their_stamps_away(is_alone: bool) -> None:
    clock, _ = clock_from(0)
    busy, idle = Stamps(clock), Stamps(clock)
    for number in range(1, 1_000):
        now_ms = NOW + number // 100
        stamp = busy.stamp(now_ms, number)
        assert stamp <= now_ms + 1
        assert idle.resolve(now_ms, 0, is_alone=is_alone) in (stamp, now_ms), "whoever waits for it waits no longer"
        resolved = busy.resolve(now_ms, number, is_alone=is_alone, is_newest=True)
        assert resolved is not None
        assert stamp - 1 <= resolved <= now_ms
        assert busy.stamp(now_ms, number) > resolved, "what was promised is kept"
    assert busy.resolve(NOW + 5_000, 999, is_alone=is_alone, is_newest=True) == NOW + 5_000, "the clock is ahead"


def test_a_producers_time_does_not_carry_the_clock_away() -> None:
    clock, _ = clock_from(0)
    stamps = Stamps(clock)
    stamps.found(NOW + 30, NOW)
    assert stamps.stamp(NOW, 1) == NOW + 30
    stamps.found(NOW + STRANGE_MS + 1, NOW)
    assert stamps.stamp(NOW, 2) == NOW + 30


# ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def stamped(rig: Rig, name: str = "t") -> PartitionLog:
    return rig.topic(name, message_timestamp_type="LogAppendTime")


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path)


def test_resolved_positions_of_a_log(rig: Rig) -> None:
    partition = stamped(rig)
    assert partition.resolve() == (0, rig.now_ms)
    first = rig.append(partition, "a", "b").append_time_ms
    assert first == rig.now_ms + 1
    rig.now_ms += 500
    assert partition.resolve() == (0, first - 1)
    rig.append(partition, "c")
    rig.driver.flush()
    assert partition.resolve() == (3, rig.now_ms)
    rig.now_ms -= 100_000
    assert partition.resolve() == (3, rig.now_ms + 100_000)
    assert rig.append(partition, "d").append_time_ms == rig.now_ms + 100_001


def test_a_topic_without_append_time_has_none(rig: Rig) -> None:
    partition = rig.topic()
    rig.write(partition, "a")
    assert partition.resolve() is None


def test_a_topic_that_gets_append_time_has_them_once_the_rest_is_visible(rig: Rig) -> None:
    partition = rig.topic()
    rig.append(partition, "a producer's time")
    rig.store.configure_topic("t", APPEND_TIME)
    assert partition.resolve() is None
    pending = rig.append(partition, "b").append_time_ms
    assert partition.resolve() is None
    rig.driver.flush()
    assert partition.resolve() == (2, pending)
    rig.store.configure_topic("t", {})
    assert partition.resolve() is None
    rig.append(partition, "c")
    rig.store.configure_topic("t", APPEND_TIME)
    assert partition.resolve() is None
    rig.driver.flush()
    assert partition.resolve() == (3, pending)


def test_a_killed_process_keeps_its_promises(rig: Rig) -> None:
    partition = stamped(rig)
    rig.write(partition, "a")
    rig.now_ms += 2_900
    offset, resolved = partition.resolve()
    again = rig.again()
    again.now_ms -= 10_000_000
    partition = again.store.partition("t", 0)
    assert again.write(partition, "b").append_time_ms > resolved
    assert partition.resolve()[0] == offset + 1


def test_promises_hold_over_a_full_disk(tmp_path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk)
    partition = stamped(rig)
    rig.write(partition, "a")
    pending = rig.append(partition, "b").append_time_ms
    disk.faults["write", ".log"] = errno.ENOSPC
    rig.driver.flush()
    rig.now_ms += 1_000
    assert partition.resolve() == (1, pending - 1)  # What became of it is unknown.
    disk.faults.clear()
    rig.store.tick()
    rig.driver.flush()
    offset, resolved = partition.resolve()
    assert (offset, resolved) == (1, rig.now_ms)
    rig.now_ms -= 5_000
    assert rig.write(partition, "c").append_time_ms == resolved + 1


def test_retention_goes_on_where_append_times_cannot_be_reserved(tmp_path) -> None:
    disk = SimDisk(Random(1))
    rig = PowerRig(disk, replicated=False)
    partition = stamped(rig)
    old = rig.topic("old", retention_ms="1000")
    for number in range(20):
        rig.write(old, f"{number:0100d}")
    rig.write(partition, "a")
    rig.now_ms += 3_600_000
    disk.is_full, disk.has_reserve = True, False
    with pytest.raises(PartitionOffline):
        rig.append(partition, "b")
    rig.store.tick()
    assert old.log_start == 20
    disk.is_full = False
    rig.store.tick()
    assert rig.write(partition, "b").append_time_ms == rig.now_ms


def test_a_partition_whose_files_cannot_be_opened_promises_nothing(tmp_path) -> None:
    rig = Rig(tmp_path)
    partition = stamped(rig)
    rig.write(partition, "a")
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)
    partition.segments[0].path.unlink()
    again = rig.again().store.partition("t", 0)
    assert again.failure is not None
    assert again.resolve() is None


# ── any story of a node ──────────────────────────────────────────────────────────────────────────────────────────────


class Promises:
    """All that was ever resolved, and whether the log keeps to it."""

    def __init__(self) -> None:
        self._given: dict[int, dict[int, int]] = {}

    def resolve(self, partition: PartitionLog) -> tuple[int, int] | None:
        resolved = partition.resolve()
        if resolved is not None:
            offset, time_ms = resolved
            assert offset == partition.high_watermark
            given = self._given.setdefault(partition.index, {})
            given[offset] = max(given.get(offset, -1), time_ms)
        return resolved

    def check(self, index: int, last_offset: int, stamp_ms: int) -> None:
        for offset, time_ms in self._given.get(index, {}).items():
            assert last_offset < offset or stamp_ms > time_ms

    def check_log(self, partition: PartitionLog) -> None:
        offset = partition.log_start
        while offset < partition.durable_end:
            for buffer in partition.read_replica_blocking(offset, 1 << 16).buffers:
                for _, header in walk(buffer):
                    assert header.uses_append_time
                    self.check(partition.index, header.last_offset, header.max_timestamp)
                    offset = header.next_offset


PARTITION = st.integers(0, 1)
SMALL_STEP = st.integers(-3, 3)
STEP = st.one_of(SMALL_STEP, st.integers(-10_000, 10_000), st.sampled_from([-3_600_000, AHEAD_MS, AHEAD_MS + 1]))
DEEDS = st.one_of(
    st.tuples(st.just("append"), PARTITION, st.integers(1, 3)),
    st.tuples(st.just("resolve"), PARTITION),
    st.tuples(st.just("resolve"), PARTITION),
    st.tuples(st.just("flush")),
    st.tuples(st.just("clock"), STEP),
    st.tuples(st.just("tick")),
    st.tuples(st.just("again"), st.sampled_from(["killed", "power", "clean"])),
    st.tuples(st.just("disk"), st.booleans()),
)


class Alone:
    """A node that is alone, through thick and thin."""

    def __init__(self) -> None:
        self.promises = Promises()
        self.now_ms = NOW
        self.was_full = False
        """Since the last tick, so that a reservation may have been refused."""
        self.rig = PowerRig(SimDisk(Random(7)), replicated=False, defaults=TopicSettings(segment_bytes=1024))
        self.rig.topic("t", 2, message_timestamp_type="LogAppendTime")

    def partition(self, index: int) -> PartitionLog:
        return self.rig.store.partition("t", index)

    def append(self, index: int, count: int) -> None:
        partition = self.partition(index)
        with contextlib.suppress(WalstreamError):
            appended = self.rig.append(partition, *("x" * count))
            self.promises.check(index, appended.last_offset, appended.append_time_ms)

    def resolve(self, index: int) -> None:
        partition = self.partition(index)
        is_idle = partition.log_end == partition.high_watermark
        resolved = self.promises.resolve(partition)
        assert resolved is not None
        if is_idle and not self.was_full:
            assert resolved[1] >= self.now_ms

    def flush(self) -> None:
        self.rig.driver.flush()

    def clock(self, step_ms: int) -> None:
        self.now_ms += step_ms
        self.rig.now_ms = self.now_ms

    def tick(self) -> None:
        self.rig.store.tick()
        self.rig.driver.flush()
        self.was_full = self.rig.disk.is_full

    def disk(self, is_full: bool) -> None:
        self.rig.disk.is_full = is_full
        self.was_full |= is_full

    def again(self, how: str) -> None:
        self.rig.disk.is_full = self.was_full = False
        if how == "power":
            self.rig.disk.crash()
        self.rig = self.rig.again(clean=how == "clean" and not self.is_offline())
        self.rig.now_ms = self.now_ms
        for index in range(2):
            self.promises.check_log(self.partition(index))

    def is_offline(self) -> bool:
        return any(self.partition(index).write_error is not None for index in range(2))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(DEEDS, min_size=5, max_size=60))
def test_no_record_is_stamped_at_or_before_what_was_resolved(deeds: list[tuple]) -> None:
    node = Alone()
    for name, *arguments in deeds:
        getattr(node, name)(*arguments)
    node.again("killed")
    for index in range(2):
        node.append(index, 1)
        node.flush()
        node.promises.check_log(node.partition(index))


# ── leaders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def replicated(seed: int = 1) -> tuple[PowerRig, PartitionLog]:
    rig = PowerRig(SimDisk(Random(seed)))
    return rig, stamped(rig)


def send(source: PartitionLog, rig: PowerRig, follower: PartitionLog) -> None:
    """Have a follower hold all that its leader holds, durably."""
    while follower.log_end < source.log_end:
        chunk = source.read_replica_blocking(follower.log_end, 1 << 16)
        follower.append_replicated(chunk.buffers, offset=follower.log_end)
    rig.driver.flush()


def test_the_first_leader_of_a_new_log_has_no_predecessor() -> None:
    rig, partition = replicated()
    lead(partition, 0)
    assert rig.append(partition, "a").append_time_ms == rig.now_ms


def test_a_leader_that_begins_above_its_high_watermark_knows_nothing_until_it_has_passed() -> None:
    rig, partition = replicated()
    rig.follow(partition, 0)
    rig.receive(partition, 0, "a", "b")
    rig.driver.flush()
    lead(partition, 1)
    assert partition.resolve() is None
    stamp = rig.append(partition, "c").append_time_ms
    rig.driver.flush()
    partition.advance_high_watermark(1)
    assert partition.resolve() is None
    partition.advance_high_watermark(2)
    assert partition.resolve() == (2, rig.now_ms)
    rig.now_ms += TAKEOVER_MS + 50
    assert partition.resolve() == (2, stamp - 1)
    partition.advance_high_watermark(3)
    assert partition.resolve() == (3, rig.now_ms)


def test_a_new_leader_begins_above_what_its_predecessor_could_have_promised() -> None:
    rig, partition = replicated()
    rig.follow(partition, 4)
    lead(partition, 5)
    assert rig.append(partition, "a").append_time_ms == rig.now_ms + TAKEOVER_MS


def test_a_new_leader_that_starts_again_at_once_is_still_above_its_predecessor() -> None:
    rig, partition = replicated()
    rig.follow(partition, 4)
    lead(partition, 5)
    again = rig.again()
    partition = again.store.partition("t", 0)
    lead(partition, 6)
    assert again.append(partition, "a").append_time_ms > rig.now_ms + TAKEOVER_MS


def test_a_new_leader_that_cannot_note_its_floor_does_not_lead() -> None:
    rig, partition = replicated()
    rig.follow(partition, 4)
    rig.disk.is_full, rig.disk.has_reserve = True, False
    heard: list[Exception | None] = []
    partition.become_leader(5, heard.append)
    assert isinstance(heard[0], PartitionOffline)
    assert not partition.is_leader
    rig.disk.is_full = False
    lead(partition, 6)
    assert rig.append(partition, "a").append_time_ms >= rig.now_ms + TAKEOVER_MS


def test_a_new_leader_begins_above_the_last_stamp_in_its_log_also_after_a_restart() -> None:
    rig, source = replicated()
    lead(source, 0)
    rig.now_ms += 60_000
    rig.append(source, "a")
    rig.driver.flush()
    for is_restarted in (False, True):
        other, follower = replicated(2)
        other.follow(follower, 0)
        send(source, other, follower)
        follower.roll()  # The last segment is empty: the stamp stands in the one before.
        if is_restarted:
            other = other.again(clean=True)
            follower = other.store.partition("t", 0)
        lead(follower, 1)
        assert other.append(follower, "b").append_time_ms == rig.now_ms + TAKEOVER_MS


def test_a_leader_that_starts_again_has_its_own_floor() -> None:
    rig, partition = replicated()
    lead(partition, 0)
    rig.append(partition, "a")
    rig.driver.flush()
    partition.advance_high_watermark(1)
    rig.now_ms += 1_000
    resolved = partition.resolve()
    assert resolved == (1, rig.now_ms)
    again = rig.again()
    partition = again.store.partition("t", 0)
    assert partition.led_epoch == 0
    again.now_ms = rig.now_ms + 60_000
    lead(partition, 1)
    assert again.write(partition, "b").append_time_ms == again.now_ms
    lead(partition, 3)  # Somebody else had epoch 2.
    assert again.append(partition, "c").append_time_ms == again.now_ms + TAKEOVER_MS


def test_a_leader_that_hears_of_append_time_later_than_its_predecessor_begins_as_high() -> None:
    rig = PowerRig(SimDisk(Random(1)))
    partition = rig.topic()
    rig.follow(partition, 0)
    lead(partition, 1)
    rig.store.configure_topic("t", APPEND_TIME)
    assert rig.write(partition, "a").append_time_ms == rig.now_ms + TAKEOVER_MS
    again = rig.again()
    again.now_ms += 60_000
    partition = again.store.partition("t", 0)
    lead(partition, 2)  # Of epoch 1 this node does not know whether it had noted its floor in time.
    assert again.append(partition, "b").append_time_ms == again.now_ms + TAKEOVER_MS


def test_a_leader_that_lost_its_disk_does_not_trust_its_floor() -> None:
    rig, partition = replicated()
    partition.is_unclean = True
    lead(partition, 0)
    assert rig.append(partition, "a").append_time_ms == rig.now_ms + TAKEOVER_MS


SKEW_MS = (TAKEOVER_MS - 2) // 2
CLUSTER_DEEDS = st.one_of(
    st.tuples(st.just("append")),
    st.tuples(st.just("append")),
    st.tuples(st.just("commit")),
    st.tuples(st.just("resolve")),
    st.tuples(st.just("resolve")),
    st.tuples(st.just("pass_time"), st.sampled_from([0, 1, 1, 20, 1_000, 5_000])),
    st.tuples(st.just("hand_over")),
    st.tuples(st.just("restart")),
)


class Pair:
    """Two replicas of a partition, whose clocks differ by less than a takeover allows for."""

    def __init__(self, skews: tuple[int, int]) -> None:
        self.promises = Promises()
        self.skews = list(skews)
        self.now_ms = NOW
        self.rigs = [PowerRig(SimDisk(Random(seed)), defaults=TopicSettings(segment_bytes=1024)) for seed in (1, 2)]
        for rig in self.rigs:
            stamped(rig)
        self.leader = self.epoch = 0
        self.pass_time(0)
        self.take_roles()

    def log(self, node: int) -> PartitionLog:
        return self.rigs[node].store.partition("t", 0)

    def take_roles(self) -> None:
        """Have the leader lead in a new epoch, and the other follow it, without what the leader lacks."""
        follower, log = 1 - self.leader, self.log(1 - self.leader)
        lead(self.log(self.leader), self.epoch)
        self.rigs[follower].follow(log, self.epoch)
        heard: list[Exception | None] = []
        log.truncate(self.log(self.leader).log_end, heard.append)
        self.rigs[follower].driver.flush()
        assert heard == [None]

    def append(self) -> None:
        appended = self.rigs[self.leader].append(self.log(self.leader), "x")
        self.promises.check(0, appended.last_offset, appended.append_time_ms)

    def commit(self) -> None:
        leader, follower = self.log(self.leader), self.log(1 - self.leader)
        self.rigs[self.leader].driver.flush()
        send(leader, self.rigs[1 - self.leader], follower)
        leader.advance_high_watermark(leader.log_end)
        follower.advance_high_watermark(leader.log_end)

    def resolve(self) -> None:
        log = self.log(self.leader)
        if log.resolve() is not None:
            self.promises.resolve(log)

    def pass_time(self, step_ms: int) -> None:
        self.now_ms += step_ms
        for rig, skew_ms in zip(self.rigs, self.skews, strict=True):
            rig.now_ms = self.now_ms + skew_ms

    def hand_over(self) -> None:
        self.rigs[self.leader].driver.flush()
        self.leader = 1 - self.leader
        self.epoch += 1
        self.take_roles()

    def restart(self) -> None:
        self.rigs[self.leader] = self.rigs[self.leader].again()
        self.pass_time(0)
        self.epoch += 1
        self.take_roles()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(st.integers(-SKEW_MS, SKEW_MS), st.integers(-SKEW_MS, SKEW_MS)),
    st.lists(CLUSTER_DEEDS, min_size=5, max_size=50),
)
def test_no_leader_stamps_at_or_before_what_another_resolved(skews: tuple[int, int], deeds: list[tuple]) -> None:
    pair = Pair(skews)
    for name, *arguments in deeds:
        getattr(pair, name)(*arguments)
    pair.hand_over()
    pair.append()
    pair.commit()
    for node in (0, 1):
        pair.promises.check_log(pair.log(node))
