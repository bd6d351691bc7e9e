"""Questions to PostgreSQL's catalogue: relations, types, slots, publications, the server itself.

Owns the queries, by server version; refuses to judge the answers. Every function takes an ordinary session
(session.connect) and asks once for all that it is given. The catalogue is that of now, not of the WAL that is being
read: relations.py says when it may be believed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import psycopg

from walstream.positions import Lsn
from walstream.postgres.relations import ColumnFacts, RelationFacts
from walstream.postgres.session import named
from walstream.postgres.types import TypeFacts

Connection = psycopg.Connection[Any]

PARTS_DEPTH_MAX: Final = 64


class SlotFacts(NamedTuple):
    """A replication slot. `invalidation_reason` is None for a slot that works; what a version lacks is None too."""

    name: str
    plugin: str | None
    database: str | None
    temporary: bool
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush: Lsn | None
    wal_status: str | None
    safe_wal_bytes: int | None
    two_phase: bool
    failover: bool | None
    invalidation_reason: str | None


class PublishedTable(NamedTuple):
    """A table of a publication: which columns of it, and which rows (None: all)."""

    schema: str
    table: str
    columns: tuple[str, ...]
    row_filter: str | None


class PublicationFacts(NamedTuple):
    """A publication: what it publishes of which tables. `generated_columns`: stored ones are published too (18)."""

    name: str
    all_tables: bool
    operations: frozenset[str]
    via_root: bool
    generated_columns: bool
    tables: tuple[PublishedTable, ...]


class ServerFacts(NamedTuple):
    """The server: its version, the settings that logical replication depends on, and how far its WAL reaches."""

    version: int
    in_recovery: bool
    wal_end: Lsn
    settings: dict[str, str]


def relation_facts(connection: Connection, ids: Collection[int]) -> dict[int, RelationFacts]:
    """Describe tables by their OIDs; those that are gone are left out."""
    with named("reading the columns of tables"):
        rows = connection.execute(_RELATIONS, [list(ids)]).fetchall()
        columns: dict[int, list[ColumnFacts]] = {}
        for relation_id, *column in connection.execute(_COLUMNS, [list(ids)]):
            columns.setdefault(relation_id, []).append(ColumnFacts(*column))
    return {
        row[0]: RelationFacts(
            id=row[0],
            schema=row[1],
            table=row[2],
            kind=row[3],
            replica_identity=row[4],
            columns=tuple(columns.get(row[0], ())),
            primary_key=tuple(row[5] or ()),
            identity_key=tuple(row[6] or ()),
            partition_root=(row[7], row[8]) if row[7] is not None else None,
        )
        for row in rows
    }


def find_relation(connection: Connection, schema: str, table: str) -> RelationFacts | None:
    """Describe a table by its name."""
    with named("looking for a table"):
        row = connection.execute(_RELATION_ID, [schema, table]).fetchone()
    return relation_facts(connection, [row[0]]).get(row[0]) if row else None


def type_facts(connection: Connection, oids: Collection[int]) -> list[TypeFacts]:
    """Describe types by their OIDs, with the types they are made of; those that are gone are left out."""
    found: dict[int, TypeFacts] = {}
    pending = set(oids)
    with named("reading types"):
        for _ in range(PARTS_DEPTH_MAX):
            if not pending:
                break
            facts = [TypeFacts(*row) for row in connection.execute(_TYPES, [list(pending)])]
            found.update((fact.oid, fact) for fact in facts)
            parts = {part for fact in facts for part in (fact.base_oid, fact.element_oid) if part}
            pending = parts - found.keys()
    return list(found.values())


def slot_facts(connection: Connection, name: str) -> SlotFacts | None:
    """Describe a slot; None when there is none of that name."""
    version = connection.info.server_version
    failover = "s.failover" if version >= 170000 else "null::bool"
    lost = "case s.wal_status when 'lost' then 'wal_removed' end"
    if version >= 170000:
        reason = f"coalesce(s.invalidation_reason, {lost})"
    elif version >= 160000:
        # 16 says "conflicting" of every invalidated slot, whatever the reason.
        reason = f"coalesce({lost}, case when s.conflicting then 'invalidated' end)"
    else:
        reason = lost
    query = _SLOT.format(failover=failover, reason=reason)
    with named(f"looking at the slot {name}"):
        row = connection.execute(query.encode(), [name]).fetchone()
    if row is None:
        return None
    facts = SlotFacts(*row)
    return facts._replace(restart_lsn=_lsn(facts.restart_lsn), confirmed_flush=_lsn(facts.confirmed_flush))


def has_publication(connection: Connection, name: str) -> bool:
    """Return whether there is a publication; unlike `publication_facts` it waits for no lock on a table."""
    with named(f"looking for the publication {name}"):
        found = connection.execute("select from pg_catalog.pg_publication where pubname = %s", [name]).fetchone()
    return found is not None


def publication_facts(connection: Connection, name: str) -> PublicationFacts | None:
    """Describe a publication with its tables; None when there is none of that name."""
    version = connection.info.server_version
    generated = "p.pubgencols = 's'" if version >= 180000 else "false"
    with named(f"looking at the publication {name}"):
        row = connection.execute(_PUBLICATION.format(generated=generated).encode(), [name]).fetchone()
        if row is None:
            return None
        query = _PUBLISHED if version >= 180000 else _PUBLISHED_17 if version >= 150000 else _PUBLISHED_14
        tables = connection.execute(query, [name]).fetchall()
    return PublicationFacts(
        name=row[0],
        all_tables=row[1],
        operations=frozenset(row[2]),
        via_root=row[3],
        generated_columns=row[4],
        tables=tuple(PublishedTable(schema, table, tuple(columns), rows) for schema, table, columns, rows in tables),
    )


def server_facts(connection: Connection, settings: Sequence[str] = ()) -> ServerFacts:
    """Describe the server; `settings` names more of pg_settings to bring back."""
    with named("reading the server's settings"):
        row = connection.execute(_SERVER).fetchone()
        assert row is not None, "the query has one row"
        found = connection.execute(_SETTINGS, [[*_WANTED_SETTINGS, *settings]]).fetchall()
    return ServerFacts(connection.info.server_version, row[0], Lsn.parse(row[1]), dict(found))


def wal_end(connection: Connection) -> Lsn:
    """Return how far the server's WAL reaches now."""
    return server_facts(connection).wal_end


