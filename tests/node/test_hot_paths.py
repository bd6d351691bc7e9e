"""The bytes of Produce and Fetch, which are framed by hand, against kio's reader and writer."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema

from node.kio_oracle import kio_read, kio_write, messages
from walstream.errors import MalformedRequest
from walstream.node.api import APIS, fetch_wire, produce
from walstream.node.api.fetch_wire import Answer
from walstream.node.api.produce import Row
from walstream.node.sessions import Wanted
from walstream.node.wire import NO_UUID, Header, Source

PRODUCE_VERSIONS = range(APIS[0].min_version, APIS[0].max_version + 1)
FETCH_VERSIONS = range(APIS[1].min_version, APIS[1].max_version + 1)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def default(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_produce_requests_are_read_as_kio_writes_them(version: int) -> None:
    kind = load_request_schema(0, version)

    @QUICK
    @given(messages(kind))
    def check(message: Any) -> None:
        tags = b"\x00" if version >= 9 else b""
        source = Source(memoryview(bytearray(tags + kio_write(message))))
        transactional_id, acks, timeout_ms, topics = produce.read_request(source, version)
        assert transactional_id == message.transactional_id
        assert (acks, timeout_ms) == (message.acks, round(message.timeout.total_seconds() * 1000))
        assert [
            (name, [(row.index, None if row.batch is None else bytes(row.batch)) for row in rows])
            for name, rows in topics
        ] == [(topic.name, [(one.index, one.records) for one in topic.partition_data]) for topic in message.topic_data]

    check()


ROWS = st.builds(
    lambda index, code, base, message: _row(index, code, base, message),
    st.integers(0, 100),
    st.sampled_from([0, 2, 7, 10]),
    st.integers(0, 2**40),
    st.none() | st.text("abc ä", max_size=20),
)


def _row(index: int, code: int, base_offset: int, message: str | None) -> Row:
    row = Row(index, None)
    row.code, row.base_offset, row.message = code, base_offset, message if code else None
    row.log_start, row.append_time_ms = 3, 1234
    return row


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_produce_responses_are_written_as_kio_reads_them(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = load_response_schema(0, version)
    # kio refuses tags that it does not know, so this reads the response without the tag of ours.
    monkeypatch.setattr(produce, "_write_tags", lambda out, row: out.append(0))

    @QUICK
    @given(st.lists(st.tuples(st.text("xyz", max_size=5), st.lists(ROWS, max_size=3)), max_size=3))
    def check(topics: list[tuple[str, list[Row]]]) -> None:
        frame = bytes(produce.write_response(Header(0, version, 9, None, 0), topics))
        assert struct.unpack_from(">ii", frame) == (len(frame) - 4, 9)
        read = kio_read(kind, frame[9 if version >= 9 else 8 :])
        for (name, rows), topic in zip(topics, read.responses, strict=True):
            assert topic.name == name
            for row, one in zip(rows, topic.partition_responses, strict=True):
                assert (one.index, one.error_code, one.base_offset) == (row.index, row.code, row.base_offset)
                assert round(one.log_append_time.timestamp() * 1000) == row.append_time_ms
                if version >= 5:
                    assert one.log_start_offset == row.log_start
                if version >= 8:
                    assert one.error_message == row.message

    check()


def test_a_produce_response_tells_the_durability_met() -> None:
    row = _row(0, 0, 5, None)
    row.durability = produce.FSYNCED
    frame = produce.write_response(Header(0, 9, 1, None, 0), [("t", [row])])
    # Behind the partition: one tag, its number, one byte, the value; then no tags of the topic, throttle, no tags.
    assert frame.endswith(bytes([1, 0x90, 0x4E, 1, produce.FSYNCED, 0, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_fetch_requests_are_read_as_kio_writes_them(version: int) -> None:
    kind = load_request_schema(1, version)

    @QUICK
    @given(messages(kind))
    def check(message: Any) -> None:
        read = fetch_wire.read_request(Source(memoryview(kio_write(message))), version)
        assert (read.wait_ms_max, read.bytes_min) == (round(message.max_wait.total_seconds() * 1000), message.min_bytes)
        assert (read.bytes_max, read.isolation_level) == (message.max_bytes, message.isolation_level % 256)
        assert (read.session_id, read.session_epoch) == (
            getattr(message, "session_id", 0),
            getattr(message, "session_epoch", -1),
        )
        assert [(w.topic, w.partition, w.leader_epoch, w.offset, w.bytes_max) for w in read.wanted] == [
            (_topic(t), p.partition, getattr(p, "current_leader_epoch", -1), p.fetch_offset, p.partition_max_bytes)
            for t in message.topics
            for p in t.partitions
        ]
        assert read.forgotten == [
            (_topic(t), p) for t in getattr(message, "forgotten_topics_data", ()) for p in t.partitions
        ]

    check()


def _topic(topic: Any) -> Any:
    return default(topic.topic_id, NO_UUID) if hasattr(topic, "topic_id") else topic.topic


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_fetch_responses_are_written_as_kio_reads_them(version: int) -> None:
    kind = load_response_schema(1, version)
    topics = st.uuids(version=4) if version >= 13 else st.text("xyz", max_size=3)
    answers = st.lists(
        st.tuples(topics, st.integers(0, 9), st.sampled_from([0, 1, 3]), st.binary(max_size=200)), max_size=6
    )

    @QUICK
    @given(answers, st.integers(0, 1))
    def check(rows: list[tuple[Any, int, int, bytes]], isolation_level: int) -> None:
        given_answers = []
        for topic, partition, code, records in rows:
            answer = Answer(Wanted(topic, partition, -1, 0, 0), code, 77, 3)
            answer.records = memoryview(records)
            given_answers.append(answer)
        parts = fetch_wire.write_response(version, given_answers, session_id=5, isolation_level=isolation_level)
        read = kio_read(kind, b"".join(parts))
        assert getattr(read, "session_id", 5) == 5
        found = {}
        for topic in read.responses:
            name = topic.topic_id if version >= 13 else topic.topic
            for one in topic.partitions:
                found.setdefault((name, one.partition_index), []).append((one.error_code, one.records or b""))
                assert (one.high_watermark, one.last_stable_offset, getattr(one, "log_start_offset", 3)) == (77, 77, 3)
                assert one.aborted_transactions == (() if isolation_level else None)
        expected: dict[Any, list[tuple[int, bytes]]] = {}
        for topic, partition, code, records in rows:
            expected.setdefault((topic, partition), []).append((code, records))
        assert found == expected

    check()


@settings(QUICK, max_examples=150)
@given(st.binary(max_size=80), st.sampled_from(PRODUCE_VERSIONS), st.sampled_from(FETCH_VERSIONS))
def test_garbage_is_malformed_or_read(body: bytes, produce_version: int, fetch_version: int) -> None:
    for read, version in ((produce.read_request, produce_version), (fetch_wire.read_request, fetch_version)):
        with contextlib.suppress(MalformedRequest):
            read(Source(memoryview(bytearray(body))), version)
