"""Where the tables of a batch are written: a warehouse of Delta tables, all in parallel, and their cut.

Owns how a table's step becomes a read and a commit; refuses to know points and epochs, which are planned before
(batches.py), and how a commit is made (writers/). Invariants: each table of a step has one outcome; what fails for one
table alone stops no other; anything else is raised after every table has come to its end.

Each table has a session of its own, because a writer may change settings of the session that it writes with, and a job
group and a scheduler's pool of its own: Spark's page then tells tables apart, and a large one does not hold up others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType

from walstream import logs
from walstream.errors import TableConflict
from walstream.positions import Lsn
from walstream.spark.attempting import Attempts
from walstream.spark.batches import NO_SNAPSHOT, CutRow, Outcome, Step, TableStep
from walstream.spark.belonging import Belonging
from walstream.spark.changes import Changes, LogRead
from walstream.spark.columns import TableColumn
from walstream.spark.cuts import Cuts
from walstream.spark.kept_tables import KeptTable
from walstream.spark.progress import Progress
from walstream.spark.small.reading import SmallReads
from walstream.spark.warehouse import table_path
from walstream.spark.writers import Applied, TablePlan, Writer

log = logs.get(__name__)


class Work(NamedTuple):
    """One table's part of a step, with everything that is needed to read it."""

    step: Step
    one: TableStep
    after: int
    rows: int | None
    """How many rows the points of the range have; None: the source counts by itself."""
    snapshot_rows: int | None = None
    """How many of them are those of the snapshot that the table is replaced by."""


class Destination(Protocol):
    """What the pipeline writes to."""

    @property
    def name(self) -> str:
        """For messages."""

    def last_cut(self) -> CutRow | None:
        """Return the last cut that was recorded."""

    def applied(self, table: str, source_epoch: int) -> Lsn | None:
        """Return what a table has applied of a source epoch; None: nothing."""

    def version(self, table: str) -> int | None:
        """Return the version that a table is at."""

    def write(self, works: Mapping[str, Work], batch_id: int) -> dict[str, Outcome]:
        """Write the tables of a step. Raises what is not the matter of one table."""

    def record(self, row: CutRow) -> None:
        """Record the cut that the tables of a step are at now."""

    def close(self) -> None:
        """Let go of everything."""


class Reader:
    """Reads what a table's step asks for, through the data source."""

    def __init__(self, spark: SparkSession, options: Mapping[str, str]) -> None:
        """Take what finds the log."""
        self._spark = spark
        self._options = dict(options)
        self._sessions: dict[str, SparkSession] = {}

    def changes(self, work: Work, table: KeptTable) -> Changes:
        """Return the rows of a range, all of them: those that do not belong are for `where` to leave out."""
        session = self._sessions.get(table.name)
        if session is None:
            session = self._sessions[table.name] = self._spark.newSession()
        options = {
            **self._options,
            "table": table.name,
            "after": str(work.after),
            "upto": str(work.step.upto),
            "schema_version": str(table.version.version),
            "counted": "true" if work.rows is None else "false",
        }
        if table.strings:
            options["strings"] = ",".join(_quoted(name) for name in table.strings)
        read = LogRead(options, table.version.changes(table.strings))

        def make() -> DataFrame:
            # With its schema told, Spark need not start a process to ask the source for it.
            return session.read.format("walstream").schema(read.schema).options(**read.options).load()

        return Changes(session, make, read if is_of_stream(work) else None)


def is_of_stream(work: Work) -> bool:
    """Whether no row of a snapshot belongs to the table's step."""
    return work.one.snapshot is None or work.one.snapshot.id == NO_SNAPSHOT


def belonging(work: Work) -> Belonging:
    """Return which rows of the range belong to the table's step."""
    snapshot = work.one.snapshot
    if snapshot is None or is_of_stream(work):
        return Belonging(work.step.source_epoch)
    return Belonging(work.step.source_epoch, snapshot.id, int(snapshot.lsn))


