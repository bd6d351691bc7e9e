"""Compaction: what stays, what goes, when, and that a reader of the compacted log ends with the same state."""

from __future__ import annotations

from collections.abc import Iterable
from struct import pack_into
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import CorruptBatch, CorruptLog, InvalidRecord
from walstream.log.batch import (
    CRC_POSITION,
    BatchHeader,
    Buffer,
    Compression,
    assemble,
    check_crc,
    compute_crc,
    parse_header,
    stamp_append_time,
    verified_prefix,
)
from walstream.log.compaction import CleanStats, OffsetMap, check_keys, clean
from walstream.log.records import Record, build_batch, read_records

RETENTION_MS = 1_000


def batch_of(base_offset: int, *pairs: tuple[bytes | None, bytes | None], **options: Any) -> bytearray:
    records = [
        Record(base_offset + index, 100 + base_offset + index, key, value, (("h", b"1"),))
        for index, (key, value) in enumerate(pairs)
    ]
    return build_batch(records, base_offset=base_offset, leader_epoch=3, **options)


def map_of(batches: Iterable[Buffer], clean_point: int = 0, **options: Any) -> OffsetMap:
    offsets = OffsetMap(clean_point, **options)
    for batch in batches:
        if not offsets.add(batch):
            break
    return offsets


def compact(batches: list[Any], now_ms: int = 0, log_end: int = 1 << 40, **options: Any) -> list[Buffer]:
    return list(
        clean(batches, map_of(batches), now_ms=now_ms, delete_retention_ms=RETENTION_MS, log_end=log_end, **options)
    )


def contents(batches: Iterable[Buffer]) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for batch in batches for record in read_records(batch)]


@pytest.mark.parametrize("compression", Compression)
def test_the_last_record_of_each_key_stays(compression: Compression) -> None:
    first = batch_of(
        0,
        (b"a", b"1"),
        (b"b", b"1"),
        (b"a", b"2"),
        compression=compression,
        producer_id=8,
        producer_epoch=1,
        base_sequence=30,
    )
    second = batch_of(3, (b"b", b"2"), compression=compression)
    stats = CleanStats()
    cleaned = compact([first, second], stats=stats)
    assert contents(cleaned) == [(2, b"a", b"2"), (3, b"b", b"2")]
    before, after = parse_header(first), parse_header(cleaned[0])
    assert after._replace(length=0, crc=0) == before._replace(length=0, crc=0, record_count=1)
    assert check_crc(cleaned[0], 0, after.length)
    assert read_records(cleaned[0]) == read_records(first)[2:]
    assert cleaned[1] is second
    assert (stats.records_read, stats.records_kept) == (4, 2)
    assert stats.bytes_read == len(first) + len(second)
    assert stats.bytes_kept == sum(map(len, cleaned))


def test_an_empty_batch_goes_unless_its_header_is_needed() -> None:
    first = batch_of(0, (b"a", b"1"), producer_id=8, producer_epoch=1, base_sequence=30, compression=Compression.ZSTD)
    second = batch_of(1, (b"a", b"2"))
    assert compact([first, second]) == [second]
    cleaned = compact([first, second], keeps_header=lambda header: header.producer_id == 8)
    header = parse_header(cleaned[0])
    assert (header.record_count, header.base_offset, header.last_offset, header.length) == (0, 0, 0, 61)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (8, 1, 30)
    assert contents(cleaned) == [(1, b"a", b"2")]
    assert verified_prefix(b"".join(cleaned)) == (sum(map(len, cleaned)), False)
    assert compact(cleaned, keeps_header=lambda _: True) == cleaned
    assert compact(cleaned) == [second]


def test_max_timestamp_is_that_of_the_records_that_stay() -> None:
    batch = build_batch([Record(0, 900, b"a", b"1"), Record(1, 500, b"a", b"2")])
    (cleaned,) = compact([batch])
    assert parse_header(cleaned).max_timestamp == 500
    assert read_records(cleaned) == [Record(1, 500, b"a", b"2")]


def test_append_time_stays() -> None:
    batch = batch_of(0, (b"a", b"1"), (b"a", None))
    stamp_append_time(batch, 7_777)
    (cleaned,) = compact([batch])
    header = parse_header(cleaned)
    assert header.uses_append_time
    assert header.max_timestamp == 7_777
    assert read_records(cleaned) == [Record(1, 7_777, b"a", None, (("h", b"1"),))]


