"""The node's tests run on the node's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import uvloop

from node.running import Client, Connect
from walstream.node.server import Node


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects clients to nodes, and closes them when the test is over."""
    clients: list[Client] = []

    async def connect_one(node: Node) -> Client:
        clients.append(await Client.connect(node))
        return clients[-1]

    yield connect_one
    for client in clients:
        client.close()
    await asyncio.sleep(0)
