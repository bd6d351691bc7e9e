"""What `capture check` finds on real servers, and that the SQL it prints mends what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from postgres.servers import Database, MakePostgres
from walstream.capture.check import Finding, Inspection, inspect
from walstream.capture.facts import Facts, Table, gather, run_statements
from walstream.config import CaptureConfig, PostgresConfig
from walstream.postgres import session

TABLES = """
create table orders (id int primary key, item text, total int generated always as (id * 2) stored);
create schema "Über";
create table "Über"."T x" (id int primary key);
create table parts (id int primary key) partition by range (id);
create table parts_1 partition of parts for values from (0) to (10);
create table parts_2 partition of parts for values from (10) to (20);
"""


def everything(_: Table) -> bool:
    return True


class Server:
    """A database as `capture check` sees it, perhaps through another role."""

    def __init__(self, database: Database, **capture: Any) -> None:
        # Slots belong to the whole server, so each test has its own.
        self.source = PostgresConfig(database=database.name, slot_name=database.name)
        self.capture = CaptureConfig(**capture)
        self.database = database

    def facts(self, role: str = "postgres") -> Facts:
        with session.connect(f"{self.database.dsn} user={role}") as connection:
            return gather(connection, self.source)

    def look(self, role: str = "postgres", wanted: Callable[[Table], bool] = everything) -> Inspection:
        return inspect(self.facts(role), self.source, self.capture, wanted)

    def mend(self, found: Inspection) -> None:
        """Run everything that was printed, in its order."""
        with session.connect(self.database.dsn) as connection:
            for finding in found.findings:
                run_statements(connection, finding.statements)


@pytest.fixture
def make_server(make_postgres: MakePostgres) -> Iterator[Callable[..., Server]]:
    """A function that starts a PostgreSQL of the test's own and looks at its database `postgres`."""
    databases: list[Database] = []

    def make(**settings: str) -> Server:
        databases.append(Database(make_postgres(**settings), "postgres"))
        server = Server(databases[-1])
        server.source = PostgresConfig()
        return server

    yield make
    for database in databases:
        database.connection.close()


MakeServer = Callable[..., Server]


def of(found: Inspection, subject: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.subject == subject]


def states(found: Inspection) -> dict[str, str]:
    return {finding.subject: finding.state for finding in found.findings}


def test_everything_that_is_missing_can_be_created(each_database: Database) -> None:
    server = Server(each_database)
    each_database.execute(TABLES)
    found = server.look()
    assert [finding.subject for finding in found.problems] == ["publication"]
    assert [finding.subject for finding in found.findings if finding.creates] == ["publication", "slot"]
    server.mend(found)
    found = server.look()
    assert not found.problems
    # Before 18 PostgreSQL does not send generated columns; there is nothing to mend.
    assert [f.message for f in found.findings if f.state == "warning"] == (
        []
        if each_database.version >= 18
        else ["public.orders: generated columns are not sent by PostgreSQL before 18."]
    )
    assert of(found, "publication")[0].message == "walstream holds all tables"
    assert "not in use" in of(found, "slot")[0].message
    (slot,) = each_database.execute(
        "select to_jsonb(s) from pg_replication_slots s where slot_name = %s", [each_database.name]
    )
    assert slot[0].get("failover", False) is (each_database.version >= 17)
    assert slot[0]["two_phase"] is False


def test_an_empty_database_is_ready_after_its_publication(database: Database) -> None:
    found = Server(database).look()
    assert of(found, "publication")[0].statements == (
        "CREATE PUBLICATION walstream FOR ALL TABLES"
        " WITH (publish_via_partition_root = true, publish_generated_columns = stored);",
    )


