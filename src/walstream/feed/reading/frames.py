"""Frames: entries in the order of their LSNs, encoded once and shared by everybody who is sent them.

Owns the shape in which the reading side hands entries to the service, and which of them a subscriber gets. A frame is
columns, not objects: one list per thing that is looked at on the way out, all of the same length. It is never changed
once it is made, and knows nothing of where its entries were read. Sans-IO.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeVar

from walstream.feed.reading.wire import key_of

T = TypeVar("T", bytes, str)

OVERHEAD_BYTES: Final = 110
"""What an entry costs in memory beside its bytes: two Python objects and its places in four lists."""

MATCHES_BYTES_MAX: Final = 4 * 1024 * 1024
"""What may be remembered of which topics patterns stand for."""

MATCH_BYTES: Final = 200
"""What an answer costs in memory: its place, the topic's name."""

FRAME_BYTES: Final = 700
"""What a frame costs in memory beside its entries; at the head many hold a single one."""


class Frame:
    """Up to a few thousand entries, their LSNs strictly ascending."""

    __slots__ = (
        "_by_tenant",
        "_by_topic",
        "_matches",
        "cluster",
        "encoded",
        "lsns",
        "resolved",
        "size_bytes",
        "tenants",
        "topics",
    )

    def __init__(
        self,
        lsns: list[int],
        encoded: list[bytes],
        tenants: list[bytes],
        topics: list[str],
        *,
        cluster: bytes = b"",
        resolved: int = 0,
    ) -> None:
        self.lsns = lsns
        """GlobalLsn values as plain numbers."""
        self.encoded = encoded
        """Each WalEntry as it stands in WalBatch.entries: tag, length, message."""
        self.tenants = tenants
        """b"": belongs to no tenant."""
        self.topics = topics
        self.cluster = cluster
        """First part of the key prefix."""
        self.resolved = resolved
        """Every entry that exists up to here has been in this frame or an earlier one; 0: not known."""
        self.size_bytes = sum(map(len, encoded)) + OVERHEAD_BYTES * len(encoded) + FRAME_BYTES
        self._by_tenant: dict[bytes, list[int]] | None = None
        self._by_topic: dict[str, list[int]] | None = None
        self._matches: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.lsns)

    @property
    def matches(self) -> list[bytes]:
        """Key prefix and key together: what key_prefix_filter is compared with. Made when first asked for."""
        if self._matches is None:
            cluster = self.cluster
            self._matches = [
                key_prefix(cluster, tenant, topic) + key_of(entry)
                for tenant, topic, entry in zip(self.tenants, self.topics, self.encoded, strict=True)
            ]
        return self._matches

    @property
    def by_tenant(self) -> dict[bytes, list[int]]:
        """Which entries each tenant has. Made once, however many tenants are subscribed."""
        if self._by_tenant is None:
            self._by_tenant = _places(self.tenants)
        return self._by_tenant

    @property
    def by_topic(self) -> dict[str, list[int]]:
        """Which entries are of each topic."""
        if self._by_topic is None:
            self._by_topic = _places(self.topics)
        return self._by_topic

    def since(self, lsn: int) -> Frame:
        """Return the entries from this LSN on."""
        first = bisect_left(self.lsns, lsn)
        if not first:
            return self
        return Frame(
            self.lsns[first:],
            self.encoded[first:],
            self.tenants[first:],
            self.topics[first:],
            cluster=self.cluster,
            resolved=self.resolved,
        )


