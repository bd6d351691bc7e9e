"""A pipeline over a captured database: run to the end or in a thread, and what its tables hold at a cut."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Self

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from spark.conftest import Captured
from waiting import wait_until
from walstream.config import Config
from walstream.positions import Lsn
from walstream.spark import read_at
from walstream.spark.batches import CutRow
from walstream.spark.cut_tables import Cut
from walstream.spark.cuts import Cuts
from walstream.spark.progress import Progress, View
from walstream.spark.runner import run
from walstream.spark.warehouse import table_path

TIMEOUT_S = 300.0


class Piped:
    """A pipeline of a captured database, its warehouse, and the truth to compare it with."""

    def __init__(self, captured: Captured, config: Config | None = None) -> None:
        self.captured = captured
        self.config = config or captured.config
        self.warehouse = self.config.pipeline.warehouse
        self.cuts = Cuts(self.warehouse)

    @property
    def spark(self) -> SparkSession:
        return self.captured.spark

    def once(self, *, wait: bool = True) -> View:
        """Bring the tables to where the source is, and say how that went."""
        if wait:
            self.captured.wait()
        progress = Progress()
        run(self.config, self.spark, lambda: False, once=True, progress=progress)
        return progress.look()

    def running(self) -> Running:
        return Running(self)

    def at(self, lsn: Lsn | str = "latest") -> Cut:
        return read_at(self.spark, lsn, warehouse=self.warehouse)

    def last(self) -> CutRow:
        found = self.cuts.last()
        assert found is not None, "there is no cut"
        return found

    def rows(self, table: str, columns: Iterable[str], lsn: Lsn | str = "latest") -> list[tuple[Any, ...]]:
        """What a table holds at a cut, in order."""
        frame = self.at(lsn).tables[table].select(*columns)
        return sorted((tuple(row) for row in frame.collect()), key=str)

    def check(self, table: str, columns: Iterable[str]) -> int:
        """Compare a table with the source, and return how many rows it has."""
        columns = list(columns)
        truth = sorted(self.captured.execute(f"select {', '.join(columns)} from {table}"), key=str)
        assert self.rows(table, columns) == truth
        return len(truth)

    def delta(self, table: str) -> DeltaTable:
        return DeltaTable(table_path(self.warehouse, table))

    def versions(self, *tables: str) -> dict[str, int]:
        return {table: self.delta(table).version() for table in tables}


def listed(warehouse: str, row: CutRow, table: str, *columns: str) -> list[dict[str, Any]]:
    """What a table holds at the version that a cut lists, read without Spark: for looking at very many cuts."""
    found = DeltaTable(table_path(warehouse, table), version=row.versions[table])
    rows: list[dict[str, Any]] = found.to_pyarrow_table(columns=list(columns)).to_pylist()
    return rows


class Running:
    """A pipeline in a thread. A context manager: leaving it stops it gracefully, and raises what it failed with."""

    def __init__(self, piped: Piped) -> None:
        self._piped = piped
        self.progress = Progress()
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            run(self._piped.config, self._piped.spark, self._stop.is_set, progress=self.progress)
        except BaseException as error:
            self.failure = error

    def wait_for(self, lsn: Lsn, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a cut is at or beyond an LSN."""

        def is_there() -> bool:
            if self.failure is not None:
                raise self.failure
            last = self._piped.cuts.last()
            return last is not None and last.end_lsn >= lsn

        wait_until(is_there, f"a cut at {lsn}", timeout_s=timeout_s)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the pipeline does not stop"
        if kind is None and self.failure is not None:
            raise self.failure
