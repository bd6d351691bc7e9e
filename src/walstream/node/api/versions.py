"""ApiVersions: what the node offers, as its table of APIs says."""

from __future__ import annotations

from walstream.node.context import Context, Node
from walstream.node.wire import Message, Reply

API_VERSIONS = 18
UNSUPPORTED_VERSION = 35


async def api_versions(context: Context, request: Message) -> Reply:  # noqa: ARG001 - nothing in it changes the answer
    """List the APIs and their versions."""
    return {"api_keys": _api_keys(context.node)}


def unsupported_version(node: Node) -> Reply:
    """Return the answer, always in version 0, to a client that asks in a version the node does not know."""
    return {"error_code": UNSUPPORTED_VERSION, "api_keys": _api_keys(node)}


def _api_keys(node: Node) -> list[Reply]:
    return [
        {"api_key": api.key, "min_version": api.min_version, "max_version": api.max_version}
        for api in node.apis.values()
    ]
