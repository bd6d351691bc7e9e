"""Delta tables written by Delta's own jars, on any cluster that has them: MERGE, overwrite, append.

Owns how the commits of walstream are said to delta-spark; refuses to know what the rows mean. The application and its
version are settings of the session that a batch was read on, so each table of a batch has one of its own. delta-spark
leaves out a commit whose version the table has already, silently; whether one is due is decided before (applying.py).

Changes are counted before anything is committed: what would be read and committed in one go is kept on disk first.

Delta begins its transaction when it is told to write, which is later than the table was opened, and knows nothing of
what was decided in between. So the rows that it writes bring a guard along, which is read within the transaction and
fails when the table is not at the version that was opened. From there on Delta itself sees to it: who reads and writes
the version of an application fails when another commit of that application comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Final

import pyarrow as pa
from delta.exceptions import (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    DeltaConcurrentModificationException,
    MetadataChangedException,
    ProtocolChangedException,
)
from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark import StorageLevel
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from walstream.errors import TableConflict, UsageError
from walstream.spark.changes import LogRead
from walstream.spark.columns import col, quoted, typed
from walstream.spark.failures import meaning
from walstream.spark.kept import Kept
from walstream.spark.session import DELTA_CATALOG, DELTA_EXTENSION, delta_package
from walstream.spark.small.task import SmallDone
from walstream.spark.writers import TablePlan
from walstream.spark.writers.delta_log import UNTRIMMED, DeltaLog, needs_ntz
from walstream.spark.writers.files import TableFiles
from walstream.spark.writers.merging import Merge
from walstream.spark.writers.targets import Commit, Measured, SmallBatch, Staged, Written, unchecked

PROPERTIES: Final = {
    "delta.checkpointInterval": "25",
    **UNTRIMMED,
    # What one of the writers could not read or write.
    "delta.enableDeletionVectors": "false",
    "delta.columnMapping.mode": "none",
    "delta.enableRowTracking": "false",
    "delta.enableTypeWidening": "false",
}

CONFLICTS: Final = (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    DeltaConcurrentModificationException,
    MetadataChangedException,
    ProtocolChangedException,
)
"""What Delta says when another commit came first: in Python none of these is a kind of another."""

HISTORY: Final = 20
"""Commits among which one's own must be: since it was made, only others' can have come."""

_APP_ID: Final = "spark.databricks.delta.write.txnAppId"
_APP_VERSION: Final = "spark.databricks.delta.write.txnVersion"
_NOTE: Final = "spark.databricks.delta.commitInfo.userMetadata"


class DeltaSparkStore:
    """Tables of a session that has Delta's jars."""

    settings: Mapping[str, str] = {
        # One task reads a table's log, not fifty.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.databricks.delta.schema.autoMerge.enabled": "false",
    }

    def __init__(self, spark: SparkSession) -> None:
        """See that the jars and the settings are there. Raises UsageError."""
        if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
            raise UsageError(
                "The Spark session has no Delta in it.",
                f"Set spark.jars.packages to {delta_package()} (or spark.jars to the files), "
                f"spark.sql.extensions to {DELTA_EXTENSION} and spark.sql.catalog.spark_catalog to {DELTA_CATALOG}.",
            )

    def open(self, spark: SparkSession, path: str) -> DeltaSparkTarget:
        """Return the newest version of a table."""
        return DeltaSparkTarget(spark, TableFiles(path))

    def compact(self, spark: SparkSession, path: str, _key: Sequence[str], /) -> int:
        """Let Delta make few files of many."""
        target = self.open(spark, path)
        if target.version is None:
            return 0
        metrics = target.delta.optimize().executeCompaction().select("metrics.numFilesRemoved").collect()
        return int(metrics[0][0]) if metrics else 0

    def clean(self, path: str) -> None:
        """Leave it to `vacuum`: Delta writes beside the table's files."""


