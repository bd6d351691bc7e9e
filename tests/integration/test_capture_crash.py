"""Crashes at random moments: capture, node and PostgreSQL are killed under a mixed workload, and the log stays exact.

The source is the oracle: whatever the workload has committed, also where it could not learn so itself, is in its
tables. Reading the log by the rule must give exactly these, with every point's counts checked and no change twice. A
supervisor starts capture again whenever it ends; that it ends for a reason which a restart does not mend (exit code 5)
is a failure.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from integration.capture_process import CaptureProcess, on, settings_of
from integration.capturing import Log, source_rows, tables
from integration.clients import read_messages
from integration.support import MakeNode, rounds, seeded
from postgres.servers import Database, MakePostgres
from waiting import wait_until
from walstream.capture.commit_points import OpenRecord, PointRecord, decode
from walstream.errors import WalstreamError
from walstream.node.process import NodeProcess
from walstream.positions import Lsn
from walstream.postgres.embedded import EmbeddedPostgres

PREFIX = "postgres"
QUERIES = {
    "public.accounts": "select json_build_object('id', id, 'note', note, 'amount', amount::text) from accounts",
    "public.events": "select json_build_object('id', id, 'account', account, 'body', body) from events",
}
SERVER = {"logical_decoding_work_mem": "64kB", "wal_sender_timeout": "5s"}


class Workload:
    """Transactions of every kind, until it is told to stop; it waits for a server that is away and goes on."""

    def __init__(self, server: EmbeddedPostgres, dice: random.Random, large_rows: int) -> None:
        self._server = server
        self._dice = dice
        self._large_rows = large_rows
        self._is_over = threading.Event()
        self._may_run = threading.Event()
        self._is_paused = threading.Event()
        self._is_large_next = threading.Event()
        self._next_id = 1
        self.commits = 0
        self.failures: list[Exception] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        try:
            while not self._is_over.is_set():
                if not self._may_run.is_set():
                    self._is_paused.set()
                    self._may_run.wait(0.1)
                    continue
                self._is_paused.clear()
                try:
                    if connection is None:
                        connection = psycopg.connect(self._server.dsn, autocommit=True)
                    self._transaction(connection)
                    self.commits += 1
                    time.sleep(0.005)  # The test reads everything that it writes, and slowly.
                except psycopg.OperationalError:
                    # Whether the last one has committed, the tables know.
                    connection = _closed(connection)
                    time.sleep(0.05)
        except Exception as error:
            self.failures.append(error)
        finally:
            _closed(connection)

    def _ids(self, count: int) -> range:
        first, self._next_id = self._next_id, self._next_id + count
        return range(first, first + count)

    def _transaction(self, connection: psycopg.Connection[Any]) -> None:
        dice = self._dice
        with connection.transaction(force_rollback=dice.random() < 0.15):
            for _ in range(dice.randrange(1, 5)):
                self._statement(connection)
            for _ in range(dice.randrange(3)):
                # A savepoint: what is rolled back in it is no change, though PostgreSQL may have sent it.
                with connection.transaction(force_rollback=dice.random() < 0.5):
                    self._statement(connection)
                    if dice.random() < 0.3:
                        with connection.transaction(force_rollback=dice.random() < 0.5):
                            self._statement(connection)
            if self._is_large_next.is_set():
                self._is_large_next.clear()
                self._many(connection, self._large_rows)
            elif dice.random() < 0.01:
                self._many(connection, dice.randrange(1_000, 5_000))

    def _statement(self, connection: psycopg.Connection[Any]) -> None:
        dice, known = self._dice, max(1, self._next_id)
        one = dice.randrange(known)
        match dice.randrange(8):
            case 0 | 1 | 2:
                rows = [(number, f'note "{number}"\n', number / 4) for number in self._ids(dice.randrange(1, 20))]
                with connection.cursor() as cursor:
                    cursor.executemany("insert into accounts values (%s, %s, %s)", rows)
            case 3:
                connection.execute(
                    "update accounts set amount = amount + 1 where id between %s and %s", [one, one + 50]
                )
            case 4:
                connection.execute("delete from accounts where id between %s and %s", [one, one + 5])
            case 5:
                (new,) = self._ids(1)
                connection.execute("update accounts set id = %s, note = null where id = %s", [new, one])
            case 6:
                connection.execute(
                    "insert into events select n, %s, repeat('b', (n %% 300)::int)"
                    " from generate_series(%s::bigint, %s) n",
                    [one, *_ends(self._ids(10))],
                )
            case 7:
                connection.execute("update events set body = 'changed' where account = %s", [one])

    def _many(self, connection: psycopg.Connection[Any], count: int) -> None:
        ids = self._ids(count)
        connection.execute(
            "insert into accounts select n, 'one of many', n from generate_series(%s::bigint, %s) n", _ends(ids)
        )
        if self._dice.random() < 0.8:
            connection.execute("delete from accounts where id between %s and %s and id %% 10 <> 0", _ends(ids))

    def grow(self) -> None:
        """Make the next transaction a large one."""
        self._is_large_next.set()

    def pause(self) -> None:
        """Return when no transaction is under way."""
        self._is_paused.clear()
        self._may_run.clear()
        wait_until(lambda: self._is_paused.is_set() or self.failures, "the workload pauses", timeout_s=120)
        assert not self.failures, self.failures

    def resume(self) -> None:
        self._may_run.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[Workload]:
        self._thread.start()
        self.resume()
        try:
            yield self
        finally:
            self._is_over.set()
            self._thread.join()
        assert not self.failures, self.failures


def _ends(ids: range) -> list[int]:
    return [ids[0], ids[-1]]


def _closed(connection: psycopg.Connection[Any] | None) -> None:
    if connection is not None:
        connection.close()


class Supervisor:
    """Starts capture again whenever it ends, and remembers how it ended."""

    def __init__(self, capture: CaptureProcess) -> None:
        self.capture = capture
        self.codes: list[int] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            with self._lock:
                if not self.capture.is_running:
                    self.codes.append(self.capture.wait())
                    self.capture.start()

    def check(self) -> None:
        """Everything that ended it so far was something that a restart mends."""
        assert set(self.codes) <= {1, 3, -signal.SIGKILL}, self.capture.log_tail(200)

    @contextlib.contextmanager
    def running(self) -> Iterator[Supervisor]:
        self.capture.start()
        self._thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            self._thread.join()
            if self.capture.is_running:
                self.capture.kill()

    def stop(self) -> int:
        """End supervision, then capture."""
        self._is_over.set()
        self._thread.join()
        return self.capture.stop()


def make_tables(database: Database) -> None:
    database.execute("""
        create table accounts (id bigint primary key, note text, amount numeric(14, 2));
        create table events (id bigint primary key, account bigint, body text);
        create index on events (account);
        create publication walstream for table accounts, events;
    """)


def check(node: NodeProcess, database: Database) -> None:
    """Compare what the log says with what the source has."""
    found = tables(node, PREFIX)
    for name, query in QUERIES.items():
        expected = source_rows(database, query)
        assert found[name].rows == expected, f"{name} is another table in the log"


@pytest.mark.timeout(3600)
def test_the_log_is_exact_after_every_crash(make_postgres: MakePostgres, make_node: MakeNode, tmp_path: Path) -> None:
    seed, dice = seeded()
    full = rounds(full=20, part=2)
    server = make_postgres(18, **SERVER)
    node = make_node(log__segment_bytes=1_000_000, log__checkpoint_interval_ms=500)
    given = settings_of(
        server,
        node,
        capture__prefix=PREFIX,
        capture__partitions=dice.choice([1, 3]),
        capture__memory_bytes_max=1 << 20,
    )
    supervisor = Supervisor(CaptureProcess(tmp_path, given))
    workload = Workload(server, random.Random(seed), large_rows=200_000 if full >= 20 else 20_000)
    victims = ["capture", "all", "node", "postgres"]
    with on(server) as database, supervisor.capture.shown():
        make_tables(database)
        log = Log(node, database)
        with supervisor.running(), workload.running():
            for number in range(full):
                before = workload.commits
                wait_until(lambda before=before: workload.commits > before + 20, "transactions commit", timeout_s=120)
                victim = victims[number] if number < len(victims) else dice.choice(victims)
                if number % 4 == 1:
                    workload.grow()
                moment_s = dice.uniform(0, 2)
                print(f"round {number}: {victim} after {moment_s:.3f} s")
                time.sleep(moment_s)  # The moment of the crash is what the round is about.
                if victim in ("capture", "all"):
                    supervisor.capture.kill()
                if victim in ("node", "all"):
                    node.kill()
                    time.sleep(dice.uniform(0, 1))
                    node.start()
                if victim in ("postgres", "all"):
                    server.restart("immediate")
                if number % 5 == 4 or number == full - 1:
                    workload.pause()
                    wait_until(lambda: _reached(log, database), "the log has everything", timeout_s=300)
                    check(node, database)
                    supervisor.check()
                    workload.resume()
    assert workload.commits > 0
    print(f"{workload.commits} transactions; capture ended with {supervisor.codes}")


def _reached(log: Log, database: Database) -> bool:
    """Whether the log has reached the source's end, with all snapshots; while either is away it has not."""
    with contextlib.suppress(psycopg.Error, WalstreamError):
        end = database.execute("select pg_current_wal_insert_lsn()::text")[0][0]
        point = log.last()
        return point is not None and len(point.snapshots) == len(QUERIES) and point.end_lsn >= Lsn.parse(end)
    return False


