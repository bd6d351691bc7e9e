"""The ledger: what a running generation has made durable, and so what its next commit point says.

Owns the vector, the totals and the rhythm of full vectors of one generation; refuses to know producers and threads: it
is told what was delivered and returns records. Invariants: a record is made only of rows that were delivered, `next`
never goes back, and the totals continue those of the point that the generation resumed from.

It also watches who else writes to the commits topic. The records of a sole writer lie side by side; where they do not,
somebody's record lies between, and only after a look at it (`Gap`) may the point be called valid and confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from walstream.capture.commit_points import (
    FULL_INTERVAL,
    Origin,
    Point,
    PointRecord,
    SnapshotRecord,
    TableSnapshot,
    Vector,
    texts,
)
from walstream.errors import LogLost
from walstream.positions import Lsn, TopicPartition

NEW_EPOCH: Final = "To begin anew all the same, with a new snapshot: walstream capture run --new-epoch"


@dataclass(slots=True)
class Written:
    """What one group, or several merged ones, put into the log."""

    end_lsn: Lsn
    last_xid: int = 0
    last_commit_time_us: int = 0
    last: dict[TopicPartition, int] = field(default_factory=dict)
    """The largest delivered offset per partition."""
    rows: dict[TopicPartition, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, later: Written) -> None:
        """Take in the group that follows."""
        self.end_lsn = later.end_lsn
        if later.last_xid:
            self.last_xid, self.last_commit_time_us = later.last_xid, later.last_commit_time_us
        self.last |= later.last
        for partition, count in later.rows.items():
            self.rows[partition] = self.rows.get(partition, 0) + count
        self.bytes += later.bytes


class Gap(NamedTuple):
    """Offsets of the commits topic that hold records of somebody else: `first` up to, not including, `stop`."""

    first: int
    stop: int


class Ledger:
    """The books of one generation."""

    def __init__(self, gen: int, origin: Origin, base: Point) -> None:
        """Begin with the point that the generation resumes from, or with one that is empty, in a new log."""
        self.gen = gen
        self.source_epoch = base.source_epoch
        self.end_lsn = base.end_lsn
        self.rows_total = base.rows_total
        self.bytes_total = base.bytes_total
        self.next: dict[TopicPartition, int] = dict(base.next)
        self.topic_ids = dict(base.topic_ids)
        self.snapshots = dict(base.snapshots)
        self._origin = origin
        self._last_xid = base.last_xid
        self._last_commit_time_us = base.last_commit_time_us
        self._until_full = 0
        self._sole_until = gen + 1
        self._told_topics: set[str] = set()

    def point(self, written: Written) -> PointRecord:
        """Make the record for rows that are durable; the first one and every thousandth has the full vector."""
        assert written.end_lsn >= self.end_lsn, "a point never goes back"
        self._advance(written.last, written.rows, self.next)
        self.end_lsn = written.end_lsn
        if written.last_xid:
            self._last_xid, self._last_commit_time_us = written.last_xid, written.last_commit_time_us
        self.rows_total += sum(written.rows.values())
        self.bytes_total += written.bytes
        is_full = self._until_full == 0
        self._until_full = FULL_INTERVAL - 1 if is_full else self._until_full - 1
        changed: Vector = self.next if is_full else {partition: self.next[partition] for partition in written.rows}
        return PointRecord(
            gen=self.gen,
            source_epoch=self.source_epoch,
            end_lsn=str(self.end_lsn),
            last_xid=self._last_xid,
            last_commit_time_us=self._last_commit_time_us,
            rows_total=self.rows_total,
            bytes_total=self.bytes_total,
            next=texts(changed),
            rows=texts(written.rows),
            topic_ids=dict(self.topic_ids) if is_full else self._new_topics(written.rows),
            is_full=is_full,
            sole_until=self._sole_until if is_full else 0,
            origin=self._origin if is_full else None,
            snapshots=list(self.snapshots.values()) if is_full else [],
        )

    def begin_snapshot(self, snapshot: TableSnapshot) -> SnapshotRecord:
        """Make the record that precedes the rows of a table."""
        return SnapshotRecord(self.gen, self.source_epoch, "begin", snapshot)

    def finish_snapshot(self, snapshot: TableSnapshot, start: Vector, written: Written) -> SnapshotRecord:
        """Make the record that says that a table's rows are all there, from the offsets of its first rows on."""
        rows, stop = written.rows, dict(start)
        self._advance(written.last, rows, stop)
        self.rows_total += sum(rows.values())
        self.bytes_total += written.bytes
        snapshot = msgspec.structs.replace(snapshot, rows=sum(rows.values()), next=texts(stop))
        self.snapshots[snapshot.schema, snapshot.table] = snapshot
        return SnapshotRecord(
            self.gen,
            self.source_epoch,
            "finished",
            snapshot,
            start=texts(start),
            next=texts(stop),
            rows=texts(rows),
            rows_total=self.rows_total,
            bytes_total=self.bytes_total,
            topic_ids=self._new_topics(rows),
        )

    def identify(self, name: tuple[str, str], identity: str) -> None:
        """Keep a later identity of a table whose rows it proves; the next point is a full one, which has it."""
        if (known := self.snapshots.get(name)) is not None:
            self.snapshots[name] = msgspec.structs.replace(known, identity=identity)
            self._until_full = 0

    def disprove(self, name: tuple[str, str]) -> None:
        """Forget the snapshot of a table whose rows are not whole any more; the next point is a full one."""
        if self.snapshots.pop(name, None) is not None:
            self._until_full = 0

    def landed(self, offset: int, inspect: Callable[[Gap], None]) -> None:
        """Note where a record of ours landed, which proves it valid; `inspect` raises if a gap before it holds an open.

        An error leaves the ledger as it was: no later record may claim that nothing lies there.
        """
        if offset < self._sole_until:
            raise LogLost(
                f"A record of the commits topic landed at offset {offset:,}; the one before it was at "
                f"{self._sole_until - 1:,}: the topic was deleted and made again, or has lost records.",
                NEW_EPOCH,
            )
        if offset > self._sole_until:
            inspect(Gap(self._sole_until, offset))
        self._sole_until = offset + 1

    @staticmethod
    def _advance(last: Vector, rows: Vector, into: dict[TopicPartition, int]) -> None:
        assert last.keys() == rows.keys(), "rows of a partition were not delivered, or delivered rows not counted"
        for partition, offset in last.items():
            if offset + 1 - into.get(partition, 0) < rows[partition]:
                raise LogLost(
                    f"{partition} took {rows[partition]:,} rows from offset {into.get(partition, 0):,} on, and the "
                    f"last of them is at {offset:,}: the topic was deleted and made again, or has lost rows.",
                    NEW_EPOCH,
                )
            into[partition] = offset + 1

    def _new_topics(self, rows: Vector) -> dict[str, str]:
        topics = {partition.topic for partition in rows} - self._told_topics
        self._told_topics |= topics
        return {topic: self.topic_ids[topic] for topic in topics if topic in self.topic_ids}
