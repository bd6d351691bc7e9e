"""One partition on one node: which role it has, and how it goes from one to the other.

Owns the role and the facts that outlive it. `handle` takes an event and the time and returns effects, in the order in
which they are to be done; `deadline_ms` says when a `Tick` is due (it may be early, never late). Knows no clock, disk,
network or dice: the driver of a node and the simulator run the same code.

A role change is atomic. The old role ends (who waits is told, its sessions are over), the generation is raised, so that
everything it had begun completes in vain, and only then the new role begins: with `Lead` or `Follow`, which make the
epoch durable before anything is said or appended in it.

Which role it is to be is said by the cluster's record or, where a follower has none or an old one, by the leader: an
OPEN of a newer epoch is as good as a record, because only an elected leader has a newer epoch. A leader that hears of a
newer epoch ends at once. Nobody leads in an epoch that this replica had already persisted before: that was another
life, or another state of this log, and it may have sent bytes that it has lost since.
"""

from __future__ import annotations

from dataclasses import replace

from walstream.cluster.metadata import (
    NO_LEADER,
    Member,
    NodeId,
    PartitionKey,
    PartitionState,
)
from walstream.replication.context import NEVER, RECOMPUTE, Context, Facts
from walstream.replication.effects import (
    Effect,
    Healed,
    Lead,
    Quarantine,
    RefreshMetadata,
    ReturnCredit,
    StopRole,
)
from walstream.replication.elections import unable_to_lead
from walstream.replication.events import (
    Appended,
    AppendFailed,
    DamageFound,
    DataSent,
    DigestComputed,
    Durable,
    Event,
    LinkDown,
    LinkUp,
    LogFailed,
    LogView,
    MetadataChanged,
    ProposalAnswered,
    QuarantineLifted,
    RangeRead,
    Received,
    RepairDone,
    RoleFailed,
    RoleTaken,
    SendFailed,
    Started,
    Tick,
    Truncated,
)
from walstream.replication.follower import Follower
from walstream.replication.leader import Leader
from walstream.replication.messages import Data, Open, PartitionMessage, Progress, Refused, Why
from walstream.replication.resignation import Resignation
from walstream.replication.settings import CoreSettings
from walstream.replication.validation import violations

OFFLINE = "the log takes no writes"


