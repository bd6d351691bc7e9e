"""The feed over Apache Kafka: what a user changes is the bootstrap, and so it is here.

PostgreSQL, a capture, a broker, a feed and its subscribers, each a process of its own. Where the broker's jars cannot
be had, these tests are skipped and say why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Producer

from integration.capture_process import CaptureProcess, on, settings_of
from integration.clients import configure_topic
from integration.feed_processes import MakeFeed, check_complete, create_feed_topic, write
from integration.support import rounds, seeded, wait_for
from integration.test_capture_crash import Supervisor
from integration.test_feed_resume import Subscriber
from integration.test_feed_strays import is_quiet, refused, resolved, told_of
from integration.test_feed_transactions import ACCOUNTS, AMOUNT, PREFIX, TABLES, Replica, Transfers
from integration.written_log import everything
from jvm import kafka_broker
from jvm.kafka_broker import KafkaBroker
from postgres.servers import MakePostgres
from walstream.capture.reading import LogReader
from walstream.errors import LogUnfit, WalstreamError
from walstream.feed import wal_pb2
from walstream.feed.process import FeedProcess
from walstream.feed.received import Entry, Heartbeat, read_entry
from walstream.positions import GlobalLsn, Lsn

pytestmark = pytest.mark.timeout(900)

PARTITIONS = 3
WAIT_S = 120.0


@pytest.fixture(scope="module")
def kafka() -> Iterator[Any]:
    """A broker for all tests of the module."""
    with kafka_broker.running() as broker:
        yield broker


def test_captured_rows_and_transactions_whoever_is_killed(
    kafka: KafkaBroker, make_postgres: MakePostgres, make_feed: MakeFeed, tmp_path: Path
) -> None:
    _, dice = seeded()
    server: Any = make_postgres(18)
    log: Any = kafka
    supervisor = Supervisor(
        CaptureProcess(tmp_path, settings_of(server, log, capture__prefix=PREFIX, capture__partitions=PARTITIONS))
    )
    transfers = Transfers(server, dice)
    with on(server) as database, supervisor.capture.shown():
        for table in TABLES:
            database.execute(f"create table {table} (id int primary key, amount int)")
            database.execute(f"insert into {table} select n, {AMOUNT} from generate_series(0, {ACCOUNTS - 1}) n")
        database.execute(f"create publication walstream for table {', '.join(TABLES)}")
        with supervisor.running():
            wait_for(lambda: _rows(kafka, Lsn(0)), "the capture has written a point", WAIT_S)
            feed = make_feed(log, heartbeat_ms=200, topics=f'["{PREFIX}.*"]')
            with (
                Subscriber(feed, tmp_path / "records") as records,
                Subscriber(feed, tmp_path / "transactions", framing=wal_pb2.TRANSACTIONS, capture=PREFIX) as whole,
            ):
                with transfers.running():
                    for number in range(rounds(full=20, part=4)):
                        before = records.acked, whole.acked
                        records.start()
                        whole.start()

                        def moves(before: tuple[str, str] = before) -> bool:
                            records.check()
                            whole.check()
                            return records.acked > before[0] and whole.acked > before[1]

                        wait_for(moves, "both subscribers acknowledge entries", WAIT_S)
                        time.sleep(dice.uniform(0, 0.5))  # The moment of the crash is what the round is about.
                        records.kill()
                        whole.kill()
                        if number % 2:
                            supervisor.capture.kill()
                            feed.kill()
                            feed.start()
                end = Lsn.parse(database.execute("select pg_current_wal_insert_lsn()::text")[0][0])
                expected = {table: dict(database.execute(f"select id, amount from {table}")) for table in TABLES}
                rows_total = wait_for(lambda: _rows(kafka, end), "the log has everything", WAIT_S)
            supervisor.check()
        topics = {f"{PREFIX}.public.{table}": PARTITIONS for table in TABLES}
        wanted = everything(kafka.address, topics)
        _check_records(feed, tmp_path / "records", wanted)
        _check_transactions(feed, tmp_path / "transactions", rows_total, expected)
    _check_acknowledged(feed, make_feed(log, share=feed, heartbeat_ms=200), tmp_path)


def _rows(kafka: KafkaBroker, end: Lsn) -> int:
    """Return how many rows there are in all when the log has everything up to an LSN of PostgreSQL; 0: not yet."""
    try:
        with LogReader(kafka.address, PREFIX) as log:
            last = log.last_point()
            return max(1, last.rows_total) if last is not None and last.end_lsn >= end else 0
    except WalstreamError:
        return 0


def _check_records(feed: FeedProcess, folder: Path, wanted: set[tuple[str, int, int]]) -> None:
    """Everything that a consumer finds came once, in the order of LSNs, and so in that of each partition."""
    with Subscriber(feed, folder) as records:
        records.catch_up(len(wanted), WAIT_S)
        entries = records.entries()
        places = [(entry.topic, entry.partition, entry.offset) for entry in entries]
        assert len(places) == len(wanted)
        assert set(places) == wanted
        assert all(one.lsn < other.lsn for one, other in pairwise(entries))
        for where in {place[:2] for place in places}:
            offsets = [offset for *here, offset in places if tuple(here) == where]
            assert offsets == sorted(offsets), where
        wait_for(lambda: records.heartbeat > entries[-1].lsn, "heartbeats go beyond the last entry")


def _check_transactions(feed: FeedProcess, folder: Path, rows_total: int, expected: dict[str, dict[int, int]]) -> None:
    """After every transaction the sum over both tables is right, none comes twice, and at the end nothing lacks."""
    with Subscriber(feed, folder, framing=wal_pb2.TRANSACTIONS, capture=PREFIX) as whole:
        whole.start()

        def has_all() -> bool:
            whole.check()
            return bool(whole.acked) and GlobalLsn.parse(whole.acked).index == rows_total

        wait_for(has_all, "all transactions are processed", WAIT_S)
        wait_for(lambda: whole.heartbeat >= whole.acked, "heartbeats reach the last transaction")
        replica = Replica()
        for entry in map(read_entry, whole.entries()):
            replica.take(entry)
    assert replica.tables == expected
    assert replica.checks > 50


def _check_acknowledged(feed: FeedProcess, other: FeedProcess, folder: Path) -> None:
    """What was acknowledged is known to a feed that was started later, and comes once more from it."""
    feed.kill()
    for name, request in (("records", {}), ("transactions", {"framing": "transactions", "capture": PREFIX})):
        acked = (folder / name / "acked").read_text()
        # A transaction stands at its point, which may be written in the millisecond of a row that sorts behind it.
        last = GlobalLsn.parse(acked) if request else None
        with other.client(name) as client:
            assert [str(entry.lsn) for entry in _until_idle(client.subscribe(**request), last)] == [acked]
            assert str(client.ack(acked).acked) == acked


def _until_idle(stream: Any, last: GlobalLsn | None = None) -> list[Entry]:
    """Return everything up to the first heartbeat that says that all has come, up to an LSN or the head."""
    found: list[Entry] = []
    with stream:
        for event in stream.events():
            if isinstance(event, Heartbeat) and event.resolved >= (last or event.head):
                return found
            found += getattr(event, "entries", ())
    return found


def test_partitions_written_beside_each_other_become_one_order(kafka: KafkaBroker, make_feed: MakeFeed) -> None:
    """Kafka's partitions become visible in no order; the feed waits for what may still come, and resumes at LSN + 1."""
    _, generator = seeded()
    log: Any = kafka
    create_feed_topic(log, "beside", PARTITIONS)
    feed = make_feed(log, topics='["beside"]', settle_ms=500, heartbeat_ms=100)
    sent, seen, is_over = [0] * PARTITIONS, [], threading.Event()

    def fill(partition: int) -> None:
        """Write to one partition by a connection of its own, a few records at a time."""
        producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 0, "log_level": 0})
        while not is_over.is_set():
            for _ in range(20):
                producer.produce("beside", b"%d" % sent[partition], partition=partition)
                sent[partition] += 1
            producer.flush(WAIT_S)
            time.sleep(0.005)

    threads = [threading.Thread(target=fill, args=(partition,)) for partition in range(PARTITIONS)]
    start: Any = "oldest"
    with feed.client() as client:
        for thread in threads:
            thread.start()
        for _ in range(rounds(full=100, part=10)):
            with client.subscribe(start, reconnect=False) as stream:
                for batch in stream.batches():
                    seen += batch.entries
                    if generator.random() < 0.1:
                        break
            start = GlobalLsn(seen[-1].lsn + 1)
        is_over.set()
        for thread in threads:
            thread.join()
        if len(seen) < sum(sent):
            seen += islice(client.subscribe(start), sum(sent) - len(seen))
    check_complete([(str(one.lsn), one.partition, int(one.value or b"")) for one in seen], sent)


