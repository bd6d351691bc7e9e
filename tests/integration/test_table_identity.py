"""Tables that leave the stream and come back: they are read again, and housekeeping reads none again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from integration.capturing import InThread, Log, configured, source_rows
from postgres.servers import Database
from waiting import wait_until
from walstream.capture.snapshot_watch import Watch
from walstream.node.process import NodeProcess

TABLES = """
    create schema other;
    create table wide (id int primary key, note text);
    create table narrow (id int primary key, n int);
    create table parted (id int, k int, primary key (id, k)) partition by list (k);
    create table parted_1 partition of parted for values in (1);
    create table parted_2 partition of parted for values in (2);
    insert into wide select n, 'note' from generate_series(1, 3) n;
    insert into narrow select n, n from generate_series(1, 3) n;
    insert into parted select n, 1 + n % 2 from generate_series(1, 6) n;
"""

# Statements in one string are one transaction, in a list several.
READ_AGAIN: dict[str, tuple[str, list[str]]] = {
    "unlogged and back": ("wide", ["alter table wide set unlogged", "alter table wide set logged"]),
    "unlogged and back, narrow": ("narrow", ["alter table narrow set unlogged", "alter table narrow set logged"]),
    "rewritten": ("wide", ["alter table wide alter id type bigint"]),
    "narrow table truncated": ("narrow", ["truncate narrow; insert into narrow values (7, 7)"]),
    "a column dropped and added": (
        "wide",
        ["alter table wide drop column note", "alter table wide add column note text"],
    ),
    "renamed and back": ("wide", ["alter table wide rename to w; alter table w rename to wide"]),
    "moved and back": ("wide", ["alter table wide set schema other; alter table other.wide set schema public"]),
    "dropped and created": ("wide", ["drop table wide; create table wide (id int primary key, note text)"]),
    "other operations and back": (
        "wide",
        ["alter publication p set (publish = 'insert')", "alter publication p set (publish = 'insert,update,delete')"],
    ),
    "without the root and back": (
        "parted",
        [
            "alter publication p set (publish_via_partition_root = false)",
            "alter publication p set (publish_via_partition_root = true)",
        ],
    ),
    "detached and back": (
        "parted",
        [
            "alter table parted detach partition parted_2",
            "alter table parted attach partition parted_2 for values in (2)",
        ],
    ),
    "detached": ("parted", ["alter table parted detach partition parted_2"]),
    "partition dropped": ("parted", ["drop table parted_2"]),
    "partition truncated": ("parted", ["truncate parted_2"]),
    "partition unlogged": ("parted", ["alter table parted_2 set unlogged"]),
    "partition attached with rows": (
        "parted",
        [
            "create table parted_3 (id int not null, k int not null); insert into parted_3 values (1, 3)",
            "alter table parted attach partition parted_3 for values in (3)",
        ],
    ),
    "partition attached with rows, in one transaction": (
        "parted",
        [
            "create table parted_3 (id int not null, k int not null); insert into parted_3 values (1, 3);"
            "alter table parted attach partition parted_3 for values in (3)",
        ],
    ),
}
KEPT: dict[str, tuple[str, list[str]]] = {
    "vacuum full": ("wide", ["vacuum full wide"]),
    "vacuum full, narrow": ("narrow", ["vacuum full narrow"]),
    "cluster, narrow": ("narrow", ["cluster narrow using narrow_pkey"]),
    "vacuum full of a partition": ("parted", ["vacuum full parted_2"]),
    "truncated": ("wide", ["truncate wide"]),
    "partition created": ("parted", ["create table parted_3 partition of parted for values in (3)"]),
    "partition created with rows": (
        "parted",
        ["create table parted_3 partition of parted for values in (3); insert into parted values (1, 3), (2, 3)"],
    ),
    "empty partition attached": (
        "parted",
        [
            "create table parted_3 (id int not null, k int not null)",
            "alter table parted attach partition parted_3 for values in (3)",
        ],
    ),
    "partitions in a partition": (
        "parted",
        [
            "create table parted_3 partition of parted for values in (3) partition by list (id)",
            "create table parted_3_1 partition of parted_3 for values in (1); insert into parted values (1, 3)",
        ],
    ),
}
UNSEEN = [
    "alter table wide add column more int default 5",
    "alter table wide rename note to it; alter table wide rename more to note; alter table wide rename it to more",
    "create index on wide (note)",
    "alter table wide drop column note",
    "grant select on wide to public",
    "alter table wide replica identity full",
    "vacuum freeze wide",
    "analyze",
    "delete from narrow; insert into narrow select n, n from generate_series(1, 3) n",
]


class Watched:
    """A watch that may not read: it says which tables it would have to read again."""

    def __init__(self, database: Database, finished: dict[tuple[str, str], str]) -> None:
        self.finished = finished
        self.proved: list[str] = []
        self.disproved: list[str] = []
        self._watch = Watch(
            database.dsn,
            "p",
            finished,
            workers=0,
            look_interval_s=0.05,
            may_read=False,
            on_proved=lambda key, _: self.proved.append(key[1]),
            on_disproved=lambda key: self.disproved.append(key[1]),
        )

    def __enter__(self) -> Watched:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()


@contextmanager
def published(database: Database, *, in_schema: bool = False) -> Iterator[dict[tuple[str, str], str]]:
    database.execute(TABLES)
    scope = "tables in schema public" if in_schema else "all tables"
    database.execute(f"create publication p for {scope} with (publish_via_partition_root = true)")
    finished: dict[tuple[str, str], str] = {}
    with Watched(database, finished):
        wait_until(lambda: len(finished) == 3, "the first look")
    yield finished


@pytest.mark.parametrize("what", READ_AGAIN)
@pytest.mark.parametrize("in_schema", [False, True], ids=["all tables", "in schema"])
def test_a_table_that_may_have_missed_rows_is_read_again(database: Database, what: str, in_schema: bool) -> None:
    """The statements run while nothing looks: the table is there before and after, under its name."""
    table, statements = READ_AGAIN[what]
    with published(database, in_schema=in_schema) as finished:
        for statement in statements:
            database.execute(statement)
        with Watched(database, finished) as watched:
            wait_until(lambda: table in watched.disproved, f"{table} to be doubted")
            assert set(watched.disproved) == {table} or "publication" in statements[0]


@pytest.mark.parametrize("what", KEPT)
def test_housekeeping_reads_no_table_again(each_database: Database, what: str) -> None:
    table, statements = KEPT[what]
    with published(each_database) as finished:
        for statement in statements:
            each_database.execute(statement)
        with Watched(each_database, finished) as watched:
            wait_until(lambda: table in watched.proved, f"{table} to be proved")
            assert not watched.disproved


def test_what_leaves_the_identity_as_it_is(each_database: Database) -> None:
    with published(each_database) as finished:
        before = dict(finished)
        for statement in UNSEEN:
            each_database.execute(statement)
        each_database.execute("alter table narrow rename to last")
        with Watched(each_database, finished) as watched:
            wait_until(lambda: ("public", "last") in finished, "a look")
            assert not watched.disproved
            changed = {name[1] for name, identity in finished.items() if before.get(name) != identity}
            assert changed == {"wide", "narrow", "last"}, "wide has other columns, narrow another name"


def test_absence_in_one_look_is_remembered(database: Database) -> None:
    with published(database) as finished, Watched(database, finished) as watched:
        database.execute("drop publication p; create publication p for table narrow")
        wait_until(lambda: finished["public", "wide"] == "", "a look without the table")
        database.execute("alter publication p add table wide")
        wait_until(lambda: "wide" in watched.disproved, "the table to be doubted")


def test_identities_of_earlier_versions_are_believed_once(database: Database) -> None:
    with published(database) as finished:
        oid, publication = database.execute("select 'wide'::regclass::oid, oid from pg_publication")[0]
        finished["public", "wide"] = f"{oid}/{publication}"
        finished["public", "narrow"] = f"{oid}/{publication}"
        with Watched(database, finished) as watched:
            wait_until(lambda: watched.proved and watched.disproved, "a look")
            assert (watched.proved, watched.disproved) == (["wide"], ["narrow"])


def test_tables_that_come_back_are_what_the_source_has(each_database: Database, node: NodeProcess) -> None:
    database = each_database
    database.execute(TABLES)
    database.execute("create publication walstream for all tables with (publish_via_partition_root = true)")
    names = ("public.wide", "public.narrow", "public.parted")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        first = log.wait_for_snapshots(*names)
        database.execute("alter table wide set unlogged; insert into wide values (10, 'unlogged')")
        database.execute("alter table wide set logged; insert into wide values (11, 'after')")
        database.execute("alter table narrow rename to away; insert into away values (10, 10)")
        database.execute("alter table away rename to narrow; insert into narrow values (11, 11)")
        database.execute("alter table parted detach partition parted_2; insert into parted_2 values (10, 2)")
        database.execute("alter table parted attach partition parted_2 for values in (2); truncate parted_1")
        wait_until(lambda: all(log.snapshots()[name].id != first[name].id for name in names), "other snapshots")
        log.wait()
        second = log.snapshots()
    # Nothing looks while the capture is down; it resumes with what the log says of each table.
    database.execute("alter table wide rename to away; update away set note = 'away'; alter table away rename to wide")
    database.execute("create table parted_3 partition of parted for values in (3); insert into parted values (1, 3)")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        wait_until(lambda: log.snapshots()["public.wide"].id != second["public.wide"].id, "another snapshot")
        log.wait()
        found, third = log.tables(), log.snapshots()
    for name in names:
        assert found[name].rows == source_rows(database, f"select to_json(t) from {name} t"), name
    assert third["public.narrow"].id == second["public.narrow"].id
    assert third["public.parted"].id == second["public.parted"].id


def test_a_column_that_was_replaced_has_no_values_of_the_old_one(database: Database, node: NodeProcess) -> None:
    """Rows of before the DROP look as those of after the ADD do, when both are decoded later."""
    database.execute("create table t (id int primary key, x int); create publication walstream for all tables")
    database.execute("insert into t values (1, 1)")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        first = log.wait_for_snapshots("public.t")["public.t"]
    database.execute("insert into t values (2, 5); alter table t drop column x; insert into t values (3)")
    database.execute("alter table t add column x int; insert into t values (4, 7)")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        wait_until(lambda: log.snapshots()["public.t"].id != first.id, "another snapshot")
        log.wait()
        assert log.tables()["public.t"].rows == source_rows(database, "select to_json(t) from t")


def test_a_proof_outlives_the_capture(database: Database, node: NodeProcess) -> None:
    """An empty partition is proved only while it is empty: so the log has to have it."""
    database.execute(TABLES)
    database.execute("create publication walstream for all tables with (publish_via_partition_root = true)")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        first = log.wait_for_snapshots("public.wide", "public.narrow", "public.parted")
        database.execute("create table parted_3 (id int not null, k int not null)")
        database.execute("alter table parted attach partition parted_3 for values in (3)")
        # A table that is found later shows that the look is over.
        database.execute("create table later (id int primary key)")
        log.wait_for_snapshots("public.later")
        database.execute("insert into later values (1)")
        log.wait()
    database.execute("insert into parted values (1, 3)")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        database.execute("create table last (id int primary key)")
        assert log.wait_for_snapshots("public.last")["public.parted"] == log.snapshots()["public.parted"]
        assert log.snapshots()["public.parted"].id == first["public.parted"].id


def test_where_no_snapshot_is_allowed_the_table_is_not_listed_any_more(
    database: Database, node: NodeProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    database.execute(TABLES)
    database.execute("create publication walstream for all tables with (publish_via_partition_root = true)")
    with InThread(configured(database, node)) as capture:
        Log(node, database, capture).wait_for_snapshots("public.wide", "public.narrow", "public.parted")
    database.execute("alter table wide set unlogged; insert into wide values (10, 'x'); alter table wide set logged")
    with InThread(configured(database, node, capture__snapshot="never")) as capture:
        wait_until(lambda: "are not whole" in "".join(capfd.readouterr()), "an error in the capture's log")
        database.execute("insert into narrow values (10, 10)")
        log = Log(node, database, capture)
        wait_until(lambda: set(log.snapshots()) == {"public.narrow", "public.parted"}, "the table to be left out")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        log.wait_for_snapshots("public.wide")
        log.wait()
        assert log.tables()["public.wide"].rows == source_rows(database, "select to_json(t) from wide t")
