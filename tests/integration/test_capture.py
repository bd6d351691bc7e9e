"""Capture, end to end: PostgreSQL, a capture in its own process, a node, and a reader that knows only the rule."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from confluent_kafka import Producer, TopicPartition

from integration.capture_process import CaptureProcess, on, settings_of
from integration.capturing import Log, source_rows, tables
from integration.clients import admin_of, configure_topic, create_topic, read_messages
from integration.support import MakeNode
from postgres.servers import Database, MakePostgres
from waiting import wait_until
from walstream.capture.commit_points import OpenRecord, decode
from walstream.capture.kafka import LogAddress
from walstream.capture.ladder import read_ladder
from walstream.capture.reading import LogReader
from walstream.errors import DataLoss
from walstream.node.process import NodeProcess
from walstream.positions import Lsn

ROWS = "select json_build_object('id', id, 'note', note) from t"
PUBLICATION = "create publication walstream for all tables"


def settings(database: Database, node: NodeProcess, **more: object) -> dict[str, Any]:
    own = {"source__postgres__slot_name": f"slot_{database.name}", "capture__prefix": database.name}
    return settings_of(database.server, node, database.name, **{**own, **more})


def make_table(database: Database, rows: int = 0) -> None:
    database.execute("create table t (id bigint primary key, note text)")
    database.execute(PUBLICATION)
    if rows:
        database.execute(f"insert into t select n, 'note ' || n from generate_series(1, {rows}) n")


def confirmed(database: Database) -> Lsn:
    ((text,),) = database.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [f"slot_{database.name}"]
    )
    return Lsn.parse(text)


def opens(node: NodeProcess, prefix: str) -> list[OpenRecord]:
    messages = read_messages(node.address, f"{prefix}.commits")
    records = [decode(message.value(), message.offset()) for message in messages]
    return [record for record in records if isinstance(record, OpenRecord)]


def assert_same(node: NodeProcess, database: Database) -> None:
    assert tables(node, database.name)["public.t"].rows == source_rows(database, ROWS)


@pytest.mark.parametrize("engine", ["streaming", "polling"])
def test_stop_and_start_again_gives_every_change_once(
    database: Database, node: NodeProcess, tmp_path: Path, engine: str
) -> None:
    make_table(database, rows=100)
    given = settings(
        database, node, source__postgres__engine=engine, source__postgres__poll_interval_ms=50, capture__partitions=3
    )
    capture = CaptureProcess(tmp_path, given)
    log = Log(node, database, capture)
    with capture.running():
        log.wait_for_snapshots("public.t")
        database.execute("insert into t select n, 'more' from generate_series(101, 300) n")
        database.execute("update t set note = null where id % 3 = 0; update t set id = id + 1000 where id = 7;")
        log.wait()
    database.execute("delete from t where id % 5 = 0")
    database.execute("insert into t values (5000, 'while it was down')")
    with capture.running():
        log.wait()
        assert_same(node, database)
    assert_same(node, database)
    with LogReader(node.address, database.name) as reader:
        points = list(reader.points())
        last = points[-1]
        assert confirmed(database) == last.end_lsn, "what was durable at the end is confirmed"
        for row in reader.rows(points):
            assert row.key is not None
            assert row.partition.partition == crc32(row.key) % 3
        assert len({span.partition for point in points for span in point.spans}) == 3
    first, second = opens(node, database.name)
    assert first.source_epoch == second.source_epoch == 1
    assert first.origin.instance != second.origin.instance
    assert capture.log_text().count("slot created") == 1


def test_an_idle_slot_moves_on_behind_an_empty_point(database: Database, node: NodeProcess, tmp_path: Path) -> None:
    make_table(database)
    database.execute("drop publication walstream; create publication walstream for table t")
    database.execute("create table other (id int)")
    capture = CaptureProcess(tmp_path, settings(database, node))
    log = Log(node, database, capture)
    with capture.running():
        capture.wait_for_generation()
        for _ in range(3):
            database.execute("insert into other select generate_series(1, 10000)")
            end = Lsn.parse(database.execute("select pg_current_wal_insert_lsn()::text")[0][0])
            wait_until(lambda end=end: confirmed(database) >= end, "the slot moves on")
            point = log.last()
            assert point is not None
            assert point.end_lsn >= end
            assert point.rows_total == 0
        assert_points_precede_feedback(log, database)


def assert_points_precede_feedback(log: Log, database: Database) -> None:
    point = log.last()
    before = confirmed(database)
    assert point is not None
    later = log.last()
    assert later is not None
    assert before <= later.end_lsn


def test_a_heartbeat_moves_a_slot_that_nothing_else_moves(
    database: Database, node: NodeProcess, tmp_path: Path
) -> None:
    make_table(database)
    with CaptureProcess(tmp_path, settings(database, node, capture__heartbeat_interval_ms=100)).running() as capture:
        capture.wait_for_generation()
        before = confirmed(database)
        wait_until(lambda: confirmed(database) > before, "the heartbeat is confirmed")


@pytest.mark.parametrize("engine", ["streaming", "polling"])
def test_a_message_right_before_a_commit_costs_no_transaction(
    database: Database, node: NodeProcess, tmp_path: Path, engine: str
) -> None:
    """A message that does not wait for its transaction is durable before the COMMIT record behind it is read."""
    make_table(database)
    given = settings(database, node, source__postgres__engine=engine, source__postgres__poll_interval_ms=50)
    capture = CaptureProcess(tmp_path, given)
    log = Log(node, database, capture)
    with capture.running():
        log.wait_for_snapshots("public.t")
        for number in range(10):
            with database.connection.transaction():
                database.execute("insert into t values (%s, 'x')", [number])
                ((end,),) = database.execute("select pg_logical_emit_message(false, 'note', '')::text")
                if number in (3, 7):  # Each wait takes one interval of the confirmations.
                    wait_until(lambda end=end: confirmed(database) >= Lsn.parse(end), "the message is confirmed")
        log.wait()
        assert_same(node, database)
    with LogReader(node.address, database.name) as reader:
        facts = [row.facts.commit_lsn for row in reader.rows(list(reader.points()))]
    assert len(set(facts)) == len(facts) == 20, "each row and each message has a position of its own"


def test_a_stalled_log_starves_no_keepalive(make_postgres: MakePostgres, make_node: MakeNode, tmp_path: Path) -> None:
    """The sink is frozen for five times wal_sender_timeout, with more rows waiting than the producer's queue holds."""
    server, node = make_postgres(18, wal_sender_timeout="2s"), make_node()
    capture = CaptureProcess(tmp_path, settings_of(server, node, capture__prefix="postgres"))
    with on(server) as database:
        make_table(database)
        log = Log(node, database, capture)
        with capture.running():
            log.wait_for_snapshots("public.t")
            session = database.execute("select active_pid from pg_replication_slots")
            os.kill(node.pid, signal.SIGSTOP)
            try:
                for number in range(10):
                    first = number * 10_000 + 1
                    database.execute(
                        f"insert into t select n, repeat('x', 200) from generate_series({first}, {first + 9_999}) n"
                    )
                    time.sleep(1)  # The length of the stall is what the test is about.
                capture.check()
                assert database.execute("select active_pid from pg_replication_slots") == session, "it was lost"
            finally:
                os.kill(node.pid, signal.SIGCONT)
            log.wait()
            assert capture.generations() == 1
        assert_same(node, database)


