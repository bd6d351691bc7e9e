"""The Kafka APIs that the node offers: one table, one row per API, one file per family beside it.

What is not in the table is not advertised and not answered; transactions are the notable absence. A version range is
what has a schema and the handler understands; the codec's tests run over every version named here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from walstream.node.api import (
    cluster,
    configs,
    fetch,
    groups,
    metadata,
    offsets,
    produce,
    producer_ids,
    sasl,
    topics,
    versions,
)
from walstream.node.schemas import schema
from walstream.node.wire import Buffer, Reply, Source

Handler = Callable[[Any, Any], Awaitable[Reply]]
Answer = Callable[[Any, Source], Awaitable[list[Buffer]]]


@dataclass(frozen=True, slots=True)
class Api:
    """One API: its key, its name, the versions offered, and what handles it."""

    key: int
    name: str
    min_version: int
    max_version: int
    handler: Handler | None = None
    answer: Answer | None = None
    """In place of `handler`, for an API that frames its bodies by hand; `flexible_from` is then the first version
    whose header carries tags."""
    flexible_from: int = 0
    waits: bool = False
    """Whether a request may wait for something that never happens, so that a stopping node does not wait for it."""

    def refuse(self, version: int, code: int, message: str) -> Reply | None:
        """Return the response that refuses a whole request; None where this version has no place for a code."""
        response = schema(self.key, "response")[version]
        if "error_code" not in response.present:
            return None
        return {"error_code": code} | ({"error_message": message} if "error_message" in response.defaults else {})


_ROWS = (
    Api(0, "Produce", 3, 11),
    Api(1, "Fetch", 4, 16, answer=fetch.fetch, flexible_from=fetch.FLEXIBLE_FROM, waits=True),
    Api(2, "ListOffsets", 1, 9, offsets.list_offsets),
    Api(3, "Metadata", 0, 13, metadata.metadata),
    Api(8, "OffsetCommit", 2, 9, groups.offset_commit),
    Api(9, "OffsetFetch", 1, 9, groups.offset_fetch),
    Api(10, "FindCoordinator", 0, 6, groups.find_coordinator),
    Api(11, "JoinGroup", 0, 9, groups.join_group),
    Api(12, "Heartbeat", 0, 4, groups.heartbeat),
    Api(13, "LeaveGroup", 0, 5, groups.leave_group),
    Api(14, "SyncGroup", 0, 5, groups.sync_group),
    Api(15, "DescribeGroups", 0, 5, groups.describe_groups),
    Api(16, "ListGroups", 0, 5, groups.list_groups),
    Api(17, "SaslHandshake", 0, 1, sasl.sasl_handshake),
    Api(18, "ApiVersions", 0, 4, versions.api_versions),
    Api(19, "CreateTopics", 2, 7, topics.create_topics),
    Api(20, "DeleteTopics", 1, 6, topics.delete_topics),
    Api(21, "DeleteRecords", 0, 2, topics.delete_records),
    Api(22, "InitProducerId", 0, 5, producer_ids.init_producer_id),
    Api(23, "OffsetForLeaderEpoch", 2, 4, offsets.offset_for_leader_epoch),
    Api(32, "DescribeConfigs", 1, 4, configs.describe_configs),
    Api(33, "AlterConfigs", 0, 2, configs.alter_configs),
    Api(35, "DescribeLogDirs", 1, 4, cluster.describe_log_dirs),
    Api(36, "SaslAuthenticate", 0, 2, sasl.sasl_authenticate),
    Api(37, "CreatePartitions", 0, 3, topics.create_partitions),
    Api(42, "DeleteGroups", 0, 2, groups.delete_groups),
    Api(44, "IncrementalAlterConfigs", 0, 1, configs.incremental_alter_configs),
    Api(47, "OffsetDelete", 0, 0, groups.offset_delete),
    Api(60, "DescribeCluster", 0, 2, cluster.describe_cluster),
)

APIS: dict[int, Api] = {api.key: api for api in _ROWS}

__all__ = ["APIS", "Api", "produce"]
