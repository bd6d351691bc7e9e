"""`walstream init`: writes a configuration file with everything in it that can be set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from walstream import config
from walstream.cli.options import command, pairs
from walstream.cli.output import Output
from walstream.config import DEFAULT_FILE
from walstream.errors import UsageError


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "init")(init)


def init(
    output: Output,
    file: Annotated[Path, typer.Argument(help="The file to write.")] = DEFAULT_FILE,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key in it; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a configuration file in which every key is described, with its default commented out."""
    loaded = config.load(overrides=pairs(settings or [], "--set", "source.postgres.database=shop"))
    text = config.template(loaded)
    try:
        with file.open("w" if force else "x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise UsageError(
            f"There is a file {file} already.", "--force replaces it, and what was changed in it is lost."
        ) from None
    except OSError as error:
        raise UsageError(f"The file {file} cannot be written: {error.strerror}.") from None
    output.done(f"{file} is written. `walstream capture check` tells what PostgreSQL still needs.", {"file": str(file)})
