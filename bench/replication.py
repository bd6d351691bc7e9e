"""What replication costs: three nodes on one machine next to a single one, in turns, in the same run.

    throughput   one confluent-kafka producer, acks 0, 1 and all, records of 100 B, 256 B and 1 KB; with acks=0 until
                 the last record is visible
    low rate     a bare client, one batch of one record at a steady pace, from when each was due to its answer; beside
                 it what a bare write + fdatasync takes when three processes do it at once, which is what this
                 machine's one disk costs a cluster, whatever its nodes do
    processor    what the leader's process spends on a produce request more than a single node does
    lag          how far the followers are behind at half of what the cluster as a whole keeps up with (acks=all, for
                 as long), and at half of what its leader takes in a burst (acks=1)
    catch-up     a follower that was away while data came in: from its first new byte to its last, next to a bare
                 write + fdatasync of as many bytes
    memory       the leader's own, at its most: while a follower falls further and further behind, next to the same load
                 with that follower there

All nodes share one disk and two or more cores with the client, so a cluster does three times the work of a single node
on the same machine. Beside the figures stand those that the designs of which walstream is made promised for machines
of their own: 100,000, 50,000 and 20,000 records a second for acks 0, 1 and all, 1 to 5 ms and 10 to 50 ms, a lag below
100 ms at half capacity, and less than 5 µs added to a produce request.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from bare import Connection, address_of, one_record_batch
from cluster import Nodes, running, wait
from pace import Moment, Samples, on_schedule
from processes import memory_of, processor_seconds
from producing import CHUNK, produce
from report import Target, alone, finish, quantile, stolen_s, table
from shared_disk import measure_shared_disk
from walstream.node.process import NodeProcess

SIZES = {"100b": (100, 500_000), "256b": (256, 300_000), "1kb": (1000, 100_000)}
"""Name of each record size, its bytes, and how many records one round sends."""
ACKS: dict[str, int | str] = {"0": 0, "1": 1, "all": "all"}
PROMISED = {"0": 100_000, "1": 50_000, "all": 20_000}
LOW_RATE_PER_S = 200
LIMITS = {"1": "sync_of_three_of_alone", "all": "sync_slowest_of_three_of_alone"}
"""What a sync takes among three, relative to alone: of the leader, while followers sync too, and until all have."""
REQUESTS = 7_000
WINDOW = 200
PROCESSOR_ROUNDS = 9
"""Times in each round that the processor's time is taken: a small difference of two large figures is looked for, on a
machine that is faster in one second than in the next. So pairs are short and many."""
LAG_BYTES = 150_000_000
LAGS = 4
"""So often as many bytes are sent as above, with a follower there and without it."""
MB = 1_000_000

numbers = itertools.count(1)


def produced(address: str, topic: str, value: bytes, count: int, acks: int | str) -> float:
    """Return records per second, until the last one counts: with acks=0, until it is visible."""

    def settle() -> None:
        with Connection(address_of(address)) as connection:
            wait(lambda: connection.end_offset(topic) >= count, "all records are visible")

    return produce(address, topic, value, count, acks, settle if acks == 0 else lambda: None)


def paced(address: str, topic: str, value: bytes, acks: int, seconds: float) -> Samples:
    """Send one record at a time at the low rate, and time each from when it was due."""
    samples, moments = Samples(), deque[Moment]()
    batch = one_record_batch(value)
    with Connection(address_of(address)) as connection:
        count = int(seconds * LOW_RATE_PER_S)

        def read() -> None:
            for _ in range(count):
                connection.receive_acknowledgement()
                samples.end(moments.popleft())

        def send(moment: Moment) -> None:
            moments.append(moment)
            connection.send_batch(topic, batch, acks)

        reader = threading.Thread(target=read)
        reader.start()
        on_schedule(seconds, send, LOW_RATE_PER_S)
        reader.join()
    return samples


def processor_us(node: NodeProcess, topic: str, batch: bytes, acks: int = 1) -> float:
    """Send many small requests and return the processor time that the node spends on each."""
    with Connection(address_of(node.address)) as connection:
        before = processor_seconds(node.pid)
        for number in range(REQUESTS):
            connection.send_batch(topic, batch, acks)
            if number >= WINDOW:
                connection.receive_acknowledgement()
        for _ in range(WINDOW):
            connection.receive_acknowledgement()
        return (processor_seconds(node.pid) - before) / REQUESTS * 1e6


class Report:
    """The figures and the lines of the table, side by side."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str, str]] = []

    def line(self, name: str, value: str, beside: str = "", ratio: float | None = None) -> None:
        self.rows.append((name, value, beside, "" if ratio is None else f"{ratio:.2f}"))
        shown = f"   ({beside})" if beside else ""
        print(f"  {name}: {value}{shown}" + ("" if ratio is None else f" → {ratio:.2f}"), flush=True)


