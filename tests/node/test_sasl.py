"""The exchanges against the RFC's example, a client written from the RFC, and bytes written by nobody."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import AuthenticationFailed, IllegalSaslState, UnsupportedMechanism
from walstream.node.acl import Principal
from walstream.node.credentials import Credentials, make_credential
from walstream.node.sasl import TOKEN_BYTES_MAX, Exchange, ScramExchange, start

SCRAM = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
SECRET = b"the secret of decoys"
NONCE = "server-nonce"
WRONG = "The user name or the password is wrong."


class Client:
    """The client's side of SCRAM, by RFC 5802 alone."""

    def __init__(self, mechanism: str, name: str, password: str, *, header: str = "n,,", nonce: str = "client") -> None:
        self.algorithm = SCRAM[mechanism]
        self.password = password.encode()
        self.header = header
        escaped = name.replace("=", "=3D").replace(",", "=2C")
        self.bare = f"n={escaped},r={nonce}"
        self.nonce = nonce
        self.verifier = b""

    def first(self) -> bytes:
        return (self.header + self.bare).encode()

    def final(self, server_first: bytes, *, extensions: str = "") -> bytes:
        attributes = dict(part.split("=", 1) for part in server_first.decode().split(","))
        assert attributes["r"].startswith(self.nonce)
        salt, iterations = base64.b64decode(attributes["s"]), int(attributes["i"])
        salted = hashlib.pbkdf2_hmac(self.algorithm, self.password, salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self.algorithm)
        stored_key = hashlib.new(self.algorithm, client_key).digest()
        without_proof = f"c={base64.b64encode(self.header.encode()).decode()},r={attributes['r']}{extensions}"
        message = b",".join([self.bare.encode(), server_first, without_proof.encode()])
        signature = hmac.digest(stored_key, message, self.algorithm)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self.verifier = hmac.digest(hmac.digest(salted, b"Server Key", self.algorithm), message, self.algorithm)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()


def users(**passwords: str) -> Credentials:
    return Credentials(
        {
            name: [make_credential(password, mechanism, 4096, salt=f"salt of {name}".encode()) for mechanism in SCRAM]
            for name, password in passwords.items()
        },
        SECRET,
    )


ALICE = users(alice="wonderland")


def scram(mechanism: str, name: str, password: str, credentials: Credentials = ALICE, header: str = "n,,") -> Principal:
    client = Client(mechanism, name, password, header=header)
    exchange = start(mechanism, credentials, NONCE)
    first = exchange.step(client.first())
    assert not first.done
    assert first.principal is None
    last = exchange.step(client.final(first.reply))
    assert last.reply == b"v=" + base64.b64encode(client.verifier)
    assert last.done
    assert last.principal is not None
    return last.principal


