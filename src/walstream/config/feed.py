"""The sections of the feed: [feed], [feed.auth] and [feed.tls].

Where the log is and how the feed proves to it who it is stands in [capture], as for the pipeline. What can be seen
from the settings alone is checked here; files are looked at when the feed starts.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from walstream.config.section import MIB, Section

ClientAuth = Literal["none", "required"]

ASYMMETRIC: Final = ("EdDSA", "ES256", "ES384", "ES512", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512")
"""The algorithms by which a token can be signed with a key that whoever checks it does not have."""


def _check_algorithms(algorithms: tuple[str, ...]) -> tuple[str, ...]:
    for name in algorithms:
        if name.lower() == "none":
            raise ValueError('"none" means no signature, so that anybody could write the token')
        if name.upper().startswith("HS"):
            raise ValueError(f"with {name} whoever can check a token can also make one")
        if name not in ASYMMETRIC:
            raise ValueError(f"{name!r} is no algorithm that is known here")
    return algorithms


def _check_jwks(jwks: str) -> str:
    scheme, is_url, _ = jwks.partition("://")
    if not is_url:
        return jwks
    if scheme.lower() not in ("http", "https"):
        raise ValueError("a key set comes from a file, given by its path, or from an http or https address")
    address = urlsplit(jwks)
    if not address.hostname:
        raise ValueError("the address has no host")
    if address.username is not None or address.password is not None:
        raise ValueError("a key set is public, and a password in its address would not stay secret")
    return jwks


class FeedAuthConfig(Section):
    """Which tokens the feed believes. Every call carries one; there is no way in without."""

    jwks: Annotated[str, AfterValidator(_check_jwks)] = ""
    """The public keys, a JWKS: a file or an address. Needed; `http` beyond loopback only with `allow_insecure`."""

    algorithms: Annotated[
        tuple[str, ...],
        AfterValidator(_check_algorithms),
        WithJsonSchema({"type": "array", "items": {"type": "string", "enum": ASYMMETRIC}}),
    ] = Field(default=("EdDSA", "ES256", "RS256"), min_length=1)
    """How tokens may be signed. A key serves only what its type, and its `alg` if it has one, is for."""

    audience: str = Field(default="walstream", min_length=1)
    """What a token must name as its audience (`aud`)."""

    issuer: str = ""
    """Who must have issued a token (`iss`). Empty: any issuer, so that the keys alone decide."""

    clock_skew_s: int = Field(default=30, ge=0, le=300)
    """How far the issuer's clock may be from ours: a token counts for so long before its `nbf` and after its `exp`."""

    jwks_cache_s: int = Field(default=300, ge=1)
    """After how long the keys are read again: a withdrawn one counts until then. A file is read when it has changed."""

    jwks_refresh_min_s: int = Field(default=10, ge=1)
    """The least time between two readings, however many tokens name keys that nobody knows."""

    role_claim: str = Field(default="role", min_length=1)
    """The claim that holds the role: `replication` reads one tenant, `admin` all of them."""

    tenant_claim: str = Field(default="tenant", min_length=1)
    """The claim that names the tenant of the role `replication`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.jwks_refresh_min_s > self.jwks_cache_s:
            raise ValueError("feed.auth: jwks_refresh_min_s is larger than jwks_cache_s, which could then not be kept")
        return self


class FeedTlsConfig(Section):
    """TLS of the feed, and whether clients show certificates. Files that change count for the next connection."""

    certificate: str = ""
    """PEM file of the certificate chain. With `key` it turns TLS on."""

    key: str = ""
    """PEM file of the certificate's private key."""

    client_ca: str = ""
    """PEM file of the authorities of client certificates."""

    client_auth: ClientAuth = "none"
    """`required`: mutual TLS, who shows no certificate of `client_ca` is not heard. Tokens are needed all the same."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("feed.tls: certificate and key are given together or not at all")
        if self.client_ca and not self.certificate:
            raise ValueError("feed.tls: client_ca needs certificate and key")
        if self.client_auth == "required" and not self.client_ca:
            raise ValueError("feed.tls: client_auth = required needs client_ca, to know whose certificates count")
        if self.client_ca and self.client_auth == "none":
            raise ValueError("feed.tls: client_ca is set, but client_auth = none asks nobody for a certificate")
        return self


class FeedConfig(Section):
    """The gRPC service that streams the log to subscribers."""

    host: str = "127.0.0.1"
    """Address to listen at. Empty: every one. Beyond loopback it needs TLS."""

    port: int = Field(default=9193, ge=0, le=65_535)
    """Port to listen at; 0 takes a free one."""

    http_listen: str = Field(default="", pattern=r"^(.*:\d{1,5})?$")
    """Address of the health and metrics endpoint, as `host:port`. Empty: none."""

    topics: tuple[str, ...] = Field(default=("*",), min_length=1)
    """The topics that are streamed, as patterns where `*` stands for any text. walstream's own never are."""

    cluster: str = Field(default="walstream", pattern=r"^[^:\s]+$")
    """First part of the key prefix, which is `<cluster>:<tenant>:<topic>:`."""

    wal_retention_minutes: int = Field(default=60, ge=1)
    """How long entries are kept for subscribers at least; longer while an active one has not acknowledged them."""

    retention_bytes_max: int = Field(default=10_240 * MIB, ge=MIB)
    """Bytes of the log that slow subscribers can hold back; beyond it they lose their place, not the disk its space."""

    subscriber_timeout_minutes: int = Field(default=60, ge=1)
    """A subscriber that has been silent for longer is not active any more and holds nothing back."""

    subscriptions_max: int = Field(default=1_000, ge=1)
    """Streams open at once; a further one is refused."""

    tenant_subscriptions_max: int = Field(default=100, ge=1)
    """Streams of one tenant open at once, of all its tokens together, so that others have their place, too."""

    queue_entries_max: int = Field(default=10_000, ge=1)
    """Entries that wait for one subscriber to take them."""

    queue_bytes_max: int = Field(default=2 * MIB, ge=1)
    """Bytes that wait for one subscriber to take them; an entry that is larger waits alone."""

    backpressure_timeout_ms: int = Field(default=30_000, ge=1)
    """A subscriber whose queue has been full for this long is told so, and its stream ends."""

    heartbeat_ms: int = Field(default=5_000, ge=10)
    """How often an idle stream says how far it has come."""

    coalesce_ms: int = Field(default=10, ge=0)
    """How long entries are gathered into one batch, and only while an earlier batch is on its way."""

    batch_entries_max: int = Field(default=1_000, ge=1)
    """Entries of one batch."""

    window_bytes_max: int = Field(default=64 * MIB, ge=MIB)
    """Bytes of the newest entries that are kept in memory for all subscribers; older ones are read from the log."""

    settle_ms: int = Field(default=1_000, ge=0)
    """With Apache Kafka as the log: how long an entry waits for earlier ones. The clocks may differ by so much."""

    allow_insecure: bool = False
    """Listen beyond loopback without TLS all the same: whoever reads the line can read rows and steal tokens."""

    auth: FeedAuthConfig = FeedAuthConfig()

    tls: FeedTlsConfig = FeedTlsConfig()
