"""Streaming reads: whole transactions in every micro-batch, limits, a restart from the checkpoint, the lag."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from spark.conftest import Captured, MakeCaptured
from waiting import wait_until
from walstream.spark.options import Options
from walstream.spark.source import WalstreamStreamReader

TABLES = """
create table a (id int primary key, amount int not null);
create table b (id int primary key, amount int not null);
"""
# A transaction moves an amount from one table to the other: the sum over both is 0 after each.
TRANSFER = """
begin;
insert into a values ({0}, {0});
insert into b values ({0}, -{0});
commit
"""


class Batches:
    """Keeps every micro-batch of a query."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []

    def __call__(self, frame: DataFrame, _: int) -> None:
        self.rows.append(frame.collect())

    @property
    def all(self) -> list[Any]:
        return [row for batch in self.rows for row in batch]


def run_available(frame: DataFrame, checkpoint: Path, sink: Callable[[DataFrame, int], None]) -> StreamingQuery:
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    started = query.trigger(availableNow=True).start()
    started.awaitTermination()
    return started


def transfers(captured: Captured, first: int, last: int) -> None:
    for number in range(first, last + 1):
        captured.execute(TRANSFER.format(number))
    captured.wait()


@pytest.fixture
def moved(make_captured: MakeCaptured) -> Captured:
    captured = make_captured(TABLES)
    captured.wait_for_snapshots("public.a", "public.b")
    return captured


def test_commit_points_come_with_rows_per_table_and_hold_whole_transactions(moved: Captured, tmp_path: Path) -> None:
    transfers(moved, 1, 30)
    points = Batches()
    run_available(moved.read_stream(), tmp_path, points)
    counts = [dict(row.tables) for row in points.all if row.rows and row.snapshot_id is None]
    assert sum(each["public.a"] for each in counts) == 30
    assert all(each["public.a"] == each["public.b"] for each in counts)
    assert [row.offset for row in points.all] == sorted({row.offset for row in points.all})
    first, last = points.all[0], points.all[-1]
    assert last.end_lsn_text == f"{last.end_lsn >> 32:X}/{last.end_lsn & 0xFFFFFFFF:X}"
    assert first.snapshot_id is None
    snapshots = {row.snapshot_table: row for row in points.all if row.snapshot_id}
    assert snapshots.keys() == {"a", "b"}
    assert snapshots["a"].snapshot_schema == "public"
    assert sum(row.bytes for row in points.all) > 30 * 2 * 100


def test_points_of_some_tables_only(moved: Captured, tmp_path: Path) -> None:
    transfers(moved, 1, 3)
    points = Batches()
    run_available(moved.read_stream(tables="public.b"), tmp_path, points)
    assert {name for row in points.all for name in dict(row.tables)} == {"public.b"}


def test_micro_batches_are_cut_by_rows_and_read_each_row_once(moved: Captured, tmp_path: Path) -> None:
    for first in range(1, 60, 10):
        transfers(moved, first, first + 9)
    batches = Batches()
    query = run_available(moved.read_stream(table="public.a", maxRowsPerTrigger=25), tmp_path, batches)
    assert sorted(row.id for row in batches.all) == list(range(1, 61))
    assert len([batch for batch in batches.rows if batch]) >= 4
    spans = [progress["sources"][0] for progress in query.recentProgress if progress["numInputRows"]]
    for each in spans:
        start, end = _offset(each["startOffset"]), _offset(each["endOffset"])
        # Rows of both tables count, and no point here has more than 20.
        assert 0 < end["rows_total"] - start["rows_total"] <= 25


def test_limit_by_bytes(moved: Captured, tmp_path: Path) -> None:
    for first in range(1, 41, 10):
        transfers(moved, first, first + 9)
    batches = Batches()
    query = run_available(moved.read_stream(table="public.b", maxBytesPerTrigger=8_000), tmp_path, batches)
    assert sorted(row.id for row in batches.all) == list(range(1, 41))
    for progress in query.recentProgress:
        each = progress["sources"][0]
        start, end = _offset(each["startOffset"]), _offset(each["endOffset"])
        assert end["bytes_total"] - start["bytes_total"] <= 8_000


def test_one_transaction_larger_than_the_limit_is_not_split(moved: Captured, tmp_path: Path) -> None:
    moved.execute("insert into a select g, g from generate_series(1, 5000) g")
    moved.wait()
    transfers(moved, 10_001, 10_003)
    batches = Batches()
    run_available(moved.read_stream(table="public.a", maxRowsPerTrigger=100), tmp_path, batches)
    sizes = [len(batch) for batch in batches.rows if batch]
    assert sizes[0] == 5000
    assert sum(sizes) == 5003


