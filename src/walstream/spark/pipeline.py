"""The pipeline: a stream of commit points, and for each micro-batch of them the tables and their cut.

Owns the streaming query and the way of a batch through the parts; refuses to know what a batch means for a table
(batches.py), how it is written (destination.py) and how things are shown. Invariants: a batch is over when its tables
and then its cut are durable, and only then does Spark move its checkpoint; what was not finished comes again, with the
same points, and changes nothing that was. Rows never pass through this process: it sees points, and counts.

    readStream(commit points) ── foreachBatch ──▶ steps ──▶ per table: read (after, upto] ▶ fold ▶ one commit ──▶ cut

The query runs in a thread of the JVM that calls back; `run` looks after it from the caller's thread, which also does
maintenance when it is due and nothing else holds the lock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from walstream import logs
from walstream.errors import DataLoss, WalstreamError
from walstream.positions import Lsn
from walstream.spark.batches import Base, Books, CutRow, Outcome, PointFacts, Snapshot, Step
from walstream.spark.destination import Destination, Work
from walstream.spark.failures import meaning
from walstream.spark.kept_tables import KeptTables
from walstream.spark.maintenance import Maintenance
from walstream.spark.progress import Progress
from walstream.spark.rereading import Points
from walstream.spark.types import table_name

POLL_S: Final = 0.2
DRAIN_S_MAX: Final = 600.0
"""How long a stop waits for the batch that is under way."""

log = logs.get(__name__)


class _Stopping(Exception):
    """A batch begins while the pipeline is being stopped: it is not begun, and comes again."""


class Pipeline:
    """Batches into tables. One at a time."""

    def __init__(
        self,
        destination: Destination,
        tables: KeptTables,
        points: Points,
        progress: Progress,
        *,
        has_snapshots: bool,
    ) -> None:
        """Take the parts; without snapshots tables are built from changes alone."""
        self._destination = destination
        self._tables = tables
        self._points = points
        self._progress = progress
        self._has_snapshots = has_snapshots
        self._books: Books | None = None
        self.lock = threading.Lock()
        """Held by whoever changes tables."""
        self.is_stopping = False
        self.failure: WalstreamError | None = None
        """What a batch failed with, before Spark wrapped it up."""

    def batch(self, frame: DataFrame, batch_id: int) -> None:
        """Write a micro-batch of commit points. Called by Spark."""
        if self.is_stopping:
            raise _Stopping("the pipeline is being stopped")
        try:
            with self.lock:
                # A point is a few hundred bytes and a batch holds ten thousand at most: this is not the data.
                self._write(sorted(map(_facts, frame.collect()), key=lambda point: point.offset), batch_id)
        except BaseException as error:
            # Some tables may be further than the books say now: they are opened again with the next batch.
            self._books = None
            self.failure = meaning(error)
            self._progress.failed()
            raise

    def catch_up(self) -> None:
        """Bring tables that stopped, and that a remedy was found for, to where the others are: at the last cut."""
        with self.lock:
            cut = self._cut()
            if cut is None:
                return
            self._tables.refresh()
            base = self._base(cut.point + 1)
            if base is None or base.offset != cut.point:
                return
            books = Books(self._destination.applied, cut, base, has_snapshots=self._has_snapshots)
            step = books.catch_up()
            if step is not None:
                log.info("tables behind the others", tables=len(step.tables), lsn=str(step.end_lsn))
                self._step(books, step, cut.batch_id)

    def moved(self, table: str, version: int) -> None:
        """Note that maintenance has made another version of a table."""
        if self._books is not None:
            self._books.moved(table, version)

    def _write(self, points: list[PointFacts], batch_id: int) -> None:
        if not points:
            return
        began_s = self._progress.begin()
        self._tables.refresh()
        points = [self._kept(point) for point in points]
        if self._books is None:
            self._books = self._open(points[0].offset)
        for step in self._books.steps(points):
            self._step(self._books, step, batch_id)
            self._progress.ended(
                batch_id,
                began_s=began_s,
                source_epoch=step.source_epoch,
                end_lsn=step.end_lsn,
                point=step.upto,
                rows=step.rows,
                time_us=step.commit_time_us,
            )

    def _step(self, books: Books, step: Step, batch_id: int) -> None:
        """Write the tables of a step, and then its cut."""
        works, outcomes = self._works(step)
        outcomes |= self._destination.write(works, batch_id)
        books.settle(step, outcomes)
        if step.is_cut:
            row = books.cut(step, batch_id, self._destination.version)
            if row.snapshots or row.stopped:
                self._destination.record(row)
            self._progress.listed(row.versions, self._waiting(books))
        log.debug("batch written", batch=batch_id, lsn=str(step.end_lsn), tables=len(step.tables), rows=step.rows)

    def _open(self, first: int) -> Books:
        base, cut = self._base(first), self._cut()
        log.info(
            "tables opened",
            from_lsn=str(base.end_lsn) if base is not None else "the beginning",
            last_cut=str(cut.end_lsn) if cut is not None else "none",
        )
        return Books(self._destination.applied, cut, base, has_snapshots=self._has_snapshots)

    def _cut(self) -> CutRow | None:
        """Return the last cut, without tables that are not kept any more: nothing is known of them from now on.

        Raises ForeignLog when it is no cut of this log: nothing that is known of the tables is then true of it.
        """
        cut = self._destination.last_cut()
        if cut is None:
            return None
        self._points.check(cut, self._destination.name)
        is_kept = self._tables.is_kept
        return replace(
            cut,
            versions={name: version for name, version in cut.versions.items() if is_kept(name)},
            snapshots={name: snapshot for name, snapshot in cut.snapshots.items() if is_kept(name)},
        )

    def _base(self, offset: int) -> Base | None:
        base = self._points.base(offset)
        if base is None:
            return None
        return replace(base, snapshots=tuple(one for one in base.snapshots if self._tables.is_kept(one.table)))

    def _kept(self, point: PointFacts) -> PointFacts:
        tables = {name: count for name, count in point.tables.items() if self._tables.is_kept(name)}
        snapshot = point.snapshot
        if snapshot is not None and not self._tables.is_kept(snapshot.table):
            snapshot = None
        return point._replace(tables=tables, snapshot=snapshot)

    def _works(self, step: Step) -> tuple[dict[str, Work], dict[str, Outcome]]:
        """Fill in from where each table is read and how many rows are due there; those that cannot be read stop."""
        works: dict[str, Work] = {}
        outcomes: dict[str, Outcome] = {}
        for one in step.tables:
            if one.after is not None:
                works[one.table] = Work(step, one, one.after, one.rows)
                continue
            try:
                works[one.table] = Work(step, one, *self._points.find(one, step.source_epoch, step.upto))
            except DataLoss as error:
                log.error("table stopped", table=one.table, error=error.message, hint=error.hint)
                self._progress.stopped(one.table, str(error))
                outcomes[one.table] = Outcome(None, str(error))
        return works, outcomes

    def _waiting(self, books: Books) -> dict[str, str]:
        return {
            book.name: self._tables.mode(book.name)
            for book in books.tables.values()
            if book.built_from is None and not book.stopped
        }


def _facts(row: Row) -> PointFacts:
    snapshot = None
    if row["snapshot_id"] is not None:
        name = table_name(row["snapshot_schema"], row["snapshot_table"])
        snapshot = Snapshot(name, row["snapshot_id"], Lsn(row["snapshot_lsn"]))
    return PointFacts(
        offset=row["offset"],
        source_epoch=row["source_epoch"],
        end_lsn=Lsn(row["end_lsn"]),
        commit_time_us=_us(row["last_commit_time"]),
        tables=row["tables"] or {},
        snapshot=snapshot,
    )


def _us(moment: datetime | None) -> int:
    """Return microseconds since 1970; Spark gives times of its sessions as local ones without a zone."""
    return 0 if moment is None else round(moment.astimezone(UTC).timestamp() * 1_000_000)


class Query:
    """The streaming query of a pipeline, from its start to its end."""

    def __init__(self, pipeline: Pipeline, progress: Progress, maintenance: Maintenance | None) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._maintenance = maintenance

    def run(
        self,
        spark: SparkSession,
        *,
        name: str,
        options: dict[str, str],
        checkpoint: str,
        interval_ms: int,
        stop: Callable[[], bool],
        once: bool = False,
    ) -> None:
        """Run until `stop` says so, or with `once` until everything that is in the log now is in the tables.

        Raises what ends it.
        """
        self._pipeline.is_stopping, self._pipeline.failure = False, None
        self._pipeline.catch_up()
        frame = spark.readStream.format("walstream").options(**options).load()
        writer = frame.writeStream.queryName(name).option("checkpointLocation", checkpoint)
        writer = writer.foreachBatch(self._pipeline.batch)
        trigger = (
            writer.trigger(availableNow=True) if once else writer.trigger(processingTime=f"{interval_ms} milliseconds")
        )
        try:
            query = trigger.start()
        except Exception as error:
            raise meaning(error) from None
        log.info("stream started", query=name, checkpoint=checkpoint)
        try:
            self._look_after(query, stop)
        finally:
            self._end(query)
        self._raise(query)

    def _look_after(self, query: StreamingQuery, stop: Callable[[], bool]) -> None:
        while query.isActive and not stop():
            time.sleep(POLL_S)
            self._progress.lag(_lag(query))
            if self._maintenance is not None and self._maintenance.is_due:
                self._maintenance.run(stop)

    def _end(self, query: StreamingQuery) -> None:
        """Let the batch that is under way come to its end, and begin no other."""
        self._pipeline.is_stopping = True
        deadline = time.monotonic() + DRAIN_S_MAX
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
        if query.isActive:
            query.stop()

    def _raise(self, query: StreamingQuery) -> None:
        failure = query.exception()
        if failure is None:
            return
        if self._pipeline.failure is not None:
            raise self._pipeline.failure
        if _Stopping.__name__ in str(failure):
            return
        raise meaning(failure)


def _lag(query: StreamingQuery) -> int | None:
    """Return how many rows the log has that no batch has taken, as the last progress tells."""
    progress = query.lastProgress
    if not progress or not progress["sources"]:
        return None
    source = progress["sources"][0]
    try:
        latest, end = json.loads(source["latestOffset"]), json.loads(source["endOffset"])
        return max(0, int(latest["rows_total"]) - int(end["rows_total"]))
    except (KeyError, TypeError, ValueError):
        return None
