"""Files for transactions that are larger than the memory they may take, and the account of that memory.

Owns the format of a spill file and the budget; refuses to know what a row is or why a subtransaction is gone. A file
is appended to until its transaction commits, then read as often as one likes. It has no name (the kernel frees it
with the process, however that ends), so that nothing can be left behind; `sweep` is for systems without such files.

    frame   subtransaction id (4)  rows (4)  of them descriptions (4)  bytes of the rows (4)
            the length of each row (4 each)
            the rows, one after the other

A frame holds rows of one subtransaction, so that those of an aborted one are stepped over without being read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import tempfile
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import IO, Final

from walstream.errors import StorageError

PREFIX: Final = "walstream-spill-"
FRAME_BYTES: Final = 256 * 1024
"""A frame ends with the row that reaches this, so that reading holds little more than one frame."""

_HEADER = struct.Struct("=IIII")
_LENGTH_BYTES: Final = array("I").itemsize


class Budget:
    """Bytes that transactions hold in memory, from their first row until they are closed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used = 0
        # A transaction may be closed by another thread or by the garbage collector, in the middle of anything:
        # appending to a deque is safe there, a lock would not be.
        self._returned: deque[int] = deque()

    def take(self, size: int) -> None:
        """Count bytes that are now held."""
        self._used += size

    def give_back(self, size: int) -> None:
        """Count bytes that are no longer held. Any thread may call it."""
        self._returned.append(size)

    @property
    def used_bytes(self) -> int:
        """How much is held now."""
        while self._returned:
            self._used -= self._returned.popleft()
        return self._used

    @property
    def exceeded(self) -> bool:
        """Whether more is held than allowed."""
        return self.used_bytes > self.limit_bytes


class SpillFile:
    """The rows of one transaction on disk."""

    def __init__(self, folder: Path) -> None:
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
                prefix=PREFIX, dir=folder, buffering=FRAME_BYTES
            )
        self._folder = folder
        self.size_bytes = 0

    def append(self, subxid: int, rows: Sequence[bytes], descriptions: int) -> None:
        """Write rows of one subtransaction, `descriptions` of which are no changes, as one frame or several."""
        ends = list(accumulate(map(len, rows)))
        first, written = 0, 0
        while first < len(rows):
            after = min(bisect_right(ends, written + FRAME_BYTES - 1) + 1, len(rows))
            # Only the sum over a subtransaction is ever asked for, so the first frame counts all descriptions.
            self._write_frame(subxid, rows[first:after], descriptions if first == 0 else 0, ends[after - 1] - written)
            first, written = after, ends[after - 1]

    def _write_frame(self, subxid: int, rows: Sequence[bytes], descriptions: int, size: int) -> None:
        lengths = array("I", map(len, rows)).tobytes()
        with _explained(self._folder):
            self._file.write(b"".join((_HEADER.pack(subxid, len(rows), descriptions, size), lengths, *rows)))
        self.size_bytes += _HEADER.size + len(lengths) + size

    def flush(self) -> None:
        """Hand what is buffered to the system; call it before reading."""
        with _explained(self._folder):
            self._file.flush()

    def frames(self, aborted: Collection[int]) -> Iterator[list[bytes]]:
        """Yield the rows frame by frame, without those of aborted subtransactions."""
        reader = _Reader(self._file.fileno(), self.size_bytes)
        while not reader.at_end:
            subxid, count, _, size = _HEADER.unpack(reader.take(_HEADER.size))
            if subxid in aborted:
                reader.skip(count * _LENGTH_BYTES + size)
                continue
            lengths = array("I")
            lengths.frombytes(reader.take(count * _LENGTH_BYTES))
            body = reader.take(size)
            ends = list(accumulate(lengths))
            yield list(map(body.__getitem__, map(slice, chain((0,), ends), ends)))

    def count(self, aborted: Collection[int]) -> tuple[int, int]:
        """Return how many rows are left without the aborted subtransactions, and how many of them are descriptions."""
        reader = _Reader(self._file.fileno(), self.size_bytes)
        rows = descriptions = 0
        while not reader.at_end:
            subxid, count, described, size = _HEADER.unpack(reader.take(_HEADER.size))
            reader.skip(count * _LENGTH_BYTES + size)
            if subxid not in aborted:
                rows += count
                descriptions += described
        return rows, descriptions

    def close(self) -> None:
        """Free the space. What was buffered and not yet written is not worth an error any more."""
        with contextlib.suppress(OSError):
            self._file.close()


class SpilledRows:
    """The rows of a committed transaction: a head in memory, its file, and what came after the last spill."""

    __slots__ = ("_aborted", "_file", "_head", "_length", "_tail")

    def __init__(
        self,
        file: SpillFile,
        aborted: Collection[int],
        count: int,
        head: Sequence[bytes] = (),
        tail: Sequence[bytes] = (),
    ) -> None:
        self._file = file
        self._aborted = aborted
        self._head = head
        self._tail = tail
        self._length = len(head) + count + len(tail)

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._head, chain.from_iterable(self._file.frames(self._aborted)), self._tail)

    def __len__(self) -> int:
        return self._length


class _Reader:
    """Reads a file from its beginning in large blocks, at a place of its own."""

    __slots__ = ("_at", "_block", "_descriptor", "_next", "_size")

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._block = b""
        self._at = 0
        self._next = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._block) and self._next >= self._size

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._block):
            self._fill(count)
            end = count
        found = self._block[self._at : end]
        self._at = end
        return found

    def skip(self, count: int) -> None:
        held = len(self._block) - self._at
        if count <= held:
            self._at += count
        else:
            self._block, self._at = b"", 0
            self._next += count - held

    def _fill(self, count: int) -> None:
        parts = [self._block[self._at :]]
        held = len(parts[0])
        while held < count:
            part = os.pread(self._descriptor, max(FRAME_BYTES, count - held), self._next)
            if not part:
                raise StorageError("A spill file ends before the rows that were written to it.")
            parts.append(part)
            held += len(part)
            self._next += len(part)
        self._block, self._at = b"".join(parts), 0


class SpillFolder:
    """Where spill files are made; swept of what a system without nameless files may have left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sweep(folder)

    def open(self) -> SpillFile:
        """Make an empty spill file."""
        return SpillFile(self.folder)


def sweep(folder: Path) -> None:
    """Remove spill files of processes that ended without removing them."""
    for file in folder.glob(f"{PREFIX}*"):
        # A capture without capture.spill_directory that was killed leaves its folder, with nothing in it.
        if file.is_symlink() or not file.is_dir():
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            f"A transaction larger than capture.memory_bytes_max cannot be written to {folder}: {error.strerror}.",
            "Make room there." if full else "Check the folder, or raise capture.memory_bytes_max.",
        ) from error
