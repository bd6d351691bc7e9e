"""Rows straight from the log into files: the same table as through Spark, and only where every row is new."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from spark.conftest import Captured, MakeCaptured
from walstream.errors import RowsMissing, ValueUnrepresentable
from walstream.positions import ZERO
from walstream.spark.batches import Step, TableStep
from walstream.spark.changes import Changes
from walstream.spark.columns import Mode
from walstream.spark.destination import Reader, Work, belonging, columns_of
from walstream.spark.failures import meaning
from walstream.spark.fetching import Address
from walstream.spark.kept_tables import KeptTable
from walstream.spark.versions import read_versions
from walstream.spark.writers import Applied, TablePlan, batch, open_writer
from walstream.spark.writers.embedded import EmbeddedTarget
from walstream.spark.writers.files import TableFiles

TYPES = """
create table things (id bigint primary key, small smallint, n int, price numeric(12, 2), large numeric(30, 5),
    real float4, double float8, is_so boolean, note text, data bytea, day date, at timestamptz, local timestamp,
    numbers int[], names text[], doc jsonb)
"""
INSERT = """
insert into things select n, n % 100, n, n * 0.25, -n * 1e20, n / 3.0, n / 7.0, n % 2 = 0, 'note "' || n || E'\\n',
    decode(lpad(to_hex(n), 8, '0'), 'hex'), date '0101-01-01' + n,
    timestamptz '1500-02-03 04:05:06.789012+00' + n * interval '1 day',
    timestamp '2026-01-02 03:04:05' + n * interval '1 second', array[n, null, -n], array['a', null, n::text],
    jsonb_build_object('n', n) from generate_series({0}, {1}) n;
insert into things (id) values ({2})
"""


class Straight:
    """A table that is written to from the log, and how each batch came into it."""

    def __init__(self, captured: Captured, path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode = "mirror") -> None:
        self.captured = captured
        self.path = path
        self.mode = mode
        self._writer = open_writer("deltalake", captured.spark)
        self._after = captured.log.last()
        self.taken: list[bool] = []
        take = EmbeddedTarget.take

        def noted(target: EmbeddedTarget, *arguments: Any) -> Any:
            written = take(target, *arguments)
            self.taken.append(written is not None)
            return written

        monkeypatch.setattr(EmbeddedTarget, "take", noted)
        monkeypatch.setattr(batch, "LARGE_ROWS", 1)

    def apply(self, rows: int, *, is_straight: bool = True, **more: Any) -> Applied:
        """Write what has come into the log since the last call."""
        self.captured.wait()
        last, after = self.captured.log.last(), self._after
        assert last is not None
        assert after is not None
        done = self.write(after.offset, rows, is_straight=is_straight, **more)
        self._after = last
        return done

    def write(
        self, after: int, rows: int, *, is_straight: bool = True, path: Path | None = None, **more: Any
    ) -> Applied:
        """Write the changes after a point."""
        last = self.captured.log.last()
        assert last is not None
        address = Address(self.captured.node.address, {})
        version = read_versions(address, self.captured.prefix).newest("public", "things")
        table = KeptTable("public.things", self.mode, (), version, True)
        step = Step(last.source_epoch, after, last.offset, last.end_lsn, 0, rows, (), is_cut=True)
        work = Work(step, TableStep("public.things", ZERO, after, rows), after, rows)
        changes = Reader(self.captured.spark, self.captured.options).changes(work, table)
        plan: dict[str, Any] = {
            "name": "public.things",
            "path": str(path or self.path),
            "mode": self.mode,
            "key": version.key,
            "columns": columns_of(table),
            "schema_version": 1,
            "prefix": "test",
            "source_epoch": last.source_epoch,
            "end_lsn": int(last.end_lsn),
            "rows_due": rows,
            "where": belonging(work).sql,
        }
        return self._writer.apply(TablePlan(**{**plan, **more}), changes if is_straight else Changes.of(changes.frame))

    def execute(self, statement: str) -> None:
        self.captured.execute(statement)

    def rows(self, path: Path | None = None, column: str = "id") -> list[dict[str, Any]]:
        found = DeltaTable(str(path or self.path)).to_pyarrow_table().to_pylist()
        return sorted(found, key=lambda row: (row[column], row["_commit_lsn"], row["_seq"]))

    def files(self) -> list[str]:
        """What lies in the table's folder, beside its log."""
        return sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*.parquet"))


