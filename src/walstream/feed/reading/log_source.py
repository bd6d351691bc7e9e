"""The source of one subscriber: from disk to the live window, and back when that has moved on.

Owns where a subscriber stands and who reads for it. A source reads from disk until it has reached the live window, and
from there on is given the window's frames; when the window has moved past a subscriber that is slow, it reads from disk
again. Both hand out everything below their position and nothing twice, and the position is one number: so the change
from one to the other loses nothing and repeats nothing, wherever it happens.

Topics of walstream's own are not in the window: a source that reads those follows the end of its partitions by itself.
"""

from __future__ import annotations

import asyncio

from walstream.feed.reading.cursor import Cursor, LogView, Reader
from walstream.feed.reading.frames import Frame, FrameSource
from walstream.feed.reading.tail import Tail
from walstream.feed.reading.window import Window


class LogSource(FrameSource):
    """Frames of a log."""

    def __init__(
        self, view: LogView, window: Window | None, start: int, topics: tuple[str, ...], reader: Reader | None = None
    ) -> None:
        """Begin at an LSN: with a reader of its own, or else in the window."""
        assert window is not None or reader is not None
        self._view = view
        self._window = window
        self._topics = topics
        self._reader = reader
        self._next = window.find(start) if window is not None and reader is None else 0
        self._stepping: asyncio.Task[Frame | None] | None = None
        self.position = start
        self.is_live = reader is None or isinstance(reader, Tail)

    async def next(self, wait_s: float) -> Frame | None:
        """Return what follows; see FrameSource."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            frame = await (self._read(deadline) if self._reader is not None else self._look(deadline))
            if frame is not None or loop.time() >= deadline:
                return frame

    def head(self) -> int:
        """Return the LSN of the newest record that can be read."""
        return self._view.head()

    def entries_behind(self) -> int:
        """Return how many entries of the log have not been handed out yet, as far as is known."""
        if self._reader is not None:
            return self._reader.entries_behind()
        assert self._window is not None
        return self._window.entries_since(self.position)

    async def close(self) -> None:
        """Let go of everything; `next` is not called again."""
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
            self._stepping = None
        if self._reader is not None:
            await self._reader.close()

    async def _look(self, deadline: float) -> Frame | None:
        """Take the next frame of the window, or wait for it; where it is not kept any more, go back to the disk."""
        window = self._window
        assert window is not None
        if self._next < window.first:
            # Perhaps because an entry came too late: then it may be one that is lacking here.
            self._view.promises.check(self.position, self._view.topics.chosen(self._topics))
            self._reader, self.is_live = Cursor(self._view, self.position, self._topics), False
            return None
        frame = window.frame(self._next)
        if frame is None:
            self.position = max(self.position, window.position)
            wait_s = deadline - asyncio.get_running_loop().time()
            if wait_s > 0:
                await window.wait(wait_s)
            return None
        self._next += 1
        if frame.lsns[0] < self.position:
            frame = frame.since(self.position)
        if not frame.lsns:
            return None
        self.position = frame.lsns[-1] + 1
        return frame

    async def _read(self, deadline: float) -> Frame | None:
        """Let the reader go on; when it has reached the window, leave it."""
        reader, window = self._reader, self._window
        assert reader is not None
        if window is not None and self._stepping is None and window.can_take_over(reader):
            await reader.close()
            self._reader, self._next, self.is_live = None, window.find(self.position), True
            return None
        # A step that takes longer than we are to wait goes on meanwhile, and the next call finds what it came to.
        if self._stepping is None:
            self._stepping = asyncio.create_task(reader.step())
        await asyncio.wait([self._stepping], timeout=max(deadline - asyncio.get_running_loop().time(), 0))
        if not self._stepping.done():
            return None
        step, self._stepping = self._stepping, None
        try:
            frame = step.result()
        except BaseException:
            await reader.close()
            raise
        self.position = max(self.position, reader.position)
        return frame
