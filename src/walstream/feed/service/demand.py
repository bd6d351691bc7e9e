"""What a subscriber asks for: a SubscribeRequest, understood and held against the rights of whoever sent it.

Owns the meaning of the request's fields and their limits; refuses to know the log. What a demand holds is allowed: its
filter has the tenant that the token may read, whatever the request said. Sans-IO.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

from walstream.config import FeedConfig
from walstream.errors import UsageError
from walstream.feed import wal_pb2
from walstream.feed.auth.identity import Identity
from walstream.feed.reading.frames import Filter
from walstream.feed.service.batching import BATCH_BYTES_MAX, ENTRY_BYTES_MAX, MESSAGE_OVERHEAD_BYTES, Limits
from walstream.feed.service.resume import position_of
from walstream.feed.service.send_queue import Bounds
from walstream.feed.service.watermarks import Subscriber
from walstream.positions import GlobalLsn

Begin = Literal["acked", "oldest", "head"]

CREDIT_ENTRIES_MAX: Final = 100_000
"""The LSN of each entry that is ahead of the last acknowledgement is kept, in 56 bytes: not more than 6 MB a stream."""

MESSAGE_BYTES_MIN: Final = 4_096
"""Below this not even small rows would fit."""

KEY_PREFIX_CHARACTERS_MAX: Final = 4_096

TOPICS_BYTES_MAX: Final = 16_384
"""Of all patterns together, as UTF-8."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A subscription that may be had."""

    subscriber: Subscriber
    begin: Begin | int
    """The first LSN that is wanted, or in a word which one that is."""
    entries: Filter
    limits: Limits
    credit: int
    compressions: frozenset[int]
    wants_watermarks: bool
    framing: int
    capture: str

    @classmethod
    def of(cls, request: wal_pb2.SubscribeRequest, identity: Identity, config: FeedConfig) -> Demand:
        """Understand a request. Raises UsageError, NotAuthorized."""
        tenant = identity.may_read(request.tenant_filter)
        is_all = identity.role == "admin" and not tenant
        name = request.subscriber_id or identity.subject
        return cls(
            subscriber=Subscriber.of(identity.role, identity.tenant, name),
            begin=_begin(request),
            entries=Filter(None if is_all else tenant.encode(), _key_prefix(request), _topics(request)),
            limits=_limits(request, config),
            credit=_credit(request),
            compressions=frozenset(request.accept_compression),
            wants_watermarks=request.accept_watermarks,
            framing=request.framing,
            capture=request.capture,
        )

    @property
    def choice(self) -> str:
        """A short name of what was chosen: of another choice the subscriber was sent other entries."""
        entries = self.entries
        chosen = (self.framing, self.capture, entries.tenant, entries.key_prefix, entries.topics)
        return hashlib.blake2b(repr(chosen).encode(), digest_size=12).hexdigest()

    def bounds(self, config: FeedConfig) -> Bounds:
        """Return the bounds of its queue."""
        return Bounds(
            entries_max=config.queue_entries_max,
            bytes_max=config.queue_bytes_max,
            coalesce_s=config.coalesce_ms / 1000,
            timeout_s=config.backpressure_timeout_ms / 1000,
            credit=self.credit,
        )


def _begin(request: wal_pb2.SubscribeRequest) -> Begin | int:
    if request.resume_token:
        if request.start_lsn:
            raise UsageError("start_lsn and resume_token contradict each other.", "Send one of them.")
        return position_of(request.resume_token)
    match request.start_lsn:
        case "":
            return "acked"
        case "head":
            return "head"
        case "oldest":
            return "oldest"
    return int(GlobalLsn.parse(request.start_lsn))


def _key_prefix(request: wal_pb2.SubscribeRequest) -> bytes:
    if len(request.key_prefix_filter) > KEY_PREFIX_CHARACTERS_MAX:
        raise UsageError(f"key_prefix_filter has more than {KEY_PREFIX_CHARACTERS_MAX} characters.")
    return request.key_prefix_filter.encode()


def _topics(request: wal_pb2.SubscribeRequest) -> tuple[str, ...]:
    # One more for each, so that many short ones count, too.
    if sum(len(one.encode()) + 1 for one in request.topics) > TOPICS_BYTES_MAX:
        raise UsageError(f"topics have more than {TOPICS_BYTES_MAX} bytes.", "`*` stands for any text.")
    # In one order, so that those who ask for the same share what is sent to them.
    return tuple(sorted({topic for topic in request.topics if topic}))


def _limits(request: wal_pb2.SubscribeRequest, config: FeedConfig) -> Limits:
    entries_max = min(request.batch_size_hint or config.batch_entries_max, config.batch_entries_max)
    message_bytes_max = request.message_bytes_max or ENTRY_BYTES_MAX + MESSAGE_OVERHEAD_BYTES
    if message_bytes_max < MESSAGE_BYTES_MIN:
        raise UsageError(f"message_bytes_max is less than {MESSAGE_BYTES_MIN}.")
    room = min(message_bytes_max - MESSAGE_OVERHEAD_BYTES, ENTRY_BYTES_MAX)
    return Limits(entries_max, min(BATCH_BYTES_MAX, room), room, keeps_lsns=request.credit_entries > 0)


def _credit(request: wal_pb2.SubscribeRequest) -> int:
    if request.credit_entries > CREDIT_ENTRIES_MAX:
        raise UsageError(
            f"credit_entries is more than {CREDIT_ENTRIES_MAX}.", "0 lets the stream take as many as it can."
        )
    return request.credit_entries
