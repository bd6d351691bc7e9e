"""The shell around the pure coordinator: futures for requests that wait, one timer, the log lines, the offsets.

A handler asks and awaits; if its connection closes, the server cancels it and the request is forgotten. Group timers
and the time that a group has been empty run on the monotonic clock, because a step of the wall clock must neither end
sessions nor lapse the offsets of a group that has just stopped; committed offsets carry wall time.

Offsets of a group without members lapse when it has been empty, and they have not been committed, for the retention
time. A restart of the node begins the count of emptiness anew: that keeps them longer, never shorter, and a group
that only commits rarely is not forgotten while its members are on their way back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Protocol
from uuid import uuid4

from walstream import logs
from walstream.cluster.local import Topic
from walstream.config import Config, LimitsConfig
from walstream.errors import (
    BatchTooLarge,
    CoordinatorLoading,
    CoordinatorUnavailable,
    GroupError,
    GroupFull,
    GroupNotFound,
    InvalidCommitSize,
    NotCoordinator,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    RequestTimedOut,
    StorageError,
    UnknownTopic,
    WalstreamError,
)
from walstream.log.partition_log import PartitionLog
from walstream.log.store import LogStore
from walstream.node.groups.coordinator import Coordinator
from walstream.node.groups.events import Answer, Effect, GroupLimits, Moved, Refused, Request, Respond, State, Token
from walstream.node.groups.group import Group
from walstream.node.offsets import Change, Committed, OffsetTable, TopicPartition
from walstream.node.offsets_log import OFFSETS_TOPIC, OffsetsLog
from walstream.node.supervision import supervise

log = logs.get(__name__)

READING = "The node is reading the offsets of the groups."
UPKEEP_INTERVAL_S = 60.0
IDLE_GROUP_KEPT_MS = 10 * 60 * 1000
"""A group with neither members nor offsets is kept this long for those who look at what has just ended."""

LOAD_RETRY_S_MIN = 0.1
LOAD_RETRY_S_MAX = 2.0
"""Between two attempts to read the offsets."""

STALL_MS = 500
"""A timer that fires this much late means that the node itself stood still: the heartbeats of that time may wait in
the sockets, so they are let in first."""


class Host(Protocol):
    """What the service needs of the node."""

    config: Config
    store: LogStore


class GroupService:
    """All consumer groups of the node and their offsets, as the API handlers and the server see them."""

    def __init__(self, host: Host) -> None:
        store, limits = host.store, host.config.limits
        self.coordinator = Coordinator(_limits(limits), lambda: str(uuid4()))
        self.offsets = OffsetsLog(store)
        self.check_in_sync: Callable[[PartitionLog], None] = lambda _: None
        """Raises NotEnoughReplicas where a commit would wait for replicas that are not in sync."""
        self.reported_version: Callable[[], int] = lambda: 0
        """Returns the newest version of the catalogue that any other node has reported."""
        self.rebalances = 0
        """Generations begun since the start, all groups together."""
        self._store = store
        self._limits = limits
        self._tokens = count(1)
        self._waiting: dict[Token, asyncio.Future[Answer]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._has_waited = False
        self._upkeep: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._refusal: GroupError | None = None
        self._loading: asyncio.Task[None] | None = None
        self._load_failure = ""
        self._started_ms = self._clock_ms()

    @property
    def table(self) -> OffsetTable:
        """The committed offsets."""
        return self.offsets.table

    async def start(self) -> None:
        """Read the offsets. Where that fails, requests are refused until a later attempt succeeds."""
        self._refusal = CoordinatorLoading(READING)
        if not await self._try_to_load():
            self._loading = supervise("offsets load", self._load)

    def lead(self) -> None:
        """Read the offsets, then take requests: this node of a cluster has become the leader of their topic."""
        self.resign(CoordinatorLoading(READING))
        self._loading = supervise("offsets load", self._load)

    def _reload(self) -> None:
        """Read the offsets again, because their log was reopened. The groups keep their members."""
        if self._is_stopped or self._refusal is not None:
            return
        self._refusal = CoordinatorLoading(READING)
        if self._upkeep is not None:
            self._upkeep.cancel()
            self._upkeep = None
        self._loading = supervise("offsets load", self._load)

    async def _load(self) -> None:
        delay_s = LOAD_RETRY_S_MIN
        while not await self._try_to_load():
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LOAD_RETRY_S_MAX)

    async def _try_to_load(self) -> bool:
        """Read the offsets into a new table; return whether requests can be taken. A failure is logged once."""
        offsets = OffsetsLog(self._store, self._reload)
        try:
            await offsets.load()
        except Exception as error:
            offsets.close()
            failure = str(error) or type(error).__name__
            self._refusal = CoordinatorLoading(f"The offsets of the groups cannot be read now: {failure}")
            if failure != self._load_failure:
                self._load_failure = failure
                is_expected = isinstance(error, WalstreamError | OSError)
                log.error("offsets not loaded", error=failure, exc_info=None if is_expected else error)
            return False
        except asyncio.CancelledError:
            offsets.close()
            raise
        self.offsets.close()
        self.offsets = offsets
        self._load_failure = ""
        self._refusal = None
        self._started_ms = self._clock_ms()
        self._upkeep = supervise("groups upkeep", self._keep_up)
        return True

    def resign(self, refusal: GroupError) -> None:
        """Refuse every request from now on, also those that wait: another node keeps the groups, or nobody yet."""
        self._refusal = refusal
        self._do(self.coordinator.close(self._clock_ms()))
        for task in (self._upkeep, self._loading):
            if task is not None:
                task.cancel()
        self._upkeep = self._loading = None
        self.coordinator = Coordinator(_limits(self._limits), lambda: str(uuid4()))
        self.offsets.close()
        self.offsets = OffsetsLog(self._store)

    def check(self) -> None:
        """Raise unless this node keeps the groups and has read their offsets."""
        if self._refusal is not None:
            raise self._refusal

    async def stop(self) -> None:
        """Answer every request that waits and take no more. To be called before the log is closed."""
        self._is_stopped = True
        self._do(self.coordinator.close(self._clock_ms()))
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._upkeep, self._loading):
            if task is not None:
                task.cancel()

    # Membership

    async def ask(self, request: Request) -> Answer:
        """Hand a request to its group and return the answer, however long that takes; raises what refused it.

        A refusal that comes with a member id is an answer, not an error.
        """
        if self._is_stopped:
            raise CoordinatorUnavailable("The node is stopping.")
        self.check()
        token = next(self._tokens)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            self._do(self.coordinator.handle(token, request, self._clock_ms()))
            answer = await future
        finally:
            del self._waiting[token]
            self._do(self.coordinator.abandon(token, self._clock_ms()))
        if isinstance(answer, Refused) and not answer.member_id:
            raise answer.error
        return answer

    def group(self, group_id: str) -> Group | None:
        """Return a group that has, or lately had, members."""
        return self.coordinator.groups.get(group_id)

    def states(self) -> dict[str, tuple[State, str]]:
        """Return the state and the protocol type of every group, also of those that are only offsets."""
        found = dict.fromkeys(self.table, (State.EMPTY, ""))
        found.update({group.id: (group.state, group.protocol_type) for group in self.coordinator.groups.values()})
        return found

    # Offsets

    async def prepare_commits(self) -> None:
        """Have a topic for the offsets. Raises CoordinatorUnavailable."""
        try:
            await self.offsets.prepare()
        except WalstreamError as error:
            raise CoordinatorUnavailable(error.message, error.hint) from error

    def check_commit(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> None:
        """Raise unless the group takes commits from this member."""
        self.check()
        self.coordinator.check_commit(group_id, member_id, instance_id, generation, self._clock_ms())
        if len(self.table) >= self._limits.groups_max and not self.offsets.known(group_id):
            raise GroupFull(f"The node has offsets of {self._limits.groups_max} groups, as many as it may.")

    def since_of(self, topic: Topic) -> int:
        """Return the version of the catalogue since which a commit is one for this topic.

        While a newer catalogue is reported and not in force here, the topic may have been created again, and the commit
        be the first one for the new topic: it must survive until that catalogue is in force.
        """
        reported = self.reported_version()
        return reported if reported > self._store.catalogue.version else topic.since

    async def commit(self, group_id: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Store offsets durably. The caller has checked that it may, and has not waited since."""
        changes = [Change(group_id, *where, committed) for where, committed in offsets.items()]
        with self._writing():
            await self.offsets.write(changes)

    async def delete_offsets(self, group_id: str, wanted: Iterable[TopicPartition]) -> None:
        """Forget some of a group's offsets, durably."""
        keys = self.offsets.keys(group_id=group_id)
        with self._writing():
            await self.offsets.delete(keys & {(group_id, topic, index) for topic, index in wanted})

    async def delete_group(self, group_id: str) -> None:
        """Forget a group without members and its offsets; raises GroupNotEmpty or GroupNotFound."""
        self.check()
        keys = self.offsets.keys(group_id=group_id)
        if group_id in self.coordinator.groups:
            self._do(self.coordinator.remove(group_id))
        elif not keys:
            raise GroupNotFound(f"There is no group {group_id}.")
        with self._writing():
            await self.offsets.delete(keys)

    def committed(self, group_id: str) -> dict[TopicPartition, Committed]:
        """Return what a group has committed, without the offsets of topics that were deleted.

        A topic created again under the same name would otherwise be read from the middle.
        """
        offsets = self.offsets
        return {
            where: committed
            for where, committed in offsets.table.of(group_id).items()
            if not offsets.is_of_deleted_topic(where[0], committed)
        }

    async def forget_deleted_topics(self) -> None:
        """Delete the offsets of topics that were deleted."""
        if self._refusal is None:
            await self.offsets.delete(self.offsets.keys_of_deleted_topics())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuse what too few replicas would keep, and raise what the log refuses as Kafka's coordinator does.

        A consumer throws at the errors of a partition, and retries at those of a coordinator.
        """
        partition = self._store.partitions.get((OFFSETS_TOPIC, 0))
        try:
            if partition is not None:
                self.check_in_sync(partition)
            yield
        except (NotEnoughReplicas, NotEnoughReplicasAfterAppend, RequestTimedOut, UnknownTopic) as error:
            raise CoordinatorUnavailable(error.message, error.hint) from error
        except (NotLeader, StorageError) as error:
            raise NotCoordinator(error.message, error.hint) from error
        except BatchTooLarge as error:
            raise InvalidCommitSize(error.message, error.hint) from error

    # Time

    async def _keep_up(self) -> None:
        """Now and then, forget what has lapsed."""
        while True:
            try:
                await self.upkeep()
            except WalstreamError as error:
                log.warning("offsets were not cleaned up", error=str(error))
            await asyncio.sleep(UPKEEP_INTERVAL_S)

    async def upkeep(self) -> None:
        """Forget lapsed offsets, offsets of topics that are gone, and groups of which nothing is left."""
        await self.forget_deleted_topics()
        lapsed = self._lapsed()
        if lapsed:
            log.info("offsets lapsed", offsets=len(lapsed), groups=len({key[0] for key in lapsed}))
            await self.offsets.delete(lapsed)
        for group in list(self.coordinator.groups.values()):
            idle_ms = self._clock_ms() - group.empty_since_ms
            if group.is_idle and idle_ms >= IDLE_GROUP_KEPT_MS and not self.offsets.known(group.id):
                self._do(self.coordinator.remove(group.id))

    def _lapsed(self) -> list[tuple[str, str, int]]:
        retention_ms = self._limits.offset_retention_ms
        if retention_ms < 0:
            return []
        lapsed_ms = self._store.now_ms() - retention_ms
        return [
            (group_id, topic, index)
            for group_id in self.table
            if self._empty_ms(group_id) >= retention_ms
            for (topic, index), committed in self.table.of(group_id).items()
            if committed.commit_ms <= lapsed_ms and not self.offsets.is_in_flight((group_id, topic, index))
        ]

    def _empty_ms(self, group_id: str) -> int:
        """Return how long the group has had no members; 0 if it has any."""
        group = self.group(group_id)
        if group is None:
            return self._clock_ms() - self._started_ms
        return self._clock_ms() - group.empty_since_ms if group.is_idle else 0

    def _clock_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)

    def _tick(self) -> None:
        self._timer = None
        late_ms = self._clock_ms() - self._timer_ms
        if late_ms >= STALL_MS and not self._has_waited:
            log.warning("sessions prolonged: the node stood still", late_ms=late_ms)
            self._has_waited = True
            self._arm(self._clock_ms() + STALL_MS)
            return
        self._has_waited = False
        self._do(self.coordinator.tick(self._clock_ms()))

    def _arm(self, when_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer_ms = max(when_ms, self._clock_ms())
        # One millisecond more: the clock is cut to whole milliseconds, and an early timer would find nothing due.
        self._timer = loop.call_at((self._timer_ms + 1) / 1000, self._tick)

    def _do(self, effects: list[Effect]) -> None:
        """Carry out what the coordinator decided, and see to it that it is woken in time."""
        for effect in effects:
            if isinstance(effect, Respond):
                future = self._waiting.get(effect.token)
                if future is not None and not future.done():
                    future.set_result(effect.answer)
            else:
                self._note(effect)
        deadline_ms = self.coordinator.next_deadline_ms
        if deadline_ms is not None and not self._is_stopped and (self._timer is None or deadline_ms < self._timer_ms):
            self._arm(deadline_ms)

    def _note(self, moved: Moved) -> None:
        self.rebalances += moved.after is State.COMPLETING
        log.info(
            "group moved",
            group=moved.group_id,
            before=moved.before.value,
            after=moved.after.value,
            generation=moved.generation,
            members=moved.members,
            reason=moved.reason,
        )


def _limits(config: LimitsConfig) -> GroupLimits:
    return GroupLimits(
        groups_max=config.groups_max,
        members_max=config.group_members_max,
        session_timeout_ms_min=config.group_session_timeout_ms_min,
        session_timeout_ms_max=config.group_session_timeout_ms_max,
        join_delay_ms=config.group_join_delay_ms,
    )
