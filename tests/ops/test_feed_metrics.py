"""The feed's metrics: their names, RFC-010's beside them, bounded series; and the alert rules that use them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from feed.frames import Written
from feed.memory import MemoryLog, Served, served
from walstream.feed.service.retention import Lag
from walstream.feed.service.watermarks import Subscriber
from walstream.ops import feed as feed_metrics
from walstream.ops.feed import FeedExporter, health
from walstream.positions import GlobalLsn

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "deploy" / "feed-alerts.yml").read_text(encoding="utf-8")
BASE = int(GlobalLsn.at_time(1_700_000_000_000))


def exporter(feed: Served) -> FeedExporter:
    return FeedExporter(view(feed))


def view(feed: Served) -> Any:
    """What a Feed is to its exporter, on a log in memory."""
    return SimpleNamespace(
        version="1",
        uptime_seconds=1.0,
        config=SimpleNamespace(feed=feed.service.config),
        service=feed.service,
        reading=feed.log,
        marks=feed.service.marks,
        retention=SimpleNamespace(safe_point_ms=5000, lapsed=0, lags=[]),
    )


def samples(text: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels.get("subscriber_id", "")] = sample.value
    return found


async def log_of(count: int) -> MemoryLog:
    log = MemoryLog()
    await log.append(*(Written(BASE + number) for number in range(count)))
    return log


async def test_the_names_of_the_rfc_are_beside_ours(tmp_path: Path) -> None:
    async with served(tmp_path, await log_of(50)) as feed:
        call = feed.subscribe(start_lsn="oldest", subscriber_id="billing", credit_entries=10)
        await call.read()
        found = samples(exporter(feed).render().decode())
        for ours, theirs in (
            ("walstream_feed_subscriber_lag_entries", "kdb_wal_subscriber_lag_lsn"),
            ("walstream_feed_queue_entries", "kdb_wal_queue_depth"),
            ("walstream_feed_sent_bytes_total", "kdb_wal_bytes_sent_total"),
            ("walstream_feed_index_bytes", "kdb_wal_retention_index_bytes"),
        ):
            assert found[ours] == found[theirs]
        assert found["kdb_wal_subscriber_lag_lsn"] == {"billing": 40.0}
        assert found["walstream_feed_sent_entries_total"] == {"": 10.0}
        assert found["kdb_wal_bytes_sent_total"][""] > 0


async def test_series_are_bounded_and_the_slowest_have_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_metrics, "SUBSCRIBER_SERIES_MAX", 3)
    async with served(tmp_path, await log_of(50)) as feed:
        calls = [feed.subscribe(start_lsn="oldest", subscriber_id=f"s{n}", credit_entries=n) for n in range(1, 9)]
        for call in calls:
            await call.read()
        found = samples(exporter(feed).render().decode())
        assert found["kdb_wal_subscriber_lag_lsn"] == {"s1": 49.0, "s2": 48.0, "s3": 47.0}
        assert found["walstream_feed_streams"] == {"": 8.0}


async def test_one_that_has_left_or_acknowledges_nothing_is_still_behind(tmp_path: Path) -> None:
    """What the log keeps for it grows all the while: that is when the alert has to come."""
    async with served(tmp_path, await log_of(50)) as feed:
        call = feed.subscribe(start_lsn="oldest", subscriber_id="here", credit_entries=10)
        await call.read()
        whole = view(feed)
        silent = feed.subscribe(start_lsn="oldest", subscriber_id="silent")
        await silent.read()
        for name, entries in (("gone", 2_000_000), ("here", 7), ("silent", 3_000_000)):
            whole.retention.lags.append(Lag(Subscriber("admin", "", name), entries, 0))
        found = samples(FeedExporter(whole).render().decode())
        assert found["kdb_wal_subscriber_lag_lsn"] == {"gone": 2_000_000.0, "here": 40.0, "silent": 3_000_000.0}
        assert found["walstream_feed_subscriber_lag_entries"] == found["kdb_wal_subscriber_lag_lsn"]
        assert set(found["kdb_wal_queue_depth"]) == {"here", "silent"}


async def test_nobody_can_be_taken_for_a_tenants_subscriber(tmp_path: Path) -> None:
    """Names are chosen by clients: an admin's may look like a tenant and a name, and so may a tenant."""
    log = MemoryLog()
    await log.append(*(Written(BASE + number, tenant=("acme", "acme/ann")[number % 2]) for number in range(50)))
    async with served(tmp_path, log) as feed:
        subscribers = [("", "acme/ann"), ("acme", "ann"), ("acme/ann", "x"), ("acme", "ann/x")]
        for credit, (tenant, name) in enumerate(subscribers):
            claims = {"role": "replication", "tenant": tenant} if tenant else {"role": "admin", "tenant": None}
            metadata = feed.metadata(sub="somebody", **claims)
            call = feed.subscribe(metadata, start_lsn="oldest", subscriber_id=name, credit_entries=credit + 1)
            await call.read()
        whole = view(feed)
        whole.retention.lags.append(Lag(Subscriber("replication", "acme", "gone"), 70, 0))
        text = FeedExporter(whole).render().decode()
        found = {
            (sample.name, sample.labels["tenant"], sample.labels["subscriber_id"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "subscriber_id" in sample.labels
        }
        lags = {key[1:]: value for key, value in found.items() if key[0] == "walstream_feed_subscriber_lag_entries"}
        connected = set(subscribers)
        assert set(lags) == connected | {("acme", "gone")}
        assert len(set(lags.values())) == len(lags), "each has its own"
        for name in ("walstream_feed_queue_entries", "walstream_feed_queue_bytes", "kdb_wal_queue_depth"):
            assert {key[1:] for key in found if key[0] == name} == connected
        told = {(one["role"], one["tenant"], one["name"]) for one in health(whole)[1]["subscribers"]}
        assert told == {("replication" if tenant else "admin", tenant, name) for tenant, name in connected}


async def test_the_rules_name_metrics_that_exist(tmp_path: Path) -> None:
    async with served(tmp_path, await log_of(1)) as feed:
        await feed.subscribe(start_lsn="oldest").read()
        known = samples(exporter(feed).render().decode())
    used = set(re.findall(r"\b(?:kdb_wal|walstream)_[a-z_]+", " ".join(re.findall(r"expr: (.*)", RULES))))
    assert len(used) >= 2
    assert used <= set(known)


def test_the_rule_of_the_rfc_is_as_it_says() -> None:
    lag = "walstream_feed_subscriber_lag_entries"  # kdb_wal_subscriber_lag_lsn, by our name
    assert re.search(rf"expr: {lag} > 1000000\n +for: 5m\n +labels:\n +severity: warning", RULES)


async def test_health(tmp_path: Path) -> None:
    async with served(tmp_path, await log_of(5)) as feed:
        await feed.subscribe(start_lsn="oldest", subscriber_id="billing").read()
        status, document = health(view(feed))
        assert (status, document["status"], document["streams"]) == (200, "ok", 1)
        assert document["subscribers"][0]["name"] == "billing"
        feed.log.failure = "the log does not answer"
        assert health(view(feed))[1]["status"] == "degraded"