def bench_throughput(report: Report, nodes: Nodes, rounds: int, scale: float) -> None:
    for size_name, (size, whole) in SIZES.items():
        value, count = os.urandom(size), max(CHUNK, int(whole * scale))
        for acks_name, acks in ACKS.items():
            rates: dict[str, list[float]] = {"single": [], "cluster": []}
            for number in range(rounds):
                turns = [("single", nodes.single), ("cluster", nodes.leader)]
                for name, node in turns if number % 2 else reversed(turns):
                    topic = nodes.create(node)
                    rates[name].append(produced(node.address, topic, value, count, acks))
                    nodes.drop(node, topic)
            single, cluster = (statistics.median(rates[name]) for name in ("single", "cluster"))
            label = f"acks_{acks_name}_{size_name}"
            report.figures |= {
                f"cluster_{label}_records_per_s": cluster,
                f"single_{label}_records_per_s": single,
                f"cluster_{label}_of_single": cluster / single,
            }
            promised = f", promised {PROMISED[acks_name]:,}/s" if size_name == "256b" else ""
            report.line(
                f"produce {size} B, acks={acks_name}",
                f"{cluster:,.0f} records/s, {cluster * size / MB:,.0f} MB/s",
                f"single node {single:,.0f}/s{promised}",
                cluster / single,
            )


def bench_shared_disk(report: Report, folder: Path, slices: int) -> None:
    """Tell what three syncs at once cost on this disk: a cluster on one machine cannot do better than that."""
    disk = measure_shared_disk(folder, 3, LOW_RATE_PER_S, slices)
    report.figures |= {
        "sync_alone_p50_ms": disk.alone_ms,
        "sync_of_three_p50_ms": disk.each_ms,
        "sync_slowest_of_three_p50_ms": disk.slowest_ms,
        "sync_of_three_of_alone": disk.each_ms / disk.alone_ms,
        "sync_slowest_of_three_of_alone": disk.slowest_ms / disk.alone_ms,
    }
    for name, value in (("each", disk.each_ms), ("the slowest", disk.slowest_ms)):
        report.line(
            f"this machine's limit: write + fdatasync, {name} of three at once, p50",
            f"{value:.2f} ms",
            f"alone {disk.alone_ms:.2f} ms",
            value / disk.alone_ms,
        )


def bench_low_rate(report: Report, nodes: Nodes, slices: int) -> None:
    for size_name, (size, _) in SIZES.items():
        value = os.urandom(size)
        topics = {"single": nodes.create(nodes.single), "cluster": nodes.create(nodes.leader)}
        at = {"single": nodes.single, "cluster": nodes.leader}
        for acks_name, acks in (("1", 1), ("all", -1)):
            samples: dict[str, list[float]] = {"single": [], "cluster": []}
            for name in samples:
                paced(at[name].address, topics[name], value, acks, 0.3)
            for _ in range(slices):
                for name, gathered in samples.items():
                    gathered += paced(at[name].address, topics[name], value, acks, 1.0).due_ms
            for share_name, share in (("p50", 0.5), ("p99", 0.99)):
                single, cluster = (quantile(samples[name], share) for name in ("single", "cluster"))
                label = f"acks_{acks_name}_{size_name}_{share_name}"
                report.figures |= {
                    f"cluster_{label}_ms": cluster,
                    f"single_{label}_ms": single,
                    f"cluster_{label}_of_single": cluster / single,
                }
                beside = f"single node {single:.2f} ms"
                if size_name == "256b":
                    beside += f", promised {'1 to 5' if acks_name == '1' else '10 to 50'} ms"
                if share_name == "p50":
                    beside += f", this disk's limit {report.figures[LIMITS[acks_name]]:.2f}"
                report.line(
                    f"{LOW_RATE_PER_S}/s, {size} B, acks={acks_name}, {share_name}",
                    f"{cluster:.2f} ms",
                    beside,
                    cluster / single,
                )


