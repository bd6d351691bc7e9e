"""Group commit: many appends, one fdatasync.

Appends queue `Write`s; one flush takes all that are waiting, writes them to their segments and makes them durable
together, while the next ones gather. Nothing is reported done before the sync that covers it has returned. In a node
the writes of one turn of the event loop are queued together, at its end (`on_gathering`, `release`).

A flush becomes durable in the cheaper of two ways: fdatasync of each segment it touched, or one record per batch in
the shared journal (see `journal`). The choice is arithmetic, in `_prefers_journal`.

`take`, `execute` and `complete` are the three steps; `execute` is the only one that touches the disk and the only one
that runs off the event-loop thread. `FlushThread` is the real driver; a simulator calls the steps itself.

A failed write or sync fails its partition and all writes queued behind it, and only those: what a failed fsync
covered is unknown, so it is neither tried again nor built upon.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from walstream.errors import DiskFull, OutOfFiles, PartitionOffline, SyncFailed
from walstream.log.disk import OUT_OF_FILES, Buffer, Disk, File, is_full
from walstream.log.folders import partition_name
from walstream.log.journal import Journal, PartitionKey
from walstream.log.segment import OPEN_FILES_MAX, Segment

JOURNAL_BYTES_PER_FILE = 96 * 1024
"""One more fdatasync costs 0.4 ms here, in which the disk writes about this much: below it, copying is cheaper."""


MIB = 1024 * 1024

Task = Callable[[], None]


def _nothing() -> None:
    """Do nothing, between two flushes."""


_NOTHING: Task = lambda: None  # noqa: E731  Marks that no item is held back.


GATHERED_MAX = 64
"""Writes that gather at most in a turn of the event loop: then the disk begins, while the loop reads on."""

JOURNAL_BYTES_ALONE = 16 * 1024
"""Overwriting a warm journal takes 0.2 ms less than appending to the one segment of a flush: worth this many bytes."""


class Owner(Protocol):
    """What group commit knows of a partition."""

    key: PartitionKey
    write_error: PartitionOffline | None
    """Set by the flush that failed; everything queued behind it fails the same way."""

    def prepare(self) -> None:
        """Make the folder. Called on the flush thread, before the first write to a segment."""

    def flushed(self, writes: list[Write]) -> None:
        """Hear that writes to one segment are durable. Called on the event-loop thread, in order."""

    def settled(self, segment: Segment, size: int, end_offset: int) -> None:
        """Hear that a segment's own file is durable up to there. Called on the event-loop thread."""

    def failed(self, error: PartitionOffline) -> None:
        """Hear that a write, and so all after it, failed. Called on the event-loop thread."""


@dataclass(slots=True, eq=False)
class Write:
    """One batch, or several in a row, on the way to the end of a segment."""

    owner: Owner
    segment: Segment
    position: int
    buffer: Buffer
    base_offset: int
    end_offset: int
    truncations: int = 0
    """How often the log had been cut when this was queued: what was queued before a cut is not reported after it."""
    sync: bool = True
    """False only for topics that acknowledge before fsync."""
    is_synced: bool = False
    """Set by the flush: the segment file itself holds it durably, not only the journal."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A segment whose file is not synced up to what it was given: the journal, or nothing, covers the rest.

    It holds the file that was written to, for the sync to come, also when the segment has closed it since.
    """

    owner: Owner
    segment: Segment
    file: File
    size: int
    end_offset: int


@dataclass(slots=True)
class Flush:
    """What one flush did."""

    done: list[list[Write]] = field(default_factory=list)
    """By segment, in the order of the first write to each."""
    failed: dict[int, tuple[Owner, PartitionOffline]] = field(default_factory=dict)
    syncs: int = 0
    bytes: int = 0
    journaled: bool = False

    def fail(self, owner: Owner, error: PartitionOffline) -> None:
        """Note the first failure of a partition and stop everything queued behind it."""
        if owner.write_error is None:
            owner.write_error = error
        self.failed.setdefault(id(owner), (owner, owner.write_error))


@dataclass(slots=True)
class FlushCounters:
    """Plain numbers for the metrics."""

    flushes: int = 0
    writes: int = 0
    bytes: int = 0
    syncs: int = 0
    journaled: int = 0


