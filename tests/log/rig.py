"""What the tests of the log share: a store that flushes when told, on a real disk that can be made to fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from walstream.cluster.local import Catalogue, NewTopic
from walstream.errors import WalstreamError
from walstream.log.batch import walk
from walstream.log.disk import Buffer, OsDisk, OsFile
from walstream.log.driver import Done, InlineDriver, T
from walstream.log.partition_log import Appended, PartitionLog
from walstream.log.records import Record, build_batch, iter_records
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore


class FaultyFile(OsFile):
    """A real file whose next calls can fail as a broken disk's would."""

    __slots__ = ("_disk", "_path")

    def __init__(self, disk: FaultyDisk, path: Path, fd: int) -> None:
        super().__init__(fd)
        self._disk = disk
        self._path = path

    def pread(self, length: int, position: int) -> bytes:
        self._disk.check("pread", self._path)
        return super().pread(length, position)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._disk.check("write", self._path)
        return super().pwritev(buffers, position)

    def sync(self) -> None:
        self._disk.check("sync", self._path)
        super().sync()
        self._disk.syncs.append(self._path)


class FaultyDisk(OsDisk):
    """The real disk, with faults on demand: the calls of a kind on paths that match raise an error number."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[tuple[str, str], int] = {}
        self.syncs: list[Path] = []

    def check(self, call: str, path: Path) -> None:
        for (kind, part), number in self.faults.items():
            if kind == call and part in str(path):
                raise OSError(number, errno.errorcode[number])

    def read(self, path: Path) -> bytes | None:
        self.check("read", path)
        return super().read(path)

    def open(self, path: Path, *, create: bool = False) -> OsFile:
        return FaultyFile(self, path, os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o640))


class LateDriver(InlineDriver):
    """Keeps jobs back while `is_late`, as a housekeeping thread that has something long to do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self._jobs: list[Callable[[], None]] = []

    def run(self, job: Callable[[], T], done: Done[T]) -> None:
        """Run a job now, or when its turn comes."""
        if self.is_late:
            self._jobs.append(partial(super().run, job, done))
        else:
            super().run(job, done)

    def run_next(self) -> bool:
        """Run the oldest job that waits; say whether there was one."""
        if self._jobs:
            self._jobs.pop(0)()
            return True
        return False


class Rig:
    """A store in a folder, with clocks that stand still: adding to `now_ms` lets time pass, `step_clock` sets one."""

    def __init__(
        self,
        folder: Path,
        disk: OsDisk | None = None,
        defaults: TopicSettings | None = None,
        driver: InlineDriver | None = None,
        **options: int,
    ) -> None:
        self.folder = folder
        self.disk = disk or FaultyDisk()
        self.now_ms = 1_700_000_000_000
        self._stepped_ms = 0
        self.driver = driver or InlineDriver()
        self.catalogue = Catalogue(self.disk, folder, node_id=1, defaults=defaults or TopicSettings())
        self.store = LogStore(
            self.disk, folder, self.catalogue, self.driver, lambda: self.now_ms, self.monotonic_ms, **options
        )
        if isinstance(self.disk, FaultyDisk):
            self.disk.syncs.clear()  # Opening has syncs of its own.

    def monotonic_ms(self) -> int:
        """Return the clock that `step_clock` does not set."""
        return self.now_ms - self._stepped_ms

    def step_clock(self, by_ms: int) -> None:
        """Set the wall clock forth or back, while no time passes."""
        self.now_ms += by_ms
        self._stepped_ms += by_ms

    def topic(self, name: str = "t", partitions: int = 1, **config: str) -> PartitionLog:
        """Create a topic and return its first partition. `retention_ms="1"` stands for retention.ms=1."""
        settings = {key.replace("_", "."): value for key, value in config.items()}
        self.store.create_topics([NewTopic(name, partitions, settings)])
        return self.store.partition(name, 0)

    def append(self, partition: PartitionLog, *values: str, **fields: int) -> Appended:
        """Append one batch without flushing it."""
        return partition.append(memoryview(batch(*values, now_ms=self.now_ms, **fields)), now_ms=self.now_ms)

    def write(self, partition: PartitionLog, *values: str, **fields: int) -> Appended:
        """Append one batch and flush it."""
        appended = self.append(partition, *values, **fields)
        self.driver.flush()
        return appended

    def settle(self) -> None:
        """Sync the segments and free the journal, as happens every half minute."""
        self.driver.flush()
        self.store.commit.ask_settling()
        self.driver.flush()

    def again(self, *, clean: bool = False, **options: int) -> Rig:
        """Open the folder anew: after a clean stop, or as a killed process leaves it."""
        if clean:
            self.store.close()
            self.store.mark_clean()
        return Rig(self.folder, self.disk, **options)


def batch(*values: str, now_ms: int = 1_700_000_000_000, keys: Sequence[str] | None = None, **fields: int) -> bytearray:
    """Build a batch of records; `keys` gives each a key."""
    records = [
        Record(number, now_ms, keys[number].encode() if keys else None, value.encode() or None)
        for number, value in enumerate(values)
    ]
    return build_batch(records, **fields)  # type: ignore[arg-type]


def values(partition: PartitionLog, offset: int | None = None, bytes_max: int = 1 << 20) -> list[str]:
    """Read everything visible from an offset on."""
    position = partition.log_start if offset is None else offset
    found: list[str] = []
    while position < partition.high_watermark:
        data = partition.read_blocking(position, bytes_max)
        if not len(data):
            break
        for start, header in walk(data):
            for record in iter_records(data[start : start + header.length]):
                if record.offset >= position:
                    found.append((record.value or b"").decode())
            position = header.next_offset
    return found


def outcome(partition: PartitionLog, offset: int) -> list[WalstreamError | None]:
    """Return a list that receives what `when_visible` says."""
    heard: list[WalstreamError | None] = []
    callback: Callable[[WalstreamError | None], None] = heard.append
    partition.when_visible(offset, callback)
    return heard