class TestReplicaIdentity:
    def test_tables_without_one_are_named_and_mended(self, each_database: Database) -> None:
        server = Server(each_database)
        each_database.execute(
            """
            create table keyless (a int);
            create table has_index (a int not null unique, b int unique);
            create table deferred (a int primary key deferrable);
            create table nothing (a int primary key); alter table nothing replica identity nothing;
            create table dropped (a int not null); create unique index gone on dropped (a);
            alter table dropped replica identity using index gone; drop index gone;
            create table fine (a int primary key);
            """
        )
        found = server.look()
        (finding,) = of(found, "replica identity")
        assert finding.state == "problem"
        assert finding.statements == (
            "ALTER TABLE public.deferred REPLICA IDENTITY FULL;",
            "ALTER TABLE public.dropped REPLICA IDENTITY FULL;",
            "ALTER TABLE public.has_index REPLICA IDENTITY USING INDEX has_index_a_key;",
            "ALTER TABLE public.keyless REPLICA IDENTITY FULL;",
            "ALTER TABLE public.nothing REPLICA IDENTITY USING INDEX nothing_pkey;",
        )
        # A publication would make the application's updates fail, so nothing is created before it is mended.
        assert not any(finding.creates for finding in found.findings)
        assert "Only after the replica identities" in of(found, "publication")[0].after
        server.mend(found)
        assert not server.look().problems
        for table in ("deferred", "dropped", "has_index", "keyless", "nothing", "fine"):
            each_database.execute(f"insert into {table} values (1); update {table} set a = 2; delete from {table}")

    def test_postgres_refuses_what_we_call_a_problem(self, database: Database) -> None:
        database.execute("create publication walstream for all tables; create table keyless (a int)")
        assert of(Server(database).look(), "replica identity")[0].state == "problem"
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            database.execute("insert into keyless values (1); update keyless set a = 2")

    def test_partitions_are_looked_at_themselves(self, database: Database) -> None:
        database.execute("create table parts (id int) partition by range (id)")
        database.execute("create table parts_1 partition of parts for values from (0) to (10)")
        database.execute("create publication walstream for all tables with (publish_via_partition_root = true)")
        (finding,) = of(Server(database).look(), "replica identity")
        assert finding.statements == ("ALTER TABLE public.parts_1 REPLICA IDENTITY FULL;",)

    def test_a_publication_of_inserts_needs_none(self, database: Database) -> None:
        database.execute("create table keyless (a int)")
        database.execute("create publication walstream for all tables with (publish = 'insert')")
        found = Server(database).look()
        assert "replica identity" not in states(found)
        assert any("leaves out update, delete, truncate" in finding.message for finding in found.findings)


class TestPublication:
    def test_tables_that_are_wanted_and_not_in_it(self, database: Database) -> None:
        server = Server(database)
        database.execute(TABLES)
        database.execute("create publication walstream for table orders with (publish_via_partition_root = true)")
        (warning, *_) = of(server.look(), "publication")
        assert warning.message == "public.parts, Über.T x: not in the publication walstream, so not captured."
        assert warning.statements == ('ALTER PUBLICATION walstream ADD TABLE public.parts, "Über"."T x";',)
        wanted = of(server.look(wanted=lambda table: table.name == "orders"), "publication")[0]
        assert wanted.message == "walstream holds 1 table"
        server.mend(server.look())
        assert of(server.look(), "publication")[0].message == "walstream holds 3 tables"

    def test_what_its_options_leave_out(self, each_database: Database) -> None:
        server = Server(each_database)
        each_database.execute(TABLES)
        each_database.execute("create publication walstream for all tables with (publish = 'insert, update, delete')")
        messages = [finding.message for finding in of(server.look(), "publication")]
        assert "The publication leaves out truncate." in messages
        assert "Changes of partitioned tables come under the names of their partitions." in messages
        assert any(message.startswith("public.orders: generated columns are not sent") for message in messages)
        server.mend(server.look())
        left = [finding.message for finding in of(server.look(), "publication") if finding.state != "ok"]
        assert len(left) == (0 if each_database.version >= 18 else 1)

    def test_empty_and_filtered(self, database: Database) -> None:
        server = Server(database)
        database.execute("create publication walstream")
        assert of(server.look(), "publication")[0].state == "problem"
        database.execute("create table orders (id int primary key)")
        assert of(server.look(), "publication")[0].statements == (
            "ALTER PUBLICATION walstream ADD TABLE public.orders;",
        )
        database.execute("alter publication walstream add table orders where (id > 5)")
        assert any("row filter" in finding.message for finding in of(server.look(), "publication"))

    def test_names_are_quoted_where_they_must_be(self, database: Database) -> None:
        server = Server(database)
        server.source = replace_name(server.source, "My pub")
        database.execute("create table orders (id int primary key)")
        (finding,) = of(server.look(), "publication")
        assert finding.statements[0].startswith('CREATE PUBLICATION "My pub" FOR ALL TABLES')
        server.mend(server.look())
        assert of(server.look(), "publication")[0].state == "ok"


