"""Where a generation resumes, and when nobody but an operator can say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from walstream.capture.commit_points import OpenRecord, Origin, Point, TableSnapshot
from walstream.capture.resuming import SourceState, check_log, resume
from walstream.error_codes import codes
from walstream.errors import HistoryForked, LogLost, SourceForgot
from walstream.positions import Lsn, TopicPartition
from walstream.postgres.protocol import TimelineSwitch

A, B = TopicPartition("w.a", 0), TopicPartition("w.b", 0)
ORIGIN = Origin("here", "7001", 3, "walstream")
LAST = Point(8, 5, 2, Lsn(1000), 9, 99, 50, 500, next={A: 10, B: 4}, topic_ids={"w.a": "x", "w.b": "y"}, origin=ORIGIN)


def source(confirmed: int = 900, *, system: str = "7001", timeline: int = 3, **switches: int) -> SourceState:
    history = [TimelineSwitch(int(name.removeprefix("t")), Lsn(lsn), "") for name, lsn in switches.items()]
    return SourceState(system, timeline, history, "walstream", Lsn(confirmed))


def test_a_new_log_begins_where_the_slot_does() -> None:
    base = resume(None, None, source(900))
    assert (base.source_epoch, base.end_lsn, base.next, base.rows_total) == (1, 900, {}, 0)


def test_an_open_without_points_changes_nothing() -> None:
    assert resume(None, OpenRecord(4, ORIGIN, 0), source(900)).source_epoch == 4


def test_the_last_valid_point_is_resumed_from() -> None:
    assert resume(LAST, None, source(900)) is LAST
    assert resume(LAST, None, source(1000)) is LAST, "a crash of PostgreSQL moves it back, never beyond"


def test_a_slot_that_is_ahead_of_the_log_stops_it() -> None:
    with pytest.raises(SourceForgot, match=r"confirmed up to 0/3E9.*up to 0/3E8") as failure:
        resume(LAST, None, source(1001))
    assert codes(failure.value).exit == 5
    assert not failure.value.retryable


def test_a_server_whose_wal_ends_below_what_we_hold_stops_it() -> None:
    assert resume(LAST, None, source(900)._replace(flushed=Lsn(1000))) is LAST
    with pytest.raises(HistoryForked, match=r"WAL ends at 0/3E7; .* up to 0/3E8") as failure:
        resume(LAST, None, source(900)._replace(flushed=Lsn(999)))
    assert codes(failure.value).exit == 5
    assert "--new-epoch" in failure.value.hint
    assert resume(LAST, None, source(900)._replace(flushed=Lsn(999)), new_epoch=True).end_lsn == 900


def test_another_cluster_stops_it() -> None:
    with pytest.raises(HistoryForked, match=r"7001.*7002"):
        resume(LAST, None, source(system="7002"))


def test_a_failover_after_what_we_hold_goes_on() -> None:
    assert resume(LAST, None, source(timeline=4, t2=500, t3=1000)) is LAST


def test_a_failover_below_what_we_hold_stops_it() -> None:
    with pytest.raises(HistoryForked, match="the new primary never had"):
        resume(LAST, None, source(timeline=4, t2=500, t3=999))


def test_a_timeline_that_is_no_ancestor_stops_it() -> None:
    with pytest.raises(HistoryForked, match="knows nothing"):
        resume(LAST, None, source(timeline=4, t2=2000))
    with pytest.raises(HistoryForked, match="knows nothing"):
        resume(LAST, None, source(timeline=2, t1=500))


def test_a_timeline_of_unknown_history_stops_it() -> None:
    with pytest.raises(HistoryForked, match="replication connection"):
        resume(LAST, None, source(timeline=4)._replace(history=None))


def test_a_new_epoch_begins_at_the_slot_and_keeps_what_is_in_the_log() -> None:
    base = resume(LAST, None, source(50, system="7002"), new_epoch=True)
    assert (base.source_epoch, base.end_lsn) == (3, 50)
    assert (base.next, base.rows_total, base.bytes_total, base.snapshots) == (LAST.next, 50, 500, {})


def test_a_partition_with_nothing_but_rows_of_a_snapshot_must_have_them() -> None:
    only_snapshot = TopicPartition("w.c", 1)
    finished = TableSnapshot("public", "c", "s1", "0/A", rows=7, next={"w.c-1": 7, "w.a-0": 3})
    last = replace(LAST, snapshots={("public", "c"): finished})
    ids = {"w.a": "x", "w.b": "y"}
    assert last.ends == {A: 10, B: 4, only_snapshot: 7}
    check_log(last, {A: 10, B: 4, only_snapshot: 7}, ids)
    with pytest.raises(LogLost, match=r"w.c-1 ends at offset 6; the last commit point says 7"):
        check_log(last, {A: 10, B: 4, only_snapshot: 6}, ids)


def test_a_log_that_has_everything_passes() -> None:
    check_log(LAST, {A: 10, B: 400}, {"w.a": "x", "w.b": "y"})


@pytest.mark.parametrize(
    ("ends", "ids", "told"),
    [
        ({A: 9, B: 4}, {"w.a": "x", "w.b": "y"}, "w.a-0 ends at offset 9"),
        ({A: 10}, {"w.a": "x"}, "w.b is gone"),
        ({A: 10, B: 4}, {"w.a": "x", "w.b": "z"}, "w.b was deleted and made again"),
    ],
)
def test_a_log_that_has_lost_something_stops_it(
    ends: dict[TopicPartition, int], ids: dict[str, str], told: str
) -> None:
    with pytest.raises(LogLost, match=told):
        check_log(LAST, ends, ids)
