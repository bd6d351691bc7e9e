"""The rows in which two sides of a table differ: how many, which keys, which columns.

Owns the comparison row by row, which is asked for only when the fingerprints of the two sides differ; refuses to know
where rows come from. Both sides have the same columns and types.

    missing      the source has it, the destination does not
    extra        the destination has it, the source does not
    changed      both have it, with other values
    duplicate    the destination has its key more than once

Without a key a row is what it consists of, and it is missing or extra as often as it is there too seldom or too often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f

from walstream.spark.audit.fingerprint import row_hash
from walstream.spark.columns import col, struct_of

Kind = Literal["missing", "extra", "changed", "duplicate"]
KINDS: Final[tuple[Kind, ...]] = ("missing", "extra", "changed", "duplicate")


class Difference(NamedTuple):
    """One key that differs; without a key, the whole row."""

    kind: Kind
    key: dict[str, Any]
    columns: tuple[str, ...] = ()
    """In which it differs, when both sides have it."""


class Differences(NamedTuple):
    """All of them counted, some of them named."""

    counts: dict[Kind, int]
    named: tuple[Difference, ...]

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.counts.values())


def find(source: DataFrame, held: DataFrame, key: Sequence[str], columns: Sequence[str], named_max: int) -> Differences:
    """Compare row by row; name at most so many differences of each kind, in the order of their keys."""
    found = (_by_key if key else _by_row)(source, held, key, columns)
    found = found.persist()
    try:
        counts = {
            row["kind"]: row["count"] for row in found.groupBy("kind").agg(f.sum("times").alias("count")).collect()
        }
        named = [
            _difference(row)
            for kind in KINDS
            if kind in counts
            for row in found.filter(f.col("kind") == kind).orderBy("key").limit(named_max).collect()
        ]
    finally:
        found.unpersist()
    return Differences({kind: int(counts.get(kind, 0)) for kind in KINDS}, tuple(named))


def _by_key(source: DataFrame, held: DataFrame, key: Sequence[str], columns: Sequence[str]) -> DataFrame:
    joined = _grouped(source, key, columns, "s").join(_grouped(held, key, columns, "h"), "key", "full_outer")
    differing = f.array_compact(
        f.array(*(f.when(~col(name, "s").eqNullSafe(col(name, "h")), name) for name in columns if name not in key))
    )
    kind = (
        f.when(f.col("h_times").isNull(), "missing")
        .when(f.col("s_times").isNull(), "extra")
        .when(f.col("h_times") > 1, "duplicate")
        .when(f.col("s_hash") != f.col("h_hash"), "changed")
    )
    chosen = joined.select("key", kind.alias("kind"), differing.alias("columns"), f.lit(1).alias("times"))
    return chosen.filter(f.col("kind").isNotNull())


def _grouped(rows: DataFrame, key: Sequence[str], columns: Sequence[str], side: str) -> DataFrame:
    """Return one row per key: how often it is there, its fingerprint, its values."""
    return (
        rows.select(
            struct_of(key).alias("key"), row_hash(rows.schema, columns).alias("hash"), struct_of(columns).alias("row")
        )
        .groupBy("key")
        .agg(
            f.count(f.lit(1)).alias(f"{side}_times"),
            f.first("hash").alias(f"{side}_hash"),
            f.first("row").alias(side),
        )
    )


def _by_row(source: DataFrame, held: DataFrame, _key: Sequence[str], columns: Sequence[str]) -> DataFrame:
    sides = [
        rows.select(
            row_hash(rows.schema, columns).alias("hash"), struct_of(columns).alias("row"), f.lit(sign).alias("sign")
        )
        for rows, sign in ((source, 1), (held, -1))
    ]
    balance = (
        sides[0].unionByName(sides[1]).groupBy("hash").agg(f.sum("sign").alias("more"), f.first("row").alias("key"))
    )
    kind = f.when(f.col("more") > 0, "missing").otherwise("extra")
    none = f.array().cast("array<string>")
    return balance.filter("more <> 0").select(
        "key", kind.alias("kind"), none.alias("columns"), f.abs("more").alias("times")
    )


def _difference(row: Row) -> Difference:
    kind = cast(Kind, row["kind"])
    return Difference(kind, row["key"].asDict(), tuple(row["columns"] or ()) if kind == "changed" else ())
