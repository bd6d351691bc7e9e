"""The audit itself: does the destination hold what the source holds?

Owns the order of things; the parts do the rest. Everything is compared at one LSN, L, while the source goes on:

    1  the destination is pinned at its last cut C
    2  the source is held still at L; L ≥ C, because what a cut tells has committed before
    3  the log is waited for until a commit point lies at or beyond L: then it holds all of [C, L)
    4  per table: the source's rows at L; the destination's rows at C and, from the log, what committed in [C, L)

Counts and hashes first; only where they differ are rows compared with rows. Invariant: `same` is said of a table only
when both sides were read whole at L and have the same number of rows and the same sum of hashes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from walstream import logs
from walstream.capture.snapshot_plan import TableName
from walstream.config import Config, TableMode
from walstream.errors import UsageError
from walstream.positions import Lsn
from walstream.spark.audit import differences
from walstream.spark.audit.destinations import Destination, open_destination
from walstream.spark.audit.fingerprint import fingerprint
from walstream.spark.audit.moment import Between, SourceAt, hold_still, wait_for_log
from walstream.spark.audit.report import Report, State, TableReport
from walstream.spark.audit.sides import Incomparable, bring
from walstream.spark.audit.table_rows import Described, Table, describe, read, reading_of
from walstream.spark.columns import col
from walstream.spark.failures import meaning
from walstream.spark.kept_tables import KeptTables
from walstream.spark.layouts import counterpart
from walstream.spark.points import PointLog
from walstream.spark.runner import log_address, options_of

log = logs.get(__name__)


def audit(
    config: Config,
    spark: SparkSession,
    *,
    tables: Collection[str] = (),
    keys_max: int = 20,
    timeout_s: float = 60.0,
    on_table: Callable[[TableReport], None] = lambda _: None,
) -> Report:
    """Compare the source with the destination: these tables, or all that are published and kept.

    At most `keys_max` differing keys of each kind are named. Raises UnhealthyError when the log does not reach the
    moment in time, UsageError for a table that is not among them, and what reading raises.
    """
    started_s = time.monotonic()
    location, prefix = log_address(config), config.capture.prefix
    kept = KeptTables(location, prefix, config.pipeline, config.streams)
    points = PointLog(location, prefix)
    destination = open_destination(spark, config)
    cut = destination.cut
    try:
        with hold_still(config.source.postgres, timeout_s) as source:
            kept.refresh()
            names = _wanted(source, kept, tables)
            between = wait_for_log(points, kept, source, cut, timeout_s)
            # A table may have been described while the log was waited for.
            kept.refresh()
            one = _Audit(config, spark, source, destination, between, kept, keys_max)
            reports = []
            for name in names:
                reports.append(one.compare(name))
                on_table(reports[-1])
        return Report(source.lsn, cut.end_lsn, cut.source_epoch, time.monotonic() - started_s, tuple(reports))
    finally:
        destination.close()
        points.close()


def _wanted(source: SourceAt, kept: KeptTables, tables: Collection[str]) -> list[str]:
    known = [name for name in source.tables if kept.is_kept(name)]
    if unknown := [name for name in tables if name not in known]:
        raise UsageError(
            f"{', '.join(unknown)}: no table of that name is published and kept.",
            f"Those that are: {', '.join(known) or 'none'}.",
        )
    return [name for name in known if not tables or name in tables]


class _Audit:
    """Compares the tables of one moment."""

    def __init__(
        self,
        config: Config,
        spark: SparkSession,
        source: SourceAt,
        destination: Destination,
        between: Between,
        kept: KeptTables,
        keys_max: int,
    ) -> None:
        self._spark = spark
        self._source = source
        self._destination = destination
        self._between = between
        self._kept = kept
        self._keys_max = keys_max
        self._options = options_of(log_address(config), config.capture.prefix)
        self._is_replica = config.pipeline.destination == "postgres"

    def compare(self, name: str) -> TableReport:
        """Compare one table."""
        mode: TableMode = "mirror" if self._is_replica else self._kept.mode(name)
        absent = self._absence(name)
        if absent is not None:
            return TableReport(name, mode, absent[0], note=absent[1])
        self._spark.sparkContext.setJobGroup(f"walstream/audit/{name}", f"{name}: audit at {self._source.lsn}")
        try:
            report = self._compared(name, mode)
        except Incomparable as error:
            return TableReport(name, mode, "incomparable", note=str(error))
        except Exception as error:
            raise meaning(error) from error
        log.info("table compared", table=name, state=report.state)
        return report

    def _absence(self, name: str) -> tuple[State, str] | None:
        """Return why a table cannot be compared, if the destination does not hold it at the cut."""
        cut = self._destination.cut
        if name in cut.stopped:
            return "stopped", cut.stopped[name]
        at = self._source.tables[name].member
        snapshot = self._between.snapshots.get((at.schema, at.table))
        if name not in cut.versions:
            if snapshot is None or Lsn.parse(snapshot.lsn) > cut.end_lsn:
                return "pending", "its snapshot is not finished, or not in the destination yet"
            return "missing", f"the destination does not list it at {cut.end_lsn}"
        if snapshot is not None and cut.snapshots.get(name) != snapshot.id:
            return "pending", "a newer snapshot of it is not in the destination yet"
        return None

    def _compared(self, name: str, mode: TableMode) -> TableReport:
        table = self._source.tables[name]
        described = describe(self._source.connection, table.relation)
        strings = self._destination.strings(described.version, self._kept.table(name).strings)
        columns = [column.name for column in table.relation.columns]
        reading = reading_of(TableName(*table.member[:2]), columns, table.row_filter, table.parts)
        source = read(self._spark, self._source.moment, Table(described, reading), strings)
        key = described.version.key
        held = self._destination.rows(name, described)
        brought = bring(held, mode, self._changes(name, described, strings), source.schema, key)
        try:
            theirs, ours = fingerprint(source, columns), fingerprint(brought.rows, columns)
            found = None
            if theirs != ours:
                found = differences.find(source, brought.rows, key, columns, self._keys_max)
        finally:
            brought.release()
        lacking = [column for column in columns if column not in held.names]
        note = f"not in the destination: {', '.join(lacking)}" if lacking else ""
        return TableReport(name, mode, "different" if found else "same", theirs, ours, found, note)

    def _changes(self, name: str, described: Described, strings: Collection[str]) -> DataFrame | None:
        """Return what committed between the cut and the LSN, under the source's names; None: nothing did."""
        if not self._between.rows.get(name):
            return None
        cut, newest = self._destination.cut, self._kept.table(name).version
        names = {
            column.name: other.name if (other := counterpart(column, described.version, newest)) is not None else None
            for column in described.version.columns
        }
        options = {
            **self._options,
            "table": name,
            "after": str(cut.point),
            "upto": str(self._between.upto),
            "schema_version": str(newest.version),
            "strings": ",".join(_quoted(names[one]) for one in strings if names[one] is not None),
        }
        options = {option: value for option, value in options.items() if value}
        changes = self._spark.read.format("walstream").options(**options).load()
        struct = described.version.struct(strings)
        chosen = [
            (f.lit(None) if other is None else col(other)).cast(struct[own].dataType).alias(own)
            for own, other in names.items()
        ]
        return changes.filter(
            (f.col("_source_epoch") == cut.source_epoch)
            & f.col("_snapshot").isNull()
            & (f.col("_commit_lsn") >= int(cut.end_lsn))
            & (f.col("_commit_lsn") < int(self._source.lsn))
        ).select(*chosen, "_op", "_source_epoch", "_commit_lsn", "_seq", "_ts", _unchanged(names).alias("_unchanged"))


def _unchanged(names: Mapping[str, str | None]) -> Column:
    """Return the columns that a change left out, by the source's names."""
    pairs = [f.lit(part) for own, other in names.items() if other is not None and own != other for part in (other, own)]
    if not pairs:
        return f.col("_unchanged")
    mapping = f.create_map(*pairs)
    return f.transform("_unchanged", lambda one: f.coalesce(mapping[one], one))


def _quoted(name: str | None) -> str:
    return '"' + (name or "").replace('"', '""') + '"'
