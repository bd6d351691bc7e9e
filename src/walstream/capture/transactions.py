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
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from walstream.capture.assembly import Assembly, Description, Descriptions
from walstream.capture.source import RELATION, Transaction
from walstream.capture.spill import Budget, SpillFile
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

_KINDS: Final = [bytes((kind,)) for kind in range(256)]
_DESCRIPTIONS: Final = b"RY"
_TWO_PHASE: Final = b"bPKrp"


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
        self._streamed: dict[int, Assembly] = {}
        self._block: Assembly | None = None
        self._in_stream = False
        self._arrivals = 0
        self._session: Descriptions = {}
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
                self._enter(Assembly(message.xid, self._budget), data, in_stream=False)
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

    def _in_block(self, block: Assembly, kind: int, data: bytes, start: int) -> None:
        subxid, body = block.xid, data[start:]
        if self._in_stream:
            subxid, body = int.from_bytes(data[start + 1 : start + 5]), _KINDS[kind] + data[start + 5 :]
        if kind in _DESCRIPTIONS:
            self._arrivals += 1
            block.describe(subxid, Description(self._arrivals, body))
        else:
            block.extend(subxid, [body])

    def _enter(self, assembly: Assembly, data: bytes, *, in_stream: bool) -> None:
        if self._block is not None:
            raise _misplaced(data, f"transaction {self._block.xid} is not over")
        self._block, self._in_stream = assembly, in_stream

    def _leave(self) -> Assembly:
        assert self._block is not None
        assembly, self._block, self._in_stream = self._block, None, False
        return assembly

    def _stream_start(self, message: StreamStart, data: bytes) -> None:
        if message.first_segment == (message.xid in self._streamed):
            known = "has begun already" if message.first_segment else "has no beginning"
            raise _misplaced(data, f"transaction {message.xid} {known}")
        assembly = self._streamed.get(message.xid) or Assembly(message.xid, self._budget)
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
        """Make a message outside of any transaction one of its own, which commits with its last byte.

        `message.lsn` is where the record ends, and a COMMIT record may begin right there: it must still count as later.
        Where the message's record begins is not sent, but its last byte belongs to no other record.
        """
        alone = Assembly(0, self._budget)
        alone.extend(0, [data[start:]])
        self._complete(alone, Lsn(message.lsn - 1), message.lsn, self._sent_at_us(data))

    def _complete(self, assembly: Assembly, commit_lsn: Lsn, end_lsn: Lsn, commit_time_us: int) -> None:
        relations = self._relations
        described = assembly.described()
        head = list(self._handed_on.values()) if self._handed_on else ()
        rows, changes = assembly.finish(head, self._newer_than(described) if described else ())
        if described:
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

    def _newer_than(self, described: Descriptions) -> list[bytes]:
        """Return what the session was told after a transaction was, of the same subjects and different."""
        return [
            known.data
            for subject, description in described.items()
            if (known := self._session.get(subject)) is not None
            and known.arrival > description.arrival
            and known.data != description.data
        ]

    def _learn(self, described: Descriptions) -> None:
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


def _misplaced(data: bytes, why: str) -> DecodeError:
    return DecodeError(f"A message of pgoutput is out of place: {why}.", data=bytes(data))
