"""What both writers do alike: decide whether a batch is due, evolve the schema, fold, and commit once.

Owns the order of these and what each mode does with a batch; refuses to know how a table is stored: that is a `Store`,
whose `Target` is one table at one version. Everything that is read of a table is read at that version, and the commit
is made on top of exactly that version: whoever commits in between makes it fail with TableConflict, and then all of it
starts again from what the table holds now.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from walstream import logs
from walstream.errors import TableConflict
from walstream.positions import Lsn
from walstream.spark.belonging import Belonging
from walstream.spark.changes import Changes
from walstream.spark.evolution import compare
from walstream.spark.fold import WHOLE_PLANS
from walstream.spark.small.task import SmallChanges
from walstream.spark.writers import Applied, TablePlan
from walstream.spark.writers.batch import Batch, Habits, check, commit_of
from walstream.spark.writers.delta_log import DeltaLog
from walstream.spark.writers.files import TableFiles
from walstream.spark.writers.targets import Commit, SmallBatch, Store, Target, Written

Apply: TypeAlias = Callable[[Target, int | None], Applied | None]
"""Applies a batch to a table that has applied this much; None: it cannot, and nothing was done."""

log = logs.get(__name__)

CONFLICTS_MAX: Final = 5
"""Commits of others in a row before a batch is given up."""

SETTINGS: Final = {
    **WHOLE_PLANS,
    "spark.sql.session.timeZone": "UTC",
    # Spark writes the plan of every query out for its page; that of a merge is long, and nobody reads it there.
    "spark.sql.maxPlanStringLength": "10000",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # The calendar of PostgreSQL, of Arrow and of Delta, whatever the year.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    # How much of a table one task reads and writes anew, and so how large its files become.
    "spark.sql.files.maxPartitionBytes": str(32 << 20),
    # Rows can be large: those that are kept are put together by the thousand, not by the ten thousand.
    "spark.sql.inMemoryColumnarStorage.batchSize": "1000",
    # The files of a table are known by name: a job to list them would cost more than reading them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}


FEW_ROWS: Final = 50_000
FEW: Final = {
    # So few rows are folded by one task: to send them from one to another, and to plan anew after each stage, costs
    # more than the rows do.
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
}
"""What a session is set to for a batch of few rows, and back for others."""


class TableWriter:
    """A writer, as walstream.spark.writers has it."""

    def __init__(self, store: Store, spark: SparkSession) -> None:
        self._store = store
        self._spark = self._ready(spark.newSession())
        self._usual = {name: str(self._spark.conf.get(name)) for name in FEW}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._habits: defaultdict[str, Habits] = defaultdict(Habits)

    def _ready(self, spark: SparkSession) -> SparkSession:
        for name, value in {**SETTINGS, **self._store.settings}.items():
            spark.conf.set(name, value)
        return spark

    def applied(self, plan: TablePlan) -> int | None:
        """Return the LSN before which the table holds everything of the plan's source epoch."""
        return self._store.open(self._spark, plan.path).applied(plan.app_id)

    def version(self, path: str) -> int | None:
        """Return the newest version of a table."""
        return self._store.open(self._spark, path).version

    def compact(self, path: str, key: tuple[str, ...] = ()) -> int:
        """Make few large files of many small ones; return how many are gone."""
        with self._locks[path]:
            return self._store.compact(self._spark, path, key)

    def vacuum(self, path: str, keep_versions: Iterable[int] = (), retention_hours: float = 168) -> int:
        """Delete files that no version of the last hours and none of these needs; return how many."""
        with self._locks[path]:
            return DeltaLog(TableFiles(path)).vacuum(sorted(set(keep_versions)), retention_hours)

    def clean(self, path: str) -> None:
        """Remove what a killed driver has left."""
        with self._locks[path]:
            self._store.clean(path)

    def apply(self, plan: TablePlan, changes: DataFrame | Changes) -> Applied:
        """Bring the table to the plan's end LSN."""
        plan.check()
        changes = changes if isinstance(changes, Changes) else Changes.of(changes)
        spark = self._ready(changes.session)
        is_few = plan.rows_due is not None and plan.rows_due <= FEW_ROWS
        for name, value in FEW.items():
            spark.conf.set(name, value if is_few else self._usual[name])
        changes = changes.for_one_task() if is_few else changes
        done = self._until_first(plan, spark, lambda target, applied: self._apply(plan, changes, target, applied))
        assert done is not None, "Spark can do any batch"
        return done

    def apply_small(self, plan: TablePlan, changes: SmallChanges, belonging: Belonging) -> Applied | None:
        """Bring the table to the plan's end LSN with one task; None: nothing is done, it takes more than that."""
        plan.check()
        return self._until_first(
            plan, self._spark, lambda target, applied: self._apply_small(plan, changes, belonging, target, applied)
        )

    def _until_first(self, plan: TablePlan, spark: SparkSession, apply: Apply) -> Applied | None:
        """Apply a batch that is due, again when another commit came first, to a table with the plan's schema."""
        with self._locks[plan.path]:
            for _ in range(CONFLICTS_MAX):
                try:
                    target = self._store.open(spark, plan.path)
                    applied = target.applied(plan.app_id)
                    if applied is not None and applied >= plan.end_lsn + plan.is_replacing:
                        assert target.version is not None, "it has applied something"
                        return Applied(target.version, applied, is_replay=True)
                    if target.version is not None and not plan.is_replacing:
                        target = self._evolved(plan, target, spark)
                    return apply(target, applied)
                except TableConflict as conflict:
                    log.warning("table changed by another", table=plan.name, error=conflict.message)
            raise TableConflict(
                f"{plan.name} was changed by another writer each of {CONFLICTS_MAX} times that a batch was ready.",
                "See that only one pipeline writes to the warehouse.",
            )

    def _apply(self, plan: TablePlan, changes: Changes, target: Target, applied: int | None) -> Applied:
        batch = Batch(plan, changes, applied, target, self._habits[plan.path])
        try:
            written = getattr(batch, plan.mode)()
        finally:
            batch.release()
        self._habits[plan.path] = batch.habits
        return _done(plan, written, batch.rows_in, batch.rows_folded)

    def _apply_small(
        self, plan: TablePlan, changes: SmallChanges, belonging: Belonging, target: Target, applied: int | None
    ) -> Applied | None:
        # What is read lies after what was applied, unless it is read again from further back.
        is_again = applied is not None and applied > plan.begin_lsn and not plan.is_replacing
        batch = SmallBatch(
            plan.mode,
            plan.key,
            plan.column_names,
            plan.schema,
            changes,
            belonging,
            plan.source_epoch,
            applied if is_again else None,
            plan.is_replacing,
        )
        found = target.small(batch, lambda done: check(plan, done.rows, done.foreign), commit_of(plan, applied))
        return None if found is None else _done(plan, found.written, found.done.rows, found.done.folded)

    def _evolved(self, plan: TablePlan, target: Target, spark: SparkSession) -> Target:
        """Return the table with the plan's schema. Raises SchemaIncompatible, TableUnfit."""
        evolution = compare(plan.name, plan.mode, target.schema, plan.schema)
        if not evolution:
            return target
        # Its own application, so that it says nothing about rows; a version that only grows.
        app_id = f"{plan.app_id}/schema/{plan.schema_version}"
        commit = Commit(app_id, (target.version or 0) + 1, f"walstream: {evolution}")
        if evolution.is_rewrite:
            rows = target.rows().select(*(f.expr(value).alias(name) for name, value in evolution.values))
            target.replace(rows, plan.schema, commit)
        else:
            target.add_columns(evolution.added, commit)
        log.info("table evolved", table=plan.name, schema_version=plan.schema_version, change=str(evolution))
        return self._store.open(spark, plan.path)


def _done(plan: TablePlan, written: Written, rows_in: int, rows_folded: int) -> Applied:
    log.debug("table committed", table=plan.name, version=written.version, lsn=str(Lsn(plan.end_lsn)))
    return Applied(
        written.version,
        plan.end_lsn,
        rows_in=rows_in,
        rows_folded=rows_folded,
        files_added=written.files_added,
        files_removed=written.files_removed,
    )
