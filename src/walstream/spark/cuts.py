"""The cuts: `_walstream_commits`, which names for each micro-batch the Delta version of every table at one LSN.

Owns that table; refuses to know how tables are written, and read (cut_tables.py). It is written after the tables, so a
cut that is there is whole. A row says: these versions hold exactly what committed before `end_lsn`. Rows are ordered by
`point`, the offset of the commit point, which also guards them: a cut that is recorded is not recorded again, but for a
table that was behind, has caught up and is listed in it now.

There may be a cut for every second of a day: they are looked through as columns, and only the one that is meant becomes
an object. One that maintenance has removed is `CutExpired`: its files may be gone.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from walstream import logs
from walstream.errors import CutExpired, ForeignLog, TableConflict, UsageError
from walstream.positions import Lsn
from walstream.spark.batches import CutRow
from walstream.spark.warehouse import cuts_path
from walstream.spark.writers.committing import commit_files
from walstream.spark.writers.files import TableFiles
from walstream.spark.writers.targets import Commit

if TYPE_CHECKING:
    pass

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
            except TableConflict as error:
                log.warning("cut not recorded at once", point=row.point, error=error.message)
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
        table = DeltaTable.create(self._path, SCHEMA, mode="ignore", name=self._app_id, configuration=dict(_PROPERTIES))
        self._check_owner(table)
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
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, file.modified_ms, True, file.stats) for file in taken
        ]
        commit_files(
            self._files,
            table.version() + 1,
            taken,
            Commit(self._app_id, app_version, ""),
            lambda how: table.create_write_transaction(actions, "append", table.schema(), commit_properties=how),
        )

    def last(self) -> CutRow | None:
        """Return the newest cut."""
        points = self._read("point")["point"]
        return self._row(pc.max(points).as_py()) if len(points) else None

    def all(self) -> list[CutRow]:
        """Return every cut that is kept, oldest first."""
        rows = map(_as_row, self._read(*SCHEMA.names).to_pylist())
        return sorted(rows, key=lambda row: (row.point, len(row.versions)))

    def find(self, at: Lsn | Literal["latest"], source_epoch: int | None = None) -> CutRow:
        """Return the last cut at or before an LSN. Raises CutExpired, UsageError."""
        known = self._read("point", "source_epoch", "end_lsn")
        if not known.num_rows:
            raise UsageError(
                f"{self.warehouse} holds no cut yet.", "Wait for the pipeline's first one, or name the warehouse."
            )
        epoch = pc.max(known["source_epoch"]).as_py() if source_epoch is None else source_epoch
        known = known.filter(pc.field("source_epoch") == epoch)
        fitting = known if at == "latest" else known.filter(pc.field("end_lsn") <= int(at))
        if not fitting.num_rows:
            oldest = pc.min(known["end_lsn"]).as_py()
            kept = f"the oldest is at {Lsn(oldest)}" if oldest is not None else "there is none of that epoch"
            raise CutExpired(
                f"No cut at or before {at} of source epoch {epoch} is kept; {kept}.",
                "pipeline.cuts_kept_hours says how long cuts are kept.",
            )
        return self._row(pc.max(fitting["point"]).as_py())

    def versions(self) -> dict[str, list[int]]:
        """Return, per table, the versions that cuts list, oldest first: those must stay readable."""
        table, found = self._open(), pa.table({"name": pa.array([], pa.string()), "version": pa.array([], pa.int64())})
        if table is None:
            return {}
        for batch in table.to_pyarrow_dataset().to_batches(columns=["versions"]):
            listed = batch.column("versions")
            part = pa.table({"name": listed.keys, "version": listed.items})
            found = pa.concat_tables([found, part]).group_by(["name", "version"]).aggregate([])
        found = found.sort_by([("name", "ascending"), ("version", "ascending")])
        return {
            name: found.filter(pc.field("name") == name)["version"].to_pylist()
            for name in pc.unique(found["name"]).to_pylist()
        }

    def expire(self, before_us: int) -> int:
        """Remove the cuts that were written before a moment, but never the newest; return how many."""
        rows = self._read("point", "written_at")
        newest = pc.max(rows["point"]).as_py()
        is_old = pc.field("written_at") < pa.scalar(before_us, pa.int64()).cast(_TIME)
        old = rows.filter(is_old & (pc.field("point") != newest))["point"]
        table = self._open()
        if table is None or not len(old):
            return 0
        # Cuts are in the order of time but for a clock that was set back; those go with the last old one.
        table.delete(f"point <= {pc.max(old).as_py()} and point <> {newest}")
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
            self._check_owner(self._table)
        else:
            self._table.update_incremental()
        return self._table

    def _check_owner(self, table: DeltaTable) -> None:
        """Make sure that the cuts are those of this capture: their points are offsets in its log. Raises ForeignLog."""
        owner = table.metadata().name
        if self._app_id and owner and owner != self._app_id:
            self._table = None
            raise ForeignLog(
                f"{self.warehouse} holds the tables of {_prefix_of(owner)}, not of {_prefix_of(self._app_id)}.",
                "Two captures have a warehouse each: set pipeline.warehouse to another place (and pipeline.checkpoint, "
                f'if it is set), or capture.prefix to "{_prefix_of(owner)}".',
            )

    def _read(self, *names: str, point: int | None = None) -> pa.Table:
        table = self._open()
        if table is None:
            return SCHEMA.empty_table().select(list(names))
        filters = [("point", "=", point)] if point is not None else None
        return table.to_pyarrow_table(columns=list(names), filters=filters)

    def _row(self, point: int) -> CutRow:
        found = self._read(*SCHEMA.names, point=point).to_pylist()
        return max(map(_as_row, found), key=lambda row: len(row.versions))


def _prefix_of(app_id: str) -> str:
    return app_id.removeprefix("walstream/").removesuffix("/cuts")


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
