# ruff: noqa: ARG001, ARG005  What replaces a method has its signature.
"""Mistakes in the log that the storage world must find: each takes out one fix, and is what the code did before.

The numbers are those of the issue that collected them. Most replace a method by its former self.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from walstream.cluster.local import Catalogue, Topic
from walstream.errors import OutOfFiles, PartitionOffline, StorageError, WalstreamError
from walstream.log import recovery, store, trash
from walstream.log.batch import BatchHeader
from walstream.log.cleaner import Cleaner, Round
from walstream.log.disk import File
from walstream.log.group_commit import GroupCommit
from walstream.log.journal import Journal, RedoReader
from walstream.log.keeping import KeptLog
from walstream.log.partition_log import PartitionLog
from walstream.log.recovery import Recovered, finish_swaps
from walstream.log.rounds import Rounds
from walstream.log.segment import Segment
from walstream.log.store import Dropped, LogStore
from walstream.sim.planting import Patch, patched
from walstream.sim.runner import run_storage
from walstream.sim.storage import STEPS


@dataclass(frozen=True, slots=True)
class StorageBug:
    """One mistake."""

    number: int
    """Of the fix that it takes out."""
    name: str
    text: str
    found_by: tuple[str, ...]
    """The promises that may give it away."""
    patches: Callable[[], list[Patch]]


# ── compaction ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _compacting_above_the_hw() -> list[Patch]:
    original = Cleaner.plan

    def plan(self: Cleaner, partition: PartitionLog, saved_segment: int, now_ms: int) -> Round | None:
        high_watermark = partition.high_watermark
        partition.high_watermark = partition.log_end
        try:
            work = original(self, partition, saved_segment, now_ms)
        finally:
            partition.high_watermark = high_watermark
        if work is not None:
            work.log_end = high_watermark
        return work

    return [(Cleaner, "plan", plan)]


def _forgetting_a_round_that_fails() -> list[Patch]:
    """`finish` is not repeated, and begins with what it has done already."""

    def finish(self: Cleaner, work: Round) -> None:
        for group, _ in work.made:
            for segment in group:
                segment.remove(keeps_snapshot=segment is group[0])
        finish_swaps(self._disk, work.partition.folder)
        for _, successor in work.made:
            successor.path = successor.path.with_name(f"{successor.base_offset:020d}.log")
            successor.save_index()

    original = Rounds._settled

    def settled(self: Rounds, work: Round, nothing: None, error: Exception | None) -> None:
        original(self, work, nothing, None)

    return [(Cleaner, "finish", finish), (Rounds, "_settled", settled)]


def _dropping_last_headers() -> list[Patch]:
    return [(Round, "keeps_header", lambda self, header: False)]


# ── starts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _reusing_journal_numbers() -> list[Patch]:
    original = Journal.__init__

    def init(self: Journal, *arguments: Any) -> None:
        original(self, *arguments)
        self._number = max(self._numbers(), default=0)

    return [(Journal, "__init__", init)]


def _ignoring_missing_segments() -> list[Patch]:
    return [
        (recovery, "_missing", lambda known, bases, *, is_exact: []),
        (recovery, "_note_missing", lambda found, known, missing, *, is_exact: None),
    ]


def _continuing_at_a_lost_end() -> list[Patch]:
    original = recovery.recover

    def recover(*arguments: Any, **options: Any) -> Recovered:
        saved = arguments[2]
        found = original(*arguments, **{**options, "is_only_copy": False})
        found.lost = None
        found.is_unclean = saved is not None and saved.is_unclean
        return found

    from walstream.log import opening

    return [(opening, "recover", recover)]


def _forgetting_the_age_of_a_segment() -> list[Patch]:
    adopt = KeptLog.adopt

    def adopt_without_age(self: KeptLog, recovered: Recovered) -> None:
        adopt(self, recovered)
        self.segments[-1].created_ms = 0

    def age_ms(self: Segment, header: BatchHeader, monotonic_ms: int) -> int:
        return monotonic_ms - self.created_ms if self.created_ms > 0 else 0

    return [(KeptLog, "adopt", adopt_without_age), (Segment, "age_ms", age_ms)]


# ── topics ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _naming_folders_by_topic() -> list[Patch]:
    def topic_folder(topic: Topic) -> str:
        return topic.name

    return [
        (store, "topic_folder", topic_folder),
        (trash, "topic_folder", topic_folder),
        (store, "rename_old_folders", lambda disk, folder, topics: None),
    ]


def _refusing_gaps_of_the_leader() -> list[Patch]:
    original = PartitionLog.append_replicated

    def append_replicated(self: PartitionLog, received: Any, *, offset: int, may_have_gaps: bool = False) -> int:
        return original(self, received, offset=offset)

    return [(PartitionLog, "append_replicated", append_replicated)]


def _dating_partitions_by_their_topic() -> list[Patch]:
    return [(Catalogue, "is_older_than_disk", lambda self, topic, index: topic.since <= self.joined_version)]


# ── disks that are full, or open no more files ──────────────────────────────────────────────────────────────────────


def _reopening_beside_everything() -> list[Patch]:
    """A partition comes back from a full disk while compaction and removals work on its files."""

    def reopen(self: LogStore, partition: PartitionLog, reader: RedoReader) -> None:
        saved = partition.checkpoint()

        def work() -> None:
            if self.commit.is_settling:
                return
            try:
                redo = reader.redo(partition.key)
                found = self._opener.recover(partition.folder, saved, partition.settings, clean=False, redo=redo)
                self.forget(partition.key)
            except (OSError, WalstreamError):
                partition.distrust_files()
            else:
                self._driver.post(partial(come_back, partition, found))

        self.commit.run_between(work)

    def come_back(partition: PartitionLog, found: Recovered) -> None:
        if found.log_end < partition.durable_end or partition.write_error is None or partition.is_discarded:
            return
        partition._role_changes += 1
        partition.truncations += 1
        partition.is_leader = not partition.replicated
        partition.adopt(found)

    return [(LogStore, "_reopen", reopen)]


def _keeping_read_segments_open_only() -> list[Patch]:
    """The limit of open files counts sealed segments that are read."""

    def opened(self: Segment, *, create: bool) -> File:
        if self._file is None:
            self._file = self._disk.open(self.path, create=create)
            self.has_file = True
        if self.sealed and not create:
            self._open_files.touch(self)
        return self._file

    def file_to_write(self: Segment) -> File:
        if self._file is None:
            self._file = self._disk.open(self.path, create=True)
            self.has_file = True
        return self._file

    return [(Segment, "_opened", opened), (Segment, "file_to_write", file_to_write)]


def _staying_offline_without_files() -> list[Patch]:
    original = GroupCommit._write_failure

    def write_failure(self: GroupCommit, error: OSError, segment: Segment) -> PartitionOffline:
        failure = original(self, error, segment)
        return PartitionOffline(failure.message, failure.hint) if isinstance(failure, OutOfFiles) else failure

    return [(GroupCommit, "_write_failure", write_failure)]


def _having_no_reserve() -> list[Patch]:
    return [(LogStore, "_begin_reserve", lambda self: None), (LogStore, "_make_reserve", lambda self, size: None)]


def _forgetting_what_was_not_removed() -> list[Patch]:
    def drop(self: LogStore, dropped: list[Dropped], done: Callable[[Exception | None], None] | None = None) -> None:
        def saved(error: Exception | None) -> None:
            if error is None:
                for partition, segments in dropped:
                    self._remove_files(partition, segments)
            elif isinstance(error, OSError):
                error = StorageError(str(error.strerror), "")
            if done is not None:
                done(error)

        self._not_removed.clear()
        self.save_checkpoint(saved)

    return [(LogStore, "_drop", drop)]


# ── clocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ahead_ms(store: LogStore) -> int:
    """Return how far the wall clock is ahead of the monotonic one."""
    return store.now_ms() - store.monotonic_ms()


def _expiring_producers_by_the_wall_clock() -> list[Patch]:
    init, enforce = LogStore.__init__, LogStore.enforce_retention

    def init_with_offset(self: LogStore, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.ahead_at_start_ms = _ahead_ms(self)  # type: ignore[attr-defined]

    def enforce_retention(self: LogStore, then: Callable[[], None] = lambda: None) -> None:
        stepped_ms = _ahead_ms(self) - self.ahead_at_start_ms  # type: ignore[attr-defined]
        for partition in self.partitions.values():
            partition.producers.expire(self.monotonic_ms() + stepped_ms - self._producer_expiry_ms)
        enforce(self, then)

    return [(LogStore, "__init__", init_with_offset), (LogStore, "enforce_retention", enforce_retention)]


def _scheduling_by_the_wall_clock() -> list[Patch]:
    init, tick = LogStore.__init__, LogStore.tick

    def init_with_offset(self: LogStore, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.ahead_ms = _ahead_ms(self)  # type: ignore[attr-defined]

    def tick_by_the_wall_clock(self: LogStore) -> None:
        stepped_ms = _ahead_ms(self) - self.ahead_ms  # type: ignore[attr-defined]
        self.ahead_ms += stepped_ms  # type: ignore[attr-defined]
        self._checkpoint_due_ms -= stepped_ms
        self._retention_due_ms -= stepped_ms
        self._settling_due_ms -= stepped_ms
        tick(self)

    return [(LogStore, "__init__", init_with_offset), (LogStore, "tick", tick_by_the_wall_clock)]


BUGS_FOR_STORAGE = (
    StorageBug(
        1, "compacting above the hw", "Records that may yet be truncated replace committed ones of their keys.",
        ("last value of a key",), _compacting_above_the_hw,
    ),
    StorageBug(
        2, "reusing journal numbers", "After a clean stop the journal's files get numbers that they had before.",
        ("durability", "truncated records come back", "acknowledged records", "offset reuse",
         "committed segments stay readable", "last value of a key"), _reusing_journal_numbers,
    ),
    StorageBug(
        3, "naming folders by topic", "A topic's folder has its name alone, also when it is created again.",
        ("topic isolation", "acknowledged records", "durability", "committed segments stay readable",
         "truncated records come back", "housekeeping keeps running", "last value of a key", "log start",
         "offset reuse", "offsets in order"), _naming_folders_by_topic,
    ),
    StorageBug(
        4, "reopening beside everything", "A partition returns from a full disk while jobs work on its files.",
        ("acknowledged records", "log start", "high watermark", "last value of a key", "damage is reported",
         "committed segments stay readable", "housekeeping keeps running", "retention frees the disk",
         "durability"), _reopening_beside_everything,
    ),
    StorageBug(
        5, "forgetting a round that fails", "A round of compaction whose end fails is not finished later.",
        ("committed segments stay readable", "last value of a key", "acknowledged records", "retention frees the disk",
         "housekeeping keeps running"), _forgetting_a_round_that_fails,
    ),
    StorageBug(
        6, "ignoring missing segments", "Segment files that are missing at a start are not looked for.",
        ("damage is reported", "committed segments stay readable", "acknowledged records"),
        _ignoring_missing_segments,
    ),
    StorageBug(
        6, "continuing at a lost end", "A log whose last file lost its end continues there.",
        ("offset reuse", "damage is reported"), _continuing_at_a_lost_end,
    ),
    StorageBug(
        7, "dropping last headers", "Compaction drops the last batch of a producer when later records replace it.",
        ("exactly once",), _dropping_last_headers,
    ),
    StorageBug(
        7, "expiring producers by the wall clock", "A step of the clock by a day forgets producers that are alive.",
        ("exactly once",), _expiring_producers_by_the_wall_clock,
    ),
    StorageBug(
        9, "refusing gaps of the leader", "A follower takes gaps only while its topic is compacted.",
        ("replica catches up",), _refusing_gaps_of_the_leader,
    ),
    StorageBug(
        10, "dating partitions by their topic", "A partition that was added to a topic is as old as the topic.",
        ("new partitions can be led",), _dating_partitions_by_their_topic,
    ),
    StorageBug(
        11, "keeping read segments open only", "Segments that are written and never read stay open.",
        ("open files",), _keeping_read_segments_open_only,
    ),
    StorageBug(
        11, "staying offline without files", "A partition that could open no file waits for a restart.",
        ("writes resume",), _staying_offline_without_files,
    ),
    StorageBug(
        12, "forgetting the age of a segment", "After a restart segment.ms does not roll the active segment.",
        ("segment age",), _forgetting_the_age_of_a_segment,
    ),
    StorageBug(
        14, "having no reserve", "Nothing is set aside for a full disk.",
        ("a full disk can be freed", "writes resume", "a start succeeds", "replica catches up"), _having_no_reserve,
    ),
    StorageBug(
        14, "forgetting what was not removed", "Segments whose checkpoint failed are not removed later.",
        ("retention frees the disk",), _forgetting_what_was_not_removed,
    ),
    StorageBug(
        15, "scheduling by the wall clock", "A clock that is set back stops what is due from time to time.",
        ("housekeeping keeps running", "retention frees the disk"), _scheduling_by_the_wall_clock,
    ),
)  # fmt: skip


@contextmanager
def planted_in_storage(bug: StorageBug) -> Iterator[None]:
    """Have the bug in the code for a while."""
    with patched(bug.patches()):
        yield


def first_found(bug: StorageBug, seeds: Iterable[int], steps: int = STEPS) -> tuple[int, str] | None:
    """Return the first seed that finds a bug, and what it says: a promise of `found_by`. None if no seed does."""
    with planted_in_storage(bug):
        for seed in seeds:
            verdict = run_storage(seed, steps)
            if verdict.invariant in bug.found_by:
                return seed, verdict.text
    return None
