"""The flags that many commands share, written once.

A command asks for what it needs by the type of a parameter: `client: Client` brings the connection flags, `output:
Output` brings `--output`, `sources: Sources` brings the configuration flags. `command` replaces such a parameter by its
flags and hands the built object in.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from walstream import config, logs
from walstream.cli import output as outputs
from walstream.cli.client import Client
from walstream.cli.connection_flags import PANEL, TIMEOUT_MS, TimeoutMs, Tls, TlsCa, TlsCertificate, TlsKey
from walstream.cli.feed_address import FeedAddress, make_feed_address
from walstream.config import DEFAULT_FILE, Loaded, Mechanism
from walstream.errors import UsageError

F = TypeVar("F", bound=Callable[..., None])

BOOTSTRAP = "127.0.0.1:9092"
_CONFIGURATION = "Configuration"


def command(app: typer.Typer, name: str) -> Callable[[F], F]:
    """Add the function to the app as a command, with the flags of the objects it asks for."""

    def add(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        builders = {key: _BUILDERS[kind] for key, kind in hints.items() if isinstance(kind, type) and kind in _BUILDERS}
        own = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(function).parameters.values()
            if parameter.name not in builders
        ]
        shared = {key: inspect.signature(builder, eval_str=True).parameters for key, builder in builders.items()}

        @wraps(function)
        def run(**given: Any) -> None:
            for key, builder in builders.items():
                flags = {flag: given.pop(flag) for flag in shared[key]}
                given[key] = builder(**flags)
            function(**given)

        flags = [*own, *(flag for parameters in shared.values() for flag in parameters.values())]
        keyword_only = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags]
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        run.__annotations__ = {flag.name: flag.annotation for flag in keyword_only}
        del run.__wrapped__
        app.command(name)(run)
        return function

    return add


def make_output(
    output: Annotated[
        outputs.Format, typer.Option("--output", "-o", help="A table for people or JSON for programs.")
    ] = outputs.Format.TABLE,
) -> outputs.Output:
    """Build the output."""
    return outputs.make(output)


def make_client(
    bootstrap: Annotated[
        str,
        typer.Option(
            "--bootstrap", "-b", envvar="WALSTREAM_BOOTSTRAP", help="Address of a node.", rich_help_panel=PANEL
        ),
    ] = BOOTSTRAP,
    user: Annotated[
        str, typer.Option(envvar="WALSTREAM_USER", help="Authenticate as this user.", rich_help_panel=PANEL)
    ] = "",
    password_file: Annotated[
        Path | None,
        typer.Option(help="File with the password. Otherwise WALSTREAM_PASSWORD, or asked for.", rich_help_panel=PANEL),
    ] = None,
    mechanism: Annotated[
        Mechanism,
        typer.Option(envvar="WALSTREAM_MECHANISM", help="How to authenticate.", rich_help_panel=PANEL),
    ] = "SCRAM-SHA-256",
    tls: Tls = False,
    tls_ca: TlsCa = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
    timeout_ms: TimeoutMs = TIMEOUT_MS,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what the client does.", rich_help_panel=PANEL)
    ] = False,
) -> Client:
    """Build the client."""
    logs.set_up("debug" if verbose else "warning", "console")
    security: dict[str, Any] = {}
    is_tls = bool(tls or tls_ca or tls_certificate)
    if is_tls or user:
        security["security.protocol"] = ("SASL_" if user else "") + ("SSL" if is_tls else "PLAINTEXT")
    if user:
        security |= {
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": read_password(user, password_file),
        }
    files = {"ssl.ca.location": tls_ca, "ssl.certificate.location": tls_certificate, "ssl.key.location": tls_key}
    for name, file in files.items():
        if file:
            if not Path(file).is_file():
                raise UsageError(f"There is no file {file}.")
            security[name] = file
    return Client(bootstrap, security, timeout_ms, verbose)


def read_password(user: str, file: Path | None, *, confirm: bool = False) -> str:
    """Return the password from its file, the environment or the terminal: never from a flag, which others can see."""
    if file is not None:
        try:
            return file.read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise UsageError(f"The password file {file} cannot be read: {error.strerror}.") from None
    if "WALSTREAM_PASSWORD" in os.environ:
        return os.environ["WALSTREAM_PASSWORD"]
    return str(typer.prompt(f"Password for {user}", hide_input=True, confirmation_prompt=confirm, err=True))


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the configuration is to be read from."""

    file: Path | None
    overrides: dict[str, str]

    def load(self, flags: Mapping[str, str | None] | None = None) -> Loaded:
        """Read the configuration; `flags` are values by `section.key`, None for those that were not given."""
        given = {key: value for key, value in (flags or {}).items() if value is not None}
        return config.load(self.file, os.environ, {**self.overrides, **given})


def find_sources(
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            envvar="WALSTREAM_CONFIG",
            help=f"TOML file. Otherwise {DEFAULT_FILE} if there is one.",
            rich_help_panel=_CONFIGURATION,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Set any key; repeatable.", rich_help_panel=_CONFIGURATION
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log at level debug.", rich_help_panel=_CONFIGURATION)
    ] = False,
) -> Sources:
    """Find the sources of the configuration."""
    if config_file is None and DEFAULT_FILE.is_file():
        config_file = DEFAULT_FILE
    overrides = pairs(settings or [], "--set", "log.segment_bytes=1048576")
    if verbose:
        overrides["node.log_level"] = "debug"
    return Sources(config_file, overrides)


def pairs(given: list[str], flag: str, example: str) -> dict[str, str]:
    """Read `name=value` flags."""
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} {pair} has no value.", f"Write it as {flag} {example}.")
        found[name.strip()] = value.strip()
    return found


def confirm_name(name: str, given: str | None, act: str) -> None:
    """Make sure a dangerous act means this name: given with --confirm, or typed at a terminal."""
    if given is None:
        typer.echo(act, err=True)
        given = str(typer.prompt(f"Type {name} to go on", err=True, default="", show_default=False))
    if given != name:
        raise UsageError(f"Nothing was done: {given!r} is not {name!r}.", f"Repeat the name with --confirm {name}.")


Confirm = Annotated[
    str | None, typer.Option("--confirm", metavar="NAME", help="Repeat the name instead of being asked for it.")
]

_BUILDERS: dict[type, Callable[..., Any]] = {
    Client: make_client,
    outputs.Output: make_output,
    Sources: find_sources,
    FeedAddress: make_feed_address,
}
