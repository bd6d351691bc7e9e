"""The merge against a log in miniature: in whatever order things are read and promised, one order comes out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from walstream.feed.reading.entries import Chunk
from walstream.feed.reading.merge import Late, Merge, Run, frame_of
from walstream.positions import GlobalLsn


def chunk_of(name: str, first: int, lsns: list[int]) -> Chunk:
    encoded = [b"%b %d" % (name.encode(), lsn) for lsn in lsns]
    return Chunk(name, first, first + len(lsns), 0, lsns, encoded, [name.encode()] * len(lsns))


def lsns_of(runs: list[Run]) -> list[int]:
    return [lsn for chunk, start, end in runs for lsn in chunk.lsns[start:end]]


class Partition:
    """A partition as its leader sees it: entries, each appended later than everything that was promised."""

    def __init__(self, region: int, since_ms: int) -> None:
        self.region = region
        self.since_ms = since_ms
        self.lsns: list[int] = []
        self.least_ms = 0

    def append(self, now_ms: int, count: int) -> None:
        self.least_ms = max(now_ms, self.least_ms)
        stamp_ms = max(self.least_ms, self.since_ms)
        self.lsns += [GlobalLsn.of(stamp_ms << 16, self.region, len(self.lsns) + at) for at in range(count)]

    def resolve(self, now_ms: int) -> tuple[int, int]:
        self.least_ms = max(self.least_ms, now_ms + 1)
        return len(self.lsns), self.least_ms - 1


class MergedLog(RuleBasedStateMachine):
    """Leaders with clocks of their own, a list of regions, and a reader that learns of all this late, in any order."""

    @initialize(start_ms=st.sampled_from([0, 0, 5, 12, 30]), count=st.integers(1, 4))
    def begin(self, start_ms: int, count: int) -> None:
        self.start = GlobalLsn.at_time(start_ms)
        self.merge = Merge(self.start)
        self.merge.limit = 0
        self.regions: list[Partition] = [Partition(number + 1, 0) for number in range(count)]
        self.regions_least_ms = 0
        self.read: dict[int, int] = {}
        self.clocks = [10, 13, 7]
        self.out: list[int] = []

    def leader_of(self, number: int) -> int:
        return number % len(self.clocks)

    @rule(leader=st.integers(0, 2), ms=st.integers(-3, 9))
    def clock_moves(self, leader: int, ms: int) -> None:
        self.clocks[leader] = max(self.clocks[leader] + ms, 1)

    @rule(data=st.data(), count=st.integers(1, 5))
    def somebody_appends(self, data: st.DataObject, count: int) -> None:
        number = data.draw(st.integers(0, len(self.regions) - 1))
        self.regions[number].append(self.clocks[self.leader_of(number)], count)

    @rule(early=st.integers(0, 3))
    def a_partition_joins(self, early: int) -> None:
        """It may have records from before it was named; they count from when it was."""
        self.regions_least_ms = max(self.regions_least_ms, self.clocks[0])
        partition = Partition(len(self.regions) + 1, self.regions_least_ms)
        partition.append(1, early) if early else None
        self.regions.append(partition)

    @rule()
    def the_reader_learns_the_regions(self) -> None:
        """The answer to "what is resolved in the topic of regions", after everything before it was read."""
        known, time_ms = len(self.regions), self.clocks[0]
        self.regions_least_ms = max(self.regions_least_ms, time_ms + 1)
        for number in range(known):
            if number not in self.read:
                self.merge.add(number)
                self.read[number] = 0
        self.merge.limit = max(self.merge.limit, GlobalLsn.at_time(time_ms + 1))

    @precondition(lambda self: self.read)
    @rule(data=st.data(), count=st.integers(1, 6))
    def the_reader_reads(self, data: st.DataObject, count: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.read)))
        first = self.read[number]
        lsns = self.regions[number].lsns[first : first + count]
        self.merge.push(number, chunk_of(str(number), first, lsns))
        self.read[number] += len(lsns)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def the_reader_asks(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.read)))
        self.ask(number)

    def ask(self, number: int) -> None:
        offset, time_ms = self.regions[number].resolve(self.clocks[self.leader_of(number)])
        if self.read[number] >= offset:
            bound = GlobalLsn.at_time(max(time_ms + 1, self.regions[number].since_ms))
            self.merge.raise_bound(number, bound)

    @rule()
    def the_reader_catches_up(self) -> None:
        self.the_reader_learns_the_regions()
        for number, one in enumerate(self.regions):
            self.merge.push(number, chunk_of(str(number), self.read[number], one.lsns[self.read[number] :]))
            self.read[number] = len(one.lsns)
            self.ask(number)
        self.the_reader_takes(1000)

    @rule(entries_max=st.integers(1, 7))
    def the_reader_takes(self, entries_max: int) -> None:
        before = self.merge.position
        runs = self.merge.take(entries_max)
        taken = lsns_of(runs)
        assert len(taken) <= entries_max
        assert all(before <= lsn < self.merge.position for lsn in taken)
        if taken:
            frame = frame_of(runs, b"c")
            assert frame.lsns == taken
            assert frame.encoded == [b"%b %d" % (t.encode(), lsn) for t, lsn in zip(frame.topics, taken, strict=True)]
            assert [tenant.decode() for tenant in frame.tenants] == frame.topics
        self.out += taken

    @invariant()
    def nothing_is_twice_or_out_of_order(self) -> None:
        assert all(first < second for first, second in pairwise(self.out))

    @invariant()
    def everything_below_the_position_was_handed_out(self) -> None:
        wanted = sorted(lsn for one in self.regions for lsn in one.lsns if self.start <= lsn < self.merge.position)
        assert self.out == wanted

    @invariant()
    def whoever_is_blocked_has_nothing_to_show(self) -> None:
        for strand in self.merge.blocked():
            assert not strand.chunks

    def teardown(self) -> None:
        """When clocks agree, and all is read and asked, nothing is held back."""
        if not hasattr(self, "merge"):
            return
        top_ms = max([*self.clocks, *(lsn >> 80 for one in self.regions for lsn in one.lsns), self.regions_least_ms])
        self.clocks = [top_ms + 1] * 3
        self.the_reader_catches_up()
        assert self.out == sorted(lsn for one in self.regions for lsn in one.lsns if lsn >= self.start)
        assert self.merge.position >= GlobalLsn.at_time(top_ms + 1)


TestMergedLog = MergedLog.TestCase
TestMergedLog.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_comes_below_a_promise_is_refused() -> None:
    merge = Merge(0)
    merge.add("orders-0")
    merge.raise_bound("orders-0", 100)
    with pytest.raises(Late):
        merge.push("orders-0", chunk_of("orders", 0, [99, 100]))


def test_what_comes_below_what_was_read_is_refused() -> None:
    merge = Merge(50)
    merge.add("orders-0")
    merge.push("orders-0", chunk_of("orders", 0, [40, 60]))
    with pytest.raises(Late):
        merge.push("orders-0", chunk_of("orders", 2, [55, 70]))


def test_one_idle_partition_holds_up_all_and_is_named() -> None:
    merge = Merge(0)
    for name in ("a", "b", "c"):
        merge.add(name)
    merge.push("a", chunk_of("a", 0, [10, 20]))
    merge.raise_bound("b", 15)
    merge.raise_bound("c", 30)
    assert lsns_of(merge.take()) == [10]
    assert [strand.name for strand in merge.blocked()] == ["b"]
    assert merge.position == 15
    merge.raise_bound("b", 21)
    assert lsns_of(merge.take()) == [20]
    assert merge.position == 21
    merge.remove("b")
    merge.take()
    assert merge.position == 21, "a has promised nothing beyond its last entry"


def test_frames_end_by_bytes() -> None:
    merge = Merge(0)
    merge.add("a")
    merge.push("a", chunk_of("a", 0, list(range(1, 101))))
    each = merge.strands["a"].chunks[0].size_bytes // 100
    taken = lsns_of(merge.take(1000, each * 10))
    assert 5 <= len(taken) <= 12
    assert lsns_of(merge.take(1000, 1)) == [len(taken) + 1]


@given(st.lists(st.lists(st.integers(0, 300), unique=True, max_size=30), max_size=6), st.integers(1, 50))
def test_settled_strands_come_out_sorted(parts: list[list[int]], entries_max: int) -> None:
    merge = Merge(0)
    for number, part in enumerate(parts):
        merge.add(number)
        merge.push(number, chunk_of(str(number), 0, sorted(lsn * 10 + number for lsn in part)))
        merge.raise_bound(number, 10_000)
    found: list[int] = []
    while runs := merge.take(entries_max):
        found += lsns_of(runs)
    assert found == sorted(lsn * 10 + number for number, part in enumerate(parts) for lsn in part)


def test_a_promise_that_came_late_takes_back_nothing() -> None:
    """Promises travel with polls and as answers: one that was made earlier may arrive after a later one."""
    merge = Merge(0)
    for name in ("a", "b"):
        merge.add(name)
    merge.push("b", chunk_of("b", 0, [40, 120]))
    merge.raise_bound("a", 100)
    merge.raise_bound("a", 50)
    assert lsns_of(merge.take()) == [40]
    assert merge.position == 100
    with pytest.raises(Late):
        merge.push("a", chunk_of("a", 0, [60]))
    merge.push("a", chunk_of("a", 0, [100]))
    merge.raise_bound("b", 200)
    merge.raise_bound("a", 200)
    assert lsns_of(merge.take()) == [100, 120]