class DeltaTables:
    """A warehouse."""

    def __init__(
        self,
        spark: SparkSession,
        writer: Writer,
        warehouse: str,
        prefix: str,
        reader: Reader,
        describe: Callable[[str], KeptTable],
        progress: Progress,
        *,
        parallel: int,
        small: SmallReads | None = None,
    ) -> None:
        """Take what writes, what reads, and what tells how a table is now; so many tables are written at once.

        `small` plans the reads of batches that one task does, if there are to be any.
        """
        self._attempts = Attempts(spark, describe, progress)
        self._writer = writer
        self._warehouse = warehouse
        self._prefix = prefix
        self._reader = reader
        self._small = small
        self._progress = progress
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="walstream-table")
        self._clean: set[str] = set()
        self.cuts = Cuts(warehouse, prefix)

    @property
    def name(self) -> str:
        """For messages."""
        return self._warehouse

    def last_cut(self) -> CutRow | None:
        """Return the last cut that was recorded."""
        return self.cuts.last()

    def applied(self, table: str, source_epoch: int) -> Lsn | None:
        """Return what a table has applied of a source epoch; None: nothing."""
        bare = TablePlan(
            name=table,
            path=table_path(self._warehouse, table),
            mode="append",
            key=(),
            columns=(),
            schema_version=0,
            prefix=self._prefix,
            source_epoch=source_epoch,
            end_lsn=0,
        )
        found = self._writer.applied(bare)
        return None if found is None else Lsn(found)

    def version(self, table: str) -> int | None:
        """Return the version that a table is at."""
        return self._writer.version(table_path(self._warehouse, table))

    def write(self, works: Mapping[str, Work], batch_id: int) -> dict[str, Outcome]:
        """Write the tables of a step, several at once. Raises what is not the matter of one table."""
        futures = {name: self._pool.submit(self._write, work, batch_id) for name, work in works.items()}
        outcomes: dict[str, Outcome] = {}
        failure: BaseException | None = None
        for name, future in futures.items():
            try:
                outcomes[name] = future.result()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return outcomes

    def record(self, row: CutRow) -> None:
        """Record the cut that the tables of a step are at now."""
        self.cuts.record(row)

    def close(self) -> None:
        """Wait for the tables that are being written."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._small is not None:
            self._small.close()

    def _write(self, work: Work, batch_id: int) -> Outcome:
        name, began_s = work.one.table, self._progress.begin()
        done, failure = self._attempts.attempt(work, batch_id, self._apply)
        if done is None:
            return Outcome(None, failure)
        if done.applied_lsn > work.step.end_lsn:
            raise TableConflict(
                f"{name} holds {Lsn(done.applied_lsn)}, which this pipeline has not written.",
                "Another pipeline writes to the same warehouse: stop one of them.",
            )
        time_us = work.step.commit_time_us
        self._progress.wrote(name, began_s=began_s, rows=done.rows_in, commit_time_us=time_us, version=done.version)
        log.debug("table written", table=name, rows=done.rows_in, version=done.version, lsn=str(work.step.end_lsn))
        return Outcome(done.version)

    def _apply(self, work: Work, table: KeptTable) -> Applied:
        """Apply a table's step: by one task if it is small, otherwise with all that Spark has."""
        self._clean_up(table.name)
        plan = self._plan(work, table)
        changes = None
        if self._small is not None:
            changes = self._small.changes(table, work.after, work.step.upto, work.rows)
        done = self._writer.apply_small(plan, changes, belonging(work)) if changes is not None else None
        return done or self._writer.apply(plan, self._reader.changes(work, table))

    def _clean_up(self, name: str) -> None:
        """Before the first batch of a table, remove what a driver that was killed has left there."""
        if name not in self._clean:
            self._writer.clean(table_path(self._warehouse, name))
            self._clean.add(name)

    def _plan(self, work: Work, table: KeptTable) -> TablePlan:
        snapshot = work.one.snapshot
        return TablePlan(
            name=table.name,
            path=table_path(self._warehouse, table.name),
            mode=table.mode,
            key=table.version.key,
            columns=columns_of(table),
            schema_version=table.version.version,
            prefix=self._prefix,
            source_epoch=work.step.source_epoch,
            end_lsn=int(work.step.end_lsn),
            relation_id=table.version.relation_id,
            rows_due=work.rows,
            snapshot_rows=work.snapshot_rows if work.rows is not None else None,
            snapshot=snapshot.id if snapshot is not None and snapshot.id != NO_SNAPSHOT else None,
            where=belonging(work).sql,
            begin_lsn=int(work.step.begin_lsn) if work.one.after is not None else 0,
        )


def columns_of(table: KeptTable) -> tuple[TableColumn, ...]:
    """Return a table's columns as they are written."""
    is_string = set(table.strings)
    return tuple(
        TableColumn(
            column.name, StringType() if "*" in is_string or column.name in is_string else column.spark, column.attnum
        )
        for column in table.version.columns
    )


def _quoted(name: str) -> str:
    return name if name == "*" else '"' + name.replace('"', '""') + '"'
