"""Fetch sessions: what a client has to say again, what it is told again, and what happens when there are too many."""

from __future__ import annotations

from itertools import count

import pytest

from walstream.node import sessions
from walstream.node.sessions import (
    EPOCH_MAX,
    EVICTABLE_AFTER_MS,
    INVALID_SESSION_EPOCH,
    SESSION_NOT_FOUND,
    Sessions,
    Turn,
    Wanted,
)


def make(most: int = 10) -> Sessions:
    numbers = count(1)
    return Sessions(most, lambda: next(numbers))


def wanted(partition: int, offset: int = 0, topic: str = "t") -> Wanted:
    return Wanted(topic, partition, -1, offset, 1000)


def begin(cache: Sessions, *partitions: int, now_ms: int = 0) -> Turn:
    return cache.begin(0, 0, [wanted(p) for p in partitions], [], now_ms)


def test_a_fetch_without_a_session_leaves_nothing_behind() -> None:
    cache = make()
    turn = cache.begin(0, -1, [wanted(0)], [], 0)
    assert (turn.session_id, len(turn.wanted), turn.is_incremental, len(cache)) == (0, 1, False, 0)


def test_a_session_remembers_its_partitions() -> None:
    cache = make()
    first = begin(cache, 0, 1)
    assert (first.session_id, first.is_incremental) == (1, False)
    second = cache.begin(1, 1, [], [], 0)
    assert (second.is_incremental, [one.partition for one in second.wanted]) == (True, [0, 1])


def test_partitions_are_added_changed_and_forgotten() -> None:
    cache = make()
    begin(cache, 0, 1)
    turn = cache.begin(1, 1, [wanted(1, offset=5), wanted(2)], [("t", 0)], 0)
    assert [(one.partition, one.offset) for one in turn.wanted] == [(1, 5), (2, 0)]
    assert cache.partitions == 2


def test_a_change_keeps_what_the_client_was_told() -> None:
    cache = make()
    first = begin(cache, 0)
    first.wanted[0].told = (10, 0)
    turn = cache.begin(1, 1, [wanted(0, offset=5)], [], 0)
    assert turn.wanted[0].told == (10, 0)


def test_epochs_count_up_and_wrap_to_one() -> None:
    cache = make()
    session = begin(cache, 0).session
    assert session is not None
    assert cache.begin(1, 1, [], [], 0).error_code == 0
    assert cache.begin(1, 1, [], [], 0).error_code == INVALID_SESSION_EPOCH
    assert cache.begin(1, 2, [], [], 0).error_code == 0
    session.epoch = EPOCH_MAX
    assert cache.begin(1, EPOCH_MAX, [], [], 0).error_code == 0
    assert session.epoch == 1


def test_an_unknown_session_is_not_found() -> None:
    assert make().begin(77, 3, [], [], 0).error_code == SESSION_NOT_FOUND


@pytest.mark.parametrize(("epoch", "left"), [(-1, 0), (0, 1)])
def test_a_full_fetch_ends_the_session_it_names(epoch: int, left: int) -> None:
    cache = make()
    begin(cache, 0)
    cache.begin(1, epoch, [wanted(0)], [], 0)
    assert cache.begin(1, 1, [], [], 0).error_code == SESSION_NOT_FOUND
    assert (len(cache), cache.partitions) == (left, left)


def test_a_new_session_takes_the_place_of_one_long_idle_only() -> None:
    cache = make(2)
    begin(cache, 0, now_ms=0)
    begin(cache, 0, now_ms=EVICTABLE_AFTER_MS)
    assert begin(cache, 0, now_ms=EVICTABLE_AFTER_MS).session_id == 3
    assert cache.begin(1, 1, [], [], 0).error_code == SESSION_NOT_FOUND
    assert begin(cache, 0, now_ms=EVICTABLE_AFTER_MS + 1).session_id == 0
    assert (len(cache), cache.evictions) == (2, 1)


def test_use_keeps_a_session() -> None:
    cache = make(2)
    begin(cache, 0, now_ms=0)
    begin(cache, 0, now_ms=1)
    cache.begin(1, 1, [], [], EVICTABLE_AFTER_MS)
    begin(cache, 0, now_ms=EVICTABLE_AFTER_MS + 1)
    assert cache.begin(1, 2, [], [], EVICTABLE_AFTER_MS).error_code == 0
    assert cache.begin(2, 1, [], [], EVICTABLE_AFTER_MS).error_code == SESSION_NOT_FOUND


def test_the_partitions_of_all_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PARTITIONS_MAX", 5)
    cache = make()
    assert begin(cache, *range(6)).session_id == 0
    assert begin(cache, *range(4)).session_id == 1
    assert begin(cache, *range(4)).session_id == 0
    assert cache.begin(1, 1, [wanted(p) for p in range(10, 20)], [], 0).error_code == SESSION_NOT_FOUND
    assert cache.partitions == 0


def test_no_sessions_at_all() -> None:
    assert begin(make(0), 0).session_id == 0
