"""Credit: never more under way than was granted, and never a leader that waits for nothing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import CreditExceeded
from walstream.replication.messages import Credit, CreditNeeded
from walstream.replication.wire.credit import GrantedCredit, SpentCredit

WINDOW = 1000


def test_a_window_is_granted_from_the_beginning() -> None:
    assert SpentCredit(WINDOW).available_bytes == WINDOW


def test_grants_come_at_the_low_watermark() -> None:
    granted = GrantedCredit(WINDOW, 10_000)
    granted.arrived(600, 600)
    assert granted.released(499) is None
    assert granted.released(1) == Credit(1500)
    assert granted.released(100) is None


def test_a_repeated_grant_grants_nothing() -> None:
    spent = SpentCredit(WINDOW)
    spent.take(900)
    assert spent.granted(Credit(1500))
    assert not spent.granted(Credit(1500))
    assert not spent.granted(Credit(1200))
    assert spent.available_bytes == 600


def test_a_leader_that_waits_says_so_once() -> None:
    spent = SpentCredit(WINDOW)
    spent.take(900)
    assert spent.ask(100) is None
    assert spent.ask(300) == CreditNeeded(300)
    assert spent.ask(300) is None
    spent.take(50)
    assert spent.ask(300) == CreditNeeded(300)


def test_who_waits_is_granted_what_there_is() -> None:
    granted = GrantedCredit(WINDOW, 10_000)
    granted.arrived(900, 900)
    assert granted.needed(CreditNeeded(300)) is None
    assert granted.released(200) == Credit(1200)


def test_a_batch_larger_than_the_window_gets_through_alone() -> None:
    granted = GrantedCredit(WINDOW, 10_000)
    granted.arrived(400, 400)
    assert granted.needed(CreditNeeded(5000)) == Credit(5000)
    assert granted.released(400) == Credit(5400)
    granted.arrived(5400, 5000)
    assert granted.released(4000) is None
    assert granted.held_bytes == 1000
    assert granted.released(1000) == Credit(6400)


def test_nobody_needs_more_than_the_largest_frame() -> None:
    with pytest.raises(CreditExceeded, match="10001"):
        GrantedCredit(WINDOW, 10_000).needed(CreditNeeded(10_001))


@pytest.mark.parametrize(("position", "size"), [(1001, 1), (1001, 1001), (500, 501)])
def test_more_than_was_granted_is_refused(position: int, size: int) -> None:
    with pytest.raises(CreditExceeded):
        GrantedCredit(WINDOW, 10_000).arrived(position, size)


def test_no_frame_is_larger_than_what_may_be_under_way() -> None:
    granted = GrantedCredit(WINDOW, 10_000)
    granted.arrived(900, 900)
    granted.released(900)
    with pytest.raises(CreditExceeded, match="1001 in one frame"):
        granted.arrived(1901, 1001)


def test_what_never_came_does_not_leak() -> None:
    granted = GrantedCredit(WINDOW, 10_000)
    granted.arrived(100, 100)
    granted.arrived(900, 50)  # 750 bytes between them were lost.
    assert granted.held_bytes == 150
    assert granted.released(50) == Credit(1800)


def test_a_frame_that_comes_twice_makes_no_room() -> None:
    granted = GrantedCredit(WINDOW, 10_000)
    granted.arrived(100, 100)
    granted.arrived(100, 100)
    granted.released(100)
    granted.released(100)
    assert granted.released_bytes == 100


def test_a_large_frame_that_comes_twice_breaks_no_rule() -> None:
    granted = GrantedCredit(WINDOW, 10_000)
    assert granted.needed(CreditNeeded(5000)) == Credit(5000)
    granted.arrived(5000, 5000)
    granted.arrived(5000, 5000)
    assert granted.held_bytes == 5000
    with pytest.raises(CreditExceeded):
        granted.arrived(5001, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_everything_gets_through_and_never_more_than_the_window_is_under_way(seed: int, sizes: list[int]) -> None:
    chance = Random(seed)
    spent, granted = SpentCredit(WINDOW), GrantedCredit(WINDOW, 3000)
    to_follower: list[CreditNeeded | tuple[int, int]] = []
    to_leader: list[Credit] = []
    held: list[int] = []
    waiting = list(sizes)
    while waiting or to_follower or held:
        # Everybody does something whenever it can, in any order; if nobody could, the loop would not end.
        moves = []
        if waiting and (spent.available_bytes >= waiting[0] or spent.asked_bytes < waiting[0]):
            moves.append("send")
        if to_follower:
            moves.append("arrive")
        if to_leader:
            moves.append("grant")
        if held:
            moves.append("release")
        assert moves, "the link stands still"
        match chance.choice(moves):
            case "send" if spent.available_bytes >= waiting[0]:
                size = waiting.pop(0)
                to_follower.append((spent.take(size), size))
                chance.shuffle(waiting)  # Another partition may be next in line.
            case "send":
                message = spent.ask(waiting[0])
                assert message is not None
                to_follower.append(message)
            case "arrive":
                event = to_follower.pop(0)
                if isinstance(event, CreditNeeded):
                    credit = granted.needed(event)
                    to_leader += [credit] if credit else []
                else:
                    granted.arrived(*event)
                    held.append(event[1])
            case "grant":
                spent.granted(to_leader.pop(0))
            case "release":
                credit = granted.released(held.pop(chance.randrange(len(held))))
                to_leader += [credit] if credit else []
        assert granted.released_bytes <= granted.received_bytes <= spent.sent_bytes
        assert spent.sent_bytes <= spent.granted_bytes <= granted.granted_bytes
        assert spent.sent_bytes - granted.released_bytes <= max(WINDOW, *sizes)
