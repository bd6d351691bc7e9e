"""A small batch by one task, without Spark: any history in any batches gives the rows that a dict says."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from integration.support import rounds
from spark.changing import COLUMNS, EPOCH, NAMES, Change, Story, Values, change, ordered
from spark.test_writers import history_of
from walstream.spark.belonging import Belonging
from walstream.spark.columns import Mode, table_schema
from walstream.spark.small import task as tasks
from walstream.spark.small.task import SmallDone, SmallTask, run
from walstream.spark.types import META
from walstream.spark.writers.files import TableFiles
from walstream.spark.writers.pruning import FileFacts

CHANGES = to_arrow_schema(
    t.StructType([*(t.StructField(column.name, column.type) for column in COLUMNS), *META.fields]), timezone="UTC"
)


class Table:
    """A folder with files, and what is committed of them."""

    def __init__(self, root: Path, mode: Mode) -> None:
        self._root = root
        self._mode: Mode = mode
        self._schema = table_schema(mode, COLUMNS)
        self.files: dict[str, FileFacts] = {}
        self.is_there = False

    def task(self, changes: list[Change], **more: Any) -> SmallTask:
        shuffled = random.Random(len(changes)).sample(changes, len(changes))
        rows = pa.Table.from_pylist([{name: one.get(name) for name in CHANGES.names} for one in shuffled], CHANGES)
        task = SmallTask(
            root=str(self._root),
            mode=self._mode,
            key=("id",),
            columns=NAMES,
            schema=to_arrow_schema(self._schema, timezone="UTC"),
            changes=partial(list, rows.to_batches(max_chunksize=7)),
            belonging=Belonging(EPOCH),
            source_epoch=EPOCH,
            applied=None,
            files=tuple(self.files.values()),
            has_rows=self.is_there,
        )
        return replace(task, **more)

    def apply(self, changes: list[Change], **more: Any) -> SmallDone:
        """Have a task do it, and commit what it made."""
        done = run(self.task(changes, **more))
        if done.is_too_much or done.foreign:
            return done
        taken = TableFiles(str(self._root)).take(done.folder, self._schema) if done.folder else []
        kept = {} if done.is_emptied else {name: one for name, one in self.files.items() if name not in done.removed}
        self.files = kept | {file.path: self._facts(file.path, file.size, file.rows) for file in taken}
        self.is_there = True
        return done

    def _facts(self, path: str, size: int, rows: int) -> FileFacts:
        ids = pq.read_table(self._root / path, columns=["id"])["id"].to_pylist()
        return FileFacts(path, size, rows, {"id": (min(ids), max(ids))}, {})

    def rows(self) -> list[Values]:
        found = [pq.read_table(self._root / path) for path in self.files]
        return pa.concat_tables(found).to_pylist() if found else []


def own(rows: list[Values]) -> list[Values]:
    return ordered({name: row[name] for name in NAMES} for row in rows)


@pytest.mark.parametrize("seed", range(rounds(full=300, part=15)))
@pytest.mark.parametrize("keys", [5, 40])
def test_a_mirror_of_any_history(tmp_path: Path, seed: int, keys: int) -> None:
    dice = random.Random(f"{seed} {keys}")
    story, table = Story(), Table(tmp_path, "mirror")
    story.play(dice, 150, truncates=0.02, keys=keys)
    ends = [*sorted(dice.sample(sorted(story.states)[1:-1], 8)), max(story.states)]
    after = 0
    for upto in ends:
        # What the table has already comes again now and then, and is told to be left out.
        again = dice.choice([after, 0])
        table.apply(story.between(again, upto), applied=after if again < after else None)
        assert own(table.rows()) == ordered(story.states[upto])
        after = upto


@pytest.mark.parametrize("seed", range(rounds(full=100, part=10)))
def test_a_history_of_any_history(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    story, table = Story(), Table(tmp_path, "history")
    story.play(dice, 120, truncates=0)
    ends = [*sorted(dice.sample(sorted(story.states)[1:-1], 5)), max(story.states)]
    after = 0
    for upto in ends:
        assert not table.apply(story.between(after, upto)).is_too_much
        assert ordered(table.rows()) == ordered(history_of(story, upto))
        after = upto


def test_a_batch_of_deletes_alone_ends_rows_of_a_history(tmp_path: Path) -> None:
    table = Table(tmp_path, "history")
    table.apply([change("c", {"id": 1, "n": 1}, lsn=10, seq=1), change("c", {"id": 2, "n": 2}, lsn=10, seq=2)])
    table.apply([change("d", {"id": 1}, lsn=11, seq=1)])
    assert {row["id"]: row["_valid_to_lsn"] for row in table.rows()} == {1: 11, 2: None}


def test_an_older_state_of_a_row_replaces_nothing(tmp_path: Path) -> None:
    table = Table(tmp_path, "mirror")
    table.apply([change("c", {"id": 1, "n": 1}, lsn=10, seq=2), change("c", {"id": 2, "n": 2}, lsn=10, seq=3)])
    before = set(table.files)
    done = table.apply([change("u", {"id": 1, "n": 0}, lsn=10, seq=1), change("d", {"id": 2}, lsn=9, seq=9)])
    assert (done.removed, set(table.files)) == ((), before)


def test_only_files_with_its_rows_are_written_anew(tmp_path: Path) -> None:
    table = Table(tmp_path, "mirror")
    for first in range(0, 50, 10):
        table.apply([change("c", {"id": first + n, "n": 0}, lsn=first + 1, seq=n) for n in range(0, 10, 2)])
    assert len(table.files) == 5
    done = table.apply([change("u", {"id": 12, "n": 1}, lsn=99, seq=1), change("d", {"id": 33}, lsn=99, seq=2)])
    # Between the bounds of a file, but not in it: it is looked at, and left alone.
    assert len(done.removed) == 1
    assert len(table.files) == 5


@pytest.mark.parametrize(("limit", "value"), [("LOOKED_ROWS_MAX", 5), ("TOUCHED_BYTES_MAX", 100)])
def test_what_is_more_than_one_task_should_do_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    table = Table(tmp_path, "mirror")
    table.apply([change("c", {"id": n, "n": 0}, lsn=1, seq=n) for n in range(10)])
    monkeypatch.setattr(tasks, limit, value)
    before = sorted(tmp_path.rglob("*.parquet"))
    done = table.apply([change("u", {"id": 3, "n": 1}, lsn=2, seq=1)])
    assert done.is_too_much
    assert sorted(tmp_path.rglob("*.parquet")) == before


def test_a_truncate_in_a_history_is_left_to_spark(tmp_path: Path) -> None:
    table = Table(tmp_path, "history")
    table.apply([change("c", {"id": 1}, lsn=1, seq=1)])
    assert table.apply([change("t", {}, lsn=2, seq=1)]).is_too_much


def test_a_task_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path, "mirror")
    table.apply([change("c", {"id": n, "n": 0}, lsn=1, seq=n) for n in range(3)])

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(tasks._Doing, "_answer", fail)
    before = sorted(tmp_path.rglob("*.parquet"))
    with pytest.raises(OSError, match="the disk is full"):
        table.apply([change("u", {"id": 2, "n": 1}, lsn=2, seq=1)])
    assert sorted(tmp_path.rglob("*.parquet")) == before


def test_rows_of_a_snapshot_that_is_not_asked_for_are_counted_and_left_out(tmp_path: Path) -> None:
    table = Table(tmp_path, "mirror")
    rows = [
        change("r", {"id": 1}, lsn=5, seq=0, snapshot="mine"),
        change("r", {"id": 2}, lsn=5, seq=0, snapshot="other"),
        change("u", {"id": 1, "n": 4}, ["doc"], lsn=6, seq=1),
        change("u", {"id": 1, "n": 3}, lsn=4, seq=1),
    ]
    done = table.apply(rows, belonging=Belonging(EPOCH, "mine", 5))
    assert (done.rows, done.folded) == (4, 1)
    assert [(row["id"], row["n"]) for row in table.rows()] == [(1, 4)]
    foreign = table.apply([change("c", {"id": 9}, lsn=8, seq=1, epoch=2)], belonging=Belonging(2))
    assert foreign.foreign == 1
