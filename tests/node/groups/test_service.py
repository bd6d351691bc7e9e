"""The shell around the coordinator: requests that wait, the timer, what lapses."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import replace
from pathlib import Path

import pytest

from log.rig import Rig
from node.groups.world import subscription
from node.running import running_node
from walstream import config
from walstream.cluster.local import NewTopic
from walstream.error_codes import codes
from walstream.errors import (
    BatchTooLarge,
    CoordinatorLoading,
    CoordinatorUnavailable,
    CorruptLog,
    DirectoryUnusable,
    DiskFull,
    GroupFull,
    GroupNotEmpty,
    GroupNotFound,
    NotCoordinator,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    PartitionOffline,
    RequestTimedOut,
    SyncFailed,
    UnknownMember,
    UnknownTopic,
    WalstreamError,
)
from walstream.log.partition_log import PartitionLog
from walstream.node.groups import service
from walstream.node.groups.events import Heartbeat, Join, Joined, Leave, Leaver, State, Sync, Synced
from walstream.node.groups.service import GroupService
from walstream.node.offsets import Committed
from walstream.node.offsets_log import OFFSETS_TOPIC
from walstream.node.server import Node

DAY_MS = 24 * 60 * 60 * 1000


def _join(**changes: object) -> Join:
    values: dict[str, object] = {
        "group_id": "g",
        "member_id": "",
        "instance_id": None,
        "client_id": "c",
        "client_host": "",
        "protocol_type": "consumer",
        "protocols": (("range", subscription("t")),),
        "session_timeout_ms": 1_000,
        "rebalance_timeout_ms": 1_000,
        "must_know_id": False,
        "can_skip_assignment": True,
    }
    return Join(**(values | changes))  # type: ignore[arg-type]


async def _settle(groups: GroupService, **changes: object) -> Joined:
    joined = await groups.ask(_join(**changes))
    assert isinstance(joined, Joined)
    synced = await groups.ask(
        Sync("g", joined.member_id, None, joined.generation, None, None, ((joined.member_id, b"s"),))
    )
    assert isinstance(synced, Synced)
    return joined


async def _reached(groups: GroupService, state: State) -> None:
    """Wait until the group is in a state."""
    for _ in range(1_000):
        if groups.states()["g"][0] is state:
            return
        await asyncio.sleep(0.01)
    assert groups.states()["g"][0] is state


async def test_a_join_waits_for_the_timer(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=150) as node:
        started = time.monotonic()
        one, two = await asyncio.gather(node.groups.ask(_join()), node.groups.ask(_join()))
        assert isinstance(one, Joined)
        assert isinstance(two, Joined)
        assert one.generation == two.generation == 1
        assert 0.14 < time.monotonic() - started < 2
        assert node.groups.rebalances == 1


async def test_a_session_ends_by_itself(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits__group_session_timeout_ms_min=50) as node:
        joined = await _settle(node.groups, session_timeout_ms=1000)
        for _ in range(4):
            await asyncio.sleep(0.3)
            await node.groups.ask(Heartbeat("g", joined.member_id, None, joined.generation))
        await _reached(node.groups, State.EMPTY)
        with pytest.raises(UnknownMember):
            await node.groups.ask(Heartbeat("g", joined.member_id, None, joined.generation))
        assert node.groups.states() == {"g": (State.EMPTY, "")}


async def test_a_node_that_stood_still_hears_its_members_first(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits__group_session_timeout_ms_min=50) as node:
        joined = await _settle(node.groups, session_timeout_ms=100)
        time.sleep(0.1 + 1.5 * service.STALL_MS / 1000)  # noqa: ASYNC251 - this is the stall
        for _ in range(3):
            await asyncio.sleep(0)  # The timer is heard first, and it does not end the session as long as this takes.
        await node.groups.ask(Heartbeat("g", joined.member_id, None, joined.generation))
        assert node.groups.states()["g"][0] is State.STABLE
        await _reached(node.groups, State.EMPTY)  # Once, not for ever.


async def test_who_is_cancelled_is_forgotten(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=60_000) as node:
        task = asyncio.create_task(node.groups.ask(_join(rebalance_timeout_ms=60_000)))
        await asyncio.sleep(0.01)
        assert len(node.groups.coordinator.parked) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not node.groups.coordinator.parked
        assert node.groups.coordinator.groups["g"].state is State.EMPTY


async def test_stopping_answers_and_refuses(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=60_000) as node:
        task = asyncio.create_task(node.groups.ask(_join(rebalance_timeout_ms=60_000)))
        await asyncio.sleep(0.01)
        await node.groups.stop()
        with pytest.raises(CoordinatorUnavailable):
            await task
        with pytest.raises(CoordinatorUnavailable):
            await node.groups.ask(_join())


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (NotEnoughReplicas, 15),
        (NotEnoughReplicasAfterAppend, 15),
        (RequestTimedOut, 15),
        (UnknownTopic, 15),
        (NotLeader, 16),
        (PartitionOffline, 16),
        (DiskFull, 16),
        (SyncFailed, 16),
        (CorruptLog, 16),
        (DirectoryUnusable, 16),
        (BatchTooLarge, 28),
    ],
)
async def test_what_the_log_refuses_is_answered_as_by_kafkas_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: type[WalstreamError], code: int
) -> None:
    """COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR, INVALID_COMMIT_OFFSET_SIZE: see GroupMetadataManager of Kafka."""
    async with running_node(tmp_path) as node:
        _create(node, "t")
        await node.groups.commit("g", {("t", 0): _at(1)})

        def append(*_: object, **__: object) -> None:
            raise refused("It is planted.")

        monkeypatch.setattr(PartitionLog, "append", append)
        for request in (
            node.groups.commit("g", {("t", 0): _at(2)}),
            node.groups.delete_offsets("g", [("t", 0)]),
            node.groups.delete_group("g"),
        ):
            with pytest.raises(WalstreamError) as raised:
                await request
            assert codes(raised.value).kafka == code
        monkeypatch.undo()
        assert node.groups.committed("g") == {("t", 0): _at(1)}


async def test_offsets_of_an_abandoned_group_lapse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        groups = node.groups
        _create(node, "t")
        now_ms = node.now_ms()
        joined = await _settle(groups)
        await groups.commit("g", {("t", 0): _at(1, now_ms)})
        await groups.commit("simple", {("t", 0): _at(1, now_ms - 30 * DAY_MS), ("t", 1): _at(1, now_ms)})
        await groups.upkeep()
        assert set(groups.table) == {"g", "simple"}, "the node has not run long enough to know that nobody is there"
        # Eight days later, on both clocks; the member of the first group is still there.
        monkeypatch.setattr(node.store, "now_ms", lambda: now_ms + 8 * DAY_MS)
        monkeypatch.setattr(groups, "_clock_ms", lambda: int(time.monotonic() * 1000) + 8 * DAY_MS)
        await groups.commit("simple", {("t", 1): _at(2, now_ms + 7 * DAY_MS)})
        await groups.upkeep()
        assert set(groups.table) == {"g", "simple"}
        assert list(groups.table.of("simple")) == [("t", 1)], "what is committed now and then stays"
        await groups.ask(Leave("g", (Leaver(joined.member_id, None),)))
        await groups.upkeep()
        assert "g" in groups.table, "it has only just become empty"
        monkeypatch.setattr(node.store, "now_ms", lambda: now_ms + 16 * DAY_MS)
        monkeypatch.setattr(groups, "_clock_ms", lambda: int(time.monotonic() * 1000) + 16 * DAY_MS)
        await groups.upkeep()
        assert set(groups.table) == set()
        assert groups.states() == {}, "nothing is left of the group"


async def test_an_offset_does_not_lapse_while_it_is_committed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion would be written behind the commit, and delete it although its client was told that it is kept."""
    async with running_node(tmp_path) as node:
        groups = node.groups
        _create(node, "t")
        now_ms = node.now_ms()
        await groups.commit("g", {("t", 0): _at(1, now_ms), ("t", 1): _at(1, now_ms)})
        monkeypatch.setattr(node.store, "now_ms", lambda: now_ms + 8 * DAY_MS)
        monkeypatch.setattr(groups, "_clock_ms", lambda: int(time.monotonic() * 1000) + 8 * DAY_MS)
        await asyncio.gather(groups.commit("g", {("t", 0): _at(2, node.store.now_ms())}), groups.upkeep())
        assert {where: committed.offset for where, committed in groups.committed("g").items()} == {("t", 0): 2}


