"""The leader-epoch map against the replication rules, example by example and against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import CorruptLog
from walstream.log.batch import OFFSET_MAX
from walstream.log.epochs import EpochMap

RISING = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), max_size=8).map(
    lambda steps: [
        [sum(step[0] for step in steps[: index + 1]), sum(step[1] for step in steps[: index + 1])]
        for index in range(len(steps))
    ]
)


def test_end_of_each_epoch() -> None:
    epochs = EpochMap.from_list([[2, 10], [5, 20], [7, 35]])
    assert epochs.last_epoch == 7
    assert epochs.end_offset_for(7, 50) == (7, 50)
    assert epochs.end_offset_for(9, 50) == (7, 50)
    assert epochs.end_offset_for(6, 50) == (5, 35)
    assert epochs.end_offset_for(5, 50) == (5, 35)
    assert epochs.end_offset_for(2, 50) == (2, 20)
    assert epochs.end_offset_for(1, 50) == (1, 10)
    assert epochs.end_offset_for(-1, 50) == (-1, 10)


def test_an_empty_map_ends_every_epoch_at_the_log_end() -> None:
    assert EpochMap().end_offset_for(3, 12) == (3, 12)
    assert EpochMap().last_epoch == -1
    assert EpochMap().epoch_at(0) == -1


def test_assign() -> None:
    epochs = EpochMap()
    assert epochs.assign(1, 0)
    assert not epochs.assign(1, 5)
    assert epochs.assign(4, 5)
    assert epochs.to_list() == [[1, 0], [4, 5]]
    with pytest.raises(CorruptLog):
        epochs.assign(3, 9)
    with pytest.raises(CorruptLog):
        epochs.assign(5, 4)
    for epoch, start in ((-1, 9), (6, -1)):
        with pytest.raises(CorruptLog, match="negative"):
            EpochMap().assign(epoch, start)
    assert epochs.to_list() == [[1, 0], [4, 5]]


def test_a_leader_that_wrote_nothing_gives_way() -> None:
    epochs = EpochMap()
    epochs.assign(1, 0)
    epochs.assign(2, 10)
    assert epochs.assign(3, 10)
    assert epochs.to_list() == [[1, 0], [3, 10]]
    assert epochs.end_offset_for(2, 15) == (1, 10)


def test_truncate() -> None:
    epochs = EpochMap.from_list([[1, 0], [2, 10], [3, 20]])
    assert not epochs.truncate(21)
    assert epochs.truncate(20)
    assert epochs.to_list() == [[1, 0], [2, 10]]
    assert epochs.truncate(0)
    assert len(epochs) == 0


def test_trim() -> None:
    epochs = EpochMap.from_list([[1, 5], [2, 10], [3, 20]])
    assert not epochs.trim(3)
    assert not epochs.trim(5)
    assert epochs.trim(7)
    assert epochs.to_list() == [[1, 7], [2, 10], [3, 20]]
    assert epochs.trim(10)
    assert epochs.to_list() == [[2, 10], [3, 20]]
    assert epochs.trim(30)
    assert epochs.to_list() == [[3, 30]]
    assert not EpochMap().trim(3)


@pytest.mark.parametrize(
    "entries",
    [[[1, 0], [1, 5]], [[2, 0], [1, 5]], [[1, 5], [2, 5]], [[-1, 0]], [[1, -1]], [["1", 0]], [[1]], [3], [[True, 0]]],
)
def test_impossible_lists_are_refused(entries: list[list[int]]) -> None:
    with pytest.raises(CorruptLog):
        EpochMap.from_list(entries)


@settings(deadline=None)
@given(RISING)
def test_round_trip(entries: list[list[int]]) -> None:
    assert EpochMap.from_list(entries).to_list() == entries
    assert EpochMap.from_list(entries) == EpochMap.from_list(entries)


@settings(deadline=None)
@given(RISING, st.integers(0, 200), st.integers(0, 200))
def test_against_the_epoch_of_every_offset(entries: list[list[int]], log_start: int, log_end: int) -> None:
    """A log as a list of epochs: truncating and trimming it are slices, an epoch's end is where higher ones begin."""
    epochs = EpochMap.from_list(entries)
    model = {offset: max((e for e, start in entries if start <= offset), default=-1) for offset in range(200)}
    assert {offset: epochs.epoch_at(offset) for offset in model} == model
    for offset, epoch in model.items():
        end = min((start for _, start in entries if start > offset), default=OFFSET_MAX)
        assert epochs.span_at(offset) == (epoch, end)
    epochs.truncate(log_end)
    epochs.trim(log_start)
    for offset in range(log_start, log_end):
        assert epochs.epoch_at(offset) == model[offset]
    if log_start < log_end and model[log_start] >= 0:
        for epoch in set(model.values()) - {-1}:
            below = [offset for offset in range(log_start, log_end) if model[offset] <= epoch]
            assert epochs.end_offset_for(epoch, log_end)[1] == (max(below) + 1 if below else log_start)
