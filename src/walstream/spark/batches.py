"""What a micro-batch means for each table: from its commit points to what is read, from where, and written how.

Owns where every table stands (its book) and the decisions that follow; refuses to know Spark, Delta and the log: what a
table has applied is asked of a function, what came of a step is told. Sans-IO.

A batch is cut into steps, where a source epoch ends, because LSNs of two cannot be compared, and where the last cut is,
because what comes again after a lost checkpoint ends there. A step ends at a cut, the point B, and every table that is
listed there holds what committed before it. Per table a step is one of these:

    nothing    no rows of it in the step: it is at B without a commit
    changes    its rows of the step, without those below its own position (which a crash may have left beyond the cut)
    replace    a snapshot is finished that it was not built from: the snapshot's rows and every change since its LSN
    waiting    no snapshot of this epoch is finished, or the stream has not reached its LSN: the rows are read later
    stopped    it failed, and nothing has changed since: not listed until a restart or a new snapshot
    ahead      it holds more than B, after a lost checkpoint: it is left alone, and no cut is written meanwhile

Invariants: a table is listed at a cut iff it holds exactly what committed before it; a table that was written is never
written again from older points, whatever is replayed. What a restart knows is the last cut and, per table, the version
of its own last transaction: a table that the cut does not list is behind, and is read again from its own position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from walstream.errors import WarehouseFailed
from walstream.positions import ZERO, Lsn

NO_SNAPSHOT: Final = ""
"""The id of the snapshot that a table is built from when capture takes none: every change since the beginning."""


class Snapshot(NamedTuple):
    """A finished snapshot of a table: rows with this id, true at this LSN."""

    table: str
    id: str
    lsn: Lsn


class PointFacts(NamedTuple):
    """A commit point, as far as the pipeline asks."""

    offset: int
    source_epoch: int
    end_lsn: Lsn
    commit_time_us: int
    tables: Mapping[str, int]
    """Rows per table."""
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Base:
    """The point before the batch: what was finished in its epoch."""

    offset: int
    source_epoch: int
    end_lsn: Lsn
    snapshots: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class CutRow:
    """A recorded cut: which version of each table holds exactly what committed before `end_lsn`."""

    point: int
    """Offset of the commit point: cuts are ordered by it, across source epochs too."""
    source_epoch: int
    end_lsn: Lsn
    commit_time_us: int
    versions: Mapping[str, int]
    snapshots: Mapping[str, str] = field(default_factory=dict)
    """The snapshot that each table is built from, also of those that are not listed."""
    stopped: Mapping[str, str] = field(default_factory=dict)
    """Tables that failed, and why."""
    rows: int = 0
    batch_id: int = -1
    written_at_us: int = 0


@dataclass(slots=True)
class Book:
    """Where one table stands in the current source epoch."""

    name: str
    applied: Lsn | None
    """The version of its last transaction: what it holds for sure."""
    position: Lsn | None
    """Everything before this is in it: what was applied, or a cut that it needed no commit for."""
    built_from: str | None = None
    """Id of the snapshot its rows come from; None: it was not written in this epoch, as far as any cut says."""
    unrecorded: Lsn | None = None
    """What it has applied beyond the last cut, before a crash."""
    snapshot: Snapshot | None = None
    """The newest finished snapshot."""
    version: int | None = None
    stopped: str = ""
    stopped_with: str | None = None
    """Id of the newest snapshot when it failed: with another one it is worth another try."""


class TableStep(NamedTuple):
    """What is to be read of a table and written as one commit."""

    table: str
    from_lsn: Lsn
    """Changes that committed before are in the table, or in the snapshot."""
    after: int | None
    """Rows of points after this offset; None: after the last point of the epoch that is not beyond `from_lsn`."""
    rows: int | None
    """How many rows those points have; None: not known yet."""
    snapshot: Snapshot | None = None
    """Replace the table by this snapshot and the changes since."""
    is_rewind: bool = False
    """Whether it was behind: its rows lie before the step too."""


@dataclass(frozen=True, slots=True)
class Step:
    """The part of a batch that lies in one source epoch: (after, upto]."""

    source_epoch: int
    after: int
    upto: int
    end_lsn: Lsn
    commit_time_us: int
    rows: int
    tables: tuple[TableStep, ...]
    is_cut: bool
    """Whether the cut at its end is to be recorded."""
    begin_lsn: Lsn = ZERO
    """Nothing between these points committed before."""


Applied: TypeAlias = Callable[[str, int], Lsn | None]
"""The position that a table (its name) has applied in a source epoch."""


class Outcome(NamedTuple):
    """What came of a table's step: the version that it is at now, or why it failed."""

    version: int | None
    failure: str = ""