class GroupCommit:
    """Queues writes and makes them durable in groups."""

    def __init__(
        self,
        disk: Disk,
        journal: Journal,
        journal_bytes_max: int,
        resume_bytes: Callable[[], int],
        files_max: int = OPEN_FILES_MAX,
    ) -> None:
        """Write to at most `files_max` segments in one flush, and leave at most so many behind the journal."""
        self._disk = disk
        self._files_max = files_max
        self._journal = journal
        self._journal_bytes_max = journal_bytes_max
        self._resume_bytes = resume_bytes
        self._queue: SimpleQueue[list[Write] | Task | None] = SimpleQueue()
        self._held: list[Write] | Task | None = _NOTHING
        self._gathered: list[Write] = []
        self.on_gathering: Task | None = None
        """Called with the first write that gathers: `release` is to come soon. None: no write waits for others."""
        self._behind: dict[int, Behind] = {}
        self._settling: tuple[int, list[Behind]] | None = None
        self._settling_asked = False
        self.counters = FlushCounters()

    def submit(self, write: Write) -> None:
        """Queue a write; its owner hears of it through `flushed` or `failed`."""
        if self.on_gathering is None:
            self._queue.put([write])
            return
        self._gathered.append(write)
        count = len(self._gathered)
        if count == 1:
            self.on_gathering()
        elif count >= GATHERED_MAX:
            self.release()

    def release(self) -> None:
        """Let the flush have what has gathered: to wake its thread costs more than a write."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            self._queue.put(gathered)

    def run_between(self, task: Task) -> None:
        """Queue work that must come after every write queued before it and before every later one."""
        self.release()
        self._queue.put(task)

    def finish(self) -> None:
        """Make `take` return None once everything queued before has been taken."""
        self.release()
        self._queue.put(None)

    @property
    def is_idle(self) -> bool:
        """Whether `take` would find nothing just now."""
        return self._held is _NOTHING and self._queue.empty()

    def take(self, *, wait: bool) -> list[Write] | Task | None:
        """Return the writes that are queued, or the task that comes before the next write; None at the end."""
        writes: list[Write] = []
        try:
            while True:
                item = self._queue.get(block=wait and not writes) if self._held is _NOTHING else self._held
                self._held = _NOTHING
                if isinstance(item, list):
                    writes += item
                elif writes:
                    self._held = item
                    return writes
                else:
                    return item
        except Empty:
            return writes

    def execute(self, writes: list[Write]) -> Flush:
        """Write the batches, make them durable, and say which are.

        A partition's next segment is written to only when all of the one before it is durable. Otherwise a crash could
        leave sound batches in the second and take the end of the first, and what nobody was told of would look like
        damage to what somebody was.
        """
        flush = Flush()
        groups: dict[int, list[Write]] = {}
        owners: dict[int, Segment] = {}
        for write in writes:
            segment = write.segment
            if owners.setdefault(id(write.owner), segment) is not segment:
                self._flush(groups, flush)
                groups, owners = {}, {id(write.owner): segment}
            elif len(groups) == self._files_max and id(segment) not in groups:
                self._flush(groups, flush)
                groups = {}
            groups.setdefault(id(segment), []).append(write)
        self._flush(groups, flush)
        flush.done = [group for group in flush.done if id(group[0].owner) not in flush.failed]
        return flush

    def _flush(self, groups: dict[int, list[Write]], flush: Flush) -> None:
        """Write groups of batches, one for each segment, and make them durable together."""
        written: list[tuple[list[Write], File]] = []
        for group in groups.values():
            file = self._write(group, flush)
            if file is not None:
                written.append((group, file))
        to_sync = []
        for group, file in written:
            if any(write.sync for write in group) or len(self._behind) >= self._files_max:
                to_sync.append((group, file))
            else:
                self._leave_behind(group, file)
        if self._prefers_journal([group for group, _ in to_sync]):
            self._sync_journal(to_sync, flush)
        else:
            for group, file in to_sync:
                self._sync_segment(group, file, flush)
        flush.done += [group for group, _ in written]

    def complete(self, flush: Flush) -> None:
        """Tell the partitions. Runs on the event-loop thread, in the order of the flushes."""
        counters = self.counters
        counters.flushes += 1
        counters.writes += sum(map(len, flush.done))
        counters.bytes += flush.bytes
        counters.syncs += flush.syncs
        counters.journaled += flush.journaled
        for group in flush.done:
            group[0].owner.flushed(group)
        for owner, error in flush.failed.values():
            owner.failed(error)

    # ── the steps of execute ─────────────────────────────────────────────────────────────────────────────────────

    def _write(self, group: list[Write], flush: Flush) -> File | None:
        """Put a group of adjacent batches into its segment and return the file, to be synced; None after a failure.

        A partition that has failed writes nothing more.
        """
        first = group[0]
        owner, segment = first.owner, first.segment
        if owner.write_error is not None:
            flush.fail(owner, owner.write_error)
            return None
        try:
            if self._disk.is_reserve_spent:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # What is left is for what frees space.
            if not segment.is_named:
                owner.prepare()
            behind = self._behind.get(id(segment))
            file = segment.file_to_write() if behind is None else behind.file
            flush.bytes += file.pwritev([write.buffer for write in group], first.position)
            if not segment.is_named:
                self._disk.sync_directory(segment.path.parent)
                segment.is_named = True
        except OSError as error:
            flush.fail(owner, self._write_failure(error, segment))
            return None
        return file

    def _prefers_journal(self, groups: list[list[Write]]) -> bool:
        """Tell whether copying the bytes to the journal is cheaper than syncing every file."""
        if not groups or self._journal.is_broken or len(self._behind) + len(groups) > self._files_max:
            return False
        total = sum(len(write.buffer) for group in groups for write in group)
        if len(groups) == 1:
            return total < JOURNAL_BYTES_ALONE and self._journal.is_warm_for(total, len(groups[0]))
        return total < JOURNAL_BYTES_PER_FILE * (len(groups) - 1)

    def _sync_segment(self, group: list[Write], file: File, flush: Flush) -> None:
        segment = group[0].segment
        try:
            segment.sync(file)
        except OSError as error:
            flush.fail(group[0].owner, self._sync_failure(error, segment))
            return
        flush.syncs += 1
        self._behind.pop(id(segment), None)
        for write in group:
            write.is_synced = True

    def _sync_journal(self, groups: list[tuple[list[Write], File]], flush: Flush) -> None:
        try:
            self._journal.append([(write.owner.key, write.buffer) for group, _ in groups for write in group])
        except OSError as error:
            for group, _ in groups:
                flush.fail(group[0].owner, self._sync_failure(error, group[0].segment))
            return
        flush.syncs += 1
        flush.journaled = True
        for group, file in groups:
            self._leave_behind(group, file)

    def _leave_behind(self, group: list[Write], file: File) -> None:
        last = group[-1]
        segment, size = last.segment, last.position + len(last.buffer)
        self._behind[id(segment)] = Behind(last.owner, segment, file, size, last.end_offset)

    # ── settling: the segments catch up with the journal ─────────────────────────────────────────────────────────

    def ask_settling(self) -> None:
        """Have the segments synced although the journal is not full: an idle node should not stay behind."""
        self._settling_asked = True
        self.run_between(_nothing)

    @property
    def is_settling(self) -> bool:
        """Whether segments are being synced beside the flushes. Between two flushes none begins to be."""
        return self._settling is not None

    def forget(self, key: PartitionKey) -> None:
        """Between flushes: void what the journal holds for a partition, whose files somebody else has synced."""
        self._journal.forget([key])
        self.abandon({key})

    def abandon(self, keys: set[PartitionKey]) -> None:
        """Between flushes: leave the files of these partitions unsynced, because nothing will read them again."""
        self._behind = {number: behind for number, behind in self._behind.items() if behind.owner.key not in keys}

    @property
    def wants_settling(self) -> bool:
        """Whether single small flushes go the slow way until the segments are synced and the journal begins anew."""
        return self._settling is None and self._journal.is_cold

    def begin_settling(self) -> bool:
        """Between flushes: if it is time, turn to a new journal file; what the old one covers is for `settle`."""
        due = (
            self._settling_asked
            or self._journal.size >= self._journal_bytes_max
            or 2 * len(self._behind) >= self._files_max
        )
        if not due or self._settling is not None:
            return False
        self._settling_asked = False
        if not self._behind:
            return False
        self._settling = (self._journal.rotate(), list(self._behind.values()))
        self._behind = {}
        return True

    def settle(self) -> list[tuple[Behind, OSError | None]]:
        """Sync the segments behind the old journal file and drop it. Blocks; runs beside flushes, on another thread.

        If one cannot be synced the file stays, for recovery to offer its batches again.
        """
        assert self._settling is not None
        number, segments = self._settling
        results: list[tuple[Behind, OSError | None]] = []
        for behind in segments:
            try:
                behind.segment.sync(behind.file)
                results.append((behind, None))
            except OSError as error:
                results.append((behind, error))
        if any(error for _, error in results):
            self._journal.keep(number)
        else:
            self._let_go(number)
        self._settling = None
        return results

    def _let_go(self, number: int) -> None:
        """Drop a journal file that nobody needs. What fails here loses nothing: the next round comes all the same."""
        try:
            self._journal.drop(number)
        except OSError:
            self._journal.keep(number)
        with suppress(OSError):  # No space for a spare file: the next flush that needs one tries again.
            self._journal.prepare()

    def complete_settling(self, results: list[tuple[Behind, OSError | None]]) -> None:
        """Tell the partitions. Runs on the event-loop thread."""
        for behind, error in results:
            if error is None:
                behind.owner.settled(behind.segment, behind.size, behind.end_offset)
            elif behind.owner.write_error is None:
                failure = self._sync_failure(error, behind.segment)
                behind.owner.write_error = failure
                behind.owner.failed(failure)

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _write_failure(self, error: OSError, segment: Segment) -> PartitionOffline:
        where = partition_name(segment.path.parent)
        if is_full(error):
            return DiskFull(f"No space is left on the disk for {where}.", self._space_hint)
        if error.errno in OUT_OF_FILES:
            return OutOfFiles(
                f"No more files can be opened for {where}: {error.strerror}.",
                "Raise the limit of open files (ulimit -n, LimitNOFILE= of systemd); writes resume by themselves.",
            )
        return PartitionOffline(
            f"{where} cannot be written: {error.strerror}.",
            "Mend the cause and restart the node; reads go on.",
        )

    def _space_hint(self) -> str:
        return (
            "Free some, lower retention or delete topics; writes resume by themselves when "
            f"{self._resume_bytes() / MIB:.1f} MiB are free, reads go on."
        )

    def _sync_failure(self, error: OSError, segment: Segment) -> PartitionOffline:
        if is_full(error) or error.errno in OUT_OF_FILES:
            return self._write_failure(error, segment)
        return SyncFailed(
            f"fsync failed for {partition_name(segment.path.parent)}: {error.strerror}.",
            "What it covered was not acknowledged. Check the disk, then restart the node; reads go on.",
        )


class FlushThread:
    """Drives a GroupCommit: flushes on a thread of its own, completions posted to the event loop."""

    def __init__(
        self,
        commit: GroupCommit,
        post: Callable[[Callable[[], None]], None],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._commit = commit
        self._post = post
        self._failed = failed
        self._thread = threading.Thread(target=self._guarded, args=(self._run,), name="walstream-flush", daemon=True)
        self._thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)

    def _run(self) -> None:
        commit = self._commit
        settler: threading.Thread | None = None
        while (taken := commit.take(wait=True)) is not None:
            if isinstance(taken, list):
                self._post(partial(commit.complete, commit.execute(taken)))
            else:
                taken()
            taken = _NOTHING  # What was written is let go before the next is waited for.
            if commit.begin_settling():
                settler = threading.Thread(target=self._guarded, args=(self._settle,), name="walstream-settle")
                settler.start()
        if settler is not None:
            settler.join()
        commit.ask_settling()
        if commit.begin_settling():
            self._settle()

    def _settle(self) -> None:
        self._post(partial(self._commit.complete_settling, self._commit.settle()))

    def stop(self) -> None:
        """Flush what is queued, sync what is behind, and end the thread. Blocks."""
        self._commit.finish()
        self._thread.join()
