"""How commands speak: data on stdout, messages on stderr, as tables for people or as JSON for programs.

A command hands over plain dictionaries: raw numbers under names that end in their unit (`size_bytes`, `lag_records`).
JSON prints them as they are, and those names are a promise: they may be joined by others but do not change. Tables show
some of them as columns, with numbers in groups and times in words, and promise nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, Protocol, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from walstream import logs

Row = Mapping[str, Any]


class Format(StrEnum):
    """What `--output` accepts."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, or a line of a description: the key of its value, its title, and how to show it."""

    key: str
    title: str
    kind: Literal["text", "number", "bytes", "time", "state"] = "text"


class Output(Protocol):
    """What a command may say. Both ways of saying it have this interface, so that no command asks which it is."""

    is_for_people: bool

    def rows(self, name: str, rows: Sequence[Row], columns: Sequence[Column], empty: str) -> None:
        """Print a list of things, all of one kind; `empty` is the sentence said when there are none."""

    def item(self, item: Row, columns: Sequence[Column]) -> None:
        """Print one thing; a column whose value is a list of rows is printed by a call of `rows` for people."""

    def done(self, sentence: str, result: Row) -> None:
        """Report an act: a sentence to people (it is no data, so on stderr), its result to programs."""

    def note(self, sentence: str) -> None:
        """Say something beside the data, on stderr. Never fails: a closed terminal must not end what it is about."""


class TableOutput:
    """For people: tables on stdout, sentences on stderr."""

    is_for_people = True

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = console(stdout or sys.stdout)
        self._stderr = console(cast(TextIO, logs.Unfailing(stderr or sys.stderr)))

    def rows(self, name: str, rows: Sequence[Row], columns: Sequence[Column], empty: str) -> None:
        """Print a table with one line per row."""
        del name
        if not rows:
            self.note(empty)
            return
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        for column in columns:
            is_number = column.kind in ("number", "bytes")
            table.add_column(column.title, justify="right" if is_number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(cell(row.get(column.key), column.kind) for column in columns))
        self._print(table)

    def item(self, item: Row, columns: Sequence[Column]) -> None:
        """Print one line per column: its title, its value."""
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for column in columns:
            table.add_row(column.title, cell(item.get(column.key), column.kind))
        self._print(table)

    def done(self, sentence: str, result: Row) -> None:
        """Say the sentence."""
        del result
        self.note(sentence)

    def note(self, sentence: str) -> None:
        """Say the sentence on stderr."""
        self._stderr.print(Text(sentence), soft_wrap=True)

    def _print(self, table: Table) -> None:
        with self._stdout.capture() as capture:
            self._stdout.print(table)
        # Tables fill their last column with spaces, which get in the way of whoever pastes or compares the text.
        for line in capture.get().splitlines():
            print(line.rstrip(), file=self._stdout.file)


class JsonOutput:
    """For programs: one JSON document on stdout; sentences still go to stderr."""

    is_for_people = False

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout
        self._stderr = cast(TextIO, logs.Unfailing(stderr or sys.stderr))

    def rows(self, name: str, rows: Sequence[Row], columns: Sequence[Column], empty: str) -> None:
        """Print an object whose one field, `name`, is the list."""
        del columns, empty
        self._print({name: list(rows)})

    def item(self, item: Row, columns: Sequence[Column]) -> None:
        """Print the object."""
        del columns
        self._print(item)

    def done(self, sentence: str, result: Row) -> None:
        """Print the result."""
        del sentence
        self._print(result)

    def note(self, sentence: str) -> None:
        """Say the sentence on stderr."""
        print(sentence, file=self._stderr)

    def _print(self, document: Row) -> None:
        print(json.dumps(document, ensure_ascii=False, indent=2, default=str), file=self._stdout)


def make(chosen: Format) -> Output:
    """Return the way of speaking that was asked for."""
    return JsonOutput() if chosen is Format.JSON else TableOutput()


def console(stream: TextIO) -> Console:
    """Return a console that never guesses: no highlighting, and off a terminal no wrapping at an imagined width."""
    width = None if stream.isatty() else 100_000
    return Console(file=stream, highlight=False, emoji=False, markup=False, width=width, soft_wrap=False)


_STATE_STYLES = {
    "ok": "green",
    "healthy": "green",
    "stable": "green",
    "running": "green",
    "empty": "yellow",
    "problem": "red",
    "lost": "red",
    "default": "dim",
}


def cell(value: Any, kind: str = "text") -> Text:
    """Show one value to people."""
    if value is None or value == "":
        return Text("-", style="dim")
    match kind:
        case "number":
            return Text(f"{value:,}")
        case "bytes":
            return Text(bytes_in_words(value))
        case "time":
            return Text(time_in_words(value))
        case "state":
            return Text(str(value), style=_STATE_STYLES.get(str(value), "yellow"))
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, Iterable) and not isinstance(value, str):
        return Text(", ".join(str(part) for part in value) or "-")
    return Text(printable(str(value)))


def bytes_in_words(count: int) -> str:
    """Say a number of bytes in the largest unit that leaves a whole part."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def time_in_words(timestamp_ms: int) -> str:
    """Say a moment in the local clock, with its offset from UTC."""
    moment = datetime.fromtimestamp(timestamp_ms / 1000, tz=UTC).astimezone()
    return moment.isoformat(sep=" ", timespec="milliseconds")


def printable(text: str) -> str:
    """Escape control characters: what others wrote must not command this terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\u00ad" else c.encode("unicode_escape").decode() for c in text)


def plural(count: int, noun: str) -> str:
    """Say a count with its noun: `1 record`, `2,000 records`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
