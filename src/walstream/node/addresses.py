"""Addresses as people write them: `host:port`, with an IPv6 host in brackets."""

from __future__ import annotations

from walstream.errors import UsageError


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`, where an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r} is not an address.", "Write host:port, as in 127.0.0.1:9092.")
    return host.strip("[]"), int(port)
