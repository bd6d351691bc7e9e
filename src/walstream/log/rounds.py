"""Rounds of compaction, one at a time, beside everything else a store does.

Owns the order of a round's steps (see `cleaner`) and where each runs: what takes long on a thread of its own, so that
a round of minutes holds up no checkpoint; what readers can see on the event-loop thread. A round that fails, or whose
topic is deleted meanwhile, leaves the log as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from walstream import logs
from walstream.log.checkpoint import Checkpoint
from walstream.log.cleaner import Cleaner, Round
from walstream.log.driver import Driver
from walstream.log.partition_log import PartitionLog
from walstream.log.reading import ReadableLog

log = logs.get(__name__)

SaveCheckpoint = Callable[[Callable[[Exception | None], None]], None]


class Rounds:
    """Begins rounds and sees them through."""

    def __init__(self, cleaner: Cleaner, driver: Driver, save_checkpoint: SaveCheckpoint) -> None:
        self._cleaner = cleaner
        self._driver = driver
        self._save_checkpoint = save_checkpoint
        self._work: Round | None = None
        self._afterwards: list[Callable[[], None]] = []

    def begin(self, partitions: Iterable[PartitionLog], saved: Checkpoint, now_ms: int) -> None:
        """Begin the next round that is due, unless one is running."""
        if self._work is not None:
            return
        for partition in partitions:
            if partition.is_held or partition.failure is not None:
                continue
            state = saved.partition(partition.key)
            work = self._cleaner.plan(partition, state.segment, now_ms) if state else None
            if work is not None:
                self._work = work
                self._driver.run_long(partial(self._cleaner.execute, work), partial(self._written, work))
                return

    def stop(self, topic: str | None = None) -> None:
        """Give up the round that is running, if it is on this topic or on any."""
        if self._work is not None and topic in (None, self._work.partition.topic):
            self._work.is_given_up = True

    def end_on(self, partition: ReadableLog, then: Callable[[], None]) -> None:
        """Give up the round that is running, if it is on this partition, and call back when nothing is left of it."""
        if self._work is None or self._work.partition is not partition:
            then()
        else:
            self._work.is_given_up = True
            self._afterwards.append(then)

    def _over(self) -> None:
        self._work = None
        waiting, self._afterwards = self._afterwards, []
        for then in waiting:
            then()

    def _written(self, work: Round, _: None, error: Exception | None) -> None:
        """The successors are written: say durably that there will be gaps."""
        if error is not None or work.is_given_up:
            self._end(work, error)
            return
        partition = work.partition
        partition.gaps_below = max(partition.gaps_below, work.reached)
        self._save_checkpoint(partial(self._announced, work))

    def _announced(self, work: Round, error: Exception | None) -> None:
        if error is not None or work.is_given_up:
            self._end(work, error)
        else:
            self._driver.run(partial(self._cleaner.decide, work), partial(self._decided, work))

    def _decided(self, work: Round, _: None, error: Exception | None) -> None:
        if error is not None or work.is_given_up:
            self._end(work, error)
            return
        self._cleaner.install(work)
        self._driver.run(partial(self._cleaner.finish, work), partial(self._finished, work))

    def _finished(self, work: Round, _: None, error: Exception | None) -> None:
        stats = work.stats
        log.info("compacted", partition=work.partition.name, read_bytes=stats.bytes_read, kept_bytes=stats.bytes_kept)
        if error is not None and not work.is_given_up:
            log.warning("compaction left files behind", partition=work.partition.name, error=str(error))
        self._over()

    def _end(self, work: Round, error: Exception | None) -> None:
        """End a round that changed nothing, and remove what it wrote."""
        if error is not None and not work.is_given_up:
            log.warning("compaction failed", partition=work.partition.name, error=str(error))
        self._driver.run(partial(self._cleaner.undo, work), lambda _, __: self._over())
