"""The store: all partitions of a node, in one data directory.

Owns the directory (its lock, journal and checkpoint), opens and recovers every partition, and does what is due from
time to time: checkpoints, retention, compaction, sealing, coming back after a full disk. Refuses to know the Kafka
protocol. Called on the event-loop thread; what blocks goes to the driver.

The order of a start: lock, read the checkpoint, recover every partition with the journal's help, take a new epoch,
write the checkpoint with it, drop the old journal. Only then may anything be appended or answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

from walstream import logs
from walstream.cluster.local import Catalogue, Change, NewTopic, Topic
from walstream.errors import (
    CorruptLog,
    DirectoryUnusable,
    DiskFull,
    OutOfFiles,
    PartitionOffline,
    StorageError,
    UnknownTopic,
    WalstreamError,
)
from walstream.log import checkpoint as checkpoints
from walstream.log import producer_snapshots, truncation
from walstream.log.append_clock import AppendClock, Covered
from walstream.log.change_queue import ChangeQueue
from walstream.log.checkpoint import Checkpoint, PartitionCheckpoint
from walstream.log.cleaner import Cleaner
from walstream.log.compaction import KEYS_MAX
from walstream.log.disk import OUT_OF_FILES, Disk, free_bytes_min, is_full
from walstream.log.driver import Driver
from walstream.log.folders import rename_old_folders, topic_folder
from walstream.log.group_commit import GroupCommit, Write
from walstream.log.journal import PREPARED_BYTES, Journal, PartitionKey, Redo, RedoReader
from walstream.log.opening import Opener
from walstream.log.partition_log import PartitionLog
from walstream.log.producers import PRODUCERS_MAX, Row
from walstream.log.reading import ReadableLog
from walstream.log.recovery import Recovered, has_swaps
from walstream.log.retention import Expired, Kept, find_expired, holds_more
from walstream.log.rounds import Rounds
from walstream.log.saving import Saver, States
from walstream.log.scrub import Scrub
from walstream.log.segment import OPEN_FILES_MAX, OpenFiles, Segment
from walstream.log.surroundings import Done
from walstream.log.trash import Trash

log = logs.get(__name__)

RESERVE_BYTES_MIN = 1024 * 1024
RESERVE_CHECKPOINTS = 4
"""The reserve holds so many checkpoints: the catalogue and the file of epochs are each smaller than one."""

INDEX_BYTES_MIN = 1024
INDEX_BYTES_PER_SLICE = 1024 * 1024
"""Indexes are saved in slices of so many bytes, each counted with `INDEX_BYTES_MIN` more: about a millisecond."""

SETTLING_INTERVAL_MS = 5_000
"""A journal that has used up its warm part is settled early, but not more often than this."""

PRODUCER_EXPIRY_MS = 24 * 60 * 60 * 1000
"""A producer silent for a day is forgotten; no client retries for so long."""

Dropped = tuple[PartitionLog, list[Segment]]
"""Segments that lie wholly below the start of their log."""


def _nothing() -> None:
    """Wait on the housekeeping thread for the jobs queued before."""


class LogStore:
    """The partitions of a node."""

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        catalogue: Catalogue,
        driver: Driver,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        *,
        journal_bytes_max: int = 64 * 1024 * 1024,
        journal_prepared_bytes: int = PREPARED_BYTES,
        checkpoint_interval_ms: int = 30_000,
        retention_interval_ms: int = 30_000,
        open_files_max: int = OPEN_FILES_MAX,
        compaction_keys_max: int = KEYS_MAX,
        producers_max: int = PRODUCERS_MAX,
        producer_expiry_ms: int = PRODUCER_EXPIRY_MS,
        new_id: Callable[[], UUID] = uuid4,
        replicated: bool = False,
        scrub_bytes_per_s: int = 0,
        scrub_interval_s: int = 0,
    ) -> None:
        """Open the partitions. `replicated`: the node is one of several, and others say what it leads.

        `now_ms` is the wall clock, which is set back and forth: it dates records and decides which have expired.
        `monotonic_ms` measures intervals: whatever is due from time to time, and how long a producer has been silent.
        """
        self.disk = disk
        self.open_files = OpenFiles(open_files_max)
        self.now_ms = now_ms
        self.monotonic_ms = monotonic_ms
        self.catalogue = catalogue
        self.partitions: dict[tuple[str, int], PartitionLog] = {}
        self.damage_reports = 0
        self.write_failures = 0
        self.replicated = replicated
        self._folder = folder
        self._driver = driver
        self._trash = Trash(disk, folder, new_id)
        self._rounds = Rounds(Cleaner(disk, self.open_files, compaction_keys_max), driver, self.save_checkpoint)
        self.scrub = Scrub(scrub_bytes_per_s, scrub_interval_s, driver, lambda: self.partitions.values())
        self.producers_max = producers_max
        self._producer_expiry_ms = producer_expiry_ms
        self._checkpoint_interval_ms = checkpoint_interval_ms
        self._retention_interval_ms = retention_interval_ms
        self._checkpoint_due_ms = self._retention_due_ms = self._settling_due_ms = 0
        self._not_removed: list[Dropped] = []
        """Segments below their log's start whose files are left: a checkpoint or an unlink failed."""
        for name in ("journal", "topics", "trash"):
            disk.make_directory(folder / name)
        self._saver = Saver(disk, folder / "checkpoint.json", driver, self._states)
        self.append_clock = AppendClock(catalogue.append_time_floor_ms, catalogue.reserve_append_time)
        self._journal = Journal(disk, folder / "journal", self._saver.saved.epoch, journal_prepared_bytes)
        self._free_bytes_min = free_bytes_min(disk, folder)
        self._reserve_bytes = RESERVE_BYTES_MIN
        self._was_full = self._is_making_reserve = False
        self.changes = ChangeQueue(catalogue, driver, self._have, self._cover_append_time)
        self.commit = GroupCommit(disk, self._journal, journal_bytes_max, lambda: self.resume_bytes, open_files_max)
        self.epoch = self._saver.epoch = self._journal.epoch
        self._opener = Opener(disk, self.open_files, producers_max, monotonic_ms, replicated, self.epoch)
        self._open()

    # ── opening and closing ──────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        self._begin_reserve()
        rename_old_folders(self.disk, self._folder / "topics", self.catalogue.topics)
        self._trash.discard_strangers(self.catalogue.topics)
        if self._saver.saved.clean and has_swaps(self.disk, self._folder / "topics"):
            self._saver.doubt()
        saved = self._saver.saved
        redo = self._journal.recover()
        recovered = Counter[str]()
        for topic in self.catalogue.topics.values():
            for index in range(topic.partitions):
                key = (topic.id, index)
                found = self._open_partition(
                    topic, index, saved.partition(key), clean=saved.clean, redo=redo.get(key, {})
                )
                recovered.update(self._report_recovery(self.partitions[topic.name, index], found))
        if recovered:
            log.info("partitions recovered", **recovered)
        try:
            self._saver.write(self._checkpoint(clean=False))
            self._let_go_of_the_journal(redo)
            for partition in self.partitions.values():
                if partition.cut is not None:
                    truncation.conclude(self.disk, partition.folder)
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise
            raise DirectoryUnusable(
                f"The data directory {self._folder} cannot be written: {error.strerror}.",
                "A start must note a new epoch there before it serves anything. Free some space, or mend the disk.",
            ) from error
        if self._has_append_time():
            self.append_clock.tick(self.now_ms())
        self.append_clock.run = self._driver.run
        self._journal.start()
        self._driver.start(self.commit)
        self._schedule(self.monotonic_ms())

    def _begin_reserve(self) -> None:
        """Set the reserve aside; on a full disk that has none, in the place of the journal's spare file."""
        try:
            if not self.disk.keep_reserve(RESERVE_BYTES_MIN):
                self._journal.give_up_spare()
                self.disk.keep_reserve(RESERVE_BYTES_MIN)
        except OSError as error:
            log.warning("disk reserve not allocated", error=str(error))

    def _let_go_of_the_journal(self, redo: dict[PartitionKey, Redo]) -> None:
        """Drop the old files, whose batches are where they belong; keep them for partitions that could not be opened.

        Then what they hold for the others must not come back at a later start.
        """
        opened = {partition.key for partition in self.partitions.values() if partition.failure is None}
        failed = {partition.key for partition in self.partitions.values() if partition.failure is not None}
        if failed & redo.keys():
            self._journal.keep_old()
            if healthy := sorted(opened & redo.keys()):
                self._journal.forget(healthy)
        else:
            self._journal.drop_old()

    def _schedule(self, now_ms: int) -> None:
        self._checkpoint_due_ms = now_ms + self._checkpoint_interval_ms
        self._retention_due_ms = now_ms + self._retention_interval_ms

    def _open_partition(
        self, topic: Topic, index: int, saved: PartitionCheckpoint | None, *, clean: bool, redo: Redo
    ) -> Recovered:
        """Recover a partition, on a full disk with the space of the reserve and then of the journal's spare file."""
        is_only_copy = not self.replicated or topic.replicas == [self.catalogue.node_id]
        settings = self.catalogue.settings(topic)
        found: Recovered | None = None
        makers_of_room = [self._journal.give_up_spare, self.disk.spend_reserve]
        folder = self._folder_of(topic, index)
        while found is None:
            try:  # Recovery takes out of `redo` what it writes.
                found = self._opener.open(
                    folder, saved, settings, clean=clean, redo=dict(redo), is_only_copy=is_only_copy
                )
            except OSError as error:
                if not is_full(error):
                    raise
                if not makers_of_room:
                    raise DirectoryUnusable(
                        f"{topic.name}-{index} cannot be recovered: {error.strerror}.",
                        "Batches that are durable in the journal belong into its files. Free some space.",
                    ) from error
                makers_of_room.pop()()
        self._add(topic, index, saved, found)
        return found

    def _folder_of(self, topic: Topic, index: int) -> Path:
        return self._folder / "topics" / topic_folder(topic) / str(index)

    def _add(self, topic: Topic, index: int, saved: PartitionCheckpoint | None, found: Recovered) -> None:
        settings, epoch = self.catalogue.settings(topic), None if self.replicated else self.epoch
        key = (topic.id, index)
        partition = PartitionLog(topic.name, key, self._folder_of(topic, index), self, settings, epoch, found)
        if saved is None and self.replicated and self.catalogue.is_older_than_disk(topic, index):
            partition.is_unclean = True  # The last disk may have had what this one never did.
        self.partitions[topic.name, index] = partition

    def _report_recovery(self, partition: PartitionLog, found: Recovered) -> dict[str, int]:
        """Report damage, and return what recovery did; nothing if there was nothing to do."""
        done = {
            "checked_bytes": found.bytes_checked, "cut_bytes": found.bytes_cut, "redone_batches": found.batches_redone
        }  # fmt: skip
        is_recovered = any(done.values())
        if is_recovered:
            log.debug("partition recovered", partition=partition.name, **done)
        if found.failure is not None:
            self.reported(partition.name, found.failure)
        if found.lost is not None:
            start, end = found.lost
            self.reported(
                partition.name,
                CorruptLog(
                    f"{partition.name} has lost offsets {start} to {end - 1}, which were durable.",
                    "They are copied again from another replica; until then this one is not elected.",
                ),
            )
        for start, end in found.damaged:
            self.reported(partition.name, CorruptLog(f"{partition.name}: offsets {start} to {end - 1} are damaged."))
        return {"partitions": 1, **done} if is_recovered else {}

    def close(self) -> None:
        """Flush and sync everything. Blocks; appends have stopped before."""
        self._rounds.stop()
        self._driver.stop()

    def mark_clean(self) -> bool:
        """Write the last checkpoint, after `close` and once its completions have run; return whether it is clean.

        It is not while a partition is offline: the next start has to check what the files of that hold. Blocks.
        """
        self.catalogue.restore()
        for partition in self.partitions.values():
            segment = partition.segments[-1]
            if segment.is_index_loaded and segment.size:
                with suppress(OSError):  # It is rebuilt from the segment.
                    segment.save_index()
        is_clean = all(partition.write_error is None for partition in self.partitions.values())
        self._saver.write(self._checkpoint(clean=is_clean))
        return is_clean

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────

    def partition(self, topic: str, index: int) -> PartitionLog:
        """Return a partition; raises UnknownTopic."""
        try:
            return self.partitions[topic, index]
        except KeyError:
            raise UnknownTopic(f"There is no partition {topic}-{index}.") from None

    def _cover_append_time(self, done: Covered) -> None:
        """Reserve append time: topics that begin to have it need a reservation for their first batch."""
        self.append_clock.cover(self.now_ms(), self.now_ms(), done)

    def _have(self, change: Change) -> None:
        """Have a catalogue that is durable, and the partitions that it says. Folders are made by the first write."""
        before, altered = self.catalogue.topics, self.catalogue.altered(change)
        self.catalogue.show(change)
        self._remove(topic for topic in before.values() if topic.id not in self.catalogue.by_id)
        for topic in altered:
            known = before.get(topic.name)
            if known is not None and known.id == topic.id:
                self._open_new(topic, range(known.partitions, topic.partitions))
                self._apply_settings(topic)
            else:
                self._open_new(topic, range(topic.partitions))

    def _open_new(self, topic: Topic, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._add(topic, index, None, self._opener.fresh(self._folder_of(topic, index)))

    def _apply_settings(self, topic: Topic) -> None:
        settings = self.catalogue.settings(topic)
        for index in range(topic.partitions):
            partition = self.partitions[topic.name, index]
            if holds_more(settings, partition.settings):
                self._rounds.stop(topic.name)  # It may be about to remove what is held from now on.
            partition.configure(settings)
        self._retention_due_ms = self.monotonic_ms()  # A full disk waits for what a lower retention frees.

    # The following block: for the start of a node, for tools and tests.

    def create_topics(self, specifications: list[NewTopic]) -> list[Topic]:
        """Add topics."""
        change = self.catalogue.create(specifications)
        self.changes.apply(change)
        return change.affected

    def grow_topic(self, name: str, partitions: int) -> None:
        """Give a topic more partitions."""
        self.changes.apply(self.catalogue.grow(name, partitions))

    def configure_topic(self, name: str, config: dict[str, str]) -> None:
        """Replace a topic's own settings."""
        self.changes.apply(self.catalogue.configure(name, config))

    def take_over(self, version: int, topics: list[Topic]) -> None:
        """Have the catalogue of the cluster's controller."""
        self.changes.apply(self.catalogue.take_over(version, topics))

    def delete_topics(self, names: list[str]) -> None:
        """Remove topics: first from the catalogue, then, behind all queued writes, from the disk."""
        self.changes.apply(self.catalogue.delete(names))

    def _remove(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            self._rounds.stop(topic.name)
            gone = [self.partitions.pop((topic.name, index)) for index in range(topic.partitions)]
            for partition in gone:
                partition.discard(PartitionOffline(f"The topic {topic.name} was deleted."))
            self.commit.run_between(partial(self._discard, topic_folder(topic), gone))

    def _discard(self, name: str, partitions: list[PartitionLog]) -> None:
        """On the flush thread: nobody writes to the folder any more. Open files would go on taking their space."""
        self.commit.abandon({partition.key for partition in partitions})
        for partition in partitions:
            for segment in partition.segments:
                segment.close()
        try:
            trashed = self._trash.put(name)
        except OSError as error:
            log.warning("deleted topic folder not removed until the next start", topic=name, error=str(error))
            return
        # Not in the way of other jobs: it takes long.
        self._driver.run_long(lambda: self.disk.remove(trashed), partial(self._ended, "deleted topic not removed"))

    def delete_records(self, partition: PartitionLog, before: int, done: Callable[[Exception | None], None]) -> None:
        """Move the start of a log up; `done` once that is durable."""
        self._drop([(partition, partition.advance_start(before))], done)

    def _drop(self, dropped: list[Dropped], done: Callable[[Exception | None], None] | None = None) -> None:
        """Remove segments below their log's start, after the checkpoint has the new start.

        Those that an error leaves behind are removed with the next ones.
        """
        doomed, self._not_removed = [*self._not_removed, *dropped], []

        def saved(error: Exception | None) -> None:
            if error is None:
                for partition, segments in doomed:
                    self._remove_files(partition, segments)
            else:
                self._not_removed += doomed
                log.warning("segments kept: the checkpoint was not saved", error=str(error))
                if isinstance(error, OSError):
                    error = StorageError(f"The checkpoint cannot be written: {error.strerror}.", "Free some space.")
            if done is not None:
                done(error)

        self.save_checkpoint(saved)

    def _remove_files(self, partition: PartitionLog, segments: list[Segment]) -> None:
        """Remove dropped segments, once nothing else works on the files of their partition.

        By then compaction or a reset may have given the name of a dropped segment to another one.
        """
        again = partial(self._remove_files, partition, segments)
        if partition.is_held:
            partition.after_release(again)
        elif not self._rounds.is_using(partition, again):
            for segment in segments:
                segment.close()
            in_use = {segment.path for segment in partition.segments}
            gone = [segment for segment in segments if segment.path not in in_use]
            left = list(gone)

            def remove() -> None:
                while left:
                    left[-1].remove()
                    left.pop()

            def removed(_: None, error: Exception | None) -> None:
                if error is not None:
                    log.warning("segments kept", partition=partition.name, segments=len(left), error=str(error))
                    self._not_removed.append((partition, left))

            if gone:
                self._driver.run(remove, removed)

    # ── what the partitions share ────────────────────────────────────────────────────────────────────────────────

    def submit(self, write: Write) -> None:
        """Queue a write for group commit."""
        self.commit.submit(write)

    def run_between(self, task: Callable[[], None]) -> None:
        """Run a task on the flush thread, between the writes queued before and after it."""
        self.commit.run_between(task)

    def post(self, callback: Callable[[], None]) -> None:
        """Call back on the event-loop thread."""
        self._driver.post(callback)

    def run(self, job: Callable[[], None], done: Callable[[None, Exception | None], None]) -> None:
        """Run a job beside the loop."""
        self._driver.run(job, done)

    def forget(self, key: PartitionKey) -> None:
        """Void what the journal holds for a partition, whose files are synced without it."""
        self.commit.forget(key)

    def leave_alone(self, partition: ReadableLog, then: Callable[[], None]) -> None:
        """Call back once neither compaction nor a job that was queued before works on the files of a partition."""
        self._rounds.end_on(partition, lambda: self._driver.run(_nothing, lambda _, __: then()))

    def save_checkpoint(self, done: Done) -> None:
        """Make the state of all partitions durable, as it is now or later; `done` then."""
        self._saver.save(done)

    def sealed(self, segment: Segment, snapshot_path: Path, producers: list[Row]) -> None:
        """Write the index of a segment that takes no more batches, what is known beyond it, and a checkpoint there.

        So recovery reads about one segment of a partition again, however fast it was written.
        """

        def write() -> None:
            with suppress(FileNotFoundError):  # The topic was deleted meanwhile.
                segment.save_index()
                self.disk.write(snapshot_path, producer_snapshots.encode(producers), durable=False)

        self._driver.run(write, partial(self._ended, "index not saved"))
        self.save_checkpoint(partial(self._ended, "checkpoint not saved", None))

    def reported(self, name: str, error: WalstreamError) -> None:
        """Log and count damage and failures."""
        if isinstance(error, CorruptLog):
            self.damage_reports += 1
            log.error("damage found", partition=name, error=str(error))
        else:
            self.write_failures += 1
            log.error("partition offline", partition=name, error=str(error))

    def _ended(self, failure: str, _: object, error: Exception | None) -> None:
        """Hear that a background job ended whose failure harms nothing but is worth knowing."""
        if error is not None:
            log.warning(failure, error=str(error))

    # ── from time to time ────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Do what is due. Called about once a second."""
        now_ms = self.monotonic_ms()
        if self._has_append_time() and (refusal := self.append_clock.tick(self.now_ms())) is not None:
            log.warning("append times not reserved", error=str(refusal))
        self.changes.restore_file()
        has_space, reader = self._has_space(), RedoReader(self._journal)
        for partition in list(self.partitions.values()):
            error = partition.write_error
            if not partition.is_held and (isinstance(error, OutOfFiles) or (has_space and isinstance(error, DiskFull))):
                self._reopen(partition, reader)
        if self.commit.wants_settling and now_ms >= self._settling_due_ms:
            self._settling_due_ms = now_ms + SETTLING_INTERVAL_MS
            self.commit.ask_settling()
        self.scrub.tick()
        self._rounds.retry()
        if now_ms >= self._checkpoint_due_ms:
            self._checkpoint_due_ms = now_ms + self._checkpoint_interval_ms
            self._periodic_checkpoint()
        if now_ms >= self._retention_due_ms:
            self._retention_due_ms = now_ms + self._retention_interval_ms
            self.enforce_retention(self.compact)

    def _has_append_time(self) -> bool:
        return any(partition.settings.append_time for partition in self.partitions.values())

    def enforce_retention(self, then: Callable[[], None] = lambda: None) -> None:
        """Drop the segments that no topic's settings keep. Which these are is found out beside the loop."""
        silent_since_ms = self.monotonic_ms() - self._producer_expiry_ms
        led = []
        for partition in self.partitions.values():
            partition.producers.expire(silent_since_ms)
            if partition.is_leader and partition.failure is None:  # A follower's log starts where its leader's does.
                led.append(partition)
        self._look_for_expired(led, then)

    def _look_for_expired(self, led: Iterable[PartitionLog], then: Callable[[], None]) -> None:
        looked_at = [Kept(one, one.segments, one.segments[-1].size, one.settings) for one in led]

        def found(expired: list[Expired] | None, error: Exception | None) -> None:
            if expired is None:
                log.warning("retention failed", error=str(error))
                then()
            elif rolled := self._drop_expired(looked_at, expired):
                self._look_for_expired(rolled, then)
            else:
                then()

        self._driver.run(partial(find_expired, looked_at, self.now_ms()), found)

    def _drop_expired(self, looked_at: list[Kept], found: list[Expired]) -> list[PartitionLog]:
        """Move up the starts of logs whose settings and segments are still those that were looked at.

        Where the last segment has expired, too, it is sealed; return these partitions.
        """
        dropped: list[Dropped] = []
        rolled: list[PartitionLog] = []
        for kept, expired in zip(looked_at, found, strict=True):
            partition, number = kept.partition, expired.segments
            if (
                not partition.is_leader
                or partition.is_discarded
                or partition.settings is not kept.settings
                or partition.segments[: number + 1] != kept.segments[: number + 1]
            ):
                continue
            start = min(kept.segments[number].base_offset, partition.high_watermark)
            last = partition.segments[-1]
            if (
                expired.is_last
                and partition.high_watermark == partition.log_end
                and (last, last.size) == (kept.segments[-1], kept.last_size)
            ):
                partition.roll()
                rolled.append(partition)
            if segments := partition.advance_start(start):
                dropped.append((partition, segments))
        if dropped or self._not_removed:
            sizes = [segment.size for _, segments in dropped for segment in segments]
            log.info("retention", dropped_segments=len(sizes), dropped_bytes=sum(sizes))
            self._drop(dropped)
        return rolled

    def compact(self) -> None:
        """Begin the next round of compaction that is due; one runs at a time. It needs space before it frees any."""
        if self.disk.is_reserve_spent:
            return
        self._rounds.begin(self.partitions.values(), self._saver.saved, self.now_ms())

    def _reopen(self, partition: PartitionLog, reader: RedoReader) -> None:
        """Bring a partition back that met a full disk, now that there is space, or that could open no file."""
        partition.begin_reopening()
        self.leave_alone(partition, partial(self._recover, partition, reader))

    def _recover(self, partition: PartitionLog, reader: RedoReader) -> None:
        """Open the files of a partition again, which nothing else changes until `end_reopening`."""
        if partition.is_discarded:
            partition.end_reopening(None)
            return
        durable = self._saver.saved.partition(partition.key)
        if partition.log_start > (durable.log_start if durable is not None else 0):
            # Recovery removes what is below the log start, and syncs nothing there before the journal forgets it: after
            # a kill that must be the log start, too.
            self.save_checkpoint(partial(self._recover_after, partition, reader))
            return
        saved = partition.checkpoint()

        def work() -> None:
            found: Recovered | None = None
            try:
                # Settling syncs the same files: of a sync that fails either settling is told, or this. Next time.
                if not self.commit.is_settling:
                    redo = reader.redo(partition.key)
                    found = self._opener.recover(partition.folder, saved, partition.settings, clean=False, redo=redo)
                    self.forget(partition.key)
            except (OSError, WalstreamError) as error:
                found = None
                partition.distrust_files()
                log.warning("partition stays offline", partition=partition.name, error=str(error))
            self._driver.post(partial(self._reopened, partition, found))

        # Behind every write that is still queued: they all fail, and none may come after the scan.
        self.commit.run_between(work)

    def _recover_after(self, partition: PartitionLog, reader: RedoReader, error: Exception | None) -> None:
        """Continue when the log start is durable; after an error the next tick tries again."""
        if error is None:
            self._recover(partition, reader)
        else:
            log.warning("partition stays offline", partition=partition.name, error=str(error))
            partition.end_reopening(None)

    def _reopened(self, partition: PartitionLog, found: Recovered | None) -> None:
        if partition.is_discarded:
            found = None
        elif found is not None and found.log_end < partition.durable_end:
            self.reported(partition.name, CorruptLog(f"{partition.name} has lost offsets from {found.log_end} on."))
            found = None
        partition.end_reopening(found)
        if found is not None:
            log.info("partition back online", partition=partition.name, log_end=partition.log_end)

    # ── space ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def free_bytes(self) -> int:
        """How much may still be written to the disk."""
        return self.disk.free_bytes(self._folder)

    @property
    def is_full(self) -> bool:
        """Whether the disk is full: the reserve is spent, or a partition waits for space."""
        return self.disk.is_reserve_spent or any(isinstance(p.write_error, DiskFull) for p in self.partitions.values())

    @property
    def resume_bytes(self) -> int:
        """How much must be free for writes to resume on a full disk; the reserve comes first if it is spent."""
        return self._free_bytes_min + (self._wanted_reserve() if self.disk.is_reserve_spent else 0)

    def _wanted_reserve(self) -> int:
        needed = RESERVE_CHECKPOINTS * self._saver.saved_bytes
        return -(-needed // RESERVE_BYTES_MIN) * RESERVE_BYTES_MIN or RESERVE_BYTES_MIN

    def _has_space(self) -> bool:
        """Keep the reserve up, and tell whether partitions may resume writes."""
        is_full = self.disk.is_reserve_spent
        if is_full != self._was_full:
            self._was_full = is_full
            if is_full:
                self._rounds.stop()
                log.error("disk full", free_bytes=self.free_bytes, writes_resume_at_bytes=self.resume_bytes)
            else:
                log.info("disk has space again", free_bytes=self.free_bytes)
        wanted = self._wanted_reserve()
        free_bytes = self.free_bytes
        is_wanted = (is_full or wanted > self._reserve_bytes) and not self._is_making_reserve
        if is_wanted and free_bytes >= self._free_bytes_min + wanted:
            self._make_reserve(wanted)
        return not self.disk.is_reserve_spent and free_bytes >= self._free_bytes_min

    def _make_reserve(self, size: int) -> None:
        self._is_making_reserve = True

        def made(is_made: bool | None, error: Exception | None) -> None:
            self._is_making_reserve = False
            if error is not None:
                log.warning("disk reserve not allocated", error=str(error))
            if is_made:
                self._reserve_bytes = size

        self._driver.run(lambda: self.disk.keep_reserve(size), made)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────

    def _checkpoint(self, *, clean: bool) -> Checkpoint:
        return Checkpoint(epoch=self.epoch, clean=clean, partitions=dict(self._states()))

    def _states(self) -> States:
        """Iterate over the states of the partitions there are. Ones that are opened meanwhile are not among them."""
        for partition in list(self.partitions.values()):
            if not partition.is_discarded:
                yield checkpoints.key_text(partition.key), partition.checkpoint()

    def _periodic_checkpoint(self) -> None:
        """Save what has changed, the indexes of open segments first: recovery then reads on where they end."""
        self.commit.ask_settling()
        self._save_indexes(iter(list(self.partitions.values())), is_changed=False)

    def _save_indexes(self, partitions: Iterator[PartitionLog], *, is_changed: bool) -> None:
        """Save indexes of open segments, in slices of the loop's time, and then a checkpoint if there were any.

        An index is queued when it is encoded: a truncation, which waits for the jobs before it, removes the file.
        """
        indexes: list[tuple[Path, bytes]] = []
        size = 0
        for partition in partitions:
            segment, saved = partition.segments[-1], self._saver.saved.partition(partition.key)
            if partition.is_held or partition.is_discarded or not segment.is_index_loaded:
                continue  # The file of the segment is being truncated, or cannot be read.
            if saved is None or saved.offset != segment.synced_offset:
                indexes.append((segment.index_path, segment.index.encode()))
                size += INDEX_BYTES_MIN + len(indexes[-1][1])
            if size >= INDEX_BYTES_PER_SLICE:
                break
        if indexes:
            self._driver.run(partial(self._write_indexes, indexes), partial(self._ended, "index not saved"))
        if size >= INDEX_BYTES_PER_SLICE:
            self._driver.post(partial(self._save_indexes, partitions, is_changed=True))
        elif indexes or is_changed:
            self.save_checkpoint(partial(self._ended, "checkpoint not saved", None))

    def _write_indexes(self, indexes: list[tuple[Path, bytes]]) -> None:
        for path, data in indexes:
            with suppress(FileNotFoundError):  # Nothing was written yet, or the topic was deleted meanwhile.
                self.disk.write(path, data, durable=False)