def test_sigterm_makes_everything_durable_that_was_received(
    database: Database, node: NodeProcess, tmp_path: Path
) -> None:
    make_table(database)
    capture = CaptureProcess(tmp_path, settings(database, node))
    log = Log(node, database, capture)
    with capture.running():
        log.wait_for_snapshots("public.t")
        for number in range(200):
            database.execute("insert into t values (%s, 'x')", [number])
    with LogReader(node.address, database.name) as reader:
        point = reader.last_point()
    assert point is not None
    assert confirmed(database) == point.end_lsn


def test_only_one_capture_reads_a_slot(database: Database, node: NodeProcess, tmp_path: Path) -> None:
    make_table(database, rows=10)
    first = CaptureProcess(tmp_path, settings(database, node))
    with first.running():
        Log(node, database, first).wait_for_snapshots("public.t")
        second = CaptureProcess(tmp_path, settings(database, node)).start()
        assert second.wait() == 1, second.log_tail()
        assert "Another capture reads this slot" in second.log_text()
        assert second.generations() == 0, "whoever does not hold the slot opens no generation"


OUTBOX = {
    "table": "public.outbox",
    "format": "outbox",
    "topic": "{prefix}.{schema}.{route}",
    "outbox_header_columns": ["headers"],
    "operations": ["insert", "snapshot"],
}
MESSAGES = """
create table outbox (id int primary key, aggregatetype text, aggregateid text, payload text, headers json)
"""


