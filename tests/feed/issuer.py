"""An issuer of tokens for tests: keys of every kind, the key set they make, and tokens, honest and forged."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

NOW_S = 1_800_000_000

_MAKE: dict[str, Callable[[], Any]] = {
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "RS256": lambda: rsa.generate_private_key(65_537, 2048),
    "PS256": lambda: rsa.generate_private_key(65_537, 2048),
}
_TO_JWK: dict[str, Callable[..., Any]] = {
    "Ed": OKPAlgorithm.to_jwk,
    "ES": ECAlgorithm.to_jwk,
    "RS": RSAAlgorithm.to_jwk,
    "PS": RSAAlgorithm.to_jwk,
}


class Signer:
    """A private key with its id."""

    def __init__(self, algorithm: str = "EdDSA", key_id: str | None = "k1") -> None:
        self.algorithm = algorithm
        self.key_id = key_id
        self.private = _MAKE[algorithm]()

    def jwk(self, **more: Any) -> dict[str, Any]:
        """Return the public key as an entry of a key set."""
        made = _TO_JWK[self.algorithm[:2]](self.private.public_key(), as_dict=True)
        return {**made, **({} if self.key_id is None else {"kid": self.key_id}), **more}

    def token(self, headers: Mapping[str, Any] | None = None, /, **claims: Any) -> str:
        """Sign what a good token says, changed by these claims; None takes a claim out."""
        named = {} if self.key_id is None else {"kid": self.key_id}
        return jwt.encode(body(**claims), self.private, self.algorithm, {**named, **(headers or {})})


def body(**changes: Any) -> dict[str, Any]:
    """Return the claims of a good token, with changes."""
    good = {
        "sub": "replica-7",
        "aud": "walstream",
        "role": "replication",
        "tenant": "acme",
        "exp": NOW_S + 600,
        "jti": "t-1",
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def jwks(*entries: Mapping[str, Any] | Signer) -> bytes:
    """Return a key set."""
    return json.dumps({"keys": [entry.jwk() if isinstance(entry, Signer) else entry for entry in entries]}).encode()


def encoded(part: bytes | Mapping[str, Any]) -> str:
    """Return a part of a token as base64url writes it."""
    data = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def assembled(header: Mapping[str, Any], claims: Mapping[str, Any], sign: Callable[[bytes], bytes]) -> str:
    """Put a token together by hand, past every check that a library makes when it signs."""
    signed = f"{encoded(header)}.{encoded(claims)}"
    return f"{signed}.{encoded(sign(signed.encode()))}"


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class JwksServer:
    """A real HTTP server that publishes a key set, and counts how often it is asked."""

    def __init__(self, document: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.document = document
        self.status = 200
        self.location = ""
        self.delay_s = 0.0
        self.requests = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                time.sleep(outer.delay_s)
                self.send_response(outer.status)
                if outer.location:
                    self.send_header("Location", outer.location)
                self.send_header("Content-Length", str(len(outer.document)))
                self.end_headers()
                self.wfile.write(outer.document)

            def handle(self) -> None:
                # A client that does not trust the certificate leaves in mid-handshake.
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    super().handle()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}/jwks.json"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop answering: the port is closed."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
