"""Where PostgreSQL is and who we are to it: the configuration, as libpq wants to have it.

The password comes from the environment and goes into the connection string; so the string is never logged or shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from psycopg.conninfo import make_conninfo

from walstream.config import PostgresConfig, ReplicaConfig
from walstream.errors import ConfigError


def dsn(config: PostgresConfig | ReplicaConfig, environ: Mapping[str, str] | None = None) -> str:
    """Return the connection string. Raises ConfigError when the variable that is to hold the password is not set."""
    environ = os.environ if environ is None else environ
    given: dict[str, str | int | None] = {
        "host": config.host,
        "port": config.port,
        "dbname": config.database,
        "user": config.user,
        "sslmode": config.sslmode,
        "sslrootcert": config.sslrootcert or None,
        # libpq counts whole seconds, and takes 1 for 2.
        "connect_timeout": max(2, -(-config.connect_timeout_ms // 1000)),
    }
    if config.password_env:
        if config.password_env not in environ:
            section = "source.postgres" if isinstance(config, PostgresConfig) else "pipeline.replica"
            raise ConfigError(
                f"The environment has no variable {config.password_env}, which is to hold PostgreSQL's password.",
                f"{section}.password_env names it.",
            )
        given["password"] = environ[config.password_env]
    return make_conninfo("", **given)


def shown(config: PostgresConfig | ReplicaConfig) -> str:
    """Say where that is, to people."""
    return f"{config.database} at {config.host}:{config.port}"