@pytest.mark.parametrize(
    ("route", "headers"),
    [
        ("a", '{"gen": "999"}'),
        ("a", '{"commit_lsn": "1"}'),
        ("a", '{"snapshot": "x"}'),
        ("a", '{"tenant": "b"}'),
        ("t", "{}"),
        ("outbox", "{}"),
    ],
)
def test_a_message_that_would_mislead_readers_is_a_dead_letter(
    database: Database, node: NodeProcess, tmp_path: Path, route: str, headers: str
) -> None:
    make_table(database, rows=1)
    database.execute(MESSAGES)
    given = settings(database, node, capture__on_decode_error="dead_letter", capture__tenant="mine")
    capture = CaptureProcess(tmp_path, given, "--set", f"streams={json.dumps([{}, OUTBOX])}")
    log = Log(node, database, capture)
    with capture.running():
        log.wait_for_snapshots("public.t", "public.outbox")
        database.execute("insert into outbox values (1, %s, 'k', 'bad', %s)", [route, headers])
        database.execute("insert into outbox values (2, 'a', 'k', 'good', '{}')")
        log.wait()
    with LogReader(node.address, database.name) as reader:
        rows = list(reader.rows(list(reader.points())))
    dead = [row for row in rows if row.partition.topic == f"{database.name}.dead_letter"]
    assert len(dead) == 1
    assert b"bad" in (dead[0].value or b"")
    assert [row.value for row in rows if row.partition.topic == f"{database.name}.public.a"] == [b"good"]
    assert {row.headers["tenant"] for row in rows if row not in dead} == {b"mine"}


def test_rows_of_another_table_do_not_go_into_a_tables_topic(
    database: Database, node: NodeProcess, tmp_path: Path
) -> None:
    make_table(database, rows=1)
    database.execute("create table other (id bigint primary key, note text)")
    rules = [{"table": "public.t"}, {"table": "public.other", "topic": "{prefix}.public.t"}]
    capture = CaptureProcess(tmp_path, settings(database, node), "--set", f"streams={json.dumps(rules)}")
    assert_refuses(capture, f"would go to {database.name}.public.t, the topic of the table public.t", 2)


# -- what a restart does not mend ------------------------------------------------------------------------------------


@pytest.fixture
def stopped(database: Database, node: NodeProcess, tmp_path: Path) -> CaptureProcess:
    """A capture that has run, with ten rows in the log, and was stopped."""
    make_table(database, rows=10)
    capture = CaptureProcess(tmp_path, settings(database, node))
    with capture.running():
        Log(node, database, capture).wait_for_snapshots("public.t")
        database.execute("insert into t values (11, 'x')")
        Log(node, database, capture).wait()
    return capture


def assert_refuses(capture: CaptureProcess, error: str, code: int = 5) -> None:
    assert capture.start().wait() == code, capture.log_tail()
    assert error in capture.log_text(), capture.log_tail()


def test_a_slot_that_was_read_by_somebody_else_stops_it(stopped: CaptureProcess, database: Database) -> None:
    database.execute("insert into t values (12, 'lost to us')")
    database.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", [f"slot_{database.name}"])
    assert_refuses(stopped, "PostgreSQL will not send what lies between")


def test_a_slot_that_was_dropped_stops_it(stopped: CaptureProcess, database: Database) -> None:
    database.execute("select pg_drop_replication_slot(%s)", [f"slot_{database.name}"])
    assert_refuses(stopped, "is gone, and with it what has committed")


def test_a_publication_that_was_dropped_stops_it(stopped: CaptureProcess, database: Database) -> None:
    database.execute("drop publication walstream")
    assert_refuses(stopped, "There is no publication walstream")


def test_a_topic_that_was_deleted_stops_it(stopped: CaptureProcess, database: Database, node: NodeProcess) -> None:
    topic = f"{database.name}.public.t"
    admin = admin_of(node.address)
    admin.delete_topics([topic])[topic].result(30)
    assert_refuses(stopped, "is gone, with rows that commit points speak of")
    create_topic(node.address, topic)
    assert_refuses(stopped, "made again")


