"""Committed offsets: the table in memory, and how one of them is written as a record.

The records are those of Kafka's own `__consumer_offsets`, so that tools that read it understand them. Numbers are
big-endian; a string is its length (2 bytes) and UTF-8:

    key    version 1 (2 bytes)   group   topic   partition (4)
    value  version 3 (2 bytes)   offset (8)   leader epoch (4)   metadata   commit time in ms (8)   topic since (8);
           null: deleted

The key names group, topic and partition, so that compaction keeps the last commit of each. `topic since` follows what
Kafka writes, where readers of version 3 stop; values without it are read as well. Pure: `offsets_log.py` appends the
records and applies them when they are committed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from walstream.errors import CorruptBatch

KEY_VERSION = 1
VALUE_VERSION = 3

_SHORT = struct.Struct(">h")
_PARTITION = struct.Struct(">i")
_VALUE = struct.Struct(">hqi")
_TIME = struct.Struct(">q")
_SINCE = struct.Struct(">q")

SINCE_UNKNOWN = -1

TopicPartition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Committed:
    """How far a group has read a partition."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    topic_since: int = SINCE_UNKNOWN
    """A version of the catalogue that has the topic, at least the first one that had it: a topic created again under
    the same name has a later one."""


@dataclass(frozen=True, slots=True)
class Change:
    """One partition's offset in one group: committed, or forgotten when there is none."""

    group_id: str
    topic: str
    partition: int
    committed: Committed | None


class OffsetTable:
    """The last committed offset of every group and partition. A group without offsets is not in it."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[TopicPartition, Committed]] = {}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[str]:
        """Yield the groups that have offsets."""
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, group_id: str) -> Mapping[TopicPartition, Committed]:
        """Return what a group has committed."""
        return self._groups.get(group_id, {})

    def topics(self) -> set[str]:
        """Return the topics that any group has an offset in."""
        return {topic for offsets in self._groups.values() for topic, _ in offsets}

    def apply(self, change: Change) -> None:
        """Make a durable change visible."""
        where = (change.topic, change.partition)
        if change.committed is not None:
            self._groups.setdefault(change.group_id, {})[where] = change.committed
            return
        offsets = self._groups.get(change.group_id)
        if offsets is not None:
            offsets.pop(where, None)
            if not offsets:
                del self._groups[change.group_id]


def encode(change: Change) -> tuple[bytes, bytes | None]:
    """Return the key and the value of the record that says this change."""
    key = b"".join(
        (
            _SHORT.pack(KEY_VERSION),
            _encode_text(change.group_id),
            _encode_text(change.topic),
            _PARTITION.pack(change.partition),
        )
    )
    committed = change.committed
    if committed is None:
        return key, None
    value = b"".join(
        (
            _VALUE.pack(VALUE_VERSION, committed.offset, committed.leader_epoch),
            _encode_text(committed.metadata),
            _TIME.pack(committed.commit_ms),
            b"" if committed.topic_since == SINCE_UNKNOWN else _SINCE.pack(committed.topic_since),
        )
    )
    return key, value


def decode(key: bytes | None, value: bytes | None) -> Change:
    """Read a record back; raises CorruptBatch for what this version did not write."""
    try:
        if key is None or _SHORT.unpack_from(key)[0] != KEY_VERSION:
            raise CorruptBatch("A record of the offsets topic has an unknown kind of key.")
        group_id, position = _decode_text(key, _SHORT.size)
        topic, position = _decode_text(key, position)
        (partition,) = _PARTITION.unpack_from(key, position)
        if value is None:
            return Change(group_id, topic, partition, None)
        version, offset, leader_epoch = _VALUE.unpack_from(value)
        if version != VALUE_VERSION:
            raise CorruptBatch(f"A record of the offsets topic has a value of version {version}.")
        metadata, position = _decode_text(value, _VALUE.size)
        (commit_ms,) = _TIME.unpack_from(value, position)
        position += _TIME.size
        topic_since = SINCE_UNKNOWN if position == len(value) else _SINCE.unpack_from(value, position)[0]
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptBatch(f"A record of the offsets topic cannot be read: {error}.") from error
    return Change(group_id, topic, partition, Committed(offset, leader_epoch, metadata, commit_ms, topic_since))


def _encode_text(text: str) -> bytes:
    encoded = text.encode()
    return _SHORT.pack(len(encoded)) + encoded


def _decode_text(buffer: bytes, position: int) -> tuple[str, int]:
    (length,) = _SHORT.unpack_from(buffer, position)
    start, end = position + _SHORT.size, position + _SHORT.size + length
    if length < 0 or end > len(buffer):
        raise CorruptBatch("A record of the offsets topic ends within a text.")
    return buffer[start:end].decode(), end
