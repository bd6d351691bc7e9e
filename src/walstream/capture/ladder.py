"""The LSN ladder of capture: how far each stage has come, once a second, for status, metrics and the console.

Owns the record in the compacted topic `<prefix>.status` and the thread that writes it, which asks the server for the
end of its WAL by itself: the ladder must be right above all when everything else stands still. All values are plain
numbers; an LSN is its number of bytes, so that differences are bytes behind. A ladder that cannot be written is not an
error of the capture.

    server_end ≥ sent ≥ received ≥ durable     the server's WAL; what it has sent; what came whole; what is in the log
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import psycopg

from walstream.capture.commit_points import PointRecord
from walstream.capture.kafka import LogAddress
from walstream.capture.reading import PartitionReader
from walstream.capture.source import Ladder as SourceLadder
from walstream.capture.topics import Topics
from walstream.errors import WalstreamError
from walstream.positions import Lsn, TopicPartition
from walstream.postgres.catalogue import wal_end
from walstream.postgres.session import connect

INTERVAL_S: Final = 1.0
KEY: Final = b"capture"

OnLook = Callable[["LadderRecord"], None]
"""Is told of each look, by the ladder's thread."""


class LadderRecord(msgspec.Struct, frozen=True):
    """One look at the ladder."""

    instance: str
    gen: int
    source_epoch: int
    at_ms: int
    server_end: int
    sent: int
    received: int
    durable: int
    lag_bytes: int
    """From the durable rung to the top."""
    lag_ms: int
    """Age of the newest durable commit while something newer is known; 0 when everything received is durable."""
    last_commit_time_us: int
    rows_total: int
    bytes_total: int
    stage: str = "capture"


def look(instance: str, rungs: SourceLadder, server_end: Lsn | None, durable: PointRecord, now_ms: int) -> LadderRecord:
    """Put the rungs together; a rung is never below the one under it, though they are read one after the other."""
    durable_lsn = Lsn.parse(durable.end_lsn)
    received = max(rungs.received, durable_lsn)
    sent = max(rungs.sent, received)
    end = max(server_end or sent, rungs.server_end, sent)
    is_behind = received > durable_lsn and durable.last_commit_time_us > 0
    return LadderRecord(
        instance=instance,
        gen=durable.gen,
        source_epoch=durable.source_epoch,
        at_ms=now_ms,
        server_end=int(end),
        sent=int(sent),
        received=int(received),
        durable=int(durable_lsn),
        lag_bytes=int(end - durable_lsn),
        lag_ms=max(0, now_ms - durable.last_commit_time_us // 1000) if is_behind else 0,
        last_commit_time_us=durable.last_commit_time_us,
        rows_total=durable.rows_total,
        bytes_total=durable.bytes_total,
    )


class LadderWriter:
    """Writes a look every second, in a thread of its own."""

    def __init__(
        self,
        dsn: str,
        instance: str,
        rungs: Callable[[], SourceLadder],
        durable: Callable[[], PointRecord | None],
        write: Callable[[bytes, bytes], None],
        on_look: OnLook | None = None,
    ) -> None:
        """Take what to ask each time, what writes a record (key, value), and who else wants to know."""
        self._dsn = dsn
        self._instance = instance
        self._rungs = rungs
        self._durable = durable
        self._write = write
        self._on_look = on_look
        self._connection: psycopg.Connection[Any] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="walstream-ladder", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Write one last look and end."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        while True:
            is_over = self._over.wait(INTERVAL_S)
            durable = self._durable()
            if durable is not None:
                record = look(self._instance, self._rungs(), self._server_end(), durable, time.time_ns() // 1_000_000)
                with contextlib.suppress(BufferError, WalstreamError):
                    self._write(KEY, msgspec.json.encode(record))
                if self._on_look is not None:
                    self._on_look(record)
            if is_over:
                self._disconnect()
                return

    def _server_end(self) -> Lsn | None:
        try:
            if self._connection is None:
                self._connection = connect(self._dsn, application_name="walstream ladder")
            return wal_end(self._connection)
        except WalstreamError:
            self._disconnect()
            return None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def read_ladder(address: LogAddress, prefix: str) -> LadderRecord | None:
    """Return the last look that was written; None when there is none."""
    topics = Topics(address, prefix)
    partition = TopicPartition(topics.names.status, 0)
    if not topics.facts([partition.topic]):
        return None
    found: LadderRecord | None = None
    reader = PartitionReader(address)
    try:
        for message in reader.read(
            partition, topics.starts([partition])[partition], topics.ends([partition])[partition]
        ):
            if message.key() == KEY and message.value():
                found = msgspec.json.decode(message.value() or b"", type=LadderRecord)
    finally:
        reader.close()
    return found
