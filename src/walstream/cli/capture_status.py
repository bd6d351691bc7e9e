"""The LSN ladder as `walstream capture status` tells it: what PostgreSQL says now, and what capture said last.

Owns putting the two together; `read_ladder` brings the one, `ask` the other. A rung is an LSN and its distance from the
end of the server's WAL. Seconds are known only where something is known to be late by its commit time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from walstream.capture.ladder import LadderRecord
from walstream.config import Config, PostgresConfig
from walstream.positions import Lsn
from walstream.postgres import address, catalogue, session

SILENT_MS = 10_000
"""A capture that runs writes its ladder every second; after this long it is not running, or the log stands still."""

MEANINGS = {
    "server end": "the end of PostgreSQL's WAL",
    "sent": "decoded and sent",
    "received": "received whole by capture",
    "durable": "durable in the log, with its commit point",
    "confirmed": "PostgreSQL may forget what is before",
}


class Server(NamedTuple):
    """What PostgreSQL says."""

    end: Lsn
    slot: catalogue.SlotFacts | None
    sent: Lsn | None


def ask(config: PostgresConfig) -> Server:
    """Ask PostgreSQL. Raises UnreachableError, RefusedError."""
    with session.connect(address.dsn(config)) as connection:
        slot = catalogue.slot_facts(connection, config.slot_name)
        row = None
        if slot is not None and slot.active_pid is not None:
            with session.named("asking what was sent"):
                row = connection.execute(
                    "select sent_lsn::text from pg_stat_replication where pid = %s", [slot.active_pid]
                ).fetchone()
        sent = Lsn.parse(row[0]) if row and row[0] else None
        return Server(catalogue.wal_end(connection), slot, sent)


def put_together(config: Config, record: LadderRecord | None, server: Server | None, now_ms: int) -> dict[str, Any]:
    """Return the whole as plain values."""
    age_ms = None if record is None else max(0, now_ms - record.at_ms)
    return {
        "state": _state(config.source.postgres, record, server, age_ms),
        "prefix": config.capture.prefix,
        "slot": config.source.postgres.slot_name,
        "instance": record.instance if record else None,
        "gen": record.gen if record else None,
        "source_epoch": record.source_epoch if record else None,
        "rows_total": record.rows_total if record else None,
        "bytes_total": record.bytes_total if record else None,
        "at_ms": record.at_ms if record else None,
        "age_ms": age_ms,
        "active_pid": server.slot.active_pid if server and server.slot else None,
        "rungs": _rungs(record, server),
    }


def _state(config: PostgresConfig, record: LadderRecord | None, server: Server | None, age_ms: int | None) -> str:
    slot = server.slot if server else None
    if slot is not None and slot.invalidation_reason:
        return "lost"
    if record is None or age_ms is None:
        return "never run"
    if server is not None and slot is None:
        return "no slot"
    if slot is not None and slot.active_pid is None and config.engine == "streaming":
        # Whoever streams holds the slot; a poll takes hold of it for a moment only.
        return "stopped"
    return "running" if age_ms < SILENT_MS else "silent" if slot is not None and slot.active_pid else "stopped"


def _rungs(record: LadderRecord | None, server: Server | None) -> list[dict[str, Any]]:
    """Return the rungs from the top, as far as they are known, none above the one before it."""
    end = max(server.end if server else 0, record.server_end if record else 0)
    sent = max(server.sent or 0 if server else 0, record.sent if record else 0)
    known: list[tuple[str, int, int | None]] = []
    if end:
        known.append(("server end", end, 0))
    if record is not None:
        known += [("sent", sent, None), ("received", record.received, None), ("durable", record.durable, record.lag_ms)]
    if server is not None and server.slot is not None and server.slot.confirmed_flush is not None:
        known.append(("confirmed", server.slot.confirmed_flush, None))
    rungs = []
    for name, lsn, behind_ms in known:
        behind_bytes = max(0, end - lsn)
        rungs.append(
            {
                "rung": name,
                "lsn": str(Lsn(lsn)),
                "lsn_bytes": int(lsn),
                "behind_bytes": behind_bytes,
                "behind_ms": 0 if not behind_bytes else behind_ms,
            }
        )
    return rungs


def for_people(rung: dict[str, Any]) -> dict[str, Any]:
    """Return a rung with its time in words and what it means."""
    behind_ms = rung["behind_ms"]
    return {
        **rung,
        "seconds": None if behind_ms is None else f"{behind_ms / 1000:,.1f}",
        "meaning": MEANINGS[rung["rung"]],
    }
