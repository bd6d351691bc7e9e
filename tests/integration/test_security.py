"""A node that asks who is there, and the clients that people have: each way in, each way to be kept out."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from typing import Any

import aiokafka
import aiokafka.errors
import confluent_kafka
import confluent_kafka.admin
import kafka
import kafka.errors
import pytest

from node.certificates import Authority, Pair
from walstream.node.credentials import make_credential
from walstream.node.process import NodeProcess
from walstream.processes import free_port

PASSWORD = "wonder,=land"
SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")
USERS = {
    "alice": [make_credential(PASSWORD, mechanism, 4096) for mechanism in SCRAM],
    "bob": make_credential(PASSWORD, "SCRAM-SHA-256", 4096),
}
RULES = [
    {"principal": "alice", "kind": "topic", "name": "orders.*", "operations": ["read", "write", "admin"]},
    {"principal": "*", "kind": "group", "name": "app-*", "operations": ["read"]},
    {"principal": "billing", "kind": "topic", "name": "orders.new", "operations": ["read"]},
    {"principal": "bob", "kind": "topic", "name": "bobs", "operations": ["read", "write", "admin"]},
]
TOPIC = "orders.new"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def billing(authority: Authority) -> Pair:
    return authority.client("billing", "/O=Acme/CN=billing")


def settings(authority: Authority | None = None, **more: Any) -> dict[str, str]:
    found = {"security.acls": json.dumps(RULES), **more}
    if authority:
        server = authority.server()
        found |= {"security.tls_certificate": server.certificate, "security.tls_key": server.key}
    return found


@pytest.fixture(scope="module")
def node(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with TLS, where a password and a certificate are both a way in, and a topic of alice's on it."""
    data = tmp_path_factory.mktemp("node") / "data"
    given = settings(
        authority, **{"security.users": json.dumps(USERS), "security.tls_client_ca": authority.certificate}
    )
    with NodeProcess(data, settings=given) as running:
        admin = confluent_kafka.admin.AdminClient(login(running, authority, "alice"))
        made = admin.create_topics([confluent_kafka.admin.NewTopic(TOPIC, 1)])
        made[TOPIC].result(10)
        produce(login(running, authority, "alice"), TOPIC, b"first")
        yield running
    assert PASSWORD not in running.log_text()
    assert "Traceback" not in running.log_text()


@pytest.fixture(scope="module")
def open_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with users and without TLS, which only loopback allows."""
    data = tmp_path_factory.mktemp("open") / "data"
    with NodeProcess(data, settings=settings(**{"security.users": json.dumps(USERS)})) as running:
        yield running
    assert "Traceback" not in running.log_text()


def login(
    node: NodeProcess,
    authority: Authority | None,
    user: str,
    mechanism: str = "SCRAM-SHA-256",
    password: str = PASSWORD,
) -> dict[str, Any]:
    return {
        "bootstrap.servers": node.address,
        "security.protocol": "SASL_SSL" if authority else "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        **({"ssl.ca.location": authority.certificate} if authority else {}),
    }


def certified(node: NodeProcess, authority: Authority, pair: Pair) -> dict[str, Any]:
    return {
        "bootstrap.servers": node.address,
        "security.protocol": "SSL",
        "ssl.ca.location": authority.certificate,
        "ssl.certificate.location": pair.certificate,
        "ssl.key.location": pair.key,
    }


def produce(client: dict[str, Any], topic: str, value: bytes) -> None:
    """Produce one record and raise its error."""
    errors: list[confluent_kafka.KafkaError | None] = []
    producer = confluent_kafka.Producer({**client, "message.timeout.ms": 10_000})
    producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(15) == 0
    if errors[0]:
        raise confluent_kafka.KafkaException(errors[0])


def consume(client: dict[str, Any], topic: str, group: str = "app-1") -> list[bytes | None]:
    """Read the topic by assignment, and raise the first error."""
    consumer = confluent_kafka.Consumer({**client, "group.id": group, "enable.auto.commit": False})
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        found = []
        for message in consumer.consume(1, 10):
            if error := message.error():
                raise confluent_kafka.KafkaException(error)
            found.append(message.value())
        return found
    finally:
        consumer.close()


def connection_errors(client: dict[str, Any]) -> str:
    """Try to connect and return what the client reports."""
    reported: list[confluent_kafka.KafkaError] = []
    admin = confluent_kafka.admin.AdminClient({**client, "error_cb": reported.append, "log_level": 0})
    deadline = time.monotonic() + 10
    while not any(error.code() != confluent_kafka.KafkaError._ALL_BROKERS_DOWN for error in reported):
        assert time.monotonic() < deadline, "the client reported nothing"
        admin.poll(0.1)
    return " ".join(error.str() for error in reported)


def is_closed(client: dict[str, Any]) -> bool:
    """Say whether the node hangs up. In TLS 1.3 the client learns of its certificate's fate only by that."""
    try:
        confluent_kafka.admin.AdminClient({**client, "log_level": 0}).list_topics(timeout=2)
    except confluent_kafka.KafkaException as error:
        return bool(error.args[0].code() in (confluent_kafka.KafkaError._TRANSPORT, confluent_kafka.KafkaError._SSL))
    return False


