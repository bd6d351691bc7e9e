"""Batch headers and CRCs: what is accepted, what is refused and with which name, and that garbage is survived."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from struct import pack_into
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream import log
from walstream.errors import (
    CorruptBatch,
    InvalidRecord,
    InvalidTimestamp,
    RequestError,
    TransactionsUnsupported,
    UnsupportedFormat,
)
from walstream.log.batch import (
    CRC_POSITION,
    HEADER_BYTES,
    BatchHeader,
    Compression,
    assemble,
    check_crc,
    compute_crc,
    parse_header,
    stamp,
    stamp_append_time,
    validate,
    verified_prefix,
    walk,
)


def build(count: int = 3, **options: Any) -> bytearray:
    """Build a batch with a stock client's own builder."""
    settings = {
        "magic": 2,
        "compression_type": 0,
        "is_transactional": 0,
        "producer_id": 7,
        "producer_epoch": 1,
        "base_sequence": 10,
        "batch_size": 1 << 20,
    }
    builder = DefaultRecordBatchBuilder(**(settings | options))
    for index in range(count):
        builder.append(index, timestamp=1_000 + index, key=b"key", value=b"value", headers=[])
    return bytearray(builder.build())


def patch(batch: bytearray, layout: str, position: int, value: int) -> bytearray:
    """Change one field and make the CRC right again."""
    pack_into(layout, batch, position, value)
    pack_into(">I", batch, CRC_POSITION, compute_crc(batch))
    return batch


def stored(count: int = 5) -> bytearray:
    """Three records a batch, as a log holds them."""
    buffer = bytearray()
    for index in range(count):
        batch = build()
        stamp(batch, index * 3, 4)
        buffer += batch
    return buffer


def test_header_of_a_stock_client() -> None:
    batch = build()
    header = validate(memoryview(batch))
    assert header == BatchHeader(0, len(batch), -1, 2, header.crc, 0, 2, 1_000, 1_002, 7, 1, 10, 3)
    assert (header.last_offset, header.next_offset, header.last_sequence) == (2, 3, 12)
    assert header.compression is Compression.NONE
    assert header.has_producer
    assert not header.is_transactional
    assert not header.is_control
    assert not header.uses_append_time
    assert header.delete_horizon_ms is None
    assert parse_header(b"before" + batch, 6) == header


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer(kind: type) -> None:
    buffer = kind(bytearray(stored()))
    assert verified_prefix(buffer) == (len(buffer), False)
    assert [header.base_offset for _, header in walk(buffer)] == [0, 3, 6, 9, 12]
    assert check_crc(buffer, 0, parse_header(buffer).length)


def test_sequences_wrap() -> None:
    assert validate(build(base_sequence=2**31 - 2)).last_sequence == 0
    assert validate(build(producer_id=-1, producer_epoch=-1, base_sequence=-1)).last_sequence == -1


def test_stamps_stay_outside_the_crc() -> None:
    batch = build()
    stamp(batch, 1_000_000_007, 42)
    header = validate(batch)
    assert (header.base_offset, header.leader_epoch, header.last_offset) == (1_000_000_007, 42, 1_000_000_009)


