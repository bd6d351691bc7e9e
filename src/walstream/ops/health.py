"""Health: one JSON document that says whether the node is well and, if not, what is wrong with which partition.

In a cluster it also says how replication goes; a node that is well with followers that are not is degraded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from walstream.log.store import LogStore
from walstream.ops import replication

if TYPE_CHECKING:
    from walstream.node.replicas import Replicas

DETAILS_MAX = 100
"""Partitions that are named; with more unwell than this the counts say enough."""


CLUSTER_FAULTS = (
    "partitions_under_replicated",
    "partitions_below_min_isr",
    "partitions_leaderless",
    "partitions_quarantined",
)


class Source(Protocol):
    """What health reads of a node."""

    store: LogStore
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


def health(source: Source) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the document: 200 also when degraded, because a degraded node still serves."""
    store = source.store
    partitions = store.partitions.values()
    offline = [
        {"partition": partition.name, "reason": str(partition.write_error)}
        for partition in partitions
        if partition.write_error is not None
    ]
    quarantined = [
        {"partition": partition.name, "offsets": [[start, end - 1] for start, end in partition.damaged]}
        for partition in partitions
        if partition.damaged
    ]
    replicated = None if source.replicas is None else replication.document(source.replicas)
    is_behind = replicated is not None and any(replicated[name] for name in CLUSTER_FAULTS)
    is_file_current = store.catalogue.is_file_current
    return 200, {
        "status": "degraded" if offline or quarantined or is_behind or store.is_full or not is_file_current else "ok",
        "version": source.version,
        "epoch": store.epoch,
        "uptime_seconds": round(source.uptime_seconds, 3),
        "connections": source.connection_count,
        "partitions": len(partitions),
        "partitions_offline": len(offline),
        "partitions_quarantined": len(quarantined),
        "disk": {
            "full": store.is_full,
            "free_bytes": store.free_bytes,
            "writes_resume_at_free_bytes": store.resume_bytes,
        },
        "catalogue": {"version": store.catalogue.version, "file_current": is_file_current},
        "offline": offline[:DETAILS_MAX],
        "quarantined": quarantined[:DETAILS_MAX],
        **({} if replicated is None else {"replication": replicated}),
    }
