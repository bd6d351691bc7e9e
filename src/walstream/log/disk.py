"""The disk: every system call that `log/` makes, behind one interface.

`Disk` and `File` are what the rest of the package sees, so that the same log code runs on the operating system's
files (`OsDisk`) and on a simulated disk that loses unsynced bytes. Nothing here knows what the bytes mean.

The contract: `pwritev` writes everything or raises; what it wrote is durable only after `sync` has returned;
a name made by `open`, `rename` or `remove` is durable only after `sync_directory`. An error is always raised,
never logged and passed over: a failed fsync in particular is never tried again as if it could succeed later.

A disk keeps a *reserve*, because freeing space takes space: retention needs a checkpoint before it removes a segment,
and deleting a topic needs a new catalogue. `write(durable=True)` spends the reserve when the disk is full and then
succeeds. While it is spent the log takes no batches (`is_reserve_spent`), which would use up what is left;
`keep_reserve` makes it again once there is space.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from walstream.errors import DirectoryLocked, DirectoryUnusable

Buffer = bytes | bytearray | memoryview

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""The process, or the whole system, may open no more files: that passes, and harms nothing that is open."""

IOV_MAX = 1024
"""Buffers per writev call; the kernel refuses more."""

FREE_BYTES_MAX = 16 * 1024 * 1024
FREE_FRACTION = 16


