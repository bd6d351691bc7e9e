"""The store: all partitions of a node, in one data directory.

Owns the directory (its lock, journal and checkpoint), opens and recovers every partition, and does what is due from
time to time: checkpoints, retention, compaction, sealing, coming back after a full disk. Refuses to know the Kafka
protocol. Called on the event-loop thread; what blocks goes to the driver.

The order of a start: lock, read the checkpoint, recover every partition with the journal's help, take a new epoch,
write the checkpoint with it, drop the old journal. Only then may anything be appended or answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from uuid import uuid4

from walstream import logs
from walstream.cluster.local import Catalogue, NewTopic, Topic
from walstream.errors import (
    CorruptLog,
    DirectoryUnusable,
    DiskFull,
    PartitionOffline,
    StorageError,
    UnknownTopic,
    WalstreamError,
)
from walstream.log import checkpoint as checkpoints
from walstream.log.append_clock import AppendClock
from walstream.log.checkpoint import Checkpoint, PartitionCheckpoint
from walstream.log.cleaner import Cleaner
from walstream.log.compaction import KEYS_MAX
from walstream.log.disk import Disk
from walstream.log.driver import Driver
from walstream.log.group_commit import GroupCommit, Write
from walstream.log.journal import Journal, Redo
from walstream.log.partition_log import TOPIC_FILE, PartitionLog
from walstream.log.producers import PRODUCERS_MAX
from walstream.log.recovery import Recovered, recover
from walstream.log.retention import is_expired, retained_from
from walstream.log.rounds import Rounds
from walstream.log.segment import OpenFiles, Segment
from walstream.log.settings import UNLIMITED, TopicSettings

log = logs.get(__name__)

FREE_BYTES_MIN = 16 * 1024 * 1024
"""A partition that met a full disk tries again once this much is free."""

SETTLING_INTERVAL_MS = 5_000
"""A journal that has used up its warm part is settled early, but not more often than this."""

PRODUCER_EXPIRY_MS = 24 * 60 * 60 * 1000
"""A producer silent for a day is forgotten; no client retries for so long."""


class LogStore:
    """The partitions of a node."""

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        catalogue: Catalogue,
        driver: Driver,
        now_ms: Callable[[], int],
        *,
        journal_bytes_max: int = 64 * 1024 * 1024,
        checkpoint_interval_ms: int = 30_000,
        retention_interval_ms: int = 30_000,
        compaction_keys_max: int = KEYS_MAX,
        producers_max: int = PRODUCERS_MAX,
        producer_expiry_ms: int = PRODUCER_EXPIRY_MS,
    ) -> None:
        self.disk = disk
        self.open_files = OpenFiles()
        self.now_ms = now_ms
        self.catalogue = catalogue
        self.partitions: dict[tuple[str, int], PartitionLog] = {}
        self.damage_reports = 0
        self.write_failures = 0
        self._folder = folder
        self._driver = driver
        self._rounds = Rounds(Cleaner(disk, self.open_files, compaction_keys_max), driver, self.save_checkpoint)
        self._producers_max = producers_max
        self._producer_expiry_ms = producer_expiry_ms
        self._checkpoint_path = folder / "checkpoint.json"
        self._checkpoint_interval_ms = checkpoint_interval_ms
        self._retention_interval_ms = retention_interval_ms
        self._checkpoint_due_ms = self._retention_due_ms = self._settling_due_ms = 0
        self._saved = Checkpoint(epoch=0, clean=False)
        self._save_waiters: list[Callable[[Exception | None], None]] = []
        self._is_saving = False
        self._clock = AppendClock(catalogue.append_time_floor_ms, catalogue.reserve_append_time)
        self._journal = Journal(disk, folder / "journal")
        self.commit = GroupCommit(disk, self._journal, journal_bytes_max)
        self.epoch = 0
        self._open()

    # ── opening and closing ──────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        for name in ("journal", "topics", "trash"):
            self.disk.make_directory(self._folder / name)
        saved = checkpoints.load(self.disk, self._checkpoint_path) or Checkpoint(epoch=0, clean=False)
        self.epoch = saved.epoch + 1
        self._discard_strangers()
        redo = self._journal.recover()
        for topic in self.catalogue.topics.values():
            for index in range(topic.partitions):
                key = (topic.id, index)
                self._open_partition(topic, index, saved.partition(key), clean=saved.clean, redo=redo.get(key, {}))
        try:
            self._write_checkpoint(self._checkpoint(clean=False))
        except OSError as error:
            raise DirectoryUnusable(
                f"The data directory {self._folder} cannot be written: {error.strerror}.",
                "A start must note a new epoch there before it serves anything. Free some space, or mend the disk.",
            ) from error
        self._journal.drop(self._journal.number - 1)
        self._journal.start()
        self._driver.start(self.commit)
        self._schedule(self.now_ms())

    def _schedule(self, now_ms: int) -> None:
        self._checkpoint_due_ms = now_ms + self._checkpoint_interval_ms
        self._retention_due_ms = now_ms + self._retention_interval_ms

    def _discard_strangers(self) -> None:
        """Put aside the folders of topics that were deleted: a crash may have come between catalogue and folder."""
        for name in self.disk.list(self._folder / "topics"):
            topic = self.catalogue.topics.get(name)
            identity = self.disk.read(self._folder / "topics" / name / TOPIC_FILE)
            if topic is None or (identity is not None and identity != str(topic.id).encode()):
                self._to_trash(name)
        for name in self.disk.list(self._folder / "trash"):
            self.disk.remove(self._folder / "trash" / name)

    def _to_trash(self, topic: str) -> Path:
        target = self._folder / "trash" / uuid4().hex
        try:
            self.disk.rename(self._folder / "topics" / topic, target)
            self.disk.sync_directory(self._folder / "topics")
        except FileNotFoundError:
            pass  # Nothing was ever written to it.
        return target

    def _folder_of(self, topic: str, index: int) -> Path:
        return self._folder / "topics" / topic / str(index)

    def _open_partition(
        self, topic: Topic, index: int, saved: PartitionCheckpoint | None, *, clean: bool, redo: Redo
    ) -> PartitionLog:
        settings = self.catalogue.settings(topic)
        folder = self._folder_of(topic.name, index)
        failure: StorageError | None = None
        try:
            found = self._recover(folder, saved, settings, clean=clean, redo=redo)
        except (CorruptLog, OSError) as error:
            failure = error if isinstance(error, CorruptLog) else StorageError(f"{folder}: {error.strerror}.")
            found = Recovered.empty(self.disk, folder, saved, self.open_files)
        partition = PartitionLog(topic.name, (topic.id, index), folder, self, settings, self.epoch, found)
        if failure is not None:
            partition.write_error = PartitionOffline(failure.message, failure.hint)
            self.reported(partition, failure)
        self.partitions[topic.name, index] = partition
        self._report_recovery(partition, found)
        return partition

    def _recover(
        self, folder: Path, saved: PartitionCheckpoint | None, settings: TopicSettings, *, clean: bool, redo: Redo
    ) -> Recovered:
        return recover(
            self.disk,
            folder,
            saved,
            clean=clean,
            redo=redo,
            open_files=self.open_files,
            segment_bytes=settings.segment_bytes,
            producers_max=self._producers_max,
            now_ms=self.now_ms(),
        )

    def _report_recovery(self, partition: PartitionLog, found: Recovered) -> None:
        if found.bytes_cut or found.batches_redone or found.bytes_checked:
            log.info(
                "partition recovered", partition=partition.name, checked_bytes=found.bytes_checked,
                cut_bytes=found.bytes_cut, redone_batches=found.batches_redone,
            )  # fmt: skip
        for start, end in found.damaged:
            self.reported(partition, CorruptLog(f"{partition.name}: offsets {start} to {end - 1} are damaged."))

    def close(self) -> None:
        """Flush and sync everything. Blocks; appends have stopped before."""
        self._rounds.stop()
        self._driver.stop()

    def mark_clean(self) -> None:
        """Write the last checkpoint, after `close` and once its completions have run. Blocks."""
        for partition in self.partitions.values():
            segment = partition.segments[-1]
            if segment.is_index_loaded and segment.size:
                segment.save_index()
        self._write_checkpoint(self._checkpoint(clean=True))

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────

    def partition(self, topic: str, index: int) -> PartitionLog:
        """Return a partition; raises UnknownTopic."""
        try:
            return self.partitions[topic, index]
        except KeyError:
            raise UnknownTopic(f"There is no partition {topic}-{index}.") from None

    def create_topics(self, specifications: list[NewTopic]) -> list[Topic]:
        """Add topics to the catalogue and open their partitions. Folders are made by the first write."""
        made = self.catalogue.create(specifications)
        for topic in made:
            self._open_new(topic, range(topic.partitions))
        return made

    def grow_topic(self, name: str, partitions: int) -> None:
        """Give a topic more partitions."""
        first = self.catalogue.topic(name).partitions
        topic = self.catalogue.grow(name, partitions)
        self._open_new(topic, range(first, partitions))

    def _open_new(self, topic: Topic, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._open_partition(topic, index, None, clean=False, redo={})

    def configure_topic(self, name: str, config: dict[str, str]) -> None:
        """Replace a topic's own settings."""
        topic = self.catalogue.configure(name, config)
        settings = self.catalogue.settings(topic)
        for index in range(topic.partitions):
            self.partitions[name, index].settings = settings

    def delete_topics(self, names: list[str]) -> None:
        """Remove topics: first from the catalogue, then, behind all queued writes, from the disk."""
        for topic in self.catalogue.delete(names):
            self._rounds.stop(topic.name)
            for index in range(topic.partitions):
                partition = self.partitions.pop((topic.name, index))
                partition.stop(PartitionOffline(f"The topic {topic.name} was deleted."))
            self.commit.run_between(lambda name=topic.name: self._discard(name))  # type: ignore[misc]

    def _discard(self, name: str) -> None:
        """On the flush thread: nobody writes to the folder any more."""
        trashed = self._to_trash(name)
        self._driver.run(lambda: self.disk.remove(trashed), partial(self._ended, "trash kept"))

    def delete_records(self, partition: PartitionLog, before: int, done: Callable[[Exception | None], None]) -> None:
        """Move the start of a log up; `done` once that is durable."""
        self._drop(partition.advance_start(before), done)

    def _drop(self, segments: list[Segment], done: Callable[[Exception | None], None] | None = None) -> None:
        """Remove segments below their log's start, after the checkpoint has the new start."""

        def remove() -> None:
            for segment in segments:
                segment.remove()

        def saved(error: Exception | None) -> None:
            if error is None and segments:
                self._driver.run(remove, partial(self._ended, "segments kept"))
            if done is not None:
                done(error)

        self.save_checkpoint(saved)

    # ── what the partitions share ────────────────────────────────────────────────────────────────────────────────

    def submit(self, write: Write) -> None:
        """Queue a write for group commit."""
        self.commit.submit(write)

    def append_stamp(self, last_ms: int) -> int:
        """Return the time for a batch of a topic with append time."""
        return self._clock.stamp(self.now_ms(), last_ms)

    def sealed(self, segment: Segment) -> None:
        """Write the index of a segment that takes no more batches, and a checkpoint beyond it.

        So recovery reads about one segment of a partition again, however fast it was written.
        """
        self._driver.run(segment.save_index, partial(self._ended, "index not saved"))
        self.save_checkpoint(partial(self._ended, "checkpoint not saved", None))

    def reported(self, partition: PartitionLog, error: WalstreamError) -> None:
        """Log and count damage and failures."""
        if isinstance(error, CorruptLog):
            self.damage_reports += 1
            log.error("damage found", partition=partition.name, error=str(error))
        else:
            self.write_failures += 1
            log.error("partition offline", partition=partition.name, error=str(error))

    def _ended(self, failure: str, _: object, error: Exception | None) -> None:
        """Hear that a background job ended whose failure harms nothing but is worth knowing."""
        if error is not None:
            log.warning(failure, error=str(error))

    # ── from time to time ────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Do what is due. Called about once a second."""
        now_ms = self.now_ms()
        if any(partition.settings.append_time for partition in self.partitions.values()):
            self._clock.tick(now_ms)
        for partition in list(self.partitions.values()):
            if isinstance(partition.write_error, DiskFull):
                self._reopen(partition)
        if self.commit.wants_settling and now_ms >= self._settling_due_ms:
            self._settling_due_ms = now_ms + SETTLING_INTERVAL_MS
            self.commit.ask_settling()
        if now_ms >= self._checkpoint_due_ms:
            self._checkpoint_due_ms = now_ms + self._checkpoint_interval_ms
            self._periodic_checkpoint()
        if now_ms >= self._retention_due_ms:
            self._retention_due_ms = now_ms + self._retention_interval_ms
            self.enforce_retention()
            self.compact()

    def enforce_retention(self) -> None:
        """Drop the segments that no topic's settings keep."""
        now_ms = self.now_ms()
        dropped: list[Segment] = []
        for partition in self.partitions.values():
            partition.producers.expire(now_ms - self._producer_expiry_ms)
            settings, last = partition.settings, partition.segments[-1]
            if (
                settings.deleted
                and settings.retention_ms != UNLIMITED
                and partition.high_watermark == partition.log_end
                and is_expired(last, now_ms - settings.retention_ms)
            ):
                partition.roll(now_ms)
            dropped += partition.advance_start(
                min(retained_from(partition.segments, settings, now_ms), partition.high_watermark)
            )
        if dropped:
            log.info("retention", dropped_segments=len(dropped), dropped_bytes=sum(s.size for s in dropped))
            self._drop(dropped)

    def compact(self) -> None:
        """Begin the next round of compaction that is due; one runs at a time."""
        self._rounds.begin(self.partitions.values(), self._saved, self.now_ms())

    def _reopen(self, partition: PartitionLog) -> None:
        """Bring a partition back that met a full disk, if there is space now."""
        if self.disk.free_bytes(self._folder) < FREE_BYTES_MIN:
            return
        saved = partition.checkpoint()

        def work() -> None:
            try:
                found = self._recover(partition.folder, saved, partition.settings, clean=False, redo={})
            except (OSError, WalstreamError) as error:
                log.warning("partition stays offline", partition=partition.name, error=str(error))
            else:
                self._driver.post(lambda: self._reopened(partition, found))

        # Behind every write that is still queued: they all fail, and none may come after the scan.
        self.commit.run_between(work)

    def _reopened(self, partition: PartitionLog, found: Recovered) -> None:
        if found.log_end < partition.high_watermark:
            self.reported(partition, CorruptLog(f"{partition.name} has lost offsets from {found.log_end} on."))
        elif isinstance(partition.write_error, DiskFull):
            partition.adopt(found)
            log.info("partition back online", partition=partition.name, log_end=partition.log_end)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────

    def _checkpoint(self, *, clean: bool) -> Checkpoint:
        states = {checkpoints.key_text(p.key): p.checkpoint() for p in self.partitions.values()}
        return Checkpoint(epoch=self.epoch, clean=clean, partitions=states)

    def _write_checkpoint(self, state: Checkpoint) -> None:
        """Make a checkpoint durable, and remember that it is."""
        checkpoints.save(self.disk, self._checkpoint_path, state)
        self._saved = state

    def _periodic_checkpoint(self) -> None:
        """Save what has changed, the indexes of open segments first: recovery then reads on where they end."""
        self.commit.ask_settling()
        indexes: list[tuple[Path, bytes]] = []
        for partition in self.partitions.values():
            segment, saved = partition.segments[-1], self._saved.partition(partition.key)
            if saved is None or saved.offset != segment.synced_offset:
                indexes.append((segment.index_path, segment.index.encode()))
        if not indexes:
            return

        def write_indexes() -> None:
            for path, data in indexes:
                if self.disk.list(path.parent):
                    self.disk.write(path, data, durable=False)

        self._driver.run(write_indexes, partial(self._ended, "index not saved"))
        self.save_checkpoint(partial(self._ended, "checkpoint not saved", None))

    def save_checkpoint(self, done: Callable[[Exception | None], None]) -> None:
        """Write a checkpoint of the state as it is now or later; `done` once it is durable. Saves are coalesced."""
        self._save_waiters.append(done)
        if not self._is_saving:
            self._save()

    def _save(self) -> None:
        waiters, self._save_waiters = self._save_waiters, []
        state = self._checkpoint(clean=False)
        self._is_saving = True

        def saved(_: None, error: Exception | None) -> None:
            self._is_saving = False
            for done in waiters:
                done(error)
            if self._save_waiters:
                self._save()

        self._driver.run(lambda: self._write_checkpoint(state), saved)
