"""Rounds of compaction, one at a time, beside everything else a store does.

Runs the steps of a round (see `cleaner`) in their order: what takes long on a thread of its own, so that a round of
minutes holds up no checkpoint; what readers can see on the event-loop thread. A round that fails before readers see it
is undone, any other one is finished. Where the disk refuses that, it is retried on each tick; meanwhile the partition
gets no other round, and truncation and the removal of its segments wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from walstream import logs
from walstream.log.checkpoint import Checkpoint
from walstream.log.cleaner import Cleaner, Round
from walstream.log.driver import Driver
from walstream.log.journal import PartitionKey
from walstream.log.partition_log import PartitionLog
from walstream.log.reading import ReadableLog

log = logs.get(__name__)

SaveCheckpoint = Callable[[Callable[[Exception | None], None]], None]


class Rounds:
    """Starts rounds and runs their steps."""

    def __init__(self, cleaner: Cleaner, driver: Driver, save_checkpoint: SaveCheckpoint) -> None:
        self._cleaner = cleaner
        self._driver = driver
        self._save_checkpoint = save_checkpoint
        self._work: Round | None = None
        self._failed: list[Round] = []
        """Rounds whose `finish` or `undo` has failed."""
        self._retried: Round | None = None
        """The failed round whose `finish` or `undo` is running again."""
        self._last_key: PartitionKey | None = None
        """The partition of the last round."""
        self._afterwards: list[tuple[Round, Callable[[], None]]] = []

    def begin(self, partitions: Iterable[PartitionLog], saved: Checkpoint, now_ms: int) -> None:
        """Begin the next round that is due, unless one is running.

        Partitions take turns: one whose rounds fail, because its disk does not read, holds up no other.
        """
        if self._work is not None:
            return
        ordered = list(partitions)
        turn = next((number for number, one in enumerate(ordered, 1) if one.key == self._last_key), 0)
        for partition in [*ordered[turn:], *ordered[:turn]]:
            if partition.is_held or partition.failure is not None or self._round_on(partition) is not None:
                continue
            state = saved.partition(partition.key)
            try:
                work = self._cleaner.plan(partition, state.segment, now_ms) if state else None
            except OSError as error:  # An index had to be made again from a segment that cannot be read.
                log.warning("compaction skipped", partition=partition.name, error=str(error))
                continue
            if work is not None:
                self._work, self._last_key = work, partition.key
                self._driver.run_long(partial(self._cleaner.execute, work), partial(self._written, work))
                return

    def stop(self, topic: str | None = None) -> None:
        """Give up the round that is running, if it is on this topic or on any."""
        if self._work is not None and topic in (None, self._work.partition.topic):
            self._work.is_given_up = True

    def retry(self) -> None:
        """Retry to finish or undo a round whose files the disk refused to rename or remove. Called on each tick."""
        if self._retried is None and self._failed:
            self._retried = self._failed.pop(0)
            self._settle(self._retried)

    def end_on(self, partition: ReadableLog, then: Callable[[], None]) -> None:
        """Give up the round on a partition, if there is one, and call back when its files are finished or undone."""
        work = self._round_on(partition)
        if work is None:
            then()
        else:
            work.is_given_up = True
            self._afterwards.append((work, then))

    def is_using(self, partition: ReadableLog, then: Callable[[], None]) -> bool:
        """Tell whether a round reads or renames segments of a partition; if so, call back when it has ended."""
        work = self._round_on(partition)
        if work is None or not (work is self._work or work.is_installed):
            return False
        self._afterwards.append((work, then))
        return True

    def _round_on(self, partition: ReadableLog) -> Round | None:
        works = [self._work, self._retried, *self._failed]
        return next((work for work in works if work is not None and work.partition is partition), None)

    def _written(self, work: Round, _: None, error: Exception | None) -> None:
        """The successors are written: say durably that there will be gaps."""
        if error is not None or work.is_given_up:
            self._undo(work, error)
            return
        partition = work.partition
        partition.gaps_below = max(partition.gaps_below, work.reached)
        self._save_checkpoint(partial(self._announced, work))

    def _announced(self, work: Round, error: Exception | None) -> None:
        if error is not None or work.is_given_up:
            self._undo(work, error)
        else:
            self._driver.run(partial(self._cleaner.decide, work), partial(self._decided, work))

    def _decided(self, work: Round, _: None, error: Exception | None) -> None:
        if error is not None or work.is_given_up:
            self._undo(work, error)
            return
        self._cleaner.install(work)
        stats = work.stats
        log.info("compacted", partition=work.partition.name, read_bytes=stats.bytes_read, kept_bytes=stats.bytes_kept)
        self._settle(work)

    def _undo(self, work: Round, error: Exception | None) -> None:
        """End a round that changed nothing, and remove what it wrote."""
        if error is not None and not work.is_given_up:
            log.warning("compaction failed", partition=work.partition.name, error=str(error))
        self._settle(work)

    def _settle(self, work: Round) -> None:
        """Finish a round that readers see, or undo one that they do not."""
        job = self._cleaner.finish if work.is_installed else self._cleaner.undo
        self._driver.run(partial(job, work), partial(self._settled, work))

    def _settled(self, work: Round, _: None, error: Exception | None) -> None:
        if work.partition.is_discarded:
            error = None  # The files are gone, or will be.
        if work is self._work:
            self._work = None
            if error is not None:
                log.warning("compaction not finished", partition=work.partition.name, error=str(error))
        if work is self._retried:
            self._retried = None
            if error is None:
                log.info("compaction finished", partition=work.partition.name)
        if error is not None:
            self._failed.append(work)
            return
        waiting = [then for waits_for, then in self._afterwards if waits_for is work]
        self._afterwards = [pair for pair in self._afterwards if pair[0] is not work]
        for then in waiting:
            then()
