"""Requests as a node reads them, answers as a node writes them."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import MalformedRequest, UnsupportedVersion
from walstream.feed.reading.calls import (
    INVALID_SESSION_EPOCH,
    LATEST,
    RESOLVED,
    Call,
    Fetched,
    Found,
    Session,
    Wanted,
    fetch_call,
    message_call,
    offsets_call,
)
from walstream.node import wire
from walstream.node.api.fetch_wire import Answer, read_request, write_response
from walstream.node.primitives import Source
from walstream.node.sessions import Wanted as NodeWanted
from walstream.positions import TopicPartition

EVERYTHING = {1: (4, 16), 2: (1, 9), 3: (0, 13), 0: (3, 11), 19: (2, 7), 32: (1, 4)}

partitions = st.builds(TopicPartition, st.sampled_from(["orders", "users", "tür"]), st.integers(0, 5))


def sent(call: Call) -> tuple[wire.Header, bytes]:
    """Send a call as aiokafka's connection does, and read its header as a node does."""
    prepared = call.prepare(EVERYTHING)
    frame = prepared.build_request_header(correlation_id=7, client_id="walstream-feed").encode() + prepared.encode()
    header = wire.read_header(frame)
    assert (header.correlation_id, header.client_id) == (7, "walstream-feed")
    return header, frame


def answered(call: Call, body: bytes) -> Any:
    data = BytesIO(struct.pack(">i", 7) + body)
    assert call.parse_response_header(data).correlation_id == 7
    return call.RESPONSE_TYPE.decode(data)


@given(
    st.dictionaries(partitions, st.builds(Wanted, st.integers(0, 2**62), st.integers(1, 2**30)), max_size=8),
    st.integers(0, 60_000),
)
def test_a_fetch_asks_for_what_is_wanted(wanted: dict[TopicPartition, Wanted], wait_ms: int) -> None:
    header, frame = sent(fetch_call(wanted, wait_ms=wait_ms, bytes_max=1234))
    request = read_request(Source(frame, header.position), header.version)
    assert {TopicPartition(str(one.topic), one.partition): (one.offset, one.bytes_max) for one in request.wanted} == {
        partition: tuple(place) for partition, place in wanted.items()
    }
    assert (request.wait_ms_max, request.bytes_min, request.bytes_max, request.isolation_level) == (wait_ms, 1, 1234, 1)
    assert (request.session_id, request.session_epoch, request.forgotten) == (0, -1, [])


fetched = st.builds(
    Fetched, st.sampled_from([0, 1, 3, 6]), st.integers(0, 2**60), st.integers(0, 2**60), st.just([]), st.binary()
)


@given(st.dictionaries(partitions, fetched, max_size=6))
def test_what_was_fetched_is_read_as_it_was_written(found: dict[TopicPartition, Fetched]) -> None:
    answers = []
    for (topic, index), one in found.items():
        answer = Answer(NodeWanted(topic, index, -1, 0, 1), one.code, one.high_watermark, one.log_start)
        answer.records = one.records
        answers.append(answer)
    body = b"".join(bytes(part) for part in write_response(11, answers, session_id=5, isolation_level=1))
    call = fetch_call({}, wait_ms=0, bytes_max=1).prepare(EVERYTHING)
    assert answered(call, body) == (0, 5, found)


@settings(deadline=None)  # The first answer waits for the node's schemas to be read.
@given(st.dictionaries(partitions, st.sampled_from([LATEST, RESOLVED, 0, 1_700_000_000_000]), max_size=8))
def test_offsets_are_asked_for_and_answered(wanted: dict[TopicPartition, int]) -> None:
    call = offsets_call(wanted)
    header, frame = sent(call)
    request = wire.decode_request(frame, header)
    asked = {
        TopicPartition(topic.name, one.partition_index): one.timestamp
        for topic in request.topics
        for one in topic.partitions
    }
    assert asked == wanted
    reply = {
        "topics": [
            {"name": topic, "partitions": [{"partition_index": index, "offset": 4, "timestamp": 9, "error_code": 0}]}
            for topic, index in wanted
        ]
    }
    body = bytes(wire.encode_response(2, header.version, 7, reply))[8:]
    assert answered(call, body) == dict.fromkeys(wanted, Found(0, 4, 9))


def test_any_other_call_goes_by_the_schema() -> None:
    call = message_call(3, range(10, 13), {"topics": None, "allow_auto_topic_creation": False})
    header, frame = sent(call)
    request = wire.decode_request(frame, header)
    assert request.topics is None
    assert request.allow_auto_topic_creation is False
    reply = {"controller_id": 3, "topics": [{"name": "orders", "partitions": [{"partition_index": 0, "leader_id": 3}]}]}
    answer = answered(call, bytes(wire.encode_response(3, header.version, 7, reply))[8:])
    assert (answer.controller_id, answer.topics[0].partitions[0].leader_id) == (3, 3)


def test_a_log_that_is_too_old_is_told() -> None:
    with pytest.raises(UnsupportedVersion, match="versions 0 to 10 of API 1, the feed 11 to 11"):
        fetch_call({}, wait_ms=0, bytes_max=1).prepare({1: (0, 10)})
    with pytest.raises(UnsupportedVersion):
        offsets_call({}).prepare({})


@given(st.binary(max_size=80))
def test_answers_that_make_no_sense_are_malformed(body: bytes) -> None:
    call = fetch_call({}, wait_ms=0, bytes_max=1).prepare(EVERYTHING)
    try:
        code, session_id, found = answered(call, body)
    except MalformedRequest:
        return
    assert isinstance(code, int)
    assert isinstance(session_id, int)
    assert all(isinstance(one, Fetched) for one in found.values())


class TestSession:
    A, B = TopicPartition("a", 0), TopicPartition("b", 0)

    def test_names_everything_once_and_then_what_has_changed(self) -> None:
        session = Session()
        wanted = {self.A: Wanted(0, 10), self.B: Wanted(5, 10)}
        assert session.news(wanted) == (0, 0, wanted, [])
        assert session.answered(0, 77)
        assert session.news(wanted) == (77, 1, {}, [])
        assert session.answered(0, 77)
        moved = {self.A: Wanted(3, 10), self.B: Wanted(5, 10)}
        assert session.news(moved) == (77, 2, {self.A: Wanted(3, 10)}, [])
        assert session.answered(0, 77)
        assert session.news({self.B: Wanted(5, 10)}) == (77, 3, {}, [self.A])

    def test_begins_anew_when_it_is_not_known(self) -> None:
        session = Session()
        wanted = {self.A: Wanted(0, 10)}
        session.news(wanted)
        assert session.answered(0, 77)
        session.news(wanted)
        assert not session.answered(INVALID_SESSION_EPOCH, 0), "the request has to be made again"
        assert session.news(wanted) == (0, 0, wanted, [])

    def test_does_without_where_there_is_no_room(self) -> None:
        session = Session()
        wanted = {self.A: Wanted(0, 10)}
        for _ in range(3):
            assert session.news(wanted) == (0, 0, wanted, [])
            assert session.answered(0, 0)

    def test_what_is_forgotten_is_on_the_wire(self) -> None:
        session = Session()
        fetch_call({self.A: Wanted(0, 10)}, wait_ms=0, bytes_max=1, session=session)
        session.answered(0, 77)
        header, frame = sent(fetch_call({self.B: Wanted(1, 10)}, wait_ms=0, bytes_max=1, session=session))
        request = read_request(Source(frame, header.position), header.version)
        assert (request.session_id, request.session_epoch) == (77, 1)
        assert [one.key for one in request.wanted] == [self.B]
        assert request.forgotten == [self.A]
