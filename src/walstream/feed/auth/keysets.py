"""A key set as its issuer publishes it (JWKS, RFC 7517), and which of its keys may have signed a token.

Owns the bond between a key and its algorithms: it follows from the key's type and curve, and from its `alg` if it has
one, never from what a token says. Where the set comes from and how long it counts is told in `keys`. Sans-IO.

What cannot verify is left out and named, because an issuer may publish keys for other uses beside ours: a set is
refused only when it is no key set, or nothing in it can be used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWTError
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from walstream.errors import ConfigError

PublicKey = Ed25519PublicKey | Ed448PublicKey | EllipticCurvePublicKey | RSAPublicKey

DEVELOPMENT_NAME: Final = "feed-jwks.json"
"""The file of the key set that `walstream token` makes, whose only issuer is this machine."""

KEYS_MAX: Final = 100
RSA_BITS_MIN: Final = 2048
RSA_BITS_MAX: Final = 16_384
"""Checking a signature takes longer with the square of the size: a limit is kept on what a stranger's call can cost."""

_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_BY_CURVE: Final = {
    "Ed25519": frozenset({"EdDSA"}),
    "Ed448": frozenset({"EdDSA"}),
    "P-256": frozenset({"ES256"}),
    "P-384": frozenset({"ES384"}),
    "P-521": frozenset({"ES512"}),
}


@dataclass(frozen=True, slots=True)
class Key:
    """A public key, and the algorithms whose signatures it can verify."""

    id: str
    """Its `kid`; empty when it has none."""
    algorithms: frozenset[str]
    public: PublicKey = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeySet:
    """The keys that count now, and why others in the document do not."""

    keys: tuple[Key, ...] = ()
    left_out: tuple[str, ...] = ()
    """For each key that cannot be used, the reason, without anything of the key."""

    def find(self, key_id: str | None, algorithm: str) -> tuple[Key, ...]:
        """Return the keys that may have signed a token with this header; without an id, all that fit the algorithm."""
        return tuple(key for key in self.keys if algorithm in key.algorithms and (key_id is None or key.id == key_id))


def parse(document: bytes, name: str) -> KeySet:
    """Read a key set that is known by this name; raise ConfigError when it is none, or has no key that can verify."""
    try:
        given = json.loads(document)
    except (ValueError, RecursionError):
        raise ConfigError(f"The key set {name} is not valid JSON.", _EXPECTED) from None
    listed = given.get("keys") if isinstance(given, dict) else None
    if not isinstance(listed, list):
        raise ConfigError(f"The key set {name} has no list of keys.", _EXPECTED)
    if len(listed) > KEYS_MAX:
        raise ConfigError(f"The key set {name} has {len(listed)} keys.", f"More than {KEYS_MAX} are not looked at.")
    keys, left_out = [], []
    for number, entry in enumerate(listed, start=1):
        try:
            keys.append(_key(entry))
        except _Unfit as reason:
            left_out.append(f"key {number}: {reason}")
    if not keys:
        why = f" ({left_out[0]})" if left_out else ""
        raise ConfigError(f"The key set {name} has no key that can verify a token{why}.", _EXPECTED)
    return KeySet(tuple(keys), (*left_out, *_doubles(keys)))


_EXPECTED: Final = 'A key set looks like {"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "…", "x": "…"}]}.'


class _Unfit(Exception):
    """Why a key cannot be used."""


def _key(entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise _Unfit("it is no object")
    if entry.get("kty") == "oct":
        raise _Unfit("it is symmetric, so that whoever can check a token could make one")
    if "d" in entry:
        # Everybody who can read the document can sign with it: what it signs proves nothing.
        raise _Unfit("it is private, and published")
    if entry.get("use", "sig") != "sig":
        raise _Unfit("its use is not to sign")
    operations = entry.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        raise _Unfit("its operations are not to verify")
    key_id = entry.get("kid", "")
    if not isinstance(key_id, str):
        raise _Unfit("its id is no text")
    return Key(key_id, _algorithms(entry), _public(entry))


def _algorithms(entry: Mapping[str, Any]) -> frozenset[str]:
    """Return what the type of the key can do, narrowed to its `alg`."""
    possible = _RSA if entry.get("kty") == "RSA" else _BY_CURVE.get(str(entry.get("crv")), frozenset())
    if not possible:
        raise _Unfit("its type or curve is not known here")
    if "alg" not in entry:
        return possible
    narrowed = possible & {str(entry["alg"])}
    if not narrowed:
        raise _Unfit("its algorithm does not belong to its type")
    return narrowed


def _public(entry: Mapping[str, Any]) -> PublicKey:
    try:
        match entry.get("kty"):
            case "OKP":
                key: object = OKPAlgorithm.from_jwk(dict(entry))
            case "EC":
                key = ECAlgorithm.from_jwk(dict(entry))
            case "RSA":
                key = RSAAlgorithm.from_jwk(dict(entry))
            case _:
                key = None
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise _Unfit("it cannot be read as what its type says") from None
    if not isinstance(key, PublicKey):
        raise _Unfit("its type and its curve contradict each other")
    if isinstance(key, RSAPublicKey) and not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        raise _Unfit(f"it has {key.key_size} bits, and from {RSA_BITS_MIN} to {RSA_BITS_MAX} are accepted")
    return key


def _doubles(keys: list[Key]) -> Iterator[str]:
    """Name ids that two keys of one algorithm have: a token of theirs cannot be told apart, and is refused."""
    seen: set[tuple[str, str]] = set()
    for key in keys:
        names = {(key.id, algorithm) for algorithm in key.algorithms}
        if key.id and names & seen:
            yield "two keys have the same id, so that neither is used"
        seen |= names