# Ways in


@pytest.mark.parametrize("mechanism", [*SCRAM, "PLAIN"])
def test_librdkafka_logs_in(node: NodeProcess, authority: Authority, mechanism: str) -> None:
    client = login(node, authority, "alice", mechanism)
    produce(client, TOPIC, mechanism.encode())
    assert consume(client, TOPIC) == [b"first"]


@pytest.mark.parametrize("mechanism", SCRAM)
def test_scram_needs_no_tls_on_loopback(open_node: NodeProcess, mechanism: str) -> None:
    produce(login(open_node, None, "alice", mechanism), "orders.open", b"value")


def test_librdkafka_shows_a_certificate(node: NodeProcess, authority: Authority, billing: Pair) -> None:
    client = certified(node, authority, billing)
    assert consume(client, TOPIC) == [b"first"]
    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        produce(client, TOPIC, b"billing may only read")


@pytest.mark.parametrize("mechanism", [*SCRAM, "PLAIN"])
async def test_aiokafka_logs_in(node: NodeProcess, authority: Authority, mechanism: str) -> None:
    options = {
        "bootstrap_servers": node.address,
        "security_protocol": "SASL_SSL",
        "ssl_context": ssl.create_default_context(cafile=authority.certificate),
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
    }
    async with aiokafka.AIOKafkaProducer(**options) as producer:
        await producer.send_and_wait(TOPIC, b"from aiokafka")
    async with aiokafka.AIOKafkaConsumer(
        TOPIC, group_id=f"app-aiokafka-{mechanism}", auto_offset_reset="earliest", **options
    ) as consumer:
        assert (await asyncio.wait_for(consumer.getone(), 20)).value == b"first"
        await consumer.commit()


@pytest.mark.parametrize("mechanism", [*SCRAM, "PLAIN"])
def test_kafka_python_logs_in(node: NodeProcess, authority: Authority, mechanism: str) -> None:
    options = {
        "bootstrap_servers": node.address,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": authority.certificate,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
    }
    producer = kafka.KafkaProducer(**options)
    producer.send(TOPIC, b"from kafka-python").get(10)
    producer.close()
    consumer = kafka.KafkaConsumer(
        TOPIC,
        group_id=f"app-kafka-python-{mechanism}",
        auto_offset_reset="earliest",
        consumer_timeout_ms=20_000,
        **options,
    )
    assert next(consumer).value == b"first"
    consumer.close()


def test_a_group_of_its_own_name(node: NodeProcess, authority: Authority) -> None:
    client = {**login(node, authority, "alice"), "auto.offset.reset": "earliest", "group.id": "app-group"}
    consumer = confluent_kafka.Consumer(client)
    consumer.subscribe([TOPIC])
    message = consumer.poll(20)
    assert message is not None
    assert message.error() is None
    assert consumer.commit(message, asynchronous=False)[0].error is None
    consumer.close()


# Ways to be kept out


