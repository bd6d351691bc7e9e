"""Where a change stands: LSNs of PostgreSQL, positions of rows, partitions of the log.

Owns the text forms and the order of these values; knows nothing of where they come from. An LSN is compared with an
LSN of the same source epoch only; that is why a `Position` begins with the epoch. Sans-IO.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from walstream.errors import UsageError

LSN_MAX: Final = (1 << 64) - 1

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


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
