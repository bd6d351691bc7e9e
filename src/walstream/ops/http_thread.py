"""The HTTP endpoint for a process that has no event loop of its own: served from one in a thread.

Owns that thread; the endpoint itself is http.py. Its pages are made in the thread, so they read what others write and
must be content with a look.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from walstream.errors import UsageError
from walstream.ops.http import HttpServer, Pages


class HttpThread:
    """Serves pages while the context is open."""

    def __init__(self, address: str, pages: Pages) -> None:
        """Take `host:port`; port 0 takes a free one, which `port` then tells."""
        self._address = address
        self._server = HttpServer(pages)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="walstream-http", daemon=True)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    def __enter__(self) -> HttpThread:
        host, _, port = self._address.rpartition(":")
        self._thread.start()
        try:
            started: Future[None] = asyncio.run_coroutine_threadsafe(self._server.start(host, int(port)), self._loop)
            started.result()
        except OSError as error:
            self._end()
            raise UsageError(f"{self._address} cannot be listened on: {error.strerror or error}.") from None
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
