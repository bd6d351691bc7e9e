"""The streaming engine: a slot's copy-both stream as batches of transactions.

Owns the stream once it runs: who may use it when, what the server is told, how long a batch is waited for. Refuses to
know messages (transactions.py) and sockets (postgres/stream.py). Invariants: the server hears from us every half second
whatever the caller does, and what it hears as flushed is what `send_feedback` was given, nothing else.

The connection belongs to one thread at a time, so a lock stands before it. The caller's thread holds it while it takes
frames out of libpq, never while it waits for the network or works on them; a second thread takes it twice a second to
send the status. The hot path pays one uncontended lock for thousands of rows.

What the server may do with the status: *flushed* lets it forget WAL; *written* says what we have received, which is how
it learns that no further keepalive is needed.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final, Self

from walstream.capture.source import Batch, Ladder
from walstream.capture.spill import Budget, SpillFolder
from walstream.capture.transactions import Assembler
from walstream.errors import WalstreamError
from walstream.positions import ZERO, Lsn
from walstream.postgres.protocol import (
    KEEPALIVE_KIND,
    XLOG_DATA_HEADER_BYTES,
    XLOG_DATA_KIND,
    parse_keepalive,
    parse_xlog_data,
    status_update,
)
from walstream.postgres.session import ReplicationSession
from walstream.postgres.stream import CopyBoth

STATUS_INTERVAL_S: Final = 0.5
"""How often the server hears from us; `wal_sender_timeout` (60 s unless somebody changed it) must be longer."""

FEEDBACK_INTERVAL_S: Final = 0.05
"""News of what is durable goes out at once, but not more often than this."""

LINGER_S: Final = 0.002
"""What is complete waits this long for more, when more is arriving, before it is handed out below the limit."""

FEW_FRAMES: Final = 64
"""Frames that take no time: when so few have come, nothing has come after them."""

CLOSE_TIMEOUT_S: Final = 2.0
"""How long closing waits for the server to let go of the slot."""


class StreamingSource:
    """A source over a stream that has begun. A context manager."""

    def __init__(
        self, session: ReplicationSession, stream: CopyBoth, *, memory_bytes_max: int, spill_folder: Path
    ) -> None:
        """Take over a stream together with its session; both end with this source."""
        self.budget = Budget(memory_bytes_max)
        self._session = session
        self._stream = stream
        self._assembler = Assembler(self.budget, SpillFolder(spill_folder).open, sent_at_us=_sent_at_us)
        self._poll = select.poll()
        self._poll.register(stream.fileno(), select.POLLIN)
        self._sent = ZERO
        self._idle_lsn = ZERO
        self._lock = threading.Lock()
        self._durable = ZERO
        self._failure: WalstreamError | None = None
        self._wake = threading.Event()
        self._closing = False
        self._status_thread = threading.Thread(target=self._keep_in_touch, name="walstream-status", daemon=True)
        self._status_thread.start()

    @classmethod
    def open(
        cls,
        dsn: str,
        slot: str,
        publications: Sequence[str],
        start_lsn: int = ZERO,
        *,
        memory_bytes_max: int,
        spill_folder: Path,
    ) -> Self:
        """Connect and begin the slot's stream. Raises what ReplicationSession.start raises."""
        session = ReplicationSession(dsn)
        try:
            stream = session.start(slot, publications, start_lsn)
            return cls(session, stream, memory_bytes_max=memory_bytes_max, spill_folder=spill_folder)
        except BaseException:
            session.close()
            raise

    def skip_before(self, lsn: Lsn) -> None:
        """Leave out transactions that committed before `lsn`; to be said before the first batch."""
        self._assembler.skip_before(lsn)

    def receive_batch(self, limit: int, timeout_s: float) -> Batch:
        """Return the transactions that are complete, about `limit` changes, or after the timeout an empty batch."""
        assembler = self._assembler
        now = time.monotonic()
        deadline = now + timeout_s
        handed_out_by = 0.0
        while assembler.ready_changes < limit:
            frames = self._frames()
            if frames:
                self._take_in(frames)
            now = time.monotonic()
            if assembler.ready:
                handed_out_by = handed_out_by or now + LINGER_S
                if len(frames) < FEW_FRAMES or now >= handed_out_by:
                    break
            elif now >= deadline:
                break
            elif not frames:
                self._poll.poll(min(deadline - now, 1.0) * 1000)
        transactions, last_lsn = assembler.take(limit)
        if not transactions and self._idle_lsn > last_lsn and not assembler.in_block:
            assembler.skip_to(self._idle_lsn)
            last_lsn = assembler.end_lsn
        return Batch(transactions, last_lsn)

    def send_feedback(self, lsn: Lsn) -> None:
        """Say that everything before `lsn` is durable. Returns at once; the server hears it within milliseconds."""
        self._raise_failure()
        if lsn > self._durable:
            self._durable = lsn
            self._wake.set()

    def ladder(self) -> Ladder:
        """Return how far the stages have come. The server tells its end only when it has nothing else to say."""
        received = self._assembler.end_lsn
        sent = max(self._sent, received)
        return Ladder(server_end=sent, sent=sent, received=received, confirmed=self._durable)

    def close(self) -> None:
        """Tell the server what is durable, end the stream and free everything. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._status_thread.join()
        # When the connection is gone, the next session tells what is durable.
        with contextlib.suppress(WalstreamError):
            if self._failure is None:
                self._send_status()
                # In order, because closing a socket with something unread in it would take the last status back.
                self._stream.finish(CLOSE_TIMEOUT_S)
        self._assembler.close()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _frames(self) -> list[bytes]:
        with self._lock:
            frames = self._stream.drain()
        # Reading first: when a status could not be sent, what the server said before it went away tells why.
        if not frames:
            self._raise_failure()
        return frames

    def _take_in(self, frames: list[bytes]) -> None:
        last = frames[-1]
        if set(map(_kind, frames)) != _ONLY_XLOG_DATA:
            self._take_in_keepalives([frame for frame in frames if frame[0] == KEEPALIVE_KIND])
            frames = [frame for frame in frames if frame[0] == XLOG_DATA_KIND]
        self._assembler.feed(frames, XLOG_DATA_HEADER_BYTES)
        # A keepalive says that everything before its LSN was sent before it; after it nothing may have come.
        self._idle_lsn = parse_keepalive(last).wal_end if last[0] == KEEPALIVE_KIND else ZERO

    def _take_in_keepalives(self, frames: list[bytes]) -> None:
        keepalives = [parse_keepalive(frame) for frame in frames]
        self._sent = max(self._sent, *(keepalive.wal_end for keepalive in keepalives))
        if any(keepalive.reply_requested for keepalive in keepalives):
            self._send_status()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _keep_in_touch(self) -> None:
        """Send the status twice a second, and soon after there is news. The second thread."""
        while not self._closing:
            self._wake.wait(STATUS_INTERVAL_S)
            self._wake.clear()
            if self._closing:
                return
            try:
                self._send_status()
            except WalstreamError as error:
                self._failure = error
                return
            time.sleep(FEEDBACK_INTERVAL_S)

    def _send_status(self) -> None:
        durable = self._durable
        written = max(self._sent, self._assembler.end_lsn, durable)
        with self._lock:
            self._stream.send(status_update(written, durable, durable, time.time_ns() // 1000))


_kind = itemgetter(0)
_ONLY_XLOG_DATA: Final = {XLOG_DATA_KIND}


def _sent_at_us(frame: bytes) -> int:
    return parse_xlog_data(frame).server_time_us