def bench_processor(report: Report, nodes: Nodes, rounds: int) -> None:
    batch = one_record_batch(os.urandom(256))
    spent: dict[str, list[float]] = {"single": [], "cluster": []}
    topics = {"single": nodes.create(nodes.single), "cluster": nodes.create(nodes.leader)}
    at = {"single": nodes.single, "cluster": nodes.leader}
    for number in range(PROCESSOR_ROUNDS * rounds):
        for name in at if number % 2 else reversed(at):
            spent[name].append(processor_us(at[name], topics[name], batch))
    single, cluster = (statistics.median(spent[name]) for name in ("single", "cluster"))
    added = statistics.median(more - less for more, less in zip(spent["cluster"], spent["single"], strict=True))
    report.figures |= {
        "leader_processor_us_per_produce": cluster,
        "single_processor_us_per_produce": single,
        "leader_processor_us_added_per_produce": added,
    }
    report.line(
        "the leader's processor time for a produce request, acks=1",
        f"{cluster:.1f} µs",
        f"single node {single:.1f} µs, {added:.1f} µs less; promised 5",
        cluster / single,
    )


def bench_lag(report: Report, nodes: Nodes, seconds: float) -> None:
    """Send 1 KB records at two paces, and look how far behind the followers are.

    Capacity is what all three keep up with for as long as the lag is looked at: a burst of a second is more, because
    disks like this one take a burst and then slow down.
    """
    topic, value = nodes.create(nodes.leader), os.urandom(1000)
    count = int(report.figures["cluster_acks_all_1kb_records_per_s"] * seconds)
    report.figures["capacity_records_per_s"] = produced(nodes.leader.address, topic, value, count, "all")
    nodes.drop(nodes.leader, topic)
    for of, label in (("capacity", "half_capacity"), ("cluster_acks_1_1kb", "half_burst")):
        rate = report.figures[f"{of}_records_per_s"] / 2
        lags_ms = lags_at(nodes, rate, seconds)
        p50_ms, p99_ms = quantile(lags_ms, 0.5), quantile(lags_ms, 0.99)
        report.figures |= {f"lag_{label}_p50_ms": p50_ms, f"lag_{label}_p99_ms": p99_ms}
        report.line(
            f"lag at {rate:,.0f} records/s of 1 KB, {label.replace('_', ' of ', 1)}, p50 and p99",
            f"{p50_ms:.0f} ms, {p99_ms:.0f} ms",
            "promised below 100 ms",
        )


def lags_at(nodes: Nodes, rate: float, seconds: float) -> list[float]:
    """Send at a steady pace, and return the larger lag of the two followers, twenty times a second."""
    topic, value = nodes.create(nodes.leader), os.urandom(1000)
    producer = Producer({"bootstrap.servers": nodes.leader.address, "acks": 1, "linger.ms": 5})
    producer.list_topics(topic)
    lags_ms: list[float] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            followers = nodes.health(1)["replication"]["followers"]
            lags_ms.append(max(one["lag_seconds_max"] for one in followers) * 1000)

    looker = threading.Thread(target=look)
    looker.start()
    started = time.perf_counter()
    sent = 0
    while (elapsed := time.perf_counter() - started) < seconds:
        due = int(elapsed * rate) - sent
        if due > 0:
            sent += producer.produce_batch(topic, [{"value": value}] * min(due, CHUNK), 0)
        producer.poll(0.001)
    producer.flush(60)
    ended.set()
    looker.join()
    nodes.drop(nodes.leader, topic)
    return lags_ms


