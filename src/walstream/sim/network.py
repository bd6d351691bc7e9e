"""Connections between simulated nodes, and everything that goes wrong with them.

A connection carries frames, that is, the bytes a node handed over at once, in both directions. Unless told otherwise
it behaves as TCP does: in order, nothing lost while it stands; what a partition holds up arrives after it heals, or
the connection breaks; a side that cannot be reached hears of nothing, however long it waits.

Beyond TCP, a run may lose, repeat or overtake single frames, because the protocol above promises to notice. A
connection that lost a frame breaks some time later, as a real one would: the bytes it owes never come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from walstream.sim.clock import MS, SECOND, Clock

GIVE_UP_US = 12 * SECOND
"""A sender whose bytes are not confirmed for so long gives the connection up."""

BREAK_AFTER_LOSS_US = (100 * MS, 4 * SECOND)


@dataclass(slots=True)
class Weather:
    """How bad the network is at the moment."""

    delay_us: tuple[int, int] = (50, 1_500)
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    splitting: float = 0.0
    """How often a frame arrives in two pieces."""


class Endpoint:
    """One side of a connection, as its node has it."""

    __slots__ = (
        "_arrives_us",
        "_held",
        "_network",
        "_other",
        "heard_closed",
        "is_closed",
        "local",
        "received",
        "remote",
    )

    def __init__(self, network: Network, local: int, remote: int) -> None:
        self._network = network
        self._other: Endpoint
        self._arrives_us = 0
        """When the last frame sent from here arrives: none overtakes it, except by a fault."""
        self._held: list[bytes | None] = []
        """Frames, or the end (None), that a partition holds up on their way from here."""
        self.local = local
        self.remote = remote
        self.is_closed = False
        self.received: Callable[[bytes], None] = _ignore
        self.heard_closed: Callable[[], None] = _nothing

    def send(self, frame: bytes) -> None:
        """Hand over some bytes. Sending into a broken connection is no error: the news is on its way."""
        if not self.is_closed:
            self._network.carry(self, frame)

    def close(self) -> None:
        """Close this side; the other hears of it after everything that was sent."""
        if not self.is_closed:
            self.is_closed = True
            self._network.carry(self, None)

    def vanish(self) -> None:
        """The process is gone without a word. The other side's next frame is answered with a reset."""
        self.is_closed = True
        self.received, self.heard_closed = _ignore, _nothing
        self._network.reset(self._other)


@dataclass(slots=True)
class Counters:
    """Plain numbers about what was done to frames."""

    frames: int = 0
    bytes: int = 0
    lost: int = 0
    repeated: int = 0
    overtaken: int = 0
    broken: int = 0


