"""How fast the log is, next to what the same machine could do at best.

Runs against any Kafka-protocol server (`--bootstrap HOST:PORT`), or, without one, against a fresh walstream node on
the disk of `--data-dir`. Every figure stands next to its limit, measured in the same run and in turns with it, because
a shared machine is never twice the same:

    produce    one confluent-kafka producer, acks=1; limits: the same client against a sink that reads and discards,
               and a bare writev + fdatasync of the same batches
    fetch      what was written, from the page cache, by a bare protocol client; limit: the same client against a sink
               that answers from memory. The confluent consumer stands beside it: there Python is the limit
    latency    1,000 records a second on schedule, from the moment each was due; limit: a bare append + fdatasync at the
               same pace, from when it was due as well, and what is due meanwhile goes with the next one. A machine
               that stands still for 10 ms makes ten records late; a loop that times its own calls would count one
    memory     the most the node ever had resident, when its process is known (`--pid`, or the fresh node)
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from bare import Connection, address_of, one_record_batch
from pace import RATE_PER_S, Moment, PacedSync, Samples, lateness_ms, on_schedule
from processes import memory_of, processor_seconds
from producing import CHUNK, produce
from report import Target, alone, finish, quantile, stolen_s, table

SIZES = {"100b": (100, 3_000_000), "1kb": (1000, 600_000)}
"""Name of each record size, its bytes, and how many records one round sends."""
FLUSH_BYTES = 8 * 1024 * 1024
FETCH_BYTES = 8 * 1024 * 1024
LATENCY_VALUE_BYTES = 100
MB = 1_000_000

SINK = Path(__file__).with_name("sink.py")
numbers = itertools.count(1)
run_id = f"{os.getpid():x}{int(time.time()):x}"


@dataclass
class Sink:
    """The discarding server while it runs, and the sizes of the batches it got once it has ended."""

    bootstrap: str
    batch_bytes: list[int] = field(default_factory=list)


@contextlib.contextmanager
def sink() -> Iterator[Sink]:
    """Run the sink in a process of its own."""
    with subprocess.Popen(
        [sys.executable, str(SINK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None, "a pipe was asked for"
        assert process.stdout is not None, "a pipe was asked for"
        running = Sink(f"127.0.0.1:{json.loads(process.stdout.readline())['port']}")
        yield running
        process.stdin.close()
        running.batch_bytes = json.loads(process.stdout.readline())["sizes"]


def write_and_sync(folder: Path, batch_bytes: list[int]) -> float:
    """Append batches of these sizes to a new file, a sync for each few megabytes, and return bytes per second.

    The file stays until the end of the run: on many disks blocks that were just freed are written several times faster
    than fresh ones, and whoever came next, the node or this, would get them.
    """
    filler = os.urandom(max(batch_bytes))
    descriptor = os.open(folder / f"limit-{next(numbers)}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    views = [memoryview(filler)[:size] for size in batch_bytes]
    started = time.perf_counter()
    flush: list[memoryview] = []
    pending = 0
    for number, view in enumerate(views):
        flush.append(view)
        pending += len(view)
        if pending >= FLUSH_BYTES or number == len(views) - 1 or len(flush) == 1000:
            written = os.writev(descriptor, flush)
            if written != pending:
                raise OSError("the disk took a part of a write: it is full, or nearly")
            os.fdatasync(descriptor)
            flush, pending = [], 0
    elapsed = time.perf_counter() - started
    os.close(descriptor)
    return sum(batch_bytes) / elapsed


def fetch_bare(bootstrap: str, topic: str, size_bytes: int | None = None) -> float:
    """Read a partition from its start with the bare client and return bytes per second."""
    with Connection(address_of(bootstrap)) as first:
        leader = first.leader(topic)
        end = first.end_offset(topic) if size_bytes is None else sys.maxsize
    offset = total = 0
    with Connection(leader) as connection:
        started = time.perf_counter()
        while offset < end and (size_bytes is None or total < size_bytes):
            fetched = connection.fetch(topic, offset, FETCH_BYTES)
            offset, total = fetched.next_offset, total + fetched.size_bytes
        return total / (time.perf_counter() - started)


def fetch_confluent(bootstrap: str, topic: str) -> tuple[float, int]:
    """Read a partition from its start with the stock consumer; return bytes of values per second and the records."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.message.max.bytes": FETCH_BYTES,
            "queued.max.messages.kbytes": 64 * 1024,
            # Small records fill the queue by their number, and librdkafka then pauses fetching for a whole second.
            "queued.min.messages": 2_000_000,
            "fetch.queue.backoff.ms": 5,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    records = size_bytes = 0
    started = time.perf_counter()
    ended = False
    while not ended:
        for message in consumer.consume(CHUNK, timeout=0.02):
            error = message.error()
            if error is None:
                records += 1
                size_bytes += len(message.value() or b"")
            elif error.code() == KafkaError._PARTITION_EOF:
                ended = True
    elapsed = time.perf_counter() - started
    consumer.close()
    return size_bytes / elapsed, records


