"""An audit of a real source and real tables: nothing is found where nothing is, and everything that is, is named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from integration.capturing import settings as capture_settings
from integration.capturing import working
from postgres.servers import Database, fresh
from spark.conftest import Captured, MakeCaptured
from spark.pipeline_process import PipelineProcess
from spark.piping import Piped
from spark.replica.following import Following
from walstream.config import Config
from walstream.errors import UnhealthyError, UsageError
from walstream.postgres.embedded import EmbeddedPostgres
from walstream.spark.audit.comparing import audit
from walstream.spark.audit.report import Report, TableReport
from walstream.spark.warehouse import table_path

TABLES = """
create table orders (id int primary key, amount numeric(12,2), note text, tags text[], at timestamptz, doc text);
create table lines (order_id int, number int, what jsonb, primary key (order_id, number));
alter table orders alter column doc set storage external;
insert into orders select i, i / 3.0, 'note ' || i, array['a', null, i::text], now(), repeat(md5(i::text), 300)
    from generate_series(1, 300) i;
insert into lines select i, 1, jsonb_build_object('x', i) from generate_series(1, 300) i;
"""
NAMES = ("public.orders", "public.lines")


@pytest.fixture
def piped(make_captured: MakeCaptured, tmp_path: Path) -> Piped:
    captured = make_captured(TABLES, pipeline__warehouse=str(tmp_path / "warehouse"))
    return settled(captured)


def settled(captured: Captured, *tables: str) -> Piped:
    """Run the pipeline until its tables are in a cut."""
    captured.wait_for_snapshots(*(tables or NAMES))
    captured.execute("select pg_logical_emit_message(true, 'walstream.heartbeat', '')")
    piped = Piped(captured)
    piped.once()
    return piped


def audited(piped: Piped | Captured, **options: Any) -> Report:
    return audit(piped.config, piped.spark, **options)


def of(report: Report, table: str) -> TableReport:
    return next(one for one in report.tables if one.table == table)


def damage(piped: Piped, table: str, act: Callable[[DeltaTable], object]) -> None:
    """Change a table behind the pipeline's back; the next cut, which something else is the reason of, lists that."""
    act(DeltaTable(table_path(piped.warehouse, table)))
    other = (
        "lines values (-1, (random() * 1000000)::int, null)" if table != "public.lines" else "orders (id) values (-1)"
    )
    piped.captured.execute(f"insert into {other}")
    piped.once()


def test_no_difference_while_the_source_is_busy(piped: Piped) -> None:
    def work(number: int) -> None:
        key = number % 250 + 1
        piped.captured.execute(
            f"begin; update orders set amount = amount + 1 where id = {key};"
            f" insert into lines values ({key}, {number + 10}, null); commit"
        )
        if number % 10 == 0:
            piped.captured.execute(f"delete from lines where number = {number + 5}")
            piped.captured.execute(f"update orders set id = {1000 + key} where id = {key}")
            piped.captured.execute(f"update orders set id = {key} where id = {1000 + key}")
            piped.captured.execute(f"insert into orders (id, note) values ({2000 + number}, 'new')")
        time.sleep(0.02)

    with working(work):
        time.sleep(1)
        report = audited(piped)
        assert report.is_same, report
        assert report.lsn > report.cut_lsn
        piped.once(wait=False)
        later = audited(piped)
    assert later.is_same, later
    assert later.cut_lsn > report.cut_lsn
    assert (later.tables_compared, later.differences) == (2, 0)
    assert later.rows_compared > 600


def test_truncated_and_filled_again_after_the_cut(piped: Piped) -> None:
    piped.captured.execute("truncate lines; insert into lines values (1, 1, null); truncate orders")
    report = audited(piped)
    assert report.is_same, report
    assert report.rows_compared == 1


def test_one_row_changed_one_missing_one_extra(piped: Piped) -> None:
    def act(delta: DeltaTable) -> None:
        delta.delete("id = 7")
        delta.update(updates={"note": "'somebody was here'", "amount": "null"}, predicate="id = 8")
        row = delta.to_pyarrow_table(filters=[("id", "=", 9)])
        write_deltalake(delta, row.set_column(0, row.schema.field("id"), pa.array([9999], pa.int32())), mode="append")

    damage(piped, "public.orders", act)
    report = audited(piped)
    assert not report.is_same
    orders = of(report, "public.orders")
    assert orders.state == "different"
    assert orders.source is not None
    assert orders.destination is not None
    assert (orders.source.rows, orders.destination.rows) == (300, 300)
    assert orders.differences is not None
    assert [(one.kind, one.key, set(one.columns)) for one in orders.differences.named] == [
        ("missing", {"id": 7}, set()),
        ("extra", {"id": 9999}, set()),
        ("changed", {"id": 8}, {"note", "amount"}),
    ]
    assert report.differences == 3
    assert of(report, "public.lines").state == "same"
    # What the log tells of a row since the cut does not hide what is wrong with others.
    piped.captured.execute("update orders set note = 'x' where id in (1, 2)")
    assert audited(piped, tables=["public.orders"], keys_max=0).differences == 3


def test_one_row_twice(piped: Piped) -> None:
    def act(delta: DeltaTable) -> None:
        row = delta.to_pyarrow_table(filters=[("order_id", "=", 9)])
        write_deltalake(delta, row, mode="append")

    damage(piped, "public.lines", act)
    lines = of(audited(piped), "public.lines")
    assert lines.differences is not None
    assert [(one.kind, one.key) for one in lines.differences.named] == [("duplicate", {"order_id": 9, "number": 1})]


