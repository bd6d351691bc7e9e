"""What the source does during the demonstration: a small bank with three tables.

Owns the tables, the transactions and the invariant that they keep, which no table shows by itself: the turnover of all
accounts is twice the sum of all transfers, because a transfer and the turnover of its two accounts change in one
transaction. Whoever sees one without the other sees a torn transaction.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Final

import psycopg
from psycopg import sql

from walstream.positions import Lsn

CUSTOMERS: Final = 2_000
ACCOUNTS: Final = 4_000
TRANSFERS: Final = 20_000
LARGE_VALUE_BYTES: Final = 1_000_000
LARGE_EVERY: Final = 25
"""Of so many changes of customers one writes a large value, the first one among them."""
PAUSE_S: Final = 0.02
"""Between transactions: a bank that leaves this machine time for everything else that the demonstration runs on it."""

TABLES: Final = ("public.accounts", "public.customers", "public.transfers")

_SCHEMA: Final = f"""
create table customers (id int primary key, name text not null, notes text, seen_at timestamptz);
create table accounts (id int primary key, customer_id int not null references customers,
    balance numeric(14,2) not null, turnover numeric(14,2) not null default 0);
create table transfers (id bigint primary key, source int not null references accounts,
    target int not null references accounts, amount numeric(12,2) not null, at timestamptz not null default now());
insert into customers select n, 'customer ' || n, null, now() from generate_series(1, {CUSTOMERS}) n;
insert into accounts select n, 1 + n % {CUSTOMERS}, 1000, 0 from generate_series(1, {ACCOUNTS}) n;
insert into transfers (id, source, target, amount)
    select n, 1 + n % {ACCOUNTS}, 1 + (n + 1) % {ACCOUNTS}, 1 from generate_series(1, {TRANSFERS}) n;
update accounts set turnover = moved.total from (
    select side, sum(amount) as total from (
        select source as side, amount from transfers union all select target, amount from transfers) sides group by side
) moved where id = side;
create publication walstream for table customers, accounts, transfers;
"""


class Workload:
    """Transactions in a thread, until told to stop."""

    def __init__(self, dsn: str) -> None:
        """Take where the source is."""
        self._dsn = dsn
        self._dice = random.Random(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="workload", daemon=True)
        self._next_id = TRANSFERS + 1
        self._has_note = threading.Event()
        self._customers_changed = 0
        self._with_notes: list[int] = []
        self.committed = 0
        self.rolled_back = 0
        self.failure: Exception | None = None

    def prepare(self) -> None:
        """Create the tables and their first rows."""
        with psycopg.connect(self._dsn, autocommit=True) as session:
            session.execute(_SCHEMA)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add_column(self) -> None:
        """Give the transfers another column, and the next of them a value in it."""
        with psycopg.connect(self._dsn, autocommit=True) as session:
            session.execute("alter table transfers add column note text")
        self._has_note.set()

    def stop(self) -> Lsn:
        """End with one transaction more, and return an LSN before which all others are. Raises what it failed with."""
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        with psycopg.connect(self._dsn, autocommit=True) as session:
            found = session.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert found is not None
            session.execute("update customers set seen_at = clock_timestamp() where id = 1")
        self.committed += 1
        return Lsn.parse(found[0])

    def _run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as session:
                while not self._stop.is_set():
                    self._transaction(session)
                    time.sleep(PAUSE_S)
        except psycopg.Error as error:
            self.failure = error

    def _transaction(self, session: psycopg.Connection[Any]) -> None:
        is_undone = self._dice.random() < 0.1
        with session.transaction(force_rollback=is_undone):
            for _ in range(self._dice.choice((1, 1, 1, 5, 20))):
                self._transfer(session)
            if self._dice.random() < 0.2:
                self._customer(session)
        if is_undone:
            self.rolled_back += 1
        else:
            self.committed += 1

    def _transfer(self, session: psycopg.Connection[Any]) -> None:
        source, target = self._dice.sample(range(1, ACCOUNTS + 1), 2)
        amount = self._dice.randint(1, 10_000) / 100
        values: dict[str, object] = {"id": self._next_id, "source": source, "target": target, "amount": amount}
        if self._has_note.is_set():
            values["note"] = f"note {self._next_id}"
        insert = sql.SQL("insert into transfers ({}, at) values ({}, clock_timestamp())").format(
            sql.SQL(", ").join(map(sql.Identifier, values)), sql.SQL(", ").join(map(sql.Placeholder, values))
        )
        session.execute(insert, values)
        move = "update accounts set balance = balance + %s::numeric, turnover = turnover + %s::numeric where id = %s"
        session.execute(move, [-amount, amount, source])
        session.execute(move, [amount, amount, target])
        self._next_id += 1
        if self._dice.random() < 0.05:
            self._reverse(session)

    def _reverse(self, session: psycopg.Connection[Any]) -> None:
        """Delete a transfer as if it had never been."""
        found = session.execute(
            "delete from transfers where id = %s returning source, target, amount",
            [self._dice.randint(1, self._next_id - 1)],
        ).fetchone()
        if found is not None:
            source, target, amount = found
            undo = "update accounts set balance = balance + %s, turnover = turnover - %s where id = %s"
            session.execute(undo, [amount, amount, source])
            session.execute(undo, [-amount, amount, target])

    def _customer(self, session: psycopg.Connection[Any]) -> None:
        """Write a value that PostgreSQL stores aside, or touch the row around one, which leaves it unsent."""
        customer = self._dice.randint(1, CUSTOMERS)
        if self._customers_changed % LARGE_EVERY == 0:
            # Random text: a value that compresses well would be stored inside its row.
            notes = self._dice.randbytes(LARGE_VALUE_BYTES // 2).hex()
            session.execute("update customers set notes = %s where id = %s", [notes, customer])
            self._with_notes.append(customer)
        else:
            chosen = self._dice.choice(self._with_notes) if self._dice.random() < 0.5 else customer
            session.execute("update customers set seen_at = clock_timestamp() where id = %s", [chosen])
        self._customers_changed += 1