@pytest.mark.timeout(1800)
def test_two_captures_and_their_zombies_never_corrupt_the_log(
    make_postgres: MakePostgres, make_node: MakeNode, tmp_path: Path
) -> None:
    """Two captures fight for one slot. The one that holds it is frozen with rows in flight until the server gives it up
    and the other one has taken over; then it wakes up and sends what it still has."""
    seed, dice = seeded()
    server, node = make_postgres(18, **SERVER | {"wal_sender_timeout": "2s"}), make_node()
    given = settings_of(server, node, capture__prefix=PREFIX)
    captures = [CaptureProcess(tmp_path, given, "--retry") for _ in range(2)]
    workload = Workload(server, random.Random(seed), large_rows=20_000)
    with on(server) as database, captures[0].shown(), captures[1].shown():
        make_tables(database)
        log = Log(node, database)
        captures[0].start()
        try:
            log.wait_for_snapshots("public.accounts", "public.events")
            captures[1].start()
            with workload.running():
                for number in range(rounds(full=20, part=3)):
                    _freeze_the_holder(database, captures, dice, number)
                workload.pause()
                for capture in captures:
                    capture.check()
                wait_until(lambda: _reached(log, database), "the log has everything", timeout_s=120)
                check(node, database)
        finally:
            for capture in captures:
                if capture.is_running:
                    capture.kill()
    print(f"{void_points(node)} points of zombies are in the log, and void")


