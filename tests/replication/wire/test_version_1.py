"""Protocol version 1, held to bytes that were written out by hand from its description."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.errors import (
    BadChecksum,
    BadMagic,
    FrameTooLarge,
    LinkError,
    LinkVersionUnknown,
    MalformedFrame,
)
from walstream.replication.wire import version_1 as v1
from walstream.replication.wire.inbox import Inbox

FRAME_BYTES_MAX = 1 << 20

HANDSHAKE = bytes.fromhex(
    "0001"  # version 1
    "0000000000000007"  # node 7
    "01"  # sync
)
ACK_OK = bytes.fromhex(
    "00"  # OK
    "0000000000000102"  # last position 258
    "0000"  # no error
)
ACK_ERROR = bytes.fromhex(
    "01"  # ERROR
    "0000000000000000"  # no position
    "0004"  # four bytes of text
    "6ec3a96f"  # "néo"
)
BATCH = bytes.fromhex(
    "5741"  # WA
    "0001"  # version 1
    "0000002d"  # 45 bytes: 30 and a topic of 6, data of 9
    "0006"  # topic of 6 bytes
    "6f7264657273"  # "orders"
    "00000003"  # partition 3
    "00000000000003e8"  # base offset 1000
    "00000002"  # 2 records
    "0000018bcfe56800"  # 1,700,000,000,000 ms
    "cbf43926"  # the CRC-32 of "123456789", as every description of it says
    "313233343536373839"  # "123456789"
)
HEARTBEAT = bytes.fromhex(
    "4842"  # HB
    "0000018bcfe56800"
)
ECHO = bytes.fromhex("0000018bcfe56800")
NOW_MS = 1_700_000_000_000


def inbox_with(data: bytes) -> Inbox:
    inbox = Inbox()
    while data:
        data = data[inbox.feed(data) :]
    return inbox


def join(buffers: list[bytes | bytearray | memoryview]) -> bytes:
    return b"".join(buffers)


def test_handshake() -> None:
    assert v1.Handshake(1, 7, v1.MODE_SYNC).encode() == HANDSHAKE
    assert v1.take_handshake(inbox_with(HANDSHAKE)) == v1.Handshake(1, 7, v1.MODE_SYNC)


def test_handshake_of_a_mode_that_is_none() -> None:
    with pytest.raises(MalformedFrame, match="mode 2"):
        v1.take_handshake(inbox_with(HANDSHAKE[:-1] + b"\x02"))


@pytest.mark.parametrize(
    ("ack", "expected"),
    [(v1.HandshakeAck(last_position=258), ACK_OK), (v1.HandshakeAck(v1.STATUS_ERROR, 0, "néo"), ACK_ERROR)],
)
def test_acknowledgement(ack: v1.HandshakeAck, expected: bytes) -> None:
    assert ack.encode() == expected
    assert v1.take_ack(inbox_with(expected)) == ack


def test_acknowledgement_that_is_none() -> None:
    with pytest.raises(MalformedFrame, match="Status 72"):
        v1.take_ack(inbox_with(b"HTTP/1.1 400 Bad Request\r\n"))


def test_error_text_that_is_too_long_is_cut_at_a_character() -> None:
    ack = v1.take_ack(inbox_with(v1.HandshakeAck(v1.STATUS_ERROR, 0, "é" * 40_000).encode()))
    assert ack is not None
    assert ack.error == "é" * (0xFFFF // 2)


def test_batch() -> None:
    assert join(v1.encode_batch("orders", 3, 1000, 2, NOW_MS, b"123456789")) == BATCH
    pushed = v1.take_pushed(inbox_with(BATCH), FRAME_BYTES_MAX)
    assert pushed == v1.PushedBatch("orders", 3, 1000, 2, NOW_MS, memoryview(b"123456789"))


def test_batch_is_sent_without_a_copy() -> None:
    data = bytearray(b"123456789")
    assert v1.encode_batch("orders", 3, 1000, 2, NOW_MS, data)[1] is data


def test_heartbeat_and_its_echo() -> None:
    assert v1.encode_heartbeat(NOW_MS) == HEARTBEAT
    assert v1.take_pushed(inbox_with(HEARTBEAT), FRAME_BYTES_MAX) == v1.Heartbeat(NOW_MS)
    assert v1.encode_echo(NOW_MS) == ECHO
    assert v1.take_echo(inbox_with(ECHO)) == v1.Heartbeat(NOW_MS)


@pytest.mark.parametrize("step", [1, 2, 7, 10, 11, 4096])
def test_stream_in_pieces(step: int) -> None:
    inbox, found = Inbox(), []
    stream = BATCH + HEARTBEAT + BATCH + BATCH + HEARTBEAT
    for start in range(0, len(stream), step):
        piece = stream[start : start + step]
        assert inbox.feed(piece) == len(piece)
        while (taken := v1.take_pushed(inbox, FRAME_BYTES_MAX)) is not None:
            found.append(type(taken))
    assert found == [v1.PushedBatch, v1.Heartbeat, v1.PushedBatch, v1.PushedBatch, v1.Heartbeat]
    assert len(inbox) == 0


def test_every_beginning_of_a_frame_is_waited_for() -> None:
    for end in range(len(BATCH)):
        assert v1.take_pushed(inbox_with(BATCH[:end]), FRAME_BYTES_MAX) is None
    for end in range(len(HEARTBEAT)):
        assert v1.take_pushed(inbox_with(HEARTBEAT[:end]), FRAME_BYTES_MAX) is None
    for end in range(len(ACK_ERROR)):
        assert v1.take_ack(inbox_with(ACK_ERROR[:end])) is None
    for end in range(len(HANDSHAKE)):
        assert v1.take_handshake(inbox_with(HANDSHAKE[:end])) is None


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"GET / HTTP/1.1\r\n", BadMagic),
        (BATCH[:2] + b"\x00\x02" + BATCH[4:], LinkVersionUnknown),
        (BATCH[:4] + b"\x00\x10\x00\x01" + BATCH[8:], FrameTooLarge),
        (BATCH[:4] + b"\x00\x00\x00\x1d" + BATCH[8:], MalformedFrame),
        (BATCH[:8] + b"\x00\x10" + BATCH[10:], MalformedFrame),
        (BATCH[:10] + b"\xff" + BATCH[11:], MalformedFrame),
        (BATCH[:-1] + b"8", BadChecksum),
        (BATCH[:40] + b"\x00\x00\x00\x00" + BATCH[44:], BadChecksum),
    ],
    ids=["magic", "version", "oversize", "undersize", "topic too long", "topic not UTF-8", "data", "checksum"],
)
def test_wrong_frames(frame: bytes, error: type[LinkError]) -> None:
    with pytest.raises(error):
        v1.take_pushed(inbox_with(frame), FRAME_BYTES_MAX)


def test_oversize_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(FrameTooLarge):
        v1.take_pushed(inbox_with(BATCH[:4] + b"\xff\xff\xff\xff"), FRAME_BYTES_MAX)


@given(
    topic=st.text(max_size=249),
    partition=st.integers(-(2**31), 2**31 - 1),
    base_offset=st.integers(-(2**63), 2**63 - 1),
    count=st.integers(0, 2**32 - 1),
    timestamp_ms=st.integers(-(2**63), 2**63 - 1),
    data=st.binary(max_size=2000),
)
def test_batches_round_trip(
    topic: str, partition: int, base_offset: int, count: int, timestamp_ms: int, data: bytes
) -> None:
    try:
        topic.encode()
    except UnicodeEncodeError:
        return
    frame = join(v1.encode_batch(topic, partition, base_offset, count, timestamp_ms, data))
    # The layout again, by other means.
    name = topic.encode()
    body = struct.pack(
        f">H{len(name)}siqIqI", len(name), name, partition, base_offset, count, timestamp_ms, zlib.crc32(data)
    )
    assert frame == struct.pack(">HHI", 0x5741, 1, len(body) + len(data)) + body + data
    taken = v1.take_pushed(inbox_with(frame), FRAME_BYTES_MAX)
    assert taken == v1.PushedBatch(topic, partition, base_offset, count, timestamp_ms, memoryview(data))


@given(st.binary(max_size=200), st.sampled_from([b"", b"WA", b"WA\x00\x01", b"WA\x00\x01\x00\x00", b"HB"]))
def test_garbage_raises_nothing_but_a_link_error(garbage: bytes, beginning: bytes) -> None:
    for take in (
        lambda inbox: v1.take_pushed(inbox, FRAME_BYTES_MAX),
        v1.take_handshake,
        v1.take_ack,
        v1.take_echo,
    ):
        inbox = inbox_with(beginning + garbage)
        try:
            while take(inbox) is not None:
                pass
        except LinkError:
            pass
