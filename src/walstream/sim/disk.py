"""A disk in memory that keeps its word exactly as far as it gave it.

Implements `log.disk`'s `Disk` and `File`. Every file has two contents: what a reader sees (the page cache) and what a
crash leaves (the platter), with the writes between them. `sync` brings the platter up to date; a crash keeps, loses or
tears each unsynced write on its own, in any combination. Names are the same: made, moved and removed at once, durable
with `sync_directory`; a crash keeps a prefix of the name changes that were not, in the order in which they were made,
as journaling file systems do. What is stricter here than on most systems: fsync of a file does not save its name.

Faults on demand: a full disk (a write then stops in the middle), a failing fsync (after which the pages count as clean
although the platter may not have them: the next fsync does not cover them), rotten bits, and a fuse that cuts the
power after a number of operations, in the middle of whatever is going on. Any single operation can fail with an error
number (`fail_after`), the disk can have a size (`capacity`), and open files are counted.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from walstream.log.disk import Buffer

SECTOR_BYTES = 512
"""What a disk writes as a whole. Smaller writes tear too: at any byte, if the file system logs data by itself."""

FREE_BYTES = 1 << 40

_ANY = frozenset({errno.EIO})
_SPACE = _ANY | {errno.ENOSPC}
_FILES = _ANY | {errno.EMFILE}
ERRORS = {
    "open": _FILES, "create": _SPACE | _FILES, "write": _SPACE, "sync": _SPACE, "truncate": _ANY, "rename": _SPACE,
    "remove": _ANY, "sync_directory": _SPACE | _FILES, "read": _FILES, "pread": _ANY, "list": _FILES,
    "replace": _SPACE | _FILES,
}  # fmt: skip
"""By operation, the errors that it may meet."""


class PowerLost(BaseException):
    """The fuse blew. Not an `Exception`, so that no handler of the code under test survives it."""


class Inode:
    """A file's content: as it is read, as the platter has it, and the writes in between."""

    __slots__ = ("data", "durable", "modified_ms", "pending")

    def __init__(self) -> None:
        self.modified_ms = 0
        self.data = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        """Unsynced changes in order: bytes written at a position, or a cut to a size (None)."""

    def sync(self) -> None:
        """Bring the platter up to date."""
        for position, data in self.pending:
            _apply(self.durable, position, data)
        self.pending.clear()

    def lose(self, random: Random) -> None:
        """Let the platter keep what a crash happens to have left of each unsynced change."""
        for position, data in self.pending:
            fate = random.random()
            if fate < 0.35:
                continue
            if fate < 0.65 or data is None or len(data) < 2:
                _apply(self.durable, position, data)
            elif fate < 0.85:
                _apply(self.durable, position, data[: random.randrange(1, len(data))])
            else:
                _tear(self.durable, position, data, random)
        self.pending.clear()


