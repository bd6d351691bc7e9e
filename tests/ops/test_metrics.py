"""Metrics and health of a real node."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from kio.schema.api_versions.v0.request import ApiVersionsRequest
from prometheus_client.parser import text_string_to_metric_families

from node.running import Client, batch_of, running_node
from walstream.cli.status import _fault
from walstream.cluster.local import NewTopic
from walstream.errors import SyncFailed
from walstream.node.server import Node
from walstream.ops import metrics
from walstream.ops.health import health
from walstream.ops.metrics import Timing


async def page(node: Node, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.http_port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    body = (await reader.read()).split(b"\r\n\r\n", 1)[1].decode()
    writer.transport.abort()
    return body


def samples(text: str) -> dict[str, Any]:
    return {
        sample.name
        + "".join(
            f"{{{value}}}" for _, value in sorted(sample.labels.items()) if "_bucket" not in sample.name
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_timing_counts_into_buckets() -> None:
    timing = Timing()
    for seconds in (0.0001, 0.0005, 0.003, 99.0):
        timing.observe(seconds)
    buckets = dict(timing.buckets())
    assert (buckets["0.0005"], buckets["0.001"], buckets["0.005"], buckets["10.0"], buckets["+Inf"]) == (2, 2, 3, 3, 4)
    assert timing.count == 4


async def test_the_metrics_of_a_node(tmp_path: Path) -> None:
    async with running_node(tmp_path, node__http_listen="127.0.0.1:0") as node:
        node.store.create_topics([NewTopic("t", 2, {})])
        batch = batch_of(b"a", b"b")
        partition = node.store.partition("t", 1)
        partition.append(memoryview(batch), now_ms=node.now_ms())  # type: ignore[arg-type]
        durable = asyncio.get_running_loop().create_future()
        partition.when_visible(1, durable.set_result)
        await durable
        client = await Client.connect(node)
        await client.ask(ApiVersionsRequest())
        node.metrics.count_errors([3, 3, 42])
        found = samples(await page(node, "/metrics"))
        client.close()
        assert found["walstream_connections"] == 1
        assert found["walstream_partitions"] == 2
        assert found["walstream_partition_high_watermark{1}{t}"] == 2
        assert found["walstream_partition_size_bytes{1}{t}"] == len(batch)
        assert found["walstream_flush_batches_total"] == 1
        assert found["walstream_request_duration_seconds_count{ApiVersions}"] == 1
        assert found["walstream_request_errors_total{3}"] == 2
        assert found["walstream_epoch"] == 1


async def test_every_metric_has_a_prefix_a_description_and_a_base_unit(tmp_path: Path) -> None:
    async with running_node(tmp_path, node__http_listen="127.0.0.1:0") as node:
        for family in text_string_to_metric_families(await page(node, "/metrics")):
            assert re.fullmatch(r"walstream_[a-z_]+", family.name), family.name
            assert family.documentation.endswith("."), family.name
            assert not re.search(r"_(ms|millis|kb|mb|minutes)\b", family.name), family.name


async def test_many_partitions_have_only_sums(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "PARTITION_SERIES_MAX", 1)
    async with running_node(tmp_path, node__http_listen="127.0.0.1:0") as node:
        node.store.create_topics([NewTopic("t", 2, {})])
        text = await page(node, "/metrics")
        assert "walstream_log_size_bytes" in text
        assert "walstream_partition_high_watermark" not in text


async def test_health_names_what_is_unwell(tmp_path: Path) -> None:
    async with running_node(tmp_path, node__http_listen="127.0.0.1:0") as node:
        node.store.create_topics([NewTopic("t", 3, {})])
        well = json.loads(await page(node, "/health"))
        assert (well["status"], well["partitions"], well["offline"], well["epoch"]) == ("ok", 3, [], 1)
        node.store.partition("t", 0).write_error = SyncFailed("The disk is gone.", "Look at it.")
        node.store.partition("t", 2).damaged.append((5, 8))
        unwell = json.loads(await page(node, "/health"))
        assert unwell["status"] == "degraded"
        assert unwell["offline"] == [{"partition": "t-0", "reason": "The disk is gone. Look at it."}]
        assert unwell["quarantined"] == [{"partition": "t-2", "offsets": [[5, 7]]}]
        node.store.partition("t", 0).write_error = None
        node.store.partition("t", 2).damaged.clear()
        node.catalogue.is_file_current = False
        _, unwell = health(node)
        assert (unwell["status"], unwell["catalogue"]) == ("degraded", {"version": 1, "file_current": False})
        assert "topics.json" in str(_fault(unwell))
