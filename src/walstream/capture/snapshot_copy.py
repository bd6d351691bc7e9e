r"""COPY's text format, as PostgreSQL writes it: a row of values from one line.

Owns splitting and unescaping; refuses to know types and where lines come from. A line is what one CopyData message
holds: values between tabs, a newline at the end. `\N` is null; within values \b \f \n \r \t \v, \\, octal \123 and
hexadecimal \x1F stand for one byte each, any other byte after a backslash for itself. PostgreSQL writes only the first
eight of these, but promises all. In UTF-8 no byte of a longer character is a tab, a newline or a backslash.
"""

from __future__ import annotations

import re
from typing import Final

from walstream.errors import DecodeError

NULL: Final = rb"\N"

_LETTERS: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_ESCAPE: Final = re.compile(rb"\\([0-7]{1,3}|x[0-9A-Fa-f]{1,2}|[\x00-\xff])", re.DOTALL)


def fields(line: bytes) -> list[bytes | None]:
    """Return the values of a line as PostgreSQL's text; None is null. Raises DecodeError when the line has no end."""
    if line[-1:] != b"\n":
        raise DecodeError("A row of COPY does not end with a newline.", data=bytes(line))
    parts: list[bytes | None] = [*line[:-1].split(b"\t")]
    if b"\\" in line:
        for index, part in enumerate(parts):
            if b"\\" in part:  # type: ignore[operator]
                parts[index] = None if part == NULL else unescaped(part)  # type: ignore[arg-type]
    return parts


def unescaped(value: bytes) -> bytes:
    """Return a value (not null) without its escapes."""
    return _ESCAPE.sub(_replace, value)


def _replace(match: re.Match[bytes]) -> bytes:
    found = match[1]
    if found in _LETTERS:
        return _LETTERS[found]
    if found[0] in b"01234567":
        return bytes((int(found, 8) & 0xFF,))
    if len(found) > 1:
        return bytes((int(found[1:], 16),))
    return found
