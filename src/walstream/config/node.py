"""The sections of the node: [node], [log], [limits] and [security]."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from walstream.config.section import DAY_MS, KIB, MIB, Section

Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
ResourceKind = Literal["topic", "group", "cluster"]
Operation = Literal["read", "write", "admin"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]

NODE_SECTIONS = ("node", "log", "limits", "security")


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
    """A segment is sealed by a batch whose timestamp is more than this after the first one in it (`segment.ms`)."""

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
