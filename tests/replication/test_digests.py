from replication.world import World
from walstream.replication import effects as fx
from walstream.replication import events as ev
from walstream.replication.messages import DigestRequest
from walstream.replication.settings import CoreSettings
from walstream.replication.wire.control import encode_control
from walstream.replication.wire.frames import Keys

SETTINGS = CoreSettings(digest_records=4, digest_pause_ms=1_000)


def cluster(records: int) -> World:
    world = World(2, settings=SETTINGS)
    world.elect(1)
    world.run()
    for count in range(records):
        world.produce(1, f"m{count}")
    world.run(50)
    return world


def reconnect(world: World) -> None:
    """The follower begins a new life, so that nothing is proven of it."""
    world.disconnect(2)
    world.nodes[2].crash()
    world.nodes[2].start()
    world.effects.clear()
    world.connect()


def compared(world: World) -> list[tuple[int, int]]:
    return [(one.start, one.end) for node, one in world.effects if node == 1 and isinstance(one, fx.ComputeDigest)]


def test_recent_range_first_then_older_ones_with_pauses() -> None:
    world = cluster(10)
    reconnect(world)
    world.run()
    assert compared(world) == [(6, 10)]
    assert world.leader().sessions[2].comparison.is_proven
    world.run(999)
    assert len(compared(world)) == 1
    world.run(10_000)
    assert compared(world) == [(6, 10), (2, 6), (0, 2)]
    assert world.leader().sessions[2].comparison.proven == (0, 10)


def test_what_is_proven_is_not_compared_again_in_the_same_life() -> None:
    world = cluster(10)
    world.run(20_000)
    world.effects.clear()
    world.disconnect(2)
    world.connect()
    world.run(20_000)
    assert all(start >= 8 for start, _ in compared(world))


def test_new_ranges_are_compared_as_they_fill_up() -> None:
    world = cluster(4)
    world.run(20_000)
    world.effects.clear()
    for count in range(8):
        world.produce(1, f"n{count}")
    world.run(60_000)
    assert compared(world) == [(4, 8), (8, 12)]


def test_compacted_ranges_are_passed_over() -> None:
    world = cluster(10)
    world.nodes[2].log.cleaned_until = 7
    reconnect(world)
    world.run(20_000)
    assert compared(world) == [(6, 10), (7, 10)]
    assert world.leader().sessions[2].comparison.is_proven
    world.nodes[1].log.cleaned_until = 10
    reconnect(world)
    world.run(20_000)
    assert compared(world) == [(6, 10)]
    assert world.state.isr_nodes == {1, 2}


def test_lost_answer_is_asked_for_again() -> None:
    world = cluster(10)
    reconnect(world)
    node = world.nodes[1]
    while not compared(world):
        assert world.step()
    for wire in world.wires.values():
        wire.clear()
    assert node.tasks
    world.run(5_000)
    assert world.leader().sessions[2].comparison.is_proven


def test_numbers_of_requests_fit_on_the_wire_for_ever() -> None:
    world = cluster(10)
    reconnect(world)
    world.leader().sessions[2].comparison._request = 0xFFFE
    world.run(20_000)
    asked = [one.message for node, one in world.effects if node == 1 and isinstance(one, fx.Send)]
    asked = [message for message in asked if isinstance(message, DigestRequest)]
    assert len(asked) == 3
    for message in asked:
        assert encode_control([message], Keys())
    assert world.leader().sessions[2].comparison.proven == (0, 10)


def test_follower_joins_only_when_its_recent_past_is_proven() -> None:
    world = cluster(10)
    world.disconnect(2)
    world.nodes[2].crash()
    world.produce(1, "late", acks=1)
    world.run(11_000)
    assert world.state.isr_nodes == {1}
    log = world.nodes[2].log
    log.records = [one._replace(text="wrong") if one.offset == 8 else one for one in log.records]
    world.nodes[2].start()
    world.connect()
    world.told.clear()
    world.run(5_000)
    assert world.state.isr_nodes == {1, 2}
    assert log.records == world.nodes[1].log.records
    phrases = [line for line in world.told if "differs" in line or "cut back" in line or "isr proposed" in line]
    assert "differs" in phrases[0]
    assert "isr proposed" in phrases[-1]


def test_copy_that_differs_from_its_start_on_starts_over() -> None:
    world = cluster(3)
    world.disconnect(2)
    world.nodes[2].crash()
    log = world.nodes[2].log
    log.records = [one._replace(text="wrong") for one in log.records]
    world.nodes[2].start()
    world.connect()
    world.run(5_000)
    assert any(node == 2 and isinstance(effect, fx.ResetLog) for node, effect in world.effects)
    assert log.records == world.nodes[1].log.records


def test_damage_of_the_leader_is_no_fault_of_the_follower() -> None:
    world = cluster(10)
    world.nodes[1].log.damaged = [8]
    reconnect(world)
    world.run(500)
    assert not world.leader().sessions[2].comparison.differs
    world.nodes[1].handle(ev.DamageFound(((8, 9),)))
    world.run(2_000)
    assert world.nodes[1].log.damaged == []


def test_leader_that_finds_a_difference_doubts_itself_first() -> None:
    world = cluster(10)
    world.nodes[1].log.rotten = {8}
    reconnect(world)
    world.run(5_000)
    assert not any(isinstance(effect, fx.Truncate | fx.ResetLog) for node, effect in world.effects if node == 2)
    assert [node for node, one in world.effects if isinstance(one, fx.ComputeDigest) and one.is_verified] == [1]
    assert not world.nodes[1].log.rotten
    assert world.nodes[1].log.damaged == [], "repaired from the follower"
    assert world.state.isr_nodes == {1, 2}


def test_slow_disk_is_not_asked_again_and_again() -> None:
    world = cluster(10)
    reconnect(world)
    while not compared(world):
        assert world.step()
    world.nodes[1].has_slow_disk = True
    world.run(20_000)
    assert compared(world) == [(6, 10)]
    world.nodes[1].has_slow_disk = False
    world.run(1_000)
    assert world.leader().sessions[2].comparison.is_proven
