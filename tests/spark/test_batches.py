"""What a batch means for each table: stories, and then a world in which everything that can happen does, at random.

In that world a table's content is the set of changes it holds and the snapshot it was built from, so that a change
applied twice, lost, or of the wrong moment is seen at once.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from walstream.errors import WarehouseFailed
from walstream.positions import ZERO, Lsn
from walstream.spark.batches import Base, Books, CutRow, Outcome, PointFacts, Snapshot, Step, TableStep
from walstream.spark.rereading import Passed, contradiction, locate


def point(
    offset: int, end: int, tables: dict[str, int] | None = None, epoch: int = 1, snapshot: Snapshot | None = None
) -> PointFacts:
    return PointFacts(offset, epoch, Lsn(end), end * 1000, tables or {}, snapshot)


def snap(table: str, lsn: int, name: str = "") -> Snapshot:
    return Snapshot(table, name or f"{table}@{lsn}", Lsn(lsn))


def fresh(has_snapshots: bool = True) -> Books:
    return Books(lambda _table, _epoch: None, None, None, has_snapshots=has_snapshots)


def one_step(books: Books, *points: PointFacts) -> Step:
    (step,) = books.steps(points)
    return step


def succeed(books: Books, step: Step, version: int = 0) -> CutRow:
    books.settle(step, {one.table: Outcome(version) for one in step.tables})
    return books.cut(step, 0, lambda _: version)


class TestStories:
    def test_a_table_without_a_snapshot_waits_and_is_not_listed(self) -> None:
        books = fresh()
        step = one_step(books, point(1, 10), point(2, 20, {"a": 3}))
        assert (step.after, step.upto, step.end_lsn, step.rows, step.tables) == (0, 2, 20, 3, ())
        assert step.is_cut
        assert succeed(books, step).versions == {}

    def test_a_finished_snapshot_replaces_with_every_change_since_its_lsn(self) -> None:
        books = fresh()
        succeed(books, one_step(books, point(1, 10), point(2, 20, {"a": 3})))
        step = one_step(books, point(3, 20, {"a": 5}, snapshot=snap("a", 12)))
        assert step.tables == (TableStep("a", Lsn(12), None, None, snap("a", 12)),)
        assert succeed(books, step, 4).versions == {"a": 4}

    def test_changes_follow_it(self) -> None:
        books = fresh()
        succeed(books, one_step(books, point(1, 10), point(2, 10, snapshot=snap("a", 10))))
        step = one_step(books, point(3, 20, {"a": 1}), point(4, 30, {"a": 1, "b": 9}))
        assert step.tables == (TableStep("a", Lsn(10), 2, 2),)
        cut = succeed(books, step, 7)
        assert (cut.versions, cut.point, cut.end_lsn) == ({"a": 7}, 4, 30)

    def test_an_untouched_table_costs_nothing_and_stays_listed(self) -> None:
        books = fresh()
        succeed(books, one_step(books, point(1, 10, snapshot=snap("a", 10))), 3)
        step = one_step(books, point(2, 20), point(3, 30))
        assert step.tables == ()
        assert succeed(books, step, 99).versions == {"a": 3}

    def test_a_snapshot_beyond_the_stream_waits_for_it(self) -> None:
        """PostgreSQL is ahead of the stream when a snapshot is taken: at the cut, the table would hold the future."""
        books = fresh()
        step = one_step(books, point(1, 10), point(2, 10, {"a": 4}, snapshot=snap("a", 25)))
        assert step.tables == ()
        assert succeed(books, step).versions == {}
        assert one_step(books, point(3, 24)).tables == ()
        (one,) = one_step(books, point(4, 25)).tables
        assert one.snapshot == snap("a", 25)

    def test_a_new_snapshot_of_a_table_replaces_it_and_it_stays_listed_until_then(self) -> None:
        books = fresh()
        succeed(books, one_step(books, point(1, 10, snapshot=snap("a", 10))), 1)
        step = one_step(books, point(2, 20, {"a": 1}), point(3, 20, {"a": 6}, snapshot=snap("a", 28)))
        assert step.tables == (TableStep("a", Lsn(10), 1, 7),)
        assert succeed(books, step, 2).versions == {"a": 2}
        step = one_step(books, point(4, 30, {"a": 1}))
        assert step.tables == (TableStep("a", Lsn(28), None, None, snap("a", 28)),)
        assert succeed(books, step, 3).snapshots == {"a": "a@28"}
        assert one_step(books, point(5, 40)).tables == ()

    def test_of_two_snapshots_in_a_batch_the_newer_counts(self) -> None:
        books = fresh()
        points = point(1, 10, snapshot=snap("a", 8)), point(2, 10, snapshot=snap("a", 9)), point(3, 12, {"a": 1})
        (one,) = one_step(books, *points).tables
        assert one.snapshot == snap("a", 9)

    def test_a_source_epoch_is_a_step_of_its_own_and_begins_without_tables(self) -> None:
        books = fresh()
        succeed(books, one_step(books, point(1, 100, snapshot=snap("a", 90))), 1)
        steps = books.steps([point(2, 110, {"a": 2}), point(3, 5, epoch=2), point(4, 9, {"a": 2}, epoch=2)])
        first = next(steps)
        assert (first.source_epoch, first.upto, first.tables) == (1, 2, (TableStep("a", Lsn(100), 1, 2),))
        assert succeed(books, first, 2).versions == {"a": 2}
        second = next(steps)
        assert (second.source_epoch, second.after, second.upto, second.tables) == (2, 2, 4, ())
        assert succeed(books, second).versions == {}
        (one,) = one_step(books, point(5, 9, {"a": 3}, epoch=2, snapshot=snap("a", 5))).tables
        assert one.snapshot == snap("a", 5)

    def test_without_snapshots_a_table_is_built_from_all_of_its_changes(self) -> None:
        books = fresh(has_snapshots=False)
        step = one_step(books, point(1, 10, {"a": 1}))
        (one,) = step.tables
        assert (one.from_lsn, one.after, one.snapshot) == (ZERO, None, Snapshot("a", "", ZERO))
        succeed(books, step)
        assert one_step(books, point(2, 20, {"a": 1})).tables == (TableStep("a", Lsn(10), 1, 1),)


class TestStopped:
    def test_others_go_on_and_it_is_not_listed(self) -> None:
        books = fresh()
        succeed(books, one_step(books, point(1, 10, snapshot=snap("a", 5)), point(2, 10, snapshot=snap("b", 5))), 1)
        step = one_step(books, point(3, 20, {"a": 1, "b": 1}))
        books.settle(step, {"a": Outcome(None, "cannot be"), "b": Outcome(2)})
        cut = books.cut(step, 0, lambda _: None)
        assert (cut.versions, cut.stopped) == ({"b": 2}, {"a": "cannot be"})
        assert cut.snapshots == {"a": "a@5", "b": "b@5"}
        step = one_step(books, point(4, 30, {"a": 1}))
        assert step.tables == ()
        assert succeed(books, step, 2).versions == {"b": 2}

    def test_one_that_fails_at_its_snapshot_is_tried_again_with_the_next_one_only(self) -> None:
        books = fresh()
        step = one_step(books, point(1, 10, snapshot=snap("a", 5)))
        books.settle(step, {"a": Outcome(None, "no key")})
        assert one_step(books, point(2, 20, {"a": 1})).tables == ()
        (one,) = one_step(books, point(3, 20, {"a": 1}, snapshot=snap("a", 15))).tables
        assert one.snapshot == snap("a", 15)

    def test_a_restart_reads_it_again_from_its_own_position(self) -> None:
        cut = CutRow(9, 1, Lsn(90), 0, {"b": 4}, {"a": "a@5", "b": "b@5"}, {"a": "cannot be"})
        base = Base(9, 1, Lsn(90), (snap("a", 5), snap("b", 5)))
        books = Books(lambda table, _: Lsn(30 if table == "a" else 40), cut, base, has_snapshots=True)
        step = one_step(books, point(10, 100, {"b": 1}))
        assert step.tables == (
            TableStep("a", Lsn(30), None, None, is_rewind=True),
            TableStep("b", Lsn(90), 9, 1),
        )
        assert succeed(books, step, 8).versions == {"a": 8, "b": 8}

    def test_one_that_never_had_a_commit_begins_with_its_snapshot(self) -> None:
        cut = CutRow(9, 1, Lsn(90), 0, {}, {}, {"a": "no key"})
        books = Books(lambda *_: None, cut, Base(9, 1, Lsn(90), (snap("a", 5),)), has_snapshots=True)
        (one,) = one_step(books, point(10, 100)).tables
        assert one.snapshot == snap("a", 5)


class TestRestarts:
    def test_a_table_that_has_committed_is_left_alone_and_listed(self) -> None:
        """A crash between the commits of two tables: the same batch comes again."""
        cut = CutRow(2, 1, Lsn(20), 0, {"a": 1, "b": 1}, {"a": "a@5", "b": "b@5"})
        base = Base(2, 1, Lsn(20), (snap("a", 5), snap("b", 5)))
        books = Books(lambda table, _: Lsn(30 if table == "a" else 20), cut, base, has_snapshots=True)
        step = one_step(books, point(3, 30, {"a": 1, "b": 1}))
        assert step.tables == (TableStep("b", Lsn(20), 2, 1),)
        books.settle(step, {"b": Outcome(2)})
        assert books.cut(step, 0, lambda _: 5).versions == {"a": 5, "b": 2}

    def test_a_first_snapshot_that_was_committed_is_not_read_again(self) -> None:
        books = Books(lambda *_: Lsn(30), None, Base(2, 1, Lsn(20)), has_snapshots=True)
        step = one_step(books, point(3, 30, {"a": 1}, snapshot=snap("a", 25)))
        assert step.tables == ()
        books.settle(step, {})
        assert books.cut(step, 0, lambda _: 0).versions == {"a": 0}

    def test_a_listed_table_whose_folder_is_gone_is_an_error(self) -> None:
        """Not an assertion: under `python -O` the cut would list a version that there is not."""
        cut = CutRow(2, 1, Lsn(20), 0, {"a": 1}, {"a": "a@5"})
        books = Books(lambda *_: Lsn(30), cut, Base(2, 1, Lsn(20), (snap("a", 5),)), has_snapshots=True)
        step = one_step(books, point(3, 30, {"a": 1}))
        books.settle(step, {})
        with pytest.raises(WarehouseFailed, match="The table a is listed in the cuts"):
            books.cut(step, 0, lambda _: None)

    def test_a_new_snapshot_is_done_again_where_nothing_tells_that_it_was_done(self) -> None:
        """The finished snapshot moves no LSN, so the table's own version is the same before and after."""
        cut = CutRow(2, 1, Lsn(20), 0, {"a": 1}, {"a": "a@5"})
        books = Books(lambda *_: Lsn(20), cut, Base(2, 1, Lsn(20), (snap("a", 5),)), has_snapshots=True)
        (one,) = one_step(books, point(3, 20, {"a": 4}, snapshot=snap("a", 18))).tables
        assert one.snapshot == snap("a", 18)

    def test_a_new_snapshot_after_the_repeated_batch_is_one_of_its_own(self) -> None:
        cut = CutRow(2, 1, Lsn(20), 0, {"a": 1}, {"a": "a@5"})
        books = Books(lambda *_: Lsn(30), cut, Base(2, 1, Lsn(20), (snap("a", 5),)), has_snapshots=True)
        succeed(books, one_step(books, point(3, 30, {"a": 1})), 2)
        (one,) = one_step(books, point(4, 30, {"a": 9}, snapshot=snap("a", 25))).tables
        assert one.snapshot == snap("a", 25)

    def test_a_lost_checkpoint_changes_nothing_up_to_the_last_cut(self) -> None:
        cut = CutRow(4, 1, Lsn(40), 0, {"a": 3}, {"a": "a@5"})
        books = Books(lambda *_: Lsn(40), cut, None, has_snapshots=True)
        for points in (
            [point(1, 10), point(2, 20, {"a": 1}, snapshot=snap("a", 5))],
            [point(3, 30, {"a": 1}), point(4, 40, {"a": 1})],
        ):
            step = one_step(books, *points)
            assert (step.tables, step.is_cut) == ((), False)
            books.settle(step, {})
        step = one_step(books, point(5, 50, {"a": 1}))
        assert step.tables == (TableStep("a", Lsn(40), 4, 1),)
        assert step.is_cut

    def test_beyond_the_last_cut_only_new_rows_count(self) -> None:
        """Capture writes points without rows, too: one more of them is no reason to write a table again."""
        cut = CutRow(3, 1, Lsn(30), 0, {"a": 4, "b": 2}, {"a": "a@10", "b": "b@10"})
        books = Books(lambda table, _: Lsn(20 if table == "a" else 30), cut, None, has_snapshots=True)
        replayed = [point(1, 10), point(2, 20, {"a": 3}), point(3, 30, {"b": 1})]
        steps = books.steps([*replayed, point(4, 40), point(5, 50, {"b": 2})])
        first = next(steps)
        assert (first.upto, first.tables, first.is_cut) == (3, (), False)
        books.settle(first, {})
        second = next(steps)
        assert (second.after, second.begin_lsn, second.is_cut) == (3, Lsn(30), True)
        assert second.tables == (TableStep("b", Lsn(30), 3, 2),)
        assert succeed(books, second).versions.keys() == {"a", "b"}

    def test_no_cut_while_a_table_is_ahead(self) -> None:
        """A table had committed beyond the last cut when the checkpoint was lost, and batches end elsewhere now."""
        cut = CutRow(2, 1, Lsn(20), 0, {"a": 1, "b": 1}, {"a": "a@5", "b": "b@5"})
        base = Base(2, 1, Lsn(20), (snap("a", 5), snap("b", 5)))
        books = Books(lambda table, _: Lsn(40 if table == "a" else 20), cut, base, has_snapshots=True)
        step = one_step(books, point(3, 30, {"a": 1, "b": 1}))
        assert (step.tables, step.is_cut) == ((TableStep("b", Lsn(20), 2, 1),), False)
        books.settle(step, {"b": Outcome(2)})
        step = one_step(books, point(4, 50, {"a": 2}))
        assert (step.tables, step.is_cut) == ((TableStep("a", Lsn(40), 3, 2),), True)


