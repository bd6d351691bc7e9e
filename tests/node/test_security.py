"""Where a node may listen, its TLS, and the requests that authenticate a connection."""

from __future__ import annotations

import ssl
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from node.certificates import Authority, Pair
from walstream.config import AclRule, SecurityConfig
from walstream.errors import AuthenticationFailed, ConfigError
from walstream.node.acl import ANONYMOUS, Principal
from walstream.node.api import sasl as api
from walstream.node.context import Context
from walstream.node.credentials import make_credential
from walstream.node.sasl import Exchange
from walstream.node.security import OPEN_APIS, Security, certificate_principal, check_listener, load_secret, names_host

ALICE = make_credential("wonderland", "SCRAM-SHA-256", 4096, b"alice's salt")
RULE = AclRule(principal="alice", kind="topic", operations=("read",))
TLS = {"tls_certificate": "node.pem", "tls_key": "node.key"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.server()


def tls(pair: Pair, **more: Any) -> SecurityConfig:
    return SecurityConfig(tls_certificate=pair.certificate, tls_key=pair.key, **more)


# Listening


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback_is_open(host: str) -> None:
    check_listener(host, SecurityConfig())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "node.example", "localhost.example", "1"])
@pytest.mark.parametrize(
    ("config", "lacks"),
    [
        (SecurityConfig(), "tls_certificate and tls_key and users"),
        (SecurityConfig(users={"alice": ALICE}), "tls_certificate"),
        (SecurityConfig(**TLS), "users"),
    ],
)
def test_other_addresses_need_tls_and_authentication(host: str, config: SecurityConfig, lacks: str) -> None:
    with pytest.raises(ConfigError, match=lacks) as refusal:
        check_listener(host, config)
    assert "allow_insecure" in refusal.value.hint


@pytest.mark.parametrize(
    "config",
    [
        SecurityConfig(**TLS, users={"alice": ALICE}),
        SecurityConfig(**TLS, tls_client_ca="ca.pem"),
        SecurityConfig(allow_insecure=True),
    ],
)
def test_other_addresses_are_open_with_them_or_when_told_so(config: SecurityConfig) -> None:
    check_listener("0.0.0.0", config)


# Configuration


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SecurityConfig(acls=(RULE,)), "not be enforced"),
        (SecurityConfig(sasl_mechanisms=("SCRAM-SHA-256",)), "nobody to log in"),
        (SecurityConfig(users={"alice": ALICE}, sasl_mechanisms=("PLAIN",)), "could never log in"),
        (SecurityConfig(users={"alice": ALICE}, sasl_mechanisms=("SCRAM-SHA-512",)), "could never log in"),
        (SecurityConfig(users={"alice": "wonderland"}), "credential"),
        (SecurityConfig(tls_certificate="missing.pem", tls_key="missing.key"), "No such file"),
    ],
)
def test_security_that_cannot_be_meant(config: SecurityConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Security(config)


def test_a_key_that_is_another_s_is_refused(authority: Authority, server: Pair) -> None:
    other = authority.server("other")
    with pytest.raises(ConfigError, match="mismatch"):
        Security(SecurityConfig(tls_certificate=server.certificate, tls_key=other.key))


def test_an_encrypted_key_is_refused_without_asking(server: Pair, tmp_path: Path) -> None:
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(
        ["openssl", "pkey", "-in", server.key, "-aes256", "-passout", "pass:secret", "-out", encrypted], check=True
    )
    with pytest.raises(ConfigError, match="encrypted"):
        Security(SecurityConfig(tls_certificate=server.certificate, tls_key=str(encrypted)))


def test_an_authority_that_is_no_certificate_is_refused(server: Pair) -> None:
    with pytest.raises(ConfigError, match="tls_client_ca"):
        Security(tls(server, tls_client_ca=server.key))


def test_the_default_asks_nobody() -> None:
    security = Security(SecurityConfig())
    assert not security.is_required
    assert security.tls is None
    assert security.mechanisms(is_tls=True) == ()
    assert security.may_call(ANONYMOUS, 0)
    assert security.authorizer.allows(ANONYMOUS, "admin", "cluster")


def test_with_users_strangers_may_only_log_in() -> None:
    security = Security(SecurityConfig(users={"alice": ALICE}, acls=(RULE,)))
    assert {key for key in range(100) if security.may_call(ANONYMOUS, key)} == OPEN_APIS
    assert security.may_call(Principal("alice", "SCRAM-SHA-256"), 0)
    assert security.authorizer.visible(Principal("alice", "SCRAM-SHA-256"), "orders")


def test_plain_is_offered_only_over_tls(server: Pair) -> None:
    security = Security(tls(server, users={"alice": ALICE}))
    assert security.mechanisms(is_tls=True) == ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")
    assert security.mechanisms(is_tls=False) == ("SCRAM-SHA-256", "SCRAM-SHA-512")


def test_the_secret_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "decoy.key"
    secret = load_secret(path)
    assert len(secret) == 32
    assert load_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"torn")
    assert len(load_secret(path)) == 32
    assert len(load_secret(tmp_path / "no folder" / "secret")) == 32


