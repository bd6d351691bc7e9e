"""Clients that look up offsets by time, and the records that the answers are compared with.

An answer must fit the visible range of the node's log at some moment of the look-up: the first committed record at or
after the time, or the first with the largest timestamp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from walstream.log.batch import parse_header
from walstream.log.records import Record, build_batch, iter_records
from walstream.node.api.offsets import MAX_TIMESTAMP, list_offsets
from walstream.node.schemas import Message
from walstream.sim.checkers import ACKS_ALL, Violation
from walstream.sim.clock import MS, SECOND

if TYPE_CHECKING:
    from walstream.cluster.metadata import PartitionKey
    from walstream.sim.api import SimApi
    from walstream.sim.cluster import Cluster
    from walstream.sim.copies import Copy
    from walstream.sim.node import SimNode

PRODUCE_US = (10 * MS, 200 * MS)
LOOK_UP_US = (10 * MS, 150 * MS)
TRIM_US = (100 * MS, 1 * SECOND)
FINISH_AGAIN_US = 200 * MS
OUTLIER_MS = 60_000

Range = tuple[int, int]
"""The visible offsets of a log: from its start to its high watermark."""
Found = tuple[int, int]
"""Offset and timestamp."""


class Records:
    """The timestamps of all records that were sent, by the checksum of their batch. Kept only where they are needed."""

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._times: dict[int, list[int]] = {}

    def appending(self, batch: bytearray) -> None:
        """Note a batch before a log takes it."""
        if self._is_kept:
            self._times[parse_header(batch).crc] = [record.timestamp_ms for record in iter_records(memoryview(batch))]

    def times(self, crc: int) -> list[int]:
        """Return the timestamps of a batch."""
        return self._times[crc]


@dataclass(frozen=True, slots=True)
class View:
    """What a node's log was at one moment."""

    copy: Copy
    epoch: int | None
    truncations: int
    start: int
    end: int

    @classmethod
    def of(cls, copy: Copy) -> View:
        """Take the view of a log now."""
        log = copy.log
        return cls(copy, copy.leading_epoch, log.truncations, log.log_start, log.high_watermark)


