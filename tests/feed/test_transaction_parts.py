"""Transactions as entries: whatever a partition's rows arrive in, the parts are those of a model that has them all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.capture.commit_points import Span
from walstream.errors import CorruptCommits, RowsMissing
from walstream.feed.reading.entries import Lane, Region
from walstream.feed.transactions.parts import Count, Cutter, Envelope, Part, Row, SpanRows, merge
from walstream.feed.wal_pb2 import OP_BATCH, BatchWrite, Header, WalBatch, WalEntry
from walstream.positions import GlobalLsn, Lsn, TopicPartition

GEN = 7
PARTITIONS = [TopicPartition("w.public.a", 0), TopicPartition("w.public.a", 1), TopicPartition("w.public.b", 0)]
TENANTS = ("", "acme", "umbrella")
ROWS_MAX, BYTES_MAX = 3, 1_000
"""Small limits, so that small transactions have parts."""


@dataclass(frozen=True)
class Change:
    """A row as the source has it."""

    commit_lsn: int
    seq: int
    place: int
    tenant: str
    padding: int = 0


@dataclass
class Log:
    """What the partitions hold: rows, and what does not belong to the point."""

    partitions: list[list[WalEntry]] = field(default_factory=lambda: [[] for _ in PARTITIONS])
    rows: list[tuple[Change, WalEntry]] = field(default_factory=list)

    def write(self, change: Change, gen: int = GEN, *, in_headers: bool = False) -> None:
        offset = len(self.partitions[change.place])
        entry = WalEntry(
            tenant_id=change.tenant,
            key=b"k",
            topic=PARTITIONS[change.place].topic,
            partition=PARTITIONS[change.place].partition,
            offset=offset,
            commit_lsn=change.commit_lsn,
            seq=change.seq,
            txid=change.commit_lsn + 1,
            committed_at_ms=change.commit_lsn + 2,
        )
        if in_headers:
            entry.headers.append(Header(name="gen", value=b"%d" % gen))
            entry.value = b"x" * change.padding
        else:
            source = b'{"commit_lsn":%d,"seq":%d,"gen":%d,"snapshot":false}' % (change.commit_lsn, change.seq, gen)
            entry.value = b'{"before":null,"after":{"v":"%b"},"source":%b}' % (b"x" * change.padding, source)
        self.partitions[change.place].append(entry)
        if gen == GEN:
            self.rows.append((change, entry))

    def write_foreign(self, place: int) -> None:
        offset = len(self.partitions[place])
        self.partitions[place].append(WalEntry(key=b"k", value=b"anything", offset=offset))

    def spans(self, lsn_to: int) -> list[SpanRows]:
        counts = [sum(change.place == place for change, _ in self.rows) for place in range(len(PARTITIONS))]
        return [
            SpanRows(Span(partition, 0, len(self.partitions[place]), counts[place], GEN, Lsn(1), Lsn(lsn_to)), place)
            for place, partition in enumerate(PARTITIONS)
            if counts[place]
        ]


def encoded(entry: WalEntry) -> bytes:
    return WalBatch(entries=[entry]).SerializeToString()


def written_by(dice: random.Random) -> Log:
    """Transactions over several partitions, with a crashed generation's rows and foreign records between them."""
    log = Log()
    commit_lsn = 0
    for _ in range(dice.randint(1, 6)):
        commit_lsn += dice.randint(1, 3)
        for seq in range(1, dice.randint(1, 9) + 1):
            for _ in range(dice.choice([1, 1, 1, 2])):  # The same change in two topics, or with a tombstone.
                place, tenant = dice.randrange(len(PARTITIONS)), dice.choice(TENANTS)
                change = Change(commit_lsn, seq, place, tenant, dice.choice([0, 10, 400, 2_000]))
                log.write(change, in_headers=dice.random() < 0.5)
        for _ in range(dice.randint(0, 3)):
            place = dice.randrange(len(PARTITIONS))
            if dice.random() < 0.5:
                log.write(Change(commit_lsn, 1, place, "acme"), GEN - 1)
            else:
                log.write_foreign(place)
    return log


def model(log: Log, tenant: str | None) -> list[list[WalEntry]]:
    """What a subscriber gets of each transaction, if anything."""
    transactions: dict[int, list[tuple[Any, WalEntry]]] = {}
    for change, entry in log.rows:
        if tenant is None or change.tenant == tenant:
            place = (change.seq, change.place, entry.offset)
            transactions.setdefault(change.commit_lsn, []).append((place, entry))
    return [[entry for _, entry in sorted(rows, key=lambda row: row[0])] for _, rows in sorted(transactions.items())]


