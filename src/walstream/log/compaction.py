"""Key compaction: of each key keep the last record, and of a deleted key, in time, nothing.

Owns the two steps of a round, over batches that somebody else reads from sealed segments and writes to new ones:

1. `OffsetMap.add` every batch from the clean point on. The map holds a digest of each key and the offset of its last
   record, for at most `keys_max` keys; when those are used up it says how far it reaches (`end`), which is the next
   clean point. Rounds go on from there, so memory is bounded and every round makes progress.
2. `clean` every batch from the log start to the map's end, and what follows in the same segment. A record goes if the
   map knows a later one of its key.

Offsets never move: a rewritten batch keeps its base offset, last offset delta, producer, sequence, epoch and kind of
timestamp; its max timestamp is that of the records it still has. A batch left without records goes, unless the caller
needs its header. Kept as they are: batches in which nothing changes, control and transactional batches, batches that
do not decode (their records replace nobody's), records without a key (from before the topic was compacted), and the
last record of the log. A batch that fails its CRC stops the round: rewriting it would bless it with a new one.

Tombstones, after Kafka's KIP-534: the first round that covers a batch with tombstones in it writes into its header the
moment from which they may go, `delete_retention_ms` from then. So a tombstone outlives by that time not only its own
writing but the removal of everything it deletes, and a reader that starts at the beginning and keeps up within that
time sees it. This holds if the caller puts new segments in place from the log start upwards. A follower may copy the
header from its leader: a round removes no tombstone at or after the map's end, whatever the header says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from walstream.errors import CorruptBatch, CorruptLog, InvalidRecord
from walstream.log.batch import (
    COMPRESSION_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    assemble,
    check_crc,
    parse_header,
)
from walstream.log.compression import compress
from walstream.log.records import read_payload, scan_records, write_shifted

DIGEST_BYTES: Final = 16
KEYS_MAX: Final = 200_000
"""About 180 bytes each: 36 MB while a round runs."""
_UNTOUCHED_BITS: Final = CONTROL_BIT | TRANSACTIONAL_BIT


class OffsetMap:
    """Where each key was last written, from the clean point up to `end`."""

    __slots__ = ("_offsets", "end", "is_full", "keys_max")

    def __init__(self, clean_point: int, keys_max: int = KEYS_MAX) -> None:
        assert keys_max > 0, keys_max
        self.keys_max = keys_max
        self.end = clean_point
        """Everything from the clean point to here, exclusive, is in the map."""
        self.is_full = False
        self._offsets: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, batch: Buffer) -> bool:
        """Take in the next batch; return False once the map is full, perhaps in the middle of this one.

        Raises CorruptLog if the batch fails its CRC.
        """
        header = _checked_header(batch)
        if self.is_full:
            return False
        added: dict[bytes, int] = {}
        end = max(self.end, header.next_offset)
        if not header.attributes & _UNTOUCHED_BITS:
            try:
                end = self._collect(batch, header, added)
            except CorruptBatch:
                # Its records cannot be read, so they replace none that can.
                added.clear()
        self._offsets.update(added)
        self.end = end
        self.is_full = end < header.next_offset
        return not self.is_full

    def _collect(self, batch: Buffer, header: BatchHeader, added: dict[bytes, int]) -> int:
        """Put the keys of the batch into `added` while there is room; return the offset up to which they are there."""
        known, room = self._offsets, self.keys_max - len(self._offsets)
        covered = self.end
        end = max(covered, header.next_offset)
        for _, _, _, _, offset_delta, key, _, _ in scan_records(read_payload(batch, header), header):
            offset = header.base_offset + offset_delta
            # The whole batch is scanned even when the map is full, because only then is it known to be readable.
            if key is None or offset < covered or offset >= end:
                continue
            digest = blake2b(key, digest_size=DIGEST_BYTES).digest()
            if digest not in added and digest not in known:
                if room == 0:
                    end = offset
                    continue
                room -= 1
            added[digest] = offset
        return end

    def replaces(self, key: bytes, offset: int) -> bool:
        """Tell whether the map knows a record of this key after `offset`."""
        return self._offsets.get(blake2b(key, digest_size=DIGEST_BYTES).digest(), -1) > offset


@dataclass(slots=True)
class CleanStats:
    """What a round did, counted as it goes."""

    bytes_read: int = 0
    bytes_kept: int = 0
    records_read: int = 0
    records_kept: int = 0
    tombstones_removed: int = 0
    batches_unreadable: int = 0
    next_horizon_ms: int | None = None
    """When the first of the tombstones that stay may go: the latest time for another round."""


def clean(
    batches: Iterable[Buffer],
    offsets: OffsetMap,
    *,
    now_ms: int,
    delete_retention_ms: int,
    log_end: int,
    keeps_header: Callable[[BatchHeader], bool] | None = None,
    stats: CleanStats | None = None,
) -> Iterator[Buffer]:
    """Yield what remains of each batch; one in which nothing changes is yielded as it came.

    `keeps_header` is asked about a batch that has lost all its records: True keeps it, empty, for the producer's
    sequence in its header. Raises CorruptLog at a batch that fails its CRC.
    """
    cleaner = _Cleaner(offsets, now_ms, now_ms + delete_retention_ms, log_end, CleanStats() if stats is None else stats)
    for batch in batches:
        header = _checked_header(batch)
        cleaned = cleaner.clean(batch, header)
        if cleaned is None and keeps_header is not None and keeps_header(header):
            cleaned = _emptied(header)
        cleaner.stats.bytes_read += header.length
        if cleaned is not None:
            cleaner.stats.bytes_kept += len(cleaned)
            yield cleaned


def check_keys(batch: Buffer, header: BatchHeader) -> None:
    """Refuse what a compacted topic cannot take: records without a key (InvalidRecord) or garbage (CorruptBatch)."""
    for _, _, _, _, offset_delta, key, _, _ in scan_records(read_payload(batch, header), header):
        if key is None:
            raise InvalidRecord(
                f"Record {offset_delta} of the batch has no key, and the topic keeps the last record of each key.",
                "Send a key, or set cleanup.policy=delete.",
            )


@dataclass(frozen=True, slots=True)
class _Cleaner:
    """One round's decision on each batch."""

    offsets: OffsetMap
    now_ms: int
    horizon_ms: int
    """Given to the tombstones that this round is the first to cover."""
    log_end: int
    stats: CleanStats

    def clean(self, batch: Buffer, header: BatchHeader) -> Buffer | None:
        """Return what stays of the batch, None if nothing does."""
        selection = _Selection(bytearray(), header.record_count)
        cleaned: Buffer | None = batch
        if not header.attributes & _UNTOUCHED_BITS:
            try:
                selection = self._select(header, read_payload(batch, header))
                cleaned = self._rewrite(batch, header, selection)
            except CorruptBatch:
                selection = _Selection(bytearray(), header.record_count)
                self.stats.batches_unreadable += 1
        self.stats.records_read += header.record_count
        self.stats.records_kept += selection.count
        self.stats.tombstones_removed += selection.tombstones_removed
        return cleaned

    def _select(self, header: BatchHeader, payload: bytes) -> _Selection:
        """Pick the records that stay."""
        horizon_ms = header.delete_horizon_ms
        # The horizon may be the leader's: this node keeps the deleted records until its own map covers the batch.
        drops_tombstones = horizon_ms is not None and horizon_ms <= self.now_ms and self._covers(header)
        selection = _Selection(bytearray())
        for start, end, _, timestamp_delta, offset_delta, key, value, _ in scan_records(payload, header):
            offset = header.base_offset + offset_delta
            if key is not None and offset != self.log_end - 1:
                if self.offsets.replaces(key, offset):
                    continue
                if value is None and drops_tombstones:
                    selection.tombstones_removed += 1
                    continue
            if key is not None and value is None:
                selection.tombstones += 1
            selection.records += payload[start:end]
            selection.count += 1
            selection.max_timestamp = max(selection.max_timestamp, header.base_timestamp + timestamp_delta)
        return selection

    def _covers(self, header: BatchHeader) -> bool:
        """Tell whether this round removes everything that the tombstones of a batch delete."""
        return header.last_offset < self.offsets.end

    def _rewrite(self, batch: Buffer, header: BatchHeader, selection: _Selection) -> Buffer | None:
        """Put the records that stay into a batch with the same place in the log."""
        if selection.count == 0:
            return None
        records = selection.records
        cleaned = header._replace(record_count=selection.count)
        if not header.uses_append_time:
            cleaned = cleaned._replace(max_timestamp=selection.max_timestamp)
        horizon_ms = header.delete_horizon_ms
        # Below the map's end, everything that these tombstones delete goes in this round: now their time runs.
        begins_horizon = selection.tombstones > 0 and horizon_ms is None and self._covers(header)
        if begins_horizon:
            try:
                cleaned, records = _rebase(cleaned, records, self.horizon_ms)
                horizon_ms = self.horizon_ms
            except CorruptBatch:
                begins_horizon = False  # The tombstones stay for good, but not the records that later ones replace.
        if (
            selection.tombstones
            and horizon_ms is not None
            and (begins_horizon or horizon_ms > self.now_ms or not self._covers(header))
        ):
            self.stats.next_horizon_ms = min(horizon_ms, self.stats.next_horizon_ms or horizon_ms)
        if selection.count == header.record_count and not begins_horizon:
            return batch
        return assemble(cleaned, compress(records, header.compression))


