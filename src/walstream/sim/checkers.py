"""The promises, checked after every step.

The checkers keep their own account of the run: what each log holds (`mirror`), what was committed, who led when, what
was acknowledged, what was read. They look at the replicas from outside and trust none of their words. A broken promise
is a `Violation`, which names the invariant; each is proved able to fail by a planted bug (`bugs`).

*Committed* is what some leader's high watermark has covered. The list of committed batches only grows, and every
replica's log below its high watermark must agree with it for ever; unless somebody was elected who may lack some of
them, where a run allows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from walstream.cluster.metadata import NodeId, PartitionKey, PartitionState
from walstream.errors import CorruptLog
from walstream.log.partition_log import PartitionLog
from walstream.sim.accounts import NO_LIFE, Copy, History
from walstream.sim.mirror import Item, fill_damage, first_difference, mirror_of, read_items, rot_of

ACKS_ALL = -1


class Violation(BaseException):
    """A promise was broken. Not an `Exception`, so that no handler of the code under test catches it."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Replica(Protocol):
    """What the checkers see of one copy of a partition, in one life of its node."""

    node: NodeId
    life: int
    key: PartitionKey
    log: PartitionLog

    @property
    def leading_epoch(self) -> int | None:
        """The epoch in which it leads, that is, takes appends and serves; None if it does not."""


