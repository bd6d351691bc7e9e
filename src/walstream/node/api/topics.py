"""CreateTopics, DeleteTopics, CreatePartitions and DeleteRecords.

Each item of a request is granted or refused on its own. What is granted is written to the catalogue in one go, so that
a request for a thousand topics costs one fsync.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from walstream import logs
from walstream.cluster.local import Change, NewTopic, Topic
from walstream.errors import (
    InvalidPartitions,
    InvalidReplication,
    InvalidRequest,
    InvalidTopic,
    PolicyViolation,
)
from walstream.log.partition_log import PartitionLog
from walstream.log.settings import BY_NAME
from walstream.node.api.answers import code_of, failure
from walstream.node.api.leading import check_leader
from walstream.node.catalogue_changes import change_catalogue
from walstream.node.context import Context
from walstream.node.placement import ANY_FACTOR
from walstream.node.wire import NO_UUID, Message, Reply

log = logs.get(__name__)

DYNAMIC_TOPIC_CONFIG, DEFAULT_CONFIG = 1, 5
TO_THE_END = -1


def new_topic(
    context: Context,
    name: str,
    partitions: int = -1,
    config: Mapping[str, str] | None = None,
    replication_factor: int = ANY_FACTOR,
) -> NewTopic:
    """Return a checked specification; -1 takes the node's default. Raises what forbids it."""
    node = context.node
    replicas = node.placement.replicas_for(name, replication_factor)
    partitions = node.config.log.default_partitions if partitions == -1 else partitions
    new = NewTopic(name, partitions, config or {}, replicas)
    if name.startswith("__"):
        raise InvalidTopic(f"{name!r} is a name for the node's own topics.", "Choose one without two underscores.")
    node.catalogue.check_new(new)
    return new


def creation(context: Context, new: Sequence[NewTopic]) -> Change | None:
    """Plan to create topics that were checked, if the node has room for their partitions."""
    check_room(context, sum(one.partitions for one in new))
    return context.node.catalogue.create(list(new)) if new else None


def check_room(context: Context, more: int) -> None:
    """Raise unless the node may hold so many more partitions."""
    held, most = len(context.node.store.partitions), context.node.config.limits.partitions_max
    if held + more > most:
        raise InvalidPartitions(
            f"The node holds {held} partitions and may hold {most}; {more} more are too many.",
            "Delete topics, or raise limits.partitions_max.",
        )


async def create_topics(context: Context, request: Message) -> Reply:
    """Create topics, or with `validate_only` say whether it would work."""
    replies: dict[str, Reply] = {}
    checked: list[NewTopic] = []
    twice = _twice(topic.name for topic in request.topics)

    def plan() -> Change | None:
        partitions = 0
        for asked in request.topics:
            try:
                if asked.name in twice:
                    raise InvalidRequest(f"The request names {asked.name!r} twice.")
                context.authorize("admin", "topic", asked.name)
                context.node.placement.check_controller()
                new = _specification(context, asked)
                check_room(context, partitions + new.partitions)
                checked.append(new)
                partitions += new.partitions
            except Exception as error:
                replies[asked.name] = {"name": asked.name, "configs": None, **failure(context, error)}
        return None if request.validate_only else creation(context, checked)

    try:
        made = await change_catalogue(context.node.store, plan)
        topics = {} if made is None else {topic.name: topic for topic in made.affected}
        for new in checked:
            replies[new.name] = _created(context, new, topics.get(new.name))
    except Exception as error:
        replies |= {new.name: {"name": new.name, "configs": None, **failure(context, error)} for new in checked}
    return {"topics": list(replies.values())}


def _specification(context: Context, asked: Message) -> NewTopic:
    if asked.assignments:
        raise InvalidReplication("The node places partitions itself.", "Leave the assignments out.")
    config = {entry.name: entry.value for entry in asked.configs if entry.value is not None}
    return new_topic(context, asked.name, asked.num_partitions, config, asked.replication_factor)


def _created(context: Context, new: NewTopic, topic: Topic | None) -> Reply:
    settings = context.node.catalogue.settings(topic or Topic(new.name, NO_UUID, new.partitions, dict(new.config)))
    return {
        "name": new.name,
        "topic_id": topic.id if topic else NO_UUID,
        "num_partitions": new.partitions,
        "replication_factor": max(len(new.replicas), 1),
        "configs": [
            {
                "name": name,
                "value": settings.text(name),
                "config_source": DYNAMIC_TOPIC_CONFIG if name in new.config else DEFAULT_CONFIG,
            }
            for name in BY_NAME
        ],
    }