def _freeze_the_holder(database: Database, captures: list[CaptureProcess], dice: random.Random, number: int) -> None:
    holder = wait_until(lambda: _holder(database, captures), "one of them holds the slot", timeout_s=120)
    opened = sum(capture.generations() for capture in captures)
    time.sleep(dice.uniform(0.1, 1))
    print(f"round {number}: {captures.index(holder)} is frozen")
    holder.signal(signal.SIGSTOP)
    try:
        wait_until(
            lambda: sum(capture.generations() for capture in captures) > opened,
            "the other one takes over",
            timeout_s=120,
        )
        time.sleep(dice.uniform(0, 0.5))
    finally:
        holder.signal(signal.SIGCONT)


def _holder(database: Database, captures: list[CaptureProcess]) -> CaptureProcess | None:
    """The capture whose generation is the latest, when the slot is in use."""
    if not database.execute("select 1 from pg_replication_slots where slot_name = 'walstream' and active"):
        return None
    last = [capture.log_text().rfind('"generation opened"') >= 0 for capture in captures]
    times = [_opened_at(capture) if has else "" for capture, has in zip(captures, last, strict=True)]
    return captures[times.index(max(times))]


def _opened_at(capture: CaptureProcess) -> str:
    return [line for line in capture.log_text().splitlines() if '"generation opened"' in line][-1][:40]


def void_points(node: NodeProcess) -> int:
    gen, found = -1, 0
    for message in read_messages(node.address, f"{PREFIX}.commits"):
        record = decode(message.value(), message.offset())
        if isinstance(record, OpenRecord):
            gen = message.offset()
        elif isinstance(record, PointRecord) and record.gen != gen:
            found += 1
    return found
