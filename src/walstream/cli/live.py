"""A terminal with something that moves at its bottom: the log goes through here, and its lines appear above it.

Owns the terminal while it is open; refuses to know what is drawn. A stream like any other to whoever writes into it, so
that a line of the log never ends up in the middle of what moves.
"""

from __future__ import annotations

import io
import threading
from typing import Self, TextIO, cast

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from walstream import logs
from walstream.cli.output import console


class LiveStream(io.StringIO):
    """A stream for the log, with something that is drawn anew below what was written to it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        # The terminal may be closed: then what is drawn is lost, not the work that it is drawn for.
        self._console = console(cast(TextIO, logs.Unfailing(stream)))
        self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
        self._lock = threading.RLock()
        self._begun = ""

    @property
    def stream(self) -> TextIO:
        """Where the log is to go: here."""
        return self

    def isatty(self) -> bool:
        """Say that there are people here."""
        return True

    def write(self, text: str) -> int:
        """Print whole lines above what moves."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._console.print(Text.from_ansi(line), soft_wrap=True)
        return len(text)

    def draw(self, drawn: RenderableType) -> None:
        """Draw what moves anew."""
        with self._lock:
            self._live.update(drawn, refresh=True)

    def leave(self, sentence: str) -> None:
        """Leave the terminal as it was: the process ends now."""
        self._console.show_cursor(True)
        self._console.print(f"\n{sentence}")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self.write("\n")
        self._live.stop()
