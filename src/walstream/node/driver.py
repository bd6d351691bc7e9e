"""One partition's core at work: events in, effects done, on the log, the links and the cluster's metadata.

`Replica` owns one `Manager` and hands it everything that happens to one partition, in order: an event that comes while
another is being handled waits for its turn, so that the core is never entered twice. It knows what each effect means
and no rule of replication; the core knows the rules and nothing of logs and sockets.

The core hears of appends once per turn of the event loop, however many they were: at once if somebody waits for other
replicas, so that the leader's disk and theirs work at the same time; otherwise when they are durable here, so that who
waits for this disk alone does not share it, nor the processor, with the followers of a moment ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from walstream import logs
from walstream.errors import NotEnoughReplicasAfterAppend, NotLeader, WalstreamError
from walstream.log.waiting import Callback, Waiter, Waiters
from walstream.replication import effects as do
from walstream.replication import events as on
from walstream.replication.context import NEVER
from walstream.replication.messages import Batches, Data

if TYPE_CHECKING:
    from walstream.cluster.metadata import MetadataService, NodeId, PartitionState
    from walstream.log.partition_log import PartitionLog
    from walstream.log.store import LogStore
    from walstream.replication.manager import Manager
    from walstream.replication.messages import PartitionMessage

log = logs.get(__name__)

T = TypeVar("T")

VERIFIED_BYTES = 1024 * 1024
"""How much is read at a time to be sure of the own copy."""


class Links(Protocol):
    """What a replica needs of the connections to other nodes."""

    def send(self, peer: NodeId, message: PartitionMessage, *, is_outgoing: bool) -> None:
        """Put a message on a link, if there is one."""

    def send_data(self, replica: Replica, request: do.SendData) -> None:
        """Send a DATA frame when the link has room and credit for one."""

    def stop_data(self, replica: Replica) -> None:
        """Forget what waits to be sent for a replica."""

    def return_credit(self, peer: NodeId, bytes_count: int) -> None:
        """Let a leader send this much more."""


class Host(Protocol):
    """What a replica needs of the node."""

    node_id: NodeId
    store: LogStore

    @property
    def metadata(self) -> MetadataService:
        """Where the records of partitions are kept."""

    @property
    def links(self) -> Links:
        """The connections to other nodes."""

    def clock_ms(self) -> int:
        """Return the time that the core goes by: monotonic."""

    def mark(self, replica: Replica) -> None:
        """See to it that the replica's `look` is called in this turn of the loop, once."""

    def wake_at(self, replica: Replica, deadline_ms: int) -> None:
        """See to it that the replica hears a tick at that time."""

    def run_blocking(self, job: Callable[[], T], done: Callable[[T | None, Exception | None], None]) -> None:
        """Run what waits for the disk on a thread, then call back on the loop."""

    def post(self, callback: Callable[[], None]) -> None:
        """Call back on the loop. May be called on any thread."""

    def refresh(self, replica: Replica, epoch: int) -> None:
        """Somebody knows this epoch, newer than the record: read the record again and tell the replica."""

    def came_back(self, replica: Replica) -> None:
        """Hear that the replica's log takes writes again, in no role."""

    def role_changed(self, replica: Replica) -> None:
        """Hear that the replica leads, or does not lead any more."""

    def replica_failed(self, replica: Replica, error: Exception) -> None:
        """The replica does nothing any more: the cluster must not take it for a leader."""

    def reported(self, replica: Replica, report: do.Report) -> None:
        """Count what the core reports."""