class Lookups:
    """A producer whose timestamps are out of order, and a client that looks them up."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._key: PartitionKey = (cluster.client_topics[0].id, 0)
        self._topic = cluster.client_topics[0].name
        self._last_code = 0
        self._left = 0
        """How many look-ups must still be answered at the end of the run."""
        self._is_over = False
        self.answers = 0

    def start(self) -> None:
        """Begin."""
        self._later(PRODUCE_US, self._produce)
        self._later(LOOK_UP_US, self._look_up)
        self._later(TRIM_US, self._trim)

    def stop(self) -> None:
        """Begin nothing more."""
        self._is_over = True

    def finish(self) -> None:
        """Look up once more: the largest timestamp, and any time."""
        self._left = 2
        self._ask(MAX_TIMESTAMP)

    def unfinished(self) -> str | None:
        """Return what keeps look-ups from being answered."""
        return f"a look-up by time got code {self._last_code} last" if self._left else None

    def _later(self, within_us: tuple[int, int], act: object) -> None:
        def happen() -> None:
            if not self._is_over:
                act()  # type: ignore[operator]
                self._later(within_us, act)

        self._clock.after(self._clock.between(*within_us), happen)

    # ── what is written and deleted ──────────────────────────────────────────────────────────────────────────────

    def _produce(self) -> None:
        """Write records whose times are out of order; now and then the first of a batch is far ahead."""
        clock = self._clock
        times = [clock.now_ms + clock.between(-50, 50) for _ in range(clock.between(1, 4))]
        if clock.chance(0.15):
            ahead_ms = clock.between(2, OUTLIER_MS)
            times[0] += ahead_ms
            times[-1] += ahead_ms // 2
        batch = build_batch([Record(i, time, None, b"timed") for i, time in enumerate(times)])
        node = self._cluster.leader_for_client(self._key)
        if node is not None:
            node.produce(self._key, batch, ACKS_ALL, lambda _: None)

    def _trim(self) -> None:
        """Delete the beginning of the log up to the middle of a batch."""
        node = self._cluster.leader_for_client(self._key)
        if node is not None:
            node.run(partial(self._trim_on, node))

    def _trim_on(self, node: SimNode) -> None:
        copy = node.copies.get(self._key)
        if copy is None or copy.leading_epoch is None:
            return
        committed, records = self._cluster.checkers.histories[self._key].committed, self._cluster.records
        start, end = copy.log.log_start, copy.log.high_watermark
        batches = [item for item in committed.between(start, end) if item.base + 1 < item.next <= end]
        if batches and self._clock.chance(0.5):
            item = max(batches, key=lambda item: records.times(item.crc)[0])
        elif batches:
            item = self._clock.random.choice(batches)
        else:
            return
        node.trim_to(copy, item.base + 1)

    # ── look-ups ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_up(self) -> None:
        clock = self._clock
        if clock.chance(0.5):
            self._ask(MAX_TIMESTAMP)
        else:
            self._ask(clock.now_ms + clock.between(-5_000, 1_000) + (OUTLIER_MS // 2 if clock.chance(0.2) else 0))

    def _ask(self, timestamp_ms: int) -> None:
        node = self._cluster.leader_for_client(self._key)
        if node is not None:
            self._clock.after(
                self._cluster.client_delay_us(), partial(node.run, partial(self._arrive, node, timestamp_ms))
            )
        if self._is_over:
            self._clock.after(FINISH_AGAIN_US, self._ask_again)

    def _ask_again(self) -> None:
        if self._left:
            self._ask(MAX_TIMESTAMP if self._left > 1 else self._clock.now_ms - self._clock.between(0, OUTLIER_MS))

    def _arrive(self, node: SimNode, timestamp_ms: int) -> None:
        copy = node.copies.get(self._key)
        if copy is not None and node.api is not None:
            node.api.handle(self._handle(node, node.api, copy, timestamp_ms))

    async def _handle(self, node: SimNode, api: SimApi, copy: Copy, timestamp_ms: int) -> None:
        before = View.of(copy)
        partition = Message({"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp_ms})
        request = Message({"topics": [Message({"name": self._topic, "partitions": [partition]})]})
        reply = (await list_offsets(api.context, request))["topics"][0]["partitions"][0]
        self._last_code = int(reply.get("error_code", 0))
        after = View.of(copy)
        if self._last_code or (before.epoch, before.truncations) != (after.epoch, after.truncations):
            return
        found = None if reply["offset"] < 0 else (int(reply["offset"]), int(reply["timestamp"]))
        self._judge(node, timestamp_ms, before, after, found)
        self.answers += 1
        if self._left and self._is_over:
            self._left -= 1

    def _judge(self, node: SimNode, timestamp_ms: int, before: View, after: View, found: Found | None) -> None:
        """Compare an answer with the committed records, in the range that was visible before and after it."""
        history = self._cluster.checkers.histories[self._key]
        if history.has_given_up or history.copies[node.id].is_rotten:
            return  # What was committed may be lost, or read back as something else.
        offset = after.end if found is None else found[0]
        records = list(self._records(before.start, after.end))
        # The log may have begun and ended anywhere between the two views: this range is the one that fits best.
        start, end = min(after.start, offset), before.end if found is None else max(before.end, offset + 1)
        if timestamp_ms == MAX_TIMESTAMP:
            visible = [record for record in records if start <= record[0] < end]
            expected = max(visible, key=lambda record: (record[1], -record[0]), default=None)
        else:
            expected = next((one for one in records if start <= one[0] < end and one[1] >= timestamp_ms), None)
        if found != expected or not before.start <= offset <= after.end:
            asked = "the largest timestamp" if timestamp_ms == MAX_TIMESTAMP else f"timestamp {timestamp_ms}"
            raise Violation(
                "time look-ups",
                f"{self._topic}-0: node {node.id} answers {found} to {asked}, not {expected}; visible are offsets "
                f"{start} to {end}",
            )

    def _records(self, start: int, end: int) -> Iterator[Found]:
        """Yield offset and timestamp of the committed records in a range."""
        history, records = self._cluster.checkers.histories[self._key], self._cluster.records
        for item in history.committed.items:
            if item.next > start and item.base < end:
                for index, time in enumerate(records.times(item.crc)):
                    yield item.base + index, time
