"""Batches: which entries of a frame go out together, and as which bytes.

Owns the limits of a batch and its compression; refuses to know subscribers. A frame is cut into slices once for all
subscribers that get the same entries in batches of the same size, and the bytes of a batch are made once for each
compression. Entries are only ever copied, never looked into. Sans-IO.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final, NamedTuple

import cramjam

from walstream.config.section import KIB, MIB
from walstream.errors import EntryTooLarge
from walstream.feed.reading.frames import Filter, Frame
from walstream.feed.service import responses
from walstream.feed.service.resume import resume_token
from walstream.feed.wal_pb2 import NONE, SNAPPY, ZSTD
from walstream.positions import GlobalLsn

BATCH_BYTES_MAX: Final = MIB
"""Far below the 4 MiB that a client's channel takes unless told otherwise; larger batches are not faster."""

ENTRY_BYTES_MAX: Final = 64 * MIB
"""The largest entry that is sent at all."""

MESSAGE_OVERHEAD_BYTES: Final = 256
"""What a message has beside its entries: LSNs, a token, tags and lengths."""

SNAPPY_BYTES_MIN: Final = 4 * KIB
ZSTD_BYTES_MIN: Final = 64 * KIB

ZSTD_LEVEL: Final = 1
"""The stream is live: what a higher level saves on the wire it takes from everybody's time."""

SHARED_BYTES_MAX: Final = 16 * MIB
"""Bytes of frames and slices kept for other subscribers; at the head all of them want the same within moments."""

CUT_BYTES: Final = 200
"""What a cut costs in memory, also one with nothing in it."""


class Limits(NamedTuple):
    """How large the batches of a subscriber are."""

    entries_max: int
    bytes_max: int = BATCH_BYTES_MAX
    """Of the entries together; one that is larger goes alone."""
    entry_bytes_max: int = ENTRY_BYTES_MAX
    keeps_lsns: bool = False
    """Whether the LSN of each entry is needed later, to count what was acknowledged."""


class Slice:
    """Entries that follow each other, as they stand in a WalBatch."""

    __slots__ = ("_responses", "body", "count", "first", "last", "lsns", "next")

    def __init__(self, body: bytes, count: int, first: int, last: int, following: int, lsns: Sequence[int]) -> None:
        self.body = body
        self.count = count
        self.first = first
        self.last = last
        self.next = following
        """Where to resume behind them: also behind entries that were not for this subscriber."""
        self.lsns = lsns
        """Of each entry; empty unless they were asked for."""
        self._responses: dict[int, bytes] = {}

    def response(self, compression: int) -> bytes:
        """Return the WalResponse of a batch of just this, made once for everybody who is sent it."""
        made = self._responses.get(compression)
        if made is None:
            made = self._responses[compression] = _response([self], compression)
        return made

    def split(self, count: int) -> tuple[Slice, Slice]:
        """Return the first entries and the rest; both have some. Needs LSNs."""
        assert 0 < count < self.count == len(self.lsns)
        end = 0
        for _ in range(count):
            end = responses.skip_entry(self.body, end)
        lsns = self.lsns
        head = Slice(self.body[:end], count, self.first, lsns[count - 1], lsns[count - 1] + 1, lsns[:count])
        tail = Slice(self.body[end:], self.count - count, lsns[count], self.last, self.next, lsns[count:])
        return head, tail


class Cut(NamedTuple):
    """A frame, cut for a subscriber."""

    slices: list[Slice]
    error: EntryTooLarge | None = None
    """What ends the stream behind these slices."""


def cut(frame: Frame, chosen: Sequence[int] | None, limits: Limits) -> Cut:
    """Return the chosen entries of a frame (None: all) in slices within the limits."""
    lsns, encoded = frame.lsns, frame.encoded
    if chosen is not None:
        lsns, encoded = [lsns[at] for at in chosen], [encoded[at] for at in chosen]
    slices: list[Slice] = []
    for start, end in _bounds(encoded, limits):
        if end - start == 1 and len(encoded[start]) > limits.entry_bytes_max:
            return Cut(slices, _too_large(lsns[start], len(encoded[start]), limits))
        body = b"".join(encoded[start:end])
        last = lsns[end - 1]
        # Whoever gets the last of a frame has got, or was not to get, everything in it.
        following = (frame.lsns[-1] if end == len(lsns) else last) + 1
        slices.append(
            Slice(body, end - start, lsns[start], last, following, lsns[start:end] if limits.keeps_lsns else ())
        )
    return Cut(slices)


