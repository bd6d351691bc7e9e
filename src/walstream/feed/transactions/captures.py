"""Framing TRANSACTIONS: each committed transaction of a capture as an OP_BATCH, in the order of commits.

Owns what all subscribers of a capture share: its commit points, where they begin and end, which rows may be seen. They
are read by the rule of capture/commit_points.py: a transaction is told when its commit point can be read and not
before, orphans of a crashed capture never, nothing twice. LSNs are those of `transaction_parts`, of the same kind as a
record's, so that acknowledgements and retention work on them alike; a commit point is appended after its rows.

    commits ─▶ valid points ─▶ rows of a point, all partitions merged ─▶ parts ─▶ entries ─▶ frames
               transaction_points       transaction_rows            transaction_parts     transaction_source

What a subscriber may not see is left out before a transaction is put together: rows of other tenants, of other topics
than it asked for, and of topics that are not in the feed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from walstream.capture.commit_points import Point
from walstream.capture.topics import Names
from walstream.errors import LogUnfit, LsnNotAvailable, OffsetOutOfRange, UnknownTopic, UsageError, WalstreamError
from walstream.feed.reading.chunks import Chunks
from walstream.feed.reading.entries import INDEX_BITS, Lane, Region
from walstream.feed.reading.frames import Filter, matches_topic
from walstream.feed.reading.log_client import Patience
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.regions import Named
from walstream.feed.reading.topics import APPEND_TIME, TIMESTAMP_TYPE
from walstream.feed.transactions.points import Commits, Placed
from walstream.feed.transactions.rows import Source
from walstream.feed.transactions.search import Search, topics_gone
from walstream.feed.transactions.source import TransactionSource
from walstream.positions import GlobalLsn, TopicPartition

if TYPE_CHECKING:
    from walstream.feed.reading.cursor import LogView

JOIN_S: Final = 10.0
"""How long to look for a topic that a point speaks of, before it counts as deleted."""

CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Chunks kept for all subscribers of a capture."""

_UNSEEN: Final = {roll: Region(0, 0) for roll in range(1 << 10)}
"""The regions of rows that nobody gets to see; they are counted all the same."""


class Transactions:
    """The captures whose transactions are subscribed to."""

    def __init__(self, view: LogView, prefixes: Collection[str]) -> None:
        """Take the prefixes of the captures that are known; the first is meant when a subscriber names none."""
        self._view = view
        self._prefixes = tuple(prefixes)
        self._opened: dict[str, CaptureLog] = {}
        self._opening = asyncio.Lock()

    async def of(self, prefix: str = "") -> CaptureLog:
        """Return a capture. Raises UsageError, UnknownTopic, LogUnfit, UnreachableError."""
        if not prefix and not self._prefixes:
            raise UsageError("Which transactions? The request names no capture.", "Set `capture` to its prefix.")
        prefix = prefix or self._prefixes[0]
        async with self._opening:
            known = self._opened.get(prefix)
            if known is None or not known.is_same:
                if known is not None:
                    await known.close()
                known = self._opened[prefix] = await CaptureLog.open(self._view, prefix)
        return known

    async def head_near(self, lsn: int) -> int:
        """Return where transactions end now, if an LSN is one of theirs; otherwise 0. Raises UnreachableError."""
        named = self._view.topics.regions.table.named.get(GlobalLsn(lsn).region)
        prefix = named.topic.removesuffix(".commits") if named is not None else ""
        if named is None or prefix == named.topic or not self._view.topics.is_own(named.topic):
            return 0
        try:
            capture = await self.of(prefix)
        except (UnknownTopic, LogUnfit):
            return 0
        return capture.newest if lsn <= capture.newest else await capture.head()

    def topics(self) -> list[str]:
        """Return the topics that must be kept for subscribers of transactions, beside those of rows."""
        names = {Names(prefix).commits for prefix in (*self._prefixes, *self._opened)}
        return sorted(names & self._view.client.topics.keys())

    async def close(self) -> None:
        """End what is under way."""
        for capture in self._opened.values():
            await capture.close()


