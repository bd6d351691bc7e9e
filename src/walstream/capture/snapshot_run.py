"""One snapshot: the tables of one consistent point, from their first row to the last `finished`.

Owns which connection reads what and the way of the rows from there into the sink; refuses to know which tables lack a
snapshot and how the point came about. Belongs to one thread, which pumps it: nothing here waits. A table that changes
while it is read fails alone; any other error ends the capture, and the next one begins again with what is not finished.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from walstream import logs
from walstream.capture.commit_points import TableSnapshot
from walstream.capture.provenance import Output, Stamp
from walstream.capture.sink import Sink, SnapshotLane
from walstream.capture.snapshot_plan import Part, Plan, Range, Reading, State, TableName, copy_statement, quoted_table
from walstream.capture.snapshot_progress import Display
from walstream.capture.snapshot_watch import Prepared
from walstream.errors import TableChanged
from walstream.positions import Lsn
from walstream.postgres.copy_out import CopyReader
from walstream.postgres.messages import Relation
from walstream.postgres.relations import RelationInfo
from walstream.postgres.snapshot import TableAtPoint

ROWS_PER_PUMP: Final = 2_000
"""About 15 ms of work, after which the stream has its turn."""

SHOW_INTERVAL_S: Final = 0.2
"""With many tables it is some work to say how far they are."""

Rows: TypeAlias = Callable[[Sequence[bytes]], list[Output]]
"""From lines of COPY to records."""
Describe: TypeAlias = Callable[[Relation], RelationInfo]

log = logs.get(__name__)


class CopyRenderer(Protocol):
    """What a snapshot needs of the envelope's renderer."""

    def copy(self, info: RelationInfo, stamp: Stamp) -> Rows:
        """Return the function that renders lines of COPY of this relation."""


class _Table:
    """A table on its way into the log."""

    __slots__ = ("lane", "rows", "started_s")

    def __init__(self, lane: SnapshotLane, rows: Rows) -> None:
        self.lane = lane
        self.rows = rows
        self.started_s = time.monotonic()


class _Worker:
    """A connection and what it reads now."""

    __slots__ = ("reader", "row_count", "span")

    def __init__(self, reader: CopyReader) -> None:
        self.reader = reader
        self.span: Range | None = None
        self.row_count = 0


class Run:
    """One consistent point: all of its tables, from the first row to the last `finished`."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        new_id: Callable[[Lsn], str],
        sink: Sink,
        renderer: CopyRenderer,
        describe: Describe,
        display: Display,
        on_finished: Callable[[TableSnapshot], None],
    ) -> None:
        """Take what was prepared. Each table has an id of its own, because several may share a topic.

        `on_finished` is told of each table that is durable with all its rows.
        """
        self._new_id = new_id
        self._prepared = prepared
        self._sink = sink
        self._renderer = renderer
        self._describe = describe
        self._display = display
        self._on_finished = on_finished
        self._tables_at = {_name(table): table for table in prepared.tables}
        self._plan = Plan([_reading(table) for table in prepared.tables], len(prepared.readers))
        self._workers = deque(_Worker(reader) for reader in prepared.readers)
        self._tables: dict[TableName, _Table] = {}
        self._awaited = 0
        self._row_count = 0
        self._started_s = self._shown_s = time.monotonic()
        self._time_ms = prepared.point.time_us // 1000
        log.info("snapshot started", lsn=str(prepared.point.lsn), tables=len(prepared.tables))
        for name in self._plan.names(State.COMPLETE):
            self._begin(name)
            self._finish(name)

    @property
    def is_over(self) -> bool:
        """Whether every table is finished in the log, or has failed."""
        return self._plan.is_over and not self._awaited

    def pump(self) -> int:
        """Take what has arrived, from each connection in turn, up to a limit; return how many rows."""
        moved = 0
        if self._sink.is_full:
            return moved
        for _ in range(len(self._workers)):
            worker = self._workers.popleft()
            if worker.span is None and not self._assign(worker):
                # Nothing is left for it; closing it now gives back its lock on the last table.
                worker.reader.close()
                continue
            self._workers.append(worker)
            moved += self._serve(worker)
            if moved >= ROWS_PER_PUMP:
                break
        self._row_count += moved
        self._show()
        return moved

    def close(self) -> None:
        """Let the consistent point go; say how it ended."""
        self._display.close()
        self._prepared.close()
        failed = self._plan.names(State.FAILED)
        log.info(
            "snapshot over",
            lsn=str(self._prepared.point.lsn),
            tables=len(self._plan.names(State.COMPLETE)),
            tables_again=len(failed),
            rows=self._row_count,
            seconds=round(time.monotonic() - self._started_s, 3),
        )

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_INTERVAL_S:
            self._shown_s = now_s
            self._display.show(self._plan.progress(), self._row_count)

    def _assign(self, worker: _Worker) -> bool:
        span = self._plan.take()
        if span is None:
            return False
        if span.table not in self._tables:
            self._begin(span.table)
        worker.span, worker.row_count = span, 0
        worker.reader.read(
            copy_statement(self._plan.reading(span.table), span),
            table=quoted_table(span.table),
            part=quoted_table(span.part.name),
            part_id=span.part.oid,
        )
        return True

    def _serve(self, worker: _Worker) -> int:
        span = worker.span
        assert span is not None, "an idle worker was given something to read"
        try:
            lines = worker.reader.lines()
        except TableChanged as error:
            log.warning("table changed, will be read again", table=str(span.table), reason=error.message)
            self._plan.fail(span)
            worker.span = None
            return 0
        if lines and self._plan.state(span.table) is not State.FAILED:
            table = self._tables[span.table]
            self._sink.snapshot_rows(table.lane, table.rows(lines), self._time_ms)
            worker.row_count += len(lines)
        if worker.reader.is_idle:
            worker.span = None
            if self._plan.read(span, worker.row_count):
                self._finish(span.table)
        return len(lines)

    def _begin(self, name: TableName) -> None:
        table, point = self._tables_at[name], self._prepared.point
        snapshot_id = self._new_id(point.lsn)
        stamp = Stamp(
            commit_lsn=point.lsn,
            xid=0,
            commit_time_us=point.time_us,
            now_ms=time.time_ns() // 1_000_000,
            snapshot=snapshot_id,
        )
        begun = TableSnapshot(name.schema, name.table, snapshot_id, str(point.lsn), table.member.identity.text)
        info = self._describe(table.relation)
        self._tables[name] = _Table(self._sink.begin_snapshot(begun), self._renderer.copy(info, stamp))

    def _finish(self, name: TableName) -> None:
        table = self._tables[name]
        row_count = self._plan.row_count(name)
        table.lane.snapshot = msgspec.structs.replace(table.lane.snapshot, rows=row_count)
        self._awaited += 1

        def durable() -> None:
            self._awaited -= 1
            seconds = round(time.monotonic() - table.started_s, 3)
            log.info("table snapshot finished", table=str(name), rows=row_count, seconds=seconds)
            self._on_finished(table.lane.snapshot)

        self._sink.finish_snapshot(table.lane, durable)


def _name(table: TableAtPoint) -> TableName:
    return TableName(table.member.schema, table.member.table)


def _reading(table: TableAtPoint) -> Reading:
    parts = (
        Part(part.relation_id, TableName(part.schema, part.table), part.block_count, part.is_heap)
        for part in table.parts
    )
    columns = tuple(column.name for column in table.relation.columns)
    return Reading(_name(table), columns, table.row_filter, tuple(parts))
