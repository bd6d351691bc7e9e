"""A full disk, a rotten byte, a torn tail: said clearly, nothing else harmed."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from walstream.log.batch import walk
from walstream.node.process import NodeProcess

from .bare import (
    COORDINATOR_LOAD_IN_PROGRESS,
    KAFKA_STORAGE_ERROR,
    NONE,
    Bare,
    delete_records_request,
    offset_for_leader_epoch_request,
    one_record,
)
from .clients import Confluent, Item, create_topic, read_messages, watermarks
from .support import MakeNode, segments_of, wait_for

MIB = 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_refuses_writes_serves_reads_and_recovers(make_node: MakeNode, small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(44 * MIB))
    node = make_node(
        small_disk / "data", log__segment_bytes=2 * MIB, log__journal_bytes_max=MIB, log__checkpoint_interval_ms=200
    )
    try:
        create_topic(node.address, "full")
        written = 0
        with Bare(node.address, 30) as connection:
            error = NONE
            while error == NONE:
                error = connection.produce("full", one_record(written.to_bytes(4, "big") * 16_000)).error
                written += error == NONE
                assert written < 1000, "20 MiB hold no 64 MB"
            assert error == KAFKA_STORAGE_ERROR
            assert written > 10
            assert connection.produce("full", one_record(bytes(64_000))).error == KAFKA_STORAGE_ERROR
        # A stock client sees its own timeout, not a success.
        outcome: list[KafkaError | None] = []
        producer = Producer({"bootstrap.servers": node.address, "message.timeout.ms": 1500, "log_level": 0})
        producer.produce("full", bytes(64_000), partition=0, on_delivery=lambda failed, _: outcome.append(failed))
        producer.flush(10)
        assert outcome[0] is not None
        # Reads go on, and show exactly what was acknowledged.
        values = [int.from_bytes(message.value()[:4], "big") for message in read_messages(node.address, "full")]
        assert values == list(range(written))
        assert "space" in node.log_text().lower()

        filler.unlink()

        def accepted() -> bool:
            with Bare(node.address) as connection:
                return connection.produce("full", one_record(written.to_bytes(4, "big"))).error == NONE

        wait_for(accepted, "writes resume by themselves", timeout_s=30)
        node.kill()
        node.start()
        values = [int.from_bytes(message.value()[:4], "big") for message in read_messages(node.address, "full")]
        assert values == list(range(written + 1))
    finally:
        node.kill()


def test_a_node_killed_on_a_full_disk_starts_again(make_node: MakeNode, small_disk: Path) -> None:
    node = make_node(small_disk / "data", log__segment_bytes=2 * MIB, log__journal_bytes_max=MIB)
    try:
        create_topic(node.address, "full")
        written = 0
        with Bare(node.address, 30) as connection:
            while connection.produce("full", one_record(written.to_bytes(4, "big") * 16_000)).error == NONE:
                written += 1
        node.kill()
        filler = small_disk / "filler"
        with contextlib.suppress(OSError):  # Now not a byte is left.
            filler.write_bytes(bytes(64 * MIB))
        node.start()
        values = [int.from_bytes(message.value()[:4], "big") for message in read_messages(node.address, "full")]
        assert values == list(range(written))
    finally:
        node.kill()


def fill_segments(node: NodeProcess, topic: str, count: int = 40) -> None:
    create_topic(node.address, topic, segment_bytes=20_000)
    for number in range(count):
        with Bare(node.address) as connection:
            connection.produce(topic, one_record(str(number).encode().ljust(2000)))
    assert len(segments_of(node.data, topic)) >= 3


def readable(node: NodeProcess, topic: str, count: int) -> set[int]:
    """Every offset that a reader who steps over errors can get."""
    found: set[int] = set()
    with Bare(node.address) as connection:
        for offset in range(count):
            if offset in found:
                continue
            fetched = connection.fetch(topic, offset, bytes_max=100_000)
            if fetched.error == NONE:
                found.update(header.base_offset for _, header in walk(fetched.records))
    return found


@pytest.mark.parametrize("stop", ["clean", "kill"])
def test_a_rotten_byte_is_quarantined_and_the_rest_served(make_node: MakeNode, stop: str) -> None:
    node = make_node()
    fill_segments(node, "rotten")
    node.stop() if stop == "clean" else node.kill()
    victim = segments_of(node.data, "rotten")[1]
    raw = bytearray(victim.read_bytes())
    batches = list(walk(raw))
    position, header = batches[len(batches) // 2]
    raw[position + 500] ^= 0x01
    victim.write_bytes(raw)
    bad = header.base_offset

    node.start()
    assert watermarks(node.address, "rotten") == (0, 40)
    found = readable(node, "rotten", 40)
    if bad in found:
        # After a kill the journal may still hold the batch: then it was mended, which is better still.
        assert stop == "kill"
        assert found == set(range(40))
        assert [int(message.value()) for message in read_messages(node.address, "rotten")] == list(range(40))
        assert '"redone_batches": 1' in node.log_text()
    else:
        assert found == set(range(40)) - {bad}
        with Bare(node.address) as connection:
            assert connection.fetch("rotten", bad).error != NONE, "the bad batch is an error, never data"
        assert "rotten-0" in node.log_text()
        assert "fails its checksum" in node.log_text()
    with Bare(node.address) as connection:
        assert connection.produce("rotten", one_record(b"next")).base_offset == 40


def test_bytes_that_rot_while_the_node_runs_are_not_served(make_node: MakeNode) -> None:
    node = make_node()
    fill_segments(node, "rotting")
    victim = segments_of(node.data, "rotting")[0]
    (position, header), *_ = list(walk(victim.read_bytes()))[2:]
    with victim.open("r+b") as file:
        file.seek(position + 1000)
        byte = file.read(1)[0]
        file.seek(position + 1000)
        file.write(bytes([byte ^ 0x80]))
    assert readable(node, "rotting", 40) == set(range(40)) - {header.base_offset}
    assert node.answers()


@pytest.mark.parametrize("cut", [1, 30, 61, 1000, 2050])
def test_a_torn_tail_is_cut(make_node: MakeNode, cut: int) -> None:
    """A batch that reached the disk in part was never acknowledged. Here it follows a clean state by hand."""
    node = make_node()
    fill_segments(node, "torn")
    node.kill()
    last = segments_of(node.data, "torn")[-1]
    torn = bytearray(one_record(bytes(2000)))
    torn[0:8] = (40).to_bytes(8, "big")
    with last.open("r+b") as file:
        *_, (position, header) = walk(last.read_bytes())
        file.seek(position + header.length)
        file.write(torn[:cut])
    node.start()
    assert watermarks(node.address, "torn") == (0, 40)
    with Bare(node.address) as connection:
        assert connection.produce("torn", one_record(b"next")).base_offset == 40
    assert [message.offset() for message in read_messages(node.address, "torn")] == list(range(41))


@contextlib.contextmanager
def unopenable(file: Path, aside: Path) -> Iterator[None]:
    """Put a folder in the place of a file: no node can open that."""
    file.rename(aside)
    file.mkdir()
    yield
    file.rmdir()
    aside.rename(file)


def test_a_consumer_skips_nothing_of_a_partition_that_could_not_be_opened(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node()
    fill_segments(node, "away")
    node.stop()
    consumer = Consumer({"bootstrap.servers": node.address, "group.id": "g", "auto.offset.reset": "earliest"})
    with unopenable(segments_of(node.data, "away")[-1], tmp_path / "aside"):
        node.start()
        with Bare(node.address) as connection:
            for time in (-1, -2, -3, 0):
                assert connection.list_offsets("away", time, 0)[0].error == KAFKA_STORAGE_ERROR
            for offset in (0, 40):
                assert connection.fetch("away", offset).error == KAFKA_STORAGE_ERROR
            assert connection.produce("away", one_record(b"refused")).error == KAFKA_STORAGE_ERROR
            deleted = connection.ask(delete_records_request("away", 10))
            assert struct.unpack_from(">h", deleted, len(deleted) - 2) == (KAFKA_STORAGE_ERROR,)
            epoch_end = connection.ask(offset_for_leader_epoch_request("away", 1))
            assert struct.unpack_from(">h", epoch_end, 4 + 4 + 2 + len("away") + 4) == (KAFKA_STORAGE_ERROR,)
        consumer.assign([TopicPartition("away", 0, OFFSET_BEGINNING)])
        assert consumer.poll(2) is None
        node.stop()
    node.start()
    try:
        read = [message.value() for message in consumer.consume(40, 20)]
    finally:
        consumer.close()
    assert [int(value) for value in read] == list(range(40))


def test_committed_offsets_that_cannot_be_read_are_not_taken_for_none(make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node()
    create_topic(node.address, "read")
    with Bare(node.address) as connection:
        assert connection.commit("g", "read", 7) == NONE
    node.stop()
    with unopenable(segments_of(node.data, "__consumer_offsets")[-1], tmp_path / "aside"):
        node.start()
        with Bare(node.address) as connection:
            assert connection.committed("g", "read") == (COORDINATOR_LOAD_IN_PROGRESS, -1)
        node.stop()
    node.start()
    with Bare(node.address) as connection:
        assert connection.committed("g", "read") == (NONE, 7)


def test_missing_and_wrong_indexes_are_built_again(make_node: MakeNode) -> None:
    node = make_node()
    fill_segments(node, "indexed")
    node.stop()
    indexes = segments_of(node.data, "indexed", suffix=".index")
    assert indexes
    indexes[0].unlink()
    if len(indexes) > 1:
        indexes[1].write_bytes(os.urandom(100))
    node.start()
    assert len(read_messages(node.address, "indexed")) == 40
    for offset in (0, 13, 39):
        assert read_messages(node.address, "indexed", offset=offset)[0].offset() == offset


def test_a_large_log_opens_fast_after_a_kill(make_node: MakeNode) -> None:
    """A slice of the promise about 10 GB: opening reads what the checkpoint does not cover, not the log."""
    node = make_node(log__checkpoint_interval_ms=100)
    create_topic(node.address, "large", segment_bytes=16 * MIB)
    Confluent().write(node.address, "large", [Item(bytes(10_000))] * 10_000)
    checkpoint = node.data / "checkpoint.json"
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    wait_for(lambda: checkpoint.exists() and checkpoint.stat().st_mtime_ns > before, "a checkpoint is written")
    node.kill()
    started = time.monotonic()
    node.start()
    assert time.monotonic() - started < 10
    assert watermarks(node.address, "large") == (0, 10_000)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_gigabytes_open_in_seconds(make_node: MakeNode) -> None:
    node = make_node()
    create_topic(node.address, "huge")
    value, count = os.urandom(100_000), 100_000
    producer = Producer({"bootstrap.servers": node.address, "batch.size": 1_000_000, "linger.ms": 10})
    messages = [{"value": value}] * 100
    sent = 0
    while sent < count:
        taken = producer.produce_batch("huge", messages[: count - sent], 0)
        sent += taken
        if taken < len(messages):
            producer.poll(0.01)
    assert producer.flush(300) == 0
    for stop in (node.kill, node.stop):
        stop()
        started = time.monotonic()
        node.start()
        seconds = time.monotonic() - started
        print(f"10 GB open {seconds:.2f} s after {stop.__name__}")
        assert seconds < 10
        assert watermarks(node.address, "huge") == (0, count)
    assert len(read_messages(node.address, "huge", offset=count - 10)) == 10
