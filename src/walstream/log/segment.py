"""One segment: a file of record batches, one after the other, and its index.

Owns the file, how far it is written, visible and synced, and how a reader finds its way in it. Refuses to know
offsets beyond its own batches, retention, or who may read what: that is `partition_log`.

Four positions, each at a batch boundary, always in this order:

    synced_size ≤ visible_size ≤ size ≤ the file's own length after the next flush

`size` is where the next batch goes, `visible_size` is the end of what is durable and may be read, and
`synced_size` the end of what this file itself holds durably (behind `visible_size` while the journal has the rest).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from walstream.errors import CorruptBatch, CorruptLog
from walstream.log import batch as batches
from walstream.log.batch import HEADER_BYTES, BatchHeader
from walstream.log.disk import Disk, File
from walstream.log.index import INTERVAL_BYTES, Index
from walstream.log.salvage import next_batch

SCAN_BYTES = 1024 * 1024
"""How much a scan reads at a time."""

OPEN_FILES_MAX = 512
"""Sealed segments kept open for reading; the least recently read is closed first."""


class OpenFiles:
    """Bounds how many sealed segments of a node are open at once."""

    def __init__(self, most: int = OPEN_FILES_MAX) -> None:
        self._most = most
        self._open: OrderedDict[int, Segment] = OrderedDict()

    def touch(self, segment: Segment) -> None:
        """Note that a sealed segment is being read, and let go of the one longest unread."""
        self._open[id(segment)] = segment
        self._open.move_to_end(id(segment))
        if len(self._open) > self._most:
            _, oldest = self._open.popitem(last=False)
            oldest.release()

    def forget(self, segment: Segment) -> None:
        """Drop a segment that is being deleted."""
        self._open.pop(id(segment), None)


class Segment:
    """A file of batches from `base_offset` on."""

    __slots__ = (
        "_disk", "_file", "_index", "_open_files", "base_offset", "created_ms", "is_named",
        "path", "sealed", "size", "synced_offset", "synced_size", "visible_size",
    )  # fmt: skip

    def __init__(self, disk: Disk, folder: Path, base_offset: int, open_files: OpenFiles, *, size: int = 0) -> None:
        self._disk = disk
        self._open_files = open_files
        self._file: File | None = None
        self._index: Index | None = None
        self.base_offset = base_offset
        self.path = folder / f"{base_offset:020d}.log"
        self.size = self.visible_size = self.synced_size = size
        self.synced_offset = base_offset
        self.created_ms = 0
        self.sealed = False
        self.is_named = size > 0  # Whether the file's name in its folder is known to be durable.

    def __repr__(self) -> str:
        return f"Segment({self.path.parent.name}@{self.base_offset}, {self.size} bytes)"

    @property
    def index_path(self) -> Path:
        """Where the index is kept."""
        return self.path.with_suffix(".index")

    @property
    def file(self) -> File:
        """The open file."""
        file = self._file
        if file is None:
            file = self._file = self._disk.open(self.path)
        if self.sealed:
            self._open_files.touch(self)
        return file

    def file_to_write(self) -> File:
        """Return the open file, created if this is the segment's first write."""
        if self._file is None:
            self._file = self._disk.open(self.path, create=True)
        return self._file

    @property
    def index(self) -> Index:
        """The index, read from its file or made again from the batches. Blocks the first time on a sealed segment."""
        if self._index is None:
            index = Index.decode(self._disk.read(self.index_path)) if self.size else Index()
            if index is None or index.covered != self.size:
                index = self._rebuild_index()
            self._index = index
        return self._index

    @index.setter
    def index(self, index: Index) -> None:
        self._index = index

    @property
    def is_index_loaded(self) -> bool:
        """Whether a lookup will not touch the disk."""
        return self._index is not None

    def release(self) -> None:
        """Let go of the file and the index; both come back when they are needed."""
        self._file = None
        self._index = None

    def note(self, header: BatchHeader) -> int:
        """Take in the batch that will be written next, and return its position."""
        position = self.size
        self.index.note(header.base_offset, header.last_offset, position, header.length, header.max_timestamp)
        self.size = position + header.length
        return position

    def save_index(self) -> None:
        """Write the index file. It is only a hint, so it needs no fsync."""
        self._disk.write(self.index_path, self.index.encode(), durable=False)

    def remove(self) -> None:
        """Delete both files. Readers that hold the file read on."""
        self._open_files.forget(self)
        self._disk.remove(self.path)
        self._disk.remove(self.index_path)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, offset: int, bytes_max: int, *, cached: bool, dense: bool) -> memoryview | None:
        """Return verified whole batches from the one that holds `offset` (or follows it), at least one.

        Empty if there is none up to `visible_size`; None if `cached` and the disk would have to be asked. `dense`
        says that offsets have no gaps here, so that one is damage: the CRC does not cover a batch's base offset.
        Raises CorruptLog if the first batch to return is damaged.
        """
        if cached and not self.is_index_loaded:
            return None
        file, limit = self.file, self.visible_size
        position = self.index.position_for_offset(offset)
        length = min(limit - position, bytes_max + INTERVAL_BYTES)
        while length > 0:
            data = file.pread_cached(length, position) if cached else file.pread(length, position)
            if data is None:
                return None
            view = memoryview(data)
            start, first_bytes = self._find(view, offset, position, dense)
            if start + first_bytes <= len(view) and first_bytes:
                return self._verified(view[start : start + max(bytes_max, first_bytes)], position + start, dense)
            if start + first_bytes == 0:
                raise self._corrupt(position, None)  # Bytes below `visible_size` that no batch can begin with.
            # The batch begins at `start` but ends beyond what was read, or has not begun yet: read on from there.
            position += start
            length = min(limit - position, max(first_bytes, bytes_max))
        return memoryview(b"")

    def _find(self, view: memoryview, offset: int, position: int, dense: bool) -> tuple[int, int]:
        """Return where the first batch ending at or after `offset` begins in the view, and its length (0: none)."""
        start = 0
        expected: int | None = None
        while len(view) - start >= HEADER_BYTES:
            header = self._header_at(view, start, position)
            if header is None or (dense and expected is not None and header.base_offset != expected):
                start, expected = self._skip_damage(view, start, offset, position)
                continue
            if header.last_offset >= offset:
                if dense and header.base_offset > max(offset, self.base_offset):
                    raise self._corrupt(position + start, None)
                return start, header.length
            start += header.length
            expected = header.next_offset
        return start, 0

    def _header_at(self, view: memoryview, start: int, position: int) -> BatchHeader | None:
        """Return the header there, or None if these bytes cannot be one."""
        try:
            header = batches.parse_header(view, start)
        except CorruptBatch:
            return None
        return header if position + start + header.length <= self.visible_size else None

    def _skip_damage(self, view: memoryview, start: int, offset: int, position: int) -> tuple[int, int]:
        """Return (start, base offset) of the next sound batch, if the damage is not what the reader asked for."""
        found = next_batch(bytes(view), start + 1, 0)
        if found is None or found[1].base_offset > offset:
            raise self._corrupt(position + start, found[1] if found else None)
        return found[0], found[1].base_offset

    def _verified(self, view: memoryview, position: int, dense: bool) -> memoryview:
        good, _ = batches.verified_prefix(view, dense=dense)
        if not good:
            data = bytes(view)
            found = next_batch(data, batches.parse_header(data).length, 0)
            raise self._corrupt(position, found[1] if found else None)
        return view[:good]

    def _corrupt(self, position: int, following: BatchHeader | None) -> CorruptLog:
        where = f"{self.path.parent.parent.name}-{self.path.parent.name}"
        hint = f" Records from offset {following.base_offset} on can be read." if following else ""
        return CorruptLog(
            f"{where}: the batch at byte {position} of {self.path.name} fails its checksum.",
            f"It is kept aside and not served.{hint}",
        )

    def headers(self, position: int = 0, limit: int | None = None) -> Iterator[tuple[int, BatchHeader]]:
        """Yield (position, header) of the batches from `position` on, without looking at their records. Blocks.

        Stops at the first bytes that cannot be a batch.
        """
        end = self.size if limit is None else limit
        file = self.file
        while position + HEADER_BYTES <= end:
            chunk = file.pread(min(SCAN_BYTES, end - position), position)
            start = 0
            while len(chunk) - start >= HEADER_BYTES:
                try:
                    header = batches.parse_header(chunk, start)
                except CorruptBatch:
                    return
                if position + start + header.length > end:
                    return
                yield position + start, header
                start += header.length
            if start == 0:
                return
            position += start

    def _rebuild_index(self) -> Index:
        index = Index()
        for position, header in self.headers():
            index.note(header.base_offset, header.last_offset, position, header.length, header.max_timestamp)
        index.covered = self.size
        return index
