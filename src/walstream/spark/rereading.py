"""From where a table's rows are read again: the points of the log, looked through backwards.

Owns the search in `<prefix>.commits` for a table that is behind or that is built from a snapshot; refuses to know what
is read then. It reads commit points only, in windows from the end that grow until one holds the answer: usually the
first one does, because snapshots and restarts are of today.

The answer is the last point of the epoch that lies at or below an LSN; for a snapshot also before the point at which
it was finished, since its rows belong to that one. Everything that committed at that LSN or later comes after it.

None of this means anything in another log than the one that the tables were made from: `check` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from walstream.capture.chain import Chain
from walstream.capture.commit_points import Point
from walstream.capture.kafka import LogAddress
from walstream.capture.reading import CommitsReader
from walstream.capture.topics import Topics
from walstream.errors import DataLoss, ForeignLog
from walstream.positions import Lsn, TopicPartition
from walstream.spark.batches import NO_SNAPSHOT, Base, CutRow, Snapshot, TableStep
from walstream.spark.types import table_name

WINDOW: Final = 4_000
"""Records that are read first: more than two full vectors apart, and a quarter of an hour of a busy capture."""

Namer = Callable[[str], str | None]
"""From a topic to the table whose rows it holds."""


class Passed(NamedTuple):
    """A point, as far as the search asks."""

    offset: int
    source_epoch: int
    end_lsn: Lsn
    rows: int
    """Of the table."""
    snapshot: str | None = None
    is_baseline: bool = False
    """The first one that is left, and its rows cannot be told."""


class Range(NamedTuple):
    """What to read: rows of the points after this offset, and how many those points have."""

    after: int
    rows: int
    snapshot_rows: int | None = None
    """How many of them are those of the snapshot that was asked for."""


def locate(points: Iterable[Passed], one: TableStep, source_epoch: int, *, is_begin: bool) -> Range | None:
    """Find where to begin among these points, which come in order; None: it lies before the first of them.

    `is_begin`: nothing came before the first of them, ever.
    """
    after = -1 if is_begin else None
    rows = 0
    wanted = one.snapshot.id if one.snapshot is not None and one.snapshot.id != NO_SNAPSHOT else None
    is_seen, snapshot_rows = wanted is None, None
    for point in points:
        if wanted is not None and point.snapshot == wanted:
            is_seen, wanted, snapshot_rows = True, None, point.rows
        is_before = point.source_epoch < source_epoch or (
            point.source_epoch == source_epoch and point.end_lsn <= one.from_lsn
        )
        if is_before and (one.snapshot is None or wanted is not None):
            after, rows = point.offset, 0
        else:
            rows += point.rows
    return Range(after, rows, snapshot_rows) if is_seen and after is not None else None


def _base(point: Point) -> Base:
    found = tuple(
        Snapshot(table_name(one.schema, one.table), one.id, Lsn.parse(one.lsn)) for one in point.snapshots.values()
    )
    return Base(point.offset, point.source_epoch, point.end_lsn, found)


def _whole(points: Iterable[Passed]) -> Range:
    """Begin with what there is: without snapshots a table never was whole."""
    begin, rows = -1, 0
    for point in points:
        if begin < 0 and point.is_baseline:
            begin, rows = point.offset, 0
        else:
            rows += point.rows
    return Range(begin, rows)


def contradiction(cut: CutRow, at: Base | None, first: Base | None, end: int) -> str:
    """Return in which way a log cannot be the one that a cut is of; empty: it is, as far as it goes back.

    `at` is its last point up to that of the cut, None when that was removed; `first` the first one that is left.
    """
    if end <= cut.point:
        return f"it ends at offset {end:,}"
    if at is not None:
        return "" if _place(at) == (cut.point, cut.source_epoch, cut.end_lsn) else f"there it has {_said(at)}"
    if first is not None and (first.source_epoch, first.end_lsn) < (cut.source_epoch, cut.end_lsn):
        return f"the first one that is left is {_said(first)}"
    return ""


def _place(point: Base) -> tuple[int, int, Lsn]:
    return point.offset, point.source_epoch, point.end_lsn


def _said(point: Base) -> str:
    return f"the point at offset {point.offset:,} with LSN {point.end_lsn} of source epoch {point.source_epoch}"


class Points:
    """The commit points of one log, for questions about the past."""

    def __init__(self, address: LogAddress, prefix: str, table_of: Namer) -> None:
        self._topics = Topics(address, prefix)
        self._commits = TopicPartition(self._topics.names.commits, 0)
        self._address = address
        self._table_of = table_of

    def base(self, offset: int) -> Base | None:
        """Return the last valid point before an offset of the commits topic; None: there is none."""
        start = self._topics.starts([self._commits])[self._commits]
        with CommitsReader(self._address, self._commits.topic) as reader:
            point = reader.last_valid(start, offset).last if offset > start else None
        return None if point is None else _base(point)

    def check(self, cut: CutRow, destination: str) -> None:
        """Make sure that a cut is one of this log. Raises ForeignLog."""
        start = self._topics.starts([self._commits])[self._commits]
        end = self._topics.ends([self._commits])[self._commits]
        at = self.base(cut.point + 1) if end > cut.point else None
        first = self._first(start, end) if at is None and end > cut.point else None
        if why := contradiction(cut, at, first, end):
            raise ForeignLog(
                f"The last cut of {destination} is at the commit point at offset {cut.point:,} with LSN {cut.end_lsn} "
                f"of source epoch {cut.source_epoch}, which {self._commits.topic} does not have: {why}.",
                "The log was made anew, or the tables are those of another one. Have them made anew too, in another "
                "place (pipeline.warehouse, pipeline.checkpoint if it is set, or another replica), or see that "
                "capture.bootstrap and capture.prefix are those of the log that they were made from.",
            )

    def _first(self, start: int, end: int) -> Base | None:
        chain = Chain(start)
        with CommitsReader(self._address, self._commits.topic) as reader:
            for offset, record in reader.read(start, end):
                if (point := chain.feed(offset, record)) is not None:
                    return _base(point)
        return None

    def find(self, one: TableStep, source_epoch: int, upto: int) -> Range:
        """Return from where on the rows of a table's step are read. Raises DataLoss when that was removed."""
        start = self._topics.starts([self._commits])[self._commits]
        window = WINDOW
        with CommitsReader(self._address, self._commits.topic) as reader:
            while True:
                first = max(start, upto + 1 - window)
                chain = Chain(first)
                fed = (chain.feed(offset, record) for offset, record in reader.read(first, upto + 1))
                points = (self._passed(point, one.table) for point in fed if point is not None)
                if first == start and one.snapshot is not None and one.snapshot.id == NO_SNAPSHOT:
                    return _whole(points)
                found = locate(points, one, source_epoch, is_begin=first == 0)
                if found is not None:
                    return found
                if first == start:
                    break
                window *= 8
        raise DataLoss(
            f"The commit points of {one.table} from {one.from_lsn} on (source epoch {source_epoch}) are not in "
            f"{self._commits.topic} any more, which begins at offset {start:,}.",
            "Its rows cannot be read again: have a new snapshot of the table taken (remove it from the publication and "
            "add it again).",
        )

    def _passed(self, point: Point, table: str) -> Passed:
        rows = sum(span.rows for span in point.spans if self._table_of(span.partition.topic) == table)
        snapshot = point.snapshot.id if point.snapshot is not None else None
        return Passed(point.offset, point.source_epoch, point.end_lsn, rows, snapshot, point.is_baseline)
