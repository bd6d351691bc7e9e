"""Where the folders of deleted topics go: moved aside at once, removed when there is time.

A crash may come between the catalogue's change and the folder's, so every start removes the folders that belong to no
topic of the catalogue. The topic's id is in the folder's name (see `folders`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import UUID

from walstream import logs
from walstream.cluster.local import Topic
from walstream.log.disk import Disk
from walstream.log.folders import topic_folder

log = logs.get(__name__)


class Trash:
    """The folder for folders on their way out. Everything here blocks."""

    def __init__(self, disk: Disk, folder: Path, new_id: Callable[[], UUID]) -> None:
        self._disk = disk
        self._topics = folder / "topics"
        self._trash = folder / "trash"
        self._new_id = new_id

    def discard_strangers(self, topics: Mapping[str, Topic]) -> None:
        """Remove the folders of deleted topics, and everything that an earlier process had moved aside."""
        known = {topic_folder(topic) for topic in topics.values()}
        try:
            for name in self._disk.list(self._topics):
                if name not in known:
                    self.put(name)
            for name in self._disk.list(self._trash):
                self._disk.remove(self._trash / name)
        except OSError as error:
            log.warning("deleted topic folders not removed", error=str(error))

    def put(self, name: str) -> Path:
        """Move the topic folder of this name aside and return its new path."""
        target = self._trash / self._new_id().hex
        try:
            self._disk.rename(self._topics / name, target)
            self._disk.sync_directory(self._topics)
        except FileNotFoundError:
            pass  # Nothing was ever written to it.
        return target
