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
    FetchAnswer,
    Fetched,
    Found,
    Session,
    Wanted,
    fetch_call,
    message_call,
    offsets_call,
)
from walstream.node import wire
from walstream.node.api.fetch_wire import FLEXIBLE_FROM, Answer, FetchRequest, read_request, write_response
from walstream.node.primitives import Source
from walstream.node.sessions import Wanted as NodeWanted
from walstream.positions import TopicPartition

EVERYTHING = {1: (4, 16), 2: (1, 9), 3: (0, 13), 0: (3, 11), 19: (2, 7), 32: (1, 4)}

FETCH_VERSIONS = [11, 12]

partitions = st.builds(TopicPartition, st.sampled_from(["orders", "users", "tür"]), st.integers(0, 5))


def sent(call: Call, offered: dict[int, tuple[int, int]] = EVERYTHING) -> tuple[wire.Header, bytes]:
    """Send a call as aiokafka's connection does, and read its header as a node does."""
    prepared = call.prepare(offered)
    frame = prepared.build_request_header(correlation_id=7, client_id="walstream-feed").encode() + prepared.encode()
    header = wire.read_header(frame)
    assert (header.correlation_id, header.client_id) == (7, "walstream-feed")
    return header, frame


def fetch_sent(call: Call, version: int) -> FetchRequest:
    """Send a fetch to a node that speaks no higher version, and read it as that does."""
    header, frame = sent(call, {1: (4, version)})
    assert header.version == version
    source = Source(frame, header.position)
    if version >= FLEXIBLE_FROM:
        source.skip_tags()
    request = read_request(source, version)
    assert version < FLEXIBLE_FROM or source.position == source.end
    return request


def fetch_answered(call: Call, version: int, body: bytes) -> FetchAnswer:
    answer = answered(call.prepare({1: (4, version)}), b"\x00" * (version >= FLEXIBLE_FROM) + body)
    assert isinstance(answer, FetchAnswer)
    return answer


def answered(call: Call, body: bytes) -> Any:
    data = BytesIO(struct.pack(">i", 7) + body)
    assert call.parse_response_header(data).correlation_id == 7
    return call.RESPONSE_TYPE.decode(data)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@given(
    wanted=st.dictionaries(partitions, st.builds(Wanted, st.integers(0, 2**62), st.integers(1, 2**30)), max_size=8),
    wait_ms=st.integers(0, 60_000),
)
def test_a_fetch_asks_for_what_is_wanted(version: int, wanted: dict[TopicPartition, Wanted], wait_ms: int) -> None:
    request = fetch_sent(fetch_call(wanted, wait_ms=wait_ms, bytes_max=1234), version)
    assert {TopicPartition(str(one.topic), one.partition): (one.offset, one.bytes_max) for one in request.wanted} == {
        partition: tuple(place) for partition, place in wanted.items()
    }
    assert (request.wait_ms_max, request.bytes_min, request.bytes_max, request.isolation_level) == (wait_ms, 1, 1234, 1)
    assert (request.session_id, request.session_epoch, request.forgotten) == (0, -1, [])
    assert request.resolving is None


fetched = st.builds(
    Fetched, st.sampled_from([0, 1, 3, 6]), st.integers(0, 2**60), st.integers(0, 2**60), st.just([]), st.binary()
)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@given(found=st.dictionaries(partitions, fetched, max_size=6))
def test_what_was_fetched_is_read_as_it_was_written(version: int, found: dict[TopicPartition, Fetched]) -> None:
    answers = []
    for (topic, index), one in found.items():
        answer = Answer(NodeWanted(topic, index, -1, 0, 1), one.code, one.high_watermark, one.log_start)
        answer.records = one.records
        answers.append(answer)
    body = b"".join(bytes(part) for part in write_response(version, answers, session_id=5, isolation_level=1))
    call = fetch_call({}, wait_ms=0, bytes_max=1)
    assert fetch_answered(call, version, body) == (0, 5, found, {})


positions = st.tuples(st.integers(-1, 2**60), st.integers(-1, 2**45))


@given(st.dictionaries(partitions, positions, min_size=1, max_size=8))
def test_promises_are_asked_for_and_answered_with_a_fetch(positions: dict[TopicPartition, tuple[int, int]]) -> None:
    call = fetch_call({}, wait_ms=0, bytes_max=1, promises_of=tuple(positions))
    resolving = fetch_sent(call, 12).resolving
    assert resolving is not None
    assert set(resolving) == positions.keys()
    answer = Answer(NodeWanted("orders", 0, -1, 0, 1), 0, 7, 0)
    answer.records = b"records"
    resolved = [positions[TopicPartition(*one)] for one in resolving]
    body = b"".join(bytes(part) for part in write_response(12, [answer], session_id=5, resolved=resolved))
    read = fetch_answered(call, 12, body)
    assert read.fetched == {TopicPartition("orders", 0): Fetched(0, 7, 0, [], b"records")}
    assert read.promised == {one: Found(0, offset, time_ms) for one, (offset, time_ms) in positions.items()}


