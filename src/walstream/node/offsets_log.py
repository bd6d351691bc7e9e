"""Committed offsets on disk: the compacted topic `__consumer_offsets`, written to and read back at the start.

Invariant: the table shows a change only when its record is durable, and in the order of the records, so that what a
client was told is what a restart finds. The topic has one partition and is made by the first commit.

Changes that are written but not yet durable are counted by their key: whoever deletes the offsets of a group or of a
topic must delete those too, or they would come back to life behind the deletion.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from walstream import logs
from walstream.cluster.local import NewTopic
from walstream.errors import CoordinatorUnavailable, CorruptBatch, CorruptLog, WalstreamError
from walstream.log.batch import walk
from walstream.log.partition_log import PartitionLog
from walstream.log.records import Record, build_batch, iter_records
from walstream.log.store import LogStore
from walstream.node.offsets import Change, OffsetTable, decode, encode

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
RETRY_S = 1.0

Key = tuple[str, str, int]


class OffsetsLog:
    """The offsets of all groups, durable."""

    def __init__(self, store: LogStore) -> None:
        self.table = OffsetTable()
        self._store = store
        self._in_flight: Counter[Key] = Counter()

    async def load(self) -> None:
        """Read the topic into the table; what is damaged is reported and passed over."""
        if OFFSETS_TOPIC not in self._store.catalogue.topics:
            return
        partition = self._store.partition(OFFSETS_TOPIC, 0)
        if partition.replicated:
            await _visible(partition)
        records = await asyncio.to_thread(self._load, partition)
        log.info("offsets loaded", groups=len(self.table), records=records)

    def _load(self, partition: PartitionLog) -> int:
        records = 0
        for records, change in enumerate(_read(partition), start=1):  # noqa: B007 - the last number is the count
            self.table.apply(change)
        return records

    def known(self, group_id: str) -> bool:
        """Whether the group has offsets, or is about to."""
        return group_id in self.table or any(key[0] == group_id for key in self._in_flight)

    def keys(self, *, group_id: str | None = None, topics: Iterable[str] | None = None) -> set[Key]:
        """Return the keys of a group or of some topics, with those that are still on their way to the disk."""
        wanted = None if topics is None else set(topics)
        groups = self.table if group_id is None else (group_id,)
        keys = {(group, topic, index) for group in groups for topic, index in self.table.of(group)}
        keys.update(self._in_flight)
        return {
            key for key in keys if (group_id is None or key[0] == group_id) and (wanted is None or key[1] in wanted)
        }

    async def delete(self, keys: Iterable[Key]) -> None:
        """Forget offsets, durably."""
        await self.write([Change(*key, committed=None) for key in sorted(keys)])

    async def write(self, changes: list[Change]) -> None:
        """Write changes and return when all of them are durable; raises what kept one from it.

        A caller that is cancelled changes nothing: what was appended is applied when it is durable.
        """
        if not changes:
            return
        partition = self._partition()
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
        keys = [(change.group_id, change.topic, change.partition) for change in changes]
        self._in_flight.update(keys)

        def visible(error: WalstreamError | None) -> None:
            self._in_flight.subtract(keys)
            for key in keys:
                if self._in_flight[key] == 0:
                    del self._in_flight[key]
            if error is None:
                for change in changes:
                    self.table.apply(change)
            done(error)

        partition.when_visible(appended.last_offset, visible)

    def _partition(self) -> PartitionLog:
        if OFFSETS_TOPIC not in self._store.catalogue.topics:
            if self._store.replicated:
                raise CoordinatorUnavailable("The controller has not made the topic of the offsets yet.")
            self._store.create_topics([NewTopic(OFFSETS_TOPIC, 1, TOPIC_CONFIG)])
            log.info("offsets topic created", topic=OFFSETS_TOPIC)
        return self._store.partition(OFFSETS_TOPIC, 0)


async def _visible(partition: PartitionLog) -> None:
    """Wait until a new leader can say that everything in its log is there to stay."""
    while True:
        future: asyncio.Future[WalstreamError | None] = asyncio.get_running_loop().create_future()
        waiter = partition.when_visible(
            partition.log_end - 1,
            lambda error, future=future: None if future.done() else future.set_result(error),  # type: ignore[misc]
        )
        try:
            if await future is None:
                return
        finally:
            waiter.cancel()
        await asyncio.sleep(RETRY_S)


def _batches(changes: list[Change]) -> Iterator[list[Change]]:
    """Split changes into what fits into one batch each."""
    batch: list[Change] = []
    size = 0
    for change in changes:
        metadata = change.committed.metadata if change.committed is not None else ""
        # At most four bytes a character, and fifty for numbers and lengths.
        change_bytes = 4 * (len(change.group_id) + len(change.topic) + len(metadata)) + 50
        if batch and size + change_bytes > BATCH_BYTES_MAX:
            yield batch
            batch, size = [], 0
        batch.append(change)
        size += change_bytes
    yield batch


def _read(partition: PartitionLog) -> Iterator[Change]:
    """Yield every change in the partition, oldest first. Blocks."""
    offset, end = partition.log_start, partition.high_watermark
    while offset < end:
        try:
            data = partition.read_blocking(offset, READ_BYTES)
        except CorruptLog as error:
            log.error("committed offsets are damaged", offset=offset, error=str(error))
            offset = next((stop for start, stop in partition.damaged if start <= offset < stop), offset + 1)
            continue
        if not data:
            break
        for position, header in walk(data):
            yield from _changes(data[position : position + header.length], offset)
            offset = header.next_offset


def _changes(batch: memoryview, first_offset: int) -> Iterator[Change]:
    """Yield the changes of one batch from an offset on; a record of another kind is reported and passed over."""
    for record in iter_records(batch):
        if record.offset >= first_offset:
            try:
                yield decode(record.key, record.value)
            except CorruptBatch as error:
                log.error("a committed offset cannot be read", offset=record.offset, error=str(error))
