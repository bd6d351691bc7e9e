"""What the log of one partition expects of those around it: the store that holds it, and who replicates it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from walstream.errors import WalstreamError
from walstream.log.append_clock import AppendClock
from walstream.log.disk import Disk
from walstream.log.group_commit import Write
from walstream.log.journal import PartitionKey
from walstream.log.producers import Row
from walstream.log.segment import OpenFiles, Segment

if TYPE_CHECKING:
    from walstream.log.reading import ReadableLog

Done = Callable[[Exception | None], None]


class Listener(Protocol):
    """Who replicates a partition hears of it through this: per flush, wait and finding, never per record."""

    def awaited(self) -> None:
        """Somebody waits for the high watermark to pass what was appended. Called very often: note it, look later."""

    def became_durable(self) -> None:
        """`durable_end` has moved. Once for each flush, or twice if the flush touched two segments."""

    def went_offline(self, error: WalstreamError) -> None:
        """The log takes no more writes."""

    def came_back(self) -> None:
        """The log was opened again after a full disk, without a role; offsets may be lower than before."""

    def found_damage(self) -> None:
        """There is more in `damaged` than before."""


class Shared(Protocol):
    """What the partitions of a node share."""

    disk: Disk
    open_files: OpenFiles
    producers_max: int
    append_clock: AppendClock

    def submit(self, write: Write) -> None:
        """Queue a write for group commit."""

    def now_ms(self) -> int:
        """Return the wall clock."""

    def monotonic_ms(self) -> int:
        """Return the time of a clock that is never set, from any beginning."""

    def sealed(self, segment: Segment, snapshot_path: Path, producers: list[Row]) -> None:
        """Hear that a segment takes no more batches, and what to write beside the one after it."""

    def run_between(self, task: Callable[[], None]) -> None:
        """Run a task on the flush thread, behind all writes that are queued and before every later one."""

    def post(self, callback: Callable[[], None]) -> None:
        """Call back on the event-loop thread. May be called on any."""

    def run(self, job: Callable[[], None], done: Callable[[None, Exception | None], None]) -> None:
        """Run a job beside the loop, in order with others, and call back on it."""

    def forget(self, key: PartitionKey) -> None:
        """Void, durably, what the journal holds for a partition. Blocks; called on the flush thread."""

    def leave_alone(self, partition: ReadableLog, then: Callable[[], None]) -> None:
        """Call back once nothing works on a partition's files, neither compaction nor a job that was queued before.

        No round of compaction begins there, and no segment is removed, while the partition is held.
        """

    def save_checkpoint(self, done: Done) -> None:
        """Make the state of all partitions durable."""

    def reported(self, name: str, error: WalstreamError) -> None:
        """Hear of damage or failure, to log and count it."""
