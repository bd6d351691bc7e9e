"""SASL as the server sees it: PLAIN (RFC 4616), SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677).

An exchange is a pure state machine: `step(token)` takes what the client sent and returns what to answer, until a step
is done and names the principal. Whatever the client sends, the only exception is AuthenticationFailed. Randomness (the
nonce) enters as an argument; nothing here knows of connections, and the rule that PLAIN needs TLS is kept by
`security`, which decides what is offered where.

One thing is promised beyond the RFCs: a name that is not a user's goes through the same exchange as one that is, and
fails only at the end, in the same words. So nobody learns from the node who its users are.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from walstream.errors import AuthenticationFailed, IllegalSaslState, UnsupportedMechanism
from walstream.node.acl import Principal
from walstream.node.credentials import HASHES, PLAIN, Credential, Credentials, from_base64, saslprep, to_base64

TOKEN_BYTES_MAX = 8 * 1024
"""The longest message of an exchange. An honest one is a few hundred bytes; nothing longer than this is parsed."""

_WRONG = "The user name or the password is wrong."

# The grammar of RFC 5802, section 7. Attributes are separated by commas and none can hold one, so matching is linear.
_NONCE = r"[\x21-\x2b\x2d-\x7e]+"
_EXTENSIONS = r"(?:,[A-Za-z]+=[^,\0]+)*"
_CLIENT_FIRST = re.compile(
    r"(?P<header>(?P<binding>n|y|p=[A-Za-z0-9.-]+),(?:a=(?P<authorization>[^,\0]+))?,)"
    rf"(?P<bare>(?P<required>m=[^,\0]+,)?n=(?P<name>[^,\0]+),r=(?P<nonce>{_NONCE}){_EXTENSIONS})"
)
_CLIENT_FINAL = re.compile(
    rf"(?P<without_proof>c=(?P<header>[A-Za-z0-9+/=]+),r=(?P<nonce>{_NONCE}){_EXTENSIONS}),p=(?P<proof>[A-Za-z0-9+/=]+)"
)


@dataclass(frozen=True, slots=True)
class Step:
    """What one token led to: the bytes to answer and, when the exchange is over, who the client is."""

    reply: bytes
    done: bool = False
    principal: Principal | None = None


class Exchange(Protocol):
    """One authentication on its way."""

    mechanism: str

    def step(self, token: bytes) -> Step:
        """Take the client's next token; raise AuthenticationFailed when it proves nothing."""
        ...


def start(mechanism: str, credentials: Credentials, nonce: str) -> Exchange:
    """Begin an exchange; the nonce is fresh, random and printable without commas."""
    if mechanism == PLAIN:
        return PlainExchange(credentials)
    if mechanism in HASHES:
        return ScramExchange(mechanism, credentials, nonce)
    raise UnsupportedMechanism(f"The SASL mechanism {mechanism!r} is not known.")


class PlainExchange:
    """One message with the password in it, checked against what SCRAM keeps of it."""

    def __init__(self, credentials: Credentials) -> None:
        self.mechanism = PLAIN
        self._credentials = credentials
        self._over = False

    def step(self, token: bytes) -> Step:
        """Check the password; slow by intent, so call it where it holds nobody up."""
        if self._over:
            raise IllegalSaslState("The exchange is over.")
        self._over = True
        parts = _decode(token).split("\0")
        if len(parts) != 3 or not parts[1] or not parts[2]:
            raise AuthenticationFailed("The PLAIN message is not an authorization name, a name and a password.")
        name, password = _prepare(parts[1]), _prepare(parts[2])
        _require_own_name(parts[0], name)
        credential, is_known = self._credentials.find(name, PLAIN)
        # The derivation runs for unknown names too: its time would tell them apart.
        if not (credential.matches(password) and is_known):
            raise AuthenticationFailed(_WRONG)
        return Step(b"", done=True, principal=Principal(name, PLAIN))


