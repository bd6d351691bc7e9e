"""A story made up by dice: faults of every kind, then peace; and what must be true all along and in the end.

The simulator does the same with the real log, real frames and a clock; this one runs in memory, thousands of steps a
second, and finds out about the rules alone.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

from replication.memory_log import Record
from replication.world import World, name
from walstream.cluster.metadata import NO_LEADER, NodeId, Refusal
from walstream.replication import events as ev
from walstream.replication.settings import CoreSettings


class Chance:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        nodes = self.dice.choice((2, 3, 3, 3, 5))
        min_isr = self.dice.randint(1, (nodes + 2) // 2)
        settings = CoreSettings(
            isr_lag_ms_max=2_000,
            isr_lag_records_max=self.dice.choice((0, 0, 20)),
            digest_records=self.dice.choice((0, 4, 100)),
            retry_ms=300,
            digest_pause_ms=200,
        )
        self.is_static = self.dice.random() < 0.25
        self.world = World(nodes, min_isr, settings, is_static=self.is_static)
        self.world.frame_records = self.dice.choice((1, 3, 100))
        self.count = 0
        self.failed: set[NodeId] = set()
        self.seen: dict[int, Record] = {}
        """What a reader has seen, by offset."""
        self.leaders: dict[int, tuple[NodeId, int]] = {}
        self.may_wipe = self.dice.random() < 0.3
        self.may_rot = not self.may_wipe and self.dice.random() < 0.3
        self.loses = self.dice.random() < 0.5

    # ── what must hold ──

    def check(self) -> None:
        world = self.world
        for node in world.nodes.values():
            if not node.is_up:
                continue
            log, manager = node.log, node.manager
            assert 0 <= log.log_start <= log.high_watermark <= log.durable_end <= log.log_end
            assert not manager.facts.quarantine, manager.facts.quarantine
            if not manager.is_leader:
                continue
            life = (node.id, node.incarnation)
            assert self.leaders.setdefault(manager.epoch, life) == life, "two leaders in one epoch"
            for record in log.read(max(log.log_start, log.high_watermark - 30), log.high_watermark):
                assert self.seen.setdefault(record.offset, record) == record, "what a reader saw has changed"

        self.check_members()

    def check_members(self) -> None:
        """Whoever may be elected holds, durably, everything that a reader has seen."""
        state = self.world.state
        last = max(self.seen, default=-1)
        for number in state.isr_nodes | set(state.elr):
            node = self.world.nodes[number]
            if node.is_unclean and (self.is_static or not node.is_up or not self.world.knows(node)):
                continue  # It knows, and nobody elects it before it has told.
            assert node.log.durable_end > last, f"{name(number)} may be elected and lacks {last}"
            for record in node.log.read(max(node.log.log_start, last - 10), last + 1):
                assert self.seen.get(record.offset, record) == record, f"{name(number)} holds another {record.offset}"

    def check_leader_completeness(self, node: NodeId) -> None:
        log = self.world.nodes[node].log
        held = {record.offset: record for record in log.records}
        for offset, record in self.seen.items():
            if offset >= log.log_start:
                assert held.get(offset) == record, f"the leader {name(node)} lacks {record}"

    # ── what may happen ──

    def act(self) -> None:
        world, dice = self.world, self.dice
        nodes = list(world.nodes.values())
        node = dice.choice(nodes)
        what = dice.random()
        if what < 0.25:
            if node.is_up and node.manager.is_leader and not node.log.damaged:
                self.count += 1
                world.produce(node.id, f"m{self.count}", dice.choice((-1, -1, 1)))
        elif what < 0.70:
            for _ in range(dice.choice((1, 1, 5, 40))):
                self.move(dice.choice(nodes).id)
        elif what < 0.80:
            self.pass_time(dice.choice((5, 30, 300, 1_000)))
        elif what < 0.84:
            self.answer()
        elif what < 0.90:
            node.has_slow_disk = not node.has_slow_disk and dice.random() < 0.5
        elif what < 0.92:
            self.crash_or_start(node.id)
        elif what < 0.95:
            self.cut_or_join(node.id, dice.choice(nodes).id)
        elif what < 0.965:
            self.elect()
        elif what < 0.97:
            world.has_metadata = False
            if dice.random() < 0.7:
                world.reach()
        elif what < 0.975:
            self.rot(node.id)
        elif what < 0.98:
            if node.is_up:
                node.fail_log()
                self.failed.add(node.id)
        elif what < 0.985:
            self.reopen()
        elif node.is_up and node.manager.is_leader and dice.random() < 0.3:
            node.log.trim(dice.randint(node.log.log_start, node.log.high_watermark))

    def reopen(self) -> None:
        for node in sorted(self.failed):
            if self.world.nodes[node].is_up:
                self.world.nodes[node].reopen_log()
        self.failed.clear()

    def move(self, node: NodeId) -> None:
        """A message arrives, a task ends or a flush returns."""
        world, dice = self.world, self.dice
        ways = [way for way in sorted(world.wires) if world.wires[way]]
        one = world.nodes[node]
        if ways and dice.random() < 0.7:
            way = dice.choice(ways)
            trick = dice.random()
            if self.loses and trick < 0.02:
                world.wires[way].popleft()
            elif self.loses and trick < 0.04:
                world.wires[way].appendleft(world.wires[way][0])
            elif self.loses and trick < 0.06:
                world.wires[way].rotate(1)
            world.wires[way] and world.deliver_one(*way)
        elif one.is_up and one.sends and dice.random() < 0.5:
            one.sends.popleft()()
        elif one.is_up and not one.has_slow_disk:
            if one.tasks:
                one.tasks.popleft()()
            elif one.log.flush():
                one.handle(ev.Durable())
                one.wake()

    def pass_time(self, ms: int) -> None:
        self.world.now_ms += ms
        for node in self.world.nodes.values():
            node.handle(ev.Tick())

    def answer(self) -> None:
        world = self.world
        if not world.proposals:
            return
        if self.dice.random() < 0.2:
            world.answer_proposal(Refusal.UNKNOWN, is_applied=self.dice.random() < 0.5)
        elif self.dice.random() < 0.1:
            node, effect = world.proposals[0]
            world.answer_proposal(Refusal.UNKNOWN, is_applied=False)
            world.proposals.append((node, effect))  # It comes late.
        else:
            world.answer_proposal()

    def crash_or_start(self, node: NodeId) -> None:
        world, one = self.world, self.world.nodes[node]
        if one.is_up:
            world.disconnect(node)
            one.crash()
            self.failed.discard(node)
            others = world.state.isr_nodes - {node}
            if self.is_static and node == world.state.leader:
                return  # A leader that nobody can replace: what it loses is lost.
            is_safe = others and not world.proposals and not any(world.nodes[other].is_unclean for other in others)
            if self.may_wipe and is_safe and self.dice.random() < 0.3:
                one.is_unclean = True
                one.log.lose(self.dice.randint(one.log.log_start, one.log.log_end))
            return
        one.start()
        world.connect()

    def cut_or_join(self, one: NodeId, other: NodeId) -> None:
        if one == other:
            return
        pair = frozenset((one, other))
        if pair in self.world.cuts:
            self.world.cuts.discard(pair)
            self.world.connect()
        else:
            if self.dice.random() < 0.5:
                self.world.cuts.add(pair)
            self.world.disconnect(one, other)
            self.world.connect()

    def elect(self) -> None:
        before = self.world.state
        if self.is_static:
            return
        if self.world.elect(self.dice.choice(list(self.world.nodes))) and before.leader != NO_LEADER:
            self.check_leader_completeness(self.world.state.leader)

    def rot(self, node: NodeId) -> None:
        one = self.world.nodes[node]
        sound = all(not other.log.damaged for other in self.world.nodes.values())
        if self.may_rot and one.is_up and sound and one.log.log_start < one.log.high_watermark:
            offset = self.dice.randrange(one.log.log_start, one.log.high_watermark)
            others = [other for other in self.world.nodes.values() if other is not one]
            if not any(other.log.log_start <= offset < other.log.high_watermark for other in others):
                return  # Nobody could repair it.
            one.log.damaged.append(offset)
            one.handle(ev.DamageFound(((offset, offset + 1),)))

    def resignations(self) -> None:
        resigned, self.world.resigned = self.world.resigned, []
        for node, epoch in resigned:
            state = self.world.state
            if (state.leader, state.epoch) != (node, epoch) or self.dice.random() < 0.2:
                continue  # Too late, or lost.
            if self.is_static:
                self.world.change(replace(state, epoch=epoch + 1, version=state.version + 1))
            else:
                self.world.elect(resigned=node)

    # ── the story ──

    def play(self, steps: int) -> None:
        self.elect()
        for _ in range(steps):
            self.act()
            self.resignations()
            self.check()
        self.peace()

    def peace(self) -> None:
        """No more faults: everybody must come to agree, and writes must go through."""
        world = self.world
        world.cuts.clear()
        for node in world.nodes.values():
            node.has_slow_disk = False
            if not node.is_up:
                node.start()
        world.reach()
        self.reopen()
        world.connect()
        for _ in range(10):
            self.resignations()
            if world.state.leader == NO_LEADER and not self.is_static:
                world.elect()
            world.run(1_000)
            self.check()
        world.produce(world.state.leader, "last")
        world.run(20_000)
        self.check()
        self.check_leader_completeness(world.state.leader)
        self.agree()

    def agree(self) -> None:
        world = self.world
        leader = world.nodes[world.state.leader]
        assert world.state.isr_nodes == set(world.nodes), world.state
        for node in world.nodes.values():
            start = max(node.log.log_start, leader.log.log_start)
            assert node.log.read(start, 1 << 60) == leader.log.read(start, 1 << 60), name(node.id)
            assert node.log.high_watermark == leader.log.log_end == node.log.log_end, name(node.id)
            assert not node.log.damaged
            assert not node.waiters
            assert not node.tasks
            assert not node.sends
        assert all(not wire for wire in world.wires.values())
        assert isinstance(world.proposals, deque)
        assert not world.proposals
