"""`walstream status`: does the node answer, and is it well?

Asks twice: over the Kafka protocol what clients can see, over HTTP what the node says of itself. Exit code 3: nobody
answers. Exit code 4: somebody does, and reports partitions that take no writes or hold damaged records.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Annotated, Any

import typer
from confluent_kafka.admin import ClusterMetadata

from walstream.cli.client import Client
from walstream.cli.options import command
from walstream.cli.output import Column, Output, plural
from walstream.errors import UnhealthyError, UnreachableError

HTTP_PORT = 9644

_COLUMNS = (
    Column("state", "state", "state"),
    Column("address", "address"),
    Column("cluster_id", "cluster"),
    Column("nodes", "nodes"),
    Column("topics", "topics", "number"),
    Column("partitions", "partitions", "number"),
    Column("version", "version"),
    Column("uptime", "up for"),
    Column("connections", "connections", "number"),
)


_CLUSTER_COLUMNS = (
    Column("node", "node"),
    Column("address", "address"),
    Column("role", "role"),
    Column("link", "link", "state"),
    Column("in_sync", "in sync"),
    Column("lag_records", "records behind", "number"),
    Column("lag_bytes", "bytes behind", "bytes"),
    Column("lag_seconds", "for"),
)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "status")(status)


def status(
    client: Client,
    output: Output,
    health: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            envvar="WALSTREAM_HTTP",
            help=f"Address of the health endpoint; otherwise port {HTTP_PORT} of the bootstrap host.",
            rich_help_panel="Connection",
        ),
    ] = None,
) -> None:
    """Tell whether the node answers and is well.

    Exits with 3 when nobody answers, with 4 when the node reports a fault.
    """
    found = client.metadata()
    said = _ask(health, client)
    item: dict[str, Any] = {
        "state": said.get("status", "unknown") if said else "unknown",
        "address": client.bootstrap,
        "cluster_id": found.cluster_id,
        "nodes": [{"id": node.id, "host": node.host, "port": node.port} for node in found.brokers.values()],
        "topics": sum(not name.startswith("__") for name in found.topics),
        "partitions": sum(len(topic.partitions) for topic in found.topics.values()),
    }
    if output.is_for_people:
        nodes = [f"{node.id} at {node.host}:{node.port}" for node in found.brokers.values()]
        more = {"uptime": _uptime(said), "version": said.get("version"), "connections": said.get("connections")}
        output.item({**item, **more, "nodes": nodes}, _COLUMNS if said else _COLUMNS[:6])
    else:
        output.item({**item, "health": said or None}, ())
    if not said:
        output.note("The health endpoint does not answer: name it with --http HOST:PORT.")
        return
    replicated = said.get("replication")
    if replicated is not None and output.is_for_people:
        output.rows("nodes", _cluster(found, replicated), _CLUSTER_COLUMNS, "The node knows no other.")
    if said.get("status") != "ok":
        raise _fault(said)


def _ask(address: str | None, client: Client) -> dict[str, Any]:
    """Return the node's own word, or nothing when its endpoint was only guessed and does not answer."""
    host = client.bootstrap.split(",")[0].rpartition(":")[0]
    url = f"http://{address or f'{host}:{HTTP_PORT}'}/health"
    try:
        with urllib.request.urlopen(url, timeout=client.timeout_s) as answer:
            return dict(json.load(answer))
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        if address is None:
            return {}
        cause = getattr(error, "reason", error)
        reason = getattr(cause, "strerror", None) or cause
        raise UnreachableError(f"The node answers, but its health endpoint {address} does not: {reason}.") from None


def _uptime(said: dict[str, Any]) -> str | None:
    seconds = said.get("uptime_seconds")
    return None if seconds is None else str(timedelta(seconds=int(seconds)))


def _cluster(found: ClusterMetadata, replicated: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each node, as the node that was asked sees it: how far behind it others are."""
    lags = {one["node_id"]: one for one in replicated["followers"]}
    up = {one["peer"] for one in replicated["links"] if one["state"] == "up"}
    rows = []
    for node in sorted(found.brokers.values(), key=lambda node: node.id):
        row: dict[str, Any] = {"node": node.id, "address": f"{node.host}:{node.port}"}
        row["role"] = "controller" if node.id == replicated["controller_id"] else ""
        if node.id == replicated["node_id"]:
            row["link"] = "asked"
        else:
            row["link"] = "up" if node.id in up else "down"
        lag = lags.get(node.id)
        if lag is not None:
            row["in_sync"] = f"{lag['partitions_in_sync']} of {lag['partitions']}"
            row |= {"lag_records": lag["lag_records"], "lag_bytes": lag["lag_bytes"]}
            row["lag_seconds"] = f"{lag['lag_seconds_max']:.1f} s" if lag["lag_seconds_max"] else ""
        rows.append(row)
    return rows


def _fault(said: dict[str, Any]) -> UnhealthyError:
    faults = [f"{fault['partition']} takes no writes: {fault['reason']}" for fault in said.get("offline", [])]
    for fault in said.get("quarantined", []):
        ranges = ", ".join(f"{first}-{last}" for first, last in fault["offsets"])
        faults.append(f"{fault['partition']} holds damaged records, which are not served: offsets {ranges}")
    replicated = said.get("replication", {})
    faults += [f"{name} has a replica that is not in sync" for name in replicated.get("under_replicated", [])]
    faults += [f"{name} has too few replicas in sync for acks=all" for name in replicated.get("below_min_isr", [])]
    faults += [f"{name} has no leader" for name in replicated.get("leaderless", [])]
    faults += [f"{one['partition']} is quarantined: {one['reason']}" for one in replicated.get("quarantined", [])]
    is_file_current = said.get("catalogue", {}).get("file_current", True)
    if not is_file_current:
        faults.append("topics.json may not have the topics in force: the node writes it again once the disk takes it")
    count = sum(said.get(f"partitions_{name}", 0) for name in ("offline", "quarantined")) + (not is_file_current)
    count += sum(
        replicated.get(f"partitions_{name}", 0)
        for name in ("under_replicated", "below_min_isr", "leaderless", "quarantined")
    )
    more = [f"… and {count - len(faults)} more"] if count > len(faults) else []
    listed = "".join(f"\n  {fault}" for fault in [*faults, *more])
    return UnhealthyError(f"{plural(count, 'fault')} of the node's partitions.{listed}", "Its log says more.")
