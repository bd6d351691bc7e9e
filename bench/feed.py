"""How fast the feed is, next to a Kafka consumer of the same topic, and how late it is next to a bare fdatasync.

A node and a feed run as their users run them, each in a process of its own, and so do the subscribers (`subscribers`).

    live       1,000 records a second on schedule, one to a batch; from the moment each was due, and from when it was
               acknowledged, to when a subscriber has it: 1, 10 and 100 of them, and one that follows three topics,
               whose entries wait until their order is settled. In turns with the limit, a bare append + fdatasync at
               the same pace. Then as fast as one producer can, until the last subscriber has the last record
    catch-up   one subscriber, from the oldest entry to the newest: a topic as applications write it (a key, a value of
               256 bytes, a tenant) and one as capture does (six headers); in turns with the confluent consumer. Beside
               it a client that makes an object of every entry
    many       10 and 100 subscribers at once from the start of a topic, and 100 at places that are all over it
    memory     the most that the feed and the node ever had resident, also with 100 subscribers that take nothing more

Everything shares one machine: a subscriber of the feed takes turns with the feed and the node on its cores.
"""

from __future__ import annotations

import argparse
import array
import gc
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from bare import Connection, address_of, one_record_batch
from crowd import Came, Subscribers, requests
from log import Report, fetch_confluent
from pace import RATE_PER_S, Moment, PacedSync, lateness_ms, on_schedule
from processes import memory_of, processor_seconds
from report import Target, alone, finish, quantile, stolen_s, table
from walstream.feed.process import FeedProcess
from walstream.node.process import NodeProcess

RECORDS = 1_000_000
VALUE_BYTES = 256
WARM_RECORDS = RATE_PER_S // 2
ROWS_PER_TRANSACTION = 10
HELD_S = 3.0
FEED_MEMORY_MB = 700
"""What a feed may need for 100 subscribers that take nothing, as docs/feed.md states it."""
MB = 1_000_000

numbers = itertools.count(1)

Headers = list[tuple[str, str | bytes | None]]


def create_topic(bootstrap: str, name: str) -> str:
    topic = f"bench.{next(numbers)}.{name}"
    new = NewTopic(topic, 1, 1, config={"message.timestamp.type": "LogAppendTime"})
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([new])[topic].result(30)
    return topic


def of_application(_: int) -> Headers:
    return [("tenant", b"acme")]


def of_capture(number: int) -> Headers:
    """The headers of a row of a transaction, as capture writes them."""
    transaction, seq = divmod(number, ROWS_PER_TRANSACTION)
    return [
        ("tenant", b"acme"),
        ("op", b"c"),
        ("commit_lsn", b"%d" % (26_000_000 + 800 * transaction)),
        ("commit_time_ms", b"%d" % (1_700_000_000_000 + transaction)),
        ("txid", b"%d" % (900 + transaction)),
        ("seq", b"%d" % (seq + 1)),
    ]


