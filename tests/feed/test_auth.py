"""Tokens against the feed's authentication: honest ones, every known forgery, and garbage."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from feed.issuer import NOW_S, Clock, JwksServer, Signer, assembled, body, encoded, jwks
from walstream.config import FeedAuthConfig, FeedConfig
from walstream.error_codes import codes
from walstream.errors import AuthenticationFailed, NotAuthorized, TokenExpired
from walstream.feed.auth.auth import TOKEN_BYTES_MAX, Authenticator, Identity, bearer_token
from walstream.feed.auth.keys import FileSource, Keys, UrlSource

ED, EC, RSA = Signer("EdDSA", "ed"), Signer("ES256", "ec"), Signer("RS256", "rsa")
IDENTITY = Identity("replica-7", "replication", "acme", NOW_S + 630, "t-1")


class Fixed:
    """A source that never changes, for tests of tokens alone."""

    name = "fixed"

    def __init__(self, document: bytes) -> None:
        self.document = document

    def read(self) -> bytes:
        return self.document

    def has_changed(self) -> bool:
        return False


def authenticator(*keys: Any, now_s: float = NOW_S, **settings: Any) -> Authenticator:
    config = FeedAuthConfig(jwks="fixed", **settings)
    return Authenticator(config, Keys(Fixed(jwks(*(keys or (ED, EC, RSA)))), 300, 10), Clock(now_s))


async def refuse(token: str, *keys: Any, **settings: Any) -> AuthenticationFailed:
    with pytest.raises(AuthenticationFailed) as caught:
        await authenticator(*keys, **settings).verify(token)
    assert codes(caught.value).grpc == "UNAUTHENTICATED"
    # Nothing of a token that was not believed comes back, and nothing of a key.
    for part in token.split("."):
        assert len(part) < 8 or part not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("jwks_name", "issuer", "warns"),
    [
        ("https://issuer.example/jwks.json", "", True),
        ("keys.json", "", True),
        ("https://issuer.example/jwks.json", "https://issuer.example", False),
        (".walstream/feed-jwks.json", "", False),
    ],
)
async def test_a_feed_that_believes_any_issuer_says_so(jwks_name: str, issuer: str, warns: bool) -> None:
    config = FeedAuthConfig(jwks=jwks_name, issuer=issuer)
    with structlog.testing.capture_logs() as lines:
        await Authenticator(config, Keys(Fixed(jwks(ED)), 300, 10)).open()
    assert ("tokens of any issuer are believed" in [line["event"] for line in lines]) == warns


class TestHonest:
    @pytest.mark.parametrize("signer", [ED, EC, RSA], ids=["EdDSA", "ES256", "RS256"])
    async def test_each_default_algorithm(self, signer: Signer) -> None:
        assert await authenticator().verify(signer.token()) == IDENTITY

    @pytest.mark.parametrize("algorithm", ["ES384", "PS256"])
    async def test_others_when_configured(self, algorithm: str) -> None:
        signer = Signer(algorithm)
        assert await authenticator(signer, algorithms=(algorithm,)).verify(signer.token()) == IDENTITY
        await refuse(signer.token(), signer)

    async def test_several_audiences(self) -> None:
        assert await authenticator().verify(ED.token(aud=["other", "walstream"])) == IDENTITY

    async def test_issuer(self) -> None:
        token = ED.token(iss="https://auth.example.org")
        assert await authenticator().verify(token)
        assert await authenticator(issuer="https://auth.example.org").verify(token)

    async def test_without_key_id_when_one_key_fits(self) -> None:
        signer = Signer("EdDSA", None)
        assert await authenticator(signer, EC, RSA).verify(signer.token()) == IDENTITY
        assert await authenticator(signer.jwk(kid="named"), EC).verify(signer.token()) == IDENTITY


class TestForgedAlgorithm:
    @pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", None, 1, ["EdDSA"], {"a": 1}])
    async def test_no_signature(self, algorithm: object) -> None:
        for signature in (b"", b"x"):
            token = assembled({"alg": algorithm, "kid": "ed"}, body(role="admin"), lambda _, made=signature: made)
            assert "algorithm" in (await refuse(token)).message

    async def test_algorithm_missing(self) -> None:
        await refuse(assembled({"typ": "JWT", "kid": "ed"}, body(), lambda _: b""))

    @pytest.mark.parametrize("signer", [ED, EC, RSA], ids=["EdDSA", "ES256", "RS256"])
    @pytest.mark.parametrize("algorithm", ["HS256", "HS512"])
    async def test_public_key_as_secret(self, signer: Signer, algorithm: str) -> None:
        public = signer.private.public_key()
        digest = hashlib.sha256 if algorithm == "HS256" else hashlib.sha512
        secrets = [
            public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).strip(),
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
            json.dumps(signer.jwk()).encode(),
            jwks(signer),
        ]
        for secret in secrets:
            header = {"alg": algorithm, "kid": signer.key_id}
            token = assembled(header, body(role="admin"), lambda data, key=secret: hmac.digest(key, data, digest))
            assert "algorithm" in (await refuse(token)).message

    async def test_rs256_token_against_an_ec_key(self) -> None:
        def sign(data: bytes) -> bytes:
            return RSA.private.sign(data, padding.PKCS1v15(), SHA256())

        token = assembled({"alg": "RS256", "kid": "ec"}, body(), sign)
        assert "not known here" in (await refuse(token)).message

    async def test_each_algorithm_against_each_other_key(self) -> None:
        for signer in (ED, EC, RSA):
            for other in (ED, EC, RSA):
                if other is not signer:
                    await refuse(signer.token({"kid": other.key_id}))

    async def test_another_curve_than_the_algorithm_says(self) -> None:
        key = Signer("ES384", "big")
        signature = key.private.sign(b"x", ec.ECDSA(SHA256()))
        await refuse(assembled({"alg": "ES256", "kid": "big"}, body(), lambda _: signature), key)

    async def test_an_algorithm_that_the_key_is_not_for(self) -> None:
        narrowed = RSA.jwk(alg="PS256")
        await refuse(RSA.token(), narrowed, algorithms=("RS256", "PS256"))

    async def test_an_algorithm_that_is_not_configured(self) -> None:
        error = await refuse(RSA.token(), algorithms=("EdDSA",))
        assert error.hint == "Accepted: EdDSA."

    async def test_a_key_that_the_token_brings_along(self) -> None:
        mine = Signer("EdDSA", "ed")
        for header in ({"jwk": mine.jwk()}, {"jku": "http://127.0.0.1:1/"}, {"x5u": "http://127.0.0.1:1/"}):
            assert "signature is wrong" in (await refuse(mine.token(header))).message


class TestSignature:
    @pytest.mark.parametrize("signer", [ED, EC, RSA], ids=["EdDSA", "ES256", "RS256"])
    async def test_of_another_key_with_the_same_id(self, signer: Signer) -> None:
        assert "signature is wrong" in (await refuse(Signer(signer.algorithm, signer.key_id).token())).message

    async def test_claims_that_were_changed(self) -> None:
        header, _, signature = ED.token().split(".")
        await refuse(f"{header}.{encoded(body(role='admin'))}.{signature}")

    async def test_header_that_was_changed(self) -> None:
        _, claims, signature = ED.token().split(".")
        await refuse(f"{encoded({'alg': 'EdDSA', 'kid': 'ed', 'typ': 'other'})}.{claims}.{signature}")

    async def test_every_byte_counts(self) -> None:
        token = ED.token()
        signature = len(token) - token.rindex(".")
        for place in range(len(token) - signature + 1, len(token)):
            other = "A" if token[place] != "A" else "B"
            await refuse(token[:place] + other + token[place + 1 :])

    @pytest.mark.parametrize("part", [0, 1, 2])
    async def test_parts_missing(self, part: int) -> None:
        parts = ED.token().split(".")
        await refuse(".".join([*parts[:part], "", *parts[part + 1 :]]))
        await refuse(".".join(parts[:part] + parts[part + 1 :]))


class TestClaims:
    async def test_expired(self) -> None:
        with pytest.raises(TokenExpired):
            await authenticator().verify(ED.token(exp=NOW_S - 31))
        assert await authenticator().verify(ED.token(exp=NOW_S - 29))

    async def test_not_yet(self) -> None:
        assert "not count yet" in (await refuse(ED.token(nbf=NOW_S + 31))).message
        assert await authenticator().verify(ED.token(nbf=NOW_S + 30))

    @pytest.mark.parametrize("claim", ["exp", "sub", "aud"])
    async def test_missing(self, claim: str) -> None:
        await refuse(ED.token(**{claim: None}))

    @pytest.mark.parametrize(
        "audience", ["other", "", ["a", "b"], [], 7, {"walstream": 1}, ["walstream", 7], "walstream "]
    )
    async def test_audience(self, audience: object) -> None:
        # Signed past PyJWT, which refuses to write some of these.
        token = assembled({"alg": "EdDSA", "kid": "ed"}, body(aud=audience), ED.private.sign)
        await refuse(token)

    @pytest.mark.parametrize("issuer", [None, "https://evil.example.org", "", 7, ["https://auth.example.org"]])
    async def test_issuer(self, issuer: object) -> None:
        token = assembled({"alg": "EdDSA", "kid": "ed"}, body(iss=issuer), ED.private.sign)
        await refuse(token, issuer="https://auth.example.org")

    async def test_what_the_feed_expects_is_told_to_who_has_a_real_token(self) -> None:
        error = await refuse(ED.token(aud="other"), issuer="me")
        assert error.hint == "Its aud has to be 'walstream', iss 'me'."

    @pytest.mark.parametrize("claims", [b"", b"[]", b"7", b"null", b"{", b"\xff", b"[" * 10_000])
    async def test_no_object(self, claims: bytes) -> None:
        signed = f"{encoded({'alg': 'EdDSA', 'kid': 'ed'})}.{encoded(claims)}"
        await refuse(f"{signed}.{encoded(ED.private.sign(signed.encode()))}")

    async def test_no_rights(self) -> None:
        for changes in ({"role": None}, {"role": "guest"}, {"tenant": None}):
            with pytest.raises(NotAuthorized) as caught:
                await authenticator().verify(ED.token(**changes))
            assert codes(caught.value).grpc == "PERMISSION_DENIED"


class TestHeader:
    @pytest.mark.parametrize("crit", [["exp"], [], "exp", ["b64"], None])
    async def test_crit(self, crit: object) -> None:
        token = assembled({"alg": "EdDSA", "kid": "ed", "crit": crit}, body(), ED.private.sign)
        await refuse(token)

    async def test_crit_that_the_library_knows(self) -> None:
        header = {"alg": "EdDSA", "kid": "ed", "crit": ["b64"], "b64": True}
        assert "(crit)" in (await refuse(assembled(header, body(), ED.private.sign))).message

    async def test_detached_payload(self) -> None:
        await refuse(assembled({"alg": "EdDSA", "kid": "ed", "b64": False}, body(), ED.private.sign))

    @pytest.mark.parametrize("key_id", [7, ["ed"], {}, True])
    async def test_key_id_that_is_no_text(self, key_id: object) -> None:
        await refuse(assembled({"alg": "EdDSA", "kid": key_id}, body(), ED.private.sign))

    async def test_no_key_id_and_several_keys(self) -> None:
        signer = Signer("EdDSA", None)
        assert "does not say by which key" in (await refuse(signer.token(), signer, ED)).message
        await refuse(signer.token(), EC)

    async def test_two_keys_with_one_id(self) -> None:
        await refuse(ED.token(), ED, Signer("EdDSA", "ed"))

    async def test_size(self) -> None:
        padding_bytes = TOKEN_BYTES_MAX // 2
        assert await authenticator().verify(ED.token(padding="x" * padding_bytes))
        assert "larger than" in (await refuse(ED.token(padding="x" * TOKEN_BYTES_MAX))).message
        at_most = "x" * TOKEN_BYTES_MAX
        assert "no JSON Web Token" in (await refuse(at_most)).message
        assert "larger than" in (await refuse(at_most + "x")).message


class TestRotation:
    async def test_file(self, tmp_path: Path) -> None:
        first, second = Signer("EdDSA", "first"), Signer("EdDSA", "second")
        file = tmp_path / "jwks.json"
        save(file, jwks(first))
        checked = Authenticator(FeedAuthConfig(), Keys(FileSource(file), 300, 10), Clock(NOW_S))
        await checked.open()
        assert await checked.verify(first.token())
        with pytest.raises(AuthenticationFailed, match="not known here"):
            await checked.verify(second.token())
        save(file, jwks(first, second))
        assert await checked.verify(second.token()) == await checked.verify(first.token())
        save(file, jwks(second))
        assert await checked.verify(second.token())
        with pytest.raises(AuthenticationFailed, match="not known here"):
            await checked.verify(first.token())

    async def test_address(self) -> None:
        first, second = Signer("EdDSA", "first"), Signer("RS256", "second")
        with JwksServer(jwks(first)) as server:
            clock = Clock()
            checked = Authenticator(FeedAuthConfig(), Keys(UrlSource(server.url), 300, 10, clock), Clock(NOW_S))
            await checked.open()
            server.document = jwks(first, second)
            with pytest.raises(AuthenticationFailed, match="not known here"):
                await checked.verify(second.token())
            clock.now_s = 10
            assert await checked.verify(second.token()) == await checked.verify(first.token())
            assert server.requests == 2
            server.stop()
            clock.now_s = 1_000
            assert await checked.verify(second.token())

    async def test_from_the_configuration(self, tmp_path: Path) -> None:
        file = tmp_path / "jwks.json"
        save(file, jwks(ED))
        checked = Authenticator.of(FeedConfig(auth=FeedAuthConfig(jwks=str(file))))
        await checked.open()
        assert checked.keys.age_s < 60
        # By the real clock.
        with pytest.raises(TokenExpired):
            await checked.verify(ED.token(exp=1_000_000_000))
        assert (await checked.verify(ED.token(exp=4_000_000_000))).subject == "replica-7"


def save(file: Path, document: bytes) -> None:
    beside = file.with_suffix(".new")
    beside.write_bytes(document)
    beside.replace(file)


class TestMetadata:
    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
    @pytest.mark.parametrize("name", ["authorization", "Authorization"])
    def test_found_whatever_its_letters(self, name: str, scheme: str) -> None:
        assert bearer_token([("user-agent", "x"), (name, f"{scheme} a.b.c")]) == "a.b.c"

    def test_bytes_and_spaces(self) -> None:
        assert bearer_token([("authorization", b"Bearer   a.b.c ")]) == "a.b.c"

    @pytest.mark.parametrize(
        "metadata",
        [
            [],
            [("authorization-bin", b"Bearer a")],
            [("authorization", "")],
            [("authorization", "Bearer")],
            [("authorization", "Bearer ")],
            [("authorization", "a.b.c")],
            [("authorization", "Basic YTpi")],
            [("authorization", "Bearera.b.c")],
            [("authorization", "Bearer a"), ("authorization", "Bearer b")],
        ],
    )
    def test_refused(self, metadata: list[tuple[str, str | bytes]]) -> None:
        with pytest.raises(AuthenticationFailed) as caught:
            bearer_token(metadata)
        assert "authorization: Bearer" in caught.value.hint
        assert "YTpi" not in str(caught.value)

    async def test_to_the_end(self) -> None:
        assert await authenticator().authenticate([("authorization", f"Bearer {ED.token()}")]) == IDENTITY


CHECKED = authenticator()
pieces = st.binary(max_size=60).map(encoded) | st.text(max_size=60)
headers = st.fixed_dictionaries(
    {},
    optional={
        "alg": st.sampled_from(["EdDSA", "ES256", "RS256", "HS256", "none"]) | st.text() | st.integers(),
        "kid": st.sampled_from(["ed", "ec", "rsa"]) | st.text() | st.none() | st.integers(),
        "typ": st.text() | st.none(),
        "crit": st.lists(st.text()),
        "b64": st.booleans(),
    },
)
claims = st.dictionaries(
    st.sampled_from(["sub", "aud", "exp", "nbf", "iat", "role", "tenant", "iss", "jti"]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
)


class TestGarbage:
    @settings(max_examples=300)
    @given(
        st.text()
        | st.tuples(pieces, pieces, pieces).map(".".join)
        | st.tuples(headers.map(encoded), claims.map(encoded), pieces).map(".".join)
        | st.tuples(st.text(), st.text()).map("".join)
    )
    def test_is_refused_and_nothing_else(self, token: str) -> None:
        with pytest.raises(AuthenticationFailed):
            asyncio.run(CHECKED.verify(token))

    @settings(max_examples=200)
    @given(claims)
    def test_signed_garbage_is_refused_or_an_identity_with_one_tenant(self, said: dict[str, Any]) -> None:
        token = assembled({"alg": "EdDSA", "kid": "ed"}, {**body(), **said}, ED.private.sign)
        try:
            identity = asyncio.run(CHECKED.verify(token))
        except (AuthenticationFailed, NotAuthorized):
            return
        assert identity.subject
        assert bool(identity.tenant) == (identity.role == "replication")
        assert identity.expires_at_s > NOW_S

    @settings(max_examples=200)
    @given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
    def test_metadata(self, value: str) -> None:
        with pytest.raises(AuthenticationFailed):
            asyncio.run(CHECKED.authenticate([("authorization", f"Bearer {value}")]))

    @pytest.mark.parametrize(
        "header", [b"[" * 9_000, b'{"alg": ' * 1_000, b'{"alg": NaN}', b'{"alg": ' + b"9" * 8_000 + b"}", b'"\\ud800"']
    )
    async def test_json_that_breaks_parsers(self, header: bytes) -> None:
        await refuse(f"{encoded(header)}.{encoded(body())}.x")


def test_a_token_of_pyjwt_is_one_of_ours() -> None:
    # What the tests put together by hand is what a library would have made.
    by_hand = assembled({"alg": "EdDSA", "kid": "ed"}, body(), ED.private.sign)
    assert jwt.decode(by_hand, ED.private.public_key(), ["EdDSA"], options={"verify_exp": False, "verify_aud": False})
