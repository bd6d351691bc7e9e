"""The signals that ask a long-running command to stop: SIGTERM, SIGINT and SIGHUP.

SIGHUP means that the terminal was closed. It asks as SIGTERM does, but never counts as the second signal, which stops
at once: the kernel and the shell each send one. Where it is ignored at the start, by nohup, it stays ignored.
"""

from __future__ import annotations

import signal
from typing import Final

FORCING: Final = (signal.SIGTERM, signal.SIGINT)
"""What stops at once after a first signal of any kind."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return FORCING
    return (*FORCING, signal.SIGHUP)
