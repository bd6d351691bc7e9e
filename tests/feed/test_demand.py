"""What a request may ask for: limits on everything that a stranger can have remembered."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

from walstream.config import FeedConfig
from walstream.errors import UsageError
from walstream.feed import wal_pb2
from walstream.feed.auth.identity import Identity
from walstream.feed.reading.frames import MATCHES_BYTES_MAX, matches_topic
from walstream.feed.service.demand import CREDIT_ENTRIES_MAX, TOPICS_BYTES_MAX, Demand
from walstream.positions import GlobalLsn

ANN = Identity("ann", "replication", "acme", 0.0)


def demand(**request: object) -> Demand:
    return Demand.of(wal_pb2.SubscribeRequest(**request), ANN, FeedConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("topics", [["x" * 16_384], ["\U0001f600" * 4_096], ["x"] * 8_193, [""] * 16_385])
def test_too_many_patterns(topics: list[str]) -> None:
    with pytest.raises(UsageError, match="topics have more than"):
        demand(topics=topics)


def test_what_patterns_stand_for_is_remembered_within_bounds() -> None:
    """Whoever asks for other topics each time has the feed remember the last of them, and no more."""
    tracemalloc.start()
    try:
        for number in range(2_000):
            # One character that is not ASCII has all the others of its text take four bytes.
            patterns = demand(topics=[f"{number:08d}*", "\U0001f600" + "x" * (TOPICS_BYTES_MAX - 100)]).entries.topics
            matches_topic(patterns, "orders")
        assert tracemalloc.get_traced_memory()[0] < MATCHES_BYTES_MAX + 1_000_000
    finally:
        tracemalloc.stop()


def test_credit_costs_no_more_than_it_says() -> None:
    lsn = int(GlobalLsn.at_time(1_700_000_000_000))
    assert CREDIT_ENTRIES_MAX * (sys.getsizeof(lsn) + 12) < 6_000_000
    assert demand(credit_entries=CREDIT_ENTRIES_MAX).credit == CREDIT_ENTRIES_MAX
    with pytest.raises(UsageError, match="credit_entries is more than"):
        demand(credit_entries=CREDIT_ENTRIES_MAX + 1)


def test_a_tenant_has_its_own_filter_whatever_it_asks_for() -> None:
    for request in ({}, {"tenant_filter": "acme"}, {"key_prefix_filter": "walstream:other:"}, {"topics": ["*"]}):
        assert demand(**request).entries.tenant == b"acme"
