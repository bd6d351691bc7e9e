"""How fast capture is, next to PostgreSQL's own receiver on the same server, and how late at a steady pace.

    backlog    a million ten-column rows wait behind a slot of each: (a) `pg_recvlogical` to /dev/null, the most that
               the server can send, (b) walstream streaming into a fresh node with fsync, (c) polling, and on a
               server that has it (d) polling of `test_decoding`. Rows a second from the first to the last durable row,
               as the commit points have it; for pg_recvlogical from its start to its end
    one        the same rows as one transaction: the memory of capture, which must not grow with it
    pace       1,000 single-row transactions a second, from when each was due to when a consumer has its row, which it
               gets only when it is durable; limit: a bare append + fdatasync at the same pace
    seed       10,000 inserts, one a transaction, as fast as one session commits them: latency, processor and memory per
               event, streaming beside polling

PostgreSQL runs without fsync here: it shares the disk and is not what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Consumer, TopicPartition

import walstream
from bare import one_record_batch
from pace import RATE_PER_S, Moment, PacedSync, Samples, on_schedule
from processes import memory_of, processor_seconds
from report import Target, alone, finish, quantile, stolen_s, table
from walstream.capture.reading import LogReader
from walstream.errors import UsageError, WalstreamError
from walstream.node.process import NodeProcess
from walstream.positions import Lsn
from walstream.postgres.embedded import EmbeddedPostgres, binaries

ROWS_PER_TRANSACTION = 1_000
TIMEOUT_S = 600.0

TABLE = """
create table orders (id bigint primary key, customer_id int not null, status text not null, amount numeric(12,2),
    price float8, paid boolean, created_at timestamptz, due date, note text, tags text);
create publication walstream for table orders;
"""
INSERT = """
insert into orders select n, n % 10000, 'status ' || n % 7, n * 0.25, n / 3.0, n % 2 = 0, now(), current_date,
    'a note that is a little longer, number ' || n, 'a,b,c' from generate_series({0}::bigint, {1}::bigint) n
"""


@dataclass(frozen=True)
class Run:
    """What an engine has done with the backlog."""

    rows_per_s: float
    seconds_in_all: float
    processor_us_per_row: float
    memory_mb: float
    node_processor_us_per_row: float


class Bench:
    """One server with one table, and everything that reads it."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version
        self.server = EmbeddedPostgres(
            folder / f"postgres-{version}", version=version, settings={"max_wal_size": "8GB"}
        )
        self.rows = 0

    def __enter__(self) -> Bench:
        self.server.start()
        self.session = psycopg.connect(self.server.dsn, autocommit=True)
        self.session.execute(TABLE)
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.server.remove()

    def slot(self, name: str, plugin: str = "pgoutput") -> None:
        self.session.execute("select pg_create_logical_replication_slot(%s, %s)", [name, plugin])

    def drop(self, *names: str) -> None:
        for name in names:
            self.session.execute("select pg_drop_replication_slot(%s)", [name])

    def load(self, rows: int, per_transaction: int) -> Lsn:
        for first in range(self.rows, self.rows + rows, per_transaction):
            self.session.execute(INSERT.format(first, first + per_transaction - 1))
        self.rows += rows
        return Lsn.parse(self.session.execute("select pg_current_wal_flush_lsn()::text").fetchone()[0])

    def receive(self, slot: str, end: Lsn) -> float:
        """Run pg_recvlogical up to there; return its seconds."""
        command = [str(binaries(self.version) / "pg_recvlogical"), "--host=127.0.0.1", f"--port={self.server.port}"]
        command += ["--username=postgres", "--dbname=postgres", f"--slot={slot}", "--start", "--file=/dev/null"]
        command += [f"--endpos={end}", "--option=proto_version=1", "--option=publication_names=walstream"]
        started = time.perf_counter()
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        return time.perf_counter() - started

    @contextlib.contextmanager
    def capture(self, node: NodeProcess, slot: str, engine: str) -> Iterator[int]:
        """Run a capture in a process of its own and yield its id."""
        settings = {
            "source.postgres.engine": engine,
            "source.postgres.port": self.server.port,
            "source.postgres.slot_name": slot,
            "capture.bootstrap": node.address,
            "capture.snapshot": "never",
        }
        file = self.folder / f"{slot}.toml"
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        root = str(Path(walstream.__file__).parent.parent)
        with file.with_suffix(".log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "walstream.cli.main", "capture", "run", "--config", str(file)],
                env={**os.environ, "PYTHONPATH": root},
                stdout=output,
                stderr=output,
            )
        try:
            yield process.pid
            if process.poll() is not None:
                raise AssertionError(f"capture has ended: {file.with_suffix('.log').read_text()[-2000:]}")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)

    def drain(self, slot: str, engine: str, end: Lsn, rows: int) -> Run:
        """Capture the backlog into a fresh node."""
        with NodeProcess(self.folder / f"node-{self.version}-{slot}") as node:
            node_before = processor_seconds(node.pid)
            started = time.perf_counter()
            with self.capture(node, slot, engine) as pid:
                wait_for(node.address, end)
                elapsed = time.perf_counter() - started
                cost_s, memory = processor_seconds(pid), memory_of(pid)["VmHWM"]
            node_cost_s = processor_seconds(node.pid) - node_before
            first, last, counted = durable_between(node.address)
        if counted[1] != rows:
            raise AssertionError(f"{counted[1]:,} rows are in the log, {rows:,} were written")
        seconds = (last - first) / 1000
        return Run(
            rows_per_s=(counted[1] - counted[0]) / seconds if seconds else rows / elapsed,
            seconds_in_all=elapsed,
            processor_us_per_row=cost_s / rows * 1e6,
            memory_mb=memory,
            node_processor_us_per_row=node_cost_s / rows * 1e6,
        )


