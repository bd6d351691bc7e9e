"""The rows of one commit point, read from the log and put into parts.

Owns what is read, in which steps and how much of it is held; what belongs to the point, in which order, is
`transaction_parts`. Invariants: the end of a transaction is handed out only when the rows of all partitions of its
point have been counted and are as many as the point says; rows that are not there are an error, never a shorter answer.

All partitions of a point are read side by side, a piece at a time, and a piece is read when the one before it is used
up: so what is held is a piece of each, and of the transaction under way one part, however large it is. A point whose
pieces do not hold it whole, and that has more than one transaction, is counted to its end before the end of the first
one: its rows are then read twice. The partitions of a snapshot have no order among themselves and are read one after
the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from walstream.errors import DataLoss, RowsMissing
from walstream.feed.reading.entries import Lane
from walstream.feed.reading.frames import Filter, Frame
from walstream.feed.transactions.parts import Count, Cutter, Part, SpanRows, merge
from walstream.feed.transactions.pieces import Piece, Pieces, Range
from walstream.feed.transactions.points import Placed
from walstream.positions import TopicPartition

STEP: Final = 250
"""Rows between two moments at which others have their turn: about a millisecond."""


class Source(NamedTuple):
    """Where the rows of a partition are, and whether the subscriber may get any of them."""

    lane: Lane
    is_wanted: bool


Begun: TypeAlias = SpanRows | Count


class RowsRemoved(DataLoss):
    """Retention has removed rows of the point: it cannot be told any more, but later ones can."""


class PointRows:
    """One point on its way out."""

    def __init__(
        self,
        pieces: Pieces,
        placed: Placed,
        source_of: Callable[[TopicPartition], Source],
        entries: Filter,
        part_bytes_max: int,
    ) -> None:
        spans = sorted(placed.point.spans, key=lambda span: span.partition)
        self.placed = placed
        self.is_over = False
        self._pieces = pieces
        self._entries = entries
        self._sources = {span.partition: source_of(span.partition) for span in spans}
        self._waiting = [SpanRows(span, place) for place, span in enumerate(spans)]
        self._active: list[SpanRows] = []
        self._is_counted = False
        self._cutter = Cutter(placed.rows_before, bytes_max=part_bytes_max)
        self._parts: list[Part] = []
        """Those that are complete and were not returned yet."""
        self._removed: set[TopicPartition] = set()

    async def read(self) -> list[Part]:
        """Read on; return the parts that are complete, perhaps none. Raises RowsRemoved, DataLoss, UnreachableError."""
        if not self._parts:
            self._begin()
            while needy := [rows for rows in self._active if not rows.rows and not rows.is_complete]:
                await self._load(needy)
            self._parts = self._cutter.feed(merge(self._active))
            self._active = [rows for rows in self._active if rows.rows or not rows.is_complete]
        if not self._active and not self._waiting:
            self._parts += self._cutter.end()
            self.is_over = True
        elif not self._is_counted and any(part.is_last for part in self._parts):
            # Should the log be away meanwhile, the parts wait for the next call.
            await self._count()
        parts, self._parts = self._parts, []
        return parts

    def _begin(self) -> None:
        """Take the partitions that are next: all at once, or one of a snapshot."""
        if not self._active:
            count = 1 if self.placed.point.snapshot else len(self._waiting)
            self._active, self._waiting = self._waiting[:count], self._waiting[count:]

    async def _count(self) -> None:
        """Count the rest of the point before the first of its transactions is told to be whole."""
        counts = [Count(rows) for rows in [*self._active, *self._waiting] if not rows.is_complete]
        while counts := [count for count in counts if not count.is_complete]:
            await self._load(counts)
        self._is_counted = True

    async def _load(self, wanted: Sequence[Begun]) -> None:
        """Read the next piece of each partition."""
        ranges = {
            rows.span.partition: Range(self._sources[rows.span.partition].lane, rows.position, rows.span.stop)
            for rows in wanted
        }
        found = await self._pieces.read(ranges)
        for rows in wanted:
            piece = found[rows.span.partition]
            if piece.is_removed:
                self._removed.add(rows.span.partition)
            try:
                await self._add(rows, piece)
            except RowsMissing as error:
                if rows.span.partition not in self._removed:
                    raise
                hint = "Retention has removed them: begin from a later point, a snapshot or a backup."
                raise RowsRemoved(error.message, hint) from error

    async def _add(self, rows: Begun, piece: Piece) -> None:
        entries, offsets = piece.encoded, piece.offsets
        wanted = self._wanted(rows.span.partition, piece) if isinstance(rows, SpanRows) else None
        for start in range(0, max(len(entries), 1), STEP):
            stop = start + STEP
            following = piece.following if stop >= len(entries) else rows.position
            if isinstance(rows, SpanRows):
                passing = None if wanted is None else wanted[start:stop]
                rows.add(entries[start:stop], offsets[start:stop], following, passing)
            else:
                rows.add(entries[start:stop], offsets[start:stop], following)
            if following != piece.following:
                await asyncio.sleep(0)

    def _wanted(self, partition: TopicPartition, piece: Piece) -> bytearray | None:
        """Tell of each entry whether the subscriber gets it; None: all."""
        count = len(piece.encoded)
        source = self._sources[partition]
        if not source.is_wanted:
            return bytearray(count)
        topics, cluster = [partition.topic] * count, source.lane.cluster.encode()
        chosen = self._entries.select(Frame(piece.lsns, piece.encoded, piece.tenants, topics, cluster=cluster))
        if chosen is None:
            return None
        wanted = bytearray(count)
        for at in chosen:
            wanted[at] = 1
        return wanted
