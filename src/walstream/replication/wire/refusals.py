"""How each error is said on the wire: a number and a sentence, in a FAILURE; the link is closed behind it.

The numbers are part of protocol version 2 and never change their meaning.
"""

from __future__ import annotations

from typing import Final

from walstream.errors import (
    AuthenticationFailed,
    BadChecksum,
    BadMagic,
    CreditExceeded,
    FrameTooLarge,
    LinkRefused,
    LinkTimeout,
    LinkVersionUnknown,
    MalformedFrame,
    PartitionUnknown,
    PeerFailed,
    UnexpectedFrame,
    WalstreamError,
)
from walstream.replication.messages import Failure

OTHER: Final = 0
"""A reason without a number of its own; a node that stops says this too."""

CODES: Final[dict[type[WalstreamError], int]] = {
    LinkVersionUnknown: 1,
    BadMagic: 2,
    BadChecksum: 3,
    FrameTooLarge: 4,
    MalformedFrame: 5,
    UnexpectedFrame: 6,
    PartitionUnknown: 7,
    CreditExceeded: 8,
    LinkRefused: 9,
    AuthenticationFailed: 10,
    LinkTimeout: 11,
}


def failure_of(error: WalstreamError) -> Failure:
    """Return what is told to the peer."""
    return Failure(CODES.get(type(error), OTHER), str(error))


def error_of(failure: Failure) -> PeerFailed:
    """Return what the peer told, as an error."""
    return PeerFailed(f"The peer ended the link: {failure.text}", code=failure.code)
