"""The one typed configuration: what can be set, its default, its unit, and where each value came from.

Three sources, the later ones winning: a TOML file, the environment (`WALSTREAM_SECTION__KEY`), flags. Each value is
checked by itself against its field, so that an error names the key, the source and what is allowed; rules between
fields are checked once everything is known. Units are in the names; sizes and durations are plain integers.

The models below are the reference: `docs/configuration.md` is generated from their docstrings. This module reads the
one file it is given and nothing else: the environment enters as an argument. pydantic alone does the checking;
pydantic-settings merges sources too, but forgets which of them a value came from.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo

from walstream.config_reference import accepts, page
from walstream.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
DAY_MS = 24 * 60 * 60 * 1000

ENVIRONMENT_PREFIX = "WALSTREAM_"
ENVIRONMENT_SEPARATOR = "__"

Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
ResourceKind = Literal["topic", "group", "cluster"]
Operation = Literal["read", "write", "admin"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, fields described by the docstring below each."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NodeConfig(Section):
    """Where the node listens, what it is called and where it keeps its data."""

    listen: str = Field(default="127.0.0.1:9092", pattern=r"^.*:\d{1,5}$")
    """Address for Kafka clients, as `host:port`; port 0 takes a free one. Beyond loopback it needs TLS and SASL."""

    advertised: str = Field(default="", pattern=r"^(.+:\d{1,5})?$")
    """Address that clients are told to connect to, as `host:port`. Empty: the address the node listens on."""

    data: str = Field(default="walstream-data", min_length=1)
    """Folder of the log. Created when missing; one node at a time may use it."""

    http_listen: str = Field(default="127.0.0.1:9644", pattern=r"^(.*:\d{1,5})?$")
    """Address of the health and metrics endpoint, as `host:port`. Empty: none."""

    node_id: int = Field(default=1, ge=0, le=2**31 - 1)
    """Number of this node, unique in its cluster and kept in the data folder from the first start on."""

    drain_timeout_ms: int = Field(default=10_000, ge=0)
    """On SIGTERM, how long requests in flight may take to finish before connections are closed."""

    log_level: LogLevel = "info"
    """The least severe messages that are logged."""

    log_format: LogFormat = "auto"
    """`console` for people, `json` for machines, `auto`: console on a terminal and json otherwise."""


class LogConfig(Section):
    """How the log is kept. Values that Kafka has as topic settings are defaults for topics that do not set them."""

    segment_bytes: int = Field(default=128 * MIB, ge=KIB, le=2**31 - 1)
    """A segment is sealed and a new one begun when it would grow beyond this (`segment.bytes`)."""

    segment_ms: int = Field(default=7 * DAY_MS, ge=1)
    """A segment is sealed when its first batch is this old, so that retention can remove it (`segment.ms`)."""

    retention_ms: int = Field(default=7 * DAY_MS, ge=-1)
    """Sealed segments are removed when their newest record is this old; -1: never (`retention.ms`)."""

    retention_bytes: int = Field(default=-1, ge=-1)
    """The oldest sealed segments go while a partition is larger than this; -1: no limit (`retention.bytes`)."""

    retention_check_interval_ms: int = Field(default=30_000, ge=10)
    """How often retention and compaction look for work."""

    message_bytes_max: int = Field(default=1_048_588, ge=KIB, le=2**31 - 1)
    """The largest record batch that is accepted, compressed as it arrives (`max.message.bytes`)."""

    checkpoint_interval_ms: int = Field(default=30_000, ge=10)
    """How often the node writes down what recovery may trust: a crash re-reads at most what was written since."""

    journal_bytes_max: int = Field(default=64 * MIB, ge=MIB)
    """The shared journal begins a new file at this size and drops files whose batches are durable in segments."""

    compaction_keys_max: int = Field(default=200_000, ge=1_000)
    """Distinct keys one round of compaction remembers, at about 180 bytes each; more keys take more rounds."""

    default_partitions: int = Field(default=1, ge=1, le=100_000)
    """Partitions of a topic that is created without saying how many."""

    auto_create_topics: bool = True
    """Whether a topic is created when a client that allows it asks for one that does not exist."""


class LimitsConfig(Section):
    """A bound on everything that a client can make grow."""

    connections_max: int = Field(default=1_000, ge=1)
    """Connections open at once; further ones are closed at once."""

    request_bytes_max: int = Field(default=32 * MIB, ge=KIB, le=2**31 - 1)
    """The largest request; a larger one closes its connection before it is read."""

    inflight_bytes_max: int = Field(default=48 * MIB, ge=MIB)
    """Bytes of requests being read and handled over all connections; above it the node stops reading, not answering."""

    request_read_timeout_ms: int = Field(default=30_000, ge=10)
    """How long a request may take to arrive once its first byte is there."""

    idle_timeout_ms: int = Field(default=600_000, ge=10)
    """A connection that sends nothing for this long is closed."""

    handshake_timeout_ms: int = Field(default=10_000, ge=10)
    """How long a new connection may take to finish TLS and SASL."""

    response_write_timeout_ms: int = Field(default=30_000, ge=10)
    """A client that takes nothing of what it was sent for this long is disconnected."""

    fetch_bytes_max: int = Field(default=52_428_800, ge=KIB, le=2**31 - 1)
    """The most bytes one fetch response holds, whatever the client asks for; at least one batch is always sent."""

    fetch_wait_ms_max: int = Field(default=60_000, ge=0)
    """The longest a fetch may wait for new records, whatever the client asks for."""

    fetch_sessions_max: int = Field(default=1_000, ge=0)
    """Incremental fetch sessions kept at once; clients beyond it send full fetches."""

    partitions_max: int = Field(default=10_000, ge=1)
    """Partitions the node holds, all topics together."""

    producers_per_partition_max: int = Field(default=10_000, ge=1)
    """Idempotent producers remembered per partition, at about 1 KB each; one more takes the place of a silent one."""

    producer_expiry_ms: int = Field(default=DAY_MS, ge=1_000)
    """An idempotent producer that has been silent for this long is forgotten."""

    groups_max: int = Field(default=10_000, ge=1)
    """Consumer groups the node holds."""

    group_members_max: int = Field(default=1_000, ge=1)
    """Members of one consumer group."""

    group_session_timeout_ms_min: int = Field(default=1_000, ge=1)
    """The shortest session timeout a group member may ask for."""

    group_session_timeout_ms_max: int = Field(default=1_800_000, ge=1)
    """The longest session timeout a group member may ask for."""

    group_join_delay_ms: int = Field(default=100, ge=0)
    """How long an empty group waits for more members before its first generation, to save rebalances."""

    offset_metadata_bytes_max: int = Field(default=4_096, ge=0)
    """The largest note a client may attach to a committed offset."""

    offset_retention_ms: int = Field(default=7 * DAY_MS, ge=-1)
    """Offsets of a group without members are forgotten after this long; -1: never."""


class AclRule(Section):
    """One permission: this principal may do these operations on these resources."""

    principal: str = Field(min_length=1)
    """Name of the user, or `*` for everybody who has authenticated."""

    kind: ResourceKind
    """What the rule is about."""

    name: str = Field(default="*", min_length=1)
    """Name of the topic or group; a trailing `*` makes it a prefix."""

    operations: tuple[Operation, ...] = Field(min_length=1)
    """What is allowed."""


class SecurityConfig(Section):
    """Who may connect, how they prove it and what they may do."""

    tls_certificate: str = ""
    """PEM file of the certificate chain. With `tls_key` it turns TLS on for Kafka clients."""

    tls_key: str = ""
    """PEM file of the certificate's private key."""

    tls_client_ca: str = ""
    """PEM file of the authorities of client certificates. Set: clients show one or, when there are users, use SASL."""

    sasl_mechanisms: tuple[Mechanism, ...] = ()
    """How clients may authenticate. Empty: all mechanisms when there are users (PLAIN only over TLS)."""

    users: dict[str, str | tuple[str, ...]] = Field(default={}, repr=False)
    """Users by name, each with what `walstream user credential NAME` prints, or a list. Empty: nobody is asked."""

    acls: tuple[AclRule, ...] = ()
    """Permissions, as `[[security.acls]]` tables. With users, what no rule allows is denied."""

    allow_insecure: bool = False
    """Listen beyond loopback without TLS and SASL all the same: whoever reaches the port can read and write."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key are given together or not at all")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self


class Config(Section):
    """The whole configuration."""

    node: NodeConfig = NodeConfig()
    log: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.log.message_bytes_max > self.limits.request_bytes_max:
            raise ValueError(
                "log.message_bytes_max is larger than limits.request_bytes_max: such a batch never arrives"
            )
        if self.limits.request_bytes_max > self.limits.inflight_bytes_max:
            raise ValueError(
                "limits.request_bytes_max is larger than limits.inflight_bytes_max: such a request never fits"
            )
        if self.limits.group_session_timeout_ms_min > self.limits.group_session_timeout_ms_max:
            raise ValueError("limits.group_session_timeout_ms_min is larger than limits.group_session_timeout_ms_max")
        return self


SECTIONS: dict[str, type[Section]] = {
    "node": NodeConfig,
    "log": LogConfig,
    "limits": LimitsConfig,
    "security": SecurityConfig,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    source: Literal["default", "file", "environment", "flag"]
    detail: str = ""
    """The file, the variable or the flag."""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for every `section.key`, its origin."""

    config: Config
    origins: dict[str, Origin]


