"""The feed: the log as one ordered, resumable, authenticated stream of entries over gRPC.

Needs the extra `[feed]`; whoever imports anything from here without it is told so in one line. Nothing of it is
imported here, so that a client does not pay for the server.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from walstream.errors import UsageError

if TYPE_CHECKING:
    from walstream.feed.client import Acked, Batch, Client, Entry, Heartbeat, Op, Positions, Subscription, Watermark

__all__ = ["Acked", "Batch", "Client", "Entry", "Heartbeat", "Op", "Positions", "Subscription", "Watermark"]

NEEDED: Final = {
    "aiokafka": "aiokafka",
    "grpc": "grpcio",
    "google": "protobuf",
    "jwt": "PyJWT",
    "cryptography": "cryptography",
}
"""Modules of the extra, and what they are called where they come from."""

if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
    raise UsageError(f"walstream.feed needs {', '.join(missing)}.", "Install it: pip install 'walstream[feed]'")


def __getattr__(name: str) -> Any:
    """Bring what users import from here, when they do."""
    if name in __all__:
        from walstream.feed import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
