"""Group requests on the wire, in every version that the node offers, encoded and decoded by kio."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kio.index import load_request_schema

from node.groups.world import subscription
from node.kio_oracle import plain
from node.running import Client, Connect, running_node
from walstream.config import AclRule
from walstream.errors import (
    BatchTooLarge,
    CorruptLog,
    DiskFull,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    RequestTimedOut,
    UnknownTopic,
    WalstreamError,
)
from walstream.node.acl import Authorizer, Principal
from walstream.node.api import APIS
from walstream.node.server import Node

COMMIT = 8
FETCH = 9
FIND = 10
JOIN = 11
HEARTBEAT = 12
LEAVE = 13
SYNC = 14
DESCRIBE = 15
LIST = 16
DELETE = 42
OFFSET_DELETE = 47

OK = 0
OFFSET_METADATA_TOO_LARGE = 12
UNKNOWN_TOPIC = 3
COORDINATOR_NOT_AVAILABLE = 15
NOT_COORDINATOR = 16
INVALID_GROUP_ID = 24
UNKNOWN_MEMBER_ID = 25
GROUP_SUBSCRIBED = 86
GROUP_ID_NOT_FOUND = 69
ILLEGAL_GENERATION = 22
MEMBER_ID_REQUIRED = 79
NON_EMPTY_GROUP = 68
INVALID_REQUEST = 42
TOPIC_REFUSED = 29
GROUP_REFUSED = 30
REBALANCE_IN_PROGRESS = 27
INVALID_SESSION_TIMEOUT = 26
INVALID_COMMIT_OFFSET_SIZE = 28
INCONSISTENT_PROTOCOL = 23
TRANSACTIONAL_ID_REFUSED = 53


def versions(api_key: int) -> range:
    return range(APIS[api_key].min_version, APIS[api_key].max_version + 1)


def request(api_key: int, version: int, **fields: Any) -> Any:
    """Build a request of one version from the fields of all: those that it does not have are left out."""
    return _build(load_request_schema(api_key, version), fields)


def _build(kind: Any, given: dict[str, Any]) -> Any:
    built = {}
    for field in dataclasses.fields(kind):
        if field.name in given:
            built[field.name] = _convert(field.type, given[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            built[field.name] = _zero(field)
    return kind(**built)


def _convert(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (kind,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
        if value is None:
            return None
    if typing.get_origin(kind) is tuple:
        return tuple(_convert(typing.get_args(kind)[0], element) for element in value)
    if dataclasses.is_dataclass(kind):
        return _build(kind, value)
    if isinstance(value, int) and "imedelta" in str(kind):
        return datetime.timedelta(milliseconds=value)
    return value


def _zero(field: Any) -> Any:
    if typing.get_origin(field.type) is tuple:
        return ()
    kafka_type = field.metadata.get("kafka_type", "")
    if kafka_type.startswith("timedelta"):
        return datetime.timedelta()
    if typing.get_origin(field.type) in (types.UnionType, typing.Union):
        return None
    return {"string": "", "bytes": b"", "bool": False}.get(kafka_type, 0)


async def ask(client: Client, api_key: int, version: int, **fields: Any) -> dict[str, Any]:
    reply: dict[str, Any] = plain(await client.ask(request(api_key, version, **fields)))
    return reply


RANGE = [{"name": "range", "metadata": subscription("t")}]
JOINING = {"session_timeout": 10_000, "rebalance_timeout": 60_000, "protocol_type": "consumer", "protocols": RANGE}


async def join(client: Client, version: int, group: str, *, member_id: str = "", **fields: Any) -> dict[str, Any]:
    """Join as a client of this version does: with a second request where the first brought only an id."""
    values = JOINING | {"group_id": group} | fields
    reply = await ask(client, JOIN, version, member_id=member_id, **values)
    if reply["error_code"] == MEMBER_ID_REQUIRED:
        assert version >= 4
        reply = await ask(client, JOIN, version, member_id=reply["member_id"], **values)
    return reply


async def park_join(node: Node, client: Client, group: str) -> None:
    """Send a join that waits."""
    first = await ask(client, JOIN, 9, group_id=group, **JOINING)
    await client.send(client.frame(request(JOIN, 9, group_id=group, member_id=first["member_id"], **JOINING)))
    await wait_until(lambda: len(node.groups.coordinator.parked) == 1)


async def wait_until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110 - what is waited for is inside the node, which has no event for it
            await asyncio.sleep(0.01)


async def settled(client: Client, group: str, version: int = 9, **fields: Any) -> dict[str, Any]:
    """Make a group of one member; return its last join."""
    joined = await join(client, version, group, **fields)
    await ask(
        client, SYNC, min(version, 5), group_id=group, generation_id=joined["generation_id"],
        member_id=joined["member_id"], assignments=[{"member_id": joined["member_id"], "assignment": b"mine"}],
        protocol_type="consumer", protocol_name="range", **fields,
    )  # fmt: skip
    return joined


async def test_a_life_in_every_version(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        client = await connect(node)
        for version in versions(JOIN):
            group = f"g{version}"
            joined = await join(client, version, group)
            assert joined["error_code"] == OK
            assert joined["leader"] == joined["member_id"] != ""
            assert joined["protocol_name"] == "range"
            assert [member["metadata"] for member in joined["members"]] == [subscription("t")]
            member = {"group_id": group, "member_id": joined["member_id"], "generation_id": 1}
            synced = await ask(
                client, SYNC, min(version, 5), **member, protocol_type="consumer", protocol_name="range",
                assignments=[{"member_id": joined["member_id"], "assignment": b"mine"}],
            )  # fmt: skip
            assert (synced["error_code"], synced["assignment"]) == (OK, b"mine")
            heartbeat_version = min(version, 4)
            assert (await ask(client, HEARTBEAT, heartbeat_version, **member))["error_code"] == OK
            late = member | {"generation_id": 7}
            assert (await ask(client, HEARTBEAT, heartbeat_version, **late))["error_code"] == ILLEGAL_GENERATION
            leave_version = min(version, 5)
            left = await ask(client, LEAVE, leave_version, **member, members=[{"member_id": joined["member_id"]}])
            assert left["error_code"] == OK
            again = await ask(client, LEAVE, leave_version, **member, members=[{"member_id": joined["member_id"]}])
            code = again["error_code"] if leave_version < 3 else again["members"][0]["error_code"]
            assert code == UNKNOWN_MEMBER_ID


async def test_offsets_in_every_version(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        await _create(client, "t", 2)
        for version in versions(COMMIT):
            committed = await ask(client, COMMIT, version, group_id="g", generation_id_or_member_epoch=-1, topics=[
                {"name": "t", "partitions": [
                    {"partition_index": 0, "committed_offset": version, "committed_metadata": "note"},
                    {"partition_index": 1, "committed_offset": 9, "committed_metadata": "x" * 5_000},
                    {"partition_index": 2, "committed_offset": 9},
                ]},
                {"name": "nowhere", "partitions": [{"partition_index": 0, "committed_offset": 1}]},
            ])  # fmt: skip
            codes = [[partition["error_code"] for partition in topic["partitions"]] for topic in committed["topics"]]
            assert codes == [[OK, OFFSET_METADATA_TOO_LARGE, UNKNOWN_TOPIC], [UNKNOWN_TOPIC]]
        for version in versions(FETCH):
            asked = [{"name": "t", "partition_indexes": [0, 1]}]
            group = await _fetch(client, version, "g", asked)
            (topic,) = group["topics"]
            found = [(partition["committed_offset"], partition["metadata"]) for partition in topic["partitions"]]
            assert found == [(max(versions(COMMIT)), "note"), (-1, "")]
            if version >= 2:
                group = await _fetch(client, version, "g", None)
                assert [topic["name"] for topic in group["topics"]] == ["t"]
                assert [partition["partition_index"] for partition in group["topics"][0]["partitions"]] == [0]
                assert (await _fetch(client, version, "nobody", None))["topics"] == []


async def test_the_note_of_an_offset_is_limited_in_bytes(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__offset_metadata_bytes_max=100) as node:
        client = await connect(node)
        await _create(client, "t", 1)
        for note, code in (("x" * 100, OK), ("é" * 50, OK), ("é" * 51, OFFSET_METADATA_TOO_LARGE)):
            committed = await ask(client, COMMIT, 8, group_id="g", generation_id_or_member_epoch=-1, topics=[
                {"name": "t", "partitions": [
                    {"partition_index": 0, "committed_offset": 1, "committed_metadata": note}
                ]},
            ])  # fmt: skip
            assert committed["topics"][0]["partitions"][0]["error_code"] == code


async def test_commits_are_checked_against_the_group(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        client = await connect(node)
        await _create(client, "t", 1)
        joined = await settled(client, "g")

        async def commit(member_id: str, generation: int, group: str = "g", offset: int = 5) -> int:
            reply = await ask(
                client, COMMIT, 8, group_id=group, member_id=member_id, generation_id_or_member_epoch=generation,
                topics=[{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": offset}]}],
            )  # fmt: skip
            code: int = reply["topics"][0]["partitions"][0]["error_code"]
            return code

        assert await commit(joined["member_id"], 1) == OK
        assert await commit(joined["member_id"], 2) == ILLEGAL_GENERATION
        assert await commit("stranger", 1) == UNKNOWN_MEMBER_ID
        assert await commit("", -1) == UNKNOWN_MEMBER_ID
        assert await commit("", -1, group="") == INVALID_GROUP_ID
        assert await commit("", -1, group="g" * 1_025) == INVALID_GROUP_ID
        assert await commit("", 3, group="unheard of") == ILLEGAL_GENERATION
        assert await commit("", -1, group="simple") == OK
        assert await commit("", -1, group="simple", offset=-1) == INVALID_REQUEST


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotEnoughReplicas("too few"), COORDINATOR_NOT_AVAILABLE),
        (NotEnoughReplicasAfterAppend("too few"), COORDINATOR_NOT_AVAILABLE),
        (RequestTimedOut("too many wait"), COORDINATOR_NOT_AVAILABLE),
        (UnknownTopic("no topic"), COORDINATOR_NOT_AVAILABLE),
        (NotLeader("not here"), NOT_COORDINATOR),
        (DiskFull("no space"), NOT_COORDINATOR),
        (CorruptLog("damaged"), NOT_COORDINATOR),
        (BatchTooLarge("too large"), INVALID_COMMIT_OFFSET_SIZE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_what_the_log_refuses_is_said_as_a_coordinator_says_it(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, error: WalstreamError, code: int
) -> None:
    """Java's consumer throws at the errors of a partition in these answers, and retries at those of a coordinator."""
    commit = [{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 5}]}]
    offset_delete = [{"name": "t", "partitions": [{"partition_index": 0}]}]
    async with running_node(tmp_path) as node:
        client = await connect(node)
        await _create(client, "t", 1)
        committing: dict[str, Any] = {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": commit}
        await ask(client, COMMIT, 8, **committing)

        def refuse(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(node.store.partition("__consumer_offsets", 0), "append", refuse)
        answer = await ask(client, COMMIT, 8, **committing)
        assert answer["topics"][0]["partitions"][0]["error_code"] == code
        answer = await ask(client, OFFSET_DELETE, 0, group_id="g", topics=offset_delete)
        assert answer["error_code"] == code
        answer = await ask(client, DELETE, 2, groups_names=["g"])
        assert answer["results"][0]["error_code"] == code


async def test_offsets_are_deleted_where_nobody_reads(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        client = await connect(node)
        for name in ("t", "old"):
            await _create(client, name, 1)
            await ask(
                client, COMMIT, 8, group_id="g", generation_id_or_member_epoch=-1,
                topics=[{"name": name, "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
            )  # fmt: skip
        await settled(client, "g")
        topics = [{"name": name, "partitions": [{"partition_index": 0}]} for name in ("t", "old", "nowhere")]
        deleted = await ask(client, OFFSET_DELETE, 0, group_id="g", topics=topics)
        assert deleted["error_code"] == OK
        codes = [topic["partitions"][0]["error_code"] for topic in deleted["topics"]]
        assert codes == [GROUP_SUBSCRIBED, OK, UNKNOWN_TOPIC]
        assert [topic["name"] for topic in (await _fetch(client, 7, "g", None))["topics"]] == ["t"]
        nobody = await ask(client, OFFSET_DELETE, 0, group_id="nobody", topics=topics)
        assert nobody["error_code"] == GROUP_ID_NOT_FOUND


async def test_groups_are_listed_described_and_deleted_in_every_version(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        client = await connect(node)
        await _create(client, "t", 1)
        await ask(
            client, COMMIT, 8, group_id="simple", generation_id_or_member_epoch=-1,
            topics=[{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
        )  # fmt: skip
        joined = await settled(client, "g", group_instance_id="i")
        for version in versions(LIST):
            listed = await ask(client, LIST, version)
            assert {row["group_id"]: row["protocol_type"] for row in listed["groups"]} == {
                "g": "consumer",
                "simple": "",
            }
            if version >= 4:
                listed = await ask(client, LIST, version, states_filter=["Stable"])
                assert [(row["group_id"], row["group_state"]) for row in listed["groups"]] == [("g", "Stable")]
            if version >= 5:
                assert (await ask(client, LIST, version, types_filter=["consumer"]))["groups"] == []
                assert len((await ask(client, LIST, version, types_filter=["Classic"]))["groups"]) == 2
        for version in versions(DESCRIBE):
            described = await ask(
                client, DESCRIBE, version, groups=["g", "simple", "nobody"], include_authorized_operations=True
            )
            stable, empty, dead = described["groups"]
            assert [row["group_state"] for row in (stable, empty, dead)] == ["Stable", "Empty", "Dead"]
            assert (stable["protocol_type"], stable["protocol_data"]) == ("consumer", "range")
            (member,) = stable["members"]
            assert (member["member_id"], member["client_id"]) == (joined["member_id"], "test")
            assert (member["client_host"], member["member_assignment"]) == ("127.0.0.1", b"mine")
            assert member.get("group_instance_id", "i") == "i"
            assert stable.get("authorized_operations", 0b1_0100_1000) == 0b1_0100_1000
        for version in versions(DELETE):
            deleted = await ask(client, DELETE, version, groups_names=["g", "nobody", "simple"])
            codes = [row["error_code"] for row in deleted["results"]]
            assert codes == [NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND, OK if version == 0 else GROUP_ID_NOT_FOUND]


async def test_the_coordinator_is_found_in_every_version(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        for version in versions(FIND):
            for key_type, code in ((0, OK), (1, TRANSACTIONAL_ID_REFUSED), (2, INVALID_REQUEST)):
                if key_type > 0 and version == 0:
                    continue
                reply = await ask(client, FIND, version, key="g", coordinator_keys=["g", "h"], key_type=key_type)
                found = reply["coordinators"] if version >= 4 else [reply]
                assert [row["error_code"] for row in found] == [code] * len(found)
                where = (1, "127.0.0.1", node.port) if code == OK else (-1, "", -1)
                assert [(row["node_id"], row["host"], row["port"]) for row in found] == [where] * len(found)
                assert [row.get("key", "g") for row in found] == (["g", "h"] if version >= 4 else ["g"])


async def test_a_connection_that_closes_leaves_no_request_behind(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=0) as node:
        first, second = await connect(node), await connect(node)
        joined = await settled(first, "g")
        await park_join(node, second, "g")
        second.close()
        await wait_until(lambda: not node.groups.coordinator.parked)
        beat = await ask(
            first, HEARTBEAT, 4, group_id="g", member_id=joined["member_id"], generation_id=joined["generation_id"]
        )
        assert beat["error_code"] == REBALANCE_IN_PROGRESS, "the rebalance that it began goes on"


async def test_a_node_that_stops_does_not_wait_for_a_rebalance(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path, limits__group_join_delay_ms=60_000) as node:
        client = await connect(node)
        await park_join(node, client, "g")
        async with asyncio.timeout(5):
            await node.stop()
        assert not node.groups.coordinator.parked


@pytest.mark.parametrize("version", [0, 3, 9])
async def test_refusals_fit_their_version(version: int, tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        assert (await join(client, version, ""))["error_code"] == INVALID_GROUP_ID
        assert (await join(client, version, "g", session_timeout=1))["error_code"] == INVALID_SESSION_TIMEOUT
        assert (await join(client, version, "g", protocols=[]))["error_code"] == INCONSISTENT_PROTOCOL
        assert (await join(client, version, "g", member_id="stranger"))["error_code"] == UNKNOWN_MEMBER_ID


async def test_what_is_not_allowed_is_said_where_each_version_has_a_place_for_it(
    tmp_path: Path, connect: Connect
) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        await _create(client, "t", 1)
        node.security.authorizer = Authorizer((), enforced=True)
        topics = [
            {"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 1}], "partition_indexes": [0]}
        ]
        groups = [{"group_id": "g", "topics": topics}]
        for version in versions(COMMIT):
            reply = await ask(client, COMMIT, version, group_id="g", topics=topics)
            assert reply["topics"][0]["partitions"][0]["error_code"] == GROUP_REFUSED
        for version in versions(FETCH):
            reply = await ask(client, FETCH, version, group_id="g", topics=topics, groups=groups)
            found = reply["groups"][0] if version >= 8 else reply
            assert found.get("error_code", GROUP_REFUSED) == GROUP_REFUSED
            assert version > 1 or found["topics"][0]["partitions"][0]["error_code"] == GROUP_REFUSED
        for version in versions(FIND):
            reply = await ask(client, FIND, version, key="g", coordinator_keys=["g"])
            assert (reply["coordinators"][0] if version >= 4 else reply)["error_code"] == GROUP_REFUSED
        assert (await join(client, 9, "g"))["error_code"] == GROUP_REFUSED
        for api_key in (SYNC, HEARTBEAT, LEAVE, OFFSET_DELETE):
            assert (await ask(client, api_key, 0, group_id="g"))["error_code"] == GROUP_REFUSED
        assert (await ask(client, DESCRIBE, 5, groups=["g"]))["groups"][0]["error_code"] == GROUP_REFUSED
        assert (await ask(client, DELETE, 2, groups_names=["g"]))["results"][0]["error_code"] == GROUP_REFUSED
        assert (await ask(client, LIST, 5))["groups"] == []


async def test_offsets_of_topics_one_may_not_see_are_not_told(tmp_path: Path, connect: Connect) -> None:
    async with running_node(tmp_path) as node:
        client = await connect(node)
        topics = []
        for name in ("mine", "theirs"):
            await _create(client, name, 1)
            partitions = [{"partition_index": 0, "committed_offset": 1}]
            topics.append({"name": name, "partitions": partitions, "partition_indexes": [0]})
        assert (await _commit_codes(client, topics)) == [OK, OK]
        rules = [
            AclRule(principal="*", kind="group", operations=("read",)),
            AclRule(principal="*", kind="topic", name="mine", operations=("read",)),
        ]
        node.security.authorizer = Authorizer(rules, enforced=True)
        for connection in node.connections:
            connection.principal = Principal("somebody", "PLAIN")
        assert (await _commit_codes(client, topics)) == [OK, TOPIC_REFUSED]
        fetched = await _fetch(client, 9, "g", topics)
        assert [topic["partitions"][0]["error_code"] for topic in fetched["topics"]] == [OK, TOPIC_REFUSED]
        assert [topic["name"] for topic in (await _fetch(client, 9, "g", None))["topics"]] == ["mine"]


async def _commit_codes(client: Client, topics: list[dict[str, Any]]) -> list[int]:
    reply = await ask(client, COMMIT, 9, group_id="g", generation_id_or_member_epoch=-1, topics=topics)
    return [topic["partitions"][0]["error_code"] for topic in reply["topics"]]


async def _create(client: Client, name: str, partitions: int) -> None:
    topics = [{"name": name, "num_partitions": partitions, "replication_factor": 1}]
    reply = await ask(client, 19, 7, topics=topics, timeout=1_000)
    assert reply["topics"][0]["error_code"] == OK


async def _fetch(client: Client, version: int, group: str, topics: list[dict[str, Any]] | None) -> dict[str, Any]:
    reply = await ask(
        client, FETCH, version, group_id=group, topics=topics, groups=[{"group_id": group, "topics": topics}]
    )
    found: dict[str, Any] = reply["groups"][0] if version >= 8 else reply
    assert found.get("error_code", OK) == OK
    return found