class Checkers:
    """All accounts, and the checks."""

    def __init__(self) -> None:
        self.histories: dict[PartitionKey, History] = {}
        self.checks = 0

    def create(self, key: PartitionKey, name: str, replicas: Iterable[NodeId], min_isr: int) -> None:
        """Begin the account of a partition."""
        copies = {node: Copy() for node in replicas}
        self.histories[key] = History(name, copies=copies, min_isr=min_isr)

    def delete(self, key: PartitionKey) -> None:
        """Promise nothing more about a partition: its topic is deleted."""
        del self.histories[key]

    def trimming(self, replica: Replica, before: int) -> None:
        """Somebody deletes the beginning of a log."""
        history = self.histories[replica.key]
        history.trimmed_to = max(history.trimmed_to, before)

    # ── a life begins ────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self, replica: Replica) -> None:
        """A log was opened, at a start or after a failure: everything it had called durable must be there."""
        history = self.histories.get(replica.key)
        if history is None:
            return
        copy = history.copies[replica.node]
        log = replica.log
        found = mirror_of(log)
        if not copy.is_unproven and not copy.is_rotten:
            promised = copy.mirror.between(log.log_start, copy.durable_end)
            missing = first_difference((item for item in promised if item.next <= copy.durable_end), found)
            if missing is not None:
                _fail(
                    "own durability", history, replica,
                    f"{missing[0]} was durable up to {copy.durable_end}, and is {missing[1] or 'gone'} after a start",
                )  # fmt: skip
        if copy.is_unproven or copy.is_rotten or log.damaged:
            # A crash may leave a hole in what was never durable: what follows it is kept, and the hole is damage.
            fill_damage(found, log, copy.uncut or copy.mirror)
        copy.mirror, copy.uncut = found, None
        copy.life = replica.life
        copy.durable_end = log.durable_end
        copy.truncations = log.truncations
        copy.is_offline = log.write_error is not None
        copy.is_held = False
        copy.leading_epoch = None
        copy.checked_end = min(copy.checked_end, log.log_start)
        copy.high_watermark = 0
        self.observe(replica)

    def closed(self, node: NodeId) -> None:
        """A node is gone: only what its logs had called durable counts from here on."""
        for history in self.histories.values():
            copy = history.copies.get(node)
            if copy is not None:
                copy.mirror = copy.mirror.copy(copy.durable_end)
                copy.leading_epoch = None

    def harmed(self, node: NodeId, key: PartitionKey | None = None) -> None:
        """A node's medium lost or changed what was durable."""
        for history_key, history in self.histories.items():
            if node in history.copies and key in (None, history_key):
                history.copies[node].is_unproven = True

    def rotten(self, node: NodeId) -> None:
        """A bit was flipped on a node's medium."""
        self.harmed(node)
        for history in self.histories.values():
            if node in history.copies:
                history.copies[node].is_rotten = True

    def wiped(self, node: NodeId) -> None:
        """A node has a new disk."""
        self.harmed(node)
        for history in self.histories.values():
            copy = history.copies.get(node)
            if copy is not None:
                copy.mirror.reset(0)
                copy.uncut = None
                copy.durable_end = copy.high_watermark = copy.checked_end = 0
                copy.life = NO_LIFE
                copy.is_rotten = False

    # ── a step was made ──────────────────────────────────────────────────────────────────────────────────────────

    def observe(self, replica: Replica) -> None:
        """Look at a copy after something happened on its node."""
        self.checks += 1
        history = self.histories.get(replica.key)
        if history is None:
            return
        copy = history.copies[replica.node]
        log = replica.log
        is_offline = log.write_error is not None
        if is_offline != copy.is_offline:
            copy.is_offline = is_offline
            if not is_offline:
                self.opened(replica)
                return
        if is_offline:
            # What it was given last is neither kept nor forgotten; the next opening says. What it has is served on.
            if log.truncations == copy.truncations and not copy.is_held and not log.damaged:
                for item in read_items(log, copy.mirror.end) if log.high_watermark > copy.mirror.end else ():
                    copy.mirror.add(item)
                self._observe_watermark(history, copy, replica)
            return
        if log.truncations != copy.truncations:
            self._cut(history, copy, replica)
        if copy.is_held:
            if log.is_held:
                return
            self._released(copy, log)
        if log.log_end != copy.mirror.end:
            self._take_in(history, copy, replica)
        durable_end = log.durable_end
        if durable_end != copy.durable_end:
            if durable_end < copy.durable_end:
                _fail("durable end", history, replica, f"went back from {copy.durable_end} to {durable_end}")
            copy.durable_end = durable_end
        leading = replica.leading_epoch
        if leading != copy.leading_epoch:
            copy.leading_epoch = leading
            copy.high_watermark = min(copy.high_watermark, log.high_watermark)
            if leading is not None:
                self._check_new_leader(history, copy, replica, leading)
        if log.high_watermark != copy.high_watermark or log.log_start > history.trimmed_to:
            self._observe_watermark(history, copy, replica)

    def _observe_watermark(self, history: History, copy: Copy, replica: Replica) -> None:
        log = replica.log
        watermark = log.high_watermark
        if log.log_start > history.trimmed_to:
            _fail("log start", history, replica, f"starts at {log.log_start}; deleted were {history.trimmed_to}")
        if watermark != copy.high_watermark:
            if not 0 <= log.log_start <= watermark <= log.log_end:
                _fail("offsets", history, replica, f"start {log.log_start}, hw {watermark}, end {log.log_end}")
            if history.is_outdated(log):
                return
            if watermark < copy.high_watermark and copy.leading_epoch is not None:
                _fail("hw goes back", history, replica, f"from {copy.high_watermark} to {watermark} while leading")
            self._check_watermark(history, copy, replica, watermark)
            copy.high_watermark = watermark

    def _cut(self, history: History, copy: Copy, replica: Replica) -> None:
        """A log is being cut back, or emptied: never what it knew to be committed, unless its medium was harmed."""
        log = replica.log
        is_excused = copy.is_unproven or copy.is_rotten
        if max(log.log_end, history.trimmed_to) < copy.high_watermark and not is_excused:
            _fail("truncated below the hw", history, replica, f"cut its log to {log.log_end}, hw {copy.high_watermark}")
        copy.truncations = log.truncations
        copy.is_held = True
        copy.uncut = copy.uncut or copy.mirror.copy(copy.durable_end)
        copy.mirror.cut(log.log_end)
        if log.log_end <= log.log_start:
            copy.mirror.reset(log.log_end)  # It is emptied: what is left in the mirror was deleted before.
        copy.durable_end = min(copy.durable_end, log.durable_end)
        copy.checked_end = min(copy.checked_end, log.log_end)
        copy.high_watermark = min(copy.high_watermark, log.log_end)

    def _released(self, copy: Copy, log: PartitionLog) -> None:
        """The cut is done: from here on the log is what its files are."""
        old, copy.mirror = copy.mirror, mirror_of(log)
        if copy.is_unproven or copy.is_rotten or log.damaged:
            fill_damage(copy.mirror, log, old)
        copy.is_held, copy.uncut = False, None
        copy.durable_end = log.durable_end
        copy.checked_end = min(copy.checked_end, log.log_end)

    def _take_in(self, history: History, copy: Copy, replica: Replica) -> None:
        log = replica.log
        if log.log_end < copy.mirror.end:
            _fail(
                "unannounced cut", history, replica,
                f"the log ended at {copy.mirror.end} and ends at {log.log_end} without having been truncated",
            )  # fmt: skip
        try:
            fresh = read_items(log, copy.mirror.end)
        except CorruptLog:
            if copy.is_unproven or copy.is_rotten or log.damaged:
                return  # It is known to be damaged there; once it has been repaired it can be read.
            raise
        for item in fresh:
            copy.mirror.add(item)
        if copy.mirror.end != log.log_end:
            _fail("offsets", history, replica, f"the log says {log.log_end}, its batches end at {copy.mirror.end}")

    def _check_new_leader(self, history: History, copy: Copy, replica: Replica, epoch: int) -> None:
        known = history.leaders.setdefault(epoch, (replica.node, replica.life))
        if known != (replica.node, replica.life):
            _fail(
                "one leader per epoch", history, replica,
                f"leads in epoch {epoch} in its life {replica.life}, as node {known[0]} did in its life {known[1]}",
            )  # fmt: skip
        if epoch < max(history.unclean_epoch, *history.leaders):
            return  # It does not know yet that it has been replaced; nothing it commits can contradict the newer one.
        start = replica.log.log_start
        if history.given_up_epoch < history.unclean_epoch <= epoch:
            history.give_up(copy, start, replica.log.high_watermark)
        missing = first_difference(history.committed.between(start, history.committed.end), copy.mirror)
        if missing is not None:
            _fail(
                "leader completeness", history, replica,
                f"leads in epoch {epoch} and has {missing[1] or 'nothing'} where {missing[0]} was committed",
            )  # fmt: skip

    def _check_watermark(self, history: History, copy: Copy, replica: Replica, watermark: int) -> None:
        """Compare what has become visible on a copy with what is committed; a leader's adds to it."""
        committed, start = history.committed, max(copy.checked_end, replica.log.log_start)
        fresh: list[Item] = []
        for item in copy.mirror.between(start, watermark):
            if item.next > watermark:
                _fail("offsets", history, replica, f"the high watermark {watermark} lies inside {item}")
            known = committed.at(item.base)
            if known is None and item.base >= committed.end:
                fresh.append(item)
            elif known != item:
                _fail("log matching", history, replica, f"has {item} below its hw, where {known} was committed")
        copy.checked_end = max(copy.checked_end, watermark)
        if fresh and copy.leading_epoch is None:
            _fail("hw of a follower", history, replica, f"exposes {fresh[0]}, which no leader has committed")
        for item in fresh:
            if item.base != committed.end:
                _fail("offsets", history, replica, f"commits {item} above a gap at {committed.end}")
            committed.add(item)
            self._check_committed(history, replica, item)

    def _check_committed(self, history: History, replica: Replica, item: Item) -> None:
        """A batch was committed just now: enough replicas, and all that may be elected, hold it durably."""
        if item.producer >= 0:
            # A leader that lost, or never had, what a producer sent before lets it begin anywhere.
            expected, end = history.sequences.get(item.producer, (0, history.trimmed_to + 1))
            may_begin = end <= history.trimmed_to or (item.producer not in history.sequences and history.has_given_up)
            if item.sequence != expected and not may_begin:
                _fail("exactly once", history, replica, f"committed {item}: sequence {item.sequence}, not {expected}")
            history.sequences[item.producer] = (item.sequence + item.next - item.base, item.next)
        holders = [
            node
            for node, copy in history.copies.items()
            if copy.durable_end >= item.next and copy.mirror.at(item.base) == item
        ]
        record = history.record
        if record is not None:
            lacking = [
                node for node in sorted(record.isr_nodes)
                if node not in holders and not history.copies[node].is_unproven
            ]  # fmt: skip
            if lacking:
                _fail("in sync", history, replica, f"committed {item}, which node {lacking[0]} in the ISR lacks")
        if len(holders) < history.min_isr and not any(copy.is_unproven for copy in history.copies.values()):
            _fail(
                "committed on too few", history, replica,
                f"committed {item} although only {holders} hold it durably and min_isr is {history.min_isr}",
            )  # fmt: skip

    # ── the record changed ───────────────────────────────────────────────────────────────────────────────────────

    def recorded(self, key: PartitionKey, state: PartitionState) -> None:
        """The metadata service has agreed on another record: who is in sync holds everything committed."""
        history = self.histories.get(key)
        if history is None:
            return
        old, history.record = history.record, state
        known = old.isr_nodes if old is not None else frozenset()
        if state.unclean_epoch > history.unclean_epoch:
            history.unclean_epoch = state.unclean_epoch
            return  # Nobody promises that who was elected holds anything.
        for node, life in state.isr:
            copy = history.copies[node]
            if node in known or (copy.is_unproven and copy.life != life):
                continue  # The record speaks of a life before the medium was harmed, which nobody can know yet.
            copy.is_unproven = False
            end, start = history.committed.end, copy.mirror.bases[0] if copy.mirror.bases else copy.mirror.start
            # What is deleted need not be there: its log may be on its way to begin anew behind it.
            missing = first_difference(history.committed.between(max(start, history.trimmed_to), end), copy.mirror)
            if missing is not None or copy.durable_end < end > history.trimmed_to:
                what = missing[0] if missing else f"everything up to {history.committed.end}"
                raise Violation("in sync", f"{history.name}: node {node} joined the ISR without {what}")

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────

    def acknowledged(self, replica: Replica, acks: int, base: int, crc: int, followers: int = 0) -> None:
        """A producer was told that its batch is kept: durably by this node (and so many others), or by all in sync."""
        history = self.histories.get(replica.key)
        if history is None:
            return
        copy = history.copies[replica.node]
        if base < history.trimmed_to:
            return  # It is deleted already, and kept by nobody.
        if acks == ACKS_ALL:
            item = history.committed.at(base)
            if history.is_outdated(replica.log):
                return
            if item is None or item.crc != crc:
                _fail(
                    "acks=all", history, replica, f"acknowledged offset {base}, where {item or 'nothing'} is committed"
                )
            return
        item = copy.mirror.at(base)
        if item is None or item.crc != crc or replica.log.durable_end < item.next:
            _fail(
                "acks=1", history, replica,
                f"acknowledged offset {base}, holding {item or 'nothing'} there, durable to {replica.log.durable_end}",
            )  # fmt: skip
        holders = [
            node
            for node, other in history.copies.items()
            if node != replica.node and other.mirror.at(base) == item and other.durable_end > base
        ]
        if len(holders) < followers and not any(other.is_unproven for other in history.copies.values()):
            _fail("acks=1 in sync mode", history, replica, f"acknowledged offset {base}, which only {holders} have")

    def read(self, replica: Replica, items: Iterable[Item]) -> None:
        """A reader was given batches, which it has verified: each must be committed."""
        history = self.histories.get(replica.key)
        if history is None or history.is_outdated(replica.log):
            return
        is_rotten = history.copies[replica.node].is_rotten
        for item in items:
            known = history.committed.at(item.base)
            if is_rotten and known is not None:
                item = item._replace(
                    epoch=known.epoch
                )  # No checksum covers it: found where replicas are read for, not here.
            if known != item:
                _fail("reads", history, replica, f"served {item}, where {known or 'nothing'} is committed")

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def unclean_epoch(self, key: PartitionKey) -> int:
        """Return the newest epoch of a partition that was begun without a promise, or -1."""
        history = self.histories.get(key)
        return -1 if history is None else history.unclean_epoch

    def difference_in_the_end(
        self, replicas: Iterable[Replica], key: PartitionKey, *, is_scrubbed: bool = False
    ) -> str | None:
        """Tell what keeps the copies of a partition from being equal and complete; None if nothing does.

        `is_scrubbed`: everything is read again in the background, so rot must have been found and repaired, too.
        """
        history = self.histories[key]
        committed = history.committed
        for replica in replicas:
            log, copy = replica.log, history.copies[replica.node]
            if log.write_error is not None:
                return f"node {replica.node} takes no writes: {log.write_error}"
            if not log.high_watermark == log.durable_end == log.log_end == committed.end:
                return (
                    f"node {replica.node} has hw {log.high_watermark}, durable {log.durable_end}, end {log.log_end}; "
                    f"committed is {committed.end}"
                )
            wrong = first_difference(committed.between(log.log_start, committed.end), copy.mirror)
            if wrong is not None:
                return f"node {replica.node} has {wrong[1] or 'nothing'} for {wrong[0]}"
            if is_scrubbed and (rot := rot_of(log)):
                return f"node {replica.node} is not sound: {rot}"
        return None


def _fail(invariant: str, history: History, replica: Replica, text: str) -> None:
    raise Violation(invariant, f"{history.name}: node {replica.node} {text}")


Observer = Callable[[Replica], None]
