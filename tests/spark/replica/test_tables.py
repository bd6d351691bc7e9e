"""A replica follows a real source: every kind of change, every type, killed anywhere, told twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.capturing import working
from postgres.servers import Database, fresh
from spark.conftest import Captured, MakeCaptured
from spark.replica.following import Following, rows, same
from spark.test_source_faults import remove
from walstream.config import StreamRule
from walstream.errors import TableConflict
from walstream.postgres.embedded import EmbeddedPostgres
from walstream.spark.runner import last_cut, run

TABLES = """
create table accounts (id int primary key, owner text, balance numeric(12,2), doc text);
create table moves (id bigserial primary key, account int, amount numeric(12,2));
alter table accounts alter column doc set storage external;
insert into accounts select i, 'owner ' || i, 100, repeat(md5(i::text), 400) from generate_series(1, 50) i;
"""

MakeFollowing = Callable[..., Following]


@pytest.fixture
def replica(postgres16: EmbeddedPostgres) -> Iterator[Database]:
    """An older server than the source is; what the SQL does on every version is tested in test_sql.py."""
    with fresh(postgres16) as database:
        yield database


@pytest.fixture
def follow() -> Iterator[Callable[[Captured, Database], Following]]:
    with ExitStack() as stack:

        def make(captured: Captured, replica: Database) -> Following:
            following = Following(captured, replica)
            stack.callback(following.close)
            return following

        yield make


def test_every_kind_of_change(make_captured: MakeCaptured, replica: Database, follow: MakeFollowing) -> None:
    captured = make_captured(TABLES)
    following = follow(captured, replica)
    following.settle("public.accounts", "public.moves")
    same(captured, replica, "accounts", "moves")
    captured.execute("insert into accounts values (51, 'new', 1, 'short')")
    # The large value is not sent again.
    captured.execute("update accounts set balance = balance + 1 where id in (1, 2, 3)")
    captured.execute("update accounts set balance = balance + 1 where id = 1")
    captured.execute("delete from accounts where id in (4, 5)")
    captured.execute("begin; update accounts set balance = 7 where id = 6; rollback")
    captured.execute("begin; delete from accounts where id = 7; insert into accounts values (7, 'again', 0); commit")
    captured.execute("insert into moves (account, amount) select i, i from generate_series(1, 20) i")
    following.catch_up()
    same(captured, replica, "accounts", "moves")
    # Within one batch: inserted and partly updated, deleted after that, truncated in the middle.
    captured.execute("insert into accounts values (60, 'x', 1, repeat('doc', 5000)), (61, 'y', 1, repeat('d', 9000))")
    captured.execute("update accounts set balance = 2 where id in (60, 61)")
    captured.execute("delete from accounts where id = 61")
    captured.execute("truncate moves")
    captured.execute("insert into moves (account, amount) values (1, 1)")
    following.catch_up()
    same(captured, replica, "accounts", "moves")


def test_the_pipeline_of_a_configuration(make_captured: MakeCaptured, replica: Database, tmp_path: Path) -> None:
    captured = make_captured(TABLES)
    own = {"host": "127.0.0.1", "port": replica.server.port, "database": replica.name}
    given = {**captured.config.pipeline.model_dump(), "destination": "postgres", "replica": own}
    pipeline = captured.config.pipeline.model_validate({**given, "checkpoint": str(tmp_path / "checkpoint")})
    config = captured.config.model_copy(update={"pipeline": pipeline})
    captured.wait_for_snapshots("public.accounts", "public.moves")
    for statement in ("insert into moves (account, amount) values (1, 2)", "delete from accounts where id = 3"):
        captured.execute(statement)
        captured.wait()
        run(config, captured.spark, lambda: False, once=True)
        same(captured, replica, "accounts", "moves")
    cut = last_cut(config)
    assert cut is not None
    assert (set(cut.versions), cut.stopped) == ({"public.accounts", "public.moves"}, {})
    assert rows(replica, "select end_lsn::text from walstream.position") == [str(cut.end_lsn)]


def test_keys_change_and_are_exchanged(make_captured: MakeCaptured, replica: Database, follow: MakeFollowing) -> None:
    captured = make_captured(TABLES)
    following = follow(captured, replica)
    following.settle("public.accounts")
    captured.execute("update accounts set id = 1001 where id = 1")
    captured.execute(
        "begin; update accounts set id = -1 where id = 2; update accounts set id = 2 where id = 3;"
        " update accounts set id = 3 where id = -1; commit"
    )
    captured.execute("update accounts set id = 2001 where id = 20; update accounts set id = 3001 where id = 2001")
    captured.execute("update accounts set id = 20 where id = 3001; update accounts set owner = 'me' where id = 20")
    captured.execute("update accounts set id = 4001 where id = 21; delete from accounts where id = 4001")
    following.catch_up()
    same(captured, replica, "accounts")
    assert rows(replica, "select length(doc) from accounts where id in (2, 3, 20, 1001)") == [12_800] * 4


def test_all_types_come_out_as_they_are(make_captured: MakeCaptured, replica: Database, follow: MakeFollowing) -> None:
    captured = make_captured(
        """
        create type mood as enum ('sad', 'very "happy"');
        create domain positive as int check (value > 0);
        create table types (
            id int primary key, small int2, large int8, yes bool, real4 float4, real8 float8, num numeric,
            num2 numeric(20,4), txt text, chr char(5), var varchar(30), bin bytea, ts timestamp, tz timestamptz,
            d date, t time, ttz timetz, iv interval, js json, jb jsonb, u uuid, ip inet, net cidr, m mood, p positive,
            ints int[], texts text[], deep int[][], odd int[], bins bytea[], times timestamptz[], moods mood[],
            boxes box[], pt point, r int4range, rs tstzrange, bits bit(4), mon money, v tsvector, nums numeric[],
            floats float8[], bools bool[])
        """
    )
    following = follow(captured, replica)
    following.settle("public.types")
    captured.execute("insert into types (id) values (0)")
    captured.execute(
        r"""insert into types values (
            1, -32768, 9223372036854775807, true, 'NaN', '-Infinity', 'NaN', 12345678901234.5678,
            E'tab\t "quoted" \\ back\nline , '' é 🐘', 'ab', '', '\x00ff10', 'infinity', '0044-03-15 12:00:00.5+00 BC',
            '-infinity', '24:00:00', '01:02:03+05:30', '1 year -2 mons 3 days 04:05:06.789', '{"a": [1,  2]}',
            '{"b": "\u00e9\"x"}', '00000000-0000-0000-0000-0000000000ff', '10.0.0.1/8', '10.0.0.0/8', 'very "happy"', 5,
            '{1,NULL,3}', E'{"a,b","say \\"hi\\"",NULL,"","NULL","{}","back\\\\slash"}', '{{1,2},{3,4}}',
            '[0:1]={7,8}', array['\x00'::bytea, '\xff', null],
            array['infinity'::timestamptz, '2024-01-01 00:00:00.000001+00'],
            array['sad', 'very "happy"']::mood[], array[box '(1,2),(3,4)', box '(5,6),(7,8)'], '(1.5,-2)', '[1,10)',
            '["2024-01-01 00:00:00+00",infinity)', '1010', 1234.56, 'a:1 ''b c'':2',
            '{1.10,NaN,NULL}', '{0.1,NaN,Infinity}', '{t,f,NULL}')"""
    )
    captured.execute(
        "insert into types (id, real4, real8, num, ts, ints) values"
        " (2, 0.1, 1e300, 1e-20, '2024-02-29 23:59:59.999999', '{}'), (3, -0.0, 0.1::float8 / 3, 1.10, null, null)"
    )
    following.catch_up()
    for type_name in ("moods", "m"):
        # The enum is not at the replica, and text takes its place.
        assert "text" in rows(
            replica, f"select format_type(atttypid, null) from pg_attribute where attname = '{type_name}'"
        )
    same(captured, replica, "types")
    captured.execute("update types set id = id + 10, num = null where id = 1")
    captured.execute("delete from types where id = 2")
    following.catch_up()
    same(captured, replica, "types")


@pytest.mark.parametrize("is_behind", [False, True], ids=["at once", "behind"])
def test_the_schema_follows(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing, is_behind: bool
) -> None:
    captured = make_captured(
        'create schema "My.Schema"; create table "My.Schema"."A.t" (id int primary key, "X y" int, b text)'
    )
    following = follow(captured, replica)
    following.settle('"My.Schema".A.t')
    table = '"My.Schema"."A.t"'
    captured.execute(f"insert into {table} values (1, 2, 'three'), (2, 3, 'four')")
    following.catch_up()
    if is_behind:
        # The catalogue that capture looks into is then ahead of every row but the last.
        captured.stop()
    captured.execute(f"alter table {table} add column added jsonb")
    captured.execute(f"""insert into {table} values (3, 4, 'five', '{{"a": 1}}')""")
    captured.execute(
        f'alter table {table} rename column b to renamed; alter table {table} alter column "X y" type bigint'
    )
    captured.execute(f"update {table} set renamed = 'FOUR' where id = 2")
    captured.execute(f"alter table {table} drop column added")
    captured.execute(f"insert into {table} values (4, 5000000000, 'six')")
    if is_behind:
        captured.start()
    following.catch_up()
    same(captured, replica, table)
    columns = (
        f"select attname from pg_attribute where attrelid = '{table}'::regclass and attnum > 0 and not attisdropped"
    )
    assert rows(replica, f"{columns} order by 1") == ["X y", "id", "renamed"]


def test_batches_that_come_again_change_nothing(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    captured = make_captured(TABLES)
    following = follow(captured, replica)
    following.settle("public.accounts", "public.moves")
    captured.execute("update accounts set balance = balance + 1; delete from accounts where id = 9")
    first = following.catch_up()
    before = replica.execute("select xmin::text, id from accounts order by id")
    # The same points again, to the same process and to a new one that knows nothing: nothing is written.
    following.catch_up(after=-1)
    again = follow(captured, replica)
    assert again.catch_up(after=-1) >= first
    assert replica.execute("select xmin::text, id from accounts order by id") == before
    # A batch that begins long ago and has something new at its end: only that is applied.
    captured.execute("update accounts set balance = balance * 2 where id = 3; delete from accounts where id = 8")
    captured.execute("insert into moves (account, amount) values (3, 3)")
    follow(captured, replica).catch_up(after=-1)
    same(captured, replica, "accounts", "moves")


def test_a_table_that_was_there_keeps_its_constraints(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    tables = """
        create table parents (id int generated always as identity primary key, code text not null unique);
        create table children (id int primary key, parent int not null references parents on delete cascade,
                               doc text, twice int generated always as (id * 2) stored);
    """
    captured = make_captured(
        tables + "insert into parents (code) select 'c' || i from generate_series(1, 9) i;"
        "insert into children (id, parent, doc) select i, i, repeat('x', 4000) from generate_series(1, 9) i"
    )
    replica.execute(tables)
    replica.execute(
        "create function shout() returns trigger language plpgsql as $$ begin raise 'a trigger ran'; end $$;"
        "create trigger shouts before insert or delete on children for each row execute function shout()"
    )
    following = follow(captured, replica)
    following.settle("public.parents", "public.children")
    same(captured, replica, "parents", "children")
    # Unique values change places, which no order of updates one by one could follow.
    captured.execute(
        "begin; update parents set code = 'tmp' where id = 1; update parents set code = 'c1' where id = 2;"
        " update parents set code = 'c2' where id = 1; commit"
    )
    captured.execute("update children set parent = 3 where id = 1; delete from parents where id = 1")
    following.catch_up()
    same(captured, replica, "parents", "children")


def test_tables_without_a_key_are_added_to(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    captured = make_captured("create table events (at int, what text); insert into events values (1, 'a'), (1, 'a')")
    following = follow(captured, replica)
    following.settle("public.events")
    captured.execute("insert into events values (2, 'b')")
    following.catch_up()
    same(captured, replica, "events")
    captured.execute("truncate events; insert into events values (3, 'c'), (3, 'c')")
    following.catch_up()
    same(captured, replica, "events")
    captured.execute("alter table events replica identity full; delete from events")
    following.catch_up()
    cut = following.tables.last_cut()
    assert cut is not None
    assert "has no key" in cut.stopped["public.events"]


def test_a_table_that_does_not_fit_stops_alone_and_goes_on_when_mended(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    captured = make_captured(TABLES)
    following = follow(captured, replica)
    following.settle("public.accounts", "public.moves")
    replica.execute("alter table accounts add constraint small check (balance < 1000)")
    captured.execute(
        "update accounts set balance = 5000 where id = 1; insert into moves (account, amount) values (1, 4900)"
    )
    following.catch_up()
    cut = following.tables.last_cut()
    assert cut is not None
    assert "small" in cut.stopped["public.accounts"]
    assert set(cut.versions) == {"public.moves"}
    same(captured, replica, "moves")
    captured.execute(
        "insert into moves (account, amount) values (2, 1); update accounts set balance = 101 where id = 2"
    )
    following.catch_up()
    same(captured, replica, "moves")
    assert rows(replica, "select balance::int from accounts where id in (1, 2)") == [100, 100]
    replica.execute("alter table accounts drop constraint small")
    captured.execute("insert into moves (account, amount) values (3, 1)")
    restarted = follow(captured, replica)
    restarted.catch_up(after=-1)
    same(captured, replica, "accounts", "moves")
    cut = restarted.tables.last_cut()
    assert cut is not None
    assert set(cut.versions) == {"public.accounts", "public.moves"}


def test_a_table_whose_rows_are_gone_stops_alone_at_every_restart(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    captured = make_captured(TABLES)
    following = follow(captured, replica)
    following.settle("public.accounts", "public.moves")
    replica.execute("alter table accounts add constraint small check (balance < 1000)")
    captured.execute("update accounts set balance = 5000 where id = 1")
    done = following.catch_up()
    # While it is behind, retention removes what it lacks.
    topic = f"{captured.prefix}.public.accounts"
    remove(captured, topic, captured.log.end(topic))
    replica.execute("alter table accounts drop constraint small")
    for number in range(2):
        captured.execute("insert into moves (account, amount) values (%s, 1)", [number])
        restarted = follow(captured, replica)
        restarted.pipeline.catch_up()
        done = restarted.catch_up(after=done)
        same(captured, replica, "moves")
        cut = restarted.tables.last_cut()
        assert cut is not None
        assert "are due" in cut.stopped["public.accounts"]
        assert set(cut.versions) == {"public.moves"}


def test_a_table_that_stops_before_its_first_write_is_named_with_its_reason(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    captured = make_captured(TABLES)
    replica.execute("create table accounts (id int primary key, owner text, balance numeric(12,2), doc text)")
    replica.execute("alter table accounts add constraint small check (balance < 0)")
    follow(captured, replica).settle("public.moves")
    restarted = follow(captured, replica)
    cut = restarted.tables.last_cut()
    assert cut is not None
    assert "small" in cut.stopped["public.accounts"]
    assert (set(cut.versions), set(cut.snapshots)) == ({"public.moves"}, {"public.moves"})
    # There is nothing that it could go on from: it begins with its snapshot again.
    replica.execute("alter table accounts drop constraint small")
    captured.execute("update accounts set balance = 7 where id = 3")
    restarted.settle("public.accounts")
    same(captured, replica, "accounts", "moves")
    cut = restarted.tables.last_cut()
    assert cut is not None
    assert cut.stopped == {}


def test_tombstones_are_no_rows(make_captured: MakeCaptured, replica: Database, follow: MakeFollowing) -> None:
    captured = make_captured(TABLES, start=False)
    captured.config = captured.config.model_copy(update={"streams": (StreamRule(tombstones=True),)})
    captured.start()
    following = follow(captured, replica)
    following.settle("public.accounts", "public.moves")
    captured.execute("delete from accounts where id in (4, 5); update accounts set balance = 1 where id = 6")
    following.catch_up()
    same(captured, replica, "accounts", "moves")


def test_others_who_write_to_the_replica_are_noticed(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    captured = make_captured(TABLES)
    following, other = follow(captured, replica), follow(captured, replica)
    following.settle("public.accounts")
    with pytest.raises(TableConflict, match="Another pipeline"):
        other.catch_up()
    # Its large value is not sent again, and is nowhere else.
    replica.execute("delete from accounts where id = 1")
    captured.execute("update accounts set balance = 2 where id = 1")
    following.catch_up()
    cut = following.tables.last_cut()
    assert cut is not None
    assert "(1) among them" in cut.stopped["public.accounts"]


def test_readers_of_the_replica_see_whole_transactions(
    make_captured: MakeCaptured, replica: Database, follow: MakeFollowing
) -> None:
    captured = make_captured(TABLES)
    following = follow(captured, replica)
    following.settle("public.accounts", "public.moves")
    sums: set[int] = set()
    query = "select (select sum(balance) from accounts)::int - (select coalesce(sum(amount), 0) from moves)::int"

    def transfer(number: int) -> None:
        account = number % 40 + 1
        captured.execute(
            f"begin; update accounts set balance = balance + 10 where id = {account};"
            f" insert into moves (account, amount) values ({account}, 10); commit"
        )
        time.sleep(0.005)

    with working(transfer), replica.connect() as reader:

        def look(_: int) -> None:
            row = reader.execute(query).fetchone()
            assert row is not None
            sums.add(row[0])

        with working(look):
            for _ in range(4):
                following.catch_up()
    following.catch_up()
    assert sums == {5000}
    same(captured, replica, "accounts", "moves")
