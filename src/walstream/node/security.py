"""The security of a node as configured: where it may listen, TLS, who must authenticate and how, what they may do.

`Security` is built once at start, and everything that can be wrong in `[security]` is found there, with an error that
says what to set; a rule that would not be enforced is an error too. The exchanges are in `sasl`, users in
`credentials`, rules in `acl`; connections and delays belong to the server and to `api/sasl`.

The invariant: a node that strangers can reach knows who is talking to it over a line that nobody else reads, unless the
operator wrote `allow_insecure`. Beyond loopback that means TLS, and SASL or client certificates.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from walstream.config import SecurityConfig
from walstream.errors import AuthenticationFailed, ConfigError, UnsupportedMechanism
from walstream.node import sasl
from walstream.node.acl import ANONYMOUS, CLUSTER, Authorizer, Principal
from walstream.node.credentials import HASHES, PLAIN, Credentials

__all__ = [
    "ANONYMOUS",
    "CLUSTER",
    "Authorizer",
    "Certificate",
    "Principal",
    "Security",
    "certificate_principal",
    "check_listener",
    "names_host",
]

Certificate: TypeAlias = Mapping[str, Any]
"""A verified certificate, as `ssl` describes it."""

TLS = "TLS"
"""The mechanism of a principal that showed a client certificate."""

SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 17, 18, 36
OPEN_APIS = frozenset({SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE})
"""The API keys that a peer may call before it has authenticated."""

OPEN_REQUEST_BYTES_MAX = 64 * 1024
"""The largest request of a peer that has not authenticated: strangers get no memory worth having."""

SECRET_BYTES = 32


class Security:
    """What the node's configuration says about security, ready for use by its connections."""

    def __init__(self, config: SecurityConfig, secret: bytes | None = None) -> None:
        """Read and check everything; `secret` is what decoys are made from (see `Credentials`)."""
        self._config = config
        self.credentials = Credentials(config.users, secret or secrets.token_bytes(SECRET_BYTES))
        self._mechanisms: tuple[str, ...] = config.sasl_mechanisms or ((*HASHES, PLAIN) if config.users else ())
        _check(config, self._mechanisms, self.credentials)
        self.is_required = _authenticates(config)
        self.authorizer = Authorizer(config.acls, enforced=self.is_required)
        self.tls = _server_context(config) if config.tls_certificate else None

    def mechanisms(self, *, is_tls: bool) -> tuple[str, ...]:
        """Return the SASL mechanisms offered on a connection; a password in clear needs one that nobody reads."""
        return tuple(name for name in self._mechanisms if is_tls or name != PLAIN)

    def start(self, mechanism: str, *, is_tls: bool) -> sasl.Exchange:
        """Begin an authentication, or raise UnsupportedMechanism."""
        offered = self.mechanisms(is_tls=is_tls)
        if mechanism not in offered:
            raise UnsupportedMechanism(
                "The SASL mechanism is not offered on this connection.",
                f"Offered: {', '.join(offered)}." if offered else "No users are configured.",
            )
        return sasl.start(mechanism, self.credentials, secrets.token_urlsafe(18))

    def may_call(self, principal: Principal, api_key: int) -> bool:
        """Say whether the principal has authenticated, or need not have done so for this API."""
        return not (self.is_required and principal.is_anonymous) or api_key in OPEN_APIS

    def first_principal(self, certificate: Mapping[str, Any] | None) -> Principal:
        """Return who a new connection is: the name in its verified client certificate, or nobody yet."""
        return certificate_principal(certificate) if certificate and self._config.tls_client_ca else ANONYMOUS

    def reload_tls(self) -> None:
        """Read the certificate and key again, for connections that are yet to come; the old ones stay on failure."""
        if self.tls is not None:
            _server_context(self._config)
            _load_certificate(self.tls, self._config)


