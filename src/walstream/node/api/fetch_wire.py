"""The bytes of Fetch, versions 4 to 16: requests read and responses written by hand.

Records are never copied: a response is a list of buffers, in which the log's own bytes stand between the few that frame
them. Which records those are is decided in `api/fetch.py`.

From version 12 on a request may have a tagged field of our own (`RESOLVED_TAG`), and then so has its response. Clients
that do not know it never send it, and logs that do not know it pass over it.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from walstream.errors import MalformedRequest
from walstream.node.sessions import FINAL_EPOCH, NO_SESSION, Key, Wanted
from walstream.node.wire import Buffer, Source, write_uvarint

FLEXIBLE_FROM = 12
TOPIC_IDS_FROM = 13
SESSIONS_FROM = 7
REPLICA_TAGGED_FROM = 15

READ_COMMITTED = 1

RESOLVED_TAG = 10_000
"""Tagged field of a request: an array of topics, each a name and an array of partitions, of which resolved positions
are asked for. And of its response: an array of (offset, time), one for each partition in the order of the request,
(-1, -1) where ListOffsets would tell none. All as flexible versions write them. Far above Kafka's own tags."""

RESOLVING_MAX = 1_000
"""Partitions whose resolved positions one request may ask for. Each costs some microseconds in one turn of the event
loop: so many a few milliseconds."""


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What a client asks for."""

    wait_ms_max: int
    bytes_min: int
    bytes_max: int
    isolation_level: int
    session_id: int
    session_epoch: int
    wanted: list[Wanted]
    forgotten: list[Key]
    resolving: list[tuple[str, int]] | None = None
    """Partitions whose resolved positions are asked for; None: the client does not know of such."""


class Answer:
    """What is said about one partition."""

    __slots__ = ("code", "high_watermark", "log_start", "records", "wanted")

    def __init__(self, wanted: Wanted, code: int = 0, high_watermark: int = -1, log_start: int = -1) -> None:
        self.wanted = wanted
        self.code = code
        self.high_watermark = high_watermark
        self.log_start = log_start
        self.records: Buffer = b""


def read_request(source: Source, version: int) -> FetchRequest:
    """Read a request from behind its header."""
    is_flexible = version >= FLEXIBLE_FROM
    if version < REPLICA_TAGGED_FROM:
        source.int32()  # Followers do not fetch here: whoever asks is a consumer.
    wait_ms_max, bytes_min, bytes_max = source.int32(), source.int32(), source.int32()
    isolation_level = source.buffer[source.advance(1)]
    session_id, session_epoch = NO_SESSION, FINAL_EPOCH
    if version >= SESSIONS_FROM:
        session_id, session_epoch = source.int32(), source.int32()
    wanted = _read_wanted(source, version, is_flexible)
    forgotten = _read_forgotten(source, version, is_flexible) if version >= SESSIONS_FROM else []
    if version >= 11:
        source.string(source.string_length(is_flexible))  # The rack.
    resolving = _read_tags(source) if is_flexible else None
    return FetchRequest(
        wait_ms_max, bytes_min, bytes_max, isolation_level, session_id, session_epoch, wanted, forgotten, resolving
    )


@cache
def _partition_layout(version: int) -> struct.Struct:
    """Return the layout of index, leader epoch, offset, last epoch, log start and bytes, where the version has them."""
    return struct.Struct(
        ">i"
        + ("i" if version >= 9 else "")
        + "q"
        + ("i" if version >= 12 else "")
        + ("q" if version >= 5 else "")
        + "i"
    )


def _read_topic(source: Source, version: int, is_flexible: bool) -> str | uuid.UUID:
    if version >= TOPIC_IDS_FROM:
        position = source.advance(16)
        return uuid.UUID(bytes=bytes(source.buffer[position : position + 16]))
    return source.string(source.string_length(is_flexible))


def _read_wanted(source: Source, version: int, is_flexible: bool) -> list[Wanted]:
    layout = _partition_layout(version)
    wanted: list[Wanted] = []
    for _ in range(source.array_length(is_flexible, 3)):
        topic = _read_topic(source, version, is_flexible)
        for _ in range(source.array_length(is_flexible, layout.size)):
            values = layout.unpack_from(source.buffer, source.advance(layout.size))
            leader_epoch, offset = (values[1], values[2]) if version >= 9 else (-1, values[1])
            wanted.append(Wanted(topic, values[0], leader_epoch, offset, values[-1]))
            if is_flexible:
                source.skip_tags()
        if is_flexible:
            source.skip_tags()
    return wanted


def _read_forgotten(source: Source, version: int, is_flexible: bool) -> list[Key]:
    forgotten: list[Key] = []
    for _ in range(source.array_length(is_flexible, 3)):
        topic = _read_topic(source, version, is_flexible)
        forgotten += [(topic, source.int32()) for _ in range(source.array_length(is_flexible, 4))]
        if is_flexible:
            source.skip_tags()
    return forgotten


def _read_tags(source: Source) -> list[tuple[str, int]] | None:
    """Read the tagged fields of a request, of which one matters here."""
    resolving = None
    for _ in range(source.count(source.uvarint(), 2)):
        tag, length = source.uvarint(), source.uvarint()
        start = source.advance(length)
        if tag == RESOLVED_TAG:
            outer_end, source.end, source.position = source.end, source.position, start
            resolving = _read_resolving(source)
            source.finish()
            source.end = outer_end
    return resolving


def _read_resolving(source: Source) -> list[tuple[str, int]]:
    resolving: list[tuple[str, int]] = []
    for _ in range(source.array_length(True, 2)):
        topic = source.string(source.string_length(True))
        count = source.array_length(True, 4)
        if len(resolving) + count > RESOLVING_MAX:
            raise MalformedRequest(f"Resolved positions of more than {RESOLVING_MAX} partitions are asked for.")
        resolving += [(topic, source.int32()) for _ in range(count)]
    return resolving


def write_response(
    version: int,
    answers: Sequence[Answer],
    *,
    error_code: int = 0,
    session_id: int = NO_SESSION,
    isolation_level: int = 0,
    resolved: Sequence[tuple[int, int]] | None = None,
) -> list[Buffer]:
    """Write the body of a response as a list of buffers."""
    is_flexible = version >= FLEXIBLE_FROM
    parts: list[Buffer] = []
    out = bytearray(4)  # The throttle time.
    if version >= SESSIONS_FROM:
        out += struct.pack(">hi", error_code, session_id)
    topics: dict[str | uuid.UUID, list[Answer]] = {}
    for answer in answers:
        topics.setdefault(answer.wanted.topic, []).append(answer)
    _write_length(out, len(topics), is_flexible)
    for topic, of_topic in topics.items():
        _write_topic(out, topic, is_flexible)
        _write_length(out, len(of_topic), is_flexible)
        for answer in of_topic:
            _write_partition(out, answer, version, isolation_level)
            if len(answer.records):
                parts += (out, answer.records)
                out = bytearray()
            if is_flexible:
                out.append(0)
        if is_flexible:
            out.append(0)
    if is_flexible:
        _write_tags(out, resolved)
    parts.append(out)
    return parts


def _write_tags(out: bytearray, resolved: Sequence[tuple[int, int]] | None) -> None:
    if resolved is None:
        out.append(0)
        return
    field = bytearray()
    _write_length(field, len(resolved), True)
    for position in resolved:
        field += _POSITION.pack(*position)
    out.append(1)
    write_uvarint(out, RESOLVED_TAG)
    write_uvarint(out, len(field))
    out += field


def _write_topic(out: bytearray, topic: str | uuid.UUID, is_flexible: bool) -> None:
    if isinstance(topic, uuid.UUID):
        out += topic.bytes
        return
    encoded = topic.encode()
    if is_flexible:
        write_uvarint(out, len(encoded) + 1)
    else:
        out += struct.pack(">h", len(encoded))
    out += encoded


_PARTITION_4 = struct.Struct(">ihqq")
_PARTITION_5 = struct.Struct(">ihqqq")
_POSITION = struct.Struct(">qq")


def _write_partition(out: bytearray, answer: Answer, version: int, isolation_level: int) -> None:
    """Write everything about a partition up to its records, of which only the length is written here."""
    index, high_watermark = answer.wanted.partition, answer.high_watermark
    # Without transactions the last stable offset is the high watermark.
    if version >= 5:
        out += _PARTITION_5.pack(index, answer.code, high_watermark, high_watermark, answer.log_start)
    else:
        out += _PARTITION_4.pack(index, answer.code, high_watermark, high_watermark)
    aborted = 0 if isolation_level == READ_COMMITTED else -1
    if version >= FLEXIBLE_FROM:
        out += struct.pack(">Bi", aborted + 1, -1)
        write_uvarint(out, len(answer.records) + 1)
        return
    out += struct.pack(">ii", aborted, -1) if version >= 11 else struct.pack(">i", aborted)
    out += struct.pack(">i", len(answer.records))


def _write_length(out: bytearray, length: int, is_flexible: bool) -> None:
    if is_flexible:
        write_uvarint(out, length + 1)
    else:
        out += struct.pack(">i", length)
