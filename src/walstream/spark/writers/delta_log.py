"""The log of a Delta table: how far it is, what it holds, who has committed what.

Owns reading it, with `deltalake`, for both writers, and throwing away what it does not need any more; refuses to know
rows. One of these is the log at one moment: it is read when it is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import ceil
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyspark.sql import types as t

from walstream.spark.writers.files import TableFiles, checkpoint_name
from walstream.spark.writers.pruning import FileFacts

UNTRIMMED: Final = {"delta.enableExpiredLogCleanup": "false"}
"""Delta would remove what is old from the log of a table, whatever may still be read from it."""
REMOVED_KEPT: Final = "delta.deletedFileRetentionDuration"


class DeltaLog:
    """The log of the table in a folder, if there is one."""

    def __init__(self, files: TableFiles) -> None:
        try:
            self._table: DeltaTable | None = DeltaTable(files.delta)
        except TableNotFoundError:
            self._table = None
        self._files = files
        self.version = None if self._table is None else self._table.version()

    @property
    def table(self) -> DeltaTable:
        """The table, which must be there."""
        assert self._table is not None, "only a table that is there is asked"
        return self._table

    @cached_property
    def schema(self) -> t.StructType:
        """The table's schema, metadata included."""
        return t.StructType.fromJson(json.loads(self.table.schema().to_json()))

    @cached_property
    def files(self) -> list[FileFacts]:
        """The files of this version."""
        return [_facts(row) for row in pa.table(self.table.get_add_actions(flatten=True)).to_pylist()]

    @property
    def has_ntz(self) -> bool:
        """Whether the table may have times without a zone."""
        return "timestampNtz" in (self.table.protocol().reader_features or [])

    def applied(self, app_id: str) -> int | None:
        """Return the last version that an application has committed."""
        return None if self._table is None else self._table.transaction_version(app_id)

    def vacuum(self, keep_versions: Sequence[int], retention_hours: float) -> int:
        """Delete files that no version of the last hours and none of these needs, uncommitted ones as well."""
        if self.version is None:
            return 0
        deleted = self.table.vacuum(
            retention_hours=ceil(retention_hours),
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
            keep_versions=[kept for kept in keep_versions if kept <= self.version],
        )
        return len(deleted)

    def remember(self, hours: int) -> None:
        """Have the log know for so long what was removed from the table, and be trimmed by nobody else."""
        wanted = {**UNTRIMMED, REMOVED_KEPT: f"interval {hours} hours"}
        known = self.table.metadata().configuration
        if any(known.get(name) != value for name, value in wanted.items()):
            self.table.alter.set_table_properties(wanted)
            self.table.update_incremental()
            self._files.sync_commit(self.table.version())

    def trim(self, oldest: int) -> int:
        """Write a checkpoint, and remove what only versions before `oldest` are read from; return how many files."""
        version, found = self.table.version(), self._files.log_files()
        # Other kinds of checkpoints are read by whoever opens the table, but nothing is removed because of them.
        checkpoints = {at for at, name in found if name == checkpoint_name(at)}
        if version not in checkpoints:
            self.table.create_checkpoint()
        begin = max((at for at in checkpoints if at <= oldest), default=0)
        old = [(at, name) for at, name in found if at < begin]
        if old:
            self._files.sync_log(checkpoint_name(begin))
            # Everything that stays is read from there: it had better be right.
            DeltaTable(self._files.delta, version=oldest).file_uris()
            self._files.remove_log_files(name for _, name in sorted(old))
        return len(old)


def needs_ntz(fields: Iterable[t.StructField]) -> bool:
    """Whether there are times without a zone among these columns, which not every reader of Delta knows."""
    return any("timestamp_ntz" in field.dataType.simpleString() for field in fields)


def _facts(row: dict[str, Any]) -> FileFacts:
    names = [name.removeprefix("min.") for name in row if name.startswith("min.")]
    bounds = {name: (row[f"min.{name}"], row.get(f"max.{name}")) for name in names}
    nulls = {name.removeprefix("null_count."): value for name, value in row.items() if name.startswith("null_count.")}
    return FileFacts(row["path"], row["size_bytes"], row["num_records"] or 0, bounds, nulls)
