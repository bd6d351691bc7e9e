"""`walstream node`: runs a node in this process."""

from __future__ import annotations

import errno
import os
from typing import Annotated

import typer

from walstream import logs
from walstream.cli.options import Sources, command
from walstream.errors import UsageError

app = typer.Typer(help="Run a node.", no_args_is_help=True)


@command(app, "start")
def start(
    sources: Sources,
    listen: Annotated[str | None, typer.Option(help="Address for Kafka clients (node.listen).")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of the log (node.data).")] = None,
    http_listen: Annotated[str | None, typer.Option(help="Address of health and metrics (node.http_listen).")] = None,
) -> None:
    """Start a node and run it until SIGTERM or Ctrl-C; the first drains, the second stops at once."""
    loaded = sources.load({"node.listen": listen, "node.data": data, "node.http_listen": http_listen})
    logs.set_up(loaded.config.node.log_level, loaded.config.node.log_format)
    # Only here, so that the other commands start without the server.
    from walstream.node.server import run

    try:
        code = run(loaded.config)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        where = f"{loaded.config.node.listen} or {loaded.config.node.http_listen}"
        raise UsageError(
            f"The node cannot listen at {where}: {os.strerror(error.errno)}.",
            "Stop what listens there, or choose other addresses with --listen and --http-listen.",
        ) from None
    raise typer.Exit(code)
