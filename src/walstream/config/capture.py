"""The sections of capture: [source.postgres], [capture], [capture.security] and the [[streams]] tables.

Passwords are never in the file: a setting names the environment variable that holds one.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from walstream.config.node import Mechanism
from walstream.config.section import MIB, Section

Engine = Literal["streaming", "polling"]
SslMode = Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]
SnapshotMode = Literal["initial", "never"]
OnDecodeError = Literal["stop", "dead_letter"]
RowFormat = Literal["debezium", "outbox"]
RowOperation = Literal["insert", "update", "delete", "truncate", "snapshot"]

ROW_OPERATIONS: tuple[RowOperation, ...] = ("insert", "update", "delete", "truncate", "snapshot")
TOPIC_PLACES = ("prefix", "schema", "table", "route")

RESERVED_HEADERS: frozenset[str] = frozenset(
    {"tenant", "op", "commit_lsn", "commit_time_ms", "txid", "seq", "gen", "snapshot", "source_epoch"}
)
"""Headers that capture writes and readers go by: a message may not bring its own."""

RESERVED_HEADER_PREFIX = "__debezium."

# Topic names are used as they are; PostgreSQL folds the names of slots and publications unless they are quoted.
_PREFIX = r"^[a-zA-Z0-9._-]+$"
_SLOT_NAME = r"^[a-z0-9_]{1,63}$"


def _check_tenant(tenant: str) -> str:
    if tenant == "column:":
        raise ValueError("column: needs the name of a column")
    return tenant


def is_reserved_header(name: str) -> bool:
    """Return whether capture keeps a header's name for itself."""
    return name in RESERVED_HEADERS or name.startswith(RESERVED_HEADER_PREFIX)


class PostgresConfig(Section):
    """The PostgreSQL server whose changes are captured, and how they are read from it."""

    engine: Engine = "streaming"
    """`streaming`: the server sends changes as they commit; `polling`: they are asked for with SQL."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Name or address of the server, or the folder of its socket."""

    port: int = Field(default=5432, ge=1, le=65_535)
    """Port of the server."""

    database: str = Field(default="postgres", min_length=1)
    """The database to capture. A slot belongs to one database."""

    user: str = Field(default="postgres", min_length=1)
    """The role to connect as. It needs REPLICATION, and SELECT on the tables for the snapshot."""

    password_env: str = ""
    """Name of the environment variable that holds the password. Empty: libpq looks, in PGPASSWORD and ~/.pgpass."""

    slot_name: str = Field(default="walstream", pattern=_SLOT_NAME)
    """Name of the logical replication slot, used by this capture alone. Created at the first run when missing."""

    publication_name: str = Field(default="walstream", min_length=1, max_length=63)
    """Name of the publication that lists the tables. Created by `walstream capture check --fix` when missing."""

    sslmode: SslMode = "prefer"
    """How much TLS is asked for, in libpq's words; only `verify-full` makes sure who answers."""

    sslrootcert: str = ""
    """PEM file of the authorities that `verify-ca` and `verify-full` trust. Empty: libpq's default."""

    connect_timeout_ms: int = Field(default=10_000, ge=1_000)
    """How long connecting may take; libpq counts whole seconds."""

    batch_limit: int = Field(default=1_000, ge=1)
    """Rows after which a batch is handed on. Soft: transactions are never split."""

    poll_interval_ms: int = Field(default=1_000, ge=1)
    """How long the polling engine waits when there was nothing to read."""


class SourceConfig(Section):
    """Where changes come from."""

    postgres: PostgresConfig = PostgresConfig()