class Manager:
    """The core of one partition."""

    def __init__(self, key: PartitionKey, me: Member, log: LogView, settings: CoreSettings) -> None:
        self._ctx = Context(key, me, log, settings)
        self.role: Leader | Follower | None = None
        self.state: PartitionState | None = None
        """The cluster's record as last told."""
        self.deadline_ms = NEVER
        """When the next `Tick` is due; `NEVER` if none is."""
        self._resignation = Resignation(self._ctx)
        self._is_open = False
        self._has_failed = False
        self._heard_epoch = -1
        """The newest epoch that anybody spoke of, persisted here or not."""

    # ── what others ask ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_leader(self) -> bool:
        """Whether this node leads the partition and may take appends."""
        return isinstance(self.role, Leader) and self.role.is_ready

    @property
    def facts(self) -> Facts:
        """What the replica knows of itself."""
        return self._ctx.facts

    @property
    def epoch(self) -> int:
        """The epoch of the role, or the newest one that is persisted."""
        return self.role.epoch if self.role is not None else self._ctx.facts.epoch

    @property
    def known_epoch(self) -> int:
        """The newest epoch this replica goes by; an older leader is fenced."""
        return max(self._ctx.facts.epoch, self._heard_epoch, self.role.epoch if self.role is not None else -1)

    @property
    def _unled_epoch(self) -> int | None:
        """The epoch that the record says this node leads in, and it does not."""
        state, role = self.state, self.role
        if state is None or state.leader != self._ctx.me.node or state.epoch < self.known_epoch:
            return None
        return None if isinstance(role, Leader) and role.epoch == state.epoch else state.epoch

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event, and return what is to be done."""
        if self._handle_often(event, now_ms):
            # Timers were set, or ended early: the deadline is right, or too early once.
            if RECOMPUTE < self._ctx.wake_ms < self.deadline_ms:
                self.deadline_ms = self._ctx.wake_ms
        else:
            self._handle_seldom(event, now_ms)
            self._ctx.wake_ms = RECOMPUTE
        if self._ctx.wake_ms == RECOMPUTE:
            self._ctx.wake_ms = NEVER
            due = self.role.deadline_ms if self.role is not None else NEVER
            self.deadline_ms = min(due, self._resignation.deadline_ms)
        return self._ctx.take()

    def _handle_often(self, event: Event, now_ms: int) -> bool:
        """Take an event of the kind that comes with every frame or flush; tell whether it was one."""
        role = self.role
        if isinstance(event, Received):
            message = event.message
            if not isinstance(message, Progress | Data):
                return False
            self._received(event.peer, message, event.is_outgoing, now_ms)
        elif isinstance(event, DataSent):
            if event.token == self._ctx.token and isinstance(role, Leader):
                role.sent(event, now_ms)
        elif isinstance(event, Appended):
            if isinstance(role, Leader):
                role.appended(now_ms)
        elif isinstance(event, Durable):
            if role is not None:
                role.durable(now_ms)
        else:
            return False
        return True

    def _handle_seldom(self, event: Event, now_ms: int) -> None:
        match event:
            case Received():
                self._received(event.peer, event.message, event.is_outgoing, now_ms)
            case Tick():
                if self.role is not None:
                    self.role.tick(now_ms)
                self._resignation.tick(self._unled_epoch, now_ms)
            case LinkUp() | LinkDown():
                self._link_changed(event, now_ms)
            case Started():
                self._started(event, now_ms)
            case MetadataChanged():
                self._metadata_changed(event.state, now_ms)
            case LogFailed():
                self._log_failed(now_ms)
            case DamageFound():
                self._damaged(event.damaged, now_ms)
            case QuarantineLifted():
                self._lifted(now_ms)
            case _:
                self._completed(event, now_ms)

    def become_leader(self, epoch: int, replicas: tuple[NodeId, ...], now_ms: int) -> list[Effect]:
        """Lead from now on; the ISR is the last one known, or all replicas."""
        known = self.state or PartitionState(replicas, isr=tuple(Member(node, -1) for node in sorted(replicas)))
        state = replace(known, replicas=replicas, leader=self._ctx.me.node, epoch=epoch, version=known.version + 1)
        return self.handle(MetadataChanged(state), now_ms)

    def become_follower(self, leader: NodeId, epoch: int, now_ms: int) -> list[Effect]:
        """Follow from now on."""
        known = self.state or PartitionState((leader, self._ctx.me.node), isr=(Member(leader, -1),))
        return self.handle(
            MetadataChanged(replace(known, leader=leader, epoch=epoch, version=known.version + 1)), now_ms
        )

    # ── the replica ──────────────────────────────────────────────────────────────────────────────────────────────

    def _started(self, event: Started, now_ms: int) -> None:
        ctx, log = self._ctx, self._ctx.log
        self._end_role()
        self._is_open = True
        facts = ctx.facts
        quarantine = facts.quarantine
        ctx.facts = facts = Facts(
            epoch=max(event.epoch, log.epochs.last_epoch, facts.epoch),
            high_watermark=max(min(event.high_watermark, log.log_end), log.log_start),
            high_watermark_epoch=event.high_watermark_epoch,
            # What was visible once was durable here: a log that ends before it has lost something.
            is_unclean=event.is_unclean or event.high_watermark > log.log_end,
            quarantine=quarantine,
        )
        ctx.set_damaged(event.damaged)
        self._validate()
        if self.state is not None:
            self._apply(self.state, now_ms)

    def _validate(self) -> bool:
        """Quarantine a replica whose state cannot be."""
        found = violations(self._ctx.log, known_epoch=self.known_epoch)
        if found and not self._ctx.facts.quarantine:
            self._ctx.facts.quarantine = " ".join(found)
            self._ctx.out.append(Quarantine(self._ctx.facts.quarantine))
        return not self._ctx.facts.quarantine

    def _log_failed(self, now_ms: int) -> None:
        self._is_open, self._has_failed = False, True
        role = self.role
        self._end_role()
        if isinstance(role, Leader):
            # What it sent may be lost here: the log that is opened next is another one, and needs another epoch.
            self._resignation.say(role.epoch, OFFLINE, now_ms)
        elif isinstance(role, Follower) and role.session:
            self._refuse(role.leader, role.epoch, role.session, Why.NOT_READY)

    def _damaged(self, damaged: tuple[tuple[int, int], ...], now_ms: int) -> None:
        before = self._ctx.facts.damaged
        self._ctx.set_damaged(before + damaged)
        if self._ctx.facts.damaged == before:
            return
        self._ctx.report("damage found", is_warning=True, ranges=str(self._ctx.facts.damaged))
        self._damage_changed(now_ms)

    def _damage_changed(self, now_ms: int) -> None:
        if isinstance(self.role, Follower):
            self.role.damage_changed(now_ms)
        elif isinstance(self.role, Leader):
            self.role.go_on(now_ms)

    def _lifted(self, now_ms: int) -> None:
        facts = self._ctx.facts
        if not facts.quarantine:
            return
        facts.quarantine = ""
        # Whatever was promised is given up, by somebody who may.
        facts.high_watermark_epoch = -2
        facts.is_unclean = True
        self._end_role()
        if self.state is not None:
            self._apply(self.state, now_ms)

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _link_changed(self, event: LinkUp | LinkDown, now_ms: int) -> None:
        links = self._ctx.outgoing if event.is_outgoing else self._ctx.incoming
        is_known = links.pop(event.peer, None) is not None
        role = self.role
        if is_known:
            if isinstance(role, Leader) and event.is_outgoing:
                role.link_down(event.peer, now_ms)
            elif isinstance(role, Follower) and not event.is_outgoing and role.leader == event.peer:
                role.link_down()
        if isinstance(event, LinkUp):
            links[event.peer] = event.incarnation
            if isinstance(role, Leader) and event.is_outgoing:
                role.link_up(event.peer, now_ms)

    def _received(self, peer: NodeId, message: PartitionMessage, is_outgoing: bool, now_ms: int) -> None:
        role = self.role
        if isinstance(message, Refused) and message.why is Why.FENCED and message.known_epoch > self.known_epoch:
            self._fenced(message.known_epoch)
        elif is_outgoing:
            if isinstance(role, Leader) and message.epoch == role.epoch:
                role.received(peer, message, now_ms)  # type: ignore[arg-type]
        elif isinstance(message, Open):
            self._opened(peer, message)
        elif isinstance(role, Follower) and message.epoch == role.epoch and peer == role.leader:
            role.received(message, now_ms)  # type: ignore[arg-type]
        else:
            self._dropped(peer, message)

    def _dropped(self, peer: NodeId, message: PartitionMessage) -> None:
        """A leader speaks that this node does not follow: an old one is told so, its data is not kept."""
        if isinstance(message, Data):
            self._ctx.out.append(ReturnCredit(peer, sum(map(len, message.batches))))
        if message.epoch < self.known_epoch and not isinstance(message, Refused):
            self._refuse(peer, message.epoch, message.session, Why.FENCED)

    def _refuse(self, peer: NodeId, epoch: int, session: int, why: Why) -> None:
        refusal = Refused(self._ctx.key, epoch, session, why, self.known_epoch)
        self._ctx.send(peer, refusal, is_outgoing=False)

    def _opened(self, peer: NodeId, message: Open) -> None:
        role, known = self.role, self.known_epoch
        if message.epoch < known:
            self._refuse(peer, message.epoch, message.session, Why.FENCED)
        elif not self._is_open:
            self._refuse(peer, message.epoch, message.session, Why.NOT_READY)
        elif self._ctx.facts.quarantine:
            self._refuse(peer, message.epoch, message.session, Why.QUARANTINED)
        elif role is not None and message.epoch == role.epoch and role.leader not in (peer, NO_LEADER):
            self._ctx.report("two leaders in one epoch", is_warning=True, epoch=role.epoch, one=role.leader, other=peer)
            self._refuse(peer, message.epoch, message.session, Why.SAME_EPOCH)
        else:
            if role is None or message.epoch > role.epoch or role.leader != peer:
                role = self._follow(peer, message.epoch, message.unclean_epoch)
            if isinstance(role, Follower) and not self._ctx.facts.quarantine:
                role.opened(message)

    # ── the record ───────────────────────────────────────────────────────────────────────────────────────────────

    def _metadata_changed(self, state: PartitionState, now_ms: int) -> None:
        if self.state is not None and (state.epoch, state.version) < (self.state.epoch, self.state.version):
            return
        self.state = state
        self._ctx.has_record = True
        if self._is_open:
            self._apply(state, now_ms)
        elif self._has_failed and state.leader == self._ctx.me.node and self._resignation.deadline_ms == NEVER:
            self._resignation.say(state.epoch, OFFLINE, now_ms)

    def _apply(self, state: PartitionState, now_ms: int) -> None:
        """Take the role that the record gives, unless it is older than what is known already."""
        role, me = self.role, self._ctx.me.node
        if state.epoch < self.known_epoch:
            return
        if self._ctx.facts.quarantine:
            if state.leader == me and self._resignation.deadline_ms == NEVER:
                self._resignation.say(state.epoch, "this replica is in quarantine", now_ms)
            return
        if state.leader == me:
            if isinstance(role, Leader) and role.epoch == state.epoch:
                role.update(state, now_ms)
            else:
                self._lead(state, now_ms)
        elif role is None or role.epoch < state.epoch or role.leader not in (state.leader, NO_LEADER):
            self._follow(state.leader, state.epoch, state.unclean_epoch)
        elif isinstance(role, Follower):
            role.leader = state.leader
            role.unclean_epoch = max(role.unclean_epoch, state.unclean_epoch)

    def _lead(self, state: PartitionState, now_ms: int) -> None:
        facts = self._ctx.facts
        refusal = unable_to_lead(state, self._ctx.me, known_epoch=facts.epoch, is_unclean=facts.is_unclean)
        self._end_role()
        if refusal:
            self._ctx.report("leadership declined", is_warning=True, epoch=state.epoch, why=refusal)
            self._resignation.say(state.epoch, refusal, now_ms)
            return
        if not self._validate():
            return
        if facts.is_unclean:
            facts.is_unclean = False  # Elected in spite of it: this copy is the truth from now on.
            self._ctx.out.append(Healed())
        self._heard_epoch = max(self._heard_epoch, state.epoch)  # The log may note it before it is durable.
        self.role = Leader(self._ctx, state, now_ms)
        self._ctx.out.append(Lead(self._ctx.token, state.epoch))

    def _follow(self, leader: NodeId, epoch: int, unclean_epoch: int) -> Follower:
        self._end_role()
        self._validate()
        self._heard_epoch = max(self._heard_epoch, epoch)
        follower = Follower(self._ctx, leader, epoch, unclean_epoch)
        self.role = follower
        return follower

    def _fenced(self, epoch: int) -> None:
        """Somebody knows a newer epoch: a leader ends at once; who leads now is the record's to say."""
        self._heard_epoch = max(self._heard_epoch, epoch)
        if isinstance(self.role, Leader):
            self._ctx.report("leader fenced", is_warning=True, epoch=self.role.epoch, by=epoch)
            self._end_role()
        self._ctx.out.append(RefreshMetadata(epoch))

    def _end_role(self) -> None:
        """End the role, if there is one; what it began completes in vain."""
        role = self.role
        if role is None:
            return
        self.role = None
        role.stop()
        self._ctx.next_generation()
        self._ctx.out.append(StopRole(self._ctx.token))

    # ── completions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _completed(self, event: Event, now_ms: int) -> None:
        role = self.role
        if isinstance(event, RepairDone):
            # Whoever asked for it, this is what the log says of itself now.
            before = self._ctx.facts.damaged
            self._ctx.set_damaged(event.damaged)
            if role is not None and event.token == self._ctx.token:
                role.repair_done(now_ms, has_helped=self._ctx.facts.damaged != before)
            if self._ctx.facts.damaged != before:
                self._damage_changed(now_ms)
            return
        if role is None or getattr(event, "token", None) != self._ctx.token:
            return
        match event:
            case RoleTaken():
                self._role_taken(role, now_ms)
            case RoleFailed():
                self._role_failed(role, event.reason, now_ms)
            case DigestComputed() if isinstance(role, Leader):
                role.digest_computed(event, now_ms)
            case DigestComputed() if isinstance(role, Follower):
                role.digest_computed(event)
            case RangeRead():
                role.range_read(event)
            case Truncated() if isinstance(role, Follower):
                role.truncated()
            case AppendFailed() if isinstance(role, Follower):
                role.append_failed(event.reason)
            case ProposalAnswered() if isinstance(role, Leader):
                role.proposal_answered(event, now_ms)
            case SendFailed() if isinstance(role, Leader):
                if reason := role.send_failed(event, now_ms):
                    self._resignation.say(role.epoch, reason, now_ms)

    def _role_failed(self, role: Leader | Follower, reason: str, now_ms: int) -> None:
        self._ctx.report("role not taken", is_warning=True, epoch=role.epoch, why=reason)
        if isinstance(role, Leader):
            self._end_role()
            self._resignation.say(role.epoch, reason, now_ms)
        else:
            role.failed(now_ms)

    def _role_taken(self, role: Leader | Follower, now_ms: int) -> None:
        if role.is_ready:
            return
        self._ctx.facts.epoch = max(self._ctx.facts.epoch, role.epoch)
        if isinstance(role, Leader):
            role.ready(now_ms)
        else:
            role.ready()
