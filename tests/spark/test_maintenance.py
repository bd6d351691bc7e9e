"""Maintenance of a warehouse whose files are days old: what a cut lists can be read as long as the cut is kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from walstream.config import load
from walstream.errors import WarehouseFailed
from walstream.positions import Lsn
from walstream.processes import free_port
from walstream.spark.batches import CutRow
from walstream.spark.cuts import Cuts
from walstream.spark.maintenance import Maintenance
from walstream.spark.runner import run
from walstream.spark.warehouse import cuts_path, table_path
from walstream.spark.writers import Writer, open_writer

HOUR = 3600.0
TABLE = "public.idle"


class Warehouse:
    """A table, its cuts, and a clock that makes everything on the disk older."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self.root = str(folder)
        self.table = Path(table_path(self.root, TABLE))
        self.cuts = Cuts(self.root, "w")
        self.writer = writer
        self.point = 0
        self.hours = 0.0
        self.moved: dict[str, int] = {}

    def write(self, *values: int, **more: Any) -> int:
        write_deltalake(str(self.table), pa.table({"id": list(values)}), mode="append", **more)
        return self.version

    @property
    def version(self) -> int:
        return DeltaTable(str(self.table)).version()

    @property
    def oldest(self) -> int:
        """The first version that the log still has anything of."""
        return min(int(file.name[:20]) for file in (self.table / "_delta_log").glob("0*"))

    def now(self) -> float:
        return time.time() + self.hours * HOUR

    def cut(self, version: int) -> int:
        """Record a cut that lists a version of the table, written now."""
        self.point += 1
        row = CutRow(self.point, 1, Lsn(self.point * 10), 1, {TABLE: version}, {TABLE: "s"})
        # Its clock is the real one; what was written before is made older instead.
        assert self.cuts.record(row, self.now)
        return self.point

    def later(self, hours: float) -> None:
        """Let time pass, for the table: its files become older. Cuts are told the time."""
        self.hours += hours
        for file in self.table.rglob("*"):
            if file.is_file():
                at = file.stat().st_mtime - hours * HOUR
                os.utime(file, (at, at))

    def maintain(self, *, is_inside: bool = True) -> None:
        """Maintain, within the pipeline, which hears of new versions, or beside it, from a process of its own."""
        moved = self.moved.__setitem__ if is_inside else lambda _table, _version: None
        cuts = self.cuts if is_inside else Cuts(self.root, "w")
        report = Maintenance(cuts, self.writer, kept_hours=24, moved=moved).run(now=self.now)
        assert report.failures == 0

    def check(self) -> None:
        """See that every cut that is kept can be read."""
        for row in self.cuts.all():
            table = DeltaTable(str(self.table), version=row.versions[TABLE])
            assert all(Path(uri).exists() for uri in table.file_uris()), f"cut {row.point}"


@pytest.fixture
def warehouse(tmp_path: Path, spark: SparkSession) -> Warehouse:
    return Warehouse(tmp_path / "warehouse", open_writer("deltalake", spark))


def test_a_cut_of_minutes_ago_of_a_table_that_was_idle_for_days(warehouse: Warehouse) -> None:
    warehouse.write(1)
    warehouse.cut(warehouse.write(2))
    warehouse.maintain()
    for _ in range(5):
        warehouse.later(12)
        warehouse.cut(warehouse.moved[TABLE])
        warehouse.maintain()
        warehouse.check()
    listed = warehouse.cut(warehouse.moved[TABLE])
    warehouse.cut(warehouse.write(3))
    warehouse.maintain()
    assert listed in {row.point for row in warehouse.cuts.all()}
    warehouse.check()


def test_maintenance_beside_a_running_pipeline_that_does_not_hear_of_new_versions(warehouse: Warehouse) -> None:
    for number in range(8):
        stale = warehouse.write(number)
    warehouse.cut(stale)
    # It is compacted, by a process of its own, and the pipeline goes on to list the version that it knows.
    for _ in range(6):
        warehouse.maintain(is_inside=False)
        assert warehouse.version > stale
        warehouse.cut(stale)
        warehouse.check()
        warehouse.later(24)
    warehouse.cut(warehouse.write(9))
    warehouse.maintain(is_inside=False)
    warehouse.check()


def test_the_log_does_not_grow_for_ever(warehouse: Warehouse) -> None:
    for number in range(60):
        version = warehouse.write(number, configuration={"delta.checkpointInterval": "10"} if number == 0 else None)
        warehouse.cut(version)
        warehouse.later(1)
    warehouse.maintain()
    warehouse.check()
    kept = min(row.versions[TABLE] for row in warehouse.cuts.all())
    assert 30 <= kept <= 40
    assert kept - 10 <= warehouse.oldest <= kept
    removed = warehouse.oldest
    warehouse.maintain()
    warehouse.check()
    assert warehouse.oldest == removed
    assert DeltaTable(str(warehouse.table)).to_pyarrow_table().num_rows == 60


def test_commits_leave_the_log_alone(warehouse: Warehouse) -> None:
    """Delta trims a log by the age of its files when it writes a checkpoint of it."""
    warehouse.cut(warehouse.write(1, configuration={"delta.checkpointInterval": "5"}))
    warehouse.maintain()
    listed = warehouse.version
    warehouse.cut(listed)
    warehouse.later(24 * 60)
    warehouse.cut(listed)
    for number in range(12):
        warehouse.write(number)
    warehouse.check()


def broken(warehouse: Warehouse) -> None:
    """Put into the log of the cuts what nobody can read."""
    folder = Path(cuts_path(warehouse.root)) / "_delta_log"
    (folder / f"{len(list(folder.glob('*.json'))):020}.json").write_text("{not JSON")


def test_cuts_that_cannot_be_maintained_end_nothing(warehouse: Warehouse) -> None:
    warehouse.cut(warehouse.write(1))
    broken(warehouse)
    report = Maintenance(Cuts(warehouse.root, "w"), warehouse.writer, kept_hours=24).run(now=warehouse.now)
    assert (report.failures, report.tables) == (1, 0)
    assert warehouse.version == 0


def test_what_is_wrong_with_the_cuts_ends_a_run_with_an_error_that_says_so(
    warehouse: Warehouse, spark: SparkSession
) -> None:
    warehouse.cut(warehouse.write(1))
    broken(warehouse)
    # The warehouse is asked before the log, which is not there.
    given = {"capture.bootstrap": f"127.0.0.1:{free_port()}", "capture.prefix": "w"}
    config = load(None, {}, {**given, "pipeline.warehouse": warehouse.root}).config
    with pytest.raises(WarehouseFailed, match="Delta's log of a table failed"):
        run(config, spark, lambda: False)
