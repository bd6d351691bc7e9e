"""Which rows of a range belong to a table's step: those of the stream, or of the snapshot that the table is built from.

Owns that condition, said once for Spark and once for Arrow; refuses to know where rows come from. Sans-IO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class Belonging:
    """What belongs: changes of a source epoch; with a snapshot its rows, and the changes from its LSN on."""

    source_epoch: int
    snapshot: str | None = None
    snapshot_lsn: int = 0

    @property
    def sql(self) -> str:
        """The condition over the columns of changes."""
        of_stream = f"_snapshot IS NULL AND _source_epoch = {self.source_epoch}"
        if self.snapshot is None:
            return of_stream
        name = self.snapshot.replace("\\", "\\\\").replace("'", "\\'")
        return f"_snapshot = '{name}' OR ({of_stream} AND _commit_lsn >= {self.snapshot_lsn})"

    def mask(self, changes: pa.Table) -> Any:
        """Return, for each change, whether it belongs."""
        snapshot = changes.column("_snapshot")
        of_stream = pc.and_(pc.is_null(snapshot), pc.equal(changes.column("_source_epoch"), self.source_epoch))
        if self.snapshot is None:
            return pc.fill_null(of_stream, False)
        since = pc.and_(of_stream, pc.greater_equal(changes.column("_commit_lsn"), self.snapshot_lsn))
        return pc.or_(pc.fill_null(pc.equal(snapshot, self.snapshot), False), pc.fill_null(since, False))
