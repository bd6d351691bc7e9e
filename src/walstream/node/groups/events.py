"""What goes into the group coordinator and what comes out of it.

Every request carries a token and is answered exactly once by a `Respond` with the same token: at once, or later when
the group has moved on. Nothing here knows the wire: the API handlers translate in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from walstream.errors import RequestError

Token = int
NO_GENERATION = -1

CONSUMER_PROTOCOL = "consumer"


class State(StrEnum):
    """The states of a group, by the names that clients see."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class Join:
    """A member asks to be in the next generation."""

    group_id: str
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    """Assignment strategies by name with their metadata, the preferred one first."""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    must_know_id: bool
    """A dynamic member without an id is given one and must come back with it (JoinGroup v4 and later)."""
    can_skip_assignment: bool
    """The client understands "you lead, but do not assign" (JoinGroup v9 and later)."""


@dataclass(frozen=True, slots=True)
class Sync:
    """A member asks for its assignment; the leader brings everybody's."""

    group_id: str
    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol_name: str | None
    assignments: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member says that it is alive and asks whether its generation still stands."""

    group_id: str
    member_id: str
    instance_id: str | None
    generation: int


@dataclass(frozen=True, slots=True)
class Leaver:
    """One member that leaves, named by its id, its instance id or both."""

    member_id: str
    instance_id: str | None


@dataclass(frozen=True, slots=True)
class Leave:
    """Members leave, or an administrator removes them."""

    group_id: str
    members: tuple[Leaver, ...]


Request = Join | Sync | Heartbeat | Leave


@dataclass(frozen=True, slots=True)
class JoinedMember:
    """One row of the list that the leader assigns to."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """The member is in this generation. Only the leader is told who the members are."""

    generation: int
    protocol_type: str
    protocol_name: str
    leader_id: str
    member_id: str
    members: tuple[JoinedMember, ...]
    skip_assignment: bool


@dataclass(frozen=True, slots=True)
class Synced:
    """The member's share of the work."""

    protocol_type: str
    protocol_name: str
    assignment: bytes


@dataclass(frozen=True, slots=True)
class Alive:
    """The generation stands."""


@dataclass(frozen=True, slots=True)
class Left:
    """For each leaver of the request, in its order, why it could not leave; None where it did."""

    errors: tuple[RequestError | None, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The request cannot be granted. `member_id` is set when the error is "come back with this id"."""

    error: RequestError
    member_id: str = ""


Answer = Joined | Synced | Alive | Left | Refused


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer the request that carried this token."""

    token: Token
    answer: Answer


@dataclass(frozen=True, slots=True)
class Moved:
    """A group changed its state: worth a line in the log and a count in the metrics."""

    group_id: str
    before: State
    after: State
    generation: int
    members: int
    reason: str


Effect = Respond | Moved


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The bounds on groups. Defaults are those of the configuration's `[limits]`."""

    groups_max: int = 10_000
    members_max: int = 1_000
    session_timeout_ms_min: int = 1_000
    session_timeout_ms_max: int = 1_800_000
    join_delay_ms: int = 100
    """An empty group waits this long for more members, again with each that comes: a fleet that starts together then
    costs one rebalance instead of one for each member."""
    metadata_bytes_max: int = 8 * 1024 * 1024
    """Protocol metadata of all members of a group together, and likewise their assignments: 1,000 members that
    subscribe to 100 topics each take about 4 MB."""