def test_the_example_of_rfc_7677() -> None:
    credential = make_credential("pencil", "SCRAM-SHA-256", 4096, base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="))
    exchange = start("SCRAM-SHA-256", Credentials({"user": credential}, SECRET), "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    first = exchange.step(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO")
    assert first.reply == b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    last = exchange.step(
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    assert last.reply == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert (last.done, last.principal) == (True, Principal("user", "SCRAM-SHA-256"))


@pytest.mark.parametrize("mechanism", SCRAM)
@pytest.mark.parametrize("header", ["n,,", "y,,", "n,a=alice,"])
def test_scram_proves_the_name(mechanism: str, header: str) -> None:
    assert scram(mechanism, "alice", "wonderland", header=header) == Principal("alice", mechanism)


@pytest.mark.parametrize("mechanism", SCRAM)
@pytest.mark.parametrize(
    ("name", "password"), [("alice", "Wonderland"), ("bob", "wonderland"), ("alicE", "wonderland")]
)
def test_a_wrong_name_and_a_wrong_password_fail_alike(mechanism: str, name: str, password: str) -> None:
    with pytest.raises(AuthenticationFailed) as refusal:
        scram(mechanism, name, password)
    assert str(refusal.value) == WRONG


def test_names_with_commas_and_equals_signs_travel_escaped() -> None:
    name = "a=b,c=2Cd"
    assert scram("SCRAM-SHA-256", name, "secret", users(**{name: "secret"})).name == name


def test_a_password_is_the_same_in_every_form_of_its_characters() -> None:
    credentials = users(zoë="Ⅸ pa\u00a0ss\u00adword")
    assert scram("SCRAM-SHA-512", "zoe\u0308", "IX pa ssword", credentials).name == "zoë"


def test_optional_extensions_are_ignored() -> None:
    client = Client("SCRAM-SHA-256", "alice", "wonderland")
    client.bare += ",x=anything,tokenauth=true"
    exchange = start("SCRAM-SHA-256", ALICE, NONCE)
    reply = exchange.step(client.first()).reply
    assert exchange.step(client.final(reply, extensions=",y=more")).done


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"p=tls-unique,,n=alice,r=x", "channel binding"),
        (b"n,,m=must,n=alice,r=x", "extension"),
        (b"n,a=bob,n=alice,r=x", "another user"),
        (b"n,,n=al=ice,r=x", "escaped"),
        (b"n,,n=al=2cice,r=x", "escaped"),
        (b"n,,n=,r=x", "malformed"),
        (b"n,,n=alice,r=", "malformed"),
        (b"n,,n=alice,r=a b", "malformed"),
        (b"n,,n=alice", "malformed"),
        (b"n,,r=x,n=alice", "malformed"),
        (b"n,n=alice,r=x", "malformed"),
        (b"z,,n=alice,r=x", "malformed"),
        (b"n,,n=alice,r=x,", "malformed"),
        (b"n,,n=alice,r=x\n", "malformed"),
        (b"n,,n=ali\0ce,r=x", "malformed"),
        (b"n,,n=\xff,r=x", "UTF-8"),
        (b"n,,n=" + b"a" * TOKEN_BYTES_MAX + b",r=x", "longer"),
        (b"", "malformed"),
    ],
)
def test_a_first_message_that_the_rfc_does_not_allow(first: bytes, reason: str) -> None:
    with pytest.raises(AuthenticationFailed, match=reason):
        start("SCRAM-SHA-256", ALICE, NONCE).step(first)


def final(change: tuple[bytes, bytes]) -> None:
    client = Client("SCRAM-SHA-256", "alice", "wonderland")
    exchange = start("SCRAM-SHA-256", ALICE, NONCE)
    good = client.final(exchange.step(client.first()).reply)
    bad = good.replace(*change)
    assert bad != good
    exchange.step(bad)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((b"c=biws", b"c=eSws"), "channel binding"),  # `y,,` where the exchange began with `n,,`
        ((b"c=biws", b"c=biw"), "base64"),
        ((b"c=biws", b""), "malformed"),
        ((b"r=clientserver-nonce", b"r=clientserver-noncE"), "nonce"),
        ((b"r=clientserver-nonce", b"r=client"), "nonce"),
        ((b",p=", b",x=changed,p="), WRONG),  # the proof covers extensions too
        ((b",p=", b",p=AAAA,p="), WRONG),
        ((b",p=", b",q="), "malformed"),
        ((b"=", b""), "malformed"),
    ],
)
def test_a_final_message_that_is_not_the_exchange_s(change: tuple[bytes, bytes], reason: str) -> None:
    with pytest.raises(AuthenticationFailed, match=reason):
        final(change)


def test_a_proof_of_another_length_is_refused() -> None:
    exchange = start("SCRAM-SHA-256", ALICE, NONCE)
    exchange.step(b"n,,n=alice,r=client")
    with pytest.raises(AuthenticationFailed, match="length"):
        exchange.step(b"c=biws,r=clientserver-nonce,p=AAAA")


def test_a_recorded_exchange_cannot_be_played_again() -> None:
    client = Client("SCRAM-SHA-256", "alice", "wonderland")
    recorded = client.final(start("SCRAM-SHA-256", ALICE, NONCE).step(client.first()).reply)
    again = start("SCRAM-SHA-256", ALICE, "another-nonce")
    again.step(client.first())
    with pytest.raises(AuthenticationFailed, match="nonce"):
        again.step(recorded)


