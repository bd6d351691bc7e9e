"""Damaged bytes of the own log, fetched again from a peer, and the same done for peers.

Owns which range is asked for, of whom, and when again. The bytes that come are judged by the log (`InstallRepair`):
CRC, offsets, and the epochs of the own map, which prove that they are the bytes that were here: an offset and an epoch
have one content, because an epoch belongs to one life of one leader.

A follower asks its leader; a leader asks followers whose durable end covers the range, one after the other. One range
is asked for at a time, so a repair needs no credit. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from walstream.cluster.metadata import NodeId
from walstream.replication.context import NEVER, Context
from walstream.replication.effects import InstallRepair, ReadForRepair
from walstream.replication.events import RangeRead
from walstream.replication.messages import Batches, RepairData, RepairRequest

GROWTH_MAX: Final = 64
"""A repair asks for at most this many times `repair_bytes_max`: 64 MiB by default."""


class Source:
    """A peer that may have what is damaged here, and the session over which to ask."""

    __slots__ = ("durable_end", "node", "session")

    def __init__(self, node: NodeId, session: int, durable_end: int) -> None:
        self.node = node
        self.session = session
        self.durable_end = durable_end


class Repairs:
    """The repairs of one partition in one role."""

    __slots__ = ("_asked", "_bytes_max", "_ctx", "_epoch", "_is_outgoing", "_request", "_turn", "deadline_ms")

    def __init__(self, ctx: Context, epoch: int, *, is_outgoing: bool) -> None:
        self._ctx = ctx
        self._epoch = epoch
        self._is_outgoing = is_outgoing
        self._request = 0
        self._turn = 0
        self._asked = False
        self._bytes_max = ctx.settings.repair_bytes_max
        self.deadline_ms = NEVER

    def stop(self) -> None:
        """Whoever was asked does not answer any more."""
        self._asked = False
        self.deadline_ms = NEVER

    def go_on(self, sources: Sequence[Source], now_ms: int) -> None:
        """Ask for the first damaged range, unless one has been asked for and there is still time to wait."""
        if self._ctx.facts.damaged:
            self._ctx.set_damaged(self._ctx.facts.damaged)  # Retention may have taken some of it meanwhile.
        damaged = self._ctx.facts.damaged
        if not damaged:
            self.stop()
            return
        if self._asked and now_ms < self.deadline_ms:
            return
        start, end = damaged[0]
        able = [source for source in sources if source.durable_end > start]
        self.deadline_ms = now_ms + self._ctx.settings.retry_ms
        self._asked = bool(able)
        if not able:
            return
        source = able[self._turn % len(able)]
        self._turn += 1
        self._request += 1
        ctx = self._ctx
        request = RepairRequest(ctx.key, self._epoch, source.session, self._request, start, end, self._bytes_max)
        ctx.send(source.node, request, is_outgoing=self._is_outgoing)

    def on_data(self, message: RepairData) -> None:
        """What was asked for is here, or is not to be had from this peer."""
        if not self._asked or message.request != self._request or message.next_offset <= message.start:
            return  # An empty answer is left to the deadline: then the next peer is asked.
        ctx = self._ctx
        ctx.out.append(InstallRepair(ctx.token, message.start, message.next_offset, message.batches))

    def done(self, *, has_helped: bool) -> None:
        """The log has written what came; or refused it: then the next peer is asked, when the time is up.

        And for more at a time: where no header is left to tell where batches begin, only the whole range fits.
        """
        self._asked = not has_helped
        least = self._ctx.settings.repair_bytes_max
        self._bytes_max = least if has_helped else min(2 * self._bytes_max, GROWTH_MAX * least)

    def serve(self, peer: NodeId, message: RepairRequest) -> None:
        """Read for a peer what it lacks."""
        ctx = self._ctx
        end = min(message.end, ctx.log.durable_end)
        if message.start < ctx.log.log_start or message.start >= end:
            self._answer(peer, message.session, message.request, message.start, message.start, ())
            return
        request = message.session << 32 | message.request
        bytes_max = min(message.bytes_max, GROWTH_MAX * ctx.settings.repair_bytes_max)
        ctx.out.append(ReadForRepair(ctx.token, peer, request, message.start, end, bytes_max))

    def on_read(self, event: RangeRead) -> None:
        """The range for a peer is read."""
        session, request = event.request >> 32, event.request & 0xFFFFFFFF
        self._answer(event.peer, session, request, event.start, event.next_offset, event.batches)

    def _answer(self, peer: NodeId, session: int, request: int, start: int, next_offset: int, batches: Batches) -> None:
        message = RepairData(self._ctx.key, self._epoch, session, request, start, next_offset, batches)
        self._ctx.send(peer, message, is_outgoing=self._is_outgoing)
