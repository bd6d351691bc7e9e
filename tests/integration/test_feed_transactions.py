"""Transactions through everything: PostgreSQL, a capture, a node, a feed and its client, each a process of its own.

Money moves between two tables, so that their sum tells whether a subscriber sees whole transactions. The subscriber
applies what it is sent, a transaction at a time, and after each one the sum must be right, whoever was killed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from feed.captured import Capture, Row
from integration.capture_process import CaptureProcess, on, settings_of
from integration.feed_processes import MakeFeed
from integration.support import MakeNode, memory_mb, rounds, seeded, wait_for
from integration.test_capture_crash import Supervisor
from postgres.servers import MakePostgres
from walstream.capture.reading import LogReader
from walstream.errors import AckRefused, DataLoss, LsnNotAvailable, UnknownTopic, WalstreamError
from walstream.feed.client import Subscription
from walstream.feed.process import FeedProcess
from walstream.feed.received import Entry, Heartbeat, Op
from walstream.node.process import NodeProcess
from walstream.positions import GlobalLsn, Lsn
from walstream.postgres.embedded import EmbeddedPostgres

PREFIX = "w"
ACCOUNTS, AMOUNT = 50, 100
TABLES = ("checking", "savings")
TOTAL = len(TABLES) * ACCOUNTS * AMOUNT
LARGE_ROWS, LARGE_BYTES = 50_000, 1_000


class Transfers:
    """Moves money between the tables until it is told to stop; it waits for a server that is away."""

    def __init__(self, server: EmbeddedPostgres, dice: random.Random) -> None:
        self._server, self._dice = server, dice
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.commits = 0
        self.failures: list[Exception] = []

    def _run(self) -> None:
        try:
            with psycopg.connect(self._server.dsn, autocommit=True) as connection:
                while not self._is_over.is_set():
                    self._transfer(connection)
                    self.commits += 1
                    time.sleep(0.002)  # The subscriber reads it several times over.
        except Exception as error:
            self.failures.append(error)

    def _transfer(self, connection: psycopg.Connection[Any]) -> None:
        dice = self._dice
        source, target = dice.sample(TABLES, 2)
        with connection.transaction(force_rollback=dice.random() < 0.1):
            for _ in range(dice.choice((1, 1, 2, 30))):
                amount, (one, other) = dice.randrange(1, 50), dice.choices(range(ACCOUNTS), k=2)
                connection.execute(f"update {source} set amount = amount - %s where id = %s", [amount, one])
                if dice.random() < 0.2:
                    # A savepoint whose changes were never made.
                    with connection.transaction(force_rollback=True):
                        connection.execute(f"delete from {target}")
                connection.execute(f"update {target} set amount = amount + %s where id = %s", [amount, other])
            if dice.random() < 0.1:
                # The key moves: two changes, in two partitions perhaps.
                moved = dice.randrange(ACCOUNTS)
                connection.execute(f"update {target} set id = id + 1000 where id = %s", [moved])
                connection.execute(f"update {target} set id = id - 1000 where id = %s", [moved + 1000])

    @contextmanager
    def running(self) -> Iterator[Transfers]:
        self._thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            self._thread.join()
        assert not self.failures, self.failures


class Replica:
    """The tables of a subscriber, changed a transaction at a time."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, int]] = {}
        self.entries: list[Entry] = []
        self.checks = 0
        self._parts: list[Entry] = []
        self._early: list[Entry] = []
        self._snapshots: dict[str, Lsn] = {}
        self._seen: set[Lsn] = set()
        self._last = GlobalLsn(0)

    def take(self, entry: Entry) -> None:
        """Take one part; apply the transaction when it is whole."""
        assert entry.op is Op.BATCH
        assert entry.lsn > self._last, "LSNs rise"
        self._last = entry.lsn
        self.entries.append(entry)
        transaction = entry.transaction
        assert transaction.part == 0 or self._parts, "a transaction begins with its first part"
        self._parts += transaction.entries
        if not transaction.is_last:
            return
        rows, self._parts = self._parts, []
        if transaction.snapshot:
            self._take_snapshot(rows, transaction.commit_lsn)
        else:
            assert transaction.commit_lsn not in self._seen, "a transaction came twice"
            self._seen.add(transaction.commit_lsn)
            assert [row.seq for row in rows] == sorted({row.seq for row in rows})
            self._take_changes(rows)
        self._check()

    def _take_snapshot(self, rows: list[Entry], lsn: Lsn) -> None:
        (table,) = {_table(row) for row in rows}
        self.tables[table] = {}
        for row in rows:
            self._put(table, json.loads(row.value or b"")["after"])
        self._snapshots[table] = lsn
        early, self._early = self._early, []
        self._take_changes(early)

    def _take_changes(self, rows: list[Entry]) -> None:
        for row in rows:
            table = _table(row)
            if table not in self._snapshots:
                self._early.append(row)
            elif row.commit_lsn >= self._snapshots[table]:
                self._apply(table, row)

    def _apply(self, table: str, row: Entry) -> None:
        event = json.loads(row.value or b"")
        if row.op is Op.DELETE:
            del self.tables[table][event["before"]["id"]]
        else:
            self._put(table, event["after"])

    def _put(self, table: str, row: dict[str, Any]) -> None:
        self.tables[table][row["id"]] = row["amount"]

    def _check(self) -> None:
        if len(self.tables) == len(TABLES):
            assert sum(sum(table.values()) for table in self.tables.values()) == TOTAL
            self.checks += 1