def produce(bootstrap: str, topic: str, count: int, headers: Callable[[int], Headers] = of_application) -> float:
    """Write so many records as fast as the client can, and return when the first one was given to it."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": 1,
            "linger.ms": 10,
            "batch.size": 1_000_000,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 256 * 1024,
        }
    )
    producer.list_topics(topic)
    values = [os.urandom(VALUE_BYTES // 2).hex().encode() for _ in range(1_000)]
    begun = time.perf_counter()
    for number in range(count):
        while True:
            try:
                producer.produce(topic, values[number % 1_000], b'{"id":%d}' % number, 0, headers=headers(number))
                break
            except BufferError:
                producer.poll(0.01)
    if producer.flush(120):
        raise TimeoutError(f"{len(producer)} records were not acknowledged in time")
    return begun


@dataclass
class PacedMarks:
    """A bare producer on schedule: one marked record in each request, to the topics in turn."""

    address: str
    topics: Sequence[str]
    due: list[float] = field(default_factory=list)
    acked: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection = Connection(address_of(self.address))
        self.filler = os.urandom(VALUE_BYTES // 2).hex().encode()

    def run(self, seconds: float, rate_per_s: int = RATE_PER_S) -> None:
        def read() -> None:
            for _ in range(int(seconds * rate_per_s)):
                self.connection.receive_acknowledgement()
                self.acked.append(time.perf_counter())

        reader = threading.Thread(target=read)
        reader.start()
        on_schedule(seconds, self._send, rate_per_s)
        reader.join()

    def acknowledged_ms(self, skipped: int) -> list[float]:
        """Return how long each took until it was acknowledged, from when it was due, but for the first ones."""
        return [(acked - due) * 1000 for due, acked in zip(self.due[skipped:], self.acked[skipped:], strict=True)]

    def _send(self, moment: Moment) -> None:
        number = len(self.due)
        self.due.append(moment.due)
        value = (b"<%010d>" % number + self.filler)[:VALUE_BYTES]
        self.connection.send_batch(self.topics[number % len(self.topics)], one_record_batch(value))


def _spread(places: Sequence[str], count: int) -> Sequence[str]:
    """Return about so many of the places, from all over."""
    return places[:: max(1, len(places) // count)]


def arrivals(files: Sequence[Path], per_stream: int) -> Iterator[array.array[float]]:
    """Yield when the entries came, stream by stream."""
    for file in files:
        with file.open("rb") as opened:
            for _ in range(file.stat().st_size // (8 * per_stream)):
                times = array.array("d")
                times.fromfile(opened, per_stream)
                yield times


class Bench:
    """The node, what is written to it, and what is found out."""

    def __init__(self, node: NodeProcess, folder: Path, arguments: argparse.Namespace) -> None:
        self.node = node
        self.folder = folder
        self.seconds = arguments.seconds
        self.records = arguments.records
        self.rounds = arguments.rounds
        self.report = Report()
        self.figures = self.report.figures

    def _feed(self) -> FeedProcess:
        return FeedProcess(self.folder / f"feed-{next(numbers)}", self.node.address)

    # Live

    def live(self) -> None:
        sync = PacedSync(self.folder, one_record_batch(os.urandom(VALUE_BYTES)))
        sync.run(0.5)
        with self._feed() as feed:
            for count, topics, seconds in ((1, 1, 1.0), (1, 3, 1.0), (10, 1, 0.5), (100, 1, 0.5)):
                self._paced(feed, count, topics, max(1, round(self.seconds * seconds)), sync)
            for count, share in ((1, 5), (10, 10), (100, 50)):
                self._flood(feed, count, max(WARM_RECORDS, self.records // share))
            self._memory(feed, "live")
        sync.close()

    def _paced(self, feed: FeedProcess, count: int, topics: int, seconds: int, sync: PacedSync) -> None:
        marks = PacedMarks(self.node.address, [create_topic(self.node.address, "live") for _ in range(topics)])
        total = topics + WARM_RECORDS + seconds * RATE_PER_S
        asked = requests(marks.topics, count)
        files = [self.folder / f"times-{next(numbers)}" for _ in asked]
        tasks = [
            {"mode": "times", "requests": some, "entries": total, "path": str(file)}
            for some, file in zip(asked, files, strict=True)
        ]
        with Subscribers(feed, tasks) as subscribers:
            marks.run(topics / RATE_PER_S)
            subscribers.begun()
            marks.run(WARM_RECORDS / RATE_PER_S)
            sync.samples.clear()
            lateness_ms.clear()
            busy = {"feed": processor_seconds(feed.pid), "node": processor_seconds(self.node.pid)}
            for _ in range(seconds):
                marks.run(1.0)
                sync.run(1.0)
            came = subscribers.came()
        late = quantile(lateness_ms, 0.99)
        name = f"live_{count}" + (f"_of_{topics}_topics" if topics > 1 else "")
        self.figures[f"{name}_entries_per_batch"] = came.entries / came.batches
        self.figures[f"{name}_subscribers_busy"] = came.busy_s / seconds
        for who, pid in (("feed", feed.pid), ("node", self.node.pid)):
            # Of the seconds in which records came.
            self.figures[f"{name}_{who}_busy"] = (processor_seconds(pid) - busy[who]) / seconds
        due_ms, acked_ms, skipped = [], [], total - seconds * RATE_PER_S
        by_second: list[list[float]] = [[] for _ in range(seconds)]
        for times in arrivals(files, total):
            for number in range(skipped, total):
                due_ms.append((times[number] - marks.due[number]) * 1000)
                acked_ms.append((times[number] - marks.acked[number]) * 1000)
                by_second[(number - skipped) // RATE_PER_S].append(due_ms[-1])
        marks.connection.close()
        shown = f"{RATE_PER_S:,}/s live, subscribers: {count}" + (f", topics: {topics}" if topics > 1 else "")
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            value, limit = quantile(due_ms, share), quantile(sync.samples.due_ms, share)
            acked, acknowledged = quantile(acked_ms, share), quantile(marks.acknowledged_ms(skipped), share)
            self.figures |= {
                f"{name}_{label}_ms": value,
                f"{name}_ack_{label}_ms": acknowledged,
                f"{name}_{label}_ms_from_ack": acked,
                f"{name}_fdatasync_{label}_ms": limit,
            }
            self.report.line(
                f"{shown}, {label}",
                f"{value:.2f} ms, from its acknowledgement {acked:.2f} ms",
                f"fdatasync {limit:.2f} ms, acknowledged {acknowledged:.2f} ms",
                value / limit,
            )
        self.figures[f"{name}_p99_ms_above_fdatasync"] = (
            self.figures[f"{name}_p99_ms"] - self.figures[f"{name}_fdatasync_p99_ms"]
        )
        # Each second with the limit's that followed it: a machine that stood still in one of them is one of many here.
        limits = [sync.samples.due_ms[at : at + RATE_PER_S] for at in range(0, seconds * RATE_PER_S, RATE_PER_S)]
        self.figures[f"{name}_p99_ms_above_fdatasync_typical_second"] = statistics.median(
            quantile(own, 0.99) - quantile(limit, 0.99) for own, limit in zip(by_second, limits, strict=True)
        )
        self.figures[f"{name}_schedule_late_p99_ms"] = late

    def _flood(self, feed: FeedProcess, count: int, records: int) -> None:
        """Write as fast as one producer can, to subscribers that are at the head."""
        topic = create_topic(self.node.address, "flood")
        tasks = [{"mode": "count", "requests": some, "entries": records + 1} for some in requests([topic], count)]
        with Subscribers(feed, tasks) as subscribers:
            produce(self.node.address, topic, 1)
            subscribers.begun()
            begun = produce(self.node.address, topic, records)
            produced = records / (time.perf_counter() - begun)
            came = subscribers.came()
        rate = count * records / (came.ended - begun)
        self.figures |= {
            f"live_{count}_entries_per_s": rate,
            f"live_{count}_mb_per_s": came.size_bytes / (came.ended - begun) / MB,
            f"live_{count}_produced_per_s": produced,
        }
        self.report.line(
            f"live, as fast as one can write, subscribers: {count}",
            f"{rate:,.0f} entries/s in all",
            f"written {produced:,.0f}/s",
        )

    # Catch-up

    def catch_up(self) -> tuple[str, list[str]]:
        """Measure one subscriber; return the topic that applications wrote, and places all over it."""
        topics = {"application": of_application, "capture": of_capture}
        written = {name: create_topic(self.node.address, name) for name in topics}
        for name, headers in topics.items():
            produce(self.node.address, written[name], self.records, headers)
        with self._feed() as feed:
            places = {name: self._one(feed, name, topic) for name, topic in written.items()}["application"]
            for name, is_compressed in (("parsing", False), ("parsing_compressed", True)):
                task = {"topics": [written["application"]], "compression": is_compressed, "entries": self.records}
                with Subscribers(feed, [{"mode": "parse", **task}]) as subscribers:
                    subscribers.begun()
                    rate = subscribers.came().entries_per_s
                self.figures[f"catch_up_{name}_entries_per_s"] = rate
                compressed = ", compressed" if is_compressed else ""
                self.report.line(f"catch-up with walstream.feed.Client{compressed}", f"{rate:,.0f} entries/s")
            self._memory(feed, "catch_up")
        return written["application"], places

    def _one(self, feed: FeedProcess, name: str, topic: str) -> list[str]:
        rates, consumed, runs = [], [], []
        for number in range(self.rounds):
            if number % 2:
                consumed.append(self._consume(topic))
            busy = processor_seconds(feed.pid), processor_seconds(self.node.pid)
            came = self._count(feed, [topic], 1, self.records)
            runs.append((came, processor_seconds(feed.pid) - busy[0], processor_seconds(self.node.pid) - busy[1]))
            rates.append(came.entries_per_s)
            if came.entries != self.records:
                raise AssertionError(f"{self.records:,} records were written and {came.entries:,} entries came")
            if not number % 2:
                consumed.append(self._consume(topic))
        came, feed_s, node_s = sorted(runs, key=lambda run: run[0].entries_per_s)[len(runs) // 2]
        rate, limit = statistics.median(rates), statistics.median(consumed)
        self.figures |= {
            f"catch_up_{name}_entries_per_s": rate,
            f"catch_up_{name}_mb_per_s": came.mb_per_s,
            f"catch_up_{name}_entries_per_batch": came.entries / came.batches,
            f"catch_up_{name}_consumer_records_per_s": limit,
            f"catch_up_{name}_of_consumer": rate / limit,
            f"catch_up_{name}_feed_us_per_entry": feed_s / came.entries * 1e6,
            f"catch_up_{name}_node_us_per_entry": node_s / came.entries * 1e6,
            f"catch_up_{name}_subscriber_us_per_entry": came.busy_s / came.entries * 1e6,
        }
        spent = ", ".join(
            f"{who} {seconds / came.entries * 1e6:.2f}"
            for who, seconds in (("feed", feed_s), ("node", node_s), ("subscriber", came.busy_s))
        )
        self.report.line(
            f"catch-up, records of {name} (µs of processor an entry: {spent})",
            f"{rate:,.0f} entries/s, {came.mb_per_s:,.0f} MB/s",
            f"consumer {limit:,.0f} records/s",
            rate / limit,
        )
        return came.places

    def _count(
        self, feed: FeedProcess, topics: Sequence[str], count: int, entries: int, starts: Sequence[str] = ("oldest",)
    ) -> Came:
        asked = requests(topics, count, starts)
        tasks = [{"mode": "count", "requests": some, "entries": entries} for some in asked]
        with Subscribers(feed, tasks) as subscribers:
            subscribers.begun()
            return subscribers.came()

    def _consume(self, topic: str) -> float:
        bytes_per_s, records = fetch_confluent(self.node.address, topic)
        if records != self.records:
            raise AssertionError(f"{self.records:,} records were written and {records:,} were consumed")
        return bytes_per_s / VALUE_BYTES

    # Many

    def many(self, large: str, places: list[str]) -> None:
        """Measure 10 and 100 subscribers at once, from the start of a topic and from all over a large one."""
        counts = {10: max(1_000, self.records // 5), 100: max(1_000, self.records // 20)}
        topics = {count: create_topic(self.node.address, "many") for count in counts}
        for count, records in counts.items():
            produce(self.node.address, topics[count], records)
        apart = max(1_000, self.records // 50)
        for name, count, records, topic, starts in (
            ("10", 10, counts[10], topics[10], ["oldest"]),
            ("100", 100, counts[100], topics[100], ["oldest"]),
            ("100_apart", 100, apart, large, places[: len(places) * (self.records - apart) // self.records]),
        ):
            # A feed of its own: how much memory it needed at most is told by the kernel once for a process.
            with self._feed() as feed:
                busy = processor_seconds(feed.pid)
                came = self._count(feed, [topic], count, records, _spread(starts, count))
                busy_us = (processor_seconds(feed.pid) - busy) / came.entries * 1e6
                self.figures |= {
                    f"catch_up_{name}_entries_per_s": came.entries_per_s,
                    f"catch_up_{name}_mb_per_s": came.mb_per_s,
                    f"catch_up_{name}_feed_us_per_entry": busy_us,
                    f"catch_up_{name}_subscriber_us_per_entry": came.busy_s / came.entries * 1e6,
                }
                where = "from places far apart" if name.endswith("apart") else "from the start"
                self.report.line(
                    f"catch-up of {count} subscribers {where} (feed {busy_us:.2f} µs of processor an entry)",
                    f"{came.entries_per_s:,.0f} entries/s in all, {came.mb_per_s:,.0f} MB/s",
                )
                self._memory(feed, name)
        with self._feed() as feed:
            asked = requests([large], 100, _spread(places, 100))
            with Subscribers(
                feed, [{"mode": "hold", "requests": some, "entries": self.records} for some in asked]
            ) as held:
                held.begun()
                time.sleep(HELD_S)
                self._memory(feed, "100_held")

    def _memory(self, feed: FeedProcess, stage: str) -> None:
        of_feed, of_node = memory_of(feed.pid), memory_of(self.node.pid)
        self.figures |= {f"feed_memory_mb_max_{stage}": of_feed["VmHWM"], "node_memory_mb_max": of_node["VmHWM"]}
        self.report.line(
            f"memory of the feed at most, {stage}",
            f"{of_feed['VmHWM']:,.0f} MB",
            f"now {of_feed['VmRSS']:,.0f}; the node at most {of_node['VmHWM']:,.0f} MB",
        )

    # The end

    def targets(self) -> dict[str, Target]:
        """Return what is to be reached, of what was measured."""
        wanted = (
            ("catch_up_application_entries_per_s", 150_000, True),
            ("catch_up_capture_entries_per_s", 150_000, True),
            ("catch_up_100_entries_per_s", 300_000, True),
            ("live_1_p99_ms_above_fdatasync", 10, False),
            ("feed_memory_mb_max_100_held", FEED_MEMORY_MB, False),
            ("node_memory_mb_max", 150, False),
        )
        return {
            name: Target(self.figures[name], bound, at_least=at_least)
            for name, bound, at_least in wanted
            if name in self.figures
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the feed next to a Kafka consumer and a bare fdatasync.")
    parser.add_argument("--data-dir", type=Path, default=Path(), help="a folder on the disk to measure (default: here)")
    parser.add_argument("--records", type=int, default=RECORDS, help="records of the topic that one catches up with")
    parser.add_argument("--seconds", type=float, default=10, help="seconds at the pace for one subscriber")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of one subscriber; medians are reported")
    parser.add_argument("--only", choices=("live", "catch-up", "many"), help="measure just this")
    arguments = parser.parse_args()
    gc.freeze()
    with alone(), tempfile.TemporaryDirectory(prefix="walstream-bench-", dir=arguments.data_dir) as name:
        folder = Path(name).resolve()
        started, stolen_before = time.perf_counter(), stolen_s()
        with NodeProcess(folder / "data") as node:
            bench = Bench(node, folder, arguments)
            if arguments.only in (None, "live"):
                bench.live()
            if arguments.only != "live":
                topic, places = bench.catch_up()
            if arguments.only in (None, "many"):
                bench.many(topic, places)
        bench.figures["machine_stolen_share"] = (stolen_s() - stolen_before) / (time.perf_counter() - started)
        print("\n" + table(("figure", "value", "limit", "ratio"), bench.report.rows))
        is_whole = arguments.only is None and arguments.records >= RECORDS
        finish("feed", bench.figures, bench.targets(), folder=folder, is_recorded=is_whole)


if __name__ == "__main__":
    main()
