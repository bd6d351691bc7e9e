"""Snapshots, end to end: PostgreSQL, a capture, a node, and a reader that knows nothing but the rule."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from integration.capturing import InProcess, InThread, Log, configured, settings, source_rows, working
from postgres.servers import Database
from waiting import wait_until
from walstream.capture import snapshot_watch
from walstream.capture.kafka import LogAddress
from walstream.capture.reading import LogReader
from walstream.capture.schemas import read_schemas
from walstream.capture.topics import Topics
from walstream.errors import ConnectionLost
from walstream.node.process import NodeProcess
from walstream.positions import Lsn
from walstream.postgres.copy_out import CopyReader

MakeNode = Callable[..., NodeProcess]

ACCOUNTS = "select json_build_object('id', id, 'note', note, 'amount', amount::text) from accounts"


def make_accounts(database: Database, rows: int) -> None:
    database.execute("create table accounts (id bigint primary key, note text, amount numeric(12,2))")
    database.execute(
        "insert into accounts select n, case when n % 7 <> 0 then 'note ' || n end, n * 0.25"
        f" from generate_series(1, {rows}) n"
    )


def busy(connection: psycopg.Connection[Any], rows: int, seed: int = 1) -> Callable[[int], None]:
    """Transactions of a bank that never sleeps: inserts, updates, moves, deletes, some of them rolled back."""
    dice = random.Random(seed)

    def work(number: int) -> None:
        new = seed * 10_000_000 + 10 * number
        any_id = dice.randint(1, rows)
        with connection.transaction(force_rollback=dice.random() < 0.2):
            connection.execute(
                "insert into accounts values (%s, %s, 1), (%s, null, 2)", [new, f"new {number}", new + 1]
            )
            connection.execute("update accounts set amount = amount + 1, note = 'tab\tnl\n\\' where id = %s", [any_id])
            connection.execute("update accounts set id = id + 5 where id = %s", [new + 1])
            connection.execute("delete from accounts where id = %s", [dice.randint(1, rows)])
        if number % 50 == 0:
            with connection.transaction():
                connection.execute("update accounts set note = 'many' where id %% 97 = %s", [number % 97])
        time.sleep(0.002)

    return work


def temporary_slots(database: Database) -> list[Any]:
    query = "select slot_name from pg_replication_slots where temporary and database = %s"
    return database.execute(query, [database.name])


def test_snapshot_and_stream_give_the_tables_of_the_source(each_database: Database, node: NodeProcess) -> None:
    database, rows = each_database, 20_000
    make_accounts(database, rows)
    database.execute("""
        create schema "Größe";
        create table "Größe"."tä ""b""le" ("Ключ" text primary key, "a b" int);
        insert into "Größe"."tä ""b""le" values ('ä', 1), (E'tab\\there', null), (E'back\\\\slash\\n', 3);
        create table no_key (a int, b text);
        insert into no_key values (1, 'x'), (1, 'x'), (null, null);
        create table empty (id int primary key);
        create table nothing_left (id int primary key) partition by list (id);
        create table kinds (id int primary key, at timestamptz, b bytea, js jsonb, list text[], f float8, ok bool);
        insert into kinds values
            (1, '2024-02-29 12:00:00.5+00', '\\x00ff5c',
             '{"a": "q\\"uote", "t": "\\\\n"}', '{a,NULL,"x,\\"y\\\\"}', 'NaN', true),
            (2, 'infinity', '', 'null', '{}', 1.5, null), (3, null, null, null, null, null, false);
        create table filtered (id int primary key, secret text, note text);
        insert into filtered select n, 'secret', 'note ' || n from generate_series(1, 100) n;
        create table generated (id int primary key, twice int generated always as (id * 2) stored);
        insert into generated (id) values (1), (2);
        create table inherited (id int primary key, note text);
        create table inheriting (more int, primary key (id)) inherits (inherited);
        insert into inherited values (1, 'a'); insert into inheriting values (2, 'b', 3);
        create table parent (id int, region text, note text, primary key (id, region)) partition by list (region);
        create table child_eu (note text, region text not null, id int not null);
        alter table parent attach partition child_eu for values in ('eu');
        create table child_other partition of parent default partition by list (region);
        create table child_us partition of child_other for values in ('us');
        insert into parent
            select n, case when n % 2 = 0 then 'eu' else 'us' end, 'p' || n from generate_series(1, 50) n;
    """)
    stored = ", publish_generated_columns = stored" if database.version >= 18 else ""
    database.execute(f"""
        create publication walstream for table accounts, "Größe"."tä ""b""le", no_key, empty, nothing_left, kinds,
            filtered (id, note) where (id > 90), generated, parent, inherited
        with (publish_via_partition_root = true{stored})
    """)
    names = (
        "public.accounts",
        'Größe.tä "b"le',
        "public.no_key",
        "public.empty",
        "public.nothing_left",
        "public.kinds",
        "public.filtered",
        "public.generated",
        "public.parent",
        "public.inherited",
        "public.inheriting",
    )
    with database.connect() as connection, working(busy(connection, rows)):
        time.sleep(0.2)
        with InThread(configured(database, node, capture__snapshot_workers=3)) as capture:
            log = Log(node, database, capture)
            snapshots = log.wait_for_snapshots(*names)
            time.sleep(0.3)
            database.execute("insert into empty values (1); insert into no_key values (1, 'x')")
            database.execute("insert into parent values (1000, 'eu', 'late'); delete from parent where id = 1")
            database.execute("update filtered set note = 'changed' where id > 95; delete from filtered where id = 100")
            database.execute('update "Größe"."tä ""b""le" set "a b" = 7 where "a b" is null')
            log.wait()
    # The writer may have gone on a little longer than the capture: so it is resumed, without any snapshot.
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        log.wait()
        found = log.tables()
        assert log.snapshots() == snapshots
    assert len({one.lsn for one in snapshots.values()}) == 1
    assert len({one.id for one in snapshots.values()}) == len(names)
    assert found["public.accounts"].rows == source_rows(database, ACCOUNTS)
    assert found['Größe.tä "b"le'].rows == source_rows(database, 'select to_json(t) from "Größe"."tä ""b""le" t')
    for name in ("no_key", "empty", "nothing_left", "parent", "inheriting", "only inherited"):
        assert found[f"public.{name.split()[-1]}"].rows == source_rows(database, f"select to_json(t) from {name} t"), (
            name
        )
    filtered = "select json_build_object('id', id, 'note', note) from filtered where id > 90"
    assert found["public.filtered"].rows == source_rows(database, filtered)
    generated = "to_json(t)" if database.version >= 18 else "json_build_object('id', id)"
    assert found["public.generated"].rows == source_rows(database, f"select {generated} from generated t")
    assert found["public.kinds"].rows == source_rows(
        database,
        """
        select json_build_object(
            'id', id, 'at', case id when 1 then '2024-02-29T12:00:00.5Z' when 2 then 'infinity' end,
            'b', encode(b, 'base64'), 'js', js::text, 'list', to_json(list),
            'f', case when id = 1 then '"NaN"'::json when id = 2 then to_json(f) end, 'ok', ok) from kinds
        """,
    )


def test_many_rows_in_parallel(database: Database, node: NodeProcess) -> None:
    rows = 300_000
    make_accounts(database, rows)
    database.execute("create publication walstream for table accounts")
    with InThread(configured(database, node, capture__snapshot_workers=4)) as capture:
        log = Log(node, database, capture)
        snapshot = log.wait_for_snapshots("public.accounts")["public.accounts"]
        sessions = database.execute(
            "select count(*) from pg_stat_activity where application_name = 'walstream snapshot' and state <> 'idle'"
        )
    assert snapshot.rows == rows
    assert log.tables()["public.accounts"].rows == source_rows(database, ACCOUNTS)
    # The keeper and the workers are gone when there is nothing left to read; nobody holds old rows back.
    assert sessions == [(0,)]


def test_killed_in_the_middle_finished_tables_stay(database: Database, node: NodeProcess, tmp_path: Path) -> None:
    rows = 200_000
    database.execute("create table small (id int primary key); insert into small select generate_series(1, 1000)")
    make_accounts(database, rows)
    database.execute("create publication walstream for table small, accounts")
    capture = InProcess(settings(database, node), tmp_path)
    log = Log(node, database, capture)
    with database.connect() as connection, working(busy(connection, rows)):
        ids = []
        topic = f"{database.name}.public.accounts"
        for _ in range(3):
            before = log.end(topic)
            capture.start()
            wait_until(lambda before=before: log.end(topic) > before, "the first rows of the large table")
            ids.append(log.wait_for_snapshots("public.small")["public.small"].id)
            capture.kill()
        log.capture = None
        assert set(log.snapshots()) == {"public.small"}, "the large table was to be unfinished"
        capture.start()
        log.capture = capture
        snapshots = log.wait_for_snapshots("public.accounts")
    log.wait()
    capture.stop()
    assert set(ids) == {snapshots["public.small"].id}
    assert Lsn.parse(snapshots["public.accounts"].lsn) > Lsn.parse(snapshots["public.small"].lsn)
    found = log.tables()
    assert found["public.small"].rows == source_rows(database, "select to_json(t) from small t")
    assert found["public.accounts"].rows == source_rows(database, ACCOUNTS)


def test_tables_added_later_and_changed_in_the_publication(each_database: Database, node: NodeProcess) -> None:
    database, rows = each_database, 5_000
    database.execute("create table first (id int primary key); insert into first values (1)")
    make_accounts(database, rows)
    database.execute("create publication walstream for table first")
    with InThread(configured(database, node)) as capture, database.connect() as connection:
        log = Log(node, database, capture)
        first = log.wait_for_snapshots("public.first")["public.first"]
        with working(busy(connection, rows)):
            time.sleep(0.2)
            database.execute("alter publication walstream add table accounts")
            added = log.wait_for_snapshots("public.first", "public.accounts")["public.accounts"]
            time.sleep(0.2)
        log.wait()
        assert log.tables()["public.accounts"].rows == source_rows(database, ACCOUNTS)

        with working(busy(connection, rows, seed=2)):
            database.execute("alter publication walstream set table first, accounts where (id % 2 = 0)")
            wait_until(lambda: log.snapshots()["public.accounts"].id != added.id, "another snapshot")
            time.sleep(0.2)
        log.wait()
        assert log.snapshots()["public.first"] == first
        # A row filter turns updates into inserts and deletes where rows come into sight or leave it.
        even = f"{ACCOUNTS} where id % 2 = 0"
        assert log.tables()["public.accounts"].rows == source_rows(database, even)


def test_a_table_rewritten_meanwhile_is_read_again(
    database: Database, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the consistent point and before the COPY, all rows move to where the snapshot cannot see them."""
    make_accounts(database, 100)
    database.execute("create table other (id int primary key); insert into other values (1)")
    database.execute("create publication walstream for table accounts, other")
    is_altered = False
    read = CopyReader.read

    def alter_first(self: CopyReader, statement: str, **where: Any) -> None:
        nonlocal is_altered
        if "accounts" in statement and not is_altered:
            is_altered = True
            database.execute("alter table accounts alter column amount type numeric(14,4)")
        read(self, statement, **where)

    monkeypatch.setattr(CopyReader, "read", alter_first)
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        snapshots = log.wait_for_snapshots("public.accounts", "public.other")
        assert is_altered
        assert snapshots["public.accounts"].rows == 100
        assert Lsn.parse(snapshots["public.accounts"].lsn) > Lsn.parse(snapshots["public.other"].lsn)
        log.wait()
        assert log.tables()["public.accounts"].rows == source_rows(database, ACCOUNTS)


