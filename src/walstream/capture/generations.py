"""Opening a generation: one more capture begins to write, and whoever wrote before is void from here on.

Owns the order of the steps, which is what makes a zombie harmless; refuses to know rows. The caller holds the slot
already (copy-both, or the polling engine's lock): then nobody else can confirm anything, and every point that is valid
before our `open` is the truth.

    1  read the last valid point; does it fit the source?       early, so that a hopeless start writes nothing
    2  write `open`; its offset is the generation's number      from here on no other generation's point is valid
    3  read what came between: the last valid point is R        a late point of the one before still counts, if it
    4  does R fit the source, has the log what R says?          landed before our open
    5  the books begin with R
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable

from walstream import logs
from walstream.capture.chain import Chain
from walstream.capture.commit_points import OpenRecord, Point, encode
from walstream.capture.kafka import LogAddress
from walstream.capture.ledger import Ledger
from walstream.capture.reading import CommitsReader
from walstream.capture.resuming import SourceState, check_log, resume
from walstream.capture.topics import Topics
from walstream.errors import LogLost
from walstream.positions import TopicPartition

log = logs.get(__name__)

WriteNow = Callable[[str, bytes | None, bytes], int]
"""Writes a record (topic, key, value), waits until it is durable and returns its offset."""


def instance_name() -> str:
    """Return a name for this process that no other has ever had."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Log:
    """What the log says before a generation is opened."""

    def __init__(self, address: LogAddress, topics: Topics) -> None:
        """Take the topics, which must be there, and read the end of the commits topic."""
        self._topics = topics
        self._commits = TopicPartition(topics.names.commits, 0)
        self._reader = CommitsReader(address, topics.names.commits)
        self._start = topics.starts([self._commits])[self._commits]
        self._end = topics.ends([self._commits])[self._commits]
        self.chain: Chain = self._reader.last_valid(self._start, self._end)
        if self.chain.last is None and self._start > 0:
            raise LogLost(
                f"{topics.names.commits} has lost all its commit points to retention.",
                "Begin anew: delete the topics of this prefix, or take another capture.prefix.",
            )

    @property
    def last(self) -> Point | None:
        """The last valid point; None in a new log."""
        return self.chain.last

    def open(self, source: SourceState, instance: str, write: WriteNow, *, new_epoch: bool = False) -> Ledger:
        """Open a generation and return its books. Raises HistoryForked, SourceForgot, LogLost."""
        previous = self.chain.opened
        expected = resume(self.last, previous, source, new_epoch=new_epoch)
        origin = source.origin(instance)
        record = OpenRecord(expected.source_epoch, origin, time.time_ns() // 1_000_000)
        gen = write(self._commits.topic, None, encode(record))
        for offset, between in self._reader.read(self._end, gen):
            self.chain.feed(offset, between)
        base = resume(self.last, previous, source, new_epoch=new_epoch)
        self._check(base)
        log.info(
            "generation opened",
            gen=gen,
            source_epoch=base.source_epoch,
            resume_lsn=str(base.end_lsn),
            rows_total=base.rows_total,
            confirmed_flush=str(source.confirmed_flush),
            timeline=source.timeline,
        )
        return Ledger(gen, origin, base)

    def close(self) -> None:
        """End the connection."""
        self._reader.close()

    def _check(self, base: Point) -> None:
        facts = self._topics.check_data(base.topic_ids)
        there = [partition for partition in base.ends if partition.topic in facts]
        check_log(base, self._topics.ends(there), {name: fact.id for name, fact in facts.items()})