@pytest.mark.parametrize("mechanism", [*SCRAM, "PLAIN"])
@pytest.mark.parametrize(("user", "password"), [("alice", "Wonderland"), ("mallory", PASSWORD)])
def test_a_wrong_password_and_an_unknown_name(
    node: NodeProcess, authority: Authority, mechanism: str, user: str, password: str
) -> None:
    reported = connection_errors(login(node, authority, user, mechanism, password))
    assert "The user name or the password is wrong." in reported


def test_a_mechanism_that_the_user_has_no_credential_for(node: NodeProcess, authority: Authority) -> None:
    assert "is wrong" in connection_errors(login(node, authority, "bob", "SCRAM-SHA-512"))


async def test_aiokafka_with_a_wrong_password(open_node: NodeProcess) -> None:
    client = aiokafka.AIOKafkaProducer(
        bootstrap_servers=open_node.address,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_plain_username="alice",
        sasl_plain_password="Wonderland",
    )
    with pytest.raises((aiokafka.errors.AuthenticationFailedError, aiokafka.errors.KafkaConnectionError)):
        await client.start()
    await client.stop()


def test_kafka_python_with_a_wrong_password(open_node: NodeProcess, caplog: pytest.LogCaptureFixture) -> None:
    # It goes on trying, and in the end tells the reason only to its log.
    with pytest.raises(kafka.errors.KafkaTimeoutError):
        kafka.KafkaAdminClient(
            bootstrap_servers=open_node.address,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_plain_username="alice",
            sasl_plain_password="Wonderland",
            bootstrap_timeout_ms=2_000,
        )
    assert "The user name or the password is wrong." in caplog.text


def test_plain_without_tls_is_not_offered(open_node: NodeProcess) -> None:
    reported = connection_errors(login(open_node, None, "alice", "PLAIN"))
    assert "SCRAM-SHA-256" in reported, "the client is told what is offered"


def test_a_certificate_of_a_stranger(node: NodeProcess, authority: Authority, tmp_path_factory: Any) -> None:
    stranger = Authority(tmp_path_factory.mktemp("stranger")).client("billing", "/CN=billing")
    assert is_closed(certified(node, authority, stranger))


def test_a_topic_without_rights_is_refused_and_invisible(node: NodeProcess, authority: Authority) -> None:
    bob = login(node, authority, "bob")
    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        produce(bob, TOPIC, b"not for bob")
    admin = confluent_kafka.admin.AdminClient(bob)
    admin.create_topics([confluent_kafka.admin.NewTopic("bobs", 1)])["bobs"].result(10)
    assert set(admin.list_topics(timeout=10).topics) == {"bobs"}
    for topic in (TOPIC, "orders.that.never.was"):
        # The same answer whether or not it exists: asking is no way to find out.
        asked = admin.list_topics(topic, timeout=10).topics[topic]
        assert asked.error.code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
        assert not asked.partitions
    with pytest.raises(confluent_kafka.KafkaException, match="AUTHORIZATION_FAILED"):
        admin.delete_topics([TOPIC])[TOPIC].result(10)
    with pytest.raises(confluent_kafka.KafkaException, match="AUTHORIZATION_FAILED"):
        admin.create_topics([confluent_kafka.admin.NewTopic("orders.more", 1)])["orders.more"].result(10)
    alice = confluent_kafka.admin.AdminClient(login(node, authority, "alice"))
    seen = set(alice.list_topics(timeout=10).topics)
    assert TOPIC in seen
    assert "bobs" not in seen
    assert "orders.more" not in seen


def test_a_group_without_rights_is_refused(node: NodeProcess, authority: Authority) -> None:
    consumer = confluent_kafka.Consumer({**login(node, authority, "alice"), "group.id": "other"})
    consumer.subscribe([TOPIC])
    message = consumer.poll(20)
    assert message is not None
    assert message.error().code() == confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED
    consumer.close()


def test_listening_beyond_loopback_is_refused(tmp_path: Any) -> None:
    node = NodeProcess(tmp_path / "data", settings={"node.listen": f"0.0.0.0:{free_port()}"})
    node.spawn()
    assert node.wait(20) == 2, node.log_tail()
    assert "tls_certificate" in node.log_text()
    assert "allow_insecure" in node.log_text()
    assert not list(tmp_path.glob("data/topics/*"))


