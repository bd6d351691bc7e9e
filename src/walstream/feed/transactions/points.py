"""The commit points of one capture as the feed follows them: the records of `<prefix>.commits` with their append times.

Owns reading that topic, for all subscribers of the capture together, and the fold into points that have a place in the
stream. Which points are valid is decided by capture/chain.py. Invariants: records come in order and without a gap, or
there is an error; times of points never go back, so that LSNs made of them do not.

Whoever is behind reads for itself. Those who have read everything share one long poll, and find what it brought in a
short window of the newest records, decoded once: a point is known to all of them one answer after it can be read.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import Final, NamedTuple

from walstream.capture.chain import Chain
from walstream.capture.commit_points import CommitRecord, OpenRecord, Point, decode
from walstream.errors import CorruptBatch, WalstreamError
from walstream.feed.reading.calls import Wanted
from walstream.feed.reading.log_client import LogClient, Patience, error_of
from walstream.log.batch import HEADER_BYTES, check_crc, parse_header
from walstream.log.records import iter_records
from walstream.positions import TopicPartition

FETCH_BYTES: Final = 64 * 1024
"""Some two hundred points: decoding them takes a few milliseconds, in which nobody else has a turn."""

POLL_MS: Final = 1_000
KEPT_MAX: Final = 1_000
"""Records in the window."""

UNREACHABLE_S: Final = 30.0
"""After so long without an answer those who wait are told."""


class Told(NamedTuple):
    """A record of the topic."""

    offset: int
    time_ms: int
    """When it was appended; 0: before the topic had append time."""
    record: CommitRecord


class Placed(NamedTuple):
    """A valid point, and where it stands in the stream."""

    point: Point
    time_ms: int
    rows_before: int
    """Of the capture, before those of this point."""


class Fold:
    """A chain of points that has got as far as an offset."""

    def __init__(self, chain: Chain, position: int) -> None:
        self.chain = chain
        self.position = position
        """The offset of the next record."""
        self._time_ms = 0

    def feed(self, told: Told) -> Placed | None:
        """Take the next record; return the point that it makes, if it is valid. Raises CorruptCommits."""
        self.position = told.offset + 1
        # A walstream node never goes back in time; the clock of another log may.
        self._time_ms = max(self._time_ms, told.time_ms)
        point = self.chain.feed(told.offset, told.record)
        if point is None:
            return None
        return Placed(point, self._time_ms, point.rows_total - point.rows)


class Commits:
    """The topic, read for everybody."""

    def __init__(self, client: LogClient, topic: str) -> None:
        self.partition = TopicPartition(topic, 0)
        self._client = client
        self._kept: list[Told] = []
        self._end = 0
        """The offset behind the window."""
        self._poll: asyncio.Task[None] | None = None
        self.rows_total = 0
        """Rows of the capture up to the newest record that was seen."""

    async def read(self, position: int, stop: int | None = None) -> list[Told]:
        """Return some of the records from an offset on, before `stop`; none only at the end.

        Raises OffsetOutOfRange, CorruptCommits, CorruptBatch, UnreachableError.
        """
        patience = Patience(self._client, UNREACHABLE_S)
        while True:
            try:
                found = await self._fetch(position, 0, "disk")
                return found if stop is None else [told for told in found if told.offset < stop]
            except WalstreamError as error:
                await patience.after(error)

    async def follow(self, position: int, wait_s: float) -> list[Told]:
        """Return some of the records from an offset on; when there are none, wait for them. Raises as `read` does."""
        if position < (self._kept[0].offset if self._kept else self._end):
            return await self.read(position)
        if not self._newer(position):
            await self._wait(position, wait_s)
        return self._newer(position)

    async def close(self) -> None:
        """End what is under way."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)

    def _newer(self, position: int) -> list[Told]:
        kept = self._kept
        return kept[bisect_left(kept, position, key=lambda told: told.offset) :]

    async def _wait(self, position: int, wait_s: float) -> None:
        if self._poll is None or self._poll.done():
            if position > self._end:
                # Nobody has followed for a while.
                self._kept, self._end = [], position
            self._poll = asyncio.create_task(self._follow())
            # Everybody may have left by the time that it fails.
            self._poll.add_done_callback(lambda poll: poll.cancelled() or poll.exception())
        done, _ = await asyncio.wait((self._poll,), timeout=wait_s)
        for poll in done:
            poll.result()

    async def _follow(self) -> None:
        """Wait for records behind the window, and take them into it."""
        patience = Patience(self._client, UNREACHABLE_S)
        while True:
            try:
                found = await self._fetch(self._end, POLL_MS, f"points of {self.partition.topic}")
                break
            except WalstreamError as error:
                await patience.after(error)
        if found:
            self._kept = [*self._kept, *found][-KEPT_MAX:]
            self._end = found[-1].offset + 1

    async def _fetch(self, position: int, wait_ms: int, line: str) -> list[Told]:
        partition = self.partition
        wanted = {partition: Wanted(position, FETCH_BYTES)}
        node = self._client.leader(partition)
        answer = await self._client.fetch(node, wanted, bytes_max=FETCH_BYTES, wait_ms=wait_ms, line=line)
        fetched = answer.fetched[partition]
        if fetched.code:
            raise error_of(fetched.code, str(partition))
        found = decode_records(partition, fetched.records, position)
        for told in found:
            if not isinstance(told.record, OpenRecord):
                self.rows_total = max(self.rows_total, told.record.rows_total)
        return found


def decode_records(partition: TopicPartition, raw: bytes, first_offset: int) -> list[Told]:
    """Read record batches, of which the last may be cut off. Raises CorruptCommits, CorruptBatch."""
    found: list[Told] = []
    position = 0
    while len(raw) - position >= HEADER_BYTES:
        header = parse_header(raw, position)
        if position + header.length > len(raw):
            break
        if not check_crc(raw, position, header.length):
            raise CorruptBatch(f"The batch of {partition} at offset {header.base_offset} does not match its CRC.")
        if not header.is_control:
            time_ms = header.max_timestamp if header.uses_append_time else 0
            for record in iter_records(memoryview(raw)[position : position + header.length]):
                if record.offset >= first_offset:
                    found.append(Told(record.offset, time_ms, decode(record.value, record.offset)))
        position += header.length
    return found
