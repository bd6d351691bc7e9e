"""Where tables are: what a writer asks of a store, and of one table at one version.

Owns the interface between what both writers do alike (applying.py, batch.py) and how each keeps tables (embedded.py,
delta_spark.py). Invariant: what a target reads is what the table held at its version, and what it commits comes right
after that version or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession
    from pyspark.sql.types import StructField, StructType

    from walstream.spark.belonging import Belonging
    from walstream.spark.changes import LogRead
    from walstream.spark.columns import Mode
    from walstream.spark.small.task import SmallChanges, SmallDone
    from walstream.spark.writers import TablePlan
    from walstream.spark.writers.merging import Merge
    from walstream.spark.writers.straight import Part

Measured: TypeAlias = Callable[[], "Mapping[str, Any] | None"]
"""Tells, once rows are written, what was asked for in `measures`; None: some of them are not what they should be."""


def unchecked() -> None:
    """Find nothing wrong: of changes that have been read and checked already."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit carries beside its files."""

    app_id: str | None
    app_version: int
    note: str
    check: Callable[[], None] = unchecked
    """To be called when all changes have been read, before they are committed: it raises when they are not right."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a commit has made."""

    version: int
    files_added: int = 0
    files_removed: int = 0


class Staged(NamedTuple):
    """Files that executors have written straight from the log; they belong to nobody yet."""

    folder: str
    parts: Sequence[Part]
    is_new_only: bool
    """Whether only rows that are new may be committed."""

    @property
    def rows_in(self) -> int:
        """Changes that were read."""
        return sum(part.rows_in for part in self.parts)

    @property
    def are_new(self) -> bool:
        """Whether nothing but inserts was met, where only those are wanted."""
        return all(part.is_new for part in self.parts)


class SmallBatch(NamedTuple):
    """A batch that one task does (small/), as far as the table does not matter."""

    mode: Mode
    key: tuple[str, ...]
    columns: tuple[str, ...]
    schema: StructType
    changes: SmallChanges
    belonging: Belonging
    source_epoch: int
    applied: int | None
    """Changes that committed before are in the table."""
    is_replacing: bool


class SmallWritten(NamedTuple):
    """What became of it."""

    written: Written
    done: SmallDone


class Target(Protocol):
    """A table at one version, or the place for one. What commits raises TableConflict when another one came first."""

    @property
    def version(self) -> int | None:
        """The version that is read and committed after; None when there is no table."""

    @property
    def schema(self) -> StructType:
        """The table's schema."""

    def applied(self, app_id: str) -> int | None:
        """Return the last version that an application has committed."""

    def rows(self) -> DataFrame:
        """Return everything."""

    def near(self, key: Sequence[str], keys: DataFrame, /) -> DataFrame:
        """Return rows, among them every one that has one of these keys."""

    def measures(self, key: Sequence[str], /) -> Mapping[str, Column]:
        """Return what `merge` wants to know of the batch's keys."""

    def add_columns(self, fields: Sequence[StructField], commit: Commit) -> None:
        """Commit new columns, which are null in all rows."""

    def append(self, rows: DataFrame, commit: Commit) -> Written:
        """Commit more rows."""

    def replace(self, rows: DataFrame, schema: StructType, commit: Commit) -> Written:
        """Commit these rows and this schema in place of what is there, if anything is."""

    def insert(
        self, rows: DataFrame, schema: StructType, key: Sequence[str], commit: Commit, measured: Measured, /
    ) -> Written | None:
        """Commit rows that are new, as they come; None, and nothing is committed, if they are not or may not be."""

    def stage(self, plan: TablePlan, log: LogRead, from_lsn: int, is_new_only: bool, /) -> Staged | None:
        """Write the changes from an LSN on as rows of the table, straight from the log; None: that cannot be done."""

    def take(self, staged: Staged, plan: TablePlan, commit: Commit, /) -> Written | None:
        """Commit what was staged; None, and nothing is committed, if a row that should be new is not."""

    def drop(self, staged: Staged, /) -> None:
        """Remove what was staged."""

    def merge(self, merge: Merge, measured: Row, commit: Commit, /) -> Written:
        """Commit a merge."""

    def small(self, batch: SmallBatch, check: Callable[[SmallDone], None], commit: Commit, /) -> SmallWritten | None:
        """Commit a small batch that one task does; None, and nothing is committed, when it takes more than that."""


class Store(Protocol):
    """Where tables are."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What sessions that read and write have to be set to."""

    def open(self, spark: SparkSession, path: str) -> Target:
        """Return the newest version of a table; one without a version when there is none."""

    def compact(self, spark: SparkSession, path: str, key: Sequence[str], /) -> int:
        """Make few files of many."""

    def clean(self, path: str) -> None:
        """Remove what was never committed."""
