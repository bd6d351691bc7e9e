"""Running a pipeline: from a configuration to a query that runs until it is told to stop or something fails.

Owns the order in which the parts begin and end, and what becomes of a failure; everything else is done by the parts.
Starting again is always safe: what was not finished comes again, and what was is recognised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final

from pyspark.sql import SparkSession

from walstream import logs
from walstream.capture.kafka import LogAddress
from walstream.config import Config
from walstream.errors import WalstreamError
from walstream.ops.http import Page, json_page
from walstream.ops.http_thread import HttpThread
from walstream.ops.metrics import PipelineExporter
from walstream.spark.batches import CutRow
from walstream.spark.cuts import Cuts
from walstream.spark.destination import DeltaTables, Destination, Reader
from walstream.spark.failures import meaning
from walstream.spark.fetching import Address
from walstream.spark.kept_tables import KeptTables
from walstream.spark.maintenance import Maintenance, Report
from walstream.spark.options import KAFKA
from walstream.spark.pipeline import Pipeline, Query
from walstream.spark.progress import Progress, View
from walstream.spark.replica.state import replica_cut
from walstream.spark.replica.tables import open_replica
from walstream.spark.rereading import Points
from walstream.spark.rung import RungWriter
from walstream.spark.small.reading import SmallReads
from walstream.spark.warehouse import checkpoint_path
from walstream.spark.writers import open_writer

BACKOFF_S: Final = (0.5, 30.0)
"""The first pause between tries and the longest."""
STEADY_S: Final = 60.0
"""A query that lasted so long was a success: the next pause is the first one again."""

Stop = Callable[[], bool]

log = logs.get(__name__)


def run(
    config: Config,
    spark: SparkSession,
    stop: Stop,
    *,
    once: bool = False,
    retry: bool = False,
    progress: Progress | None = None,
    on_look: Callable[[View], None] = lambda _: None,
) -> None:
    """Run until `stop` says so; with `once`, until what is in the log now is in the tables.

    What fails is raised, or with `retry` tried again when that can help. `on_look` is told once a second how things
    stand, by another thread.
    """
    progress = progress or Progress()
    address = log_address(config)
    pause_s = BACKOFF_S[0]
    with ExitStack() as stack:
        if config.pipeline.http_listen:
            stack.enter_context(HttpThread(config.pipeline.http_listen, _pages(progress)))
        stack.enter_context(RungWriter(address, config.capture.prefix, progress.look, on_look))
        while True:
            started_s = time.monotonic()
            try:
                run_query(config, spark, stop, address, progress, once=once)
                return
            except WalstreamError as error:
                if not (retry and error.retryable) or stop():
                    raise
                if time.monotonic() - started_s > STEADY_S:
                    pause_s = BACKOFF_S[0]
                log.warning("query failed", error=str(error), again_after_s=pause_s)
            deadline = time.monotonic() + pause_s
            while time.monotonic() < deadline and not stop():
                time.sleep(0.05)
            if stop():
                return
            pause_s = min(pause_s * 2, BACKOFF_S[1])


def run_query(
    config: Config, spark: SparkSession, stop: Stop, address: Address, progress: Progress, *, once: bool = False
) -> None:
    """Run one streaming query to its end. Raises what ends it, as an error of walstream's own."""
    try:
        _run_query(config, spark, stop, address, progress, once=once)
    except Exception as error:
        told = meaning(error)
        raise told from (None if told is error else error)
    view = progress.look()
    log.info("stream ended", lsn=str(view.end_lsn), batches=view.batches, rows_total=view.rows_total)