def test_what_cannot_be_read_yet_is_waited_for(kafka: KafkaBroker, make_feed: MakeFeed) -> None:
    """A transaction of Kafka that is open: what came after its records stands behind them, however long it takes."""
    log: Any = kafka
    create_feed_topic(log, "open", 2)
    feed = make_feed(log, topics='["open"]', settle_ms=100, heartbeat_ms=50)
    producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": "open", "log_level": 0})
    producer.init_transactions(WAIT_S)
    with feed.client() as client, client.subscribe("oldest") as stream:
        events = stream.events()
        producer.begin_transaction()
        producer.produce("open", b"first", partition=0)
        assert producer.flush(WAIT_S) == 0
        write(log, "open", [b"second"], partition=1)
        held = next(event for event in events if not isinstance(event, Heartbeat) or event.held_back_by)
        assert isinstance(held, Heartbeat), "the second entry did not wait"
        assert held.held_back_by == "open-0"
        for event in islice(events, 10):
            assert isinstance(event, Heartbeat), "the second entry did not wait"
        producer.commit_transaction(WAIT_S)
        found: list[Entry] = []
        while len(found) < 2:
            found += getattr(next(events), "entries", ())
        assert [entry.value for entry in found] == [b"first", b"second"]


def switch(kafka: KafkaBroker, topic: str, kind: str, value: bytes) -> None:
    """Give a topic another kind of time, and write a value until it has that: a broker takes a moment to see to it."""
    wanted = {"CreateTime": TIMESTAMP_CREATE_TIME, "LogAppendTime": TIMESTAMP_LOG_APPEND_TIME}[kind]
    configure_topic(kafka.address, topic, message_timestamp_type=kind)
    producer, kinds = Producer({"bootstrap.servers": kafka.address, "linger.ms": 0, "log_level": 0}), []

    def is_seen_to() -> bool:
        producer.produce(topic, value, on_delivery=lambda _, message: kinds.append(message.timestamp()[0]))
        producer.flush(WAIT_S)
        return bool(kinds[-1] == wanted)

    wait_for(is_seen_to, f"{topic} has {kind}")


