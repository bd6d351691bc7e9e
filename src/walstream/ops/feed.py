"""What operators see of a feed: its metrics and its health.

The names of RFC-010 are kept beside walstream's own (`kdb_wal_…`), so that its dashboards and alerts go on working. A
subscriber is a label while it is connected or the log keeps something for it, and only up to a number of them: a scrape
must stay small. Its tenant is a label of its own, empty for an admin: names are chosen by clients, so put together with
a tenant one subscriber's could be made to look like another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from walstream.feed.service.server import Feed

SUBSCRIBER_SERIES_MAX: Final = 500
"""Subscribers with series of their own; with more, the ones furthest behind."""


class SubscriberView(NamedTuple):
    """What is told of one subscriber, all its streams together."""

    role: str
    tenant: str
    name: str
    lag_entries: int
    queue_entries: int
    queue_bytes: int
    sent_entries: int


class FeedExporter(Collector):
    """Turns the numbers of one feed into samples."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        yield from self._streams()
        yield from self._subscribers()
        yield from self._reading()

    def _streams(self) -> Iterator[Metric]:
        feed, service = self._feed, self._feed.service
        info = GaugeMetricFamily("walstream_feed_info", "The version that runs.", labels=["version"])
        info.add_metric([feed.version], 1)
        yield info
        yield _gauge("walstream_feed_uptime_seconds", "Time since the feed started.", feed.uptime_seconds)
        streams = list(service.streams.values())
        yield _gauge("walstream_feed_streams", "Streams that are open.", len(streams))
        yield _gauge("walstream_feed_streams_live", "… at the head of the log.", sum(s.source.is_live for s in streams))
        yield _gauge("walstream_feed_streams_ending", "Ended, and the client takes nothing.", service.ending)
        yield _gauge("walstream_feed_streams_max", "Streams that may be open.", feed.config.feed.subscriptions_max)
        ends = CounterMetricFamily("walstream_feed_streams_ended", "Streams that have ended.", labels=["status"])
        for status, count in sorted(service.ends.items()):
            ends.add_metric([status], count)
        yield ends
        calls = CounterMetricFamily("walstream_feed_calls", "Calls answered.", labels=["method", "status"])
        for (method, status), count in sorted(service.calls.items()):
            calls.add_metric([method, status], count)
        yield calls
        sent = service.sent
        yield _counter("walstream_feed_sent_entries", "Entries sent to subscribers.", sent.entries)
        yield _counter("walstream_feed_sent_batches", "Batches sent to subscribers.", sent.batches)
        yield _counter("walstream_feed_sent_heartbeats", "Heartbeats sent to subscribers.", sent.heartbeats)
        for name in ("walstream_feed_sent_bytes", "kdb_wal_bytes_sent"):
            yield _counter(name, "Bytes sent to all subscribers.", sent.bytes)
        yield _counter("walstream_feed_shared_batches", "Frames cut for one and sent to others.", service.cuts.hits)
        yield _gauge(
            "walstream_feed_safe_point_seconds", "Everything since is kept.", feed.retention.safe_point_ms / 1e3
        )
        yield _counter("walstream_feed_lapsed_subscribers", "Subscribers that lost their place.", feed.retention.lapsed)
        yield _gauge("walstream_feed_known_subscribers", "Subscribers that are remembered.", len(feed.marks))

    def _subscribers(self) -> Iterator[Metric]:
        labels = ["tenant", "subscriber_id"]
        lags = [
            GaugeMetricFamily(name, "Entries behind the head.", labels=labels)
            for name in ("walstream_feed_subscriber_lag_entries", "kdb_wal_subscriber_lag_lsn")
        ]
        depths = [
            GaugeMetricFamily(name, "Entries that wait in the send queue.", labels=labels)
            for name in ("walstream_feed_queue_entries", "kdb_wal_queue_depth")
        ]
        sizes = GaugeMetricFamily("walstream_feed_queue_bytes", "Bytes that wait in the send queue.", labels=labels)
        connected = views(self._feed)
        # By what it lacks, and by what is kept for it: who has left and may come back, and who takes everything and
        # acknowledges nothing, are those of whom somebody should hear.
        behind: dict[tuple[str, str], int] = {}
        kept = [(lag.subscriber[1:], lag.entries) for lag in self._feed.retention.lags]
        for subscriber, entries in (*kept, *(((view.tenant, view.name), view.lag_entries) for view in connected)):
            behind[subscriber] = max(entries, behind.get(subscriber, 0))
        for subscriber in nlargest(SUBSCRIBER_SERIES_MAX, behind, key=behind.__getitem__):
            for family in lags:
                family.add_metric(subscriber, behind[subscriber])
        for view in connected[:SUBSCRIBER_SERIES_MAX]:
            for family in depths:
                family.add_metric([view.tenant, view.name], view.queue_entries)
            sizes.add_metric([view.tenant, view.name], view.queue_bytes)
        yield from (*lags, *depths, sizes)

    def _reading(self) -> Iterator[Metric]:
        read = self._feed.reading.metrics
        yield _counter("walstream_feed_read_entries", "Entries decoded from the log.", read.entries_total)
        yield _counter("walstream_feed_read_bytes", "Bytes fetched from the log.", read.bytes_total)
        yield _counter("walstream_feed_cache_hits", "Chunks found in memory.", read.cache_hits_total)
        yield _counter("walstream_feed_cache_misses", "Chunks read from the log.", read.cache_misses_total)
        yield _gauge("walstream_feed_window_bytes", "Newest entries kept for all subscribers.", read.window_bytes)
        yield _gauge("walstream_feed_cache_bytes", "Chunks kept for those who catch up.", read.cache_bytes)
        yield _gauge("walstream_feed_partitions", "Partitions in the feed.", read.partitions)
        for name in ("walstream_feed_index_bytes", "kdb_wal_retention_index_bytes"):
            yield _gauge(name, "Memory that tells where an LSN is in the log.", read.index_bytes)


def views(feed: Feed) -> list[SubscriberView]:
    """Return the connected subscribers, those furthest behind first."""
    streams = defaultdict(list)
    for stream in feed.service.streams.values():
        streams[stream.demand.subscriber].append(stream)
    found = [
        SubscriberView(
            *subscriber,
            max(stream.entries_behind() for stream in theirs),
            sum(stream.queue.entries for stream in theirs),
            sum(stream.queue.size_bytes for stream in theirs),
            sum(stream.sent.entries for stream in theirs),
        )
        for subscriber, theirs in streams.items()
    ]
    return sorted(found, key=lambda view: (-view.lag_entries, view.tenant, view.name))


def health(feed: Feed) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the document."""
    failure = feed.reading.failure
    return 200, {
        "status": "degraded" if failure else "ok",
        **({"failure": failure} if failure else {}),
        "version": feed.version,
        "uptime_seconds": round(feed.uptime_seconds, 3),
        "streams": len(feed.service.streams),
        "partitions": feed.reading.metrics.partitions,
        "subscribers": [view._asdict() for view in views(feed)[:SUBSCRIBER_SERIES_MAX]],
    }


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)