# TLS


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, *, tls_max: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> dict[str, Any] | None:
    """Do a TLS handshake in memory and return the client's certificate as the server sees it."""
    client.maximum_version = tls_max
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = server.wrap_bio(to_server, to_client, server_side=True)
    there = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    pending = [there, here]
    for _ in range(10):
        for side in list(pending):
            try:
                side.do_handshake()
                pending.remove(side)
            except ssl.SSLWantReadError:
                continue
    assert not pending
    return here.getpeercert()


def client_context(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if pair:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


@pytest.mark.parametrize(
    ("host", "is_named"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("a.nodes.example", True),
        ("nodes.example", False),
        ("a.b.nodes.example", False),
        ("127.0.0.2", False),
        ("local", False),
        ("node", False),
    ],
)
def test_hosts_that_a_certificate_names(authority: Authority, server: Pair, host: str, is_named: bool) -> None:
    security = Security(tls(server, tls_client_ca=authority.certificate))
    assert security.tls is not None
    pair = authority.client("node", "/CN=node", "DNS:localhost,DNS:*.nodes.example,IP:127.0.0.1,IP:::1")
    certificate = shake_hands(security.tls, client_context(authority, pair))
    assert certificate is not None
    assert names_host(certificate, host) is is_named
    assert not names_host({}, host)


@pytest.mark.parametrize(
    ("subject", "names", "principal"),
    [
        ("/O=Acme/CN=alice", "", "alice"),
        ("/CN=alice", "DNS:other.example", "alice"),
        ("/O=Acme", "DNS:billing.example,email:b@example.org", "billing.example"),
        ("/O=Acme", "email:billing@example.org", "billing@example.org"),
        ("/O=Acme", "URI:spiffe://acme/billing", "spiffe://acme/billing"),
        ("/CN=alice/CN=root", "DNS:billing.example", "billing.example"),
    ],
)
def test_a_client_certificate_names_the_principal(
    authority: Authority, server: Pair, subject: str, names: str, principal: str
) -> None:
    security = Security(tls(server, tls_client_ca=authority.certificate))
    assert security.tls is not None
    pair = authority.client("client", subject, names)
    certificate = shake_hands(security.tls, client_context(authority, pair))
    assert security.first_principal(certificate) == Principal(principal, "TLS")


@pytest.mark.parametrize("certificate", [{}, {"subject": ((("organizationName", "Acme"),),)}])
def test_a_certificate_that_names_nobody_is_refused(certificate: dict[str, Any]) -> None:
    with pytest.raises(AuthenticationFailed, match="names nobody"):
        certificate_principal(certificate)


def test_a_client_certificate_is_required_when_there_is_no_other_way_in(authority: Authority, server: Pair) -> None:
    security = Security(tls(server, tls_client_ca=authority.certificate))
    assert security.tls is not None
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake_hands(security.tls, client_context(authority))


def test_a_client_certificate_is_one_of_two_ways_in_with_users(authority: Authority, server: Pair) -> None:
    security = Security(tls(server, tls_client_ca=authority.certificate, users={"alice": ALICE}))
    assert security.tls is not None
    assert security.first_principal(shake_hands(security.tls, client_context(authority))) == ANONYMOUS
    pair = authority.client("bob", "/CN=bob")
    assert security.first_principal(shake_hands(security.tls, client_context(authority, pair))).name == "bob"


@pytest.mark.parametrize("with_users", [False, True])
def test_a_certificate_of_another_authority_or_for_another_use_is_refused(
    authority: Authority, server: Pair, tmp_path: Path, with_users: bool
) -> None:
    users = {"alice": ALICE} if with_users else {}
    security = Security(tls(server, tls_client_ca=authority.certificate, users=users))
    assert security.tls is not None
    stranger = Authority(tmp_path / "stranger").client("alice", "/CN=alice")
    for pair in (stranger, server):
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            shake_hands(security.tls, client_context(authority, pair))


def test_tls_begins_at_1_2(authority: Authority, server: Pair) -> None:
    security = Security(tls(server))
    assert security.tls is not None
    shake_hands(security.tls, client_context(authority), tls_max=ssl.TLSVersion.TLSv1_2)
    assert security.tls.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_new_certificate_is_taken_up_and_a_broken_one_is_not(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    pair = old.server()
    security = Security(tls(pair))
    assert security.tls is not None
    shake_hands(security.tls, client_context(old))
    Path(pair.certificate).write_text("broken")
    with pytest.raises(ConfigError):
        security.reload_tls()
    shake_hands(security.tls, client_context(old))
    renewed = new.server()
    Path(pair.certificate).write_bytes(Path(renewed.certificate).read_bytes())
    Path(pair.key).write_bytes(Path(renewed.key).read_bytes())
    security.reload_tls()
    shake_hands(security.tls, client_context(new))


# The requests


@dataclass
class Peer:
    is_tls: bool = True
    peer: str = "127.0.0.1:1234"
    principal: Principal = ANONYMOUS
    client_id: str = "test"
    fetch_turn: int = 0
    exchange: Exchange | None = None
    takes_raw_tokens: bool = False
    closes_after_reply: bool = False


@dataclass
class Session:
    """A connection's requests, one after the other."""

    security: Security = field(default_factory=lambda: Security(SecurityConfig(users={"alice": ALICE})))
    connection: Peer = field(default_factory=Peer)
    version: int = 1

    def _context(self) -> Context:
        node: Any = SimpleNamespace(security=self.security)
        return Context(node, self.connection, self.version, self.connection.client_id)

    async def handshake(self, mechanism: str) -> tuple[int, list[str]]:
        reply = await api.sasl_handshake(self._context(), SimpleNamespace(mechanism=mechanism))
        return reply["error_code"], reply["mechanisms"]

    async def authenticate(self, token: bytes) -> dict[str, Any]:
        return await api.sasl_authenticate(self._context(), SimpleNamespace(auth_bytes=memoryview(token)))


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FAILURE_DELAY_MS", 1)


async def test_a_login_gives_the_connection_its_principal() -> None:
    session = Session()
    assert await session.handshake("PLAIN") == (0, ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
    assert session.connection.principal == ANONYMOUS
    reply = await session.authenticate(b"\0alice\0wonderland")
    assert reply == {"error_code": 0, "error_message": None, "auth_bytes": b""}
    assert session.connection.principal == Principal("alice", "PLAIN")
    assert not session.connection.closes_after_reply


async def test_plain_without_tls_is_refused_before_the_password_is_sent() -> None:
    session = Session(connection=Peer(is_tls=False))
    assert await session.handshake("PLAIN") == (33, ["SCRAM-SHA-256", "SCRAM-SHA-512"])
    assert session.connection.closes_after_reply
    assert (await session.authenticate(b"\0alice\0wonderland"))["error_code"] == 34
    assert session.connection.principal == ANONYMOUS


async def test_a_failure_is_slow_final_logged_and_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FAILURE_DELAY_MS", 50)
    session = Session()
    await session.handshake("PLAIN")
    begin = time.monotonic()
    with structlog.testing.capture_logs() as lines:
        reply = await session.authenticate(b"\0alice\0Wonderland")
    assert time.monotonic() - begin > 0.045
    assert (reply["error_code"], reply["auth_bytes"]) == (58, b"")
    assert session.connection.closes_after_reply
    assert session.connection.principal == ANONYMOUS
    assert [(line["event"], line["mechanism"]) for line in lines] == [("authentication failed", "PLAIN")]
    assert "onderland" not in str(lines)
    assert (await session.authenticate(b"\0alice\0wonderland"))["error_code"] == 34, "there is no second guess"
    assert session.connection.principal == ANONYMOUS


async def test_steps_out_of_turn() -> None:
    assert (await Session().authenticate(b"\0alice\0wonderland"))["error_code"] == 34
    twice = Session()
    await twice.handshake("PLAIN")
    assert (await twice.handshake("PLAIN"))[0] == 34
    again = Session()
    await again.handshake("PLAIN")
    await again.authenticate(b"\0alice\0wonderland")
    assert (await again.handshake("PLAIN"))[0] == 34
    assert (await again.authenticate(b"\0alice\0wonderland"))["error_code"] == 34


async def test_without_users_there_is_no_mechanism() -> None:
    assert await Session(Security(SecurityConfig())).handshake("PLAIN") == (33, [])


async def test_a_client_with_a_certificate_may_still_log_in() -> None:
    session = Session(connection=Peer(principal=Principal("billing", "TLS")))
    await session.handshake("PLAIN")
    await session.authenticate(b"\0alice\0wonderland")
    assert session.connection.principal.name == "alice"


async def test_after_handshake_version_0_tokens_are_bare() -> None:
    session = Session(version=0)
    await session.handshake("SCRAM-SHA-256")
    assert session.connection.takes_raw_tokens
    reply = await api.raw_token(session.connection, b"n,,n=alice,r=client")
    assert reply is not None
    assert reply.startswith(b"r=client")
    assert await api.raw_token(session.connection, b"c=biws,r=client,p=AAAA") is None
    assert session.connection.closes_after_reply

    session = Session(version=0)
    await session.handshake("PLAIN")
    assert await api.raw_token(session.connection, b"\0alice\0wonderland") == b""
    assert not session.connection.takes_raw_tokens
    assert session.connection.principal.name == "alice"
