"""The journal: one file that makes a flush over many partitions durable with one fdatasync.

fdatasync costs about as much per file as per flush, so a flush that touches many segments with few bytes each writes
its batches to the segments (into the page cache) *and* to the journal, and syncs only the journal. The segments are
synced later, all together, when the journal is full; then the file is dropped.

A record says: this batch belongs at the end of that partition. Recovery reads every journal file in order and offers
the batches again, by (topic id, partition, base offset); a partition takes one exactly where its own file ends or is
damaged, so replaying is idempotent and a record for what a segment already holds changes nothing. `forget` voids
what came before it for one partition: written, durably, before a truncation lets other bytes take the same offsets.

    u32 crc32c of the rest · u32 payload length · u8 kind · 16 s topic id · i32 partition · payload (one batch)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import UUID

from crc32c import crc32c

from walstream.log.batch import parse_header
from walstream.log.disk import Buffer, Disk, File

PartitionKey = tuple[UUID, int]
"""A topic's id and a partition's number: a topic created again under an old name is another topic."""

Redo = dict[int, tuple[File, int, int]]
"""Base offset → (journal file, position, length) of the batches a crash may have kept from one partition's segments."""

APPEND = 1
FORGET = 2

_HEAD = struct.Struct(">IIB16si")
_CRC_BYTES = 4
_SCAN_BYTES = 4 * 1024 * 1024


class Journal:
    """The journal files of one node. `append` and `sync` are called by the flush thread alone."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder
        self._file: File | None = None
        self._number = max(self._numbers(), default=0)
        self.size = 0
        self.is_broken = False

    def _numbers(self) -> list[int]:
        names = self._disk.list(self._folder)
        return sorted(int(name.removesuffix(".journal")) for name in names if name.endswith(".journal"))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}.journal"

    @property
    def number(self) -> int:
        """The file that is being written."""
        return self._number

    def append(self, records: Sequence[tuple[PartitionKey, Buffer]]) -> None:
        """Write batches and make them durable. After an error the journal is broken and must not be used again."""
        buffers: list[Buffer] = []
        for key, payload in records:
            buffers += (_head(APPEND, key, payload), payload)
        self._write(buffers)

    def forget(self, key: PartitionKey) -> None:
        """Void, durably, all that was written for a partition so far."""
        self._write([_head(FORGET, key, b"")])

    def _write(self, buffers: list[Buffer]) -> None:
        assert not self.is_broken
        try:
            if self._file is None:
                self._file = self._disk.open(self._path(self._number), create=True)
                self._disk.sync_directory(self._folder)
            self.size += self._file.pwritev(buffers, self.size)
            self._file.sync()
        except OSError:
            self.is_broken = True
            raise

    def rotate(self) -> int:
        """Begin a new file and return the number of the old one, to be dropped once its segments are synced."""
        old = self._number
        self._number += 1
        self._file = None
        self.size = 0
        return old

    def drop(self, up_to: int) -> None:
        """Remove the files up to a number: their segments hold everything.

        Oldest first and durably: a file that came back after its `forget` was dropped would undo a truncation.
        """
        old = [number for number in self._numbers() if number <= up_to]
        for number in old:
            self._disk.remove(self._path(number))
        if old:
            self._disk.sync_directory(self._folder)

    def recover(self) -> dict[PartitionKey, Redo]:
        """Read what an earlier process left, and begin a new file after it."""
        found: dict[PartitionKey, Redo] = {}
        for number in self._numbers():
            file = self._disk.open(self._path(number))
            for kind, key, position, length, payload in _records(file):
                if kind == FORGET:
                    found.pop(key, None)
                else:
                    found.setdefault(key, {})[parse_header(payload).base_offset] = (file, position, length)
        self.rotate()
        return found


def _head(kind: int, key: PartitionKey, payload: Buffer) -> bytes:
    head = _HEAD.pack(0, len(payload), kind, key[0].bytes, key[1])
    crc = crc32c(payload, crc32c(head[_CRC_BYTES:]))
    return crc.to_bytes(_CRC_BYTES, "big") + head[_CRC_BYTES:]


def _records(file: File) -> Iterator[tuple[int, PartitionKey, int, int, memoryview]]:
    """Yield (kind, key, payload position, payload length, payload) up to the first record that does not check.

    Everything from there on was still being written when the process died, so nobody was told that it is durable.
    """
    end, position = file.size(), 0
    read: Callable[[int, int], bytes] = file.pread
    while position + _HEAD.size <= end:
        chunk = memoryview(read(min(_SCAN_BYTES, end - position), position))
        start = 0
        while len(chunk) - start >= _HEAD.size:
            crc, length, kind, topic_id, partition = _HEAD.unpack_from(chunk, start)
            total = _HEAD.size + length
            if position + start + total > end:
                return
            if start + total > len(chunk):
                if start:
                    break  # Read on from this record.
                chunk = memoryview(read(total, position))
            if crc32c(chunk[start + _CRC_BYTES : start + total]) != crc:
                return
            payload = chunk[start + _HEAD.size : start + total]
            yield kind, (UUID(bytes=topic_id), partition), position + start + _HEAD.size, length, payload
            start += total
        position += start
