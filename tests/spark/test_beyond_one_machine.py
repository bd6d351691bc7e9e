"""The same pipeline beyond one machine: another log, another writer, a cluster; one scenario, and the source is right.

Two tables are too large for one task, so that their snapshots are read by all executors; what follows is small.

What a user changes when a part is outgrown is one setting, and so it is here: `capture.bootstrap` for Apache Kafka,
`pipeline.writer` for Delta's own MERGE, `pipeline.master` for a cluster. Where Maven Central cannot be reached, what
comes from there is skipped.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame

from integration.capturing import settings as capture_settings
from integration.capturing import wait_until
from jvm import kafka_broker
from jvm.child import QUICK
from spark import jars, standalone
from spark.conftest import Captured, MakeCaptured
from spark.pipeline_process import PipelineProcess
from spark.piping import Piped
from walstream.node.process import NodeProcess
from walstream.positions import Lsn

pytestmark = pytest.mark.timeout(900)

TABLES = """
create table here (id int primary key, amount bigint not null);
create table there (id int primary key, amount bigint not null, note text);
create table drafts (id int primary key, body text);
insert into here select n, 1000 from generate_series(1, 60000) n;
insert into there select n, 0, 'note ' || n from generate_series(1, 60000) n;
insert into drafts select n, 'draft' from generate_series(1, 20) n;
"""
COLUMNS = {"public.here": ["id", "amount"], "public.there": ["id", "amount", "note"], "public.drafts": ["id", "body"]}
TOTAL = 60_000_000
ROUNDS = 2


class Beyond(NamedTuple):
    """What is not the embedded default."""

    log: str = "node"
    spark: str = "local"
    writer: str = "deltalake"


@pytest.mark.parametrize(
    "beyond",
    [Beyond(writer="delta-spark"), Beyond(spark="standalone"), Beyond(log="kafka")],
    ids=lambda beyond: "-".join(beyond),
)
def test_the_tables_are_the_source_at_every_cut(
    beyond: Beyond, make_captured: MakeCaptured, spark_node: NodeProcess, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        log: Any = spark_node
        given: dict[str, str] = {"pipeline.writer": beyond.writer, "pipeline.master": "local[2]"}
        known = dict.fromkeys(("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"), " ".join(QUICK))
        if beyond.log == "kafka":
            log = stack.enter_context(kafka_broker.running())
        if beyond.writer == "delta-spark":
            jars.required()
            known |= jars.settings()
        if beyond.spark == "standalone":
            given["pipeline.master"] = stack.enter_context(standalone.running(tmp_path)).master
            known |= recorded(tmp_path / "events")
        warehouse = str(tmp_path / "warehouse")
        captured = make_captured(TABLES, node=log, capture__partitions=2, pipeline__warehouse=warehouse)
        stack.callback(captured.stop)  # before its log is gone
        process = PipelineProcess(
            tmp_path,
            capture_settings(captured.database, log, pipeline__warehouse=warehouse, pipeline__trigger_interval_ms=200)
            | given,
            spark=known,
        )
        follow(captured, process)
        if beyond.spark == "standalone":
            check_that_executors_read_in_parallel(tasks(tmp_path / "events"))


def follow(captured: Captured, process: PipelineProcess) -> None:
    """Run a pipeline while the source changes, and look at what the tables hold at the end and at every cut."""
    piped = Piped(captured)
    captured.wait_for_snapshots(*COLUMNS)
    with process.shown():
        process.start()
        wait_for(process, piped, Lsn(0))
        for number in range(ROUNDS):
            wait_for(process, piped, change(captured, number))
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.log_tail()
    assert "Traceback" not in process.log_text(), process.log_tail()
    for table, columns in COLUMNS.items():
        piped.check(table, columns)
    cuts = piped.cuts.all()
    assert len(cuts) > ROUNDS
    for row in cuts:
        cut = piped.at(row.end_lsn)
        assert cut.lsn == row.end_lsn
        assert total(cut.tables) == TOTAL, f"at {cut.lsn}"


def change(captured: Captured, number: int) -> Lsn:
    """Do one round of everything that can happen to rows; what both tables hold together stays what it is.

    Returns an LSN that everything but the last transaction lies before: whatever ends after it holds all.
    """
    first = number * 100
    with captured.database.connect() as session:
        for at in range(first + 1, first + 41):
            with session.transaction():
                session.execute("update here set amount = amount - %s where id = %s", [at, at])
                session.execute("update there set amount = amount + %s, note = 'moved' where id = %s", [at, at])
        with session.transaction():
            session.execute("update here set amount = amount - 7 where id = %s", [first + 41])
            session.execute("insert into there values (%s, 7, null)", [100_000 + number])
        with session.transaction():
            session.execute("delete from here where id between %s and %s", [first + 42, first + 51])
            session.execute("update there set amount = amount + 10000 where id = %s", [first + 42])
        session.execute("update here set id = id + 100000 where id = %s", [first + 52])
        session.execute("truncate drafts")
        ((before,),) = session.execute("select pg_current_wal_insert_lsn()::text").fetchall()
        session.execute("insert into drafts select n, %s from generate_series(1, 5) n", [f"round {number}"])
        return Lsn.parse(before)


def wait_for(process: PipelineProcess, piped: Piped, lsn: Lsn) -> None:
    """Wait until there is a cut beyond an LSN."""

    def is_there() -> bool:
        process.check()
        last = piped.cuts.last()
        return last is not None and last.end_lsn > lsn

    wait_until(is_there, f"a cut beyond {lsn}", timeout_s=240)


def total(tables: Mapping[str, DataFrame]) -> int:
    here, there = (tables[name].select("amount") for name in ("public.here", "public.there"))
    return int(here.union(there).agg({"amount": "sum"}).collect()[0][0])


class Task(NamedTuple):
    """A task that has run."""

    executor: str
    began_ms: int
    ended_ms: int
    stage: int
    reads: bool
    """Whether it has read rows from the log."""


def recorded(folder: Path) -> dict[str, str]:
    """Settings by which Spark waits for both executors and records what it does."""
    folder.mkdir()
    return {
        "spark.executor.memory": "512m",
        "spark.cores.max": str(standalone.WORKERS),
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": folder.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }


def tasks(folder: Path) -> list[Task]:
    """The tasks that have run, by what Spark recorded."""
    (file,) = folder.iterdir()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    reading = {
        event["Stage Info"]["Stage ID"]
        for event in events
        if event["Event"] == "SparkListenerStageSubmitted" and reads_the_log(event["Stage Info"]["RDD Info"])
    }
    ended = [(event["Stage ID"], event["Task Info"]) for event in events if event["Event"] == "SparkListenerTaskEnd"]
    return [
        Task(info["Executor ID"], info["Launch Time"], info["Finish Time"], stage, stage in reading)
        for stage, info in ended
    ]


def reads_the_log(datasets: list[dict[str, Any]]) -> bool:
    """Whether a stage scans the source itself, and not what another stage has kept of it."""
    names = {json.loads(one["Scope"])["name"] for one in datasets if "Scope" in one}
    return "BatchScan walstream" in names and "InMemoryTableScan" not in names


def check_that_executors_read_in_parallel(found: list[Task]) -> None:
    """Rows are read by as many tasks as there are executors, and one reads while another one works.

    Which executor takes a task is Spark's choice: while one was slow with its first task of another table, the other
    one has read both parts of a table one after the other (seen on a busy machine).
    """
    reading = [task for task in found if task.reads]
    assert max(Counter(task.stage for task in reading).values()) >= standalone.WORKERS, found
    assert any(
        one.executor != other.executor and one.began_ms < other.ended_ms and other.began_ms < one.ended_ms
        for one, other in product(reading, found)
    ), found
