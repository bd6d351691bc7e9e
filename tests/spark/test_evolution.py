"""What becomes of a table when its source changes: pure comparisons, then both writers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import types as t

from spark.changing import change, frame, plan
from spark.test_writers import WAYS, WRITERS, opened, read
from walstream.errors import SchemaIncompatible, TableUnfit
from walstream.spark.columns import TableColumn, table_schema
from walstream.spark.evolution import compare, conversion
from walstream.spark.writers import Writer

INT, LONG, TEXT = t.IntegerType(), t.LongType(), t.StringType()


def schema(*columns: TableColumn, relation: int = 7, mode: Any = "mirror") -> t.StructType:
    return table_schema(mode, columns, relation)


def evolution(before: t.StructType, after: t.StructType) -> str:
    return str(compare("public.things", "mirror", before, after))


ID, A = TableColumn("id", LONG, 1), TableColumn("a", INT, 2)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ([ID, A], ""),
        ([A, ID], ""),
        ([ID, A, TableColumn("b", TEXT, 3)], "added b"),
        ([ID], "dropped a"),
        ([ID, TableColumn("b", INT, 2)], "renamed a to b"),
        ([ID, TableColumn("b", LONG, 2)], "renamed a to b, widened b from int to bigint"),
        ([ID, TableColumn("b", INT, 3)], "added b, dropped a"),
        ([ID, TableColumn("a", TEXT, 3)], "added a, dropped a"),
        ([TableColumn("a", LONG, 1), TableColumn("id", INT, 2)], "renamed id to a, renamed a to id"),
        ([ID, TableColumn("b", INT, None)], "added b, dropped a"),
        ([ID, TableColumn("a", INT, None)], ""),
    ],
)
def test_columns_are_the_same_by_their_numbers(after: list[TableColumn], told: str) -> None:
    assert evolution(schema(ID, A), schema(*after)) == told


def test_numbers_of_another_relation_prove_nothing() -> None:
    other = schema(ID, TableColumn("b", INT, 2), relation=8)
    assert evolution(schema(ID, A), other) == "added b, dropped a"
    assert evolution(schema(ID, A), schema(ID, TableColumn("a", INT, 9), relation=8)) == ""


def test_a_table_that_knows_no_numbers_goes_by_names() -> None:
    nameless = schema(TableColumn("id", LONG), TableColumn("a", INT))
    assert evolution(nameless, schema(ID, A)) == ""
    assert evolution(nameless, schema(ID, TableColumn("b", INT, 2))) == "added b, dropped a"


def test_only_added_columns_leave_the_rows_alone() -> None:
    both = compare("x", "mirror", schema(ID), schema(ID, A))
    assert not both.is_rewrite
    assert both
    assert not compare("x", "mirror", schema(ID), schema(ID))
    assert compare("x", "mirror", schema(ID, A), schema(ID)).is_rewrite


def test_a_table_of_another_mode_is_told() -> None:
    with pytest.raises(TableUnfit, match="not written in mode history: it lacks _op, _valid_from"):
        compare("public.things", "history", schema(ID), schema(ID, mode="history"))


def decimal(precision: int, scale: int) -> t.DecimalType:
    return t.DecimalType(precision, scale)


@pytest.mark.parametrize(
    ("old", "new", "is_possible"),
    [
        (t.ShortType(), INT, True),
        (t.ShortType(), LONG, True),
        (INT, LONG, True),
        (LONG, INT, False),
        (INT, t.DoubleType(), True),
        (LONG, t.DoubleType(), False),
        (t.FloatType(), t.DoubleType(), True),
        (t.DoubleType(), t.FloatType(), False),
        (INT, t.FloatType(), False),
        (INT, decimal(10, 0), True),
        (INT, decimal(11, 2), False),
        (LONG, decimal(19, 0), True),
        (LONG, decimal(18, 0), False),
        (decimal(8, 2), decimal(10, 2), True),
        (decimal(8, 2), decimal(10, 4), True),
        (decimal(8, 2), decimal(8, 3), False),
        (decimal(8, 2), TEXT, True),
        (LONG, TEXT, True),
        (t.BooleanType(), TEXT, True),
        (t.BooleanType(), INT, False),
        (t.DoubleType(), TEXT, False),
        (TEXT, INT, False),
        (t.DateType(), t.TimestampNTZType(), True),
        (t.DateType(), t.TimestampType(), False),
        (t.TimestampType(), t.TimestampNTZType(), False),
        (t.TimestampType(), TEXT, True),
        (t.ArrayType(INT), t.ArrayType(LONG), True),
        (t.ArrayType(LONG), t.ArrayType(INT), False),
        (t.ArrayType(INT), TEXT, False),
        (t.ArrayType(t.TimestampType()), t.ArrayType(TEXT), False),
    ],
    ids=lambda value: value.simpleString() if isinstance(value, t.DataType) else "",
)
def test_types_become_only_what_holds_all_their_values(old: t.DataType, new: t.DataType, is_possible: bool) -> None:
    assert (conversion(old, new) is not None) == is_possible


def test_what_cannot_be_is_told_with_what_to_do() -> None:
    with pytest.raises(SchemaIncompatible, match=r"column a of public.things was int and is now date") as told:
        compare("public.things", "mirror", schema(ID, A), schema(ID, TableColumn("a", t.DateType(), 2)))
    assert "new snapshot" in told.value.hint


def test_text_is_what_the_log_would_hold(spark: SparkSession) -> None:
    values: list[tuple[t.DataType, Any, str]] = [
        (t.TimestampType(), datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC), "2026-01-31T12:00:00.123456Z"),
        (t.TimestampType(), datetime(2026, 1, 31, 12, 0, 0, 500000, tzinfo=UTC), "2026-01-31T12:00:00.5Z"),
        (t.TimestampType(), datetime(2026, 1, 31, 12, 0, 10, tzinfo=UTC), "2026-01-31T12:00:10Z"),
        (t.TimestampNTZType(), datetime(1999, 12, 31, 10, 20, 30), "1999-12-31T10:20:30"),
        (t.DateType(), date(2026, 1, 31), "2026-01-31"),
        (decimal(20, 10), Decimal("0.0000000001"), "0.0000000001"),
        (decimal(8, 2), Decimal("12345.60"), "12345.60"),
        (t.BooleanType(), True, "true"),
        (t.BinaryType(), b"\x00\xff", "AP8="),
        (LONG, -5, "-5"),
    ]
    columns = t.StructType([t.StructField(f"c{number}", kind) for number, (kind, _, _) in enumerate(values)])
    made = [(conversion(kind, TEXT) or "").replace("{}", f"c{number}") for number, (kind, _, _) in enumerate(values)]
    frame = spark.createDataFrame([tuple(value for _, value, _ in values)], columns)
    assert list(frame.selectExpr(*made).collect()[0]) == [text for _, _, text in values]


class Turns:
    """Writers that go on where another one stopped, batch by batch."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = cycle(writers)

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._writers), name)


