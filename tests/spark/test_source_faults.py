"""What a log goes through: killed captures, foreign records, retention, lost topics. Nothing twice or in silence."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.errors import PySparkException, StreamingQueryException

from integration.capturing import InProcess, Log, settings
from spark.conftest import Captured, MakeCaptured
from spark.test_source_stream import Batches, run_available
from waiting import wait_until

TABLE = "create table t (id int primary key, note text)"


@pytest.fixture
def captured(make_captured: MakeCaptured) -> Captured:
    captured = make_captured(TABLE)
    captured.wait_for_snapshots("public.t")
    return captured


def topic_of(captured: Captured) -> str:
    return f"{captured.prefix}.public.t"


def ids(captured: Captured, **options: object) -> list[int]:
    return sorted(row.id for row in captured.read(table="public.t", **options).select("id").collect())


def insert(captured: Captured, first: int, last: int) -> None:
    captured.execute("insert into t select g, 'note ' || g from generate_series(%s::int, %s::int) g", [first, last])
    captured.wait()


def remove(captured: Captured, topic: str, before: int) -> None:
    """Have the log forget the beginning of a topic, as retention does."""
    admin = AdminClient({"bootstrap.servers": captured.node.address})
    for future in admin.delete_records([TopicPartition(topic, 0, before)]).values():
        future.result(30)


def messages(captured: Captured, topic: str) -> list[Any]:
    consumer = Consumer({"bootstrap.servers": captured.node.address, "group.id": "test", "enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = []
        while (message := consumer.poll(10)) is not None and message.error() is None:
            found.append(message)
        return found
    finally:
        consumer.close()


def test_records_that_do_not_belong_are_not_read(captured: Captured) -> None:
    insert(captured, 1, 10)
    topic = topic_of(captured)
    copied = [(message.key(), message.value(), message.headers()) for message in messages(captured, topic)]
    producer = Producer({"bootstrap.servers": captured.node.address})
    for key, value, headers in copied:
        # What a zombie would write: rows that are right in everything but their place and their time.
        producer.produce(topic, value, key, headers=headers)
    garbage = [
        b"",
        b"x",
        b"{}",
        b"{}\n{}",
        b" ",
        b'{"source":"no"}',
        b'{"source":{"gen":-5}}',
        b"\xff\xfe",
        b"null",
        None,
    ]
    for value in garbage:
        producer.produce(topic, value, b"k")
    # Of another generation, with values that no type holds.
    producer.produce(topic, copied[0][1].replace(b'"gen":0', b'"gen":77').replace(b'"id":1', b'"id":"x"'), b"k")
    producer.flush()
    insert(captured, 11, 20)
    assert ids(captured) == list(range(1, 21))
    assert len(messages(captured, topic)) == 31 + len(garbage) + 0
    assert ids(captured, rowsPerTask=7) == list(range(1, 21))


def test_orphans_of_killed_captures_are_left_out(make_captured: MakeCaptured, tmp_path: Path) -> None:
    captured = make_captured(TABLE, start=False)
    process = InProcess(settings(captured.database, captured.node), tmp_path).start()
    captured.log = Log(captured.node, captured.database, process)
    captured.log.wait_for_snapshots("public.t")
    expected, next_id, orphans = 0, 1, 0
    for turn in range(12):
        for _ in range(40):
            captured.execute(
                "insert into t select g, repeat('x', 200) from generate_series(%s::int, %s::int) g",
                [next_id, next_id + 299],
            )
            next_id += 300
            expected += 300
        time.sleep(0.02 * (turn % 5))
        before = captured.log.last()
        assert before is not None
        process.kill()
        process.start()
        # Its log may be complete before it has begun; and one that has not begun is ended by a signal, not by itself.
        wait_until(lambda gen=before.gen: (last := captured.log.last()) and last.gen > gen, "a generation")
        captured.log.wait()
        orphans = captured.log.end(topic_of(captured)) - expected
        if orphans and turn >= 3:
            break
    process.stop()
    assert orphans > 0, "no kill has left rows without a commit point"
    frame = captured.read(table="public.t")
    assert frame.count() == frame.select("_commit_lsn", "_seq").distinct().count() == expected
    assert ids(captured) == list(range(1, next_id))
    assert ids(captured, rowsPerTask=2_000) == list(range(1, next_id))
    batches = Batches()
    run_available(captured.read_stream(table="public.t", maxRowsPerTrigger=5_000), tmp_path / "checkpoint", batches)
    assert sorted(row.id for row in batches.all) == list(range(1, next_id))


def test_tombstones_are_counted_and_are_no_rows(make_captured: MakeCaptured, tmp_path: Path) -> None:
    file = tmp_path / "streams.toml"
    file.write_text('[[streams]]\ntable = "public.t"\ntombstones = true\n')
    captured = make_captured(TABLE, start=False)
    given = settings(captured.database, captured.node)
    process = InProcess(given, tmp_path)
    toml = tmp_path / "walstream.toml"
    toml.write_text(toml.read_text() + "\n" + file.read_text())
    process.start()
    captured.log = Log(captured.node, captured.database, process)
    captured.log.wait_for_snapshots("public.t")
    insert(captured, 1, 5)
    captured.execute("delete from t where id > 3")
    captured.log.wait()
    process.stop()
    assert len(messages(captured, topic_of(captured))) == 9
    rows = captured.read(table="public.t").groupBy("_op").count().collect()
    assert {row["_op"]: row["count"] for row in rows} == {"c": 5, "d": 2}


def test_rows_that_retention_has_removed_are_told(captured: Captured, tmp_path: Path) -> None:
    insert(captured, 1, 10)
    insert(captured, 11, 20)
    first = Batches()
    run_available(captured.read_stream(table="public.t", maxRowsPerTrigger=10), tmp_path / "a", first)
    insert(captured, 21, 30)
    insert(captured, 31, 40)
    remove(captured, topic_of(captured), 25)
    with pytest.raises(StreamingQueryException) as raised:
        run_available(captured.read_stream(table="public.t"), tmp_path / "a", Batches())
    text = str(raised.value)
    assert "walstream.errors.DataLoss: " in text
    assert "begins at offset 25, so that 5 of the 10 rows from 20 on are gone" in text
    assert "begin again with starting=earliest and a new checkpoint, or take a new snapshot" in text
    with pytest.raises(PySparkException, match="begins at offset 25; 10 rows from offset 0 up to 10"):
        captured.read(table="public.t", after=-1, upto=last_point(captured)).collect()
    # The remedy: the first point after which everything is there.
    fresh = Batches()
    run_available(captured.read_stream(table="public.t", starting="earliest"), tmp_path / "b", fresh)
    assert [row.id for row in fresh.all] == list(range(31, 41))
    assert ids(captured, starting="earliest") == list(range(31, 41))


def test_points_that_retention_has_removed_are_told(captured: Captured, tmp_path: Path) -> None:
    insert(captured, 1, 10)
    run_available(captured.read_stream(table="public.t"), tmp_path, Batches())
    lsn = captured.execute("select pg_current_wal_flush_lsn()::text")[0][0]
    insert(captured, 11, 20)
    # A generation of its own, which begins with a full vector.
    captured.stop()
    captured.start()
    insert(captured, 21, 30)
    opened = captured.log.last()
    assert opened is not None
    remove(captured, f"{captured.prefix}.commits", opened.gen)
    with pytest.raises(
        StreamingQueryException, match=r"DataLoss: .* begins at offset \d+: the commit points from offset"
    ):
        run_available(captured.read_stream(table="public.t"), tmp_path, Batches())
    with pytest.raises(PySparkException, match="the commit points from the beginning on were removed"):
        captured.read(table="public.t", after=-1).collect()
    with pytest.raises(PySparkException, match="lies before the oldest commit point that is left"):
        captured.read(table="public.t", starting=lsn).collect()
    assert ids(captured, starting="earliest") == list(range(21, 31))
    assert [row.rows for row in captured.read(starting="earliest").collect() if row.rows] == [10]


def test_a_topic_that_was_deleted_is_told(captured: Captured) -> None:
    insert(captured, 1, 10)
    captured.stop()
    admin = AdminClient({"bootstrap.servers": captured.node.address})
    for future in admin.delete_topics([topic_of(captured)]).values():
        future.result(30)
    with pytest.raises(PySparkException, match=r"DataLoss: .*Take a new snapshot of its table"):
        captured.read(table="public.t", after=-1).collect()


def test_rows_that_are_not_there_are_told_by_every_kind_of_task(captured: Captured) -> None:
    insert(captured, 1, 100)
    topic = topic_of(captured)
    captured.stop()
    remove(captured, topic, 50)
    for options in ({}, {"rowsPerTask": 30}):
        with pytest.raises(PySparkException, match="so that 50 of the 100 rows from 0 on are gone"):
            captured.read(table="public.t", after=-1, **options).collect()
    # Whoever counts by himself is not told.
    assert captured.read(table="public.t", after=-1, rowsPerTask=30, counted="false").count() == 50


def test_a_node_that_is_away_for_a_while(make_captured: MakeCaptured, make_node: Any, tmp_path: Path) -> None:
    node = make_node()
    captured = make_captured(TABLE, node=node)
    captured.wait_for_snapshots("public.t")
    insert(captured, 1, 10)
    captured.stop()
    batches = Batches()
    query = (
        captured.read_stream(table="public.t")
        .writeStream.foreachBatch(batches)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        wait_until(lambda: len(batches.all) == 10, "ten rows")
        node.kill()
        time.sleep(3)
        node.start()
        captured.start()
        insert(captured, 11, 20)
        wait_until(lambda: len(batches.all) == 20, "ten more")
    finally:
        query.stop()
    assert query.exception() is None
    assert sorted(row.id for row in batches.all) == list(range(1, 21))


def last_point(captured: Captured) -> int:
    point = captured.log.last()
    assert point is not None
    return point.offset
