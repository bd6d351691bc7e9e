"""One member of a group: what it offered when it joined, what it waits for, and when its session ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from walstream.node.groups.events import Join, Token


@dataclass(slots=True)
class Member:
    """A member. It is *parked* while one of its requests waits: a parked member is alive whatever its session says."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    seen_ms: int
    """When the session began to count: the last sign of life, or the last answer it was waiting for."""
    knows_id: bool
    """Whether the client has been told the id: one that has not can never come back with it."""
    can_skip_assignment: bool
    join_token: Token | None = None
    sync_token: Token | None = None
    owes_sync: bool = False
    """It has been told of the generation and has not yet asked for its assignment."""
    assignment: bytes | None = None
    metadata_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.metadata_bytes = metadata_bytes(self.protocols)

    @classmethod
    def of(cls, member_id: str, request: Join, now_ms: int) -> Member:
        """Make the member that a join describes."""
        return cls(
            id=member_id,
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            protocols=request.protocols,
            seen_ms=now_ms,
            knows_id=request.member_id != "",
            can_skip_assignment=request.can_skip_assignment,
        )

    @property
    def is_static(self) -> bool:
        """Whether the member has an instance id, so that a restart of its process is not a departure."""
        return self.instance_id is not None

    @property
    def is_parked(self) -> bool:
        """Whether a request of this member waits for the group."""
        return self.join_token is not None or self.sync_token is not None

    @property
    def session_deadline_ms(self) -> int | None:
        """When the member is taken for dead unless it is heard of; None while it is parked."""
        return None if self.is_parked else self.seen_ms + self.session_timeout_ms

    def metadata_of(self, protocol_name: str) -> bytes:
        """Return what the member says to this strategy; empty when it does not offer it."""
        return next((metadata for name, metadata in self.protocols if name == protocol_name), b"")

    def update(self, request: Join, now_ms: int) -> None:
        """Take over what a later join of the same member says."""
        self.client_id = request.client_id
        self.client_host = request.client_host
        self.session_timeout_ms = request.session_timeout_ms
        self.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.protocols = request.protocols
        self.metadata_bytes = metadata_bytes(request.protocols)
        self.can_skip_assignment = request.can_skip_assignment
        self.knows_id = self.knows_id or request.member_id != ""
        self.seen_ms = now_ms


def metadata_bytes(protocols: tuple[tuple[str, bytes], ...]) -> int:
    """Return what a list of protocols weighs in memory, near enough."""
    return sum(len(name) + len(metadata) for name, metadata in protocols)
