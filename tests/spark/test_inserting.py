"""Batches of rows that are all new are written as they come, and only those: what else a batch may be, it is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark.changing import Change, Values, change, frame, plan
from walstream.spark.writers import Applied, batch, open_writer
from walstream.spark.writers.embedded import EmbeddedTarget


class Table:
    """A mirrored table, and how its batches were written."""

    def __init__(self, spark: SparkSession, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spark = spark
        self._path = path
        self._writer = open_writer("deltalake", spark)
        self._lsn = 100
        self.tried: list[bool] = []
        insert = EmbeddedTarget.insert

        def noted(target: EmbeddedTarget, *arguments: Any) -> Any:
            written = insert(target, *arguments)
            self.tried.append(written is not None)
            return written

        monkeypatch.setattr(EmbeddedTarget, "insert", noted)

    def apply(self, *changes: tuple[str, int, str]) -> Applied:
        """Apply changes, each (operation, id, note), of one transaction."""
        self._lsn += 10
        made = [_change(op, number, note, self._lsn, seq) for seq, (op, number, note) in enumerate(changes, 1)]
        due = plan(self._path, "mirror", self._lsn + 5, rows_due=len(made), begin_lsn=self._lsn)
        return self._writer.apply(due, frame(self._spark, made))

    def rows(self) -> dict[int, str]:
        found = DeltaTable(str(self._path)).to_pyarrow_table().to_pylist()
        notes = {row["id"]: row["note"] for row in found}
        assert len(notes) == len(found), "a key is twice in the table"
        return notes

    def files(self) -> set[str]:
        """The files that lie in the table's folder, committed or not."""
        return {file.name for file in self._path.glob("*.parquet")}

    def committed(self) -> set[str]:
        return {uri.rpartition("/")[2] for uri in DeltaTable(str(self._path)).file_uris()}


def _change(op: str, number: int, note: str, lsn: int, seq: int) -> Change:
    row: Values = {"id": number, "n": None, "doc": None, "note": note}
    return change(op, row, lsn=lsn, seq=seq)


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(spark, tmp_path / "things", monkeypatch)


def test_new_rows_are_written_as_they_come(table: Table) -> None:
    table.apply(("c", 1, "a"), ("c", 2, "b"))
    assert table.tried == [], "nothing is known of a table before its first batch, and a small one is not looked at"
    done = table.apply(("c", 3, "c"), ("c", 4, "d"))
    assert (done.rows_in, done.rows_folded, done.files_removed, table.tried) == (2, 2, 0, [True])
    assert table.rows() == {1: "a", 2: "b", 3: "c", 4: "d"}


def test_a_large_first_batch_is_looked_at(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "LARGE_ROWS", 2)
    table.apply(("c", 1, "a"), ("c", 2, "b"))
    assert table.tried == [True]
    assert table.rows() == {1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ([("c", 3, "c"), ("u", 1, "changed")], {1: "changed", 2: "b", 3: "c"}),
        ([("c", 3, "c"), ("d", 2, "")], {1: "a", 3: "c"}),
        # A publication of inserts alone does not tell that the row was deleted in between.
        ([("c", 3, "first"), ("c", 3, "second")], {1: "a", 2: "b", 3: "second"}),
        ([("c", 3, "c"), ("c", 1, "again")], {1: "again", 2: "b", 3: "c"}),
        ([("t", 0, ""), ("c", 9, "after")], {9: "after"}),
    ],
    ids=["an update", "a delete", "a key twice", "a key that is there", "a truncate"],
)
def test_a_batch_that_is_not_what_was_expected_is_merged(
    table: Table, changes: list[tuple[str, int, str]], due: dict[int, str]
) -> None:
    table.apply(("c", 1, "a"), ("c", 2, "b"))
    table.apply(*changes)
    assert table.tried == [False]
    assert table.rows() == due
    assert table.committed() <= table.files()
    # What was written in vain is gone: only files of this version and of the one before are there.
    before = DeltaTable(str(table._path), version=0).file_uris()
    assert table.files() == table.committed() | {uri.rpartition("/")[2] for uri in before}


def test_what_a_table_does_is_learnt(table: Table) -> None:
    table.apply(("c", 1, "a"))
    table.apply(("u", 1, "b"))
    assert table.tried == [False]
    table.apply(("u", 1, "c"))
    assert table.tried == [False], "after updates, updates are expected"
    table.apply(("c", 2, "d"))
    table.apply(("c", 3, "e"))
    assert table.tried == [False, True]
    assert table.rows() == {1: "c", 2: "d", 3: "e"}
