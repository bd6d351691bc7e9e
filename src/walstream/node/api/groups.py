"""Consumer groups on the wire: membership and what administrators ask about groups.

Each handler translates one request into the coordinator's words and its answer back; what a group does with it is
decided in `node/groups`. A refusal is raised where the response has a place for one code, and written per group
where it has not. The offsets of groups are next door, in `group_offsets.py`.
"""

from __future__ import annotations

from typing import Any

from walstream.error_codes import codes
from walstream.errors import InvalidRequest, WalstreamError
from walstream.node.acl import Question
from walstream.node.api.group_offsets import offset_commit, offset_delete, offset_fetch
from walstream.node.context import Context
from walstream.node.groups.events import (
    Heartbeat,
    Join,
    Joined,
    Leave,
    Leaver,
    Left,
    Refused,
    State,
    Sync,
    Synced,
)
from walstream.node.groups.group import Group
from walstream.node.wire import Message, Reply

__all__ = [
    "delete_groups",
    "describe_groups",
    "find_coordinator",
    "heartbeat",
    "join_group",
    "leave_group",
    "list_groups",
    "offset_commit",
    "offset_delete",
    "offset_fetch",
    "sync_group",
]

MUST_KNOW_ID_FROM = 4
CAN_SKIP_ASSIGNMENT_FROM = 9
LEAVE_TOGETHER_FROM = 3
NULL_PROTOCOL_FROM = 7
COORDINATORS_TOGETHER_FROM = 4

GROUP_KEY = 0
TRANSACTION_KEY = 1
NO_NODE = -1

TRANSACTIONAL_ID_REFUSED = 53
"""What a transactional producer is told: librdkafka takes "unsupported" for a passing trouble and asks for ever, while
this code ends it at once and shows the sentence beside it."""

GROUP_TYPE = "classic"

# Bits of "authorized operations", by the numbers that Kafka gives its ACL operations.
_OPERATION_BITS: tuple[tuple[Question, int], ...] = (("read", 1 << 3), ("admin", 1 << 6), ("describe", 1 << 8))


async def find_coordinator(context: Context, request: Message) -> Reply:
    """Name the node that coordinates each group."""
    if context.version < COORDINATORS_TOGETHER_FROM:
        return _coordinator(context, request.key_type, request.key)
    found = [
        {"key": key, **_coordinator(context, request.key_type, key)} for key in dict.fromkeys(request.coordinator_keys)
    ]
    return {"coordinators": found}


def _coordinator(context: Context, key_type: int, key: str) -> Reply:
    if key_type == TRANSACTION_KEY:
        return _no_coordinator(
            TRANSACTIONAL_ID_REFUSED, "This node does not offer transactions. Produce without a transactional id."
        )
    try:
        if key_type != GROUP_KEY:
            raise InvalidRequest(f"There are no coordinators of type {key_type}.")
        context.authorize("describe", "group", key)
    except WalstreamError as error:
        return _no_coordinator(codes(error).kafka, str(error))
    found = context.brokers[context.node.placement.coordinator_id]
    return {"error_code": 0, "error_message": None, "node_id": found.id, "host": found.host, "port": found.port}


def _no_coordinator(code: int, message: str) -> Reply:
    return {"error_code": code, "error_message": message, "node_id": NO_NODE, "host": "", "port": NO_NODE}


async def join_group(context: Context, request: Message) -> Reply:
    """Join a group's next generation, and wait for it."""
    context.authorize("read", "group", request.group_id)
    session_timeout_ms = request.session_timeout
    answer = await context.node.groups.ask(
        Join(
            group_id=request.group_id,
            member_id=request.member_id,
            instance_id=request.group_instance_id,
            client_id=context.client_id,
            client_host=context.connection.peer.rpartition(":")[0],
            protocol_type=request.protocol_type,
            protocols=tuple((protocol.name, protocol.metadata) for protocol in request.protocols),
            session_timeout_ms=session_timeout_ms,
            # Version 0 has no rebalance timeout of its own.
            rebalance_timeout_ms=request.rebalance_timeout if request.rebalance_timeout >= 0 else session_timeout_ms,
            must_know_id=context.version >= MUST_KNOW_ID_FROM,
            can_skip_assignment=context.version >= CAN_SKIP_ASSIGNMENT_FROM,
        )
    )
    if isinstance(answer, Refused):
        return {
            "error_code": codes(answer.error).kafka,
            "protocol_name": None if context.version >= NULL_PROTOCOL_FROM else "",
            "member_id": answer.member_id,
        }
    assert isinstance(answer, Joined)
    return {
        "error_code": 0,
        "generation_id": answer.generation,
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol_name,
        "leader": answer.leader_id,
        "skip_assignment": answer.skip_assignment,
        "member_id": answer.member_id,
        "members": [
            {"member_id": member.member_id, "group_instance_id": member.instance_id, "metadata": member.metadata}
            for member in answer.members
        ],
    }


