"""What surrounds the work on one table of a batch, wherever it is written: how it is now, and what a failure means.

Owns the frame that every destination puts its own work into; refuses to know that work. Invariant: what befalls one
table alone is told as the reason why it stopped, anything else is raised as an error of walstream's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from walstream import logs
from walstream.errors import DataLoss, WalstreamError
from walstream.spark.failures import meaning, stops_one_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from walstream.spark.destination import Work
    from walstream.spark.kept_tables import KeptTable
    from walstream.spark.progress import Progress

R = TypeVar("R")

log = logs.get(__name__)


class Attempts:
    """Tries work on tables. Used by several threads at once."""

    def __init__(self, spark: SparkSession, describe: Callable[[str], KeptTable], progress: Progress) -> None:
        """Take what tells how a table is now, and who is to know what is being done."""
        self._spark = spark
        self._describe = describe
        self._progress = progress

    def attempt(self, work: Work, batch_id: int, do: Callable[[Work, KeptTable], R]) -> tuple[R | None, str]:
        """Do a table's part of a batch; return what came of it, or None and why the table stopped."""
        name = work.one.table
        try:
            table = self._describe(name)
            self._progress.writing(name, table.mode)
            self._announce(work, batch_id)
            return do(work if table.is_countable else work._replace(rows=None), table), ""
        except Exception as error:
            told = meaning(error)
            # What a table lacks of the past, because it was behind or is new, the others have.
            is_gone = type(told) is DataLoss and work.one.after is None
            if not (is_gone or stops_one_table(told)):
                raise told from error
            return None, self.stopped(name, told)

    def stopped(self, name: str, told: WalstreamError) -> str:
        """Say that a table has stopped, and return why."""
        log.error("table stopped", table=name, error=told.message, hint=told.hint)
        self._progress.stopped(name, str(told))
        return str(told)

    def _announce(self, work: Work, batch_id: int) -> None:
        """Name what this thread asks of Spark."""
        name, context = work.one.table, self._spark.sparkContext
        act = "replaced by a snapshot" if work.one.snapshot is not None else "changes"
        context.setJobGroup(f"walstream/{name}", f"{name}: batch {batch_id}, {act} up to {work.step.end_lsn}")
        context.setLocalProperty("spark.scheduler.pool", name)
