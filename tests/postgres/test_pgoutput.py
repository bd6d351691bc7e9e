"""The decoder against what real servers sent, what can be made by hand, and garbage."""

from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postgres import golden, rows
from walstream.errors import DecodeError
from walstream.positions import Lsn
from walstream.postgres import pgoutput
from walstream.postgres.messages import UNCHANGED, Relation, RelationColumn, Row, StreamStop, Type

VECTORS = list(golden.vectors())
ALL_KINDS = "BCORYIUDTMSEcAbPKrp"


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_golden_vector(vector: golden.Vector) -> None:
    assert repr(golden.decode(vector.data, vector.in_stream)) == vector.decoded
    # The source hands over whole frames and says where the message begins.
    framed = bytes(25) + vector.data
    if vector.data[0] in pgoutput.ROW_KINDS:
        found = pgoutput.decode_row(framed, 25, in_stream=vector.in_stream)
        assert pgoutput.row_relation(framed, 25, in_stream=vector.in_stream) == found.relation_id
        if vector.in_stream:
            assert pgoutput.row_xid(framed, 25) == found.xid
    else:
        assert repr(pgoutput.decode(framed, 25, in_stream=vector.in_stream)) == vector.decoded


@pytest.mark.parametrize("file", [file.stem for file in golden.FILES])
def test_every_kind_was_recorded(file: str) -> None:
    assert {chr(vector.data[0]) for vector in VECTORS if vector.file == file} == set(ALL_KINDS)


def test_every_cut_and_every_byte_too_many_is_refused() -> None:
    for vector in VECTORS:
        for end in range(0, len(vector.data), max(1, len(vector.data) // 200)):
            if vector.data[:1] == b"A" and end == 9:
                continue  # a stream abort without position and time is whole
            with pytest.raises(DecodeError):
                golden.decode(vector.data[:end] or b"?", vector.in_stream)
        with pytest.raises(DecodeError, match="left over"):
            golden.decode(vector.data + b"\0" * 17, vector.in_stream)


def test_schema_that_is_left_out_is_pg_catalog() -> None:
    column = RelationColumn("n", 23, -1, False)
    assert pgoutput.decode(rows.relation(7, "", "t", "d", [column])) == Relation(
        None, 7, "pg_catalog", "t", "d", (column,)
    )
    assert pgoutput.decode(b"Y\0\0\0\x17\0int4\0") == Type(None, 23, "pg_catalog", "int4")


def test_relation_without_columns() -> None:
    assert pgoutput.decode(rows.relation(7, "s", "t", "n", []), in_stream=False) == Relation(None, 7, "s", "t", "n", ())
    assert pgoutput.decode_row(rows.row("I", 7, new=[])) == Row("I", None, 7, None, None, ())


def test_only_streamed_kinds_carry_a_transaction_id() -> None:
    assert pgoutput.decode(b"E", in_stream=True) == StreamStop()
    for vector in VECTORS:
        if chr(vector.data[0]) in "BCOSEcAbPKrp":
            assert repr(pgoutput.decode(vector.data, in_stream=True)) == vector.decoded


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "without bytes"),
        (b"Z", "no kind"),
        (b"I\0\0\0\1N\0\0", "rows are for decode_row"),
        (b"R\0\0\0\1no end", "a text has no end"),
        (b"R\0\0\0\1s\0t\0x\0\0", "one of dnfi"),
        (b"R\0\0\0\1\xff\0t\0d\0\0", "utf-8"),
        (b"T\xff\xff\xff\xff\0", "bytes where 0 are left"),
        (b"M\1\0\0\0\0\0\0\0\1p\0\xff\xff\xff\xff", "it says -1 bytes"),
    ],
)
def test_refusals_say_why(data: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why) as refused:
        pgoutput.decode(data)
    assert refused.value.data == data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"I\0\0\0\1K\0\0", "one of N"),
        (b"U\0\0\0\1K\0\0O\0\0", "one of N"),
        (b"D\0\0\0\1N\0\0", "one of KO"),
        (b"I\0\0\0\1N\0\1b\0\0\0\1x", "one of tnu"),
        (b"I\0\0\0\1N\0\1t\xff\xff\xff\xff", "it says -1 bytes"),
        (b"I\0\0\0\1N\0\1t\x7f\xff\xff\xffx", "bytes where 1 are left"),
        (b"B\0\0\0\1", "one of IUD"),
    ],
)
def test_row_refusals_say_why(data: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why) as refused:
        pgoutput.decode_row(data)
    assert refused.value.data == data


def test_error_crosses_processes_with_its_bytes() -> None:
    error = pickle.loads(pickle.dumps(DecodeError("what", "why", data=b"\1\2")))
    assert (str(error), error.data) == ("what why", b"\1\2")


def test_unchanged_is_one_value_everywhere() -> None:
    assert pickle.loads(pickle.dumps((UNCHANGED, b"x"))) == (UNCHANGED, b"x")
    assert pickle.loads(pickle.dumps(UNCHANGED)) is UNCHANGED


values = st.lists(st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=300)), max_size=8)
uint32 = st.integers(0, 2**32 - 1)


@given(values, values, uint32, st.none() | uint32, st.sampled_from(["I", "UK", "UO", "U", "DK", "DO"]))
def test_rows_come_back_as_they_were_written(
    old: list[pgoutput.Value], new: list[pgoutput.Value], relation_id: int, xid: int | None, shape: str
) -> None:
    kind, old_kind = shape[0], shape[1:] or None
    written = rows.row(
        kind,
        relation_id,
        xid=xid,
        old_kind=old_kind,
        old=old if old_kind else None,
        new=None if kind == "D" else new,
    )
    found = pgoutput.decode_row(written, in_stream=xid is not None)
    expected = (tuple(old) if old_kind else None, None if kind == "D" else tuple(new))
    assert found == Row(kind, xid, relation_id, old_kind, *expected)


@given(st.binary(max_size=200), st.booleans(), st.integers(0, 30))
@example(b"T\0\0\0\1\0\0\0\0\1", True, 0)
def test_garbage_gives_a_message_or_a_decode_error(data: bytes, in_stream: bool, position: int) -> None:
    check_garbage(data, in_stream, position)


@given(st.sampled_from(VECTORS), st.data())
def test_damaged_messages_give_a_message_or_a_decode_error(vector: golden.Vector, data: st.DataObject) -> None:
    damaged = bytearray(vector.data)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    check_garbage(bytes(damaged), data.draw(st.booleans()), 0)


def check_garbage(data: bytes, in_stream: bool, position: int) -> None:
    for read in (pgoutput.decode, pgoutput.decode_row, pgoutput.row_relation):
        with contextlib.suppress(DecodeError):
            read(data, position, in_stream=in_stream)
    with contextlib.suppress(DecodeError):
        assert 0 <= pgoutput.row_xid(data, position) < 2**32


def test_lsns_of_all_sizes() -> None:
    begin = pgoutput.decode(b"B" + b"\xff" * 8 + b"\x80" + bytes(7) + b"\xff" * 4)
    assert begin[0] == Lsn(2**64 - 1)
    assert begin[2] == 2**32 - 1
