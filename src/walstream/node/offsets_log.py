"""Committed offsets on disk: the compacted topic `__consumer_offsets`, written to, and read when a coordinator begins.

Invariant: the table is what the topic says below its high watermark. A change is applied when its record is committed,
in the order of the records, whatever became of the request that asked for it: a commit that was refused after its
append (too few replicas in sync, a time-out) is committed with the records around it. A replica that can be repaired is
not read past damage. The topic has one partition and is created by the first commit.

Changes that are appended and not yet committed count among the keys: a deletion of the offsets of a group or of a topic
covers them, or they would come back to life behind the deletion.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from walstream import logs
from walstream.cluster.local import Change as CatalogueChange
from walstream.cluster.local import NewTopic
from walstream.errors import CoordinatorUnavailable, CorruptBatch, CorruptLog, NotLeader, WalstreamError
from walstream.log.batch import walk
from walstream.log.partition_log import PartitionLog
from walstream.log.records import Record, build_batch, iter_records
from walstream.log.store import LogStore
from walstream.node.catalogue_changes import change_catalogue
from walstream.node.offsets import SINCE_UNKNOWN, Change, Committed, OffsetTable, decode, encode

log = logs.get(__name__)

OFFSETS_TOPIC = "__consumer_offsets"
READ_BYTES = 1024 * 1024
BATCH_BYTES_MAX = 256 * 1024
"""A commit of more than this many bytes is written as several batches, to stay below `max.message.bytes`."""

TOPIC_CONFIG = {
    "cleanup.policy": "compact",
    "max.message.bytes": str(1024 * 1024),
    # Only closed segments are compacted, and the whole topic is read at each start: small segments keep it short.
    "segment.bytes": str(8 * 1024 * 1024),
}

REPLICATION_TIMEOUT_S = 5.0
"""How long a commit waits for other nodes."""
VISIBLE_TIMEOUT_S = 30.0
"""How long a load waits until the log's end is committed, before it fails and is retried."""

Key = tuple[str, str, int]