class TestLocate:
    POINTS = (
        Passed(3, 1, Lsn(30), 3),
        Passed(5, 1, Lsn(50), 5),
        Passed(6, 1, Lsn(50), 100, snapshot="s"),
        Passed(8, 1, Lsn(80), 8),
    )

    @pytest.mark.parametrize(("lsn", "after", "rows"), [(30, 3, 113), (49, 3, 113), (50, 6, 8), (80, 8, 0)])
    def test_of_a_table_that_is_behind(self, lsn: int, after: int, rows: int) -> None:
        found = locate(self.POINTS, TableStep("a", Lsn(lsn), None, None), 1, is_begin=False)
        assert found == (after, rows, None)

    @pytest.mark.parametrize(("lsn", "after", "rows"), [(30, 3, 113), (50, 5, 108), (70, 5, 108)])
    def test_of_a_snapshot_its_own_rows_are_among_them(self, lsn: int, after: int, rows: int) -> None:
        step = TableStep("a", Lsn(lsn), None, None, snap("a", lsn, "s"))
        assert locate(self.POINTS, step, 1, is_begin=False) == (after, rows, 100)

    def test_what_lies_before(self) -> None:
        step = TableStep("a", Lsn(29), None, None)
        assert locate(self.POINTS, step, 1, is_begin=False) is None
        assert locate(self.POINTS, step, 1, is_begin=True) == (-1, 116, None)
        assert locate(self.POINTS, step._replace(snapshot=snap("a", 29, "t")), 1, is_begin=True) is None

    def test_every_point_of_an_earlier_epoch_is_before(self) -> None:
        points = (*self.POINTS, Passed(9, 2, Lsn(10), 0), Passed(10, 2, Lsn(20), 2))
        assert locate(points, TableStep("a", Lsn(5), None, None), 2, is_begin=False) == (8, 2, None)


