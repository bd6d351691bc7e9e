"""The classic group protocol: the state machine of one group.

    state                event                               next                 and
    Empty                the first member joins              PreparingRebalance   its join waits
    PreparingRebalance   all have joined, or time is up      CompletingRebalance  generation + 1, joins are answered
    PreparingRebalance   the last member is gone             Empty                generation + 1
    CompletingRebalance  the leader syncs                    Stable               syncs are answered
    CompletingRebalance  join, leave, expiry, sync overdue   PreparingRebalance   syncs: "rebalance in progress"
    Stable               join, leave, expiry, sync overdue   PreparingRebalance   heartbeats: "rebalance in progress"
    Empty                deleted, or of no more use          Dead                 it is forgotten

A join waits until the group has gathered: in the first generation for a short delay that each newcomer prolongs,
later until every member of the last generation has joined again or the longest of their rebalance timeouts has
passed. Who has not joined by then is out, except static members, who have until their session ends. A sync waits for
the leader's assignments; who was told of a generation and never asks for its share within the rebalance timeout is
out too.

What does not begin a new generation: a member that repeats its join because the answer was lost, and a static member
that comes back under a new id with the same subscription; its old id is fenced.

A request that waits is answered exactly once, unless its connection closes first (`abandon`): then the member goes
on as one that has not asked, and its session counts again.

Pure: events are methods, answers gather in `effects` until the coordinator takes them, time is an argument. An event
that is refused raises before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from walstream.errors import (
    FencedInstance,
    GroupNotEmpty,
    GroupSubscribed,
    IllegalGeneration,
    InconsistentProtocol,
    InvalidRequest,
    MemberIdRequired,
    RebalanceInProgress,
    RequestError,
    UnknownMember,
)
from walstream.node.groups.events import (
    CONSUMER_PROTOCOL,
    NO_GENERATION,
    Alive,
    Answer,
    Effect,
    GroupLimits,
    Heartbeat,
    Join,
    Joined,
    JoinedMember,
    Leave,
    Leaver,
    Left,
    Moved,
    Refused,
    Respond,
    State,
    Sync,
    Synced,
    Token,
)
from walstream.node.groups.member import Member
from walstream.node.groups.protocols import select_protocol
from walstream.node.groups.roster import Roster
from walstream.node.groups.subscription import subscribed_topics

TRANSITIONS: dict[State, frozenset[State]] = {
    State.EMPTY: frozenset({State.PREPARING, State.DEAD}),
    State.PREPARING: frozenset({State.COMPLETING, State.EMPTY}),
    State.COMPLETING: frozenset({State.STABLE, State.PREPARING}),
    State.STABLE: frozenset({State.PREPARING}),
    State.DEAD: frozenset(),
}

NAME_IN_ID_CHARACTERS_MAX = 128


class Group:
    """One group: its roster, its generation and the requests that wait for it."""

    def __init__(self, group_id: str, limits: GroupLimits, new_id: Callable[[], str], now_ms: int) -> None:
        self.id = group_id
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol_name = ""
        self.roster = Roster(group_id, limits)
        self.empty_since_ms = now_ms
        self.effects: list[Effect] = []
        self._limits = limits
        self._new_id = new_id
        self._is_first_gathering = False
        self._gathering_ends_ms = 0
        self._gathering_ends_ms_max = 0
        self._syncs_due_ms: int | None = None

    # Events

    def join(self, token: Token, request: Join, now_ms: int) -> None:
        """Let a member into the next generation, or tell it again about this one."""
        self.roster.check_join(request, self.protocol_type)
        if request.member_id in self.roster.pending and request.instance_id is None:
            self._add(token, request.member_id, request, now_ms)
        elif request.member_id:
            self._rejoin(token, self.roster.find(request.member_id, request.instance_id), request, now_ms)
        elif request.instance_id in self.roster.static_ids:
            self._replace(token, self.roster.members[self.roster.static_ids[request.instance_id]], request, now_ms)
        elif request.instance_id is None and request.must_know_id:
            member_id = self._id_for(request)
            self.roster.pending[member_id] = now_ms + request.session_timeout_ms
            self._respond(token, Refused(MemberIdRequired(f"Join again as {member_id}."), member_id))
        else:
            self._add(token, self._id_for(request), request, now_ms)

    def sync(self, token: Token, request: Sync, now_ms: int) -> None:
        """Take the leader's assignments, and give the member its own as soon as there is one."""
        member = self._find(request.member_id, request.instance_id, request.generation)
        if self.state is State.PREPARING:
            raise self._rebalancing()
        self._check_sync(request)
        member.seen_ms = now_ms
        member.owes_sync = False
        self._answer_sync(member, Refused(self._rebalancing()), now_ms)
        member.sync_token = token
        if self.state is State.STABLE:
            self._answer_sync(member, self._share_of(member), now_ms)
        elif member is self.roster.leader:
            self._assign(dict(request.assignments), now_ms)

    def heartbeat(self, token: Token, request: Heartbeat, now_ms: int) -> None:
        """Note that the member is alive; tell it when a rebalance wants it to join again."""
        self._find(request.member_id, request.instance_id, request.generation).seen_ms = now_ms
        self._respond(token, Refused(self._rebalancing()) if self.state is State.PREPARING else Alive())

    def leave(self, token: Token, request: Leave, now_ms: int) -> None:
        """Remove members at their own wish, with one rebalance for all of them."""
        members_before = len(self.roster)
        self._respond(token, Left(tuple(self._leave_one(leaver, now_ms) for leaver in request.members)))
        self._after_removal(now_ms, "members left", has_removed=len(self.roster) < members_before)

    def abandon(self, token: Token, now_ms: int) -> None:
        """Forget a request whose connection has closed."""
        member = next((m for m in self.roster if token in (m.join_token, m.sync_token)), None)
        if member is None:
            return
        member.join_token = None if member.join_token == token else member.join_token
        member.sync_token = None if member.sync_token == token else member.sync_token
        member.seen_ms = now_ms
        if not member.knows_id and not member.is_static:
            self._remove(member, now_ms)
            self._after_removal(now_ms, "a member was gone before it knew its id", has_removed=True)

    def tick(self, now_ms: int) -> None:
        """Do what is due: lapsed ids and sessions, the end of a gathering, syncs that never came."""
        has_lapsed = self.roster.drop_lapsed(now_ms)
        silent = self.roster.silent(now_ms)
        for member in silent:
            self._remove(member, now_ms)
        if has_lapsed or silent:
            self._after_removal(now_ms, "sessions ended", has_removed=bool(silent))
        if self.state is State.PREPARING and self._gathering_ends_ms <= now_ms:
            self._complete_join(now_ms, "time is up")
        if self._syncs_due_ms is not None and self._syncs_due_ms <= now_ms:
            self._syncs_due_ms = None
            overdue = [member for member in self.roster if member.owes_sync]
            for member in overdue:
                self._remove(member, now_ms)
            self._after_removal(now_ms, "syncs are overdue", has_removed=bool(overdue))

    def check_commit(self, member_id: str, instance_id: str | None, generation: int, now_ms: int) -> None:
        """Raise unless offsets may be committed under these credentials; a commit is a sign of life."""
        if generation == NO_GENERATION and not self.roster:
            return
        self._find(member_id, instance_id, generation).seen_ms = now_ms
        if self.state is State.COMPLETING:
            raise self._rebalancing()

    def close(self, error: RequestError, now_ms: int) -> None:
        """Answer every request that waits with this error: the node is stopping."""
        for member in self.roster:
            self._answer_both(member, error, now_ms)

    def bury(self) -> None:
        """Make a group without members dead, after which whoever holds it must forget it."""
        if self.state is not State.EMPTY:
            raise GroupNotEmpty(f"Group {self.id} has {len(self.roster)} members.", "Stop its consumers first.")
        self._move(State.DEAD, "removed")

    # Questions

    @property
    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do next; None when nothing is timed."""
        deadlines = [self.roster.next_deadline_ms, self._syncs_due_ms]
        if self.state is State.PREPARING:
            deadlines.append(self._gathering_ends_ms)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is in the group or about to be."""
        return self.state is State.EMPTY and not self.roster.pending

    def check_offsets_unused(self, topic: str) -> None:
        """Raise if a member reads this topic, or may read anything."""
        if self.roster and self.protocol_type != CONSUMER_PROTOCOL:
            raise GroupNotEmpty(f"Group {self.id} has members and does not say what they read.")
        for member in self.roster:
            topics = subscribed_topics(member.metadata_of(self.protocol_name))
            if topics is None or topic in topics:
                raise GroupSubscribed(f"Group {self.id} is subscribed to {topic}.")

    # Joining

    def _add(self, token: Token, member_id: str, request: Join, now_ms: int) -> None:
        member = Member.of(member_id, request, now_ms)
        self.roster.add(member)
        if self.state is State.PREPARING and self._is_first_gathering:
            self._gathering_ends_ms = min(now_ms + self._limits.join_delay_ms, self._gathering_ends_ms_max)
        self._park_join(token, member, request, now_ms, "a member joined")

    def _rejoin(self, token: Token, member: Member, request: Join, now_ms: int) -> None:
        stands = self.state is State.COMPLETING or (self.state is State.STABLE and member is not self.roster.leader)
        is_repeated = (request.protocol_type, request.protocols) == (self.protocol_type, member.protocols)
        member.update(request, now_ms)
        if stands and is_repeated:
            self._respond(token, self._joined(member))
        else:
            self._park_join(token, member, request, now_ms, "a member joined again")

    def _replace(self, token: Token, member: Member, request: Join, now_ms: int) -> None:
        """Give a static member that came back a new id in the old one's place."""
        error = FencedInstance(f"A newer member has taken the instance id {member.instance_id}.")
        self._answer_both(member, error, now_ms)
        topics_before = subscribed_topics(member.metadata_of(self.protocol_name))
        former_leader_id = self.roster.leader_id
        self.roster.rename(member, self._id_for(request))
        member.update(request, now_ms)
        member.owes_sync = False
        if (
            self.state is State.STABLE
            and select_protocol(list(self.roster), self.roster.leader) == self.protocol_name
            and subscribed_topics(member.metadata_of(self.protocol_name)) == topics_before
        ):
            member.knows_id = True
            self._respond(token, self._joined_as_before(member, former_leader_id))
        else:
            member.knows_id = False
            self._park_join(token, member, request, now_ms, "a static member came back")

    def _park_join(self, token: Token, member: Member, request: Join, now_ms: int, reason: str) -> None:
        # A client that asks again, perhaps on a new connection: the older request must not wait for ever.
        self._answer_join(member, Refused(self._rebalancing()), now_ms)
        member.join_token = token
        self.protocol_type = request.protocol_type
        if self.state is State.PREPARING:
            self._try_complete_join(now_ms)
        else:
            self._prepare(now_ms, reason)

    def _id_for(self, request: Join) -> str:
        name = request.client_id if request.instance_id is None else request.instance_id
        return f"{name[:NAME_IN_ID_CHARACTERS_MAX]}-{self._new_id()}"

    # Transitions

    def _prepare(self, now_ms: int, reason: str) -> None:
        self._is_first_gathering = self.state is State.EMPTY
        self._gathering_ends_ms_max = self._gathering_ends_ms = now_ms + self.roster.rebalance_timeout_ms
        if self._is_first_gathering:
            self._gathering_ends_ms = min(now_ms + self._limits.join_delay_ms, self._gathering_ends_ms_max)
        self._syncs_due_ms = None
        for member in self.roster:
            self._answer_sync(member, Refused(self._rebalancing()), now_ms)
            member.owes_sync = False
        self._move(State.PREPARING, reason)
        self._try_complete_join(now_ms)

    def _try_complete_join(self, now_ms: int) -> None:
        if not self.roster:
            self._complete_join(now_ms, "the last member is gone")
        elif self._is_first_gathering:
            if self._gathering_ends_ms <= now_ms:
                self._complete_join(now_ms, "the first members joined")
        elif self.roster.have_all_joined:
            self._complete_join(now_ms, "all members joined")

    def _complete_join(self, now_ms: int, reason: str) -> None:
        for member in [m for m in self.roster if m.join_token is None and not m.is_static]:
            self._remove(member, now_ms)
        joined = self.roster.joined
        if not self.roster:
            self.generation += 1
            self.protocol_type = self.protocol_name = ""
            self.empty_since_ms = now_ms
            self._move(State.EMPTY, reason)
        elif not joined:
            # Only static members are left and none of them is back yet: it is for their sessions to end this.
            self._gathering_ends_ms = now_ms + max(self.roster.rebalance_timeout_ms, 1)
        else:
            self._begin_generation(joined, now_ms, reason)

    def _begin_generation(self, joined: list[Member], now_ms: int, reason: str) -> None:
        if self.roster.leader.join_token is None:
            self.roster.leader_id = joined[0].id
        self.generation += 1
        self.protocol_name = select_protocol(list(self.roster), self.roster.leader)
        self._move(State.COMPLETING, reason)
        self._syncs_due_ms = now_ms + self.roster.rebalance_timeout_ms
        for member in self.roster:
            member.assignment = None
        for member in joined:
            member.knows_id = member.owes_sync = True
            self._answer_join(member, self._joined(member), now_ms)

    def _assign(self, assignments: dict[str, bytes], now_ms: int) -> None:
        for member in self.roster:
            member.assignment = assignments.get(member.id, b"")
        self._move(State.STABLE, "the leader assigned")
        for member in self.roster:
            self._answer_sync(member, self._share_of(member), now_ms)

    def _move(self, after: State, reason: str) -> None:
        assert after in TRANSITIONS[self.state], f"{self.state} -> {after}"
        before, self.state = self.state, after
        self.effects.append(Moved(self.id, before, after, self.generation, len(self.roster), reason))

    # Leaving

    def _leave_one(self, leaver: Leaver, now_ms: int) -> RequestError | None:
        if leaver.instance_id is None and self.roster.pending.pop(leaver.member_id, None) is not None:
            return None
        member_id = leaver.member_id or self.roster.static_ids.get(leaver.instance_id or "", "")
        try:
            self._remove(self.roster.find(member_id, leaver.instance_id), now_ms)
        except RequestError as error:
            return error
        return None

    def _remove(self, member: Member, now_ms: int) -> None:
        self._answer_both(member, UnknownMember(f"Member {member.id} has been removed from group {self.id}."), now_ms)
        self.roster.remove(member)

    def _after_removal(self, now_ms: int, reason: str, *, has_removed: bool) -> None:
        if self.state is State.PREPARING:
            self._try_complete_join(now_ms)
        elif has_removed:
            self._prepare(now_ms, reason)

    # Checks and answers

    def _find(self, member_id: str, instance_id: str | None, generation: int) -> Member:
        member = self.roster.find(member_id, instance_id)
        if generation != self.generation:
            raise IllegalGeneration(f"Group {self.id} is in generation {self.generation}, not {generation}.")
        return member

    def _check_sync(self, request: Sync) -> None:
        asked = (request.protocol_type or self.protocol_type, request.protocol_name or self.protocol_name)
        if asked != (self.protocol_type, self.protocol_name):
            raise InconsistentProtocol(f"Group {self.id} uses {self.protocol_type}/{self.protocol_name}.")
        assignment_bytes = sum(len(assignment) for _, assignment in request.assignments)
        if assignment_bytes > self._limits.metadata_bytes_max:
            raise InvalidRequest(
                f"The assignments of group {self.id} take {assignment_bytes} bytes, "
                f"more than {self._limits.metadata_bytes_max}."
            )

    def _rebalancing(self) -> RebalanceInProgress:
        return RebalanceInProgress(f"Group {self.id} is forming a new generation.")

    def _joined(self, member: Member) -> Joined:
        is_leader = member is self.roster.leader
        return Joined(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol_name,
            leader_id=self.roster.leader_id,
            member_id=member.id,
            members=tuple(
                JoinedMember(other.id, other.instance_id, other.metadata_of(self.protocol_name))
                for other in self.roster
                if is_leader
            ),
            skip_assignment=False,
        )

    def _joined_as_before(self, member: Member, former_leader_id: str) -> Joined:
        """Tell a static member that its generation stands, in words that keep it from assigning again."""
        joined = self._joined(member)
        if member is not self.roster.leader:
            return joined
        if member.can_skip_assignment:
            return replace(joined, skip_assignment=True)
        # Told of its former id as the leader, an older client takes itself for a follower and only syncs.
        return replace(joined, leader_id=former_leader_id, members=())

    def _share_of(self, member: Member) -> Synced:
        assert member.assignment is not None
        return Synced(self.protocol_type, self.protocol_name, member.assignment)

    def _answer_join(self, member: Member, answer: Answer, now_ms: int) -> None:
        if member.join_token is not None:
            self._respond(member.join_token, answer)
            member.join_token = None
            member.seen_ms = now_ms

    def _answer_sync(self, member: Member, answer: Answer, now_ms: int) -> None:
        if member.sync_token is not None:
            self._respond(member.sync_token, answer)
            member.sync_token = None
            member.seen_ms = now_ms

    def _answer_both(self, member: Member, error: RequestError, now_ms: int) -> None:
        self._answer_join(member, Refused(error), now_ms)
        self._answer_sync(member, Refused(error), now_ms)

    def _respond(self, token: Token, answer: Answer) -> None:
        self.effects.append(Respond(token, answer))
