"""The polling engine: a slot read with SQL, for servers that allow no replication connection or have no pgoutput.

Owns when to look and what of the answer is new; refuses to know messages. A look is `pg_logical_slot_peek_*`, which
moves nothing: what is durable is told with `pg_replication_slot_advance` before the next look. Each look begins at the
confirmed position and describes its relations anew, so what was handed out and is not durable yet is decoded again by
the server and skipped here; the engine looks further only while that is little.

Invariants: as for every source. The slot is held by an advisory lock between looks, because PostgreSQL holds it only
during one. A huge answer is spooled by the server and fetched in pieces, so memory stays within the same budget.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol, Self

import psycopg
from psycopg.rows import tuple_row

from walstream.capture.source import Batch, Ladder
from walstream.capture.spill import Budget, SpillFolder
from walstream.capture.test_decoding import TextDecoding
from walstream.capture.transactions import Assembler
from walstream.errors import SlotBusy, SlotMissing, SourceNotReady, WalstreamError
from walstream.positions import ZERO, Lsn
from walstream.postgres.session import connect, named

FETCH_ROWS: Final = 1000
FETCH_ROWS_MIN: Final = 10
FETCH_BYTES: Final = 4 * 1024 * 1024
"""What one fetch should bring; fetches of larger rows ask for fewer of them."""

FEEDBACK_WAIT_S: Final = 0.02
"""With something handed out and not durable yet, news of it is waited for this long before looking again."""

LOOK_ROWS: Final = 20_000
"""A look asks for at least this many rows, for several batches: each begins to decode long before the first of them."""

OUTSTANDING_MAX: Final = 20_000
"""The engine looks beyond what is not durable yet while that is at most so many messages, or a few batches."""

_SERVER_END: Final = (
    "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END::text"
)
_LOCK_SPACE: Final = 0x77616C73  # "wals"


class Plugin(Protocol):
    """How one output plugin is asked and understood."""

    @property
    def query(self) -> str:
        """A look, with places for the slot's name, the most rows and the plugin's options."""
        ...

    @property
    def options(self) -> list[str]:
        """Names and values by turns."""
        ...

    def begin(self) -> None:
        """Prepare for the answer to a look."""
        ...

    def messages(self, rows: list[tuple[Any, ...]]) -> list[bytes]:
        """Turn rows of the answer into messages of pgoutput."""
        ...


class Pgoutput:
    """The plugin that PostgreSQL has built in: its messages are what we need."""

    query = "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, %s, VARIADIC %s::text[])"

    def __init__(self, publications: Sequence[str]) -> None:
        names = ",".join('"' + name.replace('"', '""') + '"' for name in publications)
        self.options = ["proto_version", "1", "publication_names", names, "messages", "true"]

    def begin(self) -> None:
        """Nothing is to be prepared."""

    def messages(self, rows: list[tuple[Any, ...]]) -> list[bytes]:
        """Return what the rows hold."""
        return [data for (data,) in rows]


class PollingSource:
    """A source over an ordinary session. A context manager."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        slot: str,
        plugin: Plugin,
        confirmed: Lsn,
        *,
        memory_bytes_max: int,
        spill_folder: Path,
        poll_interval_s: float = 1.0,
    ) -> None:
        """Take over a session that holds the slot's lock; it ends with this source."""
        self.budget = Budget(memory_bytes_max)
        self._connection = connection
        self._slot = slot
        self._plugin = plugin
        self._poll_interval_s = poll_interval_s
        self._assembler = Assembler(
            self.budget, SpillFolder(spill_folder).open, sent_at_us=lambda _: time.time_ns() // 1000
        )
        self._server_end = confirmed
        self._advanced = confirmed
        self._durable = ZERO
        self._news = threading.Event()
        self._look_at = 0.0
        self._outstanding: deque[tuple[Lsn, int]] = deque()
        self._repeated = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        dsn: str,
        slot: str,
        publications: Sequence[str],
        *,
        memory_bytes_max: int,
        spill_folder: Path,
        poll_interval_s: float = 1.0,
    ) -> Self:
        """Connect, find out the slot's plugin and take its lock. Raises SlotMissing, SlotBusy, SourceNotReady."""
        connection = connect(dsn)
        try:
            with named(f"opening the slot {slot}"):
                name, confirmed = _slot(connection, slot)
                plugin: Plugin
                if name == "pgoutput":
                    plugin = Pgoutput(publications)
                elif name == "test_decoding":
                    plugin = TextDecoding(connection, publications)
                else:
                    raise SourceNotReady(
                        f"The slot {slot} decodes with the plugin {name}.",
                        "walstream reads pgoutput and test_decoding.",
                    )
            return cls(
                connection,
                slot,
                plugin,
                confirmed,
                memory_bytes_max=memory_bytes_max,
                spill_folder=spill_folder,
                poll_interval_s=poll_interval_s,
            )
        except BaseException:
            connection.close()
            raise

    def skip_before(self, lsn: Lsn) -> None:
        """Leave out transactions that committed before `lsn`; to be said before the first batch."""
        self._assembler.skip_before(lsn)

    def receive_batch(self, limit: int, timeout_s: float) -> Batch:
        """Return the transactions that are complete, about `limit` changes, or after the timeout an empty batch."""
        deadline = time.monotonic() + timeout_s
        while not self._assembler.ready:
            outstanding = self._settle()
            if outstanding:
                self._wait(FEEDBACK_WAIT_S)
                outstanding = self._settle()
            now = time.monotonic()
            if now >= self._look_at and outstanding <= max(OUTSTANDING_MAX, 4 * limit):
                self._look(limit, outstanding)
            elif now >= deadline:
                break
            else:
                self._wait(max(min(self._look_at, deadline) - now, 0.001))
        transactions, last_lsn = self._assembler.take(limit)
        # A look begins at the confirmed position and counts Begin and Commit too.
        self._outstanding.extend((transaction.end_lsn, len(transaction.rows) + 2) for transaction in transactions)
        return Batch(transactions, last_lsn)

    def send_feedback(self, lsn: Lsn) -> None:
        """Say that everything before `lsn` is durable; the server is told before the next look."""
        if lsn > self._durable:
            self._durable = lsn
            self._news.set()

    def ladder(self) -> Ladder:
        """Return how far the stages have come, as of the last look."""
        received = self._assembler.end_lsn
        server_end = max(self._server_end, received)
        return Ladder(server_end=server_end, sent=received, received=received, confirmed=self._durable)

    def close(self) -> None:
        """Tell the server what is durable, end the session and free everything. May be called twice."""
        if self._closed:
            return
        self._closed = True
        # When the connection is gone, the next session tells what is durable.
        with contextlib.suppress(WalstreamError):
            self._settle()
        self._assembler.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, seconds: float) -> None:
        if self._news.wait(seconds):
            self._news.clear()

    def _settle(self) -> int:
        """Move the slot to what is durable; return how many messages a look would repeat."""
        durable = self._durable
        if durable > self._advanced:
            with named(f"advancing the slot {self._slot}"):
                self._connection.execute("SELECT pg_replication_slot_advance(%s, %s)", (self._slot, str(durable)))
            self._advanced, self._repeated = durable, 0
        while self._outstanding and self._outstanding[0][0] <= self._advanced:
            self._outstanding.popleft()
        return sum(count for _, count in self._outstanding)

    def _look(self, limit: int, outstanding: int) -> None:
        """Ask for what is new, about `limit` changes, and set when to look again."""
        rows_max = max(outstanding, self._repeated) + max(limit, LOOK_ROWS)
        self._assembler.skip_before(self._assembler.end_lsn)
        with named(f"polling the slot {self._slot}"):
            # Asked before the look, it is something that the look reaches.
            reached = self._end_of_wal()
            count = self._fetch(rows_max)
        self._server_end = max(self._server_end, reached)
        if count >= rows_max:
            # There may be more. When nothing of this was new, the next look must reach beyond it.
            self._repeated = self._repeated if self._assembler.ready else count
            return
        self._look_at = time.monotonic() + self._poll_interval_s
        if not self._assembler.ready:
            self._assembler.skip_to(reached)

    def _fetch(self, rows_max: int) -> int:
        self._plugin.begin()
        count, size = 0, FETCH_ROWS
        # A cursor of the server's: the answer stays there until it is fetched.
        with self._connection.transaction(), self._connection.cursor("walstream_look", row_factory=tuple_row) as cursor:
            cursor.execute(self._plugin.query, (self._slot, rows_max, self._plugin.options), binary=True)
            while rows := cursor.fetchmany(size):
                count += len(rows)
                fetched_bytes = sum(len(row[-1]) for row in rows)
                self._assembler.feed(self._plugin.messages(rows))
                size = min(max(FETCH_BYTES * len(rows) // max(fetched_bytes, 1), FETCH_ROWS_MIN), FETCH_ROWS)
        return count

    def _end_of_wal(self) -> Lsn:
        return Lsn.parse(_only(self._connection.execute(_SERVER_END)))


def _slot(connection: psycopg.Connection[Any], slot: str) -> tuple[str, Lsn]:
    """Take the slot's lock; return its plugin and the position that is confirmed."""
    row = connection.execute(
        "SELECT plugin, confirmed_flush_lsn::text FROM pg_replication_slots"
        " WHERE slot_name = %s AND database = current_database()",
        (slot,),
    ).fetchone()
    if row is None or row[1] is None:
        raise SlotMissing(f"There is no logical slot {slot} in this database.", "Look with `walstream capture check`.")
    if not _only(connection.execute("SELECT pg_try_advisory_lock(%s, hashtext(%s))", (_LOCK_SPACE, slot))):
        raise SlotBusy(f"Another capture polls the slot {slot}.", "Stop it, or wait until PostgreSQL notices its end.")
    return str(row[0]), Lsn.parse(row[1])


def _only(cursor: psycopg.Cursor[Any]) -> Any:
    """Return the one value of the one row."""
    row = cursor.fetchone()
    assert row is not None
    return row[0]
