"""From received bytes to whole frames, and the memory they may take. No I/O: `node/connection.py` does it.

A Kafka frame is a length of four bytes and that many bytes. All connections read into one scratch buffer that the node
owns: a frame that arrives whole is copied out of it (small), one that does not goes on in a buffer of its own, which
then receives directly. That buffer grows as bytes arrive, so an announced length alone holds no memory, and a silent
connection holds none at all. Every frame ends up in its own bytearray, because a produced batch is patched in place
and lives until the disk has it.

`Budget` counts what all connections together hold. It refuses nothing: a connection asks before it reads on, stops
reading when the answer is no, and is called when there is room again.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Protocol

from walstream.errors import MalformedRequest

SCRATCH_BYTES = 128 * 1024
"""What one read takes at most outside of a large frame. A frame up to this size is copied once."""

FIRST_BYTES = 64 * 1024
"""What a frame's own buffer begins with. It grows fourfold, so that 1 MiB is copied a third of a time on average."""

FRAME_OVERHEAD_BYTES = 1024
"""What a frame costs beside its bytes: the objects that carry it. Keeps a flood of tiny requests inside the budget."""

_SIZE = struct.Struct(">i")


class Waiter(Protocol):
    """Somebody who waits for room."""

    def has_room(self) -> bool:
        """Say whether there is enough by now."""

    def resume(self) -> None:
        """Go on."""


