"""The copy-both stream of a slot: frames in, status updates out, without blocking and without a call too many.

Owns the reading of libpq's buffers; refuses to know what a frame means. Frames come as bytes, whole (`w` and `k`, see
protocol.py), in order, many at once.

PostgreSQL sends each row by itself: a reader without work is woken often, one with work finds the buffers filled.
Sleeping a little in mid-transaction to gather more was measured and gained nothing.

Belongs to one thread at a time.
"""

from __future__ import annotations

import select
import time
from typing import Final

import psycopg
from psycopg import pq

from walstream.errors import ConnectionLost, PublicationMissing, WalstreamError
from walstream.postgres.failures import failure, publication_skipped, result_failure

FRAMES_MAX: Final = 4096
"""As many frames as one call gives: the memory they take stays small, and the caller gets its turn."""

BYTES_MAX: Final = 4 * 1024 * 1024
"""… and about as many bytes, unless a single frame is larger."""

# OpenSSL may hold back half of a record that libpq had no room for, and the socket does not show it.
_READS_WITH_TLS: Final = 3


class CopyBoth:
    """A stream that is running. It ends with an exception: ConnectionLost, or what the server said."""

    def __init__(self, pgconn: pq.abc.PGconn, doing: str) -> None:
        """Take a connection that has just entered copy-both; `doing` completes "while …" in errors."""
        self._pgconn = pgconn
        self._doing = doing
        self._reads = _READS_WITH_TLS if pgconn.ssl_in_use else 1
        self._poll = select.poll()
        self._poll.register(pgconn.socket, select.POLLIN)
        self._unsent = False
        self._pending: list[bytes] = []
        self._failure: WalstreamError | None = None
        self._ended = False
        self.frames_received = 0
        self.bytes_received = 0
        pgconn.notice_handler = self._notice

    def fileno(self) -> int:
        """The socket, to be waited on beside others; drain first, because something may be buffered already."""
        return self._pgconn.socket

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame, or None when there was none in time."""
        if not self._pending:
            self._pending = self.drain(timeout_s)
            self._pending.reverse()
        return self._pending.pop() if self._pending else None

    def drain(self, timeout_s: float = 0.0, frames_max: int = FRAMES_MAX) -> list[bytes]:
        """Return the frames that are there, waiting up to the timeout for the first one; empty when none came.

        Frames that came before the end of the stream are returned first; the exception comes with the next call.
        """
        if self._pending:
            frames, self._pending = self._pending[::-1], []
            return frames
        frames = []
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        bytes_max = self.bytes_received + BYTES_MAX
        looked = False
        while True:
            new = self._take(frames, frames_max)
            if isinstance(self._failure, PublicationMissing):
                # Rows were skipped before these frames, and a keepalive among them would have us confirm the gap.
                raise self._failure
            full = len(frames) >= frames_max or self.bytes_received >= bytes_max
            if full or (frames and looked and not new):
                return frames
            if self._failure is not None or self._ended:
                if frames:
                    return frames
                raise self._end()
            if not frames and looked and not self._wait(deadline):
                return frames
            self._consume()
            looked = True

    def send(self, data: bytes) -> None:
        """Send a frame; what the socket does not take now is sent by the next call of anything."""
        try:
            self._pgconn.put_copy_data(data)
        except psycopg.OperationalError as error:
            raise self._failure or self._lost(error) from None
        self._flush()

    def finish(self, timeout_s: float = 5.0) -> bool:
        """End the stream in order, dropping frames that still come; whether the server let go of the slot in time."""
        deadline = time.monotonic() + timeout_s
        try:
            self._pgconn.put_copy_end()
            self._flush()
            while time.monotonic() < deadline:
                self.drain(deadline - time.monotonic())
        except psycopg.OperationalError:
            return False
        except WalstreamError:
            return self._ended and self._has_answered(deadline)
        return False

    def _take(self, frames: list[bytes], frames_max: int) -> int:
        """Move whole frames from libpq's buffer into the list, until it holds `frames_max`; return how many."""
        before = len(frames)
        get, append, size = self._pgconn.get_copy_data, frames.append, 0
        try:
            for _ in range(frames_max - before):
                size, data = get(1)
                if size <= 0:
                    break
                append(bytes(data))
        except psycopg.OperationalError as error:
            self._failure = self._failure or self._lost(error)
        if size < 0:
            self._ended = True
        new = len(frames) - before
        self.frames_received += new
        self.bytes_received += sum(map(len, frames[before:]))
        return new

    def _consume(self) -> None:
        """Let libpq read what the socket has. A broken connection is told only after what came before it."""
        try:
            for _ in range(self._reads):
                self._pgconn.consume_input()
        except psycopg.OperationalError as error:
            self._failure = self._failure or self._lost(error)
        if self._unsent:
            self._flush()

    def _wait(self, deadline: float) -> bool:
        """Wait for the socket; false when the time is over."""
        left_s = deadline - time.monotonic()
        return left_s > 0 and bool(self._poll.poll(left_s * 1000))

    def _flush(self) -> None:
        try:
            unsent = self._pgconn.flush() != 0
        except psycopg.OperationalError as error:
            self._failure = self._failure or self._lost(error)
            return
        if unsent != self._unsent:
            self._unsent = unsent
            self._poll.modify(self._pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))

    def _end(self) -> WalstreamError:
        """Say why the stream is over: what the server reported, if it did."""
        if self._ended and not isinstance(self._failure, PublicationMissing):
            try:
                result = self._pgconn.get_result()
            except psycopg.OperationalError as error:
                return self._lost(error)
            if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
                self._failure = result_failure(result, self._doing)
        if self._failure is None:
            self._failure = ConnectionLost(f"PostgreSQL ended the stream while {self._doing}: it is shutting down.")
        return self._failure

    def _has_answered(self, deadline: float) -> bool:
        """Wait for the server's last word after the end of the copy: then the slot is free."""
        try:
            while time.monotonic() < deadline:
                if self._pgconn.is_busy():
                    self._wait(deadline)
                    self._pgconn.consume_input()
                elif self._pgconn.get_result() is None:
                    return True
        except psycopg.OperationalError:
            return False
        return False

    def _lost(self, error: psycopg.Error) -> WalstreamError:
        return failure(error, self._doing)

    def _notice(self, result: pq.abc.PGresult) -> None:
        """Take a warning of the server. PostgreSQL 18 only warns of a missing publication and skips its rows."""
        self._failure = self._failure or publication_skipped(result, self._doing)