def test_the_life_of_a_tombstone() -> None:
    log: list[Any] = [
        batch_of(0, (b"a", b"1"), (b"b", b"1")),
        batch_of(2, (b"a", None), (b"c", b"1")),
        batch_of(4, (b"d", b"1")),
    ]
    stats = CleanStats()
    once = compact(log, now_ms=10_000, stats=stats)
    # The first round takes what it deletes, and starts its time.
    assert contents(once) == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1"), (4, b"d", b"1")]
    assert parse_header(once[1]).delete_horizon_ms == 11_000
    assert stats.next_horizon_ms == 11_000
    assert [record.timestamp_ms for record in read_records(once[1])] == [102, 103]
    assert parse_header(once[1]).max_timestamp == 103
    # Until then nothing moves, and the horizon is not put off.
    clean_point = map_of(log).end
    for now_ms in (10_500, 10_999):
        again = list(clean(once, OffsetMap(clean_point), now_ms=now_ms, delete_retention_ms=RETENTION_MS, log_end=5))
        assert again == once
    stats = CleanStats()
    gone = list(
        clean(once, OffsetMap(clean_point), now_ms=11_000, delete_retention_ms=RETENTION_MS, log_end=5, stats=stats)
    )
    assert contents(gone) == [(1, b"b", b"1"), (3, b"c", b"1"), (4, b"d", b"1")]
    assert read_records(gone[1])[0].timestamp_ms == 103
    assert stats.tombstones_removed == 1
    assert stats.next_horizon_ms is None


def test_a_tombstone_above_the_map_does_not_begin_its_time() -> None:
    log = [batch_of(0, (b"a", b"1"), (b"b", b"1")), batch_of(2, (b"c", b"1"), (b"a", None))]
    offsets = map_of(log, keys_max=2)
    assert (offsets.end, offsets.is_full, len(offsets)) == (2, True, 2)
    assert list(clean(log, offsets, now_ms=0, delete_retention_ms=0, log_end=4)) == log


def test_a_tombstone_above_the_map_outlives_a_horizon_that_the_leader_gave_it() -> None:
    """A follower copied `a` before the leader's round, and the tombstone after it."""
    value = batch_of(0, (b"a", b"1"))
    leader = compact([value, batch_of(1, (b"b", b"1")), batch_of(2, (b"a", None))], now_ms=0)
    log: list[Any] = [value, *leader]
    assert parse_header(log[-1]).delete_horizon_ms == RETENTION_MS
    stats, rounds, end = CleanStats(), 0, 0
    while end < 3:
        assert contents(log)[-1] == (2, b"a", None)
        offsets = map_of([batch for batch in log if parse_header(batch).next_offset > end], end, keys_max=1)
        end, stats, rounds = offsets.end, CleanStats(), rounds + 1
        log = list(clean(log, offsets, now_ms=10_000, delete_retention_ms=RETENTION_MS, log_end=10, stats=stats))
        assert stats.next_horizon_ms == (None if end == 3 else RETENTION_MS), "the next round is due"
    assert rounds > 1
    assert contents(log) == [(1, b"b", b"1")]


def test_the_last_record_of_the_log_always_stays() -> None:
    log = [batch_of(0, (b"a", b"1"), (b"a", None))]
    once = compact(log, now_ms=0, log_end=2)
    assert contents(compact(once, now_ms=1 << 40, log_end=2)) == [(1, b"a", None)]
    assert contents(compact(once, now_ms=1 << 40, log_end=3)) == []


def test_records_without_a_key_stay() -> None:
    log = [batch_of(0, (None, b"1"), (b"a", b"1"), (None, None)), batch_of(3, (b"a", b"2"))]
    assert contents(compact(log)) == [(0, None, b"1"), (2, None, None), (3, b"a", b"2")]


def patched(batch: bytearray, attributes: int) -> bytearray:
    pack_into(">h", batch, 21, attributes)
    pack_into(">I", batch, CRC_POSITION, compute_crc(batch))
    return batch


@pytest.mark.parametrize("attributes", [0x10, 0x20, 0x30])
def test_transactions_are_left_alone(attributes: int) -> None:
    log = [batch_of(0, (b"a", b"1")), patched(batch_of(1, (b"a", b"2")), attributes), batch_of(2, (b"b", b"1"))]
    assert compact(log) == log
    assert map_of(log).end == 3


def test_a_batch_that_cannot_be_read_is_kept_and_replaces_nothing() -> None:
    header = parse_header(batch_of(1, (b"b", b"2"), (b"a", b"2")))
    half = batch_of(1, (b"b", b"2"))[61:] + b"\x20garbage"
    log = [
        batch_of(0, (b"b", b"1")),
        assemble(header, half),
        patched(batch_of(3, (b"b", b"3")), 7),
        batch_of(4, (b"c", b"1")),
    ]
    stats = CleanStats()
    assert compact(log, stats=stats) == log
    assert stats.batches_unreadable == 2
    assert map_of(log).end == 5


def test_damage_is_never_blessed() -> None:
    batch = batch_of(0, (b"a", b"1"), (b"a", b"2"))
    batch[-1] ^= 1
    with pytest.raises(CorruptLog):
        OffsetMap(0).add(batch)
    with pytest.raises(CorruptLog):
        list(clean([batch], OffsetMap(0), now_ms=0, delete_retention_ms=0, log_end=9))
    with pytest.raises(CorruptLog):
        OffsetMap(0).add(b"short")


