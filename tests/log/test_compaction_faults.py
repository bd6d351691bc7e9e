"""Compaction while the disk refuses calls, partitions return from a full disk, and other work moves the log."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from log.power import PowerRig, UnorderedDisk, after_every_crash
from log.rig import LateDriver, Rig, batch, values
from log.test_cleaner import compacted, fill, table
from walstream.errors import DiskFull, OutOfFiles, PartitionOffline
from walstream.log.batch import stamp
from walstream.log.disk import Buffer, OsDisk, OsFile
from walstream.log.partition_log import PartitionLog
from walstream.log.scrub import check
from walstream.sim.disk import PowerLost, SimDisk


class FailingFile(OsFile):
    """A real file whose changes count as calls of its disk."""

    __slots__ = ("_disk", "_path")

    def __init__(self, disk: FailingDisk, path: Path, fd: int) -> None:
        super().__init__(fd)
        self._disk = disk
        self._path = path

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        try:
            self._disk.call("pwritev", self._path)
        except OSError:
            torn = b"".join(map(bytes, buffers))
            super().pwritev([torn[: self._disk.chance.randrange(len(torn) + 1)]], position)
            raise
        return super().pwritev(buffers, position)

    def sync(self) -> None:
        self._disk.call("sync", self._path)

    def truncate(self, size: int) -> None:
        self._disk.call("truncate", self._path)
        super().truncate(size)


class FailingDisk(OsDisk):
    """A real disk, without the waiting for it, of which any call that changes something may fail."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.chance = Random(seed)
        self.rate = 0.0
        """How many of the calls fail."""
        self.fails: Callable[[str, Path], bool] = lambda call, path: False
        """Which calls fail besides."""
        self.error = errno.ENOSPC
        self.calls: list[str] = []

    def call(self, call: str, path: Path) -> None:
        self.calls.append(f"{call} {path.name}")
        if self.chance.random() < self.rate or self.fails(call, path):
            raise OSError(self.error, os.strerror(self.error))

    def open(self, path: Path, *, create: bool = False) -> OsFile:
        if create:
            self.call("create", path)
        return FailingFile(self, path, os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o640))

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        self.call("write", path)
        neighbour = path.with_name(path.name + ".new")
        neighbour.write_bytes(data)
        neighbour.replace(path)

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        self.call("rename", target)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.call("remove", path)
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        self.call("sync_directory", path)


