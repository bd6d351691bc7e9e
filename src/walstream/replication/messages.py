"""Protocol version 2 as values: what a leader and a follower say to each other about one partition, and about the link.

Owns the meaning of each message; their bytes are `wire`'s. The leader connects to the follower; everything about all
partitions that one node leads and the other follows goes over that one connection.

    leader                                            follower
    OPEN epoch, session, log start, hw        ──▶     persists the epoch, waits until its log is flushed
                                              ◀──     STATE epoch, durable end, last epoch, log start
    DIVERGING (E, O) | RESET (log start)      ──▶     cuts its log back, durably
                                              ◀──     STATE again
    ACCEPT from                               ──▶
    DATA … DATA … DATA                        ──▶     appends in order, syncs
                                              ◀──     PROGRESS durable end
    WATERMARK when idle                       ──▶
                                              ◀──     PROGRESS, as the answer

Every message about a partition carries the leader's epoch and the session. (epoch, session) is never used twice: the
epoch belongs to one life of one leader, and within it the leader counts sessions up, from 1, for each follower. A
message of another epoch or session is late, and is dropped, except an OPEN that is newer. A follower that can make
nothing of a message of its session (a gap, an overlap) says RESYNC, and the leader opens the next session.

Only DATA costs credit. Everything else is small and bounded (a repair is asked for one range at a time, `bytes_max` of
it), and must never wait for credit: or a full pipe could not be told to empty. Sans-IO.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TypeAlias

from walstream.cluster.metadata import PartitionKey

Buffer: TypeAlias = bytes | bytearray | memoryview
Batches: TypeAlias = tuple[Buffer, ...]
"""Whole record batches, one after the other; a buffer holds one or several, and no batch is split over two."""


class ReplicaFlag(IntFlag):
    """What a follower admits about its copy. Either keeps it out of the ISR."""

    NONE = 0
    UNCLEAN = 1
    """At its start it found less than it had made durable: a new disk, or a disk that lied. Cleared once it has been
    accepted by a leader and has caught up."""
    DAMAGED = 2
    """Bytes of its log fail their checksum. Cleared when they are repaired."""


class Why(IntEnum):
    """Why an OPEN, or a session, is refused."""

    FENCED = 1
    """The follower knows a newer epoch (`known_epoch`): the leader has been replaced and should step down."""
    NOT_LEADER = 2
    """The sender of the session is not, or no longer, the leader; said by a former leader to a follower."""
    UNKNOWN_PARTITION = 3
    """The follower has no such partition (yet: the catalogue may be on its way)."""
    NOT_READY = 4
    """The follower's log takes no writes now: it is recovering, full or failed. Try again later."""
    QUARANTINED = 5
    """Following this leader would cut off what was committed. An operator must look."""
    SAME_EPOCH = 6
    """Two nodes claim to lead in this epoch, which must never be."""


@dataclass(frozen=True, slots=True)
class Open:
    """Leader: begin a session. Repeated with the next number until a STATE of this session comes."""

    partition: PartitionKey
    epoch: int
    session: int
    log_start: int
    log_end: int
    high_watermark: int
    epoch_start: int
    """Where this leader's epoch begins."""
    unclean_epoch: int
    """See `PartitionState.unclean_epoch`; -1 for none."""


@dataclass(frozen=True, slots=True)
class State:
    """Follower: what it holds. Sent only after `epoch` is persisted and everything appended before is durable."""

    partition: PartitionKey
    epoch: int
    session: int
    log_start: int
    log_end: int
    """Durable."""
    last_epoch: int
    """The epoch of its last batch, by its epoch map; -1 for an empty one."""
    high_watermark: int
    flags: ReplicaFlag


@dataclass(frozen=True, slots=True)
class Accept:
    """Leader: the follower's log is a prefix of its own, by the epochs. Data follows from `offset`, its log end."""

    partition: PartitionKey
    epoch: int
    session: int
    offset: int


@dataclass(frozen=True, slots=True)
class Diverging:
    """Leader: of the follower's last epoch, or the largest one before it (`end_epoch`), it has only `end_offset`."""

    partition: PartitionKey
    epoch: int
    session: int
    end_epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Leader: nothing the follower holds is of use; it shall empty its log and begin at `log_start`."""

    partition: PartitionKey
    epoch: int
    session: int
    log_start: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """Leader: the follower's copy differs from `offset` on, though the epochs agree. Cut it off and say STATE again.

    Sent only when the follower is in neither the ISR nor a pending one. If `offset` is the leader's log start: RESET.
    """

    partition: PartitionKey
    epoch: int
    session: int
    offset: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Either side: this session is not, or no longer, possible."""

    partition: PartitionKey
    epoch: int
    session: int
    why: Why
    known_epoch: int
    """The newest epoch the sender knows."""