class Replica:
    """One partition of a node that has peers. Also the log's `Listener`."""

    def __init__(self, host: Host, partition: PartitionLog, manager: Manager) -> None:
        self.partition = partition
        self.manager = manager
        self.key = partition.key
        self.node_id = host.node_id
        self.is_settled = False
        """Whether the high watermark has passed this leader's first offset: before, nobody may be told where the log
        ends."""
        self.quarantined = ""
        self.is_closed = False
        self.wake_ms = NEVER
        """When the core is to be woken, as far as the host knows."""
        self.followers_durable = Waiters()
        """Who waits for followers in mode `sync`."""
        self._followers_durable_end = 0
        self._host = host
        self._events: deque[on.Event] = deque()
        self._is_handling = False
        self.is_awaited = False
        """Whether somebody waits for followers to have what was appended in this turn."""
        self._has_become_durable = False
        partition.listener = self

    def start(self, state: PartitionState | None) -> None:
        """Tell the core what recovery found and what the cluster says, if that is known already."""
        self._tell_start()
        if state is not None:
            self.feed(on.MetadataChanged(state))

    def _tell_start(self) -> None:
        partition = self.partition
        self.feed(
            on.Started(
                partition.leader_epoch,
                partition.high_watermark,
                partition.high_watermark_epoch,
                partition.is_unclean,
                tuple(partition.damaged),
            )
        )

    def close(self) -> None:
        """Hear nothing more: the partition is gone, or the node stops."""
        self.is_closed = True
        self.partition.listener = None
        for event in self._events:
            self._return_credit_of(event)
        self._events.clear()
        self._host.links.stop_data(self)
        self.followers_durable.fail(NotLeader(f"This node no longer leads {self.partition.name}."))

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, event: on.Event) -> None:
        """Hand an event to the core and do what it asks for."""
        if self.is_closed:
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        effects: list[do.Effect] | None = None
        effect: do.Effect | None = None
        try:
            events, manager = self._events, self.manager
            now_ms = self._host.clock_ms()
            while events:
                event, effects = events.popleft(), None
                effects = manager.handle(event, now_ms)
                for effect in effects:
                    DOING[type(effect)](self, effect)
        except Exception as error:
            if effects is None:
                self._return_credit_of(event)
            else:
                number = next(number for number, one in enumerate(effects) if one is effect)
                self._return_credit_in(effects[number:])
            self._fail(error)
            return
        finally:
            self._is_handling = False
        deadline_ms = self.manager.deadline_ms
        if deadline_ms < self.wake_ms:
            self._host.wake_at(self, deadline_ms)

    def _fail(self, error: Exception) -> None:
        """Take this replica out of service until the node is restarted; the others are served on.

        The effects that were left are lost, so the core believes what did not happen: nothing it says can be trusted.
        """
        name = self.partition.name
        log.error(
            "replica failed", partition=name, error=repr(error), exc_info=error,
            hint="The other partitions are served. Restart the node, and report this error.",
        )  # fmt: skip
        self.quarantined = f"The replica has failed: {error!r}. Restart the node."
        self.is_settled = False
        self.partition.stop_role()
        self.close()
        self.manager.role = None
        self.partition.fail_waiters(NotLeader(f"The replica of {name} has failed on this node."))
        self._host.replica_failed(self, error)

    def _return_credit_of(self, event: on.Event) -> None:
        """Return the credit of data that is not handled: the link is sound, and so are its other partitions."""
        if isinstance(event, on.Received) and isinstance(event.message, Data):
            self._host.links.return_credit(event.peer, sum(map(len, event.message.batches)))

    def _return_credit_in(self, effects: list[do.Effect]) -> None:
        """Return the credit that effects would have returned, which are not done."""
        for effect in effects:
            if isinstance(effect, do.Append):
                self._host.links.return_credit(effect.peer, effect.credit_bytes)
            elif isinstance(effect, do.ReturnCredit):
                self._return_credit(effect)

    def look(self) -> None:
        """Tell the core what has happened to the log since the last turn."""
        if self.is_awaited:
            self.is_awaited = False
            self.feed(_APPENDED)
        if self._has_become_durable:
            self._has_become_durable = False
            self.feed(_DURABLE)

    def looked(self) -> None:
        """Hear that the turn is over: who lacks what it was about will read it from the disk."""
        self.partition.let_go()

    def tick(self) -> None:
        """Tell the core that time has passed."""
        self.feed(_TICK)

    # What the log tells

    def awaited(self) -> None:
        """Hear that somebody waits for other replicas."""
        if not self.is_awaited:
            self.is_awaited = True
            self._host.mark(self)

    def became_durable(self) -> None:
        """Hear that a flush has returned."""
        if not self._has_become_durable:
            self._has_become_durable = True
            self._host.mark(self)

    def went_offline(self, error: WalstreamError) -> None:
        """Hear that the log takes no more writes."""
        self.followers_durable.fail(error)
        self.feed(on.LogFailed())

    def came_back(self) -> None:
        """Hear that the log was opened again."""
        self._tell_start()
        self._host.came_back(self)

    def found_damage(self) -> None:
        """Hear that a read or the scrub found damage. May be called on another thread."""
        self._host.post(lambda: self.feed(on.DamageFound(tuple(self.partition.damaged))))

    def when_followers_durable(self, offset: int, callback: Callback) -> Waiter:
        """Call back once as many followers as mode `sync` asks for hold the offset durably."""
        if offset < self._followers_durable_end:
            callback(None)
            return Waiter(None, None)
        self.awaited()
        return self.followers_durable.add(offset, callback)

    # ── effects on links ─────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, effect: do.Send) -> None:
        self._host.links.send(effect.peer, effect.message, is_outgoing=effect.is_outgoing)

    def _send_data(self, effect: do.SendData) -> None:
        self._host.links.send_data(self, effect)

    def _return_credit(self, effect: do.ReturnCredit) -> None:
        self._host.links.return_credit(effect.peer, effect.bytes_count)

    # ── effects on the log ───────────────────────────────────────────────────────────────────────────────────────

    def _lead(self, effect: do.Lead) -> None:
        self.is_settled = False
        self._followers_durable_end = 0
        self.partition.become_leader(effect.epoch, self._role_taker(effect.token))

    def _follow(self, effect: do.Follow) -> None:
        self.is_settled = False
        self.partition.become_follower(effect.epoch, self._role_taker(effect.token))
        self._host.role_changed(self)

    def _role_taker(self, token: on.Token) -> Callable[[Exception | None], None]:
        def taken(error: Exception | None) -> None:
            if error is None:
                self.feed(on.RoleTaken(token))
                self._host.role_changed(self)
            else:
                self.feed(on.RoleFailed(token, str(error)))

        return taken

    def _stop_role(self, _: do.StopRole) -> None:
        self.is_settled = False
        self.partition.stop_role()
        self._host.links.stop_data(self)
        self._host.role_changed(self)

    def _append(self, effect: do.Append) -> None:
        links, peer, credit_bytes = self._host.links, effect.peer, effect.credit_bytes
        try:
            self.partition.append_replicated(
                effect.batches,
                offset=effect.offset,
                may_have_gaps=effect.may_have_gaps,
            )
        except WalstreamError as error:
            links.return_credit(peer, credit_bytes)
            self.feed(on.AppendFailed(effect.token, str(error)))
            return
        # The log lets go of the buffers when they are written, and also when that fails.
        self.partition.when_durable(effect.next_offset - 1, lambda _: links.return_credit(peer, credit_bytes))

    def _truncate(self, effect: do.Truncate) -> None:
        self.partition.truncate(effect.offset, self._cutter(effect.token))

    def _reset(self, effect: do.ResetLog) -> None:
        self.partition.reset(effect.log_start, self._cutter(effect.token))

    def _cutter(self, token: on.Token) -> Callable[[Exception | None], None]:
        def cut(error: Exception | None) -> None:
            if error is None:
                self.feed(on.Truncated(token))
            else:
                # The log is offline then, and has said so.
                log.error("the log could not be cut", partition=self.partition.name, error=str(error))

        return cut

    def _trim(self, effect: do.TrimLog) -> None:
        partition = self.partition
        before = min(effect.log_start, partition.high_watermark)
        if before > partition.log_start:
            self._host.store.delete_records(partition, before, _trimmed)

    def _set_high_watermark(self, effect: do.SetHighWatermark) -> None:
        self.is_settled = effect.is_settled
        self.partition.advance_high_watermark(effect.offset)

    def _set_followers_durable(self, effect: do.SetFollowersDurable) -> None:
        self._followers_durable_end = max(self._followers_durable_end, effect.offset)
        self.followers_durable.wake(effect.offset)

    def _fail_waiters(self, effect: do.FailWaiters) -> None:
        name = self.partition.name
        if effect.why is do.Failing.NOT_LEADER:
            error: WalstreamError = NotLeader(f"This node no longer leads {name}.", "Ask again who does.")
            self.partition.fail_waiters(error)
            self.followers_durable.fail(error)
        else:
            error = NotEnoughReplicasAfterAppend(
                f"{name} has too few replicas in sync to keep the batch.", "It may still become visible. Try again."
            )
            self.partition.fail_waiters(error, visible_only=True)

    # ── equality and repair ──────────────────────────────────────────────────────────────────────────────────────

    def _compute_digest(self, effect: do.ComputeDigest) -> None:
        def done(digest: on.Digest | None, error: Exception | None) -> None:
            if digest is None:
                log.warning("a digest was not computed", partition=self.partition.name, error=str(error))
                digest = on.Digest(effect.end, b"")
            self.feed(on.DigestComputed(effect.token, effect.request, digest))

        self._host.run_blocking(lambda: self._digest(effect), done)

    def _digest(self, effect: do.ComputeDigest) -> on.Digest:
        offset = effect.start if effect.is_verified else effect.end
        while offset < effect.end:
            chunk = self.partition.read_replica_blocking(offset, VERIFIED_BYTES)
            if chunk.next_offset == offset:
                break
            offset = chunk.next_offset
        found = self.partition.digest(effect.start, effect.end)
        return on.Digest(found.valid_from, found.value)

    def _read_for_repair(self, effect: do.ReadForRepair) -> None:
        def done(found: tuple[Batches, int] | None, _: Exception | None) -> None:
            batches, next_offset = found or ((), effect.start)
            self.feed(on.RangeRead(effect.token, effect.peer, effect.request, effect.start, next_offset, batches))

        self._host.run_blocking(lambda: self._read_range(effect), done)

    def _read_range(self, effect: do.ReadForRepair) -> tuple[Batches, int]:
        chunk = self.partition.read_for_repair(effect.start, effect.end, effect.bytes_max)
        return chunk.buffers, chunk.next_offset

    def _install_repair(self, effect: do.InstallRepair) -> None:
        def done(error: Exception | None) -> None:
            if error is not None:
                log.warning("a repair was not written", partition=self.partition.name, error=str(error))
            self.feed(on.RepairDone(effect.token, tuple(self.partition.damaged)))

        try:
            self.partition.repair(effect.start, effect.batches, done)
        except WalstreamError as error:
            done(error)

    # ── the cluster ──────────────────────────────────────────────────────────────────────────────────────────────

    def _propose(self, effect: do.Propose) -> None:
        self._host.metadata.propose(
            effect.proposal, lambda outcome: self.feed(on.ProposalAnswered(effect.token, outcome))
        )

    def _refresh(self, effect: do.RefreshMetadata) -> None:
        self._host.refresh(self, effect.epoch)

    def _resign(self, effect: do.Resign) -> None:
        log.error("a leader resigns", partition=self.partition.name, epoch=effect.epoch, reason=effect.reason)
        self._host.metadata.resign(self.key, self._host.node_id, effect.epoch)

    def _quarantine(self, effect: do.Quarantine) -> None:
        self.quarantined = effect.reason
        log.error("a replica is quarantined", partition=self.partition.name, reason=effect.reason)

    def _heal(self, _: do.Healed) -> None:
        self.partition.is_unclean = False

    def _report(self, effect: do.Report) -> None:
        write = log.warning if effect.is_warning else log.info
        write(effect.phrase, partition=self.partition.name, **dict(effect.fields))
        self._host.reported(self, effect)

    def _set_damaged(self, effect: do.SetDamaged) -> None:
        if not effect.damaged:
            log.info("all damage is repaired", partition=self.partition.name)


