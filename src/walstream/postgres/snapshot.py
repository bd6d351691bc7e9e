"""One moment of a database, held still: a consistent point, and the published tables as they are at it.

Owns the keeping of a snapshot and the questions about what the publication publishes; refuses to know in which order
tables are read and what becomes of their rows.

A consistent point is where a logical slot begins: what committed before its LSN is in the snapshot, what commits at or
after it is in the stream, and nothing is in both or in neither. `pg_current_wal_lsn()` is no such point: a transaction
may be behind it and not yet visible, or have begun before a table was published and commit after.

The snapshot that a slot exports dies with the next command of its session. So a *keeper*, a transaction that reads
nothing else, imports it and exports it again; it holds no lock on any table, and as long as it lives any number of
transactions can be at this moment, each for one table.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import psycopg

from walstream.errors import LockTimeout, PublicationMissing
from walstream.positions import Lsn
from walstream.postgres import catalogue
from walstream.postgres.identity import Identity, PartIdentity
from walstream.postgres.messages import Relation, RelationColumn
from walstream.postgres.relations import RelationFacts
from walstream.postgres.session import CreatedSlot, ReplicationSession, cancel, connect, named

APPLICATION_NAME: Final = "walstream snapshot"

Connection = psycopg.Connection[Any]


class Membership(NamedTuple):
    """A published table, and what it is to the publication."""

    schema: str
    table: str
    relation_id: int
    identity: Identity


class Part(NamedTuple):
    """A relation with rows: the table itself or, of a partitioned table, one leaf. `is_heap`: rows have a block."""

    relation_id: int
    schema: str
    table: str
    block_count: int
    is_heap: bool


class TableAtPoint(NamedTuple):
    """A published table as it is at the point; `relation` is what pgoutput would say of it."""

    member: Membership
    relation: Relation
    row_filter: str | None
    parts: tuple[Part, ...]
    foreign_parts: tuple[str, ...]
    """Partitions that are foreign or unlogged tables: PostgreSQL streams nothing of them."""


class ConsistentPoint:
    """A snapshot that stays until it is closed, and the LSN at which the stream takes over."""

    def __init__(self, dsn: str, lsn: Lsn, exported: str, *, lock_timeout_s: float = 0) -> None:
        """Import a snapshot that is exported at this moment, and keep it; `lock_timeout_s` as for `connect`."""
        self.dsn = dsn
        self.lsn = lsn
        self._keeper = patient_session(dsn, lock_timeout_s=lock_timeout_s)
        try:
            with named("importing the snapshot of a slot"):
                self._keeper.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                self._keeper.execute(f"SET TRANSACTION SNAPSHOT '{exported}'")
                row = self._keeper.execute(
                    "SELECT pg_export_snapshot(), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
                ).fetchone()
        except BaseException:
            self._keeper.close()
            raise
        assert row is not None, "the query has one row"
        self.snapshot_name: str = row[0]
        self.time_us: int = row[1]
        """When it was taken, by the server's clock; microseconds since 1970."""

    @classmethod
    def of_slot(cls, dsn: str, slot: CreatedSlot, *, lock_timeout_s: float = 0) -> ConsistentPoint:
        """Keep the moment at which a slot begins; its session must not have run another command since."""
        assert slot.snapshot_name is not None, "the slot was created with an exported snapshot"
        return cls(dsn, slot.consistent_point, slot.snapshot_name, lock_timeout_s=lock_timeout_s)

    @classmethod
    def now(cls, dsn: str, slot_name: str, *, lock_timeout_s: float = 0) -> ConsistentPoint:
        """Find a consistent point of now, with a temporary slot; waits until every running transaction has ended."""
        with ReplicationSession(dsn, application_name=APPLICATION_NAME) as session:
            slot = session.create_slot(slot_name, temporary=True, snapshot="export")
            return cls.of_slot(dsn, slot, lock_timeout_s=lock_timeout_s)

    def tables(self, publication: str, wanted: Collection[tuple[str, str]]) -> list[TableAtPoint]:
        """Describe the published tables among those wanted, as they are at this point."""
        return tables_at(self._keeper, publication, wanted)

    def is_alive(self) -> bool:
        """Whether the snapshot can still be imported."""
        return not self._keeper.closed and not self._keeper.broken

    def cancel(self) -> None:
        """End a question that another thread waits for."""
        cancel(self._keeper)

    def close(self) -> None:
        """Let the moment go."""
        self._keeper.close()


