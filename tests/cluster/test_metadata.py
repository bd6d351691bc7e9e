from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.cluster.metadata import (
    NO_LEADER,
    IsrProposal,
    Member,
    PartitionState,
    Refusal,
    granted,
    with_isr,
    with_min_isr,
    without,
)

KEY = (UUID(int=1), 0)
A, B, C = Member(1, 1), Member(2, 1), Member(3, 1)
STATE = PartitionState((1, 2, 3), leader=1, epoch=4, isr=(A, B, C), min_isr=2, version=10)


def proposal(*isr: Member, **changes: object) -> IsrProposal:
    return replace(IsrProposal(KEY, 1, 4, 10, isr), **changes)  # type: ignore[arg-type]


def test_granted_proposal_raises_the_version() -> None:
    outcome = granted(STATE, proposal(A, B))
    assert outcome.refusal is None
    assert outcome.state == replace(STATE, isr=(A, B), version=11)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        (proposal(A, B, epoch=3), Refusal.STALE_EPOCH),
        (proposal(A, B, leader=2), Refusal.STALE_EPOCH),
        (proposal(A, B, version=9), Refusal.STALE_VERSION),
        (proposal(B, C), Refusal.INELIGIBLE),
        (proposal(A, Member(9, 1)), Refusal.INELIGIBLE),
        (proposal(A, B, Member(2, 2)), Refusal.INELIGIBLE),
    ],
)
def test_refused_proposals(asked: IsrProposal, refusal: Refusal) -> None:
    outcome = granted(STATE, asked)
    assert (outcome.refusal, outcome.state) == (refusal, STATE)


def test_replica_that_has_restarted_is_not_added_on_what_it_once_held() -> None:
    state = replace(STATE, isr=(A, B))
    assert granted(state, proposal(A, B, C), {1: 1, 2: 9, 3: 2}.get).refusal is Refusal.INELIGIBLE
    # One that stays may have restarted: what it acknowledged is on its disk.
    assert granted(state, proposal(A, B, Member(3, 2)), {1: 1, 2: 9, 3: 2}.get).refusal is None


def test_who_leaves_an_isr_that_is_too_small_stays_eligible() -> None:
    state = with_isr(STATE, [A, B])
    assert state.elr == ()
    state = with_isr(state, [A])
    assert state.elr == (2,)
    assert with_isr(state, [A, C]).elr == ()


def test_unfit_replicas_are_not_eligible() -> None:
    assert with_isr(STATE, [A], unfit=[3]).elr == (2,)


def test_lower_min_isr_ends_eligibility() -> None:
    state = with_isr(STATE, [A])
    assert with_min_isr(state, 1).elr == ()
    assert with_min_isr(state, 3).elr == (2, 3)


def test_replica_that_lost_bytes_is_nowhere() -> None:
    assert without(STATE, 3).isr == (A, B)
    assert without(with_isr(STATE, [A]), 3).elr == (2,)
    alone = without(with_isr(STATE, [A]), 1)
    assert (alone.isr, alone.elr, alone.leader, alone.last_leader) == ((), (2, 3), NO_LEADER, 1)
    outside = replace(STATE, isr=(A, B))
    assert without(outside, 3) is outside


NODES = st.lists(st.sampled_from((A, B, C)), unique=True, min_size=1)


@given(st.lists(st.tuples(NODES, st.lists(st.sampled_from((1, 2, 3)))), max_size=8), st.integers(1, 3))
def test_record_stays_a_record(changes: list[tuple[list[Member], list[int]]], min_isr: int) -> None:
    state = replace(STATE, min_isr=min_isr)
    for isr, unfit in changes:
        before, state = state, with_isr(state, isr, unfit)
        assert not state.isr_nodes & set(state.elr)
        assert not state.can_commit or not state.elr
        assert set(state.elr) <= set(before.elr) | before.isr_nodes
        assert state.version == before.version + 1
