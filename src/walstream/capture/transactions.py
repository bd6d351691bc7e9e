"""The assembler: pgoutput messages in, committed transactions out.

Owns which messages belong to which transaction and in what order they count; refuses to know frames, sockets, clocks
and disks (files enter as a function that opens one). A pure state machine:

    outside ──Begin──▶ whole transaction ──Commit──▶ outside                 sent at once, after it committed
    outside ──Stream Start──▶ piece of a running one ──Stream Stop──▶ outside       … until Stream Commit or Abort

Pieces of several transactions alternate. A row in a piece names its subtransaction; Stream Abort takes back the rows
of one, or of all. Invariants: transactions leave in commit order, without a row of an aborted subtransaction;
together with those handed out and not yet closed they hold no more memory than the budget, give or take one `feed`.

Descriptions (R, Y) obey what pgoutput's sender believes of us (`maybe_send_schema`, `cleanup_rel_sync_cache`):
  - outside of streams a relation is described once per session, until it changes;
  - a streamed transaction describes everything for itself, once, and that becomes true for the session when it
    commits; after *any* abort in it, also of a subtransaction, it describes everything again. A description sent in
    an aborted subtransaction, perhaps of columns that were rolled back, is therefore dropped like a row: what
    survives was sent before that subtransaction or is described anew after it;
  - a streamed transaction that commits late may bring a description older than the session's (a schema that was
    renamed meanwhile). The sender holds the newer one for known, so it is repeated at the transaction's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from walstream.capture.source import RELATION, Rows, Transaction
from walstream.capture.spill import Budget, SpilledRows, SpillFile
from walstream.errors import DecodeError, SourceError
from walstream.positions import ZERO, Lsn
from walstream.postgres.pgoutput import (
    ROW_KINDS,
    STREAMED_KINDS,
    Begin,
    Commit,
    LogicalMessage,
    Origin,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    decode,
)

ROW_COST_BYTES: Final = 48
"""What Python adds to the bytes of a row: the object's head, rounding, its place in a list."""

RUN_COST_BYTES: Final = 400
"""What a run of rows of one subtransaction takes besides the rows."""

_KINDS: Final = [bytes((kind,)) for kind in range(256)]
_DESCRIPTIONS: Final = b"RY"
_TWO_PHASE: Final = b"bPKrp"


class _Description(NamedTuple):
    """A Relation or Type message and when it came, counted over all descriptions."""

    arrival: int
    data: bytes


# By kind and id: what it describes.
_Descriptions = dict[bytes, _Description]


class _Run:
    """Rows that came one after the other in the same subtransaction."""

    __slots__ = ("cost_bytes", "descriptions", "rows", "subxid")

    def __init__(self, subxid: int, rows: list[bytes]) -> None:
        self.subxid = subxid
        self.rows = rows
        self.descriptions = 0
        self.cost_bytes = 0


