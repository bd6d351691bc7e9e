"""The changes of a small batch, played in their order: what each row has become, and where its values were told.

Owns which change of a row is the last and where the values are that it does not tell; refuses to know where rows are
kept. What it says is what fold.py, moves.py and history.py say with Spark; here a batch is small enough to be walked
through, and then chains of key changes, swaps and truncates need no care of their own. Sans-IO.

A value that a change does not tell was told by an earlier change of the batch, named by its number, or is in the row
that the table had before the batch, named by its key; or nobody knows it, and it is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from walstream.spark.columns import POSITION

Key: TypeAlias = tuple[Any, ...]


class Home(NamedTuple):
    """The row that the table had under a key before the batch."""

    key: Key


Source: TypeAlias = int | Home | None
"""Where a value is: in the change with this number, in the table, nowhere."""

_NOTHING: Final[Mapping[str, Source]] = {}


class Row(NamedTuple):
    """A row after a change: the change's number, and where the values are that it does not tell."""

    number: int
    is_there: bool
    untold: Mapping[str, Source] = _NOTHING

    def source(self, name: str) -> Source:
        """Return where a value of the row is."""
        return self.untold.get(name, self.number)


@dataclass(slots=True)
class Version:
    """A row from one change up to another, if there is one."""

    key: Key
    row: Row
    until: int | None = None


@dataclass(slots=True)
class Folded:
    """What a batch has made of the rows that it touches."""

    rows: dict[Key, Row] = field(default_factory=dict)
    """By key: their last state; of those before a truncate nothing is left."""
    is_emptied: bool = False
    """Whether there was a truncate: no row of before is left."""
    versions: list[Version] = field(default_factory=list)
    """Of histories: every state of every row."""
    firsts: dict[Key, int] = field(default_factory=dict)
    """Of histories: the change at which each row of the table ends, if there is one."""

    @property
    def homes(self) -> set[str]:
        """The columns that some row lacks and the table may have."""
        rows = [*self.rows.values(), *(version.row for version in self.versions)]
        return {name for row in rows for name, source in row.untold.items() if isinstance(source, Home)}


def fold(changes: pa.Table, keys: Sequence[Key], *, has_versions: bool = False) -> Folded:
    """Play changes that are in the order of their positions; `keys` are their keys."""
    folded = Folded()
    open_versions: dict[Key, Version] = {}
    unchanged = changes.column("_unchanged").to_pylist()
    ended: Row | Home | None = None
    """What the change before has ended, if it was a delete: the first half of a key change, perhaps."""
    for number, op in enumerate(changes.column("_op").to_pylist()):
        if op == "t":
            folded.rows.clear()
            folded.is_emptied = True
            ended = None
            for version in open_versions.values():
                version.until = number
            open_versions.clear()
            continue
        key, unsent = keys[number], unchanged[number]
        before: Row | Home | None = folded.rows.get(key)
        if before is None and not folded.is_emptied:
            before = Home(key)
        if op == "d":
            row = Row(number, False)
        elif not unsent:
            row = Row(number, True)
        else:
            row = Row(number, True, {name: _source(ended if op == "c" else before, name) for name in unsent})
        ended = before if op == "d" else None
        folded.rows[key] = row
        if has_versions:
            folded.firsts.setdefault(key, number)
            if (last := open_versions.pop(key, None)) is not None:
                last.until = number
            if row.is_there:
                open_versions[key] = Version(key, row)
                folded.versions.append(open_versions[key])
    return folded


def _source(row: Row | Home | None, name: str) -> Source:
    """Return where a value is that belongs to the row of before."""
    if isinstance(row, Row):
        return row.source(name) if row.is_there else None
    return row


def in_order(changes: pa.Table) -> pa.Table:
    """Return changes in the order of their positions."""
    order = pc.sort_indices(changes, sort_keys=[(name, "ascending") for name in POSITION])
    return changes.take(order).combine_chunks()


def keys_of(rows: pa.Table, key: Sequence[str]) -> list[Key]:
    """Return the keys of rows as Python has them, equal where PostgreSQL has them equal."""
    return list(zip(*(comparable(rows.column(name)).to_pylist() for name in key), strict=True))


def comparable(column: Any) -> Any:
    """Return a column of a key as values that Python can compare: times as numbers, for not every year is a date."""
    kind = column.type
    if pa.types.is_date32(kind):
        return column.cast(pa.int32())
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64())
    return column


def composed(
    changes: pa.Table, rows: Sequence[Row], names: Sequence[str], there: pa.Table, at: Mapping[Key, int]
) -> dict[str, Any]:
    """Return columns of rows, each value from where it is; `there` are rows of the table, `at` their numbers by key."""
    columns: dict[str, Any] = {}
    numbers = [row.number for row in rows]
    partial = [(at_row, row) for at_row, row in enumerate(rows) if row.untold]
    lacking = {name for _, row in partial for name in row.untold}
    for name in names:
        column = changes.column(name)
        if name not in lacking:
            columns[name] = column.take(pa.array(numbers, pa.int64()))
            continue
        chosen: list[int | None] = list(numbers)
        for at_row, row in partial:
            source = row.source(name)
            if isinstance(source, Home):
                number = at.get(source.key)
                chosen[at_row] = None if number is None else changes.num_rows + number
            else:
                chosen[at_row] = source
        if there.num_rows and name in there.column_names:
            column = pa.chunked_array([*column.chunks, *there.column(name).cast(column.type).chunks], column.type)
        columns[name] = column.take(pa.array(chosen, pa.int64()))
    return columns
