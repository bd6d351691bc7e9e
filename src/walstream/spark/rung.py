"""The pipeline's rung of the ladder: how far its tables have come, once a second, in `<prefix>.status`.

Owns the record and the thread that writes it; refuses to know where the numbers come from. All values are plain
numbers; an LSN is its number of bytes. A rung that cannot be written is not an error of the pipeline.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from walstream.capture.kafka import LogAddress
from walstream.capture.reading import PartitionReader
from walstream.capture.topics import Topics
from walstream.errors import WalstreamError
from walstream.positions import TopicPartition
from walstream.spark.progress import View

INTERVAL_S: Final = 1.0
KEY: Final = b"pipeline"


class PipelineRecord(msgspec.Struct, frozen=True):
    """One look at the pipeline."""

    instance: str
    source_epoch: int
    at_ms: int
    applied: int
    """LSN up to which everything is in the tables."""
    point: int
    """Offset of that commit point."""
    batch_id: int
    batch_ms: int
    rows_total: int
    rows_per_s: float
    freshness_ms: int | None
    lag_rows: int | None
    tables: int
    tables_waiting: int
    tables_stopped: int
    stage: str = "pipeline"


def record(view: View, instance: str, now_ms: int) -> PipelineRecord:
    """Put a look into a record."""
    states = [table.state for table in view.tables]
    return PipelineRecord(
        instance=instance,
        source_epoch=view.source_epoch,
        at_ms=now_ms,
        applied=int(view.end_lsn),
        point=view.point,
        batch_id=view.batch_id,
        batch_ms=view.batch_ms,
        rows_total=view.rows_total,
        rows_per_s=round(view.rows_per_s, 1),
        freshness_ms=view.freshness_ms,
        lag_rows=view.lag_rows,
        tables=len(states),
        tables_waiting=states.count("waiting"),
        tables_stopped=states.count("stopped"),
    )


class RungWriter:
    """Writes a look every second, in a thread of its own, and tells whoever else wants to know. A context manager."""

    def __init__(
        self,
        address: LogAddress,
        prefix: str,
        look: Callable[[], View],
        on_look: Callable[[View], None] = lambda _: None,
    ) -> None:
        self._topic = Topics(address, prefix).names.status
        self._producer = address.producer({"linger.ms": 5, "message.timeout.ms": 5_000})
        self._look = look
        self._on_look = on_look
        self._instance = f"pipeline@{socket.gethostname()}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="walstream-rung", daemon=True)

    def _run(self) -> None:
        while True:
            is_over = self._over.wait(INTERVAL_S)
            view = self._look()
            self._on_look(view)
            if view.batches:
                value = msgspec.json.encode(record(view, self._instance, time.time_ns() // 1_000_000))
                with contextlib.suppress(BufferError, WalstreamError):
                    self._producer.produce(self._topic, value, KEY)
            self._producer.poll(0)
            if is_over:
                self._producer.flush(5)
                return

    def __enter__(self) -> RungWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)


def read_rung(address: LogAddress, prefix: str) -> PipelineRecord | None:
    """Return the last look that was written; None when there is none."""
    topics = Topics(address, prefix)
    partition = TopicPartition(topics.names.status, 0)
    if not topics.facts([partition.topic]):
        return None
    found: PipelineRecord | None = None
    reader = PartitionReader(address)
    try:
        start, end = topics.starts([partition])[partition], topics.ends([partition])[partition]
        for message in reader.read(partition, start, end):
            if message.key() == KEY and message.value():
                found = msgspec.json.decode(message.value() or b"", type=PipelineRecord)
    finally:
        reader.close()
    return found
