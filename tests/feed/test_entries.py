"""What records become: read back by protobuf and compared with messages that are made the long way."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress

import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from walstream.errors import CorruptBatch
from walstream.feed.reading.entries import STEP, Chunk, Lane, Region, decode
from walstream.feed.reading.wire import key_of, varint
from walstream.feed.wal_pb2 import OP_DELETE, OP_PUT, OP_TRUNCATE, Header, WalBatch, WalEntry
from walstream.log.batch import (
    CHECKED_POSITION,
    CONTROL_BIT,
    TRANSACTIONAL_BIT,
    Compression,
    compute_crc,
    parse_header,
)
from walstream.log.records import Record, build_batch
from walstream.positions import GlobalLsn

LATER = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
OPS = {b"c": OP_PUT, b"u": OP_PUT, b"r": OP_PUT, b"m": OP_PUT, b"d": OP_DELETE, b"t": OP_TRUNCATE}
NUMBERS = ("commit_lsn", "commit_time_ms", "seq", "txid")


def lane(topic: str = "shop.public.orders", partition: int = 3, since_ms: int = 0) -> Lane:
    return Lane("eu", topic, partition, {0: Region(7, since_ms), 1: Region(9, since_ms)})


def entries_of(chunk: Chunk) -> list[WalEntry]:
    """Let protobuf read what was written: the encoded entries in a row are a WalBatch."""
    entries = list(WalBatch.FromString(b"".join(chunk.encoded)).entries)
    assert len(entries) == len(chunk.lsns) == len(chunk.tenants) == len(chunk.encoded)
    assert [GlobalLsn.parse(entry.lsn) for entry in entries] == chunk.lsns
    assert [entry.tenant_id.encode() for entry in entries] == chunk.tenants
    assert [entry.key for entry in entries] == [key_of(encoded) for encoded in chunk.encoded]
    assert chunk.lsns == sorted(set(chunk.lsns))
    return entries


def expected(record: Record, where: Lane, append_ms: int) -> WalEntry:
    """Make the entry of a record by the letter of the specification, with a message object."""
    entry = WalEntry(topic=where.topic, partition=where.partition, offset=record.offset)
    region = where.regions[record.offset >> 32]
    entry.hlc_ts = max(append_ms, region.since_ms) << 16
    entry.lsn = str(GlobalLsn.of(entry.hlc_ts, region.number, record.offset & 0xFFFFFFFF))
    entry.committed_at_ms = max(record.timestamp_ms, 0)
    entry.key = record.key or b""
    entry.value = record.value or b""
    entry.checksum = struct.pack(">I", crc32c(entry.key + entry.value))
    entry.op_type = OP_PUT if record.value is not None else OP_DELETE
    tenants = {value for name, value in record.headers if name == "tenant"}
    seen: set[str] = set()
    for name, value in record.headers:
        if name == "tenant" and len(tenants) == 1 and value and is_text(value):
            entry.tenant_id = value.decode()
        elif name == "op" and name not in seen and value in OPS:
            seen.add(name)
            entry.op_type = OPS[value]
        elif name in NUMBERS and name not in seen and value and value.isdigit() and int(value) < 2**64:
            seen.add(name)
            setattr(entry, "committed_at_ms" if name == "commit_time_ms" else name, int(value))
        else:
            entry.headers.append(Header(name=name, value=value or b""))
    entry.local_lsn = entry.commit_lsn
    entry.key_prefix = f"eu:{entry.tenant_id}:{where.topic}:"
    return entry


def is_text(value: bytes) -> bool:
    try:
        return bool(value.decode())
    except UnicodeDecodeError:
        return False


def captured(
    number: int, *, tenant: bytes | None = b"acme", value: bytes | None = b"v" * 256, op: bytes = b"c"
) -> Record:
    headers = [("tenant", tenant)] if tenant is not None else []
    headers += [("op", op), ("commit_lsn", b"123456"), ("commit_time_ms", b"1700000000123"), ("txid", b"99")]
    return Record(number, 1_700_000_000_000, b"k%d" % number, b"v" * 256, (*headers, ("seq", b"%d" % (number + 1))))


numbers = st.one_of(
    st.integers(0, 2**64 + 5).map(lambda number: b"%d" % number),
    st.sampled_from([b"", b"-1", b" 7", b"1_0", b"+3", b"007", b"9" * 30]),
)
header = st.one_of(
    st.tuples(st.just("tenant"), st.sampled_from([b"acme", b"zorro", "tür".encode(), b"\xff", b"", None])),
    st.tuples(st.just("op"), st.sampled_from([*OPS, b"x", b"", None])),
    st.tuples(st.sampled_from(NUMBERS), st.none() | numbers),
    st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)),
)
tenants = st.sampled_from([(), (("tenant", b"acme"),), (("tenant", b"zorro"),)])
usual = st.builds(
    lambda first, op, lsn, txid, seq: (
        *first, ("op", op), ("commit_lsn", lsn), ("commit_time_ms", b"5"), *txid, ("seq", seq)
    ),
    st.one_of(tenants, st.lists(header, max_size=2)), st.sampled_from(list(OPS)),
    st.sampled_from([b"7", b"8"]) | numbers, st.sampled_from([(), (("txid", b"9"),), (("txid", b"10"),)]), numbers,
)  # fmt: skip
content = st.none() | st.binary(max_size=20) | st.sampled_from([b"v" * 256, b"w" * 127, b"w" * 128, b"x" * 20_000])
record = st.builds(
    lambda key, value, headers, timestamp_ms: Record(0, timestamp_ms, key, value, tuple(headers)),
    content, content, st.one_of(st.just(()), usual, st.lists(header, max_size=8)), st.integers(-1, 2**45),
)  # fmt: skip


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[Record], list[bytes], list[int], int]:
    """Draw batches that follow each other, with gaps as compaction leaves them: records, batches, append times."""
    offset = draw(st.sampled_from([0, 5, 9_990, 16_370, 2**32 - 20, 2**32 + 9_995]))
    first = offset
    append_ms = draw(st.integers(0, 2**44))
    records, batches, times = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        members = []
        for drawn in draw(st.lists(record, min_size=1, max_size=12)):
            members.append(drawn._replace(offset=offset))
            offset += draw(st.sampled_from([1, 1, 1, 2, 7]))
        append_ms += draw(st.sampled_from([0, 1, 1000]))
        batches.append(bytes(build_batch(
            members, base_offset=members[0].offset, append_time_ms=append_ms,
            compression=draw(st.sampled_from(list(Compression))),
        )))  # fmt: skip
        records += members
        times += [append_ms] * len(members)
    return records, batches, times, first


@LATER
@given(logs(), st.integers(0, 60), st.sampled_from([0, 2**43]))
def test_entries_are_what_protobuf_would_have_written(
    log: tuple[list[Record], list[bytes], list[int], int], skip: int, since_ms: int
) -> None:
    records, batches, times, first = log
    where = lane(since_ms=since_ms)
    chunk = decode(where, b"".join(batches), first + skip)
    wanted = [
        expected(record, where, append_ms)
        for record, append_ms in zip(records, times, strict=True)
        if record.offset >= first + skip
    ]
    assert entries_of(chunk) == wanted
    assert chunk.next_offset == max(records[-1].offset + 1, first + skip)
    assert chunk.lsns == [where.lsn(entry.offset, entry.hlc_ts >> 16) for entry in wanted]


@LATER
@given(logs(), st.data())
def test_read_in_any_pieces_it_is_the_same(
    log: tuple[list[Record], list[bytes], list[int], int], data: st.DataObject
) -> None:
    records, batches, _, first = log
    whole, raw = decode(lane(), b"".join(batches), first), b"".join(batches)
    offset, stamp_ms, found = first, 0, []
    while offset <= records[-1].offset:
        piece = decode(lane(), _from_offset(raw, offset), offset, stamp_ms, bytes_max=data.draw(st.integers(1, 2000)))
        assert piece.next_offset > offset
        found += piece.encoded
        offset, stamp_ms = piece.next_offset, piece.stamp_ms
    assert found == whole.encoded


def _from_offset(raw: bytes, offset: int) -> bytes:
    """Answer as a node does: from the batch that holds the offset on."""
    while parse_header(raw).next_offset <= offset:
        raw = raw[parse_header(raw).length :]
    return raw


@LATER
@given(logs(), st.data())
def test_what_is_cut_short_ends_before_the_part(
    log: tuple[list[Record], list[bytes], list[int], int], data: st.DataObject
) -> None:
    _, batches, _, first = log
    raw = b"".join(batches)
    chunk = decode(lane(), raw[: data.draw(st.integers(0, len(raw) - 1))], first)
    whole = decode(lane(), raw, first)
    assert chunk.encoded == whole.encoded[: len(chunk)]
    assert chunk.next_offset < whole.next_offset


def test_more_records_than_one_step() -> None:
    for count in (STEP - 1, STEP, STEP + 1, 3 * STEP):
        raw = bytes(build_batch([captured(number) for number in range(count)], append_time_ms=5))
        found = entries_of(decode(lane(), raw, 0))
        assert [(entry.offset, entry.seq) for entry in found] == [(number, number + 1) for number in range(count)]


def test_headers_of_applications_go_along_and_are_not_kept() -> None:
    where = lane()
    acme, zorro = ("tenant", b"acme"), ("tenant", b"zorro")
    headers: list[tuple[tuple[str, bytes | None], ...]] = [
        (acme, ("trace", b"1")), (acme, ("trace", b"1")), (), (acme, ("trace", b"1")), (acme,), (("trace", b"2"), acme),
        (("trace", b"2"), acme), (acme, ("op", b"?"), ("trace", b"3")), (zorro, ("trace", b"4"), ("seq", b"1")),
        (zorro, ("seq", b"2")), (zorro, ("seq", b"3")), (zorro, ("trace", b"4"), ("seq", b"4")), (zorro,),
        (("seq", b"5"),),
    ]  # fmt: skip
    records = [Record(at, 7, b"k", b"v", some) for at, some in enumerate(headers)]
    found = entries_of(decode(where, bytes(build_batch(records, append_time_ms=9)), 0))
    assert found == [expected(record, where, 9) for record in records]
    many = [Record(at, 7, b"k", b"v", (acme, ("trace", b"%d" % at))) for at in range(1_000)]
    decode(where, bytes(build_batch(many, append_time_ms=9)), 0)
    assert len(where.contexts._kept) < len(headers)


def test_every_transaction_has_its_own_fields() -> None:
    where = lane()
    strange: list[bytes | None] = [b"", b"0", b"x", b"18446744073709551615", b"18446744073709551616", b" 1", b"9" * 19]
    strange += [None, b"%d" % (2**28 - 1), b"%d" % 2**28, b"%d" % 2**42]
    rows: list[tuple[tuple[str, bytes | None], ...]] = [
        (("tenant", b"acme"), ("op", b"u"), ("commit_lsn", b"7"), ("commit_time_ms", b"8"), ("txid", b"9"))
    ]
    for at in range(2, 5):
        rows += [(*rows[0][:at], (rows[0][at][0], value), *rows[0][at + 1 :]) for value in strange]
    rows += [(*rows[0][:at], *rows[0][at + 1 :]) for at in range(5)]
    rows += [(header, *rows[0]) for header in (*rows[0], ("op", b"?"), ("tenant", b"zorro"), ("trace", b"1"))]
    records = [
        Record(at, 7, b"k", None if at % 2 else b"v", (*row, ("seq", b"%d" % (at % 3)))) for at, row in enumerate(rows)
    ]
    found = entries_of(decode(where, bytes(build_batch(records, append_time_ms=9)), 0))
    assert found == [expected(record, where, 9) for record in records]


def test_tenants_in_turns_keep_their_entries() -> None:
    tenants = [b"a", b"b", None, b"a", b"a", None, b"b"] * 30
    raw = bytes(build_batch([captured(at, tenant=tenant) for at, tenant in enumerate(tenants)], append_time_ms=5))
    assert decode(lane(), raw, 0).tenants == [tenant or b"" for tenant in tenants]


def test_the_index_rolls_over_inside_a_batch() -> None:
    first = 2**32 - 3
    records = [captured(first + number) for number in range(6)]
    raw = bytes(build_batch(records, base_offset=first, append_time_ms=1000))
    found = entries_of(decode(lane(), raw, first))
    stamp = 1000 << 16
    assert [GlobalLsn.parse(entry.lsn) for entry in found] == [
        *(GlobalLsn.of(stamp, 7, 2**32 - 3 + number) for number in range(3)),
        *(GlobalLsn.of(stamp, 9, number) for number in range(3)),
    ]
    assert [entry.offset for entry in found] == [first + number for number in range(6)]


def test_it_waits_for_a_region_that_is_not_known() -> None:
    one = Lane("eu", "orders", 0, {0: Region(1, 0)})
    first = 2**32 - 4
    raws = [
        bytes(build_batch([captured(at), captured(at + 1)], base_offset=at, append_time_ms=5))
        for at in range(first, first + 8, 2)
    ]
    chunk = decode(one, b"".join(raws), first)
    assert (len(chunk), chunk.next_offset) == (4, 2**32)
    stuck = decode(one, b"".join(raws[2:]), 2**32)
    assert (len(stuck), stuck.next_offset) == (0, 2**32)


def test_stamps_do_not_go_back_though_the_clock_did() -> None:
    raws = [
        bytes(build_batch([captured(at)], base_offset=at, append_time_ms=ms)) for at, ms in enumerate((500, 480, 510))
    ]
    assert [entry.hlc_ts >> 16 for entry in entries_of(decode(lane(), b"".join(raws), 0))] == [500, 500, 510]
    assert [entry.hlc_ts >> 16 for entry in entries_of(decode(lane(), raws[1], 1, stamp_ms=500))] == [500]


def test_batches_without_append_time_are_strays_from_where_the_partition_joined_on() -> None:
    where = Lane("eu", "orders", 0, {0: Region(7, 0, 0, 2), 1: Region(9, 0, 0, 50)})
    stamps = (None, 700, None, None, 800, None)
    raw = b"".join(
        bytes(build_batch([captured(2 * at), captured(2 * at + 1)], base_offset=2 * at, append_time_ms=ms))
        for at, ms in enumerate(stamps)
    )
    assert decode(where, raw, 0).strays == [(4, 4), (6, 6), (10, 10)]
    assert decode(where, raw, 5).strays == [(0, 5), (1, 6), (5, 10)], "also in the middle of a batch"
    assert [GlobalLsn(lsn).time_ms for lsn in decode(where, raw, 2).lsns] == [700] * 6 + [800] * 4
    assert not decode(Lane("eu", "orders", 0, {0: Region(7, 0, 0, 12)}), raw, 0).strays


def test_a_record_from_before_append_time_has_the_stamp_of_the_one_before() -> None:
    raws = [
        bytes(build_batch([Record(0, 999_999, b"k", b"v")])),
        bytes(build_batch([Record(1, 5, b"k", b"v")], base_offset=1, append_time_ms=700)),
        bytes(build_batch([Record(2, 999_999, b"k", b"v")], base_offset=2)),
    ]
    found = entries_of(decode(lane(since_ms=20), b"".join(raws), 0))
    assert [entry.hlc_ts >> 16 for entry in found] == [20, 700, 700]
    assert [entry.committed_at_ms for entry in found] == [999_999, 5, 999_999]


def test_markers_and_aborted_transactions_are_passed_over() -> None:
    def batch(at: int, producer_id: int, bits: int) -> bytes:
        made = build_batch([captured(at)], base_offset=at, append_time_ms=5, producer_id=producer_id, producer_epoch=0)
        made[CHECKED_POSITION + 1] |= bits
        struct.pack_into(">I", made, 17, compute_crc(made))
        return bytes(made)

    marker = TRANSACTIONAL_BIT | CONTROL_BIT
    raw = b"".join((
        batch(0, 1, TRANSACTIONAL_BIT), batch(1, 2, TRANSACTIONAL_BIT), batch(2, 1, TRANSACTIONAL_BIT),
        batch(3, 1, marker), batch(4, 2, marker), batch(5, 1, TRANSACTIONAL_BIT), batch(6, 1, marker), batch(7, -1, 0),
    ))  # fmt: skip
    assert [entry.offset for entry in entries_of(decode(lane(), raw, 0, aborted=[(1, 0)]))] == [1, 5, 7]
    assert decode(lane(), raw, 0, aborted=[(1, 0)]).next_offset == 8
    assert [entry.offset for entry in entries_of(decode(lane(), raw, 0))] == [0, 1, 2, 5, 7]


def test_a_header_whose_name_is_not_text_is_told_as_well_as_can_be() -> None:
    raw = build_batch([captured(0), Record(1, 5, b"k", b"v", (("name", b"x"),)), captured(2)], append_time_ms=5)
    at = raw.index(b"name")
    raw[at : at + 4] = b"n\xffme"
    struct.pack_into(">I", raw, 17, compute_crc(raw))
    found = entries_of(decode(lane(), bytes(raw), 0))
    assert [entry.offset for entry in found] == [0, 1, 2]
    assert found[1].headers[0].name == "n\N{REPLACEMENT CHARACTER}me"


def test_who_claims_two_tenants_belongs_to_none() -> None:
    record = captured(0)
    record = record._replace(
        headers=(("tenant", b"acme"), *record.headers[1:-1], ("tenant", b"evil"), record.headers[-1])
    )
    (entry,) = entries_of(decode(lane(), bytes(build_batch([record], append_time_ms=5)), 0))
    assert entry.tenant_id == ""
    assert [(header.name, header.value) for header in entry.headers] == [("tenant", b"acme"), ("tenant", b"evil")]


@LATER
@given(st.data(), st.booleans())
def test_bytes_that_are_no_records_are_said_to_be_wrong(data: st.DataObject, is_resealed: bool) -> None:
    """A producer can seal any bytes with a right CRC, and the node does not look into batches."""
    records = [captured(number) for number in range(data.draw(st.integers(1, 4)))]
    raw = build_batch(records, append_time_ms=5)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(61, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if is_resealed:
        struct.pack_into(">I", raw, 17, compute_crc(raw))
    with suppress(CorruptBatch):
        found = entries_of(decode(lane(), bytes(raw), 0))
        assert [entry.offset for entry in found] == sorted({entry.offset for entry in found})


def _records_payload(parts: Sequence[bytes], count: int) -> bytes:
    raw = bytearray(build_batch([Record(0, 5, b"k", b"v")], append_time_ms=5)[:61]) + b"".join(parts)
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">i", raw, 57, count)
    struct.pack_into(">I", raw, 17, compute_crc(raw))
    return bytes(raw)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x7e\x00\x00\x00" + varint(2**64 - 2),
        b"\x7e\x00\x00\x00\x01" + varint(2**64 - 2),
        b"\x7e\x00\x00\x00\x01\x01" + varint(2**62),
        b"\x7e\x00\x00\x00\x01\x01\x02" + varint(2**64 - 200),
        b"\x7e\x00\x00\x00\x01\x01\x02\x02a" + varint(2**64 - 200),
        b"\xff" * 40,
        b"\x7e",
        b"",
    ],
)
def test_lengths_that_cannot_be(payload: bytes) -> None:
    with pytest.raises(CorruptBatch, match=r"shop\.public\.orders-3 at offset 0"):
        decode(lane(), _records_payload([payload], 2_000_000_000), 0)
