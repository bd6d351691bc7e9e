"""Record batches in, encoded entries out: the feed's hot path, in one pass.

Owns what a record becomes: its LSN, its fields, its bytes. Refuses to know where batches come from and who gets the
entries. Every record costs the same few lookups and one join; what a batch, or the records of a transaction, have in
common is written once (`contexts`).

Records are read by aiokafka's compiled reader: for a value of 256 bytes it takes 0.2 µs where a loop over the bytes
takes 1.1, and with six headers 0.7 where the loop takes 1.4 (of 1.4 and 2.6 in all). It trusts its input more than we
do: batches fail their CRC here first, a few spare bytes lie behind what it reads, and whatever it stumbles over is read
again by `log.records`, which says what is wrong, or copes. Sans-IO.

The stamp of a record is the time at which its batch was appended, but never less than the one before it in its
partition, and never less than the time at which the partition entered the feed. A walstream node never goes back in
time; the clock of another log may, and records from before a topic had append time have no such time at all. Whoever
begins to read at the first record of a time or later sees the same stamps as who has read from the start.

The invariant: the LSNs of a chunk ascend strictly, and it holds every record from its first offset to its next one that
is not a marker of a transaction, of an aborted one, or removed by compaction.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from crc32c import crc32c

from walstream.errors import CorruptBatch
from walstream.feed.reading import wire
from walstream.feed.reading.contexts import Context, Contexts, Header, is_number
from walstream.feed.reading.frames import OVERHEAD_BYTES
from walstream.feed.reading.wire import LOW_BITS, TABLE
from walstream.log.batch import (
    APPEND_TIME_BIT,
    CHECKED_POSITION,
    COMPRESSION_MASK,
    HEADER_BYTES,
    BatchHeader,
    check_crc,
    parse_header,
)
from walstream.log.compression import decompress
from walstream.log.records import iter_records
from walstream.positions import STAMP_SHIFT, GlobalLsn

CHUNK_BYTES: Final = 1024 * 1024
"""A chunk ends with the batch that fills it: it is larger only by what one batch holds."""

STEP: Final = 500
"""Records between two moments at which others can have their turn: about a millisecond."""

INDEX_BITS: Final = 32
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
LOW: Final = TABLE - 1
DIGITS_MAX: Final = 20
"""A number of fewer digits certainly has no more than 64 bits."""

_SPARE: Final = bytes(64)
"""The compiled reader looks at most this far behind a record that claims more than it has."""


class Region(NamedTuple):
    """The middle of a partition's LSNs, and the time from which on the partition is in the feed."""

    number: int
    since_ms: int
    """No entry has an earlier stamp, whenever its record was appended. See `regions`."""
    start: int = 0
    """Where the partition began when it entered the feed: what was removed before was never in it."""
    end: int = 0
    """Where it ended then: what was there before need not have an append time, what came since must."""


class Lane:
    """What all entries of a partition have in common."""

    __slots__ = ("__weakref__", "cluster", "contexts", "partition", "regions", "topic")

    def __init__(self, cluster: str, topic: str, partition: int, regions: Mapping[int, Region]) -> None:
        """Take the regions by roll: how often the index has begun anew."""
        self.cluster = cluster
        self.topic = topic
        self.partition = partition
        self.regions = regions
        self.contexts = Contexts(cluster, topic, partition)

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def joined(self) -> int:
        """The offset from which on records came while the partition was in the feed."""
        return self.regions[min(self.regions)].end if self.regions else 0

    def lsn(self, offset: int, append_ms: int) -> int:
        """Return the LSN of the record at this offset that was appended then."""
        region = self.regions[offset >> INDEX_BITS]
        return GlobalLsn.of(max(append_ms, region.since_ms) << STAMP_SHIFT, region.number, offset & INDEX_MASK)


