"""What the feed asks of the log, as bytes: Fetch and ListOffsets by hand, everything else by Kafka's schemas.

Owns the bytes of requests and of their answers; knows nothing of connections. A `Call` is what aiokafka's connection
takes for a request of its own, so that it goes the way of all others: versions, authentication, timeouts, order. Fetch
is written in version 12 where the log speaks it, and else in 11; the records of an answer are copied once. Sans-IO.

A fetch session (KIP-227) names its partitions once, and from then on only those whose place has changed: a tail that
follows a thousand partitions says and hears about the few that have news.

From version 12 on a fetch may ask for promises, too (`resolved`), in a tagged field that a walstream node answers and
other logs pass over.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from struct import Struct
from typing import Any, Final, NamedTuple

from walstream.errors import MalformedRequest, UnsupportedVersion
from walstream.node.primitives import Source, write_uvarint
from walstream.node.schemas import Message, schema
from walstream.node.wire import Codec, Reply, compile_message
from walstream.positions import TopicPartition

FETCH: Final = 1
LIST_OFFSETS: Final = 2
READ_COMMITTED: Final = 1

_CONSUMER: Final = -1
_DEBUGGER: Final = -2
"""Who asks. To a debugger Apache Kafka tells the end of what was appended, to a consumer that of what can be read."""

LATEST: Final = -1
EARLIEST: Final = -2
RESOLVED: Final = 1 << 62
"""Asks a walstream node for an offset and a time: every record from the offset on is appended later."""

SESSION_NOT_FOUND: Final = 70
INVALID_SESSION_EPOCH: Final = 71
_FINAL_EPOCH: Final = -1
_EPOCH_MAX: Final = 2**31 - 1

RESOLVED_TAG: Final = 10_000
"""Tagged field of a fetch: partitions whose resolved positions are asked for; and of its answer: these."""

_FLEXIBLE_FROM: Final = 12
_NO_TAGS: Final = b"\x00"

_FETCH_HEAD: Final = Struct(">iiiibii")
_FETCH_PARTITION: Final = Struct(">iiqqi")
_FETCH_PARTITION_12: Final = Struct(">iiqiqix")
"""With the epoch of what was read last, which is not known, and without tags."""
_FETCHED_HEAD: Final = Struct(">ihi")
_FETCHED: Final = Struct(">ihqqq")
_POSITION: Final = Struct(">qq")
_ABORTED: Final = Struct(">qq")
_OFFSETS_HEAD: Final = Struct(">ib")
_OFFSETS_PARTITION: Final = Struct(">iiq")
_FOUND: Final = Struct(">ihqqi")
_HEADER: Final = Struct(">hhih")
_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")


class Fetched(NamedTuple):
    """What a fetch says of one partition."""

    code: int
    high_watermark: int
    """Where what can be read ends: before the first transaction that is not decided, if there is one."""
    log_start: int
    aborted: Sequence[tuple[int, int]]
    records: bytes


class Found(NamedTuple):
    """What ListOffsets says of one partition."""

    code: int
    offset: int
    timestamp_ms: int


class FetchAnswer(NamedTuple):
    """What a fetch says."""

    code: int
    session_id: int
    fetched: dict[TopicPartition, Fetched]
    promised: dict[TopicPartition, Found]
    """Resolved positions, as ListOffsets tells them; empty: the log does not tell them here."""


class Wanted(NamedTuple):
    """Where to read a partition, and how much of it."""

    offset: int
    bytes_max: int


class Call:
    """One request, in the shape in which aiokafka sends its own."""

    def __init__(
        self, api_key: int, versions: range, write: Callable[[int], bytes], read: Callable[[int, Source], Any]
    ) -> None:
        """Take what writes the body and what reads the answer, tags of the headers included, in a version."""
        self._api_key = api_key
        self._versions = versions
        self._write = write
        self._read = read
        self._version = 0

    def prepare(self, offered: Mapping[int, tuple[int, int]]) -> Call:
        """Choose the version. Raises UnsupportedVersion."""
        low, high = offered.get(self._api_key, (0, -1))
        version = min(high, self._versions[-1])
        if version < max(low, self._versions[0]):
            raise UnsupportedVersion(
                f"The log speaks versions {low} to {high} of API {self._api_key}, the feed {self._versions[0]} to "
                f"{self._versions[-1]}.",
                "Use a walstream node, or Apache Kafka 2.8 or newer.",
            )
        self._version = version
        return self

    def build_request_header(self, correlation_id: int, client_id: str) -> _Header:
        """Begin the request."""
        return _Header(self._api_key, self._version, correlation_id, client_id)

    def encode(self) -> bytes:
        """Write the body."""
        return self._write(self._version)

    def parse_response_header(self, data: BytesIO) -> _Header:
        """Read the part of the answer that says whose answer it is; tags are left to `decode`."""
        (correlation_id,) = _INT32.unpack(data.read(4))
        return _Header(self._api_key, self._version, correlation_id, "")

    @property
    def RESPONSE_TYPE(self) -> Call:
        """What decodes the answer."""
        return self

    def decode(self, data: BytesIO) -> Any:
        """Read the body of the answer. Raises MalformedRequest."""
        return self._read(self._version, Source(data.getvalue(), data.tell()))


class _Header(NamedTuple):
    api_key: int
    version: int
    correlation_id: int
    client_id: str

    def encode(self) -> bytes:
        client_id = self.client_id.encode()
        return _HEADER.pack(self.api_key, self.version, self.correlation_id, len(client_id)) + client_id


def message_call(api_key: int, versions: range, body: Reply) -> Call:
    """Return a call of any API: the body by the schema's names, the answer as a Message."""

    def write(version: int) -> bytes:
        codec = _codec(api_key, version, "request")
        out = bytearray(1 if codec.header_has_tags else 0)
        codec.write(out, body)
        return bytes(out)

    def read(version: int, source: Source) -> Message:
        codec = _codec(api_key, version, "response")
        if codec.header_has_tags:
            source.skip_tags()
        source.elements_left = source.end
        message: Message = codec.read(source)
        return message

    return Call(api_key, versions, write, read)


