"""The driver's side of a read: asks the log where points, rows and versions are, and plans tasks from the answers.

Owns the questions to the log and their order; what is made of the answers is admission.py's and planning.py's. One for
each stream reader, which lives as long as its query, or for one batch read. Invariant: versions are asked for after the
points whose rows they describe, so no row is of a version that its task does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from walstream.capture.commit_points import Point
from walstream.errors import DataLoss, UsageError
from walstream.positions import TopicPartition
from walstream.spark.admission import Limit, admit, changes_of, steps
from walstream.spark.fetching import Address
from walstream.spark.offsets import BEGINNING, PointOffset
from walstream.spark.options import Latest, Options
from walstream.spark.patience import patient
from walstream.spark.planning import Bounds, TableTask, point_tasks, ranges
from walstream.spark.points import PointLog
from walstream.spark.types import META
from walstream.spark.versions import Versions, topic_of, topics_there

P = ParamSpec("P")
R = TypeVar("R")


def _patient(method: Callable[Concatenate[Planner, P], R]) -> Callable[Concatenate[Planner, P], R]:
    """Have a question asked again while the log is away: a stream that fails has to be started again by somebody."""

    def ask(self: Planner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.has_answered:
            return patient(lambda: method(self, *args, **kwargs), self.connect)
        answer = method(self, *args, **kwargs)
        self.has_answered = True
        return answer

    return wraps(method)(ask)


class Planner:
    """Plans reads of one log. Used by one thread."""

    def __init__(self, options: Options, schema: StructType) -> None:
        """Take what is asked for; `schema` is what the rows are to be."""
        self._options = options
        self._schema = schema
        self._address = Address(options.bootstrap, dict(options.kafka))
        self._points: PointLog
        self.connect()
        self._versions: tuple[int, Versions] | None = None
        self._is_known = False
        self.has_answered = False
        """Whether the log has ever answered: one that has not is perhaps not there at all."""
        self._topic = topic_of(options.prefix, *options.table) if options.table else None

    def connect(self) -> None:
        """Begin anew with the log, whatever was before; nothing is asked yet."""
        if hasattr(self, "_points"):
            self._points.close()
        self._points = PointLog(self._address, self._options.prefix)

    @_patient
    def end(self) -> int:
        """Return where the commits topic ends now."""
        return self._points.end()

    @_patient
    def starting(self) -> PointOffset:
        """Return the point that the option `starting` means."""
        return self._points.resolve(self._options.starting, self._log_starts)

    @_patient
    def newest(self) -> PointOffset | None:
        """Return the last point that is there."""
        last = self._points.last()
        return None if last is None else PointOffset.of(last)

    @_patient
    def latest(self, start: PointOffset, limit: Limit, target: int | None = None) -> PointOffset:
        """Return where a micro-batch after `start` ends, not beyond `target`, an end of the commits topic."""
        self._know(start)
        stop = self._points.end() if target is None else target
        if stop <= start.point + 1:
            return start
        table = self._options.table
        is_wanted = steps(start) if table is None else changes_of(table, cast(str, self._topic))
        return admit(start, self._points.after(start.point, stop), limit, is_wanted)

    @_patient
    def between(self, start: PointOffset, end: PointOffset) -> list[InputPartition]:
        """Return the tasks that read (start, end]."""
        self._know(start)
        points = self._points.after(start.point, end.point + 1) if end.point > start.point else ()
        return self._tasks(points, start, end.point)

    def batch(self) -> list[InputPartition]:
        """Return the tasks of a batch read, as the options say."""
        options = self._options
        start = self.starting() if options.after is None else self._points.before(options.after)
        if options.upto is not None:
            last = options.upto
        else:
            last = self._points.resolve(options.ending, self._log_starts).point
        if last < start.point and (options.upto is not None or not isinstance(options.ending, Latest)):
            raise UsageError(
                f"The read would end at the commit point {last:,}, before it begins at {start.point:,}.",
                "Correct starting and ending.",
            )
        points = self._points.after(start.point, last + 1) if last > start.point else ()
        return self._tasks(points, start, last)

    def forget(self, done: PointOffset) -> None:
        """Drop what will not be asked for again."""
        self._points.forget(done.point)

    def close(self) -> None:
        """End the connections."""
        self._points.close()

    def _tasks(self, points: Iterable[Point], start: PointOffset, last: int) -> list[InputPartition]:
        found = list(points)
        if last > start.point and (not found or found[-1].offset != last):
            raise DataLoss(
                f"The commits topic has no valid commit point at offset {last:,}.",
                "The log was made anew, or the checkpoint belongs to another log: begin again with starting=earliest "
                "and a new checkpoint.",
            )
        if not found:
            return []
        versions = self._read_versions()
        options = self._options
        if options.table is None:
            wanted = {name for name, table in versions.topics.items() if not options.tables or table in options.tables}
            return list(point_tasks(found, start.bytes_total, versions, wanted))
        assert self._topic is not None
        touched = {span.partition for point in found for span in point.spans if span.partition.topic == self._topic}
        if not touched:
            return []
        columns = [name for name in self._schema.names if name not in META.names]
        typed_by = versions.typing(*options.table, columns, options.schema_version)
        planned = ranges(found, self._topic, self._bounds(touched), options.rows_per_task, counted=options.counted)
        return [TableTask(each, typed_by, versions.at(*options.table, each.spans.gen)) for each in planned]

    def _know(self, start: PointOffset) -> None:
        """Make sure, once, that a query goes on in the log in which it began. Raises DataLoss."""
        if self._is_known or start.point == BEGINNING.point:
            return
        there = self._points.before(start.point)
        if there != start:
            raise DataLoss(
                f"The last commit point up to offset {start.point:,} is at {there.point:,}, with LSN {there.end_lsn} "
                f"and {there.rows_total:,} rows; the checkpoint says {start.end_lsn} and {start.rows_total:,} rows.",
                "The log was made anew, or the checkpoint belongs to another log: begin again with starting=earliest "
                "and a new checkpoint.",
            )
        self._is_known = True

    def _read_versions(self) -> Versions:
        """Return the versions, read again when there are more."""
        partition = TopicPartition(self._points.topics.names.schema, 0)
        end = self._points.topics.ends([partition])[partition]
        if self._versions is None or self._versions[0] != end:
            self._versions = end, self._points.versions()
        return self._versions[1]

    def _log_starts(self) -> Mapping[TopicPartition, int]:
        """Return where the partitions begin that rows may be wanted of."""
        last = self._points.last()
        if last is None:
            return {}
        there = topics_there(self._address, self._points.topics)
        wanted = [each for each in last.ends if each.topic in there and self._topic in (None, each.topic)]
        return self._points.topics.starts(wanted)

    def _bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        topics, found = self._points.topics, list(partitions)
        if gone := {each.topic for each in found} - topics_there(self._address, topics):
            raise DataLoss(f"The topic {min(gone)}, whose rows are due, is gone.", "Take a new snapshot of its table.")
        starts, ends = topics.starts(found), topics.ends(found)
        return {partition: Bounds(starts[partition], ends[partition]) for partition in found}
