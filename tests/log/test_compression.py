"""Codecs: what clients write is read, bombs and garbage are named and stay within their bound."""

from __future__ import annotations

import contextlib
import gzip
import tracemalloc

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import CorruptBatch
from walstream.log.batch import Compression
from walstream.log.compression import compress, decompress

CODECS = [Compression.GZIP, Compression.SNAPPY, Compression.LZ4, Compression.ZSTD]
MEBIBYTE = 1024 * 1024


@settings(deadline=None)
@given(st.binary(max_size=2_000), st.integers(1, 100), st.sampled_from(Compression))
def test_round_trip(data: bytes, times: int, compression: Compression) -> None:
    data *= times
    assert decompress(compress(data, compression), compression) == data
    assert decompress(memoryview(bytearray(compress(memoryview(data), compression))), compression) == data


@pytest.mark.parametrize("compression", Compression)
def test_the_bound_is_exact(compression: Compression) -> None:
    data = b"abcdefgh" * 25_000
    packed = compress(data, compression)
    assert decompress(packed, compression, bytes_max=len(data)) == data
    with pytest.raises(CorruptBatch):
        decompress(packed, compression, bytes_max=len(data) - 1)


@pytest.mark.parametrize("compression", CODECS)
def test_a_bomb_takes_no_more_memory_than_its_bound(compression: Compression) -> None:
    bomb = compress(bytes(64 * MEBIBYTE), compression)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            decompress(bomb, compression, bytes_max=MEBIBYTE)
        assert tracemalloc.get_traced_memory()[1] < 8 * MEBIBYTE
    finally:
        tracemalloc.stop()


def test_snappy_comes_in_two_guises() -> None:
    data = b"snappy " * 20_000
    plain = bytes(cramjam.snappy.compress_raw(data))
    framed = compress(data, Compression.SNAPPY)
    assert framed.startswith(b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
    assert decompress(plain, Compression.SNAPPY) == data
    assert decompress(framed, Compression.SNAPPY) == data
    for cut in (framed[:-1], framed[:18], framed + b"\x00"):
        with pytest.raises(CorruptBatch):
            decompress(cut, Compression.SNAPPY)


def test_a_snappy_block_is_not_believed() -> None:
    claim = b"\xff\xff\xff\xff\x0f" + bytes(10)
    with pytest.raises(CorruptBatch, match="more than"):
        decompress(claim, Compression.SNAPPY)


def test_lz4_blocks_are_independent_as_the_java_client_demands() -> None:
    frame = compress(b"lz4 " * 100_000, Compression.LZ4)
    assert frame[:4] == bytes.fromhex("04224d18")
    assert frame[4] & 0x20


def test_frames_of_other_writers() -> None:
    data = b"kafka " * 30_000
    assert decompress(gzip.compress(data), Compression.GZIP) == data
    assert decompress(bytes(cramjam.lz4.compress(data)), Compression.LZ4) == data
    assert decompress(bytes(cramjam.zstd.compress(data, level=19)), Compression.ZSTD) == data


def test_gzip_is_one_member() -> None:
    with pytest.raises(CorruptBatch):
        decompress(gzip.compress(b"one") + gzip.compress(b"two"), Compression.GZIP)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from(CODECS))
def test_garbage_raises_only_the_named_error(garbage: bytes, compression: Compression) -> None:
    with contextlib.suppress(CorruptBatch):
        decompress(garbage, compression, bytes_max=MEBIBYTE)


@settings(deadline=None)
@given(st.data(), st.sampled_from(CODECS))
def test_damage_raises_only_the_named_error(data: st.DataObject, compression: Compression) -> None:
    packed = bytearray(compress(b"some text, some text again" * 50, compression))
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] = data.draw(st.integers(0, 255))
    del packed[data.draw(st.integers(1, len(packed))) :]
    with contextlib.suppress(CorruptBatch):
        decompress(packed, compression, bytes_max=MEBIBYTE)
