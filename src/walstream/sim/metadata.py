"""A metadata service as etcd would be: linearizable records, leases, compare-and-swap; and the way to it, which fails.

`SimMetadata` is the service: it never loses anything and judges every proposal with `cluster.metadata.granted`. It
elects a new leader when the old one's lease has run out, when it has started anew, or when it resigns.
`MetadataClient` is a node's access: requests and answers take time, and get lost while the service cannot be reached,
so a proposal may be carried out although its sender hears that its fate is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from walstream.cluster.metadata import (
    NO_LEADER,
    IsrProposal,
    Member,
    NodeId,
    Outcome,
    PartitionKey,
    PartitionState,
    Refusal,
    granted,
    without,
)
from walstream.replication.elections import elect
from walstream.sim.clock import MS, SECOND, Clock
from walstream.sim.network import Network

SERVICE = 0
"""The service's number on the network; nodes count from 1."""

LEASE_US = 3 * SECOND
KEEPALIVE_US = 1 * SECOND
ANSWER_TIMEOUT_US = 2 * SECOND
ELECTION_INTERVAL_US = 500 * MS

T = TypeVar("T")
Elected = Callable[[PartitionKey, PartitionState], None]


class SimMetadata:
    """The records, and who is alive."""

    def __init__(self, clock: Clock, network: Network, *, unclean_allowed: bool = False) -> None:
        self.records: dict[PartitionKey, PartitionState] = {}
        self.lives: dict[NodeId, int] = {}
        self.is_available = True
        self.elected: Elected = lambda _key, _state: None
        self.watchers: dict[PartitionKey, dict[int, Callable[[PartitionState], None]]] = {}
        self._clock = clock
        self._network = network
        self._leases: dict[NodeId, int] = {}
        self._unclean_allowed = unclean_allowed
        self._watcher_count = 0
        clock.after(ELECTION_INTERVAL_US, self._sweep)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, key: PartitionKey, replicas: tuple[NodeId, ...], min_isr: int) -> None:
        """Make the record of a new partition. It has a leader once one of its replicas is alive."""
        isr = tuple(Member(node, 0) for node in sorted(replicas))
        self.records[key] = PartitionState(replicas=replicas, isr=isr, min_isr=min_isr)

    def delete(self, key: PartitionKey) -> None:
        """Forget a partition whose topic is deleted."""
        del self.records[key]
        self.watchers.pop(key, None)

    def watch(self, key: PartitionKey, changed: Callable[[PartitionState], None]) -> Callable[[], None]:
        """Call back at every change."""
        self._watcher_count += 1
        number = self._watcher_count
        self.watchers.setdefault(key, {})[number] = changed
        return lambda: self.watchers.get(key, {}).pop(number, None) and None

    def propose(self, proposal: IsrProposal) -> Outcome:
        """Judge a proposal and carry it out."""
        if proposal.partition not in self.records:
            return Outcome(Refusal.STALE_EPOCH, None)
        outcome = granted(self.records[proposal.partition], proposal, self.lives.get)
        if outcome.refusal is None:
            assert outcome.state is not None
            self._put(proposal.partition, outcome.state)
        return outcome

    def _put(self, key: PartitionKey, state: PartitionState) -> None:
        self.records[key] = state
        for changed in tuple(self.watchers.get(key, {}).values()):
            changed(state)

    # ── lives and leases ─────────────────────────────────────────────────────────────────────────────────────────

    def register(self, node: NodeId, incarnation: int, unclean: Collection[PartitionKey]) -> None:
        """A node has started: what it led in its former life needs an election, its losses are noted first."""
        if incarnation <= self.lives.get(node, -1):
            return
        self.lives[node] = incarnation
        self._leases[node] = self._clock.now_us + LEASE_US
        for key in sorted(self.records):
            state = self.records[key]
            if key in unclean and (changed := without(state, node)) is not state:
                self._put(key, changed)
            if self.records[key].leader in (node, NO_LEADER):
                self._elect(key)

    def keep_alive(self, node: NodeId, incarnation: int) -> None:
        """Renew a node's lease, if it is this life's."""
        if self.lives.get(node) == incarnation:
            self._leases[node] = self._clock.now_us + LEASE_US

    def resign(self, key: PartitionKey, leader: NodeId, epoch: int) -> None:
        """Elect another leader, or, if there is no other, the same one in another epoch."""
        state = self.records.get(key)
        if state is not None and state.leader == leader and state.epoch == epoch:
            self._elect(key, but=leader)

    def is_alive(self, node: NodeId) -> bool:
        """Whether a node holds its lease."""
        return self._leases.get(node, 0) > self._clock.now_us

    def _sweep(self) -> None:
        """Elect where the leader's lease has run out, or where there was nobody to elect before."""
        self._clock.after(ELECTION_INTERVAL_US, self._sweep)
        if self.is_available:
            for key in sorted(self.records):
                leader = self.records[key].leader
                if leader == NO_LEADER or not self.is_alive(leader):
                    self._elect(key)

    def _elect(self, key: PartitionKey, but: NodeId = NO_LEADER) -> None:
        """Elect as `replication.elections` says; nobody if nobody may lead."""
        state = self.records[key]
        alive = {node: self.lives[node] for node in state.replicas if self.is_alive(node)}
        changed = elect(state, alive, resigned=but, is_unclean_allowed=self._unclean_allowed)
        if changed is not None:
            self._put(key, changed)
            self.elected(key, changed)


