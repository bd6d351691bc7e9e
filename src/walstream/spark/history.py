"""The versions of rows: from the changes of a batch to rows that say from when to when they were true (SCD2).

Owns the intervals; refuses to know where they are written. Every change that leaves a row there makes a version of it,
true from the change's position up to that of the next change of its key or the next truncate, whichever is earlier. The
version of a row that the table has as true now ends where the batch first touches its key.

A version of which a later change of the same transaction made another one begins and ends at the same LSN: no moment
between transactions shows it, but what happened is told. At a moment L the table was what the rows with
`_valid_from_lsn < L` and (`_valid_to_lsn` null or `>= L`) say, where L is the end LSN of a cut: commits before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from walstream.spark.columns import POSITION, col, quoted
from walstream.spark.fold import Folded, Known, carry, nothing_unsent, settled
from walstream.spark.kept import Kept

NOW: Final = "`_valid_to_lsn` IS NULL"
"""Of the rows that are true now."""


def versions(
    changes: DataFrame,
    key: Sequence[str],
    columns: Sequence[str],
    *,
    carries: frozenset[str] = frozenset(),
    measures: Mapping[str, Column] | None = None,
) -> Folded:
    """Return the versions that the changes make, `_is_close` false, and for each key where its old one ends, true.

    Rows have the table's columns, those of a history, `_commit_lsn`, `_seq` and `_ts` of the change, `_unsent` and
    `_from` as in fold.py. A truncate is not among the closes: it ends everything (`truncates`).
    """

    def build(changes: DataFrame, known: Known, kept: Kept) -> DataFrame:
        if known.has_truncates:
            changes = kept(changes)
        rows = changes.filter("_op <> 't'")
        if known.unsent:
            rows = carry(rows, key, columns, known.unsent, kept if known.has_moves else None)
        else:
            rows = rows.withColumns({"_next": _next(key), **nothing_unsent(rows, key)})
        order = Window.partitionBy(*map(col, key)).orderBy(*POSITION)
        rows = rows.withColumn("_is_first", f.lag("_op").over(order).isNull())
        if known.has_truncates:
            rows = rows.crossJoin(f.broadcast(truncates(changes))).withColumn(
                "_next", f.least("_next", _next_truncate())
            )
        # A change that begins a version and also ends an older one makes two rows.
        is_close = f.array_compact(
            f.array(f.when(f.col("_op") != "d", f.lit(False)), f.when(f.col("_is_first"), f.lit(True)))
        )
        return rows.withColumn("_is_close", f.explode(is_close)).select(
            *map(col, columns),
            "_source_epoch",
            f.col("_commit_lsn").alias("_valid_from_lsn"),
            f.col("_seq").alias("_valid_from_seq"),
            f.col("_next._commit_lsn").alias("_valid_to_lsn"),
            f.col("_next._seq").alias("_valid_to_seq"),
            f.col("_ts").alias("_valid_from"),
            f.col("_next._ts").alias("_valid_to"),
            "_op",
            *POSITION,
            "_ts",
            "_unsent",
            "_from",
            "_is_close",
        )

    return settled(changes, columns, build, Known(carries), measures)


def _next(key: Sequence[str]) -> Column:
    order = Window.partitionBy(*map(col, key)).orderBy(*POSITION)
    return f.lead(f.struct(*POSITION, "_ts")).over(order)


def truncates(changes: DataFrame) -> DataFrame:
    """Return one row with the positions and times of all truncates, in order."""
    return changes.filter("_op = 't'").agg(f.sort_array(f.collect_list(f.struct(*POSITION, "_ts"))).alias("_truncates"))


def _next_truncate() -> Column:
    here = f.struct(*POSITION, "_ts")
    return f.get(f.filter("_truncates", lambda one: _at(one) > _at(here)), f.lit(0))


def _at(moment: Column) -> Column:
    return f.struct(*(moment.getField(name).alias(name) for name in POSITION))


def closed(table: DataFrame, closes: DataFrame, key: Sequence[str], first_truncate: DataFrame) -> DataFrame:
    """Return all rows of a history, those that are true now ended where the batch first touches them or all rows.

    `closes` has the keys and positions of the batch's first changes, `first_truncate` the one of its first truncate.
    """
    ends = closes.select(*map(col, key), f.struct(*POSITION, "_ts").alias("_end")).alias("s")
    same = f.expr(" AND ".join(f"{quoted(name, 't')} = {quoted(name, 's')}" for name in key))
    everything = first_truncate.select(f.get("_truncates", f.lit(0)).alias("_truncate"))
    is_now = f.expr(NOW)
    end = f.least("_end", "_truncate")
    return (
        table.alias("t")
        .join(ends, same, "left")
        .crossJoin(f.broadcast(everything))
        .withColumns(
            {
                "_valid_to": f.when(is_now, end.getField("_ts")).otherwise(f.col("_valid_to")),
                "_valid_to_seq": f.when(is_now, end.getField("_seq")).otherwise(f.col("_valid_to_seq")),
                "_valid_to_lsn": f.when(is_now, end.getField("_commit_lsn")).otherwise(f.col("_valid_to_lsn")),
            }
        )
        .select(*(f.expr(quoted(name, "t")) if name in key else col(name) for name in table.columns))
    )
