"""LSNs, positions and partitions: their text and their order."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.errors import UsageError
from walstream.positions import LSN_MAX, ZERO, Lsn, Position, TopicPartition


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
