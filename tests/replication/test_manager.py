"""Role changes, fencing and stale completions, one event at a time."""

from dataclasses import replace
from typing import TypeVar

from replication.memory_log import MemoryLog
from replication.world import KEY, World
from walstream.cluster.metadata import Member, Outcome, PartitionState
from walstream.replication import effects as fx
from walstream.replication import events as ev
from walstream.replication.context import NEVER
from walstream.replication.follower import Follower, Stage
from walstream.replication.manager import Manager
from walstream.replication.messages import (
    Accept,
    Data,
    Diverging,
    Open,
    Progress,
    Refused,
    ReplicaFlag,
    Reset,
    Rewind,
    State,
    Watermark,
    Why,
)
from walstream.replication.settings import CoreSettings, Mode

E = TypeVar("E")
NOW = 1_000


def started(node: int = 1, epoch: int = -1, log: MemoryLog | None = None, **facts: object) -> Manager:
    manager = Manager(KEY, Member(node, 1), log or MemoryLog(), CoreSettings(digest_records=0))
    event = ev.Started(epoch, 0, -1, is_unclean=False)
    assert not manager.handle(replace(event, **facts), NOW)  # type: ignore[arg-type]
    return manager


def only(kind: type[E], effects: list[fx.Effect]) -> E:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def kinds(effects: list[fx.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects if not isinstance(effect, fx.Report)]


def opening(epoch: int, session: int = 1, unclean_epoch: int = -1) -> Open:
    return Open(KEY, epoch, session, 0, 0, 0, 0, unclean_epoch)


def from_leader(manager: Manager, peer: int, message: object) -> list[fx.Effect]:
    return manager.handle(ev.Received(peer, message, False), NOW)  # type: ignore[arg-type]


def following(log: MemoryLog | None = None) -> tuple[Manager, MemoryLog]:
    """A follower of node 2 in epoch 5, accepted at its log end."""
    log = log or MemoryLog()
    manager = started(1, log=log)
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    follow = only(fx.Follow, from_leader(manager, 2, opening(5)))
    log.seen_epoch = 5
    state = only(fx.Send, manager.handle(ev.RoleTaken(follow.token), NOW)).message
    assert isinstance(state, State)
    from_leader(manager, 2, Accept(KEY, 5, 1, log.log_end))
    return manager, log


def leading(replicas: tuple[int, ...] = (1, 2)) -> tuple[Manager, MemoryLog]:
    log = MemoryLog()
    manager = started(1, log=log)
    lead = only(fx.Lead, manager.become_leader(5, replicas, NOW))
    log.lead(5)
    manager.handle(ev.RoleTaken(lead.token), NOW)
    return manager, log


def test_leads_only_when_its_epoch_is_durable() -> None:
    manager = started()
    lead = only(fx.Lead, manager.become_leader(5, (1, 2), NOW))
    assert lead.epoch == 5
    assert not manager.is_leader
    assert manager.deadline_ms == NEVER
    manager._ctx.log.lead(5)  # type: ignore[attr-defined]
    manager.handle(ev.RoleTaken(lead.token), NOW)
    assert manager.is_leader


def test_role_change_ends_the_old_role_before_the_new_one_begins() -> None:
    manager, _ = leading()
    effects = manager.become_follower(2, 6, NOW)
    assert kinds(effects) == ["FailWaiters", "StopRole", "Follow"]
    assert only(fx.FailWaiters, effects).why is fx.Failing.NOT_LEADER
    assert not manager.is_leader


def test_completion_of_an_older_role_is_dropped() -> None:
    manager = started()
    old = only(fx.Lead, manager.become_leader(5, (1, 2), NOW))
    new = only(fx.Follow, manager.become_follower(2, 6, NOW))
    assert manager.handle(ev.RoleTaken(old.token), NOW) == []
    assert isinstance(manager.role, Follower)
    assert manager.role.stage is Stage.PREPARING
    manager.handle(ev.RoleTaken(new.token), NOW)
    assert manager.role.stage is Stage.IDLE
    assert manager.facts.epoch == 6


def test_old_record_changes_nothing() -> None:
    manager, _ = leading()
    assert manager.state is not None
    old = replace(manager.state, leader=2, epoch=4, version=99)
    assert manager.handle(ev.MetadataChanged(old), NOW) == []
    assert manager.is_leader


def test_nobody_leads_an_epoch_of_an_earlier_life() -> None:
    manager = started(epoch=5)
    resign = only(fx.Resign, manager.become_leader(5, (1, 2), NOW))
    assert resign.epoch == 5
    assert manager.role is None
    assert manager.deadline_ms == NOW + 1_000
    assert only(fx.Resign, manager.handle(ev.Tick(), NOW + 1_000)) == resign
    assert only(fx.Lead, manager.become_leader(6, (1, 2), NOW)).epoch == 6
    assert kinds(manager.handle(ev.Tick(), NOW + 9_000)) == []


def test_failed_log_needs_another_epoch() -> None:
    manager, _ = leading()
    assert kinds(manager.handle(ev.LogFailed(), NOW)) == ["FailWaiters", "StopRole", "Resign"]
    effects = manager.handle(ev.Started(5, 0, 5, is_unclean=False), NOW)
    assert kinds(effects) == []
    assert kinds(manager.handle(ev.Tick(), NOW + 1_000)) == ["Resign"]
    assert only(fx.Lead, manager.become_leader(6, (1, 2), NOW)).epoch == 6


def test_leader_not_in_the_isr_declines() -> None:
    manager = started()
    state = PartitionState((1, 2), leader=1, epoch=3, isr=(Member(2, 1),), version=1)
    assert "not in the ISR" in only(fx.Resign, manager.handle(ev.MetadataChanged(state), NOW)).reason


def test_newer_epoch_makes_a_leader_follow() -> None:
    manager, _ = leading()
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    assert kinds(from_leader(manager, 2, opening(6))) == ["FailWaiters", "StopRole", "Follow"]


def test_leader_that_hears_of_a_newer_epoch_ends_at_once() -> None:
    manager, _ = leading()
    fenced = Refused(KEY, 5, 1, Why.FENCED, known_epoch=9)
    effects = manager.handle(ev.Received(2, fenced, True), NOW)
    assert kinds(effects) == ["FailWaiters", "StopRole", "RefreshMetadata"]
    assert manager.known_epoch == 9
    state = replace(manager.state or PartitionState(()), epoch=8, version=99)
    assert kinds(manager.handle(ev.MetadataChanged(state), NOW)) == []


def test_older_leader_is_fenced_and_its_data_not_kept() -> None:
    manager, _ = following()
    manager.handle(ev.LinkUp(3, 1, False), NOW)
    refusal = only(fx.Send, from_leader(manager, 3, opening(4))).message
    assert refusal == Refused(KEY, 4, 1, Why.FENCED, 5)
    effects = from_leader(manager, 3, Data(KEY, 4, 1, 0, 0, 0, 1, (b"0:4:x",)))
    assert only(fx.ReturnCredit, effects) == fx.ReturnCredit(3, 5)
    assert only(fx.Send, effects).message == refusal


def test_second_leader_in_one_epoch_is_refused() -> None:
    manager, _ = following()
    manager.handle(ev.LinkUp(3, 1, False), NOW)
    assert only(fx.Send, from_leader(manager, 3, opening(5))).message == Refused(KEY, 5, 1, Why.SAME_EPOCH, 5)


def test_nothing_is_acknowledged_before_the_epoch_is_durable() -> None:
    manager = started()
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    follow = only(fx.Follow, from_leader(manager, 2, opening(5)))
    assert kinds(from_leader(manager, 2, opening(5, session=2))) == []
    state = only(fx.Send, manager.handle(ev.RoleTaken(follow.token), NOW)).message
    assert isinstance(state, State)
    assert state.session == 2


def test_epoch_that_cannot_be_made_durable_is_tried_again() -> None:
    manager = started()
    follow = only(fx.Follow, manager.become_follower(2, 5, NOW))
    manager.handle(ev.RoleFailed(follow.token, "no space"), NOW)
    assert manager.deadline_ms == NOW + 1_000
    assert only(fx.Follow, manager.handle(ev.Tick(), NOW + 1_000)).epoch == 5
    assert manager.deadline_ms == NEVER


def test_nothing_is_told_before_it_is_flushed() -> None:
    log = MemoryLog()
    manager, _ = following(log)
    append = only(fx.Append, from_leader(manager, 2, Data(KEY, 5, 1, 0, 0, 0, 1, (b"0:5:x",))))
    log.append_replicated(append.batches)
    manager.handle(ev.LinkDown(2, False), NOW)
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    assert kinds(from_leader(manager, 2, opening(5, session=2))) == []
    log.flush()
    state = only(fx.Send, manager.handle(ev.Durable(), NOW)).message
    assert isinstance(state, State)
    assert (state.log_end, state.last_epoch, state.session) == (1, 5, 2)


def test_high_watermark_is_taken_from_an_accepted_stream_and_up_to_the_own_disk() -> None:
    log = MemoryLog()
    manager, _ = following(log)
    effects = from_leader(manager, 2, Data(KEY, 5, 1, 9, 0, 0, 2, (b"0:5:x", b"1:5:y")))
    log.append_replicated(only(fx.Append, effects).batches)
    assert manager.facts.high_watermark == 0
    log.flush()
    effects = manager.handle(ev.Durable(), NOW)
    assert only(fx.SetHighWatermark, effects).offset == 2
    progress = only(fx.Send, effects).message
    assert progress == Progress(KEY, 5, 1, 2, 2, ReplicaFlag.NONE)


def test_log_start_is_taken_over_no_further_than_the_own_disk_reaches() -> None:
    log = MemoryLog()
    manager, _ = following(log)
    effects = from_leader(manager, 2, Data(KEY, 5, 1, 9, 4, 0, 2, (b"0:5:x", b"1:5:y")))
    assert not [effect for effect in effects if isinstance(effect, fx.TrimLog)]
    log.append_replicated(only(fx.Append, effects).batches)
    log.flush()
    effects = manager.handle(ev.Durable(), NOW)
    assert only(fx.TrimLog, effects).log_start == manager.facts.high_watermark == 2


def test_watermark_is_answered_though_nothing_is_new() -> None:
    manager, _ = following()
    answer = only(fx.Send, from_leader(manager, 2, Watermark(KEY, 5, 1, 0, 0, 0))).message
    assert isinstance(answer, Progress)


def test_every_data_frame_is_appended_or_its_credit_returned() -> None:
    manager, _ = following()
    frames = {
        "of another session": Data(KEY, 5, 7, 0, 0, 0, 1, (b"0:5:x",)),
        "with a gap": Data(KEY, 5, 1, 0, 0, 3, 4, (b"3:5:x",)),
        "after the gap": Data(KEY, 5, 1, 0, 0, 0, 1, (b"0:5:x",)),
        "of a newer epoch": Data(KEY, 6, 1, 0, 0, 0, 1, (b"0:6:x",)),
    }
    for name, frame in frames.items():
        assert only(fx.ReturnCredit, from_leader(manager, 2, frame)).bytes_count == 5, name
    manager.handle(ev.LogFailed(), NOW)
    assert only(fx.ReturnCredit, from_leader(manager, 2, frames["after the gap"])).bytes_count == 5


def test_truncation_voids_what_was_begun_before_it() -> None:
    world = World(2)
    world.elect(1)
    world.run(100)
    manager = world.nodes[2].manager
    before = manager._ctx.token
    manager._ctx.next_truncation()
    assert manager.handle(ev.AppendFailed(before, "late"), NOW) == []
    assert manager.handle(ev.Truncated(before), NOW) == []


def test_leader_does_not_commit_what_is_damaged_on_its_own_disk() -> None:
    log = MemoryLog()
    log.lead(4)
    for text in "abc":
        log.append(text)
    log.flush()
    log.is_leader = False
    manager = started(1, epoch=4, log=log)
    manager.handle(ev.DamageFound(((1, 2),)), NOW)
    lead = only(fx.Lead, manager.become_leader(5, (1, 2), NOW))
    log.lead(5)
    manager.handle(ev.RoleTaken(lead.token), NOW)
    manager.handle(ev.LinkUp(2, 7, True), NOW)
    effects = manager.handle(ev.Received(2, State(KEY, 5, 1, 0, 3, 4, 0, ReplicaFlag.NONE), True), NOW)
    assert only(fx.SetHighWatermark, effects).offset == 1, "of the rest the follower has the only sound copy"
    effects = manager.handle(ev.RepairDone(lead.token, ()), NOW)
    assert only(fx.SetHighWatermark, effects).offset == 3


def test_replica_that_lost_bytes_is_not_healed_before_the_cluster_knows_of_it() -> None:
    log = MemoryLog()
    manager = started(1, log=log, is_unclean=True)
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    follow = only(fx.Follow, from_leader(manager, 2, opening(5)))
    manager.handle(ev.RoleTaken(follow.token), NOW)
    from_leader(manager, 2, Accept(KEY, 5, 1, 0))
    watermark = Watermark(KEY, 5, 1, 0, 0, 0)
    assert "Healed" not in kinds(from_leader(manager, 2, watermark)), "it may have been replaced as leader long ago"
    assert manager.facts.is_unclean
    state = PartitionState((2, 1), leader=2, epoch=5, isr=(Member(2, 1),), version=3)
    manager.handle(ev.MetadataChanged(state), NOW)
    assert "Healed" in kinds(from_leader(manager, 2, watermark))
    assert not manager.facts.is_unclean


def test_damage_that_was_truncated_is_reported_no_more() -> None:
    manager, log = following()
    data = tuple(b"%d:5:x" % offset for offset in range(3))
    append = only(fx.Append, from_leader(manager, 2, Data(KEY, 5, 1, 0, 3, 0, 3, data)))
    log.append_replicated(append.batches)
    log.flush()
    manager.handle(ev.Durable(), NOW)
    log.damaged = [2]
    effects = manager.handle(ev.DamageFound(log.damaged_ranges()), NOW)
    flags = [one.message.flags for one in effects if isinstance(one, fx.Send) and isinstance(one.message, Progress)]
    assert flags == [ReplicaFlag.DAMAGED]
    truncate = only(fx.Truncate, from_leader(manager, 2, Rewind(KEY, 5, 1, 2)))
    log.truncate(2)
    effects = manager.handle(ev.Truncated(truncate.token), NOW)
    assert only(fx.SetDamaged, effects).damaged == ()
    state = only(fx.Send, effects).message
    assert isinstance(state, State)
    assert (state.log_end, state.flags) == (2, ReplicaFlag.NONE)


def test_leader_elected_while_its_log_is_emptied_begins_at_the_new_log_start() -> None:
    log = MemoryLog()
    manager = started(1, log=log)
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    follow = only(fx.Follow, from_leader(manager, 2, opening(5)))
    manager.handle(ev.RoleTaken(follow.token), NOW)
    reset = only(fx.ResetLog, from_leader(manager, 2, Reset(KEY, 5, 1, 10)))
    state = PartitionState((1, 2), leader=1, epoch=6, isr=(Member(1, 1), Member(2, 1)), version=1)
    lead = only(fx.Lead, manager.handle(ev.MetadataChanged(state), NOW))
    log.reset(reset.log_start)
    manager.handle(ev.Truncated(reset.token), NOW)
    log.lead(6)
    assert only(fx.SetHighWatermark, manager.handle(ev.RoleTaken(lead.token), NOW)).offset == 10
    opened = only(fx.Send, manager.handle(ev.LinkUp(2, 1, True), NOW)).message
    assert isinstance(opened, Open)
    assert (opened.log_start, opened.high_watermark) == (10, 10)


def test_restarted_follower_learns_from_its_leader_that_the_election_was_unclean() -> None:
    """Otherwise it would take the truncation for a broken promise. The record of a follower in a static cluster has its
    log's newest epoch, which is the leader's, and nothing about how that one was elected."""
    log = MemoryLog()
    log.append_replicated((b"0:4:a", b"1:4:b", b"2:4:c"))
    log.flush()
    log.seen_epoch = 5
    manager = started(1, epoch=5, log=log, high_watermark=3, high_watermark_epoch=4)
    state = PartitionState((1, 2), leader=2, epoch=5, isr=(Member(2, 0),))
    follow = only(fx.Follow, manager.handle(ev.MetadataChanged(state), NOW))
    manager.handle(ev.RoleTaken(follow.token), NOW)
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    from_leader(manager, 2, opening(5, unclean_epoch=5))
    assert only(fx.Truncate, from_leader(manager, 2, Diverging(KEY, 5, 1, 4, 1))).offset == 1


def test_leader_may_change_while_the_log_is_being_cut() -> None:
    log = MemoryLog()
    for epoch in (2, 3, 4):
        log.lead(epoch)
        log.append(f"of epoch {epoch}")
    log.flush()
    log.is_leader = False
    manager = started(1, epoch=4, log=log)
    manager.handle(ev.LinkUp(2, 1, False), NOW)
    manager.handle(ev.LinkUp(3, 1, False), NOW)
    follow = only(fx.Follow, from_leader(manager, 2, opening(5)))
    manager.handle(ev.RoleTaken(follow.token), NOW)
    assert only(fx.Truncate, from_leader(manager, 2, Diverging(KEY, 5, 1, 2, 1))).offset == 1
    log.is_held, log.log_end, log.durable_end = True, 1, 1  # The epochs follow when it is done.
    effects = from_leader(manager, 3, opening(6))
    assert kinds(effects) == ["StopRole", "Follow"]
    assert not manager.facts.quarantine


def test_static_follower_that_lost_its_disk_leaves_the_isr_before_it_is_copied_to() -> None:
    world = World(2, is_static=True)
    world.run(100)
    world.produce(1, "m1")
    world.run(100)
    world.disconnect(2)
    world.nodes[2].crash()
    world.nodes[2].is_unclean = world.nodes[2].log.lose(0)
    world.nodes[2].log.hint = (0, -1)
    world.told.clear()
    world.nodes[2].start()
    world.connect()
    world.run(1_000)
    story = [line.split(": ", 1)[1].split(" ")[0:2] for line in world.told if line.startswith("A: ")]
    change = [["isr", "proposed"], ["isr", "changed"]]
    assert story == [["a", "replica"], ["follower", "accepted"], *change, ["no", "follower"], *change]
    assert world.state.isr_nodes == {1, 2}
    assert not world.nodes[2].is_unclean


def test_restarted_follower_is_not_counted_on_its_old_offset() -> None:
    world = World(2)
    world.elect(1)
    world.run(100)
    world.produce(1, "m1")
    world.run(100)
    session = world.leader().sessions[2]
    assert session.lag.end == 1
    world.disconnect(2)
    assert session.lag.end == 1
    world.nodes[2].crash()
    world.nodes[2].start()
    world.connect()
    assert session.lag.end is None


def test_sync_mode_tells_how_far_enough_followers_are() -> None:
    world = World(3, settings=CoreSettings(mode=Mode.SYNC, sync_followers=2))
    world.elect(1)
    world.run(100)
    world.nodes[3].has_slow_disk = True
    world.produce(1, "m1", acks=1)
    world.run(100)
    assert world.nodes[1].followers_durable == 0
    assert world.leader().replica_durable(1) == 1
    world.nodes[3].has_slow_disk = False
    world.run(100)
    assert world.nodes[1].followers_durable == 1
    assert world.leader().replica_durable(0) == 1


def test_sync_mode_asks_for_no_more_followers_than_there_are() -> None:
    for nodes in (1, 2):
        world = World(nodes, settings=CoreSettings(mode=Mode.SYNC, sync_followers=2))
        world.elect(1)
        world.run(100)
        world.produce(1, "m1", acks=1)
        world.run(100)
        assert world.nodes[1].followers_durable == 1


def test_records_behind_end_membership() -> None:
    world = World(2, settings=CoreSettings(isr_lag_records_max=3))
    world.elect(1)
    world.run(100)
    world.nodes[2].has_slow_disk = True
    for count in range(4):
        world.produce(1, f"m{count}", acks=1)
    world.run(100)
    world.run(2_000)
    assert world.state.isr_nodes == {1}
    world.nodes[2].has_slow_disk = False
    world.run(2_000)
    assert world.state.isr_nodes == {1, 2}


def test_follower_out_of_reach_leaves_with_the_first_record_too_many() -> None:
    world = World(2, settings=CoreSettings(isr_lag_records_max=3, digest_records=0))
    world.elect(1)
    world.run(100)
    world.produce(1, "m0")
    world.run(5_000)
    world.nodes[2].crash()
    for count in range(3):
        world.produce(1, f"m{count}", acks=1)
        world.run(10)
    assert world.state.isr_nodes == {1, 2}
    world.produce(1, "one too many", acks=1)
    world.run(10)
    assert world.state.isr_nodes == {1}, "at once, and not when the time is up that it may be behind"


def test_follower_that_says_nothing_does_not_come_back_on_what_it_said_before() -> None:
    """With too few in sync the high watermark stands still, just where the silent follower was last seen."""
    manager, log = leading()
    members = (Member(1, 1), Member(2, 7))
    state = PartitionState((1, 2), leader=1, epoch=5, isr=members, min_isr=2, version=9)
    manager.handle(ev.MetadataChanged(state), NOW)
    manager.handle(ev.LinkUp(2, 7, True), NOW)
    manager.handle(ev.Received(2, State(KEY, 5, 1, 0, 0, -1, 0, ReplicaFlag.NONE), True), NOW)
    log.append("m1")
    log.flush()
    manager.handle(ev.Appended(), NOW)
    manager.handle(ev.Durable(), NOW)
    late = NOW + 10_001
    propose = only(fx.Propose, manager.handle(ev.Tick(), late))
    assert propose.proposal.isr == members[:1]
    alone = replace(state, isr=members[:1], elr=(2,), version=10)
    effects = manager.handle(ev.ProposalAnswered(propose.token, Outcome(None, alone)), late)
    assert "Propose" not in kinds(effects)
    assert isinstance(only(fx.Send, effects).message, Watermark), "it is asked"
    assert "Propose" not in kinds(manager.handle(ev.Tick(), late + 5_000))
    answer = Progress(KEY, 5, 1, 0, 0, ReplicaFlag.NONE)
    assert only(fx.Propose, manager.handle(ev.Received(2, answer, True), late + 6_000)).proposal.isr == members


def test_idle_leader_and_follower_need_no_clock() -> None:
    world = World(2, settings=CoreSettings(digest_records=0))
    world.elect(1)
    world.run(100)
    world.produce(1, "m1")
    world.run(20_000)
    assert [node.manager.deadline_ms for node in world.nodes.values()] == [NEVER, NEVER]


def test_follower_that_refuses_the_same_data_again_is_not_asked_without_a_pause() -> None:
    world = World(2, settings=CoreSettings(digest_records=0))
    world.elect(1)
    world.run(100)
    node = world.nodes[2]

    def refuse(effect: fx.Append) -> None:
        node.credit -= effect.credit_bytes
        node.later(lambda: node.handle(ev.AppendFailed(effect.token, "no")))

    node._Append = refuse  # type: ignore[method-assign]
    world.produce(1, "m1")
    world.run(2_900)
    assert world.leader().sessions[2].number <= 5
    del node._Append  # type: ignore[method-assign]
    world.run(2_000)
    assert node.log.log_end == 1
