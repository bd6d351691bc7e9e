"""Changes of a table for tests of fold and writers, and what the table has to be after them, in plain Python.

`Story` plays transactions on a table that is a dict: inserts, updates that leave large columns out, key changes (chains
and swaps among them), deletes, truncates. It writes down the changes as the data source gives them, and after each
transaction the rows that are there; the versions of every row, for histories, it keeps as they come.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from walstream.spark.belonging import Belonging
from walstream.spark.columns import Mode, TableColumn
from walstream.spark.types import META
from walstream.spark.writers import Applied, TablePlan, Writer

COLUMNS = (
    TableColumn("id", t.LongType(), 1),
    TableColumn("n", t.IntegerType(), 2),
    TableColumn("doc", t.StringType(), 3),
    TableColumn("note", t.StringType(), 4),
)
NAMES = tuple(column.name for column in COLUMNS)
LARGE = ("doc", "note")
START = datetime(2026, 1, 31, 12, tzinfo=UTC)
EPOCH = 1

Values = dict[str, Any]
Change = dict[str, Any]


@dataclass
class Version:
    """A row from when to when it was true."""

    row: Values
    op: str
    lsn: int
    seq: int
    to_lsn: int | None = None
    to_seq: int | None = None


@dataclass
class Story:
    """A table and everything that has happened to it."""

    rows: dict[int, Values] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    states: dict[int, list[Values]] = field(default_factory=lambda: {0: []})
    """The rows after each transaction, by its end LSN."""
    versions: list[Version] = field(default_factory=list)
    lsn: int = 100
    seq: int = 0

    def commit(self) -> int:
        """End a transaction; return its end LSN, before which all of it is."""
        self.lsn += 10
        self.seq = 0
        self.states[self.lsn] = [dict(row) for row in self.rows.values()]
        return self.lsn

    def insert(self, **values: Any) -> None:
        row = {name: values.get(name) for name in NAMES}
        self.rows[row["id"]] = row
        self._open(row, self._change("c", row), "c")

    def snapshot(self, rows: Iterable[Values], name: str) -> None:
        """The rows of a snapshot that was taken at this LSN."""
        for row in rows:
            self.rows[row["id"]] = dict(row)
            self.changes.append(change("r", row, lsn=self.lsn, seq=0, snapshot=name))
            self.versions.append(Version(dict(row), "r", self.lsn, 0))

    def update(self, key: int, unsent: Sequence[str] = (), **values: Any) -> None:
        """Change a row, its key too if that is among the values; large columns that it leaves alone may be unsent."""
        old = self.rows.pop(key)
        row = {**old, **values}
        assert not set(unsent) & set(values), "what was changed was sent"
        sent = {name: value for name, value in row.items() if name not in unsent}
        if row["id"] != key:
            self._close(key, self._change("d", {"id": key}))
            position = self._change("c", sent, unsent)
            op = "c"
        else:
            position = self._change("u", sent, unsent)
            self._close(key, position)
            op = "u"
        self.rows[row["id"]] = row
        self._open(row, position, op)

    def delete(self, key: int) -> None:
        del self.rows[key]
        self._close(key, self._change("d", {"id": key}))

    def truncate(self) -> None:
        position = self._change("t", {})
        for key in list(self.rows):
            self._close(key, position)
        self.rows.clear()

    def play(self, dice: random.Random, operations: int, *, truncates: float = 0.02, keys: int = 12) -> None:
        """Do something at random, in one transaction or several."""
        for _ in range(operations):
            self._play(dice, truncates, keys)
            if dice.random() < 0.4:
                self.commit()
        self.commit()

    def _play(self, dice: random.Random, truncates: float, keys: int) -> None:
        free = [key for key in range(keys) if key not in self.rows]
        what = dice.random()
        if what < truncates:
            self.truncate()
        elif not self.rows or (what < 0.35 and free):
            self.insert(id=dice.choice(free), n=dice.randrange(99), doc=_text(dice), note=_text(dice))
        elif what < 0.45:
            self.delete(dice.choice(list(self.rows)))
        else:
            values: Values = {"n": dice.randrange(99)}
            values |= {name: _text(dice) for name in LARGE if dice.random() < 0.25}
            unsent = [name for name in LARGE if name not in values and dice.random() < 0.7]
            if what < 0.65 and free:
                values["id"] = dice.choice(free)
            self.update(dice.choice(list(self.rows)), unsent, **values)

    def between(self, after: int, upto: int) -> list[Change]:
        """The changes of transactions that end in (after, upto]."""
        return [one for one in self.changes if after <= one["_commit_lsn"] < upto]

    def _change(self, op: str, row: Mapping[str, Any], unsent: Sequence[str] = ()) -> tuple[int, int]:
        self.seq += 1
        self.changes.append(change(op, row, unsent, lsn=self.lsn, seq=self.seq))
        return self.lsn, self.seq

    def _open(self, row: Values, position: tuple[int, int], op: str) -> None:
        self.versions.append(Version(dict(row), op, *position))

    def _close(self, key: int, position: tuple[int, int]) -> None:
        for version in self.versions:
            if version.row["id"] == key and version.to_lsn is None:
                version.to_lsn, version.to_seq = position


def _text(dice: random.Random) -> str | None:
    return None if dice.random() < 0.1 else f"text {dice.randrange(10_000)}"


def moment(lsn: int) -> datetime:
    """When a transaction committed."""
    return START + timedelta(milliseconds=lsn)


def change(
    op: str,
    row: Mapping[str, Any],
    unsent: Sequence[str] = (),
    *,
    lsn: int,
    seq: int,
    snapshot: str | None = None,
    epoch: int = EPOCH,
) -> Change:
    """One change, as the data source gives it."""
    return {
        **row,
        "_op": op,
        "_source_epoch": epoch,
        "_commit_lsn": lsn,
        "_seq": seq,
        "_ts": moment(lsn),
        "_txid": lsn,
        "_snapshot": snapshot,
        "_unchanged": list(unsent),
        "_schema_version": 1,
        "_old_key": None,
    }


def frame(spark: SparkSession, changes: Sequence[Change], columns: Sequence[TableColumn] = COLUMNS) -> DataFrame:
    """The changes as a DataFrame, on a session of their own and in no order."""
    schema = t.StructType([*(t.StructField(column.name, column.type) for column in columns), *META.fields])
    shuffled = list(changes)
    random.Random(len(shuffled)).shuffle(shuffled)
    rows = [tuple(one.get(name) for name in schema.names) for one in shuffled]
    return spark.newSession().createDataFrame(rows, schema)


def plan(path: Path, mode: Mode, end_lsn: int, **more: Any) -> TablePlan:
    """A plan for the table of these stories."""
    values = {"key": ("id",), "columns": COLUMNS, "schema_version": 1, "source_epoch": EPOCH, "prefix": "test"}
    return TablePlan(name="public.things", path=str(path), mode=mode, end_lsn=end_lsn, **{**values, **more})


def ordered(rows: Iterable[Mapping[str, Any]]) -> list[Values]:
    """Rows in an order of their own, to be compared."""
    return sorted((dict(row) for row in rows), key=lambda row: repr(sorted(row.items(), key=lambda pair: pair[0])))


class SmallFirst:
    """A writer that does every batch by one task, if it can be done so; what else is asked of it another one does."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.left_to_spark = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def apply(self, plan: TablePlan, changes: DataFrame) -> Applied:
        # A condition that names no epoch lets in those of another one, of which the stories have number 7.
        epoch = 7 if plan.where == "_snapshot IS NULL" else plan.source_epoch
        # What a task is given must be known in its process: so nothing of the tests.
        given = partial(list, changes.toArrow().to_batches())
        done = self._writer.apply_small(plan, given, Belonging(epoch, plan.snapshot))
        if done is None:
            self.left_to_spark += 1
            return self._writer.apply(plan, changes)
        return done