@pytest.fixture(params=[*WRITERS, "turns"])
def writer(request: pytest.FixtureRequest, spark: SparkSession) -> Writer:
    if request.param == "turns":
        return cast(Writer, Turns([opened(name, spark) for name in WAYS]))
    return opened(request.param, spark)


class Table:
    """A table whose source changes from batch to batch."""

    def __init__(self, spark: SparkSession, writer: Writer, path: Path, mode: Any) -> None:
        self.spark, self.writer, self.path, self.mode = spark, writer, path, mode
        self.end = 0

    def apply(self, columns: list[TableColumn], *rows: dict[str, Any], op: str = "c") -> None:
        lsn, self.end = self.end + 5, self.end + 10
        changes = [change(op, row, lsn=lsn, seq=seq) for seq, row in enumerate(rows, start=1)]
        what = plan(self.path, self.mode, self.end, columns=tuple(columns), relation_id=7, schema_version=self.end)
        self.writer.apply(what, frame(self.spark, changes, columns))

    def rows(self) -> list[tuple[Any, ...]]:
        found = read(self.path)
        names = [
            name for name in DeltaTable(str(self.path)).to_pyarrow_table().column_names if not name.startswith("_")
        ]
        return sorted(tuple(row[name] for name in names) for row in found)

    @property
    def names(self) -> list[str]:
        return [field.name for field in DeltaTable(str(self.path)).schema().fields if not field.name.startswith("_")]


