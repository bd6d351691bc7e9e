"""Whatever bytes arrive: the protocol's own error or a closed connection, never a crash, a hang or a leak.

Each test throws bursts of one kind of rubbish at a node with tight limits. After each burst a healthy client must be
served within seconds, memory must be below a bound, and the log must show no traceback (conftest checks that when
the node ends). The seed of a run is printed, WALSTREAM_TEST_SEED repeats it; WALSTREAM_TEST_ROUNDS=full runs long.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator

import aiokafka
import kafka
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import NewPartitions

from walstream.node.process import NodeProcess

from .bare import (
    API_VERSIONS,
    FETCH,
    LIST_OFFSETS,
    METADATA,
    NONE,
    PRODUCE,
    Bare,
    api_versions_request,
    frame,
    one_record,
    produce_request,
    request,
    split,
)
from .clients import Confluent, Item, admin_of, create_topic
from .recorder import Recorder
from .support import MakeNode, memory_mb, rounds, seeded, wait_for

pytestmark = pytest.mark.timeout(1800)

MEMORY_MB_MAX = 300
HEALTHY = "healthy"

LIMITS: dict[str, object] = {
    "limits__connections_max": 1000,
    "limits__request_bytes_max": 4 * 1024 * 1024,
    "limits__inflight_bytes_max": 16 * 1024 * 1024,
    "limits__request_read_timeout_ms": 1000,
    "limits__idle_timeout_ms": 5000,
    "limits__fetch_wait_ms_max": 500,
    "limits__partitions_max": 300,
    "limits__groups_max": 200,
}


@pytest.fixture
def target(make_node: MakeNode) -> NodeProcess:
    """A node with tight limits."""
    return make_node(**LIMITS)


def check_health(node: NodeProcess, timeout_s: float = 20.0) -> None:
    """A new client writes a record and reads it back, the process is the same and not bloated."""
    pid = node.pid

    def served() -> bool:
        try:
            with Bare(node.address, 5) as client:
                client.ask(request(METADATA, 1, struct.pack(">ih", 1, len(HEALTHY)) + HEALTHY.encode()))
                produced = client.produce(HEALTHY, one_record(b"still here"))
                if produced.error != NONE:
                    return False
                fetched = client.fetch(HEALTHY, produced.base_offset)
                return fetched.error == NONE and b"still here" in fetched.records
        except (OSError, struct.error):
            return False

    wait_for(served, "a healthy client is served", timeout_s=timeout_s)
    assert node.running
    assert node.pid == pid
    used_mb = memory_mb(node.pid)
    assert used_mb < MEMORY_MB_MAX, f"{used_mb:.0f} MB"


def throw(node: NodeProcess, chunks: list[bytes], wait_s: float = 0.0) -> None:
    """Send bytes on a new connection, say that nothing follows, and take what comes for a moment."""
    with socket.create_connection(split(node.address), 5) as connection, contextlib.suppress(OSError):
        for chunk in chunks:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(wait_s or 0.05)
        while connection.recv(65536):
            pass


def bursts(full: int, part: int) -> Iterator[tuple[int, random.Random]]:
    _, generator = seeded()
    for number in range(rounds(full=full, part=part)):
        yield number, generator


def test_random_bytes(target: NodeProcess) -> None:
    for _, generator in bursts(full=100, part=5):
        for _ in range(50):
            throw(target, [generator.randbytes(generator.choice([1, 3, 4, 5, 20, 500, 50_000]))])
        check_health(target)


def test_random_bytes_in_true_frames(target: NodeProcess) -> None:
    """The length is right, the rest is not: this reaches the parser of headers."""
    for _, generator in bursts(full=100, part=5):
        for _ in range(50):
            throw(target, [frame(generator.randbytes(generator.randrange(200))) for _ in range(3)])
        check_health(target)


def test_random_bodies_of_every_api(target: NodeProcess) -> None:
    """Header and version are right, the body is noise: this reaches the parser of each API."""
    for _, generator in bursts(full=50, part=3):
        for api in range(-2, 95):
            version = generator.choice([0, 1, 2, 3, 5, 9, 12, 15, 17])
            body = generator.randbytes(generator.choice([0, 1, 8, 40, 300]))
            throw(target, [request(api, version, body)])
        check_health(target)


@pytest.mark.parametrize("length", [-1, -(2**31), 0, 1, 7, 2**31 - 1, 64 * 1024 * 1024, 4 * 1024 * 1024 + 1])
def test_absurd_lengths_close_the_connection(target: NodeProcess, length: int) -> None:
    with Bare(target.address) as client:
        client.send(struct.pack(">i", length) + b"\x00" * 16)
        assert client.ended(8), "the node closes it"
    check_health(target)


def test_truncated_frames(target: NodeProcess) -> None:
    for _, generator in bursts(full=20, part=2):
        whole = produce_request(HEALTHY, one_record(bytes(300)))
        for _ in range(60):
            throw(target, [whole[: generator.randrange(1, len(whole))]])
        check_health(target)


def test_unknown_apis_and_versions(target: NodeProcess) -> None:
    for api in (-1, 4, 5, 6, 7, 61, 255, 1000, 32767, -32768):
        with Bare(target.address, 5) as client:
            client.send(request(api, 0, bytes(20)))
            assert client.ended(5), f"API {api}: closed"
    for api in (PRODUCE, FETCH, LIST_OFFSETS, METADATA, 10, 11, 22):
        for version in (-1, 99, 32767):
            with Bare(target.address, 5) as client:
                client.send(request(api, version, bytes(20)))
                # Either an answer with UNSUPPORTED_VERSION or the end of the connection; never silence.
                client.socket.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    client.socket.recv(100)
    with Bare(target.address, 5) as client:
        # ApiVersions is the exception: an unknown version is answered in version 0, so that any client can ask again.
        answer = client.ask(request(API_VERSIONS, 99, b""))
        assert struct.unpack_from(">h", answer) == (35,)
        client.ask(api_versions_request())
    check_health(target)


def test_array_lengths_that_no_request_could_hold(target: NodeProcess) -> None:
    """An array that claims two thousand million entries must cost nothing."""
    for count in (2**31 - 1, 2**30, 10**6, -2, -(2**31)):
        claim = struct.pack(">i", count)
        for body in (
            claim,  # Metadata: topics
            b"\xff\xff" + struct.pack(">hi", 1, 1000) + claim,  # Produce: topics
            b"\xff\xff" + struct.pack(">hii", 1, 1000, 1) + b"\x00\x01t" + claim,  # Produce: partitions
            struct.pack(">iiiib", -1, 0, 1, 1, 0) + claim,  # Fetch: topics
            struct.pack(">i", -1) + claim,  # ListOffsets: topics
        ):
            for api, version in ((METADATA, 1), (PRODUCE, 3), (FETCH, 4), (LIST_OFFSETS, 1), (19, 0), (11, 0)):
                throw(target, [request(api, version, body)])
    # The same in the compact encoding of flexible versions: a varint of five bytes.
    for api, version in ((METADATA, 12), (PRODUCE, 9), (FETCH, 12), (LIST_OFFSETS, 6), (19, 5), (11, 6), (18, 3)):
        for body in (
            b"\x00" + b"\xff\xff\xff\xff\x0f" * 4,
            b"\x00\x00" + b"\xff" * 30,
            b"\xff\xff\xff\xff\xff\xff\xff",
        ):
            throw(target, [request(api, version, body)])
    check_health(target)


def mutations_of_batches(generator: random.Random) -> bytes:
    batch = bytearray(one_record(bytes(200)))
    kind = generator.randrange(6)
    if kind == 0:  # any bit
        batch[generator.randrange(len(batch))] ^= 1 << generator.randrange(8)
    elif kind == 1:  # the length
        batch[8:12] = struct.pack(">i", generator.choice([0, -1, 2**31 - 1, len(batch), 48, 49]))
    elif kind == 2:  # the format version
        batch[16] = generator.choice([0, 1, 3, 127, 255])
    elif kind == 3:  # cut
        del batch[generator.randrange(len(batch)) :]
    elif kind == 4:  # the record count and the last offset delta
        batch[57:61] = struct.pack(">i", generator.choice([0, -1, 2**31 - 1, 5]))
    else:  # two batches in one
        batch += one_record(b"second")
    return bytes(batch)


def test_broken_batches_are_refused_one_by_one(target: NodeProcess) -> None:
    create_topic(target.address, "batches")
    for _, generator in bursts(full=50, part=3):
        with Bare(target.address, 5) as client:
            before = client.produce("batches", one_record(b"before")).base_offset
            refused = 0
            for _ in range(100):
                raw = mutations_of_batches(generator)
                refused += client.produce("batches", raw).error != NONE
            assert refused > 50
            after = client.produce("batches", one_record(b"after")).base_offset
            assert after - before <= 2 * (100 - refused) + 1, "a refused batch takes no offset"
        check_health(target)


@pytest.fixture
def recorded(make_node: MakeNode) -> tuple[NodeProcess, list[bytes]]:
    """A node, and every request that three stock clients sent it while they did all they can."""
    recorder = Recorder()
    node = make_node(**LIMITS, node__advertised=recorder.address)
    with recorder.recording(split(node.address)):
        speak(recorder.address)
    # Each kind of request is kept a few times, so that the many fetches do not crowd out the rest.
    kept: dict[bytes, list[bytes]] = {}
    for each in recorder.requests:
        kept.setdefault(each[:4], []).append(each)
    chosen = [each for same in kept.values() for each in same[:5]]
    assert len(kept) > 15, f"only {len(kept)} kinds of requests were seen"
    return node, chosen


def speak(address: str) -> None:
    """Use the stock clients for a bit of everything."""
    create_topic(address, "spoken", partitions=2)
    admin = admin_of(address)
    admin.create_partitions([NewPartitions("spoken", 3)])["spoken"].result(20)
    admin.describe_cluster().result(20)
    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True, "compression.type": "gzip"})
    for number in range(50):
        producer.produce("spoken", str(number).encode(), b"key")
    assert producer.flush(20) == 0
    consumer = Consumer({"bootstrap.servers": address, "group.id": "spoken", "auto.offset.reset": "earliest"})
    consumer.subscribe(["spoken"])
    wait_for(lambda: consumer.consume(10, 0.1), "the group reads")
    consumer.commit(asynchronous=False)
    consumer.close()
    Confluent().write(address, "spoken", [Item(b"v", b"k", (("h", b"1"),))])

    python = kafka.KafkaConsumer(
        "spoken", bootstrap_servers=address, group_id="python", auto_offset_reset="earliest", consumer_timeout_ms=500
    )
    list(python)
    python.close()

    async def run() -> None:
        reader = aiokafka.AIOKafkaConsumer("spoken", bootstrap_servers=address, group_id="aio")
        await reader.start()
        await reader.getmany(timeout_ms=200)
        await reader.commit()
        await reader.stop()

    asyncio.run(asyncio.wait_for(run(), 30))
    list_groups = admin.list_consumer_groups().result(20)
    assert list_groups.valid


def mutate(generator: random.Random, whole: bytes) -> bytes:
    """One of the many ways in which a frame can be wrong."""
    raw = bytearray(whole)
    for _ in range(generator.choice([1, 1, 1, 2, 5])):
        if not raw:
            break
        at = generator.randrange(len(raw))
        kind = generator.randrange(7)
        if kind == 0:
            raw[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            raw[at] = generator.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            del raw[at:]
        elif kind == 3:
            raw[at:at] = generator.randbytes(generator.randrange(1, 9))
        elif kind == 4:
            del raw[at : at + generator.randrange(1, 9)]
        elif kind == 5:
            raw[at : at + 4] = struct.pack(">i", generator.choice([-1, -2, 0, 2**31 - 1, -(2**31), 65536]))
        else:
            raw[at : at + 2] = struct.pack(">h", generator.choice([-1, -2, 0, 32767, -32768, 99]))
    return bytes(raw)


def test_mutated_requests_of_real_clients(recorded: tuple[NodeProcess, list[bytes]]) -> None:
    node, requests = recorded
    # The recorder is gone and the advertised address with it; the bare clients speak to the node itself.
    for _, generator in bursts(full=100, part=4):
        for _ in range(150):
            frames = [frame(mutate(generator, generator.choice(requests))) for _ in range(generator.choice([1, 1, 3]))]
            throw(node, frames)
        check_health(node)


def test_recorded_requests_replayed_out_of_order(recorded: tuple[NodeProcess, list[bytes]]) -> None:
    """Well-formed, but senseless: groups that do not exist, sessions that are over, sequences that do not follow."""
    node, requests = recorded
    for _, generator in bursts(full=20, part=2):
        for _ in range(30):
            throw(node, [frame(each) for each in generator.sample(requests, min(10, len(requests)))])
        check_health(node)


def test_half_open_connections_lose_their_places(target: NodeProcess) -> None:
    """More connections than the limit, each with half a request: they time out and a healthy client gets in."""
    create_topic(target.address, HEALTHY)
    for _ in range(rounds(full=5, part=1)):
        opened = []
        try:
            for number in range(1500):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(split(target.address), 5)
                    opened.append(connection)
                    connection.sendall(struct.pack(">i", 100)[: number % 5] + b"\x00" * (number % 3))
            check_health(target, timeout_s=30)
        finally:
            for connection in opened:
                connection.close()


def test_half_requests_hold_no_memory(target: NodeProcess) -> None:
    """Each connection announces four megabytes and sends most of them: the node reads within its bound and no more."""
    create_topic(target.address, HEALTHY)
    size = 4 * 1024 * 1024 - 4
    start = struct.pack(">ihhih", size, PRODUCE, 3, 1, -1)
    opened = []
    try:
        for _ in range(60):
            connection = socket.create_connection(split(target.address), 5)
            connection.settimeout(0.2)
            opened.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(start + bytes(size - 1000))
        check_health(target, timeout_s=30)
    finally:
        for connection in opened:
            connection.close()


def test_slow_loris(target: NodeProcess) -> None:
    """A byte now and then: the whole request has one deadline, not each byte of it."""
    whole = produce_request(HEALTHY, one_record(bytes(300)))
    clients = [Bare(target.address) for _ in range(50)]
    closed: set[int] = set()
    started = time.monotonic()
    try:
        position = 0
        while len(closed) < len(clients) and position < len(whole):
            assert time.monotonic() - started < 15, "they should have been cut off long ago"
            for number, client in enumerate(clients):
                try:
                    client.send(whole[position : position + 1])
                except OSError:
                    closed.add(number)
            position += 1
            time.sleep(0.05)  # This is the attack.
        assert len(closed) == len(clients), f"{len(clients) - len(closed)} dripping clients are still connected"
    finally:
        for client in clients:
            client.socket.close()
    check_health(target)
