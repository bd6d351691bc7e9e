"""A server that speaks just enough Kafka to make a client happy, throws everything away and serves one canned batch.

It is the limit a client can reach on this machine: metadata for any topic (one partition, led by itself), immediate
success for every produce request, nothing checked, nothing kept; every fetch gets the same bytes from memory, as many
as it asked for. A node's rate divided by the rate against this sink is the share of the client's own speed that the
node lets through.

Prints `{"port": N}` when it listens. When its standard input ends, prints the sizes of the record sets it was sent.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 0, 1, 2, 3, 18
# ListOffsets is never asked for; it is listed because librdkafka concludes from it what kind of server this is.
VERSIONS = {PRODUCE: (0, 7), FETCH: (4, 4), LIST_OFFSETS: (0, 2), METADATA: (0, 4), API_VERSIONS: (0, 2)}
BUFFER_BYTES = 4 * 1024 * 1024

sizes: list[int] = []
"""The bytes of each record set received, in order."""


def string(raw: bytes) -> bytes:
    return struct.pack(">h", len(raw)) + raw


def versions(version: int) -> bytes:
    body = struct.pack(">hi", 0, len(VERSIONS))
    for api, (lowest, highest) in VERSIONS.items():
        body += struct.pack(">hhh", api, lowest, highest)
    return body + (struct.pack(">i", 0) if version >= 1 else b"")


def metadata(version: int, frame: memoryview, position: int, port: int) -> bytes:
    (count,) = struct.unpack_from(">i", frame, position)
    position += 4
    topics = []
    for _ in range(max(0, count)):
        (length,) = struct.unpack_from(">h", frame, position)
        topics.append(bytes(frame[position + 2 : position + 2 + length]))
        position += 2 + length
    body = struct.pack(">i", 0) if version >= 3 else b""
    body += struct.pack(">ii", 1, 1) + string(b"127.0.0.1") + struct.pack(">i", port)
    body += b"\xff\xff" if version >= 1 else b""
    body += string(b"sink") if version >= 2 else b""
    body += struct.pack(">i", 1) if version >= 1 else b""
    body += struct.pack(">i", len(topics))
    for topic in topics:
        body += struct.pack(">h", 0) + string(topic) + (b"\x00" if version >= 1 else b"")
        body += struct.pack(">i", 1) + struct.pack(">hii", 0, 0, 1) + struct.pack(">iiii", 1, 1, 1, 1)
    return body


def produce(version: int, frame: memoryview, position: int) -> bytes | None:
    """Return success for every partition named in the request, or None when no answer is wanted."""
    if version >= 3:
        (length,) = struct.unpack_from(">h", frame, position)
        position += 2 + max(0, length)
    acks, _, topics = struct.unpack_from(">hii", frame, position)
    position += 10
    body = struct.pack(">i", topics)
    for _ in range(topics):
        (length,) = struct.unpack_from(">h", frame, position)
        body += bytes(frame[position : position + 2 + length])
        position += 2 + length
        (partitions,) = struct.unpack_from(">i", frame, position)
        position += 4
        body += struct.pack(">i", partitions)
        for _ in range(partitions):
            index, size = struct.unpack_from(">ii", frame, position)
            position += 8 + size
            sizes.append(size)
            body += struct.pack(">ihq", index, 0, 0)
            body += struct.pack(">q", -1) if version >= 2 else b""
            body += struct.pack(">q", 0) if version >= 5 else b""
    body += struct.pack(">i", 0) if version >= 1 else b""
    return body if acks else None


def fetch(frame: memoryview, position: int) -> bytes:
    """Return one batch that fills what the fetch allows; only its base offset and lengths mean anything."""
    _, _, _, _, _, _, length = struct.unpack_from(">iiiibih", frame, position)
    position += 23
    topic = bytes(frame[position : position + length])
    _, partition, offset, bytes_max = struct.unpack_from(">iiqi", frame, position + length)
    body = struct.pack(">ii", 0, 1) + string(topic) + struct.pack(">iihqqi", 1, partition, 0, 2**40, 2**40, 0)
    batch_start = struct.pack(">qiibIhi", offset, bytes_max - 12, 0, 2, 0, 0, 0)
    return body + struct.pack(">i", bytes_max) + batch_start + bytes(bytes_max - len(batch_start))


def answer(frame: memoryview, port: int) -> bytes | None:
    api, version, correlation, client = struct.unpack_from(">hhih", frame, 0)
    position = 10 + max(0, client)
    body: bytes | None
    if api == API_VERSIONS:
        lowest, highest = VERSIONS[API_VERSIONS]
        if lowest <= version <= highest:
            body = versions(version)
        else:
            # The protocol's own way to say "ask again in an older version".
            body = struct.pack(">hi", 35, 1) + struct.pack(">hhh", API_VERSIONS, lowest, highest)
    elif api == METADATA:
        body = metadata(version, frame, position, port)
    elif api == PRODUCE:
        body = produce(version, frame, position)
    elif api == FETCH:
        body = fetch(frame, position)
    else:
        raise ValueError(f"the sink does not know API {api}")
    return None if body is None else struct.pack(">ii", 4 + len(body), correlation) + body


def serve(connection: socket.socket, port: int) -> None:
    """Answer every whole frame in the buffer, then read more: few system calls, no copy but the kernel's."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(BUFFER_BYTES)
    start = end = 0
    with connection:
        while True:
            if end - start >= 4:
                (size,) = struct.unpack_from(">i", buffer, start)
                if end - start >= 4 + size:
                    reply = answer(memoryview(buffer)[start + 4 : start + 4 + size], port)
                    start += 4 + size
                    if reply is not None:
                        connection.sendall(reply)
                    continue
                if 4 + size > len(buffer):
                    buffer = bytearray(buffer[start:end]) + bytearray(4 + size)
                    start, end = 0, end - start
            if start == end:
                start = end = 0
            elif start > len(buffer) // 2:
                buffer[: end - start] = buffer[start:end]
                start, end = 0, end - start
            try:
                got = connection.recv_into(memoryview(buffer)[end:])
            except ConnectionError:
                return
            if not got:
                return
            end += got


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    print(json.dumps({"port": port}), flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection, port), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    print(json.dumps({"sizes": sizes}), flush=True)


if __name__ == "__main__":
    main()
