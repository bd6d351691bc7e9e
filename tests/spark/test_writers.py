"""Both writers against a model: any history, cut into any batches, replayed in any way, ends in the same tables."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from integration.support import rounds
from spark import jars
from spark.changing import COLUMNS, EPOCH, LARGE, NAMES, SmallFirst, Story, Values, change, frame, moment, ordered, plan
from walstream.errors import CorruptCommits, KeyMissing, RowsMissing, TableConflict, TableUnfit, UsageError
from walstream.spark.columns import TableColumn
from walstream.spark.small.task import LITTER_FILES
from walstream.spark.writers import Applied, Writer, open_writer
from walstream.spark.writers.applying import TableWriter
from walstream.spark.writers.files import TableFiles

WRITERS = ("deltalake", "delta-spark")
WAYS = (*WRITERS, "small")
"""`small` is `deltalake` with batches that one task does."""


@pytest.fixture(params=WAYS)
def writer(request: pytest.FixtureRequest, spark: SparkSession) -> Writer:
    return opened(request.param, spark)


def opened(name: str, spark: SparkSession) -> Writer:
    if name == "delta-spark":
        jars.required()
    if name == "small":
        return SmallFirst(open_writer("deltalake", spark))
    return open_writer(name, spark)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "public" / "things"


def read(path: Path, version: int | None = None) -> list[Values]:
    """The rows of a table, read by neither Spark nor the writer."""
    return DeltaTable(str(path), version=version).to_pyarrow_table().to_pylist()


def own(rows: list[Values]) -> list[Values]:
    return ordered({name: row[name] for name in NAMES} for row in rows)


class Pipeline:
    """Applies batches of a story to a table, as a pipeline would."""

    def __init__(self, spark: SparkSession, writer: Writer, path: Path, mode: Any, story: Story) -> None:
        self.spark, self.writer, self.path, self.mode, self.story = spark, writer, path, mode, story

    def apply(self, after: int, upto: int, **more: Any) -> Applied:
        changes = self.story.between(after, upto)
        return self.apply_changes(changes, upto, **more)

    def apply_changes(self, changes: list[Any], upto: int, **more: Any) -> Applied:
        due = {"rows_due": len(changes), **more}
        return self.writer.apply(plan(self.path, self.mode, upto, **due), frame(self.spark, changes))

    def check(self, upto: int) -> None:
        """Compare the table with what it has to be at an end LSN."""
        rows = read(self.path)
        story = self.story
        if self.mode == "mirror":
            assert own(rows) == ordered(story.states[upto])
            assert all(row["_source_epoch"] == EPOCH and row["_commit_lsn"] < upto for row in rows)
        elif self.mode == "append":
            due = story.between(0, upto)
            names = (*NAMES, "_op", "_source_epoch", "_commit_lsn", "_seq", "_ts", "_txid", "_snapshot", "_unchanged")
            assert ordered({name: row[name] for name in names} for row in rows) == ordered(
                {name: one.get(name) for name in names} for one in due
            )
        else:
            assert ordered(rows) == ordered(history_of(story, upto))


def history_of(story: Story, upto: int) -> list[Values]:
    return [
        {
            **version.row,
            "_source_epoch": EPOCH,
            "_valid_from_lsn": version.lsn,
            "_valid_from_seq": version.seq,
            "_valid_to_lsn": ended if (ended := version.to_lsn) is not None and ended < upto else None,
            "_valid_to_seq": version.to_seq if ended is not None and ended < upto else None,
            "_valid_from": moment(version.lsn),
            "_valid_to": moment(ended) if ended is not None and ended < upto else None,
            "_op": version.op,
        }
        for version in story.versions
        if version.lsn < upto
    ]


MakePipeline = Callable[..., Pipeline]


@pytest.fixture
def make(spark: SparkSession, writer: Writer, path: Path) -> MakePipeline:
    return lambda mode, story: Pipeline(spark, writer, path, mode, story)


@pytest.mark.parametrize("seed", range(rounds(full=10, part=1)))
@pytest.mark.parametrize("mode", ["mirror", "history", "append"])
def test_any_history_in_any_batches_with_replays(make: MakePipeline, mode: str, seed: int) -> None:
    dice = random.Random(f"{mode} {seed}")
    story = Story()
    story.play(dice, 120, truncates=0.03)
    pipeline = make(mode, story)
    ends = [*sorted(dice.sample(sorted(story.states)[1:-1], 4)), max(story.states)]
    done: list[tuple[int, int]] = []
    after = 0
    for upto in ends:
        result = pipeline.apply(after, upto)
        assert (result.applied_lsn, result.is_replay) == (upto, False)
        assert result.rows_in == len(story.between(after, upto))
        pipeline.check(upto)
        done.append((after, upto))
        # What was done is done again, by itself and together with what is not done yet, as after a lost checkpoint.
        old = dice.choice(done)
        again = pipeline.apply(*old)
        assert (again.is_replay, again.applied_lsn, again.version) == (True, upto, result.version)
        after = dice.choice([upto, old[0]])
    pipeline.check(ends[-1])
    assert pipeline.writer.applied(plan(pipeline.path, "mirror", 0)) == ends[-1]
    assert DeltaTable(str(pipeline.path)).version() == len(ends) - 1, "one commit for each batch"


def test_writers_take_turns_on_one_table(spark: SparkSession, path: Path) -> None:
    writers = [opened(name, spark) for name in WAYS]
    for mode in ("mirror", "history", "append"):
        story = Story()
        story.play(random.Random(mode), 60, truncates=0.02)
        ends = sorted(random.Random(mode).sample(sorted(story.states)[1:], 4))
        after = 0
        for number, upto in enumerate(ends):
            pipeline = Pipeline(spark, writers[number % 3], path / mode, mode, story)
            pipeline.apply(after, upto)
            pipeline.check(upto)
            after = upto


TYPES = {
    "s": (t.ShortType(), -3),
    "i": (t.IntegerType(), 2**31 - 1),
    "f": (t.FloatType(), 0.5),
    "d": (t.DoubleType(), float("-inf")),
    "x": (t.DecimalType(38, 10), Decimal("12345678901234567890.0123456789")),
    "b": (t.BooleanType(), True),
    "ts": (t.TimestampType(), datetime(1066, 10, 14, 9, 0, 0, 123456, tzinfo=UTC)),
    "ntz": (t.TimestampNTZType(), datetime(9999, 12, 31, 23, 59, 59, 999999)),
    "day": (t.DateType(), date(1, 1, 1)),
    "bin": (t.BinaryType(), b"\x00\xff"),
    "txt": (t.StringType(), "ü" * 40 + "\x00'\"\\ \n😀"),
    "arr": (t.ArrayType(t.IntegerType()), [1, None, 3]),
    "dec": (t.ArrayType(t.DecimalType(9, 2)), [Decimal("1.50")]),
}


@pytest.mark.parametrize("mode", ["mirror", "append"])
def test_every_type_comes_back_as_it_went_in(spark: SparkSession, writer: Writer, path: Path, mode: Any) -> None:
    columns = (TableColumn("id", t.LongType(), 1), *(TableColumn(name, kind) for name, (kind, _) in TYPES.items()))
    values = {name: value for name, (_, value) in TYPES.items()}
    changes = [change("c", {"id": 1, **values}, lsn=5, seq=1), change("c", {"id": 2}, lsn=5, seq=2)]
    for number, end in enumerate((10, 20)):
        changes = [{**one, "_commit_lsn": end - 5, "id": one["id"] + 10 * number} for one in changes]
        writer.apply(plan(path, mode, end, columns=columns), frame(spark, changes, columns))
    rows = {row["id"]: row for row in read(path)}
    assert {name: rows[1][name] for name in values} == values
    assert {name: rows[2][name] for name in values} == dict.fromkeys(values)
    assert rows[12]["_commit_lsn"] == 15
    again = spark.read.format("delta").load(str(path)) if jars.settings() else None
    if again is not None:
        assert again.filter("id = 1 AND txt IS NOT NULL AND day < DATE'0100-01-01'").count() == 1


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (t.StringType(), ["", "a", "ü" * 40, "ü" * 40 + "x", "😀"]),
        (t.DecimalType(20, 0), [Decimal(number) for number in (-1, 0, 2, 10**18, 10**19)]),
        (
            t.TimestampType(),
            [datetime(year, 1, 2, 3, 4, 5, 678901, tzinfo=UTC) for year in (1066, 1969, 1970, 2026, 9999)],
        ),
        (t.TimestampNTZType(), [datetime(year, 1, 2, 3, 4, 5, 678901) for year in (1066, 1969, 1970, 2026, 9999)]),
        (t.DateType(), [date(year, 1, 2) for year in (1, 999, 1970, 2026, 9999)]),
        (t.LongType(), [-(2**63), -1, 0, 5, 2**63 - 1]),
        (t.BinaryType(), [b"", b"\x00", b"a", b"b", b"\xff"]),
        (t.BooleanType(), [True, False]),
    ],
    ids=lambda value: value.simpleString() if isinstance(value, t.DataType) else "",
)
def test_keys_of_any_type_find_their_rows_in_any_file(
    spark: SparkSession, path: Path, kind: Any, values: list[Any]
) -> None:
    writer = opened("deltalake", spark)
    columns = (TableColumn("k", kind, 1), TableColumn("n", t.IntegerType(), 2))

    def apply(end: int, *changes: tuple[str, Any, int]) -> None:
        rows = [change(op, {"k": key, "n": n}, lsn=end - 5, seq=seq) for seq, (op, key, n) in enumerate(changes, 1)]
        writer.apply(plan(path, "mirror", end, key=("k",), columns=columns), frame(spark, rows, columns))

    # Each key in a file of its own: each one's bounds are the key.
    for number, key in enumerate(values):
        apply(10 * (number + 1), ("c", key, 0))
    files = len(DeltaTable(str(path)).file_uris())
    assert files == len(values)
    apply(500, ("u", values[0], 1), ("d", values[-1], 0))
    apply(510, *(("u", key, 2) for key in values[1:-1]))
    assert {(row["k"], row["n"]) for row in read(path)} == {(values[0], 1), *((key, 2) for key in values[1:-1])}


def test_a_merge_touches_only_files_with_its_rows(spark: SparkSession, path: Path) -> None:
    writer = opened("deltalake", spark)
    story = Story()
    pipeline = Pipeline(spark, writer, path, "mirror", story)
    end = 0
    for first in range(0, 100, 10):
        for key in range(first, first + 10):
            story.insert(id=key, n=0, doc="d", note="n")
        after, end = end, story.commit()
        result = pipeline.apply(after, end)
        assert result.files_removed == 0, "new keys touch nothing"
    story.update(3, n=1)
    story.update(97, n=1)
    after, end = end, story.commit()
    result = pipeline.apply(after, end)
    assert (result.files_removed, result.rows_folded) == (2, 2)
    pipeline.check(end)
    # Between the bounds of a file, but not in it: it is looked at, and left alone.
    story.insert(id=1000, n=0)
    story.delete(55)
    after, end = end, story.commit()
    pipeline.apply(after, end)
    story.insert(id=55, n=0)
    after, end = end, story.commit()
    assert pipeline.apply(after, end).files_removed == 0
    pipeline.check(end)


def test_a_batch_that_changes_nothing_is_recorded(make: MakePipeline) -> None:
    story = Story()
    story.insert(id=1, n=1)
    pipeline = make("mirror", story)
    first = story.commit()
    pipeline.apply(0, first)
    story.insert(id=2)
    story.delete(2)
    second = story.commit()
    assert pipeline.apply(first, second).applied_lsn == second
    assert pipeline.writer.applied(plan(pipeline.path, "mirror", 0)) == second
    assert pipeline.apply_changes([], second + 10).applied_lsn == second + 10
    pipeline.check(second)


@pytest.mark.parametrize("mode", ["mirror", "history", "append"])
def test_a_snapshot_replaces_the_table_in_one_step(make: MakePipeline, mode: str) -> None:
    story = Story()
    story.snapshot([{"id": key, "n": key, "doc": "d", "note": "n"} for key in range(5)], "s1")
    story.commit()
    story.update(1, LARGE, n=10)
    story.update(2, LARGE, id=20)
    story.delete(3)
    story.insert(id=7, n=7)
    end = story.commit()
    pipeline = make(mode, story)
    result = pipeline.apply(0, end, snapshot="s1", snapshot_rows=5)
    pipeline.check(end)
    assert (result.version, result.applied_lsn) == (0, end)
    # Again, under the same LSN, which a snapshot does not move: another one, with other rows.
    other = Story(lsn=end - 1)
    other.snapshot([{"id": key, "n": -key, "doc": "new", "note": None} for key in (2, 3, 4)], "s2")
    other.lsn = end
    other.states[end] = list(other.rows.values())
    pipeline.story = other
    result = pipeline.apply_changes(other.changes, end, snapshot="s2", snapshot_rows=3)
    assert (result.version, result.is_replay) == (1, False)
    pipeline.check(end)
    pipeline.apply_changes(other.changes, end, snapshot="s2", snapshot_rows=3)
    pipeline.check(end)
    # And the stream goes on.
    other.update(4, ["doc"], n=1, note="told")
    after, end = end, other.commit()
    pipeline.apply(after, end)
    pipeline.check(end)
    assert pipeline.apply_changes(other.changes[:3], end - 10, snapshot="s2", snapshot_rows=3).is_replay


def test_a_truncate_after_a_snapshot_leaves_nothing_of_it(make: MakePipeline) -> None:
    story = Story()
    story.snapshot([{"id": key, "n": key, "doc": "d", "note": None} for key in range(5)], "s1")
    story.update(2, n=7)
    story.truncate()
    story.insert(id=9, n=9)
    end = story.commit()
    for mode in ("mirror", "history"):
        pipeline = make(mode, story)
        pipeline.path /= mode
        pipeline.apply(0, end, snapshot="s1")
        pipeline.check(end)


def test_an_empty_snapshot_makes_an_empty_table(make: MakePipeline) -> None:
    for mode in ("mirror", "history", "append"):
        pipeline = make(mode, Story())
        pipeline.path /= mode
        assert pipeline.apply_changes([], 50, snapshot="s1", snapshot_rows=0).version == 0
        assert read(pipeline.path) == []
        assert pipeline.writer.applied(plan(pipeline.path, "mirror", 0)) == 50


def test_rows_that_are_missing_are_not_committed(make: MakePipeline) -> None:
    story = Story()
    story.insert(id=1, n=1)
    end = story.commit()
    for mode in ("mirror", "history", "append"):
        pipeline = make(mode, story)
        pipeline.path /= mode
        for more in ({}, {"snapshot": "s", "snapshot_rows": 2}):
            with pytest.raises(
                RowsMissing, match=r"1 changes of public.things were read up to 0/6E; the commit points say 2"
            ):
                pipeline.apply(0, end, rows_due=2, **more)
        assert pipeline.writer.version(str(pipeline.path)) is None
        assert not list(pipeline.path.rglob("*.parquet"))


def test_rows_that_do_not_belong_are_counted_and_left_out(make: MakePipeline) -> None:
    story = Story()
    story.insert(id=1, n=1)
    end = story.commit()
    foreign = [change("c", {"id": 2}, lsn=105, seq=1, epoch=7), change("r", {"id": 3}, lsn=50, seq=0, snapshot="old")]
    pipeline = make("mirror", story)
    where = "_snapshot IS NULL AND _source_epoch = 1"
    pipeline.apply_changes([*story.changes, *foreign], end, where=where)
    pipeline.check(end)
    with pytest.raises(CorruptCommits, match=r"1 changes of public.things are of another source epoch"):
        pipeline.apply_changes(foreign, end + 10, where="_snapshot IS NULL")


def test_another_source_epoch_begins_anew(make: MakePipeline) -> None:
    story = Story()
    story.insert(id=1, n=1)
    end = story.commit()
    pipeline = make("mirror", story)
    pipeline.apply(0, end)
    later = [
        change("r", {"id": 5}, lsn=20, seq=0, snapshot="s", epoch=2),
        change("u", {"id": 5, "n": 6}, lsn=25, seq=1, epoch=2),
    ]
    result = pipeline.apply_changes(later, 30, source_epoch=2, snapshot="s", snapshot_rows=1)
    assert result.applied_lsn == 30
    assert [(row["id"], row["n"], row["_source_epoch"]) for row in read(pipeline.path)] == [(5, 6, 2)]
    # A pipeline that has not heard of it yet must not mix the two.
    assert pipeline.writer.applied(plan(pipeline.path, "mirror", 0)) == end


def test_a_table_without_a_key_keeps_changes_and_nothing_else(spark: SparkSession, writer: Writer, path: Path) -> None:
    changes = [
        change("c", {"id": 1}, lsn=5, seq=1),
        change("c", {"id": 1}, lsn=5, seq=2),
        change("t", {}, lsn=6, seq=1),
    ]
    for mode in ("mirror", "history"):
        with pytest.raises(KeyMissing, match='mode = "append"'):
            writer.apply(plan(path, mode, 10, key=()), frame(spark, changes))
    writer.apply(plan(path, "append", 10, key=()), frame(spark, changes))
    assert [row["_op"] for row in sorted(read(path), key=lambda row: (row["_commit_lsn"], row["_seq"]))] == [
        "c",
        "c",
        "t",
    ]


@pytest.mark.parametrize("name", ["a b", "a=b", "_seq", "ID"])
def test_columns_that_no_table_can_have_are_told(spark: SparkSession, path: Path, name: str) -> None:
    columns = (*COLUMNS, TableColumn(name, t.StringType()))
    with pytest.raises(TableUnfit, match=name.replace("ID", "'ID'").lower() if name == "_seq" else name):
        opened("deltalake", spark).apply(plan(path, "mirror", 10, columns=columns), frame(spark, [], COLUMNS))


@pytest.mark.parametrize("folder", ["with space", "ümläut", "[a]{b}*", "~5Fx"])
def test_folders_of_any_name(spark: SparkSession, writer: Writer, tmp_path: Path, folder: str) -> None:
    story = Story()
    story.insert(id=1, n=1)
    pipeline = Pipeline(spark, writer, tmp_path / folder / "t", "mirror", story)
    first = story.commit()
    pipeline.apply(0, first)
    story.update(1, n=2)
    second = story.commit()
    pipeline.apply(first, second)
    pipeline.check(second)


class Intruder:
    """A store whose tables are changed by somebody else just before each of some commits."""

    def __init__(self, store: Any, times: int, intrude: Callable[[], None]) -> None:
        self._store, self._times, self._intrude = store, times, intrude

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, spark: SparkSession, path: str) -> Any:
        target = self._store.open(spark, path)
        if self._times:
            self._times -= 1
            self._intrude()
        return target


@pytest.mark.parametrize(("mode", "times"), [("mirror", 2), ("mirror", 5), ("history", 2), ("append", 2)])
@pytest.mark.parametrize("name", WRITERS)
def test_a_commit_that_comes_first_makes_the_batch_start_again(
    spark: SparkSession, path: Path, name: str, mode: str, times: int
) -> None:
    story = Story()
    for key in range(3):
        story.insert(id=key, n=0, doc="d")
    first = story.commit()
    plain = opened(name, spark)
    Pipeline(spark, plain, path, mode, story).apply(0, first)
    ends = []
    for number in range(6):
        story.update(0, LARGE, n=number + 1)
        story.insert(id=10 + number, n=number)
        ends.append(story.commit())

    def intrude() -> None:
        # The same changes, a bit further each time: what is left must not be applied twice.
        upto = ends[next(numbers)]
        Pipeline(spark, plain, path, mode, story).apply(first, upto)

    numbers = iter(range(6))
    assert isinstance(plain, TableWriter)
    pipeline = Pipeline(spark, TableWriter(Intruder(plain._store, times, intrude), spark), path, mode, story)
    if times == 5:
        with pytest.raises(TableConflict, match="each of 5 times"):
            pipeline.apply(first, ends[-1])
        pipeline.check(ends[4])
        return
    result = pipeline.apply(first, ends[-1])
    assert (result.is_replay, result.version) == (False, DeltaTable(str(path)).version())
    pipeline.check(ends[-1])
    if name == "deltalake":
        files = {Path(uri).name for uri in DeltaTable(str(path)).file_uris()}
        told = {row["path"] for row in _adds(path)}
        assert {file.name for file in path.glob("*.parquet")} <= told | files, "files that lost the race are gone"


@pytest.mark.parametrize("mode", ["mirror", "append"])
def test_what_fails_after_the_commit_does_not_undo_it(spark: SparkSession, path: Path, mode: str) -> None:
    """Delta writes a checkpoint of its log after some commits: on a full disk that fails, and the commit stands."""
    pipeline = Pipeline(spark, opened("deltalake", spark), path, mode, Story())
    log, story = path / "_delta_log", pipeline.story
    story.insert(id=0, n=0)
    after = story.commit()
    pipeline.apply(0, after)
    # Commits of no matter, to come sooner to the version that the first checkpoint is written of.
    for number in range(1, 24):
        DeltaTable(str(path)).alter.set_table_description(f"{number}")
    (log / f"{24:020}.checkpoint.parquet" / "in the way").mkdir(parents=True)
    story.insert(id=1, n=1)
    story.truncate() if mode == "mirror" else story.update(0, n=7)
    end = story.commit()
    result = pipeline.apply(after, end)
    assert (result.version, result.is_replay) == (24, False)
    pipeline.check(end)
    shutil.rmtree(log / f"{24:020}.checkpoint.parquet")
    assert pipeline.apply(after, end).is_replay
    pipeline.check(end)


def test_files_of_a_commit_that_may_have_been_made_are_left(
    spark: SparkSession, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(spark, opened("deltalake", spark), path, "mirror", Story())
    story = pipeline.story
    story.insert(id=1, n=1)
    first = story.commit()
    pipeline.apply(0, first)
    story.truncate()
    story.insert(id=2, n=2)
    end = story.commit()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(TableFiles, "sync_commit", fail)
        with pytest.raises(OSError, match="Input/output"):
            pipeline.apply(first, end)
    assert pipeline.apply(first, end).is_replay
    pipeline.check(end)


def _adds(path: Path) -> list[dict[str, Any]]:
    import json

    found = []
    for file in (path / "_delta_log").glob("*.json"):
        found += [one["add"] for line in file.read_text().splitlines() if "add" in (one := json.loads(line))]
    return found


def test_compaction_and_vacuum_keep_every_listed_version(make: MakePipeline) -> None:
    story = Story()
    pipeline = make("mirror", story)
    after = 0
    for number in range(8):
        story.insert(id=number, n=number)
        if number == 5:
            story.update(1, n=100)
        upto = story.commit()
        listed = pipeline.apply(after, upto).version
        after = upto
    early = read(pipeline.path, 3)
    # A merge may write what it changes and what it inserts into one file or into two.
    files = len(DeltaTable(str(pipeline.path)).file_uris())
    assert files in (7, 8, 9)
    assert pipeline.writer.compact(str(pipeline.path), ("id",)) == files
    pipeline.check(after)
    assert len(DeltaTable(str(pipeline.path)).file_uris()) == 1
    assert pipeline.writer.compact(str(pipeline.path), ("id",)) == 0
    story.update(2, n=5)
    upto = story.commit()
    pipeline.apply(after, upto)
    deleted = pipeline.writer.vacuum(str(pipeline.path), [3, listed], 0)
    assert deleted > 0
    assert ordered(read(pipeline.path, 3)) == ordered(early)
    assert len(read(pipeline.path, listed)) == 8
    pipeline.check(upto)
    pipeline.writer.clean(str(pipeline.path))
    pipeline.check(upto)


def test_what_a_killed_driver_left_is_nobodys_and_can_be_removed(spark: SparkSession, path: Path) -> None:
    writer = opened("deltalake", spark)
    story = Story()
    story.insert(id=1, n=1)
    end = story.commit()
    pipeline = Pipeline(spark, writer, path, "mirror", story)
    pipeline.apply(0, end)
    (path / "_walstream_staging" / "x").mkdir(parents=True)
    (path / "_walstream_staging" / "x" / "part-0.parquet").write_bytes(b"half")
    pipeline.check(end)
    writer.clean(str(path))
    assert not (path / "_walstream_staging").exists()


def test_a_writer_that_is_not_one(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match="deltalake or delta-spark"):
        open_writer("parquet", spark)


def test_many_small_files_become_one_with_the_next_small_batch(spark: SparkSession, path: Path) -> None:
    writer = opened("small", spark)
    story = Story()
    pipeline = Pipeline(spark, writer, path, "mirror", story)
    after = 0
    files = []
    for number in range(LITTER_FILES + 3):
        story.insert(id=number, n=number, doc="d")
        if number % 10 == 9:
            story.update(number - 5, LARGE, n=-1)
        upto = story.commit()
        pipeline.apply(after, upto)
        after = upto
        files.append(len(DeltaTable(str(path)).file_uris()))
    assert max(files) == LITTER_FILES
    assert files[-1] < 5
    pipeline.check(after)