def check_listener(host: str, config: SecurityConfig) -> None:
    """Raise ConfigError unless the node may listen at this host with this security."""
    if config.allow_insecure or is_loopback(host):
        return
    missing = []
    if not config.tls_certificate:
        missing.append("tls_certificate and tls_key")
    if not _authenticates(config):
        missing.append("users (or tls_client_ca)")
    if missing:
        raise ConfigError(
            f"Listening at {host or 'every address'} would let strangers in: [security] lacks {' and '.join(missing)}.",
            "Set them, or listen at 127.0.0.1; allow_insecure = true in [security] opens the node to everybody.",
        )


def names_host(certificate: Certificate, host: str) -> bool:
    """Tell whether a certificate has this host among its names; `*` may stand for the first part of one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        first, _, rest = host.lower().partition(".")
        accepted = {host.lower(), f"*.{rest}"} if first and rest else {host.lower()}
        return any(kind == "DNS" and name.lower() in accepted for kind, name in certificate.get("subjectAltName", ()))
    names = certificate.get("subjectAltName", ())
    return any(kind == "IP Address" and ipaddress.ip_address(name) == address for kind, name in names)


def certificate_principal(certificate: Certificate) -> Principal:
    """Return the principal of a client certificate: its common name, or else its first alternative name."""
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    others = [value for key, value in certificate.get("subjectAltName", ()) if key in ("DNS", "email", "URI")]
    # Two common names contradict each other, so neither counts.
    name = names[0] if len(names) == 1 else next(iter(others), "")
    if not name:
        raise AuthenticationFailed("The client certificate names nobody.", "Give it one common name.")
    return Principal(name, TLS)


def load_secret(path: Path) -> bytes:
    """Return the secret kept in the file, which is made when it is not there or torn."""
    with contextlib.suppress(OSError):
        secret = path.read_bytes()
        if len(secret) == SECRET_BYTES:
            return secret
    secret = secrets.token_bytes(SECRET_BYTES)
    # A full disk is no reason not to start: the decoys then change with the next start, and that is all.
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(secret)
    return secret


def _authenticates(config: SecurityConfig) -> bool:
    return bool(config.users or config.tls_client_ca)


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach what listens at the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # Another name may mean any address, now or after the next change of a hosts file.
        return False


def _check(config: SecurityConfig, mechanisms: tuple[str, ...], credentials: Credentials) -> None:
    if config.acls and not _authenticates(config):
        raise ConfigError(
            "security.acls has rules, but nobody authenticates, so they would not be enforced.",
            "Set security.users or security.tls_client_ca.",
        )
    if config.sasl_mechanisms and not config.users:
        raise ConfigError("security.sasl_mechanisms is set, but there is nobody to log in.", "Set security.users.")
    usable = {name for name in mechanisms if config.tls_certificate or name != PLAIN}
    for user in credentials:
        if not usable & credentials.mechanisms(user):
            raise ConfigError(
                f"User {user!r} could never log in: none of its credentials fits a mechanism that is offered.",
                "Check security.sasl_mechanisms; PLAIN is offered only over TLS.",
            )


def _server_context(config: SecurityConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_certificate(context, config)
    if config.tls_client_ca:
        try:
            context.load_verify_locations(cafile=config.tls_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"security.tls_client_ca {config.tls_client_ca} is of no use: {_why(error)}.") from error
        # With users, a certificate is one way in and SASL the other; without, there is no other.
        context.verify_mode = ssl.CERT_OPTIONAL if config.users else ssl.CERT_REQUIRED
    return context


def _load_certificate(context: ssl.SSLContext, config: SecurityConfig) -> None:
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=_refuse_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"The TLS certificate {config.tls_certificate} with key {config.tls_key} is of no use: {_why(error)}.",
            "Both are PEM files, and the key belongs to the first certificate of the chain.",
        ) from error


def _refuse_password() -> NoReturn:
    # OpenSSL would otherwise ask at the terminal, where a service hangs for ever.
    raise ConfigError("security.tls_key is encrypted.", "Give the node a key without a passphrase.")


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a valid PEM file").replace("_", " ").lower()
    return error.strerror or str(error)
