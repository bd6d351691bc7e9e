"""Rows whose key has changed while PostgreSQL did not send all of their columns: where the missing values are.

Owns the way back from a new key to the row that has the values; refuses to know what is done with them. A key change is
a `d` of the old key and, next to it in the order of positions, a `c` of the new one. What the `c` lacks is in the row
that the `d` ended: told by a change earlier in the batch, or by the row that the table had before the batch.

That row may itself have come from another key (chains), and its old key may be another row's by now (swaps). So the way
goes from row to row, not from key to key: every row of the batch begins at a position, each `c` of a key change knows
where the row before it began, and following that leads to a row that lacks nothing or that the table had before, at its
key `_from`. The steps are doubled in each round, so a chain of a thousand key changes takes ten. Rare, and therefore
plain: joins, no cleverness, but nothing is collected, however many keys have changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, WindowSpec
from pyspark.sql import functions as f

from walstream.spark.columns import col, struct_of
from walstream.spark.kept import Kept

_ROW = ("_row_lsn", "_row_seq")
"""Where the row of a key change begins: the position of its `c`."""
_PARENT = ("_parent_lsn", "_parent_seq")
"""Where the row began that it was before, while that is still to be looked at."""


def resolved(
    changes: DataFrame, key: Sequence[str], carried: Sequence[str], order: WindowSpec, kept: Kept
) -> DataFrame:
    """Return changes as fold.py's `carry` has them, with the values of rows that had other keys before.

    `_unsent` then names what the batch does not tell at all, and `_from` the key under which the table has it.
    """
    state = f.struct(struct_of(carried).alias("values"), "_unsent", "_began")
    changes = kept(changes.withColumn("_before", f.lag(state).over(order)))
    links = _links(changes, key, carried)
    while True:
        # Kept without the plan that made it, which would double with each round.
        links = links.localCheckpoint()
        if links.filter(f.col(_PARENT[0]).isNotNull()).isEmpty():
            break
        links = _doubled(links, carried)
    is_moved = f.col("_began.is_moved") & f.col("_unsent").isNotNull()
    joined = changes.withColumns(
        {_ROW[0]: f.when(is_moved, f.col("_began._commit_lsn")), _ROW[1]: f.when(is_moved, f.col("_began._seq"))}
    ).join(links, list(_ROW), "left")
    remaining = f.array_intersect("_unsent", "_link_unsent")
    is_found = f.col("_link_unsent").isNotNull()
    return joined.withColumns(
        {
            **{name: _filled(name, is_found, "_unsent", col(name)) for name in carried},
            "_from": f.when(is_found & (f.size(remaining) > 0), f.col("_link_from")).otherwise(f.col("_from")),
            "_unsent": f.when(is_found, _none_if_empty(remaining)).otherwise(f.col("_unsent")),
        }
    ).drop("_before", *_ROW, *_PARENT, "_link_from", "_link_values", "_link_unsent")


def _links(changes: DataFrame, key: Sequence[str], carried: Sequence[str]) -> DataFrame:
    """Return, for each row that has come from another key, what the row before it had and where that one began."""
    created = changes.filter((f.col("_op") == "c") & (f.size("_unchanged") > 0)).select(
        f.col("_commit_lsn").alias(_ROW[0]), f.col("_seq").alias(_ROW[1])
    )
    ended = changes.filter("_op = 'd'").select(
        f.col("_commit_lsn").alias(_ROW[0]),
        (f.col("_seq") + 1).alias(_ROW[1]),
        struct_of(key).alias("_link_from"),
        "_before",
    )
    everything = f.array(*map(f.lit, carried))
    nothing = f.array().cast("array<string>")
    lost = f.raise_error(f.lit("walstream.errors.CorruptCommits: A key change has no deletion of its old key."))
    linked = created.join(ended, list(_ROW), "left").withColumns(
        {
            "_link_from": f.when(f.col("_link_from").isNull(), lost).otherwise(f.col("_link_from")),
            "_link_values": f.col("_before.values"),
            "_link_unsent": f.when(f.col("_before").isNull(), everything).otherwise(
                f.coalesce(f.col("_before._unsent"), nothing)
            ),
        }
    )
    goes_on = (f.size("_link_unsent") > 0) & f.col("_before._began.is_moved")
    return linked.withColumns(
        {
            _PARENT[0]: f.when(goes_on, f.col("_before._began._commit_lsn")),
            _PARENT[1]: f.when(goes_on, f.col("_before._began._seq")),
        }
    ).drop("_before")


def _doubled(links: DataFrame, carried: Sequence[str]) -> DataFrame:
    """Return the links with each one's way longer by that of the row it leads to."""
    further = links.select(
        f.col(_ROW[0]).alias(_PARENT[0]),
        f.col(_ROW[1]).alias(_PARENT[1]),
        f.col("_link_from").alias("_next_from"),
        f.col("_link_values").alias("_next_values"),
        f.col("_link_unsent").alias("_next_unsent"),
        f.struct(*_PARENT).alias("_next_parent"),
    )
    is_found = f.col("_next_unsent").isNotNull()
    joined = links.join(further, list(_PARENT), "left")
    values = [
        _filled(name, is_found, "_link_unsent", col(name, "_link_values"), "_next_values").alias(name)
        for name in carried
    ]
    remaining = f.when(is_found, f.array_intersect("_link_unsent", "_next_unsent")).otherwise(f.col("_link_unsent"))
    goes_on = is_found & (f.size(remaining) > 0)
    return joined.select(
        *_ROW,
        f.coalesce("_next_from", "_link_from").alias("_link_from"),
        f.struct(*values).alias("_link_values"),
        remaining.alias("_link_unsent"),
        f.when(goes_on, f.col(f"_next_parent.{_PARENT[0]}")).alias(_PARENT[0]),
        f.when(goes_on, f.col(f"_next_parent.{_PARENT[1]}")).alias(_PARENT[1]),
    )


def _filled(name: str, is_found: Column, unsent: str, value: Column, source: str = "_link_values") -> Column:
    """Return a value, or that of the row before, where it is unsent and such a row was found."""
    return f.when(is_found & f.array_contains(unsent, name), col(name, source)).otherwise(value)


def _none_if_empty(names: Column) -> Column:
    return f.when(f.size(names) > 0, names)
