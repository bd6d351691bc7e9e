from dataclasses import replace

from walstream.cluster.metadata import NO_LEADER, Member, PartitionState
from walstream.replication.elections import elect, unable_to_lead

THREE = PartitionState(
    (1, 2, 3), leader=1, epoch=7, isr=(Member(1, 1), Member(2, 1), Member(3, 1)), min_isr=2, version=20
)
LAST = replace(THREE, isr=(Member(1, 1),), elr=(2,))


def test_isr_first_and_the_dead_leave() -> None:
    elected = elect(THREE, {2: 5, 3: 5})
    assert elected is not None
    assert (elected.leader, elected.epoch, elected.version, elected.last_leader) == (2, 8, 21, 1)
    assert elected.isr == (Member(2, 1), Member(3, 1))
    assert elected.elr == ()
    assert elected.unclean_epoch == -1


def test_preferred_leader_wins_within_its_group_only() -> None:
    elected = elect(THREE, {1: 5, 2: 5, 3: 5}, preferred=3)
    assert elected is not None
    assert elected.leader == 3
    elected = elect(LAST, {1: 5, 2: 5, 3: 5}, preferred=3)
    assert elected is not None
    assert elected.leader == 1


def test_who_leaves_an_isr_that_becomes_too_small_stays_eligible() -> None:
    elected = elect(THREE, {3: 5})
    assert elected is not None
    assert elected.elr == (1, 2)


def test_eligible_ones_next() -> None:
    elected = elect(LAST, {2: 5, 3: 5})
    assert elected is not None
    assert elected.leader == 2
    assert elected.isr_nodes == {2}
    assert elected.elr == (1,)
    assert elected.unclean_epoch == -1


def test_who_resigned_is_elected_again_only_if_nobody_else_can_be() -> None:
    elected = elect(THREE, {1: 1, 2: 1, 3: 1}, resigned=1)
    assert elected is not None
    assert elected.leader == 2
    elected = elect(LAST, {1: 1, 2: 1, 3: 1}, resigned=1)
    assert elected is not None
    assert (elected.leader, elected.isr_nodes, elected.elr) == (2, {2}, (1,))
    elected = elect(LAST, {1: 1, 3: 1}, resigned=1)
    assert elected is not None
    assert (elected.leader, elected.epoch) == (1, 8)


def test_nobody_rather_than_a_loss() -> None:
    assert elect(LAST, {3: 5}) is None
    assert elect(THREE, {}) is None


def test_last_leader_if_losses_are_allowed() -> None:
    lost = replace(LAST, isr=(), elr=(), leader=NO_LEADER, last_leader=3)
    elected = elect(lost, {1: 5, 3: 6}, is_unclean_allowed=True)
    assert elected is not None
    assert (elected.leader, elected.isr, elected.elr, elected.unclean_epoch) == (3, (Member(3, 6),), (), 8)
    elected = elect(lost, {1: 5}, is_unclean_allowed=True)
    assert elected is not None
    assert elected.leader == 1


def test_damaged_copy_is_not_elected_while_a_sound_one_may_come_back() -> None:
    elected = elect(THREE, {1: 1, 2: 1}, damaged=[1])
    assert elected is not None
    assert elected.leader == 2
    assert elect(THREE, {1: 1}, damaged=[1]) is None
    elected = elect(LAST, {1: 1}, damaged=[1, 2])
    assert elected is not None
    assert elected.leader == 1


def test_winner_checks_what_it_alone_knows() -> None:
    won = replace(THREE, leader=2)
    me = Member(2, 4)
    assert unable_to_lead(won, me, known_epoch=6, is_unclean=False) == ""
    assert "earlier life" in unable_to_lead(won, me, known_epoch=7, is_unclean=False)
    assert "lost bytes" in unable_to_lead(won, me, known_epoch=6, is_unclean=True)
    assert unable_to_lead(won, Member(2, 1), known_epoch=6, is_unclean=True) == ""
    assert "lost bytes" in unable_to_lead(replace(won, unclean_epoch=7), me, known_epoch=-1, is_unclean=True), (
        "an earlier life was elected uncleanly, and led in this epoch on a disk that is gone"
    )
    assert "not in the ISR" in unable_to_lead(replace(won, isr=(Member(1, 1),)), me, known_epoch=6, is_unclean=False)