def wait_for(bootstrap: str, end: Lsn, prefix: str = "walstream") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(WalstreamError), LogReader(bootstrap, prefix) as log:
            point = log.last_point()
            if point is not None and point.end_lsn >= end:
                return
        time.sleep(0.2)
    raise TimeoutError(f"the log does not reach {end}")


def durable_between(bootstrap: str) -> tuple[int, int, tuple[int, int]]:
    """Return when the first and the last point with rows were written, in ms, and the rows up to each."""
    with LogReader(bootstrap, "walstream") as log:
        points = [point for point in log.points() if point.rows]
    written: dict[int, int] = {}
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False})
    consumer.assign([TopicPartition("walstream.commits", 0, points[0].offset)])
    while points[-1].offset not in written:
        for message in consumer.consume(10_000, timeout=0.1):
            written[message.offset()] = message.timestamp()[1]
    consumer.close()
    first, last = points[0], points[-1]
    return written[first.offset], written[last.offset], (first.rows_total, last.rows_total)


class Arrivals:
    """A consumer in a thread that notes when each row is there to be read."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.at: dict[int, float] = {}
        self._stop = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "bench",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 500,
                "fetch.queue.backoff.ms": 1,
                "topic.metadata.refresh.interval.ms": 1_000,
                "allow.auto.create.topics": False,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        decode = json.loads
        while not self._stop.is_set():
            message = self._consumer.poll(0.05)
            if message is None or message.error() is not None:
                continue
            self.at[decode(message.key())["id"]] = time.perf_counter()

    def wait(self, number: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while number not in self.at:
            if time.monotonic() > deadline:
                raise TimeoutError(f"row {number:,} does not arrive")
            time.sleep(0.01)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()


def paced(bench: Bench, slot: str, engine: str, seconds: float, sync: PacedSync | None) -> tuple[Samples, list[float]]:
    """Commit at the pace, in turns with the bare sync, a second each; return due-to-readable in ms and lateness."""
    bench.slot(slot)
    samples, lateness = Samples(), []
    with NodeProcess(bench.folder / f"node-{slot}") as node, bench.capture(node, slot, engine):
        bench.load(1, 1)
        arrivals = Arrivals(node.address, "walstream.public.orders")
        arrivals.wait(bench.rows - 1)
        moments: dict[int, Moment] = {}
        statement = "insert into orders (id, customer_id, status) values (%s, 1, 'new')"

        def commit(moment: Moment) -> None:
            moments[bench.rows] = moment
            bench.session.execute(statement, [bench.rows])
            bench.rows += 1

        on_schedule(0.5, commit)
        moments.clear()
        for _ in range(round(seconds)):
            on_schedule(1.0, commit)
            if sync is not None:
                arrivals.wait(bench.rows - 1)
                sync.run(1.0)
        arrivals.wait(bench.rows - 1)
        arrivals.close()
        for number, moment in moments.items():
            samples.due_ms.append((arrivals.at[number] - moment.due) * 1000)
            samples.begun_ms.append((arrivals.at[number] - moment.begun) * 1000)
            lateness.append((moment.begun - moment.due) * 1000)
    bench.drop(slot)
    return samples, lateness


def seed(bench: Bench, slot: str, engine: str, plugin: str, count: int) -> dict[str, float]:
    """The seed's run: so many inserts, a transaction each, back to back."""
    bench.slot(slot, plugin)
    with NodeProcess(bench.folder / f"node-{slot}") as node, bench.capture(node, slot, engine) as pid:
        bench.load(1, 1)
        arrivals = Arrivals(node.address, "walstream.public.orders")
        arrivals.wait(bench.rows - 1)
        before_s, before_mb = processor_seconds(pid), memory_of(pid)["VmRSS"]
        begun: dict[int, float] = {}
        for _ in range(count):
            begun[bench.rows] = time.perf_counter()
            bench.session.execute("insert into orders (id, customer_id, status) values (%s, 1, 'new')", [bench.rows])
            bench.rows += 1
        arrivals.wait(bench.rows - 1)
        latencies = [(arrivals.at[number] - moment) * 1000 for number, moment in begun.items()]
        cost_s, grown_mb = processor_seconds(pid) - before_s, memory_of(pid)["VmRSS"] - before_mb
        arrivals.close()
    bench.drop(slot)
    return {
        "latency_p50_ms": quantile(latencies, 0.5),
        "latency_p99_ms": quantile(latencies, 0.99),
        "processor_us_per_event": cost_s / count * 1e6,
        "memory_bytes_per_event": grown_mb * 1e6 / count,
    }


