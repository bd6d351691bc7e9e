from uuid import UUID

import pytest

from walstream.cluster.metadata import Member, Outcome, PartitionState, Refusal, with_isr
from walstream.replication.context import NEVER
from walstream.replication.isr import Isr, Lag

KEY = (UUID(int=1), 0)
A, B, C = Member(1, 1), Member(2, 1), Member(3, 1)


def isr_of(*members: Member, min_isr: int = 1) -> Isr:
    return Isr(PartitionState((1, 2, 3), leader=1, epoch=4, isr=members, min_isr=min_isr, version=10), A)


def lag(end: int | None) -> Lag:
    one = Lag(0)
    one.end = end
    return one


@pytest.mark.parametrize(
    ("own", "two", "three", "reached"),
    [(9, 7, 8, 7), (5, 7, 8, 5), (9, None, 8, -1)],
)
def test_high_watermark_is_the_smallest_durable_end(own: int, two: int | None, three: int, reached: int) -> None:
    assert isr_of(A, B, C).high_watermark(own, {2: lag(two), 3: lag(three)}) == reached


def test_high_watermark_is_frozen_below_min_isr() -> None:
    assert isr_of(A, min_isr=2).high_watermark(9, {}) == -1


def test_pending_addition_counts() -> None:
    isr = isr_of(A, B)
    isr.propose(KEY, [A, B, C], [])
    assert isr.high_watermark(9, {2: lag(8), 3: lag(5)}) == 5


def test_pending_removal_still_counts() -> None:
    isr = isr_of(A, B)
    isr.propose(KEY, [A], [])
    assert isr.high_watermark(9, {2: lag(3)}) == 3
    assert isr.answered(Outcome(None, with_isr(isr.state, [A])), 0)
    assert isr.high_watermark(9, {2: lag(3)}) == 9


def test_pending_removal_that_would_unfreeze_nothing_freezes_when_granted() -> None:
    isr = isr_of(A, B, min_isr=2)
    isr.propose(KEY, [A], [])
    assert isr.high_watermark(9, {2: lag(3)}) == 3
    isr.answered(Outcome(None, with_isr(isr.state, [A])), 0)
    assert isr.high_watermark(9, {2: lag(3)}) == -1


def test_proposal_of_unknown_fate_counts_until_the_version_moves() -> None:
    isr = isr_of(A, B)
    first = isr.propose(KEY, [A, B, C], [])
    assert not isr.answered(Outcome(Refusal.UNKNOWN, None), retry_at_ms=100)
    assert isr.maximal == {1, 2, 3}
    assert not isr.may_propose
    assert isr.again() is first
    # The second attempt is refused for good; the first may still be on its way.
    isr.answered(Outcome(Refusal.INELIGIBLE, isr.state), retry_at_ms=200)
    assert isr.pending is None
    assert isr.maximal == {1, 2, 3}
    isr.again()
    isr.propose(KEY, [A], [])
    isr.answered(Outcome(None, with_isr(isr.state, [A])), 0)
    assert isr.maximal == {1}


def test_refused_addition_does_not_count_any_more() -> None:
    isr = isr_of(A, B)
    isr.propose(KEY, [A, B, C], [])
    isr.answered(Outcome(Refusal.INELIGIBLE, isr.state), retry_at_ms=200)
    assert isr.maximal == {1, 2}
    assert not isr.may_propose
    isr.again()
    assert isr.may_propose


def test_newer_record_settles_what_was_proposed_to_an_older_one() -> None:
    isr = isr_of(A, B)
    isr.propose(KEY, [A, B, C], [])
    newer = with_isr(isr.state, [A])
    assert isr.adopt(newer)
    assert isr.maximal == {1}
    assert not isr.answered(Outcome(Refusal.STALE_VERSION, newer), 0)
    assert not isr.adopt(newer)


def test_follower_under_steady_load_is_caught_up_though_never_at_the_end() -> None:
    one = Lag(0)
    one.moved(0, 0, 0)
    for ms in range(0, 60_000, 100):
        one.outgrown(ms, ms + 100, ms)
        one.moved(max(ms - 200, 0), ms + 100, ms)
    assert one.behind_from_ms(60_000, 10_000) > 68_000


def test_follower_that_stands_still_is_behind_from_the_first_record_it_lacks() -> None:
    one = Lag(0)
    one.moved(5, 5, 1_000)
    assert one.behind_from_ms(5, 10_000) == NEVER
    one.outgrown(5, 6, 50_000)
    assert one.behind_from_ms(6, 10_000) == 60_001
    one.outgrown(6, 7, 55_000)
    assert one.behind_from_ms(7, 10_000) == 60_001


def test_follower_that_is_never_accepted_is_behind_from_the_leaders_beginning() -> None:
    assert Lag(500).behind_from_ms(0, 10_000) == 10_501


def test_records_behind() -> None:
    assert lag(10).has_too_many_behind(21, 10)
    assert not lag(10).has_too_many_behind(20, 10)
    assert not lag(10).has_too_many_behind(10**9, 0)