class CaptureSecurityConfig(Section):
    """How capture proves to the log who it is."""

    tls: bool = False
    """Encrypt. Implied by `tls_ca` and `tls_certificate`."""

    tls_ca: str = ""
    """PEM file of the authority that signed the node's certificate. Empty: those the system trusts."""

    tls_certificate: str = ""
    """PEM file of a client certificate."""

    tls_key: str = ""
    """PEM file of its private key."""

    user: str = ""
    """Authenticate with SASL as this user. Empty: without."""

    password_env: str = ""
    """Name of the environment variable that holds the user's password."""

    mechanism: Mechanism = "SCRAM-SHA-256"
    """How to authenticate; `PLAIN` only over TLS."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key are given together or not at all")
        if bool(self.user) != bool(self.password_env):
            raise ValueError("user and password_env are given together or not at all")
        return self


class CaptureConfig(Section):
    """How changes are written into the log."""

    prefix: str = Field(default="walstream", pattern=_PREFIX, max_length=100)
    """Begins the names of all topics: `<prefix>.<schema>.<table>`, `<prefix>.commits`, `<prefix>.schema`."""

    bootstrap: str = Field(default="127.0.0.1:9092", pattern=r"^.+:\d{1,5}$")
    """Addresses of the log, as `host:port` with commas between: a walstream node or an Apache Kafka cluster."""

    partitions: int = Field(default=1, ge=1, le=10_000)
    """Partitions of a topic that capture creates. More than one keeps order per key only."""

    snapshot: SnapshotMode = "initial"
    """`initial`: the rows that are there when a table is first captured come first; `never`: only changes."""

    snapshot_workers: int = Field(default=2, ge=1, le=64)
    """Connections that read a snapshot at once, all of them seeing the same moment."""

    memory_bytes_max: int = Field(default=32 * MIB, ge=MIB)
    """Bytes of unfinished transactions kept in memory; what is beyond it waits in files."""

    spill_directory: str = ""
    """Folder for those files, emptied at start. Empty: a temporary one."""

    tenant: Annotated[str, AfterValidator(_check_tenant)] = Field(default="default", min_length=1)
    """The tenant header of each record: `schema` takes the table's schema, `column:NAME` a column, else this text."""

    on_decode_error: OnDecodeError = "stop"
    """A change that cannot be understood: `stop` with its bytes saved, or put it into `<prefix>.dead_letter`."""

    heartbeat_interval_ms: int = Field(default=0, ge=0)
    """How often a message is written into PostgreSQL's log to move an idle slot on; 0: never."""

    security: CaptureSecurityConfig = CaptureSecurityConfig()


class StreamRule(Section):
    """Which rows go to which topic. A row goes to each stream that matches; with no streams, to its table's topic."""

    table: str = Field(default="*", min_length=1)
    """The tables, as `schema.table`, where `*` stands for any text."""

    operations: tuple[RowOperation, ...] = Field(default=ROW_OPERATIONS, min_length=1)
    """The operations that are taken; `snapshot` are the rows that were there before."""

    topic: str = ""
    """The topic; `{prefix}`, `{schema}`, `{table}` and, for an outbox, `{route}` are replaced. Empty: the default."""

    key: tuple[str, ...] = ()
    """The columns that make the record's key. Empty: those of the table's replica identity."""

    tombstones: bool = False
    """After each delete a second record, with the key and without a value, for topics that are compacted."""

    format: RowFormat = "debezium"
    """`debezium`: what happened to the row; `outbox`: the row is a message, passed through."""

    outbox_route_column: str = Field(default="aggregatetype", min_length=1)
    """Outbox: the column that names the topic, the default of which is `{route}`."""

    outbox_key_column: str = Field(default="aggregateid", min_length=1)
    """Outbox: the column that is the record's key."""

    outbox_payload_column: str = Field(default="payload", min_length=1)
    """Outbox: the column that is the record's value, as it is."""

    outbox_header_columns: tuple[str, ...] = ()
    """Outbox: columns that become headers of the record."""

    @field_validator("outbox_header_columns")
    @classmethod
    def _check_headers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if reserved := [name for name in names if is_reserved_header(name)]:
            raise ValueError(f"{', '.join(reserved)}: capture writes a header of that name; rename the column")
        return names

    @field_validator("topic")
    @classmethod
    def _check_topic(cls, topic: str) -> str:
        for place in re.findall(r"\{(.*?)\}", topic):
            if place not in TOPIC_PLACES:
                raise ValueError(f"{{{place}}} is none of " + ", ".join(f"{{{known}}}" for known in TOPIC_PLACES))
        if not re.fullmatch(r"[a-zA-Z0-9._-]*", re.sub(r"\{.*?\}", "", topic)):
            raise ValueError("a topic name has letters, digits, dots, underscores and hyphens")
        return topic

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "{route}" in self.topic and self.format != "outbox":
            raise ValueError("{route} in topic needs format = outbox")
        return self