class OffsetsLog:
    """The offsets of all groups, durable."""

    def __init__(self, store: LogStore, outdated: Callable[[], None] | None = None) -> None:
        """`outdated` is called once, when the log was reopened or truncated: then the table has to be loaded again."""
        self.table = OffsetTable()
        self._store = store
        self._outdated = outdated
        self._in_flight: Counter[Key] = Counter()
        self._pending: deque[tuple[int, list[Change]]] = deque()
        """(last offset, changes) of what is appended and not yet below the high watermark."""
        self._partition: PartitionLog | None = None
        self._truncations = 0
        self._unsubscribe: Callable[[], None] | None = None

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def load(self) -> None:
        """Read the topic into the table, all of it.

        Raises where that is not possible now: what the log raises, or CorruptLog for damage that can be repaired. On
        the only replica of the topic, damage is reported and skipped: no other has what it held.
        """
        if OFFSETS_TOPIC not in self._store.catalogue.topics:
            return
        partition = self._follow()
        partition.check_opened()
        if partition.replicated:
            if not partition.is_leader:
                raise NotLeader(f"This node does not lead {partition.name}.")
            try:
                async with asyncio.timeout(VISIBLE_TIMEOUT_S):
                    await _visible(partition)
            except TimeoutError:
                raise CoordinatorUnavailable(
                    f"The end of {partition.name} is not committed: {partition.log_end - partition.high_watermark} "
                    "records are not on all in-sync replicas."
                ) from None
        is_only = self._is_only_replica()
        if partition.damaged and not is_only:
            raise self._damaged(partition)
        try:
            records = await asyncio.to_thread(self._load, partition, skips_damage=is_only)
        except CorruptLog as error:
            raise self._damaged(partition) from error
        if partition.truncations != self._truncations:
            raise NotLeader(f"{partition.name} was reopened while its offsets were read.")
        log.info("offsets loaded", groups=len(self.table), records=records)
        if partition.damaged:
            log.error(
                "committed offsets lost", partition=partition.name, damaged=partition.damaged,
                hint="No other replica has them: groups that committed there resume from earlier commits.",
            )  # fmt: skip

    def _is_only_replica(self) -> bool:
        catalogue = self._store.catalogue
        return not self._store.replicated or catalogue.topics[OFFSETS_TOPIC].replicas == [catalogue.node_id]

    @staticmethod
    def _damaged(partition: PartitionLog) -> CorruptLog:
        return CorruptLog(
            f"Committed offsets are damaged in {partition.name}: offsets "
            + ", ".join(f"{start} to {stop - 1}" for start, stop in partition.damaged)
            + ".",
            "The groups wait for a repair from another replica. If none of them has these offsets, let another node "
            "lead the topic: [[replication.leaders]], on all nodes.",
        )

    def _load(self, partition: PartitionLog, *, skips_damage: bool) -> int:
        records = 0
        for records, change in enumerate(_read(partition, skips_damage=skips_damage), start=1):  # noqa: B007
            self.table.apply(change)
        return records

    def _follow(self) -> PartitionLog:
        """Return the partition; from the first call on its advances are followed."""
        if self._partition is None:
            self._partition = partition = self._store.partition(OFFSETS_TOPIC, 0)
            self._truncations = partition.truncations
            self._unsubscribe = partition.on_advance(self._apply_committed)
        return self._partition

    def close(self) -> None:
        """Stop following the log."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._outdated = None

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────

    def known(self, group_id: str) -> bool:
        """Return whether the group has offsets, or some that are not committed yet."""
        return group_id in self.table or any(key[0] == group_id for key in self._in_flight)

    def is_in_flight(self, key: Key) -> bool:
        """Return whether a change of this offset is appended and not committed yet."""
        return key in self._in_flight

    def keys(self, *, group_id: str | None = None, topics: Iterable[str] | None = None) -> set[Key]:
        """Return the keys of a group or of some topics, with those that are not committed yet."""
        wanted = None if topics is None else set(topics)
        groups = self.table if group_id is None else (group_id,)
        keys = {(group, topic, index) for group in groups for topic, index in self.table.of(group)}
        keys.update(self._in_flight)
        return {
            key for key in keys if (group_id is None or key[0] == group_id) and (wanted is None or key[1] in wanted)
        }

    def keys_of_deleted_topics(self) -> set[Key]:
        """Return the keys of offsets that belong to a topic that was deleted, created again since or not."""
        gone = {
            (group, topic, index)
            for group in self.table
            for (topic, index), committed in self.table.of(group).items()
            if self.is_of_deleted_topic(topic, committed)
        }
        for _, changes in self._pending:
            for change in changes:
                key = (change.group_id, change.topic, change.partition)
                if change.committed is not None and self.is_of_deleted_topic(change.topic, change.committed):
                    gone.add(key)
                else:
                    gone.discard(key)
        return gone

    def is_of_deleted_topic(self, topic: str, committed: Committed) -> bool:
        """Return whether the topic that an offset was committed for has been deleted.

        A catalogue older than the topic proves nothing: the node that took the commit knew more.
        """
        catalogue = self._store.catalogue
        known = catalogue.topics.get(topic)
        if committed.topic_since == SINCE_UNKNOWN:
            return known is None
        return committed.topic_since <= catalogue.version if known is None else committed.topic_since < known.since

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def delete(self, keys: Iterable[Key]) -> None:
        """Forget offsets, durably."""
        await self.write([Change(*key, committed=None) for key in sorted(keys)])

    async def write(self, changes: list[Change]) -> None:
        """Write changes and return when all of them are committed; raises what kept one from it.

        What was appended is applied when it is committed, also if this was cancelled, or has raised, before.
        """
        if not changes:
            return
        await self.prepare()
        if OFFSETS_TOPIC not in self._store.catalogue.topics:
            raise CoordinatorUnavailable("The controller has not made the topic of the offsets yet.")
        partition = self._follow()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batches = list(_batches(changes))
        left = len(batches)

        def done(error: WalstreamError | None) -> None:
            nonlocal left
            left -= 1
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif left == 0:
                future.set_result(None)

        for number, batch in enumerate(batches):
            try:
                self._append(partition, batch, done)
            except WalstreamError as error:
                if number == 0:
                    raise
                done(error)
                break
        if not partition.replicated:
            await future
            return
        try:
            async with asyncio.timeout(REPLICATION_TIMEOUT_S):
                await future
        except TimeoutError:
            raise CoordinatorUnavailable(
                "The offsets are not on all in-sync replicas yet.", "They may still become visible. Commit again."
            ) from None

    def _append(
        self, partition: PartitionLog, changes: list[Change], done: Callable[[WalstreamError | None], None]
    ) -> None:
        now_ms = self._store.now_ms()
        records = [Record(offset, now_ms, *encode(change)) for offset, change in enumerate(changes)]
        appended = partition.append(memoryview(build_batch(records)), now_ms=now_ms)
        self._in_flight.update(_keys(changes))
        self._pending.append((appended.last_offset, changes))

        def visible(error: WalstreamError | None) -> None:
            self._apply_committed()
            done(error)

        partition.when_visible(appended.last_offset, visible)

    def _apply_committed(self) -> None:
        """Apply what has passed the high watermark. Called at each advance of the log."""
        partition, pending = self._partition, self._pending
        assert partition is not None
        if partition.truncations != self._truncations:
            # What is pending may be lost, and other records have its offsets.
            outdated, self._outdated = self._outdated, None
            if outdated is not None:
                outdated()
            return
        while pending and pending[0][0] < partition.high_watermark:
            _, changes = pending.popleft()
            for change in changes:
                self.table.apply(change)
            keys = _keys(changes)
            self._in_flight.subtract(keys)
            for key in keys:
                if self._in_flight[key] == 0:
                    del self._in_flight[key]

    async def prepare(self) -> None:
        """Create the topic if it does not exist; in a cluster that is for the controller to do."""
        catalogue = self._store.catalogue

        def plan() -> CatalogueChange | None:
            is_missing = OFFSETS_TOPIC not in catalogue.topics
            return catalogue.create([NewTopic(OFFSETS_TOPIC, 1, TOPIC_CONFIG)]) if is_missing else None

        if OFFSETS_TOPIC in catalogue.topics or self._store.replicated:
            return
        if await change_catalogue(self._store, plan) is not None:
            log.info("offsets topic created", topic=OFFSETS_TOPIC)


def _keys(changes: Iterable[Change]) -> list[Key]:
    return [(change.group_id, change.topic, change.partition) for change in changes]


async def _visible(partition: PartitionLog) -> None:
    """Wait until a new leader knows that everything in its log is committed."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: WalstreamError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    waiter = partition.when_visible(partition.log_end - 1, done)
    try:
        await future
    finally:
        waiter.cancel()