def test_history_and_append_are_compared_by_what_they_come_to(make_captured: MakeCaptured, tmp_path: Path) -> None:
    captured = make_captured(
        TABLES + "create table events (at int, what text); insert into events values (1, 'a'), (1, 'a')",
        pipeline__warehouse=str(tmp_path / "warehouse"),
        pipeline__tables={
            "public.orders": {"mode": "append"},
            "public.lines": {"mode": "history"},
            "public.events": {"mode": "append"},
        },
    )
    piped = settled(captured, *NAMES, "public.events")

    def work() -> None:
        captured.execute("update orders set amount = 1 where id < 10; update orders set id = id + 5000 where id < 5")
        captured.execute("delete from lines where order_id < 20; insert into lines values (9, 9, null)")
        captured.execute("update lines set what = null where order_id between 30 and 40")
        captured.execute("insert into events values (1, 'a'), (2, null)")

    work()
    assert audited(piped).is_same
    piped.once()
    assert audited(piped).is_same
    captured.execute("truncate events, orders; insert into orders (id) values (1); insert into events values (3, 'c')")
    report = audited(piped)
    assert report.is_same, report
    piped.once()
    report = audited(piped)
    assert report.is_same, report
    assert [table.mode for table in report.tables] == ["append", "history", "append"]
    captured.execute("alter table events replica identity full")
    captured.execute("delete from events")
    events = of(audited(piped), "public.events")
    assert (events.state, events.source) == ("incomparable", None)


def test_columns_that_came_went_and_were_renamed_since_the_cut(piped: Piped) -> None:
    execute = piped.captured.execute
    execute("alter table orders rename column note to remark; alter table orders add column more int")
    # Nothing has been written since: the destination cannot know of it, and nothing differs.
    report = audited(piped)
    assert report.is_same, report
    assert of(report, "public.orders").note == "not in the destination: more"
    execute("update orders set remark = 'y', more = 7 where id = 3; alter table orders drop column tags")
    execute("update orders set amount = 5 where id = 4; alter table lines alter column number type bigint")
    report = audited(piped)
    assert report.is_same, report
    piped.once()
    assert audited(piped).is_same


def test_a_default_that_old_rows_have_without_a_change_is_a_difference(piped: Piped) -> None:
    piped.captured.execute("alter table lines add column level int default 1")
    lines = of(audited(piped), "public.lines")
    assert lines.differences is not None
    assert lines.differences.counts["changed"] == 300
    assert lines.differences.named[0].columns == ("level",)


def test_tables_that_the_destination_does_not_hold(piped: Piped) -> None:
    piped.captured.execute("create table late (id int primary key); insert into late values (1)")
    report = audited(piped)
    assert not report.is_same
    assert of(report, "public.late").state == "pending"
    with pytest.raises(UsageError, match=r"public\.nothing"):
        audited(piped, tables=["public.nothing"])


def test_a_log_that_stands_still_is_told(piped: Piped) -> None:
    piped.captured.stop()
    piped.captured.execute("insert into orders (id) values (-5)")
    with pytest.raises(UnhealthyError, match="the log still holds"):
        audited(piped, timeout_s=2)


def test_the_command(piped: Piped, tmp_path: Path) -> None:
    process = PipelineProcess(
        tmp_path,
        {
            **capture_settings(piped.captured.database, piped.captured.node),
            "pipeline.warehouse": piped.warehouse,
        },
    )
    damage(piped, "public.orders", lambda delta: delta.delete("id = 7"))
    done = process.ask("audit", "--output", "json")
    assert done.returncode == 4, done.stderr
    assert "1 different" in done.stderr
    found = json.loads(done.stdout)
    assert (found["state"], found["differences"], found["tables_compared"]) == ("different", 1, 2)
    assert found["rows_compared"] == sum(table["source_rows"] for table in found["tables"]) == 601
    assert [table["keys"] for table in found["tables"] if table["keys"]] == [
        [{"kind": "missing", "key": {"id": 7}, "columns": []}]
    ]
    done = process.ask("audit", "--table", "public.lines")
    assert done.returncode == 0, done.stderr
    assert "301 rows in 1 table compared" in done.stderr
    assert "public.orders" not in done.stdout


@pytest.fixture
def replica(postgres16: EmbeddedPostgres) -> Iterator[Database]:
    with fresh(postgres16) as database:
        yield database


def following(captured: Captured, replica: Database) -> Config:
    given = captured.config.pipeline.model_dump()
    own = {"host": "127.0.0.1", "port": replica.server.port, "database": replica.name}
    changed = captured.config.pipeline.model_validate({**given, "destination": "postgres", "replica": own})
    return captured.config.model_copy(update={"pipeline": changed})


def test_a_replica_is_audited_as_well(make_captured: MakeCaptured, replica: Database) -> None:
    captured = make_captured(TABLES)
    follower = Following(captured, replica)
    follower.settle(*NAMES)
    config = following(captured, replica)
    captured.execute("update orders set at = 'infinity', amount = 'NaN' where id = 5")
    report = audit(config, captured.spark)
    assert report.is_same, report
    follower.catch_up()
    captured.execute("update orders set id = 5000 where id = 5; delete from lines where order_id = 9")
    captured.execute("alter table orders rename column note to remark; alter table orders add column more date")
    report = audit(config, captured.spark)
    assert report.is_same, report
    follower.catch_up()
    follower.close()
    replica.execute(
        "delete from orders where id = 7; update orders set tags = '{}' where id = 8;"
        "insert into lines values (8888, 1, null)"
    )
    report = audit(config, captured.spark)
    assert not report.is_same
    named = [one for table in report.tables if table.differences for one in table.differences.named]
    assert [(one.kind, one.key, one.columns) for one in named] == [
        ("extra", {"order_id": 8888, "number": 1}, ()),
        ("missing", {"id": 7}, ()),
        ("changed", {"id": 8}, ("tags",)),
    ]
