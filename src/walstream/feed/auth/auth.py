"""Authentication of the feed: from the metadata of a call to an `Identity`, or to an error that says what is missing.

Owns the order of the checks. The algorithm has to be one that is configured and one that the key is for, the key one of
the key set, the signature right; only then is anything in the token believed, and what it says is judged in `identity`.
Every refusal is AuthenticationFailed (gRPC: UNAUTHENTICATED) or NotAuthorized (PERMISSION_DENIED), and none of them
tells more than what the caller has sent or what the operator has configured.

PyJWT verifies signature, audience and issuer. Times are compared in `identity`, by a clock that is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import jwt

from walstream.config import FeedAuthConfig, FeedConfig
from walstream.errors import AuthenticationFailed
from walstream.feed.auth.identity import Identity, Role, Session, identify
from walstream.feed.auth.keys import Keys
from walstream.feed.auth.keysets import DEVELOPMENT_NAME, Key
from walstream.logs import get

__all__ = ["Authenticator", "Identity", "Role", "Session", "bearer_token"]

log = get(__name__)

AUTHORIZATION: Final = "authorization"
TOKEN_BYTES_MAX: Final = 16 * 1024

Metadata = Iterable[tuple[str, str | bytes]]


class Authenticator:
    """Tells who calls, by the token that the call carries."""

    def __init__(self, config: FeedAuthConfig, keys: Keys, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._keys = keys
        self._clock = clock

    @classmethod
    def of(cls, config: FeedConfig) -> Authenticator:
        """Take everything from the configuration. Raises ConfigError."""
        return cls(config.auth, Keys.of(config))

    @property
    def keys(self) -> Keys:
        """The keys, for whoever reports how fresh they are."""
        return self._keys

    async def open(self) -> None:
        """Read the keys. Raises ConfigError or UnreachableError: a feed that can let nobody in does not start."""
        await self._keys.open()
        if not self._config.issuer and Path(self._config.jwks).name != DEVELOPMENT_NAME:
            log.warning(
                "tokens of any issuer are believed",
                reason="feed.auth.issuer is not set",
                hint="Set it to what your tokens have as iss: others may sign with keys of the same set.",
            )

    async def authenticate(self, metadata: Metadata) -> Identity:
        """Return who sent a call with this metadata. Raises AuthenticationFailed or NotAuthorized."""
        return await self.verify(bearer_token(metadata))

    async def verify(self, token: str) -> Identity:
        """Return whom a token names. Raises AuthenticationFailed or NotAuthorized."""
        key_id, algorithm = self._header(token)
        key = self._one_of(await self._keys.find(key_id, algorithm), key_id)
        return identify(self._claims(token, key, algorithm), self._config, self._clock())

    def _header(self, token: str) -> tuple[str | None, str]:
        """Return the key id and the algorithm that a token names, both still only words."""
        # Each character is a byte at least, so that no more than that is ever looked at.
        if len(token) > TOKEN_BYTES_MAX:
            raise AuthenticationFailed(f"The token is larger than {TOKEN_BYTES_MAX:,} bytes.")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise AuthenticationFailed("The token is no JSON Web Token.", _GET) from None
        if "crit" in header:
            raise AuthenticationFailed("The token demands extensions (crit) that are not understood here.")
        algorithm = header.get("alg")
        if algorithm not in self._config.algorithms:
            raise AuthenticationFailed(
                "The token is not signed by an algorithm that is accepted here.",
                f"Accepted: {', '.join(self._config.algorithms)}.",
            )
        return header.get("kid"), algorithm

    @staticmethod
    def _one_of(keys: tuple[Key, ...], key_id: str | None) -> Key:
        if len(keys) == 1:
            return keys[0]
        if key_id is None:
            raise AuthenticationFailed(
                "The token does not say by which key it is signed.",
                "With several keys it needs a key id (kid).",
            )
        raise AuthenticationFailed("The token is signed by a key that is not known here.", _GET)

    def _claims(self, token: str, key: Key, algorithm: str) -> dict[str, Any]:
        """Return what a token says, its signature having been verified."""
        assert algorithm in key.algorithms
        config = self._config
        try:
            return jwt.decode(
                token,
                key.public,
                algorithms=[algorithm],
                audience=config.audience,
                issuer=config.issuer or None,
                options={"verify_exp": False, "verify_nbf": False, "verify_iat": False},
            )
        except jwt.InvalidSignatureError:
            raise AuthenticationFailed("The token's signature is wrong.", _GET) from None
        except (jwt.InvalidAudienceError, jwt.MissingRequiredClaimError, jwt.InvalidIssuerError):
            expected = f"aud has to be {config.audience!r}" + (f", iss {config.issuer!r}" if config.issuer else "")
            raise AuthenticationFailed("The token is not meant for this feed.", f"Its {expected}.") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise AuthenticationFailed("The token's claims cannot be read.", _GET) from None


_GET: Final = "Get a new one from whoever issues them; `walstream token mint` makes them for development."


def bearer_token(metadata: Metadata) -> str:
    """Return the token in the metadata of a call. Raises AuthenticationFailed when there is none, or more than one."""
    found = [value for name, value in metadata if name.lower() == AUTHORIZATION]
    if not found:
        raise AuthenticationFailed("The call carries no token.", _SEND)
    if len(found) > 1:
        raise AuthenticationFailed("The call carries more than one authorization.", _SEND)
    value = found[0] if isinstance(found[0], str) else found[0].decode("latin-1")
    scheme, _, token = value.strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise AuthenticationFailed("The call's authorization is no bearer token.", _SEND)
    return token.strip()


_SEND: Final = "Send it as metadata: authorization: Bearer <token>."
