"""One link on its line: what it is given to send, when it may, and what comes over it.

`PeerLink` puts a link's state machine (`replication/wire`) on a connection (`lines.py`). Messages wait for the end of
the loop's turn, so that many travel in one frame and one system call. Data waits in one line for all partitions, each
of which has at most one request in it, so that they take turns; it is read from the log only when there is credit and
room for it, and so a follower that lags costs no memory, however much it lags. Where a range of the log lies in a
file that no longer changes, the kernel sends it from there, unseen; what the follower then asks for again is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from walstream import logs
from walstream.errors import ConnectionLost, WalstreamError
from walstream.log.disk import OsFile
from walstream.log.replica_reads import SealedRange
from walstream.node.lines import UNSENT_BYTES_MAX, FileRange
from walstream.replication import events as on
from walstream.replication.messages import Data, Refused, Why
from walstream.replication.wire.data import PayloadCompression
from walstream.replication.wire.link import Closed, Credited, Deliver, Link, LinkEffect, Opened, Peer, Write

if TYPE_CHECKING:
    from walstream.log.disk import Buffer
    from walstream.log.partition_log import PartitionLog
    from walstream.log.replica_reads import Chunk
    from walstream.node.driver import Replica
    from walstream.node.lines import Line
    from walstream.replication.effects import SendData
    from walstream.replication.messages import Message, PartitionMessage
    from walstream.replication.wire.follower_link import FollowerLink
    from walstream.replication.wire.leader_link import LeaderLink
    from walstream.replication.wire.version_1 import PushedBatch

log = logs.get(__name__)

T = TypeVar("T")

TURN_BYTES_MAX = 4 * 1024 * 1024
"""Data of one link in a turn of the loop: then clients have theirs."""

READS_MAX = 4
"""Reads from a cold disk that one link may have under way, each of a frame's bytes."""

CREDIT_BYTES_MIN = 64 * 1024
"""With less credit than this a frame is asked for whole, unless it is smaller."""


class Host(Protocol):
    """What a link needs of those around it."""

    def clock_ms(self) -> int:
        """Return the time that links go by: monotonic."""

    def mark_link(self, link: PeerLink) -> None:
        """See to it that the link's `serve` is called in this turn of the loop, once."""

    def wake_link_at(self, link: PeerLink, deadline_ms: int) -> None:
        """See to it that the link's `tick` is called at that time."""

    def run_blocking(self, job: Callable[[], T], done: Callable[[T | None, Exception | None], None]) -> None:
        """Run what waits for the disk on a thread, then call back on the loop."""

    def link_opened(self, link: PeerLink, peer: Peer) -> None:
        """Hear that a link is up."""

    def link_delivered(self, link: PeerLink, messages: list[Message | PushedBatch]) -> None:
        """Hear what came over a link that is up."""

    def link_closed(self, link: PeerLink, closed: Closed) -> None:
        """Hear that a link has ended. The last that is heard of it."""


