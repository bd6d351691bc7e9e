"""The sink against a real node: points follow rows, zombies are void, failures end everything."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import ClassVar
from zlib import crc32

import pytest

from integration.clients import create_topic
from walstream.capture import reading
from walstream.capture.commit_points import Point, TableSnapshot
from walstream.capture.generations import Log
from walstream.capture.kafka import LogAddress
from walstream.capture.ledger import Ledger
from walstream.capture.provenance import Output
from walstream.capture.reading import LogReader, Row
from walstream.capture.resuming import SourceState
from walstream.capture.sink import Sink
from walstream.capture.topics import Topics
from walstream.errors import BatchTooLarge, DeliveryFailed, GenerationOver, UnreachableError, WalstreamError
from walstream.node.process import NodeProcess
from walstream.positions import Lsn, TopicPartition

_prefixes = (f"sink{number}" for number in itertools.count())


class Writer:
    """One capture without a source: opens a generation and writes what the test says."""

    def __init__(self, node: NodeProcess, prefix: str, *, partitions: int = 1, stall_s_max: float = 60.0) -> None:
        address = LogAddress(node.address)
        self.topics = Topics(address, prefix, partitions)
        self.topics.prepare()
        self.prefix = prefix
        self.durable: list[Lsn] = []
        self.sink = Sink(address, self.topics, on_durable=self.durable.append, stall_s_max=stall_s_max)
        log = Log(address, self.topics)
        state = SourceState("1", 1, [], "slot", Lsn(100))
        self.ledger: Ledger = log.open(state, "test", self.sink.points.write_now)
        log.close()
        self.sink.begin(self.ledger)

    def rows(self, count: int, lsn: int, table: str = "t", snapshot: str = "") -> list[Output]:
        headers = [("gen", b"%d" % self.ledger.gen), ("commit_lsn", b"%d" % lsn)]
        headers += [("snapshot", snapshot.encode())] if snapshot else []
        return [(f"{self.prefix}.{table}", b"%d" % lsn, b"key %d" % number, headers) for number in range(count)]

    def group(self, count: int, lsn: int, table: str = "t") -> None:
        """A transaction that begins and ends at this LSN."""
        self.sink.write(self.rows(count, lsn, table), 1_700_000_000_000)
        self.sink.end_group(Lsn(lsn + 1), xid=lsn)

    def close(self) -> None:
        self.sink.close()


@pytest.fixture
def prefix() -> str:
    return next(_prefixes)


@pytest.fixture
def writer(node: NodeProcess, prefix: str) -> Iterator[Writer]:
    writer = Writer(node, prefix)
    yield writer
    writer.close()


def read(node: NodeProcess, prefix: str) -> tuple[list[Point], list[Row]]:
    with LogReader(node.address, prefix) as log:
        points = list(log.points())
        return points, list(log.rows(points))


def test_points_follow_rows_and_feedback_follows_points(node: NodeProcess, writer: Writer) -> None:
    for lsn in range(200, 300, 10):
        writer.group(5, lsn)
    writer.group(0, 300)
    writer.sink.drain()
    assert writer.durable[-1] == 301
    assert writer.durable == sorted(writer.durable)
    points, rows = read(node, writer.prefix)
    assert [point.end_lsn for point in points] == writer.durable, "each was confirmed, in order, and nothing else"
    assert [row.value for row in rows] == [b"%d" % lsn for lsn in range(200, 300, 10) for _ in range(5)]
    assert points[-1].rows_total == 50
    assert points[-1].bytes_total == 150


def test_groups_that_are_ready_together_share_a_point(node: NodeProcess, writer: Writer) -> None:
    for lsn in range(200, 1200):
        writer.group(1, lsn)
    writer.sink.drain()
    points, rows = read(node, writer.prefix)
    assert len(rows) == 1000
    assert len(points) < 900


def test_rows_of_a_key_stay_in_a_partition(node: NodeProcess, prefix: str) -> None:
    writer = Writer(node, prefix, partitions=4)
    writer.group(100, 200)
    writer.group(100, 210, table="u")
    writer.sink.drain()
    writer.close()
    _, rows = read(node, prefix)
    assert len(rows) == 200
    for row in rows:
        assert row.key is not None
        assert row.partition.partition == crc32(row.key) % 4
    assert len({row.partition for row in rows}) == 8


def test_a_zombies_rows_and_points_are_void(node: NodeProcess, writer: Writer, prefix: str) -> None:
    writer.group(3, 200)
    writer.sink.drain()
    later = Writer(node, prefix)
    assert later.ledger.end_lsn == 201
    later.group(2, 210)
    later.sink.drain()
    # What it had not sent when the other one took over, and one more, after it could have noticed.
    confirmed = list(writer.durable)
    writer.group(7, 210)
    with pytest.raises(GenerationOver, match="Another capture"):
        writer.sink.drain()
    with pytest.raises(GenerationOver):
        writer.sink.check()
    assert writer.durable == confirmed, "a void point is never confirmed"
    later.group(1, 220)
    later.sink.drain()
    later.close()
    points, rows = read(node, prefix)
    assert [row.value for row in rows] == [b"200"] * 3 + [b"210"] * 2 + [b"220"]
    assert [point.gen for point in points][-2:] == [later.ledger.gen] * 2


def test_void_points_of_a_zombie_do_not_disturb_the_one_that_took_over(
    node: NodeProcess, writer: Writer, prefix: str
) -> None:
    writer.sink.drain()
    later = Writer(node, prefix)
    later.sink.drain()
    writer.group(1, 200)
    with pytest.raises(GenerationOver):
        writer.sink.drain()
    later.group(1, 200)
    later.sink.drain()
    assert later.durable[-1] == 201, "it has seen a stranger's record between its own, and that it is void"
    later.close()


def test_rows_without_a_point_are_orphans(node: NodeProcess, writer: Writer, prefix: str) -> None:
    writer.group(3, 200)
    writer.sink.drain()
    # Written and durable, but the group never ends: as if the process had died here.
    writer.sink.write(writer.rows(10, 210), 0)
    topic = TopicPartition(f"{prefix}.t", 0)
    deadline = time.monotonic() + 20
    while writer.topics.ends([topic])[topic] < 12:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    later = Writer(node, prefix)
    later.group(10, 210)
    later.sink.drain()
    later.close()
    _, rows = read(node, prefix)
    assert [row.value for row in rows] == [b"200"] * 3 + [b"210"] * 10


def test_a_snapshot_lies_across_the_stream(node: NodeProcess, writer: Writer) -> None:
    lane = writer.sink.begin_snapshot(TableSnapshot("public", "t", "s1", "0/64"))
    done = threading.Event()
    for lsn in range(200, 210):
        writer.group(2, lsn)
        writer.sink.snapshot_rows(lane, writer.rows(30, 100, snapshot="s1"), 0)
    writer.sink.finish_snapshot(lane, done.set)
    writer.group(1, 220)
    writer.sink.drain()
    deadline = time.monotonic() + 20
    while not done.is_set():
        assert time.monotonic() < deadline
        writer.sink.run_callbacks()
        time.sleep(0.01)
    points, rows = read(node, writer.prefix)
    assert sum(row.facts.snapshot == "s1" for row in rows) == 300
    assert sum(row.facts.snapshot is None for row in rows) == 21
    (finished,) = [point for point in points if point.snapshot is not None]
    assert finished.snapshot is not None
    assert finished.snapshot.rows == 300
    assert points[-1].rows_total == 321


def test_an_empty_table_is_finished_too(node: NodeProcess, writer: Writer) -> None:
    lane = writer.sink.begin_snapshot(TableSnapshot("public", "empty", "s1", "0/64"))
    writer.sink.finish_snapshot(lane)
    writer.group(1, 200)
    writer.sink.drain()
    points, _ = read(node, writer.prefix)
    assert ("public", "empty") in points[-1].snapshots


def test_a_row_that_no_topic_takes_ends_the_generation(writer: Writer) -> None:
    writer.group(1, 200)
    topic = f"{writer.prefix}.t"
    with pytest.raises(BatchTooLarge, match="17,825,792 bytes"):
        writer.sink.write([(topic, b"x" * (17 << 20), b"k", []), (topic, b"x", b"k", [])], 0)
    with pytest.raises(BatchTooLarge):
        writer.sink.check()


def test_a_row_that_the_topic_refuses_ends_the_generation(node: NodeProcess, prefix: str) -> None:
    create_topic(node.address, f"{prefix}.small", max_message_bytes=2_000)
    writer = Writer(node, prefix)
    topic = f"{prefix}.small"
    writer.sink.write([(topic, os.urandom(100_000), b"k", []), (topic, b"after it", b"k", [])], 0)
    writer.sink.end_group(Lsn(300))
    with pytest.raises(WalstreamError):
        writer.sink.drain(20)
    writer.close()
    assert read(node, prefix)[0][-1].end_lsn == 100, "no point says that they are there"


def test_the_log_may_be_away_for_a_while(node: NodeProcess, writer: Writer) -> None:
    writer.group(1, 200)
    writer.sink.drain()
    os.kill(node.pid, signal.SIGSTOP)
    try:
        for lsn in range(210, 230):
            writer.group(10, lsn)
        with pytest.raises(UnreachableError, match="the last rows are not durable"):
            writer.sink.drain(0.5)
        assert writer.durable[-1] == 201
    finally:
        os.kill(node.pid, signal.SIGCONT)
    writer.sink.drain()
    assert writer.durable[-1] == 230
    assert len(read(node, writer.prefix)[1]) == 201


def test_a_log_that_stays_away_ends_the_generation(node: NodeProcess, prefix: str) -> None:
    writer = Writer(node, prefix, stall_s_max=0.3)
    writer.group(1, 200)
    writer.sink.drain()
    os.kill(node.pid, signal.SIGSTOP)
    try:
        writer.group(1, 210)
        time.sleep(0.5)
        with pytest.raises(UnreachableError, match="rows have waited"):
            writer.sink.check()
    finally:
        os.kill(node.pid, signal.SIGCONT)
    writer.close()


def test_a_full_queue_makes_the_writer_wait_and_tend(node: NodeProcess, prefix: str, monkeypatch) -> None:
    from walstream.capture import row_writer

    monkeypatch.setattr(row_writer, "ROWS", {**row_writer.ROWS, "queue.buffering.max.messages": 1_000})
    writer = Writer(node, prefix)
    tended: list[float] = []
    writer.sink._rows._tend = lambda: tended.append(time.monotonic())
    writer.group(1, 200)
    writer.sink.drain()
    os.kill(node.pid, signal.SIGSTOP)
    wake = threading.Timer(1.0, os.kill, (node.pid, signal.SIGCONT))
    wake.start()
    try:
        writer.group(5_000, 210)
    finally:
        wake.join()
    writer.sink.drain()
    writer.close()
    assert len(tended) > 10
    assert max(later - earlier for earlier, later in itertools.pairwise(tended)) < 0.5
    assert len(read(node, prefix)[1]) == 5_001


def test_a_record_without_an_offset_ends_the_generation(writer: Writer) -> None:
    """librdkafka reports so a batch that the log has already; an assertion would let `python -O` count on."""

    class Delivered:
        def offset(self) -> None:
            return None

    assert writer.sink.points.polled.offset("t", None, Delivered()) is None  # type: ignore[arg-type]
    with pytest.raises(DeliveryFailed, match="t acknowledged a record without saying at which offset it is"):
        writer.sink.check()


# -- reading -----------------------------------------------------------------------------------------------------------


def test_the_last_point_is_found_from_the_end(node: NodeProcess, writer: Writer, monkeypatch) -> None:
    monkeypatch.setattr(reading, "TAIL", 4)
    for lsn in range(200, 230):
        writer.group(1, lsn)
        writer.sink.drain()
    for _ in range(3):
        later = Writer(node, writer.prefix)
        later.sink.drain()
        later.close()
    with LogReader(node.address, writer.prefix) as log:
        assert log.last_point() == list(log.points())[-1]


def test_what_the_caller_does_is_not_the_logs_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller takes longer over a row than the log may be silent; the next answer comes a moment later."""

    class One:
        def __init__(self, offset: int) -> None:
            self._offset = offset

        def offset(self) -> int:
            return self._offset

        def error(self) -> None:
            return None

    class Consumer:
        answers: ClassVar = [[One(0)], [], [], [One(1)]]

        def assign(self, _: object) -> None: ...

        def consume(self, *_: object, **__: object) -> list[One]:
            return self.answers.pop(0)

    monkeypatch.setattr(reading, "SILENCE_S_MAX", 0.2)
    reader = reading.PartitionReader(LogAddress("nowhere:1"))
    reader._consumer = Consumer()  # type: ignore[assignment]
    offsets = []
    for message in reader.read(TopicPartition("t", 0), 0, 2):
        offsets.append(message.offset())
        time.sleep(0.3)
    assert offsets == [0, 1]


def test_rows_between_two_points(node: NodeProcess, writer: Writer) -> None:
    for lsn in range(200, 210):
        writer.group(2, lsn)
        writer.sink.drain()
    with LogReader(node.address, writer.prefix) as log:
        points = list(log.points())
        first, last = points[3], points[7]
        found = [row.facts.commit_lsn for row in log.rows_between(first, last)]
        assert found == [lsn for lsn in range(first.end_lsn, last.end_lsn) for _ in range(2)]
        assert len(list(log.rows_between(None, points[-1]))) == 20
        assert list(log.points(after=last)) == points[8:]


def test_points_can_be_followed(node: NodeProcess, writer: Writer) -> None:
    writer.sink.drain()
    with LogReader(node.address, writer.prefix) as log:
        points = log.points(follow=True)
        assert next(points).end_lsn == 100
        for lsn in (200, 210):
            writer.group(1, lsn)
            writer.sink.drain()
            assert next(points).end_lsn == lsn + 1
