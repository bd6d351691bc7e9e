"""`walstream pipeline run` into a replica, killed with SIGKILL at chosen moments and started again.

The moments: when a batch is being staged, when its transaction is under way, when it has just committed and Spark's
checkpoint does not know it yet, and after a while. However it was, the replica ends as the source is, at every moment
in between its readers see whole transactions, and no stage is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.capturing import settings as capture_settings
from postgres.servers import Database, fresh
from spark.conftest import Captured, MakeCaptured
from spark.pipeline_process import TIMEOUT_S, PipelineProcess
from spark.replica.following import Following, rows, same
from walstream.postgres.embedded import EmbeddedPostgres

TABLES = """
create table accounts (id int primary key, balance bigint not null, doc text);
create table moves (id bigserial primary key, account int, amount bigint not null);
alter table accounts alter column doc set storage external;
insert into accounts select i, 100, repeat(md5(i::text), 200) from generate_series(1, 200) i;
"""
INVARIANT = "select (select sum(balance) from accounts) - (select coalesce(sum(amount), 0) from moves)"

STAGES = "select count(*) from pg_class where relname like 'stage\\_%'"
MERGING = """
    select count(*) from pg_stat_activity where datname = current_database()
    and application_name = 'walstream replica' and xact_start is not null and query not ilike 'copy%'
"""


@pytest.fixture
def replica(postgres16: EmbeddedPostgres) -> Iterator[Database]:
    with fresh(postgres16) as database:
        yield database


def work(captured: Captured) -> None:
    """Move amounts: keys change, rows come and go, large values are not sent again."""
    captured.execute(
        """
        begin;
        with paid as (update accounts set balance = balance + 1 returning id)
        insert into moves (account, amount) select id, 1 from paid;
        update accounts set id = id + 100000 where id % 7 = 0;
        with gone as (delete from accounts where id % 31 = 0 returning id, balance)
        insert into moves (account, amount) select id, -balance from gone;
        insert into accounts values ((select max(id) + 1 from accounts), 0, repeat('new', 2000));
        commit
        """
    )


def position(replica: Database) -> Any:
    return replica.execute("select end_lsn, point from walstream.position")


def staging(replica: Database) -> Callable[[], bool]:
    return lambda: rows(replica, STAGES) != [0]


def merging(replica: Database) -> Callable[[], bool]:
    return lambda: rows(replica, MERGING) != [0]


def moved(replica: Database) -> Callable[[], bool]:
    before = position(replica)
    return lambda: position(replica) != before


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_at_chosen_moments(make_captured: MakeCaptured, replica: Database, tmp_path: Path) -> None:
    captured = make_captured(TABLES)
    following = Following(captured, replica)
    following.settle("public.accounts", "public.moves")
    following.close()
    pipeline = PipelineProcess(
        tmp_path,
        {
            **capture_settings(captured.database, captured.node),
            "pipeline.destination": "postgres",
            "pipeline.checkpoint": str(tmp_path / "checkpoint"),
            "pipeline.trigger_interval_ms": 100,
            "pipeline.replica.host": "127.0.0.1",
            "pipeline.replica.port": replica.server.port,
            "pipeline.replica.database": replica.name,
        },
    )
    with pipeline.shown():
        for moment in (staging, merging, moved):
            condition = moment(replica)
            work(captured)
            pipeline.start()
            deadline = time.monotonic() + TIMEOUT_S
            worked_s = time.monotonic()
            while not condition():
                assert time.monotonic() < deadline, moment.__name__
                pipeline.check()
                if time.monotonic() - worked_s > 1:
                    work(captured)
                    worked_s = time.monotonic()
            pipeline.kill()
            assert rows(replica, INVARIANT) == [20_000], moment.__name__
    # Who takes over knows nothing of the checkpoint: the replica knows by itself where it is.
    again = Following(captured, replica)
    again.catch_up(after=-1)
    again.close()
    same(captured, replica, "accounts", "moves")
    assert rows(replica, STAGES) == [0]
