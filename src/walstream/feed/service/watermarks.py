"""Watermarks: how far each subscriber has come, and how far all of them have.

Owns the fold over the records of the acknowledgements' topic, and who counts as active: whoever is connected to this
feed, or was heard of within the timeout, here or at another feed of the same log. Refuses to know where the records
come from. Sans-IO.

A subscriber is named within its role and tenant, so that no tenant can speak for another. What it has acknowledged
never goes back, whatever order records come in. Its place is what it has acknowledged; one that never did stands where
it was sent to.

What must be kept for a subscriber may be less than what is beyond its place: one that has acknowledged every entry that
it was sent needs nothing up to where it was sent everything, however long ago its last entry was. That LSN is kept in
the topic, too (`clean_lsn`), so that a tenant for which little happens does not lose its place to those with much.

And so is for which choice of entries that is true, and since where (`Covered`): who comes with another choice was sent
nothing of it, and must not be taken to have had everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from walstream.errors import TooManySubscriptions, UsageError
from walstream.positions import GlobalLsn

Kind = Literal["ack", "seen"]

NAME_CHARACTERS_MAX: Final = 255
SUBSCRIBERS_MAX: Final = 1_000
"""Of one role and tenant: they are remembered for good, so whoever invents names must find an end."""


class Subscriber(NamedTuple):
    """Whose acknowledgements count together."""

    role: str
    tenant: str
    name: str

    @classmethod
    def of(cls, role: str, tenant: str, name: str) -> Subscriber:
        """Check the name, which clients choose. Raises UsageError."""
        if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
            raise UsageError(
                "The subscriber id cannot be used.",
                f"It is a text of up to {NAME_CHARACTERS_MAX} printable characters.",
            )
        return cls(role, tenant, name)

    def key(self, kind: Kind) -> bytes:
        """Return the key of a record about it."""
        return json.dumps([kind, *self], ensure_ascii=False, separators=(",", ":")).encode()

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}" if self.tenant else self.name


class Covered(NamedTuple):
    """A stretch of the log of which a subscriber has had, and acknowledged, every entry of its choice."""

    choice: str = ""
    start: int = 0
    """The first LSN."""
    end: int = 0
    """The last one."""


class Standing:
    """Where a subscriber stands."""

    __slots__ = (
        "acked", "choices", "clean", "covered", "delivered", "has_lapsed", "heard_ms", "reached", "sent", "streams",
        "written",
    )  # fmt: skip

    def __init__(self) -> None:
        self.acked = 0
        """The largest LSN that it has acknowledged; 0: none."""
        self.written = 0
        """What the last record in the log says that it has acknowledged."""
        self.sent = 0
        """Up to where it was sent everything when it was last heard of."""
        self.reached = 0
        """The furthest that it was ever sent to from here."""
        self.delivered = 0
        """The largest LSN of an entry that it was sent, or may have been sent before this feed knew of it."""
        self.clean = 0
        """It was known to have acknowledged everything that there was for it up to here."""
        self.covered = Covered()
        self.heard_ms = 0
        self.streams: dict[int, int] = {}
        """Its streams here, and up to where each was sent everything."""
        self.choices: dict[int, str] = {}
        """Which entries each of them has chosen."""
        self.has_lapsed = False
        """Whether it held back too much, and holds back nothing until it is heard of again."""

    @property
    def place(self) -> int:
        """Return the LSN up to which it does not need anything any more."""
        return self.acked or min(self.streams.values(), default=self.sent)

    def settle(self) -> int:
        """Note and return the LSN up to which nothing needs to be kept for it."""
        if self.streams and self.acked >= self.delivered:
            self.clean = max(self.clean, min(self.streams.values()))
            if set(self.choices.values()) == {self.covered.choice}:
                self.covered = self.covered._replace(end=max(self.covered.end, self.clean))
        return max(self.place, self.clean)

    def begin(self, choice: str, position: int) -> None:
        """Hear that a stream with this choice of entries begins at a position."""
        if choice != self.covered.choice:
            self.covered = Covered(choice, position, max(position - 1, 0))


class Watermarks:
    """Everybody's standing."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._standings: dict[Subscriber, Standing] = {}

    def __len__(self) -> int:
        return len(self._standings)

    # The records of the topic

    def fold(self, key: bytes, value: bytes | None) -> Subscriber | None:
        """Take in a record; return whose it is, or None when it is none of ours."""
        try:
            kind, role, tenant, name = json.loads(key)
            subscriber = Subscriber(role, tenant, name)
            # What could not be written as a key is nobody's, and would be in the way when that is tried.
            if not all(isinstance(part, str) for part in subscriber) or not subscriber.key(kind):
                return None
            if value is None:
                if kind == "ack":
                    self._forget(subscriber)
                return subscriber
            document = json.loads(value)
            lsn, at_ms = GlobalLsn.parse(document["lsn"] or str(GlobalLsn(0))), int(document["time_ms"])
            is_active = bool(document.get("active", True))
            clean = GlobalLsn.parse(document.get("clean_lsn") or str(GlobalLsn(0)))
            choice, start, end = document.get("covered") or ("", str(GlobalLsn(0)), str(GlobalLsn(0)))
            covered = Covered(str(choice), GlobalLsn.parse(start), GlobalLsn.parse(end))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, UsageError):
            return None
        if kind not in ("ack", "seen"):
            return None
        standing = self._standings.setdefault(subscriber, Standing())
        if kind == "ack":
            standing.acked = max(standing.acked, lsn)
            standing.written = lsn
        else:
            standing.sent = lsn
            standing.clean = max(standing.clean, clean)
            if not standing.streams and at_ms >= standing.heard_ms:
                standing.covered = covered
        if at_ms >= standing.heard_ms:
            standing.heard_ms = at_ms
            standing.has_lapsed = not is_active
        return subscriber

    def _forget(self, subscriber: Subscriber) -> None:
        standing = self._standings.get(subscriber)
        if standing is None:
            return
        if standing.streams:
            # It is connected here, whoever forgot it: it stands where it was sent to, as one that is new.
            standing.acked = standing.written = standing.sent = standing.clean = 0
            standing.covered = Covered()
        else:
            del self._standings[subscriber]

    @staticmethod
    def record(
        lsn: int, at_ms: int, *, clean: int = 0, covered: Covered | None = None, is_active: bool = True
    ) -> bytes:
        """Return the value of a record."""
        document: dict[str, object] = {"lsn": str(GlobalLsn(lsn)) if lsn else "", "time_ms": at_ms}
        if clean:
            document["clean_lsn"] = str(GlobalLsn(clean))
        if covered is not None and covered.choice:
            document["covered"] = [covered.choice, str(GlobalLsn(covered.start)), str(GlobalLsn(covered.end))]
        if not is_active:
            document["active"] = False
        return json.dumps(document, separators=(",", ":")).encode()

    # What happens here

    def connect(self, subscriber: Subscriber, stream: int, position: int, now_ms: int, choice: str = "") -> None:
        """Hear that a stream of some choice of entries begins at a position: what is before it is not needed."""
        standing = self._standings.setdefault(subscriber, Standing())
        standing.heard_ms = now_ms
        standing.has_lapsed = False
        standing.begin(choice, position)
        standing.streams[stream], standing.choices[stream] = 0, choice
        # What is between its place and its start it may have been sent by another feed, and not acknowledged yet.
        is_new_to_us = position - 1 > max(standing.acked, standing.clean, standing.delivered)
        self.advance(subscriber, stream, position - 1, position - 1 if is_new_to_us else 0)

    def advance(self, subscriber: Subscriber, stream: int, sent: int, delivered: int = 0) -> None:
        """Hear that a stream was sent everything up to here, and up to which LSN there were entries in it."""
        standing = self._standings[subscriber]
        standing.streams[stream] = max(standing.streams[stream], sent)
        standing.reached = max(standing.reached, sent)
        standing.delivered = max(standing.delivered, delivered)

    def disconnect(self, subscriber: Subscriber, stream: int, now_ms: int) -> None:
        """Hear that a stream has ended."""
        standing = self._standings[subscriber]
        standing.settle()
        standing.sent = standing.streams.pop(stream)
        del standing.choices[stream]
        standing.heard_ms = max(standing.heard_ms, now_ms)

    def lapse(self, subscriber: Subscriber) -> None:
        """Let a subscriber hold back nothing any more."""
        self._standings[subscriber].has_lapsed = True

    def make_room(self, subscriber: Subscriber, now_ms: int) -> Subscriber | None:
        """Return whom to forget so that one more can be remembered, if need be. Raises TooManySubscriptions."""
        if subscriber in self._standings:
            return None
        like = [one for one in self._standings if (one.role, one.tenant) == (subscriber.role, subscriber.tenant)]
        if len(like) < SUBSCRIBERS_MAX:
            return None
        oldest = min(like, key=lambda one: (self.is_active(one, now_ms), self._standings[one].heard_ms))
        if self.is_active(oldest, now_ms):
            raise TooManySubscriptions(
                f"{SUBSCRIBERS_MAX} subscribers of this role and tenant are active.", "Use subscriber ids again."
            )
        return oldest

    # What is asked

    def acked(self, subscriber: Subscriber) -> int:
        """Return what a subscriber has acknowledged; 0: nothing."""
        standing = self._standings.get(subscriber)
        return standing.acked if standing else 0

    def is_stale(self, subscriber: Subscriber) -> bool:
        """Say whether the last record in the log is behind an earlier one, which then must be written again."""
        standing = self._standings.get(subscriber)
        return standing is not None and standing.written < standing.acked

    def ceiling(self, subscriber: Subscriber) -> int | None:
        """Return up to where a subscriber that is connected here was sent everything; None: it is not."""
        standing = self._standings.get(subscriber)
        return max(standing.reached, standing.acked) if standing and standing.streams else None

    def is_active(self, subscriber: Subscriber, now_ms: int) -> bool:
        """Say whether a subscriber counts."""
        standing = self._standings.get(subscriber)
        if standing is None or standing.has_lapsed:
            return False
        return bool(standing.streams) or now_ms - standing.heard_ms < self._timeout_ms

    def active(self, now_ms: int, tenant: str | None = None) -> Iterator[tuple[Subscriber, int]]:
        """Yield the active subscribers of a tenant (None: all) and where each stands."""
        for subscriber, standing in self._standings.items():
            if (tenant is None or subscriber.tenant == tenant) and self.is_active(subscriber, now_ms):
                yield subscriber, standing.place

    def done(self, subscriber: Subscriber) -> int:
        """Return the LSN up to which nothing needs to be kept for a subscriber; 0: nothing is known of it."""
        standing = self._standings.get(subscriber)
        return standing.settle() if standing else 0

    def covered(self, subscriber: Subscriber) -> Covered:
        """Return of which stretch of the log a subscriber is known to have had everything that it chose."""
        standing = self._standings.get(subscriber)
        if standing is None:
            return Covered()
        standing.settle()
        return standing.covered

    def needed_from(self, now_ms: int) -> int | None:
        """Return the smallest LSN up to which an active subscriber needs nothing; None: there are none."""
        return min((self.done(subscriber) for subscriber, _ in self.active(now_ms)), default=None)

    def watermark(self, now_ms: int, tenant: str | None = None) -> int | None:
        """Return the smallest place of all active subscribers of a tenant (None: all); None: there are none."""
        return min((place for _, place in self.active(now_ms, tenant)), default=None)

    def connected(self) -> Iterator[tuple[Subscriber, int]]:
        """Yield who is connected here, and up to where each was sent everything."""
        for subscriber, standing in self._standings.items():
            if standing.streams:
                yield subscriber, min(standing.streams.values())

    def silence_ms(self, subscriber: Subscriber, now_ms: int) -> int:
        """Return for how long a subscriber that is not connected here has not been heard of."""
        standing = self._standings[subscriber]
        return 0 if standing.streams else now_ms - standing.heard_ms