def system_identifier(connection: Connection) -> str:
    """Return the cluster's identifier, the same that IDENTIFY_SYSTEM gives."""
    with named("asking who it is"):
        row = connection.execute("select system_identifier::text from pg_catalog.pg_control_system()").fetchone()
    assert row is not None, "the function has one row"
    return str(row[0])


def _lsn(text: object) -> Lsn | None:
    return None if text is None else Lsn.parse(str(text))


_WANTED_SETTINGS: Final = (
    "wal_level",
    "max_replication_slots",
    "max_wal_senders",
    "max_slot_wal_keep_size",
    "wal_sender_timeout",
    "server_encoding",
    "synchronized_standby_slots",
    "idle_replication_slot_timeout",
    "logical_decoding_work_mem",
)

_SERVER: Final = """
    select pg_is_in_recovery(),
           case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end::text
"""

_SETTINGS: Final = "select name, setting from pg_catalog.pg_settings where name = any(%s)"

_RELATION_ID: Final = """
    select c.oid from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = %s and c.relname = %s and c.relkind in ('r', 'p')
"""

# The replica identity's columns: those of the index that is marked, of the primary key by default, none for NOTHING,
# and for FULL all that a row has. A deferrable primary key is no identity, columns that an index merely includes do not
# count. Names come in the order of the columns, as Relation messages have them.
_RELATIONS: Final = """
    select c.oid, n.nspname, c.relname, c.relkind::text, c.relreplident::text,
           keys.of_primary, case c.relreplident when 'd' then keys.of_default when 'i' then keys.of_identity
                                                when 'f' then keys.of_all end,
           root.schema, root.table
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    cross join lateral (
        select array_agg(a.attname::text order by a.attnum) filter (where a.attnum = any(i.of_primary)) as of_primary,
               array_agg(a.attname::text order by a.attnum) filter (where a.attnum = any(i.of_default)) as of_default,
               array_agg(a.attname::text order by a.attnum) filter (where a.attnum = any(i.of_identity)) as of_identity,
               array_agg(a.attname::text order by a.attnum) as of_all
        from pg_catalog.pg_attribute a,
             (select max(columns) filter (where primary_key), max(columns) filter (where primary_key and immediate),
                     max(columns) filter (where identity)
              from (select (indkey::int2[])[0:indnkeyatts - 1], indisprimary, indimmediate, indisreplident
                    from pg_catalog.pg_index where indrelid = c.oid) as x (columns, primary_key, immediate, identity)
             ) as i (of_primary, of_default, of_identity)
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    ) keys
    left join lateral (
        select rn.nspname as schema, rc.relname as table
        from pg_catalog.pg_class rc join pg_catalog.pg_namespace rn on rn.oid = rc.relnamespace
        where c.relispartition and rc.oid = pg_catalog.pg_partition_root(c.oid)
    ) root on true
    where c.oid = any(%s::oid[])
"""