@pytest.mark.parametrize(
    ("topic", "changed", "told"),
    [
        ("commits", {"cleanup_policy": "compact"}, "commits is compacted"),
        ("commits", {"retention_ms": 600_000}, "keeps its records longer"),
        ("commits", {"retention_bytes": 100_000_000}, "limited in size"),
        ("public.t", {"cleanup_policy": "compact"}, "public.t is compacted"),
        ("public.t", {"retention_ms": -1}, "keeps its records longer"),
        ("schema", {"cleanup_policy": "delete"}, "schema is not compacted"),
    ],
)
def test_topics_that_would_lose_rows_or_points_stop_it(
    stopped: CaptureProcess, database: Database, node: NodeProcess, topic: str, changed: dict[str, Any], told: str
) -> None:
    configure_topic(node.address, f"{database.name}.{topic}", **changed)
    assert_refuses(stopped, told)


def test_another_cluster_stops_it(
    stopped: CaptureProcess, database: Database, node: NodeProcess, make_postgres: MakePostgres, tmp_path: Path
) -> None:
    with on(make_postgres()) as other:
        make_table(other)
        other.execute("select pg_create_logical_replication_slot('walstream', 'pgoutput')")
        again = CaptureProcess(tmp_path, settings_of(other.server, node, capture__prefix=database.name))
        assert_refuses(again, "The log was written from the PostgreSQL cluster")


@pytest.mark.parametrize("engine", ["streaming", "polling"])
def test_a_server_that_was_restored_from_its_disk_stops_it(
    make_postgres: MakePostgres, node: NodeProcess, tmp_path: Path, engine: str
) -> None:
    """System identifier, timeline and slot come back with the disk; the WAL behind the copy does not."""
    server, prefix = make_postgres(18), f"restored-{engine}"
    given = settings_of(server, node, capture__prefix=prefix, source__postgres__engine=engine)
    capture = CaptureProcess(tmp_path, given)
    data, saved = server.folder / "data", server.folder / "saved"
    with on(server) as database:
        make_table(database, rows=1)
        with capture.running():
            wait_until(lambda: _rows_total(node, prefix) == 1, "the snapshot")
        database.connection.close()
        server.stop()
        subprocess.run(["cp", "-a", str(data), str(saved)], check=True)  # Keeps the owner.
        server.start()
        with capture.running():
            database.execute("insert into t select n, repeat('x', 1000) from generate_series(2, 1000) n")
            wait_until(lambda: _rows_total(node, prefix) == 1000, "the rows that the server will not have")
        database.connection.close()
        server.stop()
        shutil.rmtree(data)
        saved.rename(data)
        server.start()
        database.execute("insert into t values (1001, 'in the other history')")
        assert_refuses(capture, "which this server does not have")
        assert capture.generations() == 2, "the refused start writes nothing"
        again = CaptureProcess(tmp_path, given, "--new-epoch", "--confirm", prefix)
        with again.running():
            wait_until(lambda: _snapshot_rows(node, prefix, epoch=2) == 2, "the table, read again")


def _snapshot_rows(node: NodeProcess, prefix: str, epoch: int) -> int:
    with LogReader(node.address, prefix) as reader:
        point = reader.last_point()
    assert point is not None
    snapshot = point.snapshots.get(("public", "t"))
    return -1 if snapshot is None or point.source_epoch != epoch else snapshot.rows


def test_a_log_that_is_not_there_is_unreachable(database: Database, make_node: MakeNode, tmp_path: Path) -> None:
    make_table(database)
    node = make_node()
    node.stop()
    assert_refuses(CaptureProcess(tmp_path, settings(database, node)), "cannot be reached", 3)


def test_a_promoted_server_goes_on_where_the_log_ends(
    make_postgres: MakePostgres, node: NodeProcess, tmp_path: Path
) -> None:
    """The server comes back on timeline 2, having kept all that we hold; its history says so."""
    server = make_postgres(18, restore_command="false")
    capture = CaptureProcess(tmp_path, settings_of(server, node, capture__prefix="promoted"))
    with on(server) as database:
        make_table(database, rows=10)
        with capture.running():
            wait_until(lambda: _rows_total(node, "promoted") == 10, "the snapshot")
            database.execute("insert into t values (11, 'on timeline 1')")
            wait_until(lambda: _rows_total(node, "promoted") == 11, "the row")
        database.connection.close()
        server.stop()
        (server.folder / "data" / "recovery.signal").touch()
        server.start()
        wait_until(lambda: not database.execute("select pg_is_in_recovery()")[0][0], "the promotion")
        database.execute("insert into t values (12, 'on timeline 2')")
        with capture.running():
            wait_until(lambda: _rows_total(node, "promoted") == 12, "the row on the new timeline")
        assert [record.origin.timeline for record in opens(node, "promoted")] == [1, 2]
        assert tables(node, "promoted")["public.t"].rows == source_rows(database, ROWS)


