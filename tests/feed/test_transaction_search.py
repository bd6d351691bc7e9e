"""Places among commit points: what halving the topic finds is what reading all of it finds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.capture.chain import Chain
from walstream.capture.commit_points import CommitRecord, OpenRecord, Origin, Point, TableSnapshot
from walstream.capture.ledger import Ledger, Written
from walstream.capture.resuming import SourceState, resume
from walstream.feed.reading.calls import EARLIEST, LATEST, Found, TopicMetadata
from walstream.feed.reading.entries import Lane, Region
from walstream.feed.reading.log_client import LogClient
from walstream.feed.transactions.points import Commits, Fold, Placed, Told
from walstream.feed.transactions.search import Search, is_broken
from walstream.positions import Lsn, TopicPartition

COMMITS = TopicPartition("w.commits", 0)
PARTITIONS = [TopicPartition("w.a", 0), TopicPartition("w.b", 0), TopicPartition("w.b", 1)]
METADATA = TopicMetadata(UUID(int=0), {0: 1})
ORIGIN = Origin("here", "1", 1, "walstream")
SOURCE = SourceState("1", 1, (), "walstream", Lsn(0))
SINCE_MS = 1_000
PIECE, WINDOW = 3, 8
"""Records of one answer; records before a place that tell its point, if there is a full vector among them."""


@dataclass
class Topic:
    """The commits topic, and where the partitions of rows begin: what a search asks of the log, in memory."""

    records: list[Told] = field(default_factory=list)
    start: int = 0
    starts: dict[TopicPartition, int] = field(default_factory=dict)
    partition: TopicPartition = COMMITS
    topics: dict[str, TopicMetadata] = field(default_factory=lambda: {"w.a": METADATA, "w.b": METADATA})

    def add(self, record: CommitRecord, time_ms: int) -> int:
        self.records.append(Told(len(self.records), time_ms, record))
        return len(self.records) - 1

    async def read(self, position: int, stop: int | None = None) -> list[Told]:
        assert position >= self.start, "nothing before is there"
        return self.records[position : len(self.records) if stop is None else stop][:PIECE]

    async def offsets_of_all(self, wanted: Mapping[TopicPartition, int], _: float) -> dict[TopicPartition, Found]:
        return {one: Found(0, self._offset(one, time_ms), 0) for one, time_ms in wanted.items()}

    def _offset(self, partition: TopicPartition, time_ms: int) -> int:
        if partition != COMMITS:
            assert time_ms == EARLIEST
            return self.starts.get(partition, 0)
        if time_ms in (EARLIEST, LATEST):
            return self.start if time_ms == EARLIEST else len(self.records)
        later = (told.offset for told in self.records if told.time_ms >= time_ms and told.offset >= self.start)
        return next(later, -1)

    def search(self) -> Search:
        client, commits = cast(LogClient, self), cast(Commits, self)
        return Search(client, commits, LANE, self.start, len(self.records), WINDOW)

    def placed(self) -> list[Placed]:
        fold = Fold(Chain(self.start), self.start)
        return [placed for told in self.records[self.start :] if (placed := fold.feed(told)) is not None]


LANE = Lane("c", "w.commits", 0, {0: Region(4, SINCE_MS)})


def written_by(dice: random.Random) -> Topic:
    """Generations that write points and snapshots, with a zombie's points between them."""
    topic = Topic()
    time_ms, last, ledger = dice.choice([10, SINCE_MS - 50, SINCE_MS + 10]), None, None
    chain, zombies, tables = Chain(0), [], 0

    def append(record: CommitRecord) -> int:
        offset = topic.add(record, time_ms)
        chain.feed(offset, record)
        return offset

    for _ in range(dice.randint(1, 60)):
        time_ms += dice.choice([0, 0, 1, 30])
        kind = dice.choice(["point"] * 12 + ["open", "snapshot", "zombie"])
        if ledger is None or kind == "open":
            base = resume(last, chain.opened, SOURCE)
            gen = append(OpenRecord(base.source_epoch, ORIGIN, 0))
            if ledger is not None:
                zombies.append(ledger)
            ledger = Ledger(gen, ORIGIN, base)
            ledger.landed(append(ledger.point(Written(ledger.end_lsn))), lambda _: None)
        if kind == "zombie":
            if zombies:
                append(zombies[-1].point(Written(zombies[-1].end_lsn)))
            continue
        written = _written(dice, ledger)
        if kind == "snapshot":
            tables += 1
            lsn, written.end_lsn = str(ledger.end_lsn), Lsn(0)
            snapshot = TableSnapshot("public", f"t{tables}", f"{tables}", lsn)
            start = {one: last_offset - written.rows[one] + 1 for one, last_offset in written.last.items()}
            ledger.landed(append(ledger.finish_snapshot(snapshot, start, written)), lambda _: None)
        else:
            if dice.random() < 0.15:
                ledger._until_full = 0  # A full vector sooner than after a thousand points.
            ledger.landed(append(ledger.point(written)), lambda _: None)
        last = chain.last
    return topic


