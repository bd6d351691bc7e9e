"""The numbers the core goes by, with their reasons. The configuration's `[replication]` becomes one of these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """What acks=1 waits for: the leader's own disk, or `sync_followers` followers' disks too."""

    ASYNC = "async"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """How a partition is replicated."""

    isr_lag_ms_max: int = 10_000
    """A follower that has not been at the leader's log end for this long leaves the ISR."""
    isr_lag_records_max: int = 0
    """A follower that is more records behind leaves the ISR; 0: time alone decides. A bound on what a failover loses
    of acks=1, and the seeds' bound on a queue."""
    watermark_delay_ms: int = 20
    """A high watermark that no DATA carries to a follower is sent alone after this long. With the network's and the
    loop's own delays an idle follower knows it within 50 ms."""
    retry_ms: int = 1_000
    """What is not answered (OPEN, WATERMARK, a proposal whose fate is unknown) is said again after this long."""
    data_bytes_max: int = 1 << 20
    """A DATA frame: at 1 MiB its 60 bytes of header are nothing, and a link of 1 Gbit/s is busy for 8 ms with it, so
    partitions that share the link wait no longer than that for their turn."""
    mode: Mode = Mode.ASYNC
    sync_followers: int = 1
    """In mode `sync`: how many followers must be durable before acks=1 is answered."""
    digest_records: int = 10_000
    """How many offsets one digest compares. 0: digests are off."""
    digest_pause_ms: int = 1_000
    """Between two digests of one follower's older ranges, so that proving a large log costs little at any time."""
    repair_bytes_max: int = 1 << 20
    """How much a repair asks for at a time."""
