"""Kafka's primitive types in bytes: the bounded reading of them, and the writing of the one that needs a loop.

`Source` reads what strangers sent. Whatever the bytes are, it allocates nothing from an announced length before the
bytes are known to be there, and its only failure is `MalformedRequest`.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from walstream.errors import MalformedRequest

Buffer: TypeAlias = bytes | bytearray | memoryview

ELEMENTS_MAX = 100_000
"""Array elements in one message. An element costs up to 0.5 KB once decoded: 50 MB at the very most."""

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")


class Source:
    """A place in a received frame. `end` bounds every read, and moves inwards while a tagged field is read."""

    __slots__ = ("buffer", "elements_left", "end", "position")

    def __init__(self, buffer: Buffer, position: int = 0) -> None:
        self.buffer = buffer
        self.position = position
        self.end = len(buffer)
        self.elements_left = ELEMENTS_MAX

    def advance(self, length: int) -> int:
        """Step over `length` bytes that must be there and return where they begin."""
        position = self.position
        if length < 0 or length > self.end - position:
            raise MalformedRequest(
                f"A field of {length} bytes does not fit into the {self.end - position} that are left."
            )
        self.position = position + length
        return position

    def uvarint(self) -> int:
        """Read an unsigned varint of at most five bytes."""
        position = self.position
        if position < self.end and (value := self.buffer[position]) < 0x80:
            # Nearly all of them: lengths of names, and of arrays with a few elements.
            self.position = position + 1
            return value
        value = shift = 0
        while shift < 35:
            byte = self.buffer[self.advance(1)]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise MalformedRequest("A varint is longer than five bytes.")

    def int16(self) -> int:
        """Read two bytes."""
        value: int = _INT16.unpack_from(self.buffer, self.advance(2))[0]
        return value

    def int32(self) -> int:
        """Read four bytes."""
        value: int = _INT32.unpack_from(self.buffer, self.advance(4))[0]
        return value

    def string(self, length: int) -> str:
        """Read `length` bytes of UTF-8."""
        position = self.advance(length)
        try:
            return str(self.buffer[position : position + length], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedRequest("A string is not UTF-8.") from error

    def count(self, length: int, element_bytes_min: int) -> int:
        """Check an announced number of array elements against the bytes that are left and the message's allowance."""
        if not 0 <= length <= self.elements_left or length * element_bytes_min > self.end - self.position:
            raise MalformedRequest(f"An array of {length} elements does not fit into its message.")
        self.elements_left -= length
        return length

    def string_length(self, is_flexible: bool) -> int:
        """Read the length of a string; -1 is null."""
        return self.uvarint() - 1 if is_flexible else self.int16()

    def bytes_length(self, is_flexible: bool) -> int:
        """Read the length of bytes; -1 is null."""
        return self.uvarint() - 1 if is_flexible else self.int32()

    def array_length(self, is_flexible: bool, element_bytes_min: int) -> int:
        """Read the length of an array that is not null."""
        return self.count(self.bytes_length(is_flexible), element_bytes_min)

    def skip_tags(self) -> None:
        """Step over the tagged fields of a struct of which none is known."""
        if count := self.uvarint():
            for _ in range(self.count(count, 2)):
                self.uvarint()
                self.advance(self.uvarint())

    def finish(self) -> None:
        """Raise unless what was read filled the room it had: a tagged field must end where it says."""
        if self.position != self.end:
            raise MalformedRequest(f"{self.end - self.position} bytes are left over in a tagged field.")


def write_uvarint(out: bytearray, value: int) -> None:
    """Append an unsigned varint."""
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