class Once:
    """Lets the call of a number fail, counted from now."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, call: str, path: Path) -> bool:
        self.left -= 1
        return self.left == -1

    @property
    def has_failed(self) -> bool:
        return self.left < 0


def settled(rig: Rig) -> None:
    """Sync all segments and save a checkpoint, so that all but the last can be compacted."""
    rig.settle()
    rig.store.save_checkpoint(lambda error: None)


def suffixes(partition: PartitionLog) -> set[str]:
    return {path.suffix for path in partition.folder.iterdir()}


FINISHED = {".log", ".index", ".producers"}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_round_of_which_any_call_fails_loses_no_row(tmp_path: Path, error: int) -> None:
    """Each call of a round fails once; then the next ticks end it, and a second round works on what it left."""
    number = 0
    while True:
        disk = FailingDisk()
        rig = Rig(tmp_path / str(number), disk)
        partition = compacted(rig)
        fill(rig, partition, 60, keys=20)
        settled(rig)
        expected = table(partition)[0]
        disk.error, disk.fails = error, (once := Once(number))
        disk.calls.clear()
        rig.store.compact()
        disk.fails = lambda call, path: False
        where = disk.calls[number] if once.has_failed else "nothing failed"
        for segment in partition.segments[:-1]:
            segment.release()  # As after many other segments were read.
        assert table(partition)[0] == expected, where
        rig.now_ms += 1000
        rig.store.tick()
        assert suffixes(partition) <= FINISHED, where
        for segment in partition.segments[:-1]:
            segment.release()
        assert table(partition)[0] == expected, where
        fill(rig, partition, 30, seed=1, keys=20)
        expected = table(partition)[0]
        settled(rig)
        rig.store.compact()
        assert table(partition)[0] == expected, where
        assert partition.cleaned_until > 60, where
        rig = rig.again(clean=number % 2 == 0)
        partition = rig.store.partition("t", 0)
        assert table(partition)[0] == expected, where
        assert (partition.failure, partition.damaged, partition.log_start) == (None, [], 0), where
        if not once.has_failed:
            break
        number += 1
    assert number > 20, "a round makes more calls than that"


@pytest.mark.parametrize("clean", [True, False])
def test_a_round_that_cannot_be_finished_is_finished_before_anything_else(tmp_path: Path, clean: bool) -> None:
    disk = FailingDisk()
    rig = Rig(tmp_path, disk)
    partition = compacted(rig)
    fill(rig, partition, 200, keys=60)
    settled(rig)
    disk.error, disk.fails = errno.EIO, lambda call, path: call == "remove"
    rig.store.compact()
    assert ".swap" in suffixes(partition)
    for _ in range(3):
        fill(rig, partition, 60, keys=60)
        expected = table(partition)[0]
        settled(rig)
        names = [segment.path.name for segment in partition.segments if segment.path.suffix == ".swap"]
        rig.store.compact()
        rig.store.tick()
        assert names == [segment.path.name for segment in partition.segments if segment.path.suffix == ".swap"]
        assert table(partition)[0] == expected
    heard: list[Exception | None] = []
    start = partition.segments[2].base_offset + 1
    rig.store.delete_records(partition, start, heard.append)
    assert heard == [None]
    expected = table(partition)[0]
    disk.fails = lambda call, path: False
    if not clean:
        rig.store.tick()
        assert table(partition)[0] == expected
        assert suffixes(partition) <= FINISHED
        assert min(int(path.stem) for path in partition.folder.glob("*.log")) == partition.segments[0].base_offset
    rig = rig.again(clean=clean)
    partition = rig.store.partition("t", 0)
    assert partition.log_start == start
    assert table(partition)[0] == expected
    assert suffixes(partition) <= FINISHED


def test_a_truncation_waits_for_a_round_that_is_being_finished_once_more(tmp_path: Path) -> None:
    """A truncation knows no `.swap`: what is left of one would be put in place by the next start."""
    disk, driver = FailingDisk(), LateDriver()
    rig = Rig(tmp_path, disk, driver=driver, replicated=True)
    partition = compacted(rig)
    partition.become_leader(1, lambda error: None)
    fill(rig, partition, 200, keys=60)
    partition.advance_high_watermark(190)
    settled(rig)
    disk.error, disk.fails = errno.EIO, lambda call, path: call == "rename" and path.suffix == ".log"
    rig.store.compact()
    assert ".swap" in suffixes(partition)
    partition.become_follower(2, lambda error: None)
    driver.is_late = True
    rig.store.tick()
    heard: list[Exception | None] = []
    partition.truncate(195, heard.append)
    while driver.run_next():
        driver.flush()
    driver.flush()
    assert ".swap" in suffixes(partition), "the disk has refused it once more"
    assert heard == []
    assert partition.is_held
    driver.is_late = False
    disk.fails = lambda call, path: False
    rig.store.tick()
    driver.flush()
    assert heard == [None]
    assert suffixes(partition) <= FINISHED
    assert partition.log_end == 195


def test_a_power_cut_at_any_operation_of_a_round_leaves_the_log_before_or_after_it() -> None:
    """Old segments beside their successor would bring rows back to life whose tombstones are gone."""

    def prepared(disk: SimDisk) -> Callable[[], None]:
        rig = PowerRig(disk, replicated=False)
        partition = compacted(rig)
        fill(rig, partition, 60, keys=15)
        settled(rig)
        return rig.store.compact

    def found(disk: SimDisk) -> tuple[dict[bytes, bytes], int]:
        partition = PowerRig(disk, replicated=False).store.partition("t", 0)
        assert (partition.failure, partition.damaged, partition.log_end) == (None, [], 60)
        for segment, following in pairwise(partition.segments):
            assert all(header.next_offset <= following.base_offset for _, header in segment.headers())
        return table(partition)

    disks = [disk for disk, _ in after_every_crash(prepared, range(8), UnorderedDisk)]
    assert len(disks) > 120, "a round has more operations than that"
    for number, disk in enumerate(disks[1:-1]):
        disk.fuse = number % 16  # The start after it loses the power, too.
        with suppress(PowerLost):
            PowerRig(disk, replicated=False)
        disk.crash()
    outcomes = [found(disk) for disk in disks]
    before, after = outcomes[0], outcomes[-1]
    assert before[0] == after[0]
    assert before[1] > after[1]
    assert all(outcome in (before, after) for outcome in outcomes)


def test_a_gap_is_refused_until_a_checkpoint_says_that_gaps_follow(tmp_path: Path) -> None:
    """Without it a recovery takes the gap for lost records: also while the disk refuses the checkpoint."""
    disk = FailingDisk()
    rig = Rig(tmp_path, disk, replicated=True)
    partition = rig.topic()
    partition.become_follower(1, lambda error: None)
    received = {offset: batch("x") for offset in (0, 7)}
    for offset, data in received.items():
        stamp(data, offset, 1)
    partition.append_replicated([received[0]], offset=0)
    rig.settle()

    def send() -> None:
        partition.append_replicated([received[7]], offset=1, may_have_gaps=True)

    disk.fails = lambda call, path: (call, path.name) == ("write", "checkpoint.json")
    for _ in range(3):
        with pytest.raises(PartitionOffline, match="is being saved"):
            send()
    disk.fails = lambda call, path: False
    with pytest.raises(PartitionOffline, match="is being saved"):
        send()
    send()
    rig.driver.flush()
    again = rig.again(replicated=True).store.partition("t", 0)
    assert (again.log_end, again.damaged, again.is_unclean) == (8, [], False)


def test_a_gap_is_refused_by_a_log_that_was_reopened_before_the_checkpoint_said_so(tmp_path: Path) -> None:
    """A reopening recovers from the state in memory, which is not durable."""
    disk = FailingDisk()
    rig = Rig(tmp_path, disk, replicated=True)
    partition = rig.topic()
    partition.become_follower(1, lambda error: None)
    received = {offset: batch("x") for offset in (0, 1, 7)}
    for offset, data in received.items():
        stamp(data, offset, 1)
    partition.append_replicated([received[0]], offset=0)
    rig.settle()

    def send() -> None:
        partition.append_replicated([received[7]], offset=1, may_have_gaps=True)

    disk.fails = lambda call, path: (call, path.name) == ("write", "checkpoint.json")
    with pytest.raises(PartitionOffline, match="is being saved"):
        send()
    partition.failed(OutOfFiles("t-0: too many open files"))
    rig.store.tick()
    rig.driver.flush()
    assert partition.write_error is None
    with pytest.raises(PartitionOffline, match="is being saved"):
        send()


@pytest.mark.parametrize("clean", [True, False])
def test_a_round_that_cannot_be_undone_is_finished_by_the_next_start(tmp_path: Path, clean: bool) -> None:
    """Its successors are whole and have their final names. The checkpoint lists the segments that they replace, also
    that of a clean stop: those are not missing."""
    disk = FailingDisk()
    rig = Rig(tmp_path, disk)
    partition = compacted(rig)
    fill(rig, partition, 200)
    settled(rig)
    segments, expected = partition.segments, table(partition)[0]
    disk.error = errno.EIO
    disk.fails = lambda call, path: call == "sync_directory" or (call == "remove" and path.suffix == ".swap")
    rig.store.compact()
    assert partition.segments == segments, "readers see the segments as they were"
    assert ".swap" in suffixes(partition)
    disk.fails = lambda call, path: False
    rig.store.save_checkpoint(lambda error: None)
    rig = rig.again(clean=clean)
    partition = rig.store.partition("t", 0)
    assert suffixes(partition) <= FINISHED
    assert len(partition.segments) < len(segments)
    assert (partition.failure, partition.damaged, partition.is_unclean) == (None, [], False)
    assert table(partition)[0] == expected


def test_another_partition_is_compacted_while_one_cannot_be_finished(tmp_path: Path) -> None:
    disk = FailingDisk()
    rig = Rig(tmp_path, disk)
    first = compacted(rig)
    config = {"cleanup_policy": "compact", "segment_bytes": "2048", "min_cleanable_dirty_ratio": "0"}
    second = rig.topic("u", **config)
    fill(rig, first, 100)
    settled(rig)
    disk.fails = lambda call, path: call == "remove" and first.folder in path.parents
    rig.store.compact()
    assert ".swap" in suffixes(first)
    fill(rig, second, 100)
    settled(rig)
    rig.store.compact()
    assert second.cleaned_until > 0


class Delayed:
    """Runs background jobs at once and delivers their completions later, as a busy event loop does."""

    def __init__(self, rig: Rig) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        rig.driver.run = rig.driver.run_long = self._run  # type: ignore[method-assign,assignment]
        rig.driver.post = self.waiting.append  # type: ignore[method-assign]

    def _run(self, job: Callable[[], object], done: Callable[[object, Exception | None], None]) -> None:
        try:
            result = job()
        except Exception as error:
            failure = error
            self.waiting.append(lambda: done(None, failure))
        else:
            self.waiting.append(lambda: done(result, None))

    def deliver(self, count: int = 1000) -> bool:
        """Deliver so many completions, or all; tell whether there was one."""
        delivered = 0
        while self.waiting and delivered < count:
            self.waiting.popleft()()
            delivered += 1
        return delivered > 0


def meet_a_full_disk(rig: Rig, partition: PartitionLog) -> None:
    disk = rig.disk
    assert isinstance(disk, FailingDisk)
    disk.error, disk.fails = errno.ENOSPC, lambda call, path: call == "pwritev"
    rig.append(partition, "refused", keys=["refused"])
    rig.driver.flush()
    assert isinstance(partition.write_error, DiskFull)
    disk.fails = lambda call, path: False


@pytest.mark.parametrize("steps", range(7))
def test_a_partition_returns_from_a_full_disk_while_it_is_compacted(tmp_path: Path, steps: int) -> None:
    rig = Rig(tmp_path, FailingDisk())
    partition = compacted(rig)
    fill(rig, partition, 300)
    settled(rig)
    expected = table(partition)[0]
    loop = Delayed(rig)
    rig.store.compact()
    loop.deliver(steps)
    meet_a_full_disk(rig, partition)
    rig.store.tick()
    rig.driver.flush()
    while loop.deliver(1):
        rig.driver.flush()
    assert partition.write_error is None
    assert table(partition)[0] == expected
    rig = Rig(tmp_path, FailingDisk())
    partition = rig.store.partition("t", 0)
    assert table(partition)[0] == expected
    assert (partition.log_start, partition.damaged) == (0, [])


def test_no_round_begins_while_a_partition_returns_from_a_full_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FailingDisk())
    partition = compacted(rig)
    fill(rig, partition, 200)
    settled(rig)
    expected = table(partition)[0]
    meet_a_full_disk(rig, partition)
    rig.store.tick()
    rig.store.compact()
    rig.driver.flush()
    assert partition.write_error is None
    for clean in (None, True, False):
        if clean is not None:
            rig = rig.again(clean=clean)
            partition = rig.store.partition("t", 0)
        assert table(partition)[0] == expected
        assert partition.damaged == []


def numbered(rig: Rig) -> PartitionLog:
    partition = rig.topic(segment_bytes="1024")
    for number in range(40):
        rig.write(partition, f"{number:060d}")
    settled(rig)
    return partition


@pytest.mark.parametrize("steps", range(5))
def test_the_log_start_does_not_go_back_when_a_partition_returns_from_a_full_disk(tmp_path: Path, steps: int) -> None:
    rig = Rig(tmp_path, FailingDisk())
    partition = numbered(rig)
    meet_a_full_disk(rig, partition)
    loop = Delayed(rig)
    heard: list[Exception | None] = []

    def delete() -> None:
        rig.store.delete_records(partition, 30, heard.append)

    rig.store.tick()
    for step in range(6):
        if step == steps:
            delete()
        rig.driver.flush()
        loop.deliver(1)
    while loop.deliver(1):
        rig.driver.flush()
    assert heard == [None]
    assert partition.write_error is None
    for log in (partition, Rig(tmp_path, FailingDisk()).store.partition("t", 0)):
        assert log.log_start == 30
        assert [int(value) for value in values(log)] == list(range(30, 40))
        bases = [segment.base_offset for segment in log.segments]
        assert bases[0] <= 30 < bases[1]
    assert min(int(path.stem) for path in partition.folder.glob("*.log")) == bases[0]


def test_a_topic_that_is_deleted_while_it_returns_from_a_full_disk_is_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FailingDisk())
    partition = numbered(rig)
    meet_a_full_disk(rig, partition)
    rig.store.tick()
    rig.store.delete_topics(["t"])
    rig.driver.flush()
    assert isinstance(partition.write_error, PartitionOffline)
    assert not isinstance(partition.write_error, DiskFull)
    assert list((tmp_path / "topics").iterdir()) == []


def test_a_partition_is_reopened_once_however_often_the_clock_ticks(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FailingDisk())
    partition = numbered(rig)
    meet_a_full_disk(rig, partition)
    loop = Delayed(rig)
    for _ in range(3):
        rig.store.tick()
        rig.driver.flush()
    while loop.deliver(1):
        rig.driver.flush()
    assert partition.truncations == 1
    rig.write(partition, "0")
    assert len(values(partition)) == 41


def test_a_truncation_that_waits_for_a_reopening_is_refused_and_a_reset_follows_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FailingDisk(), replicated=True)
    partition = rig.topic(segment_bytes="1024")
    partition.become_leader(1, lambda error: None)
    for number in range(40):
        rig.write(partition, f"{number:060d}")
    partition.advance_high_watermark(30)
    settled(rig)
    meet_a_full_disk(rig, partition)
    partition.become_follower(2, lambda error: None)
    rig.store.tick()
    heard: list[Exception | None] = []
    partition.truncate(35, heard.append)
    assert [type(error) for error in heard] == [DiskFull]
    partition.reset(50, heard.append)
    rig.driver.flush()
    assert heard[1:] == [None]
    assert (partition.log_start, partition.log_end, partition.write_error) == (50, 50, None)
    again = rig.again(replicated=True).store.partition("t", 0)
    assert (again.log_start, again.log_end) == (50, 50)


def test_the_high_watermark_does_not_go_back_when_a_partition_returns_from_a_full_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path, FailingDisk(), replicated=True)
    partition = rig.topic()
    partition.become_leader(1, lambda error: None)
    for number in range(10):
        rig.write(partition, str(number))
    partition.advance_high_watermark(5)
    meet_a_full_disk(rig, partition)
    rig.store.tick()
    partition.advance_high_watermark(10)
    rig.driver.flush()
    assert partition.write_error is None
    assert partition.high_watermark == 10


def test_deleted_records_take_no_segment_that_compaction_has_put_in_their_place(tmp_path: Path) -> None:
    """DeleteRecords drops the first segments of a group that compaction merges into one of the first one's name."""
    for steps in range(9):
        rig = Rig(tmp_path / str(steps), FailingDisk())
        partition = compacted(rig)
        fill(rig, partition, 300, keys=10)
        settled(rig)
        start = partition.segments[3].base_offset
        loop = Delayed(rig)
        rig.store.compact()
        loop.deliver(steps)
        rig.store.delete_records(partition, start, lambda error: None)
        expected = table(partition)[0]
        loop.deliver()
        for segment in partition.segments[:-1]:
            segment.release()
        assert table(partition)[0] == expected
        again = Rig(tmp_path / str(steps), FailingDisk()).store.partition("t", 0)
        assert again.log_start == start
        assert table(again)[0] == expected


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_reader_on_another_thread_follows_segments_that_compaction_replaces(tmp_path: Path, number: int) -> None:
    rig = Rig(tmp_path, FailingDisk())
    partition = compacted(rig)
    fill(rig, partition, 300)
    settled(rig)
    for segment in partition.segments[:-1]:
        segment.release()
    old, read = partition.segments, type(partition.segments[0]).read
    expected = table(partition)[0]
    for segment in partition.segments[:-1]:
        segment.release()

    def late(segment, *args, **options):  # Between finding the segment and opening its file a round has ended.
        if segment is old[number] and partition.segments is old:
            rig.store.compact()
        return read(segment, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(partition.segments[0]), "read", late)
        assert table(partition)[0] == expected
    assert partition.segments is not old
    assert partition.damaged == []


