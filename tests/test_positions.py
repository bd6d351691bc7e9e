"""LSNs, positions and partitions: their text and their order."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.errors import UsageError
from walstream.positions import LSN_MAX, PART_MAX, ZERO, GlobalLsn, Lsn, Position, TopicPartition


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16/B374D848", 0x16B374D848),
        ("0/0", 0),
        ("FFFFFFFF/FFFFFFFF", LSN_MAX),
        ("1/A", 0x10000000A),
    ],
)
def test_lsn_text(text: str, number: int) -> None:
    assert Lsn.parse(text) == number
    assert str(Lsn(number)) == f"{Lsn(number)}" == text
    assert repr(Lsn(number)) == f"Lsn({text})"


@given(st.integers(0, LSN_MAX))
def test_lsn_round_trip(number: int) -> None:
    lsn = Lsn(number)
    assert Lsn.parse(str(lsn)) == lsn
    assert Lsn.parse(str(lsn).lower()) == lsn
    assert pickle.loads(pickle.dumps(lsn)) == copy.copy(lsn) == lsn
    assert type(pickle.loads(pickle.dumps(lsn))) is Lsn


@pytest.mark.parametrize(
    "text", ["", "/", "0", "0/", "/0", "G/0", "0/123456789", " 0/0", "0/0\n", "-1/0", "0/0/0", "٣/0"]
)
def test_what_is_no_lsn(text: str) -> None:
    with pytest.raises(UsageError, match="not an LSN"):
        Lsn.parse(text)


def test_positions_compare_in_commit_order_within_an_epoch() -> None:
    assert Position(1, Lsn.parse("9/0"), 7) < Position(2, ZERO, 1)
    assert Position(1, Lsn.parse("A/0"), 2) > Position(1, Lsn.parse("9/FFFFFFFF"), 3)
    assert Position(1, Lsn(5), 2) < Position(1, Lsn(5), 10)


@given(st.text("abc.-_0", min_size=1), st.integers(0, 2**31))
def test_partition_round_trip(topic: str, partition: int) -> None:
    there = TopicPartition(topic, partition)
    assert TopicPartition.parse(str(there)) == there


@pytest.mark.parametrize("text", ["", "orders", "-0", "orders-", "orders-x", "orders-²"])
def test_what_is_no_partition(text: str) -> None:
    with pytest.raises(UsageError, match="not a partition"):
        TopicPartition.parse(text)


@given(st.integers(0, LSN_MAX), st.integers(0, PART_MAX), st.integers(0, PART_MAX))
def test_global_lsn_has_one_text_and_three_parts(stamp: int, region: int, index: int) -> None:
    lsn = GlobalLsn.of(stamp, region, index)
    assert (lsn.stamp, lsn.region, lsn.index) == (stamp, region, index)
    assert GlobalLsn.parse(str(lsn)) == lsn
    assert len(str(lsn)) == 38


_PARTS = st.tuples(st.integers(0, LSN_MAX), st.integers(0, PART_MAX), st.integers(0, PART_MAX))


@given(_PARTS, _PARTS)
def test_global_lsns_sort_alike_as_parts_numbers_and_text(
    left: tuple[int, int, int], right: tuple[int, int, int]
) -> None:
    a, b = GlobalLsn.of(*left), GlobalLsn.of(*right)
    assert (left < right) == (a < b) == (str(a) < str(b))


@given(_PARTS)
def test_what_follows_a_global_lsn_is_the_next_possible_one(parts: tuple[int, int, int]) -> None:
    lsn = GlobalLsn.of(*parts)
    if lsn < GlobalLsn.of(LSN_MAX, PART_MAX, PART_MAX):
        assert lsn < lsn.next() == lsn + 1


def test_a_used_up_index_is_followed_by_every_later_region() -> None:
    last = GlobalLsn.of(5 << 16, 7, PART_MAX)
    assert last.next() == GlobalLsn.of(5 << 16, 8, 0)


@pytest.mark.parametrize(
    "text",
    [
        "", "0", "019a2b3c4d5e0000.7.42", "019A2B3C4D5E0000.0000000007.0000000042",
        "019a2b3c4d5e0000.4294967296.0000000000", "019a2b3c4d5e0000.0000000000.4294967296",
        "019a2b3c4d5e0000.0000000007.000000004²", " 019a2b3c4d5e0000.0000000007.0000000042",
    ],
)  # fmt: skip
def test_what_is_no_global_lsn(text: str) -> None:
    with pytest.raises(UsageError, match="not an LSN of the feed"):
        GlobalLsn.parse(text)


def test_the_time_of_a_global_lsn() -> None:
    assert GlobalLsn.at_time(1_700_000_000_000).time_ms == 1_700_000_000_000
    assert GlobalLsn.at_time(1_700_000_000_001) > GlobalLsn.of(1_700_000_000_000 << 16, PART_MAX, PART_MAX)
