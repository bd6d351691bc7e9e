"""The sink: rows into the log, commit points behind them, and news of what is durable.

Owns the life of one generation's writing; refuses to know PostgreSQL and the content of rows. The first failure, in
whichever thread, ends everything; what was on its way then may still arrive, and is void.

    caller's thread    write(outputs) … end_group(lsn)        rows of the next group, while earlier ones are in flight
    rows' thread       last row of each partition delivered ▶ the group is complete ▶ its point is produced
    points' thread     the point is delivered ▶ it is valid ▶ on_durable(lsn), and the next point

The rows of snapshots go beside the stream in lanes of their own, into the same partitions; they are counted in
`snapshot` records instead of points.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from confluent_kafka import KafkaError, Message

from walstream.capture.commit_points import PointRecord, TableSnapshot
from walstream.capture.groups import Group
from walstream.capture.kafka import LogAddress
from walstream.capture.ledger import Ledger, Written
from walstream.capture.point_writer import PointWriter
from walstream.capture.producers import Failure
from walstream.capture.provenance import Output
from walstream.capture.row_writer import Lane, RowWriter
from walstream.capture.topics import Topics
from walstream.errors import WalstreamError
from walstream.positions import ZERO, Lsn, TopicPartition

STALL_S_MAX: Final = 600.0
"""A log that takes nothing for so long ends the generation, so that a supervisor hears of it."""
DRAIN_S_MAX: Final = 30.0


class SnapshotLane(Lane):
    """The rows of one table's snapshot."""

    __slots__ = ("done", "first", "group", "snapshot")

    def __init__(self, snapshot: TableSnapshot) -> None:
        super().__init__(on_first=lambda partition: partial(self._begun, partition))
        self.snapshot = snapshot
        self.first: dict[TopicPartition, int] = {}
        self.group: Group | None = None
        self.done: Callable[[], None] | None = None

    def _begun(self, partition: TopicPartition, error: KafkaError | None, message: Message) -> None:
        # Should it have failed, so does the last row, and that one says so.
        if error is None:
            self.first[partition] = message.offset() or 0