class Books:
    """All tables' books. `steps` plans a batch, one step at a time; `settle` each before the next is asked for."""

    def __init__(self, applied: Applied, last_cut: CutRow | None, base: Base | None, *, has_snapshots: bool) -> None:
        """Take what the destination knows and the point before the first batch; None: the log is read from its begin.

        Without snapshots a table is built from the changes alone, from the beginning of the log on.
        """
        self._applied = applied
        self._cut = last_cut
        self._has_snapshots = has_snapshots
        self.source_epoch = base.source_epoch if base is not None else 0
        self._end_lsn = base.end_lsn if base is not None else ZERO
        self.tables: dict[str, Book] = {}
        self._open_known()
        for snapshot in base.snapshots if base is not None else ():
            self._book(snapshot.table).snapshot = snapshot

    def steps(self, points: Iterable[PointFacts]) -> Iterator[Step]:
        """Plan a batch. Each step must be settled before the next one is asked for."""
        # What a lost checkpoint brings again ends where the last cut is: beyond it only new rows count.
        parts = [_Part.of(group) for group in _divided(points, self._cut.point if self._cut is not None else -1)]
        for index, part in enumerate(parts):
            later = {other.source_epoch for other in parts[index + 1 :]} - {part.source_epoch}
            yield self._step(part, later)

    def catch_up(self) -> Step | None:
        """Plan what tables lack at the last cut, which the base must be: those that it does not list. None: nothing."""
        cut = self._cut
        if cut is None or cut.source_epoch != self.source_epoch or cut.end_lsn != self._end_lsn:
            return None
        part = _Part(cut.source_epoch, cut.point, cut.point, cut.end_lsn, cut.commit_time_us, {}, ())
        behind = [book for book in self.tables.values() if book.name not in cut.versions]
        tables = [self._table(book, part) for book in behind if (book.position or ZERO) <= cut.end_lsn]
        found = tuple(sorted(one for one in tables if one is not None))
        # One that is there already was written before a crash, and only the cut does not say so.
        is_there = any(self._is_current(book) and book.position == cut.end_lsn for book in behind)
        return part.step(found, is_cut=True) if found or is_there else None

    def settle(self, step: Step, outcomes: Mapping[str, Outcome]) -> None:
        """Take what came of a step's tables; those without work are at its end now."""
        planned = {one.table: one for one in step.tables}
        assert planned.keys() == outcomes.keys(), "every table of the step has an outcome"
        for name, book in self.tables.items():
            if name not in planned:
                if self._is_current(book):
                    book.position = max(book.position or ZERO, step.end_lsn)
                continue
            outcome = outcomes[name]
            if outcome.failure:
                book.stopped = outcome.failure
                book.stopped_with = book.snapshot.id if book.snapshot is not None else None
                continue
            book.stopped = ""
            book.version = outcome.version
            book.applied = book.position = step.end_lsn
            if (snapshot := planned[name].snapshot) is not None:
                book.built_from = snapshot.id
        self._end_lsn = step.end_lsn

    def cut(self, step: Step, batch_id: int, version_of: Callable[[str], int | None]) -> CutRow:
        """Return the cut at the end of a settled step; `version_of` tells the version of tables not yet asked about."""
        # Tables of a cut that is there already may be beyond it by now: what it lists stays true.
        is_again = self._cut is not None and self._cut.point == step.upto
        versions = dict(self._cut.versions) if is_again and self._cut is not None else {}
        for name, book in self.tables.items():
            if name not in versions and self._is_current(book) and book.position == step.end_lsn:
                book.version = version_of(name) if book.version is None else book.version
                if book.version is None:
                    raise WarehouseFailed(
                        f"The table {name} is listed in the cuts, and its folder holds no version of it.",
                        "Restore the folder, or take a new snapshot of the table.",
                    )
                versions[name], book.unrecorded = book.version, None
        row = CutRow(
            point=step.upto,
            source_epoch=step.source_epoch,
            end_lsn=step.end_lsn,
            commit_time_us=step.commit_time_us,
            versions=versions,
            snapshots={name: book.built_from for name, book in self.tables.items() if book.built_from is not None},
            stopped={name: book.stopped for name, book in self.tables.items() if book.stopped},
            rows=step.rows,
            batch_id=batch_id,
        )
        self._cut = row
        return row

    def moved(self, table: str, version: int) -> None:
        """Note that maintenance has made another version of a table, of the same rows."""
        if table in self.tables:
            self.tables[table].version = version

    def _is_current(self, book: Book) -> bool:
        return book.built_from is not None and not book.stopped

    def _begin_epoch(self, source_epoch: int) -> None:
        self.source_epoch, self._end_lsn = source_epoch, ZERO
        self.tables.clear()
        self._open_known()

    def _open_known(self) -> None:
        """Open the books of the tables that the last cut speaks of."""
        if self._cut is not None and self._cut.source_epoch == self.source_epoch:
            for name in self._cut.snapshots:
                self._book(name)

    def _book(self, name: str) -> Book:
        if name in self.tables:
            return self.tables[name]
        applied, cut = self._applied(name, self.source_epoch), self._cut
        book = Book(name, applied, applied)
        if not self._has_snapshots:
            book.snapshot = Snapshot(name, NO_SNAPSHOT, ZERO)
        recorded = ZERO
        if cut is not None and cut.source_epoch == self.source_epoch and name in cut.snapshots:
            recorded = cut.end_lsn
            book.built_from = cut.snapshots[name]
            if name in cut.versions:
                book.position = max(applied or ZERO, cut.end_lsn)
        if applied is not None and applied > recorded:
            book.unrecorded = applied
        self.tables[name] = book
        return book

    def _step(self, part: _Part, later_epochs: set[int]) -> Step:
        if part.source_epoch != self.source_epoch:
            self._begin_epoch(part.source_epoch)
        for name in part.rows:
            self._book(name)
        for snapshot in part.snapshots:
            self._book(snapshot.table).snapshot = snapshot
        is_past = self._cut is not None and part.source_epoch < self._cut.source_epoch
        is_known = is_past or (self._cut is not None and part.upto <= self._cut.point)
        tables: list[TableStep] = []
        is_ahead = False
        for book in self.tables.values():
            if is_past or (is_known and self._cut is not None and book.name in self._cut.versions):
                continue
            if any(self._applied(book.name, epoch) is not None for epoch in later_epochs):
                continue  # It holds rows of a later epoch: a crash came between that commit and its cut.
            if book.position is not None and book.position > part.end_lsn:
                is_ahead = is_ahead or self._is_current(book)
                continue
            one = self._table(book, part)
            if one is not None:
                tables.append(one)
        step = part.step(tuple(sorted(tables)), is_cut=not is_known and not is_ahead)
        return replace(step, begin_lsn=self._end_lsn)

    def _table(self, book: Book, part: _Part) -> TableStep | None:
        snapshot = book.snapshot
        if book.stopped and (snapshot is None or snapshot.id == book.stopped_with):
            return None
        if snapshot is not None and snapshot.id != book.built_from and snapshot.lsn <= part.end_lsn:
            if book.unrecorded == part.end_lsn:
                # One commit per table and batch, and no cut tells of this one: so it was this batch's.
                book.built_from, book.unrecorded = snapshot.id, None
                return None
            return TableStep(book.name, snapshot.lsn, None, None, snapshot)
        if not self._is_current(book):
            return None
        position = book.position or ZERO
        if position < self._end_lsn:
            return TableStep(book.name, position, None, None, is_rewind=True)
        if book.name in part.rows and position < part.end_lsn:
            return TableStep(book.name, position, part.after, part.rows[book.name])
        return None


