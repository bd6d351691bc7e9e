"""Compress and decompress the records of a batch, never making more bytes than the caller allows.

Owns the five codecs as Kafka clients write them; refuses to know what the bytes mean. The log itself stores batches as
they come and never gets here: compaction, the key check of compacted topics, the internal topics and the CLI do.

Bounds: whatever a few hostile bytes claim or expand to, the output stays within `bytes_max` and the work within a small
multiple of it. Wrong input raises CorruptBatch, oversized output too.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Final

import cramjam

from walstream.errors import CorruptBatch
from walstream.log.batch import Buffer, Compression

DECOMPRESSED_BYTES_MAX: Final = 64 * 1024 * 1024
"""What one batch may expand to: 64 times the default largest batch, more than real records reach."""

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01" * 2
"""Java's framing of snappy: magic, version 1, readable since version 1; then blocks, each after its length."""
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_GZIP_WINDOW: Final = 31
"""zlib's way to say: gzip framing with a 32 KiB window."""
_UINT32: Final = Struct(">I")
_FIRST_GUESS_BYTES_MIN: Final = 64 * 1024


def decompress(data: Buffer, compression: Compression, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> bytes:
    """Return the records that `data` holds. Raises CorruptBatch if it is garbage or expands beyond `bytes_max`."""
    if compression is Compression.NONE:
        if len(data) > bytes_max:
            raise _too_large(compression, bytes_max)
        return bytes(data)
    if compression is Compression.GZIP:
        return _gunzip(data, bytes_max)
    if compression is Compression.SNAPPY:
        return _unsnap(bytes(data), bytes_max)
    return _expand(bytes(data), compression, bytes_max)


def compress(data: Buffer, compression: Compression) -> bytes:
    """Return `data` compressed as every Kafka client reads it."""
    if compression is Compression.NONE:
        return bytes(data)
    if compression is Compression.GZIP:
        return zlib.compress(data, wbits=_GZIP_WINDOW)
    if compression is Compression.SNAPPY:
        return _snap(data)
    if compression is Compression.LZ4:
        # The Java client reads only frames of independent blocks, which are not the library's default.
        compressor = cramjam.lz4.Compressor(block_linked=False)
        compressor.compress(bytes(data))
        return bytes(compressor.finish())
    return bytes(cramjam.zstd.compress(bytes(data)))


def _too_large(compression: Compression, bytes_max: int) -> CorruptBatch:
    return CorruptBatch(
        f"The {compression.name.lower()} records of the batch expand to more than {bytes_max} bytes.",
        "Send smaller batches.",
    )


def _garbage(compression: Compression, cause: object) -> CorruptBatch:
    return CorruptBatch(f"The records of the batch are not {compression.name.lower()}: {cause}.")


def _gunzip(data: Buffer, bytes_max: int) -> bytes:
    """Decompress one gzip member; more than one, which no producer writes, would cost a copy of the rest for each."""
    decompressor = zlib.decompressobj(wbits=_GZIP_WINDOW)
    try:
        result = decompressor.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise _garbage(Compression.GZIP, error) from error
    if len(result) > bytes_max:
        raise _too_large(Compression.GZIP, bytes_max)
    if not decompressor.eof or decompressor.unused_data:
        raise _garbage(Compression.GZIP, "it ends in the wrong place")
    return result


def _unsnap(data: bytes, bytes_max: int) -> bytes:
    """Decompress snappy in either of its two guises: Java's blocks, or one plain block as librdkafka writes it."""
    if not data.startswith(_XERIAL_MAGIC):
        return _unsnap_block(data, bytes_max)
    blocks = []
    position, left = len(_XERIAL_HEADER), bytes_max
    while position < len(data):
        if len(data) - position < _UINT32.size:
            raise _garbage(Compression.SNAPPY, "a block length is cut short")
        (length,) = _UINT32.unpack_from(data, position)
        position += _UINT32.size
        if length > len(data) - position:
            raise _garbage(Compression.SNAPPY, "a block is cut short")
        blocks.append(_unsnap_block(data[position : position + length], left))
        position += length
        left -= len(blocks[-1])
    return b"".join(blocks)


def _unsnap_block(block: bytes, bytes_max: int) -> bytes:
    """Decompress one block, whose claimed size is looked at before anything is allocated for it."""
    try:
        if cramjam.snappy.decompress_raw_len(block) > bytes_max:
            raise _too_large(Compression.SNAPPY, bytes_max)
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise _garbage(Compression.SNAPPY, error) from error


def _snap(data: Buffer) -> bytes:
    """Compress into Java's framing, which every client reads; some refuse the plain block."""
    parts = [_XERIAL_HEADER]
    for position in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(bytes(data[position : position + _XERIAL_BLOCK_BYTES])))
        parts += (_UINT32.pack(len(block)), block)
    return b"".join(parts)


def _expand(data: bytes, compression: Compression, bytes_max: int) -> bytes:
    """Decompress into a buffer of a guessed size, four times larger at each failure until the bound is reached.

    The library says only in words whether the buffer was too small, so garbage is tried again as well; it fails early.
    """
    codec = cramjam.lz4 if compression is Compression.LZ4 else cramjam.zstd
    size = min(max(4 * len(data), _FIRST_GUESS_BYTES_MIN), bytes_max)
    while True:
        output = bytearray(size)
        try:
            length = codec.decompress_into(data, output)
        except cramjam.DecompressionError as error:
            if size == bytes_max:
                raise _garbage(compression, f"{error} (at most {bytes_max} bytes are expanded)") from error
            size = min(4 * size, bytes_max)
        else:
            return bytes(memoryview(output)[:length])
