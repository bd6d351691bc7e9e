"""An Apache Kafka broker for tests: the artifact `kafka_2.13` from Maven Central, one process in KRaft combined mode.

It is known as its users know it: by a bootstrap address. Its settings are Kafka's own defaults, but for the replicas of
internal topics, which one broker cannot have three of.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from jvm.child import QUICK, Child
from jvm.jars import Jars
from walstream.processes import HOST, free_port

# Without something to log with, a broker that fails says nothing.
KAFKA = Jars("org.apache.kafka:kafka_2.13:4.3.1", beside=("org.slf4j:slf4j-simple:1.7.36",))

_CLUSTER = "d2Fsc3RyZWFtLXRlc3RzLQ"  # Any 16 bytes in base64.
_FORMAT_S_MAX = 60
_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"""


class KafkaBroker:
    """A broker that runs."""

    def __init__(self, port: int, child: Child) -> None:
        self.address = f"{HOST}:{port}"
        self.child = child


@contextmanager
def running() -> Iterator[KafkaBroker]:
    """A broker with an empty log while the block runs. Skips the test when its jars cannot be had."""
    jars = ":".join(KAFKA.required())
    # Not pytest's tmp_path: the data of a broker must not be kept for three runs.
    folder = Path(tempfile.mkdtemp(prefix="walstream-kafka-"))
    port, controller = free_port(), free_port()
    settings = folder / "server.properties"
    settings.write_text(_SETTINGS.format(host=HOST, port=port, controller=controller, folder=folder))
    java = ["java", "-Xmx512m", *QUICK, "-cp", jars]
    try:
        done = subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(settings)],
            capture_output=True,
            text=True,
            timeout=_FORMAT_S_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        child = Child([*java, "kafka.Kafka", str(settings)], folder / "broker.log", {})
        try:
            broker = KafkaBroker(port, child)
            child.wait_for(lambda: _answers(broker.address), "an answer")
            yield broker
        finally:
            child.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answers(address: str) -> bool:
    try:
        return bool(AdminClient({"bootstrap.servers": address, "log_level": 0}).list_topics(timeout=1).brokers)
    except KafkaException:
        return False
