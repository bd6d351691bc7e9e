"""One client's connection: frames in, responses out in the order of the requests, and a bound on everything between.

Produce requests are pipelined: each is appended the moment it has arrived, and its response waits in a `Slot` for the
disk; those that one flush has made durable leave in one write. Any other request is handled alone, by one task; frames
behind it wait and nothing more is read. Reading also stops while the node holds as many request bytes as it may, and
handling stops while the client does not read its responses. So the memory of a connection is bounded by what it is
owed and what it sent last.

This module owns the transport and the order of responses. It does not know what a request means (`node/dispatch.py`)
nor how bytes become frames (`node/framing.py`). Deadlines are checked from outside, by `check`.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, Protocol, cast

from walstream import logs
from walstream.config import LimitsConfig
from walstream.errors import WalstreamError
from walstream.node.acl import ANONYMOUS, Principal
from walstream.node.framing import Budget, Receiver, held_bytes
from walstream.node.security import OPEN_REQUEST_BYTES_MAX, Security
from walstream.node.slots import Slot, Slots
from walstream.node.wire import Buffer

if TYPE_CHECKING:
    from walstream.node.sasl import Exchange
    from walstream.node.turns import Turns
    from walstream.ops.metrics import Metrics

log = logs.get(__name__)

SLOTS_MAX = 1024
"""Produce requests of one connection that may wait for the disk. Clients send 5 at a time, eager ones some hundred."""

REFUSAL_LINGER_S = 0.1
"""How long a connection outlives the answer that refused its authentication."""

JOIN_BYTES_MAX = 16 * 1024
"""Responses up to this size are joined and copied, which is cheaper than handing over their parts."""

STALL_S = 5.0
"""A request that arrives this haltingly is given up when others wait for its memory."""


class Dispatch(Protocol):
    """What is done with a frame: `node/dispatch.py`."""

    def is_pipelined(self, connection: Connection, frame: bytearray) -> bool:
        """Say whether the frame can be handled at once, beside others."""

    def handle_now(self, connection: Connection, frame: bytearray, slot: Slot) -> None:
        """Handle a pipelined frame, and give its bytes back to the budget when they are no longer needed."""

    async def handle(self, connection: Connection, frame: bytearray) -> list[Buffer]:
        """Handle any other frame and return its response."""


class Host(Protocol):
    """What a connection needs of its node."""

    limits: LimitsConfig
    security: Security
    metrics: Metrics
    dispatch: Dispatch
    scratch: memoryview
    budget: Budget
    unsent: Budget
    turns: Turns

    def admit(self, connection: Connection) -> bool:
        """Take a new connection in, unless there are too many."""

    def closing(self, connection: Connection, reason: str) -> None:
        """Hear that the node ends a connection, and why."""

    def dismiss(self, connection: Connection) -> None:
        """Hear that a connection is gone."""


class Connection(asyncio.BufferedProtocol):
    """The protocol of one connection. What asyncio calls comes first."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits = host.limits
        self._loop = asyncio.get_running_loop()
        self._receiver = Receiver(host.scratch, host.budget, host.limits.request_bytes_max)
        self._transport = cast(asyncio.Transport, None)
        self._slots = Slots(self._loop, self._filled)
        self._task: asyncio.Task[None] | None = None
        self._unsent_bytes = 0
        self._is_reading = True
        self._is_going_on = False
        self._is_closing = False
        self._opened_at = self._active_at = self._loop.time()
        self._frame_began_at: float | None = None
        self.stuck_since: float | None = None
        self.principal: Principal = ANONYMOUS
        self.client_id = ""
        self.peer = ""
        self.local_host = ""
        self.is_tls = False
        self.exchange: Exchange | None = None
        self.takes_raw_tokens = False
        self.closes_after_reply = False
        self.waits = False
        self.fetch_turn = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = _address(transport.get_extra_info("peername"))
        session: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self.local_host = str(transport.get_extra_info("sockname")[0])
        self.is_tls = session is not None
        if not self._host.admit(self):
            self._is_closing = True
            transport.close()
            return
        try:
            self.principal = self._host.security.first_principal(session.getpeercert() if session else None)
        except WalstreamError as error:
            self.close(error.message)
        self._limit_requests()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._receiver.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._active_at = self._loop.time()
        self._host.metrics.received_bytes += nbytes
        try:
            self._receiver.received(nbytes)
        except WalstreamError as error:
            self.close(error.message)
            return
        if not self._receiver.is_inside_frame:
            self._frame_began_at = None
        elif self._frame_began_at is None or self._receiver.frames:
            self._frame_began_at = self._active_at
        self._go_on()

    def pause_writing(self) -> None:
        self.stuck_since = self._loop.time()

    def resume_writing(self) -> None:
        self.stuck_since = None
        self._count_unsent()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._is_closing = True
        self.stuck_since = None
        self._host.budget.forget(self)
        self._host.unsent.give(self._unsent_bytes)
        self._unsent_bytes = 0
        self._receiver.release()
        self._slots.close()
        if self._task is not None:
            self._task.cancel()
        self._host.dismiss(self)

    # Handling

    @property
    def must_authenticate(self) -> bool:
        """Say whether the peer has yet to prove who it is."""
        return self._host.security.is_required and self.principal.is_anonymous

    def _limit_requests(self) -> None:
        limit = self._limits.request_bytes_max
        self._receiver.bytes_max = min(OPEN_REQUEST_BYTES_MAX, limit) if self.must_authenticate else limit

    def _go_on(self) -> None:
        """Handle what can be handled, then decide whether to read on."""
        if self._is_going_on:
            return
        self._is_going_on = True
        frames, dispatch = self._receiver.frames, self._host.dispatch
        try:
            while frames and self._may_handle():
                frame = frames.popleft()
                slot = self._slots.open()
                if dispatch.is_pipelined(self, frame):
                    dispatch.handle_now(self, frame, slot)
                else:
                    self._task = self._loop.create_task(self._handle(frame, slot))
        finally:
            self._is_going_on = False
        self._regulate()

    def _may_handle(self) -> bool:
        return (
            self._task is None
            and self.stuck_since is None
            and len(self._slots) < SLOTS_MAX
            and not self._is_closing
            and not self.closes_after_reply
        )

    async def _handle(self, frame: bytearray, slot: Slot) -> None:
        response: list[Buffer] = []
        try:
            response = await self._host.dispatch.handle(self, frame)
        except asyncio.CancelledError:
            pass  # The connection is lost, or the node is stopping and does not wait for what may never happen.
        except WalstreamError as error:
            self.close(error.message)
        except Exception:
            log.exception("request failed", peer=self.peer, client=self.client_id)
            self.close("the request failed")
        self._task = None
        self.waits = False
        self._host.budget.give(held_bytes(frame))
        self._limit_requests()
        slot.fill(response)
        self.send_filled()
        self._go_on()

    def has_room(self) -> bool:
        """Say whether there is memory for the next bytes."""
        return self._receiver.has_room()

    def resume(self) -> None:
        """Hear that there is memory again."""
        self._receiver.reserve()
        self._regulate()

    def _regulate(self) -> None:
        """Read on only if there is room: no frame left to handle, and memory for the next bytes."""
        if self._is_closing:
            return
        has_room = self.has_room()
        if has_room:
            self._host.budget.forget(self)
        else:
            self._host.budget.wait(self, is_inside_frame=self._receiver.is_inside_frame)
        is_free = not self._receiver.frames and not self.closes_after_reply
        if not is_free:
            self._frame_began_at = None  # We are the ones who keep the frame behind from arriving.
        elif not self._is_reading and self._receiver.is_inside_frame and self._frame_began_at is None:
            self._frame_began_at = self._loop.time()
        if (has_room and is_free) != self._is_reading:
            self._is_reading = not self._is_reading
            if self._is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # Sending

    def _filled(self) -> None:
        """Hear that a response is ready: it is sent with the others that become so in the same turn, in one write."""
        self._host.turns.mark_connection(self)

    def send_filled(self) -> None:
        """Send the responses at the head of the order that are ready."""
        parts = self._slots.take_filled()
        if parts and not self._transport.is_closing():
            size = sum(map(len, parts))
            self._host.metrics.sent_bytes += size
            self._active_at = self._loop.time()
            if len(parts) > 1 and size <= JOIN_BYTES_MAX:
                self._transport.write(b"".join(parts))
            else:
                self._transport.writelines(parts)
            self._count_unsent()
        if self.closes_after_reply and not self._slots and not self._is_closing:
            self._is_closing = True
            if self.must_authenticate:
                # Some clients lose an answer that comes together with the end of the connection, and then ask again
                # for ever instead of telling that the password was wrong.
                self._loop.call_later(REFUSAL_LINGER_S, self._transport.close)
            else:
                self._transport.close()
        elif self._receiver.frames and self._task is None:
            self._go_on()

    def _count_unsent(self) -> None:
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes < self._unsent_bytes and self.stuck_since is not None:
            self.stuck_since = self._loop.time()  # The client is slow, but it reads.
        self._host.unsent.take(unsent_bytes - self._unsent_bytes)
        self._unsent_bytes = unsent_bytes

    def close(self, reason: str) -> None:
        """Close the connection, and say why in the log; what was already answered is still sent."""
        if not self._is_closing:
            self._is_closing = True
            self._host.closing(self, reason)
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close the connection without waiting for the client to take what it is owed."""
        self.close(reason)
        self._transport.abort()

    def drain(self) -> None:
        """Finish what is in flight, then close. A request that waits for something to happen is let go."""
        self.closes_after_reply = True
        self._regulate()
        if self._task is not None and self.waits:
            self._task.cancel()
        self.send_filled()

    # Deadlines

    def is_stalled(self, now: float) -> bool:
        """Say whether a request has begun to arrive and nothing came of it for a while, although it was read."""
        return self._frame_began_at is not None and self._is_reading and now - self._active_at > STALL_S

    def check(self, now: float) -> None:
        """Close the connection if one of its deadlines has passed; called about once a second."""
        limits = self._limits
        if self.stuck_since is not None:
            self._count_unsent()
            if now - self.stuck_since > limits.response_write_timeout_ms / 1000:
                self.abort("the client does not read its responses")
        elif self._is_closing:
            self._transport.abort()  # The peer had a whole round to take the rest and close its side.
        elif self.must_authenticate and now - self._opened_at > limits.handshake_timeout_ms / 1000:
            self.close("the client did not authenticate in time")
        elif self._frame_began_at is not None and now - self._frame_began_at > limits.request_read_timeout_ms / 1000:
            self.close("a request did not arrive whole in time")
        elif not self._slots and now - self._active_at > limits.idle_timeout_ms / 1000:
            self.close("idle")


def _address(name: Any) -> str:
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else "unknown"