@pytest.mark.parametrize("mode", ["mirror", "history", "append"])
def test_a_table_follows_its_source(spark: SparkSession, writer: Writer, tmp_path: Path, mode: Any) -> None:
    table = Table(spark, writer, tmp_path / "t", mode)
    table.apply([ID, A], {"id": 1, "a": 10})
    b = TableColumn("b", t.TimestampNTZType(), 3)
    at = datetime(2026, 1, 31, 12)
    table.apply([ID, A, b], {"id": 2, "a": 20, "b": at})
    assert {row["id"]: (row["a"], row["b"]) for row in read(table.path)} == {1: (10, None), 2: (20, at)}
    wider = TableColumn("long_a", LONG, 2)
    table.apply([ID, wider, b], {"id": 3, "long_a": 2**40, "b": at})
    assert sorted(table.names) == ["b", "id", "long_a"]
    assert {row["id"]: (row["long_a"], row["b"]) for row in read(table.path)} == {
        1: (10, None),
        2: (20, at),
        3: (2**40, at),
    }
    table.apply([ID, b], {"id": 4, "b": at})
    again = TableColumn("long_a", TEXT, 4)
    table.apply([ID, b, again], {"id": 5, "b": at, "long_a": "new"})
    assert {row["id"]: row["long_a"] for row in read(table.path)} == {1: None, 2: None, 3: None, 4: None, 5: "new"}
    # Dropped and added between two batches, under its old name: what it held is not shown as if it were the new one's.
    other = TableColumn("long_a", TEXT, 5)
    table.apply([ID, b, other], {"id": 6, "b": at, "long_a": "newest"})
    assert {row["long_a"] for row in read(table.path)} == {None, "newest"}
    if mode == "mirror":
        table.apply([ID, b, other], {"id": 1, "b": at, "long_a": "updated"}, op="u")
        assert {row["id"]: row["long_a"] for row in read(table.path)}[1] == "updated"
        assert len(read(table.path)) == 6


def test_an_incompatible_change_leaves_the_table_as_it_is(spark: SparkSession, writer: Writer, tmp_path: Path) -> None:
    table = Table(spark, writer, tmp_path / "t", "mirror")
    table.apply([ID, A], {"id": 1, "a": 10})
    with pytest.raises(SchemaIncompatible):
        table.apply([ID, TableColumn("a", t.DateType(), 2)], {"id": 2, "a": date(2026, 1, 31)})
    assert table.rows() == [(1, 10)]
    assert DeltaTable(str(table.path)).version() == 0
    # The remedy: a new snapshot, which replaces the table whatever it was.
    columns = (ID, TableColumn("a", t.DateType(), 2))
    changes = [change("r", {"id": 2, "a": date(2026, 1, 31)}, lsn=30, seq=0, snapshot="s")]
    writer.apply(plan(table.path, "mirror", 40, columns=columns, snapshot="s"), frame(spark, changes, columns))
    assert table.rows() == [(2, date(2026, 1, 31))]


def test_a_column_becomes_text_on_demand(spark: SparkSession, writer: Writer, tmp_path: Path) -> None:
    table = Table(spark, writer, tmp_path / "t", "mirror")
    amount = TableColumn("a", decimal(8, 2), 2)
    table.apply([ID, amount], {"id": 1, "a": Decimal("1.50")})
    table.apply([ID, amount._replace(type=TEXT)], {"id": 2, "a": "NaN"})
    assert table.rows() == [(1, "1.50"), (2, "NaN")]