def read(log: Log, tenant: str | None, steps: Iterator[int], base: int = 0) -> list[Part]:
    """Do what a source does, with chunks as large as `steps` says."""
    sources = log.spans(1_000)
    cutter = Cutter(base, rows_max=ROWS_MAX, bytes_max=BYTES_MAX)
    parts: list[Part] = []
    while sources:
        for source in sources:
            while not source.is_complete and not source.rows:
                fill(log, source, tenant, next(steps))
        parts += cutter.feed(merge(sources))
        sources = [source for source in sources if source.rows or not source.is_complete]
    return parts + cutter.end()


def fill(log: Log, source: SpanRows, tenant: str | None, count: int) -> None:
    entries = log.partitions[source.place][source.position :][:count]
    wanted = None if tenant is None else [entry.tenant_id == tenant for entry in entries]
    following = source.position + len(entries)
    source.add([encoded(entry) for entry in entries], range(source.position, following), following, wanted)


def cycle(steps: list[int]) -> Iterator[int]:
    while True:
        yield from steps


logs = st.integers(0, 1 << 32).map(random.Random).map(written_by)
chunk_sizes = st.lists(st.integers(1, 6), min_size=1, max_size=8).map(cycle)
tenants = st.sampled_from([None, "acme", "umbrella"])


@settings(deadline=None)
@given(logs, tenants, chunk_sizes)
def test_transactions_are_whole_and_in_order(log: Log, tenant: str | None, steps: Iterator[int]) -> None:
    transactions: list[list[bytes]] = []
    for part in read(log, tenant, steps):
        if part.number == 0:
            transactions.append([])
        transactions[-1] += part.entries
    assert transactions == [[encoded(entry) for entry in rows] for rows in model(log, tenant)]


@settings(deadline=None)
@given(logs, tenants, chunk_sizes)
def test_parts_are_numbered_and_the_last_one_says_so(log: Log, tenant: str | None, steps: Iterator[int]) -> None:
    expected = 0
    for part in read(log, tenant, steps):
        assert part.number == expected
        assert part.entries
        assert len(part.entries) <= ROWS_MAX
        assert len(part.entries) == 1 or sum(map(len, part.entries)) <= BYTES_MAX
        expected = 0 if part.is_last else part.number + 1
    assert expected == 0, "the last transaction was not closed"


@settings(deadline=None)
@given(logs, tenants, chunk_sizes)
def test_the_size_of_chunks_changes_nothing(log: Log, tenant: str | None, steps: Iterator[int]) -> None:
    assert read(log, tenant, steps) == read(log, tenant, cycle([1_000]))


@settings(deadline=None)
@given(logs, tenants, chunk_sizes, st.integers(0, 1 << 33))
def test_ordinals_count_all_rows_whoever_asks(log: Log, tenant: str | None, steps: Iterator[int], base: int) -> None:
    everything = sorted((change.commit_lsn, change.seq, change.place, entry.offset) for change, entry in log.rows)
    ends = {commit_lsn: base + number for number, (commit_lsn, *_) in enumerate(everything, 1)}
    ordinals = {place: base + number for number, place in enumerate(everything, 1)}
    last = base
    for part in read(log, tenant, steps, base):
        assert part.ordinal > last
        last = part.ordinal
        row = WalBatch.FromString(part.entries[-1]).entries[0]
        place = PARTITIONS.index(TopicPartition(row.topic, row.partition))
        own = ordinals[row.commit_lsn, row.seq, place, row.offset]
        assert part.ordinal == (ends[part.commit_lsn] if part.is_last else own)
    assert last <= base + len(log.rows)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=2, max_size=20), st.integers(0, 1 << 34))
def test_lsns_ascend_from_part_to_part(points: list[tuple[int, int]], first: int) -> None:
    """Points come within the same millisecond or later, and ordinals grow; a roll has a region behind those before."""
    lane = Lane("c", "w.commits", 0, {roll: Region(5 + 3 * roll, 1_000) for roll in range(64)})
    lsns: list[int] = []
    ordinal, time_ms = first, 0
    for pause_ms, rows in points:
        time_ms += pause_ms * 600
        for _ in range(rows):
            ordinal += 1 << 30
            lsns.append(lane.lsn(ordinal, time_ms))
    assert all(a < b for a, b in pairwise(lsns))
    assert [str(GlobalLsn(lsn)) for lsn in lsns] == sorted(str(GlobalLsn(lsn)) for lsn in lsns)


