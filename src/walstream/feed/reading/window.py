"""The live window: the newest entries, read and encoded once, for every subscriber that keeps up.

Owns the tail of all partitions of the feed and the last frames of it, bounded by bytes. Frames are numbered as they
come. `floor` is the LSN from which on the window has everything up to its position: a subscriber whose position is
there can be served from here, one that has fallen below reads from disk until it is back. Nobody polls: who waits is
woken by the next frame.

When the tail cannot go on, the window begins anew at the end of the log, with a higher floor. Whoever had not got that
far is then below it and reads from disk, and is told there what is wrong: nothing is passed over.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from typing import Final

from walstream.errors import WalstreamError
from walstream.feed.reading.cursor import LogView, Reader
from walstream.feed.reading.frames import Frame
from walstream.feed.reading.tail import Tail
from walstream.logs import get

RESTART_S: Final = 1.0

MARKS_MAX: Final = 4_096
"""How many places are remembered to tell how many entries an LSN is behind."""
MARK_ENTRIES: Final = 1_000
MARK_BYTES: Final = 120

log = get(__name__)


class Window:
    """The last frames of the feed."""

    def __init__(self, view: LogView, bytes_max: int) -> None:
        self._view = view
        self._bytes_max = bytes_max
        self._frames: deque[Frame] = deque()
        self._waiting: set[asyncio.Future[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._tail: Tail | None = None
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS_MAX)
        """(LSN, entries counted before it), about every thousand entries."""
        self._count = 0
        self._begun = 0
        """The LSN from which on entries are counted."""
        self.first = 0
        """The number of the first frame that is kept."""
        self.floor = 0
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why the tail does not go on; empty: it does."""
        return self._failure or (self._tail.trouble if self._tail is not None else "")

    @property
    def next(self) -> int:
        """The number that the next frame gets."""
        return self.first + len(self._frames)

    @property
    def position(self) -> int:
        """Everything below has been in a frame."""
        return self._tail.position if self._tail is not None else self.floor

    @property
    def head(self) -> int:
        """The LSN of the newest entry that was read."""
        return self._view.seeking.head

    @property
    def held_back_by(self) -> str:
        """The partition that holds up an entry now."""
        blocked = self._tail.blocked_by() if self._tail is not None else []
        return str(blocked[0]) if blocked else ""

    async def open(self) -> None:
        """Begin at the end of the log. Raises what the log says."""
        await self._begin()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the tail and let nobody wait any longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._tail is not None:
            await self._tail.close()
        self._wake()

    def serves(self, position: int) -> bool:
        """Tell whether somebody at this position can go on from here."""
        return position >= self.floor and not self._failure

    def can_take_over(self, reader: Reader) -> bool:
        """Tell whether somebody who read from disk can go on from here.

        All that was read there has been here, too. So what comes too late here is lacking there; otherwise somebody
        who has it would be told to lack it.
        """
        if self._tail is None or not self.serves(reader.position):
            return False
        places = self._tail.places
        return all(one in places and place.offset <= places[one].offset for one, place in reader.places.items())

    def find(self, position: int) -> int:
        """Return the number of the first frame with something from this position on."""
        return self.first + bisect_left(self._frames, position, key=lambda frame: frame.lsns[-1])

    def frame(self, number: int) -> Frame | None:
        """Return a frame that is kept; None when it is still to come."""
        return self._frames[number - self.first] if number < self.next else None

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next frame."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.add(waiter)
        timer = loop.call_later(timeout_s, _finish, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)

    def entries_since(self, lsn: int) -> int:
        """Return about how many entries there are from this LSN to the head, as far as it was here: see `has_seen`."""
        at = bisect_left(self._marks, lsn, key=lambda mark: mark[0])
        if at < len(self._marks):
            return self._count - self._marks[at][1]
        found = 0
        for frame in reversed(self._frames):
            if frame.lsns[-1] < lsn:
                break
            found += len(frame) - bisect_left(frame.lsns, lsn)
        return found

    def has_seen(self, lsn: int) -> bool:
        """Tell whether all entries from this LSN on are counted here: what was there before is for the log to tell."""
        return lsn >= (self._marks[0][0] if self._marks and self._marks[0][1] else self._begun)

    async def _run(self) -> None:
        while True:
            assert self._tail is not None
            try:
                frame = await self._tail.step()
                self._failure = ""
            except Exception as error:
                self._note(error)
                await self._restart()
                continue
            if frame is not None:
                self._publish(frame)

    async def _restart(self) -> None:
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                await self._begin()
                return
            except Exception as error:
                self._note(error)

    def _note(self, error: Exception) -> None:
        """Have everybody know why nobody is served from here: if it is a bug, too, or they would wait for ever."""
        before = self._failure
        if isinstance(error, WalstreamError):
            self._failure = error.message
            told: dict[str, object] = {"error": error.message, "hint": error.hint}
        else:
            self._failure = f"The feed failed: {type(error).__name__}."
            told = {"exc_info": error}
        if self._failure != before:
            log.error("window begins anew", **told)

    async def _begin(self) -> None:
        """Follow the log from its end on."""
        if self._tail is not None:
            await self._tail.close()
        places = await self._view.seeking.last(self._view.topics.lanes)
        read = self._view.seeking.last_read
        last = max([0, *(read[place.lane].lsn for place in places.values() if place.lane in read)])
        self._clear(last + 1)
        # What was passed over was not counted, so counting begins anew, too.
        self._marks.clear()
        self._count, self._begun = 0, self.floor
        # What lies below the floor in partitions that are behind the others is passed over: it is read from disk.
        self._tail = Tail(self._view, self.floor, places=places)

    def _clear(self, floor: int) -> None:
        """Keep nothing: everything below the floor has to be read from disk."""
        # A number is left out, so that who waits for the next frame notices that it is not what follows.
        self.first, self._frames = self.next + 1, deque()
        self.floor = max(self.floor, floor)
        self._view.metrics.window_bytes = self._view.metrics.window_entries = 0
        self._wake()

    def _publish(self, frame: Frame) -> None:
        metrics = self._view.metrics
        self._frames.append(frame)
        metrics.window_bytes += frame.size_bytes
        metrics.window_entries += len(frame)
        if not self._marks or self._count - self._marks[-1][1] >= MARK_ENTRIES:
            self._marks.append((frame.lsns[0], self._count))
            metrics.index_bytes = len(self._marks) * MARK_BYTES
        self._count += len(frame)
        while metrics.window_bytes > self._bytes_max and len(self._frames) > 1:
            dropped = self._frames.popleft()
            self.first += 1
            self.floor = max(self.floor, dropped.lsns[-1] + 1)
            metrics.window_bytes -= dropped.size_bytes
            metrics.window_entries -= len(dropped)
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            _finish(waiter)


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
