"""What a link does with the requests of its partitions, by itself: the log and the wire are told what to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest

from walstream.errors import WalstreamError
from walstream.node.peer_links import PeerLink
from walstream.replication import events as on
from walstream.replication.effects import SendData
from walstream.replication.events import Token
from walstream.replication.messages import Data, Open, Refused, Watermark, Why
from walstream.replication.wire.data import PayloadCompression

KEY = (UUID(int=7), 0)


@dataclass
class Found:
    """What was read."""

    next_offset: int
    buffers: tuple[bytes, ...] = (b"batch",)
    size: int = 5


class Wire:
    """Credit without end, and a note of what was sent."""

    deadline_ms = 1 << 62

    def __init__(self) -> None:
        self.credit = self.settings = self
        self.available_bytes = 1 << 20
        self.compression = PayloadCompression.NONE
        self.sent: list[object] = []
        self.released_bytes = 0

    def send(self, messages: list[object]) -> list[bytes]:
        self.sent += messages
        return []

    def send_data(self, message: Data, size: int) -> list[bytes]:
        self.sent.append(message)
        return []

    def released(self, bytes_count: int) -> list[bytes]:
        self.released_bytes += bytes_count
        return []


@dataclass(eq=False)
class Line:
    unsent_bytes: int = 0
    can_send_files: bool = False

    def write(self, buffers: list[bytes]) -> None: ...


@dataclass
class Host:
    """Runs what blocks when it is told to."""

    jobs: list[tuple[Callable[[], Any], Callable[[Any, Exception | None], None]]] = field(default_factory=list)
    marks: int = 0

    def mark_link(self, _: PeerLink) -> None:
        self.marks += 1

    def run_blocking(self, job: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        self.jobs.append((job, done))

    def run_first(self) -> None:
        job, done = self.jobs.pop(0)
        done(job(), None)


@dataclass(eq=False)
class ColdLog:
    """A log of which nothing is in memory."""

    name: str = "t-0"
    high_watermark: int = 10
    gaps_below: int = 0
    log_start: int = 0
    batch_offsets: int = 1

    @property
    def segments(self) -> list[Any]:
        return [self]

    base_offset = 0

    def read_replica(self, offset: int, bytes_max: int) -> None:
        return None

    def read_replica_blocking(self, offset: int, bytes_max: int) -> Found:
        return Found(offset + self.batch_offsets)


@dataclass(eq=False)
class Replica:
    partition: ColdLog = field(default_factory=ColdLog)
    key: tuple[UUID, int] = KEY
    heard: list[on.Event] = field(default_factory=list)

    def feed(self, event: on.Event) -> None:
        self.heard.append(event)


def request(session: int, offset: int) -> SendData:
    return SendData(Token(1, 0), 2, 1, session, offset, 1000)


def linked() -> tuple[PeerLink, Wire, Host]:
    wire, host = Wire(), Host()
    link = PeerLink(host, wire, is_outgoing=True)  # type: ignore[arg-type]
    link.line = Line()  # type: ignore[assignment]
    return link, wire, host


def test_a_session_that_begins_while_a_thread_reads_for_the_last_one_is_served() -> None:
    link, wire, host = linked()
    replica: Any = Replica()
    link.send_data(replica, request(1, 0))
    link.serve()
    link.send_data(replica, request(2, 5))
    link.serve()
    assert len(host.jobs) == 1, "one thread reads, for the session that is over"
    host.run_first()
    link.serve()
    host.run_first()
    link.serve()
    assert [(message.session, message.offset) for message in wire.sent if isinstance(message, Data)] == [(2, 5)]
    assert link.waiting == 0


@pytest.mark.parametrize(("gaps_below", "may_have_gaps"), [(0, False), (3, False), (4, True), (10, True)])
def test_data_that_begins_where_compaction_may_have_left_gaps_says_so(gaps_below: int, may_have_gaps: bool) -> None:
    """Also where it ends behind them: the follower would refuse the gap, and never get past it."""
    link, wire, host = linked()
    replica: Any = Replica(ColdLog(gaps_below=gaps_below, batch_offsets=5))
    link.send_data(replica, request(1, 3))
    link.serve()
    host.run_first()
    link.serve()
    assert [(sent.offset, sent.next_offset, sent.may_have_gaps) for sent in wire.sent if isinstance(sent, Data)] == [
        (3, 8, may_have_gaps)
    ]


def test_who_reads_for_nobody_lines_nobody_up() -> None:
    link, wire, host = linked()
    replica: Any = Replica()
    link.send_data(replica, request(1, 0))
    link.serve()
    link.stop_data(replica)
    host.run_first()
    link.serve()
    assert not wire.sent
    assert not host.jobs


def test_a_read_that_fails_is_told_to_the_core() -> None:
    link, _, host = linked()
    replica: Any = Replica()
    link.send_data(replica, request(1, 3))
    link.serve()
    _, done = host.jobs.pop()
    done(None, WalstreamError("rotten"))
    assert [type(event) for event in replica.heard] == [on.SendFailed]


def test_whatever_is_about_a_partition_that_is_not_here_is_refused_but_a_refusal() -> None:
    link, wire, _ = linked()
    refusal = Refused(KEY, 3, 4, Why.UNKNOWN_PARTITION, -1)
    data = Data(KEY, 3, 4, 0, 0, 0, 1, (b"batch",))
    for message in (Open(KEY, 3, 4, 0, 1, 0, 0, -1), data, Watermark(KEY, 3, 4, 0, 0, 1)):
        wire.sent.clear()
        link.refuse_unknown(message)
        link.serve()
        assert wire.sent == [refusal]
    assert wire.released_bytes == len(b"batch")
    wire.sent.clear()
    link.refuse_unknown(refusal)
    link.serve()
    assert not wire.sent
