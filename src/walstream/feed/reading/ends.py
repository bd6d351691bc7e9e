"""The last entry of each partition, noted in the log, so that it is known when its record is not there any more.

Owns the compacted topic `_walstream.ends`. A note says that nothing in a partition up to an offset has a larger LSN. It
is true for ever, whoever wrote it, so feeds need not agree about anything: the furthest note counts. Without it a feed
that starts again, on a topic whose records have all expired, could not tell that a subscriber had read them, and would
have to send it away (`seeking`).

A note is written when a partition has been quiet for a while, and when the feed closes: long before retention can
remove what it speaks of. One that is missing costs a subscriber its place, never an entry.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from walstream.errors import WalstreamError
from walstream.feed.reading.calls import EARLIEST, Wanted
from walstream.feed.reading.entries import Lane
from walstream.feed.reading.log_client import WAIT_S, LogClient, Patience, error_of
from walstream.feed.reading.seeking import LastRead, Seeking
from walstream.feed.reading.topics import Topics
from walstream.log.batch import walk
from walstream.log.records import iter_records
from walstream.logs import get
from walstream.positions import TopicPartition

ENDS: Final = TopicPartition("_walstream.ends", 0)
SETTINGS: Final = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}

QUIET_S: Final = 10.0
"""A partition without an entry for so long gets its note."""

BATCH_RECORDS: Final = 1_000

_FETCH_BYTES: Final = 1024 * 1024
_CLOSING_S: Final = 2.0

log = get(__name__)


class Note(msgspec.Struct, frozen=True):
    """What is noted of a partition; its key is the topic's id and the partition's number."""

    topic: str
    offset: int
    lsn: str
    """As a hexadecimal number: JSON's have not enough digits."""


_decoder = msgspec.json.Decoder(Note)


def fold(notes: dict[bytes, LastRead], key: bytes | None, value: bytes | None) -> None:
    """Take in the next record: of what is noted of a partition, the furthest counts."""
    try:
        note = _decoder.decode(value or b"")
        last = LastRead(note.offset, int(note.lsn, 16))
    except (msgspec.DecodeError, ValueError):
        return
    if key is not None and (key not in notes or notes[key].offset < last.offset):
        notes[key] = last


class Ends:
    """Reads the notes of others, and writes our own."""

    def __init__(self, client: LogClient, topics: Topics, seeking: Seeking) -> None:
        self._client = client
        self._topics = topics
        self._seeking = seeking
        self._notes: dict[bytes, LastRead] = {}
        self._seen: dict[Lane, tuple[LastRead, float]] = {}
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the notes, making the topic if there is none, and go on writing. Raises what the log says."""
        await self._client.have_topic(ENDS.topic, SETTINGS, WAIT_S)
        await self._read()
        self._apply()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write what is not noted yet, if the log answers."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSING_S):
                await self._write(self._due(0))
        except (WalstreamError, TimeoutError) as error:
            log.warning("last entries not noted", error=str(error))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(QUIET_S / 2)
            try:
                self._apply()
                await self._write(self._due(QUIET_S))
            except WalstreamError as error:
                log.warning("last entries not noted", error=error.message)
            except Exception:
                # A note that is missing costs a subscriber its place, long after: the next round writes it.
                log.exception("noting last entries failed")

    def _apply(self) -> None:
        """Let it be known what is noted of the partitions of the feed."""
        for partition, lane in self._topics.lanes.items():
            note = self._notes.get(self._key(partition))
            if note is not None:
                self._seeking.note(lane, *note)

    def _due(self, quiet_s: float) -> dict[TopicPartition, LastRead]:
        """Return what should be noted: the last entries of partitions that have been quiet for so long."""
        now_s = asyncio.get_running_loop().time()
        due = {}
        for partition, lane in self._topics.lanes.items():
            last = self._seeking.last_read.get(lane)
            if last is None:
                continue
            seen, since_s = self._seen.get(lane, (None, now_s))
            if seen != last:
                since_s = now_s
            self._seen[lane] = (last, since_s)
            note = self._notes.get(self._key(partition))
            if now_s - since_s >= quiet_s and (note is None or note.offset < last.offset):
                due[partition] = last
        lanes = set(self._topics.lanes.values())
        self._seen = {lane: seen for lane, seen in self._seen.items() if lane in lanes}
        return due

    def _key(self, partition: TopicPartition) -> bytes:
        return f"{self._topics.id_of(partition)}/{partition.partition}".encode()

    async def _write(self, due: dict[TopicPartition, LastRead]) -> None:
        items = [(self._key(one), one.topic, last) for one, last in due.items()]
        for first in range(0, len(items), BATCH_RECORDS):
            part = items[first : first + BATCH_RECORDS]
            notes = [(key, Note(topic, last.offset, f"{last.lsn:x}")) for key, topic, last in part]
            await self._client.append(ENDS, [(key, msgspec.json.encode(note)) for key, note in notes])
            self._notes |= {key: last for key, _, last in part}

    async def _read(self) -> None:
        patience = Patience(self._client, WAIT_S)
        start = await self._client.offsets_of_all({ENDS: EARLIEST}, WAIT_S)
        offset = start[ENDS].offset
        while True:
            try:
                wanted = {ENDS: Wanted(offset, _FETCH_BYTES)}
                answers = await self._client.fetch(self._client.leader(ENDS), wanted, bytes_max=_FETCH_BYTES)
                fetched = answers.fetched[ENDS]
                if fetched.code:
                    raise error_of(fetched.code, ENDS.topic)
            except WalstreamError as error:
                await patience.after(error)
                continue
            for position, header in walk(fetched.records):
                for record in iter_records(memoryview(fetched.records)[position : position + header.length]):
                    fold(self._notes, record.key, record.value)
                offset = max(offset, header.next_offset)
            if offset >= fetched.high_watermark:
                return
