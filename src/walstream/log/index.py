"""The sparse index of one segment: from an offset or a time to a position in the file.

One row about every `INTERVAL_BYTES` of log says: the batch at `position` begins at `offset`, and everything before it
carries timestamps no later than `earlier_timestamp`. The last column only grows, so one bisection answers both
questions; the reader then walks batch headers for at most an interval. Who follows the end of the log reads a batch or
two at a time and would walk further than it reads, so the last few batches are known one by one, in memory only.

An index file is a hint that can always be made again from its segment: it is written without fsync, carries a
checksum, and `covered` tells how much of the segment it speaks for. A file that does not check is as good as none.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right

from crc32c import crc32c

INTERVAL_BYTES = 16 * 1024
"""A reader walks at most this much beyond the row it found: about 20 µs of headers, for 64 KiB of rows per GiB."""

RECENT_MAX = 8
"""Batches that are known one by one: as many as come while a reader that keeps up has its turn. About 1 KB."""

NO_TIMESTAMP = -1

_HEADER = struct.Struct(">4sIQqqQI")
_MAGIC = b"wsi1"


class Index:
    """Rows (offset, position, earlier_timestamp) of one segment, and the largest timestamp in it."""

    __slots__ = (
        "_last_indexed",
        "_offsets",
        "_positions",
        "_recent",
        "_times",
        "covered",
        "max_timestamp",
        "max_timestamp_offset",
    )

    def __init__(self) -> None:
        self._offsets = array("q")
        self._positions = array("q")
        self._times = array("q")
        self._last_indexed = -INTERVAL_BYTES
        self._recent: dict[int, int] = {}
        """Positions of the last batches by their first offsets."""
        self.covered = 0
        self.max_timestamp = NO_TIMESTAMP
        self.max_timestamp_offset = -1

    def note(self, base_offset: int, last_offset: int, position: int, length: int, max_timestamp: int) -> None:
        """Take in the next batch of the segment."""
        if position - self._last_indexed >= INTERVAL_BYTES:
            # Positions first: another thread may search the others meanwhile, and then looks here.
            self._positions.append(position)
            self._offsets.append(base_offset)
            self._times.append(self.max_timestamp)
            self._last_indexed = position
        self._recent[base_offset] = position
        if len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
            self.max_timestamp_offset = last_offset
        self.covered = position + length

    def restore(self, last_offset: int, position: int, max_timestamp: int) -> None:
        """Take in the time of a batch in the middle, which was damaged when this was made."""
        for row in range(bisect_right(self._positions, position), len(self._times)):
            self._times[row] = max(self._times[row], max_timestamp)
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
            self.max_timestamp_offset = last_offset

    def position_for_offset(self, offset: int) -> int:
        """Return a batch boundary at or before the batch that holds `offset`."""
        row = bisect_right(self._offsets, offset) - 1
        return self._positions[row] if row >= 0 else 0

    def row_for_offset(self, offset: int) -> tuple[int, int | None]:
        """Return (position, offset) of a batch at or before the one that holds `offset`; offset None: the first one."""
        if (position := self._recent.get(offset)) is not None:
            return position, offset
        row = bisect_right(self._offsets, offset) - 1
        return (self._positions[row], self._offsets[row]) if row >= 0 else (0, None)

    def boundary_before(self, position: int) -> tuple[int, int]:
        """Return (position, offset) of the last row whose batch begins at or before `position`; (0, -1): none does."""
        row = bisect_right(self._positions, position) - 1
        return (self._positions[row], self._offsets[row]) if row >= 0 else (0, -1)

    def position_for_time(self, timestamp_ms: int) -> int:
        """Return a batch boundary before which every timestamp is earlier than `timestamp_ms`."""
        row = bisect_left(self._times, timestamp_ms) - 1
        return self._positions[row] if row >= 0 else 0

    def copy(self) -> Index:
        """Return an index that says the same and goes its own way from here."""
        index = Index()
        index._offsets, index._positions, index._times = self._offsets[:], self._positions[:], self._times[:]
        index._last_indexed, index.covered = self._last_indexed, self.covered
        index.max_timestamp, index.max_timestamp_offset = self.max_timestamp, self.max_timestamp_offset
        return index

    def truncate(self, position: int) -> None:
        """Forget the rows from `position` on. The largest timestamp may then be one that is gone: it is a bound."""
        while self._positions and self._positions[-1] >= position:
            del self._offsets[-1], self._positions[-1], self._times[-1]
        self._recent.clear()
        self._last_indexed = self._positions[-1] if self._positions else -INTERVAL_BYTES
        self.covered = min(self.covered, position)

    def encode(self) -> bytes:
        """Return the content of the index file."""
        body = self._offsets.tobytes() + self._positions.tobytes() + self._times.tobytes()
        return (
            _HEADER.pack(
                _MAGIC,
                len(self._offsets),
                self.covered,
                self.max_timestamp,
                self.max_timestamp_offset,
                max(self._last_indexed, 0),
                crc32c(body),
            )
            + body
        )

    @classmethod
    def decode(cls, data: bytes | None) -> Index | None:
        """Read an index file back, or return None if it does not check."""
        if data is None or len(data) < _HEADER.size:
            return None
        magic, count, covered, max_timestamp, max_offset, last_indexed, crc = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if magic != _MAGIC or len(body) != 24 * count or crc32c(body) != crc:
            return None
        index = cls()
        width = 8 * count
        index._offsets.frombytes(body[:width])
        index._positions.frombytes(body[width : 2 * width])
        index._times.frombytes(body[2 * width :])
        index._last_indexed = last_indexed if count else -INTERVAL_BYTES
        index.covered = covered
        index.max_timestamp = max_timestamp
        index.max_timestamp_offset = max_offset
        return index
