"""What an audit found: per table and for the whole, as plain values.

Owns the words and the sums; refuses to know how anything was found. A table is in one of these states, and only the
first is good:

    same            both sides have the same rows
    different       they do not; `differences` says in what
    missing         it is published, its snapshot is in the log, and the destination does not list it
    pending         its snapshot is not finished, or the destination has not come that far
    stopped         the pipeline has given it up, and said why
    incomparable    what the destination keeps of it does not tell its rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from walstream.config import TableMode
from walstream.positions import Lsn
from walstream.spark.audit.differences import Differences
from walstream.spark.audit.fingerprint import Fingerprint

State = Literal["same", "different", "missing", "pending", "stopped", "incomparable"]
GOOD: Final[State] = "same"


@dataclass(frozen=True, slots=True)
class TableReport:
    """What came of one table."""

    table: str
    mode: TableMode
    state: State
    source: Fingerprint | None = None
    destination: Fingerprint | None = None
    differences: Differences | None = None
    note: str = ""
    """Why it was not compared, or what else there is to know."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values; a hash is text, because it is larger than what JSON readers keep exactly."""
        counts = self.differences.counts if self.differences is not None else {}
        named = self.differences.named if self.differences is not None else ()
        return {
            "table": self.table,
            "mode": self.mode,
            "state": self.state,
            "source_rows": self.source.rows if self.source is not None else None,
            "destination_rows": self.destination.rows if self.destination is not None else None,
            "source_hash": str(self.source.hash) if self.source is not None else None,
            "destination_hash": str(self.destination.hash) if self.destination is not None else None,
            "differences": self.differences.total if self.differences is not None else 0,
            "missing_rows": counts.get("missing", 0),
            "extra_rows": counts.get("extra", 0),
            "changed_rows": counts.get("changed", 0),
            "duplicate_keys": counts.get("duplicate", 0),
            "note": self.note,
            "keys": [{"kind": one.kind, "key": one.key, "columns": list(one.columns)} for one in named],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What came of an audit."""

    lsn: Lsn
    """The moment at which both sides were compared."""
    cut_lsn: Lsn
    """The destination's cut, to which the log's changes up to `lsn` were added."""
    source_epoch: int
    seconds: float
    tables: tuple[TableReport, ...]

    @property
    def is_same(self) -> bool:
        """Whether every table was compared, at least one, and nothing differs."""
        return bool(self.tables) and all(table.state == GOOD for table in self.tables)

    @property
    def tables_compared(self) -> int:
        """Tables whose rows were read on both sides."""
        return sum(table.source is not None for table in self.tables)

    @property
    def rows_compared(self) -> int:
        """Rows of the source that were compared."""
        return sum(table.source.rows for table in self.tables if table.source is not None)

    @property
    def differences(self) -> int:
        """Rows that differ."""
        return sum(table.differences.total for table in self.tables if table.differences is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "state": "same" if self.is_same else "different" if self.tables else "nothing compared",
            "lsn": str(self.lsn),
            "cut_lsn": str(self.cut_lsn),
            "source_epoch": self.source_epoch,
            "seconds": round(self.seconds, 3),
            "tables_compared": self.tables_compared,
            "rows_compared": self.rows_compared,
            "differences": self.differences,
            "tables": [table.as_dict() for table in self.tables],
        }
