"""Saving checkpoints: one at a time, and many wishes with one save.

Owns what is on the disk (`saved`) and who waits for the next one. A wish is fulfilled by a save that began after it, so
that whoever is called back knows that the state as of the call, or a later one, is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from walstream.log import checkpoint as checkpoints
from walstream.log.checkpoint import Checkpoint
from walstream.log.disk import Disk
from walstream.log.driver import Driver
from walstream.log.surroundings import Done


class Saver:
    """Writes the checkpoint of a node's log."""

    def __init__(self, disk: Disk, path: Path, driver: Driver, collect: Callable[[], Checkpoint]) -> None:
        self._disk = disk
        self._path = path
        self._driver = driver
        self._collect = collect
        self._waiters: list[Done] = []
        self._is_saving = False
        self.saved_bytes = 0
        """The size of the last checkpoint that this process wrote."""
        self.saved = checkpoints.load(disk, path) or Checkpoint(epoch=0, clean=False)

    def write(self, state: Checkpoint) -> None:
        """Make a checkpoint durable, and remember that it is. Blocks."""
        self.saved_bytes = checkpoints.save(self._disk, self._path, state)
        self.saved = state

    def save(self, done: Done) -> None:
        """Write a checkpoint of the state as it is now or later; `done` once it is durable."""
        self._waiters.append(done)
        if not self._is_saving:
            self._save()

    def _save(self) -> None:
        waiters, self._waiters = self._waiters, []
        state = self._collect()
        self._is_saving = True

        def saved(_: None, error: Exception | None) -> None:
            self._is_saving = False
            for done in waiters:
                done(error)
            if self._waiters and not self._is_saving:
                self._save()

        self._driver.run(lambda: self.write(state), saved)