def patient_session(dsn: str, *, lock_timeout_s: float = 0) -> Connection:
    """Open a session that only reads and that the server does not end for being idle or for taking long."""
    connection = connect(dsn, application_name=APPLICATION_NAME, read_only=True, lock_timeout_s=lock_timeout_s)
    with named("preparing a session"):
        connection.execute(_NO_TIMEOUTS)
    return connection


def temporary_slot_name() -> str:
    """Return a name that no other slot has; it also marks whose the slot is."""
    return f"walstream_snapshot_{uuid.uuid4().hex[:16]}"


def cancel_slot(dsn: str, slot_name: str) -> None:
    """End the wait of a session that creates this slot; of one that has it already, nothing."""
    with connect(dsn, application_name=APPLICATION_NAME) as connection, named("cancelling the creation of a slot"):
        connection.execute(
            "SELECT pg_cancel_backend(active_pid) FROM pg_replication_slots"
            " WHERE slot_name = %s AND active_pid IS NOT NULL",
            [slot_name],
        )


def locked_tables(connection: Connection) -> list[str]:
    """Name the tables that sessions hold exclusively, each with the session's process."""
    with named("looking for locks"):
        rows = connection.execute(_LOCKED).fetchall()
    return [f"{schema}.{table} (pid {pid})" for schema, table, pid in rows]


def memberships(connection: Connection, publication: str) -> list[Membership]:
    """List what the publication publishes, all of it by one query. Raises PublicationMissing."""
    by_schema = _BY_SCHEMA if connection.info.server_version >= 150000 else ""
    with named(f"looking at the publication {publication}"):
        rows = connection.execute(_MEMBERS.format(by_schema=by_schema).encode(), [publication]).fetchall()
        if not rows:
            found = connection.execute("SELECT FROM pg_publication WHERE pubname = %s", [publication]).fetchone()
            if found is None:
                raise PublicationMissing(f"There is no publication {publication}.", "`walstream capture check` helps.")
    return [_membership(*row) for row in rows]


def was_attached_empty(connection: Connection, part_id: int, *, is_born: bool) -> bool | None:
    """Whether it is certain that a leaf had no rows when it was attached; None: a lock does not let us see.

    It is when there is none now, and when it was created by the transaction that attached it (`is_born`) and no row is
    of an earlier command of that transaction.
    """
    query = "SELECT NOT EXISTS (SELECT FROM ONLY {part})"
    if is_born:
        query = """
            SELECT NOT EXISTS (SELECT FROM ONLY {part} AS p, pg_catalog.pg_inherits AS i WHERE i.inhrelid = {id}
                AND p.xmin = i.xmin AND p.cmin::text::bigint < i.cmin::text::bigint)
        """
    return _looked(connection, part_id, query)


def has_row_of_before(connection: Connection, part_id: int, horizon: int) -> bool | None:
    """Whether one of a relation's first rows is older than a transaction id; None: a lock does not let us see."""
    older = f"age(p.xmin) > age('{horizon & 0xFFFF_FFFF}'::xid)"
    ended = f"pg_snapshot_xmax(pg_current_snapshot())::text::bigint - {horizon} < {1 << 31}"
    query = "SELECT EXISTS (SELECT FROM (SELECT xmin FROM ONLY {part} LIMIT %d) AS p WHERE %s AND %s)"
    return _looked(connection, part_id, query % (SAMPLED_ROWS, older, ended))


def _looked(connection: Connection, part_id: int, query: str) -> bool | None:
    """Return the answer of a query over `{part}`; None: the relation is locked. Raises QueryFailed, NotAuthorized."""
    try:
        with named(f"looking at the rows of relation {part_id}"), connection.transaction():
            connection.execute(_BRIEFLY)
            found = connection.execute("SELECT %s::oid::regclass::text", [part_id]).fetchone()
            if found is None or found[0].isdecimal():
                return None
            row = connection.execute(query.format(part=found[0], id=part_id).encode()).fetchone()
    except LockTimeout:
        return None
    return row is not None and bool(row[0])


