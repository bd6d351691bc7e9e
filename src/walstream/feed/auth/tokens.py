"""Tokens for development: a local Ed25519 key that signs them, and the key set by which a feed believes them.

Owns two files: the private key, for its owner alone, and `feed-jwks.json` beside it, for everybody. No feed needs this
module: it reads the key set like that of any issuer.

The invariant: at every moment, also after a crash, the key that signs is in the key set. So a new public key is durable
there before the private one takes its place, and old ones stay until they are pruned.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from walstream.config import FeedAuthConfig
from walstream.errors import UsageError
from walstream.feed.auth.identity import Role
from walstream.feed.auth.keysets import DEVELOPMENT_NAME

ALGORITHM: Final = "EdDSA"
EXPIRES_IN_S_MAX: Final = 30 * 24 * 60 * 60
"""Who holds a token needs no more than that, and nobody can take it back before it expires."""

Jwk = dict[str, Any]

_MAKE: Final = "`walstream token mint` makes one."


@dataclass(frozen=True, slots=True)
class Wish:
    """What a token is to say."""

    subject: str
    role: Role
    tenant: str = ""
    expires_in_s: int = 3600

    def check(self) -> None:
        """Raise UsageError unless a feed would believe such a token."""
        if not self.subject:
            raise UsageError("A token needs a subject.", "Name who will use it with --subject NAME.")
        if self.role == "replication" and not self.tenant:
            raise UsageError("The role replication needs a tenant.", "Name it with --tenant, or take --role admin.")
        if self.role == "admin" and self.tenant:
            raise UsageError("The role admin reads all tenants.", "Leave --tenant out, or take --role replication.")
        if not 1 <= self.expires_in_s <= EXPIRES_IN_S_MAX:
            raise UsageError(
                f"A token cannot last for {self.expires_in_s:,} seconds.",
                f"From 1 second to {EXPIRES_IN_S_MAX // 86_400} days are possible.",
            )


class LocalKeys:
    """The key file of a developer, and the key set beside it."""

    def __init__(self, key: Path) -> None:
        self.key = key
        self.jwks = key.with_name(DEVELOPMENT_NAME)

    def mint(self, wish: Wish, config: FeedAuthConfig, now_s: float) -> tuple[str, dict[str, Any]]:
        """Return a token and what it says, for a feed with this configuration; make the key if there is none."""
        wish.check()
        private = self._signing_key()
        claims: dict[str, Any] = {
            "sub": wish.subject,
            "aud": config.audience,
            **({"iss": config.issuer} if config.issuer else {}),
            config.role_claim: wish.role,
            **({config.tenant_claim: wish.tenant} if wish.tenant else {}),
            "iat": int(now_s),
            "exp": int(now_s) + wish.expires_in_s,
            "jti": secrets.token_urlsafe(12),
        }
        return jwt.encode(claims, private, ALGORITHM, {"kid": _key_id(private.public_key())}), claims

    def public(self) -> list[Jwk]:
        """Return the keys of the key set, newest first. Raises UsageError when there is none."""
        if self.key.exists():
            self._signing_key()
        if published := self._published():
            return published
        raise UsageError(f"There is no key {self.key} yet.", _MAKE)

    def rotate(self) -> Jwk:
        """Make a new key, which signs from now on; the old public ones stay. Returns the new public one."""
        with self._locked():
            if self.key.exists():
                self._publish(_jwk(self._load().public_key()))
            return _jwk(self._make().public_key())

    def prune(self) -> int:
        """Take all public keys but the one that signs out of the key set, and return how many those were."""
        if not self.key.exists():
            raise UsageError(f"There is no key {self.key} yet.", _MAKE)
        with self._locked():
            current = _jwk(self._load().public_key())
            others = [entry for entry in self._published() if entry.get("kid") != current["kid"]]
            _save(self.jwks, _document([current]), 0o644)
            return len(others)

    def _signing_key(self) -> Ed25519PrivateKey:
        """Return the private key, made if there is none, and see to it that its public half is published."""
        with self._locked():
            if not self.key.exists():
                return self._make()
            private = self._load()
            self._publish(_jwk(private.public_key()))
            return private

    def _make(self) -> Ed25519PrivateKey:
        """Make the key that signs from now on: published first, used then."""
        private = Ed25519PrivateKey.generate()
        self._publish(_jwk(private.public_key()))
        _save(self.key, _pem(private), 0o600)
        return private

    def _load(self) -> Ed25519PrivateKey:
        try:
            mode = stat.S_IMODE(self.key.stat().st_mode)
            pem = self.key.read_bytes()
        except OSError as error:
            raise UsageError(f"The key {self.key} cannot be read: {error.strerror}.") from None
        if mode & 0o077:
            raise UsageError(
                f"The key {self.key} can be read by others (mode {mode:o}).",
                f"chmod 600 {self.key}; if somebody may have read it: `walstream token rotate` and `token prune`.",
            )
        try:
            private = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise UsageError(f"{self.key} holds no Ed25519 key.", "Name another file with --key.")
        return private

    def _published(self) -> list[Jwk]:
        try:
            document = json.loads(self.jwks.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError):
            document = None
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            # It may hold keys that tokens out there are signed with: that is for its owner to decide.
            raise UsageError(f"{self.jwks} is no key set.", "Mend it, or move it away: a new one is then made.")
        return entries

    def _publish(self, entry: Jwk) -> None:
        published = self._published()
        if entry["kid"] not in [other.get("kid") for other in published]:
            _save(self.jwks, _document([entry, *published]), 0o644)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep others who change the files out."""
        folder = self.key.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UsageError(f"The folder {folder} cannot be used: {error.strerror}.") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def decoded(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return header and claims of a token, of which nothing is verified. Raises UsageError."""
    try:
        found = jwt.decode_complete(token.strip(), options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise UsageError("This is no JSON Web Token.", "It has three parts, with dots between.") from None
    return found["header"], found["payload"]


def _jwk(public: Ed25519PublicKey) -> Jwk:
    return {**_members(public), "kid": _key_id(public), "alg": ALGORITHM, "use": "sig"}


def _members(public: Ed25519PublicKey) -> dict[str, str]:
    return {"crv": "Ed25519", "kty": "OKP", "x": _base64(public.public_bytes(Encoding.Raw, PublicFormat.Raw))}


def _key_id(public: Ed25519PublicKey) -> str:
    """Return the key's thumbprint (RFC 7638): the same key has the same id wherever it is published."""
    members = json.dumps(_members(public), sort_keys=True, separators=(",", ":"))
    return _base64(hashlib.sha256(members.encode()).digest())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _pem(private: Ed25519PrivateKey) -> bytes:
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _document(entries: list[Jwk]) -> bytes:
    return (json.dumps({"keys": entries}, indent=2) + "\n").encode()


def _save(path: Path, contents: bytes, mode: int) -> None:
    """Replace a file as a whole, durably, and never readable by more than its mode says."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(handle)
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def summary(header: Mapping[str, Any], claims: Mapping[str, Any], config: FeedAuthConfig) -> dict[str, Any]:
    """Return what a person wants to know of a token, under names that end in their unit."""

    def milliseconds(name: str) -> int | None:
        value = claims.get(name)
        return int(value * 1000) if isinstance(value, int | float) and abs(value) < 2**40 else None

    return {
        "subject": claims.get("sub"),
        "role": claims.get(config.role_claim),
        "tenant": claims.get(config.tenant_claim),
        "audience": claims.get("aud"),
        "issuer": claims.get("iss"),
        "expires_at_ms": milliseconds("exp"),
        "not_before_ms": milliseconds("nbf"),
        "issued_at_ms": milliseconds("iat"),
        "token_id": claims.get("jti"),
        "algorithm": header.get("alg"),
        "key_id": header.get("kid"),
        "others": sorted(set(claims) - {*_REGISTERED, config.role_claim, config.tenant_claim}),
    }


_REGISTERED: Final = frozenset({"sub", "aud", "iss", "exp", "nbf", "iat", "jti"})
