"""Resume tokens: where a subscriber goes on, as bytes that it keeps and need not understand.

Owns their form: a version, the LSN of the next position, a checksum. A token is no secret and no right: it is bound to
nobody, and whoever shows another's gets what its own rights allow from that position on. Sans-IO.
"""

from __future__ import annotations

from typing import Final

import crc32c

from walstream.errors import UsageError

VERSION: Final = 1
LSN_BYTES: Final = 16
TOKEN_BYTES: Final = 1 + LSN_BYTES + 4


def resume_token(position: int) -> bytes:
    """Return the token of whoever wants the entries from this LSN on."""
    head = bytes((VERSION,)) + position.to_bytes(LSN_BYTES, "big")
    return head + crc32c.crc32c(head).to_bytes(4, "big")


def position_of(token: bytes) -> int:
    """Return the LSN that a token stands for. Raises UsageError."""
    head, checksum = token[: 1 + LSN_BYTES], token[1 + LSN_BYTES :]
    if len(token) != TOKEN_BYTES or crc32c.crc32c(head).to_bytes(4, "big") != checksum:
        raise UsageError(
            "The resume token is none of the feed's, or was damaged.",
            "Send it as it came in a batch, or resume with start_lsn.",
        )
    if head[0] != VERSION:
        raise UsageError(f"The resume token has version {head[0]}, which is not known.", "Resume with start_lsn.")
    return int.from_bytes(head[1:], "big")
