"""What the bank of the demonstration does, against a real PostgreSQL: everything that it is said to do, and soon."""

from __future__ import annotations

import time

from postgres.servers import Database
from waiting import wait_until
from walstream.demo.workload import LARGE_VALUE_BYTES, TRANSFERS, Workload


def test_every_kind_of_change_comes_soon_and_the_books_balance(database: Database) -> None:
    workload = Workload(database.dsn)
    workload.prepare()
    workload.start()
    wait_until(lambda: workload.committed + workload.rolled_back >= 120, "some transactions")
    workload.add_column()
    time.sleep(0.5)
    workload.stop()
    assert workload.rolled_back > 0
    ((kept, added, noted),) = database.execute(
        f"select count(*) filter (where id <= {TRANSFERS}), count(*) filter (where id > {TRANSFERS}), count(note)"
        " from transfers"
    )
    assert kept < TRANSFERS, "transfers are deleted"
    assert 0 < noted < added, "and have a column more from some moment on"
    ((large, stored),) = database.execute(
        "select max(length(notes)), pg_table_size('customers'::regclass) from customers"
    )
    assert large == LARGE_VALUE_BYTES < stored, "a value that does not fit into its row"
    ((touched,),) = database.execute(
        "select count(*) from customers where notes is not null and seen_at > (select min(seen_at) from customers)"
    )
    assert touched > 0, "the row around a large value is changed, which leaves that unsent"
    ((torn,),) = database.execute(
        "select (select sum(turnover) from accounts) - 2 * (select sum(amount) from transfers)"
    )
    assert torn == 0