def _written(dice: random.Random, ledger: Ledger) -> Written:
    written = Written(Lsn(ledger.end_lsn + dice.randint(0, 3)))
    for partition in dice.sample(PARTITIONS, dice.randint(0, len(PARTITIONS))):
        rows = dice.randint(1, 4)
        ends = max(
            ledger.next.get(partition, 0), *(one.next.get(str(partition), 0) for one in ledger.snapshots.values()), 0
        )
        written.rows[partition] = rows
        written.last[partition] = ends + dice.randint(0, 2) + rows - 1
    return written


topics = st.integers(0, 1 << 32).map(random.Random).map(written_by)
lsns = st.tuples(st.integers(0, 40), st.integers(-2, 2))


@settings(deadline=None)
@given(topics, lsns)
async def test_seek_finds_every_point_that_ends_there_or_later(topic: Topic, near: tuple[int, int]) -> None:
    everything = topic.placed()
    ends = [LANE.lsn(placed.point.rows_total, placed.time_ms) for placed in everything]
    lsn = max(0, (ends[near[0] % len(ends)] if ends else 0) + near[1])
    fold = await topic.search().seek(lsn)
    found = [placed for told in topic.records[fold.position :] if (placed := fold.feed(told)) is not None]
    assert [one for one, end in zip(everything, ends, strict=True) if end >= lsn] == [
        one for one in found if LANE.lsn(one.point.rows_total, one.time_ms) >= lsn
    ]


@settings(deadline=None)
@given(topics)
async def test_the_last_point(topic: Topic) -> None:
    last, expected = await topic.search().last(), topic.placed()[-1]
    assert last is not None
    assert (_plain(last.point), last.time_ms) == (_plain(expected.point), expected.time_ms)
    assert (last.point.next, last.point.snapshots) == (expected.point.next, expected.point.snapshots)


@settings(deadline=None)
@given(topics, st.lists(st.integers(0, 60), min_size=len(PARTITIONS), max_size=len(PARTITIONS)))
async def test_the_last_point_of_which_rows_were_removed(topic: Topic, starts: list[int]) -> None:
    topic.starts = dict(zip(PARTITIONS, starts, strict=True))
    broken = [placed.point for placed in topic.placed() if is_broken(placed.point, topic.starts)]
    found = await topic.search().last_broken()
    assert (found and found.point.offset) == (broken[-1].offset if broken else None)


@settings(deadline=None)
@given(topics, st.data())
async def test_points_whose_beginning_was_removed(topic: Topic, data: st.DataObject) -> None:
    """Begun in the middle, the first point that is known for sure is the last of which nobody can tell its rows."""
    before = {placed.point.offset: placed.point for placed in topic.placed()}
    topic.start = data.draw(st.integers(0, len(topic.records)))
    found = await topic.search().last_broken()
    rest = topic.placed()
    if topic.start and rest:
        assert found is not None
        assert found.point == rest[0].point
        assert found.point.is_baseline
    assert [_plain(placed.point) for placed in rest] == [_plain(before[placed.point.offset]) for placed in rest]


@settings(deadline=None)
@given(topics)
async def test_a_topic_that_is_gone_takes_the_points_with_its_rows_along(topic: Topic) -> None:
    topic.topics = {"w.a": METADATA}
    touched = [one.point for one in topic.placed() if any(span.partition.topic == "w.b" for span in one.point.spans)]
    found = await topic.search().last_broken()
    assert (found and found.point.offset) == (touched[-1].offset if touched else None)


def _plain(point: Point) -> tuple[int, Lsn, int]:
    return point.gen, point.end_lsn, point.rows_total
