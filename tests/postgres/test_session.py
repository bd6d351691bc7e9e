"""Sessions with real servers: settings, commands, refusals."""

from __future__ import annotations

import time

import psycopg
import pytest
from psycopg import sql

from postgres.servers import Database, MakePostgres
from waiting import wait_until
from walstream import error_codes, errors
from walstream.positions import Lsn
from walstream.postgres import catalogue
from walstream.postgres.protocol import TimelineSwitch
from walstream.postgres.session import PINNED_SETTINGS, ReplicationSession, connect, named


def test_settings_are_pinned_whatever_the_role_and_the_user_say(each_database: Database) -> None:
    each_database.execute(f"alter database {each_database.name} set DateStyle = 'German'")
    each_database.execute(f"alter database {each_database.name} set search_path = 'public'")
    dsn = each_database.dsn + " options='-c TimeZone=Asia/Tokyo -c work_mem=9MB' client_encoding=LATIN1"
    with connect(dsn) as session, ReplicationSession(dsn) as replication:
        for name, value in {**PINNED_SETTINGS, "work_mem": "9MB", "client_encoding": "UTF8"}.items():
            expected = "ISO, MDY" if name == "DateStyle" else value
            assert session.execute(sql.SQL("show {}").format(sql.Identifier(name))).fetchone() == (expected,)
            assert replication._rows(f"SHOW {name}", "asking") == [(expected.encode(),)]


def test_values_have_one_text(database: Database) -> None:
    with connect(database.dsn) as session:
        row = session.execute(
            "select '1234.5'::money::text, '1 year 2 days 3 hours'::interval::text, timestamptz '2020-01-01 12:00+12',"
            " '\\x00ff'::bytea::text, 0.1::float4::text, 'pg_class'::regclass::text"
        ).fetchone()
    assert row is not None
    assert row[2].utcoffset().total_seconds() == 0
    assert (*row[:2], *row[3:]) == ("$1,234.50", "P1Y2DT3H", "\\x00ff", "0.1", "pg_class")


def test_session_that_only_reads(database: Database) -> None:
    with (
        connect(database.dsn, read_only=True) as session,
        pytest.raises(errors.QueryFailed, match="read-only") as refused,
        named("trying to write"),
    ):
        session.execute("create table public.t (n int)")
    assert refused.value.sqlstate == "25006"


def test_server_says_who_it_is(each_database: Database) -> None:
    with ReplicationSession(each_database.dsn) as replication, connect(each_database.dsn) as session:
        identity = replication.identify_system()
        assert identity.database == each_database.name
        assert identity.timeline == 1
        assert identity.system_identifier == catalogue.system_identifier(session)
        assert identity.flushed <= catalogue.wal_end(session)
        assert replication.timeline_history(1) == []
        assert replication.protocol_version == {15: 3, 16: 4, 18: 4}[each_database.version]


def test_timeline_history_after_a_promotion(make_postgres: MakePostgres) -> None:
    server = make_postgres()
    server.stop()
    (server.folder / "data" / "standby.signal").touch()
    server.start()
    with psycopg.connect(server.dsn, autocommit=True) as session:
        session.execute("select pg_promote()")
    with ReplicationSession(server.dsn) as replication:
        identity = replication.identify_system()
        assert identity.timeline == 2
        ((timeline, switch, reason),) = replication.timeline_history(2)
        assert (timeline, reason) == (1, "no recovery target specified")
        assert isinstance(TimelineSwitch(timeline, switch, reason).switch_lsn, Lsn)
        assert switch <= identity.flushed


def test_new_slot_comes_with_the_snapshot_of_its_beginning(each_database: Database) -> None:
    each_database.execute("create table t (n int); insert into t values (1)")
    with ReplicationSession(each_database.dsn) as replication:
        slot = replication.create_slot("fresh")
        assert slot.name == "fresh"
        each_database.execute("insert into t values (2)")
        with connect(each_database.dsn) as session:
            facts = catalogue.slot_facts(session, "fresh")
            assert facts is not None
            assert (facts.plugin, facts.database, facts.temporary) == ("pgoutput", each_database.name, False)
            assert (facts.confirmed_flush, facts.two_phase) == (slot.consistent_point, False)
            assert facts.failover is (True if each_database.version >= 17 else None)
            assert (facts.active_pid, facts.wal_status, facts.invalidation_reason) == (None, "reserved", None)
            session.execute("begin isolation level repeatable read")
            session.execute(sql.SQL("set transaction snapshot {}").format(slot.snapshot_name))
            assert session.execute("select n from public.t").fetchall() == [(1,)]


