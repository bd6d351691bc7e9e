"""The HTTP endpoint: its pages, and what it does with those who do not speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from walstream.ops import http
from walstream.ops.http import HttpServer, Page, json_page


def broken() -> Page:
    raise RuntimeError("a bug")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[HttpServer]:
    server = HttpServer({"/health": lambda: json_page(200, {"status": "ok"}), "/broken": broken})
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


async def send(server: HttpServer, request: bytes) -> bytes:
    """Send raw bytes and return everything that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
            async with asyncio.timeout(10):
                return await reader.read()
        return b""
    finally:
        writer.transport.abort()


async def test_a_page(server: HttpServer) -> None:
    answer = await send(server, b"GET /health?verbose HTTP/1.1\r\nHost: x\r\n\r\n")
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"Content-Type: application/json" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert body == b'{\n  "status": "ok"\n}\n'


async def test_head_has_no_body(server: HttpServer) -> None:
    answer = await send(server, b"HEAD /health HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /health HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /broken HTTP/1.1\r\n\r\n", b"500"),
        (b"GET /health SMTP/1.1\r\n\r\n", b"400"),
        (b"\x00\x01\x02 \xff\xfe\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET / " + b"x" * 20_000 + b"\r\n\r\n", b"400"),
        (b"\x00" * 20_000, b"400"),
    ],
)
async def test_what_it_refuses(server: HttpServer, request_bytes: bytes, status: bytes) -> None:
    answer = await send(server, request_bytes)
    # The endpoint may close before a flood of garbage has arrived, and then the answer can be lost on the way.
    assert answer[9:12] in ({status, b""} if len(request_bytes) > 10_000 else {status})
    assert (await send(server, b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_the_silent_are_not_waited_for(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.1)
    assert await send(server, b"GET /health HT") == b""


async def test_connections_are_bounded(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 2)
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert await send(server, b"GET /health HTTP/1.1\r\n\r\n") == b""
    for _, writer in silent:
        writer.transport.abort()
    await asyncio.sleep(0.05)
    assert (await send(server, b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
