"""One node of a simulated storage world: the real store on a simulated disk, and its lives.

Everything that happens on the node goes through `run`. A life begins with `start` and ends with `stop` (cleanly),
`kill`, or a loss of power, also in the middle of an operation (the disk's fuse); the disk outlives it.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from walstream.cluster.local import Catalogue
from walstream.errors import WalstreamError
from walstream.log.partition_log import PartitionLog
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore
from walstream.sim.checkers import Violation
from walstream.sim.disk import PowerLost, SimDisk
from walstream.sim.driver import Pace, SimDriver

if TYPE_CHECKING:
    from walstream.sim.storage import StorageWorld

FOLDER = Path("/data")
CLUSTER_ID = "simulated"
JOURNAL_BYTES = 4_096
INTERVAL_MS = 2_000
"""Of retention and of checkpoints."""

FILES_BESIDE = 8
"""Files that are open beside segments: the journal's, those of compaction and of a scan."""


class StorageNode:
    """A machine with a disk, and the store on it while its process runs."""

    store: LogStore
    driver: SimDriver

    def __init__(self, world: StorageWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.pace = Pace()
        self.disk = SimDisk(world.clock.random, world.scenario.capacity)
        self.disk.now_ms = world.wall_ms
        self.is_up = False
        self.lives = 0
        self.roles: dict[tuple[UUID, int], int] = {}
        """The epoch in which a partition has its role; -1 while it is being taken."""
        self.busy: set[tuple[UUID, int]] = set()
        """Partitions that are being truncated or reset."""
        self.joined_version = 0
        self._boot_ms = 0
        self.failures_before = 0
        """So many operations had failed when this life began."""

    @property
    def name(self) -> str:
        """Its name in the trace."""
        return f"n{self.number}"

    def monotonic_ms(self) -> int:
        """Return the time since an arbitrary moment of this life."""
        return self._boot_ms + self.world.clock.now_us // 1_000

    # ── lives ────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin a life, unless the power goes again meanwhile or the disk fails."""
        assert not self.is_up
        world, disk = self.world, self.disk
        disk.begin_process()
        self._boot_ms = world.clock.between(0, 1 << 20)
        self.roles.clear()
        self.busy.clear()
        self.driver = SimDriver(world.clock, disk, self.pace, self.run)
        self.failures_before = disk.failures
        try:
            self._open()
        except PowerLost:
            self._lose_power("during its start")
            return
        except (WalstreamError, OSError) as error:
            self.driver.crash()
            world.trace(self.name, f"does not start: {error}")
            if disk.failures == self.failures_before:
                raise Violation("a start succeeds", f"node {self.number} does not start: {error}") from error
            return
        except Exception as error:
            raise unexpected(error) from error
        self.is_up = True
        self.lives += 1
        world.trace(self.name, f"up, life {self.lives}, {list(self.store.partitions.values())}")

    def _open(self) -> None:
        world, scenario = self.world, self.world.scenario
        catalogue = Catalogue(
            self.disk, FOLDER, node_id=self.number, defaults=TopicSettings(), founds_cluster=scenario.is_alone
        )
        if not scenario.is_alone and not catalogue.cluster_id:
            # The disk of the first life was there before any topic.
            self.joined_version = world.version if self.lives else 0
            catalogue.apply(catalogue.join(CLUSTER_ID, self.joined_version))
        if not scenario.is_alone and catalogue.version < world.version:
            catalogue.apply(catalogue.take_over(world.version, world.topics.values()))
        self.store = LogStore(
            self.disk, FOLDER, catalogue, self.driver, world.wall_ms, self.monotonic_ms,
            replicated=not scenario.is_alone, journal_bytes_max=JOURNAL_BYTES,
            journal_prepared_bytes=JOURNAL_BYTES // 2, checkpoint_interval_ms=INTERVAL_MS,
            retention_interval_ms=INTERVAL_MS, open_files_max=scenario.open_files_max,
            compaction_keys_max=scenario.compaction_keys_max, new_id=world.new_id,
        )  # fmt: skip

    def stop(self) -> None:
        """Stop cleanly. Where the disk refuses the last checkpoint, it is as after a kill."""
        world = self.world
        try:
            self.store.close()
            self.store.mark_clean()
        except PowerLost:
            self._lose_power("during its stop")
            return
        except (WalstreamError, OSError) as error:
            world.trace(self.name, f"is not stopped cleanly: {error}")
            self._end(is_clean=False)
            return
        except Exception as error:
            raise unexpected(error) from error
        world.trace(self.name, "stopped")
        self._end(is_clean=True)

    def kill(self) -> None:
        """End the process; the disk keeps what was written."""
        self.world.trace(self.name, "killed")
        self.driver.crash()
        self._end(is_clean=False)

    def lose_power(self) -> None:
        """End the process, and lose what the disk had not made durable."""
        self._lose_power("suddenly")

    def _lose_power(self, when: str) -> None:
        self.world.trace(self.name, f"loses power {when}")
        self.driver.crash()
        self.disk.crash()
        self._end(is_clean=False)

    def _end(self, *, is_clean: bool) -> None:
        self.disk.fuse = None
        if self.is_up:
            self.is_up = False
            self.world.ended(self, is_clean=is_clean)

    # ── what happens on it ───────────────────────────────────────────────────────────────────────────────────────

    def run(self, action: Callable[[], None]) -> None:
        """Do something on the event loop, unless the process is dead."""
        if not self.is_up:
            return
        try:
            action()
            if self.is_up:
                self.driver.pump()
        except PowerLost:
            self._lose_power("in the middle of an operation")
        except Exception as error:
            raise unexpected(error) from error

    def log_of(self, key: tuple[UUID, int]) -> PartitionLog | None:
        """Return the partition, if the node is up and has it."""
        if not self.is_up:
            return None
        topic = self.world.accounts[key].topic
        log = self.store.partitions.get((topic, key[1]))
        return log if log is not None and log.key == key else None

    def check_open_files(self) -> None:
        """The files of segments stay within their limit: in use, behind the journal, and being flushed."""
        limit = 4 * self.world.scenario.open_files_max + FILES_BESIDE
        if self.disk.open_files > limit:
            gc.collect()
        if self.disk.open_files > limit:
            raise Violation("open files", f"node {self.number} has {self.disk.open_files} files open; {limit} may be")


def unexpected(error: Exception) -> BaseException:
    """Return what an exception of the product means; one of the simulator stays what it is."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(last.filename)
    if path.parent.name == "sim" and path.name.startswith("storage"):
        return error
    return Violation(
        "housekeeping keeps running", f"{type(error).__name__}: {error} ({path.name}:{last.lineno} in {last.name})"
    )
