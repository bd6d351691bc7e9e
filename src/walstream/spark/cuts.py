"""The cuts: `_walstream_commits`, which names for each micro-batch the Delta version of every table at one LSN.

Owns that table and reading by it; refuses to know how tables are written. It is written after the tables, so a cut that
is there is whole. A row says: these versions hold exactly what committed before `end_lsn`. Rows are ordered by `point`,
the offset of the commit point, which also guards them: a cut that is recorded is not recorded again, but for a table
that was behind, has caught up and is listed in it now.

`read_at` gives all tables at the last cut at or before an LSN, read from their files of then. A cut that maintenance
has removed is `CutExpired`: its files may be gone.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction
from pyspark.sql.types import StructType

from walstream import logs
from walstream.errors import CutExpired, TableConflict, UsageError
from walstream.positions import Lsn
from walstream.spark.batches import CutRow
from walstream.spark.warehouse import cuts_path, table_path
from walstream.spark.writers.files import TableFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ATTEMPTS: Final = 5
REVISIONS: Final = 1_000
"""How often a cut can be written again, each time with more tables."""
FILES_KEPT_HOURS: Final = 1
"""How long whoever reads the table of cuts may take for it."""

_TIME: Final = pa.timestamp("us", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        ("point", pa.int64()),
        ("source_epoch", pa.int32()),
        ("end_lsn", pa.int64()),
        ("end_lsn_text", pa.string()),
        ("commit_time", _TIME),
        ("written_at", _TIME),
        ("batch_id", pa.int64()),
        ("rows", pa.int64()),
        ("versions", pa.map_(pa.string(), pa.int64())),
        ("snapshots", pa.map_(pa.string(), pa.string())),
        ("stopped", pa.map_(pa.string(), pa.string())),
    ]
)

# Between two checkpoints of its log there are a hundred rows: an hour of it is enough to read any row that is left.
_PROPERTIES: Final = {"delta.logRetentionDuration": "interval 1 days", "delta.checkpointInterval": "100"}


log = logs.get(__name__)


class Cuts:
    """The recorded cuts of one warehouse."""

    def __init__(self, warehouse: str, prefix: str = "") -> None:
        """Take the prefix of the capture, without which cuts can be read but not recorded."""
        self.warehouse = warehouse
        self._path = cuts_path(warehouse)
        self._files = TableFiles(self._path)
        self._app_id = f"walstream/{prefix}/cuts" if prefix else ""
        self._table: DeltaTable | None = None

    def record(self, row: CutRow, now: Callable[[], float] = time.time) -> bool:
        """Write a cut, durably, unless it is there or a later one is; return whether it was written."""
        assert self._app_id, "whoever records cuts knows the capture's prefix"
        data = pa.Table.from_pylist([_as_dict(row, round(now() * 1_000_000))], SCHEMA)
        for _ in range(ATTEMPTS):
            table = self._open() or self._create()
            version = self._version(table, row)
            if version is None:
                return False
            try:
                self._commit(table, data, version)
                return True
            except CommitFailedError as error:
                log.warning("cut not recorded at once", point=row.point, error=str(error))
        raise TableConflict(
            f"{self._path} was changed by somebody else each of {ATTEMPTS} times.",
            "See that only one pipeline writes to the warehouse.",
        )

    def _version(self, table: DeltaTable, row: CutRow) -> int | None:
        """Return the transaction version of a cut, which grows with its point; None: it must not be written."""
        known = table.transaction_version(self._app_id)
        if known is None or known // REVISIONS < row.point:
            return row.point * REVISIONS
        if known // REVISIONS > row.point:
            return None
        # A table that was behind has caught up: the same cut again, with one more table.
        return known + 1 if self._row(row.point).versions.keys() < row.versions.keys() else None

    def _create(self) -> DeltaTable:
        table = DeltaTable.create(self._path, SCHEMA, mode="ignore", configuration=dict(_PROPERTIES))
        self._files.sync_commit(0)
        self._table = table
        return table

    def _commit(self, table: DeltaTable, data: pa.Table, app_version: int) -> None:
        """Commit a file with these rows; its bytes are on the disk before the commit that names it is."""
        folder = self._files.new_folder()
        filesystem = pafs.LocalFileSystem() if self._files.is_local else pafs.FileSystem.from_uri(self._path)[0]
        filesystem.create_dir(f"{self._files.root}/{folder}")
        pq.write_table(data, f"{self._files.root}/{folder}/cut-{uuid.uuid4().hex}.parquet", filesystem=filesystem)
        schema = StructType.fromJson(json.loads(table.schema().to_json()))
        taken = self._files.take(folder, schema)
        version = table.version() + 1
        try:
            table.create_write_transaction(
                [AddAction(file.path, file.size, {}, file.modified_ms, True, file.stats) for file in taken],
                "append",
                table.schema(),
                commit_properties=CommitProperties(
                    max_commit_retries=0, app_transactions=[Transaction(self._app_id, app_version)]
                ),
            )
        except BaseException:
            self._files.discard(taken)
            raise
        self._files.sync_commit(version)

    def last(self) -> CutRow | None:
        """Return the newest cut."""
        points = self._columns("point")
        return self._row(max(row["point"] for row in points)) if points else None

    def all(self) -> list[CutRow]:
        """Return every cut that is kept, oldest first."""
        rows = (_as_row(row) for row in self._columns(*SCHEMA.names))
        return sorted(rows, key=lambda row: (row.point, len(row.versions)))

    def find(self, at: Lsn | Literal["latest"], source_epoch: int | None = None) -> CutRow:
        """Return the last cut at or before an LSN. Raises CutExpired, UsageError."""
        known = self._columns("point", "source_epoch", "end_lsn")
        if not known:
            raise UsageError(
                f"{self.warehouse} holds no cut yet.", "Wait for the pipeline's first one, or name the warehouse."
            )
        epoch = max(row["source_epoch"] for row in known) if source_epoch is None else source_epoch
        fitting = [
            row["point"]
            for row in known
            if row["source_epoch"] == epoch and (at == "latest" or row["end_lsn"] <= int(at))
        ]
        if not fitting:
            oldest = min((row["end_lsn"] for row in known if row["source_epoch"] == epoch), default=None)
            kept = f"the oldest is at {Lsn(oldest)}" if oldest is not None else "there is none of that epoch"
            raise CutExpired(
                f"No cut at or before {at} of source epoch {epoch} is kept; {kept}.",
                "pipeline.cuts_kept_hours says how long cuts are kept.",
            )
        return self._row(max(fitting))

    def versions(self) -> dict[str, list[int]]:
        """Return, per table, the versions that cuts list, oldest first: those must stay readable."""
        table, found = self._open(), pa.table({"name": pa.array([], pa.string()), "version": pa.array([], pa.int64())})
        if table is None:
            return {}
        for batch in table.to_pyarrow_dataset().to_batches(columns=["versions"]):
            listed = batch.column("versions")
            part = pa.table({"name": listed.keys, "version": listed.items})
            found = pa.concat_tables([found, part]).group_by(["name", "version"]).aggregate([])
        versions: dict[str, list[int]] = {}
        for row in found.sort_by([("name", "ascending"), ("version", "ascending")]).to_pylist():
            versions.setdefault(row["name"], []).append(row["version"])
        return versions

    def expire(self, before_us: int) -> int:
        """Remove the cuts that were written before a moment, but never the newest; return how many."""
        rows = self._columns("point", "written_at")
        newest = max((row["point"] for row in rows), default=-1)
        old = [row["point"] for row in rows if _us(row["written_at"]) < before_us and row["point"] != newest]
        table = self._open()
        if table is None or not old:
            return 0
        # Cuts are in the order of time but for a clock that was set back; those go with the last old one.
        bound = max(old)
        table.delete(f"point <= {bound} and point <> {newest}")
        return len(old)

    def tidy(self) -> None:
        """Put the many small files into few, and remove what nobody reads any more."""
        table = self._open()
        if table is None:
            return
        table.optimize.compact()
        table.vacuum(FILES_KEPT_HOURS, dry_run=False, enforce_retention_duration=False)
        table.create_checkpoint()
        table.cleanup_metadata()

    def _open(self) -> DeltaTable | None:
        if self._table is None:
            try:
                self._table = DeltaTable(self._path)
            except TableNotFoundError:
                return None
        else:
            self._table.update_incremental()
        return self._table

    def _columns(self, *names: str, point: int | None = None) -> list[dict[str, Any]]:
        table = self._open()
        if table is None:
            return []
        filters = [("point", "=", point)] if point is not None else None
        rows: list[dict[str, Any]] = table.to_pyarrow_table(columns=list(names), filters=filters).to_pylist()
        return rows

    def _row(self, point: int) -> CutRow:
        found = self._columns(*SCHEMA.names, point=point)
        return max(map(_as_row, found), key=lambda row: len(row.versions))


def _as_dict(row: CutRow, written_at_us: int) -> dict[str, Any]:
    return {
        "point": row.point,
        "source_epoch": row.source_epoch,
        "end_lsn": int(row.end_lsn),
        "end_lsn_text": str(row.end_lsn),
        "commit_time": row.commit_time_us or None,
        "written_at": written_at_us,
        "batch_id": row.batch_id,
        "rows": row.rows,
        "versions": dict(row.versions),
        "snapshots": dict(row.snapshots),
        "stopped": dict(row.stopped),
    }


def _as_row(found: Mapping[str, Any]) -> CutRow:
    return CutRow(
        point=found["point"],
        source_epoch=found["source_epoch"],
        end_lsn=Lsn(found["end_lsn"]),
        commit_time_us=_us(found["commit_time"]) if found["commit_time"] is not None else 0,
        versions=dict(found["versions"]),
        snapshots=dict(found["snapshots"]),
        stopped=dict(found["stopped"]),
        rows=found["rows"],
        batch_id=found["batch_id"],
        written_at_us=_us(found["written_at"]),
    )


def _us(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // _MICROSECOND


_MICROSECOND: Final = datetime(1970, 1, 1, 0, 0, 0, 1) - datetime(1970, 1, 1)


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
    spark: SparkSession, warehouse: str, at: Lsn | int | str = "latest", *, source_epoch: int | None = None
) -> Cut:
    """Return all tables at the last cut at or before an LSN (`16/B374D848`), or at the latest one.

    The tables of a cut belong together: they are true at the same instant, and the cut says at which. LSNs are those of
    the newest source epoch, unless another one is given. Raises CutExpired, UsageError.
    """
    if isinstance(at, str) and at != "latest":
        at = Lsn.parse(at)
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
    except (DeltaError, TableNotFoundError) as error:
        raise CutExpired(f"Version {version} of {path} cannot be read any more: {error}.") from None
    # Neither writer uses deletion vectors, column mapping or partitions: the files alone are the table.
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)


def _moment(us: int) -> datetime:
    return datetime.fromtimestamp(us / 1_000_000, tz=UTC)
