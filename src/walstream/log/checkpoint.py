"""The checkpoint: what recovery may trust without reading it again.

One file for the whole node, replaced atomically: at every start (with the new epoch, before the first append or
answer), every `log.checkpoint_interval_ms` while something changes, when records are deleted, and at a clean stop.
For each partition it says up to where the segment's file is synced, and what the log's state was just there; recovery
goes on from that point by reading batches. `clean` means that nothing was written after it.

The epoch map of every partition is in here, too: a new epoch must be durable before the first batch that carries it,
for all partitions of a node at once, and one file needs one fsync for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from walstream.errors import CorruptLog
from walstream.log.disk import Disk
from walstream.log.journal import PartitionKey

FORMAT = 1


class PartitionCheckpoint(msgspec.Struct, frozen=True):
    """The state of one partition just below `offset`."""

    log_start: int
    segment: int
    """Base offset of the segment that `position` lies in."""
    position: int
    """Everything before it in that file, and in all older files, is synced and was checked."""
    offset: int
    """The offset of the batch that begins at `position`."""
    epochs: list[tuple[int, int]] = []
    producers: list[Any] = []
    cleaned_until: int = 0
    """Compaction has seen everything below."""
    gaps_below: int = 0
    """Compaction may have taken offsets away below; above, a missing offset is damage."""
    takes_gaps: bool = False
    """Behind the checkpoint there may be more gaps than that: a leader has sent them."""
    tombstones_due_ms: int | None = None
    """When compaction should come again, although nothing is dirty, because tombstones may go then."""
    leader_epoch: int = -1
    """The newest leader epoch that was ever taken or heard of; durable before anybody is told that it is known."""
    led_epoch: int = -1
    """The newest leader epoch in which this node led and stamped append times, in a log that others have, too."""
    durable_end: int = 0
    """Everything below was durable, here or in the journal. A recovery that finds less has lost something."""
    high_watermark: int = 0
    """A hint: what was visible, in a log whose replicas decide that."""
    high_watermark_epoch: int = -1
    """The leader epoch in which that was learnt."""
    segments: list[tuple[int, int]] = []
    """Base offsets and sizes of the segments before `segment`: recovery does not read them, only looks for them."""
    is_unclean: bool = False
    """Something that was durable is lost, and has not been put back yet."""
    damaged: list[tuple[int, int]] = []
    """Offset ranges [from, to) that failed their checksums: what no scan reads again must not be forgotten."""

    @property
    def entries(self) -> int:
        """How much there is to collect and to encode."""
        return 1 + len(self.epochs) + len(self.producers) + len(self.segments) + len(self.damaged)


class Checkpoint(msgspec.Struct, frozen=True):
    """The state of a node's log."""

    epoch: int
    clean: bool
    partitions: dict[str, PartitionCheckpoint] = {}
    format: int = FORMAT

    def partition(self, key: PartitionKey) -> PartitionCheckpoint | None:
        """Return what is known of a partition; None for one created since."""
        return self.partitions.get(key_text(key))


def key_text(key: PartitionKey) -> str:
    """Return the name of a partition in the file."""
    topic_id: UUID = key[0]
    return f"{topic_id}/{key[1]}"


def save(disk: Disk, path: Path, checkpoint: Checkpoint) -> int:
    """Replace the checkpoint durably; return how many bytes it has."""
    data = encode(checkpoint)
    disk.write(path, data, durable=True)
    return len(data)


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the content of the file.

    Partition by partition: encoding holds the interpreter, and all of them at once would stop the event loop.
    """
    before, partitions, after = msgspec.json.encode(msgspec.structs.replace(checkpoint, partitions={})).partition(
        b'"partitions":{'
    )
    rows = (
        msgspec.json.encode(key) + b":" + msgspec.json.encode(state) for key, state in checkpoint.partitions.items()
    )
    return before + partitions + b",".join(rows) + after


def load(disk: Disk, path: Path) -> Checkpoint | None:
    """Read the checkpoint back; None in a new data directory."""
    data = disk.read(path)
    if data is None:
        return None
    try:
        checkpoint = msgspec.json.decode(data, type=Checkpoint)
    except msgspec.DecodeError as error:
        raise CorruptLog(
            f"The checkpoint {path} cannot be read: {error}.",
            "It holds the epochs that keep replicas apart: restore it from a backup of the folder, do not delete it.",
        ) from error
    if checkpoint.format != FORMAT:
        raise CorruptLog(
            f"The checkpoint {path} has format {checkpoint.format}; this walstream knows {FORMAT}.",
            "Start the version of walstream that wrote it.",
        )
    return checkpoint
