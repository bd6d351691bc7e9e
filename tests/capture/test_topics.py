"""The topics of a capture against a real node: made as they must be, and mended or refused where they are not."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import Future

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException

from integration.clients import configure_topic, create_topic, read_messages
from integration.support import MakeNode
from walstream.capture.kafka import LogAddress
from walstream.capture.topics import Topics
from walstream.errors import DeliveryFailed, InvalidTopic, LogUnfit
from walstream.node.credentials import make_credential
from walstream.node.process import NodeProcess
from walstream.positions import Lsn

from .test_sink import Writer, read

_prefixes = (f"topics{number}" for number in itertools.count())


@pytest.fixture
def prefix() -> str:
    return next(_prefixes)


def kinds_of_time(node: NodeProcess, topic: str) -> list[int]:
    return [message.timestamp()[0] for message in read_messages(node.address, topic)]


def test_commit_points_have_append_time(node: NodeProcess, prefix: str) -> None:
    writer = Writer(node, prefix)
    writer.group(1, 200)
    writer.sink.drain()
    writer.close()
    assert set(kinds_of_time(node, f"{prefix}.commits")) == {TIMESTAMP_LOG_APPEND_TIME}


def test_no_topic_of_capture_goes_by_the_clock_of_its_machine(node: NodeProcess, prefix: str) -> None:
    topics = Topics(LogAddress(node.address), prefix)
    topics.prepare()
    topics.data(f"{prefix}.rows")
    names = [*topics.names.internal, f"{prefix}.rows"]
    assert {settings["message.timestamp.type"] for settings in topics._settings(names).values()} == {"LogAppendTime"}


def test_commit_times_that_the_log_refuses_are_told_with_the_remedy(node: NodeProcess, prefix: str) -> None:
    writer = Writer(node, prefix)
    create_topic(node.address, f"{prefix}.t")  # By hand: CreateTime.
    writer.group(1, 200)
    writer.sink.drain()  # An old commit time passes.
    writer.sink.write(writer.rows(1, 300), int(time.time() * 1000) + 7_200_000)
    writer.sink.end_group(Lsn(301), xid=300)
    with pytest.raises(DeliveryFailed) as raised:
        writer.sink.drain()
    writer.close()
    assert "timestamp" in raised.value.message.lower()
    assert "--set message.timestamp.type=LogAppendTime" in (raised.value.hint or "")
    assert raised.value.retryable


def test_commit_points_that_have_none_get_it_and_are_read_as_before(
    node: NodeProcess, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    commits, phrase = f"{prefix}.commits", "commit points have append time from now on"
    first = Writer(node, prefix)
    configure_topic(node.address, commits, message_timestamp_type="CreateTime")  # As an earlier version made it.
    first.group(2, 200)
    first.sink.drain()
    first.close()
    assert phrase not in capfd.readouterr().out
    second = Writer(node, prefix)
    second.group(3, 300)
    second.sink.drain()
    second.close()
    assert capfd.readouterr().out.count(phrase) == 1
    kinds = kinds_of_time(node, commits)
    assert set(kinds) == {TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME}
    assert kinds[-1] == TIMESTAMP_LOG_APPEND_TIME
    points, rows = read(node, prefix)
    assert len(rows) == 5
    assert points[-1].end_lsn == 301


def test_a_capture_that_may_not_change_topics_goes_on(make_node: MakeNode, capfd: pytest.CaptureFixture[str]) -> None:
    password = "secret"
    users = {name: make_credential(password, "SCRAM-SHA-256", 4096) for name in ("owner", "capture")}
    rules = [
        {"principal": "owner", "kind": "topic", "name": "*", "operations": ["read", "write", "admin"]},
        {"principal": "capture", "kind": "topic", "name": "*", "operations": ["read", "write"]},
    ]
    node = make_node(security__users=json.dumps(users), security__acls=json.dumps(rules))

    def address(user: str) -> LogAddress:
        security = {
            "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": user, "sasl.password": password,
        }  # fmt: skip
        return LogAddress(node.address, security)

    owner = Topics(address("owner"), "p")
    owner._create("p.commits", 1, {"cleanup.policy": "delete", "retention.bytes": "-1"})
    for topic in ("p.schema", "p.status"):
        owner._create(topic, 1, {"cleanup.policy": "compact"})
    Topics(address("capture"), "p").prepare()
    said = capfd.readouterr().out
    assert "commit points have no append time" in said
    assert "walstream topic alter p.commits --set message.timestamp.type=LogAppendTime" in said
    owner.prepare()
    assert "commit points have append time from now on" in capfd.readouterr().out


def test_commit_points_that_would_be_lost_are_refused(node: NodeProcess, prefix: str) -> None:
    create_topic(node.address, f"{prefix}.commits", cleanup_policy="compact")
    with pytest.raises(LogUnfit, match="compacted"):
        Topics(LogAddress(node.address), prefix).prepare()


@pytest.mark.parametrize(("policy", "why"), [("delete", "not compacted"), ("compact,delete", "subject to retention")])
def test_versions_of_tables_that_would_be_lost_are_refused(
    node: NodeProcess, prefix: str, policy: str, why: str
) -> None:
    create_topic(node.address, f"{prefix}.schema", cleanup_policy=policy)
    with pytest.raises(LogUnfit, match=why) as caught:
        Topics(LogAddress(node.address), prefix).prepare()
    assert caught.value.hint == f"walstream topic alter {prefix}.schema --set cleanup.policy=compact"


def test_a_name_that_apache_kafka_refuses_is_told_with_the_remedy(
    node: NodeProcess, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apache Kafka refuses a topic whose name differs from another's in `.` and `_` only."""
    topics = Topics(LogAddress(node.address), prefix)
    refused = KafkaError(
        KafkaError.TOPIC_EXCEPTION, f"Topic '{prefix}.a_b' collides with existing topics: {prefix}_a.b"
    )
    future: Future[None] = Future()
    future.set_exception(KafkaException(refused))
    monkeypatch.setattr(topics.admin, "create_topics", lambda new, **_: {new[0].topic: future}, raising=False)
    with pytest.raises(InvalidTopic, match="collides") as caught:
        topics.data(f"{prefix}.a_b")
    assert "[[streams]]" in caught.value.hint
