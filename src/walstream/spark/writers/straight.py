"""Changes straight from the log into files: a task reads a range of the log, decodes it and writes what it has decoded.

Owns that job and what its tasks tell; refuses to know commits. Rows that need no fold and no merge have no use for
Spark's rows in between: what a task has in Arrow's columns it writes as Parquet, where it is, and Spark is told the
name of a file. Measured for rows of ten columns: the JVM spends 1 to 2 µs on each so, and 9 to 12 on its way through
Spark's rows; Python spends 8.

Invariants. What a task has written belongs to nobody until the driver takes it by the name that the task tells; a task
that runs twice writes two files, of which one is told. Where only new rows are wanted and a task meets any other, it
stops: nothing of the job is taken then. Memory: one chunk of the log and one row group for each task.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import __version__ as spark_version
from pyspark.sql.pandas.types import to_arrow_schema

from walstream.spark.changes import LogRead
from walstream.spark.fetching import Address
from walstream.spark.options import Options
from walstream.spark.planning import TableTask
from walstream.spark.source import address_of, changes

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql.types import StructType

ROW_GROUP_BYTES: Final = 16 << 20
FIRST_ROWS: Final = 1_000
"""Looked at before more is fetched: a batch that is not of new rows alone mostly shows it there."""

CODECS: Final[Mapping[str, str]] = {
    "snappy": "snappy",
    "zstd": "zstd",
    "gzip": "gzip",
    "lz4_raw": "lz4",
    "none": "none",
    "uncompressed": "none",
}
"""Compressions of Parquet by Spark's names, as Arrow calls them."""

# Spark takes days before 1582 in files of an unknown writer for those of another calendar.
_WRITER: Final = {"org.apache.spark.version": spark_version}


class Wanted(NamedTuple):
    """Which of the changes become rows, and how they are written."""

    folder: str
    """On a disk that every executor and the driver have."""
    schema: StructType
    codec: str
    source_epoch: int
    from_lsn: int
    """What committed before is there already."""
    key: str | None = None
    """A column of whole numbers, to be told whether it grows from row to row."""
    is_new_only: bool = False
    """Whether anything but an insert ends the task."""


class Part(NamedTuple):
    """What a task has done."""

    name: str | None
    """Of its file; None: no row was due."""
    rows_in: int
    """Changes that were read."""
    rows: int
    """Rows that were written."""
    is_new: bool
    """False: it has met a change that is no insert, and has stopped."""
    keys: tuple[int, int] | None = None
    """The first and the last key, if each is greater than the one before."""


def fits(read: LogRead, schema: StructType) -> bool:
    """Whether the columns of a table are those of its changes, as they are."""
    kinds = {field.name: field.dataType for field in read.schema.fields}
    return all(kinds.get(field.name) == field.dataType for field in schema.fields)


def write(context: SparkContext, read: LogRead, wanted: Wanted) -> list[Part]:
    """Let the executors write; return what became of each range."""
    tasks = read.tasks()
    if not tasks:
        return []
    run = partial(_run, to_arrow_schema(read.schema, timezone="UTC"), address_of(Options.of(read.options)), wanted)
    return context.parallelize(tasks, len(tasks)).map(run).collect()


def _run(schema: pa.Schema, address: Address, wanted: Wanted, task: TableTask) -> Part:
    """Do one task. In an executor."""
    path = Path(wanted.folder, f"part-{uuid.uuid4().hex}.parquet")
    rows_in = 0
    growth = _Growth(wanted.key)
    with _File(path, to_arrow_schema(wanted.schema, timezone="UTC"), wanted.codec) as file:
        for batch in changes(task, schema, address, first_rows=FIRST_ROWS if wanted.is_new_only else None):
            rows_in += batch.num_rows
            due = _due(batch, wanted)
            if wanted.is_new_only and not _are_new(due):
                file.discard()
                return Part(None, rows_in, 0, is_new=False)
            growth.see(due)
            file.write(due)
    return Part(path.name if file.rows else None, rows_in, file.rows, is_new=True, keys=growth.keys)


def _due(batch: pa.RecordBatch, wanted: Wanted) -> pa.RecordBatch:
    """Leave out what is of a snapshot, of another epoch, or there already."""
    belongs = pc.and_(
        pc.is_null(batch.column("_snapshot")), pc.equal(batch.column("_source_epoch"), wanted.source_epoch)
    )
    belongs = pc.and_(belongs, pc.greater_equal(batch.column("_commit_lsn"), wanted.from_lsn))
    return batch if pc.all(belongs).as_py() in (None, True) else batch.filter(belongs)


def _are_new(batch: pa.RecordBatch) -> bool:
    """Whether all are rows that were not there before: inserted, and not only moved to another key."""
    is_insert = pc.all(pc.equal(batch.column("_op"), "c")).as_py() in (None, True)
    return is_insert and not pc.sum(pc.list_value_length(batch.column("_unchanged"))).as_py()


class _Growth:
    """Watches whether a key grows from row to row, which proves that none comes twice."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._first: int | None = None
        self._last: int | None = None

    def see(self, batch: pa.RecordBatch) -> None:
        if self._key is None or not batch.num_rows:
            return
        column = batch.column(self._key)
        if column.null_count:
            self._key = None
            return
        values = column.to_numpy(zero_copy_only=False)
        is_growing = bool(np.all(values[1:] > values[:-1]))
        if not is_growing or (self._last is not None and int(values[0]) <= self._last):
            self._key = None
            return
        self._first = int(values[0]) if self._first is None else self._first
        self._last = int(values[-1])

    @property
    def keys(self) -> tuple[int, int] | None:
        if self._key is None or self._first is None or self._last is None:
            return None
        return self._first, self._last


class _File:
    """A Parquet file that is made when the first row comes. Leaving the block by an error removes it."""

    def __init__(self, path: Path, schema: pa.Schema, codec: str) -> None:
        self._path = path
        self._schema = schema.with_metadata(_WRITER)
        self._codec = codec
        self._writer: pq.ParquetWriter | None = None
        self._group: list[pa.RecordBatch] = []
        self._group_bytes = 0
        self.rows = 0

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.discard()
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows, of which the file's columns are taken."""
        if not batch.num_rows:
            return
        rows = batch.select(self._schema.names).cast(self._schema)
        self._group.append(rows)
        self._group_bytes += rows.nbytes
        self.rows += rows.num_rows
        if self._group_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def discard(self) -> None:
        """Remove what is there; nothing more is written."""
        self._group.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._group:
            return
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._path, self._schema, compression=self._codec, store_schema=False, store_decimal_as_integer=True
            )
        table = pa.Table.from_batches(self._group, self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._group.clear()
        self._group_bytes = 0
