"""What a simulated node does for clients: produce, fetch, delete the beginning of a log.

Stands for the node's request handlers. Every acknowledgement and every batch that is handed out passes the checkers at
the moment it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from walstream.cluster.metadata import PartitionKey
from walstream.errors import NotLeader, OffsetNotAvailable, WalstreamError
from walstream.sim.checkers import ACKS_ALL
from walstream.sim.copies import Copy
from walstream.sim.mirror import Item
from walstream.sim.workload import crc_of

if TYPE_CHECKING:
    from walstream.log.store import LogStore
    from walstream.sim.clock import Clock
    from walstream.sim.cluster import Cluster

Answer = Callable[[WalstreamError | None], None]
ReadDone = Callable[[int, int | None, memoryview | WalstreamError], None]
"""Hears the leader's epoch, its high watermark if it knows how far others had come, and what was read."""


class Serving:
    """The part of a node that clients see."""

    id: int
    clock: Clock
    cluster: Cluster
    store: LogStore
    copies: dict[PartitionKey, Copy]

    def run(self, callback: Callable[[], None]) -> None:
        """Let something happen on the node."""
        raise NotImplementedError

    def run_blocking(self, job: Callable[[], memoryview], done: Callable[..., None]) -> None:
        """Run what waits for the disk beside the loop."""
        raise NotImplementedError

    def observe(self, copy: Copy) -> None:
        """Let the checkers look at a copy."""
        raise NotImplementedError

    def produce(self, key: PartitionKey, batch: bytearray, acks: int, answer: Answer) -> None:
        """Take a produce request."""
        self.run(partial(self._produce, key, batch, acks, answer))

    def _produce(self, key: PartitionKey, batch: bytearray, acks: int, answer: Answer) -> None:
        copy = self.copies.get(key)
        if copy is None:
            answer(NotLeader("There is no copy here."))
            return
        log, crc, followers = copy.log, crc_of(batch), self.cluster.scenario.sync_followers
        try:
            if acks == ACKS_ALL:
                self.cluster.check_in_sync(copy.replica)
            self.cluster.records.appending(batch)
            appended = log.append(memoryview(batch), now_ms=self.clock.now_ms)
        except WalstreamError as error:
            answer(error)
            return

        def landed(error: WalstreamError | None) -> None:
            if error is None and acks:
                self.observe(copy)
                self.cluster.checkers.acknowledged(copy, acks, appended.base_offset, crc, followers)
            if self.cluster.trace.is_on:
                what = f"{error}" if error else f"acked {appended.base_offset} acks={acks}"
                self.cluster.trace(f"n{self.id}", f"p{key[1]} {what}")
            answer(error)

        if acks == 0:
            landed(None)
        elif acks == ACKS_ALL:
            log.when_visible(appended.last_offset, landed)
        elif not followers:
            log.when_durable(appended.last_offset, landed)
        else:
            waiting = [2]

            def half(error: WalstreamError | None) -> None:
                waiting[0] -= 1
                if waiting[0] == 0 or (error is not None and waiting[0] > 0):
                    waiting[0] = 0 if error is None else -2
                    landed(error)

            log.when_durable(appended.last_offset, half)
            copy.replica.when_followers_durable(appended.last_offset, half)

    def trim(self, key: PartitionKey) -> None:
        """Delete the beginning of a log that this node leads."""
        copy = self.copies.get(key)
        if copy is None or copy.leading_epoch is None or copy.log.high_watermark <= copy.log.log_start:
            return
        before = self.clock.between(copy.log.log_start, copy.log.high_watermark)
        self.trim_to(copy, before)

    def trim_again(self, key: PartitionKey) -> None:
        """Delete what was deleted before: a new leader may not know of it, and what others deleted it cannot repair."""
        copy = self.copies.get(key)
        if copy is not None and copy.leading_epoch is not None:
            before = min(self.cluster.checkers.histories[key].trimmed_to, copy.log.high_watermark)
            if before > copy.log.log_start:
                self.trim_to(copy, before)

    def trim_to(self, copy: Copy, before: int) -> None:
        """Delete the beginning of a log."""
        key = copy.key
        self.cluster.trace(f"n{self.id}", f"p{key[1]} trims to {before}")
        self.cluster.checkers.trimming(copy, before)
        self.store.delete_records(copy.log, before, lambda _: None)

    def read(self, key: PartitionKey, offset: int, bytes_max: int, done: ReadDone) -> None:
        """Take a fetch request."""
        self.run(partial(self._read, key, offset, bytes_max, done))

    def _read(self, key: PartitionKey, offset: int, bytes_max: int, done: ReadDone) -> None:
        copy = self.copies.get(key)
        if copy is None or copy.leading_epoch is None:
            return
        log = copy.log

        def answer(data: memoryview | None, error: Exception | None) -> None:
            epoch = copy.leading_epoch
            if epoch is None:
                return
            # As the node's Fetch does: what is known to be committed is served, and nothing said about the end.
            is_settled, high_watermark = copy.replica.is_settled, log.high_watermark
            if not is_settled and offset >= high_watermark:
                error = OffsetNotAvailable("The new leader does not know yet.")
            told = high_watermark if is_settled else None
            if isinstance(error, WalstreamError):
                done(epoch, told, error)
            elif data is not None:
                self.observe(copy)
                done(epoch, told, data)

        try:
            data = log.read_cached(offset, bytes_max)
        except WalstreamError as error:
            answer(None, error)
            return
        if data is None:
            self.run_blocking(lambda: log.read_blocking(offset, bytes_max), answer)
        else:
            answer(data, None)

    def was_read(self, key: PartitionKey, items: list[Item]) -> None:
        """A reader was given batches."""
        self.cluster.checkers.read(self.copies[key], items)

    def log_start(self, key: PartitionKey) -> int:
        """Return where a log starts."""
        return self.copies[key].log.log_start
