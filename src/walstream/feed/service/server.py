"""The feed as a process: what it is made of, how it starts, and how it stops.

`Feed` puts the parts together. The order of a start: read the keys of tokens, find the log, read the acknowledgements,
listen, say so. The order of a stop, on a signal of `stopping`: every stream is told that the feed is stopping and where
to resume, calls under way are finished, then the log is let go of. A second signal stops at once; nothing is lost by
that, because subscribers resume where they were.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, Final

import grpc.aio
import uvloop
from grpc_reflection.v1alpha import reflection

import walstream
from walstream import garbage, logs
from walstream.capture.kafka import LogAddress
from walstream.config import Config
from walstream.errors import ConfigError, UnreachableError, WalstreamError
from walstream.feed.auth import tls
from walstream.feed.auth.auth import Authenticator
from walstream.feed.auth.interceptor import TokenInterceptor
from walstream.feed.reading.reading import Reading
from walstream.feed.service.ack_log import AckLog
from walstream.feed.service.retention import MINUTE_MS, Retention
from walstream.feed.service.service import SERVICE, Service
from walstream.feed.service.watermarks import Watermarks
from walstream.node.addresses import split_address
from walstream.ops.feed import FeedExporter, health
from walstream.ops.http import HttpServer, Page, json_page
from walstream.stopping import FORCING, stop_signals

log = logs.get(__name__)

REQUEST_BYTES_MAX: Final = 1024 * 1024
METADATA_BYTES_MAX: Final = 64 * 1024
KEEPALIVE_MS: Final = 10_000
"""A peer that does not answer a ping within as long again is gone: its streams end, and it counts as disconnected."""

COMPRESSORS: Final = 2
"""Threads that compress large batches."""

_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # Of both timeouts the longer one counts.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
)


class Feed:
    """A running feed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.version = walstream.__version__
        self.port = 0
        self.http_port = 0
        self._drain_s = config.node.drain_timeout_ms / 1000
        self._started = time.monotonic()
        self._parts = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def uptime_seconds(self) -> float:
        """Return for how long the feed has run."""
        return time.monotonic() - self._started

    async def start(self) -> None:
        """Put the parts together, then listen. What was opened is closed by `stop`, also half-way."""
        config, parts = self.config.feed, self._parts
        tls.check_listener(config)
        auth = Authenticator.of(config)
        await auth.open()
        address = LogAddress.of(self.config.capture)
        executor = ThreadPoolExecutor(COMPRESSORS, "walstream-compress")
        parts.callback(executor.shutdown, wait=False, cancel_futures=True)
        self.reading = await Reading.open(address, config, (self.config.capture.prefix,))
        parts.push_async_callback(self.reading.close)
        self.marks = Watermarks(config.subscriber_timeout_minutes * MINUTE_MS)
        self.service = Service(config, self.reading, auth, self.marks, executor)
        acks = AckLog(address, self.marks, self.service.hear)
        self.service.use(acks)
        parts.push_async_callback(acks.close)
        await acks.open()
        self.retention = Retention(config, address, self.reading, self.service, self.marks, acks)
        await self._listen(auth)
        self._run(self.service.check_streams())
        self._run(self.retention.run())
        parts.push_async_callback(self._end_tasks)
        log.info("feed ready", listen=f"{config.host}:{self.port}", http_port=self.http_port, version=self.version)

    async def _listen(self, auth: Authenticator) -> None:
        config = self.config.feed
        # First, so that whoever reaches the service finds everything else there, too.
        if config.http_listen:
            await self._listen_http(config.http_listen)
        server = grpc.aio.server(options=_OPTIONS, interceptors=(TokenInterceptor(auth, SERVICE),))
        server.add_generic_rpc_handlers((self.service.handler(),))
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
        self.port = tls.listen(server, config)
        await server.start()
        self._parts.push_async_callback(server.stop, self._drain_s)

    async def _listen_http(self, address: str) -> None:
        exporter = FeedExporter(self)
        http = HttpServer(
            {
                "/metrics": lambda: Page(200, exporter.render(), "text/plain; version=0.0.4; charset=utf-8"),
                "/health": lambda: json_page(*health(self)),
            }
        )
        try:
            await http.start(*split_address(address))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"The feed cannot listen at {address}: {reason}.", "Change feed.http_listen.") from error
        self._parts.push_async_callback(http.close)
        self.http_port = http.port

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Tell every subscriber, finish what is under way, close."""
        if hasattr(self, "service"):
            log.info("feed stopping", streams=len(self.service.streams))
            if hasattr(self, "retention"):
                await self._say_who_was_here()
            self.service.stop(UnreachableError("feed_stopping: the feed is being stopped", "Subscribe again."))
        await self._parts.aclose()
        log.info("feed stopped")

    async def _say_who_was_here(self) -> None:
        try:
            await asyncio.wait_for(self.retention.tell_who_is_here(), self._drain_s)
        except (WalstreamError, TimeoutError) as error:
            log.warning("not written who was here", reason=str(error) or "the log does not answer")


def run(config: Config) -> int:
    """Run a feed until it is told to stop, and return the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main(config))


async def _main(config: Config) -> int:
    stopping = asyncio.Event()
    _on_signals(stop_signals(), stopping.set)
    feed = Feed(config)
    try:
        await feed.start()
        garbage.settle()
        await stopping.wait()
    finally:
        _on_signals(FORCING, _stop_at_once)
        await feed.stop()
    return 0


def _on_signals(numbers: Iterable[signal.Signals], act: Callable[[], None]) -> None:
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, act)


def _stop_at_once() -> None:
    log.warning("feed stopped at once")
    os._exit(1)
