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
    elif said.get("status") != "ok":
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


def _fault(said: dict[str, Any]) -> UnhealthyError:
    faults = [f"{fault['partition']} takes no writes: {fault['reason']}" for fault in said.get("offline", [])]
    for fault in said.get("quarantined", []):
        ranges = ", ".join(f"{first}-{last}" for first, last in fault["offsets"])
        faults.append(f"{fault['partition']} holds damaged records, which are not served: offsets {ranges}")
    count = said.get("partitions_offline", 0) + said.get("partitions_quarantined", 0)
    more = [f"… and {count - len(faults)} more"] if count > len(faults) else []
    listed = "".join(f"\n  {fault}" for fault in [*faults, *more])
    return UnhealthyError(f"{plural(count, 'partition')} of the node not well.{listed}", "Its log says more.")
