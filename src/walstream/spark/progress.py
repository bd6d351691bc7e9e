"""What the pipeline says of itself while it runs: per table and for the whole, as plain numbers.

Owns the arithmetic; refuses to know screens, metrics and topics, which are given a look (`View`) when they ask. It is
told by the threads that write tables and asked by others, so everything is behind one lock and quick.

    freshness   from the commit of a transaction in PostgreSQL to its rows being in the table
    rows/s      rows of the last batches, over the time from the first one's begin to the last one's end
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from walstream.ops.metrics import Timing
from walstream.positions import ZERO, Lsn

RATE_WINDOW_S: Final = 10.0

TableState = Literal["waiting", "writing", "current", "stopped"]


@dataclass(frozen=True, slots=True)
class TableView:
    """One table."""

    name: str
    mode: str = ""
    state: TableState = "waiting"
    rows_total: int = 0
    """Rows of the log that were applied since the start."""
    rows_per_s: float = 0.0
    batch_ms: int = 0
    """How long its last commit took, from the plan on."""
    freshness_ms: int | None = None
    """Of its last commit."""
    version: int | None = None
    reason: str = ""
    """Why it is stopped."""


@dataclass(frozen=True, slots=True)
class View:
    """A look at the pipeline."""

    source_epoch: int = 0
    end_lsn: Lsn = ZERO
    point: int = -1
    batch_id: int = -1
    batches: int = 0
    batch_ms: int = 0
    rows_total: int = 0
    rows_per_s: float = 0.0
    freshness_ms: int | None = None
    lag_rows: int | None = None
    """Rows in the log that no batch has taken yet, as Spark said after the last one."""
    failures: int = 0
    maintenance: str = ""
    """What maintenance does right now."""
    tables: tuple[TableView, ...] = ()


@dataclass(slots=True)
class _Rate:
    """Rows in the last seconds."""

    seen: deque[tuple[float, float, int]] = field(default_factory=deque)

    def add(self, start_s: float, end_s: float, rows: int) -> None:
        self.seen.append((start_s, end_s, rows))

    def now(self, now_s: float) -> float:
        while self.seen and self.seen[0][1] < now_s - RATE_WINDOW_S:
            self.seen.popleft()
        if not self.seen:
            return 0.0
        elapsed_s = max(now_s - self.seen[0][0], 0.001)
        return sum(rows for _, _, rows in self.seen) / elapsed_s


class Progress:
    """Told what happens; asked how things stand."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """Take a clock for durations and one for the time of day, which commits are compared with."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._tables: dict[str, TableView] = {}
        self._rates: dict[str, _Rate] = {}
        self._rate = _Rate()
        self._view = View()
        self.batch_timing = Timing()
        self.freshness = Timing()

    def begin(self) -> float:
        """Return the moment at which something begins, for `wrote` and `ended`."""
        return self._clock()

    def writing(self, table: str, mode: str) -> None:
        """A table is being written."""
        self._change(table, mode=mode, state="writing")

    def wrote(self, table: str, *, began_s: float, rows: int, commit_time_us: int, version: int | None) -> None:
        """A table has its commit."""
        now_s, wall_s = self._clock(), self._wall_clock()
        # A commit of the future is a clock that differs: better no number than a wrong one.
        fresh_s = wall_s - commit_time_us / 1_000_000 if commit_time_us else None
        with self._lock:
            before = self._table(table)
            self._rates.setdefault(table, _Rate()).add(began_s, now_s, rows)
            self._tables[table] = replace(
                before,
                state="current",
                rows_total=before.rows_total + rows,
                batch_ms=round((now_s - began_s) * 1000),
                freshness_ms=max(0, round(fresh_s * 1000)) if fresh_s is not None else None,
                version=version,
                reason="",
            )
            if fresh_s is not None:
                self.freshness.observe(max(0.0, fresh_s))

    def stopped(self, table: str, reason: str) -> None:
        """A table has failed and is left alone."""
        self._change(table, state="stopped", reason=reason)

    def listed(self, versions: Mapping[str, int], waiting: Mapping[str, str]) -> None:
        """Say which tables there are: those of the cut with their versions, and those that wait, with their modes."""
        for table, version in versions.items():
            self._change(table, state="current", version=version, reason="")
        for table, mode in waiting.items():
            self._change(table, mode=mode, state="waiting")

    def ended(
        self, batch_id: int, *, began_s: float, source_epoch: int, end_lsn: Lsn, point: int, rows: int, time_us: int
    ) -> None:
        """A batch is in the tables, with its cut; `time_us` is the commit time of its last transaction."""
        now_s, wall_s = self._clock(), self._wall_clock()
        with self._lock:
            self._rate.add(began_s, now_s, rows)
            self.batch_timing.observe(now_s - began_s)
            self._view = replace(
                self._view,
                source_epoch=source_epoch,
                end_lsn=end_lsn,
                point=point,
                batch_id=batch_id,
                batches=self._view.batches + 1,
                batch_ms=round((now_s - began_s) * 1000),
                rows_total=self._view.rows_total + rows,
                freshness_ms=max(0, round((wall_s - time_us / 1_000_000) * 1000)) if time_us and rows else None,
            )

    def lag(self, rows: int | None) -> None:
        """Say how many rows of the log no batch has taken yet."""
        with self._lock:
            self._view = replace(self._view, lag_rows=rows)

    def failed(self) -> None:
        """Count a batch that failed as a whole."""
        with self._lock:
            self._view = replace(self._view, failures=self._view.failures + 1)

    def maintaining(self, what: str) -> None:
        """Say what maintenance does; empty: nothing."""
        with self._lock:
            self._view = replace(self._view, maintenance=what)

    def look(self) -> View:
        """Return how things stand."""
        with self._lock:
            now_s = self._clock()
            tables = tuple(
                replace(table, rows_per_s=self._rates[name].now(now_s) if name in self._rates else 0.0)
                for name, table in sorted(self._tables.items())
            )
            return replace(self._view, rows_per_s=self._rate.now(now_s), tables=tables)

    def _table(self, name: str) -> TableView:
        return self._tables.get(name) or TableView(name)

    def _change(self, name: str, **changes: object) -> None:
        with self._lock:
            self._tables[name] = replace(self._table(name), **changes)  # type: ignore[arg-type]