def _codec(api_key: int, version: int, direction: Any) -> Codec:
    key = (api_key, version, direction)
    found = _codecs.get(key)
    if found is None:
        found = _codecs[key] = compile_message(schema(api_key, direction)[version])
    return found


_codecs: dict[tuple[int, int, Any], Codec] = {}


class Session:
    """A fetch session: what the other side knows of our partitions. Forgotten with the connection."""

    def __init__(self) -> None:
        self._id = 0
        self._epoch = 0
        self._told: dict[TopicPartition, Wanted] = {}

    def reset(self) -> None:
        """Begin anew: the next request names everything."""
        self._id, self._epoch, self._told = 0, 0, {}

    def news(self, wanted: Mapping[TopicPartition, Wanted]) -> tuple[int, int, dict[TopicPartition, Wanted], list[Any]]:
        """Return the session's id and epoch, the partitions to name, and those to forget."""
        told = self._told
        named = {partition: place for partition, place in wanted.items() if told.get(partition) != place}
        forgotten = [partition for partition in told if partition not in wanted]
        self._told = dict(wanted)
        return self._id, self._epoch, named, forgotten

    def answered(self, code: int, session_id: int) -> bool:
        """Take note of the answer; False when the session was not known, so that the request must be made again."""
        if code or not session_id:
            # Without an id the other side has no room for sessions: each request then names everything.
            self.reset()
            return not code
        self._id = session_id
        self._epoch = self._epoch % _EPOCH_MAX + 1
        return True


def fetch_call(
    wanted: Mapping[TopicPartition, Wanted],
    *,
    wait_ms: int,
    bytes_max: int,
    session: Session | None = None,
    promises_of: tuple[TopicPartition, ...] = (),
) -> Call:
    """Ask for records, and for what is promised of some partitions. The answer is a FetchAnswer."""
    session_id, epoch, named, forgotten = session.news(wanted) if session else (0, _FINAL_EPOCH, wanted, [])
    asked, asking = _asking_for(promises_of)

    def write(version: int) -> bytes:
        is_flexible = version >= _FLEXIBLE_FROM
        tags = _NO_TAGS if is_flexible else b""
        out = bytearray(tags + _FETCH_HEAD.pack(-1, wait_ms, 1, bytes_max, READ_COMMITTED, session_id, epoch))
        write_place = _write_place_12 if is_flexible else _write_place_11
        _write_topics(out, named, write_place, is_flexible=is_flexible, tags=tags)
        _write_topics(out, dict.fromkeys(forgotten), _write_index, is_flexible=is_flexible, tags=tags)
        _write_length(out, 0, None if is_flexible else _INT16)  # No rack.
        if is_flexible:
            out += asking
        return bytes(out)

    def read(version: int, source: Source) -> FetchAnswer:
        return _read_fetched(source, asked, is_flexible=version >= _FLEXIBLE_FROM)

    return Call(FETCH, range(11, 13), write, read)


def offsets_call(wanted: Mapping[TopicPartition, int], *, with_unreadable: bool = False) -> Call:
    """Ask where times, or LATEST, EARLIEST and RESOLVED, are. The answer is a dict of Found.

    With what cannot be read yet, LATEST of Apache Kafka is behind everything that was appended.
    """

    def write(_: int) -> bytes:
        out = bytearray(_OFFSETS_HEAD.pack(_DEBUGGER if with_unreadable else _CONSUMER, READ_COMMITTED))
        _write_topics(out, wanted, lambda index, time_ms: _OFFSETS_PARTITION.pack(index, -1, time_ms))
        return bytes(out)

    return Call(LIST_OFFSETS, range(5, 6), write, _read_found)


def _write_place_11(index: int, place: Wanted) -> bytes:
    return _FETCH_PARTITION.pack(index, -1, place.offset, -1, place.bytes_max)


