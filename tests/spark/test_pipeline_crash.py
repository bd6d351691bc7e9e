"""SIGKILL of the driver and its JVM at chosen moments, again and again: no duplicate, no loss, every cut is true.

Transfers move amounts between two tables and note each in a third, which is kept in append mode, where a change that is
applied twice cannot hide. At every cut the sum of the two is what it was, and the notes add up to what has moved.
The moments are chosen by watching the tables' own logs: while a batch is read and folded, after the commit of one table
and before that of the next, after the last table and before the cut; and at random.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.capturing import settings as capture_settings
from integration.capturing import wait_until
from integration.support import rounds, seeded
from spark.conftest import Captured, MakeCaptured
from spark.pipeline_process import PipelineProcess
from spark.piping import listed
from walstream.positions import Lsn
from walstream.spark import read_at
from walstream.spark.cuts import Cuts
from walstream.spark.warehouse import checkpoint_path, cuts_path, table_path

TABLES = ("public.here", "public.there", "public.notes")
WHOLE = 20 * 1_000
MOMENT_S_MAX = 180.0

SCHEMA = """
create table here (id int primary key, amount bigint not null);
create table there (id int primary key, amount bigint not null, body text);
create table notes (id bigint primary key, moved bigint not null);
insert into here select n, 1000 from generate_series(1, 20) n;
insert into there select n, 0, 'none' from generate_series(1, 20) n;
"""


class Transfers:
    """A session that moves amounts until it is told to stop."""

    def __init__(self, captured: Captured, dice: random.Random) -> None:
        self._captured = captured
        self._dice = dice
        self._over = threading.Event()
        self.count = 0
        self.failures: list[Exception] = []

    def _one(self, session: Any) -> None:
        dice, moved = self._dice, self._dice.randrange(-30, 31)
        with session.transaction(force_rollback=dice.random() < 0.1):
            for _ in range(dice.choice([1, 1, 1, 10])):
                self.count += 1
                session.execute("update here set amount = amount - %s where id = %s", [moved, dice.randrange(2, 21)])
                session.execute(
                    "update there set amount = amount + %s, body = %s where id = %s",
                    [moved, f"transfer {self.count}", dice.randrange(1, 21)],
                )
                session.execute("insert into notes values (%s, %s)", [self.count, moved])
            if dice.random() < 0.2:
                # A row that comes and goes, and one that changes its key.
                session.execute("insert into there values (99, 0, 'guest') on conflict do nothing")
                session.execute("delete from there where id = 99")
                session.execute("update here set id = 120 - id where id in (1, 119)")

    @contextmanager
    def going(self) -> Iterator[None]:
        def run() -> None:
            try:
                with self._captured.database.connect() as session:
                    while not self._over.is_set():
                        self._one(session)
                        time.sleep(0.05)
            except Exception as error:
                self.failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
        assert not self.failures, self.failures


def commits(path: str) -> int:
    """How many versions a table has, by looking at its folder."""
    return sum(1 for file in Path(path, "_delta_log").glob("*.json") if file.stem.isdigit())


Seen = tuple[int, ...]
"""How many commits each table and the cuts have."""


class Moments:
    """When to kill: told by what lies in the warehouse. Each one returns what tells, after the kill, if it was met."""

    def __init__(self, warehouse: str, dice: random.Random) -> None:
        self._tables = [table_path(warehouse, name) for name in TABLES]
        self._cuts = cuts_path(warehouse)
        self._offsets = Path(checkpoint_path(warehouse), "offsets")
        self._dice = dice

    def _seen(self) -> Seen:
        return tuple(map(commits, (*self._tables, self._cuts)))

    def _batches(self) -> int:
        return sum(1 for file in self._offsets.glob("[0-9]*"))

    def _watch(self, is_now: Callable[[Seen, Seen], bool], check: Callable[[], None]) -> Callable[[], bool]:
        """Wait for a change against how things stood when the last cut was written; return what asks again."""
        before = self._seen()
        deadline = time.monotonic() + MOMENT_S_MAX
        while True:
            seen = self._seen()
            if seen[-1] > before[-1]:
                before = seen
            elif is_now(before, seen):
                break
            assert time.monotonic() < deadline, "the moment does not come"
            check()
            time.sleep(0.001)

        def is_still() -> bool:
            later = self._seen()
            return later[-1] == before[-1] and is_now(before, later)

        return is_still

    def folding(self, check: Callable[[], None]) -> Callable[[], bool]:
        """While a batch is read and folded: it was planned, and nothing of it is written."""
        batches, deadline = self._batches(), time.monotonic() + MOMENT_S_MAX
        while self._batches() == batches:
            assert time.monotonic() < deadline, "no batch is planned"
            check()
            time.sleep(0.005)
        seen = self._seen()
        time.sleep(self._dice.uniform(0.0, 1.0))
        return lambda: self._seen() == seen

    def between_tables(self, check: Callable[[], None]) -> Callable[[], bool]:
        """One table has its commit, another has not."""
        return self._watch(lambda old, new: 0 < sum(a < b for a, b in zip(old[:-1], new[:-1], strict=True)) < 3, check)

    def before_the_cut(self, check: Callable[[], None]) -> Callable[[], bool]:
        """All tables have theirs, the cut is not written."""
        return self._watch(lambda old, new: all(a < b for a, b in zip(old[:-1], new[:-1], strict=True)), check)

    def any(self, check: Callable[[], None]) -> Callable[[], bool]:
        """Whenever."""
        deadline = time.monotonic() + self._dice.uniform(0.0, 6.0)
        while time.monotonic() < deadline:
            check()
            time.sleep(0.01)
        return lambda: True


def check_cuts(captured: Captured, warehouse: str) -> int:
    """Compare the tables of every cut with each other; return how many cuts have all three."""
    whole = [row for row in Cuts(warehouse).all() if set(TABLES) <= row.versions.keys()]
    for row in whole:
        here, there = (listed(warehouse, row, name, "id", "amount") for name in TABLES[:2])
        notes = listed(warehouse, row, TABLES[2], "id", "moved", "_commit_lsn", "_seq")
        held = sum(one["amount"] for one in there)
        assert sum(one["amount"] for one in here) + held == WHOLE, f"at {row.end_lsn}"
        assert sum(one["moved"] for one in notes) == held, f"at {row.end_lsn}"
        for rows in (here, there, notes):
            assert len({one["id"] for one in rows}) == len(rows), f"a row is there twice at {row.end_lsn}"
        assert len({(one["_commit_lsn"], one["_seq"]) for one in notes}) == len(notes), f"twice at {row.end_lsn}"
    # And as users read them.
    for row in whole[-3:]:
        cut = read_at(captured.spark, row.end_lsn, warehouse=warehouse)
        assert cut.lsn == row.end_lsn
        here, there = (cut.tables[name].agg({"amount": "sum"}).first()[0] for name in TABLES[:2])
        assert here + there == WHOLE, f"at {cut.lsn}"
    return len(whole)


@pytest.mark.timeout(1800)
def test_nothing_is_lost_or_doubled_under_sigkill(make_captured: MakeCaptured, tmp_path: Path) -> None:
    _, dice = seeded()
    warehouse = str(tmp_path / "warehouse")
    captured = make_captured(SCHEMA)
    captured.wait_for_snapshots(*TABLES)
    process = PipelineProcess(
        tmp_path,
        {
            **capture_settings(captured.database, captured.node),
            "pipeline.warehouse": warehouse,
            "pipeline.trigger_interval_ms": 100,
        },
        {"public.notes": {"mode": "append"}},
    )
    moments = Moments(warehouse, dice)
    kinds = [moments.between_tables, moments.before_the_cut, moments.folding, moments.any]
    transfers = Transfers(captured, dice)
    met: dict[str, list[bool]] = {}
    with process.shown(), transfers.going():
        for number in range(rounds(full=10, part=2)):
            kind = kinds[number % len(kinds)]
            process.start()
            # Where it stands when Spark is up, or in the middle of the first snapshot, which is a moment like others.
            wait_until(lambda: "stream started" in process.log_text() or not process.is_running, "Spark", 240)
            process.check()
            is_met = kind(process.check)
            process.kill()
            met.setdefault(kind.__name__, []).append(is_met())
            when = "in time" if met[kind.__name__][-1] else "too late"
            print(f"round {number}: SIGKILL {kind.__name__}, {when}, after {transfers.count} transfers")
            process.log.unlink()
    # A kill may come too late by a few milliseconds, but not every time.
    for name in ("between_tables", "before_the_cut"):
        assert any(met.get(name, [])) or len(met.get(name, [])) < 2, met
    captured.wait()
    end = Lsn.parse(captured.execute("select pg_current_wal_flush_lsn()::text")[0][0])
    with process.shown():
        assert process.once(timeout_s=500) == 0, process.log_tail()
    last = Cuts(warehouse).last()
    assert last is not None
    assert last.versions.keys() == set(TABLES)
    tables = read_at(captured.spark, max(end, last.end_lsn), warehouse=warehouse).tables
    for name, columns in zip(TABLES, ("id, amount", "id, amount, body", "id, moved"), strict=True):
        found = sorted(tuple(row) for row in tables[name].selectExpr(*columns.split(", ")).collect())
        assert found == sorted(captured.execute(f"select {columns} from {name}"))
    assert check_cuts(captured, warehouse) > 0
