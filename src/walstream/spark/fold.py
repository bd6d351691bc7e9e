"""Many changes of a table into one row per key: what the table has to become, whatever it was before.

Owns which change of a key is the last and which values it carries; refuses to know where the result goes: Delta, a
replica, a test. A DataFrame comes in, a DataFrame goes out, nothing is collected but a handful of facts.

    c, r     the row is there now, with all its columns; or, when the key has changed, with those that were sent
    u        the row is there now; columns that PostgreSQL did not send keep the value they had
    d        the row is there no more
    t        no row is there any more

The result has, for each key, its last change: `_op` is `u` (there) or `d` (gone). `_unsent` names the columns whose
value no change of the batch told: it is in the row that the table had before the batch, under the key `_from`, or under
the row's own key where that is null (moves.py). Everything else is known from the batch alone.

How it is fast. Most batches have no unsent columns, and then the last change of a key is all there is to know: one sort
per key, and only its first row is kept. Whether that was so is observed while it runs, at no cost; if it was not, the
batch is read once more and values are carried from row to row. `carries`, the columns that earlier batches of the table
left out, spares that second reading. Memory is bounded by Spark's own: sorts spill, windows spill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from pyspark.sql import Column, DataFrame, Observation, Row, Window
from pyspark.sql import functions as f

from walstream.spark import moves
from walstream.spark.columns import POSITION, col, position, quoted, struct_of
from walstream.spark.kept import Kept

RESETS: Final = ("c", "r", "d")
"""Changes after which nothing of the row before them is left."""

_MASK_BITS: Final = 62

WHOLE_PLANS: Final = {
    # Spark would replace what comes after an empty stage by nothing, and what was observed in the stage went with it.
    "spark.sql.adaptive.optimizer.excludedRules": "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
}
"""What the session of observed changes must be set to."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of a batch while it was read."""

    rows: int
    unsent: frozenset[str]
    """Columns that some change left out."""
    has_moves: bool
    """Whether a key changed while columns were left out."""
    truncated_at: tuple[int, int] | None
    """The position of the last truncate."""


@dataclass(frozen=True, slots=True)
class Folded:
    """The last change of each key; `rows` is kept in memory and on disk until `release`."""

    rows: DataFrame
    facts: Facts
    measured: Row
    """What was asked for in `measures`, over all rows, those before a truncate included."""
    carries: frozenset[str]
    """For the next batch of this table."""
    kept: Kept = field(repr=False)
    """What `rows` takes."""

    @property
    def has_truncate(self) -> bool:
        """Whether the table was emptied; what came before is not in `rows`."""
        return self.facts.truncated_at is not None

    @property
    def rows_in(self) -> int:
        """Changes that were read."""
        return self.facts.rows

    def release(self) -> None:
        """Give back what `rows` takes."""
        self.kept.release()


class Watched:
    """Changes whose facts are observed when they are read for the first time."""

    def __init__(self, changes: DataFrame, columns: Sequence[str]) -> None:
        """Take the changes and the names of the table's columns."""
        for name, value in WHOLE_PLANS.items():
            changes.sparkSession.conf.set(name, value)
        self._seen = Observation()
        self._masks = [columns[at : at + _MASK_BITS] for at in range(0, len(columns), _MASK_BITS)]
        is_partial = f.size("_unchanged") > 0
        measures = [
            f.count(f.lit(1)).alias("rows"),
            f.coalesce(f.max((f.col("_op") == "c") & is_partial), f.lit(False)).alias("has_moves"),
            f.max(f.when(f.col("_op") == "t", position())).alias("truncated_at"),
        ]
        measures += [
            f.coalesce(f.bit_or(f.when(is_partial, _mask(names))), f.lit(0)).alias(f"mask_{number}")
            for number, names in enumerate(self._masks)
        ]
        self.changes = changes.observe(self._seen, *measures)

    @property
    def facts(self) -> Facts:
        """What was seen; waits until `changes` has been read to its end."""
        seen: dict[str, Any] = self._seen.get
        unsent = {
            name
            for number, names in enumerate(self._masks)
            for bit, name in enumerate(names)
            if seen[f"mask_{number}"] >> bit & 1
        }
        at = seen["truncated_at"]
        return Facts(seen["rows"], frozenset(unsent), seen["has_moves"], None if at is None else (at[0], at[1]))


def _mask(names: Sequence[str]) -> Column:
    """Return the names in `_unchanged` as bits, so that one aggregate tells which columns some row left out."""
    known = f.array(*map(f.lit, names))
    values = f.array(*(f.lit(1 << bit).cast("long") for bit in range(len(names))))
    bits = f.transform(
        f.array_intersect("_unchanged", known),
        lambda name: f.element_at(values, f.array_position(known, name).cast("int")),
    )
    return f.aggregate(bits, f.lit(0).cast("long"), lambda mask, bit: mask.bitwiseOR(bit))


@dataclass(frozen=True, slots=True)
class Known:
    """What a plan for reading a batch has to reckon with. A plan that reckons with less is simpler and faster."""

    unsent: frozenset[str] = frozenset()
    has_moves: bool = False
    has_truncates: bool = False

    def covers(self, facts: Facts) -> bool:
        """Whether what was seen was expected."""
        return (
            facts.unsent <= self.unsent
            and self.has_moves >= facts.has_moves
            and self.has_truncates >= (facts.truncated_at is not None)
        )

    def and_also(self, facts: Facts) -> Known:
        """Return what to reckon with after having seen this."""
        return Known(
            self.unsent | facts.unsent,
            self.has_moves or facts.has_moves,
            self.has_truncates or facts.truncated_at is not None,
        )


