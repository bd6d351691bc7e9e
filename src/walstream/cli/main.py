"""The `walstream` command: finds the nouns, and is the one place where an error becomes a message and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nobody answers, 4 unhealthy, 5 refused (the table is `error_codes`).
A traceback is shown only for our own bugs, or with WALSTREAM_TRACEBACK=1.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperGroup
from typer.main import get_group

from walstream import __version__
from walstream.error_codes import codes
from walstream.errors import WalstreamError

ORDER = (
    "init", "node", "capture", "pipeline", "feed", "topic", "produce", "tail", "group", "status", "user", "token",
    "config", "demo", "sim",
)  # fmt: skip


class Nouns(TyperGroup):
    """The commands in the order of their use; the module of a command is imported when that command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return [*ORDER]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command, from the module of its name."""
        if name in ORDER and name not in self.commands:
            self.commands |= _commands_of(name)
        return super().get_command(ctx, name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the arguments; all are imported for a name that is none, which may resemble one."""
        if args and args[0] not in ORDER:
            for name in ORDER:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _commands_of(name: str) -> Any:
    module, one = import_module(f"walstream.cli.{name}"), typer.Typer()
    if hasattr(module, "app"):
        one.add_typer(module.app, name=name)
    else:
        module.add_to(one)
    return get_group(one).commands


app = typer.Typer(
    name="walstream",
    cls=Nouns,
    help="PostgreSQL's changes, in a durable log that any Kafka client can read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


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
    from walstream import logs
    from walstream.cli.output import console

    # A closed terminal must not change the exit code, by which a supervisor decides whether to restart.
    stderr = console(cast(TextIO, logs.Unfailing(sys.stderr)))
    stderr.print("error: ", style="bold red", end="")
    stderr.print(message, soft_wrap=True)
    if hint:
        stderr.print("hint:  ", style="bold", end="")
        stderr.print(hint, soft_wrap=True)


if __name__ == "__main__":
    run()
