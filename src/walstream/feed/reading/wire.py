"""The pieces of an encoded WalEntry, looked up instead of computed: there is no message object for each entry.

Owns the tags and lengths of WalEntry as `wal.proto` has them; which values go where is the business of `entries`. What
is written here means to protobuf what it would have written itself, though fields stand in another order: the key comes
first, so that it is found again without looking at the rest. Sans-IO.

    0a length | 32 length key | 0a 26 LSN | constant fields … | 3a length value | 4a 04 checksum | 60 offset | 70 seq
    '-------' as it stands in WalBatch.entries
"""

from __future__ import annotations

from struct import Struct
from typing import Final

LOW_BITS: Final = 14
TABLE: Final = 1 << LOW_BITS
"""Numbers below this take one or two bytes; they are looked up."""


def varint(number: int) -> bytes:
    """Encode a number that is not negative."""
    if number < TABLE:
        return VARINTS[number]
    if number < TABLE * TABLE:
        return CONTINUED[number & TABLE - 1] + VARINTS[number >> LOW_BITS]
    # LSNs and times have more, and every transaction has its own: they are worth a step less.
    low, middle = CONTINUED[number & TABLE - 1], CONTINUED[number >> LOW_BITS & TABLE - 1]
    return low + middle + varint(number >> 2 * LOW_BITS)


def _short(number: int) -> bytes:
    return bytes((number,)) if number < 0x80 else bytes((number & 0x7F | 0x80, number >> 7))


VARINTS: Final = tuple(map(_short, range(TABLE)))
CONTINUED: Final = tuple(bytes((number & 0x7F | 0x80, number >> 7 | 0x80)) for number in range(TABLE))
"""The lowest 14 bits of a number that goes on behind them."""
FOUR_DIGITS: Final = tuple(b"%04d" % number for number in range(10_000))

ENTRY: Final = tuple(b"\x0a" + length for length in VARINTS)
"""WalBatch.entries: tag and length."""

# The fields of WalEntry. A number that is 0 and a text that is empty are not written, as in protobuf itself.
KEY: Final = (b"", *(b"\x32" + length for length in VARINTS[1:]))
VALUE: Final = (b"", *(b"\x3a" + length for length in VARINTS[1:]))
SEQ: Final[dict[bytes | None, bytes]] = {b"%d" % at: b"\x70" + number for at, number in enumerate(VARINTS) if at}
"""By the text that a header has: one lookup instead of a number that is read and written."""
LSN: Final = b"\x0a\x26"
"""Tag and length: its text always has 38 bytes."""
OP_DELETE: Final = b"\x28\x01"
OP_TRUNCATE: Final = b"\x28\x03"
OFFSET: Final = b"\x60"
COMMITTED_AT: Final = b"\x10"

checksum = Struct(">HI").pack
CHECKSUM: Final = 0x4A04
"""`checksum(CHECKSUM, crc)` is the whole field."""

_KEY_TAG: Final = 0x32


def number(tag: int, value: int) -> bytes:
    """Write a field that holds a number."""
    return varint(tag << 3) + varint(value) if value else b""


def text(tag: int, value: bytes) -> bytes:
    """Write a field that holds bytes, a string or a message."""
    return varint(tag << 3 | 2) + varint(len(value)) + value if value else b""


def header(name: bytes, value: bytes) -> bytes:
    """Write one of WalEntry.headers."""
    inner = text(1, name) + text(2, value)
    return b"\x8a\x01" + varint(len(inner)) + inner


def lsn_text(lsn: int) -> bytes:
    """Return an LSN as it is written in messages."""
    return b"%016x.%010d.%010d" % (lsn >> 64, lsn >> 32 & 0xFFFFFFFF, lsn & 0xFFFFFFFF)


def key_of(entry: bytes) -> bytes:
    """Return the key of an encoded entry."""
    at = 1
    while entry[at] >= 0x80:
        at += 1
    at += 1
    if at >= len(entry) or entry[at] != _KEY_TAG:
        return b""
    at += 1
    length = shift = 0
    while (byte := entry[at]) >= 0x80:
        length |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    at += 1
    return entry[at : at + (length | byte << shift)]
