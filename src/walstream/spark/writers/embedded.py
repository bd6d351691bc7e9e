"""Delta tables without a jar: Spark writes and reads the Parquet files, `deltalake` keeps the log.

Owns how files become commits; refuses to know what the rows mean. No row passes through the driver: executors find the
files that a merge touches, write what these become into new ones, and the driver commits the names of both, with what
the footers say, in one transaction. Its memory therefore depends on the number of files, not of rows.

(`deltalake` can merge by itself, in the process that calls it: measured, 2 M rows into 10 M took 4.4 GB there, 1.8 GB
with `streamed_exec`, because the source is one side of a hash join in memory. So it is not asked to.)

Rows that are all new are written once, as they come; that they are new is proved by the keys in the files, before the
commit. Any other merge costs what it touches: candidates are told from statistics (pruning.py), of these only the
columns of the key are read to find the files that do hold a matching row, and only those are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from deltalake import CommitProperties, Schema, TableFeatures
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from walstream.errors import TableUnfit
from walstream.spark.changes import LogRead
from walstream.spark.columns import col
from walstream.spark.kept import Kept
from walstream.spark.small.task import SmallDone, SmallTask, run_all
from walstream.spark.writers import TablePlan, straight
from walstream.spark.writers.committing import commit_files
from walstream.spark.writers.delta_log import UNTRIMMED, DeltaLog, needs_ntz
from walstream.spark.writers.files import DataFile, TableFiles, now_ms
from walstream.spark.writers.merging import Merge, inserted, merged
from walstream.spark.writers.pruning import FileFacts, Pruning, told
from walstream.spark.writers.targets import Commit, Measured, SmallBatch, SmallWritten, Staged, Written

CONFIGURATION: Final = {"delta.checkpointInterval": "25", **UNTRIMMED}
"""Whoever opens a table reads every commit since its last checkpoint."""

ROWS_PER_FILE: Final = 1_000_000
ROW_GROUP_BYTES: Final = 16 << 20
"""What a task that writes holds in memory until it is on the disk."""
SMALL_BYTES: Final = 32 << 20
"""Files below this are worth compacting."""
FILES_MIN: Final = 4
"""Fewer small files than this are left alone."""


class EmbeddedStore:
    """Tables in folders."""

    settings: Mapping[str, str] = {}

    def open(self, spark: SparkSession, path: str) -> EmbeddedTarget:
        """Return the newest version of a table."""
        return EmbeddedTarget(spark, TableFiles(path))

    def compact(self, spark: SparkSession, path: str, key: Sequence[str]) -> int:
        """Write the small files of a table as few large ones, like keys together."""
        target = self.open(spark, path)
        return 0 if target.version is None else target.compact(key)

    def clean(self, path: str) -> None:
        """Remove what was never committed."""
        TableFiles(path).clean()


class EmbeddedTarget:
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

    def applied(self, app_id: str) -> int | None:
        """Return the last version that an application has committed."""
        return self._log.applied(app_id)

    # --- reading

    def rows(self) -> DataFrame:
        """Return everything."""
        return self._read(self._log.files)

    def near(self, key: Sequence[str], keys: DataFrame) -> DataFrame:
        """Return the rows of all files that may have one of these keys."""
        pruning = self._pruning(key)
        measures = [measure.alias(name) for name, measure in pruning.measures.items()]
        if not measures:
            return self.rows()
        return self._read(pruning.candidates(keys.agg(*measures).collect()[0]))

    def measures(self, key: Sequence[str]) -> Mapping[str, Column]:
        """Return what tells which files a batch may touch."""
        return self._pruning(key).measures

    def _pruning(self, key: Sequence[str]) -> Pruning:
        return Pruning(self._log.files, key, self.schema)

    def _read(self, files: Sequence[FileFacts]) -> DataFrame:
        return self._read_files([file.path for file in files], self.schema)

    def _read_files(self, paths: Sequence[str], schema: t.StructType) -> DataFrame:
        if not paths:
            return self._spark.createDataFrame([], schema)
        # The names are names, whatever characters are in them.
        reader = self._spark.read.schema(schema).option("__globPaths__", "false")
        return reader.parquet(*map(self._files.spark_path, paths))

    # --- committing

    def add_columns(self, fields: Sequence[t.StructField], commit: Commit) -> None:
        """Commit new columns."""
        self._allow(fields)
        added = Schema.from_json(t.StructType(list(fields)).json())
        self._run(commit, lambda how: self._log.table.alter.add_columns(added.fields, commit_properties=how))

    def append(self, rows: DataFrame, commit: Commit) -> Written:
        """Commit more rows."""
        return self._commit(self._write(rows, self.schema), [], commit)

    def replace(self, rows: DataFrame, schema: t.StructType, commit: Commit) -> Written:
        """Commit these rows and this schema in place of what is there."""
        return self._replace(self._write(rows, schema), schema, commit)

    def _replace(self, files: list[DataFile], schema: t.StructType, commit: Commit) -> Written:
        if self.version is None:
            return self._create(files, schema, commit)
        actions: list[AddAction | RemoveAction] = [_added(file) for file in files]
        delta_schema = Schema.from_json(schema.json())
        with _discarding(self._files, files):
            commit.check()
            self._allow(schema.fields)
        version = self._run(
            commit,
            lambda how: self._log.table.create_write_transaction(
                actions, "overwrite", delta_schema, commit_properties=how
            ),
            files,
        )
        return Written(version, len(files), len(self._log.files))

    def _create(self, files: list[DataFile], schema: t.StructType, commit: Commit) -> Written:
        with _discarding(self._files, files):
            commit.check()
        self._run(
            commit,
            lambda how: create_table_with_add_actions(
                self._files.delta,
                Schema.from_json(schema.json()),
                [_added(file) for file in files],
                configuration=CONFIGURATION,
                commit_properties=how,
            ),
            files,
        )
        return Written(0, len(files))

    def insert(
        self, rows: DataFrame, schema: t.StructType, key: Sequence[str], commit: Commit, measured: Measured, /
    ) -> Written | None:
        """Commit rows that are new, as they come; None, and nothing is committed, if one is there already or twice."""
        files = self._write(rows, schema)
        with _discarding(self._files, files):
            found = measured()
            are_new = found is not None and self._are_new(files, schema, key, found)
        if are_new:
            return self._create(files, schema, commit) if self.version is None else self._commit(files, [], commit)
        self._files.discard(files)
        return None

    def stage(self, plan: TablePlan, log: LogRead, from_lsn: int, is_new_only: bool, /) -> Staged | None:
        """Let the executors write changes straight from the log; None: not here, or not these columns."""
        codec = straight.CODECS.get(str(self._spark.conf.get("spark.sql.parquet.compression.codec")).lower())
        # An object store is for Spark to write to, which has been told how.
        if not self._files.is_local or codec is None or not straight.fits(log, plan.schema):
            return None
        folder = self._files.new_folder()
        wanted = straight.Wanted(
            folder=f"{self._files.root}/{folder}",
            schema=plan.schema,
            codec=codec,
            source_epoch=plan.source_epoch,
            from_lsn=from_lsn,
            key=_counting(plan) if is_new_only else None,
            is_new_only=is_new_only,
        )
        try:
            return Staged(folder, straight.write(self._spark.sparkContext, log, wanted), is_new_only)
        except BaseException:
            self._files.drop(folder)
            raise

    def take(self, staged: Staged, plan: TablePlan, commit: Commit, /) -> Written | None:
        """Commit what was staged; None, and nothing is committed, if a key is there already or twice."""
        files = self._files.take(staged.folder, plan.schema, {part.name for part in staged.parts if part.name})
        with _discarding(self._files, files):
            are_new = not staged.is_new_only or self._grows(staged.parts, plan) or self._are_distinct(files, plan)
        if are_new:
            return self._create(files, plan.schema, commit) if self.version is None else self._commit(files, [], commit)
        self._files.discard(files)
        return None

    def drop(self, staged: Staged, /) -> None:
        """Remove what was staged."""
        self._files.drop(staged.folder)

    def _grows(self, parts: Sequence[straight.Part], plan: TablePlan) -> bool:
        """Whether what tasks tell of their keys proves that all are new, without another look at them."""
        ranges = sorted(part.keys for part in parts if part.keys is not None)
        if len(ranges) != sum(part.rows > 0 for part in parts):
            return False
        if any(after[0] <= before[1] for before, after in pairwise(ranges)):
            return False
        return self.version is None or not self._pruning(plan.key).overlapping(plan.key[0], ranges)

    def _are_distinct(self, files: Sequence[DataFile], plan: TablePlan) -> bool:
        measured: dict[str, Any] = {}
        if self.version is not None and (measures := self.measures(plan.key)):
            keys = self._read_files([file.path for file in files], plan.schema)
            measured = keys.agg(*(measure.alias(name) for name, measure in measures.items())).collect()[0].asDict()
        return self._are_new(files, plan.schema, plan.key, measured)

    def _are_new(
        self, files: Sequence[DataFile], schema: t.StructType, key: Sequence[str], measured: Mapping[str, Any]
    ) -> bool:
        """Whether no key is twice in these files, or in one of them and in the table."""
        names = [file.path for file in files]
        keys = self._read_files(names, schema).select(*map(col, key))
        if not names or not keys.groupBy(*map(col, key)).count().filter("count > 1").isEmpty():
            return not names
        candidates = self._pruning(key).candidates(measured) if self.version is not None else []
        return not candidates or self._read(candidates).join(keys, [*key], "left_semi").isEmpty()

    def merge(self, merge: Merge, measured: Row, commit: Commit) -> Written:
        """Commit a merge: the files it touches are replaced, what it inserts is added."""
        candidates = self._pruning(merge.key).candidates(measured)
        candidates = [file for file in candidates if file.nulls.get(merge.open_column) != 0]
        kept = Kept()
        try:
            touched, matched = self._touched(candidates, merge, kept)
            if touched:
                rows = merged(self._read(touched), merge, matched)
            else:
                rows = inserted(merge.rows.alias("s").filter(f.expr(merge.is_insert)), merge)
                rows = rows.coalesce(merge.count // ROWS_PER_FILE + 1)
            written = self._write(rows, self.schema)
        finally:
            kept.release()
        return self._commit(written, touched, commit)

    def small(self, batch: SmallBatch, check: Callable[[SmallDone], None], commit: Commit) -> SmallWritten | None:
        """Have one task do a small batch, and commit the files that it made; None: it takes more than one task."""
        if not self._files.is_local or not _can_compare(batch):
            return None
        done = self._run_small(batch)
        if done.is_too_much:
            return None
        files = self._files.take(done.folder, batch.schema) if done.folder else []
        with _discarding(self._files, files):
            check(done)
        if done.is_emptied:
            return SmallWritten(self._replace(files, batch.schema, commit), done)
        names = set(done.removed)
        return SmallWritten(self._commit(files, [file for file in self._log.files if file.path in names], commit), done)

    def _run_small(self, batch: SmallBatch) -> SmallDone:
        has_rows = self.version is not None and not batch.is_replacing
        files = told(self._log.files, batch.key, self.schema) if has_rows and batch.mode != "append" else []
        task = SmallTask(
            root=self._files.root,
            mode=batch.mode,
            key=batch.key,
            columns=batch.columns,
            schema=to_arrow_schema(batch.schema, timezone="UTC"),
            changes=batch.changes,
            belonging=batch.belonging,
            source_epoch=batch.source_epoch,
            applied=batch.applied,
            files=tuple(files),
            has_rows=has_rows,
        )
        done: list[SmallDone] = self._spark.sparkContext.parallelize([task], 1).mapPartitions(run_all).collect()
        return done[0]

    def _touched(
        self, candidates: list[FileFacts], merge: Merge, kept: Kept
    ) -> tuple[list[FileFacts], DataFrame | None]:
        """Return the files with rows that are matched, and the keys of these rows."""
        if not candidates:
            return [], None
        by_name = {file.path.rpartition("/")[2]: file for file in candidates}
        if len(by_name) < len(candidates):
            raise TableUnfit(
                f"{len(candidates) - len(by_name):,} of {len(candidates):,} files of the table share their names, in "
                "different folders: which rows are in which file cannot be told.",
                "Another program has written them. Let it rewrite the table with unique file names (OPTIMIZE).",
            )
        there = self._read(candidates).withColumn("_file", f.col("_metadata.file_name")).alias("t")
        matched = kept(
            there.join(merge.rows.alias("s"), f.expr(merge.condition), "left_semi").select(
                *map(col, merge.key), "_file"
            )
        )
        names = matched.select("_file").distinct().collect()
        return [by_name[name] for (name,) in names], matched.select(*map(col, merge.key))

    def _write(self, rows: DataFrame, schema: t.StructType) -> list[DataFile]:
        """Let the executors write rows; the files belong to nobody yet."""
        folder = self._files.new_folder()
        (
            rows.select(*map(col, schema.names))
            .write.option("maxRecordsPerFile", ROWS_PER_FILE)
            .option("parquet.block.size", ROW_GROUP_BYTES)
            .option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            .option("mapreduce.fileoutputcommitter.algorithm.version", "2")
            .parquet(self._files.spark_path(folder))
        )
        return self._files.take(folder, schema)

    def _commit(
        self, files: list[DataFile], removed: Sequence[FileFacts], commit: Commit, *, is_change: bool = True
    ) -> Written:
        actions: list[AddAction | RemoveAction] = [_added(file, is_change) for file in files]
        actions += [_removed(file, is_change) for file in removed]
        with _discarding(self._files, files):
            commit.check()
        version = self._run(
            commit,
            lambda how: self._log.table.create_write_transaction(
                actions, "append", self._log.table.schema(), commit_properties=how
            ),
            files,
        )
        return Written(version, len(files), len(removed))

    def _allow(self, fields: Sequence[t.StructField]) -> None:
        """Let the table have columns that not every reader of Delta knows, before it has any.

        A time without a zone is such; deltalake would add the column and then refuse to open the table.
        """
        if needs_ntz(fields) and not self._log.has_ntz:
            feature = TableFeatures.TimestampWithoutTimezone
            self._run(
                None,
                lambda how: self._log.table.alter.add_feature(
                    feature, allow_protocol_versions_increase=True, commit_properties=how
                ),
            )
            self._log.table.update_incremental()

    def _run(
        self, commit: Commit | None, make: Callable[[CommitProperties], object], files: Sequence[DataFile] = ()
    ) -> int:
        """Commit these files, and return the version. Raises TableConflict when another commit came first."""
        # A commit is not tried again on top of a later one: so its version is known.
        version = 0 if self.version is None else self._log.table.version() + 1
        commit_files(self._files, version, files, commit, make)
        return version

    # --- keeping house

    def compact(self, key: Sequence[str]) -> int:
        """Write small files as few large ones; return how many are gone."""
        small = [file for file in self._log.files if file.size < SMALL_BYTES]
        if len(small) < FILES_MIN:
            return 0
        count = sum(file.size for file in small) // (2 * SMALL_BYTES) + 1
        rows = self._read(small)
        # What is true no more in a history is never touched again: apart from the rest it costs no merge anything.
        ended = [col("_valid_to_lsn").isNotNull()] if "_valid_to_lsn" in self.schema.names else []
        order = [*ended, *(col(name) for name in key if name in self.schema.names)]
        rows = rows.repartitionByRange(count, *order).sortWithinPartitions(*order) if order else rows.coalesce(count)
        files = self._write(rows, self.schema)
        self._commit(files, small, Commit(None, 0, "walstream: compaction"), is_change=False)
        return len(small)


def _counting(plan: TablePlan) -> str | None:
    """Return the column of a key that is one whole number."""
    is_number = len(plan.key) == 1 and isinstance(plan.schema[plan.key[0]].dataType, t.IntegralType)
    return plan.key[0] if is_number else None


@contextmanager
def _discarding(files: TableFiles, written: list[DataFile]) -> Iterator[None]:
    """Delete files when something fails before their commit."""
    try:
        yield
    except BaseException:
        files.discard(written)
        raise


def _can_compare(batch: SmallBatch) -> bool:
    """Whether Python takes the same keys for equal as Spark does: not numbers with a point, of which one is none."""
    kinds = [batch.schema[name].dataType for name in batch.key]
    return not any(
        isinstance(kind, t.FractionalType | t.ArrayType) and not isinstance(kind, t.DecimalType) for kind in kinds
    )


def _added(file: DataFile, is_change: bool = True) -> AddAction:
    return AddAction(file.path, file.size, {}, file.modified_ms, is_change, file.stats)


def _removed(file: FileFacts, is_change: bool = True) -> RemoveAction:
    return RemoveAction(file.path, is_change, now_ms(), file.size, {})
