"""The order of responses: a slot per request, filled whenever its response is ready, emptied from the front.

Filling may come at any time and from anywhere on the event loop; a slot that has a deadline and is still empty at that
time is asked to fill itself. This module knows neither what a response says nor how it is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from walstream.node.wire import Buffer

NEVER = float("inf")


class Slot:
    """A response's place in the order. The first `fill` counts; what comes later is dropped."""

    __slots__ = ("_slots", "buffers", "deadline", "expire", "is_filled")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.buffers: list[Buffer] = []
        self.is_filled = False
        self.deadline = NEVER
        self.expire: Callable[[], None] | None = None

    def fill(self, buffers: list[Buffer]) -> None:
        """Give the response; an empty one means that none is owed."""
        if not self.is_filled:
            self.is_filled = True
            self.buffers = buffers
            self.deadline, self.expire = NEVER, None
            self._slots.on_filled()

    def fill_by(self, deadline: float, expire: Callable[[], None]) -> None:
        """Have `expire` called at the deadline, in the loop's time, if the slot is still empty."""
        if not self.is_filled:
            self.deadline, self.expire = deadline, expire
            self._slots.watch(deadline)


class Slots:
    """The slots of one connection. `on_filled` is called whenever one of them was filled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_filled: Callable[[], None]) -> None:
        self.on_filled = on_filled
        self._loop = loop
        self._slots: deque[Slot] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER

    def __len__(self) -> int:
        return len(self._slots)

    def open(self) -> Slot:
        """Add a slot at the end."""
        slot = Slot(self)
        self._slots.append(slot)
        return slot

    def take_filled(self) -> list[Buffer]:
        """Remove the filled slots at the front and return what is in them."""
        buffers: list[Buffer] = []
        while self._slots and self._slots[0].is_filled:
            buffers += self._slots.popleft().buffers
        return buffers

    def close(self) -> None:
        """Forget all slots: nobody waits for their responses any more, and who would fill them is told."""
        slots, self._slots = self._slots, deque()
        for slot in slots:
            slot.is_filled = True
            if slot.expire is not None:
                slot.expire()
        if self._timer is not None:
            self._timer.cancel()

    def watch(self, deadline: float) -> None:
        """See to it that expired slots are looked for at this time."""
        if deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        # One timer serves all slots, and is not touched when they are filled: it fires once per timeout, not once
        # per request.
        self._timer, self._timer_at = None, NEVER
        now = self._loop.time()
        for slot in tuple(self._slots):
            if slot.deadline <= now and slot.expire is not None:
                slot.expire()
        nearest = min((slot.deadline for slot in self._slots), default=NEVER)
        if nearest < NEVER:
            self.watch(nearest)
