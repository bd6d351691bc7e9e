"""The scrub: reads what nobody reads, so that rot is found while other replicas still have what it destroyed.

Owns how far it has come. It goes round all partitions of a node, each from its start to its end, so much a second,
checked like every read, and rests before it goes round again: rot takes its time, and what was read a minute ago would
only come from the page cache. What it finds is noted as for any reader (`PartitionLog.damaged`). Time is counted in
ticks, one a second, so no clock that is set back makes it stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from walstream.errors import CorruptLog, OffsetOutOfRange, PartitionOffline
from walstream.log.driver import Driver
from walstream.log.journal import PartitionKey
from walstream.log.partition_log import PartitionLog

READ_BYTES = 1024 * 1024


class Place(NamedTuple):
    """Where to go on in a round."""

    key: PartitionKey
    offset: int


class Scrub:
    """Checks the logs of a node, little by little."""

    def __init__(
        self,
        bytes_per_s: int,
        interval_s: int,
        driver: Driver,
        partitions: Callable[[], Iterable[PartitionLog]],
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._interval_s = interval_s
        self._driver = driver
        self._partitions = partitions
        self._place: Place | None = None
        """Where to go on; None: at the start of a round."""
        self._ticks = interval_s
        """Since the last round began."""
        self._is_running = False
        self.bytes_checked = 0

    def tick(self) -> None:
        """Read the next bytes on a thread, unless the last ones are still being read. Called about once a second."""
        self._ticks += 1
        if not self._bytes_per_s or self._is_running:
            return
        place = self._place
        if place is None:
            if self._ticks < self._interval_s:
                return
            self._ticks = 0
        partitions = [one for one in self._partitions() if place is None or one.key >= place.key]
        partitions.sort(key=lambda partition: partition.key)
        self._is_running = True
        self._driver.run_long(lambda: check(partitions, place, self._bytes_per_s), self._checked)

    def _checked(self, result: tuple[Place | None, int] | None, error: Exception | None) -> None:  # noqa: ARG002
        self._is_running = False
        self._place, size = result or (None, 0)
        self.bytes_checked += size


def check(partitions: Sequence[PartitionLog], place: Place | None, bytes_max: int) -> tuple[Place | None, int]:
    """Read logs one after the other, the first one from a place in it; return where to go on and the bytes. Blocks."""
    size = 0
    for partition in partitions:
        offset = place.offset if place is not None and partition.key == place.key else 0
        offset, read_bytes = _check_one(partition, max(offset, partition.log_start), bytes_max - size)
        size += read_bytes
        if size >= bytes_max:
            return Place(partition.key, offset), size
    return None, size


def _check_one(partition: PartitionLog, offset: int, bytes_max: int) -> tuple[int, int]:
    """Read a log from an offset on; return where to go on and how many bytes were sound."""
    size = 0
    while size < bytes_max and offset < partition.durable_end:
        try:
            chunk = partition.read_replica_blocking(offset, min(READ_BYTES, bytes_max - size))
        except CorruptLog:
            offset = next((end for start, end in partition.damaged if start <= offset < end), offset + 1)
            continue
        except (OffsetOutOfRange, PartitionOffline, OSError):
            break  # Trimmed or cut meanwhile, or the disk does not read: then who wants it is told so.
        if not chunk.size:
            break
        size += chunk.size
        offset = chunk.next_offset
    return offset, size
