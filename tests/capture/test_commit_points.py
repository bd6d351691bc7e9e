"""The records of the commits topic, the rule, and what the ledger writes of what was delivered."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.capture.commit_points import (
    FULL_INTERVAL,
    OpenRecord,
    Origin,
    Point,
    PointRecord,
    RowFacts,
    SnapshotRecord,
    Span,
    TableSnapshot,
    decode,
    encode,
)
from walstream.capture.groups import Group, Groups
from walstream.capture.ledger import Gap, Ledger, Written
from walstream.errors import CorruptCommits, GenerationOver, LogLost, RowsMissing
from walstream.positions import ZERO, Lsn, TopicPartition

ORIGIN = Origin("here-1", "7000000000000000001", 1, "walstream")
A, B = TopicPartition("w.public.a", 0), TopicPartition("w.public.b-1", 3)
SNAPSHOT = TableSnapshot("public", "a", "0/10-5-1", "0/10", "16384/1")


def new_ledger(gen: int = 5) -> Ledger:
    return Ledger(gen, ORIGIN, Point(-1, -1, 1, Lsn(16), 0, 0, 0, 0, next={}, topic_ids={}))


def alone(gap: Gap) -> None:
    raise AssertionError(f"nobody else has written: {gap}")


def written(end_lsn: int, xid: int = 0, **rows: tuple[int, int]) -> Written:
    """Partitions by letter: how many rows, and the offset of the last one."""
    by_letter = {"a": A, "b": B}
    return Written(
        Lsn(end_lsn),
        xid,
        xid * 1000,
        last={by_letter[letter]: last for letter, (_, last) in rows.items()},
        rows={by_letter[letter]: count for letter, (count, _) in rows.items()},
        bytes=10 * sum(count for count, _ in rows.values()),
    )


# -- records ---------------------------------------------------------------------------------------------------------


def test_records_are_json_that_reads_back() -> None:
    records = [
        OpenRecord(1, ORIGIN, 1_700_000_000_000),
        new_ledger().point(written(32, 7, a=(2, 1), b=(1, 9))),
        SnapshotRecord(5, 1, "begin", SNAPSHOT),
        SnapshotRecord(5, 1, "finished", SNAPSHOT, {"w-0": 1}, {"w-0": 4}, {"w-0": 3}, 3, 30, {"w": "id"}),
    ]
    for record in records:
        assert decode(encode(record), 0) == record


def test_a_point_says_what_the_specification_lists() -> None:
    ledger = new_ledger()
    ledger.topic_ids["w.public.a"] = "id-of-a"
    ledger.point(written(16))
    data = encode(ledger.point(written(0x1600000032, 7, a=(2, 1)))).decode()
    for part in (
        '"kind":"point"',
        '"gen":5',
        '"source_epoch":1',
        '"end_lsn":"16/32"',
        '"last_xid":7',
        '"last_commit_time_us":7000',
        '"next":{"w.public.a-0":2}',
        '"rows":{"w.public.a-0":2}',
        '"rows_total":2',
        '"bytes_total":20',
        '"topic_ids":{"w.public.a":"id-of-a"}',
    ):
        assert part in data


@pytest.mark.parametrize("data", [None, b"", b"{}", b'{"kind":"other"}', b"\xff\xfe", b'{"kind":"point","gen":"x"}'])
def test_what_is_no_record_is_an_error_that_says_where(data: bytes | None) -> None:
    with pytest.raises(CorruptCommits, match="offset 17"):
        decode(data, 17)


# -- the rule --------------------------------------------------------------------------------------------------------

SPAN = Span(A, 10, 20, 3, gen=5, lsn_from=Lsn(100), lsn_to=Lsn(200))


@pytest.mark.parametrize(
    ("offset", "facts", "belongs"),
    [
        (10, RowFacts(5, Lsn(100)), True),
        (19, RowFacts(5, Lsn(199)), True),
        (9, RowFacts(5, Lsn(150)), False),
        (20, RowFacts(5, Lsn(150)), False),
        (15, RowFacts(4, Lsn(150)), False),
        (15, RowFacts(6, Lsn(150)), False),
        (15, RowFacts(5, Lsn(99)), False),
        (15, RowFacts(5, Lsn(200)), False),
        (15, RowFacts(5, Lsn(150), "snapshot"), False),
    ],
)
def test_the_rule(offset: int, facts: RowFacts, belongs: bool) -> None:
    assert SPAN.admits(offset, facts) is belongs


def test_for_a_snapshot_the_id_takes_the_place_of_the_lsn() -> None:
    span = Span(A, 10, 20, 3, gen=5, snapshot="s1")
    assert span.admits(12, RowFacts(5, Lsn(999), "s1"))
    assert not span.admits(12, RowFacts(5, ZERO))
    assert not span.admits(12, RowFacts(5, ZERO, "s2"))
    assert not span.admits(12, RowFacts(4, ZERO, "s1"))


def test_another_number_of_rows_is_an_error() -> None:
    SPAN.check(3)
    for counted in (0, 2, 4):
        with pytest.raises(RowsMissing, match="the commit point says 3"):
            SPAN.check(counted)


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_the_first_point_is_full_and_then_every_thousandth() -> None:
    ledger = new_ledger()
    ledger.next[B] = 7
    records = [ledger.point(written(16))]
    for number in range(2 * FULL_INTERVAL):
        records.append(ledger.point(written(17 + number, a=(1, number))))
    assert [index for index, record in enumerate(records) if record.is_full] == [0, FULL_INTERVAL, 2 * FULL_INTERVAL]
    assert records[1].next == {"w.public.a-0": 1}
    assert records[FULL_INTERVAL].next == {"w.public.a-0": FULL_INTERVAL, "w.public.b-1-3": 7}
    assert records[FULL_INTERVAL].origin == ORIGIN
    assert records[1].origin is None


def test_untouched_partitions_inherit_and_totals_go_on() -> None:
    base = Point(3, 1, 2, Lsn(50), 9, 9000, 100, 1000, next={A: 60, B: 50}, topic_ids={"w.public.a": "x"})
    ledger = Ledger(5, ORIGIN, base)
    first = ledger.point(written(50))
    assert (first.next, first.rows, first.rows_total) == ({"w.public.a-0": 60, "w.public.b-1-3": 50}, {}, 100)
    assert (first.last_xid, first.topic_ids, first.source_epoch) == (9, {"w.public.a": "x"}, 2)
    second = ledger.point(written(70, 11, b=(3, 90)))
    assert (second.next, second.rows) == ({"w.public.b-1-3": 91}, {"w.public.b-1-3": 3})
    assert (second.rows_total, second.bytes_total, second.last_xid) == (103, 1030, 11)


def test_rows_that_cannot_all_be_there_are_an_error_of_the_log() -> None:
    """Such an error must not depend on assertions, which `python -O` leaves out: the LSN would be confirmed."""
    ledger = new_ledger()
    with pytest.raises(LogLost, match=r"w\.public\.a-0 took 3 rows from offset 0 on, and the last of them is at 1"):
        ledger.point(written(32, a=(3, 1)))
    with pytest.raises(LogLost, match="deleted and made again"):
        new_ledger().finish_snapshot(SNAPSHOT, {A: 4}, Written(ZERO, last={A: 2}, rows={A: 1}))
    ledger = new_ledger()
    ledger.landed(9, lambda gap: None)
    with pytest.raises(LogLost, match="landed at offset 3; the one before it was at 9"):
        ledger.landed(3, alone)


def test_what_our_own_code_would_have_to_do_wrong() -> None:
    with pytest.raises(AssertionError, match="not delivered"):
        new_ledger().point(Written(Lsn(32), rows={A: 1}))
    with pytest.raises(AssertionError, match="goes back"):
        new_ledger().point(written(15))


def test_an_idle_point_keeps_the_last_transaction() -> None:
    ledger = new_ledger()
    ledger.point(written(32, 7, a=(1, 0)))
    idle = ledger.point(written(48))
    assert (idle.end_lsn, idle.last_xid, idle.last_commit_time_us, idle.rows) == ("0/30", 7, 7000, {})


def test_neighbours_in_the_commits_topic_are_looked_at_before_a_point_counts() -> None:
    ledger = new_ledger(gen=5)
    ledger.landed(6, alone)
    ledger.landed(7, alone)
    seen: list[Gap] = []
    ledger.landed(10, seen.append)
    assert seen == [Gap(8, 10)]
    ledger.landed(11, alone)


def test_after_another_open_no_point_claims_that_there_was_none() -> None:
    ledger = new_ledger(gen=5)
    ledger.landed(6, alone)

    def find_open(gap: Gap) -> None:
        raise GenerationOver("another one")

    with pytest.raises(GenerationOver):
        ledger.landed(9, find_open)
    assert ledger.point(written(16)).sole_until == 7


def test_a_finished_snapshot_is_remembered_by_every_full_point() -> None:
    ledger = new_ledger()
    assert ledger.begin_snapshot(SNAPSHOT).state == "begin"
    record = ledger.finish_snapshot(SNAPSHOT, {A: 4}, Written(ZERO, last={A: 9}, rows={A: 3}, bytes=30))
    assert (record.start, record.next, record.rows) == ({"w.public.a-0": 4}, {"w.public.a-0": 10}, {"w.public.a-0": 3})
    assert record.rows_total == 3
    point = ledger.point(written(16))
    assert point.snapshots == [msgspec.structs.replace(SNAPSHOT, rows=3, next={"w.public.a-0": 10})]
    assert point.next == {}, "snapshot rows do not move the stream's vector"


def test_what_a_table_is_now_comes_with_the_next_point() -> None:
    ledger = new_ledger()
    ledger.finish_snapshot(SNAPSHOT, {A: 4}, Written(ZERO, last={A: 9}, rows={A: 3}, bytes=30))
    assert [one.identity for one in ledger.point(written(16)).snapshots] == ["16384/1"]
    assert not ledger.point(written(17)).is_full
    ledger.identify(("public", "a"), "another")
    ledger.identify(("public", "unknown"), "another")
    point = ledger.point(written(18))
    assert point.is_full
    assert [one.identity for one in point.snapshots] == ["another"]
    ledger.disprove(("public", "a"))
    point = ledger.point(written(19))
    assert point.is_full
    assert point.snapshots == []
    ledger.disprove(("public", "a"))
    assert not ledger.point(written(20)).is_full


# -- groups ----------------------------------------------------------------------------------------------------------


def group(end_lsn: int, *partitions: TopicPartition) -> Group:
    return Group(Written(Lsn(end_lsn), rows=dict.fromkeys(partitions, 1)), 0.0)


def test_groups_leave_in_order_and_together() -> None:
    groups, first, second, third = Groups(), group(10, A, B), group(20, A), group(30, B)
    for one in (first, second, third):
        groups.add(one)
    assert second.delivered(A, 5)
    assert groups.take() is None
    assert not first.delivered(A, 4)
    assert first.delivered(B, 8)
    taken = groups.take()
    assert taken is not None
    assert (taken.end_lsn, taken.last, taken.rows) == (20, {A: 5, B: 8}, {A: 2, B: 1})
    assert len(groups) == 1
    assert groups.take() is None


def test_an_empty_group_waits_for_those_before_it() -> None:
    groups, first, idle = Groups(), group(10, A), group(20)
    groups.add(first)
    groups.add(idle)
    assert groups.take() is None
    first.delivered(A, 0)
    taken = groups.take()
    assert taken is not None
    assert taken.end_lsn == 20


@given(st.lists(st.sets(st.sampled_from([A, B])), min_size=1, max_size=8), st.randoms())
def test_whatever_the_order_of_deliveries_each_group_is_taken_once(touched: list[set[TopicPartition]], dice) -> None:
    groups = Groups()
    made = [group(number + 1, *partitions) for number, partitions in enumerate(touched)]
    for one in made:
        groups.add(one)
    pending = [(one, partition) for one in made for partition in one.written.rows]
    dice.shuffle(pending)
    taken_rows, last_lsn = 0, 0
    while True:
        taken = groups.take()
        if taken is not None:
            assert taken.end_lsn > last_lsn
            last_lsn = taken.end_lsn
            taken_rows += sum(taken.rows.values())
            assert all(one.waiting == 0 for one in made[:last_lsn]), "nothing is taken before it is delivered"
        if not pending:
            break
        one, partition = pending.pop()
        one.delivered(partition, 7)
    assert last_lsn == len(made)
    assert taken_rows == sum(map(len, touched))


def test_only_point_records_have_defaults_left_out() -> None:
    record = PointRecord(5, 1, "0/10", 0, 0, 0, 0)
    assert encode(record) == (
        b'{"kind":"point","gen":5,"source_epoch":1,"end_lsn":"0/10","last_xid":0,"last_commit_time_us":0,'
        b'"rows_total":0,"bytes_total":0}'
    )
