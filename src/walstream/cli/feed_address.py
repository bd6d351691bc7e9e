"""Where the feed is and with which token it is asked: the flags that all its clients share.

Nothing of gRPC is imported before a client is made. A token is in a file or in the environment, never in a flag, which
others can see.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walstream.cli.connection_flags import PANEL, TIMEOUT_MS, TimeoutMs, Tls, TlsCa, TlsCertificate, TlsKey
from walstream.errors import UsageError

if TYPE_CHECKING:
    from walstream.feed import Client

ADDRESS: Final = "127.0.0.1:9193"


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """How to reach a feed."""

    address: str
    token_file: Path | None
    tls: bool
    tls_ca: str
    tls_certificate: str
    tls_key: str
    timeout_ms: int

    def client(self) -> Client:
        """Return a client. Raises UsageError without a token."""
        quieten()
        from walstream.feed import Client

        token = None if self.token_file else os.environ.get("WALSTREAM_TOKEN", "").strip()
        if token == "":
            raise UsageError("There is no token.", "Name its file with --token-file, or put it into WALSTREAM_TOKEN.")
        return Client(
            self.address,
            token=token,
            token_file=self.token_file,
            tls=self.tls,
            tls_ca=self.tls_ca,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            timeout_s=self.timeout_ms / 1000,
        )


def quieten() -> None:
    """Have gRPC say nothing on its own: what goes wrong is told as an error. Before it is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def make_feed_address(
    feed: Annotated[
        str,
        typer.Option("--feed", envvar="WALSTREAM_FEED", help="Address of the feed.", rich_help_panel=PANEL),
    ] = ADDRESS,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="WALSTREAM_TOKEN_FILE",
            help="File with the token. Otherwise WALSTREAM_TOKEN holds it.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    tls: Tls = False,
    tls_ca: TlsCa = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
    timeout_ms: TimeoutMs = TIMEOUT_MS,
) -> FeedAddress:
    """Build the address."""
    return FeedAddress(feed, token_file, tls, tls_ca, tls_certificate, tls_key, timeout_ms)
