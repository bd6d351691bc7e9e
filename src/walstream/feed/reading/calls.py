"""What the feed asks of the log, as bytes: Fetch and ListOffsets by hand, everything else by Kafka's schemas.

Owns the bytes of requests and of their answers; knows nothing of connections. A `Call` is what aiokafka's connection
takes for a request of its own, so that it goes the way of all others: versions, authentication, timeouts, order. Fetch
is written for one version, 11, which every log of these days speaks; the records of an answer are copied once. Sans-IO.

A fetch session (KIP-227) names its partitions once, and from then on only those whose place has changed: a tail that
follows a thousand partitions says and hears about the few that have news.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from struct import Struct
from typing import Any, Final, NamedTuple

from walstream.errors import UnsupportedVersion
from walstream.node.primitives import Source
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

_FETCH_HEAD: Final = Struct(">iiiibii")
_FETCH_PARTITION: Final = Struct(">iiqqi")
_FETCHED_HEAD: Final = Struct(">ihi")
_FETCHED: Final = Struct(">ihqqqi")
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
        self._epoch += 1
        return True


def fetch_call(
    wanted: Mapping[TopicPartition, Wanted],
    *,
    wait_ms: int,
    bytes_max: int,
    session: Session | None = None,
) -> Call:
    """Ask for records. The answer is (error code, session id, what is said of each partition)."""
    session_id, epoch, named, forgotten = session.news(wanted) if session else (0, _FINAL_EPOCH, wanted, [])

    def write(_: int) -> bytes:
        parts = [_FETCH_HEAD.pack(-1, wait_ms, 1, bytes_max, READ_COMMITTED, session_id, epoch)]
        _write_topics(parts, named, lambda index, place: _FETCH_PARTITION.pack(index, -1, place.offset, -1, place[1]))
        _write_topics(parts, dict.fromkeys(forgotten), lambda index, _: _INT32.pack(index))
        parts.append(b"\x00\x00")
        return b"".join(parts)

    return Call(FETCH, range(11, 12), write, _read_fetched)


def offsets_call(wanted: Mapping[TopicPartition, int], *, with_unreadable: bool = False) -> Call:
    """Ask where times, or LATEST, EARLIEST and RESOLVED, are. The answer is a dict of Found.

    With what cannot be read yet, LATEST of Apache Kafka is behind everything that was appended.
    """

    def write(_: int) -> bytes:
        parts = [_OFFSETS_HEAD.pack(_DEBUGGER if with_unreadable else _CONSUMER, READ_COMMITTED)]
        _write_topics(parts, wanted, lambda index, time_ms: _OFFSETS_PARTITION.pack(index, -1, time_ms))
        return b"".join(parts)

    return Call(LIST_OFFSETS, range(5, 6), write, _read_found)


def _write_topics(
    parts: list[bytes], partitions: Mapping[TopicPartition, Any], write: Callable[[int, Any], bytes]
) -> None:
    topics: dict[str, list[bytes]] = {}
    for (topic, index), value in partitions.items():
        topics.setdefault(topic, []).append(write(index, value))
    parts.append(_INT32.pack(len(topics)))
    for topic, members in topics.items():
        name = topic.encode()
        parts += (_INT16.pack(len(name)), name, _INT32.pack(len(members)), *members)


def _read_topics(source: Source) -> Iterable[str]:
    """Yield the topic of each partition that follows, before the partition itself is read."""
    for _ in range(source.int32()):
        topic = source.string(source.int16())
        for _ in range(source.int32()):
            yield topic


def _read_fetched(_: int, source: Source) -> tuple[int, int, dict[TopicPartition, Fetched]]:
    _, code, session_id = _FETCHED_HEAD.unpack_from(source.buffer, source.advance(_FETCHED_HEAD.size))
    found: dict[TopicPartition, Fetched] = {}
    for topic in _read_topics(source):
        index, failed, high_watermark, stable, log_start, aborted_count = _FETCHED.unpack_from(
            source.buffer, source.advance(_FETCHED.size)
        )
        aborted = [
            _ABORTED.unpack_from(source.buffer, source.advance(_ABORTED.size)) for _ in range(max(aborted_count, 0))
        ]
        source.int32()  # Another replica to read from: nobody asked for one.
        length = max(source.int32(), 0)
        position = source.advance(length)
        records = bytes(source.buffer[position : position + length])
        end = min(high_watermark, stable) if stable >= 0 else high_watermark
        found[TopicPartition(topic, index)] = Fetched(failed, end, log_start, aborted, records)
    return code, session_id, found


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
