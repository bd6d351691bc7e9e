"""The frames of protocol version 2, and the way from a stream of bytes to messages.

    magic u16 = 0x5732 (W2) | type u8 | flags u8 | length u32 of all that follows
    fields | CRC-32C u32 of everything before it | payload (DATA and REPAIR_DATA alone)

The checksum covers the header and the fields and not the payload: batches carry checksums of their own, which the
follower's log compares. So a frame's beginning can be made without touching the batches, and these go to the socket
from where they lie, or from a file. Flags are 0 except where a payload is compressed (`data.py`).

Small messages of the same kind travel together in one frame (`control.py`): PROGRESS of many partitions is one frame.
Big-endian throughout. A frame that is not whole waits in the inbox; one that is wrong raises LinkError, and then the
stream has no more meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final
from uuid import UUID

from crc32c import crc32c

from walstream.cluster.metadata import PartitionKey
from walstream.errors import BadChecksum, BadMagic, FrameTooLarge, MalformedFrame, PartitionUnknown, UnexpectedFrame
from walstream.log.batch import Buffer
from walstream.replication.wire.inbox import Inbox

MAGIC: Final = 0x5732
"""`W2`."""
VERSION: Final = 2

HEADER: Final = Struct(">HBBI")
CRC: Final = Struct(">I")
HEADER_BYTES: Final = HEADER.size
CRC_BYTES: Final = CRC.size

FRAME_BYTES_MAX: Final = 128 * 1024 * 1024
"""More than the largest batch that a node takes from a producer. The inbox grows only as the bytes arrive."""

CONTROL_BYTES_MAX: Final = 16 * 1024 * 1024
"""A catalogue of a hundred thousand topics; everything else is far smaller."""

_SMALL_BYTES: Final = 4 * 1024
"""Frames up to this length are taken from everybody, so that only longer ones need their limit looked up."""

_KEY: Final = Struct(">16si")
KEY_BYTES: Final = _KEY.size

PARTITIONS_MAX: Final = 1_000_000
"""On one link: more than one node holds, so that a peer that counts wrong fills no memory."""


class Keys:
    """The partitions that were opened on a link, as twenty bytes and back.

    One lookup tells both whether a partition may be spoken of and how it is written: making a UUID, or hashing one,
    takes longer than the rest of a frame.
    """

    __slots__ = ("_bytes", "_keys")

    def __init__(self) -> None:
        self._bytes: dict[PartitionKey, bytes] = {}
        self._keys: dict[bytes, PartitionKey] = {}

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._bytes

    def open(self, key: PartitionKey) -> None:
        """Remember a partition that this side opens, or that the other has opened."""
        if key not in self._bytes:
            if len(self._bytes) >= PARTITIONS_MAX:
                raise UnexpectedFrame(f"More than {PARTITIONS_MAX} partitions were opened on one link.")
            data = self._bytes[key] = _KEY.pack(key[0].bytes, key[1])
            self._keys[data] = key

    def find(self, key: PartitionKey) -> bytes | None:
        """Return topic id and partition as bytes, or None for one that was not opened."""
        return self._bytes.get(key)

    def encode(self, key: PartitionKey) -> bytes:
        """Return topic id and partition as bytes, opened or not."""
        return self._bytes.get(key) or _KEY.pack(key[0].bytes, key[1])

    def decode(self, data: bytes) -> PartitionKey:
        """Return the partition. Raises PartitionUnknown unless it was opened."""
        key = self._keys.get(data)
        if key is None:
            topic_id, number = self.decode_new(data)
            raise PartitionUnknown(f"Partition {number} of topic {topic_id} was never opened on this link.")
        return key

    def decode_new(self, data: bytes) -> PartitionKey:
        """Return the partition of an OPEN. Raises MalformedFrame."""
        key = self._keys.get(data)
        if key is None:
            topic_id, partition = _KEY.unpack(data)
            if partition < 0:
                raise MalformedFrame(f"There is no partition {partition}.")
            key = UUID(bytes=topic_id), partition
        return key


def frame(kind: int, fields: Buffer) -> bytes:
    """Return a whole frame without payload."""
    head = HEADER.pack(MAGIC, kind, 0, len(fields) + CRC_BYTES) + fields
    return head + CRC.pack(crc32c(head))


def check(view: memoryview, start: int, end: int) -> None:
    """Compare the checksum that stands at `end` with that of what stands before it. Raises BadChecksum."""
    if crc32c(view[start:end]) != CRC.unpack_from(view, end)[0]:
        raise BadChecksum("A frame fails its CRC-32C.")


def next_frame(inbox: Inbox, expected: frozenset[int], bytes_max: Callable[[int], int]) -> tuple[int, int, int] | None:
    """Return (type, flags, length) of the frame that begins the inbox, once it is whole; it is not taken yet.

    `expected` are the types that the peer may send now, `bytes_max` says how long one of a type may be. Raises
    LinkError as soon as the header is there, before memory is taken for what it announces.
    """
    held = inbox.end - inbox.start
    if held < HEADER_BYTES:
        return None
    magic, kind, flags, length = HEADER.unpack_from(inbox.view, inbox.start)
    if magic != MAGIC:
        raise BadMagic(f"A frame begins with {magic:#06x} instead of {MAGIC:#06x} (W2).")
    if kind not in expected:
        raise UnexpectedFrame(f"A frame of type {kind} is not the peer's to send now.")
    if length > _SMALL_BYTES and length > (limit := bytes_max(kind)):
        raise FrameTooLarge(f"A frame of type {kind} announces {length} bytes; up to {limit} are taken.")
    if held < HEADER_BYTES + length:
        inbox.need(HEADER_BYTES + length)
        return None
    if length < CRC_BYTES:
        raise MalformedFrame(f"A frame announces {length} bytes; its checksum alone takes {CRC_BYTES}.")
    return kind, flags, length


def take_fields(inbox: Inbox, flags: int, length: int) -> memoryview:
    """Take a frame without payload and return its fields. Raises BadChecksum, MalformedFrame."""
    whole = inbox.take(HEADER_BYTES + length)
    check(whole, 0, HEADER_BYTES + length - CRC_BYTES)
    if flags:
        raise MalformedFrame(f"A frame has flags {flags:#04x}, which it cannot have.")
    return whole[HEADER_BYTES:-CRC_BYTES]
