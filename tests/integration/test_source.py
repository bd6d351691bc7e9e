"""Both engines against real servers: everything that commits comes once, in order, whole, and in bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from postgres.servers import Database, MakePostgres
from waiting import wait_until
from walstream.capture.polling import PollingSource
from walstream.capture.source import Change, Source
from walstream.capture.streaming import StreamingSource
from walstream.errors import ConnectionLost, SlotBusy, SlotMissing
from walstream.positions import Lsn

MIB = 1 << 20
SLOT = "slot"
LIMIT = 1000
STREAMED = "-c logical_decoding_work_mem=64kB"

ENGINES = ("streaming", "polling")


@dataclass
class Seen:
    """A transaction as a source gave it."""

    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time_us: int
    origin: str
    changes: list[Change]


@contextmanager
def source_of(
    database: Database,
    folder: Path,
    engine: str = "streaming",
    *,
    slot: str = SLOT,
    options: str = STREAMED,
    memory_bytes_max: int = 32 * MIB,
) -> Iterator[StreamingSource | PollingSource]:
    dsn = f"{database.dsn} options='{options}'"
    source: StreamingSource | PollingSource
    if engine == "streaming":
        source = StreamingSource.open(dsn, slot, ["pub"], memory_bytes_max=memory_bytes_max, spill_folder=folder)
    else:
        source = PollingSource.open(
            dsn, slot, ["pub"], memory_bytes_max=memory_bytes_max, spill_folder=folder, poll_interval_s=0.05
        )
    with closing(source):
        yield source


def prepare(database: Database, *slots: str, plugin: str = "pgoutput") -> None:
    database.execute(
        """
        create table public.t (id int primary key, name text, amount numeric);
        create table public.wide (id int primary key, small text, large text);
        create table public.whole (a text, b int);
        create table public.unpublished (id int);
        alter table public.wide alter large set storage external;
        alter table public.whole replica identity full;
        create publication pub for table public.t, public.wide, public.whole;
        """
    )
    for slot in slots or (SLOT,):
        database.execute("select pg_create_logical_replication_slot(%s, %s)", (slot, plugin))


def end_of_wal(database: Database) -> Lsn:
    return Lsn.parse(database.execute("select pg_current_wal_flush_lsn()::text")[0][0])


def confirmed(database: Database) -> Lsn:
    query = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s"
    return Lsn.parse(database.execute(query, (SLOT,))[0][0])


def read_until(source: Source, lsn: Lsn, *, limit: int = LIMIT, timeout_s: float = 60.0) -> list[Seen]:
    """Receive, and confirm, until everything that committed before `lsn` has come."""
    seen: list[Seen] = []
    deadline, last_lsn = time.monotonic() + timeout_s, Lsn(0)
    while last_lsn < lsn:
        assert time.monotonic() < deadline, f"only {last_lsn} of {lsn} came: {seen[-3:]}"
        with source.receive_batch(limit, 0.2) as batch:
            assert batch.last_lsn >= last_lsn
            assert all(last_lsn <= transaction.commit_lsn for transaction in batch.transactions)
            last_lsn = batch.last_lsn
            changes = list(batch.changes)
            assert changes == list(batch.changes)
            by_commit: dict[Lsn, list[Change]] = {}
            for change in changes:
                by_commit.setdefault(change.position.commit_lsn, []).append(change)
            for transaction in batch.transactions:
                own = by_commit[transaction.commit_lsn]
                assert [change.position.seq for change in own] == list(range(1, len(own) + 1))
                facts = (transaction.xid, transaction.commit_lsn, transaction.end_lsn, transaction.commit_time_us)
                seen.append(Seen(*facts, transaction.origin, own))
        source.send_feedback(batch.last_lsn)
    return seen


def told(seen: list[Seen]) -> list[list[tuple[str, str, dict[str, Any] | None, dict[str, Any] | None]]]:
    """What happened, without positions."""
    return [
        [
            (change.op, change.relation.table if change.relation else "", change.before, change.after)
            for change in transaction.changes
        ]
        for transaction in seen
    ]


def apply(seen: list[Seen], table: str, key: str = "id") -> dict[str, dict[str, Any]]:
    """Follow the changes of a table from empty: what it holds now."""
    rows: dict[str, dict[str, Any]] = {}
    for transaction in seen:
        for change in transaction.changes:
            if change.relation is None or change.relation.table != table:
                continue
            if change.op == "t":
                rows.clear()
                continue
            old = change.before or change.after
            assert old is not None
            before = rows.pop(old[key], {})
            if change.after is not None:
                rows[change.after[key]] = {**before, **change.after}
    return rows


def held(database: Database, table: str, key: str = "id") -> dict[str, dict[str, Any]]:
    """The same from SQL, as text."""
    cursor = database.connection.execute(f"select * from public.{table}".encode())
    names = [column.name for column in cursor.description or ()]
    rows = [
        {name: None if value is None else str(value) for name, value in zip(names, row, strict=True)} for row in cursor
    ]
    return {row[key]: row for row in rows}


def mixed_workload(database: Database) -> None:
    large = "x" * 5000
    database.execute("insert into public.t values (1, 'one', 1.50), (2, null, null)")
    database.execute("update public.t set name = 'zwei' where id = 2; update public.t set id = 3 where id = 1")
    database.execute(f"insert into public.wide values (1, 'a', '{large}')")
    database.execute("update public.wide set small = 'b'")
    database.execute(
        "insert into public.whole values ('a', 1), (null, null); update public.whole set b = 2 where b = 1"
    )
    database.execute("delete from public.whole where a is null")
    database.execute("insert into public.unpublished values (1)")
    database.execute(
        """
        begin; insert into public.t values (10, 'kept');
        savepoint a; insert into public.t values (11, 'lost'); rollback to a;
        savepoint b; insert into public.t values (12, 'kept too'); release b; commit
        """
    )
    database.execute("begin; insert into public.t values (99); rollback")
    database.execute("alter table public.t add column extra text; insert into public.t values (20, 'n', 2, 'more')")
    database.execute("alter table public.t drop column amount; insert into public.t values (21, 'it''s', 'ünï\\côde')")
    database.execute(
        "begin; select pg_logical_emit_message(true, 'in', 'side'); insert into public.t values (22); commit"
    )
    database.execute("select pg_logical_emit_message(false, 'out', 'side')")
    database.execute("delete from public.t where id = 3")
    database.execute("insert into public.t select n, 'n' || n from generate_series(1000, 4000) n")
    database.execute("truncate public.wide, public.whole; insert into public.wide values (5, '''', '\\')")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mixed_workload_comes_as_it_was(each_database: Database, tmp_path: Path, engine: str) -> None:
    prepare(each_database)
    mixed_workload(each_database)
    end = end_of_wal(each_database)
    with source_of(each_database, tmp_path, engine) as source:
        seen = read_until(source, end)
    now = held(each_database, "t")
    assert {key: {"extra": None, **row, "amount": None} for key, row in apply(seen, "t").items()} == {
        key: {**row, "amount": None} for key, row in now.items()
    }
    assert apply(seen, "wide") == held(each_database, "wide")
    first, second, *_ = told(seen)
    assert first == [
        ("c", "t", None, {"id": "1", "name": "one", "amount": "1.50"}),
        ("c", "t", None, {"id": "2", "name": None, "amount": None}),
    ]
    assert second == [
        ("u", "t", None, {"id": "2", "name": "zwei", "amount": None}),
        ("u", "t", {"id": "1"}, {"id": "3", "name": "one", "amount": "1.50"}),
    ]
    flat = [change for transaction in seen for change in transaction.changes]
    (toast,) = [change for change in flat if change.unchanged]
    assert (toast.after, toast.unchanged) == ({"id": "1", "small": "b"}, ("large",))
    whole = [(change.op, change.before) for change in flat if change.relation and change.relation.table == "whole"]
    assert whole[2:] == [("u", {"a": "a", "b": "1"}), ("d", {"a": None, "b": None}), ("t", None)]
    assert [change.after for change in flat if change.op == "m"] == [
        {"prefix": "in", "content": "side"},
        {"prefix": "out", "content": "side"},
    ]


def test_both_engines_give_the_same(each_database: Database, tmp_path: Path) -> None:
    prepare(each_database, "streamed", "streamed_tiny", "polled")
    mixed_workload(each_database)
    end = end_of_wal(each_database)
    found = []
    for engine, slot, memory in (
        ("streaming", "streamed", MIB),
        ("streaming", "streamed_tiny", 0),
        ("polling", "polled", MIB),
    ):
        with source_of(each_database, tmp_path, engine, slot=slot, memory_bytes_max=memory) as source:
            found.append([seen for seen in read_until(source, end) if seen.xid])
    assert found[0] == found[1]
    assert found[0] == found[2]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_restart_goes_on_where_it_was_confirmed(database: Database, tmp_path: Path, engine: str) -> None:
    prepare(database)
    seen: list[Seen] = []
    for number in range(3):
        for part in range(20):
            database.execute("insert into public.t values (%s, 'x')", (number * 100 + part,))
        with source_of(database, tmp_path, engine) as source:
            seen += read_until(source, end_of_wal(database), limit=3)
        assert confirmed(database) >= seen[-1].end_lsn
    assert [transaction.changes[0].after["id"] for transaction in seen if transaction.changes[0].after] == [
        str(number * 100 + part) for number in range(3) for part in range(20)
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_confirmed_comes_again_and_can_be_skipped(database: Database, tmp_path: Path, engine: str) -> None:
    prepare(database)
    for number in range(5):
        database.execute("insert into public.t values (%s)", (number,))

    def receive(*, skip_before: Lsn | None = None) -> list[tuple[Lsn, Lsn, list[Any]]]:
        with source_of(database, tmp_path, engine) as source:
            if skip_before is not None:
                source.skip_before(skip_before)
            found: list[tuple[Lsn, Lsn, list[Any]]] = []
            while not found or found[-1][2] != ["4"]:
                with source.receive_batch(2, 1.0) as batch:
                    for transaction in batch.transactions:
                        ids = [
                            (change.after or {}).get("id")
                            for change in batch.changes
                            if change.position.commit_lsn == transaction.commit_lsn
                        ]
                        found.append((transaction.commit_lsn, transaction.end_lsn, ids))
            return found

    first = receive()
    assert [ids for _, _, ids in first] == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert receive() == first
    assert receive(skip_before=first[1][1]) == first[2:]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_idle_database_moves_its_slot(each_database: Database, tmp_path: Path, engine: str) -> None:
    prepare(each_database)
    with source_of(each_database, tmp_path, engine) as source:
        for _ in range(3):
            each_database.execute("insert into public.unpublished select generate_series(1, 10000)")
            end = end_of_wal(each_database)
            assert read_until(source, end, timeout_s=15) == []
            wait_until(
                lambda end=end: confirmed(each_database) >= end or source.receive_batch(1, 0.05) is None,  # type: ignore[misc]
                "the idle position is confirmed",
            )
        assert source.ladder().confirmed >= end


def test_a_transaction_that_streams_for_long_does_not_hold_an_idle_slot(database: Database, tmp_path: Path) -> None:
    prepare(database)
    with source_of(database, tmp_path) as source, closing(database.connect()) as other:
        other.autocommit = False
        other.execute("insert into public.t select n, repeat('x', 100) from generate_series(1, 5000) n")
        database.execute("insert into public.unpublished values (1)")
        end = end_of_wal(database)
        assert read_until(source, end) == []
        wait_until(lambda: confirmed(database) >= end, "the idle position is confirmed")
        other.commit()
        (transaction,) = read_until(source, end_of_wal(database))
        assert len(transaction.changes) == 5000


def test_a_huge_transaction_with_rollbacks_stays_within_its_memory(each_database: Database, tmp_path: Path) -> None:
    """200,000 rows in 40 savepoints, every second one rolled back, in a budget of 4 MiB."""
    prepare(each_database)
    session = each_database.connect()
    session.autocommit = False
    expected = 0
    for part in range(40):
        session.execute("savepoint s")
        session.execute(
            "insert into public.t select n, repeat('y', 200) from generate_series(%s::int, %s::int) n",
            (part * 5000, part * 5000 + 4999),
        )
        if part % 2:
            session.execute("rollback to s")
        else:
            session.execute("release s")
            expected += 5000
    session.commit()
    session.close()
    end = end_of_wal(each_database)
    with source_of(each_database, tmp_path, memory_bytes_max=4 * MIB) as source:
        before = resident_bytes()
        peak = used = count = total = 0
        last_lsn = Lsn(0)
        while last_lsn < end:
            with source.receive_batch(LIMIT, 0.05) as batch:
                used = max(used, source.budget.used_bytes)
                for transaction in batch.transactions:
                    count += transaction.change_count
                    for number, data in enumerate(transaction.rows):
                        total += data[0] == ord("I")
                        if number % 10_000 == 0:
                            peak = max(peak, resident_bytes() - before)
                last_lsn = batch.last_lsn
                peak = max(peak, resident_bytes() - before)
    assert count == total == expected
    assert used <= 4 * MIB
    # Beside the budget: one drain of the stream, what libpq buffers, a frame of the file, and Python's slack.
    assert peak < 40 * MIB


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize("engine", ENGINES)
def test_concurrent_transactions_come_in_commit_order(each_database: Database, tmp_path: Path, engine: str) -> None:
    prepare(each_database)

    def work(worker: int) -> None:
        with closing(each_database.connect()) as session:
            session.autocommit = False
            for round_ in range(20):
                first = worker * 100_000 + round_ * 1000
                session.execute(
                    "insert into public.t select n, 'x' from generate_series(%s::int, %s::int) n", (first, first + 200)
                )
                session.execute("savepoint s")
                session.execute("update public.t set name = 'lost' where id between %s and %s", (first, first + 100))
                session.execute("rollback to s")
                session.execute("delete from public.t where id = %s", (first,))
                if round_ % 5 == 4:
                    session.rollback()
                else:
                    session.commit()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    with source_of(each_database, tmp_path, engine, memory_bytes_max=100_000) as source:
        for worker in workers:
            worker.start()
        seen: list[Seen] = []
        while any(worker.is_alive() for worker in workers):
            seen += read_until(source, end_of_wal(each_database))
        seen += read_until(source, end_of_wal(each_database))
    assert len(seen) == 6 * 16
    assert {len(transaction.changes) for transaction in seen} == {202}
    assert [seen.commit_lsn for seen in seen] == sorted(seen.commit_lsn for seen in seen)
    assert apply(seen, "t") == held(each_database, "t")


def test_descriptions_survive_rollbacks_in_streamed_transactions(each_database: Database, tmp_path: Path) -> None:
    """The first rows, and a new column, come in savepoints that are rolled back; what follows must still be read."""
    prepare(each_database)
    many = "select n, repeat('z', 100) from generate_series(1, 2000) n"
    session = each_database.connect()
    session.autocommit = False
    session.execute("savepoint a")
    session.execute(f"insert into public.t {many}".encode())
    session.execute("rollback to a")
    session.execute(f"insert into public.t {many}".encode())
    session.execute("savepoint b")
    session.execute("alter table public.t add column lost int default 7")
    session.execute(f"insert into public.t {many.replace('select n', 'select n + 10000')}".encode())
    session.execute("rollback to b")
    session.execute("insert into public.t values (5001, 'after')")
    session.commit()
    session.close()
    each_database.execute("insert into public.t values (5002, 'next')")
    with source_of(each_database, tmp_path) as source:
        seen = read_until(source, end_of_wal(each_database))
        each_database.execute("insert into public.t values (5003, 'again')")
        seen += read_until(source, end_of_wal(each_database))
    assert [len(transaction.changes) for transaction in seen] == [2001, 1, 1]
    streamed = "select stream_txns from pg_stat_replication_slots where slot_name = %s"
    wait_until(lambda: each_database.execute(streamed, (SLOT,))[0][0] > 0, "a streamed transaction")
    assert apply(seen, "t") == held(each_database, "t")


def test_a_late_streamed_transaction_keeps_the_renamed_schema(each_database: Database, tmp_path: Path) -> None:
    each_database.execute("create schema old; create table old.r (id int primary key, name text)")
    prepare(each_database)
    each_database.execute("alter publication pub add table old.r")
    slow = each_database.connect()
    slow.autocommit = False
    slow.execute("insert into old.r select n, repeat('z', 100) from generate_series(1, 2000) n")
    with source_of(each_database, tmp_path) as source:
        read_until(source, end_of_wal(each_database))
        each_database.execute("alter schema old rename to new; insert into new.r values (5000, 'quick')")
        seen = read_until(source, end_of_wal(each_database))
        slow.commit()
        slow.close()
        each_database.execute("insert into new.r values (5001, 'last')")
        seen += read_until(source, end_of_wal(each_database))
    schemas = [{change.relation.schema for change in each.changes if change.relation} for each in seen]
    assert schemas[0] == {"new"}
    assert schemas[2] == {"new"}


def test_a_caller_that_sleeps_is_not_disconnected(database: Database, tmp_path: Path) -> None:
    """`wal_sender_timeout` is 2 s and nobody asks for a batch for 5 s, with much to send and with nothing."""
    prepare(database, SLOT, "idle")
    for part in range(20):
        rows = "select n, repeat('w', 500) from generate_series(%s::int, %s::int) n"
        database.execute(f"insert into public.t {rows}", (part * 5000, part * 5000 + 4999))
    options = "-c wal_sender_timeout=2s"
    with (
        source_of(database, tmp_path, options=options, memory_bytes_max=4 * MIB) as busy,
        source_of(database, tmp_path, options=options, slot="idle") as idle,
    ):
        read_until(idle, end_of_wal(database))
        with busy.receive_batch(1, 5.0) as batch:
            received = batch.change_count
        busy.send_feedback(batch.last_lsn)
        time.sleep(5)
        query = "select extract(epoch from clock_timestamp() - reply_time) from pg_stat_replication"
        assert [float(age) < 1 for (age,) in database.execute(query)] == [True, True]
        received += sum(len(transaction.changes) for transaction in read_until(busy, end_of_wal(database)))
        database.execute("insert into public.t values (-1)")
        for source in (busy, idle):
            (transaction,) = read_until(source, end_of_wal(database))
            assert transaction.changes[0].after == {"id": "-1", "name": None, "amount": None}
    assert received == 100_000


def test_a_batch_is_handed_out_as_soon_as_the_wire_is_idle(database: Database, tmp_path: Path) -> None:
    prepare(database)
    with source_of(database, tmp_path) as source:
        latencies = []
        for number in range(50):
            database.execute("insert into public.t values (%s)", (number,))
            committed = time.monotonic()
            with source.receive_batch(LIMIT, 5.0) as batch:
                latencies.append(time.monotonic() - committed)
                assert batch.change_count == 1
            source.send_feedback(batch.last_lsn)
        assert sorted(latencies)[25] < 0.01


def receive_for_ever(source: Source) -> None:
    while True:
        with source.receive_batch(1, 0.1) as batch:
            source.send_feedback(batch.last_lsn)


def test_a_server_that_dies_is_noticed(make_postgres: MakePostgres, tmp_path: Path) -> None:
    server = make_postgres()
    database = Database(server, "postgres")
    prepare(database)
    for engine in ENGINES:
        with source_of(database, tmp_path, engine) as source:
            source.receive_batch(1, 0.1)
            database.connection.close()
            server.restart("immediate")
            with pytest.raises(ConnectionLost):
                receive_for_ever(source)


def test_a_fast_shutdown_waits_only_for_what_is_confirmed(make_postgres: MakePostgres, tmp_path: Path) -> None:
    server = make_postgres()
    database = Database(server, "postgres")
    prepare(database)
    with source_of(database, tmp_path) as source:
        database.execute("insert into public.t values (1)")
        database.connection.close()
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(ConnectionLost):
            receive_for_ever(source)
        stopping.join(timeout=10)
        assert not stopping.is_alive()


def test_a_slot_has_one_reader(database: Database, tmp_path: Path) -> None:
    prepare(database)
    for engine in ENGINES:
        with source_of(database, tmp_path, engine), pytest.raises(SlotBusy), source_of(database, tmp_path, engine):
            pass
        with pytest.raises(SlotMissing), source_of(database, tmp_path, engine, slot="nothing"):
            pass


@pytest.mark.parametrize("engine", ENGINES)
def test_feedback_is_all_that_is_confirmed(database: Database, tmp_path: Path, engine: str) -> None:
    prepare(database)
    before = confirmed(database)
    with source_of(database, tmp_path, engine) as source:
        database.execute("insert into public.t values (1)")
        with source.receive_batch(1, 5.0) as batch:
            assert batch.change_count == 1
        assert source.receive_batch(1, 1.5).change_count == 0
        assert confirmed(database) == before
        source.send_feedback(batch.last_lsn)
        source.receive_batch(1, 0.2)
        wait_until(lambda: confirmed(database) == batch.last_lsn, "the batch is confirmed")


def test_polling_looks_past_what_is_not_durable_yet(database: Database, tmp_path: Path) -> None:
    prepare(database)
    for number in range(40):
        database.execute("insert into public.t values (%s)", (number,))
    found: list[str | None] = []
    with source_of(database, tmp_path, "polling") as source:
        last_lsns = []
        for _ in range(60):
            with source.receive_batch(10, 0.1) as batch:
                found += [change.after["id"] for change in batch.changes if change.after]
                last_lsns.append(batch.last_lsn)
            if len(last_lsns) > 3:
                source.send_feedback(last_lsns[-3])
            if len(found) == 40:
                break
    assert found == [str(number) for number in range(40)]


def test_a_look_leaves_no_transaction_open(database: Database, tmp_path: Path) -> None:
    """It would hold back vacuum."""
    prepare(database)
    database.execute("insert into public.t values (1)")
    with source_of(database, tmp_path, "polling") as source:
        source.receive_batch(1, 1.0).close()
        query = "select state from pg_stat_activity where application_name = 'walstream' and datname = %s"
        assert database.execute(query, (database.name,)) == [("idle",)]