class DeltaSparkTarget:
    """A table at one version."""

    def __init__(self, spark: SparkSession, files: TableFiles) -> None:
        self._spark = spark
        self._files = files
        self._log = DeltaLog(files)
        self.version = self._log.version

    @cached_property
    def schema(self) -> t.StructType:
        """The table's schema, metadata included."""
        return self._log.schema

    @property
    def delta(self) -> DeltaTable:
        """The table as Delta's own API has it."""
        return DeltaTable.forPath(self._spark, self._files.uri)

    def applied(self, app_id: str) -> int | None:
        """Return the last version that an application has committed."""
        return self._log.applied(app_id)

    def rows(self) -> DataFrame:
        """Return everything."""
        return self._spark.read.format("delta").option("versionAsOf", str(self.version)).load(self._files.uri)

    def near(self, _key: Sequence[str], _keys: DataFrame, /) -> DataFrame:
        """Return everything: which files to read is Delta's business."""
        return self.rows()

    def measures(self, _key: Sequence[str], /) -> Mapping[str, Column]:
        """Ask nothing."""
        return {}

    def add_columns(self, fields: Sequence[t.StructField], commit: Commit) -> None:
        """Commit new columns."""
        self._allow(fields)
        nothing = self._spark.createDataFrame([], t.StructType([*self.schema.fields, *fields]))
        self._write(nothing, "append", commit, {"mergeSchema": "true"})

    def append(self, rows: DataFrame, commit: Commit) -> Written:
        """Commit more rows."""
        with self._counted(rows, commit):
            return self._write(rows, "append", commit)

    def replace(self, rows: DataFrame, schema: t.StructType, commit: Commit) -> Written:
        """Commit these rows and this schema in place of what is there."""
        rows = rows.select(*typed(schema))
        with self._counted(rows, commit):
            if self.version is None:
                return self._write(rows, "errorifexists", commit, PROPERTIES)
            self._allow(schema.fields)
            return self._write(rows, "overwrite", commit, {"overwriteSchema": "true"})

    def insert(
        self, _rows: DataFrame, _schema: t.StructType, _key: Sequence[str], _commit: Commit, _measured: Measured, /
    ) -> None:
        """Leave it to `merge`: Delta commits what it writes, so nothing could be looked at in between."""

    def stage(self, _plan: TablePlan, _log: LogRead, _from_lsn: int, _is_new_only: bool, /) -> None:
        """Leave it to Delta, which writes its files by itself."""

    def take(self, _staged: Staged, _plan: TablePlan, _commit: Commit, /) -> Written | None:
        """Take nothing: nothing is staged."""
        raise AssertionError("nothing is staged")

    def drop(self, _staged: Staged, /) -> None:
        """Remove nothing: nothing is staged."""

    def merge(self, merge: Merge, _measured: Row, commit: Commit, /) -> Written:
        """Commit a merge."""
        commit.check()
        merging = self.delta.alias("t").merge(self._guarded(merge.rows).alias("s"), merge.condition)
        if merge.is_delete != "false":
            merging = merging.whenMatchedDelete(f"({merge.is_applied}) AND ({merge.is_delete})")
        updates: dict[str, str | Column] = {quoted(name): value for name, value in merge.updates.items()}
        inserts: dict[str, str | Column] = {quoted(name): value for name, value in merge.inserts.items()}
        merging = merging.whenMatchedUpdate(merge.is_applied, updates)
        merging = merging.whenNotMatchedInsert(merge.is_insert, inserts)
        with self._committing(commit):
            merging.execute()
        return self._written(commit)

    def small(self, _batch: SmallBatch, _check: Callable[[SmallDone], None], _commit: Commit, /) -> None:
        """Leave it to `merge`: what Delta's own code commits, it writes."""

    def _write(self, rows: DataFrame, mode: str, commit: Commit, options: Mapping[str, str] | None = None) -> Written:
        guarded = rows if self.version is None else self._guarded(rows)
        with self._committing(commit):
            guarded.write.format("delta").mode(mode).options(**(options or {})).save(self._files.uri)
        return self._written(commit)

    def _guarded(self, rows: DataFrame) -> DataFrame:
        """Return rows that cannot be read when the table is at another version by then."""
        files, version = self._files, self.version

        def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            newest = max((at for at, _ in files.log_files()), default=None)
            if newest != version:
                raise TableConflict(f"Another commit to {files.uri} came first: it is at {newest}, not at {version}.")
            yield from batches

        guard = self._spark.range(0, 1, 1, 1).mapInArrow(check, "id long").select(f.lit(1).alias("_guard"))
        return rows.crossJoin(f.broadcast(guard)).select(*map(col, rows.columns))

    def _written(self, commit: Commit) -> Written:
        """Return what the commit has made, which need not be the newest version any more. Raises TableConflict."""
        recent = self.delta.history(HISTORY).select("version", "userMetadata", "operationMetrics").collect()
        before = -1 if self.version is None else self.version
        own = [row for row in recent if row["userMetadata"] == commit.note and row["version"] > before]
        if not own:
            # Delta leaves a commit out, without a word, whose version another one of the application has passed.
            raise TableConflict(f"Another commit to {self._files.uri} came first.")
        last = max(own, key=lambda row: int(row["version"]))
        metrics: dict[str, str] = last["operationMetrics"] or {}
        added = metrics.get("numTargetFilesAdded") or metrics.get("numFiles") or 0
        removed = metrics.get("numTargetFilesRemoved") or metrics.get("numRemovedFiles") or 0
        return Written(last["version"], int(added), int(removed))

    @contextmanager
    def _counted(self, rows: DataFrame, commit: Commit) -> Iterator[None]:
        """Have the rows read and checked before they are committed, if that has not been done."""
        if commit.check is unchecked:
            yield
            return
        kept = Kept()
        try:
            kept(rows, StorageLevel.DISK_ONLY).count()
            commit.check()
            yield
        finally:
            kept.release()

    @contextmanager
    def _committing(self, commit: Commit) -> Iterator[None]:
        """Say what the next commit carries. Raises TableConflict when another one came first."""
        settings = {_NOTE: commit.note}
        if commit.app_id is not None:
            settings |= {_APP_ID: commit.app_id, _APP_VERSION: str(commit.app_version)}
        for name, value in settings.items():
            self._spark.conf.set(name, value)
        try:
            yield
        except CONFLICTS as error:
            raise TableConflict(f"Another commit to {self._files.uri} came first ({error}).") from error
        except AnalysisException as error:
            if self.version is not None or error.getCondition() != "DELTA_PATH_EXISTS":
                raise
            raise TableConflict(f"Another writer has just created {self._files.uri}.") from error
        except (PySparkException, Py4JJavaError) as error:
            # What a task says comes back bare when it failed in a broadcast that the driver was waiting for.
            told = meaning(error)
            if not isinstance(told, TableConflict):
                raise
            raise told from error
        finally:
            for name in settings:
                self._spark.conf.unset(name)

    def _allow(self, fields: Sequence[t.StructField]) -> None:
        """Let the table have times without a zone, before it has any."""
        if needs_ntz(fields) and not self._log.has_ntz:
            self.delta.addFeatureSupport("timestampNtz")
