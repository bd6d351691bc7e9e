"""One segment: a file of record batches, one after the other, and its index.

Owns the file, how far it is written, visible and synced, and how a reader finds its way in it. Refuses to know
offsets beyond its own batches, retention, or who may read what: that is `partition_log`.

Four positions, each at a batch boundary, always in this order:

    synced_size ≤ durable_size ≤ size ≤ the file's own length after the next flush

`size` is where the next batch goes, `durable_size` is the end of what is durable, and
`synced_size` the end of what this file itself holds durably (behind `durable_size` while the journal has the rest).
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock

from walstream.errors import CorruptBatch, CorruptLog
from walstream.log import batch as batches
from walstream.log.batch import HEADER_BYTES, OFFSET_MAX, BatchHeader
from walstream.log.disk import Disk, File, read_hint
from walstream.log.finding import Place, find, headers_in, pieces, place_around_damage
from walstream.log.folders import partition_name
from walstream.log.index import INTERVAL_BYTES, NO_TIMESTAMP, Index

OPEN_FILES_MAX = 512
"""Segments kept open unless the node says how many its limit of file descriptors allows."""


class OpenFiles:
    """Bounds how many segments of a node are open at once, read and written ones alike. Thread-safe.

    The least recently used file is closed first. Its segment opens it again when it is needed, so the number of
    partitions is not bounded by the number of file descriptors.
    """

    def __init__(self, most: int = OPEN_FILES_MAX) -> None:
        self.most = most
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._lock = Lock()

    def touch(self, segment: Segment) -> None:
        """Note that a segment's file is in use, and close the one that was unused for the longest time."""
        oldest = None
        with self._lock:
            if segment.is_closed:
                return  # A reader found the segment before it was removed.
            self._open[id(segment)] = segment
            self._open.move_to_end(id(segment))
            if len(self._open) > self.most:
                _, oldest = self._open.popitem(last=False)
        if oldest is not None:
            oldest.release()

    def forget(self, segment: Segment) -> None:
        """Drop a segment that is closed for good."""
        with self._lock:
            self._open.pop(id(segment), None)


