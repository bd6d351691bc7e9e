"""What the tables of the demonstration say: whether any cut tears a transaction, and how late rows came.

Owns those two questions; the comparison with the source is `walstream pipeline audit`'s. Reads Delta's files without
Spark: the answer should not hang on what wrote them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from walstream.demo.workload import TABLES
from walstream.spark.batches import CutRow
from walstream.spark.cuts import Cuts
from walstream.spark.warehouse import table_path


@dataclass(frozen=True)
class Verdict:
    """What was found over all cuts."""

    cuts: int
    torn: int
    """Cuts at which the tables contradict each other."""
    freshness_s: tuple[float, ...]
    """Per transfer since the first cut, from its insert to the cut that first shows it; sorted."""

    def freshness(self, share: float) -> float:
        """Return a quantile."""
        if not self.freshness_s:
            return float("nan")
        return self.freshness_s[min(len(self.freshness_s) - 1, int(share * len(self.freshness_s)))]


def judge(warehouse: str) -> Verdict:
    """Look at every cut that lists all tables."""
    cuts = [cut for cut in Cuts(warehouse).all() if set(TABLES) <= set(cut.versions)]

    @cache
    def total(table: str, column: str, version: int) -> Decimal:
        return pc.sum(_read(warehouse, table, version, column)[column]).as_py() or Decimal(0)

    def is_torn(cut: CutRow) -> bool:
        turnover = total("public.accounts", "turnover", cut.versions["public.accounts"])
        moved = total("public.transfers", "amount", cut.versions["public.transfers"])
        balance = total("public.accounts", "balance", cut.versions["public.accounts"])
        return turnover != 2 * moved or balance != total("public.accounts", "balance", first)

    first = cuts[0].versions["public.accounts"] if cuts else 0
    return Verdict(len(cuts), sum(map(is_torn, cuts)), tuple(sorted(_freshness(warehouse, cuts))))


def _freshness(warehouse: str, cuts: list[CutRow]) -> list[float]:
    """Return for each transfer since the first tables were there how long it took into them."""
    if not cuts:
        return []
    rows = _read(warehouse, "public.transfers", cuts[-1].versions["public.transfers"], "at", "_commit_lsn", "_seq")
    ends = [int(cut.end_lsn) for cut in cuts]
    found = []
    for row in rows.filter(pc.greater(rows["_seq"], 0)).to_pylist():
        # A cut holds what committed before its end: the first one that ends after the row is the one that shows it.
        number = bisect_right(ends, row["_commit_lsn"])
        if number < len(cuts) and row["at"].timestamp() * 1_000_000 >= cuts[0].written_at_us:
            found.append(cuts[number].written_at_us / 1_000_000 - row["at"].timestamp())
    return found


def _read(warehouse: str, table: str, version: int, *columns: str) -> Any:
    found: pa.Table = DeltaTable(table_path(warehouse, table), version=version).to_pyarrow_table(columns=list(columns))
    return found
