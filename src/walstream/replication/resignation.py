"""A node that the record calls leader, and that cannot lead: it says so until it is heard.

Owns when `Resign` is said again. Saying it once is not enough: the service may be away, or the request may be lost,
while the node's lease lives on and nobody is elected in its place. Sans-IO.
"""

from __future__ import annotations

from walstream.replication.context import NEVER, Context
from walstream.replication.effects import Resign


class Resignation:
    """What is to be said until the record names somebody else, or this node in an epoch that it can lead."""

    __slots__ = ("_ctx", "_reason", "_said_at_ms", "deadline_ms")

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._reason = ""
        self._said_at_ms = -NEVER
        self.deadline_ms = NEVER

    def say(self, epoch: int, reason: str, now_ms: int) -> None:
        """Ask for another leader, now and again; but nodes of which none can lead do not chase each other."""
        self._reason = reason
        pause_ms = self._ctx.settings.retry_ms
        if now_ms >= self._said_at_ms + pause_ms:
            self._said_at_ms = now_ms
            self._ctx.out.append(Resign(epoch, reason))
        self.deadline_ms = self._said_at_ms + pause_ms

    def tick(self, unled_epoch: int | None, now_ms: int) -> None:
        """Say it again if the record still gives this node an epoch that it does not lead."""
        if now_ms < self.deadline_ms:
            return
        self.deadline_ms = NEVER
        if unled_epoch is not None:
            self.say(unled_epoch, self._reason, now_ms)
