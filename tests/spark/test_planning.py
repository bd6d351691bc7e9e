"""From points to tasks: every span once, all of them counted, nothing that cannot be there."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.points import ORDERS, OTHER, point, span
from walstream.capture.commit_points import Span, TableSnapshot
from walstream.errors import DataLoss
from walstream.positions import ZERO, Lsn, TopicPartition
from walstream.spark.planning import POINTS_PER_TASK, Bounds, Range, TableTask, point_tasks, ranges
from walstream.spark.types import TableVersion
from walstream.spark.versions import Versions

BOUNDS = {ORDERS: Bounds(0, 1 << 40), OTHER: Bounds(0, 1 << 40)}
TOPIC = ORDERS.topic


def covered(found: list[Range]) -> Counter[int]:
    """How often each offset is read for its rows."""
    return Counter(offset for each in found if not each.is_counting for offset in range(each.start, each.stop))


def test_small_points_share_a_task_and_are_counted_in_it() -> None:
    (one,) = ranges([point(1, span(0, 10)), point(2, span(10, 30)), point(3)], TOPIC, BOUNDS, 100)
    assert (one.start, one.stop, one.is_checked, one.is_counting) == (0, 30, True, False)
    assert one.spans.rows.tolist() == [10, 20]


def test_tasks_are_about_the_same_size() -> None:
    points = [point(number, span(number * 10, number * 10 + 10)) for number in range(30)]
    found = ranges(points, TOPIC, BOUNDS, 250)
    assert [each.spans.rows_total for each in found] == [150, 150]
    # No first share ends where a point does, and what it lacks is no third task.
    points = [point(number, span(number * 7, number * 7 + 7)) for number in range(63)]
    found = ranges(points, TOPIC, BOUNDS, 250)
    assert [each.spans.rows_total for each in found] == [217, 224]


def test_partitions_generations_and_snapshots_are_tasks_of_their_own() -> None:
    snapshot = Span(ORDERS, 5, 25, 8, 0, snapshot="s")
    points = [
        point(1, span(0, 10), span(0, 10, at=OTHER)),
        point(2, snapshot),
        point(3, span(10, 30, 3, gen=7)),
        point(4, Span(TopicPartition("w.public.else", 0), 0, 9, 9, 0)),
    ]
    found = ranges(points, TOPIC, BOUNDS, 100)
    assert sorted((each.spans.partition.partition, each.spans.gen, each.spans.snapshot or "") for each in found) == [
        (0, 0, ""),
        (0, 0, "s"),
        (0, 7, ""),
        (1, 0, ""),
    ]


def test_a_large_point_is_cut_by_offsets_and_counted_by_one_more() -> None:
    found = ranges([point(1, span(0, 10)), point(2, span(10, 1_010))], TOPIC, BOUNDS, 300)
    small, *parts, counting = found
    assert small.is_checked
    assert [(each.start, each.stop) for each in parts] == [(10, 260), (260, 510), (510, 760), (760, 1010)]
    assert not any(each.is_checked or each.is_counting for each in parts)
    assert (counting.start, counting.stop, counting.is_checked, counting.is_counting) == (10, 1010, True, True)
    assert counting.spans.rows_total == 1000


def test_the_caller_may_count() -> None:
    found = ranges([point(1, span(0, 1_000))], TOPIC, BOUNDS, 300, counted=False)
    assert len(found) == 4
    assert not any(each.is_counting or each.is_checked for each in found)


def test_what_retention_has_removed_is_told() -> None:
    with pytest.raises(DataLoss, match="begins at offset 50; 10 rows from offset 0 up to 10"):
        ranges([point(1, span(0, 10))], TOPIC, {ORDERS: Bounds(50, 100)}, 100)
    with pytest.raises(DataLoss, match="ends at offset 5; a commit point says 10"):
        ranges([point(1, span(0, 10))], TOPIC, {ORDERS: Bounds(0, 5)}, 100)
    # Half of a range is gone: perhaps nothing that was due, so the count decides.
    (one,) = ranges([point(1, span(0, 10, 2))], TOPIC, {ORDERS: Bounds(5, 100)}, 100)
    assert (one.start, one.stop, one.log_start) == (5, 10, 5)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 30)), min_size=1, max_size=20), st.integers(1, 200))
def test_every_offset_that_rows_may_lie_at_is_read_once(sizes: list[tuple[int, int]], rows_per_task: int) -> None:
    points, at = [], 0
    for number, (rows, gap) in enumerate(sizes):
        points.append(point(number, span(at, at + rows + gap, rows)))
        at += rows + gap
    found = ranges(points, TOPIC, BOUNDS, rows_per_task)
    assert covered(found) == Counter(range(at))
    checked = [each.spans.rows_total for each in found if each.is_checked]
    assert sum(checked) == sum(rows for rows, _ in sizes)
    for each in found:
        assert each.is_counting or each.spans.rows_total <= rows_per_task or len(each.spans) == 1


def test_a_task_crosses_process_boundaries() -> None:
    (one,) = ranges([point(1, span(0, 10))], TOPIC, BOUNDS, 100)
    version = TableVersion("public", "orders", 1, 0, (), ())
    task = pickle.loads(pickle.dumps(TableTask(one, version, (version,))))
    assert task.range.spans.span(0) == span(0, 10)


def test_points_as_rows() -> None:
    versions = Versions("w", [TableVersion("public", "orders", 1, 0, (), ())])
    one = TableSnapshot("public", "orders", "s", "0/A", rows=4)
    points = [
        point(1, span(0, 10), span(0, 5, at=OTHER), Span(TopicPartition("w.message", 0), 0, 1, 1, 0), bytes_total=120),
        point(2, Span(ORDERS, 10, 14, 4, 0, ZERO, ZERO, "s"), bytes_total=150, snapshot=one),
    ]
    (task,) = point_tasks(points, 100, versions, {TOPIC})
    first, second = task.rows
    assert first[:5] == (1, 0, 1, 100, str(Lsn(100)))
    assert first[7:] == (16, 20, None, None, None, None, {"public.orders": 15})
    assert second[7:] == (4, 30, "public", "orders", "s", 10, {"public.orders": 4})
    many = point_tasks([point(number) for number in range(POINTS_PER_TASK + 1)], 0, versions, set())
    assert [len(each.rows) for each in many] == [POINTS_PER_TASK, 1]
