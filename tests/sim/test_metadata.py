from __future__ import annotations

from uuid import UUID

from walstream.cluster.metadata import NO_LEADER, IsrProposal, Member, Outcome, PartitionState, Refusal
from walstream.sim.clock import SECOND, Clock
from walstream.sim.metadata import LEASE_US, SERVICE, MetadataClient, SimMetadata
from walstream.sim.network import Network

KEY = (UUID(int=1), 0)


class World:
    """A service and its nodes' clients."""

    def __init__(self) -> None:
        self.clock = Clock(1)
        self.network = Network(self.clock)
        self.service = SimMetadata(self.clock, self.network)
        self.service.create(KEY, (1, 2, 3), 2)
        self.clients = {
            node: MetadataClient(self.service, self.clock, self.network, node, lambda run: run()) for node in (1, 2, 3)
        }

    def run(self, seconds: float) -> None:
        end_us = self.clock.now_us + int(seconds * SECOND)
        done: list[bool] = []
        self.clock.after(end_us - self.clock.now_us, lambda: done.append(True))
        while not done:
            self.clock.step()

    def register(self, *nodes: int, life: int = 1) -> None:
        for node in nodes:
            self.clients[node].register(node, life, is_unclean=())
        self.run(1)

    @property
    def state(self) -> PartitionState:
        return self.service.records[KEY]

    def propose(self, isr: tuple[Member, ...]) -> list[Outcome]:
        heard: list[Outcome] = []
        state = self.state
        proposal = IsrProposal(KEY, state.leader, state.epoch, state.version, isr)
        self.clients[state.leader].propose(proposal, heard.append)
        return heard


def test_nobody_leads_before_anybody_lives() -> None:
    world = World()
    world.run(2)
    assert world.state.leader == NO_LEADER
    world.register(2)
    assert (world.state.leader, world.state.epoch) == (2, 0)


def test_a_leader_whose_lease_runs_out_is_replaced_in_a_new_epoch() -> None:
    world = World()
    world.register(1, 2, 3)
    first = world.state
    world.clients[first.leader].crash()
    world.run(LEASE_US / SECOND + 2)
    assert world.state.leader not in (first.leader, NO_LEADER)
    assert world.state.epoch > first.epoch


def test_a_leader_that_starts_anew_has_a_new_epoch() -> None:
    world = World()
    world.register(1)
    epoch = world.state.epoch
    world.register(1, life=2)
    assert world.state.epoch == epoch + 1


def test_only_those_in_sync_are_elected() -> None:
    world = World()
    world.register(1, 2, 3)
    leader = world.state.leader
    staying = next(node for node in (1, 2, 3) if node != leader)
    outside = ({1, 2, 3} - {leader, staying}).pop()
    # Who was not there yet when the leader was elected is eligible only, until the leader has taken it in.
    world.propose(tuple(Member(node, 1) for node in (1, 2, 3)))
    world.run(1)
    assert world.state.isr_nodes == {1, 2, 3}
    world.propose(tuple(member for member in world.state.isr if member.node != outside))
    world.run(1)
    for node in (leader, staying):
        world.clients[node].crash()
    world.run(LEASE_US / SECOND + 2)
    assert world.state.leader != outside


def test_a_proposal_is_granted_once() -> None:
    world = World()
    world.register(1, 2, 3)
    isr = world.state.isr[:2] if world.state.leader in (1, 2) else world.state.isr[1:]
    first = world.propose(isr)
    second = world.propose(world.state.isr)
    world.run(1)
    refusals = {outcome.refusal for outcome in (*first, *second)}
    assert refusals == {None, Refusal.STALE_VERSION}, "whichever comes first"


def test_out_of_reach_a_proposals_fate_is_unknown() -> None:
    world = World()
    world.register(1, 2, 3)
    before = world.state
    world.network.cut(SERVICE, before.leader)
    heard = world.propose(before.isr[:2] if before.leader in (1, 2) else before.isr[1:])
    world.run(4)
    assert [outcome.refusal for outcome in heard] == [Refusal.UNKNOWN]
    assert world.state.version > before.version, "it was carried out all the same"
    world.network.cut(world.state.leader, SERVICE)
    version = world.state.version
    heard = world.propose(world.state.isr)
    world.run(2.5)
    assert [outcome.refusal for outcome in heard] == [Refusal.UNKNOWN]
    assert world.state.version == version or world.state.leader != before.leader


def test_a_watch_misses_nothing_for_good() -> None:
    world = World()
    seen: list[PartitionState] = []
    world.register(1, 2, 3)
    world.clients[3].watch(KEY, seen.append)
    world.run(2)
    world.network.cut(SERVICE, 3)
    world.clients[world.state.leader].crash()
    world.run(LEASE_US / SECOND + 1)
    world.network.heal()
    world.run(3)
    assert seen[-1] == world.state
    versions = [state.version for state in seen]
    assert versions == sorted(set(versions))


def test_who_lost_its_disk_leaves_before_it_can_be_elected() -> None:
    world = World()
    world.register(1, 2, 3)
    node = world.state.leader
    world.clients[node].register(node, 2, is_unclean=[KEY])
    world.run(1)
    assert node not in world.state.isr_nodes
    assert world.state.leader not in (node, NO_LEADER)


def test_what_was_said_before_a_life_was_registered_is_not_believed_however_late_it_comes() -> None:
    world = World()
    world.register(1, 2, 3)
    leader = world.state.leader
    world.clients[leader].crash()
    world.clients[leader] = again = MetadataClient(world.service, world.clock, world.network, leader, lambda run: run())
    seen: list[PartitionState] = []
    again.watch(KEY, seen.append)
    world.network.weather.delay_us = (200_000, 200_000)
    alone = tuple(member for member in world.state.isr if member.node == leader)
    world.service.propose(IsrProposal(KEY, leader, world.state.epoch, world.state.version, alone))
    stale = world.state  # It names the earlier life as leader, and is on its way.
    world.network.weather.delay_us = (10, 10)
    again.register(leader, 2, is_unclean=[KEY])
    world.run(0.000_015)
    world.network.cut(SERVICE, leader)  # The answer is under way, and nothing can be asked when it has come.
    world.run(0.1)
    world.network.heal()
    world.run(2)
    assert seen, "it hears what is agreed on since"
    assert stale not in seen
    assert all(state.leader != leader for state in seen)
