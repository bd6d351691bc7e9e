"""What a PostgreSQL server says of itself, as far as capture cares: its facts, our role, and every table.

Every query here may be run by any role that can connect, on every version from 14 on. Nothing here judges: `check.py`
does. The one thing that is ever changed is what `run_statements` is told to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from psycopg import Connection

from walstream.config import PostgresConfig
from walstream.postgres import catalogue
from walstream.postgres.catalogue import PublicationFacts, ServerFacts, SlotFacts
from walstream.postgres.session import named

Identity = Literal["default", "index", "full", "nothing"]


@dataclass(frozen=True, slots=True)
class Role:
    """Who we are to the server, and what we may do."""

    name: str
    quoted: str
    is_superuser: bool
    may_replicate: bool
    may_create: bool
    """Whether the role may create a publication in this database."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that could be captured; `quoted` is a name as SQL writes it."""

    schema: str
    name: str
    schema_quoted: str
    quoted: str
    is_published: bool
    """Itself, as a partition of one that is, or through its partitions."""
    is_listed: bool
    """Itself: this is the name its changes have."""
    is_partitioned: bool
    is_partition: bool
    identity: Identity
    has_key: bool
    """Whether its replica identity is an index that exists."""
    spare_index: str | None
    """A unique index that could be its replica identity, as SQL writes its name."""
    may_select: bool
    may_use_schema: bool
    is_owner: bool
    hides_rows: bool
    """Whether row security applies to us."""
    has_generated: bool
    row_filter: str | None
    has_generated_key: bool = False
    """Whether a stored generated column is in its replica identity's index."""

    @property
    def shown(self) -> str:
        """The name as people write it."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it."""

    server: ServerFacts
    version: str
    role: Role
    slots_used: int
    senders_used: int
    physical_slots: tuple[str, ...]
    slot: SlotFacts | None
    publication: PublicationFacts | None
    publication_quoted: str
    tables: tuple[Table, ...]

    @property
    def major(self) -> int:
        """The version as people say it: 18."""
        return self.server.version // 10_000

    @property
    def behind_bytes(self) -> int | None:
        """How far the slot is behind the end of the server's WAL."""
        if self.slot is None or self.slot.confirmed_flush is None:
            return None
        return max(0, self.server.wal_end - self.slot.confirmed_flush)


def gather(connection: Connection[Any], settings: PostgresConfig) -> Facts:
    """Ask the server. Raises QueryFailed, ConnectionLost."""
    with named("inspecting the server"):
        (version, slots_used, senders_used, physical_slots, publication_quoted) = _one(
            connection,
            """
            SELECT current_setting('server_version'),
                   (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_stat_replication),
                   ARRAY(SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'physical' ORDER BY 1),
                   quote_ident(%s)
            """,
            settings.publication_name,
        )
        return Facts(
            server=catalogue.server_facts(connection),
            version=version.split()[0],
            role=_role(connection),
            slots_used=slots_used,
            senders_used=senders_used,
            physical_slots=tuple(physical_slots),
            slot=catalogue.slot_facts(connection, settings.slot_name),
            publication=catalogue.publication_facts(connection, settings.publication_name),
            publication_quoted=publication_quoted,
            tables=_tables(connection, settings.publication_name),
        )


def run_statements(connection: Connection[Any], statements: Sequence[str]) -> None:
    """Run statements that a finding came with. Raises what PostgreSQL answers."""
    for statement in statements:
        with named(f"running {statement}"):
            connection.execute(statement)


def _one(connection: Connection[Any], query: str, *parameters: object) -> Any:
    return connection.execute(query, parameters).fetchone()


def _role(connection: Connection[Any]) -> Role:
    # Managed services do not hand out the attribute; membership in a role of theirs stands in for it.
    found = _one(
        connection,
        """
        SELECT rolname, quote_ident(rolname), rolsuper,
               rolreplication OR EXISTS (
                   SELECT FROM pg_roles AS managed
                   WHERE managed.rolname = 'rds_replication' AND pg_has_role(current_user, managed.oid, 'MEMBER')),
               has_database_privilege(current_database(), 'CREATE')
        FROM pg_roles WHERE rolname = current_user
        """,
    )
    name, quoted, is_superuser, may_replicate, may_create = found
    return Role(name, quoted, is_superuser, may_replicate or is_superuser, may_create)


_TABLES = """
WITH published AS (
    -- By name and not by regclass, which wants USAGE on the schema.
    SELECT c.oid AS id, to_jsonb(p)->>'rowfilter' AS row_filter
    FROM pg_publication_tables AS p
    JOIN pg_namespace AS n ON n.nspname = p.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = p.tablename
    WHERE p.pubname = %s
)
SELECT n.nspname, c.relname, quote_ident(n.nspname), format('%%I.%%I', n.nspname, c.relname),
    published.id IS NOT NULL
        OR EXISTS (SELECT FROM pg_partition_ancestors(c.oid) AS a JOIN published ON published.id = a.relid)
        OR EXISTS (SELECT FROM pg_partition_tree(c.oid) AS a JOIN published ON published.id = a.relid),
    published.id IS NOT NULL, c.relkind = 'p', c.relispartition,
    CASE c.relreplident WHEN 'd' THEN 'default' WHEN 'i' THEN 'index' WHEN 'f' THEN 'full' ELSE 'nothing' END,
    EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
        AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END),
    (SELECT quote_ident(x.relname) FROM pg_index AS i JOIN pg_class AS x ON x.oid = i.indexrelid
        WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate
            AND i.indpred IS NULL AND i.indexprs IS NULL
            AND NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = c.oid
                AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1]) AND NOT a.attnotnull)
        ORDER BY i.indisprimary DESC, i.indnkeyatts, x.relname LIMIT 1),
    has_table_privilege(c.oid, 'SELECT'), has_schema_privilege(n.oid, 'USAGE'), pg_has_role(c.relowner, 'USAGE'),
    row_security_active(c.oid),
    EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attgenerated = 's' AND NOT a.attisdropped),
    published.row_filter,
    EXISTS (SELECT FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = c.oid
        WHERE i.indrelid = c.oid AND a.attgenerated = 's' AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1])
        AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END)
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN published ON published.id = c.oid
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
ORDER BY 1, 2
"""


def _tables(connection: Connection[Any], publication: str) -> tuple[Table, ...]:
    return tuple(Table(*row) for row in connection.execute(_TABLES, [publication]).fetchall())
