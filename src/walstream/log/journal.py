"""The journal: one file that makes a flush over many partitions durable with one fdatasync.

fdatasync costs about as much per file as per flush, so a flush that touches many segments with few bytes each writes
its batches to the segments (into the page cache) *and* to the journal, and syncs only the journal. The segments are
synced later, all together, when the journal is full or some time has passed; then the file is free.

A free file is not deleted but used again from its beginning. Syncing bytes that overwrite others needs no change to
the file system's own books, which halves its time and takes away most of its variance; so even a flush to a single
segment goes this way, if it is small and the file is *warm*, that is, has been written up to there before.

A record says: these batches belong at the end of that partition. Recovery reads every journal file in order and offers
the batches again, by (topic id, partition, base offset); a partition takes one exactly where its own file ends or is
damaged, so replaying is idempotent and a record for what a segment already holds changes nothing. `forget` voids
what came before it for one partition: written, durably, before a truncation lets other bytes take the same offsets.

A file is free once every segment it covers is synced. If one cannot be, the file is *kept*, until a start at which
recovery has put its batches back; and so are later files that forget something, because what they void is in it.

    u32 crc32c of the rest · u32 payload length · u64 file number · u8 kind · 16 s topic id · i32 partition · payload

The number is in the file's name as well: a record with another one is left over from the file's earlier life. No number
is ever used twice: it is the node's epoch, which every start makes durable in the checkpoint before the first record,
and a counter within that start (`epoch << 32 | counter`). Reusing one would make records of the earlier life current:
a stale FORGET voids acknowledged batches, a stale APPEND restores truncated ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from uuid import UUID

from crc32c import crc32c

from walstream.log.batch import walk
from walstream.log.disk import Buffer, Disk, File, is_full

PartitionKey = tuple[UUID, int]
"""A topic's id and a partition's number: a topic created again under an old name is another topic."""

Redo = dict[int, tuple[File, int, int]]
"""Base offset → (journal file, position, length) of the batches a crash may have kept from one partition's segments."""

APPEND = 1
FORGET = 2

_HEAD = struct.Struct(">IIQB16si")
_CRC_BYTES = 4
_SCAN_BYTES = 4 * 1024 * 1024
_SPARE = "spare"
_COUNTER_BITS = 32

COLD_BYTES = 64 * 1024
"""A file with less than this left of its warm part is called cold."""

PREPARED_BYTES = 4 * 1024 * 1024
"""A file without an earlier life is written with zeros up to here, in about 20 ms, to be warm from the start."""