def replace_name(source: PostgresConfig, publication: str) -> PostgresConfig:
    return source.model_copy(update={"publication_name": publication})


class TestRoleAndPrivileges:
    @pytest.fixture
    def role(self, database: Database) -> Any:
        name = f"role_{database.name}"
        database.execute(f"create role {name} login")
        yield name
        database.execute(f"drop owned by {name}; drop role {name}")

    def test_what_a_plain_role_lacks_and_that_the_sql_gives_it(self, database: Database, role: str) -> None:
        server = Server(database)
        database.execute(TABLES)
        database.execute("create publication walstream for all tables with (publish_via_partition_root = true)")
        found = server.look(role)
        assert {finding.subject for finding in found.problems} == {"role", "privileges"}
        assert f"ALTER ROLE {role} REPLICATION;" in of(found, "role")[0].statements
        (privileges,) = of(found, "privileges")
        assert privileges.statements == (
            f'GRANT USAGE ON SCHEMA "Über" TO {role};',
            f'GRANT SELECT ON TABLE public.orders, public.parts, "Über"."T x" TO {role};',
        )
        assert not any(finding.creates for finding in found.findings)
        server.mend(found)
        assert not server.look(role).problems

    def test_a_stream_without_snapshot_reads_no_table(self, database: Database, role: str) -> None:
        database.execute(TABLES)
        assert "privileges" not in states(Server(database, snapshot="never").look(role))

    def test_row_security_would_hide_rows(self, database: Database, role: str) -> None:
        server = Server(database)
        database.execute("create table secrets (id int primary key); alter table secrets enable row level security")
        database.execute(f"create publication walstream for all tables; grant select on secrets to {role}")
        (finding,) = of(server.look(role), "privileges")
        assert finding.statements == (f"ALTER ROLE {role} BYPASSRLS;",)
        server.mend(server.look(role))
        assert of(server.look(role), "privileges")[0].state == "ok"

    def test_only_owners_publish(self, database: Database, role: str) -> None:
        server = Server(database)
        database.execute(f"create table mine (id int primary key); alter role {role} replication")
        (finding,) = of(server.look(role), "publication")
        assert "public.mine belong to another role" in finding.after
        assert not finding.creates
        database.execute(f"alter table mine owner to {role}; grant create on database {database.name} to {role}")
        (finding,) = of(server.look(role), "publication")
        assert finding.creates
        # Only a superuser may publish all tables, those to come among them.
        assert finding.statements[0].startswith("CREATE PUBLICATION walstream FOR TABLE public.mine WITH (")
        with session.connect(f"{database.dsn} user={role}") as connection:
            run_statements(connection, finding.statements)
        assert of(server.look(role), "publication")[0].state == "ok"


class TestSlot:
    def test_a_publication_comes_before_its_slot(self, database: Database) -> None:
        database.execute("create table keyless (a int)")
        (finding,) = of(Server(database).look(), "slot")
        assert not finding.creates

    @pytest.mark.parametrize(
        ("create", "said"),
        [
            ("pg_create_physical_replication_slot(%s)", "is a physical one"),
            ("pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", "has two_phase on"),
        ],
    )
    def test_slots_that_cannot_be_used(self, database: Database, create: str, said: str) -> None:
        server = Server(database)
        database.execute("create publication walstream for all tables")
        database.execute(f"select {create}", [server.source.slot_name])
        (finding,) = of(server.look(), "slot")
        assert finding.state == "problem"
        assert said in finding.message
        server.mend(server.look())
        assert of(server.look(), "slot")[0].state == "ok"

    def test_of_another_database(self, database: Database) -> None:
        server = Server(database)
        database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [server.source.slot_name])
        server.source = server.source.model_copy(update={"database": "other"})
        assert "belongs to the database" in of(server.look(), "slot")[0].message

    def test_only_polling_reads_test_decoding(self, database15: Database) -> None:
        server = Server(database15)
        database15.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", [server.source.slot_name])
        assert of(server.look(), "slot")[0].state == "problem"
        server.source = server.source.model_copy(update={"engine": "polling"})
        assert of(server.look(), "slot")[0].state == "ok"

    def test_without_failover(self, database: Database) -> None:
        server = Server(database)
        database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [server.source.slot_name])
        warning = of(server.look(), "slot")[1]
        assert "not a failover slot" in warning.message
        with psycopg.connect(database.dsn, autocommit=True, replication="database") as walsender:
            walsender.pgconn.exec_(warning.statements[0].encode())
        assert len(of(server.look(), "slot")) == 1

    def test_a_lost_slot(self, make_server: MakeServer) -> None:
        server = make_server(max_slot_wal_keep_size="1MB", min_wal_size="32MB", max_wal_size="32MB")
        database = server.database
        database.execute("create table t (a text); create publication walstream for all tables")
        database.execute("select pg_create_logical_replication_slot('walstream', 'pgoutput')")
        for _ in range(4):
            database.execute("insert into t select repeat('x', 1000) from generate_series(1, 15000)")
            database.execute("select pg_switch_wal()")
        database.execute("checkpoint")
        (finding,) = of(server.look(), "slot")
        assert finding.message == (
            "The slot walstream is lost (wal removed): PostgreSQL no longer has the changes after it."
        )
        server.mend(server.look())
        assert of(server.look(), "slot")[0].state == "ok"


