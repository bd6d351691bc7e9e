"""`format("walstream")`: the data source, its batch reader and its stream reader.

Owns what Spark calls; everything behind it is elsewhere: options.py what was asked for, points.py where the commit
points are, admission.py how many of them a micro-batch takes, planning.py who reads what, admitting.py the rows.

    spark.read.format("walstream").option("bootstrap", …).option("table", "public.orders").load()
    spark.readStream.format("walstream").option("bootstrap", …).load()          # commit points

Spark pickles readers and hands them to other processes: a reader holds what it was asked for, and connects when it is
first asked something. All that an executor needs is in the task.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from walstream.errors import UsageError
from walstream.spark.admission import Limit
from walstream.spark.admitting import RangeDecoder
from walstream.spark.decoding import Decoder
from walstream.spark.fetching import Address, shared
from walstream.spark.offsets import PointOffset
from walstream.spark.options import Options
from walstream.spark.planner import Planner
from walstream.spark.planning import PointsTask, TableTask
from walstream.spark.types import POINTS
from walstream.spark.versions import read_versions

UNLIMITED_ROWS: Final = (1 << 63) - 1


class WalstreamSource(DataSource):
    """The changes of a table, or the commit points of a capture."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Read the options. Raises UsageError."""
        super().__init__(options)
        self.asked = Options.of(options)

    @classmethod
    def name(cls) -> str:
        """Return the name that `format` takes."""
        return "walstream"

    def schema(self) -> StructType:
        """Return the columns: those of the table and of every change, or those of a commit point."""
        if self.asked.table is None:
            return POINTS
        versions = read_versions(address_of(self.asked), self.asked.prefix)
        newest = versions.newest(*self.asked.table, self.asked.schema_version)
        return newest.changes(self.asked.strings, self.asked.columns)

    def reader(self, schema: StructType) -> WalstreamReader:
        """Return what reads a table between two points."""
        return WalstreamReader(self.asked, schema)

    def streamReader(self, schema: StructType) -> WalstreamStreamReader:
        """Return what reads a table, or commit points, as they come."""
        return WalstreamStreamReader(self.asked, schema)


class _Reading:
    """What both readers do in an executor."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        schema = to_arrow_schema(self._schema, timezone="UTC")
        if isinstance(partition, PointsTask):
            yield from _points(partition, schema)
        elif isinstance(partition, TableTask):
            yield from changes(partition, schema, address_of(self._options))
        # Otherwise there was nothing to plan, and Spark made a task of nothing.


class WalstreamReader(_Reading, DataSourceReader):
    """Reads a table, or commit points, between two points."""

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read."""
        planner = Planner(self._options, self._schema)
        try:
            return planner.batch()
        finally:
            planner.close()


class WalstreamStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a table, or commit points, in micro-batches of whole commit points."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        if options.after is not None or options.upto is not None:
            # Not here: an error of a constructor is hidden behind another one.
            self._refused: str = "after" if options.after is not None else "upto"
        else:
            self._refused = ""
        self._planner: Planner | None = None
        self._target: int | None = None

    @property
    def planner(self) -> Planner:
        """The connection to the log, made when first needed."""
        if self._refused:
            raise UsageError(f"The option {self._refused} is for batch reads.", "A stream takes the option starting.")
        if self._planner is None:
            self._planner = Planner(self._options, self._schema)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins."""
        return self.planner.starting().written()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limits of the options: of two, the one of bytes is kept beside."""
        if self._options.rows_per_trigger is not None:
            return ReadMaxRows(self._options.rows_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        # Not ReadAllAvailable, by which Spark asks for one batch of everything: a batch has a bound even so.
        return ReadMaxRows(UNLIMITED_ROWS)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends."""
        return self.planner.latest(PointOffset.read(start), self._limit(limit), self._target).written()

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember what is there now."""
        self._target = self.planner.end()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the last point there is, for the progress: its distance from the end of the batch is the lag."""
        newest = self.planner.newest()
        return None if newest is None else newest.written()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan a micro-batch."""
        return self.planner.between(PointOffset.read(start), PointOffset.read(end))

    def commit(self, end: dict[str, Any]) -> None:
        """Forget what is done."""
        self.planner.forget(PointOffset.read(end))

    def stop(self) -> None:
        """End the connections."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _limit(self, limit: ReadLimit) -> Limit:
        if isinstance(limit, ReadMaxRows):
            return Limit(rows_max=limit.max_rows, bytes_max=self._options.bytes_per_trigger)
        if isinstance(limit, ReadMaxBytes):
            return Limit(bytes_max=limit.max_bytes, rows_max=self._options.rows_per_trigger)
        if isinstance(limit, ReadMinRows):
            return Limit(rows_min=limit.min_rows)
        return Limit(points_max=None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection out: who gets the pickle reads tasks."""
        return {**self.__dict__, "_planner": None}


def address_of(options: Options) -> Address:
    """Return where the log is."""
    return Address(options.bootstrap, dict(options.kafka))


def _points(task: PointsTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if task.rows:
        columns = list(zip(*task.rows, strict=True))
        arrays = [
            pa.array([list(each.items()) for each in column] if pa.types.is_map(field.type) else column, field.type)
            for column, field in zip(columns, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def changes(
    task: TableTask, schema: pa.Schema, address: Address, *, first_rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the changes of a task; of the first ones so many at most, for who may not want the rest."""
    wanted = task.range
    decoder = RangeDecoder(Decoder(schema, task.wanted, task.versions), wanted)
    for messages in shared(address).read(wanted.spans.partition, wanted.start, wanted.stop, first_rows):
        yield from decoder.decode(messages)
    decoder.check()
