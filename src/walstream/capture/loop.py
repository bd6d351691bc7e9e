"""The loop of one generation: batches out of the source, rows into the sink, until it is told to stop.

Owns what happens between receiving and handing over; refuses to know how source and sink came about. Invariants: a
batch is one group, so that a transaction is never divided between points; nothing is confirmed here, the sink does it.

    receive a batch ─▶ render ─▶ hand over to the producer ─▶ close the group        this thread
    last rows durable ─▶ point ─▶ point durable ─▶ feedback                          the sink's threads
    status to the server twice a second                                              the source's thread

So the server decodes, we render, the log syncs, all at once. What bounds it is the producer's queue: when that is full
this thread waits, and the server hears from us all the same. When little comes, this thread sends it and waits for it
to arrive: what commits meanwhile is the next group, so that a group's cost is shared and nothing waits for a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from walstream import logs
from walstream.capture.engines import ResumableSource
from walstream.capture.envelope import Renderer, Stamp
from walstream.capture.ledger import Ledger
from walstream.capture.provenance import Output
from walstream.capture.sink import Sink
from walstream.capture.snapshot import Snapshot
from walstream.capture.source import Batch, Transaction
from walstream.errors import DecodeError, HistoryForked, UnreachableError
from walstream.positions import Lsn

RECEIVE_S: Final = 0.2
RECEIVE_MORE_S: Final = 0.002
"""After a full batch more is expected; when none comes so soon, its rows need not wait for company."""
RECEIVE_BESIDE_SNAPSHOT_S: Final = 0.002
IDLE_POINT_INTERVAL_S: Final = 1.0
"""An idle server's WAL moves by itself; so often at most a point is written for nothing but that."""
STOP_S_MAX: Final = 10.0

log = logs.get(__name__)

Stop = Callable[[], bool]
"""Whether the capture is to end."""


class Patience:
    """How long a stop waits for a log that takes no rows."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._since_s: float | None = None

    def tend(self) -> None:
        """Raise when a stop has been wanted for too long."""
        if not self._stop():
            return
        self._since_s = self._since_s or time.monotonic()
        if time.monotonic() - self._since_s > STOP_S_MAX:
            raise UnreachableError("The log takes no rows, so that what was received cannot be made durable.")


class Heartbeat:
    """Something to be done once in a while."""

    def __init__(self, interval_s: float, beat: Callable[[], None]) -> None:
        """Take the interval; 0 means never."""
        self._interval_s = interval_s
        self._beat = beat
        self._next_s = time.monotonic() + interval_s

    def tend(self) -> None:
        """Do it if it is time."""
        if self._interval_s and time.monotonic() >= self._next_s:
            self._beat()
            self._next_s = time.monotonic() + self._interval_s


class Loop:
    """The loop of one generation."""

    def __init__(
        self,
        source: ResumableSource,
        sink: Sink,
        renderer: Renderer,
        ledger: Ledger,
        *,
        limit: int,
        snapshot: Snapshot | None = None,
        heartbeat: Heartbeat | None = None,
        dead_letter: str = "",
    ) -> None:
        """Take everything that is running; `dead_letter` is the topic of what cannot be understood, empty: stop."""
        self._source = source
        self._sink = sink
        self._renderer = renderer
        self._limit = limit
        self._snapshot = snapshot
        self._heartbeat = heartbeat
        self._dead_letter = dead_letter
        self._gen = ledger.gen
        self._source_epoch = ledger.source_epoch
        self._ended_lsn = ledger.end_lsn
        self._idle_point_s = 0.0
        self._waits_for_company = False

    def run(self, stop: Stop) -> None:
        """Stream until `stop` says so; then make everything durable that has been received whole."""
        snapshot, receive_s = self._snapshot, RECEIVE_S
        while not stop():
            self._sink.check()
            with self._source.receive_batch(self._limit, receive_s) as batch:
                self._take(batch)
            receive_s = RECEIVE_MORE_S if self._waits_for_company else RECEIVE_S
            if snapshot is not None:
                moved = snapshot.pump()
                receive_s = 0.0 if moved else RECEIVE_BESIDE_SNAPSHOT_S if snapshot.is_active else receive_s
            if self._heartbeat is not None:
                self._heartbeat.tend()
        self._sink.drain()

    def _take(self, batch: Batch) -> None:
        if batch.transactions:
            for transaction in batch.transactions:
                self._write(transaction)
            last = batch.transactions[-1]
            self._end_group(batch.last_lsn, last.xid, last.commit_time_us)
            self._waits_for_company = True
        if self._waits_for_company and batch.change_count < self._limit and not self._is_in_company:
            self._waits_for_company = False
            self._sink.hurry()
        if batch.transactions:
            return
        if batch.last_lsn > self._ended_lsn and time.monotonic() >= self._idle_point_s:
            self._idle_point_s = time.monotonic() + IDLE_POINT_INTERVAL_S
            self._end_group(batch.last_lsn)

    @property
    def _is_in_company(self) -> bool:
        """Whether many rows are on their way, of the stream or of a table: to wait for them would be to lose time."""
        return self._sink.is_busy or (self._snapshot is not None and self._snapshot.is_active)

    def _end_group(self, end_lsn: Lsn, xid: int = 0, commit_time_us: int = 0) -> None:
        self._sink.end_group(end_lsn, xid, commit_time_us)
        self._ended_lsn = end_lsn

    def _write(self, transaction: Transaction) -> None:
        if transaction.commit_lsn < self._ended_lsn:
            raise HistoryForked(
                f"PostgreSQL sent transaction {transaction.xid}, committed at {transaction.commit_lsn}, after it had "
                f"sent everything before {self._ended_lsn}.",
                "Commits come in order: the server has gone back to an earlier state. Inspect with "
                "`walstream capture check`, then begin anew: walstream capture run --new-epoch",
            )
        stamp = Stamp.of(transaction, time.time_ns() // 1_000_000)
        timestamp_ms = transaction.commit_time_us // 1000
        if not self._dead_letter:
            self._sink.write(self._renderer.render(transaction.rows, stamp), timestamp_ms)
        else:
            dead: list[Output] = []
            outputs = self._renderer.render(
                transaction.rows, stamp, lambda error, seq: dead.append(self._dead(transaction, error, seq))
            )
            self._sink.write(outputs, timestamp_ms)
            self._sink.write(dead, timestamp_ms)
        transaction.close()

    def _dead(self, transaction: Transaction, error: DecodeError, seq: int) -> Output:
        """Return the record for a change that cannot be understood: its bytes, and in headers all that is known."""
        log.error("change not understood", error=error.message, xid=transaction.xid, seq=seq)
        numbers = {
            "gen": self._gen,
            "source_epoch": self._source_epoch,
            "commit_lsn": int(transaction.commit_lsn),
            "txid": transaction.xid,
            "seq": seq,
        }
        headers = [(name, b"%d" % value) for name, value in numbers.items()]
        return self._dead_letter, error.data, None, [*headers, ("error", error.message.encode())]
