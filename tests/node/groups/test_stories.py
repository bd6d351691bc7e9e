"""Stories of one group, told event by event."""

from __future__ import annotations

import pytest

from node.groups.world import REBALANCE_MS, SESSION_MS, Client, World, settle, subscription
from walstream.errors import (
    CoordinatorUnavailable,
    FencedInstance,
    GroupFull,
    GroupNotEmpty,
    GroupNotFound,
    GroupSubscribed,
    IllegalGeneration,
    InconsistentProtocol,
    InvalidGroup,
    InvalidRequest,
    InvalidSessionTimeout,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMember,
)
from walstream.node.groups.events import GroupLimits, Heartbeat, Join, Leave, Leaver, Left, Refused


def test_the_first_member_is_given_an_id_and_then_leads() -> None:
    world = World()
    ada = Client(world, "ada")
    ada.join()
    first = world.answers[1]
    assert isinstance(first, Refused)
    assert isinstance(first.error, MemberIdRequired)
    assert first.member_id.startswith("ada-")
    assert ada.joined.leader_id == ada.joined.member_id == first.member_id
    assert [member.member_id for member in ada.joined.members] == [ada.member_id]
    assert world.state() == "CompletingRebalance"
    settle(ada)
    assert world.state() == "Stable"
    assert ada.beat() is None


def test_clients_before_version_4_are_let_in_at_once() -> None:
    world = World()
    ada = Client(world, "ada", must_know_id=False).join()
    assert ada.joined.member_id == "ada-1"


def test_members_that_start_together_share_the_first_generation() -> None:
    world = World(GroupLimits(join_delay_ms=100))
    ada = Client(world, "ada").join()
    world.pass_ms(90)
    bob = Client(world, "bob").join()
    world.pass_ms(90)
    assert ada.waits, "a newcomer prolongs the gathering"
    assert bob.waits
    world.pass_ms(10)
    assert ada.joined.generation == bob.joined.generation == 1
    assert len(ada.joined.members) == 2
    assert bob.joined.members == (), "only the leader is told"
    settle(ada, bob)


def test_the_first_gathering_ends_with_the_rebalance_timeout_however_many_come() -> None:
    world = World(GroupLimits(join_delay_ms=100))
    first = Client(world, "first", rebalance_timeout_ms=250).join()
    for number in range(6):
        world.pass_ms(50)
        Client(world, f"member-{number}").join()
    assert not first.waits


def test_a_third_member_brings_a_rebalance() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    bob = Client(world, "bob").join()
    assert bob.waits
    assert isinstance(ada.beat(), RebalanceInProgress)
    ada.join()
    settle(ada, bob)
    carol = Client(world, "carol").join()
    assert isinstance(bob.beat(), RebalanceInProgress)
    ada.join()
    assert ada.waits, "bob is missing"
    bob.join()
    assert settle(ada, bob, carol) is ada, "the leader stays"
    assert world.generation() == 3