def write_and_sync(folder: Path, size_bytes: int) -> float:
    """Append as many bytes to a new file, a sync for each few megabytes, and return bytes per second."""
    filler = memoryview(os.urandom(8 * MB))
    descriptor = os.open(folder / f"limit-{next(numbers)}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    started, left = time.perf_counter(), size_bytes
    while left > 0:
        left -= os.write(descriptor, filler[: min(left, len(filler))])
        os.fdatasync(descriptor)
    elapsed = time.perf_counter() - started
    os.close(descriptor)
    return size_bytes / elapsed


def bench_catch_up(report: Report, nodes: Nodes, folder: Path, scale: float) -> None:
    """Take a follower away, let it fall behind, look at the leader's memory meanwhile, and time the way back."""
    topic, value = nodes.create(nodes.leader), os.urandom(1000)
    count = int(LAG_BYTES * scale / len(value))
    leader, follower = nodes.leader, nodes.cluster[3]

    def loaded() -> float:
        produce(leader.address, topic, value, count)
        time.sleep(1.0)
        return memory_of(leader.pid)["RssAnon"]

    without = [loaded() for _ in range(LAGS)]
    wait(lambda: nodes.held(3, topic).get("durable_end") == nodes.held(1, topic)["log_end"], "the follower is there")
    follower.kill()
    behind = [loaded() for _ in range(LAGS)]
    end = nodes.held(1, topic)["log_end"]
    begun = end - LAGS * count
    size_bytes = LAGS * count * (len(value) + 10)
    raw = [write_and_sync(folder, size_bytes)]
    follower.spawn()
    wait(follower.answers, "the follower answers")
    position, started = begun, 0.0
    most = 0.0
    while position < end:
        with contextlib.suppress(OSError, KeyError):
            position = nodes.held(3, topic)["durable_end"]
        if position > begun and not started:
            started, begun = time.perf_counter(), position
        most = max(most, memory_of(leader.pid)["RssAnon"])
        time.sleep(0.005)
    elapsed = time.perf_counter() - started
    rate = size_bytes * (end - begun) / (LAGS * count) / elapsed
    raw.append(write_and_sync(folder, size_bytes))
    limit = statistics.mean(raw)
    report.figures |= {
        "catch_up_mb_per_s": rate / MB,
        "write_and_fdatasync_mb_per_s": limit / MB,
        "catch_up_of_write_and_fdatasync": rate / limit,
        "leader_memory_mb_without_lag": [round(mb, 1) for mb in without],
        "leader_memory_mb_with_lag": [round(mb, 1) for mb in behind],
        "leader_memory_with_lag_of_without": max(behind) / max(without),
        "leader_memory_mb_catching_up_max": most,
        "lag_mb": size_bytes / MB,
    }
    report.line(
        f"catch-up of a follower, {size_bytes / MB:,.0f} MB",
        f"{rate / MB:,.0f} MB/s",
        f"write + fdatasync {limit / MB:,.0f} MB/s",
        rate / limit,
    )
    report.line(
        f"the leader's memory, a follower up to {size_bytes / MB:,.0f} MB behind",
        f"{max(behind):,.0f} MB",
        f"nobody behind {max(without):,.0f}, while it caught up {most:,.0f} MB",
        max(behind) / max(without),
    )


def measure(nodes: Nodes, folder: Path, arguments: argparse.Namespace) -> None:
    report = Report()
    gc.freeze()
    started, stolen_before = time.perf_counter(), stolen_s()
    bench_shared_disk(report, folder, arguments.latency_seconds)
    bench_low_rate(report, nodes, arguments.latency_seconds)
    bench_processor(report, nodes, arguments.rounds)
    bench_throughput(report, nodes, arguments.rounds, arguments.scale)
    bench_lag(report, nodes, 5.0)
    bench_catch_up(report, nodes, folder, arguments.scale)
    figures = report.figures
    figures["machine_stolen_share"] = (stolen_s() - stolen_before) / (time.perf_counter() - started)
    all_of_one = min(
        figures[f"cluster_acks_all_{size}_records_per_s"] / figures[f"cluster_acks_1_{size}_records_per_s"]
        for size in SIZES
    )
    targets = {
        "leader_processor_us_added_per_produce": Target(
            figures["leader_processor_us_added_per_produce"], 5, at_least=False
        ),
        "low_rate_acks_1_p50_of_single": Target(figures["cluster_acks_1_256b_p50_of_single"], 1.2, at_least=False),
        "low_rate_acks_all_p50_of_single": Target(figures["cluster_acks_all_256b_p50_of_single"], 2, at_least=False),
        "acks_all_of_acks_1_throughput": Target(all_of_one, 0.6),
        "catch_up_of_write_and_fdatasync": Target(figures["catch_up_of_write_and_fdatasync"], 0.7),
        "leader_memory_with_lag_of_without": Target(figures["leader_memory_with_lag_of_without"], 1.1, at_least=False),
        "lag_half_capacity_p99_ms": Target(figures["lag_half_capacity_p99_ms"], 100, at_least=False),
    }
    print("\n" + table(("figure", "three nodes", "beside", "ratio"), report.rows))
    finish("replication", figures, targets, folder=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a cluster of three next to a single node.")
    parser.add_argument("--data-dir", type=Path, default=Path(), help="a folder on the disk to measure (default: here)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each throughput figure; medians are reported")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of records")
    parser.add_argument("--latency-seconds", type=int, default=5, help="seconds at the low rate for each figure")
    arguments = parser.parse_args()
    with alone(), tempfile.TemporaryDirectory(prefix="walstream-bench-", dir=arguments.data_dir) as name:
        folder = Path(name).resolve()
        with running(folder) as nodes:
            measure(nodes, folder, arguments)


if __name__ == "__main__":
    main()
