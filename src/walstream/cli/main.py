"""The `walstream` command: assembles the nouns, and is the one place where an error becomes a message and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nobody answers, 4 unhealthy, 5 refused (the table is `error_codes`).
A traceback is shown only for our own bugs, or with WALSTREAM_TRACEBACK=1.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from walstream import __version__
from walstream.cli import (
    capture,
    config,
    demo,
    feed,
    group,
    init,
    node,
    pipeline,
    produce,
    sim,
    status,
    tail,
    token,
    topic,
    user,
)
from walstream.cli.output import console
from walstream.error_codes import codes
from walstream.errors import WalstreamError

ORDER = (
    "init", "node", "capture", "pipeline", "feed", "topic", "produce", "tail", "group", "status", "user", "token",
    "config", "demo", "sim",
)  # fmt: skip


class Nouns(TyperGroup):
    """Lists the commands in the order in which one comes to need them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in that order; a new one that was not put into it comes last."""
        return sorted(super().list_commands(ctx), key=lambda name: (*ORDER, name).index(name))


app = typer.Typer(
    name="walstream",
    cls=Nouns,
    help="PostgreSQL's changes, in a durable log that any Kafka client can read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

init.add_to(app)
app.add_typer(node.app, name="node")
app.add_typer(capture.app, name="capture")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(feed.app, name="feed")
app.add_typer(topic.app, name="topic")
produce.add_to(app)
tail.add_to(app)
app.add_typer(group.app, name="group")
status.add_to(app)
app.add_typer(user.app, name="user")
app.add_typer(token.app, name="token")
app.add_typer(config.app, name="config")
demo.add_to(app)
sim.add_to(app)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"walstream {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """PostgreSQL's changes, in a durable log that any Kafka client can read."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(invoke(arguments))


def invoke(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = app(arguments, prog_name="walstream", standalone_mode=False)
    except WalstreamError as error:
        if os.environ.get("WALSTREAM_TRACEBACK"):
            raise
        _complain(error.message, error.hint)
        return codes(error).exit
    except typer.TyperException as error:
        # Without a message it is the help that was printed because nothing was asked for.
        if message := error.format_message():
            _complain(message.replace("Value error, ", ""), _usage_hint(error))
        return error.exit_code
    except typer.Abort:
        _complain("Nothing was done: the question was not answered.", "")
        return 2
    return code if isinstance(code, int) else 0


def _usage_hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"`{context.command_path} --help` shows what there is." if context else ""


def _complain(message: str, hint: str) -> None:
    stderr = console(sys.stderr)
    stderr.print("error: ", style="bold red", end="")
    stderr.print(message, soft_wrap=True)
    if hint:
        stderr.print("hint:  ", style="bold", end="")
        stderr.print(hint, soft_wrap=True)


if __name__ == "__main__":
    run()