class PacedClient:
    """The stock producer, asked to send one record at a time, each as soon as it is given."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.samples = Samples()
        self.failures = 0
        self.producer = Producer(
            {"bootstrap.servers": bootstrap, "acks": 1, "linger.ms": 0, "socket.nagle.disable": True}
        )
        self.producer.list_topics(topic)
        self.value = os.urandom(LATENCY_VALUE_BYTES)

    def run(self, seconds: float) -> None:
        ended = threading.Event()

        def poll() -> None:
            while not ended.is_set():
                self.producer.poll(0.05)

        poller = threading.Thread(target=poll)
        poller.start()
        on_schedule(seconds, self._send)
        self.producer.flush(30)
        ended.set()
        poller.join()

    def _send(self, moment: Moment) -> None:
        self.producer.produce(self.topic, self.value, partition=0, on_delivery=partial(self._delivered, moment))

    def _delivered(self, moment: Moment, error: KafkaError | None, _message: Any) -> None:
        self.samples.end(moment)
        self.failures += error is not None


class PacedBare:
    """The bare client: one batch of one record in each request, answers read by a second thread."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.samples = Samples()
        with Connection(address_of(bootstrap)) as first:
            self.connection = Connection(first.leader(topic))
        self.batch = one_record_batch(os.urandom(LATENCY_VALUE_BYTES))

    def run(self, seconds: float) -> None:
        moments: list[Moment] = []

        def read() -> None:
            for number in range(int(seconds * RATE_PER_S)):
                self.connection.receive_acknowledgement()
                self.samples.end(moments[number])

        def send(moment: Moment) -> None:
            moments.append(moment)
            self.connection.send_batch(self.topic, self.batch)

        reader = threading.Thread(target=read)
        reader.start()
        on_schedule(seconds, send)
        reader.join()