@settings(deadline=None)
@given(logs, chunk_sizes, st.integers(0, 30))
def test_a_row_too_few_is_no_shorter_answer(log: Log, steps: Iterator[int], lost: int) -> None:
    spans = log.spans(1_000)
    source = spans[lost % len(spans)]
    kept = [entry for _, entry in log.rows if PARTITIONS.index(_partition(entry)) == source.place][1:]
    with pytest.raises(RowsMissing):
        source.add([encoded(entry) for entry in kept], [entry.offset for entry in kept], source.span.stop)
    count = Count(SpanRows(source.span, source.place))
    with pytest.raises(RowsMissing):
        count.add([encoded(entry) for entry in kept], [entry.offset for entry in kept], source.span.stop)


@settings(deadline=None)
@given(logs, st.integers(0, 30))
def test_counting_goes_on_from_what_is_known(log: Log, known: int) -> None:
    for source in log.spans(1_000):
        entries = [encoded(entry) for entry in log.partitions[source.place]]
        known = min(known, len(entries) - 1)
        source.add(entries[:known], range(known), known)
        count = Count(source)
        count.add(entries[known:], range(known, len(entries)), source.span.stop)
        assert count.is_complete


def test_rows_that_go_back_are_refused() -> None:
    log = Log()
    for commit_lsn, seq in ((5, 1), (5, 2), (4, 3)):
        log.write(Change(commit_lsn, seq, 0, ""))
    (source,) = log.spans(1_000)
    with pytest.raises(CorruptCommits, match=r"offset 2 of w\.public\.a-0 belongs before the one at 1"):
        source.add([encoded(entry) for entry in log.partitions[0]], range(3), 3)


def test_nothing_is_certain_while_a_partition_is_unknown() -> None:
    log = Log()
    log.write(Change(5, 1, 0, ""))
    log.write(Change(5, 2, 1, ""))
    known, unknown = log.spans(1_000)
    fill(log, known, None, 10)
    assert merge([known, unknown]) == []
    fill(log, unknown, None, 10)
    assert [row.seq for row in merge([known, unknown])] == [1, 2]


def test_a_point_without_anything_for_the_subscriber_has_no_parts() -> None:
    cutter = Cutter(10)
    assert cutter.feed([Row(5, seq, 0, seq) for seq in range(1, 5)]) == []
    assert cutter.end() == []
    assert cutter.ordinal == 14


def test_a_part_is_an_entry() -> None:
    rows = [encoded(WalEntry(lsn="x", key=b"k", value=b"v", seq=seq)) for seq in (1, 2)]
    part = Part(9, 2, True, 0x1234, 77, 1_700_000_000_123, rows)
    lsn = GlobalLsn.of(1_700_000_000_500 << 16, 3, 9)
    (entry,) = WalBatch.FromString(Envelope("c", b"acme", "w.commits", 41, "0/1-2-3").entry(part, lsn)).entries
    assert (entry.lsn, entry.hlc_ts) == (str(lsn), lsn.stamp)
    assert (entry.op_type, entry.tenant_id, entry.key, entry.key_prefix) == (OP_BATCH, "acme", b"", "c:acme:w.commits:")
    assert (entry.topic, entry.partition, entry.offset) == ("w.commits", 0, 41)
    assert (entry.commit_lsn, entry.local_lsn, entry.txid, entry.committed_at_ms) == (
        0x1234,
        0x1234,
        77,
        1_700_000_000_123,
    )
    assert entry.checksum == crc32c.crc32c(entry.value).to_bytes(4, "big")
    batch = BatchWrite.FromString(entry.value)
    assert [row.seq for row in batch.entries] == [1, 2]
    assert (batch.commit_lsn, batch.txid, batch.commit_time_ms) == (0x1234, 77, 1_700_000_000_123)
    assert (batch.part, batch.is_last, batch.snapshot) == (2, True, "0/1-2-3")


def _partition(entry: WalEntry) -> TopicPartition:
    return TopicPartition(entry.topic, entry.partition)
