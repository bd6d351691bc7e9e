"""Replication in a simulated storage world: who leads, what the follower fetches, what is committed.

The world takes the place of the cores, links and elections of a cluster, and calls the log as those do: roles in rising
epochs, reconciliation by leader epochs, `append_replicated`, truncation, log start and high watermark of the leader. A
follower leads only if it is in sync, that is, has everything that was promised to consumers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from walstream.errors import WalstreamError
from walstream.replication.messages import ReplicaFlag, State
from walstream.replication.reconcile import Accepted, StartsOver, cut_at, judge
from walstream.sim.checkers import Violation
from walstream.sim.storage_model import NOTHING_FOREIGN, Account, Held

if TYPE_CHECKING:
    from walstream.log.partition_log import PartitionLog
    from walstream.sim.storage import StorageWorld
    from walstream.sim.storage_node import StorageNode

FETCH_BYTES = 2_000


class Replication:
    """Between the nodes of a world."""

    def __init__(self, world: StorageWorld) -> None:
        self._world = world

    def give_roles(self, account: Account) -> None:
        """Have one node lead a partition and the other one follow."""
        key = (account.topic_id, account.index)
        for node in self._world.nodes:
            log = node.log_of(key)
            if log is None or log.is_held or log.write_error is not None or node.roles.get(key) == -1:
                continue
            if account.leader == node.number:
                if not log.is_leader or node.roles.get(key) != account.epoch:
                    self._lead(account, node, log)
            elif node.roles.get(key) != account.epoch:
                self._follow(account, node, log)

    def _lead(self, account: Account, node: StorageNode, log: PartitionLog) -> None:
        held, other = account.held[node.number], account.held[1 - node.number]
        if log.is_unclean or held.harmed:
            if not held.harmed and log.log_end >= account.high_watermark and not log.damaged:
                log.is_unclean = False  # It could not be opened for a while, and lacks nothing.
            else:
                self.make_leader(account, 1 - node.number)
                return
        account.epoch += 1
        epoch, life = account.epoch, node.lives
        node.roles[log.key] = -1

        def led(error: Exception | None) -> None:
            if node.lives != life:
                return
            if error is not None or account.leader != node.number or account.epoch != epoch:
                node.roles.pop(log.key, None)
                return
            node.roles[log.key] = epoch
            if log.log_end > account.end:
                raise Violation("truncated records come back", f"{log!r} should end at {account.end}")
            account.truncate(log.log_end, f"with the leader of epoch {epoch}")
            held.foreign_from, held.is_in_sync = NOTHING_FOREIGN, True
            other.foreign_from = min(other.foreign_from, log.log_end)
            held.is_streaming = other.is_streaming = False
            self._world.trace(node.name, f"leads {log!r} in epoch {epoch}")

        node.run(partial(log.become_leader, epoch, led))

    def _follow(self, account: Account, node: StorageNode, log: PartitionLog) -> None:
        epoch, life = account.epoch, node.lives
        node.roles[log.key] = -1
        account.held[node.number].is_streaming = False

        def followed(error: Exception | None) -> None:
            if node.lives == life:
                node.roles.pop(log.key, None)
                if error is None:
                    node.roles[log.key] = epoch

        node.run(partial(log.become_follower, epoch, followed))

    def make_leader(self, account: Account, number: int) -> bool:
        """Have the other node lead, if it holds everything that was promised."""
        node, held = self._world.nodes[number], account.held[number]
        log = node.log_of((account.topic_id, account.index))
        if log is None or log.is_held or log.write_error is not None or not held.is_in_sync or held.harmed:
            return False
        if log.log_end < account.high_watermark or log.is_unclean or held.foreign_from != NOTHING_FOREIGN:
            return False
        self._world.trace("world", f"node {number} is to lead {account.name}")
        account.leader = number
        return True

    def copy(self, account: Account) -> None:
        """Let the follower fetch once."""
        key = (account.topic_id, account.index)
        follower = self._world.nodes[1 - account.leader]
        leader, held = self._world.nodes[account.leader], account.held[follower.number]
        source, copy = leader.log_of(key), follower.log_of(key)
        if source is None or copy is None or copy.is_held or copy.write_error is not None or key in follower.busy:
            return
        if not source.is_leader or leader.roles.get(key) != account.epoch or follower.roles.get(key) != account.epoch:
            return
        if source.write_error is not None or source.is_held:
            return
        self._world.agree_on_end(account, source)
        if not held.is_streaming:
            if copy.durable_end == copy.log_end:
                follower.run(partial(self._reconcile, account, follower, source, copy))
            return
        chunk: list[tuple[tuple[bytes, ...], int, bool]] = []
        leader.run(partial(self._fetch, source, copy.log_end, chunk, held))
        if chunk and follower.is_up:
            follower.run(partial(self._receive, account, follower, source, copy, *chunk[0]))

    def _fetch(
        self, source: PartitionLog, offset: int, chunk: list[tuple[tuple[bytes, ...], int, bool]], held: Held
    ) -> None:
        try:
            found = source.read_replica(offset, FETCH_BYTES)
            if found is None or (not found.size and offset < source.durable_end):
                found = source.read_replica_blocking(offset, FETCH_BYTES)
        except (WalstreamError, OSError) as error:
            self._world.trace("world", f"{source.name} cannot be read for the follower: {error}")
            held.is_streaming = False
            return
        chunk.append((tuple(bytes(buffer) for buffer in found.buffers), offset, offset < source.gaps_below))

    def _receive(
        self, account: Account, node: StorageNode, source: PartitionLog, copy: PartitionLog,
        buffers: tuple[bytes, ...], offset: int, may_have_gaps: bool,
    ) -> None:  # fmt: skip
        held = account.held[node.number]
        if buffers:
            try:
                copy.append_replicated(buffers, offset=offset, may_have_gaps=may_have_gaps)
            except WalstreamError as error:
                self._world.trace(node.name, f"{copy.name} does not take the leader's batches: {error}")
                held.is_streaming = False
                return
        copy.advance_high_watermark(min(source.high_watermark, copy.durable_end))
        start = min(source.log_start, copy.high_watermark)
        if start > copy.log_start:
            node.run(partial(node.store.delete_records, copy, start, lambda _: None))
        if copy.durable_end >= max(source.high_watermark, account.high_watermark) and not copy.damaged:
            held.is_in_sync, copy.is_unclean = True, False
            held.harmed.clear()

    def _reconcile(self, account: Account, node: StorageNode, source: PartitionLog, copy: PartitionLog) -> None:
        """Find out, by leader epochs, how much of the follower's log is the leader's; truncate the rest."""
        held = account.held[node.number]
        if copy.damaged:
            start = copy.damaged[0][0]
            self._truncate(account, node, copy, start if start > copy.log_start else None, source)
            return
        state = State(
            copy.key, account.epoch, 0, copy.log_start, copy.durable_end, copy.epochs.last_epoch,
            copy.high_watermark, ReplicaFlag.NONE,
        )  # fmt: skip
        verdict = judge(source, state)
        if isinstance(verdict, Accepted):
            if verdict.offset == copy.log_end:
                held.is_streaming, held.foreign_from = True, NOTHING_FOREIGN
        elif isinstance(verdict, StartsOver):
            self._truncate(account, node, copy, None, source)
        else:
            to = cut_at(copy, verdict.end_epoch, verdict.end_offset)
            if to < min(held.high_watermark, held.durable) and not copy.is_unclean and not held.harmed:
                raise Violation(
                    "acknowledged records",
                    f"{copy!r} is to be truncated to {to}, and the leader has {source!r}",
                )
            self._truncate(account, node, copy, to if to >= copy.log_start else None, source)

    def _truncate(
        self, account: Account, node: StorageNode, copy: PartitionLog, to: int | None, source: PartitionLog
    ) -> None:
        """Truncate a follower's log; None: empty it, and begin at the leader's log start."""
        held, life = account.held[node.number], node.lives
        end = source.log_start if to is None else to
        self._world.trace(node.name, f"{copy!r} is {'emptied' if to is None else 'truncated'} to {end}")
        held.durable = min(held.durable, end) if to is not None else 0
        held.high_watermark = min(held.high_watermark, end) if to is not None else 0
        held.is_in_sync = held.is_in_sync and to is not None and end >= account.high_watermark
        if to is None:
            held.start_seen, held.start_durable = min(held.start_seen, end), min(held.start_durable, end)
        node.busy.add(copy.key)

        def truncated(error: Exception | None) -> None:
            if node.lives == life:
                node.busy.discard(copy.key)
                if error is None:
                    held.durable = min(held.durable, copy.log_end)
                    held.high_watermark = min(held.high_watermark, copy.high_watermark)
                    held.harmed = [(a, b) for a, b in held.harmed if a < copy.log_end and to is not None]

        if to is None:
            node.run(partial(copy.reset, end, truncated))
        else:
            node.run(partial(copy.truncate, end, truncated))

    def commit(self, account: Account) -> None:
        """Raise the high watermark to what all replicas in sync have on their disks."""
        led = self._world.led(account)
        if led is None:
            return
        node, log = led
        if self._world.scenario.is_alone:
            account.commit(log.high_watermark)
            return
        held = account.held[1 - node.number]
        follower = self._world.nodes[1 - node.number]
        copy = follower.log_of(log.key)
        end = log.durable_end
        if held.is_in_sync:
            if copy is not None and held.is_streaming:
                end = min(end, copy.durable_end)
            else:
                is_away = copy is None or copy.write_error is not None or not self._world.is_copying
                if is_away and self._world.clock.chance(0.03 if not self._world.are_faults_over else 0.5):
                    held.is_in_sync = False
                return
        if self._world.is_committing or self._world.are_faults_over:
            node.run(partial(log.advance_high_watermark, end))
            account.commit(log.high_watermark)