def _write_place_12(index: int, place: Wanted) -> bytes:
    return _FETCH_PARTITION_12.pack(index, -1, place.offset, -1, -1, place.bytes_max)


def _write_index(index: int, _: Any) -> bytes:
    return _INT32.pack(index)


@lru_cache(maxsize=64)
def _asking_for(partitions: tuple[TopicPartition, ...]) -> tuple[Sequence[TopicPartition], bytes]:
    """Return partitions in the order in which they are written, and the tagged fields that ask for their promises.

    A tail asks for the same each time.
    """
    topics: dict[str, list[TopicPartition]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(partition)
    asked = [partition for members in topics.values() for partition in members]
    if not asked:
        return asked, _NO_TAGS
    field, out = bytearray(), bytearray(b"\x01")
    _write_topics(field, dict.fromkeys(asked), _write_index, is_flexible=True)
    write_uvarint(out, RESOLVED_TAG)
    write_uvarint(out, len(field))
    return asked, bytes(out + field)


def _write_topics(
    out: bytearray,
    partitions: Mapping[TopicPartition, Any],
    write: Callable[[int, Any], bytes],
    *,
    is_flexible: bool = False,
    tags: bytes = b"",
) -> None:
    """Write partitions by their topics, each topic with these tags."""
    topics: dict[str, list[bytes]] = {}
    for (topic, index), value in partitions.items():
        topics.setdefault(topic, []).append(write(index, value))
    _write_length(out, len(topics), None if is_flexible else _INT32)
    for topic, members in topics.items():
        name = topic.encode()
        _write_length(out, len(name), None if is_flexible else _INT16)
        out += name
        _write_length(out, len(members), None if is_flexible else _INT32)
        out += b"".join(members) + tags


def _write_length(out: bytearray, length: int, layout: Struct | None) -> None:
    if layout is None:
        write_uvarint(out, length + 1)
    else:
        out += layout.pack(length)


def _read_topics(source: Source, *, is_flexible: bool = False) -> Iterable[str]:
    """Yield the topic of each partition that follows, before the partition itself is read."""
    for _ in range(source.bytes_length(is_flexible)):
        topic = source.string(source.string_length(is_flexible))
        for _ in range(source.bytes_length(is_flexible)):
            yield topic
        if is_flexible:
            source.skip_tags()


def _read_fetched(source: Source, asked: Sequence[TopicPartition], *, is_flexible: bool) -> FetchAnswer:
    if is_flexible:
        source.skip_tags()
    _, code, session_id = _FETCHED_HEAD.unpack_from(source.buffer, source.advance(_FETCHED_HEAD.size))
    found: dict[TopicPartition, Fetched] = {}
    for topic in _read_topics(source, is_flexible=is_flexible):
        index, failed, high_watermark, stable, log_start = _FETCHED.unpack_from(
            source.buffer, source.advance(_FETCHED.size)
        )
        aborted = []
        for _ in range(source.bytes_length(is_flexible)):
            aborted.append(_ABORTED.unpack_from(source.buffer, source.advance(_ABORTED.size)))
            if is_flexible:
                source.skip_tags()
        source.int32()  # Another replica to read from: nobody asked for one.
        length = max(source.bytes_length(is_flexible), 0)
        position = source.advance(length)
        records = bytes(source.buffer[position : position + length])
        end = min(high_watermark, stable) if stable >= 0 else high_watermark
        found[TopicPartition(topic, index)] = Fetched(failed, end, log_start, aborted, records)
        if is_flexible:
            source.skip_tags()
    return FetchAnswer(code, session_id, found, _read_promised(source, asked) if is_flexible else {})


def _read_promised(source: Source, asked: Sequence[TopicPartition]) -> dict[TopicPartition, Found]:
    """Read the tagged fields of an answer to a fetch. Raises MalformedRequest."""
    promised: dict[TopicPartition, Found] = {}
    for _ in range(source.uvarint()):
        tag, length = source.uvarint(), source.uvarint()
        end = source.advance(length) + length
        if tag != RESOLVED_TAG:
            continue
        source.position = end - length
        if source.uvarint() - 1 != len(asked) or end - source.position != len(asked) * _POSITION.size:
            raise MalformedRequest(f"Of {len(asked)} partitions that were asked for, the answer tells of others.")
        for partition in asked:
            offset, time_ms = _POSITION.unpack_from(source.buffer, source.advance(_POSITION.size))
            promised[partition] = Found(0, offset, time_ms)
    return promised


def _read_found(_: int, source: Source) -> dict[TopicPartition, Found]:
    source.int32()
    found: dict[TopicPartition, Found] = {}
    for topic in _read_topics(source):
        index, code, timestamp_ms, offset, _ = _FOUND.unpack_from(source.buffer, source.advance(_FOUND.size))
        found[TopicPartition(topic, index)] = Found(code, offset, timestamp_ms)
    return found


class TopicMetadata(NamedTuple):
    """What the log says of a topic."""

    id: uuid.UUID
    leaders: dict[int, int]
    """The node that leads each partition; -1: none."""
