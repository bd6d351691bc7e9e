"""Ctrl-C: the first one drains, the second one stops.

While the context is open, the first SIGINT or SIGTERM only sets `requested`: the command's loop sees it, finishes what
it has begun and reports it. The second raises KeyboardInterrupt where the command stands.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A flag that the first signal sets."""

    def __init__(self) -> None:
        self.requested = False
        self._is_waiting = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
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

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._is_waiting:
            # Python resumes an interrupted read by itself, so only an exception gets out of it.
            raise _Requested


class _Requested(BaseException):
    """The first signal came while an item was waited for."""
