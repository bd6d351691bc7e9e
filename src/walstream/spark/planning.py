"""From commit points to the tasks of a read: which executor reads which offsets, and who counts.

Owns the split; refuses to know the log and what records say. Sans-IO. A task reads one range of offsets of one
partition, for points of one generation, either of the stream or of one snapshot. Invariants: the tasks of a read hold
every span of its points once, and the rows of each span are counted by somebody.

    several small points        together in a task, up to `rows_per_task`; the task counts each of its points
    one point that is larger    cut by offsets into parts of that size, which cannot count what others read; one more
                                task reads the same range for its number alone, unless the caller counts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from walstream.capture.commit_points import Point, Span
from walstream.errors import DataLoss
from walstream.positions import Lsn, TopicPartition
from walstream.spark.rule import Spans
from walstream.spark.types import TableVersion, table_name
from walstream.spark.versions import Versions

POINTS_PER_TASK = 10_000


class Bounds(NamedTuple):
    """What of a partition is there now."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Range:
    """What one task reads."""

    spans: Spans
    start: int
    stop: int
    log_start: int
    is_checked: bool = True
    """Whether it sees all rows of its spans and so compares their number."""
    is_counting: bool = False
    """Whether it yields nothing: only the number matters."""


@dataclass(frozen=True)
class TableTask(InputPartition):
    """A range of a table's rows."""

    range: Range
    wanted: TableVersion
    """The version whose columns are read."""
    versions: tuple[TableVersion, ...]
    """What the rows may be written under."""


@dataclass(frozen=True)
class PointsTask(InputPartition):
    """Commit points, as the rows that they become."""

    rows: tuple[tuple[object, ...], ...]


def ranges(
    points: Iterable[Point],
    topic: str,
    bounds: Mapping[TopicPartition, Bounds],
    rows_per_task: int,
    *,
    counted: bool = True,
) -> list[Range]:
    """Return the ranges that hold a topic's rows of these points. Raises DataLoss for what cannot be there."""
    groups: dict[tuple[TopicPartition, int, str | None], list[Span]] = {}
    for point in points:
        for span in point.spans:
            if span.partition.topic == topic and span.rows:
                groups.setdefault((span.partition, span.gen, span.snapshot), []).append(span)
    found: list[Range] = []
    for (partition, _, _), spans in groups.items():
        there = bounds[partition]
        for span in spans:
            _check(span, there)
        for group in _portions(spans, rows_per_task):
            found += _split(Spans.of(group), there.start, rows_per_task, counted)
    return found


def _check(span: Span, there: Bounds) -> None:
    if span.stop <= there.start:
        raise DataLoss(
            f"{span.partition} begins at offset {there.start:,}; {span.rows:,} rows from offset {span.start:,} up to "
            f"{span.stop:,} (LSN {span.lsn_from} to {span.lsn_to}) are due.",
            "Retention has removed them: begin again with starting=earliest and a new checkpoint, or take a new "
            "snapshot.",
        )
    if span.stop > there.end:
        raise DataLoss(
            f"{span.partition} ends at offset {there.end:,}; a commit point says {span.stop:,}.",
            "The log has lost rows, or the topic was made anew: take a new snapshot.",
        )


def _portions(spans: Sequence[Span], rows_per_task: int) -> Iterator[list[Span]]:
    """Divide spans into runs of about the same number of rows; a span that is too large for a task is alone."""
    left = sum(span.rows for span in spans)
    run: list[Span] = []
    rows = 0
    for span in spans:
        is_large = span.stop - span.start > rows_per_task
        # Of what is left, not of all: what earlier runs lack of their share would be a small one at the end.
        if run and (is_large or rows + span.rows > ceil(left / ceil(left / rows_per_task))):
            yield run
            run, rows, left = [], 0, left - rows
        run.append(span)
        rows += span.rows
        if is_large:
            yield run
            run, rows, left = [], 0, left - rows
    if run:
        yield run


def _split(spans: Spans, log_start: int, rows_per_task: int, counted: bool) -> Iterator[Range]:
    start, stop = max(log_start, int(spans.start[0])), int(spans.stop[-1])
    parts = ceil((stop - start) / rows_per_task)
    if len(spans) > 1 or parts <= 1:
        yield Range(spans, start, stop, log_start)
        return
    size = ceil((stop - start) / parts)
    for first in range(start, stop, size):
        yield Range(spans, first, min(first + size, stop), log_start, is_checked=False)
    if counted:
        yield Range(spans, start, stop, log_start, is_counting=True)


def point_tasks(points: Iterable[Point], start_bytes: int, versions: Versions, wanted: set[str]) -> list[PointsTask]:
    """Return commit points as tasks; `start_bytes` is the total before the first, `wanted` the topics to count."""
    rows: list[tuple[object, ...]] = []
    previous = start_bytes
    for point in points:
        rows.append(_row(point, point.bytes_total - previous, versions, wanted))
        previous = point.bytes_total
    return [PointsTask(tuple(rows[at : at + POINTS_PER_TASK])) for at in range(0, len(rows), POINTS_PER_TASK)]


def _row(point: Point, size: int, versions: Versions, wanted: set[str]) -> tuple[object, ...]:
    tables: dict[str, int] = {}
    for span in point.spans:
        if span.partition.topic in wanted:
            name = table_name(*versions.topics[span.partition.topic])
            tables[name] = tables.get(name, 0) + span.rows
    one = point.snapshot
    return (
        point.offset,
        point.gen,
        point.source_epoch,
        int(point.end_lsn),
        str(point.end_lsn),
        point.last_xid,
        point.last_commit_time_us or None,
        point.rows,
        size,
        one.schema if one else None,
        one.table if one else None,
        one.id if one else None,
        int(Lsn.parse(one.lsn)) if one else None,
        tables,
    )
