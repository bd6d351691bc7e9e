"""From the changes of one table to exactly one commit of it: what a writer is asked, and what it answers.

Owns the interface; refuses to know how it is done (applying.py, with the stores embedded.py and delta_spark.py). Both
writers make the same tables, and one may go on where the other stopped.

Invariants. A batch is one data commit, which carries the batch's end LSN as the version of the application
`walstream/<prefix>/<source epoch>`. A batch whose end LSN the table has already changes nothing; of one that begins
before and ends after, only the rest is applied. So a replayed batch, a lost checkpoint, a driver killed anywhere and
two pipelines by mistake all end in the same table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from walstream.errors import KeyMissing, UsageError
from walstream.spark.columns import Mode, TableColumn, check_names, table_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from walstream.spark.belonging import Belonging
    from walstream.spark.changes import Changes
    from walstream.spark.small.task import SmallChanges

__all__ = ["Applied", "Mode", "TableColumn", "TablePlan", "Writer", "WriterName", "open_writer"]

WriterName: TypeAlias = Literal["deltalake", "delta-spark"]


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What a table has to become in one batch."""

    name: str
    """For messages: `public.orders`."""
    path: str
    """The folder of the table."""
    mode: Mode
    key: tuple[str, ...]
    columns: tuple[TableColumn, ...]
    """Of the newest version, in its order."""
    schema_version: int
    prefix: str
    source_epoch: int
    end_lsn: int
    """Of the batch's last commit point: afterwards the table holds everything before it."""
    relation_id: int = 0
    """Attribute numbers are those of one relation."""
    rows_due: int | None = None
    """How many changes the commit points promise. Another number is RowsMissing, and nothing is committed."""
    where: str = ""
    """SQL over the changes: those that fail it are counted, but not applied."""
    begin_lsn: int = 0
    """No change of the batch committed before this."""
    snapshot: str | None = None
    """The id of a snapshot that this batch finishes: the table is replaced by its rows and the changes since."""
    snapshot_rows: int | None = None
    """How many of `rows_due` are the snapshot's. When all of them are, nothing needs to be folded."""

    @property
    def app_id(self) -> str:
        """The application under which the table records how far it is."""
        return f"walstream/{self.prefix}/{self.source_epoch}"

    @property
    def is_replacing(self) -> bool:
        """Whether the table is replaced, not changed."""
        return self.snapshot is not None

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the source's columns."""
        return tuple(column.name for column in self.columns)

    @property
    def schema(self) -> StructType:
        """The schema that the table shall have."""
        return table_schema(self.mode, self.columns, self.relation_id)

    def check(self) -> None:
        """See that the table can be what is asked. Raises KeyMissing, TableUnfit."""
        if not self.key and self.mode != "append":
            raise KeyMissing(
                f"{self.name} has no key, so its rows cannot be told apart and a table in mode {self.mode} is not "
                "possible.",
                f'Set mode = "append" in [pipeline.tables."{self.name}"], which keeps every change, or give it a '
                "primary key.",
            )
        check_names(self.name, self.mode, self.column_names)


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a batch."""

    version: int
    """The table's version afterwards."""
    applied_lsn: int
    """What the table holds: the batch's end LSN, or more when the table was further already."""
    is_replay: bool = False
    """Nothing was written: all of it was there."""
    rows_in: int = 0
    """Changes that were read."""
    rows_folded: int = 0
    """Rows that they were folded to: what was merged, replaced or appended."""
    files_added: int = 0
    files_removed: int = 0


class Writer(Protocol):
    """Writes tables. Methods may be called by several threads at once, for several tables or one."""

    def applied(self, plan: TablePlan) -> int | None:
        """Return the LSN before which the table holds everything of the plan's source epoch; None for nothing."""

    def version(self, path: str) -> int | None:
        """Return the newest version of a table; None when there is none."""

    def apply(self, plan: TablePlan, changes: DataFrame | Changes) -> Applied:
        """Bring the table to the plan's end LSN, in one data commit, its schema first.

        The changes must have been read on a session of their own (`spark.newSession()`): settings are made in it.
        Raises SchemaIncompatible, KeyMissing, TableUnfit, TableConflict, RowsMissing, CorruptCommits.
        """

    def apply_small(self, plan: TablePlan, changes: SmallChanges, belonging: Belonging) -> Applied | None:
        """Do the same by one task, for few changes; None, and nothing is done, when it takes more than that.

        Raises the same.
        """

    def compact(self, path: str, key: tuple[str, ...] = ()) -> int:
        """Make few large files of many small ones, rows with like keys together; return how many are gone."""

    def vacuum(self, path: str, keep_versions: Iterable[int] = (), retention_hours: float = 168) -> int:
        """Delete files that no version of the last hours and none of these needs; return how many."""

    def clean(self, path: str) -> None:
        """Remove what a killed driver has left of files that were never committed; when no batch runs."""


def open_writer(name: str, spark: SparkSession) -> Writer:
    """Return a writer by its name in the configuration. Raises UsageError."""
    from walstream.spark.writers.applying import TableWriter

    if name == "deltalake":
        from walstream.spark.writers.embedded import EmbeddedStore

        return TableWriter(EmbeddedStore(), spark)
    if name == "delta-spark":
        try:
            from walstream.spark.writers.delta_spark import DeltaSparkStore
        except ImportError as error:
            raise UsageError(
                f"The writer delta-spark needs the Python package of Delta ({error}).",
                "Install it: pip install delta-spark",
            ) from None
        return TableWriter(DeltaSparkStore(spark), spark)
    raise UsageError(f"There is no writer {name!r}.", "Set pipeline.writer to deltalake or delta-spark.")
