"""PostgreSQL's array text as JSON arrays.

Owns the grammar of `array_out`; how one element is written is given by the caller. An array that JSON cannot say,
because its subscripts do not begin at 1 (`[0:1]={a,b}`), becomes a string of its text. Sans-IO.

    {1,NULL,3}   {"a b","say \\"hi\\"",c}   {{1,2},{3,4}}   {}        boxes are separated by ; instead of ,

An element in quotes is never NULL; inside of them a backslash makes the next character itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from walstream.capture.escaping import quoted

Converter = Callable[[bytes], bytes]

_is_flat_numbers = re.compile(rb"\{[-+0-9.e,]*\}").fullmatch
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)

_TOKENS: Final = rb'([^{}"\\%(delimiter)s]+)|"((?:[^"\\]|\\.)*)"|([{}])|(%(delimiter)s)|.'
"""An element, one in quotes, a brace, a delimiter, or what no array has."""


def array_converter(element: Converter, delimiter: str, *, is_number: bool) -> Converter:
    """Return a function from array text to JSON; `is_number` when the finite text of an element is JSON as it is.

    The function raises ValueError for text that is no array.
    """
    tokens = re.compile(_TOKENS % {b"delimiter": re.escape(delimiter.encode())}, re.DOTALL).finditer

    def convert(text: bytes) -> bytes:
        if is_number and _is_flat_numbers(text):
            return b"[" + text[1:-1] + b"]"
        if text[:1] == b"[":
            return quoted(text)
        pieces = []
        depth = depth_max = 0
        for token in tokens(text):
            bare, inner, brace, comma = token.groups()
            if bare is not None:
                pieces.append(b"null" if bare == b"NULL" else element(bare))
            elif inner is not None:
                pieces.append(element(_ESCAPED.sub(rb"\1", inner) if b"\\" in inner else inner))
            elif brace == b"{" and (depth or not pieces):
                depth = depth_max = depth + 1
                pieces.append(b"[")
            elif brace == b"}":
                depth -= 1
                pieces.append(b"]")
            elif comma is not None and depth:
                pieces.append(b",")
            else:
                depth = -1
                break
        if depth != 0 or depth_max == 0 or text[:1] != b"{":
            raise ValueError(f"{text[:40]!r} is no array")
        return b"".join(pieces)

    return convert