def test_temporary_slot_goes_with_its_session(each_database: Database) -> None:
    with ReplicationSession(each_database.dsn) as replication:
        assert replication.create_slot("brief", temporary=True, snapshot="nothing").snapshot_name is None
    with connect(each_database.dsn) as session:
        wait_until(lambda: catalogue.slot_facts(session, "brief") is None, "the slot is gone")


def test_slots_that_are_there_and_slots_that_are_not(each_database: Database) -> None:
    with ReplicationSession(each_database.dsn) as replication:
        replication.create_slot("one")
        with pytest.raises(errors.SlotExists, match="already exists"):
            replication.create_slot("one")
        replication.drop_slot("one")
        with pytest.raises(errors.SlotMissing, match="does not exist"):
            replication.drop_slot("one")
        with pytest.raises(errors.SlotMissing, match="capture check"):
            replication.start("one", ["p"])
        assert replication.identify_system().timeline == 1, "the session goes on after refusals"


def test_slot_is_read_by_one(each_database: Database) -> None:
    with ReplicationSession(each_database.dsn) as first, ReplicationSession(each_database.dsn) as second:
        first.create_slot("one")
        first.start("one", ["p"])
        with pytest.raises(errors.SlotBusy, match="is active for PID") as refused:
            second.start("one", ["p"])
    assert refused.value.retryable
    assert error_codes.codes(refused.value).exit == 1


def test_new_slot_waits_for_open_transactions_as_long_as_it_may(database: Database) -> None:
    database.execute("create table t (n int)")
    with database.connect() as other:
        other.execute("begin; insert into t values (1)")
        with ReplicationSession(database.dsn) as replication:
            begin = time.monotonic()
            with pytest.raises(errors.SourceNotReady, match="long transactions"):
                replication.create_slot("late", timeout_s=0.3)
            assert time.monotonic() - begin < 5
    slots = "select from pg_replication_slots where slot_name = 'late'"
    wait_until(lambda: not database.execute(slots), "the server waits for us no more")


def test_slot_whose_wal_is_gone(make_postgres: MakePostgres) -> None:
    server = make_postgres(max_slot_wal_keep_size="1MB")
    with psycopg.connect(server.dsn, autocommit=True) as session, ReplicationSession(server.dsn) as replication:
        replication.create_slot("old")
        for _ in range(3):
            session.execute("select pg_logical_emit_message(false, 'x', repeat('x', 1000000)), pg_switch_wal()")
        session.execute("checkpoint")
        with connect(server.dsn) as catalogue_session:
            facts = catalogue.slot_facts(catalogue_session, "old")
        assert facts is not None
        assert (facts.wal_status, facts.invalidation_reason) == ("lost", "wal_removed")
        with pytest.raises(errors.SlotLost, match="new snapshot") as refused:
            replication.start("old", ["p"])
    assert not refused.value.retryable
    assert error_codes.codes(refused.value).exit == 5


def test_slot_that_cannot_be_created(make_postgres: MakePostgres) -> None:
    server = make_postgres(wal_level="replica", max_replication_slots="1")
    with ReplicationSession(server.dsn) as replication, pytest.raises(errors.SourceNotReady, match="wal_level"):
        replication.create_slot("one")
    server.settings["wal_level"] = "logical"
    server.restart()
    with ReplicationSession(server.dsn) as replication:
        replication.create_slot("one")
        with pytest.raises(errors.SourceNotReady, match="max_replication_slots"):
            replication.create_slot("two")


@pytest.mark.parametrize("name", ["", "Upper", "a-b", "ä", "x" * 64, 'a"; drop', "a\0"])
def test_names_that_no_slot_can_have(database: Database, name: str) -> None:
    with ReplicationSession(database.dsn) as replication, pytest.raises(errors.UsageError, match="name of a slot"):
        replication.create_slot(name)


