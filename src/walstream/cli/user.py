"""`walstream user`: makes the credentials that the configuration holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from walstream.cli.options import command, read_password
from walstream.cli.output import Output
from walstream.node.credentials import ITERATIONS_DEFAULT, make_credential

app = typer.Typer(help="Make users.", no_args_is_help=True)


@command(app, "credential")
def credential(
    name: Annotated[str, typer.Argument(help="Name of the user.")],
    output: Output,
    mechanism: Annotated[
        Literal["SCRAM-SHA-256", "SCRAM-SHA-512"], typer.Option(help="How the user will authenticate.")
    ] = "SCRAM-SHA-256",
    iterations: Annotated[int, typer.Option(help="More make a stolen credential harder to guess from.")] = (
        ITERATIONS_DEFAULT
    ),
    password_file: Annotated[
        Path | None, typer.Option(help="File with the password. Otherwise WALSTREAM_PASSWORD, or asked for.")
    ] = None,
) -> None:
    """Print the TOML that makes NAME a user of a node. It proves a password without holding it."""
    made = make_credential(read_password(name, password_file, confirm=True), mechanism, iterations)
    if not output.is_for_people:
        output.item({"name": name, "mechanism": mechanism, "iterations": iterations, "credential": made}, ())
        return
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
    print(f'[security.users]\n{key} = "{made}"')
