"""Several partitions become one order: the merge of their entries by LSN, as far as it is settled.

Owns what may be handed out next, and refuses to know how chunks are read or bounds are learned. A *strand* is one
partition on its way through the merge: chunks that were read and not handed out yet, and a *bound*, below which nothing
will follow them. A *run* is a piece of a chunk; entries are moved by runs, never one by one. Sans-IO.

The invariants:

* what is handed out ascends strictly, over all partitions and all calls;
* every entry below `position` that any strand has, or will ever get, has been handed out;
* nothing at or above `limit` is handed out: partitions that are not known yet may still have entries there.

Nothing can be handed out above the bound of a strand that has nothing to show, so an idle partition holds up all others
until its bound is raised: `blocked` names those. A chunk below what was promised for its strand is not merged but
refused: to hand it out now would break the order, and to leave it out would lose it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

from walstream.feed.reading.entries import Chunk
from walstream.feed.reading.frames import Frame

NO_LIMIT: Final = 1 << 128
"""Above every LSN."""

FRAME_ENTRIES: Final = 2_000
FRAME_BYTES: Final = 1024 * 1024


class Late(Exception):
    """An entry came below what its strand had promised; the argument is its LSN."""

    def __init__(self, lsn: int) -> None:
        super().__init__(lsn)
        self.lsn = lsn


class Run(NamedTuple):
    """Consecutive entries of a chunk."""

    chunk: Chunk
    start: int
    end: int


class Strand:
    """One partition in a merge."""

    __slots__ = ("at", "bound", "chunks", "least", "name")

    def __init__(self, name: Hashable, least: int) -> None:
        self.name = name
        self.least = least
        """Entries below are passed over: they come before what the reader asked for."""
        self.bound = least
        """Nothing that is still to come is below."""
        self.chunks: deque[Chunk] = deque()
        self.at = 0
        """The next entry of the first chunk."""

    @property
    def head(self) -> int:
        """The LSN of the next entry; only if there is one."""
        return self.chunks[0].lsns[self.at]

    @property
    def entries(self) -> int:
        """How many entries wait."""
        return sum(map(len, self.chunks)) - self.at

    @property
    def size_bytes(self) -> int:
        """What the chunks that wait hold."""
        return sum(chunk.size_bytes for chunk in self.chunks)


class Merge:
    """The strands of one reader."""

    def __init__(self, position: int) -> None:
        """Begin at an LSN: nothing below will be handed out."""
        self.position = position
        self.limit = NO_LIMIT
        self.strands: dict[Hashable, Strand] = {}

    def add(self, name: Hashable) -> Strand:
        """Take part: what this partition has below the position is not asked for."""
        strand = self.strands[name] = Strand(name, self.position)
        return strand

    def remove(self, name: Hashable) -> None:
        """Leave: a partition that is not there any more holds up nobody."""
        self.strands.pop(name, None)

    def push(self, name: Hashable, chunk: Chunk) -> None:
        """Add what follows in a partition. Raises Late."""
        strand = self.strands[name]
        if not chunk.lsns or chunk.lsns[-1] < strand.least:
            return
        first = bisect_left(chunk.lsns, strand.least) if chunk.lsns[0] < strand.least else 0
        if chunk.lsns[first] < strand.bound:
            raise Late(chunk.lsns[first])
        if first:
            strand.at = first
        strand.chunks.append(chunk)
        strand.bound = max(strand.bound, chunk.lsns[-1] + 1)
        # What was asked for has begun: from here on nothing is passed over, it is in order or refused.
        strand.least = 0

    def raise_bound(self, name: Hashable, bound: int) -> None:
        """Promise that nothing below will follow in a partition."""
        strand = self.strands[name]
        strand.bound = max(strand.bound, bound)

    @property
    def buffered(self) -> int:
        """How many entries wait."""
        return sum(strand.entries for strand in self.strands.values() if strand.chunks)

    def head(self) -> int:
        """Return the LSN of the next entry that waits; NO_LIMIT: none does."""
        return min((strand.head for strand in self.strands.values() if strand.chunks), default=NO_LIMIT)

    def blocked(self) -> list[Strand]:
        """Return the strands without entries whose bound is at or below the next entry: they hold it up.

        With no entry waiting at all, that is every strand.
        """
        head = self.head()
        return [strand for strand in self.strands.values() if not strand.chunks and strand.bound <= head]

    def is_held_up(self) -> bool:
        """Tell whether there is nothing that could be handed out now."""
        return self.head() >= self._horizon()

    def take(self, entries_max: int = FRAME_ENTRIES, bytes_max: int = FRAME_BYTES) -> list[Run]:
        """Take out what is settled, in order, and move the position."""
        heap = [(strand.head, at, strand) for at, strand in enumerate(self.strands.values()) if strand.chunks]
        heapify(heap)
        horizon = self._horizon()
        runs: list[Run] = []
        left, bytes_left = entries_max, bytes_max
        while heap and heap[0][0] < horizon and left > 0 and bytes_left > 0:
            _, number, strand = heap[0]
            chunk, start = strand.chunks[0], strand.at
            stop = min([horizon, *(other[0] for other in heap[1:3])])
            end = min(bisect_left(chunk.lsns, stop, start), start + left)
            # A chunk is cut by its mean entry: a frame need not be exact, and looking at each would cost more.
            end = min(end, start + 1 + bytes_left * len(chunk) // max(chunk.size_bytes, 1))
            runs.append(Run(chunk, start, end))
            left -= end - start
            bytes_left -= chunk.size_bytes * (end - start) // len(chunk)
            strand.at = end
            if end == len(chunk):
                strand.chunks.popleft()
                strand.at = 0
            if strand.chunks:
                heapreplace(heap, (strand.head, number, strand))
            else:
                heappop(heap)
                horizon = min(horizon, strand.bound)
        self._move(runs, heap[0][0] if heap else NO_LIMIT, horizon)
        return runs

    def _horizon(self) -> int:
        return min([self.limit, *(strand.bound for strand in self.strands.values() if not strand.chunks)])

    def _move(self, runs: list[Run], head: int, horizon: int) -> None:
        last = runs[-1].chunk.lsns[runs[-1].end - 1] + 1 if runs else 0
        settled = min(head, horizon)
        if settled == NO_LIMIT:
            settled = 0
        self.position = max(self.position, last, settled)


def frame_of(runs: list[Run], cluster: bytes, resolved: int = 0) -> Frame:
    """Put runs together. A chunk that goes out whole lends its own lists."""
    first = runs[0]
    if len(runs) == 1:
        chunk, start, end = first
        columns = (chunk.lsns, chunk.encoded, chunk.tenants)
        if end - start < len(chunk):
            columns = (chunk.lsns[start:end], chunk.encoded[start:end], chunk.tenants[start:end])
        return Frame(*columns, [chunk.topic] * (end - start), cluster=cluster, resolved=resolved)
    return Frame(*_together(runs), cluster=cluster, resolved=resolved)


def _together(runs: Iterable[Run]) -> tuple[list[int], list[bytes], list[bytes], list[str]]:
    lsns: list[int] = []
    encoded: list[bytes] = []
    tenants: list[bytes] = []
    topics: list[str] = []
    for chunk, start, end in runs:
        lsns += chunk.lsns[start:end]
        encoded += chunk.encoded[start:end]
        tenants += chunk.tenants[start:end]
        topics += [chunk.topic] * (end - start)
    return lsns, encoded, tenants, topics
