"""The producer that every throughput is measured with: confluent-kafka, fed as fast as Python can feed it.

`produce_batch` with one prepared list is that; a short count is its way to say that the queue is full. No delivery
callbacks: they would cost more than the node does, and the end offset proves the delivery afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import Producer

CHUNK = 10_000


def produce(
    bootstrap: str,
    topic: str,
    value: bytes,
    count: int,
    acks: int | str = 1,
    settle: Callable[[], object] = lambda: None,
) -> float:
    """Send `count` records as fast as the client can and return records per second.

    The clock stops when the last one is acknowledged and `settle`, which waits for what that does not say, is over.
    """
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": acks,
            "linger.ms": 10,
            "batch.size": 1_000_000,
            "batch.num.messages": 100_000,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 256 * 1024,
        }
    )
    producer.list_topics(topic)
    messages = [{"value": value}] * CHUNK
    sent = 0
    started = time.perf_counter()
    while sent < count:
        chunk = messages if count - sent >= CHUNK else messages[: count - sent]
        taken = producer.produce_batch(topic, chunk, 0)
        sent += taken
        if taken < len(chunk):
            producer.poll(0.001)
    if producer.flush(120):
        raise TimeoutError(f"{len(producer)} records were not acknowledged in time")
    settle()
    return count / (time.perf_counter() - started)
