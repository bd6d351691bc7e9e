"""The signals that ask a long-running command to stop: SIGTERM, SIGINT and SIGHUP.

SIGHUP means that the terminal was closed. It asks as SIGTERM does, but never counts as the second signal, which stops
at once: the kernel and the shell each send one. Where it is ignored at the start, by nohup, it stays ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

FORCING: Final = (signal.SIGTERM, signal.SIGINT)
"""What stops at once after a first signal of any kind."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return FORCING
    return (*FORCING, signal.SIGHUP)


class _Interruption:
    """The state of `interrupt`, which is the process's, as signal handlers are."""

    blocks = 0
    is_due = False


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Handle a stop signal: raise KeyboardInterrupt, at the end of the `uninterrupted` block if there is one."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The kernel and the shell send one each; it must not end the end.
    if _Interruption.blocks:
        _Interruption.is_due = True
    else:
        raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay `interrupt` until the block has ended.

    A child process that was started, and whose Popen object was not assigned yet, would outlive what stops it.
    """
    _Interruption.blocks += 1
    try:
        yield
    finally:
        _Interruption.blocks -= 1
        if _Interruption.is_due and not _Interruption.blocks:
            _Interruption.is_due = False
            raise KeyboardInterrupt
