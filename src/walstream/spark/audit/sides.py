"""A table's two sides, made comparable: the same columns, the same types, the same LSN.

Owns bringing the destination's rows to the LSN at which the source is read; refuses to know where either comes from.
The destination stands at a cut, which is at or before that LSN. What committed in between is in the log, and applying
it is the fold that the pipeline itself makes of a batch: rows of the destination count as the oldest changes there are.
So nobody has to wait for the pipeline, and nothing needs to stand still.

Rows that no change touches are not folded, they go by: the cost follows the changes. In mode history the current rows
are compared; in append, what all changes come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from walstream.config import TableMode
from walstream.spark.audit.destinations import Held
from walstream.spark.columns import col
from walstream.spark.fold import Folded, fold, is_after
from walstream.spark.types import META

BEFORE_ALL = -1
"""The LSN of rows that were there before any change."""

_FOLDED = ("_op", "_source_epoch", "_commit_lsn", "_seq", "_ts", "_unchanged")
"""What the fold asks of a change, beside its columns."""


class Incomparable(Exception):
    """The table's rows at the LSN cannot be told from what the destination keeps; the text says why."""


class Brought(NamedTuple):
    """The destination's rows at the LSN; `release` when they are not needed any more."""

    rows: DataFrame
    folded: Folded | None

    def release(self) -> None:
        """Give back what the fold has kept."""
        if self.folded is not None:
            self.folded.release()


def bring(held: Held, mode: TableMode, changes: DataFrame | None, struct: t.StructType, key: Sequence[str]) -> Brought:
    """Bring the destination's rows, at its cut, to the LSN up to which `changes` reach; None: there are none.

    `struct` has the source's columns, in whose names the changes are. Raises Incomparable.
    """
    names = struct.names
    if mode == "append":
        kept = _renamed(held, struct, _FOLDED)
        everything = kept if changes is None else kept.unionByName(changes.select(*map(col, names), *_FOLDED))
        return _folded(everything, key, names) if key else _added(everything, names)
    if mode == "history":
        held = held._replace(frame=held.frame.filter(f.col("_valid_to_lsn").isNull()))
    rows = _renamed(held, struct)
    if changes is None:
        return Brought(rows, None)
    changes = changes.select(*map(col, names), *_FOLDED)
    as_changes = rows.withColumns(_oldest())
    if not key:
        return _added(as_changes.unionByName(changes), names)
    touched = changes.filter("_op <> 't'").select(*map(col, key)).distinct()
    folded = _folded(as_changes.join(touched, list(key), "left_semi").unionByName(changes), key, names)
    if folded.folded is not None and folded.folded.has_truncate:
        return folded
    untouched = rows.join(touched, list(key), "left_anti").select(*map(col, names))
    return folded._replace(rows=untouched.unionByName(folded.rows))


def _folded(changes: DataFrame, key: Sequence[str], names: Sequence[str]) -> Brought:
    folded = fold(changes, key, names)
    return Brought(folded.rows.filter("_op = 'u'").select(*map(col, names)), folded)


def _added(changes: DataFrame, names: Sequence[str]) -> Brought:
    """Return what changes of a table without a key come to: rows that were added after it was emptied last."""
    facts = changes.agg(
        f.max(f.when(f.col("_op") == "t", f.struct("_commit_lsn", "_seq"))).alias("truncated_at"),
        f.count(f.when(f.col("_op").isin("u", "d"), 1)).alias("others"),
    ).collect()[0]
    if facts["others"]:
        raise Incomparable("it has no key, and updates or deletes of its rows cannot be followed")
    rows = changes.filter(f.col("_op").isin("c", "r"))
    if facts["truncated_at"] is not None:
        rows = rows.filter(is_after(tuple(facts["truncated_at"])))
    return Brought(rows.select(*map(col, names)), None)


def _renamed(held: Held, struct: t.StructType, more: Sequence[str] = ()) -> DataFrame:
    """Return rows under the source's names and types; a column that the destination does not have is null there."""
    have = held.frame.schema
    chosen = []
    for field in struct:
        name = held.names.get(field.name)
        if name is None:
            value: Column = f.lit(None).cast(field.dataType)
        elif have[name].dataType == field.dataType:
            value = col(name)
        else:
            value = col(name).try_cast(field.dataType)
        chosen.append(value.alias(field.name))
    return held.frame.select(*chosen, *more)


def _oldest() -> dict[str, Column]:
    """Return what makes rows the oldest of changes."""
    of = {field.name: field.dataType for field in META}
    return {
        "_op": f.lit("r"),
        "_source_epoch": f.lit(0).cast(of["_source_epoch"]),
        "_commit_lsn": f.lit(BEFORE_ALL).cast(of["_commit_lsn"]),
        "_seq": f.lit(0).cast(of["_seq"]),
        "_ts": f.lit(None).cast(of["_ts"]),
        "_unchanged": f.array().cast(of["_unchanged"]),
    }