def test_certificates_alone_open_a_node(authority: Authority, billing: Pair, tmp_path: Any) -> None:
    given = settings(authority, **{"security.tls_client_ca": authority.certificate})
    with NodeProcess(tmp_path / "data", settings=given) as node:
        admin = confluent_kafka.admin.AdminClient(certified(node, authority, billing))
        assert not admin.list_topics(timeout=10).topics
        bare = {**certified(node, authority, billing)}
        del bare["ssl.certificate.location"], bare["ssl.key.location"]
        assert is_closed(bare)


# Byte by byte


class Wire:
    """A client that says exactly what it is told to."""

    def __init__(self, node: NodeProcess, authority: Authority | None = None) -> None:
        plain = socket.create_connection(("127.0.0.1", node.port), 10)
        self.socket = (
            ssl.create_default_context(cafile=authority.certificate).wrap_socket(plain, server_hostname="localhost")
            if authority
            else plain
        )

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(struct.pack(">i", len(frame)) + frame for frame in frames))

    def receive(self) -> bytes | None:
        """Return the next frame, or None when the node has closed."""
        head = self._exactly(4)
        return None if head is None else self._exactly(*struct.unpack(">i", head))

    def _exactly(self, length: int) -> bytes | None:
        data = b""
        while len(data) < length:
            try:
                more = self.socket.recv(length - len(data))
            except ConnectionResetError:
                return None
            if not more:
                return None
            data += more
        return data


def request(api_key: int, version: int, body: bytes) -> bytes:
    return struct.pack(">hhih", api_key, version, 7, -1) + body


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack(">h", len(encoded)) + encoded


