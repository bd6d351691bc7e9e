"""What a consumer's protocol metadata says that it reads.

The metadata of protocol type "consumer" is written for the group's leader; the node only looks at its topics, to
refuse the deletion of offsets in use and to notice that a static member came back with another subscription. The
layout of every version so far begins with: version (2 bytes), number of topics (4), each a length (2) and UTF-8.
"""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">hi")
_LENGTH = struct.Struct(">h")


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """Return the topics of a consumer's subscription; None when the bytes are not one."""
    try:
        _, count = _HEADER.unpack_from(metadata)
        # Each topic takes two bytes at least, so that an absurd count is refused before the loop.
        if not 0 <= count <= len(metadata) // _LENGTH.size:
            return None
        topics: set[str] = set()
        position = _HEADER.size
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(metadata, position)
            position += _LENGTH.size
            if length < 0 or position + length > len(metadata):
                return None
            topics.add(metadata[position : position + length].decode())
            position += length
    except (struct.error, UnicodeDecodeError):
        return None
    return frozenset(topics)
