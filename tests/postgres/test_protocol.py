"""The frames of copy-both, PostgreSQL's clock, timeline histories."""

from __future__ import annotations

import contextlib
import struct
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.errors import DecodeError
from walstream.positions import LSN_MAX, Lsn
from walstream.postgres.protocol import (
    KEEPALIVE_BYTES,
    XLOG_DATA_HEADER_BYTES,
    Keepalive,
    TimelineSwitch,
    XlogData,
    parse_keepalive,
    parse_timeline_history,
    parse_xlog_data,
    postgres_us,
    status_update,
    unix_us,
)

# Recorded from PostgreSQL 18.4.
KEEPALIVE = bytes.fromhex("6b0000000001715f90000303556237630501")
XLOG_DATA = bytes.fromhex("77000000000173d238000000000173d2380003035562376305") + b"B"


def test_keepalive() -> None:
    time_us = unix_us(0x0003035562376305)
    assert len(KEEPALIVE) == KEEPALIVE_BYTES
    assert parse_keepalive(KEEPALIVE) == Keepalive(Lsn.parse("0/1715F90"), time_us, True)
    assert parse_keepalive(KEEPALIVE[:-1] + b"\0") == Keepalive(Lsn.parse("0/1715F90"), time_us, False)


def test_xlog_data_header() -> None:
    assert parse_xlog_data(XLOG_DATA) == XlogData(
        Lsn.parse("0/173D238"), Lsn.parse("0/173D238"), unix_us(0x0003035562376305)
    )
    assert XLOG_DATA[XLOG_DATA_HEADER_BYTES:] == b"B"


def test_status_update_bytes() -> None:
    written = status_update(Lsn.parse("0/30"), Lsn.parse("0/20"), Lsn.parse("0/10"), unix_us(5), reply=True)
    assert written.hex() == "72000000000000003000000000000000200000000000000010000000000000000501"
    assert len(written) == 34


def test_clock_begins_in_2000() -> None:
    assert unix_us(0) == int(datetime(2000, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
    assert postgres_us(unix_us(-7)) == -7


@given(st.integers(0, LSN_MAX), st.integers(0, LSN_MAX), st.integers(-(2**70), 2**70))
def test_status_update_takes_every_number(one: int, other: int, now_us: int) -> None:
    low, high = sorted((one, other))
    found = struct.unpack(">cQQQqB", status_update(high, low, low, now_us))
    assert found[1:4] == (high, low, low)


@given(st.binary(max_size=40))
def test_garbage_frames(data: bytes) -> None:
    for parse in (parse_keepalive, parse_xlog_data, parse_timeline_history):
        with contextlib.suppress(DecodeError):
            parse(data)  # type: ignore[operator]


@pytest.mark.parametrize("parse", [parse_keepalive, parse_xlog_data])
def test_wrong_frames_are_refused_with_their_bytes(parse: object) -> None:
    for data in (b"", b"x" * 18, KEEPALIVE[:-1], KEEPALIVE + b"x", XLOG_DATA[:20]):
        with pytest.raises(DecodeError) as refused:
            parse(data)  # type: ignore[operator]
        assert refused.value.data == data


def test_timeline_history() -> None:
    content = (
        b"# comment\n\n1\t0/3000158\tno recovery target specified\n2\t0/5000000\tbefore 2020-01-01 00:00\n3\t1/0\n"
    )
    assert parse_timeline_history(content) == [
        TimelineSwitch(1, Lsn.parse("0/3000158"), "no recovery target specified"),
        TimelineSwitch(2, Lsn.parse("0/5000000"), "before 2020-01-01 00:00"),
        TimelineSwitch(3, Lsn.parse("1/0"), ""),
    ]


@pytest.mark.parametrize("line", [b"1", b"x\t0/0\t", b"1\tnowhere\t"])
def test_what_is_no_timeline_history(line: bytes) -> None:
    with pytest.raises(DecodeError, match="timeline history"):
        parse_timeline_history(line)
