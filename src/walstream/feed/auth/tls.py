"""TLS of the feed: credentials for gRPC from PEM files, on both ends, and where the feed may listen without them.

Owns the files of `[feed.tls]`: everything that can be wrong with them is found at the start, with an error that names
the file. Who a client is, its token says; a client certificate only decides whether it is heard.

The invariant: what strangers can reach is encrypted, unless the operator wrote `allow_insecure`. And a certificate that
is replaced on disk counts from the next connection on; if what is there then is of no use, the old one stays.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from walstream import logs
from walstream.config import FeedConfig, FeedTlsConfig
from walstream.errors import ConfigError
from walstream.node.security import is_loopback

log = logs.get(__name__)


def check_listener(config: FeedConfig) -> None:
    """Raise ConfigError unless the feed may listen at its host with its security."""
    if config.allow_insecure or config.tls.certificate or is_loopback(config.host):
        return
    raise ConfigError(
        f"Listening at {config.host or 'every address'} would show rows and tokens to whoever is on the way: "
        "[feed.tls] lacks certificate and key.",
        "Set them, or listen at 127.0.0.1; allow_insecure = true in [feed] goes without.",
    )


def listen(server: grpc.aio.Server, config: FeedConfig) -> int:
    """Make the server listen as configured, and return its port. Raises ConfigError."""
    check_listener(config)
    host = config.host or "::"
    address = f"[{host.strip('[]')}]:{config.port}" if ":" in host else f"{host}:{config.port}"
    credentials = server_credentials(config.tls)
    try:
        return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(
            f"The feed cannot listen at {address}: the port is taken, or the address is none of this machine.",
            "feed.host and feed.port say where.",
        ) from None


def server_credentials(config: FeedTlsConfig) -> grpc.ServerCredentials | None:
    """Return the credentials of the feed, which follow the files; None without TLS. Raises ConfigError."""
    if not config.certificate:
        return None
    files = ServerFiles(config)
    return grpc.dynamic_ssl_server_credentials(
        files.read(),
        files.renew,  # type: ignore[arg-type]  # None says that nothing has changed, which the stubs do not know
        config.client_auth == "required",
    )


def client_credentials(ca: str = "", certificate: str = "", key: str = "") -> grpc.ChannelCredentials:
    """Return credentials for a channel to a feed with TLS, from PEM files. Raises ConfigError.

    Without an authority, those that gRPC trusts; with certificate and key, they are shown to the feed (mutual TLS).
    """
    if bool(certificate) != bool(key):
        raise ConfigError("A client certificate and its key are given together or not at all.")
    roots = _certificates("The authority", ca) if ca else None
    chain, private = _pair("The client certificate", certificate, "the key", key) if certificate else (None, None)
    return grpc.ssl_channel_credentials(roots, private, chain)


class ServerFiles:
    """The PEM files of a server, and whether they have changed since they were read."""

    def __init__(self, config: FeedTlsConfig) -> None:
        self._config = config
        self._paths = [Path(name) for name in (config.certificate, config.key, config.client_ca) if name]
        self._seen: list[tuple[int, ...]] = []
        # gRPC asks from threads of its own.
        self._lock = threading.Lock()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Return what is in the files now. Raises ConfigError."""
        # Noted before they are read: what is written in between is read again.
        self._seen = self._look()
        config = self._config
        chain, key = _pair("feed.tls.certificate", config.certificate, "feed.tls.key", config.key)
        authorities = _certificates("feed.tls.client_ca", config.client_ca) if config.client_ca else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def renew(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what is in the files if it has changed and is of use. Called before each handshake: never raises."""
        with self._lock:
            try:
                if self._look() == self._seen:
                    return None
                renewed = self.read()
            except (ConfigError, OSError) as error:
                log.warning("certificate not renewed", reason=str(error))
                return None
            log.info("certificate renewed", certificate=self._config.certificate)
            return renewed

    def _look(self) -> list[tuple[int, ...]]:
        """Return what tells that a file is another; a file that is not there has nothing to tell."""
        return [_mark(path) for path in self._paths]


def _mark(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _pair(what: str, certificate: str, whose: str, key: str) -> tuple[bytes, bytes]:
    """Return the bytes of a certificate chain and of the private key that belongs to its first certificate."""
    chain, private = _certificates(what, certificate), _contents(whose, key)
    try:
        loaded = load_pem_private_key(private, password=None)
    except TypeError:
        raise ConfigError(f"{_begin(whose)} {key} is encrypted.", "Give a key without a passphrase.") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{_begin(whose)} {key} holds no private key.", _PEM) from None
    first = x509.load_pem_x509_certificates(chain)[0]
    if loaded.public_key() != first.public_key():
        raise ConfigError(
            f"{_begin(whose)} {key} does not belong to the certificate {certificate}.",
            "It has to be the key of the first certificate of the chain.",
        )
    return chain, private


def _certificates(what: str, path: str) -> bytes:
    """Return the bytes of a file with certificates."""
    contents = _contents(what, path)
    try:
        found = x509.load_pem_x509_certificates(contents)
    except ValueError:
        raise ConfigError(f"{_begin(what)} {path} holds no certificate.", _PEM) from None
    if found[0].not_valid_after_utc < datetime.now(UTC):
        # Not refused: it is the other end that decides, and its clock may be right.
        log.warning("certificate expired", file=path, expired_at=found[0].not_valid_after_utc.isoformat())
    return contents


def _contents(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_begin(what)} {path} cannot be read: {error.strerror}.") from None


def _begin(what: str) -> str:
    """Begin a sentence with it, unless it is the name of a setting."""
    return what if what.startswith("feed.") else what[0].upper() + what[1:]


_PEM: Final = "It has to be a PEM file: text between lines of dashes that say what it is."
