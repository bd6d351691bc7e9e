"""The end of the log, followed: records as they become visible, merged as soon as their order is settled.

Owns one long poll per leader, with all partitions that it leads, and the asking for promises when an entry is held up.
What comes is decoded once. At most one answer per leader waits, and a partition with much waiting is not asked for
more: so a reader that does not go on holds little, and a busy log is read no faster than it is handed out.

Promises ride on the polls: a node tells with the records of some partitions what it promises of the others, as it was
when the records had been read. So where one node leads everything, an entry waits for nothing. Otherwise it is delayed
by one question at most: partitions that hold it up and have not just been told of are asked what they promise, all in
one request per leader, while the next poll is already on its way. A log on which nothing happens, and that tells
nothing with its polls, is asked once a second, so that heartbeats tell how far everything is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Final, NamedTuple

from walstream.errors import WalstreamError
from walstream.feed.reading.calls import Found, Session, Wanted
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
"""How long the position may stand before promises are asked for though nobody waits for them."""

RIDES_MAX: Final = 64
"""Promises that are asked for with each poll of a leader. On both sides together each costs three microseconds, needed
or not. So many cost about what a question does, two messages that each wake a process: with more it is cheaper to ask
when an entry waits."""

_lines = count()


class Polled(NamedTuple):
    """What a poll has brought."""

    found: dict[TopicPartition, tuple[Place, Loaded]]
    promised: Mapping[TopicPartition, Found]


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
        self._polls: dict[int, asyncio.Task[Polled]] = {}
        self._sessions: dict[int, Session] = {}
        self._asking: asyncio.Task[set[TopicPartition]] | None = None
        self._asked_s = 0.0
        self._promised: set[TopicPartition] = set()
        """Of these something was promised last; before `_retry_at_s` it would be the same."""
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
        told, failure = self._take_polls()
        await self._take_promises(told)
        if failure is not None:
            raise failure

    # Records

    def _poll(self) -> None:
        """Have a poll on its way to every leader that has none."""
        free = {one: place for one, place in self.places.items() if self._has_room(one)}
        wait_ms = POLL_MS if len(free) == len(self.places) else POLL_MS_SHORT
        for node, places in self._view.client.by_leader(free).items():
            if node not in self._polls:
                rides = self._rides(node, places)
                self._polls[node] = asyncio.create_task(self._fetch(node, places, rides, wait_ms))

    def _rides(self, node: int, places: dict[TopicPartition, Place]) -> tuple[TopicPartition, ...]:
        """Return the partitions whose promises a poll asks for, too: those that it reads, and that of regions."""
        if not self._view.promises.are_given or len(places) >= RIDES_MAX:
            return ()
        return (*places, REGIONS) if node in self._view.client.by_leader({REGIONS: None}) else (*places,)

    def _has_room(self, partition: TopicPartition) -> bool:
        """Tell whether so little of a partition waits that it may be asked for more."""
        strand = self.merge.strands[partition]
        return not strand.chunks or strand.size_bytes < 2 * fetch_bytes(len(self.places))

    async def _fetch(
        self, node: int, places: dict[TopicPartition, Place], rides: tuple[TopicPartition, ...], wait_ms: int
    ) -> Polled:
        """Ask a leader for more, and decode what comes."""
        bytes_each = fetch_bytes(len(places))
        wanted = {one: Wanted(place.offset, bytes_each) for one, place in places.items()}
        session = self._sessions.setdefault(node, Session())
        answer = await self._view.client.fetch(
            node,
            wanted,
            bytes_max=READER_BYTES,
            wait_ms=wait_ms,
            session=session,
            promises_of=rides,
            line=self._line,
        )
        found = {}
        for partition, fetched in answer.fetched.items():
            place = places[partition]
            if fetched.code:
                error = error_of(fetched.code, str(partition))
                found[partition] = (place, Loaded(None, fetched.high_watermark, fetched.log_start, error))
                # The session is told again of a partition that it has an error for.
                session.reset()
                continue
            chunk = await decode_fetched(place, fetched, self._view.metrics)
            found[partition] = (place, Loaded(chunk, fetched.high_watermark, fetched.log_start))
        return Polled(found, answer.promised)

    def _take_polls(self) -> tuple[set[TopicPartition], Exception | None]:
        """Merge what has come; return the partitions of which something was promised, and what went wrong."""
        told: set[TopicPartition] = set()
        failure: Exception | None = None
        for node, poll in list(self._polls.items()):
            if not poll.done():
                continue
            del self._polls[node]
            try:
                polled = poll.result()
                for partition, (place, loaded) in polled.found.items():
                    try:
                        if self._take_in(partition, place, loaded):
                            self._ask_soon()
                    except Exception as error:
                        failure = _graver(failure, error)
                # Behind the records: an entry that came too late has taken with it what was promised before.
                self._view.promises.keep(polled.promised)
                told |= {one for one, promise in polled.promised.items() if promise.offset >= 0}
            except WalstreamError as error:
                failure = _graver(failure, error)
        return told, failure

    # Promises

    def _ask(self) -> float:
        """Have a question on its way, if an entry is held up or none was asked for long; return when to look again."""
        if self._asking is not None:
            return IDLE_S
        now_s = asyncio.get_running_loop().time()
        due_s = self._asked_s + IDLE_S
        if self.merge.buffered:
            due_s = now_s + self._view.promises.wait_s(self.merge.head())
            if self._held_up_by() <= self._promised:
                # What was told just now would be told again.
                due_s = max(due_s, self._retry_at_s)
        if now_s < due_s:
            return due_s - now_s
        self._asked_s = now_s
        self._asking = asyncio.create_task(self._question(self._held_up_by()))
        return IDLE_S

    async def _question(self, partitions: set[TopicPartition]) -> set[TopicPartition]:
        await self._view.promises.ask(partitions)
        return partitions

    def _held_up_by(self) -> set[TopicPartition]:
        """Return the partitions that have to promise something before the next entry, or any, can be handed out."""
        held = {strand.name for strand in self.merge.blocked() if isinstance(strand.name, TopicPartition)}
        return held | {REGIONS} if self.merge.limit <= self.merge.head() else held

    async def _take_promises(self, told: set[TopicPartition]) -> None:
        """Apply what came with polls or as an answer. About the same partitions nothing is asked for a while."""
        is_answer = self._asking is not None and self._asking.done()
        if is_answer:
            asking, self._asking = self._asking, None
            assert asking is not None
            told = told | asking.result()
        if not told:
            return
        await self._apply()
        before, now_s = self.merge.position, asyncio.get_running_loop().time()
        if is_held_up := self.merge.is_held_up():
            self.merge.take(0)
        self._promised, self._retry_at_s = told, now_s + self._pause.take()
        if not is_held_up or self.merge.position > before:
            self._asked_s = now_s
            if is_answer:
                # It is older than what has come since.
                self._ask_soon()

    async def _apply(self) -> None:
        """Raise limit and bounds as far as the promises go that are there by now.

        The order matters, and it does not matter how a promise came. That of regions says that who is not named before
        its offset has nothing up to its time, now and for ever. `topics` believes it when everything before the offset
        has been read and listed; `join` has all who are listed in the merge before the limit is raised that far. So
        nobody is missing there, also if the polls that were answered meanwhile did not know of them: who is new holds
        up the others until something is promised of it. And a promise of any other partition counts only when all
        before its offset is in the merge; what an answer had no room for is not.
        """
        if not self._view.topics.settle_now():
            await self._view.topics.settle()
        if await self.join():
            # What a log promises itself holds behind the entries that wait, too: whoever runs out of them holds up
            # nobody. One that is made of clocks (`resolved`) is believed no further than it is needed.
            strands = self.merge.strands.values() if self._view.promises.are_given else self._idle()
            self._raise_bounds(strands)

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