DEFAULT = Origin("default")


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """Merge the sources into one configuration; `overrides` maps `section.key` to a value or to its text."""
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins = {name: DEFAULT for name, _ in fields()}
    for section, key, value, origin in (
        *_from_file(file),
        *_from_environment(environ or {}),
        *_from_overrides(overrides or {}),
    ):
        values[section][key] = _checked(section, key, value, origin)
        origins[f"{section}.{key}"] = origin
    try:
        sections = {name: model(**values[name]) for name, model in SECTIONS.items()}
        config = Config(**sections)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(f"The configuration contradicts itself: {_reason(error)}.", _EXPLAIN) from None
    return Loaded(config, origins)


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every `section.key` with its field, in the order of the models."""
    for section, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            yield f"{section}.{key}", field


def environment_name(name: str) -> str:
    """Return the environment variable that sets `section.key`."""
    section, key = name.split(".", 1)
    return f"{ENVIRONMENT_PREFIX}{section}{ENVIRONMENT_SEPARATOR}{key}".upper()


_Given = tuple[str, str, Any, Origin]
_EXPLAIN = "`walstream config explain` shows every value and where it came from."


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration file {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {file} is not valid TOML: {error}.") from error
    origin = Origin("file", str(file))
    for section, content in document.items():
        if section not in SECTIONS:
            raise _unknown(section, list(SECTIONS), f"section [{section}]", origin)
        if not isinstance(content, dict):
            raise ConfigError(f"{section} = {content!r} ({origin}): this is a section, written as [{section}].")
        for key, value in content.items():
            _require_key(section, key, origin)
            yield section, key, value, origin


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for variable, text in sorted(environ.items()):
        section, separator, key = variable.removeprefix(ENVIRONMENT_PREFIX).partition(ENVIRONMENT_SEPARATOR)
        if not variable.startswith(ENVIRONMENT_PREFIX) or not separator:
            continue
        section, key = section.lower(), key.lower()
        origin = Origin("environment", variable)
        if section not in SECTIONS:
            raise _unknown(section, list(SECTIONS), f"section {section}", origin)
        _require_key(section, key, origin)
        yield section, key, _Text(text), origin


def _from_overrides(overrides: Mapping[str, Any]) -> Iterator[_Given]:
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        origin = Origin("flag", f"{name}={value}")
        if section not in SECTIONS:
            raise _unknown(name, [name for name, _ in fields()], f"key {name}", origin)
        _require_key(section, key, origin)
        yield section, key, _Text(value) if isinstance(value, str) else value, origin


class _Text(str):
    """A value given as text, by the environment or a flag: numbers and lists in it are still to be read."""


def _require_key(section: str, key: str, origin: Origin) -> None:
    keys = list(SECTIONS[section].model_fields)
    if key not in keys:
        # A key of another section is the likelier mistake than a misspelling of one in this section.
        elsewhere = [name for name, _ in fields() if name.endswith(f".{key}")]
        names = [f"{section}.{known}" for known in keys]
        raise _unknown(f"{section}.{key}", elsewhere or names, f"key {section}.{key}", origin)


def _unknown(given: str, known: list[str], what: str, origin: Origin) -> ConfigError:
    nearest = difflib.get_close_matches(given, known, n=1, cutoff=0.0)[0]
    return ConfigError(f"Unknown {what} ({origin}).", f"Did you mean {nearest}?")


@cache
def _adapter(section: str, key: str) -> TypeAdapter[Any]:
    field = SECTIONS[section].model_fields[key]
    kind: Any = field.annotation
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    return TypeAdapter(kind)


def _checked(section: str, key: str, value: Any, origin: Origin) -> Any:
    """Return the value as its field has it, or raise an error that says what is allowed."""
    adapter = _adapter(section, key)
    kind = SECTIONS[section].model_fields[key].annotation
    try:
        if isinstance(value, _Text):
            if get_origin(kind) not in (tuple, dict):
                return adapter.validate_strings(str(value))
            value = json.loads(value) if value.lstrip().startswith(("[", "{")) else _split(value)
        # As JSON, because strict validation takes a list for a tuple there and still refuses "5" for a number.
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        shown = "…" if key == "users" else repr(value)
        raise ConfigError(
            f"{section}.{key} = {shown} ({origin}) is not allowed: {_reason(error)}.",
            f"Allowed: {allowed(f'{section}.{key}')}.",
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{section}.{key} ({origin}) is not valid JSON: {error}.", f"Allowed: {allowed(f'{section}.{key}')}."
        ) from None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    message = message[:1].lower() + message[1:] if not message[:2].isupper() else message
    return f"{where}: {message}" if where else message


def allowed(name: str) -> str:
    """Say in a few words what `section.key` accepts."""
    section, key = name.split(".", 1)
    return accepts(SECTIONS[section], key)


def reference() -> str:
    """Write the reference page."""
    return page({**{f"[{name}]": model for name, model in SECTIONS.items()}, "[[security.acls]]": AclRule})
