"""What a subscriber receives: read into types, and nothing believed that is damaged or out of order."""

from __future__ import annotations

import pytest

from feed.frames import Written, frame_of
from walstream.errors import EntryDamaged, OperationUnknown, UsageError
from walstream.feed import wal_pb2
from walstream.feed.received import Batch, Heartbeat, Op, Receiver, Watermark, position, read_entry
from walstream.feed.service.batching import Limits, batch_response, cut
from walstream.feed.service.responses import heartbeat_response, watermark_response
from walstream.feed.service.resume import resume_token
from walstream.positions import GlobalLsn


def response(*lsns: int, compression: int = 0) -> bytes:
    slices = cut(frame_of([Written(lsn, b"v" * 100) for lsn in lsns]), None, Limits(1000)).slices
    return batch_response(slices, compression)


@pytest.mark.parametrize("compression", [wal_pb2.NONE, wal_pb2.SNAPPY, wal_pb2.ZSTD])
def test_a_batch(compression: int) -> None:
    receiver = Receiver(5)
    batch = receiver.read(response(*range(10, 90), compression=compression))
    assert isinstance(batch, Batch)
    assert [entry.lsn for entry in batch.entries] == list(range(10, 90))
    assert batch.entries[0].value == b"v" * 100
    assert (batch.resume, batch.resume_token) == (90, resume_token(90))
    assert receiver.resume == 90


def test_heartbeats_move_on_where_to_resume() -> None:
    receiver = Receiver()
    receiver.read(response(10))
    assert receiver.read(heartbeat_response(70, 50, "t-0")) == Heartbeat(GlobalLsn(70), GlobalLsn(50), "t-0")
    assert receiver.resume == 51
    receiver.read(heartbeat_response(70, 0, ""))
    assert receiver.resume == 51
    assert receiver.read(watermark_response(30)) == Watermark(GlobalLsn(30))
    with pytest.raises(EntryDamaged, match="came when everything up to"):
        receiver.read(response(40))


@pytest.mark.parametrize("lsns", [(10, 10), (10, 9), (3,)])
def test_entries_out_of_order_are_not_believed(lsns: tuple[int, ...]) -> None:
    receiver = Receiver(5)
    with pytest.raises(EntryDamaged):
        receiver.read(response(*lsns))
    assert receiver.resume == 5


@pytest.mark.parametrize("field", ["key", "value", "checksum"])
def test_a_wrong_checksum_is_not_believed(field: str) -> None:
    message = Written(7, b"value").message
    setattr(message, field, getattr(message, field)[:-1] + b"!")
    with pytest.raises(EntryDamaged, match=r"checksum of the entry at 0+\.0+\.0+7"):
        read_entry(message)


def test_an_operation_of_a_later_version_is_not_passed_over() -> None:
    written = [Written(10), Written(11, op_type=99), Written(12)]
    receiver = Receiver(5)
    with pytest.raises(OperationUnknown, match=f"at {GlobalLsn(11)} has the operation 99.*resume at {GlobalLsn(11)}"):
        receiver.read(batch_response(cut(frame_of(written), None, Limits(1000)).slices, wal_pb2.NONE))
    assert receiver.resume == 5
    inside = wal_pb2.BatchWrite(entries=[written[1].message]).SerializeToString()
    with pytest.raises(OperationUnknown, match="operation 99"):
        _ = read_entry(Written(12, inside, b"", op_type=wal_pb2.OP_BATCH).message).transaction


def test_a_response_of_a_later_version_says_nothing() -> None:
    assert Receiver().read(b"\xaa\x06\x03abc") is None


def test_a_transaction_is_read_with_its_entries() -> None:
    inside = wal_pb2.BatchWrite(
        entries=[Written(1).message, Written(2).message], commit_lsn=99, txid=7, commit_time_ms=5, part=1, is_last=True
    )
    outside = Written(2, inside.SerializeToString(), b"").message
    outside.op_type = wal_pb2.OP_BATCH
    entry = read_entry(outside)
    assert entry.op is Op.BATCH
    found = entry.transaction
    assert [one.lsn for one in found.entries] == [1, 2]
    assert (found.commit_lsn, found.txid, found.commit_time_ms, found.part, found.is_last) == (99, 7, 5, 1, True)


def test_what_was_deleted_has_no_value_unless_it_is_known() -> None:
    message = Written(7, b"").message
    assert read_entry(message).value == b""
    message.op_type = wal_pb2.OP_DELETE
    assert read_entry(message).value is None
    known = Written(7, b"old").message
    known.op_type = wal_pb2.OP_DELETE
    assert read_entry(known).value == b"old"


def test_a_place_to_start_from() -> None:
    lsn = GlobalLsn.of(1, 2, 3)
    assert position(lsn) == position(str(lsn)) == position(resume_token(lsn)) == lsn
    for wrong in ("x", b"x", 1.5):
        with pytest.raises(UsageError):
            position(wrong)  # type: ignore[arg-type]
