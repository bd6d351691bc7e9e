"""Incremental fetch sessions (KIP-227): a client names its partitions once and then only what has changed.

Pure: time and randomness are arguments. A session remembers which partitions are wanted and what was last said about
each, so that a response holds only partitions with records, an error or a moved watermark. Requests of a session carry
a running epoch; one out of order, or of a session that is gone, is answered with an error that makes the client begin
anew with a full fetch. So a session may be dropped at any time: it saves bytes, correctness never rests on it.

Sessions and the partitions in them are bounded. A new one takes the place of the one longest unused, if that has been
idle for a while; otherwise the client is told that there is no session and sends full fetches.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

SESSION_NOT_FOUND = 70
INVALID_SESSION_EPOCH = 71

NO_SESSION = 0
FIRST_EPOCH = 0
FINAL_EPOCH = -1
EPOCH_MAX = 2**31 - 1

EVICTABLE_AFTER_MS = 120_000
"""A session that was used more recently is not given up for a new one, or busy clients would evict each other."""

PARTITIONS_MAX = 200_000
"""Partitions in all sessions together, at about 0.3 KB each."""

Key: TypeAlias = tuple[str | uuid.UUID, int]
"""A partition as the client names it: its topic, by name or by id, and its index."""


@dataclass(slots=True)
class Wanted:
    """A partition that a client wants to read, from where, and what it was last told about it."""

    topic: str | uuid.UUID
    partition: int
    leader_epoch: int
    offset: int
    bytes_max: int
    told: tuple[int, int] | None = None
    """High watermark and log start of the last response; None: it has to hear of the partition in any case."""

    @property
    def key(self) -> Key:
        """Return what names the partition."""
        return self.topic, self.partition


@dataclass(slots=True)
class Session:
    """One client's partitions. `turn` is where its next fetch begins among them, so that each has its turn first."""

    id: int
    epoch: int
    used_ms: int
    wanted: dict[Key, Wanted] = field(default_factory=dict)
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What a fetch request comes down to: what to read, in which session, and whether to pass over the unchanged."""

    error_code: int = 0
    session: Session | None = None
    wanted: Sequence[Wanted] = ()
    is_incremental: bool = False

    @property
    def session_id(self) -> int:
        """Return the session id for the response."""
        return self.session.id if self.session else NO_SESSION


class Sessions:
    """All fetch sessions of a node."""

    def __init__(self, sessions_max: int, random_id: Callable[[], int]) -> None:
        self._sessions_max = sessions_max
        self._random_id = random_id
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self.partitions = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self,
        session_id: int,
        epoch: int,
        wanted: Sequence[Wanted],
        forgotten: Iterable[Key],
        now_ms: int,
    ) -> Turn:
        """Take a fetch request and say what is to be read."""
        if epoch in (FIRST_EPOCH, FINAL_EPOCH):
            self._remove(session_id)
            session = self._create(wanted, now_ms) if epoch == FIRST_EPOCH else None
            return Turn(session=session, wanted=wanted)
        session = self._sessions.get(session_id)
        if session is None:
            return Turn(error_code=SESSION_NOT_FOUND)
        if epoch != session.epoch:
            return Turn(error_code=INVALID_SESSION_EPOCH)
        if not self._update(session, wanted, forgotten):
            return Turn(error_code=SESSION_NOT_FOUND)
        session.epoch = epoch % EPOCH_MAX + 1
        session.used_ms = now_ms
        self._sessions.move_to_end(session_id)
        return Turn(session=session, wanted=tuple(session.wanted.values()), is_incremental=True)

    def _create(self, wanted: Sequence[Wanted], now_ms: int) -> Session | None:
        if not self._make_room(len(wanted), now_ms):
            return None
        session_id = self._random_id()
        while session_id in self._sessions or session_id == NO_SESSION:
            session_id = self._random_id()
        session = Session(session_id, FIRST_EPOCH + 1, now_ms, {one.key: one for one in wanted})
        self._sessions[session_id] = session
        self.partitions += len(session.wanted)
        return session

    def _make_room(self, partitions: int, now_ms: int) -> bool:
        if self._sessions_max == 0 or partitions > PARTITIONS_MAX:
            return False
        while len(self._sessions) >= self._sessions_max or self.partitions + partitions > PARTITIONS_MAX:
            oldest = next(iter(self._sessions.values()))
            if now_ms - oldest.used_ms < EVICTABLE_AFTER_MS:
                return False
            self._remove(oldest.id)
            self.evictions += 1
        return True

    def _update(self, session: Session, wanted: Sequence[Wanted], forgotten: Iterable[Key]) -> bool:
        """Add, change and remove partitions. False: there is no room for so many, and the session is gone."""
        self.partitions -= len(session.wanted)
        for key in forgotten:
            session.wanted.pop(key, None)
        for one in wanted:
            before = session.wanted.get(one.key)
            if before is not None:
                one.told = before.told
            session.wanted[one.key] = one
        self.partitions += len(session.wanted)
        if self.partitions > PARTITIONS_MAX:
            self._remove(session.id)
            return False
        return True

    def _remove(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.partitions -= len(session.wanted)
