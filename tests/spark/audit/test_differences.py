"""Rows that differ are found and named, whatever is wrong with them."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession

from walstream.spark.audit.differences import Difference, Differences, find

SCHEMA = "a int, b string, c double"


def frame(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame(list(rows), SCHEMA)


def by_key(source: DataFrame, held: DataFrame, named_max: int = 10) -> Differences:
    return find(source, held, ["a"], ["a", "b", "c"], named_max)


def test_each_kind_is_named_with_its_key(spark: SparkSession) -> None:
    source = frame(spark, (1, "x", 1.0), (2, "x", None), (3, "y", float("nan")), (4, "z", 2.0))
    held = frame(spark, (1, "x", 1.0), (2, None, 5.0), (4, "z", 2.0), (4, "z", 2.0), (5, "new", 0.0))
    found = by_key(source, held)
    assert found.named == (
        Difference("missing", {"a": 3}),
        Difference("extra", {"a": 5}),
        Difference("changed", {"a": 2}, ("b", "c")),
        Difference("duplicate", {"a": 4}),
    )
    assert found.counts == {"missing": 1, "extra": 1, "changed": 1, "duplicate": 1}
    assert found.total == 4


def test_all_are_counted_and_some_named(spark: SparkSession) -> None:
    source = frame(spark, *((number, "x", 1.0) for number in range(100)))
    found = by_key(source, frame(spark), named_max=3)
    assert found.counts["missing"] == 100
    assert [one.key["a"] for one in found.named] == [0, 1, 2]


def test_without_a_key_rows_are_counted(spark: SparkSession) -> None:
    source = frame(spark, (1, "x", 1.0), (1, "x", 1.0), (1, "x", 1.0), (2, "y", None))
    held = frame(spark, (1, "x", 1.0), (2, "y", None), (2, "y", None))
    found = find(source, held, [], ["a", "b", "c"], 10)
    assert found.counts == {"missing": 2, "extra": 1, "changed": 0, "duplicate": 0}
    assert found.named == (
        Difference("missing", {"a": 1, "b": "x", "c": 1.0}),
        Difference("extra", {"a": 2, "b": "y", "c": None}),
    )
