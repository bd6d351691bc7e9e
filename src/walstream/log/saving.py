"""Saving checkpoints: one at a time, and many wishes with one save.

Owns what is on the disk (`saved`) and who waits for the next one. A wish is fulfilled by a save that began after it, so
that whoever is called back knows that the state as of the call, or a later one, is durable.

The state of all partitions is collected in slices of the event loop's time: each partition's is what it was at one
moment, and no partition's depends on another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from walstream.log import checkpoint as checkpoints
from walstream.log.checkpoint import Checkpoint, PartitionCheckpoint
from walstream.log.disk import Disk
from walstream.log.driver import Driver
from walstream.log.surroundings import Done

SLICE_ENTRIES = 2_000
"""A slice ends at the partition with which it has so many entries: after about a millisecond."""

States = Iterator[tuple[str, PartitionCheckpoint]]


class Saver:
    """Writes the checkpoint of a node's log."""

    def __init__(self, disk: Disk, path: Path, driver: Driver, collect: Callable[[], States]) -> None:
        """`collect` iterates over the partitions there are, and returns the state of each as it is then."""
        self._disk = disk
        self._path = path
        self._driver = driver
        self._collect = collect
        self._waiters: list[Done] = []
        self._is_saving = False
        self.saved_bytes = 0
        """The size of the last checkpoint that this process wrote."""
        self.saved = checkpoints.load(disk, path) or Checkpoint(epoch=0, clean=False)
        self.epoch = self.saved.epoch
        """The epoch of the checkpoints to come."""

    def write(self, state: Checkpoint) -> None:
        """Make a checkpoint durable, and remember that it is. Blocks."""
        self.saved_bytes = checkpoints.save(self._disk, self._path, state)
        self.saved = state

    def doubt(self) -> None:
        """Say durably that the last stop was not clean, before files change that the checkpoint lists. Blocks."""
        self.write(msgspec.structs.replace(self.saved, clean=False))

    def save(self, done: Done) -> None:
        """Write a checkpoint of the state as it is now or later; `done` once it is durable."""
        self._waiters.append(done)
        if not self._is_saving:
            self._save()

    def _save(self) -> None:
        waiters, self._waiters = self._waiters, []
        self._is_saving = True
        self._collect_slice(self._collect(), {}, waiters)

    def _collect_slice(self, states: States, collected: dict[str, PartitionCheckpoint], waiters: list[Done]) -> None:
        entries = 0
        try:
            for key, state in states:
                collected[key] = state
                entries += state.entries
                if entries >= SLICE_ENTRIES:
                    self._driver.post(partial(self._collect_slice, states, collected, waiters))
                    return
        except Exception as error:
            self._saved(waiters, None, error)
            return
        checkpoint = Checkpoint(epoch=self.epoch, clean=False, partitions=collected)
        self._driver.run(partial(self.write, checkpoint), partial(self._saved, waiters))

    def _saved(self, waiters: list[Done], _: None, error: Exception | None) -> None:
        self._is_saving = False
        for done in waiters:
            done(error)
        if self._waiters and not self._is_saving:
            self._save()
