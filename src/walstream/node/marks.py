"""Who is to be called at the end of a turn, and in which order: the same in a node and in the simulator.

Whatever happens to a partition, a link or a connection only marks it, and each marked one is called once. So a thousand
appends make one frame, a thousand acknowledgements one write, and neither the cost of replication nor that of answering
grows with the number of requests. Knows no clock and no event loop.

The order: first the clients, whose answers are ready; then the own disk begins with the writes of the turn; then the
partitions' cores decide what followers are sent; then the links send, all of them before any core hears of it, because
no disk waits for that. If somebody waits for the followers, the own disk begins when they have been sent to: theirs has
the longer way, and on its way shares the processors with the flush.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

ROUNDS_MAX = 4
"""How often in one turn those are called again who were marked by others in it; then whatever else there is has its
turn."""


class Connection(Protocol):
    """A client's connection, as it is called here."""

    def send_filled(self) -> None:
        """Send the answers that are ready."""


class Partition(Protocol):
    """A partition's core, as it is called here."""

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for followers to have what was appended in this turn."""

    def look(self) -> None:
        """See what has happened since the last turn."""

    def looked(self) -> None:
        """Hear that the links have sent what came of it, as far as they could."""


class Link(Protocol):
    """A link, as it is called here."""

    def serve(self) -> None:
        """Send what waits."""

    def served(self) -> None:
        """Hear that every link has sent what waited: tell what was sent here."""


class Writes(Protocol):
    """The writes that have gathered for the own disk."""

    def release(self) -> None:
        """Let the disk begin."""


Call = Callable[[Callable[[], None]], None]


class Marks:
    """Those who were marked. `call` calls one of them; what it raises, `run` does."""

    __slots__ = ("_call", "_connections", "_links", "_partitions", "_writes")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._connections: dict[Connection, None] = {}
        self._partitions: list[Partition] = []
        self._links: dict[Link, None] = {}
        self._writes: Writes | None = None

    def __bool__(self) -> bool:
        return bool(self._writes is not None or self._connections or self._partitions or self._links)

    def mark_connection(self, connection: Connection) -> None:
        """Call a connection."""
        self._connections[connection] = None

    def mark(self, partition: Partition) -> None:
        """Call a partition. It marks itself once."""
        self._partitions.append(partition)

    def mark_link(self, link: Link) -> None:
        """Call a link."""
        self._links[link] = None

    def mark_writes(self, writes: Writes) -> None:
        """Let the disk begin with what has gathered."""
        self._writes = writes

    def _release(self) -> None:
        if self._writes is not None:
            writes, self._writes = self._writes, None
            self._call(writes.release)

    def run(self) -> None:
        """Call those who are marked; some may be left, who were marked meanwhile."""
        call, looked = self._call, []
        for _ in range(ROUNDS_MAX):
            if self._connections:
                connections, self._connections = self._connections, {}
                for connection in connections:
                    call(connection.send_filled)
            partitions, self._partitions = self._partitions, []
            if not any(partition.is_awaited for partition in partitions):
                self._release()
            looked += partitions
            for partition in partitions:
                call(partition.look)
            links, self._links = self._links, {}
            for link in links:
                call(link.serve)
            self._release()
            for link in links:
                call(link.served)
            if not self:
                break
        for partition in looked:
            partition.looked()