_COLUMNS: Final = """
    select a.attrelid, a.attnum, a.attname::text, a.atttypid, a.atttypmod,
           pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated::text
    from pg_catalog.pg_attribute a
    where a.attrelid = any(%s::oid[]) and a.attnum > 0 and not a.attisdropped
    order by a.attrelid, a.attnum
"""

_TYPES: Final = """
    select t.oid, n.nspname, t.typname, t.typtype::text, t.typbasetype, t.typtypmod,
           case when t.typoutput = 'pg_catalog.array_out'::pg_catalog.regproc then t.typelem else 0::oid end,
           t.typdelim::text
    from pg_catalog.pg_type t join pg_catalog.pg_namespace n on n.oid = t.typnamespace
    where t.oid = any(%s::oid[])
"""

_SLOT: Final = """
    select s.slot_name, s.plugin, s.database, s.temporary, s.active_pid, s.restart_lsn::text,
           s.confirmed_flush_lsn::text, s.wal_status, s.safe_wal_size, s.two_phase, {failover}, {reason}
    from pg_catalog.pg_replication_slots s where s.slot_name = %s
"""

_PUBLICATION: Final = """
    select p.pubname, p.puballtables,
           array_remove(array[
               case when p.pubinsert then 'insert' end, case when p.pubupdate then 'update' end,
               case when p.pubdelete then 'delete' end, case when p.pubtruncate then 'truncate' end], null),
           p.pubviaroot, {generated}
    from pg_catalog.pg_publication p where p.pubname = %s
"""

_PUBLISHED: Final = """
    select schemaname, tablename, attnames::text[], rowfilter
    from pg_catalog.pg_publication_tables where pubname = %s order by 1, 2
"""

# Before 18 generated columns are never published, but 15 lists them.
_PUBLISHED_17: Final = """
    select t.schemaname, t.tablename, array_agg(a.attname::text order by a.attnum), t.rowfilter
    from pg_catalog.pg_publication_tables t
    join pg_catalog.pg_namespace n on n.nspname = t.schemaname
    join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
    join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = any(t.attnames) and a.attgenerated = ''
    where t.pubname = %s group by t.schemaname, t.tablename, t.rowfilter order by 1, 2
"""

_PUBLISHED_14: Final = """
    select t.schemaname, t.tablename, array_agg(a.attname::text order by a.attnum), null::text
    from pg_catalog.pg_publication_tables t
    join pg_catalog.pg_namespace n on n.nspname = t.schemaname
    join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
    join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
    where t.pubname = %s group by 1, 2 order by 1, 2
"""