TABLES = ("a", "b", "c")


class TestWhoseCut:
    """A cut says something about the log that it was made from, and nothing about any other."""

    CUT = CutRow(50, 2, Lsn(500), 1, {"a": 7}, {"a": "s"})

    def base(self, offset: int, epoch: int, lsn: int) -> Base:
        return Base(offset, epoch, Lsn(lsn))

    def test_the_log_has_its_point(self) -> None:
        assert contradiction(self.CUT, self.base(50, 2, 500), None, 51) == ""

    @pytest.mark.parametrize("there", [(50, 2, 499), (50, 1, 500), (49, 2, 500)])
    def test_the_log_has_another_point_there(self, there: tuple[int, int, int]) -> None:
        assert contradiction(self.CUT, self.base(*there), None, 51).startswith("there it has the point at offset")

    def test_the_log_is_too_short(self) -> None:
        assert contradiction(self.CUT, None, None, 50) == "it ends at offset 50"

    def test_what_was_removed_contradicts_nothing_unless_what_follows_does(self) -> None:
        assert contradiction(self.CUT, None, None, 51) == ""
        assert contradiction(self.CUT, None, self.base(60, 2, 500), 61) == ""
        assert contradiction(self.CUT, None, self.base(60, 3, 1), 61) == ""
        for first in (self.base(60, 2, 499), self.base(60, 1, 900)):
            assert contradiction(self.CUT, None, first, 61).startswith("the first one that is left is the point at")


