"""When a leader dials a follower again, and in which version of the protocol.

A follower that refuses version 2 is dialled at once in version 1, if that is allowed; when that link ends, version 2
is tried again, because the follower may have been replaced by a newer one. Anything else waits, a random half longer
than the configured delay, so that the nodes of a cluster do not all knock at the same moment. Dice are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

from walstream.replication.wire import version_1
from walstream.replication.wire.frames import VERSION
from walstream.replication.wire.link import Closed

DELAY_MS = 30_000
"""The protocol's own default; the configuration has another."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect after `delay_ms`, and begin in `version`."""

    delay_ms: int
    version: int = VERSION


def redial(closed: Closed | None, chance: float, delay_ms: int = DELAY_MS, *, takes_version_1: bool = False) -> Dial:
    """Say what to do after a link has ended, or could not be had (None); `chance` is random, in [0, 1)."""
    if closed is not None and closed.is_version_refused and takes_version_1:
        return Dial(0, version_1.VERSION)
    return Dial(delay_ms + int(delay_ms * chance / 2))
