"""The node as a process: what it is made of, how it starts, what it does from time to time, and how it stops.

`Node` puts the parts together and owns the connections. The order of a start: lock the folder, open and recover the
log, read the committed offsets, listen, say so. The order of a stop, on a signal of `stopping`: stop listening, finish
what is in flight within `node.drain_timeout_ms`, flush, write the last checkpoint, let go of the folder. A second
signal stops at once; so does a crash, and recovery is made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import uvloop

import walstream
from walstream import garbage, logs
from walstream.config import Config, LimitsConfig, SecurityConfig
from walstream.errors import ConfigError, OutOfFiles, WalstreamError
from walstream.log.disk import OUT_OF_FILES, DirectoryLock
from walstream.node.addresses import split_address
from walstream.node.api import APIS
from walstream.node.connection import Connection, Dispatch
from walstream.node.dispatch import Dispatcher
from walstream.node.framing import SCRATCH_BYTES, Budget
from walstream.node.groups.service import GroupService
from walstream.node.opening import files_wanted, now_ms, open_log, segment_files_max
from walstream.node.placement import Alone, Placement
from walstream.node.replicas import Replicas
from walstream.node.security import Security, check_listener, load_secret
from walstream.node.sessions import Sessions
from walstream.node.supervision import supervise
from walstream.node.turns import Turns
from walstream.ops.health import health
from walstream.ops.http import HttpServer, Page, Pages, bound_port, json_page
from walstream.ops.metrics import Exporter, Metrics
from walstream.stopping import FORCING, stop_signals

log = logs.get(__name__)

READERS = 4
"""Threads that read from a cold disk. More do not help a disk; fewer let one slow read hold up the others."""

EVERY_ADDRESS = ("", "0.0.0.0", "::")
BACKLOG = 512
TICK_S = 1.0
SWITCH_INTERVAL_S = 0.001
"""How long the loop may keep the interpreter from the flush thread, whose sync has returned and is being waited for."""

LOOP_FILES = 10
"""File descriptors that uvloop opens for itself."""

CLOSINGS_LOGGED_MAX = 20
"""Closed connections that are logged one by one within a second. Strangers must not be able to fill the log."""


class Node:
    """A running node: the parts, and the connections."""

    def __init__(self, config: Config) -> None:
        self._host, self._port = split_address(config.node.listen)
        check_listener(self._host, config.security)
        folder = Path(config.node.data)
        self.config = config
        self.limits = config.limits
        self.apis = APIS
        self.version = walstream.__version__
        self.turns = Turns()
        self._lock = DirectoryLock(folder)
        try:
            self.security = Security(config.security, load_secret(folder / "secret"))
            self.catalogue, self.store = open_log(config, folder, self.turns)
        except BaseException:
            self._lock.release()
            raise
        self.groups = GroupService(self)
        self.metrics = Metrics(APIS)
        self.sessions = Sessions(config.limits.fetch_sessions_max, partial(secrets.randbelow, 2**31))
        self.budget = Budget(config.limits.inflight_bytes_max)
        self.unsent = Budget(config.limits.inflight_bytes_max)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.dispatch: Dispatch = Dispatcher(self)
        self.executor = ThreadPoolExecutor(READERS, "walstream-read")
        self.replicas: Replicas | None = None
        self.placement: Placement = Alone(self.store, lambda: self.advertised)
        if config.replication.is_cluster:
            self._join_cluster(folder)
        self.connections: set[Connection] = set()
        self._closings = 0
        self._emptied = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._http: HttpServer | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._started = time.monotonic()
        self._has_started = False

    def _join_cluster(self, folder: Path) -> None:
        try:
            self.replicas = Replicas(self.config, folder, self.store, self.groups, self.executor, self.turns)
        except BaseException:
            self.store.close()
            self._lock.release()
            raise
        self.placement = self.replicas.placement

    # What handlers and metrics ask

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds."""
        return now_ms()

    @property
    def advertised(self) -> tuple[str, int]:
        """Return the host and port that clients are told to connect to; no host: the one they have reached already."""
        if self.config.node.advertised:
            host, port = split_address(self.config.node.advertised)
            return host, port or self.port
        return "" if self._host in EVERY_ADDRESS else self._host, self.port

    @property
    def port(self) -> int:
        """Return the port that the node listens on, also when it was told to take any."""
        return self._port

    @property
    def http_port(self) -> int:
        """Return the port of the HTTP endpoint, 0 when there is none."""
        return self._http.port if self._http else 0

    @property
    def connection_count(self) -> int:
        """Return the number of open connections."""
        return len(self.connections)

    @property
    def uptime_seconds(self) -> float:
        """Return for how long the node has run."""
        return time.monotonic() - self._started

    # What connections ask

    def admit(self, connection: Connection) -> bool:
        """Take a new connection in, unless there are too many."""
        if len(self.connections) >= self.limits.connections_max:
            self.metrics.connections_refused += 1
            if self.metrics.connections_refused % 100 == 1:
                log.warning("connection refused", connections=len(self.connections), peer=connection.peer)
            return False
        self.metrics.connections_accepted += 1
        self.connections.add(connection)
        return True

    def closing(self, connection: Connection, reason: str) -> None:
        """Count and log that the node ends a connection; of a flood only the beginning of each second is logged."""
        self.metrics.connections_closed += 1
        self._closings += 1
        if self._closings <= CLOSINGS_LOGGED_MAX:
            log.info("connection closed", peer=connection.peer, client=connection.client_id, reason=reason)

    def dismiss(self, connection: Connection) -> None:
        """Hear that a connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._emptied.set()

    # Life

    async def start(self) -> None:
        """Load what is left to load, then listen."""
        if self.replicas is None:
            await self.groups.start()
        else:
            await self.replicas.start()
        loop = asyncio.get_running_loop()
        await self._listen(loop)
        self._ticker = supervise("housekeeping", self._tick)
        self._has_started = True
        log.info(
            "node ready",
            listen=f"{self._host}:{self.port}",
            http_port=self.http_port,
            topics=len(self.catalogue.topics),
            partitions=len(self.store.partitions),
            epoch=self.store.epoch,
            version=self.version,
            **(
                {}
                if self.replicas is None
                else {"node_id": self.replicas.node_id, "peers_port": self.replicas.links.port}
            ),
        )

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        tls = self.security.tls
        address = self.config.node.listen
        try:
            self._server = await loop.create_server(
                lambda: Connection(self),
                self._host or None,
                self._port,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=self.limits.handshake_timeout_ms / 1000 if tls else None,
            )
            self._port = bound_port(self._server)
            address = self.config.node.http_listen
            if address:
                self._warn_if_open(address)
                self._http = HttpServer(self._pages())
                await self._http.start(*split_address(address))
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(
                f"The node cannot listen at {address}: {reason}.", "Change node.listen or node.http_listen."
            ) from error

    def _warn_if_open(self, address: str) -> None:
        try:
            check_listener(split_address(address)[0], SecurityConfig())
        except ConfigError:
            log.warning("health and metrics are open to whoever reaches the port", http_listen=address)

    def _pages(self) -> Pages:
        exporter = Exporter(self)
        return {
            "/metrics": lambda: Page(200, exporter.render(), "text/plain; version=0.0.4; charset=utf-8"),
            "/health": lambda: json_page(*health(self)),
        }

    async def _tick(self) -> None:
        """Do what is due, once a second, whatever goes wrong in one round."""
        limits = self.limits
        shortest_ms = min(limits.request_read_timeout_ms, limits.idle_timeout_ms, limits.response_write_timeout_ms)
        interval_s = min(TICK_S, shortest_ms / 4000)
        store_due = 0.0
        while True:
            await asyncio.sleep(interval_s)
            now = asyncio.get_running_loop().time()
            try:
                for connection in tuple(self.connections):
                    connection.check(now)
                self._shed(now)
                if now >= store_due:
                    store_due = now + TICK_S
                    self._report_closings()
                    self.store.tick()
                    if self.replicas is not None:
                        self.replicas.tick()
            except Exception:
                log.exception("housekeeping failed")

    def _report_closings(self) -> None:
        if self._closings > CLOSINGS_LOGGED_MAX:
            log.warning("many connections closed", connections=self._closings, logged=CLOSINGS_LOGGED_MAX)
        self._closings = 0

    def _shed(self, now: float) -> None:
        """When memory is short, drop those who hold it and do nothing with it."""
        if self.budget.waiting:
            for connection in [one for one in self.connections if one.is_stalled(now)]:
                connection.abort("others wait for the memory of a request that does not arrive")
        if self.unsent.used_bytes <= self.unsent.bytes_max:
            return
        stuck = [connection for connection in self.connections if connection.stuck_since is not None]
        for connection in sorted(stuck, key=lambda connection: connection.stuck_since or 0.0):
            if self.unsent.used_bytes <= self.unsent.bytes_max:
                return
            connection.abort("the node needs the memory of its unread responses")

    async def stop(self) -> bool:
        """Drain and close; say whether the next start can trust the last checkpoint. Fit for a half-way start too."""
        log.info("node stopping", connections=len(self.connections))
        if self._server is not None:
            self._server.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await self.groups.stop()
        await self._drain()
        if self.replicas is not None:
            self.replicas.stop()
        self.turns.stop()
        if self._http is not None:
            await self._http.close()
        is_clean = await self._close_store()
        self.executor.shutdown(wait=False, cancel_futures=True)
        self._lock.release()
        log.info("node stopped", clean=is_clean)
        return is_clean

    async def _close_store(self) -> bool:
        loop = asyncio.get_running_loop()
        self.store.commit.release()  # Here, where writes gather: closing happens on another thread.
        try:
            await loop.run_in_executor(None, self.store.close)
            await asyncio.sleep(0)  # The last completions were posted before this and run first.
            if not self._has_started:
                return False  # Nothing was served: the checkpoint of this start says all there is.
            return await loop.run_in_executor(None, self.store.mark_clean)
        except (OSError, WalstreamError) as error:
            # What was acknowledged is durable; the next start only has more to check.
            log.error("the last checkpoint was not written", error=str(error))
            return False

    async def _drain(self) -> None:
        self._emptied.clear()
        for connection in tuple(self.connections):
            connection.drain()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.node.drain_timeout_ms / 1000):
                    await self._emptied.wait()
        for connection in tuple(self.connections):
            connection.abort("the node stops")


def raise_file_limit(limits: LimitsConfig) -> None:
    """Raise the number of files this process may open, as far as it may and needs.

    With fewer files the node closes those of the least recently used segments: slower, but nothing is refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files_wanted(limits)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        log.warning(
            "few files can be opened",
            limit=reachable,
            wanted=wanted,
            connections_max=limits.connections_max,
            partitions_max=limits.partitions_max,
            segments_open=segment_files_max(limits),
            hint=f"Raise the hard limit: ulimit -Hn {wanted}, or LimitNOFILE={wanted} of systemd.",
        )


