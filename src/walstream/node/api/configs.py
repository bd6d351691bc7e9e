"""DescribeConfigs, IncrementalAlterConfigs and AlterConfigs: a topic's settings, and the node's configuration to read.

Topic settings have Kafka's names and are changed here. The node's configuration has walstream's own names
(`section.key`) and is changed in its file and by a restart, so an attempt to change it here is refused with that hint.

A *hold* belongs to whoever reads the topic, a feed, and so does the order by append time that it reads by. While one is
set, no request takes the topic's append time, also not one that ends the hold as well: what the records that came
meanwhile lack cannot be given back to them. A hold ends when a request names it and nothing else ends it, so that to go
on without is somebody's decision, not the side effect of a replacement that did not know of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from walstream.cluster.local import Change, Topic
from walstream.config import NODE_SECTIONS, value_of
from walstream.config import fields as config_fields
from walstream.errors import InvalidRequest, InvalidTopicConfig, PolicyViolation
from walstream.log.settings import BY_NAME, NO_HOLD, TopicSettings, usable
from walstream.node.api.answers import failure
from walstream.node.catalogue_changes import change_catalogue
from walstream.node.context import Context
from walstream.node.wire import Message, Reply

TOPIC, BROKER = 2, 4
FROM_TOPIC, FROM_FILE, FROM_DEFAULT = 1, 4, 5
"""Where a value comes from, in Kafka's numbers."""

SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3
LISTS = frozenset({"cleanup.policy"})
HOLD = ("walstream.hold.from.ms", "walstream.hold.bytes.max")

_BOOLEAN, _STRING, _LONG, _DOUBLE, _LIST = 1, 2, 5, 6, 7
_SENSITIVE = frozenset({"security.users"})


async def describe_configs(context: Context, request: Message) -> Reply:
    """Return the settings of topics and of the node."""
    # Each resource is described once, however often it is asked for: answers must not grow much larger than questions.
    wanted = {(one.resource_type, one.resource_name): one for one in request.resources}
    results = []
    for resource in wanted.values():
        results.append(_describe(context, request, resource))
        await asyncio.sleep(0)
    return {"results": results}


def _describe(context: Context, request: Message, resource: Message) -> Reply:
    named = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
    try:
        if resource.resource_type == TOPIC:
            context.authorize("describe", "topic", resource.resource_name)
            topic = context.node.catalogue.topic(resource.resource_name)
            of_node = context.node.catalogue.settings(Topic(topic.name, topic.id, topic.partitions))
            entries = [_topic_entry(topic, name, of_node.text(name)) for name in BY_NAME]
        elif resource.resource_type == BROKER:
            context.authorize("describe", "cluster")
            _check_node(context, resource.resource_name)
            entries = _node_entries(context)
        else:
            raise InvalidRequest(f"Resources of type {resource.resource_type} have no configuration here.")
    except Exception as error:
        return {**named, **failure(context, error)}
    keys = set(resource.configuration_keys or ())
    chosen = [entry for entry in entries if not keys or entry["name"] in keys]
    for entry in chosen:
        if not request.include_synonyms:
            entry["synonyms"] = []
        if not request.include_documentation:
            entry["documentation"] = None
    return {**named, "configs": chosen}


def _topic_entry(topic: Topic, name: str, of_node: str) -> Reply:
    """Describe a setting: the topic's own value before the node's before the built-in one."""
    own, built_in = usable(topic.config).get(name), TopicSettings().text(name)
    synonyms = [{"name": name, "value": built_in, "source": FROM_DEFAULT}]
    if of_node != built_in:
        synonyms.insert(0, {"name": name, "value": of_node, "source": FROM_FILE})
    if own is not None:
        synonyms.insert(0, {"name": name, "value": own, "source": FROM_TOPIC})
    return {
        "name": name,
        "value": synonyms[0]["value"],
        "config_source": synonyms[0]["source"],
        "synonyms": synonyms,
        "config_type": _LIST if name in LISTS else _type_of(getattr(TopicSettings(), BY_NAME[name].field, "")),
        "documentation": BY_NAME[name].documentation,
    }


def _node_entries(context: Context) -> list[Reply]:
    entries: list[Reply] = []
    for name, field in config_fields():
        if name.split(".")[0] not in NODE_SECTIONS:
            continue
        value = value_of(context.node.config, name)
        is_sensitive = name in _SENSITIVE
        entries.append(
            {
                "name": name,
                "value": None if is_sensitive else _text(value),
                "read_only": True,
                "is_sensitive": is_sensitive,
                "config_source": FROM_DEFAULT if value == field.default else FROM_FILE,
                "synonyms": [],
                "config_type": _type_of(value),
                "documentation": field.description,
            }
        )
    return entries


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps([one if isinstance(one, str) else one.model_dump() for one in value])
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_of(value: Any) -> int:
    kinds = {bool: _BOOLEAN, int: _LONG, float: _DOUBLE, tuple: _LIST}
    return kinds.get(type(value), _STRING)