class FrameSource:
    """The frames of one subscriber, read when they are asked for: a slow one holds no memory."""

    position: int
    """Everything below has been handed out."""
    is_live: bool
    """Whether it has caught up, and is given what comes."""

    async def next(self, wait_s: float) -> Frame | None:
        """Return what follows, at once if it is there; None when nothing came within the time.

        Raises LsnNotAvailable when what follows was removed meanwhile, and CorruptBatch, LogUnfit and LogLost; a log
        that does not answer is waited for. A source that raised is closed.
        """
        raise NotImplementedError

    def head(self) -> int:
        """Return the LSN of the newest entry of its kind, for whomever; 0: there is none."""
        raise NotImplementedError

    def entries_behind(self) -> int:
        """Return how many entries of the log have not been handed out yet, as far as is known."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of everything; `next` is not called again."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries a subscriber gets. Equal filters select the same, so that what they select can be shared."""

    tenant: bytes | None = None
    """None: those of all tenants, and those that belong to none."""
    key_prefix: bytes = b""
    """Compared with key prefix and key together."""
    topics: tuple[str, ...] = ()
    """Patterns where `*` stands for any text; none: every topic of the feed."""
    size_bytes: int = field(init=False, compare=False, repr=False)
    """What it costs in memory: its texts come from strangers, and whoever keeps filters must count them."""

    def __post_init__(self) -> None:
        """Measure it."""
        tenant_bytes = 0 if self.tenant is None else sys.getsizeof(self.tenant)
        size_bytes = tenant_bytes + sys.getsizeof(self.key_prefix) + _size(self.topics)
        object.__setattr__(self, "size_bytes", size_bytes)

    def select(self, frame: Frame) -> list[int] | None:
        """Return the places of the entries that pass, in order; None when all do."""
        chosen: list[int] | None = None
        if self.tenant is not None:
            chosen = frame.by_tenant.get(self.tenant, [])
        if self.topics:
            passing = [topic for topic in frame.by_topic if matches_topic(self.topics, topic)]
            if len(passing) < len(frame.by_topic):
                wanted, topics = frozenset(passing), frame.topics
                places = range(len(frame)) if chosen is None else chosen
                chosen = [at for at in places if topics[at] in wanted]
        if self.key_prefix:
            matches, prefix = frame.matches, self.key_prefix
            places = range(len(frame)) if chosen is None else chosen
            chosen = [at for at in places if matches[at].startswith(prefix)]
        return None if chosen is None or len(chosen) == len(frame) else chosen


def matches_topic(patterns: tuple[str, ...], topic: str) -> bool:
    """Tell whether one of the patterns stands for the topic; no patterns stand for every one."""
    return not patterns or _matches.find(patterns, topic)


class Matches:
    """Which topics patterns stand for, as far as it was asked; bounded by bytes, because patterns may be long."""

    def __init__(self, bytes_max: int = MATCHES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._found: OrderedDict[tuple[str, ...], dict[str, bool]] = OrderedDict()
        self.size_bytes = 0

    def find(self, patterns: tuple[str, ...], topic: str) -> bool:
        """Tell whether one of the patterns stands for the topic."""
        known = self._found.get(patterns)
        if known is None:
            known = self._found[patterns] = {}
            self.size_bytes += _size(patterns)
        else:
            self._found.move_to_end(patterns)
        found = known.get(topic)
        if found is None:
            found = known[topic] = any(_fits(pattern, topic) for pattern in patterns)
            self.size_bytes += MATCH_BYTES
            while self.size_bytes > self._bytes_max:
                dropped, answers = self._found.popitem(last=False)
                self.size_bytes -= _size(dropped) + MATCH_BYTES * len(answers)
        return found


_matches: Final = Matches()


def _size(patterns: tuple[str, ...]) -> int:
    return sys.getsizeof(patterns) + sum(map(sys.getsizeof, patterns))


def _fits(pattern: str, topic: str) -> bool:
    """Compare with one pattern, in time that grows with the topic's length only: patterns come from strangers."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == topic
    last = rest.pop()
    at, end = len(first), len(topic) - len(last)
    if at > end or not topic.startswith(first) or not topic.endswith(last):
        return False
    for part in rest:
        found = topic.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


@lru_cache(maxsize=65_536)
def key_prefix(cluster: bytes, tenant: bytes, topic: str) -> bytes:
    """Return what stands before the keys of a tenant in a topic."""
    return b"%b:%b:%b:" % (cluster, tenant, topic.encode())


def _places(values: list[T]) -> dict[T, list[int]]:
    places: dict[T, list[int]] = {}
    first = values[0] if values else None
    if values.count(first) == len(values) and first is not None:  # type: ignore[arg-type]
        # One of a kind, as most frames are of tenants or topics: no loop.
        return {first: list(range(len(values)))}
    for at, value in enumerate(values):
        found = places.get(value)
        if found is None:
            places[value] = [at]
        else:
            found.append(at)
    return places
