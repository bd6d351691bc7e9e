"""Which points are valid, from wherever one begins to read; and a model of captures that crash, linger and compete.

The model writes with the real ledger and reads with the real chain and counts. It knows which transactions each
generation was sent, so the whole promise is one comparison: the rows read by the rule are the rows of every transaction
below the last valid point, each once, in order, whatever orphans, zombies and foreign records lie among them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.capture.chain import Chain
from walstream.capture.commit_points import (
    CommitRecord,
    OpenRecord,
    Origin,
    Point,
    PointRecord,
    RowFacts,
    SnapshotRecord,
    TableSnapshot,
)
from walstream.capture.ledger import Gap, Ledger, Written
from walstream.capture.reading import Counts
from walstream.capture.resuming import SourceState, resume
from walstream.errors import CorruptCommits, DataLoss, GenerationOver, RowsMissing
from walstream.positions import ZERO, Lsn, TopicPartition

ORIGIN = Origin("here", "1", 1, "walstream")
A = TopicPartition("w.a", 0)


def fold(records: list[CommitRecord], start: int = 0) -> list[Point]:
    chain = Chain(start)
    points = [chain.feed(offset, record) for offset, record in enumerate(records[start:], start)]
    return [point for point in points if point is not None]


def opened(epoch: int = 1) -> OpenRecord:
    return OpenRecord(epoch, ORIGIN, 0)


def point(gen: int, end_lsn: int, total: int, *, full: bool = False, sole: int = 0, **vector: int) -> PointRecord:
    rows = {"w.a-0": vector["rows"]} if vector.get("rows") else {}
    changed = {"w.a-0": vector["next"]} if "next" in vector else {}
    return PointRecord(gen, 1, str(Lsn(end_lsn)), 0, 0, total, 0, changed, rows, is_full=full, sole_until=sole)


def test_points_continue_one_another() -> None:
    first, second, third = fold(
        [
            opened(),
            point(0, 10, 0, full=True, sole=1),
            point(0, 20, 2, next=2, rows=2),
            point(0, 30, 3, next=9, rows=1),
        ]
    )
    assert (first.spans, first.next) == ((), {})
    (span,) = second.spans
    assert (span.start, span.stop, span.rows, span.lsn_from, span.lsn_to, span.gen) == (0, 2, 2, 10, 20, 0)
    (span,) = third.spans
    assert (span.start, span.stop, span.rows, span.lsn_from, span.lsn_to) == (2, 9, 1, 20, 30)
    assert third.next == {A: 9}


def test_a_zombies_late_point_is_void() -> None:
    points = fold(
        [
            opened(),
            point(0, 10, 0, full=True),
            opened(),
            point(0, 20, 1, next=1, rows=1),
            point(2, 10, 0, full=True),
            point(0, 30, 2, next=2, rows=1),
            point(2, 30, 2, next=5, rows=2),
        ]
    )
    assert [(one.offset, one.gen) for one in points] == [(1, 0), (4, 2), (6, 2)]
    assert points[-1].spans[0].start == 0, "untouched partitions inherit from the last valid point"


def test_a_late_point_before_the_open_is_valid_and_resumed_from() -> None:
    points = fold([opened(), point(0, 10, 0, full=True), point(0, 20, 1, next=1, rows=1), opened()])
    assert points[-1].end_lsn == 20


LONG = [
    opened(),
    point(0, 10, 0, full=True, sole=1),
    point(0, 20, 1, next=1, rows=1),
    point(0, 30, 2, next=2, rows=1, full=True, sole=3),
    point(0, 40, 3, next=3, rows=1),
]


@pytest.mark.parametrize(
    ("start", "offsets"), [(0, [1, 2, 3, 4]), (1, [1, 2, 3, 4]), (2, [3, 4]), (3, [3, 4]), (4, [])]
)
def test_reading_may_begin_anywhere_and_waits_for_a_full_point(start: int, offsets: list[int]) -> None:
    points = fold(LONG, start)
    assert [one.offset for one in points] == offsets
    if points and start:
        assert points[0].is_baseline
        assert points[0].spans == ()
    assert not any(one.is_baseline for one in points[1:])


def test_a_full_point_proves_its_generation_only_if_it_reaches_to_the_beginning() -> None:
    """Read from offset 4 on: the `open` at 3 is not seen, and the zombie's full point must not pass for the truth."""
    records: list[CommitRecord] = [
        opened(),
        point(0, 10, 0, full=True, sole=1),
        point(0, 20, 1, next=1, rows=1),
        opened(),
        point(0, 30, 2, next=2, rows=1, full=True, sole=3),
        point(3, 20, 1, next=1, full=True, sole=4),
        point(3, 40, 2, next=3, rows=1),
    ]
    assert [one.offset for one in fold(records)] == [1, 2, 5, 6]
    assert [one.offset for one in fold(records, 4)] == [5, 6]


