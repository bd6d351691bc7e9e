"""A merge: rows of a batch into rows of a table, said once for every way of doing it.

Owns the meaning of it and how Spark does it with joins; refuses to know files and commits. Conditions and values are
SQL over `s`, the batch's rows, and `t`, the table's. A row of the table is matched by at most one row of the batch, the
one with its key; then it is left alone, changed or removed. A row of the batch that matches none is inserted or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from walstream.spark.columns import quoted, struct_of


@dataclass(frozen=True, slots=True)
class Merge:
    """What to merge, and how."""

    rows: DataFrame
    """The batch's; read more than once."""
    count: int
    key: Sequence[str]
    columns: Sequence[str]
    """Of the table."""
    updates: Mapping[str, str]
    """What matched rows become: SQL over `s` and `t`; columns that are not in it stay."""
    inserts: Mapping[str, str]
    """What inserted rows are: SQL over `s`."""
    is_applied: str
    """Over `s` and `t`: whether a row that is matched is touched at all."""
    is_delete: str = "false"
    """Over `s`: whether a row that is matched is removed."""
    is_insert: str = "true"
    """Over `s`: whether a row that matches none is inserted."""
    is_matching: str = "true"
    """Over `s`: whether the row may match at all."""
    open_column: str = ""
    """Of the table: only rows in which it is null may be matched; empty for any row."""

    @property
    def is_matched(self) -> str:
        """Over `t`: whether the row may be matched at all."""
        return f"{quoted(self.open_column, 't')} IS NULL" if self.open_column else "true"

    @property
    def condition(self) -> str:
        """When a row of the batch and one of the table are the same row."""
        same = [f"{quoted(name, 't')} = {quoted(name, 's')}" for name in self.key]
        return " AND ".join([*same, *(part for part in (self.is_matching, self.is_matched) if part != "true")])


def merged(table: DataFrame, merge: Merge, matched: DataFrame | None = None) -> DataFrame:
    """Return rows of the table as the merge makes them, and the rows it inserts.

    `matched` are the keys, if they are known already, of the table's rows that are matched.
    """
    rows = merge.rows.alias("s")
    is_hit = f.expr(f"s._is_hit IS NOT NULL AND ({merge.is_applied})")
    hitting = merge.rows.alias("s").filter(f.expr(merge.is_matching)).withColumn("_is_hit", f.lit(True)).alias("s")
    joined = table.alias("t").join(hitting, f.expr(merge.condition), "left")
    if merge.is_delete != "false":
        joined = joined.filter(~f.coalesce(is_hit & f.expr(merge.is_delete), f.lit(False)))
    kept = joined.select(
        *(
            f.when(is_hit, f.expr(merge.updates[name])).otherwise(f.expr(quoted(name, "t"))).alias(name)
            if name in merge.updates
            else f.expr(quoted(name, "t")).alias(name)
            for name in merge.columns
        )
    )
    if matched is None:
        matched = (
            table.alias("t").filter(f.expr(merge.is_matched)).select(*(f.expr(quoted(name, "t")) for name in merge.key))
        )
    same = [f"{quoted(name, 'm')} = {quoted(name, 's')}" for name in merge.key]
    unmatched = rows.filter(f.expr(merge.is_insert)).join(
        matched.alias("m"), f.expr(" AND ".join([*same, merge.is_matching])), "left_anti"
    )
    return kept.unionByName(inserted(unmatched, merge))


def inserted(rows: DataFrame, merge: Merge) -> DataFrame:
    """Return rows of the batch, aliased `s`, as they are inserted."""
    return rows.select(*(f.expr(merge.inserts[name]).alias(name) for name in merge.columns))


def filled(rows: DataFrame, table: DataFrame, key: Sequence[str], columns: Sequence[str], home: Column) -> DataFrame:
    """Return folded rows with what they lack taken from the table's rows of before.

    `home` is the key under which the table has it, or null for rows that are to stay as they are. A value that not even
    the table has, because its row was never captured, becomes null.
    """
    there = table.select(struct_of(key).alias("_there_key"), struct_of(columns).alias("_there"))
    rows = rows.withColumn("_home", home)
    same = [f.col(f"_home.{quoted(name)}") == f.col(f"_there_key.{quoted(name)}") for name in key]
    is_asked = f.col("_home").isNotNull() & f.col("_unsent").isNotNull()
    nothing = f.lit(None)
    return (
        rows.join(there, same, "left")
        .withColumns(
            {
                name: f.when(is_asked & f.array_contains("_unsent", name), f.col(f"_there.{quoted(name)}")).otherwise(
                    f.col(quoted(name))
                )
                for name in columns
            }
        )
        .withColumns({"_unsent": f.when(is_asked, nothing).otherwise(f.col("_unsent"))})
        .drop("_there", "_there_key", "_home")
    )
