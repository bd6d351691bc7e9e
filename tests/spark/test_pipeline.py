"""The pipeline end to end: a real PostgreSQL, capture, node and Spark; the source is the truth at every cut."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from integration.capturing import InThread, working
from spark.conftest import Captured, MakeCaptured
from spark.piping import Piped, listed
from spark.test_source_faults import remove
from waiting import wait_until
from walstream.capture.kafka import LogAddress
from walstream.capture.runner import run_generation
from walstream.config import Config, TableRule
from walstream.errors import CutExpired, ForeignLog
from walstream.positions import Lsn
from walstream.spark.cuts import Cuts
from walstream.spark.fetching import Address
from walstream.spark.kept_tables import KeptTables
from walstream.spark.maintenance import Maintenance
from walstream.spark.rereading import Points
from walstream.spark.warehouse import checkpoint_path, cuts_path
from walstream.spark.writers import open_writer

pytestmark = pytest.mark.timeout(900)

ACCOUNTS = """
create table accounts (id bigint primary key, owner text, amount numeric(12, 2) not null);
create table events (id bigint primary key, account bigint, body text);
insert into accounts select n, 'owner ' || n, n from generate_series(1, 100) n;
insert into events select n, n % 100, repeat('b', (n % 50)::int) from generate_series(1, 500) n;
"""

MakePiped = Callable[..., Piped]


@pytest.fixture
def make_piped(make_captured: MakeCaptured, tmp_path: Path) -> MakePiped:
    """A function that gives a captured database with a pipeline to a fresh warehouse."""

    def make(tables: str, **settings: object) -> Piped:
        given = {"pipeline__warehouse": str(tmp_path / "warehouse"), "pipeline__trigger_interval_ms": 100, **settings}
        return Piped(make_captured(tables, **given))

    return make


def with_tables(piped: Piped, **rules: TableRule) -> Piped:
    """The same pipeline with other settings for tables, names with a double underscore for the dot."""
    tables = {name.replace("__", "."): rule for name, rule in rules.items()}
    pipeline = piped.config.pipeline.model_copy(update={"tables": tables})
    config: Config = piped.config.model_copy(update={"pipeline": pipeline})
    return Piped(piped.captured, config)


class NewEpoch(InThread):
    """A generation that begins a source epoch."""

    def _run(self) -> None:
        try:
            run_generation(self._config, self._stop.is_set, new_epoch=True)
        except BaseException as error:
            self.failure = error


def position(captured: Captured) -> Lsn:
    return Lsn.parse(captured.execute("select pg_current_wal_lsn()::text")[0][0])


@pytest.mark.parametrize("small_rows_max", [50_000, 0], ids=["by one task", "by queries"])
def test_snapshot_then_changes(make_piped: MakePiped, small_rows_max: int) -> None:
    piped = make_piped(ACCOUNTS, pipeline__small_rows_max=small_rows_max)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    view = piped.once()
    assert {table.name: table.state for table in view.tables} == {
        "public.accounts": "current",
        "public.events": "current",
    }
    assert piped.check("public.accounts", ["id", "owner", "amount"]) == 100
    assert piped.check("public.events", ["id", "account", "body"]) == 500
    # Spark's page tells the tables apart.
    assert piped.spark.sparkContext.statusTracker().getJobIdsForGroup("walstream/public.accounts")
    first = piped.last()
    assert first.versions.keys() == {"public.accounts", "public.events"}
    captured.execute("update accounts set amount = amount + 1 where id <= 10")
    captured.execute("delete from accounts where id > 90")
    captured.execute("insert into accounts values (1000, null, 5)")
    captured.execute("update accounts set id = 2000 where id = 50")
    piped.once()
    assert piped.check("public.accounts", ["id", "owner", "amount"]) == 91
    last = piped.last()
    assert last.end_lsn > first.end_lsn
    # A table that no transaction touched has no commit, and is listed all the same.
    assert last.versions["public.events"] == first.versions["public.events"]
    assert last.versions["public.accounts"] > first.versions["public.accounts"]
    # The past stays what it was.
    before = piped.at(first.end_lsn)
    assert before.lsn == first.end_lsn
    assert before.tables["public.accounts"].count() == 100


def test_nothing_new_is_no_batch(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    piped.captured.wait_for_snapshots("public.accounts", "public.events")
    piped.once()
    cuts = len(piped.cuts.all())
    assert piped.once(wait=False).batches == 0
    assert len(piped.cuts.all()) == cuts


def test_a_sum_over_two_tables_is_right_at_every_cut(make_piped: MakePiped) -> None:
    """Transfers between two tables while the pipeline runs: the whole never changes, whatever moment is looked at."""
    piped = make_piped(
        """
        create table here (id int primary key, amount bigint not null);
        create table there (id int primary key, amount bigint not null, note text);
        insert into here select n, 1000 from generate_series(1, 50) n;
        insert into there select n, 0 from generate_series(1, 50) n;
        """
    )
    captured, dice = piped.captured, random.Random(7)
    captured.wait_for_snapshots("public.here", "public.there")

    def transfer(number: int) -> None:
        moved = dice.randrange(-20, 20)
        with session.transaction(force_rollback=dice.random() < 0.1):
            session.execute("update here set amount = amount - %s where id = %s", [moved, dice.randrange(1, 51)])
            session.execute(
                "update there set amount = amount + %s, note = %s where id = %s", [moved, number, dice.randrange(1, 51)]
            )
            if dice.random() < 0.1:
                session.execute("delete from there where id = 51")
                session.execute("insert into there values (51, 0)")

    with captured.database.connect() as session, piped.running() as pipeline:
        with working(transfer):
            for _ in range(4):
                pipeline.wait_for(position(captured))
        captured.wait()
        pipeline.wait_for(position(captured))
    rows = piped.cuts.all()
    assert len(rows) >= 4
    both = [row for row in rows if row.versions.keys() == {"public.here", "public.there"}]
    assert len(both) >= 4
    for row in both:
        here, there = (listed(piped.warehouse, row, name, "amount") for name in row.versions)
        assert sum(one["amount"] for one in (*here, *there)) == 50_000, f"at {row.end_lsn}"
    for row in both[-3:]:
        cut = piped.at(row.end_lsn)
        assert cut.lsn == row.end_lsn
        sums = [cut.tables[name].agg({"amount": "sum"}).collect()[0][0] for name in cut.versions]
        assert sum(sums) == 50_000, f"at {cut.lsn}"
    piped.check("public.here", ["id", "amount"])
    piped.check("public.there", ["id", "amount", "note"])


def test_a_lost_checkpoint_changes_nothing(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    piped.once()
    captured.execute("update accounts set amount = 0 where id < 30")
    piped.once()
    captured.execute("insert into events values (9999, 1, 'x')")
    piped.once()
    versions = piped.versions("public.accounts", "public.events")
    cuts = piped.cuts.all()
    shutil.rmtree(checkpoint_path(piped.warehouse))
    piped.once()
    assert piped.versions("public.accounts", "public.events") == versions
    assert [cut.point for cut in piped.cuts.all()][: len(cuts)] == [cut.point for cut in cuts]
    captured.execute("update events set body = 'after' where id = 9999")
    piped.once()
    assert piped.check("public.accounts", ["id", "amount"]) == 100
    assert piped.check("public.events", ["id", "account", "body"]) == 501


def test_a_warehouse_of_another_log_is_refused(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    piped.once()
    # As if the log had been made anew, and its capture begun again: cuts beyond its end, or of other LSNs.
    recorded, own = piped.last(), Cuts(piped.warehouse, captured.prefix)
    own.record(replace(recorded, point=50_000))
    for _ in ("with its checkpoint", "without it"):
        with pytest.raises(ForeignLog, match=r"at offset 50,000 .* does not have: it ends at .*pipeline.warehouse"):
            piped.once()
        shutil.rmtree(checkpoint_path(piped.warehouse), ignore_errors=True)
    shutil.rmtree(cuts_path(piped.warehouse))
    own = Cuts(piped.warehouse, captured.prefix)
    own.record(replace(recorded, end_lsn=Lsn(int(recorded.end_lsn) - 1)))
    with pytest.raises(ForeignLog, match=r"there it has the point at offset"):
        piped.once()
    # And another capture's.
    shutil.rmtree(cuts_path(piped.warehouse))
    Cuts(piped.warehouse, "other").record(recorded)
    with pytest.raises(ForeignLog, match="the tables of other"):
        piped.once()


def test_a_cut_before_the_beginning_of_the_log_is_no_contradiction(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    piped.once()
    cut = piped.last()
    captured.execute("update accounts set amount = 3 where id = 3")
    captured.wait()
    commits = f"{captured.prefix}.commits"
    points = Points(LogAddress(captured.node.address), captured.prefix, lambda _: None)
    points.check(cut, piped.warehouse)
    remove(captured, commits, cut.point + 1)
    points.check(cut, piped.warehouse)


def test_a_column_added_in_mid_stream(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    piped.once()
    before = piped.last()
    captured.execute("insert into accounts values (200, 'old', 1)")
    captured.execute("alter table accounts add column email text, drop column owner")
    captured.execute("insert into accounts values (201, 2, 'a@b')")
    captured.execute("update accounts set email = 'c@d' where id = 1")
    piped.once()
    assert piped.check("public.accounts", ["id", "amount", "email"]) == 102
    assert "owner" not in piped.at().tables["public.accounts"].columns
    assert "owner" in piped.at(before.end_lsn).tables["public.accounts"].columns


def test_columns_that_are_renamed_and_widened_keep_their_values(make_piped: MakePiped) -> None:
    """Rows that nothing happens to are not sent again: only the column's number tells whose values they have."""
    piped = make_piped(ACCOUNTS + "create table counts (id int primary key, n int, note text);")
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events", "public.counts")
    captured.execute("insert into counts select g, g, 'note ' || g from generate_series(1, 20) g")
    piped.once()
    captured.execute("alter table counts rename column note to remark; alter table counts alter column n type bigint")
    captured.execute("insert into counts values (21, 5000000000, 'new')")
    captured.execute("update counts set n = 6000000000 where id = 1")
    piped.once()
    assert piped.check("public.counts", ["id", "n", "remark"]) == 21
    assert dict(piped.at().tables["public.counts"].dtypes)["n"] == "bigint"
    assert piped.check("public.accounts", ["id", "owner", "amount"]) == 100