def test_columns_that_swap_their_names_meanwhile_are_not_read_as_each_other(
    each_database: Database, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COPY takes the names of now, also in a transaction that sees the rows of then; nothing is rewritten."""
    database = each_database
    database.execute("create table t (id int primary key, a text, \"B %s\" text); insert into t values (1, 'a', 'b')")
    database.execute("create publication walstream for table t")
    is_altered = False
    read = CopyReader.read

    def alter_first(self: CopyReader, statement: str, **where: Any) -> None:
        nonlocal is_altered
        if not is_altered:
            is_altered = True
            database.execute(
                'alter table t rename a to c; alter table t rename "B %s" to a; alter table t rename c to "B %s"'
            )
        read(self, statement, **where)

    monkeypatch.setattr(CopyReader, "read", alter_first)
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        log.wait_for_snapshots("public.t")
        log.wait()
        assert log.tables()["public.t"].rows == source_rows(database, "select to_json(t) from t")
    # A reader follows columns by their numbers, so the values must be of the version that the row names.
    address = LogAddress(node.address)
    versions = {info.version: info for info in read_schemas(address, Topics(address, database.name))}
    with LogReader(node.address, database.name) as reader:
        (row,) = reader.rows(list(reader.points()))
    event = json.loads(row.value or b"")
    numbers = {column.attnum: column.name for column in versions[event["source"]["schema_version"]].columns}
    assert {number: event["after"][name] for number, name in numbers.items()} == {1: 1, 2: "a", 3: "b"}


def test_capture_stops_while_a_consistent_point_is_waited_for(database: Database, node: NodeProcess) -> None:
    database.execute("create table first (id int primary key); create table second (id int primary key)")
    database.execute("create publication walstream for table first")
    with database.connect() as blocker, InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        log.wait_for_snapshots("public.first")
        blocker.execute("begin; insert into first values (1)")
        database.execute("alter publication walstream add table second")
        wait_until(lambda: temporary_slots(database), "a temporary slot")
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 10
    wait_until(lambda: not temporary_slots(database), "the temporary slot to be gone")


@pytest.fixture
def holder(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A session to lock the table `own.second` with; `first` is published, too."""
    database.execute("create table first (id int primary key)")
    database.execute("create schema own; create table own.second (id int primary key)")
    database.execute("insert into first values (1); insert into own.second values (1), (2)")
    database.execute("create publication walstream for table first")
    with database.connect() as session:
        yield session


LOCK = "begin; lock table own.second in access exclusive mode"
PUBLISH = "alter publication walstream add tables in schema own"  # Needs no lock on the table.


def waits_for_a_lock(database: Database) -> bool:
    query = "select 1 from pg_locks where relation = 'own.second'::regclass and not granted"
    return bool(database.execute(query))


def test_capture_stops_while_a_lock_is_waited_for(
    holder: psycopg.Connection[Any], database: Database, node: NodeProcess
) -> None:
    with InThread(configured(database, node)) as capture:
        Log(node, database, capture).wait_for_snapshots("public.first")
        holder.execute(LOCK)
        database.execute(PUBLISH)
        wait_until(lambda: waits_for_a_lock(database), "the snapshot waits")
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 10


def test_a_generation_that_fails_ends_while_a_lock_is_waited_for(
    holder: psycopg.Connection[Any], database: Database, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_watch, "LOCK_TIMEOUT_S", 0)
    with pytest.raises(ConnectionLost), InThread(configured(database, node)) as capture:  # noqa: PT012
        Log(node, database, capture).wait_for_snapshots("public.first")
        holder.execute(LOCK)
        database.execute(PUBLISH)
        wait_until(lambda: waits_for_a_lock(database), "the snapshot waits")
        query = "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s"
        database.execute(query, [f"slot_{database.name}"])
        wait_until(lambda: capture.failure is not None, "the generation ends")


def test_a_locked_table_is_read_when_it_is_free(
    holder: psycopg.Connection[Any], database: Database, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_watch, "LOCK_TIMEOUT_S", 0.3)
    warned: list[dict[str, Any]] = []
    monkeypatch.setattr(snapshot_watch.log, "warning", lambda event, **fields: warned.append(fields))
    with InThread(configured(database, node)) as capture:
        log = Log(node, database, capture)
        log.wait_for_snapshots("public.first")
        holder.execute(LOCK)
        database.execute(PUBLISH)
        wait_until(lambda: warned, "the warning")
        assert warned[0]["locked"] == f"own.second (pid {holder.info.backend_pid})"
        database.execute("insert into first values (2)")
        log.wait()
        holder.rollback()
        assert log.wait_for_snapshots("public.first", "own.second")["own.second"].rows == 2


def test_capture_starts_beside_a_locked_table(
    holder: psycopg.Connection[Any], database: Database, node: NodeProcess
) -> None:
    with InThread(configured(database, node)) as capture:
        Log(node, database, capture).wait_for_snapshots("public.first")
    holder.execute(LOCK)
    database.execute(PUBLISH)
    with InThread(configured(database, node)) as capture:
        database.execute("insert into first values (2)")
        Log(node, database, capture).wait()


def test_a_table_that_is_locked_before_it_is_read_fails_alone(
    database: Database, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_watch, "LOCK_TIMEOUT_S", 0.3)
    make_accounts(database, 100)
    database.execute("create table other (id int primary key); insert into other values (1)")
    database.execute("create publication walstream for table accounts, other")
    read = CopyReader.read
    with database.connect() as holder:

        def lock_first(self: CopyReader, statement: str, **where: Any) -> None:
            if "accounts" in statement and not is_locked:
                is_locked.append(True)
                holder.execute("begin; lock table accounts in access exclusive mode")
            read(self, statement, **where)

        is_locked: list[bool] = []
        monkeypatch.setattr(CopyReader, "read", lock_first)
        with InThread(configured(database, node)) as capture:
            log = Log(node, database, capture)
            log.wait_for_snapshots("public.other")
            assert is_locked
            holder.rollback()
            assert log.wait_for_snapshots("public.accounts")["public.accounts"].rows == 100


def test_capture_stops_while_its_slot_waits_for_a_transaction(
    holder: psycopg.Connection[Any], database: Database, node: NodeProcess
) -> None:
    holder.execute(LOCK)
    with InThread(configured(database, node)):
        query = "select 1 from pg_replication_slots where slot_name = %s"
        wait_until(lambda: database.execute(query, [f"slot_{database.name}"]), "the slot to be created")
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 10


def test_large_rows_do_not_gather_in_memory(database: Database, node: NodeProcess, tmp_path: Path) -> None:
    database.execute("create table large (id int primary key, body text)")
    database.execute("insert into large select n, repeat(md5(n::text), 32768) from generate_series(1, 300) n")
    database.execute("create publication walstream for table large")
    capture = InProcess(settings(database, node), tmp_path).start()
    log = Log(node, database, capture)
    snapshot = log.wait_for_snapshots("public.large")["public.large"]
    peak_kib = int(Path(f"/proc/{capture.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    capture.stop()
    assert snapshot.rows == 300
    assert peak_kib < 300 * 1024, "300 MiB of rows went through, not into, the capture"
