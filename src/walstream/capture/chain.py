"""The chain of valid points: the records of `<prefix>.commits` folded in order.

Owns validity: a point is valid iff its generation is that of the latest `open` before it, so a zombie's late point is
void. Refuses to know where records come from. Invariants: each valid point continues the one before (its LSN does not
go back within a source epoch, its totals grow by exactly its rows), and its vector is whole.

Reading may begin anywhere, because retention removes old records and because a resuming capture reads only the end.
Then the latest `open` may lie before the first record seen. A full point with `sole_until` at or beyond that first
record proves which one it was: "no open between mine and there" is a fact of the log, true whoever says it. Until such
a point, or an `open`, nothing is valid.
"""

from __future__ import annotations

from collections.abc import Mapping

from walstream.capture.commit_points import (
    CommitRecord,
    OpenRecord,
    Point,
    PointRecord,
    SnapshotRecord,
    Span,
    TableSnapshot,
    partitions,
)
from walstream.errors import CorruptCommits
from walstream.positions import ZERO, Lsn, TopicPartition


class Chain:
    """Feed it records from `start` on, in order; it returns the valid points."""

    def __init__(self, start: int = 0) -> None:
        """Take the offset of the first record that will be fed; 0 means that nothing came before."""
        self._start = start
        self.gen: int | None = None
        """The latest generation, once it is known."""
        self.opened: OpenRecord | None = None
        """Its `open`, when it was seen."""
        self.last: Point | None = None
        """The last valid point."""
        self.is_whole = start == 0
        """Whether the first point has nothing before it."""

    @classmethod
    def after(cls, point: Point) -> Chain:
        """Go on after a valid point."""
        chain = cls(point.offset + 1)
        chain.gen, chain.last, chain.is_whole = point.gen, point, True
        return chain

    def feed(self, offset: int, record: CommitRecord) -> Point | None:
        """Take one record; return the point it makes, if it is valid. Raises CorruptCommits."""
        if isinstance(record, OpenRecord):
            self.gen, self.opened = offset, record
            return None
        if self.gen is None and isinstance(record, PointRecord) and record.is_full and record.sole_until >= self._start:
            self.gen = record.gen
        if record.gen != self.gen:
            return None
        if isinstance(record, SnapshotRecord):
            return self._snapshot(offset, record)
        return self._point(offset, record)

    def _point(self, offset: int, record: PointRecord) -> Point | None:
        last = self.last
        if last is None and not record.is_full:
            if self.is_whole:
                raise _corrupt(offset, "the first point has no full vector")
            return None
        if last is not None and last.gen != record.gen and not record.is_full:
            raise _corrupt(offset, "the first point of a generation has no full vector")
        if last is None:
            last = _NOTHING
        is_baseline = last is _NOTHING and not self.is_whole
        changed = partitions(record.next)
        end_lsn = Lsn.parse(record.end_lsn)
        same_epoch = record.source_epoch == last.source_epoch
        if not is_baseline:
            self._check(offset, record, last, end_lsn)
        if record.is_full and not last.next.keys() <= changed.keys():
            raise _corrupt(offset, "its full vector lacks a partition that was there before")
        self.last = point = Point(
            offset=offset,
            gen=record.gen,
            source_epoch=record.source_epoch,
            end_lsn=end_lsn,
            last_xid=record.last_xid,
            last_commit_time_us=record.last_commit_time_us,
            rows_total=record.rows_total,
            bytes_total=record.bytes_total,
            next={**last.next, **changed},
            topic_ids={**last.topic_ids, **record.topic_ids} if record.topic_ids else last.topic_ids,
            spans=() if is_baseline else _spans(offset, record, last, end_lsn, changed),
            snapshots=_by_name(record) if record.is_full else last.snapshots if same_epoch else {},
            origin=record.origin or last.origin,
            is_baseline=is_baseline,
        )
        return point

    def _snapshot(self, offset: int, record: SnapshotRecord) -> Point | None:
        last = self.last
        if record.state != "finished" or last is None or last.gen != record.gen:
            # Before the first full vector: it is in that one's list of finished snapshots.
            return None
        start, rows = partitions(record.start), partitions(record.rows)
        stop = partitions(record.next)
        if record.rows_total != last.rows_total + sum(rows.values()) or rows.keys() != stop.keys():
            raise _corrupt(offset, "the finished snapshot does not continue the point before it")
        one = record.snapshot
        spans = tuple(
            Span(partition, start.get(partition, 0), stop[partition], count, record.gen, snapshot=one.id)
            for partition, count in rows.items()
        )
        self.last = point = Point(
            offset=offset,
            gen=record.gen,
            source_epoch=record.source_epoch,
            end_lsn=last.end_lsn,
            last_xid=last.last_xid,
            last_commit_time_us=last.last_commit_time_us,
            rows_total=record.rows_total,
            bytes_total=record.bytes_total,
            next=last.next,
            topic_ids={**last.topic_ids, **record.topic_ids},
            spans=spans,
            snapshot=one,
            snapshots={**last.snapshots, (one.schema, one.table): one},
            origin=last.origin,
        )
        return point

    @staticmethod
    def _check(offset: int, record: PointRecord, last: Point, end_lsn: Lsn) -> None:
        if record.source_epoch < last.source_epoch:
            raise _corrupt(offset, f"source epoch {record.source_epoch} follows {last.source_epoch}")
        if record.source_epoch == last.source_epoch and end_lsn < last.end_lsn:
            raise _corrupt(offset, f"LSN {end_lsn} follows {last.end_lsn}")
        if record.source_epoch > last.source_epoch and record.rows:
            raise _corrupt(offset, "the first point of a source epoch has rows")
        rows = sum(record.rows.values())
        if record.rows_total != last.rows_total + rows:
            raise _corrupt(offset, f"{last.rows_total:,} rows and {rows:,} more are not {record.rows_total:,}")


_NOTHING = Point(-1, -1, 0, ZERO, 0, 0, 0, 0, next={}, topic_ids={})


def _spans(
    offset: int, record: PointRecord, last: Point, end_lsn: Lsn, changed: Mapping[TopicPartition, int]
) -> tuple[Span, ...]:
    spans = []
    for partition, count in partitions(record.rows).items():
        start, stop = last.next.get(partition, 0), changed.get(partition)
        if stop is None or stop - start < count:
            raise _corrupt(offset, f"{count:,} rows of {partition} do not fit into [{start:,}, {stop})")
        spans.append(Span(partition, start, stop, count, record.gen, last.end_lsn, end_lsn))
    return tuple(spans)


def _by_name(record: PointRecord) -> dict[tuple[str, str], TableSnapshot]:
    return {(one.schema, one.table): one for one in record.snapshots}


def _corrupt(offset: int, why: str) -> CorruptCommits:
    return CorruptCommits(
        f"The commit point at offset {offset:,} cannot be: {why}.",
        "The commits topic was damaged or written to by hand; do not read past this point.",
    )
