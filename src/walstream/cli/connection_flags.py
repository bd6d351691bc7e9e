"""The flags that clients of a node and clients of a feed have alike: encryption and patience."""

from __future__ import annotations

from typing import Annotated, Final

import typer

PANEL: Final = "Connection"
"""Under which heading `--help` shows them."""

TIMEOUT_MS: Final = 10_000

Tls = Annotated[bool, typer.Option("--tls", envvar="WALSTREAM_TLS", help="Encrypt.", rich_help_panel=PANEL)]
TlsCa = Annotated[
    str,
    typer.Option(
        envvar="WALSTREAM_TLS_CA",
        help="PEM file of the authority that signed the server's certificate.",
        rich_help_panel=PANEL,
    ),
]
TlsCertificate = Annotated[
    str,
    typer.Option(envvar="WALSTREAM_TLS_CERTIFICATE", help="PEM file of a client certificate.", rich_help_panel=PANEL),
]
TlsKey = Annotated[
    str, typer.Option(envvar="WALSTREAM_TLS_KEY", help="PEM file of its private key.", rich_help_panel=PANEL)
]
TimeoutMs = Annotated[int, typer.Option(min=1, help="How long to wait for an answer.", rich_help_panel=PANEL)]
