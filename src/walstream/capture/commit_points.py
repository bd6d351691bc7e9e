"""Commit points: what the records of `<prefix>.commits` say, and the rule by which rows belong to them.

Owns the JSON of the three kinds of records and the rule; refuses to know clients, clocks and threads. How a sequence of
records is folded into valid points is `chain.py`, how a capture makes the next one is `ledger.py`.

    open      a generation begins; its number is this record's offset
    point     every transaction with commit_lsn < end_lsn is in the log; `next` says where, `rows` how many
    snapshot  a table's rows begin (`begin`) or are all there (`finished`)

The rule. For consecutive valid points A and B, a record of partition p belongs to (A, B] iff

    A.next[p] ≤ offset < B.next[p]   and   gen = B.gen   and   A.end_lsn ≤ commit_lsn < B.end_lsn

and it is no row of a snapshot; the rows of a finished snapshot are those of its own range of offsets, generation and
id. Their number in each partition is `B.rows[p]`, or something has gone wrong that nobody may read past. A partition
that A does not know starts at 0. Orphans of a crash, zombies, foreign writers and replays all fail the rule, and no
reader needs to remember what it has seen. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from walstream.errors import CorruptCommits, RowsMissing
from walstream.positions import ZERO, Lsn, TopicPartition

FULL_INTERVAL: Final = 1_000
"""A full vector follows each `open` and comes again after so many points; between them points say what changed."""

Vector: TypeAlias = Mapping[TopicPartition, int]


class Origin(msgspec.Struct, frozen=True):
    """Which source a generation reads, and who reads it."""

    instance: str
    system_id: str
    timeline: int
    slot: str


class OpenRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="open"):
    """A generation begins: whoever wrote before this may still write, but its points are void."""

    source_epoch: int
    origin: Origin
    at_ms: int


class TableSnapshot(msgspec.Struct, frozen=True):
    """A table whose rows were read under one snapshot."""

    schema: str
    table: str
    id: str
    lsn: str
    identity: str = ""
    """What the table was to the publication then, in words of the snapshot's own."""
    rows: int = 0
    next: dict[str, int] = {}
    """Of a finished one: where its rows end in each partition, some of which hold nothing else."""


class PointRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="point", omit_defaults=True):
    """Everything before `end_lsn` is durable. Partitions are written `topic-partition`."""

    gen: int
    source_epoch: int
    end_lsn: str
    last_xid: int
    last_commit_time_us: int
    rows_total: int
    bytes_total: int
    next: dict[str, int] = {}
    rows: dict[str, int] = {}
    topic_ids: dict[str, str] = {}
    is_full: bool = False
    """Whether `next`, `topic_ids` and `snapshots` are everything there is, not only what changed."""
    sole_until: int = 0
    """No `open` lies between the generation's own and this offset. Of full points: whoever begins to read here knows
    by it which generation was the latest, without looking for an `open` that may lie millions of records back."""
    origin: Origin | None = None
    snapshots: list[TableSnapshot] = []


class SnapshotRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="snapshot", omit_defaults=True):
    """A table's rows begin, or are complete. It moves neither the stream's LSN nor its vector."""

    gen: int
    source_epoch: int
    state: Literal["begin", "finished"]
    snapshot: TableSnapshot
    start: dict[str, int] = {}
    """Of `finished`: offsets from which on the rows lie; lower ones may be given, but none too high."""
    next: dict[str, int] = {}
    rows: dict[str, int] = {}
    rows_total: int = 0
    bytes_total: int = 0
    topic_ids: dict[str, str] = {}


CommitRecord: TypeAlias = OpenRecord | PointRecord | SnapshotRecord

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(CommitRecord)


def encode(record: CommitRecord) -> bytes:
    """Return the record as JSON."""
    return _encoder.encode(record)


def decode(data: bytes | None, offset: int) -> CommitRecord:
    """Read a record; `offset` is for the error. Raises CorruptCommits."""
    try:
        record: CommitRecord = _decoder.decode(data or b"")
        return record
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCommits(f"The record at offset {offset} of the commits topic cannot be read: {error}.") from None


class RowFacts(NamedTuple):
    """What the rule asks of a record, besides where it lies."""

    gen: int
    commit_lsn: Lsn
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """What one point holds of one partition: the rule between its two points, with everything filled in."""

    partition: TopicPartition
    start: int
    stop: int
    rows: int
    gen: int
    lsn_from: Lsn = ZERO
    lsn_to: Lsn = ZERO
    snapshot: str | None = None

    def admits(self, offset: int, facts: RowFacts) -> bool:
        """Whether the record belongs to the point."""
        if not self.start <= offset < self.stop or facts.gen != self.gen or facts.snapshot != self.snapshot:
            return False
        return self.snapshot is not None or self.lsn_from <= facts.commit_lsn < self.lsn_to

    def check(self, counted: int) -> None:
        """Compare the number of records that were admitted with what the point says. Raises RowsMissing."""
        if counted != self.rows:
            raise RowsMissing(
                f"{self.partition} holds {counted:,} rows of generation {self.gen} in the offsets "
                f"[{self.start:,}, {self.stop:,}); the commit point says {self.rows:,}.",
                "The log was damaged or written to by hand: do not read past this point.",
            )


@dataclass(frozen=True, slots=True)
class Point:
    """A valid point with its full vector: the state of the log at one moment of the source."""

    offset: int
    """Of the record in `<prefix>.commits`."""
    gen: int
    source_epoch: int
    end_lsn: Lsn
    last_xid: int
    last_commit_time_us: int
    rows_total: int
    bytes_total: int
    next: Vector = field(repr=False)
    topic_ids: Mapping[str, str] = field(repr=False)
    spans: tuple[Span, ...] = ()
    """Where the rows since the previous point lie: those of the stream, or of the snapshot that is finished."""
    snapshot: TableSnapshot | None = None
    """The table that this point adds; None for a point of the stream."""
    snapshots: Mapping[tuple[str, str], TableSnapshot] = field(default_factory=dict, repr=False)
    """Every table of this source epoch whose snapshot is finished."""
    origin: Origin | None = None
    is_baseline: bool = False
    """The first point after the beginning of the topic was removed: its own rows cannot be told from others."""

    @property
    def ends(self) -> Vector:
        """Where each partition ends at least: the stream's rows, and those of finished snapshots."""
        ends = dict(self.next)
        for snapshot in self.snapshots.values():
            for partition, offset in partitions(snapshot.next).items():
                ends[partition] = max(offset, ends.get(partition, 0))
        return ends

    @property
    def rows(self) -> int:
        """Rows since the previous point."""
        return sum(span.rows for span in self.spans)


def partitions(vector: Mapping[str, int]) -> dict[TopicPartition, int]:
    """Read a vector as it is in a record."""
    return {_partition(text): offset for text, offset in vector.items()}


def texts(vector: Vector) -> dict[str, int]:
    """Write a vector as a record has it."""
    return {str(partition): offset for partition, offset in vector.items()}


_known: dict[str, TopicPartition] = {}


def _partition(text: str) -> TopicPartition:
    found = _known.get(text)
    if found is None:
        found = _known[text] = TopicPartition.parse(text)
    return found