# ── damage in a compacted log ────────────────────────────────────────────────────────────────────────────────────────


def leading(rig: Rig) -> PartitionLog:
    """Return a leader's log that is compacted and has gaps between its batches."""
    partition = rig.topic(cleanup_policy="compact", segment_bytes="4096", min_cleanable_dirty_ratio="0")
    partition.become_leader(1, lambda error: None)
    for number in range(300):
        rig.write(partition, f"value-{number}" * 2, keys=[f"k{number % 3 if number % 5 else number}"])
    partition.advance_high_watermark(partition.log_end)
    settled(rig)
    rig.store.compact()
    settled(rig)
    return partition


def rot(partition: PartitionLog, segment: int, number: int, *, in_header: bool = False) -> tuple[int, int]:
    """Spoil the last bytes of a batch, or its length; return the range that is found damaged."""
    position, header = list(partition.segments[segment].headers())[number]
    with partition.segments[segment].path.open("r+b") as file:
        file.seek(position + (8 if in_header else header.length - 4))
        file.write(b"\xff\xff\xff\xff")
    check([partition], None, 1 << 20)
    (damaged,) = partition.damaged
    assert damaged[0] <= header.base_offset < damaged[1]
    return damaged


def repair_from(rig: Rig, partition: PartitionLog, peer: PartitionLog, bytes_max: int) -> list[Exception | None]:
    """Ask a peer for the first damaged range until it is sound, or refused."""
    heard: list[Exception | None] = []
    while partition.damaged and not any(heard):
        start, end = partition.damaged[0]
        chunk = peer.read_for_repair(start, end, bytes_max)
        partition.repair(start, [memoryview(bytearray(buffer)) for buffer in chunk.buffers], heard.append)
        rig.driver.flush()
    return heard


