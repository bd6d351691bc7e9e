"""The topic of regions, read and written: `regions` says what its records mean.

Owns making the topic, the check that nothing of it can be or was lost, and the race of several feeds to name the same
partition: whoever appends reads back, and what stands first counts. What is registered is durable on all replicas in
sync before anybody sees an LSN with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Final

from walstream.errors import LogUnfit, OffsetNotAvailable, WalstreamError
from walstream.feed.reading.calls import Wanted
from walstream.feed.reading.log_client import WAIT_S, LogClient, Patience
from walstream.feed.reading.log_errors import error_of
from walstream.feed.reading.regions import Named, RegionTable, write
from walstream.log.batch import walk
from walstream.log.records import iter_records
from walstream.logs import get
from walstream.positions import TopicPartition

REGIONS: Final = TopicPartition("_walstream.regions", 0)

SETTINGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
}
BYTES_MAX: Final = 16 * 1024 * 1024
"""The largest batch of the topic: the first one names all partitions of the log."""

_FETCH_BYTES: Final = 1024 * 1024

log = get(__name__)


class Regions:
    """The topic of regions, read and written."""

    def __init__(self, client: LogClient, topic_id: str) -> None:
        self._client = client
        self._topic_id = topic_id
        self._lock = asyncio.Lock()
        self.table = RegionTable()

    @classmethod
    async def open(cls, client: LogClient) -> Regions:
        """Make the topic if there is none, and read it. Raises LogUnfit, and what the log says."""
        settings = SETTINGS | {"max.message.bytes": str(BYTES_MAX)}
        topic = await client.have_topic(REGIONS.topic, settings, WAIT_S)
        if len(topic.leaders) != 1:
            raise LogUnfit(
                f"{REGIONS.topic} has {len(topic.leaders)} partitions; regions need the order of one.",
                f"Nobody may have read the feed yet: delete it with `walstream topic delete {REGIONS.topic}`.",
            )
        self = cls(client, str(topic.id))
        await self._check_settings()
        patience = Patience(client, WAIT_S)
        while True:
            # Who is to lead a topic that was made just now may not know it yet.
            try:
                await self.read()
                return self
            except WalstreamError as error:
                await patience.after(error)

    async def read(self) -> list[Named]:
        """Read to the end; return what is news. Raises LogUnfit, and what the log says."""
        async with self._lock:
            return await self._read()

    async def register(self, wanted: Collection[Named]) -> None:
        """See to it that these have regions, durable and read back, and that there is a first batch."""
        async with self._lock:
            patience, count = Patience(self._client, WAIT_S), 0
            while (missing := [one for one in wanted if not self.table.has(one)]) or not self.table.next_offset:
                try:
                    # Perhaps another feed was quicker.
                    if not await self._read():
                        records = write(missing, is_first_batch=not self.table.next_offset)
                        offset = await self._client.append(REGIONS, [(None, record) for record in records])
                        count += len(await self._read())
                        if self.table.next_offset <= offset:
                            raise OffsetNotAvailable(f"{REGIONS.topic} cannot be read up to {offset} yet.")
                except WalstreamError as error:
                    await patience.after(error)
        if count:
            log.info("regions named", count=count, largest=self.table.next_offset)

    async def _read(self) -> list[Named]:
        news: list[Named] = []
        while True:
            self._check_is_same()
            wanted = {REGIONS: Wanted(self.table.next_offset, _FETCH_BYTES)}
            answer = await self._client.fetch(self._client.leader(REGIONS), wanted, bytes_max=_FETCH_BYTES)
            fetched = answer.fetched[REGIONS]
            if fetched.log_start > 0:
                raise LogUnfit(
                    f"{REGIONS.topic} begins at offset {fetched.log_start}: regions were removed, so that LSNs that "
                    "subscribers hold may stand for other records.",
                    "Restore the topic from a backup, or delete it and have every subscriber begin anew.",
                )
            if fetched.code:
                raise error_of(fetched.code, REGIONS.topic)
            news += self._apply(fetched.records)
            if self.table.next_offset >= fetched.high_watermark:
                return news

    def _apply(self, raw: bytes) -> Iterator[Named]:
        view = memoryview(raw)
        for position, header in walk(raw):
            if header.next_offset <= self.table.next_offset:
                continue
            is_first = header.base_offset == 0
            for record in iter_records(view[position : position + header.length]):
                named = self.table.apply(record.offset, record.value, header.max_timestamp, is_first_batch=is_first)
                if named is not None:
                    yield named
            self.table.next_offset = max(self.table.next_offset, header.next_offset)

    def _check_is_same(self) -> None:
        topic = self._client.topics.get(REGIONS.topic)
        if topic is not None and str(topic.id) != self._topic_id:
            raise LogUnfit(
                f"{REGIONS.topic} was deleted and made anew: LSNs that subscribers hold stand for other records now.",
                "Start the feed again, and have every subscriber begin anew.",
            )

    async def _check_settings(self) -> None:
        patience = Patience(self._client, WAIT_S)
        for name, wanted in SETTINGS.items():
            while True:
                try:
                    told = await self._client.settings([REGIONS.topic], name)
                    break
                except WalstreamError as error:
                    await patience.after(error)
            found = told.values.get(REGIONS.topic) or wanted
            if found != wanted:
                raise LogUnfit(
                    f"{REGIONS.topic} has {name}={found}: regions could be lost, or lack their time.",
                    f"walstream topic alter {REGIONS.topic} --set {name}={wanted}",
                )
