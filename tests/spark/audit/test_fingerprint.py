"""The fingerprint tells rows apart that differ in anything, and does not mind their order."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from pyspark.sql import SparkSession

from walstream.spark.audit.fingerprint import Fingerprint, fingerprint, row_hash

SCHEMA = (
    "id int, txt string, num decimal(10,2), dbl double, bin binary, arr array<string>, ts timestamp, bins array<binary>"
)

ROW: dict[str, Any] = {
    "id": 1,
    "txt": "a",
    "num": Decimal("1.50"),
    "dbl": 0.0,
    "bin": b"\x00",
    "arr": ["a", None],
    "ts": None,
    "bins": [b"ab"],
}


def of(spark: SparkSession, *rows: dict[str, Any]) -> Fingerprint:
    frame = spark.createDataFrame([tuple({**ROW, **row}.values()) for row in rows], SCHEMA)
    return fingerprint(frame, frame.columns)


def test_order_does_not_matter_and_number_does(spark: SparkSession) -> None:
    rows = [{"id": number} for number in range(50)]
    assert of(spark, *rows) == of(spark, *reversed(rows))
    assert of(spark, *rows) != of(spark, *rows[:-1], rows[0])
    assert of(spark, *rows, rows[0], rows[0]) != of(spark, *rows)


DIFFERENT = (
    ({"txt": ""}, {"txt": None}),
    ({"txt": "1", "num": None}, {"txt": None, "num": Decimal(1)}),
    ({"dbl": 0.0}, {"dbl": -0.0}),
    ({"dbl": None}, {"dbl": float("nan")}),
    ({"arr": []}, {"arr": None}),
    ({"arr": []}, {"arr": [None]}),
    ({"arr": [None]}, {"arr": [""]}),
    ({"arr": ["a", "b"]}, {"arr": ["a,b"]}),
    ({"arr": ["1:a"]}, {"arr": ["a"]}),
    ({"arr": ["~"]}, {"arr": [None]}),
    ({"bin": b""}, {"bin": None}),
    ({"bins": [b"\x00"]}, {"bins": [b"\x01"]}),
)


def test_what_differs_is_told_apart(spark: SparkSession) -> None:
    rows = [tuple({**ROW, **row}.values()) for pair in DIFFERENT for row in (*pair, *pair)]
    frame = spark.createDataFrame(rows, SCHEMA)
    hashes = iter([row[0] for row in frame.select(row_hash(frame.schema, frame.columns)).collect()])
    for pair in DIFFERENT:
        one, other, *again = (next(hashes) for _ in range(4))
        assert one != other, pair
        assert again == [one, other]


def test_nothing_has_a_fingerprint_too(spark: SparkSession) -> None:
    frame = spark.createDataFrame([], SCHEMA)
    assert fingerprint(frame, frame.columns) == Fingerprint(0, 0)
