"""A replica that follows a captured database, batch by batch, as the pipeline's query would drive it."""

from __future__ import annotations

import time
from typing import Any

from integration.capturing import TIMEOUT_S
from postgres.servers import Database
from spark.conftest import Captured
from walstream.spark.destination import Reader
from walstream.spark.fetching import Address
from walstream.spark.kept_tables import KeptTables
from walstream.spark.options import parse_table
from walstream.spark.pipeline import Pipeline
from walstream.spark.progress import Progress
from walstream.spark.replica.tables import ReplicaTables
from walstream.spark.rereading import Points


class Following:
    """What a process of the pipeline has: thrown away and made anew, it goes on where the replica is."""

    def __init__(self, captured: Captured, replica: Database) -> None:
        self.captured = captured
        self.replica = replica
        address = Address(captured.node.address, {})
        kept = KeptTables(address, captured.prefix, captured.config.pipeline, captured.config.streams)
        kept.refresh()
        self.progress = Progress()
        self.tables = ReplicaTables(
            captured.spark,
            replica.dsn,
            "walstream",
            captured.prefix,
            Reader(captured.spark, captured.options),
            kept.table,
            self.progress,
            parallel=2,
        )
        points = Points(address, captured.prefix, kept.name_of)
        self.pipeline = Pipeline(self.tables, kept, points, self.progress, has_snapshots=True)
        self._done = -1

    def catch_up(self, after: int | None = None) -> int:
        """Write everything that is in the log, as one batch, and return the offset of its last point.

        `after` begins again where that batch did, as a query does that has lost what it knew.
        """
        self.captured.wait()
        frame = self.captured.read(after=self._done if after is None else after)
        offsets = [row["offset"] for row in frame.select("offset").collect()]
        if offsets:
            self.pipeline.batch(self.captured.read(after=offsets[0] - 1, upto=offsets[-1]), 1)
            self._done = offsets[-1]
        return self._done

    def settle(self, *tables: str) -> None:
        """Write until these tables are in the replica: their snapshots finished, and passed by the stream."""
        snapshots = [".".join(parse_table(table)) for table in tables]
        self.captured.wait_for_snapshots(*snapshots)
        deadline = time.monotonic() + TIMEOUT_S
        while (cut := self.tables.last_cut()) is None or not set(tables) <= set(cut.versions):
            assert time.monotonic() < deadline, f"{tables} are still not in the replica"
            # A snapshot may be ahead of the stream: something has to commit for its LSN to be passed.
            self.captured.execute("select pg_logical_emit_message(true, 'walstream.heartbeat', '')")
            self.catch_up()

    def close(self) -> None:
        self.tables.close()


def same(captured: Captured, replica: Database, *tables: str) -> None:
    """See that both have the same rows, compared by PostgreSQL's own text of them."""
    for table in tables:
        query = f"select t::text from {table} t order by 1"
        assert rows(captured.database, query) == rows(replica, query), table


def rows(database: Database, query: str) -> list[Any]:
    return [row[0] for row in database.execute(query)]
