"""Cutting frames into batches: limits, bytes that protobuf reads, compression, tokens."""

from __future__ import annotations

import random
import tracemalloc
import weakref

import pytest
import snappy
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from feed.frames import Written, frame_of
from walstream.errors import UsageError
from walstream.feed import wal_pb2
from walstream.feed.reading.frames import MATCHES_BYTES_MAX, Filter, Frame
from walstream.feed.service import batching
from walstream.feed.service.batching import (
    Limits,
    SharedCuts,
    Slice,
    batch_response,
    choose_compression,
    cut,
    decompress,
)
from walstream.feed.service.resume import position_of, resume_token
from walstream.positions import GlobalLsn

NONE, SNAPPY, ZSTD = wal_pb2.NONE, wal_pb2.SNAPPY, wal_pb2.ZSTD


def entries(count: int, size: int = 5, step: int = 10) -> list[Written]:
    return [Written(1000 + step * number, bytes(size)) for number in range(count)]


def batch_of(slices: list[Slice], compression: int = NONE) -> wal_pb2.WalBatch:
    return wal_pb2.WalResponse.FromString(batch_response(slices, compression)).batch


def lsns_of(batch: wal_pb2.WalBatch) -> list[int]:
    return [int(GlobalLsn.parse(entry.lsn)) for entry in batch.entries]


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=60),
    entries_max=st.integers(1, 20),
    bytes_max=st.integers(1, 400),
    data=st.data(),
)
def test_slices_are_the_chosen_entries_in_order_and_within_the_limits(
    sizes: list[int], entries_max: int, bytes_max: int, data: st.DataObject
) -> None:
    written = [Written(10 * number, bytes(size)) for number, size in enumerate(sizes)]
    frame = frame_of(written)
    chosen = data.draw(st.none() | st.sets(st.integers(0, len(sizes) - 1)).map(sorted))
    made = cut(frame, chosen, Limits(entries_max, bytes_max))
    assert made.error is None
    wanted = written if chosen is None else [written[at] for at in chosen]
    found = []
    for part in made.slices:
        batch = batch_of([part])
        assert len(batch.entries) == part.count <= entries_max
        assert len(part.body) <= bytes_max or part.count == 1
        assert (int(GlobalLsn.parse(batch.first_lsn)), int(GlobalLsn.parse(batch.last_lsn))) == (part.first, part.last)
        assert part.last < position_of(batch.resume_token) == part.next
        found += list(batch.entries)
    assert found == [entry.message for entry in wanted]


def test_the_last_slice_resumes_behind_the_entries_of_others() -> None:
    frame = frame_of(entries(10))
    *before, last = cut(frame, [0, 3, 4], Limits(2)).slices
    assert [part.next for part in before] == [1031]
    assert last.next == frame.lsns[-1] + 1


def test_an_entry_that_is_too_large_ends_the_stream_behind_those_before() -> None:
    written = [*entries(3), Written(5000, bytes(2000)), Written(6000)]
    made = cut(frame_of(written), None, Limits(100, 500, entry_bytes_max=1000))
    assert [part.count for part in made.slices] == [3]
    assert made.error is not None
    assert str(GlobalLsn(5000)) in made.error.message
    assert str(GlobalLsn(5001)) in made.error.hint


@given(st.integers(2, 30), st.data())
def test_a_slice_can_be_split_anywhere(count: int, data: st.DataObject) -> None:
    [part] = cut(frame_of(entries(count, data.draw(st.integers(0, 20_000)))), None, Limits(100, keeps_lsns=True)).slices
    head, tail = part.split(data.draw(st.integers(1, count - 1)))
    assert head.body + tail.body == part.body
    assert [*lsns_of(batch_of([head])), *lsns_of(batch_of([tail]))] == lsns_of(batch_of([part]))
    assert (head.first, tail.last, tail.next) == (part.first, part.last, part.next)
    assert head.next == head.last + 1
    assert head.last == lsns_of(batch_of([head]))[-1]
    assert tail.first == lsns_of(batch_of([tail]))[0]


def test_slices_of_several_frames_become_one_batch() -> None:
    slices = cut(frame_of(entries(7)), None, Limits(2)).slices
    batch = batch_of(slices)
    assert len(batch.entries) == 7
    assert batch.first_lsn == str(GlobalLsn(1000))
    assert batch.last_lsn == str(GlobalLsn(1060))
    assert position_of(batch.resume_token) == 1061


@pytest.mark.parametrize(
    ("size", "accepted", "chosen"),
    [
        (4096, {SNAPPY, ZSTD}, NONE),
        (4097, {SNAPPY, ZSTD}, SNAPPY),
        (4097, {ZSTD}, ZSTD),
        (65536, {SNAPPY, ZSTD}, SNAPPY),
        (65537, {SNAPPY, ZSTD}, ZSTD),
        (65537, {SNAPPY}, SNAPPY),
        (1 << 20, set(), NONE),
        (1 << 20, {NONE}, NONE),
    ],
)
def test_the_best_compression_that_is_allowed(size: int, accepted: set[int], chosen: int) -> None:
    assert choose_compression(size, accepted) == chosen


@pytest.mark.parametrize("compression", [SNAPPY, ZSTD])
def test_a_compressed_batch_holds_the_batch(compression: int) -> None:
    slices = cut(frame_of(entries(50, 200)), None, Limits(20)).slices
    batch = batch_of(slices, compression)
    assert not batch.entries
    assert batch.compression == compression
    inner = wal_pb2.WalBatch.FromString(decompress(compression, batch.compressed))
    assert inner.entries == batch_of(slices).entries
    assert (batch.first_lsn, batch.last_lsn) == (str(GlobalLsn(1000)), str(GlobalLsn(1490)))
    assert position_of(batch.resume_token) == 1491


