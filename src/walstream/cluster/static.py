"""The metadata of a static cluster: leaders come from the configuration, each leader keeps its partitions' records.

Owns `replication.json` beside the log: which life of this node this is (its incarnation) and, for each partition that
it leads, epoch, ISR and ELR. The leader grants its own proposals, by the rules of `cluster.metadata`, and nothing is
told before the file has it. Every start takes a new epoch for every partition that is led, durable before the first
append or answer, because an epoch belongs to one life of one node.

Nobody is elected here: a leader that has lost bytes which others may hold leads no more until an operator has put
another node in its place. Also here: how the catalogue of topics looks on a link, and which producer ids are whose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from walstream import logs
from walstream.cluster.local import Topic
from walstream.cluster.metadata import (
    NO_EPOCH,
    NO_LEADER,
    IsrProposal,
    Member,
    NodeId,
    Outcome,
    PartitionKey,
    PartitionState,
    Refusal,
    granted,
    with_min_isr,
)
from walstream.errors import CorruptLog, DirectoryUnusable, MalformedFrame
from walstream.log.checkpoint import key_text
from walstream.log.disk import Disk

log = logs.get(__name__)

FILE = "replication.json"
PRODUCER_ID_BITS = 47
PRODUCER_IDS_PER_S_BITS = 15

Run = Callable[[Callable[[], None], Callable[[Exception | None], None]], None]
"""Runs what blocks beside the loop, one at a time and in order, then tells on the loop how it ended."""
Watcher = Callable[[PartitionState], None]


class _Record(msgspec.Struct, frozen=True):
    epoch: int
    version: int = 0
    isr: list[tuple[int, int]] = []
    elr: list[int] = []
    unclean_epoch: int = NO_EPOCH


class _File(msgspec.Struct, frozen=True):
    incarnation: int = 0
    partitions: dict[str, _Record] = {}


class Opening(NamedTuple):
    """A partition as this node finds it when it opens it."""

    key: PartitionKey
    replicas: tuple[NodeId, ...]
    leader: NodeId
    min_isr: int
    known_epoch: int
    """The newest epoch that this node's log ever took or heard of."""
    is_unclean: bool
    """The log has lost bytes that were durable: its disk is new, or lied."""


