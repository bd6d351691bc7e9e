"""A real node in the test's own event loop, and a client that sends it whatever the test wants."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kio.index import load_response_schema

from node.kio_oracle import kio_read, kio_write
from walstream import config
from walstream.log.records import Record, build_batch
from walstream.node.server import Node

PATIENCE_S = 10.0


@asynccontextmanager
async def running_node(folder: Path, **settings: Any) -> AsyncIterator[Node]:
    """Run a node with settings as `section__key=value`."""
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    fixed = {"node.listen": "127.0.0.1:0", "node.http_listen": "", "node.data": str(folder / "data")}
    node = Node(config.load(overrides=fixed | overrides).config)
    try:
        await node.start()
        yield node
    finally:
        await node.stop()


Connect = Callable[[Node], Awaitable["Client"]]


class Client:
    """A connection to a node: frames as bytes, or messages as kio has them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._correlation_id = 0

    @classmethod
    async def connect(cls, node: Node) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", node.port, limit=64 * 1024 * 1024))

    def close(self) -> None:
        self.writer.transport.abort()

    def frame(self, message: Any) -> bytes:
        """Return the frame of a request."""
        self._correlation_id += 1
        key, version = message.__api_key__, message.__version__
        tags = b"\x00" if message.__header_schema__.__flexible__ else b""
        body = struct.pack(">hhih", key, version, self._correlation_id, 4) + b"test" + tags + kio_write(message)
        return struct.pack(">i", len(body)) + body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> bytes:
        """Return the next response frame, without its length."""
        async with asyncio.timeout(PATIENCE_S):
            (size,) = struct.unpack(">i", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)

    async def ask(self, message: Any) -> Any:
        """Send a request and return its response as kio reads it."""
        await self.send(self.frame(message))
        return self.read(await self.receive(), message.__api_key__, message.__version__)

    def read(self, frame: bytes, api_key: int, version: int) -> Any:
        kind = load_response_schema(api_key, version)
        return kio_read(kind, frame[4 + kind.__header_schema__.__flexible__ :])

    async def is_closed(self) -> bool:
        """Wait for the node to close the connection; say whether it did so without sending anything."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


def batch_of(*values: bytes, **header: Any) -> bytes:
    """Return a record batch as a producer sends it."""
    records = [Record(number, 1_700_000_000_000 + number, b"k", value, ()) for number, value in enumerate(values)]
    return build_batch(records, **header)
