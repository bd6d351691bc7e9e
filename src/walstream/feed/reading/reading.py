"""The reading side of the feed: a log, read in the order of LSNs, from anywhere to its end and on.

Owns what the service asks of the log: where it begins and ends, and a source of frames for each subscriber. Knows
nothing of gRPC, tenants' rights or acknowledgements.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from walstream.errors import LogUnfit, LsnNotAvailable
from walstream.feed.reading.chunks import Chunks
from walstream.feed.reading.cursor import Cursor, LogView
from walstream.feed.reading.ends import Ends
from walstream.feed.reading.frames import Filter, Frame, FrameSource
from walstream.feed.reading.log_client import LogClient
from walstream.feed.reading.log_source import LogSource
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.resolved import Promises
from walstream.feed.reading.seeking import Removed, Seeking
from walstream.feed.reading.tail import Tail
from walstream.feed.reading.topics import APPEND_TIME, TIMESTAMP_TYPE, Topics, without_append_time
from walstream.feed.reading.window import Window
from walstream.feed.transactions.captures import Transactions
from walstream.positions import GlobalLsn

if TYPE_CHECKING:
    from walstream.capture.kafka import LogAddress
    from walstream.config import FeedConfig

__all__ = ["Filter", "Frame", "FrameSource", "Reading", "ReadingMetrics"]


class Reading:
    """One process's view of the log. Made by `open`, ended by `close`."""

    metrics: ReadingMetrics
    _chunks: Chunks
    _client: LogClient
    _ends: Ends
    _promises: Promises
    _topics: Topics
    _view: LogView
    _window: Window
    transactions: Transactions
    """The same log by its commit points."""

    @classmethod
    async def open(cls, address: LogAddress, config: FeedConfig, capture_prefixes: Collection[str] = ()) -> Reading:
        """Connect, learn the topics and regions, find the head. Raises LogUnfit, UnreachableError, RefusedError.

        `<prefix>.commits`, `.schema` and `.status` of each capture prefix stay out of the feed, unless a subscriber
        asks for them by name.
        """
        self = cls()
        self.metrics = ReadingMetrics()
        self._client = client = await LogClient.connect(address)
        try:
            self._promises = promises = Promises(client, config.settle_ms)
            self._topics = Topics(client, promises, self.metrics, config.cluster, config.topics, capture_prefixes)
            await self._topics.open()
            self._chunks = Chunks(client, self.metrics)
            seeking = Seeking(client, promises)
            self._view = LogView(
                client,
                self._topics,
                promises,
                self._chunks,
                seeking,
                self.metrics,
                config.cluster.encode(),
                self.head,
            )
            self.transactions = Transactions(self._view, capture_prefixes)
            self._ends = Ends(client, self._topics, seeking)
            await self._ends.open()
            self._window = Window(self._view, config.window_bytes_max)
            await self._window.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def subscribe(self, start: int, topics: tuple[str, ...] = (), *, is_new: bool = False) -> FrameSource:
        """Return a source of everything from this LSN on. Raises LsnNotAvailable when some of it was removed.

        `topics` are patterns; a frame may hold other topics too, so a Filter with the same patterns must follow. A
        topic of walstream's own is read when it is named exactly; UnknownTopic, UsageError and LogUnfit say when that
        cannot be. LogUnfit also says that an entry below the start came so late that whoever stands there may lack it;
        not to one that is new, and has not stood anywhere.
        """
        if own := self.own_topics(topics):
            await self._topics.admit(own)
        if not is_new:
            self._promises.check(start, self._topics.chosen(topics))
        if not own and self._window.serves(start):
            return LogSource(self._view, self._window, start, topics)
        reader = (Tail if own else Cursor)(self._view, start, topics, is_new=is_new)
        try:
            await reader.join()
        except BaseException as error:
            # Readers are counted, and share what may be read at once: one that was refused must not go on counting.
            await reader.close()
            if isinstance(error, Removed):
                raise LsnNotAvailable.of(GlobalLsn(start), GlobalLsn(error.oldest), GlobalLsn(self.head())) from None
            raise
        return LogSource(self._view, None if own else self._window, start, topics, reader)

    def own_topics(self, topics: tuple[str, ...]) -> list[str]:
        """Return those of the patterns that name a topic of walstream's own."""
        return [topic for topic in topics if "*" not in topic and self._topics.is_own(topic)]

    @property
    def version(self) -> int:
        """Which list of topics this is."""
        return self._topics.version

    def check_is_whole(self, version: int, topics: tuple[str, ...]) -> None:
        """Raise LogUnfit when a topic that was read since a version of the list cannot be read on."""
        if lost := self._topics.lost_since(version, topics):
            raise LogUnfit(
                f"{lost} has no append time any more, so what is written to it now has no LSNs and is not in the feed.",
                f"walstream topic alter {lost} --set {TIMESTAMP_TYPE}={APPEND_TIME}; what came meanwhile "
                "is only in the log.",
            ).without_names(
                "A topic has no append time any more, so what is written to it now has no LSNs and is not in the feed.",
                "Whoever runs the feed knows which; subscribe again to have the others.",
            )

    def check_is_fit(self, topics: tuple[str, ...]) -> None:
        """Raise LogUnfit when a topic is named that is there and cannot be in the feed: it would be waited for in vain.

        Not for tenants, who would learn by it which topics there are.
        """
        if unfit := self._topics.unfit(topics):
            raise without_append_time(unfit)

    async def look_again(self, topics: tuple[str, ...]) -> None:
        """Look whether a topic that was not fit when it was looked at last has become so."""
        if unfit := self._topics.unfit(topics):
            await self._topics.look_again(unfit)

    def head(self) -> int:
        """Return the LSN of the newest entry that can be read; 0: there is none."""
        return self._view.seeking.head

    async def head_of_transactions(self, lsn: int) -> int:
        """Return where transactions end, if an LSN is one of theirs; otherwise 0. Raises UnreachableError."""
        return await self.transactions.head_near(lsn)

    async def oldest(self, topics: tuple[str, ...] = ()) -> int:
        """Return the LSN from which on everything is there; 0: nothing was ever removed."""
        return await self._view.seeking.oldest(self._topics.chosen(topics))

    def resolved(self) -> int:
        """Return the LSN up to which no entry will come any more: the window has them all."""
        return max(self._window.position - 1, 0)

    def held_back_by(self) -> str:
        """Name the partition that keeps `resolved` from going on; empty when none does."""
        return self._window.held_back_by

    @property
    def failure(self) -> str:
        """Why nothing new is read at the moment; empty: all is well."""
        return self._window.failure

    def topics(self) -> list[str]:
        """Return the names of the topics that are in the feed now, for whoever sets what the log keeps of them.

        With those of commit points: rows without them are no transactions.
        """
        return sorted({*(partition.topic for partition in self._topics.lanes), *self.transactions.topics()})

    async def entries_behind(self, lsn: int) -> int:
        """Return about how many entries there are from this LSN to the head."""
        if self._window.has_seen(lsn):
            return self._window.entries_since(lsn)
        return await self._view.seeking.count_since(self._topics.lanes, lsn)

    async def close(self) -> None:
        """End all sources and connections."""
        for part in ("_window", "transactions", "_ends", "_topics", "_chunks", "_promises", "_client"):
            if part in self.__dict__:
                await self.__dict__[part].close()