def test_a_table_that_is_not_wanted_is_left_alone_until_it_is(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    piped.once()
    without = with_tables(piped, public__events=TableRule(enabled=False))
    captured.execute("insert into events values (9001, 1, 'unseen')")
    captured.execute("update accounts set amount = 1 where id = 1")
    without.once()
    assert without.last().versions.keys() == {"public.accounts"}
    assert piped.delta("public.events").version() == 0
    captured.execute("insert into events values (9002, 1, 'seen')")
    piped.once()
    assert piped.last().versions.keys() == {"public.accounts", "public.events"}
    assert piped.check("public.events", ["id", "account", "body"]) == 502


def test_a_configured_table_that_is_not_in_the_log_is_told_once(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    rules = {"public__acounts": TableRule(mode="append"), "public__events": TableRule(mode="append")}
    pipeline = with_tables(piped, **rules).config.pipeline
    tables = KeptTables(Address(captured.node.address, {}), captured.prefix, pipeline, ())
    with structlog.testing.capture_logs() as lines:
        tables.refresh()
        captured.execute("create table more (id int primary key)")
        captured.wait_for_snapshots("public.more")
        tables.refresh()
    told = [line for line in lines if line["event"] == "configured table is not in the log yet"]
    assert [line["table"] for line in told] == ["public.acounts"]
    assert "public.accounts" in told[0]["hint"]


class TestTablesThatStop:
    def test_a_table_without_a_key_stops_alone_and_goes_on_after_the_remedy(self, make_piped: MakePiped) -> None:
        piped = make_piped(ACCOUNTS + "create table notes (body text); insert into notes values ('a'), ('a'), ('b');")
        captured = piped.captured
        captured.wait_for_snapshots("public.accounts", "public.events", "public.notes")
        view = piped.once()
        (notes,) = (table for table in view.tables if table.name == "public.notes")
        assert notes.state == "stopped"
        assert 'mode = "append"' in notes.reason
        assert piped.last().versions.keys() == {"public.accounts", "public.events"}
        assert "public.notes" in piped.last().stopped
        captured.execute("insert into notes values ('c')")
        captured.execute("insert into accounts values (300, 'x', 1)")
        piped.once()
        assert piped.check("public.accounts", ["id", "owner", "amount"]) == 101
        # Nothing new has come: the restart alone brings it to where the others are.
        at = piped.last().end_lsn
        mended = with_tables(piped, public__notes=TableRule(mode="append"))
        mended.once(wait=False)
        assert (mended.last().end_lsn, mended.last().stopped) == (at, {})
        assert mended.rows("public.notes", ["body", "_op"]) == [("a", "r"), ("a", "r"), ("b", "r"), ("c", "c")]
        captured.execute("insert into notes values ('d')")
        mended.once()
        assert mended.at().tables["public.notes"].count() == 5

    def test_a_value_that_cannot_be_is_read_again_from_where_the_table_stopped(self, make_piped: MakePiped) -> None:
        piped = make_piped(ACCOUNTS + "create table visits (id int primary key, at timestamptz, who text);")
        captured = piped.captured
        captured.wait_for_snapshots("public.accounts", "public.events", "public.visits")
        captured.execute("insert into visits values (1, '2026-01-31 12:00Z', 'ann')")
        piped.once()
        version = piped.last().versions["public.visits"]
        captured.execute("insert into visits values (2, 'infinity', 'bob')")
        captured.execute("update accounts set amount = 7 where id = 7")
        view = piped.once()
        assert {table.name for table in view.tables if table.state == "stopped"} == {"public.visits"}
        assert piped.last().versions.keys() == {"public.accounts", "public.events"}
        assert piped.delta("public.visits").version() == version
        assert piped.check("public.accounts", ["id", "amount"]) == 100
        captured.execute("insert into visits values (3, '2026-02-01 12:00Z', 'cec')")
        captured.execute("update visits set who = 'dan' where id = 1")
        mended = with_tables(piped, public__visits=TableRule(strings=("at",)))
        mended.once()
        assert mended.last().stopped == {}
        assert mended.check("public.visits", ["id", "who"]) == 3
        ((at,),) = mended.at().tables["public.visits"].where("id = 2").select("at").collect()
        assert at == "infinity"

    def test_a_type_that_becomes_another_one_stops_its_table_alone(self, make_piped: MakePiped) -> None:
        piped = make_piped(ACCOUNTS)
        captured = piped.captured
        captured.wait_for_snapshots("public.accounts", "public.events")
        piped.once()
        version = piped.last().versions["public.events"]
        captured.execute("alter table events alter column account type date using date '2026-01-31'")
        captured.execute("insert into events values (9001, '2026-02-01', 'x')")
        captured.execute("update accounts set amount = 7 where id = 7")
        piped.once()
        stopped = piped.last().stopped
        assert stopped.keys() == {"public.events"}
        assert "The column account of public.events was bigint and is now date" in stopped["public.events"]
        assert "new snapshot" in stopped["public.events"]
        assert piped.delta("public.events").version() == version
        assert piped.last().versions.keys() == {"public.accounts"}
        assert piped.check("public.accounts", ["id", "owner", "amount"]) == 100


class TestSnapshots:
    def test_a_table_that_comes_later(self, make_piped: MakePiped) -> None:
        piped = make_piped(ACCOUNTS)
        captured = piped.captured
        captured.wait_for_snapshots("public.accounts", "public.events")
        piped.once()
        captured.execute("create table late (id int primary key, body text)")
        captured.execute("insert into late select n, 'row' from generate_series(1, 20) n")
        captured.wait_for_snapshots("public.late")
        captured.execute("update late set body = 'changed' where id = 3")
        piped.once()
        assert piped.check("public.late", ["id", "body"]) == 20
        assert piped.last().versions.keys() == {"public.accounts", "public.events", "public.late"}

    def test_a_table_that_is_another_one_by_the_same_name_is_replaced_at_once(self, make_piped: MakePiped) -> None:
        piped = make_piped(ACCOUNTS)
        captured = piped.captured
        captured.wait_for_snapshots("public.accounts", "public.events")
        piped.once()
        before = piped.last()
        old = captured.log.snapshots()["public.events"].id
        captured.execute("drop table events; create table events (id bigint primary key, account bigint, body text)")
        captured.execute("insert into events values (1, 1, 'new'), (2, 2, 'new')")
        wait_until(lambda: captured.log.snapshots()["public.events"].id != old, "another snapshot")
        captured.execute("insert into events values (3, 3, 'newer')")
        piped.once()
        assert piped.check("public.events", ["id", "account", "body"]) == 3
        assert piped.last().snapshots["public.events"] != before.snapshots["public.events"]
        assert piped.at(before.end_lsn).tables["public.events"].count() == 500

    def test_a_new_source_epoch_replaces_every_table_as_its_snapshot_comes(self, make_piped: MakePiped) -> None:
        piped = make_piped(ACCOUNTS)
        captured = piped.captured
        captured.wait_for_snapshots("public.accounts", "public.events")
        piped.once()
        captured.execute("insert into accounts values (400, 'epoch 1', 1)")
        captured.wait()
        captured.stop()
        captured.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots where not active")
        captured.execute("insert into accounts values (401, 'between', 1)")
        with NewEpoch(captured.config):
            wait_until(lambda: (last := captured.log.last()) and last.source_epoch == 2, "another epoch")
            captured.wait_for_snapshots("public.accounts", "public.events")
            captured.execute("insert into accounts values (402, 'epoch 2', 1)")
            piped.once()
        assert piped.last().source_epoch == 2
        assert piped.check("public.accounts", ["id", "owner", "amount"]) == 103
        assert piped.check("public.events", ["id", "account", "body"]) == 500
        epochs = [cut.source_epoch for cut in piped.cuts.all()]
        assert epochs == sorted(epochs)
        # The end of the old epoch is a cut of its own, with the table as it was then.
        old = Cuts(piped.warehouse).find("latest", source_epoch=1)
        assert old.versions.keys() == {"public.accounts", "public.events"}


def test_maintenance_has_its_turn_between_batches(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    # A minute is the shortest that a user can have.
    often = piped.config.pipeline.model_copy(update={"maintenance_interval_minutes": 0.02})
    piped = Piped(captured, piped.config.model_copy(update={"pipeline": often}))

    def is_compacted() -> bool:
        return any(one.get("userMetadata") == "walstream: compaction" for one in piped.delta("public.events").history())

    with piped.running() as pipeline:
        pipeline.wait_for(Lsn(0))
        assert [query.name for query in piped.spark.streams.active] == [f"walstream-{captured.prefix}"]
        number, deadline = 0, time.monotonic() + 300
        while not is_compacted():
            assert time.monotonic() < deadline, "nothing is compacted"
            number += 1
            before = position(captured)
            captured.execute("insert into events values (%s, 1, 'more')", [1_000 + number])
            pipeline.wait_for(Lsn(before + 1))
        before = position(captured)
        captured.execute("delete from events where id > 1000")
        pipeline.wait_for(Lsn(before + 1))
    assert piped.check("public.events", ["id", "account", "body"]) == 500
    for row in piped.cuts.all():
        if "public.events" in row.versions:
            assert len(listed(piped.warehouse, row, "public.events", "id")) >= 500


def test_maintenance_keeps_what_cuts_list(make_piped: MakePiped) -> None:
    piped = make_piped(ACCOUNTS)
    captured = piped.captured
    captured.wait_for_snapshots("public.accounts", "public.events")
    for number in range(6):
        captured.execute("update accounts set amount = %s where id <= 50", [number])
        piped.once()
    cuts = piped.cuts.all()
    kept = cuts[3:]
    maintenance = Maintenance(
        Cuts(piped.warehouse, captured.prefix), open_writer("deltalake", piped.spark), kept_hours=0
    )
    # As if the first three had been written long ago, and everything that no cut lists were old.
    Cuts(piped.warehouse).expire(kept[0].written_at_us)
    report = maintenance.run(now=lambda: 0.0)
    assert report.failures == 0
    assert report.files_removed > 0
    for cut in kept:
        found = piped.at(cut.end_lsn)
        assert found.lsn == cut.end_lsn
        assert found.tables["public.accounts"].count() == 100
        assert found.tables["public.events"].count() == 500
    with pytest.raises(CutExpired, match="the oldest is at"):
        piped.at(cuts[0].end_lsn)
    captured.execute("insert into accounts values (500, 'later', 1)")
    piped.once()
    assert piped.check("public.accounts", ["id", "owner", "amount"]) == 101
