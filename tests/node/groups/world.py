"""A coordinator with a clock that the test moves, and members that say one thing at a time."""

from __future__ import annotations

import struct
from itertools import count

from walstream.errors import RequestError
from walstream.node.groups.coordinator import Coordinator
from walstream.node.groups.events import (
    Alive,
    Answer,
    Effect,
    GroupLimits,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Leaver,
    Left,
    Moved,
    Refused,
    Request,
    Respond,
    Sync,
    Synced,
)

SESSION_MS = 10_000
REBALANCE_MS = 60_000


def subscription(*topics: str) -> bytes:
    """Return a consumer's protocol metadata, version 0, as real clients write it."""
    encoded = b"".join(struct.pack(">h", len(topic.encode())) + topic.encode() for topic in topics)
    return struct.pack(">hi", 0, len(topics)) + encoded + struct.pack(">i", -1)


class World:
    """The coordinator of one test."""

    def __init__(self, limits: GroupLimits | None = None) -> None:
        ids = count(1)
        self.now_ms = 1_000_000
        self.coordinator = Coordinator(limits or GroupLimits(join_delay_ms=0), lambda: str(next(ids)))
        self.answers: dict[int, Answer] = {}
        self.moves: list[Moved] = []
        self._tokens = count(1)

    def send(self, request: Request) -> int:
        token = next(self._tokens)
        self.take(self.coordinator.handle(token, request, self.now_ms))
        return token

    def ask(self, request: Request) -> Answer:
        """Send what must be answered at once."""
        token = self.send(request)
        assert token in self.answers, "the request waits"
        return self.answers[token]

    def hang_up(self, token: int) -> None:
        self.take(self.coordinator.abandon(token, self.now_ms))

    def pass_ms(self, duration_ms: int) -> None:
        """Let time pass, waking the coordinator whenever it asked to be woken."""
        end_ms = self.now_ms + duration_ms
        while (deadline_ms := self.coordinator.next_deadline_ms) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            self.take(self.coordinator.tick(self.now_ms))
        self.now_ms = end_ms

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Respond):
                assert effect.token not in self.answers, "answered twice"
                self.answers[effect.token] = effect.answer
            else:
                self.moves.append(effect)

    def waits(self, token: int) -> bool:
        return token not in self.answers

    def state(self, group_id: str = "g") -> str:
        return self.coordinator.groups[group_id].state.value

    def generation(self, group_id: str = "g") -> int:
        return self.coordinator.groups[group_id].generation


class Client:
    """A member as its client library sees it."""

    def __init__(self, world: World, name: str, *, instance_id: str | None = None, **options: object) -> None:
        self.world = world
        self.name = name
        self.instance_id = instance_id
        self.member_id = ""
        self.generation = -1
        self.token = 0
        self.options = options

    def join(self, **changes: object) -> Client:
        """Send a join, twice where the first only brings the id, and leave it waiting if it waits."""
        values: dict[str, object] = {
            "group_id": "g",
            "member_id": self.member_id,
            "instance_id": self.instance_id,
            "client_id": self.name,
            "client_host": "127.0.0.1",
            "protocol_type": "consumer",
            "protocols": (("range", subscription("t")),),
            "session_timeout_ms": SESSION_MS,
            "rebalance_timeout_ms": REBALANCE_MS,
            "must_know_id": True,
            "can_skip_assignment": True,
        }
        values |= self.options | changes
        self.token = self.world.send(Join(**values))  # type: ignore[arg-type]
        answer = self.world.answers.get(self.token)
        if isinstance(answer, Refused) and answer.member_id:
            self.member_id = answer.member_id
            self.token = self.world.send(Join(**{**values, "member_id": self.member_id}))  # type: ignore[arg-type]
        return self

    @property
    def waits(self) -> bool:
        return self.world.waits(self.token)

    @property
    def answer(self) -> Answer:
        return self.world.answers[self.token]

    @property
    def error(self) -> RequestError | None:
        """The error of the last answer."""
        return self.answer.error if isinstance(self.answer, Refused) else None

    @property
    def joined(self) -> Joined:
        """Take in the answer to the last join."""
        answer = self.answer
        assert isinstance(answer, Joined), answer
        self.member_id, self.generation = answer.member_id, answer.generation
        return answer

    def sync(self) -> Client:
        return self.sync_ids({})

    def sync_ids(self, assignments: dict[str, bytes]) -> Client:
        self.token = self.world.send(
            Sync("g", self.member_id, self.instance_id, self.generation, "consumer", None, tuple(assignments.items()))
        )
        return self

    @property
    def share(self) -> bytes:
        """The assignment in the answer to a sync."""
        answer = self.answer
        assert isinstance(answer, Synced), answer
        return answer.assignment

    def beat(self) -> RequestError | None:
        answer = self.world.ask(Heartbeat("g", self.member_id, self.instance_id, self.generation))
        assert isinstance(answer, Alive | Refused)
        return answer.error if isinstance(answer, Refused) else None

    def leave(self) -> RequestError | None:
        answer = self.world.ask(Leave("g", (Leaver(self.member_id, self.instance_id),)))
        assert isinstance(answer, Left)
        return answer.errors[0]

    def commit_error(self) -> RequestError | None:
        try:
            self.world.coordinator.check_commit(
                "g", self.member_id, self.instance_id, self.generation, self.world.now_ms
            )
        except RequestError as error:
            return error
        return None


def settle(*clients: Client) -> Client:
    """Finish the rebalance that these clients have joined; return the leader. Each gets its own name as its share."""
    (leader,) = [client for client in clients if client.joined.leader_id == client.joined.member_id]
    for client in clients:
        if client is not leader:
            client.sync()
    leader.sync_ids({client.member_id: client.name.encode() for client in clients})
    assert [client.share for client in clients] == [client.name.encode() for client in clients]
    return leader