def test_a_member_that_dies_is_noticed_when_its_session_ends() -> None:
    world = World()
    ada, bob = _pair(world)
    for _ in range(4):
        world.pass_ms(SESSION_MS // 4)
        if world.state() == "Stable":
            assert ada.beat() is None
    assert world.state() == "PreparingRebalance"
    ada.join()
    settle(ada)
    assert isinstance(bob.beat(), UnknownMember)


def test_a_member_that_leaves_is_not_waited_for() -> None:
    world = World()
    ada, bob = _pair(world)
    assert bob.leave() is None
    ada.join()
    settle(ada)
    assert bob.leave() is not None


def test_the_last_to_leave_empties_the_group() -> None:
    world = World()
    ada, bob = _pair(world)
    assert ada.leave() is None
    assert bob.leave() is None
    assert world.state() == "Empty"
    world.pass_ms(REBALANCE_MS)
    assert world.coordinator.next_deadline_ms is None
    assert world.coordinator.groups["g"].is_idle


def test_a_slow_member_is_out_after_the_rebalance_timeout() -> None:
    world = World()
    ada, bob = _pair(world)
    carol = Client(world, "carol").join()
    ada.join()
    for _ in range(REBALANCE_MS // 5_000 - 1):
        world.pass_ms(5_000)
        assert isinstance(bob.beat(), RebalanceInProgress), "alive, but busy"
        assert ada.waits
    world.pass_ms(5_000)
    settle(ada, carol)
    assert isinstance(bob.beat(), UnknownMember)
    bob.join()
    assert isinstance(bob.error, UnknownMember)
    bob.member_id = ""
    bob.join()
    assert bob.waits


def test_a_leader_that_dies_before_it_assigns() -> None:
    world = World()
    leader, follower = _pair(world)
    leader.join()
    follower.join()
    assert world.state() == "CompletingRebalance"
    _ = follower.joined
    follower.sync()
    assert follower.waits
    world.pass_ms(SESSION_MS)
    assert isinstance(follower.error, RebalanceInProgress), "its sync is answered when the group starts over"
    follower.join()
    assert follower.joined.leader_id == follower.member_id
    settle(follower)


def test_a_leader_that_lives_but_never_assigns_is_out_after_the_rebalance_timeout() -> None:
    world = World()
    leader, follower = _pair(world)
    leader.join()
    follower.join()
    _ = leader.joined, follower.joined
    follower.sync()
    for _ in range(REBALANCE_MS // 5_000):
        world.pass_ms(5_000)
        leader.beat()
    assert isinstance(follower.error, RebalanceInProgress)
    assert isinstance(leader.beat(), UnknownMember)
    follower.join()
    settle(follower)


def test_a_sync_that_is_repeated_gets_the_same_share() -> None:
    world = World()
    _, follower = _pair(world)
    assert follower.sync().share == follower.name.encode()


def test_a_sync_that_is_repeated_while_it_waits_answers_the_older_one() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    bob = Client(world, "bob").join()
    ada.join()
    _ = ada.joined, bob.joined
    older = bob.sync().token
    bob.sync()
    assert isinstance(world.answers[older], Refused)
    assert bob.waits
    ada.sync_ids({bob.member_id: b"b"})
    assert (ada.share, bob.share) == (b"", b"b"), "who is not named gets nothing"


def test_a_join_that_is_repeated_gets_the_same_generation() -> None:
    world = World()
    _, follower = _pair(world)
    follower.join()
    assert follower.joined.generation == world.generation()
    assert world.state() == "Stable"


def test_a_join_that_is_repeated_before_the_assignment_tells_the_leader_its_members_again() -> None:
    world = World()
    ada = Client(world, "ada").join()
    assert ada.joined.generation == 1
    ada.join()
    assert ada.joined.generation == 1
    assert len(ada.joined.members) == 1


def test_a_leader_that_joins_again_wants_a_rebalance() -> None:
    world = World()
    leader, follower = _pair(world)
    leader.join()
    assert leader.waits
    assert isinstance(follower.beat(), RebalanceInProgress)


def test_a_changed_subscription_brings_a_rebalance() -> None:
    world = World()
    ada, bob = _pair(world)
    bob.join(protocols=(("range", subscription("t", "u")),))
    assert isinstance(ada.beat(), RebalanceInProgress)
    ada.join()
    assert {member.metadata for member in ada.joined.members} == {subscription("t"), subscription("t", "u")}


def test_a_zombie_of_an_earlier_generation_is_told_so() -> None:
    world = World()
    ada, bob = _pair(world)
    ada.join()
    bob.join()
    old = ada.generation
    settle(ada, bob)
    ada.generation = old
    assert isinstance(ada.beat(), IllegalGeneration)
    assert isinstance(ada.commit_error(), IllegalGeneration)
    assert isinstance(ada.sync().error, IllegalGeneration)


def test_strangers_are_told_that_they_are() -> None:
    world = World()
    stranger = Client(world, "stranger")
    stranger.member_id, stranger.generation = "stranger-7", 3
    assert isinstance(stranger.beat(), UnknownMember)
    assert isinstance(stranger.leave(), UnknownMember)
    assert isinstance(stranger.sync().error, UnknownMember)
    assert isinstance(stranger.join().error, UnknownMember)
    assert isinstance(stranger.commit_error(), IllegalGeneration)
    assert world.coordinator.groups == {}


def test_syncs_and_commits_wait_out_a_rebalance() -> None:
    world = World()
    ada, bob = _pair(world)
    Client(world, "carol").join()
    assert isinstance(ada.sync().error, RebalanceInProgress)
    assert ada.commit_error() is None, "what was read in this generation may still be committed"
    ada.join()
    bob.join()
    _ = ada.joined
    assert isinstance(ada.commit_error(), RebalanceInProgress)


# Static members


def test_a_static_member_restarts_without_a_rebalance() -> None:
    world = World()
    _, follower = _pair(world, instance_ids=("a", "b"))
    old_id = follower.member_id
    reborn = Client(world, "reborn", instance_id=follower.instance_id).join()
    assert reborn.joined.generation == world.generation()
    assert reborn.joined.member_id != old_id
    assert world.state() == "Stable"
    assert reborn.sync().share == follower.name.encode(), "it takes over the share"
    assert isinstance(follower.beat(), FencedInstance)
    assert isinstance(follower.commit_error(), FencedInstance)
    assert isinstance(follower.sync().error, FencedInstance)
    assert isinstance(follower.join().error, FencedInstance)
    assert isinstance(follower.leave(), FencedInstance)
    assert reborn.beat() is None


@pytest.mark.parametrize("can_skip", [True, False])
def test_a_static_leader_restarts_and_does_not_assign_again(can_skip: bool) -> None:
    world = World()
    leader, _ = _pair(world, instance_ids=("a", "b"))
    reborn = Client(world, "reborn", instance_id=leader.instance_id, can_skip_assignment=can_skip).join()
    if can_skip:
        assert reborn.joined.skip_assignment
        assert reborn.joined.leader_id == reborn.joined.member_id
        assert len(reborn.joined.members) == 2
    else:
        assert not reborn.joined.skip_assignment
        assert reborn.joined.leader_id == leader.member_id, "it takes itself for a follower"
        assert reborn.joined.members == ()
    assert reborn.sync().share == leader.name.encode()
    assert world.state() == "Stable"


def test_a_static_member_that_comes_back_with_another_subscription_brings_a_rebalance() -> None:
    world = World()
    ada, _ = _pair(world, instance_ids=("a", "b"))
    reborn = Client(world, "reborn", instance_id="b").join(protocols=(("range", subscription("other")),))
    assert reborn.waits
    assert isinstance(ada.beat(), RebalanceInProgress)


def test_a_static_member_that_comes_back_while_its_former_self_waits_fences_it() -> None:
    world = World(GroupLimits(join_delay_ms=100))
    ada = Client(world, "ada", instance_id="a").join()
    reborn = Client(world, "reborn", instance_id="a").join()
    assert isinstance(ada.error, FencedInstance)
    world.pass_ms(100)
    settle(reborn)


def test_a_static_member_is_kept_through_a_rebalance_it_misses() -> None:
    world = World()
    ada, bob = _pair(world, instance_ids=("a", "b"), session_timeout_ms=10 * REBALANCE_MS)
    Client(world, "carol").join()
    ada.join()
    world.pass_ms(REBALANCE_MS)
    leader = ada.joined
    assert {member.instance_id for member in leader.members} == {"a", "b", None}
    assert isinstance(bob.beat(), IllegalGeneration), "it is still a member, of an older generation"


def test_a_static_leader_that_misses_a_rebalance_hands_over() -> None:
    world = World()
    ada, bob = _pair(world, instance_ids=("a", "b"), session_timeout_ms=10 * REBALANCE_MS)
    bob.join(protocols=(("range", subscription("u")),))
    world.pass_ms(REBALANCE_MS)
    assert bob.joined.leader_id == bob.member_id
    assert len(bob.joined.members) == 2
    bob.sync_ids({ada.member_id: b"for ada"})
    assert ada.join().joined.generation == bob.generation
    assert ada.sync().share == b"for ada"


def test_static_members_who_are_all_away_are_waited_for_until_their_sessions_end() -> None:
    world = World()
    _pair(world, instance_ids=("a", "b"), session_timeout_ms=5 * REBALANCE_MS // 2)
    carol = Client(world, "carol", must_know_id=False).join()
    world.hang_up(carol.token)
    world.pass_ms(2 * REBALANCE_MS)
    assert world.state() == "PreparingRebalance", "a generation of nobody would be of no use"
    world.pass_ms(REBALANCE_MS)
    assert world.state() == "Empty"


def test_an_administrator_removes_a_static_member_by_its_instance() -> None:
    world = World()
    _pair(world, instance_ids=("a", "b"))
    answer = world.ask(Leave("g", (Leaver("", "a"), Leaver("", "nobody"), Leaver("wrong", "b"))))
    assert isinstance(answer, Left)
    assert answer.errors[0] is None
    assert isinstance(answer.errors[1], UnknownMember)
    assert isinstance(answer.errors[2], FencedInstance)
    assert world.state() == "PreparingRebalance"


def test_leaving_in_vain_disturbs_nobody() -> None:
    world = World()
    ada, _ = _pair(world)
    world.ask(Leave("g", (Leaver("nobody-1", None),)))
    assert ada.beat() is None


# Connections that close


def test_a_closed_connection_leaves_no_request_behind() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    bob = Client(world, "bob").join()
    world.hang_up(bob.token)
    assert world.coordinator.parked == {}
    ada.join()
    assert ada.waits, "bob may come back on a new connection"
    bob.join()
    settle(ada, bob)


def test_who_hangs_up_and_does_not_come_back_is_out_when_its_session_ends() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    bob = Client(world, "bob").join()
    ada.join()
    settle(ada, bob)
    bob.join()
    bob.join(protocols=(("range", subscription("u")),))
    world.hang_up(bob.token)
    ada.join()
    world.pass_ms(SESSION_MS)
    settle(ada)


def test_the_session_of_who_hangs_up_begins_when_its_connection_closed() -> None:
    """Its join may have waited for longer than a session lasts: it has all of one to come back in."""
    world = World()
    ada = Client(world, "ada").join()
    bob = Client(world, "bob").join()
    ada.join()
    settle(ada, bob)
    bob.join(protocols=(("range", subscription("u")),))
    for _ in range(3):
        world.pass_ms(SESSION_MS - 1)
        ada.beat()
    assert bob.waits
    world.hang_up(bob.token)
    world.pass_ms(SESSION_MS - 1)
    ada.beat()
    assert bob.member_id in world.coordinator.groups["g"].roster.members
    world.pass_ms(1)
    assert bob.member_id not in world.coordinator.groups["g"].roster.members


def test_the_session_of_who_hangs_up_ends_in_time_though_nothing_else_is_due() -> None:
    world = World()
    ada = Client(world, "ada", session_timeout_ms=5 * REBALANCE_MS).join()
    bob = Client(world, "bob").join()
    ada.join()
    settle(ada, bob)
    bob.join(protocols=(("range", subscription("u")),))
    world.pass_ms(2 * SESSION_MS)
    assert bob.waits
    world.hang_up(bob.token)
    world.pass_ms(SESSION_MS)
    assert list(world.coordinator.groups["g"].roster.members) == [ada.member_id]


def test_who_hangs_up_without_knowing_its_id_is_out_at_once() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    bob = Client(world, "bob", must_know_id=False).join()
    world.hang_up(bob.token)
    ada.join()
    settle(ada)


def test_a_sync_whose_connection_closed_is_asked_again() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    bob = Client(world, "bob").join()
    ada.join()
    _ = ada.joined, bob.joined
    bob.sync()
    world.hang_up(bob.token)
    ada.sync_ids({bob.member_id: b"b"})
    assert bob.sync().share == b"b"


def test_a_join_that_is_asked_again_answers_the_older_one() -> None:
    world = World()
    ada, bob = _pair(world)
    older = ada.join(protocols=(("range", subscription("u")),)).token
    ada.join(protocols=(("range", subscription("u")),))
    answer = world.answers[older]
    assert isinstance(answer, Refused)
    assert isinstance(answer.error, RebalanceInProgress)
    bob.join()
    settle(ada, bob)


def test_an_id_that_is_never_used_holds_up_a_rebalance_no_longer_than_a_session() -> None:
    world = World()
    ada, bob = _pair(world)
    first = Join("g", "", None, "carol", "", "consumer", (("range", b""),), SESSION_MS, REBALANCE_MS, True, True)
    assert isinstance(world.ask(first), Refused)
    ada.join()
    bob.join()
    assert ada.waits, "carol was told to come back"
    world.pass_ms(SESSION_MS)
    settle(ada, bob)


def test_a_group_that_was_forgotten_and_comes_back_is_woken_in_time() -> None:
    world = World(GroupLimits(join_delay_ms=100))
    first = Join("g", "", None, "ada", "", "consumer", (("range", b""),), SESSION_MS, REBALANCE_MS, True, True)
    answer = world.ask(first)
    assert isinstance(answer, Refused)
    world.ask(Leave("g", (Leaver(answer.member_id, None),)))
    world.ask(Heartbeat("g", answer.member_id, None, 0))
    assert world.coordinator.groups == {}, "nothing is left of it but a deadline in the heap"
    world.pass_ms(SESSION_MS - 50)
    bob = Client(world, "bob", must_know_id=False).join()
    world.pass_ms(100)
    settle(bob)


def test_stopping_answers_everybody() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    bob = Client(world, "bob").join()
    world.take(world.coordinator.close(world.now_ms))
    assert isinstance(bob.error, CoordinatorUnavailable)
    assert world.coordinator.parked == {}


# Protocols and limits


def test_the_strategy_is_chosen_by_votes_among_what_all_offer() -> None:
    world = World(GroupLimits(join_delay_ms=10))
    ada = Client(world, "ada", protocols=(("sticky", b"a"), ("range", b"a"), ("own", b"a"))).join()
    bob = Client(world, "bob", protocols=(("range", b"b"), ("sticky", b"b"))).join()
    carol = Client(world, "carol", protocols=(("range", b"c"), ("sticky", b"c"))).join()
    world.pass_ms(10)
    assert ada.joined.protocol_name == bob.joined.protocol_name == carol.joined.protocol_name == "range"
    assert [member.metadata for member in ada.joined.members] == [b"a", b"b", b"c"]


def test_a_member_with_nothing_in_common_is_refused() -> None:
    world = World()
    ada, _ = _pair(world)
    assert isinstance(Client(world, "carol", protocols=(("own", b""),)).join().error, InconsistentProtocol)
    assert isinstance(Client(world, "carol", protocol_type="connect").join().error, InconsistentProtocol)
    assert isinstance(Client(world, "carol", protocols=()).join().error, InconsistentProtocol)
    assert ada.beat() is None


def test_a_lone_member_may_change_its_strategy() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    ada.join(protocols=(("sticky", subscription("t")),))
    assert ada.joined.protocol_name == "sticky"


def test_a_sync_under_another_strategy_is_refused() -> None:
    world = World()
    ada = Client(world, "ada").join()
    _ = ada.joined
    world.coordinator.groups["g"].protocol_name = "sticky"
    world.coordinator.groups["g"].protocol_type = "connect"
    assert isinstance(ada.sync().error, InconsistentProtocol)


def test_limits() -> None:
    world = World(GroupLimits(groups_max=1, members_max=2, join_delay_ms=0, metadata_bytes_max=1_000))
    ada, bob = _pair(world)
    assert isinstance(Client(world, "carol").join().error, GroupFull)
    assert isinstance(Client(world, "carol").join(group_id="h").error, GroupFull)
    assert isinstance(Client(world, "carol").join(group_id="").error, InvalidGroup)
    assert isinstance(Client(world, "carol").join(session_timeout_ms=10).error, InvalidSessionTimeout)
    assert isinstance(Client(world, "carol").join(session_timeout_ms=10**8).error, InvalidSessionTimeout)
    assert isinstance(bob.join(protocols=(("range", bytes(1_001)),)).error, InvalidRequest)
    ada.join()
    assert isinstance(ada.beat(), RebalanceInProgress)
    bob.join()
    _ = ada.joined, bob.joined
    assert isinstance(ada.sync_ids({ada.member_id: bytes(1_001)}).error, InvalidRequest)
    settle_again = ada.sync_ids({})
    assert settle_again.share == b""


def test_a_refused_first_join_leaves_no_group_behind() -> None:
    world = World()
    assert isinstance(Client(world, "ada", protocols=()).join().error, InconsistentProtocol)
    assert world.coordinator.groups == {}


# What the administrator asks


def test_simple_consumers_commit_without_a_generation_while_nobody_is_in_the_group() -> None:
    world = World()
    simple = Client(world, "simple")
    assert simple.commit_error() is None
    ada = Client(world, "ada").join()
    settle(ada)
    assert isinstance(simple.commit_error(), UnknownMember)
    ada.leave()
    assert simple.commit_error() is None


def test_only_an_empty_group_is_removed() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    with pytest.raises(GroupNotEmpty):
        world.coordinator.remove("g")
    ada.leave()
    world.take(world.coordinator.remove("g"))
    assert world.moves[-1].after == "Dead"
    with pytest.raises(GroupNotFound):
        world.coordinator.remove("g")
    assert isinstance(world.ask(Heartbeat("g", ada.member_id, None, 1)), Refused)


def test_offsets_of_subscribed_topics_are_in_use() -> None:
    world = World()
    ada = Client(world, "ada").join()
    settle(ada)
    group = world.coordinator.groups["g"]
    with pytest.raises(GroupSubscribed):
        group.check_offsets_unused("t")
    group.check_offsets_unused("other")
    group.protocol_type = "connect"
    with pytest.raises(GroupNotEmpty):
        group.check_offsets_unused("other")


def _pair(
    world: World, instance_ids: tuple[str | None, str | None] = (None, None), **options: object
) -> tuple[Client, Client]:
    """Bring a group of two members to rest: the leader and its follower."""
    ada = Client(world, "ada", instance_id=instance_ids[0], **options).join()
    settle(ada)
    bob = Client(world, "bob", instance_id=instance_ids[1], **options).join()
    ada.join()
    assert settle(ada, bob) is ada
    return ada, bob