def test_refused_connections(make_postgres: MakePostgres) -> None:
    server = make_postgres()
    with psycopg.connect(server.dsn, autocommit=True) as session:
        session.execute("create role secret login password 'right'; create role plain login; create role shy")
    hba = server.folder / "data" / "pg_hba.conf"
    hba.write_text("host all secret all scram-sha-256\nhost all shut all reject\n" + hba.read_text())
    server.restart()
    base = f"host=127.0.0.1 port={server.port} dbname=postgres"
    for dsn, kind, words in (
        (f"{base} user=secret password=wrong", errors.AuthenticationFailed, "password_env"),
        (f"{base} user=secret", errors.AuthenticationFailed, "password_env"),
        (f"{base} user=nobody", errors.AuthenticationFailed, "does not exist"),
        (f"{base} user=shy", errors.AuthenticationFailed, "not permitted"),
        (f"{base} user=shut", errors.RefusedError, "pg_hba"),
        (
            f"host=127.0.0.1 port={server.port} dbname=none user=plain",
            errors.SourceNotReady,
            "source.postgres.database",
        ),
        (f"{base} user=plain sslmode=require", errors.RefusedError, "sslmode"),
    ):
        with pytest.raises(kind, match=words) as refused:
            connect(dsn)
        assert error_codes.codes(refused.value).exit == 5, dsn
        assert "wrong" not in str(refused.value), "never the password"
    with connect(f"{base} user=secret password=right"):
        pass
    with pytest.raises(errors.NotAuthorized, match="REPLICATION"):
        ReplicationSession(f"{base} user=plain")
    with (
        connect(f"{base} user=plain") as session,
        pytest.raises(errors.NotAuthorized),
        named("looking where it may not"),
    ):
        session.execute("select * from pg_catalog.pg_authid")


def test_nobody_answers(make_postgres: MakePostgres) -> None:
    server = make_postgres()
    server.stop()
    for attempt in (connect, ReplicationSession):
        with pytest.raises(errors.UnreachableError, match="cannot be reached") as refused:
            attempt(server.dsn)
        assert error_codes.codes(refused.value).exit == 3
        assert refused.value.retryable
    with pytest.raises(errors.UsageError, match="connection string"):
        connect("nonsense")


def test_server_goes_away_between_two_statements(make_postgres: MakePostgres) -> None:
    server = make_postgres()
    with connect(server.dsn) as session, ReplicationSession(server.dsn) as replication:
        server.stop("immediate")
        with pytest.raises(errors.ConnectionLost), named("asking"):
            session.execute("select 1")
        with pytest.raises(errors.ConnectionLost):
            replication.identify_system()


def test_publications(each_database: Database) -> None:
    each_database.execute("""
        create table a (n int primary key, note text, twice int generated always as (n * 2) stored);
        create table b (n int);
        create publication everything for all tables;
        create publication "some ""thing" for table a with (publish = 'insert, delete', publish_via_partition_root);
        create publication part for table a (n) where (n > 5);
    """)
    with connect(each_database.dsn) as session:
        everything = catalogue.publication_facts(session, "everything")
        some = catalogue.publication_facts(session, 'some "thing')
        part = catalogue.publication_facts(session, "part")
        assert catalogue.publication_facts(session, "absent") is None
    assert everything is not None
    assert some is not None
    assert part is not None
    assert (everything.all_tables, everything.via_root) == (True, False)
    assert everything.operations == {"insert", "update", "delete", "truncate"}
    assert [(table.schema, table.table) for table in everything.tables] == [("public", "a"), ("public", "b")]
    assert (some.all_tables, some.via_root, some.operations) == (False, True, {"insert", "delete"})
    assert some.tables[0].columns == ("n", "note")
    assert (part.tables[0].columns, part.tables[0].row_filter) == (("n",), "(n > 5)")


def test_server_facts(each_database: Database) -> None:
    with connect(each_database.dsn) as session:
        facts = catalogue.server_facts(session, ["port"])
    assert facts.version // 10000 == each_database.version
    assert (facts.in_recovery, facts.settings["wal_level"]) == (False, "logical")
    assert facts.settings["port"] == str(each_database.server.port)
