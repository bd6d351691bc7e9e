"""Transactions from a real node, written by a capture that can do what crashed and competing ones do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from feed.captured import Capture, Row
from integration.support import MakeNode, seeded
from walstream.capture.kafka import LogAddress
from walstream.config import FeedConfig
from walstream.errors import LogUnfit, LsnNotAvailable, RowsMissing, UnknownTopic, UsageError
from walstream.feed.reading.frames import Filter
from walstream.feed.reading.reading import Reading
from walstream.feed.service.batching import ENTRY_BYTES_MAX
from walstream.feed.transactions import parts as transaction_parts
from walstream.feed.transactions import source as transaction_source
from walstream.feed.transactions.source import TransactionSource
from walstream.feed.wal_pb2 import BatchWrite, WalBatch, WalEntry
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn

WAIT_S = 10.0
EVERYTHING = Filter()


class Got(NamedTuple):
    """A part that was handed out."""

    lsn: int
    entry: WalEntry
    batch: BatchWrite

    @property
    def texts(self) -> list[str]:
        return [json.loads(row.value)["after"]["text"] for row in self.batch.entries]


@asynccontextmanager
async def reading(node: NodeProcess, *prefixes: str, **settings: object) -> AsyncIterator[Reading]:
    opened = await Reading.open(LogAddress(node.address), FeedConfig.model_validate(settings), prefixes)
    try:
        yield opened
    finally:
        await opened.close()


async def subscribe(
    reading: Reading, start: int = 0, entries: Filter = EVERYTHING, capture: str = "", bytes_max: int = ENTRY_BYTES_MAX
) -> TransactionSource:
    return await (await reading.transactions.of(capture)).subscribe(start, entries, bytes_max)


async def take(source: TransactionSource, count: int | None = None) -> list[Got]:
    """So many parts; None: as many as there are, until nothing comes for a second."""
    found: list[Got] = []
    while count is None or len(found) < count:
        frame = await source.next(WAIT_S if count else 1.0)
        if frame is None:
            assert count is None, f"{len(found)} of {count} parts have come"
            break
        assert frame.lsns == sorted(set(frame.lsns))
        assert source.position == frame.resolved + 1 > frame.lsns[-1]
        for lsn, encoded in zip(frame.lsns, frame.encoded, strict=True):
            (entry,) = WalBatch.FromString(encoded).entries
            assert entry.lsn == str(GlobalLsn(lsn))
            found.append(Got(lsn, entry, BatchWrite.FromString(entry.value)))
    return found


async def read(node: NodeProcess, capture: Capture, start: int = 0, entries: Filter = EVERYTHING) -> list[Got]:
    async with reading(node, capture.prefix) as opened:
        source = await subscribe(opened, start, entries)
        try:
            return await take(source)
        finally:
            await source.close()


def transactions(parts: list[Got]) -> list[list[str]]:
    """Put parts together, each transaction whole."""
    found: list[list[str]] = []
    is_whole = True
    for part in parts:
        if part.batch.part == 0:
            assert is_whole, "a transaction begins before the one before has ended"
            found.append([])
        found[-1] += part.texts
        is_whole = part.batch.is_last
    assert is_whole
    return found


MakeCapture = Callable[..., Capture]


@pytest.fixture
def make_capture(node: NodeProcess, topic: str) -> MakeCapture:
    return lambda **tables: Capture(node, topic, tables)


async def test_a_transaction_is_one_entry(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=2, b=1)
    commit_lsn = capture.transaction([Row("a", 0), Row("b"), Row("a", 1), Row("a", 0)])
    offset = capture.point()
    (one,) = await read(node, capture)
    assert [one.texts] == capture.told
    assert [(row.seq, row.topic.rpartition(".")[2], row.partition) for row in one.batch.entries] == [
        (1, "a", 0),
        (2, "b", 0),
        (3, "a", 1),
        (4, "a", 0),
    ]
    assert (one.batch.commit_lsn, one.batch.txid, one.batch.commit_time_ms) == (commit_lsn, 701, 1700)
    assert (one.batch.part, one.batch.is_last, one.batch.snapshot) == (0, True, "")
    assert (one.entry.topic, one.entry.offset, one.entry.tenant_id) == (f"{capture.prefix}.commits", offset, "")
    rows = {row.lsn for row in one.batch.entries}
    assert len(rows) == 4
    assert max(rows) < one.entry.lsn, "a commit point is appended after its rows"


async def test_rows_have_the_lsns_that_they_have_as_records(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=2)
    capture.transaction([Row("a", 0), Row("a", 1)])
    capture.point()
    async with reading(node, capture.prefix, topics=(f"{capture.prefix}.*",)) as opened:
        (one,) = await take(await subscribe(opened))
        records = await opened.subscribe(0)
        lsns: list[int] = []
        while len(lsns) < 2 and (frame := await records.next(WAIT_S)) is not None:
            lsns += frame.lsns
        assert sorted(row.lsn for row in one.batch.entries) == [str(GlobalLsn(lsn)) for lsn in lsns]
        await records.close()


async def test_only_what_valid_points_tell(node: NodeProcess, make_capture: MakeCapture) -> None:
    """Orphans, zombies, foreign records and rows without a point are not there; nothing is there twice."""
    capture = make_capture(a=1, b=1)
    capture.transaction([Row("a"), Row("b")])
    capture.point()
    capture.transaction([Row("a", text="never confirmed"), Row("b")])
    zombie = capture.open()
    capture.orphan([Row("a"), Row("b")])
    capture.foreign("a")
    capture.transaction([Row("a", text="again"), Row("b")])
    capture.void_point(zombie)
    capture.foreign("b")
    capture.transaction([Row("b")])
    capture.point()
    capture.transaction([Row("b", text="not yet")])
    assert transactions(await read(node, capture)) == capture.told
    assert len(capture.told) == 3


async def test_snapshots_come_when_they_are_finished(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=2, b=1)
    capture.transaction([Row("b")])
    capture.point()
    begun = capture.snapshot_rows("a", [Row("a", number % 2) for number in range(10)], "0/64-1-1")
    capture.transaction([Row("a", 1)])
    capture.point()
    capture.finish(begun)
    capture.transaction([Row("a", 0)])
    capture.point()
    capture.snapshot_rows("b", [Row("b")], "never finished")
    found = await read(node, capture)
    assert [one.batch.snapshot for one in found] == ["", "", "0/64-1-1", ""]
    assert [sorted(one) for one in transactions(found)] == [sorted(one) for one in capture.told]
    rows = found[2].batch.entries
    assert [row.partition for row in rows] == [0] * 5 + [1] * 5
    assert found[2].batch.txid == 0


async def test_it_goes_on_identically_from_every_lsn(
    node: NodeProcess, make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_source, "PART_BYTES_MAX", 2_000)
    monkeypatch.setattr(transaction_source, "FRAME_ENTRIES", 7)
    _, dice = seeded()
    capture = make_capture(a=3, b=1)
    write_randomly(capture, dice, 40)
    whole = await read(node, capture)
    assert [sorted(one) for one in transactions(whole)] == [sorted(one) for one in capture.told]
    assert any(not one.batch.is_last for one in whole), "some transactions have parts"
    async with reading(node, capture.prefix) as opened:
        for _ in range(25):
            start = dice.choice(whole).lsn + dice.choice((-1, 0, 1))
            source = await subscribe(opened, start)
            rest = [one for one in whole if one.lsn >= start]
            assert [one.entry for one in await take(source, len(rest))] == [one.entry for one in rest]
            assert await source.next(0.0) is None
            await source.close()


def write_randomly(capture: Capture, dice: random.Random, points: int, tenants: tuple[str, ...] = ("",)) -> None:
    for number in range(points):
        for _ in range(dice.randrange(4)):
            rows = [
                Row(dice.choice("aab"), tenant=dice.choice(tenants), text="x" * dice.randrange(400))
                for _ in range(dice.choice((1, 2, 3, 20)))
            ]
            spread = [row._replace(partition=dice.randrange(3)) if row.table == "a" else row for row in rows]
            capture.transaction(spread)
        if dice.random() < 0.1:
            capture.snapshot("b", [Row("b")] * dice.randrange(1, 9), f"snapshot {number}")
        if dice.random() < 0.1:
            capture.open()
        elif dice.random() < 0.8:
            capture.point()
    capture.point()


async def test_a_tenant_sees_its_own_rows_and_nothing_of_others(
    node: NodeProcess, make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_source, "PART_BYTES_MAX", 2_000)
    _, dice = seeded()
    capture = make_capture(a=3, b=1)
    write_randomly(capture, dice, 20, ("acme", "umbrella", ""))
    everything = await read(node, capture)
    for tenant in ("acme", "umbrella"):
        own = await read(node, capture, entries=Filter(tenant.encode()))
        for one in own:
            assert one.entry.tenant_id == tenant
            assert {row.tenant_id for row in one.batch.entries} == {tenant}
        expected = [
            [text for text, row in zip(one.texts, one.batch.entries, strict=True) if row.tenant_id == tenant]
            for one in joined(everything)
        ]
        assert transactions(own) == [texts for texts in expected if texts]
        ends = {one.batch.commit_lsn: one.lsn for one in everything if one.batch.is_last and not one.batch.snapshot}
        for one in own:
            if one.batch.is_last and not one.batch.snapshot:
                assert one.lsn == ends[one.batch.commit_lsn], "a whole transaction has one LSN, whoever asks"


def joined(parts: list[Got]) -> list[Got]:
    found: list[Got] = []
    for part in parts:
        if part.batch.part == 0:
            found.append(Got(part.lsn, part.entry, BatchWrite()))
        found[-1].batch.entries.extend(part.batch.entries)
    return found


async def test_topics_and_keys_that_were_asked_for(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    capture.transaction([Row("a"), Row("b")])
    capture.transaction([Row("a")])
    capture.point()
    capture.transaction([Row("b")])
    capture.point()
    only_b = await read(node, capture, entries=Filter(topics=("*.b",)))
    assert [one.texts for one in only_b] == [["2 "], ["4 "]]
    prefix = f"walstream::{capture.prefix}.a:3"
    only_three = await read(node, capture, entries=Filter(key_prefix=prefix.encode()))
    assert [one.texts for one in only_three] == [["3 "]]


async def test_topics_that_are_not_in_the_feed_stay_out(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    capture.transaction([Row("a"), Row("b"), Row("a")])
    capture.transaction([Row("b")])
    capture.point()
    async with reading(node, capture.prefix, topics=(f"{capture.prefix}.a",)) as opened:
        found = await take(await subscribe(opened))
    assert [one.texts for one in found] == [["1 ", "3 "]]


async def test_a_row_that_is_missing_is_told(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    capture.transaction([Row("a")])
    capture.point()
    capture.transaction([Row("a"), Row("b")])
    capture.transaction([Row("a"), Row("b")], lost=1)
    capture.point()
    async with reading(node, capture.prefix) as opened:
        source = await subscribe(opened)
        first = await take(source, 1)
        assert [one.texts for one in first] == [["1 "]], "what is before it can be had"
        with pytest.raises(RowsMissing, match=r"holds 1 rows .* the commit point says 2"):
            await source.next(WAIT_S)
        await source.close()


async def test_large_points_are_counted_before_a_transaction_is_whole(
    node: NodeProcess, make_capture: MakeCapture
) -> None:
    """The point does not fit into what is read at once, and the row that is missing is its last one."""
    capture = make_capture(a=1)
    capture.transaction([Row("a", text="x" * 1_000)] * 100)
    capture.transaction([Row("a", text="x" * 1_000)] * 3_000, lost=1)
    capture.point()
    async with reading(node, capture.prefix) as opened:
        source = await subscribe(opened)
        with pytest.raises(RowsMissing):
            await source.next(WAIT_S)
        await source.close()


async def test_a_large_transaction_comes_in_parts_with_bounded_memory(
    node: NodeProcess, make_capture: MakeCapture
) -> None:
    capture = make_capture(a=3)
    capture.transaction([Row("a", number % 3, text="x" * 500) for number in range(20_000)])
    capture.transaction([Row("a", 1)])
    capture.point()
    async with reading(node, capture.prefix) as opened:
        source = await subscribe(opened)
        parts: list[Got] = []
        while len(parts) == 0 or parts[-1].batch.entries[-1].seq != 1:
            parts += await take(source, 1)
            assert source._pieces.size_bytes < 16 * 1024 * 1024
        await source.close()
    assert transactions(parts) == capture.told
    assert len(parts) > 20
    for one in parts:
        assert len(one.batch.entries) <= transaction_parts.PART_ROWS_MAX
        assert one.entry.ByteSize() < transaction_parts.PART_BYTES_MAX + 1_000


async def test_a_small_channel_gets_small_parts(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1)
    capture.transaction([Row("a", text="x" * 1_000)] * 50)
    capture.point()
    async with reading(node, capture.prefix) as opened:
        parts = await take(await subscribe(opened, bytes_max=8_000))
    assert transactions(parts) == capture.told
    assert all(one.entry.ByteSize() < 8_000 for one in parts)


async def test_rows_that_were_removed(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    for _ in range(6):
        capture.transaction([Row("a"), Row("b")])
        capture.point()
    whole = await read(node, capture)
    capture.remove(capture.topic("b"), before=3)
    async with reading(node, capture.prefix) as opened:
        source = await subscribe(opened, whole[0].lsn)
        with pytest.raises(LsnNotAvailable, match=r"lsn_not_available: start_lsn=.* older than oldest_lsn=") as told:
            await source.next(WAIT_S)
        assert (told.value.start, told.value.head) == (whole[0].lsn, whole[-1].lsn)
        assert whole[2].lsn < told.value.oldest <= whole[3].lsn
        assert told.value.oldest == await (await opened.transactions.of()).oldest()
        rest = await take(await subscribe(opened, told.value.oldest))
        assert [one.entry for one in rest] == [one.entry for one in whole[3:]]
        only_a = await take(await subscribe(opened, whole[3].lsn, Filter(topics=("*.a",))))
        assert [one.lsn for one in only_a] == [one.lsn for one in whole[3:]]


async def test_points_that_were_removed(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1)
    offsets = []
    for _ in range(6):
        capture.transaction([Row("a")])
        offsets.append(capture.point())
    capture.open()
    capture.transaction([Row("a")])
    capture.point()
    whole = await read(node, capture)
    capture.remove(f"{capture.prefix}.commits", before=offsets[3])
    async with reading(node, capture.prefix) as opened:
        with pytest.raises(LsnNotAvailable) as told:
            await take(await subscribe(opened, whole[4].lsn))
        assert whole[5].lsn < told.value.oldest <= whole[6].lsn, "the first full vector is that of the new generation"
        rest = await take(await subscribe(opened, told.value.oldest))
    assert [one.entry for one in rest] == [one.entry for one in whole[6:]]


async def test_a_snapshot_that_was_removed(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    capture.transaction([Row("b")])
    capture.point()
    capture.snapshot("a", [Row("a")] * 5, "one")
    capture.transaction([Row("b")])
    capture.point()
    capture.remove(capture.topic("a"), before=5)
    async with reading(node, capture.prefix) as opened:
        oldest = await (await opened.transactions.of()).oldest()
        assert [one.texts for one in await take(await subscribe(opened, oldest))] == [capture.told[-1]]
        source = await subscribe(opened)
        assert [one.texts for one in await take(source, 1)] == [capture.told[0]]
        with pytest.raises(LsnNotAvailable):
            await source.next(WAIT_S)


async def test_a_topic_that_was_made_again(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    capture.transaction([Row("a")])
    capture.point()
    capture.transaction([Row("b")])
    capture.point()
    whole = await read(node, capture)
    capture.replace("a")
    capture.foreign("a")
    async with reading(node, capture.prefix) as opened:
        with pytest.raises(LsnNotAvailable) as told:
            await take(await subscribe(opened))
        assert told.value.oldest == await (await opened.transactions.of()).oldest()
        rest = await take(await subscribe(opened, told.value.oldest))
    assert [one.entry for one in rest] == [one.entry for one in whole[1:]]


async def test_a_topic_that_is_gone(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    capture.transaction([Row("a")])
    capture.transaction([Row("b")])
    capture.point()
    capture.transaction([Row("b")])
    capture.point()
    capture.delete("a")
    async with reading(node, capture.prefix) as opened:
        oldest = await (await opened.transactions.of()).oldest()
        assert [one.texts for one in await take(await subscribe(opened, oldest))] == capture.told[2:]


async def test_what_comes_is_told_at_once(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1, b=1)
    async with reading(node, capture.prefix) as opened:
        head = await (await opened.transactions.of()).head()
        sources = [await subscribe(opened, head + 1) for _ in range(3)]
        slowest = 0.0
        for _ in range(20):
            waiting = [asyncio.create_task(source.next(WAIT_S)) for source in sources]
            await asyncio.sleep(0.02)
            await asyncio.to_thread(capture.transaction, [Row("a"), Row("b")])
            await asyncio.to_thread(capture.point)
            since = time.monotonic()
            frames = await asyncio.gather(*waiting)
            slowest = max(slowest, time.monotonic() - since)
            assert all(frame is not None and len(frame) == 1 for frame in frames)
        assert slowest < 1.0
        assert await sources[0].next(0.05) is None
        assert sources[0].entries_behind() == 0


async def test_new_tables_join(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1)
    async with reading(node, capture.prefix) as opened:
        source = await subscribe(opened)
        await source.next(0.1)
        capture.create("new")
        capture.transaction([Row("a"), Row("new")])
        capture.point()
        assert transactions(await take(source, 1)) == capture.told
        await source.close()


async def test_the_node_goes_away_and_comes_back(make_node: MakeNode) -> None:
    node = make_node()
    capture = Capture(node, "w", {"a": 2})
    write = [Row("a", 0), Row("a", 1)]
    capture.transaction(write)
    capture.point()
    async with reading(node, "w") as opened:
        source = await subscribe(opened)
        found = await take(source)
        for _ in range(3):
            capture.transaction(write)
            capture.point()
            node.kill()
            assert await source.next(0.3) is None or not node.running
            node.start()
            capture.transaction(write)
            capture.point()
        while len(found) < len(capture.told):
            found += await take(source, 1)
        await source.close()
    assert transactions(found) == capture.told


async def test_which_capture(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1)
    capture.transaction([Row("a")])
    capture.point()
    async with reading(node) as opened:
        with pytest.raises(UsageError, match="names no capture"):
            await subscribe(opened)
        with pytest.raises(UnknownTopic, match="no such topic of commits"):
            await subscribe(opened, capture="nobody")
        assert len(await take(await subscribe(opened, capture=capture.prefix))) == 1


async def test_points_without_append_time(node: NodeProcess, topic: str) -> None:
    capture = Capture(node, topic, {})
    capture._create(f"{topic}.x.commits", 1, {"cleanup.policy": "delete"})
    async with reading(node, f"{topic}.x") as opened:
        with pytest.raises(LogUnfit, match="has no append time"):
            await subscribe(opened)


async def test_the_head_of_transactions_is_known_by_their_lsns(node: NodeProcess, make_capture: MakeCapture) -> None:
    capture = make_capture(a=1)
    capture.transaction([Row("a")])
    capture.point()
    async with reading(node, capture.prefix) as opened:
        (one,) = await take(await subscribe(opened))
        assert await opened.transactions.head_near(one.lsn) == one.lsn
        record = GlobalLsn.parse(one.batch.entries[0].lsn)
        assert await opened.transactions.head_near(record) == 0
        capture.transaction([Row("a")])
        capture.point()
        assert await opened.transactions.head_near(one.lsn + (1 << 90)) > one.lsn
        assert f"{capture.prefix}.commits" in opened.topics()
