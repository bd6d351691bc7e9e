"""The rule of capture/commit_points.py over whole columns: which records of a range belong to which point.

Owns the vectors of it; the rule itself is `Span.admits`, and a test holds the two against each other. The spans here
are of one partition, of one generation, and either all of the stream or one snapshot's; `planning.py` sees to that.
Sans-IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from walstream.capture.commit_points import Span
from walstream.errors import DataLoss
from walstream.positions import Lsn, TopicPartition

Numbers: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Spans as columns, ordered by offset; those of the stream do not overlap."""

    partition: TopicPartition
    gen: int
    snapshot: str | None
    """The snapshot whose rows they are; None: the stream's."""
    start: Numbers
    stop: Numbers
    rows: Numbers
    lsn_from: Numbers
    lsn_to: Numbers

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Spans:
        """Make columns of spans that belong together."""
        first = spans[0]
        assert {(span.partition, span.gen, span.snapshot) for span in spans} == {
            (first.partition, first.gen, first.snapshot)
        }, "spans of one partition, generation and kind"
        assert first.snapshot is None or len(spans) == 1, "a snapshot is one span"
        columns = zip(
            *((span.start, span.stop, span.rows, int(span.lsn_from), int(span.lsn_to)) for span in spans), strict=True
        )
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        return cls(first.partition, first.gen, first.snapshot, *arrays)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def rows_total(self) -> int:
        """Rows of all of them."""
        return int(self.rows.sum())

    def admit(self, offsets: Numbers, gens: Numbers, lsns: Numbers, is_ours: Mask) -> tuple[Mask, Numbers]:
        """Return which records belong, and to which span each.

        `is_ours` tells for each record whether it is of the stream, or of the snapshot, as the spans are.
        """
        index = np.searchsorted(self.stop, offsets, side="right")
        # Beyond the last span: any will do, the comparison of offsets refuses it.
        index = np.minimum(index, len(self) - 1)
        mask = (self.start[index] <= offsets) & (offsets < self.stop[index]) & (gens == self.gen) & is_ours
        if self.snapshot is None:
            mask &= (self.lsn_from[index] <= lsns) & (lsns < self.lsn_to[index])
        return mask, index

    def counts(self, mask: Mask, index: Numbers) -> Numbers:
        """Return how many records of each span there are."""
        return np.bincount(index[mask], minlength=len(self)).astype(np.int64)

    def check(self, counted: Numbers, log_start: int) -> None:
        """Compare with what the points say. Raises RowsMissing, or DataLoss where the beginning was removed."""
        for number in np.flatnonzero(counted != self.rows):
            span, found = self.span(int(number)), int(counted[number])
            if found < span.rows and span.start < log_start:
                raise DataLoss(
                    f"{span.partition} begins at offset {log_start:,}, so that {span.rows - found:,} of the "
                    f"{span.rows:,} rows from {span.start:,} on are gone.",
                    "Retention has removed them: begin again with starting=earliest and a new checkpoint, "
                    "or take a new snapshot.",
                )
            span.check(found)

    def span(self, number: int) -> Span:
        """Return one of them."""
        return Span(
            self.partition,
            int(self.start[number]),
            int(self.stop[number]),
            int(self.rows[number]),
            self.gen,
            Lsn(int(self.lsn_from[number])),
            Lsn(int(self.lsn_to[number])),
            self.snapshot,
        )
