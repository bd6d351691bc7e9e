"""One connection between two nodes, from its first byte to its last: what both of its sides have in common.

A link is a state machine: bytes, ticks and messages to send go in, effects come out; the shell and the simulator do
them. `leader_link` is the side that dials and pushes, `follower_link` the one that listens.

    shaking hands ──▶ up (version 1 or 2) ──▶ closed

Whatever goes wrong is one error: it is said to the peer as far as the version has words for it, and the link is
closed. Messages that were whole before the wrong bytes are delivered, none after them. A closed link does nothing any
more, so late calls are harmless. The clock enters as `now_ms`, which never goes back; `deadline_ms` says when the next
`tick` is due, and a tick that comes early does nothing.

The link keeps heartbeats, credit, and which partitions were opened on it, to itself; all other messages are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from walstream.errors import ConnectionLost, LinkTimeout, WalstreamError
from walstream.log.batch import Buffer
from walstream.replication.messages import Data, Failure, Heartbeat, HeartbeatAck, Message, RepairData
from walstream.replication.wire.authentication import Authentication
from walstream.replication.wire.control import FAILURE, KIND_OF, OPEN, decode_control, encode_control
from walstream.replication.wire.data import DATA, REPAIR_DATA, PayloadCompression, encode_repair, take_repair
from walstream.replication.wire.frames import CONTROL_BYTES_MAX, FRAME_BYTES_MAX, Keys, next_frame, take_fields
from walstream.replication.wire.hello import HELLO_BYTES_MAX
from walstream.replication.wire.inbox import Inbox
from walstream.replication.wire.refusals import error_of, failure_of
from walstream.replication.wire.version_1 import MODE_ASYNC, PushedBatch

NEVER: Final = 1 << 62
"""A deadline that does not come."""

_MIB: Final = 1024 * 1024

_PARTITION_KINDS_FROM: Final = OPEN
"""The types of frames that are about partitions are numbered from here on."""

FROM_BOTH: Final = frozenset(KIND_OF[message] for message in (Heartbeat, HeartbeatAck, Failure))
"""The types that either side may send once the link is up, whatever else it may."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What this node is, and how it keeps its links; the same for every one of them."""

    node_id: int
    cluster_id: str
    """Empty: the node is new, and takes the id of the first leader that it follows."""
    incarnation: int
    mode: int = MODE_ASYNC
    authentication: Authentication = Authentication.NONE
    secret: bytes = field(default=b"", repr=False)
    compression: PayloadCompression = PayloadCompression.NONE
    """How a leader compresses its data, if the follower can expand it."""
    handshake_timeout_ms: int = 5_000
    heartbeat_interval_ms: int = 10_000
    heartbeat_timeout_ms: int = 30_000
    credit_bytes: int = 16 * _MIB
    """What a leader may have under way to this node, when it follows."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    takes_version_1: bool = False
    """Whether a follower takes the pushes of version 1, and a leader falls back to it. It has no authentication of its
    own, so with a secret it is out of the question."""

    def __post_init__(self) -> None:
        assert bool(self.secret) == (self.authentication is Authentication.SECRET), "a secret is given and used, or not"
        assert not (self.secret and self.takes_version_1), "version 1 cannot prove anything"
        assert self.credit_bytes > 0
        assert 0 < self.frame_bytes_max < 1 << 32


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as it has said and, where that was asked for, proved."""

    node_id: int
    version: int
    cluster_id: str = ""
    incarnation: int = 0
    """0 in version 1, which does not know of it."""
    mode: int = MODE_ASYNC


@dataclass(slots=True)
class Write:
    """Put these bytes on the connection, in this order. The buffers are not changed afterwards by anybody."""

    buffers: list[Buffer]


@dataclass(frozen=True, slots=True)
class Opened:
    """The link is up. A follower without a cluster id makes the peer's durable before it does anything else."""

    peer: Peer


@dataclass(slots=True)
class Deliver:
    """The peer has sent these, in this order. In version 1 they are pushed batches."""

    messages: list[Message | PushedBatch]


@dataclass(frozen=True, slots=True)
class Credited:
    """The leader may send more data than before: serve those who wait."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Close the connection when everything written is out, or the peer does not take it. Nothing follows this."""

    error: WalstreamError
    is_version_refused: bool = False
    """The follower does not speak this version: try the one before it, if that is allowed."""


