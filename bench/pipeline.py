"""How fast the pipeline turns the log into tables, next to Spark's own writing of the same rows, and how late it is.

    backlog      two million changes of five tables are in the log: inserts alone, then a mix (65 % inserts, 30 %
                 updates, 5 % deletes, of rows anywhere in the tables). From the start of the stream in a Spark that has
                 started to the last cut; the first round is cold, all are reported. Limit: Spark reads the final rows
                 from Parquet and writes them to Parquet, in the same session
    freshness    a thousand changes a second in transactions of ten: from each commit to the cut that has it, as a
                 reader of the warehouse sees it
    growth       a batch of 100,000 changes into a table of a million rows and of ten million: appended, merged into
                 the newest rows, merged into rows anywhere

PostgreSQL runs without fsync here: it shares the disk and is not what is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from capture import wait_for
from report import Target, alone, finish, quantile, stolen_s, table
from walstream import logs
from walstream.config import Config, load
from walstream.demo.parts import Command
from walstream.node.process import NodeProcess
from walstream.positions import Lsn
from walstream.postgres.embedded import EmbeddedPostgres
from walstream.spark import session
from walstream.spark.columns import TableColumn
from walstream.spark.cut_tables import read_at
from walstream.spark.cuts import Cuts
from walstream.spark.runner import run
from walstream.spark.warehouse import cuts_path
from walstream.spark.writers import TablePlan, Writer, open_writer

TABLES = ("orders", "payments", "shipments", "invoices", "refunds")
ROWS_PER_TRANSACTION = 1_000
FRESHNESS_TRANSACTIONS_PER_S = 100
BATCH_ROWS = 100_000
TIMEOUT_S = 900.0

CREATE = """
create table {0} (id bigint primary key, customer_id int not null, status text not null, amount numeric(12,2),
    price float8, paid boolean, created_at timestamptz, due date, note text, tags text);
"""
INSERT = """
insert into {0} select n, n % 10000, 'status ' || n % 7, n * 0.25, n / 3.0, n % 2 = 0, now(), current_date,
    'a note that is a little longer, number ' || n, 'a,b,c' from generate_series({1}::bigint, {2}::bigint) n
"""
ANYWHERE = "id in (select (random() * {1})::bigint from generate_series(1, {2}))"
UPDATE = "update {0} set status = 'changed', amount = amount + 1, note = note || '.' where " + ANYWHERE
DELETE = "delete from {0} where " + ANYWHERE


class Report:
    """The figures and the lines of the table, side by side."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str, str]] = []

    def line(self, name: str, value: str, limit: str = "", ratio: float | None = None) -> None:
        self.rows.append((name, value, limit, "" if ratio is None else f"{ratio:.2f}"))
        print(f"  {name}: {value}" + (f"   ({limit})" if limit else ""), flush=True)