class Folder:
    """A folder's names: as they are seen, and as a crash would leave them."""

    __slots__ = ("durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, Inode | Folder] = {}
        self.durable: dict[str, Inode | Folder] = {}


Entry = Inode | Folder
NameChange = list[tuple[Folder, str, Entry | None]]
"""What happens to names at once: one name made or removed (None), or two for a rename."""


class SimFile:
    """An open file. It is closed with its last reference, as the real one is."""

    __slots__ = ("_disk", "_inode", "_process")

    def __init__(self, disk: SimDisk, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode
        self._process = disk.note_opened(inode)

    def __del__(self) -> None:
        self.close()

    def size(self) -> int:
        """Return the file's length in bytes."""
        return len(self._inode.data)

    def pread(self, length: int, position: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        self._disk.meet("pread")
        return bytes(self._inode.data[position : position + length])

    def pread_cached(self, length: int, position: int) -> bytes | None:
        """Read like `pread`, or return None because the pages are not in memory, as chance has it."""
        if self._disk.is_cold():
            return None
        return bytes(self._inode.data[position : position + length])

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers one after the other at `position` and return their total length."""
        disk = self._disk
        disk.spend()
        data = b"".join(buffers)
        inode = self._inode
        inode.modified_ms = disk.now_ms()
        disk.meet("write")
        grown = position + len(data) - len(inode.data)
        if disk.capacity is not None and grown > (free := disk.free(grown)):
            _write(inode, position, data[: max(len(inode.data) - position, 0) + max(free, 0)])
            raise OSError(errno.ENOSPC, "No space left on device")
        if disk.is_full and position + len(data) > len(inode.data):
            data = data[: max(len(inode.data) - position, 0)]
            if data:
                _write(inode, position, data)
            raise OSError(errno.ENOSPC, "No space left on device")
        _write(inode, position, data)
        return len(data)

    def sync(self) -> None:
        """Make what was written durable."""
        self._disk.sync(self._inode)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        self._disk.spend()
        self._disk.meet("truncate")
        _apply(self._inode.data, size, None)
        self._inode.pending.append((size, None))

    def close(self) -> None:
        """Close the file."""
        process, self._process = self._process, -1
        if process >= 0:
            self._disk.note_closed(process, self._inode)


class SimDisk:
    """The disk of one node. It outlives the node's processes."""

    def __init__(self, random: Random, capacity: int | None = None) -> None:
        self._random = random
        self.capacity = capacity
        """How many bytes it holds; None: it is never full, unless `is_full` is set."""
        self.fail_after: int | None = None
        """How many more operations succeed before one fails with `fail_errno`; None: all."""
        self.fail_errno = errno.EIO
        self.fail_only = ""
        """Only an operation of this kind fails, and only those are counted; empty: any."""
        self.failures = 0
        """So many operations have failed because of `fail_after`."""
        self.met: set[int] = set()
        """The errors that the present process has met because of that."""
        self.ballast = 0
        """On a disk with a capacity: what other programs have taken of it."""
        self.open_files = 0
        self._process = 0
        self._opened: dict[int, tuple[Inode, int]] = {}
        """Files that the present process has open, by their inode, and how often."""
        self.now_ms: Callable[[], int] = lambda: self.modified_at_ms
        """The wall clock that dates writes."""
        self._root = Folder()
        self._changes: list[NameChange] = []
        self.is_full = False
        self.failing_syncs = 0
        """So many of the next fsyncs fail."""
        self.cold_probability = 0.0
        """How often a read that wants to wait for nothing is told that it would have to."""
        self.fuse: int | None = None
        """How many more changing operations are carried out before the power goes."""
        self.syncs = 0
        self.on_sync_failed: Callable[[], None] | None = None
        self.is_reserve_spent = False
        self.modified_at_ms = 2**62
        """When every file was last written to: not before any test is over, unless the test sets it."""
        self.has_reserve = False
        """Whether durable writes succeed although the disk is full."""
        self.reserve_bytes = 0
        """On a disk with a capacity: the size of the reserve."""

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def spend(self) -> None:
        """Count an operation that changes something."""
        if self.fuse is not None:
            if self.fuse <= 0:
                raise PowerLost
            self.fuse -= 1

    def meet(self, operation: str) -> None:
        """Fail with the error that is due, if it is one that the operation may meet; otherwise the next one does."""
        if self.fail_after is None or self.fail_only not in ("", operation):
            return
        if self.fail_after > 0:
            self.fail_after -= 1
        elif self.fail_errno in ERRORS[operation]:
            self.fail_after = None
            self.failures += 1
            self.met.add(self.fail_errno)
            raise OSError(self.fail_errno, os.strerror(self.fail_errno))

    def begin_process(self) -> None:
        """Close the files of the last process, and let the next one find out by itself whether the disk is full."""
        self._process += 1
        self.met.clear()
        self.open_files = 0
        self._opened.clear()
        self.is_reserve_spent = False

    def note_opened(self, inode: Inode) -> int:
        """Count an open file and return the process that opened it."""
        self.open_files += 1
        self._opened[id(inode)] = (inode, self._opened.get(id(inode), (inode, 0))[1] + 1)
        return self._process

    def note_closed(self, process: int, inode: Inode) -> None:
        """Count a file that was closed, unless its process had ended before."""
        if process != self._process:
            return
        self.open_files -= 1
        count = self._opened[id(inode)][1] - 1
        if count:
            self._opened[id(inode)] = (inode, count)
        else:
            del self._opened[id(inode)]

    def free(self, wanted: int | None = None) -> int:
        """Return the bytes left on a disk with a capacity. A file that was removed keeps its space until it is closed.

        Files that only a cycle of garbage holds are closed first, unless there is as much as `wanted` anyway: what a
        run does must not depend on when the collector comes by.
        """
        assert self.capacity is not None
        named = {id(inode): len(inode.data) for _, inode in self.files()}
        left = self.capacity - self.ballast - self.reserve_bytes - sum(named.values())
        removed = sum(len(inode.data) for number, (inode, _) in self._opened.items() if number not in named)
        if removed and (wanted is None or left - removed < wanted):
            gc.collect()
            removed = sum(len(inode.data) for number, (inode, _) in self._opened.items() if number not in named)
        return left - removed

    def is_cold(self) -> bool:
        """Decide whether a page has to be fetched."""
        return self.cold_probability > 0 and self._random.random() < self.cold_probability

    def crash(self) -> None:
        """Lose what was not made durable, or some of it."""
        self.fuse = None
        kept = self._random.randint(0, len(self._changes)) if self._changes else 0
        for change in self._changes[:kept]:
            _make_durable(change)
        self._changes.clear()
        for folder in _folders(self._root):
            folder.entries = dict(folder.durable)
            for entry in folder.entries.values():
                if isinstance(entry, Inode):
                    entry.lose(self._random)
                    entry.data = bytearray(entry.durable)

    def wipe(self) -> None:
        """Put a new disk in the place of this one."""
        self.is_reserve_spent = self.has_reserve = False
        self.reserve_bytes = 0
        self._root = Folder()
        self._changes.clear()

    def rot(self, limit: Callable[[str], int]) -> str | None:
        """Flip one bit in a file; return where, or None if there is none to flip.

        `limit` says of each path how many bytes from its beginning may be hit. The bit is chosen among what is durable:
        a fault of the medium, not of a write.
        """
        files = [(path, inode, min(limit(path), len(inode.durable))) for path, inode in self.files() if inode.durable]
        files = [file for file in files if file[2] > 0]
        if not files:
            return None
        path, inode, size = files[self._random.randrange(len(files))]
        position = self._random.randrange(size)
        bit = 1 << self._random.randrange(8)
        inode.durable[position] ^= bit
        if position < len(inode.data):
            inode.data[position] ^= bit
        return f"{path}@{position}"

    def files(self) -> Iterator[tuple[str, Inode]]:
        """Yield every file with its path, in the order of the names."""
        yield from _files("", self._root)

    def sync(self, inode: Inode) -> None:
        """Make a file's content durable, or fail to."""
        self.spend()
        try:
            self.meet("sync")
        except OSError:
            inode.lose(self._random)
            raise
        if self.failing_syncs > 0:
            self.failing_syncs -= 1
            inode.lose(self._random)
            if self.on_sync_failed is not None:
                self.on_sync_failed()
            raise OSError(errno.EIO, "Input/output error")
        self.syncs += 1
        inode.sync()

    # ── the interface of log.disk ────────────────────────────────────────────────────────────────────────────────

    def keep_reserve(self, size: int) -> bool:
        """Set space aside, unless the disk is full; once it was set aside, it lasts for every durable write."""
        if self.capacity is not None:
            if self.free() + self.reserve_bytes < size:
                self.is_reserve_spent = self.is_reserve_spent or not self.reserve_bytes
                return False
            self.reserve_bytes = max(size, self.reserve_bytes)
        if not self.is_full:
            self.has_reserve, self.is_reserve_spent = True, False
        elif not self.has_reserve:
            self.is_reserve_spent = True
        return not self.is_reserve_spent

    def spend_reserve(self) -> None:
        """Give up what was set aside."""
        self.is_reserve_spent = True
        self.reserve_bytes = 0

    def open(self, path: Path, *, create: bool = False) -> SimFile:
        """Open a file for reading and writing."""
        folder, name = self._parent(path)
        entry = folder.entries.get(name)
        if entry is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            self.spend()
            self.meet("create")
            entry = Inode()
            self._change([(folder, name, entry)])
        if isinstance(entry, Folder):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        self.meet("open")
        return SimFile(self, entry)

    def read(self, path: Path) -> bytes | None:
        """Return a small file's content, or None if there is no such file."""
        entry = self._find(path)
        if entry is not None:
            self.meet("read")
        return bytes(entry.data) if isinstance(entry, Inode) else None

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        """Replace a small file as a whole, by way of a neighbour that is renamed over it."""
        folder, name = self._parent(path)
        self.spend()
        self._meet_full_disk(data, durable=durable)
        if self.is_full:
            self.is_reserve_spent = self.is_reserve_spent or durable
            if not durable or not self.has_reserve:
                raise OSError(errno.ENOSPC, "No space left on device")
        neighbour = Inode()
        self._change([(folder, name + ".new", neighbour)])
        _write(neighbour, 0, data)
        neighbour.modified_ms = self.now_ms()
        if durable:
            self.sync(neighbour)
        self.spend()
        self.meet("rename")
        self._change([(folder, name + ".new", None), (folder, name, neighbour)])
        if durable:
            self._sync_names(folder)

    def _meet_full_disk(self, data: bytes, *, durable: bool) -> None:
        """Fail to replace a small file, or spend the reserve for it if it has to be durable."""
        try:
            self.meet("replace")
            if self.capacity is not None and (
                len(data) > self.free(len(data)) or (self.is_reserve_spent and not durable)
            ):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            if error.errno != errno.ENOSPC or not durable or not self.has_reserve or self.is_reserve_spent:
                raise
            self.spend_reserve()

    def modified_ms(self, path: Path) -> int:
        """Return when a file was last written to."""
        entry = self._find(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return entry.modified_ms if isinstance(entry, Inode) else self.modified_at_ms

    def list(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""
        entry = self._find(path)
        if entry is not None:
            self.meet("list")
        return sorted(entry.entries) if isinstance(entry, Folder) else []

    def make_directory(self, path: Path) -> None:
        """Create a folder, and its parents, durably."""
        folder = self._root
        for name in _parts(path):
            entry = folder.entries.get(name)
            if entry is None:
                self.spend()
                self.meet("create")
                entry = Folder()
                self._change([(folder, name, entry)])
                self._sync_names(folder)
            if isinstance(entry, Inode):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
            folder = entry

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or folder over a name."""
        self.spend()
        self.meet("rename")
        old_folder, old_name = self._parent(source)
        new_folder, new_name = self._parent(target)
        entry = old_folder.entries.get(old_name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))
        self._change([(old_folder, old_name, None), (new_folder, new_name, entry)])

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all in it; nothing there is no error."""
        try:
            folder, name = self._parent(path)
        except FileNotFoundError:
            return
        entry = folder.entries.get(name)
        if entry is None:
            return
        if isinstance(entry, Folder):
            for child in sorted(entry.entries):
                self.remove(path / child)
        self.spend()
        self.meet("remove")
        self._change([(folder, name, None)])

    def sync_directory(self, path: Path) -> None:
        """Make the names in a folder durable."""
        entry = self._find(path)
        if not isinstance(entry, Folder):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        self._sync_names(entry)

    def free_bytes(self, path: Path) -> int:  # noqa: ARG002  The interface has it.
        """Return how much may still be written."""
        if self.capacity is not None:
            return max(self.free(), 0)
        return 0 if self.is_full else FREE_BYTES

    def size_bytes(self, path: Path) -> int:  # noqa: ARG002  The interface has it.
        """Return how much the whole disk holds."""
        return FREE_BYTES if self.capacity is None else self.capacity

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _find(self, path: Path) -> Entry | None:
        entry: Entry = self._root
        for name in _parts(path):
            if isinstance(entry, Inode):
                return None
            found = entry.entries.get(name)
            if found is None:
                return None
            entry = found
        return entry

    def _parent(self, path: Path) -> tuple[Folder, str]:
        *parents, name = _parts(path)
        folder = self._root
        for parent in parents:
            entry = folder.entries.get(parent)
            if not isinstance(entry, Folder):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            folder = entry
        return folder, name

    def _change(self, change: NameChange) -> None:
        for folder, name, entry in change:
            if entry is None:
                del folder.entries[name]
            else:
                folder.entries[name] = entry
        self._changes.append(change)

    def _sync_names(self, folder: Folder) -> None:
        """Make the changes to one folder durable, and those to other folders without which they make no sense."""
        self.spend()
        self.meet("sync_directory")
        if not self._changes:
            return
        wanted = {folder}  # By identity, as folders are told apart.
        kept: list[NameChange] = []
        durable: list[NameChange] = []
        for change in reversed(self._changes):
            folders = [touched for touched, _, _ in change]
            if not wanted.isdisjoint(folders):
                durable.append(change)
                wanted.update(folders)
            else:
                kept.append(change)
        for change in reversed(durable):
            _make_durable(change)
        self._changes = kept[::-1]


def _parts(path: Path) -> tuple[str, ...]:
    """Return the names on the way to a path; a path keeps them itself, and is never changed."""
    return path.parts[1:] if path.root else path.parts


def _make_durable(change: NameChange) -> None:
    for folder, name, entry in change:
        if entry is None:
            folder.durable.pop(name, None)
        else:
            folder.durable[name] = entry


def _write(inode: Inode, position: int, data: bytes) -> None:
    _apply(inode.data, position, data)
    inode.pending.append((position, data))


def _apply(content: bytearray, position: int, data: bytes | None) -> None:
    """Write into a content, or cut it (or fill it up with zeros) to a size."""
    if data is None:
        if position < len(content):
            del content[position:]
            return
        content.extend(bytes(position - len(content)))
        return
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _tear(content: bytearray, position: int, data: bytes, random: Random) -> None:
    """Write some sectors of the data and not others; the file has its new length all the same."""
    if position + len(data) > len(content):
        content.extend(bytes(position + len(data) - len(content)))
    for start in range(0, len(data), SECTOR_BYTES):
        if random.random() < 0.5:
            part = data[start : start + SECTOR_BYTES]
            content[position + start : position + start + len(part)] = part


def _folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    for name in sorted(folder.durable):
        entry = folder.durable[name]
        if isinstance(entry, Folder):
            yield from _folders(entry)


def _files(prefix: str, folder: Folder) -> Iterator[tuple[str, Inode]]:
    for name in sorted(folder.entries):
        entry = folder.entries[name]
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(entry, Folder):
            yield from _files(path, entry)
        else:
            yield path, entry
