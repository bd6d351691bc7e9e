"""Who may read what: tokens over the wire, TLS, and a tenant that tries everything to see another's entries."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest

from feed.issuer import Signer, assembled
from node.certificates import Authority
from walstream.errors import AuthenticationFailed, NotAuthorized, TokenExpired, UnreachableError, UsageError
from walstream.feed import Client, wal_pb2
from walstream.feed.process import FeedProcess
from walstream.feed.service.resume import resume_token
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

from .clients import create_topic
from .feed_processes import MakeFeed, create_feed_topic, write
from .support import MakeNode, wait_for

SERVICE = "/kdb.wal.v1.WalStream/"

SHORT_S = 8
"""For a token that is to expire in a test, and not before the test has come so far on a busy machine."""


def start(make_node: MakeNode, make_feed: MakeFeed, **settings: object) -> tuple[NodeProcess, FeedProcess]:
    node = make_node()
    create_feed_topic(node, "orders")
    write(node, "orders", [b"1", b"2", b"3"], tenant="acme", key=b"k")
    return node, make_feed(node, **settings)


def count(client: Client, wanted: int, **request: Any) -> int:
    with client, client.subscribe("oldest", **request) as stream:
        return sum(1 for _ in itertools.islice(stream, wanted))


def end_of(token: str) -> float:
    """When a token expires."""
    return float(jwt.decode(token, options={"verify_signature": False})["exp"])


def part(data: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).rstrip(b"=").decode()


class TestTokens:
    def test_forged_ones(self, make_node: MakeNode, make_feed: MakeFeed) -> None:
        _, feed = start(make_node, make_feed)
        good = feed.token("root", "admin")
        header, claims, signature = good.split(".")
        said = jwt.decode(good, options={"verify_signature": False})
        [published] = feed.keys.public()
        public = base64.urlsafe_b64decode(published["x"] + "==")
        named = {"kid": published["kid"]}
        stranger = Signer("EdDSA", published["kid"])

        def hmac_with_the_public_key(data: bytes) -> bytes:
            return hmac.digest(public, data, hashlib.sha256)

        forged = {
            "no signature": f"{part({'alg': 'none', **named})}.{claims}.",
            "no signature, algorithm kept": f"{header}.{claims}.",
            "the public key as a secret": assembled({"alg": "HS256", **named}, said, hmac_with_the_public_key),
            "another's key under our id": stranger.token(**said),
            "another key in the token": Signer(key_id=None).token({"jwk": stranger.jwk()}, **said),
            "other claims, our signature": f"{header}.{part({**said, 'sub': 'evil'})}.{signature}",
            "not ours": "x.y.z",
        }
        for name, token in forged.items():
            with Client(feed.address, token=token) as client:
                with pytest.raises(AuthenticationFailed):
                    client.lsn()
                with pytest.raises(AuthenticationFailed):
                    next(iter(client.subscribe("oldest")))
                with pytest.raises(AuthenticationFailed):
                    client.ack(GlobalLsn(1))
            assert token not in feed.log_text(), name
        assert count(Client(feed.address, token=good), 3) == 3

    def test_an_expired_one_ends_a_running_stream(self, make_node: MakeNode, make_feed: MakeFeed) -> None:
        _, feed = start(make_node, make_feed, auth__clock_skew_s=0)
        token = feed.token("ann", "replication", "acme", expires_in_s=SHORT_S)
        with Client(feed.address, token=token) as client, client.subscribe("oldest", reconnect=False) as stream:
            assert len(list(itertools.islice(stream, 3))) == 3
            with pytest.raises(TokenExpired, match="Resume at"):
                list(stream.events())
            assert end_of(token) <= time.time() < end_of(token) + 10
            with pytest.raises(TokenExpired):
                client.lsn()

    def test_a_newer_one_in_an_ack_keeps_the_stream(self, make_node: MakeNode, make_feed: MakeFeed) -> None:
        node, feed = start(make_node, make_feed, auth__clock_skew_s=0, heartbeat_ms=200)
        token = feed.token("ann", "replication", "acme", expires_in_s=SHORT_S)
        with Client(feed.address, token=token) as client, client.subscribe("oldest", reconnect=False) as stream:
            entries = iter(stream)
            last = [next(entries) for _ in range(3)][-1]
            with feed.client("ann", "replication", "acme") as other:
                other.ack(last.lsn)
            wait_for(
                lambda: time.time() > end_of(token) + 1, "the first one has expired, and streams were looked at", 60
            )
            write(node, "orders", [b"4"], tenant="acme")
            assert next(entries).value == b"4"

    def test_keys_that_are_rotated(self, make_node: MakeNode, make_feed: MakeFeed) -> None:
        _, feed = start(make_node, make_feed, auth__jwks_refresh_min_s=1)
        old = feed.token("root", "admin")
        feed.keys.rotate()
        new = feed.token("root", "admin")
        assert count(Client(feed.address, token=old), 3) == 3
        wait_for(lambda: accepts(feed, new), "the new key is read when a token names it", 20, 0.2)
        feed.keys.prune()
        wait_for(lambda: not accepts(feed, old), "the old key is not believed any more", 20, 0.2)
        assert accepts(feed, new)


def accepts(feed: FeedProcess, token: str) -> bool:
    with Client(feed.address, token=token) as client:
        try:
            client.lsn()
        except AuthenticationFailed:
            return False
        return True


class TestTls:
    def test_a_server_certificate(self, make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path) -> None:
        authority = Authority(tmp_path / "ca")
        pair = authority.server()
        _, feed = start(make_node, make_feed, tls__certificate=pair.certificate, tls__key=pair.key)
        token = feed.token("root", "admin")
        assert count(Client(feed.address, token=token, tls_ca=authority.certificate), 3) == 3
        for other in ({"tls_ca": Authority(tmp_path / "other").certificate}, {}):
            with Client(feed.address, token=token, timeout_s=5, **other) as client, pytest.raises(UnreachableError):
                client.lsn()

    def test_mutual_tls(self, make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path) -> None:
        authority = Authority(tmp_path / "ca")
        pair, known = authority.server(), authority.client("ann", "/CN=ann")
        stranger = Authority(tmp_path / "other").client("eve", "/CN=eve")
        settings = {"tls__certificate": pair.certificate, "tls__key": pair.key}
        settings |= {"tls__client_ca": authority.certificate, "tls__client_auth": "required"}
        _, feed = start(make_node, make_feed, **settings)
        token = feed.token("root", "admin")

        def client(**more: str) -> Client:
            return Client(feed.address, token=token, tls_ca=authority.certificate, timeout_s=5, **more)

        assert count(client(tls_certificate=known.certificate, tls_key=known.key), 3) == 3
        for more in ({}, {"tls_certificate": stranger.certificate, "tls_key": stranger.key}):
            with client(**more) as refused, pytest.raises(UnreachableError):
                refused.lsn()
        with (
            Client(
                feed.address,
                token="x",
                tls_ca=authority.certificate,
                tls_certificate=known.certificate,
                tls_key=known.key,
            ) as known_without_token,
            pytest.raises(AuthenticationFailed),
        ):
            known_without_token.lsn()


@contextlib.contextmanager
def two_tenants(make_node: MakeNode, make_feed: MakeFeed) -> Iterator[tuple[NodeProcess, FeedProcess]]:
    """acme and evil write to the same topics, in between each other; some records belong to nobody."""
    node = make_node()
    for topic in ("shop.orders", "shop.evil", "evil"):
        create_feed_topic(node, topic, 2)
        for number in range(20):
            for tenant in ("acme", "evil", None):
                text = f"{tenant}-secret-{number}".encode()
                write(node, topic, [text], partition=number % 2, tenant=tenant, key=text)
    yield node, make_feed(node, heartbeat_ms=200)


def everything(feed: FeedProcess, token: str, **request: Any) -> tuple[list[wal_pb2.WalResponse], Any]:
    """Read with a bare client until the stream says that it is at the head, or ends; no heartbeat is left out."""
    with grpc.insecure_channel(feed.address) as channel:
        call = channel.unary_stream(
            SERVICE + "Subscribe", wal_pb2.SubscribeRequest.SerializeToString, wal_pb2.WalResponse.FromString
        )
        stream = call(wal_pb2.SubscribeRequest(**request), metadata=(("authorization", f"Bearer {token}"),), timeout=30)
        found = []
        try:
            for response in stream:
                found.append(response)
                beat = response.heartbeat
                if response.WhichOneof("payload") == "heartbeat" and beat.resolved_lsn >= beat.current_lsn:
                    break
        except grpc.RpcError as error:
            return found, error
        return found, None


@pytest.mark.timeout(300)
def test_a_tenant_sees_no_entry_key_or_content_of_another(make_node: MakeNode, make_feed: MakeFeed) -> None:
    with two_tenants(make_node, make_feed) as (node, feed):
        token = feed.token("mallory", "replication", "evil")
        create_feed_topic(node, "acme-secret-topic")
        create_topic(node.address, "acme-secret-unfit")
        with feed.client() as admin:
            all_entries = list(itertools.islice(admin.subscribe("oldest"), 180))
            acmes = [entry for entry in all_entries if entry.tenant == "acme"]
            assert (len(all_entries), len(acmes)) == (180, 60)
        own_name = {"subscriber_id": "acme/ann"}
        attempts: list[dict[str, Any]] = [
            {"start_lsn": "oldest"},
            {"start_lsn": "oldest", "key_prefix_filter": "walstream:acme:"},
            {"start_lsn": "oldest", "key_prefix_filter": "walstream:acme:shop.orders:acme-secret-1"},
            {"start_lsn": "oldest", "key_prefix_filter": "walstream:evil:shop.orders:acme"},
            {"start_lsn": "oldest", "key_prefix_filter": "walstream::"},
            {"start_lsn": "oldest", "key_prefix_filter": ""},
            {"start_lsn": "oldest", "topics": ["*"]},
            {"start_lsn": "oldest", "topics": ["_walstream.acks"]},
            {"start_lsn": "oldest", "topics": ["_walstream.*", "*"]},
            {"start_lsn": "oldest", "topics": ["shop.*", "[a-z]*", "(.*)", "**"]},
            {"start_lsn": "oldest", "topics": ["acme-secret-topic"]},
            {"start_lsn": "oldest", "topics": ["acme-secret-unfit"]},
            {"start_lsn": "oldest", "topics": ["acme-secret-*"]},
            {"start_lsn": str(GlobalLsn.at_time(1 << 42))},
            {"resume_token": b"x"},
            {"start_lsn": str(acmes[0].lsn)},
            {"start_lsn": str(acmes[7].lsn), "batch_size_hint": 1},
            {"resume_token": resume_token(acmes[3].lsn)},
            {"start_lsn": "oldest", "credit_entries": 100, **own_name},
            {"start_lsn": "oldest", "accept_compression": [wal_pb2.SNAPPY, wal_pb2.ZSTD]},
            {"start_lsn": "oldest", "accept_watermarks": True, **own_name},
            {"start_lsn": "oldest", "framing": wal_pb2.TRANSACTIONS, "capture": "shop"},
            {"start_lsn": "", **own_name},
        ]
        for request in attempts:
            responses, error = everything(feed, token, **request)
            if error is not None:
                assert "acme" not in f"{error.details()} {error.trailing_metadata()}", request
            for response in responses:
                assert b"acme-secret" not in response.SerializeToString(), request
                assert b"None-secret" not in response.SerializeToString(), request
                for entry in response.batch.entries:
                    assert entry.tenant_id == "evil", request
                    assert entry.key_prefix.startswith("walstream:evil:"), request
        for tenant in ("acme", "ACME", " acme", "acme\x00", "*", "evil,acme", "evil\nacme", "evil "):
            _, error = everything(feed, token, start_lsn="oldest", tenant_filter=tenant)
            assert error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT), tenant


def test_a_tenant_cannot_speak_for_another(make_node: MakeNode, make_feed: MakeFeed) -> None:
    with two_tenants(make_node, make_feed) as (_, feed):
        with feed.client("ann", "replication", "acme") as ann:
            entries = list(itertools.islice(ann.subscribe("oldest"), 60))
            ann.ack(entries[10].lsn, "ann")
        with feed.client("mallory", "replication", "evil") as mallory:
            for name in ("ann", "acme/ann", '","acme","ann', "../acme/ann"):
                answer = mallory.ack(entries[50].lsn, name)
                assert answer.watermark == answer.acked == entries[50].lsn, "its own tenant's, and nobody else's"
        with feed.client("ann", "replication", "acme") as ann:
            assert ann.ack(entries[5].lsn, "ann").acked == entries[10].lsn
            again = next(iter(ann.subscribe(subscriber_id="ann")))
            assert again.lsn == entries[10].lsn
        with feed.client("root", "admin") as root, feed.client("mallory", "replication", "evil") as mallory:
            assert root.lsn().watermark == entries[10].lsn
            assert mallory.lsn().watermark == entries[50].lsn


def test_a_token_without_a_role_or_tenant_reads_nothing(make_node: MakeNode, make_feed: MakeFeed) -> None:
    _, feed = start(make_node, make_feed)
    private = feed.keys.key.read_bytes()
    [published] = feed.keys.public()
    good = {"sub": "ann", "aud": "walstream", "exp": int(time.time()) + 600}
    for claims in (
        {},
        {"role": "replication"},
        {"role": "replication", "tenant": ""},
        {"role": "Admin"},
        {"role": ["admin"]},
        {"role": "owner", "tenant": "acme"},
    ):
        token = jwt.encode({**good, **claims}, private, "EdDSA", {"kid": published["kid"]})
        with Client(feed.address, token=token) as client, pytest.raises((NotAuthorized, AuthenticationFailed)):
            next(iter(client.subscribe("oldest")))
    other_audience = {**good, "role": "admin", "aud": "somebody-else"}
    token = jwt.encode(other_audience, private, "EdDSA", {"kid": published["kid"]})
    with Client(feed.address, token=token) as client, pytest.raises(AuthenticationFailed):
        client.lsn()


def test_beyond_loopback_it_wants_tls(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    feed = make_feed(node, start=False, host="0.0.0.0")
    feed.port, feed.http_port = 1, 1
    feed.spawn()
    assert feed.wait(30) == 2, feed.log_tail()
    assert "would show rows and tokens" in feed.log_text()
    with pytest.raises(UsageError):
        Client(feed.address)