def test_other_libraries_read_what_is_compressed() -> None:
    slices = cut(frame_of(entries(50, 200)), None, Limits(50)).slices
    plain = slices[0].body
    assert snappy.decompress(batch_of(slices, SNAPPY).compressed) == plain
    assert zstandard.ZstdDecompressor().decompressobj().decompress(batch_of(slices, ZSTD).compressed) == plain


@pytest.mark.parametrize("compression", [SNAPPY, ZSTD])
def test_what_compression_makes_larger_goes_as_it_is(compression: int) -> None:
    dice = random.Random(1)
    noise = Written(dice.getrandbits(127), dice.randbytes(5000), dice.randbytes(50))
    batch = batch_of(cut(frame_of([noise]), None, Limits(1)).slices, compression)
    assert (batch.compression, len(batch.entries), batch.compressed) == (NONE, 1, b"")


def test_equal_filters_share_what_was_cut() -> None:
    shared, frame = SharedCuts(), frame_of(entries(5))
    first = shared.cut(frame, Filter(None, b"", ()), Limits(2))
    again = shared.cut(frame, Filter(None, b"", ()), Limits(2))
    assert again is first
    assert again.slices[0].response(NONE) is first.slices[0].response(NONE)
    assert shared.cut(frame, Filter(None, b"walstream:", ()), Limits(2)) is not first
    assert shared.cut(frame, Filter(None, b"", ()), Limits(3)) is not first
    assert shared.cut(frame, Filter(b"acme", b"", ()), Limits(2)) is not first
    assert shared.cut(frame, Filter(None, b"", ("t",)), Limits(2)) is not first
    assert shared.cut(frame, Filter(None, b"", ()), Limits(2, keeps_lsns=True)) is not first
    assert shared.cut(frame_of(entries(5)), Filter(None, b"", ()), Limits(2)) is not first
    assert (shared.hits, shared.misses) == (1, 7)


def test_what_is_shared_is_bounded() -> None:
    shared = SharedCuts(bytes_max=30_000)
    for _ in range(100):
        shared.cut(frame_of(entries(10, 100)), Filter(None, b"", ()), Limits(10))
        assert shared.size_bytes <= 30_000
    shared.cut(frame_of(entries(1000, 100)), Filter(None, b"", ()), Limits(10))
    assert shared.size_bytes > 30_000, "one that is larger is kept alone"
    shared.cut(frame_of(entries(1)), Filter(None, b"", ()), Limits(10))
    assert shared.size_bytes < 30_000


class Watched(Frame):
    """A frame of which can be told whether somebody still has it."""


def test_frames_with_nothing_for_a_subscriber_are_not_kept_for_it() -> None:
    shared, frames, made = SharedCuts(bytes_max=100_000), [], frame_of(entries(10, 1000))
    for _ in range(200):
        frame = Watched(made.lsns, made.encoded, made.tenants, made.topics)
        assert not shared.cut(frame, Filter(b"nobody", b"", ()), Limits(10)).slices
        frames.append(weakref.ref(frame))
        del frame
    assert sum(frame() is not None for frame in frames) < 10


def test_many_filters_of_one_frame_are_counted() -> None:
    shared, frame = SharedCuts(bytes_max=100_000), frame_of(entries(1))
    for number in range(1000):
        shared.cut(frame, Filter(b"tenant-%d" % number, b"", ()), Limits(10))
        assert shared.size_bytes <= 100_000
    again = frame_of(entries(1000, 100))
    shared.cut(again, Filter(None, b"", ()), Limits(10))
    kept = shared.cut(again, Filter(None, b"", ()), Limits(20))
    assert shared.cut(again, Filter(None, b"", ()), Limits(20)) is kept
    assert again.size_bytes < shared.size_bytes < 4 * again.size_bytes, "the frame is counted once"


def test_long_filters_are_counted() -> None:
    shared, frame = SharedCuts(bytes_max=1_000_000), frame_of(entries(1))
    tracemalloc.start()
    try:
        for number in range(200):
            topics = tuple(f"{number}-{part}-\U0001f600" + "x" * 100 for part in range(100))
            shared.cut(frame, Filter(b"acme", b"y" * 4000, topics), Limits(10))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shared.size_bytes <= 1_000_000
    assert size_bytes < 2_000_000 + MATCHES_BYTES_MAX, "with what is remembered of the patterns"


@given(st.integers(0, (1 << 128) - 1))
def test_a_resume_token_is_its_position(position: int) -> None:
    assert position_of(resume_token(position)) == position


@given(st.integers(0, (1 << 128) - 1), st.integers(0, 20), st.integers(1, 255))
def test_a_damaged_token_is_refused(position: int, at: int, change: int) -> None:
    token = bytearray(resume_token(position))
    token[at] ^= change
    with pytest.raises(UsageError, match="resume token"):
        position_of(bytes(token))


@pytest.mark.parametrize("token", [b"", b"x", resume_token(7)[:-1], resume_token(7) + b"\0", bytes(1000)])
def test_what_is_no_token_is_refused(token: bytes) -> None:
    with pytest.raises(UsageError, match="resume token"):
        position_of(token)


def test_a_token_of_a_later_version_is_told_so() -> None:
    import crc32c

    head = b"\x02" + bytes(16)
    with pytest.raises(UsageError, match="version 2"):
        position_of(head + crc32c.crc32c(head).to_bytes(4, "big"))


def test_a_batch_is_far_below_what_a_channel_takes() -> None:
    assert batching.BATCH_BYTES_MAX + batching.MESSAGE_OVERHEAD_BYTES < 4 * 1024 * 1024 / 3
