"""What a PostgreSQL server still lacks to be captured, and the SQL that mends it.

Turns the facts of `facts.py` into findings and asks nobody, so the same facts always give the same answer. A finding is
a fact in words and, for what is wrong, the exact statements that mend it, in order. A *problem* keeps capture from
working or would lose rows; a *warning* is something an operator wants to know. Whether to run the statements is for a
person to decide: all that may be run unasked is what creates the publication and the slot, once nothing speaks against
it, because neither changes anything about a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from psycopg import sql

from walstream.capture.facts import Facts, Table
from walstream.config import CaptureConfig, PostgresConfig
from walstream.postgres.catalogue import PublicationFacts, SlotFacts

VERSION_MIN = 14
VERSION_MAX = 18
VERSION_FAILOVER = 17
VERSION_STANDBY = 16
VERSION_GENERATED = 18
LISTED_MAX = 5

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    state: State
    message: str
    statements: tuple[str, ...] = ()
    """The SQL that mends it, in order."""
    after: str = ""
    """What else has to be done or known, besides the statements."""
    creates: bool = False
    """Whether the statements may be run unasked: they create something and nothing speaks against it."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found on a server, in the order in which one would mend it."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What keeps capture from working."""
        return tuple(finding for finding in self.findings if finding.state == "problem")


Wanted = Callable[[Table], bool]
"""Whether the configuration wants the changes of a table."""


def inspect(facts: Facts, source: PostgresConfig, capture: CaptureConfig, wanted: Wanted) -> Inspection:
    """Judge the facts."""
    server = [*_server(facts), *_role(facts, source)]
    identities = list(_identities(facts, wanted))
    publication = list(_publication(facts, source, wanted, blocked=any(f.state == "problem" for f in identities)))
    privileges = list(_privileges(facts, capture, wanted))
    # A slot that is older than the publication would make PostgreSQL decode changes for which there is none yet.
    blocked = any(finding.state == "problem" and not finding.creates for finding in (*server, *publication))
    slot = list(_slot(facts, source, blocked=blocked))
    return Inspection(facts, (*server, *identities, *publication, *privileges, *slot, *_standbys(facts)))


def _server(facts: Facts) -> Iterator[Finding]:
    if facts.major < VERSION_MIN:
        message = f"PostgreSQL {facts.version} is older than {VERSION_MIN}, the oldest that walstream can read."
        yield Finding("version", "problem", message, after="Upgrade PostgreSQL.")
    elif facts.major > VERSION_MAX:
        message = f"PostgreSQL {facts.version} is newer than {VERSION_MAX}, the newest that walstream knows."
        yield Finding("version", "warning", message)
    else:
        yield Finding("version", "ok", f"PostgreSQL {facts.version}")
    if facts.server.in_recovery:
        state: State = "warning" if facts.major >= VERSION_STANDBY else "problem"
        message = "The server is a standby: it takes no publication, and versions before 16 decode nothing."
        yield Finding("standby", state, message, after="Name the primary in source.postgres.host.")
    yield _wal_level(facts)
    yield from _room(facts)
    if facts.server.settings["server_encoding"] == "SQL_ASCII":
        message = "The database's encoding is SQL_ASCII: text that is not UTF-8 cannot be decoded."
        yield Finding("encoding", "warning", message)


def _wal_level(facts: Facts) -> Finding:
    level = facts.server.settings["wal_level"]
    if level == "logical":
        return Finding("wal_level", "ok", level)
    return Finding(
        "wal_level",
        "problem",
        f"wal_level is {level}: the log lacks what is needed to decode changes.",
        ("ALTER SYSTEM SET wal_level = 'logical';",),
        "Then restart PostgreSQL. A managed service has a switch of its own for it.",
    )


def _room(facts: Facts) -> Iterator[Finding]:
    """Whether a slot and a sender are free. A snapshot takes one more slot for a moment."""
    for setting, used, held, what in (
        ("max_replication_slots", facts.slots_used, facts.slot is not None, "replication slots"),
        ("max_wal_senders", facts.senders_used, bool(facts.slot and facts.slot.active_pid), "WAL senders"),
    ):
        limit = int(facts.server.settings[setting])
        mend = (f"ALTER SYSTEM SET {setting} = {max(10, limit + 2)};",)
        if limit - used < (0 if held else 1):
            message = f"All {limit} {what} are taken ({setting})."
            yield Finding(setting, "problem", message, mend, "Then restart PostgreSQL.")
        elif limit - used < (1 if held else 2) and setting == "max_replication_slots":
            message = f"{used} of {limit} {what} are taken: a snapshot needs one more for a moment."
            yield Finding(setting, "warning", message, mend, "Then restart PostgreSQL.")
        else:
            yield Finding(setting, "ok", f"{used} of {limit} {what} are taken")


def _role(facts: Facts, source: PostgresConfig) -> Iterator[Finding]:
    role = facts.role
    if role.may_replicate:
        kind = "is a superuser" if role.is_superuser else "has REPLICATION"
        yield Finding("role", "ok", f"{role.name} {kind}")
        return
    yield Finding(
        "role",
        "problem",
        f"The role {role.name} may not read the log: it lacks REPLICATION.",
        (f"ALTER ROLE {role.quoted} REPLICATION;",),
        f"A superuser may run it. With RDS: GRANT rds_replication TO {role.quoted};"
        + ("" if source.engine == "polling" else " pg_hba.conf must let the role connect for replication, too."),
    )


def _identities(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    """Tables whose updates PostgreSQL would refuse, because they are published and no key tells their rows apart."""
    published = facts.publication
    if published and not published.operations & {"update", "delete"}:
        return
    within = [t for t in facts.tables if (t.is_published if published else wanted(t))]
    rows = [table for table in within if not table.is_partitioned]
    keyless = [table for table in rows if table.identity != "full" and not table.has_key]
    if keyless:
        yield Finding(
            "replica identity",
            "problem",
            f"{_names(keyless)}: no replica identity, so PostgreSQL refuses updates and deletes while published.",
            tuple(_identity_sql(table) for table in keyless),
            "A primary key is better where the table can have one; FULL writes whole old rows into the log.",
        )
    elif rows:
        count = sum(table.identity == "full" for table in rows)
        beside = f", {count} of them with FULL" if count else ""
        yield Finding("replica identity", "ok", f"{_count(rows, 'table')} can be told row from row{beside}")


def _identity_sql(table: Table) -> str:
    if table.spare_index:
        return f"ALTER TABLE {table.quoted} REPLICA IDENTITY USING INDEX {table.spare_index};"
    return f"ALTER TABLE {table.quoted} REPLICA IDENTITY FULL;"


def _publication(facts: Facts, source: PostgresConfig, wanted: Wanted, *, blocked: bool) -> Iterator[Finding]:
    name = facts.publication_quoted
    tables = [table for table in facts.tables if wanted(table) and not table.is_partition]
    if facts.publication is None:
        yield _missing_publication(facts, source, tables, blocked=blocked)
        return
    published = [table for table in facts.tables if table.is_listed]
    if not published and not facts.publication.all_tables:
        statements = (f"ALTER PUBLICATION {name} ADD TABLE {_list(tables)};",) if tables else ()
        after = "" if tables else "The database has no tables that the configuration names."
        message = f"The publication {source.publication_name} holds no tables."
        yield Finding("publication", "problem", message, statements, after)
        return
    missing = [table for table in tables if not table.is_published]
    if missing:
        message = f"{_names(missing)}: not in the publication {source.publication_name}, so not captured."
        yield Finding("publication", "warning", message, (f"ALTER PUBLICATION {name} ADD TABLE {_list(missing)};",))
    else:
        scope = "all tables" if facts.publication.all_tables else _count(published, "table")
        yield Finding("publication", "ok", f"{source.publication_name} holds {scope}")
    yield from _publication_options(facts.publication, name, published, facts)


def _missing_publication(facts: Facts, source: PostgresConfig, tables: Sequence[Table], *, blocked: bool) -> Finding:
    """What creates the publication: for all tables when all are wanted and we may, otherwise for those wanted."""
    options = ["publish_via_partition_root = true"]
    if facts.major >= VERSION_GENERATED:
        options.append("publish_generated_columns = stored")
    is_all = facts.role.is_superuser and len(tables) == sum(not table.is_partition for table in facts.tables)
    scope = "FOR ALL TABLES" if is_all else f"FOR TABLE {_list(tables)}"
    statement = f"CREATE PUBLICATION {facts.publication_quoted} {scope} WITH ({', '.join(options)});"
    foreign = [table for table in tables if not table.is_owner and not facts.role.is_superuser]
    message = f"There is no publication {source.publication_name}."
    if not is_all and not tables:
        return Finding("publication", "problem", message, after="The database has no tables to publish yet.")
    if blocked:
        after = "Only after the replica identities: from then on PostgreSQL refuses updates of tables without one."
    elif foreign:
        after = f"The owner of the tables must run it, or a superuser: {_names(foreign)} belong to another role."
    elif not facts.role.may_create:
        after = f"It needs the privilege CREATE on the database, which {facts.role.name} lacks."
    else:
        after = ""
    return Finding(
        "publication", "problem", message, (statement,), after, creates=not after and not facts.server.in_recovery
    )


def _publication_options(
    publication: PublicationFacts, name: str, published: Sequence[Table], facts: Facts
) -> Iterator[Finding]:
    missing = [one for one in ("insert", "update", "delete", "truncate") if one not in publication.operations]
    if missing:
        message = f"The publication leaves out {', '.join(missing)}."
        statement = f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate');"
        yield Finding("publication", "warning", message, (statement,))
    if not publication.via_root and any(table.is_partition for table in published):
        message = "Changes of partitioned tables come under the names of their partitions."
        statement = f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true);"
        yield Finding("publication", "warning", message, (statement,))
    filtered = [table for table in published if table.row_filter]
    if filtered:
        message = f"{_names(filtered)}: the publication has a row filter, so the log holds a part of the table."
        yield Finding("publication", "warning", message)
    generated = [table for table in published if table.has_generated]
    if generated and not publication.generated_columns:
        is_possible = facts.major >= VERSION_GENERATED
        statement = f"ALTER PUBLICATION {name} SET (publish_generated_columns = stored);"
        message = f"{_names(generated)}: generated columns are not sent"
        message += "." if is_possible else f" by PostgreSQL before {VERSION_GENERATED}."
        yield Finding("publication", "warning", message, (statement,) if is_possible else ())

    unkeyed = [table for table in published if table.has_generated_key]
    if unkeyed and not publication.generated_columns:
        is_possible = facts.major >= VERSION_GENERATED
        statement = f"ALTER PUBLICATION {name} SET (publish_generated_columns = stored);"
        message = (
            f"{_names(unkeyed)}: the key has a generated column, which is not sent: the rows have no key in the log."
        )
        after = (
            ""
            if is_possible
            else ("Give them a unique index over other columns, and ALTER TABLE … REPLICA IDENTITY USING INDEX …;")
        )
        yield Finding("replica identity", "problem", message, (statement,) if is_possible else (), after)


def _privileges(facts: Facts, capture: CaptureConfig, wanted: Wanted) -> Iterator[Finding]:
    """What the snapshot may read; the stream needs no privilege on a table."""
    if capture.snapshot == "never":
        return
    tables = [t for t in facts.tables if (t.is_listed if facts.publication else wanted(t) and not t.is_partition)]
    role = facts.role.quoted
    schemas = sorted({table.schema_quoted for table in tables if not table.may_use_schema})
    unread = [table for table in tables if not table.may_select]
    if schemas or unread:
        statements = [f"GRANT USAGE ON SCHEMA {', '.join(schemas)} TO {role};"] if schemas else []
        statements += [f"GRANT SELECT ON TABLE {_list(unread)} TO {role};"] if unread else []
        closed = unread or [table for table in tables if not table.may_use_schema]
        message = f"{_names(closed)}: {facts.role.name} may not read it, so no snapshot can be taken."
        yield Finding("privileges", "problem", message, tuple(statements))
    hidden = [table for table in tables if table.hides_rows]
    if hidden:
        message = f"{_names(hidden)}: row security hides rows from {facts.role.name}, so a snapshot would lack them."
        yield Finding("privileges", "problem", message, (f"ALTER ROLE {role} BYPASSRLS;",), "A superuser may run it.")
    if tables and not (schemas or unread or hidden):
        yield Finding("privileges", "ok", f"{facts.role.name} may read {_count(tables, 'table')}")


def _slot(facts: Facts, source: PostgresConfig, *, blocked: bool) -> Iterator[Finding]:
    slot, name = facts.slot, sql.Literal(source.slot_name).as_string(None)
    create = (create_slot_sql(facts, source),)
    if slot is None:
        message = f"There is no slot {source.slot_name} yet: the first `walstream capture run` creates it."
        after = "From its creation on PostgreSQL keeps all WAL that capture has not read."
        yield Finding("slot", "warning", message, create, after, creates=not blocked)
        return
    if trouble := _slot_trouble(slot, source):
        drop = f"SELECT pg_drop_replication_slot({name});"
        yield Finding(
            "slot",
            "problem",
            trouble,
            (drop, *create),
            "Then begin anew, with new snapshots: walstream capture run --new-epoch",
        )
        return
    use = f"in use by process {slot.active_pid}" if slot.active_pid else "not in use"
    behind = "" if facts.behind_bytes is None else f", {facts.behind_bytes:,} bytes behind"
    yield Finding("slot", "ok", f"{source.slot_name} with {slot.plugin}, {use}{behind}")
    if slot.wal_status == "unreserved":
        message = f"The slot {source.slot_name} is about to be lost: it is further behind than max_slot_wal_keep_size."
        yield Finding("slot", "warning", message, after="Start capture now.")
    if facts.major >= VERSION_FAILOVER and not slot.failover:
        message = "The slot is not a failover slot: a standby that takes over would not have it."
        statement = f'ALTER_REPLICATION_SLOT "{source.slot_name}" ( FAILOVER );'
        after = 'It is a replication command: psql "replication=database dbname=…", while capture is stopped.'
        yield Finding("slot", "warning", message, (statement,), after)


def _slot_trouble(slot: SlotFacts, source: PostgresConfig) -> str:
    """Say why the slot can never be used, if so."""
    name = f"The slot {source.slot_name}"
    plugins = ("pgoutput", "test_decoding") if source.engine == "polling" else ("pgoutput",)
    if slot.plugin is None:
        return f"{name} is a physical one."
    if slot.plugin not in plugins:
        return f"{name} uses {slot.plugin}; the {source.engine} engine reads {' or '.join(plugins)}."
    if slot.database != source.database:
        return f"{name} belongs to the database {slot.database}."
    if slot.invalidation_reason:
        reason = slot.invalidation_reason.replace("_", " ")
        return f"{name} is lost ({reason}): PostgreSQL no longer has the changes after it."
    if slot.two_phase:
        return f"{name} has two_phase on: a transaction confirmed when it was prepared would not be sent again."
    return ""


def _standbys(facts: Facts) -> Iterator[Finding]:
    """Whether standbys can take over without losing what capture has already seen."""
    if not (facts.slot and facts.slot.failover and facts.physical_slots):
        return
    listed = facts.server.settings.get("synchronized_standby_slots", "")
    names = [part.strip() for part in listed.split(",") if part.strip()]
    if names:
        yield Finding("standbys", "ok", f"synchronized_standby_slots is {listed}")
        return
    value = sql.Literal(", ".join(facts.physical_slots)).as_string(None)
    yield Finding(
        "standbys",
        "warning",
        "synchronized_standby_slots is empty: capture may see changes that a standby, taking over, has not got.",
        (f"ALTER SYSTEM SET synchronized_standby_slots = {value};", "SELECT pg_reload_conf();"),
        "List the slots of the standbys that may take over; they need sync_replication_slots = on.",
    )


def create_slot_sql(facts: Facts, source: PostgresConfig) -> str:
    """Return what creates the slot: two_phase off, and on 17 and newer a failover slot."""
    name = sql.Literal(source.slot_name).as_string(None)
    flags = ", false, false, true" if facts.major >= VERSION_FAILOVER else ""
    return f"SELECT pg_create_logical_replication_slot({name}, 'pgoutput'{flags});"


def _list(tables: Sequence[Table]) -> str:
    return ", ".join(table.quoted for table in tables)


def _names(tables: Sequence[Table]) -> str:
    shown = ", ".join(table.shown for table in tables[:LISTED_MAX])
    return shown if len(tables) <= LISTED_MAX else f"{shown} and {len(tables) - LISTED_MAX:,} more"


def _count(tables: Sequence[Table], noun: str) -> str:
    return f"{len(tables):,} {noun}{'' if len(tables) == 1 else 's'}"