class MetadataClient:
    """One life of a node's access to the service: `cluster.metadata.MetadataService` over a fallible way."""

    def __init__(
        self,
        service: SimMetadata,
        clock: Clock,
        network: Network,
        node: NodeId,
        run_on_node: Callable[[Callable[[], None]], None],
    ) -> None:
        self._service = service
        self._clock = clock
        self._network = network
        self._node = node
        self._run_on_node = run_on_node
        self._is_dead = False
        self._known_at: dict[PartitionKey, int] | None = None
        """The versions of the records when the service noted this life; None until then. Whatever it said before is
        about an earlier one, and is not believed, however late it comes."""
        self._looks: list[Callable[[], None]] = []
        self._stops: list[Callable[[], None]] = []
        self._arrives_us = 0

    def crash(self) -> None:
        """Hear nothing any more."""
        self._is_dead = True
        for stop in self._stops:
            stop()

    # ── the interface ────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, partition: PartitionKey, done: Callable[[PartitionState | None], None]) -> None:
        """Give the record, or None when it cannot be had now."""
        self._ask(lambda: self._service.records.get(partition) if self._known_at is not None else None, done, None)

    def propose(self, proposal: IsrProposal, done: Callable[[Outcome], None]) -> None:
        """Grant or refuse another ISR."""
        self._ask(partial(self._service.propose, proposal), done, Outcome(Refusal.UNKNOWN, None))

    def watch(self, partition: PartitionKey, changed: Callable[[PartitionState], None]) -> Callable[[], None]:
        """Tell of the record now and whenever it changes, in order. What is missed while cut off is made up for."""
        seen = [-1]

        def tell(state: PartitionState) -> None:
            known_at = self._known_at
            if state.version > seen[0] and known_at is not None and state.version >= known_at.get(partition, 0):
                seen[0] = state.version
                changed(state)

        def arrive(state: PartitionState) -> None:
            if self._is_reachable():
                self._tell(partial(tell, state))

        def look() -> None:
            state = self._service.records.get(partition)
            if state is not None and state.version > seen[0] and self._is_reachable():
                self._tell(partial(tell, state))

        def poll() -> None:
            # A watch that was cut off resumes from where it was: it ends up with the newest.
            if not self._is_dead:
                self._clock.after(KEEPALIVE_US, poll)
                look()

        def pushed(state: PartitionState) -> None:
            self._arrives_us = max(self._arrives_us, self._clock.now_us + self._delay())
            self._clock.after(self._arrives_us - self._clock.now_us, partial(arrive, state))

        stop = self._service.watch(partition, pushed)
        self._stops.append(stop)
        self._looks.append(look)
        self._clock.after(self._delay(), poll)
        return stop

    def resign(self, partition: PartitionKey, leader: NodeId, epoch: int) -> None:
        """Ask for somebody else to be elected."""
        self._ask(lambda: self._service.resign(partition, leader, epoch), lambda _: None, None)

    def register(self, node: NodeId, incarnation: int, *, is_unclean: Collection[PartitionKey]) -> None:
        """Say that the node has started, again and again until it is heard, then keep the lease alive."""

        def heard(versions: dict[PartitionKey, int] | None) -> None:
            if versions is not None:
                self._known_at = versions
                for look in self._looks:
                    look()
                keep_alive()
            else:
                self.register(node, incarnation, is_unclean=is_unclean)

        def carry_out() -> dict[PartitionKey, int] | None:
            self._service.register(node, incarnation, is_unclean)
            return {key: state.version for key, state in self._service.records.items()}

        def keep_alive() -> None:
            if not self._is_dead:
                self._clock.after(KEEPALIVE_US, keep_alive)
                self._ask(lambda: self._service.keep_alive(node, incarnation), lambda _: None, None)

        self._ask(carry_out, heard, None)

    # ── the way ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, request: Callable[[], T], done: Callable[[T], None], unknown: T) -> None:
        """Carry a request there and the answer back, or neither, or only the request."""

        def arrive() -> None:
            if not self._can_send():
                return
            answer = request()
            if self._is_reachable():
                timer.cancel()
                self._clock.after(self._delay(), partial(self._tell, partial(done, answer)))

        timer = self._clock.after(ANSWER_TIMEOUT_US, partial(self._tell, partial(done, unknown)))
        self._clock.after(self._delay(), arrive)

    def _tell(self, callback: Callable[[], None]) -> None:
        if not self._is_dead:
            self._run_on_node(callback)

    def _can_send(self) -> bool:
        return self._service.is_available and self._network.is_reachable(self._node, SERVICE)

    def _is_reachable(self) -> bool:
        """Whether what the service says gets here."""
        return self._service.is_available and self._network.is_reachable(SERVICE, self._node)

    def _delay(self) -> int:
        return self._clock.between(*self._network.weather.delay_us)
