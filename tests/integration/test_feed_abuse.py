"""Clients that send what no client should: each is told what is wrong by its status, and costs the feed nothing.

Bare gRPC calls of bytes, so that nothing on the way mends or refuses them. Whatever is sent, the feed goes on, and its
log has no traceback (`make_feed` looks).
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from walstream.errors import AckRefused, LsnNotAvailable, NotAuthorized, UsageError
from walstream.feed import wal_pb2
from walstream.feed.process import FeedProcess
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

from .feed_processes import MakeFeed, create_feed_topic, write
from .support import MakeNode

METHODS = ("Subscribe", "Ack", "GetLSN")
SERVICE = "/kdb.wal.v1.WalStream/"
HOUR_MS = 3_600_000

GARBAGE = {
    "no field at all": b"\xff\xff\xff",
    "a text longer than the message": b"\x0a\xff\xff\xff\x7f",
    "a group that never ends": b"\x0b" * 50,
    "a length that never ends": b"\x0a" + b"\xff" * 20,
}


@pytest.fixture
def node(make_node: MakeNode) -> NodeProcess:
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1", b"2", b"3"], tenant="acme", key=b"k")
    return node


def call(feed: FeedProcess, method: str, data: bytes, token: str | None) -> tuple[list[bytes], Any]:
    """Send bytes; return what came and the error with which the call ended."""
    metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
    found: list[bytes] = []
    with grpc.insecure_channel(feed.address) as channel:
        try:
            # To the client every call is a stream: it takes whatever comes.
            for response in channel.unary_stream(method)(data, metadata=metadata, timeout=20):
                found.append(response)
        except grpc.RpcError as error:
            return found, error
    return found, None


def test_what_is_no_request(node: NodeProcess, make_feed: MakeFeed) -> None:
    feed = make_feed(node)
    token = feed.token("ann", "replication", "acme")
    for method, (name, data) in itertools.product(METHODS, GARBAGE.items()):
        responses, error = call(feed, SERVICE + method, data, token)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, name)
        assert "The request is no" in error.details(), (method, name)
        if method == "Subscribe":
            assert "The request is no" in wal_pb2.WalResponse.FromString(responses[-1]).error
        _, error = call(feed, SERVICE + method, data, None)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED, "nothing is read for whoever shows no token"
    for method in METHODS:
        _, error = call(feed, SERVICE + method, b"\x0a\x80\x80\x7a" + bytes(2_000_000), token)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than any request"
    _, error = call(feed, SERVICE + "Drop", b"", token)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    with feed.client() as client:
        assert len(list(itertools.islice(client.subscribe("oldest"), 3))) == 3
    assert '"level": "error"' not in feed.log_text()


def test_no_call_goes_without_a_token(node: NodeProcess, make_feed: MakeFeed) -> None:
    feed = make_feed(node)
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for method in (*(SERVICE + name for name in METHODS), reflection, "/other.Service/Call"):
        for token in (None, "x.y.z", ""):
            _, error = call(feed, method, b"", token)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, (method, token)


def test_a_client_that_knows_only_what_reflection_tells(node: NodeProcess, make_feed: MakeFeed) -> None:
    """As grpcurl does it: the messages are made from what the server says of them."""
    feed = make_feed(node)
    metadata = (("authorization", f"Bearer {feed.token('root', 'admin')}"),)
    with grpc.insecure_channel(feed.address) as plain:
        channel = grpc.intercept_channel(plain, _WithToken(metadata))
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "kdb.wal.v1.WalStream" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("kdb.wal.v1.WalStream")
        get_lsn = service.methods_by_name["GetLSN"]
        request, response = GetMessageClass(get_lsn.input_type), GetMessageClass(get_lsn.output_type)
        answer = channel.unary_unary(SERVICE + "GetLSN", request.SerializeToString, response.FromString)(request())
        with feed.client() as client:
            assert answer.head_lsn == str(client.lsn().head)


class _WithToken(grpc.StreamStreamClientInterceptor, grpc.UnaryUnaryClientInterceptor):
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)


def test_a_start_that_is_no_lsn(node: NodeProcess, make_feed: MakeFeed) -> None:
    feed = make_feed(node)
    token = feed.token("ann", "admin")
    for start in ("7", "head ", "0x1", "-1", "f" * 38, "0" * 16 + ".9999999999.0000000000", "\u0663", "x" * 100_000):
        data = wal_pb2.SubscribeRequest(start_lsn=start).SerializeToString()
        responses, error = call(feed, SERVICE + "Subscribe", data, token)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, start[:50]
        assert [wal_pb2.WalResponse.FromString(one).WhichOneof("payload") for one in responses] == ["error"]


def test_a_start_that_no_log_can_have_reached(node: NodeProcess, make_feed: MakeFeed) -> None:
    """Whoever brings an LSN of another log, or of the future, is told so: it would wait while everything passes by."""
    feed = make_feed(node)
    ahead = GlobalLsn.at_time(int(time.time() * 1000) + HOUR_MS)
    with feed.client("ann", "replication", "acme") as client:
        head = client.lsn().head
        for start in (ahead, GlobalLsn((1 << 128) - 1)):
            with pytest.raises(LsnNotAvailable) as caught:
                next(iter(client.subscribe(start)))
            assert caught.value.message.startswith(f"lsn_not_available: start_lsn={start} newer than anything")
            assert caught.value.head == head
            with pytest.raises(AckRefused, match="ack_refused"):
                client.ack(start)
        data = wal_pb2.SubscribeRequest(start_lsn=str(ahead)).SerializeToString()
        _, error = call(feed, SERVICE + "Subscribe", data, feed.token("ann", "replication", "acme"))
        assert error.code() is grpc.StatusCode.OUT_OF_RANGE
        assert next(iter(client.subscribe())).value == b"1", "nothing was remembered of it"
        # What a heartbeat has told is ahead of the head, and right.
        with client.subscribe(client.lsn().resolved + 1) as stream:
            write(node, "orders", [b"4"], tenant="acme")
            assert next(iter(stream)).value == b"4"


def test_topics_that_are_for_no_tenant(node: NodeProcess, make_feed: MakeFeed) -> None:
    create_feed_topic(node, "_own")
    write(node, "_own", [b"mine"], tenant="acme")
    feed = make_feed(node)
    with feed.client("ann", "replication", "acme") as ann, feed.client("root") as root:
        for topic in ("_own", "_walstream.regions", "_walstream.acks", "_nothing", "__consumer_offsets"):
            with pytest.raises(NotAuthorized, match="walstream's own"):
                next(iter(ann.subscribe("oldest", topics=[topic])))
        assert next(iter(root.subscribe("oldest", topics=["_own"]))).value == b"mine"
        for topic in ("_walstream.regions", "_walstream.acks", "_walstream.ends", "__consumer_offsets"):
            with pytest.raises(UsageError, match="never in the feed"):
                next(iter(root.subscribe("oldest", topics=[topic])))


def test_an_ack_for_somebody_else(node: NodeProcess, make_feed: MakeFeed) -> None:
    """Names are those of a role and a tenant: an admin, too, only ever speaks for its own."""
    feed = make_feed(node)
    with feed.client("ann", "replication", "acme") as ann:
        entries = list(itertools.islice(ann.subscribe("oldest"), 3))
        ann.ack(entries[0].lsn)
        for subject, role, tenant in (("root", "admin", ""), ("mallory", "replication", "evil")):
            with feed.client(subject, role, tenant) as other:
                for name in ("ann", "acme/ann", "acme"):
                    other.ack(entries[2].lsn, name)
        assert ann.ack(entries[0].lsn).acked == entries[0].lsn
        assert next(iter(ann.subscribe())).lsn == entries[0].lsn