def token(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


HANDSHAKE, AUTHENTICATE, METADATA, API_VERSIONS = 17, 36, 3, 18
ALL_TOPICS = request(METADATA, 1, struct.pack(">i", -1))
PLAIN_TOKEN = b"\0alice\0" + PASSWORD.encode()


def code(reply: bytes | None) -> int:
    assert reply is not None
    return int(struct.unpack_from(">h", reply, 4)[0])


ARRAY_OF_ONE = struct.pack(">i", 1)
REACHING_IN = {
    # Each names the topic and its partition 0 at the end, and is answered with them and an error code.
    "Produce": request(0, 3, struct.pack(">hhi", -1, 1, 1000) + ARRAY_OF_ONE + text(TOPIC))
    + (ARRAY_OF_ONE + struct.pack(">i", 0) + token(bytes(61))),
    "Fetch": request(1, 4, struct.pack(">iiiib", -1, 100, 1, 1 << 20, 0) + ARRAY_OF_ONE + text(TOPIC))
    + (ARRAY_OF_ONE + struct.pack(">iqi", 0, 0, 1 << 20)),
    "ListOffsets": request(2, 1, struct.pack(">i", -1) + ARRAY_OF_ONE + text(TOPIC))
    + (ARRAY_OF_ONE + struct.pack(">iq", 0, -1)),
}


@pytest.mark.parametrize("name", REACHING_IN)
def test_a_client_that_skips_metadata_gets_no_further(node: NodeProcess, authority: Authority, name: str) -> None:
    with Wire(node, authority) as wire:
        wire.send(request(HANDSHAKE, 1, text("PLAIN")))
        assert code(wire.receive()) == 0
        wire.send(request(AUTHENTICATE, 0, token(b"\0bob\0" + PASSWORD.encode())))
        assert code(wire.receive()) == 0
        wire.send(REACHING_IN[name])
        reply = wire.receive()
        assert reply is not None
        partitions, index, error = struct.unpack_from(">iih", reply, reply.index(TOPIC.encode()) + len(TOPIC))
        assert (partitions, index, error) == (1, 0, 29)


@pytest.mark.parametrize("api_key", [0, 1, 2, 3, 10, 11, 19, 22, 32])
def test_skipping_authentication_closes(open_node: NodeProcess, api_key: int) -> None:
    with Wire(open_node) as wire:
        wire.send(request(api_key, 1, bytes(64)))
        assert wire.receive() is None


def test_versions_may_be_asked_for_before(open_node: NodeProcess) -> None:
    with Wire(open_node) as wire:
        wire.send(request(API_VERSIONS, 0, b""))
        assert code(wire.receive()) == 0
        wire.send(ALL_TOPICS)
        assert wire.receive() is None


def test_a_handshake_alone_opens_nothing(node: NodeProcess, authority: Authority) -> None:
    with Wire(node, authority) as wire:
        wire.send(request(HANDSHAKE, 1, text("PLAIN")), ALL_TOPICS)
        assert code(wire.receive()) == 0
        assert wire.receive() is None


def test_what_comes_behind_a_failed_login_is_not_handled(node: NodeProcess, authority: Authority) -> None:
    with Wire(node, authority) as wire:
        wire.send(request(HANDSHAKE, 1, text("PLAIN")))
        assert code(wire.receive()) == 0
        begin = time.monotonic()
        good = request(AUTHENTICATE, 0, token(PLAIN_TOKEN))
        wire.send(request(AUTHENTICATE, 0, token(b"\0alice\0Wonderland")), good, ALL_TOPICS)
        assert code(wire.receive()) == 58
        assert time.monotonic() - begin > 0.2, "guessing is slow"
        assert wire.receive() is None


def test_what_comes_behind_a_login_waits_for_it(node: NodeProcess, authority: Authority) -> None:
    with Wire(node, authority) as wire:
        wire.send(request(HANDSHAKE, 1, text("PLAIN")), request(AUTHENTICATE, 0, token(PLAIN_TOKEN)), ALL_TOPICS)
        assert [code(wire.receive()) for _ in range(2)] == [0, 0]
        reply = wire.receive()
        assert reply is not None
        assert TOPIC.encode() in reply


def test_tokens_without_a_handshake_are_refused(open_node: NodeProcess) -> None:
    with Wire(open_node) as wire:
        wire.send(request(AUTHENTICATE, 0, token(PLAIN_TOKEN)))
        assert code(wire.receive()) == 34
        assert wire.receive() is None


def test_plain_in_clear_is_refused_before_the_password_is_sent(open_node: NodeProcess) -> None:
    with Wire(open_node) as wire:
        wire.send(request(HANDSHAKE, 1, text("PLAIN")))
        assert code(wire.receive()) == 33
        assert wire.receive() is None


def test_tokens_after_handshake_version_0_are_bare(node: NodeProcess, authority: Authority) -> None:
    with Wire(node, authority) as wire:
        wire.send(request(HANDSHAKE, 0, text("PLAIN")))
        assert code(wire.receive()) == 0
        wire.send(PLAIN_TOKEN)
        assert wire.receive() == b""
        wire.send(ALL_TOPICS)
        assert TOPIC.encode() in (wire.receive() or b"")
    with Wire(node, authority) as wire:
        wire.send(request(HANDSHAKE, 0, text("PLAIN")))
        assert code(wire.receive()) == 0
        wire.send(b"\0alice\0Wonderland", ALL_TOPICS)
        assert wire.receive() is None


def test_strangers_send_no_large_requests(open_node: NodeProcess) -> None:
    with Wire(open_node) as wire:
        wire.socket.sendall(struct.pack(">i", 1 << 20))
        assert wire.receive() is None


def test_a_client_that_speaks_no_tls_is_closed(node: NodeProcess) -> None:
    with Wire(node) as wire:
        wire.send(request(API_VERSIONS, 0, b""))
        assert not (wire.receive() or b"").startswith(struct.pack(">i", 7))


def test_a_decoy_keeps_its_salt_across_a_restart(tmp_path: Any) -> None:
    def challenge(node: NodeProcess, name: str) -> bytes:
        with Wire(node) as wire:
            wire.send(request(HANDSHAKE, 1, text("SCRAM-SHA-256")))
            wire.receive()
            wire.send(request(AUTHENTICATE, 0, token(f"n,,n={name},r=client".encode())))
            reply = wire.receive()
            assert reply is not None
            return reply[reply.index(b",s=") :]

    with NodeProcess(tmp_path / "data", settings=settings(**{"security.users": json.dumps(USERS)})) as node:
        before = [challenge(node, name) for name in ("alice", "mallory")]
        node.restart()
        assert [challenge(node, name) for name in ("alice", "mallory")] == before
