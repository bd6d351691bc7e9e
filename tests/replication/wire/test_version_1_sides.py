"""What a leader of version 1 pushes, what a follower keeps of it, and when a link is dialled again."""

from __future__ import annotations

from uuid import UUID

import pytest

from walstream.errors import BadChecksum, ConnectionLost, LinkError, LinkVersionUnknown, MalformedFrame
from walstream.log.batch import BatchHeader, assemble
from walstream.replication.wire.link import Closed
from walstream.replication.wire.redial import Dial, redial
from walstream.replication.wire.version_1 import PushedBatch
from walstream.replication.wire.version_1_copies import place
from walstream.replication.wire.version_1_push import Push, PushPlan

KEY = (UUID(int=1), 0)


def test_a_follower_is_pushed_what_is_committed_after_it_came() -> None:
    plan = PushPlan(records_max=100)
    plan.begin(KEY, 50)
    assert plan.next(KEY, 0, 50) == Push(None)
    assert plan.next(KEY, 0, 60) == Push(50)
    plan.pushed(KEY, 55)
    assert plan.next(KEY, 0, 60) == Push(55)
    plan.pushed(KEY, 60)
    assert plan.next(KEY, 0, 60) == Push(None)


def test_a_follower_that_lags_goes_on_at_the_end_and_the_gap_is_told_once() -> None:
    plan = PushPlan(records_max=100)
    plan.begin(KEY, 50)
    assert plan.next(KEY, 0, 150) == Push(50)
    assert plan.next(KEY, 0, 151) == Push(None, skipped=101)
    assert plan.next(KEY, 0, 151) == Push(None)
    assert plan.next(KEY, 0, 152) == Push(151)


def test_what_retention_has_taken_is_a_gap_too() -> None:
    plan = PushPlan(records_max=100)
    plan.begin(KEY, 50)
    assert plan.next(KEY, 60, 100) == Push(60, skipped=10)
    assert plan.next(KEY, 60, 100) == Push(60)


def test_a_high_watermark_that_is_behind_for_a_moment() -> None:
    plan = PushPlan(records_max=100)
    plan.begin(KEY, 50)
    assert plan.next(KEY, 0, 40) == Push(None)
    assert plan.next(KEY, 0, 51) == Push(50)


def test_a_partition_that_comes_later_is_pushed_from_its_beginning() -> None:
    plan = PushPlan(records_max=100)
    assert plan.next(KEY, 5, 60) == Push(5)


def batch(base_offset: int = 10, count: int = 2) -> bytes:
    header = BatchHeader(base_offset, 0, 0, 2, 0, 0, count - 1, 0, 0, -1, -1, -1, count)
    return bytes(assemble(header, bytes(7 * count)))


def pushed(data: bytes, base_offset: int = 10, count: int = 2) -> PushedBatch:
    return PushedBatch("orders", 0, base_offset, count, 5, memoryview(data))


def test_a_batch_that_continues_the_copy() -> None:
    placement = place(pushed(batch()), 10)
    assert not placement.begins_anew
    assert placement.header.next_offset == 12


@pytest.mark.parametrize("log_end", [None, 0, 9, 11, 12], ids=["no copy", "gap", "small gap", "overlap", "again"])
def test_a_batch_that_does_not_makes_the_copy_begin_anew(log_end: int | None) -> None:
    assert place(pushed(batch()), log_end).begins_anew


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (pushed(b"bincode"), MalformedFrame),
        (pushed(batch() + b"x"), MalformedFrame),
        (pushed(batch()[:-1] + b"x"), BadChecksum),
        (pushed(batch(), base_offset=11), MalformedFrame),
        (pushed(batch(), count=3), MalformedFrame),
        (pushed(batch(-1), base_offset=-1), MalformedFrame),
    ],
    ids=["no batch", "two lengths", "checksum", "another offset", "another count", "negative"],
)
def test_a_batch_that_is_not_what_it_claims(wrong: PushedBatch, error: type[LinkError]) -> None:
    with pytest.raises(error):
        place(wrong, 10)


def test_dialling_again() -> None:
    lost = Closed(ConnectionLost("gone"))
    refused = Closed(LinkVersionUnknown("version 2?"), is_version_refused=True)
    assert redial(None, 0.0) == Dial(30_000, 2)
    assert redial(lost, 0.999, 1000) == Dial(1499, 2)
    assert redial(refused, 0.5, 1000) == Dial(1250, 2)
    assert redial(refused, 0.5, 1000, takes_version_1=True) == Dial(0, 1)
    # Version 1 has been refused as well: wait, and begin with version 2 again.
    assert redial(Closed(LinkVersionUnknown("version 1?")), 0.0, 1000, takes_version_1=True) == Dial(1000, 2)