def test_a_log_of_an_older_version_is_not_asked_for_promises() -> None:
    call = fetch_call({}, wait_ms=0, bytes_max=1, promises_of=(TopicPartition("orders", 0),))
    assert fetch_sent(call, 11).resolving is None
    body = b"".join(bytes(part) for part in write_response(11, []))
    assert fetch_answered(call, 11, body).promised == {}


def test_a_log_that_passes_over_the_question_promises_nothing() -> None:
    call = fetch_call({}, wait_ms=0, bytes_max=1, promises_of=(TopicPartition("orders", 0),))
    body = b"".join(bytes(part) for part in write_response(12, []))
    assert fetch_answered(call, 12, body).promised == {}
    another_tag = body[:-1] + b"\x01\x07\x02ab"
    assert fetch_answered(call, 12, another_tag).promised == {}


@pytest.mark.parametrize("resolved", [[], [(1, 2), (3, 4)]])
def test_promises_of_other_partitions_than_asked_for_are_malformed(resolved: list[tuple[int, int]]) -> None:
    call = fetch_call({}, wait_ms=0, bytes_max=1, promises_of=(TopicPartition("orders", 0),))
    body = b"".join(bytes(part) for part in write_response(12, [], resolved=resolved))
    with pytest.raises(MalformedRequest, match="Of 1 partitions"):
        fetch_answered(call, 12, body)


def test_aborted_transactions_and_unknown_tags_of_version_12() -> None:
    """As Apache Kafka may write it."""
    partition = struct.pack(">ihqqq", 3, 0, 9, 8, 1) + b"\x03" + struct.pack(">qqxqqx", 1, 2, 3, 4)
    partition += struct.pack(">i", -1) + b"\x04abc" + b"\x01\x01\x02zz"
    body = bytes(4) + struct.pack(">hi", 0, 5) + b"\x02\x02t\x02" + partition + b"\x00" + b"\x00"
    answer = fetch_answered(fetch_call({}, wait_ms=0, bytes_max=1), 12, body)
    assert answer.fetched == {TopicPartition("t", 3): Fetched(0, 8, 1, [(1, 2), (3, 4)], b"abc")}


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
    with pytest.raises(UnsupportedVersion, match="versions 0 to 10 of API 1, the feed 11 to 12"):
        fetch_call({}, wait_ms=0, bytes_max=1).prepare({1: (0, 10)})
    with pytest.raises(UnsupportedVersion):
        offsets_call({}).prepare({})


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@given(body=st.binary(max_size=80))
def test_answers_that_make_no_sense_are_malformed(version: int, body: bytes) -> None:
    call = fetch_call({}, wait_ms=0, bytes_max=1, promises_of=(TopicPartition("orders", 0),))
    try:
        answer = fetch_answered(call, version, body)
    except MalformedRequest:
        return
    assert isinstance(answer.code, int)
    assert isinstance(answer.session_id, int)
    assert all(isinstance(one, Fetched) for one in answer.fetched.values())
    assert all(isinstance(one, Found) for one in answer.promised.values())


class TestSession:
    A, B = TopicPartition("a", 0), TopicPartition("b", 0)

    def test_names_everything_once_and_then_what_has_changed(self) -> None:
        session = Session()
        wanted = {self.A: Wanted(0, 10), self.B: Wanted(5, 10)}
        assert session.news(wanted) == (0, 0, wanted, [])
        assert session.answered(0, 77)
        assert session.news(wanted) == (77, 1, {}, [])
        session._epoch = 2**31 - 1
        assert session.answered(0, 77)
        assert session.news(wanted) == (77, 1, {}, []), "as on the other side, it begins anew after the largest"
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

    @pytest.mark.parametrize("version", FETCH_VERSIONS)
    def test_what_is_forgotten_is_on_the_wire(self, version: int) -> None:
        session = Session()
        fetch_call({self.A: Wanted(0, 10)}, wait_ms=0, bytes_max=1, session=session)
        session.answered(0, 77)
        request = fetch_sent(fetch_call({self.B: Wanted(1, 10)}, wait_ms=0, bytes_max=1, session=session), version)
        assert (request.session_id, request.session_epoch) == (77, 1)
        assert [one.key for one in request.wanted] == [self.B]
        assert request.forgotten == [self.A]