def test_append_time_is_covered_by_the_crc() -> None:
    batch = build()
    before = parse_header(batch)
    stamp_append_time(memoryview(batch), 5_000)
    after = parse_header(batch)
    assert check_crc(batch, 0, len(batch))
    assert after.uses_append_time
    assert after._replace(crc=0) == before._replace(crc=0, attributes=8, max_timestamp=5_000)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda batch: batch[:60], CorruptBatch),
        (lambda batch: batch[:-1], CorruptBatch),
        (lambda batch: b"", CorruptBatch),
        (lambda batch: batch + b"x", InvalidRecord),
        (lambda batch: batch + batch, InvalidRecord),
        (lambda batch: patch(batch, ">b", 16, 1), UnsupportedFormat),
        (lambda batch: patch(batch, ">b", 16, 0)[:30], UnsupportedFormat),
        (lambda batch: patch(batch, ">b", 16, 3), CorruptBatch),
        (lambda batch: patch(batch, ">i", 8, 48), CorruptBatch),
        (lambda batch: patch(batch, ">i", 8, -1), CorruptBatch),
        (lambda batch: patch(batch, ">i", 8, 2**31 - 1), CorruptBatch),
        (lambda batch: patch(batch, ">i", 23, -1), CorruptBatch),
        (lambda batch: patch(batch, ">i", 57, -3), CorruptBatch),
        (lambda batch: patch(batch, ">i", 57, 2), InvalidRecord),
        (lambda batch: patch(batch, ">i", 23, 2**31 - 1), InvalidRecord),
        (lambda batch: patch(patch(batch, ">i", 23, 999), ">i", 57, 1000), InvalidRecord),
        (lambda batch: patch(batch, ">h", 21, 5), InvalidRecord),
        (lambda batch: patch(batch, ">h", 21, 0x08), InvalidTimestamp),
        (lambda batch: patch(batch, ">h", 21, 0x10), TransactionsUnsupported),
        (lambda batch: patch(batch, ">h", 21, 0x30), InvalidRecord),
        (lambda batch: patch(batch, ">h", 21, 0x40), InvalidRecord),
        (lambda batch: patch(batch, ">i", 53, -1), InvalidRecord),
        (lambda batch: patch(batch, ">h", 51, -1), InvalidRecord),
    ],
)
def test_what_a_producer_may_not_send(spoil: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        validate(spoil(build()))
    assert caught.type is error


def test_bits_without_a_meaning_pass() -> None:
    assert validate(patch(build(), ">h", 21, -0x8000)).attributes == -0x8000


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=8 * 118 - 1))
def test_any_flipped_bit_is_noticed_or_outside_the_crc(bit: int) -> None:
    batch = build()
    bit %= 8 * len(batch)
    batch[bit // 8] ^= 1 << bit % 8
    if bit // 8 < 8 or 12 <= bit // 8 < 16:
        validate(batch)
    else:
        with pytest.raises(RequestError):
            validate(batch)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(min_value=-3, max_value=210))
def test_garbage_raises_only_named_errors(garbage: bytes, position: int) -> None:
    for attempt in (lambda: parse_header(garbage, position), lambda: validate(garbage), lambda: list(walk(garbage))):
        with contextlib.suppress(RequestError):
            attempt()
    assert not check_crc(garbage, position, len(garbage) + 1)
    good, is_bad = verified_prefix(garbage)
    assert good == 0
    assert is_bad or len(garbage) < HEADER_BYTES or int.from_bytes(garbage[8:12]) > len(garbage) - 12


@settings(deadline=None)
@given(st.data())
def test_verified_prefix_ends_at_the_first_wrong_batch(data: st.DataObject) -> None:
    buffer = stored()
    length = len(buffer) // 5
    index = data.draw(st.integers(0, 4))
    position = index * length + data.draw(st.integers(CRC_POSITION, length - 1))
    buffer[position] ^= 1 << data.draw(st.integers(0, 7))
    assert verified_prefix(buffer) == (index * length, True)


@settings(deadline=None)
@given(st.integers(0, 590))
def test_verified_prefix_leaves_out_a_partial_tail(size: int) -> None:
    buffer = stored()
    size = min(size, len(buffer))
    length = len(buffer) // 5
    assert verified_prefix(memoryview(buffer)[:size]) == (size // length * length, False)
    assert len(list(walk(buffer[:size]))) == size // length


def test_verified_prefix_wants_rising_offsets() -> None:
    buffer = stored()
    length = len(buffer) // 5
    pack_into(">q", buffer, 2 * length, 5)
    assert verified_prefix(buffer) == (2 * length, True)
    pack_into(">q", buffer, 2 * length, 7)
    assert verified_prefix(buffer) == (3 * length, True)


def test_assemble_is_the_inverse_of_parsing() -> None:
    batch = build()
    header = parse_header(batch)
    assert assemble(header._replace(length=0, crc=0), batch[HEADER_BYTES:]) == batch


PURE = ["batch", "compression", "records", "epochs", "producers", "compaction"]


@pytest.mark.parametrize("module", PURE)
def test_the_core_of_the_log_is_sans_io(module: str) -> None:
    tree = ast.parse((Path(log.__file__).parent / f"{module}.py").read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"asyncio", "socket", "time", "random", "threading", "os"}
