"""What every capture engine gives: batches of whole transactions, and a way to say how much of them is durable.

Owns the types that engines fill and the rest of capture reads; refuses to know how the bytes arrive. Invariants: a
transaction is never split over batches; transactions come in commit order, each once per source; `last_lsn` never
goes back, and everything that committed before it has been handed out.

    rows of a transaction   pgoutput messages as bytes: the kind at 0, never a stream's transaction id, never a frame
        I U D               rows: the relation id at 1
        T M                 truncate and logical message: changes too
        R Y                 relation and type: in force from here on, also for the transactions that follow

A relation is described once per session, so a reader feeds the R messages of *every* transaction to its registry, in
order. Transactions that are left out (empty, rolled back, already durable) hand theirs on to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

from walstream.errors import DecodeError
from walstream.positions import Lsn, Position
from walstream.postgres.pgoutput import (
    UNCHANGED,
    LogicalMessage,
    Relation,
    Truncate,
    Value,
    decode,
    decode_row,
)

INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
TRUNCATE: Final = ord("T")
MESSAGE: Final = ord("M")
RELATION: Final = ord("R")
TYPE: Final = ord("Y")

NO_RELATIONS: Final[Mapping[int, Relation]] = {}


class Rows(Protocol):
    """The messages of a transaction, in memory or in a file; may be iterated as often as one likes until closed."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __len__(self) -> int:
        """How many messages there are, descriptions (R, Y) among them."""
        ...


