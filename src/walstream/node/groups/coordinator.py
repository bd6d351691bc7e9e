"""All groups of the node, and when each of them next needs the clock.

Pure. `handle` takes one request with its token and returns effects; `tick` does what is due; `next_deadline_ms` says
when that is. Invariant: `parked` holds exactly the tokens that have been taken and not yet answered or abandoned.

Deadlines are kept in a heap of (time, group) that is right or early, never late: a heartbeat only moves a session's
end away, so it leaves the heap alone, and a group that is woken too early says when to wake it again.

Groups are not written down. After a restart of the node the members are strangers to it: they join again under new
ids. An id is never given twice, so that nobody of an earlier life can commit in a later one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from walstream.errors import (
    CoordinatorUnavailable,
    GroupFull,
    GroupNotFound,
    IllegalGeneration,
    InvalidGroup,
    InvalidRequest,
    InvalidSessionTimeout,
    RequestError,
    UnknownMember,
)
from walstream.node.groups.events import (
    NO_GENERATION,
    Effect,
    GroupLimits,
    Heartbeat,
    Join,
    Leave,
    Left,
    Refused,
    Request,
    Respond,
    Sync,
    Token,
)
from walstream.node.groups.group import Group

NAME_CHARACTERS_MAX = 1_024
"""The longest group id, instance id and protocol type: they are kept in memory for as long as their group."""


class Coordinator:
    """The groups by id. The only way in is through its methods, so that no effect and no deadline is missed."""

    def __init__(self, limits: GroupLimits, new_id: Callable[[], str]) -> None:
        self.groups: dict[str, Group] = {}
        self.parked: dict[Token, str] = {}
        self._limits = limits
        self._new_id = new_id
        self._heap: list[tuple[int, str]] = []
        self._wake_ms: dict[str, int] = {}

    def handle(self, token: Token, request: Request, now_ms: int) -> list[Effect]:
        """Take one request. Its answer is among the effects, of this call or of a later one."""
        assert token not in self.parked
        self.parked[token] = request.group_id
        try:
            group = self._group_for(request, now_ms)
            match request:
                case Join():
                    group.join(token, request, now_ms)
                case Sync():
                    group.sync(token, request, now_ms)
                case Heartbeat():
                    group.heartbeat(token, request, now_ms)
                case Leave():
                    group.leave(token, request, now_ms)
        except RequestError as error:
            self._forget_unused(request.group_id)
            del self.parked[token]
            return [Respond(token, self._refusal(request, error))]
        if not isinstance(request, Heartbeat):  # It moved one session's end away and nothing nearer.
            self._schedule(group)
        return self._take_effects(group)

    def abandon(self, token: Token, now_ms: int) -> list[Effect]:
        """Forget a request whose connection has closed; harmless when it has been answered."""
        group_id = self.parked.pop(token, None)
        if group_id is None:
            return []
        group = self.groups[group_id]
        group.abandon(token, now_ms)
        self._schedule(group)
        return self._take_effects(group)

    def tick(self, now_ms: int) -> list[Effect]:
        """Do everything that is due."""
        effects: list[Effect] = []
        while self._heap and self._heap[0][0] <= now_ms:
            wake_ms, group_id = heapq.heappop(self._heap)
            if self._wake_ms.get(group_id) != wake_ms:
                continue
            del self._wake_ms[group_id]
            group = self.groups[group_id]
            group.tick(now_ms)
            self._schedule(group)
            effects += self._take_effects(group)
        return effects

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call `tick` next."""
        while self._heap and self._wake_ms.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def check_commit(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int, now_ms: int
    ) -> None:
        """Raise unless offsets may be committed; clients outside of any group protocol use no generation."""
        self._check_group_id(group_id)
        group = self.groups.get(group_id)
        if group is not None:
            group.check_commit(member_id, instance_id, generation, now_ms)
        elif generation != NO_GENERATION:
            raise IllegalGeneration(f"Group {group_id} has no generation {generation} on this node.", "Join again.")

    def remove(self, group_id: str) -> list[Effect]:
        """Forget a group; raise if it has members or is not there."""
        group = self.groups.get(group_id)
        if group is None:
            raise GroupNotFound(f"There is no group {group_id}.")
        group.bury()
        self._forget(group_id)
        return group.effects

    def close(self, now_ms: int) -> list[Effect]:
        """Answer every request that waits: the node is stopping, another start of it will coordinate."""
        error = CoordinatorUnavailable("The node is stopping.")
        effects: list[Effect] = []
        for group in self.groups.values():
            group.close(error, now_ms)
            effects += self._take_effects(group)
        return effects

    def _group_for(self, request: Request, now_ms: int) -> Group:
        self._check_group_id(request.group_id)
        if isinstance(request, Join):
            self._check_join(request)
        group = self.groups.get(request.group_id)
        if group is not None:
            return group
        if not isinstance(request, Join) or request.member_id:
            raise UnknownMember(f"There is no group {request.group_id} on this node.", "Join again.")
        if len(self.groups) >= self._limits.groups_max:
            raise GroupFull(f"The node has {self._limits.groups_max} groups, as many as it may.")
        group = Group(request.group_id, self._limits, self._new_id, now_ms)
        self.groups[request.group_id] = group
        return group

    @staticmethod
    def _check_group_id(group_id: str) -> None:
        if not 0 < len(group_id) <= NAME_CHARACTERS_MAX:
            raise InvalidGroup(f"A group id has 1 to {NAME_CHARACTERS_MAX} characters, not {len(group_id)}.")

    def _check_join(self, request: Join) -> None:
        shortest_ms, longest_ms = self._limits.session_timeout_ms_min, self._limits.session_timeout_ms_max
        if not shortest_ms <= request.session_timeout_ms <= longest_ms:
            raise InvalidSessionTimeout(
                f"A session timeout of {request.session_timeout_ms} ms is not within {shortest_ms} to {longest_ms} ms."
            )
        if max(len(request.instance_id or ""), len(request.protocol_type)) > NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"An instance id or a protocol type has more than {NAME_CHARACTERS_MAX} characters.")

    @staticmethod
    def _refusal(request: Request, error: RequestError) -> Left | Refused:
        """Say the error where the request's answer has a place for it."""
        if isinstance(request, Leave) and isinstance(error, UnknownMember):
            return Left((error,) * len(request.members))
        return Refused(error)

    def _forget_unused(self, group_id: str) -> None:
        """Drop a group that was made for a request it then refused."""
        group = self.groups.get(group_id)
        if group is not None and group.is_idle and group.generation == 0:
            self._forget(group_id)

    def _forget(self, group_id: str) -> None:
        del self.groups[group_id]
        self._wake_ms.pop(group_id, None)  # What is left of it in the heap is passed over.

    def _take_effects(self, group: Group) -> list[Effect]:
        """Take the group's effects and strike the answered off `parked`."""
        effects, group.effects = group.effects, []
        for effect in effects:
            if isinstance(effect, Respond):
                del self.parked[effect.token]
        return effects

    def _schedule(self, group: Group) -> None:
        """Note when the group needs the clock, if that is earlier than was known."""
        deadline_ms = group.next_deadline_ms
        known_ms = self._wake_ms.get(group.id)
        if deadline_ms is not None and (known_ms is None or deadline_ms < known_ms):
            self._wake_ms[group.id] = deadline_ms
            heapq.heappush(self._heap, (deadline_ms, group.id))