def run(config: Config) -> int:
    """Run a node until it is told to stop, and return the exit code."""
    raise_file_limit(config.limits)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        _check_loop_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(config))
    except OSError as error:
        if error.errno not in OUT_OF_FILES:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = files_wanted(config.limits)
        raise OutOfFiles(
            f"The node cannot open the files it needs to start: {os.strerror(error.errno)}, at a limit of {limit}.",
            f"Raise the hard limit: ulimit -Hn {wanted}, or LimitNOFILE={wanted} of systemd. The log is as it was.",
        ) from error


def _check_loop_files() -> None:
    """Raise OSError where uvloop could not open its files: it would then neither run nor close, and hide the reason."""
    with contextlib.ExitStack() as opened:
        for _ in range(LOOP_FILES):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


async def _main(config: Config) -> int:
    stopping = asyncio.Event()
    _on_signals(stop_signals(), stopping.set)
    node = Node(config)
    try:
        await node.start()
        garbage.settle()
        await stopping.wait()
    finally:
        _on_signals(FORCING, _stop_at_once)
        is_clean = await node.stop()
    return 0 if is_clean else 1


def _on_signals(numbers: Iterable[signal.Signals], act: Callable[[], None]) -> None:
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, act)


def _stop_at_once() -> None:
    log.warning("node stopped", clean=False)
    os._exit(1)