def _run_query(
    config: Config, spark: SparkSession, stop: Stop, address: Address, progress: Progress, *, once: bool
) -> None:
    prefix, given = config.capture.prefix, config.pipeline
    options = options_of(address, prefix)
    tables = KeptTables(address, prefix, given, config.streams)
    reader = Reader(spark, options)
    with ExitStack() as stack:
        writer = open_writer(given.writer, spark) if given.destination == "delta" else None
        destination: Destination
        if writer is not None:
            destination = DeltaTables(
                spark,
                writer,
                given.warehouse,
                prefix,
                reader,
                tables.table,
                progress,
                parallel=given.parallel_tables_max,
                small=SmallReads(options, tables.versions_at, rows) if (rows := given.small_rows_max) else None,
            )
        else:
            destination = open_replica(
                spark, given.replica, prefix, reader, tables.table, progress, parallel=given.parallel_tables_max
            )
        stack.callback(destination.close)
        pipeline = Pipeline(
            destination,
            tables,
            Points(address, prefix, tables.name_of),
            progress,
            has_snapshots=config.capture.snapshot != "never",
        )
        maintenance = None
        if writer is not None:
            maintenance = Maintenance(
                Cuts(given.warehouse, prefix),
                writer,
                kept_hours=given.cuts_kept_hours,
                interval_s=given.maintenance_interval_minutes * 60,
                lock=pipeline.lock,
                key_of=lambda name: tables.table(name).version.key,
                moved=pipeline.moved,
                progress=progress,
            )
        Query(pipeline, progress, maintenance).run(
            spark,
            name=f"walstream-{prefix}",
            options={
                **options,
                "starting": "earliest",
                "maxRowsPerTrigger": str(given.batch_rows_max),
                "maxBytesPerTrigger": str(given.batch_bytes_max),
            },
            checkpoint=given.checkpoint or checkpoint_path(given.warehouse),
            interval_ms=given.trigger_interval_ms,
            stop=stop,
            once=once,
        )


def last_cut(config: Config) -> CutRow | None:
    """Return where the tables of a configuration stand. Raises UnreachableError for a replica that does not answer."""
    if config.pipeline.destination == "delta":
        return Cuts(config.pipeline.warehouse, config.capture.prefix).last()
    return replica_cut(config.pipeline.replica, config.capture.prefix)


def maintain(config: Config, spark: SparkSession, stop: Stop = lambda: False) -> Report:
    """Do the maintenance of a warehouse once."""
    given = config.pipeline
    address = log_address(config)
    tables = KeptTables(address, config.capture.prefix, given, config.streams)
    tables.refresh()
    maintenance = Maintenance(
        Cuts(given.warehouse, config.capture.prefix),
        open_writer(given.writer, spark),
        kept_hours=given.cuts_kept_hours,
        key_of=lambda name: tables.table(name).version.key,
    )
    return maintenance.run(stop)


def log_address(config: Config) -> Address:
    """Return where the log is: where capture writes it. Raises ConfigError."""
    given = LogAddress.of(config.capture)
    return Address(given.bootstrap, dict(given.security))


def options_of(address: Address, prefix: str) -> dict[str, str]:
    """Return the options by which the data source finds the log."""
    security = {f"{KAFKA}{name}": value for name, value in address.security.items()}
    return {"bootstrap": address.bootstrap, "prefix": prefix, **security}


def _pages(progress: Progress) -> Mapping[str, Callable[[], Page]]:
    exporter = PipelineExporter(progress)

    def metrics() -> Page:
        return Page(200, exporter.render(), "text/plain; version=0.0.4; charset=utf-8")

    def health() -> Page:
        view = progress.look()
        stopped = {table.name: table.reason for table in view.tables if table.state == "stopped"}
        document = {
            "status": "degraded" if stopped else "ok",
            "applied_lsn": str(view.end_lsn),
            "source_epoch": view.source_epoch,
            "batches": view.batches,
            "rows_total": view.rows_total,
            "freshness_ms": view.freshness_ms,
            "lag_rows": view.lag_rows,
            "tables": len(view.tables),
            "stopped": stopped,
        }
        return json_page(200, document)

    return {"/metrics": metrics, "/health": health}
