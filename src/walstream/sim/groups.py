"""Consumer groups: clients that commit, fetch and delete offsets, and what they were promised.

A group is written by one client, one request at a time, so the requests for a partition's offset are numbered, and the
log has them in that order: a client that gives a request up closes its connection before it sends the next. Each commit
carries its number as its metadata.

The floor of a partition is the last request that was acknowledged, or whose commit was seen. A coordinator in the
newest epoch answers an OffsetFetch with the floor or with a later request, whose outcome is unknown; never with an
earlier one. A commit counts for the topic that existed when it was taken, not for a later one of the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from walstream.error_codes import codes
from walstream.errors import WalstreamError
from walstream.node.api.group_offsets import offset_commit, offset_fetch
from walstream.node.api.groups import delete_groups
from walstream.node.offsets_log import OFFSETS_TOPIC
from walstream.node.schemas import Message
from walstream.sim.checkers import Violation
from walstream.sim.clock import MS, SECOND, Timer

if TYPE_CHECKING:
    from walstream.cluster.local import Catalogue
    from walstream.cluster.metadata import PartitionKey
    from walstream.sim.api import SimApi
    from walstream.sim.cluster import Cluster
    from walstream.sim.node import SimNode

Where = tuple[str, int]
"""Topic and partition."""

CLIENTS = 2
EVERY_US = (2 * MS, 150 * MS)
RETRY_US = (5 * MS, 200 * MS)
TIMEOUT_US = (50 * MS, 6 * SECOND)
MOVES = 2
MOVE_US = 1 * SECOND
"""How long after a hand-over the next request is sent."""
TOPICS_US = (100 * MS, 1 * SECOND)
FINISH_AGAIN_US = 200 * MS

OK = 0
UNKNOWN_TOPIC, LOADING, UNAVAILABLE, NOT_COORDINATOR, GROUP_NOT_FOUND = 3, 14, 15, 16, 69
RETRIABLE = {LOADING, UNAVAILABLE, NOT_COORDINATOR}
"""A consumer looks for the coordinator again and retries; at most others it throws."""

UNSENT = -2
"""The code of a request that has no answer."""


@dataclass(slots=True)
class Request:
    """What a client asked for the offset of one partition."""

    number: int
    offset: int | None
    """None: it was deleted."""
    since: int
    """The catalogue version that created the topic it was committed for."""
    code: int = UNSENT

    def __str__(self) -> str:
        what = "nothing" if self.offset is None else f"offset {self.offset}"
        outcome = {UNSENT: "unanswered", OK: "acknowledged"}.get(self.code, f"refused with code {self.code}")
        return f"{what} of request {self.number} ({outcome})"


@dataclass(slots=True)
class Account:
    """The requests for the offset of one partition in one group."""

    requests: dict[int, Request] = field(default_factory=lambda: {0: Request(0, None, -1, OK)})
    """By number, in order."""
    floor: int = 0

    def possible(self) -> list[Request]:
        """Return the requests that may have decided the offset."""
        return [request for request in self.requests.values() if request.number >= self.floor]


class Promises:
    """What was promised about committed offsets, and whether it is kept."""

    def __init__(self, cluster: Cluster, key: PartitionKey) -> None:
        self._cluster = cluster
        self._key = key
        self.accounts: dict[str, dict[Where, Account]] = {}
        self.numbers = 0
        self.observations = 0

    def next_number(self) -> int:
        """Return the number of the next request."""
        self.numbers += 1
        return self.numbers

    def sent(self, group: str, where: Where, request: Request) -> None:
        """A coordinator begins to handle a request."""
        self.accounts.setdefault(group, {}).setdefault(where, Account()).requests[request.number] = request

    def answered(self, group: str, where: Where, number: int, code: int) -> None:
        """A coordinator answers a request."""
        account = self.accounts[group][where]
        account.requests[number].code = code
        if code == OK:
            account.floor = max(account.floor, number)

    def observe(self, node: SimNode, group: str, found: dict[Where, tuple[int, str]]) -> None:
        """Judge the answer to an OffsetFetch for all offsets of a group."""
        cluster = self._cluster
        is_excused = cluster.checkers.unclean_epoch(self._key) >= 0
        is_newest = cluster.leads_newest(node, self._key)
        accounts = self.accounts.get(group, {})
        self.observations += 1
        for where, (offset, metadata) in found.items():
            account = accounts.get(where)
            request = account.requests.get(int(metadata)) if account is not None else None
            if account is None or request is None or request.offset != offset:
                self._fail("committed offsets", node, group, where, f"has {offset}, which was never committed")
            elif is_excused:
                continue
            elif self._is_deleted_for(node.store.catalogue, where, request):
                self._fail("deleted offsets", node, group, where, f"has {request}, of a topic that was deleted")
            elif request.number >= account.floor:
                account.floor = request.number
            elif is_newest:
                floor = account.requests[account.floor]
                name = "committed offsets" if floor.offset is not None else "deleted offsets"
                self._fail(name, node, group, where, f"has {request} after {floor}")
        if is_newest and not is_excused:
            for where, account in accounts.items():
                if where not in found and not any(self._may_be_gone(where, one) for one in account.possible()):
                    floor = account.requests[account.floor]
                    self._fail("committed offsets", node, group, where, f"has nothing after {floor}")

    @staticmethod
    def _is_deleted_for(catalogue: Catalogue, where: Where, request: Request) -> bool:
        """Return whether a node knows that the topic of a commit was deleted."""
        known = catalogue.topics.get(where[0])
        return request.since <= catalogue.version if known is None else request.since < known.since

    def _may_be_gone(self, where: Where, request: Request) -> bool:
        """Return whether there may be no offset after a request."""
        current = next((topic.since for topic in self._cluster.topics if topic.name == where[0]), None)
        return request.offset is None or request.since != current

    @staticmethod
    def _fail(invariant: str, node: SimNode, group: str, where: Where, text: str) -> None:
        raise Violation(invariant, f"group {group}: node {node.id} {text} for {where[0]}-{where[1]}")


class GroupClient:
    """Commits, fetches and deletes the offsets of one group after the other."""

    def __init__(self, groups: Groups, number: int) -> None:
        self._groups = groups
        self._cluster = groups.cluster
        self._clock = groups.cluster.clock
        self._number = number
        self._names = 0
        self._group = ""
        self._attempt = 0
        self._timer: Timer | None = None
        self._handling: tuple[SimNode, SimApi, asyncio.Task[None]] | None = None
        self.last_code = OK
        self._left: list[Callable[[], None]] = []
        """What is to be done after all faults, the first of it now."""
        self.is_over = False
        self._begin_group()

    @property
    def is_done(self) -> bool:
        """Whether everything that belongs to the end of a run is done."""
        return self.is_over and not self._left

    @property
    def label(self) -> str:
        """The client and its group, for messages."""
        return f"client {self._number} of group {self._group}"

    def start(self) -> None:
        """Begin."""
        self._clock.after(self._clock.between(*EVERY_US), self._next)

    def finish(self) -> None:
        """Leave what was begun: fetch, commit or delete, and fetch again from one coordinator after the other."""
        self.is_over = True
        self._attempt += 1
        change = self._delete if self._number % 2 else self._commit
        self._left = [self._fetch_all, self._commit, change, *[self._move, self._fetch_all] * MOVES]
        self._go_on()

    def _begin_group(self) -> None:
        """Take a new group: one that is deleted is not used again, so that nothing hides what comes back."""
        self._names += 1
        self._group = f"g{self._number}.{self._names}"

    def _wheres(self) -> list[Where]:
        """Return the partitions that there are."""
        return [(topic.name, index) for topic in self._cluster.client_topics for index in range(topic.partitions)]

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _next(self) -> None:
        """Do one of the things that clients do."""
        if self.is_over:
            return
        if self._clock.chance(0.25):
            self._begin_group()  # The offsets of the one before remain.
        dice = self._clock.between(1, 100)
        if dice <= 30 and self.last_code == UNSENT:
            self._delete()  # While the request that was given up may still be handled.
        elif dice <= 60:
            self._commit()
        elif dice <= 80:
            self._fetch(self._group)
        elif dice <= 92:
            self._delete()
        else:
            self._upkeep()

    def _commit(self) -> None:
        """Commit an offset for some of the group's partitions. It may be lower than the one before."""
        wheres, number = self._wheres(), self._groups.promises.next_number()
        if not self.is_over:
            wheres = self._clock.random.sample(wheres, self._clock.between(1, len(wheres)))
        offset = self._clock.between(0, 10_000)
        self._send(lambda node, api: self._handle_commit(node, api, self._group, wheres, number, offset))

    def _fetch(self, group: str) -> None:
        self._send(lambda node, api: self._handle_fetch(node, api, group))

    def _fetch_all(self) -> None:
        """Fetch the offsets of all groups that there ever were."""
        self._send(lambda node, api: self._handle_fetch(node, api, *self._groups.promises.accounts))

    def _delete(self) -> None:
        number = self._groups.promises.next_number()
        self._send(lambda node, api: self._handle_delete(node, api, self._group, number))

    def _upkeep(self) -> None:
        """Let the coordinator do what it does every minute."""
        self._send(lambda _, api: self._handle_upkeep(api))

    def _move(self) -> None:
        """Have another node coordinate, or, where none can be elected, let the same one load again."""
        metadata = self._cluster.metadata
        if metadata is None:
            self._send(lambda _, api: self._handle_reload(api))
        else:
            state = metadata.records[self._groups.key]
            metadata.resign(self._groups.key, state.leader, state.epoch)
            self._clock.after(MOVE_US, partial(self._finished, OK))

    def _send(self, handling: Callable[[SimNode, SimApi], Coroutine[Any, Any, int]]) -> None:
        self._attempt += 1
        attempt, clock = self._attempt, self._clock
        node = self._cluster.leader_for_client(self._groups.key)
        if node is not None:
            arrive = partial(self._arrive, node, attempt, handling)
            clock.after(self._cluster.client_delay_us(), partial(node.run, arrive))
        self._timer = clock.after(clock.between(*TIMEOUT_US), partial(self._answered, attempt, UNSENT))

    def _arrive(
        self, node: SimNode, attempt: int, handling: Callable[[SimNode, SimApi], Coroutine[Any, Any, int]]
    ) -> None:
        api = node.api
        if attempt != self._attempt or api is None:
            return  # The client has closed the connection.

        async def handle() -> None:
            try:
                code = await handling(node, api)
            except WalstreamError as error:
                code = codes(error).kafka
            if self._cluster.trace.is_on:
                self._cluster.trace(f"n{node.id}", f"group {self._group} request {attempt} answered with {code}")
            if not self._clock.chance(self._cluster.answer_loss):
                self._clock.after(self._cluster.client_delay_us(), partial(self._answered, attempt, code))

        self._handling = (node, api, api.handle(handle()))

    def _answered(self, attempt: int, code: int) -> None:
        """Take an answer, or none in time."""
        if attempt != self._attempt:
            return
        self._attempt += 1
        if self._timer is not None:
            self._timer.cancel()
        handling, self._handling = self._handling, None
        if code == UNSENT and handling is not None and self._clock.chance(0.5):
            # The server sees that the connection is closed, and cancels the handler.
            node, api, task = handling
            if node.api is api:
                node.run(partial(_cancel, task))
        self.last_code = code
        if code not in {OK, UNSENT, UNKNOWN_TOPIC, GROUP_NOT_FOUND, *RETRIABLE}:
            raise Violation("coordinator errors", f"{self.label} got code {code}, at which a consumer throws")
        if self._left:
            self._finished(code)
        elif not self.is_over:
            self._clock.after(self._clock.between(*(EVERY_US if code == OK else RETRY_US)), self._next)

    # ── what a coordinator does ──────────────────────────────────────────────────────────────────────────────────

    async def _handle_commit(
        self, node: SimNode, api: SimApi, group: str, wheres: list[Where], number: int, offset: int
    ) -> int:
        promises, topics = self._groups.promises, node.store.catalogue.topics
        known = [where for where in wheres if where[0] in topics]  # Of others nothing is appended.
        for where in known:
            promises.sent(group, where, Request(number, offset, topics[where[0]].since))
        asked = {name: [index for other, index in wheres if other == name] for name, _ in wheres}
        request = Message({
            "group_id": group, "member_id": "", "group_instance_id": None, "generation_id_or_member_epoch": -1,
            "topics": [Message({"name": name, "partitions": [Message({
                "partition_index": index, "committed_offset": offset, "committed_leader_epoch": -1,
                "committed_metadata": str(number),
            }) for index in indexes]}) for name, indexes in asked.items()],
        })  # fmt: skip
        reply = await offset_commit(api.context, request)
        answered = {
            (topic["name"], one["partition_index"]): one["error_code"]
            for topic in reply["topics"]
            for one in topic["partitions"]
        }
        for where in known:
            promises.answered(group, where, number, answered[where])
        return int(max(answered.values()))

    async def _handle_fetch(self, node: SimNode, api: SimApi, *groups: str) -> int:
        for group in groups:
            reply = await offset_fetch(api.context, Message({"group_id": group, "topics": None}))
            if reply["error_code"] != OK:
                return int(reply["error_code"])
            found = {
                (topic["name"], one["partition_index"]): (one["committed_offset"], one["metadata"])
                for topic in reply["topics"]
                for one in topic["partitions"]
            }
            self._groups.promises.observe(node, group, found)
        return OK

    async def _handle_delete(self, node: SimNode, api: SimApi, group: str, number: int) -> int:
        promises = self._groups.promises
        wheres = list(promises.accounts.get(group, ()))
        is_newest = self._cluster.leads_newest(node, self._groups.key)
        for where in wheres:
            promises.sent(group, where, Request(number, None, -1))
        reply = await delete_groups(api.context, Message({"groups_names": [group]}))
        code = int(reply["results"][0]["error_code"])
        is_gone = code == OK or (code == GROUP_NOT_FOUND and is_newest)
        for where in wheres:
            promises.answered(group, where, number, OK if is_gone else code)
        if is_gone and not self.is_over:
            self._begin_group()
        return code

    async def _handle_upkeep(self, api: SimApi) -> int:
        api.groups.check()
        try:
            await api.groups.upkeep()
        except WalstreamError:
            return UNAVAILABLE  # No client sees the error: the upkeep is repeated.
        return OK

    async def _handle_reload(self, api: SimApi) -> int:
        api.groups.check()
        api.groups.lead()
        return OK

    # ── after all faults ─────────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        if self._left:
            self._left[0]()

    def _finished(self, code: int) -> None:
        """Do the next thing, or the same again."""
        if code == OK or (code == GROUP_NOT_FOUND and self._left[0] == self._delete):
            self._left.pop(0)
            self._go_on()
        else:
            self._clock.after(FINISH_AGAIN_US, self._go_on)


class Groups:
    """The clients of groups, and the partition that their offsets are in."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.key: PartitionKey = (next(topic.id for topic in cluster.topics if topic.name == OFFSETS_TOPIC), 0)
        self.promises = Promises(cluster, self.key)
        self.clients = [GroupClient(self, number) for number in range(CLIENTS)]

    def start(self) -> None:
        """Begin."""
        for client in self.clients:
            client.start()
        if self.cluster.scenario.has_topic_changes:
            self._change_topics_later()

    def _change_topics_later(self) -> None:
        """Have the second topic deleted and created more often than the upkeep forgets its offsets."""

        def change() -> None:
            if not self.cluster.are_faults_over:
                self.cluster.change_topics()
                self._change_topics_later()

        self.cluster.clock.after(self.cluster.clock.between(*TOPICS_US), change)

    def stop(self) -> None:
        """Begin nothing more."""
        for client in self.clients:
            client.is_over = True

    def finish(self) -> None:
        """Check after all faults that the groups are served, and with what they committed."""
        for client in self.clients:
            client.finish()

    def unfinished(self) -> str | None:
        """Return what keeps the groups from being served."""
        client = next((client for client in self.clients if not client.is_done), None)
        return None if client is None else f"{client.label} got code {client.last_code} last"


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