Build: TypeAlias = Callable[[DataFrame, Known, Kept], DataFrame]
"""(changes, what to reckon with, what keeps intermediate results) -> rows."""


def settled(
    changes: DataFrame,
    columns: Sequence[str],
    build: Build,
    known: Known,
    measures: Mapping[str, Column] | None = None,
) -> Folded:
    """Build rows of changes and run it; again, with more care, when the batch turned out to need it."""
    asked = [measure.alias(name) for name, measure in (measures or {}).items()]
    while True:
        kept = Kept()
        watched = Watched(changes, columns)
        try:
            rows = kept(build(watched.changes, known, kept))
            measured = rows.agg(f.count(f.lit(1)).alias("rows"), *asked).collect()[0]
            facts = watched.facts
        except BaseException:
            kept.release()
            raise
        if known.covers(facts):
            return Folded(rows, facts, measured, known.unsent, kept)
        kept.release()
        known = known.and_also(facts)


def fold(
    changes: DataFrame,
    key: Sequence[str],
    columns: Sequence[str],
    *,
    carries: Iterable[str] = (),
    measures: Mapping[str, Column] | None = None,
) -> Folded:
    """Fold the changes of one source epoch; `columns` are the table's own. Runs them, once or twice.

    Their session should be their own: a setting is made in it.
    """

    def build(changes: DataFrame, known: Known, kept: Kept) -> DataFrame:
        rows = changes.filter("_op <> 't'")
        return last_changes(rows, key, columns, known.unsent, kept if known.has_moves else None)

    folded = settled(changes, columns, build, Known(frozenset(carries), has_truncates=True), measures)
    at = folded.facts.truncated_at
    return folded if at is None else replace(folded, rows=folded.rows.filter(is_after(at)))


def is_after(at: tuple[int, int]) -> Column:
    """Whether a change is later than a position."""
    return position() > f.struct(
        *(f.lit(part).cast("long").alias(name) for part, name in zip(at, POSITION, strict=True))
    )


def last_changes(
    changes: DataFrame, key: Sequence[str], columns: Sequence[str], carries: frozenset[str], moved: Kept | None
) -> DataFrame:
    """Return the last change of each key; `moved` as `carry` has it."""
    if carries:
        last = carry(changes, key, columns, carries, moved).filter("_next IS NULL")
    else:
        latest_first = Window.partitionBy(*map(col, key)).orderBy(*(f.col(name).desc() for name in POSITION))
        last = (
            changes.withColumn("_number", f.row_number().over(latest_first))
            .filter("_number = 1")
            .withColumns(nothing_unsent(changes, key))
        )
    return last.select(
        *map(col, columns),
        f.when(f.col("_op") == "d", "d").otherwise("u").alias("_op"),
        "_source_epoch",
        *POSITION,
        "_unsent",
        "_from",
    )


def nothing_unsent(changes: DataFrame, key: Sequence[str]) -> dict[str, Column]:
    """Return the columns that say that every value is in the batch."""
    types = ", ".join(f"{quoted(name)}: {changes.schema[name].dataType.simpleString()}" for name in key)
    return {
        "_unsent": f.lit(None).cast("array<string>"),
        "_from": f.lit(None).cast(f"struct<{types}>"),
    }


def carry(
    changes: DataFrame, key: Sequence[str], columns: Sequence[str], carries: frozenset[str], moved: Kept | None
) -> DataFrame:
    """Return every change with the values that earlier ones have told, and the position and time of its key's `_next`.

    A value belongs to the row it was told of, not to its key: it is carried up to the next reset. All that is needed
    for that is where a value was told and where the row began, so one pass over the sorted changes does. `moved` is
    given when there are rows whose key has changed: it keeps what finding their values takes.
    """
    order = Window.partitionBy(*map(col, key)).orderBy(*POSITION)
    carried = [name for name in columns if name in carries and name not in key]
    told = {f"_told_{number}": name for number, name in enumerate(carried)}
    begins = f.struct(*POSITION, ((f.col("_op") == "c") & (f.size("_unchanged") > 0)).alias("is_moved"))
    changes = changes.withColumns(
        {
            **{
                column: f.last(f.when(_is_sent(name), _at_position(name)), ignorenulls=True).over(order)
                for column, name in told.items()
            },
            "_began": f.last(f.when(f.col("_op").isin(*RESETS), begins), ignorenulls=True).over(order),
            "_next": f.lead(f.struct(*POSITION, "_ts")).over(order),
        }
    )
    is_known = {
        name: f.col(column).isNotNull()
        & (f.col("_began").isNull() | (f.col(f"{column}.at") >= struct_of(POSITION, "_began")))
        for column, name in told.items()
    }
    unsent = f.array_compact(f.array(*(f.when(~is_known[name], f.lit(name)) for name in carried)))
    changes = changes.withColumns(
        {
            **{name: f.when(is_known[name], f.col(f"{column}.value")) for column, name in told.items()},
            "_unsent": f.when(f.size(unsent) > 0, unsent),
            "_from": nothing_unsent(changes, key)["_from"],
        }
    ).drop(*told)
    return changes if moved is None else moves.resolved(changes, key, carried, order, moved)


def _is_sent(name: str) -> Column:
    return ~f.coalesce(f.array_contains("_unchanged", name), f.lit(False))


def _at_position(name: str) -> Column:
    return f.struct(col(name).alias("value"), position().alias("at"))
