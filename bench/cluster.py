"""The nodes that replication is measured on: a single one and a cluster of three, as processes, with their topics."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from walstream.node.process import NodeProcess
from walstream.processes import HOST, free_port

LOG_NOTHING = 0
"""For librdkafka: what fails is told by the call; the rest is about its threads, and nodes stopped on purpose."""

numbers = itertools.count(1)


class Nodes:
    """A single node and a cluster of three, each with its folder; all of them run all the time."""

    def __init__(self, folder: Path) -> None:
        self.single = NodeProcess(folder / "single")
        self._admins: dict[NodeProcess, AdminClient] = {}
        ports = {number: (free_port(), free_port()) for number in (1, 2, 3)}
        nodes = [
            {"id": number, "kafka": f"{HOST}:{kafka}", "replication": f"{HOST}:{peers}"}
            for number, (kafka, peers) in ports.items()
        ]
        self.cluster = {}
        for number, (kafka, peers) in ports.items():
            settings = {
                "node.node_id": str(number),
                "replication.nodes": json.dumps(nodes),
                "replication.listen": f"{HOST}:{peers}",
                "replication.reconnect_delay_ms": "500",
            }
            node = NodeProcess(folder / f"node-{number}", settings=settings)
            node.port, node.http_port = kafka, free_port()
            self.cluster[number] = node

    @property
    def leader(self) -> NodeProcess:
        return self.cluster[1]

    def create(self, node: NodeProcess) -> str:
        """Make a topic, and wait until all its replicas are in sync."""
        topic = f"bench-{next(numbers)}"
        factor = 1 if node is self.single else 3
        admin = self._admin(node)
        deadline = time.monotonic() + 60
        while True:
            try:
                admin.create_topics([NewTopic(topic, 1, factor)])[topic].result(30)
                break
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        if factor == 3:
            wait(lambda: len(self.held(1, topic).get("in_sync", ())) == 3, "three replicas are in sync")
        return topic

    def health(self, number: int) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.cluster[number].http_address}/health", timeout=10) as answer:
            return dict(json.load(answer))

    def held(self, number: int, topic: str) -> dict[str, Any]:
        """What a node says of its copy of a topic."""
        return dict(self.health(number)["replication"]["partitions_held"].get(f"{topic}-0", {}))

    def drop(self, node: NodeProcess, topic: str) -> None:
        self._admin(node).delete_topics([topic])[topic].result(30)

    def _admin(self, node: NodeProcess) -> AdminClient:
        """Return the one client of a node for topics.

        One for each call would be let go of as soon as it is answered, and librdkafka would tell each time (BGQUEUE)
        that its background thread ended with an event unserved.
        """
        if node not in self._admins:
            self._admins[node] = AdminClient({"bootstrap.servers": node.address, "log_level": LOG_NOTHING})
        return self._admins[node]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(folder)
    try:
        nodes.single.start()
        for node in nodes.cluster.values():
            node.start()
        yield nodes
    finally:
        for node in (nodes.single, *nodes.cluster.values()):
            if node.running:
                node.stop()


def wait(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)
