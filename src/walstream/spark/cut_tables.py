"""All tables at one cut: true at the same instant of the source, and the cut says at which.

Owns reading by cuts; refuses to know how they are recorded (cuts.py). A table is read from the files that it had at its
version of then, with or without Delta's jars. What maintenance has removed is `CutExpired`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql.types import StructType

from walstream.config import load_default
from walstream.errors import CutExpired
from walstream.positions import Lsn
from walstream.spark.cuts import Cuts
from walstream.spark.warehouse import table_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Cut:
    """All tables at one moment of the source: whole transactions, across tables."""

    lsn: Lsn
    """What committed before it is in the tables, and nothing else."""
    source_epoch: int
    point: int
    """Offset of the commit point."""
    commit_time: datetime | None
    """Of the last transaction."""
    written_at: datetime
    versions: Mapping[str, int]
    """Delta's version of each table."""
    tables: Mapping[str, DataFrame]
    """By name, `schema.table`; each is looked up when it is asked for."""
    stopped: Mapping[str, str]
    """Tables that could not follow, and why: they are not among the others."""


class _Tables(Mapping[str, "DataFrame"]):
    """DataFrames by name, made when asked for."""

    def __init__(self, names: Mapping[str, int], make: Callable[[str], DataFrame]) -> None:
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> DataFrame:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_at(
    spark: SparkSession,
    at: Lsn | int | str = "latest",
    *,
    warehouse: str | None = None,
    source_epoch: int | None = None,
) -> Cut:
    """Return all tables at the last cut at or before an LSN (`16/B374D848`), or at the latest one.

    The tables of a cut belong together: they are true at the same instant, and the cut says at which. The warehouse is
    the configured one, as for `walstream pipeline` in the same folder, and LSNs are those of the newest source epoch,
    unless others are given. Raises CutExpired, UsageError.
    """
    if isinstance(at, str) and at != "latest":
        at = Lsn.parse(at)
    if warehouse is None:
        warehouse = load_default(os.environ).config.pipeline.warehouse
    row = Cuts(warehouse).find("latest" if at == "latest" else Lsn(at), source_epoch)
    versions = dict(sorted(row.versions.items()))
    return Cut(
        lsn=row.end_lsn,
        source_epoch=row.source_epoch,
        point=row.point,
        commit_time=_moment(row.commit_time_us) if row.commit_time_us else None,
        written_at=_moment(row.written_at_us),
        versions=versions,
        tables=_Tables(versions, lambda name: read_version(spark, table_path(warehouse, name), versions[name])),
        stopped=row.stopped,
    )


def read_version(spark: SparkSession, path: str, version: int) -> DataFrame:
    """Return a table at one of its versions, with or without Delta's jars. Raises CutExpired."""
    try:
        table = DeltaTable(path, version=version)
        files = table.file_uris()
    except DeltaError as error:
        raise CutExpired(f"Version {version} of {path} cannot be read any more: {error}.") from None
    # Neither writer uses deletion vectors, column mapping or partitions: the files alone are the table.
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)


def _moment(us: int) -> datetime:
    return datetime.fromtimestamp(us / 1_000_000, tz=UTC)