class Report:
    """The figures and the lines of the table, side by side."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str, str]] = []

    def line(self, name: str, value: str, limit: str = "", ratio: float | None = None) -> None:
        self.rows.append((name, value, limit, "" if ratio is None else f"{ratio:.2f}"))
        beside = f"   ({limit})" if limit else ""
        print(f"  {name}: {value}{beside}" + ("" if ratio is None else f" → {ratio:.2f}"), flush=True)


def bench_backlog(report: Report, bench: Bench, rows: int, rounds: int, engines: dict[str, tuple[str, str]]) -> None:
    """Drain the same backlog with everybody, each round behind slots of its own."""
    names = [f"{name}_{number}" for number in range(rounds) for name in ("recv", *engines)]
    for name in names:
        bench.slot(name, engines.get(name.rpartition("_")[0], ("", "pgoutput"))[1])
    end = bench.load(rows, ROWS_PER_TRANSACTION)
    bench.session.execute("checkpoint")
    limits: list[float] = []
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for number in range(rounds):
        limits.append(rows / bench.receive(f"recv_{number}", end))
        for name, (engine, _) in engines.items():
            runs[name].append(bench.drain(f"{name}_{number}", engine, end, rows))
    bench.drop(*names)
    limit = sorted(limits)[len(limits) // 2]
    of = f"postgres{bench.version}"
    report.figures[f"{of}_pg_recvlogical_rows_per_s"] = limit
    for name, done in runs.items():
        run = sorted(done, key=lambda one: one.rows_per_s)[len(done) // 2]
        report.figures |= {
            f"{of}_{name}_rows_per_s": run.rows_per_s,
            f"{of}_{name}_of_pg_recvlogical": run.rows_per_s / limit,
            f"{of}_{name}_rows_per_s_with_start": rows / run.seconds_in_all,
            f"{of}_{name}_processor_us_per_row": run.processor_us_per_row,
            f"{of}_{name}_node_processor_us_per_row": run.node_processor_us_per_row,
            f"{of}_{name}_memory_mb": max(one.memory_mb for one in done),
        }
        report.line(
            f"PostgreSQL {bench.version}, {rows:,} rows, {name}",
            f"{run.rows_per_s:,.0f} rows/s, {run.processor_us_per_row:.1f} µs of processor a row",
            f"pg_recvlogical {limit:,.0f}/s",
            run.rows_per_s / limit,
        )


def bench_one(report: Report, bench: Bench, rows: int) -> None:
    """Capture one large transaction."""
    bench.slot("one")
    end = bench.load(rows, rows)
    run = bench.drain("one", "streaming", end, rows)
    bench.drop("one")
    report.figures["one_transaction_memory_mb"] = run.memory_mb
    report.figures["one_transaction_seconds"] = run.seconds_in_all
    report.line(f"one transaction of {rows:,} rows, memory of capture", f"{run.memory_mb:,.0f} MB")


def bench_pace(report: Report, bench: Bench, seconds: float) -> None:
    """Measure commit to durable at the pace, streaming and polling."""
    sync = PacedSync(bench.folder, one_record_batch(os.urandom(300)))
    sync.run(0.5)
    sync.samples.clear()
    streaming, lateness = paced(bench, "paced_streaming", "streaming", seconds, sync)
    polling, _ = paced(bench, "paced_polling", "polling", min(seconds, 5), None)
    sync.close()
    for name, samples in (("streaming", streaming), ("polling", polling), ("fdatasync", sync.samples)):
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            report.figures[f"paced_{name}_{label}_ms"] = quantile(samples.due_ms, share)
            report.figures[f"paced_{name}_{label}_ms_from_begin"] = quantile(samples.begun_ms, share)
    report.figures["paced_commit_late_p99_ms"] = quantile(lateness, 0.99)
    for label in ("p50", "p99"):
        value, bare = report.figures[f"paced_streaming_{label}_ms"], report.figures[f"paced_fdatasync_{label}_ms"]
        report.line(f"commit to durable at {RATE_PER_S:,}/s, {label}", f"{value:.2f} ms", f"fdatasync {bare:.2f} ms")
        value = report.figures[f"paced_polling_{label}_ms"]
        report.line(f"the same by polling, {label}", f"{value:,.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure capture next to PostgreSQL's own receiver.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the backlog")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the backlog; medians are reported")
    parser.add_argument("--seconds", type=float, default=10, help="seconds at the pace")
    parser.add_argument("--data-dir", type=Path, default=Path(), help="a folder on the disk to measure (default: here)")
    arguments = parser.parse_args()
    report = Report()
    gc.freeze()
    started, stolen_before = time.perf_counter(), stolen_s()
    with alone(), tempfile.TemporaryDirectory(prefix="walstream-bench-", dir=arguments.data_dir) as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        engines = {"streaming": ("streaming", "pgoutput"), "polling": ("polling", "pgoutput")}
        with Bench(folder, 18) as bench:
            bench_pace(report, bench, arguments.seconds)
            for engine in engines:
                figures = seed(bench, f"seed_{engine}", engine, "pgoutput", 10_000)
                report.figures |= {f"seed_{engine}_{key}": value for key, value in figures.items()}
                report.line(
                    f"10,000 inserts, {engine}",
                    f"p50 {figures['latency_p50_ms']:.1f} ms, p99 {figures['latency_p99_ms']:.1f} ms, "
                    f"{figures['processor_us_per_event']:.0f} µs, {figures['memory_bytes_per_event']:.0f} B an event",
                )
            bench_backlog(report, bench, arguments.rows, arguments.rounds, engines)
            bench_one(report, bench, arguments.rows)
        try:
            binaries(15)
        except UsageError as error:
            print(f"  test_decoding is not measured: {error}")
        else:
            with Bench(folder, 15) as bench:
                engines["test_decoding"] = ("polling", "test_decoding")
                bench_backlog(report, bench, arguments.rows // 4, 1, engines)
                figures = seed(bench, "seed_text", "polling", "test_decoding", 10_000)
                report.figures |= {f"seed_test_decoding_{key}": value for key, value in figures.items()}
        found = report.figures
        found["machine_stolen_share"] = (stolen_s() - stolen_before) / (time.perf_counter() - started)
        targets = {
            "streaming_of_pg_recvlogical": Target(found["postgres18_streaming_of_pg_recvlogical"], 0.8),
            "streaming_of_pg_recvlogical_floor": Target(found["postgres18_streaming_of_pg_recvlogical"], 0.6),
            "memory_mb": Target(found["postgres18_streaming_memory_mb"], 150, at_least=False),
            "memory_mb_one_transaction": Target(found["one_transaction_memory_mb"], 150, at_least=False),
            "commit_to_durable_p99_ms_above_fdatasync": Target(
                found["paced_streaming_p99_ms"] - found["paced_fdatasync_p99_ms"], 10, at_least=False
            ),
            "streaming_over_polling_latency": Target(
                found["paced_polling_p99_ms"] / found["paced_streaming_p99_ms"], 5
            ),
        }
        print("\n" + table(("figure", "value", "limit", "ratio"), report.rows))
        finish("capture", found, targets, folder=folder)


if __name__ == "__main__":
    main()