@dataclass
class Table:
    """A table of the destination: its versions, and the transactions by epoch."""

    versions: list[tuple[str, frozenset[tuple[int, int]]]] = field(default_factory=list)
    applied: dict[int, Lsn] = field(default_factory=dict)


class Crash(Exception):
    """The driver is killed."""


class World:
    """A log with its truth, a destination, and a pipeline that is killed in between."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.points: list[PointFacts] = []
        self.changes: dict[str, list[tuple[int, int]]] = {table: [] for table in TABLES}
        self.tables = {table: Table() for table in TABLES}
        self.cuts: list[CutRow] = []
        self.checkpoint = -1
        self.planned = 0
        self.has_lost = False
        self._write_log()

    def _write_log(self) -> None:
        dice, offset = self.dice, 0
        for epoch in range(1, dice.randrange(1, 3) + 1):
            end, lsns = 0, dice.randrange(30, 80)
            for lsn in range(1, lsns):
                for table in TABLES:
                    if dice.random() < 0.3:
                        self.changes[table].append((epoch, lsn))
            snapshots = [(table, dice.randrange(lsns)) for table in TABLES for _ in range(dice.randrange(1, 3))]
            dice.shuffle(snapshots)
            while end < lsns or snapshots:
                offset += dice.randrange(1, 3)  # Void points and opens lie between.
                if snapshots and dice.random() < 0.2:
                    table, lsn = snapshots.pop()
                    # It is complete after it was taken; the stream may still be behind it.
                    snapshot = Snapshot(table, f"{epoch}-{table}-{lsn}-{offset}", Lsn(lsn))
                    held = len(self._truth(table, epoch, lsn))
                    self.points.append(PointFacts(offset, epoch, Lsn(end), 0, {table: held}, snapshot))
                    continue
                # The first point of an epoch has no rows.
                start, end = end, min(lsns, end + (dice.randrange(6) if end else 1))
                rows = {
                    table: count
                    for table in TABLES
                    if (count := sum(e == epoch and start <= lsn < end for e, lsn in self.changes[table]))
                }
                self.points.append(PointFacts(offset, epoch, Lsn(end), 0, rows))

    def _truth(self, table: str, epoch: int, lsn: int) -> frozenset[tuple[int, int]]:
        return frozenset(change for change in self.changes[table] if change < (epoch, lsn))

    def run(self) -> None:
        """Run a pipeline from its checkpoint until it is killed, is stopped or has read everything."""
        before = [one for one in self.points if one.offset <= self.checkpoint]
        self._catch_up()
        books = Books(self._applied, self.cuts[-1] if self.cuts else None, _base(before), has_snapshots=True)
        rest = self.points[len(before) :]
        while rest:
            # Spark writes down the end of a batch before it begins, and repeats that batch after a crash.
            size = self.planned or self.dice.randrange(1, 8)
            self.planned = size
            batch, rest = rest[:size], rest[size:]
            self._batch(books, batch)
            self.checkpoint, self.planned = batch[-1].offset, 0
            if self.dice.random() < 0.1:
                return

    def _catch_up(self) -> None:
        if not self.cuts or self.dice.random() < 0.3:
            return
        last = self.cuts[-1]
        base = _base([one for one in self.points if one.offset <= last.point])
        books = Books(self._applied, last, base, has_snapshots=True)
        step = books.catch_up()
        if step is not None:
            assert not {one.table for one in step.tables} & last.versions.keys()
            self._step(books, step)

    def _applied(self, table: str, epoch: int) -> Lsn | None:
        return self.tables[table].applied.get(epoch)

    def _batch(self, books: Books, batch: list[PointFacts]) -> None:
        for step in books.steps(batch):
            self._step(books, step)
            self._maybe_crash()

    def _step(self, books: Books, step: Step) -> None:
        outcomes = {}
        for one in self.dice.sample(step.tables, len(step.tables)):
            self._maybe_crash()
            if self.dice.random() < 0.03:
                outcomes[one.table] = Outcome(None, "it failed")
                continue
            self._write(one, step)
            outcomes[one.table] = Outcome(len(self.tables[one.table].versions) - 1)
        books.settle(step, outcomes)
        self._maybe_crash()
        if step.is_cut:
            cut = books.cut(step, 0, lambda table: len(self.tables[table].versions) - 1)
            last = self.cuts[-1] if self.cuts else None
            assert last is None or cut.point > last.point or cut.versions.keys() >= last.versions.keys()
            self.cuts.append(cut)
            self._check(cut)

    def _maybe_crash(self) -> None:
        if self.dice.random() < 0.03:
            raise Crash

    def _write(self, one: TableStep, step: Step) -> None:
        """Read a table's rows as the pipeline does, and commit them as a writer does."""
        table = self.tables[one.table]
        after = one.after
        if after is None:
            found = locate(self._passed(one.table, step.upto), one, step.source_epoch, is_begin=True)
            assert found is not None
            after = found.after
        read = [p for p in self.points if after < p.offset <= step.upto]
        before = [p for p in self.points if p.offset <= after]
        lsn_from = before[-1].end_lsn if before and before[-1].source_epoch == step.source_epoch else ZERO
        rows = {
            (epoch, lsn)
            for epoch, lsn in self.changes[one.table]
            if epoch == step.source_epoch and max(lsn_from, one.from_lsn) <= lsn < step.end_lsn
        }
        if one.snapshot is None:
            name, held = table.versions[-1]
            assert not rows & held, "a change is applied twice"
            held |= rows
        else:
            assert any(p.snapshot == one.snapshot for p in read), "the snapshot's rows are not read"
            name, held = one.snapshot.id, self._truth(one.table, step.source_epoch, one.snapshot.lsn) | rows
        table.versions.append((name, frozenset(held)))
        assert table.applied.get(step.source_epoch, ZERO) <= step.end_lsn
        table.applied[step.source_epoch] = step.end_lsn

    def _passed(self, table: str, upto: int) -> Iterable[Passed]:
        for p in self.points:
            if p.offset <= upto:
                yield Passed(
                    p.offset, p.source_epoch, p.end_lsn, p.tables.get(table, 0), p.snapshot.id if p.snapshot else None
                )

    def _check(self, cut: CutRow) -> None:
        """Every listed version is the truth at the cut, built from the newest snapshot that the stream has reached."""
        for table, version in cut.versions.items():
            name, held = self.tables[table].versions[version]
            assert held == self._truth(table, cut.source_epoch, cut.end_lsn), f"{table} at {cut}"
            of_table = [
                p
                for p in self.points
                if p.source_epoch == cut.source_epoch
                and p.snapshot is not None
                and p.snapshot.table == table
                and p.snapshot.lsn <= cut.end_lsn
            ]
            due = [p.snapshot.id for p in of_table if p.snapshot is not None and p.offset <= cut.point]
            # A snapshot moves no LSN: at the same LSN a crash may have left the table with the one of the next batch.
            next_ones = [p.snapshot.id for p in of_table if p.snapshot is not None and p.end_lsn == cut.end_lsn]
            assert name in {*next_ones, *(due if self.has_lost else due[-1:])}


def _base(points: list[PointFacts]) -> Base | None:
    if not points:
        return None
    last = points[-1]
    newest = {
        p.snapshot.table: p.snapshot for p in points if p.source_epoch == last.source_epoch and p.snapshot is not None
    }
    return Base(last.offset, last.source_epoch, last.end_lsn, tuple(newest.values()))


@pytest.mark.parametrize("seed", range(300))
def test_every_cut_is_the_truth_whatever_is_killed_and_lost(seed: int) -> None:
    dice = random.Random(seed)
    world = World(dice)
    may_lose = dice.random() < 0.5
    last = world.points[-1].offset
    while world.checkpoint != last:
        try:
            world.run()
        except Crash:
            if may_lose and dice.random() < 0.1:
                world.checkpoint, world.planned, world.has_lost = -1, 0, True
    # The last cut is the end of the log, unless a checkpoint was lost behind it.
    assert world.cuts[-1].point == last
    # A table that failed is tried again by a restart, also when there is nothing new.
    for _ in range(40):
        with contextlib.suppress(Crash):
            world.run()
    assert world.cuts[-1].point == last
    assert set(world.cuts[-1].versions) == set(TABLES)
