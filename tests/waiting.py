"""Waiting for what comes by itself. A test that waits for a length of time is wrong on some machine; this is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S, pause_s: float = 0.05) -> Any:
    """Return what the condition gives once it gives something."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(pause_s)
    return found