class _Assembly:
    """A transaction that has not committed yet, or has not been received whole."""

    __slots__ = (
        "_aborted",
        "_budget",
        "_by_subxid",
        "_described",
        "_file",
        "_runs",
        "cost_bytes",
        "origin",
        "xid",
    )

    def __init__(self, xid: int, budget: Budget) -> None:
        self.xid = xid
        self.origin = ""
        self.cost_bytes = 0
        self._budget = budget
        self._runs: list[_Run] = []
        self._by_subxid: dict[int, list[_Run]] = {}
        self._described: dict[int, _Descriptions] = {}
        self._aborted: set[int] = set()
        self._file: SpillFile | None = None

    def extend(self, subxid: int, rows: list[bytes], *, descriptions: int = 0) -> None:
        """Add messages of one subtransaction; the list becomes ours."""
        cost = sum(map(len, rows)) + ROW_COST_BYTES * len(rows)
        run = self._runs[-1] if self._runs else None
        if run is None or run.subxid != subxid:
            run = _Run(subxid, rows)
            self._runs.append(run)
            self._by_subxid.setdefault(subxid, []).append(run)
            self._charge(RUN_COST_BYTES)
        else:
            run.rows += rows
        run.descriptions += descriptions
        run.cost_bytes += cost
        self._charge(cost)

    def describe(self, subxid: int, description: _Description) -> None:
        """Add a Relation or Type message."""
        self.extend(subxid, [description.data], descriptions=1)
        self._described.setdefault(subxid, {})[_subject(description.data)] = description

    def abort(self, subxid: int) -> None:
        """Take back what a subtransaction did."""
        for run in self._by_subxid.pop(subxid, ()):
            self._charge(-run.cost_bytes)
            run.rows, run.descriptions, run.cost_bytes = [], 0, 0
        self._described.pop(subxid, None)
        if self._file is not None:
            self._aborted.add(subxid)

    def spill(self, open_file: Callable[[], SpillFile]) -> None:
        """Move everything to the transaction's file."""
        self._file = self._file or open_file()
        for run in self._runs:
            if run.rows:
                self._file.append(run.subxid, run.rows, run.descriptions)
        self._runs.clear()
        self._by_subxid.clear()
        self._charge(-self.cost_bytes)

    def described(self) -> _Descriptions:
        """Return what survives of the descriptions, the latest of each subject."""
        latest: _Descriptions = {}
        for descriptions in self._described.values():
            for subject, description in descriptions.items():
                if subject not in latest or latest[subject].arrival < description.arrival:
                    latest[subject] = description
        return latest

    def finish(self, head: Sequence[bytes], tail: Sequence[bytes]) -> tuple[Rows, int]:
        """Return the surviving messages between a head and a tail of descriptions, and how many are changes."""
        changes = sum(len(run.rows) - run.descriptions for run in self._runs)
        if self._file is not None:
            self._file.flush()
            count, descriptions = self._file.count(self._aborted)
            rest = [*chain.from_iterable(run.rows for run in self._runs), *tail]
            return SpilledRows(self._file, self._aborted, count, head, rest), changes + count - descriptions
        if len(self._runs) == 1 and not head and not tail:
            return self._runs[0].rows, changes
        return [*head, *chain.from_iterable(run.rows for run in self._runs), *tail], changes

    def release(self) -> None:
        """Give back memory and file. May come from any thread, once."""
        self._budget.give_back(self.cost_bytes)
        if self._file is not None:
            self._file.close()

    def _charge(self, cost: int) -> None:
        self.cost_bytes += cost
        self._budget.take(cost)


