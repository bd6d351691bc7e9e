"""One subscriber's stream: entries are read when there is room for them, and sent in order until something ends it.

A thin shell around `SendQueue`: one task reads frames and fills the queue, another empties it into the call. It owns
when heartbeats are due and how a stream ends; what waits, what is merged and who is too slow is decided in the queue.
Nothing is read ahead of what the queue takes, so a slow subscriber costs its queue and no more.

A stream that ends by an error lets go of the log and of its queue at once. What the call is still sending it cannot
take back: it waits for that, so that the error can be told behind it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc.aio

from walstream.errors import SubscriberTooSlow, WalstreamError
from walstream.feed.auth.identity import Session
from walstream.feed.service.batching import ZSTD_BYTES_MIN, Cut, SharedCuts, batch_response, choose_compression, cut
from walstream.feed.service.demand import Demand
from walstream.feed.service.responses import heartbeat_response, watermark_response
from walstream.feed.service.send_queue import Batch, Bounds, Message, SendQueue
from walstream.feed.service.sources import Opened

if TYPE_CHECKING:
    from walstream.feed.reading.frames import Frame
    from walstream.feed.reading.reading import Reading

Write = Callable[[bytes], Awaitable[None]]

WATERMARK_S: Final = 1.0
"""How often a watermark that moves is told, at most."""

TURN_FRAMES: Final = 16
"""After so many frames others have their turn, also when none of them had to be waited for and nothing was to be sent:
as for a tenant of whom there is little in a full window."""


@dataclass(slots=True)
class Sent:
    """What was sent, by one stream or by all of them."""

    entries: int = 0
    batches: int = 0
    bytes: int = 0
    heartbeats: int = 0


@dataclass(slots=True)
class Surroundings:
    """What all subscriptions of a feed share."""

    reading: Reading
    cuts: SharedCuts
    executor: Executor
    """Compresses what is large."""
    heartbeat_s: float
    sent: Sent
    watermark: Callable[[Demand], int | None]
    """What the subscriber of a demand is told to be the watermark."""
    on_sent: Callable[[Subscription, int, int], None]
    """Hears, before it is sent, up to where a stream then has everything, and the last LSN that it has an entry of."""


class Subscription:
    """One stream."""

    def __init__(
        self, number: int, demand: Demand, session: Session, opened: Opened, bounds: Bounds, around: Surroundings
    ) -> None:
        self.number = number
        self.demand = demand
        self.session = session
        self.sent = Sent()
        self.resume = opened.start
        """Where to resume when the stream ends now."""
        self.error: WalstreamError | None = None
        self.queue = SendQueue(bounds, demand.limits)
        self.source = opened.source
        self._entries = opened.entries
        self._around = around
        self._version = around.reading.version
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = asyncio.Event()
        self._told_at = time.monotonic()
        self._watermark: int | None = None
        self._watermark_at = 0.0
        self._reader: asyncio.Task[None] | None = None
        self._sender: asyncio.Task[None] | None = None

    # What others do with it

    def end(self, error: WalstreamError) -> None:
        """End the stream with this error, unless it has ended already."""
        if self.error is None:
            self.error = error
            self._ended.set()
            self._work.set()

    def acknowledge(self, lsn: int) -> None:
        """Hear that the subscriber has processed everything up to here."""
        self.queue.acknowledge(lsn)
        self._work.set()

    def check(self, now: float, now_s: float) -> None:
        """End the stream when the subscriber is too slow, its token has expired, or a topic of its was lost."""
        deadline = self.queue.deadline()
        if deadline is not None and now >= deadline:
            self.end(
                SubscriberTooSlow(
                    "backpressure_timeout: subscriber too slow",
                    "Subscribe again from where it was; batch_size_hint or credit_entries lets smaller pieces come.",
                )
            )
        try:
            self.session.check(now_s)
            self._around.reading.check_is_whole(self._version, self.demand.entries.topics)
            if self.demand.subscriber.role == "admin":
                # It may have been made since the stream began.
                self._around.reading.check_is_fit(self.demand.entries.topics)
        except WalstreamError as error:
            self.end(error)

    def entries_behind(self) -> int:
        """Return how many entries of the log it was not sent yet."""
        return self.source.entries_behind() + self.queue.entries

    # Life

    async def run(self, write: Write) -> WalstreamError:
        """Send until something ends the stream, and return that. Cancelled when the client leaves."""
        self._reader = asyncio.create_task(self._read())
        self._sender = asyncio.create_task(self._send(write))
        self._reader.add_done_callback(self._reader_is_done)
        self._sender.add_done_callback(self._sender_is_done)
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.abandon()
            raise
        finally:
            await self._let_go()
        assert self.error is not None
        return self.error

    async def is_writable(self) -> bool:
        """Wait until the call has sent what it was given before the end, and say whether it has."""
        assert self._sender is not None
        await asyncio.wait({self._sender})
        return not isinstance(self._sender.exception(), ClientGone)

    def abandon(self) -> None:
        """Give up what the call has not sent yet."""
        if self._sender is not None:
            self._sender.cancel()

    def _reader_is_done(self, task: asyncio.Task[None]) -> None:
        """Hear why nothing more can be read; what was read before goes out first."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.queue.end(error if isinstance(error, WalstreamError) else StreamFailed(error))
            self._work.set()

    def _sender_is_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.end(error if isinstance(error, WalstreamError) else StreamFailed(error))

    async def _let_go(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self.queue.clear()
            await self.source.close()

    # Reading

    async def _read(self) -> None:
        source, frames = self.source, 0
        while True:
            if (frame := await source.next(self._patience_s())) is not None:
                is_live = source.is_live
                made = self._cut(frame, is_shared=is_live)
                # While a slow subscriber is waited for, only what it was not sent yet is kept.
                del frame
                for part in made.slices:
                    while not self.queue.offer(part, time.monotonic(), is_live=is_live):
                        self._room.clear()
                        await self._room.wait()
                    self._work.set()
                if made.error is not None:
                    self.queue.end(made.error)
                    self._work.set()
                    return
                frames += 1
                if not is_live or frames % TURN_FRAMES == 0:
                    # What is read from memory or passes no filter would keep everybody else waiting.
                    await asyncio.sleep(0)
            self._tell_what_is_due()

    def _cut(self, frame: Frame, *, is_shared: bool) -> Cut:
        limits = self.demand.limits
        if is_shared:
            return self._around.cuts.cut(frame, self._entries, limits)
        return cut(frame, self._entries.select(frame), limits)

    def _patience_s(self) -> float:
        now = time.monotonic()
        wait_s = self._told_at + self._around.heartbeat_s - now
        if self.demand.wants_watermarks:
            wait_s = min(wait_s, self._watermark_at + WATERMARK_S - now)
        return max(0.0, wait_s)

    def _tell_what_is_due(self) -> None:
        now = time.monotonic()
        if self.demand.wants_watermarks and now >= self._watermark_at + WATERMARK_S:
            self._watermark_at = now
            watermark = self._around.watermark(self.demand)
            if watermark is not None and watermark != self._watermark:
                self._watermark = watermark
                self._tell(Message(watermark_response(watermark), "watermark"))
        if now >= self._told_at + self._around.heartbeat_s:
            if self.queue.is_idle:
                reading, resolved = self._around.reading, self.source.position - 1
                # What topics there are is not for tenants to know.
                held_back_by = reading.held_back_by() if self.demand.subscriber.role == "admin" else ""
                data = heartbeat_response(self.source.head(), resolved, held_back_by)
                self._tell(Message(data, "heartbeat", resolved))
            self._told_at = now

    def _tell(self, message: Message) -> None:
        self.queue.tell(message)
        self._work.set()

    # Sending

    async def _send(self, write: Write) -> None:
        while self.error is None:
            item = self.queue.take(time.monotonic())
            if item is None:
                self._work.clear()
                await self._work.wait()
                continue
            if isinstance(item, WalstreamError):
                self.end(item)
                return
            data = await self._encode(item) if isinstance(item, Batch) else item.data
            if self.error is not None:
                # The stream has ended while this was compressed. Who resumes where it is told to must still get it.
                return
            # Told before it is sent: the subscriber may acknowledge it before the call says that it is on its way. The
            # call has it before anything else happens here, and the end waits for it: `resume` is never beyond that.
            self._count(item, len(data))
            try:
                await write(data)
            except grpc.aio.BaseError:
                raise ClientGone("The client left.") from None
            self._told_at = time.monotonic()
            self.queue.moved()
            self._room.set()

    async def _encode(self, batch: Batch) -> bytes:
        compression = choose_compression(batch.size_bytes, self.demand.compressions)
        if compression and batch.size_bytes > ZSTD_BYTES_MIN:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._around.executor, batch_response, batch.slices, compression)
        return batch_response(batch.slices, compression)

    def _count(self, item: Batch | Message, size_bytes: int) -> None:
        for sent in (self.sent, self._around.sent):
            sent.bytes += size_bytes
            if isinstance(item, Batch):
                sent.entries += item.count
                sent.batches += 1
            elif item.kind == "heartbeat":
                sent.heartbeats += 1
        resume, delivered = item.resolved + 1 if isinstance(item, Message) else item.slices[-1].next, 0
        if isinstance(item, Batch):
            delivered = item.slices[-1].last
        if resume > self.resume:
            self.resume = resume
            self._around.on_sent(self, resume - 1, delivered)


class ClientGone(WalstreamError):
    """There is nobody any more to be sent anything, or to be told why."""


class StreamFailed(WalstreamError):
    """A stream met a bug of ours; the cause is in the log."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("The feed failed.", "Its log says why. Subscribe again.")
        self.__cause__ = cause
