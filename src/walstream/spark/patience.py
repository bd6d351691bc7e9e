"""Waiting for a log that is away for a moment: a node that is started again should not cost a query that runs.

Owns how long and how often; refuses to know the question. What is asked for the first time is not waited for: a log
that has never answered is perhaps not there at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from walstream.errors import WalstreamError

PATIENCE_S: Final = 60.0
PAUSE_S: Final = 0.5

R = TypeVar("R")


def patient(ask: Callable[[], R], connect: Callable[[], None]) -> R:
    """Ask until there is an answer, or the log has been away for too long; `connect` is called before each new try.

    A client that has known the log before it went away may insist on what it knew: so it begins anew.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except WalstreamError as error:
            if not error.retryable or time.monotonic() > deadline_s:
                raise
            time.sleep(PAUSE_S)
            connect()
