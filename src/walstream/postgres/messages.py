"""What PostgreSQL's logical decoding says: one tuple per kind of pgoutput message.

Owns the names of the messages and of their fields; refuses to know their bytes (pgoutput.py). LSNs, ids and OIDs are
unsigned; times are microseconds since 1970. `xid` is the (sub)transaction of a message inside of a stream and None
outside, where `Begin` has said it. Sans-IO.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from walstream.positions import Lsn


class Unchanged:
    """The one value that stands for a TOASTed column which the update did not touch and PostgreSQL did not send."""

    _only: Unchanged | None = None

    def __new__(cls) -> Unchanged:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNCHANGED"

    def __reduce__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()

Value: TypeAlias = "bytes | Unchanged | None"


class Begin(NamedTuple):
    """A transaction begins; its commit LSN is known already, because it is decoded after it committed."""

    commit_lsn: Lsn
    commit_time_us: int
    xid: int


class Commit(NamedTuple):
    """The transaction ends. `end_lsn` is what may be confirmed when everything before it is durable."""

    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time_us: int


class Origin(NamedTuple):
    """The transaction was itself replicated, from this origin."""

    origin_lsn: Lsn
    name: str


class RelationColumn(NamedTuple):
    """A column as Relation describes it; `is_key`: part of the replica identity (all columns when that is FULL)."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool


class Relation(NamedTuple):
    """A table's columns, sent before its first row and after each change; `replica_identity` is one of d n f i."""

    xid: int | None
    id: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


class Type(NamedTuple):
    """The name of a type that is not built in."""

    xid: int | None
    oid: int
    schema: str
    name: str


class Truncate(NamedTuple):
    """These tables were emptied together."""

    xid: int | None
    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


class LogicalMessage(NamedTuple):
    """What somebody wrote with pg_logical_emit_message; outside of a transaction it comes at once.

    `lsn` is where its WAL record ends, which may be where the next record begins.
    """

    xid: int | None
    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


class StreamStart(NamedTuple):
    """A piece of a transaction that is still running follows."""

    xid: int
    first_segment: bool


class StreamStop(NamedTuple):
    """The piece is over."""


class StreamCommit(NamedTuple):
    """The streamed transaction has committed."""

    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time_us: int


class StreamAbort(NamedTuple):
    """A streamed transaction (`subxid == xid`) or one of its subtransactions was rolled back."""

    xid: int
    subxid: int
    abort_lsn: Lsn | None
    abort_time_us: int | None


class BeginPrepare(NamedTuple):
    """A transaction that was prepared, not committed, begins."""

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time_us: int
    xid: int
    gid: str


class Prepare(NamedTuple):
    """The prepared transaction is complete, its fate open."""

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time_us: int
    xid: int
    gid: str


class CommitPrepared(NamedTuple):
    """A prepared transaction was committed."""

    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time_us: int
    xid: int
    gid: str


class RollbackPrepared(NamedTuple):
    """A prepared transaction was rolled back."""

    prepare_end_lsn: Lsn
    end_lsn: Lsn
    prepare_time_us: int
    rollback_time_us: int
    xid: int
    gid: str


class StreamPrepare(NamedTuple):
    """A streamed transaction was prepared."""

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time_us: int
    xid: int
    gid: str


Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)


class Row(NamedTuple):
    """A row change: `old_kind` is K (key columns, the others null) or O (the whole old row), None without either."""

    kind: str
    xid: int | None
    relation_id: int
    old_kind: str | None
    old: tuple[Value, ...] | None
    new: tuple[Value, ...] | None
