"""Which part of which table is read next, and when a table is complete: the plan of one snapshot.

Owns the order of the tables, their ranges of blocks (ctid) and the SQL that reads one; refuses to know connections,
clocks and the log. Invariants: the ranges of a relation are disjoint and cover every possible ctid, because the first
begins at block 0 and the last has no end; and a table is complete once, when each of its ranges was read to its end
and none failed.

    WAITING ── take ──▶ READING ── the last range read ──▶ COMPLETE
                           └─── fail ──▶ FAILED: to be read whole again, under another consistent point

Ranges are small (8 MiB), so that what is done of them is progress enough to show, and so that several connections
finish one table at about the same time: tables are finished one after the other, not all at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

RANGE_BLOCKS_MAX: Final = 1024
"""8 MiB with PostgreSQL's default block size; one COPY of it takes a second or less."""
RANGE_BLOCKS_MIN: Final = 64
"""Below half a megabyte another connection costs more than it gains."""


class TableName(NamedTuple):
    """What a table is called; the text form is for people and for the log, not for SQL."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


class Part(NamedTuple):
    """A relation that holds rows: the table itself, or a leaf of a partitioned table."""

    oid: int
    name: TableName
    block_count: int
    has_blocks: bool = True
    """Whether rows have a ctid that orders them by block: heap tables. Others are read in one go."""


class Reading(NamedTuple):
    """How a published table is read: as the publication has it."""

    name: TableName
    columns: tuple[str, ...]
    """The published columns, in the order of the table."""
    row_filter: str | None
    """SQL over the table's columns."""
    parts: tuple[Part, ...]


class Range(NamedTuple):
    """The rows of one part whose block is at least `first` and below `end`."""

    table: TableName
    part: Part
    first: int
    end: int | None
    """None: whatever follows, also blocks that the relation had not when it was measured."""

    @property
    def block_count(self) -> int:
        """How many blocks that is, as they were measured."""
        return max(0, (self.part.block_count if self.end is None else self.end) - self.first)


class State(Enum):
    """Where a table stands."""

    WAITING = "waiting"
    READING = "reading"
    COMPLETE = "complete"
    FAILED = "failed"


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def quoted_table(name: TableName) -> str:
    """Return a table as SQL names it."""
    return f"{quoted(name.schema)}.{quoted(name.table)}"


def copy_statement(reading: Reading, span: Range) -> str:
    """Return the COPY of one range, in text format: published columns of published rows, and of this relation ONLY."""
    conditions = []
    if span.first > 0:
        conditions.append(f"ctid >= '({span.first},0)'::tid")
    if span.end is not None:
        conditions.append(f"ctid < '({span.end},0)'::tid")
    if reading.row_filter is not None:
        conditions.append(f"({reading.row_filter})")
    columns = ", ".join(quoted(column) for column in reading.columns)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"COPY (SELECT {columns} FROM ONLY {quoted_table(span.part.name)}{where}) TO STDOUT"


def ranges(reading: Reading, workers: int) -> list[Range]:
    """Split a table for so many connections: disjoint ranges that together hold every row."""
    block_count = sum(part.block_count for part in reading.parts)
    share = -(-block_count // max(1, workers))
    size = min(RANGE_BLOCKS_MAX, max(RANGE_BLOCKS_MIN, share))
    return [span for part in reading.parts for span in _ranges_of(reading.name, part, size)]


def _ranges_of(table: TableName, part: Part, size: int) -> list[Range]:
    if not part.has_blocks:
        return [Range(table, part, 0, None)]
    firsts = range(0, max(1, part.block_count), size)
    return [Range(table, part, first, first + size if first + size < part.block_count else None) for first in firsts]


class _Table:
    __slots__ = ("blocks_read", "open_count", "reading", "row_count", "spans", "state")

    def __init__(self, reading: Reading, spans: Iterable[Range]) -> None:
        self.reading = reading
        self.spans = deque(spans)
        self.state = State.WAITING
        self.open_count = 0
        self.row_count = 0
        self.blocks_read = 0


class Progress(NamedTuple):
    """How far a plan has come."""

    tables_complete: int
    table_count: int
    blocks_read: int
    block_count: int
    row_count: int


class Plan:
    """The tables of one consistent point. `take` ranges, say when they were `read` or a table has `failed`."""

    def __init__(self, readings: Sequence[Reading], workers: int) -> None:
        """Order the tables: small ones first, so that most are finished soon, and a crash costs little."""
        ordered = sorted(readings, key=lambda reading: (sum(part.block_count for part in reading.parts), reading.name))
        self._tables = {reading.name: _Table(reading, ranges(reading, workers)) for reading in ordered}
        self._pending = deque(table for table in self._tables.values() if table.spans)
        self._unsettled = len(self._pending)
        self._block_count = sum(part.block_count for reading in readings for part in reading.parts)
        for table in self._tables.values():
            if not table.spans:
                table.state = State.COMPLETE  # A partitioned table without partitions.

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be taken or read."""
        return self._unsettled == 0

    def state(self, name: TableName) -> State:
        """Where the table stands."""
        return self._tables[name].state

    def reading(self, name: TableName) -> Reading:
        """How the table is read."""
        return self._tables[name].reading

    def names(self, state: State | None = None) -> list[TableName]:
        """The tables in this state, or all of them, in order."""
        return [name for name, table in self._tables.items() if state in (None, table.state)]

    def take(self) -> Range | None:
        """Return the next range to read, or None when all have been taken."""
        while self._pending:
            table = self._pending[0]
            if table.spans:
                table.state = State.READING
                table.open_count += 1
                return table.spans.popleft()
            self._pending.popleft()
        return None

    def read(self, span: Range, row_count: int) -> bool:
        """Note that a range was read to its end; return whether that made its table complete."""
        table = self._returned(span)
        if table.state is State.READING:
            table.row_count += row_count
            table.blocks_read += span.block_count
            if not table.spans and not table.open_count:
                table.state = State.COMPLETE
        self._settle(table)
        return table.state is State.COMPLETE

    def fail(self, span: Range) -> None:
        """Note that a range could not be read, so that its table as a whole is worth nothing."""
        table = self._returned(span)
        table.state = State.FAILED
        table.spans.clear()
        self._settle(table)

    def row_count(self, name: TableName) -> int:
        """Rows of the table's ranges that were read to their end."""
        return self._tables[name].row_count

    def progress(self) -> Progress:
        """Say how far it has come; a failed table counts as done with, it is not part of this plan any more."""
        done = [table for table in self._each() if table.state in (State.COMPLETE, State.FAILED)]
        failed_blocks = sum(
            sum(part.block_count for part in table.reading.parts) - table.blocks_read
            for table in done
            if table.state is State.FAILED
        )
        return Progress(
            tables_complete=len(done),
            table_count=len(self._tables),
            blocks_read=sum(table.blocks_read for table in self._each()) + failed_blocks,
            block_count=self._block_count,
            row_count=sum(table.row_count for table in self._each()),
        )

    def _each(self) -> Iterable[_Table]:
        return self._tables.values()

    def _settle(self, table: _Table) -> None:
        if table.state in (State.COMPLETE, State.FAILED) and not table.open_count:
            self._unsettled -= 1

    def _returned(self, span: Range) -> _Table:
        table = self._tables[span.table]
        assert table.open_count > 0, "a range is returned once, after it was taken"
        table.open_count -= 1
        return table
