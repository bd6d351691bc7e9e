"""What a partition's core takes: everything that can happen to a replica.

The core is `manager.Manager`, one per partition: `handle(event, now_ms)` takes one of these and returns effects. It
reads the offsets of its log through `LogView` when it handles an event; the log itself is changed by effects alone.

Completions. An effect that ends later carries a `Token`, and so does the event that tells of its end. The token has
the generation of the role and the count of truncations at the time of the effect: a completion of another role, or
from before a truncation, is dropped by the core. The driver therefore hands every completion in, however late, and
never has to know whether it still counts. Sans-IO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from walstream.cluster.metadata import NodeId, Outcome, PartitionState
from walstream.replication.messages import Batches, PartitionMessage


class Token(NamedTuple):
    """To which role, and to which truncation of the log, an effect and its completion belong."""

    generation: int
    truncations: int


class Epochs(Protocol):
    """What the core asks an epoch map (`log.epochs.EpochMap`)."""

    @property
    def last_epoch(self) -> int:
        """The newest epoch, or -1."""

    def epoch_at(self, offset: int) -> int:
        """Return the epoch that wrote an offset, or -1."""

    def end_offset_for(self, epoch: int, log_end: int) -> tuple[int, int]:
        """Return the largest epoch that is not above `epoch`, and where it ends."""

    def to_list(self) -> list[list[int]]:
        """Return pairs of epoch and start, rising."""


class LogView(Protocol):
    """The log of the partition as the core sees it: offsets, all of them as of now. `PartitionLog` is one.

    `log_start` ≤ `high_watermark` ≤ `durable_end` ≤ `log_end`. The epoch map holds the epochs of batches, and of this
    node's own time as leader, but not the epochs that it only heard of as a follower.
    """

    @property
    def log_start(self) -> int:
        """The first offset that is kept."""

    @property
    def log_end(self) -> int:
        """The next offset to be appended: batches that wait for the disk are below it."""

    @property
    def durable_end(self) -> int:
        """Everything below it is fsynced."""

    @property
    def high_watermark(self) -> int:
        """Everything below it is visible."""

    @property
    def epochs(self) -> Epochs:
        """From which offset on each leader wrote."""

    @property
    def cleaned_until(self) -> int:
        """Compaction may have removed records below this offset."""

    @property
    def is_held(self) -> bool:
        """Whether it is being cut: until that is done its offsets are the new ones, and its epochs the old ones."""


Range: TypeAlias = tuple[int, int]
"""Offsets [start, end)."""


# ── the life of the replica ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Started:
    """The log is open, at the node's start or again after a failure. Nothing is done before it."""

    epoch: int
    """The newest epoch this replica ever persisted (its own or a leader's it followed), -1 for none."""
    high_watermark: int
    """The hint that was kept; 0 for none."""
    high_watermark_epoch: int
    """The epoch in which that was learnt, -1 for none."""
    is_unclean: bool
    """Recovery found less than was known to be durable, or the disk is new while the partition is not.

    Once so it stays so over restarts, until the core says `Healed`: a node that crashes again before it has told
    anybody must not look sound by comparing with what the lossy start had left.
    """
    damaged: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class MetadataChanged:
    """The partition's record, at first and whenever it changes. Old versions may come; they are ignored."""

    state: PartitionState


@dataclass(frozen=True, slots=True)
class LogFailed:
    """The log takes no more writes (`PartitionOffline`). A `Started` follows when it has been opened again."""


@dataclass(frozen=True, slots=True)
class DamageFound:
    """A read or the scrub found bytes that fail their checksum."""

    damaged: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class QuarantineLifted:
    """An operator has decided that this replica shall follow its leader, whatever it has to cut off."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Due at `Manager.deadline_ms`; more often does no harm."""


# ── the world around it ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A version 2 link with a peer is ready. A link that replaces another is told as down and up."""

    peer: NodeId
    incarnation: int
    """The peer's life, from the handshake."""
    is_outgoing: bool
    """This node connected, to push what it leads. A partition's leader uses outgoing links, a follower incoming."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link is gone, and with it every message under way."""

    peer: NodeId
    is_outgoing: bool


@dataclass(slots=True)  # One per frame or flush: a frozen one takes three times as long to make.
class Received:
    """A message about this partition came."""

    peer: NodeId
    message: PartitionMessage
    is_outgoing: bool
    """Over which of the two links."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The leader's own log took batches: `log_end` has moved. Once for many appends is enough."""


@dataclass(frozen=True, slots=True)
class Durable:
    """A flush returned: `durable_end` has moved. In both roles; once for each flush."""


# ── completions ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RoleTaken:
    """`Lead` or `Follow` is done: epoch (and, for a leader, its start in the epoch map) are durable."""

    token: Token


@dataclass(frozen=True, slots=True)
class RoleFailed:
    """`Lead` or `Follow` could not make the epoch durable. A leader resigns, a follower asks again after a while."""

    token: Token
    reason: str


@dataclass(frozen=True, slots=True)
class Truncated:
    """`Truncate` or `ResetLog` is done, durably; the view shows it. High watermark and epoch map are cut with it."""

    token: Token


@dataclass(frozen=True, slots=True)
class ProposalAnswered:
    """`Propose` came back."""

    token: Token
    outcome: Outcome


@dataclass(slots=True)  # One per frame or flush: a frozen one takes three times as long to make.
class DataSent:
    """`SendData` has put a frame on the link, its credit taken. The core asks for the next one, if there is more."""

    token: Token
    peer: NodeId
    session: int
    offset: int
    next_offset: int
    bytes_count: int
    high_watermark: int
    """The one that the frame carried."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """`SendData` could not read the log at `offset` (damaged, or trimmed). Tell of damage by `DamageFound` too."""

    token: Token
    peer: NodeId
    session: int
    offset: int


@dataclass(frozen=True, slots=True)
class AppendFailed:
    """`Append` was refused by the log: the batches are corrupt, do not continue the log, or it takes no writes."""

    token: Token
    reason: str


class Digest(NamedTuple):
    """What `log.digest` gives for a range."""

    valid_from: int
    """Above the range's start where the log was compacted, trimmed or is damaged: then `value` is void."""
    value: bytes


@dataclass(frozen=True, slots=True)
class DigestComputed:
    """`ComputeDigest` is done."""

    token: Token
    request: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class RangeRead:
    """`ReadForRepair` is done; `batches` is empty when the range cannot be read here."""

    token: Token
    peer: NodeId
    request: int
    start: int
    next_offset: int
    batches: Batches


@dataclass(frozen=True, slots=True)
class RepairDone:
    """`InstallRepair` is done. `damaged` is what is still, or is now known to be, damaged."""

    token: Token
    damaged: tuple[Range, ...]


Event: TypeAlias = (
    Started
    | MetadataChanged
    | LogFailed
    | DamageFound
    | QuarantineLifted
    | Tick
    | LinkUp
    | LinkDown
    | Received
    | Appended
    | Durable
    | RoleTaken
    | RoleFailed
    | Truncated
    | ProposalAnswered
    | DataSent
    | SendFailed
    | AppendFailed
    | DigestComputed
    | RangeRead
    | RepairDone
)
