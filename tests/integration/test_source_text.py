"""`test_decoding` read as if it were pgoutput: the same changes, wherever the server has the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from integration.test_source import LIMIT, SLOT, end_of_wal, mixed_workload, prepare, read_until, source_of, told
from postgres.servers import Database
from walstream.capture.published import find_table
from walstream.capture.source import Change
from walstream.errors import PublicationMissing, SourceNotReady
from walstream.positions import Lsn

TEXT = "text_slot"


@pytest.fixture
def text_database(database15: Database) -> Database:
    """A database whose server has the plugin."""
    try:
        database15.execute("select pg_create_logical_replication_slot('probe', 'test_decoding')")
    except psycopg.errors.UndefinedFile as error:
        pytest.skip(f"the server has no test_decoding: {error}")
    database15.execute("select pg_drop_replication_slot('probe')")
    return database15


def both(database: Database, folder: Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """Read everything through pgoutput and through test_decoding."""
    end = end_of_wal(database)
    with source_of(database, folder, "polling") as source:
        binary = read_until(source, end)
    with source_of(database, folder, "polling", slot=TEXT) as source:
        text = read_until(source, end)
    assert [(each.xid, each.end_lsn, each.commit_time_us) for each in binary if each.xid] == [
        (each.xid, each.end_lsn, each.commit_time_us) for each in text if each.xid
    ]
    assert all(each.commit_lsn < each.end_lsn for each in text)
    return [_plain(each.changes) for each in binary], [_plain(each.changes) for each in text]


def _plain(changes: list[Change]) -> list[Any]:
    return [change._replace(position=change.position._replace(commit_lsn=Lsn(0))) for change in changes]


def make_slots(database: Database) -> None:
    for slot, plugin in ((SLOT, "pgoutput"), (TEXT, "test_decoding")):
        database.execute("select pg_create_logical_replication_slot(%s, %s)", (slot, plugin))


def test_a_mixed_workload_reads_the_same(text_database: Database, tmp_path: Path) -> None:
    prepare(text_database, SLOT)
    text_database.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", (TEXT,))
    mixed_workload(text_database)
    end = end_of_wal(text_database)
    with source_of(text_database, tmp_path, "polling") as source:
        binary = read_until(source, end)
    with source_of(text_database, tmp_path, "polling", slot=TEXT) as source:
        text = read_until(source, end)
    assert told(text) == told(binary)
    assert [[change.unchanged for change in each.changes] for each in text] == [
        [change.unchanged for change in each.changes] for each in binary
    ]


def test_types_and_names_read_the_same(text_database: Database, tmp_path: Path) -> None:
    text_database.execute(
        """
        create schema "Odd: schema"; create type "Odd: schema"."My ""type" as enum ('a b', 'c''d');
        create domain public.positive as int check (value > 0);
        create table "Odd: schema"."odd ""table" (
            "Key [1]:'" int primary key, i2 int2, i8 int8, o oid, f4 float4, f8 float8, n numeric(10, 3), yes boolean,
            t text, v varchar(20), c char(5), b bytea, bits bit(4), many varbit, d date, ts timestamp, tz timestamptz,
            span interval, u uuid, j jsonb, arr int[], texts text[][], e "Odd: schema"."My ""type", p public.positive,
            es "Odd: schema"."My ""type"[], r int4range, m money, x xml, "ümlaut" text,
            twice int generated always as ("Key [1]:'" * 2) stored);
        create publication pub for all tables;
        """
    )
    make_slots(text_database)
    columns = '"Key [1]:\'", i2, i8, o, f4, f8, n, yes, t, v, c, b, bits, many, d, ts, tz, span, u, j, arr, texts, '
    columns += 'e, p, es, r, m, x, "ümlaut"'
    text_database.execute(
        f"""
        insert into "Odd: schema"."odd ""table" ({columns}) values (
            1, -2, 9007199254740993, 4000000000, 1.5, 'NaN', 1.5, true, 'it''s ''quoted'' [x]:''y'' ', 'v', 'c',
            '\\x00ff', B'1010', B'', '0044-03-15 BC', 'infinity', '2025-01-01 12:00:00.123456+02', '1 year 2 days',
            'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{{"a": [1, "b"]}}', '{{1,NULL,3}}',
            '{{{{a,"b c"}},{{"''",NULL}}}}', 'c''d', 7, array['a b']::"Odd: schema"."My ""type"[], '[1,5)', 12.34,
            '<a/>', E'line\\nline\\\\');
        insert into "Odd: schema"."odd ""table" ("Key [1]:'", yes, n, f4) values (2, false, 'NaN', '-Infinity');
        """
    )
    text_database.execute('update "Odd: schema"."odd ""table" set t = null, "Key [1]:\'" = 5 where i2 = -2')
    text_database.execute('delete from "Odd: schema"."odd ""table" where "Key [1]:\'" = 5')
    text_database.execute('truncate "Odd: schema"."odd ""table" restart identity cascade')
    binary, text = both(text_database, tmp_path)
    assert text == binary
    assert len(text) == 4


@pytest.mark.parametrize("identity", ["default", "full", "nothing", "using index other"])
def test_every_replica_identity_reads_the_same(text_database: Database, tmp_path: Path, identity: str) -> None:
    text_database.execute(
        f"""
        create table public.t (a int primary key, b text not null, c text);
        create unique index other on public.t (b);
        alter table public.t replica identity {identity};
        create publication pub for table public.t with (publish = 'insert');
        """
    )
    make_slots(text_database)
    if identity != "nothing":
        text_database.execute("alter publication pub set (publish = 'insert, update, delete')")
    # The catalogue alone can say which columns there are when a delete comes first.
    text_database.execute("insert into public.t values (1, 'x', null), (2, 'y', 'z')")
    text_database.execute("update public.t set b = 'w' where a = 1")
    text_database.execute("update public.t set a = 3 where a = 2")
    text_database.execute("delete from public.t where a = 1")
    text_database.execute("truncate public.t")
    binary, text = both(text_database, tmp_path)
    assert text == binary


def test_a_delete_may_come_first(text_database: Database, tmp_path: Path) -> None:
    prepare(text_database, SLOT)
    text_database.execute("insert into public.t values (1, 'x', 2)")
    text_database.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", (TEXT,))
    text_database.execute("delete from public.t")
    with source_of(text_database, tmp_path, "polling", slot=TEXT) as source:
        assert told(read_until(source, end_of_wal(text_database))) == [[("d", "t", {"id": "1"}, None)]]


def test_a_table_that_is_altered_or_dropped_later_reads_as_it_was(text_database: Database, tmp_path: Path) -> None:
    prepare(text_database, TEXT, plugin="test_decoding")
    text_database.execute("insert into public.t values (1, 'x', 2)")
    text_database.execute("alter table public.t drop column name, add column other int")
    text_database.execute("insert into public.t values (2, 3, 4)")
    with source_of(text_database, tmp_path, "polling", slot=TEXT) as source:
        seen = told(read_until(source, end_of_wal(text_database)))
        text_database.execute("insert into public.t values (3, 4, 5)")
        seen += told(read_until(source, end_of_wal(text_database)))
    assert [change[3] for (change,) in seen] == [
        {"id": "1", "name": "x", "amount": "2"},
        {"id": "2", "amount": "3", "other": "4"},
        {"id": "3", "amount": "4", "other": "5"},
    ]
    assert find_table(text_database.connection, b"public.gone").columns == ()


def test_partitions_are_published_with_their_root(text_database: Database, tmp_path: Path) -> None:
    text_database.execute(
        """
        create table public.root (id int primary key) partition by range (id);
        create table public.leaf partition of public.root for values from (0) to (10);
        create publication pub for table public.root with (publish_via_partition_root = true);
        """
    )
    make_slots(text_database)
    text_database.execute("insert into public.root values (1)")
    with source_of(text_database, tmp_path, "polling", slot=TEXT) as source:
        assert told(read_until(source, end_of_wal(text_database))) == [[("c", "leaf", None, {"id": "1"})]]


def test_what_the_plugin_cannot_do_is_refused(text_database: Database, tmp_path: Path) -> None:
    text_database.execute("create table public.t (a int primary key, secret text)")
    text_database.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", (TEXT,))
    with pytest.raises(PublicationMissing), source_of(text_database, tmp_path, "polling", slot=TEXT):
        pass
    text_database.execute("create publication pub for table public.t (a)")
    with pytest.raises(SourceNotReady, match="column list"), source_of(text_database, tmp_path, "polling", slot=TEXT):
        pass


def test_many_rows_come_in_bounded_memory(text_database: Database, tmp_path: Path) -> None:
    prepare(text_database, TEXT, plugin="test_decoding")
    text_database.execute("insert into public.t select n, repeat('x', 300), n from generate_series(1, 50000) n")
    memory = 1 << 20
    with source_of(text_database, tmp_path, "polling", slot=TEXT, memory_bytes_max=memory) as source:
        with source.receive_batch(LIMIT, 10.0) as batch:
            assert batch.change_count == 50_000
            assert source.budget.used_bytes <= memory
            assert sum(data[:1] == b"I" for data in batch.transactions[0].rows) == 50_000
        assert source.budget.used_bytes == 0
