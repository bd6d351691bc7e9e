"""The options of `format("walstream")`: what they are called, what they may be, what they mean together.

Owns their reading; refuses to know the log. Names are compared without regard to case, as Spark hands them on, and an
option that nobody knows is an error: a misspelt one would otherwise read something else in silence. Sans-IO.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, TypeAlias, TypeVar

from walstream.errors import UsageError
from walstream.positions import Lsn

T = TypeVar("T")

KAFKA: Final = "kafka."
"""What begins with it goes to librdkafka without it: `kafka.security.protocol`, `kafka.sasl.username`, …"""

ROWS_PER_TASK: Final = 250_000
FROM_THE_BEGINNING: Final = -1
"""The `after` of everything: no point lies at that offset."""

_OURS: Final = frozenset({"bootstrap.servers", "group.id", "enable.auto.commit", "auto.offset.reset"})
"""Settings of librdkafka that the source depends on."""


@dataclass(frozen=True, slots=True)
class Earliest:
    """From the first commit point whose rows are all still there."""


@dataclass(frozen=True, slots=True)
class Latest:
    """From the last commit point."""


Place: TypeAlias = Earliest | Latest | Lsn | datetime
"""Where reading begins or ends, in words of the source."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a reader was asked for."""

    bootstrap: str
    """Addresses of the log."""
    prefix: str = "walstream"
    """Of the capture's topics."""
    table: tuple[str, str] | None = None
    """Schema and table; None: commit points."""
    tables: tuple[tuple[str, str], ...] = ()
    """Of commit points: the tables to count; empty: all."""
    columns: tuple[str, ...] | None = None
    """The columns of the table that are wanted; None: all."""
    strings: tuple[str, ...] = ()
    """Columns that are strings whatever their type is; `*`: all of them."""
    schema_version: int | None = None
    """The version of the table that types its columns; None: the newest."""
    starting: Place = field(default_factory=Earliest)
    ending: Place = field(default_factory=Latest)
    after: int | None = None
    """Of a batch: the offset of the commit point after which it begins."""
    upto: int | None = None
    """Of a batch: the offset of the commit point with which it ends."""
    rows_per_trigger: int | None = None
    bytes_per_trigger: int | None = None
    rows_per_task: int = ROWS_PER_TASK
    counted: bool = True
    """Whether rows of a point that several tasks share are counted by one more."""
    kafka: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Options:
        """Read them. Raises UsageError."""
        values = {name.lower(): value for name, value in given.items()}
        kafka = {name.removeprefix(KAFKA): values.pop(name) for name in list(values) if name.startswith(KAFKA)}
        if taken := sorted(_OURS & kafka.keys()):
            raise UsageError(f"The option {KAFKA}{taken[0]} is not yours to set.", "The source has its own.")
        if unknown := sorted(values.keys() - _READERS.keys()):
            raise UsageError(
                f"format('walstream') has no option {', '.join(map(repr, unknown))}.",
                f"It has {', '.join(sorted(name for name, _ in _READERS.values()))} and {KAFKA}*.",
            )
        if not values.get("bootstrap"):
            raise UsageError("The option bootstrap is missing.", "Give the log's address, for example 127.0.0.1:9092.")
        read = {field_name: _read(name, reader, values) for name, (field_name, reader) in _fields(values)}
        options = cls(kafka=kafka, **read)  # type: ignore[arg-type]
        options._check(values)
        return options

    def _check(self, values: Mapping[str, str]) -> None:
        if self.table is None:
            for name in ("columns", "strings", "schema_version"):
                if name in values:
                    raise UsageError(f"The option {name} is for a table.", "Give the option table too.")
        elif self.tables:
            raise UsageError("The options table and tables exclude each other.", "tables is for commit points.")
        for given, other in (("after", "starting"), ("upto", "ending")):
            if given in values and other in values:
                raise UsageError(f"The options {given} and {other} exclude each other.")


def parse_table(text: str) -> tuple[str, str]:
    """Read `schema.table`: the table is all after the first dot; `"a.b".table` for a schema with a dot in its name.

    Raises UsageError.
    """
    match = _TABLE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a table.", "Write schema.table, for example public.orders.")
    quoted, plain, table = match.groups()
    return quoted.replace('""', '"') if quoted is not None else plain, table


def parse_place(text: str) -> Place:
    """Read `earliest`, `latest`, a commit LSN or a time. Raises UsageError."""
    if text.lower() in ("earliest", "latest"):
        return Earliest() if text.lower() == "earliest" else Latest()
    if "/" in text:
        return Lsn.parse(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is no place in the log.",
            "Write earliest, latest, a commit LSN (16/B374D848) or a time (2026-01-31T12:00:00Z).",
        ) from None
    # A time without a zone is UTC, as everything in the log is.
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def parse_names(text: str) -> tuple[str, ...]:
    """Read names with commas between; one with a comma or a space at its ends is written in double quotes."""
    names = [
        match[1].replace('""', '"') if match[1] is not None else match[2].strip() for match in _NAME.finditer(text)
    ]
    if not all(names):
        raise UsageError(f"{text!r} is no list of names.", "Write them with commas between.")
    return tuple(names)


_TABLE: Final = re.compile(r'(?:"((?:[^"]|"")+)"|([^".][^.]*))\.(.+)', re.DOTALL)
_NAME: Final = re.compile(r'(?:^|,)\s*(?:"((?:[^"]|"")*)"\s*(?=,|$)|([^,]*))', re.DOTALL)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text) or not int(text):
        raise UsageError(f"{text!r} is not a number above 0.")
    return int(text)


def _offset(text: str) -> int:
    if not re.fullmatch(r"-1|\d{1,18}", text):
        raise UsageError(f"{text!r} is no offset of the commits topic.", "Write a number; -1 means the beginning.")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{text!r} is neither true nor false.")
    return text.lower() == "true"


def _tables(text: str) -> tuple[tuple[str, str], ...]:
    # A table's name may be quoted in its schema only, so a comma always separates.
    return tuple(parse_table(name.strip()) for name in text.split(","))


_Reader: TypeAlias = tuple[str, Callable[[str], object]]

_NAMED: Final[Mapping[str, Callable[[str], object]]] = {
    "bootstrap": str,
    "prefix": str,
    "table": parse_table,
    "tables": _tables,
    "columns": parse_names,
    "strings": parse_names,
    "schema_version": _count,
    "starting": parse_place,
    "ending": parse_place,
    "after": _offset,
    "upto": _offset,
    "maxRowsPerTrigger": _count,
    "maxBytesPerTrigger": _count,
    "rowsPerTask": _count,
    "counted": _flag,
}
_READERS: Final[Mapping[str, _Reader]] = {name.lower(): (name, reader) for name, reader in _NAMED.items()}
_FIELDS: Final = {
    "maxrowspertrigger": "rows_per_trigger",
    "maxbytespertrigger": "bytes_per_trigger",
    "rowspertask": "rows_per_task",
}


def _fields(values: Mapping[str, str]) -> list[tuple[str, _Reader]]:
    return [(name, (_FIELDS.get(name, name), _READERS[name][1])) for name in values]


def _read(name: str, reader: Callable[[str], T], values: Mapping[str, str]) -> T:
    try:
        return reader(values[name])
    except UsageError as error:
        raise UsageError(f"The option {_READERS[name][0]}: {error.message}", error.hint) from None
