"""A log in memory with the offsets, epochs and losses of a real one: what the core sees, and what a crash leaves.

Every batch holds one record. What is not flushed is lost by a crash; the epoch map, the newest epoch seen and the high
watermark's hint are kept as the real log keeps them.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from walstream.log.epochs import EpochMap
from walstream.replication.events import Digest, Range


class Record(NamedTuple):
    offset: int
    epoch: int
    text: str

    def encode(self) -> bytes:
        return f"{self.offset}:{self.epoch}:{self.text}".encode()

    @classmethod
    def decode(cls, data: object) -> Record:
        assert isinstance(data, bytes)
        offset, epoch, text = data.decode().split(":", 2)
        return cls(int(offset), int(epoch), text)


class MemoryLog:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.log_start = self.log_end = self.durable_end = self.high_watermark = 0
        self.epochs = EpochMap()
        self.cleaned_until = 0
        self.seen_epoch = -1
        self.hint = (0, -1)
        self.is_leader = False
        self.is_held = False
        self.epoch = -1
        self.damaged: list[int] = []
        self.rotten: set[int] = set()
        """Damaged, and nobody has looked yet."""

    def read(self, start: int, end: int) -> list[Record]:
        return [record for record in self.records if start <= record.offset < end]

    def append(self, text: str) -> int:
        assert self.is_leader, "a log that does not lead takes no appends"
        self._put(Record(self.log_end, self.epoch, text))
        return self.log_end - 1

    def append_replicated(self, batches: tuple[object, ...]) -> None:
        assert not self.is_leader
        for record in map(Record.decode, batches):
            assert record.offset == self.log_end, "does not continue the log"
            self._put(record)

    def _put(self, record: Record) -> None:
        self.epochs.assign(record.epoch, record.offset)
        self.records.append(record)
        self.log_end += 1

    def flush(self) -> bool:
        moved = self.durable_end < self.log_end
        self.durable_end = self.log_end
        return moved

    def lead(self, epoch: int) -> None:
        self.flush()
        self.epochs.assign(epoch, self.log_end)
        self.seen_epoch = self.epoch = epoch
        self.is_leader = True

    def truncate(self, offset: int) -> None:
        self.records = [record for record in self.records if record.offset < offset]
        self.log_end = min(self.log_end, offset)
        self.durable_end = min(self.durable_end, self.log_end)
        self.high_watermark = min(self.high_watermark, self.log_end)
        self.hint = (min(self.hint[0], self.log_end), self.hint[1])
        self.epochs.truncate(offset)
        self.damaged = [one for one in self.damaged if one < offset]

    def reset(self, start: int) -> None:
        self.truncate(0)
        self.epochs = EpochMap()
        self.log_start = self.log_end = self.durable_end = self.high_watermark = start

    def trim(self, start: int) -> None:
        self.log_start = max(self.log_start, start)
        self.records = [record for record in self.records if record.offset >= self.log_start]
        self.epochs.trim(self.log_start)
        self.damaged = [one for one in self.damaged if one >= self.log_start]
        self.high_watermark = max(self.high_watermark, self.log_start)

    def digest(self, start: int, end: int) -> Digest:
        spoilt = [one + 1 for one in self.damaged if start <= one < end]
        valid_from = max(spoilt, default=max(self.log_start, self.cleaned_until))
        data = b"|".join(
            b"rot" if record.offset in self.rotten else record.encode() for record in self.read(start, end)
        )
        return Digest(valid_from, hashlib.sha256(data).digest())

    def damaged_ranges(self) -> tuple[Range, ...]:
        return tuple((one, one + 1) for one in self.damaged)

    def crash(self) -> None:
        end = self.durable_end
        self.truncate(end)
        self.is_leader = False
        self.high_watermark = max(min(self.hint[0], end), self.log_start)

    def lose(self, end: int) -> bool:
        """The disk has forgotten what was durable; tell whether recovery can know."""
        is_noticed = end < self.durable_end
        hint = self.hint
        self.truncate(end)
        self.hint = hint
        return is_noticed
