"""DescribeCluster and DescribeLogDirs: the nodes there are, and this one's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from walstream.errors import InvalidRequest
from walstream.node.api.answers import OPERATIONS_UNASKED, cluster_operations
from walstream.node.context import Context
from walstream.node.wire import Message, Reply

BROKERS = 1


class Usage(NamedTuple):
    """How much the disk holds."""

    total_bytes: int
    used_bytes: int
    free_bytes: int


async def describe_cluster(context: Context, request: Message) -> Reply:
    """Describe the cluster: its nodes, and which of them changes topics."""
    if request.endpoint_type != BROKERS:
        raise InvalidRequest("There are no separate controllers.", "Ask for brokers.")
    catalogue = context.node.catalogue
    wants_operations = request.include_cluster_authorized_operations
    return {
        "cluster_id": catalogue.cluster_id,
        "controller_id": context.node.placement.controller_id,
        "brokers": [{"broker_id": one.id, "host": one.host, "port": one.port} for one in context.brokers.values()],
        "cluster_authorized_operations": cluster_operations(context) if wants_operations else OPERATIONS_UNASKED,
    }


def _measure(data: str) -> tuple[str, Usage]:
    folder = Path(data).resolve()
    return str(folder), Usage(*shutil.disk_usage(folder))


async def describe_log_dirs(context: Context, request: Message) -> Reply:
    """Say how much the partitions take on disk."""
    context.authorize("describe", "cluster")
    node = context.node
    if request.topics is None:
        keys = list(node.store.partitions)
    else:
        asked = ((topic.topic, index) for topic in request.topics for index in topic.partitions)
        keys = [key for key in dict.fromkeys(asked) if key in node.store.partitions]
    topics: dict[str, list[Reply]] = {}
    for name, index in keys:
        size_bytes = node.store.partitions[name, index].size_bytes
        topics.setdefault(name, []).append({"partition_index": index, "partition_size": size_bytes})
    folder, usage = await context.in_thread(_measure, node.config.node.data)
    return {
        "results": [
            {
                "log_dir": folder,
                "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
                "total_bytes": usage.total_bytes,
                "usable_bytes": usage.free_bytes,
            }
        ]
    }
