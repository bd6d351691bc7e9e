"""Resolved positions: what is known about what is still to come.

Owns the last promise of each partition, the asking, and the promises that were broken. A promise is (offset, time):
every record from the offset on, now and for ever, is appended after the time. So whoever has read up to the offset
knows that the next entry of the partition has an LSN above that time. Promises come along with the records that `tail`
reads, where a log gives them there. Else they are asked for when somebody is held up for want of one: an idle log is
not disturbed. One question is on its way at a time; who asks meanwhile shares the next. However a promise came, it is
true for ever, so it is used in one way.

A walstream node promises by itself, and keeps it whatever its clock does. Apache Kafka promises nothing, which is
noticed when the feed opens. There a promise is made from what it does tell: where a partition ends, with everything
that was appended, also what cannot be read yet. What comes behind that end is stamped later than the question was
asked, as far as the clocks of brokers and feed agree and a broker does not dally between looking at its clock and
appending: `settle_ms` is how much of that is allowed for. What is appended and cannot be read yet (its replicas lag, or
its transaction is open) holds up the others for as long as that lasts, as on a node.

Such a promise can be broken, and any promise is by a record without append time (`strays`). An entry that comes too
late is refused (`merge`), and from then on whoever may have gone past it without it is told so, instead of going on:
`check`. Who asks for it by its LSN gets it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from walstream.errors import LogUnfit, WalstreamError
from walstream.feed.reading.calls import LATEST, RESOLVED, Found
from walstream.feed.reading.entries import INDEX_BITS
from walstream.feed.reading.log_client import LogClient
from walstream.feed.reading.log_errors import unanswered
from walstream.logs import get
from walstream.positions import GlobalLsn, TopicPartition

LINE: Final = "resolved"

OPENING_S: Final = 5.0
"""How long to ask before a log counts as one that promises nothing: a new leader may not know at once."""
ANSWER_S: Final = 30.0
"""How long to ask when nobody answers."""

PACE_S: Final = 0.02
"""How often a log that promises nothing is asked at most: what it says is old by far more than that."""

BROKEN_MAX: Final = 1_000
"""Broken promises that are remembered; more say nothing new about the clocks."""

_PAUSE_S: Final = 0.1

log = get(__name__)


class Promise(NamedTuple):
    """Every record from the offset on is appended after the time."""

    offset: int
    time_ms: int

    @property
    def bound(self) -> int:
        """The first LSN that a record from the offset on can have."""
        return GlobalLsn.at_time(self.time_ms + 1)


class Broken(NamedTuple):
    """An entry that came though none was to come below a bound."""

    partition: TopicPartition
    lsn: int
    bound: int

    def concerns(self, position: int) -> bool:
        """Tell whether a reader at a position may have gone past it without it.

        One that stands in its partition at the same stamp has had what is there before: offsets are the order.
        """
        return self.lsn < position <= self.bound and self.lsn >> INDEX_BITS != position >> INDEX_BITS

    def error(self) -> LogUnfit:
        """Return what whoever went past it is told."""
        fact = (
            f"has a record with the LSN {GlobalLsn(self.lsn)}, which came when none was expected any more below "
            f"{GlobalLsn(self.bound)}."
        )
        hint = (
            f"Begin at {GlobalLsn(self.lsn)} to have it, and again what came since, or behind {GlobalLsn(self.bound)} "
            "to go on without. message.timestamp.type of a topic must stay LogAppendTime while it is in the feed; with "
            "Apache Kafka the clocks must agree, and feed.settle_ms says how well."
        )
        return LogUnfit(f"{self.partition} {fact}", hint).without_names(f"A partition {fact}", hint)


class Promises:
    """The newest promise of each partition."""

    def __init__(self, client: LogClient, settle_ms: int) -> None:
        self._client = client
        self._settle_ms = settle_ms
        self._found: dict[TopicPartition, Promise] = {}
        self._broken: list[Broken] = []
        self._asking = asyncio.Lock()
        self._asked_s = 0.0
        self._next: asyncio.Task[None] | None = None
        self._next_wanted: set[TopicPartition] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_answered = False
        self.are_given = True
        """Whether this log promises anything by itself."""

    def of(self, partition: TopicPartition) -> Promise | None:
        """Return the last promise."""
        return self._found.get(partition)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop what was promised of partitions that are not there any more: the next of that name is another one."""
        for partition in partitions:
            self._found.pop(partition, None)

    async def open(self, partitions: Collection[TopicPartition]) -> None:
        """Find out whether the log promises anything. Raises UnreachableError when nobody answers."""
        began_s = asyncio.get_running_loop().time()
        while not self._found:
            await self.ask(partitions)
            passed_s = asyncio.get_running_loop().time() - began_s
            if self._has_answered and passed_s > OPENING_S:
                self.are_given = False
                log.warning(
                    "log gives no resolved positions",
                    consequence="entries wait, and their order is as right as the clocks",
                    settle_ms=self._settle_ms,
                )
                await self.ask(partitions)
                return
            if passed_s > ANSWER_S:
                raise unanswered(self._client.bootstrap)
            if not self._found:
                await asyncio.sleep(_PAUSE_S)

    async def ask(self, partitions: Iterable[TopicPartition]) -> None:
        """Have newer promises for these, as far as somebody answers; made after this call."""
        self._next_wanted.update(partitions)
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        await asyncio.shield(self._next)

    def keep(self, answers: Mapping[TopicPartition, Found]) -> None:
        """Keep what was promised, when it is news: by an answer to a question, or along with records."""
        for partition, answer in answers.items():
            before = self._found.get(partition)
            if answer.code or answer.offset < 0 or answer.timestamp_ms < 0:
                continue
            if before is None or answer.timestamp_ms >= before.time_ms:
                self._found[partition] = Promise(answer.offset, answer.timestamp_ms)

    def wait_s(self, lsn: int) -> float:
        """Return how long it makes no sense to ask whether anything can still come below an LSN."""
        if self.are_given:
            return 0.0
        settled_s = (GlobalLsn(lsn).time_ms + self._settle_ms) / 1000 - time.time()
        # A stamp may be far ahead: the clock of its broker was set back since.
        paced_s = self._asked_s + PACE_S - asyncio.get_running_loop().time()
        return max(min(settled_s, self._settle_ms / 1000), paced_s, 0.0)

    def note_broken(self, partition: TopicPartition, lsn: int, bound: int | None = None, position: int = 0) -> Broken:
        """Remember that an entry came in spite of a promise, below where others stood: up to a bound.

        None: up to a position, or where the log has got.
        """
        for known in self._broken:
            if (known.partition, known.lsn) == (partition, lsn):
                return known
        # Nobody is to believe it any more, or who asks for the entry would be refused it again.
        promise = self._found.pop(partition, None)
        if bound is None:
            bound = max(promise.bound if promise is not None else 0, position, lsn + 1)
        broken = Broken(partition, lsn, bound)
        log.error("an entry came too late", partition=str(partition), lsn=str(GlobalLsn(lsn)))
        if len(self._broken) < BROKEN_MAX:
            self._broken.append(broken)
        return broken

    def check(self, position: int, partitions: Collection[TopicPartition]) -> None:
        """Tell a reader at a position that it may lack an entry that came too late. Raises LogUnfit."""
        for broken in self._broken:
            if broken.concerns(position) and broken.partition in partitions:
                raise broken.error()

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self) -> None:
        async with self._asking:
            # Who comes from here on is not in this question, and starts the next one.
            wanted, self._next_wanted, self._next = self._next_wanted, set(), None
            try:
                answers = await (self._ask_node(wanted) if self.are_given else self._ask_kafka(wanted))
            except WalstreamError:
                return
            if any(answer.code for answer in answers.values()):
                await self._client.refresh_quietly()
            self.keep(answers)

    async def _ask_node(self, wanted: set[TopicPartition]) -> Mapping[TopicPartition, Found]:
        answers = await self._client.offsets(dict.fromkeys(wanted, RESOLVED), line=LINE)
        self._has_answered |= any(not answer.code for answer in answers.values())
        return answers

    async def _ask_kafka(self, wanted: set[TopicPartition]) -> Mapping[TopicPartition, Found]:
        """Make promises of where partitions end, by the time at which that was asked."""
        self._asked_s = asyncio.get_running_loop().time()
        time_ms = int(time.time() * 1000) - self._settle_ms
        ends = await self._client.offsets(dict.fromkeys(wanted, LATEST), line=LINE, with_unreadable=True)
        return {one: end._replace(timestamp_ms=time_ms) for one, end in ends.items()}
