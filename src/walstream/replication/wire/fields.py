"""Fields of frames: big-endian integers, strings of a u16 length and UTF-8, byte strings; read within bounds.

`Fields` reads what a peer sent: whatever the bytes are, its only failure is `MalformedFrame`, and it allocates nothing
from an announced length before the bytes are known to be there. Writing asserts, because what we send is our own.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

from walstream.errors import MalformedFrame
from walstream.log.batch import Buffer

STRING_BYTES_MAX: Final = 0xFFFF

_U16: Final = Struct(">H")
_U32: Final = Struct(">I")


def string(text: str) -> bytes:
    """Return a string with its length before it, cut at a whole character if it is too long to be said."""
    data = text.encode("utf-8", "replace")
    if len(data) > STRING_BYTES_MAX:
        data = data[:STRING_BYTES_MAX].decode("utf-8", "ignore").encode()
    return _U16.pack(len(data)) + data


def blob(data: Buffer) -> bytes:
    """Return bytes with a u32 length before them."""
    return _U32.pack(len(data)) + data


def decode_utf8(data: Buffer, what: str) -> str:
    """Return the text of `data`. Raises MalformedFrame."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"The {what} is not UTF-8.") from error


class Fields:
    """A place in a received payload."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: memoryview, position: int = 0) -> None:
        self._data = data
        self._position = position

    @property
    def left(self) -> int:
        """How many bytes follow."""
        return len(self._data) - self._position

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        """Read a fixed group of fields."""
        return layout.unpack_from(self._data, self._advance(layout.size))

    def take(self, length: int) -> memoryview:
        """Read `length` bytes as a view."""
        position = self._advance(length)
        return self._data[position : position + length]

    def string(self, what: str) -> str:
        """Read a string."""
        (length,) = self.unpack(_U16)
        return decode_utf8(self.take(length), what)

    def blob(self) -> bytes:
        """Read bytes with a u32 length before them, and copy them."""
        (length,) = self.unpack(_U32)
        return bytes(self.take(length))

    def count(self, item_bytes_min: int) -> int:
        """Read the u32 number of items that follow; so many must have room, or they are never looped over."""
        (count,) = self.unpack(_U32)
        if count * item_bytes_min > self.left:
            raise MalformedFrame(f"{count} items are announced, and {self.left} bytes follow.")
        return int(count)

    def finish(self) -> None:
        """Make sure that nothing follows."""
        if self.left:
            raise MalformedFrame(f"{self.left} bytes follow the last field of a frame.")

    def _advance(self, length: int) -> int:
        position = self._position
        if length > len(self._data) - position:
            raise MalformedFrame(f"A field of {length} bytes does not fit into the {self.left} that are left.")
        self._position = position + length
        return position
