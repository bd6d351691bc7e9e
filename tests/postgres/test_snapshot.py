"""Consistent points and the published tables at them, on real servers of every version."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from postgres.servers import Database
from waiting import wait_until
from walstream.errors import NotAuthorized, PublicationMissing, QueryFailed, TableChanged, WalstreamError
from walstream.positions import Lsn
from walstream.postgres.copy_out import CopyReader
from walstream.postgres.identity import Comparison, Identity, compare, recorded_identity
from walstream.postgres.messages import Relation
from walstream.postgres.pgoutput import decode
from walstream.postgres.session import ReplicationSession, connect
from walstream.postgres.snapshot import (
    ConsistentPoint,
    cancel_slot,
    has_row_of_before,
    memberships,
    tables_at,
    temporary_slot_name,
    was_attached_empty,
)


def streamed_relations(database: Database, statements: str, publication: str = "p") -> dict[str, Relation]:
    """The Relation messages that pgoutput sends for the changes that the statements make."""
    slot = f"relations_{time.monotonic_ns()}"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    database.execute(statements)
    rows = database.execute(
        "select data from pg_logical_slot_get_binary_changes(%s, null, null, 'proto_version', '1',"
        " 'publication_names', %s)",
        [slot, publication],
    )
    found = [decode(data) for (data,) in rows if data[:1] == b"R"]
    return {message.table: message for message in found if isinstance(message, Relation)}


def read(reader: CopyReader, statement: str, table: str, part_id: int, part: str | None = None) -> list[bytes]:
    reader.read(statement, table=table, part=part or table, part_id=part_id)
    lines = []
    deadline = time.monotonic() + 30
    while not reader.is_idle:
        assert time.monotonic() < deadline
        got = reader.lines()
        lines += got
        if not got:
            time.sleep(0.001)
    return lines


def oid(database: Database, table: str) -> int:
    return int(database.execute("select %s::regclass::oid::int", [table])[0][0])


TABLES = """
    create schema "Größe";
    create type mood as enum ('sad', 'ok');
    create domain percent as numeric(5,2) check (value <= 100);
    create table plain (id bigint primary key, note varchar(20), at timestamptz(3), m mood, p percent[]);
    create table "Größe"."tä ""b""le" ("Ключ" text primary key, "a b" int);
    create table no_key (a int, b text);
    create table nothing (a int primary key, b text);
    create table whole (a int primary key, b text);
    create table by_index (a int not null, b text not null, c int, primary key (a));
    create unique index by_index_b on by_index (b) include (c);
    create table included (a int, b int, c text, primary key (b) include (c));
    create table deferred (a int primary key deferrable, b text);
    create table swapped (z int, y int, x int, primary key (x, z));
    create table dropped (a int, b int, c int primary key);
    alter table dropped drop column a;
    create table generated (id int primary key, twice int generated always as (id * 2) stored, note text);
    create table parent (id int not null, region text not null, primary key (id, region)) partition by list (region);
    create table child_eu (note_first text, id int not null, region text not null);
    alter table child_eu drop column note_first;
    alter table parent attach partition child_eu for values in ('eu');
    create table child_us partition of parent for values in ('us');
    alter table nothing replica identity nothing;
    alter table whole replica identity full;
    alter table by_index replica identity using index by_index_b;
"""
INSERTS = """
    insert into plain values (1, 'a', now(), 'ok', '{1}');
    insert into "Größe"."tä ""b""le" values ('k', 1);
    insert into no_key values (1, 'a');
    insert into nothing values (1, 'a');
    insert into whole values (1, 'a');
    insert into by_index values (1, 'a', 1);
    insert into included values (1, 1, 'a');
    insert into deferred values (1, 'a');
    insert into swapped values (1, 2, 3);
    insert into dropped values (1, 2);
    insert into generated (id, note) values (1, 'a');
    insert into parent values (1, 'eu'), (1, 'us');