async def sync_group(context: Context, request: Message) -> Reply:
    """Hand in or wait for the assignments of a generation."""
    context.authorize("read", "group", request.group_id)
    answer = await context.node.groups.ask(
        Sync(
            group_id=request.group_id,
            member_id=request.member_id,
            instance_id=request.group_instance_id,
            generation=request.generation_id,
            protocol_type=request.protocol_type,
            protocol_name=request.protocol_name,
            assignments=tuple((share.member_id, share.assignment) for share in request.assignments),
        )
    )
    assert isinstance(answer, Synced)
    return {
        "error_code": 0,
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol_name,
        "assignment": answer.assignment,
    }


async def heartbeat(context: Context, request: Message) -> Reply:
    """Keep a member's session alive."""
    context.authorize("read", "group", request.group_id)
    await context.node.groups.ask(
        Heartbeat(request.group_id, request.member_id, request.group_instance_id, request.generation_id)
    )
    return {"error_code": 0}


async def leave_group(context: Context, request: Message) -> Reply:
    """Remove members from a group."""
    context.authorize("read", "group", request.group_id)
    if context.version < LEAVE_TOGETHER_FROM:
        leavers: tuple[Leaver, ...] = (Leaver(request.member_id, None),)
    else:
        leavers = tuple(Leaver(member.member_id, member.group_instance_id) for member in request.members)
    answer = await context.node.groups.ask(Leave(request.group_id, leavers))
    assert isinstance(answer, Left)
    error_codes = [0 if error is None else codes(error).kafka for error in answer.errors]
    if context.version < LEAVE_TOGETHER_FROM:
        return {"error_code": error_codes[0]}
    members = [
        {"member_id": leaver.member_id, "group_instance_id": leaver.instance_id, "error_code": code}
        for leaver, code in zip(leavers, error_codes, strict=True)
    ]
    return {"error_code": 0, "members": members}


async def list_groups(context: Context, request: Message) -> Reply:
    """List the groups that the principal may see, in the states it asks for."""
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    found = context.node.groups.states() if not types or GROUP_TYPE in types else {}
    groups = [
        {
            "group_id": group_id,
            "protocol_type": protocol_type,
            "group_state": state.value,
            "group_type": GROUP_TYPE,
        }
        for group_id, (state, protocol_type) in found.items()
        if (not states or state.value.lower() in states) and context.may("describe", "group", group_id)
    ]
    return {"error_code": 0, "groups": groups}


async def describe_groups(context: Context, request: Message) -> Reply:
    """Describe groups and their members; a group that is not there is described as dead."""
    # Each once, however often it is named: an answer must not outgrow its question.
    return {"groups": [_describe(context, group_id, request) for group_id in dict.fromkeys(request.groups)]}


def _describe(context: Context, group_id: str, request: Message) -> Reply:
    groups = context.node.groups
    try:
        context.authorize("describe", "group", group_id)
        groups.check()
    except WalstreamError as error:
        return {"group_id": group_id, "error_code": codes(error).kafka}
    group = groups.group(group_id)
    if group is None:
        state = State.EMPTY if group_id in groups.table else State.DEAD
        reply: dict[str, Any] = {"group_id": group_id, "error_code": 0, "group_state": state.value}
    else:
        reply = {
            "group_id": group_id,
            "error_code": 0,
            "group_state": group.state.value,
            "protocol_type": group.protocol_type,
            "protocol_data": group.protocol_name if group.state is State.STABLE else "",
            "members": _members(group),
        }
    if request.include_authorized_operations:
        bits = (bit for operation, bit in _OPERATION_BITS if context.may(operation, "group", group_id))
        reply["authorized_operations"] = sum(bits)
    return reply


def _members(group: Group) -> list[Reply]:
    """Describe the members; what they read and were given is settled only in a stable group."""
    is_stable = group.state is State.STABLE
    return [
        {
            "member_id": member.id,
            "group_instance_id": member.instance_id,
            "client_id": member.client_id,
            "client_host": member.client_host,
            "member_metadata": member.metadata_of(group.protocol_name) if is_stable else b"",
            "member_assignment": (member.assignment or b"") if is_stable else b"",
        }
        for member in group.roster
    ]


async def delete_groups(context: Context, request: Message) -> Reply:
    """Forget groups without members, and their offsets."""
    return {"results": [await _delete(context, group_id) for group_id in request.groups_names]}


async def _delete(context: Context, group_id: str) -> Reply:
    try:
        context.authorize("admin", "group", group_id)
        await context.node.groups.delete_group(group_id)
    except WalstreamError as error:
        return {"group_id": group_id, "error_code": codes(error).kafka}
    return {"group_id": group_id, "error_code": 0}
