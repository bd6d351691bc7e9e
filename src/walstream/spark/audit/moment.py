"""The moment at which an audit compares: the source held still at an LSN, and the log read up to it.

Owns taking the moment and waiting for the log; refuses to know rows. A temporary slot gives the LSN and a snapshot in
which everything that committed before it is, and nothing else; the slot itself is gone at once, the snapshot stays for
as long as the audit takes. The source goes on, and is not asked to wait for anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import psycopg

from walstream import logs
from walstream.capture.commit_points import Point, TableSnapshot
from walstream.config import PostgresConfig
from walstream.errors import HistoryForked, UnhealthyError
from walstream.positions import Lsn
from walstream.postgres import address
from walstream.postgres.session import ReplicationSession, named
from walstream.postgres.snapshot import (
    ConsistentPoint,
    TableAtPoint,
    memberships,
    patient_session,
    tables_at,
    temporary_slot_name,
)
from walstream.spark.audit.table_rows import Moment
from walstream.spark.batches import CutRow
from walstream.spark.kept_tables import KeptTables
from walstream.spark.points import PointLog
from walstream.spark.types import table_name

POLL_S: Final = 0.2
APPLICATION_NAME: Final = "walstream audit"

log = logs.get(__name__)


class SourceAt(NamedTuple):
    """The source, held still."""

    lsn: Lsn
    moment: Moment
    system_id: str
    connection: psycopg.Connection[Any]
    """A session that sees the moment, for questions to the catalogue."""
    tables: Mapping[str, TableAtPoint]
    """What is published, by the names that options have for tables."""


class Between(NamedTuple):
    """What the log has from the destination's cut up to the LSN."""

    upto: int
    """Offset of the first commit point that lies at or beyond the LSN."""
    rows: Mapping[str, int]
    """Changes per table, up to that point."""
    snapshots: Mapping[tuple[str, str], TableSnapshot]
    """Every table whose snapshot is finished by now."""


@contextmanager
def hold_still(config: PostgresConfig, timeout_s: float) -> Iterator[SourceAt]:
    """Take a consistent point of the source and keep it while the block runs. Raises SourceNotReady in time."""
    dsn = address.dsn(config)
    with ReplicationSession(dsn, application_name=APPLICATION_NAME) as session:
        system_id = session.identify_system().system_identifier
        slot = session.create_slot(temporary_slot_name(), temporary=True, snapshot="export", timeout_s=timeout_s)
        point = ConsistentPoint.of_slot(dsn, slot)
    try:
        with patient_session(dsn) as connection:
            with named("importing the snapshot of a slot"):
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                connection.execute(f"SET TRANSACTION SNAPSHOT '{point.snapshot_name}'".encode())
            members = {member[:2] for member in memberships(connection, config.publication_name)}
            tables = tables_at(connection, config.publication_name, members)
            log.info("source held still", lsn=str(point.lsn), tables=len(tables))
            moment = Moment(dsn, point.snapshot_name)
            found = {table_name(*table.member[:2]): table for table in tables}
            yield SourceAt(point.lsn, moment, system_id, connection, found)
    finally:
        point.close()


def wait_for_log(points: PointLog, kept: KeptTables, source: SourceAt, cut: CutRow, timeout_s: float) -> Between:
    """Wait until the log holds everything before the LSN; return what it has since the cut.

    Raises UnhealthyError when it does not come that far in time, HistoryForked when it is of another server.
    """
    deadline = time.monotonic() + timeout_s
    while not _has_reached(last := points.last(), source, cut):
        if time.monotonic() > deadline:
            reached = "nothing" if last is None else f"what is before {last.end_lsn}"
            raise UnhealthyError(
                f"The source is at {source.lsn}; after {timeout_s:g} seconds the log still holds {reached}.",
                "Does `walstream capture run` run? `walstream capture status` tells how far it is.",
            )
        time.sleep(POLL_S)
    assert last is not None, "it has been reached"
    if cut.end_lsn > source.lsn:
        raise HistoryForked(
            f"The destination is at {cut.end_lsn}, beyond the source at {source.lsn}.",
            "It was filled from another server, or this one has gone back.",
        )
    rows: dict[str, int] = {}
    upto = cut.point
    for point in points.after(cut.point, last.offset + 1):
        upto = point.offset
        for span in point.spans:
            name = kept.name_of(span.partition.topic)
            if name is not None and span.snapshot is None:
                rows[name] = rows.get(name, 0) + span.rows
        if point.end_lsn >= source.lsn:
            break
    return Between(upto, rows, last.snapshots)


def _has_reached(last: Point | None, source: SourceAt, cut: CutRow) -> bool:
    if last is None:
        return False
    if last.origin is not None and last.origin.system_id != source.system_id:
        raise HistoryForked(
            f"The log is of the server {last.origin.system_id}; this source is {source.system_id}.",
            "Check source.postgres and capture.prefix.",
        )
    if last.end_lsn < source.lsn:
        return False
    if last.source_epoch != cut.source_epoch:
        raise UnhealthyError(
            f"The log is in source epoch {last.source_epoch}, the destination in {cut.source_epoch}.",
            "Wait until the pipeline has followed.",
        )
    return True