def _table(row: Entry) -> str:
    return row.topic.rpartition(".")[2]


class Following:
    """A subscriber in a thread, which begins again behind the last entry whenever the feed was gone."""

    def __init__(self, feed: FeedProcess, replica: Replica) -> None:
        self._client = feed.client("follower")
        self._replica = replica
        self._stream: Subscription | None = None
        self._thread = threading.Thread(target=self._run)
        self.failure: BaseException | None = None

    def _run(self) -> None:
        try:
            self._stream = self._client.subscribe("oldest", framing="transactions", capture=PREFIX)
            for entry in self._stream:
                self._replica.take(entry)
        except BaseException as error:
            self.failure = error

    @contextmanager
    def running(self) -> Iterator[Following]:
        self._thread.start()
        try:
            yield self
        finally:
            wait_for(lambda: self._stream is not None or self.failure, "it has subscribed")
            if self._stream is not None:
                self._stream.close()
            self._thread.join()
            self._client.close()
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.mark.timeout(1200)
def test_every_transaction_is_whole_whoever_is_killed(
    make_postgres: MakePostgres, make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path
) -> None:
    _, dice = seeded()
    server, node = make_postgres(18), make_node()
    given = settings_of(server, node, capture__prefix=PREFIX, capture__partitions=3)
    supervisor = Supervisor(CaptureProcess(tmp_path, given))
    replica, transfers = Replica(), Transfers(server, dice)
    with on(server) as database, supervisor.capture.shown():
        for table in TABLES:
            database.execute(f"create table {table} (id int primary key, amount int)")
            database.execute(f"insert into {table} select n, {AMOUNT} from generate_series(0, {ACCOUNTS - 1}) n")
        database.execute(f"create publication walstream for table {', '.join(TABLES)}")
        with supervisor.running():
            wait_for(lambda: _points(node) > 0, "the capture has written a point", 60)
            feed = make_feed(node, heartbeat_ms=200)
            with Following(feed, replica).running() as following, transfers.running():
                for number in range(rounds(full=30, part=5)):
                    before, checks = transfers.commits, replica.checks
                    wait_for(lambda before=before: transfers.commits > before + 30, "transactions commit", 60)
                    time.sleep(dice.uniform(0, 0.5))  # The moment of the crash is what the round is about.
                    victim = ("capture", "capture", "feed", "node", "all")[number % 5]
                    print(f"round {number}: {victim}")
                    if victim in ("capture", "all"):
                        supervisor.capture.kill()
                    if victim in ("feed", "all"):
                        feed.kill()
                        feed.start()
                    if victim in ("node", "all"):
                        node.kill()
                        node.start()

                    def goes_on(checks: int = checks) -> bool:
                        following.check()
                        return replica.checks > checks + 10

                    wait_for(goes_on, "the subscriber sees new transactions", 120)
                    supervisor.check()
            end = database.execute("select pg_current_wal_insert_lsn()::text")[0][0]
            expected = {table: dict(database.execute(f"select id, amount from {table}")) for table in TABLES}
            _follow_to(feed, replica, Lsn.parse(end), node)
    assert replica.tables == expected
    assert len(replica._seen) > 100
    _compare_from_random_places(feed, replica.entries, dice)


def _points(node: NodeProcess) -> int:
    try:
        with LogReader(node.address, PREFIX) as log:
            return sum(1 for _ in log.points())
    except WalstreamError:
        return 0


