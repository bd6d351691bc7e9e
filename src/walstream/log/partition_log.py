"""The log of one partition: appended at one end, read anywhere below the high watermark, trimmed at the other end.

Owns the offsets (`log_start` ≤ `high_watermark` ≤ `durable_end` ≤ `log_end`), the list of segments, the epoch map and
the state of idempotent producers, and decides what may be appended. Refuses to know sockets, requests and threads:
every method is called on the event-loop thread, except those that say they block.

The invariant: nothing is visible, and nobody is told of it, before it is durable. `append` moves `log_end` at once, so
that appends can queue; `flushed` moves `durable_end` when the flush that covers them has returned. On a node that is
alone the high watermark follows it; in a cluster (`replicated`) the core moves it, when enough replicas have come so
far. After a failed write the partition is offline: it takes no more writes, and what was not acknowledged is found out
again by recovery.

In a cluster the log takes `append` only between `become_leader` and the next change of its role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from walstream.errors import (
    BatchTooLarge,
    InvalidTimestamp,
    NotLeader,
    PartitionOffline,
    WalstreamError,
)
from walstream.log import batch as batches
from walstream.log import producer_snapshots
from walstream.log.append_clock import Covered
from walstream.log.batch import NO_TIMESTAMP, BatchHeader, Buffer
from walstream.log.compaction import check_keys
from walstream.log.folders import make_folder
from walstream.log.group_commit import Write
from walstream.log.index import Index
from walstream.log.journal import PartitionKey
from walstream.log.keeping import KeptLog
from walstream.log.received import check_received, first_offset
from walstream.log.recovery import Recovered
from walstream.log.repair import Repairing
from walstream.log.segment import Segment
from walstream.log.settings import TopicSettings
from walstream.log.surroundings import Done, Shared
from walstream.log.truncation import Cutting, as_offline, finish, forget_epochs

RELATIVE_OFFSET_MAX = 2**31 - 1
"""Offsets a segment may span; Kafka clients and tools count them in 32 bits."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a batch stands, now or (for a duplicate) since the first time it came."""

    base_offset: int
    last_offset: int
    append_time_ms: int
    """-1 unless the topic stamps append time."""
    log_start: int