def test_any_batch_of_a_compacted_log_is_repaired_from_a_peer_with_the_same(tmp_path: Path) -> None:
    peer = leading(Rig(tmp_path / "peer", FailingDisk(), replicated=True))
    rig = Rig(tmp_path / "own", FailingDisk(), replicated=True)
    partition = leading(rig)
    expected = table(partition)
    assert expected == table(peer)
    for segment in range(2):
        for number in range(len(list(partition.segments[segment].headers()))):
            damaged = rot(partition, segment, number)
            assert not any(repair_from(rig, partition, peer, 1 << 20)), (segment, number, damaged)
            assert partition.damaged == []
            assert table(partition) == expected
    again = rig.again(replicated=True).store.partition("t", 0)
    assert again.damaged == []
    assert table(again) == expected


def test_neighbours_in_a_compacted_log_are_repaired_batch_by_batch(tmp_path: Path) -> None:
    peer = leading(Rig(tmp_path / "peer", FailingDisk(), replicated=True))
    rig = Rig(tmp_path / "own", FailingDisk(), replicated=True)
    partition = leading(rig)
    expected = table(partition)
    for number in (3, 4, 5):
        position, header = list(peer.segments[0].headers())[number]
        with partition.segments[0].path.open("r+b") as file:
            file.seek(position + header.length - 4)
            file.write(b"\xff\xff\xff\xff")
    check([partition], None, 1 << 20)
    heard = repair_from(rig, partition, peer, 1)
    assert heard == [None] * 3
    assert partition.damaged == []
    assert table(partition) == expected