class Assembler:
    """Feed it messages; what has committed waits in `ready` until it is taken."""

    def __init__(
        self,
        budget: Budget,
        open_file: Callable[[], SpillFile],
        *,
        sent_at_us: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        """Take a function that opens a spill file, and one that dates a message outside of transactions."""
        self.ready: deque[Transaction] = deque()
        self.ready_changes = 0
        self.end_lsn = ZERO
        """Everything that committed before this has been received whole, empty transactions among it."""
        self._budget = budget
        self._open_file = open_file
        self._start_lsn = ZERO
        self._sent_at_us = sent_at_us
        self._streamed: dict[int, _Assembly] = {}
        self._block: _Assembly | None = None
        self._in_stream = False
        self._arrivals = 0
        self._session: _Descriptions = {}
        self._handed_on: dict[bytes, bytes] = {}
        self._relations: Mapping[int, Relation] = {}

    @property
    def in_block(self) -> bool:
        """Whether the last message was inside of a transaction or a piece of one."""
        return self._block is not None

    def feed(self, messages: Iterable[bytes], start: int = 0) -> None:
        """Take messages, each beginning at `start` of its bytes. Raises DecodeError and SourceError."""
        rows: list[bytes] = []
        xid = b""
        block, in_stream = self._block, self._in_stream
        for data in messages:
            kind = data[start]
            if kind in ROW_KINDS and block is not None:
                if in_stream:
                    if data[start + 1 : start + 5] != xid:
                        if rows:
                            block.extend(int.from_bytes(xid), rows)
                            rows = []
                        xid = data[start + 1 : start + 5]
                    rows.append(_KINDS[kind] + data[start + 5 :])
                else:
                    rows.append(data[start:])
                continue
            if rows and block is not None:
                block.extend(int.from_bytes(xid) if in_stream else block.xid, rows)
                rows = []
            self._other(kind, data, start)
            block, in_stream = self._block, self._in_stream
        if rows and block is not None:
            block.extend(int.from_bytes(xid) if in_stream else block.xid, rows)
        if self._budget.exceeded:
            self._spill_largest()

    def take(self, limit: int) -> tuple[list[Transaction], Lsn]:
        """Return transactions with about `limit` changes together, and the LSN up to which nothing is missing."""
        taken: list[Transaction] = []
        changes = 0
        while self.ready and changes < limit:
            transaction = self.ready.popleft()
            changes += transaction.change_count
            taken.append(transaction)
        self.ready_changes -= changes
        return taken, taken[-1].end_lsn if self.ready and taken else self.end_lsn

    def skip_before(self, lsn: Lsn) -> None:
        """Leave out what committed before `lsn`, from now on."""
        self._start_lsn = lsn
        self.end_lsn = max(self.end_lsn, lsn)

    def skip_to(self, lsn: Lsn) -> None:
        """Learn that nothing of interest committed before `lsn`; only outside of blocks and with nothing ready."""
        assert self._block is None
        assert not self.ready
        self.end_lsn = max(self.end_lsn, lsn)

    def close(self) -> None:
        """Drop everything that has not been taken."""
        for assembly in (*self._streamed.values(), *(() if self._block is None or self._in_stream else (self._block,))):
            assembly.release()
        self._streamed.clear()
        self._block = None
        while self.ready:
            self.ready.popleft().close()
        self.ready_changes = 0

    def _other(self, kind: int, data: bytes, start: int) -> None:
        """Take a message that is not a row inside of a block."""
        if self._block is not None and kind in STREAMED_KINDS:
            self._in_block(self._block, kind, data, start)
            return
        if kind in _TWO_PHASE:
            raise SourceError(
                "The slot sends transactions that are prepared and not committed.",
                "walstream needs a slot without two_phase: drop it and let `walstream capture run` create its own.",
            )
        if kind in ROW_KINDS or kind in b"TRY":
            raise _misplaced(data, "it belongs into a transaction, and none has begun")
        message = decode(data, start)
        match message:
            case Begin():
                self._enter(_Assembly(message.xid, self._budget), data, in_stream=False)
            case Commit():
                if self._block is None or self._in_stream:
                    raise _misplaced(data, "no transaction has begun")
                self._complete(self._leave(), message.commit_lsn, message.end_lsn, message.commit_time_us)
            case Origin():
                # In a stream it is told once, in the first piece.
                if self._block is None:
                    raise _misplaced(data, "it belongs into a transaction, and none has begun")
                self._block.origin = message.name
            case StreamStart():
                self._stream_start(message, data)
            case StreamStop():
                if not self._in_stream:
                    raise _misplaced(data, "no piece of a transaction has begun")
                self._leave()
            case StreamCommit():
                assembly = self._streamed.pop(message.xid, None)
                if assembly is None or self._block is not None:
                    raise _misplaced(data, f"transaction {message.xid} was not streamed, or another is under way")
                self._complete(assembly, message.commit_lsn, message.end_lsn, message.commit_time_us)
            case StreamAbort() if self._block is None:
                self._stream_abort(message)
            case LogicalMessage() if not message.transactional:
                self._message_alone(message, data, start)
            case _:
                raise _misplaced(data, "it is not expected here")

    def _in_block(self, block: _Assembly, kind: int, data: bytes, start: int) -> None:
        subxid, body = block.xid, data[start:]
        if self._in_stream:
            subxid, body = int.from_bytes(data[start + 1 : start + 5]), _KINDS[kind] + data[start + 5 :]
        if kind in _DESCRIPTIONS:
            self._arrivals += 1
            block.describe(subxid, _Description(self._arrivals, body))
        else:
            block.extend(subxid, [body])

    def _enter(self, assembly: _Assembly, data: bytes, *, in_stream: bool) -> None:
        if self._block is not None:
            raise _misplaced(data, f"transaction {self._block.xid} is not over")
        self._block, self._in_stream = assembly, in_stream

    def _leave(self) -> _Assembly:
        assert self._block is not None
        assembly, self._block, self._in_stream = self._block, None, False
        return assembly

    def _stream_start(self, message: StreamStart, data: bytes) -> None:
        if message.first_segment == (message.xid in self._streamed):
            known = "has begun already" if message.first_segment else "has no beginning"
            raise _misplaced(data, f"transaction {message.xid} {known}")
        assembly = self._streamed.get(message.xid) or _Assembly(message.xid, self._budget)
        self._enter(assembly, data, in_stream=True)
        self._streamed[message.xid] = assembly

    def _stream_abort(self, message: StreamAbort) -> None:
        # A transaction that we do not know had nothing streamed in this session.
        assembly = self._streamed.get(message.xid)
        if assembly is None:
            return
        if message.subxid != message.xid:
            assembly.abort(message.subxid)
        else:
            del self._streamed[message.xid]
            assembly.release()

    def _message_alone(self, message: LogicalMessage, data: bytes, start: int) -> None:
        """Make a message outside of any transaction a transaction of its own, at the place of its WAL record."""
        alone = _Assembly(0, self._budget)
        alone.extend(0, [data[start:]])
        # Where the record ends is not said; no other record begins before the next byte.
        self._complete(alone, message.lsn, Lsn(message.lsn + 1), self._sent_at_us(data))

    def _complete(self, assembly: _Assembly, commit_lsn: Lsn, end_lsn: Lsn, commit_time_us: int) -> None:
        relations = self._relations
        described = assembly.described()
        head = list(self._handed_on.values()) if self._handed_on else ()
        rows, changes = assembly.finish(head, self._newer_than(described) if described else ())
        self._learn(described)
        if changes == 0 or commit_lsn < self._start_lsn:
            # Nobody will read these rows, but the sender believes that we know what they describe.
            self._handed_on |= {subject: self._session[subject].data for subject in described}
            assembly.release()
        else:
            self._handed_on.clear()
            self.ready_changes += changes
            self.ready.append(
                Transaction(
                    assembly.xid,
                    commit_lsn,
                    end_lsn,
                    commit_time_us,
                    rows,
                    changes,
                    assembly.origin,
                    relations,
                    assembly.release,
                )
            )
        if end_lsn > self.end_lsn:
            self.end_lsn = end_lsn

    def _newer_than(self, described: _Descriptions) -> list[bytes]:
        """Return what the session was told after a transaction was, of the same subjects and different."""
        return [
            known.data
            for subject, description in described.items()
            if (known := self._session.get(subject)) is not None
            and known.arrival > description.arrival
            and known.data != description.data
        ]

    def _learn(self, described: _Descriptions) -> None:
        learnt: dict[int, Relation] = {}
        for subject, description in described.items():
            known = self._session.get(subject)
            if known is not None and known.arrival > description.arrival:
                continue
            self._session[subject] = description
            if description.data[0] == RELATION and (known is None or known.data != description.data):
                relation = decode(description.data)
                assert isinstance(relation, Relation)
                learnt[relation.id] = relation
        if learnt:
            self._relations = {**self._relations, **learnt}

    def _spill_largest(self) -> None:
        assemblies = list(self._streamed.values())
        if self._block is not None and not self._in_stream:
            assemblies.append(self._block)
        while assemblies and self._budget.exceeded:
            largest = max(assemblies, key=lambda assembly: assembly.cost_bytes)
            if largest.cost_bytes == 0:
                break
            largest.spill(self._open_file)


def _subject(data: bytes) -> bytes:
    """Return what a description is about: its kind and the id after it."""
    return data[:5]


def _misplaced(data: bytes, why: str) -> DecodeError:
    return DecodeError(f"A message of pgoutput is out of place: {why}.", data=bytes(data))
