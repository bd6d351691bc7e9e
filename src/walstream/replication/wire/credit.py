"""How many bytes of batches may be under way on a link: granted by the follower, spent by the leader.

Both sides count sums from the link's beginning, and only one invariant is needed:

    released ≤ received ≤ sent ≤ granted ≤ released + max(window, what was needed)

so what a leader has under way, and what a follower holds that its log has not let go of, is at most the window. A
batch larger than the window is the exception that the follower allows by name: the leader says what it needs, and is
granted that much and no more. It says so again after each frame that it sends instead, because a frame that arrives
ends what was said before it.

The follower grants anew when half the window has been let go of since the last grant (the low watermark), or when the
leader says that it waits; so grants are few, and a leader that is not short of credit hears none. A grant is a sum: a
repeated one grants nothing. Each DATA says the leader's sum, so bytes that never arrive do not leak: what a later
frame's position jumps over is counted as let go.
"""

from __future__ import annotations

from walstream.errors import CreditExceeded
from walstream.replication.messages import Credit, CreditNeeded


class SpentCredit:
    """The leader's side."""

    __slots__ = ("asked_bytes", "granted_bytes", "sent_bytes")

    def __init__(self, window_bytes: int) -> None:
        self.granted_bytes = window_bytes
        self.sent_bytes = 0
        self.asked_bytes = 0
        """What was asked for with CREDIT_NEEDED since the last frame; 0 for nothing."""

    @property
    def available_bytes(self) -> int:
        """How much may be sent now."""
        return self.granted_bytes - self.sent_bytes

    def take(self, size: int) -> int:
        """Spend credit for a frame that is sent now, and return the position to write into it."""
        assert size <= self.granted_bytes - self.sent_bytes, "data sent without credit"
        self.sent_bytes += size
        self.asked_bytes = 0
        return self.sent_bytes

    def ask(self, size: int) -> CreditNeeded | None:
        """Return what to tell the follower when a frame of `size` bytes cannot be sent; None if it was told already."""
        if size <= self.granted_bytes - self.sent_bytes or self.asked_bytes >= size:
            return None
        self.asked_bytes = size
        return CreditNeeded(size)

    def granted(self, credit: Credit) -> bool:
        """Take note of a grant; say whether it gave anything."""
        if credit.limit_bytes <= self.granted_bytes:
            return False
        self.granted_bytes = credit.limit_bytes
        return True


class GrantedCredit:
    """The follower's side."""

    __slots__ = (
        "_needed_bytes",
        "granted_bytes",
        "needed_bytes_max",
        "received_bytes",
        "released_bytes",
        "window_bytes",
    )

    def __init__(self, window_bytes: int, needed_bytes_max: int) -> None:
        self.window_bytes = window_bytes
        self.needed_bytes_max = needed_bytes_max
        self.granted_bytes = window_bytes
        self.received_bytes = 0
        self.released_bytes = 0
        self._needed_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What was received and not let go of."""
        return self.received_bytes - self.released_bytes

    @property
    def frame_bytes_max(self) -> int:
        """How many bytes of batches one frame may have: what may be under way."""
        return max(self.window_bytes, self.granted_bytes - self.received_bytes)

    def arrived(self, position: int, size: int) -> None:
        """Count a DATA frame in. Raises CreditExceeded.

        One that comes again, or late, was measured by what was granted then; nobody holds it.
        """
        received = self.received_bytes
        is_new = position > received
        if (
            position > self.granted_bytes
            or size > position
            or (is_new and size > self.window_bytes and size > self.frame_bytes_max)
        ):
            raise CreditExceeded(
                f"The leader has sent {position} bytes of data, the last {size} in one frame, and was granted "
                f"{self.granted_bytes}."
            )
        if is_new:
            if position - size > received:
                # What lies between never came, and nobody holds it.
                self.released_bytes += position - size - received
            self.received_bytes = position
        self._needed_bytes = 0

    def released(self, size: int) -> Credit | None:
        """Count bytes out that the log has let go of; return a grant if one is due.

        A frame that came twice is let go of twice; it never makes room for more than was ever received.
        """
        self.released_bytes = min(self.released_bytes + size, self.received_bytes)
        return self._grant()

    def needed(self, message: CreditNeeded) -> Credit | None:
        """Hear that the leader waits; return a grant if there is room. Raises CreditExceeded."""
        if message.bytes_count > self.needed_bytes_max:
            raise CreditExceeded(
                f"The leader wants to send {message.bytes_count} bytes in one frame; up to {self.needed_bytes_max} "
                "are taken."
            )
        self._needed_bytes = message.bytes_count
        return self._grant()

    def _grant(self) -> Credit | None:
        limit = self.released_bytes + max(self.window_bytes, self._needed_bytes)
        gain = limit - self.granted_bytes
        if gain <= 0 or (not self._needed_bytes and gain < self.window_bytes // 2):
            return None
        self.granted_bytes = limit
        return Credit(limit)