def _membership(schema: str, table: str, relation_id: int, *more: Any) -> Membership:
    entry, publication_xid, via_root, operations, names, horizon, parts, columns = more
    found = {int(one): PartIdentity(*part) for one, part in (parts or {}).items()}
    identity = Identity(relation_id, entry, publication_xid, via_root, operations, names, horizon, found, columns)
    return Membership(schema, table, relation_id, identity)


def tables_at(connection: Connection, publication: str, wanted: Collection[tuple[str, str]]) -> list[TableAtPoint]:
    """Describe the published tables among those wanted, with the eyes of this connection's transaction."""
    members = [member for member in memberships(connection, publication) if member[:2] in wanted]
    published = catalogue.publication_facts(connection, publication)
    if published is None or not members:
        return []
    listed = {(table.schema, table.table): table for table in published.tables}
    ids = [member.relation_id for member in members]
    facts = catalogue.relation_facts(connection, ids)
    parts, foreign = parts_of(connection, ids)
    found = []
    for member in members:
        fact, entry = facts.get(member.relation_id), listed.get(member[:2])
        if fact is None or entry is None:
            continue  # Gone meanwhile: part of what these queries ask is of now, whatever the snapshot.
        one = member.relation_id
        unlogged = {part_id for part_id, part in member.identity.parts.items() if part.persistence != "p"}
        left_out = [f"{part.schema}.{part.table}" for part in parts.get(one, ()) if part.relation_id in unlogged]
        logged = tuple(part for part in parts.get(one, ()) if part.relation_id not in unlogged)
        relation = relation_message(fact, entry.columns, generated=connection.info.server_version >= 180000)
        found.append(TableAtPoint(member, relation, entry.row_filter, logged, (*foreign.get(one, ()), *left_out)))
    return found


def parts_of(connection: Connection, ids: Sequence[int]) -> tuple[dict[int, list[Part]], dict[int, list[str]]]:
    """Return, by table, the relations that hold its rows, and the names of those that are foreign tables."""
    parts: dict[int, list[Part]] = {}
    foreign: dict[int, list[str]] = {}
    with named("measuring tables"):
        for root, kind, *part in connection.execute(_PARTS, [list(ids)]):
            if kind == "f":
                foreign.setdefault(root, []).append(f"{part[1]}.{part[2]}")
            else:
                parts.setdefault(root, []).append(Part(*part))
    return parts, foreign


def relation_message(facts: RelationFacts, published_columns: Iterable[str], *, generated: bool) -> Relation:
    """Return the Relation message that pgoutput sends for a table of which these columns are published.

    Before PostgreSQL 18 no generated column is sent, whatever the view pg_publication_tables of version 15 says.
    """
    published, key = set(published_columns), set(facts.identity_key)
    columns = tuple(
        RelationColumn(column.name, column.type_oid, column.type_modifier, column.name in key)
        for column in facts.columns
        if column.name in published and (generated or not column.generated)
    )
    return Relation(None, facts.id, facts.schema, facts.table, facts.replica_identity, columns)


# Not every version has both; the others are pinned for all of our sessions.
_NO_TIMEOUTS: Final = """
    SELECT pg_catalog.set_config(name, '0', false) FROM pg_catalog.pg_settings
    WHERE name IN ('transaction_timeout', 'idle_session_timeout')
"""

_LOCKED: Final = """
    SELECT n.nspname, c.relname, l.pid FROM pg_catalog.pg_locks l
    JOIN pg_catalog.pg_class c ON c.oid = l.relation JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE l.granted AND l.mode = 'AccessExclusiveLock' AND l.locktype = 'relation' AND c.relkind IN ('r', 'p')
      AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
    ORDER BY 1, 2
"""

# A look at rows must not wait behind an ALTER TABLE, nor hold it up; row security must fail, not hide rows.
_BRIEFLY: Final = """
    SELECT pg_catalog.set_config('lock_timeout', '1s', true), pg_catalog.set_config('statement_timeout', '5s', true),
           pg_catalog.set_config('row_security', 'off', true)
"""

SAMPLED_ROWS: Final = 10_000
"""VACUUM FULL and CLUSTER keep xmin and, mostly, the order of rows: an old row is among the first, if there is any."""