class Chunk:
    """Consecutive entries of one partition, as columns."""

    __slots__ = (
        "encoded",
        "first_offset",
        "lsns",
        "next_offset",
        "size_bytes",
        "stamp_ms",
        "strays",
        "tenants",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        first_offset: int,
        next_offset: int,
        stamp_ms: int,
        lsns: list[int],
        encoded: list[bytes],
        tenants: list[bytes],
        strays: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.topic = topic
        self.first_offset = first_offset
        """From where on it was read."""
        self.next_offset = next_offset
        """From where on to read what follows."""
        self.stamp_ms = stamp_ms
        """The stamp that no later entry is below."""
        self.lsns = lsns
        self.encoded = encoded
        self.tenants = tenants
        self.strays = strays
        """(place, offset) of the first entry of each batch that has no append time and should. See `strays`."""
        self.size_bytes = sum(map(len, encoded)) + OVERHEAD_BYTES * len(encoded)

    def __len__(self) -> int:
        return len(self.lsns)


def decode(
    lane: Lane,
    raw: bytes,
    first_offset: int,
    stamp_ms: int = 0,
    aborted: Sequence[tuple[int, int]] = (),
    bytes_max: int = CHUNK_BYTES,
) -> Chunk:
    """Return the entries from an offset on, without a pause. See `decode_steps`."""
    steps = decode_steps(lane, raw, first_offset, stamp_ms, aborted, bytes_max)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            chunk: Chunk = end.value
            return chunk


def decode_steps(
    lane: Lane,
    raw: bytes,
    first_offset: int,
    stamp_ms: int = 0,
    aborted: Sequence[tuple[int, int]] = (),
    bytes_max: int = CHUNK_BYTES,
) -> Generator[None, None, Chunk]:
    """Decode with a pause after every few hundred records; the chunk is what the generator returns.

    `raw` begins with the batch that holds the offset, or a later one, and may end inside a batch. `stamp_ms` is that of
    the record before, 0 for the first of a time. `aborted` are (producer id, first offset) of transactions that came to
    nothing, as Fetch tells them. A chunk ends early where the partition's next region is not known yet. Raises
    CorruptBatch for bytes that are none.
    """
    coder = _Coder(lane, first_offset, stamp_ms)
    transactions = _Aborted(aborted)
    buffer = bytearray(raw)
    buffer += _SPARE
    position, end, next_offset = 0, len(raw), first_offset
    while end - position >= HEADER_BYTES and coder.size_bytes < bytes_max:
        header = _parse_header(lane, buffer, position)
        if position + header.length > end:
            break
        if header.next_offset > next_offset:
            if not check_crc(buffer, position, header.length):
                raise CorruptBatch(f"The batch of {lane} at offset {header.base_offset} does not match its CRC.")
            if header.last_offset >> INDEX_BITS not in lane.regions:
                break
            if not transactions.hide(header):
                yield from coder.add(header, buffer, position)
            next_offset = header.next_offset
        position += header.length
    return coder.chunk(next_offset)


def _parse_header(lane: Lane, buffer: bytearray, position: int) -> BatchHeader:
    try:
        return parse_header(buffer, position)
    except CorruptBatch as error:
        raise CorruptBatch(f"{lane}: {error.message}") from error


class _Aborted:
    """Tells which batches nobody is to see: markers of transactions, and what aborted ones have written."""

    def __init__(self, aborted: Sequence[tuple[int, int]]) -> None:
        self._coming = sorted(aborted, key=lambda one: one[1], reverse=True)
        self._producers: set[int] = set()

    def hide(self, header: BatchHeader) -> bool:
        while self._coming and self._coming[-1][1] <= header.last_offset:
            self._producers.add(self._coming.pop()[0])
        if header.is_control:
            # A marker ends the transaction: what its producer writes from here on belongs to the next one.
            self._producers.discard(header.producer_id)
            return True
        return header.is_transactional and header.producer_id in self._producers


class _Record(NamedTuple):
    """A record as the compiled reader gives it."""

    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: list[Header]


class _Coder:
    """Gathers the columns of a chunk."""

    def __init__(self, lane: Lane, first_offset: int, stamp_ms: int) -> None:
        self._lane = lane
        self._first_offset = self._least_offset = first_offset
        self._stamp_ms = stamp_ms
        self._lsns: list[int] = []
        self._encoded: list[bytes] = []
        self._tenants: list[tuple[int, bytes]] = [(0, b"")]
        """(place from which on, tenant)"""
        self._strays: list[tuple[int, int]] = []
        self._joined = lane.joined
        self.size_bytes = 0

    def add(self, header: BatchHeader, buffer: bytearray, position: int) -> Iterator[None]:
        """Encode the records of a batch, with pauses. Raises CorruptBatch."""
        if header.uses_append_time:
            self._stamp_ms = max(self._stamp_ms, header.max_timestamp)
            # So that the reader tells the record's own time. The CRC is checked by now.
            buffer[position + CHECKED_POSITION + 1] &= ~APPEND_TIME_BIT
        elif header.last_offset >= self._joined:
            self._strays.append((len(self._lsns), max(header.base_offset, self._first_offset)))
        before, tenants, least_offset = len(self._encoded), len(self._tenants), self._least_offset
        try:
            yield from self._encode_all(_read(header, buffer, position), header.record_count)
        except (CorruptRecordException, CorruptBatch, ValueError, IndexError, MemoryError, OverflowError):
            # Perhaps only the name of a header that is not text. From the start again, by a reader that says why.
            del self._lsns[before:], self._encoded[before:], self._tenants[tenants:]
            self._least_offset = least_offset
            yield from self._encode_all(_read_carefully(self._lane, header, buffer, position), header.record_count)
        self.size_bytes += sum(map(len, islice(self._encoded, before, None)))

    def chunk(self, next_offset: int) -> Chunk:
        """Return what was gathered."""
        tenants: list[bytes] = []
        ends = [*(start for start, _ in self._tenants[1:]), len(self._encoded)]
        for (start, tenant), end in zip(self._tenants, ends, strict=False):
            tenants += [tenant] * (end - start)
        lane, strays = self._lane, [stray for stray in self._strays if stray[0] < len(self._lsns)]
        return Chunk(
            lane.topic, self._first_offset, next_offset, self._stamp_ms, self._lsns, self._encoded, tenants, strays
        )

    def _encode_all(self, records: Iterator[_Record], count: int) -> Iterator[None]:
        # One step more than the count needs: the reader notices what is wrong at the end only when asked for more.
        for _ in range(count // STEP):
            self._encode(islice(records, STEP))
            yield
        self._encode(islice(records, STEP))

    def _encode(self, records: Iterator[_Record]) -> None:
        """Encode some records of a batch. Every line of the loop is paid for by every record."""
        plain, add_encoded, add_lsn = self._lane.contexts.plain, self._encoded.append, self._lsns.append
        keys, values, entries, digits, sequence = wire.KEY, wire.VALUE, wire.ENTRY, wire.FOUR_DIGITS, wire.SEQ.get
        join, crc, checksum = b"".join, crc32c, wire.checksum
        least_offset, span_end, tenants = self._least_offset, -1, self._tenants
        current, headed, others = None, plain, b""
        same: list[Header] | None = None
        known: list[Header] | None = None
        for record in records:
            offset = record.offset
            if offset < least_offset:
                self._check_is_before(offset)
                continue
            least_offset = offset + 1
            if offset >= span_end:
                span_end, lsn_base, digits_base, offsets, middle = self._span(offset)
            headers = record.headers
            if not headers:
                context, ending = plain, b""
            elif headers == same:
                context, ending = headed, others
            else:
                name, content = headers.pop()
                number = sequence(content) or _large_sequence(content)
                if number is None or name != "seq" or headers != known:
                    same, known, headed, others = self._describe(headers, name, content)
                    number = others
                context, ending = headed, number
            if context is not current:
                current = context
                fields, fields_of_null, tenant, is_timed, _ = context
                time, timestamp = b"", None
                if tenant != tenants[-1][1]:
                    tenants.append((len(self._encoded), tenant))
            if not is_timed and record.timestamp != timestamp:
                timestamp = record.timestamp
                time = _committed_at(timestamp)
            key, value, shared = record.key or b"", record.value, fields
            if value is None:
                value, shared = b"", fields_of_null
            try:
                body = join((
                    keys[len(key)], key, shared, offsets[offset & LOW], middle, digits[offset - digits_base],
                    time, values[len(value)], value, checksum(wire.CHECKSUM, crc(value, crc(key))), ending,
                ))  # fmt: skip
                add_encoded(entries[len(body)] + body)
            except IndexError:
                ends = offsets[offset & LOW] + middle + digits[offset - digits_base] + time
                add_encoded(_encode_large(key, shared + ends, value, ending))
            add_lsn(lsn_base + offset)
        self._least_offset = least_offset

    def _check_is_before(self, offset: int) -> None:
        """Pass over records before the first one that is wanted. Raises CorruptBatch for any other."""
        if offset >= self._first_offset:
            raise CorruptBatch(f"The offsets of {self._lane} do not rise at {offset}.")

    def _span(self, offset: int) -> tuple[int, int, int, tuple[bytes, ...], bytes]:
        """Return what the entries of the next offsets have in common.

        Where that ends; what makes an LSN of an offset; what to take from an offset to get the last four digits of its
        index; the table of its lowest bits; and the bytes between those two.
        """
        roll, index = offset >> INDEX_BITS, offset & INDEX_MASK
        region = self._lane.regions[roll]
        stamp = max(self._stamp_ms, region.since_ms) << STAMP_SHIFT
        lsn_base = (stamp << 64 | region.number << INDEX_BITS) - (roll << INDEX_BITS)
        head = index // 10_000
        high = offset >> LOW_BITS
        middle = b"%b%b%b%016x.%010d.%06d" % (
            wire.varint(high) if high else b"",
            wire.number(8, stamp),
            wire.LSN,
            stamp,
            region.number,
            head,
        )
        ends = (offset - index + (head + 1) * 10_000, high + 1 << LOW_BITS, roll + 1 << INDEX_BITS)
        return min(ends), lsn_base, offset - index + head * 10_000, wire.CONTINUED if high else wire.VARINTS, middle

    def _describe(
        self, headers: list[Header], name: str, content: bytes | None
    ) -> tuple[list[Header] | None, list[Header] | None, Context, bytes]:
        """Return what the headers of a record come to, the last one given apart.

        What to compare the next ones with, in whole or but for a sequence number; the context; what else there is.
        """
        contexts = self._lane.contexts
        if name == "seq" and is_number(content):
            found = contexts.of_row(headers)
            if found is None and "seq" not in [other for other, _ in headers]:
                found = contexts.of(headers)
            if found is not None:
                context, others = found
                return None, None if others else headers, context, others + wire.number(14, int(content or b"0"))
        headers.append((name, content))
        return headers, None, *contexts.of(headers)


@lru_cache(maxsize=4_096)
def _committed_at(timestamp: int | None) -> bytes:
    return wire.number(2, timestamp) if timestamp is not None and timestamp > 0 else b""


def _large_sequence(content: bytes | None) -> bytes | None:
    """Return what a sequence number comes to that is not in the table; None when it is no number."""
    is_number = content is not None and content.isdigit() and len(content) < DIGITS_MAX
    return wire.number(14, int(content or b"")) if is_number else None


def _encode_large(key: bytes, between: bytes, value: bytes, ending: bytes) -> bytes:
    """Encode an entry with a key or a value too large for the tables."""
    check = wire.checksum(wire.CHECKSUM, crc32c(value, crc32c(key)))
    body = b"".join((wire.text(6, key), between, wire.text(7, value), check, ending))
    return b"\x0a" + wire.varint(len(body)) + body


def _read(header: BatchHeader, buffer: bytearray, position: int) -> Iterator[_Record]:
    """Read the records of a batch whose bytes are right and followed by spare ones."""
    end = position + header.length
    code = header.attributes & COMPRESSION_MASK
    if code:
        plain = bytearray(buffer[position : position + HEADER_BYTES])
        plain[CHECKED_POSITION + 1] &= ~COMPRESSION_MASK
        plain += decompress(memoryview(buffer)[position + HEADER_BYTES : end], header.compression)
        end = len(plain)
        buffer, position = plain + _SPARE, 0
    # A batch can be iterated once, and taking a slice of it counts: so one slice of the whole, which is taken in parts.
    return islice(DefaultRecordBatch(memoryview(buffer)[position:end]), None)


def _read_carefully(lane: Lane, header: BatchHeader, buffer: bytearray, position: int) -> Iterator[_Record]:
    """Read the records of a batch and trust nothing. Raises CorruptBatch."""
    try:
        for record in iter_records(memoryview(buffer)[position : position + header.length]):
            yield _Record(record.offset, record.timestamp_ms, record.key, record.value, list(record.headers))
    except CorruptBatch as error:
        raise CorruptBatch(f"The batch of {lane} at offset {header.base_offset}: {error.message}") from error
