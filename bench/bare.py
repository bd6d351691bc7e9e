"""Just enough of the Kafka protocol for a benchmark, over blocking sockets.

A stock client in Python spends more time on each record than the server does, so some figures can only be seen with a
client that does next to nothing: it asks for whole batches and counts bytes. `Connection` is that client. Only
versions without tagged fields are spoken; every server since Kafka 0.11 knows them.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from crc32c import crc32c

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS, CREATE_TOPICS, DELETE_TOPICS = 0, 1, 2, 3, 18, 19, 20
CLIENT_ID = b"walstream-bench"

REQUEST_HEADER = struct.Struct(f">ihhih{len(CLIENT_ID)}s")
BATCH_START = struct.Struct(">qi")
BATCH_LAST_OFFSET_DELTA = struct.Struct(">i")
LAST_OFFSET_DELTA_AT = 23
BATCH_OVERHEAD_BYTES = 12
BATCH_HEADER_BYTES = 61


def address_of(text: str) -> tuple[str, int]:
    """Split HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


class Reader:
    """Read fields one after another from a response."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.position = 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f">{kind}", self.buffer, self.position)
        self.position += struct.calcsize(f">{kind}")
        return int(value)

    def string(self) -> str | None:
        length = self.number("h")
        return None if length < 0 else bytes(self.take(length)).decode()

    def take(self, length: int) -> memoryview:
        self.position += length
        return self.buffer[self.position - length : self.position]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one fetch brought: its size in bytes, its records, and the offset that follows."""

    size_bytes: int
    records: int
    next_offset: int


class Connection:
    """One blocking connection. Answers come in the order of the requests; a second thread may read them."""

    def __init__(self, address: tuple[str, int], timeout_s: float = 30.0) -> None:
        self.socket = socket.create_connection(address, timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray(1024 * 1024)
        self.sent = 0
        self.received = 0

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, api: int, version: int, body: bytes) -> None:
        self.sent += 1
        size = REQUEST_HEADER.size - 4 + len(body)
        header = REQUEST_HEADER.pack(size, api, version, self.sent, len(CLIENT_ID), CLIENT_ID)
        self.socket.sendall(header + body)

    def receive(self) -> Reader:
        """Read one whole response into the reused buffer; valid until the next one."""
        (size,) = struct.unpack(">i", self._read(4))
        reader = Reader(self._read(size))
        self.received += 1
        correlation = reader.number("i")
        if correlation != self.received:
            raise ConnectionError(f"expected the answer to request {self.received}, got that to {correlation}")
        return reader

    def _read(self, size: int) -> memoryview:
        if size > len(self.buffer):
            self.buffer = bytearray(size)
        view = memoryview(self.buffer)[:size]
        done = 0
        while done < size:
            got = self.socket.recv_into(view[done:])
            if not got:
                raise ConnectionError("the server closed the connection")
            done += got
        return view

    def ask(self, api: int, version: int, body: bytes) -> Reader:
        self.send(api, version, body)
        return self.receive()

    def leader(self, topic: str) -> tuple[str, int]:
        """Return the address of the node that leads partition 0 of the topic."""
        reader = self.ask(METADATA, 1, struct.pack(">i", 1) + string(topic))
        nodes = {}
        for _ in range(reader.number("i")):
            node, host, port = reader.number("i"), reader.string() or "", reader.number("i")
            reader.string()
            nodes[node] = (host, port)
        reader.number("i")
        for _ in range(reader.number("i")):
            error = reader.number("h")
            reader.string()
            reader.number("b")
            for _ in range(reader.number("i")):
                partition_error, partition, leader = reader.number("h"), reader.number("i"), reader.number("i")
                for _ in range(2):
                    reader.take(4 * reader.number("i"))
                if partition == 0 and not partition_error:
                    return nodes[leader]
            if error:
                raise LookupError(f"topic {topic}: error {error}")
        raise LookupError(f"topic {topic} has no leader")

    def end_offset(self, topic: str) -> int:
        """Return the end of partition 0: how many records a topic that lost none has."""
        body = struct.pack(">ii", -1, 1) + string(topic) + struct.pack(">iiq", 1, 0, -1)
        reader = self.ask(LIST_OFFSETS, 1, body)
        reader.number("i")
        reader.string()
        reader.number("i")
        reader.number("i")
        error = reader.number("h")
        if error:
            raise LookupError(f"offsets of {topic}: error {error}")
        reader.number("q")
        return reader.number("q")

    def fetch(self, topic: str, offset: int, bytes_max: int) -> Fetched:
        """Fetch batches of partition 0 from the offset on, at most about `bytes_max`, and count what came."""
        body = struct.pack(">iiiib", -1, 500, 1, bytes_max, 0)
        body += struct.pack(">i", 1) + string(topic) + struct.pack(">iiqi", 1, 0, offset, bytes_max)
        reader = self.ask(FETCH, 4, body)
        reader.number("i")
        reader.number("i")
        reader.string()
        reader.number("i")
        reader.number("i")
        error = reader.number("h")
        if error:
            raise LookupError(f"fetch of {topic} at {offset}: error {error}")
        reader.number("q")
        reader.number("q")
        aborted = reader.number("i")
        reader.take(16 * max(0, aborted))
        size = max(0, reader.number("i"))
        return count_batches(reader.take(size), offset)

    def send_batch(self, topic: str, batch: bytes, acks: int = 1) -> None:
        """Send one batch to partition 0; `receive_acknowledgement` waits for the answer."""
        body = b"\xff\xff" + struct.pack(">hii", acks, 30_000, 1) + string(topic)
        body += struct.pack(">iii", 1, 0, len(batch)) + batch
        self.send(PRODUCE, 3, body)

    def receive_acknowledgement(self) -> None:
        reader = self.receive()
        reader.number("i")
        topic = reader.string()
        reader.number("i")
        reader.number("i")
        error = reader.number("h")
        if error:
            raise LookupError(f"produce to {topic}: error {error}")


def count_batches(records: memoryview, offset: int) -> Fetched:
    """Count the whole batches in a fetched record set from their headers alone."""
    position, next_offset = 0, offset
    size = len(records)
    while position + BATCH_HEADER_BYTES <= size:
        base, length = BATCH_START.unpack_from(records, position)
        if position + BATCH_OVERHEAD_BYTES + length > size:
            break
        (delta,) = BATCH_LAST_OFFSET_DELTA.unpack_from(records, position + LAST_OFFSET_DELTA_AT)
        next_offset = base + delta + 1
        position += BATCH_OVERHEAD_BYTES + length
    return Fetched(position, next_offset - offset, next_offset)


def varint(number: int) -> bytes:
    """Encode a signed number as Kafka's records do: zigzag, seven bits a byte."""
    zigzag, out = (number << 1) ^ (number >> 63), bytearray()
    while zigzag > 0x7F:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


def one_record_batch(value: bytes) -> bytes:
    """Build a record batch v2 with one record without key and headers."""
    record = b"\x00" + varint(0) + varint(0) + varint(-1) + varint(len(value)) + value + varint(0)
    records = varint(len(record)) + record
    now_ms = int(time.time() * 1000)
    checked = struct.pack(">hiqqqhii", 0, 0, now_ms, now_ms, -1, -1, -1, 1) + records
    return struct.pack(">qiibI", 0, 9 + len(checked), -1, 2, crc32c(checked)) + checked
