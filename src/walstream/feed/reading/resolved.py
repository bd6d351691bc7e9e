"""Resolved positions: what the log has promised about what is still to come.

Owns the last promise of each partition, and the asking. A promise is (offset, time): every record from the offset on,
now and for ever, is appended after the time. So whoever has read up to the offset knows that the next entry of the
partition has an LSN above that time. Promises are asked for when somebody is held up for want of one, never else: an
idle log is not disturbed. One question is on its way at a time; who asks meanwhile shares the next.

A log that never promises anything (Apache Kafka) is noticed when the feed opens; from then on nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from walstream.errors import WalstreamError
from walstream.feed.reading.calls import RESOLVED, Found
from walstream.feed.reading.log_client import LogClient
from walstream.positions import GlobalLsn, TopicPartition

LINE: Final = "resolved"

OPENING_S: Final = 5.0
"""How long to ask before a log counts as one that promises nothing: a new leader may not know at once."""

_PAUSE_S: Final = 0.1


class Promise(NamedTuple):
    """Every record from the offset on is appended after the time."""

    offset: int
    time_ms: int

    @property
    def bound(self) -> int:
        """The first LSN that a record from the offset on can have."""
        return GlobalLsn.at_time(self.time_ms + 1)


class Promises:
    """The newest promise of each partition."""

    def __init__(self, client: LogClient) -> None:
        self._client = client
        self._found: dict[TopicPartition, Promise] = {}
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._next_wanted: set[TopicPartition] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.are_given = True
        """Whether this log promises anything."""

    def of(self, partition: TopicPartition) -> Promise | None:
        """Return the last promise."""
        return self._found.get(partition)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop what was promised of partitions that are not there any more: the next of that name is another one."""
        for partition in partitions:
            self._found.pop(partition, None)

    async def open(self, partitions: Collection[TopicPartition]) -> None:
        """Find out whether the log promises anything."""
        end = asyncio.get_running_loop().time() + OPENING_S
        while True:
            await self.ask(partitions)
            self.are_given = bool(self._found)
            if self.are_given or asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(_PAUSE_S)

    async def ask(self, partitions: Iterable[TopicPartition]) -> None:
        """Have newer promises for these, as far as somebody answers; made after this call."""
        self._next_wanted.update(partitions)
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        await asyncio.shield(self._next)

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
                answers = await self._client.offsets(dict.fromkeys(wanted, RESOLVED), line=LINE)
            except WalstreamError:
                return
            if any(answer.code for answer in answers.values()):
                await self._client.refresh_quietly()
            self._keep(answers)

    def _keep(self, answers: Mapping[TopicPartition, Found]) -> None:
        for partition, answer in answers.items():
            before = self._found.get(partition)
            if answer.code or answer.offset < 0 or answer.timestamp_ms < 0:
                continue
            if before is None or answer.timestamp_ms >= before.time_ms:
                self._found[partition] = Promise(answer.offset, answer.timestamp_ms)
