"""The transactions of one subscriber, as frames.

Owns where a subscriber of transactions stands: the points that it has not got yet, and the one it is getting. It reads
when it is asked and no further, so a slow subscriber holds what one frame takes and a piece of each partition of one
point. What passes (a leader that is away) is waited for; what was removed, damaged or lost is said.

Going on in the middle of a transaction means reading its point from the start and passing over what comes before:
ordinals count its rows, so a start of any other kind would have to be believed instead of known.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from walstream.errors import DataLoss, LogUnfit, OffsetOutOfRange, UnknownTopic, WalstreamError
from walstream.feed.reading.cursor import RETRY_S_MAX, Pause
from walstream.feed.reading.frames import Filter, Frame, FrameSource
from walstream.feed.reading.log_client import passes
from walstream.feed.transactions.parts import PART_BYTES_MAX, Envelope, Part
from walstream.feed.transactions.pieces import Pieces
from walstream.feed.transactions.points import Fold, Placed
from walstream.feed.transactions.rows import PointRows, RowsRemoved

if TYPE_CHECKING:
    from walstream.feed.transactions.captures import CaptureLog

FRAME_ENTRIES: Final = 1_000
FRAME_BYTES: Final = 1024 * 1024

POLL_S: Final = 60.0
"""How long points are waited for at once; whoever waits is woken by the first one."""

TURN_S: Final = 0.002
"""How long to go on before others have their turn."""

OVERHEAD_BYTES: Final = 512
"""What an entry has beside the rows of its part and the names in it."""


class TransactionSource(FrameSource):
    """What one subscriber of transactions is given."""

    def __init__(self, capture: CaptureLog, fold: Fold, start: int, entries: Filter, entry_bytes_max: int) -> None:
        """Begin with the points that follow a fold; no part below `start` is handed out."""
        self.position = start
        self.is_live = False
        self._reached = start
        """What `position` is when the frame that is ready, if there is one, has been handed out."""
        self._passed = start
        """Behind the last point of which nothing is left to be read."""
        self._capture = capture
        self._fold = fold
        self._start = start
        self._entries = entries
        self._tenant = entries.tenant or b""
        names_bytes = 3 * len(capture.topic) + 2 * len(self._tenant) + len(capture.lane.cluster)
        self._part_bytes_max = max(1, min(PART_BYTES_MAX, entry_bytes_max - names_bytes - OVERHEAD_BYTES))
        self._pieces = Pieces(capture.view.client, capture.chunks)
        self._points: deque[Placed] = deque()
        self._rows: PointRows | None = None
        self._envelope: Envelope | None = None
        self._done = fold.chain.last.rows_total if fold.chain.last is not None else 0
        """Rows of the capture up to the last point that was handed out."""
        self._lsns: list[int] = []
        self._encoded: list[bytes] = []
        self._size_bytes = 0
        self._stepping: asyncio.Task[Frame | None] | None = None
        self._retry = Pause(RETRY_S_MAX)
        self._failure: WalstreamError | None = None
        """What ends the stream, behind what was gathered before it."""

    async def next(self, wait_s: float) -> Frame | None:
        """Return the transactions that follow, or parts of one; see FrameSource."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            # A step that takes longer than we are to wait goes on meanwhile, and the next call finds what it came to.
            if self._stepping is None:
                self._stepping = asyncio.create_task(self._step())
            left_s = deadline - asyncio.get_running_loop().time()
            await asyncio.wait([self._stepping], timeout=max(left_s, 0))
            self.position = self._reached
            if not self._stepping.done():
                return None
            step, self._stepping = self._stepping, None
            frame = step.result()
            if frame is not None or left_s <= 0:
                return frame

    def head(self) -> int:
        """Return the LSN at which the newest transaction ends that was seen."""
        return self._capture.newest

    def entries_behind(self) -> int:
        """Return how many rows have not been handed out yet, as far as is known."""
        return max(0, self._capture.commits.rows_total - self._done)

    async def close(self) -> None:
        """Let go of everything."""
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
            self._stepping = None
        self._points.clear()
        self._rows = None
        self._lsns, self._encoded = [], []

    async def _step(self) -> Frame | None:
        """Read until there is a frame, or nothing for now."""
        loop = asyncio.get_running_loop()
        turn_ends = loop.time() + TURN_S
        while self._failure is None and len(self._lsns) < FRAME_ENTRIES and self._size_bytes < FRAME_BYTES:
            if loop.time() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = loop.time() + TURN_S
            try:
                if not await self._read_on():
                    break
                self._retry.reset()
            except WalstreamError as error:
                # Rows that should be there have been waited for already.
                if not passes(error) or isinstance(error, DataLoss):
                    # What is before it can still be had.
                    self._failure = error
                    break
                await asyncio.sleep(self._retry.take())
                await self._capture.view.client.refresh_quietly()
        frame = self._frame()
        if frame is None and self._failure is not None:
            raise self._failure
        return frame

    async def _read_on(self) -> bool:
        """Do the next thing; return whether there was one, or else there is something to hand out first."""
        if self._rows is not None:
            await self._read_rows(self._rows)
        elif self._points:
            await self._begin_point(self._points[0])
            self._points.popleft()
        elif self._lsns:
            return False
        else:
            return await self._read_points()
        return True

    async def _read_points(self) -> bool:
        """Read on in the points, or wait for them; return whether any came. Raises LsnNotAvailable."""
        capture = self._capture
        try:
            records = await capture.commits.follow(self._fold.position, POLL_S)
        except OffsetOutOfRange:
            if not capture.is_same:
                raise _replaced(capture.topic) from None
            raise await capture.not_available(self._reached) from None
        for told in records:
            placed = self._fold.feed(told)
            if placed is not None:
                self._points.append(placed)
        return bool(records)

    async def _begin_point(self, placed: Placed) -> None:
        """Begin with a point, unless there is nothing in it for this subscriber. Raises LsnNotAvailable."""
        capture, point = self._capture, placed.point
        end = await capture.place(placed)
        if end < self._start:
            self._done = point.rows_total
            return
        if point.is_baseline:
            # What was before it is not known any more, and so neither are its own rows.
            raise await capture.not_available(self._reached, placed)
        try:
            await capture.prepare(point)
        except UnknownTopic:
            raise await capture.not_available(self._reached, placed) from None
        sources = {span.partition: capture.source_of(span.partition, self._entries.topics) for span in point.spans}
        if not any(source.is_wanted for source in sources.values()):
            self._end_point(placed)
            return
        if capture.is_gone(point):
            raise await capture.not_available(self._reached, placed)
        snapshot = "" if point.snapshot is None else point.snapshot.id
        self._envelope = Envelope(capture.lane.cluster, self._tenant, capture.topic, point.offset, snapshot)
        self._rows = PointRows(self._pieces, placed, sources.__getitem__, self._entries, self._part_bytes_max)

    async def _read_rows(self, rows: PointRows) -> None:
        try:
            parts = await rows.read()
        except RowsRemoved:
            raise await self._capture.not_available(self._reached, rows.placed) from None
        for part in parts:
            self._take(part, rows.placed)
        if rows.is_over:
            self._rows = None
            self._end_point(rows.placed)

    def _take(self, part: Part, placed: Placed) -> None:
        lsn = self._capture.lane.lsn(part.ordinal, placed.time_ms)
        if lsn < self._start:
            return
        assert self._envelope is not None, "a point was begun"
        entry = self._envelope.entry(part, lsn)
        self._lsns.append(lsn)
        self._encoded.append(entry)
        self._size_bytes += len(entry)

    def _end_point(self, placed: Placed) -> None:
        self._done = placed.point.rows_total
        self._passed = max(self._passed, self._capture.lane.lsn(self._done, placed.time_ms) + 1)
        if not self._lsns:
            self._reached = self._passed

    def _frame(self) -> Frame | None:
        """Return what was gathered."""
        if not self._lsns:
            return None
        lsns, encoded = self._lsns, self._encoded
        self._lsns, self._encoded, self._size_bytes = [], [], 0
        self._reached = max(lsns[-1] + 1, self._passed)
        count, capture = len(lsns), self._capture
        tenants, topics = [self._tenant] * count, [capture.topic] * count
        return Frame(lsns, encoded, tenants, topics, cluster=capture.view.cluster, resolved=self._reached - 1)


def _replaced(topic: str) -> WalstreamError:
    return LogUnfit(
        f"{topic} was deleted and made again: its transactions are others now.",
        "Subscribe again from the beginning, with an empty copy of the data.",
    )