def _follow_to(feed: FeedProcess, replica: Replica, end: Lsn, node: NodeProcess) -> None:
    """Go on until everything up to an LSN of PostgreSQL has been applied."""

    def has_reached() -> int:
        with LogReader(node.address, PREFIX) as log:
            last = log.last_point()
            return last.rows_total if last is not None and last.end_lsn >= end else 0

    rows_total = wait_for(has_reached, "the log has everything", 60)
    with feed.client("follower") as client:
        start = GlobalLsn(replica.entries[-1].lsn + 1)
        with client.subscribe(start, framing="transactions", capture=PREFIX) as stream:
            if replica.entries[-1].lsn.index == rows_total:
                return
            for entry in stream:
                replica.take(entry)
                if entry.lsn.index == rows_total:
                    return


def _compare_from_random_places(feed: FeedProcess, entries: list[Entry], dice: random.Random) -> None:
    """From any LSN on, the rest of the stream is the same, byte by byte."""
    with feed.client("comparer") as client:
        for _ in range(10):
            start = GlobalLsn(dice.choice(entries).lsn + dice.choice((-1, 0, 1)))
            rest = [entry for entry in entries if entry.lsn >= start]
            with client.subscribe(start, framing="transactions", capture=PREFIX) as stream:
                for expected, entry in zip(rest, stream, strict=False):
                    assert entry == expected


@pytest.mark.timeout(600)
def test_a_large_transaction_comes_in_parts_and_the_feed_stays_small(
    make_postgres: MakePostgres, make_node: MakeNode, make_feed: MakeFeed, tmp_path: Path
) -> None:
    server, node = make_postgres(18), make_node()
    given = settings_of(server, node, capture__prefix=PREFIX, capture__partitions=2)
    with on(server) as database, CaptureProcess(tmp_path, given).running() as capture:
        database.execute("create table large (id int primary key, body text)")
        database.execute("create table small (id int primary key)")
        database.execute("create publication walstream for table large, small")
        wait_for(lambda: _points(node) > 1, "the snapshots are there", 60)
        capture.check()
        with database.connection.transaction():
            database.execute("insert into small values (1)")
            database.execute(
                f"insert into large select n, repeat('x', {LARGE_BYTES}) from generate_series(1, {LARGE_ROWS}) n"
            )
        database.execute("insert into small values (2)")
        end = database.execute("select pg_current_wal_flush_lsn()::text")[0][0]
        wait_for(lambda: _reached(node, Lsn.parse(end)), "the log has everything", 120)
    feed = make_feed(node, window_bytes_max=1 << 20)
    with feed.client() as client, client.subscribe("head", framing="transactions", capture=PREFIX) as stream:
        next(event for event in stream.events() if isinstance(event, Heartbeat))
    before_mb, since = memory_mb(feed.pid), time.monotonic()
    rows = parts = 0
    with feed.client() as client, client.subscribe("oldest", framing="transactions", capture=PREFIX) as stream:
        for entry in stream:
            transaction = entry.transaction
            if len(transaction.entries) == 1 and transaction.entries[0].topic.endswith("small"):
                assert transaction.is_last
                break
            assert transaction.part == parts
            assert transaction.is_last == (rows + len(transaction.entries) == LARGE_ROWS + 1)
            assert [row.seq for row in transaction.entries] == list(
                range(rows + 1, rows + len(transaction.entries) + 1)
            )
            rows, parts = rows + len(transaction.entries), parts + 1
    assert rows == LARGE_ROWS + 1
    assert parts >= LARGE_ROWS * LARGE_BYTES / (1 << 20)
    grown_mb = memory_mb(feed.pid) - before_mb
    print(f"{rows} rows in {parts} parts, {time.monotonic() - since:.1f} s; the feed grew by {grown_mb:.0f} MB")
    assert grown_mb < 64


def _reached(node: NodeProcess, end: Lsn) -> bool:
    with LogReader(node.address, PREFIX) as log:
        last = log.last_point()
        return last is not None and last.end_lsn >= end


