"""`walstream token`: tokens for the feed, signed with a key of this machine. For development: an issuer has its own.

What needs the extra is imported only when it is used, so that the other commands start without it.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from walstream.cli.options import Sources, command
from walstream.cli.output import Column, JsonOutput, Output, plural
from walstream.errors import UsageError

app = typer.Typer(help="Make tokens for the feed, for development.", no_args_is_help=True)

DEFAULT_KEY = Path(".walstream/feed-key.pem")

KeyFile = Annotated[
    Path, typer.Option("--key", metavar="FILE", help="The private key; its key set, feed-jwks.json, is beside it.")
]

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_COLUMNS = (
    Column("subject", "subject"),
    Column("role", "role"),
    Column("tenant", "tenant"),
    Column("audience", "audience"),
    Column("issuer", "issuer"),
    Column("expires_at_ms", "expires", "time"),
    Column("not_before_ms", "not before", "time"),
    Column("issued_at_ms", "issued", "time"),
    Column("token_id", "id"),
    Column("algorithm", "signed with"),
    Column("key_id", "key"),
    Column("others", "other claims"),
)


@command(app, "mint")
def mint(
    output: Output,
    sources: Sources,
    subject: Annotated[str, typer.Option(metavar="NAME", help="Who will use it: the name of the subscriber.")],
    role: Annotated[
        Literal["replication", "admin"], typer.Option(help="`replication` reads one tenant, `admin` all of them.")
    ] = "replication",
    tenant: Annotated[str, typer.Option(help="The tenant that the role replication may read.")] = "",
    expires_in: Annotated[str, typer.Option(metavar="TIME", help="How long it counts: 30m, 12h, 7d.")] = "1h",
    key: KeyFile = DEFAULT_KEY,
) -> None:
    """Print a token for a feed that is configured as here. The first time, a key is made."""
    from walstream.feed.auth.tokens import LocalKeys, Wish

    keys = LocalKeys(key)
    is_new = not key.exists()
    wish = Wish(subject, role, tenant, _seconds(expires_in))
    token, claims = keys.mint(wish, sources.load().config.feed.auth, time.time())
    if is_new:
        output.note(f"{key} is made, and {keys.jwks} to verify with: name that one in feed.auth.jwks.")
    if output.is_for_people:
        print(token)
    else:
        output.item({"token": token, "expires_at_ms": claims["exp"] * 1000, "claims": claims}, ())


@command(app, "jwks")
def jwks(output: Output, key: KeyFile = DEFAULT_KEY) -> None:
    """Print the key set (JWKS) that verifies the tokens of this key. It is public."""
    from walstream.feed.auth.tokens import LocalKeys

    del output  # a key set is JSON, whoever reads it
    JsonOutput().item({"keys": LocalKeys(key).public()}, ())


@command(app, "rotate")
def rotate(output: Output, key: KeyFile = DEFAULT_KEY) -> None:
    """Sign with a new key from now on. Tokens of the old one count until they expire, or until `prune`."""
    from walstream.feed.auth.tokens import LocalKeys

    keys = LocalKeys(key)
    made = keys.rotate()
    output.done(
        f"Tokens are signed with key {made['kid']} from now on.", {"key_id": made["kid"], "keys": keys.public()}
    )


@command(app, "prune")
def prune(output: Output, key: KeyFile = DEFAULT_KEY) -> None:
    """Take old keys out of the key set: what they have signed is not believed any more."""
    from walstream.feed.auth.tokens import LocalKeys

    keys = LocalKeys(key)
    count = keys.prune()
    output.done(f"{plural(count, 'old key')} left the key set {keys.jwks}.", {"removed": count, "keys": keys.public()})


@command(app, "show")
def show(
    output: Output,
    sources: Sources,
    token: Annotated[str, typer.Argument(help="The token, or `-` to read it from stdin.")],
) -> None:
    """Tell what a token says. Nothing of it is verified."""
    from walstream.feed.auth.tokens import decoded, summary

    header, claims = decoded(sys.stdin.read(100_000) if token == "-" else token)
    if output.is_for_people:
        output.item(summary(header, claims, sources.load().config.feed.auth), _COLUMNS)
        output.note("Nothing of this was verified.")
    else:
        output.item({"header": header, "claims": claims, "is_verified": False}, ())


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d{1,9})([smhd])", text.strip().lower())
    if not match:
        raise UsageError(f"{text!r} is no length of time.", "Write it as 90s, 30m, 12h or 7d.")
    return int(match[1]) * _UNITS_S[match[2]]
