"""The end of the log, followed: records as they become visible, merged as soon as their order is settled.

Owns one long poll per leader, with all partitions that it leads, and the asking for promises when an entry is held up.
What comes is decoded once. At most one answer per leader waits, and a partition with much waiting is not asked for
more: so a reader that does not go on holds little, and a busy log is read no faster than it is handed out.

An entry is delayed by one question at most: partitions that have nothing are asked what they promise, all in one
request per leader, while the next poll is already on its way. A log on which nothing happens is asked once a second,
so that heartbeats tell how far everything is known.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

from walstream.errors import WalstreamError
from walstream.feed.reading.calls import Session, Wanted
from walstream.feed.reading.chunks import READER_BYTES, Loaded, Place, decode_fetched, fetch_bytes
from walstream.feed.reading.cursor import PAUSE_S_MAX, LogView, Pause, Reader
from walstream.feed.reading.entries import Lane
from walstream.feed.reading.log_errors import error_of, passes
from walstream.feed.reading.merge import Strand
from walstream.feed.reading.region_topic import REGIONS
from walstream.positions import TopicPartition

POLL_MS: Final = 500
POLL_MS_SHORT: Final = 20
"""While a partition is left out because much of it waits: it must not wait for the others' silence."""

IDLE_S: Final = 1.0
"""How often promises are asked for though nobody waits for them."""

_lines = count()


class Tail(Reader):
    """Follows the end of partitions."""

    def __init__(
        self,
        view: LogView,
        start: int,
        patterns: tuple[str, ...] = (),
        places: dict[TopicPartition, Place] | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        """Begin at these places, or where the LSN `start` is."""
        super().__init__(view, start, patterns, is_new=is_new)
        self._begin = places or {}
        self._line = f"tail-{next(_lines)}"
        self._polls: dict[int, asyncio.Task[dict[TopicPartition, tuple[Place, Loaded]]]] = {}
        self._sessions: dict[int, Session] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._retry_at_s = 0.0
        self._pause = Pause(PAUSE_S_MAX)

    async def close(self) -> None:
        """End the polls."""
        tasks = [*self._polls.values(), *([self._asking] if self._asking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._polls, self._asking = {}, None

    def blocked_by(self) -> list[TopicPartition]:
        """Return the partitions that hold up an entry."""
        if not self.merge.buffered:
            return []
        return [strand.name for strand in self.merge.blocked() if isinstance(strand.name, TopicPartition)]

    async def _find(self, lanes: dict[TopicPartition, Lane]) -> dict[TopicPartition, Place]:
        known = {one: self._begin[one] for one, lane in lanes.items() if _is_for(self._begin.get(one), lane)}
        self._begin = {}
        return known | await super()._find({one: lane for one, lane in lanes.items() if one not in known})

    async def _feed(self) -> None:
        self._poll()
        wait_s = self._ask()
        tasks: set[asyncio.Task[object]] = {*self._polls.values()}
        if self._asking is not None:
            tasks.add(self._asking)
        if tasks:
            await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(min(wait_s, PAUSE_S_MAX))
        await self._take_promises()
        self._take_polls()

    # Records

    def _poll(self) -> None:
        """Have a poll on its way to every leader that has none."""
        free = {one: place for one, place in self.places.items() if self._has_room(one)}
        wait_ms = POLL_MS if len(free) == len(self.places) else POLL_MS_SHORT
        for node, places in self._view.client.by_leader(free).items():
            if node not in self._polls:
                self._polls[node] = asyncio.create_task(self._fetch(node, places, wait_ms))

    def _has_room(self, partition: TopicPartition) -> bool:
        """Tell whether so little of a partition waits that it may be asked for more."""
        strand = self.merge.strands[partition]
        return not strand.chunks or strand.size_bytes < 2 * fetch_bytes(len(self.places))

    async def _fetch(
        self, node: int, places: dict[TopicPartition, Place], wait_ms: int
    ) -> dict[TopicPartition, tuple[Place, Loaded]]:
        """Ask a leader for more, and decode what comes."""
        bytes_each = fetch_bytes(len(places))
        wanted = {one: Wanted(place.offset, bytes_each) for one, place in places.items()}
        session = self._sessions.setdefault(node, Session())
        answers = await self._view.client.fetch(
            node, wanted, bytes_max=READER_BYTES, wait_ms=wait_ms, session=session, line=self._line
        )
        found = {}
        for partition, fetched in answers.items():
            place = places[partition]
            if fetched.code:
                error = error_of(fetched.code, str(partition))
                found[partition] = (place, Loaded(None, fetched.high_watermark, fetched.log_start, error))
                # The session is told again of a partition that it has an error for.
                session.reset()
                continue
            chunk = await decode_fetched(place, fetched, self._view.metrics)
            found[partition] = (place, Loaded(chunk, fetched.high_watermark, fetched.log_start))
        return found

    def _take_polls(self) -> None:
        """Merge what has come. Raises what went wrong, when everything else is taken in."""
        failure: Exception | None = None
        for node, poll in list(self._polls.items()):
            if not poll.done():
                continue
            del self._polls[node]
            try:
                for partition, (place, loaded) in poll.result().items():
                    try:
                        if self._take_in(partition, place, loaded):
                            self._ask_soon()
                    except Exception as error:
                        failure = _graver(failure, error)
            except WalstreamError as error:
                failure = _graver(failure, error)
        if failure is not None:
            raise failure

    # Promises

    def _ask(self) -> float:
        """Have a question on its way, if an entry is held up or none was asked for long; return when to look again."""
        if self._asking is not None:
            return IDLE_S
        now_s = asyncio.get_running_loop().time()
        due_s = self._asked_s + IDLE_S
        if self.merge.buffered:
            due_s = max(self._retry_at_s, now_s + self._view.promises.wait_s(self.merge.head()))
        if now_s < due_s:
            return due_s - now_s
        self._asked_s = now_s
        self._asking = asyncio.create_task(self._view.promises.ask([*self._blocked_partitions(), REGIONS]))
        return IDLE_S

    def _blocked_partitions(self) -> list[TopicPartition]:
        return [strand.name for strand in self.merge.blocked() if isinstance(strand.name, TopicPartition)]

    async def _take_promises(self) -> None:
        """Apply what was promised; ask again soon if that did not help."""
        if self._asking is None or not self._asking.done():
            return
        self._asking.result()
        self._asking = None
        if not self._view.topics.settle_now():
            await self._view.topics.settle()
        before = self.merge.position
        if await self.join():
            self._raise_bounds(self._idle())
            self.merge.take(0)
        if self.merge.position > before:
            self._ask_soon()
        else:
            self._retry_at_s = asyncio.get_running_loop().time() + self._pause.take()

    def _ask_soon(self) -> None:
        """Something has changed: the next question need not wait."""
        self._pause.reset()
        self._retry_at_s = 0.0

    def _idle(self) -> list[Strand]:
        return [strand for strand in self.merge.strands.values() if not strand.chunks]


def _is_for(place: Place | None, lane: Lane) -> bool:
    return place is not None and place.lane is lane


def _graver(before: Exception | None, error: Exception) -> Exception:
    """Return the error that matters: one that does not pass."""
    if before is None or (isinstance(before, WalstreamError) and passes(before)):
        return error
    return before
