"""Where tables are: what a writer asks of a store, and of one table at one version.

Owns the interface between what both writers do alike (applying.py, batch.py) and how each keeps tables (embedded.py,
delta_spark.py). Invariant: what a target reads is what the table held at its version, and what it commits comes right
after that version or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession
    from pyspark.sql.types import StructField, StructType

    from walstream.spark.writers.merging import Merge

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

    def merge(self, merge: Merge, measured: Row, commit: Commit, /) -> Written:
        """Commit a merge."""


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
