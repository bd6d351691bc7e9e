"""Frames for pure tests: entries that protobuf itself encoded, so that what comes out can be read by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import crc32c

from walstream.feed import wal_pb2
from walstream.feed.reading.frames import Frame
from walstream.positions import GlobalLsn


@dataclass(frozen=True)
class Written:
    """An entry as a test writes it."""

    lsn: int
    value: bytes = b"value"
    key: bytes = b"key"
    tenant: str = ""
    topic: str = "t"
    op_type: int = wal_pb2.OP_PUT

    @property
    def message(self) -> wal_pb2.WalEntry:
        return wal_pb2.WalEntry(
            lsn=str(GlobalLsn(self.lsn)),
            tenant_id=self.tenant,
            op_type=self.op_type,  # type: ignore[arg-type]
            topic=self.topic,
            key_prefix=f"walstream:{self.tenant}:{self.topic}:",
            key=self.key,
            value=self.value,
            checksum=crc32c.crc32c(self.key + self.value).to_bytes(4, "big"),
        )


def frame_of(entries: Sequence[Written], resolved: int = 0) -> Frame:
    """Put entries into a frame."""
    messages = [entry.message for entry in entries]
    return Frame(
        [entry.lsn for entry in entries],
        [_field(message.SerializeToString()) for message in messages],
        [entry.tenant.encode() for entry in entries],
        [entry.topic for entry in entries],
        cluster=b"walstream",
        resolved=resolved,
    )


def _field(message: bytes) -> bytes:
    # A WalBatch of this one entry and nothing else is exactly the field.
    entry = wal_pb2.WalEntry.FromString(message)
    return wal_pb2.WalBatch(entries=[entry]).SerializeToString()