@pytest.mark.parametrize("mechanism", SCRAM)
def test_a_name_that_is_nobody_s_looks_like_a_user(mechanism: str) -> None:
    def challenge(name: str, credentials: Credentials = ALICE) -> bytes:
        return start(mechanism, credentials, NONCE).step(f"n,,n={name},r=client".encode()).reply

    real, decoy = challenge("alice"), challenge("mallory")
    assert len(decoy) == len(real)  # the same iterations, a salt of the same length
    assert decoy == challenge("mallory") == challenge("mallory", users(alice="changed"))
    assert decoy != challenge("trent")


def test_plain_checks_the_password_against_a_scram_credential() -> None:
    for token in (b"\0alice\0wonderland", b"alice\0alice\0wonderland"):
        step = start("PLAIN", ALICE, NONCE).step(token)
        assert (step.reply, step.done, step.principal) == (b"", True, Principal("alice", "PLAIN"))


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (b"\0alice\0Wonderland", WRONG),
        (b"\0bob\0wonderland", WRONG),
        (b"\0alice\0wonder\x07land", WRONG),
        (b"bob\0alice\0wonderland", "another user"),
        (b"\0alice\0", "PLAIN message"),
        (b"\0\0wonderland", "PLAIN message"),
        (b"\0alice\0wonderland\0", "PLAIN message"),
        (b"alice", "PLAIN message"),
        (b"\0alice\0\xff", "UTF-8"),
        (b"\0alice\0" + b"w" * TOKEN_BYTES_MAX, "longer"),
    ],
)
def test_plain_refuses(token: bytes, reason: str) -> None:
    with pytest.raises(AuthenticationFailed, match=reason):
        start("PLAIN", ALICE, NONCE).step(token)


def test_plain_works_for_a_user_of_either_mechanism() -> None:
    for mechanism in SCRAM:
        credentials = Credentials({"alice": make_credential("wonderland", mechanism, 4096)}, SECRET)
        assert start("PLAIN", credentials, NONCE).step(b"\0alice\0wonderland").done


@pytest.mark.parametrize("mechanism", ["PLAIN", *SCRAM])
def test_an_exchange_that_failed_stays_failed(mechanism: str) -> None:
    exchange = start(mechanism, ALICE, NONCE)
    with pytest.raises(AuthenticationFailed):
        exchange.step(b"garbage")
    with pytest.raises(IllegalSaslState):
        exchange.step(b"\0alice\0wonderland" if mechanism == "PLAIN" else b"n,,n=alice,r=x")


def test_an_exchange_that_succeeded_is_over() -> None:
    exchange = start("PLAIN", ALICE, NONCE)
    exchange.step(b"\0alice\0wonderland")
    with pytest.raises(IllegalSaslState):
        exchange.step(b"\0alice\0wonderland")


def test_an_unknown_mechanism_is_named_as_such() -> None:
    with pytest.raises(UnsupportedMechanism):
        start("GSSAPI", ALICE, NONCE)


def feed(exchange: Exchange, tokens: list[bytes]) -> None:
    for token in tokens:
        try:
            step = exchange.step(token)
        except AuthenticationFailed:
            return
        assert step.principal is None


# Near misses reach further than noise: the alphabet is that of the grammar.
NEAR = st.text("ny,=acmnprs\0 =2C=3Dbiws/+clientserver-nonce", max_size=60).map(str.encode)
FIRST = st.just(b"n,,n=alice,r=client")


@settings(deadline=None)
@given(st.sampled_from(["PLAIN", *SCRAM]), st.lists(st.binary(max_size=200) | NEAR, max_size=4))
def test_garbage_proves_nothing(mechanism: str, tokens: list[bytes]) -> None:
    feed(start(mechanism, ALICE, NONCE), tokens)


@settings(deadline=None)
@given(st.sampled_from(list(SCRAM)), FIRST, st.binary(max_size=200) | NEAR, st.binary(max_size=80))
def test_garbage_after_a_good_beginning_proves_nothing(
    mechanism: str, first: bytes, noise: bytes, proof: bytes
) -> None:
    for last in (noise, b"c=biws,r=clientserver-nonce,p=" + base64.b64encode(proof)):
        feed(ScramExchange(mechanism, ALICE, NONCE), [first, last])