async def test_a_clock_set_forward_lapses_no_offsets_of_a_group_that_has_just_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        groups = node.groups
        _create(node, "t")
        now_ms = node.now_ms()
        joined = await _settle(groups)
        for group in ("g", "simple"):
            await groups.commit(group, {("t", 0): _at(1, now_ms)})
        await groups.ask(Leave("g", (Leaver(joined.member_id, None),)))
        monkeypatch.setattr(node.store, "now_ms", lambda: now_ms + 8 * DAY_MS)
        await groups.upkeep()
        assert set(groups.table) == {"g", "simple"}


async def test_a_node_that_takes_over_groups_lets_none_of_their_offsets_lapse_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group that only commits it does not know for how long it has been empty: not since the node's start."""
    async with running_node(tmp_path) as node:
        groups = node.groups
        _create(node, "t")
        await groups.commit("g", {("t", 0): _at(1, node.now_ms() - 30 * DAY_MS)})
        monkeypatch.setattr(groups, "_clock_ms", lambda: int(time.monotonic() * 1000) + 8 * DAY_MS)
        groups.resign(NotCoordinator("Another node keeps the groups."))
        groups.lead()
        await _loaded(groups)
        await groups.upkeep()
        assert "g" in groups.table
        monkeypatch.setattr(groups, "_clock_ms", lambda: int(time.monotonic() * 1000) + 16 * DAY_MS)
        await groups.upkeep()
        assert "g" not in groups.table


