"""The driver's plan of a small read: which executor reads what, asked of the log by this process itself.

Owns the questions to the log for small batches and what is small; what is made of the answers is planning.py's, as for
any read. Spark would start a process to ask, for each table anew; here one connection serves all tables of a batch, and
the points of a batch are read once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.types import StructType

from walstream.capture.commit_points import Point
from walstream.errors import DataLoss
from walstream.positions import TopicPartition
from walstream.spark.fetching import Address
from walstream.spark.kept_tables import KeptTable
from walstream.spark.options import ROWS_PER_TASK, Options, parse_table
from walstream.spark.patience import patient
from walstream.spark.planning import Bounds, Range, TableTask, ranges
from walstream.spark.points import PointLog
from walstream.spark.source import WalstreamReader
from walstream.spark.types import TableVersion
from walstream.spark.versions import topic_of, topics_there

BYTES_MAX: Final = 64 << 20
"""What the points of a small batch may have in the log: a task holds its rows in memory, several times over."""

VersionsAt = Callable[[str, int], tuple[TableVersion, ...]]
"""What rows of a table mean by the numbers of versions, in a generation."""


@dataclass(frozen=True, slots=True)
class LogChanges:
    """Changes of a table in the log. Pickled with a task, called in an executor."""

    options: Options
    schema: StructType
    tasks: tuple[TableTask, ...]

    def __call__(self) -> Iterator[pa.RecordBatch]:
        """Read them."""
        reader = WalstreamReader(self.options, self.schema)
        for task in self.tasks:
            yield from reader.read(task)


class SmallReads:
    """Plans small reads of one log. Its methods may be called by several threads."""

    def __init__(self, options: Mapping[str, str], versions_at: VersionsAt, rows_max: int) -> None:
        """Take what finds the log, and how many rows of a table are few."""
        self._options = Options.of(options)
        self._address = Address(self._options.bootstrap, dict(self._options.kafka))
        self._versions_at = versions_at
        self._rows_max = rows_max
        self._lock = threading.Lock()
        self._points: PointLog | None = None
        self._last: tuple[tuple[int, int], list[Point], int] | None = None
        """The points that were asked for last, with their bytes."""

    def changes(self, table: KeptTable, after: int, upto: int, rows: int | None) -> LogChanges | None:
        """Return what reads the rows of points after one and up to another; None: they are not few."""
        if rows is None or rows > self._rows_max:
            return None
        with self._lock:
            planned = patient(lambda: self._planned(table, after, upto), self._disconnect)
        if planned is None:
            return None
        tasks = [TableTask(each, table.version, self._versions_at(table.name, each.spans.gen)) for each in planned]
        return LogChanges(self._options, table.version.changes(table.strings), tuple(tasks))

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        self._last = None
        if self._points is not None:
            self._points.close()
            self._points = None

    def _planned(self, table: KeptTable, after: int, upto: int) -> list[Range] | None:
        points, size = self._between(after, upto)
        if size > BYTES_MAX:
            return None
        topic = topic_of(self._options.prefix, *parse_table(table.name))
        touched = {span.partition for point in points for span in point.spans if span.partition.topic == topic}
        return ranges(points, topic, self._bounds(touched), ROWS_PER_TASK, counted=False)

    def _between(self, after: int, upto: int) -> tuple[list[Point], int]:
        if self._last is None or self._last[0] != (after, upto):
            log = self._log
            first = log.before(after)
            found = list(log.after(after, upto + 1))
            if not found or found[-1].offset != upto:
                raise DataLoss(
                    f"The commits topic has no valid commit point at offset {upto:,}.",
                    "The log was made anew, or the checkpoint belongs to another log: begin again with "
                    "starting=earliest and a new checkpoint.",
                )
            self._last = (after, upto), found, found[-1].bytes_total - first.bytes_total
            log.forget(after)
        return self._last[1], self._last[2]

    @property
    def _log(self) -> PointLog:
        if self._points is None:
            self._points = PointLog(self._address, self._options.prefix)
        return self._points

    def _bounds(self, partitions: set[TopicPartition]) -> dict[TopicPartition, Bounds]:
        topics, found = self._log.topics, list(partitions)
        if not found:
            return {}
        if gone := {each.topic for each in found} - topics_there(self._address, topics):
            raise DataLoss(f"The topic {min(gone)}, whose rows are due, is gone.", "Take a new snapshot of its table.")
        starts, ends = topics.starts(found), topics.ends(found)
        return {partition: Bounds(starts[partition], ends[partition]) for partition in found}
