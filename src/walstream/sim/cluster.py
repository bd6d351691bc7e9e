"""A simulated cluster from its first event to its last: nodes, network, metadata, clients, faults and checkers.

A run has three parts: the faults and the clients go on for a number of steps; then the faults stop, and everything
must become well within a bounded time (all copies equal, all in sync); then one more write must be acknowledged by
all. What is found wrong at any moment is a `Violation`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from uuid import UUID

from walstream.cluster.local import Topic
from walstream.cluster.metadata import NodeId, PartitionKey
from walstream.errors import NotEnoughReplicas, WalstreamError
from walstream.log.records import Record, build_batch
from walstream.node.driver import Replica
from walstream.node.offsets_log import OFFSETS_TOPIC
from walstream.replication.leader import Leader
from walstream.replication.settings import CoreSettings, Mode
from walstream.sim.checkers import ACKS_ALL, Checkers, Violation
from walstream.sim.clock import MS, SECOND, Clock
from walstream.sim.copies import Copy
from walstream.sim.faults import Faults
from walstream.sim.groups import Groups
from walstream.sim.lookups import Lookups, Records
from walstream.sim.metadata import SimMetadata
from walstream.sim.network import Network
from walstream.sim.node import SimNode
from walstream.sim.scenario import Scenario
from walstream.sim.trace import Trace
from walstream.sim.workload import Operator, Producer, producers_of, readers_of

SETTLE_US = 60 * SECOND
"""How long a cluster without faults may take until all is well. Leases, lags and retries take seconds each."""

SETTLE_CHECK_STEPS = 20
WRITE_AGAIN_US = 200 * MS


class Cluster:
    """Everything that takes part in a run."""

    def __init__(self, clock: Clock, scenario: Scenario, write: Callable[[str], None] | None = None) -> None:
        self.clock = clock
        self.scenario = scenario
        self.trace = Trace(clock, write)
        self.network = Network(clock)
        self.checkers = Checkers()
        self.core_settings = CoreSettings(
            isr_lag_ms_max=scenario.isr_lag_ms, isr_lag_records_max=scenario.isr_lag_records, retry_ms=300,
            data_bytes_max=600, digest_records=20, digest_pause_ms=700, repair_bytes_max=600,
            mode=Mode.SYNC if scenario.sync_followers else Mode.ASYNC,
            sync_followers=max(scenario.sync_followers, 1),
        )  # fmt: skip
        self.metadata: SimMetadata | None = None
        if not scenario.is_static:
            self.metadata = SimMetadata(clock, self.network, unclean_allowed=scenario.is_unclean_allowed)
        self.answer_loss = 0.0
        self.are_faults_over = False
        self.catalogue_version = 0
        self.topics: list[Topic] = []
        self.placement: dict[PartitionKey, tuple[NodeId, ...]] = {}
        self._id_count = 0
        self._create_topic("t", scenario.partitions)
        keys = list(self.placement)
        self.records = Records(is_kept=scenario.has_lookups)
        self.clients: list[Groups | Lookups] = []
        if scenario.has_groups:
            self._create_topic(OFFSETS_TOPIC, 1)
            self.clients.append(Groups(self))
        if scenario.has_lookups:
            self.clients.append(Lookups(self))
        self.nodes = [SimNode(self, number) for number in range(1, scenario.nodes + 1)]
        self.producers = producers_of(self, keys)
        self.readers = readers_of(self, keys)
        self.operator = Operator(self)
        self.faults = Faults(self)

    def _create_topic(self, name: str, partitions: int) -> None:
        scenario = self.scenario
        self.catalogue_version += 1
        config = {"min.insync.replicas": str(scenario.min_isr)}
        replicas = list(range(1, scenario.nodes + 1))[: scenario.replicas] if name == OFFSETS_TOPIC else []
        topic = Topic(name, self.new_id(), partitions, config, replicas, since=self.catalogue_version)
        self.topics.append(topic)
        for index in range(partitions):
            nodes = tuple((index + i) % scenario.nodes + 1 for i in range(scenario.replicas))
            key = (topic.id, index)
            self.placement[key] = nodes
            self.checkers.create(key, f"{name}{index}", nodes, scenario.min_isr)
            if self.metadata is not None:
                self.metadata.create(key, nodes, scenario.min_isr)
                self.metadata.watch(key, partial(self.checkers.recorded, key))

    def change_topics(self) -> None:
        """Create the second topic, or delete it; the nodes learn of it in their own time."""
        second = next((topic for topic in self.topics if topic.name == "u"), None)
        if second is None:
            self.trace("world", "topic u is created")
            self._create_topic("u", 1)
            key = (self.topics[-1].id, 0)
            producer = Producer(self, len(self.producers), key, ACKS_ALL, is_idempotent=True)
            self.producers.append(producer)
            producer.start()
        else:
            self.trace("world", "topic u is deleted")
            self.catalogue_version += 1
            self.topics = [topic for topic in self.topics if topic is not second]
            key = (second.id, 0)
            del self.placement[key]
            self.checkers.delete(key)
            if self.metadata is not None:
                self.metadata.delete(key)
            for producer in self.producers:
                producer.forget(key)
        for node in self.nodes:
            self.clock.after(self.clock.between(100, 500_000), partial(node.run, node.take_catalogue))

    def new_id(self) -> UUID:
        """Return the next id; the same in every run of a seed."""
        self._id_count += 1
        return UUID(int=self._id_count)

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, steps: int) -> None:
        """Make the whole run. Raises Violation."""
        try:
            self.start()
            for _ in range(steps):
                if not self.clock.step():
                    break
            self.settle()
        finally:
            for node in self.nodes:
                if node.api is not None:
                    node.api.loop.close()

    def start(self) -> None:
        """Start the nodes, the clients and the faults."""
        self.trace("world", f"seed {self.clock.seed}: {self.scenario}")
        for node in self.nodes:
            node.start()
        for producer in self.producers:
            producer.start()
        for reader in self.readers:
            reader.start()
        for clients in self.clients:
            clients.start()
        self.operator.start()
        self.faults.start()

    def settle(self) -> None:
        """End all faults and wait until all is well, then write once more."""
        self.faults.stop()
        self.are_faults_over = True
        for clients in self.clients:
            clients.stop()
        for producer in self.producers:
            producer.is_over = True
        for reader in self.readers:
            reader.is_over = True
        self.operator.is_over = True
        if self.scenario.has_trims:
            self.operator.repeat()
        self._wait("convergence", self._what_is_wrong)
        acknowledged: list[bool] = []
        keys = [(topic.id, index) for topic in self.client_topics for index in range(topic.partitions)]
        for key in keys:
            self._write_again(key, acknowledged)
        self._wait("writes resume", lambda: None if len(acknowledged) == len(keys) else "a write is not acked")
        for clients in self.clients:
            clients.finish()
        self._wait("coordinator resumes", self._unserved)
        self._wait("convergence", self._what_is_wrong)
        self.trace("world", "all is well")

    def _wait(self, invariant: str, wrong: Callable[[], str | None]) -> None:
        deadline_us = self.clock.now_us + SETTLE_US
        while (reason := wrong()) is not None:
            if self.clock.now_us > deadline_us:
                raise Violation(invariant, f"{SETTLE_US // SECOND} s after the faults stopped: {reason}")
            for _ in range(SETTLE_CHECK_STEPS):
                self.clock.step()

    def _what_is_wrong(self) -> str | None:
        """Tell what keeps the cluster from being well."""
        for key, nodes in self.placement.items():
            copies = self.copies(key)
            if len(copies) < len(nodes):
                return f"p{key[1]} has {len(copies)} copies up"
            leaders = [copy for copy in copies if copy.leading_epoch is not None]
            if len(leaders) != 1:
                return f"p{key[1]} has {len(leaders)} leaders"
            role = leaders[0].replica.manager.role
            if not isinstance(role, Leader) or len(role.isr.state.isr) < len(nodes):
                return f"p{key[1]} has not all replicas in sync"
            wrong = self.checkers.difference_in_the_end(copies, key, is_scrubbed=self.scenario.scrub_bytes_per_s > 0)
            if wrong is not None:
                return f"p{key[1]}: {wrong}"
        return None

    def _unserved(self) -> str | None:
        """Return what keeps groups and time look-ups from being served."""
        return next((reason for clients in self.clients if (reason := clients.unfinished()) is not None), None)

    def _write_again(self, key: PartitionKey, acknowledged: list[bool]) -> None:
        """Write once more; a client that is told to try again does, as long as there is time."""
        again = partial(self._write_again, key, acknowledged)

        def answered(error: WalstreamError | None) -> None:
            if error is None:
                acknowledged.append(True)
            elif error.retryable:
                self.clock.after(WRITE_AGAIN_US, again)
            else:
                raise Violation("writes resume", f"p{key[1]}: a write after all faults was refused: {error}")

        node = self.leader_for_client(key)
        if node is None:
            self.clock.after(WRITE_AGAIN_US, again)
        else:
            node.produce(key, build_batch([Record(0, self.clock.now_ms, None, b"the last")]), ACKS_ALL, answered)

    # ── what others ask ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def client_topics(self) -> list[Topic]:
        """The topics that clients read and write."""
        return [topic for topic in self.topics if not topic.is_internal]

    def copies(self, key: PartitionKey) -> list[Copy]:
        """Return the copies of a partition whose nodes are up."""
        return [node.copies[key] for node in self.nodes if node.is_up and key in node.copies]

    def leader_for_client(self, key: PartitionKey) -> SimNode | None:
        """Return whom a client takes for the leader: mostly the newest, at times one that only believes to lead."""
        leaders = [copy for copy in self.copies(key) if copy.leading_epoch is not None]
        if not leaders:
            return None
        if len(leaders) > 1 and self.clock.chance(0.4):
            chosen = self.clock.random.choice(leaders)
        else:
            chosen = max(leaders, key=lambda copy: copy.leading_epoch or 0)
        return self.nodes[chosen.node - 1]

    def leads_newest(self, node: SimNode, key: PartitionKey) -> bool:
        """Whether a node leads in the newest epoch that anybody has led in."""
        history, copy = self.checkers.histories.get(key), node.copies.get(key)
        return history is not None and copy is not None and copy.leading_epoch == max(history.leaders, default=None)

    def client_delay_us(self) -> int:
        """Draw how long a request or an answer of a client takes."""
        return self.clock.between(50, 1_000)

    def check_in_sync(self, replica: Replica) -> None:
        """Raise NotEnoughReplicas where acks=all cannot be kept."""
        role = replica.manager.role
        if isinstance(role, Leader) and not role.can_commit:
            raise NotEnoughReplicas("Too few replicas are in sync.")

    def leads_statically(self, node: NodeId) -> bool:
        """Whether a node is the configured leader of anything: nobody could take its place."""
        return self.scenario.is_static and any(nodes[0] == node for nodes in self.placement.values())

    def metadata_available(self, is_available: bool) -> None:
        """Let the metadata service answer, or not."""
        if self.metadata is not None:
            self.trace("meta", "answers" if is_available else "does not answer")
            self.metadata.is_available = is_available

    def hand_over(self) -> None:
        """Ask for another leader of a partition, as an operator does before maintenance."""
        if self.metadata is not None and self.metadata.is_available:
            key = self.clock.random.choice(list(self.placement))
            state = self.metadata.records[key]
            self.trace("meta", f"p{key[1]} hand-over from n{state.leader}")
            self.metadata.resign(key, state.leader, state.epoch)
