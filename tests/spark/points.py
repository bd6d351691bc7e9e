"""Commit points made by hand, for tests of what reads them."""

from __future__ import annotations

from walstream.capture.commit_points import Point, Span, TableSnapshot
from walstream.positions import Lsn, TopicPartition

ORDERS = TopicPartition("w.public.orders", 0)
OTHER = TopicPartition("w.public.orders", 1)


def span(start: int, stop: int, rows: int | None = None, *, gen: int = 0, at: TopicPartition = ORDERS) -> Span:
    """A span of the stream whose LSNs are its offsets, times ten."""
    return Span(at, start, stop, stop - start if rows is None else rows, gen, Lsn(start * 10), Lsn(stop * 10))


def point(
    offset: int,
    *spans: Span,
    rows_total: int = 0,
    bytes_total: int = 0,
    epoch: int = 1,
    snapshot: TableSnapshot | None = None,
) -> Point:
    return Point(
        offset=offset,
        gen=0,
        source_epoch=epoch,
        end_lsn=Lsn(offset * 100),
        last_xid=7,
        last_commit_time_us=1_000_000,
        rows_total=rows_total,
        bytes_total=bytes_total,
        next={},
        topic_ids={},
        spans=spans,
        snapshot=snapshot,
    )


def counted(*rows: int, size: int = 100, first: int = 1) -> list[Point]:
    """Points with so many rows each, of `size` bytes a row."""
    points, total = [], 0
    for number, count in enumerate(rows):
        spans = [span(total, total + count)] if count else []
        total += count
        points.append(point(first + number, *spans, rows_total=total, bytes_total=total * size))
    return points
