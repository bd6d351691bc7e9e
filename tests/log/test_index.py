"""The index of a segment: a row that is found is never behind what is looked for, and the newest batches are exact."""

from __future__ import annotations

from bisect import bisect_right

from hypothesis import example, given
from hypothesis import strategies as st

from walstream.log.index import INTERVAL_BYTES, RECENT_MAX, Index

BATCHES = st.lists(st.tuples(st.integers(1, 5), st.integers(61, 9_000)), min_size=1, max_size=60)
"""How many offsets, and how many bytes."""


TIMES = st.lists(st.integers(1_000, 1_004), min_size=1, max_size=60)
"""Of batches: few different ones, so that many are equal and some go back."""


def noted(batches: list[tuple[int, int]]) -> tuple[Index, list[int], list[int]]:
    """Return an index of batches, and where each begins: its offset and its position."""
    index, offsets, positions, offset, position = Index(), [], [], 0, 0
    for count, length in batches:
        index.note(offset, offset + count - 1, position, length, 1_000)
        offsets.append(offset)
        positions.append(position)
        offset, position = offset + count, position + length
    return index, offsets, positions


@given(BATCHES)
def test_a_row_is_a_batch_at_or_before_what_is_looked_for_and_near_it(batches: list[tuple[int, int]]) -> None:
    index, offsets, positions = noted(batches)
    for offset in range(offsets[-1] + batches[-1][0]):
        holder = bisect_right(offsets, offset) - 1
        position, first = index.row_for_offset(offset)
        row = offsets.index(first or 0)
        assert positions[row] == position
        assert row <= holder
        assert positions[holder] - position < INTERVAL_BYTES + 9_000
    for offset, position in list(zip(offsets, positions, strict=True))[-RECENT_MAX:]:
        assert index.row_for_offset(offset) == (position, offset)


@given(BATCHES, st.data())
def test_what_is_cut_off_is_forgotten(batches: list[tuple[int, int]], data: st.DataObject) -> None:
    index, offsets, positions = noted(batches)
    kept = data.draw(st.integers(0, len(batches) - 1))
    index.truncate(positions[kept])
    for offset in offsets:
        position, first = index.row_for_offset(offset)
        assert position < positions[kept] or (position, first) == (0, None)


def test_it_reads_back_from_its_file() -> None:
    index, offsets, _ = noted([(2, 5_000)] * 40)
    again = Index.decode(index.encode())
    assert again is not None
    assert again.covered == index.covered
    assert again.row_for_offset(offsets[10]) == index.row_for_offset(offsets[10])
    assert Index.decode(index.encode()[:-1]) is None


@given(TIMES, st.sampled_from([1_000, 5_000, INTERVAL_BYTES, 20_000]))
@example([1_001, 1_001, 1_001, 1_002, 1_002], INTERVAL_BYTES)
def test_everything_before_the_row_of_a_time_is_earlier_and_the_row_is_near(times: list[int], length: int) -> None:
    index = Index()
    for number, time in enumerate(times):
        index.note(number, number, number * length, length, time)
    again = Index.decode(index.encode())
    assert again is not None
    for asked in range(999, 1_006):
        position = index.position_for_time(asked)
        assert position == again.position_for_time(asked)
        row, rest = divmod(position, length)
        assert rest == 0
        assert all(time < asked for time in times[:row])
        first = next((number for number, time in enumerate(times) if time >= asked), len(times) - 1)
        assert row <= first
        assert first * length - position < INTERVAL_BYTES + length


def test_the_largest_time_is_that_of_the_first_batch_that_has_it() -> None:
    index = Index()
    for number, time in enumerate([5, 7, 7, 6, 7]):
        index.note(10 * number, 10 * number + 9, 100 * number, 100, time)
    assert (index.max_timestamp, index.max_timestamp_offset) == (7, 19)
    again = Index.decode(index.encode())
    assert again is not None
    assert (again.max_timestamp, again.max_timestamp_offset) == (7, 19)
