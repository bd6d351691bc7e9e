"""Key sets: which keys count, for which algorithms, and that the rest is left out with a reason."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import OKPAlgorithm, RSAAlgorithm

from feed.issuer import Signer, jwks
from walstream.errors import ConfigError
from walstream.feed.auth.keysets import KEYS_MAX, parse

GOOD = Signer("EdDSA", "good")
RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})


@pytest.mark.parametrize(
    ("algorithm", "serves"), [("EdDSA", {"EdDSA"}), ("ES256", {"ES256"}), ("ES384", {"ES384"}), ("RS256", RSA)]
)
def test_a_key_serves_what_its_type_can(algorithm: str, serves: set[str]) -> None:
    signer = Signer(algorithm)
    (key,) = parse(jwks(signer), "set").keys
    assert key.algorithms == serves
    assert key.public == signer.private.public_key()


def test_alg_narrows_it() -> None:
    found = parse(jwks(Signer("RS256").jwk(alg="PS512")), "set")
    assert found.keys[0].algorithms == {"PS512"}
    assert not found.find("k1", "RS256")
    assert found.find("k1", "PS512")


def test_find() -> None:
    first, second = Signer("EdDSA", "a"), Signer("ES256", "b")
    found = parse(jwks(first, second), "set")
    assert [key.id for key in found.find("a", "EdDSA")] == ["a"]
    assert not found.find("a", "ES256")
    assert not found.find("c", "EdDSA")
    assert [key.id for key in found.find(None, "ES256")] == ["b"]
    assert len(parse(jwks(first, second, Signer("EdDSA", "c")), "set").find(None, "EdDSA")) == 2


def small_rsa() -> dict[str, Any]:
    return {**RSAAlgorithm.to_jwk(rsa.generate_private_key(65_537, 1024).public_key(), as_dict=True), "kid": "small"}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"kty": "oct", "k": "c2VjcmV0"}, "symmetric"),
        (OKPAlgorithm.to_jwk(GOOD.private, as_dict=True), "private, and published"),
        (GOOD.jwk(use="enc"), "use is not to sign"),
        (GOOD.jwk(key_ops=["encrypt"]), "operations"),
        (GOOD.jwk(key_ops="verify"), "operations"),
        (GOOD.jwk(kid=7), "id is no text"),
        (GOOD.jwk(alg="RS256"), "algorithm does not belong"),
        (GOOD.jwk(alg="HS256"), "algorithm does not belong"),
        (GOOD.jwk(alg="none"), "algorithm does not belong"),
        (GOOD.jwk(crv="X25519"), "curve is not known"),
        (Signer("ES256").jwk(crv="secp256k1"), "curve is not known"),
        (GOOD.jwk(kty="EC"), "cannot be read"),
        (GOOD.jwk(kty="PQC"), "contradict"),
        (GOOD.jwk(x="AAAA"), "cannot be read"),
        (GOOD.jwk(x=7), "cannot be read"),
        (Signer("ES256").jwk(x="A" * 43), "cannot be read"),
        ({"kty": "RSA", "e": "AQAB"}, "cannot be read"),
        (small_rsa(), "1024 bits"),
        ("text", "no object"),
        ({}, "type or curve"),
    ],
)
def test_what_is_left_out(entry: Any, reason: str) -> None:
    found = parse(jwks(GOOD, entry), "set")
    assert [key.id for key in found.keys] == ["good"]
    assert len(found.left_out) == 1
    assert found.left_out[0].startswith("key 2: ")
    assert reason in found.left_out[0]
    with pytest.raises(ConfigError, match="no key that can verify") as caught:
        parse(jwks(entry), "set")
    assert reason in caught.value.message


def test_two_keys_with_one_id_are_told() -> None:
    found = parse(jwks(Signer("EdDSA", "a"), Signer("EdDSA", "a"), Signer("ES256", "a")), "set")
    assert found.left_out == ("two keys have the same id, so that neither is used",)
    assert len(found.find("a", "EdDSA")) == 2
    assert len(found.find("a", "ES256")) == 1


@pytest.mark.parametrize(
    "document", [b"", b"{", b"[]", b"{}", b'{"keys": {}}', b'{"keys": []}', b"\xff", b"[" * 100_000, b"null"]
)
def test_what_is_no_key_set(document: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document, "there/jwks.json")
    assert "there/jwks.json" in caught.value.message
    assert '"keys"' in caught.value.hint


def test_too_many_keys() -> None:
    with pytest.raises(ConfigError, match=f"{KEYS_MAX + 1} keys"):
        parse(jwks(*[GOOD.jwk()] * (KEYS_MAX + 1)), "set")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
members = st.sampled_from(["kty", "crv", "x", "y", "n", "e", "kid", "alg", "use", "key_ops", "d"])
words = st.sampled_from(["OKP", "EC", "RSA", "Ed25519", "P-256", "sig", "EdDSA", "AQAB", "A" * 43])


@given(st.lists(st.dictionaries(members, words | json_values) | json_values, max_size=3))
def test_garbage_is_left_out_or_refused(entries: list[Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert parse(json.dumps({"keys": entries}).encode(), "set").keys