class Journal:
    """The journal files of one node. `append` and `sync` are called by the flush thread alone."""

    def __init__(self, disk: Disk, folder: Path, saved_epoch: int, prepared_bytes: int = PREPARED_BYTES) -> None:
        """Take the epoch of this start. `saved_epoch` is that of the last one, as the checkpoint has it."""
        self._disk = disk
        self._folder = folder
        self._prepared_bytes = prepared_bytes
        self._spare_lock = Lock()
        self._file: File | None = None
        self.epoch = max(saved_epoch, self._newest_number() >> _COUNTER_BITS) + 1
        """The node's epoch from this start on. Must be durable in the checkpoint before the first record."""
        self._number = self.epoch << _COUNTER_BITS
        self._warm_bytes = 0
        self._kept: set[int] = set()
        self._forgetful: set[int] = set()
        self.size = 0
        self.is_broken = False

    def _numbers(self) -> list[int]:
        names = self._disk.list(self._folder)
        return sorted(int(name.removesuffix(".journal")) for name in names if name.endswith(".journal"))

    def _newest_number(self) -> int:
        """Return the largest file number on the disk, that of the spare file's records included.

        A checkpoint that is lost, or restored from an older copy, does not know the epochs that these carry.
        """
        newest = max(self._numbers(), default=0)
        if _SPARE not in self._disk.list(self._folder):
            return newest
        spare = self._disk.open(self._folder / _SPARE)
        head = spare.pread(_HEAD.size, 0)
        if len(head) < _HEAD.size:
            return newest
        number: int = _HEAD.unpack(head)[2]
        return max(newest, number) if any(_records(spare, number)) else newest

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}.journal"

    @property
    def number(self) -> int:
        """The file that is being written."""
        return self._number

    def is_warm_for(self, payload_bytes: int, records: int) -> bool:
        """Tell whether these records would only overwrite."""
        return self._file is None or self.size + _HEAD.size * records + payload_bytes <= self._warm_bytes

    def append(self, records: Sequence[tuple[PartitionKey, Buffer]]) -> None:
        """Write batches and make them durable. After an error the file is kept and the journal broken, until `forget`
        continues it in a new file."""
        buffers: list[Buffer] = []
        for key, payload in records:
            buffers += (self._head(APPEND, key, payload), payload)
        self._write(buffers)

    def forget(self, keys: Sequence[PartitionKey]) -> None:
        """Void, durably, all that was written for some partitions so far. A broken journal continues in a new file."""
        if self.is_broken:
            self.rotate()
            self.is_broken = False
        # First, because the number must be known even if the write fails halfway.
        self._forgetful.add(self._number)
        self._write([self._head(FORGET, key, b"") for key in keys])

    def _head(self, kind: int, key: PartitionKey, payload: Buffer) -> bytes:
        head = _HEAD.pack(0, len(payload), self._number, kind, key[0].bytes, key[1])
        crc = crc32c(payload, crc32c(head[_CRC_BYTES:]))
        return crc.to_bytes(_CRC_BYTES, "big") + head[_CRC_BYTES:]

    def _write(self, buffers: list[Buffer]) -> None:
        assert not self.is_broken
        try:
            if self._file is None:
                self._file = self._begin()
            self.size += self._file.pwritev(buffers, self.size)
            self._file.sync()
        except OSError:
            self.is_broken = True
            self.keep(self._number)
            raise

    def _begin(self) -> File:
        """Open the next file: the spare one, or an empty and therefore cold one on a disk too full for a spare."""
        path = self._path(self._number)
        with self._spare_lock:
            try:
                self._prepare()
                self._disk.rename(self._folder / _SPARE, path)
            except OSError as error:
                if not is_full(error):
                    raise
                self._disk.open(path, create=True)
        self._disk.sync_directory(self._folder)
        file = self._disk.open(path)
        self._warm_bytes = file.size()
        return file

    def start(self) -> None:
        """Open the first file, unless `forget` did, and prepare the next one, before anybody waits for a flush.

        If it cannot be opened there is no journal until the next start: the log does without it, only slower.
        """
        try:
            if self._file is None:
                self._file = self._begin()
        except OSError:
            self.is_broken = True
        else:
            with suppress(OSError):  # The next flush that needs a spare file tries again.
                self.prepare()

    def prepare(self) -> None:
        """Create the spare file if there is none, filled with zeros: about 20 ms. Safe on the settling thread."""
        with self._spare_lock:
            self._prepare()

    def _prepare(self) -> None:
        if _SPARE in self._disk.list(self._folder):
            return
        path = self._folder / f"{_SPARE}.new"
        try:
            file = self._disk.open(path, create=True)
            file.pwritev([bytes(self._prepared_bytes)], 0)
            file.sync()
        except OSError:
            with suppress(OSError):
                self._disk.remove(path)  # On a full disk the half of it would keep what is left.
            raise
        self._disk.rename(path, self._folder / _SPARE)

    def give_up_spare(self) -> None:
        """Remove the spare file, for a disk that is full before anything was begun."""
        for name in (_SPARE, f"{_SPARE}.new"):
            self._disk.remove(self._folder / name)

    @property
    def is_cold(self) -> bool:
        """Whether the file's warm part is used up, but for what a few small records need."""
        return self._file is not None and self.size + COLD_BYTES > self._warm_bytes

    def rotate(self) -> int:
        """Turn to the next file and return the number of the old one, to be dropped once its segments are synced."""
        old = self._number
        self._number += 1
        self._file = None
        self.size = 0
        return old

    def keep(self, number: int) -> None:
        """Remember that a file holds what its segments may lack: it is not dropped any more."""
        self._kept.add(number)

    def keep_old(self) -> None:
        """Keep everything that was there before this file was begun."""
        self._kept.update(number for number in self._numbers() if number < self._number)

    def drop(self, number: int) -> None:
        """Free a file, its segments holding everything, and have it for use again.

        Not if it forgets what an older file holds that is kept: that one's records would come back to life.
        """
        if number in self._kept or (number in self._forgetful and min(self._kept, default=number) < number):
            self._kept.add(number)
            return
        if number in self._numbers():
            self._forgetful.discard(number)
            self._disk.rename(self._path(number), self._folder / _SPARE)
            self._disk.sync_directory(self._folder)

    def drop_old(self) -> None:
        """Free everything that was there before this file was begun, oldest first."""
        for number in self._numbers():
            if number < self._number:
                self.drop(number)

    def recover(self) -> dict[PartitionKey, Redo]:
        """Read what an earlier process left, and begin a new file after it."""
        found = self.read()
        self.rotate()
        return found

    def read(self) -> dict[PartitionKey, Redo]:
        """Return the batches that the files hold for each partition."""
        found: dict[PartitionKey, Redo] = {}
        for number in self._numbers():
            file = self._disk.open(self._path(number))
            for kind, key, position, payload in _records(file, number):
                if kind == FORGET:
                    found.pop(key, None)
                else:
                    batches = found.setdefault(key, {})
                    for start, header in walk(payload):
                        batches[header.base_offset] = (file, position + start, header.length)
        return found


class RedoReader:
    """Reads the journal once for several partitions, none of which takes writes meanwhile. On the flush thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._number = -1
        self._found: dict[PartitionKey, Redo] = {}

    def redo(self, key: PartitionKey) -> Redo:
        """Return the batches that the files hold for a partition; read again after a rotation, which frees files."""
        if self._number != self._journal.number:
            self._found = self._journal.read()
            self._number = self._journal.number
        return self._found.get(key, {})


def _records(file: File, number: int) -> Iterator[tuple[int, PartitionKey, int, memoryview]]:
    """Yield (kind, key, payload position, payload) up to the first record that is not of this life.

    Everything from there on was still being written when the process died, so nobody was told that it is durable.
    """
    end, position = file.size(), 0
    read: Callable[[int, int], bytes] = file.pread
    while position + _HEAD.size <= end:
        chunk = memoryview(read(min(_SCAN_BYTES, end - position), position))
        start = 0
        while len(chunk) - start >= _HEAD.size:
            crc, length, life, kind, topic_id, partition = _HEAD.unpack_from(chunk, start)
            total = _HEAD.size + length
            if life != number or position + start + total > end:
                return
            if start + total > len(chunk):
                if start:
                    break  # Read on from this record.
                chunk = memoryview(read(total, position))
            if crc32c(chunk[start + _CRC_BYTES : start + total]) != crc:
                return
            payload = chunk[start + _HEAD.size : start + total]
            yield kind, (UUID(bytes=topic_id), partition), position + start + _HEAD.size, payload
            start += total
        position += start
