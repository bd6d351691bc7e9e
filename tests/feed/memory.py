"""A log in memory with the reading side's interface, and a feed's service on it behind a real gRPC server.

For tests of what the service does with entries: how they are read from a real log is tested with one.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from feed.frames import Written, frame_of
from feed.issuer import Signer, jwks
from walstream.config import FeedConfig
from walstream.errors import LsnNotAvailable
from walstream.feed import wal_pb2
from walstream.feed.auth.auth import Authenticator
from walstream.feed.reading.frames import Frame
from walstream.feed.reading.reading import FrameSource, Reading, ReadingMetrics
from walstream.feed.service.ack_log import now_ms
from walstream.feed.service.service import SERVICE, Service
from walstream.feed.service.watermarks import Subscriber, Watermarks
from walstream.positions import GlobalLsn


class MemoryLog(Reading):
    """Entries in order, in frames as large as they are read."""

    failure = ""
    version = 0

    def __init__(self, frame_entries: int = 100) -> None:
        self.metrics = ReadingMetrics()
        self.written: list[Written] = []
        self.removed = 0
        self.frame_entries = frame_entries
        self.reads = 0
        self.open_sources = 0
        self._frames: dict[tuple[int, int], Frame] = {}
        self._news = asyncio.Condition()

    async def append(self, *entries: Written) -> None:
        self.written += entries
        async with self._news:
            self._news.notify_all()

    def remove_before(self, lsn: int) -> None:
        self.removed = lsn

    async def subscribe(self, start: int, topics: tuple[str, ...] = (), *, is_new: bool = False) -> MemorySource:
        if start < self.removed:
            raise LsnNotAvailable.of(GlobalLsn(start), GlobalLsn(self.removed), GlobalLsn(self.head()))
        self.open_sources += 1
        return MemorySource(self, start)

    def check_is_whole(self, version: int, topics: tuple[str, ...]) -> None: ...

    def check_is_fit(self, topics: tuple[str, ...]) -> None: ...

    async def look_again(self, topics: tuple[str, ...]) -> None: ...

    def own_topics(self, topics: tuple[str, ...]) -> list[str]:
        return []

    def head(self) -> int:
        return self.written[-1].lsn if self.written else 0

    async def head_of_transactions(self, lsn: int) -> int:
        return 0

    async def oldest(self, topics: tuple[str, ...] = ()) -> int:
        return self.removed

    def resolved(self) -> int:
        return self.head()

    def held_back_by(self) -> str:
        return "t-0"

    def topics(self) -> list[str]:
        return ["t"]

    def count_from(self, lsn: int) -> int:
        return len(self.written) - bisect_left(self.written, lsn, key=lambda entry: entry.lsn)

    async def close(self) -> None: ...


class MemorySource(FrameSource):
    def __init__(self, log: MemoryLog, start: int) -> None:
        self.position = start
        self.is_live = True
        self._log = log

    async def next(self, wait_s: float) -> Frame | None:
        log = self._log
        if not self.entries_behind():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s), log._news:
                    await log._news.wait_for(self.entries_behind)
        if not self.entries_behind():
            return None
        if self.position < log.removed:
            raise LsnNotAvailable.of(GlobalLsn(self.position), GlobalLsn(log.removed), GlobalLsn(log.head()))
        first = bisect_left(log.written, self.position, key=lambda entry: entry.lsn)
        end = min(first + log.frame_entries, len(log.written))
        frame = log._frames.get((first, end))
        if frame is None:
            frame = log._frames[first, end] = frame_of(log.written[first:end])
        log.reads += 1
        self.position = frame.lsns[-1] + 1
        return frame

    def head(self) -> int:
        return self._log.head()

    def entries_behind(self) -> int:
        return self._log.count_from(self.position)

    async def close(self) -> None:
        self._log.open_sources -= 1


class MemoryAcks:
    """Acknowledgements that are durable at once; otherwise as in the log."""

    def __init__(self, marks: Watermarks, service: Service) -> None:
        self._marks, self._service = marks, service

    async def acknowledge(self, subscriber: Subscriber, lsn: int) -> int:
        # As `AckLog` does: what is not news is not written, so nobody hears of it.
        if self._marks.acked(subscriber) < lsn:
            self._marks.fold(subscriber.key("ack"), Watermarks.record(lsn, now_ms()))
            self._service.hear(subscriber)
        return self._marks.acked(subscriber)

    async def forget(self, subscriber: Subscriber) -> None:
        self._marks.fold(subscriber.key("ack"), None)


class Served:
    """A service in this process, and callers of it."""

    def __init__(self, log: MemoryLog, service: Service, signer: Signer, port: int) -> None:
        self.log, self.service, self.signer, self.port = log, service, signer, port
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    def token(self, **claims: Any) -> str:
        return self.signer.token(**{"exp": int(time.time()) + 600, **claims})

    def metadata(self, **claims: Any) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token(**claims)}"),)

    def admin(self) -> tuple[tuple[str, str], ...]:
        return self.metadata(role="admin", tenant=None, sub="root")

    def subscribe(self, metadata: Any = None, /, **request: Any) -> grpc.aio.UnaryStreamCall[Any, Any]:
        call = self.channel.unary_stream(
            f"/{SERVICE}/Subscribe",
            request_serializer=wal_pb2.SubscribeRequest.SerializeToString,
            response_deserializer=wal_pb2.WalResponse.FromString,
        )
        return call(wal_pb2.SubscribeRequest(**request), metadata=self.admin() if metadata is None else metadata)

    async def ack(self, lsn: int | str, metadata: Any = None, /, **request: Any) -> wal_pb2.AckResponse:
        call = self.channel.unary_unary(
            f"/{SERVICE}/Ack",
            request_serializer=wal_pb2.AckRequest.SerializeToString,
            response_deserializer=wal_pb2.AckResponse.FromString,
        )
        text = lsn if isinstance(lsn, str) else str(GlobalLsn(lsn))
        request_message = wal_pb2.AckRequest(ack_lsn=text, **request)
        return await call(request_message, metadata=self.admin() if metadata is None else metadata)

    async def lsn(self, metadata: Any = None) -> wal_pb2.GetLSNResponse:
        call = self.channel.unary_unary(
            f"/{SERVICE}/GetLSN",
            request_serializer=wal_pb2.GetLSNRequest.SerializeToString,
            response_deserializer=wal_pb2.GetLSNResponse.FromString,
        )
        return await call(wal_pb2.GetLSNRequest(), metadata=self.admin() if metadata is None else metadata)


def advance_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Set the wall clock of this process forward, for all that reads it as `time.time()`."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + by_s)


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    """Wait until something is true."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within the time")


@asynccontextmanager
async def served(folder: Any, log: MemoryLog | None = None, **settings: Any) -> AsyncIterator[Served]:
    """Serve a log in memory with these settings of [feed]."""
    signer = Signer()
    (folder / "jwks.json").write_bytes(jwks(signer))
    config = FeedConfig.model_validate({"auth": {"jwks": str(folder / "jwks.json")}, **settings})
    auth = Authenticator.of(config)
    await auth.open()
    log = log or MemoryLog()
    marks = Watermarks(config.subscriber_timeout_minutes * 60_000)
    executor = ThreadPoolExecutor(1)
    service = Service(config, log, auth, marks, executor)
    service.use(MemoryAcks(marks, service))  # type: ignore[arg-type]
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    checking = asyncio.create_task(service.check_streams())
    feed = Served(log, service, signer, port)
    try:
        yield feed
    finally:
        await feed.channel.close()
        checking.cancel()
        await server.stop(0)
        executor.shutdown()
