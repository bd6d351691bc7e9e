"""A static cluster of real nodes in real processes, a network between them that can be stopped, and the comparison of
what their disks hold.

Every node dials the others through proxies of its own, so that each direction of each pair can be stalled or cut.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from walstream.log.batch import walk
from walstream.node.process import NodeProcess
from walstream.processes import HOST, free_port

from .support import MakeNode, segments_of, wait_for

TIMEOUT_S = 60.0

FAST: dict[str, object] = {
    "replication__reconnect_delay_ms": 500,
    "replication__heartbeat_interval_ms": 300,
    "replication__heartbeat_timeout_ms": 1_500,
    "replication__isr_lag_ms_max": 2_000,
    "node__drain_timeout_ms": 2_000,
}
"""Settings with which a test need not wait for the patience of a real cluster."""


class Proxy:
    """Forwards connections to a port until it is told to stall or to cut them."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_stalled = threading.Event()
        self._is_cut = threading.Event()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ)
        while not self._is_ended.is_set():
            if self._is_stalled.is_set():
                self._is_ended.wait(0.02)
                continue
            for key, _ in selector.select(0.05):
                if key.fileobj is self._listener:
                    self._accept(selector)
                # The other end of a pair may have ended it just now.
                elif key.fileobj.fileno() >= 0 and not self._forward(key.fileobj, key.data):
                    for end in (key.fileobj, key.data):
                        selector.unregister(end)
                        end.close()
            if self._is_cut.is_set():
                for key in list(selector.get_map().values()):
                    if key.fileobj is not self._listener:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        selector.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        client, _ = self._listener.accept()
        if self._is_cut.is_set():
            client.close()
            return
        try:
            server = socket.create_connection((HOST, self._target_port), 5)
        except OSError:
            client.close()
            return
        selector.register(client, selectors.EVENT_READ, server)
        selector.register(server, selectors.EVENT_READ, client)

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> bool:
        try:
            data = source.recv(256 * 1024)
            target.sendall(data)
            return bool(data)
        except OSError:
            return False

    def stall(self) -> None:
        """Forward nothing, and end no connection: as a network does that has lost a cable."""
        self._is_stalled.set()

    def cut(self) -> None:
        """End every connection and let no new one in."""
        self._is_cut.set()

    def mend(self) -> None:
        self._is_stalled.clear()
        self._is_cut.clear()

    def end(self) -> None:
        self._is_ended.set()
        self._thread.join()


