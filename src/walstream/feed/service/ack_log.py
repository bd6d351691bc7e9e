"""The acknowledgements in the log: the compacted topic `_walstream.acks`, written, and read by every feed of the log.

Owns the topic and the two threads of librdkafka that write and read it; what records mean is in `watermarks`. An
acknowledgement is told to be durable when the log has said so (acks=all) and this feed has read it back: so all feeds
have the same view, in the order of the topic. Compaction keeps the last record of a key; a record that came behind a
larger one is followed by the larger one again before its writer is answered, so that nothing goes back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.cimpl import NewTopic

from walstream import logs
from walstream.capture.kafka import TIMEOUT_S, LogAddress
from walstream.errors import LogUnfit, TopicExists, UnreachableError, WalstreamError
from walstream.feed.reading.log_errors import NAMELESS
from walstream.feed.service.watermarks import Subscriber, Watermarks

log = logs.get(__name__)

TOPIC: Final = "_walstream.acks"
SETTINGS: Final = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
POLL_S: Final = 0.2
PAUSE_S: Final = 1.0
"""How long a thread waits before it goes on after something that nobody foresaw."""

FOLD_RECORDS_MAX: Final = 500


class AckLog:
    """Reads the topic for as long as it is open, and writes to it."""

    def __init__(
        self,
        address: LogAddress,
        watermarks: Watermarks,
        on_change: Callable[[Subscriber], None],
        *,
        write_timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Fold into `watermarks`, and call `on_change` on the event loop for each record, with whom it is about."""
        self._address = address
        self._watermarks = watermarks
        self._on_change = on_change
        self._write_timeout_s = write_timeout_s
        self._loop = asyncio.get_running_loop()
        self._folded = 0
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._is_closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._producer: Producer | None = None

    async def open(self) -> None:
        """Create the topic when it is missing, and read it to its end. Raises LogUnfit, UnreachableError."""
        end = await self._loop.run_in_executor(None, self._prepare)
        self._producer = self._address.producer(
            {"acks": "all", "linger.ms": 0, "message.timeout.ms": int(self._write_timeout_s * 1000)}
        )
        for name, work in (("read", self._read), ("write", self._serve_deliveries)):
            thread = threading.Thread(target=work, name=f"walstream-acks-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        await self._wait_until_folded(end - 1)

    async def close(self) -> None:
        """Let go of the log."""
        self._is_closing.set()
        for thread in self._threads:
            await self._loop.run_in_executor(None, thread.join)
        for future in [one for waiting in self._waiting.values() for one in waiting]:
            future.cancel()

    # Writing

    async def acknowledge(self, subscriber: Subscriber, lsn: int) -> int:
        """Make an acknowledgement durable, unless a larger one is; return the largest. Raises UnreachableError."""
        while (acked := self._watermarks.acked(subscriber)) < lsn or self._watermarks.is_stale(subscriber):
            await self.write(subscriber.key("ack"), Watermarks.record(max(lsn, acked), now_ms()))
        return acked

    async def tell(self, subscriber: Subscriber, sent: int, *, is_active: bool = True) -> None:
        """Let all feeds know that a subscriber is there, and up to where it was sent everything."""
        clean, covered = self._watermarks.done(subscriber), self._watermarks.covered(subscriber)
        record = Watermarks.record(sent, now_ms(), clean=clean, covered=covered, is_active=is_active)
        await self.write(subscriber.key("seen"), record)

    async def forget(self, subscriber: Subscriber) -> None:
        """Remove everything about a subscriber."""
        await self.write(subscriber.key("seen"), None)
        await self.write(subscriber.key("ack"), None)

    async def write(self, key: bytes, value: bytes | None) -> None:
        """Append a record and read it back. Raises UnreachableError."""
        assert self._producer is not None
        delivered: asyncio.Future[int] = self._loop.create_future()

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            self._post(self._settle, delivered, error, message.offset())

        with self._address.translated(TOPIC):
            try:
                self._producer.produce(TOPIC, value, key, partition=0, on_delivery=on_delivery)
            except BufferError:
                raise UnreachableError("Too many acknowledgements wait to be written.", "Try again.") from None
        await self._wait_until_folded(await delivered)

    def _settle(self, delivered: asyncio.Future[int], error: KafkaError | None, offset: int | None) -> None:
        if delivered.done():
            return
        if error is not None:
            delivered.set_exception(self._address.error(error, TOPIC))
        else:
            delivered.set_result(offset or 0)

    async def _wait_until_folded(self, offset: int) -> None:
        if offset < self._folded:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(offset, []).append(future)
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                await future
        except TimeoutError:
            message = f"The log at {self._address.bootstrap} does not let {TOPIC} be read."
            raise UnreachableError(message).without_names(*NAMELESS) from None

    def _serve_deliveries(self) -> None:
        assert self._producer is not None
        while not self._is_closing.is_set():
            with self._going_on():
                self._producer.poll(POLL_S)
        self._producer.flush(TIMEOUT_S)

    # Reading

    def _prepare(self) -> int:
        admin = self._address.admin()
        with self._address.translated(TOPIC):
            known = admin.list_topics(timeout=TIMEOUT_S).topics.get(TOPIC)
        if known is None:
            with suppress(TopicExists):
                new = NewTopic(TOPIC, 1, config=SETTINGS)
                self._address.wait(admin.create_topics([new], request_timeout=TIMEOUT_S)[TOPIC], TOPIC)
        elif len(known.partitions) != 1:
            raise LogUnfit(f"{TOPIC} has {len(known.partitions)} partitions; acknowledgements need exactly one.")
        return self._end()

    def _end(self) -> int:
        """Return where the topic ends; other brokers of Apache Kafka learn of a new topic a moment later."""
        consumer = self._address.consumer()
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while True:
                try:
                    with self._address.translated(TOPIC):
                        return int(consumer.get_watermark_offsets(KafkaPartition(TOPIC, 0), TIMEOUT_S)[1])
                except WalstreamError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(POLL_S)
        finally:
            consumer.close()

    def _read(self) -> None:
        consumer = self._address.consumer({"fetch.wait.max.ms": 500, "fetch.error.backoff.ms": 50})
        try:
            consumer.assign([KafkaPartition(TOPIC, 0, 0)])
            while not self._is_closing.is_set():
                with self._going_on():
                    self._take(consumer)
        finally:
            consumer.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Log what nobody foresaw, and wait a little: without its threads every Ack would wait in vain."""
        try:
            yield
        except Exception:
            log.exception("acknowledgements failed")
            self._is_closing.wait(PAUSE_S)

    def _take(self, consumer: Consumer) -> None:
        first = consumer.poll(POLL_S)
        if first is None:
            return
        # More than one at once only when they are there already: `consume` would wait for all that it may return.
        messages = [first, *consumer.consume(FOLD_RECORDS_MAX, 0)]
        records: list[tuple[bytes, bytes | None]] = []
        end = 0
        for message in messages:
            error = message.error()
            if error is None:
                records.append((message.key() or b"", message.value()))
                end = (message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                end = max(end, message.offset() or 0)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                consumer.assign([KafkaPartition(TOPIC, 0, 0)])
            else:
                log.warning("acknowledgements cannot be read for now", reason=str(error))
        self._post(self._fold, records, end)

    def _fold(self, records: list[tuple[bytes, bytes | None]], end: int) -> None:
        changed = {self._take_in(key, value) for key, value in records}
        self._folded = max(self._folded, end)
        for offset in [offset for offset in self._waiting if offset < self._folded]:
            for future in self._waiting.pop(offset):
                if not future.done():
                    future.set_result(None)
        for subscriber in changed:
            if subscriber is not None:
                self._on_change(subscriber)

    def _take_in(self, key: bytes, value: bytes | None) -> Subscriber | None:
        try:
            return self._watermarks.fold(key, value)
        except Exception:
            # Whoever waits for a record of its own must not wait in vain because of another's.
            log.exception("record of acknowledgements not taken in")
            return None

    def _post(self, act: Callable[..., None], *arguments: Any) -> None:
        # The loop may be gone when a thread still has something to say.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *arguments)


def now_ms() -> int:
    """Return the wall clock."""
    return time.time_ns() // 1_000_000
