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


ADMIN = Identity("root", "admin", "", 0.0)
ROWS, WHOLE = wal_pb2.RECORDS, wal_pb2.TRANSACTIONS
CHOSEN = {"tenant_filter": "acme", "key_prefix_filter": "k", "topics": ["a", "b"], "framing": WHOLE, "capture": "shop"}


def choice(identity: Identity = ADMIN, **request: object) -> str:
    return Demand.of(wal_pb2.SubscribeRequest(**request), identity, FeedConfig()).choice  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        {"tenant_filter": "globex"},
        {"tenant_filter": ""},
        {"key_prefix_filter": "kk"},
        {"key_prefix_filter": ""},
        {"topics": ["a", "c"]},
        {"topics": ["a"]},
        {"topics": ["a", "b", "c"]},
        {"topics": ["ab"]},
        {"topics": ["a b"]},
        {"topics": ["a*", "b"]},
        {"topics": []},
        {"framing": ROWS},
        {"capture": "billing"},
        {"capture": ""},
    ],
    ids=str,
)
def test_each_thing_that_decides_about_entries_is_part_of_the_choice(other: dict[str, object]) -> None:
    assert choice(**(CHOSEN | other)) != choice(**CHOSEN)


def test_the_tenant_of_the_token_is_part_of_the_choice() -> None:
    acme, globex = (Identity("ann", "replication", tenant, 0.0) for tenant in ("acme", "globex"))
    assert choice(acme) != choice(globex)
    assert choice(acme) == choice(acme, tenant_filter="acme"), "the token chooses the tenant either way"
    assert choice(ADMIN, tenant_filter="acme") == choice(acme)


def test_a_text_does_not_count_for_another_field() -> None:
    chosen = [{"tenant_filter": "x"}, {"key_prefix_filter": "x"}, {"topics": ["x"]}, {"capture": "x"}]
    assert len({choice(**one) for one in ({}, *chosen)}) == 5


@pytest.mark.parametrize(
    "same",
    [
        {"topics": ["b", "a"]},
        {"topics": ["a", "b", "a", ""]},
        {"start_lsn": "oldest"},
        {"subscriber_id": "another"},
        {"batch_size_hint": 7},
        {"credit_entries": 7},
        {"message_bytes_max": 8_192},
        {"accept_compression": [wal_pb2.ZSTD]},
        {"accept_watermarks": True},
    ],
    ids=str,
)
def test_what_does_not_decide_about_entries_is_no_part_of_the_choice(same: dict[str, object]) -> None:
    assert choice(**(CHOSEN | same)) == choice(**CHOSEN)


def test_a_choice_is_the_same_in_every_process() -> None:
    """It is kept in the log: another process, or another feed, compares it with its own."""
    assert choice(**CHOSEN) == "0fa76ef758b9d5560b3a52e0"
