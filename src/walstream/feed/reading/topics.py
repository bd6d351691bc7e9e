"""Which partitions are in the feed, and from where on others can still join.

Owns the list of lanes and its *bound*: the LSN below which no partition outside the list has an entry, nor ever will
(the proof is in `regions`). Both change together, in one step without a pause between: whoever reads them at the same
moment has a list that is complete below the bound. Refuses to know what is read.

In the feed are the topics that the configuration's patterns stand for and that have append time. Topics that begin with
`_`, and the commits, schema and status of a capture, are walstream's own: a subscriber gets them only by their exact
name, and never those in which the log and the feed keep what they remember.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from walstream.capture.topics import Names
from walstream.errors import LogUnfit, NotAuthorized, UnknownTopic, UsageError, WalstreamError
from walstream.feed.reading.calls import EARLIEST, LATEST
from walstream.feed.reading.entries import Lane
from walstream.feed.reading.frames import matches_topic
from walstream.feed.reading.log_client import WAIT_S, LogClient
from walstream.feed.reading.metrics import ReadingMetrics
from walstream.feed.reading.region_topic import REGIONS, Regions
from walstream.feed.reading.regions import Named
from walstream.feed.reading.resolved import Promises
from walstream.logs import get
from walstream.positions import TopicPartition

REFRESH_S: Final = 3.0
"""How often new topics are looked for."""

RECHECK_S: Final = 60.0
"""How often the settings of topics that are in the feed are looked at again."""

RECHECK_UNFIT_S: Final = 10.0
"""How often the settings of topics that have no append time are looked at again."""

JOIN_S: Final = 5.0
"""How long to look for a topic that another feed has named just now, before it counts as deleted."""

RECENT_MS: Final = 60_000
"""A topic that was named longer ago, and is not there, was deleted."""

NEVER: Final = ("_walstream.", "__")
"""How the topics begin that nobody gets: acknowledgements, regions, ends of partitions, offsets of groups."""

TIMESTAMP_TYPE: Final = "message.timestamp.type"
APPEND_TIME: Final = "LogAppendTime"

_PAUSE_S: Final = 0.1

log = get(__name__)


class Topics:
    """The partitions of one feed."""

    def __init__(
        self,
        client: LogClient,
        promises: Promises,
        metrics: ReadingMetrics,
        cluster: str,
        patterns: Iterable[str],
        prefixes: Iterable[str],
    ) -> None:
        self._client = client
        self._promises = promises
        self._metrics = metrics
        self._cluster = cluster
        self._patterns = tuple(patterns)
        self._prefixes = frozenset(prefixes)
        self._asked: set[str] = set()
        """Topics of walstream's own that a subscriber has asked for."""
        self._has_append_time: dict[str, bool] = {}
        self._told: set[str] = set()
        self._untold: dict[str, WalstreamError] = {}
        """Topics whose settings could not be read when that was last tried, and why."""
        self._checked_s: dict[str, float] = {}
        self._ids: dict[TopicPartition, str] = {}
        self._ends: dict[TopicPartition, int] = {}
        self._refreshing = asyncio.Lock()
        self._settling = asyncio.Lock()
        self._considered = 0
        self._is_failing = False
        self._loop: asyncio.Task[None] | None = None
        self.regions: Regions
        self.lanes: dict[TopicPartition, Lane] = {}
        """The partitions of the feed."""
        self.asked: dict[TopicPartition, Lane] = {}
        """Those of walstream's own that somebody has asked for."""
        self.version = 0
        """Grows when the lists change."""
        self.lost: dict[str, int] = {}
        """Topics that are there, but had to leave the feed, and the version with which they did."""
        self.bound = 0

    async def open(self) -> None:
        """Learn the partitions, give them regions, and go on looking. Raises what the log says, LogUnfit."""
        self.regions = await Regions.open(self._client)
        await self.refresh()
        await self._promises.open([REGIONS, *self.lanes])
        await self.settle()
        self._loop = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Look no more."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    def chosen(self, patterns: tuple[str, ...]) -> dict[TopicPartition, Lane]:
        """Return the partitions that a subscriber with these patterns reads."""
        found = {one: lane for one, lane in self.lanes.items() if matches_topic(patterns, one.topic)}
        return found | {one: lane for one, lane in self.asked.items() if one.topic in patterns}

    def lost_since(self, version: int, patterns: tuple[str, ...]) -> str:
        """Return a topic that a reader with these patterns has lost since a version; empty: none."""
        lost = (topic for topic, when in self.lost.items() if when > version)
        return next((topic for topic in lost if topic in patterns or matches_topic(patterns, topic)), "")

    def unfit(self, names: tuple[str, ...]) -> str:
        """Return one of these that is a topic of the log and has no append time; empty: none is known."""
        known = self._client.topics
        return next((name for name in names if self._has_append_time.get(name) is False and name in known), "")

    async def look_again(self, name: str) -> None:
        """Look whether a topic has got append time since, if that is possible now."""
        self._checked_s[name] = float("-inf")
        await self.refresh_quietly()

    def id_of(self, partition: TopicPartition) -> str:
        """Return the id of the topic of a partition that is in the feed."""
        return self._ids[partition]

    def is_own(self, topic: str) -> bool:
        """Tell whether a topic is walstream's own."""
        if topic.startswith("_"):
            return True
        prefix, _, _ = topic.rpartition(".")
        names = Names(prefix)
        # A capture that the configuration does not know of is recognized by having all three.
        return topic in names.internal and (prefix in self._prefixes or names.internal <= self._client.topics.keys())

    async def admit(self, names: Collection[str]) -> None:
        """Read topics of walstream's own, too. Raises UsageError, UnknownTopic, LogUnfit."""
        if never := [name for name in names if name.startswith(NEVER)]:
            raise UsageError(f"{never[0][:100]} is never in the feed.", "It holds what the log and the feed remember.")
        # What is asked for is remembered for good, so it has to be there: to invent names costs nothing.
        if missing := set(names) - self._client.topics.keys():
            missing -= (await self._client.refresh()).keys()
        if missing:
            raise UnknownTopic(f"The log has no topic {min(missing)[:100]}.")
        self._asked |= set(names)
        await self.refresh()
        for name in names:
            if not any(partition.topic == name for partition in self.asked):
                raise self._untold.get(name) or without_append_time(name)

    def note_end(self, partition: TopicPartition, offset: int) -> None:
        """Take note of how far a partition goes, so that its next roll has a region in time."""
        self._ends[partition] = offset

    async def refresh(self) -> None:
        """Look which topics there are, and give regions to what is new. Raises what the log says."""
        async with self._refreshing:
            await self._client.refresh()
            wanted = await self._wanted()
            await self._name(self._points() | wanted)
            self._list(wanted)

    async def settle(self) -> None:
        """Raise the bound as far as the log's last promise about regions goes. Raises what the log says."""
        if not self.settle_now():
            async with self._settling:
                await self._consider()

    def settle_now(self) -> bool:
        """Raise the bound if that needs no reading; return whether it was raised as far as it goes."""
        promise = self._promises.of(REGIONS)
        if promise is None:
            return True
        if promise.offset > self.regions.table.next_offset or self._considered < self.regions.table.next_offset:
            return False
        self.bound = max(self.bound, promise.bound)
        return True

    async def refresh_quietly(self) -> None:
        """Look which topics there are, if that is possible now; say once that it is not."""
        try:
            await self.refresh()
            self._is_failing = False
        except WalstreamError as error:
            if not self._is_failing:
                log.warning("topics not refreshed", error=error.message)
            self._is_failing = True

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh_quietly()
            except Exception:
                # Nobody else looks: without this no topic would join or leave the feed any more, and nothing say so.
                log.exception("looking for topics failed")

    async def _consider(self) -> None:
        """Read the regions that were named meanwhile, and list their partitions before the bound passes them."""
        if self.settle_now():
            return
        promise = self._promises.of(REGIONS)
        if promise is not None and promise.offset > self.regions.table.next_offset:
            await self.regions.read()
        end = self.regions.table.next_offset
        deadline = asyncio.get_running_loop().time() + JOIN_S
        while unknown := self._unknown(end):
            await self.refresh()
            if not (unknown := self._unknown(end)):
                break
            if asyncio.get_running_loop().time() > deadline:
                for named in unknown:
                    log.warning("topic with a region is not there", topic=named.topic, partition=named.partition)
                break
            await asyncio.sleep(_PAUSE_S)
        self._considered = end
        self.settle_now()

    def _unknown(self, end: int) -> list[Named]:
        """Return the partitions with new regions of which the log says nothing yet."""
        topics = self._client.topics
        ids = {str(topic.id): topic for topic in topics.values()}
        found = []
        for number in range(self._considered + 1, end + 1):
            named = self.regions.table.named.get(number)
            if named is None:
                continue
            topic = ids.get(named.topic_id)
            is_there = topic is not None and named.partition in topic.leaders
            if self._is_unlisted(named) if is_there else self._is_recent(named):
                found.append(named)
        return found

    def _is_recent(self, named: Named) -> bool:
        """Tell whether a partition was named so recently that not every node may know of it."""
        promise = self._promises.of(REGIONS)
        region = self.regions.table.of(named.topic_id, named.partition)[named.roll]
        return promise is not None and region.since_ms > promise.time_ms - RECENT_MS

    def _is_unlisted(self, named: Named) -> bool:
        """Tell whether a partition belongs into the list and is not there: it was looked for before it was named."""
        partition = TopicPartition(named.topic, named.partition)
        fits = self._has_append_time.get(named.topic)
        return fits is not False and self._is_wanted(named.topic) and self._ids.get(partition) != named.topic_id

    def _is_wanted(self, topic: str) -> bool:
        if self.is_own(topic):
            return topic in self._asked
        return matches_topic(self._patterns, topic)

    async def _wanted(self) -> dict[TopicPartition, str]:
        """Return the partitions that belong into the feed, with the ids of their topics."""
        topics = self._client.topics
        names = [name for name in topics if self._is_wanted(name)]
        now_s = asyncio.get_running_loop().time()
        unsure = [name for name in names if self._is_unsure(name, now_s)]
        settings = await self._client.settings(unsure, TIMESTAMP_TYPE)
        # What is not told now is as it was: a topic does not leave the feed because a question has failed.
        self._has_append_time |= {name: value == APPEND_TIME for name, value in settings.values.items()}
        self._checked_s |= dict.fromkeys(settings.values, now_s)
        for name in settings.values:
            self._tell(name)
        self._tell_untold(settings.errors)
        return {
            TopicPartition(name, index): str(topics[name].id)
            for name in names
            if self._has_append_time.get(name)
            for index in topics[name].leaders
        }

    def _points(self) -> dict[TopicPartition, str]:
        """Return the commit points of captures: they have regions as early as their rows, for who reads by them."""
        topics = self._client.topics
        names = [name for name in topics if name.endswith(".commits") and self.is_own(name)]
        return {TopicPartition(name, 0): str(topics[name].id) for name in names if 0 in topics[name].leaders}

    def _is_unsure(self, name: str, now_s: float) -> bool:
        fits = self._has_append_time.get(name)
        return fits is None or now_s > self._checked_s[name] + (RECHECK_S if fits else RECHECK_UNFIT_S)

    def _tell(self, name: str) -> None:
        if self._has_append_time[name]:
            self._told.discard(name)
        elif name not in self._told:
            self._told.add(name)
            log.warning("topic without append time is not in the feed", topic=name, mend=_mend(name))

    def _tell_untold(self, failed: Mapping[str, WalstreamError]) -> None:
        for name, error in failed.items():
            if name not in self._untold and not isinstance(error, UnknownTopic):
                log.warning(
                    "settings of a topic cannot be read",
                    topic=name,
                    is_in_feed=bool(self._has_append_time.get(name)),
                    error=error.message,
                    hint="The feed's user needs DescribeConfigs on it." if isinstance(error, NotAuthorized) else "",
                )
        self._untold = dict(failed)

    async def _name(self, wanted: dict[TopicPartition, str]) -> None:
        """Register the regions that are missing."""
        table = self.regions.table
        new = [one for one, topic_id in wanted.items() if not table.of(topic_id, one.partition)]
        starts = await self._client.offsets_of_all(dict.fromkeys(new, EARLIEST), WAIT_S)
        ends = await self._client.offsets_of_all(dict.fromkeys(new, LATEST), WAIT_S)
        named = []
        for one, topic_id in wanted.items():
            start = starts[one].offset if one in starts else 0
            end = ends[one].offset if one in ends else self._ends.get(one, 0)
            rolls = table.missing(topic_id, one.partition, start, end)
            named += [Named(topic_id, one.topic, one.partition, roll, start, end) for roll in rolls]
        await self.regions.register(named)

    def _list(self, wanted: dict[TopicPartition, str]) -> None:
        """Bring the lists up to date."""
        gone = [one for one in self._ids if wanted.get(one) != self._ids[one]]
        new = [one for one, topic_id in wanted.items() if self._ids.get(one) != topic_id]
        if not gone and not new:
            return
        self._promises.forget(gone)
        for one in gone:
            if self._has_append_time.get(one.topic) is False and one.topic in self._client.topics:
                self.lost[one.topic] = self.version + 1
            self.lanes.pop(one, None)
            self.asked.pop(one, None)
            self._ends.pop(one, None)
            del self._ids[one]
        for one in new:
            self._ids[one] = wanted[one]
            lane = Lane(self._cluster, one.topic, one.partition, self.regions.table.of(wanted[one], one.partition))
            (self.asked if self.is_own(one.topic) else self.lanes)[one] = lane
        self.version += 1
        self._metrics.partitions = len(self.lanes)
        log.info("partitions of the feed", partitions=len(self.lanes), joined=len(new), left=len(gone))


def without_append_time(topic: str) -> LogUnfit:
    """Return what whoever asks for a topic that cannot be in the feed is told."""
    return LogUnfit(f"{topic} has no append time, so its records have no LSNs.", _mend(topic))


def _mend(topic: str) -> str:
    return f"walstream topic alter {topic} --set {TIMESTAMP_TYPE}={APPEND_TIME}"