def values_of(feed: FeedProcess, start: Any) -> list[bytes | None]:
    """Return the values from an LSN on to the end, each once."""
    with feed.client("reader") as client:
        return list(dict.fromkeys(entry.value for entry in _until_idle(client.subscribe(start))))


def resolved_again(feed: FeedProcess) -> GlobalLsn:
    """Return what `resolved` does, where strays may have come more than `settle_ms` after the record before them.

    Then what the feed had promised before is broken, and the first reader that goes by it is told so, whoever it is.
    """
    try:
        return resolved(feed)
    except LogUnfit:
        return resolved(feed)


def test_records_without_append_time_are_never_passed_over(kafka: KafkaBroker, make_feed: MakeFeed) -> None:
    """Kafka lets a topic be switched away and back in the feed: live or away, whoever may lack records is told."""
    log: Any = kafka
    create_feed_topic(log, "switched")
    write(log, "switched", [b"1"])
    feed = make_feed(log, topics='["switched"]', settle_ms=200, heartbeat_ms=50)
    with feed.client("live") as client, client.subscribe(resolved(feed)) as stream:
        events = stream.events()
        assert isinstance(next(events), Heartbeat)
        switch(kafka, "switched", "CreateTime", b"stray")
        # Right behind a record with append time it was in order; after a while it cannot be.
        with pytest.raises(LogUnfit, match="switched-0 has a record with the LSN") as caught:
            [write(log, "switched", [b"stray"]) for event in islice(events, 200) if is_quiet(event)]
    switch(kafka, "switched", "LogAppendTime", b"2")
    assert values_of(feed, "oldest") == [b"1", b"stray", b"2"]
    assert values_of(feed, told_of(caught.value)) == [b"stray", b"2"]
    switch(kafka, "switched", "CreateTime", b"2")
    away = resolved_again(feed)
    feed.stop()
    write(log, "switched", [b"while away"])
    switch(kafka, "switched", "LogAppendTime", b"3")
    again = make_feed(log, share=feed, topics='["switched"]', settle_ms=200, heartbeat_ms=50)
    refusal = refused(again, away)
    assert told_of(refusal) > told_of(caught.value)
    assert values_of(again, told_of(refusal))[-2:] == [b"while away", b"3"]