async def test_retention_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_node(tmp_path, limits__offset_retention_ms=-1) as node:
        _create(node, "t")
        await node.groups.commit("g", {("t", 0): _at(1, 0)})
        later_ms = node.now_ms() + 1_000 * DAY_MS
        monkeypatch.setattr(node.store, "now_ms", lambda: later_ms)
        await node.groups.upkeep()
        assert "g" in node.groups.table


async def test_offsets_of_a_topic_that_is_gone_are_swept_up(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        _create(node, "t")
        _create(node, "kept")
        await node.groups.commit("g", {("t", 0): _at(1), ("kept", 0): _at(1)})
        node.store.delete_topics(["t"])
        await node.groups.upkeep()
        assert list(node.groups.table.of("g")) == [("kept", 0)]


async def test_deleting_a_group(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        _create(node, "t")
        joined = await _settle(node.groups)
        await node.groups.commit("g", {("t", 0): _at(1)})
        with pytest.raises(GroupNotEmpty):
            await node.groups.delete_group("g")
        await node.groups.ask(Leave("g", (Leaver(joined.member_id, None),)))
        await node.groups.delete_group("g")
        assert node.groups.states() == {}
        with pytest.raises(GroupNotFound):
            await node.groups.delete_group("g")


async def test_groups_that_are_only_offsets_are_limited_too(tmp_path: Path) -> None:
    async with running_node(tmp_path, limits__groups_max=2) as node:
        _create(node, "t")
        for group in ("a", "b"):
            node.groups.check_commit(group, "", None, -1)
            await node.groups.commit(group, {("t", 0): _at(1)})
        node.groups.check_commit("a", "", None, -1)
        with pytest.raises(GroupFull):
            node.groups.check_commit("c", "", None, -1)


async def test_a_failed_read_of_the_offsets_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Meanwhile the groups wait; the reason is logged once, not with every attempt."""
    async with running_node(tmp_path) as node:
        _create(node, "t")
        await node.groups.commit("g", {("t", 0): _at(5)})
        partition = node.store.partition(OFFSETS_TOPIC, 0)
        sound, attempts = partition.read_blocking, 0

        def failing(offset: int, bytes_max: int) -> memoryview:
            nonlocal attempts
            attempts += 1
            if attempts <= 3:
                raise OSError(errno.EIO, "Input/output error")
            return sound(offset, bytes_max)

        monkeypatch.setattr(partition, "read_blocking", failing)
        capfd.readouterr()
        node.groups.lead()
        with pytest.raises(CoordinatorLoading):
            node.groups.check()
        await _loaded(node.groups)
        assert attempts > 3
        assert node.groups.committed("g") == {("t", 0): _at(5)}
        assert "".join(capfd.readouterr()).count("offsets not loaded") == 1


async def test_a_read_of_the_offsets_ends_when_another_node_keeps_the_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outcome would take the place of the refusal that sends clients to the other node."""
    monkeypatch.setattr(service, "LOAD_RETRY_S_MIN", 0.001)
    monkeypatch.setattr(service, "LOAD_RETRY_S_MAX", 0.001)
    async with running_node(tmp_path) as node:
        _create(node, "t")
        await node.groups.commit("g", {("t", 0): _at(5)})
        has_failed, loop = asyncio.Event(), asyncio.get_running_loop()

        def failing(*_: object) -> memoryview:
            loop.call_soon_threadsafe(has_failed.set)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(node.store.partition(OFFSETS_TOPIC, 0), "read_blocking", failing)
        node.groups.lead()
        reading = node.groups._loading
        assert reading is not None
        await asyncio.wait_for(has_failed.wait(), 10)
        node.groups.resign(NotCoordinator("Another node keeps the groups."))
        await asyncio.wait({reading}, timeout=1)
        with pytest.raises(NotCoordinator):
            node.groups.check()
        assert reading.done()


async def test_a_node_that_cannot_read_its_offsets_serves_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(tmp_path) as node:
        _create(node, "t")
        await node.groups.commit("g", {("t", 0): _at(5)})
    with monkeypatch.context() as patch:
        patch.setattr(PartitionLog, "read_blocking", _failing)
        started = running_node(tmp_path)
        node = await started.__aenter__()
        try:
            _create(node, "u")
            with pytest.raises(CoordinatorLoading, match="Input/output error"):
                node.groups.check()
            patch.undo()
            await _loaded(node.groups)
            assert node.groups.committed("g") == {("t", 0): _at(5)}
        finally:
            await started.__aexit__(None, None, None)


async def test_offsets_are_read_again_when_their_log_comes_back(tmp_path: Path) -> None:
    """After a full disk the log ends where recovery says: what was appended last may be there, or not."""
    rig = Rig(tmp_path)
    groups = GroupService(Alone(rig))
    await groups.start()
    joined = asyncio.create_task(groups.ask(_join()))
    await asyncio.sleep(0)

    async def commit(offset: int) -> None:
        task = asyncio.create_task(groups.commit("g", {("t", 0): _at(offset)}))
        await asyncio.sleep(0)
        rig.driver.flush()
        await task

    rig.topic("t")
    await commit(5)
    rig.disk.faults["write", OFFSETS_TOPIC] = errno.ENOSPC  # type: ignore[attr-defined]
    with pytest.raises(NotCoordinator):
        await commit(6)
    rig.disk.faults.clear()  # type: ignore[attr-defined]
    rig.now_ms += 2_000
    rig.store.tick()
    rig.driver.flush()
    with pytest.raises(CoordinatorLoading):
        groups.check()
    await _loaded(groups)
    assert groups.committed("g") == {("t", 0): _at(5)}
    await commit(7)
    assert groups.committed("g") == {("t", 0): _at(7)}
    joined.cancel()
    await groups.stop()


async def test_a_topic_created_again_begins_without_offsets(tmp_path: Path) -> None:
    """However soon: nothing waits for the upkeep."""
    async with running_node(tmp_path) as node:
        _create(node, "t")
        since = node.catalogue.topics["t"].since
        await node.groups.commit("g", {("t", 0): replace(_at(5), topic_since=since)})
        node.store.delete_topics(["t"])
        _create(node, "t")
        assert node.groups.committed("g") == {}
        await node.groups.commit("h", {("t", 0): replace(_at(6), topic_since=node.catalogue.topics["t"].since)})
        await node.groups.forget_deleted_topics()
        assert set(node.groups.table) == {"h"}, "and what is committed for the new one stays"


class Alone:
    """What the service needs of a node, around a rig."""

    def __init__(self, rig: Rig) -> None:
        self.config = config.load().config
        self.store = rig.store


async def _loaded(groups: GroupService) -> None:
    """Wait until the groups take requests."""
    for _ in range(2_000):
        try:
            groups.check()
        except CoordinatorLoading:
            await asyncio.sleep(0.005)
        else:
            return
    groups.check()


def _failing(*_: object) -> memoryview:
    raise OSError(errno.EIO, "Input/output error")


def _create(node: Node, name: str) -> None:
    node.store.create_topics([NewTopic(name, 2, {})])


def _at(offset: int, commit_ms: int = 0) -> Committed:
    return Committed(offset, -1, "", commit_ms)
