"""Records: round trips, both ways against the record code of two stock clients, and garbage."""

from __future__ import annotations

import contextlib
import warnings
from struct import pack_into
from typing import Any

import aiokafka.record.default_records as aiokafka_records
import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import CorruptBatch
from walstream.log.batch import HEADER_BYTES, Compression, assemble, parse_header, stamp_append_time, validate
from walstream.log.records import Record, build_batch, iter_records, read_records, read_varint, write_varint

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # kafka-python 3.0 reads its schemas in a way Python is leaving.
    import kafka.record.default_records as kafka_python_records

CLIENTS = [
    pytest.param(aiokafka_records, compression, id=f"aiokafka-{compression.name}") for compression in Compression
] + [
    pytest.param(kafka_python_records, compression, id=f"kafka-python-{compression.name}")
    for compression in (Compression.NONE, Compression.GZIP)
]

SAMPLE = [
    Record(0, 1_700_000_000_000, b"key", b"value"),
    Record(1, 1_700_000_000_500, None, b"no key", (("trace", b"\x00\xff"), ("empty", b""), ("null", None))),
    Record(2, 1_699_999_999_000, b"tombstone", None),
    Record(3, 1_700_000_000_000, b"", b""),
    Record(4, 1_700_000_900_000, b"long" * 100, b"x" * 40_000, (("ключ", b"v" * 200),)),
]

RECORDS = st.lists(
    st.builds(
        Record,
        offset=st.integers(1, 300),
        timestamp_ms=st.integers(-1, 2**45),
        key=st.none() | st.binary(max_size=200),
        value=st.none() | st.binary(max_size=200),
        headers=st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=70)), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=20,
)


def placed(records: list[Record], base_offset: int) -> list[Record]:
    """Make the drawn offsets, which are steps, rise from the base offset on."""
    offset, result = base_offset - 1, []
    for record in records:
        offset += record.offset
        result.append(record._replace(offset=offset))
    return result


@settings(deadline=None)
@given(RECORDS, st.integers(0, 2**40), st.sampled_from(Compression))
def test_round_trip(records: list[Record], base_offset: int, compression: Compression) -> None:
    records = placed(records, base_offset)
    batch = build_batch(
        records, base_offset=base_offset, compression=compression, producer_id=5, producer_epoch=2, base_sequence=77
    )
    header = parse_header(batch)
    assert read_records(batch) == records
    assert list(iter_records(memoryview(batch))) == records
    assert (header.base_offset, header.last_offset, header.record_count) == (
        base_offset,
        records[-1].offset,
        len(records),
    )
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (5, 2, 77)
    assert header.max_timestamp == max(record.timestamp_ms for record in records)
    assert header.compression is compression


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_varints(value: int) -> None:
    encoded = write_varint(value)
    assert len(encoded) <= 10
    assert read_varint(encoded + b"\xff", 0) == (value, len(encoded))


@pytest.mark.parametrize(("client", "compression"), CLIENTS)
def test_we_read_what_stock_clients_write(client: Any, compression: Compression) -> None:
    builder = client.DefaultRecordBatchBuilder(
        magic=2,
        compression_type=int(compression),
        is_transactional=False,
        producer_id=11,
        producer_epoch=3,
        base_sequence=40,
        batch_size=1 << 20,
    )
    for record in SAMPLE:
        builder.append(record.offset, record.timestamp_ms, record.key, record.value, list(record.headers))
    batch = bytearray(builder.build())
    header = validate(batch)
    assert header.compression is compression
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (11, 3, 40)
    assert read_records(batch) == SAMPLE


@pytest.mark.parametrize(("client", "compression"), CLIENTS)
def test_stock_clients_read_what_we_write(client: Any, compression: Compression) -> None:
    records = [record._replace(offset=record.offset + 900) for record in SAMPLE]
    batch = build_batch(records, base_offset=900, compression=compression)
    theirs = client.DefaultRecordBatch(bytes(batch))
    assert theirs.validate_crc()
    assert [
        Record(each.offset, each.timestamp, each.key, each.value, tuple((key, value) for key, value in each.headers))
        for each in theirs
    ] == records


def test_plain_snappy_as_librdkafka_writes_it() -> None:
    batch = build_batch(SAMPLE)
    plain = cramjam.snappy.compress_raw(bytes(batch[HEADER_BYTES:]))
    header = parse_header(batch)._replace(attributes=int(Compression.SNAPPY))
    assert read_records(assemble(header, bytes(plain))) == SAMPLE


def test_append_time_is_everybodys_timestamp() -> None:
    batch = build_batch(SAMPLE)
    stamp_append_time(batch, 5_000)
    assert {record.timestamp_ms for record in iter_records(batch)} == {5_000}
    assert build_batch(SAMPLE, append_time_ms=5_000) == batch


def test_a_header_key_that_is_not_text_is_shown_all_the_same() -> None:
    batch = build_batch([Record(0, 0, None, None, (("ab", None),))])
    at = batch.index(b"ab")
    batch[at] = 0xFF
    assert read_records(batch)[0].headers == (("\ufffdb", None),)


@pytest.mark.parametrize(
    ("layout", "position", "value"),
    [
        (">i", 57, 2**31 - 1),
        (">i", 57, 4),
        (">i", 57, 0),
        (">i", 23, 3),
        (">q", 27, 2**63 - 1),
        (">h", 21, 6),
        (">i", 8, 70),
    ],
)
def test_a_header_that_contradicts_its_records(layout: str, position: int, value: int) -> None:
    batch = build_batch(SAMPLE)
    pack_into(layout, batch, position, value)
    with pytest.raises(CorruptBatch):
        read_records(batch)


@settings(deadline=None)
@given(st.binary(max_size=120), st.integers(0, 50) | st.just(2**31 - 1), st.sampled_from(Compression))
def test_garbage_raises_only_the_named_error(garbage: bytes, count: int, compression: Compression) -> None:
    header = parse_header(build_batch(SAMPLE))._replace(
        record_count=count, last_offset_delta=2**31 - 1, attributes=int(compression)
    )
    with contextlib.suppress(CorruptBatch):
        read_records(assemble(header, garbage), bytes_max=1 << 20)


@settings(deadline=None)
@given(RECORDS, st.data())
def test_damage_raises_only_the_named_error(records: list[Record], data: st.DataObject) -> None:
    batch = build_batch(placed(records, 0))
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(0, len(batch) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptBatch):
        read_records(batch, bytes_max=1 << 20)


def test_a_bomb_is_refused() -> None:
    batch = build_batch([Record(0, 0, b"k", bytes(1 << 22))], compression=Compression.ZSTD)
    assert len(batch) < 2_000
    with pytest.raises(CorruptBatch):
        read_records(batch, bytes_max=1 << 20)