@dataclass(slots=True)  # Nobody changes it either; a frozen one takes three times as long to make.
class Data:
    """Leader: the batches of [offset, next_offset). In a compacted log the first may begin after `offset`."""

    partition: PartitionKey
    epoch: int
    session: int
    high_watermark: int
    log_start: int
    offset: int
    """Where the frame before it ended: continuity is judged by this and not by the batches."""
    next_offset: int
    batches: Batches
    may_have_gaps: bool = False
    """Compaction may have left gaps between these batches, whatever the topic's settings say now."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """Leader: what DATA would say, when there is none; within `watermark_delay_ms`. Answered with a PROGRESS."""

    partition: PartitionKey
    epoch: int
    session: int
    high_watermark: int
    log_start: int
    next_offset: int
    """Where the next DATA will begin: a follower that expects less has missed one, and says RESYNC."""


@dataclass(slots=True)  # Nobody changes it either; a frozen one takes three times as long to make.
class Progress:
    """Follower: everything below `durable_end` is on its own disk. Sent after its own fsync, never before."""

    partition: PartitionKey
    epoch: int
    session: int
    durable_end: int
    high_watermark: int
    """The one it knows, so that the leader need not repeat itself."""
    flags: ReplicaFlag


@dataclass(frozen=True, slots=True)
class Resync:
    """Follower: a gap or an overlap at `offset`, the end of what it has; or its log failed. Open a new session."""

    partition: PartitionKey
    epoch: int
    session: int
    offset: int


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Leader: what is the digest of the batches whose base offset lies in [start, end)?"""

    partition: PartitionKey
    epoch: int
    session: int
    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DigestAnswer:
    """Follower: the digest, as `log.digest` gives it."""

    partition: PartitionKey
    epoch: int
    session: int
    request: int
    valid_from: int
    """Below this offset its log was compacted, or has no more data, or is damaged. Above `start`: `value` is void."""
    value: bytes


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """Either side: send the batches that cover [start, end), from the first; the own ones are damaged."""

    partition: PartitionKey
    epoch: int
    session: int
    request: int
    start: int
    end: int
    bytes_max: int
    """At least one batch is sent whatever this says."""


@dataclass(frozen=True, slots=True)
class RepairData:
    """Either side: what was asked for, from `start` on, perhaps less than all of it; empty: it does not have them."""

    partition: PartitionKey
    epoch: int
    session: int
    request: int
    start: int
    next_offset: int
    batches: Batches


# ── about the link itself ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Credit:
    """Follower: the leader may send DATA until the batches of this link, together, are `limit_bytes`.

    A sum and not a difference, so that a repeated grant grants nothing and a lost one is made good by the next. See
    `wire.credit`.
    """

    limit_bytes: int


@dataclass(frozen=True, slots=True)
class CreditNeeded:
    """Leader: the next DATA takes `bytes_count`, and there is credit for less. A CREDIT answers it when there is room.

    So a follower need not grant every few bytes, and a batch larger than its window still gets through.
    """

    bytes_count: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Either side: alive. Answered with the same time."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """Either side: the heartbeat's time, back."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The controller of a static cluster: all topics there are, as encoded by `cluster.static`."""

    version: int
    body: bytes


@dataclass(frozen=True, slots=True)
class CatalogueAck:
    """A follower: it has this catalogue, durably."""

    version: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Either side, before it closes the link: why, in a sentence."""

    code: int
    text: str


FromLeader: TypeAlias = (
    Open | Accept | Diverging | Reset | Rewind | Refused | Data | Watermark | DigestRequest | RepairRequest | RepairData
)
FromFollower: TypeAlias = State | Refused | Progress | Resync | DigestAnswer | RepairRequest | RepairData
PartitionMessage: TypeAlias = FromLeader | FromFollower
LinkMessage: TypeAlias = Credit | CreditNeeded | Heartbeat | HeartbeatAck | Catalogue | CatalogueAck | Failure
Message: TypeAlias = PartitionMessage | LinkMessage
