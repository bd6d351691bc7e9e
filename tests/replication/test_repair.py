from replication.world import Node, World
from walstream.replication import effects as fx
from walstream.replication import events as ev
from walstream.replication.messages import RepairRequest
from walstream.replication.settings import CoreSettings


def cluster(nodes: int) -> World:
    world = World(nodes)
    world.elect(1)
    world.run()
    for count in range(5):
        world.produce(1, f"m{count}")
    world.run(100)
    world.effects.clear()
    return world


def rot(node: Node, offset: int) -> None:
    node.log.damaged.append(offset)
    node.handle(ev.DamageFound(((offset, offset + 1),)))


def requests(world: World) -> list[tuple[int, int, int]]:
    sent = [(node, one) for node, one in world.effects if isinstance(one, fx.Send)]
    return [(node, one.peer, one.message.start) for node, one in sent if isinstance(one.message, RepairRequest)]


def test_follower_asks_its_leader_for_one_range_after_the_other() -> None:
    world = cluster(2)
    rot(world.nodes[2], 3)
    rot(world.nodes[2], 1)
    world.run(100)
    assert requests(world) == [(2, 1, 3), (2, 1, 1)]
    assert world.nodes[2].log.damaged == []
    assert world.state.isr_nodes == {1, 2}


def test_leader_asks_the_next_follower_when_one_has_it_not() -> None:
    world = cluster(3)
    world.nodes[2].log.damaged.append(2)
    rot(world.nodes[1], 2)
    world.run(5_000)
    assert [peer for node, peer, _ in requests(world) if node == 1] == [2, 3]
    assert world.nodes[1].log.damaged == []


def test_repair_that_the_log_refuses_is_not_asked_for_again_at_once() -> None:
    world = cluster(2)
    node = world.nodes[2]
    rot(node, 1)

    def refuse(effect: fx.InstallRepair) -> None:
        node.later(lambda: node.handle(ev.RepairDone(effect.token, ((1, 2),))))

    node._InstallRepair = refuse  # type: ignore[method-assign]
    world.run(2_500)
    assert len(requests(world)) == 3
    del node._InstallRepair  # type: ignore[method-assign]
    world.run(1_000)
    assert node.log.damaged == []


def test_repair_that_does_not_fit_asks_for_more_at_a_time() -> None:
    world = World(2, settings=CoreSettings(repair_bytes_max=10))
    world.elect(1)
    world.run()
    world.produce(1, "m1")
    world.run(100)
    node = world.nodes[2]
    rot(node, 0)

    def install(effect: fx.InstallRepair) -> None:
        node.later(lambda: node.handle(ev.RepairDone(effect.token, ((0, 1),))))

    node._InstallRepair = install  # type: ignore[method-assign]
    world.effects.clear()
    world.run(10_000)
    sizes = [
        one.message.bytes_max
        for _, one in world.effects
        if isinstance(one, fx.Send) and isinstance(one.message, RepairRequest)
    ]
    assert sizes[:4] == [20, 40, 80, 160]
    assert max(sizes) == 640


def test_damage_that_cannot_be_repaired_in_place_is_cut_off_and_copied() -> None:
    world = cluster(2)
    node = world.nodes[2]

    def refuse(effect: fx.InstallRepair) -> None:
        node.later(lambda: node.handle(ev.RepairDone(effect.token, node.log.damaged_ranges())))

    node._InstallRepair = refuse  # type: ignore[method-assign]
    rot(node, 2)
    world.run(5_000)
    assert world.state.isr_nodes == {1}
    world.run(10_000)
    assert [one.offset for _, one in world.effects if isinstance(one, fx.Truncate)] == [2]
    assert node.log.records == world.nodes[1].log.records
    assert world.state.isr_nodes == {1, 2}


def test_follower_that_is_cut_back_counts_for_nothing_until_it_has_said_what_is_left() -> None:
    world = cluster(2)
    node, cuts = world.nodes[2], []
    node._InstallRepair = lambda effect: node.later(  # type: ignore[method-assign]
        lambda: node.handle(ev.RepairDone(effect.token, node.log.damaged_ranges()))
    )
    cut, node._Truncate = node._Truncate, cuts.append  # type: ignore[method-assign]
    rot(node, 2)
    world.run(15_000)
    assert len(cuts) == 1
    assert world.leader().sessions[2].lag.end is None
    assert world.leader().replica_durable(1) == 0
    cut(cuts[0])
    world.run(10_000)
    assert world.leader().replica_durable(1) == world.nodes[1].log.log_end


def test_damage_below_the_log_start_is_nobodys_concern() -> None:
    world = cluster(2)
    world.nodes[1].log.damaged.append(1)
    rot(world.nodes[2], 1)
    world.run(500)
    assert world.nodes[2].manager.facts.damaged == ((1, 2),)
    assert world.state.isr_nodes == {1}
    world.nodes[1].log.trim(3)
    world.run(3_000)
    assert world.nodes[2].manager.facts.damaged == ()
    assert world.state.isr_nodes == {1, 2}


def test_leader_does_not_ask_for_what_its_log_has_let_go_of() -> None:
    world = cluster(2)
    world.nodes[2].log.damaged.append(1)
    rot(world.nodes[1], 1)
    rot(world.nodes[1], 4)
    world.run(2_500)
    assert world.nodes[1].manager.facts.damaged == ((1, 2), (4, 5)), "nobody has the first"
    world.nodes[1].log.trim(3)
    world.run(2_500)
    assert world.nodes[1].manager.facts.damaged == ()
    assert world.nodes[1].log.damaged == []
    assert requests(world)[-1] == (1, 2, 4)