@dataclass(slots=True)
class _Selection:
    """The records of one batch that stay, as they were encoded, and what must be known about them."""

    records: bytearray
    count: int = 0
    tombstones: int = 0
    tombstones_removed: int = 0
    max_timestamp: int = NO_TIMESTAMP


def _rebase(header: BatchHeader, records: bytearray, horizon_ms: int) -> tuple[BatchHeader, bytearray]:
    """Make the delete horizon the base timestamp, and the records' deltas relative to it: their timestamps stay.

    Raises CorruptBatch if a timestamp is too far from the horizon for a delta.
    """
    payload, shift = bytes(records), header.base_timestamp - horizon_ms
    rebased = bytearray()
    for start, end, body, timestamp_delta, *_ in scan_records(payload, header):
        rebased += write_shifted(payload, start, body, end, timestamp_delta + shift)
    attributes = header.attributes | DELETE_HORIZON_BIT
    return header._replace(base_timestamp=horizon_ms, attributes=attributes), rebased


def _emptied(header: BatchHeader) -> bytearray:
    """Return the batch without records: its offsets and its producer's sequence, no time, nothing compressed."""
    attributes = header.attributes & ~(COMPRESSION_MASK | DELETE_HORIZON_BIT)
    max_timestamp = header.max_timestamp if header.uses_append_time else NO_TIMESTAMP
    return assemble(header._replace(record_count=0, attributes=attributes, max_timestamp=max_timestamp), b"")


def _checked_header(batch: Buffer) -> BatchHeader:
    """Read the header of a batch from the log, which must fill the buffer and match its CRC."""
    try:
        header = parse_header(batch)
    except CorruptBatch as error:
        raise CorruptLog(f"Compaction met bytes that are no batch: {error.message}") from error
    if header.length != len(batch) or not check_crc(batch, 0, header.length):
        raise CorruptLog(f"Compaction met a batch at offset {header.base_offset} that does not match its CRC.")
    return header
