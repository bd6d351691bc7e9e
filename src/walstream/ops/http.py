"""The HTTP endpoint of a node: `/metrics` for Prometheus, `/health` for people, probes and load balancers.

Two pages for GET do not need a framework. One request per connection, everything bounded: the size of the request, the
time it may take, the number of connections. The pages are functions that the node supplies; this module knows HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from walstream import logs

log = logs.get(__name__)

REQUEST_BYTES_MAX = 8 * 1024
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 64

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A response."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Page]]


def json_page(status: int, document: Any) -> Page:
    """Make a page of a JSON document."""
    return Page(status, json.dumps(document, indent=2).encode() + b"\n", "application/json")


class HttpServer:
    """Serves pages until closed."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one, which `port` then tells."""
        self._server = await asyncio.start_server(self._accept, host or None, port, limit=REQUEST_BYTES_MAX)
        self.port = bound_port(self._server)

    async def close(self) -> None:
        """Stop listening and drop what is under way."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                page, has_body = await self._answer(reader)
                writer.write(_head(page) + (page.body if has_body else b""))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError):
            pass  # The client is slow or gone; it has no claim to more.
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[Page, bool]:
        """Read a request and return its page, and whether its body is wanted."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, protocol = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            return Page(400, b"This is not an HTTP request.\n"), True
        if not protocol.startswith("HTTP/1."):
            return Page(400, b"This is not an HTTP request.\n"), True
        if method not in ("GET", "HEAD"):
            return Page(405, b"There is only GET.\n"), True
        return self._page(target.split("?", 1)[0]), method == "GET"

    def _page(self, path: str) -> Page:
        make = self._pages.get(path)
        if make is None:
            return Page(404, f"There is no such page. There are: {', '.join(self._pages)}\n".encode())
        try:
            return make()
        except Exception:
            log.exception("page failed", path=path)
            return Page(500, b"The node failed to make this page; its log says why.\n")


def _head(page: Page) -> bytes:
    return (
        f"HTTP/1.1 {page.status} {REASONS[page.status]}\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode("ascii")


def bound_port(server: asyncio.Server) -> int:
    """Return the port that a server listens on; raises OSError if it has no socket.

    asyncio ignores an error of `socket()`, which may mean an address family that the machine does not have, but also
    that no more files can be opened.
    """
    if not server.sockets:
        socket.socket().close()
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    port: int = server.sockets[0].getsockname()[1]
    return port
