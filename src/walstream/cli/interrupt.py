"""Ctrl-C: the first one drains, the second one stops.

While the context is open, the first signal of `stopping` only sets `requested`: the command's loop sees it, finishes
what it has begun and reports it. A SIGINT or SIGTERM after it raises KeyboardInterrupt where the command stands; where
it stands in a call that hears of no signal, `ForcedExit` ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final, Self, TypeVar

from walstream.stopping import FORCING, stop_signals

T = TypeVar("T")

PATIENCE_S: Final = 2.0


class Interrupt:
    """A flag that the first signal sets."""

    def __init__(self) -> None:
        self.requested = False
        self._is_waiting = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def until(self, items: Iterator[T]) -> Iterator[T]:
        """Yield items until there are no more or the first signal comes, even while the next one is waited for."""
        while not self.requested:
            self._is_waiting = True
            try:
                item = next(items)
            except (StopIteration, _Requested):
                return
            finally:
                self._is_waiting = False
            yield item

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            if number in FORCING:
                raise KeyboardInterrupt
            return
        self.requested = True
        if self._is_waiting:
            # Python resumes an interrupted read by itself, so only an exception gets out of it.
            raise _Requested


class _Requested(BaseException):
    """The first signal came while an item was waited for."""


class ForcedExit:
    """Ends the process when a second signal was not heeded within a moment.

    Python runs handlers between its own steps, so a call into C that waits hears of no signal, and of two as if they
    were one. The byte that Python writes for each signal at once is read by a thread, which needs neither.
    """

    def __init__(self, code: int, last_words: Callable[[], None], patience_s: float = PATIENCE_S) -> None:
        """Take the exit code and what to do before; for commands to whom it makes no difference how they end."""
        self._code = code
        self._last_words = last_words
        self._patience_s = patience_s
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="walstream-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._previous)
        self._over.set()
        self._theirs.close()
        self._thread.join()
        self._ours.close()

    def _watch(self) -> None:
        count = 0
        while received := self._ours.recv(64):
            for number in received:
                count += number in FORCING or (number == signal.SIGHUP and not count)
            if count >= 2 and not self._over.wait(self._patience_s):
                self._last_words()
                os._exit(self._code)
