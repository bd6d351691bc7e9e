"""The Kafka protocol by hand, for what no stock client would send or show: error codes, broken frames, raw batches."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from walstream.log.records import Record, build_batch

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 0, 1, 2, 3, 18
OFFSET_COMMIT, OFFSET_FETCH = 8, 9
DELETE_RECORDS, OFFSET_FOR_LEADER_EPOCH = 21, 23
KAFKA_STORAGE_ERROR, CORRUPT_MESSAGE, MESSAGE_TOO_LARGE, NONE = 56, 2, 10, 0
COORDINATOR_LOAD_IN_PROGRESS = 14
CLIENT_ID = b"bare"


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def text(value: str) -> bytes:
    return struct.pack(">h", len(value.encode())) + value.encode()


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def request(api: int, version: int, body: bytes, correlation: int = 1) -> bytes:
    """A whole frame with a request header of version 1."""
    return frame(struct.pack(">hhih", api, version, correlation, len(CLIENT_ID)) + CLIENT_ID + body)


def api_versions_request() -> bytes:
    return request(API_VERSIONS, 0, b"")


def produce_request(topic: str, batch: bytes, *, acks: int = 1, partition: int = 0, timeout_ms: int = 10_000) -> bytes:
    body = b"\xff\xff" + struct.pack(">hii", acks, timeout_ms, 1) + text(topic)
    return request(PRODUCE, 3, body + struct.pack(">iii", 1, partition, len(batch)) + batch)


def fetch_request(
    topic: str, offset: int, *, bytes_max: int = 1024 * 1024, wait_ms: int = 0, partition: int = 0
) -> bytes:
    body = struct.pack(">iiiib", -1, wait_ms, 1, bytes_max, 0) + struct.pack(">i", 1) + text(topic)
    return request(FETCH, 4, body + struct.pack(">iiqi", 1, partition, offset, bytes_max))


def list_offsets_request(topic: str, timestamp: int, *partitions: int) -> bytes:
    asked = b"".join(struct.pack(">iq", partition, timestamp) for partition in partitions)
    return request(
        LIST_OFFSETS, 1, struct.pack(">ii", -1, 1) + text(topic) + struct.pack(">i", len(partitions)) + asked
    )


def delete_records_request(topic: str, before: int) -> bytes:
    body = struct.pack(">i", 1) + text(topic) + struct.pack(">iiqi", 1, 0, before, 10_000)
    return request(DELETE_RECORDS, 0, body)


def offset_for_leader_epoch_request(topic: str, epoch: int) -> bytes:
    body = struct.pack(">i", 1) + text(topic) + struct.pack(">iiii", 1, 0, -1, epoch)
    return request(OFFSET_FOR_LEADER_EPOCH, 2, body)


def offset_commit_request(group: str, topic: str, offset: int) -> bytes:
    body = text(group) + struct.pack(">i", -1) + text("") + struct.pack(">qi", -1, 1) + text(topic)
    return request(OFFSET_COMMIT, 2, body + struct.pack(">iiq", 1, 0, offset) + text(""))


def offset_fetch_request(group: str, topic: str) -> bytes:
    return request(OFFSET_FETCH, 2, text(group) + struct.pack(">i", 1) + text(topic) + struct.pack(">ii", 1, 0))


def one_record(value: bytes, key: bytes | None = None) -> bytes:
    return bytes(build_batch([Record(0, int(time.time() * 1000), key, value)]))


def named(code: int) -> int:
    """Return an error code that a failed assertion shows by its name."""
    from kio.schema.errors import ErrorCode

    return ErrorCode(code)


@dataclass(frozen=True)
class Produced:
    error: int
    base_offset: int


@dataclass(frozen=True)
class Fetched:
    error: int
    high_watermark: int
    records: bytes


@dataclass(frozen=True)
class Listed:
    partition: int
    error: int
    timestamp: int
    offset: int


class Bare:
    """One connection. `ask` sends a frame and returns the body of the answer, after its correlation id."""

    def __init__(self, address: str, timeout_s: float = 10.0) -> None:
        self.socket = socket.create_connection(split(address), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, raw: bytes) -> None:
        self.socket.sendall(raw)

    def receive(self) -> bytes:
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)[4:]

    def _exactly(self, size: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            got = self.socket.recv(size - len(chunks))
            if not got:
                raise ConnectionError("closed by the node")
            chunks += got
        return bytes(chunks)

    def ask(self, raw: bytes) -> bytes:
        self.send(raw)
        return self.receive()

    def produce(self, topic: str, batch: bytes, **options: int) -> Produced:
        answer = self.ask(produce_request(topic, batch, **options))
        at = 4 + 2 + len(topic.encode()) + 4 + 4
        error, base_offset = struct.unpack_from(">hq", answer, at)
        return Produced(named(error), base_offset)

    def fetch(self, topic: str, offset: int, **options: int) -> Fetched:
        answer = self.ask(fetch_request(topic, offset, **options))
        at = 4 + 4 + 2 + len(topic.encode()) + 4 + 4
        error, high_watermark, _, aborted = struct.unpack_from(">hqqi", answer, at)
        at += 22 + 16 * max(0, aborted)
        (size,) = struct.unpack_from(">i", answer, at)
        return Fetched(named(error), high_watermark, answer[at + 4 : at + 4 + max(0, size)])

    def commit(self, group: str, topic: str, offset: int) -> int:
        """Commit an offset for partition 0 and return the error code."""
        answer = self.ask(offset_commit_request(group, topic, offset))
        (error,) = struct.unpack_from(">h", answer, 4 + 2 + len(topic.encode()) + 4 + 4)
        return named(error)

    def committed(self, group: str, topic: str) -> tuple[int, int]:
        """Return the error code, and the offset that a group committed for partition 0; -1 if there is none."""
        answer = self.ask(offset_fetch_request(group, topic))
        (error,) = struct.unpack_from(">h", answer, len(answer) - 2)
        if error:
            return named(error), -1
        (offset,) = struct.unpack_from(">q", answer, 4 + 2 + len(topic.encode()) + 4 + 4)
        return named(error), offset

    def list_offsets(self, topic: str, timestamp: int, *partitions: int) -> list[Listed]:
        answer = self.ask(list_offsets_request(topic, timestamp, *partitions))
        at = 4 + 2 + len(topic.encode())
        (count,) = struct.unpack_from(">i", answer, at)
        found = [struct.unpack_from(">ihqq", answer, at + 4 + 22 * number) for number in range(count)]
        return [Listed(partition, named(error), time_ms, offset) for partition, error, time_ms, offset in found]

    def ended(self, timeout_s: float = 10.0) -> bool:
        """Whether the node closes the connection within the time, whatever it still sends before."""
        self.socket.settimeout(timeout_s)
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True
