"""Opening a partition: recovery with what this node knows, and what stands in for files that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from walstream.errors import CorruptLog, StorageError
from walstream.log.checkpoint import PartitionCheckpoint
from walstream.log.disk import OUT_OF_FILES, Disk, is_full
from walstream.log.epochs import EpochMap
from walstream.log.index import Index
from walstream.log.journal import Redo
from walstream.log.producers import ProducerStates
from walstream.log.recovery import EPOCH_MAX, Recovered, recover
from walstream.log.segment import OpenFiles, Segment
from walstream.log.settings import TopicSettings


@dataclass(frozen=True, slots=True)
class Opener:
    """What the openings of a node's partitions have in common. Blocks."""

    disk: Disk
    open_files: OpenFiles
    producers_max: int
    monotonic_ms: Callable[[], int]
    replicated: bool
    epoch: int
    """The node's own: nothing that it wrote alone has a newer one."""

    def open(
        self,
        folder: Path,
        saved: PartitionCheckpoint | None,
        settings: TopicSettings,
        *,
        clean: bool,
        redo: Redo,
        is_only_copy: bool,
    ) -> Recovered:
        """Recover a partition; one whose files cannot be used is opened without them, offline.

        Raises OSError where no more files can be opened, for nothing is wrong with this partition's, nor with the next;
        and on a full disk: a partition without its newest batches must not pass for one that lost them.
        """
        try:
            return self.recover(folder, saved, settings, clean=clean, redo=redo, is_only_copy=is_only_copy)
        except (CorruptLog, OSError) as error:
            if is_full(error) or (isinstance(error, OSError) and error.errno in OUT_OF_FILES):
                raise
            failure = error if isinstance(error, CorruptLog) else StorageError(f"{folder}: {error.strerror}.")
            return Recovered.failed(self.disk, folder, saved, self.open_files, failure)

    def fresh(self, folder: Path) -> Recovered:
        """Return an empty partition. Its folder has the new topic's id in its name, so nothing can be in it."""
        segment = Segment(self.disk, folder, 0, self.open_files)
        segment.index = Index()
        return Recovered([segment], 0, 0, EpochMap(), ProducerStates(self.producers_max))

    def recover(
        self,
        folder: Path,
        saved: PartitionCheckpoint | None,
        settings: TopicSettings,
        *,
        clean: bool,
        redo: Redo,
        is_only_copy: bool = False,
    ) -> Recovered:
        """Recover a partition; raises CorruptLog or OSError."""
        leader_epoch = saved.leader_epoch if saved is not None else -1
        found = recover(
            self.disk,
            folder,
            saved,
            clean=clean,
            redo=redo,
            open_files=self.open_files,
            segment_bytes=settings.segment_bytes,
            producers_max=self.producers_max,
            monotonic_ms=self.monotonic_ms(),
            epoch_max=EPOCH_MAX if saved is None and self.replicated else max(self.epoch, leader_epoch),
            is_compacted=settings.compacted,
            is_only_copy=is_only_copy,
            acks_before_fsync=settings.ack_before_fsync,
        )
        written = [segment for segment in found.segments[-2:] if segment.size]
        if settings.append_time and written:
            found.newest_ms = written[-1].index.max_timestamp
        return found
