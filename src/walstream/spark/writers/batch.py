"""One batch of one table: what its mode makes of the changes, ready for one commit.

Owns the three modes, ordinary and replacing; refuses to know how a commit is made (a `Target` does) and when one is due
(applying.py). Changes are read once, twice when the batch turns out to have something rare in it, and never collected.

    mirror     fold; then merge by key, guarded by position: a row is never replaced by an older state of it
    history    versions; then close what is true now and insert the rest
    append     as it comes

A batch of mirrored rows that are all new, as most of a growing table's are, is written as it comes, without a fold;
whether it was such a batch is known before it is committed. A truncate makes of each an overwrite. A replacing batch,
which finishes a snapshot, is one as well: the snapshot's rows with the changes since merged into them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as f
from pyspark.sql import types as t

from walstream.errors import CorruptCommits, RowsMissing
from walstream.positions import Lsn
from walstream.spark import history
from walstream.spark.changes import Changes
from walstream.spark.columns import POSITION, col, quoted, typed
from walstream.spark.fold import Folded, fold
from walstream.spark.kept import Kept
from walstream.spark.writers import TablePlan
from walstream.spark.writers.merging import Merge, filled, merged
from walstream.spark.writers.targets import Commit, Staged, Target, Written, unchecked

PEEKED_ROWS: Final = 1_000
"""So many rows of a large batch, of whose table nothing is known, tell whether it is worth writing it as it comes."""
LARGE_ROWS: Final = 50_000


class Habits(NamedTuple):
    """What the last batch of a table was like, and the next one probably is."""

    carries: frozenset[str] = frozenset()
    """Columns that changes have left out."""
    is_growing: bool | None = None
    """Whether there were new rows only; None: not known."""


def commit_of(plan: TablePlan, applied: int | None) -> Commit:
    """Return what the commit of a plan carries, to a table that has applied this much."""
    # A snapshot may end at the LSN that the table has: then there is nothing to record but the rows.
    app_id = None if applied == plan.end_lsn else plan.app_id
    note = {"end_lsn": str(Lsn(plan.end_lsn)), "snapshot": plan.snapshot}
    return Commit(app_id, plan.end_lsn, json.dumps({"walstream": note}))


def check(plan: TablePlan, rows: int, foreign: int) -> None:
    """Compare what was read with what the commit points say. Raises RowsMissing, CorruptCommits."""
    if plan.rows_due is not None and rows != plan.rows_due:
        raise RowsMissing(
            f"{rows:,} changes of {plan.name} were read up to {Lsn(plan.end_lsn)}; "
            f"the commit points say {plan.rows_due:,}.",
            "The log was damaged or written to by hand: do not read past this point.",
        )
    if foreign:
        raise CorruptCommits(f"{foreign:,} changes of {plan.name} are of another source epoch than the plan.")


class Batch:
    """The changes of one plan on their way into one version of its table."""

    def __init__(self, plan: TablePlan, changes: Changes, applied: int | None, target: Target, habits: Habits) -> None:
        """Take what the table holds already, and what its changes have been like."""
        self._plan = plan
        self._target = target
        self._kept = Kept()
        self._columns = plan.column_names
        self._seen = Observation()
        self._staged: Staged | None = None
        self._source = changes
        self._applied = applied
        self._habits = habits
        self.carries = habits.carries
        self.rows_folded = 0
        self._was_tried = False
        self._commit = replace(commit_of(plan, applied), check=self._check)

    @cached_property
    def _changes(self) -> DataFrame:
        """The changes that are to be applied, counted before anything is left out."""
        plan, changes = self._plan, self._source.frame
        belongs = f.expr(plan.where) if plan.where else f.lit(True)
        is_foreign = f.coalesce(belongs & (f.col("_source_epoch") != plan.source_epoch), f.lit(False))
        changes = changes.observe(
            self._seen,
            f.count(f.lit(1)).alias("rows"),
            f.count(f.when(is_foreign, 1)).alias("foreign"),
            f.count(f.when(belongs & ~_is_new(), 1)).alias("not_new"),
        )
        if plan.where:
            changes = changes.filter(belongs)
        # A number that is another one in each batch makes Spark compile each anew: so only where it is needed.
        if (lsn := self._from_lsn) is not None:
            changes = changes.filter(f.col("_commit_lsn") >= lsn)
        return changes

    @property
    def _from_lsn(self) -> int | None:
        """From where on changes are to be applied; None: all of them."""
        plan, applied = self._plan, self._applied
        return applied if applied is not None and applied > plan.begin_lsn and not plan.is_replacing else None

    def _check(self) -> None:
        """Compare what was read with what the commit points say. Raises RowsMissing, CorruptCommits."""
        check(self._plan, self._facts["rows"], self._facts["foreign"])

    @property
    def _facts(self) -> Mapping[str, int]:
        """What was counted when the changes were read."""
        if self._staged is not None:
            return {"rows": self._staged.rows_in, "foreign": 0, "not_new": int(not self._staged.are_new)}
        seen: Mapping[str, int] = self._seen.get
        return seen

    @property
    def rows_in(self) -> int:
        """Changes that were read."""
        return self._facts["rows"]

    @property
    def habits(self) -> Habits:
        """What the batch was like."""
        # Of all changes nobody asks whether they are new.
        is_growing = None if self._plan.mode == "append" else not self._facts["not_new"]
        return Habits(self.carries, is_growing)

    def release(self) -> None:
        """Give back what was kept."""
        self._kept.release()

    # --- append

    def append(self) -> Written:
        """Commit every change as a row."""
        plan = self._plan
        if (written := self._straight(is_new_only=False)) is not None:
            return written
        rows = self._changes
        if "_old_key" not in rows.columns:
            rows = rows.withColumn("_old_key", f.lit(None).cast("string"))
        rows = rows.select(*typed(plan.schema))
        if plan.is_replacing or self._target.version is None:
            written = self._target.replace(rows, plan.schema, self._commit)
        else:
            written = self._target.append(rows, self._commit)
        self.rows_folded = self.rows_in
        return written

    # --- mirror

    def mirror(self) -> Written:
        """Commit the last state of every row that was changed."""
        plan, target = self._plan, self._target
        if plan.is_replacing:
            return target.replace(self._mirror_of_snapshot(), plan.schema, self._commit)
        measures = target.measures(plan.key) if target.version is not None else {}
        if self._may_be_new() and (written := self._new(measures)) is not None:
            return written
        folded = self._folded(fold(self._changes, plan.key, self._columns, carries=self.carries, measures=measures))
        if folded.has_truncate or target.version is None:
            return target.replace(_live(folded.rows, plan.schema), plan.schema, self._commit)
        rows = folded.rows
        if folded.facts.has_moves:
            homes = rows.filter("_from IS NOT NULL").select("_from.*")
            rows = filled(rows, target.near(plan.key, homes), plan.key, self._unsent, f.col("_from"))
        return target.merge(self._mirror_merge(rows), folded.measured, self._commit)

    def _may_be_new(self) -> bool:
        """Whether it is worth trying to write the batch as it comes."""
        if self._habits.is_growing is not None or (self._plan.rows_due or 0) < LARGE_ROWS:
            return bool(self._habits.is_growing)
        if self._source.log is not None:
            return True  # Each task looks at its first rows by itself.
        return all(row["is_new"] for row in self._source.frame.select(_is_new().alias("is_new")).take(PEEKED_ROWS))

    def _new(self, measures: Mapping[str, Column]) -> Written | None:
        """Commit rows that are all new, the shortest way there is; None: they are not, and nothing was committed."""
        written = self._straight(is_new_only=True)
        return written if self._was_tried else self._insert(measures)

    def _straight(self, *, is_new_only: bool) -> Written | None:
        """Commit changes straight from the log; None: that cannot be, and nothing was committed."""
        plan, log = self._plan, self._source.log
        if log is None or plan.is_replacing:
            return None
        staged = self._target.stage(plan, log, self._from_lsn or 0, is_new_only)
        if staged is None:
            return None
        self._was_tried = True
        if not staged.are_new:
            self._target.drop(staged)
            return None
        self._staged = staged
        written = self._target.take(staged, plan, self._commit)
        if written is None:
            self._staged = None
        else:
            self.rows_folded = sum(part.rows for part in staged.parts)
        return written

    def _insert(self, measures: Mapping[str, Column]) -> Written | None:
        """Commit rows that are all new; None: they are not, and nothing was committed."""
        plan, seen = self._plan, Observation()
        changes = self._changes
        if measures:
            changes = changes.observe(seen, *(measure.alias(name) for name, measure in measures.items()))

        def measured() -> Mapping[str, Any] | None:
            if self._seen.get["not_new"]:
                return None
            return seen.get if measures else {}

        rows = changes.select(*typed(plan.schema))
        written = self._target.insert(rows, plan.schema, plan.key, self._commit, measured)
        if written is not None:
            self.rows_folded = self.rows_in
        return written

    def _mirror_of_snapshot(self) -> DataFrame:
        """Return the rows of a snapshot with the changes since then."""
        plan = self._plan
        if plan.rows_due is not None and plan.snapshot_rows == plan.rows_due:
            return self._changes.filter("_op = 'r'").select(*typed(plan.schema))
        # Both halves are read from here: what was decoded once is not decoded again.
        changes = self._kept(self._changes, StorageLevel.DISK_ONLY)
        there = changes.filter("_op = 'r'")
        folded = self._folded(fold(changes.filter("_op <> 'r'"), plan.key, self._columns, carries=self.carries))
        if folded.has_truncate:
            return _live(folded.rows, plan.schema)
        rows = folded.rows
        if folded.facts.has_moves:
            rows = filled(rows, there, plan.key, self._unsent, f.col("_from"))
        return merged(there.select(*typed(plan.schema)), self._mirror_merge(rows))

    def _mirror_merge(self, rows: DataFrame) -> Merge:
        plan = self._plan
        names = plan.schema.names
        unsent = set(self._unsent)
        here = ("_source_epoch", *POSITION)
        return Merge(
            rows,
            self.rows_folded,
            plan.key,
            names,
            updates={name: _value(name, name in unsent) for name in names},
            inserts={name: quoted(name, "s") for name in names},
            is_applied=_is_later(here, here),
            is_delete="s._op = 'd'",
            is_insert="s._op <> 'd'",
        )

    # --- history

    def history(self) -> Written:
        """Commit every version of every row that was changed."""
        plan, target = self._plan, self._target
        is_new = plan.is_replacing or target.version is None
        measures = {"unsent": f.count("_unsent")} | ({} if is_new else dict(target.measures(plan.key)))
        folded = self._folded(
            history.versions(self._changes, plan.key, self._columns, carries=self.carries, measures=measures)
        )
        rows, closes = folded.rows.filter("NOT _is_close"), folded.rows.filter("_is_close")
        if not is_new and folded.measured["unsent"]:
            homes = rows.filter("_unsent IS NOT NULL").select(_home(plan.key).alias("_home")).select("_home.*")
            there = target.near(plan.key, homes).filter(history.NOW)
            rows = filled(rows, there, plan.key, self._unsent, _home(plan.key))
        inserts = rows.select(*typed(plan.schema))
        if is_new:
            return target.replace(inserts, plan.schema, self._commit)
        if folded.has_truncate:
            first = history.truncates(self._changes)
            before = history.closed(target.rows(), closes, plan.key, first)
            return target.replace(before.unionByName(inserts), plan.schema, self._commit)
        both = rows.unionByName(closes)
        return target.merge(self._history_merge(both), folded.measured, self._commit)

    def _history_merge(self, rows: DataFrame) -> Merge:
        names = self._plan.schema.names
        return Merge(
            rows,
            self.rows_folded,
            self._plan.key,
            names,
            updates={"_valid_to_lsn": "s._commit_lsn", "_valid_to_seq": "s._seq", "_valid_to": "s._ts"},
            inserts={name: quoted(name, "s") for name in names},
            is_applied=_is_later(("_source_epoch", *POSITION), ("_source_epoch", "_valid_from_lsn", "_valid_from_seq")),
            is_insert="NOT s._is_close",
            is_matching="s._is_close",
            open_column="_valid_to_lsn",
        )

    # --- both

    def _folded(self, folded: Folded) -> Folded:
        """Check what was read, and remember what the next batch should reckon with."""
        self._kept.take(folded.kept)
        self._check()
        self._commit = replace(self._commit, check=unchecked)
        self.carries = folded.carries
        self.rows_folded = folded.measured["rows"]
        return folded

    @property
    def _unsent(self) -> Sequence[str]:
        return [name for name in self._columns if name in self.carries and name not in self._plan.key]


def _is_new() -> Column:
    """Whether a change is a row that was not there before: inserted, and not only moved to another key."""
    return (f.col("_op") == "c") & (f.coalesce(f.size("_unchanged"), f.lit(0)) <= 0)


def _live(rows: DataFrame, schema: t.StructType) -> DataFrame:
    """Return the rows that are there after a fold."""
    return rows.filter("_op <> 'd'").select(*typed(schema))


def _home(key: Sequence[str]) -> Column:
    """Return the key under which the table has what a row lacks."""
    own = f.struct(*(col(name).alias(name) for name in key))
    return f.when(f.col("_unsent").isNotNull(), f.coalesce(f.col("_from"), own))


def _value(name: str, may_be_unsent: bool) -> str:
    if not may_be_unsent:
        return quoted(name, "s")
    literal = name.replace("\\", "\\\\").replace("'", "\\'")
    kept, new = quoted(name, "t"), quoted(name, "s")
    return f"CASE WHEN array_contains(s._unsent, '{literal}') THEN {kept} ELSE {new} END"


def _is_later(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the SQL that compares the position of a change with that of the row it matches."""
    one = ", ".join(f"'{number}', s.{name}" for number, name in enumerate(ours))
    other = ", ".join(f"'{number}', t.{name}" for number, name in enumerate(theirs))
    return f"named_struct({one}) > named_struct({other})"