def captured_things(make_captured: MakeCaptured, table: str = TYPES) -> Captured:
    captured = make_captured(table, capture__snapshot="never")
    captured.wait()
    return captured


def statistics(path: Path) -> list[Mapping[str, Any]]:
    added = DeltaTable(str(path)).get_add_actions(flatten=False)
    return [
        {name: row[name] for name in ("num_records", "null_count", "min", "max")} for row in pa.table(added).to_pylist()
    ]


def test_the_table_is_the_same_as_through_spark(
    make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = Straight(captured_things(make_captured), tmp_path / "straight", monkeypatch)
    after = things.captured.log.last()
    assert after is not None
    things.execute(INSERT.format(1, 300, 1000))
    done = things.apply(301)
    assert (done.rows_in, done.rows_folded, things.taken) == (301, 301, [True])
    other = tmp_path / "spark"
    things.write(after.offset, 301, is_straight=False, path=other)
    assert things.taken == [True]
    assert things.rows() == things.rows(other)
    assert len(things.rows()) == 301
    assert statistics(things.path) == statistics(other)
    schema = DeltaTable(str(things.path)).schema().to_json()
    assert json.loads(schema) == json.loads(DeltaTable(str(other)).schema().to_json())
    # As Spark reads it: days of another calendar, decimals and arrays among the rest.
    spark: SparkSession = things.captured.spark
    ours, theirs = (spark.read.parquet(*DeltaTable(str(path)).file_uris()) for path in (things.path, other))
    assert ours.dtypes == theirs.dtypes
    assert ours.exceptAll(theirs).isEmpty()
    assert theirs.exceptAll(ours).isEmpty()


def test_only_what_is_new_goes_straight(
    make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_things(make_captured, "create table things (id int primary key, note text)")
    # Deletes are not told, so a key can come twice.
    captured.execute("alter publication walstream set (publish = 'insert, update')")
    things = Straight(captured, tmp_path / "things", monkeypatch)
    things.execute("insert into things values (10, 'a'), (20, 'b')")
    things.apply(2)
    things.execute("insert into things values (30, 'c'), (31, 'd')")
    assert things.apply(2).files_removed == 0
    # Between keys that are there, and not in order: other ways to prove it.
    things.execute("insert into things values (25, 'e'), (15, 'f')")
    assert things.apply(2).files_removed == 0
    assert things.taken == [True, True, True]
    things.execute("delete from things where id = 31; insert into things values (31, 'again')")
    things.apply(1)
    assert things.taken == [True, True, True, False], "a key that is there is merged"
    things.execute("insert into things values (40, 'g'); delete from things where id = 40")
    things.execute("insert into things values (40, 'h')")
    things.apply(2)
    assert things.taken == [True, True, True, False, False], "so is one that comes twice"
    things.execute("insert into things values (50, 'i'); update things set note = 'j' where id = 10")
    things.apply(2)
    assert things.taken == [True, True, True, False, False], "and with an update nothing is taken"
    found = {row["id"]: row["note"] for row in things.rows()}
    assert found == {10: "j", 15: "f", 20: "b", 25: "e", 30: "c", 31: "again", 40: "h", 50: "i"}
    assert len(things.rows()) == len(found)
    kept = {uri for number in range(6) for uri in DeltaTable(str(things.path), version=number).file_uris()}
    assert {file.rpartition("/")[2] for file in things.files()} == {uri.rpartition("/")[2] for uri in kept}


def test_keys_of_text_and_of_several_columns(
    make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = "create table things (part int, id text, note text, primary key (part, id))"
    things = Straight(captured_things(make_captured, table), tmp_path / "things", monkeypatch)
    things.execute("insert into things values (1, 'a', 'x'), (1, 'b', 'y'), (2, 'a', 'z')")
    things.apply(3)
    things.execute("insert into things values (1, 'aa', 'v')")
    things.apply(1)
    assert things.taken == [True, True]
    assert [(row["part"], row["id"]) for row in things.rows()] == [(1, "a"), (2, "a"), (1, "aa"), (1, "b")]


def test_every_change_is_appended(make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_things(make_captured, "create table things (id int primary key, note text)")
    things = Straight(captured, tmp_path / "things", monkeypatch, mode="append")
    after = captured.log.last()
    assert after is not None
    things.execute("insert into things values (1, 'a'), (2, 'b'); update things set id = 3 where id = 2")
    things.apply(4)
    things.execute("truncate things; insert into things values (1, 'c')")
    things.apply(2)
    assert things.taken == [True, True]
    other = tmp_path / "spark"
    things.write(after.offset, 6, is_straight=False, path=other)
    assert things.rows(column="_op") == things.rows(other, column="_op")
    assert [row["_op"] for row in things.rows(column="_seq")].count("c") == 4


def test_nothing_is_committed_when_rows_are_missing(
    make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_things(make_captured, "create table things (id int primary key, note text)")
    things = Straight(captured, tmp_path / "things", monkeypatch)
    things.execute("insert into things values (1, 'a'), (2, 'b')")
    with pytest.raises(RowsMissing, match=r"2 changes of public\.things were read"):
        things.apply(3)
    assert things.files() == []
    things.apply(2)
    assert len(things.rows()) == 2


def test_a_value_that_no_type_holds_is_told(
    make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_things(make_captured, "create table things (id int primary key, at timestamptz)")
    things = Straight(captured, tmp_path / "things", monkeypatch)
    things.execute("insert into things values (1, 'infinity')")
    with pytest.raises(Exception, match="infinity") as failed:
        things.apply(1)
    told = meaning(failed.value)
    assert type(told) is ValueUnrepresentable
    assert told.message.startswith("public.things: the column at holds infinity")
    assert things.files() == []


def test_what_the_table_holds_is_left_out(
    make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_things(make_captured, "create table things (id int primary key, note text)")
    things = Straight(captured, tmp_path / "things", monkeypatch)
    after = captured.log.last()
    assert after is not None
    things.execute("insert into things values (1, 'a'), (2, 'b')")
    things.apply(2)
    things.execute("insert into things values (3, 'c')")
    captured.wait()
    # As after a lost checkpoint: a batch that begins before what the table holds.
    done = things.write(after.offset, 3)
    assert (done.rows_in, done.rows_folded, things.taken) == (3, 1, [True, True])
    assert [row["id"] for row in things.rows()] == [1, 2, 3]
    assert things.write(after.offset, 3).is_replay


def test_a_file_that_no_task_has_told_is_not_taken(tmp_path: Path) -> None:
    files = TableFiles(str(tmp_path))
    folder = files.new_folder()
    (tmp_path / folder).mkdir(parents=True)
    for name in ("told.parquet", "of another attempt.parquet"):
        pq.write_table(pa.table({"id": [1]}), tmp_path / folder / name)
    taken = files.take(folder, t.StructType([t.StructField("id", t.LongType())]), {"told.parquet"})
    assert [file.path for file in taken] == ["told.parquet"]
    assert [file.name for file in tmp_path.rglob("*.parquet")] == ["told.parquet"]


def test_a_task_that_meets_an_old_row_leaves_nothing(
    make_captured: MakeCaptured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_things(make_captured, "create table things (id int primary key, note text)")
    things = Straight(captured, tmp_path / "things", monkeypatch)
    things.execute("insert into things select n, 'a' from generate_series(1, 5000) n")
    things.execute("update things set note = 'b' where id = 5000")
    things.apply(5001)
    assert things.taken == []
    assert len(things.rows()) == 5000
    assert {file.rpartition("/")[2] for file in things.files()} == {
        uri.rpartition("/")[2] for uri in DeltaTable(str(things.path)).file_uris()
    }