def is_full(error: BaseException | None) -> bool:
    """Tell whether an operation failed for lack of space."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def free_bytes_min(disk: Disk, path: Path) -> int:
    """Return how much must be free before writes resume on a disk that was full: 16 MiB, less on a small one."""
    return min(FREE_BYTES_MAX, disk.size_bytes(path) // FREE_FRACTION)


def read_hint(disk: Disk, path: Path) -> bytes | None:
    """Return the content of a small file that can do without; None if it is missing or cannot be read.

    Raises OSError where no more files can be opened: that passes.
    """
    try:
        return disk.read(path)
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise
        return None


class File(Protocol):
    """An open file, addressed by position."""

    def size(self) -> int:
        """Return the file's length in bytes."""

    def pread(self, length: int, position: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""

    def pread_cached(self, length: int, position: int) -> bytes | None:
        """Read like `pread` if no disk access is needed, else return None at once."""

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers one after the other at `position` and return their total length."""

    def sync(self) -> None:
        """Make what was written durable."""

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""

    def close(self) -> None:
        """Give the file back; open readers of it have their own handle."""


class Disk(Protocol):
    """A folder tree."""

    @property
    def is_reserve_spent(self) -> bool:
        """Whether a durable write used up the reserve: what space is left is for more of them."""

    def keep_reserve(self, size: int) -> bool:
        """Set space aside for durable writes to a full disk, if there is so much; return whether it is set aside."""

    def spend_reserve(self) -> None:
        """Give up what was set aside, until `keep_reserve` makes it again."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open a file for reading and writing."""

    def read(self, path: Path) -> bytes | None:
        """Return a small file's content, or None if there is no such file."""

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        """Replace a small file as a whole: readers see the old content or the new, never a mixture."""

    def modified_ms(self, path: Path) -> int:
        """Return when a file was last written to, by the wall clock."""

    def list(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""

    def make_directory(self, path: Path) -> None:
        """Create a folder, and its parents, durably."""

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or folder over a name."""

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all in it; nothing there is no error."""

    def sync_directory(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def free_bytes(self, path: Path) -> int:
        """Return how much may still be written."""

    def size_bytes(self, path: Path) -> int:
        """Return how much the whole disk holds."""


class OsFile:
    """A file of the operating system. Closed when its last user lets go of it, so readers never race a close."""

    __slots__ = ("__weakref__", "_close", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    @property
    def descriptor(self) -> int:
        """The kernel's number of the open file, for what only the kernel does; valid for as long as this lives."""
        return self._fd

    def size(self) -> int:
        """Return the file's length in bytes."""
        return os.fstat(self._fd).st_size

    def pread(self, length: int, position: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        data = os.pread(self._fd, length, position)
        if len(data) == length or not data:
            return data
        parts = [data]
        missing = length - len(data)
        while missing and (data := os.pread(self._fd, missing, position + length - missing)):
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def pread_cached(self, length: int, position: int) -> bytes | None:
        """Read like `pread` if the pages are in memory, else return None at once."""
        buffer = bytearray(length)
        try:
            count = os.preadv(self._fd, [buffer], position, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise
        if count < length:
            return None
        return buffer  # type: ignore[return-value]  # a bytearray serves every reader of bytes here, and saves a copy

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers one after the other at `position` and return their total length."""
        start = position
        for first in range(0, len(buffers), IOV_MAX):
            chunk = buffers[first : first + IOV_MAX]
            expected = sum(map(len, chunk))
            written = os.pwritev(self._fd, chunk, position)
            if written < expected:
                # A short write happens on a nearly full disk. The rest, tried again, gives the real error.
                rest = memoryview(b"".join(chunk))[written:]
                while rest:
                    count = os.pwrite(self._fd, rest, position + expected - len(rest))
                    rest = rest[count:]
            position += expected
        return position - start

    def sync(self) -> None:
        """Make what was written durable."""
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        """Close now instead of when the last reference goes."""
        self._close()


class OsDisk:
    """The operating system's files. `reserve` is the file that holds the reserve; without one there is none."""

    def __init__(self, reserve: Path | None = None) -> None:
        self._reserve = reserve
        self._reserve_lock = threading.Lock()
        self._is_reserve_spent = False

    @property
    def is_reserve_spent(self) -> bool:
        """Whether a durable write used up the reserve."""
        return self._is_reserve_spent

    def keep_reserve(self, size: int) -> bool:
        """Set space aside, if there is so much; return whether it is set aside. Blocks."""
        if self._reserve is None:
            return True
        with self._reserve_lock:
            fd = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                before = os.fstat(fd).st_size
                if before < size:
                    self._allocate(fd, before, size)
                self._is_reserve_spent = False
            except OSError as error:
                if not is_full(error):
                    raise
                self._is_reserve_spent = self._is_reserve_spent or not before
                return False
            finally:
                os.close(fd)
        return True

    def _allocate(self, fd: int, before: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
        except OSError:
            assert self._reserve is not None
            if before:
                os.ftruncate(fd, before)
            else:
                self._reserve.unlink(missing_ok=True)
            raise

    def spend_reserve(self) -> None:
        """Give up what was set aside."""
        if self._reserve is not None:
            with self._reserve_lock:
                self._reserve.unlink(missing_ok=True)
                self._is_reserve_spent = True

    def open(self, path: Path, *, create: bool = False) -> OsFile:
        """Open a file for reading and writing."""
        return OsFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o640))

    def read(self, path: Path) -> bytes | None:
        """Return a small file's content, or None if there is no such file."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, path: Path, data: bytes, *, durable: bool) -> None:
        """Replace a small file as a whole, by way of a neighbour that is renamed over it."""
        if self._is_reserve_spent and not durable:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        try:
            self._replace(path, data, durable=durable)
        except OSError as error:
            if not durable or not is_full(error) or self._reserve is None:
                raise
            self.spend_reserve()
            self._replace(path, data, durable=True)

    def _replace(self, path: Path, data: bytes, *, durable: bool) -> None:
        neighbour = path.with_name(path.name + ".new")
        try:
            self._write_new(neighbour, data, durable=durable)
        except OSError:
            with contextlib.suppress(OSError):
                neighbour.unlink(missing_ok=True)  # On a full disk the half of it would keep what is left.
            raise
        neighbour.replace(path)
        if durable:
            self.sync_directory(path.parent)

    def _write_new(self, neighbour: Path, data: bytes, *, durable: bool) -> None:
        fd = os.open(neighbour, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def modified_ms(self, path: Path) -> int:
        """Return when a file was last written to, by the wall clock."""
        return path.stat().st_mtime_ns // 1_000_000

    def list(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""
        try:
            return sorted(entry.name for entry in path.iterdir())
        except FileNotFoundError:
            return []

    def make_directory(self, path: Path) -> None:
        """Create a folder, and its parents, durably."""
        missing = [parent for parent in (path, *path.parents) if not parent.is_dir()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o750, exist_ok=True)
            self.sync_directory(folder.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or folder over a name."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all in it; nothing there is no error."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        """Return how much may still be written."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def size_bytes(self, path: Path) -> int:
        """Return how much the whole disk holds."""
        stat = os.statvfs(path)
        return stat.f_blocks * stat.f_frsize


class DirectoryLock:
    """One process per data directory: an exclusive lock on its `LOCK` file, which holds the owner's process id."""

    def __init__(self, directory: Path) -> None:
        path = directory / "LOCK"
        try:
            OsDisk().make_directory(directory)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise
            raise DirectoryUnusable(
                f"The data directory {directory} cannot be used: {error.strerror}.",
                "Give the user that runs walstream write access to it, or set node.data to another folder.",
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise DirectoryLocked(
                f"The data directory {directory} is in use by another walstream process (pid {owner}).",
                "Stop that process first, or set node.data to another folder.",
            ) from error
        with contextlib.suppress(OSError):  # The lock holds without the number, and a full disk must not stop a start.
            os.pwrite(self._fd, f"{os.getpid():<10}\n".encode(), 0)

    def release(self) -> None:
        """Let another process in."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
