"""Committed offsets: their records, their table, and their life on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.rig import Rig
from walstream.cluster.local import Catalogue, NewTopic
from walstream.errors import CorruptBatch, CorruptLog, NotEnoughReplicasAfterAppend, PartitionOffline, RequestTimedOut
from walstream.log.disk import OsDisk
from walstream.log.driver import ThreadDriver
from walstream.log.records import Record, build_batch
from walstream.log.settings import TopicSettings
from walstream.log.store import LogStore
from walstream.node.offsets import Change, Committed, OffsetTable, decode, encode
from walstream.node.offsets_log import OFFSETS_TOPIC, TOPIC_CONFIG, OffsetsLog

NOW_MS = 1_700_000_000_000

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
COMMITTED = st.builds(
    Committed,
    offset=st.integers(0, 2**63 - 1),
    leader_epoch=st.integers(-1, 2**31 - 1),
    metadata=TEXT,
    commit_ms=st.integers(0, 2**62),
    topic_since=st.integers(-1, 2**62),
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


def test_the_topics_version_follows_what_kafka_writes() -> None:
    """Earlier versions of walstream, and Kafka's tools, stop reading before it."""
    committed = Committed(42, 3, "m", 1_000, topic_since=7)
    _, value = encode(Change("g", "t", 7, committed))
    _, without = encode(Change("g", "t", 7, replace(committed, topic_since=-1)))
    assert value is not None
    assert without is not None
    assert value == without + (7).to_bytes(8, "big")
    with pytest.raises(CorruptBatch):
        decode(*encode(Change("g", "t", 7, None))[:1], value[:-1])


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
        await offsets.prepare()
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
        await offsets.prepare()
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


class Replicated:
    """The offsets of a leader whose high watermark the test moves."""

    def __init__(self, folder: Path, replicas: tuple[int, ...] = (1, 2)) -> None:
        self.rig = Rig(folder, replicated=True)
        self.rig.store.create_topics([NewTopic(OFFSETS_TOPIC, 1, TOPIC_CONFIG, replicas)])
        self.partition = self.rig.store.partition(OFFSETS_TOPIC, 0)
        self.partition.become_leader(1, lambda _: None)
        self.offsets = OffsetsLog(self.rig.store)

    async def begin(self, offset: int, group: str = "g") -> asyncio.Task[None]:
        """Append a commit that is durable here and not on the followers yet."""
        task = asyncio.create_task(self.offsets.write([Change(group, "t", 0, _at(offset))]))
        await asyncio.sleep(0)
        self.rig.driver.flush()
        return task

    async def commit(self, offset: int, group: str = "g") -> None:
        task = await self.begin(offset, group)
        self.partition.advance_high_watermark(self.partition.log_end)
        await task

    async def loaded(self) -> OffsetsLog:
        offsets = OffsetsLog(self.rig.store)
        await offsets.load()
        return offsets

    def rot(self, number: int) -> tuple[int, bytes]:
        """Damage a batch on the disk; return its offset and what it was."""
        segment = self.partition.segments[-1]
        position, header = list(segment.headers())[number]
        sound = bytes(segment.file.pread(header.length, position))
        with segment.path.open("r+b") as file:
            file.seek(position + header.length - 3)
            file.write(b"\xff")
        return header.base_offset, sound


async def test_a_replica_is_not_loaded_past_damage(tmp_path: Path) -> None:
    """Another replica has the batch: what was committed in it must not be forgotten."""
    replicated = Replicated(tmp_path)
    for offset in (100, 200, 300):
        await replicated.commit(offset)
    await replicated.commit(1, "h")
    damaged, sound = replicated.rot(2)
    for _ in range(2):
        with pytest.raises(CorruptLog, match="damaged"):
            await replicated.loaded()
    heard: list[Exception | None] = []
    replicated.partition.repair(damaged, [memoryview(bytearray(sound))], heard.append)
    replicated.rig.driver.flush()
    assert heard == [None]
    assert (await replicated.loaded()).table.of("g")["t", 0] == _at(300)


async def test_the_only_replica_is_loaded_as_far_as_it_is_sound(tmp_path: Path) -> None:
    """No other has the rest: to wait for it would be to wait for ever."""
    replicated = Replicated(tmp_path, replicas=(1,))
    for offset in (100, 200):
        await replicated.commit(offset)
    await replicated.commit(1, "h")
    replicated.rot(1)
    table = (await replicated.loaded()).table
    assert {group: table.of(group)["t", 0].offset for group in table} == {"g": 100, "h": 1}


