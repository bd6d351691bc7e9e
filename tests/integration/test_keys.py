"""Keys and tenants of rows, end to end: what PostgreSQL sends of them, and what it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integration.capturing import InThread, Log, configured, source_rows
from postgres.servers import Database
from waiting import wait_until
from walstream.capture.reading import LogReader, Row
from walstream.node.process import NodeProcess


def rows_of(node: NodeProcess, database: Database) -> list[tuple[Row, Any]]:
    with LogReader(node.address, database.name) as log:
        return [(row, json.loads(row.value or b"null")) for row in log.rows(list(log.points()))]


def test_full_rows_keep_their_key_when_the_catalogue_is_ahead(each_database: Database, node: NodeProcess) -> None:
    """A migration in one transaction: all of it is decoded when the catalogue has the last of its tables."""
    database = each_database
    database.execute("create table t (id int primary key, v text); alter table t replica identity full")
    database.execute("insert into t values (1, 'a'), (2, 'b'), (3, 'c')")
    database.execute("create publication walstream for all tables")
    with InThread(configured(database, node, capture__partitions=3)) as capture:
        log = Log(node, database, capture)
        log.wait_for_snapshots("public.t")
        database.execute("update t set v = 'b1' where id = 2")
        log.wait()
        database.execute("""
            begin; alter table t add column z int; update t set z = 1 where id = 1; delete from t where id = 2;
            insert into t values (4, 'd', 1); alter table t rename z to w; update t set w = 2 where id = 1; commit
        """)
        log.wait()
        assert [row.key for row, _ in rows_of(node, database) if row.key is None] == []
        found = log.tables()["public.t"]
    # Rows of the version without the last column's name: values by their place.
    assert {row["id"] for row in found.by_key.values()} == {1, 3, 4}
    assert next(row for row in found.by_key.values() if row["id"] == 1)["w"] == 2


def test_a_key_with_a_generated_column_is_none_before_18(
    database16: Database, node: NodeProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two rows would have one key: a part of a key is worse than none."""
    database = database16
    database.execute("create table t (a int, g text generated always as (v || '!') stored, v text, primary key (a, g))")
    database.execute("create publication walstream for table t; insert into t values (1, default, 'x')")
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        log.wait_for_snapshots("public.t")
        database.execute("insert into t values (1, default, 'z'); delete from t where v = 'x'")
        log.wait()
        wait_until(lambda: "key not sent whole" in "".join(capfd.readouterr()), "an error in the capture's log")
    assert [(event["op"], row.key) for row, event in rows_of(node, database)] == [("r", None), ("c", None), ("d", None)]


def test_each_tenant_gets_what_leaves_it(
    database: Database, node: NodeProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    database.execute("create table t (id int primary key, org text, x int); alter table t replica identity full")
    database.execute("create table untold (id int primary key, org text)")
    database.execute("create publication walstream for all tables; insert into t values (1, 'o1', 1)")
    with InThread(configured(database, node, capture__tenant="column:org")) as capture:
        log = Log(node, database, capture)
        log.wait_for_snapshots("public.t", "public.untold")
        database.execute("insert into t values (2, 'o1', 1); update t set org = 'o2' where id = 2")
        database.execute("update t set x = 2; delete from t where id = 1")
        database.execute("insert into untold values (1, 'o1'); delete from untold")
        log.wait()
        wait_until(lambda: "the table's rows have no tenant" in "".join(capfd.readouterr()), "an error")
        assert log.tables()["public.t"].rows == source_rows(database, "select to_json(t) from t")
    told = sorted(
        (event["source"]["table"], event["source"]["commit_lsn"], event["source"]["seq"], event["op"], row)
        for row, event in rows_of(node, database)
    )
    assert [(table, op, row.headers.get("tenant")) for table, _, _, op, row in told] == [
        ("t", "r", b"o1"),
        ("t", "c", b"o1"),
        ("t", "d", b"o1"),
        ("t", "c", b"o2"),
        ("t", "u", b"o1"),
        ("t", "u", b"o2"),
        ("t", "d", b"o1"),
        ("untold", "c", None),
        ("untold", "d", None),
    ]
