"""The codec against kio's own reader and writer, over every API and version that is offered, and against garbage."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map

from node.kio_oracle import kio_read, kio_write, messages, plain
from walstream.errors import MalformedRequest
from walstream.node import wire
from walstream.node.api import APIS

OFFERED = {api.key: (api.min_version, api.max_version) for api in APIS.values()}
EVERY = [(key, version) for key, (low, high) in sorted(OFFERED.items()) for version in range(low, high + 1)]
QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def named(case: tuple[int, int]) -> str:
    return f"{api_key_map[case[0]]}-v{case[1]}"


def seen(message: Any) -> Any:
    """Turn a Message into nested dicts."""
    if isinstance(message, wire.Message):
        return {name: seen(value) for name, value in vars(message).items()}
    return [seen(element) for element in message] if isinstance(message, list) else message


def assert_covers(message: Any, expected: Any) -> None:
    """Assert that every field of the version holds what was sent (fields of other versions are allowed beside them)."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_covers(message[name], value)
    elif isinstance(expected, list):
        assert len(message) == len(expected)
        for one, other in zip(message, expected, strict=True):
            assert_covers(one, other)
    else:
        assert message == expected


@pytest.mark.parametrize("case", EVERY, ids=named)
def test_reads_what_kio_writes(case: tuple[int, int]) -> None:
    kind = load_request_schema(*case)

    @QUICK
    @given(messages(kind), st.none() | st.text("ab", max_size=5))
    def check(message: Any, client_id: str | None) -> None:
        frame = request_frame(case, client_id, kio_write(message))
        header = wire.read_header(frame)
        assert (header.api_key, header.version, header.correlation_id, header.client_id) == (*case, 7, client_id)
        assert_covers(seen(wire.decode_request(frame, header)), plain(message))

    check()


@pytest.mark.parametrize("case", EVERY, ids=named)
def test_kio_reads_what_we_write(case: tuple[int, int]) -> None:
    kind = load_response_schema(*case)

    @QUICK
    @given(messages(kind))
    def check(message: Any) -> None:
        frame = wire.encode_response(*case, 7, plain(message))
        size, correlation_id = struct.unpack_from(">ii", frame)
        assert (size, correlation_id) == (len(frame) - 4, 7)
        body = bytes(frame[8 + kind.__header_schema__.__flexible__ :])
        assert kio_read(kind, body) == message

    check()


def request_frame(case: tuple[int, int], client_id: str | None, body: bytes) -> bytes:
    name = b"" if client_id is None else client_id.encode()
    flexible = load_request_schema(*case).__header_schema__.__flexible__
    head = struct.pack(">hhih", *case, 7, -1 if client_id is None else len(name)) + name
    return head + b"\x00" * flexible + body


@pytest.mark.parametrize("case", [c for c in EVERY if c[1] == OFFERED[c[0]][1]], ids=named)
def test_garbage_is_malformed_or_read(case: tuple[int, int]) -> None:
    @settings(QUICK, max_examples=40)
    @given(st.binary(max_size=120) | messages(load_request_schema(*case)).map(kio_write).flatmap(damaged))
    def check(body: bytes) -> None:
        frame = request_frame(case, None, body)
        with contextlib.suppress(MalformedRequest):
            wire.decode_request(memoryview(frame), wire.read_header(frame))

    check()


def damaged(body: bytes) -> st.SearchStrategy[bytes]:
    """Cut a message short, or overwrite some of it with lengths that hurt."""
    at = st.integers(0, max(len(body) - 1, 0))
    hurtful = st.sampled_from(
        [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\x0f", b"\x80\x00\x00\x00", b"\x00"]
    )
    spoiled = st.builds(lambda i, h: body[:i] + h + body[i + len(h) :], at, hurtful)
    return at.map(lambda i: body[:i]) | spoiled


def test_every_truncation_is_malformed() -> None:
    for case in ((3, 12), (3, 0), (19, 5), (11, 9)):
        body = _sample(case)
        frame = request_frame(case, "c", body)
        wire.decode_request(frame, wire.read_header(frame))
        for length in range(len(frame)):
            with pytest.raises(MalformedRequest):
                wire.decode_request(frame[:length], wire.read_header(frame[:length]))


def _sample(case: tuple[int, int]) -> bytes:
    found: list[bytes] = []

    @settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(messages(load_request_schema(*case)))
    def collect(message: Any) -> None:
        found.append(kio_write(message))

    collect()
    return max(found, key=len)


def test_an_absurd_array_length_allocates_nothing() -> None:
    frame = request_frame((3, 1), None, struct.pack(">i", 2**31 - 1))
    header = wire.read_header(frame)
    with pytest.raises(MalformedRequest):
        wire.decode_request(frame, header)
    tracemalloc.start()
    with pytest.raises(MalformedRequest):
        wire.decode_request(frame, header)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_message_has_a_bounded_number_of_elements() -> None:
    count = wire.ELEMENTS_MAX + 1
    frame = request_frame((3, 1), None, struct.pack(">i", count) + b"\x00\x01a" * count)
    with pytest.raises(MalformedRequest, match="does not fit"):
        wire.decode_request(frame, wire.read_header(frame))


def test_bytes_left_over_are_passed_over() -> None:
    """librdkafka sends three too many when it asks for all topics, and Kafka never looks."""
    frame = bytes.fromhex("0003000d00000008000772646b61666b610000000000010000")
    assert wire.decode_request(frame, wire.read_header(frame)).topics is None


def test_a_tagged_field_that_does_not_end_where_it_says_is_malformed() -> None:
    tags = bytes([1, 0, 3, 2]) + b"cX"  # One tag, number 0, three bytes: a string of one byte, and one too many.
    body = bytes(4 + 4 + 4 + 1 + 4 + 4) + bytes([1, 1, 1]) + tags
    with pytest.raises(MalformedRequest, match="left over"):
        wire.decode_request(frame := request_frame((1, 16), None, body), wire.read_header(frame))


def test_fields_of_other_versions_hold_their_defaults() -> None:
    frame = request_frame((3, 0), None, struct.pack(">i", 0))
    message = wire.decode_request(frame, wire.read_header(frame))
    assert (message.topics, message.allow_auto_topic_creation) == ([], True)
    with pytest.raises(AttributeError, match="No version"):
        _ = message.no_such_field


def test_a_key_of_another_version_is_dropped_and_an_unknown_one_is_a_bug() -> None:
    assert wire.encode_response(3, 0, 1, {"cluster_id": "not in version 0"})
    with pytest.raises(AssertionError, match="no_such_key"):
        wire.encode_response(3, 0, 1, {"no_such_key": 1})


def test_every_offered_version_has_a_schema() -> None:
    for key, (low, high) in OFFERED.items():
        assert {*range(low, high + 1)} <= {*schema_name_map[api_key_map[key]]}
