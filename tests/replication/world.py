"""A few nodes with the real core each, over logs, links, disks and a metadata service in memory, driven by hand.

Everything that happens later is a task of its node or a message on a link, and happens when the story says so (`run`,
`deliver`). What is worth telling is written to `told`, in the order in which it happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

from replication.memory_log import MemoryLog
from walstream.cluster.metadata import (
    NO_LEADER,
    IsrProposal,
    Member,
    NodeId,
    Outcome,
    PartitionState,
    Refusal,
    granted,
    without,
)
from walstream.replication import effects as fx
from walstream.replication import events as ev
from walstream.replication.context import NEVER
from walstream.replication.elections import elect
from walstream.replication.leader import Leader
from walstream.replication.manager import Manager
from walstream.replication.messages import Data, PartitionMessage
from walstream.replication.settings import CoreSettings

KEY = (UUID(int=7), 0)
Link = tuple[NodeId, NodeId]
"""Who connected, and to whom."""


def name(node: NodeId) -> str:
    return chr(ord("A") + node - 1) if node > 0 else "nobody"


def number(letter: str) -> NodeId:
    return ord(letter) - ord("A") + 1


class Node:
    def __init__(self, world: World, node: NodeId) -> None:
        self.world = world
        self.id = node
        self.log = MemoryLog()
        self.incarnation = 0
        self.is_up = False
        self.is_unclean = False
        self.has_slow_disk = False
        self.tasks: deque[Callable[[], None]] = deque()
        """What the disk has to do."""
        self.sends: deque[Callable[[], None]] = deque()
        """What the links have to do."""
        self.waiters: list[tuple[int, bool, str]] = []
        self.followers_durable = 0
        self.credit = 0
        """Bytes of DATA that came and were neither appended nor returned: must be 0 when nothing is being handled."""
        self.manager = self._new()

    def _new(self) -> Manager:
        return Manager(KEY, Member(self.id, self.incarnation), self.log, self.world.settings)

    def start(self) -> None:
        self.incarnation += 1
        self.is_up = True
        self.manager = self._new()
        epoch, hint = self.log.seen_epoch, self.log.hint
        self.handle(ev.Started(epoch, *hint, self.is_unclean, self.log.damaged_ranges()))
        self.world.register(self)

    def fail_log(self) -> None:
        """The log takes no more writes; what was not flushed is lost when it is opened again."""
        self.tasks.clear()
        self.log.crash()
        self.waiters.clear()
        self.handle(ev.LogFailed())

    def reopen_log(self) -> None:
        self.handle(ev.Started(self.log.seen_epoch, *self.log.hint, self.is_unclean, self.log.damaged_ranges()))

    def crash(self) -> None:
        self.is_up = False
        self.tasks.clear()
        self.sends.clear()
        self.waiters.clear()
        self.log.crash()

    def tell(self, text: str) -> None:
        self.world.told.append(f"{name(self.id)}: {text}")

    # ── events and effects ──

    def handle(self, event: ev.Event) -> None:
        if not self.is_up:
            return
        if isinstance(event, ev.Received) and isinstance(event.message, Data):
            self.credit += sum(map(len, event.message.batches))
        for effect in self.manager.handle(event, self.world.now_ms):
            self.world.effects.append((self.id, effect))
            getattr(self, f"_{type(effect).__name__}")(effect)
        assert self.credit == 0, "credit of data is lost, or given twice"
        role = self.manager.role
        assert role is None or self.manager.deadline_ms <= role.deadline_ms, "a timer would be late"
        if isinstance(role, Leader) and role.is_ready:
            assert role.high_watermark <= self.log.durable_end

    def later(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def _Send(self, effect: fx.Send) -> None:
        link = (self.id, effect.peer) if effect.is_outgoing else (effect.peer, self.id)
        self.world.post(link, self.id, effect.message)

    def _SendData(self, effect: fx.SendData) -> None:
        def send() -> None:
            link = (self.id, effect.peer)
            if link not in self.world.links:
                return
            if effect.offset in self.log.damaged:
                self.handle(ev.DamageFound(((effect.offset, effect.offset + 1),)))
                self.handle(ev.SendFailed(effect.token, effect.peer, effect.session, effect.offset))
                return
            if effect.offset < self.log.log_start:
                self.handle(ev.SendFailed(effect.token, effect.peer, effect.session, effect.offset))
                return
            records = self.log.read(effect.offset, effect.offset + self.world.frame_records)
            sound = [one for one in records if not any(bad <= one.offset for bad in self.log.damaged)] or records[:1]
            hw, start, end = self.log.high_watermark, self.log.log_start, sound[-1].offset + 1
            batches = tuple(record.encode() for record in sound)
            data = Data(KEY, effect.epoch, effect.session, hw, start, effect.offset, end, batches)
            self.world.post(link, self.id, data)
            size = sum(map(len, batches))
            self.handle(ev.DataSent(effect.token, effect.peer, effect.session, effect.offset, end, size, hw))

        self.sends.append(send)

    def _ReturnCredit(self, effect: fx.ReturnCredit) -> None:
        self.credit -= effect.bytes_count

    def _Lead(self, effect: fx.Lead) -> None:
        def lead() -> None:
            if effect.token == self.manager._ctx.token:
                if self.log.flush():
                    self.handle(ev.Durable())
                self.log.lead(effect.epoch)
            self.handle(ev.RoleTaken(effect.token))

        self.later(lead)

    def _Follow(self, effect: fx.Follow) -> None:
        self.log.is_leader = False

        def follow() -> None:
            self.log.seen_epoch = max(self.log.seen_epoch, effect.epoch)
            self.handle(ev.RoleTaken(effect.token))

        self.later(follow)

    def _StopRole(self, effect: fx.StopRole) -> None:
        self.sends.clear()
        self.log.is_leader = False

    def _Append(self, effect: fx.Append) -> None:
        self.credit -= effect.credit_bytes
        self.log.append_replicated(effect.batches)
        assert self.log.log_end == effect.next_offset

    def _Truncate(self, effect: fx.Truncate) -> None:
        def cut() -> None:
            self.log.truncate(effect.offset)
            self.handle(ev.Truncated(effect.token))

        self.later(cut)

    def _ResetLog(self, effect: fx.ResetLog) -> None:
        def reset() -> None:
            self.log.reset(effect.log_start)
            self.handle(ev.Truncated(effect.token))

        self.later(reset)

    def _TrimLog(self, effect: fx.TrimLog) -> None:
        self.log.trim(effect.log_start)

    def _SetHighWatermark(self, effect: fx.SetHighWatermark) -> None:
        assert effect.offset <= self.log.durable_end
        assert effect.offset >= self.log.high_watermark
        self.log.high_watermark = effect.offset
        self.log.hint = (effect.offset, effect.epoch)
        self.wake()

    def _SetFollowersDurable(self, effect: fx.SetFollowersDurable) -> None:
        self.followers_durable = effect.offset

    def wake(self) -> None:
        for offset, is_all, text in tuple(self.waiters):
            if offset < (self.log.high_watermark if is_all else self.log.durable_end):
                self.waiters.remove((offset, is_all, text))
                self.tell(f"{text} acknowledged, acks={'all' if is_all else 1}")

    def _FailWaiters(self, effect: fx.FailWaiters) -> None:
        for waiter in tuple(self.waiters):
            if effect.why is fx.Failing.NOT_LEADER or waiter[1]:
                self.waiters.remove(waiter)
                self.tell(f"{waiter[2]} failed: {effect.why.value}")

    def _ComputeDigest(self, effect: fx.ComputeDigest) -> None:
        def compute() -> None:
            found = {one for one in self.log.rotten if effect.start <= one < effect.end and effect.is_verified}
            if found:
                self.log.rotten -= found
                self.log.damaged += sorted(found)
                self.handle(ev.DamageFound(self.log.damaged_ranges()))
            digest = self.log.digest(effect.start, effect.end)
            self.handle(ev.DigestComputed(effect.token, effect.request, digest))

        self.later(compute)

    def _ReadForRepair(self, effect: fx.ReadForRepair) -> None:
        def read() -> None:
            records = [one for one in self.log.read(effect.start, effect.end) if one.offset not in self.log.damaged]
            end = records[-1].offset + 1 if records else effect.start
            batches = tuple(record.encode() for record in records)
            self.handle(ev.RangeRead(effect.token, effect.peer, effect.request, effect.start, end, batches))

        self.later(read)

    def _InstallRepair(self, effect: fx.InstallRepair) -> None:
        def install() -> None:
            self.log.damaged = [one for one in self.log.damaged if not effect.start <= one < effect.next_offset]
            self.handle(ev.RepairDone(effect.token, self.log.damaged_ranges()))

        self.later(install)

    def _Propose(self, effect: fx.Propose) -> None:
        self.world.proposals.append((self.id, effect))

    def _RefreshMetadata(self, effect: fx.RefreshMetadata) -> None:
        if self.id not in self.world.strangers and self.world.knows(self):
            self.later(lambda: self.handle(ev.MetadataChanged(self.world.record_for(self))))

    def _Resign(self, effect: fx.Resign) -> None:
        self.tell(f"resigns: {effect.reason}")
        self.world.resigned.append((self.id, effect.epoch))

    def _Quarantine(self, effect: fx.Quarantine) -> None:
        self.tell(f"QUARANTINE: {effect.reason}")

    def _Healed(self, effect: fx.Healed) -> None:
        self.is_unclean = False

    def _Report(self, effect: fx.Report) -> None:
        fields = " ".join(f"{key}={_readable(key, value)}" for key, value in effect.fields)
        self.tell(f"{effect.phrase} {fields}".rstrip())

    def _SetDamaged(self, effect: fx.SetDamaged) -> None:
        pass


def _readable(key: str, value: int | str) -> int | str:
    if key in ("leader", "follower", "one", "other", "before", "after", "unfit", "eligible") and value != "":
        return ",".join(name(int(node)) for node in str(value).split(","))
    return value


class World:
    def __init__(
        self, nodes: int, min_isr: int = 1, settings: CoreSettings | None = None, *, is_static: bool = False
    ) -> None:
        self.settings = settings or CoreSettings()
        self.now_ms = 0
        self.is_static = is_static
        """A always leads, keeps the record itself, and nobody else is told of it."""
        self.told: list[str] = []
        self.effects: list[tuple[NodeId, fx.Effect]] = []
        self.frame_records = 100
        self.links: dict[Link, int] = {}
        self.wires: dict[tuple[Link, NodeId], deque[PartitionMessage]] = {}
        """Messages under way, by link and sender."""
        self.cuts: set[frozenset[NodeId]] = set()
        self.proposals: deque[tuple[NodeId, fx.Propose]] = deque()
        self.resigned: list[tuple[NodeId, int]] = []
        self.has_metadata = True
        self.strangers: set[NodeId] = set()
        """Nodes that the metadata service does not reach."""
        self.lives: dict[NodeId, int] = {}
        """Which life of each node the service knows of. It is told nothing in another one, and not elected."""
        replicas = tuple(range(1, nodes + 1))
        isr = tuple(Member(node, 1) for node in replicas)
        leader = 1 if is_static else NO_LEADER
        self.state = PartitionState(replicas, leader, isr=isr, min_isr=min_isr)
        self.nodes = {node: Node(self, node) for node in replicas}
        for node in self.nodes.values():
            node.start()
        self.connect()

    # ── links ──

    def connect(self) -> None:
        for one in self.nodes:
            for other in self.nodes:
                able = self.nodes[one].is_up and self.nodes[other].is_up and frozenset((one, other)) not in self.cuts
                if one != other and able and (one, other) not in self.links:
                    self.links[one, other] = 1
                    self.nodes[one].handle(ev.LinkUp(other, self.nodes[other].incarnation, True))
                    self.nodes[other].handle(ev.LinkUp(one, self.nodes[one].incarnation, False))

    def disconnect(self, one: NodeId, other: NodeId | None = None) -> None:
        for link in sorted(self.links):
            if one in link and (other is None or other in link):
                del self.links[link]
                for sender in link:
                    self.wires.pop((link, sender), None)
                self.nodes[link[0]].handle(ev.LinkDown(link[1], True))
                self.nodes[link[1]].handle(ev.LinkDown(link[0], False))

    def post(self, link: Link, sender: NodeId, message: PartitionMessage) -> None:
        if link in self.links:
            self.wires.setdefault((link, sender), deque()).append(message)

    def deliver_one(self, link: Link, sender: NodeId) -> None:
        message = self.wires[link, sender].popleft()
        receiver = link[1] if sender == link[0] else link[0]
        self.nodes[receiver].handle(ev.Received(sender, message, receiver == link[0]))

    # ── metadata ──

    def register(self, node: Node) -> None:
        """A node tells the service that it is there, and whether it has lost anything, as soon as it is heard."""
        if not node.is_up or self.knows(node):
            return
        if self.is_static:
            self.lives[node.id] = node.incarnation
            if node.id == self.state.leader:
                epoch = max(self.state.epoch, node.log.seen_epoch) + 1
                self.change(replace(self.state, epoch=epoch, version=self.state.version + 1))
        elif self.has_metadata and node.id not in self.strangers:
            self.lives[node.id] = node.incarnation
            if node.is_unclean:
                self.change(without(self.state, node.id))
        if self.knows(node):
            node.handle(ev.MetadataChanged(self.record_for(node)))

    def knows(self, node: Node) -> bool:
        """Whether the service has heard of the node's present life."""
        return self.lives.get(node.id) == node.incarnation

    def reach(self, *nodes: NodeId) -> None:
        """The service answers (these) nodes again: it hears who has started since, and tells what it knows."""
        self.has_metadata = True
        self.strangers -= set(nodes)
        for node in self.nodes.values():
            self.register(node)
        self.change(self.state)

    def record_for(self, node: Node) -> PartitionState:
        """What a node is told at its start: in a static cluster followers know only who is meant to lead."""
        if not self.is_static or node.id == self.state.leader:
            return self.state
        leader = self.state.leader
        return PartitionState(self.state.replicas, leader, node.log.seen_epoch, (Member(leader, 0),))

    def change(self, state: PartitionState) -> None:
        self.state = state
        for node in self.nodes.values():
            if self.is_static and node.id != state.leader:
                continue
            if self.has_metadata and node.id not in self.strangers and self.knows(node):
                node.handle(ev.MetadataChanged(state))

    def answer_proposal(self, refusal: Refusal | None = None, *, is_applied: bool = True) -> None:
        node, effect = self.proposals.popleft()
        if node in self.strangers:
            refusal, is_applied = Refusal.UNKNOWN, False
        outcome = self._judge(effect.proposal, is_applied=is_applied)
        self.nodes[node].handle(ev.ProposalAnswered(effect.token, Outcome(refusal, None) if refusal else outcome))

    def _judge(self, proposal: IsrProposal, *, is_applied: bool) -> Outcome:
        lives = (lambda _: None) if self.is_static else self.lives.get
        outcome = granted(self.state, proposal, lives)
        if outcome.refusal is None and outcome.state is not None and is_applied:
            self.change(outcome.state)
        return outcome

    def elect(self, preferred: NodeId = NO_LEADER, *, unclean: bool = False, resigned: NodeId = NO_LEADER) -> bool:
        alive = {node.id: node.incarnation for node in self.nodes.values() if node.is_up and self.knows(node)}
        damaged = [node.id for node in self.nodes.values() if node.log.damaged]
        elected = elect(
            self.state, alive, damaged=damaged, preferred=preferred, resigned=resigned, is_unclean_allowed=unclean
        )
        if elected is not None:
            self.change(elected)
        return elected is not None

    # ── running ──

    def step(self) -> bool:
        """Do one of each thing that can happen; tell whether anything did."""
        happened = False
        for node in self.nodes.values():
            if not node.is_up:
                continue
            if node.sends:
                node.sends.popleft()()
                happened = True
            if node.tasks and not node.has_slow_disk:
                node.tasks.popleft()()
                happened = True
            if not node.has_slow_disk and node.is_up and node.log.flush():
                node.handle(ev.Durable())
                node.wake()
                happened = True
        for link, sender in sorted(self.wires):
            if self.wires.get((link, sender)):
                self.deliver_one(link, sender)
                happened = True
        if self.proposals and self.has_metadata:
            self.answer_proposal()
            happened = True
        return happened

    def settle(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("it does not come to rest")

    def run(self, ms: int = 0) -> None:
        """Let everything happen, and time pass."""
        until = self.now_ms + ms
        self.settle()
        while True:
            due = min((node.manager.deadline_ms for node in self.nodes.values() if node.is_up), default=NEVER)
            if due > until:
                break
            self.now_ms = max(self.now_ms, due)
            for node in self.nodes.values():
                node.handle(ev.Tick())
            self.settle()
        self.now_ms = until

    def produce(self, node: NodeId, text: str, acks: int = -1) -> None:
        one = self.nodes[node]
        offset = one.log.append(text)
        if acks:
            one.waiters.append((offset, acks < 0, text))
        one.handle(ev.Appended())

    def leader(self) -> Leader:
        role = self.nodes[self.state.leader].manager.role
        assert isinstance(role, Leader)
        return role