LinkEffect: TypeAlias = Write | Opened | Deliver | Credited | Closed


class Link:
    """What both sides share: the inbox, the timers, the end."""

    _expected: frozenset[int] = FROM_BOTH
    """The types of frames that the peer may send."""

    def __init__(self, settings: LinkSettings, now_ms: int) -> None:
        self.settings = settings
        self.peer: Peer | None = None
        """Set while the link is up."""
        self.is_closed = False
        self.round_trip_ms: int | None = None
        """How long the last heartbeat took to be answered."""
        self._inbox = Inbox()
        self._keys = Keys()
        self._take: Callable[[list[LinkEffect]], bool]
        """Takes what the inbox begins with, by the state the link is in; False when there is nothing whole."""
        self._speaks_frames = False
        self._now_ms = self._heard_at_ms = now_ms
        self._handshake_by_ms = now_ms + settings.handshake_timeout_ms
        self._heartbeat_at_ms = NEVER

    # ── bytes in ─────────────────────────────────────────────────────────────────────────────────────────────────

    def buffer(self) -> memoryview:
        """Return where the next received bytes go."""
        return self._inbox.buffer()

    def received(self, count: int, now_ms: int) -> list[LinkEffect]:
        """Hear that so many bytes were written to the buffer."""
        effects: list[LinkEffect] = []
        if self.is_closed:
            return effects
        self._inbox.received(count)
        self._now_ms = self._heard_at_ms = now_ms
        try:
            while not self.is_closed and self._take(effects):
                pass
        except WalstreamError as error:
            self._fail(error, effects)
        return effects

    def feed(self, data: Buffer, now_ms: int) -> list[LinkEffect]:
        """Take bytes that lie somewhere else; they are copied."""
        effects: list[LinkEffect] = []
        view = memoryview(data)
        while len(view) and not self.is_closed:
            room = self._inbox.buffer()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            effects += self.received(count, now_ms)
            view = view[count:]
        return effects

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def deadline_ms(self) -> int:
        """When `tick` is due next."""
        if self.is_closed:
            return NEVER
        if self.peer is None:
            return self._handshake_by_ms
        return min(self._heartbeat_at_ms, self._heard_at_ms + self.settings.heartbeat_timeout_ms)

    def tick(self, now_ms: int) -> list[LinkEffect]:
        """Do what is due: a heartbeat, or the end of a link whose peer is silent."""
        effects: list[LinkEffect] = []
        if now_ms < self.deadline_ms:
            return effects
        if self.peer is None:
            self._fail(LinkTimeout(f"The handshake took longer than {self.settings.handshake_timeout_ms} ms."), effects)
        elif now_ms >= self._heard_at_ms + self.settings.heartbeat_timeout_ms:
            self._fail(LinkTimeout(f"Nothing came for {now_ms - self._heard_at_ms} ms."), effects)
        else:
            self._heartbeat_at_ms = now_ms + self.settings.heartbeat_interval_ms
            effects.append(Write([self._heartbeat(now_ms)]))
        return effects

    # ── messages out ─────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, messages: Iterable[Message]) -> list[Buffer]:
        """Return the bytes of messages that cost no credit, to be written at once and in this order.

        What is about a partition that was not opened on this link answers an earlier one, and is left out: a peer
        would take it for a mistake.
        """
        if self.is_closed or self.peer is None:
            return []
        result: list[Buffer] = []
        run: list[Message] = []
        for message in messages:
            if not self._may_send(message):
                continue
            if isinstance(message, RepairData):
                result += encode_control(run, self._keys)
                result += encode_repair(message, self._keys.encode(message.partition), self._compression)
                run = []
            else:
                run.append(message)
        result += encode_control(run, self._keys)
        return result

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def fail(self, error: WalstreamError) -> list[LinkEffect]:
        """End the link from this side, and say why."""
        effects: list[LinkEffect] = []
        if not self.is_closed:
            self._fail(error, effects)
        return effects

    def lost(self, reason: str = "The connection ended.") -> list[LinkEffect]:
        """Hear that the connection is gone."""
        if self.is_closed:
            return []
        self.is_closed = True
        self.peer = None
        return [Closed(ConnectionLost(reason))]

    def _fail(self, error: WalstreamError, effects: list[LinkEffect], *, is_version_refused: bool = False) -> None:
        words = self._last_words(error)
        if words:
            effects.append(Write([words]))
        self._close(error, effects, is_version_refused=is_version_refused)

    def _close(self, error: WalstreamError, effects: list[LinkEffect], *, is_version_refused: bool = False) -> None:
        self.is_closed = True
        self.peer = None
        # The sentence says it all; the traceback would hold the received bytes, and this list of effects itself.
        effects.append(Closed(error.with_traceback(None), is_version_refused))

    def _last_words(self, error: WalstreamError) -> bytes:
        """Return how the error is said to the peer; nothing where the version has no words for it."""
        return encode_control([failure_of(error)], self._keys)[0] if self._speaks_frames else b""

    # ── version 2 ────────────────────────────────────────────────────────────────────────────────────────────────

    def _handshake_frame(self, kind: int, effects: list[LinkEffect]) -> memoryview | None:
        """Take the one frame that the peer may send before the link is up, or the FAILURE it may send instead."""
        head = next_frame(self._inbox, frozenset((kind, FAILURE)), lambda _kind: HELLO_BYTES_MAX)
        if head is None:
            return None
        fields = take_fields(self._inbox, head[1], head[2])
        if head[0] == kind:
            return fields
        failures: list[Failure] = []
        decode_control(FAILURE, fields, self._keys, failures)
        self._close(error_of(failures[0]), effects)
        return None

    def _take_frames(self, effects: list[LinkEffect]) -> bool:
        """Take every whole frame there is. What came before a wrong one is delivered before the link is closed."""
        inbox, keys = self._inbox, self._keys
        delivered: list[Message | PushedBatch] = []
        try:
            while not self.is_closed:
                head = next_frame(inbox, self._expected, self._frame_bytes_max)
                if head is None:
                    break
                kind, flags, length = head
                if kind == DATA:
                    delivered.append(self._take_data(flags, length))
                    continue
                if kind == REPAIR_DATA:
                    messages: list[Any] = [take_repair(inbox, flags, length, keys, self.settings.frame_bytes_max)]
                else:
                    messages = []
                    decode_control(kind, take_fields(inbox, flags, length), keys, messages)
                if kind < _PARTITION_KINDS_FROM:
                    for message in messages:
                        if not self._handle(message, effects):
                            delivered.append(message)
                    continue
                if kind == OPEN:
                    for message in messages:
                        keys.open(message.partition)
                delivered += messages
        finally:
            if delivered:
                effects.append(Deliver(delivered))
        return False

    def _handle(self, message: Any, effects: list[LinkEffect]) -> bool:
        """Do what a message about the link itself asks for; False if it is for others."""
        match message:
            case Heartbeat(timestamp_ms):
                effects.append(Write([*encode_control([HeartbeatAck(timestamp_ms)], self._keys)]))
            case HeartbeatAck(timestamp_ms):
                self._answered(timestamp_ms)
            case Failure():
                self._close(error_of(message), effects)
            case _:
                return False
        return True

    def _take_data(self, _flags: int, _length: int) -> Data:
        raise AssertionError("nobody sends DATA to a leader")

    def _frame_bytes_max(self, kind: int) -> int:
        if kind == REPAIR_DATA:
            return self.settings.frame_bytes_max
        return min(CONTROL_BYTES_MAX, self.settings.frame_bytes_max)

    # ── for the sides ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _compression(self) -> PayloadCompression:
        return PayloadCompression.NONE

    def _may_send(self, message: Any) -> bool:
        partition = getattr(message, "partition", None)
        return partition is None or partition in self._keys

    def _up(self, peer: Peer, effects: list[LinkEffect]) -> None:
        self.peer = peer
        self._heartbeat_at_ms = self._now_ms + self.settings.heartbeat_interval_ms
        effects.append(Opened(peer))

    def _heartbeat(self, now_ms: int) -> bytes:
        return encode_control([Heartbeat(now_ms)], self._keys)[0]

    def _answered(self, timestamp_ms: int) -> None:
        # The peer echoes what it was told; a number of its own invention measures nothing.
        if 0 <= self._now_ms - timestamp_ms <= self.settings.heartbeat_timeout_ms:
            self.round_trip_ms = self._now_ms - timestamp_ms