def _bounds(encoded: list[bytes], limits: Limits) -> list[tuple[int, int]]:
    found = []
    for start in range(0, len(encoded), limits.entries_max):
        end = min(start + limits.entries_max, len(encoded))
        if sum(map(len, islice(encoded, start, end))) <= limits.bytes_max:
            found.append((start, end))
            continue
        size = 0
        for at in range(start, end):
            if at > start and size + len(encoded[at]) > limits.bytes_max:
                found.append((start, at))
                start, size = at, 0
            size += len(encoded[at])
        found.append((start, end))
    return found


def _too_large(lsn: int, size_bytes: int, limits: Limits) -> EntryTooLarge:
    return EntryTooLarge(
        f"entry_too_large: the entry at {GlobalLsn(lsn)} has {size_bytes} bytes, and a message takes "
        f"{limits.entry_bytes_max}",
        f"Raise the limit of the channel and message_bytes_max, or go on without it from {GlobalLsn(lsn).next()}.",
    )


class SharedCuts:
    """The slices of the frames that were cut last, for whoever wants the same; bounded by bytes.

    What is kept is counted with the frame that was cut: a subscriber of whom little is in a frame keeps it all the
    same, and without that a quiet tenant beside busy ones would have the feed keep everything that the others get. The
    filter by which it was cut is counted, too: it may be longer than what it lets through.
    """

    def __init__(self, bytes_max: int = SHARED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._found: OrderedDict[tuple[int, Filter, Limits], tuple[Frame, Cut]] = OrderedDict()
        """By the identity of the frame, which is kept beside its slices, so that no other can get it meanwhile."""
        self._uses: Counter[int] = Counter()
        """How often each frame is kept."""
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    def cut(self, frame: Frame, entries: Filter, limits: Limits) -> Cut:
        """Return the slices of a frame that others may have been given, too."""
        key = (id(frame), entries, limits)
        found = self._found.get(key)
        if found is not None:
            self.hits += 1
            return found[1]
        self.misses += 1
        made = cut(frame, entries.select(frame), limits)
        self._found[key] = (frame, made)
        self.size_bytes += _size(made, entries) + (0 if self._uses[id(frame)] else frame.size_bytes)
        self._uses[id(frame)] += 1
        while self.size_bytes > self._bytes_max and len(self._found) > 1:
            self._drop()
        return made

    def _drop(self) -> None:
        (identity, entries, _), (frame, made) = self._found.popitem(last=False)
        self.size_bytes -= _size(made, entries)
        self._uses[identity] -= 1
        if not self._uses[identity]:
            del self._uses[identity]
            self.size_bytes -= frame.size_bytes


def _size(made: Cut, entries: Filter) -> int:
    # As much again for the response that is made of each.
    return CUT_BYTES + entries.size_bytes + sum(2 * len(one.body) for one in made.slices)


def choose_compression(size_bytes: int, accepted: Collection[int]) -> int:
    """Return the best compression for entries of this size among those that the subscriber takes."""
    if size_bytes <= SNAPPY_BYTES_MIN:
        return NONE
    preferred = (ZSTD, SNAPPY) if size_bytes > ZSTD_BYTES_MIN else (SNAPPY, ZSTD)
    return next((one for one in preferred if one in accepted), NONE)


def batch_response(slices: Sequence[Slice], compression: int) -> bytes:
    """Return the WalResponse of one batch of all these."""
    return slices[0].response(compression) if len(slices) == 1 else _response(slices, compression)


def _response(slices: Sequence[Slice], compression: int) -> bytes:
    body = slices[0].body if len(slices) == 1 else b"".join([one.body for one in slices])
    compressed = compress(compression, body) if compression else b""
    if not compressed or len(compressed) >= len(body):
        compression, compressed = NONE, b""
    token = resume_token(slices[-1].next)
    return responses.batch_response(body, slices[0].first, slices[-1].last, token, compression, compressed)


def compress(compression: int, data: bytes) -> bytes:
    """Compress what a WalBatch holds; snappy in its plain form, without frames."""
    if compression == SNAPPY:
        return bytes(cramjam.snappy.compress_raw(data))
    return bytes(cramjam.zstd.compress(data, level=ZSTD_LEVEL))


def decompress(compression: int, data: bytes) -> bytes:
    """Undo `compress`."""
    if compression == SNAPPY:
        return bytes(cramjam.snappy.decompress_raw(data))
    return bytes(cramjam.zstd.decompress(data))