@dataclass(slots=True)
class Network:
    """Every connection there is."""

    clock: Clock
    weather: Weather = field(default_factory=Weather)
    counters: Counters = field(default_factory=Counters)
    _cut: dict[tuple[int, int], int] = field(default_factory=dict)
    """(from, to) → since when nothing gets through that way."""
    _listeners: dict[int, Callable[[Endpoint], None]] = field(default_factory=dict)
    _endpoints: list[Endpoint] = field(default_factory=list)

    # ── connecting ───────────────────────────────────────────────────────────────────────────────────────────────

    def listen(self, node: int, accepted: Callable[[Endpoint], None]) -> None:
        """Take connections for a node."""
        self._listeners[node] = accepted

    def silence(self, node: int) -> None:
        """Take no more connections for a node."""
        self._listeners.pop(node, None)

    def connect(self, source: int, target: int, done: Callable[[Endpoint | None], None]) -> None:
        """Connect; `done` hears the endpoint, or None after a while."""
        if not self.is_reachable(source, target) or not self.is_reachable(target, source):
            self.clock.after(self.clock.between(500 * MS, 3 * SECOND), partial(done, None))
            return
        self.clock.after(self._delay() + self._delay(), partial(self._connected, source, target, done))

    def _connected(self, source: int, target: int, done: Callable[[Endpoint | None], None]) -> None:
        accepted = self._listeners.get(target)
        if accepted is None or not self.is_reachable(source, target):
            done(None)
            return
        near, far = Endpoint(self, source, target), Endpoint(self, target, source)
        near._other, far._other = far, near
        self._endpoints = [endpoint for endpoint in self._endpoints if not endpoint.is_closed]
        self._endpoints += (near, far)
        accepted(far)
        done(near)

    # ── carrying ─────────────────────────────────────────────────────────────────────────────────────────────────

    def carry(self, sender: Endpoint, frame: bytes | None) -> None:
        """Bring a frame, or the news of the end (None), to the other side."""
        self.counters.frames += 1
        if not self.is_reachable(sender.local, sender.remote):
            sender._held.append(frame)
            return
        if frame is not None:
            self.counters.bytes += len(frame)
            if self._is_spoiled(sender, frame):
                return
        self._deliver_in_order(sender, frame)

    def _deliver_in_order(self, sender: Endpoint, frame: bytes | None) -> None:
        clock = self.clock
        sender._arrives_us = max(sender._arrives_us, clock.now_us + self._delay())
        if frame is not None and self.weather.splitting and len(frame) > 1 and clock.chance(self.weather.splitting):
            middle = clock.between(1, len(frame) - 1)
            clock.after(sender._arrives_us - clock.now_us, partial(self._arrive, sender, frame[:middle]))
            frame = frame[middle:]
            sender._arrives_us += 1
        clock.after(sender._arrives_us - clock.now_us, partial(self._arrive, sender, frame))

    def _is_spoiled(self, sender: Endpoint, frame: bytes) -> bool:
        """Lose, repeat or delay a frame, as the weather has it; True if it is not to be delivered as usual."""
        weather, clock = self.weather, self.clock
        if weather.loss and clock.chance(weather.loss):
            self.counters.lost += 1
            clock.after(clock.between(*BREAK_AFTER_LOSS_US), partial(self.break_off, sender))
            return True
        if weather.duplication and clock.chance(weather.duplication):
            self.counters.repeated += 1
            clock.after(self._delay() + self._delay(), partial(self._arrive, sender, frame))
        if weather.reordering and clock.chance(weather.reordering):
            self.counters.overtaken += 1
            clock.after(self._delay() + clock.between(0, 20 * MS), partial(self._arrive, sender, frame))
            return True
        return False

    def _arrive(self, sender: Endpoint, frame: bytes | None) -> None:
        receiver = sender._other
        if receiver.is_closed:
            if frame is not None:
                self.reset(sender)
            return
        if not self.is_reachable(sender.local, sender.remote):
            sender._held.append(frame)
        elif frame is None:
            self._close(receiver)
        else:
            receiver.received(frame)

    def _close(self, endpoint: Endpoint) -> None:
        """Tell a side that its connection is gone."""
        if not endpoint.is_closed:
            endpoint.is_closed = True
            endpoint.heard_closed()

    def reset(self, endpoint: Endpoint) -> None:
        """Tell a side, if it can be reached, that nobody is at the other end any more."""

        def arrive() -> None:
            if self.is_reachable(endpoint.remote, endpoint.local):
                self._close(endpoint)

        if not endpoint.is_closed:
            self.clock.after(self._delay(), arrive)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def is_reachable(self, source: int, target: int) -> bool:
        """Whether frames get from one node to another."""
        return not self._cut or (source, target) not in self._cut

    def cut(self, source: int, target: int) -> None:
        """Let nothing through in one direction."""
        if (source, target) not in self._cut:
            self._cut[source, target] = self.clock.now_us
            self.clock.after(GIVE_UP_US, partial(self._give_up, source, target, self.clock.now_us))

    def heal(self) -> None:
        """Let everything through again; what was held up arrives, in order."""
        self._cut.clear()
        for endpoint in self._endpoints:
            held, endpoint._held = endpoint._held, []
            for frame in held:
                self._deliver_in_order(endpoint, frame)
            if not endpoint.is_closed and endpoint._other.is_closed:
                self.reset(endpoint)

    def _give_up(self, source: int, target: int, since_us: int) -> None:
        """Break, on their senders' side, the connections that could not send for too long."""
        if self._cut.get((source, target)) != since_us:
            return
        for endpoint in list(self._endpoints):
            if endpoint.local == source and endpoint.remote == target and endpoint._held:
                endpoint._held.clear()
                self._close(endpoint)

    def break_off(self, endpoint: Endpoint) -> None:
        """Break a connection: each side hears of it by itself, if it can be reached."""
        if endpoint.is_closed and endpoint._other.is_closed:
            return
        self.counters.broken += 1
        for side in (endpoint, endpoint._other):
            if not side.is_closed:
                self.clock.after(self._delay(), partial(self._close, side))

    def endpoints(self) -> list[Endpoint]:
        """Return the sides of all connections that stand."""
        self._endpoints = [endpoint for endpoint in self._endpoints if not endpoint.is_closed]
        return list(self._endpoints)

    def _delay(self) -> int:
        return self.clock.between(*self.weather.delay_us)


def _ignore(_: bytes) -> None:
    """Take bytes for a process that is gone."""


def _nothing() -> None:
    """Take the news of an end for a process that is gone."""