class StaticCluster:
    """The records of this node's partitions. A `MetadataService`."""

    def __init__(self, disk: Disk, folder: Path, node_id: NodeId, now_ms: int, run: Run) -> None:
        """Read the file and begin a new life, durably. Blocks for one fsync."""
        self._disk = disk
        self._path = folder / FILE
        self._node_id = node_id
        self._run = run
        self._saved = self._load()
        # The clock is the floor, so that a node whose disk was wiped does not live an old life again.
        self.incarnation = max(self._saved.incarnation + 1, now_ms // 1000)
        self._states: dict[PartitionKey, PartitionState] = {}
        self._watchers: dict[PartitionKey, Watcher] = {}
        self._waiting: list[Callable[[Exception | None], None]] = []
        self._unsaved: dict[PartitionKey, PartitionState] = {}
        """Records that the file does not have yet, or may not have after a failed write. They replace those in
        `_states` once it has them: until then nothing else sees them, because after a restart the file is all there
        is."""
        self._unseen: set[PartitionKey] = set()
        """Partitions whose watcher is called when their record is saved."""
        self._is_saving = False
        self._write()

    def _load(self) -> _File:
        data = self._disk.read(self._path)
        try:
            return _File() if data is None else msgspec.json.decode(data, type=_File)
        except msgspec.DecodeError as error:
            raise CorruptLog(
                f"{self._path} cannot be read: {error}.",
                "It holds the epochs that keep replicas apart: restore it from a copy, do not delete it.",
            ) from error

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self, partition: PartitionKey) -> PartitionState | None:
        """Return the record of a partition, as far as it is durable, if this node has opened it."""
        return self._states.get(partition)

    def _latest(self, partition: PartitionKey) -> PartitionState | None:
        """Return the record that the next change is made from."""
        return self._unsaved.get(partition) or self._states.get(partition)

    def open(self, partitions: Iterable[Opening], done: Callable[[Exception | None], None] | None = None) -> None:
        """Begin with partitions: those that this node leads have a new epoch, durable before `done` is called.

        Without `done`, at the node's start, this blocks for one fsync.
        """
        opened = {found.key: self._opened(found) for found in partitions}
        led = {key: state for key, state in opened.items() if self._node_id in _leads(state)}
        self._states |= {key: state for key, state in opened.items() if key not in led}
        self._unsaved |= led
        if not led:
            if done is not None:
                done(None)
        elif done is not None:
            self._save(done)
        else:
            assert not self._is_saving, "two writers of one file"
            self._write()

    def _opened(self, found: Opening) -> PartitionState:
        state = PartitionState(found.replicas, found.leader, found.known_epoch, min_isr=found.min_isr)
        if found.leader != self._node_id:
            return replace(state, isr=(Member(found.leader, 0),))
        record = self._saved.partitions.get(key_text(found.key))
        # After a time in which another node led, what this one noted about the others means nothing any more.
        is_current = record is not None and record.epoch >= found.known_epoch
        kept = record if is_current and record is not None else _Record(NO_EPOCH)
        others = [Member(*one) for one in kept.isr if one[0] != self._node_id and one[0] in found.replicas]
        state = replace(
            state,
            epoch=max(found.known_epoch, kept.epoch) + 1,
            version=kept.version + 1,
            isr=tuple(sorted([Member(self._node_id, self.incarnation), *others])),
            elr=tuple(node for node in kept.elr if node in found.replicas),
            unclean_epoch=kept.unclean_epoch,
        )
        was_out = bool(kept.isr) and self._node_id not in [node for node, _ in kept.isr]
        if not found.is_unclean and not was_out:
            return state
        eligible = {member.node for member in others} | set(state.elr) if is_current else set(found.replicas)
        if eligible - {self._node_id}:
            log.error(
                "a leader has lost durable bytes and leads no more", topic_id=str(found.key[0]), partition=found.key[1],
                others=sorted(eligible), hint="Let one of the others lead: [[replication.leaders]], on all nodes.",
            )  # fmt: skip
            return replace(state, leader=NO_LEADER, last_leader=self._node_id, isr=tuple(others))
        return replace(state, unclean_epoch=state.epoch)

    def forget(self, partitions: Iterable[PartitionKey]) -> None:
        """Drop the records of partitions that were deleted; the file loses them with the next change."""
        for key in partitions:
            self._states.pop(key, None)
            self._unsaved.pop(key, None)
            self._unseen.discard(key)
            self._watchers.pop(key, None)

    def set_min_isr(self, partition: PartitionKey, min_isr: int) -> None:
        """Ask for another number of in-sync replicas, as the topic's settings say now."""
        state = self._latest(partition)
        if state is not None and state.min_isr != min_isr:
            self._change(partition, with_min_isr(state, min_isr), "a changed min.insync.replicas was not saved")

    def _change(self, partition: PartitionKey, changed: PartitionState, failure: str) -> None:
        """Save a record and then call its watcher. One that cannot be saved now is saved by a later `tick`."""
        self._unsaved[partition] = changed
        self._unseen.add(partition)

        def saved(error: Exception | None) -> None:
            if error is not None:
                log.warning(failure, error=str(error))

        self._save(saved)

    def tick(self) -> None:
        """Save again what could not be saved. Called about once a second."""
        if self._unsaved and not self._is_saving:
            self._save(lambda _: None)

    def _tell(self, partition: PartitionKey, state: PartitionState) -> None:
        watcher = self._watchers.get(partition)
        if watcher is not None:
            watcher(state)

    # ── the service ──────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, partition: PartitionKey, done: Callable[[PartitionState | None], None]) -> None:
        """Give the record at once; None while the file does not have it."""
        done(None if partition in self._unsaved else self._states.get(partition))

    def watch(self, partition: PartitionKey, changed: Watcher) -> Callable[[], None]:
        """Tell of the record now and whenever it changes."""
        self._watchers[partition] = changed
        changed(self._states[partition])
        return lambda: self._watchers.pop(partition, None) and None

    def propose(self, proposal: IsrProposal, done: Callable[[Outcome], None]) -> None:
        """Grant or refuse another ISR to this node itself; durable before `done`."""
        state = self._latest(proposal.partition)
        if state is None:
            done(Outcome(Refusal.STALE_EPOCH, None))
            return
        outcome = granted(state, proposal)
        if proposal.partition in self._unsaved:
            # What was granted before never reached the file. It counts once it does, and not before: after a restart
            # the file is all there is.
            outcome = Outcome(Refusal.STALE_VERSION, state)
        elif outcome.state is None or outcome.refusal is not None:
            done(outcome)
            return
        else:
            self._unsaved[proposal.partition] = outcome.state

        def saved(error: Exception | None) -> None:
            if error is None:
                done(outcome)
                return
            log.warning("a change of the in-sync replicas was not saved", error=str(error))
            done(Outcome(Refusal.UNKNOWN, None))

        self._save(saved)

    def resign(self, partition: PartitionKey, leader: NodeId, epoch: int) -> None:
        """Note that the leader cannot serve. Nobody else is elected; it may `lead_again` when its trouble is over."""
        unsaved = self._unsaved.get(partition)
        if unsaved is not None and (unsaved.leader, unsaved.epoch) == (leader, epoch):
            self._unsaved[partition] = _resigned(unsaved)
        state = self._states.get(partition)
        if state is None or (state.leader, state.epoch) != (leader, epoch):
            return
        # Seen at once: it promises less, and the file keeps who led last.
        self._states[partition] = resigned = _resigned(state)
        self._tell(partition, resigned)

    def retire(self, partition: PartitionKey) -> None:
        """Resign from every epoch that this node leads the partition in, also from one that is being saved.

        For a replica that has failed and stays so until the next start: it never takes the role that a record gives.
        """
        for state in (self._latest(partition), self._states.get(partition)):
            if state is not None and state.leader == self._node_id:
                self.resign(partition, self._node_id, state.epoch)

    def lead_again(self, partition: PartitionKey, known_epoch: int) -> None:
        """Lead in a new epoch, above every one that was heard of: after a resignation, or when a follower knows better.

        A leader that was not in sync when it was opened stays out.
        """
        state = self._latest(partition)
        if state is None or self._node_id not in _leads(state) or self._node_id not in state.isr_nodes:
            return
        isr = [member for member in state.isr if member.node != self._node_id]
        leading = replace(
            state,
            leader=self._node_id,
            epoch=max(state.epoch, known_epoch) + 1,
            version=state.version + 1,
            isr=tuple(sorted([Member(self._node_id, self.incarnation), *isr])),
        )
        self._change(partition, leading, "a new epoch was not saved")

    def register(self, node: NodeId, incarnation: int, *, is_unclean: Collection[PartitionKey]) -> None:
        """Do nothing: each node knows of itself what it opens, and hears of others from their links."""

    # ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, done: Callable[[Exception | None], None]) -> None:
        """Write the records as they are now or later; changes that come while a write is under way share the next."""
        self._waiting.append(done)
        if not self._is_saving:
            self._save_waiting()

    def _save_waiting(self) -> None:
        self._is_saving = True
        waiting, self._waiting = self._waiting, []
        content, saving = self._content(), dict(self._unsaved)

        def saved(error: Exception | None) -> None:
            self._is_saving = False
            unseen = [] if error is not None else self._saved_now(saving)
            for done in waiting:
                done(error)
            for key in unseen:
                if key in self._states:
                    self._tell(key, self._states[key])
            if self._waiting and not self._is_saving:
                self._save_waiting()

        self._run(lambda: self._put(content), saved)

    def _saved_now(self, saved: dict[PartitionKey, PartitionState]) -> list[PartitionKey]:
        """Show records that the file has now; return those whose watchers are to be called.

        One that was changed meanwhile is shown as it was saved, unless its leader has resigned since.
        """
        unseen: list[PartitionKey] = []
        for key, state in saved.items():
            latest = self._unsaved.get(key)
            if latest is None:
                continue  # The partition was deleted.
            if latest is state:
                del self._unsaved[key]
            elif latest.leader != state.leader:
                continue
            self._states[key] = state
            if latest is state and key in self._unseen:
                self._unseen.discard(key)
                unseen.append(key)
        return unseen

    def _write(self) -> None:
        saving = dict(self._unsaved)
        try:
            self._put(self._content())
        except OSError as error:
            raise DirectoryUnusable(
                f"{self._path} cannot be written: {error.strerror}.",
                "A leader must note its new epoch there before it serves anything. Free some space, or mend the disk.",
            ) from error
        self._saved_now(saving)

    def _put(self, content: _File) -> None:
        self._disk.write(self._path, msgspec.json.encode(content), durable=True)

    def _content(self) -> _File:
        states = self._states | self._unsaved
        led = {key_text(key): _record(state) for key, state in states.items() if self._node_id in _leads(state)}
        if not states:
            led = self._saved.partitions  # Nothing is open yet: what an earlier life noted is still to be read.
        return _File(self.incarnation, led)


