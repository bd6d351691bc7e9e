"""From the folded rows of a batch to a stage in the replica, written by Spark's executors.

Owns the way of the rows; refuses to know what is merged from the stage. Nothing passes through the driver: every task
has a connection of its own and one COPY, which is one transaction. A task that Spark runs again writes again, so each
row tells which attempt wrote it; only those that came to their end in Spark's eyes count, and the others are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from walstream.errors import RowsMissing, TableUnfit
from walstream.postgres.session import connect, named
from walstream.spark.columns import col
from walstream.spark.replica.sql import Shape, copy_into
from walstream.spark.replica.target import ResolvedType
from walstream.spark.replica.values import ColumnText, lines
from walstream.spark.types import ColumnType, TableVersion, Wire

Connection = psycopg.Connection[Any]

APPLICATION_NAME: Final = "walstream replica"

_RESULT: Final = "attempt long, rows long, unsent array<int>"

_REFUSED: Final = (psycopg.errors.DataError, psycopg.errors.IntegrityError, psycopg.errors.ProgrammingError)
"""What the replica says of rows, or of a table, that will not do: no other try changes it."""
_GONE: Final = psycopg.errors.UndefinedTable
"""Of a stage alone: another pipeline, which begins, has removed it."""


class Staged(NamedTuple):
    """A batch of one table, in its stage."""

    stage: str
    rows: int
    unsent: frozenset[int]
    """Numbers of the columns that some row lacks."""
    attempts: tuple[int, ...]


def strings_of(version: TableVersion) -> tuple[str, ...]:
    """Return the columns that are read as strings: all but those whose typed value has one text that is exact."""
    return tuple(column.name for column in version.columns if column.is_array or column.wire in _TEXTS)


_TEXTS: Final = (Wire.TEXT, Wire.BYTES)


def texts_of(columns: Sequence[ColumnType], types: Mapping[str, ResolvedType]) -> dict[int, ColumnText]:
    """Return how values of columns become PostgreSQL's text, where that is not what they are."""
    found = {
        number: ColumnText(column.wire is Wire.BYTES, column.is_array, types[column.type_name].delimiter)
        for number, column in enumerate(columns)
    }
    return {number: text for number, text in found.items() if not text.is_text_already}


def stage_rows(
    folded: DataFrame, dsn: str, stage: str, shape: Shape, texts: Mapping[int, ColumnText], *, is_folded: bool = True
) -> Staged:
    """Write rows, as the fold gives them, into a stage that is there; `is_folded`: they tell what was not sent."""
    names = [column.name for column in shape.columns]
    rows = [col(name).cast("string").alias(f"c{number}") for number, name in enumerate(names)]
    keys = [_moved_key(name).alias(f"k{number}") for number, name in enumerate(shape.key)]
    unsent = _numbers(names) if is_folded else f.lit("{}")
    chosen = folded.select(*rows, *keys, f.col("_op").alias("op"), unsent.alias("unsent"))
    # A key that has moved is written as its column is.
    of_keys = {len(names) + at: texts[number] for at, number in enumerate(shape.key_numbers) if number in texts}
    write = _Write(dsn, stage, {**texts, **of_keys}, str(shape.name))
    found = chosen.mapInArrow(write, _RESULT).collect()
    return Staged(
        stage,
        sum(row["rows"] for row in found),
        frozenset(number for row in found for number in row["unsent"]),
        tuple(row["attempt"] for row in found),
    )


def settle(connection: Connection, staged: Staged) -> None:
    """Leave in the stage what the attempts that counted have written. Raises RowsMissing."""
    with named("counting what was staged"):
        count = _count(connection, staged.stage)
        if count > staged.rows:
            connection.execute(f"DELETE FROM {staged.stage} WHERE attempt <> ALL(%s)".encode(), [list(staged.attempts)])
            count = _count(connection, staged.stage)
        connection.execute(f"ANALYZE {staged.stage}".encode())
    if count != staged.rows:
        raise RowsMissing(f"The stage {staged.stage} holds {count:,} rows of the {staged.rows:,} that were written.")


def refused(table: object, error: psycopg.Error) -> TableUnfit:
    """Return the error for a table of the replica that does not take what the source has."""
    said = " ".join(str(error).split())
    return TableUnfit(
        f"The replica's table {table} does not take the source's rows: {said.rstrip('.')}.",
        "Mend the table at the replica and start the pipeline again; it goes on where this table stopped.",
    )


def is_refusal(error: BaseException) -> bool:
    """Whether an error of the replica is the matter of one table."""
    return isinstance(error, _REFUSED) and not isinstance(error, _GONE)


def _count(connection: Connection, stage: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {stage}".encode()).fetchone()
    assert row is not None, "the query has one row"
    return int(row[0])


def _moved_key(name: str) -> Column:
    return f.col("_from").getField(name).cast("string")


def _numbers(names: Sequence[str]) -> Column:
    """Return the columns that were not sent, by number, as PostgreSQL's text of an array."""
    known = f.array(*(f.lit(name) for name in names))
    numbers = f.transform("_unsent", lambda name: (f.array_position(known, name) - 1).cast("string"))
    return f.concat(f.lit("{"), f.coalesce(f.array_join(numbers, ","), f.lit("")), f.lit("}"))


class _Write:
    """Writes the rows of one task. Goes to executors as it is."""

    def __init__(self, dsn: str, stage: str, texts: Mapping[int, ColumnText], table: str) -> None:
        self._dsn = dsn
        self._stage = stage
        self._texts = texts
        self._table = table

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None, "a task has a context"
        attempt, count = context.taskAttemptId(), 0
        unsent: set[int] = set()
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return
        with connect(self._dsn, application_name=APPLICATION_NAME) as connection, named(f"staging {self._table}"):
            try:
                with connection.cursor().copy(copy_into(self._stage).encode()) as copy:
                    for batch in _all(first, filled):
                        attempts = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
                        copy.write(lines(batch, self._texts, [attempts]))
                        count += batch.num_rows
                        unsent |= _unsent_in(batch)
            except psycopg.Error as error:
                if is_refusal(error):
                    raise refused(self._table, error) from None
                raise
        yield pa.RecordBatch.from_pydict(
            {
                "attempt": pa.array([attempt], pa.int64()),
                "rows": pa.array([count], pa.int64()),
                "unsent": pa.array([sorted(unsent)], pa.list_(pa.int32())),
            }
        )


def _all(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others


def _unsent_in(batch: pa.RecordBatch) -> set[int]:
    """Return the numbers of columns that some row of a batch lacks."""
    different = pc.unique(batch.column("unsent")).to_pylist()
    return {int(number) for text in different for number in text.strip("{}").split(",") if number}
