"""Where a change stands: LSNs of PostgreSQL, positions of rows, partitions of the log, LSNs of the feed.

Owns the text forms and the order of these values; knows nothing of where they come from. An LSN is compared with an
LSN of the same source epoch only; that is why a `Position` begins with the epoch. A `GlobalLsn` is compared with any
other: it orders the records of all partitions of a log. Sans-IO.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from walstream.errors import UsageError

LSN_MAX: Final = (1 << 64) - 1

PART_MAX: Final = (1 << 32) - 1
"""The largest region and index of a GlobalLsn."""

STAMP_SHIFT: Final = 16
"""Bits below the milliseconds of a stamp."""

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_GLOBAL_LSN = re.compile(r"([0-9a-f]{16})\.([0-9]{10})\.([0-9]{10})")


class Lsn(int):
    """A byte position in PostgreSQL's write-ahead log: a number that prints as `16/B374D848`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read the form that PostgreSQL prints. Raises UsageError."""
        match = _LSN.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not an LSN.", "Write it as PostgreSQL does, for example 16/B374D848.")
        return cls((int(match[1], 16) << 32) | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self!s})"


ZERO: Final = Lsn(0)
"""Before everything: PostgreSQL calls it invalid and reads it as "from where the slot stands"."""


class Position(NamedTuple):
    """Where a row change stands among all changes of a source: tuples compare in commit order."""

    source_epoch: int
    commit_lsn: Lsn
    seq: int


class TopicPartition(NamedTuple):
    """One partition of the log; its text form is `topic-partition`, as Kafka's tools print it."""

    topic: str
    partition: int

    @classmethod
    def parse(cls, text: str) -> TopicPartition:
        """Read `topic-partition`; the topic may contain hyphens. Raises UsageError."""
        topic, hyphen, number = text.rpartition("-")
        if not (topic and hyphen and number.isascii() and number.isdigit()):
            raise UsageError(f"{text!r} is not a partition.", "Write it as topic-number, for example orders-0.")
        return cls(topic, int(number))

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class GlobalLsn(int):
    """Where a record stands among all records of the log: 128 bits, a stamp, a region and an index.

    The stamp (64 bits) is the time at which its leader appended it, in milliseconds, shifted by 16; the region (32)
    stands for its partition, the index (32) counts within it. The text has a fixed width, so that it sorts as the
    number does. `lsn + 1` is where to resume after `lsn`, also when the index is used up: regions only grow.
    """

    __slots__ = ()

    @classmethod
    def of(cls, stamp: int, region: int, index: int) -> GlobalLsn:
        """Put the three parts together."""
        assert 0 <= stamp <= LSN_MAX, stamp
        assert 0 <= region <= PART_MAX, region
        assert 0 <= index <= PART_MAX, index
        return cls(stamp << 64 | region << 32 | index)

    @classmethod
    def at_time(cls, time_ms: int) -> GlobalLsn:
        """Return the first LSN that a record appended at this time can have."""
        return cls.of(time_ms << STAMP_SHIFT, 0, 0)

    @classmethod
    def parse(cls, text: str) -> GlobalLsn:
        """Read the text form. Raises UsageError."""
        match = _GLOBAL_LSN.fullmatch(text)
        if match is not None:
            stamp, region, index = int(match[1], 16), int(match[2]), int(match[3])
            if region <= PART_MAX and index <= PART_MAX:
                return cls.of(stamp, region, index)
        example = GlobalLsn.of(0x19A2B3C4D5E0000, 7, 42)
        raise UsageError(f"{text[:60]!r} is not an LSN of the feed.", f"It looks like {example}.")

    @property
    def stamp(self) -> int:
        """The hybrid logical clock: milliseconds in the upper 48 bits."""
        return self >> 64

    @property
    def time_ms(self) -> int:
        """When the record was appended."""
        return self >> (64 + STAMP_SHIFT)

    @property
    def region(self) -> int:
        """Which partition, and which roll of its index."""
        return (self >> 32) & PART_MAX

    @property
    def index(self) -> int:
        """Which record of the region."""
        return self & PART_MAX

    def next(self) -> GlobalLsn:
        """Return where to resume after this one."""
        return GlobalLsn(self + 1)

    def __str__(self) -> str:
        return f"{self.stamp:016x}.{self.region:010d}.{self.index:010d}"

    def __repr__(self) -> str:
        return f"GlobalLsn({self!s})"
