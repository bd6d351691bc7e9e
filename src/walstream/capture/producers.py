"""The producers of a capture, the threads that hear their answers, and the one failure that ends them all.

Owns librdkafka's settings for writing. Rows and points have a producer each: rows wait a moment to travel in company,
while a point, with which a whole group waits, goes at once and over a connection of its own.

    idempotent, acks=all          what is acknowledged is durable, once, in order
    enable.gapless.guarantee      a batch that fails for good ends the producer, it does not leave a hole
    message.timeout.ms = 0        never: a row given up on would be a hole that the guarantee does not cover. A log that
                                  stays away is noticed by the sink, which gives up as a whole
    linger.ms                     rows wait for company while more are coming, and not when the source has paused: then
                                  `hurry` sends them at once. librdkafka's thread spins while rows that have waited
                                  long enough find more than four others of their partition on the way (on a busy
                                  machine up to a third of a core), so this is longer than the log takes to answer
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from walstream.capture.kafka import LogAddress
from walstream.capture.topics import MESSAGE_BYTES_MAX
from walstream.errors import DeliveryFailed, UnreachableError, WalstreamError

POLL_S: Final = 0.2
FLUSH_S_MAX: Final = 2.0
HURRY_S: Final = 0.001
"""Long enough for librdkafka's thread to notice; with less it does not."""

QUEUE_MESSAGES_MAX: Final = 20_000
QUEUE_KIB_MAX: Final = 32 * 1024
"""Rows that wait in librdkafka; a record with its headers costs about 700 bytes more than its value. That
is a quarter of a second of work."""

_DURABLE: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    "enable.gapless.guarantee": True,
    "message.timeout.ms": 0,
    "request.timeout.ms": 30_000,
    "message.max.bytes": MESSAGE_BYTES_MAX,
    "queue.buffering.max.messages": QUEUE_MESSAGES_MAX,
    "queue.buffering.max.kbytes": QUEUE_KIB_MAX,
    "compression.type": "lz4",
}
ROWS: Final[Mapping[str, Any]] = {
    **_DURABLE,
    "linger.ms": 50,
    "batch.size": 1_000_000,
    "batch.num.messages": 10_000,
}
POINTS: Final[Mapping[str, Any]] = {**_DURABLE, "linger.ms": 0}

Delivered = Callable[[KafkaError | None, Message], None]


class Failure:
    """The first thing that went wrong, in whichever thread, and a way to wait that ends with it."""

    def __init__(self) -> None:
        self.error: WalstreamError | None = None
        self._changed = threading.Condition()

    def set(self, error: WalstreamError) -> None:
        """Keep the error unless there is one already; wake who waits."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def changed(self) -> None:
        """Wake who waits: something has come true."""
        with self._changed:
            self._changed.notify_all()

    def wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float,
        too_late: Callable[[], WalstreamError],
        tend: Callable[[], None] | None = None,
    ) -> None:
        """Wait until the condition is true, calling `tend` meanwhile. Raises the failure, or `too_late()`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            with self._changed:
                if condition() or self._changed.wait_for(lambda: condition() or self.error is not None, POLL_S):
                    self.check()
                    return
            if time.monotonic() > deadline:
                raise too_late()
            if tend is not None:
                tend()


class PolledProducer:
    """A producer and the thread in which its delivery reports arrive."""

    def __init__(
        self,
        address: LogAddress,
        settings: Mapping[str, Any],
        name: str,
        failure: Failure,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        """Begin to connect; `on_tick` is called by the thread, at least five times a second."""
        self._address = address
        self._failure = failure
        self._on_tick = on_tick
        self.reason = ""
        """What librdkafka last said about a connection that does not come about."""
        self.producer: Producer = address.producer({**settings, "error_cb": self._heard})
        self.produce = self.producer.produce
        self._is_closed = False
        self._thread = threading.Thread(target=self._poll, name=f"walstream-{name}", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self.producer)

    def offset(self, topic: str, error: KafkaError | None, message: Message) -> int | None:
        """Return where a record was delivered to; None after a failure, which is then set."""
        if error is not None:
            self._failure.set(self._address.error(error, f"{topic} does not take a record"))
            return None
        offset = message.offset()
        if offset is None:
            # What librdkafka makes of an answer for a batch that the log has already: where it lies is not in it.
            self._failure.set(
                DeliveryFailed(
                    f"{topic} acknowledged a record without saying at which offset it is.",
                    "The rows are sent again by the next generation: start capture again, or use --retry.",
                )
            )
        return offset

    def silent(self, what: str) -> WalstreamError:
        """Return the error for a log that does not answer."""
        reason = f" ({self.reason})" if self.reason else ""
        return UnreachableError(f"The log at {self._address.bootstrap} does not answer{reason}: {what}.")

    def hurry(self) -> None:
        """Send what waits for company, without waiting for its delivery."""
        # What a producer does not survive is heard by the thread that polls it.
        with contextlib.suppress(KafkaException):
            self.producer.flush(HURRY_S)

    def close(self) -> None:
        """End the thread and forget what was not delivered; should it arrive all the same, it is void."""
        self._is_closed = True
        self._thread.join()
        # Forgetting counts as a failure for a producer without gaps, and this is its end anyway.
        with contextlib.suppress(KafkaException):
            if self._failure.error is None:
                self.producer.flush(FLUSH_S_MAX)
            self.producer.purge()
            self.producer.poll(0)

    def _poll(self) -> None:
        poll = self.producer.poll
        while not self._is_closed:
            try:
                poll(POLL_S)
                if self._on_tick is not None:
                    self._on_tick()
            except WalstreamError as error:
                self._failure.set(error)
            except KafkaException as error:
                # Raised for errors that a producer does not survive.
                self._failure.set(self._address.error(error.args[0], "The producer cannot go on"))
                return
            except Exception as error:
                self._failure.set(DeliveryFailed(f"The thread that hears the log's answers failed: {error!r}."))
                raise

    def _heard(self, error: KafkaError) -> None:
        if error.fatal():
            self._failure.set(self._address.error(error, "The producer cannot go on"))
        elif error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.reason = error.str()