class PartitionLog(KeptLog):
    """One partition on this node."""

    def __init__(
        self,
        topic: str,
        key: PartitionKey,
        folder: Path,
        shared: Shared,
        settings: TopicSettings,
        epoch: int | None,
        recovered: Recovered,
    ) -> None:
        """Open what recovery found. `epoch` is the one the node leads in; None in a cluster, which gives the roles."""
        super().__init__(topic, key, folder, shared, settings)
        self.replicated = epoch is None
        self.is_leader = epoch is not None
        self.leader_epoch = recovered.leader_epoch if epoch is None else epoch
        self.led_epoch = recovered.led_epoch
        self._role_changes = 0
        self._has_folder = False
        """Whether the folder is known to be durable."""
        self.adopt(recovered)
        self._are_gaps_noted = recovered.takes_gaps  # A start recovers from what is durable, a reopening does not.

    # ── roles ────────────────────────────────────────────────────────────────────────────────────────────────────

    def become_leader(self, epoch: int, done: Done) -> None:
        """Take appends in a new epoch, once all that was queued is durable and the epoch map says where it begins.

        `done` may be called at once. With an error the log has no role.
        """
        self.stop_role()
        change = self._role_changes

        def given_up() -> NotLeader:
            return NotLeader(f"{self.name} has been given another role since.")

        def settle() -> None:
            self.when_durable(self.log_end - 1, settled)

        def settled(error: WalstreamError | None) -> None:
            error = error or self.write_error  # It may end before its files do; followers would truncate theirs.
            if error is not None or change != self._role_changes:
                done(error or given_up())
                return
            self._begin_stamps(epoch, stamped)

        def stamped(error: WalstreamError | None) -> None:
            if error is not None or change != self._role_changes:
                done(error or given_up())
                return
            self._stamps.begin(self.log_end)
            if self.settings.append_time:
                self.led_epoch = epoch
            self.leader_epoch = max(self.leader_epoch, epoch)
            self.epochs.assign(epoch, self.log_end)
            self._shared.save_checkpoint(saved)

        def saved(error: Exception | None) -> None:
            if error is None and change != self._role_changes:
                error = given_up()
            self.is_leader = self.is_leader or error is None
            done(error)

        self.after_release(settle)

    def _begin_stamps(self, epoch: int, done: Covered) -> None:
        """Stamp above everything that was stamped or promised in the epochs before; `done` once that is durable.

        A node that also led in the last one has its own floor for that, if it has not lost it with its disk.
        """
        is_stamped = self.settings.append_time  # If not, it may yet become so, or others know already that it is.
        if epoch != self.led_epoch + 1 or self.is_unclean:
            self._stamps.take_over(self._shared.now_ms(), done, is_kept=is_stamped)
        else:
            done(None)

    def become_follower(self, epoch: int, done: Done) -> None:
        """Take only what the leader of `epoch` sends; `done` when the epoch is durable."""
        self.stop_role()
        self.leader_epoch = max(self.leader_epoch, epoch)
        self._shared.save_checkpoint(done)

    def stop_role(self) -> None:
        """Take no appends of clients any more."""
        assert self.replicated, "a node that is alone leads what it has"
        self._role_changes += 1
        self.is_leader = False

    def advance_high_watermark(self, offset: int) -> None:
        """Let readers see what lies below `offset`, as far as it is durable here. It never moves back."""
        offset = min(offset, self.durable_end)
        self.high_watermark_epoch = self.leader_epoch
        if offset > self.high_watermark:
            self.high_watermark = offset
            self._stamps.became_visible(offset)
            self._visible_waiters.wake(offset)
            self._notify()

    def fail_waiters(self, error: WalstreamError, *, visible_only: bool = False) -> None:
        """Tell those who wait that it will not be: all of them, or those who wait for the high watermark."""
        if not visible_only:
            self._durable_waiters.fail(error)
        self._visible_waiters.fail(error)

    # ── appending ────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, batch: memoryview, *, now_ms: int) -> Appended:
        """Check a batch, give it its offsets in place and queue it for group commit.

        The buffer belongs to the log until the batch is visible. A duplicate of an idempotent producer is not
        written again: it is answered with where the original stands, which may not be durable yet, so the caller
        waits for `last_offset` either way. Raises a RequestError for the batch, PartitionOffline for the log.
        """
        if self.write_error is not None:
            raise self.write_error
        if not self.is_leader:
            raise NotLeader(f"This node does not lead {self.name}.", "Ask again who does.")
        self._load_index()
        self._check_size(len(batch))
        header = batches.validate(batch)
        if self.settings.compacted:
            check_keys(batch, header)
        if header.producer_id >= 0:
            duplicate = self.producers.check(header, self._shared.monotonic_ms())
            if duplicate is not None:
                stamp_ms = duplicate.timestamp_ms if self.settings.append_time else -1
                return Appended(duplicate.base_offset, duplicate.last_offset, stamp_ms, self.log_start)
        append_time_ms = -1
        if self.settings.append_time:
            append_time_ms = self._stamps.stamp(now_ms, self.log_end + header.record_count)
            batches.stamp_append_time(batch, append_time_ms)
        else:
            self._check_timestamps(header, now_ms)
        batches.stamp(batch, self.log_end, self.leader_epoch)
        self._enqueue(batches.parse_header(batch), batch)
        return Appended(self.log_end - header.record_count, self.log_end - 1, append_time_ms, self.log_start)

    @property
    def newest_ms(self) -> int:
        """The latest append time of what is visible and was appended here since the start; -1: nothing was."""
        return self._stamps.visible_ms

    def resolve(self, *, is_newest: bool = False) -> tuple[int, int] | None:
        """Return an offset and a time: every record at or after the offset, now and for ever, has a later append time.

        `is_newest`: who asks knows of no later record. Only for the leader. None if the topic has no append time, while
        a new leader does not know the stamps of what it began with, and where the files could not be opened. Asked very
        often: waits for no disk.
        """
        assert self.is_leader, "only a leader stamps"
        if not self.settings.append_time or self.failure is not None:
            return None
        end = self.high_watermark
        is_alone = not self.replicated
        resolved_ms = self._stamps.resolve(self._shared.now_ms(), end, is_alone=is_alone, is_newest=is_newest)
        return None if resolved_ms is None else (end, resolved_ms)

    def _load_index(self) -> None:
        """Read the index of the last segment, if a clean start has left it on the disk: before anything changes."""
        segment = self.segments[-1]
        if not segment.is_index_loaded:
            try:
                segment.index  # noqa: B018
            except OSError as error:
                raise PartitionOffline(
                    f"{self.name} cannot be appended to now: {error.strerror}.", "Send again."
                ) from error

    def _enqueue(self, header: BatchHeader, batch: memoryview) -> None:
        segment = self._segment_for(header)
        position = segment.note(header)
        self.log_end = end = header.next_offset
        if header.producer_id >= 0:
            self.producers.apply(header, self._shared.monotonic_ms())
        self._submit(segment, position, batch, header.base_offset, end)

    def _submit(self, segment: Segment, position: int, data: Buffer, base_offset: int, end: int) -> None:
        sync = not self.settings.ack_before_fsync
        write = Write(self, segment, position, data, base_offset, end, self.truncations, sync)
        self._in_flight.add(write)
        self._shared.submit(write)

    def append_replicated(self, received: Sequence[Buffer], *, offset: int, may_have_gaps: bool = False) -> int:
        """Check what the leader sent from `offset` on and queue it; return the new log end. All of it, or nothing.

        The buffers belong to the log until `when_durable` calls back for the last offset. Raises CorruptBatch where a
        CRC fails or batches do not continue the log, FencedLeaderEpoch where an epoch is none that this log may
        hold there, PartitionOffline if it takes no writes.

        `may_have_gaps`: the leader says that compaction has left gaps there, whatever the topic's settings are now.
        """
        assert not self.is_leader, "a leader takes nothing from others"
        if self.write_error is not None:
            raise self.write_error
        if self.is_held:
            raise PartitionOffline(f"{self.name} is being cut back.", "Send again when it is done.")
        self._load_index()
        is_untouched = self.log_start == self.log_end == offset and not self.segments[-1].has_file
        first = first_offset(received, offset) if is_untouched else offset
        parsed = check_received(
            received, offset, self.log_end, self.epochs.last_epoch, self.leader_epoch, first=first,
            dense=not (self.settings.compacted or may_have_gaps),
        )  # fmt: skip
        if may_have_gaps:
            self._expect_gaps(parsed)
        if first < offset and parsed:
            # Nothing was ever written to the segment that began in the middle of this batch.
            self.segments = [Segment(self._shared.disk, self.folder, first, self._shared.open_files)]
            self.log_end = first
        for buffer, headers in parsed:
            self._enqueue_run(memoryview(buffer), headers)
        return self.log_end

    def _expect_gaps(self, parsed: list[tuple[Buffer, list[BatchHeader]]]) -> None:
        """Have the checkpoint say that gaps may follow, before the first batch behind one is written.

        Otherwise recovery would take it for damage. Raises PartitionOffline until the checkpoint is saved.
        """
        expected = self.log_end
        for _, headers in parsed:
            for header in headers:
                if header.base_offset > expected and not self._are_gaps_noted:
                    self.takes_gaps = True
                    self._shared.save_checkpoint(self._note_gaps)
                    raise PartitionOffline(
                        f"{self.name}: offset {header.base_offset} follows a compaction gap; the checkpoint that "
                        "allows gaps is being saved.",
                        "Send again.",
                    )
                expected = header.next_offset

    def _note_gaps(self, error: Exception | None) -> None:
        self._are_gaps_noted = self._are_gaps_noted or error is None

    def _enqueue_run(self, buffer: memoryview, headers: list[BatchHeader]) -> None:
        """Queue batches that stand in a row: one write for as many as go to the same segment."""
        begin = end = 0
        run: tuple[Segment, int, int] | None = None
        for header in headers:
            segment = self._segment_for(header)
            if run is not None and run[0] is not segment:
                self._submit(run[0], run[1], buffer[begin:end], run[2], self.log_end)
                run, begin = None, end
            position = segment.note(header)
            run = run or (segment, position, header.base_offset)
            if header.base_offset != self.log_end:
                self.gaps_below = max(self.gaps_below, header.base_offset)
            self.epochs.assign(header.leader_epoch, max(header.base_offset, self.log_start))
            if header.producer_id >= 0:
                self.producers.apply(header, self._shared.monotonic_ms())
            self.log_end = header.next_offset
            if header.uses_append_time:
                self._stamps.seen(header.max_timestamp)
            end += header.length
        if run is not None:
            self._submit(run[0], run[1], buffer[begin:end], run[2], self.log_end)

    def _check_size(self, length: int) -> None:
        limit = self.settings.batch_bytes_max
        if length > limit:
            raise BatchTooLarge(
                f"A batch of {length} bytes is more than {self.topic} takes ({limit}).",
                "Send smaller batches, or raise the topic's max.message.bytes.",
            )

    def _check_timestamps(self, header: BatchHeader, now_ms: int) -> None:
        """Refuse a batch whose header is too far from the clock; the timestamps of its records are not decoded.

        Retention goes by the latest timestamp of a header: one batch far in the future keeps its segment, and all
        segments after it, until then. A retry of a batch that was accepted is not checked again.
        """
        settings, first_ms = self.settings, header.base_timestamp
        latest_ms = max(first_ms, header.max_timestamp)
        if latest_ms - now_ms > settings.timestamp_after_max_ms:
            name, timestamp_ms, distance, limit = "after", latest_ms, "ahead of", settings.timestamp_after_max_ms
        elif first_ms != NO_TIMESTAMP and now_ms - first_ms > settings.timestamp_before_max_ms:
            name, timestamp_ms, distance, limit = "before", first_ms, "behind", settings.timestamp_before_max_ms
        else:
            return
        raise InvalidTimestamp(
            f"A record's timestamp, {timestamp_ms}, is {abs(timestamp_ms - now_ms)} ms {distance} the leader's clock; "
            f"{self.topic} accepts {limit} ms.",
            "Timestamps are milliseconds since 1970. Fix the producer's clock or units, or raise the topic's "
            f"message.timestamp.{name}.max.ms.",
        )

    def _segment_for(self, header: BatchHeader) -> Segment:
        """Return the segment the batch goes to, beginning a new one when the last is full or old."""
        segment = self.segments[-1]
        if segment.size == 0:
            segment.created_ms = self._shared.monotonic_ms()
            return segment
        is_full = segment.size + header.length > self.settings.segment_bytes
        is_old = segment.age_ms(header, self._shared.monotonic_ms()) > self.settings.segment_ms
        if is_full or is_old or header.last_offset - segment.base_offset > RELATIVE_OFFSET_MAX:
            segment = self.roll()
        return segment

    def roll(self) -> Segment:
        """Seal the last segment and begin a new one at the end of the log."""
        sealed = self.segments[-1]
        assert sealed.size > 0, "an empty segment is never rolled"
        sealed.sealed = True
        segment = Segment(self._shared.disk, self.folder, self.log_end, self._shared.open_files)
        segment.index = Index()
        segment.created_ms = self._shared.monotonic_ms()
        self.segments = [*self.segments, segment]
        snapshot_path = producer_snapshots.path_of(self.folder, self.log_end)
        self._shared.sealed(sealed, snapshot_path, self.producers.snapshot())
        return segment

    def prepare(self) -> None:
        """Create the folder before the first write. Called on the flush thread."""
        if not self._has_folder:
            make_folder(self._shared.disk, self.folder)
            self._has_folder = True

    # ── what group commit reports ────────────────────────────────────────────────────────────────────────────────

    def flushed(self, writes: list[Write]) -> None:
        """Batches are durable: on a node that is alone they become visible."""
        last = writes[-1]
        if last.truncations != self.truncations or not self._in_flight:
            # Queued before the log was cut: whoever cut it says what is durable. Or it was stopped by settling, which
            # failed beside a flush that did not: everybody has been told that this write failed, too.
            return
        segment = last.segment
        segment.durable_size = last.position + len(last.buffer)
        if last.is_synced:
            segment.synced_size, segment.synced_offset = segment.durable_size, last.end_offset
        self._in_flight.remove(writes, is_kept=self.is_leader and self.listener is not None)
        self.durable_end = last.end_offset
        self._durable_waiters.wake(last.end_offset)
        if not self.replicated:
            self.high_watermark = last.end_offset
            self._stamps.became_visible(last.end_offset)
            self._visible_waiters.wake(last.end_offset)
            self._notify()
        if self.listener is not None:
            self.listener.became_durable()

    def settled(self, segment: Segment, size: int, end_offset: int) -> None:
        """A segment's own file has caught up with the journal."""
        if size > segment.synced_size:
            segment.synced_size, segment.synced_offset = size, end_offset

    def failed(self, error: PartitionOffline) -> None:
        """A write failed, and with it everything queued behind it.

        A write that was queued before a reset reports nothing: the listener would never get the matching recovery
        event. Nor does one of a deleted topic: its files are expected to be missing.
        """
        if self.is_discarded:
            return
        self._shared.reported(self.name, error)
        if not self.is_beginning_anew:
            self.stop(error)

    def stop(self, error: PartitionOffline) -> None:
        """Take no more writes, and tell everybody who waits for one."""
        self.write_error = error
        self._in_flight.clear()
        self.fail_waiters(error)
        if self.listener is not None:
            self.listener.went_offline(error)

    def discard(self, error: PartitionOffline) -> None:
        """Refuse writes from now on, because the topic is deleted. A running flush or truncation changes nothing here.

        Background jobs may still reach the partition: its files are gone by then, and the jobs end silently.
        """
        self.is_discarded = True
        self.truncations += 1
        self.stop(error)

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """Return the largest epoch not above `epoch` and where it ends, for clients that check for truncation."""
        return self.epochs.end_offset_for(epoch, self.high_watermark)

    def begin_reopening(self) -> None:
        """Take nothing, and do not change the log's end, until recovery has opened the files again."""
        self.is_held = self.is_reopening = True

    def end_reopening(self, recovered: Recovered | None) -> None:
        """Begin again from what recovery found after a full disk; None: remain offline until the next attempt.

        In a cluster the log has no role then: what was queued, and perhaps sent, is gone. The log start and the high
        watermark may have moved since recovery began; they never go back.
        """
        self.is_reopening = False
        if recovered is None:
            self.release(lambda _: None, None)
            return
        log_start, high_watermark = self.log_start, self.high_watermark
        self._role_changes += 1
        self.truncations += 1
        self.is_leader = not self.replicated
        self.adopt(recovered)
        self.high_watermark = max(self.high_watermark, min(high_watermark, self.log_end))
        self.advance_start(log_start)  # Who moved it removes the files.
        self._notify()
        if self.listener is not None:
            self.listener.came_back()
        if recovered.cut is None:
            self.release(lambda _: None, None)
        else:
            self._shared.save_checkpoint(self._noted)

    def _noted(self, error: Exception | None) -> None:
        """The checkpoint no longer refers to anything above a truncation that recovery has finished."""
        if error is None:
            finish(self._shared, self, lambda _: None)
        else:
            self.failed(as_offline(self.name, error))
            self.release(lambda _: None, None)

    # ── cutting ──────────────────────────────────────────────────────────────────────────────────────────────────

    def truncate(self, to: int, done: Done) -> None:
        """Cut off everything from offset `to` on, durably: batches, epochs, producers, waiters, high watermark.

        Until `done` the log takes no appends. A batch that holds `to` goes as a whole, so `log_end` may be lower.
        Where nothing has to go at all, `done` is called at once; so it is where the log is offline, with the error.
        """
        if self.is_held and not self.is_reopening:
            self.after_release(partial(self.truncate, to, done))
            return
        if self.write_error is not None:
            # A truncation that failed has lowered the log end, but not the files: they still need all epochs.
            done(self.write_error)
            return
        to = max(min(to, self.log_end), self.log_start)
        if to == self.log_end:
            forget_epochs(self._shared, self, done)
        else:
            Cutting(self, self._shared, to, done, is_reset=False).begin()

    def reset(self, to: int, done: Done) -> None:
        """Empty the log, durably, whatever is in its folder; it begins at `to`. Until `done` it takes no appends."""
        if self.is_held:
            self.after_release(partial(self.reset, to, done))
        else:
            Cutting(self, self._shared, to, done, is_reset=True).begin()

    def repair(self, start: int, received: Sequence[Buffer], done: Done) -> None:
        """Write sound batches from a peer over damaged ones, in place and durably; `damaged` then lacks the range.

        They begin where damage begins. With an error nothing was written: the batches are wrong, or do not fit there.
        """
        Repairing(self, self._shared, start, received, done).begin()