async def delete_topics(context: Context, request: Message) -> Reply:
    """Delete topics by name, or from version 6 on also by id."""
    asked = [(t.name, t.topic_id) for t in request.topics] + [(name, NO_UUID) for name in request.topic_names]
    catalogue = context.node.catalogue
    replies: list[Reply] = []
    found: dict[str, Reply] = {}

    def plan() -> Change | None:
        for name, topic_id in asked:
            try:
                if name is None:
                    topic = catalogue.topic_by_id(topic_id)
                else:
                    context.authorize("admin", "topic", name)
                    topic = catalogue.topic(name)
                context.authorize("admin", "topic", topic.name)
                context.node.placement.check_controller()
                if topic.is_internal:
                    raise InvalidTopic(f"{topic.name} belongs to the node.")
                if topic.name in found:
                    raise InvalidRequest(f"The request names {topic.name!r} twice.")
            except Exception as error:
                replies.append({"name": name, "topic_id": topic_id, **failure(context, error)})
            else:
                found[topic.name] = {"name": topic.name, "topic_id": topic.id}
                replies.append(found[topic.name])
        return catalogue.delete(list(found)) if found else None

    try:
        await change_catalogue(context.node.store, plan)
    except Exception as error:
        for reply in found.values():
            reply.update(failure(context, error))
        return {"responses": replies}
    try:
        if found:
            await context.node.groups.forget_deleted_topics()
    except Exception as error:
        # The topics are deleted and their offsets are served to nobody; the upkeep of the groups tries again.
        log.warning("offsets of deleted topics kept", topics=list(found), error=str(error) or repr(error))
    return {"responses": replies}


async def create_partitions(context: Context, request: Message) -> Reply:
    """Give topics more partitions."""
    twice = _twice(topic.name for topic in request.topics)
    results: list[Reply] = []
    for asked in {topic.name: topic for topic in request.topics}.values():
        plan = partial(_growth, context, asked, is_twice=asked.name in twice, validate_only=request.validate_only)
        try:
            await change_catalogue(context.node.store, plan)
        except Exception as error:
            results.append({"name": asked.name, **failure(context, error)})
        else:
            results.append({"name": asked.name})
        await asyncio.sleep(0)  # What is refused waits for nothing: other clients have their turn in between.
    return {"results": results}


def _growth(context: Context, asked: Message, *, is_twice: bool, validate_only: bool) -> Change | None:
    node = context.node
    if is_twice:
        raise InvalidRequest(f"The request names {asked.name!r} twice.")
    context.authorize("admin", "topic", asked.name)
    node.placement.check_controller()
    topic = node.catalogue.topic(asked.name)
    if topic.is_internal:
        raise InvalidTopic(f"{topic.name} belongs to the node.")
    if asked.assignments:
        raise InvalidReplication("The node places partitions itself.", "Leave the assignments out.")
    if asked.count <= topic.partitions:
        raise InvalidPartitions(f"{asked.name} has {topic.partitions} partitions and can only be given more.")
    check_room(context, asked.count - topic.partitions)
    return None if validate_only else node.catalogue.grow(asked.name, asked.count)


async def delete_records(context: Context, request: Message) -> Reply:
    """Move the start of partitions up, durably."""
    topics = []
    for topic in request.topics:
        partitions = [await _delete_records(context, topic.name, one) for one in topic.partitions]
        topics.append({"name": topic.name, "partitions": partitions})
    return {"topics": topics}


async def _delete_records(context: Context, topic: str, asked: Message) -> Reply:
    index = asked.partition_index
    try:
        context.authorize("admin", "topic", topic)
        partition = context.node.store.partition(topic, index)
        check_leader(partition)
        if not partition.settings.deleted or topic.startswith("__"):
            raise PolicyViolation(f"{topic} is compacted, so nothing is deleted from its start.")
        before = partition.high_watermark if asked.offset == TO_THE_END else asked.offset
        await _trim(context, partition, before)
    except Exception as error:
        return {"partition_index": index, "low_watermark": -1, **code_of(context, error)}
    return {"partition_index": index, "low_watermark": partition.log_start}


async def _trim(context: Context, partition: PartitionLog, before: int) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    context.node.store.delete_records(partition, before, finish)
    await done


def _twice(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}