def _rows_total(node: NodeProcess, prefix: str) -> int:
    try:
        with LogReader(node.address, prefix) as reader:
            point = reader.last_point()
    except Exception:
        return -1
    return -1 if point is None else point.rows_total


# -- the log -----------------------------------------------------------------------------------------------------------


def test_records_of_strangers_are_not_read(database: Database, node: NodeProcess, tmp_path: Path) -> None:
    make_table(database, rows=5)
    capture = CaptureProcess(tmp_path, settings(database, node))
    log = Log(node, database, capture)
    topic = f"{database.name}.public.t"
    with capture.running():
        log.wait_for_snapshots("public.t")
        stranger = Producer({"bootstrap.servers": node.address})
        replay = read_messages(node.address, topic)[0]
        for value in (b"", b"not json", b'{"source":{}}', replay.value()):
            stranger.produce(topic, value, b"k")
        assert stranger.flush(30) == 0
        database.execute("insert into t values (6, 'after the stranger')")
        log.wait()
        assert_same(node, database)


def test_rows_that_retention_removed_are_told(database: Database, node: NodeProcess, tmp_path: Path) -> None:
    make_table(database, rows=5)
    capture = CaptureProcess(tmp_path, settings(database, node))
    with capture.running():
        Log(node, database, capture).wait_for_snapshots("public.t")
    admin = admin_of(node.address)
    request = TopicPartition(f"{database.name}.public.t", 0, 2)
    for future in admin.delete_records([request]).values():
        future.result(30)
    with LogReader(node.address, database.name) as reader, pytest.raises(DataLoss, match="begins at offset 2"):
        list(reader.rows(list(reader.points())))


def test_the_schema_comes_before_its_rows_and_versions_go_on(
    database: Database, node: NodeProcess, tmp_path: Path
) -> None:
    make_table(database, rows=1)
    capture = CaptureProcess(tmp_path, settings(database, node))
    log = Log(node, database, capture)
    with capture.running():
        log.wait_for_snapshots("public.t")
        database.execute("alter table t add column extra int")
        database.execute("insert into t values (2, 'x', 1)")
        log.wait()
    with capture.running():
        database.execute("insert into t values (3, 'x', 1)")
        database.execute("alter table t drop column extra")
        database.execute("insert into t values (4, 'x')")
        log.wait()
    versions = [
        (record["table"], record["version"], [column["name"] for column in record["columns"]])
        for record in (
            json.loads(message.value()) for message in read_messages(node.address, f"{database.name}.schema")
        )
    ]
    assert versions == [
        ("t", 1, ["id", "note"]),
        ("t", 2, ["id", "note", "extra"]),
    ], "the content of version 1 comes back, and so does its number"
    with LogReader(node.address, database.name) as reader:
        rows = list(reader.rows(list(reader.points())))
    assert [json.loads(row.value or b"")["source"]["schema_version"] for row in rows] == [1, 2, 2, 1]


def test_the_ladder_is_written_every_second(database: Database, node: NodeProcess, tmp_path: Path) -> None:
    make_table(database)
    with CaptureProcess(tmp_path, settings(database, node)).running() as capture:
        Log(node, database, capture).wait_for_snapshots("public.t")
        database.execute("insert into t values (1, 'x')")
        ladder = wait_until(
            lambda: (found := read_ladder(LogAddress(node.address), database.name)) and found.rows_total == 1 and found,
            "the ladder knows of the row",
        )
        assert ladder.server_end >= ladder.sent >= ladder.received >= ladder.durable > 0
        assert ladder.lag_bytes == ladder.server_end - ladder.durable
        assert ladder.instance == opens(node, database.name)[-1].origin.instance
        later = wait_until(
            lambda: (found := read_ladder(LogAddress(node.address), database.name)) and found.at_ms > ladder.at_ms,
            "another look",
            timeout_s=3,
        )
        assert later
