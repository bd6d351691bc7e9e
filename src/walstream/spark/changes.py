"""The changes of a table's batch, on their way to a writer: as a DataFrame, or as a read of the log that tasks can do.

Owns the choice between the two, which the writer makes; refuses to know what becomes of them. The DataFrame is made
when it is first asked for: Spark starts a process to ask the data source, for which a batch that is written straight
from the log (writers/straight.py) has no use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from walstream.spark.options import Options
from walstream.spark.planner import Planner
from walstream.spark.planning import TableTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@dataclass(frozen=True)
class LogRead:
    """A range of a table's changes, as the data source would read it."""

    options: Mapping[str, str]
    schema: StructType

    def tasks(self) -> list[TableTask]:
        """Plan the read, in this process. Raises DataLoss, UnreachableError."""
        planner = Planner(Options.of(self.options), self.schema)
        try:
            return [task for task in planner.batch() if isinstance(task, TableTask)]
        finally:
            planner.close()


class Changes:
    """The changes of one batch."""

    def __init__(self, session: SparkSession, make: Callable[[], DataFrame], log: LogRead | None = None) -> None:
        """Take the session they are read in, which is their own, and how to read them.

        `log` is given when those of the stream, of the plan's source epoch, are all that a writer has to apply.
        """
        self.session = session
        self._make = make
        self.log = log

    @classmethod
    def of(cls, frame: DataFrame) -> Changes:
        """Take changes that are a DataFrame already."""
        return cls(frame.sparkSession, lambda: frame)

    @cached_property
    def frame(self) -> DataFrame:
        """The changes as rows."""
        return self._make()

    def for_one_task(self) -> Changes:
        """Return the same changes, their rows read by one task: few rows are not worth a shuffle."""
        return Changes(self.session, lambda: self.frame.coalesce(1), self.log)