@pytest.mark.parametrize("in_header", [True, False])
def test_a_replica_that_was_compacted_differently_copies_again_from_the_damage_on(
    tmp_path: Path, in_header: bool
) -> None:
    rig = Rig(tmp_path / "own", FailingDisk(), replicated=True)
    partition = leading(rig)
    peer_rig = Rig(tmp_path / "peer", FailingDisk(), replicated=True)
    peer = leading(peer_rig)
    for number in range(0, 300, 5):  # The peer has later values of all keys, and compacts again.
        peer_rig.write(peer, "newer", keys=[f"k{number}"])
    peer.advance_high_watermark(peer.log_end)
    settled(peer_rig)
    peer_rig.store.compact()
    expected = table(peer)[0]
    start, _ = rot(partition, 0, 6, in_header=in_header)
    partition.become_follower(1, lambda error: None)
    assert any(repair_from(rig, partition, peer, 1 << 20)), "the peer has nothing that fits"
    heard: list[Exception | None] = []
    partition.truncate(start, heard.append)  # As the leader orders after some attempts.
    rig.driver.flush()
    assert heard == [None]
    assert partition.log_end <= start
    assert partition.damaged == []
    last = partition.segments[-1]
    assert last.size == sum(header.length for _, header in last.headers()), "nothing of the damage is left"
    while partition.log_end < peer.log_end:
        chunk = peer.read_replica_blocking(partition.log_end, 1000)
        partition.append_replicated(chunk.buffers, offset=partition.log_end)
        rig.driver.flush()
    partition.advance_high_watermark(partition.log_end)
    check([partition], None, 1 << 20)
    for log in (partition, rig.again(replicated=True).store.partition("t", 0)):
        log.high_watermark = log.log_end
        assert log.damaged == []
        assert table(log)[0] == expected


