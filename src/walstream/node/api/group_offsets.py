"""Committed offsets on the wire: OffsetCommit, OffsetFetch, OffsetDelete.

Old versions have no place for a code that concerns the whole request: it is then written for each partition. Offsets
are answered for only when they are durable. Clients' own retention times (OffsetCommit before version 5) are not
kept: the node's setting counts, as in Kafka since 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from walstream.cluster.local import Topic
from walstream.error_codes import codes
from walstream.errors import (
    GroupNotFound,
    GroupSubscribed,
    InvalidRequest,
    NotAuthorized,
    OffsetMetadataTooLarge,
    UnknownTopic,
    WalstreamError,
)
from walstream.node.context import Context
from walstream.node.offsets import Committed, TopicPartition
from walstream.node.wire import Message, Reply

FETCH_CODE_FROM = 2
FETCH_TOGETHER_FROM = 8

NO_OFFSET = -1
NO_EPOCH = -1

PartitionCodes = dict[TopicPartition, int]


async def offset_commit(context: Context, request: Message) -> Reply:
    """Store how far a group has read."""
    groups = context.node.groups
    asked = {
        (topic.name, partition.partition_index): partition for topic in request.topics for partition in topic.partitions
    }
    results: PartitionCodes = dict.fromkeys(asked, 0)
    try:
        context.authorize("read", "group", request.group_id)
        await groups.prepare_commits()
        groups.check_commit(
            request.group_id, request.member_id, request.group_instance_id, request.generation_id_or_member_epoch
        )
    except WalstreamError as error:
        return _commit_reply(request, dict.fromkeys(asked, codes(error).kafka))
    accepted: dict[TopicPartition, Committed] = {}
    for (topic, index), partition in asked.items():
        try:
            known = _check_partition(context, topic, index)
            accepted[topic, index] = _committed(context, known, partition)
        except WalstreamError as error:
            results[topic, index] = codes(error).kafka
    try:
        await groups.commit(request.group_id, accepted)
    except WalstreamError as error:
        results.update(dict.fromkeys(accepted, codes(error).kafka))
    return _commit_reply(request, results)


def _check_partition(context: Context, topic: str, index: int) -> Topic:
    """Return the topic of a partition that may be committed."""
    context.authorize("read", "topic", topic)
    known = context.node.catalogue.topics.get(topic)
    if known is None or not 0 <= index < known.partitions:
        raise UnknownTopic(f"There is no partition {topic}-{index}.")
    return known


def _committed(context: Context, topic: Topic, partition: Message) -> Committed:
    metadata = partition.committed_metadata or ""
    metadata_bytes_max = context.node.config.limits.offset_metadata_bytes_max
    if len(metadata.encode()) > metadata_bytes_max:
        raise OffsetMetadataTooLarge(f"The note of a committed offset has more than {metadata_bytes_max} bytes.")
    if partition.committed_offset < 0:
        raise InvalidRequest(f"{partition.committed_offset} is not an offset.")
    return Committed(
        partition.committed_offset,
        partition.committed_leader_epoch,
        metadata,
        commit_ms=context.node.now_ms(),
        topic_since=context.node.groups.since_of(topic),
    )


def _commit_reply(request: Message, results: PartitionCodes) -> Reply:
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {
                        "partition_index": partition.partition_index,
                        "error_code": results[topic.name, partition.partition_index],
                    }
                    for partition in topic.partitions
                ],
            }
            for topic in request.topics
        ]
    }


async def offset_fetch(context: Context, request: Message) -> Reply:
    """Tell how far groups have read."""
    if context.version < FETCH_TOGETHER_FROM:
        return _fetch(context, request.group_id, request.topics)
    # Each group once, however often it is named: an answer must not outgrow its question.
    groups = {group.group_id: group.topics for group in request.groups}
    return {"groups": [{"group_id": name, **_fetch(context, name, topics)} for name, topics in groups.items()]}


def _fetch(context: Context, group_id: str, topics: list[Message] | None) -> Reply:
    """Return the offsets of one group: those asked for, or all that the principal may know of."""
    try:
        context.authorize("describe", "group", group_id)
        context.node.groups.check()
    except WalstreamError as error:
        code = codes(error).kafka
        asked = [(topic.name, topic.partition_indexes) for topic in topics or ()]
        if context.version < FETCH_CODE_FROM:
            return {"topics": [_fetched(name, indexes, {}, code) for name, indexes in asked]}
        return {"error_code": code, "topics": []}
    offsets = context.node.groups.committed(group_id)
    if topics is None:
        by_topic: dict[str, list[int]] = {}
        for topic, index in offsets:
            if context.may("describe", "topic", topic):
                by_topic.setdefault(topic, []).append(index)
        return {"error_code": 0, "topics": [_fetched(name, indexes, offsets) for name, indexes in by_topic.items()]}
    return {"error_code": 0, "topics": [_fetch_topic(context, topic, offsets) for topic in topics]}


def _fetch_topic(context: Context, topic: Message, offsets: Mapping[TopicPartition, Committed]) -> Reply:
    try:
        context.authorize("describe", "topic", topic.name)
    except WalstreamError as error:
        return _fetched(topic.name, topic.partition_indexes, {}, codes(error).kafka)
    return _fetched(topic.name, topic.partition_indexes, offsets)


_NONE = Committed(NO_OFFSET, NO_EPOCH, "", commit_ms=0)


def _fetched(name: str, indexes: Iterable[int], offsets: Mapping[TopicPartition, Committed], code: int = 0) -> Reply:
    found = [(index, offsets.get((name, index), _NONE)) for index in indexes]
    return {
        "name": name,
        "partitions": [
            {
                "partition_index": index,
                "committed_offset": committed.offset,
                "committed_leader_epoch": committed.leader_epoch,
                "metadata": committed.metadata,
                "error_code": code,
            }
            for index, committed in found
        ],
    }


async def offset_delete(context: Context, request: Message) -> Reply:
    """Forget offsets of topics that nobody in the group reads."""
    context.authorize("admin", "group", request.group_id)
    groups = context.node.groups
    groups.check()
    group = groups.group(request.group_id)
    if group is None and not groups.offsets.known(request.group_id):
        raise GroupNotFound(f"There is no group {request.group_id}.")
    results: PartitionCodes = {}
    for topic in request.topics:
        for partition in topic.partitions:
            where = (topic.name, partition.partition_index)
            results[where] = 0
            try:
                _check_partition(context, *where)
                if group is not None:
                    group.check_offsets_unused(topic.name)
            except (NotAuthorized, UnknownTopic, GroupSubscribed) as error:
                results[where] = codes(error).kafka
    await groups.delete_offsets(request.group_id, [where for where, code in results.items() if code == 0])
    return {"error_code": 0, **_commit_reply(request, results)}
