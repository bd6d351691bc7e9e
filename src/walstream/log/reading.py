"""The reading half of a partition's log: from an offset to batches, and whom to tell that there are more.

Owns who waits for offsets, and how a reader gets from an offset to the segment that has it. Consumers read below the
high watermark, followers up to the end of the log, `PartitionLog` moves both. Called on the event-loop thread, except
what says that it blocks: those may run on another, beside appends, retention and compaction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from threading import Lock

from walstream.errors import CorruptLog, OffsetOutOfRange, PartitionOffline, StorageError
from walstream.log import times
from walstream.log.batch import OFFSET_MAX, parse_header
from walstream.log.digests import Digest, digest
from walstream.log.epochs import EpochMap
from walstream.log.replica_reads import Chunk, InFlight, SealedRange, chunk_of, sealed_range
from walstream.log.segment import Segment
from walstream.log.surroundings import Listener, Shared
from walstream.log.waiting import NOBODY, Callback, Waiter, Waiters


class ReadableLog:
    """One partition, as readers see it."""

    segments: list[Segment]
    log_start: int
    high_watermark: int
    """Consumers read below it."""
    durable_end: int
    """Everything below it is fsynced."""
    log_end: int
    """The offset of the next batch to be appended."""
    gaps_below: int
    """Compaction may have taken offsets away below; above, a missing offset is damage."""
    epochs: EpochMap
    """From which offset on each leader wrote."""

    def __init__(self, topic: str, index: int, shared: Shared) -> None:
        self.topic = topic
        self.index = index
        self.segments = []
        self.write_error: PartitionOffline | None = None
        """Why the log takes no writes, if it does not."""
        self.damaged: list[tuple[int, int]] = []
        """Offset ranges [from, to) that fail their checksums. Changed under the lock, by replacing the list: readers on
        other threads add to it."""
        self.mendings = 0
        """How often ranges were taken out of `damaged`."""
        self._damage_lock = Lock()
        self.failure: StorageError | None = None
        """Why the files could not be opened, if they could not: then there is nothing to read."""
        self.truncations = 0
        """How often the log was cut since it was opened."""
        self.listener: Listener | None = None
        self._shared = shared
        self._in_flight = InFlight()
        self._durable_waiters = Waiters()
        self._visible_waiters = Waiters()
        self._readers: dict[int, Callable[[], None]] = {}
        self._reader_count = 0

    def __repr__(self) -> str:
        return (
            f"PartitionLog({self.name}, [{self.log_start}, {self.high_watermark}, {self.durable_end}, {self.log_end}))"
        )

    @property
    def name(self) -> str:
        """How people name it."""
        return f"{self.topic}-{self.index}"

    @property
    def size_bytes(self) -> int:
        """What the segments take on disk."""
        return sum(segment.size for segment in self.segments)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────

    def when_durable(self, offset: int, callback: Callback) -> Waiter:
        """Call back once `offset` is durable here, or its write has failed; at once if it already is."""
        return self._wait(self._durable_waiters, offset, self.durable_end, callback)

    def when_visible(self, offset: int, callback: Callback) -> Waiter:
        """Call back once `offset` is below the high watermark, or its write has failed; at once if it already is."""
        if offset >= self.high_watermark and self.write_error is None:
            if self.listener is not None:
                self.listener.awaited()
            return self._visible_waiters.add(offset, callback)
        return self._wait(self._visible_waiters, offset, self.high_watermark, callback)

    def _wait(self, waiters: Waiters, offset: int, end: int, callback: Callback) -> Waiter:
        if offset < end:
            callback(None)
        elif self.write_error is not None:
            callback(self.write_error)
        else:
            return waiters.add(offset, callback)
        return NOBODY

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever there is more, or less, to read; return how to stop it."""
        self._reader_count += 1
        number = self._reader_count
        self._readers[number] = callback
        return lambda: self._readers.pop(number, None) and None

    def _notify(self) -> None:
        if self._readers:
            for callback in tuple(self._readers.values()):
                callback()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read_cached(self, offset: int, bytes_max: int) -> memoryview | None:
        """Return verified whole batches from `offset` on, at least one if there is any; None: the disk is needed.

        The first batch may begin before `offset`. Raises OffsetOutOfRange, or CorruptLog where the bytes are damaged.
        """
        return self._read(offset, bytes_max, cached=True)

    def read_blocking(self, offset: int, bytes_max: int) -> memoryview:
        """Read like `read_cached`, from the disk where needed. Blocks; may be called on another thread."""
        result = self._read(offset, bytes_max, cached=False)
        assert result is not None
        return result

    def _read(self, offset: int, bytes_max: int, *, cached: bool) -> memoryview | None:
        self.check_offset(offset)
        return self._read_below(self.high_watermark, offset, bytes_max, cached=cached)

    def _read_below(self, end: int, offset: int, bytes_max: int, *, cached: bool) -> memoryview | None:
        cuts, mendings, limit = self.truncations, self.mendings, end
        if self.damaged:
            end = self._end_before_damage(offset, end)
        segments = self.segments  # Retention replaces the list, so a reader on another thread keeps a whole one.
        number = max(bisect_right(segments, offset, key=base_offset) - 1, 0)
        segment = segments[number]
        try:
            while offset < end and number < len(segments):
                segment = segments[number]
                dense = segment.base_offset >= self.gaps_below
                is_last = number + 1 == len(segments)
                until = OFFSET_MAX if is_last else segments[number + 1].base_offset
                data = segment.read(offset, bytes_max, cached=cached, dense=dense, end=end, until=until)
                if data is None or len(data):
                    return data
                if dense and segment.base_offset <= offset and not is_last and until <= end:
                    if cached:
                        return None
                    raise segment.ends_early(until)
                number += 1  # Compaction left nothing at or after the offset in this segment.
        except CorruptLog as error:
            if cuts != self.truncations:
                return memoryview(b"")  # The file was cut while it was read.
            if self._was_replaced(segment):
                return self._read_below(end, offset, bytes_max, cached=cached)
            first, stop = error.offsets or (offset, offset + 1)
            if number + 1 < len(segments):
                stop = min(stop, segments[number + 1].base_offset)
            self.note_damage(first, stop, error, mendings)
            raise
        except FileNotFoundError:
            if offset >= self.log_start and self._was_replaced(segment):
                return self._read_below(end, offset, bytes_max, cached=cached)
            self.check_offset(offset)  # Retention has been here since.
            raise
        if end < limit and cuts == self.truncations:
            # Only a gap lies before the damage: a reader that is sent nothing would ask here for ever.
            for start, stop in self.damaged:  # It may have been repaired meanwhile.
                if start == end:
                    raise self._damage(start, stop)
        return memoryview(b"")

    def _was_replaced(self, segment: Segment) -> bool:
        """Tell whether compaction has put another segment in the place of one, and another file under its name."""
        return not any(one is segment for one in self.segments)

    def _end_before_damage(self, offset: int, end: int) -> int:
        """Return where a read from `offset` must end; raises CorruptLog if it would begin in what is damaged.

        Some damage is not seen in the batch itself: a wrong leader epoch, for one, which no checksum covers.
        """
        for start, stop in self.damaged:
            if start <= offset < stop:
                raise self._damage(start, stop)
            if offset < start < end:
                end = start
        return end

    def _damage(self, start: int, stop: int) -> CorruptLog:
        error = CorruptLog(
            f"{self.name}: offsets {start} to {stop - 1} are damaged.",
            f"They are kept aside and not served. Records from offset {stop} on can be read.",
        )
        error.offsets = (start, stop)
        return error

    def read_replica(self, offset: int, bytes_max: int) -> Chunk | None:
        """Return batches for a follower, from `offset` up to the end of the log; None: the disk is needed.

        Those that are not durable yet, or just now, come from the buffers. Raises as `read_cached` does.
        """
        self._check_replica_offset(offset)
        chunk = self._in_flight.chunk(offset, bytes_max)
        if chunk is not None or offset >= self.durable_end:
            return chunk or Chunk((), 0, offset)
        cuts, mendings = self.truncations, self.mendings
        data = self._read_below(self.durable_end, offset, bytes_max, cached=True)
        return None if data is None else self._chunk(data, offset, cuts, mendings)

    def _chunk(self, data: memoryview, offset: int, cuts: int, mendings: int) -> Chunk:
        try:
            return chunk_of(data, offset, self.epochs, self.log_start)
        except CorruptLog as error:
            if cuts != self.truncations:
                return Chunk((), 0, offset)  # The log was cut while it was read, and with it its epochs.
            self.note_damage(*(error.offsets or (offset, offset + 1)), error, mendings)
            raise

    def let_go(self) -> None:
        """Hear that followers have been sent what they lacked: what is durable is read from the disk from here on."""
        self._in_flight.let_go()

    def read_replica_blocking(self, offset: int, bytes_max: int) -> Chunk:
        """Read like `read_replica`, below the durable end alone. Blocks; may be called on another thread."""
        self._check_replica_offset(offset)
        cuts, mendings = self.truncations, self.mendings
        data = self._read_below(self.durable_end, offset, bytes_max, cached=False)
        assert data is not None
        return self._chunk(data, offset, cuts, mendings)

    def read_for_repair(self, start: int, end: int, bytes_max: int) -> Chunk:
        """Return verified batches from `start` on, as far as they lie in [start, end); none if they cannot be read.

        One is returned even if it ends later: who asks may not know how long it was. It may begin before `start`, which
        may be where a log begins, and after it where compaction left a gap. Blocks; may be called on another thread.
        """
        cuts, mendings = self.truncations, self.mendings
        try:
            if not self.segments[0].base_offset <= start < self.durable_end:
                return Chunk((), 0, start)  # It may begin before the log does, if its batch reaches into it.
            data = self._read_below(min(end, self.durable_end), start, bytes_max, cached=False)
            data = data or self._read_below(self.durable_end, start, 1, cached=False)
            if data and parse_header(data).base_offset <= (start if start >= self.gaps_below else end - 1):
                return self._chunk(data, start, cuts, mendings)
        except (CorruptLog, FileNotFoundError):
            pass
        return Chunk((), 0, start)

    def sealed_range(self, offset: int, bytes_max: int) -> SealedRange | None:
        """Return where batches from `offset` on lie in a sealed segment; None if they do not, or not worth it. Blocks.

        About `bytes_max` long, and never beyond the segment.
        """
        if offset < max(self.gaps_below, self.log_start) or self.damaged:
            return None
        try:
            return sealed_range(self.segments, offset, bytes_max)
        except FileNotFoundError:
            return None  # The segment was removed meanwhile.

    def digest(self, start: int, end: int) -> Digest:
        """Return a digest of the batches in [start, end), to compare with another replica's. Blocks."""
        return digest(self.segments, start, end, max(start, self.gaps_below, self.log_start))

    def _check_replica_offset(self, offset: int) -> None:
        if not self.log_start <= offset <= self.log_end:
            raise OffsetOutOfRange(f"{self.name} has offsets {self.log_start} to {self.log_end}; {offset} is outside.")

    def check_opened(self) -> None:
        """Raise PartitionOffline if the files could not be opened: then the offsets are not those of the records."""
        if self.failure is not None:
            raise PartitionOffline(self.failure.message, self.failure.hint)

    def check_offset(self, offset: int) -> None:
        """Raise OffsetOutOfRange unless a reader may stand at `offset`."""
        self.check_opened()
        if not self.log_start <= offset <= self.high_watermark:
            raise OffsetOutOfRange(
                f"{self.name} has offsets {self.log_start} to {self.high_watermark}; {offset} is outside."
            )

    def note_damage(self, start: int, end: int, error: CorruptLog, mendings: int | None = None) -> None:
        """Remember, and report, that the bytes of offsets [start, end) fail their checksum.

        `mendings`: as it was before they were read. If it has changed, they may have been repaired or truncated since,
        and the next read notes what is left. May be called on any thread.
        """
        with self._damage_lock:
            end = min(end, self.log_end)
            if (
                start >= end
                or end <= self.log_start
                or mendings not in (None, self.mendings)
                or any(known <= start and end <= known_end for known, known_end in self.damaged)
            ):
                return
            apart = [(a, b) for a, b in self.damaged if b < start or end < a]
            touching = [(a, b) for a, b in self.damaged if not (b < start or end < a)]
            whole = (min([start, *(a for a, _ in touching)]), max([end, *(b for _, b in touching)]))
            self.damaged = sorted([*apart, whole])
        self._shared.reported(self.name, error)
        if self.listener is not None:
            self.listener.found_damage()

    def _mend(self, change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]]) -> None:
        """Take ranges out of `damaged`, also those that readers have found since."""
        with self._damage_lock:
            self.mendings += 1
            self.damaged = change(self.damaged)

    def offset_for_time(self, timestamp_ms: int) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first visible record at or after a time. Blocks."""
        return self._find(partial(times.offset_for_time, timestamp_ms=timestamp_ms))

    def max_timestamp(self) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the visible record with the largest timestamp. Blocks."""
        return self._find(times.max_timestamp)

    def _find(self, find: Callable[..., tuple[int, int] | None]) -> tuple[int, int] | None:
        while True:
            segments = self.segments
            try:
                return find(segments, start=self.log_start, end=self.high_watermark)
            except FileNotFoundError:
                if segments is self.segments:
                    raise  # Otherwise retention or compaction has removed one of them meanwhile.


def base_offset(segment: Segment) -> int:
    """Return where a segment begins: the key by which they are sorted."""
    return segment.base_offset
