"""Metadata: which topics there are and who leads them.

A client that allows it, and asks for a topic that does not exist, gets it created, if the configuration and its
permissions say so.
"""

from __future__ import annotations

from walstream.cluster.local import Change, NewTopic, Topic
from walstream.error_codes import codes
from walstream.errors import LeaderNotAvailable, NotAuthorized, WalstreamError
from walstream.node.api.answers import OPERATIONS_UNASKED, cluster_operations, code_of, topic_operations
from walstream.node.api.topics import creation, new_topic
from walstream.node.catalogue_changes import change_catalogue
from walstream.node.context import Context
from walstream.node.placement import NOBODY, Placed
from walstream.node.wire import Message, Reply


async def metadata(context: Context, request: Message) -> Reply:
    """Describe the nodes and the topics that are asked for."""
    node = context.node
    wants_cluster = request.include_cluster_authorized_operations
    return {
        "brokers": [{"node_id": one.id, "host": one.host, "port": one.port} for one in context.brokers.values()],
        "cluster_id": node.catalogue.cluster_id or None,
        "controller_id": node.placement.controller_id,
        "topics": await _topics(context, request),
        "cluster_authorized_operations": cluster_operations(context) if wants_cluster else OPERATIONS_UNASKED,
    }


async def _topics(context: Context, request: Message) -> list[Reply]:
    asked = request.topics
    # Version 0 had no null: an empty list meant all.
    if asked is None or (context.version == 0 and not asked):
        visible = (t for t in context.node.catalogue.topics.values() if context.may("describe", "topic", t.name))
        return [_describe(context, request, topic) for topic in visible]
    # Each topic is described once, however often it is asked for: answers must not grow much larger than questions.
    wanted = list({(one.name, one.topic_id): one for one in asked}.values())
    refused: dict[str, Exception] = {}
    node = context.node
    # Only the controller makes topics; a client that asks another node asks again, and it asks them all in turn.
    is_controller = node.placement.controller_id == node.catalogue.node_id
    if request.allow_auto_topic_creation and node.config.log.auto_create_topics and is_controller:
        refused = await _create_missing(context, wanted)
    return [_answer(context, request, one, refused) for one in wanted]


async def _create_missing(context: Context, wanted: list[Message]) -> dict[str, Exception]:
    """Create the topics that are asked for by name and do not exist; return why not, for those that were not."""
    catalogue = context.node.catalogue
    missing = [one.name for one in wanted if one.name is not None and one.name not in catalogue.topics]
    checked: list[NewTopic] = []
    refused: dict[str, Exception] = {}

    def plan() -> Change | None:
        for name in missing:
            try:
                if not context.may("admin", "topic", name):
                    raise NotAuthorized(f"There is no topic {name!r}, and you may not create it.")
                if name not in catalogue.topics:  # Another request may have been first.
                    checked.append(new_topic(context, name))
            except WalstreamError as error:
                refused[name] = error
        return creation(context, checked)

    try:
        if missing:
            await change_catalogue(context.node.store, plan)
    except Exception as error:
        refused |= {new.name: error for new in checked}
    return refused


def _answer(context: Context, request: Message, asked: Message, refused: dict[str, Exception]) -> Reply:
    """Describe one topic that was asked for by name or by id."""
    catalogue = context.node.catalogue
    try:
        if asked.name is None:
            topic = catalogue.topic_by_id(asked.topic_id)
            context.authorize("describe", "topic", topic.name)
        else:
            context.authorize("describe", "topic", asked.name)
            if asked.name in refused:
                raise refused[asked.name]
            topic = catalogue.topic(asked.name)
    except Exception as error:
        # Before version 12 the name may not be null.
        name = asked.name if asked.name is not None or context.version >= 12 else ""
        return {"name": name, "topic_id": asked.topic_id, **code_of(context, error)}
    return _describe(context, request, topic)


def _describe(context: Context, request: Message, topic: Topic) -> Reply:
    placement = context.node.placement
    wants_operations = request.include_topic_authorized_operations
    return {
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": topic.is_internal,
        "topic_authorized_operations": topic_operations(context, topic.name)
        if wants_operations
        else OPERATIONS_UNASKED,
        "partitions": [_partition(placement.find(topic, index), index) for index in range(topic.partitions)],
    }


def _partition(placed: Placed, index: int) -> Reply:
    return {
        "error_code": 0 if placed.leader != NOBODY else codes(LeaderNotAvailable).kafka,
        "partition_index": index,
        "leader_id": placed.leader,
        "leader_epoch": placed.epoch,
        "replica_nodes": list(placed.replicas),
        "isr_nodes": list(placed.in_sync),
        "offline_replicas": [],
    }