def test_restart_goes_on_where_the_checkpoint_says(moved: Captured, tmp_path: Path) -> None:
    transfers(moved, 1, 5)
    first = Batches()
    run_available(moved.read_stream(table="public.a"), tmp_path, first)
    transfers(moved, 6, 9)
    # A new generation in between: its first point has a full vector, and rows of the old one are not read again.
    moved.stop()
    moved.start()
    transfers(moved, 10, 12)
    second = Batches()
    run_available(moved.read_stream(table="public.a"), tmp_path, second)
    assert [row.id for row in first.all] == [1, 2, 3, 4, 5]
    assert sorted(row.id for row in second.all) == [6, 7, 8, 9, 10, 11, 12]
    third = Batches()
    run_available(moved.read_stream(table="public.a"), tmp_path, third)
    assert third.all == []


def test_a_running_query_follows_and_reports_its_lag(moved: Captured, spark: SparkSession, tmp_path: Path) -> None:
    batches = Batches()
    query = (
        moved.read_stream(table="public.a", maxRowsPerTrigger=10)
        .writeStream.foreachBatch(batches)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        transfers(moved, 1, 3)
        wait_until(lambda: len(batches.all) == 3, "three rows")
        for first in range(4, 60, 8):
            transfers(moved, first, first + 7)
        wait_until(lambda: len(batches.all) == 59, "the others")
        seen = [progress["sources"][0] for progress in query.recentProgress]
        lags = [
            _offset(each["latestOffset"])["rows_total"] - _offset(each["endOffset"])["rows_total"]
            for each in seen
            if each["latestOffset"] is not None and each["endOffset"] is not None
        ]
        assert lags
        assert min(lags) >= 0
        assert max(lags) > 0
        # An idle source makes no batches.
        count = len(batches.rows)
        moved.execute("create table not_published_rows (id int primary key)")
        moved.wait()
        query.processAllAvailable()
        assert len(batches.rows) - count <= 1
    finally:
        query.stop()
    assert query.exception() is None


@pytest.mark.parametrize("starting", ["latest", "lsn", "time"])
def test_starting_somewhere(moved: Captured, tmp_path: Path, starting: str) -> None:
    transfers(moved, 1, 4)
    ((lsn, now),) = moved.execute("select pg_current_wal_flush_lsn()::text, clock_timestamp()")
    transfers(moved, 5, 7)
    place = {"latest": "latest", "lsn": lsn, "time": now.isoformat()}[starting]
    frame = moved.read_stream(table="public.a", starting=place)
    batches = Batches()
    run_available(frame, tmp_path, batches)
    assert sorted(row.id for row in batches.all) == ([] if starting == "latest" else [5, 6, 7])
    transfers(moved, 8, 9)
    run_available(frame, tmp_path, batches)
    assert sorted(row.id for row in batches.all)[-2:] == [8, 9]


def test_available_now_is_what_was_there_when_it_began(moved: Captured) -> None:
    transfers(moved, 1, 4)
    reader = WalstreamStreamReader(Options.of({**moved.options, "table": "public.a"}), StructType())
    try:
        start = reader.initialOffset()
        there = reader.reportLatestOffset()
        reader.prepareForTriggerAvailableNow()
        transfers(moved, 5, 7)
        limit = reader.getDefaultReadLimit()
        assert reader.latestOffset(start, limit) == there
        assert reader.latestOffset(there or {}, limit) == there, "so the query ends, however much has come since"
        assert reader.reportLatestOffset() != there
    finally:
        reader.stop()


def test_checkpoint_of_another_log_is_told(moved: Captured, make_captured: MakeCaptured, tmp_path: Path) -> None:
    transfers(moved, 1, 5)
    run_available(moved.read_stream(table="public.a"), tmp_path, Batches())
    other = make_captured(TABLES)
    other.wait_for_snapshots("public.a", "public.b")
    transfers(other, 1, 40)
    with pytest.raises(StreamingQueryException, match=r"walstream\.errors\.DataLoss: .*begin again with"):
        run_available(other.read_stream(table="public.a"), tmp_path, Batches())


def test_after_and_upto_are_not_for_streams(moved: Captured, tmp_path: Path) -> None:
    with pytest.raises(StreamingQueryException, match="The option after is for batch reads"):
        run_available(moved.read_stream(table="public.a", after=-1), tmp_path, Batches())


def _offset(text: Any) -> dict[str, Any]:
    found = json.loads(text) if isinstance(text, str) else text
    # The first batch of a query has no start.
    return found or {"rows_total": 0, "bytes_total": 0}