# ── random faults ────────────────────────────────────────────────────────────────────────────────────────────────────


SMALL_JOURNAL = {"journal_bytes_max": 4096, "journal_prepared_bytes": 2048}


class Fuzz:
    """Random work on one partition while calls of the disk fail now and then.

    Promise: the last value of each key is its last acknowledged one, or one written after it, now and after restarts.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.disk = FailingDisk(seed)
        self.rig = Rig(folder, self.disk, **SMALL_JOURNAL)
        self.rig.topic(cleanup_policy="compact", segment_bytes="1500", min_cleanable_dirty_ratio="0")
        self.tried: dict[bytes, list[bytes]] = {}
        self.sure: dict[bytes, int] = {}
        """By key the number of its last acknowledged value."""
        self.count = 0
        self.log_start = 0

    @property
    def partition(self) -> PartitionLog:
        return self.rig.store.partition("t", 0)

    def check(self, where: str) -> None:
        partition = self.partition
        assert partition.failure is None, where
        assert partition.damaged == [], where
        assert partition.log_start >= self.log_start, where
        rows = table(partition)[0]
        for key, number in self.sure.items():
            assert rows.get(key) in self.tried[key][number:], (where, key, rows.get(key), partition)

    def append(self) -> None:
        for _ in range(self.chance.randrange(1, 6)):
            key = f"k{self.chance.randrange(40)}"
            value = f"{self.seed}-{self.count}" * self.chance.randrange(1, 12)
            self.count += 1
            try:
                appended = self.rig.append(self.partition, value, keys=[key])
            except PartitionOffline:
                return
            tried = self.tried.setdefault(key.encode(), [])
            tried.append(value.encode())
            self.partition.when_visible(appended.last_offset, self._acknowledge(key.encode(), len(tried) - 1))

    def _acknowledge(self, key: bytes, number: int) -> Callable[[Exception | None], None]:
        def acknowledge(error: Exception | None) -> None:
            if error is None:
                self.sure[key] = max(number, self.sure.get(key, 0))

        return acknowledge

    def restart(self) -> None:
        self.disk.rate = 0
        self.rig = self.rig.again(clean=self.chance.random() < 0.5, **SMALL_JOURNAL)

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.disk.rate = self.chance.choice([0, 0, 0, 0.02, 0.1])
            self.disk.error = errno.ENOSPC if self.chance.random() < 0.5 else errno.EIO
            self.rig.now_ms += self.chance.choice([1, 1000])
            action = self.chance.choice("aaaaaaaaafscmmtr")
            if action == "a":
                self.append()
            elif action == "f":
                self.rig.driver.flush()
            elif action == "s":
                self.rig.settle()
            elif action == "c":
                self.rig.store.save_checkpoint(lambda error: None)
            elif action == "m":
                self.rig.store.compact()
            elif action == "t":
                self.rig.now_ms += 6000
                self.rig.store.tick()
            else:
                self.restart()
            for segment in self.partition.segments[:-1]:
                if self.chance.random() < 0.1:
                    segment.release()
            if action in "fmtr":
                self.disk.rate = 0
                self.check(f"seed {self.seed}, step {step}, after {action}")
        self.restart()
        self.check(f"seed {self.seed}, at the end")


FUZZ_SEEDS = 300 if os.environ.get("WALSTREAM_TEST_ROUNDS") == "full" else 12


@pytest.mark.parametrize("seed", range(FUZZ_SEEDS))
def test_random_faults_lose_no_acknowledged_value(tmp_path: Path, seed: int) -> None:
    Fuzz(tmp_path, seed).run(200)


def test_a_start_may_be_broken_off_after_it_has_finished_the_round_of_a_clean_stop() -> None:
    """The checkpoint of the stop lists the segments from before the round: the next start compares nothing with it."""

    def stopped() -> SimDisk:
        disk = SimDisk(Random(1))
        rig = PowerRig(disk, replicated=False)
        partition = rig.topic(cleanup_policy="compact", min_cleanable_dirty_ratio="0.0")
        for number in range(40):
            rig.write(partition, "v" * 20, keys=[f"k{number % 3}"])
        rig.settle()
        rig.store.save_checkpoint(lambda _: None)
        cleaner, saved = rig.store._rounds._cleaner, rig.store._saver.saved.partition(partition.key)
        assert saved is not None
        work = cleaner.plan(partition, saved.segment, rig.now_ms)
        assert work is not None
        cleaner.execute(work)
        partition.gaps_below = work.reached
        rig.store.save_checkpoint(lambda _: None)
        cleaner.decide(work)
        rig.store.close()
        rig.store.mark_clean()
        return disk

    operations, is_over = 0, False
    while not is_over:
        disk = stopped()
        disk.fuse = operations
        try:
            PowerRig(disk, replicated=False)
            is_over = True
        except PowerLost:
            pass
        disk.fuse = None
        if operations % 2:
            disk.crash()
        partition = PowerRig(disk, replicated=False).store.partition("t", 0)
        assert (partition.damaged, partition.is_unclean, partition.log_end) == ([], False, 40), operations
        operations += 1