class Sink:
    """Writes for one generation. Its methods belong to one thread, but for `fail` and `durable`."""

    def __init__(
        self,
        address: LogAddress,
        topics: Topics,
        *,
        on_durable: Callable[[Lsn], None],
        tend: Callable[[], None] | None = None,
        on_tick: Callable[[], None] | None = None,
        stall_s_max: float = STALL_S_MAX,
    ) -> None:
        """Connect. `tend` is called while the caller has to wait; `on_durable` and `on_tick` by a thread of ours."""
        self.failure = Failure()
        self.durable: PointRecord | None = None
        """The last point that is durable and valid."""
        self._on_durable = on_durable
        self._tend = tend
        self._stall_s_max = stall_s_max
        self._stream = Lane()
        self._callbacks: deque[Callable[[], None]] = deque()
        self.points = PointWriter(address, topics, self.failure, on_durable=self._point_durable, on_tick=on_tick)
        self._rows = RowWriter(
            address,
            topics,
            self.failure,
            tend=tend or (lambda: None),
            on_topic=self.points.know_topic,
            stall_s_max=stall_s_max,
        )

    def begin(self, ledger: Ledger) -> None:
        """Begin to write a generation: its first point says where it resumes, with the full vector."""
        self.points.begin(ledger)
        self.end_group(ledger.end_lsn)

    def write_now(self, topic: str, key: bytes | None, value: bytes) -> int:
        """Write a record of an internal topic and wait, as long as the log may be away, until it is durable."""
        return self.points.write_now(topic, key, value, self._stall_s_max)

    def write(self, outputs: Iterable[Output], timestamp_ms: int) -> None:
        """Hand rows of the current group over to the producer, waiting while it is full."""
        self._rows.write(self._stream, outputs, timestamp_ms)

    def end_group(self, end_lsn: Lsn, xid: int = 0, commit_time_us: int = 0) -> None:
        """Close the group: with it, every transaction before `end_lsn` is written. Without rows: an empty point."""
        lane = self._stream
        group = Group(Written(end_lsn, xid, commit_time_us, rows=lane.rows, bytes=lane.bytes), time.monotonic())
        self.points.add(group)
        self._rows.end(lane, lambda partition: partial(self.points.delivered, group, partition))

    def hurry(self) -> None:
        """Say that nothing more comes for now: rows need not wait for company. Waits for them, up to 0.1 s.

        What comes meanwhile is the next group: few transactions travel alone, many together, without a rate to set.
        """
        self._rows.hurry(self.points.rows_arrived)

    @property
    def is_busy(self) -> bool:
        """Whether so many rows are on their way that more of them are no news."""
        return self._rows.is_busy

    @property
    def is_full(self) -> bool:
        """Whether rows that need not come now had better wait."""
        return self._rows.is_full

    @property
    def is_idle(self) -> bool:
        """Whether every group that was closed is durable, with its point."""
        return self.points.since_s is None

    def check(self) -> None:
        """Raise what has failed, or that the log has been silent for too long."""
        self.failure.check()
        since_s = self.points.since_s
        if since_s is not None and time.monotonic() - since_s > self._stall_s_max:
            self.fail(self._rows.polled.silent(f"rows have waited for {self._stall_s_max:g} seconds"))
            self.failure.check()

    def drain(self, timeout_s: float = DRAIN_S_MAX) -> None:
        """Wait until every group that was closed is durable, with its point."""
        self.hurry()
        late = partial(self._rows.polled.silent, "the last rows are not durable")
        self.failure.wait(lambda: self.is_idle, timeout_s, late, self._tend)

    def fail(self, error: WalstreamError) -> None:
        """End the generation. May be called by any thread."""
        self.failure.set(error)

    def close(self) -> None:
        """Stop. What is not durable is forgotten here and, should it arrive later, void there."""
        self._rows.close()
        self.points.close()

    def begin_snapshot(self, snapshot: TableSnapshot) -> SnapshotLane:
        """Say that the rows of a table begin; return the lane to write them with."""
        self.points.begin_snapshot(snapshot)
        return SnapshotLane(snapshot)

    def snapshot_rows(self, lane: SnapshotLane, outputs: Iterable[Output], timestamp_ms: int) -> None:
        """Hand rows of a table over to the producer."""
        self._rows.write(lane, outputs, timestamp_ms)

    def finish_snapshot(self, lane: SnapshotLane, on_durable: Callable[[], None] | None = None) -> None:
        """Say that the table's rows are complete, once they are durable; `on_durable` runs in `run_callbacks`."""
        lane.done = on_durable
        group = lane.group = Group(Written(ZERO, rows=lane.rows, bytes=lane.bytes), time.monotonic())
        self._rows.end(lane, lambda partition: partial(self._snapshot_delivered, lane, group, partition))
        if group.waiting:
            self._rows.polled.hurry()
        else:
            self._snapshot_complete(lane, group)

    def run_callbacks(self) -> None:
        """Tell, in this thread, who waits for snapshots that have become durable."""
        while self._callbacks:
            self._callbacks.popleft()()

    def _point_durable(self, record: PointRecord, lsn: Lsn) -> None:
        self.durable = record
        self._on_durable(lsn)

    def _snapshot_delivered(
        self, lane: SnapshotLane, group: Group, partition: TopicPartition, error: KafkaError | None, message: Message
    ) -> None:
        offset = self._rows.polled.offset(partition.topic, error, message)
        if offset is not None and group.delivered(partition, offset):
            self._snapshot_complete(lane, group)

    def _snapshot_complete(self, lane: SnapshotLane, group: Group) -> None:
        # A partition with one row has reported only its last.
        start = {partition: lane.first.get(partition, offset) for partition, offset in group.written.last.items()}
        done = lane.done or (lambda: None)
        self.points.finish_snapshot(lane.snapshot, start, group.written, lambda: self._callbacks.append(done))
