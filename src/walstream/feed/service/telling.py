"""What a subscriber is told of an error: which topics there are is for admins to know, and not for tenants.

Owns the choice. An error of the log names the topic or partition that it is about, in its text or in its hint. A tenant
is told the same without the name where the error has such a text (`nameless`), and otherwise only what kind of error it
was; the status of the call stays the same. What is only about the call and whoever makes it is told as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from walstream import logs
from walstream.errors import FeedError, RefusedError, UnreachableError, UnsupportedVersion, UsageError, WalstreamError
from walstream.feed.service.subscription import ClientGone, StreamFailed

log = logs.get(__name__)

ABOUT_THE_CALL: Final = (
    UsageError,
    RefusedError,
    FeedError,
    UnreachableError,
    UnsupportedVersion,
    ClientGone,
    StreamFailed,
)
"""What says nothing of the log but LSNs, unless it has a text without names."""


def told(error: WalstreamError, role: str) -> WalstreamError:
    """Return an error as somebody with this role may know it."""
    if role == "admin":
        return error
    if error.nameless is not None:
        return error.nameless
    if isinstance(error, ABOUT_THE_CALL):
        return error
    return type(error)("What was asked for cannot be read.", "Whoever runs the feed finds the reason in its log.")


@contextmanager
def telling(role: str) -> Iterator[None]:
    """Let errors out as somebody with this role may know them; what that leaves out is logged."""
    try:
        yield
    except WalstreamError as error:
        said = told(error, role)
        if said is error:
            raise
        log.info("error told without names", error=type(error).__name__, reason=str(error))
        raise said from error
