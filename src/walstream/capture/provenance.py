"""Where a record says it comes from: the `source` block of its value, its operation, its headers.

Owns how those are written; refuses to know rows and columns. They differ between the rows of a transaction in `seq`
only, so they are written once per transaction, relation and operation, as two halves with `seq` between them:

    …,"source":{"db":…,"schema":…,"table":…  ,"txId":…,"lsn":…,"source_epoch":…,"commit_lsn":…,"seq":     Context.source
    ,"gen":…,"ts_ms":…,"snapshot":…  ,"schema_version":…,"unchanged":[]},"op":…,"ts_ms":…}                Context.end

`lsn` is the transaction's commit LSN, like `commit_lsn`: a row's own LSN orders nothing, and repeating it here keeps
readers of Debezium's `lsn` working. LSNs are numbers, as Debezium has them. Times are the commit's, and outside of
`source` that of the capture. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from walstream.capture.escaping import quoted_name

if TYPE_CHECKING:
    from walstream.capture.source import Transaction

Header: TypeAlias = tuple[str, bytes]

Output: TypeAlias = tuple[str, "bytes | None", "bytes | None", list[Header]]
"""(topic, value, key, headers): what `produce` takes. The partition follows from the key alone."""

INSERT_OP: Final = "c"
UPDATE_OP: Final = "u"
DELETE_OP: Final = "d"
READ_OP: Final = "r"
TRUNCATE_OP: Final = "t"
MESSAGE_OP: Final = "m"

OLD_KEY: Final = "__debezium.oldkey"
NEW_KEY: Final = "__debezium.newkey"
"""Headers of the two records of a key change: on `c` the old key, on `d` the new one. Debezium's names."""


class Stamp(NamedTuple):
    """What all rows of a transaction, or of a table's snapshot, have in common."""

    commit_lsn: int
    """The snapshot's LSN for a snapshot."""
    xid: int
    """0: no transaction."""
    commit_time_us: int
    """Microseconds since 1970; the moment of the snapshot."""
    now_ms: int
    """When the capture handles it."""
    snapshot: str | None = None
    """The snapshot's id."""

    @classmethod
    def of(cls, transaction: Transaction, now_ms: int) -> Stamp:
        """Return the stamp of a transaction."""
        return cls(transaction.commit_lsn, transaction.xid, transaction.commit_time_us, now_ms)


class Origin:
    """What all rows of one version of a relation have in common."""

    __slots__ = ("head", "tenant", "version")

    def __init__(self, database: str, schema: str, table: str, version: int, tenant: str | None) -> None:
        """Take the names and the tenant, unless that is unknown or another one in each row."""
        self.head = b',"source":{"db":%b,"schema":%b,"table":%b' % (
            quoted_name(database),
            quoted_name(schema),
            quoted_name(table),
        )
        self.version = b',"schema_version":%d,"unchanged":[' % version
        self.tenant: tuple[Header, ...] = (("tenant", tenant.encode()),) if tenant is not None else ()


class Moment:
    """A stamp, written, and where its records go."""

    __slots__ = ("emit", "headers", "middle", "now", "rule_headers", "tail")

    def __init__(self, source_epoch: int, generation: int, stamp: Stamp, emit: Callable[[Output], None]) -> None:
        lsn, xid, commit_time_us, now_ms, snapshot = stamp
        commit_time_ms = commit_time_us // 1000
        self.emit = emit
        self.middle = b',"txId":%b,"lsn":%d,"source_epoch":%d,"commit_lsn":%d,"seq":' % (
            b"%d" % xid if xid else b"null",
            lsn,
            source_epoch,
            lsn,
        )
        shown = b"false" if snapshot is None else quoted_name(snapshot)
        self.tail = b',"gen":%d,"ts_ms":%d,"snapshot":%b' % (generation, commit_time_ms, shown)
        self.now = b'","ts_ms":%d}' % now_ms
        self.headers: list[Header] = [("commit_lsn", b"%d" % lsn), ("commit_time_ms", b"%d" % commit_time_ms)]
        if xid:
            self.headers.append(("txid", b"%d" % xid))
        self.rule_headers: list[Header] = [("gen", b"%d" % generation)]
        """What a reader must know of a record whose value has no `source`."""
        if snapshot is not None:
            self.rule_headers.append(("snapshot", snapshot.encode()))


class Context:
    """A moment, an origin and an operation together: what each record of them begins and ends with."""

    __slots__ = ("_by_op", "_moment", "_origin", "emit", "end", "headers", "op", "source")

    def __init__(self, moment: Moment, origin: Origin, op: str) -> None:
        self._moment = moment
        self._origin = origin
        self._by_op: dict[str, Context] = {}
        self.op = op
        self.emit = moment.emit
        self.source = origin.head + moment.middle
        self.end = self.end_without(())
        self.headers: list[Header] = [*origin.tenant, ("op", op.encode()), *moment.headers]
        """All but the sequence number, and the tenant when that is a column."""

    @property
    def rule_headers(self) -> list[Header]:
        """The headers of a record whose value has no `source`, beside the usual ones."""
        return self._moment.rule_headers

    def end_without(self, unchanged: Iterable[bytes]) -> bytes:
        """Return the second half for a row without these columns, whose names are JSON strings."""
        moment = self._moment
        return b'%b%b%b]},"op":"%b%b' % (
            moment.tail,
            self._origin.version,
            b",".join(unchanged),
            self.op.encode(),
            moment.now,
        )

    def with_op(self, op: str) -> Context:
        """Return the context of another operation on the same relation."""
        found = self._by_op.get(op)
        if found is None:
            found = self._by_op[op] = self.at(self._origin, op)
        return found

    def at(self, origin: Origin, op: str) -> Context:
        """Return the context of another relation and operation at the same moment."""
        return Context(self._moment, origin, op)
