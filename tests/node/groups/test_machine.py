"""Any sequence of events, by any mixture of clients: what must hold after each of them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.groups.world import World, subscription
from walstream.node.groups.events import (
    GroupLimits,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Leaver,
    Refused,
    Request,
    State,
    Sync,
)

LIMITS = GroupLimits(groups_max=2, members_max=4, join_delay_ms=50, session_timeout_ms_min=100)

GROUPS = st.sampled_from(["g", "h"])
INSTANCES = st.sampled_from([None, None, "a", "b"])
PROTOCOLS = st.sampled_from(
    [
        (("range", subscription("t")),),
        (("range", subscription("t")), ("sticky", subscription("t"))),
        (("sticky", subscription("u")), ("range", subscription("u"))),
        (("own", b"?"),),
    ]
)


class Groups(RuleBasedStateMachine):
    """Clients that do anything, in any order, with any credentials that the node has ever given out."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(LIMITS)
        self.requests: dict[int, Request] = {}
        self.abandoned: set[int] = set()
        self.credentials: list[tuple[str, str, str | None, int]] = []
        """(group, member id, instance id, generation) as clients learnt them."""
        self.answers_seen = 0
        self.highest: dict[str, int] = {}

    def _send(self, request: Request) -> None:
        token = self.world.send(request)
        self.requests[token] = request
        for token in list(self.world.answers)[self.answers_seen :]:
            answer, asked = self.world.answers[token], self.requests[token]
            if isinstance(answer, Joined) and isinstance(asked, Join):
                self.credentials.append((asked.group_id, answer.member_id, asked.instance_id, answer.generation))
            elif isinstance(answer, Refused) and answer.member_id:
                self.credentials.append((asked.group_id, answer.member_id, None, -1))
        self.answers_seen = len(self.world.answers)

    @rule(
        group_id=GROUPS,
        instance_id=INSTANCES,
        protocols=PROTOCOLS,
        must_know_id=st.booleans(),
        session_ms=st.sampled_from([100, 1_000]),
        rebalance_ms=st.sampled_from([0, 60, 500, 5_000]),
    )
    def join(
        self,
        group_id: str,
        instance_id: str | None,
        protocols: tuple[tuple[str, bytes], ...],
        must_know_id: bool,
        session_ms: int,
        rebalance_ms: int,
    ) -> None:
        request = Join(
            group_id, "", instance_id, "c", "", "consumer", protocols, session_ms, rebalance_ms, must_know_id, True
        )
        self._send(request)

    @precondition(lambda self: self.credentials)
    @rule(data=st.data(), protocols=PROTOCOLS)
    def rejoin(self, data: st.DataObject, protocols: tuple[tuple[str, bytes], ...]) -> None:
        group_id, member_id, instance_id, _ = data.draw(st.sampled_from(self.credentials))
        request = Join(
            group_id, member_id, instance_id, "c", "", "consumer", protocols, 1_000, 500, True, data.draw(st.booleans())
        )
        self._send(request)

    @rule()
    def everybody_rejoins(self) -> None:
        for group in list(self.world.coordinator.groups.values()):
            for member in list(group.roster):
                request = Join(
                    group.id,
                    member.id,
                    member.instance_id,
                    "c",
                    "",
                    "consumer",
                    member.protocols,
                    1_000,
                    500,
                    True,
                    True,
                )
                self._send(request)

    @rule(is_partial=st.booleans())
    def everybody_syncs(self, is_partial: bool) -> None:
        for group in list(self.world.coordinator.groups.values()):
            shares = tuple((member.id, b"share") for member in group.roster)[: 1 if is_partial else None]
            for member in list(group.roster):
                self._send(Sync(group.id, member.id, member.instance_id, group.generation, None, None, shares))

    @precondition(lambda self: self.credentials)
    @rule(data=st.data(), step=st.integers(-1, 1))
    def sync(self, data: st.DataObject, step: int) -> None:
        group_id, member_id, instance_id, generation = data.draw(st.sampled_from(self.credentials))
        self._send(Sync(group_id, member_id, instance_id, generation + step, None, None, ((member_id, b"mine"),)))

    @precondition(lambda self: self.credentials)
    @rule(data=st.data(), step=st.integers(-1, 1))
    def heartbeat(self, data: st.DataObject, step: int) -> None:
        group_id, member_id, instance_id, generation = data.draw(st.sampled_from(self.credentials))
        self._send(Heartbeat(group_id, member_id, instance_id, generation + step))

    @precondition(lambda self: self.credentials)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        leavers = data.draw(st.lists(st.sampled_from(self.credentials), min_size=1, max_size=3))
        group_id = leavers[0][0]
        self._send(Leave(group_id, tuple(Leaver(member_id, instance_id) for _, member_id, instance_id, _ in leavers)))

    @precondition(lambda self: self.world.coordinator.parked)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.world.coordinator.parked)))
        self.world.hang_up(token)
        self.abandoned.add(token)

    @rule(duration_ms=st.sampled_from([0, 10, 50, 60, 100, 499, 1_000, 5_000]))
    def time_passes(self, duration_ms: int) -> None:
        self.world.pass_ms(duration_ms)

    @rule(group_id=GROUPS)
    def remove_if_empty(self, group_id: str) -> None:
        group = self.world.coordinator.groups.get(group_id)
        if group is not None and group.is_idle:
            self.world.take(self.world.coordinator.remove(group_id))
            self.highest.pop(group_id, None)

    @invariant()
    def every_request_waits_or_is_answered_once(self) -> None:
        # World.take refuses a second answer.
        assert set(self.world.coordinator.parked) == set(self.requests) - set(self.world.answers) - self.abandoned
        held = [
            token
            for group in self.world.coordinator.groups.values()
            for member in group.roster
            for token in (member.join_token, member.sync_token)
            if token is not None
        ]
        assert sorted(held) == sorted(self.world.coordinator.parked)

    @invariant()
    def the_leader_is_a_member(self) -> None:
        for group in self.world.coordinator.groups.values():
            assert group.roster.leader_id in group.roster.members or (not group.roster and not group.roster.leader_id)
            assert bool(group.roster) == (group.state is not State.EMPTY)

    @invariant()
    def a_generation_never_goes_back(self) -> None:
        for group in self.world.coordinator.groups.values():
            assert group.generation >= self.highest.get(group.id, 0)
            self.highest[group.id] = group.generation

    @invariant()
    def requests_wait_only_where_something_will_answer_them(self) -> None:
        for group in self.world.coordinator.groups.values():
            for member in group.roster:
                assert member.join_token is None or group.state is State.PREPARING
                assert member.sync_token is None or group.state is State.COMPLETING
            if group.state is State.COMPLETING:
                assert group.roster.leader.owes_sync, "somebody must know that it is to assign"
            if group.state is State.STABLE:
                assert all(member.assignment is not None for member in group.roster)
            if group.state is not State.EMPTY:
                assert self.world.coordinator.next_deadline_ms is not None

    @invariant()
    def the_roster_is_consistent(self) -> None:
        for group in self.world.coordinator.groups.values():
            roster = group.roster
            assert roster.static_ids == {m.instance_id: m.id for m in roster if m.instance_id is not None}
            assert all(member_id == member.id for member_id, member in roster.members.items())
            assert not set(roster.pending) & set(roster.members)
            assert len(roster) + len(roster.pending) <= LIMITS.members_max

    def teardown(self) -> None:
        """Let every client fall silent: nothing may wait for ever, and every group must empty."""
        self.world.pass_ms(60_000)
        assert not self.world.coordinator.parked
        assert all(group.is_idle for group in self.world.coordinator.groups.values())
        assert self.world.coordinator.next_deadline_ms is None


Groups.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestGroups = Groups.TestCase
