"""JSON strings out of UTF-8 bytes.

Owns what must be escaped and how; refuses to know what the strings mean. The result is byte for byte what `json.dumps`
with `ensure_ascii=False` writes, because its own encoder does the work as soon as there is any. Most values need none,
and one search in C proves it. Sans-IO.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring
from typing import Final

CLEAN_CLASS: Final = rb'[^\x00-\x1f"\\]'
"""A regular expression for one byte that JSON writes as it is."""

QUOTE: Final = b'"'

is_unclean = re.compile(rb'[\x00-\x1f"\\]').search
"""Find the first byte that JSON does not write as it is."""


def quoted(text: bytes) -> bytes:
    """Return a JSON string, quotes included. Raises UnicodeDecodeError, at the latest where escapes are needed."""
    if is_unclean(text) is None:
        return QUOTE + text + QUOTE
    return encode_basestring(text.decode()).encode()


def quoted_name(name: str) -> bytes:
    """Return the name of a column, table or database as a JSON string."""
    return encode_basestring(name).encode()