@dataclass(frozen=True, slots=True)
class _Part:
    """The points of a batch that lie in one epoch, added up."""

    source_epoch: int
    after: int
    upto: int
    end_lsn: Lsn
    commit_time_us: int
    rows: Mapping[str, int]
    snapshots: tuple[Snapshot, ...]

    def step(self, tables: tuple[TableStep, ...], *, is_cut: bool) -> Step:
        rows = sum(self.rows.values())
        return Step(
            self.source_epoch, self.after, self.upto, self.end_lsn, self.commit_time_us, rows, tables, is_cut=is_cut
        )

    @classmethod
    def of(cls, points: Iterable[PointFacts]) -> _Part:
        part: _Part | None = None
        rows: dict[str, int] = {}
        snapshots: dict[str, Snapshot] = {}
        for point in points:
            if part is None:
                part = cls(point.source_epoch, point.offset - 1, 0, ZERO, 0, {}, ())
            part = replace(part, upto=point.offset, end_lsn=point.end_lsn, commit_time_us=point.commit_time_us)
            for table, count in point.tables.items():
                rows[table] = rows.get(table, 0) + count
            if point.snapshot is not None:
                snapshots[point.snapshot.table] = point.snapshot
        assert part is not None, "a part has points"
        return replace(part, rows=rows, snapshots=tuple(snapshots.values()))


def _divided(points: Iterable[PointFacts], cut: int) -> Iterator[list[PointFacts]]:
    """Divide points where an epoch ends, and at the last cut."""
    group: list[PointFacts] = []
    for point in points:
        if group and (group[-1].source_epoch != point.source_epoch or group[-1].offset <= cut < point.offset):
            yield group
            group = []
        group.append(point)
    if group:
        yield group
