"""Every metric of walstream, in one file: prefix `walstream_`, base units, `_total` for counters.

On the hot path counting is adding to a plain integer. The numbers become Prometheus samples only when somebody asks, in
`Exporter.collect`, which also reads what the node already knows (sizes, offsets, connections): so nothing is counted
twice and a metric cannot disagree with the state it is about.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from walstream.ops.replication import (
    Lagging,
    followers,
    is_below_min_isr,
    is_leaderless,
    is_under_replicated,
    links,
)

if TYPE_CHECKING:
    from walstream.log.store import LogStore
    from walstream.node.api import Api
    from walstream.node.framing import Budget
    from walstream.node.groups.service import GroupService
    from walstream.node.replicas import Replicas
    from walstream.node.sessions import Sessions
    from walstream.spark.progress import Progress, TableView

BUCKETS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

PARTITION_SERIES_MAX = 2_000
"""Partitions with series of their own. With more there are only sums: a scrape must stay small."""


class Timing:
    """How often something happened and how long it took."""

    __slots__ = ("_counts", "sum_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(BUCKETS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds

    @property
    def count(self) -> int:
        """Return how often it happened."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus wants them."""
        total = 0
        result = []
        for bound, count in zip((*map(str, BUCKETS_SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result


class Metrics:
    """The plain numbers that the node counts."""

    def __init__(self, api_keys: Iterable[int]) -> None:
        self.requests: dict[int, Timing] = {key: Timing() for key in api_keys}
        self.errors: Counter[int] = Counter()
        self.failures = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        self.appended_batches = 0
        self.appended_bytes = 0
        self.appended_records = 0
        self.fetched_bytes = 0
        self.cold_reads = 0
        self.connections_accepted = 0
        self.connections_refused = 0
        self.connections_closed = 0

    def count_errors(self, codes: Iterable[int]) -> None:
        """Count error codes that are answered."""
        self.errors.update(codes)


class Source(Protocol):
    """What the exporter reads of a node."""

    metrics: Metrics
    store: LogStore
    groups: GroupService
    sessions: Sessions
    budget: Budget
    unsent: Budget
    apis: dict[int, Api]
    replicas: Replicas | None

    @property
    def connection_count(self) -> int:
        """Return the number of open connections."""

    @property
    def uptime_seconds(self) -> float:
        """Return for how long the node has run."""

    @property
    def version(self) -> str:
        """Return walstream's version."""


class Exporter(Collector):
    """Turns the numbers of one node into samples."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._more: list[Callable[[], Iterable[Metric]]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Have another stage's metrics collected along with these."""
        self._more.append(collect)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        yield from self._node()
        yield from self._requests()
        yield from self._log()
        yield from self._partitions()
        if self._source.replicas is not None:
            yield from self._replication(self._source.replicas)
        for collect in self._more:
            yield from collect()

    def _node(self) -> Iterator[Metric]:
        source, metrics = self._source, self._source.metrics
        info = GaugeMetricFamily("walstream_node_info", "The version that runs.", labels=["version"])
        info.add_metric([source.version], 1)
        yield info
        yield _gauge("walstream_uptime_seconds", "Time since the node started.", source.uptime_seconds)
        yield _gauge("walstream_connections", "Open connections.", source.connection_count)
        yield _counter("walstream_connections_accepted", "Connections taken in.", metrics.connections_accepted)
        yield _counter(
            "walstream_connections_refused",
            "Connections closed because there were too many.",
            metrics.connections_refused,
        )
        yield _counter(
            "walstream_connections_closed",
            "Connections that the node ended: protocol broken, deadline passed, reader stuck.",
            metrics.connections_closed,
        )
        yield _gauge(
            "walstream_inflight_bytes", "Requests being read and handled, all connections.", source.budget.used_bytes
        )
        yield _gauge(
            "walstream_inflight_waiting_connections",
            "Connections not read from for lack of room.",
            source.budget.waiting,
        )
        yield _gauge("walstream_unsent_bytes", "Responses that clients have not read yet.", source.unsent.used_bytes)
        yield _gauge(
            "walstream_groups", "Consumer groups with members or lately so.", len(source.groups.coordinator.groups)
        )
        yield _counter(
            "walstream_group_rebalances", "Generations that consumer groups formed.", source.groups.rebalances
        )
        yield _gauge("walstream_fetch_sessions", "Incremental fetch sessions.", len(source.sessions))
        yield _counter(
            "walstream_fetch_session_evictions", "Fetch sessions given up for others.", source.sessions.evictions
        )

    def _requests(self) -> Iterator[Metric]:
        metrics = self._source.metrics
        durations = HistogramMetricFamily(
            "walstream_request_duration_seconds",
            "From a request's arrival to its response, waiting included.",
            labels=["api"],
        )
        for key, timing in metrics.requests.items():
            if timing.count:
                durations.add_metric([self._source.apis[key].name], timing.buckets(), timing.sum_seconds)
        yield durations
        errors = CounterMetricFamily("walstream_request_errors", "Kafka error codes answered.", labels=["code"])
        for code, count in sorted(metrics.errors.items()):
            errors.add_metric([str(code)], count)
        yield errors
        yield _counter("walstream_request_failures", "Requests that met a bug of the node.", metrics.failures)
        yield _counter("walstream_received_bytes", "Bytes received from clients.", metrics.received_bytes)
        yield _counter("walstream_sent_bytes", "Bytes sent to clients.", metrics.sent_bytes)

    def _log(self) -> Iterator[Metric]:
        metrics, store = self._source.metrics, self._source.store
        flushes = store.commit.counters
        yield _counter("walstream_appended_records", "Records appended by producers.", metrics.appended_records)
        yield _counter("walstream_appended_batches", "Record batches appended by producers.", metrics.appended_batches)
        yield _counter("walstream_appended_bytes", "Bytes appended by producers.", metrics.appended_bytes)
        yield _counter("walstream_fetched_bytes", "Bytes of records read for consumers.", metrics.fetched_bytes)
        yield _counter("walstream_cold_reads", "Reads that had to wait for the disk.", metrics.cold_reads)
        yield _counter("walstream_flushes", "Group commits.", flushes.flushes)
        yield _counter("walstream_flush_batches", "Record batches made durable.", flushes.writes)
        yield _counter("walstream_flush_bytes", "Bytes made durable.", flushes.bytes)
        yield _counter("walstream_flush_syncs", "fdatasync calls of group commits.", flushes.syncs)
        yield _counter("walstream_flush_journaled", "Group commits made durable by the journal.", flushes.journaled)
        yield _counter("walstream_damage_reports", "Damaged places found in the log.", store.damage_reports)
        yield _counter("walstream_write_failures", "Times a partition went offline.", store.write_failures)
        yield _gauge("walstream_disk_free_bytes", "Space left on the log's disk.", store.free_bytes)
        yield _gauge("walstream_disk_full", "Whether partitions wait for space on the disk.", store.is_full)
        yield _gauge("walstream_epoch", "The epoch of this start of the node.", store.epoch)

    def _partitions(self) -> Iterator[Metric]:
        partitions = self._source.store.partitions
        logs = list(partitions.values())
        yield _gauge("walstream_partitions", "Partitions on this node.", len(logs))
        yield _gauge(
            "walstream_partitions_offline",
            "Partitions that take no writes.",
            sum(log.write_error is not None for log in logs),
        )
        yield _gauge(
            "walstream_partitions_damaged",
            "Partitions with quarantined offsets.",
            sum(bool(log.damaged) for log in logs),
        )
        yield _gauge("walstream_log_size_bytes", "Size of all segments.", sum(log.size_bytes for log in logs))
        if len(logs) > PARTITION_SERIES_MAX:
            return
        labels = ["topic", "partition"]
        ends = GaugeMetricFamily("walstream_partition_high_watermark", "End of what consumers see.", labels=labels)
        starts = GaugeMetricFamily("walstream_partition_log_start", "First offset kept.", labels=labels)
        sizes = GaugeMetricFamily("walstream_partition_size_bytes", "Size of the partition's segments.", labels=labels)
        for log in logs:
            names = [log.topic, str(log.index)]
            ends.add_metric(names, log.high_watermark)
            starts.add_metric(names, log.log_start)
            sizes.add_metric(names, log.size_bytes)
        yield from (ends, starts, sizes)

    def _replication(self, replicas: Replicas) -> Iterator[Metric]:
        held = list(replicas.replicas.values())
        for name, documentation, count in (
            ("led", "Partitions that this node leads.", sum(one.partition.is_leader for one in held)),
            ("under_replicated", "Led partitions with a replica out of sync.", sum(map(is_under_replicated, held))),
            ("below_min_isr", "Led partitions that take no acks=all.", sum(map(is_below_min_isr, held))),
            ("leaderless", "Partitions this node should lead and does not.", sum(map(is_leaderless, held))),
            ("quarantined", "Copies that an operator must look at.", sum(bool(one.quarantined) for one in held)),
        ):
            yield _gauge(f"walstream_replication_partitions_{name}", documentation, count)
        changes = CounterMetricFamily(
            "walstream_replication_isr_changes", "Changes of in-sync replicas, of led partitions.", labels=["change"]
        )
        for change in ("expand", "shrink"):
            changes.add_metric([change], replicas.isr_changes[change])
        yield changes
        yield from self._links(replicas)
        yield from self._lags(followers(replicas))

    def _links(self, replicas: Replicas) -> Iterator[Metric]:
        labels = ["peer", "direction"]
        states = GaugeMetricFamily("walstream_replication_link_up", "1: the link is up.", labels=labels)
        sent = CounterMetricFamily("walstream_replication_sent_bytes", "Bytes sent over links.", labels=labels)
        credit = GaugeMetricFamily(
            "walstream_replication_credit_bytes", "Bytes that may still be sent to the follower.", labels=["peer"]
        )
        held = GaugeMetricFamily(
            "walstream_replication_held_bytes", "Bytes of the leader that the log has not let go of.", labels=["peer"]
        )
        for link in links(replicas):
            peer, direction = str(link["peer"]), link["direction"]
            states.add_metric([peer, direction], link["state"] == "up")
            if "credit_bytes" in link:
                credit.add_metric([peer], link["credit_bytes"])
            if "held_bytes" in link:
                held.add_metric([peer], link["held_bytes"])
        for (node_id, is_outgoing), size_bytes in sorted(replicas.links.sent_bytes().items()):
            sent.add_metric([str(node_id), "outgoing" if is_outgoing else "incoming"], size_bytes)
        yield from (states, sent, credit, held)

    def _lags(self, lagging: Sequence[Lagging]) -> Iterator[Metric]:
        """Yield how far followers are behind: each partition, or with too many of them each follower's sum."""
        is_short = len(lagging) > PARTITION_SERIES_MAX
        labels = ["follower"] if is_short else ["topic", "partition", "follower"]
        sums: dict[tuple[str, ...], tuple[int, int, float, bool]] = {}
        for one in lagging:
            name: tuple[str, ...] = (str(one.follower),)
            if not is_short:
                name = (one.topic, str(one.partition), *name)
            records, size_bytes, seconds, in_sync = sums.get(name, (0, 0, 0.0, True))
            sums[name] = (
                records + max(one.records, 0),
                size_bytes + one.size_bytes,
                max(seconds, one.seconds),
                in_sync and one.is_in_sync,
            )
        families = [
            GaugeMetricFamily(f"walstream_replication_{name}", documentation, labels=labels)
            for name, documentation in (
                ("lag_records", "Records that the follower does not have on its disk yet."),
                ("lag_bytes", "Bytes that the follower does not have on its disk yet, about."),
                ("lag_seconds", "Time since the follower was at the end of the log."),
                ("in_sync", "1: the follower is in sync."),
            )
        ]
        for names, values in sums.items():
            for family, value in zip(families, values, strict=True):
                family.add_metric(list(names), value)
        yield from families


class PipelineExporter(Collector):
    """Turns the numbers of one pipeline into samples."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        view = self._progress.look()
        yield _counter("walstream_pipeline_batches", "Micro-batches that are in the tables.", view.batches)
        yield _counter("walstream_pipeline_failures", "Micro-batches that failed and come again.", view.failures)
        yield _counter("walstream_pipeline_rows", "Rows of the log that are in the tables.", view.rows_total)
        yield _gauge("walstream_pipeline_applied_lsn", "Everything before is in the tables.", int(view.end_lsn))
        yield _gauge("walstream_pipeline_source_epoch", "The source epoch of that LSN.", view.source_epoch)
        if view.lag_rows is not None:
            yield _gauge("walstream_pipeline_lag_rows", "Rows in the log that no batch has taken yet.", view.lag_rows)
        for name, documentation, timing in (
            ("batch_duration", "From a batch's begin to its cut.", self._progress.batch_timing),
            ("freshness", "From a commit in PostgreSQL to its rows in a table.", self._progress.freshness),
        ):
            family = HistogramMetricFamily(f"walstream_pipeline_{name}_seconds", documentation)
            family.add_metric([], timing.buckets(), timing.sum_seconds)
            yield family
        yield from self._tables(view.tables)

    def _tables(self, tables: Sequence[TableView]) -> Iterator[Metric]:
        states = GaugeMetricFamily("walstream_pipeline_tables", "Tables by their state.", labels=["state"])
        for state, count in sorted(Counter(table.state for table in tables).items()):
            states.add_metric([state], count)
        yield states
        if len(tables) > PARTITION_SERIES_MAX:
            return
        rows = CounterMetricFamily("walstream_pipeline_table_rows", "Rows of the log in the table.", labels=["table"])
        fresh = GaugeMetricFamily(
            "walstream_pipeline_table_freshness_seconds", "Of the table's last commit.", labels=["table"]
        )
        stopped = GaugeMetricFamily("walstream_pipeline_table_stopped", "1: it cannot follow.", labels=["table"])
        for table in tables:
            rows.add_metric([table.name], table.rows_total)
            stopped.add_metric([table.name], table.state == "stopped")
            if table.freshness_ms is not None:
                fresh.add_metric([table.name], table.freshness_ms / 1000)
        yield from (rows, fresh, stopped)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)