class TestServer:
    def test_settings_of_a_server_out_of_the_box(self, make_server: MakeServer) -> None:
        server = make_server(wal_level="replica", max_replication_slots="1", max_wal_senders="0")
        server.database.execute("select pg_create_physical_replication_slot('one', false)")
        found = server.look()
        assert {finding.subject for finding in found.problems} >= {
            "wal_level", "max_replication_slots", "max_wal_senders",
        }  # fmt: skip
        assert not of(found, "slot")[0].creates
        assert [
            of(found, name)[0].statements for name in ("wal_level", "max_replication_slots", "max_wal_senders")
        ] == [
            ("ALTER SYSTEM SET wal_level = 'logical';",),
            ("ALTER SYSTEM SET max_replication_slots = 10;",),
            ("ALTER SYSTEM SET max_wal_senders = 10;",),
        ]

    def test_standbys_want_to_be_waited_for(self, make_server: MakeServer) -> None:
        server = make_server()
        database = server.database
        database.execute("create publication walstream for all tables")
        database.execute("select pg_create_physical_replication_slot('standby_1')")
        server.mend(server.look())
        (finding,) = of(server.look(), "standbys")
        assert finding.statements[0] == "ALTER SYSTEM SET synchronized_standby_slots = 'standby_1';"
        server.mend(server.look())
        assert of(server.look(), "standbys")[0].state == "ok"

    @pytest.mark.parametrize(
        ("version", "state"), [(130_010, "problem"), (140_000, "ok"), (180_004, "ok"), (190_000, "warning")]
    )
    def test_versions(self, database: Database, version: int, state: str) -> None:
        server = Server(database)
        facts = server.facts()
        facts = replace(facts, server=facts.server._replace(version=version), version=str(version // 10_000))
        found = inspect(facts, server.source, server.capture, everything)
        assert of(found, "version")[0].state == state

    def test_a_slot_about_to_be_lost(self, database: Database) -> None:
        server = Server(database)
        server.mend(server.look())
        facts = server.facts()
        assert facts.slot is not None
        facts = replace(facts, slot=facts.slot._replace(wal_status="unreserved"))
        found = inspect(facts, server.source, server.capture, everything)
        assert "about to be lost" in of(found, "slot")[1].message


def test_a_key_with_a_generated_column_is_told(each_database: Database) -> None:
    each_database.execute("create table t (a int, g int generated always as (a + 1) stored, primary key (a, g))")
    each_database.execute("create table u (a int primary key, g int generated always as (a + 1) stored)")
    each_database.execute(f"create publication p_{each_database.name} for all tables")
    server = Server(each_database)
    server.source = server.source.model_copy(update={"publication_name": f"p_{each_database.name}"})
    (found,) = [one for one in server.look().problems if "generated column" in one.message]
    assert (found.subject, found.message.split(":")[0]) == ("replica identity", "public.t")
    assert found.statements or each_database.version < 18
    server.mend(server.look())
    assert each_database.version < 18 or not [one for one in server.look().problems if "generated" in one.message]
