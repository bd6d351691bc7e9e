"""The offset of a streaming query: a commit point, as text in Spark's checkpoint.

Owns its form; refuses to know the log. Spark compares offsets as text, so keys are sorted and nothing that may change
for one point is in it. The totals are those of the point's own record: the difference of two offsets is the number of
rows and bytes between them, so admission and lag need no counting. Sans-IO.

    {"bytes_total": 4711, "end_lsn": "16/B374D848", "point": 12, "rows_total": 42}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from walstream.capture.commit_points import Point
from walstream.errors import UsageError
from walstream.positions import ZERO, Lsn
from walstream.spark.options import FROM_THE_BEGINNING


class PointOffset(NamedTuple):
    """A commit point, or the beginning."""

    point: int
    """Offset of its record in the commits topic."""
    end_lsn: Lsn
    rows_total: int
    bytes_total: int

    @classmethod
    def of(cls, point: Point) -> PointOffset:
        """Return the offset that stands for a point."""
        return cls(point.offset, point.end_lsn, point.rows_total, point.bytes_total)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> PointOffset:
        """Read what Spark hands back. Raises UsageError."""
        try:
            return cls(
                int(given["point"]), Lsn.parse(given["end_lsn"]), int(given["rows_total"]), int(given["bytes_total"])
            )
        except (KeyError, TypeError, ValueError, UsageError):
            raise UsageError(
                f"{given!r} is not an offset of this source.",
                "The checkpoint belongs to another query: take a new one.",
            ) from None

    def written(self) -> dict[str, int | str]:
        """Return what Spark keeps."""
        return {
            "bytes_total": self.bytes_total,
            "end_lsn": str(self.end_lsn),
            "point": self.point,
            "rows_total": self.rows_total,
        }


BEGINNING = PointOffset(FROM_THE_BEGINNING, ZERO, 0, 0)
"""Before the first point of a log that has lost nothing."""