@pytest.mark.parametrize(
    "broken",
    [
        [opened(), point(0, 10, 0)],
        [opened(), point(0, 10, 0, full=True), opened(), point(2, 20, 0)],
        [opened(), point(0, 10, 0, full=True), point(0, 5, 0)],
        [opened(), point(0, 10, 0, full=True), point(0, 20, 5, next=2, rows=2)],
        [opened(), point(0, 10, 0, full=True), point(0, 20, 2, next=1, rows=2)],
        [opened(), point(0, 10, 0, full=True), point(0, 20, 2, rows=2)],
        [opened(), point(0, 10, 0, full=True), point(0, 20, 2, next=2, rows=2), point(0, 30, 2, full=True)],
    ],
    ids=["delta first", "delta after open", "lsn back", "total", "too many rows", "no next", "vector not full"],
)
def test_points_that_contradict_each_other_are_an_error(broken: list[CommitRecord]) -> None:
    with pytest.raises(CorruptCommits):
        fold(broken)


def test_a_finished_snapshot_has_its_own_range_and_moves_nothing() -> None:
    one = TableSnapshot("public", "a", "s1", "0/A", rows=3)
    points = fold(
        [
            opened(),
            point(0, 10, 0, full=True),
            SnapshotRecord(0, 1, "begin", one),
            point(0, 20, 1, next=4, rows=1),
            SnapshotRecord(0, 1, "finished", one, {"w.a-0": 1}, {"w.a-0": 6}, {"w.a-0": 3}, 4),
            point(0, 30, 5, next=7, rows=1),
        ]
    )
    finished, after = points[2], points[3]
    assert (finished.snapshot, finished.end_lsn, finished.next) == (one, 20, {A: 4})
    (span,) = finished.spans
    assert (span.start, span.stop, span.rows, span.snapshot) == (1, 6, 3, "s1")
    assert after.spans[0].start == 4
    assert after.snapshots == {("public", "a"): one}


def test_an_unfinished_or_void_snapshot_is_nothing() -> None:
    one = TableSnapshot("public", "a", "s1", "0/A")
    finished = SnapshotRecord(0, 1, "finished", one, {}, {"w.a-0": 3}, {"w.a-0": 3}, 3)
    points = fold([opened(), point(0, 10, 0, full=True), SnapshotRecord(0, 1, "begin", one), opened(), finished])
    assert [one.offset for one in points] == [1]


# -- counts ----------------------------------------------------------------------------------------------------------


def test_counts_find_each_rows_point_and_miss_nothing() -> None:
    points = fold(
        [opened(), point(0, 10, 0, full=True), point(0, 20, 2, next=3, rows=2), point(0, 30, 3, next=5, rows=1)]
    )
    counts = Counts([span for one in points for span in one.spans])
    assert counts.admit(0, RowFacts(0, Lsn(10)))
    assert not counts.admit(1, RowFacts(7, Lsn(11)))
    assert counts.admit(2, RowFacts(0, Lsn(19)))
    with pytest.raises(RowsMissing):
        counts.check()
    assert not counts.admit(3, RowFacts(0, Lsn(19)))
    assert counts.admit(4, RowFacts(0, Lsn(20)))
    counts.check()


def test_missing_rows_below_the_beginning_of_the_log_are_told_as_such() -> None:
    points = fold([opened(), point(0, 10, 0, full=True), point(0, 20, 2, next=3, rows=2)])
    counts = Counts(points[-1].spans)
    counts.admit(2, RowFacts(0, Lsn(19)))
    with pytest.raises(DataLoss, match="begins at offset 2"):
        counts.check(log_start=2)


def test_orphans_that_retention_removed_are_no_loss() -> None:
    points = fold([opened(), point(0, 10, 0, full=True), point(0, 20, 1, next=3, rows=1)])
    counts = Counts(points[-1].spans)
    assert counts.admit(2, RowFacts(0, Lsn(19)))
    counts.check(log_start=2)


# -- the model -------------------------------------------------------------------------------------------------------


@dataclass
class Transaction:
    commit_lsn: int
    end_lsn: int
    rows: list[tuple[TopicPartition, int]]
    """Partition and a number that is the row."""


@dataclass
class Model:
    """A log, a source whose transactions never change, and captures that come and go."""

    dice: random.Random
    commits: list[CommitRecord] = field(default_factory=list)
    data: dict[TopicPartition, list[tuple[RowFacts, int]]] = field(default_factory=dict)
    source: list[Transaction] = field(default_factory=list)
    lsn: int = 100
    confirmed: int = 100
    zombies: list[Capture] = field(default_factory=list)

    def commit(self, row_count: int) -> None:
        commit_lsn = self.lsn + self.dice.randrange(5)
        end_lsn = commit_lsn + 1 + self.dice.randrange(3)
        number = sum(len(one.rows) for one in self.source)
        partitions = [TopicPartition("w.t", self.dice.randrange(3)) for _ in range(row_count)]
        self.source.append(
            Transaction(commit_lsn, end_lsn, list(zip(partitions, range(number, 1 << 60), strict=False)))
        )
        self.lsn = end_lsn

    def append(self, partition: TopicPartition, facts: RowFacts, number: int) -> int:
        records = self.data.setdefault(partition, [])
        records.append((facts, number))
        return len(records) - 1

    def last_valid(self) -> Point | None:
        chain = Chain()
        for offset, record in enumerate(self.commits):
            chain.feed(offset, record)
        return chain.last

    def confirm(self, lsn: int) -> None:
        self.confirmed = max(self.confirmed, lsn)


