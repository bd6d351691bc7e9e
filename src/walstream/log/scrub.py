"""The scrub: reads what nobody reads, so that rot is found while other replicas still have what it destroyed.

Owns how far it has come in each partition. Every tick it reads so many bytes, checked like every read, and goes on from
there at the next; at the end of a log it turns to the next partition, and after the last to the first again. What it
finds is noted as for any reader (`PartitionLog.damaged`). It reads through the page cache, so a hot log is read from
memory; those that nobody reads are read from the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from walstream.errors import CorruptLog, OffsetOutOfRange, PartitionOffline
from walstream.log.driver import Driver
from walstream.log.journal import PartitionKey
from walstream.log.partition_log import PartitionLog

READ_BYTES = 1024 * 1024


class Scrub:
    """Checks the logs of a node, little by little."""

    def __init__(self, bytes_per_s: int, driver: Driver, partitions: Callable[[], Iterable[PartitionLog]]) -> None:
        self._bytes_per_s = bytes_per_s
        self._driver = driver
        self._partitions = partitions
        self._last: PartitionKey | None = None
        self._offset = 0
        self._is_running = False
        self.bytes_checked = 0

    def tick(self) -> None:
        """Read the next bytes on a thread, unless the last ones are still being read. Called about once a second."""
        if not self._bytes_per_s or self._is_running:
            return
        partitions = sorted(self._partitions(), key=lambda partition: partition.key)
        if not partitions:
            return
        known = next((partition for partition in partitions if partition.key == self._last), None)
        if known is None or self._offset >= known.durable_end:
            later = (partition for partition in partitions if self._last is None or partition.key > self._last)
            known = next(later, partitions[0])
            self._last, self._offset = known.key, 0
        partition, offset = known, max(self._offset, known.log_start)
        self._is_running = True
        self._driver.run_long(lambda: check(partition, offset, self._bytes_per_s), self._checked)

    def _checked(self, result: tuple[int, int] | None, error: Exception | None) -> None:
        self._is_running = False
        if result is None or error is not None:
            self._offset = 2**63 - 1  # Turn to the next partition.
        else:
            self._offset = result[0]
            self.bytes_checked += result[1]


def check(partition: PartitionLog, offset: int, bytes_max: int) -> tuple[int, int]:
    """Read a log from an offset on; return where to go on and how many bytes were sound. Blocks."""
    size = 0
    while size < bytes_max and offset < partition.durable_end:
        try:
            chunk = partition.read_replica_blocking(offset, min(READ_BYTES, bytes_max - size))
        except CorruptLog:
            offset = next((end for start, end in partition.damaged if start <= offset < end), offset + 1)
            continue
        except (OffsetOutOfRange, PartitionOffline, FileNotFoundError):
            break  # Trimmed or cut meanwhile.
        if not chunk.size:
            break
        size += chunk.size
        offset = chunk.next_offset
    else:
        return offset, size
    return 2**63 - 1, size
