"""Who is in a group: the members, the ids that were handed out, the holders of instance ids and the leader.

Invariants: the leader is a member, or there is none and nobody is in the group; each instance id belongs to exactly
one member; every member shares at least one assignment strategy with all others. The roster knows nothing of states,
generations and waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from walstream.errors import FencedInstance, GroupFull, InconsistentProtocol, InvalidRequest, UnknownMember
from walstream.node.groups.events import GroupLimits, Join
from walstream.node.groups.member import Member, metadata_bytes
from walstream.node.groups.protocols import common_protocols


class Roster:
    """The members of one group, in the order in which they came."""

    def __init__(self, group_id: str, limits: GroupLimits) -> None:
        self.members: dict[str, Member] = {}
        self.pending: dict[str, int] = {}
        """Ids that were handed out and not yet used, with the time at which they lapse."""
        self.static_ids: dict[str, str] = {}
        """Instance id to member id."""
        self.leader_id = ""
        self._group_id = group_id
        self._limits = limits

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def __len__(self) -> int:
        return len(self.members)

    @property
    def leader(self) -> Member:
        """The member that assigns. Only for a group with members."""
        return self.members[self.leader_id]

    @property
    def joined(self) -> list[Member]:
        """The members whose join waits."""
        return [member for member in self if member.join_token is not None]

    @property
    def have_all_joined(self) -> bool:
        """Whether nobody is missing, not even a client that was given an id and told to come back with it."""
        return not self.pending and all(member.join_token is not None for member in self)

    @property
    def rebalance_timeout_ms(self) -> int:
        """How long the slowest member may take to come back."""
        return max((member.rebalance_timeout_ms for member in self), default=0)

    @property
    def next_deadline_ms(self) -> int | None:
        """When the next session or handed-out id ends unless something happens."""
        sessions = (member.session_deadline_ms for member in self)
        return min((*(deadline for deadline in sessions if deadline is not None), *self.pending.values()), default=None)

    def silent(self, now_ms: int) -> list[Member]:
        """Return the members whose session has ended."""
        return [m for m in self if m.session_deadline_ms is not None and m.session_deadline_ms <= now_ms]

    def drop_lapsed(self, now_ms: int) -> bool:
        """Forget the ids that nobody came back with in time; tell whether there were any."""
        lapsed = [member_id for member_id, deadline_ms in self.pending.items() if deadline_ms <= now_ms]
        for member_id in lapsed:
            del self.pending[member_id]
        return bool(lapsed)

    def find(self, member_id: str, instance_id: str | None) -> Member:
        """Return the member, or raise the error that tells a zombie from a stranger."""
        if instance_id is not None and self.static_ids.get(instance_id, member_id) != member_id:
            raise FencedInstance(f"A newer member has taken the instance id {instance_id}.")
        member = self.members.get(member_id)
        if member is None or instance_id not in (None, member.instance_id):
            raise UnknownMember(f"{member_id or 'A member without an id'} is not in group {self._group_id}.")
        return member

    def check_join(self, request: Join, protocol_type: str) -> None:
        """Raise unless the group has room for this member and shares a strategy with it."""
        if not request.protocol_type or not request.protocols:
            raise InconsistentProtocol("A join names its protocol type and at least one protocol.")
        is_newcomer = not request.member_id and request.instance_id not in self.static_ids
        if is_newcomer and len(self.members) + len(self.pending) >= self._limits.members_max:
            raise GroupFull(f"Group {self._group_id} has {self._limits.members_max} members, as many as are allowed.")
        others = [
            member
            for member in self
            if member.id != request.member_id
            and (request.instance_id is None or member.instance_id != request.instance_id)
        ]
        total_bytes = metadata_bytes(request.protocols) + sum(member.metadata_bytes for member in others)
        if total_bytes > self._limits.metadata_bytes_max:
            raise InvalidRequest(
                f"The metadata of group {self._group_id} would take {total_bytes} bytes, "
                f"more than {self._limits.metadata_bytes_max}."
            )
        if not others:
            return
        offered = {name for name, _ in request.protocols}
        common = common_protocols(others)
        if request.protocol_type != protocol_type or not offered & common:
            raise InconsistentProtocol(
                f"Group {self._group_id} uses {protocol_type} with {', '.join(sorted(common))}; "
                f"the member offers {request.protocol_type} with {', '.join(sorted(offered))}."
            )

    def add(self, member: Member) -> None:
        """Take in a member; the first one leads."""
        assert member.id not in self.members
        self.pending.pop(member.id, None)
        self.members[member.id] = member
        if member.instance_id is not None:
            self.static_ids[member.instance_id] = member.id
        self.leader_id = self.leader_id or member.id

    def remove(self, member: Member) -> None:
        """Let a member go; the longest standing of the others leads if it was the leader."""
        del self.members[member.id]
        if member.instance_id is not None:
            del self.static_ids[member.instance_id]
        if self.leader_id == member.id:
            self.leader_id = next(iter(self.members), "")

    def rename(self, member: Member, new_id: str) -> None:
        """Give a static member a new id, in the same place and with the same duties."""
        assert member.instance_id is not None
        self.members = {new_id if id_ == member.id else id_: other for id_, other in self.members.items()}
        self.static_ids[member.instance_id] = new_id
        if self.leader_id == member.id:
            self.leader_id = new_id
        member.id = new_id
