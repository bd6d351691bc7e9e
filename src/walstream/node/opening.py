"""From the configuration to an open log: which setting goes where.

Knows the names on both sides and nothing else, so that the log needs no configuration and the server no list of its
settings. Opening recovers the log and therefore takes the time that recovery takes.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from walstream import logs
from walstream.cluster.local import ANY_PRODUCER_ID, Catalogue
from walstream.cluster.static import producer_ids
from walstream.config import Config, LimitsConfig
from walstream.log.disk import OsDisk
from walstream.log.driver import ThreadDriver
from walstream.log.segment import OPEN_FILES_MAX
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore
from walstream.node.turns import Turns

log = logs.get(__name__)

FILES_RESERVED = 256
"""File descriptors for the journal, other nodes, the HTTP endpoint, files being sent and the process itself."""

FILES_PER_SEGMENT = 3
"""A segment's file can be open as the one in use, as one behind the journal, and as one that is being synced."""


def open_log(config: Config, folder: Path, turns: Turns) -> tuple[Catalogue, LogStore]:
    """Open the catalogue and the log of a folder that is locked, to be used in turns of the loop."""
    disk = OsDisk(reserve=folder / "reserve")
    cluster, node_id = config.replication, config.node.node_id
    catalogue = Catalogue(
        disk,
        folder,
        node_id=node_id,
        defaults=topic_defaults(config),
        founds_cluster=not cluster.is_cluster or cluster.controller == node_id,
        producer_ids=producer_ids(node_id, now_ms()) if cluster.is_cluster else ANY_PRODUCER_ID,
    )
    store = LogStore(
        disk,
        folder,
        catalogue,
        ThreadDriver(turns.post, turns.mark_writes, _end),
        now_ms,
        monotonic_ms,
        journal_bytes_max=config.log.journal_bytes_max,
        checkpoint_interval_ms=config.log.checkpoint_interval_ms,
        retention_interval_ms=config.log.retention_check_interval_ms,
        open_files_max=segment_files_max(config.limits),
        compaction_keys_max=config.log.compaction_keys_max,
        producers_max=config.limits.producers_per_partition_max,
        producer_expiry_ms=config.limits.producer_expiry_ms,
        replicated=cluster.is_cluster,
        # Alone there is nobody to fetch a rotten batch from, and reads find it early enough.
        scrub_bytes_per_s=cluster.scrub_bytes_per_s if cluster.is_cluster else 0,
        scrub_interval_s=cluster.scrub_interval_ms // 1000,
    )
    return catalogue, store


def files_wanted(limits: LimitsConfig) -> int:
    """Return how many file descriptors let every partition keep its file open beside all connections."""
    return limits.connections_max + FILES_RESERVED + FILES_PER_SEGMENT * (limits.partitions_max + OPEN_FILES_MAX)


def segment_files_max(limits: LimitsConfig) -> int:
    """Return how many segments may be open at once under the process's limit of file descriptors.

    Where the limit leaves nothing beside the connections that are allowed, a part of it: there may be fewer of them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = files_wanted(limits) if limit == resource.RLIM_INFINITY else limit
    return max((limit - limits.connections_max - FILES_RESERVED) // FILES_PER_SEGMENT, limit // 8, 1)


def topic_defaults(config: Config) -> TopicSettings:
    """Return the settings of topics that set nothing themselves."""
    return TopicSettings(
        retention_ms=config.log.retention_ms,
        retention_bytes=config.log.retention_bytes,
        segment_bytes=config.log.segment_bytes,
        segment_ms=config.log.segment_ms,
        batch_bytes_max=config.log.message_bytes_max,
        min_isr=config.replication.min_isr if config.replication.is_cluster else 1,
    )


def _end(error: Exception) -> None:
    """End the process: the thread that makes writes durable has failed, and no write would be answered any more."""
    log.critical("flush thread failed, node exiting", error=repr(error), exc_info=error)
    os._exit(1)


def now_ms() -> int:
    """Return the wall clock in milliseconds."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Return the monotonic clock in milliseconds."""
    return time.monotonic_ns() // 1_000_000