"""


@pytest.mark.parametrize("via_root", [False, True])
def test_relations_are_described_as_pgoutput_describes_them(each_database: Database, via_root: bool) -> None:
    each_database.execute(TABLES)
    each_database.execute(
        f"create publication p for all tables with (publish_via_partition_root = {via_root}, publish = 'insert')"
    )
    streamed = streamed_relations(each_database, INSERTS)
    with connect(each_database.dsn) as connection:
        wanted = [member[:2] for member in memberships(connection, "p")]
        found = {table.relation.table: table for table in tables_at(connection, "p", wanted)}
    if via_root:
        # The partitions are described too, although no row is told to be theirs.
        assert streamed.pop("child_eu").columns
        assert streamed.pop("child_us").columns
    assert {name: table.relation for name, table in found.items()} == streamed
    assert ("parent" in found) == via_root
    if via_root:
        assert [part.table for part in found["parent"].parts] == ["child_eu", "child_us"]


def test_column_lists_row_filters_and_generated_columns(each_database: Database) -> None:
    each_database.execute(TABLES)
    options = "with (publish = 'insert')"
    generated = "generated"
    if each_database.version >= 18:
        options = "with (publish = 'insert', publish_generated_columns = stored)"
        each_database.execute("create table virtual (id int primary key, v int generated always as (id + 1) virtual)")
    each_database.execute(
        f"create publication p for table plain (id, m) where (id > 10 and note = 'a'), no_key (b), {generated}"
        + (", virtual" if each_database.version >= 18 else "")
        + f" {options}"
    )
    inserts = INSERTS + "insert into plain values (11, 'a', now(), 'ok', '{1}');"
    if each_database.version >= 18:
        inserts += "insert into virtual values (1);"
    streamed = streamed_relations(each_database, inserts)
    with connect(each_database.dsn) as connection:
        wanted = [member[:2] for member in memberships(connection, "p")]
        found = {table.relation.table: table for table in tables_at(connection, "p", wanted)}
    assert {name: table.relation for name, table in found.items()} == streamed
    names = {name: [column.name for column in table.relation.columns] for name, table in found.items()}
    assert names["plain"] == ["id", "m"]
    assert names["no_key"] == ["b"]
    assert names["generated"] == (["id", "twice", "note"] if each_database.version >= 18 else ["id", "note"])
    assert found["plain"].row_filter is not None
    assert found["no_key"].row_filter is None


def test_identity_changes_with_what_is_published(each_database: Database) -> None:
    each_database.execute("create table a (id int primary key, b int); create table c (id int primary key)")
    each_database.execute("create publication p for table a, c; create publication everything for all tables")

    def identities(publication: str = "p") -> dict[str, Identity]:
        with connect(each_database.dsn) as connection:
            members = memberships(connection, publication)
        # What is written is what is read.
        assert [recorded_identity(member.identity.text) for member in members] == [m.identity for m in members]
        return {member.table: member.identity for member in members}

    first, all_first = identities(), identities("everything")
    for statement in (
        "alter table a add column d int",
        "insert into c values (1)",
        "analyze",
        "create index on c (id)",
    ):
        each_database.execute(statement)
    for name, identity in identities().items():
        assert compare(first[name], identity) == Comparison()
    each_database.execute("vacuum full c")
    assert compare(all_first["c"], identities("everything")["c"]).rewritten == {first["c"].relation_id}
    each_database.execute("alter publication p drop table a; alter publication p add table a")
    second = identities()
    assert compare(first["a"], second["a"]).reason
    assert not compare(first["c"], second["c"]).reason
    each_database.execute("alter publication p set table a where (id > 5), c")
    third = identities()
    assert compare(second["a"], third["a"]).reason
    assert not compare(first["c"], third["c"]).reason
    each_database.execute("drop table c; create table c (id int primary key); alter publication p add table c")
    assert compare(first["c"], identities()["c"]).reason
    assert compare(all_first["c"], identities("everything")["c"]).reason


def test_rows_tell_whether_a_file_was_rewritten(database: Database) -> None:
    database.execute("create table c (id int primary key); insert into c values (1); create publication p for table c")
    with connect(database.dsn) as connection:
        (member,) = memberships(connection, "p")
        part, horizon = member.relation_id, member.identity.horizon
        database.execute("vacuum full c")
        assert has_row_of_before(connection, part, horizon)
        # A distance that ids of 32 bits cannot tell proves nothing.
        assert not has_row_of_before(connection, part, horizon - (1 << 32))
        with database.connect() as blocker:
            blocker.execute("begin; lock table c in access exclusive mode")
            assert has_row_of_before(connection, part, horizon) is None
            blocker.execute("rollback")
        database.execute("alter table c alter id type bigint")
        assert has_row_of_before(connection, part, horizon) is False
        assert was_attached_empty(connection, part, is_born=False) is False
        database.execute("delete from c")
        assert was_attached_empty(connection, part, is_born=False)


def test_a_missing_publication_is_named(database: Database) -> None:
    with connect(database.dsn) as connection, pytest.raises(PublicationMissing):
        memberships(connection, "p")
    database.execute("create publication p")
    with connect(database.dsn) as connection:
        assert memberships(connection, "p") == []


def test_the_snapshot_ends_where_the_stream_begins(each_database: Database) -> None:
    each_database.execute("create table t (id int primary key); insert into t select generate_series(1, 5)")
    each_database.execute("create publication p for table t")
    with ReplicationSession(each_database.dsn) as session:
        slot = session.create_slot("kept", snapshot="export")
        point = ConsistentPoint.of_slot(each_database.dsn, slot)
    each_database.execute("insert into t values (6)")
    reader = CopyReader(point)
    table = oid(each_database, "t")
    statement = "COPY (SELECT id FROM ONLY public.t) TO STDOUT"
    assert read(reader, statement, "public.t", table) == [b"%d\n" % number for number in range(1, 6)]
    rows = each_database.execute(
        "select data from pg_logical_slot_get_binary_changes('kept', null, null, 'proto_version', '1',"
        " 'publication_names', 'p')"
    )
    assert [data[-1:] for (data,) in rows if data[:1] == b"I"] == [b"6"]
    assert point.lsn == slot.consistent_point
    reader.close()
    point.close()


def test_a_point_waits_for_running_transactions_and_can_be_cancelled(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    name = temporary_slot_name()
    outcome: list[object] = []

    def find() -> None:
        try:
            outcome.append(ConsistentPoint.now(database.dsn, name))
        except WalstreamError as error:
            outcome.append(error)

    with psycopg.connect(database.dsn) as running:
        running.execute("insert into t values (1)")
        thread = threading.Thread(target=find)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        cancel_slot(database.dsn, name)
        thread.join(10)
        assert isinstance(outcome[0], QueryFailed)
        name = temporary_slot_name()
        thread = threading.Thread(target=find)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        running.commit()
    thread.join(10)
    point = outcome[1]
    assert isinstance(point, ConsistentPoint)
    assert point.lsn > Lsn(0)
    slots = "select from pg_replication_slots where slot_name = %s"
    wait_until(lambda: not database.execute(slots, [name]), "the slot is gone with the server's side of its session")
    reader = CopyReader(point)
    assert read(reader, "COPY (SELECT id FROM public.t) TO STDOUT", "public.t", oid(database, "t")) == [b"1\n"]
    reader.close()
    point.close()


@pytest.mark.parametrize(
    "change",
    [
        "alter table t alter column id type bigint",
        "truncate t",
        "vacuum full t",
        "drop table t",
        "alter table t rename to u",
        "alter table t rename column note to remark",
        "alter table t drop column note",
        "alter table t rename to u; create table t (id int primary key, note text); insert into t values (7, 'other')",
    ],
)
def test_a_table_that_changed_since_is_not_read(database: Database, change: str) -> None:
    database.execute("create table t (id int primary key, note text)")
    database.execute("insert into t select n, 'x' from generate_series(1, 5) n")
    database.execute("create table other (id int); insert into other values (1)")
    table, other = oid(database, "t"), oid(database, "other")
    point = ConsistentPoint.now(database.dsn, temporary_slot_name())
    for statement in change.split("; "):
        database.execute(statement)
    reader = CopyReader(point)
    with pytest.raises(TableChanged):
        read(reader, "COPY (SELECT id, note FROM ONLY public.t) TO STDOUT", "public.t", table)
    # The connection goes on with another table.
    assert read(reader, "COPY (SELECT id FROM ONLY public.other) TO STDOUT", "public.other", other) == [b"1\n"]
    reader.close()
    point.close()


def test_harmless_changes_do_not_matter(database: Database) -> None:
    database.execute("create table t (id int primary key, note text); insert into t values (1, 'x')")
    point = ConsistentPoint.now(database.dsn, temporary_slot_name())
    database.execute("alter table t add column more int default 5; create index on t (note); insert into t values (2)")
    reader = CopyReader(point)
    statement = "COPY (SELECT id, note FROM ONLY public.t) TO STDOUT"
    assert read(reader, statement, "public.t", oid(database, "t")) == [b"1\tx\n"]
    reader.close()
    point.close()


def test_a_lock_is_held_for_one_table_at_a_time(database: Database) -> None:
    database.execute("create table a (id int); create table b (id int)")
    point = ConsistentPoint.now(database.dsn, temporary_slot_name())
    reader = CopyReader(point)

    def locked() -> list[str]:
        query = (
            "select c.relname from pg_locks l join pg_class c on c.oid = l.relation"
            " where c.relname in ('a', 'b') and l.pid <> pg_backend_pid() order by 1"
        )
        return [name for (name,) in database.execute(query)]

    read(reader, "COPY (SELECT id FROM ONLY public.a) TO STDOUT", "public.a", oid(database, "a"))
    assert locked() == ["a"]
    read(reader, "COPY (SELECT id FROM ONLY public.a WHERE ctid > '(0,0)') TO STDOUT", "public.a", oid(database, "a"))
    read(reader, "COPY (SELECT id FROM ONLY public.b) TO STDOUT", "public.b", oid(database, "b"))
    assert locked() == ["b"]
    reader.close()
    point.close()


def test_rights_by_column_suffice_and_row_security_is_never_silent(database: Database) -> None:
    role = f"reader_{time.monotonic_ns()}"
    database.execute(f"create role {role} login replication; create table t (id int, secret text, owner text)")
    try:
        database.execute(f"insert into t values (1, 's', 'x'); grant select (id) on t to {role}")
        dsn = database.dsn.replace("user=postgres", f"user={role}")
        assert dsn != database.dsn
        point = ConsistentPoint.now(dsn, temporary_slot_name())
        reader = CopyReader(point)
        table = oid(database, "t")
        assert read(reader, "COPY (SELECT id FROM ONLY public.t) TO STDOUT", "public.t", table) == [b"1\n"]
        with pytest.raises(NotAuthorized):
            read(reader, "COPY (SELECT secret FROM ONLY public.t) TO STDOUT", "public.t", table)
        reader.close()
        database.execute(
            "alter table t enable row level security; create policy mine on t using (owner = current_user)"
        )
        reader = CopyReader(point)
        with pytest.raises(WalstreamError, match="row-level security"):
            read(reader, "COPY (SELECT id FROM ONLY public.t) TO STDOUT", "public.t", table)
        reader.close()
        point.close()
    finally:
        database.execute(f"drop table t; drop role {role}")