class PeerLink:
    """A link with its connection."""

    def __init__(self, host: Host, link: Link, *, is_outgoing: bool) -> None:
        self.link = link
        self.is_outgoing = is_outgoing
        self.peer: Peer | None = None
        self.line: Line | None = None
        self.is_closed = False
        self.sent_bytes = 0
        self.wake_ms = 1 << 62
        """When the link is to be woken, as far as the host knows."""
        self._host = host
        self._messages: list[Message] = []
        self._line_up: deque[Replica] = deque()
        self._requests: dict[Replica, tuple[SendData, Chunk | SealedRange | None]] = {}
        """What each replica wants to send; with what was read for it and waits for credit, a frame's bytes at most."""
        self._files_end: dict[Replica, int] = {}
        """Up to which offset each was sent files."""
        self._sent: list[tuple[Replica, on.DataSent]] = []
        """What the core is to be told when the other links have sent theirs: nobody's disk waits for it."""
        self._reads = 0
        self._is_starved = False

    @property
    def address(self) -> str:
        """The peer's address, as the socket has it."""
        return self.line.peer if self.line is not None else ""

    @property
    def waiting(self) -> int:
        """How many partitions wait to send."""
        return len(self._requests)

    def begin(self, line: Line) -> None:
        """Take the connection that was made."""
        self.line = line
        self._wake()

    # ── what the line tells ──────────────────────────────────────────────────────────────────────────────────────

    def buffer(self) -> memoryview:
        """Return where the next bytes go."""
        return self.link.buffer()

    def received(self, count: int) -> None:
        """Hear that bytes have come."""
        self.do(self.link.received(count, self._host.clock_ms()))

    def writable(self) -> None:
        """Hear that there is room again."""
        if self._requests:
            self._host.mark_link(self)

    def lost(self, reason: str) -> None:
        """Hear that the connection is gone."""
        reason = f"The connection ended: {reason}."
        self.do(self.link.lost(reason))
        if not self.is_closed:  # The link had ended, and an error came before its `Closed` was done.
            self._close(Closed(ConnectionLost(reason)))

    # ── what the link tells ──────────────────────────────────────────────────────────────────────────────────────

    def do(self, effects: list[LinkEffect]) -> None:
        """Do what the link's state machine asks for."""
        for effect in effects:
            match effect:
                case Deliver(messages):
                    self._host.link_delivered(self, messages)
                case Write(buffers):
                    self._write(buffers)
                case Credited():
                    self._is_starved = False
                    self._host.mark_link(self)
                case Opened(peer):
                    self.peer = peer
                    self._host.link_opened(self, peer)
                case Closed():
                    self._close(effect)
        if not self.is_closed:
            self._wake()

    def _wake(self) -> None:
        deadline_ms = self.link.deadline_ms
        if deadline_ms < self.wake_ms:
            self._host.wake_link_at(self, deadline_ms)

    def tick(self) -> None:
        """Hear that time has passed."""
        try:
            self.do(self.link.tick(self._host.clock_ms()))
        except Exception as error:
            self._break(error)

    def fail(self, error: WalstreamError) -> None:
        """End the link, and tell the peer why."""
        self.do(self.link.fail(error))

    def _break(self, error: Exception) -> None:
        """End the link after an error of this node: a partition whose request was lost would never be sent again."""
        log.error("link failed", address=self.address, error=repr(error), exc_info=error)
        if self.line is not None:
            self.line.close()
        self.lost(f"this node failed: {error!r}")

    def _close(self, closed: Closed) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._messages.clear()
        self._line_up.clear()
        self._requests.clear()
        if self.line is not None:
            self.line.close()
        self._host.link_closed(self, closed)

    def _write(self, buffers: list[Buffer]) -> None:
        if buffers and self.line is not None and not self.is_closed:
            self.sent_bytes += sum(map(len, buffers))
            self.line.write(buffers)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> None:
        """Send a message at the end of this turn, or before the next data."""
        self._messages.append(message)
        self._host.mark_link(self)

    def send_data(self, replica: Replica, request: SendData) -> None:
        """Send data when it is its turn; what waited for the same replica is of an earlier session, and void."""
        if replica not in self._requests:
            self._line_up.append(replica)
        self._requests[replica] = (request, None)
        self._host.mark_link(self)

    def stop_data(self, replica: Replica) -> None:
        """Forget what waits for a replica."""
        self._files_end.pop(replica, None)
        if self._requests.pop(replica, None) is not None and replica in self._line_up:
            self._line_up.remove(replica)

    def refuse_unknown(self, message: PartitionMessage) -> None:
        """Answer what is about a partition that is not here: not yet, or not any more."""
        if isinstance(message, Data):
            self.released(sum(map(len, message.batches)))
        if not isinstance(message, Refused):
            self.send(Refused(message.partition, message.epoch, message.session, Why.UNKNOWN_PARTITION, -1))

    def released(self, bytes_count: int) -> None:
        """Hear that the log has let go of bytes that came over this link, and grant others where that is due."""
        link: FollowerLink = self.link  # type: ignore[assignment]
        self._write(link.released(bytes_count))

    def serve(self) -> None:
        """Send what waits, as far as credit and the socket go."""
        try:
            self._serve()
        except Exception as error:
            self._break(error)

    def _serve(self) -> None:
        self._flush()
        turn_bytes = 0
        while self._line_up and not self._is_starved and self.line is not None and not self.is_closed:
            if self.line.unsent_bytes >= UNSENT_BYTES_MAX:
                return  # The line calls when it has room.
            if turn_bytes >= TURN_BYTES_MAX:
                self._host.mark_link(self)
                return
            turn_bytes += self._serve_next(self._line_up.popleft())

    def served(self) -> None:
        """Tell the core what was sent; what it wants to send next has its turn then."""
        sent, self._sent = self._sent, []
        for replica, event in sent:
            replica.feed(event)

    def _flush(self) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            self._write(self.link.send(messages))

    def _serve_next(self, replica: Replica) -> int:
        """Send, or begin to read, for the partition whose turn it is; return the bytes that were sent."""
        request, found = self._requests[replica]
        link: LeaderLink = self.link  # type: ignore[assignment]
        if found is None:
            bytes_max = min(request.bytes_max, max(link.credit.available_bytes, CREDIT_BYTES_MIN))
            try:
                found = self._find(replica, request, bytes_max)
            except Exception as error:  # Of this partition alone: nothing of it was written to the line yet.
                self._fail(replica, request, error)
                return 0
            if found is None:
                return 0  # A thread reads it, or will.
        size = found.length if isinstance(found, SealedRange) else found.size
        if size == 0:
            self._fail(replica, request, WalstreamError("There is nothing to send."))
            return 0
        if size > link.credit.available_bytes:
            self._write(link.ask(size))
            self._is_starved = True
            self._requests[replica] = (request, found)
            self._line_up.appendleft(replica)
            return 0
        del self._requests[replica]
        self._put(replica, request, found, size)
        return size

    def _find(self, replica: Replica, request: SendData, bytes_max: int) -> Chunk | SealedRange | None:
        """Return what to send; None: a thread looks for it, and puts the replica at the head of the line again."""
        partition = replica.partition
        if request.offset >= partition.segments[-1].base_offset or not self._can_send_files:
            chunk = partition.read_replica(request.offset, bytes_max)
            if chunk is not None:
                return chunk
        if self._reads >= READS_MAX:
            self._line_up.append(replica)
            self._is_starved = True  # Until one of the reads is done.
            return None
        self._reads += 1
        # Who asks again for what it was sent as a file did not take it: perhaps it has rotted, which nobody noticed
        # here, because nobody looked at it. So now it is read, and checked.
        as_file = self._can_send_files and request.offset >= self._files_end.get(replica, 0)
        self._host.run_blocking(
            lambda: self._read(partition, request.offset, bytes_max, as_file=as_file),
            lambda found, error: self._read_done(replica, request, found, error),
        )
        return None

    @property
    def _can_send_files(self) -> bool:
        is_plain = self.link.settings.compression is PayloadCompression.NONE
        return is_plain and self.line is not None and self.line.can_send_files

    @staticmethod
    def _read(partition: PartitionLog, offset: int, bytes_max: int, *, as_file: bool) -> Chunk | SealedRange:
        found = partition.sealed_range(offset, bytes_max) if as_file else None
        return found or partition.read_replica_blocking(offset, bytes_max)

    def _read_done(
        self, replica: Replica, request: SendData, found: Chunk | SealedRange | None, error: Exception | None
    ) -> None:
        self._reads -= 1
        self._is_starved = False
        if self.is_closed:
            return
        self._host.mark_link(self)
        wanted = self._requests.get(replica, (None,))[0]
        if wanted is not request:
            # It is no longer wanted. What is wanted instead could not line up while this was read.
            if wanted is not None and replica not in self._line_up:
                self._line_up.append(replica)
            return
        if found is None:
            self._fail(replica, request, error or WalstreamError("Nothing was read."))
        else:
            self._requests[replica] = (request, found)
            self._line_up.appendleft(replica)

    def _fail(self, replica: Replica, request: SendData, error: Exception) -> None:
        self._requests.pop(replica, None)
        log.warning("a follower could not be sent data", partition=replica.partition.name, error=str(error))
        replica.feed(on.SendFailed(request.token, request.peer, request.session, request.offset))

    def _put(self, replica: Replica, request: SendData, found: Chunk | SealedRange, size: int) -> None:
        """Write a DATA frame."""
        partition = replica.partition
        link: LeaderLink = self.link  # type: ignore[assignment]
        self._flush()
        high_watermark = partition.high_watermark
        message = Data(
            replica.key, request.epoch, request.session, high_watermark, partition.log_start,
            request.offset, found.next_offset, (),
        )  # fmt: skip
        if isinstance(found, SealedRange):
            assert self.line is not None
            assert isinstance(found.file, OsFile)
            self._write([link.send_data_head(message, size)])
            self.line.send_file(FileRange(found.file.descriptor, found.position, found.length, found.file))
            self._files_end[replica] = found.next_offset
            self.sent_bytes += size
        else:
            message.batches = found.buffers
            message.may_have_gaps = request.offset < partition.gaps_below
            self._write(link.send_data(message, size))
        sent = on.DataSent(
            request.token, request.peer, request.session, request.offset, found.next_offset, size, high_watermark
        )
        self._sent.append((replica, sent))