class Source:
    """A database of its own with five tables, and its capture into a node."""

    def __init__(self, folder: Path, server: EmbeddedPostgres, node: NodeProcess, name: str) -> None:
        self.folder = folder
        self.name = name
        self.warehouse = folder / name
        self._last = dict.fromkeys(TABLES, 0)
        with psycopg.connect(server.dsn, autocommit=True) as administrator:
            administrator.execute(f"create database {name}")
        self.session = psycopg.connect(server.dsn, dbname=name, autocommit=True)
        for each in TABLES:
            self.session.execute(CREATE.format(each))
        self.session.execute("create publication walstream for all tables")
        settings = {
            "source.postgres.port": server.port,
            "source.postgres.database": name,
            "source.postgres.slot_name": name,
            "capture.prefix": name,
            "capture.bootstrap": node.address,
            "capture.snapshot": "never",
            "pipeline.warehouse": str(self.warehouse),
        }
        self.file = folder / f"{name}.toml"
        self.file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        self.node = node

    def config(self, warehouse: Path) -> Config:
        return load(self.file, overrides={"pipeline.warehouse": str(warehouse)}).config

    @contextmanager
    def running(self, name: str, *arguments: str) -> Iterator[None]:
        """Run a command on the configuration."""
        command = Command(name, name, "run", "--config", str(self.file), *arguments, folder=self.folder)
        command.start()
        try:
            yield
            command.check()
        finally:
            command.stop()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Run a capture; what commits in the meantime is in its stream."""
        with self.running("capture"):
            asked = "select active from pg_replication_slots where slot_name = %s"
            _wait(lambda: self.session.execute(asked, [self.name]).fetchone() == (True,), "the replication slot")
            yield

    def transact(self, inserts: int, updates: int = 0, deletes: int = 0) -> None:
        """Commit one transaction over all tables; the numbers are of one table."""
        with self.session.transaction():
            for each in TABLES:
                last = self._last[each]
                self.session.execute(INSERT.format(each, last + 1, last + inserts))
                if last and updates:
                    self.session.execute(UPDATE.format(each, last, updates))
                if last and deletes:
                    self.session.execute(DELETE.format(each, last, deletes))
                self._last[each] = last + inserts

    def wait(self) -> None:
        """Wait until the log has everything."""
        found = self.session.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert found is not None
        wait_for(self.node.address, Lsn.parse(found[0]), self.name)

    def check(self, spark: SparkSession, warehouse: Path) -> int:
        """Compare the number of rows and what they add up to; return the number."""
        cut, rows = read_at(spark, warehouse=str(warehouse)), 0
        for each in TABLES:
            asked = "count(*)", "sum(id)", "sum(amount)", "sum(length(note))"
            there = cut.tables[f"public.{each}"].agg(*map(f.expr, asked)).collect()[0]
            due = self.session.execute(f"select {', '.join(asked)} from {each}").fetchone()
            assert due is not None
            if tuple(map(int, there)) != tuple(map(int, due)):
                raise AssertionError(f"{each}: the table has {tuple(there)}, PostgreSQL {due}")
            rows += int(due[0])
        return rows


def bench_backlog(report: Report, source: Source, spark: SparkSession, kind: str, rounds: int) -> None:
    """Write what is in the log into fresh warehouses, and what came of it once more with Spark alone."""
    changes = rows = 0
    seconds: list[float] = []
    for number in range(rounds):
        warehouse = source.folder / f"{kind}-{number}"
        started = time.perf_counter()
        run(source.config(warehouse), spark, lambda: False, once=True)
        seconds.append(time.perf_counter() - started)
        changes = sum(cut.rows for cut in Cuts(str(warehouse)).all())
        rows = source.check(spark, warehouse)
        print(f"  {kind}, round {number + 1}: {changes / seconds[-1]:,.0f} changes/s", flush=True)
    alone_s = _spark_alone(spark, source.folder / f"{kind}-0", source.folder / f"{kind}-spark")
    per_s = sorted(changes / each for each in seconds)[len(seconds) // 2]
    report.figures |= {
        f"{kind}_changes": changes,
        f"{kind}_rows": rows,
        f"{kind}_changes_per_s": per_s,
        f"{kind}_changes_per_s_rounds": [round(changes / each) for each in seconds],
        f"{kind}_spark_alone_rows_per_s": rows / alone_s,
        f"{kind}_of_spark_alone": per_s / (rows / alone_s),
    }
    report.line(
        f"{changes:,} changes of 5 tables, {kind}",
        f"{per_s:,.0f} changes/s",
        f"Spark writes the {rows:,} rows at {rows / alone_s:,.0f}/s",
        per_s / (rows / alone_s),
    )


def _spark_alone(spark: SparkSession, warehouse: Path, folder: Path) -> float:
    """Return the seconds of reading and writing the final rows."""
    cut = read_at(spark, warehouse=str(warehouse))
    frames = {name: cut.tables[name] for name in cut.tables}
    started = time.perf_counter()
    for name, frame in frames.items():
        frame.write.parquet(str(folder / name))
    return time.perf_counter() - started


class Seen:
    """Notes when a reader of the warehouse can see each cut."""

    def __init__(self, warehouse: Path) -> None:
        self._folder = Path(cuts_path(str(warehouse))) / "_delta_log"
        self.at_s: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            names = [path.stem for path in self._folder.glob("*.json")] if self._folder.exists() else []
            for name in names:
                if name.isdigit():
                    self.at_s.setdefault(int(name), time.time())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def bench_freshness(report: Report, source: Source, seconds: float) -> None:
    """Commit at a steady pace while the pipeline runs; say how long each transaction took into a cut."""
    committed: list[float] = []
    with source.captured(), source.running("pipeline"):
        source.transact(1_000)
        seen = Seen(source.warehouse)
        cuts = Cuts(str(source.warehouse))
        _wait(lambda: cuts.last() is not None, "the first cut")
        # The first batches of a Spark that has just started are not what a pipeline does all day.
        _pace(source, 10.0, [])
        _pace(source, seconds, committed)
        _wait(lambda: (last := cuts.last()) is not None and last.commit_time_us / 1e6 >= committed[-1], "the last cut")
        seen.close()
    # The table's first version is empty; each later one is one cut more.
    cut_times = [(cut.commit_time_us / 1e6, seen.at_s[version]) for version, cut in enumerate(cuts.all(), 1)]
    late = []
    for moment in committed:
        late.append(next(at for end, at in cut_times if end >= moment) - moment)
    held = [cut for cut in cut_times if cut[0] >= committed[0]]
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        report.figures[f"freshness_{label}_s"] = quantile(late, share)
    report.figures["freshness_cuts_per_s"] = len(held) / seconds
    report.line(
        "commit to table at 1,000 changes/s of 5 tables",
        f"p50 {quantile(late, 0.5):.2f} s, p99 {quantile(late, 0.99):.2f} s",
        f"{len(held)} cuts in {seconds:g} s",
    )


def _pace(source: Source, seconds: float, committed: list[float]) -> None:
    start = time.perf_counter()
    for number in range(int(seconds * FRESHNESS_TRANSACTIONS_PER_S)):
        time.sleep(max(0.0, start + number / FRESHNESS_TRANSACTIONS_PER_S - time.perf_counter()))
        # Two changes of each table: an insert, and an update of any row.
        with source.session.transaction():
            for each in TABLES:
                source._last[each] += 1
                last = source._last[each]
                source.session.execute(INSERT.format(each, last, last))
                source.session.execute(
                    f"update {each} set status = 'changed', amount = amount + 1 where id = %s",
                    [1 + number * 7919 % last],
                )
            # PostgreSQL's own clock, a moment before the commit.
            found = source.session.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
        assert found is not None
        committed.append(found[0])


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} does not come")
        time.sleep(0.1)


COLUMNS = (
    TableColumn("id", t.LongType(), 1),
    *(TableColumn(f"number_{number}", t.LongType(), 2 + number) for number in range(5)),
    *(TableColumn(f"text_{number}", t.StringType(), 7 + number) for number in range(4)),
)


class Growing:
    """A table that grows, written to by batches of changes that executors make up."""

    def __init__(self, spark: SparkSession, writer: Writer, path: Path, mode: str, rows: int) -> None:
        self._spark = spark
        self._writer = writer
        self._path = path
        self._mode: Any = mode
        self._lsn = 100
        self.rows = 0
        # In portions, as a table comes to be: each is of as many files as it needs.
        while self.rows < rows:
            self.write(lambda ids: ids.range(self.rows, self.rows + 1_000_000), "c")
            self.rows += 1_000_000

    def write(self, ids: Callable[[SparkSession], DataFrame], op: str) -> tuple[float, int]:
        """Write a batch; return its seconds and the files that it replaced."""
        self._lsn += 10
        changes = _changes(ids(self._spark.newSession()), op, self._lsn - 5)
        plan = TablePlan("bench", str(self._path), self._mode, ("id",), COLUMNS, 1, "bench", 1, self._lsn)
        started = time.perf_counter()
        applied = self._writer.apply(plan, changes)
        return time.perf_counter() - started, applied.files_removed


def _changes(ids: DataFrame, op: str, lsn: int) -> DataFrame:
    numbers = [(f.col("id") * (number + 3) + lsn).alias(f"number_{number}") for number in range(5)]
    texts = [
        f.concat(f.lit(f"text {number} of row "), f.col("id").cast("string")).alias(f"text_{number}")
        for number in range(4)
    ]
    return ids.select(
        "id",
        *numbers,
        *texts,
        f.lit(op).alias("_op"),
        f.lit(1).alias("_source_epoch"),
        f.lit(lsn).cast("long").alias("_commit_lsn"),
        (f.monotonically_increasing_id() + 1).alias("_seq"),
        f.current_timestamp().alias("_ts"),
        f.lit(7).cast("long").alias("_txid"),
        f.lit(None).cast("string").alias("_snapshot"),
        f.array().cast("array<string>").alias("_unchanged"),
    )


def bench_growth(report: Report, spark: SparkSession, folder: Path, sizes: list[int], repeats: int) -> None:
    """Write the same batches into a small and a large table."""
    writer = open_writer("deltalake", spark)
    for size in sizes:
        for mode in ("append", "mirror"):
            growing = Growing(spark, writer, folder / f"{mode}-{size}", mode, size)
            batches: dict[str, Callable[[SparkSession], DataFrame]] = {
                "newest": lambda ids, size=size: ids.range(size - BATCH_ROWS // 2, size + BATCH_ROWS // 2),
                "anywhere": lambda ids, size=size: ids.range(0, size, size // BATCH_ROWS),
            }
            for name, ids in batches.items() if mode == "mirror" else list(batches.items())[:1]:
                done = sorted(growing.write(ids, "u") for _ in range(repeats))
                seconds, files = done[len(done) // 2]
                key = f"{mode}_{name}" if mode == "mirror" else mode
                report.figures[f"growth_{key}_{size}_s"] = seconds
                report.figures[f"growth_{key}_{size}_files"] = files
                report.line(
                    f"{BATCH_ROWS:,} changes into {size:,} rows, {key}", f"{seconds:.2f} s", f"{files} files replaced"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the pipeline next to Spark's own writing.")
    parser.add_argument("--changes", type=int, default=2_000_000, help="changes of the backlog")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the backlog; medians are reported")
    parser.add_argument("--seconds", type=float, default=40, help="seconds at the pace")
    parser.add_argument("--sizes", type=int, nargs=2, default=[1_000_000, 10_000_000], help="rows of growing tables")
    parser.add_argument("--data-dir", type=Path, default=Path(), help="a folder on the disk to measure (default: here)")
    parser.add_argument("--only", choices=("inserts", "mix", "freshness", "growth"), help="a part of it, not recorded")
    arguments = parser.parse_args()
    logs.set_up("warning")
    report = Report()
    parts = (arguments.only,) if arguments.only else ("freshness", "inserts", "mix", "growth")
    started, stolen_before = time.perf_counter(), stolen_s()
    with alone(), tempfile.TemporaryDirectory(prefix="walstream-bench-", dir=arguments.data_dir) as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        server = EmbeddedPostgres(folder / "postgres", settings={"max_wal_size": "8GB"})
        server.start()
        try:
            with NodeProcess(folder / "node") as node:
                measure(report, arguments, folder, server, node, parts)
        finally:
            server.remove()
        print("\n" + table(("figure", "value", "limit", "ratio"), report.rows))
        if arguments.only:
            return
        found = report.figures
        found["machine_stolen_share"] = (stolen_s() - stolen_before) / (time.perf_counter() - started)
        finish("pipeline", found, targets(found, *arguments.sizes), folder=folder)


def measure(
    report: Report,
    arguments: argparse.Namespace,
    folder: Path,
    server: EmbeddedPostgres,
    node: NodeProcess,
    parts: tuple[str, ...],
) -> None:
    if "freshness" in parts:
        bench_freshness(report, Source(folder, server, node, "freshness"), arguments.seconds)
    count = arguments.changes // ROWS_PER_TRANSACTION
    one = ROWS_PER_TRANSACTION // len(TABLES)
    mixture = {"inserts": (one, 0, 0), "mix": (one * 65 // 100, one * 30 // 100, one * 5 // 100)}
    spark: SparkSession | None = None
    for kind, numbers in mixture.items():
        if kind not in parts:
            continue
        source = Source(folder, server, node, kind)
        with source.captured():
            for _ in range(count):
                source.transact(*numbers)
            source.wait()
        # One Spark of its own for each: both begin cold.
        if spark is not None:
            session.stop(spark)
        spark = session.start(source.config(source.warehouse).pipeline, kind)
        bench_backlog(report, source, spark, kind, arguments.rounds)
    if "growth" in parts:
        spark = spark or session.start(load().config.pipeline, "growth")
        bench_growth(report, spark, folder, arguments.sizes, 3)
    if spark is not None:
        session.stop(spark)


def targets(found: dict[str, Any], small: int, large: int) -> dict[str, Target]:
    growth = {
        f"growth_{key}_large_over_small": Target(
            found[f"growth_{key}_{large}_s"] / found[f"growth_{key}_{small}_s"], 1.5, at_least=False
        )
        for key in ("append", "mirror_newest")
    }
    return {
        "inserts_changes_per_s": Target(found["inserts_changes_per_s"], 100_000),
        "mix_changes_per_s": Target(found["mix_changes_per_s"], 40_000),
        **growth,
    }


if __name__ == "__main__":
    main()
