"""How much a micro-batch takes: whole commit points, up to so many rows and bytes.

Owns that choice; refuses to know the log and Spark's classes for it. A limit is soft at one point: the first point with
rows is taken however large it is, because a transaction is never split. Points that hold nothing of interest do not
make a batch by themselves until many of them have come: an idle source would otherwise have Spark write its logs
without end, while a query that never moved on would one day stand before what retention has left. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from walstream.capture.commit_points import Point
from walstream.positions import Lsn
from walstream.spark.offsets import PointOffset

IDLE_POINTS_MAX: Final = 500
"""Points without anything in them that may lie between a query and the end: half of what lies between two full ones."""

POINTS_MAX: Final = 10_000
"""Points of one batch: what plans it holds them in memory."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one batch may hold; None: as much as there is."""

    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int = 0
    points_max: int | None = POINTS_MAX

    def allows(self, start: PointOffset, point: Point) -> bool:
        """Whether everything from `start` up to the point is little enough."""
        if self.rows_max is not None and point.rows_total - start.rows_total > self.rows_max:
            return False
        return self.bytes_max is None or point.bytes_total - start.bytes_total <= self.bytes_max


def admit(
    start: PointOffset, points: Iterable[Point], limit: Limit, is_wanted: Callable[[Point], bool] = lambda _: True
) -> PointOffset:
    """Return where the batch after `start` ends, having looked at no more points than needed; `start`: no batch.

    `is_wanted` tells whether a point holds anything for this query.
    """
    end, count, has_rows, is_worth_it = start, 0, False, False
    for point in points:
        if count == limit.points_max or (has_rows and not limit.allows(start, point)):
            break
        end = PointOffset.of(point)
        count += 1
        if is_wanted(point):
            is_worth_it = True
        has_rows = end.rows_total > start.rows_total
    if end.rows_total - start.rows_total < limit.rows_min:
        return start
    return end if is_worth_it or count >= IDLE_POINTS_MAX else start


def changes_of(table: tuple[str, str], topic: str) -> Callable[[Point], bool]:
    """Return what tells whether a point holds rows of a table, or finishes its snapshot."""

    def is_wanted(point: Point) -> bool:
        one = point.snapshot
        is_snapshot = one is not None and (one.schema, one.table) == table
        return is_snapshot or any(span.partition.topic == topic for span in point.spans)

    return is_wanted


def steps(start: PointOffset) -> Callable[[Point], bool]:
    """Return what tells whether a point changes anything at all; it is asked point by point, from `start` on."""
    before_lsn, epoch = start.end_lsn, 0

    def is_wanted(point: Point) -> bool:
        nonlocal before_lsn, epoch
        passed_lsn, is_same = before_lsn, point.source_epoch == (epoch or point.source_epoch)
        before_lsn, epoch = point.end_lsn, point.source_epoch
        if point.rows or point.snapshot is not None or not is_same:
            return True
        # A snapshot may be ahead of the stream: its table is whole only when the stream has reached its LSN.
        return any(passed_lsn < Lsn.parse(one.lsn) <= point.end_lsn for one in point.snapshots.values())

    return is_wanted
