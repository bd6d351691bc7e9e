"""Transactions as entries: the rows of a commit point in the order of their commits, cut into parts, with their LSNs.

Owns the order, what one part holds and which LSN it has; refuses to know where rows come from. Sans-IO.

Order. A point holds rows of several partitions, each in the order in which the capture wrote it, which is that of
(commit_lsn, seq). `Merge` puts them together as far as is certain: up to the lowest of the last rows that are known
of partitions which have more. The order is (commit_lsn, seq, partition, offset), which no two rows have in common, so
it does not depend on how much of a partition happens to be known.

Parts. A transaction is one part, unless what the subscriber gets of it is too much for a message. A part that is full
is closed when another row of its transaction comes, so the last part is always known as such. A transaction of which
the subscriber gets nothing has no part, and parts are numbered as the subscriber sees them: nothing tells it how much
of a transaction others got.

LSNs. Every row has an ordinal: how many rows of the capture are before it in commit order, itself included. The totals
of valid points grow by exactly their rows, over all generations, snapshots and source epochs (capture/chain.py refuses
others), so the ordinals of a point are those from the total before it up to its own, and they never repeat. A part has
the ordinal of its last row, and the last part that of its transaction's last row, whoever gets it. Its LSN is

    stamp   the append time of the point's record in `<prefix>.commits`; it never goes back
    region  that of the commits partition and roll: the ordinal's upper bits
    index   the ordinal's lower 32 bits

It follows from bytes of the log alone, grows strictly from part to part, and since all parts before it are those of
lower ordinals, `lsn + 1` goes on right behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import crc32c

from walstream.capture.commit_points import Span
from walstream.config.section import MIB
from walstream.errors import CorruptCommits
from walstream.feed.reading import wire
from walstream.feed.reading.frames import key_prefix
from walstream.feed.transactions.facts import rule_of, tell
from walstream.feed.wal_pb2 import OP_BATCH
from walstream.positions import Lsn

PART_ROWS_MAX: Final = 1_000
PART_BYTES_MAX: Final = MIB
"""A row that is larger is a part of its own."""


class Row(NamedTuple):
    """A row that belongs to a point; rows compare in the order in which they are told."""

    commit_lsn: int
    seq: int
    place: int
    """The number of its partition among those of the point, in the order of their names."""
    offset: int
    txid: int = 0
    commit_time_ms: int = 0
    encoded: bytes = b""
    """As it stands in a BatchWrite; empty: not for this subscriber."""


class SpanRows:
    """The rows of one partition that belong to a point: those that are known and were not taken yet."""

    def __init__(self, span: Span, place: int) -> None:
        self.span = span
        self.place = place
        self.position = span.start
        """The offset up to which the partition was looked at."""
        self.counted = 0
        self.rows: list[Row] = []
        self._last: Row | None = None
        self._admits = rule_of(span)

    @property
    def is_complete(self) -> bool:
        """Whether no more rows will be known than are."""
        return self.position >= self.span.stop

    def add(
        self, entries: Sequence[bytes], offsets: Sequence[int], following: int, wanted: Sequence[int] | None = None
    ) -> None:
        """Take entries of the log as they follow, up to an offset; `wanted` tells of each whether it passes, None: all.

        Raises CorruptCommits when they are not in the order of their commits, RowsMissing when too few have come.
        """
        last, place, admits = self._last, self.place, self._admits
        for at, (entry, offset) in enumerate(zip(entries, offsets, strict=True)):
            told = tell(entry)
            if told is None or not admits(offset, told):
                continue
            _, _, commit_lsn, seq, txid, commit_time_ms = told
            passing = entry if wanted is None or wanted[at] else b""
            row = Row(commit_lsn, seq, place, offset, txid, commit_time_ms, passing)
            if last is not None and row < last:
                raise CorruptCommits(
                    f"The record at offset {row.offset:,} of {self.span.partition} belongs before the one at "
                    f"{last.offset:,}: its commit is {Lsn(row.commit_lsn)}, its change {row.seq:,}.",
                    "The log was damaged or written to by hand: do not read past this point.",
                )
            last = row
            self.rows.append(row)
            self.counted += 1
        self._last = last
        if following >= self.span.stop:
            self.span.check(self.counted)
        self.position = following


class Count:
    """How many rows of a partition belong to a point, without keeping them."""

    def __init__(self, begun: SpanRows) -> None:
        """Begin with what is known already."""
        self.span = begun.span
        self.position = begun.position
        self._counted = begun.counted
        self._admits = rule_of(begun.span)

    @property
    def is_complete(self) -> bool:
        """Whether all have been counted."""
        return self.position >= self.span.stop

    def add(self, entries: Sequence[bytes], offsets: Sequence[int], following: int) -> None:
        """Take entries of the log as they follow, up to an offset. Raises RowsMissing."""
        for entry, offset in zip(entries, offsets, strict=True):
            told = tell(entry)
            self._counted += told is not None and self._admits(offset, told)
        if following >= self.span.stop:
            self.span.check(self._counted)
        self.position = following


def merge(sources: Iterable[SpanRows]) -> list[Row]:
    """Take the rows that no unknown one can come before, in order; none while a partition with more is unknown."""
    sources = list(sources)
    unfinished = [source for source in sources if not source.is_complete]
    if any(not source.rows for source in unfinished):
        return []
    taken: list[Row] = []
    if not unfinished:
        for source in sources:
            taken += source.rows
            source.rows = []
    else:
        bound = min(source.rows[-1] for source in unfinished)
        for source in sources:
            certain = bisect_right(source.rows, bound)
            taken += source.rows[:certain]
            del source.rows[:certain]
    taken.sort()
    return taken


class Part(NamedTuple):
    """What goes out as one entry."""

    ordinal: int
    number: int
    """From 0, within its transaction."""
    is_last: bool
    commit_lsn: int
    txid: int
    commit_time_ms: int
    entries: list[bytes]


class Cutter:
    """Cuts the rows of one point into parts."""

    def __init__(self, ordinal: int, *, rows_max: int = PART_ROWS_MAX, bytes_max: int = PART_BYTES_MAX) -> None:
        """Take how many rows the capture has before this point."""
        self.ordinal = ordinal
        """Of the last row that was taken."""
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._first: Row | None = None
        """Of the transaction that is under way."""
        self._entries: list[bytes] = []
        self._size = 0
        self._number = 0
        self._last_ordinal = 0

    def feed(self, rows: Iterable[Row]) -> list[Part]:
        """Take rows as they follow; return the parts that are complete."""
        parts: list[Part] = []
        for row in rows:
            if self._first is None or row.commit_lsn != self._first.commit_lsn:
                self._end_transaction(parts)
                self._first = row
            self.ordinal += 1
            size = len(row.encoded)
            if not size:
                continue
            if self._entries and (len(self._entries) == self._rows_max or self._size + size > self._bytes_max):
                self._end_part(parts, self._last_ordinal, is_last=False)
            self._entries.append(row.encoded)
            self._size += size
            self._last_ordinal = self.ordinal
        return parts

    def end(self) -> list[Part]:
        """Hear that the point has no more rows; return what is left."""
        parts: list[Part] = []
        self._end_transaction(parts)
        return parts

    def _end_transaction(self, parts: list[Part]) -> None:
        if self._entries:
            self._end_part(parts, self.ordinal, is_last=True)
        self._first, self._number = None, 0

    def _end_part(self, parts: list[Part], ordinal: int, *, is_last: bool) -> None:
        first = self._first
        assert first is not None, "a part has rows, and they a transaction"
        told = (first.commit_lsn, first.txid, first.commit_time_ms)
        parts.append(Part(ordinal, self._number, is_last, *told, self._entries))
        self._entries, self._size = [], 0
        self._number += 1


class Envelope:
    """What all parts of one point have in common as entries, for one subscriber."""

    def __init__(self, cluster: str, tenant: bytes, topic: str, offset: int, snapshot: str = "") -> None:
        """Take the commits topic and where in it the point lies."""
        self._snapshot = wire.text(7, snapshot.encode())
        self._fields = b"".join(
            (
                wire.text(3, tenant),
                wire.text(4, key_prefix(cluster.encode(), tenant, topic)),
                wire.number(5, OP_BATCH),
                wire.text(10, topic.encode()),
                wire.number(12, offset),
            )
        )

    def entry(self, part: Part, lsn: int) -> bytes:
        """Return a part as it stands in WalBatch.entries."""
        number, text = wire.number, wire.text
        commit_lsn, txid, time = wire.varint(part.commit_lsn), number(3, part.txid), number(4, part.commit_time_ms)
        ends = (b"\x10", commit_lsn, txid, time, number(5, part.number), number(6, part.is_last), self._snapshot)
        value = b"".join((*part.entries, *ends))
        body = b"".join(
            (
                wire.LSN,
                wire.lsn_text(lsn),
                self._fields,
                b"\x10" + time[1:] if time else b"",
                text(7, value),
                number(8, lsn >> 64),
                wire.checksum(wire.CHECKSUM, crc32c.crc32c(value)),
                b"\x68",
                commit_lsn,
                b"\x78" + txid[1:] if txid else b"",
                b"\x80\x01",
                commit_lsn,
            )
        )
        return text(1, body)