class CaptureLog:
    """One capture, as all subscribers of its transactions see it."""

    def __init__(self, view: LogView, prefix: str, topic_id: str) -> None:
        names = Names(prefix)
        self.view = view
        self.topic = names.commits
        self.commits = Commits(view.client, names.commits)
        self.metrics = ReadingMetrics()
        self.chunks = Chunks(view.client, self.metrics, CACHE_BYTES_MAX)
        self.lane = Lane(view.cluster.decode(), names.commits, 0, view.topics.regions.table.of(topic_id, 0))
        self.newest = 0
        """The LSN at which the newest point ends that was seen."""
        self._topic_id = topic_id
        self._unseen: dict[TopicPartition, Lane] = {}

    @classmethod
    async def open(cls, view: LogView, prefix: str) -> CaptureLog:
        """Find the commit points of a capture. Raises UnknownTopic, LogUnfit, UnreachableError."""
        topic = Names(prefix).commits
        if topic not in view.client.topics:
            await view.client.refresh()
        known = view.client.topics.get(topic)
        if known is None:
            message = f"There are no transactions of {prefix[:100]!r}: the log has no such topic of commits."
            hint = "`capture` is the prefix that a capture writes with, capture.prefix in its configuration."
            # Whoever asks has named it.
            raise UnknownTopic(message, hint).without_names(message, hint)
        settings = await view.client.settings([topic], TIMESTAMP_TYPE)
        if topic in settings.errors:
            raise settings.errors[topic]
        if settings.values.get(topic) != APPEND_TIME:
            raise LogUnfit(
                f"{topic} has no append time, so its transactions have no LSNs.",
                f"walstream topic alter {topic} --set {TIMESTAMP_TYPE}={APPEND_TIME}",
            )
        self = cls(view, prefix, str(known.id))
        await self.know(0)
        await self.head()
        return self

    @property
    def is_same(self) -> bool:
        """Whether the topic is still the one that it was."""
        known = self.view.client.topics.get(self.topic)
        return known is not None and str(known.id) == self._topic_id

    async def subscribe(self, start: int, entries: Filter, entry_bytes_max: int) -> TransactionSource:
        """Return a source of the transactions from an LSN on. Raises LsnNotAvailable."""
        try:
            fold = await (await self._search()).seek(start)
        except OffsetOutOfRange:
            # More was removed meanwhile.
            raise await self.not_available(start) from None
        return TransactionSource(self, fold, start, entries, entry_bytes_max)

    async def head(self) -> int:
        """Return the LSN at which the last point ends; 0: there is none."""
        last = await (await self._search()).last()
        if last is not None:
            await self.place(last)
        return self.newest

    async def oldest(self) -> int:
        """Return the LSN from which on everything is there; 0: nothing was ever removed."""
        broken = await (await self._search()).last_broken()
        return 0 if broken is None else await self.place(broken) + 1

    async def not_available(self, start: int, broken: Placed | None = None) -> LsnNotAvailable:
        """Return the error for a subscriber at an LSN; `broken` is a point that was found to be."""
        oldest = max(await self.oldest(), 0 if broken is None else await self.place(broken) + 1)
        return LsnNotAvailable.of(GlobalLsn(start), GlobalLsn(oldest), GlobalLsn(await self.head()))

    async def place(self, placed: Placed) -> int:
        """Return the LSN at which a point ends, having seen to it that its rows have regions."""
        ordinal = placed.point.rows_total
        await self.know(ordinal)
        lsn = self.lane.lsn(ordinal, placed.time_ms)
        self.newest = max(self.newest, lsn)
        return lsn

    async def know(self, ordinal: int) -> None:
        """See to it that the rows up to this one have regions, those of earlier rolls first."""
        if ordinal >> INDEX_BITS not in self.lane.regions:
            regions = self.view.topics.regions
            rolls = regions.table.missing(self._topic_id, 0, 0, ordinal)
            await regions.register([Named(self._topic_id, self.topic, 0, roll) for roll in rolls])

    async def prepare(self, point: Point) -> None:
        """Have the lanes of a point's partitions: its topics may be newer than what is known. Raises UnknownTopic."""
        patience, topics = Patience(self.view.client, JOIN_S), self.view.topics
        while new := {span.partition for span in point.spans} - topics.lanes.keys() - self._unseen.keys():
            try:
                await topics.refresh()
                if gone := {partition.topic for partition in new} - self.view.client.topics.keys():
                    raise UnknownTopic(f"The log has no topic {', '.join(sorted(gone))}.")
                return
            except WalstreamError as error:
                await patience.after(error)

    def source_of(self, partition: TopicPartition, patterns: tuple[str, ...]) -> Source:
        """Return where rows of a partition are read; nobody gets those of topics that are not in the feed."""
        lane = self.view.topics.lanes.get(partition)
        if lane is not None:
            return Source(lane, matches_topic(patterns, partition.topic))
        if partition not in self._unseen:
            self._unseen[partition] = Lane(self.lane.cluster, partition.topic, partition.partition, _UNSEEN)
        return Source(self._unseen[partition], False)

    def is_gone(self, point: Point) -> bool:
        """Tell whether a topic that rows of the point were written to was deleted since, or made again."""
        return bool(topics_gone(self.view.client, point, {span.partition.topic for span in point.spans}))

    async def close(self) -> None:
        """End what is under way."""
        await self.commits.close()
        await self.chunks.close()

    async def _search(self) -> Search:
        return await Search.begin(self.view.client, self.commits, self.lane)
