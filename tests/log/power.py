"""A store on a disk that loses what was not synced: the power goes at any operation, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from log.rig import Rig, batch
from walstream.log.batch import parse_header, stamp
from walstream.log.partition_log import PartitionLog
from walstream.log.settings import TopicSettings
from walstream.sim.disk import PowerLost, SimDisk, _make_durable

FOLDER = Path("/data")
OPTIONS = {"journal_bytes_max": 4096, "journal_prepared_bytes": 2048}
SMALL = TopicSettings(segment_bytes=400)


class UnorderedDisk(SimDisk):
    """A disk on which names that were not synced reach the platter in any order, as POSIX allows."""

    def crash(self) -> None:
        """Lose what was not made durable, or some of it."""
        for change in self._changes:
            if self._random.random() < 0.5:
                _make_durable(change)
        self._changes.clear()
        super().crash()


class PowerRig(Rig):
    """A store in a cluster (`replicated`) or alone, on a simulated disk."""

    disk: SimDisk  # type: ignore[assignment]

    def __init__(self, disk: SimDisk, *, replicated: bool = True, defaults: TopicSettings = SMALL) -> None:
        self.replicated = replicated
        self.defaults = defaults
        super().__init__(FOLDER, disk, defaults, replicated=replicated, **OPTIONS)  # type: ignore[arg-type]

    def again(self, *, clean: bool = False, **_: int) -> PowerRig:
        """Open the disk anew, after a clean stop or as a killed process leaves it."""
        if clean:
            self.store.close()
            self.store.mark_clean()
        return PowerRig(self.disk, replicated=self.replicated, defaults=self.defaults)

    def receive(self, partition: PartitionLog, epoch: int, *values: str, **fields: int) -> None:
        """Be sent a batch by a leader, without flushing it."""
        data = batch(*values, now_ms=self.now_ms, **fields)
        stamp(data, partition.log_end, epoch)
        partition.append_replicated([memoryview(data)], offset=partition.log_end)

    def follow(self, partition: PartitionLog, epoch: int) -> None:
        """Make the log a follower's."""
        heard: list[Exception | None] = []
        partition.become_follower(epoch, heard.append)
        assert heard == [None]


def after_every_crash(
    prepare: Callable[[SimDisk], Callable[[], None]], seeds: range, make_disk: Callable[[Random], SimDisk] = SimDisk
) -> Iterator[tuple[SimDisk, bool]]:
    """Yield the disk as it comes back after the power went at each operation of an action, and whether it had ended.

    `prepare` makes the world on a disk and returns the action. The last one yielded has carried it out.
    """
    for seed in seeds:
        operations, is_over = 0, False
        while not is_over:
            disk = make_disk(Random(seed * 1_000_003 + operations))
            action = prepare(disk)
            disk.fuse = operations
            try:
                action()
                is_over = True
            except PowerLost:
                pass
            disk.crash()
            yield disk, is_over
            operations += 1


def contents(partition: PartitionLog) -> list[tuple[int, int, int]]:
    """Return (base offset, epoch, CRC) of every durable batch; fails where one cannot be read."""
    offset, found = partition.log_start, []
    while offset < partition.durable_end:
        chunk = partition.read_replica_blocking(offset, 1)
        header = parse_header(chunk.buffers[0])
        assert header.base_offset == offset
        found.append((header.base_offset, header.leader_epoch, header.crc))
        offset = chunk.next_offset
    return found
