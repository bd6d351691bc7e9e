"""Structured logging: a constant phrase plus fields, on stderr.

`log = get(__name__)` and then `log.info("segment sealed", partition=…, bytes=…)`. The phrase never holds a value, so
that it can be searched for; values are fields with their unit last. On a terminal the lines are for people,
elsewhere each is one JSON object. State changes are INFO; nothing is logged per record.

Standard output belongs to data, so nothing here ever writes to it. Messages of the standard `logging` module, which
libraries use, take the same way out.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from walstream.config import LogFormat, LogLevel

LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def get(name: str) -> FilteringBoundLogger:
    """Return the logger of a module; the first dotted part, `walstream`, says nothing and is left out."""
    return cast(FilteringBoundLogger, structlog.get_logger(module=name.removeprefix("walstream.")))


def set_up(level: LogLevel = "info", style: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (stderr), at this level and in this style."""
    stream = cast(TextIO, Unfailing(stream))
    if style == "auto":
        style = "console" if stream.isatty() else "json"
    shared: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level]
    render = _for_machines() if style == "json" else _for_people(colors=stream.isatty())
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries are heard from when something is wrong; their own state changes are not ours to announce.
    root.setLevel(max(LEVELS[level], logging.WARNING) if level != "debug" else logging.DEBUG)


class Unfailing:
    """A stream (stderr, whatever that is when a line is written) whose failures stay in it.

    The terminal behind stderr may be closed, or its pipe full of nobody: then lines are lost, not what logged them.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        """Say whether people read it."""
        return (self._stream or sys.stderr).isatty()

    def fileno(self) -> int:
        """Return the descriptor, from which the size of the terminal is read."""
        return (self._stream or sys.stderr).fileno()

    @property
    def encoding(self) -> str:
        """The encoding, by which lines are drawn or written in ASCII."""
        return (self._stream or sys.stderr).encoding

    def write(self, text: str) -> int:
        """Write if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            (self._stream or sys.stderr).write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            (self._stream or sys.stderr).flush()


# Local variables stay out of tracebacks, because passwords and records are among them.


def _for_machines() -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        structlog.processors.EventRenamer("message"),
        _lead_with_what_happened,
        structlog.processors.JSONRenderer(default=str),
    ]


def _for_people(*, colors: bool) -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False, key="time"),
        structlog.dev.ConsoleRenderer(
            colors=colors,
            timestamp_key="time",
            pad_event_to=32,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _lead_with_what_happened(_: object, __: str, event: EventDict) -> EventDict:
    """Put the fields that every line has first, so that a screen of JSON can be read from the left."""
    first = {key: event.pop(key) for key in ("time", "level", "message") if key in event}
    return {**first, **event}
