"""Committed offsets: their records, their table, and their life on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.cluster.local import Catalogue
from walstream.errors import CorruptBatch, PartitionOffline
from walstream.log.disk import OsDisk
from walstream.log.driver import ThreadDriver
from walstream.log.records import Record, build_batch
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore
from walstream.node.offsets import Change, Committed, OffsetTable, decode, encode
from walstream.node.offsets_log import OFFSETS_TOPIC, OffsetsLog

NOW_MS = 1_700_000_000_000

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
COMMITTED = st.builds(
    Committed,
    offset=st.integers(0, 2**63 - 1),
    leader_epoch=st.integers(-1, 2**31 - 1),
    metadata=TEXT,
    commit_ms=st.integers(0, 2**62),
)
CHANGES = st.builds(
    Change, group_id=TEXT, topic=TEXT, partition=st.integers(0, 2**31 - 1), committed=st.none() | COMMITTED
)


@given(CHANGES)
def test_a_record_reads_back_as_what_was_written(change: Change) -> None:
    assert decode(*encode(change)) == change


def test_the_bytes_are_those_of_kafka() -> None:
    key, value = encode(Change("g", "t", 7, Committed(42, 3, "m", 1_000)))
    assert key == b"\x00\x01" + b"\x00\x01g" + b"\x00\x01t" + b"\x00\x00\x00\x07"
    assert value == (
        b"\x00\x03" + (42).to_bytes(8, "big") + b"\x00\x00\x00\x03" + b"\x00\x01m" + (1_000).to_bytes(8, "big")
    )


@given(st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=40))
def test_other_bytes_are_refused_cleanly(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptBatch):
        decode(key, value)
    good_key, good_value = encode(Change("group", "topic", 7, Committed(42, 3, "metadata", 1_000)))
    assert good_value is not None
    for cut in range(len(good_key)):
        with pytest.raises(CorruptBatch):
            decode(good_key[:cut], None)
    for cut in range(len(good_value)):
        with pytest.raises(CorruptBatch):
            decode(good_key, good_value[:cut])


def test_the_table_forgets_a_group_with_its_last_offset() -> None:
    table = OffsetTable()
    table.apply(Change("g", "t", 0, _at(1)))
    table.apply(Change("g", "t", 1, _at(2)))
    table.apply(Change("g", "t", 0, None))
    assert dict(table.of("g")) == {("t", 1): _at(2)}
    table.apply(Change("g", "t", 1, None))
    table.apply(Change("nobody", "t", 1, None))
    assert "g" not in table
    assert len(table) == 0


async def test_offsets_are_there_after_a_restart(tmp_path: Path) -> None:
    async with _opened(tmp_path) as offsets:
        assert OFFSETS_TOPIC not in offsets._store.catalogue.topics, "made by the first commit"
        await offsets.write([Change("g", "t", index, _at(index)) for index in range(3)])
        await offsets.write([Change("g", "t", 0, _at(10)), Change("h", "t", 0, _at(5))])
        await offsets.delete([("g", "t", 2)])
        before = {group: dict(offsets.table.of(group)) for group in offsets.table}
    async with _opened(tmp_path) as offsets:
        assert {group: dict(offsets.table.of(group)) for group in offsets.table} == before
        assert before == {"g": {("t", 0): _at(10), ("t", 1): _at(1)}, "h": {("t", 0): _at(5)}}


async def test_an_offset_shows_only_when_it_is_durable(tmp_path: Path) -> None:
    async with _opened(tmp_path) as offsets:
        task = asyncio.ensure_future(offsets.write([Change("g", "t", 0, _at(1))]))
        await asyncio.sleep(0)
        assert "g" not in offsets.table
        assert offsets.known("g")
        assert offsets.keys(group_id="g") == offsets.keys(topics=["t"]) == {("g", "t", 0)}
        await offsets.delete(offsets.keys(topics=["t"]))
        await task
        assert "g" not in offsets.table, "what was on its way is deleted too"
        assert not offsets.known("g")


async def test_a_commit_whose_client_is_gone_still_counts(tmp_path: Path) -> None:
    async with _opened(tmp_path) as offsets:
        task = asyncio.ensure_future(offsets.write([Change("g", "t", 0, _at(1))]))
        await asyncio.sleep(0)
        task.cancel()
        await offsets.write([Change("h", "t", 0, _at(1))])
        assert "g" in offsets.table


async def test_a_huge_commit_is_several_batches(tmp_path: Path) -> None:
    async with _opened(tmp_path) as offsets:
        changes = [
            Change("g" * 100, "t" * 100, index, Committed(index, 0, "m" * 4_000, NOW_MS)) for index in range(500)
        ]
        await offsets.write(changes)
    async with _opened(tmp_path) as offsets:
        assert len(offsets.table.of("g" * 100)) == 500


async def test_a_commit_that_cannot_be_written_is_refused_and_does_not_show(tmp_path: Path) -> None:
    async with _opened(tmp_path) as offsets:
        await offsets.write([Change("g", "t", 0, _at(1))])
        partition = offsets._store.partition(OFFSETS_TOPIC, 0)
        task = asyncio.ensure_future(offsets.write([Change("g", "t", 0, _at(2))]))
        await asyncio.sleep(0)
        partition.failed(PartitionOffline("The disk is gone."))
        with pytest.raises(PartitionOffline):
            await task
        with pytest.raises(PartitionOffline):
            await offsets.write([Change("g", "t", 0, _at(3))])
        assert offsets.table.of("g")["t", 0] == _at(1)
        assert offsets.keys() == {("g", "t", 0)}


async def test_records_of_another_kind_are_passed_over(tmp_path: Path) -> None:
    async with _opened(tmp_path) as offsets:
        await offsets.write([Change("g", "t", 0, _at(1))])
        partition = offsets._store.partition(OFFSETS_TOPIC, 0)
        strangers = [Record(0, NOW_MS, b"\x00\x02group metadata", b"?"), Record(1, NOW_MS, b"", None)]
        partition.append(memoryview(build_batch(strangers)), now_ms=NOW_MS)
        await offsets.write([Change("g", "t", 1, _at(2))])
    async with _opened(tmp_path) as offsets:
        assert dict(offsets.table.of("g")) == {("t", 0): _at(1), ("t", 1): _at(2)}


def _at(offset: int) -> Committed:
    return Committed(offset, -1, "", NOW_MS)


@asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[OffsetsLog]:
    """Open a real log in a folder, and the offsets in it."""
    disk = OsDisk()
    catalogue = Catalogue(disk, folder, node_id=1, defaults=TopicSettings())
    driver = ThreadDriver(asyncio.get_running_loop().call_soon_threadsafe)
    store = LogStore(disk, folder, catalogue, driver, lambda: NOW_MS, lambda: NOW_MS)
    offsets = OffsetsLog(store)
    await offsets.load()
    try:
        yield offsets
    finally:
        await asyncio.to_thread(store.close)
        await asyncio.sleep(0)
        store.mark_clean()