def test_tenants_over_the_wire(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    capture = Capture(node, PREFIX, {"a": 2})
    for _ in range(5):
        capture.transaction([Row("a", 0, "acme"), Row("a", 1, "umbrella"), Row("a", 0, ""), Row("a", 1, "umbrella")])
        capture.transaction([Row("a", 1, "umbrella")])
        capture.point()
    feed = make_feed(node, heartbeat_ms=100)
    for tenant, expected in (("acme", [1] * 5), ("umbrella", [2, 1] * 5), ("nobody", [])):
        with feed.client(tenant, "replication", tenant) as client:
            found = _until_idle(client.subscribe("oldest", framing="transactions", capture=PREFIX))
        assert [len(entry.transaction.entries) for entry in found] == expected
        for entry in found:
            assert entry.tenant == tenant
            assert {row.tenant for row in entry.transaction.entries} == {tenant}
            assert (entry.transaction.part, entry.transaction.is_last) == (0, True)


def _until_idle(stream: Subscription) -> list[Entry]:
    """Everything up to the first heartbeat that follows."""
    found: list[Entry] = []
    with stream:
        for event in stream.events():
            if isinstance(event, Heartbeat):
                return found
            found += getattr(event, "entries", ())
    return found


def test_acknowledged_transactions(make_node: MakeNode, make_feed: MakeFeed) -> None:
    """The last one that was acknowledged comes again, and only those behind it; also at another feed, later."""
    node = make_node()
    capture = Capture(node, PREFIX, {"a": 1})
    for _ in range(4):
        capture.transaction([Row("a")])
        capture.point()
    feed = make_feed(node, heartbeat_ms=100)
    with feed.client("one") as client:
        first = _until_idle(client.subscribe(framing="transactions", capture=PREFIX))
        assert len(first) == 4
        assert client.ack(first[1].lsn).acked == first[1].lsn
        again = _until_idle(client.subscribe(framing="transactions", capture=PREFIX))
        assert [entry.lsn for entry in again] == [entry.lsn for entry in first[1:]]
    other = make_feed(node, share=feed, heartbeat_ms=100)
    with other.client("one") as client:
        with pytest.raises(AckRefused):
            client.ack(GlobalLsn(first[3].lsn + 1))
        assert client.ack(first[3].lsn).acked == first[3].lsn
        again = _until_idle(client.subscribe(framing="transactions", capture=PREFIX))
        assert [entry.lsn for entry in again] == [first[3].lsn]


def test_where_transactions_begin_and_end(make_node: MakeNode, make_feed: MakeFeed) -> None:
    """They end behind the last record: who reads up to the end of transactions sees the last of them."""
    node = make_node()
    capture = Capture(node, PREFIX, {"a": 1})
    for _ in range(4):
        capture.transaction([Row("a")])
        time.sleep(0.005)  # In the same millisecond the region would decide which of the two is later.
        capture.point()
    feed = make_feed(node, heartbeat_ms=100)
    with feed.client() as client:
        entries = _until_idle(client.subscribe("oldest", framing="transactions", capture=PREFIX))
        found = client.lsn("transactions", PREFIX)
        assert (found.head, found.resolved, found.oldest) == (entries[-1].lsn, entries[-1].lsn, 0)
        assert client.lsn().head < found.head
        with client.subscribe("oldest", framing="transactions", capture=PREFIX) as stream:
            beat = next(event for event in stream.events() if isinstance(event, Heartbeat))
        assert (beat.head, beat.resolved) == (found.head, found.head)
        with client.subscribe("head", framing="transactions", capture=PREFIX) as stream:
            capture.transaction([Row("a")])
            capture.point()
            assert next(iter(stream)).transaction.entries[0].key == b"5 "
        capture.remove(capture.topic("a"), before=2)
        assert entries[1].lsn < client.lsn("transactions", PREFIX).oldest <= entries[2].lsn
    command = ["feed", "subscribe", "--framing", "transactions", "--capture", PREFIX, "--from", "oldest", "--no-follow"]
    printed = subprocess.run(
        [sys.executable, "-m", "walstream.cli.main", *command, "--output", "json"],
        env={**os.environ, "WALSTREAM_FEED": feed.address, "WALSTREAM_TOKEN": feed.token("cli", "admin")},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert len(printed.stdout.splitlines()) == 3


def test_errors_have_their_status(make_node: MakeNode, make_feed: MakeFeed) -> None:
    node = make_node()
    capture = Capture(node, PREFIX, {"a": 1})
    for _ in range(3):
        capture.transaction([Row("a")])
        capture.point()
    capture.transaction([Row("a"), Row("a")], lost=1)
    capture.point()
    capture.remove(capture.topic("a"), before=1)
    feed = make_feed(node)
    with feed.client() as client:
        with pytest.raises(UnknownTopic):
            next(iter(client.subscribe(framing="transactions", capture="nobody")))
        with pytest.raises(LsnNotAvailable, match="perform a base snapshot and restart from head_lsn=") as gone:
            next(iter(client.subscribe(GlobalLsn(1), framing="transactions", capture=PREFIX)))
        assert gone.value.oldest
        stream = iter(client.subscribe(GlobalLsn(gone.value.oldest), framing="transactions", capture=PREFIX))
        assert [next(stream).transaction.entries[0].key for _ in range(2)] == [b"2 ", b"3 "]
        with pytest.raises(DataLoss, match="the commit point says 2"):
            next(stream)
