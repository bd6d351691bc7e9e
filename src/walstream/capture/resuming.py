"""Where a generation resumes: whether the log and the source still fit together, decided from what both say.

Owns the decision; refuses to know clients. Given the last valid point and what the source is, it returns the point to
go on from, or says why nobody but an operator can decide. Invariant: a base is returned only if the source will send
every transaction that commits at or after `base.end_lsn`, and the log holds every one before it.

    source epoch   grows when LSNs stop being comparable: when an operator says so, after a slot was made again, another
                   server took over, or everything is read anew. Never by itself: it would hide a loss. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from walstream.capture.commit_points import OpenRecord, Origin, Point
from walstream.errors import HistoryForked, LogLost, SourceForgot
from walstream.positions import Lsn, TopicPartition
from walstream.postgres.protocol import TimelineSwitch

FIRST_EPOCH = 1

_NEW_EPOCH = "To begin anew all the same, with a new snapshot: walstream capture run --new-epoch"


class SourceState(NamedTuple):
    """What the source is, and from where on its slot still has everything."""

    system_id: str
    timeline: int
    history: Sequence[TimelineSwitch] | None
    """Where the ancestors of the timeline ended; None when the server does not tell."""
    slot: str
    confirmed_flush: Lsn
    flushed: Lsn | None = None
    """Where the server's WAL ends, asked after it sent all that the log has. None for a standby: after a restart it may
    first have to replay what it has sent before.
    """

    def origin(self, instance: str) -> Origin:
        """Return what an `open` says of it."""
        return Origin(instance, self.system_id, self.timeline, self.slot)


def resume(last: Point | None, opened: OpenRecord | None, source: SourceState, *, new_epoch: bool = False) -> Point:
    """Return the point to go on from; `opened` is the last `open` before ours. Raises HistoryForked, SourceForgot."""
    if last is None:
        # Nothing was promised yet, so the log begins where the slot does.
        epoch = (opened.source_epoch if opened is not None else FIRST_EPOCH) + (opened is not None and new_epoch)
        return _begin(epoch, source.confirmed_flush, None)
    if new_epoch:
        return _begin(last.source_epoch + 1, source.confirmed_flush, last)
    if last.origin is not None:
        _check_origin(last.origin, last.end_lsn, source)
    if source.flushed is not None and source.flushed < last.end_lsn:
        raise HistoryForked(
            f"The server's WAL ends at {source.flushed}; the log holds transactions up to {last.end_lsn}, which this "
            "server does not have.",
            f"The server was restored to an earlier moment, or its disk lost WAL. Readers have seen them. {_NEW_EPOCH}",
        )
    if source.confirmed_flush > last.end_lsn:
        raise SourceForgot(
            f"The slot {source.slot} is confirmed up to {source.confirmed_flush}, the log holds everything up to "
            f"{last.end_lsn} only: PostgreSQL will not send what lies between.",
            f"The slot was made again, or something else has read it. {_NEW_EPOCH}",
        )
    return last


def check_log(base: Point, ends: Mapping[TopicPartition, int], topic_ids: Mapping[str, str]) -> None:
    """Compare what the point says with what the log has. Raises LogLost."""
    for topic, topic_id in base.topic_ids.items():
        if topic not in topic_ids:
            raise LogLost(f"The topic {topic} is gone, with rows that commit points speak of.", _NEW_EPOCH)
        if topic_ids[topic] != topic_id:
            raise LogLost(f"The topic {topic} was deleted and made again since its rows were written.", _NEW_EPOCH)
    for partition, offset in base.ends.items():
        if ends.get(partition, 0) < offset:
            raise LogLost(
                f"{partition} ends at offset {ends.get(partition, 0):,}; the last commit point says {offset:,}: "
                "the log has lost rows that it had.",
                f"Restore the log, or begin anew. {_NEW_EPOCH}",
            )


def _begin(epoch: int, end_lsn: Lsn, last: Point | None) -> Point:
    """Return a point without rows at which a source epoch begins; totals and vector go on."""
    return Point(
        offset=last.offset if last else -1,
        gen=last.gen if last else -1,
        source_epoch=epoch,
        end_lsn=end_lsn,
        last_xid=0,
        last_commit_time_us=0,
        rows_total=last.rows_total if last else 0,
        bytes_total=last.bytes_total if last else 0,
        next=last.next if last else {},
        topic_ids=last.topic_ids if last else {},
    )


def _check_origin(before: Origin, end_lsn: Lsn, source: SourceState) -> None:
    if before.system_id != source.system_id:
        raise HistoryForked(
            f"The log was written from the PostgreSQL cluster {before.system_id}; this one is {source.system_id}.",
            f"Another database: use another capture.prefix. A restored or upgraded one: {_NEW_EPOCH}",
        )
    if before.timeline == source.timeline:
        return
    if source.history is None:
        raise HistoryForked(
            f"PostgreSQL is on timeline {source.timeline}, the log was written from timeline {before.timeline}, and "
            "where they parted cannot be asked without a replication connection.",
            "Allow one (REPLICATION, pg_hba.conf), so that it can be made sure that nothing is lost.",
        )
    parted = next((switch for switch in source.history if switch.timeline == before.timeline), None)
    if parted is None:
        raise HistoryForked(
            f"The log was written from timeline {before.timeline}, of which timeline {source.timeline} knows nothing.",
            _NEW_EPOCH,
        )
    if parted.switch_lsn < end_lsn:
        raise HistoryForked(
            f"Timeline {source.timeline} parted from {before.timeline} at {parted.switch_lsn}; the log holds "
            f"transactions up to {end_lsn}, which the new primary never had.",
            f"They were lost in the failover; readers have seen them. {_NEW_EPOCH}",
        )
