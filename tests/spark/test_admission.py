"""Offsets as Spark keeps them, and how much a micro-batch takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.points import ORDERS, counted, point, span
from walstream.capture.commit_points import Point, TableSnapshot
from walstream.errors import UsageError
from walstream.positions import Lsn, TopicPartition
from walstream.spark.admission import IDLE_POINTS_MAX, POINTS_MAX, Limit, admit, changes_of, steps
from walstream.spark.offsets import BEGINNING, PointOffset


def test_an_offset_is_the_same_text_every_time() -> None:
    offset = PointOffset(12, Lsn.parse("16/B374D848"), 42, 4711)
    text = json.dumps(offset.written())
    assert text == '{"bytes_total": 4711, "end_lsn": "16/B374D848", "point": 12, "rows_total": 42}'
    assert PointOffset.read(json.loads(text)) == offset


@pytest.mark.parametrize(
    "given_", [{}, {"point": 1}, {"point": "x", "end_lsn": "0/0", "rows_total": 0, "bytes_total": 0}]
)
def test_an_offset_of_another_source_is_refused(given_: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="belongs to another query"):
        PointOffset.read(given_)


def test_everything_without_limits() -> None:
    assert admit(BEGINNING, counted(3, 4, 5), Limit()).point == 3


def test_no_more_rows_than_allowed() -> None:
    points = counted(3, 4, 5)
    assert admit(BEGINNING, points, Limit(rows_max=7)).point == 2
    assert admit(BEGINNING, points, Limit(rows_max=8)).point == 2
    assert admit(PointOffset.of(points[0]), points[1:], Limit(rows_max=8)).point == 2
    assert admit(PointOffset.of(points[0]), points[1:], Limit(rows_max=9)).point == 3


def test_no_more_bytes_than_allowed() -> None:
    assert admit(BEGINNING, counted(3, 4, 5), Limit(bytes_max=700)).point == 2
    assert admit(BEGINNING, counted(3, 4, 5), Limit(bytes_max=700, rows_max=3)).point == 1


def test_the_first_point_is_taken_however_large() -> None:
    assert admit(BEGINNING, counted(1000, 1), Limit(rows_max=10)).point == 1
    assert admit(BEGINNING, counted(0, 0, 1000, 1), Limit(rows_max=10)).point == 3


def test_no_point_is_looked_at_beyond_the_limit() -> None:
    seen: list[int] = []

    def points() -> Iterator[Point]:
        for each in counted(*[5] * 100):
            seen.append(each.offset)
            yield each

    assert admit(BEGINNING, points(), Limit(rows_max=10)).point == 2
    assert seen == [1, 2, 3]


def test_a_minimum_is_waited_for() -> None:
    assert admit(BEGINNING, counted(3, 4), Limit(rows_min=8)) == BEGINNING
    assert admit(BEGINNING, counted(3, 5), Limit(rows_min=8)).point == 2


def test_points_without_anything_make_no_batch_for_a_while() -> None:
    def is_wanted(each: Point) -> bool:
        return bool(each.rows)

    assert admit(BEGINNING, counted(*[0] * 10), Limit(), is_wanted) == BEGINNING
    assert admit(BEGINNING, counted(*[0] * IDLE_POINTS_MAX), Limit(), is_wanted).point == IDLE_POINTS_MAX
    assert admit(BEGINNING, counted(0, 0, 1, 0), Limit(), is_wanted).point == 4


def test_points_are_bounded_unless_all_is_asked_for() -> None:
    many = [point(number, rows_total=number) for number in range(POINTS_MAX + 10)]
    assert admit(BEGINNING, many, Limit()).point == POINTS_MAX - 1
    assert admit(BEGINNING, many, Limit(points_max=None)).point == POINTS_MAX + 9


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_batches_one_after_the_other_hold_everything_once(rows: list[int], rows_max: int) -> None:
    points = counted(*rows)
    start, ends = BEGINNING, []
    while True:
        rest = [each for each in points if each.offset > start.point]
        end = admit(start, rest, Limit(rows_max=rows_max))
        if end == start:
            break
        held = [each.rows for each in rest if each.offset <= end.point]
        assert sum(held) <= rows_max or len([count for count in held if count]) == 1
        start = end
        ends.append(end.point)
    assert start.point == (len(rows) or BEGINNING.point)


def test_what_is_a_step() -> None:
    snapshot = TableSnapshot("public", "orders", "s", "0/100")

    def asked(*points: Point) -> list[bool]:
        is_wanted = steps(BEGINNING)
        return [is_wanted(each) for each in points]

    assert asked(point(1), point(2, span(0, 1)), point(3), point(4, snapshot=snapshot)) == [False, True, False, True]
    assert asked(point(1), point(2, epoch=2), point(3, epoch=2)) == [False, True, False]
    # The snapshot is ahead of the stream, LSN 0x100 = 256: the third point, at 300, is where its table is whole.
    known = {("public", "orders"): snapshot}
    assert asked(*(replace(point(number), snapshots=known) for number in (1, 2, 3, 4))) == [False, False, True, False]


def test_what_changes_a_table() -> None:
    is_wanted = changes_of(("public", "orders"), ORDERS.topic)
    assert is_wanted(point(1, span(0, 1)))
    assert is_wanted(point(1, snapshot=TableSnapshot("public", "orders", "s", "0/1")))
    assert not is_wanted(point(1, snapshot=TableSnapshot("public", "others", "s", "0/1")))
    assert not is_wanted(point(1, span(0, 1, at=TopicPartition("w.public.others", 0))))