def test_a_full_map_says_how_far_it_reaches() -> None:
    batch = batch_of(10, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"1"), (b"a", b"3"))
    offsets = OffsetMap(10, keys_max=2)
    assert not offsets.add(batch)
    assert (offsets.end, len(offsets), offsets.is_full) == (13, 2, True)
    assert not offsets.add(batch_of(15, (b"a", b"4")))
    assert offsets.end == 13
    following = OffsetMap(13, keys_max=2)
    assert following.add(batch)
    assert (following.end, len(following)) == (15, 2)


def test_the_map_begins_at_the_clean_point() -> None:
    offsets = OffsetMap(1)
    offsets.add(batch_of(0, (b"a", b"1"), (b"b", b"1")))
    assert not offsets.replaces(b"a", -1)
    assert offsets.replaces(b"b", 0)
    assert not offsets.replaces(b"b", 1)


def test_check_keys() -> None:
    batch = batch_of(0, (b"a", b"1"), (b"", None), compression=Compression.LZ4)
    check_keys(batch, parse_header(batch))
    batch = batch_of(0, (b"a", b"1"), (None, b"1"), compression=Compression.LZ4)
    with pytest.raises(InvalidRecord):
        check_keys(batch, parse_header(batch))
    broken = batch[:-3]
    with pytest.raises(CorruptBatch):
        check_keys(broken, parse_header(broken)._replace(length=len(broken)))


def test_timestamps_too_far_from_the_horizon_leave_tombstones_for_good_and_nothing_that_is_deleted() -> None:
    batch = build_batch([Record(0, -(2**63), b"a", None)])
    assert compact([batch], now_ms=10_000) == [batch]
    old = build_batch([Record(0, -(2**63), b"a", None), Record(1, -(2**63), b"b", b"deleted")])
    once = compact([old, batch_of(2, (b"b", None))], now_ms=10_000)
    gone = list(clean(once, map_of(once), now_ms=1 << 40, delete_retention_ms=RETENTION_MS, log_end=1 << 40))
    assert contents(gone) == [(0, b"a", None)], "the tombstone of b does not outlive what it deletes"


KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
PAIRS = st.tuples(KEYS, st.none() | st.binary(min_size=1, max_size=3))
LOGS = st.lists(
    st.tuples(st.lists(PAIRS, min_size=1, max_size=5), st.sampled_from(Compression)), min_size=1, max_size=8
)


@settings(deadline=None)
@given(LOGS, st.integers(1, 6), st.lists(st.integers(0, 1_500), min_size=1, max_size=6))
def test_a_reader_ends_with_the_same_state(logs: Any, keys_max: int, pauses_ms: list[int]) -> None:
    """Rounds of any size, at any time: state, offsets and headers survive; a tombstone outlives what it deletes."""
    log: list[Any] = []
    for pairs, compression in logs:
        base_offset = parse_header(log[-1]).next_offset if log else 0
        log.append(batch_of(base_offset, *pairs, compression=compression))
    original = {record.offset: record for batch in log for record in read_records(batch)}
    headers = {parse_header(batch).base_offset: parse_header(batch) for batch in log}
    state = {record.key: record.value for record in original.values()}
    log_end, clean_point, now_ms = len(original), 0, 0
    for pause_ms in pauses_ms + [5_000] * log_end:
        now_ms += pause_ms
        offsets = map_of(
            (batch for batch in log if parse_header(batch).next_offset > clean_point), clean_point, keys_max=keys_max
        )
        assert len(offsets) <= keys_max
        assert offsets.end > clean_point or clean_point == log_end
        log = list(clean(log, offsets, now_ms=now_ms, delete_retention_ms=RETENTION_MS, log_end=log_end))
        clean_point = max(clean_point, offsets.end)
        check_round(log, original, headers, state)
    left = [record for batch in log for record in read_records(batch)]
    assert len({record.key for record in left}) == len(left)
    assert all(record.value is not None or record.offset == log_end - 1 for record in left)


def check_round(
    log: list[Buffer],
    original: dict[int, Record],
    headers: dict[int, BatchHeader],
    state: dict[bytes | None, bytes | None],
) -> None:
    seen = [record for batch in log for record in read_records(batch)]
    assert all(original[record.offset] == record for record in seen)
    read = {record.key: record.value for record in seen}
    assert {key: value for key, value in read.items() if value is not None} == {
        key: value for key, value in state.items() if value is not None
    }
    for batch in log:
        header = parse_header(batch)
        assert header.last_offset_delta == headers[header.base_offset].last_offset_delta
        assert header.compression is headers[header.base_offset].compression
    buffer = b"".join(log)
    assert verified_prefix(buffer) == (len(buffer), False)
