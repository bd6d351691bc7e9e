"""What a partition's core asks for: all that a driver, or the simulator, has to be able to do.

Effects are done in the order in which they are given; those that end later are begun in that order. Each says what must
be durable before it may be acted on, and which completion it expects. Where nothing is said the effect has no
precondition (the core has already waited) and no completion. A completion is handed in always, late or not, with the
effect's token; a driver that loses one stalls the partition. Sans-IO.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from walstream.cluster.metadata import IsrProposal, NodeId
from walstream.replication.events import Range, Token
from walstream.replication.messages import Batches, PartitionMessage

# ── the network ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)  # One per frame or flush: a frozen one takes three times as long to make.
class Send:
    """Put a message on a link. Without a link it is dropped: the core hears of the link by itself.

    Whatever the message promises is durable already. Costs no credit, never waits for any; keeps its place among the
    DATA frames of the same partition (an ACCEPT must not overtake, nor be overtaken by, DATA of its session).
    """

    peer: NodeId
    message: PartitionMessage
    is_outgoing: bool


@dataclass(slots=True)  # One per frame or flush: a frozen one takes three times as long to make.
class SendData:
    """Read the log from `offset` and send one DATA frame of whole batches, as soon as the link has credit.

    At most one is open for each follower and partition, so a driver keeps those that wait for credit in one line per
    link and is fair by serving it in turn. Nothing need be durable: the leader sends what it has queued for its own
    disk, so that both syncs overlap; that is safe because nothing is acknowledged or visible before the high watermark
    covers it. The frame's high watermark and log start are the log's at the moment of sending.

    Dropped without a completion only when the link is down. Completion: `DataSent`, or `SendFailed`.
    """

    token: Token
    peer: NodeId
    epoch: int
    session: int
    offset: int
    bytes_max: int
    """A frame takes at least one batch, so a larger batch makes a larger frame."""


@dataclass(slots=True)  # One per frame or flush: a frozen one takes three times as long to make.
class ReturnCredit:
    """These bytes of DATA were not appended and are not held: grant them to the leader again.

    Every DATA that comes in leads to exactly one of `Append` (credit returns when the log lets go of the bytes, written
    or failed) and `ReturnCredit`, whatever becomes of the session: a partition that stalls cannot dry up the link.
    """

    peer: NodeId
    bytes_count: int


# ── the log ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Lead:
    """Make the log a leader's: note `epoch` from the log end on, durably; only then take appends.

    Everything queued before must be durable first. Completion: `RoleTaken`, from then on `append` is allowed;
    or `RoleFailed`.
    """

    token: Token
    epoch: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Make the log a follower's: refuse `append`, and persist `epoch` as the newest seen (not into the epoch map).

    Completion: `RoleTaken`, when the epoch is durable, or `RoleFailed`. Until then nothing is acknowledged to the
    leader. `epoch` may be one that is persisted already, and -1 before there ever was a leader.
    """

    token: Token
    epoch: int


@dataclass(frozen=True, slots=True)
class StopRole:
    """The log belongs to no role: refuse `append`, drop what waits to be sent for this partition. Reads go on."""

    token: Token


@dataclass(slots=True)  # One per frame or flush: a frozen one takes three times as long to make.
class Append:
    """Check the batches (CRC, epochs, that they continue the log) and queue them: `append_replicated`.

    `next_offset` is the log end afterwards. Durability is told by `Durable`, as for every flush. The credit of
    `credit_bytes` goes back to `peer` when the log lets go of the buffers. Completion: none, or `AppendFailed`.
    """

    token: Token
    peer: NodeId
    offset: int
    next_offset: int
    batches: Batches
    credit_bytes: int
    may_have_gaps: bool = False
    """The leader says that compaction may have left gaps between the batches."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut the log, its epoch map, producer state and high watermark back to `offset`, durably.

    Even when `offset` is the log end the epoch map loses what starts there. Completion: `Truncated`.
    """

    token: Token
    offset: int


@dataclass(frozen=True, slots=True)
class ResetLog:
    """Empty the log, epoch map and all, durably; it begins at `log_start`. Completion: `Truncated`.

    If it, or a truncation, fails, the log is offline and `LogFailed` tells so.
    """

    token: Token
    log_start: int


