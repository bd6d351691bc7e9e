"""Where the folders of deleted topics go: moved aside at once, removed when there is time.

Owns which folders belong to nobody. A crash may come between the catalogue and a folder, so every start looks for
folders whose topic is gone, or is another one of the same name (their `topic.id` says).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import UUID

from walstream.cluster.local import Topic
from walstream.log.disk import Disk
from walstream.log.partition_log import TOPIC_FILE


class Trash:
    """The folder for folders on their way out. Everything here blocks."""

    def __init__(self, disk: Disk, folder: Path, new_id: Callable[[], UUID]) -> None:
        self._disk = disk
        self._topics = folder / "topics"
        self._trash = folder / "trash"
        self._new_id = new_id

    def discard_strangers(self, topics: Mapping[str, Topic]) -> None:
        """Remove the folders of topics that were deleted, and what an earlier process had moved aside."""
        for name in self._disk.list(self._topics):
            topic = topics.get(name)
            identity = self._disk.read(self._topics / name / TOPIC_FILE)
            if topic is None or (identity is not None and identity != str(topic.id).encode()):
                self.put(name)
        for name in self._disk.list(self._trash):
            self._disk.remove(self._trash / name)

    def put(self, topic: str) -> Path:
        """Move a topic's folder aside and return where it is now."""
        target = self._trash / self._new_id().hex
        try:
            self._disk.rename(self._topics / topic, target)
            self._disk.sync_directory(self._topics)
        except FileNotFoundError:
            pass  # Nothing was ever written to it.
        return target