def _check_node(context: Context, name: str) -> None:
    if name not in ("", str(context.node.catalogue.node_id)):
        raise InvalidRequest(f"There is no node {name!r}; this is node {context.node.catalogue.node_id}.")


async def incremental_alter_configs(context: Context, request: Message) -> Reply:
    """Set, reset, extend or shorten single settings of topics."""
    return await _alter(context, request, _apply)


async def alter_configs(context: Context, request: Message) -> Reply:
    """Replace all settings of topics."""
    return await _alter(context, request, _replace)


Altered = Callable[[Topic, Message, TopicSettings], dict[str, str]]


async def _alter(context: Context, request: Message, altered: Altered) -> Reply:
    responses = []
    for resource in {(one.resource_type, one.resource_name): one for one in request.resources}.values():
        reply: Reply = {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
        try:
            plan = partial(_alteration, context, resource, altered, validate_only=request.validate_only)
            await change_catalogue(context.node.store, plan)
        except Exception as error:
            reply |= failure(context, error)
        responses.append(reply)
        await asyncio.sleep(0)  # What is refused waits for nothing: other clients have their turn in between.
    return {"responses": responses}


def _alteration(context: Context, resource: Message, altered: Altered, *, validate_only: bool) -> Change | None:
    if resource.resource_type != TOPIC:
        context.authorize("admin", "cluster")
        raise InvalidRequest(
            "Only the settings of topics change while the node runs.",
            "Change the node's configuration in its file and restart it.",
        )
    context.authorize("admin", "topic", resource.resource_name)
    node = context.node
    node.placement.check_controller()
    topic = node.catalogue.topic(resource.resource_name)
    if len({entry.name for entry in resource.configs}) < len(resource.configs):
        raise InvalidRequest("The request names a setting twice.")
    config = altered(topic, resource, node.catalogue.settings(topic))
    change = node.catalogue.configure(topic.name, config)
    _check_hold(topic, node.catalogue.settings(topic), node.catalogue.settings(replace(topic, config=config)))
    return None if validate_only else change


def _check_hold(topic: Topic, before: TopicSettings, after: TopicSettings) -> None:
    """Refuse to take the append time of a topic that is held. Raises PolicyViolation."""
    if before.hold_from_ms == NO_HOLD or not before.append_time or after.append_time:
        return
    raise PolicyViolation(
        f"{topic.name} is held by a feed ({HOLD[0]}={before.hold_from_ms}), which reads it in the order of append "
        "times: records without them would be passed over. message.timestamp.type stays LogAppendTime.",
        "Take the topic out of feed.topics, or end the feed; then end the hold, in a request of its own: "
        f"walstream topic alter {topic.name} --set {HOLD[0]}={NO_HOLD}",
    )


def _apply(topic: Topic, resource: Message, settings: TopicSettings) -> dict[str, str]:
    """Return the topic's settings after the operations."""
    config = dict(topic.config)
    for entry in resource.configs:
        is_reset = entry.config_operation == DELETE and entry.name in config
        if entry.name not in BY_NAME and not is_reset:
            raise InvalidTopicConfig(f"There is no topic setting {entry.name!r}.", f"Known: {', '.join(BY_NAME)}.")
        if entry.config_operation == DELETE:
            config.pop(entry.name, None)
            continue
        if entry.value is None:
            raise InvalidTopicConfig(f"{entry.name} needs a value.")
        if entry.config_operation == SET:
            config[entry.name] = entry.value
        elif entry.config_operation in (APPEND, SUBTRACT) and entry.name in LISTS:
            config[entry.name] = _changed_list(settings.text(entry.name), entry)
        else:
            raise InvalidRequest(f"Operation {entry.config_operation} is not possible on {entry.name}.")
    return config


def _changed_list(present: str, entry: Message) -> str:
    words = [word for word in present.split(",") if word]
    given = [word.strip() for word in entry.value.split(",")]
    if entry.config_operation == APPEND:
        return ",".join(dict.fromkeys([*words, *given]))
    return ",".join(word for word in words if word not in given)


def _replace(topic: Topic, resource: Message, settings: TopicSettings) -> dict[str, str]:  # noqa: ARG001
    """Return the settings that the request gives; a hold stays unless the request names it."""
    given: dict[str, str | None] = {name: topic.config.get(name) for name in HOLD}
    given |= {entry.name: entry.value for entry in resource.configs}
    return {name: value for name, value in given.items() if value is not None}
