"""A PostgreSQL that follows the source: the pipeline's tables as tables of a replica, a micro-batch as one transaction.

Owns the way of a batch into the replica; refuses to know points and epochs (batches.py), how a table is read and folded
(staging.py) and how it is merged (merging.py). Invariants: whoever reads the replica sees the source as it was at one
LSN, all tables of it; what a batch changes and how far it has come are one transaction, so a batch that comes again is
recognised by the replica itself, whatever was lost in between.

    stage     per table, in parallel: the executors read, fold and COPY into a table without a log of its own
    merge     one transaction: schema, rows and position of every table, then the position of the whole

A table that does not take what the source has is stopped, and the others go on; the transaction then holds everything
but that table. A table that is missing is made with nothing but its key; for a migration make them first, with
pg_dump --schema-only, and they keep their indexes, defaults and constraints: triggers and foreign keys do not run here,
because they ran at the source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import psycopg
from pyspark.sql import SparkSession

from walstream.config import ReplicaConfig
from walstream.errors import SchemaIncompatible, TableUnfit
from walstream.positions import ZERO, Lsn
from walstream.postgres import address
from walstream.postgres.session import connect, named
from walstream.spark.attempting import Attempts
from walstream.spark.batches import CutRow, Outcome, Step
from walstream.spark.destination import Reader, Work
from walstream.spark.kept_tables import KeptTable
from walstream.spark.progress import Progress
from walstream.spark.replica import merging, sql
from walstream.spark.replica.sql import TableName, quoted
from walstream.spark.replica.stages import APPLICATION_NAME, is_refusal, refused
from walstream.spark.replica.staging import Part, Staging, name_of
from walstream.spark.replica.state import NOTHING, Position, ReplicaState, TableState, as_cut
from walstream.spark.replica.target import MUTE, can_mute

CATCHING_UP: Final = "It is behind the others: what it lacks is being read again."

Connection = psycopg.Connection[Any]
Describe = Callable[[str], KeptTable]


class _Begun(NamedTuple):
    """A table's part, or why there is none, and when its work began."""

    part: Part | None
    failure: str
    began_s: float


