"""Which files of a table may hold a row with one of some keys, told from their statistics alone.

Owns that question; refuses to know files and logs. Between the least and the greatest key of a batch often lies the
whole table: a few old rows are changed beside many new ones. So it is asked not for two bounds but for intervals: the
range of the table's keys is cut into many, the executors say which of them the batch's keys are in, and a file is a
candidate if one of those touches its own range. That costs one pass that is made anyway, and a list of numbers.

Invariant: a file that holds one of the keys is always among the candidates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Any, Final

from pyspark.sql import Column, Row
from pyspark.sql import functions as f
from pyspark.sql import types as t

from walstream.spark.columns import col, quoted

INTERVALS_PER_FILE: Final = 16
INTERVALS_MAX: Final = 20_000
"""What the driver takes of a batch at most: so many numbers for each column of the key."""

_SPAN_MAX: Final = 1 << 62
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the log says of a file: the least and greatest values and the nulls of columns that have statistics."""

    path: str
    size: int
    rows: int
    bounds: Mapping[str, tuple[Any, Any]]
    nulls: Mapping[str, int | None]


class Pruning:
    """The files of a table at one version, asked about one batch of keys."""

    def __init__(self, files: Sequence[FileFacts], key: Sequence[str], schema: t.StructType) -> None:
        """Take the files and the columns of the key."""
        self._files = files
        self._columns: list[_Numbers | _Texts] = []
        for name in key:
            kind = schema[name].dataType
            if isinstance(kind, t.StringType):
                self._columns.append(_Texts(name))
            elif (number := _NUMBERS.get(type(kind))) is not None:
                known = [bounds for file in files if (bounds := _numbers(file.bounds.get(name))) is not None]
                if known:
                    count = min(len(files) * INTERVALS_PER_FILE, INTERVALS_MAX)
                    self._columns.append(_Numbers(name, number, known, count))

    @property
    def measures(self) -> dict[str, Column]:
        """What to aggregate over the batch's keys."""
        return {name: measure for column in self._columns for name, measure in column.measures.items()}

    def candidates(self, measured: Row | Mapping[str, Any]) -> list[FileFacts]:
        """Return the files that may hold one of the keys that were measured."""
        tests = [column.test(measured) for column in self._columns]
        return [file for file in self._files if all(test(file) for test in tests)]

    def overlapping(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[FileFacts]:
        """Return the files that may hold a row whose key, a whole number, lies in one of these ranges."""
        found = []
        for file in self._files:
            bounds = _numbers(file.bounds.get(name))
            if bounds is None or any(low <= bounds[1] and bounds[0] <= high for low, high in ranges):
                found.append(file)
        return found


def told(files: Iterable[FileFacts], key: Sequence[str], schema: t.StructType) -> list[FileFacts]:
    """Return files with nothing but what `near` asks: the bounds of a key's columns, where they mean what they say."""
    names = [name for name in key if isinstance(schema[name].dataType, (t.StringType, *_NUMBERS))]
    return [replace(file, bounds={name: file.bounds[name] for name in names if name in file.bounds}) for file in files]


def near(files: Iterable[FileFacts], values: Mapping[str, Collection[Any]]) -> list[FileFacts]:
    """Return the files that may hold one of some keys, of which the values of each column are known: times as numbers.

    For few keys: it looks at each value, not at intervals.
    """
    ordered = {name: sorted(among) for name, among in values.items()}
    return [file for file in files if all(_may_hold(file.bounds.get(name), among) for name, among in ordered.items())]


def _may_hold(bounds: tuple[Any, Any] | None, among: Sequence[Any]) -> bool:
    """Whether one of these values, which are in order, lies within bounds."""
    if not among:
        return False
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return True
    low, high = bounds if isinstance(bounds[0], str) else (_number(bounds[0]), _number(bounds[1], is_upper=True))
    at = bisect_left(among, low)
    return at < len(among) and bool(among[at] <= high)


class _Numbers:
    """A column whose values are whole numbers, or are stored as such."""

    def __init__(self, name: str, number: str, known: list[tuple[int, int]], count: int) -> None:
        self._name = name
        self._number = number
        low, high = min(low for low, _ in known), max(high for _, high in known)
        # Powers of two, and multiples of them: what Spark compiles for a batch stays the same until a table is twice as
        # large. Otherwise it would compile for longer than a small batch takes.
        size = 1 << (high - low).bit_length()
        self._low = low // size * size
        self._high = self._low + 2 * size - 1
        self._width = max(1, 2 * size >> count.bit_length() + 1)

    @property
    def measures(self) -> dict[str, Column]:
        value = self._number.format(quoted(self._name))
        # Where a difference could be too large for a long, decimals do; slower, and hardly ever needed.
        exact = "DECIMAL(38, 0)" if self._high - self._low >= _SPAN_MAX else "BIGINT"
        inside = f"CAST((CAST({value} AS {exact}) - ({self._low})) div {self._width} AS INT)"
        interval = f"CASE WHEN {value} BETWEEN {self._low} AND {self._high} THEN {inside} END"
        return {f"intervals of {self._name}": f.collect_set(f.expr(interval))}

    def test(self, measured: Row | Mapping[str, Any]) -> Any:
        taken = sorted(measured[f"intervals of {self._name}"])

        def may_hold(file: FileFacts) -> bool:
            bounds = _numbers(file.bounds.get(self._name))
            if bounds is None:
                return True
            first, last = ((bound - self._low) // self._width for bound in bounds)
            at = bisect_left(taken, first)
            return at < len(taken) and bool(taken[at] <= last)

        return may_hold


class _Texts:
    """A column of text: only the least and the greatest are known of a batch."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def measures(self) -> dict[str, Column]:
        return {f"least {self._name}": f.min(col(self._name)), f"greatest {self._name}": f.max(col(self._name))}

    def test(self, measured: Row | Mapping[str, Any]) -> Any:
        least, greatest = measured[f"least {self._name}"], measured[f"greatest {self._name}"]

        def may_hold(file: FileFacts) -> bool:
            low, high = file.bounds.get(self._name, (None, None))
            if low is None or high is None:
                return True
            return bool(least is not None and low <= greatest and least <= high)

        return may_hold


_NUMBERS: Final[dict[type[t.DataType], str]] = {
    t.ByteType: "{}",
    t.ShortType: "{}",
    t.IntegerType: "{}",
    t.LongType: "{}",
    t.DateType: "unix_date({})",
    t.TimestampType: "unix_micros({})",
    # The session's zone is UTC.
    t.TimestampNTZType: "unix_micros(CAST({} AS TIMESTAMP))",
}


def _numbers(bounds: tuple[Any, Any] | None) -> tuple[int, int] | None:
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return None
    return _number(bounds[0]), _number(bounds[1], is_upper=True)


def _number(value: Any, *, is_upper: bool = False) -> int:
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        since = moment - _EPOCH
        micros = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
        # Some writers cut the greatest time off at its millisecond.
        return micros + 999 if is_upper else micros
    if isinstance(value, date):
        return (value - _EPOCH.date()).days
    return int(value)
