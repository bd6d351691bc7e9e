"""What a handler is given beside its request: the node, the connection it came from, and who is asking.

`Node` and `Peer` are the two faces that handlers see of the server and of a connection. They are protocols, so that a
handler can be tested without a socket and so that no handler reaches into the machinery behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from walstream.node.acl import CLUSTER, Principal, Question, ResourceKind

if TYPE_CHECKING:
    from walstream.cluster.local import Catalogue
    from walstream.config import Config
    from walstream.log.store import LogStore
    from walstream.node.api import Api
    from walstream.node.framing import Budget
    from walstream.node.groups.service import GroupService
    from walstream.node.placement import Broker, Placement
    from walstream.node.sasl import Exchange
    from walstream.node.security import Security
    from walstream.node.sessions import Sessions
    from walstream.ops.metrics import Metrics

Result = TypeVar("Result")


class Node(Protocol):
    """The node as handlers see it."""

    config: Config
    store: LogStore
    catalogue: Catalogue
    groups: GroupService
    placement: Placement
    security: Security
    metrics: Metrics
    sessions: Sessions
    apis: dict[int, Api]
    budget: Budget
    unsent: Budget
    executor: Executor

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds."""
        ...


class Peer(Protocol):
    """A connection as handlers see it."""

    principal: Principal
    client_id: str
    peer: str
    local_host: str
    """The node's own address on this connection."""
    is_tls: bool
    exchange: Exchange | None
    """The authentication under way, if any."""
    takes_raw_tokens: bool
    """Whether the next frames are bare tokens of that authentication."""
    closes_after_reply: bool
    """Set by a handler: the connection ends with the reply being made."""
    fetch_turn: int
    """Where the next fetch without a session begins among its partitions."""


@dataclass(frozen=True, slots=True)
class Context:
    """One request's surroundings."""

    node: Node
    connection: Peer
    version: int
    client_id: str

    @property
    def brokers(self) -> dict[int, Broker]:
        """Return the nodes by id, with the addresses that this client is told to connect to."""
        brokers = self.node.placement.brokers
        return {one.id: one if one.host else one._replace(host=self.connection.local_host) for one in brokers}

    def authorize(self, operation: Question, kind: ResourceKind, name: str = CLUSTER) -> None:
        """Raise NotAuthorized unless the connection's principal may do this."""
        self.node.security.authorizer.require(self.connection.principal, operation, kind, name)

    def may(self, operation: Question, kind: ResourceKind, name: str = CLUSTER) -> bool:
        """Say whether the connection's principal may do this."""
        return self.node.security.authorizer.allows(self.connection.principal, operation, kind, name)

    async def in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run what may wait for the disk away from the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.node.executor, call, *arguments)