class Budget:
    """How many bytes are held, how many may be, and who waits for room.

    Whole requests leave by themselves when they are handled, but an unfinished one stays for as long as its sender
    likes. So unfinished ones together get half the room: those who stall can keep other large requests waiting, never
    the small ones.
    """

    __slots__ = ("_waiting", "bytes_max", "unfinished_bytes", "used_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.unfinished_bytes = 0
        """The part of `used_bytes` that belongs to requests still arriving."""
        # In the order of their coming: those between two requests, and those in the middle of one.
        self._waiting: tuple[dict[Waiter, None], dict[Waiter, None]] = ({}, {})

    def fits(self, size: int) -> bool:
        """Say whether there is room for another request. A single holder always has it, or nothing would ever move."""
        return self.used_bytes + size <= self.bytes_max or self.used_bytes == 0

    def may_grow(self, held: int, size: int) -> bool:
        """Say whether an unfinished request that holds `held` bytes may take `size` more."""
        fits = self.used_bytes + size <= self.bytes_max or self.used_bytes == held
        return fits and (self.unfinished_bytes + size <= self.bytes_max // 2 or self.unfinished_bytes == held)

    def take(self, size: int) -> None:
        """Count bytes in."""
        self.used_bytes += size

    def give(self, size: int) -> None:
        """Count bytes out and call those who have waited longest and now have room."""
        self.used_bytes -= size
        assert self.used_bytes >= 0, "more bytes given back than taken"
        if any(self._waiting):
            self._call_waiting()

    def _call_waiting(self) -> None:
        # Who goes on takes memory only when its next bytes arrive, so no more are called than there is room for.
        calls = max((self.bytes_max - self.used_bytes) // SCRATCH_BYTES, 1)
        for queue in self._waiting:
            while queue and (calls > 0 or self.used_bytes == 0) and (waiter := next(iter(queue))).has_room():
                calls -= 1
                del queue[waiter]
                waiter.resume()

    def wait(self, waiter: Waiter, *, is_inside_frame: bool) -> None:
        """Have `waiter.resume` called once it has room; waiting again keeps its place."""
        self._waiting[is_inside_frame][waiter] = None

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting."""
        for queue in self._waiting:
            queue.pop(waiter, None)

    @property
    def waiting(self) -> int:
        """Return how many wait for room."""
        return sum(map(len, self._waiting))


class Receiver:
    """The receiving side of one connection: hands out where the next bytes go, and collects whole frames."""

    __slots__ = ("_budget", "_filled", "_frame", "_scratch", "_size", "bytes_max", "frames")

    def __init__(self, scratch: memoryview, budget: Budget, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.frames: deque[bytearray] = deque()
        self._scratch = scratch
        self._budget = budget
        self._frame = bytearray()
        # `_size` is -1 while fewer than the four bytes of a length are there, which then are in `_frame`.
        self._size = -1
        self._filled = 0

    @property
    def is_inside_frame(self) -> bool:
        """Say whether a frame has begun and not ended."""
        return self._filled > 0 or self._size >= 0

    def has_room(self) -> bool:
        """Say whether there is memory for what comes next."""
        if self._size < 0:
            return self._budget.fits(FRAME_OVERHEAD_BYTES)
        if self._filled < len(self._frame):
            return True  # It is there already.
        return self._budget.may_grow(len(self._frame), self._next_length() - len(self._frame))

    def buffer(self) -> memoryview:
        """Return where the next bytes go."""
        if self._size < 0:
            # The begun length, if any, goes in front of what follows it.
            self._scratch[: self._filled] = self._frame
            return self._scratch[self._filled :]
        self.reserve()
        return memoryview(self._frame)[self._filled :]

    def reserve(self) -> None:
        """Take the memory for what comes next at once, so that nobody else is promised it."""
        if self._size >= 0 and self._filled == len(self._frame):
            self._grow(self._next_length())

    def received(self, count: int) -> None:
        """Take note of `count` bytes written to the buffer; whole frames go to `frames`."""
        if self._size < 0:
            self._split(self._filled + count)
            return
        self._filled += count
        if self._filled == self._size:
            self.frames.append(self._frame)
            self._budget.take(FRAME_OVERHEAD_BYTES)
            self._budget.unfinished_bytes -= len(self._frame)
            self._start_over()

    def release(self) -> None:
        """Give back what the unfinished frame and the frames nobody took still hold."""
        unfinished_bytes = len(self._frame) if self._size >= 0 else 0
        held = unfinished_bytes + sum(held_bytes(frame) for frame in self.frames)
        self._start_over()
        self.frames.clear()
        self._budget.unfinished_bytes -= unfinished_bytes
        self._budget.give(held)

    def _split(self, end: int) -> None:
        """Copy the whole frames out of the scratch buffer, and begin a buffer of its own for the rest."""
        scratch, position = self._scratch, 0
        self._start_over()
        while end - position >= 4:
            size: int = _SIZE.unpack_from(scratch, position)[0]
            if not 0 <= size <= self.bytes_max:
                raise MalformedRequest(f"A request announces {size} bytes; up to {self.bytes_max} are read.")
            position += 4
            if end - position < size:
                self._begin(size, scratch[position:end])
                return
            frame = bytearray(scratch[position : position + size])
            self._budget.take(held_bytes(frame))
            self.frames.append(frame)
            position += size
        self._frame = bytearray(scratch[position:end])
        self._filled = end - position

    def _begin(self, size: int, first: memoryview) -> None:
        self._size = size
        self._filled = len(first)
        self._frame = bytearray(min(size, max(FIRST_BYTES, len(first))))
        self._frame[: len(first)] = first
        self._count(len(self._frame))

    def _next_length(self) -> int:
        return min(self._size, 4 * max(len(self._frame), FIRST_BYTES))

    def _grow(self, length: int) -> None:
        grown = bytearray(length)
        grown[: self._filled] = self._frame
        self._count(length - len(self._frame))
        self._frame = grown

    def _count(self, more: int) -> None:
        self._budget.take(more)
        self._budget.unfinished_bytes += more

    def _start_over(self) -> None:
        self._frame = bytearray()
        self._size = -1
        self._filled = 0


def held_bytes(frame: bytearray) -> int:
    """Return what a whole frame counts against the budget until its answer is ready."""
    return len(frame) + FRAME_OVERHEAD_BYTES