# The entry that publishes a table: its own or that of a partitioned table above it, that of its schema, or the
# publication itself when it is FOR ALL TABLES. `names`: only RENAME, SET SCHEMA and OWNER TO write a table's row of
# pg_type. What pg_publication_tables lists is of now, everything else of the query's snapshot; where they disagree the
# identity matches no later one, and the table is read again.
_MEMBERS: Final = """
    SELECT t.schemaname, t.tablename, c.oid,
           coalesce(
               (SELECT max(r.oid) FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = p.oid
                AND (r.prrelid = c.oid OR r.prrelid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(c.oid)))),
               {by_schema} p.oid),
           p.xmin::text::bigint, p.pubviaroot,
           concat(CASE WHEN p.pubinsert THEN 'i' END, CASE WHEN p.pubupdate THEN 'u' END,
                  CASE WHEN p.pubdelete THEN 'd' END, CASE WHEN p.pubtruncate THEN 't' END),
           (SELECT string_agg(concat_ws('/', y.xmin, i.xmin), ' ' ORDER BY path.n)
            FROM (SELECT c.oid AS id, 0 AS n
                  UNION ALL SELECT a.relid::oid, a.n::int
                  FROM pg_catalog.pg_partition_ancestors(c.oid) WITH ORDINALITY AS a (relid, n)
                  WHERE c.relispartition AND NOT p.puballtables AND a.relid <> c.oid) AS path
            JOIN pg_catalog.pg_class k ON k.oid = path.id
            JOIN pg_catalog.pg_type y ON y.oid = k.reltype
            LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = k.oid AND k.relispartition AND NOT p.puballtables),
           pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::bigint,
           CASE c.relkind
               WHEN 'r' THEN json_build_object(
                   c.oid, json_build_array(c.relfilenode::bigint, c.reltoastrelid::bigint, c.relpersistence))
               ELSE (
                   SELECT json_object_agg(k.oid, json_build_array(
                       k.relfilenode::bigint, k.reltoastrelid::bigint, k.relpersistence,
                       coalesce(way.attached, ''), coalesce(way.is_born, false)))
                   FROM pg_catalog.pg_partition_tree(c.oid) AS leaf
                   JOIN pg_catalog.pg_class k ON k.oid = leaf.relid
                   CROSS JOIN LATERAL (
                       SELECT string_agg(i.xmin::text, '/' ORDER BY a.n) AS attached,
                              bool_and(i.xmin = y.xmin) AS is_born
                       FROM pg_catalog.pg_partition_ancestors(leaf.relid) WITH ORDINALITY AS a (relid, n)
                       JOIN pg_catalog.pg_inherits i ON i.inhrelid = a.relid
                       JOIN pg_catalog.pg_class above ON above.oid = a.relid
                       JOIN pg_catalog.pg_type y ON y.oid = above.reltype
                   ) AS way
                   WHERE leaf.isleaf AND leaf.relid <> c.oid)
           END,
           (SELECT coalesce(json_object_agg(a.attname, a.attnum), '{{}}') FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
    FROM pg_catalog.pg_publication_tables t
    JOIN pg_catalog.pg_publication p ON p.pubname = t.pubname
    JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = %s
    ORDER BY 1, 2
"""
_BY_SCHEMA: Final = """
    (SELECT max(s.oid) FROM pg_catalog.pg_publication_namespace s WHERE s.pnpubid = p.oid AND s.pnnspid = n.oid),"""

_PARTS: Final = """
    SELECT root.oid, c.relkind::text, c.oid, n.nspname, c.relname,
           CASE c.relkind WHEN 'r' THEN coalesce(pg_catalog.pg_relation_size(c.oid), 0) ELSE 0 END
               / pg_catalog.current_setting('block_size')::bigint,
           coalesce(am.amname = 'heap', false)
    FROM pg_catalog.pg_class root
    CROSS JOIN LATERAL (
        SELECT root.oid WHERE root.relkind = 'r'
        UNION
        SELECT leaf.relid::oid FROM pg_catalog.pg_partition_tree(root.oid) leaf
        WHERE root.relkind = 'p' AND leaf.isleaf AND leaf.relid <> root.oid
    ) part(id)
    JOIN pg_catalog.pg_class c ON c.oid = part.id
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_catalog.pg_am am ON am.oid = c.relam
    WHERE root.oid = ANY(%s::oid[]) AND c.relkind IN ('r', 'f')
    ORDER BY n.nspname, c.relname
"""
