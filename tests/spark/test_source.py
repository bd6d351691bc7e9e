"""Batch reads: found without registration, between two points, with all options, and clear about what cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

import walstream
from spark.conftest import Captured, MakeCaptured
from walstream.node.process import NodeProcess
from walstream.positions import Lsn

ORDERS = "create table orders (id int primary key, item text, price numeric(10, 2), big text)"


@pytest.fixture
def orders(make_captured: MakeCaptured) -> Captured:
    captured = make_captured(ORDERS)
    captured.wait_for_snapshots("public.orders")
    return captured


def test_changes_of_a_table(orders: Captured) -> None:
    orders.execute("insert into orders values (1, 'tea', 2.50, null), (2, 'cup', 7, null)")
    orders.execute("update orders set item = 'pot' where id = 2; delete from orders where id = 1")
    orders.execute("truncate orders")
    orders.wait()
    frame = orders.read(table="public.orders")
    assert frame.schema.simpleString() == (
        "struct<id:int,item:string,price:decimal(10,2),big:string,_op:string,_source_epoch:int,_commit_lsn:bigint,"
        "_seq:bigint,_ts:timestamp,_txid:bigint,_snapshot:string,_unchanged:array<string>,_schema_version:int,"
        "_old_key:string>"
    )
    rows = sorted(frame.collect(), key=lambda row: (row["_commit_lsn"], row["_seq"]))
    assert [(row["_op"], row.id, row.item, row.price and str(row.price)) for row in rows] == [
        ("c", 1, "tea", "2.50"),
        ("c", 2, "cup", "7.00"),
        ("u", 2, "pot", "7.00"),
        ("d", 1, None, None),
        ("t", None, None, None),
    ]
    assert [row["_seq"] for row in rows] == [1, 2, 1, 2, 1]
    assert rows[0]["_txid"] == rows[1]["_txid"] != rows[2]["_txid"]


def test_columns_that_were_not_sent_and_rows_that_move(orders: Captured) -> None:
    # Not compressible, so it is stored out of line and an update of another column does not send it.
    orders.execute("alter table orders alter big set storage external")
    orders.execute("insert into orders values (1, 'a', 1, repeat('x', 10000))")
    orders.execute("update orders set item = 'b' where id = 1")
    orders.execute("update orders set id = 5 where id = 1")
    orders.execute("update orders set id = 6, big = 'short' where id = 5")
    orders.wait()
    rows = sorted(orders.read(table="public.orders").collect(), key=lambda row: (row["_commit_lsn"], row["_seq"]))
    assert [(row["_op"], row.id, len(row.big or ""), row["_unchanged"], row["_old_key"]) for row in rows] == [
        ("c", 1, 10000, [], None),
        ("u", 1, 0, ["big"], None),
        ("d", 1, 0, [], None),
        ("c", 5, 0, ["big"], '{"id":1}'),
        ("d", 5, 0, [], None),
        ("c", 6, 5, [], None),
    ]


def test_some_columns_as_strings(orders: Captured) -> None:
    orders.execute("insert into orders values (1, 'tea', 2.50, null)")
    orders.wait()
    (row,) = orders.read(table="public.orders", columns="price,id", strings="price").select("price", "id").collect()
    assert row == ("2.50", 1)
    with pytest.raises(AnalysisException, match="has no column 'nothing' in its version 1"):
        orders.read(table="public.orders", columns="nothing")


def test_between_two_points(orders: Captured) -> None:
    for number in range(6):
        orders.execute("insert into orders (id) values (%s)", [number])
        orders.wait()
    points = [row for row in orders.read().collect() if row.rows]
    assert len(points) == 6
    for first, last in ((0, 6), (0, 3), (2, 4), (5, 6), (3, 3)):
        after, upto = points[first - 1].offset if first else -1, points[last - 1].offset
        found = orders.read(table="public.orders", after=after, upto=upto).collect()
        assert [row.id for row in found] == list(range(first, last))
    # Any offset will do to begin after.
    found = orders.read(table="public.orders", after=points[2].offset - 1, upto=points[4].offset).collect()
    assert [row.id for row in found] == [2, 3, 4]
    # LSNs are for people, and mean the points that hold them.
    found = orders.read(
        table="public.orders", starting=points[1].end_lsn_text, ending=str(Lsn(points[3].end_lsn + 1))
    ).collect()
    assert [row.id for row in found] == [2, 3]
    with pytest.raises(PySparkException, match="no valid commit point at offset"):
        orders.read(table="public.orders", after=-1, upto=0).collect()
    with pytest.raises(PySparkException, match="before it begins"):
        orders.read(table="public.orders", after=points[3].offset, upto=points[1].offset).collect()


def test_many_partitions_and_many_tasks_read_each_row_once(make_captured: MakeCaptured) -> None:
    captured = make_captured("create table t (id int primary key)", capture__partitions=3)
    captured.wait_for_snapshots("public.t")
    captured.execute("insert into t select g from generate_series(1, 3000) g")
    for number in range(5):
        captured.execute(
            "insert into t select g from generate_series(%s::int, %s::int) g",
            [10_000 + number * 100, 10_099 + number * 100],
        )
        captured.wait()
    frame = captured.read(table="public.t", rowsPerTask=300)
    # A transaction of 1,000 rows in each partition is cut in four, and counted by one more task.
    assert frame.rdd.getNumPartitions() >= 3 * 6
    assert sorted(row.id for row in frame.select("id").collect()) == [*range(1, 3001), *range(10_000, 10_500)]
    uncounted = captured.read(table="public.t", rowsPerTask=300, counted="false")
    assert uncounted.rdd.getNumPartitions() < frame.rdd.getNumPartitions()
    assert uncounted.count() == 3500


def test_rows_of_a_snapshot_among_changes(make_captured: MakeCaptured) -> None:
    captured = make_captured("create table t (id int primary key, snapshot text)", start=False)
    captured.execute("insert into t select g, 'x' from generate_series(1, 5000) g")
    captured.start()
    for number in range(20):
        captured.execute(
            "insert into t select g, 'y' from generate_series(%s::int, %s::int) g",
            [9000 + number * 10, 9009 + number * 10],
        )
    captured.wait_for_snapshots("public.t")
    captured.wait()
    frame = captured.read(table="public.t")
    counts = {
        (row["_op"], row["_snapshot"] is None, row.snapshot): row["count"]
        for row in frame.groupBy("_op", "_snapshot", "snapshot").count().collect()
    }
    assert counts == {("r", False, "x"): 5000, ("c", True, "y"): 200}


def test_versions_of_a_table(orders: Captured) -> None:
    orders.execute("insert into orders values (1, 'tea', 2.50, null)")
    # What the catalogue says of a version is believed while it is still so.
    orders.wait()
    orders.execute("alter table orders rename item to thing; alter table orders add column paid bool default true")
    orders.execute("insert into orders values (2, 'cup', 1, null, false)")
    orders.wait()
    orders.execute("alter table orders drop column paid; alter table orders alter price type text")
    orders.execute("insert into orders values (3, 'pot', 'nothing', null)")
    orders.wait()
    newest = orders.read(table="public.orders")
    assert newest.columns[:4] == ["id", "thing", "price", "big"]
    assert sorted(newest.select("id", "thing", "price", "_schema_version").collect()) == [
        (1, "tea", "2.50", 1),
        (2, "cup", "1.00", 2),
        (3, "pot", "nothing", 3),
    ]
    second = orders.read(table="public.orders", schema_version=2, columns="id,thing,paid")
    assert sorted(second.select("id", "thing", "paid").collect(), key=lambda row: row.id) == [
        (1, "tea", None),
        (2, "cup", False),
        (3, "pot", None),
    ]
    with pytest.raises(AnalysisException, match=r"has no version 9\. It has 1, 2, 3"):
        orders.read(table="public.orders", schema_version=9)


def test_tables_with_odd_names(make_captured: MakeCaptured) -> None:
    captured = make_captured('create schema "a.b"; create table "a.b"."T ü.x" ("ID" int primary key, "a,b" text)')
    captured.execute("""insert into "a.b"."T ü.x" values (1, 'x')""")
    captured.wait()
    assert {name for row in captured.read().collect() for name in row.tables} == {'"a.b".T ü.x'}
    frame = captured.read(table='"a.b".T ü.x', columns='ID,"a,b"')
    assert frame.select("ID", "`a,b`").collect() == [(1, "x")]


def test_a_table_without_key_and_an_empty_one(make_captured: MakeCaptured) -> None:
    captured = make_captured("create table loose (a int); create table empty (id int primary key)")
    captured.wait_for_snapshots("public.loose", "public.empty")
    captured.execute("insert into loose values (1), (1)")
    captured.wait()
    assert [row.a for row in captured.read(table="public.loose").collect()] == [1, 1]
    assert captured.read(table="public.empty").collect() == []


def test_what_cannot_be_is_told(orders: Captured, spark: SparkSession, spark_node: NodeProcess) -> None:
    def load(**options: str) -> None:
        spark.read.format("walstream").options(**options).load().collect()

    with pytest.raises(AnalysisException, match=r"walstream\.errors\.UsageError: The option bootstrap is missing"):
        load()
    with pytest.raises(AnalysisException, match=r"has no option 'tabel'\. It has after, bootstrap"):
        load(bootstrap=spark_node.address, tabel="public.orders")
    with pytest.raises(AnalysisException, match=r"capture has not described it\. Tables there: public\.orders"):
        orders.read(table="public.nothing")
    with pytest.raises(AnalysisException, match="no capture has written with that prefix"):
        load(bootstrap=spark_node.address, prefix="nobody", table="a.b")
    with pytest.raises(PySparkException, match="no capture has written with that prefix"):
        load(bootstrap=spark_node.address, prefix="nobody")
    with pytest.raises(AnalysisException, match=r"UnreachableError: .*Check the option bootstrap"):
        load(bootstrap="127.0.0.1:1", table="a.b")


def test_found_without_registration_in_a_process_that_imports_nothing_of_ours(orders: Captured) -> None:
    orders.execute("insert into orders (id) values (1)")
    orders.wait()
    program = f"""
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.read.format("walstream").options(**{orders.options!r}, table="public.orders").load()
print("rows:", frame.count())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(Path(walstream.__file__).parent.parent),
            "PYSPARK_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "rows: 1" in done.stdout, done.stderr[-3000:]