def _batches(changes: list[Change]) -> Iterator[list[Change]]:
    """Split changes into what fits into one batch each."""
    batch: list[Change] = []
    size = 0
    for change in changes:
        metadata = change.committed.metadata if change.committed is not None else ""
        # At most four bytes a character, and fifty-eight for numbers and lengths.
        change_bytes = 4 * (len(change.group_id) + len(change.topic) + len(metadata)) + 58
        if batch and size + change_bytes > BATCH_BYTES_MAX:
            yield batch
            batch, size = [], 0
        batch.append(change)
        size += change_bytes
    yield batch


def _read(partition: PartitionLog, *, skips_damage: bool) -> Iterator[Change]:
    """Yield every change in the partition, oldest first. Blocks. Raises CorruptLog unless damage is to be skipped."""
    offset, end = partition.log_start, partition.high_watermark
    while offset < end:
        try:
            data = partition.read_blocking(offset, READ_BYTES)
        except CorruptLog as error:
            if not skips_damage:
                raise
            log.error("committed offsets are damaged", offset=offset, error=str(error))
            offset = next((stop for start, stop in partition.damaged if start <= offset < stop), offset + 1)
            continue
        if not data:
            break
        for position, header in walk(data):
            yield from _changes(data[position : position + header.length], offset)
            offset = header.next_offset


def _changes(batch: memoryview, first_offset: int) -> Iterator[Change]:
    """Yield the changes of one batch from an offset on; what a stranger wrote there is reported and skipped."""
    try:
        for record in iter_records(batch):
            if record.offset >= first_offset:
                try:
                    yield decode(record.key, record.value)
                except CorruptBatch as error:
                    log.error("a committed offset cannot be read", offset=record.offset, error=str(error))
    except CorruptBatch as error:
        log.error("a batch of committed offsets cannot be read", offset=first_offset, error=str(error))