class ScramExchange:
    """Two messages each way; the password itself never travels.

    client-first → server-first → client-final → server-final. The proof covers all of the first three, so that nothing
    in them can be changed on the way.
    """

    def __init__(self, mechanism: str, credentials: Credentials, nonce: str) -> None:
        assert re.fullmatch(_NONCE, nonce), "the server's own nonce is printable and has no comma"
        self.mechanism = mechanism
        self._credentials = credentials
        self._nonce = nonce
        self._expects: Callable[[str], Step] | None = self._begin

    def step(self, token: bytes) -> Step:
        """Take client-first, then client-final."""
        handle, self._expects = self._expects, None
        if handle is None:
            raise IllegalSaslState("The exchange is over.")
        return handle(_decode(token))

    def _begin(self, text: str) -> Step:
        first = _CLIENT_FIRST.fullmatch(text)
        if first is None:
            raise AuthenticationFailed("The first SCRAM message is malformed.")
        # `y` is a client that could bind and was not offered it. That is the truth here, so it is no sign of an attack.
        if first["binding"] not in ("n", "y"):
            raise AuthenticationFailed("The client asks for channel binding, which is not offered.")
        if first["required"]:
            raise AuthenticationFailed("The client requires a SCRAM extension that is not offered.")
        name = _prepare(_unescape(first["name"]))
        _require_own_name(_unescape(first["authorization"] or ""), name)
        credential, is_known = self._credentials.find(name, self.mechanism)
        nonce = first["nonce"] + self._nonce
        begun = _Begun(
            name=name,
            credential=credential,
            is_known=is_known,
            nonce=nonce,
            header=first["header"],
            client_first_bare=first["bare"],
            server_first=f"r={nonce},s={to_base64(credential.salt)},i={credential.iterations}",
        )
        self._expects = partial(self._finish, begun)
        return Step(begun.server_first.encode())

    def _finish(self, begun: _Begun, text: str) -> Step:
        final = _CLIENT_FINAL.fullmatch(text)
        if final is None:
            raise AuthenticationFailed("The final SCRAM message is malformed.")
        try:
            header, proof = from_base64(final["header"]), from_base64(final["proof"])
        except ValueError:
            raise AuthenticationFailed("The final SCRAM message holds invalid base64.") from None
        if not hmac.compare_digest(header, begun.header.encode()):
            raise AuthenticationFailed("The channel binding differs from the one the exchange began with.")
        if not hmac.compare_digest(final["nonce"], begun.nonce):
            raise AuthenticationFailed("The nonce is not the one of this exchange.")
        credential, algorithm = begun.credential, HASHES[self.mechanism]
        message = f"{begun.client_first_bare},{begun.server_first},{final['without_proof']}".encode()
        signature = hmac.digest(credential.stored_key, message, algorithm)
        if len(proof) != len(signature):
            raise AuthenticationFailed("The proof does not have the length of the mechanism's digest.")
        client_key = bytes(left ^ right for left, right in zip(proof, signature, strict=True))
        stored_key = hashlib.new(algorithm, client_key).digest()
        if not (hmac.compare_digest(stored_key, credential.stored_key) and begun.is_known):
            raise AuthenticationFailed(_WRONG)
        verifier = to_base64(hmac.digest(credential.server_key, message, algorithm))
        return Step(f"v={verifier}".encode(), done=True, principal=Principal(begun.name, self.mechanism))


@dataclass(frozen=True, slots=True, repr=False)
class _Begun:
    """What the first message settled."""

    name: str
    credential: Credential
    is_known: bool
    nonce: str
    header: str
    client_first_bare: str
    server_first: str


def _decode(token: bytes) -> str:
    if len(token) > TOKEN_BYTES_MAX:
        raise AuthenticationFailed(f"The message is longer than {TOKEN_BYTES_MAX} bytes.")
    try:
        return bytes(token).decode()
    except UnicodeDecodeError:
        raise AuthenticationFailed("The message is not UTF-8.") from None


def _prepare(text: str) -> str:
    try:
        prepared = saslprep(text)
    except ValueError:
        # In the words of every wrong name or password: which characters ours may have is nobody's business.
        raise AuthenticationFailed(_WRONG) from None
    if not prepared:
        raise AuthenticationFailed(_WRONG)
    return prepared


def _require_own_name(authorization: str, name: str) -> None:
    if authorization and _prepare(authorization) != name:
        raise AuthenticationFailed("Acting for another user is not offered.")


def _unescape(name: str) -> str:
    # A comma travels as =2C and an equals sign as =3D; any other use of the equals sign is an error.
    if "=" in re.sub("=2C|=3D", "", name):
        raise AuthenticationFailed("The name is not escaped as SCRAM requires.")
    return name.replace("=2C", ",").replace("=3D", "=")