class Capture:
    """One generation: sends rows, then a point, then confirms, and may stop between any two steps."""

    def __init__(self, model: Model) -> None:
        self.model = model
        state = SourceState("1", 1, [], "walstream", Lsn(model.confirmed))
        gen = len(model.commits)
        model.commits.append(opened())
        base = resume(model.last_valid(), None, state)
        self.ledger = Ledger(gen, ORIGIN, base)
        self.position = next(
            (index for index, one in enumerate(model.source) if one.commit_lsn >= base.end_lsn), len(model.source)
        )
        self.written: Written | None = Written(base.end_lsn)

    def send_rows(self, transactions: int) -> None:
        """Write the rows of some transactions; the point is yet to come."""
        taken = self.model.source[self.position : self.position + transactions]
        if self.written is not None or not taken:
            return
        self.position += len(taken)
        self.written = Written(Lsn(taken[-1].end_lsn))
        for transaction in taken:
            for partition, number in transaction.rows:
                facts = RowFacts(self.ledger.gen, Lsn(transaction.commit_lsn))
                self.written.last[partition] = self.model.append(partition, facts, number)
                self.written.rows[partition] = self.written.rows.get(partition, 0) + 1

    def send_point(self, *, confirm: bool) -> None:
        """Write the point, look whether it is valid, and confirm."""
        if self.written is None:
            return
        written, self.written = self.written, None
        offset = len(self.model.commits)
        self.model.commits.append(self.ledger.point(written))
        self.ledger.landed(offset, self._inspect)
        if confirm:
            self.model.confirm(written.end_lsn)

    def _inspect(self, gap: Gap) -> None:
        if any(isinstance(record, OpenRecord) for record in self.model.commits[gap.first : gap.stop]):
            raise GenerationOver("another one has taken over")


def check(model: Model) -> None:
    """Read by the rule, and compare with the transactions below the last valid point."""
    points = fold(model.commits)
    spans: dict[TopicPartition, list[object]] = {}
    for one in points:
        for span in one.spans:
            spans.setdefault(span.partition, []).append(span)
    found: dict[TopicPartition, list[int]] = {}
    for partition, wanted in spans.items():
        counts = Counts(wanted)  # type: ignore[arg-type]
        found[partition] = [
            number for offset, (facts, number) in enumerate(model.data[partition]) if counts.admit(offset, facts)
        ]
        counts.check()
    end_lsn = points[-1].end_lsn if points else ZERO
    expected: dict[TopicPartition, list[int]] = {}
    for transaction in model.source:
        if transaction.commit_lsn < end_lsn:
            for partition, number in transaction.rows:
                expected.setdefault(partition, []).append(number)
    assert found == expected
    assert model.confirmed <= max(end_lsn, 100), "nothing is confirmed that the log does not hold"


STEPS = st.lists(
    st.sampled_from(["commit", "commit", "rows", "rows", "point", "point", "crash", "zombie", "foreign"]),
    min_size=5,
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(0, 1 << 32))
def test_exactly_once_among_crashes_zombies_and_strangers(steps: list[str], seed: int) -> None:
    dice = random.Random(seed)
    model = Model(dice)
    capture = Capture(model)
    for step in steps:
        if step == "commit":
            model.commit(dice.randrange(5))
        elif step == "rows":
            capture.send_rows(1 + dice.randrange(3))
        elif step == "point":
            capture.send_point(confirm=dice.random() < 0.8)
        elif step == "crash":
            # What it had begun may still happen: the next one does not wait for it.
            model.zombies.append(capture)
            capture = Capture(model)
        elif step == "zombie" and model.zombies:
            zombie = dice.choice(model.zombies)
            zombie.send_rows(1)
            try:
                zombie.send_point(confirm=True)
            except GenerationOver:
                model.zombies.remove(zombie)
        elif step == "foreign":
            facts = RowFacts(dice.randrange(len(model.commits)), Lsn(dice.randrange(100, model.lsn + 1)))
            if facts.gen != capture.ledger.gen:
                model.append(TopicPartition("w.t", dice.randrange(3)), facts, -1)
        check(model)
    capture.send_point(confirm=True)
    while capture.position < len(model.source):
        capture.send_rows(5)
        capture.send_point(confirm=True)
    check(model)
    assert capture.ledger.end_lsn == max([100, *(one.end_lsn for one in model.source)])
