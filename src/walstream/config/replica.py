"""The section [pipeline.replica]: a PostgreSQL that follows the source, when `pipeline.destination` is `postgres`.

The password is never in the file: a setting names the environment variable that holds it.
"""

from __future__ import annotations

from pydantic import Field

from walstream.config.capture import SslMode
from walstream.config.section import Section


class ReplicaConfig(Section):
    """The PostgreSQL server that tables are copied to, and where it keeps how far it has come."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Name or address of the server, or the folder of its socket. Spark's executors connect to it too."""

    port: int = Field(default=5432, ge=1, le=65_535)
    """Port of the server."""

    database: str = Field(default="replica", min_length=1)
    """The database whose tables follow the source, under the same names."""

    user: str = Field(default="postgres", min_length=1)
    """The role to connect as. It needs CREATE on the database, and the right to set session_replication_role."""

    password_env: str = ""
    """Name of the environment variable that holds the password. Empty: libpq looks, in PGPASSWORD and ~/.pgpass."""

    sslmode: SslMode = "prefer"
    """How much TLS is asked for, in libpq's words; only `verify-full` makes sure who answers."""

    sslrootcert: str = ""
    """PEM file of the authorities that `verify-ca` and `verify-full` trust. Empty: libpq's default."""

    connect_timeout_ms: int = Field(default=10_000, ge=1_000)
    """How long connecting may take; libpq counts whole seconds."""

    control_schema: str = Field(default="walstream", min_length=1, max_length=63)
    """Schema of the replica for walstream's own tables: its position, and what a batch has staged."""