class Cluster:
    """Three nodes, numbered from 1; the first is the controller and leads what no rule gives to another."""

    def __init__(self, make_node: MakeNode, count: int = 3, *, leaders: dict[str, int] | None = None, **settings: Any):
        self.nodes: dict[int, NodeProcess] = {}
        self.proxies: dict[tuple[int, int], Proxy] = {}
        numbers = range(1, count + 1)
        kafka = {number: free_port() for number in numbers}
        listening = {number: free_port() for number in numbers}
        rules = [{"topics": topics, "node": node} for topics, node in (leaders or {}).items()]
        for number in numbers:
            for other in numbers:
                if other != number:
                    self.proxies[number, other] = Proxy(listening[other])
            reached = {other: self.proxies[number, other].port for other in numbers if other != number}
            reached[number] = listening[number]
            nodes = [
                {"id": other, "kafka": f"{HOST}:{kafka[other]}", "replication": f"{HOST}:{reached[other]}"}
                for other in numbers
            ]
            node = make_node(
                start=False,
                **{
                    **FAST,
                    "node__node_id": number,
                    "replication__nodes": json.dumps(nodes),
                    "replication__leaders": json.dumps(rules),
                    "replication__listen": f"{HOST}:{listening[number]}",
                    **settings,
                },
            )
            node.port, node.http_port = kafka[number], free_port()
            self.nodes[number] = node
        self.listening = listening
        self.paused: set[int] = set()

    def start(self) -> Cluster:
        for node in self.nodes.values():
            node.spawn()
        for node in self.nodes.values():
            wait_for(node.answers, "the node answers", 60)
        return self

    def end(self) -> None:
        for proxy in self.proxies.values():
            proxy.end()

    def __getitem__(self, number: int) -> NodeProcess:
        return self.nodes[number]

    @property
    def address(self) -> str:
        """Where clients begin."""
        return ",".join(node.address for node in self.nodes.values())

    def links(self, first: int, second: int) -> list[Proxy]:
        return [self.proxies[first, second], self.proxies[second, first]]

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def create(self, topic: str, partitions: int = 1, factor: int = 3, **config: object) -> None:
        """Create a topic and wait until all its replicas are in sync."""
        settings = {name.replace("_", "."): str(value) for name, value in config.items()}
        admin = self.admin()

        def created() -> bool:
            try:
                admin.create_topics([NewTopic(topic, partitions, factor, config=settings)])[topic].result(TIMEOUT_S)
            except KafkaException as error:
                return bool(error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS)
            return True

        wait_for(created, f"{topic} is created", TIMEOUT_S, 0.2)
        for partition in range(partitions):
            self.wait_in_sync(topic, factor, partition)

    def health(self, number: int) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.nodes[number].http_address}/health", timeout=10) as answer:
            return dict(json.load(answer))

    def wait_in_sync(self, topic: str, count: int, partition: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the leader says so: nobody else is sure to know."""

        def enough() -> bool:
            for number, node in self.nodes.items():
                held = self.held(number, topic, partition) if node.running and number not in self.paused else None
                if held is not None and held["role"] == "leader":
                    return len(held["in_sync"]) == count
            return False

        wait_for(enough, f"{count} replicas of {topic}-{partition} are in sync", timeout_s, 0.05)

    def held(self, number: int, topic: str, partition: int = 0) -> dict[str, Any] | None:
        """What a node says of its copy of a partition."""
        try:
            found = self.health(number)["replication"]["partitions_held"].get(f"{topic}-{partition}")
        except OSError:
            return None
        return None if found is None else dict(found)

    # ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def batches(self, number: int, topic: str, partition: int = 0) -> list[bytes]:
        """Every batch in the segments of a node, oldest first."""
        files = segments_of(self.nodes[number].data, topic, partition)
        data = b"".join(file.read_bytes() for file in files)
        return [bytes(data[position : position + header.length]) for position, header in walk(data)]

    def compare(self, topic: str, partitions: int = 1, *, nodes: list[int] | None = None) -> int:
        """Wait until the nodes hold the same bytes, and return how many batches that are."""
        numbers = nodes or list(self.nodes)
        total = 0
        for partition in range(partitions):

            def same(partition: int = partition) -> bool:
                found = [self.batches(number, topic, partition) for number in numbers]
                return all(batches == found[0] for batches in found)

            try:
                wait_for(same, f"the replicas of {topic}-{partition} are equal", 30, 0.2)
            except AssertionError:
                sizes = {number: _bounds(self.batches(number, topic, partition)) for number in numbers}
                raise AssertionError(f"the replicas of {topic}-{partition} differ: {sizes}") from None
            total += len(self.batches(numbers[0], topic, partition))
        return total

    def pause(self, number: int) -> None:
        """Let a node's process stand still."""
        self.paused.add(number)
        os.kill(self.nodes[number].pid, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self.paused.discard(number)
        os.kill(self.nodes[number].pid, signal.SIGCONT)

    def wipe(self, number: int) -> None:
        shutil.rmtree(self.nodes[number].data)


def _bounds(batches: list[bytes]) -> str:
    if not batches:
        return "nothing"
    headers = [header for _, header in walk(b"".join(batches))]
    return f"{len(batches)} batches, offsets {headers[0].base_offset} to {headers[-1].last_offset}"


@contextmanager
def running(make_node: MakeNode, count: int = 3, **settings: Any) -> Iterator[Cluster]:
    """Run a cluster."""
    cluster = Cluster(make_node, count, **settings)
    try:
        yield cluster.start()
    finally:
        cluster.end()


def producer_of(address: str, **settings: Any) -> Producer:
    return Producer(
        {
            "bootstrap.servers": address,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 2,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 200,
            "retry.backoff.ms": 20,
            "topic.metadata.refresh.interval.ms": 500,
            "log_level": 0,
            **settings,
        }
    )


def write(
    address: str, topic: str, first: int, count: int, *, size: int = 100, partition: int = 0, **settings: Any
) -> None:
    """Write numbered records and wait until all are acknowledged."""
    producer = producer_of(address, **{"batch.num.messages": 100, **settings})
    failures: list[str] = []

    def delivered(error: KafkaError | None, _: object) -> None:
        if error is not None:
            failures.append(str(error))

    for number in range(first, first + count):
        while True:
            try:
                producer.produce(topic, str(number).encode().rjust(size), partition=partition, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    left = producer.flush(TIMEOUT_S)
    assert not failures, failures[:3]
    assert left == 0, f"{left} records were not acknowledged"