class Report:
    """The figures and the lines of the table, side by side."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str, str]] = []

    def line(self, name: str, value: str, limit: str = "", ratio: float | None = None) -> None:
        self.rows.append((name, value, limit, "" if ratio is None else f"{ratio:.2f}"))
        beside = f"   ({limit})" if limit else ""
        print(f"  {name}: {value}{beside}" + ("" if ratio is None else f" → {ratio:.2f}"), flush=True)


def create_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(topic, 1, 1)]).values():
        future.result(timeout=60)


def bench_produce(report: Report, bootstrap: str, folder: Path, rounds: int, scale: float) -> dict[str, str]:
    """Measure producing in turns with its two limits; return the last topic of each size."""
    topics = {}
    for name, (size, whole_count) in SIZES.items():
        count = max(CHUNK, int(whole_count * scale))
        value = os.urandom(size)
        rates, client_rates, disk_rates = [], [], []
        for number in range(rounds):
            with sink() as running:
                client_rates.append(produce(running.bootstrap, "sink", value, count))
            stored_bytes = sum(running.batch_bytes)
            # Disks have good and bad moments, and some have a budget for bursts: each goes first in its turn.
            if number % 2:
                disk_rates.append(write_and_sync(folder, running.batch_bytes) / stored_bytes * count)
            topics[name] = topic = f"bench-{run_id}-{name}-{next(numbers)}"
            create_topic(bootstrap, topic)
            rates.append(produce(bootstrap, topic, value, count))
            with Connection(address_of(bootstrap)) as first, Connection(first.leader(topic)) as connection:
                end = connection.end_offset(topic)
                if end != count:
                    raise AssertionError(f"{count} records were acknowledged and {end} are in the log")
            if not number % 2:
                disk_rates.append(write_and_sync(folder, running.batch_bytes) / stored_bytes * count)
        rate, client, disk = (statistics.median(each) for each in (rates, client_rates, disk_rates))
        report.figures |= {
            f"produce_{name}_records_per_s": rate,
            f"produce_{name}_mb_per_s": rate * size / MB,
            f"client_alone_{name}_records_per_s": client,
            f"disk_alone_{name}_records_per_s": disk,
            f"produce_{name}_of_client_alone": rate / client,
            f"produce_{name}_of_disk_alone": rate / disk,
            f"produce_{name}_batch_bytes_mean": stored_bytes / len(running.batch_bytes),
        }
        shown = f"{rate:,.0f} records/s, {rate * size / MB:,.0f} MB/s"
        report.line(f"produce {size} B, acks=1", shown, f"client alone {client:,.0f}/s", rate / client)
        report.line(f"produce {size} B, acks=1", shown, f"writev+fdatasync {disk:,.0f}/s", rate / disk)
    return topics


def bench_fetch(report: Report, bootstrap: str, topics: dict[str, str], rounds: int, pid: int | None) -> None:
    """Measure reading back, and who was busy meanwhile."""
    for name, topic in topics.items():
        fetch_bare(bootstrap, topic)
        rates, limits = [], []
        node_busy = client_busy = elapsed = 0.0
        for _ in range(rounds):
            node_before = processor_seconds(pid) if pid else 0.0
            client_before, started = time.process_time(), time.perf_counter()
            rates.append(fetch_bare(bootstrap, topic) / MB)
            elapsed += time.perf_counter() - started
            client_busy += time.process_time() - client_before
            node_busy += processor_seconds(pid) - node_before if pid else 0.0
            with sink() as running:
                limits.append(fetch_bare(running.bootstrap, "sink", 500 * MB) / MB)
        stock, records = fetch_confluent(bootstrap, topic)
        rate, limit = statistics.median(rates), statistics.median(limits)
        report.figures |= {
            f"fetch_{name}_mb_per_s": rate,
            f"fetch_{name}_client_alone_mb_per_s": limit,
            f"fetch_{name}_client_busy": client_busy / elapsed,
            f"fetch_{name}_confluent_mb_per_s": stock / MB,
            f"fetch_{name}_confluent_records_per_s": stock / SIZES[name][0],
            f"fetch_{name}_records": records,
        }
        busy = f"client busy {client_busy / elapsed:.0%}"
        if pid:
            report.figures[f"fetch_{name}_node_busy"] = node_busy / elapsed
            busy += f", node busy {node_busy / elapsed:.0%}"
        size = SIZES[name][0]
        report.line(
            f"fetch {size} B, bare client ({busy})", f"{rate:,.0f} MB/s", f"sink {limit:,.0f} MB/s", rate / limit
        )
        report.line(f"fetch {size} B, confluent consumer", f"{stock / MB:,.0f} MB/s, {stock / size:,.0f} records/s")


def bench_latency(report: Report, bootstrap: str, folder: Path, slices: int) -> None:
    """Measure acknowledgements at a steady pace in turns with the bare sync, a second each."""
    topic = f"bench-{run_id}-latency"
    create_topic(bootstrap, topic)
    client, bare = PacedClient(bootstrap, topic), PacedBare(bootstrap, topic)
    sync = PacedSync(folder, bare.batch)
    turns = {"ack": client, "ack_bare": bare, "fdatasync": sync}
    for paced in turns.values():
        paced.run(0.5)
        paced.samples.clear()
    lateness_ms.clear()
    seconds_p99_ms: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(slices):
        for name, paced in turns.items():
            before = len(paced.samples.due_ms)
            paced.run(1.0)
            seconds_p99_ms[name].append(quantile(paced.samples.due_ms[before:], 0.99))
    sync.close()
    bare.connection.close()
    if client.failures:
        raise AssertionError(f"{client.failures} records were refused")
    figures = {"schedule_late_p99_ms": quantile(lateness_ms, 0.99)}
    for name, paced in turns.items():
        for label, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            figures[f"{name}_{label}_ms"] = quantile(paced.samples.due_ms, share)
        figures[f"{name}_p99_ms_from_begin"] = quantile(paced.samples.begun_ms, 0.99)
        figures[f"{name}_p99_ms_typical_second"] = statistics.median(seconds_p99_ms[name])
    report.figures |= figures
    for name, title in (("ack", "confluent producer"), ("ack_bare", "bare client")):
        for label, shown in (
            ("p50_ms", "p50"),
            ("p99_ms", "p99"),
            ("p99_ms_typical_second", "p99 of the typical second"),
            ("p99_ms_from_begin", "p99 from when each began, not from when it was due"),
            ("p999_ms", "p99.9"),
        ):
            value, limit = figures[f"{name}_{label}"], figures[f"fdatasync_{label}"]
            report.line(
                f"acknowledged at {RATE_PER_S:,}/s, {title}, {shown}",
                f"{value:.2f} ms",
                f"fdatasync {limit:.2f} ms",
                value / limit,
            )


def measure(bootstrap: str, pid: int | None, folder: Path, arguments: argparse.Namespace) -> None:
    report = Report()
    gc.freeze()
    figures = report.figures

    def note_memory(stage: str) -> None:
        if pid:
            memory = memory_of(pid)
            figures[f"node_memory_mb_max_{stage}"] = memory["VmHWM"]
            report.line(
                f"node memory, the most resident up to the end of {stage}",
                f"{memory['VmHWM']:,.0f} MB",
                f"now {memory['VmRSS']:,.0f}, of it not file cache {memory['RssAnon']:,.0f} MB",
            )

    started, stolen_before = time.perf_counter(), stolen_s()
    note_memory("start")
    bench_latency(report, bootstrap, folder, arguments.latency_seconds)
    note_memory("latency")
    topics = bench_produce(report, bootstrap, folder, arguments.rounds, arguments.scale)
    note_memory("produce")
    bench_fetch(report, bootstrap, topics, arguments.rounds, pid)
    note_memory("fetch")
    figures["machine_stolen_share"] = (stolen_s() - stolen_before) / (time.perf_counter() - started)
    targets = {
        "produce_100b_of_client_alone": Target(figures["produce_100b_of_client_alone"], 0.7),
        "produce_1kb_of_client_alone": Target(figures["produce_1kb_of_client_alone"], 0.7),
        "fetch_mb_per_s": Target(figures["fetch_1kb_mb_per_s"], 300),
        "ack_p99_over_fdatasync_p99": Target(figures["ack_p99_ms"] / figures["fdatasync_p99_ms"], 3, at_least=False),
    }
    if pid:
        targets["node_memory_mb"] = Target(figures["node_memory_mb_max_fetch"], 150, at_least=False)
    print("\n" + table(("figure", "value", "limit", "ratio"), report.rows))
    finish("log", figures, targets, folder=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a Kafka-protocol log against the limits of the machine.")
    parser.add_argument("--bootstrap", help="HOST:PORT of a running server (default: start a fresh walstream node)")
    parser.add_argument("--pid", type=int, help="process of the server, if it is on this machine: its memory and time")
    parser.add_argument("--data-dir", type=Path, default=Path(), help="a folder on the disk to measure (default: here)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each throughput figure; medians are reported")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of records")
    parser.add_argument("--latency-seconds", type=int, default=15, help="seconds at 1,000 records/s for each client")
    arguments = parser.parse_args()
    with alone(), tempfile.TemporaryDirectory(prefix="walstream-bench-", dir=arguments.data_dir) as name:
        folder = Path(name).resolve()
        if arguments.bootstrap:
            measure(arguments.bootstrap, arguments.pid, folder, arguments)
            return
        from walstream.node.process import NodeProcess  # Only the fresh node needs walstream to be installed.

        with NodeProcess(folder / "data") as node:
            measure(node.address, node.pid, folder, arguments)


if __name__ == "__main__":
    main()