async def test_a_commit_that_was_refused_shows_when_it_becomes_committed(tmp_path: Path) -> None:
    replicated = Replicated(tmp_path)
    offsets = replicated.offsets
    task = await replicated.begin(5)
    replicated.partition.fail_waiters(NotEnoughReplicasAfterAppend("too few"), visible_only=True)
    with pytest.raises(NotEnoughReplicasAfterAppend):
        await task
    assert "g" not in offsets.table
    assert offsets.keys(topics=["t"]) == offsets.keys(group_id="g") == {("g", "t", 0)}
    replicated.partition.advance_high_watermark(replicated.partition.log_end)
    assert offsets.table.of("g")["t", 0] == _at(5), "as every coordinator after this one will read it"
    assert (await replicated.loaded()).table.of("g")["t", 0] == _at(5)


async def test_a_deleted_group_does_not_come_back_with_a_commit_that_was_refused(tmp_path: Path) -> None:
    replicated = Replicated(tmp_path)
    offsets = replicated.offsets
    refused = await replicated.begin(5)
    replicated.partition.fail_waiters(NotEnoughReplicasAfterAppend("too few"), visible_only=True)
    with pytest.raises(NotEnoughReplicasAfterAppend):
        await refused
    deleting = asyncio.create_task(offsets.delete(offsets.keys(group_id="g")))
    await asyncio.sleep(0)
    replicated.rig.driver.flush()
    replicated.partition.advance_high_watermark(replicated.partition.log_end)
    await deleting
    assert not offsets.known("g")
    assert "g" not in (await replicated.loaded()).table


async def test_one_commit_too_many_to_wait_for_shows_all_the_same(tmp_path: Path) -> None:
    replicated = Replicated(tmp_path)
    replicated.partition._visible_waiters.most = 0
    task = await replicated.begin(5)
    with pytest.raises(RequestTimedOut):
        await task
    replicated.partition.advance_high_watermark(replicated.partition.log_end)
    assert replicated.offsets.table.of("g")["t", 0] == _at(5)


def test_offsets_of_a_topic_that_was_created_again_are_not_its(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    offsets, catalogue = OffsetsLog(rig.store), rig.store.catalogue

    def committed_for(name: str) -> Committed:
        return replace(_at(5), topic_since=catalogue.topics[name].since)

    rig.topic("t")
    rig.topic("kept")
    first, kept = committed_for("t"), committed_for("kept")
    assert not offsets.is_of_deleted_topic("t", first)
    rig.store.delete_topics(["t"])
    assert offsets.is_of_deleted_topic("t", first)
    rig.topic("t")
    assert offsets.is_of_deleted_topic("t", first)
    assert not offsets.is_of_deleted_topic("t", committed_for("t"))
    assert not offsets.is_of_deleted_topic("kept", kept)
    assert not offsets.is_of_deleted_topic("t", _at(5)), "of an earlier version: nothing says of which topic it is"
    newer = replace(_at(5), topic_since=catalogue.version + 1)
    assert not offsets.is_of_deleted_topic("t", newer), "of a topic that this node's catalogue does not have yet"
    assert not offsets.is_of_deleted_topic("unheard-of", newer)


async def test_an_offset_is_not_swept_up_while_a_commit_for_the_new_topic_follows_it(tmp_path: Path) -> None:
    """The deletion would be written behind that commit, and delete it."""
    replicated = Replicated(tmp_path)
    offsets, store = replicated.offsets, replicated.rig.store

    async def begin(offset: int) -> asyncio.Task[None]:
        committed = replace(_at(offset), topic_since=store.catalogue.topics["t"].since)
        task = asyncio.create_task(offsets.write([Change("g", "t", 0, committed)]))
        await asyncio.sleep(0)
        replicated.rig.driver.flush()
        return task

    def advance() -> None:
        replicated.partition.advance_high_watermark(replicated.partition.log_end)

    replicated.rig.topic("t")
    old = await begin(5)
    store.delete_topics(["t"])
    assert offsets.keys_of_deleted_topics() == {("g", "t", 0)}, "also while it is not committed"
    advance()
    await old
    replicated.rig.topic("t")
    assert offsets.keys_of_deleted_topics() == {("g", "t", 0)}
    new = await begin(6)
    assert offsets.keys_of_deleted_topics() == set()
    advance()
    await new
    assert offsets.keys_of_deleted_topics() == set()
    assert offsets.table.of("g")["t", 0].offset == 6


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