class Transaction:
    """A committed transaction. `close` gives back its memory or its file; it is closed at the latest when collected."""

    __slots__ = (
        "_release",
        "change_count",
        "commit_lsn",
        "commit_time_us",
        "end_lsn",
        "origin",
        "relations",
        "rows",
        "xid",
    )

    def __init__(
        self,
        xid: int,
        commit_lsn: Lsn,
        end_lsn: Lsn,
        commit_time_us: int,
        rows: Rows,
        change_count: int,
        origin: str = "",
        relations: Mapping[int, Relation] = NO_RELATIONS,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.xid = xid
        """0 for a logical message outside of any transaction, which comes as a transaction of its own."""
        self.commit_lsn = commit_lsn
        self.end_lsn = end_lsn
        self.commit_time_us = commit_time_us
        """Microseconds since 1970."""
        self.rows = rows
        self.change_count = change_count
        """Messages that are changes (I U D T M)."""
        self.origin = origin
        """Name of the replication origin when the transaction was itself replicated."""
        self.relations = relations
        """What was described before this transaction; its own R messages are among its rows."""
        self._release = release

    def close(self) -> None:
        """Forget the rows and free what holds them. May be called twice."""
        release, self._release = self._release, None
        self.rows = ()
        if release is not None:
            release()

    def __del__(self) -> None:
        if self._release is not None:
            self._release()

    def __repr__(self) -> str:
        return f"Transaction(xid={self.xid}, commit_lsn={self.commit_lsn}, changes={self.change_count})"


class Change(NamedTuple):
    """One change in general terms; values are PostgreSQL's text."""

    position: Position
    """Its source epoch is 0: only a capture that runs knows it. An update is one position, also of the key."""
    op: str
    """c, u, d, t (truncate) or m (logical message)."""
    relation: Relation | None
    """None for a logical message."""
    before: dict[str, str | None] | None
    """The old row, or its key alone, or None: as the table's replica identity says."""
    after: dict[str, str | None] | None
    """The new row, without columns that PostgreSQL did not send; prefix and content of a logical message."""
    unchanged: tuple[str, ...] = ()
    """Columns that PostgreSQL did not send because the update did not touch them (TOAST)."""


class Batch:
    """Some whole transactions; none when the source is idle. `changes` shows them flat, decoded while it is read."""

    __slots__ = ("last_lsn", "transactions")

    def __init__(self, transactions: list[Transaction], last_lsn: Lsn) -> None:
        self.transactions = transactions
        self.last_lsn = last_lsn
        """To confirm once the batch is durable: the end of the last transaction; of the server's WAL when idle."""

    @property
    def change_count(self) -> int:
        """Changes in all transactions."""
        return sum(transaction.change_count for transaction in self.transactions)

    @property
    def changes(self) -> Iterable[Change]:
        """Every change, in commit order; may be iterated again. For the hot path read `transactions`."""
        return _Changes(self)

    def close(self) -> None:
        """Close every transaction."""
        for transaction in self.transactions:
            transaction.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class Ladder(NamedTuple):
    """How far each stage has come, as far as the source has heard of it."""

    server_end: Lsn
    """The end of the server's WAL when it last spoke of it."""
    sent: Lsn
    """The server has decoded and sent everything before this."""
    received: Lsn
    """Everything that committed before this has been received whole."""
    confirmed: Lsn
    """What `send_feedback` was last told: durable in the log."""


class Source(Protocol):
    """An engine. One thread receives; `send_feedback` and `ladder` may be called by any."""

    def skip_before(self, lsn: Lsn) -> None:
        """Leave out transactions that committed before `lsn`; to be said before the first batch."""
        ...

    def receive_batch(self, limit: int, timeout_s: float) -> Batch:
        """Return the transactions that are complete, about `limit` changes, or after the timeout an empty batch."""
        ...

    def send_feedback(self, lsn: Lsn) -> None:
        """Say that everything before `lsn` is durable, so that PostgreSQL may forget it. Never goes back."""
        ...

    def ladder(self) -> Ladder:
        """Return how far the stages have come."""
        ...

    def close(self) -> None:
        """Confirm what was last said to be durable, end the session and free everything."""
        ...


class _Changes:
    """A batch seen as changes; decoding again on each iteration keeps nothing in memory."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Change]:
        for transaction in self._batch.transactions:
            yield from changes_of(transaction)


def changes_of(transaction: Transaction) -> Iterator[Change]:
    """Decode a transaction, one change after the other."""
    relations = dict(transaction.relations)
    seq = 0

    def position() -> Position:
        nonlocal seq
        seq += 1
        return Position(0, transaction.commit_lsn, seq)

    for data in transaction.rows:
        kind = data[0]
        if kind in b"IUD":
            row = decode_row(data)
            relation = _known(relations, row.relation_id, data)
            # The old key comes with nulls for all other columns, which would read as values.
            before, _ = _named(relation, row.old, only_key=row.old_kind == "K")
            after, unchanged = _named(relation, row.new)
            yield Change(position(), "cud"[b"IUD".index(kind)], relation, before, after, unchanged)
            continue
        message = decode(data)
        if isinstance(message, Relation):
            relations[message.id] = message
        elif isinstance(message, Truncate):
            for relation_id in message.relation_ids:
                yield Change(position(), "t", _known(relations, relation_id, data), None, None)
        elif isinstance(message, LogicalMessage):
            content = message.content.decode(errors="backslashreplace")
            yield Change(position(), "m", None, None, {"prefix": message.prefix, "content": content})


def _known(relations: Mapping[int, Relation], relation_id: int, data: bytes) -> Relation:
    relation = relations.get(relation_id)
    if relation is None:
        raise DecodeError(f"A row of relation {relation_id}, which PostgreSQL has not described.", data=data)
    return relation


def _named(
    relation: Relation, values: tuple[Value, ...] | None, *, only_key: bool = False
) -> tuple[dict[str, str | None] | None, tuple[str, ...]]:
    """Return the values by column name, and the names of those that were not sent."""
    if values is None:
        return None, ()
    named: dict[str, str | None] = {}
    unchanged: list[str] = []
    for column, value in zip(relation.columns, values, strict=True):
        if value is UNCHANGED:
            unchanged.append(column.name)
        elif column.is_key or not only_key:
            named[column.name] = value.decode() if isinstance(value, bytes) else None
    return named, tuple(unchanged)