def _leads(state: PartitionState) -> tuple[NodeId, NodeId]:
    return (state.leader, state.last_leader)


def _resigned(state: PartitionState) -> PartitionState:
    return replace(state, leader=NO_LEADER, last_leader=state.leader, version=state.version + 1)


def _record(state: PartitionState) -> _Record:
    isr = [(member.node, member.incarnation) for member in state.isr]
    return _Record(state.epoch, state.version, isr, list(state.elr), state.unclean_epoch)


# ── the catalogue on a link ─────────────────────────────────────────────────────────────────────────────────────────


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node tells the others."""

    topics: list[Topic] | None = None
    """All there are; only the controller says."""
    leading: dict[str, tuple[int, list[int]]] = {}
    """Epoch and in-sync replicas of partitions that the node leads, by `key_text`; those that are news."""


def encode_told(told: Told) -> bytes:
    """Write the body of a CATALOGUE."""
    return msgspec.json.encode(told)


def decode_told(body: bytes) -> Told:
    """Read the body of a CATALOGUE; raises MalformedFrame."""
    try:
        return msgspec.json.decode(body, type=Told)
    except msgspec.DecodeError as error:
        raise MalformedFrame(f"The catalogue of topics cannot be read: {error}.") from error


def producer_ids(node_id: NodeId, now_ms: int) -> range:
    """Return the producer ids that a node may give: its number in the high bits, and below it at least the time.

    By the time, a node whose disk was wiped does not give an id again that it gave before: it would have to have given
    32,768 a second, all the time.
    """
    first = (node_id + 1) << PRODUCER_ID_BITS
    return range(first + (now_ms // 1000 << PRODUCER_IDS_PER_S_BITS), first + (1 << PRODUCER_ID_BITS))