def _trimmed(error: Exception | None) -> None:
    if error is not None:
        log.warning("a follower's log was not trimmed", error=str(error))


_APPENDED, _DURABLE, _TICK = on.Appended(), on.Durable(), on.Tick()

DOING: dict[type, Callable[[Replica, Any], None]] = {
    do.Send: Replica._send,
    do.SendData: Replica._send_data,
    do.ReturnCredit: Replica._return_credit,
    do.Lead: Replica._lead,
    do.Follow: Replica._follow,
    do.StopRole: Replica._stop_role,
    do.Append: Replica._append,
    do.Truncate: Replica._truncate,
    do.ResetLog: Replica._reset,
    do.TrimLog: Replica._trim,
    do.SetHighWatermark: Replica._set_high_watermark,
    do.SetFollowersDurable: Replica._set_followers_durable,
    do.FailWaiters: Replica._fail_waiters,
    do.ComputeDigest: Replica._compute_digest,
    do.ReadForRepair: Replica._read_for_repair,
    do.InstallRepair: Replica._install_repair,
    do.Propose: Replica._propose,
    do.RefreshMetadata: Replica._refresh,
    do.Resign: Replica._resign,
    do.Quarantine: Replica._quarantine,
    do.Healed: Replica._heal,
    do.Report: Replica._report,
    do.SetDamaged: Replica._set_damaged,
}
"""What is done for each effect. All of them are here: one that is not would stall a partition, and a test compares."""
