"""Names of the folders that hold the log: `topics/<topic>@<topic id>/<partition>`.

Invariant: a path belongs to one topic id. A background job of a deleted topic therefore never reaches a topic that
was created again under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from walstream.cluster.local import Topic
from walstream.errors import DirectoryUnusable
from walstream.log.disk import Disk

NAME_CHARS_MAX = 200
"""Characters of the topic's name in the folder's: file systems allow 255 bytes, a topic's name may take 249."""

OLD_IDENTITY = "topic.id"
"""In folders of the form `topics/<topic>`, which had no id in their name: the id of their topic."""


def topic_folder(topic: Topic) -> str:
    """Return the name of a topic's folder. '@' cannot occur in a topic's name."""
    return f"{topic.name[:NAME_CHARS_MAX]}@{topic.id.hex}"


def partition_name(folder: Path) -> str:
    """Return `<topic>-<partition>` for error messages, from a partition's folder."""
    return f"{folder.parent.name.partition('@')[0]}-{folder.name}"


def make_folder(disk: Disk, folder: Path) -> None:
    """Create a partition's folder durably, also where an earlier attempt ended before its names were synced."""
    disk.make_directory(folder)
    disk.sync_directory(folder.parent)
    disk.sync_directory(folder.parent.parent)


def rename_old_folders(disk: Disk, folder: Path, topics: Mapping[str, Topic]) -> None:
    """Give folders of the form `<topic>` the name they have now, durably. Repeatable at any point of a crash.

    A folder whose `topic.id` is another one belongs to a deleted topic and keeps its name, for the clean-up to find.
    """
    names = disk.list(folder)
    is_changed = False
    for name in names:
        topic = topics.get(name)
        if topic is None:
            continue
        identity = disk.read(folder / name / OLD_IDENTITY)
        if identity is not None and identity != str(topic.id).encode():
            continue
        target = topic_folder(topic)
        if target in names:
            raise DirectoryUnusable(
                f"{folder} holds {name} and {target}, and both belong to the topic {name}.",
                f"Move one of them to another place: mv '{folder / name}' /some/other/folder",
            )
        disk.rename(folder / name, folder / target)
        is_changed = True
    if is_changed:
        disk.sync_directory(folder)
