"""Where received bytes lie until they are a whole frame.

A chunk is filled from its front and read from its front. A frame that is whole is handed out as a view into the chunk,
and a chunk is never written twice: so a batch can go from the socket to the disk without being copied, and lives for
as long as somebody holds a view. A frame that does not fit into what is left of its chunk moves to the next one, which
grows as bytes arrive: an announced length alone holds no memory.

The shell either writes into `buffer()` and says how much, or hands bytes over with `feed`.
"""

from __future__ import annotations

from typing import Final

from walstream.log.batch import Buffer

CHUNK_BYTES: Final = 256 * 1024
"""What one read takes at most. Frames up to this size are copied only where they straddle two chunks."""

FIRST_CHUNK_BYTES: Final = 4 * 1024
"""A stranger's first bytes are few: a connection that says nothing costs this much."""

ROOM_BYTES_MIN: Final = 1024
"""Less room than this at a chunk's end is given up unless the frame ends in it, or reads would become tiny."""

GROWTH: Final = 4
"""How much larger the next chunk of an unfinished frame is. A large frame is copied a third of a time on average."""


class Inbox:
    """The received bytes that nobody has taken yet: `chunk[start:end]`."""

    __slots__ = ("_needed", "_size", "chunk", "end", "start", "view")

    def __init__(self) -> None:
        self._size = FIRST_CHUNK_BYTES
        self._needed = 0
        self.chunk = bytearray(self._size)
        self.view = memoryview(self.chunk)
        self.start = 0
        self.end = 0

    @property
    def held_bytes(self) -> int:
        """What the current chunk takes, whatever is in it."""
        return len(self.chunk)

    def __len__(self) -> int:
        return self.end - self.start

    def buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        room = len(self.chunk) - self.end
        if room < ROOM_BYTES_MIN and not 0 < self._needed - (self.end - self.start) <= room:
            self._renew()
        return self.view[self.end :]

    def received(self, count: int) -> None:
        """Take note of `count` bytes written to the buffer."""
        self.end += count
        assert self.end <= len(self.chunk), "more bytes received than there was room for"

    def feed(self, data: Buffer) -> int:
        """Copy as much of `data` as there is room for, and return how much: at least a byte, if there is one."""
        room = self.buffer()
        count = min(len(room), len(data))
        room[:count] = memoryview(data)[:count]
        self.received(count)
        return count

    def take(self, count: int, skip: int = 0) -> memoryview:
        """Take the next `count` bytes, which must be there, and hand them out without the first `skip`.

        The view stays valid for as long as it is held.
        """
        start = self.start
        end = start + count
        assert end <= self.end, "a frame taken before it is whole"
        self.start = end
        self._needed = 0
        return self.view[start + skip : end]

    def need(self, count: int) -> None:
        """Say that the next frame is whole when `count` bytes are there."""
        self._needed = count

    def _renew(self) -> None:
        """Go on in a new chunk, which begins with the bytes that are left of this one."""
        held = self.end - self.start
        # Each chunk is larger than the last until the usual size: a peer that has proved itself sends more than one
        # that has not. An unfinished frame gets room for what came of it and three times as much.
        self._size = min(self._size * GROWTH, CHUNK_BYTES)
        size = max(self._size, min(self._needed, held * GROWTH), held + ROOM_BYTES_MIN)
        chunk = bytearray(size)
        chunk[:held] = self.view[self.start : self.end]
        self.chunk, self.view = chunk, memoryview(chunk)
        self.start, self.end = 0, held