class ReplicaTables:
    """The tables of a replica: a destination of the pipeline."""

    def __init__(
        self,
        spark: SparkSession,
        dsn: str,
        control_schema: str,
        prefix: str,
        reader: Reader,
        describe: Describe,
        progress: Progress,
        *,
        parallel: int,
    ) -> None:
        """Take where the replica is, what reads, and what tells how a table is now. Connects."""
        self._attempts = Attempts(spark, describe, progress)
        self._control_schema = control_schema
        self._progress = progress
        self._staging = Staging(dsn, control_schema, prefix, reader)
        self._state = ReplicaState(control_schema, prefix)
        self._connection = connect(dsn, application_name=APPLICATION_NAME)
        self._state.prepare(self._connection)
        self._is_muted = can_mute(self._connection)
        self._drop_stages()
        self._position = self._state.position(self._connection)
        self._tables = self._state.tables(self._connection)
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="walstream-table")

    @property
    def name(self) -> str:
        """For messages."""
        return "the replica"

    def last_cut(self) -> CutRow | None:
        """Return what the replica is at, as if it were a recorded cut."""
        return as_cut(self._position, self._tables.values())

    def applied(self, table: str, source_epoch: int) -> Lsn | None:
        """Return what a table has applied of a source epoch; None: nothing."""
        found = self._known(table)
        return found.end_lsn if found is not None and found.source_epoch == source_epoch else None

    def version(self, table: str) -> int | None:
        """Return the point that a table was written at last."""
        found = self._known(table)
        return found.point if found is not None else None

    def write(self, works: Mapping[str, Work], batch_id: int) -> dict[str, Outcome]:
        """Write the tables of a step as one transaction. Raises what is not the matter of one table."""
        if not works:
            return {}
        futures = {name: self._pool.submit(self._stage, work, batch_id) for name, work in works.items()}
        begun: dict[str, _Begun] = {}
        failure: BaseException | None = None
        for name, future in futures.items():
            try:
                begun[name] = future.result()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        outcomes = self._merge(next(iter(works.values())).step, begun)
        self._drop_stages()
        return outcomes

    def record(self, row: CutRow) -> None:
        """Move the replica's position over a step that changed no table."""
        to = Position(row.point, row.source_epoch, row.end_lsn, row.commit_time_us)
        if self._position is not None and self._position >= to:
            return
        with self._connection.transaction():
            self._state.expect(self._connection, self._position)
            self._state.move(self._connection, to)
        self._position = to

    def close(self) -> None:
        """Wait for what is being staged, and let go of the replica."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._connection.close()

    def _stage(self, work: Work, batch_id: int) -> _Begun:
        name, began_s = work.one.table, self._progress.begin()
        part, failure = self._attempts.attempt(
            work, batch_id, lambda work, table: self._staging.part(work, table, self._known(name))
        )
        return _Begun(part, failure, began_s)

    def _known(self, name: str) -> TableState | None:
        """Return where a table stands that was ever written."""
        found = self._tables.get(name_of(name))
        return found if found is not None and found.is_written else None

    def _merge(self, step: Step, begun: Mapping[str, _Begun]) -> dict[str, Outcome]:
        """Apply what was staged, move the positions, commit."""
        to = Position(step.upto, step.source_epoch, step.end_lsn, step.commit_time_us)
        is_behind = self._position is not None and self._position > to
        outcomes: dict[str, Outcome] = {}
        states: dict[TableName, TableState] = {}
        connection = self._connection
        with named("writing a batch"), connection.transaction():
            self._state.expect(connection, self._position)
            if self._is_muted:
                connection.execute(MUTE)
            for name, one in begun.items():
                failure = one.failure if one.part is None else self._apply(connection, name, one.part)
                outcomes[name] = Outcome(None if failure else step.upto, failure)
                state = self._state_of(step, name, one.part, failure)
                # Only at the position of the whole may a table count as one of it.
                state = state._replace(stopped=CATCHING_UP) if is_behind and not failure else state
                self._state.put(connection, state)
                states[state.name] = state
            if not is_behind:
                self._state.move(connection, to)
        self._tables |= states
        self._position = self._position if is_behind else to
        for name, one in begun.items():
            if one.part is not None and not outcomes[name].failure:
                self._progress.wrote(
                    name,
                    began_s=one.began_s,
                    rows=one.part.rows_in,
                    commit_time_us=step.commit_time_us,
                    version=step.upto,
                )
        return outcomes

    def _apply(self, connection: Connection, name: str, part: Part) -> str:
        """Apply a table's part; return why it failed, if it did for a reason of its own."""
        known = self._known(name)
        try:
            with connection.transaction():
                merging.apply(connection, part, known.version if known else None, is_muted=self._is_muted)
        except (TableUnfit, SchemaIncompatible) as error:
            return self._attempts.stopped(name, error)
        except psycopg.Error as error:
            if not is_refusal(error):
                raise
            return self._attempts.stopped(name, refused(name, error))
        return ""

    def _state_of(self, step: Step, name: str, part: Part | None, failure: str) -> TableState:
        """Return where a table stands after the batch."""
        known = self._known(name)
        if failure or part is None:
            known = known or TableState(name_of(name), step.source_epoch, ZERO, step.upto, "", NOTHING)
            return known._replace(stopped=failure)
        snapshot = part.work.one.snapshot
        built_from = snapshot.id if snapshot is not None else known.snapshot if known is not None else ""
        return TableState(part.name, step.source_epoch, step.end_lsn, step.upto, built_from, part.version)

    def _drop_stages(self) -> None:
        """Remove this prefix's stages: of the batch that is over, or of a pipeline that was killed."""
        with named("removing stages"):
            found = self._connection.execute(
                "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
                " WHERE n.nspname = %s AND starts_with(c.relname, %s) AND c.relkind = 'r'",
                [self._control_schema, self._staging.stages],
            ).fetchall()
            if found:
                stages = [f"{quoted(self._control_schema)}.{quoted(name)}" for (name,) in found]
                self._connection.execute(sql.drop_stages(stages).encode())


def open_replica(
    spark: SparkSession,
    config: ReplicaConfig,
    prefix: str,
    reader: Reader,
    describe: Describe,
    progress: Progress,
    *,
    parallel: int,
) -> ReplicaTables:
    """Connect to the replica of a configuration. Raises UnreachableError, RefusedError, ConfigError."""
    dsn = address.dsn(config)
    return ReplicaTables(spark, dsn, config.control_schema, prefix, reader, describe, progress, parallel=parallel)