@dataclass(frozen=True, slots=True)
class TrimLog:
    """The leader's log starts at `log_start` now: followers keep no more than it does. Need not be synced."""

    log_start: int


@dataclass(slots=True)  # One per frame or flush: a frozen one takes three times as long to make.
class SetHighWatermark:
    """Everything below `offset` is committed: wake who waits for it. Never below an earlier one of the same role.

    Kept as a hint with `epoch`, durably every now and then; nothing depends on the hint being new.
    """

    offset: int
    epoch: int
    is_settled: bool
    """A new leader learns where its predecessor's high watermark was when its own passes its epoch's start. Until then
    (False) ListOffsets is answered with OFFSET_NOT_AVAILABLE, or a reader would see the end of the log move back."""


@dataclass(frozen=True, slots=True)
class SetFollowersDurable:
    """In mode `sync`: `sync_followers` followers hold everything below `offset` durably. For acks=1."""

    offset: int


class Failing(StrEnum):
    """Who waits in vain."""

    NOT_LEADER = "not leader"
    """The role has ended: everybody who waits, for durability or for the high watermark."""
    NOT_ENOUGH_REPLICAS = "not enough replicas"
    """The ISR has shrunk below `min_isr` since the append: who waits for the high watermark
    (NOT_ENOUGH_REPLICAS_AFTER_APPEND). What is durable here stays acknowledged to acks=1."""


@dataclass(frozen=True, slots=True)
class FailWaiters:
    """Tell those who wait for offsets of this partition that it will not be, or not now."""

    why: Failing


# ── equality and repair ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ComputeDigest:
    """Compute `log.digest(start, end)` on a thread. Everything below `end` is durable. Completion: `DigestComputed`.

    At most one is open for each peer.
    """

    token: Token
    request: int
    start: int
    end: int
    is_verified: bool = False
    """Read and check the whole range before: if any of it is damaged the digest is void, and the damage is told. A
    leader asks for it before it calls a follower's copy wrong."""


@dataclass(frozen=True, slots=True)
class ReadForRepair:
    """Read verified batches that cover [start, end) for a peer, on a thread. Completion: `RangeRead`."""

    token: Token
    peer: NodeId
    request: int
    start: int
    end: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class InstallRepair:
    """Check the batches (CRC; epochs by the own epoch map; they fill [start, next_offset)) and write them in place.

    Completion: `RepairDone`, durable, with what is still damaged; also when the batches were not right.
    """

    token: Token
    start: int
    next_offset: int
    batches: Batches


# ── the cluster ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask the metadata service for another ISR. At most one is open. Completion: `ProposalAnswered`.

    After Refusal.UNKNOWN the core proposes the very same again, after a while.
    """

    token: Token
    proposal: IsrProposal


@dataclass(frozen=True, slots=True)
class RefreshMetadata:
    """A peer knows a newer epoch, or another leader, than this node: read the record and tell `MetadataChanged`."""

    epoch: int
    """The newest epoch heard of."""


@dataclass(frozen=True, slots=True)
class Resign:
    """This leader cannot serve (it is not in the ISR; it lost bytes; nobody has the batch it lacks): elect another."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The copy must not be used, changed or elected until an operator has looked: shout. Lifted: `QuarantineLifted`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Healed:
    """A replica that had lost bytes holds everything committed again: forget `is_unclean`, durably, by and by."""


@dataclass(frozen=True, slots=True)
class Report:
    """A change worth a line in the log and a count in the metrics: a constant phrase and its fields.

    Fields are plain numbers and strings, in a fixed order.
    """

    phrase: str
    fields: tuple[tuple[str, int | str], ...] = ()
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class SetDamaged:
    """These ranges of the own copy are damaged now; () when all is well. For elections and the metrics."""

    damaged: tuple[Range, ...]


Effect: TypeAlias = (
    Send
    | SendData
    | ReturnCredit
    | Lead
    | Follow
    | StopRole
    | Append
    | Truncate
    | ResetLog
    | TrimLog
    | SetHighWatermark
    | SetFollowersDurable
    | FailWaiters
    | ComputeDigest
    | ReadForRepair
    | InstallRepair
    | Propose
    | RefreshMetadata
    | Resign
    | Quarantine
    | Healed
    | Report
    | SetDamaged
)