class Syncing:
    """The syncs of one file: one at a time, and whether one has failed."""

    __slots__ = ("has_failed", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self.has_failed = False


class Segment:
    """A file of batches from `base_offset` on."""

    __slots__ = (
        "_disk", "_file", "_index", "_indexing", "_naming", "_open_files", "_syncing", "base_offset", "created_ms",
        "durable_size", "first_timestamp_ms", "has_file", "is_closed", "is_named", "path", "sealed", "size",
        "synced_offset", "synced_size",
    )  # fmt: skip

    def __init__(self, disk: Disk, folder: Path, base_offset: int, open_files: OpenFiles, *, size: int = 0) -> None:
        self._disk = disk
        self._open_files = open_files
        self._file: File | None = None
        self._index: Index | None = None
        self._indexing = Lock()
        self._syncing = Syncing()
        self._naming = Lock()
        self.base_offset = base_offset
        self.path = folder / f"{base_offset:020d}.log"
        self.size = self.durable_size = self.synced_size = size
        self.synced_offset = base_offset
        self.created_ms = 0
        """Of the segment that is appended to: the monotonic time of its first batch, or of its opening."""
        self.first_timestamp_ms = NO_TIMESTAMP
        """Of the segment that is appended to: the largest timestamp in its first batch."""
        self.sealed = False
        self.has_file = size > 0
        self.is_closed = False
        self.is_named = size > 0  # Whether the file's name in its folder is known to be durable.

    def __repr__(self) -> str:
        return f"Segment({self._name}@{self.base_offset}, {self.size} bytes)"

    @property
    def index_path(self) -> Path:
        """Where the index is kept."""
        return self.path.with_suffix(".index")

    @property
    def file(self) -> File:
        """The open file. It stays open for as long as the caller keeps it, also after `release` and `close`.

        Raises FileNotFoundError once the segment is closed, where another one may have its name.
        """
        return self._opened(create=False)

    def file_to_write(self) -> File:
        """Return the open file, created if this is the segment's first write.

        The caller syncs what it has written through the file that it wrote to, and keeps that file until then: with no
        file of it open, the kernel may forget that it failed to write the pages.
        """
        return self._opened(create=not self.has_file)

    def _opened(self, *, create: bool) -> File:
        file = self._file
        if file is None:
            with self._naming:
                file = self._file
                if self.is_closed:
                    raise FileNotFoundError(errno.ENOENT, "the segment was removed", str(self.path))
                if file is None:
                    file = self._file = self._disk.open(self.path, create=create)
                    self.has_file = True
        self._open_files.touch(self)
        return file

    def rename(self, path: Path) -> None:
        """Move the file. A reader on another thread opens it under its old name or its new one."""
        with self._naming:
            self._disk.rename(self.path, path)
            self.path = path

    def sync(self, file: File) -> None:
        """Make what was written to this segment's file durable. Blocks. Once it has failed, it fails for ever.

        The kernel tells of pages that it could not write once, to whoever asks first, and calls them clean from then
        on. Flushes, settling and repairs all ask, on more than one thread: an error that one of them was told counts
        for the others, also for what they had written before. A repair that nobody shared the error with may be made
        again, for it writes its batches again.
        """
        syncing = self._syncing
        with syncing.lock:
            if syncing.has_failed:
                raise OSError(errno.EIO, "an earlier sync of the file failed")
            syncing.has_failed = self.synced_size < self.size
            file.sync()
            syncing.has_failed = False

    def distrust(self) -> None:
        """Let every later sync fail: who opened the file anew may have been told of what was written by way of this."""
        with self._syncing.lock:
            self._syncing.has_failed = self._syncing.has_failed or self.synced_size < self.size

    def share_syncs(self, other: Segment) -> None:
        """Take the place of another segment, of the same file: settling may still be at work on that one."""
        self._syncing = other._syncing

    @property
    def index(self) -> Index:
        """The index, read from its file or made again from the batches. Blocks the first time on a sealed segment."""
        index = self._index
        if index is None:
            with self._indexing:
                index = self._index
                if index is None:
                    index = self._index = self._load_index()
        return index

    @index.setter
    def index(self, index: Index) -> None:
        self._index = index

    @property
    def is_index_loaded(self) -> bool:
        """Whether a lookup will not touch the disk."""
        return self._index is not None

    @property
    def modified_ms(self) -> int:
        """When the file was last written to, by the wall clock: no earlier than the append of its newest batch."""
        return self._disk.modified_ms(self.path)

    def release(self) -> None:
        """Close the file once its users are done, and drop the index: both come back when they are needed.

        The index stays as long as the file does not have all that it covers. May be called on any thread.
        """
        self._file = None
        if self.sealed and self.durable_size == self.size:
            self._index = None

    def prepare_appends(self) -> None:
        """Load what an append needs: the index, and the timestamp that the segment's age counts from. Blocks.

        Where the first batch cannot be read, the age counts from `created_ms`; the index is loaded by its first use.
        """
        if self.size:
            with suppress(CorruptBatch, OSError):
                header = self._disk.open(self.path).pread(HEADER_BYTES, 0)
                self.first_timestamp_ms = batches.parse_header(header).max_timestamp
        with suppress(OSError):
            self.index  # noqa: B018 - loads it

    def age_ms(self, header: BatchHeader, monotonic_ms: int) -> int:
        """Return the time from the segment's first batch to a new one: by their timestamps, as Kafka counts it.

        The wall clock does not matter, and replicas that copy the same batches roll at the same offset. A batch without
        a timestamp counts by the monotonic clock, from the first batch or the node's start.
        """
        if self.first_timestamp_ms == NO_TIMESTAMP or header.max_timestamp == NO_TIMESTAMP:
            return monotonic_ms - self.created_ms
        return header.max_timestamp - self.first_timestamp_ms

    def note(self, header: BatchHeader) -> int:
        """Take in the batch that will be written next, and return its position."""
        if self.size == 0:
            self.first_timestamp_ms = header.max_timestamp
        return self._note(self.index, header)

    def _note(self, index: Index, header: BatchHeader) -> int:
        position = self.size
        index.note(header.base_offset, header.last_offset, position, header.length, header.max_timestamp)
        self.size = position + header.length
        return position

    def extend(self, position: int, headers: Sequence[BatchHeader]) -> None:
        """Take in batches that were put, durably, where a sealed segment ended too early."""
        index = self.index
        with self._indexing:  # A reader that loads the index meanwhile would keep one without these batches.
            index.truncate(position)
            self.size = position
            for header in headers:
                self._note(index, header)
            self.durable_size = self.synced_size = self.size
            self._index = index
        self.synced_offset = headers[-1].next_offset

    @contextmanager
    def mending(self) -> Iterator[None]:
        """Keep readers from making an index while damaged batches are replaced, and remove the file of an older one."""
        with self._indexing:
            self._disk.remove(self.index_path)
            self._disk.sync_directory(self.path.parent)
            yield

    def restore(self, position: int, headers: Sequence[BatchHeader]) -> None:
        """Take in batches that were put, durably, in the place of damaged ones: the index may have been made before."""
        index = self._index
        for header in headers:
            if index is not None:
                index.restore(header.last_offset, position, header.max_timestamp)
            position += header.length

    def save_index(self) -> None:
        """Write the index file. It is only a hint, so it needs no fsync."""
        self._disk.write(self.index_path, self.index.encode(), durable=False)

    def close(self) -> None:
        """Close the file for good, once the readers that hold it are done: another segment, or none, has its place.

        A reader that found the segment before and opened it later would keep a deleted file, and its space.
        """
        with self._naming:
            self.is_closed = True
            self._file = None
        self._open_files.forget(self)

    def remove(self, *, keeps_snapshot: bool = False) -> None:
        """Delete its files. Readers that hold one read on. The snapshot serves a successor that begins where it did."""
        self.close()
        self._disk.remove(self.path)
        self._disk.remove(self.index_path)
        if not keeps_snapshot:
            self._disk.remove(self.path.with_suffix(".producers"))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read(
        self, offset: int, bytes_max: int, *, cached: bool, dense: bool, end: int = OFFSET_MAX, until: int = OFFSET_MAX
    ) -> memoryview | None:
        """Return verified whole batches below `end` from the one that holds `offset` (or follows it), at least one.

        Empty if there is none up to `durable_size`; None if `cached` and the disk would have to be asked. `dense`
        says that offsets have no gaps here, so that one is damage: the CRC does not cover a batch's base offset.
        `until` is where the segment's offsets end, and a batch that claims to lie beyond is damaged, too.
        Raises CorruptLog if the first batch to return is damaged.
        """
        file, limit = self._file if cached else self.file, self.durable_size
        if file is None or (cached and not self.is_index_loaded):
            return None
        if cached:
            self._open_files.touch(self)
        position, expected = self.index.row_for_offset(offset)
        if expected is None:
            expected = self.base_offset
        length = min(limit - position, bytes_max + INTERVAL_BYTES)
        while length > 0:
            data = file.pread_cached(length, position) if cached else file.pread(length, position)
            if data is None:
                return None
            view = memoryview(data)
            place = find(view, offset, expected, limit - position, dense=dense, until=until)
            if place is None:
                break  # Something here is not what it should be.
            start, first_bytes, expected = place
            if start + first_bytes <= len(view) and first_bytes:
                view = view[start : start + max(bytes_max, first_bytes)]
                good, is_bad = batches.verified_prefix(view, dense=dense, end=min(end, until))
                if good or not is_bad:
                    return view[:good]
                break
            # The batch begins at `start` but ends beyond what was read, or has not begun yet: read on from there.
            position += start
            length = min(limit - position, max(first_bytes, bytes_max))
        else:
            return memoryview(b"")
        return None if cached else self._read_around_damage(offset, bytes_max, dense=dense, end=end, until=until)

    def _read_around_damage(self, offset: int, bytes_max: int, *, dense: bool, end: int, until: int) -> memoryview:
        """Read like `read`, trusting no batch before its CRC has been checked, nor the index."""
        source = partial(pieces, self.file, self.durable_size)
        place = place_around_damage(source, self.base_offset, offset, dense=dense, end=until)
        if place.damage is not None:
            raise self._corrupt(place)
        data = memoryview(self.file.pread(max(bytes_max, place.length), place.position))
        good, _ = batches.verified_prefix(data, dense=dense, end=min(end, until))
        return data[:good]

    def _corrupt(self, place: Place) -> CorruptLog:
        hint = f" Records from offset {place.following} on can be read." if place.following is not None else ""
        error = CorruptLog(
            f"{self._name}: the batch at byte {place.position} of {self.path.name} fails its checksum.",
            f"It is kept aside and not served.{hint}",
        )
        error.offsets = place.damage
        return error

    def ends_early(self, end: int) -> CorruptLog:
        """Return the error for a sealed segment that does not reach to `end`, as it should. Blocks."""
        source = partial(pieces, self.file, self.durable_size)
        place = place_around_damage(source, self.base_offset, end - 1, dense=True)
        error = CorruptLog(
            f"{self._name}: {self.path.name} ends early, at byte {place.position}; "
            f"offsets {place.expected} to {end - 1} are missing.",
            f"Records from offset {end} on can be read.",
        )
        error.offsets = (place.expected, end)
        return error

    @property
    def _name(self) -> str:
        """How people name the partition."""
        return partition_name(self.path.parent)

    def headers(
        self, position: int = 0, limit: int | None = None, *, strict: bool = False
    ) -> Iterator[tuple[int, BatchHeader]]:
        """Yield (position, header) of the batches from `position` on, without looking at their records. Blocks.

        Bytes that cannot be a batch are passed over; with `strict` they raise CorruptLog. A header is yielded when the
        one after it is known to be where it says, so a wrong length hides nothing.
        """
        end = self.size if limit is None else limit
        for found in headers_in(self.file, position, end):
            if isinstance(found, Place):
                if strict:
                    raise self._corrupt(found)
            else:
                yield found

    def _load_index(self) -> Index:
        index = Index.decode(read_hint(self._disk, self.index_path)) if self.size else Index()
        return self._rebuild_index() if index is None or index.covered != self.size else index

    def _rebuild_index(self) -> Index:
        index = Index()
        for position, header in self.headers():
            index.note(header.base_offset, header.last_offset, position, header.length, header.max_timestamp)
        index.covered = self.size
        return index
